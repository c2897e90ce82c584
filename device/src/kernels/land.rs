//! Level 2 of the reduce-scatter: folds one wave of node partials into a rank's output [TIDE §4.2, eq. 5].
//!
//! Launch: any grid and block; no shared memory.
//!
//! Inputs: the wave's inbox generation at every local rank: `[L][L][part_elems]` fp32, block `s`, row `l`.
//! Output: `accumulator` (waves before the last) or `out` (the last), this rank's packed row, fp32: the part of every
//! sub-slice that the pass takes.
//!
//! ```text
//! for each sub-slice s, for each unit of it:
//!     wave = Σ over local ranks j of inbox_j[s][own row]          (in the switch, or by peer loads in order of j)
//!     total = first wave ? wave : accumulator + wave
//!     last wave ? out ← finish(accumulate ? out : 0, α, total) : accumulator ← total
//! ```
//!
//! Blocks that the wave did not write are zero (I1): the switch adds them, the peer form adds one `+0.0` for them all,
//! which gives the same bits.

use super::numerics::{ADD_IDENTITY, add4, finish};
use crate::abi::params::{LOCAL_RANKS_MAX, LandForm, LandParams};
use crate::arch::{global, multimem, thread};

const UNIT_ELEMS: u64 = 4;

/// How a wave is read; chosen at compile time, so that a module without multicast has none in it.
pub trait Form {
    /// The form.
    const FORM: LandForm;
}

/// [`LandForm::Multimem`].
pub struct Multimem;
/// [`LandForm::Peer`].
pub struct Peer;

impl Form for Multimem {
    const FORM: LandForm = LandForm::Multimem;
}
impl Form for Peer {
    const FORM: LandForm = LandForm::Peer;
}

/// The kernel.
///
/// # Safety
/// `params` points to a block that holds what [`LandParams`] states; every local rank's inbox has the wave, and what it
/// holds of another wave is zeroed.
#[inline(always)]
pub unsafe fn land<F: Form>(params: *const LandParams) {
    // SAFETY: the caller's promise; the block is read-only during the launch.
    let p = unsafe { &*params };
    let thread = u64::from(thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x());
    let stride = u64::from(thread::grid_dim_x() * thread::block_dim_x()) * UNIT_ELEMS;
    let part_end = (p.part_first + p.part_elems).min(p.sub_slice_elems);
    for sub_slice in 0..p.local_rank_count {
        let sub_slice_first = u64::from(sub_slice) * p.sub_slice_elems;
        let first = sub_slice_first + p.part_first;
        let end = (sub_slice_first + part_end).min(p.packed_elems);
        let elems = end.saturating_sub(first);
        let row = 4 * p.part_elems * u64::from(sub_slice * p.local_rank_count + p.local_rank);
        let mut at = thread * UNIT_ELEMS;
        while at < elems {
            let wave = match F::FORM {
                // SAFETY: inside the block's row, 16-aligned: `at` and the capacity are multiples of a unit.
                LandForm::Multimem => unsafe { multimem::ld_reduce_add_v4_f32(p.multicast + row + 4 * at) },
                LandForm::Peer => peer_sum(p, sub_slice, row + 4 * at),
            };
            land_unit(p, first + at, wave, elems - at);
            at += stride;
        }
    }
}

/// The wave's partials at byte `offset` of every inbox, in the order of the local rank that holds them.
#[inline(always)]
fn peer_sum(p: &LandParams, sub_slice: u32, offset: u64) -> [f32; 4] {
    let mut sum = [ADD_IDENTITY; 4];
    let mut held = 0;
    for j in 0..LOCAL_RANKS_MAX as u32 {
        // Local rank j holds the contributor with c̄ mod L = (s − j) mod L [TIDE eq. 8].
        let contributor = (sub_slice + p.local_rank_count - j % p.local_rank_count) % p.local_rank_count;
        if j < p.local_rank_count && p.holder_mask >> contributor & 1 == 1 {
            held += 1;
            // SAFETY: inside the block's row of local rank j's inbox, 16-aligned; the wave's arrival at every local
            // rank was awaited before the launch.
            let partial = unsafe { global::load_relaxed_sys_v4_f32(p.inboxes[j as usize] + offset) };
            sum = add4(sum, partial);
        }
    }
    if held < p.local_rank_count { add4(sum, [0.0; 4]) } else { sum }
}

/// Lands a unit at `at`, an element of the packed row; `elems` of it exist.
#[inline(always)]
fn land_unit(p: &LandParams, at: u64, wave: [f32; 4], elems: u64) {
    let accumulator = p.accumulator + 4 * at;
    let total = if p.first_wave == 1 {
        wave
    } else {
        // SAFETY: the accumulator has the capacity of all sub-slices, each a multiple of a unit; this one is the thread's.
        add4(unsafe { global::load_v4_b32(accumulator) }.map(f32::from_bits), wave)
    };
    if p.last_wave == 0 {
        // SAFETY: as above.
        unsafe { global::store_v4_f32(accumulator, total) };
        return;
    }
    let out = p.out + 4 * at;
    if elems >= UNIT_ELEMS {
        // SAFETY: four elements of the output, 16-aligned.
        let base = if p.accumulate == 1 { unsafe { global::load_v4_b32(out) }.map(f32::from_bits) } else { [0.0; 4] };
        let lane = |i: usize| finish(base[i], p.alpha, total[i]);
        // SAFETY: as above.
        unsafe { global::store_v4_f32(out, [lane(0), lane(1), lane(2), lane(3)]) };
    } else {
        for i in 0..UNIT_ELEMS {
            if i < elems {
                let lane = out + 4 * i;
                // SAFETY: one element of the output.
                let base = if p.accumulate == 1 { f32::from_bits(unsafe { global::load_b32(lane) }) } else { 0.0 };
                // SAFETY: as above.
                unsafe { global::store_f32(lane, finish(base, p.alpha, total[i as usize])) };
            }
        }
    }
}

//! The FSDP2-like baseline, and the path of groups that the fast one does not take: gradients packed into one rank-major
//! fp32 buffer, then a flat reduce-scatter of it [TIDE §2.1, eq. 3].
//!
//! Launch: any grid and block; no shared memory.

use super::numerics::{ADD_IDENTITY, finish};
use crate::abi::params::{FlatSumParams, PackParams};
use crate::abi::segment::Segment;
use crate::arch::{global, thread};

fn thread_and_stride() -> (u64, u64) {
    let thread = thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x();
    (u64::from(thread), u64::from(thread::grid_dim_x() * thread::block_dim_x()))
}

/// Slices, zero-pads, upcasts and packs all gradients of a rank.
///
/// # Safety
/// `params` points to a block that holds what [`PackParams`] states.
#[inline(always)]
pub unsafe fn pack(params: *const PackParams) {
    // SAFETY: the caller's promise; block and tables are read-only during the launch.
    let p = unsafe { &*params };
    let (thread, stride) = thread_and_stride();
    for index in 0..p.segment_count {
        // SAFETY: inside the table.
        let segment = unsafe { *(p.segments as *const Segment).add(index as usize) };
        // SAFETY: a segment's gradient is below the count of gradients.
        let gradient = unsafe { *(p.gradients as *const u64).add(segment.gradient as usize) };
        for rank in 0..u64::from(p.rank_count) {
            let out = p.out + 4 * (rank * p.packed_elems + segment.packed_first);
            let mut at = thread;
            while at < segment.shard_elems() {
                let element = rank * segment.shard_elems() + at;
                let value = if element < segment.live_elems && gradient != 0 {
                    load(gradient, element, p.item_bytes)
                } else {
                    0.0
                };
                // SAFETY: inside the packed buffer.
                unsafe { global::store_f32(out + 4 * at, value) };
                at += stride;
            }
        }
    }
}

#[inline(always)]
fn load(gradient: u64, element: u64, item_bytes: u32) -> f32 {
    let address = gradient + element * u64::from(item_bytes);
    // SAFETY: an element that exists.
    let bits =
        unsafe { if item_bytes == 2 { u32::from(global::load_b16(address)) << 16 } else { global::load_b32(address) } };
    f32::from_bits(bits)
}

/// One rank's row, summed over all ranks' packed buffers in rank order.
///
/// # Safety
/// `params` points to a block that holds what [`FlatSumParams`] states; every rank has packed.
#[inline(always)]
pub unsafe fn flat_sum(params: *const FlatSumParams) {
    // SAFETY: the caller's promise; block and table are read-only during the launch.
    let p = unsafe { &*params };
    let (mut at, stride) = thread_and_stride();
    while at < p.packed_elems {
        let offset = 4 * (u64::from(p.rank) * p.packed_elems + at);
        let mut sum = ADD_IDENTITY;
        for rank in 0..p.rank_count {
            // SAFETY: inside that rank's packed buffer.
            sum += f32::from_bits(unsafe {
                let packed = *(p.packed as *const u64).add(rank as usize);
                global::load_b32(packed + offset)
            });
        }
        let out = p.out + 4 * at;
        // SAFETY: one element of the output.
        let base = if p.accumulate == 1 { f32::from_bits(unsafe { global::load_b32(out) }) } else { 0.0 };
        // SAFETY: as above.
        unsafe { global::store_f32(out, finish(base, p.alpha, sum)) };
        at += stride;
    }
}

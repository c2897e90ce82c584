//! A group's fp32 shards into one packed bf16 shard, in one launch: the fused cast of a mixed-precision all-gather
//! [TIDE §3.1]. Rounds to nearest even; a NaN becomes `0x7fff`.
//!
//! Launch: any grid and block; no shared memory.

use crate::abi::params::{CastParams, CastSegment};
use crate::arch::machine::Machine;
use crate::arch::{Target, global, thread};

const UNIT_ELEMS: u64 = 4;

/// The kernel.
///
/// # Safety
/// `params` points to a block that holds what [`CastParams`] states.
#[inline(always)]
pub unsafe fn cast(params: *const CastParams) {
    // SAFETY: the caller's promise; block and table are read-only during the launch.
    let p = unsafe { &*params };
    let thread = u64::from(thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x());
    let stride = u64::from(thread::grid_dim_x() * thread::block_dim_x()) * UNIT_ELEMS;
    for index in 0..p.segment_count {
        // SAFETY: inside the table.
        let segment = unsafe { *(p.segments as *const CastSegment).add(index as usize) };
        let out = p.out + 2 * segment.packed_first;
        let aligned = segment.source.is_multiple_of(16) && out.is_multiple_of(8);
        let mut at = thread * UNIT_ELEMS;
        while at < segment.elems {
            cast_unit(segment.source + 4 * at, out + 2 * at, segment.elems - at, aligned);
            at += stride;
        }
    }
}

#[inline(always)]
fn cast_unit(source: u64, out: u64, elems: u64, aligned: bool) {
    if aligned && elems >= UNIT_ELEMS {
        // SAFETY: four elements of the shard, aligned as checked.
        let unit = unsafe { global::load_v4_b32(source) };
        let lane = |i: usize| u64::from(Target::cvt_rn_bf16_f32(f32::from_bits(unit[i]))) << (16 * i);
        // SAFETY: four elements of the packed shard, aligned as checked.
        unsafe { global::store_b64(out, lane(0) | lane(1) | lane(2) | lane(3)) };
    } else {
        for i in 0..UNIT_ELEMS {
            if i < elems {
                // SAFETY: one element of the shard and of the packed shard.
                unsafe {
                    let value = f32::from_bits(global::load_b32(source + 4 * i));
                    global::store_b16(out + 2 * i, Target::cvt_rn_bf16_f32(value));
                }
            }
        }
    }
}

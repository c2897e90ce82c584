//! Asynchronous bulk copies between global and shared memory.

use super::Target;
use super::machine::{Machine, SharedAddr};
use super::mbarrier::Mbarrier;

/// Bulk copies move multiples of this many bytes between addresses aligned to it.
pub const ALIGN_BYTES: u32 = 16;

/// Copies `bytes` from global to shared memory; `barrier` counts them.
///
/// # Safety
/// See [`Machine::bulk_load`].
#[inline(always)]
pub unsafe fn load(destination: SharedAddr, source: u64, bytes: u32, barrier: Mbarrier) {
    // SAFETY: the caller's promise.
    unsafe { Target::bulk_load(destination, source, bytes, barrier.address()) }
}

/// Copies `bytes` from shared to global memory, in the caller's current group.
///
/// # Safety
/// See [`Machine::bulk_store`].
#[inline(always)]
pub unsafe fn store(destination: u64, source: SharedAddr, bytes: u32) {
    // SAFETY: the caller's promise.
    unsafe { Target::bulk_store(destination, source, bytes) }
}

/// Closes the caller's current group of stores.
#[inline(always)]
pub fn commit_group() {
    Target::bulk_commit_group();
}

/// Until at most `PENDING` groups still read their source: the others' sources may be overwritten.
#[inline(always)]
pub fn wait_group_read<const PENDING: u32>() {
    Target::bulk_wait_group_read::<PENDING>();
}

/// Until at most `PENDING` groups are incomplete: what the others wrote is visible to the caller.
#[inline(always)]
pub fn wait_group<const PENDING: u32>() {
    Target::bulk_wait_group::<PENDING>();
}

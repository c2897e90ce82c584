//! Atomic accesses to words that other agents of the system read and write. Order and scope stand in the name.

use super::Target;
use super::machine::Machine;

/// Loads a word; later accesses of the caller see what its writer released.
///
/// # Safety
/// See [`Machine::ld_acquire_sys_b64`].
#[inline(always)]
pub unsafe fn load_acquire_sys(address: u64) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { Target::ld_acquire_sys_b64(address) }
}

/// Stores a word after everything the caller did before.
///
/// # Safety
/// See [`Machine::st_release_sys_b64`].
#[inline(always)]
pub unsafe fn store_release_sys(address: u64, value: u64) {
    // SAFETY: the caller's promise.
    unsafe { Target::st_release_sys_b64(address, value) }
}

/// Adds to a word after everything the caller did before.
///
/// # Safety
/// See [`Machine::red_release_sys_add_u64`].
#[inline(always)]
pub unsafe fn add_release_sys(address: u64, value: u64) {
    // SAFETY: the caller's promise.
    unsafe { Target::red_release_sys_add_u64(address, value) }
}

/// Replaces `expected` by `value`; returns what was there.
///
/// # Safety
/// See [`Machine::atom_acq_rel_sys_cas_b32`].
#[inline(always)]
pub unsafe fn compare_and_swap_acq_rel_sys(address: u64, expected: u32, value: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { Target::atom_acq_rel_sys_cas_b32(address, expected, value) }
}

//! Plain accesses to global memory, and the parameter blocks and tables that lie there.

use super::Target;
use super::machine::Machine;

/// Loads a bf16 or fp16 bit pattern.
///
/// # Safety
/// See [`Machine::ld_global_b16`].
#[inline(always)]
pub unsafe fn load_b16(address: u64) -> u16 {
    // SAFETY: the caller's promise.
    unsafe { Target::ld_global_b16(address) }
}

/// Loads 4 bytes.
///
/// # Safety
/// See [`Machine::ld_global_b32`].
#[inline(always)]
pub unsafe fn load_b32(address: u64) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { Target::ld_global_b32(address) }
}

/// Loads 8 bytes.
///
/// # Safety
/// See [`Machine::ld_global_b64`].
#[inline(always)]
pub unsafe fn load_b64(address: u64) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { Target::ld_global_b64(address) }
}

/// Loads 16 bytes.
///
/// # Safety
/// See [`Machine::ld_global_v4_b32`].
#[inline(always)]
pub unsafe fn load_v4_b32(address: u64) -> [u32; 4] {
    // SAFETY: the caller's promise.
    unsafe { Target::ld_global_v4_b32(address) }
}

/// Loads four fp32 that another GPU holds or wrote.
///
/// # Safety
/// See [`Machine::ld_relaxed_sys_v4_f32`].
#[inline(always)]
pub unsafe fn load_relaxed_sys_v4_f32(address: u64) -> [f32; 4] {
    // SAFETY: the caller's promise.
    unsafe { Target::ld_relaxed_sys_v4_f32(address) }
}

/// Stores a bf16 bit pattern.
///
/// # Safety
/// See [`Machine::st_global_b16`].
#[inline(always)]
pub unsafe fn store_b16(address: u64, value: u16) {
    // SAFETY: the caller's promise.
    unsafe { Target::st_global_b16(address, value) }
}

/// Stores one fp32.
///
/// # Safety
/// See [`Machine::st_global_b32`].
#[inline(always)]
pub unsafe fn store_f32(address: u64, value: f32) {
    // SAFETY: the caller's promise.
    unsafe { Target::st_global_b32(address, value.to_bits()) }
}

/// Stores 8 bytes.
///
/// # Safety
/// See [`Machine::st_global_b64`].
#[inline(always)]
pub unsafe fn store_b64(address: u64, value: u64) {
    // SAFETY: the caller's promise.
    unsafe { Target::st_global_b64(address, value) }
}

/// Stores four fp32.
///
/// # Safety
/// See [`Machine::st_global_v4_f32`].
#[inline(always)]
pub unsafe fn store_v4_f32(address: u64, value: [f32; 4]) {
    // SAFETY: the caller's promise.
    unsafe { Target::st_global_v4_f32(address, value) }
}

//! Reductions in the switch.

use super::Target;
use super::machine::Machine;

/// The fp32 sum of four consecutive elements over all replicas behind a multicast address.
///
/// # Safety
/// See [`Machine::multimem_ld_reduce_add_v4_f32`].
#[inline(always)]
pub unsafe fn ld_reduce_add_v4_f32(address: u64) -> [f32; 4] {
    // SAFETY: the caller's promise.
    unsafe { Target::multimem_ld_reduce_add_v4_f32(address) }
}

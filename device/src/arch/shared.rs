//! A block's shared memory.

use super::Target;
use super::machine::Machine;
pub use super::machine::SharedAddr;

/// Alignment of [`dynamic`], bytes.
pub const ALIGN_BYTES: u32 = 1024;

/// The block's dynamic shared memory.
#[inline(always)]
pub fn dynamic() -> SharedAddr {
    Target::dynamic_shared()
}

/// Loads 8 bytes.
///
/// # Safety
/// See [`Machine::ld_shared_b64`].
#[inline(always)]
pub unsafe fn load_b64(address: SharedAddr) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { Target::ld_shared_b64(address) }
}

/// Loads 16 bytes.
///
/// # Safety
/// See [`Machine::ld_shared_v4_b32`].
#[inline(always)]
pub unsafe fn load_v4_b32(address: SharedAddr) -> [u32; 4] {
    // SAFETY: the caller's promise.
    unsafe { Target::ld_shared_v4_b32(address) }
}

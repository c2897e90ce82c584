//! Barriers in shared memory that count arrivals and bytes.

use super::Target;
use super::machine::{Machine, SharedAddr};

/// Bytes of an mbarrier.
pub const BYTES: u32 = 8;

/// An mbarrier at an address of shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Mbarrier(SharedAddr);

impl Mbarrier {
    /// The barrier at `address`, initialised or about to be.
    #[inline(always)]
    pub const fn at(address: SharedAddr) -> Self {
        Self(address)
    }

    /// Starts phase 0, which `count` arrivals complete. Follow it by
    /// [`super::fence::mbarrier_init`] and a block barrier.
    ///
    /// # Safety
    /// See [`Machine::mbarrier_init`].
    #[inline(always)]
    pub unsafe fn init(self, count: u32) {
        // SAFETY: the caller's promise.
        unsafe { Target::mbarrier_init(self.0, count) }
    }

    /// Arrives.
    ///
    /// # Safety
    /// See [`Machine::mbarrier_arrive`].
    #[inline(always)]
    pub unsafe fn arrive(self) {
        // SAFETY: the caller's promise.
        unsafe { Target::mbarrier_arrive(self.0) }
    }

    /// Expects `bytes` more in this phase and arrives.
    ///
    /// # Safety
    /// See [`Machine::mbarrier_arrive_expect_tx`].
    #[inline(always)]
    pub unsafe fn arrive_expect_tx(self, bytes: u32) {
        // SAFETY: the caller's promise.
        unsafe { Target::mbarrier_arrive_expect_tx(self.0, bytes) }
    }

    /// Whether the phase of this parity is complete.
    ///
    /// # Safety
    /// See [`Machine::mbarrier_try_wait_parity`].
    #[inline(always)]
    pub unsafe fn try_wait_parity(self, parity: u32) -> bool {
        // SAFETY: the caller's promise.
        unsafe { Target::mbarrier_try_wait_parity(self.0, parity) }
    }

    /// The address, for a bulk copy that completes here.
    #[inline(always)]
    pub const fn address(self) -> SharedAddr {
        self.0
    }
}

//! The element types that Level 1 reads.

use crate::arch::global;
use crate::arch::shared::{self, SharedAddr};

/// Elements of a unit: what a thread loads, adds and stores at once. Four fp32 are a 16-byte store.
pub const UNIT_ELEMS: u32 = 4;

/// A gradient element type and its unit of [`UNIT_ELEMS`].
pub trait Gradient {
    /// Bytes of an element.
    const BYTES: u32;
    /// Bytes of a unit; a unit is loaded at once from addresses aligned to it.
    const UNIT_BYTES: u32 = Self::BYTES * UNIT_ELEMS;
    /// A unit as it is stored.
    type Unit: Copy;
    /// Four zeros.
    const ZERO: Self::Unit;

    /// Loads a unit from shared memory.
    ///
    /// # Safety
    /// `address` valid for a unit and aligned to it; nobody writes there.
    unsafe fn load_shared(address: SharedAddr) -> Self::Unit;
    /// Loads a unit from global memory.
    ///
    /// # Safety
    /// As [`Gradient::load_shared`].
    unsafe fn load_global(address: u64) -> Self::Unit;
    /// `unit` with element `lane` loaded from global memory.
    ///
    /// # Safety
    /// `address` valid for one element and aligned to it; nobody writes there.
    unsafe fn with_lane(unit: Self::Unit, lane: u32, address: u64) -> Self::Unit;
    /// The unit in fp32, exactly.
    fn widen(unit: Self::Unit) -> [f32; 4];
}

/// bf16: the upper half of an fp32.
pub struct Bf16;

impl Gradient for Bf16 {
    const BYTES: u32 = 2;
    type Unit = u64;
    const ZERO: u64 = 0;

    #[inline(always)]
    unsafe fn load_shared(address: SharedAddr) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { shared::load_b64(address) }
    }

    #[inline(always)]
    unsafe fn load_global(address: u64) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { global::load_b64(address) }
    }

    #[inline(always)]
    unsafe fn with_lane(unit: u64, lane: u32, address: u64) -> u64 {
        // SAFETY: the caller's promise.
        unit | u64::from(unsafe { global::load_b16(address) }) << (16 * lane)
    }

    #[inline(always)]
    fn widen(unit: u64) -> [f32; 4] {
        let (low, high) = (unit as u32, (unit >> 32) as u32);
        [low << 16, low & 0xffff_0000, high << 16, high & 0xffff_0000].map(f32::from_bits)
    }
}

/// fp32.
pub struct Fp32;

impl Gradient for Fp32 {
    const BYTES: u32 = 4;
    type Unit = [u32; 4];
    const ZERO: [u32; 4] = [0; 4];

    #[inline(always)]
    unsafe fn load_shared(address: SharedAddr) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { shared::load_v4_b32(address) }
    }

    #[inline(always)]
    unsafe fn load_global(address: u64) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { global::load_v4_b32(address) }
    }

    #[inline(always)]
    unsafe fn with_lane(unit: [u32; 4], lane: u32, address: u64) -> [u32; 4] {
        // SAFETY: the caller's promise.
        let bits = unsafe { global::load_b32(address) };
        // Selects instead of a run-time index, which would put the unit into local memory.
        let pick = |i: u32| if i == lane { bits } else { unit[i as usize] };
        [pick(0), pick(1), pick(2), pick(3)]
    }

    #[inline(always)]
    fn widen(unit: [u32; 4]) -> [f32; 4] {
        unit.map(f32::from_bits)
    }
}

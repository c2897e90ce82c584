//! The arithmetic that every path shares, so that no path rounds otherwise than another.
//!
//! * Sums are fp32, one rounding per addition (`add.rn.f32`), no flush to zero, no contraction.
//! * Level 1 adds the staged contributions in local-rank order, then the own one; Level 2 adds the
//!   node partials in the order of the local rank that holds them, waves in order [TIDE §4.3].
//! * [`finish`] is the one place where α and the previous output come in [TIDE eq. 5].

/// The identity of fp32 addition: `-0.0 + x` is `x` for every `x`, `-0.0` included. Sums start here.
pub const ADD_IDENTITY: f32 = -0.0;

/// `base + α·sum`, the output of equation 5: one rounding for the product, one for the sum.
///
/// `base` is the previous output, or `+0.0` where the call overwrites; so an exact zero comes out as `+0.0` unless the
/// previous output was `-0.0`. α is applied after the sum: an overflow to infinity stays one whatever α is. Every NaN
/// comes out as `0x7fff_ffff`, the one that a GPU's adder gives.
#[inline(always)]
pub fn finish(base: f32, alpha: f32, sum: f32) -> f32 {
    let value = base + alpha * sum;
    if value.is_nan() { f32::from_bits(0x7fff_ffff) } else { value }
}

/// Element-wise `a + b`.
#[inline(always)]
pub fn add4(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
    [a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]]
}

//! Signal words: 64-bit counters that only grow, one writer each (or adders that add one each).
//!
//! A wait compares with [`reached`], which survives the wrap of a counter.

/// Bytes of a signal word.
pub const SIGNAL_BYTES: u64 = 8;

/// Whether a counter that shows `seen` has reached `expected`, in arithmetic modulo 2^64: true for
/// the half of the values at and after `expected`.
pub const fn reached(seen: u64, expected: u64) -> bool {
    seen.wrapping_sub(expected) < 1 << 63
}

const _: () = {
    assert!(reached(3, 3) && reached(4, 3) && !reached(2, 3));
    assert!(reached(0, u64::MAX) && !reached(u64::MAX, 0));
};

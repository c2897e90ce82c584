//! Where a rank's packed row comes from: one segment per parameter that has elements.

use super::assert_layout;
use bytemuck::{Pod, Zeroable};

/// One parameter in the packed row of a destination rank, in elements.
///
/// Packed position `q` in `[packed_first, packed_end)` of rank `r` is element
/// `r·shard_elems + (q − packed_first)` of the parameter's gradient where that is below `live_elems`,
/// and padding (zero) elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Segment {
    /// First packed position, elements.
    pub packed_first: u64,
    /// One past the last packed position, elements.
    pub packed_end: u64,
    /// `D_p·K_p`: elements of the gradient that exist.
    pub live_elems: u64,
    /// Index of the gradient in the kernel's table of gradient addresses.
    pub gradient: u64,
}

impl Segment {
    /// `R_p·K_p`: elements of one rank's padded shard.
    pub const fn shard_elems(&self) -> u64 {
        self.packed_end - self.packed_first
    }
}

assert_layout!(Segment, size 32, packed_first at 0, packed_end at 8, live_elems at 16, gradient at 24);

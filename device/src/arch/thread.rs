//! Who a thread is.

use super::Target;
use super::machine::Machine;

/// Threads of a warp.
pub const WARP_SIZE: u32 = <Target as Machine>::WARP_SIZE;

/// Index of the thread in its block.
#[inline(always)]
pub fn thread_idx_x() -> u32 {
    Target::thread_idx_x()
}

/// Index of the block in its grid.
#[inline(always)]
pub fn block_idx_x() -> u32 {
    Target::block_idx_x()
}

/// Threads of a block.
#[inline(always)]
pub fn block_dim_x() -> u32 {
    Target::block_dim_x()
}

/// Blocks of the grid.
#[inline(always)]
pub fn grid_dim_x() -> u32 {
    Target::grid_dim_x()
}

/// Index of the thread's warp in its block.
#[inline(always)]
pub fn warp_idx() -> u32 {
    thread_idx_x() / WARP_SIZE
}

/// Whether the thread is the first of its warp. Roles of one thread per warp elect this one.
#[inline(always)]
pub fn is_warp_leader() -> bool {
    thread_idx_x().is_multiple_of(WARP_SIZE)
}

/// The multiprocessor that runs the thread.
#[inline(always)]
pub fn smid() -> u32 {
    Target::smid()
}

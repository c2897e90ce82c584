//! Block barriers, by name.

use super::machine::Machine;
use super::{Target, thread};

/// The named barriers of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Barrier {
    /// All threads of the block.
    Block = 0,
}

/// Waits until the whole block has come here.
///
/// Called by: the whole block, converged.
#[inline(always)]
pub fn sync_block() {
    // SAFETY: barrier 0 is this function's alone, and every caller names the whole block, which is a
    // multiple of the warp size by the launch contract.
    unsafe { Target::barrier_sync(Barrier::Block as u32, thread::block_dim_x()) }
}

//! Returns credits once what they cover was read: the finalizer of a wave [TIDE App. G].
//!
//! Launch: one block of one warp, in stream order behind the wait that all local ranks have landed; dynamic shared memory
//! of [`Gin::shared_bytes`]. It ends with a flush: no launch leaves a post behind, so each begins with all of its share of the
//! network's queues.

use crate::abi::params::{Credit, FinalizeParams};
use crate::arch::{shared, thread};
use crate::gin::Gin;

/// The kernel.
///
/// # Safety
/// `params` points to a block that holds what [`FinalizeParams`] states, for a handle of the back end `G`.
#[inline(always)]
pub unsafe fn finalize<G: Gin>(params: *const FinalizeParams) {
    // SAFETY: the caller's promise; block and table are read-only during the launch.
    let p = unsafe { &*params };
    if thread::thread_idx_x() != 0 {
        return;
    }
    // SAFETY: the handle is of the back end `G`; this thread is alone.
    let mut gin = unsafe { G::open(p.gin, shared::dynamic(), p.deadline, p.rank) };
    for i in 0..p.credit_count {
        // SAFETY: inside the table, whose signals exist at the peers.
        unsafe {
            let credit = *(p.credits as *const Credit).add(i as usize);
            gin.signal(0, credit.peer, credit.signal);
        }
    }
    gin.flush();
}

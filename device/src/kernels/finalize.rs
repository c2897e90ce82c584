//! Returns credits once what they cover was read: the finalizer of a wave [TIDE App. G].
//!
//! Launch: one block of one warp, in stream order behind the wait that all local ranks have landed; dynamic shared memory
//! of [`Gin::shared_bytes`].

use crate::abi::params::{Credit, Deadline, FinalizeParams};
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
    let no_waits = Deadline { timeout_ns: 0, fault: 0, claim: 0 };
    // SAFETY: the handle is of the back end `G`; this thread is alone. Signals without puts wait for nothing.
    let mut gin = unsafe { G::open(p.gin, shared::dynamic(), no_waits, 0) };
    for i in 0..p.credit_count {
        // SAFETY: inside the table, whose signals exist at the peers.
        unsafe {
            let credit = *(p.credits as *const Credit).add(i as usize);
            gin.signal(0, credit.peer, credit.signal);
        }
    }
}

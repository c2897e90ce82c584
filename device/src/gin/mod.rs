//! The network as a kernel sees it, in the terms of NCCL's GIN.
//!
//! * A **context** is an ordered lane to every peer. Puts of different contexts are unordered.
//! * A **put** is asynchronous and one-sided. Its data is visible at the target once a signal says so.
//! * A **strong signal** that is seen makes visible its own put and all earlier puts of its context to that peer.
//! * A **flush** makes every source of the caller's earlier puts reusable; it says nothing of the target.
//! * Signals only grow and outlive launches: a wait names the value that it wants to see reached.
//!
//! Every call is made by one thread.

pub mod loopback;
pub mod nccl;

use crate::abi::params::Deadline;
use crate::arch::shared::SharedAddr;

/// One thread's hold on the network.
pub trait Gin: Sized {
    /// Shared memory that each posting thread needs, bytes, for this handle.
    ///
    /// # Safety
    /// `handle` is the address of this back end's handle.
    unsafe fn shared_bytes(handle: u64) -> u32;

    /// Opens the network for the calling thread.
    ///
    /// # Safety
    /// `handle` is the address of this back end's handle and outlives the launch; `shared` is valid for
    /// [`Gin::shared_bytes`], 128-aligned and the caller's alone. Waits of the back end's own obey `deadline` and
    /// report `rank`.
    unsafe fn open(handle: u64, shared: SharedAddr, deadline: Deadline, rank: u32) -> Self;

    /// Contexts.
    fn context_count(&self) -> u32;

    /// Puts `bytes` (a multiple of 16, possibly 0) from this rank's arena into the peer's; with `signal`,
    /// a strong signal that adds 1 follows.
    ///
    /// # Safety
    /// Both ranges lie in the arenas, 16-aligned; the source is unchanged until a flush; the peer has given
    /// credit for the destination.
    unsafe fn put(
        &mut self,
        context: u32,
        peer: u32,
        destination_offset: u64,
        source_offset: u64,
        bytes: u64,
        signal: Option<u32>,
    );

    /// Adds 1 to a signal of the peer, strongly.
    ///
    /// # Safety
    /// The signal exists at the peer.
    unsafe fn signal(&mut self, context: u32, peer: u32, signal: u32);

    /// Until the sources of all the caller's puts may be overwritten.
    fn flush(&mut self);

    /// The value of a signal here; later accesses see what it published.
    ///
    /// # Safety
    /// The signal exists here.
    unsafe fn read_signal(&self, signal: u32) -> u64;
}

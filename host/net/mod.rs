//! The rails: what a collective asks of the network between nodes, by either path.
//!
//! *Device path*: kernels post and wait themselves, through the handle that a [`Net`] gives them. *Host path*: the calls
//! below, enqueued in a stream. Signals are 64-bit counters of the arena that only grow; both paths leave the same values.

pub mod loopback;

use crate::error::Result;
use crate::gpu::{DevicePtr, Stream};
use crate::plan::{Node, Rank};
use tide_device::abi::fault::WaitTag;
use tide_device::abi::kernel::Kernel;
use tide_device::abi::params::Piece;

/// Who drives the network rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Path {
    /// The GPU itself: one block a rank posts puts, waits for credits and arrivals [TIDE App. G].
    #[default]
    Device,
    /// The host enqueues every put, signal and wait.
    Host,
}

/// A put on the host path.
#[derive(Debug, Clone, Copy)]
pub struct HostPut {
    /// The rank that sends.
    pub from: Rank,
    /// The node of its rail peer.
    pub to: Node,
    /// What lies where.
    pub piece: Piece,
    /// A signal at the peer that is raised once the data is there, and to what: one more than before.
    pub signal: Option<(u32, u64)>,
}

/// The rails over one arena.
pub trait Net: Send + Sync {
    /// The back end's name.
    fn name(&self) -> &'static str;
    /// Contexts of the device path.
    fn context_count(&self) -> u32;
    /// The network kernel of this back end.
    fn rounds_kernel(&self) -> Kernel;
    /// The finalizer of this back end.
    fn finalize_kernel(&self) -> Kernel;
    /// A rank's handle for these kernels.
    fn handle(&self, rank: Rank) -> DevicePtr;
    /// Dynamic shared memory that each warp of these kernels needs, bytes.
    fn shared_bytes_per_warp(&self) -> u32;

    /// Enqueues a put, and its signal if it has one.
    ///
    /// # Errors
    /// What the back end refuses.
    fn put(&self, stream: Stream, put: &HostPut) -> Result<()>;
    /// Enqueues a signal alone: raises `signal` at the peer to `value`.
    ///
    /// # Errors
    /// What the back end refuses.
    fn signal(&self, stream: Stream, from: Rank, to: Node, signal: u32, value: u64) -> Result<()>;
    /// Enqueues a wait until `signal` of `rank` has reached `value`.
    ///
    /// # Errors
    /// What the back end refuses.
    fn wait(&self, stream: Stream, rank: Rank, signal: u32, value: u64, tag: WaitTag) -> Result<()>;
}

//! The network between ranks: the memory that they reach of each other, and the rails between nodes, by either path.
//!
//! *Device path*: kernels post and wait themselves, through the handle that a [`Net`] gives them. *Host path*: the calls
//! of [`Net`], enqueued in a stream. Signals are 64-bit counters that only grow; both paths count the same.

pub mod loopback;
#[cfg(feature = "nccl")]
pub mod nccl;

use crate::arena::SymmetricMemory;
use crate::error::Result;
use crate::gpu::{DevicePtr, Gpu, Stream};
use crate::launch::Exchange;
use crate::plan::{Node, Rank, RankRange, Topology};
use std::sync::{Arc, Mutex};
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

/// What a signal of the host path says. Of a collective, a rank has one signal of each kind from each rail peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalKind {
    /// A transfer is there.
    Data,
    /// The first bytes of a transfer are.
    Lead,
    /// What a put overwrites was read.
    Credit,
    /// The peer is ready for a round.
    Pace,
}

impl SignalKind {
    /// Every kind, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Data, Self::Lead, Self::Credit, Self::Pace];
}

/// A signal of the host path, and the value that it is raised to, one more than before, or awaited at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostSignal {
    /// What it says.
    pub kind: SignalKind,
    /// Its word in the arena of the rank that waits for it.
    pub word: u32,
    /// The value.
    pub value: u64,
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
    /// A signal at the peer that is raised once the data, and that of all earlier puts to it, is there.
    pub signal: Option<HostSignal>,
}

/// How the rails of a collective work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetOptions {
    /// Who drives the rounds.
    pub path: Path,
    /// Longest wait, ns.
    pub timeout_ns: u64,
    /// Contexts of the device path.
    pub context_count: u32,
}

/// How the ranks of a communicator reach each other.
///
/// Calls are collective: every process of the communicator makes the same ones in the same order.
pub trait Fabric: Send + Sync {
    /// The back end's name.
    fn name(&self) -> &'static str;
    /// The GPUs of this process.
    fn gpu(&self) -> &Arc<dyn Gpu>;
    /// All ranks.
    fn topology(&self) -> Topology;
    /// The ranks that this process drives.
    fn driven(&self) -> RankRange;
    /// The device that a driven rank runs on.
    fn device_of(&self, rank: Rank) -> u32;
    /// Allocates as many bytes on every rank.
    ///
    /// # Errors
    /// What the driver or the network's library refuses.
    fn allocate(self: Arc<Self>, bytes: u64) -> Result<Arc<dyn Window>>;
    /// How the processes talk to each other. Locked for one call at a time.
    fn exchange(&self) -> &Mutex<Box<dyn Exchange>>;
    /// Gives the network up after a failure, so that nothing in flight keeps waiting; nothing else is called then.
    fn abort(&self);
}

/// Memory that is as long on every rank, before rails are laid over it.
pub trait Window: SymmetricMemory {
    /// The rails over it; its signal words begin at the symmetric offset `signals_offset`.
    ///
    /// # Errors
    /// What the driver or the network's library refuses.
    fn connect(self: Arc<Self>, signals_offset: u64, options: NetOptions) -> Result<Arc<dyn Net>>;
}

/// The rails over one arena.
pub trait Net: Send + Sync {
    /// Contexts of the device path.
    fn context_count(&self) -> u32;
    /// The network kernel of this back end.
    fn rounds_kernel(&self) -> Kernel;
    /// The finalizer of this back end.
    fn finalize_kernel(&self) -> Kernel;
    /// A driven rank's handle for these kernels.
    fn handle(&self, rank: Rank) -> DevicePtr;
    /// Dynamic shared memory that each warp of these kernels needs, bytes.
    fn shared_bytes_per_warp(&self) -> u32;

    /// Enqueues a put, and its signal if it has one.
    ///
    /// # Errors
    /// What the back end refuses.
    fn put(&self, stream: Stream, put: &HostPut) -> Result<()>;
    /// Enqueues a signal alone, at the rail peer of `from` on `to`.
    ///
    /// # Errors
    /// What the back end refuses.
    fn signal(&self, stream: Stream, from: Rank, to: Node, signal: HostSignal) -> Result<()>;
    /// Enqueues `rank`'s wait for a signal that its rail peer on `from` raises.
    ///
    /// # Errors
    /// What the back end refuses.
    fn wait(&self, stream: Stream, rank: Rank, from: Node, signal: HostSignal, tag: WaitTag) -> Result<()>;
}

//! Rails between ranks of one process: every arena is an address. Puts of the host path are copies, signals are memory
//! writes; the device path is `tide_device::gin::loopback`.

use super::{HostPut, Net};
use crate::arena::Arena;
use crate::error::Result;
use crate::gpu::{Copy2d, DeviceBuffer, DevicePtr, Gpu, MemoryWait, Stream};
use crate::plan::{Node, Rank};
use std::sync::Arc;
use tide_device::abi::fault::WaitTag;
use tide_device::abi::kernel::Kernel;
use tide_device::abi::params::{LoopbackHandle, Piece};
use tide_device::gin::loopback::shared_bytes;

/// The loopback network over one arena.
pub struct Loopback {
    gpu: Arc<dyn Gpu>,
    arena: Arc<Arena>,
    timeout_ns: u64,
    context_count: u32,
    bounce_bytes: u32,
    handles: Vec<DeviceBuffer>,
    /// The tables that the handles point to.
    _tables: Vec<DeviceBuffer>,
}

impl Loopback {
    /// Gives every rank of the arena a handle.
    ///
    /// # Errors
    /// As [`Gpu::allocate`] and [`Gpu::upload`].
    pub fn new(
        gpu: &Arc<dyn Gpu>,
        arena: &Arc<Arena>,
        context_count: u32,
        timeout_ns: u64,
        device_of: impl Fn(Rank) -> u32,
    ) -> Result<Self> {
        let topology = arena.topology();
        let bounce_bytes = gpu.properties(0).shape.bounce_bytes;
        let (mut handles, mut tables) = (Vec::new(), Vec::new());
        for rank in topology.ranks() {
            let local = topology.local_of(rank);
            let arenas: Vec<u64> = topology.nodes().map(|n| arena.base(topology.rank(n, local)).0).collect();
            let table = DeviceBuffer::from_slice(gpu, device_of(rank), &arenas)?;
            let handle = LoopbackHandle {
                arenas: table.address().0,
                signals_offset: arena.signals_offset(),
                context_count,
                bounce_bytes,
                own_node: topology.node_of(rank).0,
                reserved: 0,
            };
            handles.push(DeviceBuffer::from_slice(gpu, device_of(rank), &[handle])?);
            tables.push(table);
        }
        let (gpu, arena) = (Arc::clone(gpu), Arc::clone(arena));
        Ok(Self { gpu, arena, timeout_ns, context_count, bounce_bytes, handles, _tables: tables })
    }

    fn peer(&self, from: Rank, to: Node) -> Rank {
        let topology = self.arena.topology();
        topology.rank(to, topology.local_of(from))
    }
}

impl Net for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn context_count(&self) -> u32 {
        self.context_count
    }

    fn rounds_kernel(&self) -> Kernel {
        Kernel::NetLoopback
    }

    fn finalize_kernel(&self) -> Kernel {
        Kernel::FinalizeLoopback
    }

    fn handle(&self, rank: Rank) -> DevicePtr {
        self.handles[rank.0 as usize].address()
    }

    fn shared_bytes_per_warp(&self) -> u32 {
        shared_bytes(self.bounce_bytes)
    }

    fn put(&self, stream: Stream, put: &HostPut) -> Result<()> {
        let Piece { source_offset, destination_offset, bytes } = put.piece;
        if bytes > 0 {
            let source = DevicePtr(self.arena.base(put.from).0 + source_offset);
            let destination = DevicePtr(self.arena.base(self.peer(put.from, put.to)).0 + destination_offset);
            self.gpu.copy(stream, &Copy2d::flat(destination, source, bytes))?;
        }
        put.signal.map_or(Ok(()), |(signal, value)| self.signal(stream, put.from, put.to, signal, value))
    }

    fn signal(&self, stream: Stream, from: Rank, to: Node, signal: u32, value: u64) -> Result<()> {
        self.gpu.write_value(stream, self.arena.signal(self.peer(from, to), signal), value)
    }

    fn wait(&self, stream: Stream, rank: Rank, signal: u32, value: u64, tag: WaitTag) -> Result<()> {
        let address = self.arena.signal(rank, signal);
        self.gpu.wait_value(stream, &MemoryWait { address, value, timeout_ns: self.timeout_ns, tag })
    }
}

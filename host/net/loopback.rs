//! The network between ranks of one process: every arena is an address. Puts of the host path are copies, signals are
//! memory writes; the device path is `tide_device::gin::loopback`.

use super::{Fabric, HostPut, HostSignal, Net, NetOptions, Window};
use crate::arena::SymmetricMemory;
use crate::error::{Result, TideError};
use crate::gpu::{Copy2d, DeviceBuffer, DevicePtr, Gpu, MemoryWait, Stream};
use crate::launch::{Alone, Exchange};
use crate::plan::{Node, Rank, RankRange, Topology};
use std::sync::{Arc, Mutex};
use tide_device::abi::fault::WaitTag;
use tide_device::abi::kernel::Kernel;
use tide_device::abi::params::{LoopbackHandle, Piece};
use tide_device::abi::signal::SIGNAL_BYTES;
use tide_device::gin::loopback::shared_bytes;

/// All ranks in this process: local rank `l` runs on device `(first device + l) mod device count`.
#[derive(Clone)]
pub struct LoopbackFabric {
    gpu: Arc<dyn Gpu>,
    topology: Topology,
    first_device: u32,
    exchange: Arc<Mutex<Box<dyn Exchange>>>,
}

impl LoopbackFabric {
    /// The ranks of `topology` on these GPUs.
    ///
    /// # Errors
    /// [`TideError::Usage`] for a device that is not there.
    pub fn new(gpu: Arc<dyn Gpu>, topology: Topology, first_device: u32) -> Result<Self> {
        let device_count = gpu.device_count();
        if first_device >= device_count {
            return Err(TideError::usage(format!(
                "local rank 0 on device {first_device}: there are {device_count}, counted from 0"
            )));
        }
        Ok(Self { gpu, topology, first_device, exchange: Arc::new(Mutex::new(Box::new(Alone))) })
    }
}

impl Fabric for LoopbackFabric {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn gpu(&self) -> &Arc<dyn Gpu> {
        &self.gpu
    }

    fn topology(&self) -> Topology {
        self.topology
    }

    fn driven(&self) -> RankRange {
        self.topology.all()
    }

    fn device_of(&self, rank: Rank) -> u32 {
        (self.first_device + self.topology.local_of(rank).0) % self.gpu.device_count()
    }

    fn allocate(self: Arc<Self>, bytes: u64) -> Result<Arc<dyn Window>> {
        let new = |rank| DeviceBuffer::new(&self.gpu, self.device_of(rank), bytes);
        let ranks: Vec<DeviceBuffer> = self.topology.ranks().map(new).collect::<Result<_>>()?;
        let mut multicast = Vec::new();
        for node in self.topology.nodes() {
            let of_local = |l| ranks[self.topology.rank(node, l).0 as usize].address();
            let replicas: Vec<DevicePtr> = self.topology.local_ranks().map(of_local).collect();
            multicast.push(self.gpu.bind_multicast(&replicas, bytes)?);
        }
        Ok(Arc::new(LoopbackWindow { fabric: (*self).clone(), ranks, multicast }))
    }

    fn exchange(&self) -> &Mutex<Box<dyn Exchange>> {
        &self.exchange
    }

    fn abort(&self) {}
}

/// One allocation per rank.
struct LoopbackWindow {
    fabric: LoopbackFabric,
    ranks: Vec<DeviceBuffer>,
    multicast: Vec<Option<DevicePtr>>,
}

impl SymmetricMemory for LoopbackWindow {
    fn base(&self, rank: Rank) -> Option<DevicePtr> {
        self.ranks.get(rank.0 as usize).map(DeviceBuffer::address)
    }

    fn multicast(&self, node: Node) -> Option<DevicePtr> {
        self.multicast[node.0 as usize]
    }
}

impl Window for LoopbackWindow {
    fn connect(self: Arc<Self>, signals_offset: u64, options: NetOptions) -> Result<Arc<dyn Net>> {
        let fabric = self.fabric.clone();
        let (gpu, topology) = (&fabric.gpu, fabric.topology);
        let bounce_bytes = gpu.properties(0).shape.bounce_bytes;
        let (mut handles, mut tables) = (Vec::new(), Vec::new());
        for rank in topology.ranks() {
            let (local, device) = (topology.local_of(rank), fabric.device_of(rank));
            let arenas: Vec<u64> = topology.nodes().map(|n| self.address(topology.rank(n, local), 0).0).collect();
            let table = DeviceBuffer::from_slice(gpu, device, &arenas)?;
            let handle = LoopbackHandle {
                arenas: table.address().0,
                signals_offset,
                context_count: options.context_count,
                bounce_bytes,
                own_node: topology.node_of(rank).0,
                reserved: 0,
            };
            handles.push(DeviceBuffer::from_slice(gpu, device, &[handle])?);
            tables.push(table);
        }
        Ok(Arc::new(Loopback { window: self, signals_offset, options, bounce_bytes, handles, _tables: tables }))
    }
}

impl LoopbackWindow {
    /// An address by its symmetric offset.
    fn address(&self, rank: Rank, offset: u64) -> DevicePtr {
        DevicePtr(self.ranks[rank.0 as usize].address().0 + offset)
    }
}

/// The rails over one allocation.
struct Loopback {
    window: Arc<LoopbackWindow>,
    signals_offset: u64,
    options: NetOptions,
    bounce_bytes: u32,
    handles: Vec<DeviceBuffer>,
    /// The tables that the handles point to.
    _tables: Vec<DeviceBuffer>,
}

impl Loopback {
    fn gpu(&self) -> &Arc<dyn Gpu> {
        &self.window.fabric.gpu
    }

    fn peer(&self, from: Rank, to: Node) -> Rank {
        let topology = self.window.fabric.topology;
        topology.rank(to, topology.local_of(from))
    }

    fn word(&self, rank: Rank, word: u32) -> DevicePtr {
        self.window.address(rank, self.signals_offset + SIGNAL_BYTES * u64::from(word))
    }
}

impl Net for Loopback {
    fn context_count(&self) -> u32 {
        self.options.context_count
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
            let source = self.window.address(put.from, source_offset);
            let destination = self.window.address(self.peer(put.from, put.to), destination_offset);
            self.gpu().copy(stream, &Copy2d::flat(destination, source, bytes))?;
        }
        put.signal.map_or(Ok(()), |signal| self.signal(stream, put.from, put.to, signal))
    }

    fn signal(&self, stream: Stream, from: Rank, to: Node, signal: HostSignal) -> Result<()> {
        self.gpu().write_value(stream, self.word(self.peer(from, to), signal.word), signal.value)
    }

    fn wait(&self, stream: Stream, rank: Rank, _from: Node, signal: HostSignal, tag: WaitTag) -> Result<()> {
        let (address, value) = (self.word(rank, signal.word), signal.value);
        self.gpu().wait_value(stream, &MemoryWait { address, value, timeout_ns: self.options.timeout_ns, tag })
    }
}

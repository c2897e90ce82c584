//! The FSDP2-like baseline [TIDE §2.1]: flat, rank-major buffers with layout copies around them. Its buffers are what TIDE's
//! are compared with, and it takes the groups that the fast path does not.

use super::{Communicator, GradientDtype, RankEvents, RankGradients, Scale, check_gradients};
use crate::error::{Result, TideError};
use crate::gpu::{Copy2d, DeviceBuffer, DevicePtr, DeviceSlice, Launch, Priority, Stream};
use crate::layout::{Group, GroupLayout};
use crate::plan::{Rank, Topology};
use tide_device::abi::kernel::Kernel;
use tide_device::abi::params::{FlatSumParams, PackParams};

/// Blocks of the stock kernels.
const STOCK_CTAS: u32 = 4;

/// The stock reduce-scatter: all gradients packed into a rank-major fp32 buffer, then one flat sum.
pub struct StockReduceScatter {
    comm: Communicator,
    layout: GroupLayout,
    dtype: GradientDtype,
    streams: Vec<Stream>,
    packed: Vec<DeviceBuffer>,
    /// Per rank: the addresses of all packed buffers, and of the rank's gradients.
    packed_tables: Vec<DeviceBuffer>,
    gradient_tables: Vec<DeviceBuffer>,
    segment_tables: Vec<DeviceBuffer>,
    segment_count: u32,
}

impl StockReduceScatter {
    /// Bytes that each rank would allocate for a group of this layout.
    pub fn bytes_for(layout: &GroupLayout) -> u64 {
        4 * layout.packed_elems() * layout.rank_count()
    }

    /// Allocates the packed buffer on every rank.
    ///
    /// # Errors
    /// [`crate::TideError::Layout`]; what the driver refuses.
    pub fn new(comm: &Communicator, group: &Group, dtype: GradientDtype) -> Result<Self> {
        comm.check()?;
        check_all_driven(comm)?;
        let (gpu, topology) = (comm.gpu(), comm.topology());
        let layout = GroupLayout::new(group, u64::from(topology.rank_count()))?;
        let segments = layout.segments();
        let packed_bytes = Self::bytes_for(&layout);
        let new = |rank: Rank| DeviceBuffer::new(gpu, comm.device_of(rank), packed_bytes);
        let packed: Vec<DeviceBuffer> = topology.ranks().map(new).collect::<Result<_>>()?;
        let addresses: Vec<u64> = packed.iter().map(|p| p.address().0).collect();
        let (mut packed_tables, mut gradient_tables, mut segment_tables) = (Vec::new(), Vec::new(), Vec::new());
        let mut streams = Vec::new();
        for rank in comm.driven().iter() {
            let device = comm.device_of(rank);
            packed_tables.push(DeviceBuffer::from_slice(gpu, device, &addresses)?);
            gradient_tables.push(DeviceBuffer::new(gpu, device, 8 * group.parameters().len() as u64)?);
            segment_tables.push(DeviceBuffer::from_slice(gpu, device, &segments)?);
            streams.push(comm.create_stream(rank, Priority::Normal)?);
        }
        Ok(Self {
            comm: comm.clone(),
            layout,
            dtype,
            streams,
            packed,
            packed_tables,
            gradient_tables,
            segment_tables,
            segment_count: segments.len() as u32,
        })
    }

    /// The group's layout.
    pub fn layout(&self) -> &GroupLayout {
        &self.layout
    }

    /// Bytes that each rank has allocated besides gradients and output: the packed buffer, as allocated.
    pub fn buffer_bytes(&self) -> u64 {
        self.packed[0].slice().bytes
    }

    /// Enqueues one call on every driven rank; `ranks` in rank order, as for [`super::ReduceScatter::enqueue`].
    ///
    /// # Errors
    /// As [`super::ReduceScatter::enqueue`].
    pub fn enqueue(&mut self, ranks: &[RankGradients], scale: Scale) -> Result<Vec<RankEvents>> {
        self.comm.check()?;
        check_gradients(ranks, self.comm.driven(), &self.layout, self.dtype)?;
        // The tables are written now, not in stream order: calls do not overlap here.
        self.comm.synchronize()?;
        let mut packed = Vec::new();
        for (rank, given) in self.comm.driven().iter().zip(ranks) {
            packed.push(self.pack(rank, given)?);
        }
        let mut events = Vec::new();
        for (rank, given) in self.comm.driven().iter().zip(ranks) {
            let stream = self.streams[self.comm.index(rank)];
            packed.iter().try_for_each(|event| self.comm.gpu().wait_event(stream, *event))?;
            self.flat_sum(rank, given.out, scale)?;
            events.push(RankEvents { read: packed[self.comm.index(rank)], done: self.comm.gpu().record(stream)? });
        }
        Ok(events)
    }

    fn pack(&self, rank: Rank, given: &RankGradients) -> Result<crate::gpu::Event> {
        let gpu = self.comm.gpu();
        let (stream, index) = (self.streams[self.comm.index(rank)], self.comm.index(rank));
        let addresses: Vec<u64> = given.gradients.iter().map(|g| g.map_or(0, |g| g.address.0)).collect();
        gpu.upload(self.gradient_tables[index].address(), bytemuck::cast_slice(&addresses))?;
        if let Some(ready) = given.ready {
            gpu.wait_event(stream, ready)?;
        }
        let params = PackParams {
            segments: self.segment_tables[index].address().0,
            gradients: self.gradient_tables[index].address().0,
            out: self.packed[index].address().0,
            packed_elems: self.layout.packed_elems(),
            segment_count: self.segment_count,
            rank_count: self.topology().rank_count(),
            item_bytes: self.dtype.bytes() as u32,
            reserved: 0,
        };
        self.launch(rank, Kernel::StockPack, bytemuck::bytes_of(&params))?;
        gpu.record(stream)
    }

    fn flat_sum(&self, rank: Rank, out: DeviceSlice, scale: Scale) -> Result<()> {
        let params = FlatSumParams {
            packed: self.packed_tables[self.comm.index(rank)].address().0,
            out: out.address.0,
            packed_elems: self.layout.packed_elems(),
            rank_count: self.topology().rank_count(),
            rank: rank.0,
            accumulate: u32::from(scale.accumulate),
            alpha: scale.alpha,
        };
        self.launch(rank, Kernel::StockFlatSum, bytemuck::bytes_of(&params))
    }

    fn launch(&self, rank: Rank, kernel: Kernel, params: &[u8]) -> Result<()> {
        let block = self.comm.gpu().properties(self.comm.device_of(rank)).shape.plain_threads;
        let launch = Launch { kernel, grid: STOCK_CTAS, block, cluster: 1, shared_bytes: 0, params };
        // SAFETY: buffers and tables live as long as `self`; gradients and output as checked by `enqueue`.
        unsafe { self.comm.gpu().launch(self.streams[self.comm.index(rank)], &launch) }
    }

    fn topology(&self) -> Topology {
        self.comm.topology()
    }
}

impl Drop for StockReduceScatter {
    fn drop(&mut self) {
        drop_streams(&self.comm, &self.streams);
    }
}

/// The stock all-gather: one flat, rank-major all-gather, then copy-out into per-parameter storage.
pub struct StockAllGather {
    comm: Communicator,
    layout: GroupLayout,
    streams: Vec<Stream>,
    shards: Vec<DeviceBuffer>,
    gathered: Vec<DeviceBuffer>,
    landings: Vec<DeviceBuffer>,
}

impl StockAllGather {
    /// Bytes that each rank would allocate for a group of this layout: shard, rank-major output, per-parameter storage.
    pub fn bytes_for(layout: &GroupLayout) -> u64 {
        layout.shard_bytes() + 2 * layout.landing_bytes()
    }

    /// Allocates packed shard, rank-major output and per-parameter storage on every rank.
    ///
    /// # Errors
    /// [`crate::TideError::Layout`]; what the driver refuses.
    pub fn new(comm: &Communicator, group: &Group) -> Result<Self> {
        comm.check()?;
        check_all_driven(comm)?;
        let topology = comm.topology();
        let layout = GroupLayout::new(group, u64::from(topology.rank_count()))?;
        let new = |bytes: u64| {
            let on = |rank: Rank| DeviceBuffer::new(comm.gpu(), comm.device_of(rank), bytes);
            topology.ranks().map(on).collect::<Result<Vec<_>>>()
        };
        let (shards, gathered, landings) =
            (new(layout.shard_bytes())?, new(layout.landing_bytes())?, new(layout.landing_bytes())?);
        let streams = topology.ranks().map(|r| comm.create_stream(r, Priority::Normal)).collect::<Result<_>>()?;
        Ok(Self { comm: comm.clone(), layout, streams, shards, gathered, landings })
    }

    /// The group's layout.
    pub fn layout(&self) -> &GroupLayout {
        &self.layout
    }

    /// Where a rank's padded shard of a parameter lies.
    pub fn shard(&self, rank: Rank, parameter: usize) -> DeviceSlice {
        let p = &self.layout.parameters()[parameter];
        let base = self.shards[self.comm.index(rank)].address().0;
        DeviceSlice { address: DevicePtr(base + p.shard_offset_bytes), bytes: p.shard_bytes }
    }

    /// Where a parameter lies on a rank once it is gathered.
    pub fn landing(&self, rank: Rank, parameter: usize) -> DeviceSlice {
        let p = &self.layout.parameters()[parameter];
        let base = self.landings[self.comm.index(rank)].address().0;
        let item_bytes = p.shard_bytes.checked_div(p.shard_elems).unwrap_or(1);
        let address = DevicePtr(base + self.layout.landing_offset_bytes(parameter, 0));
        DeviceSlice { address, bytes: p.elems * item_bytes }
    }

    /// Bytes that each rank has allocated: shard, rank-major output and per-parameter storage.
    pub fn buffer_bytes(&self) -> u64 {
        self.shards[0].slice().bytes + self.gathered[0].slice().bytes + self.landings[0].slice().bytes
    }

    /// Enqueues one call on every driven rank.
    ///
    /// # Errors
    /// [`crate::TideError::Poisoned`]; what the driver refuses.
    pub fn enqueue(&mut self) -> Result<Vec<RankEvents>> {
        self.comm.check()?;
        let gpu = self.comm.gpu();
        let shard_bytes = self.layout.shard_bytes();
        let mut sent = Vec::new();
        for rank in self.comm.driven().iter() {
            let stream = self.streams[self.comm.index(rank)];
            let source = self.shards[self.comm.index(rank)].address();
            for gathered in self.gathered.iter().filter(|_| shard_bytes > 0) {
                let destination = DevicePtr(gathered.address().0 + u64::from(rank.0) * shard_bytes);
                gpu.copy(stream, &Copy2d::flat(destination, source, shard_bytes))?;
            }
            sent.push(gpu.record(stream)?);
        }
        let mut copied = Vec::new();
        for rank in self.comm.driven().iter() {
            let stream = self.streams[self.comm.index(rank)];
            sent.iter().try_for_each(|event| gpu.wait_event(stream, *event))?;
            self.copy_out(rank)?;
            copied.push(gpu.record(stream)?);
        }
        // The next call overwrites every rank's rank-major output.
        for stream in &self.streams {
            copied.iter().try_for_each(|event| gpu.wait_event(*stream, *event))?;
        }
        Ok(sent.into_iter().zip(copied).map(|(read, done)| RankEvents { read, done }).collect())
    }

    fn copy_out(&self, rank: Rank) -> Result<()> {
        let index = self.comm.index(rank);
        for (parameter, p) in self.layout.parameters().iter().enumerate().filter(|(_, p)| p.shard_bytes > 0) {
            let landing = self.landings[index].address().0 + self.layout.landing_offset_bytes(parameter, 0);
            let copy = Copy2d {
                destination: DevicePtr(landing),
                destination_pitch_bytes: p.shard_bytes,
                source: DevicePtr(self.gathered[index].address().0 + p.shard_offset_bytes),
                source_pitch_bytes: self.layout.shard_bytes(),
                width_bytes: p.shard_bytes,
                rows: self.layout.rank_count(),
            };
            self.comm.gpu().copy(self.streams[index], &copy)?;
        }
        Ok(())
    }
}

impl Drop for StockAllGather {
    fn drop(&mut self) {
        drop_streams(&self.comm, &self.streams);
    }
}

/// Refuses a communicator of several processes: this baseline writes to every rank's memory.
fn check_all_driven(comm: &Communicator) -> Result<()> {
    let (driven, all) = (comm.driven(), comm.topology().all());
    if driven == all {
        return Ok(());
    }
    Err(TideError::Unsupported {
        needed: format!("all {} ranks in this process, for the stock baseline", all.count()),
        found: format!("{} of them", driven.count()),
    })
}

fn drop_streams(comm: &Communicator, streams: &[Stream]) {
    if let Err(error) = comm.synchronize() {
        tracing::warn!(%error, "a stock collective was dropped after a failure");
    }
    comm.destroy_streams(streams.iter().copied());
}

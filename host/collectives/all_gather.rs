//! TIDE-AG: shards straight into parameter-major storage [TIDE §3].
//!
//! On one node each rank multicasts its shard of every parameter to the final place on all local ranks. Across nodes the
//! shards first travel by recursive doubling over the rails, into a receive stage, from which copy engines scatter them
//! the same way while later rounds are still under way.
//!
//! Slot `i` of rank `(n, l)` holds the shard of rank `((n + i) mod M, l)`; slot 0 is the rank's own, resident. Streams of a
//! rank: `net` carries the rounds, `scatter` the copies, `complete` the node's completion. Signals, all only growing:
//!
//! | signal | at | raised by | to | when |
//! |---|---|---|---|---|
//! | landing free | each local rank, per local rank | it | calls | its landing may be overwritten |
//! | gathered | each local rank, per local rank | it | calls | its shards are in all local landings |
//! | data | receiver, per source node and context | the put | calls | the round's slots are there |
//! | credit | sender, per target node | the receiver | calls | the receiver has scattered and sent on what the put overwrites |
//! | progress | the rank itself (device path) | its network kernel | rounds | the round has arrived |

use super::node::{NodeSignals, Place};
use super::rounds::{BlockRing, RankRound, Rounds, RoundsCall};
use super::{Communicator, RankEvents, check_fast_path, check_rank_count, check_slice};
use crate::arena::{Arena, ArenaLayout, REGION_ALIGN_BYTES, Region, Signals};
use crate::error::{Result, TideError};
use crate::gpu::{Copy2d, DeviceBuffer, DevicePtr, DeviceSlice, Event, Gpu, Launch, Priority, Stream};
use crate::layout::{Dtype, Group, GroupLayout};
use crate::net::Path;
use crate::plan::all_gather::{gather_rounds, scatter_copies, slot_node};
use crate::plan::{GatherRound, Rank, Topology};
use std::sync::Arc;
use tide_device::abi::fault::{Operation, WaitKind};
use tide_device::abi::kernel::Kernel;
use tide_device::abi::params::{CastParams, CastSegment, Credit, NetArrival, NetPut};

/// Blocks of a cast.
const CAST_CTAS: u32 = 4;

/// How an all-gather takes its shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AllGatherOptions {
    /// The shards are fp32 masters, which each call casts to the group's bf16; otherwise they are resident in the arena,
    /// in the group's own types.
    pub cast: bool,
}

/// What one rank brings to a call.
#[derive(Debug, Clone, Default)]
pub struct RankGather {
    /// With [`AllGatherOptions::cast`]: the rank's padded fp32 shards, in the group's order. Else empty.
    pub masters: Vec<DeviceSlice>,
    /// When the shards are complete and the landing may be overwritten; `None` if they are and it may.
    pub ready: Option<Event>,
}

#[derive(Clone, Copy)]
struct Regions {
    landing: Region,
    slots: Region,
    landing_free: Signals,
    gathered: Signals,
    data: Signals,
    credit: Signals,
    progress: Signals,
}

struct RankStreams {
    scatter: Stream,
    complete: Stream,
}

/// An all-gather of one group: planned, allocated, ready to be called again and again.
pub struct AllGather {
    comm: Communicator,
    layout: GroupLayout,
    options: AllGatherOptions,
    arena: Arc<Arena>,
    node: NodeSignals,
    regions: Regions,
    gather_rounds: Vec<GatherRound>,
    rounds: Rounds,
    slot_bytes: u64,
    streams: Vec<RankStreams>,
    net_streams: Vec<Stream>,
    /// Tables of the last cast per rank, kept until the next.
    cast_tables: Vec<Option<(Vec<CastSegment>, DeviceBuffer)>>,
    epoch: u64,
    descriptor_count: u64,
}

impl AllGather {
    /// Plans an all-gather of `group`, allocates its arena on every rank and uploads its tables.
    ///
    /// # Errors
    /// [`TideError::Layout`] for what has no layout; [`TideError::Unsupported`] for a group of more than 256 parameters,
    /// which [`super::StockAllGather`] takes; [`TideError::Usage`] for a cast to anything but bf16; what the driver refuses.
    pub fn new(comm: &Communicator, group: &Group, options: AllGatherOptions) -> Result<Self> {
        comm.check()?;
        check_fast_path(group)?;
        if options.cast
            && let Some(p) = group.parameters().iter().find(|p| p.dtype() != Dtype::Bf16)
        {
            return Err(TideError::usage(format!("parameter `{}` is {}: a cast gives bf16", p.name(), p.dtype())));
        }
        let topology = comm.topology();
        let layout = GroupLayout::new(group, u64::from(topology.rank_count()))?;
        // Slots start where a bulk copy may, and are moved in whole.
        let slot_bytes = layout.shard_bytes().next_multiple_of(REGION_ALIGN_BYTES);
        let gather_rounds = gather_rounds(topology.node_count());
        let (arena_layout, regions) = regions(&layout, topology, slot_bytes, comm.options().context_count);
        let arena = Arc::new(Arena::new(comm.gpu(), topology, arena_layout, |r| comm.device_of(r))?);
        let (tables, credits) = network_tables(topology, &gather_rounds, &regions, slot_bytes, comm);
        let progress = |rank: Rank| arena.signal(rank, regions.progress.signal(0)).0;
        let rounds = Rounds::new(comm, &arena, Operation::AllGather, tables, credits, progress)?;
        let (mut streams, mut net_streams) = (Vec::new(), Vec::new());
        for rank in topology.ranks() {
            streams.push(RankStreams {
                scatter: comm.create_stream(rank, Priority::High)?,
                complete: comm.create_stream(rank, Priority::High)?,
            });
            net_streams.push(comm.create_stream(rank, Priority::High)?);
        }
        Ok(Self {
            comm: comm.clone(),
            layout,
            options,
            node: NodeSignals { comm: comm.clone(), arena: Arc::clone(&arena), operation: Operation::AllGather },
            arena,
            regions,
            gather_rounds,
            rounds,
            slot_bytes,
            streams,
            net_streams,
            cast_tables: topology.ranks().map(|_| None).collect(),
            epoch: 0,
            descriptor_count: 0,
        })
    }

    /// The group's layout.
    pub fn layout(&self) -> &GroupLayout {
        &self.layout
    }

    /// Where a rank's padded shard of a parameter lies, resident: written once, read by every call.
    pub fn shard(&self, rank: Rank, parameter: usize) -> DeviceSlice {
        let p = &self.layout.parameters()[parameter];
        let address = self.arena.at(rank, self.regions.slots, p.shard_offset_bytes, p.shard_bytes);
        DeviceSlice { address, bytes: p.shard_bytes }
    }

    /// Where a parameter lies on a rank once it is gathered: `[D_p, trailing…]`, contiguous.
    pub fn landing(&self, rank: Rank, parameter: usize) -> DeviceSlice {
        let p = &self.layout.parameters()[parameter];
        let item_bytes = p.shard_bytes.checked_div(p.shard_elems).unwrap_or(1);
        let bytes = p.elems * item_bytes;
        let offset = self.layout.landing_offset_bytes(parameter, 0);
        DeviceSlice { address: self.arena.at(rank, self.regions.landing, offset, bytes), bytes }
    }

    /// Bytes that each rank has allocated for this collective: its arena with landing, resident shards and receive stage.
    pub fn buffer_bytes(&self) -> u64 {
        self.arena.bytes()
    }

    /// Copy descriptors that rank 0 has issued in its last call.
    pub fn descriptor_count(&self) -> u64 {
        self.descriptor_count
    }

    /// Calls so far.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Enqueues one call on every driven rank; `ranks` in rank order.
    ///
    /// The caller keeps the shards as they are until `read` and does not touch the landing before `done`.
    ///
    /// # Errors
    /// [`TideError::Usage`] for wrong counts, sizes or alignments, before anything is enqueued; [`TideError::Poisoned`];
    /// what the driver refuses.
    pub fn enqueue(&mut self, ranks: &[RankGather]) -> Result<Vec<RankEvents>> {
        self.comm.check()?;
        self.check_arguments(ranks)?;
        self.descriptor_count = 0;
        let value = self.epoch + 1;
        for (rank, given) in self.topology().ranks().zip(ranks) {
            self.enter(rank, given, value)?;
        }
        for rank in self.topology().ranks() {
            self.scatter_own(rank, value)?;
        }
        self.gather(value)?;
        let events = self.finish(value)?;
        self.epoch += 1;
        Ok(events)
    }

    fn check_arguments(&self, ranks: &[RankGather]) -> Result<()> {
        check_rank_count(ranks.len(), self.topology().rank_count())?;
        let expected = if self.options.cast { self.layout.parameters().len() } else { 0 };
        for (rank, given) in ranks.iter().enumerate() {
            if given.masters.len() != expected {
                let found = given.masters.len();
                return Err(TideError::usage(format!("rank {rank}: {found} fp32 masters given, expected {expected}")));
            }
            for (index, (master, p)) in given.masters.iter().zip(self.layout.parameters()).enumerate() {
                check_slice(&format!("rank {rank}, master {index}"), *master, 4 * p.shard_elems, 4)?;
            }
        }
        Ok(())
    }

    /// Publishes that the rank's landing may be overwritten, and makes slot 0 hold its shard.
    fn enter(&mut self, rank: Rank, given: &RankGather, value: u64) -> Result<()> {
        let net = self.net_streams[rank.0 as usize];
        if let Some(ready) = given.ready {
            self.gpu().wait_event(net, ready)?;
        }
        if self.options.cast {
            self.cast(rank, net, given)?;
        }
        self.node.raise_node(net, rank, self.regions.landing_free, value)?;
        self.comm.join(net, [self.streams[rank.0 as usize].scatter])?;
        Ok(())
    }

    fn cast(&mut self, rank: Rank, stream: Stream, given: &RankGather) -> Result<()> {
        let segments: Vec<CastSegment> = given
            .masters
            .iter()
            .zip(self.layout.parameters())
            .map(|(master, p)| CastSegment {
                source: master.address.0,
                elems: p.shard_elems,
                packed_first: p.packed_offset_elems,
            })
            .collect();
        let kept = &mut self.cast_tables[rank.0 as usize];
        if kept.as_ref().is_none_or(|(held, _)| *held != segments) {
            // The table that a call in flight reads must not go: wait for it. Masters rarely move.
            if kept.is_some() {
                self.comm.synchronize()?;
            }
            let table = DeviceBuffer::from_slice(self.comm.gpu(), self.comm.device_of(rank), &segments)?;
            *kept = Some((segments, table));
        }
        let Some((segments, table)) = kept else { return Ok(()) };
        let params = CastParams {
            segments: table.address().0,
            segment_count: segments.len() as u64,
            out: self.arena.at(rank, self.regions.slots, 0, self.layout.shard_bytes()).0,
        };
        let block = self.comm.gpu().properties(self.comm.device_of(rank)).shape.plain_threads;
        let launch = Launch {
            kernel: Kernel::Cast,
            grid: CAST_CTAS,
            block,
            shared_bytes: 0,
            params: bytemuck::bytes_of(&params),
        };
        // SAFETY: the table is kept until the next cast, masters until `read` by the caller, as checked.
        unsafe { self.comm.gpu().launch(stream, &launch) }
    }

    /// Scatters the rank's own shard once all local landings are free.
    fn scatter_own(&mut self, rank: Rank, value: u64) -> Result<()> {
        let stream = self.streams[rank.0 as usize].scatter;
        let why = (WaitKind::LandingFree, self.place(0));
        self.node.wait_node(stream, rank, self.regions.landing_free, value, why)?;
        self.scatter(rank, 0, 1)
    }

    /// Copies `count` slots from `first` on, whose nodes ascend by one, into all local landings: one copy per parameter.
    fn scatter(&mut self, rank: Rank, first: u32, count: u32) -> Result<()> {
        let topology = self.topology();
        let stream = self.streams[rank.0 as usize].scatter;
        let source_node = slot_node(topology.node_count(), topology.node_of(rank), first);
        let source_rank = u64::from(topology.rank(source_node, topology.local_of(rank)).0);
        let rank_pitch = u64::from(topology.local_rank_count());
        let mut descriptors = 0;
        for (index, p) in self.layout.parameters().iter().enumerate().filter(|(_, p)| p.shard_bytes > 0) {
            let rows = u64::from(count);
            let landing_offset = self.layout.landing_offset_bytes(index, source_rank);
            let landing_span = (rows - 1) * rank_pitch * p.shard_bytes + p.shard_bytes;
            let slot_offset = u64::from(first) * self.slot_bytes + p.shard_offset_bytes;
            let slot_span = (rows - 1) * self.slot_bytes + p.shard_bytes;
            let source = self.arena.at(rank, self.regions.slots, slot_offset, slot_span);
            for destination in self.landings(rank, landing_offset, landing_span) {
                let copy = Copy2d {
                    destination,
                    destination_pitch_bytes: rank_pitch * p.shard_bytes,
                    source,
                    source_pitch_bytes: self.slot_bytes,
                    width_bytes: p.shard_bytes,
                    rows,
                };
                self.gpu().copy(stream, &copy)?;
                descriptors += 1;
            }
        }
        if rank == Rank(0) {
            self.descriptor_count += descriptors;
        }
        Ok(())
    }

    /// Where a landing offset is written: one multicast address, or every local rank's own.
    fn landings(&self, rank: Rank, offset: u64, bytes: u64) -> Vec<DevicePtr> {
        let region = self.regions.landing;
        match self.arena.multicast(self.topology().node_of(rank), region, offset, bytes) {
            Some(multicast) => vec![multicast],
            None => self.arena.node_ranks(rank).map(|(_, peer)| self.arena.at(peer, region, offset, bytes)).collect(),
        }
    }

    /// The rounds, and the scatter of what each brings.
    fn gather(&mut self, value: u64) -> Result<()> {
        let round_count = self.gather_rounds.len() as u64;
        let mut call = RoundsCall {
            epoch: self.epoch,
            sequence: value,
            blocks: BlockRing::NONE,
            progress_first: self.epoch * round_count,
            first: 0,
            count: round_count as u32,
        };
        let on_device = self.comm.options().path == Path::Device;
        if on_device {
            self.rounds.run(&self.net_streams, &call)?;
        }
        for index in 0..self.gather_rounds.len() {
            if !on_device {
                (call.first, call.count) = (index as u32, 1);
                self.rounds.run(&self.net_streams, &call)?;
            }
            let round = self.gather_rounds[index];
            for rank in self.topology().ranks() {
                let (net, scatter) = (self.net_streams[rank.0 as usize], self.streams[rank.0 as usize].scatter);
                if on_device {
                    let arrived = call.progress_first + index as u64 + 1;
                    let source = round.source(self.topology().node_count(), self.topology().node_of(rank));
                    let peer = self.topology().rank(source, self.topology().local_of(rank));
                    let why = (WaitKind::RoundArrived, self.place(index as u32));
                    self.node.wait(scatter, (rank, peer), self.regions.progress.signal(0), arrived, why)?;
                } else {
                    self.comm.join(net, [scatter])?;
                }
                let topology = self.topology();
                for (first, count) in scatter_copies(topology.node_count(), topology.node_of(rank), &round) {
                    self.scatter(rank, first, count)?;
                }
            }
        }
        Ok(())
    }

    /// Returns credits, joins the node, and gives the events.
    fn finish(&mut self, value: u64) -> Result<Vec<RankEvents>> {
        let mut reads = Vec::new();
        for rank in self.topology().ranks() {
            let (net, streams) = (self.net_streams[rank.0 as usize], &self.streams[rank.0 as usize]);
            self.node.raise_node(streams.scatter, rank, self.regions.gathered, value)?;
            // The stage may be overwritten once it is scattered and what it forwards is sent.
            self.comm.join(streams.scatter, [net])?;
            self.rounds.return_credits(net, rank, 0, value)?;
            reads.push(self.gpu().record(net)?);
        }
        let mut events = Vec::new();
        for (rank, read) in self.topology().ranks().zip(reads) {
            let complete = self.streams[rank.0 as usize].complete;
            let why = (WaitKind::GatherDone, self.place(0));
            self.node.wait_node(complete, rank, self.regions.gathered, value, why)?;
            events.push(RankEvents { read, done: self.gpu().record(complete)? });
        }
        Ok(events)
    }

    fn topology(&self) -> Topology {
        self.comm.topology()
    }

    fn gpu(&self) -> &Arc<dyn Gpu> {
        self.comm.gpu()
    }

    /// A place in the current call.
    fn place(&self, round: u32) -> Place {
        Place { epoch: self.epoch, wave: 0, round }
    }
}

impl Drop for AllGather {
    /// Waits for the work in flight, which uses the arena.
    fn drop(&mut self) {
        if let Err(error) = self.comm.synchronize() {
            tracing::warn!(%error, "an all-gather was dropped after a failure");
        }
        let own = self.streams.iter().flat_map(|s| [s.scatter, s.complete]);
        let all = own.chain(self.net_streams.iter().copied()).chain(self.rounds.streams());
        self.comm.destroy_streams(all.collect::<Vec<_>>());
    }
}

fn regions(layout: &GroupLayout, topology: Topology, slot_bytes: u64, context_count: u32) -> (ArenaLayout, Regions) {
    let (m, l) = (topology.node_count(), topology.local_rank_count());
    let mut arena = ArenaLayout::default();
    let regions = Regions {
        landing: arena.region("landing", layout.landing_bytes()),
        slots: arena.region("resident shard and receive stage", u64::from(m) * slot_bytes),
        landing_free: arena.signals(l),
        gathered: arena.signals(l),
        data: arena.signals(m * context_count),
        credit: arena.signals(m),
        progress: arena.signals(1),
    };
    (arena, regions)
}

/// Every rank's rounds, and the credits that it returns at the end of a call.
fn network_tables(
    topology: Topology,
    gather_rounds: &[GatherRound],
    regions: &Regions,
    slot_bytes: u64,
    comm: &Communicator,
) -> (Vec<Vec<RankRound>>, Vec<Vec<Vec<Credit>>>) {
    let m = topology.node_count();
    let context_count = comm.options().context_count;
    let rounds_of = |rank: Rank| {
        let node = topology.node_of(rank);
        let of_round = |round: &GatherRound| {
            let (target, source) = (round.target(m, node), round.source(m, node));
            let bytes = u64::from(round.slots) * slot_bytes;
            let slots = |first: u32| regions.slots.symmetric_offset(u64::from(first) * slot_bytes, bytes);
            RankRound {
                puts: vec![NetPut {
                    peer: target.0,
                    signal: regions.data.signal(node.0 * context_count),
                    credit: regions.credit.signal(target.0),
                    credit_lead: 1,
                    source_offset: slots(round.sent_slots().start),
                    source_block: 0,
                    head_offset: 0,
                    head_bytes: 0,
                    destination_offset: slots(round.received_slots().start),
                    bytes,
                }],
                arrivals: vec![NetArrival {
                    peer: source.0,
                    signal: regions.data.signal(source.0 * context_count),
                    bytes,
                }],
                wave: 0,
                round: round.index,
            }
        };
        gather_rounds.iter().map(of_round).collect()
    };
    let credits_of = |rank: Rank| {
        let node = topology.node_of(rank);
        let credit = |r: &GatherRound| Credit { peer: r.source(m, node).0, signal: regions.credit.signal(node.0) };
        vec![gather_rounds.iter().map(credit).collect()]
    };
    (topology.ranks().map(rounds_of).collect(), topology.ranks().map(credits_of).collect())
}

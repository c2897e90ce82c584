//! TIDE-AG: shards straight into parameter-major storage [TIDE §3], for all groups of a model that take turns in a ring.
//!
//! On one node each rank multicasts its shard of every parameter to the final place on all local ranks. Across nodes the
//! shards first travel by recursive doubling over the rails, into a receive stage, from which copy engines scatter them
//! the same way while later rounds are still under way.
//!
//! **Ring slots** hold the gathered parameters. Group `g`, in execution order, uses slot `g mod slots`; a slot is as large
//! as the largest group assigned to it [TIDE App. F]. Who occupies a slot is known here: a gather into a slot that was not released is
//! refused, and a release names the events after which the memory may be overwritten. A vacated slot can also take the
//! group's gradients (Slot-Reuse, [TIDE §5.3]).
//!
//! **Stage slot** `i` of rank `(n, l)` receives the shard of rank `((n + i) mod M, l)`; slot 0 is the rank's own: resident, or, with a
//! cast, the first slot of the stage. All groups share one stage. Streams of a rank: `ready` says that its landing may be overwritten,
//! `net` carries the rounds, `scatter` the copies, `complete` the node's completion. Signals, all only growing:
//!
//! | signal | at | raised by | to | when |
//! |---|---|---|---|---|
//! | landing free | each local rank, per local rank | it | calls | its landing may be overwritten |
//! | gathered | each local rank, per local rank | it | calls | its shards are in all local landings |
//! | data | receiver, per source node and context | the put | calls | the round's slots are there |
//! | credit | sender, per target node | the receiver | calls | the receiver has scattered and sent on what the put overwrites |
//! | lead | receiver, per round and context | the put | calls | the first bytes of the round are there |
//! | pace | sender, per round | its target | calls | the target has the lead of the round before |
//! | progress | the rank itself (device path) | its network kernel | rounds | the round has arrived |

mod group;

use super::node::{NodeSignals, Place};
use super::rounds::{BlockRing, RoundsCall};
use super::{Communicator, RankEvents, check_rank_count, check_slice};
use crate::arena::{Arena, ArenaLayout, Region, Signals};
use crate::error::{Result, TideError};
use crate::gpu::{Copy2d, DeviceBuffer, DevicePtr, DeviceSlice, Event, Gpu, Launch, Priority, Stream};
use crate::launch::Facts;
use crate::layout::{Group, GroupLayout};
use crate::net::Path;
use crate::plan::all_gather::{gather_rounds, scatter_copies, slot_node};
use crate::plan::{GatherRound, Rank, Topology};
use group::{CastTable, GroupState};
use std::sync::Arc;
use tide_device::abi::fault::{Operation, WaitKind};
use tide_device::abi::kernel::Kernel;
use tide_device::abi::params::{CastParams, CastSegment};

/// Blocks of a cast.
const CAST_CTAS: u32 = 4;

/// A group of a ring, and how its shards come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatherGroup {
    /// The parameters.
    pub group: Group,
    /// The shards are fp32 masters, which each call casts to the group's bf16; otherwise they are resident in the arena,
    /// in the group's own types.
    pub cast: bool,
}

/// How a ring is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingOptions {
    /// Ring slots: with a prefetch depth of one, two groups are unsharded at once.
    pub slot_count: u32,
    /// Bytes, over all rounds, of the leads that pace them: a round starts once the lead of the round before has arrived at
    /// its target, so that puts of several peers do not meet at one receiver [TIDE §3.1]. 0 lets rounds start at will.
    pub lead_bytes_total: u64,
}

impl Default for RingOptions {
    fn default() -> Self {
        Self { slot_count: 2, lead_bytes_total: 8 << 20 }
    }
}

/// What one rank brings to a gather.
#[derive(Debug, Clone, Default)]
pub struct RankGather {
    /// With [`GatherGroup::cast`]: the rank's padded fp32 shards, in the group's order. Else empty.
    pub masters: Vec<DeviceSlice>,
    /// When the shards are complete; `None` if they are.
    pub ready: Option<Event>,
}

/// The gradients that one rank puts into a vacated ring slot.
#[derive(Debug, Clone)]
pub struct RankSources {
    /// Its unsharded gradients, in the group's order and of its types; `None` for one that is all zeros.
    pub gradients: Vec<Option<DeviceSlice>>,
    /// When they are complete; `None` if they are.
    pub ready: Option<Event>,
}

/// One rank's gradients in a ring slot.
#[derive(Debug, Clone)]
pub struct StoredGradients {
    /// Where they lie: what a reduce-scatter takes.
    pub gradients: Vec<Option<DeviceSlice>>,
    /// When they do; the sources may be freed then.
    pub stored: Event,
}

struct Regions {
    ring_slots: Vec<Region>,
    stage: Region,
    landing_free: Signals,
    gathered: Signals,
    data: Signals,
    credit: Signals,
    progress: Signals,
    lead: Signals,
    pace: Signals,
}

struct RankStreams {
    ready: Stream,
    scatter: Stream,
    complete: Stream,
}

/// Who is in a ring slot.
struct RingSlot {
    occupant: Option<usize>,
    /// Per rank: when what was in it before may be overwritten, as its user says.
    released: Vec<Option<Event>>,
    /// Per rank: when the last gather or store into it is complete. Pieces of different groups overlap: a release that
    /// comes earlier must not let the next one in.
    filled: Vec<Option<Event>>,
}

/// The all-gathers of a model's groups: planned, allocated, ready to be called again and again.
pub struct GatherRing {
    comm: Communicator,
    arena: Arc<Arena>,
    node: NodeSignals,
    regions: Regions,
    groups: Vec<GroupState>,
    slots: Vec<RingSlot>,
    gather_rounds: Vec<GatherRound>,
    streams: Vec<RankStreams>,
    net_streams: Vec<Stream>,
    epoch: u64,
    descriptor_count: u64,
}

impl GatherRing {
    /// Lays the groups out, in execution order, allocates the arena on every rank and uploads its tables.
    ///
    /// # Errors
    /// [`TideError::Layout`] for what has no layout; [`TideError::Unsupported`] for a group of more than 256 parameters,
    /// which [`super::StockAllGather`] takes; [`TideError::Usage`] for no group, no slot, or a cast to anything but bf16;
    /// what the driver refuses.
    pub fn new(comm: &Communicator, groups: &[GatherGroup], options: RingOptions) -> Result<Self> {
        comm.check()?;
        if groups.is_empty() || options.slot_count == 0 {
            return Err(TideError::usage("a gather ring needs at least one group and one slot"));
        }
        let topology = comm.topology();
        let layouts = groups.iter().map(|g| group::lay_out(g, topology)).collect::<Result<Vec<_>>>()?;
        let (m, l) = (topology.node_count(), topology.local_rank_count());
        let slot_count = (options.slot_count as usize).min(groups.len());
        let gather_rounds = gather_rounds(m);
        let mut arena_layout = ArenaLayout::default();
        let largest = |slot: usize| layouts.iter().skip(slot).step_by(slot_count).map(GroupLayout::landing_bytes).max();
        let ring_slots =
            (0..slot_count).map(|slot| arena_layout.region("ring slot", largest(slot).unwrap_or(0))).collect();
        let stage_bytes = layouts.iter().zip(groups).map(|(layout, g)| group::stage_bytes(layout, g.cast, m)).max();
        let regions = Regions {
            ring_slots,
            stage: arena_layout.region("receive stage", stage_bytes.unwrap_or(0)),
            landing_free: arena_layout.signals(l),
            gathered: arena_layout.signals(l),
            data: arena_layout.signals(m * comm.options().context_count),
            credit: arena_layout.signals(m),
            progress: arena_layout.signals(1),
            lead: arena_layout.signals(gather_rounds.len() as u32 * comm.options().context_count),
            pace: arena_layout.signals(gather_rounds.len() as u32),
        };
        let shards: Vec<Option<Region>> = layouts
            .iter()
            .zip(groups)
            .map(|(layout, g)| (!g.cast).then(|| arena_layout.region("resident shard", group::slot_bytes(layout))))
            .collect();
        let mut facts = Facts::new().with("options", format_args!("{options:?}"));
        for (index, g) in groups.iter().enumerate() {
            facts.push(&format!("group {index}"), format_args!("{:016x}, cast {}", g.group.signature(), g.cast));
        }
        let (arena, net) = comm.install("gather ring", &facts, arena_layout)?;
        let slot_bytes_max = layouts.iter().map(group::slot_bytes).max().unwrap_or(0);
        let mut states = Vec::new();
        for (index, (layout, shards)) in layouts.into_iter().zip(shards).enumerate() {
            states.push(GroupState::new(
                comm,
                (&arena, &net),
                &regions,
                &gather_rounds,
                layout,
                shards,
                (index % slot_count, options, slot_bytes_max),
            )?);
        }
        let (mut streams, mut net_streams) = (Vec::new(), Vec::new());
        for rank in comm.driven().iter() {
            streams.push(RankStreams {
                ready: comm.create_stream(rank, Priority::High)?,
                scatter: comm.create_stream(rank, Priority::High)?,
                complete: comm.create_stream(rank, Priority::High)?,
            });
            net_streams.push(comm.create_stream(rank, Priority::High)?);
        }
        comm.installed("gather ring")?;
        let none = || vec![None; comm.driven().count() as usize];
        let free = || RingSlot { occupant: None, released: none(), filled: none() };
        Ok(Self {
            comm: comm.clone(),
            node: NodeSignals { comm: comm.clone(), arena: Arc::clone(&arena), operation: Operation::AllGather },
            arena,
            regions,
            groups: states,
            slots: (0..slot_count).map(|_| free()).collect(),
            gather_rounds,
            streams,
            net_streams,
            epoch: 0,
            descriptor_count: 0,
        })
    }

    /// Groups.
    pub fn group_count(&self) -> usize {
        self.groups.len()
    }

    /// The ring slot that a group uses.
    pub fn slot_of(&self, group: usize) -> usize {
        self.groups[group].ring_slot
    }

    /// The group that occupies a ring slot.
    pub fn occupant(&self, slot: usize) -> Option<usize> {
        self.slots[slot].occupant
    }

    /// A group's layout.
    pub fn layout(&self, group: usize) -> &GroupLayout {
        &self.groups[group].layout
    }

    /// Where a rank's padded shard of a parameter lies, resident: written once, read by every call. `None` with a cast.
    pub fn shard(&self, group: usize, rank: Rank, parameter: usize) -> Option<DeviceSlice> {
        let state = &self.groups[group];
        let p = &state.layout.parameters()[parameter];
        let address = self.arena.at(rank, state.shards?, p.shard_offset_bytes, p.shard_bytes);
        Some(DeviceSlice { address, bytes: p.shard_bytes })
    }

    /// Where a parameter lies on a rank while its group occupies its ring slot: `[D_p, trailing…]`, contiguous.
    pub fn parameter(&self, group: usize, rank: Rank, parameter: usize) -> DeviceSlice {
        let state = &self.groups[group];
        let p = &state.layout.parameters()[parameter];
        let item_bytes = p.shard_bytes.checked_div(p.shard_elems).unwrap_or(1);
        let bytes = p.elems * item_bytes;
        let offset = state.layout.landing_offset_bytes(parameter, 0);
        DeviceSlice { address: self.arena.at(rank, self.landing_region(group), offset, bytes), bytes }
    }

    fn landing_region(&self, group: usize) -> Region {
        self.regions.ring_slots[self.groups[group].ring_slot]
    }

    /// Bytes that each rank has allocated: ring slots, receive stage, resident shards and signals, as allocated.
    pub fn buffer_bytes(&self) -> u64 {
        self.arena.bytes()
    }

    /// Names and bytes of the arena's regions.
    pub fn regions(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.arena.layout().regions()
    }

    /// Copy descriptors that rank 0 has issued in its last gather.
    pub fn descriptor_count(&self) -> u64 {
        self.descriptor_count
    }

    /// Gathers so far.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Enqueues the gather of a group on every driven rank; `ranks` in rank order. The group then occupies its slot.
    ///
    /// The caller keeps the shards as they are until `read` and does not touch the parameters before `done`.
    ///
    /// # Errors
    /// [`TideError::Usage`] for a slot that is occupied, for wrong counts, sizes or alignments, before anything is enqueued;
    /// [`TideError::Poisoned`]; what the driver refuses.
    pub fn gather(&mut self, group: usize, ranks: &[RankGather]) -> Result<Vec<RankEvents>> {
        self.check_gather(group, ranks)?;
        self.check_vacant(group)?;
        self.descriptor_count = 0;
        let value = self.epoch + 1;
        for (rank, given) in self.comm.driven().iter().zip(ranks) {
            self.enter(group, rank, given, value)?;
        }
        for rank in self.comm.driven().iter() {
            self.scatter_own(group, rank, value)?;
        }
        self.run_rounds(group, value)?;
        let events = self.finish(group, value)?;
        let slot = &mut self.slots[self.groups[group].ring_slot];
        slot.occupant = Some(group);
        slot.filled = events.iter().map(|e| Some(e.done)).collect();
        self.epoch += 1;
        Ok(events)
    }

    /// Vacates the slot that a group occupies: it may be overwritten after these events, one per rank.
    ///
    /// # Errors
    /// [`TideError::Usage`] if the group does not occupy its slot, or for a wrong count; [`TideError::Poisoned`].
    pub fn release(&mut self, group: usize, after: &[Option<Event>]) -> Result<()> {
        self.comm.check()?;
        check_rank_count(after.len(), self.comm.driven())?;
        let index = self.check_group(group)?;
        let slot = &mut self.slots[index];
        if slot.occupant != Some(group) {
            return Err(TideError::usage(format!("group {group} does not occupy ring slot {index}")));
        }
        slot.occupant = None;
        slot.released = after.to_vec();
        Ok(())
    }

    /// Copies a group's gradients into the slot that it has vacated, in the layout of its parameters, on every driven rank; the
    /// group occupies the slot again, until it is released after the gradients were read.
    ///
    /// # Errors
    /// As [`GatherRing::gather`].
    pub fn store_gradients(&mut self, group: usize, ranks: &[RankSources]) -> Result<Vec<StoredGradients>> {
        self.comm.check()?;
        check_rank_count(ranks.len(), self.comm.driven())?;
        let index = self.check_vacant(group)?;
        let count = self.groups[group].layout.parameters().len();
        for (rank, given) in self.comm.driven().iter().zip(ranks) {
            if given.gradients.len() != count {
                let found = given.gradients.len();
                return Err(TideError::usage(format!(
                    "rank {}: {found} gradients given, the group has {count}",
                    rank.0
                )));
            }
            for (p, gradient) in given.gradients.iter().enumerate() {
                if let Some(gradient) = gradient {
                    let bytes = self.parameter(group, rank, p).bytes;
                    check_slice(&format!("rank {}, gradient {p}", rank.0), *gradient, bytes, 1)?;
                }
            }
        }
        let mut stored = Vec::new();
        for (rank, given) in self.comm.driven().iter().zip(ranks) {
            let stream = self.streams[self.comm.index(rank)].ready;
            self.wait_vacated(stream, index, rank)?;
            if let Some(ready) = given.ready {
                self.gpu().wait_event(stream, ready)?;
            }
            let mut gradients = Vec::new();
            for (p, gradient) in given.gradients.iter().enumerate() {
                let place = self.parameter(group, rank, p);
                if let Some(gradient) = gradient.filter(|_| place.bytes > 0) {
                    self.gpu().copy(stream, &Copy2d::flat(place.address, gradient.address, place.bytes))?;
                }
                gradients.push(gradient.map(|_| place));
            }
            stored.push(StoredGradients { gradients, stored: self.gpu().record(stream)? });
        }
        let slot = &mut self.slots[index];
        slot.occupant = Some(group);
        slot.filled = stored.iter().map(|s| Some(s.stored)).collect();
        Ok(stored)
    }

    /// Makes `stream` wait until a rank's part of a ring slot may be overwritten.
    fn wait_vacated(&self, stream: Stream, slot: usize, rank: Rank) -> Result<()> {
        let slot = &self.slots[slot];
        let events = [slot.released[self.comm.index(rank)], slot.filled[self.comm.index(rank)]];
        events.into_iter().flatten().try_for_each(|event| self.gpu().wait_event(stream, event))
    }

    fn check_group(&self, group: usize) -> Result<usize> {
        match self.groups.get(group) {
            Some(state) => Ok(state.ring_slot),
            None => Err(TideError::usage(format!("group {group}: the ring has {}", self.groups.len()))),
        }
    }

    /// Refuses a group whose slot is occupied; gives the slot.
    fn check_vacant(&self, group: usize) -> Result<usize> {
        let slot = self.check_group(group)?;
        match self.slots[slot].occupant {
            Some(occupant) => Err(TideError::usage(format!(
                "group {group}: ring slot {slot} is occupied by group {occupant}, which was not released"
            ))),
            None => Ok(slot),
        }
    }

    /// Refuses arguments of a gather, whoever occupies its slot.
    pub(super) fn check_gather(&self, group: usize, ranks: &[RankGather]) -> Result<()> {
        self.comm.check()?;
        self.check_group(group)?;
        check_rank_count(ranks.len(), self.comm.driven())?;
        let state = &self.groups[group];
        let expected = if state.shards.is_none() { state.layout.parameters().len() } else { 0 };
        for (Rank(rank), given) in self.comm.driven().iter().zip(ranks) {
            if given.masters.len() != expected {
                let found = given.masters.len();
                return Err(TideError::usage(format!("rank {rank}: {found} fp32 masters given, expected {expected}")));
            }
            for (index, (master, p)) in given.masters.iter().zip(state.layout.parameters()).enumerate() {
                check_slice(&format!("rank {rank}, master {index}"), *master, 4 * p.shard_elems, 4)?;
            }
        }
        Ok(())
    }

    /// Publishes that the rank's landing may be overwritten, and makes stage slot 0 hold its shard. The rounds need the
    /// second alone: they wait for no landing.
    fn enter(&mut self, group: usize, rank: Rank, given: &RankGather, value: u64) -> Result<()> {
        let index = self.comm.index(rank);
        let (ready, scatter, net) = (self.streams[index].ready, self.streams[index].scatter, self.net_streams[index]);
        self.wait_vacated(ready, self.groups[group].ring_slot, rank)?;
        self.node.raise_node(ready, rank, self.regions.landing_free, value)?;
        if let Some(shards) = given.ready {
            self.gpu().wait_event(net, shards)?;
        }
        if self.groups[group].shards.is_none() {
            self.cast(group, rank, net, given)?;
        }
        self.comm.join(net, [scatter])?;
        Ok(())
    }

    fn cast(&mut self, group: usize, rank: Rank, stream: Stream, given: &RankGather) -> Result<()> {
        let state = &mut self.groups[group];
        let segments: Vec<CastSegment> = given
            .masters
            .iter()
            .zip(state.layout.parameters())
            .map(|(master, p)| CastSegment {
                source: master.address.0,
                elems: p.shard_elems,
                packed_first: p.packed_offset_elems,
            })
            .collect();
        let gpu = self.comm.gpu();
        let tables = &mut state.cast_tables[self.comm.index(rank)];
        if tables.last().is_none_or(|last| last.segments != segments) {
            // A table that a call in flight reads must not go.
            let mut is_read = |table: &CastTable| gpu.is_complete(table.read).map(|complete| !complete).unwrap_or(true);
            tables.retain(&mut is_read);
        }
        let reused = tables.iter().position(|table| table.segments == segments).map(|at| tables.remove(at).table);
        let table = match reused {
            Some(table) => table,
            None => DeviceBuffer::from_slice(gpu, self.comm.device_of(rank), &segments)?,
        };
        let params = CastParams {
            segments: table.address().0,
            segment_count: segments.len() as u64,
            out: self.arena.at(rank, self.regions.stage, 0, state.layout.shard_bytes()).0,
        };
        let block = self.comm.gpu().properties(self.comm.device_of(rank)).shape.plain_threads;
        let params = bytemuck::bytes_of(&params);
        let launch = Launch { kernel: Kernel::Cast, grid: CAST_CTAS, block, cluster: 1, shared_bytes: 0, params };
        // SAFETY: the table is kept until it is read, masters until `read` by the caller, as checked.
        unsafe { gpu.launch(stream, &launch) }?;
        tables.push(CastTable { segments, table, read: gpu.record(stream)? });
        Ok(())
    }

    /// Scatters the rank's own shard once all local landings are free.
    fn scatter_own(&mut self, group: usize, rank: Rank, value: u64) -> Result<()> {
        let stream = self.streams[self.comm.index(rank)].scatter;
        let why = (WaitKind::LandingFree, self.place(0));
        self.node.wait_node(stream, rank, self.regions.landing_free, value, why)?;
        self.scatter(group, rank, 0, 1)
    }

    /// Copies `count` stage slots from `first` on, whose nodes ascend by one, into all local landings: one copy per
    /// parameter.
    fn scatter(&mut self, group: usize, rank: Rank, first: u32, count: u32) -> Result<()> {
        let topology = self.topology();
        let state = &self.groups[group];
        let stream = self.streams[self.comm.index(rank)].scatter;
        let source_node = slot_node(topology.node_count(), topology.node_of(rank), first);
        let source_rank = u64::from(topology.rank(source_node, topology.local_of(rank)).0);
        let rank_pitch = u64::from(topology.local_rank_count());
        let (region, slot_first) = state.stage_slot(&self.regions, first);
        let mut copies = Vec::new();
        for (index, p) in state.layout.parameters().iter().enumerate().filter(|(_, p)| p.shard_bytes > 0) {
            let rows = u64::from(count);
            let landing_offset = state.layout.landing_offset_bytes(index, source_rank);
            let landing_span = (rows - 1) * rank_pitch * p.shard_bytes + p.shard_bytes;
            let slot_span = (rows - 1) * state.slot_bytes + p.shard_bytes;
            let source = self.arena.at(rank, region, slot_first + p.shard_offset_bytes, slot_span);
            for destination in self.landings(group, rank, landing_offset, landing_span) {
                copies.push(Copy2d {
                    destination,
                    destination_pitch_bytes: rank_pitch * p.shard_bytes,
                    source,
                    source_pitch_bytes: state.slot_bytes,
                    width_bytes: p.shard_bytes,
                    rows,
                });
            }
        }
        self.gpu().copy_batch(stream, &copies)?;
        if rank == Rank(0) {
            self.descriptor_count += copies.len() as u64;
        }
        Ok(())
    }

    /// Where a landing offset is written: one multicast address, or every local rank's own.
    fn landings(&self, group: usize, rank: Rank, offset: u64, bytes: u64) -> Vec<DevicePtr> {
        let region = self.landing_region(group);
        match self.arena.multicast(self.topology().node_of(rank), region, offset, bytes) {
            Some(multicast) => vec![multicast],
            None => self.arena.node_ranks(rank).map(|(_, peer)| self.arena.at(peer, region, offset, bytes)).collect(),
        }
    }

    /// The rounds, and the scatter of what each brings.
    fn run_rounds(&mut self, group: usize, value: u64) -> Result<()> {
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
            self.groups[group].rounds.run(&self.net_streams, &call)?;
        }
        for index in 0..self.gather_rounds.len() {
            if !on_device {
                (call.first, call.count) = (index as u32, 1);
                self.groups[group].rounds.run(&self.net_streams, &call)?;
            }
            let round = self.gather_rounds[index];
            for rank in self.comm.driven().iter() {
                let topology = self.topology();
                let (net, scatter) =
                    (self.net_streams[self.comm.index(rank)], self.streams[self.comm.index(rank)].scatter);
                if on_device {
                    let arrived = call.progress_first + index as u64 + 1;
                    let source = round.source(topology.node_count(), topology.node_of(rank));
                    let peer = topology.rank(source, topology.local_of(rank));
                    let why = (WaitKind::RoundArrived, self.place(index as u32));
                    self.node.wait(scatter, (rank, peer), self.regions.progress.signal(0), arrived, why)?;
                } else {
                    self.comm.join(net, [scatter])?;
                }
                for (first, count) in scatter_copies(topology.node_count(), topology.node_of(rank), &round) {
                    self.scatter(group, rank, first, count)?;
                }
            }
        }
        Ok(())
    }

    /// Returns credits, joins the node, and gives the events.
    fn finish(&mut self, group: usize, value: u64) -> Result<Vec<RankEvents>> {
        let mut reads = Vec::new();
        for rank in self.comm.driven().iter() {
            let (net, streams) = (self.net_streams[self.comm.index(rank)], &self.streams[self.comm.index(rank)]);
            self.node.raise_node(streams.scatter, rank, self.regions.gathered, value)?;
            // The stage may be overwritten once it is scattered and what it forwards is sent.
            self.comm.join(streams.scatter, [net])?;
            self.groups[group].rounds.return_credits(net, rank, 0, value)?;
            reads.push(self.gpu().record(net)?);
        }
        let mut events = Vec::new();
        for (rank, read) in self.comm.driven().iter().zip(reads) {
            let complete = self.streams[self.comm.index(rank)].complete;
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

impl Drop for GatherRing {
    /// Waits for the work in flight, which uses the arena.
    fn drop(&mut self) {
        if let Err(error) = self.comm.synchronize() {
            tracing::warn!(%error, "a gather ring was dropped after a failure");
        }
        let own = self.streams.iter().flat_map(|s| [s.ready, s.scatter, s.complete]);
        let rounds = self.groups.iter().flat_map(|g| g.rounds.streams());
        self.comm.destroy_streams(own.chain(self.net_streams.iter().copied()).chain(rounds).collect::<Vec<_>>());
    }
}

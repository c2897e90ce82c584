//! TIDE-RS: per-parameter gradients, where they lie, into packed fp32 shards [TIDE §4, §5.2, App. E alg. 1].
//!
//! A call has two phases. The **read phase** pushes gradients to the local rank that sums them (copy engines) and sums
//! them (Level 1), into an outbox bank and own-node spares; once it is over the gradients are free. The **network
//! phase**, behind the previous call's, sends outbox blocks wave by wave and lands each wave (Level 2).
//!
//! Streams of a rank: `push` and `sum` carry the read phase, `net` the rounds, `land` the landings. Words by which local
//! ranks wait for each other are signals of the arena; all only grow:
//!
//! | signal | at | raised by | to | when |
//! |---|---|---|---|---|
//! | staging full | owner, per pusher | pusher | items pushed | its copies of the item are done |
//! | staging free | pusher, per owner | owner | items summed | the sum has read the slot |
//! | arrived | each local rank, per local rank | it | waves | its inbox holds the wave |
//! | landed | each local rank, per local rank | it | waves | its landing has read all inboxes |
//! | data | receiver, per source node and context | the put | blocks | the block is there |
//! | credit | sender, per destination node | the receiver | blocks | the node has landed what the block overwrites |

use super::rounds::{RankRound, Rounds, RoundsCall};
use super::{Communicator, GradientDtype, RankEvents, Scale, check_fast_path, check_rank_count, check_slice};
use crate::arena::{Arena, ArenaLayout, Region, Signals};
use crate::error::{Result, TideError};
use crate::gpu::{Copy2d, DeviceBuffer, DevicePtr, DeviceSlice, Event, Fill2d, Launch, MemoryWait, Priority, Stream};
use crate::layout::{Group, GroupLayout};
use crate::plan::{LocalRank, Mode, Node, Rank, ReduceScatterOptions, ReduceScatterPlan, Topology, Wave, latin_square};
use std::ops::Range;
use std::sync::Arc;
use tide_device::abi::fault::{Operation, WaitKind, WaitTag};
use tide_device::abi::kernel::Kernel;
use tide_device::abi::params::{Credit, GRADIENTS_MAX, LOCAL_RANKS_MAX, LandParams, NetArrival, NetPut, SumParams};
use tide_device::abi::segment::Segment;
use tide_device::kernels::sum;

/// Most stages of a sum's ring: more hide no more latency.
const SUM_STAGES_MAX: u32 = 12;

/// What one rank brings to a call.
#[derive(Debug, Clone)]
pub struct RankGradients {
    /// Its unsharded gradients, `[D_p, trailing…]`, contiguous, in the group's order. `None` stands for a gradient that
    /// is all zeros: a parameter that the rank did not use. At least 2-byte (bf16) or 4-byte (fp32) aligned.
    pub gradients: Vec<Option<DeviceSlice>>,
    /// Its packed fp32 shard, 16-byte aligned: every parameter's padded `[R_p, trailing…]`, in the group's order.
    pub out: DeviceSlice,
    /// When the gradients are complete and the output may be written; `None` if they are and it may.
    pub ready: Option<Event>,
}

#[derive(Clone, Copy)]
struct Regions {
    staging: Region,
    inbox: Region,
    outbox: Region,
    spare: Region,
    accumulator: Region,
    staging_full: Signals,
    staging_free: Signals,
    arrived: Signals,
    landed: Signals,
    data: Signals,
    credit: Signals,
}

struct RankStreams {
    push: Stream,
    sum: Stream,
    land: Stream,
}

/// A reduce-scatter of one group: planned, allocated, ready to be called again and again.
pub struct ReduceScatter {
    comm: Communicator,
    layout: GroupLayout,
    dtype: GradientDtype,
    plan: ReduceScatterPlan,
    arena: Arc<Arena>,
    regions: Regions,
    rounds: Rounds,
    streams: Vec<RankStreams>,
    net_streams: Vec<Stream>,
    segments: Vec<Segment>,
    /// Per device.
    segment_tables: Vec<DeviceBuffer>,
    epoch: u64,
    /// Staging items so far: all ranks push and sum them in the same order.
    items: u64,
    /// Per bank, per rank: when the bank's last call had sent its blocks and copied its spares.
    bank_free: [Vec<Option<Event>>; 2],
    descriptor_count: u64,
}

/// Which partial of a call a Level 1 item belongs to.
#[derive(Clone, Copy)]
struct Partial {
    pass: u32,
    contributor: u32,
    /// Region and byte offset of the block it is summed into.
    block: (Region, u64),
}

impl ReduceScatter {
    /// Plans a reduce-scatter of `group`, allocates its arena on every rank and uploads its tables.
    ///
    /// # Errors
    /// [`TideError::Layout`] and [`TideError::Plan`] for what has no plan; [`TideError::Unsupported`] for a group of more
    /// than 256 parameters, which [`super::StockReduceScatter`] takes, and for [`Mode::SlotReuse`]; what the driver refuses.
    pub fn new(
        comm: &Communicator,
        group: &Group,
        dtype: GradientDtype,
        options: &ReduceScatterOptions,
    ) -> Result<Self> {
        comm.check()?;
        check_fast_path(group)?;
        let topology = comm.topology();
        let layout = GroupLayout::new(group, u64::from(topology.rank_count()))?;
        let plan = ReduceScatterPlan::new(topology, &layout, dtype.bytes(), options)?;
        if plan.mode != Mode::InPlace {
            let needed = "gradients that stay in place (mode in-place)".into();
            return Err(TideError::Unsupported { needed, found: plan.mode.to_string() });
        }
        let (arena_layout, regions) = regions(&plan, comm.options().context_count);
        let arena = Arc::new(Arena::new(comm.gpu(), topology, arena_layout, |r| comm.device_of(r))?);
        let (tables, credits) = network_tables(&plan, &regions, comm.options().context_count);
        let rounds = Rounds::new(comm, &arena, Operation::ReduceScatter, tables, credits, |_| 0)?;
        let segments = segments(&layout);
        let devices = 0..comm.gpu().device_count();
        let segment_tables =
            devices.map(|d| DeviceBuffer::from_slice(comm.gpu(), d, &segments)).collect::<Result<_>>()?;
        let (mut streams, mut net_streams) = (Vec::new(), Vec::new());
        for rank in topology.ranks() {
            streams.push(RankStreams {
                push: comm.create_stream(rank, Priority::Normal)?,
                sum: comm.create_stream(rank, Priority::Normal)?,
                land: comm.create_stream(rank, Priority::High)?,
            });
            net_streams.push(comm.create_stream(rank, Priority::High)?);
        }
        let no_bank = || vec![None; topology.rank_count() as usize];
        let this = Self {
            comm: comm.clone(),
            layout,
            dtype,
            plan,
            arena,
            regions,
            rounds,
            streams,
            net_streams,
            segments,
            segment_tables,
            epoch: 0,
            items: 0,
            bank_free: [no_bank(), no_bank()],
            descriptor_count: 0,
        };
        this.zero_inboxes()?;
        Ok(this)
    }

    /// The plan.
    pub fn plan(&self) -> &ReduceScatterPlan {
        &self.plan
    }

    /// The group's layout.
    pub fn layout(&self) -> &GroupLayout {
        &self.layout
    }

    /// Bytes of a rank's output.
    pub fn output_bytes(&self) -> u64 {
        4 * self.layout.packed_elems()
    }

    /// Bytes that each rank has allocated for this collective, besides gradients and output: its arena, as allocated.
    pub fn buffer_bytes(&self) -> u64 {
        self.arena.bytes()
    }

    /// Copy descriptors that the busiest rank has issued in its last call.
    pub fn descriptor_count(&self) -> u64 {
        self.descriptor_count
    }

    /// Calls so far.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Enqueues one call on every driven rank; `ranks` in rank order. Calls run in the order in which they are enqueued.
    ///
    /// The caller keeps gradients as they are until `read` and does not touch the output before `done`.
    ///
    /// # Errors
    /// [`TideError::Usage`] for wrong counts, sizes, alignments or null addresses, before anything is enqueued;
    /// [`TideError::Poisoned`]; what the driver refuses.
    pub fn enqueue(&mut self, ranks: &[RankGradients], scale: Scale) -> Result<Vec<RankEvents>> {
        self.comm.check()?;
        self.check_arguments(ranks)?;
        self.descriptor_count = 0;
        let bank = (self.epoch % 2) as u32;
        for (rank, given) in self.topology().ranks().zip(ranks) {
            let streams = self.streams(rank);
            let bank_free = self.bank_free[bank as usize][rank.0 as usize];
            for event in [given.ready, bank_free].into_iter().flatten() {
                self.gpu().wait_event(streams.sum, event)?;
            }
            if let Some(ready) = given.ready {
                self.gpu().wait_event(streams.push, ready)?;
                self.gpu().wait_event(streams.land, ready)?;
            }
        }
        let (sums, read) = self.read_phase(ranks, bank)?;
        let done = self.network_phase(ranks, scale, bank, &sums)?;
        for rank in self.topology().ranks() {
            self.bank_free[bank as usize][rank.0 as usize] =
                Some(self.gpu().record(self.net_streams[rank.0 as usize])?);
        }
        self.epoch += 1;
        Ok(read.into_iter().zip(done).map(|(read, done)| RankEvents { read, done }).collect())
    }

    fn check_arguments(&self, ranks: &[RankGradients]) -> Result<()> {
        check_rank_count(ranks.len(), self.topology().rank_count())?;
        for (rank, given) in ranks.iter().enumerate() {
            let expected = self.layout.parameters().len();
            if given.gradients.len() != expected {
                let found = given.gradients.len();
                return Err(TideError::usage(format!(
                    "rank {rank}: {found} gradients given, the group has {expected}"
                )));
            }
            check_slice(&format!("rank {rank}, output"), given.out, self.output_bytes(), 16)?;
            for (index, (gradient, layout)) in given.gradients.iter().zip(self.layout.parameters()).enumerate() {
                if let Some(gradient) = gradient {
                    let bytes = layout.elems * self.dtype.bytes();
                    check_slice(&format!("rank {rank}, gradient {index}"), *gradient, bytes, self.dtype.bytes())?;
                }
            }
        }
        Ok(())
    }

    /// Pushes and sums everything; gives the event of each partial's sum per rank (remote blocks in sending order, then the
    /// own ones by pass), and of the end of each rank's reads.
    fn read_phase(&mut self, ranks: &[RankGradients], bank: u32) -> Result<(Vec<Vec<Event>>, Vec<Event>)> {
        let node_count = self.topology().node_count();
        let mut sums = vec![Vec::new(); ranks.len()];
        for pass in 0..self.plan.pass_count {
            for contributor in 1..node_count {
                let slot = bank * self.plan.outbox_block_count + self.plan.outbox_slot(pass, contributor);
                let block = (self.regions.outbox, u64::from(slot) * self.plan.block_bytes());
                self.level_1(ranks, Partial { pass, contributor, block }, &mut sums)?;
            }
        }
        for pass in 0..self.plan.pass_count {
            let block = (self.regions.spare, self.spare_offset(bank, pass));
            self.level_1(ranks, Partial { pass, contributor: node_count, block }, &mut sums)?;
        }
        let mut read = Vec::new();
        for rank in self.topology().ranks() {
            let streams = self.streams(rank);
            self.comm.join(streams.push, [streams.sum])?;
            read.push(self.gpu().record(streams.sum)?);
        }
        Ok((sums, read))
    }

    fn spare_offset(&self, bank: u32, pass: u32) -> u64 {
        u64::from(bank * self.plan.pass_count + pass) * self.plan.block_bytes()
    }

    /// Pushes and sums one partial on every rank, chunk by chunk.
    fn level_1(&mut self, ranks: &[RankGradients], partial: Partial, sums: &mut [Vec<Event>]) -> Result<()> {
        for chunk in 0..self.plan.geometry.chunk_count {
            let item = self.items;
            self.items += 1;
            for rank in self.topology().ranks() {
                self.push_item(rank, &ranks[rank.0 as usize], partial, chunk, item)?;
            }
            for rank in self.topology().ranks() {
                self.sum_item(rank, &ranks[rank.0 as usize], partial, chunk, item)?;
            }
        }
        for rank in self.topology().ranks() {
            sums[rank.0 as usize].push(self.gpu().record(self.streams(rank).sum)?);
        }
        Ok(())
    }

    /// The node whose ranks an item's rows belong to, as `rank`'s node sees it.
    fn destination(&self, rank: Rank, contributor: u32) -> Node {
        latin_square::destination(self.topology().node_count(), self.topology().node_of(rank), contributor)
    }

    /// One rank's pushes of an item to the local ranks that sum it.
    fn push_item(&mut self, rank: Rank, given: &RankGradients, partial: Partial, chunk: u64, item: u64) -> Result<()> {
        let topology = self.topology();
        let (me, l) = (topology.local_of(rank), topology.local_rank_count());
        let stream = self.streams(rank).push;
        let mut descriptors = 0;
        // Each rank starts with its right neighbour, so that no owner receives from all at once.
        for step in 1..l {
            let owner = LocalRank((me.0 + step) % l);
            let owner_rank = topology.rank(topology.node_of(rank), owner);
            if let Some(value) = (item + 1).checked_sub(u64::from(self.plan.staging_slot_count)).filter(|v| *v > 0) {
                let signal = self.regions.staging_free.signal(owner.0);
                self.wait(stream, rank, signal, value, self.tag(rank, owner_rank, WaitKind::StagingFree, 0))?;
            }
            let sub_slice = latin_square::sub_slice(topology, owner, partial.contributor);
            let range = self.plan.geometry.chunk_range(partial.pass, sub_slice, chunk);
            let destination = self.destination(rank, partial.contributor);
            descriptors += self.push_range(stream, me, owner_rank, given, destination, range, item)?;
            self.gpu().write_value(
                stream,
                self.arena.signal(owner_rank, self.regions.staging_full.signal(me.0)),
                item + 1,
            )?;
        }
        if topology.node_of(rank) == Node(0) && me == LocalRank(0) {
            self.descriptor_count += descriptors;
        }
        Ok(())
    }

    /// Copies packed positions `range` of the destination node's rows from `given` into the owner's staging slot: one
    /// strided copy per parameter, and one more where the last row that exists ends within the range.
    #[allow(clippy::too_many_arguments)]
    fn push_range(
        &self,
        stream: Stream,
        me: LocalRank,
        owner: Rank,
        given: &RankGradients,
        destination: Node,
        range: Range<u64>,
        item: u64,
    ) -> Result<u64> {
        let topology = self.topology();
        let (item_bytes, l) = (self.dtype.bytes(), u64::from(topology.local_rank_count()));
        let pitch = self.staging_pitch_bytes();
        let slot = item % u64::from(self.plan.staging_slot_count) * self.plan.staging_slot_bytes();
        let owner_local = topology.local_of(owner).0;
        let source_index = u64::from(if me.0 < owner_local { me.0 } else { me.0 - 1 });
        let first_rank = u64::from(topology.rank(destination, LocalRank(0)).0);
        let mut descriptors = 0;
        for segment in &self.segments {
            let (first, end) = (range.start.max(segment.packed_first), range.end.min(segment.packed_end));
            if first >= end {
                continue;
            }
            let within = first - segment.packed_first;
            let mut copy = |row: u64, rows: u64, elems: u64| -> Result<()> {
                let width_bytes = elems * item_bytes;
                let offset = slot + (source_index * l + row) * pitch + (first - range.start) * item_bytes;
                let span = (rows - 1) * pitch + width_bytes;
                let target = self.arena.at(owner, self.regions.staging, offset, span);
                descriptors += 1;
                match given.gradients[segment.gradient as usize] {
                    Some(gradient) => {
                        let element = (first_rank + row) * segment.shard_elems() + within;
                        let copy = Copy2d {
                            destination: target,
                            destination_pitch_bytes: pitch,
                            source: DevicePtr(gradient.address.0 + element * item_bytes),
                            source_pitch_bytes: segment.shard_elems() * item_bytes,
                            width_bytes,
                            rows,
                        };
                        self.gpu().copy(stream, &copy)
                    }
                    None => {
                        let fill = Fill2d { destination: target, pitch_bytes: pitch, width_bytes, rows, value: 0 };
                        self.gpu().fill(stream, &fill)
                    }
                }
            };
            // Elements of the range that exist, row by row; they only decrease.
            let live = |row: u64| {
                let before = (first_rank + row) * segment.shard_elems() + within;
                segment.live_elems.saturating_sub(before).min(end - first)
            };
            let full_rows = (0..l).take_while(|&row| live(row) == end - first).count() as u64;
            if full_rows > 0 {
                copy(0, full_rows, end - first)?;
            }
            if full_rows < l && live(full_rows) > 0 {
                copy(full_rows, 1, live(full_rows))?;
            }
        }
        Ok(descriptors)
    }

    /// Bytes from one staged row to the next: the capacity of a chunk, a multiple of 64.
    fn staging_pitch_bytes(&self) -> u64 {
        self.plan.geometry.chunk_elems * self.dtype.bytes()
    }

    /// One rank's sum of an item.
    fn sum_item(&self, rank: Rank, given: &RankGradients, partial: Partial, chunk: u64, item: u64) -> Result<()> {
        let topology = self.topology();
        let me = topology.local_of(rank);
        let stream = self.streams(rank).sum;
        let others = || self.arena.node_ranks(rank).filter(move |(l, _)| *l != me);
        for (local, pusher) in others() {
            let signal = self.regions.staging_full.signal(local.0);
            self.wait(stream, rank, signal, item + 1, self.tag(rank, pusher, WaitKind::StagingFull, 0))?;
        }
        let sub_slice = latin_square::sub_slice(topology, me, partial.contributor);
        let range = self.plan.geometry.chunk_range(partial.pass, sub_slice, chunk);
        if !range.is_empty() {
            self.launch_sum(stream, rank, given, partial, chunk, range, item)?;
        }
        for (_, pusher) in others() {
            let word = self.arena.signal(pusher, self.regions.staging_free.signal(me.0));
            self.gpu().write_value(stream, word, item + 1)?;
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn launch_sum(
        &self,
        stream: Stream,
        rank: Rank,
        given: &RankGradients,
        partial: Partial,
        chunk: u64,
        range: Range<u64>,
        item: u64,
    ) -> Result<()> {
        let topology = self.topology();
        let l = topology.local_rank_count();
        let geometry = &self.plan.geometry;
        let pitch = self.staging_pitch_bytes();
        let (region, block_offset) = partial.block;
        let out_offset = block_offset + 4 * chunk * geometry.chunk_elems;
        let out_span = 4 * (u64::from(l - 1) * geometry.part_elems + (range.end - range.start));
        let slot = item % u64::from(self.plan.staging_slot_count) * self.plan.staging_slot_bytes();
        let device = self.comm.device_of(rank);
        let shape = self.gpu().properties(device).shape;
        let stage_bytes = sum::shared_bytes(shape.sum_consumers, 1, self.dtype.bytes() as u32);
        let stage_count = (shape.sum_shared_bytes / stage_bytes).clamp(1, SUM_STAGES_MAX);
        let mut gradients = [0; GRADIENTS_MAX];
        for (address, gradient) in gradients.iter_mut().zip(&given.gradients) {
            *address = gradient.map_or(0, |g| g.address.0);
        }
        let params = SumParams {
            deadline: self.comm.deadline(rank),
            staging: self.arena.at(rank, self.regions.staging, slot, self.plan.staging_slot_bytes()).0,
            source_pitch_bytes: u64::from(l) * pitch,
            row_pitch_bytes: pitch,
            out: self.arena.at(rank, region, out_offset, out_span).0,
            out_pitch_elems: geometry.part_elems,
            segments: self.segment_tables[device as usize].address().0,
            packed_first: range.start,
            row_elems: range.end - range.start,
            source_count: l - 1,
            row_count: l,
            first_rank: topology.rank(self.destination(rank, partial.contributor), LocalRank(0)).0,
            segment_count: self.segments.len() as u32,
            stage_count,
            rank: rank.0,
            gradients,
        };
        let kernel = match self.dtype {
            GradientDtype::Bf16 => Kernel::SumBf16,
            GradientDtype::F32 => Kernel::SumF32,
        };
        let launch = Launch {
            kernel,
            grid: self.plan.sum_cta_count,
            block: shape.warp_size + shape.sum_consumers,
            shared_bytes: sum::shared_bytes(shape.sum_consumers, stage_count, self.dtype.bytes() as u32),
            params: bytemuck::bytes_of(&params),
        };
        // SAFETY: addresses of the arena and of tables that live as long as `self`; gradients as checked by
        // `check_arguments`, kept by the caller until the read event.
        unsafe { self.gpu().launch(stream, &launch) }
    }

    /// Sends and lands everything; gives the event of each rank's last landing.
    fn network_phase(
        &mut self,
        ranks: &[RankGradients],
        scale: Scale,
        bank: u32,
        sums: &[Vec<Event>],
    ) -> Result<Vec<Event>> {
        let mut done = Vec::new();
        for pass in 0..self.plan.pass_count {
            for wave in &self.plan.waves {
                self.net_wave(wave, pass, bank, sums)?;
                done = self.land_wave(ranks, scale, wave, pass)?;
            }
        }
        Ok(done)
    }

    /// Passes over the network before this one, over all calls; every pair of nodes exchanges one block in each.
    fn pass_sequence(&self, pass: u32) -> u64 {
        self.epoch * u64::from(self.plan.pass_count) + u64::from(pass)
    }

    /// The number of a wave over all calls.
    fn wave_sequence(&self, pass: u32, wave: u32) -> u64 {
        self.pass_sequence(pass) * self.plan.waves.len() as u64 + u64::from(wave)
    }

    /// The number of the wave that used this wave's generation before it, if one did.
    fn previous_on_generation(&self, pass: u32, wave: &Wave) -> Option<u64> {
        let (count, generations) = (self.plan.waves.len() as u32, self.plan.generation_count);
        if wave.index >= generations {
            return Some(self.wave_sequence(pass, wave.index - generations));
        }
        let last = (0..count).rev().find(|w| w % generations == wave.generation)?;
        self.wave_sequence(pass, 0).checked_sub(u64::from(count - last))
    }

    /// A wave's rounds on every rank, up to "this rank's inbox holds the wave".
    fn net_wave(&self, wave: &Wave, pass: u32, bank: u32, sums: &[Vec<Event>]) -> Result<()> {
        let topology = self.topology();
        let remote_count = topology.node_count() - 1;
        for rank in topology.ranks() {
            let stream = self.net_streams[rank.0 as usize];
            if let Some(previous) = self.previous_on_generation(pass, wave) {
                self.wait_node(stream, rank, self.regions.landed, previous + 1, WaitKind::WaveLanded, wave.index)?;
            }
            self.zero_stale_blocks(stream, rank, wave)?;
            for contributor in wave.remote_contributors() {
                let block = pass * remote_count + contributor - 1;
                self.gpu().wait_event(stream, sums[rank.0 as usize][block as usize])?;
            }
        }
        let first = self.plan.waves[..wave.index as usize].iter().map(|w| w.rounds.len() as u32).sum();
        let bank_shift = u64::from(bank * self.plan.outbox_block_count) * self.plan.block_bytes();
        let call = RoundsCall {
            epoch: self.epoch,
            sequence: self.pass_sequence(pass) + 1,
            source_shift: bank_shift + u64::from(pass * remote_count) * self.plan.block_bytes(),
            progress_first: 0,
            first,
            count: wave.rounds.len() as u32,
        };
        self.rounds.run(&self.net_streams, &call)?;
        for rank in topology.ranks() {
            let stream = self.net_streams[rank.0 as usize];
            if wave.has_own_node {
                let own = self.plan.pass_count * remote_count + pass;
                self.gpu().wait_event(stream, sums[rank.0 as usize][own as usize])?;
                self.copy_spare(stream, rank, wave, pass, bank)?;
            }
            self.publish(stream, rank, self.regions.arrived, self.wave_sequence(pass, wave.index) + 1)?;
        }
        Ok(())
    }

    /// Byte offset of a block in the inbox.
    fn inbox_offset(&self, generation: u32, sub_slice: u32) -> u64 {
        u64::from(generation * self.topology().local_rank_count() + sub_slice) * self.plan.block_bytes()
    }

    /// Zeroes what an earlier wave left in blocks of the wave's generation that this wave does not write (I1).
    fn zero_stale_blocks(&self, stream: Stream, rank: Rank, wave: &Wave) -> Result<()> {
        let (me, l) = (self.topology().local_of(rank).0, self.topology().local_rank_count());
        let bytes = self.plan.block_bytes();
        for distance in (0..l).filter(|d| wave.stale_mask >> d & 1 == 1) {
            let offset = self.inbox_offset(wave.generation, (me + distance) % l);
            let destination = self.arena.at(rank, self.regions.inbox, offset, bytes);
            let fill = Fill2d { destination, pitch_bytes: bytes, width_bytes: bytes, rows: 1, value: 0 };
            self.gpu().fill(stream, &fill)?;
        }
        Ok(())
    }

    /// Copies the own-node partial from its spare into the inbox, whose generation is free by now.
    fn copy_spare(&self, stream: Stream, rank: Rank, wave: &Wave, pass: u32, bank: u32) -> Result<()> {
        let topology = self.topology();
        let bytes = self.plan.block_bytes();
        if bytes == 0 {
            return Ok(());
        }
        let sub_slice = latin_square::sub_slice(topology, topology.local_of(rank), topology.node_count());
        let source = self.arena.at(rank, self.regions.spare, self.spare_offset(bank, pass), bytes);
        let offset = self.inbox_offset(wave.generation, sub_slice);
        let destination = self.arena.at(rank, self.regions.inbox, offset, bytes);
        self.gpu().copy(stream, &Copy2d::flat(destination, source, bytes))
    }

    /// Lands a wave on every rank once all local inboxes hold it, then returns the credits of its generation.
    fn land_wave(&self, ranks: &[RankGradients], scale: Scale, wave: &Wave, pass: u32) -> Result<Vec<Event>> {
        let sequence = self.wave_sequence(pass, wave.index) + 1;
        let mut done = Vec::new();
        for rank in self.topology().ranks() {
            let stream = self.streams(rank).land;
            self.wait_node(stream, rank, self.regions.arrived, sequence, WaitKind::WaveArrived, wave.index)?;
            self.launch_land(stream, rank, ranks[rank.0 as usize].out, scale, wave, pass)?;
            done.push(self.gpu().record(stream)?);
            self.publish(stream, rank, self.regions.landed, sequence)?;
        }
        for rank in self.topology().ranks() {
            let stream = self.streams(rank).land;
            self.wait_node(stream, rank, self.regions.landed, sequence, WaitKind::WaveLanded, wave.index)?;
            self.rounds.return_credits(stream, rank, wave.index as usize, self.pass_sequence(pass) + 1)?;
        }
        Ok(done)
    }

    fn launch_land(
        &self,
        stream: Stream,
        rank: Rank,
        out: DeviceSlice,
        scale: Scale,
        wave: &Wave,
        pass: u32,
    ) -> Result<()> {
        let topology = self.topology();
        let geometry = &self.plan.geometry;
        let l = topology.local_rank_count();
        let (offset, bytes) = (self.inbox_offset(wave.generation, 0), u64::from(l) * self.plan.block_bytes());
        let mut inboxes = [0; LOCAL_RANKS_MAX];
        for (local, other) in self.arena.node_ranks(rank) {
            inboxes[local.0 as usize] = self.arena.at(other, self.regions.inbox, offset, bytes).0;
        }
        let multicast = self.arena.multicast(topology.node_of(rank), self.regions.inbox, offset, bytes);
        let is_single = self.plan.waves.len() == 1;
        let accumulator = if is_single {
            0
        } else {
            self.arena.at(rank, self.regions.accumulator, 0, self.regions.accumulator.bytes()).0
        };
        let params = LandParams {
            multicast: multicast.map_or(0, |m| m.0),
            inboxes,
            out: out.address.0,
            accumulator,
            packed_elems: geometry.packed_elems,
            sub_slice_elems: geometry.sub_slice_elems,
            part_first: u64::from(pass) * geometry.part_elems,
            part_elems: geometry.part_elems,
            local_rank_count: l,
            local_rank: topology.local_of(rank).0,
            holder_mask: u32::from(wave.holder_mask),
            first_wave: u32::from(wave.index == 0),
            last_wave: u32::from(wave.index as usize + 1 == self.plan.waves.len()),
            accumulate: u32::from(scale.accumulate),
            alpha: scale.alpha,
            reserved: 0,
        };
        let launch = Launch {
            kernel: if multicast.is_some() { Kernel::LandMultimem } else { Kernel::LandPeer },
            grid: self.plan.land_cta_count,
            block: self.gpu().properties(self.comm.device_of(rank)).shape.plain_threads,
            shared_bytes: 0,
            params: bytemuck::bytes_of(&params),
        };
        // SAFETY: addresses of the arenas, which live as long as `self`; the output as checked by `check_arguments`.
        unsafe { self.gpu().launch(stream, &launch) }
    }

    /// Inboxes start as zeros: blocks that no wave has written yet are read, too.
    fn zero_inboxes(&self) -> Result<()> {
        let bytes = self.regions.inbox.bytes();
        for rank in self.topology().ranks() {
            let destination = self.arena.at(rank, self.regions.inbox, 0, bytes);
            let fill = Fill2d { destination, pitch_bytes: bytes, width_bytes: bytes, rows: 1, value: 0 };
            self.gpu().fill(self.net_streams[rank.0 as usize], &fill)?;
        }
        self.comm.synchronize()
    }

    fn topology(&self) -> Topology {
        self.plan.topology
    }

    fn gpu(&self) -> &Arc<dyn crate::gpu::Gpu> {
        self.comm.gpu()
    }

    fn streams(&self, rank: Rank) -> &RankStreams {
        &self.streams[rank.0 as usize]
    }

    fn tag(&self, rank: Rank, peer: Rank, kind: WaitKind, wave: u32) -> WaitTag {
        WaitTag {
            kind: kind as u32,
            operation: Operation::ReduceScatter as u32,
            rank: rank.0,
            peer: peer.0,
            wave,
            round: 0,
            epoch: self.epoch,
        }
    }

    fn wait(&self, stream: Stream, rank: Rank, signal: u32, value: u64, tag: WaitTag) -> Result<()> {
        let address = self.arena.signal(rank, signal);
        self.gpu().wait_value(stream, &MemoryWait { address, value, timeout_ns: self.comm.timeout_ns(), tag })
    }

    /// Waits until every local rank has raised its word at `rank` to `value`.
    fn wait_node(
        &self,
        stream: Stream,
        rank: Rank,
        signals: Signals,
        value: u64,
        kind: WaitKind,
        wave: u32,
    ) -> Result<()> {
        self.arena.node_ranks(rank).try_for_each(|(local, peer)| {
            self.wait(stream, rank, signals.signal(local.0), value, self.tag(rank, peer, kind, wave))
        })
    }

    /// Raises `rank`'s word at every local rank to `value`.
    fn publish(&self, stream: Stream, rank: Rank, signals: Signals, value: u64) -> Result<()> {
        let me = self.topology().local_of(rank);
        self.arena.node_ranks(rank).try_for_each(|(_, peer)| {
            self.gpu().write_value(stream, self.arena.signal(peer, signals.signal(me.0)), value)
        })
    }
}

impl Drop for ReduceScatter {
    /// Waits for the work in flight, which uses the arena.
    fn drop(&mut self) {
        if let Err(error) = self.comm.synchronize() {
            tracing::warn!(%error, "a reduce-scatter was dropped after a failure");
        }
        let own = self.streams.iter().flat_map(|s| [s.push, s.sum, s.land]);
        let all = own.chain(self.net_streams.iter().copied()).chain(self.rounds.streams());
        self.comm.destroy_streams(all.collect::<Vec<_>>());
    }
}

/// The segment table of a group: its parameters that have elements.
pub(super) fn segments(layout: &GroupLayout) -> Vec<Segment> {
    let parameters = layout.parameters().iter().enumerate().filter(|(_, p)| p.shard_elems > 0);
    parameters
        .map(|(index, p)| Segment {
            packed_first: p.packed_offset_elems,
            packed_end: p.packed_offset_elems + p.shard_elems,
            live_elems: p.elems,
            gradient: index as u64,
        })
        .collect()
}

fn regions(plan: &ReduceScatterPlan, context_count: u32) -> (ArenaLayout, Regions) {
    let (m, l) = (plan.topology.node_count(), plan.topology.local_rank_count());
    let memory = &plan.memory;
    let mut layout = ArenaLayout::default();
    let regions = Regions {
        staging: layout.region("staging", memory.staging_bytes),
        inbox: layout.region("inbox", memory.inbox_bytes),
        outbox: layout.region("outbox", memory.outbox_bytes),
        spare: layout.region("spare", memory.spare_bytes),
        // A landing stores whole units, up to the end of the last sub-slice that the row reaches.
        accumulator: layout.region("accumulator", memory.accumulator_bytes.next_multiple_of(16)),
        staging_full: layout.signals(l),
        staging_free: layout.signals(l),
        arrived: layout.signals(l),
        landed: layout.signals(l),
        data: layout.signals(m * context_count),
        credit: layout.signals(m),
    };
    (layout, regions)
}

/// Every rank's rounds, and the credits that it returns after each wave.
fn network_tables(
    plan: &ReduceScatterPlan,
    regions: &Regions,
    context_count: u32,
) -> (Vec<Vec<RankRound>>, Vec<Vec<Vec<Credit>>>) {
    let topology = plan.topology;
    let (m, l) = (topology.node_count(), topology.local_rank_count());
    let block_bytes = plan.block_bytes();
    let data = |source: Node| regions.data.signal(source.0 * context_count);
    let put = |rank: Rank, wave: &Wave, contributor: u32| {
        let (node, local) = (topology.node_of(rank), topology.local_of(rank));
        let to = latin_square::destination(m, node, contributor);
        let sub_slice = latin_square::sub_slice(topology, local, contributor);
        let inbox_block = u64::from(wave.generation * l + sub_slice);
        NetPut {
            peer: to.0,
            signal: data(node),
            credit: regions.credit.signal(to.0),
            // The first wave on each generation of a pass needs the credit of the pass before.
            credit_lead: u32::from(wave.index < plan.generation_count),
            source_offset: regions.outbox.symmetric_offset(u64::from(contributor - 1) * block_bytes, block_bytes),
            destination_offset: regions.inbox.symmetric_offset(inbox_block * block_bytes, block_bytes),
            bytes: block_bytes,
        }
    };
    let source = |rank: Rank, contributor: u32| latin_square::source(m, topology.node_of(rank), contributor);
    let arrival = |rank: Rank, contributor: u32| {
        let from = source(rank, contributor);
        NetArrival { peer: from.0, signal: data(from), bytes: block_bytes }
    };
    let rounds_of = |rank: Rank| {
        let rounds = plan.waves.iter().flat_map(|wave| wave.rounds.iter().enumerate().map(move |r| (wave, r)));
        rounds
            .map(|(wave, (round, contributors))| RankRound {
                puts: contributors.clone().map(|c| put(rank, wave, c)).collect(),
                arrivals: contributors.clone().map(|c| arrival(rank, c)).collect(),
                wave: wave.index,
                round: round as u32,
            })
            .collect()
    };
    // A landed wave frees its generation for the next wave on it: of this pass, or the first of the next.
    let next_on_generation = |wave: &Wave| {
        let next = (wave.index + plan.generation_count) as usize;
        plan.waves.get(next).unwrap_or(&plan.waves[wave.generation as usize])
    };
    let credits_of = |rank: Rank| {
        let own = regions.credit.signal(topology.node_of(rank).0);
        let credit = |c| Credit { peer: source(rank, c).0, signal: own };
        plan.waves.iter().map(|w| next_on_generation(w).remote_contributors().map(credit).collect()).collect()
    };
    (topology.ranks().map(rounds_of).collect(), topology.ranks().map(credits_of).collect())
}

//! The reduce-scatter of a lane: gradients travel in their own type, and are added in fp32 where they arrive [TIDE App. F].
//!
//! The packed row is cut into **rail parts**, and the `M` contributors of a node, numbered as in [`latin_square`], into
//! **waves** of eight; the node itself is the last contributor of the last wave. An **item** is one wave of one part
//! ([`LaneCut`]). All ranks go through the items in the same order, part by part:
//!
//! 1. *Gather* (copy engines): the parts of the gradients that belong to each remote node of the wave, into outbox blocks of
//!    the gradients' own type: one strided copy per parameter and run of nodes.
//! 2. *Send* (`net`): a block to each of these nodes, a block from each of as many; one round.
//! 3. *Sum* ([`sum`]): the arrived blocks, then the own gradients where they lie, into a partial in fp32.
//! 4. *Credits* (`finalize`): the senders of the item after next may overwrite the inbox blocks.
//! 5. *Land* (`land`, with one inbox): the partial into the accumulator, or, of the last wave, into the output, with α.
//!
//! Outbox and inbox have two banks, which the items take in turn across parts and calls: item `k + 1` is gathered and sent
//! while item `k` is added.
//!
//! # The order of additions
//!
//! `out ← (accumulate ? out : 0) + α·((w_0 + w_1) + w_2 + …)`, each addition rounded once, in fp32. Wave `w` of node `t` is
//! the sum, from left to right, of the nodes `t − 8w − 1, t − 8w − 2, …, t − 8w − 8` (mod `M`), as far as they are
//! contributors; the last wave ends with `t` itself, the others with one `+0.0`. Neither parts nor CTA counts nor paths
//! change it; up to eight nodes it is also what [`ReduceScatter`](crate::ReduceScatter) adds on `M × 1`.
//!
//! # Signals and streams
//!
//! Streams of a rank: `copy` gathers, `net` sends, `sum` adds, lands and returns credits. Signals, all only growing:
//!
//! | signal | at | raised by | to | when |
//! |---|---|---|---|---|
//! | data | receiver, per source node and context | the put | parts | the block is there |
//! | credit | sender, per target node | the receiver | parts, less those that found a fresh bank | it has added what the block overwrites |

use super::check_lane;
use crate::arena::{Arena, ArenaLayout, Region, Signals};
use crate::collectives::level_1::{SumTask, Sums};
use crate::collectives::rounds::{BlockRing, RankRound, Rounds, RoundsCall};
use crate::collectives::{
    Communicator, GradientDtype, RankEvents, RankGradients, Scale, check_fast_path, check_gradients,
};
use crate::error::{Result, TideError};
use crate::gpu::{Copy2d, DevicePtr, DeviceSlice, Event, Fill2d, Gpu, Launch, Priority, Stream};
use crate::launch::Facts;
use crate::layout::{Group, GroupLayout};
use crate::plan::lane::{BANK_COUNT, LaneCut, LaneItem};
use crate::plan::{CTA_COUNT_MAX, Node, Rank, Topology, latin_square};
use std::sync::Arc;
use tide_device::abi::fault::Operation;
use tide_device::abi::kernel::Kernel;
use tide_device::abi::params::{Credit, LOCAL_RANKS_MAX, LandParams, NO_SIGNAL, NetArrival, NetPut};
use tide_device::abi::segment::Segment;

/// How a lane's reduce-scatter works. No choice changes a bit of the result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneOptions {
    /// Rail parts that a row is cut into, at most.
    pub part_count: u32,
    /// Blocks of a sum.
    pub sum_cta_count: u32,
    /// Blocks of a landing.
    pub land_cta_count: u32,
}

impl Default for LaneOptions {
    fn default() -> Self {
        Self { part_count: 4, sum_cta_count: 4, land_cta_count: 4 }
    }
}

#[derive(Clone, Copy)]
struct Regions {
    outbox: Region,
    inbox: Region,
    partial: Region,
    accumulator: Region,
    data: Signals,
    credit: Signals,
}

struct RankStreams {
    copy: Stream,
    sum: Stream,
}

/// A reduce-scatter of one group over a lane: planned, allocated, ready to be called again and again.
///
/// Memory per rank, with `S_g` the packed row in the gradients' type and a part at most 31 elements longer than its share:
/// `4·min(M − 1, 8)` blocks of a part, which with four parts is `min(M − 1, 8)·S_g`; a partial of a part, `S_fp32/4`; as much
/// again to accumulate in, beyond eight nodes; signals. See [`LaneReduceScatter::buffer_bytes`].
pub struct LaneReduceScatter {
    comm: Communicator,
    layout: GroupLayout,
    dtype: GradientDtype,
    options: LaneOptions,
    cut: LaneCut,
    arena: Arc<Arena>,
    regions: Regions,
    rounds: Rounds,
    streams: Vec<RankStreams>,
    net_streams: Vec<Stream>,
    sums: Sums,
    epoch: u64,
    /// Per bank, per rank: when the outbox bank's last item was sent.
    sent: [Vec<Option<Event>>; BANK_COUNT as usize],
}

impl LaneReduceScatter {
    /// Plans a reduce-scatter of `group`, allocates its arena on every rank and uploads its tables.
    ///
    /// # Errors
    /// [`TideError::Usage`] for a communicator with several ranks on a node and for options out of range;
    /// [`TideError::Layout`] for what has no layout; [`TideError::Unsupported`] for a group of more than 256 parameters; what
    /// the driver refuses.
    pub fn new(comm: &Communicator, group: &Group, dtype: GradientDtype, options: &LaneOptions) -> Result<Self> {
        comm.check()?;
        check_lane(comm)?;
        check_fast_path(group)?;
        let is_grid = |count: u32| (1..=CTA_COUNT_MAX).contains(&count);
        if options.part_count == 0 || !is_grid(options.sum_cta_count) || !is_grid(options.land_cta_count) {
            return Err(TideError::usage(format!(
                "a lane needs at least one part, and 1 to {CTA_COUNT_MAX} blocks of each kernel: {options:?}"
            )));
        }
        let topology = comm.topology();
        let m = topology.node_count();
        let layout = GroupLayout::new(group, u64::from(m))?;
        let cut = LaneCut::new(m, layout.packed_elems(), options.part_count);
        let (arena_layout, regions) = regions(&cut, dtype, comm.options().context_count);
        let facts = Facts::new()
            .with("group", format_args!("{:016x}", group.signature()))
            .with("gradients", format_args!("{dtype:?}"))
            .with("options", format_args!("{options:?}"));
        let (arena, net) = comm.install("lane reduce-scatter", &facts, arena_layout)?;
        let (tables, credits) = network(&cut, comm, dtype, &regions);
        let rounds = Rounds::new(comm, &net, Operation::ReduceScatter, tables, credits, |_| 0)?;
        let sums = Sums::new(comm, &layout, dtype, options.sum_cta_count)?;
        let (mut streams, mut net_streams) = (Vec::new(), Vec::new());
        for rank in comm.driven().iter() {
            streams.push(RankStreams {
                copy: comm.create_stream(rank, Priority::Normal)?,
                sum: comm.create_stream(rank, Priority::High)?,
            });
            net_streams.push(comm.create_stream(rank, Priority::High)?);
        }
        let never = || vec![None; comm.driven().count() as usize];
        comm.installed("lane reduce-scatter")?;
        Ok(Self {
            comm: comm.clone(),
            layout,
            dtype,
            options: options.clone(),
            cut,
            arena,
            regions,
            rounds,
            streams,
            net_streams,
            sums,
            epoch: 0,
            sent: [never(), never()],
        })
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

    /// Calls so far.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Enqueues one call on every driven rank; `ranks` in rank order. Calls run in the order in which they are enqueued.
    ///
    /// The caller keeps gradients as they are until `read`, which comes with the last sum, and does not touch the output
    /// before `done`.
    ///
    /// # Errors
    /// [`TideError::Usage`] for wrong counts, sizes, alignments or null addresses, before anything is enqueued;
    /// [`TideError::Poisoned`]; what the driver refuses.
    pub fn enqueue(&mut self, ranks: &[RankGradients], scale: Scale) -> Result<Vec<RankEvents>> {
        self.comm.check()?;
        check_gradients(ranks, self.comm.driven(), &self.layout, self.dtype)?;
        for (rank, given) in self.comm.driven().iter().zip(ranks) {
            if let Some(ready) = given.ready {
                self.gpu().wait_event(self.streams(rank).copy, ready)?;
                self.gpu().wait_event(self.streams(rank).sum, ready)?;
            }
        }
        let mut events = Vec::new();
        for index in 0..self.cut.item_count() {
            let item = self.cut.item(self.epoch, index);
            self.send(ranks, item)?;
            events = self.receive(ranks, item, scale)?;
        }
        self.epoch += 1;
        Ok(events)
    }

    /// Gathers an item's blocks on every rank and sends them.
    fn send(&mut self, ranks: &[RankGradients], item: LaneItem) -> Result<()> {
        if self.cut.remote(item.wave).is_empty() {
            return Ok(());
        }
        for (rank, given) in self.comm.driven().iter().zip(ranks) {
            let (copy, net) = (self.streams(rank).copy, self.net_streams[self.comm.index(rank)]);
            // I3: what the bank held before was sent.
            if let Some(sent) = self.sent[item.bank as usize][self.comm.index(rank)] {
                self.gpu().wait_event(copy, sent)?;
            }
            self.gather(copy, rank, given, item)?;
            self.comm.join(copy, [net])?;
        }
        let call = RoundsCall {
            epoch: self.epoch,
            sequence: self.cut.sequence(item.number),
            blocks: BlockRing::NONE,
            progress_first: 0,
            first: round_index(&self.cut, item.bank, item.index),
            count: 1,
        };
        self.rounds.run(&self.net_streams, &call)?;
        for rank in self.comm.driven().iter() {
            let (net, sum) = (self.net_streams[self.comm.index(rank)], self.streams(rank).sum);
            self.sent[item.bank as usize][self.comm.index(rank)] = Some(self.comm.join(net, [sum])?);
        }
        Ok(())
    }

    /// Copies a rank's contribution to every remote node of the item's wave into the outbox, a block a node: per parameter
    /// one strided copy for each run of nodes that ascend, and one more where the last row that exists ends in the part.
    fn gather(&self, stream: Stream, rank: Rank, given: &RankGradients, item: LaneItem) -> Result<()> {
        let (m, node) = (self.cut.node_count, self.topology().node_of(rank));
        let remote = self.cut.remote(item.wave);
        // Destinations ascend with the contributor, up to where the node number wraps.
        let wrap = (m - node.0).clamp(remote.start, remote.end);
        for run in [remote.start..wrap, wrap..remote.end].into_iter().filter(|run| !run.is_empty()) {
            let Node(to) = latin_square::destination(m, node, run.start);
            let run = Run { block: run.start - remote.start, first_node: to, node_count: run.len() as u32 };
            for segment in self.sums.segments() {
                self.gather_segment(stream, rank, given, item, (segment, run))?;
            }
        }
        Ok(())
    }

    fn gather_segment(
        &self,
        stream: Stream,
        rank: Rank,
        given: &RankGradients,
        item: LaneItem,
        (segment, run): (&Segment, Run),
    ) -> Result<()> {
        let part = self.cut.part(item.part);
        let (first, end) = (part.start.max(segment.packed_first), part.end.min(segment.packed_end));
        if first >= end {
            return Ok(());
        }
        let (item_bytes, pitch) = (self.dtype.bytes(), block_bytes(&self.cut, self.dtype));
        let element =
            |row: u32| u64::from(run.first_node + row) * segment.shard_elems() + (first - segment.packed_first);
        let copy = |row: u32, rows: u32, elems: u64| {
            let (width_bytes, rows) = (elems * item_bytes, u64::from(rows));
            let offset =
                block_offset(&self.cut, self.dtype, item.bank, run.block + row) + (first - part.start) * item_bytes;
            let span = (rows - 1) * pitch + width_bytes;
            let destination = self.arena.at(rank, self.regions.outbox, offset, span);
            match given.gradients[segment.gradient as usize] {
                Some(gradient) => {
                    let source = DevicePtr(gradient.address.0 + element(row) * item_bytes);
                    let source_pitch_bytes = segment.shard_elems() * item_bytes;
                    let destination_pitch_bytes = pitch;
                    let copy =
                        Copy2d { destination, destination_pitch_bytes, source, source_pitch_bytes, width_bytes, rows };
                    self.gpu().copy(stream, &copy)
                }
                None => {
                    let fill = Fill2d { destination, pitch_bytes: pitch, width_bytes, rows, value: 0 };
                    self.gpu().fill(stream, &fill)
                }
            }
        };
        // Elements that exist, node by node; they only decrease. What does not is not sent as anything: the sum masks it.
        let live = |row: u32| segment.live_elems.saturating_sub(element(row)).min(end - first);
        let whole = (0..run.node_count).take_while(|row| live(*row) == end - first).count() as u32;
        if whole > 0 {
            copy(0, whole, end - first)?;
        }
        if whole < run.node_count && live(whole) > 0 {
            copy(whole, 1, live(whole))?;
        }
        Ok(())
    }

    /// Adds an item on every rank, lands it and returns its credits.
    fn receive(&self, ranks: &[RankGradients], item: LaneItem, scale: Scale) -> Result<Vec<RankEvents>> {
        let mut events = Vec::new();
        let has_elems = !self.cut.part(item.part).is_empty();
        let (next_wave, credits) = self.cut.next_on_bank(item.number);
        for (rank, given) in self.comm.driven().iter().zip(ranks) {
            let stream = self.streams(rank).sum;
            if has_elems {
                self.launch_sum(stream, rank, given, item)?;
            }
            let read = self.gpu().record(stream)?;
            self.rounds.return_credits(stream, rank, next_wave as usize, credits)?;
            if has_elems {
                self.launch_land(stream, rank, given.out, item, scale)?;
            }
            events.push(RankEvents { read, done: self.gpu().record(stream)? });
        }
        Ok(events)
    }

    fn launch_sum(&self, stream: Stream, rank: Rank, given: &RankGradients, item: LaneItem) -> Result<()> {
        let (part, remote) = (self.cut.part(item.part), self.cut.remote(item.wave));
        let block_bytes = block_bytes(&self.cut, self.dtype);
        let bank_bytes = u64::from(self.cut.block_count()) * block_bytes;
        let task = SumTask {
            rank,
            own: if self.cut.has_own_node(item.wave) { &given.gradients } else { &[] },
            staging: self.arena.at(rank, self.regions.inbox, u64::from(item.bank) * bank_bytes, bank_bytes),
            source_count: remote.len() as u32,
            source_pitch_bytes: block_bytes,
            row_pitch_bytes: block_bytes,
            packed: part,
            first_rank: rank,
            row_count: 1,
            out: self.arena.at(rank, self.regions.partial, 0, self.regions.partial.bytes()),
            out_pitch_elems: self.cut.part_elems,
        };
        // SAFETY: addresses of the arena, which lives as long as `self`; the inbox bank has arrived, as the stream has
        // awaited; gradients as checked by `check_gradients`, kept by the caller until the read event.
        unsafe { self.sums.launch(stream, &task) }
    }

    /// Lands the partial: a landing of the part alone, whose one inbox is the partial.
    fn launch_land(&self, stream: Stream, rank: Rank, out: DeviceSlice, item: LaneItem, scale: Scale) -> Result<()> {
        let part = self.cut.part(item.part);
        let whole = |region: Region| self.arena.at(rank, region, 0, region.bytes()).0;
        let mut inboxes = [0; LOCAL_RANKS_MAX];
        inboxes[0] = whole(self.regions.partial);
        let params = LandParams {
            multicast: 0,
            inboxes,
            out: out.address.0 + 4 * part.start,
            accumulator: if self.cut.wave_count == 1 { 0 } else { whole(self.regions.accumulator) },
            packed_elems: part.end - part.start,
            sub_slice_elems: self.cut.part_elems,
            part_first: 0,
            part_elems: self.cut.part_elems,
            local_rank_count: 1,
            local_rank: 0,
            holder_mask: 1,
            first_wave: u32::from(item.wave == 0),
            last_wave: u32::from(self.cut.has_own_node(item.wave)),
            accumulate: u32::from(scale.accumulate),
            alpha: scale.alpha,
            reserved: 0,
        };
        let launch = Launch {
            kernel: Kernel::LandPeer,
            grid: self.options.land_cta_count,
            block: self.gpu().properties(self.comm.device_of(rank)).shape.plain_threads,
            cluster: 1,
            shared_bytes: 0,
            params: bytemuck::bytes_of(&params),
        };
        // SAFETY: addresses of the arena, which lives as long as `self`; the output as checked by `check_gradients`, and
        // parts start at multiples of 32 elements of it.
        unsafe { self.gpu().launch(stream, &launch) }
    }

    fn topology(&self) -> Topology {
        self.comm.topology()
    }

    fn gpu(&self) -> &Arc<dyn Gpu> {
        self.comm.gpu()
    }

    fn streams(&self, rank: Rank) -> &RankStreams {
        &self.streams[self.comm.index(rank)]
    }
}

impl Drop for LaneReduceScatter {
    /// Waits for the work in flight, which uses the arena.
    fn drop(&mut self) {
        if let Err(error) = self.comm.synchronize() {
            tracing::warn!(%error, "a lane's reduce-scatter was dropped after a failure");
        }
        let own = self.streams.iter().flat_map(|s| [s.copy, s.sum]);
        let all = own.chain(self.net_streams.iter().copied()).chain(self.rounds.streams());
        self.comm.destroy_streams(all.collect::<Vec<_>>());
    }
}

/// Consecutive blocks of the outbox, for consecutive nodes.
#[derive(Clone, Copy)]
struct Run {
    block: u32,
    first_node: u32,
    node_count: u32,
}

fn block_bytes(cut: &LaneCut, dtype: GradientDtype) -> u64 {
    cut.part_elems * dtype.bytes()
}

/// Byte offset of a block in the outbox, and in the inbox.
fn block_offset(cut: &LaneCut, dtype: GradientDtype, bank: u32, block: u32) -> u64 {
    u64::from(bank * cut.block_count() + block) * block_bytes(cut, dtype)
}

/// Where an item's round stands in the tables: every item is there once for each bank.
fn round_index(cut: &LaneCut, bank: u32, index: u32) -> u32 {
    bank * cut.item_count() + index
}

fn regions(cut: &LaneCut, dtype: GradientDtype, context_count: u32) -> (ArenaLayout, Regions) {
    let boxes_bytes = u64::from(BANK_COUNT * cut.block_count()) * block_bytes(cut, dtype);
    let part_bytes = 4 * cut.part_elems;
    let mut layout = ArenaLayout::default();
    let regions = Regions {
        outbox: layout.region("outbox", boxes_bytes),
        inbox: layout.region("inbox", boxes_bytes),
        partial: layout.region("partial", part_bytes),
        accumulator: layout.region("accumulator", if cut.wave_count == 1 { 0 } else { part_bytes }),
        data: layout.signals(cut.node_count * context_count),
        credit: layout.signals(cut.node_count),
    };
    (layout, regions)
}

/// Every driven rank's rounds, as [`round_index`] numbers them, and the credits that it returns to the senders of each wave.
fn network(
    cut: &LaneCut,
    comm: &Communicator,
    dtype: GradientDtype,
    regions: &Regions,
) -> (Vec<Vec<RankRound>>, Vec<Vec<Vec<Credit>>>) {
    let (topology, driven, context_count) = (comm.topology(), comm.driven(), comm.options().context_count);
    let m = cut.node_count;
    let data = |from: Node| regions.data.signal(from.0 * context_count);
    let round = |rank: Rank, bank: u32, index: u32| {
        let (node, item) = (topology.node_of(rank), cut.item(0, index));
        let remote = cut.remote(item.wave);
        // Whole blocks, also of a last part that is shorter: every transfer of a pair takes the same contexts, whose signals
        // count transfers.
        let bytes = block_bytes(cut, dtype);
        let contexts = comm.contexts_of(bytes);
        let put = |contributor: u32| {
            let to = latin_square::destination(m, node, contributor);
            let offset = block_offset(cut, dtype, bank, contributor - remote.start);
            NetPut {
                peer: to.0,
                signal: data(node),
                credit: regions.credit.signal(to.0),
                credit_ahead: cut.credit_lead(item.wave),
                source_offset: regions.outbox.symmetric_offset(offset, bytes),
                source_block: 0,
                lead_signal: NO_SIGNAL,
                pace: NO_SIGNAL,
                contexts,
                lead_contexts: 0,
                lead_bytes: 0,
                apart_offset: 0,
                apart_bytes: 0,
                destination_offset: regions.inbox.symmetric_offset(offset, bytes),
                bytes,
            }
        };
        let arrival = |contributor: u32| {
            let from = latin_square::source(m, node, contributor);
            NetArrival {
                peer: from.0,
                signal: data(from),
                contexts,
                lead_signal: NO_SIGNAL,
                lead_contexts: 0,
                pace_peer: 0,
                pace_signal: NO_SIGNAL,
                reserved: 0,
            }
        };
        RankRound {
            puts: remote.clone().map(put).collect(),
            arrivals: remote.clone().map(arrival).collect(),
            wave: item.wave,
            round: item.part,
        }
    };
    let rounds_of = |rank: Rank| {
        let rounds = (0..BANK_COUNT).flat_map(|bank| (0..cut.item_count()).map(move |index| (bank, index)));
        rounds.map(|(bank, index)| round(rank, bank, index)).collect()
    };
    let credits_of = |rank: Rank| {
        let node = topology.node_of(rank);
        let credit = |contributor| Credit {
            peer: latin_square::source(m, node, contributor).0,
            signal: regions.credit.signal(node.0),
        };
        (0..cut.wave_count).map(|wave| cut.remote(wave).map(credit).collect()).collect()
    };
    (driven.iter().map(rounds_of).collect(), driven.iter().map(credits_of).collect())
}

//! The all-gather of a lane: recursive doubling from landing to landing [TIDE App. F].
//!
//! Node `n`'s shard of parameter `p` lies, resident, where it lands: at `Landing(p, n) = o_p·M + n·s_p` of its own landing
//! [TIDE eq. 2]. In round `d` a node sends the shards of nodes `n, …, n + c_d − 1` to node `n − 2^d`: per parameter one
//! contiguous run, cut where the node number wraps, to the same symmetric offset. What arrived in a round is sent on in the
//! next from where it lies. All puts of a round go to one peer and are one transfer: the last of them signals.
//!
//! The network moves multiples of 16 bytes between addresses aligned to 16. A parameter for which `o_p·M` or `s_p` is no
//! such multiple is **ragged**; expert weights are not. Ragged shards travel packed, as if they were one more parameter: each
//! rank copies its own into its row of a stage of `M` rows, the rounds move rows as they move shards, and the others' rows are
//! copied into the landing at the end. Without ragged parameters there is neither stage nor copy.
//!
//! One stream per rank carries all of it, in this order; signals, all only growing:
//!
//! | signal | at | raised by | to | when |
//! |---|---|---|---|---|
//! | credit | sender, per target node | the receiver | calls | the receiver has entered the call: its landing and stage may be overwritten |
//! | data | receiver, per source node and context | the last put of a round | calls | the round's shards are there |

use super::check_lane;
use crate::arena::{Arena, ArenaLayout, Region, Signals};
use crate::collectives::rounds::{BlockRing, RankRound, Rounds, RoundsCall};
use crate::collectives::{Communicator, RankEvents, check_fast_path, check_rank_count};
use crate::error::Result;
use crate::gpu::{Copy2d, DevicePtr, DeviceSlice, Event, Priority, Stream};
use crate::launch::Facts;
use crate::layout::{Group, GroupLayout};
use crate::plan::all_gather::gather_rounds;
use crate::plan::lane::{LaneRow, LaneWays, Ragged, sent_pieces};
use crate::plan::{GatherRound, Node, Rank, Topology};
use std::sync::Arc;
use tide_device::abi::fault::Operation;
use tide_device::abi::params::{Credit, NO_SIGNAL, NetArrival, NetPut};

#[derive(Clone, Copy)]
struct Regions {
    landing: Region,
    stage: Region,
    data: Signals,
    credit: Signals,
}

/// An all-gather of one group over a lane: planned, allocated, ready to be called again and again.
///
/// Memory per rank: the landing, `M·S` bytes, in which the resident shard lies; `M` stage rows of the ragged shards' bytes,
/// rounded up to 16; signals. See [`LaneAllGather::buffer_bytes`].
pub struct LaneAllGather {
    comm: Communicator,
    layout: GroupLayout,
    arena: Arc<Arena>,
    regions: Regions,
    ways: LaneWays,
    round_count: u32,
    rounds: Rounds,
    streams: Vec<Stream>,
    epoch: u64,
}

impl LaneAllGather {
    /// Plans an all-gather of `group`, allocates its arena on every rank and uploads its tables.
    ///
    /// # Errors
    /// [`TideError::Usage`](crate::TideError::Usage) for a communicator with several ranks on a node;
    /// [`TideError::Layout`](crate::TideError::Layout) for what has no layout;
    /// [`TideError::Unsupported`](crate::TideError::Unsupported) for a group of more than 256 parameters; what the driver
    /// refuses.
    pub fn new(comm: &Communicator, group: &Group) -> Result<Self> {
        comm.check()?;
        check_lane(comm)?;
        check_fast_path(group)?;
        let topology = comm.topology();
        let (m, context_count) = (topology.node_count(), comm.options().context_count);
        let layout = GroupLayout::new(group, u64::from(m))?;
        let ways = LaneWays::new(&layout);
        let mut arena_layout = ArenaLayout::default();
        let regions = Regions {
            landing: arena_layout.region("landing", layout.landing_bytes()),
            stage: arena_layout.region("stage of ragged shards", u64::from(m) * ways.stage_row_bytes),
            data: arena_layout.signals(m * context_count),
            credit: arena_layout.signals(m),
        };
        let facts = Facts::new().with("group", format_args!("{:016x}", group.signature()));
        let (arena, net) = comm.install("lane all-gather", &facts, arena_layout)?;
        let gather_rounds = gather_rounds(m);
        let rows = rows(&layout, &ways, &regions);
        let rounds_of = |rank: Rank| {
            let node = topology.node_of(rank);
            gather_rounds.iter().map(|round| rank_round(comm, node, round, &rows, &regions)).collect()
        };
        let credits_of = |rank: Rank| {
            let node = topology.node_of(rank);
            let credit = |r: &GatherRound| Credit { peer: r.source(m, node).0, signal: regions.credit.signal(node.0) };
            vec![gather_rounds.iter().map(credit).collect()]
        };
        let tables = comm.driven().iter().map(rounds_of).collect();
        let credits = comm.driven().iter().map(credits_of).collect();
        let rounds = Rounds::new(comm, &net, Operation::AllGather, tables, credits, |_| 0)?;
        let streams = comm.driven().iter().map(|r| comm.create_stream(r, Priority::High)).collect::<Result<_>>()?;
        comm.installed("lane all-gather")?;
        let (comm, round_count) = (comm.clone(), gather_rounds.len() as u32);
        Ok(Self { comm, layout, arena, regions, ways, round_count, rounds, streams, epoch: 0 })
    }

    /// The group's layout.
    pub fn layout(&self) -> &GroupLayout {
        &self.layout
    }

    /// Where a rank's padded shard of a parameter lies, resident, inside its landing: written by the caller, read by every
    /// call, never written by one.
    pub fn shard(&self, rank: Rank, parameter: usize) -> DeviceSlice {
        let bytes = self.layout.parameters()[parameter].shard_bytes;
        let address = self.landed(rank, parameter, u64::from(self.topology().node_of(rank).0), 1);
        DeviceSlice { address, bytes }
    }

    /// Where a parameter lies on a rank once it is gathered: `[D_p, trailing…]`, contiguous.
    pub fn landing(&self, rank: Rank, parameter: usize) -> DeviceSlice {
        let p = &self.layout.parameters()[parameter];
        let item_bytes = p.shard_bytes.checked_div(p.shard_elems).unwrap_or(1);
        let address = self.landed(rank, parameter, 0, self.layout.rank_count());
        DeviceSlice { address, bytes: p.elems * item_bytes }
    }

    /// Bytes that each rank has allocated for this collective: its arena with landing, stage and signals, as allocated.
    pub fn buffer_bytes(&self) -> u64 {
        self.arena.bytes()
    }

    /// Bytes of the stage of ragged shards; 0 where every shard travels as it lies.
    pub fn stage_bytes(&self) -> u64 {
        self.regions.stage.bytes()
    }

    /// Calls so far.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Enqueues one call on every driven rank. `ready[r]` is when rank `r`'s shards are complete and the rest of its landing
    /// may be overwritten; `None` if they are and it may.
    ///
    /// The caller keeps the shards as they are until `read` and does not touch the rest of the landing before `done`.
    ///
    /// # Errors
    /// [`TideError::Usage`](crate::TideError::Usage) for a wrong count, before anything is enqueued;
    /// [`TideError::Poisoned`](crate::TideError::Poisoned); what the driver refuses.
    pub fn enqueue(&mut self, ready: &[Option<Event>]) -> Result<Vec<RankEvents>> {
        self.comm.check()?;
        check_rank_count(ready.len(), self.comm.driven())?;
        for (rank, ready) in self.comm.driven().iter().zip(ready) {
            self.enter(rank, *ready)?;
        }
        let call = RoundsCall {
            epoch: self.epoch,
            sequence: self.epoch + 1,
            blocks: BlockRing::NONE,
            progress_first: 0,
            first: 0,
            count: self.round_count,
        };
        self.rounds.run(&self.streams, &call)?;
        let mut events = Vec::new();
        for rank in self.comm.driven().iter() {
            let read = self.comm.gpu().record(self.stream(rank))?;
            self.unpack(rank)?;
            events.push(RankEvents { read, done: self.comm.gpu().record(self.stream(rank))? });
        }
        self.epoch += 1;
        Ok(events)
    }

    /// Packs the rank's own ragged shards, and tells its sources that they may write.
    fn enter(&self, rank: Rank, ready: Option<Event>) -> Result<()> {
        let stream = self.stream(rank);
        if let Some(ready) = ready {
            self.comm.gpu().wait_event(stream, ready)?;
        }
        let node = u64::from(self.topology().node_of(rank).0);
        for ragged in &self.ways.ragged {
            let bytes = self.layout.parameters()[ragged.parameter].shard_bytes;
            let (to, from) = (self.staged(rank, ragged, node, 1), self.landed(rank, ragged.parameter, node, 1));
            self.comm.gpu().copy(stream, &Copy2d::flat(to, from, bytes))?;
        }
        // I3: behind the previous call, which ends in this stream with the last read of landing and stage.
        self.rounds.return_credits(stream, rank, 0, self.epoch + 1)
    }

    /// Copies the other nodes' ragged shards from the stage into the landing. The own ones may be changing by now.
    fn unpack(&self, rank: Rank) -> Result<()> {
        let (node, node_count) = (u64::from(self.topology().node_of(rank).0), self.layout.rank_count());
        for ragged in &self.ways.ragged {
            let bytes = self.layout.parameters()[ragged.parameter].shard_bytes;
            for nodes in [0..node, node + 1..node_count].into_iter().filter(|nodes| !nodes.is_empty()) {
                let rows = nodes.end - nodes.start;
                let copy = Copy2d {
                    destination: self.landed(rank, ragged.parameter, nodes.start, rows),
                    destination_pitch_bytes: bytes,
                    source: self.staged(rank, ragged, nodes.start, rows),
                    source_pitch_bytes: self.ways.stage_row_bytes,
                    width_bytes: bytes,
                    rows,
                };
                self.comm.gpu().copy(self.stream(rank), &copy)?;
            }
        }
        Ok(())
    }

    /// Where the shards of `count` nodes from `first` on lie in the landing.
    fn landed(&self, rank: Rank, parameter: usize, first: u64, count: u64) -> DevicePtr {
        let offset = self.layout.landing_offset_bytes(parameter, first);
        self.arena.at(rank, self.regions.landing, offset, count * self.layout.parameters()[parameter].shard_bytes)
    }

    /// Where a ragged parameter's shards of `count` nodes from `first` on lie in the stage, a row apart.
    fn staged(&self, rank: Rank, ragged: &Ragged, first: u64, count: u64) -> DevicePtr {
        let pitch = self.ways.stage_row_bytes;
        let span = (count - 1) * pitch + self.layout.parameters()[ragged.parameter].shard_bytes;
        self.arena.at(rank, self.regions.stage, first * pitch + ragged.offset, span)
    }

    fn topology(&self) -> Topology {
        self.comm.topology()
    }

    fn stream(&self, rank: Rank) -> Stream {
        self.streams[self.comm.index(rank)]
    }
}

impl Drop for LaneAllGather {
    /// Waits for the work in flight, which uses the arena.
    fn drop(&mut self) {
        if let Err(error) = self.comm.synchronize() {
            tracing::warn!(%error, "a lane's all-gather was dropped after a failure");
        }
        let all = self.streams.iter().copied().chain(self.rounds.streams());
        self.comm.destroy_streams(all.collect::<Vec<_>>());
    }
}

/// All that the rounds move: the direct parameters, then the stage.
fn rows(layout: &GroupLayout, ways: &LaneWays, regions: &Regions) -> Vec<LaneRow> {
    let node_count = layout.rank_count();
    let direct = ways.direct.iter().map(|&parameter| {
        let (offset, bytes) = (layout.landing_offset_bytes(parameter, 0), layout.parameters()[parameter].shard_bytes);
        LaneRow { offset: regions.landing.symmetric_offset(offset, node_count * bytes), bytes }
    });
    let stage_row = |bytes: u64| LaneRow { offset: regions.stage.symmetric_offset(0, node_count * bytes), bytes };
    direct.chain((ways.stage_row_bytes > 0).then(|| stage_row(ways.stage_row_bytes))).collect()
}

fn rank_round(comm: &Communicator, node: Node, round: &GatherRound, rows: &[LaneRow], regions: &Regions) -> RankRound {
    let (node_count, context_count) = (comm.topology().node_count(), comm.options().context_count);
    let (target, source) = (round.target(node_count, node), round.source(node_count, node));
    let data = |from: Node| regions.data.signal(from.0 * context_count);
    let pieces = sent_pieces(node_count, node, round, rows);
    let last = pieces.len() - 1;
    // The last piece is the largest.
    let contexts = comm.contexts_of(pieces[last].1);
    let put = |(index, (offset, bytes)): (usize, (u64, u64))| NetPut {
        peer: target.0,
        signal: if index == last { data(node) } else { NO_SIGNAL },
        credit: regions.credit.signal(target.0),
        credit_ahead: 0,
        source_offset: offset,
        source_block: 0,
        lead_signal: NO_SIGNAL,
        pace: NO_SIGNAL,
        contexts,
        lead_contexts: 0,
        lead_bytes: 0,
        apart_offset: 0,
        apart_bytes: 0,
        destination_offset: offset,
        bytes,
    };
    let puts = pieces.into_iter().enumerate().map(put).collect();
    let largest = sent_pieces(node_count, source, round, rows).last().map_or(0, |(_, bytes)| *bytes);
    let arrivals = vec![NetArrival {
        peer: source.0,
        signal: data(source),
        contexts: comm.contexts_of(largest),
        lead_signal: NO_SIGNAL,
        lead_contexts: 0,
        pace_peer: 0,
        pace_signal: NO_SIGNAL,
        reserved: 0,
    }];
    RankRound { puts, arrivals, wave: 0, round: round.index }
}

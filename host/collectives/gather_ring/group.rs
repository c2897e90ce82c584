//! One group of a ring: where its shards lie, and the rounds that move them.

use super::{GatherGroup, Regions, RingOptions};
use crate::arena::{Arena, REGION_ALIGN_BYTES, Region};
use crate::collectives::rounds::{RankRound, Rounds};
use crate::collectives::{Communicator, check_fast_path};
use crate::error::{Result, TideError};
use crate::gpu::{DeviceBuffer, Event};
use crate::layout::{Dtype, GroupLayout};
use crate::net::Net;
use crate::plan::{GatherRound, Node, Rank, Topology};
use std::sync::Arc;
use tide_device::abi::fault::Operation;
use tide_device::abi::params::{CastSegment, Credit, NO_SIGNAL, NetArrival, NetPut};

pub(super) struct GroupState {
    pub(super) layout: GroupLayout,
    pub(super) ring_slot: usize,
    /// The resident shard; `None` with a cast.
    pub(super) shards: Option<Region>,
    /// Bytes from one stage slot to the next.
    pub(super) slot_bytes: u64,
    pub(super) rounds: Rounds,
    /// Per rank: tables of casts that may be in flight, the last one's at the end.
    pub(super) cast_tables: Vec<Vec<CastTable>>,
}

/// Where the masters of a cast lie.
pub(super) struct CastTable {
    pub(super) segments: Vec<CastSegment>,
    pub(super) table: DeviceBuffer,
    /// When the last cast by it has read it.
    pub(super) read: Event,
}

/// Lays a group out, if a ring takes it.
pub(super) fn lay_out(group: &GatherGroup, topology: Topology) -> Result<GroupLayout> {
    check_fast_path(&group.group)?;
    let other = group.group.parameters().iter().find(|p| p.dtype() != Dtype::Bf16);
    if let Some(p) = other.filter(|_| group.cast) {
        return Err(TideError::usage(format!("parameter `{}` is {}: a cast gives bf16", p.name(), p.dtype())));
    }
    Ok(GroupLayout::new(&group.group, u64::from(topology.rank_count()))?)
}

/// Bytes of a stage slot: slots start where a bulk copy may, and are moved in whole.
pub(super) fn slot_bytes(layout: &GroupLayout) -> u64 {
    layout.shard_bytes().next_multiple_of(REGION_ALIGN_BYTES)
}

/// Bytes of the receive stage: `(M − 1)·S`, or `M·S` with a cast [TIDE §3.1].
pub(super) fn stage_bytes(layout: &GroupLayout, cast: bool, node_count: u32) -> u64 {
    u64::from(node_count - u32::from(!cast)) * slot_bytes(layout)
}

impl GroupState {
    /// `slot_bytes_max` is that of the largest group.
    pub(super) fn new(
        comm: &Communicator,
        (arena, net): (&Arena, &Arc<dyn Net>),
        regions: &Regions,
        gather_rounds: &[GatherRound],
        layout: GroupLayout,
        shards: Option<Region>,
        (ring_slot, options, slot_bytes_max): (usize, RingOptions, u64),
    ) -> Result<Self> {
        let places = Places {
            regions,
            shards,
            comm,
            slot_bytes: slot_bytes(&layout),
            slot_bytes_max,
            node_count: comm.topology().node_count(),
            round_count: gather_rounds.len() as u32,
            lead_bytes_total: options.lead_bytes_total,
        };
        let (rounds, credits) = network_tables(comm, gather_rounds, &places);
        let progress = |rank: Rank| arena.signal(rank, regions.progress.signal(0)).0;
        let rounds = Rounds::new(comm, net, Operation::AllGather, rounds, credits, progress)?;
        let cast_tables = comm.driven().iter().map(|_| Vec::new()).collect();
        Ok(Self { slot_bytes: places.slot_bytes, layout, ring_slot, shards, rounds, cast_tables })
    }

    /// Region and byte offset of a stage slot.
    pub(super) fn stage_slot(&self, regions: &Regions, slot: u32) -> (Region, u64) {
        stage_slot(regions, self.shards, self.slot_bytes, slot)
    }
}

fn stage_slot(regions: &Regions, shards: Option<Region>, slot_bytes: u64, slot: u32) -> (Region, u64) {
    match (shards, slot) {
        (Some(shards), 0) => (shards, 0),
        (Some(_), _) => (regions.stage, u64::from(slot - 1) * slot_bytes),
        (None, _) => (regions.stage, u64::from(slot) * slot_bytes),
    }
}

/// Where a group's stage slots lie.
struct Places<'a> {
    comm: &'a Communicator,
    regions: &'a Regions,
    shards: Option<Region>,
    slot_bytes: u64,
    /// Of the largest group: all groups share the signals, so that all signal on as many contexts as it does.
    slot_bytes_max: u64,
    node_count: u32,
    round_count: u32,
    /// 0 for rounds that are not paced.
    lead_bytes_total: u64,
}

impl Places<'_> {
    /// Symmetric offset of `count` slots from `first` on, none of which is a resident shard.
    fn staged(&self, first: u32, count: u32) -> u64 {
        let (region, offset) = stage_slot(self.regions, self.shards, self.slot_bytes, first);
        region.symmetric_offset(offset, u64::from(count) * self.slot_bytes)
    }

    /// What a round sends: slots `0..slots`, of which a resident shard lies apart.
    fn put(&self, round: &GatherRound, node: Node) -> NetPut {
        let target = round.target(self.node_count, node);
        let (apart_offset, apart_bytes, source_offset) = match self.shards {
            Some(shards) if round.slots > 1 => {
                (shards.symmetric_offset(0, self.slot_bytes), self.slot_bytes, self.staged(1, round.slots - 1))
            }
            Some(shards) => (0, 0, shards.symmetric_offset(0, self.slot_bytes)),
            None => (0, 0, self.staged(0, round.slots)),
        };
        let is_paced = self.is_paced() && round.index > 0;
        NetPut {
            peer: target.0,
            signal: self.data(node),
            credit: self.regions.credit.signal(target.0),
            credit_ahead: 1,
            lead_signal: self.lead_signal(round.index),
            pace: if is_paced { self.regions.pace.signal(round.index) } else { NO_SIGNAL },
            contexts: self.contexts(round),
            lead_contexts: self.lead_contexts(round),
            lead_bytes: self.lead_bytes(round),
            source_offset,
            source_block: 0,
            apart_offset,
            apart_bytes,
            destination_offset: self.staged(round.received_slots().start, round.slots),
            bytes: self.bytes(round),
        }
    }

    /// What a round brings, and whom its lead lets go on.
    fn arrival(&self, round: &GatherRound, next: Option<&GatherRound>, node: Node) -> NetArrival {
        let source = round.source(self.node_count, node);
        let paced = next.filter(|_| self.is_paced());
        NetArrival {
            peer: source.0,
            signal: self.data(source),
            contexts: self.contexts(round),
            lead_signal: self.lead_signal(round.index),
            lead_contexts: self.lead_contexts(round),
            pace_peer: paced.map_or(0, |next| next.source(self.node_count, node).0),
            pace_signal: paced.map_or(NO_SIGNAL, |next| self.regions.pace.signal(next.index)),
            reserved: 0,
        }
    }

    fn bytes(&self, round: &GatherRound) -> u64 {
        u64::from(round.slots) * self.slot_bytes
    }

    fn data(&self, source: Node) -> u32 {
        self.regions.data.signal(source.0 * self.comm.options().context_count)
    }

    /// Contexts of what follows the lead.
    fn contexts(&self, round: &GatherRound) -> u32 {
        let bytes = u64::from(round.slots) * self.slot_bytes_max;
        self.comm.contexts_of(bytes - self.lead_bytes_of(round, bytes))
    }

    fn lead_contexts(&self, round: &GatherRound) -> u32 {
        let bytes = u64::from(round.slots) * self.slot_bytes_max;
        if self.is_led(round) { self.comm.contexts_of(self.lead_bytes_of(round, bytes)) } else { 0 }
    }

    fn is_paced(&self) -> bool {
        self.lead_bytes_total > 0
    }

    /// The last round lets nobody go on.
    fn is_led(&self, round: &GatherRound) -> bool {
        self.is_paced() && round.index + 1 < self.round_count
    }

    fn lead_bytes(&self, round: &GatherRound) -> u64 {
        self.lead_bytes_of(round, self.bytes(round))
    }

    /// The lead of a round of `bytes`: the leads of all rounds are equal and add up to the total at most.
    fn lead_bytes_of(&self, round: &GatherRound, bytes: u64) -> u64 {
        if !self.is_led(round) {
            return 0;
        }
        let lead = self.lead_bytes_total / u64::from(self.round_count - 1);
        (lead - lead % 16).min(bytes)
    }

    fn lead_signal(&self, round: u32) -> u32 {
        self.regions.lead.signal(round * self.comm.options().context_count)
    }
}

/// Every driven rank's rounds, and the credits that it returns at the end of a call.
fn network_tables(
    comm: &Communicator,
    gather_rounds: &[GatherRound],
    places: &Places<'_>,
) -> (Vec<Vec<RankRound>>, Vec<Vec<Vec<Credit>>>) {
    let (topology, driven) = (comm.topology(), comm.driven());
    let rounds_of = |rank: Rank| {
        let node = topology.node_of(rank);
        let of_round = |(index, round): (usize, &GatherRound)| RankRound {
            puts: vec![places.put(round, node)],
            arrivals: vec![places.arrival(round, gather_rounds.get(index + 1), node)],
            wave: 0,
            round: round.index,
        };
        gather_rounds.iter().enumerate().map(of_round).collect()
    };
    let credits_of = |rank: Rank| {
        let node = topology.node_of(rank);
        let own = places.regions.credit.signal(node.0);
        let credit = |r: &GatherRound| Credit { peer: r.source(places.node_count, node).0, signal: own };
        vec![gather_rounds.iter().map(credit).collect()]
    };
    (driven.iter().map(rounds_of).collect(), driven.iter().map(credits_of).collect())
}

//! One group of a ring: where its shards lie, and the rounds that move them.

use super::{GatherGroup, Regions};
use crate::arena::{Arena, REGION_ALIGN_BYTES, Region};
use crate::collectives::rounds::{RankRound, Rounds};
use crate::collectives::{Communicator, check_fast_path};
use crate::error::{Result, TideError};
use crate::gpu::DeviceBuffer;
use crate::layout::{Dtype, GroupLayout};
use crate::plan::{GatherRound, Node, Rank, Topology};
use std::sync::Arc;
use tide_device::abi::fault::Operation;
use tide_device::abi::params::{CastSegment, Credit, NetArrival, NetPut};

pub(super) struct GroupState {
    pub(super) layout: GroupLayout,
    pub(super) ring_slot: usize,
    /// The resident shard; `None` with a cast.
    pub(super) shards: Option<Region>,
    /// Bytes from one stage slot to the next.
    pub(super) slot_bytes: u64,
    pub(super) rounds: Rounds,
    /// Table of the last cast per rank, kept until the next.
    pub(super) cast_tables: Vec<Option<(Vec<CastSegment>, DeviceBuffer)>>,
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
    pub(super) fn new(
        comm: &Communicator,
        arena: &Arc<Arena>,
        regions: &Regions,
        gather_rounds: &[GatherRound],
        layout: GroupLayout,
        shards: Option<Region>,
        ring_slot: usize,
    ) -> Result<Self> {
        let places = Places { regions, shards, slot_bytes: slot_bytes(&layout) };
        let (rounds, credits) = network_tables(comm, gather_rounds, &places);
        let progress = |rank: Rank| arena.signal(rank, regions.progress.signal(0)).0;
        let rounds = Rounds::new(comm, arena, Operation::AllGather, rounds, credits, progress)?;
        let cast_tables = comm.topology().ranks().map(|_| None).collect();
        Ok(Self { slot_bytes: places.slot_bytes, layout, ring_slot, shards, rounds, cast_tables })
    }

    /// Region and byte offset of a stage slot.
    pub(super) fn stage_slot(&self, regions: &Regions, slot: u32) -> (Region, u64) {
        Places { regions, shards: self.shards, slot_bytes: self.slot_bytes }.stage_slot(slot)
    }
}

/// Where a group's stage slots lie.
struct Places<'a> {
    regions: &'a Regions,
    shards: Option<Region>,
    slot_bytes: u64,
}

impl Places<'_> {
    fn stage_slot(&self, slot: u32) -> (Region, u64) {
        match (self.shards, slot) {
            (Some(shards), 0) => (shards, 0),
            (Some(_), _) => (self.regions.stage, u64::from(slot - 1) * self.slot_bytes),
            (None, _) => (self.regions.stage, u64::from(slot) * self.slot_bytes),
        }
    }

    /// Symmetric offset of `count` slots from `first` on, none of which is a resident shard.
    fn staged(&self, first: u32, count: u32) -> u64 {
        let (region, offset) = self.stage_slot(first);
        region.symmetric_offset(offset, u64::from(count) * self.slot_bytes)
    }

    /// What a round sends: slots `0..slots`, of which a resident shard lies apart.
    fn put(&self, round: &GatherRound, target: Node, signal: u32, credit: u32) -> NetPut {
        let (head_offset, head_bytes, source_offset) = match self.shards {
            Some(shards) if round.slots > 1 => {
                (shards.symmetric_offset(0, self.slot_bytes), self.slot_bytes, self.staged(1, round.slots - 1))
            }
            Some(shards) => (0, 0, shards.symmetric_offset(0, self.slot_bytes)),
            None => (0, 0, self.staged(0, round.slots)),
        };
        NetPut {
            peer: target.0,
            signal,
            credit,
            credit_lead: 1,
            source_offset,
            source_block: 0,
            head_offset,
            head_bytes,
            destination_offset: self.staged(round.received_slots().start, round.slots),
            bytes: u64::from(round.slots) * self.slot_bytes,
        }
    }
}

/// Every rank's rounds, and the credits that it returns at the end of a call.
fn network_tables(
    comm: &Communicator,
    gather_rounds: &[GatherRound],
    places: &Places<'_>,
) -> (Vec<Vec<RankRound>>, Vec<Vec<Vec<Credit>>>) {
    let topology = comm.topology();
    let m = topology.node_count();
    let data = |node: Node| places.regions.data.signal(node.0 * comm.options().context_count);
    let rounds_of = |rank: Rank| {
        let node = topology.node_of(rank);
        let of_round = |round: &GatherRound| {
            let (target, source) = (round.target(m, node), round.source(m, node));
            let put = places.put(round, target, data(node), places.regions.credit.signal(target.0));
            let arrival = NetArrival { peer: source.0, signal: data(source), bytes: put.bytes };
            RankRound { puts: vec![put], arrivals: vec![arrival], wave: 0, round: round.index }
        };
        gather_rounds.iter().map(of_round).collect()
    };
    let credits_of = |rank: Rank| {
        let node = topology.node_of(rank);
        let own = places.regions.credit.signal(node.0);
        let credit = |r: &GatherRound| Credit { peer: r.source(m, node).0, signal: own };
        vec![gather_rounds.iter().map(credit).collect()]
    };
    (topology.ranks().map(rounds_of).collect(), topology.ranks().map(credits_of).collect())
}

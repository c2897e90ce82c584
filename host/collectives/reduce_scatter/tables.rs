//! What a registration lays down: the arena's regions and signals, every rank's rounds, and the credits it returns.

use crate::arena::{ArenaLayout, Region, Signals};
use crate::collectives::Communicator;
use crate::collectives::rounds::RankRound;
use crate::plan::{Node, Rank, ReduceScatterPlan, Wave, latin_square};
use tide_device::abi::params::{Credit, NO_SIGNAL, NetArrival, NetPut};

#[derive(Clone, Copy)]
pub(super) struct Regions {
    pub(super) staging: Region,
    pub(super) inbox: Region,
    pub(super) outbox: Region,
    pub(super) spare: Region,
    pub(super) accumulator: Region,
    pub(super) staging_full: Signals,
    pub(super) staging_free: Signals,
    pub(super) arrived: Signals,
    pub(super) landed: Signals,
    pub(super) data: Signals,
    pub(super) credit: Signals,
}

pub(super) fn regions(plan: &ReduceScatterPlan, context_count: u32) -> (ArenaLayout, Regions) {
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

/// Every driven rank's rounds, and the credits that it returns after each wave.
pub(super) fn network(
    plan: &ReduceScatterPlan,
    regions: &Regions,
    comm: &Communicator,
) -> (Vec<Vec<RankRound>>, Vec<Vec<Vec<Credit>>>) {
    let topology = plan.topology;
    let (m, l) = (topology.node_count(), topology.local_rank_count());
    let block_bytes = plan.block_bytes();
    let (contexts, context_count) = (comm.contexts_of(block_bytes), comm.options().context_count);
    let driven = comm.driven();
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
            credit_ahead: u32::from(wave.index < plan.generation_count),
            source_offset: regions.outbox.symmetric_offset(0, 0),
            source_block: u64::from(contributor - 1),
            lead_signal: NO_SIGNAL,
            pace: NO_SIGNAL,
            contexts,
            lead_contexts: 0,
            lead_bytes: 0,
            apart_offset: 0,
            apart_bytes: 0,
            destination_offset: regions.inbox.symmetric_offset(inbox_block * block_bytes, block_bytes),
            bytes: block_bytes,
        }
    };
    let source = |rank: Rank, contributor: u32| latin_square::source(m, topology.node_of(rank), contributor);
    let arrival = |rank: Rank, contributor: u32| {
        let from = source(rank, contributor);
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
    (driven.iter().map(rounds_of).collect(), driven.iter().map(credits_of).collect())
}

//! Rail lanes: the collectives of a group with one rank per node [TIDE App. F].
//!
//! Experts that are sharded over modulo subgroups leave each subgroup one rank per node (`L_sub = 1`): all its peers are rail
//! peers, none shares its node. A lane is a [`Communicator`] of its own, with its own signals and call numbers, of topology
//! `M × 1`; lanes and the full group run side by side and share nothing. What the general collectives do for local ranks
//! falls away:
//!
//! * [`LaneAllGather`] sends from landing to landing: no receive stage, no scatter.
//! * [`LaneReduceScatter`] sends gradients in their own type and adds them in fp32 where they arrive: no Level 1 staging.
//!
//! Where a lane or any other shard group is one of several replicas (HSDP), each rank's output is handed on to whatever
//! reduces it over the replicas: [`ReplicaReduce`], [`hand_on`].

mod all_gather;
mod reduce_scatter;

pub use all_gather::LaneAllGather;
pub use reduce_scatter::{LaneOptions, LaneReduceScatter};

use super::{Communicator, RankEvents, RankGradients, check_rank_count};
use crate::error::{Result, TideError};
use crate::gpu::{DeviceSlice, Event};
use crate::plan::Rank;

/// What reduces the output of a shard group over its replicas: FSDP2's all-reduce, for one.
///
/// Any `FnMut(Rank, DeviceSlice, Event) -> Result<Event>` is one.
pub trait ReplicaReduce {
    /// Enqueues the reduction of `rank`'s packed shard `out`, which is complete with `done`; gives the event with which the
    /// reduced one is. α is in the shard already: replicas are added, not scaled again.
    ///
    /// # Errors
    /// What it refuses.
    fn reduce(&mut self, rank: Rank, out: DeviceSlice, done: Event) -> Result<Event>;
}

impl<F: FnMut(Rank, DeviceSlice, Event) -> Result<Event>> ReplicaReduce for F {
    fn reduce(&mut self, rank: Rank, out: DeviceSlice, done: Event) -> Result<Event> {
        self(rank, out, done)
    }
}

/// Hands the outputs of a call that was just enqueued on to `replicas`, in rank order; the events that come back tell when
/// the outputs are reduced over the replicas, too.
///
/// # Errors
/// [`TideError::Usage`] if the events are not those of these ranks; what `replicas` refuses.
pub fn hand_on(
    comm: &Communicator,
    ranks: &[RankGradients],
    events: &[RankEvents],
    replicas: &mut impl ReplicaReduce,
) -> Result<Vec<RankEvents>> {
    check_rank_count(ranks.len(), comm.driven())?;
    check_rank_count(events.len(), comm.driven())?;
    let numbered = comm.driven().iter().zip(ranks);
    let reduce = |((rank, given), events): ((Rank, &RankGradients), &RankEvents)| {
        Ok(RankEvents { read: events.read, done: replicas.reduce(rank, given.out, events.done)? })
    };
    numbered.zip(events).map(reduce).collect()
}

/// Refuses a group with several ranks on a node.
fn check_lane(comm: &Communicator) -> Result<()> {
    match comm.topology().local_rank_count() {
        1 => Ok(()),
        found => Err(TideError::usage(format!("a lane has one rank per node, this communicator has {found}"))),
    }
}

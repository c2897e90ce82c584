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

mod network_phase;
mod read_phase;
mod tables;

use super::level_1::Sums;
use super::node::{NodeSignals, Place};
use super::rounds::Rounds;
use super::{Communicator, GradientDtype, RankEvents, Scale, check_fast_path, check_gradients, check_rank_count};
use crate::arena::Arena;
use crate::error::Result;
use crate::gpu::{DeviceSlice, Event, Fill2d, Gpu, Priority, Stream};
use crate::launch::Facts;
use crate::layout::{Group, GroupLayout};
use crate::plan::{Rank, ReduceScatterOptions, ReduceScatterPlan, Topology};
use std::sync::Arc;
use tables::Regions;
use tide_device::abi::fault::Operation;

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
    node: NodeSignals,
    regions: Regions,
    rounds: Rounds,
    streams: Vec<RankStreams>,
    net_streams: Vec<Stream>,
    sums: Sums,
    epoch: u64,
    /// Staging items so far: all ranks push and sum them in the same order.
    items: u64,
    /// Per bank, per rank: when the bank's last call had sent its blocks and copied its spares.
    bank_free: [Vec<Option<Event>>; 2],
    descriptor_count: u64,
}

/// One call, while it is enqueued.
struct Call<'a> {
    ranks: &'a [RankGradients],
    scale: Scale,
    bank: u32,
    /// Per remote block in sending order, then per rank: when it is summed.
    remote_sums: Vec<Vec<Event>>,
    /// Per pass, then per rank: when the own node's partial is.
    own_sums: Vec<Vec<Event>>,
    /// Per rank.
    read: Vec<Event>,
    done: Vec<Event>,
}

impl<'a> Call<'a> {
    fn new(ranks: &'a [RankGradients], scale: Scale, bank: u32) -> Self {
        let (remote_sums, own_sums) = (Vec::new(), Vec::new());
        Self { ranks, scale, bank, remote_sums, own_sums, read: Vec::new(), done: Vec::new() }
    }
}

impl ReduceScatter {
    /// Plans a reduce-scatter of `group`, allocates its arena on every rank and uploads its tables.
    ///
    /// # Errors
    /// [`crate::TideError::Layout`] and [`crate::TideError::Plan`] for what has no plan; [`crate::TideError::Unsupported`] for a group of more
    /// than 256 parameters, which [`super::StockReduceScatter`] takes; what the driver refuses.
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
        let (arena_layout, regions) = tables::regions(&plan, comm.options().context_count);
        let facts = Facts::new()
            .with("group", format_args!("{:016x}", group.signature()))
            .with("gradients", format_args!("{dtype:?}"))
            .with("plan", format_args!("{:016x}", plan.hash()));
        let (arena, net) = comm.install("reduce-scatter", &facts, arena_layout)?;
        let (tables, credits) = tables::network(&plan, &regions, comm);
        let rounds = Rounds::new(comm, &net, Operation::ReduceScatter, tables, credits, |_| 0)?;
        let sums = Sums::new(comm, &layout, dtype, plan.sum_cta_count)?;
        let (mut streams, mut net_streams) = (Vec::new(), Vec::new());
        for rank in comm.driven().iter() {
            streams.push(RankStreams {
                push: comm.create_stream(rank, Priority::Normal)?,
                sum: comm.create_stream(rank, Priority::Normal)?,
                land: comm.create_stream(rank, Priority::High)?,
            });
            net_streams.push(comm.create_stream(rank, Priority::High)?);
        }
        let no_bank = || vec![None; comm.driven().count() as usize];
        let this = Self {
            comm: comm.clone(),
            layout,
            dtype,
            plan,
            node: NodeSignals { comm: comm.clone(), arena: Arc::clone(&arena), operation: Operation::ReduceScatter },
            arena,
            regions,
            rounds,
            streams,
            net_streams,
            sums,
            epoch: 0,
            items: 0,
            bank_free: [no_bank(), no_bank()],
            descriptor_count: 0,
        };
        this.zero_inboxes()?;
        comm.installed("reduce-scatter")?;
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
    /// [`crate::TideError::Usage`] for wrong counts, sizes, alignments or null addresses, before anything is enqueued;
    /// [`crate::TideError::Poisoned`]; what the driver refuses.
    pub fn enqueue(&mut self, ranks: &[RankGradients], scale: Scale) -> Result<Vec<RankEvents>> {
        self.enqueue_behind(ranks, scale, &vec![None; ranks.len()])
    }

    /// As [`ReduceScatter::enqueue`], with a prefetch gate per rank: an event before which the network phase does not
    /// start, so that an all-gather issued meanwhile goes first. Reads do not wait for it [TIDE App. E alg. 1 l. 10].
    ///
    /// # Errors
    /// As [`ReduceScatter::enqueue`].
    pub fn enqueue_behind(
        &mut self,
        ranks: &[RankGradients],
        scale: Scale,
        gates: &[Option<Event>],
    ) -> Result<Vec<RankEvents>> {
        self.comm.check()?;
        check_rank_count(gates.len(), self.comm.driven())?;
        check_gradients(ranks, self.comm.driven(), &self.layout, self.dtype)?;
        self.descriptor_count = 0;
        let bank = (self.epoch % 2) as u32;
        for (rank, given) in self.comm.driven().iter().zip(ranks) {
            let streams = self.streams(rank);
            let bank_free = self.bank_free[bank as usize][self.comm.index(rank)];
            for event in [given.ready, bank_free].into_iter().flatten() {
                self.gpu().wait_event(streams.sum, event)?;
            }
            if let Some(ready) = given.ready {
                self.gpu().wait_event(streams.push, ready)?;
                self.gpu().wait_event(streams.land, ready)?;
            }
        }
        let mut call = Call::new(ranks, scale, bank);
        self.read_phase(&mut call)?;
        for (stream, gate) in self.net_streams.iter().zip(gates) {
            gate.map_or(Ok(()), |gate| self.gpu().wait_event(*stream, gate))?;
        }
        self.network_phase(&mut call)?;
        let Call { read, done, .. } = call;
        for rank in self.comm.driven().iter() {
            self.bank_free[bank as usize][self.comm.index(rank)] =
                Some(self.gpu().record(self.net_streams[self.comm.index(rank)])?);
        }
        self.epoch += 1;
        Ok(read.into_iter().zip(done).map(|(read, done)| RankEvents { read, done }).collect())
    }

    /// Inboxes start as zeros: blocks that no wave has written yet are read, too.
    fn zero_inboxes(&self) -> Result<()> {
        let bytes = self.regions.inbox.bytes();
        for rank in self.comm.driven().iter() {
            let destination = self.arena.at(rank, self.regions.inbox, 0, bytes);
            let fill = Fill2d { destination, pitch_bytes: bytes, width_bytes: bytes, rows: 1, value: 0 };
            self.gpu().fill(self.net_streams[self.comm.index(rank)], &fill)?;
        }
        self.comm.synchronize()
    }

    fn topology(&self) -> Topology {
        self.plan.topology
    }

    fn gpu(&self) -> &Arc<dyn Gpu> {
        self.comm.gpu()
    }

    fn streams(&self, rank: Rank) -> &RankStreams {
        &self.streams[self.comm.index(rank)]
    }

    /// A place in the current call.
    fn place(&self, wave: u32) -> Place {
        Place { epoch: self.epoch, wave, round: 0 }
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

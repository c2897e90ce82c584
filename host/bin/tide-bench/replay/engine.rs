//! Carries the schedule out on a machine.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use bytemuck::{cast_slice, cast_slice_mut};
use tide_gpu::error::TideError;
use tide_gpu::gpu::{Copy2d, DeviceBuffer, DevicePtr, DeviceSlice, Event, Gpu, Priority, Stream, SyncOutcome};
use tide_gpu::layout::{Group, GroupLayout};
use tide_gpu::plan::{Mode, Rank, ReduceScatterOptions};
use tide_gpu::{
    Communicator, GatherGroup, GatherRing, GradientDtype, RankEvents, RankGather, RankGradients, RankSources,
    ReduceScatter, RingOptions, Scale, StoredGradients,
};

use super::data::Source;
use super::moves::{Compute, Moment, Move, Runs, STATE_ELEMS, Tensor};
use super::pool::{Block, Pool};
use super::schedule::{Action, micro_step};
use crate::legs::fill;

/// Bytes of an element: everything that is gathered and computed is bf16.
const ELEM_BYTES: u64 = 2;
/// The least that is allocated for an output, so that an empty one has an address.
const OUTPUT_BYTES_MIN: u64 = 16;
/// What the ring calls the regions of its resident shards.
const RESIDENT_REGION: &str = "resident shard";
/// Elements made and uploaded at a time.
const UPLOAD_ELEMS: u64 = 1 << 19;

/// What to replay.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The shapes of every layer.
    pub group: Group,
    /// Layers.
    pub layers: usize,
    /// Micro-steps of a step.
    pub micro_steps: u64,
    /// Whether forward is computed again in backward.
    pub checkpoint: bool,
    /// The factor of each sum.
    pub alpha: f32,
    /// Where all values come from.
    pub source: Source,
    /// How to reduce; its mode is the replay's.
    pub reduce: ReduceScatterOptions,
}

/// Bytes of one rank by what they are for, as allocated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Peaks {
    /// Ring slots and receive stage.
    pub ring: u64,
    /// Resident shards.
    pub shards: u64,
    /// Staging, outbox, inbox, spares and accumulator.
    pub reduce_scatter: u64,
    /// Gradients.
    pub gradients: u64,
    /// Of these, in this step, the most that belonged to other layers while one made its own.
    pub held_gradients: u64,
    /// The reduced shards.
    pub outputs: u64,
    /// Everything, with tables and what the stand-ins compute on.
    pub total: u64,
}

struct RankState {
    stream: Stream,
    pool: Pool,
    /// Gradients by layer, while they lie in memory of their own.
    gradients: Vec<Option<Vec<Block>>>,
    outputs: Vec<DeviceBuffer>,
    data: DeviceBuffer,
    states: Vec<DeviceBuffer>,
    /// One of each layer, or one for all where it is computed again.
    kept: Vec<DeviceBuffer>,
}

/// A replay on a machine.
pub struct Engine {
    // The collectives wait for their work when they are dropped: before what it uses.
    ring: GatherRing,
    reduce: ReduceScatter,
    ranks: Vec<RankState>,
    comm: Communicator,
    layout: GroupLayout,
    settings: Settings,
    /// By layer: when what was gathered is there.
    gathered: Vec<Vec<RankEvents>>,
    /// By layer and rank: gradients in the ring.
    stored: Vec<Vec<StoredGradients>>,
    /// By layer and rank: when its gradients are read.
    reads: Vec<Vec<Event>>,
    held_max: u64,
    step: u64,
}

impl Engine {
    /// Allocates everything but gradients.
    ///
    /// # Errors
    /// Those of the library.
    pub fn new(comm: Communicator, settings: Settings) -> Result<Self> {
        let topology = comm.topology();
        let layout = GroupLayout::new(&settings.group, topology.rank_count().into())?;
        let groups: Vec<GatherGroup> =
            (0..settings.layers).map(|_| GatherGroup { group: settings.group.clone(), cast: false }).collect();
        let ring = GatherRing::new(&comm, &groups, RingOptions::default())?;
        // Layers are alike and reduced one after the other: all by one collective, as on one stream of FSDP2.
        let reduce = ReduceScatter::new(&comm, &settings.group, GradientDtype::Bf16, &settings.reduce)?;
        let ranks = topology.ranks().map(|r| RankState::new(&comm, r, &layout, &settings)).collect::<Result<_>>()?;
        let layers = settings.layers;
        let (gathered, reads, stored) = (vec![Vec::new(); layers], vec![Vec::new(); layers], vec![Vec::new(); layers]);
        Ok(Self { ring, reduce, ranks, comm, layout, settings, gathered, stored, reads, held_max: 0, step: 0 })
    }

    /// The layout of every layer.
    pub fn layout(&self) -> &GroupLayout {
        &self.layout
    }

    /// Gives every shard its values of the next step, then runs the step to its end; the time is that of the latter.
    ///
    /// # Errors
    /// Those of the library.
    pub fn step(&mut self) -> Result<Duration> {
        self.update_parameters()?;
        for output in self.ranks.iter().flat_map(|rank| &rank.outputs) {
            // What the first micro-step should overwrite holds NaN.
            let slice = output.slice();
            fill(self.gpu().as_ref(), slice.address, slice.bytes, &f32::NAN.to_le_bytes())?;
        }
        self.held_max = 0;
        let actions = micro_step(self.settings.layers, self.mode(), self.settings.checkpoint);
        let start = Instant::now();
        for micro_step in 0..self.settings.micro_steps {
            for rank in 0..self.ranks.len() {
                let moves = Compute::new(&self.layout).input(self.moment(rank, micro_step));
                self.compute(rank, &moves)?;
            }
            for &action in &actions {
                self.act(action, micro_step)?;
            }
        }
        self.synchronize()?;
        let time = start.elapsed();
        self.ranks.iter_mut().for_each(|rank| rank.pool.settle());
        self.step += 1;
        Ok(time)
    }

    /// Elements `place` of a rank's output of a layer.
    ///
    /// # Errors
    /// Those of the machine.
    pub fn output(&self, layer: usize, rank: usize, place: Range<u64>) -> Result<Vec<f32>> {
        let mut values = vec![0.0; (place.end - place.start) as usize];
        let first = DevicePtr(self.ranks[rank].outputs[layer].address().0 + 4 * place.start);
        self.gpu().download(first, cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// Bytes that a rank keeps of a layer's forward.
    pub fn kept_bytes(layout: &GroupLayout) -> u64 {
        Compute::new(layout).kept_elems() * ELEM_BYTES
    }

    /// What is and was allocated.
    pub fn peaks(&self) -> Peaks {
        let rank_count = self.ranks.len() as u64;
        let shards = self.ring.regions().filter(|(name, _)| *name == RESIDENT_REGION).map(|(_, bytes)| bytes).sum();
        let most = |bytes: &dyn Fn(&RankState) -> u64| self.ranks.iter().map(bytes).max().unwrap_or(0);
        let devices = 0..self.gpu().device_count();
        let total: u64 = devices.map(|device| self.gpu().usage_bytes(device).1).sum();
        Peaks {
            ring: self.ring.buffer_bytes() - shards,
            shards,
            reduce_scatter: self.reduce.buffer_bytes(),
            gradients: most(&|rank| rank.pool.allocated_bytes()),
            held_gradients: self.held_max,
            outputs: most(&|rank| rank.outputs.iter().map(|o| o.slice().bytes).sum()),
            total: total.div_ceil(rank_count),
        }
    }

    fn gpu(&self) -> &Arc<dyn Gpu> {
        self.comm.gpu()
    }

    fn mode(&self) -> Mode {
        self.settings.reduce.mode
    }

    fn moment(&self, rank: usize, micro_step: u64) -> Moment {
        Moment { step: self.step, micro_step, rank: rank as u64 }
    }

    /// The optimizer's stand-in: new values for every shard.
    fn update_parameters(&self) -> Result<()> {
        for rank in self.comm.topology().ranks() {
            for (layer, (index, p)) in
                (0..self.settings.layers).flat_map(|l| self.layout.parameters().iter().enumerate().map(move |p| (l, p)))
            {
                let Some(shard) = self.ring.shard(layer, rank, index) else { continue };
                let (first, live) = (p.rows_of(rank.0.into()).start * p.row_elems, p.live_elems_of(rank.0.into()));
                for at in (0..live).step_by(UPLOAD_ELEMS as usize) {
                    let elems = UPLOAD_ELEMS.min(live - at);
                    let values = self.settings.source.parameter(self.step, layer, index, first + at, elems);
                    self.gpu().upload(DevicePtr(shard.address.0 + at * ELEM_BYTES), cast_slice(&values))?;
                }
            }
        }
        Ok(())
    }

    fn act(&mut self, action: Action, micro_step: u64) -> Result<()> {
        match action {
            Action::Gather(layer) => {
                let ranks = vec![RankGather::default(); self.ranks.len()];
                self.gathered[layer] = self.ring.gather(layer, &ranks)?;
                Ok(())
            }
            Action::Forward(layer) => self.compute_layer(layer, |compute, _| compute.forward(layer), micro_step),
            Action::Recompute(layer) => self.compute_layer(layer, |compute, _| compute.recompute(layer), micro_step),
            Action::Backward(layer) => {
                self.take_gradients(layer)?;
                self.compute_layer(layer, |compute, at| compute.backward(at, layer), micro_step)
            }
            Action::Reshard(layer) => {
                let after = self.record_compute()?;
                Ok(self.ring.release(layer, &after.into_iter().map(Some).collect::<Vec<_>>())?)
            }
            Action::Store(layer) => self.store(layer),
            Action::Reduce(layer) => self.reduce(layer, micro_step > 0),
            Action::Free(layer) => {
                let reads = self.reads[layer].clone();
                self.give_back(layer, &reads);
                Ok(())
            }
        }
    }

    /// Enqueues what `moves` names on every rank, once the layer is gathered there.
    fn compute_layer(
        &self,
        layer: usize,
        moves: impl Fn(&Compute<'_>, Moment) -> Vec<Move>,
        micro_step: u64,
    ) -> Result<()> {
        let compute = Compute::new(&self.layout);
        for (rank, state) in self.ranks.iter().enumerate() {
            self.gpu().wait_event(state.stream, self.gathered[layer][rank].done)?;
            self.compute(rank, &moves(&compute, self.moment(rank, micro_step)))?;
        }
        Ok(())
    }

    fn compute(&self, rank: usize, moves: &[Move]) -> Result<()> {
        for m in moves {
            let (destination, source) = (self.address(rank, m.to), self.address(rank, m.from));
            let copy = Copy2d {
                destination,
                destination_pitch_bytes: m.to.pitch * ELEM_BYTES,
                source,
                source_pitch_bytes: m.from.pitch * ELEM_BYTES,
                width_bytes: m.width * ELEM_BYTES,
                rows: m.rows,
            };
            self.gpu().copy(self.ranks[rank].stream, &copy)?;
        }
        Ok(())
    }

    fn address(&self, rank: usize, runs: Runs) -> DevicePtr {
        let state = &self.ranks[rank];
        let base = match runs.tensor {
            Tensor::Data => state.data.address(),
            Tensor::State(index) => state.states[index].address(),
            Tensor::Kept(layer) => state.kept[layer % state.kept.len()].address(),
            Tensor::Parameter(layer, p) => self.ring.parameter(layer, Rank(rank as u32), p).address,
            Tensor::Gradient(layer, p) => {
                let gradients = state.gradients[layer].as_ref().expect("the schedule takes gradients first");
                gradients[p].slice().address
            }
        };
        DevicePtr(base.0 + runs.first * ELEM_BYTES)
    }

    fn take_gradients(&mut self, layer: usize) -> Result<()> {
        for rank in &mut self.ranks {
            self.held_max = self.held_max.max(rank.pool.live_bytes());
            let take = |p: &tide_gpu::layout::ParameterLayout| rank.pool.take(rank.stream, p.elems * ELEM_BYTES);
            rank.gradients[layer] = Some(self.layout.parameters().iter().map(take).collect::<Result<_>>()?);
        }
        Ok(())
    }

    /// Frees a layer's gradients; each rank's are written again after its event.
    fn give_back(&mut self, layer: usize, after: &[Event]) {
        for (rank, &event) in self.ranks.iter_mut().zip(after) {
            for block in rank.gradients[layer].take().into_iter().flatten() {
                rank.pool.give_back(block, event);
            }
        }
    }

    /// All that every rank has computed so far.
    fn record_compute(&self) -> Result<Vec<Event>> {
        Ok(self.ranks.iter().map(|rank| self.gpu().record(rank.stream)).collect::<Result<_, _>>()?)
    }

    fn gradients(&self, layer: usize, rank: usize) -> Vec<Option<DeviceSlice>> {
        self.ranks[rank].gradients[layer].iter().flatten().map(|block| Some(block.slice())).collect()
    }

    fn store(&mut self, layer: usize) -> Result<()> {
        let ready = self.record_compute()?;
        let source = |(rank, ready)| RankSources { gradients: self.gradients(layer, rank), ready: Some(ready) };
        let sources: Vec<RankSources> = ready.into_iter().enumerate().map(source).collect();
        let stored = self.ring.store_gradients(layer, &sources)?;
        let over: Vec<Event> = stored.iter().map(|rank| rank.stored).collect();
        self.give_back(layer, &over);
        self.stored[layer] = stored;
        Ok(())
    }

    fn reduce(&mut self, layer: usize, accumulate: bool) -> Result<()> {
        let sources: Vec<(Vec<Option<DeviceSlice>>, Event)> = match self.mode() {
            Mode::InPlace => {
                let ready = self.record_compute()?.into_iter().enumerate();
                ready.map(|(rank, event)| (self.gradients(layer, rank), event)).collect()
            }
            Mode::SlotReuse => {
                let stored = std::mem::take(&mut self.stored[layer]);
                stored.into_iter().map(|rank| (rank.gradients, rank.stored)).collect()
            }
        };
        let given: Vec<RankGradients> = sources
            .into_iter()
            .zip(&self.ranks)
            .map(|((gradients, ready), rank)| {
                let out = rank.outputs[layer].slice();
                RankGradients { gradients, out, ready: Some(ready) }
            })
            .collect();
        let events = self.reduce.enqueue(&given, Scale { alpha: self.settings.alpha, accumulate })?;
        self.reads[layer] = events.into_iter().map(|rank| rank.read).collect();
        if self.mode() == Mode::SlotReuse {
            let after: Vec<Option<Event>> = self.reads[layer].iter().copied().map(Some).collect();
            self.ring.release(layer, &after)?;
        }
        Ok(())
    }

    /// Waits for all work, that of the collectives first: the others wait for it.
    fn synchronize(&self) -> Result<()> {
        self.comm.synchronize()?;
        let timeout_ns = u64::try_from(self.comm.options().timeout.as_nanos()).unwrap_or(u64::MAX);
        for rank in &self.ranks {
            if let SyncOutcome::Stalled { .. } = self.gpu().synchronize(rank.stream, timeout_ns)? {
                let (call, detail) = ("synchronize".to_owned(), "the stand-ins for compute have stalled".to_owned());
                return Err(TideError::Driver { call, detail }.into());
            }
        }
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Err(error) = self.synchronize() {
            tracing::warn!(%error, "a replay was dropped after a failure");
        }
        self.ranks.iter().for_each(|rank| self.comm.gpu().destroy_stream(rank.stream));
    }
}

impl RankState {
    fn new(comm: &Communicator, rank: Rank, layout: &GroupLayout, settings: &Settings) -> Result<Self> {
        let (gpu, device) = (comm.gpu(), comm.device_of(rank));
        let compute = Compute::new(layout);
        let many = |count: usize, bytes: u64| {
            (0..count).map(|_| Ok(DeviceBuffer::new(gpu, device, bytes)?)).collect::<Result<Vec<_>>>()
        };
        let layers = settings.layers;
        let kept = if settings.checkpoint { 1 } else { layers };
        let data = settings.source.data(rank.0.into(), compute.data_elems());
        Ok(Self {
            stream: gpu.create_stream(device, Priority::Normal)?,
            pool: Pool::new(gpu, device),
            gradients: (0..layers).map(|_| None).collect(),
            outputs: many(layers, (4 * layout.packed_elems()).max(OUTPUT_BYTES_MIN))?,
            data: DeviceBuffer::from_slice(gpu, device, &data)?,
            states: many(layers + 1, STATE_ELEMS * ELEM_BYTES)?,
            kept: many(kept, Engine::kept_bytes(layout))?,
        })
    }
}

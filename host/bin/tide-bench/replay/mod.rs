//! `tide-bench replay`: forward, backward and recomputation of a few layers as FSDP2 would drive them, with stand-ins for
//! compute; what each step holds, beside the paper's bounds and the stock baseline's figures [TIDE §5].

mod args;
mod bounds;
mod check;
mod data;
mod engine;
mod moves;
mod pool;
mod report;
mod schedule;

pub use args::{AFTER_HELP, ReplayArgs};
pub use bounds::paper_layer_share;

use anyhow::{Context, Result};
use tide_gpu::layout::GroupLayout;
use tide_gpu::plan::{Mode, ReduceScatterOptions, ReduceScatterPlan, Topology};
use tide_gpu::{Communicator, CommunicatorOptions};
use xxhash_rust::xxh3::Xxh3Default;

use crate::backend::Machine;
use crate::cli::{Collective, GradDtype};
use crate::failure::usage;
use crate::progress::Progress;
use crate::report::{Voice, deliver_json};
use crate::run::{plan_reduce, reduce_options};
use crate::tensors::Workload;
use crate::{memory, save};
use bounds::{Bounds, Stock};
use check::{Layer, Reference};
use data::Source;
use engine::{Engine, Settings};
use report::{Facts, Step};

/// Replays what the options ask for; whether all data was right and every bound was kept.
///
/// # Errors
/// Bad usage, what this machine cannot do, and a fail-stop.
pub fn replay(arguments: &ReplayArgs) -> Result<bool> {
    let topology = Topology::new(arguments.nodes, arguments.gpus).context("--nodes and --gpus")?;
    let (workload, settings) = settings(arguments, topology)?;
    if let Some(path) = arguments.json.as_deref().filter(|path| path.as_os_str() != "-") {
        save::check_file("--json", path)?;
    }
    let (machine, fallback) = Machine::choose(arguments.backend)?;
    let layout = GroupLayout::new(&settings.group, topology.rank_count().into())?;
    let plan = plan_reduce(topology, &layout, GradDtype::Bf16.dtype().bytes(), &settings.reduce)?;
    let options = CommunicatorOptions { path: arguments.path.into(), ..Default::default() };
    let bounds = Bounds::new(&plan, &layout, options.context_count);
    if machine == Machine::Sim {
        let check = if arguments.no_check { 0 } else { Reference::bytes(&layout) };
        let needed = needed_bytes(&layout, &plan, &bounds, &settings).saturating_add(check);
        memory::check(needed, arguments.source.preset.as_deref())?;
    }

    let voice = Voice::beside(arguments.json.as_deref());
    let facts = Facts::new(arguments, machine, &workload, &layout, &plan, bounds, Stock::new(&layout));
    voice.say(&facts.header());
    fallback.iter().for_each(|line| voice.say(&format!("# {line}\n")));
    let gpu = machine.start(topology.local_rank_count(), arguments.source.seed)?;
    let comm = Communicator::new(gpu, topology, options)?;
    let steps = run(Engine::new(comm, settings.clone())?, &settings, &facts, arguments)?;
    voice.say(&facts.table(&steps));
    let exceeded: Vec<String> = steps.iter().flat_map(|step| facts.exceeded(step)).collect();
    exceeded.iter().for_each(|sentence| eprintln!("tide-bench: {sentence}"));
    if let Some(path) = &arguments.json {
        deliver_json(path, &facts.json(&steps)?)?;
    }
    Ok(exceeded.is_empty() && steps.iter().all(|step| step.wrong.unwrap_or(0) == 0))
}

/// What to replay, and the words about it.
fn settings(arguments: &ReplayArgs, topology: Topology) -> Result<(Workload, Settings)> {
    let source = &arguments.source;
    if source.model.is_some() || source.grads.is_some() {
        return Err(usage("--model and --grads: a replay generates its data; name a --preset or a --group"));
    }
    if source.grad_dtype == Some(GradDtype::F32) {
        return Err(usage("--grad-dtype f32: a replay computes in bf16, as its parameters are"));
    }
    let rank_count = u64::from(topology.rank_count());
    let workload = Workload::open(source, Collective::Rs, rank_count)?;
    let Some(gradients) = &workload.reduce else { return Err(usage("there is nothing to replay")) };
    let micro_steps = u64::from(arguments.accumulate_steps);
    let mode: Mode = arguments.mode.into();
    let settings = Settings {
        group: gradients.group.clone(),
        layers: arguments.layers as usize,
        micro_steps,
        checkpoint: arguments.checkpoint,
        // The mean over ranks and micro-steps.
        alpha: (1.0 / (rank_count * micro_steps) as f64) as f32,
        source: Source::new(source.seed),
        reduce: ReduceScatterOptions { mode, ..reduce_options(&arguments.plan) },
    };
    Ok((workload, settings))
}

/// About what all ranks of the simulated machine take together, and the host's check of a step.
fn needed_bytes(layout: &GroupLayout, plan: &ReduceScatterPlan, bounds: &Bounds, settings: &Settings) -> u64 {
    let layers = settings.layers as u64;
    // Resident shards and sums of all layers.
    let lasting = layers.saturating_mul(layout.shard_bytes().saturating_add(4 * layout.packed_elems()));
    let kept = if settings.checkpoint { 1 } else { layers }.saturating_mul(Engine::kept_bytes(layout));
    let parts = [bounds.held_gradients, layout.landing_bytes(), bounds.ring, plan.memory.total_bytes(), lasting, kept];
    layout.rank_count().saturating_mul(parts.into_iter().fold(0, u64::saturating_add))
}

fn run(mut engine: Engine, settings: &Settings, facts: &Facts, arguments: &ReplayArgs) -> Result<Vec<Step>> {
    let progress = Progress::new();
    progress.start("steps".to_owned(), arguments.steps.into());
    let mut steps = Vec::new();
    for index in 0..u64::from(arguments.steps) {
        let time = engine.step()?;
        let mut reference = (!arguments.no_check)
            .then(|| Reference::new(&settings.source, engine.layout(), index, settings.micro_steps, settings.alpha));
        let (mut digest, mut wrong) = (Xxh3Default::new(), reference.as_ref().map(|_| 0));
        for layer in 0..settings.layers {
            for rank in 0..engine.layout().rank_count() as usize {
                let packed = engine.output(layer, rank, 0..engine.layout().packed_elems())?;
                packed.iter().for_each(|value| digest.update(&value.to_le_bytes()));
            }
            if let (Some(reference), Some(wrong)) = (&mut reference, &mut wrong) {
                *wrong += wrong_elems(&engine, layer, reference.next_layer())?;
            }
        }
        let digest = format!("{:032x}", digest.digest128());
        steps.push(facts.step(index, time, engine.peaks(), wrong, digest));
        progress.step();
    }
    Ok(steps)
}

/// How many elements of all ranks' shards of a layer are wrong.
fn wrong_elems(engine: &Engine, layer: usize, mut expected: Layer<'_>) -> Result<u64> {
    let mut wrong = 0;
    for (index, p) in engine.layout().parameters().iter().enumerate() {
        let sums = expected.sums(index);
        for rank in 0..engine.layout().rank_count() {
            let place = p.packed_offset_elems..p.packed_offset_elems + p.shard_elems;
            wrong += sums.wrong(p, rank, &engine.output(layer, rank as usize, place)?);
        }
    }
    Ok(wrong)
}

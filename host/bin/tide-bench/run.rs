//! `tide-bench run`: from the options to the table.

use std::fmt::Write as _;

use anyhow::Result;
use tide_gpu::launch::spawn::{SpawnOptions, spawn as start_all};
use tide_gpu::launch::{Placement, Token};
use tide_gpu::layout::GroupLayout;
use tide_gpu::plan::{PlanError, ReduceScatterOptions, ReduceScatterPlan, Topology};

use crate::backend::Machine;
use crate::cli::{Backend, PlanOptions, RunArgs, command_line};
use crate::examine::{Job, Settings, examine};
use crate::failure::{child_failed, usage};
use crate::progress::Progress;
use crate::report::{Row, Voice};
use crate::site::Site;
use crate::tensors::Workload;
use crate::verify::PREVIOUS;
use crate::{legs, memory, report, save};

/// Runs what the options ask for; whether all data was right.
///
/// # Errors
/// Bad usage, what this machine cannot do, and a fail-stop; before anything is written, but for the
/// last.
pub fn run(arguments: &RunArgs) -> Result<bool> {
    if let Some(count) = arguments.spawn {
        if arguments.backend != Backend::Nccl {
            return Err(usage("--spawn: only --backend nccl has several processes"));
        }
        return spawn(count);
    }
    let site = Site::open(arguments)?;
    let (machine, topology) = (site.machine(), site.topology());
    let rank_count = u64::from(topology.rank_count());
    let workload = Workload::open(&arguments.source, arguments.collective, rank_count)?;
    if let Some(dir) = &arguments.save {
        save::check_dir("--save", dir, rank_count)?;
    }
    if let Some(path) = arguments.json.as_deref().filter(|path| path.as_os_str() != "-") {
        save::check_file("--json", path)?;
    }
    let options = reduce_options(&arguments.plan);
    let needed = needed_bytes(&workload, topology, &options)?;
    if machine == Machine::Sim {
        memory::check(needed, arguments.source.preset.as_deref())?;
    }

    let voice = if site.is_first() { Voice::beside(arguments.json.as_deref()) } else { Voice::Silent };
    voice.say(&header(arguments, machine, topology, &workload));
    site.notes.iter().for_each(|line| voice.say(&format!("# {line}\n")));
    let settings = Settings {
        shape: (topology.node_count(), topology.local_rank_count()),
        iters: arguments.iters,
        warmup: arguments.warmup,
        check: !arguments.no_check,
        save: arguments.save.as_deref(),
    };
    let mut rows = Vec::new();
    for job in jobs(&workload, arguments) {
        let progress = Progress::new();
        let (mut leg, note) = legs::prepare(&site, &options, job, &progress)?;
        note.iter().for_each(|note| voice.say(&format!("# {note}\n")));
        rows.push(examine(leg.as_mut(), job, &settings, &progress)?);
    }
    voice.say(&report::table(&rows));
    voice.say(&report::footer(&rows));
    if let Some(path) = arguments.json.as_ref().filter(|_| site.is_first()) {
        report::deliver_json(path, &report::json(&rows)?)?;
    }
    Ok(rows.iter().all(Row::is_right))
}

/// Starts a process for each GPU of this node, and gives what became of them.
///
/// # Errors
/// A process that cannot be started.
fn spawn(count: u32) -> Result<bool> {
    // The children get the same command without `--spawn`.
    let mut arguments = Vec::new();
    let mut words = std::env::args_os().skip(1);
    while let Some(word) = words.next() {
        match word.to_str() {
            Some("--spawn") => drop(words.next()),
            Some(text) if text.starts_with("--spawn=") => {}
            _ => arguments.push(word),
        }
    }
    let env = |name: &str| std::env::var(name).ok();
    let mut options = SpawnOptions::new(count, arguments)?;
    options.outer = Placement::detect(&env)?;
    if options.outer.is_some() || env("TIDE_TOKEN").is_some() {
        options.token = Some(Token::from_env(&env));
    }
    match start_all(&options)? {
        0 => Ok(true),
        status => Err(child_failed(status)),
    }
}

/// The library's options for these of the command line.
pub fn reduce_options(plan: &PlanOptions) -> ReduceScatterOptions {
    let mut options = ReduceScatterOptions {
        wave_width: plan.wave,
        round_width: plan.round_width,
        pass_count: plan.passes,
        chunk_bytes: plan.chunk,
        ..Default::default()
    };
    if let Some(count) = plan.sum_ctas {
        options.sum_cta_count = count;
    }
    options
}

/// Plans the reduce-scatter.
///
/// # Errors
/// The planner's refusal, after the option that it is about where it is about one.
pub fn plan_reduce(
    topology: Topology,
    layout: &GroupLayout,
    grad_bytes: u64,
    options: &ReduceScatterOptions,
) -> Result<ReduceScatterPlan> {
    ReduceScatterPlan::new(topology, layout, grad_bytes, options).map_err(|error| {
        let option = match error {
            PlanError::WaveWidth { .. } | PlanError::Collision { .. } => "--wave: ",
            PlanError::RoundWidth => "--k: ",
            PlanError::PassCount { .. } => "--passes: ",
            PlanError::ChunkBytes { .. } => "--chunk: ",
            PlanError::SumCtaCount { .. } => "--sum-ctas: ",
            _ => "",
        };
        usage(format!("{option}{error}"))
    })
}

fn jobs<'a>(workload: &'a Workload, arguments: &RunArgs) -> Vec<Job<'a>> {
    let (alpha, accumulate) = (arguments.alpha, arguments.accumulate);
    let gather = workload.gather.as_ref().map(Job::Gather);
    let reduce = workload.reduce.as_ref().map(|gradients| Job::Reduce { gradients, alpha, accumulate });
    gather.into_iter().chain(reduce).collect()
}

/// The bytes of the larger collective on all ranks of the simulated machine together, which is the
/// memory that the run takes: collectives run one after the other.
///
/// # Errors
/// No plan exists for the reduce-scatter; the sentence says why.
fn needed_bytes(workload: &Workload, topology: Topology, options: &ReduceScatterOptions) -> Result<u64> {
    let ranks = u64::from(topology.rank_count());
    let mut needed = 0;
    if let Some(tensors) = &workload.gather {
        let layout = GroupLayout::new(&tensors.group, ranks)?;
        let slots = u64::from(topology.node_count()).saturating_mul(layout.shard_bytes());
        let buffers = if legs::is_fast(&tensors.group) { slots } else { layout.landing_bytes() };
        needed = ranks.saturating_mul(layout.landing_bytes().saturating_add(buffers));
    }
    if let Some(gradients) = &workload.reduce {
        let layout = GroupLayout::new(&gradients.group, ranks)?;
        let item = gradients.dtype.dtype().bytes();
        let plan = plan_reduce(topology, &layout, item, options)?;
        let inputs: u64 = layout.parameters().iter().map(|p| p.elems * item).sum();
        let output = layout.packed_elems() * 4;
        let fast = legs::is_fast(&gradients.group);
        let buffers = if fast { plan.memory.total_bytes() } else { output.saturating_mul(ranks) };
        let rank = inputs.saturating_add(output).saturating_add(buffers);
        needed = needed.max(ranks.saturating_mul(rank));
    }
    Ok(needed)
}

fn header(arguments: &RunArgs, machine: Machine, topology: Topology, workload: &Workload) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "# tide-bench {}", env!("CARGO_PKG_VERSION"));
    let _ = writeln!(text, "# command : {}", command_line(std::env::args_os()));
    let _ = writeln!(text, "# backend : {}", machine.name());
    let (m, l, n) = (topology.node_count(), topology.local_rank_count(), topology.rank_count());
    let _ = writeln!(text, "# ranks   : {n} = {m} nodes x {l} gpus");
    let _ = writeln!(text, "# group   : {}, {}", workload.title, size_of(workload));
    let _ = writeln!(text, "# seed    : {}", arguments.source.seed);
    let (iters, warmup) = (arguments.iters, arguments.warmup);
    let check = if arguments.no_check { "off" } else { "on" };
    let _ = writeln!(text, "# calls   : {iters} timed, {warmup} before; check {check}");
    if workload.reduce.is_some() {
        let previous =
            if arguments.accumulate { format!("{PREVIOUS}, accumulated onto") } else { "overwritten".into() };
        let _ = writeln!(text, "# rs      : alpha {}, previous output {previous}", arguments.alpha);
    }
    workload.notes.iter().for_each(|note| {
        let _ = writeln!(text, "# {note}");
    });
    text.push_str("#\n");
    text
}

fn size_of(workload: &Workload) -> String {
    let Some(group) = workload.groups().next() else { return String::new() };
    let elems: u64 = group.parameters().iter().map(|p| p.shape().iter().product::<u64>()).sum();
    format!("{} parameters, {elems} elements", group.parameters().len())
}

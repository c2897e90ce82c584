//! `tide-bench plan`: what would be placed where, in how many waves, with how much memory.

use std::fmt::Write as _;
use std::ops::Range;

use anyhow::Result;
use serde::Serialize;
use tide_device::abi::params::GRADIENTS_MAX;
use tide_gpu::layout::GroupLayout;
use tide_gpu::plan::{Mode, Node, ReduceScatterPlan, Topology, Wave, all_gather, gather_rounds, memory, validate};

use crate::cli::{Collective, PlanArgs, command_line};
use crate::failure::usage;
use crate::replay::paper_layer_share;
use crate::report::{Voice, columns, deliver_json};
use crate::run::{plan_reduce, reduce_options};
use crate::save::check_file;
use crate::tensors::Workload;

/// Prints the plan that the options ask for.
///
/// # Errors
/// Bad usage, and the planner's own refusals.
pub fn plan(arguments: &PlanArgs) -> Result<()> {
    if let Some(path) = arguments.json.as_deref().filter(|path| path.as_os_str() != "-") {
        check_file("--json", path)?;
    }
    let voice = Voice::beside(arguments.json.as_deref());
    if arguments.exhaustive {
        let counts = validate::exhaustive();
        let (accepted, rejected) = (counts.accepted, counts.rejected);
        voice.say(&format!("accepted {accepted} rejected {rejected}\n"));
        if let Some(path) = &arguments.json {
            let json = serde_json::json!({"exhaustive": {"accepted": accepted, "rejected": rejected}});
            deliver_json(path, &format!("{json:#}\n"))?;
        }
        return Ok(());
    }
    let topology = Topology::new(arguments.nodes, arguments.gpus)?;
    let workload = Workload::open(&arguments.source, Collective::All, topology.rank_count().into())?;
    let summary = Summary::new(arguments, topology, &workload)?;
    voice.say(&summary.text(&workload));
    let count = summary.params;
    if count > GRADIENTS_MAX as u64 {
        voice.say(&format!(
            "# {count} parameters, the fast path takes {GRADIENTS_MAX}: a run takes the stock path instead\n"
        ));
    }
    if let Some(path) = &arguments.json {
        let json = serde_json::to_string_pretty(&Document { plan: &summary })?;
        deliver_json(path, &(json + "\n"))?;
    }
    Ok(())
}

#[derive(Debug, Serialize)]
struct Document<'a> {
    plan: &'a Summary,
}

/// A plan's numbers, as JSON gives them.
#[derive(Debug, Serialize)]
struct Summary {
    nodes: u32,
    gpus: u32,
    params: u64,
    mode: String,
    padding_share: f64,
    reduce_scatter: Reduce,
    all_gather: Gather,
}

#[derive(Debug, Serialize)]
struct Reduce {
    grad_dtype: String,
    out_bytes: u64,
    wave_width: u32,
    round_width: u32,
    passes: u32,
    generations: u32,
    staging_slots: u32,
    outbox_blocks: u32,
    block_bytes: u64,
    chunk_bytes: u64,
    waves: Vec<WaveSummary>,
    memory: Vec<RegionSummary>,
    memory_bytes: u64,
    /// The paper's bound on all but the accumulator, over the aligned row.
    paper_bound_bytes: Option<u64>,
    /// Memory over the bytes of the whole group in the gradients' type.
    ns_share: f64,
    paper_ns_share: Option<f64>,
    /// The paper's bound on all that a layer's backward holds.
    paper_layer_ns_share: Option<f64>,
    stock_bytes: u64,
    descriptors: u64,
    descriptors_flat: u64,
    plan_hash: String,
}

#[derive(Debug, Serialize)]
struct WaveSummary {
    generation: u32,
    contributors: Range<u32>,
    rounds: Vec<Range<u32>>,
    own_node: bool,
    /// Bit j is set where local rank j holds a block of the wave.
    holders: u8,
    /// Bit j is set where its block must be zeroed.
    stale: u8,
}

#[derive(Debug, Serialize)]
struct RegionSummary {
    name: &'static str,
    bytes: u64,
    ns_share: f64,
}

#[derive(Debug, Serialize)]
struct Gather {
    shard_bytes: u64,
    landing_bytes: u64,
    stage_bytes: u64,
    rounds: Vec<GatherRoundSummary>,
    descriptors: u64,
}

#[derive(Debug, Serialize)]
struct GatherRoundSummary {
    slots: u32,
    distance: u32,
}

impl Summary {
    fn new(arguments: &PlanArgs, topology: Topology, workload: &Workload) -> Result<Self> {
        let rank_count = u64::from(topology.rank_count());
        let (Some(gradients), Some(tensors)) = (&workload.reduce, &workload.gather) else {
            return Err(usage("there is nothing to plan"));
        };
        let layout = GroupLayout::new(&gradients.group, rank_count)?;
        let mut options = reduce_options(&arguments.plan);
        options.mode = if arguments.slot_reuse { Mode::SlotReuse } else { arguments.mode.into() };
        let grad_bytes = gradients.dtype.dtype().bytes();
        let plan = plan_reduce(topology, &layout, grad_bytes, &options)?;
        let whole = layout.packed_elems() * grad_bytes * rank_count;
        Ok(Self {
            nodes: topology.node_count(),
            gpus: topology.local_rank_count(),
            params: layout.parameters().len() as u64,
            mode: plan.mode.to_string(),
            padding_share: layout.padding_share(),
            reduce_scatter: Reduce::new(&plan, &layout, gradients.dtype.dtype().to_string(), whole),
            all_gather: Gather::new(topology, &GroupLayout::new(&tensors.group, rank_count)?),
        })
    }

    fn text(&self, workload: &Workload) -> String {
        let mut out = String::new();
        let _ = writeln!(out, "# tide-bench {} plan", env!("CARGO_PKG_VERSION"));
        let _ = writeln!(out, "# command : {}", command_line(std::env::args_os()));
        let _ = writeln!(out, "# ranks   : {} = {} nodes x {} gpus", self.nodes * self.gpus, self.nodes, self.gpus);
        let padding = self.padding_share * 100.0;
        let _ = writeln!(out, "# group   : {}, {} parameters, {padding:.2} % padding", workload.title, self.params);
        workload.notes.iter().for_each(|note| {
            let _ = writeln!(out, "# {note}");
        });
        self.reduce_scatter.write(&mut out, &self.mode);
        self.all_gather.write(&mut out);
        out
    }
}

impl Reduce {
    fn new(plan: &ReduceScatterPlan, layout: &GroupLayout, grad_dtype: String, whole: u64) -> Self {
        let share = |bytes: u64| if whole == 0 { 0.0 } else { bytes as f64 / whole as f64 };
        let parameter_count = layout.parameters().len() as u64;
        let out_bytes = layout.packed_elems() * 4;
        let region = |r: memory::MemoryRegion| RegionSummary { name: r.name, bytes: r.bytes, ns_share: share(r.bytes) };
        let paper = paper_bound(plan);
        Self {
            grad_dtype,
            out_bytes,
            wave_width: plan.wave_width,
            round_width: plan.round_width,
            passes: plan.pass_count,
            generations: plan.generation_count,
            staging_slots: plan.staging_slot_count,
            outbox_blocks: plan.outbox_block_count,
            block_bytes: plan.block_bytes(),
            chunk_bytes: plan.staging_slot_bytes(),
            waves: plan.waves.iter().map(WaveSummary::new).collect(),
            memory: plan.memory.regions().map(region).into(),
            memory_bytes: plan.memory.total_bytes(),
            paper_bound_bytes: paper.map(|(bytes, _)| bytes),
            ns_share: share(plan.memory.area_bytes()),
            paper_ns_share: paper.map(|(_, share)| share),
            paper_layer_ns_share: paper_layer_share(plan),
            stock_bytes: out_bytes * layout.rank_count(),
            descriptors: plan.descriptor_count_paper(parameter_count),
            descriptors_flat: plan.descriptor_count_flat(parameter_count),
            plan_hash: format!("{:016x}", plan.hash()),
        }
    }

    fn write(&self, out: &mut String, mode: &str) {
        let _ = writeln!(out, "#\n# reduce-scatter, {} gradients, {mode}", self.grad_dtype);
        let passes = counted(self.passes.into(), "pass", "passes");
        let waves = counted(self.waves.len() as u64, "wave", "waves");
        let width = self.wave_width;
        let _ = writeln!(out, "# {passes} of {waves}, width {width}, rounds of at most {}", self.round_width);
        let head = ["wave", "generation", "contributors", "rounds", "own node", "holders", "stale"];
        let rows = self.waves.iter().enumerate().map(|(index, wave)| wave.cells(index));
        table(out, &head, rows, &[2, 3, 4, 5, 6]);
        let _ = writeln!(out, "#\n# memory of each rank, beside gradients and output");
        let regions =
            self.memory.iter().map(|r| vec![r.name.to_owned(), r.bytes.to_string(), format!("{:.3}", r.ns_share)]);
        let total = vec!["total".to_owned(), self.memory_bytes.to_string(), String::new()];
        table(out, &["region", "bytes", "of NS"], regions.chain([total]), &[0]);
        let staging = counted(self.staging_slots.into(), "staging slot", "staging slots");
        let outbox = counted(self.outbox_blocks.into(), "outbox block", "outbox blocks");
        let _ = writeln!(out, "# {staging} of {} B; {outbox} of {} B a bank", self.chunk_bytes, self.block_bytes);
        match (self.paper_bound_bytes, self.paper_ns_share) {
            (Some(bytes), Some(share)) => {
                let ours = self.ns_share;
                let _ =
                    writeln!(out, "# without accumulator {ours:.3} NS; the paper's bound: {bytes} B, {share:.3} NS");
            }
            _ => {
                let ours = self.ns_share;
                let _ = writeln!(
                    out,
                    "# without accumulator {ours:.3} NS; the paper states its bound for 8 gpus, bf16, 1 pass"
                );
            }
        }
        if let Some(share) = self.paper_layer_ns_share {
            let stock = memory::FSDP2_LAYER_SHARE;
            let _ = writeln!(
                out,
                "# a layer's backward, with ring and held gradients: at most {share:.2} NS; FSDP2 {stock:.2} NS"
            );
        }
        let _ = writeln!(out, "# stock packs the whole group in fp32: {} B", self.stock_bytes);
        let (ours, flat) = (self.descriptors, self.descriptors_flat);
        let _ = writeln!(out, "# copy descriptors of a rank: {ours} (L-1)*P*M, against {flat} flat");
        let _ = writeln!(out, "# plan hash {}", self.plan_hash);
    }
}

/// The paper's bound in bytes and as a share of `NS`, where its assumptions hold: eight local ranks,
/// bf16 gradients, one pass.
fn paper_bound(plan: &ReduceScatterPlan) -> Option<(u64, f64)> {
    let (m, l) = (plan.topology.node_count(), plan.topology.local_rank_count());
    if l != 8 || plan.grad_bytes != 2 || plan.pass_count != 1 {
        return None;
    }
    let row = plan.geometry.aligned_row_bytes(l, plan.pass_count);
    let n_par = plan.generation_count;
    let bytes = memory::area_bound_bytes(plan.staging_slot_count, n_par, plan.outbox_block_count, row);
    let share = match plan.mode {
        Mode::InPlace => memory::in_place_area_share(m, n_par),
        Mode::SlotReuse => memory::slot_reuse_area_share(m, n_par, plan.round_width),
    };
    Some((bytes, share))
}

impl WaveSummary {
    fn new(wave: &Wave) -> Self {
        Self {
            generation: wave.generation,
            contributors: wave.contributors.clone(),
            rounds: wave.rounds.clone(),
            own_node: wave.has_own_node,
            holders: wave.holder_mask,
            stale: wave.stale_mask,
        }
    }

    fn cells(&self, index: usize) -> Vec<String> {
        let rounds: Vec<String> = self.rounds.iter().map(closed).collect();
        vec![
            index.to_string(),
            self.generation.to_string(),
            closed(&self.contributors),
            if rounds.is_empty() { "-".to_owned() } else { rounds.join(" ") },
            if self.own_node { "yes" } else { "no" }.to_owned(),
            format!("{:08b}", self.holders),
            format!("{:08b}", self.stale),
        ]
    }
}

/// A range of contributors as its first and last.
fn closed(range: &Range<u32>) -> String {
    if range.len() == 1 { range.start.to_string() } else { format!("{}..{}", range.start, range.end - 1) }
}

impl Gather {
    fn new(topology: Topology, layout: &GroupLayout) -> Self {
        let m = topology.node_count();
        let rounds = gather_rounds(m);
        Self {
            shard_bytes: layout.shard_bytes(),
            landing_bytes: layout.landing_bytes(),
            stage_bytes: u64::from(m - 1) * layout.shard_bytes(),
            rounds: rounds.iter().map(|r| GatherRoundSummary { slots: r.slots, distance: r.distance }).collect(),
            descriptors: all_gather::descriptor_count(m, Node(0), layout.parameters().len() as u64),
        }
    }

    fn write(&self, out: &mut String) {
        let rounds: Vec<String> = self.rounds.iter().map(|r| format!("{} from {}", r.slots, r.distance)).collect();
        let listed = if rounds.is_empty() { String::new() } else { format!(": {} away", rounds.join(", ")) };
        let _ = writeln!(out, "#\n# all-gather, {}{listed}", counted(rounds.len() as u64, "round", "rounds"));
        let rows = [("shard", self.shard_bytes), ("landing", self.landing_bytes), ("stage", self.stage_bytes)];
        let rows = rows.map(|(name, bytes)| vec![name.to_owned(), bytes.to_string()]);
        table(out, &["region", "bytes"], rows.into_iter(), &[0]);
        let _ = writeln!(out, "# copy descriptors of a rank: {}", self.descriptors);
    }
}

fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

fn table(out: &mut String, head: &[&str], rows: impl Iterator<Item = Vec<String>>, words: &[usize]) {
    let head = head.iter().map(|&name| name.to_owned()).collect();
    for (index, line) in columns([head].into_iter().chain(rows), words).iter().enumerate() {
        let _ = writeln!(out, "{}{line}", if index == 0 { "#" } else { " " });
    }
}

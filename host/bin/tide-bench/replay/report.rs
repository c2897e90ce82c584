//! What a replay tells: the header, a line of each step, and the same as JSON.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;
use tide_gpu::layout::GroupLayout;
use tide_gpu::plan::ReduceScatterPlan;

use super::ReplayArgs;
use super::bounds::{Bounds, Stock, paper_layer_share};
use super::engine::Peaks;
use crate::backend::Machine;
use crate::cli::command_line;
use crate::report::columns;
use crate::tensors::Workload;

/// The columns: their names, and their units below.
const COLUMNS: [(&str, &str); 18] = [
    ("step", ""),
    ("time", "(us)"),
    ("ring", "(B/rank)"),
    ("bound", "(B/rank)"),
    ("rs", "(B/rank)"),
    ("bound", "(B/rank)"),
    ("grads", "(B/rank)"),
    ("held", "(B/rank)"),
    ("bound", "(B/rank)"),
    ("layer", "(B/rank)"),
    ("", "(NS)"),
    ("bound", "(NS)"),
    ("stock", "(B/rank)"),
    ("", "(NS)"),
    ("outputs", "(B/rank)"),
    ("total", "(B/rank)"),
    ("#wrong", ""),
    ("digest", ""),
];

/// What all steps of a replay share; the JSON but for the steps.
#[derive(Debug, Clone, Serialize)]
pub struct Facts {
    backend: &'static str,
    path: &'static str,
    mode: String,
    nodes: u32,
    gpus: u32,
    layers: u32,
    accumulate_steps: u32,
    checkpoint: bool,
    seed: u64,
    params: u64,
    /// `NS`: bytes of a layer in bf16, with padding.
    ns_bytes: u64,
    bound_bytes: Bounds,
    /// The paper's closed form for a layer; none where its assumptions do not hold.
    paper_layer_ns: Option<f64>,
    stock_bytes: Stock,
    #[serde(skip)]
    title: String,
}

/// One step's results.
#[derive(Debug, Clone, Serialize)]
pub struct Step {
    step: u64,
    /// None on the simulator: its time is not a GPU's.
    time_us: Option<f64>,
    peak_bytes: PeakBytes,
    /// `layer` of `peak_bytes` over `NS`.
    layer_ns: f64,
    /// Elements that are wrong; none where nothing was checked.
    pub wrong: Option<u64>,
    digest: String,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct PeakBytes {
    ring: u64,
    shards: u64,
    reduce_scatter: u64,
    gradients: u64,
    held_gradients: u64,
    layer: u64,
    outputs: u64,
    total: u64,
}

impl Facts {
    /// The facts of a replay.
    pub fn new(
        arguments: &ReplayArgs,
        machine: Machine,
        workload: &Workload,
        layout: &GroupLayout,
        plan: &ReduceScatterPlan,
        bound_bytes: Bounds,
        stock_bytes: Stock,
    ) -> Self {
        Self {
            backend: machine.name(),
            path: arguments.path.name(),
            mode: plan.mode.to_string(),
            nodes: arguments.nodes,
            gpus: arguments.gpus,
            layers: arguments.layers,
            accumulate_steps: arguments.accumulate_steps,
            checkpoint: arguments.checkpoint,
            seed: arguments.source.seed,
            params: layout.parameters().len() as u64,
            ns_bytes: layout.landing_bytes(),
            bound_bytes,
            paper_layer_ns: paper_layer_share(plan),
            stock_bytes,
            title: workload.title.clone(),
        }
    }

    /// A step's results.
    pub fn step(&self, index: u64, time: Duration, peaks: Peaks, wrong: Option<u64>, digest: String) -> Step {
        let layer = peaks.ring + peaks.reduce_scatter + peaks.held_gradients;
        Step {
            step: index + 1,
            time_us: (self.backend != "sim").then_some(time.as_secs_f64() * 1e6),
            peak_bytes: PeakBytes {
                ring: peaks.ring,
                shards: peaks.shards,
                reduce_scatter: peaks.reduce_scatter,
                gradients: peaks.gradients,
                held_gradients: peaks.held_gradients,
                layer,
                outputs: peaks.outputs,
                total: peaks.total,
            },
            layer_ns: self.share(layer),
            wrong,
            digest,
        }
    }

    /// A sentence about every bound that a step has exceeded.
    pub fn exceeded(&self, step: &Step) -> Vec<String> {
        let (peak, bound) = (&step.peak_bytes, &self.bound_bytes);
        let kinds = [
            ("the all-gather's ring", peak.ring, bound.ring),
            ("the reduce-scatter's area", peak.reduce_scatter, bound.reduce_scatter),
            ("the gradients of other layers", peak.held_gradients, bound.held_gradients),
            ("a layer's backward", peak.layer, bound.layer),
        ];
        let beyond = kinds.into_iter().filter(|(_, bytes, bound)| bytes > bound);
        beyond
            .map(|(what, bytes, bound)| format!("step {}: {what} takes {bytes} B, its bound is {bound} B", step.step))
            .collect()
    }

    /// The lines above the table.
    pub fn header(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "# tide-bench {} replay", env!("CARGO_PKG_VERSION"));
        let _ = writeln!(text, "# command : {}", command_line(std::env::args_os()));
        let _ = writeln!(text, "# backend : {}, {} path", self.backend, self.path);
        let ranks = u64::from(self.nodes) * u64::from(self.gpus);
        let _ = writeln!(text, "# ranks   : {ranks} = {} nodes x {} gpus", self.nodes, self.gpus);
        let (layers, params) = (self.layers, self.params);
        let _ = writeln!(text, "# model   : {layers} x {}, {params} parameters each", self.title);
        let checkpoint = if self.checkpoint { "checkpointed" } else { "kept" };
        let (mode, micro) = (&self.mode, self.accumulate_steps);
        let _ = writeln!(text, "# steps   : {mode}, {micro} micro-steps each, activations {checkpoint}");
        let _ = writeln!(text, "# seed    : {}", self.seed);
        let _ = writeln!(text, "# NS      : {} B, a layer in bf16", self.ns_bytes);
        text.push_str("#\n");
        text
    }

    /// The table and the lines below it.
    pub fn table(&self, steps: &[Step]) -> String {
        let names = COLUMNS.map(|(name, _)| name.to_owned()).to_vec();
        let units = COLUMNS.map(|(_, unit)| unit.to_owned()).to_vec();
        let cells = [names, units].into_iter().chain(steps.iter().map(|step| self.cells(step).to_vec()));
        let mut text = String::new();
        for (index, line) in columns(cells, &[COLUMNS.len() - 1]).iter().enumerate() {
            let _ = writeln!(text, "{}{line}", if index < 2 { "#" } else { " " });
        }
        if let Some(share) = self.paper_layer_ns {
            let _ = writeln!(text, "# the paper's closed form for a layer: {share:.3} NS");
        }
        let wrong: u64 = steps.iter().filter_map(|step| step.wrong).sum();
        if steps.iter().any(|step| step.wrong.is_none()) {
            text.push_str("# Out of bounds values : N/A (not checked)\n");
        } else {
            let _ = writeln!(text, "# Out of bounds values : {wrong} {}", if wrong == 0 { "OK" } else { "FAILED" });
        }
        let over = steps.iter().any(|step| !self.exceeded(step).is_empty());
        let _ = writeln!(text, "# Memory bounds        : {}", if over { "EXCEEDED" } else { "OK" });
        text
    }

    fn cells(&self, step: &Step) -> [String; COLUMNS.len()] {
        let (peak, bound) = (&step.peak_bytes, &self.bound_bytes);
        let share = |bytes: u64| format!("{:.3}", self.share(bytes));
        [
            step.step.to_string(),
            step.time_us.map_or_else(|| "-".to_owned(), |us| format!("{us:.1}")),
            peak.ring.to_string(),
            bound.ring.to_string(),
            peak.reduce_scatter.to_string(),
            bound.reduce_scatter.to_string(),
            peak.gradients.to_string(),
            peak.held_gradients.to_string(),
            bound.held_gradients.to_string(),
            peak.layer.to_string(),
            share(peak.layer),
            share(bound.layer),
            self.stock_bytes.layer.to_string(),
            share(self.stock_bytes.layer),
            peak.outputs.to_string(),
            peak.total.to_string(),
            step.wrong.map_or_else(|| "N/A".to_owned(), |n| n.to_string()),
            step.digest.clone(),
        ]
    }

    /// The results as JSON.
    ///
    /// # Errors
    /// None that numbers can cause.
    pub fn json(&self, steps: &[Step]) -> anyhow::Result<String> {
        #[derive(Serialize)]
        struct Replay<'a> {
            #[serde(flatten)]
            facts: &'a Facts,
            steps: &'a [Step],
        }
        #[derive(Serialize)]
        struct Document<'a> {
            replay: Replay<'a>,
        }
        let document = Document { replay: Replay { facts: self, steps } };
        Ok(serde_json::to_string_pretty(&document)? + "\n")
    }

    fn share(&self, bytes: u64) -> f64 {
        if self.ns_bytes == 0 { 0.0 } else { bytes as f64 / self.ns_bytes as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            backend: "cuda",
            path: "device",
            mode: "in-place".into(),
            nodes: 2,
            gpus: 4,
            layers: 4,
            accumulate_steps: 1,
            checkpoint: false,
            seed: 1,
            params: 9,
            ns_bytes: 100,
            bound_bytes: Bounds { ring: 225, reduce_scatter: 60, held_gradients: 100, layer: 385 },
            paper_layer_ns: None,
            stock_bytes: Stock { parameters: 100, gathered: 100, packed: 200, layer: 400 },
            title: "preset x".into(),
        }
    }

    fn step(reduce_scatter: u64) -> Step {
        let peaks = Peaks { ring: 225, reduce_scatter, held_gradients: 100, ..Peaks::default() };
        facts().step(0, Duration::from_micros(7), peaks, Some(0), "00ff".into())
    }

    #[test]
    fn a_bound_that_is_exceeded_is_named_with_its_bytes() {
        assert!(facts().exceeded(&step(60)).is_empty());
        let sentences = facts().exceeded(&step(61));
        assert_eq!(sentences[0], "step 1: the reduce-scatter's area takes 61 B, its bound is 60 B");
        assert_eq!(sentences.len(), 2, "the area, and the layer with it: {sentences:?}");
        assert!(facts().table(&[step(61)]).contains("# Memory bounds        : EXCEEDED"));
    }

    #[test]
    fn a_gpus_time_is_shown_and_shares_are_of_the_group() {
        let text = facts().table(&[step(60)]);
        let row: Vec<&str> = text.lines().find(|line| !line.starts_with('#')).unwrap().split_whitespace().collect();
        assert_eq!((row[1], row[10], row[11], row[13]), ("7.0", "3.850", "3.850", "4.000"), "{text}");
    }
}

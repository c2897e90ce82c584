//! What `tide-bench replay` can be asked.

use std::path::PathBuf;

use clap::Args;

use crate::cli::{Backend, GPUS_MAX, ModeWord, NODES_MAX, NetworkPath, PlanOptions, SourceArgs};

/// Below the help of `tide-bench replay`.
pub const AFTER_HELP: &str = "\
Schedule:
  Every layer is one group, as FSDP2 makes them; a step is --accumulate-steps times forward and backward.
  One layer is gathered ahead. After its forward a layer is given up, but for the last, which backward
  starts with. Group g lies in ring slot g mod 2.
  in-place    gradients stay where backward made them until the next layer's backward is over; the
              all-gather after the next is issued ahead of the reduce-scatter.
  slot-reuse  gradients move into the slot that their layer has left, and their memory is free at once;
              the slot's next all-gather waits until the reduce-scatter has read them.
  --checkpoint computes a layer's forward again ahead of its backward, while it is whole.

Compute:
  Stand-ins, which are copies: a layer's forward keeps a sample of its parameters, its backward makes
  gradients of the parameters, of that sample and of data of the rank. What a collective gets wrong or
  overwrites too early shows in the sums. Between steps every shard gets new values.

Table:
  Bytes of one rank, as allocated, at their peak. ring is the all-gather's two slots and receive stage
  without the resident shards; rs what the reduce-scatter allocates beside gradients and output; grads
  all gradients, held those of other layers while one makes its own. layer = ring + rs + held. The
  bounds are the paper's: (L*b/4*n_stg + L*n_par + 2*n_out + 2) rows of fp32 for rs with b bytes a
  gradient, 2 + 1/L groups for ring, one group held in place and none otherwise. stock is what FSDP2
  holds at that point: 4 NS, where NS is the whole group in bf16. The digest is XXH3-128 over all
  layers' fp32 gradient shards on all ranks at the end of the step.

Exit status: 0 right and within the bounds, 1 wrong data or a bound exceeded, 2 bad usage,
3 unsupported here, 4 fail-stop.";

/// `tide-bench replay`.
#[derive(Debug, Clone, Args)]
pub struct ReplayArgs {
    #[command(flatten)]
    pub source: SourceArgs,
    /// Layers, each of the preset's or --group's shapes.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub layers: u32,
    /// Where gradients lie while they are reduced.
    #[arg(long, default_value = "in-place")]
    pub mode: ModeWord,
    /// Nodes, M: 1 to 1024.
    #[arg(long, value_name = "M", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=NODES_MAX))]
    pub nodes: u32,
    /// GPUs of a node, L: 1 to 8.
    #[arg(long, value_name = "L", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=GPUS_MAX))]
    pub gpus: u32,
    /// Steps.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: u32,
    /// Micro-batches of a step, whose gradients are added up in the shards.
    #[arg(long, value_name = "A", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub accumulate_steps: u32,
    /// Keep no activations: compute each layer's forward again in backward.
    #[arg(long)]
    pub checkpoint: bool,
    /// The machine to run on.
    #[arg(long, default_value = "auto")]
    pub backend: Backend,
    /// Who drives the network; the results are the same, bit by bit.
    #[arg(long, default_value = "device")]
    pub path: NetworkPath,
    #[command(flatten)]
    pub plan: PlanOptions,
    /// Skip the check of every element against the host.
    #[arg(long)]
    pub no_check: bool,
    /// Write the results as JSON; `-` is standard output, which then carries nothing else.
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

//! The command line: what can be asked, in which units, with which defaults.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tide_gpu::Path;
use tide_gpu::plan::Mode;

use crate::replay::ReplayArgs;

/// The largest node count that the planner is validated for.
pub const NODES_MAX: i64 = 1024;
/// The largest number of GPUs behind one switch.
pub const GPUS_MAX: i64 = 8;

const AFTER_HELP: &str = "\
Data:
  A preset or --group is generated: element i of parameter p on rank u is a hash of (seed, u, p, i),
  about standard normal, rounded to its type. Parameters of a preset or --group are bf16.
  --model gathers every tensor of the file. Its f32, f16 and bf16 tensors are also the gradients:
  rank u holds round(f32(x) * scale(u)), one fp32 product, rounded to --grad-dtype (to nearest, ties
  to even), with scale(u) = 1 + ((u*(u+1)/2) mod 64) / 64, which fp32 holds exactly.
  --grads reads rank0.safetensors .. rank{N-1}.safetensors, N = nodes x gpus, as they are: bf16 when
  every tensor is bf16, else f32 by exact conversion, unless --grad-dtype says otherwise. The
  all-gather then moves rank 0's tensors.
  The order of a file's parameters is the order of their data in it.

What is computed:
  ag   every rank ends with every parameter whole; checked byte by byte.
  rs   out = (--accumulate ? prev : 0) + alpha * sum over ranks, in fp32, rank r keeping rows
       r*R .. (r+1)*R of each parameter, R = ceil(rows/N). With --accumulate each call starts from
       prev = 1 everywhere. Checked element by element against fp64 within 1e-5 * max(1, max|ref|);
       NaN and infinities must come out where they belong.

Table:
  size is the bytes of the whole group in its own type, without padding; count its elements; times
  are microseconds, algbw and busbw GB/s (1e9), busbw = algbw * (N-1)/N. The simulator shows `-` for
  every rate: its time is not a GPU's. buffer is what one rank allocated: for rs beside gradients and
  output, for ag with its shard and the landing; stock is the same for the FSDP2-like baseline. descr
  counts a rank's copy descriptors in a call. The digest is XXH3-128 over
  the ranks' own, in rank order, each XXH3-128 over that rank's outputs.

Exit status: 0 right, 1 wrong data, 2 bad usage, 3 unsupported here, 4 fail-stop.";

/// Runs TIDE's all-gather and reduce-scatter over a group of tensors, checks every element, and
/// prints a table in the manner of nccl-tests.
#[derive(Debug, Parser)]
#[command(name = "tide-bench", version, args_conflicts_with_subcommands = true, after_help = AFTER_HELP)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub run: RunArgs,
}

/// The subcommands; without one, `run`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the collectives (the default).
    #[command(after_help = AFTER_HELP)]
    Run(Box<RunArgs>),
    /// Print what would be placed where, in how many waves, with how much memory; run nothing.
    Plan(Box<PlanArgs>),
    /// Replay training steps of a few layers: all-gathers, reduce-scatters and their memory, as FSDP2 would have them.
    #[command(after_help = crate::replay::AFTER_HELP)]
    Replay(Box<ReplayArgs>),
    /// Print what this machine has, and what each lack costs. Exit status: 0 nothing is lacking, 10 it runs with
    /// fallbacks, 20 no GPU can be used.
    Doctor(DoctorArgs),
}

/// `tide-bench doctor`.
#[derive(Debug, Clone, Copy, Args)]
pub struct DoctorArgs {
    /// Estimate what NCCL's connections take on so many nodes, M: 1 to 1024.
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=NODES_MAX))]
    pub nodes: Option<u32>,
    /// GPUs of a node, L, for the estimate: 1 to 8.
    #[arg(long, value_name = "L", default_value_t = 8, requires = "nodes", value_parser = clap::value_parser!(u32).range(1..=GPUS_MAX))]
    pub gpus: u32,
    /// Network contexts, for the estimate.
    #[arg(long, value_name = "N", default_value_t = 4, requires = "nodes", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub contexts: u32,
}

/// Which collectives to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Collective {
    /// The all-gather.
    Ag,
    /// The reduce-scatter.
    Rs,
    /// Both, the all-gather first.
    All,
}

impl Collective {
    /// Whether the all-gather runs.
    pub fn gathers(self) -> bool {
        self != Self::Rs
    }

    /// Whether the reduce-scatter runs.
    pub fn reduces(self) -> bool {
        self != Self::Ag
    }
}

/// The machine to run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// The best that this build and machine have.
    Auto,
    /// The simulated machine on the CPU.
    Sim,
    /// The GPUs of this machine, through the CUDA driver.
    Cuda,
    /// The GPUs of a cluster, connected by NCCL; each process drives one, or, without a launcher, this one drives all ranks.
    Nccl,
}

/// Who drives the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NetworkPath {
    /// The GPU posts puts and waits for arrivals itself.
    Device,
    /// The host posts them.
    Host,
}

impl NetworkPath {
    /// The name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
        }
    }
}

impl From<NetworkPath> for Path {
    fn from(word: NetworkPath) -> Self {
        match word {
            NetworkPath::Device => Self::Device,
            NetworkPath::Host => Self::Host,
        }
    }
}

/// Where gradients lie while they are reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModeWord {
    /// Where backward made them.
    InPlace,
    /// In the all-gather slot that their layer has left.
    SlotReuse,
}

impl From<ModeWord> for Mode {
    fn from(word: ModeWord) -> Self {
        match word {
            ModeWord::InPlace => Self::InPlace,
            ModeWord::SlotReuse => Self::SlotReuse,
        }
    }
}

/// The type gradients are read in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GradDtype {
    /// 16-bit brain floats, FSDP2's usual.
    Bf16,
    /// 32-bit floats.
    F32,
}

/// Where the parameters come from.
#[derive(Debug, Clone, Args)]
pub struct SourceArgs {
    /// A model's layer by name; a wrong name lists them all [default: gpt2-small].
    #[arg(long, value_name = "NAME", conflicts_with_all = ["model", "grads", "group"])]
    pub preset: Option<String>,
    /// A safetensors file: its tensors, in the order of their data.
    #[arg(long, value_name = "FILE.safetensors", conflicts_with_all = ["grads", "group"])]
    pub model: Option<PathBuf>,
    /// A directory with the gradients of every rank, rank0.safetensors and so on.
    #[arg(long, value_name = "DIR", conflicts_with = "group")]
    pub grads: Option<PathBuf>,
    /// Shapes, such as 4096x4096,4096,14336x4096; called p0, p1 and so on.
    #[arg(long, value_name = "SHAPES")]
    pub group: Option<String>,
    /// The type gradients are read in [default: bf16; with --grads, what the files hold].
    #[arg(long, value_name = "TYPE")]
    pub grad_dtype: Option<GradDtype>,
    /// The seed of generated data and of the simulator's interleaving.
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub seed: u64,
}

/// The options that shape a reduce-scatter's plan.
#[derive(Debug, Clone, Copy, Args)]
pub struct PlanOptions {
    /// Contributors landed together, at most the GPUs of a node [default: the largest that fits].
    #[arg(long, value_name = "W", value_parser = clap::value_parser!(u32).range(1..))]
    pub wave: Option<u32>,
    /// Network transfers of a round, at most [default: 4].
    #[arg(long = "k", value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    pub round_width: Option<u32>,
    /// Passes that a reduce-scatter is cut into, to bound its memory: 1 to 4.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub passes: u32,
    /// Bytes of a staging or network chunk; K, M and G are binary suffixes [default: the library's].
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub chunk: Option<u64>,
    /// Thread blocks of the local sum [default: the library's].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub sum_ctas: Option<u32>,
}

/// `tide-bench run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Which collectives to run.
    #[arg(long, default_value = "all")]
    pub collective: Collective,
    /// Nodes, M: 1 to 1024 [default: 2, or the launcher's].
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=NODES_MAX))]
    pub nodes: Option<u32>,
    /// GPUs of a node, L: 1 to 8 [default: 4, or the launcher's].
    #[arg(long, value_name = "L", value_parser = clap::value_parser!(u32).range(1..=GPUS_MAX))]
    pub gpus: Option<u32>,
    /// The machine to run on.
    #[arg(long, default_value = "auto")]
    pub backend: Backend,
    #[command(flatten)]
    pub source: SourceArgs,
    /// Who drives the network; the results are the same, bit by bit [default: device; with NCCL, the best that all ranks
    /// have].
    #[arg(long)]
    pub path: Option<NetworkPath>,
    /// With --backend nccl: start this many processes, one for each GPU of this node.
    #[arg(long, value_name = "L", value_parser = clap::value_parser!(u32).range(1..=GPUS_MAX))]
    pub spawn: Option<u32>,
    /// With --backend nccl: where modules lie that `cargo xtask ptx --nccl` has built [default: TIDE_NCCL_MODULES].
    #[arg(long, value_name = "DIR")]
    pub nccl_modules: Option<PathBuf>,
    /// With --backend nccl: the longest that ranks wait for each other while they connect, seconds.
    #[arg(long, value_name = "S", default_value_t = 120, value_parser = clap::value_parser!(u32).range(1..))]
    pub connect_timeout_s: u32,
    #[command(flatten)]
    pub plan: PlanOptions,
    /// The factor of the sum, in fp32.
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true, value_parser = parse_alpha)]
    pub alpha: f32,
    /// Add to what the output holds (1 everywhere) instead of overwriting it.
    #[arg(long)]
    pub accumulate: bool,
    /// Timed calls of each collective.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub iters: u32,
    /// Calls before the timed ones.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub warmup: u32,
    /// Skip the check; #wrong is then N/A.
    #[arg(long)]
    pub no_check: bool,
    /// Write what each rank ends with: rs-rank{r}.safetensors (each padded shard, F32) and
    /// ag-rank{r}.safetensors (each parameter whole).
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Write the results as JSON; `-` is standard output, which then carries nothing else.
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

/// `tide-bench plan`.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// Count the plans that are accepted and rejected over M in 2..=1024, L = 8, and stop; other options of the plan do
    /// not matter.
    #[arg(long)]
    pub exhaustive: bool,
    /// Nodes, M: 1 to 1024.
    #[arg(long, value_name = "M", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=NODES_MAX))]
    pub nodes: u32,
    /// GPUs of a node, L: 1 to 8.
    #[arg(long, value_name = "L", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=GPUS_MAX))]
    pub gpus: u32,
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub plan: PlanOptions,
    /// Where gradients lie while they are reduced.
    #[arg(long, default_value = "in-place")]
    pub mode: ModeWord,
    /// The same as --mode slot-reuse.
    #[arg(long, conflicts_with = "mode")]
    pub slot_reuse: bool,
    /// Write the plan as JSON; `-` is standard output, which then carries nothing else.
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

/// Reads `8388608`, `8M`, `64K` or `1G` as bytes.
fn parse_bytes(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 1 << 10),
        Some((at, 'm' | 'M')) => (&text[..at], 1 << 20),
        Some((at, 'g' | 'G')) => (&text[..at], 1 << 30),
        _ => (text, 1_u64),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
    bytes.filter(|&n| n > 0).ok_or_else(|| "a positive number of bytes, such as 65536 or 64K, is needed".to_owned())
}

/// Reads a finite fp32 number.
fn parse_alpha(text: &str) -> Result<f32, String> {
    text.parse::<f32>().ok().filter(|x| x.is_finite()).ok_or_else(|| "a finite fp32 number is needed".to_owned())
}

/// clap's several lines about a bad command line, as one sentence.
pub fn one_sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    let sentence = lines.join(" ");
    sentence.strip_prefix("error: ").unwrap_or(&sentence).to_owned()
}

/// The exact command, quoted so that a shell reads it back.
pub fn command_line(arguments: impl Iterator<Item = OsString>) -> String {
    let words = arguments.map(|word| {
        let word = word.to_string_lossy().into_owned();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
        if !word.is_empty() && word.chars().all(plain) { word } else { format!("'{}'", word.replace('\'', "'\\''")) }
    });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sentence(arguments: &[&str]) -> String {
        one_sentence(&Cli::try_parse_from(arguments).unwrap_err())
    }

    #[test]
    fn run_is_the_default_subcommand() {
        let implied = Cli::try_parse_from(["tide-bench", "--nodes", "3"]).unwrap();
        assert!(implied.command.is_none());
        assert_eq!(implied.run.nodes, Some(3));
        let named = Cli::try_parse_from(["tide-bench", "run", "--nodes", "3"]).unwrap();
        let Some(Command::Run(run)) = named.command else { panic!() };
        assert_eq!((run.nodes, run.gpus, run.iters), (Some(3), None, 1));
    }

    #[test]
    fn a_refusal_is_one_sentence_that_names_the_option() {
        assert_eq!(sentence(&["tide-bench", "--gpus", "9"]), "invalid value '9' for '--gpus <L>': 9 is not in 1..=8");
        assert!(sentence(&["tide-bench", "--nodes", "0"]).contains("--nodes"));
        assert!(sentence(&["tide-bench", "--alpha", "nan"]).contains("--alpha"));
        assert!(sentence(&["tide-bench", "--chunk", "0"]).contains("--chunk"));
        let both = sentence(&["tide-bench", "--preset", "x", "--group", "4"]);
        assert!(both.contains("--preset") && both.contains("--group"), "{both}");
        let unknown = sentence(&["tide-bench", "--collective", "ar"]);
        assert!(unknown.contains("--collective") && unknown.contains("possible values: ag, rs, all"), "{unknown}");
        assert!(!unknown.contains('\n'));
    }

    #[test]
    fn bytes_take_binary_suffixes() {
        assert_eq!(parse_bytes("65536"), Ok(65_536));
        assert_eq!(parse_bytes("64K"), Ok(65_536));
        assert_eq!(parse_bytes("3m"), Ok(3 << 20));
        for bad in ["", "K", "-1", "1.5M", "99999999999G"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_command_line_survives_a_shell() {
        let words = ["tide-bench", "--model", "a b's.safetensors", ""].map(OsString::from);
        assert_eq!(command_line(words.into_iter()), r"tide-bench --model 'a b'\''s.safetensors' ''");
    }

    #[test]
    fn the_definition_is_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }
}

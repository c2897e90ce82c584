//! One collective from the first call to its row: timed, checked, hashed and saved.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use safetensors::tensor::Dtype as FileDtype;
use tide_gpu::layout::{Group, GroupLayout};
use tide_gpu::plan::RankRange;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_128};

use crate::progress::Progress;
use crate::report::{Row, Times};
use crate::save::{Entry, RankFiles};
use crate::tensors::{Gradients, Tensors};
use crate::verify::{GatherCheck, ReduceCheck, Verdict};

/// A collective on a machine, with its inputs in place.
pub trait Leg {
    /// Puts every output into the state that a call starts from, then makes one call and waits for
    /// its end. The time is the call's alone.
    ///
    /// # Errors
    /// Those of the machine.
    fn call(&mut self) -> Result<Duration>;

    /// Replaces `out` by what `rank` holds of `parameter`: its padded fp32 shard after a
    /// reduce-scatter, all of it after an all-gather.
    ///
    /// # Errors
    /// Those of the machine.
    fn read(&mut self, rank: u64, parameter: usize, out: &mut Vec<u8>) -> Result<()>;

    /// The ranks whose outputs can be read here: those that this process drives.
    fn ranks(&self) -> RankRange;

    /// Gives every process what each of them brings, in the order of their ranks.
    ///
    /// # Errors
    /// A process is gone.
    fn all_gather(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// What can be told of it beside its results.
    fn facts(&self) -> Facts;
}

/// What a leg tells of itself.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    /// The machine.
    pub backend: &'static str,
    /// Who drove the network, or `stock`.
    pub path: &'static str,
    /// Whether its time is a GPU's.
    pub has_rates: bool,
    /// Bytes that each rank allocated, as the collective counts them.
    pub buffer_bytes: u64,
    /// The same for the baseline.
    pub stock_buffer_bytes: u64,
    /// Copy descriptors of a rank and call.
    pub descriptors: u64,
}

/// What a collective moves.
#[derive(Debug, Clone, Copy)]
pub enum Job<'a> {
    /// An all-gather of these tensors.
    Gather(&'a Tensors),
    /// A reduce-scatter of these gradients, times `alpha`, added to what was there or not.
    Reduce { gradients: &'a Gradients, alpha: f32, accumulate: bool },
}

impl Job<'_> {
    /// The collective's short name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Gather(_) => "ag",
            Self::Reduce { .. } => "rs",
        }
    }

    /// The group moved.
    pub fn group(&self) -> &Group {
        match self {
            Self::Gather(tensors) => &tensors.group,
            Self::Reduce { gradients, .. } => &gradients.group,
        }
    }

    /// The tensors of a rank's file.
    fn entries(&self, layout: &GroupLayout) -> Vec<Entry> {
        let parameters = self.group().parameters().iter().enumerate();
        parameters
            .map(|(index, parameter)| {
                let (name, mut shape) = (parameter.name().to_owned(), parameter.shape().to_vec());
                match self {
                    Self::Gather(tensors) => Entry { name, dtype: tensors.file_dtypes[index], shape },
                    Self::Reduce { .. } => {
                        shape[0] = layout.parameters()[index].shard_rows;
                        Entry { name, dtype: FileDtype::F32, shape }
                    }
                }
            })
            .collect()
    }

    /// The elements' type, or `mixed`.
    fn dtype(&self) -> String {
        let parameters = self.group().parameters();
        match parameters.first() {
            Some(first) if parameters.iter().all(|p| p.dtype() == first.dtype()) => first.dtype().to_string(),
            Some(_) => "mixed".to_owned(),
            None => "none".to_owned(),
        }
    }
}

/// How to run and what to keep.
#[derive(Debug, Clone, Copy)]
pub struct Settings<'a> {
    /// Nodes and GPUs of a node.
    pub shape: (u32, u32),
    /// Timed calls.
    pub iters: u32,
    /// Calls before them.
    pub warmup: u32,
    /// Whether to check.
    pub check: bool,
    /// Where to save.
    pub save: Option<&'a Path>,
}

enum Check<'a> {
    Gather(GatherCheck<'a>),
    Reduce(ReduceCheck<'a>),
}

impl Check<'_> {
    fn see(&mut self, rank: u64, parameter: usize, bytes: &[u8]) {
        match self {
            Self::Gather(check) => check.see(parameter, bytes),
            Self::Reduce(check) => {
                let values: Vec<f32> =
                    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
                check.see(rank, parameter, &values);
            }
        }
    }

    fn finish(self) -> Verdict {
        match self {
            Self::Gather(check) => check.finish(),
            Self::Reduce(check) => check.finish(),
        }
    }
}

/// Runs `leg` and looks at all that every rank ends with.
///
/// # Errors
/// Those of the leg, and files that cannot be written.
pub fn examine(leg: &mut dyn Leg, job: Job<'_>, settings: &Settings<'_>, progress: &Progress) -> Result<Row> {
    let (nodes, gpus) = settings.shape;
    let rank_count = u64::from(nodes) * u64::from(gpus);
    let layout = GroupLayout::new(job.group(), rank_count)?;

    let name = job.name();
    progress.start(format!("{name} calls"), u64::from(settings.warmup) + u64::from(settings.iters));
    let mut calls = Vec::new();
    for index in 0..u64::from(settings.warmup) + u64::from(settings.iters) {
        let time = leg.call()?;
        if index >= u64::from(settings.warmup) {
            calls.push(time);
        }
        progress.step();
    }
    let times = Times::of(&slowest(leg, &calls)?);

    let mut check = settings.check.then(|| match job {
        Job::Gather(tensors) => Check::Gather(GatherCheck::new(tensors)),
        Job::Reduce { gradients, alpha, accumulate } => {
            Check::Reduce(ReduceCheck::new(gradients, &layout, alpha, accumulate))
        }
    });
    let entries = job.entries(&layout);
    let files = settings.save.map(|dir| RankFiles::create(dir, name, leg.ranks(), &entries)).transpose()?;
    let parameter_count = entries.len();
    progress.start(format!("{name} outputs"), u64::from(leg.ranks().count()) * parameter_count as u64);
    let mut digests = Vec::new();
    let mut bytes = Vec::new();
    for rank in leg.ranks().iter().map(|r| u64::from(r.0)) {
        let mut digest = Xxh3Default::new();
        for index in 0..parameter_count {
            leg.read(rank, index, &mut bytes)?;
            digest.update(&bytes);
            if let Some(check) = &mut check {
                check.see(rank, index, &bytes);
            }
            if let Some(files) = &files {
                files.write(rank, index, &bytes)?;
            }
            progress.step();
        }
        digests.extend(digest.digest128().to_le_bytes());
    }
    files.map(RankFiles::keep).transpose()?;
    let digest = xxh3_128(&leg.all_gather("digests", &digests)?.concat());
    let verdict = check.map(Check::finish).map(|verdict| common(leg, verdict)).transpose()?;

    let facts = leg.facts();
    let parameters = job.group().parameters();
    let sizes = || layout.parameters().iter().zip(parameters).map(|(l, p)| (l.elems, p.dtype().bytes()));
    let group_bytes: u64 = sizes().map(|(elems, item)| elems * item).sum();
    let algbw_gbps = facts.has_rates.then(|| group_bytes as f64 / (times.median * 1e3));
    Ok(Row {
        collective: name,
        backend: facts.backend,
        path: facts.path,
        nodes,
        gpus,
        params: parameter_count as u64,
        group_bytes,
        out_bytes: match job {
            Job::Gather(_) => layout.landing_bytes(),
            Job::Reduce { .. } => layout.packed_elems() * 4,
        },
        time_us: times,
        algbw_gbps,
        busbw_gbps: algbw_gbps.map(|rate| rate * (rank_count - 1) as f64 / rank_count as f64),
        wrong: verdict.map(|v| v.wrong),
        max_abs_err: verdict.map(|v| v.max_abs_err),
        err_bound: verdict.map(|v| v.err_bound),
        buffer_bytes: facts.buffer_bytes,
        stock_buffer_bytes: facts.stock_buffer_bytes,
        descriptors: facts.descriptors,
        digest: format!("{digest:032x}"),
        count: sizes().map(|(elems, _)| elems).sum(),
        dtype: job.dtype(),
    })
}

/// Of every call, the time of the process that took longest.
fn slowest(leg: &dyn Leg, calls: &[Duration]) -> Result<Vec<Duration>> {
    let mine: Vec<u8> = calls.iter().flat_map(|c| (c.as_nanos() as u64).to_le_bytes()).collect();
    let all = leg.all_gather("times", &mine)?;
    let time = |call: usize| all.iter().filter_map(|times| word(times, call)).max().unwrap_or(0);
    Ok((0..calls.len()).map(|call| Duration::from_nanos(time(call))).collect())
}

/// The verdict on what all processes have seen.
fn common(leg: &dyn Leg, mine: Verdict) -> Result<Verdict> {
    let words = [mine.wrong, mine.max_abs_err.to_bits(), mine.err_bound.to_bits()];
    let all = leg.all_gather("verdicts", &words.map(u64::to_le_bytes).concat())?;
    let each = |index: usize| all.iter().filter_map(move |verdict| word(verdict, index));
    Ok(Verdict {
        wrong: each(0).sum(),
        max_abs_err: each(1).map(f64::from_bits).fold(0.0, f64::max),
        // Each knows a part of the largest reference: the strictest bound is that of the least.
        err_bound: each(2).map(f64::from_bits).fold(f64::INFINITY, f64::min),
    })
}

/// The `index`-th 64-bit word of what a process has sent.
fn word(bytes: &[u8], index: usize) -> Option<u64> {
    bytes.chunks_exact(8).nth(index).map(|w| u64::from_le_bytes(w.try_into().expect("eight bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tide_gpu::plan::Rank;

    use crate::cli::{Collective, SourceArgs};
    use crate::model_file::ModelFile;
    use crate::tensors::Workload;
    use crate::testing::Scratch;

    /// A machine that gathers on the spot, and can be told to spoil a byte.
    struct Copying<'a> {
        tensors: &'a Tensors,
        layout: GroupLayout,
        spoil: bool,
        calls: u32,
    }

    impl Leg for Copying<'_> {
        fn call(&mut self) -> Result<Duration> {
            self.calls += 1;
            Ok(Duration::from_micros(u64::from(self.calls)))
        }

        fn read(&mut self, rank: u64, parameter: usize, out: &mut Vec<u8>) -> Result<()> {
            self.tensors.read(parameter, 0, self.layout.parameters()[parameter].elems, out);
            if self.spoil && rank == 3 && parameter == 1 {
                out[0] ^= 1;
            }
            Ok(())
        }

        fn ranks(&self) -> RankRange {
            RankRange::new(Rank(0), 4)
        }

        fn all_gather(&self, _label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
            Ok(vec![bytes.to_vec()])
        }

        fn facts(&self) -> Facts {
            Facts {
                backend: "test",
                path: "device",
                has_rates: true,
                buffer_bytes: 1,
                stock_buffer_bytes: 2,
                descriptors: 3,
            }
        }
    }

    fn row(spoil: bool, save: Option<&Path>) -> (Row, u32) {
        let group = Some("5x3,7".to_owned());
        let source = SourceArgs { preset: None, model: None, grads: None, group, grad_dtype: None, seed: 1 };
        let workload = Workload::open(&source, Collective::Ag, 4).unwrap();
        let tensors = workload.gather.as_ref().unwrap();
        let layout = GroupLayout::new(&tensors.group, 4).unwrap();
        let mut leg = Copying { tensors, layout, spoil, calls: 0 };
        let settings = Settings { shape: (2, 2), iters: 3, warmup: 2, check: true, save };
        let row = examine(&mut leg, Job::Gather(tensors), &settings, &Progress::new()).unwrap();
        (row, leg.calls)
    }

    #[test]
    fn warm_up_calls_are_made_and_not_timed() {
        let (row, calls) = row(false, None);
        assert_eq!(calls, 5);
        assert!((row.time_us.min - 3.0).abs() < 1e-9 && (row.time_us.max - 5.0).abs() < 1e-9);
        assert_eq!((row.wrong, row.group_bytes, row.count, row.out_bytes), (Some(0), 44, 22, 64));
        assert_eq!((row.dtype.as_str(), row.digest.len()), ("bf16", 32));
        assert!((row.algbw_gbps.unwrap() - 44.0 / 4000.0).abs() < 1e-9);
    }

    #[test]
    fn one_spoilt_byte_is_counted_and_changes_the_digest() {
        let (good, bad) = (row(false, None).0, row(true, None).0);
        assert_eq!(bad.wrong, Some(1));
        assert_ne!(good.digest, bad.digest);
    }

    #[test]
    fn what_is_saved_is_what_was_read() {
        let dir = Scratch::new();
        row(false, Some(dir.dir()));
        let file = ModelFile::open(&dir.path("ag-rank3.safetensors")).unwrap();
        assert_eq!(file.tensors().len(), 2);
        assert_eq!(file.tensors()[0].shape, [5, 3]);
    }
}

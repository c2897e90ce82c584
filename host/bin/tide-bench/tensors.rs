//! What a run moves: the parameters to gather and the gradients to reduce, wherever they come from.

use std::sync::Arc;

use anyhow::{Context, Result};
use safetensors::tensor::Dtype as FileDtype;
use tide_gpu::layout::{Dtype, Group, GroupLayout, Parameter};

use crate::cli::{Collective, GradDtype, SourceArgs};
use crate::failure::usage;
use crate::generate::Stream;
use crate::gradient::{converts_to_f32, read_as_f32};
use crate::model_file::ModelFile;
use crate::{grads, presets};

/// The preset of a run that names no tensors.
const DEFAULT_PRESET: &str = "gpt2-small";

/// Everything that a run moves.
#[derive(Debug)]
pub struct Workload {
    /// The group in a few words, for the header.
    pub title: String,
    /// What the all-gather moves, where it runs.
    pub gather: Option<Tensors>,
    /// What the reduce-scatter moves, where it runs.
    pub reduce: Option<Gradients>,
    /// Sentences about what was left out or converted.
    pub notes: Vec<String>,
}

impl Workload {
    /// Opens what the options name, for `rank_count` ranks; checks all of it, reads headers only.
    ///
    /// # Errors
    /// One sentence that names the option, the file or the tensor.
    pub fn open(source: &SourceArgs, collective: Collective, rank_count: u64) -> Result<Self> {
        let workload = if let Some(path) = &source.model {
            Self::of_model(ModelFile::open(path)?, source, collective, rank_count)?
        } else if let Some(dir) = &source.grads {
            grads::workload(dir, source.grad_dtype, collective, rank_count)?
        } else {
            Self::generated(source, collective, rank_count)?
        };
        workload.groups().try_for_each(|group| GroupLayout::new(group, rank_count).map(|_| ()))?;
        Ok(workload)
    }

    /// The groups that are moved.
    pub fn groups(&self) -> impl Iterator<Item = &Group> {
        let gathered = self.gather.as_ref().map(|tensors| &tensors.group);
        gathered.into_iter().chain(self.reduce.as_ref().map(|gradients| &gradients.group))
    }

    fn generated(source: &SourceArgs, collective: Collective, rank_count: u64) -> Result<Self> {
        let (title, shapes) = match &source.group {
            Some(text) => (format!("--group {text}"), parse_group(text)?),
            None => {
                let name = source.preset.as_deref().unwrap_or(DEFAULT_PRESET);
                let shapes = presets::find(name)
                    .ok_or_else(|| usage(format!("--preset: there is no `{name}`; there are {}", presets::names())))?;
                (format!("preset {name}"), shapes)
            }
        };
        let group = |dtype: Dtype| -> Result<Group> {
            let parameters = shapes.iter().map(|(name, shape)| Parameter::new(name.clone(), shape.clone(), dtype));
            Ok(Group::new(parameters.collect::<Result<_, _>>()?)?)
        };
        let seed = source.seed;
        let gather = collective.gathers().then(|| group(Dtype::Bf16)).transpose()?;
        let gather = gather.map(|group| Tensors {
            file_dtypes: vec![FileDtype::BF16; group.parameters().len()],
            group,
            source: TensorSource::Generated { seed },
        });
        let dtype = source.grad_dtype.unwrap_or(GradDtype::Bf16);
        let reduce = collective.reduces().then(|| group(dtype.dtype())).transpose()?;
        let reduce =
            reduce.map(|group| Gradients { group, dtype, rank_count, source: GradientSource::Generated { seed } });
        Ok(Self { title, gather, reduce, notes: Vec::new() })
    }

    fn of_model(file: ModelFile, source: &SourceArgs, collective: Collective, rank_count: u64) -> Result<Self> {
        let file = Arc::new(file);
        let title = format!("model {}", file.path().display());
        let gather = collective.gathers().then(|| Tensors::of_file(Arc::clone(&file))).transpose()?;
        let mut notes = Vec::new();
        let mut reduce = None;
        if collective.reduces() {
            let (taken, left): (Vec<usize>, Vec<usize>) =
                (0..file.tensors().len()).partition(|&i| converts_to_f32(file.tensors()[i].file_dtype));
            if taken.is_empty() {
                let path = file.path().display();
                return Err(usage(format!("{path}: holds no f32, f16 or bf16 tensor to reduce")));
            }
            notes.extend(left_out(&file, &left));
            let dtype = source.grad_dtype.unwrap_or(GradDtype::Bf16);
            let parameters = taken.iter().map(|&i| file.parameter(i, dtype.dtype())).collect::<Result<Vec<_>>>()?;
            let group = Group::new(parameters).with_context(|| file.path().display().to_string())?;
            notes.push(format!(
                "reduce-scatter: rank u's gradient is {} (x * scale(u)), scale(u) = 1 + ((u*(u+1)/2) mod 64)/64",
                dtype.dtype()
            ));
            let source = GradientSource::Scaled { file, indices: taken };
            reduce = Some(Gradients { group, dtype, rank_count, source });
        }
        Ok(Self { title, gather, reduce, notes })
    }
}

/// One line about the tensors that are no gradients.
fn left_out(file: &ModelFile, indices: &[usize]) -> Option<String> {
    const NAMED_MAX: usize = 3;
    let named = indices.iter().take(NAMED_MAX).map(|&i| {
        let tensor = &file.tensors()[i];
        format!("`{}` ({})", tensor.name, tensor.dtype)
    });
    let named = named.collect::<Vec<_>>().join(", ");
    let more = indices.len().saturating_sub(NAMED_MAX);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    (!indices.is_empty()).then(|| format!("reduce-scatter: left out, for not being f32, f16 or bf16: {named}{more}"))
}

/// Reads `4096x4096,4096,14336x4096`.
fn parse_group(text: &str) -> Result<Vec<presets::Shape>> {
    let shape_of = |(index, item): (usize, &str)| {
        let dims: Option<Vec<u64>> = item.trim().split('x').map(|dim| dim.parse().ok()).collect();
        let dims = dims.ok_or_else(|| usage(format!("--group: `{item}` is not a shape such as 4096x4096")))?;
        Ok((format!("p{index}"), dims))
    };
    text.split(',').enumerate().map(shape_of).collect()
}

/// The parameters that an all-gather moves.
#[derive(Debug)]
pub struct Tensors {
    /// The group.
    pub group: Group,
    /// The types that a file gives the parameters.
    pub file_dtypes: Vec<FileDtype>,
    source: TensorSource,
}

#[derive(Debug)]
enum TensorSource {
    Generated { seed: u64 },
    File(Arc<ModelFile>),
}

impl Tensors {
    /// All tensors of a file.
    ///
    /// # Errors
    /// A scalar cannot be sharded.
    pub fn of_file(file: Arc<ModelFile>) -> Result<Self> {
        let tensors = file.tensors();
        let parameters = (0..tensors.len()).map(|i| file.parameter(i, tensors[i].dtype)).collect::<Result<Vec<_>>>()?;
        let group = Group::new(parameters).with_context(|| file.path().display().to_string())?;
        let file_dtypes = tensors.iter().map(|t| t.file_dtype).collect();
        Ok(Self { group, file_dtypes, source: TensorSource::File(file) })
    }

    /// Replaces `out` by elements `first..first + count` of `parameter`, as bytes.
    pub fn read(&self, parameter: usize, first: u64, count: u64, out: &mut Vec<u8>) {
        out.clear();
        match &self.source {
            TensorSource::Generated { seed } => {
                let stream = Stream::tensor(*seed, parameter);
                let mut values = vec![0.0; count as usize];
                stream.fill(first, &mut values);
                GradDtype::Bf16.encode(&values, out);
            }
            TensorSource::File(file) => {
                let item = self.group.parameters()[parameter].dtype().bytes();
                let (start, end) = ((first * item) as usize, ((first + count) * item) as usize);
                out.extend_from_slice(&file.data(parameter)[start..end]);
            }
        }
    }
}

/// The gradients that a reduce-scatter reduces, on every rank.
#[derive(Debug)]
pub struct Gradients {
    /// The group, in the gradients' type.
    pub group: Group,
    /// The type gradients are read in.
    pub dtype: GradDtype,
    /// `N`, the ranks that hold one gradient each of every parameter.
    pub rank_count: u64,
    /// Where they come from.
    pub source: GradientSource,
}

/// Where gradients come from.
#[derive(Debug)]
pub enum GradientSource {
    /// From a hash of where they stand.
    Generated { seed: u64 },
    /// From a model's tensors, scaled by the rank.
    Scaled { file: Arc<ModelFile>, indices: Vec<usize> },
    /// From a file of each rank; `indices[rank][parameter]` is the tensor's place in it.
    Files { files: Vec<Arc<ModelFile>>, indices: Vec<Vec<usize>> },
}

impl Gradients {
    /// Elements `first..first + out.len()` of `parameter`'s gradient on `rank`, exactly as that rank
    /// holds them.
    pub fn read(&self, rank: u64, parameter: usize, first: u64, out: &mut [f32]) {
        match &self.source {
            GradientSource::Generated { seed } => Stream::gradient(*seed, rank, parameter).fill(first, out),
            GradientSource::Scaled { file, indices } => {
                let tensor = indices[parameter];
                read_as_f32(file.tensors()[tensor].file_dtype, file.data(tensor), first, out);
                let scale = scale(rank);
                out.iter_mut().for_each(|x| *x *= scale);
            }
            GradientSource::Files { files, indices } => {
                let (file, tensor) = (&files[rank as usize], indices[rank as usize][parameter]);
                read_as_f32(file.tensors()[tensor].file_dtype, file.data(tensor), first, out);
            }
        }
        self.dtype.round(out);
    }
}

/// The factor of a model's tensors on `rank`, in `1..2`. Triangular numbers take all 64 values modulo
/// 64, and sums of equally many scales rarely agree, so a rank counted in another's place shows.
fn scale(rank: u64) -> f32 {
    let step = (rank % 128) * (rank % 128 + 1) / 2 % 64;
    1.0 + step as f32 / 64.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Scratch, safetensors_bytes, safetensors_with};

    fn args() -> SourceArgs {
        SourceArgs { preset: None, model: None, grads: None, group: None, grad_dtype: None, seed: 1 }
    }

    fn open(source: &SourceArgs) -> Result<Workload> {
        Workload::open(source, Collective::All, 8)
    }

    #[test]
    fn a_group_is_read_from_its_shapes() {
        let source = SourceArgs { group: Some("4x3,7,0x5".into()), grad_dtype: Some(GradDtype::F32), ..args() };
        let workload = open(&source).unwrap();
        let (gather, reduce) = (workload.gather.unwrap().group, workload.reduce.unwrap().group);
        let shapes: Vec<&[u64]> = reduce.parameters().iter().map(Parameter::shape).collect();
        assert_eq!(shapes, [&[4, 3][..], &[7], &[0, 5]]);
        assert_eq!(reduce.parameters()[2].name(), "p2");
        assert_eq!((gather.parameters()[0].dtype(), reduce.parameters()[0].dtype()), (Dtype::Bf16, Dtype::F32));
    }

    #[test]
    fn bad_groups_and_presets_are_refused_by_their_option() {
        for bad in ["", "4x", "4,,5", "-3", "4*4"] {
            let error = open(&SourceArgs { group: Some(bad.into()), ..args() }).unwrap_err().to_string();
            assert!(error.starts_with("--group: "), "{bad}: {error}");
        }
        let error = open(&SourceArgs { preset: Some("gpt9".into()), ..args() }).unwrap_err().to_string();
        assert!(error.contains("no `gpt9`") && error.contains("llama-3.1-8b"), "{error}");
        let error = open(&SourceArgs { group: Some("99999999999x99999999999".into()), ..args() }).unwrap_err();
        assert!(error.to_string().contains("more bytes than 64 bits"), "{error}");
    }

    #[test]
    fn a_models_floats_are_gradients_and_its_integers_are_left_out() {
        let dir = Scratch::new();
        let ones: Vec<u8> = [1.0_f32; 4].iter().flat_map(|x| x.to_le_bytes()).collect();
        let ids: Vec<u8> = vec![9; 16];
        let bytes = safetensors_with(&[("w", "F32", &[2, 2], ones), ("ids", "I64", &[2], ids)]);
        let source = SourceArgs { model: Some(dir.file("m.safetensors", &bytes)), ..args() };
        let workload = open(&source).unwrap();
        let gather = workload.gather.unwrap();
        assert_eq!(gather.group.parameters().len(), 2);
        let mut bytes = Vec::new();
        gather.read(1, 1, 1, &mut bytes);
        assert_eq!(bytes, [9; 8]);
        let reduce = workload.reduce.unwrap();
        assert_eq!(reduce.group.parameters().len(), 1);
        let mut value = [0.0];
        reduce.read(3, 0, 2, &mut value);
        assert_eq!(value, [1.0 + 6.0 / 64.0]);
        assert!(workload.notes[0].contains("`ids` (i64)"), "{:?}", workload.notes);
    }

    #[test]
    fn a_model_without_floats_has_nothing_to_reduce() {
        let dir = Scratch::new();
        let file = dir.file("m.safetensors", &safetensors_bytes(&[("ids", "I64", &[2], 16)]));
        let source = SourceArgs { model: Some(file), ..args() };
        let error = open(&source).unwrap_err().to_string();
        assert!(error.contains("m.safetensors: holds no f32"), "{error}");
        assert!(Workload::open(&source, Collective::Ag, 8).is_ok());
    }

    #[test]
    fn a_scalar_stops_the_gather_and_not_the_reduction_of_the_rest() {
        let dir = Scratch::new();
        let bytes = safetensors_bytes(&[("w", "F32", &[2], 8), ("steps", "I64", &[], 8)]);
        let source = SourceArgs { model: Some(dir.file("m.safetensors", &bytes)), ..args() };
        let error = open(&source).unwrap_err().to_string();
        assert!(error.contains("0-dim parameter `steps`"), "{error}");
        assert!(Workload::open(&source, Collective::Rs, 8).is_ok());
    }

    #[test]
    fn scales_differ_among_64_ranks_and_stay_below_two() {
        let mut scales: Vec<u32> = (0..64).map(|u| scale(u).to_bits()).collect();
        scales.sort_unstable();
        scales.dedup();
        assert_eq!(scales.len(), 64);
        assert!((0..1000).all(|u| (1.0..2.0).contains(&scale(u))));
        let plain = |u: u64| 1.0 + ((u * (u + 1) / 2) % 64) as f32 / 64.0;
        assert!((0..1000).all(|u| scale(u) == plain(u)));
    }
}

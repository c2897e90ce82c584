//! A directory of gradients: one safetensors file of every rank.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use safetensors::tensor::Dtype as FileDtype;
use tide_gpu::layout::Group;

use crate::cli::{Collective, GradDtype};
use crate::failure::usage;
use crate::gradient::converts_to_f32;
use crate::model_file::{ModelFile, Tensor, io_reason};
use crate::tensors::{GradientSource, Gradients, Tensors, Workload};

/// The gradients in `dir`, for `rank_count` ranks.
///
/// # Errors
/// One sentence that names the file and the tensor: a rank's file is missing, one too many is there,
/// a tensor differs between ranks, or its type is no gradient's.
pub fn workload(dir: &Path, asked: Option<GradDtype>, collective: Collective, rank_count: u64) -> Result<Workload> {
    refuse_extra_files(dir, rank_count)?;
    let files = (0..rank_count)
        .map(|rank| ModelFile::open(&dir.join(file_name(rank))).map(Arc::new))
        .collect::<Result<Vec<_>>>()?;
    let first = Arc::clone(&files[0]);
    if let Some(tensor) = first.tensors().iter().find(|t| !converts_to_f32(t.file_dtype)) {
        let path = first.path().display();
        return Err(usage(format!(
            "{path}: tensor `{}` is {}; gradients are f32, f16 or bf16",
            tensor.name, tensor.dtype
        )));
    }
    if first.tensors().is_empty() {
        return Err(usage(format!("{}: holds no tensor", first.path().display())));
    }
    let indices = files.iter().map(|file| places(&first, file)).collect::<Result<Vec<_>>>()?;

    let mut notes = Vec::new();
    let all_bf16 = first.tensors().iter().all(|t| t.file_dtype == FileDtype::BF16);
    let dtype = asked.unwrap_or(if all_bf16 { GradDtype::Bf16 } else { GradDtype::F32 });
    if collective.reduces() {
        if dtype == GradDtype::Bf16 && !all_bf16 {
            notes.push("reduce-scatter: gradients are rounded to bf16, as --grad-dtype says".to_owned());
        } else if dtype == GradDtype::F32 && first.tensors().iter().any(|t| t.file_dtype != FileDtype::F32) {
            notes.push("reduce-scatter: f16 and bf16 gradients are converted to f32, exactly".to_owned());
        }
    }
    let gather = collective.gathers().then(|| Tensors::of_file(Arc::clone(&first))).transpose()?;
    if gather.is_some() {
        notes.push("all-gather: moves the tensors of rank0.safetensors".to_owned());
    }
    let parameters =
        (0..first.tensors().len()).map(|i| first.parameter(i, dtype.dtype())).collect::<Result<Vec<_>>>()?;
    let group = Group::new(parameters).with_context(|| first.path().display().to_string())?;
    let reduce = collective.reduces().then(|| Gradients {
        group,
        dtype,
        rank_count,
        source: GradientSource::Files { files, indices },
    });
    Ok(Workload { title: format!("gradients {}", dir.display()), gather, reduce, notes })
}

fn file_name(rank: u64) -> String {
    format!("rank{rank}.safetensors")
}

/// Refuses gradients of ranks that the run does not have: leaving them out would be a silent lie.
fn refuse_extra_files(dir: &Path, rank_count: u64) -> Result<()> {
    let fail = |e: std::io::Error| usage(format!("--grads {}: {}", dir.display(), io_reason(&e)));
    for entry in std::fs::read_dir(dir).map_err(fail)? {
        let name = entry.map_err(fail)?.file_name().to_string_lossy().into_owned();
        let Some(number) = name.strip_prefix("rank").and_then(|n| n.strip_suffix(".safetensors")) else { continue };
        let known = number.parse::<u64>().is_ok_and(|rank| rank < rank_count && file_name(rank) == name);
        if !known {
            let path = dir.join(&name);
            let last = file_name(rank_count - 1);
            return Err(usage(format!("{}: one file too many: the run's ranks end with {last}", path.display())));
        }
    }
    Ok(())
}

/// For every tensor of rank 0's file, its place in `file`.
fn places(first: &ModelFile, file: &ModelFile) -> Result<Vec<usize>> {
    let path = file.path().display();
    let by_name: HashMap<&str, usize> = file.tensors().iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect();
    let place = |tensor: &Tensor| {
        let index = *by_name
            .get(tensor.name.as_str())
            .ok_or_else(|| usage(format!("{path}: tensor `{}` of rank0.safetensors is missing", tensor.name)))?;
        let found = &file.tensors()[index];
        if !found.agrees_with(tensor) {
            return Err(usage(format!(
                "{path}: tensor `{}` is {} {:?}, but {} {:?} in rank0.safetensors",
                found.name, found.dtype, found.shape, tensor.dtype, tensor.shape
            )));
        }
        Ok(index)
    };
    let indices = first.tensors().iter().map(place).collect::<Result<Vec<_>>>()?;
    let known: std::collections::HashSet<&str> = first.tensors().iter().map(|t| t.name.as_str()).collect();
    if let Some(extra) = file.tensors().iter().find(|t| !known.contains(t.name.as_str())) {
        return Err(usage(format!("{path}: tensor `{}` is not in rank0.safetensors", extra.name)));
    }
    Ok(indices)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Scratch, safetensors_bytes};

    type Spec<'a> = [(&'a str, &'a str, &'a [u64], usize)];

    fn scratch(ranks: &[&Spec<'_>]) -> Scratch {
        let dir = Scratch::new();
        for (rank, tensors) in ranks.iter().enumerate() {
            dir.file(&format!("rank{rank}.safetensors"), &safetensors_bytes(tensors));
        }
        dir
    }

    fn refusal(ranks: &[&Spec<'_>], rank_count: u64) -> String {
        workload(scratch(ranks).dir(), None, Collective::All, rank_count).unwrap_err().to_string()
    }

    const PLAIN: &Spec<'static> = &[("a", "F32", &[2], 8), ("b", "BF16", &[3], 6)];

    #[test]
    fn ranks_may_store_the_same_tensors_in_another_order() {
        let turned: &Spec<'_> = &[("b", "BF16", &[3], 6), ("a", "F32", &[2], 8)];
        let dir = scratch(&[PLAIN, turned]);
        let reduce = workload(dir.dir(), None, Collective::Rs, 2).unwrap().reduce.unwrap();
        assert_eq!(reduce.group.parameters()[0].name(), "a");
        let GradientSource::Files { indices, .. } = &reduce.source else { panic!() };
        assert_eq!(indices, &[vec![0, 1], vec![1, 0]]);
    }

    #[test]
    fn only_bf16_files_take_the_bf16_path_unless_told() {
        let narrow: &Spec<'_> = &[("a", "BF16", &[2], 4)];
        let dtype = |ranks: &[&Spec<'_>], asked| {
            workload(scratch(ranks).dir(), asked, Collective::Rs, 1).unwrap().reduce.unwrap().dtype
        };
        assert_eq!(dtype(&[narrow], None), GradDtype::Bf16);
        assert_eq!(dtype(&[PLAIN], None), GradDtype::F32);
        assert_eq!(dtype(&[PLAIN], Some(GradDtype::Bf16)), GradDtype::Bf16);
    }

    #[test]
    fn missing_and_surplus_files_are_named() {
        let error = refusal(&[PLAIN, PLAIN], 3);
        assert!(error.contains("rank2.safetensors: no such file"), "{error}");
        let error = refusal(&[PLAIN, PLAIN, PLAIN], 2);
        assert!(error.contains("rank2.safetensors: one file too many"), "{error}");
        let error = workload(Path::new("/nowhere/at/all"), None, Collective::All, 2).unwrap_err().to_string();
        assert!(error.starts_with("--grads /nowhere/at/all: no such"), "{error}");
    }

    #[test]
    fn tensors_that_differ_between_ranks_are_named() {
        let error = refusal(&[PLAIN, &[("a", "F32", &[2], 8)]], 2);
        assert!(error.contains("rank1.safetensors: tensor `b` of rank0.safetensors is missing"), "{error}");
        let error = refusal(&[&[("a", "F32", &[2], 8)], PLAIN], 2);
        assert!(error.contains("rank1.safetensors: tensor `b` is not in rank0.safetensors"), "{error}");
        let error = refusal(&[PLAIN, &[("a", "F32", &[2, 1], 8), ("b", "BF16", &[3], 6)]], 2);
        assert!(error.contains("tensor `a` is f32 [2, 1], but f32 [2] in"), "{error}");
        let error = refusal(&[PLAIN, &[("a", "F32", &[2], 8), ("b", "F16", &[3], 6)]], 2);
        assert!(error.contains("tensor `b` is f16 [3], but bf16 [3] in"), "{error}");
    }

    #[test]
    fn types_that_are_no_gradients_are_refused_by_tensor() {
        let error = refusal(&[&[("a", "F64", &[2], 16)]], 1);
        assert!(error.contains("rank0.safetensors: tensor `a` is f64; gradients are"), "{error}");
        let error = refusal(&[&[("ids", "I32", &[2], 8)]], 1);
        assert!(error.contains("tensor `ids` is i32"), "{error}");
    }
}

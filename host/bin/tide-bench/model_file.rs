//! A safetensors file, mapped: its tensors in the order of their data.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use memmap2::Mmap;
use safetensors::tensor::{Dtype as FileDtype, SafeTensorError, SafeTensors};
use tide_gpu::layout::{Dtype, Parameter};

use crate::failure::{Failure, usage};

/// One tensor of a file.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Its shape; empty for a scalar.
    pub shape: Vec<u64>,
    /// The type that the file gives it.
    pub file_dtype: FileDtype,
    /// How that type is moved.
    pub dtype: Dtype,
    /// Where its data lies in the file.
    bytes: Range<usize>,
}

impl Tensor {
    /// Whether two tensors have the same name, shape and type.
    pub fn agrees_with(&self, other: &Self) -> bool {
        self.name == other.name && self.shape == other.shape && self.file_dtype == other.file_dtype
    }
}

/// An open safetensors file.
#[derive(Debug)]
pub struct ModelFile {
    path: PathBuf,
    map: Mmap,
    tensors: Vec<Tensor>,
}

impl ModelFile {
    /// Opens `path` and reads its header.
    ///
    /// # Errors
    /// One sentence that names the file: it is missing, truncated, not a safetensors file, or holds
    /// a tensor whose elements are not whole bytes.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display();
        let file = File::open(path).map_err(|e| usage(format!("{name}: {}", io_reason(&e))))?;
        let metadata = file.metadata().map_err(|e| usage(format!("{name}: {}", io_reason(&e))))?;
        if !metadata.is_file() {
            return Err(usage(format!("{name}: not a file")));
        }
        if metadata.len() == 0 {
            return Err(usage(format!("{name}: the file is empty")));
        }
        // SAFETY: the mapping is read-only and private to this process, and it is only read through
        // slices bounded by its length. A file that another program shortens while it is mapped ends
        // this process by a signal; no Rust rule rests on its content.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| usage(format!("{name}: {}", io_reason(&e))))?;
        let tensors = read_header(&map).map_err(|reason| usage(format!("{name}: {reason}")))?;
        Ok(Self { path: path.to_owned(), map, tensors })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors, in the order of their data.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The data of tensor `index`, little-endian.
    pub fn data(&self, index: usize) -> &[u8] {
        &self.map[self.tensors[index].bytes.clone()]
    }

    /// Tensor `index` as a parameter of element type `dtype`.
    ///
    /// # Errors
    /// A scalar has no dimension to shard: as the library, so the command refuses it, rather than to give back another shape.
    pub fn parameter(&self, index: usize, dtype: Dtype) -> Result<Parameter> {
        let tensor = &self.tensors[index];
        Parameter::new(tensor.name.clone(), tensor.shape.clone(), dtype)
            .map_err(|e| anyhow!(Failure::Usage(format!("{}: {e}", self.path.display()))))
    }
}

fn read_header(map: &[u8]) -> Result<Vec<Tensor>, String> {
    let (header_bytes, metadata) = SafeTensors::read_metadata(map).map_err(|e| reason(&e))?;
    let data_start = 8 + header_bytes;
    let mut tensors = Vec::new();
    for (name, info) in metadata.tensors() {
        let dtype = moved_as(info.dtype)
            .ok_or_else(|| format!("tensor `{name}` has type {}, whose elements are not whole bytes", info.dtype))?;
        let (start, end) = info.data_offsets;
        tensors.push(Tensor {
            name,
            shape: info.shape.iter().map(|&d| d as u64).collect(),
            file_dtype: info.dtype,
            dtype,
            bytes: data_start + start..data_start + end,
        });
    }
    // Tensors without elements share an offset; their names then decide.
    tensors.sort_by(|a, b| (a.bytes.start, a.bytes.end, &a.name).cmp(&(b.bytes.start, b.bytes.end, &b.name)));
    Ok(tensors)
}

/// How elements of a file's type are moved; a type the library does not know goes as the unsigned
/// integer of its size.
fn moved_as(dtype: FileDtype) -> Option<Dtype> {
    Some(match dtype {
        FileDtype::BOOL => Dtype::Bool,
        FileDtype::U8 => Dtype::U8,
        FileDtype::I8 => Dtype::I8,
        FileDtype::F8_E4M3 => Dtype::F8E4M3,
        FileDtype::F8_E5M2 => Dtype::F8E5M2,
        FileDtype::U16 => Dtype::U16,
        FileDtype::I16 => Dtype::I16,
        FileDtype::F16 => Dtype::F16,
        FileDtype::BF16 => Dtype::Bf16,
        FileDtype::U32 => Dtype::U32,
        FileDtype::I32 => Dtype::I32,
        FileDtype::F32 => Dtype::F32,
        FileDtype::U64 => Dtype::U64,
        FileDtype::I64 => Dtype::I64,
        FileDtype::F64 => Dtype::F64,
        other => match other.bitsize() {
            8 => Dtype::U8,
            16 => Dtype::U16,
            32 => Dtype::U32,
            64 => Dtype::U64,
            _ => return None,
        },
    })
}

/// What is wrong with a file, for a reader who does not know the format's inside.
fn reason(error: &SafeTensorError) -> String {
    match error {
        SafeTensorError::MetadataIncompleteBuffer => {
            "truncated or damaged: the data is not as long as the header says".to_owned()
        }
        SafeTensorError::HeaderTooSmall | SafeTensorError::InvalidHeaderLength | SafeTensorError::HeaderTooLarge => {
            format!("truncated, or not a safetensors file ({error})")
        }
        _ => format!("not a valid safetensors file ({error})").replace('\n', " "),
    }
}

/// The operating system's reason, without its number.
pub fn io_reason(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Scratch, safetensors_bytes};

    #[test]
    fn tensors_stand_in_the_order_of_their_data() {
        let dir = Scratch::new();
        let file = dir.file("m.safetensors", &safetensors_bytes(&[("z", "F32", &[2], 8), ("a", "I64", &[1], 8)]));
        let model = ModelFile::open(&file).unwrap();
        let names: Vec<&str> = model.tensors().iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["z", "a"]);
        assert_eq!(model.data(0).len(), 8);
    }

    #[test]
    fn a_truncated_file_is_refused_by_name() {
        let dir = Scratch::new();
        let whole = safetensors_bytes(&[("a", "F32", &[4], 16)]);
        for kept in [0, 4, 20, whole.len() - 1] {
            let file = dir.file("cut.safetensors", &whole[..kept]);
            let error = ModelFile::open(&file).unwrap_err().to_string();
            assert!(error.contains("cut.safetensors: "), "{error}");
            assert!(error.contains("truncated") || error.contains("empty"), "{kept}: {error}");
        }
    }

    #[test]
    fn a_missing_file_a_folder_and_nonsense_are_refused_by_name() {
        let dir = Scratch::new();
        let missing = ModelFile::open(&dir.path("none")).unwrap_err().to_string();
        assert!(missing.ends_with("none: no such file or directory"), "{missing}");
        assert!(ModelFile::open(&dir.path("")).unwrap_err().to_string().contains("not a file"));
        let text = dir.file("text", b"these are not tensors at all, nor will they ever be");
        assert!(ModelFile::open(&text).unwrap_err().to_string().contains("safetensors"));
    }

    #[test]
    fn a_scalar_has_no_parameter() {
        let dir = Scratch::new();
        let file = dir.file("m.safetensors", &safetensors_bytes(&[("steps", "I64", &[], 8)]));
        let error = ModelFile::open(&file).unwrap().parameter(0, Dtype::I64).unwrap_err().to_string();
        assert!(error.ends_with("0-dim parameter `steps`: reshape to [1]"), "{error}");
    }

    #[test]
    fn types_beyond_the_librarys_are_moved_by_size() {
        assert_eq!(moved_as(FileDtype::F8_E8M0), Some(Dtype::U8));
        assert_eq!(moved_as(FileDtype::C64), Some(Dtype::U64));
        assert_eq!(moved_as(FileDtype::F4), None);
    }
}

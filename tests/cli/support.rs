//! What the tests of the command line share: files made byte by byte, and the built binary.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use half::bf16;
use safetensors::SafeTensors;
use serde_json::Value;

/// A folder that goes away with its owner.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // ORDER: relaxed; the counter only has to give each caller another number.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("tide-bench-cli-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn file_names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A tensor to be put into a file.
#[derive(Clone)]
pub struct Tensor {
    pub name: &'static str,
    pub dtype: &'static str,
    pub shape: Vec<u64>,
    pub data: Vec<u8>,
}

impl Tensor {
    pub fn f32(name: &'static str, shape: &[u64], values: impl IntoIterator<Item = f32>) -> Self {
        let data = values.into_iter().flat_map(f32::to_le_bytes).collect();
        Self { name, dtype: "F32", shape: shape.to_vec(), data }
    }

    pub fn bf16(name: &'static str, shape: &[u64], values: impl IntoIterator<Item = f32>) -> Self {
        let data = values.into_iter().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect();
        Self { name, dtype: "BF16", shape: shape.to_vec(), data }
    }

    pub fn raw(name: &'static str, dtype: &'static str, shape: &[u64], data: Vec<u8>) -> Self {
        Self { name, dtype, shape: shape.to_vec(), data }
    }
}

/// Writes a safetensors file with its data in this order.
pub fn write_file(path: &Path, tensors: &[Tensor]) {
    let mut end = 0;
    let entries = tensors.iter().map(|t| {
        let start = end;
        end += t.data.len();
        format!(r#""{}":{{"dtype":"{}","shape":{:?},"data_offsets":[{start},{end}]}}"#, t.name, t.dtype, t.shape)
    });
    let header = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    tensors.iter().for_each(|t| bytes.extend_from_slice(&t.data));
    std::fs::write(path, bytes).unwrap();
}

/// Whole numbers that every type here holds and every order of adding sums exactly: the fill of the
/// public bug reports' cases.
pub fn whole_number(rank: u64, parameter: u64, index: u64) -> f32 {
    ((7 * rank + 3 * parameter + 5 * index) % 17) as f32 - 8.0
}

/// A directory of bf16 gradients with that fill.
pub fn whole_number_grads(shapes: &[(&'static str, &[u64])], rank_count: u64) -> Scratch {
    let dir = Scratch::new();
    for rank in 0..rank_count {
        let tensors = shapes.iter().zip(0..).map(|((name, shape), p)| {
            let count: u64 = shape.iter().product();
            Tensor::bf16(name, shape, (0..count).map(|i| whole_number(rank, p, i)))
        });
        write_file(&dir.path(&format!("rank{rank}.safetensors")), &tensors.collect::<Vec<_>>());
    }
    dir
}

pub fn tide_bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tide-bench")).args(arguments).output().unwrap()
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Runs what must succeed with `--json -` and gives its results.
pub fn results(arguments: &[&str]) -> Vec<Value> {
    let output = tide_bench(&[arguments, &["--json", "-"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    let value: Value = serde_json::from_slice(&output.stdout).expect("standard output is JSON alone");
    value["results"].as_array().unwrap().clone()
}

/// Runs what must be refused with `status` and gives the one sentence.
pub fn refusal(arguments: &[&str], status: i32) -> String {
    let output = tide_bench(arguments);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A saved file's tensors: type, shape and bytes by name.
pub fn load(path: &Path) -> HashMap<String, (String, Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let entry = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        (name, (view.dtype().to_string(), view.shape().to_vec(), view.data().to_vec()))
    };
    tensors.tensors().into_iter().map(entry).collect()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

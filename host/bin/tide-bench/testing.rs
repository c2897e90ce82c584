//! What the unit tests share: a scratch folder and safetensors files made byte by byte.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder that goes away with its owner.
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new, empty folder.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // ORDER: relaxed; the counter only has to give each caller another number.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("tide-bench-unit-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// The path of `name` inside.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file and gives its path.
    pub fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// The folder itself.
    pub fn dir(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A safetensors file with `(name, type, shape, bytes)` tensors, whose data counts upwards.
pub fn safetensors_bytes(tensors: &[(&str, &str, &[u64], usize)]) -> Vec<u8> {
    let data: Vec<(&str, &str, &[u64], Vec<u8>)> = tensors
        .iter()
        .map(|&(name, dtype, shape, bytes)| (name, dtype, shape, (0..bytes).map(|i| i as u8).collect()))
        .collect();
    safetensors_with(&data)
}

/// A safetensors file with these tensors and their data, in this order.
pub fn safetensors_with(tensors: &[(&str, &str, &[u64], Vec<u8>)]) -> Vec<u8> {
    let mut at = 0;
    let entries: Vec<String> = tensors
        .iter()
        .map(|(name, dtype, shape, data)| {
            let start = at;
            at += data.len();
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{at}]}}"#)
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    tensors.iter().for_each(|(.., data)| file.extend_from_slice(data));
    file
}

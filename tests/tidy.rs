//! Style that a compiler does not hold: the arrows between the rooms, and where certain things may stand.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(under: &str) -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join(under)];
    while let Some(folder) = folders.pop() {
        if folder.is_file() {
            files.push((folder.clone(), fs::read_to_string(&folder).unwrap()));
            continue;
        }
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() || path.extension().is_some_and(|e| e == "rs") {
                folders.push(path);
            }
        }
    }
    assert!(!files.is_empty(), "{under} has no sources");
    files
}

/// Lines of code (not comments) that contain one of `words`.
fn offences(files: &[(PathBuf, String)], words: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (path, text) in files {
        for (number, line) in text.lines().enumerate().filter(|(_, l)| !l.trim_start().starts_with("//")) {
            if words.iter().any(|w| line.contains(w)) {
                found.push(format!("{}:{}: {}", path.display(), number + 1, line.trim()));
            }
        }
    }
    found
}

const RULES: [(&str, &[&str], &str); 10] = [
    (
        "host/layout.rs",
        &["crate::gpu", "crate::net", "crate::plan", "crate::arena", "crate::collectives"],
        "layout is pure",
    ),
    ("host/plan", &["crate::gpu", "crate::net", "crate::arena", "crate::collectives", "std::time"], "plan is pure"),
    ("host/arena.rs", &["crate::net", "crate::collectives", "gpu::sim", "gpu::cuda"], "the arena knows no collective"),
    ("host/net", &["crate::collectives", "gpu::sim", "gpu::cuda"], "a network knows no collective"),
    (
        "host/launch",
        &["crate::gpu", "crate::net", "crate::collectives", "crate::plan", "crate::arena"],
        "how processes find each other knows no GPU",
    ),
    ("host/collectives", &["gpu::sim", "gpu::cuda", "SimGpu", "CudaGpu", "cfg("], "a collective names no back end"),
    ("device/src/kernels", &["cfg(", "cfg!(", "asm!", "std::", "loop {"], "kernels are plain; only wait.rs waits"),
    ("device/src/abi", &["crate::arch", "crate::kernels", "crate::gin"], "abi imports nothing"),
    ("nccl-gin/src", &["tide_device", "tide_gpu", "cudarc"], "the bindings to NCCL serve others, too"),
    ("device/src/gin", &["cfg(", "asm!", "loop {"], "a network back end waits through wait.rs"),
];

#[test]
fn the_arrows_point_one_way() {
    for (under, words, why) in RULES {
        let found = offences(&sources(under), words);
        assert!(found.is_empty(), "{why}:\n{}", found.join("\n"));
    }
}

#[test]
fn each_rule_catches_a_planted_offence() {
    for (under, words, _) in RULES {
        for word in words {
            let planted = vec![(PathBuf::from(under), format!("// {word}\nuse {word};\n"))];
            assert_eq!(offences(&planted, words).len(), 1, "{under}: {word}");
        }
    }
}

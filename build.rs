//! Embeds the kernels' PTX in the library: the committed files, or, with `TIDE_BUILD_PTX=1`, ones built afresh.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Constant in the library, file in `device/ptx/`.
const IMAGES: [(&str, &str); 2] = [("SM_90", "sm_90.ptx"), ("SM_100", "sm_100.ptx")];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=TIDE_BUILD_PTX");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    check_level();
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let directory = if env::var("TIDE_BUILD_PTX").is_ok_and(|v| v == "1") {
        println!("cargo::rerun-if-changed=device/src");
        build_afresh(&root, &out)
    } else {
        root.join("device/ptx")
    };
    let mut source = String::new();
    for (constant, file) in IMAGES {
        let path = directory.join(file);
        // A file that is not there is watched through the nearest folder that is.
        let watched = path.ancestors().find(|p| p.exists()).expect("the root exists");
        println!("cargo::rerun-if-changed={}", watched.display());
        let text =
            if path.exists() { format!("include_str!({:?})", path.display().to_string()) } else { "\"\"".into() };
        source.push_str(&format!("/// `{file}`; empty if there was none.\npub const {constant}: &str = {text};\n"));
    }
    fs::write(out.join("ptx.rs"), source).expect("OUT_DIR can be written");
}

/// The bindings come in one level of the driver's API.
fn check_level() {
    let levels: Vec<String> =
        env::vars().map(|(name, _)| name).filter(|n| n.starts_with("CARGO_FEATURE_CUDA_1")).collect();
    if levels.len() != 1 {
        println!(
            "cargo::error=feature `cuda` needs exactly one level, as cuda-12080 or cuda-13000; {} are on",
            levels.len()
        );
        std::process::exit(1);
    }
}

/// Runs `cargo xtask ptx` into a folder of the build, under a target folder of its own: the outer cargo holds the lock of the
/// usual one.
fn build_afresh(root: &Path, out: &Path) -> PathBuf {
    let directory = out.join("ptx");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let name_text = name.to_string_lossy();
        if name_text.starts_with("CARGO_") || ["RUSTC", "RUSTFLAGS", "TARGET", "OUT_DIR"].contains(&&*name_text) {
            cargo.env_remove(&name);
        }
    }
    if let Some(home) = env::var_os("CARGO_HOME") {
        cargo.env("CARGO_HOME", home);
    }
    let run = cargo
        .current_dir(root)
        .env("CARGO_TARGET_DIR", out.join("xtask-target"))
        .args(["run", "--package", "xtask", "--", "ptx", "--out"])
        .arg(&directory)
        .status();
    match run {
        Ok(status) if status.success() => directory,
        outcome => {
            println!(
                "cargo::error=TIDE_BUILD_PTX=1: `cargo xtask ptx` failed ({outcome:?}); without it the committed PTX is taken"
            );
            std::process::exit(1);
        }
    }
}

//! Developer commands of TIDE.
//!
//! * `cargo xtask ptx` builds the device crate as PTX, one file per architecture, into `device/ptx/`.
//! * `cargo xtask ptx --out DIR` builds it into another directory.
//! * `cargo xtask ptx --nccl NCCL` builds the network kernels over NCCL's device code, and examines them; `NCCL` is a folder with
//!   `lib/libnccl_device.bc` and `include/nccl.h`, as a wheel's `nvidia/nccl`.
//! * `cargo xtask ptx --check` proves that the committed PTX is what the sources give, and that it is fit to run.
//!
//! Only these need a compiler that can build for a GPU (`scripts/install-device-toolchain.sh`); everything else in
//! the workspace is stable Rust.

mod build;
mod check;
mod lint;
mod nccl;
mod provenance;
mod ptx;
mod ptxas;
mod specimen;
mod table;
mod toolchain;

use anyhow::{Result, bail};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask ptx [--check | [--nccl NCCL] [--out DIR]]

  ptx             build device/ptx/*.ptx from the device crate
  ptx --out DIR   build into DIR instead
  ptx --nccl NCCL build the network kernels over NCCL's device code into target/nccl-ptx, or DIR, and examine them
  ptx --check     rebuild, compare with the committed files, and examine them";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["ptx"] => write_ptx(&root().join("device/ptx")),
        ["ptx", "--out", directory] => write_ptx(Path::new(directory)),
        ["ptx", "--nccl", nccl] => nccl_ptx(Path::new(nccl), &build::target(&root()).join("nccl-ptx")),
        ["ptx", "--nccl", nccl, "--out", directory] => nccl_ptx(Path::new(nccl), Path::new(directory)),
        ["ptx", "--check"] => check_ptx(),
        ["--help" | "-h" | "help"] => {
            println!("{USAGE}");
            Ok(())
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace: the parent of this crate.
fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().expect("xtask lies in the workspace").to_path_buf()
}

fn write_ptx(directory: &Path) -> Result<()> {
    let root = root();
    let toolchain = toolchain::find()?;
    println!("compiler: {toolchain}");
    std::fs::create_dir_all(directory)?;
    for arch in table::ARCHS {
        let text = build::ptx(&root, &toolchain, arch)?;
        let path = directory.join(arch.file_name());
        std::fs::write(&path, &text)?;
        println!("{}: {} bytes", path.display(), text.len());
    }
    Ok(())
}

fn nccl_ptx(nccl: &Path, directory: &Path) -> Result<()> {
    let failed = nccl::write_and_check(&root(), nccl, directory)?;
    if failed > 0 {
        bail!("{failed} checks failed: the modules are not fit to run");
    }
    Ok(())
}

fn check_ptx() -> Result<()> {
    let failed = check::all(&root());
    if failed > 0 {
        bail!("{failed} PTX checks failed");
    }
    Ok(())
}

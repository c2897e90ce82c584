//! The build: the device crate, by cargo, for one architecture.

use crate::provenance::{self, Provenance};
use crate::table::{Arch, Expectation, KERNELS, PTX_FEATURE};
use crate::toolchain::{Toolchain, cargo_home};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;
use tide_device::abi::kernel::Kernel;

pub const TARGET: &str = "nvptx64-nvidia-cuda";

/// Flags that bear on the code, beside CPU and features.
///
/// * Without `-JumpThreading` a barrier is copied into both sides of a branch, intrinsic or not.
/// * Panics become traps where they arise: no strings, no paths of the machine that built, no formatting code.
pub const FLAGS: [&str; 3] = ["-Zmir-enable-passes=-JumpThreading", "-Zunstable-options", "-Cpanic=immediate-abort"];

/// What cargo is told to build.
const LIBRARY: [&str; 4] = ["rustc", "--lib", "--crate-type", "cdylib"];

/// Flags of a build whose bitcode is optimised later.
pub const BITCODE_FLAGS: [&str; 2] = ["--emit=llvm-bc", "-Cno-prepopulate-passes"];

/// The header that a build of these sources by this compiler gets.
pub fn provenance(root: &Path, toolchain: &Toolchain, arch: Arch) -> Result<Provenance> {
    Ok(Provenance {
        compiler: toolchain.version.clone(),
        target: format!("{TARGET}, cpu {}, features {PTX_FEATURE}", arch.cpu),
        flags: FLAGS.join(" "),
        sources: provenance::hash(&provenance::sources(root)?),
    })
}

/// Builds the device crate. The text begins with its provenance.
pub fn ptx(root: &Path, toolchain: &Toolchain, arch: Arch) -> Result<String> {
    let header = provenance(root, toolchain, arch)?.header();
    let directory = target_directory(root, arch);
    cargo(root, toolchain, arch, &directory, &LIBRARY, &[], None)?;
    let built = directory.join(TARGET).join("ptx/tide_device.ptx");
    let text = std::fs::read_to_string(&built).with_context(|| format!("{}", built.display()))?;
    let mut text: String = text.lines().flat_map(|line| [line.trim_end(), "\n"]).collect();
    for Expectation { kernel, .. } in KERNELS {
        state_block_size(&mut text, kernel)?;
    }
    Ok(header + &text)
}

/// Builds the device crate with its entry points over NCCL, as bitcode that is not optimised yet: what they call is large, and
/// decides what is worth inlining or unrolling.
pub fn bitcode(root: &Path, toolchain: &Toolchain, arch: Arch) -> Result<PathBuf> {
    // Apart from the other build: its files have the same names.
    let directory = target_directory(root, arch).with_file_name(format!("{}-nccl", arch.cpu));
    let command = [&LIBRARY[..], &["--features", "nccl"]].concat();
    cargo(root, toolchain, arch, &directory, &command, &BITCODE_FLAGS, None)?;
    Ok(directory.join(TARGET).join("ptx/deps/tide_device.bc"))
}

/// Tells the assembler the largest block of a kernel, for which Rust has no attribute. Whichever assembler a driver
/// brings, the registers it gives the kernel then leave room for that block; for one, without the second directive it
/// would make room for two, and spill.
pub fn state_block_size(text: &mut String, kernel: Kernel) -> Result<()> {
    let name = kernel.name();
    let entry = text.find(&format!(".entry {name}(")).with_context(|| format!("{name} is no entry point"))?;
    let body = text[entry..].find("\n{").with_context(|| format!("{name} has no body"))?;
    text.insert_str(entry + body, &format!("\n.maxntid {}, 1, 1\n.minnctapersm 1", kernel.block_threads_max()));
    Ok(())
}

/// Runs clippy over the device crate as it is built for the GPU.
pub fn clippy(root: &Path, toolchain: &Toolchain, driver: &Path, arch: Arch) -> Result<()> {
    let directory = target_directory(root, arch);
    cargo(root, toolchain, arch, &directory, &["check", "--lib", "--features", "nccl"], &[], Some(driver))
}

/// `directory` is one for each architecture and kind of build: flags are not part of what cargo tells builds apart by. `extra`
/// are flags for the device crate alone.
fn cargo(
    root: &Path,
    toolchain: &Toolchain,
    arch: Arch,
    directory: &Path,
    command: &[&str],
    extra: &[&str],
    wrapper: Option<&Path>,
) -> Result<()> {
    let rust_sources = std::fs::canonicalize(toolchain.sysroot.join("lib/rustlib/src/rust"))?;
    let mut flags = vec![format!("-Ctarget-cpu={}", arch.cpu), format!("-Ctarget-feature={PTX_FEATURE}")];
    flags.extend(FLAGS.map(str::to_string));
    // No path of this machine is left in the code as it is; these see to it that none comes in.
    for (path, name) in [(root, "/tide"), (&cargo_home(), "/cargo"), (&rust_sources, "/rustc")] {
        flags.push(format!("--remap-path-prefix={}={name}", path.display()));
    }
    let mut cargo = Command::new(&toolchain.cargo);
    // The environment of whoever calls must not choose the bytes.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PROFILE_") || text.starts_with("CARGO_BUILD_") || text.starts_with("CARGO_TARGET_") {
            cargo.env_remove(&name);
        }
    }
    for name in ["RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "CLIPPY_ARGS"] {
        cargo.env_remove(name);
    }
    if let Some(driver) = wrapper {
        cargo.env("RUSTC_WORKSPACE_WRAPPER", driver).env("CLIPPY_ARGS", "-Dwarnings__CLIPPY_HACKERY__");
    }
    let output = cargo
        .args(command)
        .args(["--package", "tide-device", "--profile", "ptx", "--locked"])
        .args(["--target", TARGET, "-Zbuild-std=core"])
        .args(if extra.is_empty() { None } else { Some("--") })
        .args(extra)
        .env("RUSTC", &toolchain.rustc)
        // The compiler is a stable one; building `core` and the PTX entry points are not stable features.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("PATH", &toolchain.path)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .env("CARGO_TARGET_DIR", directory)
        .current_dir(root)
        .output()
        .with_context(|| format!("{}", toolchain.cargo.display()))?;
    if !output.status.success() {
        bail!("the device crate does not build for {}:\n{}", arch.cpu, String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

fn target_directory(root: &Path, arch: Arch) -> PathBuf {
    target(root).join("ptx").join(arch.cpu)
}

/// Cargo's target folder.
pub fn target(root: &Path) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    if target.is_absolute() { target } else { root.join(target) }
}

//! `cargo xtask ptx --nccl DIR`: the network kernels over NCCL's device code, one module for each back end and architecture.
//!
//! ```text
//! shim.ll, mask of the back end, libnccl_device.bc --link, reduce--> four functions, nothing of NCCL's other back ends
//! device crate, feature `nccl`, bitcode ------------------- link, optimise, llc --> PTX
//! ```
//!
//! NCCL's part is reduced apart from ours, with a pass that is not of LLVM's usual pipeline (`attributor`) and alone sees through
//! NCCL's table of functions for the threads that call together. Our kernels see the usual pipeline.
//!
//! What comes out holds NCCL's code, is bound to one NCCL, and is never committed.

mod check;
mod ir;

use crate::build;
use crate::provenance;
use crate::table::{ARCHS, Arch, PTX_FEATURE};
use crate::toolchain::Toolchain;
use anyhow::{Context, Result, bail};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use tide_device::abi::kernel::{Kernel, NcclBackend};

pub use check::all as check;

/// What a kernel may call, as pointers and integers.
const SHIM: &str = "nccl-gin/src/device/shim.ll";

/// The shim's functions.
const API: [&str; 4] = ["nccl_gin_put", "nccl_gin_signal", "nccl_gin_flush_timeout", "nccl_gin_read_signal"];

/// Folds what a function of NCCL does not need once it is inlined.
const FOLD: &str = "function(sroa,early-cse<memssa>,instcombine<no-verify-fixpoint>,simplifycfg,gvn),always-inline";

/// An NCCL on this machine.
#[derive(Debug)]
pub struct Nccl {
    bitcode: PathBuf,
    /// Its number, as `ncclGetVersion` says it: 23203 is 2.32.3.
    pub version: u32,
    /// SHA-256 of the bitcode.
    pub hash: String,
}

impl Nccl {
    /// Looks in a folder that has `lib/libnccl_device.bc` and `include/nccl.h`, or in the `lib` of one.
    pub fn find(directory: &Path) -> Result<Self> {
        let inside = [directory.to_path_buf(), directory.join("..")];
        let root = inside.iter().find(|root| root.join("lib/libnccl_device.bc").is_file());
        let root = root.with_context(|| format!("{} has no lib/libnccl_device.bc", directory.display()))?;
        let bitcode = root.join("lib/libnccl_device.bc");
        let header = root.join("include/nccl.h");
        let header = std::fs::read_to_string(&header).with_context(|| format!("{}", header.display()))?;
        let hash = provenance::digest(&std::fs::read(&bitcode)?);
        Ok(Self { version: version(&header)?, bitcode, hash })
    }
}

/// The number in NCCL's header.
fn version(header: &str) -> Result<u32> {
    let part = |name: &str| {
        let value = header
            .lines()
            .find_map(|line| line.strip_prefix("#define ")?.strip_prefix(name)?.split_whitespace().next());
        value.and_then(|value| value.parse::<u32>().ok()).with_context(|| format!("nccl.h defines no {name}"))
    };
    Ok(part("NCCL_MAJOR ")? * 10_000 + part("NCCL_MINOR ")? * 100 + part("NCCL_PATCH ")?)
}

/// A module: which it is, and its text.
#[derive(Debug)]
pub struct Built {
    /// Back end.
    pub backend: NcclBackend,
    /// Architecture.
    pub arch: Arch,
    /// Name of its file.
    pub file: String,
    /// PTX, with its header.
    pub text: String,
    /// The device crate's own bitcode, as text.
    pub ours: String,
}

/// Builds every module.
pub fn build(root: &Path, toolchain: &Toolchain, nccl: &Nccl) -> Result<Vec<Built>> {
    let directory = crate::specimen::Directory::new("nccl")?;
    let mut built = Vec::new();
    for arch in ARCHS {
        let ours = build::bitcode(root, toolchain, arch)?;
        let ours_text = toolchain.tool("llvm-dis", &[&ours, Path::new("-o"), Path::new("-")])?;
        for backend in NcclBackend::ALL {
            let theirs = reduce(root, toolchain, nccl, backend, directory.path())?;
            let text = link(toolchain, &ours, &theirs, arch, directory.path())?;
            built.push(Built {
                backend,
                arch,
                file: format!("nccl-{}-{}-{}.ptx", nccl.version, backend.name(), arch.cpu),
                text: header(root, toolchain, nccl, backend, arch)? + &text,
                ours: ours_text.clone(),
            });
        }
    }
    Ok(built)
}

/// The shim's functions with all that they need of NCCL inside, for one back end.
fn reduce(root: &Path, toolchain: &Toolchain, nccl: &Nccl, backend: NcclBackend, scratch: &Path) -> Result<PathBuf> {
    let [mask, linked, reduced] = ["mask.ll", "linked.bc", "reduced.bc"].map(|name| scratch.join(name));
    std::fs::write(&mask, format!("@nccl_gin_backend_mask = constant i32 {}\n", backend.mask()))?;
    let shim = root.join(SHIM);
    toolchain.tool("llvm-link", &args(&["--only-needed"], &[&shim, &mask, &nccl.bitcode], &linked))?;
    let passes = format!("internalize,globaldce,always-inline,{FOLD},attributor,{FOLD},attributor,{FOLD},globaldce");
    let flags = [
        format!("--passes={passes}"),
        // Every function whose address is taken is in the module: no pointer to one comes from outside.
        "--attributor-assume-closed-world".to_string(),
        format!("--internalize-public-api-list={}", API.join(",")),
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    toolchain.tool("opt", &args(&flags, &[&linked], &reduced))?;
    Ok(reduced)
}

/// PTX of the device crate's bitcode and what [`reduce`] gave.
fn link(toolchain: &Toolchain, ours: &Path, theirs: &Path, arch: Arch, scratch: &Path) -> Result<String> {
    let [linked, optimised, ptx] = ["ours.bc", "optimised.bc", "module.ptx"].map(|name| scratch.join(name));
    toolchain.tool("llvm-link", &args(&[], &[ours, theirs], &linked))?;
    let kernels = Kernel::NCCL.map(Kernel::name).join(",");
    let flags = [
        "--passes=internalize,globaldce,forceattrs,always-inline,default<O3>,globaldce".to_string(),
        // A kernel contains all of its code.
        "--force-attribute=alwaysinline".to_string(),
        format!("--internalize-public-api-list={kernels}"),
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    toolchain.tool("opt", &args(&flags, &[&linked], &optimised))?;
    let (cpu, features) = (format!("-mcpu={}", arch.cpu), format!("-mattr={PTX_FEATURE}"));
    toolchain.tool("llc", &args(&["-O3", &cpu, &features], &[&optimised], &ptx))?;
    let text = std::fs::read_to_string(&ptx)?;
    let mut text: String = text.lines().flat_map(|line| [line.trim_end(), "\n"]).collect();
    for kernel in Kernel::NCCL {
        build::state_block_size(&mut text, kernel)?;
    }
    Ok(text)
}

fn args<'a>(flags: &[&'a str], inputs: &[&'a Path], output: &'a Path) -> Vec<&'a Path> {
    let flags = flags.iter().map(|flag| Path::new(*flag));
    flags.chain(inputs.iter().copied()).chain([Path::new("-o"), output]).collect()
}

/// What a host compares with the NCCL that it has loaded stands first, a fact a line.
fn header(root: &Path, toolchain: &Toolchain, nccl: &Nccl, backend: NcclBackend, arch: Arch) -> Result<String> {
    let mut text = String::from(
        "// TIDE's network kernels as PTX, with NCCL's device code. By `cargo xtask ptx --nccl`; not for passing on.\n",
    );
    for (name, value) in [
        ("nccl", nccl.version.to_string()),
        ("bitcode", format!("sha256 {}", nccl.hash)),
        ("arch", arch.cpu.to_string()),
        ("backend", format!("{} mask {}", backend.name(), backend.mask())),
        ("compiler", toolchain.version.clone()),
        ("target", format!("{}, features {PTX_FEATURE}", build::TARGET)),
        ("flags", [&build::FLAGS[..], &build::BITCODE_FLAGS].concat().join(" ")),
        ("sources", format!("sha256 {}", provenance::hash(&provenance::nccl_sources(root)?))),
    ] {
        writeln!(text, "// {name}: {value}")?;
    }
    Ok(text)
}

/// Writes the modules, and examines them. How many checks failed.
pub fn write_and_check(root: &Path, directory: &Path, out: &Path) -> Result<usize> {
    let nccl = Nccl::find(directory)?;
    let toolchain = crate::toolchain::find()?;
    println!("compiler: {toolchain}");
    println!("nccl: {}, bitcode {}", nccl.version, nccl.hash);
    let built = build(root, &toolchain, &nccl)?;
    std::fs::create_dir_all(out)?;
    for module in &built {
        let path = out.join(&module.file);
        std::fs::write(&path, &module.text)?;
        println!("{}: {} bytes", path.display(), module.text.len());
    }
    let theirs = toolchain.tool("llvm-dis", &[&nccl.bitcode, Path::new("-o"), Path::new("-")])?;
    let shim = std::fs::read_to_string(root.join(SHIM))?;
    if built.is_empty() {
        bail!("nothing was built");
    }
    Ok(check(&built, &shim, &theirs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_as_nccl_counts_it() {
        let header = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 32\n#define NCCL_PATCH 3\n#define NCCL_SUFFIX \"\"\n";
        assert_eq!(version(header).unwrap(), 23203);
        assert!(version("#define NCCL_MAJOR 2\n").is_err());
    }
}

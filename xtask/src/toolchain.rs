//! The compiler that can build for a GPU: found, or what is missing said by name.
//!
//! Stable toolchains of rustup have neither `core` for this target nor its sources. Two others serve: Debian's package
//! rustc-web, and a rustup nightly with three more components.

use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest release that was tried; older ones lack flags that the build needs.
const OLDEST: (u32, u32) = (1, 96);

const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// A complete compiler.
#[derive(Debug)]
pub struct Toolchain {
    /// The compiler.
    pub rustc: PathBuf,
    /// The cargo that goes with it.
    pub cargo: PathBuf,
    /// Its clippy, where there is one.
    pub clippy_driver: Option<PathBuf>,
    /// Where its standard library's sources lie.
    pub sysroot: PathBuf,
    /// `PATH` with the linker and LLVM's tools in front.
    pub path: OsString,
    /// Everything that decides the bytes: compiler, LLVM, code generator.
    pub version: String,
}

impl fmt::Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.version, self.rustc.display())
    }
}

impl Toolchain {
    /// Runs one of LLVM's tools, the compiler's own. Its output; its failure is an error.
    pub fn tool(&self, name: &str, arguments: &[&Path]) -> Result<String> {
        let mut command = Command::new(name);
        command.args(arguments).env("PATH", &self.path);
        let output = command.output().with_context(|| name.to_string())?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{name}: {}", said.lines().take(8).collect::<Vec<_>>().join("; "));
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// What `rustc -vV` says, as far as it is used.
struct Verbose {
    line: String,
    release: (u32, u32),
    host: String,
    llvm: String,
}

/// A compiler that might serve.
struct Candidate {
    rustc: PathBuf,
    kind: Kind,
}

/// Where a compiler comes from: decides where its tools lie and how what is missing is installed.
enum Kind {
    Debian,
    /// The rustup toolchain of this name.
    Rustup(String),
}

/// The first complete compiler: Debian's, then rustup's nightlies.
pub fn find() -> Result<Toolchain> {
    let mut candidates = vec![Candidate { rustc: PathBuf::from(DEBIAN_RUSTC), kind: Kind::Debian }];
    candidates.extend(rustup_nightlies());
    let mut lacks = Vec::new();
    for candidate in candidates {
        match complete(&candidate) {
            Ok(toolchain) => return Ok(toolchain),
            Err(lack) => lacks.push(format!("  {}: {lack:#}", candidate.rustc.display())),
        }
    }
    bail!(
        "no compiler here can build the device code (scripts/install-device-toolchain.sh installs one):\n{}\n  \
         or a rustup nightly: rustup toolchain install nightly -c rust-src -c llvm-tools -c llvm-bitcode-linker",
        lacks.join("\n")
    )
}

/// The toolchain of a candidate, or everything that it lacks.
fn complete(candidate: &Candidate) -> Result<Toolchain> {
    let Candidate { rustc, kind } = candidate;
    if !rustc.exists() {
        bail!("not there (Debian: apt-get install rustc-web rust-web-src llvm-22)");
    }
    let verbose = verbose(rustc)?;
    if verbose.release < OLDEST {
        let (major, minor) = OLDEST;
        bail!("{} is older than {major}.{minor} (Debian: apt-get install rustc-web)", verbose.line);
    }
    let sysroot = PathBuf::from(capture(Command::new(rustc).args(["--print", "sysroot"]))?);
    let llvm_major = verbose.llvm.split('.').next().unwrap_or_default().to_string();
    let host_bin = sysroot.join("lib/rustlib").join(&verbose.host).join("bin");
    let component = |name: &str| match kind {
        Kind::Debian => String::new(),
        Kind::Rustup(toolchain) => format!("rustup component add --toolchain {toolchain} {name}"),
    };

    let mut missing = Vec::new();
    let debian = matches!(kind, Kind::Debian);
    if !sysroot.join("lib/rustlib/src/rust/library/core/src/lib.rs").exists() {
        missing.push(if debian { "the sources of core (package rust-web-src)".into() } else { component("rust-src") });
    }
    let llvm_bin = if debian { PathBuf::from(format!("/usr/lib/llvm-{llvm_major}/bin")) } else { host_bin.clone() };
    if ["llvm-link", "opt", "llc"].iter().any(|tool| !llvm_bin.join(tool).exists()) {
        missing.push(if debian {
            format!("llvm-link, opt and llc (package llvm-{llvm_major})")
        } else {
            component("llvm-tools")
        });
    }
    let linker_directories = if debian { search_path() } else { vec![host_bin.join("self-contained"), host_bin] };
    let linker = linker_directories.into_iter().find(|directory| directory.join("llvm-bitcode-linker").exists());
    if linker.is_none() {
        missing.push(if debian {
            let (major, minor) = verbose.release;
            format!(
                "llvm-bitcode-linker (RUSTC={DEBIAN_RUSTC} cargo install --locked --path \
                 /usr/src/rustc-{major}.{minor}.0/src/tools/llvm-bitcode-linker)"
            )
        } else {
            component("llvm-bitcode-linker")
        });
    }
    let (true, Some(linker)) = (missing.is_empty(), linker) else {
        bail!("{} lacks {}", verbose.line, missing.join("; "));
    };

    let llc = capture(Command::new(llvm_bin.join("llc")).arg("--version"))?;
    let llc = llc.split("LLVM version ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let llc = llc.context("llc names no version")?;
    let beside = |tool: &str| rustc.with_file_name(tool);
    // The pinned cargo drives Debian's compiler, which comes without one.
    let cargo = match kind {
        Kind::Debian => std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from),
        Kind::Rustup(_) => beside("cargo"),
    };
    let inherited = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths([llvm_bin, linker].into_iter().chain(std::env::split_paths(&inherited)))?;
    Ok(Toolchain {
        version: format!("{}, LLVM {}; llc {llc}", verbose.line, verbose.llvm),
        rustc: rustc.clone(),
        cargo,
        clippy_driver: Some(beside("clippy-driver")).filter(|path| path.exists()),
        sysroot,
        path,
    })
}

/// Where Debian's linker may lie: `PATH`, and where `cargo install` puts programs.
fn search_path() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).chain([cargo_home().join("bin")]).collect()
}

/// Cargo's own directory.
pub fn cargo_home() -> PathBuf {
    let home = || Path::new(&std::env::var_os("HOME").unwrap_or_default()).join(".cargo");
    std::env::var_os("CARGO_HOME").map_or_else(home, PathBuf::from)
}

fn rustup_nightlies() -> Vec<Candidate> {
    let Ok(list) = capture(Command::new("rustup").args(["toolchain", "list", "--quiet"])) else {
        return Vec::new();
    };
    let nightlies = list.lines().filter(|name| name.starts_with("nightly"));
    nightlies
        .filter_map(|name| {
            let rustc = capture(Command::new("rustup").args(["which", "--toolchain", name, "rustc"])).ok()?;
            Some(Candidate { rustc: PathBuf::from(rustc), kind: Kind::Rustup(name.to_string()) })
        })
        .collect()
}

fn verbose(rustc: &Path) -> Result<Verbose> {
    let text = capture(Command::new(rustc).arg("-vV"))?;
    let line = text.lines().next().unwrap_or_default().to_string();
    let field = |name: &str| {
        let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        found.map(str::to_string).with_context(|| format!("{} -vV has no line \"{name}\"", rustc.display()))
    };
    let release = field("release")?;
    let mut numbers = release.split('.').map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        bail!("\"{release}\" is not a release");
    };
    Ok(Verbose { line, release: (major, minor), host: field("host")?, llvm: field("LLVM version")? })
}

/// A command's output, trimmed; its failure is an error.
fn capture(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?.trim().to_string())
}

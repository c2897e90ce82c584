//! The assembler: where it lies, and what it reports of each kernel.

use crate::specimen::Directory;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where the wheel `nvidia-cuda-nvcc` puts it, below a directory of Python's search path.
const IN_WHEEL: [&str; 2] = ["nvidia/cu13/bin/ptxas", "nvidia/cuda_nvcc/bin/ptxas"];

/// The assembler.
#[derive(Debug)]
pub struct Ptxas {
    path: PathBuf,
    /// Its release.
    pub version: String,
}

/// What it says of one function.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Report {
    /// The function.
    pub name: String,
    /// Stack frame, bytes.
    pub frame_bytes: u64,
    /// Spill stores and loads, bytes.
    pub spill_bytes: u64,
    /// Other local memory, bytes.
    pub local_bytes: u64,
    /// Registers a thread.
    pub registers: u32,
}

impl Ptxas {
    /// Looks in `TIDE_PTXAS`, on `PATH`, in `/usr/local/cuda` and in Python's packages.
    pub fn find() -> Result<Self> {
        if let Some(path) = std::env::var_os("TIDE_PTXAS") {
            return Self::at(Path::new(&path)).context("TIDE_PTXAS");
        }
        let mut candidates = vec![PathBuf::from("ptxas"), PathBuf::from("/usr/local/cuda/bin/ptxas")];
        for directory in python_directories() {
            candidates.extend(IN_WHEEL.iter().map(|inside| directory.join(inside)));
        }
        match candidates.iter().find_map(|path| Self::at(path).ok()) {
            Some(found) => Ok(found),
            None => bail!(
                "no ptxas on PATH, in TIDE_PTXAS, in /usr/local/cuda or in Python's packages; \
                 `pip install nvidia-cuda-nvcc` brings one"
            ),
        }
    }

    fn at(path: &Path) -> Result<Self> {
        let output = Command::new(path).arg("--version").output().with_context(|| format!("{}", path.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text.split("release ").nth(1).and_then(|rest| rest.split(',').next());
        let version = version.with_context(|| format!("{} names no release", path.display()))?;
        Ok(Self { path: path.to_path_buf(), version: version.to_string() })
    }

    /// Assembles a module for an architecture. The error is what the assembler said.
    pub fn assemble(&self, ptx: &str, cpu: &str) -> Result<Vec<Report>> {
        let directory = Directory::new("ptxas")?;
        let (source, object) = (directory.path().join("module.ptx"), directory.path().join("module.cubin"));
        std::fs::write(&source, ptx)?;
        let output = Command::new(&self.path)
            .args(["--verbose", "--gpu-name", cpu, "--output-file"])
            .arg(&object)
            .arg(&source)
            .stdin(Stdio::null())
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            bail!("{}", said.lines().take(8).collect::<Vec<_>>().join("; "));
        }
        parse(&said)
    }
}

/// Reads what `--verbose` prints.
pub fn parse(said: &str) -> Result<Vec<Report>> {
    let mut reports: Vec<Report> = Vec::new();
    for line in said.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            reports.push(Report { name: name.trim().to_string(), ..Report::default() });
            continue;
        }
        let Some(report) = reports.last_mut() else { continue };
        for part in line.split(',') {
            let number = || {
                let word = part.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
                word.and_then(|word| word.parse::<u64>().ok()).with_context(|| format!("no number in \"{part}\""))
            };
            if part.contains("bytes stack frame") {
                report.frame_bytes = number()?;
            } else if part.contains("spill stores") || part.contains("spill loads") {
                report.spill_bytes += number()?;
            } else if part.contains("bytes lmem") || part.contains("cumulative stack size") {
                report.local_bytes = report.local_bytes.max(number()?);
            } else if part.contains("registers") && part.contains("Used") {
                report.registers = u32::try_from(number()?)?;
            }
        }
    }
    Ok(reports)
}

/// Python's search path, of the interpreter in `PYTHON` or on `PATH` and of the environment that the install script makes.
fn python_directories() -> Vec<PathBuf> {
    let mut interpreters = vec![std::env::var_os("PYTHON").map_or_else(|| PathBuf::from("python3"), PathBuf::from)];
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
    interpreters.extend(cache.map(|cache| cache.join("tide/ptxas/bin/python")));
    let mut directories = Vec::new();
    for interpreter in interpreters {
        let output = Command::new(interpreter).args(["-c", "import sys; print(*sys.path, sep='\\n')"]).output();
        if let Ok(output) = output {
            directories.extend(String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from));
        }
    }
    directories
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_read() {
        let said = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90'
ptxas info    : Function properties for k
    392 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 126 registers, used 1 barriers, 400 bytes cumulative stack size
ptxas info    : Compile time = 5.861 ms
ptxas info    : Function properties for l
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers, 16 bytes lmem
";
        let k = Report { name: "k".into(), frame_bytes: 392, spill_bytes: 20, local_bytes: 400, registers: 126 };
        let l = Report { name: "l".into(), frame_bytes: 0, spill_bytes: 0, local_bytes: 16, registers: 24 };
        assert_eq!(parse(said).unwrap(), [k, l]);
    }
}

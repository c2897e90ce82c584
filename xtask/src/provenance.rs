//! Where a PTX file comes from: the header that says so, and the hash of the sources.

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::path::Path;

/// First line of every file.
const TITLE: &str = "// TIDE's kernels as PTX. Built from device/ by `cargo xtask ptx`; not for editing.";

/// What a header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provenance {
    /// Compiler, its LLVM, and the code generator.
    pub compiler: String,
    /// Target, CPU and features.
    pub target: String,
    /// Further flags of the compiler, as far as they bear on the code.
    pub flags: String,
    /// [`hash`] of the sources.
    pub sources: String,
}

impl Provenance {
    /// The header.
    pub fn header(&self) -> String {
        let Self { compiler, target, flags, sources } = self;
        format!(
            "{TITLE}\n// compiler: {compiler}\n// target: {target}\n// flags: {flags}\n// sources: sha256 {sources}\n"
        )
    }

    /// Reads the header of a file.
    pub fn of(ptx: &str) -> Result<Self> {
        let field = |name: &str| {
            let prefix = format!("// {name}: ");
            let line = ptx.lines().take(8).find_map(|line| line.strip_prefix(&prefix));
            line.map(str::to_string).with_context(|| format!("the header has no line \"{name}\""))
        };
        let sources = field("sources")?;
        let sources = sources.strip_prefix("sha256 ").context("the header's hash is not a sha256")?.to_string();
        Ok(Self { compiler: field("compiler")?, target: field("target")?, flags: field("flags")?, sources })
    }
}

/// A source file: path from the workspace on, with `/`, and contents.
pub type Source = (String, Vec<u8>);

/// The files that the PTX is built from: `device/Cargo.toml` and `device/src`, sorted by path. The simulator is not
/// among them: the PTX build leaves it out, and a change there must not call for a new PTX.
pub fn sources(root: &Path) -> Result<Vec<Source>> {
    let mut files = vec![("device/Cargo.toml".to_string(), std::fs::read(root.join("device/Cargo.toml"))?)];
    collect(root, "device/src", &mut files)?;
    files.retain(|(path, _)| path != "device/src/arch/sim.rs" && !path.starts_with("device/src/arch/sim/"));
    files.sort();
    Ok(files)
}

/// The files that modules over NCCL are built from: as [`sources`], and what the device crate calls.
pub fn nccl_sources(root: &Path) -> Result<Vec<Source>> {
    let mut files = sources(root)?;
    collect(root, "nccl-gin/src/device", &mut files)?;
    files.sort();
    Ok(files)
}

fn collect(root: &Path, directory: &str, files: &mut Vec<Source>) -> Result<()> {
    for entry in std::fs::read_dir(root.join(directory)).with_context(|| directory.to_string())? {
        let entry = entry?;
        let name = entry.file_name().into_string().ok().context("a source's name is not UTF-8")?;
        let path = format!("{directory}/{name}");
        if entry.file_type()?.is_dir() {
            collect(root, &path, files)?;
        } else if !name.starts_with('.') {
            files.push((path, std::fs::read(entry.path())?));
        }
    }
    Ok(())
}

/// SHA-256 over each file's path, length and contents.
pub fn hash(files: &[Source]) -> String {
    let mut hasher = Sha256::new();
    for (path, contents) in files {
        hasher.update(path.as_bytes());
        hasher.update([0]);
        hasher.update((contents.len() as u64).to_le_bytes());
        hasher.update(contents);
    }
    hex(&hasher.finalize())
}

/// SHA-256 of one file's contents.
pub fn digest(contents: &[u8]) -> String {
    hex(&Sha256::digest(contents))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes it");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_reads_back() {
        let provenance = Provenance {
            compiler: "rustc 1.96.0 (x), LLVM 22.1.8; llc 22.1.8".into(),
            target: "nvptx64-nvidia-cuda, cpu sm_90, features +ptx86".into(),
            flags: "-Zx".into(),
            sources: "00ff".into(),
        };
        let text = provenance.header() + ".version 8.6\n";
        assert_eq!(Provenance::of(&text).unwrap(), provenance);
        assert!(Provenance::of(".version 8.6\n").is_err());
    }

    #[test]
    fn the_hash_sees_names_contents_and_where_one_ends() {
        let files = |a: &str, b: &str| vec![("a".to_string(), a.into()), ("b".to_string(), b.into())];
        let original = hash(&files("12", "3"));
        assert_ne!(original, hash(&files("1", "23")));
        assert_ne!(original, hash(&files("12", "4")));
        assert_ne!(original, hash(&[("a".to_string(), "12".into()), ("c".to_string(), "3".into())]));
        assert_eq!(original, hash(&files("12", "3")));
    }
}

//! Which NCCL a module of `cargo xtask ptx --nccl` was built with, and whether it is the one that is loaded. All pure.
//!
//! GIN's device code has no compatibility across versions: it reads NCCL's structs where its own version has them. A module
//! that was built with another NCCL than the loaded one is refused, not tried.

use crate::error::{Result, TideError};
use sha2::{Digest, Sha256};
use std::fmt;
use std::path::Path;
use tide_device::abi::kernel::NcclBackend;

/// What distinguishes one module from another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleKey {
    /// NCCL's number for its version, as `ncclGetVersion` gives it: 23203 is 2.32.3.
    pub nccl_version: u32,
    /// SHA-256 of NCCL's device bitcode, in hex.
    pub bitcode_hash: String,
    /// The architecture that it was built for, as `sm_90`.
    pub arch: String,
    /// The network below.
    pub backend: NcclBackend,
}

/// The NCCL that a process has loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedNccl {
    /// What `ncclGetVersion` gives.
    pub version: u32,
    /// SHA-256 of the bitcode that lies beside the library, in hex; `None` where there is none.
    pub bitcode_hash: Option<String>,
}

/// A version as people write it.
struct Shown(u32);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {}.{}.{}", self.0 / 10_000, self.0 / 100 % 100, self.0 % 100)
    }
}

impl LoadedNccl {
    /// The library of this version, and the bitcode that lies beside it.
    pub fn new(version: u32, bitcode: Option<&Path>) -> Self {
        let hash = |bytes: Vec<u8>| Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        Self { version, bitcode_hash: bitcode.and_then(|path| std::fs::read(path).ok()).map(hash) }
    }
}

/// Reads the module for a back end and an architecture in `folder`, where `cargo xtask ptx --nccl` has put it.
///
/// # Errors
/// [`TideError::Unsupported`] where there is none, or one for another NCCL than is loaded.
pub fn find(folder: &Path, loaded: &LoadedNccl, backend: NcclBackend, arch: &str) -> Result<String> {
    let key = ModuleKey { nccl_version: loaded.version, bitcode_hash: String::new(), arch: arch.to_owned(), backend };
    let path = folder.join(key.file_name());
    let file = path.display().to_string();
    let text = std::fs::read_to_string(&path).map_err(|error| TideError::Unsupported {
        needed: format!("the module {file} (`cargo xtask ptx --nccl`)"),
        found: error.to_string(),
    })?;
    ModuleKey::parse(&file, &text)?.check(&file, loaded, backend)?;
    Ok(text)
}

impl ModuleKey {
    /// Reads a module's header; `file` names it in errors.
    ///
    /// # Errors
    /// [`TideError::Unsupported`] where a line is missing or says nothing that is known.
    pub fn parse(file: &str, text: &str) -> Result<Self> {
        let header = || text.lines().take_while(|line| line.starts_with("//"));
        let field = |name: &str| {
            let value = header().find_map(|line| line.strip_prefix("// ")?.strip_prefix(name)?.strip_prefix(": "));
            value.ok_or_else(|| unreadable(file, format!("no line \"{name}\" in its header")))
        };
        let nccl = field("nccl")?;
        let nccl_version = nccl.parse().map_err(|_| unreadable(file, format!("\"{nccl}\" for a version")))?;
        let bitcode = field("bitcode")?;
        let hash =
            bitcode.strip_prefix("sha256 ").filter(|h| h.len() == 64 && h.bytes().all(|b| b.is_ascii_hexdigit()));
        let hash = hash.ok_or_else(|| unreadable(file, format!("\"{bitcode}\" for the bitcode's hash")))?;
        let backend = field("backend")?;
        let known = NcclBackend::ALL.into_iter().find(|b| backend == format!("{} mask {}", b.name(), b.mask()));
        let known = known.ok_or_else(|| unreadable(file, format!("\"{backend}\" for a back end")))?;
        Ok(Self { nccl_version, bitcode_hash: hash.to_owned(), arch: field("arch")?.to_owned(), backend: known })
    }

    /// The file that `cargo xtask ptx --nccl` gives the module.
    pub fn file_name(&self) -> String {
        format!("nccl-{}-{}-{}.ptx", self.nccl_version, self.backend.name(), self.arch)
    }

    /// Whether the module runs under the NCCL that is loaded, on a communicator of the back end `backend`.
    ///
    /// # Errors
    /// [`TideError::Unsupported`] that names both sides where it does not.
    pub fn check(&self, file: &str, loaded: &LoadedNccl, backend: NcclBackend) -> Result<()> {
        if self.nccl_version != loaded.version {
            return Err(TideError::Unsupported {
                needed: format!("{}, which {file} was built with", Shown(self.nccl_version)),
                found: format!("{}: build it again (`cargo xtask ptx --nccl`)", Shown(loaded.version)),
            });
        }
        if let Some(hash) = loaded.bitcode_hash.as_deref().filter(|hash| *hash != self.bitcode_hash) {
            return Err(TideError::Unsupported {
                needed: format!("NCCL's device bitcode {}…, which {file} was built with", short(&self.bitcode_hash)),
                found: format!("{}… beside the loaded {}", short(hash), Shown(loaded.version)),
            });
        }
        if self.backend != backend {
            return Err(TideError::Unsupported {
                needed: format!("a module for NCCL's {}", backend.name()),
                found: format!("{file}, for its {}", self.backend.name()),
            });
        }
        Ok(())
    }
}

fn unreadable(file: &str, what: String) -> TideError {
    TideError::Unsupported { needed: format!("a module of `cargo xtask ptx --nccl` in {file}"), found: what }
}

fn short(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(digit: char) -> String {
        digit.to_string().repeat(64)
    }

    fn text() -> String {
        let hash = hash('a');
        format!(
            "// TIDE's network kernels\n// nccl: 23203\n// bitcode: sha256 {hash}\n// arch: sm_90\n\
             // backend: gdaki mask 8\n// compiler: rustc\n.version 8.6\n"
        )
    }

    fn refusal(key: &ModuleKey, version: u32, bitcode: Option<String>, backend: NcclBackend) -> String {
        let loaded = LoadedNccl { version, bitcode_hash: bitcode };
        key.check("m.ptx", &loaded, backend).expect_err("it must be refused").to_string()
    }

    #[test]
    fn a_module_is_found_by_its_name_and_refused_for_another_nccl() {
        let folder = std::env::temp_dir().join(format!("tide-modules-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("nccl-23203-gdaki-sm_90.ptx"), text()).unwrap();
        std::fs::write(folder.join("nccl-23204-gdaki-sm_90.ptx"), text()).unwrap();
        let find =
            |version, backend| super::find(&folder, &LoadedNccl { version, bitcode_hash: None }, backend, "sm_90");
        assert_eq!(find(23203, NcclBackend::Gdaki).unwrap(), text());
        let missing = find(23203, NcclBackend::Proxy).unwrap_err().to_string();
        assert!(missing.contains("nccl-23203-proxy-sm_90.ptx"), "{missing}");
        let renamed = find(23204, NcclBackend::Gdaki).unwrap_err().to_string();
        assert!(renamed.contains("NCCL 2.32.3") && renamed.contains("NCCL 2.32.4"), "{renamed}");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_bitcode_beside_a_library_is_hashed() {
        let file = std::env::temp_dir().join(format!("tide-bitcode-{}", std::process::id()));
        std::fs::write(&file, "abc").unwrap();
        let loaded = LoadedNccl::new(23203, Some(&file));
        std::fs::remove_file(&file).unwrap();
        assert!(loaded.bitcode_hash.unwrap().starts_with("ba7816bf8f01cfea414140de5dae2223"));
        assert_eq!(LoadedNccl::new(23203, None).bitcode_hash, None);
    }

    #[test]
    fn a_header_reads_back() {
        let key = ModuleKey::parse("m.ptx", &text()).unwrap();
        assert_eq!((key.nccl_version, key.arch.as_str(), key.backend), (23203, "sm_90", NcclBackend::Gdaki));
        assert_eq!(key.bitcode_hash, hash('a'));
        assert_eq!(key.file_name(), "nccl-23203-gdaki-sm_90.ptx");
    }

    #[test]
    fn a_module_runs_under_the_nccl_it_was_built_with_alone() {
        let key = ModuleKey::parse("m.ptx", &text()).unwrap();
        for bitcode_hash in [None, Some(hash('a'))] {
            key.check("m.ptx", &LoadedNccl { version: 23203, bitcode_hash }, NcclBackend::Gdaki).unwrap();
        }
        let other = refusal(&key, 23301, None, NcclBackend::Gdaki);
        assert!(other.contains("NCCL 2.32.3") && other.contains("NCCL 2.33.1") && other.contains("m.ptx"), "{other}");
        let patched = refusal(&key, 23203, Some(hash('b')), NcclBackend::Gdaki);
        assert!(patched.contains("aaaaaaaaaaaa…") && patched.contains("bbbbbbbbbbbb…"), "{patched}");
        let network = refusal(&key, 23203, None, NcclBackend::Proxy);
        assert!(network.contains("proxy") && network.contains("gdaki"), "{network}");
    }

    #[test]
    fn what_is_no_such_module_is_refused() {
        for (from, to) in [
            ("// nccl: 23203", "// nccl: new"),
            ("// nccl: 23203\n", ""),
            ("sha256 aaaa", "sha256 zzzz"),
            ("sha256 aaaa", "md5 aaaa"),
            ("gdaki mask 8", "gdaki mask 4"),
            ("// arch: sm_90\n", ""),
            ("// nccl", ".version 8.6\n// nccl"),
        ] {
            let spoilt = text().replacen(from, to, 1);
            assert_ne!(spoilt, text(), "{from}");
            assert!(ModuleKey::parse("m.ptx", &spoilt).is_err(), "{from} as {to}");
        }
    }
}

//! Looks for NCCL, to say what is there: nothing here uses it.

use libloading::Library;
use std::collections::BTreeSet;
use std::ffi::{OsString, c_int};
use std::path::{Path, PathBuf};

/// The library's name where packages of distributions and of Python put it.
const SONAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// What it can do that TIDE can use, by the call that shows it.
const ABILITIES: [(&str, &str); 3] = [
    ("ncclCommWindowRegister", "windows"),
    ("ncclDevCommCreate", "device communicators (device path)"),
    ("ncclPutSignal", "host RMA (host path)"),
];

/// An NCCL library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nccl {
    /// Where it was found.
    pub place: String,
    /// `(major, minor, patch)`; `None` if it does not say.
    pub version: Option<(u32, u32, u32)>,
    /// What it lacks, in words.
    pub lacks: Vec<&'static str>,
}

/// The first NCCL that loads: the one that `TIDE_NCCL_LIB` names, the loader's, or one among Python's packages.
pub fn find() -> Option<Nccl> {
    let named = std::env::var_os("TIDE_NCCL_LIB").map(PathBuf::from);
    let by_loader = SONAMES.iter().map(PathBuf::from);
    let in_packages = package_folders().into_iter().map(|p| p.join("nvidia/nccl/lib").join(SONAMES[0]));
    let in_packages = in_packages.filter(|p| p.is_file());
    named.into_iter().chain(by_loader).chain(in_packages).find_map(|path| examine(&path))
}

fn examine(path: &Path) -> Option<Nccl> {
    // SAFETY: runs the initialisers of an NCCL library, which start nothing.
    let library = unsafe { Library::new(path) }.ok()?;
    let version = stated_version(&library);
    let has = |symbol: &str| {
        let symbol = format!("{symbol}\0");
        // SAFETY: looked up, not called.
        unsafe { library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_ok()
    };
    let lacks = ABILITIES.iter().filter(|(symbol, _)| !has(symbol)).map(|(_, ability)| *ability).collect();
    let nccl = Nccl { place: path.display().to_string(), version, lacks };
    // It may have left threads and handlers behind: unloading it gains nothing.
    std::mem::forget(library);
    Some(nccl)
}

fn stated_version(library: &Library) -> Option<(u32, u32, u32)> {
    // SAFETY: NCCL declares it so: `ncclResult_t ncclGetVersion(int*)`.
    let call = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0") }.ok()?;
    let mut code = 0;
    // SAFETY: `code` outlives the call, which needs no GPU.
    let result = unsafe { call(&mut code) };
    (result == 0).then(|| decode(code.max(0) as u32))
}

/// NCCL's number for a version, since 2.9: 22803 is 2.28.3.
fn decode(code: u32) -> (u32, u32, u32) {
    if code < 10_000 {
        (code / 1000, code / 100 % 10, code % 100)
    } else {
        (code / 10_000, code / 100 % 100, code % 100)
    }
}

/// Where Python may keep its packages, without asking a Python.
fn package_folders() -> Vec<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
    let mut folders: Vec<PathBuf> =
        variable("PYTHONPATH").map(|v| std::env::split_paths(&v).collect()).unwrap_or_default();
    let home = variable("HOME").map(|h| PathBuf::from(h).join(".local"));
    let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|n| variable(n)).map(PathBuf::from);
    let prefixes = prefixes.chain(home).chain(["/usr/local", "/usr", "/opt/conda"].map(PathBuf::from));
    for prefix in prefixes {
        let lib = prefix.join("lib");
        let Ok(entries) = std::fs::read_dir(&lib) else { continue };
        let pythons: BTreeSet<OsString> =
            entries.flatten().map(|e| e.file_name()).filter(|n| n.to_string_lossy().starts_with("python")).collect();
        for python in pythons {
            folders.extend(["site-packages", "dist-packages"].map(|f| lib.join(&python).join(f)));
        }
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_nccl_writes_them() {
        assert_eq!(decode(22803), (2, 28, 3));
        assert_eq!(decode(23203), (2, 32, 3));
        assert_eq!(decode(2804), (2, 8, 4));
    }

    #[test]
    fn a_file_that_is_no_library_is_passed_over() {
        assert_eq!(examine(Path::new("/dev/null")), None);
    }
}

//! Where NCCL may lie.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Names the one library to load.
pub(crate) const VARIABLE: &str = "TIDE_NCCL_LIB";

/// The library's name where packages of distributions and of Python put it.
const SONAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// What to hand to the loader, in order: its own path, then Python's packages.
pub(crate) fn candidates() -> Vec<PathBuf> {
    let by_loader = SONAMES.iter().map(PathBuf::from);
    let in_packages = package_folders().into_iter().map(|p| p.join("nvidia/nccl/lib").join(SONAMES[0]));
    by_loader.chain(in_packages.filter(|p| p.is_file())).collect()
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

/// The file that was mapped at `address`, where the system tells.
pub(crate) fn mapped_file(address: usize) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| file_at(line, address))
}

/// A line of the maps is `start-end mode offset device inode  path`.
fn file_at(line: &str, address: usize) -> Option<PathBuf> {
    let (range, _) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let bound = |text| usize::from_str_radix(text, 16).ok();
    let path = Path::new(line.get(line.find('/')?..)?);
    (bound(start)?..bound(end)?).contains(&address).then(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_found_by_an_address_within_it() {
        let line = "7f10-7f20 r-xp 00000000 fe:00 1234    /opt/some where/libnccl.so.2";
        assert_eq!(file_at(line, 0x7f10).unwrap(), Path::new("/opt/some where/libnccl.so.2"));
        assert_eq!(file_at(line, 0x7f20), None);
        assert_eq!(file_at("7f10-7f20 rw-p 00000000 00:00 0", 0x7f10), None);
    }

    #[test]
    fn this_program_is_mapped_where_its_functions_are() {
        let here = mapped_file(this_program_is_mapped_where_its_functions_are as fn() as usize);
        assert_eq!(here.unwrap(), std::env::current_exe().unwrap());
    }
}

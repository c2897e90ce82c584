//! Files that a run leaves: written under a temporary name, renamed when they are whole.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use safetensors::tensor::Dtype as FileDtype;
use tide_gpu::plan::{Rank, RankRange};

use crate::failure::usage;
use crate::model_file::io_reason;

/// Bytes of the number that a safetensors file starts with.
const LENGTH_BYTES: u64 = 8;
/// What a header's length is a multiple of.
const HEADER_ALIGN: usize = 8;

/// One tensor of a file to be written.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its type in the file.
    pub dtype: FileDtype,
    /// Its shape.
    pub shape: Vec<u64>,
}

impl Entry {
    fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * (self.dtype.bitsize() as u64 / 8)
    }
}

/// A file under a temporary name, which goes away unless [`Pending::keep`] is called.
#[derive(Debug)]
struct Pending {
    file: File,
    partial: PathBuf,
    path: PathBuf,
}

impl Pending {
    fn create(path: &Path) -> Result<Self> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".partial-{}", std::process::id()));
        let partial = path.with_file_name(name);
        let file = File::create(&partial).map_err(|e| usage(format!("{}: {}", path.display(), io_reason(&e))))?;
        Ok(Self { file, partial, path: path.to_owned() })
    }

    fn keep(self) -> Result<()> {
        std::fs::rename(&self.partial, &self.path)
            .map_err(|e| usage(format!("{}: {}", self.path.display(), io_reason(&e))))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        // Gone already where the file was kept.
        let _ = std::fs::remove_file(&self.partial);
    }
}

/// Writes `text` to `path`: a regular file whole or not at all, through a link to where it leads; a device or a pipe as it
/// is, for its place is not ours to take.
///
/// # Errors
/// The file cannot be written; the sentence names it.
pub fn write_text(path: &Path, text: &str) -> Result<()> {
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if is_special(&target) {
        let write = || std::fs::OpenOptions::new().write(true).open(&target)?.write_all(text.as_bytes());
        return write().map_err(|e| usage(format!("{}: {}", path.display(), io_reason(&e))));
    }
    let pending = Pending::create(&target)?;
    pending.file.write_all_at(text.as_bytes(), 0).with_context(|| path.display().to_string())?;
    pending.keep()
}

/// Whether something that is neither a file nor a directory is there.
fn is_special(path: &Path) -> bool {
    path.metadata().is_ok_and(|m| !m.is_file() && !m.is_dir())
}

/// Checks that files can be made in a directory, by making one that goes away at once.
fn probe(option: &str, path: &Path, dir: &Path) -> Result<()> {
    let probed = Pending::create(&dir.join("tide-bench")).map(drop);
    probed.map_err(|_| usage(format!("{option} {}: no file can be written in {}", path.display(), dir.display())))
}

/// Checks that a file can be written at `path`, and leaves nothing there.
///
/// # Errors
/// One sentence that names `option`.
pub fn check_file(option: &str, path: &Path) -> Result<()> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if path.is_dir() {
        return Err(usage(format!("{option} {}: is a directory", path.display())));
    }
    if !parent.is_dir() {
        return Err(usage(format!("{option} {}: the directory {} does not exist", path.display(), parent.display())));
    }
    if path.as_os_str().is_empty() || path.to_string_lossy().ends_with('/') {
        return Err(usage(format!("{option} {}: names no file", path.display())));
    }
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if is_special(&target) { Ok(()) } else { probe(option, path, target.parent().unwrap_or(parent)) }
}

/// Checks that `dir` is a directory or can be made one, in which every rank's files can be written; makes nothing.
///
/// # Errors
/// One sentence that names `option`.
pub fn check_dir(option: &str, dir: &Path, rank_count: u64) -> Result<()> {
    for name in (0..rank_count).flat_map(|rank| ["ag", "rs"].map(|prefix| rank_file(prefix, rank))) {
        let file = dir.join(name);
        if file.is_dir() {
            return Err(usage(format!("{option} {}: {} is a directory", dir.display(), file.display())));
        }
    }
    let existing = dir.ancestors().find(|p| p.exists() || p.as_os_str().is_empty());
    match existing {
        Some(found) if !found.as_os_str().is_empty() && !found.is_dir() => {
            Err(usage(format!("{option} {}: {} is not a directory", dir.display(), found.display())))
        }
        Some(found) if !found.as_os_str().is_empty() => probe(option, dir, found),
        _ => probe(option, dir, Path::new(".")),
    }
}

/// The name of a rank's file.
fn rank_file(prefix: &str, rank: u64) -> String {
    format!("{prefix}-rank{rank}.safetensors")
}

/// The files of one collective, one of each rank; they get their names once all of them are whole.
#[derive(Debug)]
pub struct RankFiles {
    ranks: RankRange,
    files: Vec<Pending>,
    offsets: Vec<u64>,
}

impl RankFiles {
    /// Creates `prefix-rank{r}.safetensors` in `dir` for each of these ranks, all with these tensors.
    ///
    /// # Errors
    /// A file cannot be made; the sentence names it.
    pub fn create(dir: &Path, prefix: &str, ranks: RankRange, entries: &[Entry]) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(|e| usage(format!("--save {}: {}", dir.display(), io_reason(&e))))?;
        let (header, offsets) = header(entries)?;
        let files = ranks.iter().map(|rank| {
            let pending = Pending::create(&dir.join(rank_file(prefix, rank.0.into())))?;
            pending.file.write_all_at(&header, 0).with_context(|| pending.path.display().to_string())?;
            Ok(pending)
        });
        Ok(Self { ranks, files: files.collect::<Result<_>>()?, offsets })
    }

    /// Writes tensor `index` of `rank`'s file.
    ///
    /// # Errors
    /// The disk is full, or gone.
    pub fn write(&self, rank: u64, index: usize, bytes: &[u8]) -> Result<()> {
        let pending = &self.files[self.ranks.index(Rank(rank as u32))];
        pending.file.write_all_at(bytes, self.offsets[index]).with_context(|| pending.path.display().to_string())
    }

    /// Gives all files their names.
    ///
    /// # Errors
    /// A name cannot be taken; the sentence says which.
    pub fn keep(self) -> Result<()> {
        self.files.into_iter().try_for_each(Pending::keep)
    }
}

/// The head of a file, and where in the file each tensor's data starts. Data stands in the order of
/// the entries, wider types first, so that every tensor is aligned to its type.
fn header(entries: &[Entry]) -> Result<(Vec<u8>, Vec<u64>)> {
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(entries[i].dtype.bitsize()));
    let mut offsets = vec![0; entries.len()];
    let mut tensors = serde_json::Map::new();
    let mut end = 0;
    for index in order {
        let entry = &entries[index];
        let start = end;
        end += entry.bytes();
        offsets[index] = start;
        let info = serde_json::json!({"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]});
        tensors.insert(entry.name.clone(), info);
    }
    let mut text = serde_json::to_vec(&tensors)?;
    text.resize(text.len().next_multiple_of(HEADER_ALIGN), b' ');
    let data_start = LENGTH_BYTES + text.len() as u64;
    offsets.iter_mut().for_each(|offset| *offset += data_start);
    let mut head = (text.len() as u64).to_le_bytes().to_vec();
    head.extend(text);
    Ok((head, offsets))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(count: u32) -> RankRange {
        RankRange::new(Rank(0), count)
    }
    use crate::model_file::ModelFile;
    use crate::testing::Scratch;

    fn entries() -> Vec<Entry> {
        let entry = |name: &str, dtype, shape: &[u64]| Entry { name: name.into(), dtype, shape: shape.to_vec() };
        vec![
            entry("mask", FileDtype::BOOL, &[3]),
            entry("w", FileDtype::F32, &[2, 1]),
            entry("none", FileDtype::F32, &[0, 7]),
            entry("scale", FileDtype::F8_E8M0, &[1]),
        ]
    }

    #[test]
    fn what_is_saved_can_be_read_back() {
        let dir = Scratch::new();
        let files = RankFiles::create(&dir.path("new/deep"), "rs", ranks(2), &entries()).unwrap();
        for rank in 0..2 {
            files.write(rank, 0, &[1, 0, 1]).unwrap();
            files.write(rank, 1, &[rank as u8; 8]).unwrap();
            files.write(rank, 3, &[127]).unwrap();
        }
        files.keep().unwrap();
        let model = ModelFile::open(&dir.path("new/deep/rs-rank1.safetensors")).unwrap();
        let names: Vec<&str> = model.tensors().iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["w", "none", "mask", "scale"]);
        assert_eq!((model.data(0), model.data(2), model.data(3)), (&[1_u8; 8][..], &[1, 0, 1][..], &[127][..]));
        assert_eq!(model.tensors()[1].shape, [0, 7]);
        assert_eq!(std::fs::read_dir(dir.path("new/deep")).unwrap().count(), 2);
    }

    #[test]
    fn unfinished_files_leave_no_trace() {
        let dir = Scratch::new();
        drop(RankFiles::create(dir.dir(), "ag", ranks(3), &entries()).unwrap());
        assert_eq!(std::fs::read_dir(dir.dir()).unwrap().count(), 0);
    }

    #[test]
    fn paths_that_cannot_be_written_are_refused_beforehand() {
        let dir = Scratch::new();
        let file = dir.file("plain", b"x");
        assert!(
            check_dir("--save", &file.join("below"), 2).unwrap_err().to_string().contains("plain is not a directory")
        );
        assert!(check_dir("--save", &dir.path("a/b/c"), 2).is_ok());
        assert!(check_file("--json", &dir.path("none/out.json")).unwrap_err().to_string().contains("does not exist"));
        assert!(check_file("--json", dir.dir()).unwrap_err().to_string().contains("is a directory"));
        assert!(check_file("--json", Path::new("out.json")).is_ok());
    }

    #[test]
    fn text_replaces_text_as_a_whole() {
        let dir = Scratch::new();
        let file = dir.file("out.json", b"old");
        write_text(&file, "new").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"new");
        assert_eq!(std::fs::read_dir(dir.dir()).unwrap().count(), 1);
    }
}

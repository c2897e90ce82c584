//! The stand-in for NCCL: a copy of its file, and what it is told and asked.

use nccl_gin::host::Library;
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A copy of the stand-in: settings, counters and log are its own.
pub struct Fake {
    folder: PathBuf,
    path: PathBuf,
    control: libloading::Library,
}

impl Fake {
    pub fn new() -> Self {
        Self::from_image(&image())
    }

    /// One whose symbol `name` the loader does not find: it bears another name.
    pub fn without(name: &str) -> Self {
        let mut image = image();
        let wanted = [b"\0", name.as_bytes(), b"\0"].concat();
        let places: Vec<usize> = (0..image.len() - wanted.len()).filter(|i| image[*i..].starts_with(&wanted)).collect();
        assert!(!places.is_empty(), "the stand-in has no symbol {name}");
        for place in places {
            image[place + 1] = b'x';
        }
        Self::from_image(&image)
    }

    fn from_image(image: &[u8]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // ORDER: relaxed, a number that is given once.
        let name = format!("nccl-gin-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("libnccl.so.2");
        std::fs::write(&path, image).unwrap();
        // SAFETY: the stand-in has no initialisers.
        let control = unsafe { libloading::Library::new(&path) }.unwrap();
        Self { folder, path, control }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn library(&self) -> Library {
        Library::open(&self.path).unwrap()
    }

    pub fn set(&self, name: &str, value: i64) {
        let (name, call) = (text(name), self.get::<unsafe extern "C" fn(*const c_char, i64)>("fake_set"));
        // SAFETY: declared so in the stand-in; the string ends with zero.
        unsafe { call(name.as_ptr(), value) };
    }

    pub fn count(&self, kind: &str) -> i64 {
        let (kind, call) = (text(kind), self.get::<unsafe extern "C" fn(*const c_char) -> i64>("fake_count"));
        // SAFETY: as `set`.
        unsafe { call(kind.as_ptr()) }
    }

    pub fn fail(&self, call: &str, nth: i64, code: i32) {
        let (name, call) = (text(call), self.get::<unsafe extern "C" fn(*const c_char, i64, c_int)>("fake_fail"));
        // SAFETY: as `set`.
        unsafe { call(name.as_ptr(), nth, code) };
    }

    pub fn slow(&self, call: &str, polls: i64) {
        let (name, call) = (text(call), self.get::<unsafe extern "C" fn(*const c_char, i64)>("fake_slow"));
        // SAFETY: as `set`.
        unsafe { call(name.as_ptr(), polls) };
    }

    /// The calls of a rank; -1: those of none.
    pub fn log(&self, rank: i64) -> Vec<String> {
        let call = self.get::<unsafe extern "C" fn(i64, *mut u8, usize) -> usize>("fake_log");
        let mut buffer = vec![0; 1 << 20];
        // SAFETY: as `set`; the buffer has the stated size.
        let length = unsafe { call(rank, buffer.as_mut_ptr(), buffer.len()) };
        String::from_utf8(buffer[..length].to_vec()).unwrap().lines().map(str::to_owned).collect()
    }

    /// The calls of a rank whose names contain one of `names`, without their arguments.
    pub fn calls(&self, rank: i64, names: &[&str]) -> Vec<String> {
        let name = |line: String| line.split('(').next().unwrap_or_default().to_owned();
        self.log(rank).into_iter().map(name).filter(|call| names.iter().any(|n| call.contains(n))).collect()
    }

    /// Fails unless all that was made is gone, in a right way.
    pub fn assert_clean(&self) {
        for kind in ["memory", "comms", "windows", "device_comms", "misuses"] {
            assert_eq!(self.count(kind), 0, "{kind}; rank 0 called {:#?}", self.log(0));
        }
    }

    fn get<T: Copy>(&self, name: &str) -> T {
        // SAFETY: each caller gives the type that the stand-in declares.
        *unsafe { self.control.get::<T>(name.as_bytes()) }.unwrap()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// The stand-in's file: cargo builds it beside the tests.
fn image() -> Vec<u8> {
    let path = std::env::current_exe().unwrap().with_file_name("libfake_nccl.so");
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn text(text: &str) -> CString {
    CString::new(text).unwrap()
}

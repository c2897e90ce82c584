//! A loaded NCCL, and what it is able to do.

use super::error::{NcclError, Result, ResultCode};
use super::locate::{self, VARIABLE};
use super::sys;
use super::version::Version;
use std::ffi::{CStr, c_int};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a library may be able to do. Below an ability's oldest version its calls are not used even where they exist: the versions
/// before it corrupt data, hang or have other signatures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ability {
    /// Communicators and collectives. A library without it is not loaded.
    Collectives,
    /// [`Memory`](super::Memory) and [`Window`](super::Window).
    Windows,
    /// Addresses of other ranks' windows.
    Pointers,
    /// [`Properties`](super::Properties).
    Properties,
    /// Put, signal and wait, enqueued by the host.
    HostRma,
    /// [`DeviceComm`](super::DeviceComm).
    DeviceComm,
}

impl Ability {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Collectives, Self::Windows, Self::Pointers, Self::Properties, Self::HostRma, Self::DeviceComm];

    /// Its name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Collectives => "a communicator",
            Self::Windows => "a window",
            Self::Pointers => "an address of another rank's window",
            Self::Properties => "a communicator's properties",
            Self::HostRma => "host RMA",
            Self::DeviceComm => "a device communicator",
        }
    }

    /// The oldest version that it is used with.
    pub const fn floor(self) -> Version {
        match self {
            Self::Collectives | Self::Windows => Version::OLDEST,
            Self::Pointers | Self::Properties => Version(22907),
            Self::HostRma => Version(23102),
            Self::DeviceComm => Version(23203),
        }
    }
}

/// An NCCL library. It stays loaded until the process ends: NCCL leaves threads and handlers behind.
#[derive(Debug, Clone)]
pub struct Library {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    version: Version,
    core: sys::Core,
    windows: Result<sys::Windows>,
    pointers: Result<sys::Pointers>,
    inquiry: Result<sys::Inquiry>,
    host_rma: Result<sys::HostRma>,
    devices: Result<sys::Devices>,
}

impl Library {
    /// Loads the library that `TIDE_NCCL_LIB` names, and only that one; without the variable (or with an empty one) the first usable
    /// among `libnccl.so.2` and `libnccl.so` on the loader's path and `nvidia/nccl/lib/libnccl.so.2` in Python's packages.
    ///
    /// Two different NCCLs in one process are asking for trouble: load one.
    ///
    /// # Errors
    ///
    /// `Load` if none loads, `TooOld` below 2.28, `MissingSymbol` if it has no communicators.
    pub fn load() -> Result<Self> {
        match std::env::var_os(VARIABLE).filter(|v| !v.is_empty()) {
            Some(path) => Self::named(Path::new(&path)),
            None => Self::first_of(&locate::candidates()),
        }
    }

    /// The library of [`VARIABLE`].
    fn named(path: &Path) -> Result<Self> {
        Self::open(path).map_err(|error| match error {
            NcclError::Load { reason } => NcclError::Load {
                reason: format!("{VARIABLE} names the only library to load, and {reason}; unset it to search"),
            },
            other => other,
        })
    }

    fn first_of(candidates: &[PathBuf]) -> Result<Self> {
        let mut tried = Vec::new();
        let mut unusable = None;
        for path in candidates {
            match Self::open(path) {
                Ok(library) => return Ok(library),
                Err(NcclError::Load { reason }) => tried.push(reason),
                Err(other) => unusable = unusable.or(Some(other)),
            }
        }
        let how = format!("set {VARIABLE}, or install NCCL");
        Err(unusable.unwrap_or_else(|| NcclError::Load { reason: format!("{}; {how}", tried.join("; ")) }))
    }

    /// Loads the library at `path`.
    ///
    /// # Errors
    ///
    /// `Load` if the loader refuses it, `TooOld` below 2.28, `MissingSymbol` if it has no communicators.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        // SAFETY: runs the initialisers of an NCCL library, which start nothing.
        let library = unsafe { libloading::Library::new(path) }.map_err(|error| {
            // The loader's own words are one level down.
            let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            NcclError::Load { reason: format!("{} does not load ({why})", path.display()) }
        })?;
        let library = ManuallyDrop::new(library);
        let (version, address) = stated_version(&library).ok_or_else(|| NcclError::Load {
            reason: format!("{} does not tell its version: it is no NCCL", path.display()),
        })?;
        let path = locate::mapped_file(address).unwrap_or_else(|| path.to_owned());
        let found = Found { path: &path, version, library: &library };
        let inner = Inner {
            core: found.group(Ability::Collectives, sys::Core::load)?,
            windows: found.group(Ability::Windows, sys::Windows::load),
            pointers: found.group(Ability::Pointers, sys::Pointers::load),
            inquiry: found.group(Ability::Properties, sys::Inquiry::load),
            host_rma: found.group(Ability::HostRma, sys::HostRma::load),
            devices: found.group(Ability::DeviceComm, sys::Devices::load),
            version,
            path,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The version that it states.
    pub fn version(&self) -> Version {
        self.inner.version
    }

    /// The file that was loaded; where the system does not tell, the name that was asked for.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// NCCL's device code as bitcode, if the package has it. Only the file of the very package may be used: device code and library of
    /// different versions do not fit together.
    pub fn device_bitcode(&self) -> Option<PathBuf> {
        Some(self.path().with_file_name("libnccl_device.bc")).filter(|p| p.is_file())
    }

    /// Fails, in words, if the library lacks an ability.
    ///
    /// # Errors
    ///
    /// `TooOld` or `MissingSymbol`.
    pub fn require(&self, ability: Ability) -> Result<()> {
        match ability {
            Ability::Collectives => Ok(()),
            Ability::Windows => self.windows().map(drop),
            Ability::Pointers => self.pointers().map(drop),
            Ability::Properties => self.inquiry().map(drop),
            Ability::HostRma => self.host_rma().map(drop),
            Ability::DeviceComm => self.devices().map(drop),
        }
    }

    /// The abilities that it lacks, each with the reason.
    pub fn lacks(&self) -> Vec<(Ability, NcclError)> {
        Ability::ALL.into_iter().filter_map(|a| Some((a, self.require(a).err()?))).collect()
    }

    /// What NCCL says of its last error in this process; empty if nothing.
    pub fn last_error(&self) -> String {
        // SAFETY: NCCL accepts a null communicator here.
        let text = unsafe { (self.core().ncclGetLastError)(std::ptr::null_mut()) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: NCCL gives a string that ends with zero and lives as long as the library; a concurrent error may change its text only.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
    }

    /// NCCL's own words for a result.
    pub fn describe(&self, code: ResultCode) -> String {
        // SAFETY: NCCL answers for any number.
        let text = unsafe { (self.core().ncclGetErrorString)(code.0) };
        if text.is_null() {
            return code.name().to_owned();
        }
        // SAFETY: a constant of the library.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// The functions of communicators.
    pub fn core(&self) -> &sys::Core {
        &self.inner.core
    }

    /// The functions of windows.
    ///
    /// # Errors
    ///
    /// As [`require`](Self::require).
    pub fn windows(&self) -> Result<&sys::Windows> {
        self.inner.windows.as_ref().map_err(Clone::clone)
    }

    /// The functions that give addresses.
    ///
    /// # Errors
    ///
    /// As [`require`](Self::require).
    pub fn pointers(&self) -> Result<&sys::Pointers> {
        self.inner.pointers.as_ref().map_err(Clone::clone)
    }

    /// The function that gives properties.
    ///
    /// # Errors
    ///
    /// As [`require`](Self::require).
    pub fn inquiry(&self) -> Result<&sys::Inquiry> {
        self.inner.inquiry.as_ref().map_err(Clone::clone)
    }

    /// The functions of host RMA.
    ///
    /// # Errors
    ///
    /// As [`require`](Self::require).
    pub fn host_rma(&self) -> Result<&sys::HostRma> {
        self.inner.host_rma.as_ref().map_err(Clone::clone)
    }

    /// The functions of device communicators.
    ///
    /// # Errors
    ///
    /// As [`require`](Self::require).
    pub fn devices(&self) -> Result<&sys::Devices> {
        self.inner.devices.as_ref().map_err(Clone::clone)
    }

    /// Whether both are the same loaded library.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.path() == other.path()
    }

    /// Turns a result other than success into an error.
    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == ResultCode::SUCCESS.0 { Ok(()) } else { Err(self.failure(call, ResultCode(code), "")) }
    }

    pub(crate) fn failure(&self, call: &'static str, code: ResultCode, hint: &'static str) -> NcclError {
        NcclError::Call { call, code, last_error: self.last_error(), hint }
    }
}

/// A library in the course of being examined.
struct Found<'a> {
    path: &'a Path,
    version: Version,
    library: &'a libloading::Library,
}

impl Found<'_> {
    fn group<T>(
        &self,
        ability: Ability,
        load: impl Fn(&libloading::Library) -> std::result::Result<T, &'static str>,
    ) -> Result<T> {
        let (path, found, needed, what) =
            (self.path.display().to_string(), self.version, ability.floor(), ability.name());
        if found < needed {
            return Err(NcclError::TooOld { path, found, needed, what });
        }
        load(self.library).map_err(|symbol| NcclError::MissingSymbol { symbol, path, found, needed, what })
    }
}

/// The version that a library states, and the address of the function that does.
fn stated_version(library: &libloading::Library) -> Option<(Version, usize)> {
    // SAFETY: declared so in all versions.
    let call = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0") }.ok()?;
    let mut code = 0;
    // SAFETY: `code` outlives the call, which needs no GPU.
    let result = unsafe { call(&mut code) };
    (result == 0).then(|| (Version(code.max(0) as u32), *call as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_library_does_not_load() {
        let error = Library::open("/dev/null").unwrap_err();
        assert!(matches!(&error, NcclError::Load { reason } if reason.contains("/dev/null")), "{error}");
        let error = Library::open("/no/such/file").unwrap_err().to_string();
        assert!(error.contains("cannot open shared object file"), "the loader's words: {error}");
    }

    #[test]
    fn a_library_that_was_named_and_does_not_load_says_who_named_it() {
        let error = Library::named(Path::new("/no/such/libnccl.so.2")).unwrap_err().to_string();
        assert!(error.contains(VARIABLE) && error.contains("/no/such/libnccl.so.2"), "{error}");
    }

    #[test]
    fn a_search_that_finds_nothing_names_what_it_tried() {
        let places = ["/no/such/a.so", "/no/such/b.so"].map(PathBuf::from);
        let error = Library::first_of(&places).unwrap_err().to_string();
        assert!(error.contains("a.so") && error.contains("b.so") && error.contains(VARIABLE), "{error}");
    }

    #[test]
    fn abilities_that_need_later_versions_come_later() {
        assert!(Ability::ALL.map(Ability::floor).is_sorted());
    }
}

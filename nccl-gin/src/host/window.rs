//! Windows: memory that a communicator's ranks, and its network cards, may write to.

use super::comm::{Comm, CommInner, Landing, Retired, State};
use super::error::{NcclError, Result};
use super::memory::{DevicePtr, Memory};
use super::sys;
use std::ffi::c_void;
use std::ops::{BitOr, Range};
use std::sync::{Arc, Weak};

/// What a window is registered for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WindowFlags(pub i32);

impl WindowFlags {
    /// No symmetric addresses: collectives only.
    pub const DEFAULT: Self = Self(0);
    /// Symmetric addresses: what device communicators and host RMA work with.
    pub const COLL_SYMMETRIC: Self = Self(1);
    /// Writes arrive in order: what signals at addresses of a window need. From 2.29.
    pub const STRICT_ORDERING: Self = Self(2);
    /// For GIN alone. From 2.32.3.
    pub const GIN_ONLY: Self = Self(4);

    /// Whether all flags of `other` are set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for WindowFlags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A registration. Clones are the same window; the last one deregisters it, and then lets go of the memory.
///
/// All ranks register and drop their windows in the same order. While a device communicator lives, the end of a window waits for its.
#[derive(Debug, Clone)]
pub struct Window {
    inner: Arc<WindowInner>,
}

#[derive(Debug)]
struct WindowInner {
    raw: sys::ncclWindow_t,
    start: DevicePtr,
    bytes: usize,
    flags: WindowFlags,
    memory: Memory,
    comm: Arc<CommInner>,
}

// SAFETY: the handle belongs to no thread, and is handed to NCCL under the communicator's lock only.
unsafe impl Send for WindowInner {}
// SAFETY: as above.
unsafe impl Sync for WindowInner {}

/// A communicator's note of a window.
#[derive(Debug)]
pub(crate) struct Entry {
    start: u64,
    bytes: usize,
    flags: WindowFlags,
    owner: Weak<WindowInner>,
}

/// What a window's range must be a multiple of, from the beginning of its allocation.
const ALIGNMENT: usize = 4096;

impl Comm {
    /// Registers all of `memory`. All ranks call it, in the same order of windows; it returns when all have. If this very memory is
    /// registered already with the same flags, it gives that window.
    ///
    /// # Errors
    ///
    /// `NullWindow` where there is no symmetric memory, `Usage` for memory that overlaps another window (NCCL finds windows by address),
    /// `Timeout`, `Aborted`, `Call`.
    pub fn register(&self, memory: &Memory, flags: WindowFlags) -> Result<Window> {
        self.register_range(memory, 0..memory.bytes(), flags)
    }

    /// Registers a part of `memory`, bytes; it begins at a multiple of 4096. As [`register`](Self::register) otherwise.
    ///
    /// # Errors
    ///
    /// As [`register`](Self::register), and `Usage` for a range that `memory` does not have.
    pub fn register_range(&self, memory: &Memory, range: Range<usize>, flags: WindowFlags) -> Result<Window> {
        let library = self.library();
        let functions = library.windows()?;
        check_range(memory, &range)?;
        if !memory.library().is(library) {
            return Err(NcclError::Usage("memory of another NCCL library".to_owned()));
        }
        let (start, bytes) = (memory.pointer().offset(range.start as u64), range.len());
        let mut state = self.inner.lock()?;
        if let Some(inner) = known(&mut state, start.0, bytes, flags)? {
            return Ok(Window { inner });
        }
        const CALL: &str = "ncclCommWindowRegister";
        let raw = state.raw()?;
        let window = Landing::new(std::ptr::null_mut());
        // SAFETY: the communicator lives and is locked; the range is allocated; `window` outlives whatever is left under way.
        let code =
            unsafe { (functions.ncclCommWindowRegister)(raw, start.as_mut_ptr(), bytes, window.pointer(), flags.0) };
        let settled = self.inner.settle(&mut state, CALL, code);
        let window = window.collect(&settled);
        settled?;
        let raw = window.unwrap_or(std::ptr::null_mut());
        if raw.is_null() {
            return Err(NcclError::NullWindow { reason: self.inner.why_no_windows() });
        }
        let comm = Arc::clone(&self.inner);
        let inner = Arc::new(WindowInner { raw, start, bytes, flags, memory: memory.clone(), comm });
        state.registered.push(Entry { start: start.0, bytes, flags, owner: Arc::downgrade(&inner) });
        Ok(Window { inner })
    }
}

fn check_range(memory: &Memory, range: &Range<usize>) -> Result<()> {
    let bytes = memory.bytes();
    if range.is_empty() || range.end > bytes {
        return Err(NcclError::Usage(format!("a window of bytes {range:?} on an allocation of {bytes}")));
    }
    if !range.start.is_multiple_of(ALIGNMENT) {
        return Err(NcclError::Usage(format!("a window at byte {}, which is no multiple of {ALIGNMENT}", range.start)));
    }
    Ok(())
}

/// The window that is registered on this very range, if there is one; an error if one overlaps it or differs from it.
fn known(state: &mut State, start: u64, bytes: usize, flags: WindowFlags) -> Result<Option<Arc<WindowInner>>> {
    state.registered.retain(|entry| entry.owner.strong_count() > 0);
    let end = start + bytes as u64;
    let overlaps = |entry: &&Entry| entry.start < end && start < entry.start + entry.bytes as u64;
    let Some(entry) = state.registered.iter().find(overlaps) else { return Ok(None) };
    if (entry.start, entry.bytes, entry.flags) == (start, bytes, flags)
        && let Some(window) = entry.owner.upgrade()
    {
        return Ok(Some(window));
    }
    let (other_start, other_end) = (entry.start, entry.start + entry.bytes as u64);
    Err(NcclError::Usage(format!(
        "a window {start:#x}..{end:#x} with flags {} beside the registered one {other_start:#x}..{other_end:#x} with flags {}: windows \
         of a communicator must not overlap",
        flags.0, entry.flags.0
    )))
}

impl Window {
    /// What a kernel is given for it: the address of its description in device memory (`ncclWindow_t`).
    pub fn handle(&self) -> DevicePtr {
        DevicePtr::from_raw(self.inner.raw.cast())
    }

    /// Where this rank's part begins.
    pub fn pointer(&self) -> DevicePtr {
        self.inner.start
    }

    /// How large this rank's part is.
    pub fn bytes(&self) -> usize {
        self.inner.bytes
    }

    /// What it was registered for.
    pub fn flags(&self) -> WindowFlags {
        self.inner.flags
    }

    /// The memory that it keeps.
    pub fn memory(&self) -> &Memory {
        &self.inner.memory
    }

    /// Whether it belongs to `comm`.
    pub fn belongs_to(&self, comm: &Comm) -> bool {
        self.is_of(&comm.inner)
    }

    pub(crate) fn is_of(&self, comm: &Arc<CommInner>) -> bool {
        Arc::ptr_eq(&self.inner.comm, comm)
    }

    pub(crate) fn raw(&self) -> sys::ncclWindow_t {
        self.inner.raw
    }

    /// The address, for this GPU's loads and stores, of byte `offset` in the window of `lsa_rank`: a rank within the group of ranks that
    /// reach each other so, not within the communicator.
    ///
    /// # Errors
    ///
    /// `TooOld` before 2.29.7, `Usage` beyond the window, `Call` for a rank that the group does not have.
    pub fn lsa_pointer(&self, lsa_rank: u32, offset: usize) -> Result<DevicePtr> {
        const CALL: &str = "ncclGetLsaDevicePointer";
        let functions = self.library().pointers()?;
        let pointer = self.pointer_by(CALL, offset, |window, out| {
            // SAFETY: the window is registered and its communicator locked; `out` outlives the call.
            unsafe { (functions.ncclGetLsaDevicePointer)(window, offset, index(lsa_rank), out) }
        })?;
        pointer.ok_or_else(|| NcclError::Unsupported {
            what: "an LSA pointer",
            reason: format!("NCCL gave none for rank {lsa_rank} of the LSA team"),
        })
    }

    /// The address of byte `offset` in the window of rank `peer` of the communicator; `None` if this GPU does not reach it by loads and
    /// stores.
    ///
    /// # Errors
    ///
    /// As [`lsa_pointer`](Self::lsa_pointer).
    pub fn peer_pointer(&self, peer: u32, offset: usize) -> Result<Option<DevicePtr>> {
        const CALL: &str = "ncclGetPeerDevicePointer";
        let functions = self.library().pointers()?;
        self.pointer_by(CALL, offset, |window, out| {
            // SAFETY: as in `lsa_pointer`.
            unsafe { (functions.ncclGetPeerDevicePointer)(window, offset, index(peer), out) }
        })
    }

    /// The address at which a store reaches byte `offset` of all windows of the LSA group; `None` without multicast. The first call
    /// takes one of the switch's slots: where they are exhausted or forbidden NCCL fails for good, which `NCCL_NVLS_ENABLE=0` prevents.
    /// All ranks of the group call it.
    ///
    /// # Errors
    ///
    /// As [`lsa_pointer`](Self::lsa_pointer).
    pub fn multicast_pointer(&self, offset: usize) -> Result<Option<DevicePtr>> {
        const CALL: &str = "ncclGetLsaMultimemDevicePointer";
        let functions = self.library().pointers()?;
        self.pointer_by(CALL, offset, |window, out| {
            // SAFETY: as in `lsa_pointer`.
            unsafe { (functions.ncclGetLsaMultimemDevicePointer)(window, offset, out) }
        })
    }

    fn library(&self) -> &super::Library {
        &self.inner.comm.library
    }

    fn pointer_by(
        &self,
        call: &'static str,
        offset: usize,
        function: impl FnOnce(sys::ncclWindow_t, *mut *mut c_void) -> sys::ncclResult_t,
    ) -> Result<Option<DevicePtr>> {
        if offset >= self.inner.bytes {
            return Err(NcclError::Usage(format!("byte {offset} of a window of {}", self.inner.bytes)));
        }
        let comm = &self.inner.comm;
        let mut state = comm.lock()?;
        let out = Landing::new(std::ptr::null_mut());
        let code = function(self.inner.raw, out.pointer());
        let settled = comm.settle(&mut state, call, code);
        let pointer = out.collect(&settled);
        settled?;
        Ok(pointer.filter(|p| !p.is_null()).map(DevicePtr::from_raw))
    }
}

/// A rank for C. One beyond its range is one that no communicator has.
fn index(rank: u32) -> i32 {
    i32::try_from(rank).unwrap_or(-1)
}

impl Drop for WindowInner {
    fn drop(&mut self) {
        self.comm.retire(Retired::Window(self.raw, self.memory.clone()));
    }
}

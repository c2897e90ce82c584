//! Device memory, and the two plain types that stand for CUDA's.

use super::error::{NcclError, Result};
use super::library::Library;
use super::sys;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

/// An address in device memory. Nothing is promised of what lies there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address `bytes` further on.
    pub const fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }

    pub(crate) fn from_raw(pointer: *mut c_void) -> Self {
        Self(pointer as usize as u64)
    }

    pub(crate) fn as_mut_ptr(self) -> *mut c_void {
        self.0 as usize as *mut c_void
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A `cudaStream_t`, which is a `CUstream`. Whoever enqueues on it promises that it is live and of the communicator's GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Stream(pub *mut c_void);

impl Stream {
    /// CUDA's default stream.
    pub const DEFAULT: Self = Self(std::ptr::null_mut());

    pub(crate) fn raw(self) -> sys::cudaStream_t {
        self.0.cast()
    }
}

// SAFETY: a handle, which CUDA accepts from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// Device memory that windows can be registered on. Clones are the same memory; the last one, windows included, frees it.
///
/// Freeing does not wait for a GPU that still works with it.
#[derive(Debug, Clone)]
pub struct Memory {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    library: Library,
    pointer: DevicePtr,
    bytes: usize,
    owned: bool,
}

impl Memory {
    /// `bytes` of memory of the thread's current GPU, by `ncclMemAlloc`. They are not zeroed.
    ///
    /// # Errors
    ///
    /// `Usage` for no bytes, `Call` if NCCL has none to give, the lack of [`Ability::Windows`](super::Ability::Windows).
    pub fn alloc(library: &Library, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(NcclError::Usage("an allocation of no bytes".to_owned()));
        }
        let functions = library.windows()?;
        let mut pointer = std::ptr::null_mut();
        // SAFETY: `pointer` outlives the call, which is synchronous.
        let code = unsafe { (functions.ncclMemAlloc)(&mut pointer, bytes) };
        library.check("ncclMemAlloc", code)?;
        let pointer = DevicePtr::from_raw(pointer);
        Ok(Self { inner: Arc::new(Inner { library: library.clone(), pointer, bytes, owned: true }) })
    }

    /// Memory that somebody else allocated, through CUDA's virtual memory management as windows demand it, and frees.
    ///
    /// # Safety
    ///
    /// `bytes` from `pointer` on stay allocated until this value, its clones and all windows on them are gone.
    pub unsafe fn borrowed(library: &Library, pointer: DevicePtr, bytes: usize) -> Self {
        Self { inner: Arc::new(Inner { library: library.clone(), pointer, bytes, owned: false }) }
    }

    /// Where it begins.
    pub fn pointer(&self) -> DevicePtr {
        self.inner.pointer
    }

    /// How much was asked for, bytes.
    pub fn bytes(&self) -> usize {
        self.inner.bytes
    }

    pub(crate) fn library(&self) -> &Library {
        &self.inner.library
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        if let Ok(functions) = self.library.windows() {
            // SAFETY: came from `ncclMemAlloc`, is freed once, and no window holds it any more. A failure leaves nothing to be done.
            unsafe { (functions.ncclMemFree)(self.pointer.as_mut_ptr()) };
        }
    }
}

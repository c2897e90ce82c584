//! The raw storey: every driver call that this back end makes, each giving a [`Status`] instead of a panic.
//!
//! The bindings load libcuda at run time and panic where the library or a symbol is missing. Both are fenced off here: a
//! [`Driver`] exists only once the library was found and every symbol of the table below was looked up, and only a
//! [`Driver`] has the calls. A driver call that is not in the table cannot be made.

use crate::error::{Result, TideError};
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;

/// Why the driver cannot be used on this machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Absence {
    /// There is no driver library.
    #[error("the NVIDIA driver library (libcuda.so.1) was not found")]
    NoLibrary,
    /// The driver is too old for a call that is needed.
    #[error("the NVIDIA driver lacks {symbol} (it is of CUDA {}; 12.8 or later is needed)", Version(*.driver))]
    NoSymbol {
        /// The missing call.
        symbol: &'static str,
        /// CUDA version of the driver as it states it (12040 for 12.4), 0 if it does not.
        driver: i32,
    },
    /// The library is there, but does not start.
    #[error("the NVIDIA driver does not start: {detail}")]
    NotStarted {
        /// What it says.
        detail: String,
    },
    /// The driver works and has no GPU.
    #[error("the NVIDIA driver finds no GPU")]
    NoDevice,
}

impl From<Absence> for TideError {
    fn from(absence: Absence) -> Self {
        let needed = match absence {
            Absence::NoSymbol { .. } => "a driver of CUDA 12.8 or later",
            _ => "an NVIDIA GPU with its driver",
        };
        Self::Unsupported { needed: needed.to_owned(), found: absence.to_string() }
    }
}

/// A CUDA version as drivers state it: 13000 is 13.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version(pub i32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// How a call ended.
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct Status {
    call: &'static str,
    code: sys::CUresult,
}

impl Status {
    /// Whether it ended with this code.
    pub fn is(self, code: sys::CUresult) -> bool {
        self.code == code
    }

    /// An error unless it succeeded.
    ///
    /// # Errors
    /// [`TideError::Driver`] with the call, the code's name and the driver's words for it.
    pub fn ok(self) -> Result<()> {
        if self.is(sys::CUresult::CUDA_SUCCESS) { Ok(()) } else { Err(self.error("")) }
    }

    /// `Some` on success, `None` on "not ready".
    ///
    /// # Errors
    /// As [`Status::ok`] for everything else.
    pub fn ready(self) -> Result<bool> {
        if self.is(sys::CUresult::CUDA_ERROR_NOT_READY) {
            return Ok(false);
        }
        self.ok().map(|()| true)
    }

    /// The error that it stands for, with `context` appended.
    pub fn error(self, context: &str) -> TideError {
        let mut detail = format!("{} ({})", describe(self.code, Text::Name), self.code as u32);
        let text = describe(self.code, Text::Sentence);
        if !text.is_empty() {
            detail.push_str(": ");
            detail.push_str(&text);
        }
        if !context.is_empty() {
            detail.push_str("; ");
            detail.push_str(context);
        }
        TideError::Driver { call: self.call.to_owned(), detail }
    }
}

enum Text {
    Name,
    Sentence,
}

/// The driver's own text for a code.
fn describe(code: sys::CUresult, which: Text) -> String {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: a `Status` exists only after `Driver::load` has found both symbols; `text` outlives the call.
    let found = unsafe {
        match which {
            Text::Name => sys::cuGetErrorName(code, &mut text),
            Text::Sentence => sys::cuGetErrorString(code, &mut text),
        }
    };
    if found != sys::CUresult::CUDA_SUCCESS || text.is_null() {
        return String::new();
    }
    // SAFETY: the driver gives a static, terminated string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Proof that libcuda is loaded and has every call below. Nothing of it is stored: the library stays loaded.
#[derive(Debug, Clone, Copy)]
pub struct Driver {
    _loaded: (),
}

macro_rules! driver_calls {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),* $(,)?);)+) => {
        /// The driver calls that this back end makes.
        pub const SYMBOLS: &[&str] = &["cuGetErrorName", "cuGetErrorString", $(stringify!($name)),+];

        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl Driver {
            $(
                $(#[$doc])*
                ///
                /// # Safety
                /// As the driver's documentation of the call of this name states.
                pub unsafe fn $name(self, $($argument: $type),*) -> Status {
                    // SAFETY: the symbol is there (`Driver::load` looked it up); the rest is the caller's promise.
                    let code = unsafe { sys::$name($($argument),*) };
                    Status { call: stringify!($name), code }
                }
            )+
        }
    };
}

driver_calls! {
    /// Starts the driver.
    cuInit(flags: c_uint);
    /// The CUDA version of the driver.
    cuDriverGetVersion(version: *mut c_int);
    /// GPUs.
    cuDeviceGetCount(count: *mut c_int);
    /// A GPU.
    cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
    /// Its name.
    cuDeviceGetName(name: *mut c_char, bytes: c_int, device: sys::CUdevice);
    /// One of its attributes.
    cuDeviceGetAttribute(value: *mut c_int, attribute: sys::CUdevice_attribute, device: sys::CUdevice);
    /// Its memory, bytes.
    cuDeviceTotalMem_v2(bytes: *mut usize, device: sys::CUdevice);
    /// Whether one GPU can be made to reach another's memory.
    cuDeviceCanAccessPeer(can: *mut c_int, device: sys::CUdevice, peer: sys::CUdevice);
    /// Takes hold of the context that all of the process share.
    cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);
    /// Lets go of it.
    cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice);
    /// Makes a context the calling thread's.
    cuCtxSetCurrent(context: sys::CUcontext);
    /// The range of stream priorities.
    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
    /// Lets the current context reach another's memory.
    cuCtxEnablePeerAccess(peer: sys::CUcontext, flags: c_uint);
    /// Allocates device memory.
    cuMemAlloc_v2(address: *mut sys::CUdeviceptr, bytes: usize);
    /// Frees it; may wait for the device.
    cuMemFree_v2(address: sys::CUdeviceptr);
    /// Allocates pinned host memory.
    cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
    /// Frees it; may wait for the device.
    cuMemFreeHost(pointer: *mut c_void);
    /// The device's address of pinned host memory.
    cuMemHostGetDevicePointer_v2(address: *mut sys::CUdeviceptr, pointer: *mut c_void, flags: c_uint);
    /// Copies from the host.
    cuMemcpyHtoDAsync_v2(to: sys::CUdeviceptr, from: *const c_void, bytes: usize, stream: sys::CUstream);
    /// Copies to the host.
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
    /// Copies between unified addresses.
    cuMemcpyAsync(to: sys::CUdeviceptr, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
    /// Copies rows.
    cuMemcpy2DAsync_v2(copy: *const sys::CUDA_MEMCPY2D, stream: sys::CUstream);
    /// Fills a run of bytes.
    cuMemsetD8Async(to: sys::CUdeviceptr, value: u8, bytes: usize, stream: sys::CUstream);
    /// Fills rows of bytes.
    cuMemsetD2D8Async(
        to: sys::CUdeviceptr,
        pitch: usize,
        value: u8,
        width: usize,
        rows: usize,
        stream: sys::CUstream,
    );
    /// Sets a word in stream order.
    cuStreamWriteValue64_v2(stream: sys::CUstream, address: sys::CUdeviceptr, value: u64, flags: c_uint);
    /// Waits for a word in stream order.
    cuStreamWaitValue64_v2(stream: sys::CUstream, address: sys::CUdeviceptr, value: u64, flags: c_uint);
    /// Makes a stream.
    cuStreamCreateWithPriority(stream: *mut sys::CUstream, flags: c_uint, priority: c_int);
    /// Gives it up; what is in it still runs.
    cuStreamDestroy_v2(stream: sys::CUstream);
    /// Whether it is empty.
    cuStreamQuery(stream: sys::CUstream);
    /// Waits for an event in stream order.
    cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
    /// Makes an event.
    cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
    /// Records it.
    cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
    /// Whether it has completed.
    cuEventQuery(event: sys::CUevent);
    /// Gives it up.
    cuEventDestroy_v2(event: sys::CUevent);
    /// Compiles and loads PTX.
    cuModuleLoadDataEx(
        module: *mut sys::CUmodule,
        image: *const c_void,
        option_count: c_uint,
        options: *mut sys::CUjit_option,
        values: *mut *mut c_void,
    );
    /// Finds an entry point.
    cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
    /// Loads an entry point now instead of at its first launch.
    cuFuncLoad(function: sys::CUfunction);
    /// Where a parameter lies and how long it is.
    cuFuncGetParamInfo(function: sys::CUfunction, index: usize, offset: *mut usize, bytes: *mut usize);
    /// An attribute of an entry point.
    cuFuncGetAttribute(value: *mut c_int, attribute: sys::CUfunction_attribute, function: sys::CUfunction);
    /// Sets one.
    cuFuncSetAttribute(function: sys::CUfunction, attribute: sys::CUfunction_attribute, value: c_int);
    /// Blocks of a kernel that a multiprocessor holds at once.
    cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: sys::CUfunction,
        block_threads: c_int,
        shared_bytes: usize,
    );
    /// Launches.
    cuLaunchKernelEx(
        config: *const sys::CUlaunchConfig,
        function: sys::CUfunction,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
}

impl Driver {
    /// Loads libcuda, looks up every symbol, starts the driver.
    ///
    /// # Errors
    /// [`Absence`], in every way but [`Absence::NoDevice`].
    pub fn load() -> Result<Self, Absence> {
        // SAFETY: runs the initialisers of the driver library, if there is one.
        if !unsafe { sys::is_culib_present() } {
            return Err(Absence::NoLibrary);
        }
        let missing = SYMBOLS.iter().find(|symbol| !has_symbol(symbol));
        if let Some(symbol) = missing {
            return Err(Absence::NoSymbol { symbol, driver: version_if_stated() });
        }
        let driver = Self { _loaded: () };
        // SAFETY: takes no pointer.
        let started = unsafe { driver.cuInit(0) };
        if started.is(sys::CUresult::CUDA_ERROR_NO_DEVICE) {
            return Err(Absence::NoDevice);
        }
        match started.ok() {
            Ok(()) => Ok(driver),
            Err(error) => Err(Absence::NotStarted { detail: error.to_string() }),
        }
    }

    /// Whether the driver has the one call that this build knows for several copies: CUDA 13.0 and later.
    pub fn has_batched_copies(self) -> bool {
        cfg!(feature = "cuda-13000") && has_symbol("cuMemcpyBatchAsync_v2")
    }

    /// Copies runs of bytes between unified addresses, in any order among each other.
    ///
    /// # Safety
    /// All ranges are valid until the copies are over, and [`Driver::has_batched_copies`] holds.
    #[cfg(feature = "cuda-13000")]
    pub unsafe fn copy_batch(self, to: &[u64], from: &[u64], bytes: &[usize], stream: sys::CUstream) -> Status {
        let (mut to, mut from, mut bytes) = (to.to_vec(), from.to_vec(), bytes.to_vec());
        // SAFETY: plain data, of which zero is a value: no hints, no flags.
        let mut attributes: sys::CUmemcpyAttributes = unsafe { std::mem::zeroed() };
        attributes.srcAccessOrder = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        // The attributes hold from the first copy on.
        let mut first = 0;
        // SAFETY: the symbol is there, and the arrays outlive the call, by the caller's promise and by their owners here.
        let code = unsafe {
            sys::cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                bytes.as_mut_ptr(),
                bytes.len(),
                &mut attributes,
                &mut first,
                1,
                stream,
            )
        };
        Status { call: "cuMemcpyBatchAsync_v2", code }
    }

    /// Never called: see [`Driver::has_batched_copies`].
    ///
    /// # Safety
    /// None of it is ever needed.
    #[cfg(not(feature = "cuda-13000"))]
    pub unsafe fn copy_batch(self, _to: &[u64], _from: &[u64], _bytes: &[usize], _stream: sys::CUstream) -> Status {
        Status { call: "cuMemcpyBatchAsync_v2", code: sys::CUresult::CUDA_ERROR_NOT_SUPPORTED }
    }

    /// The CUDA version of the driver.
    ///
    /// # Errors
    /// As [`Status::ok`].
    pub fn version(self) -> Result<Version> {
        let mut version = 0;
        // SAFETY: `version` outlives the call.
        unsafe { self.cuDriverGetVersion(&mut version) }.ok()?;
        Ok(Version(version))
    }

    /// GPUs.
    ///
    /// # Errors
    /// As [`Status::ok`].
    pub fn device_count(self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: `count` outlives the call.
        let status = unsafe { self.cuDeviceGetCount(&mut count) };
        if status.is(sys::CUresult::CUDA_ERROR_NO_DEVICE) {
            return Ok(0);
        }
        status.ok()?;
        Ok(count.max(0) as u32)
    }

    /// An attribute of a GPU.
    ///
    /// # Errors
    /// As [`Status::ok`].
    pub fn attribute(self, device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: `value` outlives the call.
        unsafe { self.cuDeviceGetAttribute(&mut value, attribute, device) }.ok()?;
        Ok(value)
    }

    /// The `ordinal`-th GPU and its name.
    ///
    /// # Errors
    /// As [`Status::ok`].
    pub fn device(self, ordinal: u32) -> Result<(sys::CUdevice, String)> {
        let (mut device, mut name) = (0, [0_u8; 256]);
        // SAFETY: both outlive the calls, and the name's length is given.
        unsafe {
            self.cuDeviceGet(&mut device, ordinal as c_int).ok()?;
            self.cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, device).ok()?;
        }
        let name = CStr::from_bytes_until_nul(&name).map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        Ok((device, name))
    }

    /// Whether `device` can be made to reach the memory of `peer`.
    ///
    /// # Errors
    /// As [`Status::ok`].
    pub fn can_access(self, device: sys::CUdevice, peer: sys::CUdevice) -> Result<bool> {
        let mut can = 0;
        // SAFETY: `can` outlives the call.
        unsafe { self.cuDeviceCanAccessPeer(&mut can, device, peer) }.ok()?;
        Ok(can != 0)
    }
}

/// Whether the loaded library exports a symbol.
fn has_symbol(name: &str) -> bool {
    let name = format!("{name}\0");
    // SAFETY: the library is present, as `Driver::load` has asked first; the symbol is looked up and not called.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok()
}

/// The version of a driver that may lack anything.
fn version_if_stated() -> i32 {
    let mut version = 0;
    if has_symbol("cuDriverGetVersion") {
        // SAFETY: the symbol is there; the call needs no started driver.
        let _ = unsafe { sys::cuDriverGetVersion(&mut version) };
    }
    version
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_reads_as_people_write_it() {
        assert_eq!(Version(13000).to_string(), "13.0");
        assert_eq!(Version(12080).to_string(), "12.8");
    }

    #[test]
    fn every_call_is_in_the_table_once() {
        let mut sorted = SYMBOLS.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), SYMBOLS.len());
    }

    #[test]
    fn a_missing_symbol_is_an_error_that_says_have_and_need() {
        let error = TideError::from(Absence::NoSymbol { symbol: "cuFuncLoad", driver: 12020 });
        let text = error.to_string();
        assert!(matches!(error, TideError::Unsupported { .. }), "{text}");
        assert!(text.contains("cuFuncLoad") && text.contains("12.2") && text.contains("12.8"), "{text}");
    }
}

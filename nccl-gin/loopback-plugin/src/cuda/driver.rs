//! The calls of the CUDA driver that are made here, by dlopen of libcuda.

use crate::fault::{Fault, Result};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// A device address.
pub type DevicePointer = u64;
/// A context, stream or event.
pub type Handle = *mut c_void;

const NOT_READY: c_int = 600;

/// `CU_STREAM_NON_BLOCKING`: does not wait for the legacy stream.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for all contexts.
pub const HOST_ALLOC_PORTABLE: c_uint = 1;

macro_rules! driver {
    ($($name:ident: $symbol:literal ($($argument:ident: $type:ty),*);)+) => {
        /// The driver, loaded.
        pub struct Driver {
            error_name: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
            event_query: unsafe extern "C" fn(Handle) -> c_int,
            $($name: unsafe extern "C" fn($($type),*) -> c_int,)+
            _library: libloading::Library,
        }

        impl Driver {
            fn load() -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the driver's own initialisers; it stays loaded, as `Driver` lives in a static.
                let library = unsafe { libloading::Library::new("libcuda.so.1") }?;
                // SAFETY: the signatures below are the driver's for these names.
                unsafe {
                    Ok(Self {
                        error_name: *library.get(b"cuGetErrorName\0")?,
                        event_query: *library.get(b"cuEventQuery\0")?,
                        $($name: *library.get(concat!($symbol, "\0").as_bytes())?,)+
                        _library: library,
                    })
                }
            }

            $(
                #[doc = concat!("`", $symbol, "`.")]
                ///
                /// # Errors
                /// With the driver's name for the code.
                ///
                /// # Safety
                /// What the driver's documentation asks for.
                #[allow(clippy::too_many_arguments, reason = "as many as the driver's call has")]
                pub unsafe fn $name(&self, $($argument: $type),*) -> Result<()> {
                    // SAFETY: by the caller's promise.
                    self.check($symbol, unsafe { (self.$name)($($argument),*) })
                }
            )+
        }
    };
}

driver! {
    init: "cuInit"(flags: c_uint);
    device_get: "cuDeviceGet"(device: *mut c_int, ordinal: c_int);
    primary_retain: "cuDevicePrimaryCtxRetain"(context: *mut Handle, device: c_int);
    context_current: "cuCtxGetCurrent"(context: *mut Handle);
    context_push: "cuCtxPushCurrent_v2"(context: Handle);
    context_pop: "cuCtxPopCurrent_v2"(context: *mut Handle);
    stream_create: "cuStreamCreateWithPriority"(stream: *mut Handle, flags: c_uint, priority: c_int);
    priority_range: "cuCtxGetStreamPriorityRange"(least: *mut c_int, greatest: *mut c_int);
    stream_synchronize: "cuStreamSynchronize"(stream: Handle);
    stream_destroy: "cuStreamDestroy_v2"(stream: Handle);
    event_create: "cuEventCreate"(event: *mut Handle, flags: c_uint);
    event_record: "cuEventRecord"(event: Handle, stream: Handle);
    event_destroy: "cuEventDestroy_v2"(event: Handle);
    host_alloc: "cuMemHostAlloc"(memory: *mut *mut c_void, bytes: usize, flags: c_uint);
    host_free: "cuMemFreeHost"(memory: *mut c_void);
    alloc: "cuMemAlloc_v2"(memory: *mut DevicePointer, bytes: usize);
    to_device: "cuMemcpyHtoDAsync_v2"(to: DevicePointer, from: *const c_void, bytes: usize, stream: Handle);
    to_host: "cuMemcpyDtoHAsync_v2"(to: *mut c_void, from: DevicePointer, bytes: usize, stream: Handle);
    module_load: "cuModuleLoadData"(module: *mut Handle, image: *const c_void);
    module_function: "cuModuleGetFunction"(function: *mut Handle, module: Handle, name: *const c_char);
    launch: "cuLaunchKernel"(
        function: Handle,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint,
        stream: Handle,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void
    );
}

// SAFETY: function pointers and a library handle; the driver may be called from any thread.
unsafe impl Sync for Driver {}
// SAFETY: as above.
unsafe impl Send for Driver {}

impl Driver {
    /// The driver, loaded at first use.
    ///
    /// # Errors
    /// If there is none, or it lacks a call.
    pub fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<std::result::Result<Driver, String>> = OnceLock::new();
        let driver = DRIVER.get_or_init(|| Self::load().map_err(|error| error.to_string()));
        driver.as_ref().map_err(|error| Fault::system(format!("no CUDA driver: {error}")))
    }

    fn check(&self, call: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: a place for a pointer; the driver leaves null where it knows no name.
        unsafe { (self.error_name)(code, &mut name) };
        let name = if name.is_null() {
            "?".into()
        } else {
            // SAFETY: a static string that ends with zero.
            unsafe { CStr::from_ptr(name) }.to_string_lossy()
        };
        Err(Fault::cuda(format!("{call}: {name} ({code})")))
    }

    /// Whether what the event was recorded after is done.
    ///
    /// # Errors
    /// If it failed.
    ///
    /// # Safety
    /// `event` is an event of the current context.
    pub unsafe fn event_is_done(&self, event: Handle) -> Result<bool> {
        // SAFETY: by the caller's promise.
        match unsafe { (self.event_query)(event) } {
            NOT_READY => Ok(false),
            code => self.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Runs `body` with `context` current.
    ///
    /// # Errors
    /// As `body`, and if the context cannot be made current.
    ///
    /// # Safety
    /// `context` is a context that is alive.
    pub unsafe fn within<T>(&self, context: Handle, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut current: Handle = std::ptr::null_mut();
        // SAFETY: a place for a pointer.
        unsafe { self.context_current(&mut current)? };
        if current == context {
            return body();
        }
        // SAFETY: by the caller's promise.
        unsafe { self.context_push(context)? };
        let result = body();
        // SAFETY: what was pushed above.
        unsafe { self.context_pop(&mut current)? };
        result
    }

    /// The current context, or the first device's primary one where there is none.
    ///
    /// # Errors
    /// If there is no device.
    pub fn context(&self) -> Result<Handle> {
        let mut context: Handle = std::ptr::null_mut();
        // SAFETY: places for results. The primary context is never released: the process needs it to its end.
        unsafe {
            self.init(0)?;
            self.context_current(&mut context)?;
            if context.is_null() {
                let mut device = 0;
                self.device_get(&mut device, 0)?;
                self.primary_retain(&mut context, device)?;
            }
        }
        Ok(context)
    }
}

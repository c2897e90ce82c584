//! One GPU: its primary context, the kernels loaded on it, and the stream by which the host reads and writes its memory.

use super::driver::{Driver, Version};
use super::ptx::{self, Capability};
use crate::error::{Result, TideError};
use crate::gpu::{DeviceProperties, KernelShape, Priority};
use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::sys::CUfunction_attribute as FunctionAttribute;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tide_device::abi::kernel::Kernel;

/// Bytes of the pinned memory through which the host's reads and writes go.
const STAGING_BYTES: usize = 4 << 20;

/// How long one piece of a host's read or write may take. It waits for no kernel, so this means that the device is lost, or
/// that its hardware queue is held by a stream that waits.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(10);

/// Dynamic shared memory that a sum leaves to others, bytes.
const SUM_SHARED_RESERVE_BYTES: u32 = 24 << 10;

/// Consumer threads of a sum.
const SUM_CONSUMERS: u32 = 256;

/// Threads of a block of a kernel without roles.
const PLAIN_THREADS: u32 = 512;

/// Bytes of a bounce stage of the loopback network.
const BOUNCE_BYTES: u32 = 8 << 10;

/// Threads of a warp of every GPU so far.
const WARP_SIZE: u32 = 32;

/// Bytes of the JIT compiler's logs.
const JIT_LOG_BYTES: usize = 16 << 10;

/// A kernel loaded on a device.
#[derive(Debug, Clone, Copy)]
pub struct Function {
    /// The driver's handle.
    pub handle: sys::CUfunction,
    /// Bytes of its parameter block, as the PTX states them.
    pub param_bytes: usize,
    /// Most dynamic shared memory that a launch of it may ask for.
    pub shared_bytes_max: u32,
}

/// The modules of a device, and every kernel of theirs.
#[derive(Default)]
struct Loaded {
    modules: Vec<sys::CUmodule>,
    functions: Vec<(Kernel, Function)>,
}

/// One GPU.
pub struct Device {
    driver: Driver,
    handle: sys::CUdevice,
    context: sys::CUcontext,
    loaded: RwLock<Loaded>,
    /// What it is.
    pub properties: DeviceProperties,
    /// The architecture of the PTX that it takes, as `sm_90`.
    pub arch: &'static str,
    /// Longest pitch of a strided copy or fill, bytes.
    pub pitch_bytes_max: u64,
    /// Least and greatest priority of a stream; a greater one is a smaller number.
    priorities: (i32, i32),
    transfer: Mutex<Transfer>,
}

// SAFETY: the driver's handles may be used from any thread; each call makes the context its thread's first.
unsafe impl Send for Device {}
// SAFETY: as above; what the host changes is behind the mutex.
unsafe impl Sync for Device {}

impl Device {
    /// Takes hold of a GPU and loads the kernels on it.
    ///
    /// # Errors
    /// [`TideError::Unsupported`] where it lacks what the library needs, else as the driver refuses.
    pub fn new(driver: Driver, ordinal: u32, version: Version) -> Result<Self> {
        let (handle, name) = driver.device(ordinal)?;
        let attribute = |a| driver.attribute(handle, a).map(|v| v.max(0) as u32);
        let capability = Capability {
            major: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        };
        for (a, needed) in [
            (Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, "one address space for host and GPUs"),
            (Attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, "mapped host memory"),
            (Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, "64-bit stream memory operations"),
        ] {
            if attribute(a)? == 0 {
                return Err(TideError::Unsupported {
                    needed: needed.to_owned(),
                    found: format!("{name} (device {ordinal}) without them"),
                });
            }
        }
        let image = ptx::choose(&name, capability)?;
        ptx::guard(image.file, image.text, version, capability)?;
        let shared_bytes_max = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let properties = DeviceProperties {
            name,
            multiprocessor_count: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_max,
            multicast: false,
            shape: KernelShape {
                warp_size: WARP_SIZE,
                sum_consumers: SUM_CONSUMERS,
                sum_shared_bytes: shared_bytes_max.saturating_sub(SUM_SHARED_RESERVE_BYTES),
                plain_threads: PLAIN_THREADS,
                bounce_bytes: BOUNCE_BYTES,
            },
        };
        let pitch_bytes_max = u64::from(attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_PITCH)?);
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` outlives the call; the hold is given back in `Device::release`.
        unsafe { driver.cuDevicePrimaryCtxRetain(&mut context, handle) }.ok()?;
        let mut this = Self {
            driver,
            handle,
            context,
            loaded: RwLock::default(),
            properties,
            arch: image.arch(),
            pitch_bytes_max,
            priorities: (0, 0),
            transfer: Mutex::new(Transfer {
                stream: std::ptr::null_mut(),
                staging: std::ptr::null_mut(),
                stuck: false,
            }),
        };
        this.enter()?;
        this.load(image.file, image.text, &Kernel::BASE)?;
        // SAFETY: both outlive the call.
        unsafe { driver.cuCtxGetStreamPriorityRange(&mut this.priorities.0, &mut this.priorities.1) }.ok()?;
        let transfer = this.new_transfer()?;
        this.transfer = Mutex::new(transfer);
        Ok(this)
    }

    /// Makes the device's context the calling thread's.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: retained in `new`, and given back only when the owner is dropped.
        unsafe { self.driver.cuCtxSetCurrent(self.context) }.ok()
    }

    /// Lets this device reach the memory of another.
    ///
    /// # Errors
    /// [`TideError::Unsupported`] where it cannot.
    pub fn enable_peer(&self, peer: &Self) -> Result<()> {
        if !self.driver.can_access(self.handle, peer.handle)? {
            return Err(TideError::Unsupported {
                needed: "peer access between all GPUs in use".to_owned(),
                found: format!("none from {} to {} (choose the devices)", self.properties.name, peer.properties.name),
            });
        }
        self.enter()?;
        // SAFETY: a live context of another device.
        let status = unsafe { self.driver.cuCtxEnablePeerAccess(peer.context, 0) };
        if status.is(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) {
            return Ok(());
        }
        status.ok()
    }

    /// A loaded kernel.
    ///
    /// # Errors
    /// [`TideError::Unsupported`] where its module is not loaded.
    pub fn function(&self, kernel: Kernel) -> Result<Function> {
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        let found = loaded.functions.iter().find(|(k, _)| *k == kernel);
        found.map(|(_, function)| *function).ok_or_else(|| TideError::Unsupported {
            needed: format!("the module of {}", kernel.name()),
            found: format!("{} without it: it is built with NCCL (`cargo xtask ptx --nccl`)", self.properties.name),
        })
    }

    /// Compiles and loads PTX, and its kernels: a kernel loaded at its first launch may wait for a resident one that waits
    /// for it. The device's context is current. `file` names the PTX in errors.
    ///
    /// # Errors
    /// What the driver refuses, with the compiler's log.
    pub fn load(&self, file: &str, text: &str, kernels: &[Kernel]) -> Result<()> {
        let driver = self.driver;
        let mut module = std::ptr::null_mut();
        let text = CString::new(text).map_err(|_| driver_error("cuModuleLoadDataEx", "PTX with a zero byte"))?;
        let (mut info, mut errors) = (vec![0_u8; JIT_LOG_BYTES], vec![0_u8; JIT_LOG_BYTES]);
        use sys::CUjit_option::{
            CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_INFO_LOG_BUFFER,
            CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
        };
        let mut options = [
            CU_JIT_INFO_LOG_BUFFER,
            CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
            CU_JIT_ERROR_LOG_BUFFER,
            CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        // Values are passed as pointers, sizes in their bits.
        let mut values: [*mut c_void; 4] = [
            info.as_mut_ptr().cast(),
            std::ptr::without_provenance_mut(JIT_LOG_BYTES),
            errors.as_mut_ptr().cast(),
            std::ptr::without_provenance_mut(JIT_LOG_BYTES),
        ];
        // SAFETY: the text is terminated; the logs outlive the call and are as long as stated; the context is current.
        let status = unsafe {
            driver.cuModuleLoadDataEx(
                &mut module,
                text.as_ptr().cast(),
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if !status.is(sys::CUresult::CUDA_SUCCESS) {
            let logs = format!("{file}: {} {}", log_text(&errors), log_text(&info));
            return Err(status.error(logs.trim_end()));
        }
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        loaded.modules.push(module);
        for kernel in kernels {
            let function = self.load_function(module, *kernel)?;
            loaded.functions.retain(|(k, _)| k != kernel);
            loaded.functions.push((*kernel, function));
        }
        Ok(())
    }

    fn load_function(&self, module: sys::CUmodule, kernel: Kernel) -> Result<Function> {
        let driver = self.driver;
        let name = CString::new(kernel.name()).map_err(|_| driver_error("cuModuleGetFunction", kernel.name()))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a loaded module; the name is terminated; `handle` outlives the call.
        let found = unsafe { driver.cuModuleGetFunction(&mut handle, module, name.as_ptr()) };
        if !found.is(sys::CUresult::CUDA_SUCCESS) {
            return Err(found.error(kernel.name()));
        }
        let (mut offset, mut param_bytes, mut shared_bytes) = (0, 0, 0);
        let dynamic = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a function of a loaded module of the current context.
        unsafe {
            driver.cuFuncLoad(handle).ok()?;
            driver.cuFuncGetParamInfo(handle, 0, &mut offset, &mut param_bytes).ok()?;
            let fixed = FunctionAttribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            driver.cuFuncGetAttribute(&mut shared_bytes, fixed, handle).ok()?;
        }
        let shared_bytes_max = self.properties.shared_bytes_max.saturating_sub(shared_bytes.max(0) as u32);
        // SAFETY: as above.
        unsafe { driver.cuFuncSetAttribute(handle, dynamic, shared_bytes_max as c_int) }.ok()?;
        Ok(Function { handle, param_bytes, shared_bytes_max })
    }

    /// Blocks of a kernel that the device holds at once, with one multiprocessor left free for kernels that they wait for.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn resident_blocks_max(&self, kernel: Kernel, block: u32, shared_bytes: u32) -> Result<u32> {
        let mut blocks = 0;
        let function = self.function(kernel)?.handle;
        // SAFETY: a loaded function of the current context; `blocks` outlives the call.
        unsafe {
            self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                function,
                block as c_int,
                shared_bytes as usize,
            )
        }
        .ok()?;
        Ok(blocks.max(0) as u32 * self.properties.multiprocessor_count.saturating_sub(1))
    }

    /// A stream, in no order with the default one. The device's context is current.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn new_stream(&self, priority: Priority) -> Result<sys::CUstream> {
        let (least, greatest) = self.priorities;
        // The greatest is kept for the host's reads and writes, where there are more than two: hardware queues are not
        // shared between priorities.
        let high = if least - greatest >= 2 { greatest + 1 } else { greatest };
        self.new_stream_at(if priority == Priority::High { high } else { least })
    }

    fn new_stream_at(&self, priority: i32) -> Result<sys::CUstream> {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: `stream` outlives the call; the context is current.
        unsafe { self.driver.cuStreamCreateWithPriority(&mut stream, flags, priority) }.ok()?;
        Ok(stream)
    }

    fn new_transfer(&self) -> Result<Transfer> {
        let stream = self.new_stream_at(self.priorities.1)?;
        let mut staging = std::ptr::null_mut();
        // SAFETY: `staging` outlives the call; freed in `release`.
        unsafe { self.driver.cuMemHostAlloc(&mut staging, STAGING_BYTES, sys::CU_MEMHOSTALLOC_PORTABLE) }.ok()?;
        Ok(Transfer { stream, staging: staging.cast(), stuck: false })
    }

    /// Writes device memory now.
    ///
    /// # Errors
    /// What the driver refuses; [`TideError::Driver`] if the device does not get to it in time.
    pub fn upload(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        let mut transfer = self.lock_transfer();
        let mut to = to;
        for piece in bytes.chunks(STAGING_BYTES) {
            transfer.check("upload")?;
            // SAFETY: the staging memory is that long, and the device has read the previous piece (`settle`).
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), transfer.staging, piece.len()) };
            // SAFETY: the caller's range; the staging memory is pinned and kept until `settle` says that it was read.
            unsafe { self.driver.cuMemcpyHtoDAsync_v2(to, transfer.staging.cast(), piece.len(), transfer.stream) }
                .ok()?;
            transfer.settle(self.driver, "upload", TRANSFER_TIMEOUT)?;
            to += piece.len() as u64;
        }
        Ok(())
    }

    /// Reads device memory now.
    ///
    /// # Errors
    /// As [`Device::upload`].
    pub fn download(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.enter()?;
        let mut transfer = self.lock_transfer();
        let mut from = from;
        for piece in bytes.chunks_mut(STAGING_BYTES) {
            transfer.check("download")?;
            // SAFETY: the caller's range; the staging memory is that long and nothing else uses it.
            unsafe { self.driver.cuMemcpyDtoHAsync_v2(transfer.staging.cast(), from, piece.len(), transfer.stream) }
                .ok()?;
            transfer.settle(self.driver, "download", TRANSFER_TIMEOUT)?;
            // SAFETY: the device has written that much (`settle`), and writes no more.
            unsafe { std::ptr::copy_nonoverlapping(transfer.staging, piece.as_mut_ptr(), piece.len()) };
            from += piece.len() as u64;
        }
        Ok(())
    }

    fn lock_transfer(&self) -> std::sync::MutexGuard<'_, Transfer> {
        self.transfer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the host's own reads and writes are over.
    pub fn is_settled(&self) -> bool {
        !self.lock_transfer().stuck
    }

    /// Gives everything back. Only for a device that is idle: the driver waits for work in flight.
    pub fn release(&mut self) {
        let driver = self.driver;
        let Ok(()) = self.enter() else { return };
        let transfer = self.transfer.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: made in `new`, each given up once, by the owner's drop; a failure here is of no use to anybody.
        unsafe {
            if !transfer.stream.is_null() {
                let _ = driver.cuStreamDestroy_v2(transfer.stream);
            }
            if !transfer.staging.is_null() {
                let _ = driver.cuMemFreeHost(transfer.staging.cast());
            }
            let _ = driver.cuDevicePrimaryCtxRelease_v2(self.handle);
        }
    }
}

/// The stream by which the host reads and writes, and the pinned memory between.
struct Transfer {
    stream: sys::CUstream,
    staging: *mut u8,
    /// A piece did not come through: the device may still use the staging memory.
    stuck: bool,
}

// SAFETY: the stream may be used from any thread, and whoever holds the lock is alone with the staging memory.
unsafe impl Send for Transfer {}

impl Transfer {
    fn check(&self, call: &str) -> Result<()> {
        if self.stuck {
            Err(driver_error(call, "an earlier transfer of this device never came through"))
        } else {
            Ok(())
        }
    }

    /// Waits for the piece under way, without ever blocking in the driver.
    fn settle(&mut self, driver: Driver, call: &str, timeout: Duration) -> Result<()> {
        self.stuck = true;
        let mut pause = Pause::default();
        // SAFETY: a live stream of the current context.
        while !unsafe { driver.cuStreamQuery(self.stream) }.ready()? {
            if pause.started.elapsed() >= timeout {
                let held = "its hardware queue may be held by a stream that waits (see CUDA_DEVICE_MAX_CONNECTIONS)";
                return Err(driver_error(call, format!("nothing came through for {timeout:?}: {held}")));
            }
            pause.rest();
        }
        self.stuck = false;
        Ok(())
    }
}

/// How a host thread waits for a device: awake at first, then in short sleeps that grow.
pub struct Pause {
    /// When it began.
    pub started: Instant,
    looks: u32,
}

impl Default for Pause {
    fn default() -> Self {
        Self { started: Instant::now(), looks: 0 }
    }
}

impl Pause {
    /// Looks made without sleep.
    const AWAKE_LOOKS: u32 = 200;
    /// Longest sleep.
    const SLEEP_MAX: Duration = Duration::from_micros(200);

    /// Rests before the next look.
    pub fn rest(&mut self) {
        self.looks += 1;
        if self.looks <= Self::AWAKE_LOOKS {
            std::hint::spin_loop();
        } else {
            let sleep = Duration::from_micros(u64::from(self.looks - Self::AWAKE_LOOKS));
            std::thread::sleep(sleep.min(Self::SLEEP_MAX));
        }
    }
}

/// What the JIT compiler has written, up to the first zero.
fn log_text(log: &[u8]) -> String {
    let end = log.iter().position(|b| *b == 0).unwrap_or(log.len());
    String::from_utf8_lossy(&log[..end]).trim().to_owned()
}

/// An error of this back end that no driver call has given.
pub fn driver_error(call: &str, detail: impl Into<String>) -> TideError {
    TideError::Driver { call: call.to_owned(), detail: detail.into() }
}

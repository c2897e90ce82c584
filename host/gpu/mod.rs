//! What a collective asks of the GPUs: memory, streams, events, copies, launches, memory waits.
//!
//! A collective is written once against [`Gpu`]; back ends are [`sim`] and, with the feature `cuda`, the CUDA driver.
//!
//! # Order
//!
//! A stream is an asynchronous queue: its operations take effect in order, whenever the device gets to them. Between
//! streams there is no order but through events and memory waits. Enqueue a wait's producer before the wait: a back end may
//! map several streams to one hardware queue.

mod buffer;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod sim;

pub use buffer::{DeviceBuffer, DeviceSlice};

use crate::error::{Result, TideError};
use crate::monitor::Fault;
use std::ffi::c_void;
use tide_device::abi::fault::WaitTag;
use tide_device::abi::kernel::Kernel;

/// An address in the address space that all GPUs of the process share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address that stands for "none".
    pub const NULL: Self = Self(0);

    /// Whether it is [`DevicePtr::NULL`].
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }
}

/// A stream of one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream(pub u32);

/// A point in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Event(pub u64);

/// Which of two kernels the device prefers where both could go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Like the streams of the model's own kernels.
    Normal,
    /// Before them: short kernels that others wait for.
    High,
}

/// A strided copy of `rows` rows of `width_bytes`. Source or destination may be a peer's memory, the destination a
/// multicast address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy2d {
    /// First destination byte.
    pub destination: DevicePtr,
    /// Bytes from one destination row to the next.
    pub destination_pitch_bytes: u64,
    /// First source byte.
    pub source: DevicePtr,
    /// Bytes from one source row to the next.
    pub source_pitch_bytes: u64,
    /// Bytes of a row.
    pub width_bytes: u64,
    /// Rows.
    pub rows: u64,
}

impl Copy2d {
    /// A copy of one contiguous run.
    pub const fn flat(destination: DevicePtr, source: DevicePtr, bytes: u64) -> Self {
        Self {
            destination,
            destination_pitch_bytes: bytes,
            source,
            source_pitch_bytes: bytes,
            width_bytes: bytes,
            rows: 1,
        }
    }
}

/// A strided fill of `rows` rows of `width_bytes` with one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fill2d {
    /// First byte.
    pub destination: DevicePtr,
    /// Bytes from one row to the next.
    pub pitch_bytes: u64,
    /// Bytes of a row.
    pub width_bytes: u64,
    /// Rows.
    pub rows: u64,
    /// What every byte becomes.
    pub value: u8,
}

/// A kernel launch.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The kernel.
    pub kernel: Kernel,
    /// Blocks.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
    /// Blocks of a cluster, which the device places together; 1 for none. The grid is a multiple of it.
    pub cluster: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
    /// The parameter block, copied at the call.
    pub params: &'a [u8],
}

/// A stream's wait until a 64-bit word in memory reaches a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryWait {
    /// The word, 8-aligned.
    pub address: DevicePtr,
    /// It is waited for until the word is at or after this, modulo 2^64.
    pub value: u64,
    /// Longest wait, ns; `u64::MAX` for one without end.
    pub timeout_ns: u64,
    /// Who waits for whom, for the fault that a longer wait becomes.
    pub tag: WaitTag,
}

/// How [`Gpu::synchronize`] ended.
#[derive(Debug, Clone, PartialEq)]
pub enum SyncOutcome {
    /// Everything enqueued in the stream has taken effect.
    Complete,
    /// Nothing moves any more, or not for the time given.
    Stalled {
        /// Of every stream of the process that hangs on a memory wait, which stream and which wait: whose it is, and so
        /// whether it matters, is for the caller to say. Those of kernels are in their fault records.
        faults: Vec<(Stream, Fault)>,
    },
}

/// How kernels are launched on a device: the sizes that a back end chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelShape {
    /// Threads of a warp.
    pub warp_size: u32,
    /// Consumer threads of a sum block, besides its producer warp.
    pub sum_consumers: u32,
    /// Dynamic shared memory that a sum block may use for its ring, bytes.
    pub sum_shared_bytes: u32,
    /// Threads of a block of a kernel without roles.
    pub plain_threads: u32,
    /// Bytes of a bounce stage of the loopback network.
    pub bounce_bytes: u32,
}

/// What one GPU is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Its name.
    pub name: String,
    /// Multiprocessors.
    pub multiprocessor_count: u32,
    /// Most dynamic shared memory of a block, bytes.
    pub shared_bytes_max: u32,
    /// Whether its memory can be bound behind a multicast address, and the caller has not forbidden it.
    pub multicast: bool,
    /// How to launch on it.
    pub shape: KernelShape,
}

fn no_driver(found: &str, needed: &str) -> TideError {
    TideError::Unsupported { needed: needed.to_owned(), found: format!("the back end `{found}`, which has none") }
}

/// The GPUs of one process.
///
/// # Errors
/// Every call gives [`crate::TideError::Driver`] for what the driver refuses.
pub trait Gpu: Send + Sync {
    /// The back end's name: `sim` or `cuda`.
    fn name(&self) -> &'static str;
    /// GPUs.
    fn device_count(&self) -> u32;
    /// What a GPU is.
    fn properties(&self, device: u32) -> &DeviceProperties;

    /// Allocates on a device, aligned to at least 256 bytes.
    fn allocate(&self, device: u32, bytes: u64) -> Result<DevicePtr>;
    /// Allocates host memory that every device can write, zeroed.
    fn allocate_mapped(&self, bytes: u64) -> Result<DevicePtr>;
    /// Frees either.
    fn free(&self, address: DevicePtr) -> Result<()>;
    /// Bytes now allocated on a device by this process, and the most there ever were.
    fn usage_bytes(&self, device: u32) -> (u64, u64);
    /// Binds equally long ranges, one per device of a node, behind one multicast address; `None` where the devices cannot.
    fn bind_multicast(&self, replicas: &[DevicePtr], bytes: u64) -> Result<Option<DevicePtr>>;

    /// Writes memory now, in no stream's order.
    fn upload(&self, destination: DevicePtr, bytes: &[u8]) -> Result<()>;
    /// Reads memory now, in no stream's order.
    fn download(&self, source: DevicePtr, bytes: &mut [u8]) -> Result<()>;
    /// Reads mapped host memory without touching the device.
    fn read_mapped(&self, source: DevicePtr, bytes: &mut [u8]) -> Result<()>;

    /// A new stream.
    fn create_stream(&self, device: u32, priority: Priority) -> Result<Stream>;
    /// Gives a stream up, empty or stalled for good. What it still holds is given up with it: it must not touch memory that
    /// is freed after this call, so a back end that cannot take it back keeps such memory.
    fn destroy_stream(&self, stream: Stream);
    /// Enqueues a copy.
    fn copy(&self, stream: Stream, copy: &Copy2d) -> Result<()>;
    /// Enqueues several copies, which may take effect in any order among each other.
    fn copy_batch(&self, stream: Stream, copies: &[Copy2d]) -> Result<()> {
        copies.iter().try_for_each(|copy| self.copy(stream, copy))
    }
    /// Enqueues a fill.
    fn fill(&self, stream: Stream, fill: &Fill2d) -> Result<()>;
    /// Enqueues the setting of a 64-bit word, after all that precedes it in the stream.
    fn write_value(&self, stream: Stream, address: DevicePtr, value: u64) -> Result<()>;
    /// Enqueues a wait for a word.
    fn wait_value(&self, stream: Stream, wait: &MemoryWait) -> Result<()>;
    /// An event that completes with all enqueued in the stream so far.
    fn record(&self, stream: Stream) -> Result<Event>;
    /// Enqueues a wait for an event.
    fn wait_event(&self, stream: Stream, event: Event) -> Result<()>;
    /// Enqueues a launch.
    ///
    /// # Safety
    /// `params` is the kernel's parameter block as `tide_device::abi::params` states it, its addresses are valid until the
    /// launch has completed, and the launch is as the kernel's module states.
    unsafe fn launch(&self, stream: Stream, launch: &Launch<'_>) -> Result<()>;

    /// Makes a device current in the calling thread, for another library that goes by that.
    fn enter(&self, device: u32) -> Result<()> {
        let _ = device;
        Ok(())
    }
    /// Adds the kernels of a further PTX module, to be launched like the back end's own.
    fn load_kernels(&self, image: &str, kernels: &[Kernel]) -> Result<()> {
        let _ = (image, kernels);
        Err(no_driver(self.name(), "kernels of a PTX module"))
    }
    /// Enqueues what another library enqueues: `call` gets the driver's handle of the stream, whose device is current. With
    /// `wait`, what is enqueued is a wait, for a word that the library keeps: its address is null.
    fn enqueue_foreign(
        &self,
        stream: Stream,
        wait: Option<&MemoryWait>,
        call: &mut dyn FnMut(*mut c_void) -> Result<()>,
    ) -> Result<()> {
        let _ = (stream, wait, call);
        Err(no_driver(self.name(), "the driver's handle of a stream"))
    }

    /// Waits until all enqueued in the stream has taken effect, or nothing moved for `timeout_ns`.
    fn synchronize(&self, stream: Stream, timeout_ns: u64) -> Result<SyncOutcome>;
    /// Whether an event has completed; lets a simulated device go on.
    fn is_complete(&self, event: Event) -> Result<bool>;
}

//! NCCL's RMA plugin interface, version 16, as libnccl 2.32.3 calls it.
//!
//! Offsets and argument types are those of the library's debug information; `tests/abi.rs` reads them from there again.

use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::mem::{offset_of, size_of};

/// A result code.
pub type Code = c_int;
/// Done.
pub const SUCCESS: Code = 0;
/// `ncclUnhandledCudaError`.
pub const UNHANDLED_CUDA_ERROR: Code = 1;
/// `ncclSystemError`.
pub const SYSTEM_ERROR: Code = 2;
/// `ncclInternalError`.
pub const INTERNAL_ERROR: Code = 3;
/// `ncclInvalidArgument`.
pub const INVALID_ARGUMENT: Code = 4;

/// Memory of the host, as [`Rma::reg_mr_sym`] is told; also a bit of [`NetProperties::ptr_support`].
pub const POINTER_HOST: c_int = 1;
/// Memory of the GPU, likewise.
pub const POINTER_CUDA: c_int = 2;

/// [`Rma::iput_signal`] adds one.
pub const SIGNAL_INC: u32 = 1;
/// [`Rma::iput_signal`] adds the value given.
pub const SIGNAL_ADD: u32 = 2;

/// Bytes of a handle that ranks exchange between `listen` and `connect`.
pub const HANDLE_BYTES: usize = 128;

/// Log level of warnings.
pub const LOG_WARN: c_int = 2;
/// Every subsystem: what NCCL's own warnings carry.
pub const LOG_ALL: c_ulong = c_ulong::MAX;

/// NCCL's log: level, subsystems, file, line, a `printf` format and its arguments.
pub type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

/// What a context is to be (`ncclRmaConfig_v14_t`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ContextConfig {
    /// How many contexts one handle stands for.
    pub contexts: c_int,
    /// Traffic class; means nothing here.
    pub traffic_class: c_int,
    /// Only ranks this far apart talk to each other.
    pub rank_stride: c_int,
}

/// What signals promise (`ncclRmaProperties_v16_t`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RmaProperties {
    /// Whether any signal, also a weak one, comes after all earlier puts.
    pub flushes_all_puts_on_any_signal: bool,
}

/// What a device is (`ncclNetProperties_v12_t`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct NetProperties {
    /// Name; unique among the network devices that NCCL knows.
    pub name: *const c_char,
    /// Path of the PCI device, or null.
    pub pci_path: *const c_char,
    /// Unique number.
    pub guid: u64,
    /// Which memory can be registered: a sum of [`POINTER_HOST`] and [`POINTER_CUDA`].
    pub ptr_support: c_int,
    /// Whether a registration holds for all communicators.
    pub reg_is_global: c_int,
    /// Whether a flush is needed even where the GPU would order writes.
    pub force_flush: c_int,
    /// Mbit/s.
    pub speed: c_int,
    /// Port number.
    pub port: c_int,
    /// Microseconds; 0: unknown.
    pub latency: f32,
    /// Communicators at most.
    pub max_comms: c_int,
    /// NCCL lets 32 times as many requests per peer be under way.
    pub max_recvs: c_int,
    /// Kind of device offload.
    pub net_device_type: c_int,
    /// Its version.
    pub net_device_version: c_int,
    /// How many physical devices this one stands for, and which.
    pub virtual_devices: [c_int; 9],
    /// Bytes of one point-to-point transfer at most.
    pub max_p2p_bytes: usize,
    /// Bytes of one collective at most.
    pub max_coll_bytes: usize,
    /// Requests that can be joined.
    pub max_multi_request_size: c_int,
    /// Rail, -1: unknown.
    pub rail_id: i16,
    /// Plane, -1: unknown.
    pub plane_id: i16,
}

/// `ncclNetDeviceType` of a device whose GIN operations NCCL's proxy thread carries out.
pub const NET_DEVICE_GIN_PROXY: c_int = 2;

/// The plugin as NCCL sees it (`ncclRma_v16_t`).
///
/// `*mut c_void` is in turn: an instance, what listens, a collective communicator, a context, a registered region, a request.
#[repr(C)]
#[allow(clippy::type_complexity)]
pub struct Rma {
    /// Name for NCCL's log.
    pub name: *const c_char,
    /// New instance: out, communicator's number, log.
    pub init: unsafe extern "C" fn(*mut *mut c_void, u64, Option<Logger>) -> Code,
    /// Number of devices: out.
    pub devices: unsafe extern "C" fn(*mut c_int) -> Code,
    /// Of a collective communicator: out.
    pub get_rma_properties: unsafe extern "C" fn(*mut c_void, *mut RmaProperties) -> Code,
    /// Of a device: out.
    pub get_properties: unsafe extern "C" fn(c_int, *mut NetProperties) -> Code,
    /// Instance, device; out: handle for the others, what listens.
    pub listen: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> Code,
    /// Instance (not to be relied on), handles of all ranks, ranks, own rank, what listens; out: collective communicator.
    pub connect:
        unsafe extern "C" fn(*mut c_void, *const *mut c_void, c_int, c_int, *mut c_void, *mut *mut c_void) -> Code,
    /// Collective communicator, configuration; out: context.
    pub create_context: unsafe extern "C" fn(*mut c_void, *const ContextConfig, *mut *mut c_void) -> Code,
    /// Collective communicator, address, bytes, kind of memory, flags; out: region. All ranks call it in the same order.
    pub reg_mr_sym: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, *mut *mut c_void) -> Code,
    /// The same with offset and file descriptor of a DMA-BUF.
    pub reg_mr_sym_dma_buf:
        unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, c_int, u64, *mut *mut c_void) -> Code,
    /// Collective communicator, region.
    pub dereg_mr_sym: unsafe extern "C" fn(*mut c_void, *mut c_void) -> Code,
    /// Context.
    pub destroy_context: unsafe extern "C" fn(*mut c_void) -> Code,
    /// Collective communicator.
    pub close_coll: unsafe extern "C" fn(*mut c_void) -> Code,
    /// What listens.
    pub close_listen: unsafe extern "C" fn(*mut c_void) -> Code,
    /// Context, its index, source offset and region, bytes, target offset and region, rank, options; out: request.
    pub iput: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        u64,
        *mut c_void,
        usize,
        u64,
        *mut c_void,
        u32,
        u32,
        *mut *mut c_void,
    ) -> Code,
    /// As `iput` up to the rank; then offset and region of the signal, value, operation, strong, options; out: request.
    pub iput_signal: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        u64,
        *mut c_void,
        usize,
        u64,
        *mut c_void,
        u32,
        u64,
        *mut c_void,
        u64,
        u32,
        bool,
        u32,
        *mut *mut c_void,
    ) -> Code,
    /// Context, its index, remote offset and region, bytes, local offset and region, rank, options; out: request.
    pub iget: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        u64,
        *mut c_void,
        usize,
        u64,
        *mut c_void,
        u32,
        u32,
        *mut *mut c_void,
    ) -> Code,
    /// Context, its index, region, rank; out: request, null if there is nothing to wait for.
    pub iflush: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, u32, *mut *mut c_void) -> Code,
    /// Collective communicator, request; out: whether it is done, and with that gone.
    pub test: unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int) -> Code,
    /// Context; drives what is under way.
    pub rma_progress: Option<unsafe extern "C" fn(*mut c_void) -> Code>,
    /// Context; out: whether something failed.
    pub query_last_error: unsafe extern "C" fn(*mut c_void, *mut bool) -> Code,
    /// Instance.
    pub finalize: unsafe extern "C" fn(*mut c_void) -> Code,
}

// SAFETY: function pointers and a pointer to a static string.
unsafe impl Sync for Rma {}

const _: () = {
    assert!(size_of::<Rma>() == 176);
    assert!(offset_of!(Rma, init) == 8 && offset_of!(Rma, devices) == 16);
    assert!(offset_of!(Rma, get_rma_properties) == 24 && offset_of!(Rma, get_properties) == 32);
    assert!(offset_of!(Rma, listen) == 40 && offset_of!(Rma, connect) == 48 && offset_of!(Rma, create_context) == 56);
    assert!(offset_of!(Rma, reg_mr_sym) == 64 && offset_of!(Rma, reg_mr_sym_dma_buf) == 72);
    assert!(offset_of!(Rma, dereg_mr_sym) == 80 && offset_of!(Rma, destroy_context) == 88);
    assert!(offset_of!(Rma, close_coll) == 96 && offset_of!(Rma, close_listen) == 104);
    assert!(offset_of!(Rma, iput) == 112 && offset_of!(Rma, iput_signal) == 120 && offset_of!(Rma, iget) == 128);
    assert!(offset_of!(Rma, iflush) == 136 && offset_of!(Rma, test) == 144 && offset_of!(Rma, rma_progress) == 152);
    assert!(offset_of!(Rma, query_last_error) == 160 && offset_of!(Rma, finalize) == 168);

    assert!(size_of::<ContextConfig>() == 12 && size_of::<RmaProperties>() == 1);
    assert!(offset_of!(ContextConfig, traffic_class) == 4 && offset_of!(ContextConfig, rank_stride) == 8);

    assert!(size_of::<NetProperties>() == 128);
    assert!(offset_of!(NetProperties, pci_path) == 8 && offset_of!(NetProperties, guid) == 16);
    assert!(offset_of!(NetProperties, ptr_support) == 24 && offset_of!(NetProperties, reg_is_global) == 28);
    assert!(offset_of!(NetProperties, force_flush) == 32 && offset_of!(NetProperties, speed) == 36);
    assert!(offset_of!(NetProperties, port) == 40 && offset_of!(NetProperties, latency) == 44);
    assert!(offset_of!(NetProperties, max_comms) == 48 && offset_of!(NetProperties, max_recvs) == 52);
    assert!(offset_of!(NetProperties, net_device_type) == 56 && offset_of!(NetProperties, net_device_version) == 60);
    assert!(offset_of!(NetProperties, virtual_devices) == 64 && offset_of!(NetProperties, max_p2p_bytes) == 104);
    assert!(offset_of!(NetProperties, max_coll_bytes) == 112);
    assert!(offset_of!(NetProperties, max_multi_request_size) == 120);
    assert!(offset_of!(NetProperties, rail_id) == 124 && offset_of!(NetProperties, plane_id) == 126);
};

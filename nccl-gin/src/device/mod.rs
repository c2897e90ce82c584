//! What a kernel calls: NCCL's device functions, by way of `shim.ll`, which stands beside this file.
//!
//! Declarations alone. A build that calls them links the shim and NCCL's bitcode `libnccl_device.bc`, and inlines all of it
//! (`cargo xtask ptx --nccl`); where nothing calls them they cost nothing. The shim says how NCCL's own functions are
//! called: always by one thread, on contexts that any other thread of the GPU may use at the same time, among all ranks of the
//! communicator.
//!
//! They are as NCCL 2.32.3 has them. GIN's device code has no compatibility across versions: what is built with one NCCL
//! runs under that one only. Enumerations are integers, as they travel.

/// `ncclDevComm`, in device memory; what the host's `ncclDevCommCreate` has written.
#[repr(C)]
pub struct DevComm {
    _opaque: [u8; 0],
}

/// What an `ncclWindow_t` points to, in device memory.
#[repr(C)]
pub struct Window {
    _opaque: [u8; 0],
}

/// `ncclGinSignalType`.
pub mod signal_type {
    /// No signal.
    pub const NONE: u32 = 0;
    /// A 64-bit word of a window, which is registered with strict ordering.
    pub const VA: u32 = 1;
}

/// `ncclGinSignalOp_t`.
pub mod signal_op {
    /// Adds the argument.
    pub const ADD: u32 = 1;
}

/// `cuda::thread_scope`: the wider, the smaller.
pub mod scope {
    /// All agents of the system, the NIC among them.
    pub const SYSTEM: u32 = 0;
    /// The thread alone.
    pub const THREAD: u32 = 10;
}

/// `cuda::memory_order`.
pub mod order {
    /// Acquire.
    pub const ACQUIRE: u32 = 2;
}

/// Longest transfer that is one entry of a queue, bytes: both back ends cut longer ones.
pub const ENTRY_BYTES_MAX: u64 = 1 << 30;

/// `ncclSuccess`.
pub const SUCCESS: u32 = 0;

unsafe extern "C" {
    /// Posts a put to `peer`: `ncclGinPut_v3`. Offsets are of the windows, the signal's of `signal_window` at the peer.
    /// `given_release` is what the caller has released its writes to, `required_release` who reads them ([`scope`]).
    /// Spins without limit while the queue to the peer is full.
    ///
    /// # Safety
    /// `comm` is a live device communicator that has the context and the peer; both ranges lie in the windows, on both sides;
    /// the source is unchanged until a flush; a signal lies where it is said.
    pub fn nccl_gin_put(
        comm: *const DevComm,
        context: u32,
        peer: u32,
        destination: *const Window,
        destination_offset: u64,
        source: *const Window,
        source_offset: u64,
        bytes: u64,
        signal_type: u32,
        signal_window: *const Window,
        signal_offset: u64,
        is_strong: bool,
        signal_op: u32,
        signal_argument: u64,
        given_release: u32,
        required_release: u32,
    );

    /// Posts a signal alone: `ncclGinSignal_v3`. Spins like [`nccl_gin_put`].
    ///
    /// # Safety
    /// `comm` is a live device communicator that has the context and the peer; a signal lies there where it is said.
    pub fn nccl_gin_signal(
        comm: *const DevComm,
        context: u32,
        peer: u32,
        signal_type: u32,
        signal_window: *const Window,
        signal_offset: u64,
        is_strong: bool,
        signal_op: u32,
        signal_argument: u64,
        given_release: u32,
        required_release: u32,
    );

    /// Until all that was posted on the context before, by any thread, is complete here, or for that many cycles of the SM's
    /// clock: `ncclGinFlushTimeout`. [`SUCCESS`], or NCCL's number for a lack of time.
    ///
    /// # Safety
    /// `comm` is a live device communicator that has the context.
    pub fn nccl_gin_flush_timeout(comm: *const DevComm, context: u32, order: u32, cycles: u64) -> u32;

    /// The lowest `bits` of a signal of this rank's own window: `ncclGinReadSignalVA`. One look.
    ///
    /// # Safety
    /// `comm` is a live device communicator; a signal lies at the offset.
    pub fn nccl_gin_read_signal(
        comm: *const DevComm,
        signal_window: *const Window,
        signal_offset: u64,
        bits: u32,
        order: u32,
    ) -> u64;
}

//! The rails over a window: handles of the device path, and host RMA.

use super::window::NcclWindow;
use super::{POSTING_THREADS_MAX, QUEUE_ENTRIES, Way};
use crate::error::{Result, TideError};
use crate::gpu::{DeviceBuffer, DevicePtr, MemoryWait, Stream};
use crate::net::{HostPut, HostSignal, Net, NetOptions, SignalKind};
use crate::plan::{Node, Rank};
use nccl_gin::host::{Comm, Put, SignalWait, Stream as RawStream};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use tide_device::abi::fault::WaitTag;
use tide_device::abi::kernel::Kernel;
use tide_device::abi::params::NcclHandle;

/// Host signals from each peer that a collective takes: one of each kind, and one that nobody waits for, because NCCL has
/// no put without.
pub(super) const SIGNALS_OF_A_SET: u32 = SignalKind::ALL.len() as u32 + 1;

/// The index, in a set, of the signal that nobody waits for.
const UNHEARD: u32 = SignalKind::ALL.len() as u32;

/// Host RMA's context: one orders all that goes to a peer.
const CONTEXT: u32 = 0;

/// Cycles of an SM's clock that a flush looks before it looks at the deadline: about half a millisecond.
const FLUSH_SLICE_CYCLES: u64 = 1 << 20;

/// The rails of one collective.
pub(super) struct NcclRails {
    window: Arc<NcclWindow>,
    options: NetOptions,
    /// Device path, per driven rank.
    handles: Vec<Option<DeviceBuffer>>,
    /// Host path.
    host: Option<HostSignals>,
}

/// The set of host signals that the rails of a collective have taken.
struct HostSignals {
    set: u32,
    /// Per waiting rank, peer and kind: the value awaited last. NCCL counts signals; it takes those that were awaited.
    awaited: Mutex<HashMap<(Rank, Node, u32), u64>>,
}

impl HostSignals {
    fn index(&self, kind: u32) -> u32 {
        self.set * SIGNALS_OF_A_SET + kind
    }
}

fn number(kind: SignalKind) -> u32 {
    SignalKind::ALL.iter().position(|k| *k == kind).expect("ALL has every kind") as u32
}

impl NcclRails {
    pub(super) fn new(window: Arc<NcclWindow>, signals_offset: u64, options: NetOptions) -> Result<Self> {
        let fabric = window.fabric();
        let ranks = fabric.driven.ranks;
        let mut this =
            Self { handles: ranks.iter().map(|_| None).collect(), host: None, window: Arc::clone(&window), options };
        if fabric.way != Way::None && fabric.way.path() != options.path {
            return Err(TideError::usage(format!(
                "the fabric's rails go by the {}, the communicator's do not",
                fabric.way
            )));
        }
        match fabric.way {
            Way::None => {}
            Way::Host => this.host = Some(HostSignals { set: fabric.take_signal_set()?, awaited: Mutex::default() }),
            Way::Device(_) => {
                for rank in ranks.iter() {
                    let handle = this.device_handle(rank, signals_offset)?;
                    let device = fabric.driven.devices[ranks.index(rank)];
                    this.handles[ranks.index(rank)] = Some(DeviceBuffer::from_slice(&fabric.gpu, device, &[handle])?);
                }
            }
        }
        Ok(this)
    }

    fn device_handle(&self, rank: Rank, signals_offset: u64) -> Result<NcclHandle> {
        let fabric = self.window.fabric();
        let (Some((comm, copy)), Some(window)) = (&fabric.endpoint(rank).device, self.window.rail(rank)) else {
            return Err(TideError::usage("the rails have no device communicator"));
        };
        let granted = comm.context_count().max(1) as u32;
        if granted < self.options.context_count {
            return Err(TideError::Unsupported {
                needed: format!("{} contexts of GIN", self.options.context_count),
                found: format!("{granted} that NCCL gives"),
            });
        }
        Ok(NcclHandle {
            comm: copy.address().0,
            window: window.handle().0,
            window_offset: 0,
            signals_offset,
            flush_slice_cycles: FLUSH_SLICE_CYCLES,
            context_count: self.options.context_count,
            queue_entries_max: QUEUE_ENTRIES / POSTING_THREADS_MAX,
        })
    }

    fn rail(&self, rank: Rank) -> Result<&Comm> {
        let rail = self.window.fabric().endpoint(rank).rail.as_ref();
        rail.ok_or_else(|| TideError::usage("one node has no rails"))
    }

    fn host(&self) -> Result<&HostSignals> {
        self.host.as_ref().ok_or_else(|| TideError::usage("these rails are driven by the GPU"))
    }

    /// Enqueues a call of NCCL's.
    fn enqueue(
        &self,
        stream: Stream,
        wait: Option<&MemoryWait>,
        mut call: impl FnMut(RawStream) -> Result<(), nccl_gin::host::NcclError>,
    ) -> Result<()> {
        let mut raw = |handle: *mut c_void| call(RawStream(handle)).map_err(TideError::from);
        self.window.fabric().gpu.enqueue_foreign(stream, wait, &mut raw)
    }
}

impl Net for NcclRails {
    fn context_count(&self) -> u32 {
        self.options.context_count
    }

    fn rounds_kernel(&self) -> Kernel {
        Kernel::NetNccl
    }

    fn finalize_kernel(&self) -> Kernel {
        Kernel::FinalizeNccl
    }

    fn handle(&self, rank: Rank) -> DevicePtr {
        let index = self.window.fabric().driven.ranks.index(rank);
        self.handles[index].as_ref().map_or(DevicePtr::NULL, DeviceBuffer::address)
    }

    fn shared_bytes_per_warp(&self) -> u32 {
        0
    }

    fn put(&self, stream: Stream, put: &HostPut) -> Result<()> {
        let host = self.host()?;
        if put.piece.bytes == 0 {
            return put.signal.map_or(Ok(()), |signal| self.signal(stream, put.from, put.to, signal));
        }
        let window = self.window.rail(put.from).ok_or_else(|| TideError::usage("one node has no rails"))?;
        let raw = Put {
            source: window,
            source_offset: put.piece.source_offset as usize,
            target: window,
            target_offset: put.piece.destination_offset as usize,
            bytes: put.piece.bytes as usize,
            peer: put.to.0,
            signal: host.index(put.signal.map_or(UNHEARD, |signal| number(signal.kind))),
            context: CONTEXT,
        };
        let rail = self.rail(put.from)?;
        // SAFETY: the stream is of the rank's device; the ranges lie in the arena, which outlives its collective's work.
        self.enqueue(stream, None, |stream| unsafe { rail.put_signal(&raw, stream) })
    }

    fn signal(&self, stream: Stream, from: Rank, to: Node, signal: HostSignal) -> Result<()> {
        let (rail, index) = (self.rail(from)?, self.host()?.index(number(signal.kind)));
        // SAFETY: as a put.
        self.enqueue(stream, None, |stream| unsafe { rail.signal(to.0, index, CONTEXT, stream) })
    }

    fn wait(&self, stream: Stream, rank: Rank, from: Node, signal: HostSignal, tag: WaitTag) -> Result<()> {
        let host = self.host()?;
        let kind = number(signal.kind);
        let count = {
            let mut awaited = host.awaited.lock().unwrap_or_else(PoisonError::into_inner);
            let last = awaited.entry((rank, from, kind)).or_insert(0);
            // Signals only grow: what was awaited once has come.
            let count = signal.value.wrapping_sub(*last) as i64;
            *last = if count > 0 { signal.value } else { *last };
            count
        };
        let Ok(count) = u32::try_from(count) else { return Ok(()) };
        if count == 0 {
            return Ok(());
        }
        let waits = [SignalWait { peer: from.0, count, signal: host.index(kind), context: CONTEXT }];
        let rail = self.rail(rank)?;
        let (address, timeout_ns) = (DevicePtr::NULL, self.options.timeout_ns);
        let wait = MemoryWait { address, value: signal.value, timeout_ns, tag };
        // SAFETY: the stream is of the rank's device.
        self.enqueue(stream, Some(&wait), |stream| unsafe { rail.wait_signal(&waits, stream) })
    }
}

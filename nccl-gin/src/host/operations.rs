//! What a host enqueues: puts, signals, waits, and the two collectives that a baseline needs.

use super::comm::{Comm, CommInner, State};
use super::error::{NcclError, Result, ResultCode};
use super::memory::{DevicePtr, Stream};
use super::sys;
use super::window::{Window, WindowFlags};
use std::ffi::c_int;
use std::sync::Arc;

/// An element's type, by NCCL's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum DataType {
    /// 8 bits, signed.
    Int8 = 0,
    /// 8 bits.
    Uint8 = 1,
    /// 32 bits, signed.
    Int32 = 2,
    /// 32 bits.
    Uint32 = 3,
    /// 64 bits, signed.
    Int64 = 4,
    /// 64 bits.
    Uint64 = 5,
    /// IEEE half.
    Float16 = 6,
    /// IEEE single.
    Float32 = 7,
    /// IEEE double.
    Float64 = 8,
    /// bfloat16.
    Bfloat16 = 9,
}

impl DataType {
    /// Size of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 => 1,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float32 => 4,
            Self::Int64 | Self::Uint64 | Self::Float64 => 8,
        }
    }
}

/// A reduction, by NCCL's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ReduceOp {
    /// The sum.
    Sum = 0,
    /// The product.
    Product = 1,
    /// The largest.
    Max = 2,
    /// The smallest.
    Min = 3,
    /// The mean.
    Average = 4,
}

/// A write to a peer's window, with a signal behind it.
#[derive(Debug, Clone, Copy)]
pub struct Put<'a> {
    /// Where the data lies: a symmetric window of this communicator.
    pub source: &'a Window,
    /// From which byte of it on.
    pub source_offset: usize,
    /// Where it goes: a symmetric window of this communicator, in the peer's part.
    pub target: &'a Window,
    /// To which byte on. The peer's part may be larger or smaller than this rank's: its bounds are the caller's care.
    pub target_offset: usize,
    /// How much, at least 1.
    pub bytes: usize,
    /// To which rank of the communicator; this one is allowed.
    pub peer: u32,
    /// Which signal of the peer counts it, below [`Config::rma_signals`](super::Config::rma_signals).
    pub signal: u32,
    /// In which context, below [`Config::rma_contexts`](super::Config::rma_contexts). Puts to one peer in one context arrive in order.
    pub context: u32,
}

/// Signals to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignalWait {
    /// From which rank.
    pub peer: u32,
    /// How many, beyond those that earlier waits took; at least 1.
    pub count: u32,
    /// On which signal.
    pub signal: u32,
    /// In which context.
    pub context: u32,
}

/// A communicator's operations, while its lock is held: what a [`Group`](super::Group) gives. [`Comm`] has the same, one at a time.
///
/// # Safety of all of them
///
/// The stream is live and belongs to the communicator's GPU. Memory and windows of an operation stay until the stream has passed it.
#[derive(Debug)]
pub struct Operations<'a> {
    pub(crate) comm: &'a Arc<CommInner>,
    pub(crate) state: &'a mut State,
}

impl Operations<'_> {
    /// Writes to a peer's window, then signals there. Once the stream has passed it the source may be reused. The signal tells the peer
    /// that this put and all earlier ones of this rank in the same context have arrived.
    ///
    /// # Safety
    ///
    /// See [`Operations`]. The range is within the peer's window.
    ///
    /// # Errors
    ///
    /// `TooOld` before 2.31.2, `Unsupported` without host RMA, `Usage` for windows or ranges that are not this communicator's, `Call`,
    /// `Timeout`, `Aborted`.
    pub unsafe fn put_signal(&mut self, put: &Put<'_>, stream: Stream) -> Result<()> {
        let functions = *self.comm.library.host_rma()?;
        self.comm.require_host_rma()?;
        self.check_put(put)?;
        let (peer, signal, context) = (number(put.peer)?, number(put.signal)?, number(put.context)?);
        let source = put.source.pointer().offset(put.source_offset as u64).as_mut_ptr();
        let raw = self.state.raw()?;
        // SAFETY: windows and source range were checked; the rest is the caller's promise.
        let code = unsafe {
            (functions.ncclPutSignal)(
                source,
                put.bytes,
                DataType::Int8 as c_int,
                peer,
                put.target.raw(),
                put.target_offset,
                signal,
                context,
                0,
                raw,
                stream.raw(),
            )
        };
        self.issued("ncclPutSignal", code)
    }

    fn check_put(&self, put: &Put<'_>) -> Result<()> {
        for (name, window) in [("source", put.source), ("target", put.target)] {
            if !window.is_of(self.comm) {
                return Err(NcclError::Usage(format!("the put's {name} is a window of another communicator")));
            }
            if !window.flags().contains(WindowFlags::COLL_SYMMETRIC) || window.flags().contains(WindowFlags::GIN_ONLY) {
                return Err(NcclError::Usage(format!("the put's {name} is no symmetric window for host RMA")));
            }
        }
        let end = put.source_offset.checked_add(put.bytes);
        if put.bytes == 0 || end.is_none_or(|end| end > put.source.bytes()) {
            let (from, bytes, all) = (put.source_offset, put.bytes, put.source.bytes());
            return Err(NcclError::Usage(format!("a put of {bytes} bytes from byte {from} of a window of {all}")));
        }
        self.check_peer(put.peer)
    }

    /// Signals a peer: all earlier puts of this rank to it in the same context have arrived.
    ///
    /// # Safety
    ///
    /// See [`Operations`].
    ///
    /// # Errors
    ///
    /// As [`put_signal`](Self::put_signal).
    pub unsafe fn signal(&mut self, peer: u32, signal: u32, context: u32, stream: Stream) -> Result<()> {
        let functions = *self.comm.library.host_rma()?;
        self.comm.require_host_rma()?;
        self.check_peer(peer)?;
        let (peer, signal, context) = (number(peer)?, number(signal)?, number(context)?);
        let raw = self.state.raw()?;
        // SAFETY: the caller's promise.
        let code = unsafe { (functions.ncclSignal)(peer, signal, context, 0, raw, stream.raw()) };
        self.issued("ncclSignal", code)
    }

    /// Makes the stream wait until all of `waits` are met, and takes the signals. Nothing ends this wait but the signals or an abort: time
    /// it with an event.
    ///
    /// # Safety
    ///
    /// See [`Operations`].
    ///
    /// # Errors
    ///
    /// As [`put_signal`](Self::put_signal).
    pub unsafe fn wait_signal(&mut self, waits: &[SignalWait], stream: Stream) -> Result<()> {
        let functions = *self.comm.library.host_rma()?;
        self.comm.require_host_rma()?;
        let mut descriptors = waits.iter().map(|wait| self.descriptor(wait)).collect::<Result<Vec<_>>>()?;
        if descriptors.is_empty() {
            return Ok(());
        }
        let count = number(u32::try_from(descriptors.len()).unwrap_or(u32::MAX))?;
        let raw = self.state.raw()?;
        // SAFETY: the descriptors outlive the call, which copies them; the rest is the caller's promise.
        let code = unsafe { (functions.ncclWaitSignal)(count, descriptors.as_mut_ptr(), raw, stream.raw()) };
        self.issued("ncclWaitSignal", code)
    }

    fn descriptor(&self, wait: &SignalWait) -> Result<sys::ncclWaitSignalDesc_t> {
        self.check_peer(wait.peer)?;
        if wait.count == 0 {
            return Err(NcclError::Usage("a wait for no signals".to_owned()));
        }
        Ok(sys::ncclWaitSignalDesc_t {
            opCnt: number(wait.count)?,
            peer: number(wait.peer)?,
            sigIdx: number(wait.signal)?,
            ctx: number(wait.context)?,
        })
    }

    fn check_peer(&self, peer: u32) -> Result<()> {
        let all = self.comm.rank_count();
        if peer < all { Ok(()) } else { Err(NcclError::Usage(format!("peer {peer} of {all} ranks"))) }
    }

    /// Gathers `count` elements of each rank in the order of ranks. In place if `send` is this rank's part of `receive`.
    ///
    /// # Safety
    ///
    /// See [`Operations`]. `send` has `count` elements, `receive` as many for each rank.
    ///
    /// # Errors
    ///
    /// `Call`, `Timeout`, `Aborted`.
    pub unsafe fn all_gather(
        &mut self,
        send: DevicePtr,
        receive: DevicePtr,
        count: usize,
        data_type: DataType,
        stream: Stream,
    ) -> Result<()> {
        let function = self.comm.library.core().ncclAllGather;
        let raw = self.state.raw()?;
        // SAFETY: the caller's promise.
        let code =
            unsafe { function(send.as_mut_ptr(), receive.as_mut_ptr(), count, data_type as c_int, raw, stream.raw()) };
        self.issued("ncclAllGather", code)
    }

    /// Reduces, over all ranks, as many times `count` elements as there are ranks, and gives each rank its `count`. In place if `receive`
    /// is this rank's part of `send`.
    ///
    /// # Safety
    ///
    /// See [`Operations`]. `receive` has `count` elements, `send` as many for each rank.
    ///
    /// # Errors
    ///
    /// `Call`, `Timeout`, `Aborted`.
    pub unsafe fn reduce_scatter(
        &mut self,
        send: DevicePtr,
        receive: DevicePtr,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
        stream: Stream,
    ) -> Result<()> {
        let function = self.comm.library.core().ncclReduceScatter;
        let raw = self.state.raw()?;
        // SAFETY: the caller's promise.
        let code = unsafe {
            function(send.as_mut_ptr(), receive.as_mut_ptr(), count, data_type as c_int, op as c_int, raw, stream.raw())
        };
        self.issued("ncclReduceScatter", code)
    }

    /// Sees to what a call left under way. Within a group nothing is: its end does that.
    fn issued(&mut self, call: &'static str, code: c_int) -> Result<()> {
        if super::group::is_open() && code == ResultCode::IN_PROGRESS.0 {
            return Ok(());
        }
        self.comm.settle(self.state, call, code)
    }
}

/// A rank, an index or a count for C.
fn number(value: u32) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| NcclError::Usage(format!("{value} is beyond 2^31 - 1")))
}

/// One operation at a time; several together: [`Comm::group`].
impl Comm {
    /// See [`Operations::put_signal`].
    ///
    /// # Safety
    ///
    /// As there.
    ///
    /// # Errors
    ///
    /// As there, and `Usage` while the thread has a group open.
    pub unsafe fn put_signal(&self, put: &Put<'_>, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        self.locked(|operations| unsafe { operations.put_signal(put, stream) })
    }

    /// See [`Operations::signal`].
    ///
    /// # Safety
    ///
    /// As there.
    ///
    /// # Errors
    ///
    /// As there, and `Usage` while the thread has a group open.
    pub unsafe fn signal(&self, peer: u32, signal: u32, context: u32, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        self.locked(|operations| unsafe { operations.signal(peer, signal, context, stream) })
    }

    /// See [`Operations::wait_signal`].
    ///
    /// # Safety
    ///
    /// As there.
    ///
    /// # Errors
    ///
    /// As there, and `Usage` while the thread has a group open.
    pub unsafe fn wait_signal(&self, waits: &[SignalWait], stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        self.locked(|operations| unsafe { operations.wait_signal(waits, stream) })
    }

    /// See [`Operations::all_gather`].
    ///
    /// # Safety
    ///
    /// As there.
    ///
    /// # Errors
    ///
    /// As there, and `Usage` while the thread has a group open.
    pub unsafe fn all_gather(
        &self,
        send: DevicePtr,
        receive: DevicePtr,
        count: usize,
        data_type: DataType,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        self.locked(|operations| unsafe { operations.all_gather(send, receive, count, data_type, stream) })
    }

    /// See [`Operations::reduce_scatter`].
    ///
    /// # Safety
    ///
    /// As there.
    ///
    /// # Errors
    ///
    /// As there, and `Usage` while the thread has a group open.
    pub unsafe fn reduce_scatter(
        &self,
        send: DevicePtr,
        receive: DevicePtr,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        self.locked(|operations| unsafe { operations.reduce_scatter(send, receive, count, data_type, op, stream) })
    }

    fn locked(&self, operation: impl FnOnce(&mut Operations<'_>) -> Result<()>) -> Result<()> {
        let mut state = self.inner.lock()?;
        operation(&mut Operations { comm: &self.inner, state: &mut state })
    }
}

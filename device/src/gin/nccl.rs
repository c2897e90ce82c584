//! GIN by NCCL's device code: the rails of a cluster.
//!
//! Every call goes to NCCL's bitcode, so this back end is no code of the base module. It is instantiated in modules that
//! are linked with NCCL (`cargo xtask ptx --nccl`), one for each [`crate::abi::kernel::NcclBackend`].
//!
//! * Signals are words of the arena itself, which the same window covers (NCCL's "VA" signals).
//! * NCCL's own waits have no limit, and no abort reaches them. None is called: [`Gin::read_signal`] is one look, a flush
//!   goes in slices under [`crate::wait`], and a post never meets a full queue, because [`Posted`] counts.
//! * Several threads and kernels may use a context at once. Each thread counts its own posts; the host gives each a share
//!   of the queue.

use super::Gin;
use crate::abi::fault::{Operation, WaitKind, WaitTag};
use crate::abi::params::{Deadline, NcclHandle};
use crate::abi::signal::SIGNAL_BYTES;
use crate::arch::machine::WaitScope;
use crate::arch::shared::SharedAddr;
use crate::wait::{self, Look};
use nccl_gin::device::{self as nccl, DevComm, Window, order, scope, signal_op, signal_type};

/// One thread's hold on the network.
pub struct Nccl {
    handle: NcclHandle,
    posted: Posted,
    deadline: Deadline,
    rank: u32,
}

/// What a thread has posted on each context since its last flush, in entries of the context's queues.
///
/// Eight counters in one word: an array that is indexed at run time would lie in local memory. Contexts beyond the eighth
/// share them, which flushes too early at worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Posted(u64);

impl Posted {
    /// Nothing.
    pub const NOTHING: Self = Self(0);

    const fn shift(context: u32) -> u32 {
        context % 8 * 8
    }

    /// Entries on a context.
    pub const fn on(self, context: u32) -> u32 {
        (self.0 >> Self::shift(context)) as u8 as u32
    }

    /// With `entries` more on a context; `None` if there would be more than `most`.
    pub const fn with(self, context: u32, entries: u32, most: u32) -> Option<Self> {
        let most = if most < NcclHandle::QUEUE_ENTRIES_MAX { most } else { NcclHandle::QUEUE_ENTRIES_MAX };
        if entries > most || self.on(context) > most - entries {
            return None;
        }
        Some(Self(self.0 + ((entries as u64) << Self::shift(context))))
    }
}

const _: () = {
    let some = Posted::NOTHING.with(3, 2, 4).unwrap().with(0, 1, 4).unwrap();
    assert!(some.on(3) == 2 && some.on(0) == 1 && some.on(2) == 0 && some.on(11) == 2);
    assert!(some.with(3, 3, 4).is_none() && some.with(3, 2, 4).unwrap().on(3) == 4);
    assert!(some.with(7, 255, u32::MAX).unwrap().on(0) == 1 && some.with(7, 256, u32::MAX).is_none());
    assert!(some.with(7, 255, 300).unwrap().with(7, 1, 300).is_none());
};

/// Entries of a queue that a put takes; a signal is one more.
const fn entries(bytes: u64, has_signal: bool) -> u32 {
    bytes.div_ceil(nccl::ENTRY_BYTES_MAX) as u32 + has_signal as u32
}

const _: () = assert!(entries(0, true) == 1 && entries(1, true) == 2 && entries(nccl::ENTRY_BYTES_MAX + 1, false) == 2);

// Every function is inlined where it is called, so that a build which calls none refers to nothing of NCCL.
impl Nccl {
    #[inline(always)]
    fn comm(&self) -> *const DevComm {
        self.handle.comm as *const DevComm
    }

    #[inline(always)]
    fn window(&self) -> *const Window {
        self.handle.window as *const Window
    }

    /// Offset in the window of a byte of an arena: every rank's arena begins at the same one.
    #[inline(always)]
    fn offset(&self, in_arena: u64) -> u64 {
        self.handle.window_offset + in_arena
    }

    #[inline(always)]
    fn signal_offset(&self, signal: u32) -> u64 {
        self.offset(self.handle.signals_offset + SIGNAL_BYTES * u64::from(signal))
    }

    /// Makes room for `entries` more in this thread's share of a context's queue, and counts them.
    #[inline(always)]
    fn count(&mut self, context: u32, entries: u32) {
        let most = self.handle.queue_entries_max;
        let posted = match self.posted.with(context, entries, most) {
            Some(posted) => Some(posted),
            None => {
                self.flush();
                // A post that is larger than the share goes out alone.
                Posted::NOTHING.with(context, entries.min(NcclHandle::QUEUE_ENTRIES_MAX), u32::MAX)
            }
        };
        self.posted = posted.unwrap_or(Posted::NOTHING);
    }

    /// Posts a signal that [`Self::count`] has counted.
    ///
    /// # Safety
    /// As [`Gin::signal`].
    #[inline(always)]
    unsafe fn post_signal(&self, context: u32, peer: u32, signal: u32) {
        // ORDER: what this thread has read or acquired stays before the signal: scopes as for a put.
        // SAFETY: the handle's communicator is live; the signal is the caller's promise.
        unsafe {
            nccl::nccl_gin_signal(
                self.comm(),
                context,
                peer,
                signal_type::VA,
                self.window(),
                self.signal_offset(signal),
                true,
                signal_op::ADD,
                1,
                scope::THREAD,
                scope::SYSTEM,
            );
        }
    }

    /// Until all that was posted on a context is complete.
    #[inline(always)]
    fn flush_context(&self, context: u32) {
        let tag = WaitTag {
            kind: WaitKind::Flush as u32,
            operation: Operation::None as u32,
            rank: self.rank,
            peer: self.rank,
            wave: 0,
            round: 0,
            epoch: 0,
        };
        let describe = || (tag, context, u64::from(nccl::SUCCESS));
        wait::until_in_slices(self.deadline, WaitScope::System, describe, || {
            // ORDER: acquire: the network has read its sources before this thread, or whoever it tells, writes there next.
            // SAFETY: the handle's communicator is live.
            let result = unsafe {
                nccl::nccl_gin_flush_timeout(self.comm(), context, order::ACQUIRE, self.handle.flush_slice_cycles)
            };
            Look { holds: result == nccl::SUCCESS, seen: u64::from(result) }
        });
    }
}

impl Gin for Nccl {
    #[inline(always)]
    unsafe fn shared_bytes(_handle: u64) -> u32 {
        0
    }

    #[inline(always)]
    unsafe fn open(handle: u64, _shared: SharedAddr, deadline: Deadline, rank: u32) -> Self {
        // SAFETY: the caller's promise.
        let handle = unsafe { *(handle as *const NcclHandle) };
        Self { handle, posted: Posted::NOTHING, deadline, rank }
    }

    #[inline(always)]
    fn context_count(&self) -> u32 {
        self.handle.context_count
    }

    #[inline(always)]
    unsafe fn put(
        &mut self,
        context: u32,
        peer: u32,
        destination_offset: u64,
        source_offset: u64,
        bytes: u64,
        signal: Option<u32>,
    ) {
        let entries = entries(bytes, signal.is_some());
        if entries == 0 {
            return;
        }
        self.count(context, entries);
        if bytes == 0 {
            // SAFETY: the caller's promise; without bytes the entry is a signal's.
            unsafe { self.post_signal(context, peer, signal.unwrap_or(0)) };
            return;
        }
        // ORDER: the source was written by copy engines, by other GPUs or by a peer's put, before this launch in its stream,
        // or it was acquired by this block. This thread has released none of it to the system (given: thread), and the NIC
        // that reads it, the GPU's or the proxy's, is an agent of the system (required: system): NCCL puts a system
        // fence before the post.
        // SAFETY: the handle's communicator is live, its window covers the arenas; the rest is the caller's promise.
        unsafe {
            nccl::nccl_gin_put(
                self.comm(),
                context,
                peer,
                self.window(),
                self.offset(destination_offset),
                self.window(),
                self.offset(source_offset),
                bytes,
                if signal.is_some() { signal_type::VA } else { signal_type::NONE },
                self.window(),
                self.signal_offset(signal.unwrap_or(0)),
                true,
                signal_op::ADD,
                1,
                scope::THREAD,
                scope::SYSTEM,
            );
        }
    }

    #[inline(always)]
    unsafe fn signal(&mut self, context: u32, peer: u32, signal: u32) {
        self.count(context, entries(0, true));
        // SAFETY: the caller's promise.
        unsafe { self.post_signal(context, peer, signal) };
    }

    #[inline(always)]
    fn flush(&mut self) {
        for context in 0..self.handle.context_count {
            if self.posted.on(context) > 0 {
                self.flush_context(context);
            }
        }
        self.posted = Posted::NOTHING;
    }

    #[inline(always)]
    unsafe fn read_signal(&self, signal: u32) -> u64 {
        // ORDER: acquire, system scope; partner: the peer's strong signal, which follows its puts.
        // SAFETY: the handle's communicator is live; the signal is the caller's promise.
        unsafe {
            nccl::nccl_gin_read_signal(
                self.comm(),
                self.window(),
                self.signal_offset(signal),
                u64::BITS,
                order::ACQUIRE,
            )
        }
    }
}

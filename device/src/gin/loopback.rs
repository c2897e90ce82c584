//! GIN over peer memory: every rank's arena is an address that this GPU can reach.
//!
//! A put bounces through shared memory by bulk copies, so that one thread moves it at the rate of the
//! copy hardware: [`STAGES`] bounce stages, loads [`LEAD`] stages ahead of stores.

use super::Gin;
use crate::abi::fault::{Operation, WaitKind, WaitTag};
use crate::abi::params::{Deadline, LoopbackHandle};
use crate::abi::signal::SIGNAL_BYTES;
use crate::arch::machine::WaitScope;
use crate::arch::mbarrier::{self, Mbarrier};
use crate::arch::shared::SharedAddr;
use crate::arch::{atomic, bulk, fence};
use crate::wait::{self, Look};

/// Bounce stages per posting thread.
pub const STAGES: u32 = 4;
/// By how many stages loads run ahead of stores.
pub const LEAD: u32 = 2;
/// Stores that may still read their stage when a stage is loaded again.
const PENDING_READS: u32 = STAGES - LEAD - 1;
const _: () = assert!(LEAD >= 1 && STAGES > LEAD, "a stage must be stored before it is loaded again");

/// Shared memory that a posting thread needs, bytes: its mbarriers in one 128-byte line, then its stages.
pub const fn shared_bytes(bounce_bytes: u32) -> u32 {
    BARRIER_BYTES + STAGES * bounce_bytes
}

const BARRIER_BYTES: u32 = 128;
const _: () = assert!(STAGES * mbarrier::BYTES <= BARRIER_BYTES);

/// One thread's hold on the loopback network.
pub struct Loopback {
    handle: LoopbackHandle,
    own_arena: u64,
    shared: SharedAddr,
    deadline: Deadline,
    rank: u32,
    /// Pieces loaded since `open`, over all puts: selects stage and phase.
    loaded: u32,
}

impl Loopback {
    fn arena(&self, node: u32) -> u64 {
        // SAFETY: the handle's table has one entry per node, and peers are nodes.
        unsafe { *(self.handle.arenas as *const u64).add(node as usize) }
    }

    fn barrier(&self, piece: u32) -> Mbarrier {
        Mbarrier::at(self.shared.add(piece % STAGES * mbarrier::BYTES))
    }

    fn stage(&self, piece: u32) -> SharedAddr {
        self.shared.add(BARRIER_BYTES + piece % STAGES * self.handle.bounce_bytes)
    }

    fn load(&mut self, source: u64, bytes: u32) {
        let piece = self.loaded;
        if piece >= STAGES {
            bulk::wait_group_read::<PENDING_READS>();
        }
        // SAFETY: the stage is this thread's own and its last store has read it; the barrier was initialised in
        // `open` and its previous phase was awaited by `store`.
        unsafe {
            self.barrier(piece).arrive_expect_tx(bytes);
            bulk::load(self.stage(piece), source, bytes, self.barrier(piece));
        }
        self.loaded = piece + 1;
    }

    fn store(&self, piece: u32, destination: u64, bytes: u32) {
        let barrier = self.barrier(piece);
        let parity = (piece / STAGES) & 1;
        let rank = self.rank;
        wait::until(
            self.deadline,
            WaitScope::Block,
            || (local_wait_tag(rank), 0, u64::from(parity)),
            // SAFETY: initialised in `open`.
            || Look { holds: unsafe { barrier.try_wait_parity(parity) }, seen: u64::from(parity ^ 1) },
        );
        // SAFETY: the stage holds `bytes` and is loaded again only after `wait_group_read`; the destination is
        // covered by the peer's credit.
        unsafe { bulk::store(destination, self.stage(piece), bytes) };
        bulk::commit_group();
    }
}

fn local_wait_tag(rank: u32) -> WaitTag {
    WaitTag {
        kind: WaitKind::StageFull as u32,
        operation: Operation::None as u32,
        rank,
        peer: rank,
        wave: 0,
        round: 0,
        epoch: 0,
    }
}

impl Gin for Loopback {
    unsafe fn shared_bytes(handle: u64) -> u32 {
        // SAFETY: the caller's promise.
        shared_bytes(unsafe { (*(handle as *const LoopbackHandle)).bounce_bytes })
    }

    unsafe fn open(handle: u64, shared: SharedAddr, deadline: Deadline, rank: u32) -> Self {
        // SAFETY: the caller's promise.
        let handle = unsafe { *(handle as *const LoopbackHandle) };
        let mut gin = Self { handle, own_arena: 0, shared, deadline, rank, loaded: 0 };
        gin.own_arena = gin.arena(handle.own_node);
        for piece in 0..STAGES {
            // SAFETY: the caller gave this shared memory to this thread alone; no barrier is in use yet.
            unsafe { gin.barrier(piece).init(1) };
        }
        fence::mbarrier_init();
        gin
    }

    fn context_count(&self) -> u32 {
        self.handle.context_count
    }

    unsafe fn put(
        &mut self,
        context: u32,
        peer: u32,
        destination_offset: u64,
        source_offset: u64,
        bytes: u64,
        signal: Option<u32>,
    ) {
        let source = self.own_arena + source_offset;
        let destination = self.arena(peer) + destination_offset;
        let bounce_bytes = u64::from(self.handle.bounce_bytes);
        let piece_count = bytes.div_ceil(bounce_bytes) as u32;
        let piece_bytes = |i: u32| (bytes - u64::from(i) * bounce_bytes).min(bounce_bytes) as u32;
        let first_piece = self.loaded;
        for step in 0..piece_count + LEAD {
            if step < piece_count {
                self.load(source + u64::from(step) * bounce_bytes, piece_bytes(step));
            }
            if step >= LEAD && step - LEAD < piece_count {
                let i = step - LEAD;
                self.store(first_piece.wrapping_add(i), destination + u64::from(i) * bounce_bytes, piece_bytes(i));
            }
        }
        if let Some(signal) = signal {
            // SAFETY: the caller's promise.
            unsafe { self.signal(context, peer, signal) };
        }
    }

    unsafe fn signal(&mut self, _context: u32, peer: u32, signal: u32) {
        // ORDER: the full wait makes the caller's bulk stores, of every context, visible to it; the release then
        // publishes them. Without it the signal overtakes the data. Partner: `read_signal` at the peer. sys: the
        // peer may be another GPU.
        bulk::wait_group::<0>();
        let address = self.arena(peer) + self.handle.signals_offset + SIGNAL_BYTES * u64::from(signal);
        // SAFETY: the signal exists at the peer by the caller's promise.
        unsafe { atomic::add_release_sys(address, 1) };
    }

    fn flush(&mut self) {
        bulk::wait_group_read::<0>();
    }

    unsafe fn read_signal(&self, signal: u32) -> u64 {
        let address = self.own_arena + self.handle.signals_offset + SIGNAL_BYTES * u64::from(signal);
        // ORDER: acquire, partner of `signal` at the peer.
        // SAFETY: the signal exists here by the caller's promise.
        unsafe { atomic::load_acquire_sys(address) }
    }
}

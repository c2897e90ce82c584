//! The network rounds of a launch: one block drives one rank [TIDE App. G].
//!
//! Launch: one block per rank that the GPU carries, all in one launch, because they wait for each other; any number of
//! warps, each posting through its first thread; dynamic shared memory of [`Gin::shared_bytes`] per warp.
//!
//! ```text
//! for each round:
//!     warp x, for transfers x, x + warps, …: for each put of it: wait for the peer's credit; put in stripes, dealt to the
//!                                         contexts in turn; the last put with a strong signal on the last stripe of each
//!                                         context; flush
//!     warp x, for arrivals x, x + warps, …: wait for the data signal of each context
//!     block barrier; raise the progress word
//! ```
//!
//! Invariants: I3, a put waits for the credit of its destination, and a round ends with a flush, after which the
//! outbox blocks it sent may be reused; a transfer is one warp's, because a strong signal covers only what its own thread
//! has put; I4, every wait's producer is in this launch or enqueued before it.

use crate::abi::fault::{WaitKind, WaitTag};
use crate::abi::params::{NetArrival, NetParams, NetPut, NetRank, NetRound};
use crate::abi::signal::reached;
use crate::arch::machine::WaitScope;
use crate::arch::{atomic, barrier, fence, shared, thread};
use crate::gin::Gin;
use crate::wait::{self, Look};

/// Contexts that carry a signal for a transfer of `bytes`: one per stripe, at most all, at least one.
pub const fn active_contexts(bytes: u64, stripe_bytes: u64, context_count: u32) -> u32 {
    let stripes = bytes.div_ceil(stripe_bytes);
    if stripes == 0 {
        1
    } else if stripes < context_count as u64 {
        stripes as u32
    } else {
        context_count
    }
}

/// The kernel.
///
/// # Safety
/// `params` points to a block that holds what [`NetParams`] states, for handles of the back end `G`.
#[inline(always)]
pub unsafe fn net<G: Gin>(params: *const NetParams) {
    // SAFETY: the caller's promise; block and tables are read-only during the launch.
    let p = unsafe { &*params };
    // SAFETY: the table has one entry per block.
    let rank = unsafe { &*(p.ranks as *const NetRank).add(thread::block_idx_x() as usize) };
    // SAFETY: the table's handle is of the back end `G`; each warp's leader takes its own part of the shared memory.
    let mut gin = thread::is_warp_leader().then(|| unsafe {
        let own = shared::dynamic().add(thread::warp_idx() * G::shared_bytes(rank.gin));
        G::open(rank.gin, own, rank.deadline, rank.rank)
    });
    let warps = thread::block_dim_x() / thread::WARP_SIZE;
    let mine = |count: u32| (thread::warp_idx()..count).step_by(warps as usize);
    for index in 0..p.round_count {
        // SAFETY: inside the rank's table by the launcher's count.
        let round = unsafe { *(rank.rounds as *const NetRound).add((p.round_first + index) as usize) };
        if let Some(gin) = &mut gin {
            let mut transfer = 0;
            for i in 0..round.put_count {
                // SAFETY: as above.
                let put = unsafe { *(rank.puts as *const NetPut).add((round.put_first + i) as usize) };
                if transfer % warps == thread::warp_idx() {
                    wait_credit(p, rank, &round, &put, gin);
                    post(p, &put, gin);
                }
                transfer += u32::from(put.data_signal().is_some());
            }
            gin.flush();
            for i in mine(round.arrival_count) {
                // SAFETY: as above.
                let arrival = unsafe { *(rank.arrivals as *const NetArrival).add((round.arrival_first + i) as usize) };
                wait_arrival(p, rank, &round, &arrival, gin);
            }
        }
        barrier::sync_block();
        // ORDER: what arrived was written by the peers' async proxy and acquired generically; a later round may read
        // it by bulk copies.
        fence::proxy_async();
        if thread::thread_idx_x() == 0 && rank.progress != 0 {
            // ORDER: releases what all warps acquired, through the block barrier; partner: the host stream that waits
            // for the progress word.
            // SAFETY: a word of this rank's arena.
            unsafe { atomic::store_release_sys(rank.progress, p.progress_first + u64::from(index) + 1) };
        }
    }
}

fn tag(p: &NetParams, rank: &NetRank, round: &NetRound, peer: u32, kind: WaitKind) -> WaitTag {
    WaitTag {
        kind: kind as u32,
        operation: rank.operation,
        rank: rank.rank,
        peer: peer * rank.local_rank_count + rank.rank % rank.local_rank_count,
        wave: round.wave,
        round: round.round,
        epoch: p.epoch,
    }
}

fn wait_credit<G: Gin>(p: &NetParams, rank: &NetRank, round: &NetRound, put: &NetPut, gin: &G) {
    let expected = p.sequence.wrapping_sub(u64::from(put.credit_lead));
    wait::until(
        rank.deadline,
        WaitScope::System,
        || (tag(p, rank, round, put.peer, WaitKind::Credit), 0, expected),
        || {
            // ORDER: acquire, partner: the peer's finalizer; the peer has read what this put overwrites.
            // SAFETY: the table names signals of this rank.
            let seen = unsafe { gin.read_signal(put.credit) };
            Look { holds: reached(seen, expected), seen }
        },
    );
}

fn post<G: Gin>(p: &NetParams, put: &NetPut, gin: &mut G) {
    let contexts = active_contexts(put.bytes, p.stripe_bytes, gin.context_count());
    let stripes = put.bytes.div_ceil(p.stripe_bytes).max(1);
    let source_offset = p.source_offset(put);
    for stripe in 0..stripes {
        let context = (stripe % u64::from(contexts)) as u32;
        let offset = stripe * p.stripe_bytes;
        let bytes = (put.bytes - offset).min(p.stripe_bytes);
        let is_last_of_context = stripe + u64::from(contexts) >= stripes;
        let signal = put.data_signal().filter(|_| is_last_of_context).map(|signal| signal + context);
        // A stripe may begin in the head and end behind it.
        let head = put.head_bytes.saturating_sub(offset).min(bytes);
        // SAFETY: the table's ranges lie in the arenas; the peer's credit was awaited; the source is kept until the
        // flush at the end of the round.
        unsafe {
            let destination = put.destination_offset + offset;
            if head > 0 {
                let signal = signal.filter(|_| head == bytes);
                gin.put(context, put.peer, destination, put.head_offset + offset, head, signal);
            }
            if head < bytes || bytes == 0 {
                let source = source_offset + (offset + head - put.head_bytes);
                gin.put(context, put.peer, destination + head, source, bytes - head, signal);
            }
        }
    }
}

fn wait_arrival<G: Gin>(p: &NetParams, rank: &NetRank, round: &NetRound, arrival: &NetArrival, gin: &G) {
    for context in 0..active_contexts(arrival.bytes, p.stripe_bytes, gin.context_count()) {
        wait::until(
            rank.deadline,
            WaitScope::System,
            || (tag(p, rank, round, arrival.peer, WaitKind::Arrival), context, p.sequence),
            || {
                // ORDER: acquire, partner: the strong signal of the peer's put.
                // SAFETY: the table names signals of this rank.
                let seen = unsafe { gin.read_signal(arrival.signal + context) };
                Look { holds: reached(seen, p.sequence), seen }
            },
        );
    }
}

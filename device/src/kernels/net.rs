//! The network rounds of a launch: one block drives one rank [TIDE App. G].
//!
//! Launch: one block per rank that the GPU carries, all in one launch, because they wait for each other; any number of
//! warps, each posting through its first thread; dynamic shared memory of [`Gin::shared_bytes`] per warp.
//!
//! ```text
//! for each round:
//!     warp x, for transfers x, x + warps, …, for each put of it: wait for the peer's credit, and that it is ready for the round; put lead and
//!                                         rest in stripes, dealt to the contexts in turn, each with a strong signal on the
//!                                         last stripe of each context
//!     warp x, for arrivals x, x + warps, …: wait for the lead, and tell who puts here in the next round; wait for the rest
//!     flush; block barrier; raise the progress word
//! ```
//!
//! Invariants: I3, a put waits for the credit of its destination, and a round ends with a flush, after which the
//! outbox blocks it sent may be reused; a transfer is one warp's, because a strong signal covers only what its own thread
//! has put; I4, every wait's producer is in this launch or enqueued before it.

use crate::abi::fault::{WaitKind, WaitTag};
use crate::abi::params::{NO_SIGNAL, NetArrival, NetParams, NetPut, NetRank, NetRound};
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
                    send(p, rank, &round, &put, gin);
                }
                transfer += u32::from(put.signal != NO_SIGNAL);
            }
            for i in mine(round.arrival_count) {
                // SAFETY: as above.
                let arrival = unsafe { *(rank.arrivals as *const NetArrival).add((round.arrival_first + i) as usize) };
                if arrival.lead_bytes > 0 {
                    wait_arrival(p, rank, &round, &arrival, arrival.lead_signal, arrival.lead_bytes, gin);
                }
                if arrival.pace_signal != NO_SIGNAL {
                    // SAFETY: the table names a signal of the peer.
                    unsafe { gin.signal(0, arrival.pace_peer, arrival.pace_signal) };
                }
                wait_arrival(p, rank, &round, &arrival, arrival.signal, arrival.bytes - arrival.lead_bytes, gin);
            }
            gin.flush();
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

/// One put: waits for the peer's leave, then posts the lead and the rest, in a loop: all of a network's code for a put is
/// inlined where it is called, so it is called in one place.
#[inline(always)]
fn send<G: Gin>(p: &NetParams, rank: &NetRank, round: &NetRound, put: &NetPut, gin: &mut G) {
    let credit = p.sequence.wrapping_sub(u64::from(put.credit_ahead));
    wait_signal(p, rank, round, put.peer, WaitKind::Credit, put.credit, credit, gin);
    if put.pace != NO_SIGNAL {
        wait_signal(p, rank, round, put.peer, WaitKind::Pace, put.pace, p.sequence, gin);
    }
    let has_lead = put.lead_bytes > 0;
    for part in u32::from(!has_lead)..2 {
        let (first, bytes, signal) = match part {
            0 => (0, put.lead_bytes, put.lead_signal),
            _ => (put.lead_bytes, put.bytes - put.lead_bytes, put.signal),
        };
        post(p, put, first, bytes, signal, gin);
    }
}

/// Waits until a signal of this rank, which the rail peer on `peer` raises, has reached `expected`.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn wait_signal<G: Gin>(
    p: &NetParams,
    rank: &NetRank,
    round: &NetRound,
    peer: u32,
    kind: WaitKind,
    signal: u32,
    expected: u64,
    gin: &G,
) {
    wait::until(
        rank.deadline,
        WaitScope::System,
        || (tag(p, rank, round, peer, kind), 0, expected),
        || {
            // ORDER: acquire; partner of a credit: the peer's finalizer, which has read what the put overwrites; of a
            // pace signal: the peer's network kernel.
            // SAFETY: the table names signals of this rank.
            let seen = unsafe { gin.read_signal(signal) };
            Look { holds: reached(seen, expected), seen }
        },
    );
}

/// Puts bytes `first..first + bytes` of a transfer, in stripes, with their signals.
#[inline(always)]
fn post<G: Gin>(p: &NetParams, put: &NetPut, first: u64, bytes: u64, signal: u32, gin: &mut G) {
    let contexts = active_contexts(bytes, p.stripe_bytes, gin.context_count());
    let stripes = bytes.div_ceil(p.stripe_bytes).max(1);
    let source_offset = p.source_offset(put);
    for stripe in 0..stripes {
        let context = (stripe % u64::from(contexts)) as u32;
        let offset = stripe * p.stripe_bytes;
        let is_last_of_context = stripe + u64::from(contexts) >= stripes;
        let signal = (is_last_of_context && signal != NO_SIGNAL).then(|| signal + context);
        let stripe_bytes = (bytes - offset).min(p.stripe_bytes);
        // A stripe may begin apart and end in the rest.
        let [apart, rest] = put.pieces(source_offset, first + offset, stripe_bytes);
        let has_rest = rest.bytes > 0 || stripe_bytes == 0;
        for part in u32::from(apart.bytes == 0)..1 + u32::from(has_rest) {
            let piece = if part == 0 { apart } else { rest };
            let signal = signal.filter(|_| part == 1 || !has_rest);
            // SAFETY: the table's ranges lie in the arenas; the peer's credit was awaited; the source is kept until the
            // flush at the end of the round.
            unsafe {
                gin.put(context, put.peer, piece.destination_offset, piece.source_offset, piece.bytes, signal);
            }
        }
    }
}

/// Waits for `bytes` of a transfer: for the signal of every context that carries some.
#[inline(always)]
fn wait_arrival<G: Gin>(
    p: &NetParams,
    rank: &NetRank,
    round: &NetRound,
    arrival: &NetArrival,
    signal: u32,
    bytes: u64,
    gin: &G,
) {
    for context in 0..active_contexts(bytes, p.stripe_bytes, gin.context_count()) {
        wait::until(
            rank.deadline,
            WaitScope::System,
            || (tag(p, rank, round, arrival.peer, WaitKind::Arrival), context, p.sequence),
            || {
                // ORDER: acquire, partner: the strong signal of the peer's put.
                // SAFETY: the table names signals of this rank.
                let seen = unsafe { gin.read_signal(signal + context) };
                Look { holds: reached(seen, p.sequence), seen }
            },
        );
    }
}

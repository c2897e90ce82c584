//! How the ranks of a node wait for each other: words in each other's arenas, written and awaited by streams.

use super::Communicator;
use crate::arena::{Arena, Signals};
use crate::error::Result;
use crate::gpu::{MemoryWait, Stream};
use crate::plan::Rank;
use std::sync::Arc;
use tide_device::abi::fault::{Operation, WaitKind, WaitTag};

/// Where in the protocol a wait stands, for the fault that it may become.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Place {
    pub(super) epoch: u64,
    pub(super) wave: u32,
    pub(super) round: u32,
}

/// The words of one collective's arena, as the ranks of a node use them.
pub(super) struct NodeSignals {
    pub(super) comm: Communicator,
    pub(super) arena: Arc<Arena>,
    pub(super) operation: Operation,
}

impl NodeSignals {
    /// Makes `stream` of `rank` wait until its word `signal`, which `peer` raises, has reached `value`.
    pub(super) fn wait(
        &self,
        stream: Stream,
        (rank, peer): (Rank, Rank),
        signal: u32,
        value: u64,
        (kind, place): (WaitKind, Place),
    ) -> Result<()> {
        let tag = WaitTag {
            kind: kind as u32,
            operation: self.operation as u32,
            rank: rank.0,
            peer: peer.0,
            wave: place.wave,
            round: place.round,
            epoch: place.epoch,
        };
        let address = self.arena.signal(rank, signal);
        self.comm.gpu().wait_value(stream, &MemoryWait { address, value, timeout_ns: self.comm.timeout_ns(), tag })
    }

    /// Makes `stream` of `rank` wait until every local rank has raised its word there to `value`.
    pub(super) fn wait_node(
        &self,
        stream: Stream,
        rank: Rank,
        signals: Signals,
        value: u64,
        why: (WaitKind, Place),
    ) -> Result<()> {
        let mut ranks = self.arena.node_ranks(rank);
        ranks.try_for_each(|(local, peer)| self.wait(stream, (rank, peer), signals.signal(local.0), value, why))
    }

    /// Raises a word at one local rank to `value`, after all that precedes it in the stream.
    pub(super) fn raise(&self, stream: Stream, at: Rank, signal: u32, value: u64) -> Result<()> {
        self.comm.gpu().write_value(stream, self.arena.signal(at, signal), value)
    }

    /// Raises `rank`'s word at every local rank to `value`.
    pub(super) fn raise_node(&self, stream: Stream, rank: Rank, signals: Signals, value: u64) -> Result<()> {
        let me = self.comm.topology().local_of(rank);
        self.arena.node_ranks(rank).try_for_each(|(_, peer)| self.raise(stream, peer, signals.signal(me.0), value))
    }
}

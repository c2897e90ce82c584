//! One parameter block per kernel.

use super::assert_layout;
use super::fault::FaultRecord;
use bytemuck::{Pod, Zeroable};

/// Most gradients that one fast-path call takes [TIDE §2.5]; the addresses travel in the parameter block.
pub const GRADIENTS_MAX: usize = 256;

/// Local ranks of a node, at most.
pub const LOCAL_RANKS_MAX: usize = 8;

/// How long a kernel may wait, and where it reports that it waited longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Deadline {
    /// Longest wait, ns of the global timer.
    pub timeout_ns: u64,
    /// Address of the rank's [`FaultRecord`], in mapped host memory.
    pub fault: u64,
    /// Address of a 4-byte word in device memory, 0 until a thread claims the record: several threads
    /// may fail at once, and atomics on host memory are not to be had everywhere.
    pub claim: u64,
}

assert_layout!(Deadline, size 24, timeout_ns at 0, fault at 8, claim at 16);

impl Deadline {
    /// The record as a pointer.
    pub const fn fault_record(&self) -> *mut FaultRecord {
        self.fault as *mut FaultRecord
    }
}

/// Parameters of [`crate::kernels::sum`].
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct SumParams {
    /// Wait bound and fault record.
    pub deadline: Deadline,
    /// The staging slot: `source_count` × `row_count` rows of `row_pitch_bytes`.
    pub staging: u64,
    /// Bytes from one source's rows to the next's.
    pub source_pitch_bytes: u64,
    /// Bytes from one staged row to the next, a multiple of 16.
    pub row_pitch_bytes: u64,
    /// The fp32 partial: `row_count` rows of `out_pitch_elems`; 16-byte aligned.
    pub out: u64,
    /// Elements from one row of the partial to the next, a multiple of 4.
    pub out_pitch_elems: u64,
    /// `[Segment; segment_count]`, ascending and gapless over the packed row.
    pub segments: u64,
    /// Packed position of the first element of every row.
    pub packed_first: u64,
    /// Elements of a row to sum.
    pub row_elems: u64,
    /// Staged contributions: the local ranks but this one, in local-rank order.
    pub source_count: u32,
    /// Rows: the destination ranks of one node.
    pub row_count: u32,
    /// Destination rank of row 0.
    pub first_rank: u32,
    /// Segments.
    pub segment_count: u32,
    /// Shared-memory stages of one tile each.
    pub stage_count: u32,
    /// The rank that sums, for the fault record.
    pub rank: u32,
    /// Addresses of the rank's own gradients; 0 stands for a gradient that is all zeros.
    pub gradients: [u64; GRADIENTS_MAX],
}

assert_layout!(SumParams, size 2160, deadline at 0, staging at 24, segments at 64, source_count at 88, gradients at 112);

/// How [`crate::kernels::land`] reads the inboxes of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum LandForm {
    /// Through the multicast address, the switch adds.
    Multimem = 0,
    /// By loads from each local rank, added in local-rank order.
    Peer = 1,
}

/// Parameters of [`crate::kernels::land`].
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct LandParams {
    /// Multicast address of block 0 of the wave's inbox generation; 0 in the peer form.
    pub multicast: u64,
    /// Address of block 0 of the wave's inbox generation at each local rank.
    pub inboxes: [u64; LOCAL_RANKS_MAX],
    /// The fp32 output: the packed row.
    pub out: u64,
    /// fp32 sums of the waves before the last, a row of all sub-slices; 0 with a single wave.
    pub accumulator: u64,
    /// Elements of the packed row.
    pub packed_elems: u64,
    /// Capacity of a sub-slice, elements, a multiple of 4.
    pub sub_slice_elems: u64,
    /// First element of a sub-slice that the pass takes, a multiple of 4.
    pub part_first: u64,
    /// Elements of a sub-slice that the pass takes, which is a block's row, a multiple of 4.
    pub part_elems: u64,
    /// Sub-slices, which is also blocks, rows of a block and local ranks.
    pub local_rank_count: u32,
    /// This rank's row in every block.
    pub local_rank: u32,
    /// Bit `d`: the wave has a contributor with `c̄ mod L = d`; it lies on local rank `(s − d) mod L`.
    pub holder_mask: u32,
    /// 1 in the first wave.
    pub first_wave: u32,
    /// 1 in the last wave.
    pub last_wave: u32,
    /// 1 if the output is added to.
    pub accumulate: u32,
    /// α of equation 5.
    pub alpha: f32,
    /// Zero.
    pub reserved: u32,
}

assert_layout!(LandParams, size 152, inboxes at 8, out at 72, part_elems at 112, local_rank_count at 120, alpha at 144);

/// A rank's handle on the loopback network: the peers' arenas as plain addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct LoopbackHandle {
    /// `[u64; node count]`: arena base of the rail peer on each node.
    pub arenas: u64,
    /// Byte offset of signal 0 in every arena.
    pub signals_offset: u64,
    /// Contexts.
    pub context_count: u32,
    /// Bytes of one bounce stage in shared memory, a multiple of 128.
    pub bounce_bytes: u32,
    /// This rank's node.
    pub own_node: u32,
    /// Zero.
    pub reserved: u32,
}

assert_layout!(LoopbackHandle, size 32, arenas at 0, signals_offset at 8, context_count at 16, own_node at 24);

/// A rank's handle on NCCL's network. Peers are ranks of the rail's communicator, numbered by node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct NcclHandle {
    /// Address of the rail's device communicator, in device memory.
    pub comm: u64,
    /// NCCL's window that covers the arena: its device address. Registered with strict ordering, as the signals ask.
    pub window: u64,
    /// Byte offset of the arena in the window, the same at every rank.
    pub window_offset: u64,
    /// Byte offset of signal 0 in every arena.
    pub signals_offset: u64,
    /// How long a flush may look before it looks at the deadline, cycles of the SM's clock.
    pub flush_slice_cycles: u64,
    /// Contexts of the communicator that the rank uses.
    pub context_count: u32,
    /// Most entries that one thread may have outstanding on a context: two for a put of up to 1 GiB that signals, one for a
    /// put or a signal alone. At least 2; more than [`NcclHandle::QUEUE_ENTRIES_MAX`] are not used. The threads of all kernels
    /// that post at a time, finalizers among them, must together fit the queue to a peer: NCCL's post into a full one waits
    /// without limit.
    pub queue_entries_max: u32,
}

assert_layout!(
    NcclHandle, size 48, comm at 0, window at 8, window_offset at 16, signals_offset at 24, flush_slice_cycles at 32,
    context_count at 40, queue_entries_max at 44,
);

impl NcclHandle {
    /// Most entries that a thread's share can be: a kernel counts them in a byte.
    pub const QUEUE_ENTRIES_MAX: u32 = u8::MAX as u32;
}

/// The signal that is none.
pub const NO_SIGNAL: u32 = u32::MAX;

/// One transfer that a rank sends in a round: a lead, which has signals of its own, and what follows it. Or a part of one:
/// puts up to and including one that signals are one transfer, to one peer, in parts that need not lie together at either
/// end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct NetPut {
    /// Node of the rail peer.
    pub peer: u32,
    /// First data signal at the peer; context `x` uses `signal + x`. [`NO_SIGNAL`] where more of the transfer follows.
    pub signal: u32,
    /// Credit signal here that the peer raises.
    pub credit: u32,
    /// By how much the peer's credits run ahead: 1 where the area is free before the first call.
    pub credit_ahead: u32,
    /// First lead signal at the peer.
    pub lead_signal: u32,
    /// Signal here that says that the peer is ready for this round, or [`NO_SIGNAL`].
    pub pace: u32,
    /// Contexts that carry the transfer, at least 1, and signal its end: all of them, also where it is too small to have a stripe
    /// for each. They are the same in every transfer that counts by the same signals, and in every part of one.
    pub contexts: u32,
    /// Contexts that carry the lead and signal its end; 0 where there is none.
    pub lead_contexts: u32,
    /// Bytes of the lead, a multiple of 16. There can be a lead of none.
    pub lead_bytes: u64,
    /// Byte offset of the source in this rank's arena: of the ring of blocks that it is one of, if it is.
    pub source_offset: u64,
    /// Number of the source's block in its pass; see [`NetParams::block_first`].
    pub source_block: u64,
    /// Byte offset of the transfer's first `apart_bytes` in this rank's arena; the rest follows from `source_offset` on.
    pub apart_offset: u64,
    /// Bytes that lie apart from the rest, a multiple of 16; 0 if all lie together.
    pub apart_bytes: u64,
    /// Byte offset of the destination in the peer's arena.
    pub destination_offset: u64,
    /// Bytes of the whole transfer, a multiple of 16; 0 sends the signals alone.
    pub bytes: u64,
}

assert_layout!(NetPut, size 88, peer at 0, lead_signal at 16, contexts at 24, lead_bytes at 32, source_block at 48, bytes at 80);

/// A piece of a transfer that lies in one run at its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Byte offset in the sender's arena.
    pub source_offset: u64,
    /// Byte offset in the receiver's arena.
    pub destination_offset: u64,
    /// Bytes.
    pub bytes: u64,
}

impl NetPut {
    /// Bytes `first..first + bytes` of the transfer, in the one or two pieces that lie in one run; a piece may be empty.
    /// `source_offset` is that of [`NetParams::source_offset`].
    #[inline(always)]
    pub const fn pieces(&self, source_offset: u64, first: u64, bytes: u64) -> [Piece; 2] {
        let apart = self.apart_bytes.saturating_sub(first);
        let apart = if apart < bytes { apart } else { bytes };
        let destination_offset = self.destination_offset + first;
        [
            Piece { source_offset: self.apart_offset + first, destination_offset, bytes: apart },
            Piece {
                source_offset: source_offset + (first + apart).saturating_sub(self.apart_bytes),
                destination_offset: destination_offset + apart,
                bytes: bytes - apart,
            },
        ]
    }
}

/// One transfer that a rank expects in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct NetArrival {
    /// Node of the rail peer.
    pub peer: u32,
    /// First data signal here; context `x` uses `signal + x`.
    pub signal: u32,
    /// Contexts that signal the transfer, as in [`NetPut`].
    pub contexts: u32,
    /// First lead signal here.
    pub lead_signal: u32,
    /// Contexts that signal the lead, as in [`NetPut`].
    pub lead_contexts: u32,
    /// Node of the rail peer that is told once the lead is here; it puts to this rank in the next round.
    pub pace_peer: u32,
    /// The signal there by which it is told, or [`NO_SIGNAL`].
    pub pace_signal: u32,
    /// Zero.
    pub reserved: u32,
}

assert_layout!(NetArrival, size 32, peer at 0, contexts at 8, lead_contexts at 16, pace_signal at 24);

/// One round: a range of puts and a range of arrivals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct NetRound {
    /// First put in the rank's table.
    pub put_first: u32,
    /// Puts.
    pub put_count: u32,
    /// First arrival in the rank's table.
    pub arrival_first: u32,
    /// Arrivals.
    pub arrival_count: u32,
    /// Wave, for the fault record.
    pub wave: u32,
    /// Round within the wave, for the fault record.
    pub round: u32,
}

assert_layout!(NetRound, size 24, put_first at 0, wave at 16);

/// What one block of [`crate::kernels::net`] drives: one rank's rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct NetRank {
    /// Address of the network's handle: a [`LoopbackHandle`] or an [`NcclHandle`].
    pub gin: u64,
    /// Wait bound and fault record.
    pub deadline: Deadline,
    /// `[NetRound]`.
    pub rounds: u64,
    /// `[NetPut]`.
    pub puts: u64,
    /// `[NetArrival]`.
    pub arrivals: u64,
    /// Signal word here that is raised to `progress_first + rounds done` after each round, or 0.
    pub progress: u64,
    /// The rank.
    pub rank: u32,
    /// Ranks of a node, to name peers by rank.
    pub local_rank_count: u32,
    /// [`super::fault::Operation`].
    pub operation: u32,
    /// Zero.
    pub reserved: u32,
}

assert_layout!(NetRank, size 80, gin at 0, deadline at 8, rounds at 32, progress at 56, rank at 64);

/// Parameters of [`crate::kernels::net`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct NetParams {
    /// `[NetRank; grid size]`.
    pub ranks: u64,
    /// Number of the call on its communicator.
    pub epoch: u64,
    /// Transfers that every pair has exchanged once this one is done: data signals reach it.
    pub sequence: u64,
    /// Added to every put's source offset: selects the outbox bank.
    pub source_shift: u64,
    /// Blocks sent in earlier passes of the call. Block `b` of a pass lies in slot `(block_first + b) mod block_count` of
    /// its ring.
    pub block_first: u64,
    /// Slots of the ring; 1 where sources are no blocks.
    pub block_count: u64,
    /// Bytes of a slot; 0 where sources are no blocks.
    pub block_bytes: u64,
    /// What `progress` holds before the first round of this launch.
    pub progress_first: u64,
    /// First round.
    pub round_first: u32,
    /// Rounds.
    pub round_count: u32,
    /// Bytes of a stripe: a transfer is cut into stripes, dealt to the contexts in turn; a multiple of 16.
    pub stripe_bytes: u64,
}

assert_layout!(NetParams, size 80, ranks at 0, sequence at 16, block_first at 32, round_first at 64, stripe_bytes at 72);

impl NetParams {
    /// Byte offset in this rank's arena of what follows a put's apart piece.
    #[inline(always)]
    pub const fn source_offset(&self, put: &NetPut) -> u64 {
        let slot = (self.block_first + put.source_block) % self.block_count;
        put.source_offset + self.source_shift + slot * self.block_bytes
    }
}

/// One credit that [`crate::kernels::finalize`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Credit {
    /// Node of the rail peer that gets it.
    pub peer: u32,
    /// Credit signal at the peer.
    pub signal: u32,
}

assert_layout!(Credit, size 8, peer at 0, signal at 4);

/// Parameters of [`crate::kernels::finalize`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FinalizeParams {
    /// Address of the network's handle: a [`LoopbackHandle`] or an [`NcclHandle`].
    pub gin: u64,
    /// Wait bound and fault record.
    pub deadline: Deadline,
    /// `[Credit; credit_count]`.
    pub credits: u64,
    /// Credits.
    pub credit_count: u32,
    /// The rank that returns them.
    pub rank: u32,
}

assert_layout!(FinalizeParams, size 48, gin at 0, deadline at 8, credits at 32, credit_count at 40, rank at 44);

/// One shard of [`crate::kernels::cast`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CastSegment {
    /// The fp32 shard, 4-byte aligned.
    pub source: u64,
    /// Elements.
    pub elems: u64,
    /// First element in the packed bf16 shard.
    pub packed_first: u64,
}

assert_layout!(CastSegment, size 24, source at 0, elems at 8, packed_first at 16);

/// Parameters of [`crate::kernels::cast`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CastParams {
    /// `[CastSegment; segment_count]`.
    pub segments: u64,
    /// Segments.
    pub segment_count: u64,
    /// The packed bf16 shard.
    pub out: u64,
}

assert_layout!(CastParams, size 24, segments at 0, segment_count at 8, out at 16);

/// Parameters of [`crate::kernels::stock::pack`]: all gradients into a rank-major fp32 buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PackParams {
    /// `[Segment; segment_count]`.
    pub segments: u64,
    /// `[u64]`: addresses of the gradients; 0 stands for all zeros.
    pub gradients: u64,
    /// The packed buffer: `rank_count` rows of `packed_elems` fp32.
    pub out: u64,
    /// Elements of a row.
    pub packed_elems: u64,
    /// Segments.
    pub segment_count: u32,
    /// Rows.
    pub rank_count: u32,
    /// Bytes of a gradient element: 2 (bf16) or 4 (fp32).
    pub item_bytes: u32,
    /// Zero.
    pub reserved: u32,
}

assert_layout!(PackParams, size 48, segments at 0, packed_elems at 24, segment_count at 32);

/// Parameters of [`crate::kernels::stock::flat_sum`]: one rank's row summed over all ranks' packed buffers.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct FlatSumParams {
    /// `[u64; rank_count]`: every rank's packed buffer.
    pub packed: u64,
    /// The fp32 output.
    pub out: u64,
    /// Elements of a row.
    pub packed_elems: u64,
    /// Ranks.
    pub rank_count: u32,
    /// The rank whose row is summed.
    pub rank: u32,
    /// 1 if the output is added to.
    pub accumulate: u32,
    /// α of equation 5.
    pub alpha: f32,
}

assert_layout!(FlatSumParams, size 40, packed at 0, packed_elems at 16, rank_count at 24, alpha at 36);

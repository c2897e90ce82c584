//! What a wait that ran out of time leaves behind.

use super::assert_layout;
use bytemuck::{Pod, Zeroable};

/// What a wait waits for. The numbers are part of the fault record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum WaitKind {
    /// A receiver's leave to overwrite one of its areas.
    Credit = 1,
    /// The data signal of a put.
    Arrival = 2,
    /// A bulk load into shared memory, counted by an mbarrier.
    StageFull = 3,
    /// The consumers' release of a shared-memory stage.
    StageFree = 4,
    /// A staging slot filled by a local rank's pushes.
    StagingFull = 5,
    /// A staging slot freed by its owner's sum.
    StagingFree = 6,
    /// All local ranks' inboxes hold the wave.
    WaveArrived = 7,
    /// All local ranks have landed the wave.
    WaveLanded = 8,
    /// A local rank's all-gather landing may be overwritten.
    LandingFree = 9,
    /// All local ranks have scattered their shards.
    GatherDone = 10,
    /// A network round of an all-gather has arrived here.
    RoundArrived = 11,
    /// The target of an all-gather's next round has the lead of the round before.
    Pace = 12,
    /// The network's word that all posted puts are complete here: of NCCL's flush, success is expected, its result seen.
    Flush = 13,
}

impl WaitKind {
    /// Every kind, for decoding a record.
    pub const ALL: [Self; 13] = [
        Self::Credit,
        Self::Arrival,
        Self::StageFull,
        Self::StageFree,
        Self::StagingFull,
        Self::StagingFree,
        Self::WaveArrived,
        Self::WaveLanded,
        Self::LandingFree,
        Self::GatherDone,
        Self::RoundArrived,
        Self::Pace,
        Self::Flush,
    ];
}

/// Which collective a wait belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    /// Not known, or none.
    None = 0,
    /// An all-gather.
    AllGather = 1,
    /// A reduce-scatter.
    ReduceScatter = 2,
}

/// Who waits, for whom, where in the protocol. Filled by the host, or by a kernel from its tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WaitTag {
    /// [`WaitKind`].
    pub kind: u32,
    /// [`Operation`].
    pub operation: u32,
    /// The rank that waits.
    pub rank: u32,
    /// The rank it waits for.
    pub peer: u32,
    /// Wave, from 0.
    pub wave: u32,
    /// Round within the wave, from 0.
    pub round: u32,
    /// Number of the call on its communicator, from 0.
    pub epoch: u64,
}

assert_layout!(WaitTag, size 32, kind at 0, rank at 8, wave at 16, epoch at 24);

/// The record of a wait past its deadline, in mapped host memory, one per rank.
///
/// The first thread to fail claims it (see [`super::params::Deadline`]), fills it and stores `state` last; the host
/// reads the rest only after it has seen [`FaultRecord::COMPLETE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FaultRecord {
    /// 0, or [`FaultRecord::COMPLETE`].
    pub state: u32,
    /// The network context of the wait, where it has one.
    pub context: u32,
    /// Who, for whom, where.
    pub tag: WaitTag,
    /// Value (or mbarrier phase) waited for.
    pub expected: u64,
    /// Value last seen.
    pub seen: u64,
    /// How long the wait lasted, in ns of the global timer.
    pub waited_ns: u64,
    /// Send-queue state of the network where it can be read, else 0.
    pub send_queue: u64,
}

impl FaultRecord {
    /// `state` of a record that is written.
    pub const COMPLETE: u32 = 1;
}

assert_layout!(FaultRecord, size 72, state at 0, tag at 8, expected at 40, waited_ns at 56, send_queue at 64);

//! Fail-stop: what a wait past its deadline becomes [TIDE App. G].
//!
//! A kernel that gives up writes a fault record to mapped host memory and parks; a stream's memory wait that gives up
//! is found by the back end. Either way the caller gets one [`Fault`], whose sentence names who waited, for whom, how long
//! and where in the protocol, and the communicator takes no more calls.

use crate::error::Result;
use crate::gpu::{DevicePtr, Gpu};
use bytemuck::Zeroable;
use std::fmt;
use std::sync::Arc;
use tide_device::abi::fault::{FaultRecord, Operation, WaitKind, WaitTag};

/// A wait that ran out of time.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    /// What was waited for; `None` if the record is not readable.
    pub kind: Option<WaitKind>,
    /// The collective.
    pub operation: Operation,
    /// The rank that waited.
    pub rank: u32,
    /// The rank it waited for.
    pub peer: u32,
    /// Number of the call on its communicator.
    pub epoch: u64,
    /// Wave, from 0.
    pub wave: u32,
    /// Round within the wave, from 0.
    pub round: u32,
    /// Network context.
    pub context: u32,
    /// Value waited for.
    pub expected: u64,
    /// Value last seen; `None` where another library keeps it.
    pub seen: Option<u64>,
    /// How long, ns.
    pub waited_ns: u64,
}

impl Fault {
    /// The fault of a wait with this tag.
    pub fn new(tag: &WaitTag, context: u32, expected: u64, seen: impl Into<Option<u64>>, waited_ns: u64) -> Self {
        let operation = match tag.operation {
            1 => Operation::AllGather,
            2 => Operation::ReduceScatter,
            _ => Operation::None,
        };
        Self {
            kind: WaitKind::ALL.into_iter().find(|k| *k as u32 == tag.kind),
            operation,
            rank: tag.rank,
            peer: tag.peer,
            epoch: tag.epoch,
            wave: tag.wave,
            round: tag.round,
            context,
            expected,
            seen: seen.into(),
            waited_ns,
        }
    }
}

/// Of several waits that ran out, the one that the others hang on: of the earliest call, the wait that comes first in the
/// protocol. One lost signal stops many ranks; those that merely wait for a stopped one are no help to whoever must find it.
pub fn root_cause(faults: &[Fault]) -> Option<&Fault> {
    let depth = |fault: &Fault| match fault.kind {
        Some(WaitKind::StageFull | WaitKind::StageFree) => 0,
        Some(WaitKind::StagingFree | WaitKind::LandingFree) => 1,
        Some(WaitKind::StagingFull) => 2,
        Some(WaitKind::Flush) => 2,
        Some(WaitKind::Credit | WaitKind::Pace) => 3,
        Some(WaitKind::Arrival) => 4,
        Some(WaitKind::RoundArrived | WaitKind::WaveArrived) => 5,
        Some(WaitKind::WaveLanded | WaitKind::GatherDone) => 6,
        None => 7,
    };
    faults.iter().min_by_key(|f| (f.epoch, depth(f), f.wave, f.round, f.rank))
}

fn phase(kind: Option<WaitKind>) -> &'static str {
    match kind {
        Some(WaitKind::Credit) => "credit",
        Some(WaitKind::Arrival) => "arrival",
        Some(WaitKind::StageFull) => "bulk load",
        Some(WaitKind::StageFree) => "stage release",
        Some(WaitKind::StagingFull) => "staging pushes",
        Some(WaitKind::StagingFree) => "staging release",
        Some(WaitKind::WaveArrived) => "wave arrival",
        Some(WaitKind::WaveLanded) => "wave landing",
        Some(WaitKind::LandingFree) => "landing release",
        Some(WaitKind::GatherDone) => "scatter",
        Some(WaitKind::RoundArrived) => "round arrival",
        Some(WaitKind::Pace) => "round pace",
        Some(WaitKind::Flush) => "network flush",
        None => "unknown wait",
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operation = match self.operation {
            Operation::AllGather => "ag",
            Operation::ReduceScatter => "rs",
            Operation::None => "call",
        };
        write!(
            f,
            "TIDE rank {}: {operation} seq={} waited {:.3} s for rank {}, phase={} wave={} round={} context={} counter {}/{}",
            self.rank,
            self.epoch,
            self.waited_ns as f64 * 1e-9,
            self.peer,
            phase(self.kind),
            self.wave,
            self.round,
            self.context,
            self.seen.map_or_else(|| "?".into(), |seen| seen.to_string()),
            self.expected,
        )
    }
}

/// The fault records of the ranks that a process drives.
pub struct Monitor {
    gpu: Arc<dyn Gpu>,
    records: DevicePtr,
    rank_count: u32,
}

impl Monitor {
    /// Empty records for `rank_count` ranks.
    ///
    /// # Errors
    /// As [`Gpu::allocate_mapped`].
    pub fn new(gpu: Arc<dyn Gpu>, rank_count: u32) -> Result<Self> {
        let records = gpu.allocate_mapped(u64::from(rank_count) * size_of::<FaultRecord>() as u64)?;
        Ok(Self { gpu, records, rank_count })
    }

    /// Where the `index`-th rank's kernels write their record.
    pub fn record_address(&self, index: u32) -> DevicePtr {
        DevicePtr(self.records.0 + u64::from(index) * size_of::<FaultRecord>() as u64)
    }

    /// The faults that kernels have recorded.
    ///
    /// # Errors
    /// As [`Gpu::read_mapped`].
    pub fn faults(&self) -> Result<Vec<Fault>> {
        let mut faults = Vec::new();
        for index in 0..self.rank_count {
            let mut record = FaultRecord::zeroed();
            self.gpu.read_mapped(self.record_address(index), bytemuck::bytes_of_mut(&mut record))?;
            if record.state == FaultRecord::COMPLETE {
                faults.push(Fault::new(&record.tag, record.context, record.expected, record.seen, record.waited_ns));
            }
        }
        Ok(faults)
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // Nothing useful can be done with a failure here, and the memory is the driver's to reclaim.
        let _ = self.gpu.free(self.records);
    }
}

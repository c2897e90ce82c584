//! The all-gather of one group: a ring of one group in one slot.

use super::gather_ring::{GatherGroup, GatherRing, RankGather, RingOptions};
use super::{Communicator, RankEvents};
use crate::error::Result;
use crate::gpu::{DevicePtr, DeviceSlice};
use crate::layout::{Group, GroupLayout};
use crate::plan::Rank;

/// How an all-gather takes its shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AllGatherOptions {
    /// As [`GatherGroup::cast`].
    pub cast: bool,
}

/// An all-gather of one group: planned, allocated, ready to be called again and again.
pub struct AllGather {
    ring: GatherRing,
}

impl AllGather {
    /// Plans an all-gather of `group`, allocates its arena on every rank and uploads its tables.
    ///
    /// # Errors
    /// As [`GatherRing::new`].
    pub fn new(comm: &Communicator, group: &Group, options: AllGatherOptions) -> Result<Self> {
        let group = GatherGroup { group: group.clone(), cast: options.cast };
        Ok(Self { ring: GatherRing::new(comm, &[group], RingOptions { slot_count: 1, ..Default::default() })? })
    }

    /// The group's layout.
    pub fn layout(&self) -> &GroupLayout {
        self.ring.layout(0)
    }

    /// As [`GatherRing::shard`]; no bytes with a cast.
    pub fn shard(&self, rank: Rank, parameter: usize) -> DeviceSlice {
        self.ring.shard(0, rank, parameter).unwrap_or(DeviceSlice { address: DevicePtr::NULL, bytes: 0 })
    }

    /// As [`GatherRing::parameter`].
    pub fn landing(&self, rank: Rank, parameter: usize) -> DeviceSlice {
        self.ring.parameter(0, rank, parameter)
    }

    /// As [`GatherRing::buffer_bytes`].
    pub fn buffer_bytes(&self) -> u64 {
        self.ring.buffer_bytes()
    }

    /// As [`GatherRing::descriptor_count`].
    pub fn descriptor_count(&self) -> u64 {
        self.ring.descriptor_count()
    }

    /// Calls so far.
    pub fn epoch(&self) -> u64 {
        self.ring.epoch()
    }

    /// Enqueues one call on every driven rank; `ranks` in rank order. A rank's `ready` also says that its landing may be
    /// overwritten.
    ///
    /// # Errors
    /// As [`GatherRing::gather`].
    pub fn enqueue(&mut self, ranks: &[RankGather]) -> Result<Vec<RankEvents>> {
        // Refused before the landing counts as released: else the next call would not wait for its user.
        self.ring.check_gather(0, ranks)?;
        if self.ring.occupant(0).is_some() {
            let ready: Vec<_> = ranks.iter().map(|r| r.ready).collect();
            self.ring.release(0, &ready)?;
        }
        self.ring.gather(0, ranks)
    }
}

//! The symmetric arena: one allocation per rank, the same layout on all of them, and every region carved from it.
//!
//! This is the only place that adds an offset to a base. A **symmetric offset** is a byte offset that means the same region
//! on every rank; it is what the network and the multicast address go by.

use crate::error::Result;
use crate::gpu::{DevicePtr, Gpu};
use crate::plan::{LocalRank, Node, Rank, RankRange, Topology};
use std::sync::Arc;
use tide_device::abi::signal::SIGNAL_BYTES;

/// What regions are aligned to, bytes: a cache line of every agent that touches them, and more than a bulk copy asks.
pub const REGION_ALIGN_BYTES: u64 = 256;

/// A region of the arena, at the same symmetric offset on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    offset: u64,
    bytes: u64,
}

impl Region {
    /// Symmetric offset of `offset` bytes into the region.
    ///
    /// # Panics
    /// If `bytes` from there do not lie in the region: a bug of the caller.
    pub fn symmetric_offset(&self, offset: u64, bytes: u64) -> u64 {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "{bytes} bytes at {offset} lie outside a region of {} bytes",
            self.bytes
        );
        self.offset + offset
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A run of signal words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signals {
    first: u32,
    count: u32,
}

impl Signals {
    /// The number of the `index`-th word among all signals of the arena.
    ///
    /// # Panics
    /// If there are fewer words: a bug of the caller.
    pub fn signal(&self, index: u32) -> u32 {
        assert!(index < self.count, "signal {index} of {}", self.count);
        self.first + index
    }
}

/// The ordered list of regions from which offsets and the total follow.
#[derive(Debug, Default, Clone)]
pub struct ArenaLayout {
    regions: Vec<(&'static str, Region)>,
    signal_count: u32,
    end: u64,
}

impl ArenaLayout {
    /// Adds a region.
    pub fn region(&mut self, name: &'static str, bytes: u64) -> Region {
        let region = Region { offset: self.end, bytes };
        self.end = (self.end + bytes).next_multiple_of(REGION_ALIGN_BYTES);
        self.regions.push((name, region));
        region
    }

    /// Adds `count` signal words.
    pub fn signals(&mut self, count: u32) -> Signals {
        let signals = Signals { first: self.signal_count, count };
        self.signal_count += count;
        signals
    }

    /// Names and sizes of the regions, in order.
    pub fn regions(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.regions.iter().map(|(name, region)| (*name, region.bytes))
    }
}

/// What an arena is carved from: equally long memory on every rank, as far as this process can address it.
pub trait SymmetricMemory: Send + Sync {
    /// The first byte of a rank's memory; `None` for a rank that is out of reach: one on another node.
    fn base(&self, rank: Rank) -> Option<DevicePtr>;
    /// The first byte behind a node's multicast address, if it has one.
    fn multicast(&self, node: Node) -> Option<DevicePtr>;
}

/// The arenas of the ranks that the process drives, and of those on the same nodes.
pub struct Arena {
    topology: Topology,
    layout: ArenaLayout,
    signals: Region,
    memory: Arc<dyn SymmetricMemory>,
}

impl Arena {
    /// Carves memory that `allocate` gives, of as many bytes on every rank as it is asked for. The signal words of the
    /// `driven` ranks start at zero; whoever lets peers raise them waits for all ranks first.
    ///
    /// # Errors
    /// As `allocate` and [`Gpu::upload`].
    pub fn new(
        gpu: &Arc<dyn Gpu>,
        topology: Topology,
        driven: RankRange,
        mut layout: ArenaLayout,
        allocate: impl FnOnce(u64) -> Result<Arc<dyn SymmetricMemory>>,
    ) -> Result<Self> {
        let signals = layout.region("signals", u64::from(layout.signal_count.max(1)) * SIGNAL_BYTES);
        let memory = allocate(layout.end)?;
        let arena = Self { topology, layout, signals, memory };
        for rank in driven.iter() {
            gpu.upload(arena.at(rank, signals, 0, signals.bytes), &vec![0; signals.bytes as usize])?;
        }
        Ok(arena)
    }

    /// The ranks that have an arena.
    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// Bytes allocated for each rank.
    pub fn bytes(&self) -> u64 {
        self.layout.end
    }

    /// The layout.
    pub fn layout(&self) -> &ArenaLayout {
        &self.layout
    }

    /// The first byte of a rank's arena, for a network that goes by symmetric offsets.
    ///
    /// # Panics
    /// If the rank is on a node that this process has no rank on: a bug of the caller.
    pub fn base(&self, rank: Rank) -> DevicePtr {
        self.memory.base(rank).unwrap_or_else(|| panic!("rank {} is on another node", rank.0))
    }

    /// Where `bytes` at `offset` of a region lie on a rank.
    ///
    /// # Panics
    /// If they do not lie in the region: a bug of the caller.
    pub fn at(&self, rank: Rank, region: Region, offset: u64, bytes: u64) -> DevicePtr {
        DevicePtr(self.base(rank).0 + region.symmetric_offset(offset, bytes))
    }

    /// The same behind the node's multicast address; `None` where it has none.
    pub fn multicast(&self, node: Node, region: Region, offset: u64, bytes: u64) -> Option<DevicePtr> {
        self.memory.multicast(node).map(|base| DevicePtr(base.0 + region.symmetric_offset(offset, bytes)))
    }

    /// Symmetric offset of signal 0.
    pub fn signals_offset(&self) -> u64 {
        self.signals.offset
    }

    /// The word of a signal on a rank.
    pub fn signal(&self, rank: Rank, signal: u32) -> DevicePtr {
        self.at(rank, self.signals, u64::from(signal) * SIGNAL_BYTES, SIGNAL_BYTES)
    }

    /// The ranks of `rank`'s node, in local-rank order.
    pub fn node_ranks(&self, rank: Rank) -> impl Iterator<Item = (LocalRank, Rank)> + use<> {
        let topology = self.topology;
        let node = topology.node_of(rank);
        topology.local_ranks().map(move |l| (l, topology.rank(node, l)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_follow_each_other_without_overlap() {
        let mut layout = ArenaLayout::default();
        let (a, b) = (layout.region("a", 100), layout.region("b", 300));
        assert_eq!((a.symmetric_offset(0, 100), b.symmetric_offset(0, 300)), (0, 256));
        assert_eq!(layout.end, 768);
        assert_eq!(layout.signals(3).signal(2), 2);
        assert_eq!(layout.signals(1).signal(0), 3);
    }

    #[test]
    #[should_panic(expected = "outside a region of 100 bytes")]
    fn an_address_past_the_end_of_a_region_is_a_bug() {
        ArenaLayout::default().region("a", 100).symmetric_offset(64, 37);
    }
}

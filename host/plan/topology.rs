//! Who is where: `M` nodes of `L` local ranks each, numbered node by node.
//!
//! Rank `r = n·L + l` is local rank `l` of node `n` [TIDE §4.2]. Every formula of the plan relies on
//! that order and on equal nodes, so [`Topology::from_placement`] refuses a job that has neither.

use super::PlanError;

/// The most nodes that a plan is made for; the exhaustive validation covers them all
/// [TIDE App. D].
pub const NODE_COUNT_MAX: u32 = 1024;

/// The most local ranks on a node that a plan is made for: what one NVSwitch domain of the paper
/// holds, and what a block mask of eight bits can name.
pub const LOCAL_RANK_COUNT_MAX: u32 = 8;

/// A rank of the shard group, `0..N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank(pub u32);

/// A node, `0..M`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Node(pub u32);

/// A rank's place on its node, `0..L`; also the number of its rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LocalRank(pub u32);

/// `M` nodes of `L` local ranks each, in node-major order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Topology {
    node_count: u32,
    local_rank_count: u32,
}

/// A run of ranks: those that one process drives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RankRange {
    first: Rank,
    count: u32,
}

impl RankRange {
    /// `count` ranks from `first` on.
    pub const fn new(first: Rank, count: u32) -> Self {
        Self { first, count }
    }

    /// How many.
    pub const fn count(self) -> u32 {
        self.count
    }

    /// The ranks, in order.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = Rank> + ExactSizeIterator {
        (self.first.0..self.first.0 + self.count).map(Rank)
    }

    /// Whether the run holds a rank.
    pub const fn contains(self, rank: Rank) -> bool {
        rank.0 >= self.first.0 && rank.0 - self.first.0 < self.count
    }

    /// A rank's place in the run.
    ///
    /// # Panics
    /// If the run does not hold it: a bug of the caller.
    pub fn index(self, rank: Rank) -> usize {
        assert!(self.contains(rank), "rank {} is not among {} ranks from {} on", rank.0, self.count, self.first.0);
        (rank.0 - self.first.0) as usize
    }
}

impl Topology {
    /// `node_count` nodes (`M`) of `local_rank_count` ranks (`L`) each.
    ///
    /// # Errors
    /// [`PlanError::NodeCount`] and [`PlanError::LocalRankCount`] outside the supported ranges.
    pub fn new(node_count: u32, local_rank_count: u32) -> Result<Self, PlanError> {
        if !(1..=NODE_COUNT_MAX).contains(&node_count) {
            return Err(PlanError::NodeCount { found: node_count });
        }
        if !(1..=LOCAL_RANK_COUNT_MAX).contains(&local_rank_count) {
            return Err(PlanError::LocalRankCount { found: local_rank_count });
        }
        Ok(Self { node_count, local_rank_count })
    }

    /// The topology of a job from what its ranks report, in rank order: the index of the node that
    /// the rank runs on, and how many ranks its launcher says are on that node.
    ///
    /// All ranks that pass the same reports get the same answer, so an unusable placement is
    /// refused everywhere and nobody is left to wait.
    ///
    /// # Errors
    /// [`PlanError::UnequalNodes`] if two nodes report different numbers of ranks;
    /// [`PlanError::LocalWorldSize`] if a node's report is not the number of ranks that name it;
    /// [`PlanError::NotNodeMajor`] if a rank is not on node `r / L`; and the errors of
    /// [`Topology::new`].
    pub fn from_placement(reports: &[(u32, u32)]) -> Result<Self, PlanError> {
        let Some(&(first_node, local_rank_count)) = reports.first() else {
            return Err(PlanError::NodeCount { found: 0 });
        };
        if let Some(&(node, count)) = reports.iter().find(|(_, count)| *count != local_rank_count) {
            return Err(PlanError::UnequalNodes { first_node, first_count: local_rank_count, node, count });
        }
        for &(node, reported) in reports {
            let counted = reports.iter().filter(|(other, _)| *other == node).count() as u64;
            if counted != u64::from(reported) {
                return Err(PlanError::LocalWorldSize { node, reported, counted });
            }
        }
        // Equal nodes whose reports match the count: L divides N exactly.
        let node_count = u32::try_from(reports.len() as u64 / u64::from(local_rank_count)).unwrap_or(u32::MAX);
        let topology = Self::new(node_count, local_rank_count)?;
        for (rank, &(found, _)) in topology.ranks().zip(reports) {
            let expected = topology.node_of(rank).0;
            if found != expected {
                return Err(PlanError::NotNodeMajor { rank: rank.0, found, expected });
            }
        }
        Ok(topology)
    }

    /// `M`, the number of nodes.
    pub fn node_count(&self) -> u32 {
        self.node_count
    }

    /// `L`, the number of ranks on each node.
    pub fn local_rank_count(&self) -> u32 {
        self.local_rank_count
    }

    /// `N = M·L`, the number of ranks.
    pub fn rank_count(&self) -> u32 {
        self.node_count * self.local_rank_count
    }

    /// All ranks, as a run.
    pub fn all(&self) -> RankRange {
        RankRange { first: Rank(0), count: self.rank_count() }
    }

    /// The rank `n·L + l`.
    pub fn rank(&self, node: Node, local: LocalRank) -> Rank {
        debug_assert!(node.0 < self.node_count && local.0 < self.local_rank_count);
        Rank(node.0 * self.local_rank_count + local.0)
    }

    /// The node that a rank is on.
    pub fn node_of(&self, rank: Rank) -> Node {
        Node(rank.0 / self.local_rank_count)
    }

    /// A rank's place on its node.
    pub fn local_of(&self, rank: Rank) -> LocalRank {
        LocalRank(rank.0 % self.local_rank_count)
    }

    /// All ranks, ascending.
    pub fn ranks(&self) -> impl ExactSizeIterator<Item = Rank> + use<> {
        (0..self.rank_count()).map(Rank)
    }

    /// All nodes, ascending.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = Node> + use<> {
        (0..self.node_count).map(Node)
    }

    /// All local ranks, ascending.
    pub fn local_ranks(&self) -> impl ExactSizeIterator<Item = LocalRank> + use<> {
        (0..self.local_rank_count).map(LocalRank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_numbered_node_by_node() {
        let topology = Topology::new(3, 2).unwrap();
        let places: Vec<_> = topology.ranks().map(|r| (topology.node_of(r).0, topology.local_of(r).0)).collect();
        assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]);
        assert!(topology.ranks().all(|r| topology.rank(topology.node_of(r), topology.local_of(r)) == r));
        assert_eq!((topology.nodes().len(), topology.local_ranks().len()), (3, 2));
    }

    #[test]
    fn counts_outside_the_supported_ranges_are_refused_by_value() {
        assert_eq!(Topology::new(0, 8), Err(PlanError::NodeCount { found: 0 }));
        assert_eq!(Topology::new(1025, 8), Err(PlanError::NodeCount { found: 1025 }));
        assert_eq!(Topology::new(2, 0), Err(PlanError::LocalRankCount { found: 0 }));
        assert_eq!(Topology::new(2, 9), Err(PlanError::LocalRankCount { found: 9 }));
        assert!(Topology::new(1024, 8).is_ok());
        assert!(Topology::new(2, 9).unwrap_err().to_string().contains('9'));
    }

    #[test]
    fn a_node_major_placement_gives_its_topology() {
        let reports = [(0, 2), (0, 2), (1, 2), (1, 2), (2, 2), (2, 2)];
        assert_eq!(Topology::from_placement(&reports), Topology::new(3, 2));
        assert_eq!(Topology::from_placement(&[(0, 1)]), Topology::new(1, 1));
    }

    #[test]
    fn reports_that_do_not_add_up_are_refused() {
        assert_eq!(Topology::from_placement(&[]), Err(PlanError::NodeCount { found: 0 }));
        let short = Topology::from_placement(&[(0, 2), (0, 2), (1, 2)]);
        assert_eq!(short, Err(PlanError::LocalWorldSize { node: 1, reported: 2, counted: 1 }));
        let zero = Topology::from_placement(&[(0, 0)]);
        assert_eq!(zero, Err(PlanError::LocalWorldSize { node: 0, reported: 0, counted: 1 }));
        let renumbered = Topology::from_placement(&[(7, 2), (7, 2)]);
        assert_eq!(renumbered, Err(PlanError::NotNodeMajor { rank: 0, found: 7, expected: 0 }));
    }
}

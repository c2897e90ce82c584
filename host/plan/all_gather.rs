//! The all-gather's rounds over the rails: Bruck's recursive doubling, for any number of nodes.
//!
//! Slot `i` of node `n`'s receive stage holds the shard of node `(n + i) mod M`; slot 0 is the
//! node's own. In round `d` a node sends its first `c_d` slots to node `(n − 2^d) mod M` and takes
//! as many from `(n + 2^d) mod M` into the slots from `2^d` on, so that after `⌈log2 M⌉` rounds all
//! `M` are there [TIDE §3.1]. Consecutive slots come from consecutive nodes: for each parameter
//! they lie `S` apart in the stage and `L·s_p` apart in the landing, so a run of them is one
//! strided copy, up to where the node number wraps.

use std::ops::Range;

use super::topology::Node;

/// The shortest run of stage slots that becomes one strided copy; shorter ones are copied slot by
/// slot [TIDE §3.1].
pub const STRIDED_SLOTS_MIN: u32 = 4;

/// The most groups that the last round's slots are scattered in, each as soon as it has arrived
/// [TIDE §3.1].
pub const LAST_ROUND_GROUP_COUNT_MAX: u32 = 4;

/// One round of recursive doubling [TIDE §3.1].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GatherRound {
    /// `d`, from zero.
    pub index: u32,
    /// `c_d = min(2^d, M − 2^d)`: stage slots that each node sends, and receives.
    pub slots: u32,
    /// `2^d`: how many nodes away the peers are, and the first slot that is received.
    pub distance: u32,
}

impl GatherRound {
    /// The stage slots that a node sends: its first ones.
    pub fn sent_slots(&self) -> Range<u32> {
        0..self.slots
    }

    /// The stage slots that a node receives.
    pub fn received_slots(&self) -> Range<u32> {
        self.distance..self.distance + self.slots
    }

    /// `(n − 2^d) mod M`: the node that `node` sends to.
    pub fn target(&self, node_count: u32, node: Node) -> Node {
        Node((node.0 + node_count - self.distance) % node_count)
    }

    /// `(n + 2^d) mod M`: the node that `node` receives from.
    pub fn source(&self, node_count: u32, node: Node) -> Node {
        Node((node.0 + self.distance) % node_count)
    }
}

/// The `⌈log2 M⌉` rounds of an all-gather over `node_count` nodes; none for one node.
pub fn gather_rounds(node_count: u32) -> Vec<GatherRound> {
    (0..u32::BITS)
        .map(|index| (index, 1_u32 << index))
        .take_while(|(_, distance)| *distance < node_count)
        .map(|(index, distance)| GatherRound { index, slots: distance.min(node_count - distance), distance })
        .collect()
}

/// The node whose shard lies in stage slot `slot` of `node`: `(n + i) mod M`.
pub fn slot_node(node_count: u32, node: Node, slot: u32) -> Node {
    Node((node.0 + slot) % node_count)
}

/// Cuts stage slots of `node` into runs `(first_slot, run_len)` whose nodes ascend by one: at most
/// two, since the node number wraps at most once.
pub fn scatter_runs(node_count: u32, node: Node, slots: Range<u32>) -> Vec<(u32, u32)> {
    debug_assert!(node.0 < node_count && slots.end <= node_count);
    let wrap = (node_count - node.0).clamp(slots.start, slots.end.max(slots.start));
    let halves = [(slots.start, wrap - slots.start), (wrap, slots.end.saturating_sub(wrap))];
    halves.into_iter().filter(|(_, run_len)| *run_len > 0).collect()
}

/// The groups in which the slots of a round are scattered: one, but for the last round up to four
/// of about equal size, none shorter than a strided copy is worth [TIDE §3.1].
pub fn scatter_groups(node_count: u32, round: &GatherRound) -> Vec<Range<u32>> {
    let slots = round.received_slots();
    let is_last = slots.end == node_count;
    let group_count = if is_last { (round.slots / STRIDED_SLOTS_MIN).clamp(1, LAST_ROUND_GROUP_COUNT_MAX) } else { 1 };
    let edge = |group: u32| slots.start + round.slots * group / group_count;
    (0..group_count).map(|group| edge(group)..edge(group + 1)).collect()
}

/// The copies, as `(first_slot, slot_count)`, that scatter one round's slots of one parameter: a
/// run of at least [`STRIDED_SLOTS_MIN`] slots is one strided copy, a shorter one a copy a slot.
pub fn scatter_copies(node_count: u32, node: Node, round: &GatherRound) -> Vec<(u32, u32)> {
    let mut copies = Vec::new();
    for group in scatter_groups(node_count, round) {
        for (first, run_len) in scatter_runs(node_count, node, group) {
            if run_len >= STRIDED_SLOTS_MIN {
                copies.push((first, run_len));
            } else {
                copies.extend((first..first + run_len).map(|slot| (slot, 1)));
            }
        }
    }
    copies
}

/// Copy descriptors that a rank of `node` issues in one all-gather of `parameter_count`
/// parameters, its own shard included: `O(P·log M)` [TIDE §3.1].
pub fn descriptor_count(node_count: u32, node: Node, parameter_count: u64) -> u64 {
    let own_shard = 1;
    let copies =
        gather_rounds(node_count).into_iter().map(|round| scatter_copies(node_count, node, &round).len() as u64);
    parameter_count * (own_shard + copies.sum::<u64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paper's example of five nodes [TIDE §3.2 fig. 5].
    #[test]
    fn five_nodes_take_three_rounds() {
        let rounds: Vec<_> = gather_rounds(5).iter().map(|r| (r.index, r.slots, r.distance)).collect();
        assert_eq!(rounds, [(0, 1, 1), (1, 2, 2), (2, 1, 4)]);
        assert!(gather_rounds(1).is_empty());
        assert_eq!(gather_rounds(1024).len(), 10);
    }

    /// Moves slots as the rounds say and looks at what every node ends up with.
    #[test]
    fn rounds_bring_every_shard_into_its_slot() {
        for m in (1..=70).chain([127, 128, 129, 255, 256, 257]) {
            let mut stages: Vec<Vec<u32>> = (0..m).map(|n| vec![n]).collect();
            for round in gather_rounds(m) {
                let before = stages.clone();
                for n in 0..m {
                    let from = round.source(m, Node(n));
                    assert_eq!(round.target(m, from), Node(n));
                    assert_eq!(stages[n as usize].len() as u32, round.received_slots().start);
                    let sent = round.sent_slots();
                    let arrived = &before[from.0 as usize][sent.start as usize..sent.end as usize];
                    stages[n as usize].extend_from_slice(arrived);
                }
            }
            for (n, stage) in (0..m).zip(&stages) {
                assert!(stage.iter().copied().eq((0..m).map(|i| slot_node(m, Node(n), i).0)), "node {n} of {m}");
            }
        }
    }

    #[test]
    fn runs_are_cut_where_the_node_number_wraps() {
        assert_eq!(scatter_runs(8, Node(5), 2..6), [(2, 1), (3, 3)]);
        assert_eq!(scatter_runs(8, Node(0), 4..8), [(4, 4)]);
        assert_eq!(scatter_runs(8, Node(7), 4..8), [(4, 4)]);
        assert_eq!(scatter_runs(8, Node(4), 4..8), [(4, 4)]);
        assert!(scatter_runs(8, Node(3), 4..4).is_empty());
    }

    #[test]
    fn copies_cover_each_received_slot_once_and_never_cross_a_wrap() {
        for m in 1..=130 {
            for n in 0..m {
                let mut next = 1;
                for (round, (first, len)) in gather_rounds(m)
                    .iter()
                    .flat_map(|round| scatter_copies(m, Node(n), round).into_iter().map(move |copy| (*round, copy)))
                {
                    assert_eq!(first, next);
                    assert!(round.received_slots().contains(&first) && first + len <= round.received_slots().end);
                    let nodes: Vec<u32> = (first..first + len).map(|i| slot_node(m, Node(n), i).0).collect();
                    assert!(nodes.windows(2).all(|w| w[1] == w[0] + 1));
                    next = first + len;
                }
                assert_eq!(next, m);
            }
        }
    }

    #[test]
    fn descriptors_grow_with_the_logarithm_of_the_node_count() {
        assert_eq!(descriptor_count(1, Node(0), 30), 30);
        for m in 2_u32..=1024 {
            let round_count = gather_rounds(m).len() as u64;
            let most = (0..m).step_by((m as usize / 16).max(1)).map(|n| descriptor_count(m, Node(n), 1)).max();
            // A run costs at most three copies, a wrap at most three more; the last round adds groups.
            assert!(most.unwrap() <= 1 + 4 * round_count + 6, "{most:?} at {m} nodes");
        }
        assert_eq!(descriptor_count(64, Node(0), 30), 30 * (1 + 1 + 2 + 1 + 1 + 1 + 4));
    }

    #[test]
    fn only_the_last_round_is_split() {
        let rounds = gather_rounds(64);
        assert_eq!(scatter_groups(64, &rounds[4]), vec![16..32]);
        assert_eq!(scatter_groups(64, &rounds[5]), [32..40, 40..48, 48..56, 56..64]);
        assert_eq!(scatter_groups(5, &gather_rounds(5)[2]), vec![4..5]);
    }
}

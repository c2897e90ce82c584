//! The Latin square: which local rank of a node handles which sub-slice of which contributor.
//!
//! A destination node numbers the nodes that send to it by *contributor* `c ∈ 1..=M`, in the order
//! in which they send; its own node comes last, as `c = M`. With `c̄ = c mod M`, local rank `j` of
//! a contributor works on sub-slice `(j + c̄) mod L`, and sends it along its own rail. Seen from
//! the destination, the partials of one sub-slice thus arrive on a different local rank for each
//! contributor of a wave, at one and the same offset: what a multicast load needs to add them up
//! [TIDE §4.2].

use super::topology::{LocalRank, Node, Topology};

/// `c(m, n)`: which contributor node `source` is to node `destination`, in `1..=M`
/// [TIDE §4.2 eq. 6].
pub fn contributor(node_count: u32, destination: Node, source: Node) -> u32 {
    debug_assert!(destination.0 < node_count && source.0 < node_count);
    if source == destination { node_count } else { (destination.0 + node_count - source.0) % node_count }
}

/// `t = (n + c) mod M`: the node to which node `source` sends as contributor `contributor`
/// [TIDE §4.2].
pub fn destination(node_count: u32, source: Node, contributor: u32) -> Node {
    debug_assert!(source.0 < node_count && (1..=node_count).contains(&contributor));
    Node((source.0 + contributor) % node_count)
}

/// `n = (m − c) mod M`: the node that is contributor `contributor` of node `destination`, the
/// inverse of [`contributor`](contributor()) [TIDE §4.2 eq. 6].
pub fn source(node_count: u32, destination: Node, contributor: u32) -> Node {
    debug_assert!(destination.0 < node_count && (1..=node_count).contains(&contributor));
    Node((destination.0 + node_count - contributor) % node_count)
}

/// `c̄ mod L`, with `c̄ = c mod M`: how far a contributor's sub-slices are turned against the
/// local ranks; zero for the own node [TIDE §4.2].
pub fn rotation(topology: Topology, contributor: u32) -> u32 {
    debug_assert!((1..=topology.node_count()).contains(&contributor));
    (contributor % topology.node_count()) % topology.local_rank_count()
}

/// `s = (j + c̄) mod L`: the sub-slice that local rank `local` of a contributor reduces and sends
/// [TIDE §4.2 eq. 7].
pub fn sub_slice(topology: Topology, local: LocalRank, contributor: u32) -> u32 {
    debug_assert!(local.0 < topology.local_rank_count());
    (local.0 + rotation(topology, contributor)) % topology.local_rank_count()
}

/// `j(s, c) = (s − c̄) mod L`: the local rank that sends, and that receives, a contributor's
/// sub-slice `sub_slice` [TIDE §4.2 eq. 8].
pub fn holder(topology: Topology, sub_slice: u32, contributor: u32) -> LocalRank {
    let l = topology.local_rank_count();
    debug_assert!(sub_slice < l);
    LocalRank((sub_slice + l - rotation(topology, contributor)) % l)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = Topology> {
        (1..=8).flat_map(|l| (1..=40).map(move |m| Topology::new(m, l).unwrap()))
    }

    #[test]
    fn contributor_destination_and_source_undo_each_other() {
        for topology in all() {
            let m = topology.node_count();
            for to in topology.nodes() {
                for from in topology.nodes() {
                    let c = contributor(m, to, from);
                    assert!((1..=m).contains(&c));
                    assert_eq!(c == m, to == from);
                    assert_eq!((destination(m, from, c), source(m, to, c)), (to, from));
                }
            }
        }
    }

    #[test]
    fn holder_undoes_sub_slice_and_each_contributor_covers_every_sub_slice() {
        for topology in all() {
            for c in 1..=topology.node_count() {
                let mut covered = 0_u32;
                for j in topology.local_ranks() {
                    let s = sub_slice(topology, j, c);
                    assert_eq!(holder(topology, s, c), j);
                    covered |= 1 << s;
                }
                assert_eq!(covered, (1 << topology.local_rank_count()) - 1);
            }
        }
    }

    /// The square that the paper's figure shows, four nodes of four [TIDE §4.2 fig. 6].
    #[test]
    fn four_by_four_is_a_latin_square() {
        let topology = Topology::new(4, 4).unwrap();
        let square: Vec<Vec<u32>> =
            (1..=4).map(|c| topology.local_ranks().map(|j| sub_slice(topology, j, c)).collect()).collect();
        assert_eq!(square, [[1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2], [0, 1, 2, 3]]);
    }
}

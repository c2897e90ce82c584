//! Rail lanes: groups with one rank per node, and what their collectives send [TIDE App. F].
//!
//! *All-gather.* Shards travel from landing to landing, per parameter a contiguous run of nodes, cut where the node number
//! wraps. The network moves multiples of 16 bytes between addresses aligned to 16. A parameter for which `o_p·M` or `s_p` is no
//! such multiple is **ragged**, and travels packed, in rows of a stage of `M` rows ([`LaneWays`]).
//!
//! *Reduce-scatter.* The packed row is cut into **rail parts**, and the `M` contributors of a node into **waves** of eight, of
//! which the node itself is the last. An **item** is one wave of one part; outbox and inbox have two banks, which the items
//! take in turn over all calls ([`LaneCut`]).

use super::all_gather::{GatherRound, scatter_runs, slot_node};
use super::topology::Node;
use crate::layout::GroupLayout;
use std::ops::Range;

/// What the network moves are multiples of this, between addresses aligned to it, bytes.
const WIRE_ALIGN_BYTES: u64 = 16;

/// Contributors that one sum adds: the eight sources of [TIDE App. F].
pub const WAVE_WIDTH: u32 = 8;

/// Banks of outbox and inbox.
pub const BANK_COUNT: u32 = 2;

/// What a part's length is a multiple of, elements: blocks stay aligned for bulk copies, whole units for the sum.
pub const PART_ALIGN_ELEMS: u64 = 32;

/// A ragged parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ragged {
    /// Its index.
    pub parameter: usize,
    /// Byte offset of its shard in a row of the stage.
    pub offset: u64,
}

/// Which parameters travel how in an all-gather.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneWays {
    /// Those that travel as they lie.
    pub direct: Vec<usize>,
    /// Those that travel packed.
    pub ragged: Vec<Ragged>,
    /// Bytes of a row of the stage, a multiple of 16.
    pub stage_row_bytes: u64,
}

impl LaneWays {
    /// Sorts the parameters of a group.
    pub fn new(layout: &GroupLayout) -> Self {
        let mut ways = Self { direct: Vec::new(), ragged: Vec::new(), stage_row_bytes: 0 };
        for (parameter, p) in layout.parameters().iter().enumerate().filter(|(_, p)| p.shard_bytes > 0) {
            let is_aligned = |bytes: u64| bytes.is_multiple_of(WIRE_ALIGN_BYTES);
            if is_aligned(p.shard_bytes) && is_aligned(layout.landing_offset_bytes(parameter, 0)) {
                ways.direct.push(parameter);
            } else {
                // Copy engines take any alignment: shards follow each other without gaps.
                ways.ragged.push(Ragged { parameter, offset: ways.stage_row_bytes });
                ways.stage_row_bytes += p.shard_bytes;
            }
        }
        ways.stage_row_bytes = ways.stage_row_bytes.next_multiple_of(WIRE_ALIGN_BYTES);
        ways
    }
}

/// What a round moves of every node: shards of one parameter, or rows of the stage, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneRow {
    /// Symmetric offset of node 0's.
    pub offset: u64,
    /// Bytes of one node's.
    pub bytes: u64,
}

/// What `node` sends in a round, as (symmetric offset, bytes), the same at both ends, ascending in bytes: the last is the one
/// that signals, on every context that the others may use. At least one, if need be of no bytes: the signal counts.
pub fn sent_pieces(node_count: u32, node: Node, round: &GatherRound, rows: &[LaneRow]) -> Vec<(u64, u64)> {
    let runs = scatter_runs(node_count, node, round.sent_slots());
    let piece = |row: &LaneRow, (slot, run_len): (u32, u32)| {
        let first = u64::from(slot_node(node_count, node, slot).0);
        (row.offset + first * row.bytes, u64::from(run_len) * row.bytes)
    };
    let mut pieces: Vec<(u64, u64)> =
        rows.iter().flat_map(|row| runs.iter().map(move |run| piece(row, *run))).collect();
    if pieces.is_empty() {
        pieces.push((0, 0));
    }
    pieces.sort_by_key(|(_, bytes)| *bytes);
    pieces
}

/// How rows are cut into parts and contributors into waves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneCut {
    /// `M`.
    pub node_count: u32,
    /// `S_fp32 / 4`.
    pub packed_elems: u64,
    /// Elements of a part; the last may be shorter.
    pub part_elems: u64,
    /// Parts.
    pub part_count: u32,
    /// Waves.
    pub wave_count: u32,
}

/// One wave of one part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneItem {
    /// Its number over all calls.
    pub number: u64,
    /// Its number in its call.
    pub index: u32,
    /// Its part.
    pub part: u32,
    /// Its wave.
    pub wave: u32,
    /// The bank of outbox and inbox that it takes.
    pub bank: u32,
}

impl LaneCut {
    /// Cuts rows of `packed_elems` into at most `part_count_max` parts, which is at least 1.
    pub fn new(node_count: u32, packed_elems: u64, part_count_max: u32) -> Self {
        let part_elems = packed_elems.div_ceil(part_count_max.into()).next_multiple_of(PART_ALIGN_ELEMS);
        // A group without elements has one empty part: its calls still count.
        let part_count = packed_elems.div_ceil(part_elems.max(1)).max(1) as u32;
        Self { node_count, packed_elems, part_elems, part_count, wave_count: node_count.div_ceil(WAVE_WIDTH) }
    }

    /// Items of a call.
    pub fn item_count(&self) -> u32 {
        self.part_count * self.wave_count
    }

    /// Packed positions of a part.
    pub fn part(&self, part: u32) -> Range<u64> {
        let first = u64::from(part) * self.part_elems;
        first..(first + self.part_elems).min(self.packed_elems)
    }

    /// The contributors of a wave that are other nodes.
    pub fn remote(&self, wave: u32) -> Range<u32> {
        let first = wave * WAVE_WIDTH + 1;
        first..(first + WAVE_WIDTH).min(self.node_count).max(first)
    }

    /// Whether a wave ends with the own node.
    pub fn has_own_node(&self, wave: u32) -> bool {
        wave + 1 == self.wave_count
    }

    /// Blocks of a bank: those of the widest wave.
    pub fn block_count(&self) -> u32 {
        self.remote(0).len() as u32
    }

    /// Items of a wave that find their bank fresh: they need no credit.
    pub fn credit_lead(&self, wave: u32) -> u32 {
        (0..BANK_COUNT).filter(|item| item % self.wave_count == wave).count() as u32
    }

    /// The `index`-th item of a call: parts one after the other, in each the waves.
    pub fn item(&self, epoch: u64, index: u32) -> LaneItem {
        let number = epoch * u64::from(self.item_count()) + u64::from(index);
        let bank = (number % u64::from(BANK_COUNT)) as u32;
        LaneItem { number, index, part: index / self.wave_count, wave: index % self.wave_count, bank }
    }

    /// Transfers that the pairs of an item have exchanged once it is sent: one per part.
    pub fn sequence(&self, item_number: u64) -> u64 {
        item_number / u64::from(self.wave_count) + 1
    }

    /// The wave that takes the bank of an item next, and how many credits its senders have then.
    pub fn next_on_bank(&self, item_number: u64) -> (u32, u64) {
        let next = item_number + u64::from(BANK_COUNT);
        let wave = (next % u64::from(self.wave_count)) as u32;
        (wave, self.sequence(next) - u64::from(self.credit_lead(wave)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::all_gather::gather_rounds;
    use super::*;
    use crate::layout::{Dtype, Group, Parameter};

    fn layout(shapes: &[(u64, Dtype)], node_count: u64) -> GroupLayout {
        let parameters =
            shapes.iter().enumerate().map(|(i, (d, dtype))| Parameter::new(format!("p{i}"), [*d], *dtype).unwrap());
        GroupLayout::new(&Group::new(parameters.collect()).unwrap(), node_count).unwrap()
    }

    #[test]
    fn what_is_aligned_travels_as_it_lies() {
        let ways = LaneWays::new(&layout(&[(32, Dtype::Bf16), (16, Dtype::F32), (0, Dtype::F32)], 4));
        assert_eq!(ways, LaneWays { direct: vec![0, 1], ragged: vec![], stage_row_bytes: 0 });
    }

    #[test]
    fn a_ragged_parameter_makes_those_that_it_shifts_ragged() {
        // Over 4 nodes p0's shards are 3 bytes, p1's 13. p2, of 16 bytes a shard, starts at 4 · 16: aligned again.
        let ways = LaneWays::new(&layout(&[(12, Dtype::U8), (52, Dtype::U8), (64, Dtype::U8)], 4));
        let ragged = vec![Ragged { parameter: 0, offset: 0 }, Ragged { parameter: 1, offset: 3 }];
        assert_eq!(ways, LaneWays { direct: vec![2], ragged, stage_row_bytes: 16 });
        // Over 5 nodes p1, of 16 bytes a shard, starts at 5 · 3.
        assert_eq!(LaneWays::new(&layout(&[(15, Dtype::U8), (80, Dtype::U8)], 5)).direct, []);
    }

    #[test]
    fn pieces_are_cut_at_the_wrap_and_end_with_the_largest() {
        let rows = [LaneRow { offset: 1000, bytes: 32 }, LaneRow { offset: 0, bytes: 16 }];
        let round = gather_rounds(5)[1];
        // Node 4 sends nodes 4 and 0; node 1 sends nodes 1 and 2.
        assert_eq!(sent_pieces(5, Node(4), &round, &rows), [(64, 16), (0, 16), (1128, 32), (1000, 32)]);
        assert_eq!(sent_pieces(5, Node(1), &round, &rows), [(16, 32), (1032, 64)]);
        assert_eq!(sent_pieces(5, Node(1), &round, &[]), [(0, 0)]);
    }

    #[test]
    fn every_shard_comes_once_to_every_node() {
        let row = [LaneRow { offset: 0, bytes: 1 }];
        for m in 1..=70 {
            let mut have: Vec<Vec<bool>> = (0..m).map(|n| (0..m).map(|i| i == n).collect()).collect();
            for round in gather_rounds(m) {
                let before = have.clone();
                for n in 0..m {
                    let to = round.target(m, Node(n)).0 as usize;
                    for shard in sent_pieces(m, Node(n), &round, &row).iter().flat_map(|(o, b)| *o..o + b) {
                        assert!(before[n as usize][shard as usize], "{m} nodes: node {n} sends what it lacks");
                        assert!(!std::mem::replace(&mut have[to][shard as usize], true), "{m} nodes: sent twice");
                    }
                }
            }
            assert!(have.iter().flatten().all(|h| *h));
        }
    }

    #[test]
    fn parts_cover_a_row_and_none_is_empty() {
        for elems in [1, 31, 32, 33, 127, 128, 129, 1000, 4096] {
            let cut = LaneCut::new(5, elems, 4);
            let mut next = 0;
            for part in (0..cut.part_count).map(|p| cut.part(p)) {
                assert!(part.start == next && !part.is_empty());
                next = part.end;
            }
            assert!(next == elems && cut.part_count <= 4, "{cut:?}");
        }
        assert_eq!(LaneCut::new(5, 0, 4).part_count, 1);
    }

    #[test]
    fn waves_cover_every_contributor_once() {
        for m in 1..=40 {
            let cut = LaneCut::new(m, 100, 4);
            let mut all: Vec<u32> = (0..cut.wave_count).flat_map(|w| cut.remote(w)).collect();
            all.extend((0..cut.wave_count).filter(|w| cut.has_own_node(*w)).map(|_| m));
            assert_eq!(all, (1..=m).collect::<Vec<_>>());
            let width = |w| cut.remote(w).len() as u32 + u32::from(cut.has_own_node(w));
            assert!(
                (0..cut.wave_count).all(|w| width(w) <= WAVE_WIDTH && cut.remote(w).len() as u32 <= cut.block_count())
            );
        }
    }

    /// Whoever sends in item `k` needs the credits that the sum of item `k − 2` brings up, no more and no fewer.
    #[test]
    fn credits_are_those_of_the_bank_before() {
        for (m, elems) in [(2, 20), (8, 500), (9, 20), (13, 500), (20, 70), (25, 40)] {
            let cut = LaneCut::new(m, elems, 4);
            for number in 0..60_u64 {
                let wave = (number % u64::from(cut.wave_count)) as u32;
                let needed = cut.sequence(number).saturating_sub(cut.credit_lead(wave).into());
                let brought =
                    number.checked_sub(BANK_COUNT.into()).map_or((wave, 0), |before| cut.next_on_bank(before));
                assert_eq!(brought, (wave, needed), "{m} nodes, item {number}");
            }
        }
    }
}

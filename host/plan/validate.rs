//! Validation: takes waves, however they were made, and follows every partial to its block.
//!
//! Nothing here trusts the masks and counts that planning computed: contributors are delivered one
//! by one through [`latin_square::holder`], over several passes, into a model of the inbox that
//! remembers which wave left what, and each landing must find exactly its own wave's partials and
//! zeros. [`exhaustive`] does so for every plan of the paper's regression test [TIDE App. D].

use std::ops::{Range, RangeInclusive};

use super::outbox;
use super::topology::{LOCAL_RANK_COUNT_MAX, NODE_COUNT_MAX, Topology};
use super::waves::{self, Wave};
use super::{Mode, PASS_COUNT_MAX, PlanError, ReduceScatterPlan, latin_square};

/// What is wrong with a plan that should be sound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Violation {
    #[error("contributor {contributor} is in {times} waves and not in one")]
    NotOnce { contributor: u32, times: u32 },
    #[error("wave {wave} holds contributors {contributors:?}, which are not some of 1 to {node_count}")]
    Contributors { wave: u32, contributors: Range<u32>, node_count: u32 },
    #[error("wave {wave} is numbered {index} with generation {generation}")]
    Numbering { wave: u32, index: u32, generation: u32 },
    #[error("wave {wave} is wrong about having the own node")]
    OwnNode { wave: u32 },
    #[error("in wave {wave}, contributor {contributor} overwrites sub-slice {sub_slice} on local rank {local_rank}")]
    Overwrites { wave: u32, contributor: u32, sub_slice: u32, local_rank: u32 },
    #[error("wave {wave} lands block {sub_slice} of local rank {local_rank}, where wave {left_by} left its partial")]
    Stale { wave: u32, sub_slice: u32, local_rank: u32, left_by: u32 },
    #[error("wave {wave} lands {landed} partials where {arrived} arrived")]
    Lost { wave: u32, landed: u32, arrived: u32 },
    #[error("the holder mask of wave {wave} is {found:#010b} and partials arrive as {expected:#010b}")]
    HolderMask { wave: u32, found: u8, expected: u8 },
    #[error("the rounds of wave {wave} carry {found:?} and not each of {expected:?} in order")]
    Rounds { wave: u32, found: Vec<Range<u32>>, expected: Range<u32> },
    #[error("a round of wave {wave} carries {found} transfers where at most {round_width} may go")]
    RoundWidth { wave: u32, found: u32, round_width: u32 },
    #[error("an outbox of {found} blocks for a {mode} plan of {pass_count} passes that needs {expected}")]
    OutboxDepth { found: u32, expected: u32, mode: Mode, pass_count: u32 },
    #[error("a plan was refused although no two contributors of a wave meet")]
    RefusedWithoutCause,
}

/// Passes that [`check_placement`] follows: two calls of as many passes as a plan may have. The
/// inbox cannot tell a pass from a call, so this covers every smaller number too.
const REPEAT_COUNT: u32 = 2 * PASS_COUNT_MAX;

/// Blocks of one generation on one node.
const BLOCK_COUNT_MAX: usize = (LOCAL_RANK_COUNT_MAX * LOCAL_RANK_COUNT_MAX) as usize;

/// A wave's use of the inbox, delivered one partial at a time.
struct Delivery {
    /// Where each arriving partial goes, as `j·L + s`.
    blocks: Vec<u8>,
    /// The blocks that are zeroed before landing, as `j·L + s`.
    zeroed: Vec<u8>,
}

/// Where the contributors of `wave` put their partials, and what the wave zeroes.
fn deliver(topology: Topology, wave: &Wave) -> Delivery {
    let l = topology.local_rank_count();
    let block = |j: u32, s: u32| (j * l + s) as u8;
    let partials = wave.contributors.clone().flat_map(|c| (0..l).map(move |s| (c, s)));
    let all = (0..l).flat_map(|j| (0..l).map(move |s| (j, s)));
    Delivery {
        blocks: partials.map(|(c, s)| block(latin_square::holder(topology, s, c).0, s)).collect(),
        zeroed: all.filter(|(j, s)| wave.stale_mask >> ((s + l - j) % l) & 1 == 1).map(|(j, s)| block(j, s)).collect(),
    }
}

/// Follows two calls of the most passes through the inbox.
///
/// # Errors
/// The first [`Violation`]: a contributor that is not in exactly one wave, two in one block, a
/// landing that would read what an earlier wave left or miss a partial, or a mask or number of a
/// wave that is not what the waves amount to.
pub fn check_placement(topology: Topology, waves: &[Wave]) -> Result<(), Violation> {
    let (m, l) = (topology.node_count(), topology.local_rank_count());
    check_contributors(m, waves)?;
    let generation_count = if waves.len() == 1 { 1 } else { 2 };
    let mut deliveries = Vec::with_capacity(waves.len());
    for (wave, position) in waves.iter().zip(0..) {
        if wave.index != position || wave.generation != position % generation_count {
            let (index, generation) = (wave.index, wave.generation);
            return Err(Violation::Numbering { wave: position, index, generation });
        }
        if wave.has_own_node != wave.contributors.contains(&m) {
            return Err(Violation::OwnNode { wave: position });
        }
        deliveries.push(deliver(topology, wave));
    }
    // Per generation and block: zero, or one more than the running number of the wave that wrote it.
    let mut inbox = [[0_u32; BLOCK_COUNT_MAX]; 2];
    for repeat in 0..REPEAT_COUNT {
        for (wave, delivery) in waves.iter().zip(&deliveries) {
            let tag = repeat * waves.len() as u32 + wave.index + 1;
            land(l, wave, delivery, tag, waves.len() as u32, &mut inbox[wave.generation as usize])?;
        }
    }
    for (wave, delivery) in waves.iter().zip(&deliveries) {
        // Row 0 of the mask is local rank 0, where bit d stands for block d.
        let expected = delivery.blocks.iter().filter(|&&block| u32::from(block) < l).fold(0, |mask, s| mask | 1 << s);
        if wave.holder_mask != expected {
            return Err(Violation::HolderMask { wave: wave.index, found: wave.holder_mask, expected });
        }
    }
    Ok(())
}

/// Each of `1..=M` in exactly one wave.
fn check_contributors(m: u32, waves: &[Wave]) -> Result<(), Violation> {
    let mut times = vec![0_u32; m as usize + 1];
    for (wave, position) in waves.iter().zip(0..) {
        let contributors = wave.contributors.clone();
        if contributors.is_empty() || contributors.start == 0 || contributors.end > m + 1 {
            return Err(Violation::Contributors { wave: position, contributors, node_count: m });
        }
        contributors.for_each(|c| times[c as usize] += 1);
    }
    match (1..).zip(&times[1..]).find(|(_, times)| **times != 1) {
        Some((contributor, &times)) => Err(Violation::NotOnce { contributor, times }),
        None => Ok(()),
    }
}

/// One wave on its generation: partials arrive, stale blocks are zeroed, and the landing reads all.
fn land(
    l: u32,
    wave: &Wave,
    delivery: &Delivery,
    tag: u32,
    wave_count: u32,
    blocks: &mut [u32; BLOCK_COUNT_MAX],
) -> Result<(), Violation> {
    for (&block, order) in delivery.blocks.iter().zip(0..) {
        if blocks[usize::from(block)] == tag {
            let (local_rank, sub_slice) = (u32::from(block) / l, u32::from(block) % l);
            let contributor = wave.contributors.start + order / l;
            return Err(Violation::Overwrites { wave: wave.index, contributor, sub_slice, local_rank });
        }
        blocks[usize::from(block)] = tag;
    }
    delivery.zeroed.iter().for_each(|&block| blocks[usize::from(block)] = 0);
    let (mut landed, mut strange) = (0_u32, 0_u32);
    for &left in blocks.iter() {
        landed += u32::from(left == tag);
        strange += u32::from(left != tag && left != 0);
    }
    if strange != 0 {
        let (block, left) = (0..).zip(blocks.iter()).find(|(_, left)| **left != tag && **left != 0).unwrap_or((0, &1));
        let (local_rank, sub_slice, left_by) = (block / l, block % l, (left - 1) % wave_count);
        return Err(Violation::Stale { wave: wave.index, sub_slice, local_rank, left_by });
    }
    let arrived = delivery.blocks.len() as u32;
    if landed != arrived {
        return Err(Violation::Lost { wave: wave.index, landed, arrived });
    }
    Ok(())
}

/// Checks that the rounds of each wave carry its remote contributors, each once and in order, at
/// most `round_width` at a time.
///
/// # Errors
/// [`Violation::Rounds`], [`Violation::RoundWidth`].
pub fn check_rounds(topology: Topology, waves: &[Wave], round_width: u32) -> Result<(), Violation> {
    let m = topology.node_count();
    for wave in waves {
        let remote = wave.contributors.start..wave.contributors.end.min(m);
        let mut next = remote.start;
        for round in &wave.rounds {
            if round.start != next || round.end <= round.start || round.end > remote.end {
                return Err(Violation::Rounds { wave: wave.index, found: wave.rounds.clone(), expected: remote });
            }
            if round.end - round.start > round_width {
                let found = round.end - round.start;
                return Err(Violation::RoundWidth { wave: wave.index, found, round_width });
            }
            next = round.end;
        }
        if next != remote.end {
            return Err(Violation::Rounds { wave: wave.index, found: wave.rounds.clone(), expected: remote });
        }
    }
    Ok(())
}

/// What rounds need of an outbox.
struct OutboxNeed {
    /// `D_rem` of one pass.
    pass_blocks: u32,
    /// The most blocks of two consecutive rounds within a pass.
    pair_blocks: u32,
    /// The blocks of a pass's last round and of the next one's first.
    seam_blocks: u32,
}

impl OutboxNeed {
    /// From the rounds of one pass.
    fn of(waves: &[Wave]) -> Self {
        let (mut first, mut before) = (0, 0);
        let mut need = Self { pass_blocks: 0, pair_blocks: 0, seam_blocks: 0 };
        for round in waves.iter().flat_map(|wave| &wave.rounds) {
            let transfers = round.end - round.start;
            if need.pass_blocks == 0 {
                first = transfers;
            }
            need.pass_blocks += transfers;
            need.pair_blocks = need.pair_blocks.max(before + transfers);
            before = transfers;
        }
        need.seam_blocks = before + first;
        need
    }

    /// Checks `n_out` against need and bounds: no less than what must be there at once, no more than
    /// is ever there, and within the bounds of equation 9.
    fn check(
        &self,
        node_count: u32,
        round_width: u32,
        mode: Mode,
        pass_count: u32,
        found: u32,
    ) -> Result<(), Violation> {
        let all = pass_count * (node_count - 1);
        let expected = match mode {
            Mode::InPlace => pass_count * self.pass_blocks,
            Mode::SlotReuse if pass_count > 1 => self.pair_blocks.max(self.seam_blocks),
            Mode::SlotReuse => self.pair_blocks,
        };
        let bound = if mode == Mode::SlotReuse { all.min(round_width.saturating_mul(2)) } else { all };
        if found != expected || found > bound {
            return Err(Violation::OutboxDepth { found, expected, mode, pass_count });
        }
        Ok(())
    }
}

/// Checks a whole plan: placement over two calls, rounds, and outbox depth.
///
/// # Errors
/// The first [`Violation`].
pub fn check_plan(plan: &ReduceScatterPlan) -> Result<(), Violation> {
    check_placement(plan.topology, &plan.waves)?;
    check_rounds(plan.topology, &plan.waves, plan.round_width)?;
    OutboxNeed::of(&plan.waves).check(
        plan.topology.node_count(),
        plan.round_width,
        plan.mode,
        plan.pass_count,
        plan.outbox_block_count,
    )
}

/// How many plans of a sweep were accepted and sound, refused for a collision, or wrong.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counts {
    /// One-pass plans `(M, W_wave, k, mode)` that were accepted and hold.
    pub accepted: u64,
    /// Plans that were refused because two contributors of a wave meet, as they do.
    pub rejected: u64,
    /// Accepted plans with two, three and four passes, counted apart.
    pub multi_pass_accepted: u64,
    /// Plans that were accepted and do not hold, or were refused without cause.
    pub violation_count: u64,
    /// The first of those.
    pub first_violation: Option<Violation>,
}

impl Counts {
    fn violate(&mut self, plan_count: u64, violation: Violation) {
        self.violation_count += plan_count;
        self.first_violation.get_or_insert(violation);
    }
}

/// Plans everything of these ranges, both modes and every pass count, and checks each plan.
///
/// Placement depends on `(M, L, W_wave)` alone and is followed once for each; rounds are cut and
/// checked for every `k`, outboxes for every `k`, mode and pass count.
///
/// # Errors
/// A [`PlanError`] other than a collision: a range has values that no plan is made for.
pub fn sweep(
    local_rank_count: u32,
    node_counts: RangeInclusive<u32>,
    wave_widths: RangeInclusive<u32>,
    round_widths: RangeInclusive<u32>,
) -> Result<Counts, PlanError> {
    let mut counts = Counts::default();
    let modes = [Mode::InPlace, Mode::SlotReuse];
    let plan_count = round_widths.clone().count() as u64 * modes.len() as u64;
    for m in node_counts {
        let topology = Topology::new(m, local_rank_count)?;
        for wave_width in wave_widths.clone() {
            let mut waves = match waves::waves(topology, wave_width, *round_widths.start()) {
                Ok(waves) => waves,
                Err(PlanError::Collision { .. }) if contributors_meet(topology, wave_width) => {
                    counts.rejected += plan_count;
                    continue;
                }
                Err(PlanError::Collision { .. }) => {
                    counts.violate(plan_count, Violation::RefusedWithoutCause);
                    continue;
                }
                Err(error) => return Err(error),
            };
            if let Err(violation) = check_placement(topology, &waves) {
                counts.violate(plan_count, violation);
                continue;
            }
            for k in round_widths.clone() {
                waves.iter_mut().for_each(|wave| wave.cut_rounds(k));
                if let Err(violation) = check_rounds(topology, &waves, k) {
                    counts.violate(modes.len() as u64, violation);
                    continue;
                }
                let need = OutboxNeed::of(&waves);
                for mode in modes {
                    for pass_count in 1..=PASS_COUNT_MAX {
                        let depth = outbox::block_count(mode, &waves, pass_count);
                        match need.check(m, k, mode, pass_count, depth) {
                            Ok(()) if pass_count == 1 => counts.accepted += 1,
                            Ok(()) => counts.multi_pass_accepted += 1,
                            Err(violation) => counts.violate(1, violation),
                        }
                    }
                }
            }
        }
    }
    Ok(counts)
}

/// Whether two contributors of one wave reach the same local rank with the same sub-slice; by
/// comparing all pairs, for every sub-slice.
fn contributors_meet(topology: Topology, wave_width: u32) -> bool {
    let contributors: Vec<u32> = (1..=topology.node_count()).collect();
    contributors.chunks(wave_width as usize).any(|wave| {
        wave.iter().enumerate().any(|(i, &a)| {
            wave[..i].iter().any(|&b| {
                (0..topology.local_rank_count())
                    .all(|s| latin_square::holder(topology, s, a) == latin_square::holder(topology, s, b))
            })
        })
    })
}

/// The paper's regression test: `L = 8`, `M` from 2 to 1024, every wave width, `k` from 1 to 32,
/// with and without Slot-Reuse, the paper's memory-efficient variant [TIDE App. D]. Two, three and
/// four passes are counted apart.
///
/// # Panics
/// Never: all ranges are ones that plans are made for.
pub fn exhaustive() -> Counts {
    let widths = 1..=LOCAL_RANK_COUNT_MAX;
    sweep(LOCAL_RANK_COUNT_MAX, 2..=NODE_COUNT_MAX, widths, 1..=32).expect("the ranges are supported ones")
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    fn sound(m: u32, l: u32, width: u32, k: u32) -> (Topology, Vec<Wave>) {
        let topology = Topology::new(m, l).unwrap();
        let waves = waves::waves(topology, width, k).unwrap();
        assert_eq!(check_placement(topology, &waves), Ok(()));
        assert_eq!(check_rounds(topology, &waves, k), Ok(()));
        (topology, waves)
    }

    #[test]
    fn a_forgotten_stale_block_is_found() {
        let (topology, mut waves) = sound(11, 4, 4, 3);
        waves[2].stale_mask = 0;
        let expected = Violation::Stale { wave: 2, sub_slice: 3, local_rank: 0, left_by: 0 };
        assert_eq!(check_placement(topology, &waves), Err(expected));
    }

    /// The first call finds an inbox of zeros; only the second one can see this.
    #[test]
    fn a_block_left_by_the_call_before_is_found() {
        let (topology, mut waves) = sound(6, 8, 2, 4);
        waves[0].stale_mask = 0;
        let expected = Violation::Stale { wave: 0, sub_slice: 0, local_rank: 0, left_by: 2 };
        assert_eq!(check_placement(topology, &waves), Err(expected));
    }

    #[test]
    fn zeroing_a_block_that_holds_data_is_found() {
        let (topology, mut waves) = sound(11, 4, 4, 3);
        waves[1].stale_mask = 1;
        assert_eq!(check_placement(topology, &waves), Err(Violation::Lost { wave: 1, landed: 12, arrived: 16 }));
    }

    #[test]
    fn contributors_that_are_missing_twice_there_or_unknown_are_found() {
        let (topology, waves) = sound(9, 8, 8, 4);
        let with = |wave: usize, contributors: Range<u32>| {
            let mut waves = waves.clone();
            waves[wave].contributors = contributors;
            check_placement(topology, &waves)
        };
        assert_eq!(with(0, 1..8), Err(Violation::NotOnce { contributor: 8, times: 0 }));
        assert_eq!(with(1, 8..10), Err(Violation::NotOnce { contributor: 8, times: 2 }));
        assert_eq!(with(0, 0..9), Err(Violation::Contributors { wave: 0, contributors: 0..9, node_count: 9 }));
        assert_eq!(with(1, 9..11), Err(Violation::Contributors { wave: 1, contributors: 9..11, node_count: 9 }));
    }

    /// The plan that [TIDE App. D] rejects, made by hand.
    #[test]
    fn two_contributors_in_one_block_are_found() {
        let (topology, mut waves) = sound(9, 8, 8, 4);
        waves[0].contributors = 1..7;
        waves[1].contributors = 7..10;
        let found = check_placement(topology, &waves).unwrap_err();
        assert!(matches!(found, Violation::Overwrites { wave: 1, contributor: 9, .. }), "{found}");
    }

    #[test]
    fn wrong_masks_numbers_and_flags_are_found() {
        let (topology, waves) = sound(11, 4, 4, 3);
        let with = |change: fn(&mut Wave)| {
            let mut waves = waves.clone();
            change(&mut waves[2]);
            check_placement(topology, &waves)
        };
        let mask = Violation::HolderMask { wave: 2, found: 0b0011, expected: 0b0111 };
        assert_eq!(with(|wave| wave.holder_mask = 0b0011), Err(mask));
        assert_eq!(with(|wave| wave.generation = 1), Err(Violation::Numbering { wave: 2, index: 2, generation: 1 }));
        assert_eq!(with(|wave| wave.has_own_node = false), Err(Violation::OwnNode { wave: 2 }));
    }

    #[test]
    fn rounds_that_skip_repeat_reorder_overrun_or_carry_the_own_node_are_found() {
        let (topology, waves) = sound(11, 4, 4, 3);
        let with = |wave: usize, rounds: &[Range<u32>]| {
            let mut waves = waves.clone();
            waves[wave].rounds = rounds.to_vec();
            check_rounds(topology, &waves, 3)
        };
        for wrong in [
            slice::from_ref(&(1..4)),
            &[1..4, 4..5, 4..5],
            &[4..5, 1..4],
            &[1..4, 5..6],
            &[1..4, 4..6],
            &[1..4, 4..4, 4..5],
        ] {
            assert!(matches!(with(0, wrong), Err(Violation::Rounds { wave: 0, .. })), "{wrong:?}");
        }
        let own_node = with(2, &[9..11, 11..12]).unwrap_err();
        assert!(matches!(own_node, Violation::Rounds { wave: 2, .. }), "{own_node}");
        assert_eq!(with(0, slice::from_ref(&(1..5))), Err(Violation::RoundWidth { wave: 0, found: 4, round_width: 3 }));
    }

    #[test]
    fn an_outbox_one_block_off_is_found() {
        let (topology, waves) = sound(16, 8, 8, 3);
        let need = OutboxNeed::of(&waves);
        for (mode, pass_count, right) in [(Mode::InPlace, 2, 30), (Mode::SlotReuse, 1, 6), (Mode::SlotReuse, 3, 6)] {
            let check = |found| need.check(topology.node_count(), 3, mode, pass_count, found);
            assert_eq!(check(right), Ok(()));
            assert!(check(right - 1).is_err() && check(right + 1).is_err());
        }
    }

    /// Runs the read and the network phase over a bank, one block at a time: with the planned depth
    /// the next round is always summed while one is on the rails, and nothing is overwritten before
    /// it was sent.
    #[test]
    fn the_next_round_is_summed_while_one_is_on_the_rails() {
        for (m, l, width) in (2..=34).flat_map(|m| [(m, 8, 8), (m, 8, 4), (m, 4, 4), (m, 2, 1)]) {
            for (k, pass_count) in (1..=9).flat_map(|k| (1..=4).map(move |p| (k, p))) {
                let (_, waves) = sound(m, l, width, k);
                let depth = outbox::block_count(Mode::SlotReuse, &waves, pass_count);
                let all = outbox::remote_block_count(m, pass_count);
                let rounds: Vec<u32> = (0..pass_count)
                    .flat_map(|_| waves.iter().flat_map(|wave| wave.rounds.iter().map(|r| r.end - r.start)))
                    .collect();
                let (mut summed, mut sent) = (0, 0);
                for (i, transfers) in rounds.iter().enumerate() {
                    // Blocks up to `sent` are free again; sums run ahead as far as the bank allows.
                    summed = all.min(sent + depth).max(summed);
                    let next = rounds.get(i + 1).copied().unwrap_or(0);
                    assert!(summed >= sent + transfers + next, "M={m} L={l} k={k} passes={pass_count} round {i}");
                    sent += transfers;
                }
                assert_eq!(sent, all);
                assert!(depth <= all.min(2 * k));
            }
        }
    }
}

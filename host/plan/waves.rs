//! Waves and rounds: when a contributor is received, and into which inbox generation.
//!
//! The contributors `1..=M` are cut, ascending, into *waves* of at most `W_wave ≤ L`; the landing
//! adds one wave at once, so no two contributors of a wave may arrive on one local rank for the
//! same sub-slice. A width that divides `L` never collides [TIDE §4.2 prop. 4.1]; of the other
//! widths, those that do are found here and refused. A wave's remote contributors are cut further
//! into *rounds* of at most `k` transfers, which never reach into the next wave.
//!
//! A wave does not write all `L × L` blocks of its inbox generation. Block `s` of local rank `j`
//! is written exactly if bit `(s − j) mod L` of the wave's [`holder_mask`](Wave::holder_mask) is
//! set, so one byte speaks for the whole node. Where the wave before it on the same generation
//! wrote and this one does not, old partials lie: those are the *stale* blocks, to be zeroed before
//! the wave lands. The rule supposes that all calls on one inbox share `(M, L, W_wave)` and the
//! offsets of the blocks; then it also holds across passes, calls, and groups of unequal size.

use std::ops::Range;

use super::PlanError;
use super::latin_square;
use super::topology::Topology;

/// The contributors that are landed together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Wave {
    /// `w`, the wave's number in its pass.
    pub index: u32,
    /// The inbox generation that it uses: `w mod n_par` [TIDE §4.2].
    pub generation: u32,
    /// Its contributors `c`, half open and ascending.
    pub contributors: Range<u32>,
    /// Its remote contributors in rounds of at most `k`, in order; the own node is in none.
    pub rounds: Vec<Range<u32>>,
    /// Whether the own node, contributor `M`, is in this wave; true of the last wave only.
    pub has_own_node: bool,
    /// Bit `d` is set if a contributor of the wave has `c̄ mod L = d`: block `s` on local rank `j`
    /// is written exactly if bit `(s − j) mod L` is set [TIDE §4.2 eq. 8].
    pub holder_mask: u8,
    /// Blocks to be zeroed before this wave lands, in the bits of [`holder_mask`](Self::holder_mask):
    /// those that the wave before it on the same generation wrote and this one does not. The first
    /// wave on a generation follows the last one of the pass, or of the call, before.
    pub stale_mask: u8,
}

impl Wave {
    /// The contributors that arrive over the rails: all but the own node.
    pub fn remote_contributors(&self) -> Range<u32> {
        self.contributors.start..self.contributors.end - u32::from(self.has_own_node)
    }

    /// Cuts the remote contributors into rounds of `round_width`, of which the last may be shorter.
    pub(super) fn cut_rounds(&mut self, round_width: u32) {
        let remote = self.remote_contributors();
        self.rounds.clear();
        let mut first = remote.start;
        while first < remote.end {
            let end = first.saturating_add(round_width).min(remote.end);
            self.rounds.push(first..end);
            first = end;
        }
    }
}

/// `n_par`: how many inbox generations a schedule of `wave_count` waves alternates between; one
/// wave needs one, more need two [TIDE §4.2].
pub fn generation_count(wave_count: u32) -> u32 {
    if wave_count > 1 { 2 } else { 1 }
}

/// The waves of one pass, with their rounds.
///
/// # Errors
/// [`PlanError::WaveWidth`] outside `1..=L`, [`PlanError::RoundWidth`] for zero, and
/// [`PlanError::Collision`] if two contributors of a wave would arrive in one block.
pub fn waves(topology: Topology, wave_width: u32, round_width: u32) -> Result<Vec<Wave>, PlanError> {
    let (m, l) = (topology.node_count(), topology.local_rank_count());
    if !(1..=l).contains(&wave_width) {
        return Err(PlanError::WaveWidth { found: wave_width, local_rank_count: l });
    }
    if round_width == 0 {
        return Err(PlanError::RoundWidth);
    }
    let wave_count = m.div_ceil(wave_width);
    let generation_count = generation_count(wave_count);
    let mut waves = Vec::with_capacity(wave_count as usize);
    for index in 0..wave_count {
        let first = index * wave_width + 1;
        let contributors = first..(first + wave_width).min(m + 1);
        let mut wave = Wave {
            index,
            generation: index % generation_count,
            has_own_node: contributors.end == m + 1,
            holder_mask: holder_mask(topology, wave_width, index, &contributors)?,
            contributors,
            rounds: Vec::new(),
            stale_mask: 0,
        };
        wave.cut_rounds(round_width);
        waves.push(wave);
    }
    let masks: Vec<u8> = waves.iter().map(|wave| wave.holder_mask).collect();
    for wave in &mut waves {
        let before = wave_before(wave.index, wave_count, generation_count);
        wave.stale_mask = masks[before as usize] & !wave.holder_mask;
    }
    Ok(waves)
}

/// The wave that used the generation of wave `index` before it did: `n_par` waves earlier, or, for
/// the first ones, the last of its generation in the pass or call before.
fn wave_before(index: u32, wave_count: u32, generation_count: u32) -> u32 {
    match index.checked_sub(generation_count) {
        Some(before) => before,
        None => (index..wave_count).step_by(generation_count as usize).next_back().unwrap_or(index),
    }
}

/// One bit per contributor's rotation; two contributors on one bit collide in every sub-slice.
fn holder_mask(topology: Topology, wave_width: u32, wave: u32, contributors: &Range<u32>) -> Result<u8, PlanError> {
    let mut mask = 0_u8;
    for second in contributors.clone() {
        let rotation = latin_square::rotation(topology, second);
        let bit = 1_u8 << rotation;
        if mask & bit != 0 {
            let first = contributors.clone().find(|c| latin_square::rotation(topology, *c) == rotation);
            return Err(PlanError::Collision {
                node_count: topology.node_count(),
                local_rank_count: topology.local_rank_count(),
                wave_width,
                wave,
                contributors: contributors.clone(),
                first: first.unwrap_or(second),
                second,
                local_rank: latin_square::holder(topology, 0, second).0,
            });
        }
        mask |= bit;
    }
    Ok(mask)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(m: u32, l: u32, width: u32, k: u32) -> Result<Vec<Wave>, PlanError> {
        waves(Topology::new(m, l).unwrap(), width, k)
    }

    #[test]
    fn eleven_nodes_of_four_give_three_waves_on_two_generations() {
        let waves = plan(11, 4, 4, 3).unwrap();
        let contributors: Vec<_> = waves.iter().map(|w| w.contributors.clone()).collect();
        assert_eq!(contributors, [1..5, 5..9, 9..12]);
        assert_eq!(waves.iter().map(|w| w.generation).collect::<Vec<_>>(), [0, 1, 0]);
        assert_eq!(waves[0].rounds, [1..4, 4..5]);
        assert_eq!(waves[2].rounds, vec![9..11]);
        assert_eq!(waves.iter().map(|w| w.has_own_node).collect::<Vec<_>>(), [false, false, true]);
        // Contributors 9 and 10 turn by 1 and 2, the own node by 0.
        assert_eq!(waves.iter().map(|w| w.holder_mask).collect::<Vec<_>>(), [0b1111, 0b1111, 0b0111]);
        // Wave 2 follows wave 0 on generation 0, and the next call's wave 0 follows wave 2.
        assert_eq!(waves.iter().map(|w| w.stale_mask).collect::<Vec<_>>(), [0, 0, 0b1000]);
    }

    #[test]
    fn the_first_wave_of_a_generation_follows_the_last_of_the_call_before() {
        let waves = plan(6, 8, 2, 4).unwrap();
        assert_eq!(waves.iter().map(|w| w.holder_mask).collect::<Vec<_>>(), [0b0110, 0b1_1000, 0b10_0001]);
        assert_eq!(waves.iter().map(|w| w.stale_mask).collect::<Vec<_>>(), [0b10_0001, 0, 0b0110]);
    }

    #[test]
    fn one_node_is_one_wave_without_rounds() {
        let waves = plan(1, 8, 8, 4).unwrap();
        assert_eq!(waves.len(), 1);
        assert_eq!((waves[0].holder_mask, waves[0].stale_mask, waves[0].has_own_node), (1, 0, true));
        assert!(waves[0].rounds.is_empty() && waves[0].remote_contributors().is_empty());
    }

    #[test]
    fn a_wave_of_the_own_node_alone_has_no_rounds() {
        let waves = plan(9, 8, 8, 4).unwrap();
        assert_eq!(waves[1].contributors, 9..10);
        assert!(waves[1].rounds.is_empty() && waves[1].has_own_node);
        assert_eq!(waves[1].generation, 1);
    }

    /// T30: the collision of [TIDE App. D], with all that the message must name.
    #[test]
    fn t30_a_collision_names_its_wave_and_both_contributors() {
        let error = plan(9, 8, 3, 4).unwrap_err();
        let PlanError::Collision { wave, contributors, first, second, local_rank, .. } = &error else { panic!() };
        assert_eq!((*wave, contributors.clone(), *first, *second, *local_rank), (2, 7..10, 8, 9, 0));
        let text = error.to_string();
        for part in ["width 3", "9 nodes", "wave 2", "7 to 9", "8 and 9", "local rank 0"] {
            assert!(text.contains(part), "{part} not in: {text}");
        }
    }

    #[test]
    fn widths_that_mean_nothing_are_refused() {
        assert_eq!(plan(4, 4, 0, 1).unwrap_err(), PlanError::WaveWidth { found: 0, local_rank_count: 4 });
        assert_eq!(plan(4, 4, 5, 1).unwrap_err(), PlanError::WaveWidth { found: 5, local_rank_count: 4 });
        assert_eq!(plan(4, 4, 4, 0).unwrap_err(), PlanError::RoundWidth);
        assert_eq!(plan(4, 4, 4, u32::MAX).unwrap()[0].rounds, vec![1..4]);
    }
}

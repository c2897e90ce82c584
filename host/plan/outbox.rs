//! The outbox: how many blocks a bank needs, and which block a remote contribution goes through.
//!
//! A call sends `D_rem = n_part·(M − 1)` blocks, each of one pass. Numbered in sending order they
//! are `J = pass·(M − 1) + (c − 1)`, because waves and rounds take the contributors in ascending
//! order; block `J` uses slot `J mod n_out` of its bank [TIDE App. E alg. 1 l. 4].
//!
//! In-Place gives every block a slot of its own, so that reads never wait for the network.
//! Slot-Reuse holds two consecutive rounds: one on the rails, one being summed [TIDE §5.3].

use super::Mode;
use super::waves::Wave;

/// `D_rem = n_part·(M − 1)`: the remote blocks that a rank sends in one call [TIDE App. E].
pub fn remote_block_count(node_count: u32, pass_count: u32) -> u32 {
    pass_count * (node_count - 1)
}

/// `J`: the place of a remote contributor's block in the sending order of a call, from zero.
pub fn block_index(node_count: u32, pass: u32, contributor: u32) -> u32 {
    debug_assert!((1..node_count).contains(&contributor));
    pass * (node_count - 1) + contributor - 1
}

/// `n_out`: the outbox blocks of one bank, each of one pass.
///
/// In-Place: all `D_rem`. Slot-Reuse: `max_i(k_i + k_{i−1})` over the rounds of a call, with
/// `k_{−1} = 0` [TIDE §5.3 eq. 9]; the first round of a pass follows the last one of the pass
/// before. Never above `D_rem`.
pub fn block_count(mode: Mode, waves: &[Wave], pass_count: u32) -> u32 {
    match mode {
        Mode::InPlace => pass_count * waves.iter().map(|wave| wave.remote_contributors().len() as u32).sum::<u32>(),
        Mode::SlotReuse => {
            let (mut depth, mut before, mut first) = (0, 0, None);
            for round in waves.iter().flat_map(|wave| &wave.rounds) {
                let transfers = round.end - round.start;
                first.get_or_insert(transfers);
                depth = depth.max(transfers + before);
                before = transfers;
            }
            if pass_count > 1 { depth.max(before + first.unwrap_or(0)) } else { depth }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::topology::Topology;
    use crate::plan::waves::waves;

    fn depths(m: u32, l: u32, width: u32, k: u32, pass_count: u32) -> (u32, u32) {
        let waves = waves(Topology::new(m, l).unwrap(), width, k).unwrap();
        (block_count(Mode::InPlace, &waves, pass_count), block_count(Mode::SlotReuse, &waves, pass_count))
    }

    #[test]
    fn depth_follows_equation_9() {
        assert_eq!(depths(64, 8, 8, 4, 1), (63, 8));
        // Rounds of 4 and 3: the own node is the eighth contributor.
        assert_eq!(depths(8, 8, 8, 4, 1), (7, 7));
        // Rounds of 3, 3, 2 and 3, 3, 1.
        assert_eq!(depths(16, 8, 8, 3, 1), (15, 6));
        assert_eq!(depths(1, 8, 8, 1, 4), (0, 0));
    }

    #[test]
    fn the_first_round_of_a_pass_follows_the_last_of_the_pass_before() {
        assert_eq!(depths(2, 8, 8, 1, 1), (1, 1));
        assert_eq!(depths(2, 8, 8, 1, 2), (2, 2));
        assert_eq!(depths(8, 8, 8, 7, 2), (14, 14));
    }

    #[test]
    fn blocks_are_numbered_in_sending_order() {
        let m = 19;
        let waves = waves(Topology::new(m, 8).unwrap(), 8, 3).unwrap();
        let sent = (0..3).flat_map(|pass| {
            let rounds = waves.iter().flat_map(|wave| wave.rounds.iter().cloned().flatten());
            rounds.map(move |c| block_index(m, pass, c)).collect::<Vec<_>>()
        });
        assert!(sent.eq(0..remote_block_count(m, 3)));
    }
}

//! The first-order solver: how many CTAs to give the sums and the landing, and how wide rounds are,
//! from measured rates [TIDE App. G].
//!
//! The sums must feed the rail; the landing of the last wave, which nothing hides, may take a small
//! share of the wire time; and rounds are widened only where waiting for peers costs too much.
//! Rates are in GB/s (1e9 bytes a second, which is bytes a nanosecond), times in nanoseconds.

use super::topology::Topology;
use super::{PlanError, ReduceScatterOptions};

/// `γ_skew`: by how much the sums are provisioned above the rail, for gradients that arrive skewed
/// [TIDE App. G eq. 13].
pub const SKEW_FACTOR: f64 = 1.5;

/// `η_tail`: the share of the wire time that the last wave's landing may take [TIDE App. G eq. 14].
pub const TAIL_SHARE: f64 = 0.05;

/// The share of the wire time that waiting for peers may take before rounds are widened
/// [TIDE App. G].
pub const WAIT_SHARE: f64 = 0.10;

/// The width that rounds start at [TIDE App. G].
pub const ROUND_WIDTH_START: u32 = 2;

/// `k_max`: the width that rounds are not doubled beyond [TIDE App. G].
pub const ROUND_WIDTH_MAX: u32 = 4;

/// Measured rates of one machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// `BW_NIC`: what one rail sustains, in GB/s of payload.
    pub nic_gbps: f64,
    /// `BW_sum`: what one sum CTA reads and writes, in GB/s.
    pub sum_gbps: f64,
    /// `BW_land`: what one landing CTA lands, in GB/s of output.
    pub land_gbps: f64,
    /// `BW_cap`: what the landing fabric allows all CTAs together, in GB/s of output.
    pub land_cap_gbps: f64,
    /// `t_rnd`: what a round's wait for its peers costs, in nanoseconds.
    pub round_ns: f64,
}

impl Rates {
    /// The calibration that the paper reports for its evaluation platform [TIDE App. G].
    pub const PAPER: Self =
        Self { nic_gbps: 47.5, sum_gbps: 99.0, land_gbps: 21.0, land_cap_gbps: 90.0, round_ns: 1.3e6 };

    fn check(&self) -> Result<(), PlanError> {
        let rates = [
            ("nic_gbps", self.nic_gbps),
            ("sum_gbps", self.sum_gbps),
            ("land_gbps", self.land_gbps),
            ("land_cap_gbps", self.land_cap_gbps),
            ("round_ns", self.round_ns),
        ];
        match rates.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
            Some((name, value)) => Err(PlanError::Rate { name, value }),
            None => Ok(()),
        }
    }
}

/// What the solver chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sizing {
    /// `k`: transfers of one round at most.
    pub round_width: u32,
    /// `C_sum`: CTAs of a Level 1 sum.
    pub sum_cta_count: u32,
    /// `C_mc`: CTAs of a landing.
    pub land_cta_count: u32,
}

impl Sizing {
    /// Chooses for a group whose packed row has `shard_fp32_bytes` bytes (`S_fp32`).
    ///
    /// # Errors
    /// [`PlanError::Rate`] for a rate that is not positive and finite, [`PlanError::GradBytes`] for
    /// gradients of neither 2 nor 4 bytes, [`PlanError::PassCount`] for no pass, and
    /// [`PlanError::WaveWidth`] outside `1..=L`.
    pub fn solve(
        topology: Topology,
        shard_fp32_bytes: u64,
        grad_bytes: u64,
        wave_width: u32,
        pass_count: u32,
        rates: &Rates,
    ) -> Result<Self, PlanError> {
        rates.check()?;
        super::check_grad_bytes(grad_bytes)?;
        super::check_pass_count(pass_count)?;
        let l = topology.local_rank_count();
        if !(1..=l).contains(&wave_width) {
            return Err(PlanError::WaveWidth { found: wave_width, local_rank_count: l });
        }
        let remote_count = topology.node_count() - 1;
        let nic_ns = nic_ns(topology, shard_fp32_bytes, rates);
        Ok(Self {
            round_width: round_width(remote_count, wave_width, nic_ns, rates),
            sum_cta_count: sum_cta_count(topology, grad_bytes, rates),
            land_cta_count: land_cta_count(shard_fp32_bytes, pass_count, nic_ns, rates),
        })
    }

    /// Puts the choice into the options of a plan.
    pub fn apply(&self, options: &mut ReduceScatterOptions) {
        options.round_width = Some(self.round_width);
        options.sum_cta_count = self.sum_cta_count;
        options.land_cta_count = self.land_cta_count;
    }
}

/// `t_NIC = (M − 1)·S_fp32 / BW_NIC`, in nanoseconds: how long a rail is busy with one call
/// [TIDE App. G].
pub fn nic_ns(topology: Topology, shard_fp32_bytes: u64, rates: &Rates) -> f64 {
    f64::from(topology.node_count() - 1) * shard_fp32_bytes as f64 / rates.nic_gbps
}

/// `C_sum = ⌈γ_skew·(L·b_grad/4 + 1)·BW_NIC/BW_sum⌉`, at least one [TIDE App. G eq. 13].
pub fn sum_cta_count(topology: Topology, grad_bytes: u64, rates: &Rates) -> u32 {
    let bytes_per_sent_byte = f64::from(topology.local_rank_count()) * grad_bytes as f64 / 4.0 + 1.0;
    let count = SKEW_FACTOR * bytes_per_sent_byte * rates.nic_gbps / rates.sum_gbps;
    (count.ceil() as u32).max(1)
}

/// `C_mc`: enough CTAs that landing the last pass takes `η_tail` of the wire time, but no more than
/// the fabric feeds; at least one [TIDE App. G eq. 14]. On one node there is no wire time to hide
/// behind, so the fabric alone decides.
pub fn land_cta_count(shard_fp32_bytes: u64, pass_count: u32, nic_ns: f64, rates: &Rates) -> u32 {
    let fabric = (rates.land_cap_gbps / rates.land_gbps).floor();
    let tail_ns = TAIL_SHARE * nic_ns;
    let pass_bytes = shard_fp32_bytes as f64 / f64::from(pass_count);
    let needed = if tail_ns > 0.0 { (pass_bytes / (tail_ns * rates.land_gbps)).ceil() } else { fabric };
    (fabric.min(needed) as u32).max(1)
}

/// `N_rounds(M − 1, k, W_wave)`: the rounds of one pass with `remote_count` remote contributors in
/// waves of `wave_width`, at most `k` transfers a round [TIDE App. G].
pub fn round_count(remote_count: u32, k: u32, wave_width: u32) -> u32 {
    let (full_waves, rest) = (remote_count / wave_width, remote_count % wave_width);
    full_waves * wave_width.div_ceil(k) + rest.div_ceil(k)
}

/// `k`: starts at `min(2, M − 1)` and doubles, up to four, while the rounds' waits take more than a
/// tenth of the wire time and doubling makes rounds fewer [TIDE App. G]. At least one.
pub fn round_width(remote_count: u32, wave_width: u32, nic_ns: f64, rates: &Rates) -> u32 {
    let mut k = remote_count.clamp(1, ROUND_WIDTH_START);
    while 2 * k <= ROUND_WIDTH_MAX {
        let rounds = round_count(remote_count, k, wave_width);
        let waits_too_long = f64::from(rounds) * rates.round_ns > WAIT_SHARE * nic_ns;
        if !(waits_too_long && round_count(remote_count, 2 * k, wave_width) < rounds) {
            break;
        }
        k *= 2;
    }
    k
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::waves::waves;

    const MIB: u64 = 1 << 20;

    fn solve(m: u32, shard_fp32_bytes: u64) -> Sizing {
        Sizing::solve(Topology::new(m, 8).unwrap(), shard_fp32_bytes, 2, 8, 1, &Rates::PAPER).unwrap()
    }

    /// [TIDE §6.3]: eight nodes, at both output sizes that the paper measures.
    #[test]
    fn the_papers_eight_nodes_get_width_4_and_four_sum_ctas() {
        for shard_fp32_bytes in [32 * MIB, 128 * MIB] {
            let sizing = solve(8, shard_fp32_bytes);
            assert_eq!((sizing.round_width, sizing.sum_cta_count), (4, 4));
        }
    }

    #[test]
    fn landing_ctas_follow_equation_14() {
        // Eight nodes would need 47.5/(0.05·7·21) = 6.5 CTAs; the fabric feeds four.
        assert_eq!(solve(8, 128 * MIB).land_cta_count, 4);
        // Twenty: 47.5/(0.05·19·21) = 2.4. Sixty-four: 0.7.
        assert_eq!(solve(20, 128 * MIB).land_cta_count, 3);
        assert_eq!(solve(64, 128 * MIB).land_cta_count, 1);
        assert_eq!(solve(1, 128 * MIB).land_cta_count, 4);
        let two_passes = Sizing::solve(Topology::new(20, 8).unwrap(), MIB, 2, 8, 2, &Rates::PAPER).unwrap();
        assert_eq!(two_passes.land_cta_count, 2);
    }

    #[test]
    fn rounds_widen_only_where_it_pays() {
        // Four rounds of 1.3 ms against a tenth of 7·S/47.5 GB/s: even at 353 MB.
        assert_eq!(solve(8, 340_000_000).round_width, 4);
        assert_eq!(solve(8, 360_000_000).round_width, 2);
        // Two remote nodes are one round of two already; one needs no more than one.
        assert_eq!(solve(3, MIB).round_width, 2);
        assert_eq!(solve(2, MIB).round_width, 1);
        assert_eq!(solve(1, MIB).round_width, 1);
        // Waves of two cannot hold rounds of four.
        let narrow = Sizing::solve(Topology::new(8, 8).unwrap(), MIB, 2, 2, 1, &Rates::PAPER).unwrap();
        assert_eq!(narrow.round_width, 2);
    }

    #[test]
    fn fp32_gradients_need_more_sum_ctas() {
        let sizing = Sizing::solve(Topology::new(8, 8).unwrap(), MIB, 4, 8, 1, &Rates::PAPER).unwrap();
        // 1.5·9·47.5/99 = 6.5.
        assert_eq!(sizing.sum_cta_count, 7);
    }

    #[test]
    fn round_count_is_that_of_the_waves() {
        for (m, l) in (1..=40).flat_map(|m| (1..=8).map(move |l| (m, l))) {
            let topology = Topology::new(m, l).unwrap();
            for (width, k) in (1..=l).flat_map(|width| (1..=9).map(move |k| (width, k))) {
                let Ok(waves) = waves(topology, width, k) else { continue };
                let built: usize = waves.iter().map(|wave| wave.rounds.len()).sum();
                assert_eq!(round_count(m - 1, k, width) as usize, built, "M={m} L={l} width={width} k={k}");
            }
        }
    }

    #[test]
    fn rates_that_mean_nothing_are_refused_by_name() {
        let topology = Topology::new(8, 8).unwrap();
        for bad in [0.0, -1.0, f64::INFINITY, f64::NAN] {
            let rates = Rates { land_gbps: bad, ..Rates::PAPER };
            let error = Sizing::solve(topology, MIB, 2, 8, 1, &rates).unwrap_err();
            assert!(matches!(error, PlanError::Rate { name: "land_gbps", .. }), "{error}");
        }
        assert_eq!(Sizing::solve(topology, MIB, 3, 8, 1, &Rates::PAPER), Err(PlanError::GradBytes { found: 3 }));
        assert_eq!(Sizing::solve(topology, MIB, 2, 8, 0, &Rates::PAPER), Err(PlanError::PassCount { found: 0 }));
    }
}

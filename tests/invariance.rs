//! What must not change a bit: CTA counts, chunks, passes, round widths, staging slots, path, landing form, seeds.

mod common;

use common::{Case, bits, normal};
use tide_gpu::plan::{Mode, ReduceScatterOptions};
use tide_gpu::{GradientDtype, Path, Scale};

const TOPOLOGIES: [(u32, u32); 5] = [(1, 8), (2, 4), (3, 2), (5, 4), (9, 2)];

fn case(m: u32, l: u32) -> Case {
    let mut case = Case::new(m, l, &[&[97, 6], &[40], &[7, 3], &[256, 4], &[2, 2, 5]]);
    case.scale = Scale { alpha: 0.7, accumulate: true };
    case.previous = 2.5;
    case
}

fn digest(case: &Case) -> Vec<Vec<u32>> {
    bits(&case.run(|call, r| normal(&case.shapes, 3 + call as u64, r)))
}

/// Every variant of a case that must give the same bits, with its name.
fn variants(base: &Case) -> Vec<(String, Case)> {
    let options = ReduceScatterOptions::default;
    let least_chunk = u64::from(base.gpus * (base.gpus - 1)).max(1) * 32 * 4;
    let mut variants: Vec<(String, ReduceScatterOptions)> = Vec::new();
    for n in [1, 2, 7] {
        variants.push((format!("sum CTAs {n}"), ReduceScatterOptions { sum_cta_count: n, ..options() }));
        variants.push((format!("landing CTAs {n}"), ReduceScatterOptions { land_cta_count: n, ..options() }));
    }
    for n in 2..=4 {
        variants.push((format!("passes {n}"), ReduceScatterOptions { pass_count: n, ..options() }));
    }
    for n in [1, 2, 3, 8] {
        variants.push((format!("k {n}"), ReduceScatterOptions { round_width: Some(n), ..options() }));
    }
    for n in [1, 3] {
        variants.push((format!("staging slots {n}"), ReduceScatterOptions { staging_slot_count: n, ..options() }));
    }
    let chunks = ReduceScatterOptions { chunk_bytes: Some(least_chunk), ..options() };
    variants.push(("least chunks".into(), chunks.clone()));
    let all = ReduceScatterOptions { pass_count: 3, round_width: Some(2), staging_slot_count: 1, ..chunks };
    variants.push(("all at once".into(), all.clone()));
    for k in [1, 2, 4] {
        let slot_reuse = ReduceScatterOptions { mode: Mode::SlotReuse, round_width: Some(k), ..options() };
        variants.push((format!("slot-reuse, k {k}"), slot_reuse));
    }
    variants.push(("slot-reuse, all at once".into(), ReduceScatterOptions { mode: Mode::SlotReuse, ..all }));
    variants.into_iter().map(|(name, options)| (name, Case { options, ..base.clone() })).collect()
}

#[test]
fn knobs_paths_and_landing_forms_give_the_same_bits() {
    for (m, l) in TOPOLOGIES {
        for dtype in [GradientDtype::Bf16, GradientDtype::F32] {
            let base = Case { dtype, ..case(m, l) };
            let expected = digest(&base);
            for (name, mut variant) in variants(&base) {
                for (path, multicast) in [(Path::Device, true), (Path::Host, true), (Path::Device, false)] {
                    variant.path = path;
                    variant.sim.multicast = multicast;
                    assert!(digest(&variant) == expected, "{m}x{l} {dtype:?}, {name}, {path:?}, multicast {multicast}");
                }
            }
        }
    }
}

#[test]
fn every_seed_of_the_simulator_gives_the_same_bits() {
    for (m, l) in TOPOLOGIES {
        let base = Case { calls: 3, ..case(m, l) };
        let expected = digest(&base);
        for seed in 100..112 {
            for path in [Path::Device, Path::Host] {
                let mut other = base.clone().seed(seed);
                other.path = path;
                other.sim.machine.preempt_one_in = 1 + (seed % 5) as u32;
                other.sim.eager_steps_max = [0, 8, 200][seed as usize % 3];
                assert!(digest(&other) == expected, "{m}x{l} {path:?} TIDE_SEED={seed}");
            }
        }
    }
}

#[test]
fn contexts_and_stripes_give_the_same_bits() {
    let base = case(5, 4);
    let expected = digest(&base);
    for (context_count, stripe_bytes) in [(1, 16), (3, 64), (7, 4096), (2, 1 << 30)] {
        let mut other = base.clone();
        other.comm.context_count = context_count;
        other.comm.stripe_bytes = stripe_bytes;
        assert!(digest(&other) == expected, "{context_count} contexts, stripes of {stripe_bytes}");
    }
}

#[test]
fn the_topology_does_change_bits() {
    // Without this the comparisons above could all be of something constant.
    let shapes = case(2, 4).shapes;
    let gradients: Vec<_> = (0..8).map(|r| normal(&shapes, 3, r)).collect();
    let of = |m, l| bits(&case(m, l).run(|_, r| gradients[r as usize].clone()));
    assert!(of(2, 4) != of(1, 8));
}

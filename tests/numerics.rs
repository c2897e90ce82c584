//! What comes out: against fp64, against the order of additions that the design promises, and for values that are not
//! numbers.

mod common;

use common::{Case, assert_close, bits, int_fill, normal, oracle, reference};
use proptest::prelude::*;
use tide_gpu::plan::{Mode, ReduceScatterOptions};
use tide_gpu::{GradientDtype, Path, Scale};

const TOPOLOGIES: [(u32, u32); 12] =
    [(1, 1), (1, 2), (2, 1), (1, 8), (2, 4), (3, 2), (5, 4), (9, 2), (4, 1), (2, 6), (7, 3), (6, 8)];

fn shapes() -> Vec<Vec<u64>> {
    vec![vec![37, 5], vec![3], vec![64, 16], vec![0, 7], vec![5, 3], vec![1, 6, 4], vec![130]]
}

fn case(m: u32, l: u32) -> Case {
    let mut case = Case::new(m, l, &[]);
    case.shapes = shapes();
    case
}

#[test]
fn sums_are_close_to_fp64_and_equal_the_promised_order_bit_for_bit() {
    for (m, l) in TOPOLOGIES {
        for dtype in [GradientDtype::Bf16, GradientDtype::F32] {
            let mut case = case(m, l);
            case.dtype = dtype;
            case.scale = Scale { alpha: 1.0 / 3.0, accumulate: true };
            case.previous = 0.75;
            let all: Vec<_> = (0..m * l).map(|r| normal(&case.shapes, 7, r)).collect();
            let got = case.run(|_, r| all[r as usize].clone());
            let what = format!("{m}x{l} {dtype:?}");
            assert_close(&got, &reference(&case.shapes, &all, case.scale, 0.75), &what);
            let width = u64::from(l);
            let topology = (u64::from(m), u64::from(l));
            let expected = oracle::bitwise(topology, width, &case.shapes, &all, case.scale, 0.75);
            assert!(bits(&got) == bits(&expected), "{what}");
        }
    }
}

#[test]
fn the_oracle_tells_another_order_apart() {
    let case = case(3, 4);
    let all: Vec<_> = (0..12).map(|r| normal(&case.shapes, 7, r)).collect();
    let order = |width| bits(&oracle::bitwise((3, 4), width, &case.shapes, &all, case.scale, 0.0));
    assert!(order(4) != order(2), "if waves of two gave the same bits, the comparison above would prove nothing");
}

#[test]
fn narrower_waves_follow_their_own_order() {
    for (m, l, width) in [(5, 4, 2), (9, 2, 1), (6, 8, 4), (13, 6, 4)] {
        let mut case = case(m, l);
        case.options = ReduceScatterOptions { wave_width: Some(width), ..Default::default() };
        let all: Vec<_> = (0..m * l).map(|r| normal(&case.shapes, 11, r)).collect();
        let got = case.run(|_, r| all[r as usize].clone());
        let topology = (u64::from(m), u64::from(l));
        let expected = oracle::bitwise(topology, u64::from(width), &case.shapes, &all, case.scale, 0.0);
        assert!(bits(&got) == bits(&expected), "{m}x{l} in waves of {width}");
    }
}

#[test]
fn integers_come_out_exactly() {
    for (m, l) in TOPOLOGIES {
        let case = case(m, l);
        let all: Vec<_> = (0..m * l).map(|r| int_fill(&case.shapes, r)).collect();
        let got = case.run(|_, r| all[r as usize].clone());
        let exact = reference(&case.shapes, &all, case.scale, 0.0);
        for (g, e) in got.iter().flatten().zip(exact.iter().flatten()) {
            assert_eq!(f64::from(*g), *e, "{m}x{l}");
        }
    }
}

/// T19: NaN on each rank and element in turn comes out there and only there.
#[test]
fn t19_a_nan_comes_out_where_it_went_in_and_nowhere_else() {
    let case = Case::new(2, 2, &[&[8]]);
    for (rank, element) in (0..4).flat_map(|r| (0..8).map(move |e| (r, e))) {
        let got = case.run(|_, r| {
            let mut g = int_fill(&case.shapes, r);
            if r == rank {
                g[0].as_mut().unwrap()[element] = f32::NAN;
            }
            g
        });
        for (i, v) in got.iter().flatten().enumerate() {
            assert_eq!(v.is_nan(), i == element, "NaN of rank {rank} at {element}, seen at {i}");
            assert!(!v.is_nan() || v.to_bits() == 0x7fff_ffff, "the one NaN that a GPU gives");
        }
    }
}

/// T19: infinities, and finite values that overflow.
#[test]
fn t19_infinities_and_overflow_give_the_class_that_fp32_gives() {
    let bf16_max = half::bf16::MAX.to_f32();
    let column = |values: [f32; 4]| {
        let mut case = Case::new(2, 2, &[&[4]]);
        case.scale.alpha = 0.25;
        case.run(|_, r| vec![Some(vec![values[r as usize]; 4])])[0][0]
    };
    assert_eq!(column([1.0, f32::INFINITY, 2.0, 3.0]), f32::INFINITY);
    assert_eq!(column([1.0, 2.0, f32::NEG_INFINITY, 3.0]), f32::NEG_INFINITY);
    assert!(column([f32::INFINITY, 1.0, 2.0, f32::NEG_INFINITY]).is_nan());
    // α comes after the sum: it cannot undo an overflow.
    assert_eq!(column([bf16_max; 4]), f32::INFINITY);
}

/// T47: signed zeros, subnormals, small values.
#[test]
fn t47_zeros_come_out_positive_and_nothing_is_flushed() {
    for (m, l) in [(2, 2), (1, 4), (4, 1), (1, 1)] {
        let case = Case::new(m, l, &[&[4]]);
        let n = (m * l) as f32;
        let zeros = case.run(|_, _| vec![Some(vec![-0.0; 4])]);
        assert!(zeros.iter().flatten().all(|v| v.to_bits() == 0), "{m}x{l}: documented as +0.0");
        let tiny = 2_f32.powi(-133);
        let got = case.run(|_, _| vec![Some(vec![tiny; 4])]);
        assert!(got.iter().flatten().all(|v| *v == tiny * n), "{m}x{l}: subnormals were flushed");
        let small = half::bf16::from_f32(1e-6).to_f32();
        let got = case.run(|_, _| vec![Some(vec![small; 4])]);
        assert!(got.iter().flatten().all(|v| (v - small * n).abs() < 1e-12), "{m}x{l}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any group on any topology, by any path and with any knobs, gives the bits of the promised order.
    #[test]
    fn any_group_gives_the_promised_bits(
        m in 1_u32..=6,
        l in 1_u32..=5,
        shapes in prop::collection::vec((0_u64..40, 1_u64..9, any::<bool>()), 1..6),
        seed in 0_u64..1000,
        f32_gradients: bool,
        host: bool,
        multicast: bool,
        pass_count in 1_u32..=4,
        k in 1_u32..=5,
        sum_cta_count in 1_u32..=3,
        small_chunks: bool,
        slot_reuse: bool,
        calls in 1_usize..=3,
    ) {
        let mut case = Case::new(m, l, &[]).seed(seed);
        case.shapes = shapes.iter().map(|&(d, k, flat)| if flat { vec![d] } else { vec![d, k] }).collect();
        case.dtype = if f32_gradients { GradientDtype::F32 } else { GradientDtype::Bf16 };
        case.path = if host { Path::Host } else { Path::Device };
        case.sim.multicast = multicast;
        // The least chunk: 32 elements of every staged row.
        let chunk_bytes = u64::from((l * (l - 1)).max(1)) * 32 * case.dtype.bytes();
        case.options = ReduceScatterOptions {
            pass_count,
            round_width: Some(k),
            sum_cta_count,
            chunk_bytes: small_chunks.then_some(chunk_bytes),
            mode: if slot_reuse { Mode::SlotReuse } else { Mode::InPlace },
            ..Default::default()
        };
        case.scale = Scale { alpha: 0.3, accumulate: calls == 1 && seed % 2 == 0 };
        case.previous = -1.5;
        case.calls = calls;
        let all: Vec<_> = (0..m * l).map(|r| normal(&case.shapes, seed, r)).collect();
        let got = case.run(|_, r| all[r as usize].clone());
        let topology = (u64::from(m), u64::from(l));
        let expected = oracle::bitwise(topology, u64::from(l), &case.shapes, &all, case.scale, -1.5);
        prop_assert!(bits(&got) == bits(&expected));
    }
}

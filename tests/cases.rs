//! Faults that users of other systems met, each as a small input with its right answer. The ids are those of the project's
//! collection of such cases; the numbers in them were computed independently of this project.
//!
//! Ids that are arithmetic alone stand with the arithmetic: T09, T10, T13, T46's offsets in `host/layout.rs`; T13, T30's planner
//! part, T32 in `plan_counts.rs`; T19, T47 in `numerics.rs`; T26, T27 in `faults.rs`.

mod common;

use common::{Case, Gradients, assert_close, bits, constant, int_fill, normal, oracle, reference};
use std::sync::Arc;
use tide_gpu::gpu::sim::{SimGpu, SimOptions};
use tide_gpu::gpu::{DeviceBuffer, DevicePtr, DeviceSlice, Gpu};
use tide_gpu::layout::{Dtype, Group, Parameter};
use tide_gpu::plan::{ReduceScatterOptions, Topology};
use tide_gpu::{
    Communicator, CommunicatorOptions, GradientDtype, Path, RankGradients, ReduceScatter, Scale, TideError,
};

const PATHS: [Path; 2] = [Path::Device, Path::Host];

fn sums(outs: &[Vec<f32>]) -> Vec<f64> {
    outs.iter().map(|o| o.iter().map(|v| f64::from(*v)).sum()).collect()
}

/// `Σ (j + 1)·out_j` of each rank: tells a moved element from one in its place.
fn weighted(outs: &[Vec<f32>]) -> Vec<f64> {
    outs.iter().map(|o| o.iter().enumerate().map(|(j, v)| (j + 1) as f64 * f64::from(*v)).sum()).collect()
}

/// Runs the INT fill by both paths and checks length and sums per rank.
fn check_int(m: u32, l: u32, shapes: &[&[u64]], len: usize, expected: &[f64], expected_weighted: &[f64]) {
    for path in PATHS {
        let case = Case { path, ..Case::new(m, l, shapes) };
        let outs = case.run(|_, r| int_fill(&case.shapes, r));
        assert!(outs.iter().all(|o| o.len() == len), "{m}x{l}");
        assert_eq!(sums(&outs), expected, "{m}x{l} {path:?}");
        if !expected_weighted.is_empty() {
            assert_eq!(weighted(&outs), expected_weighted, "{m}x{l} {path:?}");
        }
    }
}

#[test]
fn t02_a_divide_factor_is_applied_once() {
    let mut case = Case::new(1, 4, &[&[4, 2]]);
    case.scale.alpha = 1.0 / 300.0;
    let outs = case.run(|_, _| constant(&case.shapes, 300.0));
    assert!(outs.iter().flatten().all(|v| (v - 4.0).abs() < 1e-5), "{outs:?}");
}

#[test]
fn t03_fewer_rows_than_ranks() {
    check_int(2, 4, &[&[2, 3], &[8]], 4, &[-25., 18., -2., 4., -7., -1., 5., -6.], &[]);
    let case = Case::new(2, 4, &[&[2, 3], &[8]]);
    let outs = case.run(|_, r| int_fill(&case.shapes, r));
    assert!(outs[2..].iter().all(|o| o[..3] == [0.0; 3]), "ranks 2 to 7 own no row of the first parameter");
}

#[test]
fn t05_padding_on_several_ranks() {
    let (s, w) = ([-14., 0., -3., -6., 1., 0., 0., 0.], [-22., -32., -8., -52., -17., 0., 0., 0.]);
    check_int(2, 4, &[&[5, 3], &[9, 2]], 7, &s, &w);
}

#[test]
fn t06_an_uneven_last_shard() {
    check_int(1, 4, &[&[17, 3]], 15, &[-11., 1., -4., 14.], &[55., 66., -8., 76.]);
    let mut case = Case::new(1, 4, &[&[17, 3]]);
    case.scale = Scale { alpha: 0.25, accumulate: true };
    case.previous = 1.0;
    let outs = case.run(|_, r| int_fill(&case.shapes, r));
    assert_eq!(sums(&outs), [12.25, 15.25, 14.0, 18.5], "padding keeps what was there");
}

#[test]
fn t07_one_row_over_four_ranks() {
    check_int(2, 2, &[&[1, 6, 4], &[5]], 26, &[-24., -9., 0., 0.], &[-258., -228., 0., 0.]);
    let layout = Case::new(2, 2, &[&[1, 6, 4], &[5]]).layout();
    assert!((layout.padding_share() - (1.0 - 29.0 / 104.0)).abs() < 1e-12);
}

#[test]
fn t08_parameters_without_elements() {
    check_int(2, 2, &[&[0, 7], &[4, 3], &[4, 0]], 3, &[-10., 0., 10., 3.], &[]);
    let case = Case { calls: 3, ..Case::new(2, 2, &[&[0, 7], &[4, 0]]) };
    assert!(case.run(|_, r| int_fill(&case.shapes, r)).iter().all(Vec::is_empty));
}

#[test]
fn t08_an_empty_group_still_advances_the_sequence_number() {
    let case = Case::new(2, 2, &[&[0, 7]]);
    let comm = case.communicator();
    let mut rs = ReduceScatter::new(&comm, &case.group(), case.dtype, &case.options).unwrap();
    let nothing = DeviceSlice { address: DevicePtr::NULL, bytes: 0 };
    let ranks = vec![RankGradients { gradients: vec![None], out: nothing, ready: None }; 4];
    rs.enqueue(&ranks, Scale::default()).unwrap();
    rs.enqueue(&ranks, Scale::default()).unwrap();
    comm.synchronize().unwrap();
    assert_eq!(rs.epoch(), 2);
}

/// The simulator checks every access against the allocation, so a gradient that ends its buffer is guarded to the byte.
#[test]
fn t11_nothing_past_a_gradients_end_is_touched() {
    for path in PATHS {
        let case = Case { path, ..Case::new(3, 1, &[&[7, 2]]) };
        let outs = case.run(|_, r| int_fill(&case.shapes, r));
        assert_eq!(outs[2][2..], [0.0; 4], "rank 2 owns one row; the rest is padding");
    }
}

#[test]
fn t11_the_guard_catches_a_read_past_the_end() {
    let case = Case::new(3, 1, &[&[7, 2]]);
    let comm = case.communicator();
    let gpu = comm.gpu();
    let buffer = DeviceBuffer::new(gpu, 0, 28).unwrap();
    assert!(gpu.download(buffer.address(), &mut [0; 29]).is_err());
}

#[test]
fn t14_the_last_elements_are_scaled_too() {
    for (m, l) in [(1, 1), (1, 2), (2, 1)] {
        for n in [1_u64, 7, 31, 33, 1007, 8191] {
            let mut case = Case::new(m, l, &[&[n]]);
            case.scale.alpha = 1.0 / (m * l) as f32;
            let outs = case.run(|_, _| constant(&case.shapes, 4.0));
            let flat: Vec<f32> = outs.into_iter().flatten().take(n as usize).collect();
            assert!(flat.iter().all(|v| *v == 4.0), "{m}x{l} n={n}");
        }
    }
    let mut case = Case::new(1, 1, &[&[8191]]);
    case.scale.alpha = 0.5;
    assert!(case.run(|_, _| constant(&case.shapes, 4.0))[0].iter().all(|v| *v == 2.0), "N = 1 applies α as well");
}

#[test]
fn t16_alpha_is_fp32_and_applied_after_the_sum() {
    let mut case = Case::new(3, 1, &[&[6]]);
    case.scale.alpha = 1.0 / 3.0;
    assert!(case.run(|_, _| constant(&case.shapes, 1.0)).iter().flatten().all(|v| *v == 1.0));
}

#[test]
fn t17_partials_are_fp32_at_every_hop() {
    let case = Case::new(8, 8, &[&[64]]);
    let outs = case.run(|_, r| constant(&case.shapes, if r == 0 { 256.0 } else { 1.0 }));
    assert!(outs.iter().flatten().all(|v| *v == 319.0), "256: bf16 sum; 320: bf16 node partial");
}

/// Fresh simulated memory is NaN, so that whatever is used before it was written shows.
#[test]
fn t20_nothing_stale_gets_into_a_sum() {
    for (m, l) in [(3, 2), (9, 2), (2, 4)] {
        for path in PATHS {
            for multicast in [true, false] {
                let mut case = Case { path, calls: 3, ..Case::new(m, l, &[&[5, 3], &[31], &[2]]) };
                case.sim.multicast = multicast;
                let outs = case.run(|call, r| int_fill(&case.shapes, r + call as u32));
                let all: Vec<_> = (0..m * l).map(|r| int_fill(&case.shapes, r + 2)).collect();
                let expected = oracle::bitwise((m.into(), l.into()), l.into(), &case.shapes, &all, case.scale, 0.0);
                assert!(bits(&outs) == bits(&expected), "{m}x{l} {path:?}");
            }
        }
    }
}

#[test]
fn t21_micro_batches_accumulate_in_fp32() {
    let shapes = [vec![4_u64]];
    let fill = |call: usize, rank: u32| match (call, rank) {
        (0, _) => constant(&shapes, 64.0),
        (_, 0) => constant(&shapes, 1.0),
        _ => constant(&shapes, 0.0),
    };
    let mut case = Case::new(2, 2, &[&[4]]);
    case.calls = 3;
    case.scale.accumulate = true;
    case.previous = 0.0;
    assert!(case.run(fill).iter().flatten().all(|v| *v == 258.0));
    // Without accumulate the previous NaN is overwritten, not added to.
    case.calls = 1;
    case.scale.accumulate = false;
    case.previous = f32::NAN;
    assert!(case.run(fill).iter().flatten().all(|v| *v == 256.0));
}

#[test]
fn t23_a_gradient_that_is_missing_counts_as_zeros() {
    let missing = |r: u32| -> Gradients {
        let mut g = int_fill(&[vec![4], vec![4]], r);
        if r == 2 {
            g[1] = None;
        }
        g
    };
    for (m, l) in [(1, 4), (2, 2), (4, 1)] {
        let case = Case::new(m, l, &[&[4], &[4]]);
        let all: Vec<_> = (0..4).map(missing).collect();
        assert_close(&case.run(|_, r| missing(r)), &reference(&case.shapes, &all, case.scale, 0.0), "one missing");
        let none = case.run(|_, _| vec![None, None]);
        assert!(none.iter().flatten().all(|v| v.to_bits() == 0), "all missing");
    }
}

#[test]
fn t24_another_order_of_parameters_is_found_before_data_moves() {
    let comm = Case::new(2, 2, &[]).communicator();
    let named = |names: [&str; 2], shapes: [[u64; 2]; 2]| {
        let p = |i: usize| Parameter::new(names[i], shapes[i], Dtype::Bf16).unwrap();
        Group::new(vec![p(0), p(1)]).unwrap()
    };
    let ab = named(["a", "b"], [[4, 2], [2, 4]]);
    let ba = named(["b", "a"], [[2, 4], [4, 2]]);
    assert_eq!(comm.agree(&vec![ab.clone(); 4]), Ok(()));
    let error = comm.agree(&[ab.clone(), ab, ba.clone(), ba]).unwrap_err();
    assert!(matches!(&error, TideError::Disagreement { ranks, .. } if ranks.contains("2, 3")), "{error}");
}

#[test]
fn t30_odd_node_counts() {
    check_int(3, 2, &[&[6, 4], &[7]], 6, &[-7., -19., -14., 12., -1., 3.], &[]);
    check_int(5, 2, &[&[10, 4], &[7]], 5, &[-8., 9., -8., 9., -25., 9., 9., 6., -10., 8.], &[]);
    let nine = [-7., -7., 10., -7., -7., 10., 10., -3., -8., 4., -1., 11., -11., 1., -4., 8., 3., -2.];
    check_int(9, 2, &[&[18, 4], &[7]], 5, &nine, &[]);
}

#[test]
fn t31_any_number_of_local_ranks() {
    check_int(4, 1, &[&[8, 3], &[3]], 7, &[-26., 0., 9., -13.], &[]);
    let twelve = [-20., 2., -10., 12., 0., 0., -4., -8., 5., 1., 14., -7.];
    check_int(2, 6, &[&[12, 3], &[5]], 4, &twelve, &[]);
    for l in [1, 2, 4, 6, 8] {
        let case = Case::new(2, l, &[&[23, 3], &[9]]);
        let all: Vec<_> = (0..2 * l).map(|r| int_fill(&case.shapes, r)).collect();
        let outs = case.run(|_, r| int_fill(&case.shapes, r));
        assert_close(&outs, &reference(&case.shapes, &all, case.scale, 0.0), &format!("L = {l}"));
    }
}

#[test]
fn t38_without_multicast_all_ranks_take_the_peer_form_with_the_same_bits() {
    let mut case = Case::new(3, 4, &[&[33, 3]]);
    let with = case.run(|_, r| int_fill(&case.shapes, r));
    case.sim.multicast = false;
    assert!(bits(&with) == bits(&case.run(|_, r| int_fill(&case.shapes, r))));
}

/// After its read event a gradient may be overwritten; the result does not change.
#[test]
fn t41_gradients_are_free_after_their_read_event() {
    for seed in 0..8 {
        let mut case = Case::new(2, 2, &[&[40, 3]]).seed(seed);
        case.sim.eager_steps_max = seed as u32 % 3;
        let comm = case.communicator();
        let gpu = Arc::clone(comm.gpu());
        let mut rs = ReduceScatter::new(&comm, &case.group(), GradientDtype::F32, &case.options).unwrap();
        let value = |r: u32| int_fill(&case.shapes, r)[0].clone().unwrap();
        let gradients: Vec<_> = (0..4).map(|r| DeviceBuffer::from_slice(&gpu, 0, &value(r)).unwrap()).collect();
        let outs: Vec<_> = (0..4).map(|_| DeviceBuffer::new(&gpu, 0, rs.output_bytes()).unwrap()).collect();
        let ranks: Vec<_> = gradients
            .iter()
            .zip(&outs)
            .map(|(g, o)| RankGradients { gradients: vec![Some(g.slice())], out: o.slice(), ready: None })
            .collect();
        let events = rs.enqueue(&ranks, Scale::default()).unwrap();
        for (events, gradient) in events.iter().zip(&gradients) {
            let mut looks = 0;
            while !gpu.is_complete(events.read).unwrap() {
                looks += 1;
                assert!(looks < 10_000_000, "the read event never completes");
            }
            gpu.upload(gradient.address(), &vec![0x7f; gradient.slice().bytes as usize]).unwrap();
        }
        comm.synchronize().unwrap();
        let all: Vec<_> = (0..4).map(|r| int_fill(&case.shapes, r)).collect();
        let outs: Vec<Vec<f32>> = outs.iter().map(|o| o.to_vec().unwrap()).collect();
        assert_close(&outs, &reference(&case.shapes, &all, Scale::default(), 0.0), &format!("seed {seed}"));
    }
}

/// The same, broken on purpose: overwritten before the read event, the result does change on some schedule.
#[test]
fn t41_overwriting_a_gradient_too_early_shows() {
    let changed = (0..8).any(|seed| {
        let mut case = Case::new(2, 2, &[&[40, 3]]).seed(seed);
        case.sim.eager_steps_max = seed as u32 % 3;
        let comm = case.communicator();
        let gpu = Arc::clone(comm.gpu());
        let mut rs = ReduceScatter::new(&comm, &case.group(), GradientDtype::F32, &case.options).unwrap();
        let gradients: Vec<_> = (0..4).map(|_| DeviceBuffer::from_slice(&gpu, 0, &[1_f32; 120]).unwrap()).collect();
        let outs: Vec<_> = (0..4).map(|_| DeviceBuffer::new(&gpu, 0, rs.output_bytes()).unwrap()).collect();
        let ranks: Vec<_> = gradients
            .iter()
            .zip(&outs)
            .map(|(g, o)| RankGradients { gradients: vec![Some(g.slice())], out: o.slice(), ready: None })
            .collect();
        rs.enqueue(&ranks, Scale::default()).unwrap();
        gpu.upload(gradients[1].address(), bytemuck::cast_slice(&[99_f32; 120])).unwrap();
        comm.synchronize().unwrap();
        outs.iter().any(|o| o.to_vec::<f32>().unwrap().iter().any(|v| *v != 4.0))
    });
    assert!(changed);
}

#[test]
fn t42_calls_queue_back_to_back_without_a_host_wait() {
    for seed in 0..6 {
        for path in PATHS {
            let case = Case { path, calls: 5, ..Case::new(9, 2, &[&[18, 4], &[7]]).seed(seed) };
            let outs = case.run(|call, r| int_fill(&case.shapes, r + call as u32));
            let all: Vec<_> = (0..18).map(|r| int_fill(&case.shapes, r + 4)).collect();
            assert_close(&outs, &reference(&case.shapes, &all, case.scale, 0.0), &format!("{path:?} seed {seed}"));
        }
    }
}

/// fp16 gradients are widened to fp32 by who brings them; nothing overflows on the way.
#[test]
fn t44_large_fp16_values_do_not_overflow() {
    let mut case = Case { dtype: GradientDtype::F32, ..Case::new(1, 8, &[&[8]]) };
    case.scale.alpha = 1.0 / 8.0;
    let value = half::f16::from_f32(60_000.0).to_f32();
    assert!(case.run(|_, _| constant(&case.shapes, value)).iter().flatten().all(|v| *v == 60_000.0));
}

#[test]
fn t48_groups_of_a_node_pair_and_of_all_ranks_do_not_mix() {
    // Four pairs, one of each local rank, and the full group, interleaved on one device.
    let gpu: Arc<dyn Gpu> = SimGpu::new(SimOptions::default());
    let options = CommunicatorOptions::default;
    let pair = |_| Communicator::new(Arc::clone(&gpu), Topology::new(2, 1).unwrap(), options()).unwrap();
    let pairs: Vec<Communicator> = (0..4).map(pair).collect();
    let full = Communicator::new(Arc::clone(&gpu), Topology::new(2, 4).unwrap(), options()).unwrap();
    let (expert, dense) = (vec![vec![6_u64, 2]], vec![vec![9_u64, 3]]);
    let new = |comm: &Communicator, shapes: &[Vec<u64>]| {
        let group = common::group(shapes, Dtype::F32);
        ReduceScatter::new(comm, &group, GradientDtype::F32, &ReduceScatterOptions::default()).unwrap()
    };
    let mut lanes: Vec<ReduceScatter> = pairs.iter().map(|c| new(c, &expert)).collect();
    let mut all = new(&full, &dense);
    let mut kept = Vec::new();
    let mut ranks_of = |rs: &ReduceScatter, shapes: &[Vec<u64>], ranks: &[u32]| -> Vec<RankGradients> {
        let of = |r: &u32| {
            let value = int_fill(shapes, *r)[0].clone().unwrap();
            let gradient = DeviceBuffer::from_slice(&gpu, 0, &value).unwrap();
            let out = DeviceBuffer::new(&gpu, 0, rs.output_bytes()).unwrap();
            let rank = RankGradients { gradients: vec![Some(gradient.slice())], out: out.slice(), ready: None };
            kept.push((gradient, out));
            rank
        };
        ranks.iter().map(of).collect()
    };
    let lane_ranks: Vec<_> = (0..4_u32).map(|l| ranks_of(&lanes[l as usize], &expert, &[l, l + 4])).collect();
    let full_ranks = ranks_of(&all, &dense, &[0, 1, 2, 3, 4, 5, 6, 7]);
    for _ in 0..3 {
        for (lane, ranks) in lanes.iter_mut().zip(&lane_ranks) {
            lane.enqueue(ranks, Scale::default()).unwrap();
            all.enqueue(&full_ranks, Scale::default()).unwrap();
        }
    }
    pairs.iter().chain([&full]).for_each(|c| c.synchronize().unwrap());
    assert_eq!((lanes[3].epoch(), all.epoch()), (3, 12));
    let outs: Vec<Vec<f32>> = kept.iter().map(|(_, o)| o.to_vec().unwrap()).collect();
    for l in 0..4_u32 {
        let sources: Vec<_> = [l, l + 4].iter().map(|r| int_fill(&expert, *r)).collect();
        let expected = reference(&expert, &sources, Scale::default(), 0.0);
        assert_close(&outs[2 * l as usize..][..2], &expected, &format!("lane {l}"));
    }
    let sources: Vec<_> = (0..8).map(|r| int_fill(&dense, r)).collect();
    assert_close(&outs[8..], &reference(&dense, &sources, Scale::default(), 0.0), "all ranks");
}

#[test]
fn t49_a_group_of_one_rank_still_scales_and_widens() {
    let mut case = Case::new(1, 1, &[&[3]]);
    case.scale.alpha = 0.5;
    assert_eq!(case.run(|_, _| constant(&case.shapes, 2.0)), [[1.0; 3]]);
}

#[test]
fn t50_a_mix_like_a_real_layer() {
    let s = [-4., -14., 2., 1., 0., -1., -8., 2., -5., 5., -2., 8., 1., -6., 4., -3.];
    let w = [19., -190., 23., 83., -61., 60., -104., -81., -194., -69., -131., 96., 85., -45., 46., -33.];
    check_int(2, 8, &[&[48, 8], &[5, 3], &[1]], 28, &s, &w);
}

#[test]
fn t51_few_hardware_queues_do_not_deadlock() {
    for queues in [1, 2, 8, 32] {
        for path in PATHS {
            let mut case = Case { path, calls: 3, ..Case::new(3, 2, &[&[31, 3], &[9]]) };
            case.sim.hardware_queues = Some(queues);
            let outs = case.run(|call, r| int_fill(&case.shapes, r + call as u32));
            let all: Vec<_> = (0..6).map(|r| int_fill(&case.shapes, r + 2)).collect();
            assert_close(&outs, &reference(&case.shapes, &all, case.scale, 0.0), &format!("{queues} queues {path:?}"));
        }
    }
}

#[test]
fn t56_alpha_does_not_touch_what_is_accumulated_onto() {
    let mut case = Case::new(2, 4, &[&[3]]);
    case.scale = Scale { alpha: 0.5, accumulate: true };
    case.previous = 10.0;
    let outs = case.run(|_, _| constant(&case.shapes, 1.0));
    assert_eq!(sums(&outs), [14., 14., 14., 10., 10., 10., 10., 10.]);
    let outs = case.run(|_, r| int_fill(&case.shapes, r));
    assert_eq!(sums(&outs), [8., 11., 5.5, 10., 10., 10., 10., 10.]);
}

#[test]
fn t57_bad_arguments_are_refused_before_anything_moves() {
    let case = Case::new(1, 2, &[&[6, 2]]);
    let comm = case.communicator();
    let gpu = Arc::clone(comm.gpu());
    let mut rs = ReduceScatter::new(&comm, &case.group(), GradientDtype::Bf16, &case.options).unwrap();
    let gradient = DeviceBuffer::new(&gpu, 0, 64).unwrap();
    let out = DeviceBuffer::new(&gpu, 0, 64).unwrap();
    let slice = |address: u64, bytes: u64| DeviceSlice { address: DevicePtr(address), bytes };
    let good = RankGradients { gradients: vec![Some(gradient.slice())], out: out.slice(), ready: None };
    let mut refuse = |bad: RankGradients| {
        let error = rs.enqueue(&[good.clone(), bad], Scale::default()).unwrap_err();
        assert!(matches!(error, TideError::Usage(_)), "{error}");
        error.to_string()
    };
    let out_of = |out: DeviceSlice| RankGradients { out, ..good.clone() };
    let gradient_of = |g: DeviceSlice| RankGradients { gradients: vec![Some(g)], ..good.clone() };
    assert!(refuse(out_of(slice(out.address().0, 23))).contains("rank 1, output: 23 bytes given, 24 needed"));
    assert!(refuse(out_of(slice(out.address().0 + 4, 24))).contains("not aligned to 16"));
    assert!(refuse(gradient_of(slice(0, 24))).contains("rank 1, gradient 0: null address"));
    assert!(refuse(gradient_of(slice(gradient.address().0 + 1, 24))).contains("not aligned to 2"));
    assert!(refuse(gradient_of(slice(gradient.address().0, 22))).contains("22 bytes given, 24 needed"));
    assert!(refuse(RankGradients { gradients: vec![], ..good.clone() }).contains("0 gradients given"));
    assert!(rs.enqueue(std::slice::from_ref(&good), Scale::default()).is_err(), "one rank of two");
    let dtype = GradientDtype::try_from(Dtype::I32).unwrap_err();
    assert!(matches!(&dtype, TideError::Unsupported { found, .. } if found == "i32"), "{dtype}");
    assert_eq!(rs.epoch(), 0);
}

#[test]
fn t58_memory_is_what_was_planned_and_does_not_grow() {
    let gpu: Arc<dyn Gpu> = SimGpu::new(SimOptions::default());
    let topology = Topology::new(3, 2).unwrap();
    let comm = Communicator::new(Arc::clone(&gpu), topology, CommunicatorOptions::default()).unwrap();
    let shapes = [vec![60_u64, 8]];
    let group = common::group(&shapes, Dtype::Bf16);
    let new = |_| ReduceScatter::new(&comm, &group, GradientDtype::Bf16, &ReduceScatterOptions::default()).unwrap();
    let mut groups: Vec<ReduceScatter> = (0..20).map(new).collect();
    for rs in &groups {
        let planned = rs.plan().memory.total_bytes();
        let slack = 6 * tide_gpu::arena::REGION_ALIGN_BYTES + 8 * (4 * 2 + 3 * 4 + 3);
        assert!((planned..planned + slack).contains(&rs.buffer_bytes()), "{planned} planned, {}", rs.buffer_bytes());
    }
    let gradient = DeviceBuffer::from_slice(&gpu, 0, &[half::bf16::ONE; 480]).unwrap();
    let outs: Vec<_> = (0..6).map(|_| DeviceBuffer::new(&gpu, 0, groups[0].output_bytes()).unwrap()).collect();
    let rank =
        |o: &DeviceBuffer| RankGradients { gradients: vec![Some(gradient.slice())], out: o.slice(), ready: None };
    let ranks: Vec<_> = outs.iter().map(rank).collect();
    let mut after_ten = 0;
    for call in 0..1000 {
        groups[call % 20].enqueue(&ranks, Scale::default()).unwrap();
        if call == 10 {
            after_ten = gpu.usage_bytes(0).1;
        }
    }
    comm.synchronize().unwrap();
    assert_eq!(gpu.usage_bytes(0).1, after_ten, "the peak grew between call 10 and call 1000");
}

#[test]
fn t60_scales_of_two_groups_do_not_mix() {
    let run = |alpha: f32| {
        let mut case = Case::new(2, 2, &[&[4, 2]]);
        case.scale.alpha = alpha;
        case.run(|_, _| constant(&case.shapes, 8.0))
    };
    assert!(run(0.25).iter().flatten().all(|v| *v == 8.0));
    assert!(run(0.125).iter().flatten().all(|v| *v == 4.0));
}

/// All layers are issued at once: the arena is all that they share, and it does not grow.
#[test]
fn t62_forty_layers_issued_at_once_use_one_arena() {
    let case = Case { calls: 40, ..Case::new(2, 2, &[&[16, 16]]) };
    let outs = case.run(|call, r| normal(&case.shapes, call as u64, r));
    let all: Vec<_> = (0..4).map(|r| normal(&case.shapes, 39, r)).collect();
    assert_close(&outs, &reference(&case.shapes, &all, case.scale, 0.0), "the last of forty");
}

/// An all-gather and a reduce-scatter in flight together: each completes, whatever the other does, in either order.
#[test]
fn t61_an_all_gather_and_a_reduce_scatter_in_flight_do_not_wait_for_each_other() {
    use tide_gpu::{AllGather, AllGatherOptions, RankGather};
    for seed in 0..12 {
        for path in PATHS {
            let case = Case { path, ..Case::new(2, 2, &[&[9, 3], &[5]]).seed(seed) };
            let comm = case.communicator();
            let gpu = Arc::clone(comm.gpu());
            let mut rs = ReduceScatter::new(&comm, &case.group(), GradientDtype::F32, &case.options).unwrap();
            let group = common::group(&[vec![12]], Dtype::U8);
            let mut ag = AllGather::new(&comm, &group, AllGatherOptions::default()).unwrap();
            for rank in comm.topology().ranks() {
                gpu.upload(ag.shard(rank, 0).address, &[rank.0 as u8; 3]).unwrap();
            }
            let ones: Vec<_> = (0..4).map(|_| DeviceBuffer::from_slice(&gpu, 0, &[1_f32; 32]).unwrap()).collect();
            let outs: Vec<_> = (0..4).map(|_| DeviceBuffer::new(&gpu, 0, rs.output_bytes()).unwrap()).collect();
            let rank = |(g, o): (&DeviceBuffer, &DeviceBuffer)| {
                let at =
                    |first: u64, bytes: u64| Some(DeviceSlice { address: DevicePtr(g.address().0 + first), bytes });
                RankGradients { gradients: vec![at(0, 108), at(108, 20)], out: o.slice(), ready: None }
            };
            let ranks: Vec<_> = ones.iter().zip(&outs).map(rank).collect();
            let gather = vec![RankGather::default(); 4];
            if seed % 2 == 0 {
                ag.enqueue(&gather).unwrap();
                rs.enqueue(&ranks, Scale::default()).unwrap();
            } else {
                rs.enqueue(&ranks, Scale::default()).unwrap();
                ag.enqueue(&gather).unwrap();
            }
            comm.synchronize().unwrap();
            let mut landed = [0; 12];
            gpu.download(ag.landing(common::rank(3), 0).address, &mut landed).unwrap();
            assert_eq!(landed, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]);
            let all = vec![constant(&case.shapes, 1.0); 4];
            let outs: Vec<Vec<f32>> = outs.iter().map(|o| o.to_vec().unwrap()).collect();
            assert_close(
                &outs,
                &reference(&case.shapes, &all, Scale::default(), 0.0),
                &format!("{path:?} seed {seed}"),
            );
        }
    }
}

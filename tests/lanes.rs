//! Rail lanes: collectives of groups with one rank per node, against oracles that know nothing of waves or parts but their order.

mod common;

use common::lanes::{
    Lane, Left, PATHS, SHAPES, Sum, Whole, assert_gathers_alike, assert_sums_alike, first_difference, flat,
    gather_groups, random_bytes, sim, try_gather,
};
use common::{Gradients, assert_close, bits, constant, group, int_fill, normal, rank, reference};
use std::sync::Arc;
use std::time::Duration;
use tide_device::abi::kernel::Kernel;
use tide_device::abi::params::FlatSumParams;
use tide_gpu::gpu::sim::{SimGpu, SimOptions};
use tide_gpu::gpu::{Copy2d, DeviceBuffer, DevicePtr, DeviceSlice, Event, Gpu, Launch, MemoryWait, Priority, Stream};
use tide_gpu::layout::{Dtype, Group};
use tide_gpu::plan::{Rank, ReduceScatterOptions, Topology};
use tide_gpu::{
    Communicator, CommunicatorOptions, GradientDtype, LaneAllGather, LaneOptions, LaneReduceScatter, Path,
    RankGradients, ReduceScatter, Scale, TideError, hand_on,
};

const NODE_COUNTS: [u32; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13];

// ---------------------------------------------------------------------------------------------- all-gather

fn assert_gathers(lane: &Lane, group: &Group, calls: &[Whole], what: &str) {
    let got = try_gather(lane, group, calls).unwrap();
    for (call, (ranks, whole)) in got.iter().zip(calls).enumerate() {
        for (rank, bytes) in ranks.iter().enumerate() {
            assert!(*bytes == flat(whole), "{what}: call {call}, rank {rank}");
        }
    }
}

#[test]
fn any_lane_gathers_every_byte_call_after_call() {
    for m in NODE_COUNTS {
        for (which, group) in gather_groups().iter().enumerate() {
            for path in PATHS {
                let seed = u64::from(m) * 10 + which as u64;
                let calls: Vec<Whole> = (0..3).map(|call| random_bytes(group, seed + 100 * call)).collect();
                assert_gathers(
                    &Lane::new(m, path, seed),
                    group,
                    &calls,
                    &format!("{m} nodes, group {which}, {path:?}"),
                );
            }
        }
    }
}

#[test]
fn every_seed_gathers_alike() {
    let [aligned, ragged, mixed, _] = gather_groups();
    for seed in 0..36 {
        for path in PATHS {
            let group = [&aligned, &ragged, &mixed][seed as usize % 3];
            let calls: Vec<Whole> = (0..4).map(|call| random_bytes(group, seed + call)).collect();
            assert_gathers(
                &Lane::new([5, 6, 3, 9][seed as usize % 4], path, seed),
                group,
                &calls,
                &format!("seed {seed}"),
            );
        }
    }
}

/// With `read` the caller may write the next shards, while others' are still on their way out of the stage.
#[test]
fn a_shard_may_change_once_it_is_read() {
    let group = &gather_groups()[1];
    let (old, new) = (random_bytes(group, 1), random_bytes(group, 2));
    for seed in 0..12 {
        let comm = Lane::new(3, PATHS[seed as usize % 2], seed).communicator();
        let gpu = comm.gpu();
        let mut ag = LaneAllGather::new(&comm, group).unwrap();
        // Rank r's part of a parameter.
        let own = |r: u32, p: usize, shard_bytes: u64| {
            let end = |r: u32| (u64::from(r) * shard_bytes).min(old[p].len() as u64) as usize;
            end(r)..end(r + 1)
        };
        let each = || (0..3).flat_map(|r| (0..old.len()).map(move |p| (r, p)));
        for (r, p) in each() {
            let shard = ag.shard(rank(r), p);
            gpu.upload(shard.address, &old[p][own(r, p, shard.bytes)]).unwrap();
        }
        let events = ag.enqueue(&[None; 3]).unwrap();
        let streams: Vec<Stream> = (0..3).map(|_| gpu.create_stream(0, Priority::Normal).unwrap()).collect();
        let mut kept = Vec::new();
        for (r, p) in each() {
            let (shard, stream) = (ag.shard(rank(r), p), streams[r as usize]);
            gpu.wait_event(stream, events[r as usize].read).unwrap();
            let next = DeviceBuffer::from_slice(gpu, 0, &new[p][own(r, p, shard.bytes)]).unwrap();
            let live = next.slice().bytes;
            if live > 0 {
                gpu.copy(stream, &Copy2d::flat(shard.address, next.address(), live)).unwrap();
            }
            kept.push(next);
        }
        comm.synchronize().unwrap();
        streams.iter().for_each(|s| assert!(gpu.synchronize(*s, u64::MAX).is_ok()));
        for (r, p) in each() {
            let mut expected = old[p].clone();
            let own = own(r, p, ag.shard(rank(r), p).bytes);
            expected[own.clone()].copy_from_slice(&new[p][own]);
            let mut got = vec![0; expected.len()];
            gpu.download(ag.landing(rank(r), p).address, &mut got).unwrap();
            assert!(got == expected, "seed {seed}, rank {r}, parameter {p}");
        }
    }
}

/// One context and many, stripes shorter and longer than a put.
#[test]
fn contexts_and_stripes_do_not_show_in_a_gather() {
    for group in gather_groups() {
        for (context_count, stripe_bytes) in [(1, 16), (5, 16), (3, 4096), (2, 1 << 30)] {
            for m in [3, 7] {
                let mut lane = Lane::new(m, Path::Device, 11);
                (lane.comm.context_count, lane.comm.stripe_bytes) = (context_count, stripe_bytes);
                let calls: Vec<Whole> = (0..2).map(|call| random_bytes(&group, call)).collect();
                assert_gathers(&lane, &group, &calls, &format!("{context_count} contexts, stripes of {stripe_bytes}"));
            }
        }
    }
}

#[test]
fn a_gather_takes_the_landing_and_a_stage_of_what_is_ragged() {
    let comm = Lane::new(5, Path::Device, 0).communicator();
    for group in gather_groups() {
        let ag = LaneAllGather::new(&comm, &group).unwrap();
        let landing = ag.layout().landing_bytes();
        let ragged = ag.stage_bytes();
        assert!(ragged <= landing + 5 * 16, "{ragged}");
        let signals = 8 * 5 * (u64::from(comm.options().context_count) + 1);
        assert!(ag.buffer_bytes() <= landing + ragged + signals + 3 * 256, "{}", ag.buffer_bytes());
    }
    // 26 and 13 rows over 5 nodes are 6 and 3 a shard, of 16 and 32 bytes.
    assert_eq!(LaneAllGather::new(&comm, &gather_groups()[0]).unwrap().stage_bytes(), 0);
}

// ------------------------------------------------------------------------------------------ reduce-scatter

/// The reduction again, element by element, in the order that the lane's documentation promises.
fn oracle(m: u64, shapes: &[Vec<u64>], all: &[Gradients], scale: Scale, previous: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let shard = |node: u64| {
        let mut row = Vec::new();
        for (p, shape) in shapes.iter().enumerate() {
            let k: u64 = shape[1..].iter().product();
            let shard_elems = shape[0].div_ceil(m) * k;
            for i in 0..shard_elems {
                let element = node * shard_elems + i;
                let base = if scale.accumulate { previous[node as usize][row.len()] } else { 0.0 };
                let of = |source: u64| all[source as usize][p].as_ref().map_or(0.0, |g| g[element as usize]);
                let total = if element < shape[0] * k { total(m, node, of) } else { 0.0 };
                row.push(base + scale.alpha * total);
            }
        }
        row
    };
    (0..m).map(shard).collect()
}

/// Contributors `c = 1..=M` are nodes `t − c`; eight of them are a wave; a wave without the node itself ends with `+0.0`.
fn total(m: u64, node: u64, of: impl Fn(u64) -> f32) -> f32 {
    let contributors: Vec<u64> = (1..=m).collect();
    let waves = contributors.chunks(8).map(|wave| {
        let sum = wave.iter().map(|c| of((node + m - c) % m)).reduce(|a, b| a + b).unwrap();
        if wave.last() == Some(&m) { sum } else { sum + 0.0 }
    });
    waves.reduce(|a, b| a + b).unwrap()
}

impl Sum {
    /// Runs the calls and holds every bit against [`oracle`].
    fn assert_bitwise(&self, calls: &[Vec<Gradients>], previous: f32, what: &str) {
        let got = self.try_run(calls, previous).unwrap();
        for (call, (outs, all)) in got.iter().zip(calls).enumerate() {
            let before: Vec<Vec<f32>> = outs.iter().map(|o| vec![previous; o.len()]).collect();
            let expected = oracle(self.lane.nodes.into(), &self.shapes, all, self.scale, &before);
            assert!(bits(outs) == bits(&expected), "{what}: call {call}: {outs:?} against {expected:?}");
        }
    }
}

#[test]
fn any_lane_adds_in_the_promised_order() {
    for m in NODE_COUNTS {
        for (which, shapes) in SHAPES.iter().enumerate() {
            for dtype in [GradientDtype::Bf16, GradientDtype::F32] {
                for path in PATHS {
                    let seed = u64::from(m) + which as u64;
                    let mut sum = Sum { dtype, ..Sum::new(Lane::new(m, path, seed), shapes) };
                    let mut calls = sum.random(3, seed);
                    // A parameter that some rank did not use.
                    calls[1][m as usize / 2][0] = None;
                    let what = format!("{m} nodes, shapes {which}, {dtype:?}, {path:?}");
                    sum.assert_bitwise(&calls, f32::NAN, &what);
                    sum.scale = Scale { alpha: 0.7, accumulate: true };
                    sum.assert_bitwise(&calls, 2.5, &what);
                }
            }
        }
    }
}

/// `ready` holds gradients and output back, for all that a rank does with them, on any number of nodes.
#[test]
fn nothing_is_touched_before_it_is_ready() {
    for (m, path) in [(1, Path::Device), (1, Path::Host), (2, Path::Device), (9, Path::Host)] {
        let mut lane = Lane::new(m, path, 2);
        lane.sim.eager_steps_max = 2000;
        let sum = Sum { dtype: GradientDtype::F32, ..Sum::new(lane.clone(), &[&[36, 4]]) };
        let comm = lane.communicator();
        let gpu = comm.gpu();
        let mut rs = LaneReduceScatter::new(&comm, &sum.group(), sum.dtype, &sum.options).unwrap();
        let (user, word) =
            (gpu.create_stream(0, Priority::Normal).unwrap(), DeviceBuffer::from_slice(gpu, 0, &[0_u64]).unwrap());
        let tag = bytemuck::Zeroable::zeroed();
        let wait = MemoryWait { address: word.address(), value: 1, timeout_ns: u64::MAX, tag };
        gpu.wait_value(user, &wait).unwrap();
        let ready = Some(gpu.record(user).unwrap());
        let held: Vec<Held> =
            (0..m).map(|_| Held::new(gpu, &constant(&sum.shapes, f32::NAN), rs.output_bytes())).collect();
        held.iter().for_each(|h| gpu.upload(h.out.address(), &vec![0xff; rs.output_bytes() as usize]).unwrap());
        let ranks: Vec<RankGradients> = given(&held).into_iter().map(|g| RankGradients { ready, ..g }).collect();
        rs.enqueue(&ranks, Scale { alpha: 1.0, accumulate: true }).unwrap();
        for held in &held {
            gpu.upload(held.gradients[0].address(), bytemuck::cast_slice(&[1_f32; 144])).unwrap();
            gpu.upload(held.out.address(), bytemuck::cast_slice(&vec![2_f32; rs.output_bytes() as usize / 4])).unwrap();
        }
        gpu.write_value(gpu.create_stream(0, Priority::Normal).unwrap(), word.address(), 1).unwrap();
        comm.synchronize().unwrap();
        assert_all(&held, 2.0 + m as f32);
    }
}

/// A gradient that is missing adds `+0.0`, whole units of it too: it turns a sum of `-0.0` positive, which shows over a
/// previous `-0.0`.
#[test]
fn a_missing_gradient_adds_plus_zero() {
    for m in NODE_COUNTS {
        for dtype in [GradientDtype::Bf16, GradientDtype::F32] {
            let mut sum = Sum { dtype, ..Sum::new(Lane::new(m, Path::Device, 3), SHAPES[0]) };
            sum.scale = Scale { alpha: 1.0, accumulate: true };
            let mut calls: Vec<Vec<Gradients>> = vec![vec![constant(&sum.shapes, -0.0); m as usize]; m as usize + 1];
            // In call `r` rank `r` lacks some; in the last one nobody does.
            for (r, call) in calls[..m as usize].iter_mut().enumerate() {
                (call[r][0], call[r][3]) = (None, None);
            }
            sum.assert_bitwise(&calls, -0.0, &format!("{m} nodes, {dtype:?}"));
        }
    }
}

/// More nodes than two waves hold.
#[test]
fn twenty_nodes_are_three_waves() {
    for path in PATHS {
        let sum = Sum::new(Lane::new(20, path, 3), SHAPES[1]);
        sum.assert_bitwise(&sum.random(3, 4), f32::NAN, &format!("{path:?}"));
    }
}

#[test]
fn every_seed_gives_the_same_bits() {
    for seed in 0..36 {
        for path in PATHS {
            let m = [2, 5, 8, 9, 13][seed as usize % 5];
            let sum = Sum::new(Lane::new(m, path, seed), SHAPES[seed as usize % 2]);
            sum.assert_bitwise(&sum.random(4, seed), f32::NAN, &format!("{m} nodes, {path:?}, seed {seed}"));
        }
    }
}

#[test]
fn parts_ctas_contexts_and_stripes_give_the_same_bits() {
    for m in [4, 9] {
        let base = Sum::new(Lane::new(m, Path::Device, 5), SHAPES[0]);
        let calls = base.random(3, 6);
        for part_count in [1, 2, 3, 4, 7] {
            for (sum_cta_count, land_cta_count) in [(1, 1), (3, 7)] {
                for path in PATHS {
                    let mut other = base.clone();
                    other.lane.comm.path = path;
                    other.options = LaneOptions { part_count, sum_cta_count, land_cta_count };
                    other.assert_bitwise(&calls, f32::NAN, &format!("{m} nodes, {path:?}, {:?}", other.options));
                }
            }
        }
        for (context_count, stripe_bytes) in [(1, 16), (7, 4096), (2, 1 << 30)] {
            let mut other = base.clone();
            (other.lane.comm.context_count, other.lane.comm.stripe_bytes) = (context_count, stripe_bytes);
            other.assert_bitwise(&calls, f32::NAN, &format!("{context_count} contexts, stripes of {stripe_bytes}"));
        }
    }
}

/// Up to eight nodes a lane adds what the general reduce-scatter adds, in its order.
#[test]
fn a_lane_gives_the_bits_of_the_general_reduce_scatter() {
    for m in 1..=8 {
        let sum = Sum::new(Lane::new(m, Path::Device, 7), SHAPES[0]);
        let calls = sum.random(1, 8);
        let mut general = common::Case::new(m, 1, SHAPES[0]);
        general.scale = sum.scale;
        let expected = general.run(|_, r| calls[0][r as usize].clone());
        assert!(bits(&sum.try_run(&calls, 0.0).unwrap()[0]) == bits(&expected), "{m} nodes");
    }
}

#[test]
fn few_hardware_queues_do_not_deadlock() {
    for queues in [1, 2, 8] {
        for path in PATHS {
            let mut lane = Lane::new(9, path, 2);
            lane.sim.hardware_queues = Some(queues);
            let sum = Sum::new(lane.clone(), SHAPES[1]);
            sum.assert_bitwise(&sum.random(3, 1), f32::NAN, &format!("{queues} queues, {path:?}"));
            let group = &gather_groups()[1];
            let calls: Vec<Whole> = (0..3).map(|call| random_bytes(group, call)).collect();
            assert_gathers(&lane, group, &calls, &format!("{queues} queues, {path:?}"));
        }
    }
}

#[test]
fn a_reduce_scatter_stays_under_its_bound() {
    for (m, waves) in [(1, 1), (2, 1), (8, 1), (9, 2), (13, 2)] {
        for dtype in [GradientDtype::Bf16, GradientDtype::F32] {
            let comm = Lane::new(m, Path::Device, 0).communicator();
            let sum = Sum { dtype, ..Sum::new(Lane::new(m, Path::Device, 0), SHAPES[5]) };
            let rs = LaneReduceScatter::new(&comm, &sum.group(), dtype, &LaneOptions::default()).unwrap();
            let part = rs.layout().packed_elems().div_ceil(4) + 31;
            let blocks = 4 * u64::from((m - 1).min(8));
            let signals = 8 * u64::from(m) * (u64::from(comm.options().context_count) + 1);
            let bound = part * (blocks * dtype.bytes() + 4 * waves.min(2)) + signals + 5 * 256;
            assert!(rs.buffer_bytes() <= bound, "{m} nodes: {} of {bound}", rs.buffer_bytes());
        }
    }
}

// -------------------------------------------------------------------------------------------------- faults

/// Every signal lost in turn: either somebody says within the deadline that it is missing, or all is right.
#[test]
fn a_lost_signal_is_reported_or_harmless() {
    let (mut reported, mut harmless) = (0, 0);
    let mut judge = |nodes: u32, outcome: Result<bool, TideError>, what: String| match outcome {
        Ok(right) => {
            assert!(right, "{what} gave a wrong result");
            harmless += 1;
        }
        Err(TideError::FailStop(fault)) => {
            assert!(
                fault.kind.is_some() && fault.rank < nodes && fault.peer < nodes && fault.rank != fault.peer,
                "{fault}"
            );
            let waited = Duration::from_nanos(fault.waited_ns);
            assert!((Duration::from_millis(50)..Duration::from_millis(100)).contains(&waited), "{what}: {fault}");
            reported += 1;
        }
        Err(other) => panic!("{what}: {other}"),
    };
    for nodes in [2, 5, 9] {
        for path in PATHS {
            for lost in 0..160 {
                let mut lane = Lane::new(nodes, path, lost);
                lane.comm.timeout = Duration::from_millis(50);
                lane.sim.machine.lose_signal = Some(lost);
                let what = format!("{nodes} nodes, {path:?}: losing signal {lost}");
                let sum = Sum::new(lane.clone(), SHAPES[1]);
                let calls = sum.random(3, 1);
                let expected = |all: &Vec<Gradients>| {
                    bits(&oracle(nodes.into(), &sum.shapes, all, sum.scale, &vec![Vec::new(); nodes as usize]))
                };
                let right = |got: Left<f32>| got.iter().zip(&calls).all(|(g, all)| bits(g) == expected(all));
                judge(nodes, sum.try_run(&calls, 0.0).map(right), format!("{what}, reduce-scatter"));
                let group = &gather_groups()[lost as usize % 2];
                let calls: Vec<Whole> = (0..3).map(|call| random_bytes(group, call)).collect();
                let right = |got: Left<u8>| {
                    got.iter().zip(&calls).all(|(ranks, whole)| ranks.iter().all(|bytes| *bytes == flat(whole)))
                };
                judge(nodes, try_gather(&lane, group, &calls).map(right), format!("{what}, all-gather"));
            }
        }
    }
    assert!(reported > 200 && harmless > 100, "{reported} reported, {harmless} harmless");
}

#[test]
fn a_poisoned_communicator_refuses_lanes() {
    for path in PATHS {
        let mut lane = Lane::new(2, path, 4);
        lane.comm.timeout = Duration::from_millis(1);
        lane.sim.machine.lose_signal = Some(0);
        let comm = lane.communicator();
        let group = group(&[vec![32, 8]], Dtype::F32);
        let mut ag = LaneAllGather::new(&comm, &group).unwrap();
        let mut rs = LaneReduceScatter::new(&comm, &group, GradientDtype::F32, &LaneOptions::default()).unwrap();
        ag.enqueue(&[None, None]).unwrap();
        let fault = comm.synchronize().unwrap_err();
        assert!(matches!(fault, TideError::FailStop(_)), "{fault}");
        let poisoned = |error: Option<TideError>| {
            assert!(matches!(&error, Some(TideError::Poisoned { first }) if *first == fault.to_string()), "{error:?}");
        };
        let nothing = DeviceSlice { address: DevicePtr::NULL, bytes: 0 };
        let ranks = vec![RankGradients { gradients: vec![None], out: nothing, ready: None }; 2];
        poisoned(ag.enqueue(&[None, None]).err());
        poisoned(rs.enqueue(&ranks, Scale::default()).err());
        poisoned(LaneAllGather::new(&comm, &group).err());
        poisoned(LaneReduceScatter::new(&comm, &group, GradientDtype::F32, &LaneOptions::default()).err());
    }
}

#[test]
fn what_is_no_lane_is_refused_before_anything_is_enqueued() {
    let gpu: Arc<dyn Gpu> = SimGpu::new(SimOptions::default());
    let usage = |error: Option<TideError>, text: &str| {
        assert!(matches!(&error, Some(TideError::Usage(found)) if found.contains(text)), "{error:?}");
    };
    let wide = Communicator::new(gpu, Topology::new(2, 2).unwrap(), CommunicatorOptions::default()).unwrap();
    let group = group(&[vec![8, 8]], Dtype::F32);
    let options = LaneOptions::default();
    usage(LaneAllGather::new(&wide, &group).err(), "one rank per node");
    usage(LaneReduceScatter::new(&wide, &group, GradientDtype::F32, &options).err(), "one rank per node");
    let comm = Lane::new(2, Path::Device, 0).communicator();
    let none = LaneOptions { part_count: 0, ..options.clone() };
    usage(LaneReduceScatter::new(&comm, &group, GradientDtype::F32, &none).err(), "at least one part");
    let mut ag = LaneAllGather::new(&comm, &group).unwrap();
    usage(ag.enqueue(&[None]).err(), "names 1 ranks");
    let mut rs = LaneReduceScatter::new(&comm, &group, GradientDtype::F32, &options).unwrap();
    let out = DeviceBuffer::new(comm.gpu(), 0, rs.output_bytes() - 4).unwrap();
    let ranks = |count: usize| vec![RankGradients { gradients: vec![None; count], out: out.slice(), ready: None }; 2];
    usage(rs.enqueue(&ranks(2), Scale::default()).err(), "2 gradients given");
    usage(rs.enqueue(&ranks(1), Scale::default()).err(), "124 bytes given, 128 needed");
    assert_eq!((ag.epoch(), rs.epoch()), (0, 0));
}

// ------------------------------------------------------------------------- lanes beside others, replicas

/// What a rank of some group brings and gets, in device memory.
struct Held {
    gradients: Vec<DeviceBuffer>,
    out: DeviceBuffer,
}

impl Held {
    fn new(gpu: &Arc<dyn Gpu>, given: &Gradients, output_bytes: u64) -> Self {
        let gradients = given.iter().flatten().map(|g| DeviceBuffer::from_slice(gpu, 0, g).unwrap()).collect();
        Self { gradients, out: DeviceBuffer::new(gpu, 0, output_bytes).unwrap() }
    }

    fn given(&self) -> RankGradients {
        let gradients = self.gradients.iter().map(|g| Some(g.slice())).collect();
        RankGradients { gradients, out: self.out.slice(), ready: None }
    }
}

fn outs(held: &[Held]) -> Vec<Vec<f32>> {
    held.iter().map(|h| h.out.to_vec().unwrap()).collect()
}

fn given(held: &[Held]) -> Vec<RankGradients> {
    held.iter().map(Held::given).collect()
}

#[test]
fn t48_four_lanes_and_the_full_group_do_not_mix() {
    for (path, seed) in [(Path::Device, 0), (Path::Host, 1), (Path::Device, 5)] {
        let gpu: Arc<dyn Gpu> = SimGpu::new(sim(seed));
        let options = CommunicatorOptions { path, stripe_bytes: 64, ..Default::default() };
        let comm = |m, l| Communicator::new(Arc::clone(&gpu), Topology::new(m, l).unwrap(), options.clone()).unwrap();
        let (pairs, full) = ((0..4).map(|_| comm(2, 1)).collect::<Vec<_>>(), comm(2, 4));
        let (expert, dense) = (vec![vec![6_u64, 2], vec![40, 8]], vec![vec![9_u64, 3]]);
        let expert_group = group(&expert, Dtype::F32);
        let new = |c| LaneReduceScatter::new(c, &expert_group, GradientDtype::F32, &LaneOptions::default()).unwrap();
        let mut lanes: Vec<LaneReduceScatter> = pairs.iter().map(new).collect();
        let mut gathers: Vec<LaneAllGather> =
            pairs.iter().map(|c| LaneAllGather::new(c, &expert_group).unwrap()).collect();
        let dense_group = group(&dense, Dtype::F32);
        let mut all =
            ReduceScatter::new(&full, &dense_group, GradientDtype::F32, &ReduceScatterOptions::default()).unwrap();
        let hold = |shapes: &[Vec<u64>], r: u32, bytes: u64| Held::new(&gpu, &int_fill(shapes, r), bytes);
        let lane_ranks: Vec<Vec<Held>> = (0..4_u32)
            .map(|l| [l, l + 4].map(|r| hold(&expert, r, lanes[l as usize].output_bytes())).into_iter().collect())
            .collect();
        let full_ranks: Vec<Held> = (0..8).map(|r| hold(&dense, r, all.output_bytes())).collect();
        // Lane l gathers bytes of its own.
        let wholes: Vec<Whole> = (0..4).map(|l| random_bytes(&expert_group, l)).collect();
        for (ag, whole) in gathers.iter().zip(&wholes) {
            for (r, (p, bytes)) in (0..2).flat_map(|r| whole.iter().enumerate().map(move |w| (r, w))) {
                let shard = ag.shard(rank(r), p);
                let at = r as usize * shard.bytes as usize;
                gpu.upload(shard.address, &bytes[at..at + shard.bytes as usize]).unwrap();
            }
        }
        for _ in 0..3 {
            for l in 0..4 {
                lanes[l].enqueue(&given(&lane_ranks[l]), Scale::default()).unwrap();
                all.enqueue(&given(&full_ranks), Scale::default()).unwrap();
                gathers[3 - l].enqueue(&[None, None]).unwrap();
            }
        }
        pairs.iter().chain([&full]).for_each(|c| c.synchronize().unwrap());
        assert_eq!((lanes[3].epoch(), gathers[0].epoch(), all.epoch()), (3, 3, 12));
        for (l, held) in (0..4_u32).zip(&lane_ranks) {
            let sources: Vec<_> = [l, l + 4].iter().map(|r| int_fill(&expert, *r)).collect();
            let expected = reference(&expert, &sources, Scale::default(), 0.0);
            assert_close(&outs(held), &expected, &format!("lane {l}"));
        }
        let sources: Vec<_> = (0..8).map(|r| int_fill(&dense, r)).collect();
        assert_close(&outs(&full_ranks), &reference(&dense, &sources, Scale::default(), 0.0), "all ranks");
        for (ag, whole) in gathers.iter().zip(&wholes) {
            for (r, (p, bytes)) in (0..2).flat_map(|r| whole.iter().enumerate().map(move |w| (r, w))) {
                let mut got = vec![0; bytes.len()];
                gpu.download(ag.landing(rank(r), p).address, &mut got).unwrap();
                assert!(got == *bytes, "rank {r} parameter {p}");
            }
        }
    }
}

/// The sum of a few shard groups' outputs, in their order, in a stream behind them all; every group gets it.
struct ReplicaSum {
    gpu: Arc<dyn Gpu>,
    stream: Stream,
    /// Handed on so far: rank, output.
    handed: Vec<(Rank, DeviceSlice)>,
    kept: Vec<DeviceBuffer>,
}

impl ReplicaSum {
    fn new(gpu: &Arc<dyn Gpu>) -> Self {
        let stream = gpu.create_stream(0, Priority::Normal).unwrap();
        Self { gpu: Arc::clone(gpu), stream, handed: Vec::new(), kept: Vec::new() }
    }

    /// Takes a group's output; the hook.
    fn take(&mut self, rank: Rank, out: DeviceSlice, done: Event) -> tide_gpu::Result<Event> {
        self.gpu.wait_event(self.stream, done)?;
        self.handed.push((rank, out));
        self.gpu.record(self.stream)
    }

    /// Adds what was handed on, rank by rank.
    fn finish(&mut self, rank_count: u32) {
        for r in (0..rank_count).map(Rank) {
            let of_rank: Vec<DeviceSlice> = self.handed.iter().filter(|h| h.0 == r).map(|h| h.1).collect();
            let addresses: Vec<u64> = of_rank.iter().map(|s| s.address.0).collect();
            let table = DeviceBuffer::from_slice(&self.gpu, 0, &addresses).unwrap();
            let params = FlatSumParams {
                packed: table.address().0,
                out: of_rank[0].address.0,
                packed_elems: of_rank[0].bytes / 4,
                rank_count: of_rank.len() as u32,
                rank: 0,
                accumulate: 0,
                alpha: 1.0,
            };
            let params = bytemuck::bytes_of(&params);
            let launch =
                Launch { kernel: Kernel::StockFlatSum, grid: 1, block: 4, cluster: 1, shared_bytes: 0, params };
            // SAFETY: outputs and table live until the stream is synchronized.
            unsafe { self.gpu.launch(self.stream, &launch).unwrap() };
            for slice in &of_rank[1..] {
                let copy = Copy2d::flat(slice.address, of_rank[0].address, slice.bytes);
                self.gpu.copy(self.stream, &copy).unwrap();
            }
            self.kept.push(table);
        }
        self.gpu.synchronize(self.stream, u64::MAX).unwrap();
    }
}

fn assert_all(held: &[Held], value: f32) {
    let outs = outs(held);
    assert!(outs.iter().flatten().all(|v| (v - value).abs() < 1e-5), "{outs:?} against {value}");
}

#[test]
fn t02_a_divide_factor_is_applied_once_over_replicas() {
    let shapes = vec![vec![4_u64, 2]];
    let shard_groups = |(m, l): (u32, u32), count: usize, as_lanes: bool| {
        let gpu: Arc<dyn Gpu> = SimGpu::new(sim(m.into()));
        let comm = |_| Communicator::new(Arc::clone(&gpu), Topology::new(m, l).unwrap(), Default::default()).unwrap();
        let comms: Vec<Communicator> = (0..count).map(comm).collect();
        let group = group(&shapes, Dtype::F32);
        let scale = Scale { alpha: 1.0 / 300.0, accumulate: false };
        let output_bytes = 4 * 8_u64.div_ceil(u64::from(m * l)).next_multiple_of(2);
        let hold = |_| (0..m * l).map(|_| Held::new(&gpu, &constant(&shapes, 300.0), output_bytes)).collect();
        let held: Vec<Vec<Held>> = (0..count).map(hold).collect();
        let mut replicas = ReplicaSum::new(&gpu);
        let mut running: Vec<(Option<ReduceScatter>, Option<LaneReduceScatter>)> = Vec::new();
        for (comm, held) in comms.iter().zip(&held) {
            let ranks = given(held);
            let (mut general, mut lane) = (None, None);
            let events = if as_lanes {
                let rs = LaneReduceScatter::new(comm, &group, GradientDtype::F32, &LaneOptions::default()).unwrap();
                lane.insert(rs).enqueue(&ranks, scale).unwrap()
            } else {
                let rs = ReduceScatter::new(comm, &group, GradientDtype::F32, &Default::default()).unwrap();
                general.insert(rs).enqueue(&ranks, scale).unwrap()
            };
            running.push((general, lane));
            let mut hook = |rank: Rank, out: DeviceSlice, done: Event| replicas.take(rank, out, done);
            let reduced = hand_on(comm, &ranks, &events, &mut hook).unwrap();
            assert!(reduced.iter().zip(&events).all(|(r, e)| r.read == e.read && r.done != e.done));
        }
        comms.iter().for_each(|c| c.synchronize().unwrap());
        // Of eight ranks the last four own no row.
        held.iter().for_each(|h| assert_all(&h[..4], if m * l == 8 { 8.0 } else { 4.0 }));
        if count > 1 {
            replicas.finish(m * l);
            held.iter().for_each(|h| assert_all(h, 8.0));
        }
    };
    shard_groups((1, 4), 2, false);
    shard_groups((4, 1), 2, true);
    shard_groups((2, 4), 1, false);
    shard_groups((8, 1), 1, true);
}

/// Dense parameters over all four ranks, experts over two lanes whose outputs are added: each with its own factor.
#[test]
fn t60_factors_of_dense_and_expert_groups_do_not_mix() {
    let gpu: Arc<dyn Gpu> = SimGpu::new(sim(8));
    let comm = |m, l| Communicator::new(Arc::clone(&gpu), Topology::new(m, l).unwrap(), Default::default()).unwrap();
    let (full, lanes) = (comm(2, 2), [comm(2, 1), comm(2, 1)]);
    let shapes = vec![vec![4_u64, 2]];
    let group = group(&shapes, Dtype::F32);
    let mut dense = ReduceScatter::new(&full, &group, GradientDtype::F32, &Default::default()).unwrap();
    let new = |c| LaneReduceScatter::new(c, &group, GradientDtype::F32, &LaneOptions::default()).unwrap();
    let mut experts = lanes.each_ref().map(new);
    let hold =
        |count, bytes| -> Vec<Held> { (0..count).map(|_| Held::new(&gpu, &constant(&shapes, 8.0), bytes)).collect() };
    let dense_held = hold(4, dense.output_bytes());
    let expert_held = [0, 1].map(|l: usize| hold(2, experts[l].output_bytes()));
    for (dense_alpha, expert_alpha) in [(0.25, 0.125), (0.125, 0.25), (0.25, 0.125)] {
        let scale = |alpha| Scale { alpha, accumulate: false };
        let mut replicas = ReplicaSum::new(&gpu);
        for ((rs, comm), held) in experts.iter_mut().zip(&lanes).zip(&expert_held) {
            let events = rs.enqueue(&given(held), scale(expert_alpha)).unwrap();
            dense.enqueue(&given(&dense_held), scale(dense_alpha)).unwrap();
            hand_on(comm, &given(held), &events, &mut |r, o, d| replicas.take(r, o, d)).unwrap();
        }
        lanes.iter().chain([&full]).for_each(|c| c.synchronize().unwrap());
        expert_held.iter().for_each(|h| assert_all(h, 16.0 * expert_alpha));
        replicas.finish(2);
        expert_held.iter().for_each(|h| assert_all(h, 32.0 * expert_alpha));
        assert_all(&dense_held, 32.0 * dense_alpha);
    }
}

// ---------------------------------------------------------------------------------- several GPUs, parity

/// The lanes of a process, one per GPU, and what each takes lies on its GPU alone.
#[test]
fn lanes_of_one_process_are_spread_over_its_gpus() {
    for path in PATHS {
        let mut options = sim(6);
        options.machine.device_count = 3;
        let gpu: Arc<dyn Gpu> = SimGpu::new(options);
        let expert = vec![vec![6_u64, 2], vec![40, 8]];
        let group = group(&expert, Dtype::F32);
        let comm = |first_device| {
            let options = CommunicatorOptions { path, stripe_bytes: 64, first_device, ..Default::default() };
            Communicator::new(Arc::clone(&gpu), Topology::new(5, 1).unwrap(), options).unwrap()
        };
        let used = || [0, 1, 2].map(|device| gpu.usage_bytes(device).0);
        let mut lanes = Vec::new();
        for device in 0..3 {
            let before = used();
            let comm = comm(device);
            assert!(comm.topology().ranks().all(|rank| comm.device_of(rank) == device));
            let rs = LaneReduceScatter::new(&comm, &group, GradientDtype::F32, &LaneOptions::default()).unwrap();
            let ag = LaneAllGather::new(&comm, &group).unwrap();
            let taken: Vec<u64> = used().iter().zip(before).map(|(after, before)| after - before).collect();
            let here = taken[device as usize];
            assert!(here >= 5 * (rs.buffer_bytes() + ag.buffer_bytes()), "{taken:?}");
            assert!(taken.iter().sum::<u64>() == here, "lane {device} takes {taken:?}");
            lanes.push((comm, rs, ag));
        }
        let wholes: Vec<Whole> = (0..3).map(|lane| random_bytes(&group, lane)).collect();
        let mut all_held = Vec::new();
        for (lane, (comm, rs, ag)) in (0..).zip(&mut lanes) {
            let held: Vec<Held> =
                (0..5).map(|r| Held::new(&gpu, &int_fill(&expert, 3 * r + lane), rs.output_bytes())).collect();
            for (r, (p, bytes)) in (0..5).flat_map(|r| wholes[lane as usize].iter().enumerate().map(move |w| (r, w))) {
                let shard = ag.shard(rank(r), p);
                let first = (u64::from(r) * shard.bytes).min(bytes.len() as u64) as usize;
                let end = (first + shard.bytes as usize).min(bytes.len());
                comm.gpu().upload(shard.address, &bytes[first..end]).unwrap();
            }
            rs.enqueue(&given(&held), Scale::default()).unwrap();
            ag.enqueue(&[None; 5]).unwrap();
            all_held.push(held);
        }
        for (lane, ((comm, _, ag), held)) in (0..).zip(lanes.iter().zip(&all_held)) {
            comm.synchronize().unwrap();
            let sources: Vec<_> = (0..5).map(|r| int_fill(&expert, 3 * r + lane)).collect();
            assert_close(&outs(held), &reference(&expert, &sources, Scale::default(), 0.0), &format!("lane {lane}"));
            for (r, (p, bytes)) in (0..5).flat_map(|r| wholes[lane as usize].iter().enumerate().map(move |w| (r, w))) {
                let mut got = vec![0; bytes.len()];
                gpu.download(ag.landing(rank(r), p).address, &mut got).unwrap();
                assert!(got == *bytes, "lane {lane}, rank {r}, parameter {p}");
            }
        }
    }
}

#[test]
fn local_ranks_take_the_devices_in_turn_from_the_first_on() {
    let mut options = SimOptions::default();
    options.machine.device_count = 4;
    let gpu: Arc<dyn Gpu> = SimGpu::new(options);
    let comm = |m, l, first_device| {
        let options = CommunicatorOptions { first_device, ..Default::default() };
        Communicator::new(Arc::clone(&gpu), Topology::new(m, l).unwrap(), options)
    };
    let devices = |m, l, first| -> Vec<u32> {
        let comm = comm(m, l, first).unwrap();
        comm.topology().ranks().map(|rank| comm.device_of(rank)).collect()
    };
    assert_eq!(devices(2, 4, 0), [0, 1, 2, 3, 0, 1, 2, 3]);
    assert_eq!(devices(1, 6, 3), [3, 0, 1, 2, 3, 0]);
    assert_eq!(devices(2, 2, 2), [2, 3, 2, 3]);
    for none in [4, u32::MAX] {
        let error = comm(2, 1, none).err();
        assert!(matches!(&error, Some(TideError::Usage(text)) if text.contains("there are 4")), "{error:?}");
    }
}

/// Where ranks run changes no bit, of the general reduce-scatter either.
#[test]
fn the_first_device_does_not_show_in_the_bits() {
    let mut case = common::Case::new(2, 3, SHAPES[0]);
    case.sim.machine.device_count = 4;
    let run = |first_device| {
        let mut case = case.clone();
        case.comm.first_device = first_device;
        bits(&case.run(|_, r| normal(&case.shapes, 3, r)))
    };
    let first = run(0);
    assert!((1..4).all(|device| run(device) == first));
}

/// What the GPU tests hold a GPU to, on simulated GPUs of another seed: the harness itself is right.
#[test]
fn other_simulated_gpus_leave_the_same_bytes() {
    let mut options = sim(17);
    options.machine.device_count = 2;
    let gpu: Arc<dyn Gpu> = SimGpu::new(options);
    assert_gathers_alike(&gpu, 1);
    assert_sums_alike(&gpu, 0, GradientDtype::Bf16);
    assert_sums_alike(&gpu, 1, GradientDtype::F32);
}

#[test]
fn a_planted_difference_is_found_and_named() {
    let run = vec![vec![vec![1_u32, 2, 3], vec![4]], vec![vec![5], vec![]]];
    let differs = |change: &dyn Fn(&mut Left<u32>)| {
        let mut other = run.clone();
        change(&mut other);
        first_difference(&other, &run).unwrap_or_default()
    };
    assert_eq!(first_difference(&run, &run), None);
    assert_eq!(differs(&|run| run[0][0][2] ^= 1 << 31), "call 0, rank 0, element 2: 80000003, 3 expected");
    assert_eq!(differs(&|run| run[1][0][0] = 6), "call 1, rank 0, element 0: 6, 5 expected");
    assert_eq!(differs(&|run| run[1][1].push(0)), "call 1, rank 1: 1 elements, 0 expected");
    assert_eq!(differs(&|run| drop(run[0].pop())), "call 0: 1 ranks, 2 expected");
    assert_eq!(differs(&|run| drop(run.pop())), "1 calls, 2 expected");
}

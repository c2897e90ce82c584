//! The all-gather: every byte of every parameter on every rank, and no other byte touched.

mod common;

use common::{GatherCase, group};
use std::sync::Arc;
use tide_gpu::gpu::sim::{SimGpu, SimOptions};
use tide_gpu::gpu::{DeviceBuffer, Gpu};
use tide_gpu::layout::{Dtype, Group, Parameter};
use tide_gpu::plan::Topology;
use tide_gpu::{
    AllGather, AllGatherOptions, Communicator, CommunicatorOptions, Path, RankGather, StockAllGather, TideError,
};

const PATHS: [Path; 2] = [Path::Device, Path::Host];

fn shapes() -> Vec<Vec<u64>> {
    vec![vec![6, 4], vec![7], vec![0, 3], vec![17, 3], vec![1, 6, 4], vec![2, 3]]
}

#[test]
fn any_node_count_gathers_every_byte() {
    for m in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13] {
        for l in [1, 2, 3] {
            for path in PATHS {
                let case = GatherCase { path, calls: 2, ..GatherCase::new(m, l, group(&shapes(), Dtype::Bf16)) };
                case.assert_gathers(|call| case.random_bytes(call as u64 + 1));
            }
        }
    }
}

#[test]
fn one_node_of_any_width_gathers_by_multicast_and_without() {
    for l in 1..=8 {
        for multicast in [true, false] {
            let mut case = GatherCase::new(1, l, group(&shapes(), Dtype::F32));
            case.sim.multicast = multicast;
            case.assert_gathers(|_| case.random_bytes(5));
        }
    }
}

#[test]
fn every_seed_of_the_simulator_gathers_alike() {
    for seed in 0..20 {
        for path in PATHS {
            let mut case = GatherCase { path, calls: 3, ..GatherCase::new(5, 2, group(&shapes(), Dtype::Bf16)) };
            case.sim.machine.seed = seed;
            case.sim.machine.preempt_one_in = 1 + seed as u32 % 4;
            case.sim.eager_steps_max = [0, 8, 100][seed as usize % 3];
            case.assert_gathers(|call| case.random_bytes(seed + call as u64));
        }
    }
}

/// The cases of the reduce-scatter, as all-gathers.
#[test]
fn t03_t05_t06_t07_t08_t30_t31_t50_gather_bytewise() {
    let cases: [(u32, u32, &[&[u64]]); 11] = [
        (2, 4, &[&[2, 3], &[8]]),
        (2, 4, &[&[5, 3], &[9, 2]]),
        (1, 4, &[&[17, 3]]),
        (2, 2, &[&[1, 6, 4], &[5]]),
        (2, 2, &[&[0, 7], &[4, 3], &[4, 0]]),
        (3, 2, &[&[6, 4], &[7]]),
        (5, 2, &[&[10, 4], &[7]]),
        (9, 2, &[&[18, 4], &[7]]),
        (4, 1, &[&[8, 3], &[3]]),
        (2, 6, &[&[12, 3], &[5]]),
        (2, 8, &[&[48, 8], &[5, 3], &[1]]),
    ];
    for (m, l, shapes) in cases {
        let shapes: Vec<Vec<u64>> = shapes.iter().map(|s| s.to_vec()).collect();
        let case = GatherCase::new(m, l, group(&shapes, Dtype::Bf16));
        case.assert_gathers(|_| case.random_bytes(3));
    }
}

#[test]
fn t37_a_thousand_calls_alternating_two_landings() {
    let gpu: Arc<dyn Gpu> = SimGpu::new(SimOptions::default());
    let topology = Topology::new(2, 2).unwrap();
    let comm = Communicator::new(Arc::clone(&gpu), topology, CommunicatorOptions::default()).unwrap();
    let new = |_| AllGather::new(&comm, &group(&[vec![9, 2]], Dtype::U8), AllGatherOptions::default()).unwrap();
    let mut landings: [AllGather; 2] = std::array::from_fn(new);
    for (which, ag) in landings.iter().enumerate() {
        for rank in topology.ranks() {
            let shard = ag.shard(rank, 0);
            gpu.upload(shard.address, &vec![(16 * which as u32 + rank.0) as u8; shard.bytes as usize]).unwrap();
        }
    }
    let ranks = vec![RankGather::default(); 4];
    for call in 0..1000 {
        landings[call % 2].enqueue(&ranks).unwrap();
        if call % 100 == 99 {
            comm.synchronize().unwrap();
        }
    }
    for (which, ag) in landings.iter().enumerate() {
        let mut got = [0; 18];
        gpu.download(ag.landing(common::rank(3), 0).address, &mut got).unwrap();
        // Nine rows of two bytes over four ranks: three rows each, the last rank none.
        let expected: Vec<u8> = (0..18).map(|i| 16 * which as u8 + (i / 6) as u8).collect();
        assert_eq!(got.as_slice(), expected);
    }
}

#[test]
fn t46_mixed_types_gather_bytewise_with_natural_alignment() {
    let parameters = [
        ("a", vec![4, 3], Dtype::Bf16),
        ("b", vec![5], Dtype::F32),
        ("c", vec![3, 2], Dtype::F16),
        ("d", vec![7], Dtype::U8),
    ];
    let mixed = parameters.map(|(n, s, d)| Parameter::new(n, s, d).unwrap());
    for path in PATHS {
        let case = GatherCase { path, ..GatherCase::new(2, 2, Group::new(mixed.to_vec()).unwrap()) };
        // Random bytes include NaN payloads.
        case.assert_gathers(|_| case.random_bytes(9));
        let shuffled = [3, 1, 0, 2].map(|i: usize| mixed[i].clone());
        let case = GatherCase { path, ..GatherCase::new(3, 2, Group::new(shuffled.to_vec()).unwrap()) };
        case.assert_gathers(|_| case.random_bytes(10));
    }
}

#[test]
fn t51_few_hardware_queues_do_not_deadlock() {
    for queues in [1, 2, 8, 32] {
        for path in PATHS {
            let mut case = GatherCase { path, calls: 2, ..GatherCase::new(3, 2, group(&shapes(), Dtype::Bf16)) };
            case.sim.hardware_queues = Some(queues);
            case.assert_gathers(|call| case.random_bytes(call as u64));
        }
    }
}

/// The fused cast: fp32 masters, gathered as bf16, rounded to nearest even.
#[test]
fn masters_are_cast_and_gathered() {
    let shapes = [vec![6_u64, 3], vec![5], vec![40]];
    for (m, l) in [(1, 2), (3, 2)] {
        for path in PATHS {
            let gpu: Arc<dyn Gpu> = SimGpu::new(SimOptions::default());
            let topology = Topology::new(m, l).unwrap();
            let comm =
                Communicator::new(Arc::clone(&gpu), topology, CommunicatorOptions { path, ..Default::default() })
                    .unwrap();
            let mut ag = AllGather::new(&comm, &group(&shapes, Dtype::Bf16), AllGatherOptions { cast: true }).unwrap();
            let mut rng = fastrand::Rng::with_seed(4);
            let mut value = |i: u64| match i % 7 {
                0 => f32::NAN,
                1 => f32::INFINITY,
                2 => f32::MAX,
                3 => f32::from_bits(0x3f80_8000 + 0x1_0000 * rng.u32(0..8)),
                _ => f32::from_bits(rng.u32(..)),
            };
            let whole: Vec<Vec<f32>> =
                shapes.iter().map(|s| (0..s.iter().product::<u64>()).map(&mut value).collect()).collect();
            let mut masters = Vec::new();
            for rank in topology.ranks() {
                for (p, data) in ag.layout().parameters().to_vec().iter().zip(&whole) {
                    let first = (u64::from(rank.0) * p.shard_elems) as usize;
                    let mut shard = vec![0.0; p.shard_elems as usize];
                    for (to, from) in shard.iter_mut().zip(data.iter().skip(first)) {
                        *to = *from;
                    }
                    masters.push(DeviceBuffer::from_slice(&gpu, 0, &shard).unwrap());
                }
            }
            let ranks: Vec<RankGather> = masters
                .chunks(shapes.len())
                .map(|m| RankGather { masters: m.iter().map(DeviceBuffer::slice).collect(), ready: None })
                .collect();
            ag.enqueue(&ranks).unwrap();
            ag.enqueue(&ranks).unwrap();
            comm.synchronize().unwrap();
            for rank in topology.ranks() {
                for (p, data) in whole.iter().enumerate() {
                    let mut got = vec![0_u16; data.len()];
                    gpu.download(ag.landing(rank, p).address, bytemuck::cast_slice_mut(&mut got)).unwrap();
                    let expected: Vec<u16> = data
                        .iter()
                        .map(|v| if v.is_nan() { 0x7fff } else { half::bf16::from_f32(*v).to_bits() })
                        .collect();
                    assert!(got == expected, "{m}x{l} {path:?} rank {} parameter {p}", rank.0);
                }
            }
        }
    }
}

#[test]
fn a_cast_to_anything_but_bf16_is_refused_by_name() {
    let gpu: Arc<dyn Gpu> = SimGpu::new(SimOptions::default());
    let comm = Communicator::new(gpu, Topology::new(1, 2).unwrap(), CommunicatorOptions::default()).unwrap();
    let error = AllGather::new(&comm, &group(&[vec![4]], Dtype::F16), AllGatherOptions { cast: true }).err().unwrap();
    assert!(matches!(&error, TideError::Usage(text) if text.contains("`p0` is f16")), "{error}");
}

#[test]
fn more_parameters_than_the_fast_path_takes_go_the_stock_way() {
    let gpu: Arc<dyn Gpu> = SimGpu::new(SimOptions::default());
    let topology = Topology::new(2, 2).unwrap();
    let comm = Communicator::new(Arc::clone(&gpu), topology, CommunicatorOptions::default()).unwrap();
    let many = group(&vec![vec![3, 2]; 300], Dtype::U16);
    let refusal = AllGather::new(&comm, &many, AllGatherOptions::default()).err().unwrap();
    assert!(matches!(&refusal, TideError::Unsupported { found, .. } if found == "300"), "{refusal}");
    let mut stock = StockAllGather::new(&comm, &many).unwrap();
    for rank in topology.ranks() {
        for p in 0..300 {
            let shard = stock.shard(rank, p);
            gpu.upload(shard.address, &vec![(p as u8).wrapping_add(rank.0 as u8); shard.bytes as usize]).unwrap();
        }
    }
    stock.enqueue().unwrap();
    stock.enqueue().unwrap();
    comm.synchronize().unwrap();
    for rank in topology.ranks() {
        for p in 0..300 {
            let mut got = [0; 12];
            gpu.download(stock.landing(rank, p).address, &mut got).unwrap();
            let expected: Vec<u8> = (0..12).map(|i| (p as u8).wrapping_add(i / 4)).collect();
            assert_eq!(got.as_slice(), expected);
        }
    }
}

/// Calls back to back, each with new shards and its landing copied out, all in stream order and without a host wait: a stage
/// or a landing that is overwritten too early shows.
#[test]
fn calls_queue_back_to_back_with_new_shards_each() {
    use tide_gpu::gpu::{Copy2d, DevicePtr, Priority};
    const CALLS: u64 = 4;
    for (m, l) in [(3, 2), (5, 1), (1, 3), (4, 2)] {
        for path in PATHS {
            for seed in 0..16 {
                let mut sim = SimOptions::default();
                sim.machine.seed = seed;
                sim.eager_steps_max = [0, 8, 64][seed as usize % 3];
                let gpu: Arc<dyn Gpu> = SimGpu::new(sim);
                let topology = Topology::new(m, l).unwrap();
                let n = u64::from(m * l);
                let options = CommunicatorOptions { path, stripe_bytes: 256, ..Default::default() };
                let comm = Communicator::new(Arc::clone(&gpu), topology, options).unwrap();
                let group = group(&[vec![n, 40]], Dtype::U8);
                let mut ag = AllGather::new(&comm, &group, AllGatherOptions::default()).unwrap();
                let streams: Vec<_> =
                    topology.ranks().map(|_| gpu.create_stream(0, Priority::Normal).unwrap()).collect();
                let value = |call: u64, rank: u64| (1 + call * n + rank) as u8;
                let rows: Vec<u8> = (0..CALLS * n).flat_map(|i| [value(i / n, i % n); 40]).collect();
                let sources = DeviceBuffer::from_slice(&gpu, 0, &rows).unwrap();
                let results = DeviceBuffer::new(&gpu, 0, CALLS * n * n * 40).unwrap();
                for call in 0..CALLS {
                    let mut ranks = Vec::new();
                    for rank in topology.ranks() {
                        let stream = streams[rank.0 as usize];
                        let row = (call * n + u64::from(rank.0)) * 40;
                        let source = DevicePtr(sources.address().0 + row);
                        gpu.copy(stream, &Copy2d::flat(ag.shard(rank, 0).address, source, 40)).unwrap();
                        ranks.push(RankGather { masters: vec![], ready: Some(gpu.record(stream).unwrap()) });
                    }
                    let events = ag.enqueue(&ranks).unwrap();
                    for (rank, events) in topology.ranks().zip(events) {
                        let stream = streams[rank.0 as usize];
                        gpu.wait_event(stream, events.done).unwrap();
                        let row = (call * n + u64::from(rank.0)) * n * 40;
                        let to = DevicePtr(results.address().0 + row);
                        gpu.copy(stream, &Copy2d::flat(to, ag.landing(rank, 0).address, n * 40)).unwrap();
                        gpu.wait_event(stream, events.read).unwrap();
                    }
                }
                comm.synchronize().unwrap();
                for stream in streams {
                    gpu.synchronize(stream, 1 << 40).unwrap();
                }
                let got: Vec<u8> = results.to_vec().unwrap();
                for (i, whole) in got.chunks(n as usize * 40).enumerate() {
                    let expected = &rows[i / n as usize * n as usize * 40..][..n as usize * 40];
                    assert!(
                        whole == expected,
                        "{m}x{l} {path:?} TIDE_SEED={seed}: call {} of rank {}",
                        i as u64 / n,
                        i as u64 % n
                    );
                }
            }
        }
    }
}

//! Several users at once: gates, communicators that are dropped with work in flight, poisoned ones.

mod common;

use common::{Case, assert_close, int_fill, reference};
use std::sync::Arc;
use std::time::Duration;
use tide_gpu::gpu::sim::{SimGpu, SimOptions};
use tide_gpu::gpu::{DeviceBuffer, Gpu, Priority};
use tide_gpu::layout::Dtype;
use tide_gpu::plan::Topology;
use tide_gpu::{
    AllGather, AllGatherOptions, Communicator, CommunicatorOptions, GradientDtype, Path, RankGather, RankGradients,
    ReduceScatter, Scale, StockAllGather, StockReduceScatter, TideError,
};

struct Buffers {
    ranks: Vec<RankGradients>,
    outs: Vec<DeviceBuffer>,
    _gradients: Vec<DeviceBuffer>,
}

fn buffers(case: &Case, comm: &Communicator, rs: &ReduceScatter) -> Buffers {
    let gpu = comm.gpu();
    let (mut ranks, mut outs, mut owned) = (Vec::new(), Vec::new(), Vec::new());
    for rank in 0..case.rank_count() {
        let mut gradients = Vec::new();
        for data in int_fill(&case.shapes, rank) {
            let buffer = DeviceBuffer::from_slice(gpu, 0, &data.unwrap()).unwrap();
            gradients.push(Some(buffer.slice()));
            owned.push(buffer);
        }
        let out = DeviceBuffer::new(gpu, 0, rs.output_bytes()).unwrap();
        ranks.push(RankGradients { gradients, out: out.slice(), ready: None });
        outs.push(out);
    }
    Buffers { ranks, outs, _gradients: owned }
}

fn case(path: Path) -> Case {
    Case { path, dtype: GradientDtype::F32, ..Case::new(3, 2, &[&[7, 5], &[3]]) }
}

/// Reads go on while the gate is shut, the network phase does not; once the gate opens the sums are right.
#[test]
fn a_gate_holds_the_network_phase_and_not_the_reads() {
    for path in [Path::Device, Path::Host] {
        let case = case(path);
        let comm = case.communicator();
        let gpu = Arc::clone(comm.gpu());
        let mut rs = ReduceScatter::new(&comm, &case.group(), case.dtype, &case.options).unwrap();
        let buffers = buffers(&case, &comm, &rs);
        // The gate opens when a word is written.
        let word = DeviceBuffer::from_slice(&gpu, 0, &[0_u64]).unwrap();
        let stream = gpu.create_stream(0, Priority::Normal).unwrap();
        let wait = tide_gpu::gpu::MemoryWait {
            address: word.address(),
            value: 1,
            timeout_ns: u64::MAX,
            tag: bytemuck::Zeroable::zeroed(),
        };
        gpu.wait_value(stream, &wait).unwrap();
        let gate = gpu.record(stream).unwrap();
        let events = rs.enqueue_behind(&buffers.ranks, Scale::default(), &[Some(gate); 6]).unwrap();
        for events in &events {
            let mut looks = 0;
            while !gpu.is_complete(events.read).unwrap() {
                looks += 1;
                assert!(looks < 1_000_000, "reads wait for the gate");
            }
        }
        for _ in 0..20_000 {
            assert!(events.iter().all(|e| !gpu.is_complete(e.done).unwrap()), "the gate is shut");
        }
        let opener = gpu.create_stream(0, Priority::Normal).unwrap();
        gpu.write_value(opener, word.address(), 1).unwrap();
        comm.synchronize().unwrap();
        let outs: Vec<Vec<f32>> = buffers.outs.iter().map(|o| o.to_vec().unwrap()).collect();
        let all: Vec<_> = (0..6).map(|r| int_fill(&case.shapes, r)).collect();
        assert_close(&outs, &reference(&case.shapes, &all, Scale::default(), 0.0), "behind a gate");
    }
}

/// Dropped with calls in flight, everything is waited for and freed; another communicator on the same GPU goes on.
#[test]
fn dropping_with_work_in_flight_waits_for_it_and_leaves_nothing() {
    for seed in 0..8 {
        let mut sim = SimOptions::default();
        sim.machine.seed = seed;
        sim.eager_steps_max = seed as u32 % 3;
        let gpu: Arc<dyn Gpu> = SimGpu::new(sim);
        let options = CommunicatorOptions { stripe_bytes: 256, ..Default::default() };
        let new = || Communicator::new(Arc::clone(&gpu), Topology::new(3, 2).unwrap(), options.clone()).unwrap();
        let case = case(Path::Device);
        let kept = new();
        let mut kept_rs = ReduceScatter::new(&kept, &case.group(), case.dtype, &case.options).unwrap();
        let kept_buffers = buffers(&case, &kept, &kept_rs);
        let before = gpu.usage_bytes(0).0;
        {
            let dropped = new();
            let mut rs = ReduceScatter::new(&dropped, &case.group(), case.dtype, &case.options).unwrap();
            let mut ag =
                AllGather::new(&dropped, &common::group(&case.shapes, Dtype::Bf16), AllGatherOptions::default())
                    .unwrap();
            let buffers = buffers(&case, &dropped, &rs);
            for _ in 0..3 {
                rs.enqueue(&buffers.ranks, Scale::default()).unwrap();
                ag.enqueue(&vec![RankGather::default(); 6]).unwrap();
                kept_rs.enqueue(&kept_buffers.ranks, Scale::default()).unwrap();
            }
            // In the order that a careless caller has: the communicator first.
            drop(dropped);
            drop(ag);
            drop(rs);
        }
        assert_eq!(gpu.usage_bytes(0).0, before, "seed {seed}: something was not freed");
        kept.synchronize().unwrap();
        let outs: Vec<Vec<f32>> = kept_buffers.outs.iter().map(|o| o.to_vec().unwrap()).collect();
        let all: Vec<_> = (0..6).map(|r| int_fill(&case.shapes, r)).collect();
        assert_close(&outs, &reference(&case.shapes, &all, Scale::default(), 0.0), &format!("seed {seed}"));
    }
}

#[test]
fn a_poisoned_communicator_refuses_every_call_and_others_go_on() {
    // Words only grow, so that a lost one is often made good by the next: some are not.
    let found = (0..200).filter(|lost| poison_and_go_on(*lost)).take(3).count();
    assert_eq!(found, 3, "three of the lost signals stop the call");
}

/// Loses a signal; whether that was a fault. If so, everything on the communicator refuses, and another goes on.
fn poison_and_go_on(lost: u64) -> bool {
    let mut broken = case(Path::Device);
    broken.comm.timeout = Duration::from_millis(1);
    broken.sim.machine.lose_signal = Some(lost);
    let comm = broken.communicator();
    let group = broken.group();
    let mut rs = ReduceScatter::new(&comm, &group, broken.dtype, &broken.options).unwrap();
    let mut ag = AllGather::new(&comm, &group, AllGatherOptions::default()).unwrap();
    let mut stock = StockReduceScatter::new(&comm, &group, broken.dtype).unwrap();
    let mut stock_gather = StockAllGather::new(&comm, &group).unwrap();
    let buffers = buffers(&broken, &comm, &rs);
    rs.enqueue(&buffers.ranks, Scale::default()).unwrap();
    let Err(fault) = comm.synchronize() else { return false };
    assert!(matches!(fault, TideError::FailStop(_)), "{fault}");
    let poisoned = |result: Result<(), TideError>| {
        assert!(matches!(&result, Err(TideError::Poisoned { first }) if *first == fault.to_string()), "{result:?}");
    };
    poisoned(rs.enqueue(&buffers.ranks, Scale::default()).map(drop));
    poisoned(ag.enqueue(&vec![RankGather::default(); 6]).map(drop));
    poisoned(stock.enqueue(&buffers.ranks, Scale::default()).map(drop));
    poisoned(stock_gather.enqueue().map(drop));
    poisoned(comm.synchronize());
    poisoned(ReduceScatter::new(&comm, &group, broken.dtype, &broken.options).map(drop));
    poisoned(AllGather::new(&comm, &group, AllGatherOptions::default()).map(drop));
    // Dropping a poisoned one neither hangs nor panics, and another on the same GPUs works.
    let gpu = Arc::clone(comm.gpu());
    let topology = comm.topology();
    drop((rs, ag, stock, stock_gather, comm));
    let other = Communicator::new(gpu, topology, CommunicatorOptions::default()).unwrap();
    let mut rs = ReduceScatter::new(&other, &group, broken.dtype, &broken.options).unwrap();
    rs.enqueue(&buffers.ranks, Scale::default()).unwrap();
    other.synchronize().unwrap();
    true
}

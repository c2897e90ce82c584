//! Several users at once: gates, communicators that are dropped with work in flight, poisoned ones.

mod common;

use bytemuck::Zeroable;
use common::{Case, assert_close, int_fill, reference};
use std::sync::Arc;
use std::time::Duration;
use tide_gpu::gpu::sim::{SimGpu, SimOptions};
use tide_gpu::gpu::{Copy2d, DeviceBuffer, Event, Fill2d, Gpu, MemoryWait, Priority, Stream, SyncOutcome};
use tide_gpu::layout::Dtype;
use tide_gpu::plan::Topology;
use tide_gpu::{
    AllGather, AllGatherOptions, Communicator, CommunicatorOptions, GradientDtype, Path, RankEvents, RankGather,
    RankGradients, ReduceScatter, Scale, StockAllGather, StockReduceScatter, TideError,
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

/// A user's own stream that waits until a word is written.
struct Gate {
    gpu: Arc<dyn Gpu>,
    word: DeviceBuffer,
    stream: Stream,
    /// Completes once the gate is open.
    opened: Event,
}

impl Gate {
    fn new(gpu: &Arc<dyn Gpu>, timeout_ns: u64) -> Self {
        let word = DeviceBuffer::from_slice(gpu, 0, &[0_u64]).unwrap();
        let stream = gpu.create_stream(0, Priority::Normal).unwrap();
        let wait = MemoryWait { address: word.address(), value: 1, timeout_ns, tag: Zeroable::zeroed() };
        gpu.wait_value(stream, &wait).unwrap();
        let opened = gpu.record(stream).unwrap();
        Self { gpu: Arc::clone(gpu), word, stream, opened }
    }

    fn open(&self) {
        let opener = self.gpu.create_stream(0, Priority::Normal).unwrap();
        self.gpu.write_value(opener, self.word.address(), 1).unwrap();
    }
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
        let gate = Gate::new(&gpu, u64::MAX);
        let events = rs.enqueue_behind(&buffers.ranks, Scale::default(), &[Some(gate.opened); 6]).unwrap();
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
        gate.open();
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

/// What a poisoned collective has in flight is taken back with it, also a kernel that goes on after all: it touches nothing that
/// was freed, and others go on.
#[test]
fn a_poisoned_collective_can_be_dropped_while_its_kernels_run() {
    let mut dropped_while_running = 0;
    for path in [Path::Device, Path::Host] {
        for seed in 0..12 {
            let mut case = case(path).seed(seed);
            case.comm.timeout = Duration::from_millis(5);
            let comm = case.communicator();
            let gpu = Arc::clone(comm.gpu());
            let other = Communicator::new(Arc::clone(&gpu), comm.topology(), case.comm.clone()).unwrap();
            let mut kept = ReduceScatter::new(&other, &case.group(), case.dtype, &case.options).unwrap();
            let kept_buffers = buffers(&case, &other, &kept);
            let before = gpu.usage_bytes(0).0;
            let mut rs = ReduceScatter::new(&comm, &case.group(), case.dtype, &case.options).unwrap();
            let given = buffers(&case, &comm, &rs);
            let gate = Gate::new(&gpu, 1 << 40);
            let events = rs.enqueue_behind(&given.ranks, Scale::default(), &[Some(gate.opened); 6]).unwrap();
            comm.synchronize().unwrap_err();
            gate.open();
            for _ in 0..40 * seed {
                gpu.is_complete(gate.opened).unwrap();
            }
            let is_running = |e: &RankEvents| !gpu.is_complete(e.done).unwrap();
            dropped_while_running += u32::from(gpu.is_complete(gate.opened).unwrap() && events.iter().any(is_running));
            drop((rs, given));
            kept.enqueue(&kept_buffers.ranks, Scale::default()).unwrap();
            other.synchronize().unwrap_or_else(|e| panic!("{path:?} seed {seed}: {e}"));
            let outs: Vec<Vec<f32>> = kept_buffers.outs.iter().map(|o| o.to_vec().unwrap()).collect();
            let all: Vec<_> = (0..6).map(|r| int_fill(&case.shapes, r)).collect();
            assert_close(
                &outs,
                &reference(&case.shapes, &all, Scale::default(), 0.0),
                &format!("{path:?} seed {seed}"),
            );
            drop(gate);
            assert_eq!(gpu.usage_bytes(0).0, before, "{path:?} seed {seed}: something was not freed");
        }
    }
    assert!(dropped_while_running > 8, "{dropped_while_running} drops came while kernels ran");
}

/// Memory that is freed under work of a stream that was not given up is still a fault.
#[test]
fn freed_memory_is_a_fault_for_streams_that_live() {
    // Nothing goes on while the host enqueues, so that the fault comes where it is looked for.
    let gpu: Arc<dyn Gpu> = SimGpu::new(SimOptions { eager_steps_max: 0, ..Default::default() });
    let gate = Gate::new(&gpu, u64::MAX);
    let [from, to] = [0; 2].map(|_| DeviceBuffer::from_slice(&gpu, 0, &[1_u64]).unwrap());
    let streams = [0; 2].map(|_| gpu.create_stream(0, Priority::Normal).unwrap());
    for stream in streams {
        gpu.wait_event(stream, gate.opened).unwrap();
        gpu.copy(stream, &Copy2d::flat(to.address(), from.address(), 8)).unwrap();
    }
    drop(from);
    gpu.destroy_stream(streams[0]);
    gpu.synchronize(streams[0], 1).unwrap();
    gate.open();
    let error = gpu.synchronize(streams[1], 1).unwrap_err().to_string();
    assert!(error.contains("illegal address in row 0 of a copy"), "{error}");
}

/// A communicator that stalls tells of its own waits and records, whatever has failed before it on the same GPUs.
#[test]
fn a_fault_stays_with_its_communicator() {
    for path in [Path::Device, Path::Host] {
        let gpu: Arc<dyn Gpu> = SimGpu::new(SimOptions::default());
        let options = CommunicatorOptions { path, timeout: Duration::from_millis(5), ..Default::default() };
        let new = |m, l| Communicator::new(Arc::clone(&gpu), Topology::new(m, l).unwrap(), options.clone()).unwrap();
        let case = Case { path, dtype: GradientDtype::F32, ..Case::new(2, 1, &[&[7, 5], &[3]]) };
        let (first, second) = (new(3, 2), new(2, 1));
        let gate = Gate::new(&gpu, 1 << 40);
        let mut ag = AllGather::new(&first, &case.group(), AllGatherOptions::default()).unwrap();
        let mut ranks = vec![RankGather::default(); 6];
        ranks[5].ready = Some(gate.opened);
        ag.enqueue(&ranks).unwrap();
        let error = first.synchronize().unwrap_err().to_string();
        assert!(error.contains("ag seq=0"), "{error}");
        // The second one is healthy, then has a fault of its own: one of its ranks is behind the gate, another waits for it.
        let mut rs = ReduceScatter::new(&second, &case.group(), case.dtype, &case.options).unwrap();
        let given = buffers(&case, &second, &rs);
        rs.enqueue(&given.ranks, Scale::default()).unwrap();
        second.synchronize().unwrap();
        let mut behind = given.ranks.clone();
        behind[1].ready = Some(gate.opened);
        rs.enqueue(&behind, Scale::default()).unwrap();
        let error = second.synchronize().unwrap_err();
        println!("{path:?}: {error}");
        assert!(matches!(&error, TideError::FailStop(fault) if fault.epoch == 1 && fault.rank < 2), "{error}");
        assert!(error.to_string().contains("rs seq=1"), "{error}");
    }
}

/// Where none of its own waits ran out, the communicator blames none, but says that others hold it up.
#[test]
fn a_communicator_that_others_hold_up_says_so() {
    let gpu: Arc<dyn Gpu> = SimGpu::new(SimOptions::default());
    let comm =
        Communicator::new(Arc::clone(&gpu), Topology::new(1, 1).unwrap(), CommunicatorOptions::default()).unwrap();
    let case = Case { dtype: GradientDtype::F32, ..Case::new(1, 1, &[&[7, 5]]) };
    let mut rs = ReduceScatter::new(&comm, &case.group(), case.dtype, &case.options).unwrap();
    let mut given = buffers(&case, &comm, &rs);
    let gate = Gate::new(&gpu, 3_000_000);
    given.ranks[0].ready = Some(gate.opened);
    rs.enqueue(&given.ranks, Scale::default()).unwrap();
    let error = comm.synchronize().unwrap_err();
    let text = error.to_string();
    let parts = ["held up by work outside it", "0.003 s", "0/1"];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    assert!(matches!(comm.check(), Err(TideError::Poisoned { first }) if first == text));
}

/// A wait without end holds its stream up and nothing else; that it can never hold is found at once.
#[test]
fn a_wait_without_end_that_never_holds_is_a_stall() {
    for timeout_ns in [u64::MAX, u64::MAX - 1] {
        let sim = SimGpu::new(SimOptions::default());
        let gpu: Arc<dyn Gpu> = sim.clone();
        let gate = Gate::new(&gpu, timeout_ns);
        let outcome = gpu.synchronize(gate.stream, 1).unwrap();
        assert!(format!("{outcome:?}").contains("expected: 1, seen: Some(0)"), "{outcome:?}");
        // Time has not run away: others still have deadlines, and go on.
        assert!(sim.now_ns() < 1 << 40);
        let bounded = Gate::new(&gpu, 1_000_000);
        assert!(matches!(gpu.synchronize(bounded.stream, 1).unwrap(), SyncOutcome::Stalled { .. }));
        assert!((1_000_000..1 << 40).contains(&sim.now_ns()));
        gate.open();
        assert_eq!(gpu.synchronize(gate.stream, 1).unwrap(), SyncOutcome::Complete);
    }
}

/// What `read` promises: behind it the gradients may be overwritten, on every rank, whoever else has still to come.
#[test]
fn gradients_may_be_overwritten_behind_the_read_event() {
    for seed in 0..40 {
        let mut case = Case::new(2, 2, &[&[37, 24], &[129]]).seed(seed);
        case.dtype = GradientDtype::F32;
        case.path = [Path::Device, Path::Host][seed as usize % 2];
        case.sim.eager_steps_max = [0, 8, 64][seed as usize % 3];
        let comm = case.communicator();
        let gpu = Arc::clone(comm.gpu());
        let mut rs = ReduceScatter::new(&comm, &case.group(), case.dtype, &case.options).unwrap();
        let held = buffers(&case, &comm, &rs);
        let events = rs.enqueue(&held.ranks, Scale::default()).unwrap();
        for (given, event) in held.ranks.iter().zip(&events) {
            let user = gpu.create_stream(0, Priority::Normal).unwrap();
            gpu.wait_event(user, event.read).unwrap();
            for gradient in given.gradients.iter().flatten() {
                let (destination, bytes) = (gradient.address, gradient.bytes);
                let fill = Fill2d { destination, pitch_bytes: bytes, width_bytes: bytes, rows: 1, value: 0xff };
                gpu.fill(user, &fill).unwrap();
            }
        }
        comm.synchronize().unwrap();
        let all: Vec<_> = (0..case.rank_count()).map(|rank| int_fill(&case.shapes, rank)).collect();
        let outs: Vec<Vec<f32>> = held.outs.iter().map(|o| o.to_vec().unwrap()).collect();
        assert_close(&outs, &reference(&case.shapes, &all, Scale::default(), 0.0), &format!("seed {seed}"));
    }
}

/// A bank is free again once its last call has sent its blocks: of three calls, the first one's network phase starts last.
#[test]
fn a_call_does_not_sum_into_a_bank_that_is_still_being_sent() {
    for seed in 0..12 {
        let mut case = Case::new(3, 2, &[&[37, 24], &[129]]).seed(seed);
        case.dtype = GradientDtype::F32;
        case.path = [Path::Device, Path::Host][seed as usize % 2];
        let comm = case.communicator();
        let gpu = Arc::clone(comm.gpu());
        let mut rs = ReduceScatter::new(&comm, &case.group(), case.dtype, &case.options).unwrap();
        let gate = Gate::new(&gpu, 1 << 50);
        let calls: Vec<Buffers> = (0..4).map(|_| buffers(&case, &comm, &rs)).collect();
        for (call, held) in calls.iter().enumerate() {
            // Each call's sums are its own: a bank that was summed into too early shows.
            let scale = Scale { alpha: 1.0 + call as f32, accumulate: false };
            for (rank, given) in held.ranks.iter().enumerate() {
                for (p, gradient) in given.gradients.iter().flatten().enumerate() {
                    let values = vec![(call * 8 + rank + p) as f32; (gradient.bytes / 4) as usize];
                    gpu.upload(gradient.address, bytemuck::cast_slice(&values)).unwrap();
                }
            }
            let gates = vec![(call == 0).then_some(gate.opened); held.ranks.len()];
            rs.enqueue_behind(&held.ranks, scale, &gates).unwrap();
        }
        gate.open();
        comm.synchronize().unwrap();
        for (call, held) in calls.iter().enumerate() {
            let of_rank = |rank: usize| {
                let of = |p: usize| {
                    let elems = case.shapes[p].iter().product::<u64>() as usize;
                    Some(vec![(call * 8 + rank + p) as f32; elems])
                };
                (0..case.shapes.len()).map(of).collect()
            };
            let all: Vec<_> = (0..case.rank_count() as usize).map(of_rank).collect();
            let outs: Vec<Vec<f32>> = held.outs.iter().map(|o| o.to_vec().unwrap()).collect();
            let scale = Scale { alpha: 1.0 + call as f32, accumulate: false };
            let expected = reference(&case.shapes, &all, scale, 0.0);
            assert_close(&outs, &expected, &format!("seed {seed} call {call}"));
        }
    }
}

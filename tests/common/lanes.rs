//! A driver of lanes: calls back to back on simulated GPUs or on those that are given, and what they leave.

use super::{Gradients, bits, gpu_or_sim, group, normal, upload};
use std::fmt::Debug;
use std::sync::Arc;
use tide_gpu::gpu::sim::SimOptions;
use tide_gpu::gpu::{Copy2d, DeviceBuffer, DeviceSlice, Fill2d, Gpu, Priority, Stream};
use tide_gpu::layout::{Dtype, Group, Parameter};
use tide_gpu::plan::{Rank, Topology};
use tide_gpu::{
    Communicator, CommunicatorOptions, GradientDtype, LaneAllGather, LaneOptions, LaneReduceScatter, Path, RankEvents,
    RankGradients, Scale,
};

pub const PATHS: [Path; 2] = [Path::Device, Path::Host];

/// Simulated GPUs of a seed, which draws how far the host runs ahead and how lazy streams and launches are.
pub fn sim(seed: u64) -> SimOptions {
    let mut sim = SimOptions { eager_steps_max: [0, 8, 200][seed as usize % 3], ..Default::default() };
    sim.machine.seed = seed;
    sim.machine.preempt_one_in = 1 + seed as u32 % 4;
    sim.machine.lazy_turns_max = [0, 50, 1000][(seed as usize / 3) % 3];
    sim
}

/// A lane to run calls on.
#[derive(Clone)]
pub struct Lane {
    pub nodes: u32,
    /// The GPUs to run on; `None` for simulated ones as `sim` says.
    pub gpu: Option<Arc<dyn Gpu>>,
    pub sim: SimOptions,
    pub comm: CommunicatorOptions,
}

impl Lane {
    pub fn new(nodes: u32, path: Path, seed: u64) -> Self {
        // Small stripes, so that small blocks still use several contexts.
        let comm = CommunicatorOptions { path, stripe_bytes: 64, context_count: 3, ..Default::default() };
        Self { nodes, gpu: None, sim: sim(seed), comm }
    }

    /// The same on these GPUs.
    pub fn on(&self, gpu: &Arc<dyn Gpu>) -> Self {
        Self { gpu: Some(Arc::clone(gpu)), ..self.clone() }
    }

    pub fn communicator(&self) -> Communicator {
        let gpu = gpu_or_sim(self.gpu.as_ref(), &self.sim);
        Communicator::new(gpu, Topology::new(self.nodes, 1).unwrap(), self.comm.clone()).unwrap()
    }
}

/// What every call left on every rank.
pub type Left<T> = Vec<Vec<Vec<T>>>;

/// Every parameter's bytes, whole.
pub type Whole = Vec<Vec<u8>>;

pub fn random_bytes(group: &Group, seed: u64) -> Whole {
    let mut rng = fastrand::Rng::with_seed(seed);
    let bytes = |p: &Parameter| p.shape().iter().product::<u64>() * p.dtype().bytes();
    group.parameters().iter().map(|p| (0..bytes(p)).map(|_| rng.u8(..)).collect()).collect()
}

/// All of a rank's landings, one after the other.
pub fn flat(whole: &Whole) -> Vec<u8> {
    whole.concat()
}

/// Calls back to back, without a look from the host. Between two calls each rank's stream takes the landings away, overwrites
/// them whole and writes the next shards. Gives what each call left, per rank, as [`flat`].
pub fn try_gather(lane: &Lane, group: &Group, calls: &[Whole]) -> tide_gpu::Result<Left<u8>> {
    let comm = lane.communicator();
    let gpu = Arc::clone(comm.gpu());
    let device = comm.device_of(Rank(0));
    let mut ag = LaneAllGather::new(&comm, group)?;
    let ranks: Vec<Rank> = comm.topology().ranks().collect();
    let parameters = 0..group.parameters().len();
    let user: Vec<Stream> =
        ranks.iter().map(|_| gpu.create_stream(device, Priority::Normal)).collect::<Result<_, _>>()?;
    let mut kept = Vec::new();
    let mut taken: Vec<Vec<Vec<DeviceBuffer>>> = Vec::new();
    let mut events: Option<Vec<RankEvents>> = None;
    for whole in calls {
        let mut ready = Vec::new();
        for &rank in &ranks {
            let stream = user[rank.0 as usize];
            if let Some(events) = &events {
                gpu.wait_event(stream, events[rank.0 as usize].read)?;
                gpu.wait_event(stream, events[rank.0 as usize].done)?;
            }
            for p in parameters.clone() {
                let landing = ag.landing(rank, p);
                if let Some(previous) = taken.last() {
                    take(&gpu, stream, &previous[rank.0 as usize][p], landing)?;
                }
                let (destination, bytes) = (landing.address, landing.bytes);
                let fill = Fill2d {
                    destination,
                    pitch_bytes: bytes,
                    width_bytes: bytes,
                    rows: u64::from(bytes > 0),
                    value: 7,
                };
                gpu.fill(stream, &fill)?;
                let shard = ag.shard(rank, p);
                let first = (u64::from(rank.0) * shard.bytes).min(whole[p].len() as u64);
                let live = shard.bytes.min(whole[p].len() as u64 - first);
                let source = DeviceBuffer::from_slice(&gpu, device, &whole[p][first as usize..][..live as usize])?;
                if live > 0 {
                    gpu.copy(stream, &Copy2d::flat(shard.address, source.address(), live))?;
                }
                kept.push(source);
            }
            ready.push(Some(gpu.record(stream)?));
        }
        events = Some(ag.enqueue(&ready)?);
        let buffer = |rank: Rank| parameters.clone().map(move |p| (rank, p));
        let buffers = ranks.iter().map(|&r| {
            buffer(r)
                .map(|(r, p)| DeviceBuffer::new(&gpu, device, ag.landing(r, p).bytes))
                .collect::<Result<Vec<_>, _>>()
        });
        taken.push(buffers.collect::<Result<_, _>>()?);
    }
    for &rank in &ranks {
        let stream = user[rank.0 as usize];
        gpu.wait_event(stream, events.as_ref().unwrap()[rank.0 as usize].done)?;
        for p in parameters.clone() {
            take(&gpu, stream, &taken.last().unwrap()[rank.0 as usize][p], ag.landing(rank, p))?;
        }
    }
    comm.synchronize()?;
    user.iter().try_for_each(|s| gpu.synchronize(*s, u64::MAX).map(|_| ()))?;
    assert_eq!(ag.epoch(), calls.len() as u64);
    let bytes = |b: &Vec<DeviceBuffer>| b.iter().map(|b| b.to_vec::<u8>().unwrap()).collect::<Vec<_>>().concat();
    Ok(taken.iter().map(|call| call.iter().map(bytes).collect()).collect())
}

pub fn take(gpu: &Arc<dyn Gpu>, stream: Stream, to: &DeviceBuffer, landing: DeviceSlice) -> tide_gpu::Result<()> {
    match landing.bytes {
        0 => Ok(()),
        bytes => gpu.copy(stream, &Copy2d::flat(to.address(), landing.address, bytes)),
    }
}

/// Rows in whole 16 bytes, as experts have them, and such that do not.
pub fn gather_groups() -> [Group; 4] {
    let aligned = group(&[vec![26, 8], vec![13, 16], vec![40, 24]], Dtype::Bf16);
    let ragged = group(&[vec![6, 4], vec![7], vec![0, 3], vec![17, 3], vec![1, 6, 4], vec![2, 3]], Dtype::Bf16);
    let types = [("a", vec![27, 16], Dtype::U8), ("b", vec![5], Dtype::F32), ("c", vec![30, 8], Dtype::F16)];
    let mixed = types.map(|(n, s, d)| Parameter::new(n, s, d).unwrap());
    [aligned, ragged, Group::new(mixed.to_vec()).unwrap(), group(&[vec![0, 7], vec![4, 0]], Dtype::F32)]
}

#[derive(Clone)]
pub struct Sum {
    pub lane: Lane,
    pub shapes: Vec<Vec<u64>>,
    pub dtype: GradientDtype,
    pub options: LaneOptions,
    pub scale: Scale,
}

impl Sum {
    pub fn new(lane: Lane, shapes: &[&[u64]]) -> Self {
        let shapes = shapes.iter().map(|s| s.to_vec()).collect();
        Self { lane, shapes, dtype: GradientDtype::Bf16, options: LaneOptions::default(), scale: Scale::default() }
    }

    pub fn group(&self) -> Group {
        group(&self.shapes, if self.dtype == GradientDtype::Bf16 { Dtype::Bf16 } else { Dtype::F32 })
    }

    /// Calls back to back, without a look from the host, each into its own output, which holds `previous`; gives every call's
    /// outputs. Gradients and previous outputs come to be in a stream, and gradients go as soon as they are read.
    pub fn try_run(&self, calls: &[Vec<Gradients>], previous: f32) -> tide_gpu::Result<Left<f32>> {
        let comm = self.lane.communicator();
        let gpu = Arc::clone(comm.gpu());
        let device = comm.device_of(Rank(0));
        let mut rs = LaneReduceScatter::new(&comm, &self.group(), self.dtype, &self.options)?;
        let elems = rs.output_bytes() as usize / 4;
        // What comes before a call does not wait for what goes after one.
        let (user, afterwards) =
            (gpu.create_stream(device, Priority::Normal)?, gpu.create_stream(device, Priority::Normal)?);
        let (mut kept, mut outs) = (Vec::new(), Vec::new());
        for all in calls {
            let mut ranks = Vec::new();
            let mut call_outs = Vec::new();
            let late = |source: DeviceBuffer, kept: &mut Vec<DeviceBuffer>| -> tide_gpu::Result<DeviceBuffer> {
                let buffer = DeviceBuffer::new(&gpu, device, source.slice().bytes)?;
                if source.slice().bytes > 0 {
                    gpu.copy(user, &Copy2d::flat(buffer.address(), source.address(), source.slice().bytes))?;
                }
                kept.push(source);
                Ok(buffer)
            };
            for given in all {
                let mut gradients = Vec::new();
                for gradient in given {
                    let buffer = match gradient {
                        Some(gradient) => Some(late(upload(&gpu, device, gradient, self.dtype)?, &mut kept)?),
                        None => None,
                    };
                    gradients.push(buffer.as_ref().map(DeviceBuffer::slice));
                    kept.extend(buffer);
                }
                let out = late(DeviceBuffer::from_slice(&gpu, device, &vec![previous; elems])?, &mut kept)?;
                ranks.push(RankGradients { gradients, out: out.slice(), ready: Some(gpu.record(user)?) });
                call_outs.push(out);
            }
            let events = rs.enqueue(&ranks, self.scale)?;
            let user = afterwards;
            for (events, given) in events.iter().zip(&ranks) {
                gpu.wait_event(user, events.read)?;
                for slice in given.gradients.iter().flatten().filter(|s| s.bytes > 0) {
                    let (destination, bytes) = (slice.address, slice.bytes);
                    let fill = Fill2d { destination, pitch_bytes: bytes, width_bytes: bytes, rows: 1, value: 0xff };
                    gpu.fill(user, &fill)?;
                }
            }
            outs.push(call_outs);
        }
        comm.synchronize()?;
        gpu.synchronize(afterwards, u64::MAX)?;
        outs.iter().map(|call| call.iter().map(DeviceBuffer::to_vec).collect()).collect()
    }

    pub fn random(&self, call_count: u64, seed: u64) -> Vec<Vec<Gradients>> {
        let of = |call: u64| (0..self.lane.nodes).map(|r| normal(&self.shapes, 10 * seed + call, r)).collect();
        (0..call_count).map(of).collect()
    }
}

pub const SHAPES: [&[&[u64]]; 6] = [
    &[&[97, 6], &[40], &[7, 3], &[256, 4], &[2, 2, 5]],
    &[&[6, 4], &[7], &[17, 3], &[1, 6, 4], &[2, 3]],
    &[&[1]],
    &[&[0, 7], &[4, 3], &[4, 0]],
    &[&[0, 7]],
    &[&[64, 32]],
];

/// Says where two runs differ first.
pub fn first_difference<T: PartialEq + Debug>(got: &[Vec<Vec<T>>], expected: &[Vec<Vec<T>>]) -> Option<String> {
    if got.len() != expected.len() {
        return Some(format!("{} calls, {} expected", got.len(), expected.len()));
    }
    for (call, (got, expected)) in got.iter().zip(expected).enumerate() {
        if got.len() != expected.len() {
            return Some(format!("call {call}: {} ranks, {} expected", got.len(), expected.len()));
        }
        for (rank, (got, expected)) in got.iter().zip(expected).enumerate() {
            let at = format!("call {call}, rank {rank}");
            if got.len() != expected.len() {
                return Some(format!("{at}: {} elements, {} expected", got.len(), expected.len()));
            }
            if let Some(i) = (0..got.len()).find(|&i| got[i] != expected[i]) {
                return Some(format!("{at}, element {i}: {:x?}, {:x?} expected", got[i], expected[i]));
            }
        }
    }
    None
}

/// Node counts of parity: a pair, rounds that are no power of two, two waves.
const PARITY_NODE_COUNTS: [u32; 3] = [2, 5, 9];

/// Gathers on `gpu`, all ranks on one device of it, and in the simulator: every byte of every landing is the same.
pub fn assert_gathers_alike(gpu: &Arc<dyn Gpu>, first_device: u32) {
    for m in PARITY_NODE_COUNTS {
        for (which, group) in gather_groups().iter().enumerate() {
            for path in PATHS {
                let what = format!("{m} nodes, group {which}, {path:?}, device {first_device}");
                let mut lane = Lane::new(m, path, which as u64);
                let calls: Vec<Whole> = (0..3).map(|call| random_bytes(group, call)).collect();
                let expected = try_gather(&lane, group, &calls).unwrap();
                lane.comm.first_device = first_device;
                let got = try_gather(&lane.on(gpu), group, &calls).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(first_difference(&got, &expected), None, "{what}");
                assert!(got.iter().zip(&calls).all(|(ranks, whole)| ranks.iter().all(|r| *r == flat(whole))), "{what}");
            }
        }
    }
}

/// Adds on `gpu`, all ranks on one device of it, and in the simulator: every bit of every output is the same. Some gradients
/// are missing: one rank's, every rank's, all of a rank.
pub fn assert_sums_alike(gpu: &Arc<dyn Gpu>, first_device: u32, dtype: GradientDtype) {
    for m in PARITY_NODE_COUNTS {
        for (which, shapes) in SHAPES.iter().enumerate() {
            for path in PATHS {
                let mut sum = Sum { dtype, ..Sum::new(Lane::new(m, path, which as u64), shapes) };
                let mut calls = sum.random(4, which as u64);
                calls[1][m as usize / 2][0] = None;
                calls[2].iter_mut().for_each(|given| *given.last_mut().unwrap() = None);
                calls[3][0].fill(None);
                for (scale, previous) in [(Scale::default(), f32::NAN), (Scale { alpha: 0.7, accumulate: true }, -2.5)]
                {
                    let what =
                        format!("{m} nodes, shapes {which}, {dtype:?}, {path:?}, {scale:?}, device {first_device}");
                    (sum.scale, sum.lane.comm.first_device) = (scale, 0);
                    let bits_of = |outs: Left<f32>| -> Left<u32> { outs.iter().map(|call| bits(call)).collect() };
                    let expected = bits_of(sum.try_run(&calls, previous).unwrap());
                    sum.lane.comm.first_device = first_device;
                    let on_gpu = Sum { lane: sum.lane.on(gpu), ..sum.clone() };
                    let got = on_gpu.try_run(&calls, previous).unwrap_or_else(|error| panic!("{what}: {error}"));
                    assert_eq!(first_difference(&bits_of(got), &expected), None, "{what}");
                }
            }
        }
    }
}

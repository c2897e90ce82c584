//! What integration tests share: a driver of the collectives, and oracles that know nothing of plans.
#![allow(dead_code)]

pub mod lanes;
pub mod oracle;

use half::bf16;
use std::sync::Arc;
use tide_gpu::gpu::sim::{SimGpu, SimOptions};
use tide_gpu::gpu::{DeviceBuffer, Gpu};
use tide_gpu::layout::{Dtype, Group, GroupLayout, Parameter};
use tide_gpu::plan::{Rank, ReduceScatterOptions, Topology};
use tide_gpu::{
    AllGather, AllGatherOptions, Communicator, CommunicatorOptions, GradientDtype, Path, RankGather, RankGradients,
    ReduceScatter, Scale,
};

/// Gradients of one rank: per parameter its elements, or `None` for a parameter that it did not use.
pub type Gradients = Vec<Option<Vec<f32>>>;

/// One reduce-scatter (or a few in a row) to run.
#[derive(Clone)]
pub struct Case {
    pub nodes: u32,
    pub gpus: u32,
    pub shapes: Vec<Vec<u64>>,
    pub dtype: GradientDtype,
    pub path: Path,
    pub options: ReduceScatterOptions,
    pub scale: Scale,
    /// What every output element holds before the first call.
    pub previous: f32,
    pub calls: usize,
    /// The GPUs to run on; `None` for simulated ones as `sim` says.
    pub gpu: Option<Arc<dyn Gpu>>,
    pub sim: SimOptions,
    pub comm: CommunicatorOptions,
}

impl Case {
    pub fn new(nodes: u32, gpus: u32, shapes: &[&[u64]]) -> Self {
        Self {
            nodes,
            gpus,
            shapes: shapes.iter().map(|s| s.to_vec()).collect(),
            dtype: GradientDtype::Bf16,
            path: Path::Device,
            options: ReduceScatterOptions::default(),
            scale: Scale::default(),
            previous: f32::NAN,
            calls: 1,
            gpu: None,
            sim: SimOptions::default(),
            // Small stripes, so that small blocks still use several contexts.
            comm: CommunicatorOptions { stripe_bytes: 256, ..Default::default() },
        }
    }

    pub fn seed(mut self, seed: u64) -> Self {
        self.sim.machine.seed = seed;
        self
    }

    pub fn rank_count(&self) -> u32 {
        self.nodes * self.gpus
    }

    pub fn group(&self) -> Group {
        let dtype = match self.dtype {
            GradientDtype::Bf16 => Dtype::Bf16,
            GradientDtype::F32 => Dtype::F32,
        };
        group(&self.shapes, dtype)
    }

    pub fn layout(&self) -> GroupLayout {
        GroupLayout::new(&self.group(), u64::from(self.rank_count())).unwrap()
    }

    pub fn communicator(&self) -> Communicator {
        let gpu = gpu_or_sim(self.gpu.as_ref(), &self.sim);
        let topology = Topology::new(self.nodes, self.gpus).unwrap();
        Communicator::new(gpu, topology, CommunicatorOptions { path: self.path, ..self.comm.clone() }).unwrap()
    }

    /// Runs the calls with gradients from `fill(call, rank)`; gives every rank's packed output.
    pub fn run(&self, fill: impl Fn(usize, u32) -> Gradients) -> Vec<Vec<f32>> {
        self.try_run(fill).unwrap()
    }

    pub fn try_run(&self, fill: impl Fn(usize, u32) -> Gradients) -> tide_gpu::Result<Vec<Vec<f32>>> {
        let comm = self.communicator();
        let gpu = Arc::clone(comm.gpu());
        let mut rs = ReduceScatter::new(&comm, &self.group(), self.dtype, &self.options)?;
        let elems = self.layout().packed_elems() as usize;
        let outs: Vec<DeviceBuffer> = (0..self.rank_count())
            .map(|_| DeviceBuffer::from_slice(&gpu, 0, &vec![self.previous; elems]))
            .collect::<Result<_, _>>()?;
        // All calls are enqueued before anything is awaited: they overlap as much as the protocol lets them.
        let mut kept = Vec::new();
        for call in 0..self.calls {
            let mut ranks = Vec::new();
            for (rank, out) in outs.iter().enumerate() {
                let mut gradients = Vec::new();
                for gradient in fill(call, rank as u32) {
                    let buffer = gradient.map(|g| upload(&gpu, 0, &g, self.dtype)).transpose()?;
                    gradients.push(buffer.as_ref().map(DeviceBuffer::slice));
                    kept.push(buffer);
                }
                ranks.push(RankGradients { gradients, out: out.slice(), ready: None });
            }
            rs.enqueue(&ranks, self.scale)?;
        }
        comm.synchronize()?;
        drop(rs);
        outs.iter().map(DeviceBuffer::to_vec).collect()
    }
}

fn gpu_or_sim(gpu: Option<&Arc<dyn Gpu>>, sim: &SimOptions) -> Arc<dyn Gpu> {
    gpu.cloned().unwrap_or_else(|| SimGpu::new(sim.clone()))
}

pub fn group(shapes: &[Vec<u64>], dtype: Dtype) -> Group {
    let parameters = shapes.iter().enumerate();
    Group::new(parameters.map(|(i, s)| Parameter::new(format!("p{i}"), s.clone(), dtype).unwrap()).collect()).unwrap()
}

fn upload(gpu: &Arc<dyn Gpu>, device: u32, values: &[f32], dtype: GradientDtype) -> tide_gpu::Result<DeviceBuffer> {
    match dtype {
        GradientDtype::F32 => DeviceBuffer::from_slice(gpu, device, values),
        GradientDtype::Bf16 => {
            let values: Vec<bf16> = values.iter().map(|v| bf16::from_f32(*v)).collect();
            DeviceBuffer::from_slice(gpu, device, &values)
        }
    }
}

fn elems(shape: &[u64]) -> u64 {
    shape.iter().product()
}

/// `v = ((7u + 3p + 5i) mod 17) − 8`: exact in bf16, in any order.
pub fn int_fill(shapes: &[Vec<u64>], rank: u32) -> Gradients {
    let value = |p: u64, i: u64| ((7 * u64::from(rank) + 3 * p + 5 * i) % 17) as f32 - 8.0;
    let of = |(p, s): (usize, &Vec<u64>)| Some((0..elems(s)).map(|i| value(p as u64, i)).collect());
    shapes.iter().enumerate().map(of).collect()
}

/// One constant.
pub fn constant(shapes: &[Vec<u64>], value: f32) -> Gradients {
    shapes.iter().map(|s| Some(vec![value; elems(s) as usize])).collect()
}

/// About normal, from a seed, rounded to bf16 so that both dtypes carry it, over 24 binary orders of magnitude: sums of bf16
/// values of one magnitude are exact in fp32 in any order, and would tell no order from another.
pub fn normal(shapes: &[Vec<u64>], seed: u64, rank: u32) -> Gradients {
    let mut rng = fastrand::Rng::with_seed(seed * 1_000_003 + u64::from(rank));
    let mut draw = || {
        let value = (0..12).map(|_| rng.f32()).sum::<f32>() - 6.0;
        bf16::from_f32(value * 2_f32.powi(rng.i32(-12..12))).to_f32()
    };
    shapes.iter().map(|s| Some((0..elems(s)).map(|_| draw()).collect())).collect()
}

/// The packed outputs in fp64, from the definition alone: equation 5, row by row.
pub fn reference(shapes: &[Vec<u64>], all: &[Gradients], scale: Scale, previous: f64) -> Vec<Vec<f64>> {
    let n = all.len() as u64;
    let base = if scale.accumulate { previous } else { 0.0 };
    let shard = |rank: u64| {
        let mut row = Vec::new();
        for (p, shape) in shapes.iter().enumerate() {
            let (d, k) = (shape[0], elems(&shape[1..]));
            let r = d.div_ceil(n);
            for i in 0..r * k {
                let element = rank * r * k + i;
                let of = |g: &Gradients| g[p].as_ref().map_or(0.0, |v| f64::from(v[element as usize]));
                let sum: f64 = if element < d * k { all.iter().map(of).sum() } else { 0.0 };
                row.push(base + f64::from(scale.alpha) * sum);
            }
        }
        row
    };
    (0..n).map(shard).collect()
}

/// `|y − ref| ≤ 1e-5·max(1, ‖ref‖∞)` everywhere.
pub fn assert_close(got: &[Vec<f32>], expected: &[Vec<f64>], what: &str) {
    let largest = expected.iter().flatten().fold(1.0_f64, |m, v| m.max(v.abs()));
    assert_eq!(got.len(), expected.len());
    for (rank, (g, e)) in got.iter().zip(expected).enumerate() {
        assert_eq!(g.len(), e.len(), "{what}: rank {rank}");
        for (i, (g, e)) in g.iter().zip(e).enumerate() {
            let error = (f64::from(*g) - e).abs();
            assert!(error <= 1e-5 * largest, "{what}: rank {rank} element {i}: {g} against {e}");
        }
    }
}

pub fn bits(outs: &[Vec<f32>]) -> Vec<Vec<u32>> {
    outs.iter().map(|o| o.iter().map(|v| v.to_bits()).collect()).collect()
}

/// One all-gather to run.
#[derive(Clone)]
pub struct GatherCase {
    pub nodes: u32,
    pub gpus: u32,
    pub group: Group,
    pub path: Path,
    pub calls: usize,
    /// As [`Case::gpu`].
    pub gpu: Option<Arc<dyn Gpu>>,
    pub sim: SimOptions,
}

impl GatherCase {
    pub fn new(nodes: u32, gpus: u32, group: Group) -> Self {
        Self { nodes, gpus, group, path: Path::Device, calls: 1, gpu: None, sim: SimOptions::default() }
    }

    /// Gathers whole parameters `bytes(call)` and asserts that every rank ends with exactly them.
    pub fn assert_gathers(&self, bytes: impl Fn(usize) -> Vec<Vec<u8>>) {
        let gpu = gpu_or_sim(self.gpu.as_ref(), &self.sim);
        let topology = Topology::new(self.nodes, self.gpus).unwrap();
        let options = CommunicatorOptions { path: self.path, stripe_bytes: 256, ..Default::default() };
        let comm = Communicator::new(Arc::clone(&gpu), topology, options).unwrap();
        let mut ag = AllGather::new(&comm, &self.group, AllGatherOptions::default()).unwrap();
        for call in 0..self.calls {
            let whole = bytes(call);
            for rank in topology.ranks() {
                for (p, data) in whole.iter().enumerate() {
                    let shard = ag.shard(rank, p);
                    let first = (u64::from(rank.0) * shard.bytes).min(data.len() as u64) as usize;
                    let end = (first as u64 + shard.bytes).min(data.len() as u64) as usize;
                    gpu.upload(shard.address, &data[first..end]).unwrap();
                }
            }
            ag.enqueue(&vec![RankGather::default(); topology.rank_count() as usize]).unwrap();
            comm.synchronize().unwrap();
            for rank in topology.ranks() {
                for (p, data) in whole.iter().enumerate() {
                    let landing = ag.landing(rank, p);
                    let mut got = vec![0; landing.bytes as usize];
                    gpu.download(landing.address, &mut got).unwrap();
                    assert!(got == *data, "call {call} rank {} parameter {p}", rank.0);
                }
            }
        }
    }

    /// Random bytes for every parameter.
    pub fn random_bytes(&self, seed: u64) -> Vec<Vec<u8>> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let bytes = |p: &Parameter| p.shape().iter().product::<u64>() * p.dtype().bytes();
        self.group.parameters().iter().map(|p| (0..bytes(p)).map(|_| rng.u8(..)).collect()).collect()
    }
}

pub fn rank(r: u32) -> Rank {
    Rank(r)
}

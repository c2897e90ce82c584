//! Communicators that drive a part of the ranks each, as the processes of a cluster do: together they give what one
//! communicator of all ranks gives, bit for bit.

mod common;

use common::{Case, bits, group, normal};
use half::bf16;
use std::sync::{Arc, Mutex};
use tide_gpu::gpu::sim::SimGpu;
use tide_gpu::gpu::{DeviceBuffer, DevicePtr, DeviceSlice, Gpu};
use tide_gpu::launch::Exchange;
use tide_gpu::layout::{Dtype, Group};
use tide_gpu::net::loopback::LoopbackFabric;
use tide_gpu::net::{Fabric, Path, Window};
use tide_gpu::plan::{Rank, RankRange, ReduceScatterOptions, Topology};
use tide_gpu::{
    Communicator, CommunicatorOptions, GatherGroup, GatherRing, GradientDtype, LaneAllGather, LaneOptions,
    LaneReduceScatter, RankGather, RankGradients, ReduceScatter, Result, RingOptions, Scale, TideError,
};

const NOWHERE: DeviceSlice = DeviceSlice { address: DevicePtr::NULL, bytes: 0 };

/// What the parts of one job share: its windows, and what they must agree on, in the order of the calls.
struct Job {
    whole: LoopbackFabric,
    windows: Mutex<Vec<Arc<dyn Window>>>,
    said: Mutex<Vec<(String, Vec<u8>)>>,
}

/// One process of the job.
struct Part {
    job: Arc<Job>,
    driven: RankRange,
    allocated: Mutex<usize>,
    exchange: Mutex<Box<dyn Exchange>>,
}

/// An exchange of parts that run one after the other: each hears what the first one said, and itself.
struct Turns {
    job: Arc<Job>,
    said: usize,
}

impl Exchange for Turns {
    fn rank(&self) -> u32 {
        1
    }

    fn rank_count(&self) -> u32 {
        2
    }

    fn all_gather(&mut self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut said = self.job.said.lock().unwrap();
        if self.said == said.len() {
            said.push((label.to_string(), bytes.to_vec()));
        }
        let (first_label, first) = &said[self.said];
        assert_eq!(first_label, label, "parts install different things");
        self.said += 1;
        Ok(vec![first.clone(), bytes.to_vec()])
    }
}

impl Fabric for Part {
    fn name(&self) -> &'static str {
        "part"
    }

    fn gpu(&self) -> &Arc<dyn Gpu> {
        self.job.whole.gpu()
    }

    fn topology(&self) -> Topology {
        self.job.whole.topology()
    }

    fn driven(&self) -> RankRange {
        self.driven
    }

    fn device_of(&self, rank: Rank) -> u32 {
        assert!(self.driven.contains(rank), "rank {} is not driven here", rank.0);
        self.job.whole.device_of(rank)
    }

    fn allocate(self: Arc<Self>, bytes: u64) -> Result<Arc<dyn Window>> {
        let mut allocated = self.allocated.lock().unwrap();
        let mut windows = self.job.windows.lock().unwrap();
        if *allocated == windows.len() {
            windows.push(Arc::new(self.job.whole.clone()).allocate(bytes)?);
        }
        *allocated += 1;
        Ok(Arc::clone(&windows[*allocated - 1]))
    }

    fn exchange(&self) -> &Mutex<Box<dyn Exchange>> {
        &self.exchange
    }

    fn abort(&self) {}
}

/// Communicators of `ranks_each` ranks that make up `M × L` ranks.
fn job(case: &Case, ranks_each: u32) -> Vec<Communicator> {
    let gpu: Arc<dyn Gpu> = SimGpu::new(case.sim.clone());
    let topology = Topology::new(case.nodes, case.gpus).unwrap();
    let whole = LoopbackFabric::new(gpu, topology, 0).unwrap();
    let job = Arc::new(Job { whole, windows: Mutex::default(), said: Mutex::default() });
    let part = |first| {
        let driven = RankRange::new(Rank(first), ranks_each);
        let exchange: Box<dyn Exchange> = Box::new(Turns { job: Arc::clone(&job), said: 0 });
        let part = Part { job: Arc::clone(&job), driven, allocated: Mutex::default(), exchange: Mutex::new(exchange) };
        let options = CommunicatorOptions { path: case.path, ..case.comm.clone() };
        Communicator::over(Arc::new(part), options).unwrap()
    };
    (0..topology.rank_count()).step_by(ranks_each as usize).map(part).collect()
}

fn upload_bf16(gpu: &Arc<dyn Gpu>, values: &[f32]) -> DeviceBuffer {
    let values: Vec<bf16> = values.iter().map(|v| bf16::from_f32(*v)).collect();
    DeviceBuffer::from_slice(gpu, 0, &values).unwrap()
}

/// Runs the case's calls over several communicators; every rank's output, in rank order.
fn reduce_in_parts(case: &Case, ranks_each: u32, as_lane: bool) -> Vec<Vec<f32>> {
    let comms = job(case, ranks_each);
    let gpu = Arc::clone(comms[0].gpu());
    let elems = case.layout().packed_elems() as usize;
    let mut outs = Vec::new();
    let mut kept = Vec::new();
    let (mut general, mut lanes) = (Vec::new(), Vec::new());
    for comm in &comms {
        if as_lane {
            lanes.push(LaneReduceScatter::new(comm, &case.group(), case.dtype, &LaneOptions::default()).unwrap());
        } else {
            general.push(ReduceScatter::new(comm, &case.group(), case.dtype, &case.options).unwrap());
        }
        for _ in comm.driven().iter() {
            outs.push(DeviceBuffer::from_slice(&gpu, 0, &vec![case.previous; elems]).unwrap());
        }
    }
    for call in 0..case.calls {
        for (process, comm) in comms.iter().enumerate() {
            let mut ranks = Vec::new();
            for rank in comm.driven().iter() {
                let filled = normal(&case.shapes, 31 + call as u64, rank.0);
                let buffers: Vec<_> = filled.iter().map(|g| g.as_ref().map(|g| upload_bf16(&gpu, g))).collect();
                let gradients = buffers.iter().map(|b| b.as_ref().map(DeviceBuffer::slice)).collect();
                ranks.push(RankGradients { gradients, out: outs[rank.0 as usize].slice(), ready: None });
                kept.push(buffers);
            }
            if as_lane {
                lanes[process].enqueue(&ranks, case.scale).unwrap();
            } else {
                general[process].enqueue(&ranks, case.scale).unwrap();
            }
        }
    }
    comms.iter().for_each(|c| c.synchronize().unwrap());
    outs.iter().map(|o| o.to_vec().unwrap()).collect()
}

#[test]
fn reduce_scatters_in_parts_give_the_bits_of_the_whole() {
    for (nodes, gpus, ranks_each, path, pass_count) in [
        (2, 2, 1, Path::Device, 1),
        (2, 2, 2, Path::Device, 2),
        (2, 2, 1, Path::Host, 1),
        (3, 2, 1, Path::Host, 2),
        (1, 4, 1, Path::Device, 1),
        (5, 1, 1, Path::Device, 1),
        (4, 2, 4, Path::Device, 1),
    ] {
        let mut case = Case::new(nodes, gpus, &[&[37, 24], &[129], &[64, 8, 3]]).seed(11);
        case.path = path;
        case.calls = 3;
        case.options = ReduceScatterOptions { pass_count, ..Default::default() };
        case.scale = Scale { alpha: 0.375, accumulate: true };
        case.previous = 1.5;
        let whole = case.run(|call, rank| normal(&case.shapes, 31 + call as u64, rank));
        let parts = reduce_in_parts(&case, ranks_each, false);
        assert!(bits(&whole) == bits(&parts), "{nodes}x{gpus} by {ranks_each}, {path:?}, {pass_count} passes");
    }
}

#[test]
fn lanes_in_parts_give_the_bits_of_the_whole() {
    for path in [Path::Device, Path::Host] {
        let mut case = Case::new(3, 1, &[&[37, 24], &[129]]).seed(5);
        case.path = path;
        case.calls = 2;
        let (whole, parts) = (reduce_in_parts(&case, 3, true), reduce_in_parts(&case, 1, true));
        assert!(bits(&whole) == bits(&parts), "{path:?}");
    }
}

/// Writes `byte(rank, i)` into every shard, gathers, and checks every parameter on every rank.
fn assert_ring_gathers(comms: &[Communicator], group: &Group) {
    let gpu = Arc::clone(comms[0].gpu());
    let groups = [GatherGroup { group: group.clone(), cast: false }, GatherGroup { group: group.clone(), cast: false }];
    let mut rings: Vec<GatherRing> =
        comms.iter().map(|c| GatherRing::new(c, &groups, RingOptions::default()).unwrap()).collect();
    for call in 0..3 {
        let index = call % 2;
        for (ring, comm) in rings.iter_mut().zip(comms) {
            for rank in comm.driven().iter() {
                for p in 0..group.parameters().len() {
                    let shard = ring.shard(index, rank, p).unwrap();
                    gpu.upload(shard.address, &vec![rank.0 as u8 + 16 * call as u8 + 1; shard.bytes as usize]).unwrap();
                }
            }
            ring.gather(index, &vec![RankGather::default(); comm.driven().count() as usize]).unwrap();
        }
        comms.iter().for_each(|c| c.synchronize().unwrap());
        for (ring, comm) in rings.iter_mut().zip(comms) {
            for rank in comm.driven().iter() {
                for p in 0..group.parameters().len() {
                    let (place, shard) = (ring.parameter(index, rank, p), ring.shard(index, rank, p).unwrap());
                    let mut got = vec![0; place.bytes as usize];
                    gpu.download(place.address, &mut got).unwrap();
                    let right = |(i, b): (usize, &u8)| *b == (i as u64 / shard.bytes) as u8 + 16 * call as u8 + 1;
                    assert!(got.iter().enumerate().all(right), "call {call} rank {} parameter {p}", rank.0);
                }
            }
            ring.release(index, &vec![None; comm.driven().count() as usize]).unwrap();
        }
    }
}

#[test]
fn rings_in_parts_gather_every_parameter_everywhere() {
    for (nodes, gpus, ranks_each, path) in
        [(2, 2, 1, Path::Device), (3, 2, 2, Path::Device), (3, 1, 1, Path::Host), (1, 4, 2, Path::Device)]
    {
        let mut case = Case::new(nodes, gpus, &[&[48, 24], &[144]]).seed(3);
        case.path = path;
        assert_ring_gathers(&job(&case, ranks_each), &group(&case.shapes, Dtype::Bf16));
    }
}

#[test]
fn lane_gathers_in_parts_reach_every_node() {
    let case = Case::new(3, 1, &[&[48, 24], &[7, 5]]).seed(9);
    let comms = job(&case, 1);
    let gpu = Arc::clone(comms[0].gpu());
    let mut gathers: Vec<_> = comms.iter().map(|c| LaneAllGather::new(c, &case.group()).unwrap()).collect();
    for (gather, comm) in gathers.iter_mut().zip(&comms) {
        let rank = comm.driven().iter().next().unwrap();
        for p in 0..2 {
            let shard = gather.shard(rank, p);
            gpu.upload(shard.address, &vec![rank.0 as u8 + 1; shard.bytes as usize]).unwrap();
        }
        gather.enqueue(&[None]).unwrap();
    }
    comms.iter().for_each(|c| c.synchronize().unwrap());
    for (gather, comm) in gathers.iter().zip(&comms) {
        let rank = comm.driven().iter().next().unwrap();
        for p in 0..2 {
            let (landing, shard) = (gather.landing(rank, p), gather.shard(rank, p));
            let mut got = vec![0; landing.bytes as usize];
            gpu.download(landing.address, &mut got).unwrap();
            assert!(got.iter().enumerate().all(|(i, b)| *b == (i as u64 / shard.bytes) as u8 + 1), "{rank:?} {p}");
        }
    }
}

#[test]
fn processes_that_install_different_things_are_told() {
    let case = Case::new(2, 1, &[&[16]]);
    let comms = job(&case, 1);
    let other = group(&[vec![17]], Dtype::Bf16);
    let _first = ReduceScatter::new(&comms[0], &case.group(), GradientDtype::Bf16, &Default::default()).unwrap();
    let error = ReduceScatter::new(&comms[1], &other, GradientDtype::Bf16, &Default::default()).err().unwrap();
    assert!(matches!(&error, TideError::Disagreement { what, .. } if what == "group"), "{error}");
}

#[test]
fn a_call_names_the_ranks_that_its_process_drives() {
    let case = Case::new(2, 2, &[&[16]]);
    let comms = job(&case, 2);
    let mut rs: Vec<_> = comms
        .iter()
        .map(|c| ReduceScatter::new(c, &case.group(), GradientDtype::Bf16, &Default::default()).unwrap())
        .collect();
    let given = RankGradients { gradients: vec![None], out: NOWHERE, ready: None };
    let error = rs[1].enqueue(&vec![given; 4], Scale::default()).unwrap_err();
    assert!(error.to_string().contains("names 4 ranks, the communicator drives 2"), "{error}");
    let sized = RankGradients { gradients: vec![], out: NOWHERE, ready: None };
    let error = rs[1].enqueue(&vec![sized; 2], Scale::default()).unwrap_err();
    assert!(error.to_string().contains("rank 2"), "{error}");
}

#[test]
fn the_stock_baseline_needs_all_ranks_in_one_process() {
    let case = Case::new(2, 1, &[&[16]]);
    let comms = job(&case, 1);
    let error = tide_gpu::StockReduceScatter::new(&comms[0], &case.group(), GradientDtype::Bf16).err().unwrap();
    assert!(matches!(error, TideError::Unsupported { .. }), "{error}");
}

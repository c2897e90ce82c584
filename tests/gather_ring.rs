//! The ring of groups: slots taken in turn, one stage for all, gradients in vacated slots.

mod common;

use common::{assert_close, group, int_fill, normal, reference};
use half::bf16;
use std::sync::Arc;
use tide_gpu::gpu::sim::{SimGpu, SimOptions};
use tide_gpu::gpu::{Copy2d, DeviceBuffer, DevicePtr, Event, Gpu, MemoryWait, Priority};
use tide_gpu::layout::Dtype;
use tide_gpu::plan::{Mode, ReduceScatterOptions, Topology};
use tide_gpu::{
    AllGather, AllGatherOptions, Communicator, CommunicatorOptions, GatherGroup, GatherRing, GradientDtype, Path,
    RankGather, RankGradients, RankSources, ReduceScatter, RingOptions, Scale, TideError,
};

const PATHS: [Path; 2] = [Path::Device, Path::Host];

fn communicator(m: u32, l: u32, path: Path, seed: u64) -> Communicator {
    let mut sim = SimOptions::default();
    sim.machine.seed = seed;
    sim.eager_steps_max = [0, 8, 64][seed as usize % 3];
    let gpu: Arc<dyn Gpu> = SimGpu::new(sim);
    let (stripe_bytes, context_count) = ([256, 64, 16][seed as usize / 2 % 3], [4, 1, 3][seed as usize / 5 % 3]);
    let options = CommunicatorOptions { path, stripe_bytes, context_count, ..Default::default() };
    Communicator::new(gpu, Topology::new(m, l).unwrap(), options).unwrap()
}

fn groups(shapes: &[Vec<Vec<u64>>]) -> Vec<GatherGroup> {
    shapes.iter().map(|s| GatherGroup { group: group(s, Dtype::Bf16), cast: false }).collect()
}

#[test]
fn slots_are_taken_in_turn_and_sized_by_their_groups() {
    let comm = communicator(2, 2, Path::Device, 1);
    let shapes = [vec![vec![64, 8]], vec![vec![4, 2]], vec![vec![16, 2]], vec![vec![8, 2]], vec![vec![4, 4]]];
    let ring = GatherRing::new(&comm, &groups(&shapes), RingOptions::default()).unwrap();
    assert_eq!((0..5).map(|g| ring.slot_of(g)).collect::<Vec<_>>(), [0, 1, 0, 1, 0]);
    let regions: Vec<_> = ring.regions().collect();
    assert_eq!(regions[..2], [("ring slot", 1024), ("ring slot", 32)]);
    // The stage holds one slot beside the resident one, of the largest shard: 16 rows of 8 bf16.
    assert_eq!(regions[2], ("receive stage", 256));
}

#[test]
fn an_occupied_slot_is_refused_until_it_is_released() {
    let comm = communicator(1, 2, Path::Device, 1);
    let shapes = vec![vec![vec![4_u64, 2]]; 3];
    let mut ring = GatherRing::new(&comm, &groups(&shapes), RingOptions::default()).unwrap();
    let ranks = vec![RankGather::default(); 2];
    ring.gather(0, &ranks).unwrap();
    ring.gather(1, &ranks).unwrap();
    let error = ring.gather(2, &ranks).unwrap_err();
    assert!(matches!(&error, TideError::Usage(text) if text.contains("slot 0 is occupied by group 0")), "{error}");
    assert!(ring.gather(0, &ranks).is_err(), "nor may its own group overwrite it");
    assert!(ring.release(2, &[None, None]).is_err(), "who does not hold a slot cannot release it");
    ring.release(0, &[None, None]).unwrap();
    assert!(ring.release(0, &[None, None]).is_err(), "once");
    ring.gather(2, &ranks).unwrap();
    assert!(ring.gather(7, &ranks).is_err());
    comm.synchronize().unwrap();
}

/// Forward and backward over groups of different sizes, everything enqueued without a host wait: what is copied out of a slot
/// between a gather and its release is the group's, whole.
#[test]
fn groups_of_a_ring_do_not_overwrite_each_other() {
    // One is many times as large as the others and one is empty: all share the signals of the rails.
    let shapes = [
        vec![vec![7_u64, 5], vec![3]],
        vec![vec![400, 9]],
        vec![vec![1, 9]],
        vec![vec![64], vec![2, 2], vec![5, 3]],
        vec![vec![0, 3]],
    ];
    for (m, l) in [(1, 2), (3, 2), (5, 1), (4, 2)] {
        for path in PATHS {
            for seed in 0..12 {
                let comm = communicator(m, l, path, seed);
                let gpu = Arc::clone(comm.gpu());
                // Unpaced, leads shorter than a round, rounds that are all lead.
                let lead_bytes_total = [0, 160, 8 << 20][seed as usize / 3 % 3];
                let options = RingOptions { lead_bytes_total, ..Default::default() };
                let mut ring = GatherRing::new(&comm, &groups(&shapes), options).unwrap();
                let mut whole = Vec::new();
                for (g, shapes) in shapes.iter().enumerate() {
                    let mut parameters = Vec::new();
                    for (p, data) in normal(shapes, seed + 17 * g as u64, 0).into_iter().enumerate() {
                        let data: Vec<bf16> = data.unwrap().into_iter().map(bf16::from_f32).collect();
                        let bytes: &[u8] = bytemuck::cast_slice(&data);
                        for rank in comm.topology().ranks() {
                            let shard = ring.shard(g, rank, p).unwrap();
                            let first = (u64::from(rank.0) * shard.bytes).min(bytes.len() as u64) as usize;
                            let end = (first + shard.bytes as usize).min(bytes.len());
                            gpu.upload(shard.address, &bytes[first..end]).unwrap();
                        }
                        parameters.push(bytes.to_vec());
                    }
                    whole.push(parameters);
                }
                let ranks = vec![RankGather::default(); comm.topology().rank_count() as usize];
                let streams: Vec<_> =
                    comm.topology().ranks().map(|_| gpu.create_stream(0, Priority::Normal).unwrap()).collect();
                let mut results = Vec::new();
                let order = [0, 1, 4, 2, 3, 2, 4, 1, 0, 1, 2, 3];
                for g in order {
                    let events = ring.gather(g, &ranks).unwrap();
                    let mut after = Vec::new();
                    for (rank, events) in comm.topology().ranks().zip(events) {
                        let stream = streams[rank.0 as usize];
                        gpu.wait_event(stream, events.done).unwrap();
                        for p in 0..shapes[g].len() {
                            let place = ring.parameter(g, rank, p);
                            let out = DeviceBuffer::new(&gpu, 0, place.bytes).unwrap();
                            gpu.copy(stream, &Copy2d::flat(out.address(), place.address, place.bytes)).unwrap();
                            results.push((g, p, out));
                        }
                        after.push(Some(gpu.record(stream).unwrap()));
                    }
                    ring.release(g, &after).unwrap();
                }
                comm.synchronize().unwrap();
                streams.iter().for_each(|s| assert!(gpu.synchronize(*s, 1 << 40).is_ok()));
                for (i, (g, p, out)) in results.iter().enumerate() {
                    let got: Vec<u8> = out.to_vec().unwrap();
                    assert!(
                        got == whole[*g][*p],
                        "{m}x{l} {path:?} TIDE_SEED={seed}: copy {i}, group {g} parameter {p}"
                    );
                }
            }
        }
    }
}

/// Slot-Reuse: gradients go into the slot that their group has vacated, their own buffers are freed, and the reduce-scatter
/// reads the slot; the next group takes it once it is read.
#[test]
fn gradients_in_a_vacated_slot_are_reduced_from_there() {
    let shapes = [vec![vec![7_u64, 5], vec![3]], vec![vec![40, 2]], vec![vec![12, 4]]];
    for path in PATHS {
        for seed in 0..8 {
            let comm = communicator(3, 2, path, seed);
            let gpu = Arc::clone(comm.gpu());
            let mut ring = GatherRing::new(&comm, &groups(&shapes), RingOptions::default()).unwrap();
            let options = ReduceScatterOptions { mode: Mode::SlotReuse, ..Default::default() };
            let group = |g: usize| group(&shapes[g], Dtype::Bf16);
            let mut reduces: Vec<ReduceScatter> =
                (0..3).map(|g| ReduceScatter::new(&comm, &group(g), GradientDtype::Bf16, &options).unwrap()).collect();
            let gathers = vec![RankGather::default(); 6];
            let mut outs = Vec::new();
            for g in [2, 1, 0] {
                ring.gather(g, &gathers).unwrap();
                ring.release(g, &[None; 6]).unwrap();
                let mut owned = Vec::new();
                let mut sources = Vec::new();
                for rank in 0..6 {
                    let mut gradients = Vec::new();
                    for data in int_fill(&shapes[g], rank) {
                        let data: Vec<bf16> = data.unwrap().into_iter().map(bf16::from_f32).collect();
                        let buffer = DeviceBuffer::from_slice(&gpu, 0, &data).unwrap();
                        gradients.push(Some(buffer.slice()));
                        owned.push(buffer);
                    }
                    sources.push(RankSources { gradients, ready: None });
                }
                let stored = ring.store_gradients(g, &sources).unwrap();
                assert!(ring.gather(g, &gathers).is_err(), "the slot holds gradients");
                // The sources go as soon as they are stored, long before they are reduced.
                for stored in &stored {
                    while !gpu.is_complete(stored.stored).unwrap() {}
                }
                for buffer in &owned {
                    gpu.upload(buffer.address(), &vec![0x7f; buffer.slice().bytes as usize]).unwrap();
                }
                let mut ranks = Vec::new();
                for stored in stored {
                    let out = DeviceBuffer::new(&gpu, 0, reduces[g].output_bytes()).unwrap();
                    let (gradients, ready) = (stored.gradients, Some(stored.stored));
                    ranks.push(RankGradients { gradients, out: out.slice(), ready });
                    outs.push((g, out));
                }
                let events = reduces[g].enqueue(&ranks, Scale::default()).unwrap();
                let read: Vec<Option<Event>> = events.iter().map(|e| Some(e.read)).collect();
                ring.release(g, &read).unwrap();
            }
            comm.synchronize().unwrap();
            for (g, shapes) in shapes.iter().enumerate() {
                let got: Vec<Vec<f32>> =
                    outs.iter().filter(|(of, _)| *of == g).map(|(_, o)| o.to_vec().unwrap()).collect();
                let all: Vec<_> = (0..6).map(|r| int_fill(shapes, r)).collect();
                let expected = reference(shapes, &all, Scale::default(), 0.0);
                assert_close(&got, &expected, &format!("{path:?} TIDE_SEED={seed} group {g}"));
            }
        }
    }
}

/// The same without waiting for the reads: on some schedule the next gather overwrites gradients that are still to be read.
#[test]
fn a_slot_released_before_its_gradients_are_read_shows() {
    let broken = (0..24).any(|seed| {
        let comm = communicator(2, 2, Path::Device, seed);
        let gpu = Arc::clone(comm.gpu());
        let shapes = vec![vec![vec![64_u64, 4]]; 2];
        let mut ring =
            GatherRing::new(&comm, &groups(&shapes), RingOptions { slot_count: 1, ..Default::default() }).unwrap();
        for (g, rank) in [0, 1].into_iter().flat_map(|g| comm.topology().ranks().map(move |r| (g, r))) {
            let shard = ring.shard(g, rank, 0).unwrap();
            gpu.upload(shard.address, &vec![0; shard.bytes as usize]).unwrap();
        }
        let options = ReduceScatterOptions { mode: Mode::SlotReuse, ..Default::default() };
        let mut rs = ReduceScatter::new(&comm, &group(&shapes[0], Dtype::Bf16), GradientDtype::Bf16, &options).unwrap();
        let ones = DeviceBuffer::from_slice(&gpu, 0, &[bf16::ONE; 256]).unwrap();
        let source = RankSources { gradients: vec![Some(ones.slice())], ready: None };
        let stored = ring.store_gradients(0, &vec![source; 4]).unwrap();
        let outs: Vec<_> = (0..4).map(|_| DeviceBuffer::new(&gpu, 0, rs.output_bytes()).unwrap()).collect();
        let rank = |(s, o): (tide_gpu::StoredGradients, &DeviceBuffer)| RankGradients {
            gradients: s.gradients,
            out: o.slice(),
            ready: Some(s.stored),
        };
        let stored_events: Vec<_> = stored.iter().map(|s| Some(s.stored)).collect();
        let ranks: Vec<_> = stored.into_iter().zip(&outs).map(rank).collect();
        rs.enqueue(&ranks, Scale::default()).unwrap();
        // Wrong: stored is not read.
        ring.release(0, &stored_events).unwrap();
        ring.gather(1, &vec![RankGather::default(); 4]).unwrap();
        comm.synchronize().unwrap();
        outs.iter().any(|o| o.to_vec::<f32>().unwrap().iter().any(|v| *v != 4.0))
    });
    assert!(broken);
}

#[test]
fn a_null_address_is_no_slot() {
    let comm = communicator(1, 1, Path::Device, 0);
    let cast = GatherGroup { group: group(&[vec![4]], Dtype::Bf16), cast: true };
    let ring = GatherRing::new(&comm, &[cast], RingOptions::default()).unwrap();
    assert_eq!(ring.shard(0, common::rank(0), 0), None, "a cast has no resident shard");
    assert_ne!(ring.parameter(0, common::rank(0), 0).address, DevicePtr::NULL);
}

/// A tiny group, then a large one, with the options that a user has who sets none.
#[test]
fn a_tiny_group_before_a_large_one_leaves_no_signal_behind() {
    for path in PATHS {
        let gpu: Arc<dyn Gpu> = SimGpu::new(SimOptions::default());
        let options = CommunicatorOptions { path, ..Default::default() };
        let comm = Communicator::new(gpu, Topology::new(2, 1).unwrap(), options).unwrap();
        let shapes = [vec![vec![8_u64, 4]], vec![vec![2048, 1536]]];
        let mut ring = GatherRing::new(&comm, &groups(&shapes), RingOptions::default()).unwrap();
        for group in [0, 1, 0, 1] {
            ring.gather(group, &vec![RankGather::default(); 2]).unwrap();
            ring.release(group, &[None, None]).unwrap();
        }
        comm.synchronize().unwrap_or_else(|error| panic!("{path:?}: {error}"));
    }
}

#[test]
fn a_refused_gather_does_not_give_the_landing_away() {
    for seed in 0..12 {
        let comm = communicator(2, 2, Path::Device, seed);
        let gpu = Arc::clone(comm.gpu());
        let group = group(&[vec![16, 8]], Dtype::Bf16);
        let mut gather = AllGather::new(&comm, &group, AllGatherOptions::default()).unwrap();
        let shards: Vec<_> = comm.topology().ranks().map(|rank| gather.shard(rank, 0)).collect();
        shards.iter().for_each(|shard| gpu.upload(shard.address, &vec![1; shard.bytes as usize]).unwrap());
        let events = gather.enqueue(&vec![RankGather::default(); 4]).unwrap();
        // Its user reads the landing late; a call that is refused meanwhile must not make the next one come sooner.
        let mut copies = Vec::new();
        let mut next = Vec::new();
        for (rank, event) in comm.topology().ranks().zip(events) {
            let (user, landing) = (gpu.create_stream(0, Priority::Normal).unwrap(), gather.landing(rank, 0));
            let out = DeviceBuffer::new(&gpu, 0, landing.bytes).unwrap();
            gpu.wait_event(user, event.done).unwrap();
            gpu.copy(user, &Copy2d::flat(out.address(), landing.address, landing.bytes)).unwrap();
            next.push(RankGather { masters: Vec::new(), ready: Some(gpu.record(user).unwrap()) });
            copies.push(out);
        }
        assert!(gather.enqueue(&next[..3]).is_err());
        comm.synchronize().unwrap();
        shards.iter().for_each(|shard| gpu.upload(shard.address, &vec![2; shard.bytes as usize]).unwrap());
        gather.enqueue(&next).unwrap();
        comm.synchronize().unwrap();
        for copy in &copies {
            assert!(copy.to_vec::<u8>().unwrap().iter().all(|byte| *byte == 1), "seed {seed}");
        }
    }
}

/// Masters that move from call to call: nothing waits for the host, though each call has a table of its own.
#[test]
fn casts_of_masters_that_move_are_enqueued_back_to_back() {
    let comm = communicator(2, 1, Path::Device, 1);
    let gpu = Arc::clone(comm.gpu());
    let shapes = [vec![vec![8_u64, 4]]];
    let groups: Vec<_> = groups(&shapes).into_iter().map(|g| GatherGroup { cast: true, ..g }).collect();
    let mut ring = GatherRing::new(&comm, &groups, RingOptions::default()).unwrap();
    let gate = DeviceBuffer::from_slice(&gpu, 0, &[0_u64]).unwrap();
    let held = gpu.create_stream(0, Priority::Normal).unwrap();
    let tag = bytemuck::Zeroable::zeroed();
    let wait = MemoryWait { address: gate.address(), value: 1, timeout_ns: 1 << 50, tag };
    gpu.wait_value(held, &wait).unwrap();
    let shut = Some(gpu.record(held).unwrap());
    let mut masters = Vec::new();
    for call in 0..4_u16 {
        let ranks: Vec<RankGather> = (0..2)
            .map(|_| {
                let master = DeviceBuffer::from_slice(&gpu, 0, &[f32::from(call); 16]).unwrap();
                let slice = master.slice();
                masters.push(master);
                RankGather { masters: vec![slice], ready: shut }
            })
            .collect();
        ring.gather(0, &ranks).unwrap();
        ring.release(0, &[None, None]).unwrap();
    }
    gpu.upload(gate.address(), &1_u64.to_le_bytes()).unwrap();
    comm.synchronize().unwrap();
    let place = ring.parameter(0, comm.topology().ranks().next().unwrap(), 0);
    let mut got = vec![0; place.bytes as usize];
    gpu.download(place.address, &mut got).unwrap();
    assert!(bytemuck::cast_slice::<u8, bf16>(&got).iter().all(|v| v.to_f32() == 3.0));
}

//! What the shards should hold: the same compute on the host, summed in fp64.

use std::collections::HashMap;

use half::bf16;
use tide_gpu::layout::GroupLayout;

use super::data::Source;
use super::moves::{Compute, Moment, Move, Runs, STATE_ELEMS, Tensor};

/// Error allowed, as a share of the largest reference (at least 1).
const RELATIVE_BOUND: f64 = 1e-5;

/// What every layer's reduced gradients should be after one step.
pub struct Reference {
    /// Per layer, per parameter: every element of the unsharded sum.
    sums: Vec<Vec<Vec<f64>>>,
    bound: f64,
}

impl Reference {
    /// Carries a step's compute out, on parameters that nothing can have gathered wrong.
    pub fn new(source: &Source, layout: &GroupLayout, layers: usize, step: u64, micro_steps: u64, alpha: f32) -> Self {
        let compute = Compute::new(layout);
        let zeros = || layout.parameters().iter().map(|p| vec![0.0; p.elems as usize]).collect::<Vec<_>>();
        let mut sums: Vec<Vec<Vec<f64>>> = (0..layers).map(|_| zeros()).collect();
        let mut host = Host::default();
        for layer in 0..layers {
            for (parameter, p) in layout.parameters().iter().enumerate() {
                let values = source.parameter(step, layer, parameter, 0, p.elems);
                host.tensors.insert(Tensor::Parameter(layer, parameter), values);
                host.tensors.insert(Tensor::Gradient(layer, parameter), vec![0; p.elems as usize]);
            }
            host.tensors.insert(Tensor::Kept(layer), vec![0; compute.kept_elems() as usize]);
        }
        (0..=layers).for_each(|i| drop(host.tensors.insert(Tensor::State(i), vec![0; STATE_ELEMS as usize])));
        for rank in 0..layout.rank_count() {
            host.tensors.insert(Tensor::Data, source.data(rank, compute.data_elems()));
            for micro_step in 0..micro_steps {
                let at = Moment { step, micro_step, rank };
                host.carry_out(&compute.input(at));
                (0..layers).for_each(|layer| host.carry_out(&compute.forward(layer)));
                for (layer, layer_sums) in sums.iter_mut().enumerate() {
                    host.carry_out(&compute.backward(at, layer));
                    for (parameter, sum) in layer_sums.iter_mut().enumerate() {
                        let gradient = &host.tensors[&Tensor::Gradient(layer, parameter)];
                        let scaled = gradient.iter().map(|&bits| f64::from(alpha) * bf16::from_bits(bits).to_f64());
                        sum.iter_mut().zip(scaled).for_each(|(sum, value)| *sum += value);
                    }
                }
            }
        }
        let largest = sums.iter().flatten().flatten().fold(1.0_f64, |most, x| most.max(x.abs()));
        Self { sums, bound: RELATIVE_BOUND * largest }
    }

    /// How many elements of a rank's packed shards of a layer are wrong.
    pub fn wrong(&self, layout: &GroupLayout, layer: usize, rank: u64, packed: &[f32]) -> u64 {
        let mut wrong = 0;
        for (p, sums) in layout.parameters().iter().zip(&self.sums[layer]) {
            let first = (p.rows_of(rank).start * p.row_elems) as usize;
            let shard = &packed[p.packed_offset_elems as usize..][..p.shard_elems as usize];
            let padding = std::iter::repeat(&0.0);
            let expected = sums[first..first + p.live_elems_of(rank) as usize].iter().chain(padding);
            let differs = |(&got, &sum): (&f32, &f64)| (f64::from(got) - sum).abs() > self.bound || got.is_nan();
            wrong += shard.iter().zip(expected).filter(|&pair| differs(pair)).count() as u64;
        }
        wrong
    }
}

/// One rank's tensors on the host.
#[derive(Default)]
struct Host {
    tensors: HashMap<Tensor, Vec<u16>>,
}

impl Host {
    fn carry_out(&mut self, moves: &[Move]) {
        for m in moves {
            let run = |side: &Runs, row: u64| {
                let first = (side.first + row * side.pitch) as usize;
                first..first + m.width as usize
            };
            let mut to = self.tensors.remove(&m.to.tensor).expect("a tensor of the replay");
            let from = &self.tensors[&m.from.tensor];
            (0..m.rows).for_each(|row| to[run(&m.to, row)].copy_from_slice(&from[run(&m.from, row)]));
            self.tensors.insert(m.to.tensor, to);
        }
    }
}

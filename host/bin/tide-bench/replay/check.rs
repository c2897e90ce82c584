//! What the shards should hold: the same compute on the host, summed in fp64, a parameter at a time.
//!
//! Layers know of each other only what one hands on to the next, and gradients of other parameters only the sample that
//! forward kept: so the host holds that sample and one parameter, however large the model is.

use std::collections::HashMap;

use half::bf16;
use tide_gpu::layout::{GroupLayout, ParameterLayout};

use super::data::Source;
use super::moves::{Compute, Moment, Move, Runs, STATE_ELEMS, Tensor};

/// Error allowed, as a share of the parameter's largest reference (at least 1).
const RELATIVE_BOUND: f64 = 1e-5;

/// One step's compute on the host, on parameters that nothing can have gathered wrong.
pub struct Reference<'a> {
    source: &'a Source,
    layout: &'a GroupLayout,
    compute: Compute<'a>,
    step: u64,
    alpha: f32,
    /// Layers done.
    layer: usize,
    /// What goes into the next one, in each call of the step.
    states: Vec<(Moment, Vec<u16>)>,
}

impl<'a> Reference<'a> {
    /// Ahead of the first layer of step `step`.
    pub fn new(source: &'a Source, layout: &'a GroupLayout, step: u64, micro_steps: u64, alpha: f32) -> Self {
        let compute = Compute::new(layout);
        let mut host = Host::default();
        let mut states = Vec::new();
        for rank in 0..layout.rank_count() {
            host.tensors.insert(Tensor::Data, source.data(rank, compute.data_elems()));
            for micro_step in 0..micro_steps {
                let at = Moment { step, micro_step, rank };
                host.tensors.insert(Tensor::State(0), vec![0; STATE_ELEMS as usize]);
                host.carry_out(&compute.input(at));
                states.push((at, host.take(Tensor::State(0))));
            }
        }
        Self { source, layout, compute, step, alpha, layer: 0, states }
    }

    /// Bytes that the host takes at most: a parameter and its gradient in bf16, their sums in fp64, what forward keeps.
    pub fn bytes(layout: &GroupLayout) -> u64 {
        let largest = layout.parameters().iter().map(|p| p.elems).max().unwrap_or(0);
        largest * (2 + 2 + 8) + 2 * Compute::new(layout).kept_elems()
    }

    /// Carries the next layer's forward out, in every call of the step.
    pub fn next_layer(&mut self) -> Layer<'_> {
        let (layer, mut host) = (self.layer, Host::default());
        host.tensors.insert(Tensor::Kept(layer), vec![0; self.compute.kept_elems() as usize]);
        let forward = self.compute.forward(layer);
        for (parameter, p) in self.layout.parameters().iter().enumerate() {
            let tensor = Tensor::Parameter(layer, parameter);
            host.tensors.insert(tensor, self.source.parameter(self.step, layer, parameter, 0, p.elems));
            host.carry_out(forward.iter().filter(|m| m.from.tensor == tensor));
            host.take(tensor);
        }
        let mut calls = Vec::new();
        for (at, state) in &mut self.states {
            host.tensors.insert(Tensor::State(layer), state.clone());
            host.tensors.insert(Tensor::State(layer + 1), vec![0; STATE_ELEMS as usize]);
            host.carry_out(forward.iter().filter(|m| !matches!(m.from.tensor, Tensor::Parameter(..))));
            calls.push((*at, std::mem::replace(state, host.take(Tensor::State(layer + 1)))));
        }
        self.layer += 1;
        Layer { reference: self, layer, host, calls }
    }
}

/// One layer, after its forward.
pub struct Layer<'a> {
    reference: &'a Reference<'a>,
    layer: usize,
    /// Holds what forward kept, but for the state that came in.
    host: Host,
    /// What came in, in each call of the step.
    calls: Vec<(Moment, Vec<u16>)>,
}

impl Layer<'_> {
    /// Carries backward of one parameter out, in every call of the step.
    pub fn sums(&mut self, parameter: usize) -> Sums {
        let Reference { source, layout, compute, step, alpha, .. } = self.reference;
        let (layer, host) = (self.layer, &mut self.host);
        let p = &layout.parameters()[parameter];
        let (values, gradient) = (Tensor::Parameter(layer, parameter), Tensor::Gradient(layer, parameter));
        host.tensors.insert(values, source.parameter(*step, layer, parameter, 0, p.elems));
        host.tensors.insert(gradient, vec![0; p.elems as usize]);
        let mut sums = vec![0.0; p.elems as usize];
        for (at, state) in &self.calls {
            host.tensors.insert(Tensor::State(layer), state.clone());
            host.carry_out(compute.recompute(layer).iter().filter(|m| m.from.tensor == Tensor::State(layer)));
            host.tensors.insert(Tensor::Data, source.data(at.rank, compute.data_elems()));
            host.carry_out(compute.backward(*at, layer).iter().filter(|m| m.to.tensor == gradient));
            let scaled = host.tensors[&gradient].iter().map(|&bits| f64::from(*alpha) * bf16::from_bits(bits).to_f64());
            sums.iter_mut().zip(scaled).for_each(|(sum, value)| *sum += value);
        }
        host.take(values);
        host.take(gradient);
        let largest = sums.iter().fold(1.0_f64, |most, x| most.max(x.abs()));
        Sums { values: sums, bound: RELATIVE_BOUND * largest }
    }
}
/// What one parameter's reduced gradient should be.
pub struct Sums {
    /// Every element of the unsharded sum.
    values: Vec<f64>,
    bound: f64,
}

impl Sums {
    /// How many elements of a rank's shard of the parameter are wrong.
    pub fn wrong(&self, p: &ParameterLayout, rank: u64, shard: &[f32]) -> u64 {
        let first = (p.rows_of(rank).start * p.row_elems) as usize;
        let padding = std::iter::repeat(&0.0);
        let expected = self.values[first..first + p.live_elems_of(rank) as usize].iter().chain(padding);
        let differs = |(&got, &sum): (&f32, &f64)| (f64::from(got) - sum).abs() > self.bound || got.is_nan();
        shard.iter().zip(expected).filter(|&pair| differs(pair)).count() as u64
    }
}

/// One rank's tensors on the host.
#[derive(Default)]
struct Host {
    tensors: HashMap<Tensor, Vec<u16>>,
}

impl Host {
    fn take(&mut self, tensor: Tensor) -> Vec<u16> {
        self.tensors.remove(&tensor).expect("a tensor of the replay")
    }

    fn carry_out<'m>(&mut self, moves: impl IntoIterator<Item = &'m Move>) {
        for m in moves {
            let run = |side: &Runs, row: u64| {
                let first = (side.first + row * side.pitch) as usize;
                first..first + m.width as usize
            };
            let mut to = self.take(m.to.tensor);
            let from = &self.tensors[&m.from.tensor];
            (0..m.rows).for_each(|row| to[run(&m.to, row)].copy_from_slice(&from[run(&m.from, row)]));
            self.tensors.insert(m.to.tensor, to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tide_gpu::layout::{Dtype, Group, Parameter};

    const LAYERS: usize = 3;

    fn layout(rank_count: u64) -> GroupLayout {
        let shapes = [[70, 33], [1, 5], [400, 1]].iter().enumerate();
        let parameters = shapes.map(|(i, s)| Parameter::new(format!("p{i}"), *s, Dtype::Bf16).unwrap());
        GroupLayout::new(&Group::new(parameters.collect()).unwrap(), rank_count).unwrap()
    }

    /// All layers' sums as a runtime comes to them: forward of all, then backward from the last on.
    fn whole_model(
        source: &Source,
        layout: &GroupLayout,
        step: u64,
        micro_steps: u64,
        alpha: f32,
    ) -> Vec<Vec<Vec<f64>>> {
        let compute = Compute::new(layout);
        let zeros = || layout.parameters().iter().map(|p| vec![0.0; p.elems as usize]).collect::<Vec<_>>();
        let mut sums = vec![zeros(); LAYERS];
        for (rank, micro_step) in (0..layout.rank_count()).flat_map(|r| (0..micro_steps).map(move |m| (r, m))) {
            let (at, mut host) = (Moment { step, micro_step, rank }, Host::default());
            host.tensors.insert(Tensor::Data, source.data(rank, compute.data_elems()));
            (0..=LAYERS).for_each(|i| drop(host.tensors.insert(Tensor::State(i), vec![0; STATE_ELEMS as usize])));
            for layer in 0..LAYERS {
                for (i, p) in layout.parameters().iter().enumerate() {
                    host.tensors.insert(Tensor::Parameter(layer, i), source.parameter(step, layer, i, 0, p.elems));
                    host.tensors.insert(Tensor::Gradient(layer, i), vec![0; p.elems as usize]);
                }
                host.tensors.insert(Tensor::Kept(layer), vec![0; compute.kept_elems() as usize]);
            }
            host.carry_out(&compute.input(at));
            (0..LAYERS).for_each(|layer| host.carry_out(&compute.forward(layer)));
            for layer in (0..LAYERS).rev() {
                host.carry_out(&compute.backward(at, layer));
                for (i, sum) in sums[layer].iter_mut().enumerate() {
                    let gradient = &host.tensors[&Tensor::Gradient(layer, i)];
                    let add = |(sum, &bits): (&mut f64, &u16)| {
                        *sum += f64::from(alpha) * bf16::from_bits(bits).to_f64();
                    };
                    sum.iter_mut().zip(gradient).for_each(add);
                }
            }
        }
        sums
    }

    #[test]
    fn a_parameter_at_a_time_gives_what_the_whole_model_gives() {
        let (source, layout) = (Source::new(5), layout(3));
        let expected = whole_model(&source, &layout, 4, 2, 0.25);
        let mut reference = Reference::new(&source, &layout, 4, 2, 0.25);
        for (index, expected) in expected.iter().enumerate() {
            let mut layer = reference.next_layer();
            // In any order.
            for parameter in [1, 0, 2] {
                assert!(layer.sums(parameter).values == expected[parameter], "layer {index}, parameter {parameter}");
            }
        }
    }

    #[test]
    fn every_element_that_differs_is_counted() {
        let (source, layout) = (Source::new(6), layout(4));
        let mut reference = Reference::new(&source, &layout, 0, 1, 0.25);
        let mut layer = reference.next_layer();
        for (index, p) in layout.parameters().iter().enumerate() {
            let sums = layer.sums(index);
            for rank in 0..4 {
                let first = (p.rows_of(rank).start * p.row_elems) as usize;
                let live = sums.values[first..first + p.live_elems_of(rank) as usize].iter().map(|&sum| sum as f32);
                let mut shard: Vec<f32> = live.chain(std::iter::repeat(0.0)).take(p.shard_elems as usize).collect();
                assert_eq!(sums.wrong(p, rank, &shard), 0, "parameter {index}, rank {rank}");
                // The last is padding of some ranks. The second parameter has five elements a shard.
                shard[0] += 1e-3;
                shard[1] = f32::NAN;
                shard[2] = f32::INFINITY;
                *shard.last_mut().unwrap() += 1.0;
                assert_eq!(sums.wrong(p, rank, &shard), 4, "parameter {index}, rank {rank}");
            }
        }
    }
}

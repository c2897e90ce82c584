//! The compute of a replay, as copies: what a layer's forward and backward read, and where it goes.
//!
//! A copy does no arithmetic, so results are the same on every machine; and since each gradient is woven of parameters, of
//! what forward kept, and of data of the rank, a parameter that was gathered wrong or overwritten while it was used, and
//! a gradient that was overwritten before it was read, all show in the reduced shards.
//!
//! [`Tensor`]s are bf16. A [`Move`] says nothing of where they lie: the machine and the host's check each carry it out.

use tide_gpu::layout::GroupLayout;

/// Elements of a run: gradients alternate between sources from run to run.
const RUN_ELEMS: u64 = 32;
/// One run in so many is kept of each parameter by forward.
const SAMPLE_RUNS: u64 = 16;
/// Elements that a layer hands on to the next.
pub const STATE_ELEMS: u64 = 64;
/// The most that is copied from a rank's data at once.
const DATA_COPY_ELEMS_MAX: u64 = 1 << 19;

/// A tensor of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tensor {
    /// The rank's data, the same in all steps.
    Data,
    /// What goes into layer `.0`.
    State(usize),
    /// What forward of layer `.0` keeps for its backward.
    Kept(usize),
    /// Parameter `.1` of layer `.0`, whole.
    Parameter(usize, usize),
    /// Its gradient.
    Gradient(usize, usize),
}

/// Some runs of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Runs {
    /// The tensor.
    pub tensor: Tensor,
    /// The first element.
    pub first: u64,
    /// Elements from one run to the next.
    pub pitch: u64,
}

/// A copy of `rows` runs of `width` elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// Where to.
    pub to: Runs,
    /// Where from.
    pub from: Runs,
    /// Elements of a run.
    pub width: u64,
    /// Runs.
    pub rows: u64,
}

/// Which call a move belongs to, for the data to differ from call to call.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// The step.
    pub step: u64,
    /// The micro-step in it.
    pub micro_step: u64,
    /// The rank.
    pub rank: u64,
}

/// The moves of layers of one layout.
pub struct Compute<'a> {
    layout: &'a GroupLayout,
    sample_elems: u64,
}

impl<'a> Compute<'a> {
    /// The compute of layers of this layout.
    pub fn new(layout: &'a GroupLayout) -> Self {
        let sampled = |elems: u64| runs(elems, 0, SAMPLE_RUNS).map(|r| r.width * r.rows).sum::<u64>();
        Self { layout, sample_elems: layout.parameters().iter().map(|p| sampled(p.elems)).sum() }
    }

    /// Elements of [`Tensor::Data`].
    pub fn data_elems(&self) -> u64 {
        let largest = self.layout.parameters().iter().map(|p| p.elems).max().unwrap_or(0);
        2 * largest.clamp(STATE_ELEMS, DATA_COPY_ELEMS_MAX)
    }

    /// Elements of [`Tensor::Kept`]: a sample of every parameter, and what came in.
    pub fn kept_elems(&self) -> u64 {
        self.sample_elems + STATE_ELEMS
    }

    /// What enters the first layer.
    pub fn input(&self, at: Moment) -> Vec<Move> {
        let first = self.data_offset(at, [usize::MAX, 0, 0], STATE_ELEMS);
        vec![flat((Tensor::State(0), 0), (Tensor::Data, first), STATE_ELEMS)]
    }

    /// Forward of a layer: keeps what backward needs, and hands on to the next.
    pub fn forward(&self, layer: usize) -> Vec<Move> {
        let mut moves = self.recompute(layer);
        let half = STATE_ELEMS / 2;
        let next = Tensor::State(layer + 1);
        moves.push(flat((next, 0), (Tensor::Kept(layer), 0), half));
        moves.push(flat((next, half), (Tensor::State(layer), 0), half));
        moves
    }

    /// The part of forward that backward needs.
    pub fn recompute(&self, layer: usize) -> Vec<Move> {
        let kept = Tensor::Kept(layer);
        let (mut moves, mut at) = (Vec::new(), 0);
        for (parameter, p) in self.layout.parameters().iter().enumerate() {
            for r in runs(p.elems, 0, SAMPLE_RUNS) {
                let from = Runs { tensor: Tensor::Parameter(layer, parameter), first: r.first, pitch: r.pitch };
                let to = Runs { tensor: kept, first: at, pitch: r.width };
                moves.push(Move { to, from, width: r.width, rows: r.rows });
                at += r.width * r.rows;
            }
        }
        moves.push(flat((kept, at), (Tensor::State(layer), 0), STATE_ELEMS));
        moves
    }

    /// Backward of a layer: every gradient is data of the rank, whose even or odd runs are replaced by the parameter's, and
    /// some of the others by what forward kept, as far as that goes.
    pub fn backward(&self, at: Moment, layer: usize) -> Vec<Move> {
        let parity = (at.rank + at.micro_step + layer as u64) % 2;
        let (mut moves, mut kept) = (Vec::new(), 0);
        for (parameter, p) in self.layout.parameters().iter().enumerate() {
            let gradient = Tensor::Gradient(layer, parameter);
            for first in (0..p.elems).step_by(DATA_COPY_ELEMS_MAX as usize) {
                let elems = (p.elems - first).min(DATA_COPY_ELEMS_MAX);
                let from = self.data_offset(at, [layer, parameter, first as usize], elems);
                moves.push(flat((gradient, first), (Tensor::Data, from), elems));
            }
            for r in runs(p.elems, parity, 2) {
                let to = Runs { tensor: gradient, first: r.first, pitch: r.pitch };
                let from = Runs { tensor: Tensor::Parameter(layer, parameter), ..to };
                moves.push(Move { to, from, width: r.width, rows: r.rows });
            }
            for r in runs(p.elems, 1 - parity, 2) {
                let rows = r.rows.min((self.kept_elems() - kept) / r.width);
                if rows > 0 {
                    let to = Runs { tensor: gradient, first: r.first, pitch: r.pitch };
                    let from = Runs { tensor: Tensor::Kept(layer), first: kept, pitch: r.width };
                    moves.push(Move { to, from, width: r.width, rows });
                    kept += r.width * rows;
                }
            }
        }
        moves
    }

    /// Where in the rank's data `elems` elements are taken: another place for every call and piece.
    fn data_offset(&self, at: Moment, piece: [usize; 3], elems: u64) -> u64 {
        let words = [at.step, at.micro_step].into_iter().chain(piece.map(|word| word as u64));
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        xxhash_rust::xxh3::xxh3_64(&bytes) % (self.data_elems() - elems + 1)
    }
}

/// Equally wide runs of a tensor.
struct Stripe {
    first: u64,
    pitch: u64,
    width: u64,
    rows: u64,
}

/// Runs `from`, `from + every` and so on of `elems` elements: those that are whole, then the last if it is not.
fn runs(elems: u64, from: u64, every: u64) -> impl Iterator<Item = Stripe> {
    let (first, pitch) = (from * RUN_ELEMS, every * RUN_ELEMS);
    let rows = if elems < first + RUN_ELEMS { 0 } else { (elems - first - RUN_ELEMS) / pitch + 1 };
    let rest = first + rows * pitch;
    let whole = Stripe { first, pitch, width: RUN_ELEMS, rows };
    let last = Stripe { first: rest, pitch, width: elems.saturating_sub(rest), rows: 1 };
    [whole, last].into_iter().filter(|s| s.rows > 0 && s.width > 0)
}

fn flat(to: (Tensor, u64), from: (Tensor, u64), elems: u64) -> Move {
    let runs = |(tensor, first)| Runs { tensor, first, pitch: elems };
    Move { to: runs(to), from: runs(from), width: elems, rows: 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tide_gpu::layout::{Dtype, Group, Parameter};

    #[test]
    fn runs_of_both_parities_cover_a_tensor_once() {
        for elems in 0..300 {
            let mut seen = vec![0; elems as usize];
            for stripe in (0..2).flat_map(|parity| runs(elems, parity, 2)) {
                for row in 0..stripe.rows {
                    let first = (stripe.first + row * stripe.pitch) as usize;
                    seen[first..first + stripe.width as usize].iter_mut().for_each(|n| *n += 1);
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{elems}: {seen:?}");
        }
    }

    #[test]
    fn every_move_stays_within_its_tensors() {
        let parameters = [[70, 33], [1, 5], [4000, 1]].iter().enumerate();
        let parameters = parameters.map(|(i, s)| Parameter::new(format!("p{i}"), *s, Dtype::Bf16).unwrap());
        let layout = GroupLayout::new(&Group::new(parameters.collect()).unwrap(), 4).unwrap();
        let compute = Compute::new(&layout);
        let elems = |tensor| match tensor {
            Tensor::Data => compute.data_elems(),
            Tensor::State(_) => STATE_ELEMS,
            Tensor::Kept(_) => compute.kept_elems(),
            Tensor::Parameter(_, p) | Tensor::Gradient(_, p) => layout.parameters()[p].elems,
        };
        for (step, micro_step, rank) in [(0, 0, 0), (1, 0, 3), (7, 2, 1)] {
            let at = Moment { step, micro_step, rank };
            for m in [compute.input(at), compute.forward(1), compute.backward(at, 1)].concat() {
                for side in [m.to, m.from] {
                    assert!(side.first + (m.rows - 1) * side.pitch + m.width <= elems(side.tensor), "{m:?}");
                    assert!(m.rows == 1 || side.pitch >= m.width, "{m:?}");
                }
            }
        }
    }
}

//! The check of every element: a reduce-scatter against fp64 arithmetic, an all-gather byte by byte.

use tide_gpu::layout::GroupLayout;

use crate::tensors::{Gradients, Tensors};

/// Error allowed, as a share of the largest finite reference (at least 1).
const RELATIVE_BOUND: f64 = 1e-5;
/// What each element of the output holds before a call that accumulates.
pub const PREVIOUS: f32 = 1.0;
/// Elements compared at a time.
const CHUNK_ELEMS: usize = 1 << 15;
/// Sums within this share of the largest fp32 number may or may not overflow, by how they round.
const OVERFLOW_MARGIN: f64 = 1e-5;

/// What a check found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// Elements outside the bound, or of the wrong class (finite, infinite, not a number).
    pub wrong: u64,
    /// The largest error among elements that are finite and should be.
    pub max_abs_err: f64,
    /// The error allowed.
    pub err_bound: f64,
}

/// What an element should be.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Expected {
    /// This value, or this infinity or NaN.
    Value(f64),
    /// This value, or anything not finite: whether fp32 overflows on the way depends on the order.
    ValueOrOverflow(f64),
}

/// Checks `out = prev + α·Σ_u G_u[rows]` [TIDE eq. 5] on every rank.
pub struct ReduceCheck<'a> {
    gradients: &'a Gradients,
    layout: &'a GroupLayout,
    alpha: f64,
    previous: f64,
    wrong_class: u64,
    reference_max: f64,
    max_abs_err: f64,
    /// Errors beyond the bound that was known when they were met; the final one is no smaller.
    suspects: Vec<f64>,
}

impl<'a> ReduceCheck<'a> {
    /// A check that has seen nothing yet.
    pub fn new(gradients: &'a Gradients, layout: &'a GroupLayout, alpha: f32, accumulate: bool) -> Self {
        Self {
            gradients,
            layout,
            alpha: f64::from(alpha),
            previous: if accumulate { f64::from(PREVIOUS) } else { 0.0 },
            wrong_class: 0,
            reference_max: 0.0,
            max_abs_err: 0.0,
            suspects: Vec::new(),
        }
    }

    /// Checks the padded shard of `parameter` that `rank` ended with.
    pub fn see(&mut self, rank: u64, parameter: usize, shard: &[f32]) {
        let p = &self.layout.parameters()[parameter];
        assert_eq!(shard.len() as u64, p.shard_elems, "a whole padded shard");
        let first = p.rows_of(rank).start * p.row_elems;
        let live = p.live_elems_of(rank) as usize;
        let mut sums = Sums::default();
        for (chunk, start) in shard[..live].chunks(CHUNK_ELEMS).zip((first..).step_by(CHUNK_ELEMS)) {
            sums.add_up(self.gradients, parameter, start, chunk.len());
            for (i, &got) in chunk.iter().enumerate() {
                self.compare(f64::from(got), self.expected(&sums, i));
            }
        }
        for &got in &shard[live..] {
            self.wrong_class += u64::from(f64::from(got) != self.previous);
        }
    }

    fn expected(&self, sums: &Sums, index: usize) -> Expected {
        let sum = sums.signed[index];
        let finish = |sum: f64| narrow(self.previous + narrow(self.alpha * sum));
        let most = f64::from(f32::MAX);
        let magnitude = sums.magnitude(index);
        if sum.is_nan() || magnitude < most * (1.0 - OVERFLOW_MARGIN) {
            return Expected::Value(finish(sum));
        }
        let one_sign = sum.abs() == magnitude;
        if one_sign && magnitude > most * (1.0 + OVERFLOW_MARGIN) {
            return Expected::Value(finish(f64::INFINITY.copysign(sum)));
        }
        Expected::ValueOrOverflow(finish(sum))
    }

    fn compare(&mut self, got: f64, expected: Expected) {
        let reference = match expected {
            Expected::Value(value) => value,
            Expected::ValueOrOverflow(_) if !got.is_finite() => return,
            Expected::ValueOrOverflow(value) => value,
        };
        if !reference.is_finite() || !got.is_finite() {
            let same = if reference.is_nan() { got.is_nan() } else { got == reference };
            self.wrong_class += u64::from(!same);
            return;
        }
        self.reference_max = self.reference_max.max(reference.abs());
        let error = (got - reference).abs();
        self.max_abs_err = self.max_abs_err.max(error);
        if error > bound(self.reference_max) {
            self.suspects.push(error);
        }
    }

    /// The verdict on all that was seen.
    pub fn finish(self) -> Verdict {
        let err_bound = bound(self.reference_max);
        let beyond = self.suspects.iter().filter(|&&error| error > err_bound).count() as u64;
        Verdict { wrong: self.wrong_class + beyond, max_abs_err: self.max_abs_err, err_bound }
    }
}

fn bound(reference_max: f64) -> f64 {
    RELATIVE_BOUND * reference_max.max(1.0)
}

/// `value`, or the infinity that fp32 gives where it is too large.
fn narrow(value: f64) -> f64 {
    if value.abs() > f64::from(f32::MAX) { f64::INFINITY.copysign(value) } else { value }
}

/// Sums over all ranks of a run of elements.
#[derive(Default)]
struct Sums {
    signed: Vec<f64>,
    /// Sums of finite magnitudes; empty where no element is large enough for them to matter.
    magnitudes: Vec<f64>,
    values: Vec<f32>,
}

impl Sums {
    fn add_up(&mut self, gradients: &Gradients, parameter: usize, first: u64, count: usize) {
        self.values.resize(count, 0.0);
        self.signed.clear();
        self.signed.resize(count, 0.0);
        self.magnitudes.clear();
        let rank_count = gradients.rank_count;
        let mut largest = 0.0_f32;
        for rank in 0..rank_count {
            gradients.read(rank, parameter, first, &mut self.values);
            for (sum, &x) in self.signed.iter_mut().zip(&self.values) {
                *sum += f64::from(x);
                largest = largest.max(x.abs());
            }
        }
        if f64::from(largest) * rank_count as f64 <= f64::from(f32::MAX) * (1.0 - OVERFLOW_MARGIN) {
            return;
        }
        self.magnitudes.resize(count, 0.0);
        for rank in 0..rank_count {
            gradients.read(rank, parameter, first, &mut self.values);
            for (sum, &x) in self.magnitudes.iter_mut().zip(&self.values) {
                *sum += if x.is_finite() { f64::from(x).abs() } else { 0.0 };
            }
        }
    }

    fn magnitude(&self, index: usize) -> f64 {
        self.magnitudes.get(index).copied().unwrap_or(0.0)
    }
}

/// Checks that every rank holds every parameter, byte by byte.
pub struct GatherCheck<'a> {
    tensors: &'a Tensors,
    wrong: u64,
    reference: Vec<u8>,
}

impl<'a> GatherCheck<'a> {
    /// A check that has seen nothing yet.
    pub fn new(tensors: &'a Tensors) -> Self {
        Self { tensors, wrong: 0, reference: Vec::new() }
    }

    /// Checks the whole `parameter` that some rank ended with.
    pub fn see(&mut self, parameter: usize, got: &[u8]) {
        let item = self.tensors.group.parameters()[parameter].dtype().bytes() as usize;
        for (chunk, first) in got.chunks(CHUNK_ELEMS * item).zip((0_u64..).step_by(CHUNK_ELEMS)) {
            self.tensors.read(parameter, first, (chunk.len() / item) as u64, &mut self.reference);
            if chunk != self.reference {
                let pairs = chunk.chunks(item).zip(self.reference.chunks(item));
                self.wrong += pairs.filter(|(got, reference)| got != reference).count() as u64;
            }
        }
    }

    /// The verdict on all that was seen.
    pub fn finish(self) -> Verdict {
        Verdict { wrong: self.wrong, max_abs_err: 0.0, err_bound: 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Collective, GradDtype, SourceArgs};
    use crate::tensors::Workload;
    use crate::testing::{Scratch, safetensors_with};

    const RANKS: u64 = 4;

    /// A right output, in fp32: what each rank should hold of each parameter.
    fn right(gradients: &Gradients, layout: &GroupLayout, alpha: f32, previous: f32) -> Vec<Vec<Vec<f32>>> {
        let shard = |rank: u64, index: usize| {
            let p = &layout.parameters()[index];
            let mut out = vec![previous; p.shard_elems as usize];
            let first = p.rows_of(rank).start * p.row_elems;
            let mut sum = vec![0.0_f32; p.live_elems_of(rank) as usize];
            let mut part = sum.clone();
            for u in 0..gradients.rank_count {
                gradients.read(u, index, first, &mut part);
                sum.iter_mut().zip(&part).for_each(|(s, x)| *s += x);
            }
            out.iter_mut().zip(&sum).for_each(|(o, s)| *o += alpha * s);
            out
        };
        (0..layout.rank_count()).map(|r| (0..layout.parameters().len()).map(|i| shard(r, i)).collect()).collect()
    }

    fn generated() -> Workload {
        let group = Some("17x3,5,1x6x4".to_owned());
        let source = SourceArgs { preset: None, model: None, grads: None, group, grad_dtype: None, seed: 3 };
        Workload::open(&source, Collective::All, RANKS).unwrap()
    }

    /// One gradient of each rank, as fp32 files hold them.
    fn of_values(values: &[&[f32]]) -> (Scratch, Gradients) {
        let dir = Scratch::new();
        for (rank, values) in values.iter().enumerate() {
            let data = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            let file = safetensors_with(&[("a", "F32", &[values.len() as u64], data)]);
            dir.file(&format!("rank{rank}.safetensors"), &file);
        }
        let ranks = values.len() as u64;
        let reduce = crate::grads::workload(dir.dir(), Some(GradDtype::F32), Collective::Rs, ranks).unwrap().reduce;
        (dir, reduce.unwrap())
    }

    fn verdict(gradients: &Gradients, alpha: f32, accumulate: bool, outputs: &[Vec<Vec<f32>>]) -> Verdict {
        let layout = GroupLayout::new(&gradients.group, gradients.rank_count).unwrap();
        let mut check = ReduceCheck::new(gradients, &layout, alpha, accumulate);
        for (rank, shards) in outputs.iter().enumerate() {
            shards.iter().enumerate().for_each(|(p, shard)| check.see(rank as u64, p, shard));
        }
        check.finish()
    }

    /// Runs the check on one rank that holds all of one parameter.
    fn single(values: &[&[f32]], alpha: f32, out: &[f32]) -> u64 {
        let (_dir, gradients) = of_values(values);
        let layout = GroupLayout::new(&gradients.group, 1).unwrap();
        let mut check = ReduceCheck::new(&gradients, &layout, alpha, false);
        check.see(0, 0, out);
        check.finish().wrong
    }

    #[test]
    fn a_right_reduction_passes_with_and_without_accumulation() {
        let gradients = generated().reduce.unwrap();
        let layout = GroupLayout::new(&gradients.group, RANKS).unwrap();
        for (alpha, accumulate, previous) in [(1.0, false, 0.0), (0.25, true, PREVIOUS), (-3.0, true, PREVIOUS)] {
            let found = verdict(&gradients, alpha, accumulate, &right(&gradients, &layout, alpha, previous));
            assert_eq!(found.wrong, 0, "{found:?}");
            assert!(found.max_abs_err <= found.err_bound);
        }
    }

    #[test]
    fn one_corrupted_element_is_one_wrong_element() {
        let gradients = generated().reduce.unwrap();
        let layout = GroupLayout::new(&gradients.group, RANKS).unwrap();
        let mut outputs = right(&gradients, &layout, 1.0, 0.0);
        outputs[1][0][7] += 0.01;
        let found = verdict(&gradients, 1.0, false, &outputs);
        assert_eq!(found.wrong, 1);
        assert!((found.max_abs_err - 0.01).abs() < 1e-4, "{found:?}");
    }

    #[test]
    fn a_shifted_shard_a_lost_rank_and_a_lost_alpha_are_wrong() {
        let gradients = generated().reduce.unwrap();
        let layout = GroupLayout::new(&gradients.group, RANKS).unwrap();
        let good = right(&gradients, &layout, 0.5, 0.0);
        let mut shifted = good.clone();
        shifted[0][0].rotate_left(1);
        assert_eq!(verdict(&gradients, 0.5, false, &shifted).wrong, 15);
        let mut swapped = good.clone();
        swapped.swap(0, 1);
        assert!(verdict(&gradients, 0.5, false, &swapped).wrong > 15);
        let unscaled = right(&gradients, &layout, 1.0, 0.0);
        assert!(verdict(&gradients, 0.5, false, &unscaled).wrong > 50);
        let fewer = Gradients { rank_count: RANKS - 1, ..generated().reduce.unwrap() };
        assert!(verdict(&gradients, 0.5, false, &right(&fewer, &layout, 0.5, 0.0)).wrong > 50);
    }

    #[test]
    fn padding_must_keep_what_was_there() {
        let gradients = generated().reduce.unwrap();
        let layout = GroupLayout::new(&gradients.group, RANKS).unwrap();
        let mut outputs = right(&gradients, &layout, 1.0, 0.0);
        *outputs[3][0].last_mut().unwrap() = 1e-7;
        outputs[2][2][0] = f32::NAN;
        assert_eq!(verdict(&gradients, 1.0, false, &outputs).wrong, 2);
        let unaccumulated = right(&gradients, &layout, 1.0, 0.0);
        let found = verdict(&gradients, 1.0, true, &unaccumulated);
        assert_eq!(found.wrong, unaccumulated.iter().flatten().map(|s| s.len() as u64).sum::<u64>());
    }

    #[test]
    fn nan_and_infinity_must_come_out_where_they_belong() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let values: [&[f32]; 1] = [&[nan, inf, -inf, 1.0]];
        assert_eq!(single(&values, 1.0, &[nan, inf, -inf, 1.0]), 0);
        assert_eq!(single(&values, 1.0, &[0.0, inf, -inf, 1.0]), 1, "a NaN lost");
        assert_eq!(single(&values, 1.0, &[nan, -inf, inf, nan]), 3, "signs exchanged, a NaN made");
        assert_eq!(single(&values, -1.0, &[nan, -inf, inf, -1.0]), 0);
    }

    #[test]
    fn infinities_of_both_signs_give_nan() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let (_dir, gradients) = of_values(&[&[inf, inf], &[-inf, 1.0]]);
        assert_eq!(verdict(&gradients, 1.0, false, &[vec![vec![nan]], vec![vec![inf]]]).wrong, 0);
        assert_eq!(verdict(&gradients, 1.0, false, &[vec![vec![inf]], vec![vec![nan]]]).wrong, 2);
    }

    /// T19: the factor comes after the sum, so a sum that overflows stays infinite.
    #[test]
    fn t19_a_sum_that_overflows_is_infinite_whatever_alpha() {
        let big: &[f32] = &[3.389e38];
        let (_dir, gradients) = of_values(&[big, big, big, big]);
        let outputs = |x: f32| vec![vec![vec![x]], vec![vec![0.0]], vec![vec![0.0]], vec![vec![0.0]]];
        assert_eq!(verdict(&gradients, 0.25, false, &outputs(f32::INFINITY)).wrong, 0);
        assert_eq!(verdict(&gradients, 0.25, false, &outputs(3.389e38)).wrong, 1);
    }

    #[test]
    fn an_overflow_on_the_way_may_show_or_not() {
        let (_dir, gradients) = of_values(&[&[3e38], &[3e38], &[-3e38]]);
        let outputs = |x: f32| vec![vec![vec![x]], vec![vec![0.0]], vec![vec![0.0]]];
        for fine in [3e38, f32::INFINITY] {
            assert_eq!(verdict(&gradients, 1.0, false, &outputs(fine)).wrong, 0, "{fine}");
        }
        assert_eq!(verdict(&gradients, 1.0, false, &outputs(1e38)).wrong, 1);
    }

    #[test]
    fn a_gather_is_compared_byte_by_byte() {
        let tensors = generated().gather.unwrap();
        let mut whole = Vec::new();
        tensors.read(0, 0, 51, &mut whole);
        let wrong_with = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = whole.clone();
            change(&mut bytes);
            let mut check = GatherCheck::new(&tensors);
            check.see(0, &bytes);
            check.finish().wrong
        };
        assert_eq!(wrong_with(&|_| ()), 0);
        assert_eq!(wrong_with(&|b| b[11] ^= 0x80), 1);
        assert_eq!(wrong_with(&|b| b.swap(0, 100)), 2);
        assert!(wrong_with(&|b| b.rotate_left(2)) > 45);
    }
}

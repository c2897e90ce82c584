//! The values that a replay starts from: parameters of every step, and each rank's own data.

use crate::cli::GradDtype;
use crate::generate::Stream;

/// What tells the two apart in the hash.
const PARAMETER: u64 = 1;
const DATA: u64 = 2;
/// Elements that are made at a time: what lies between their hash and their bits takes no more memory than these.
const SCRATCH_ELEMS: u64 = 1 << 16;

/// Generated values, all from one seed.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    seed: u64,
}

impl Source {
    /// The values of a seed.
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Elements `first..first + elems` of a parameter, in step `step`, as bf16 bits.
    pub fn parameter(&self, step: u64, layer: usize, parameter: usize, first: u64, elems: u64) -> Vec<u16> {
        bits(Stream::keyed(&[self.seed, PARAMETER, step, layer as u64, parameter as u64]), first, elems)
    }

    /// A rank's data.
    pub fn data(&self, rank: u64, elems: u64) -> Vec<u16> {
        bits(Stream::keyed(&[self.seed, DATA, rank]), 0, elems)
    }
}

fn bits(stream: Stream, first: u64, elems: u64) -> Vec<u16> {
    let mut all = Vec::with_capacity(elems as usize);
    let (mut values, mut bytes) = (Vec::new(), Vec::new());
    for at in (0..elems).step_by(SCRATCH_ELEMS as usize) {
        values.resize(SCRATCH_ELEMS.min(elems - at) as usize, 0.0);
        stream.fill(first + at, &mut values);
        GradDtype::Bf16.encode(&values, &mut bytes);
        all.extend(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])));
    }
    all
}

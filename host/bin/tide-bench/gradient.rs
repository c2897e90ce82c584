//! The two types gradients are read in, and conversion into them.

use half::{bf16, f16};
use safetensors::tensor::Dtype as FileDtype;
use tide_gpu::layout::Dtype;

use crate::cli::GradDtype;

impl GradDtype {
    /// The layout's name of the type.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::Bf16,
            Self::F32 => Dtype::F32,
        }
    }

    /// `values`, each rounded to this type, to nearest and ties to even.
    pub fn round(self, values: &mut [f32]) {
        if self == Self::Bf16 {
            values.iter_mut().for_each(|x| *x = f32::from_bits(u32::from(bf16_bits(*x)) << 16));
        }
    }

    /// Replaces `out` by `values`, which this type holds exactly, as little-endian bytes.
    pub fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        out.resize(values.len() * self.dtype().bytes() as usize, 0);
        match self {
            Self::Bf16 => {
                let items = out.chunks_exact_mut(2);
                items.zip(values).for_each(|(item, &x)| item.copy_from_slice(&bf16_bits(x).to_le_bytes()));
            }
            Self::F32 => {
                let items = out.chunks_exact_mut(4);
                items.zip(values).for_each(|(item, &x)| item.copy_from_slice(&x.to_le_bytes()));
            }
        }
    }
}

/// [`bf16::from_f32`], written so that a compiler turns a loop of it into vector code.
fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let quiet_nan = bits | 0x0040_0000;
    ((if x.is_nan() { quiet_nan } else { rounded }) >> 16) as u16
}

/// Whether a file's type can be a gradient: it converts to fp32 exactly.
pub fn converts_to_f32(dtype: FileDtype) -> bool {
    matches!(dtype, FileDtype::F32 | FileDtype::F16 | FileDtype::BF16)
}

/// Elements `first..first + out.len()` of `data`, converted to fp32 exactly.
///
/// # Panics
/// For a type that does not convert.
pub fn read_as_f32(dtype: FileDtype, data: &[u8], first: u64, out: &mut [f32]) {
    let first = first as usize;
    let wide = || data[first * 4..].chunks_exact(4);
    let narrow = || data[first * 2..].chunks_exact(2);
    match dtype {
        FileDtype::F32 => {
            out.iter_mut().zip(wide()).for_each(|(x, b)| *x = f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        }
        FileDtype::BF16 => {
            out.iter_mut().zip(narrow()).for_each(|(x, b)| *x = bf16::from_le_bytes([b[0], b[1]]).to_f32());
        }
        FileDtype::F16 => {
            out.iter_mut().zip(narrow()).for_each(|(x, b)| *x = f16::from_le_bytes([b[0], b[1]]).to_f32());
        }
        other => panic!("{other} is no gradient type"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_to_bf16_goes_to_nearest_and_ties_to_even() {
        let mut values = [1.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, f32::NAN, f32::INFINITY];
        GradDtype::Bf16.round(&mut values);
        assert_eq!(values[..3], [1.0, 1.0, 1.0 + 4.0 / 256.0]);
        assert!(values[3].is_nan() && values[4] == f32::INFINITY);
    }

    #[test]
    fn fast_rounding_is_the_usual_one() {
        let patterns = (0..=u16::MAX).flat_map(|high| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| (high, low)));
        for (high, low) in patterns {
            let x = f32::from_bits(u32::from(high) << 16 | low);
            assert_eq!(bf16_bits(x), bf16::from_f32(x).to_bits(), "{x:e}");
        }
    }

    #[test]
    fn reading_starts_where_it_is_told() {
        let data: Vec<u8> = [1.5_f32, -2.0, 3.25].iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
        let mut out = [0.0; 2];
        read_as_f32(FileDtype::F16, &data, 1, &mut out);
        assert_eq!(out, [-2.0, 3.25]);
    }
}

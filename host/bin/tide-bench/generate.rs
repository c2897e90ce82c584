//! Generated data: every element is a hash of where it stands, so that any part of it can be made
//! again, in any order, by whoever checks it.

/// The fractional part of the golden ratio, the step of a Weyl sequence.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
/// The mean of a sum of four uniform 16-bit numbers.
const MEAN: f32 = 131_070.0;
/// One over the standard deviation of that sum: `sqrt(4·(65536² − 1)/12)` is 37837.2.
const SCALE: f32 = 1.0 / 37_837.227;

/// The elements of one tensor on one rank.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    key: u64,
}

impl Stream {
    /// The gradient of `parameter` on `rank`.
    pub fn gradient(seed: u64, rank: u64, parameter: usize) -> Self {
        Self::keyed(&[seed, rank + 1, parameter as u64])
    }

    /// The parameter itself, the same on all ranks.
    pub fn tensor(seed: u64, parameter: usize) -> Self {
        Self::keyed(&[seed, 0, parameter as u64])
    }

    /// The tensor that these words name.
    pub fn keyed(words: &[u64]) -> Self {
        Self { key: words.iter().fold(GOLDEN, |key, &word| mix(key ^ mix(word.wrapping_add(GOLDEN)))) }
    }

    /// Element `elem`, about standard normal: four uniform 16-bit numbers added and centred.
    pub fn value(self, elem: u64) -> f32 {
        let bits = mix(self.key.wrapping_add(elem.wrapping_mul(GOLDEN)));
        let pairs = (bits & 0x0000_ffff_0000_ffff) + ((bits >> 16) & 0x0000_ffff_0000_ffff);
        let sum = (pairs & 0xffff_ffff) + (pairs >> 32);
        (sum as f32 - MEAN) * SCALE
    }

    /// Elements `first..first + out.len()`.
    pub fn fill(self, first: u64, out: &mut [f32]) {
        for (elem, value) in (first..).zip(out) {
            *value = self.value(elem);
        }
    }
}

/// SplitMix64's finalizer: a bijection that spreads every input bit over the word.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_about_standard_normal() {
        let mut values = vec![0.0; 1 << 18];
        Stream::gradient(7, 3, 2).fill(0, &mut values);
        let n = values.len() as f64;
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
        assert!(mean.abs() < 0.01, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.01, "variance {variance}");
    }

    #[test]
    fn any_part_can_be_made_again() {
        let stream = Stream::gradient(1, 0, 0);
        let (mut whole, mut part) = (vec![0.0; 1000], vec![0.0; 10]);
        stream.fill(0, &mut whole);
        stream.fill(123, &mut part);
        assert_eq!(whole[123..133], part);
    }

    #[test]
    fn seed_rank_and_parameter_each_change_the_data() {
        let first = |s: Stream| [s.value(0), s.value(1), s.value(2), s.value(3)];
        let base = first(Stream::gradient(1, 2, 3));
        for other in
            [Stream::gradient(2, 2, 3), Stream::gradient(1, 3, 3), Stream::gradient(1, 2, 4), Stream::tensor(1, 3)]
        {
            assert_ne!(base, first(other));
        }
    }
}

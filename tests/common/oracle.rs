//! The reduction again, element by element, in the order that the design promises: what the kernels give must equal it bit for
//! bit. Written from [TIDE §4.2, §4.3] and equation 5 alone; it shares no code with plans or kernels.

use super::Gradients;
use tide_gpu::Scale;

/// Every rank's packed output.
pub fn bitwise(
    (m, l): (u64, u64),
    wave_width: u64,
    shapes: &[Vec<u64>],
    all: &[Gradients],
    scale: Scale,
    previous: f32,
) -> Vec<Vec<f32>> {
    let n = m * l;
    let packed: u64 = shapes.iter().map(|s| s[0].div_ceil(n) * s[1..].iter().product::<u64>()).sum();
    let sub_slice_elems = packed.div_ceil(l).next_multiple_of(32);
    let value = |source: u64, rank: u64, q: u64| -> Option<f32> {
        let mut first = 0;
        for (p, shape) in shapes.iter().enumerate() {
            let k: u64 = shape[1..].iter().product();
            let shard = shape[0].div_ceil(n) * k;
            if q < first + shard {
                let element = rank * shard + q - first;
                let live = element < shape[0] * k;
                return live.then(|| all[source as usize][p].as_ref().map_or(0.0, |v| v[element as usize]));
            }
            first += shard;
        }
        unreachable!("q is inside the row")
    };
    let element = |rank: u64, q: u64| -> f32 {
        let node = rank / l;
        let s = q / sub_slice_elems;
        let base = if scale.accumulate { previous } else { 0.0 };
        if value(0, rank, q).is_none() {
            return base + scale.alpha * 0.0;
        }
        // Level 1 of contributor c: the node's ranks in order, the one that sums last.
        let partial = |c: u64, j: u64| -> f32 {
            let source_node = (node + m - c % m) % m;
            let of = |i: u64| value(source_node * l + i, rank, q).unwrap();
            let others = (0..l).filter(|i| *i != j).map(of);
            others.chain([of(j)]).reduce(|a, b| a + b).unwrap()
        };
        let mut total: Option<f32> = None;
        let mut first = 1;
        while first <= m {
            let end = (first + wave_width).min(m + 1);
            // Level 2: the partials of the wave in the order of the local rank that holds them; blocks that no
            // contributor wrote are zeros.
            let mut held: Vec<(u64, f32)> = (0..l).map(|j| (j, 0.0)).collect();
            let mut written = vec![false; l as usize];
            for c in first..end {
                let c_bar = c % m;
                let j = (s + l * m - c_bar) % l;
                assert!(!written[j as usize], "two contributors on one local rank");
                written[j as usize] = true;
                held[j as usize].1 = partial(c, j);
            }
            let wave = held.into_iter().map(|(_, v)| v).reduce(|a, b| a + b).unwrap();
            total = Some(total.map_or(wave, |t| t + wave));
            first = end;
        }
        base + scale.alpha * total.unwrap()
    };
    (0..n).map(|rank| (0..packed).map(|q| element(rank, q)).collect()).collect()
}

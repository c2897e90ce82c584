//! A first look.
mod common;
use common::*;

#[test]
fn smoke() {
    for (m, l) in [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 4), (5, 4), (9, 2)] {
        for path in [tide_gpu::Path::Device, tide_gpu::Path::Host] {
            let mut case = Case::new(m, l, &[&[6, 4], &[7]]);
            case.path = path;
            let out = case.run(|_, r| int_fill(&case.shapes, r));
            let all: Vec<_> = (0..case.rank_count()).map(|r| int_fill(&case.shapes, r)).collect();
            assert_close(&out, &reference(&case.shapes, &all, case.scale, 0.0), &format!("{m}x{l}"));
        }
    }
}

//! `tide-bench doctor`: what the machine has, and what each lack costs.

/// Prints the report; gives the exit status: 0 nothing is lacking, 10 it runs with fallbacks, 20 no GPU can be used.
#[cfg(feature = "cuda")]
pub fn report() -> u8 {
    use tide_gpu::gpu::cuda::doctor::{self, Verdict};
    let report = doctor::report();
    print!("{report}");
    match report.verdict() {
        Verdict::Pass => 0,
        Verdict::Warn => 10,
        Verdict::Fail => 20,
    }
}

/// Prints that this build cannot look.
#[cfg(not(feature = "cuda"))]
pub fn report() -> u8 {
    println!("FAIL  build  lacks the feature `cuda`: no GPU can be used");
    20
}

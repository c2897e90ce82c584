//! The library's collectives as legs of a run (for now none).
use crate::cli::RunArgs;
use crate::examine::{Job, Leg};
use crate::progress::Progress;
use anyhow::Result;
use tide_gpu::plan::{ReduceScatterOptions, Topology};

/// The machine that this build runs on.
pub const BACKEND: &str = "sim";

/// Puts the inputs of `job` on the machine.
pub fn prepare<'a>(
    _: &RunArgs,
    _: Topology,
    _: &ReduceScatterOptions,
    _: Job<'a>,
    _: &Progress,
) -> Result<(Box<dyn Leg + 'a>, Vec<String>)> {
    Err(crate::failure::unsupported("no collectives in this build"))
}

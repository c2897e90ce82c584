//! The library's collectives as legs of a run.

mod gather;
mod reduce;

use anyhow::Result;
use tide_device::abi::params::GRADIENTS_MAX;
use tide_gpu::gpu::{DevicePtr, Gpu};
use tide_gpu::layout::Group;
use tide_gpu::plan::ReduceScatterOptions;
use tide_gpu::{Communicator, Path, Scale};

use crate::examine::{Job, Leg};
use crate::progress::Progress;
use crate::site::Site;

/// The path of a collective that the baseline carries.
const STOCK: &str = "stock";
/// Bytes made and uploaded at a time.
const CHUNK_BYTES: u64 = 1 << 20;

/// Puts the inputs of `job` on the machine. Beside the leg, a line to print where it is not the one
/// that one would expect.
///
/// # Errors
/// Those of the library.
pub fn prepare<'a>(
    site: &Site,
    options: &ReduceScatterOptions,
    job: Job<'a>,
    progress: &Progress,
) -> Result<(Box<dyn Leg + 'a>, Option<String>)> {
    let comm = site.communicator()?;
    let leg: Box<dyn Leg + 'a> = match job {
        Job::Gather(tensors) => Box::new(gather::GatherLeg::new(comm, tensors, progress)?),
        Job::Reduce { gradients, alpha, accumulate } => {
            let scale = Scale { alpha, accumulate };
            Box::new(reduce::ReduceLeg::new(comm, gradients, options, scale, progress)?)
        }
    };
    let note = (!is_fast(job.group())).then(|| {
        let (name, count) = (job.name(), job.group().parameters().len());
        format!("{name}: {count} parameters, the fast path takes {GRADIENTS_MAX}: the stock path runs instead")
    });
    Ok((leg, note))
}

/// Whether the fast path takes the group; the stock path takes any.
pub fn is_fast(group: &Group) -> bool {
    group.parameters().len() <= GRADIENTS_MAX
}

/// The back end's name: the network's, where that is a library's, else the machine's.
fn backend_name(comm: &Communicator) -> &'static str {
    match comm.network() {
        "loopback" => comm.gpu().name(),
        network => network,
    }
}

/// The word for who drives the network of a collective on the fast path.
fn path_name(comm: &Communicator) -> &'static str {
    match comm.options().path {
        Path::Device => "device",
        Path::Host => "host",
    }
}

/// Fills `bytes` from `address` on with `pattern`, whose length divides them.
///
/// # Errors
/// Those of the machine.
pub fn fill(gpu: &dyn Gpu, address: DevicePtr, bytes: u64, pattern: &[u8]) -> Result<()> {
    let whole = CHUNK_BYTES.min(bytes) as usize;
    let chunk = pattern.repeat(whole.div_ceil(pattern.len()));
    for first in (0..bytes).step_by(chunk.len().max(1)) {
        let count = (bytes - first).min(chunk.len() as u64) as usize;
        gpu.upload(DevicePtr(address.0 + first), &chunk[..count])?;
    }
    Ok(())
}

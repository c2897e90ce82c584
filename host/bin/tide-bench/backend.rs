//! The machine that a run uses: GPUs where there are some, else the simulated machine, which is said in one line.

use std::sync::Arc;

use anyhow::Result;
use tide_device::arch::sim::sched::MachineOptions;
use tide_gpu::gpu::Gpu;
use tide_gpu::gpu::sim::{SimGpu, SimOptions};

use crate::cli::Backend;
use crate::failure::unsupported;

/// Which machine a run will use, decided once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// The simulated one.
    Sim,
    /// The GPUs of the CUDA driver.
    Cuda,
    /// Those, of a cluster.
    Nccl,
}

impl Machine {
    /// The machine for this choice of the command line; with a line to print where it is not the one that one would hope for.
    ///
    /// # Errors
    /// GPUs were asked for, and there are none.
    pub fn choose(backend: Backend) -> Result<(Self, Option<String>)> {
        match (backend, cuda_absence()) {
            (Backend::Sim, _) => Ok((Self::Sim, None)),
            (Backend::Nccl, None) => Ok((Self::Nccl, None)),
            (_, None) => Ok((Self::Cuda, None)),
            (Backend::Nccl, Some(why)) => Err(unsupported(format!("--backend nccl: {why}"))),
            (Backend::Cuda, Some(why)) => Err(unsupported(format!("--backend cuda: {why}"))),
            (Backend::Auto, Some(why)) => Ok((Self::Sim, Some(format!("no GPU is used: {why}")))),
        }
    }

    /// The name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sim => "sim",
            Self::Cuda => "cuda",
            Self::Nccl => "nccl",
        }
    }

    /// Starts the machine, for ranks of `gpus_per_node` GPUs a node.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn start(self, gpus_per_node: u32, seed: u64) -> Result<Arc<dyn Gpu>> {
        match self {
            Self::Sim => {
                let machine = MachineOptions { device_count: gpus_per_node, seed, ..Default::default() };
                Ok(SimGpu::new(SimOptions { machine, ..Default::default() }))
            }
            Self::Cuda | Self::Nccl => start_cuda(),
        }
    }
}

#[cfg(feature = "cuda")]
fn cuda_absence() -> Option<String> {
    tide_gpu::gpu::cuda::CudaGpu::probe().err().map(|absence| absence.to_string())
}

#[cfg(not(feature = "cuda"))]
fn cuda_absence() -> Option<String> {
    Some("this build lacks the feature `cuda`".to_owned())
}

#[cfg(feature = "cuda")]
fn start_cuda() -> Result<Arc<dyn Gpu>> {
    Ok(tide_gpu::gpu::cuda::CudaGpu::new(tide_gpu::gpu::cuda::CudaOptions::default())?)
}

#[cfg(not(feature = "cuda"))]
fn start_cuda() -> Result<Arc<dyn Gpu>> {
    Err(unsupported("this build lacks the feature `cuda`".to_owned()))
}

/// Ends the process after a fail-stop. A GPU may hold a parked kernel, behind which the driver's own clean-up would wait.
pub fn exit_now(status: u8) -> ! {
    use std::io::Write as _;
    // Nothing can be done for a stream that does not take its last bytes.
    let _ = std::io::stdout().flush();
    #[cfg(feature = "cuda")]
    tide_gpu::gpu::cuda::exit_now(status.into());
    #[cfg(not(feature = "cuda"))]
    std::process::exit(status.into());
}

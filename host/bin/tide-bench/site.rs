//! Where a run takes place: all ranks in this process, or, with NCCL, those of this process among others'.

#[cfg(all(feature = "cuda", feature = "nccl"))]
mod nccl;

use std::sync::Arc;

use anyhow::{Context, Result};
use tide_gpu::net::Fabric;
use tide_gpu::plan::Topology;
use tide_gpu::{Communicator, CommunicatorOptions, Path};

use crate::backend::Machine;
use crate::cli::RunArgs;
#[cfg(not(all(feature = "cuda", feature = "nccl")))]
use crate::failure::unsupported;

/// Nodes and GPUs of a node where nothing says otherwise.
const SHAPE: (u32, u32) = (2, 4);

/// The ranks of a run, and how they are connected.
pub struct Site {
    machine: Machine,
    topology: Topology,
    seed: u64,
    path: Path,
    /// With NCCL; else each communicator gets a machine of its own.
    fabric: Option<Arc<dyn Fabric>>,
    /// Lines to print.
    pub notes: Vec<String>,
}

impl Site {
    /// Finds the ranks. Processes of a launcher connect here.
    ///
    /// # Errors
    /// Bad usage, and what this machine or the cluster cannot do.
    pub fn open(arguments: &RunArgs) -> Result<Self> {
        let (machine, fallback) = Machine::choose(arguments.backend)?;
        let mut notes: Vec<String> = fallback.into_iter().collect();
        let seed = arguments.source.seed;
        if machine != Machine::Nccl {
            let path = arguments.path.map_or(Path::Device, Into::into);
            return Ok(Self { machine, topology: topology(arguments)?, seed, path, fabric: None, notes });
        }
        let (fabric, path) = connect(arguments, &mut notes)?;
        Ok(Self { machine, topology: fabric.topology(), seed, path, fabric: Some(fabric), notes })
    }

    /// The machine.
    pub fn machine(&self) -> Machine {
        self.machine
    }

    /// All ranks.
    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// Whether this process is the one that prints.
    pub fn is_first(&self) -> bool {
        self.fabric.as_ref().is_none_or(|f| f.driven().iter().any(|rank| rank.0 == 0))
    }

    /// A communicator of the ranks of this process.
    ///
    /// # Errors
    /// Those of the library.
    pub fn communicator(&self) -> Result<Communicator> {
        let options = CommunicatorOptions { path: self.path, ..Default::default() };
        Ok(match &self.fabric {
            Some(fabric) => Communicator::over(Arc::clone(fabric), options)?,
            None => {
                let gpu = self.machine.start(self.topology.local_rank_count(), self.seed)?;
                Communicator::new(gpu, self.topology, options)?
            }
        })
    }
}

/// The topology that the options ask for.
fn topology(arguments: &RunArgs) -> Result<Topology> {
    let (nodes, gpus) = (arguments.nodes.unwrap_or(SHAPE.0), arguments.gpus.unwrap_or(SHAPE.1));
    Topology::new(nodes, gpus).context("--nodes and --gpus")
}

#[cfg(all(feature = "cuda", feature = "nccl"))]
use self::nccl::connect;

#[cfg(not(all(feature = "cuda", feature = "nccl")))]
fn connect(_arguments: &RunArgs, _notes: &mut Vec<String>) -> Result<(Arc<dyn Fabric>, Path)> {
    Err(unsupported("--backend nccl: this build lacks the feature `cuda` or `nccl`".to_owned()))
}

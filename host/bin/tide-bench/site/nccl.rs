//! The ranks of a cluster, connected by NCCL: one per process where a launcher has started them, else all in this one.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use nccl_gin::host::Library;
use tide_gpu::gpu::cuda::nccl_module::{LoadedNccl, find as find_module};
use tide_gpu::gpu::cuda::{CudaGpu, CudaOptions};
use tide_gpu::launch::{Alone, Exchange, Placement, Rendezvous, RendezvousOptions};
use tide_gpu::net::Fabric;
use tide_gpu::net::nccl::{Driven, NcclFabric, NcclOptions, Way};
use tide_gpu::plan::{Rank, RankRange, Topology};
use tide_gpu::{Path, TideError};

use super::topology;
use crate::cli::RunArgs;
use crate::failure::usage;

/// Connects the ranks of this process to all others. Beside the fabric, the path over its rails.
///
/// # Errors
/// Bad usage, and what this machine, NCCL or the cluster cannot do.
pub fn connect(arguments: &RunArgs, notes: &mut Vec<String>) -> Result<(Arc<dyn Fabric>, Path)> {
    let env = |name: &str| std::env::var(name).ok();
    let timeout = Duration::from_secs(arguments.connect_timeout_s.into());
    let placement = Placement::detect(&env)?;
    let found = CudaGpu::probe().map_err(TideError::from)?;
    // What NCCL is to find in the environment, before any thread is started.
    align_traffic_class(notes);
    if placement.is_none() && topology(arguments)?.rank_count() > found.device_count {
        share_gpus(notes);
    }
    let mut exchange: Box<dyn Exchange> = Box::new(Alone);
    let (topology, ranks) = match &placement {
        None => {
            let topology = topology(arguments)?;
            (topology, topology.all())
        }
        Some(placement) => {
            let topology = placed(arguments, placement)?;
            let mut rendezvous = Rendezvous::join(&RendezvousOptions::new(placement, &env, timeout)?)?;
            placement.agree(&mut rendezvous)?;
            exchange = Box::new(rendezvous);
            notes.push(format!("ranks by {}", placement.launcher));
            (topology, RankRange::new(Rank(placement.rank), 1))
        }
    };
    let local = |rank: Rank| topology.local_of(rank).0 % found.device_count;
    let (gpu_options, devices) = match &placement {
        // One GPU for one rank: a launcher that shows each process its own shows but one.
        Some(_) => (
            CudaOptions {
                devices: Some(vec![local(Rank(ranks.iter().next().map_or(0, |r| r.0)))]),
                ..Default::default()
            },
            vec![0],
        ),
        None => (CudaOptions::default(), ranks.iter().map(local).collect()),
    };
    let gpu = CudaGpu::new(gpu_options)?;
    let arch = gpu.arch(devices[0])?;
    let library = Library::load().map_err(TideError::from)?;
    notes.push(format!("NCCL {} ({})", library.version(), library.path().display()));
    notes.extend(library.lacks().into_iter().map(|(_, why)| format!("lacking: {why}")));
    let options = NcclOptions { path: arguments.path.map(Into::into), timeout, ..Default::default() };
    let driven = Driven { topology, ranks, devices };
    let folder = modules_folder(arguments);
    let loaded = LoadedNccl::new(library.version().0, library.device_bitcode().as_deref());
    let module = |backend| match &folder {
        Some(folder) => find_module(folder, &loaded, backend, arch),
        None => Err(TideError::Unsupported {
            needed: "a module of `cargo xtask ptx --nccl`".into(),
            found: "neither --nccl-modules nor TIDE_NCCL_MODULES".into(),
        }),
    };
    let fabric = NcclFabric::connect(gpu, library, driven, exchange, &options, &module)?;
    notes.push(format!("rails: {}", fabric.way()));
    notes.extend(fabric.passed_over().iter().map(|why| format!("not taken: {why}")));
    let path = match fabric.way() {
        Way::None => arguments.path.map_or(Path::Device, Into::into),
        way => way.path(),
    };
    Ok((fabric, path))
}

/// The topology that a launcher made, which the options must not contradict.
fn placed(arguments: &RunArgs, placement: &Placement) -> Result<Topology> {
    let (nodes, gpus) = (placement.node_count(), placement.local_rank_count);
    for (option, asked, found) in [("--nodes", arguments.nodes, nodes), ("--gpus", arguments.gpus, gpus)] {
        if asked.is_some_and(|asked| asked != found) {
            let launcher = placement.launcher;
            return Err(usage(format!(
                "{option} {}: {launcher} has started {nodes} nodes x {gpus}",
                asked.unwrap_or(0)
            )));
        }
    }
    Topology::new(nodes, gpus).context("the launcher's ranks")
}

/// Lets NCCL put several ranks of this process on one GPU, unless the environment says something else about it. Of processes that a
/// launcher has started it is not known: each may be shown a GPU of its own.
fn share_gpus(notes: &mut Vec<String>) {
    for (name, value) in [("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("NCCL_NVLS_ENABLE", "0")] {
        if std::env::var_os(name).is_none() {
            // SAFETY: this process has started no thread yet; NCCL, which reads it, is loaded later.
            unsafe { std::env::set_var(name, value) };
            notes.push(format!("{name}={value}, because ranks share a GPU"));
        }
    }
}

/// Gives GDAKI's queue pairs the traffic class of the host's, which they do not inherit: on a lossy priority they can stall
/// under congestion [TIDE App. G].
fn align_traffic_class(notes: &mut Vec<String>) {
    if let (Ok(class), None) = (std::env::var("NCCL_IB_TC"), std::env::var_os("NCCL_GIN_IB_TC")) {
        // SAFETY: as in `share_gpus`.
        unsafe { std::env::set_var("NCCL_GIN_IB_TC", &class) };
        notes.push(format!("NCCL_GIN_IB_TC={class}, as NCCL_IB_TC"));
    }
}

/// Where modules are looked for that were linked with NCCL's device code.
fn modules_folder(arguments: &RunArgs) -> Option<PathBuf> {
    arguments.nccl_modules.clone().or_else(|| std::env::var_os("TIDE_NCCL_MODULES").map(PathBuf::from))
}

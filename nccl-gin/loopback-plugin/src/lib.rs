//! A network plugin for NCCL in tests: its RMA interface without a NIC.
//!
//! NCCL carries out two things by an RMA plugin: host RMA (`ncclPutSignal` and its like) towards ranks outside the LSA team, and the
//! puts, gets and signals that a kernel issues by the device API (GIN) in its proxy kind. This plugin serves both where all ranks
//! are threads of one process and share one GPU. A put is a copy on that GPU; a signal is a word that is read, added to and
//! written back after the data (see [`context`] for the order, [`cuda`] for the copies).
//!
//! # Use
//!
//! Build with `cargo build -p nccl-loopback-plugin`, and before NCCL is first used set
//!
//! | variable | value |
//! |---|---|
//! | `NCCL_RMA_PLUGIN` | path of `libnccl_loopback_plugin.so`, shorter than 256 bytes |
//! | `NCCL_LSA_TEAM_SIZE` | `1`: no rank reaches another by loads and stores, so that the network is used |
//! | `NCCL_GIN_TYPE` | `2`: the proxy kind |
//! | `NCCL_NET`, `NCCL_IB_DISABLE` | `Socket`, `1`: NCCL's own traffic goes elsewhere |
//! | `NCCL_NVLS_ENABLE` | `0`: several ranks on a GPU exclude multicast |
//! | `NCCL_MULTI_RANK_GPU_ENABLE` | `1`: several ranks on a GPU |
//! | `CUDA_DEVICE_MAX_CONNECTIONS` | `32`: streams do not share a hardware queue, where a copy could get stuck behind a waiting kernel |
//!
//! Of this plugin's own:
//!
//! | variable | value |
//! |---|---|
//! | `TIDE_LOOPBACK_PLUGIN_LOG` | `1`: each call on stderr, of `test` those that say "done" |
//! | `TIDE_LOOPBACK_PLUGIN_TIMEOUT` | seconds to wait for the other ranks in a collective call; 60 |
//! | `TIDE_LOOPBACK_PLUGIN_BOUNCE` | `1`: no copy within the GPU, but through the host: slow, and by copy engines only |
//!
//! Kernels that wait for each other have to run at the same time: together they have to fit on the GPU.
//!
//! # What it does not show
//!
//! It exercises the use of the API, the order of data and signals, and NCCL's proxy. It does not exercise GDAKI, where the GPU
//! talks to the NIC itself, nor errors of a network. Weak signals are as strong here as strong ones, so their weakness does
//! not show either. Times mean nothing.

pub mod abi;
pub mod coll;
pub mod context;
pub mod cuda;
pub mod fault;
pub mod group;
pub mod handle;
pub mod mover;
pub mod table;
pub mod trace;
pub mod world;

/// The plugin, as NCCL looks it up.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclRmaPlugin_v16: abi::Rma = table::table::<cuda::CudaLane>();

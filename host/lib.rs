//! GPU collectives for sharded training, after the paper "Layout-Aware Collectives on Copy Engines, RDMA, and NVSwitch".
//!
//! * [`AllGather`] lands every shard in its parameter's final, parameter-major place: no copy-out.
//! * [`ReduceScatter`] takes per-parameter bf16 or fp32 gradients where they lie and gives packed fp32 shards.
//!
//! One process drives some ranks through a [`Communicator`], over any [`gpu::Gpu`] and [`net::Net`]. On a machine without
//! GPUs these are the simulated ones, and everything runs.
//!
//! ```
//! use tide_gpu::gpu::{DeviceBuffer, Gpu, sim::{SimGpu, SimOptions}};
//! use tide_gpu::layout::{Dtype, Group, Parameter};
//! use tide_gpu::plan::{ReduceScatterOptions, Topology};
//! use tide_gpu::{Communicator, CommunicatorOptions, GradientDtype, RankGradients, ReduceScatter, Scale};
//! use std::sync::Arc;
//!
//! # fn main() -> tide_gpu::Result<()> {
//! let gpu: Arc<dyn Gpu> = SimGpu::new(SimOptions::default());
//! let comm = Communicator::new(Arc::clone(&gpu), Topology::new(2, 2)?, CommunicatorOptions::default())?;
//! let group = Group::new(vec![Parameter::new("w", [6, 4], Dtype::F32)?])?;
//! let mut rs = ReduceScatter::new(&comm, &group, GradientDtype::F32, &ReduceScatterOptions::default())?;
//!
//! // Every rank brings a gradient of ones; each gets its rows' sum.
//! let gradients: Vec<_> = (0..4).map(|_| DeviceBuffer::from_slice(&gpu, 0, &[1_f32; 24])).collect::<Result<_, _>>()?;
//! let outs: Vec<_> = (0..4).map(|_| DeviceBuffer::new(&gpu, 0, rs.output_bytes())).collect::<Result<_, _>>()?;
//! let ranks: Vec<_> = gradients.iter().zip(&outs)
//!     .map(|(g, o)| RankGradients { gradients: vec![Some(g.slice())], out: o.slice(), ready: None })
//!     .collect();
//! rs.enqueue(&ranks, Scale::default())?;
//! comm.synchronize()?;
//! assert_eq!(outs[0].to_vec::<f32>()?, [4.0; 8]);
//! # Ok(())
//! # }
//! ```

pub mod arena;
pub mod collectives;
pub mod error;
pub mod gpu;
pub mod launch;
pub mod layout;
pub mod monitor;
pub mod net;
pub mod plan;

pub use collectives::{
    AllGather, AllGatherOptions, Communicator, CommunicatorOptions, GatherGroup, GatherRing, GradientDtype,
    LaneAllGather, LaneOptions, LaneReduceScatter, RankEvents, RankGather, RankGradients, RankSources, ReduceScatter,
    ReplicaReduce, RingOptions, Scale, StockAllGather, StockReduceScatter, StoredGradients, hand_on,
};
pub use error::{Result, TideError};
pub use net::Path;

//! The collectives, written once against [`crate::gpu::Gpu`] and [`crate::net::Net`].
//!
//! A process drives some ranks: one, where each GPU has a process; all of them, where ranks are virtual. A call enqueues the work of every
//! driven rank, phase by phase, so that whatever waits stands behind what it waits for (I4), and kernels that wait for each
//! other are one launch per GPU.

mod all_gather;
mod communicator;
mod gather_ring;
mod lane;
mod level_1;
mod node;
mod reduce_scatter;
mod rounds;
mod stock;

pub use all_gather::{AllGather, AllGatherOptions};
pub use communicator::{Communicator, CommunicatorOptions};
pub use gather_ring::{GatherGroup, GatherRing, RankGather, RankSources, RingOptions, StoredGradients};
pub use lane::{LaneAllGather, LaneOptions, LaneReduceScatter, ReplicaReduce, hand_on};
pub use reduce_scatter::{RankGradients, ReduceScatter};
pub use stock::{StockAllGather, StockReduceScatter};

use crate::error::{Result, TideError};
use crate::gpu::{DeviceSlice, Event};
use crate::layout::{Dtype, Group, GroupLayout};
use crate::plan::{Rank, RankRange};
use tide_device::abi::params::GRADIENTS_MAX;

/// The element type of the gradients of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientDtype {
    /// bf16.
    Bf16,
    /// fp32.
    F32,
}

impl GradientDtype {
    /// Bytes of an element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

impl TryFrom<Dtype> for GradientDtype {
    type Error = TideError;

    fn try_from(dtype: Dtype) -> Result<Self> {
        match dtype {
            Dtype::Bf16 => Ok(Self::Bf16),
            Dtype::F32 => Ok(Self::F32),
            other => {
                Err(TideError::Unsupported { needed: "gradients of type bf16 or f32".into(), found: other.to_string() })
            }
        }
    }
}

/// How a reduce-scatter scales and stores its sums: `out ← (accumulate ? out : 0) + α·Σ` [TIDE eq. 5].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    /// α, applied once, in fp32, after the sum.
    pub alpha: f32,
    /// Whether the output is added to; if not, what it held is not read.
    pub accumulate: bool,
}

impl Default for Scale {
    fn default() -> Self {
        Self { alpha: 1.0, accumulate: false }
    }
}

/// When what a rank brought to a call may be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankEvents {
    /// The sources (gradients, or shards) are read: they may be overwritten or freed.
    pub read: Event,
    /// The outputs are complete.
    pub done: Event,
}

/// Refuses a group that the fast path does not take; the stock path does.
fn check_fast_path(group: &Group) -> Result<()> {
    let count = group.parameters().len();
    if count <= GRADIENTS_MAX {
        return Ok(());
    }
    Err(TideError::Unsupported {
        needed: format!("at most {GRADIENTS_MAX} parameters in a group (the stock path takes any number)"),
        found: count.to_string(),
    })
}

/// Checks a caller's memory before anything is enqueued.
fn check_slice(what: &str, slice: DeviceSlice, bytes: u64, align: u64) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let address = slice.address.0;
    if address == 0 {
        return Err(TideError::usage(format!("{what}: null address")));
    }
    if !address.is_multiple_of(align) {
        return Err(TideError::usage(format!("{what}: address {address:#x} is not aligned to {align} bytes")));
    }
    if slice.bytes < bytes {
        return Err(TideError::usage(format!("{what}: {} bytes given, {bytes} needed", slice.bytes)));
    }
    Ok(())
}

/// Checks that a call names every driven rank once.
fn check_rank_count(given: usize, driven: RankRange) -> Result<()> {
    if given == driven.count() as usize {
        return Ok(());
    }
    Err(TideError::usage(format!("the call names {given} ranks, the communicator drives {}", driven.count())))
}

/// Checks what every driven rank brings to a reduce-scatter of a group of this layout, before anything is enqueued.
fn check_gradients(
    ranks: &[RankGradients],
    driven: RankRange,
    layout: &GroupLayout,
    dtype: GradientDtype,
) -> Result<()> {
    check_rank_count(ranks.len(), driven)?;
    for (Rank(rank), given) in driven.iter().zip(ranks) {
        let (found, expected) = (given.gradients.len(), layout.parameters().len());
        if found != expected {
            return Err(TideError::usage(format!("rank {rank}: {found} gradients given, the group has {expected}")));
        }
        check_slice(&format!("rank {rank}, output"), given.out, 4 * layout.packed_elems(), 16)?;
        for (index, (gradient, p)) in given.gradients.iter().zip(layout.parameters()).enumerate() {
            if let Some(gradient) = gradient {
                let what = format!("rank {rank}, gradient {index}");
                check_slice(&what, *gradient, p.elems * dtype.bytes(), dtype.bytes())?;
            }
        }
    }
    Ok(())
}

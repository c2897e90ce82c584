//! Level 1 as a launch: what every reduce-scatter that adds with [`sum`] tells it [TIDE §4.1].
//!
//! Where contributions were staged and where the partial goes is the caller's; how many threads and stages a device takes,
//! where the own gradients lie and what stands in the packed row is the same for all, and stands here.

use super::{Communicator, GradientDtype};
use crate::error::Result;
use crate::gpu::{DeviceBuffer, DevicePtr, DeviceSlice, Launch, Stream};
use crate::layout::GroupLayout;
use crate::plan::Rank;
use std::collections::BTreeMap;
use std::ops::Range;
use tide_device::abi::kernel::Kernel;
use tide_device::abi::params::{GRADIENTS_MAX, SumParams};
use tide_device::abi::segment::Segment;
use tide_device::kernels::sum;

/// Most stages of a sum's ring: more hide no more latency.
const STAGES_MAX: u32 = 12;

/// The sums of one group's gradients, on every rank of a communicator.
pub(super) struct Sums {
    comm: Communicator,
    dtype: GradientDtype,
    cta_count: u32,
    segments: Vec<Segment>,
    /// The segments, on each device that has ranks.
    tables: BTreeMap<u32, DeviceBuffer>,
}

/// What one sum adds, and where the partial goes.
pub(super) struct SumTask<'a> {
    /// The rank that sums.
    pub(super) rank: Rank,
    /// The rank's own gradients in the group's order, added last; what is missing is all zeros.
    pub(super) own: &'a [Option<DeviceSlice>],
    /// The staged contributions: rows of each source.
    pub(super) staging: DevicePtr,
    /// Staged sources.
    pub(super) source_count: u32,
    /// Bytes from one source's rows to the next's.
    pub(super) source_pitch_bytes: u64,
    /// Bytes from one staged row to the next, a multiple of 16.
    pub(super) row_pitch_bytes: u64,
    /// Packed positions that every row holds.
    pub(super) packed: Range<u64>,
    /// Destination rank of the first row.
    pub(super) first_rank: Rank,
    /// Rows, of consecutive destination ranks.
    pub(super) row_count: u32,
    /// The fp32 partial, 16-byte aligned.
    pub(super) out: DevicePtr,
    /// Elements from one row of the partial to the next, a multiple of 4.
    pub(super) out_pitch_elems: u64,
}

impl Sums {
    /// Uploads the group's segments. Every sum takes `cta_count` blocks.
    ///
    /// # Errors
    /// What the driver refuses.
    pub(super) fn new(comm: &Communicator, layout: &GroupLayout, dtype: GradientDtype, cta_count: u32) -> Result<Self> {
        let segments = layout.segments();
        let table = |device| Ok((device, DeviceBuffer::from_slice(comm.gpu(), device, &segments)?));
        let tables = comm.devices().map(table).collect::<Result<_>>()?;
        Ok(Self { comm: comm.clone(), dtype, cta_count, segments, tables })
    }

    /// The packed row: a segment per parameter that has elements.
    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Enqueues a sum.
    ///
    /// # Safety
    /// The task's addresses hold what [`SumParams`] states, and do until the launch has completed, as does `self`; when the
    /// stream gets there the sources are staged.
    pub(super) unsafe fn launch(&self, stream: Stream, task: &SumTask<'_>) -> Result<()> {
        let device = self.comm.device_of(task.rank);
        let shape = self.comm.gpu().properties(device).shape;
        let kernel = match self.dtype {
            GradientDtype::Bf16 => Kernel::SumBf16,
            GradientDtype::F32 => Kernel::SumF32,
        };
        let item_bytes = self.dtype.bytes() as u32;
        let consumers = shape.sum_consumers.min(kernel.block_threads_max() - shape.warp_size);
        let stage_bytes = sum::shared_bytes(consumers, 1, item_bytes);
        let stage_count = (shape.sum_shared_bytes / stage_bytes).clamp(1, STAGES_MAX);
        let mut gradients = [0; GRADIENTS_MAX];
        for (address, gradient) in gradients.iter_mut().zip(task.own) {
            *address = gradient.map_or(0, |g| g.address.0);
        }
        let params = SumParams {
            deadline: self.comm.deadline(task.rank),
            staging: task.staging.0,
            source_pitch_bytes: task.source_pitch_bytes,
            row_pitch_bytes: task.row_pitch_bytes,
            out: task.out.0,
            out_pitch_elems: task.out_pitch_elems,
            segments: self.tables[&device].address().0,
            packed_first: task.packed.start,
            row_elems: task.packed.end - task.packed.start,
            source_count: task.source_count,
            row_count: task.row_count,
            first_rank: task.first_rank.0,
            segment_count: self.segments.len() as u32,
            stage_count,
            rank: task.rank.0,
            gradients,
        };
        let launch = Launch {
            kernel,
            grid: self.cta_count,
            block: shape.warp_size + consumers,
            cluster: 1,
            shared_bytes: sum::shared_bytes(consumers, stage_count, item_bytes),
            params: bytemuck::bytes_of(&params),
        };
        // SAFETY: the caller's promise; the table is of the device that the stream is of.
        unsafe { self.comm.gpu().launch(stream, &launch) }
    }
}

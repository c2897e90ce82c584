//! The reduce-scatter as a leg.

use std::time::{Duration, Instant};

use anyhow::Result;
use tide_gpu::gpu::{DeviceBuffer, DevicePtr, DeviceSlice};
use tide_gpu::layout::GroupLayout;
use tide_gpu::plan::{Rank, RankRange, ReduceScatterOptions};
use tide_gpu::{Communicator, GradientDtype, RankGradients, ReduceScatter, Scale, StockReduceScatter};

use super::{CHUNK_BYTES, STOCK, backend_name, fill, is_fast, path_name};
use crate::cli::GradDtype;
use crate::examine::{Facts, Leg};
use crate::progress::Progress;
use crate::tensors::Gradients;
use crate::verify::PREVIOUS;

/// The least that is allocated for an output, so that an empty one has an address.
const OUTPUT_BYTES_MIN: u64 = 16;

enum Collective {
    Fast(Box<ReduceScatter>),
    Stock(StockReduceScatter),
}

/// A reduce-scatter with its gradients in place.
pub struct ReduceLeg {
    comm: Communicator,
    collective: Collective,
    layout: GroupLayout,
    scale: Scale,
    stock_buffer_bytes: u64,
    ranks: Vec<RankGradients>,
    outputs: Vec<DeviceBuffer>,
    /// Owns what `ranks` refers to.
    _gradients: Vec<DeviceBuffer>,
}

impl ReduceLeg {
    /// Allocates the collective and uploads every rank's gradients.
    ///
    /// # Errors
    /// Those of the library.
    pub fn new(
        comm: Communicator,
        gradients: &Gradients,
        options: &ReduceScatterOptions,
        scale: Scale,
        progress: &Progress,
    ) -> Result<Self> {
        let dtype = match gradients.dtype {
            GradDtype::Bf16 => GradientDtype::Bf16,
            GradDtype::F32 => GradientDtype::F32,
        };
        let layout = GroupLayout::new(&gradients.group, comm.topology().rank_count().into())?;
        let (collective, stock_buffer_bytes) = if !is_fast(&gradients.group) {
            let stock = StockReduceScatter::new(&comm, &gradients.group, dtype)?;
            let bytes = stock.buffer_bytes();
            (Collective::Stock(stock), bytes)
        } else {
            // The baseline is one of all ranks in a process: measured where that is so.
            let is_whole = comm.driven() == comm.topology().all();
            let measured = is_whole.then(|| StockReduceScatter::new(&comm, &gradients.group, dtype)).transpose()?;
            let bytes = measured.map_or_else(|| StockReduceScatter::bytes_for(&layout), |stock| stock.buffer_bytes());
            (Collective::Fast(Box::new(ReduceScatter::new(&comm, &gradients.group, dtype, options)?)), bytes)
        };
        progress.start("rs inputs".to_owned(), u64::from(comm.driven().count()) * layout.parameters().len() as u64);
        let (mut ranks, mut outputs, mut owned) = (Vec::new(), Vec::new(), Vec::new());
        for rank in comm.driven().iter() {
            let mut slices = Vec::new();
            for index in 0..layout.parameters().len() {
                let buffer = upload(&comm, rank, gradients, &layout, index)?;
                let none = DeviceSlice { address: DevicePtr::NULL, bytes: 0 };
                slices.push(Some(buffer.as_ref().map_or(none, DeviceBuffer::slice)));
                owned.extend(buffer);
                progress.step();
            }
            let bytes = (layout.packed_elems() * 4).max(OUTPUT_BYTES_MIN);
            let output = DeviceBuffer::new(comm.gpu(), comm.device_of(rank), bytes)?;
            ranks.push(RankGradients { gradients: slices, out: output.slice(), ready: None });
            outputs.push(output);
        }
        Ok(Self { comm, collective, layout, scale, stock_buffer_bytes, ranks, outputs, _gradients: owned })
    }
}

/// One gradient of one rank on its device; nothing for one without elements.
fn upload(
    comm: &Communicator,
    rank: Rank,
    gradients: &Gradients,
    layout: &GroupLayout,
    parameter: usize,
) -> Result<Option<DeviceBuffer>> {
    let elems = layout.parameters()[parameter].elems;
    if elems == 0 {
        return Ok(None);
    }
    let item = gradients.dtype.dtype().bytes();
    let buffer = DeviceBuffer::new(comm.gpu(), comm.device_of(rank), elems * item)?;
    let step = CHUNK_BYTES / item;
    let (mut values, mut bytes) = (Vec::new(), Vec::new());
    for first in (0..elems).step_by(step as usize) {
        values.resize(step.min(elems - first) as usize, 0.0);
        gradients.read(rank.0.into(), parameter, first, &mut values);
        gradients.dtype.encode(&values, &mut bytes);
        comm.gpu().upload(DevicePtr(buffer.address().0 + first * item), &bytes)?;
    }
    Ok(Some(buffer))
}

impl Leg for ReduceLeg {
    fn call(&mut self) -> Result<Duration> {
        // What a call should overwrite holds NaN, so that what it does not write shows.
        let before = if self.scale.accumulate { PREVIOUS } else { f32::NAN };
        for output in &self.outputs {
            let DeviceSlice { address, bytes } = output.slice();
            fill(self.comm.gpu().as_ref(), address, bytes, &before.to_le_bytes())?;
        }
        let start = Instant::now();
        match &mut self.collective {
            Collective::Fast(reduce) => reduce.enqueue(&self.ranks, self.scale)?,
            Collective::Stock(reduce) => reduce.enqueue(&self.ranks, self.scale)?,
        };
        self.comm.synchronize()?;
        Ok(start.elapsed())
    }

    fn read(&mut self, rank: u64, parameter: usize, out: &mut Vec<u8>) -> Result<()> {
        let p = &self.layout.parameters()[parameter];
        out.resize((p.shard_elems * 4) as usize, 0);
        if !out.is_empty() {
            let address =
                self.outputs[self.comm.driven().index(Rank(rank as u32))].address().0 + p.packed_offset_elems * 4;
            self.comm.gpu().download(DevicePtr(address), out)?;
        }
        Ok(())
    }

    fn ranks(&self) -> RankRange {
        self.comm.driven()
    }

    fn all_gather(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(self.comm.all_gather_bytes(label, bytes)?)
    }

    fn facts(&self) -> Facts {
        let stock_buffer_bytes = self.stock_buffer_bytes;
        let facts = |path, buffer_bytes, descriptors| Facts {
            backend: backend_name(&self.comm),
            path,
            has_rates: self.comm.gpu().name() != "sim",
            buffer_bytes,
            stock_buffer_bytes,
            descriptors,
        };
        match &self.collective {
            Collective::Fast(reduce) => facts(path_name(&self.comm), reduce.buffer_bytes(), reduce.descriptor_count()),
            // A kernel packs, a kernel sums: no copies.
            Collective::Stock(reduce) => facts(STOCK, reduce.buffer_bytes(), 0),
        }
    }
}

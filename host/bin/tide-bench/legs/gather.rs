//! The all-gather as a leg.

use std::time::{Duration, Instant};

use anyhow::Result;
use tide_gpu::gpu::{DevicePtr, DeviceSlice};
use tide_gpu::layout::GroupLayout;
use tide_gpu::plan::{Rank, RankRange};
use tide_gpu::{AllGather, AllGatherOptions, Communicator, RankGather, StockAllGather};

use super::{CHUNK_BYTES, STOCK, backend_name, fill, is_fast, path_name};
use crate::examine::{Facts, Leg};
use crate::progress::Progress;
use crate::tensors::Tensors;

/// What landings hold before a call, so that what a call does not write shows.
const STALE: u8 = 0xa5;

enum Collective {
    Fast(Box<AllGather>),
    Stock(StockAllGather),
}

impl Collective {
    fn shard(&self, rank: Rank, parameter: usize) -> DeviceSlice {
        match self {
            Self::Fast(gather) => gather.shard(rank, parameter),
            Self::Stock(gather) => gather.shard(rank, parameter),
        }
    }

    fn landing(&self, rank: Rank, parameter: usize) -> DeviceSlice {
        match self {
            Self::Fast(gather) => gather.landing(rank, parameter),
            Self::Stock(gather) => gather.landing(rank, parameter),
        }
    }
}

/// An all-gather with its shards in place.
pub struct GatherLeg {
    comm: Communicator,
    collective: Collective,
    layout: GroupLayout,
    stock_buffer_bytes: u64,
}

impl GatherLeg {
    /// Allocates the collective and uploads every rank's shards.
    ///
    /// # Errors
    /// Those of the library.
    pub fn new(comm: Communicator, tensors: &Tensors, progress: &Progress) -> Result<Self> {
        let layout = GroupLayout::new(&tensors.group, comm.topology().rank_count().into())?;
        let (collective, stock_buffer_bytes) = if !is_fast(&tensors.group) {
            let stock = StockAllGather::new(&comm, &tensors.group)?;
            let bytes = stock.buffer_bytes();
            (Collective::Stock(stock), bytes)
        } else {
            // The baseline is one of all ranks in a process: measured where that is so.
            let is_whole = comm.driven() == comm.topology().all();
            let measured = is_whole.then(|| StockAllGather::new(&comm, &tensors.group)).transpose()?;
            let bytes = measured.map_or_else(|| StockAllGather::bytes_for(&layout), |stock| stock.buffer_bytes());
            (Collective::Fast(Box::new(AllGather::new(&comm, &tensors.group, AllGatherOptions::default())?)), bytes)
        };
        let leg = Self { comm, collective, layout, stock_buffer_bytes };
        leg.upload(tensors, progress)?;
        Ok(leg)
    }

    fn upload(&self, tensors: &Tensors, progress: &Progress) -> Result<()> {
        let parameters = self.layout.parameters();
        progress.start("ag inputs".to_owned(), u64::from(self.comm.driven().count()) * parameters.len() as u64);
        let mut bytes = Vec::new();
        for rank in self.comm.driven().iter() {
            for (index, p) in parameters.iter().enumerate() {
                let item = tensors.group.parameters()[index].dtype().bytes();
                let first = p.rows_of(rank.0.into()).start * p.row_elems;
                let live = p.live_elems_of(rank.0.into());
                let shard = self.collective.shard(rank, index).address;
                let step = CHUNK_BYTES / item;
                for at in (0..live).step_by(step as usize) {
                    tensors.read(index, first + at, step.min(live - at), &mut bytes);
                    self.comm.gpu().upload(DevicePtr(shard.0 + at * item), &bytes)?;
                }
                progress.step();
            }
        }
        Ok(())
    }
}

impl Leg for GatherLeg {
    fn call(&mut self) -> Result<Duration> {
        for rank in self.comm.driven().iter() {
            for index in 0..self.layout.parameters().len() {
                let landing = self.collective.landing(rank, index);
                fill(self.comm.gpu().as_ref(), landing.address, landing.bytes, &[STALE])?;
            }
        }
        let start = Instant::now();
        match &mut self.collective {
            Collective::Fast(gather) => {
                let ranks = vec![RankGather::default(); self.comm.driven().count() as usize];
                gather.enqueue(&ranks)?;
            }
            Collective::Stock(gather) => {
                gather.enqueue()?;
            }
        }
        self.comm.synchronize()?;
        Ok(start.elapsed())
    }

    fn read(&mut self, rank: u64, parameter: usize, out: &mut Vec<u8>) -> Result<()> {
        let landing = self.collective.landing(Rank(rank as u32), parameter);
        out.resize(landing.bytes as usize, 0);
        if landing.bytes > 0 {
            self.comm.gpu().download(landing.address, out)?;
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
            Collective::Fast(gather) => facts(path_name(&self.comm), gather.buffer_bytes(), gather.descriptor_count()),
            Collective::Stock(gather) => {
                // One copy to each rank, then one out of the rank-major buffer for each parameter.
                let copied_out = self.layout.parameters().iter().filter(|p| p.shard_bytes > 0).count() as u64;
                facts(STOCK, gather.buffer_bytes(), self.layout.rank_count() + copied_out)
            }
        }
    }
}

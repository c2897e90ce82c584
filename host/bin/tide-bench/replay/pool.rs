//! Memory for gradients, handed out and taken back in stream order, as a caching allocator does.
//!
//! What is free is decided when the host enqueues, not when the device is done [TIDE §5.1]: a block that is taken back
//! with an event is given out again at once, and whoever gets it waits for the event in its stream. So the bytes that are
//! ever allocated are the most that were live at any moment of the host's order.

use std::sync::Arc;

use anyhow::Result;
use tide_gpu::gpu::{DeviceBuffer, DeviceSlice, Event, Gpu, Stream};

/// Memory for one gradient.
pub struct Block(DeviceBuffer);

impl Block {
    /// The range.
    pub fn slice(&self) -> DeviceSlice {
        self.0.slice()
    }
}

/// The gradients' memory of one rank.
pub struct Pool {
    gpu: Arc<dyn Gpu>,
    device: u32,
    free: Vec<(Block, Option<Event>)>,
    live_bytes: u64,
    allocated_bytes: u64,
}

impl Pool {
    /// An empty one.
    pub fn new(gpu: &Arc<dyn Gpu>, device: u32) -> Self {
        Self { gpu: Arc::clone(gpu), device, free: Vec::new(), live_bytes: 0, allocated_bytes: 0 }
    }

    /// A block of `bytes` that work enqueued in `stream` from now on may write.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn take(&mut self, stream: Stream, bytes: u64) -> Result<Block> {
        self.live_bytes += bytes;
        if let Some(index) = self.free.iter().position(|(block, _)| block.slice().bytes == bytes) {
            let (block, event) = self.free.remove(index);
            if let Some(event) = event {
                self.gpu.wait_event(stream, event)?;
            }
            return Ok(block);
        }
        self.allocated_bytes += bytes;
        Ok(Block(DeviceBuffer::new(&self.gpu, self.device, bytes)?))
    }

    /// Takes a block back, to be written again after `event`.
    pub fn give_back(&mut self, block: Block, event: Event) {
        self.live_bytes -= block.slice().bytes;
        self.free.push((block, Some(event)));
    }

    /// All work is over: nothing that is free needs to be waited for.
    pub fn settle(&mut self) {
        self.free.iter_mut().for_each(|(_, event)| *event = None);
    }

    /// Bytes given out now.
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// Bytes allocated.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tide_gpu::gpu::Priority;
    use tide_gpu::gpu::sim::{SimGpu, SimOptions};

    #[test]
    fn a_block_is_given_out_again_and_counted_once() {
        let gpu: Arc<dyn Gpu> = SimGpu::new(SimOptions::default());
        let stream = gpu.create_stream(0, Priority::Normal).unwrap();
        let mut pool = Pool::new(&gpu, 0);
        let (a, b) = (pool.take(stream, 64).unwrap(), pool.take(stream, 96).unwrap());
        assert_eq!((pool.live_bytes(), pool.allocated_bytes()), (160, 160));
        let (first, event) = (a.slice(), gpu.record(stream).unwrap());
        pool.give_back(a, event);
        pool.give_back(b, event);
        let used = gpu.usage_bytes(0).0;
        assert_eq!((pool.live_bytes(), pool.allocated_bytes()), (0, 160));
        let again = pool.take(stream, 64).unwrap();
        assert_eq!(again.slice(), first);
        assert_eq!(gpu.usage_bytes(0).0, used, "nothing new is allocated");
        let other = pool.take(stream, 64).unwrap();
        assert_ne!(other.slice(), first);
        assert_eq!((pool.live_bytes(), pool.allocated_bytes()), (128, 224));
    }
}

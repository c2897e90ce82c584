//! Device memory with an owner.

use super::{DevicePtr, Gpu};
use crate::error::Result;
use std::sync::Arc;

/// A range of device memory that somebody else owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSlice {
    /// First byte.
    pub address: DevicePtr,
    /// Bytes.
    pub bytes: u64,
}

/// Device memory, freed on drop.
pub struct DeviceBuffer {
    gpu: Arc<dyn Gpu>,
    slice: DeviceSlice,
}

impl DeviceBuffer {
    /// Allocates.
    ///
    /// # Errors
    /// As [`Gpu::allocate`].
    pub fn new(gpu: &Arc<dyn Gpu>, device: u32, bytes: u64) -> Result<Self> {
        let address = gpu.allocate(device, bytes)?;
        Ok(Self { gpu: Arc::clone(gpu), slice: DeviceSlice { address, bytes } })
    }

    /// Allocates and fills.
    ///
    /// # Errors
    /// As [`Gpu::allocate`] and [`Gpu::upload`].
    pub fn from_slice<T: bytemuck::NoUninit>(gpu: &Arc<dyn Gpu>, device: u32, values: &[T]) -> Result<Self> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let buffer = Self::new(gpu, device, bytes.len() as u64)?;
        gpu.upload(buffer.address(), bytes)?;
        Ok(buffer)
    }

    /// First byte.
    pub fn address(&self) -> DevicePtr {
        self.slice.address
    }

    /// The range.
    pub fn slice(&self) -> DeviceSlice {
        self.slice
    }

    /// Reads it back.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn to_vec<T: bytemuck::Pod>(&self) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); self.slice.bytes as usize / size_of::<T>()];
        self.gpu.download(self.address(), bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Err(error) = self.gpu.free(self.slice.address) {
            tracing::warn!(%error, "device memory could not be freed");
        }
    }
}

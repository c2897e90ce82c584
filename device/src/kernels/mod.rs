//! The kernels: plain SPMD functions over [`crate::arch`].

pub mod cast;
pub mod finalize;
pub mod gradient;
pub mod land;
pub mod net;
pub mod numerics;
pub mod stock;
pub mod sum;

//! NCCL's windows, host RMA and device communicators, for Rust.
//!
//! [`host`] (feature `host`, on by default) looks for `libnccl.so.2` at run time and calls it: a build needs neither NCCL nor CUDA, and a
//! program starts without either. It knows the layouts of NCCL's versioned structs from 2.28 on, builds them for the version that was
//! loaded, and says in one sentence what a version lacks.
//!
//! The crate knows no other crate's types: a stream is a [`Stream`](host::Stream) around `cudaStream_t`, and device memory a
//! [`DevicePtr`](host::DevicePtr).

#![cfg_attr(not(feature = "host"), no_std)]

#[cfg(feature = "host")]
pub mod host;

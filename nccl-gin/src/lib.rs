//! NCCL's windows, host RMA, device communicators and device-initiated networking (GIN), for Rust.
//!
//! * `host` (feature `host`, on by default) looks for `libnccl.so.2` at run time and calls it: a build needs neither NCCL nor CUDA, and
//!   a program starts without either. It knows the layouts of NCCL's versioned structs from 2.28 on, builds them for the version that was
//!   loaded, and says in one sentence what a version lacks.
//! * [`device`] is what a kernel calls, by NCCL's device bitcode.
//!
//! The crate knows no other crate's types: a stream is a `host::Stream` around `cudaStream_t`, and device memory a `host::DevicePtr`.

#![cfg_attr(not(feature = "host"), no_std)]

pub mod device;
#[cfg(feature = "host")]
pub mod host;

//! Bindings to NCCL's device-initiated networking (GIN).
//!
//! [`device`] is what a kernel calls, by NCCL's device bitcode.
#![cfg_attr(not(feature = "host"), no_std)]

pub mod device;

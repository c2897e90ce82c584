//! The device side of TIDE.
//!
//! # The machine
//!
//! A kernel here is a plain SPMD function. All that it can do to the world goes through [`arch`],
//! whose contract stands once, in [`arch::machine::Machine`]. Two machines implement it: a GPU, by
//! PTX, and a simulated one, in which each CUDA thread is a coroutine under a seeded scheduler. The source that a
//! GPU runs is therefore the source that the tests run.
//!
//! # Launch contract
//!
//! * A kernel takes one pointer to its parameter block ([`abi::params`]); the block is read-only.
//! * Block size and shared memory are the launcher's choice within what the kernel's header states;
//!   kernels stride by block size and ask the machine for its warp size.
//! * Two kernels that wait for each other are one launch.
//! * Every wait is timed ([`wait`]): past the deadline it writes a [`abi::fault::FaultRecord`] and parks.
//!
//! # Kernels
//!
//! | kernel | what it does | paper |
//! |---|---|---|
//! | [`kernels::sum`] | Level 1: local contributions into one fp32 node partial | §4.1 |
//! | [`kernels::land`] | Level 2: folds a wave's partials into the output | §4.2 |
//! | [`kernels::net`] | the network rounds of a wave | App. G |
//! | [`kernels::finalize`] | returns credits once a wave has landed | App. G |
//! | [`kernels::cast`] | fp32 shards to bf16, packed | §3.1 |
//! | [`kernels::stock`] | the FSDP2-like baseline: pack, flat sum | §2.1 |
#![no_std]
// What the PTX build needs beyond stable Rust; `cargo xtask ptx` is that build. Intrinsics are the only convergent barriers.
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch, link_llvm_intrinsics, stdarch_nvptx))]
#![cfg_attr(target_arch = "nvptx64", allow(internal_features))]

#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

pub mod abi;
pub mod arch;
pub mod entry;
pub mod gin;
pub mod kernels;
pub mod wait;

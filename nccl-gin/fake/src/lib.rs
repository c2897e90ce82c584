//! A stand-in for `libnccl.so.2` in tests.
//!
//! Ranks are threads of one process, device memory is host memory, and a stream has always done everything: data does move, and signals do
//! count. It checks what NCCL checks of versioned structs, by sizes and offsets of its own. What ranks do together is matched by
//! sequence: a rank that does another thing than the others in its turn gets an error where NCCL would hang.
//!
//! `fake_*` (`control.rs`) tell it to be another version, to fail, to dawdle, and ask what is left allocated and what was called.
//! Each copy of the file is an instance of its own, so each test loads a copy.

mod api;
mod control;
mod group;
mod state;
mod structs;
mod world;

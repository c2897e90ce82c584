//! The host side: loading, communicators, memory, windows, device communicators, one-sided operations.
//!
//! ```no_run
//! use nccl_gin::host::{Comm, Config, Library, Memory, UniqueId, WindowFlags};
//!
//! # fn main() -> Result<(), nccl_gin::host::NcclError> {
//! let library = Library::load()?;
//! let id = UniqueId::new(&library)?; // rank 0 makes it, the others get its bytes
//! let comm = Comm::init_rank(&library, id, 1, 0, &Config::default())?;
//! let memory = Memory::alloc(&library, 1 << 20)?;
//! let window = comm.register(&memory, WindowFlags::COLL_SYMMETRIC)?;
//! println!("rank 0's copy lies at {:?}", window.lsa_pointer(0, 0)?);
//! # Ok(())
//! # }
//! ```
//!
//! # Who owns what
//!
//! A [`Window`] keeps its [`Memory`] and its [`Comm`] alive, a [`DeviceComm`] its [`Comm`]. Whatever the order in which a program drops
//! them, NCCL sees device communicators destroyed, then windows deregistered, then memory freed, then the communicator destroyed.
//! What no owner can know is whether a GPU still works with them: wait for its streams first.
//!
//! # Threads
//!
//! A communicator has one lock, held through each call on it: NCCL deadlocks where a window is registered while another thread calls
//! on the same communicator. Ranks that live in one process need a thread each, as registration and creation wait for all ranks.
//!
//! # Deadlines
//!
//! Communicators are non-blocking unless [`Config::blocking`] says otherwise: what needs the other ranks ends within
//! [`Config::timeout`], with success or with an error. After a timeout the communicator is aborted, and each later call says so.

mod comm;
mod config;
mod device_comm;
mod error;
mod group;
mod hazards;
mod layout;
mod library;
mod locate;
mod memory;
mod operations;
mod properties;
pub mod sys;
mod version;
mod window;

pub use comm::{Comm, UniqueId};
pub use config::Config;
pub use device_comm::{DeviceComm, GinConnection, Requirements};
pub use error::{NcclError, Result, ResultCode};
pub use group::Group;
pub use hazards::{Hazard, hazards, hazards_among};
pub use layout::{DevCommLayout, Layout};
pub use library::{Ability, Library};
pub use memory::{DevicePtr, Memory, Stream};
pub use operations::{DataType, Operations, Put, ReduceOp, SignalWait};
pub use properties::{GinType, Properties};
pub use version::Version;
pub use window::{Window, WindowFlags};

//! The face of the machine that kernels use: typed, written once over [`machine::Machine`].

pub mod machine;
#[cfg(target_arch = "nvptx64")]
pub(crate) mod nvptx;
#[cfg(not(target_arch = "nvptx64"))]
pub mod sim;

pub mod atomic;
pub mod barrier;
pub mod bulk;
pub mod clock;
pub mod fence;
pub mod global;
pub mod mbarrier;
pub mod multimem;
pub mod shared;
pub mod thread;

/// The machine that this build runs on. This alias is the only choice a kernel ever meets.
#[cfg(target_arch = "nvptx64")]
pub type Target = nvptx::Ptx;
/// The machine that this build runs on. This alias is the only choice a kernel ever meets.
#[cfg(not(target_arch = "nvptx64"))]
pub type Target = sim::Sim;

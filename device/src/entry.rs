//! The entry points: each unpacks nothing and calls one kernel. The list stands once, for every machine.

use crate::abi::kernel::Kernel;
use crate::gin::loopback::Loopback;
use crate::kernels::gradient::{Bf16, Fp32};
use crate::kernels::{cast, finalize, land, net, stock, sum};

/// Runs `kernel` in the calling thread of a launch.
///
/// # Safety
/// `params` points to the kernel's parameter block; the launch is as the kernel's module states.
#[cfg(not(target_arch = "nvptx64"))]
pub unsafe fn run(kernel: Kernel, params: *const u8) {
    // SAFETY: the caller's promise, kernel by kernel.
    unsafe {
        match kernel {
            Kernel::SumBf16 => sum::sum::<Bf16>(params.cast()),
            Kernel::SumF32 => sum::sum::<Fp32>(params.cast()),
            Kernel::LandMultimem => land::land::<land::Multimem>(params.cast()),
            Kernel::LandPeer => land::land::<land::Peer>(params.cast()),
            Kernel::NetLoopback => net::net::<Loopback>(params.cast()),
            Kernel::FinalizeLoopback => finalize::finalize::<Loopback>(params.cast()),
            Kernel::Cast => cast::cast(params.cast()),
            Kernel::StockPack => stock::pack(params.cast()),
            Kernel::StockFlatSum => stock::flat_sum(params.cast()),
        }
    }
}

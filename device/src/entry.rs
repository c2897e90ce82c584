//! The entry points: each unpacks nothing and calls one kernel. The list stands once, for every machine.

use crate::abi::kernel::Kernel;
use crate::abi::params::{CastParams, FinalizeParams, FlatSumParams, LandParams, NetParams, PackParams, SumParams};
use crate::gin::loopback::Loopback;
use crate::kernels::gradient::{Bf16, Fp32};
use crate::kernels::{cast, finalize, land, net, stock, sum};

/// Takes the list `KERNEL: SYMBOL(PARAMETERS) => FUNCTION;` and makes of it what the machine launches kernels by:
/// symbols of the base module on a GPU, a function of [`Kernel`] in the simulator.
macro_rules! entry_points {
    ($($kernel:ident: $name:ident($params:ty) => $function:expr;)+) => {
        $(
            #[cfg(target_arch = "nvptx64")]
            crate::arch::nvptx::entry_point!($name($params) => $function);
        )+

        /// Runs `kernel` in the calling thread of a launch.
        ///
        /// # Safety
        /// `params` points to the kernel's parameter block; the launch is as the kernel's module states.
        ///
        /// # Panics
        /// For a kernel that is not of the base module: no simulator has what the others are linked with.
        #[cfg(not(target_arch = "nvptx64"))]
        pub unsafe fn run(kernel: Kernel, params: *const u8) {
            // SAFETY: the caller's promise, kernel by kernel.
            unsafe {
                match kernel {
                    $(Kernel::$kernel => $function(params.cast::<$params>()),)+
                    other => panic!("{} is no kernel of the base module", other.name()),
                }
            }
        }

        $(const _: () = assert!(is_named(Kernel::$kernel, stringify!($name)), "a host launches it by its name");)+
    };
}

entry_points! {
    SumBf16: tide_sum_bf16(SumParams) => sum::sum::<Bf16>;
    SumF32: tide_sum_f32(SumParams) => sum::sum::<Fp32>;
    LandMultimem: tide_land_multimem(LandParams) => land::land::<land::Multimem>;
    LandPeer: tide_land_peer(LandParams) => land::land::<land::Peer>;
    NetLoopback: tide_net_loopback(NetParams) => net::net::<Loopback>;
    FinalizeLoopback: tide_finalize_loopback(FinalizeParams) => finalize::finalize::<Loopback>;
    Cast: tide_cast(CastParams) => cast::cast;
    StockPack: tide_stock_pack(PackParams) => stock::pack;
    StockFlatSum: tide_stock_flat_sum(FlatSumParams) => stock::flat_sum;
}

/// The entry points that are linked with NCCL's device code: a list like the one above, for a GPU alone.
#[cfg(all(feature = "nccl", target_arch = "nvptx64"))]
macro_rules! nccl_entry_points {
    ($($kernel:ident: $name:ident($params:ty) => $function:expr;)+) => {
        $(
            crate::arch::nvptx::entry_point!($name($params) => $function);
            const _: () = assert!(is_named(Kernel::$kernel, stringify!($name)), "a host launches it by its name");
        )+
    };
}

#[cfg(all(feature = "nccl", target_arch = "nvptx64"))]
mod nccl {
    use super::is_named;
    use crate::abi::kernel::Kernel;
    use crate::abi::params::{FinalizeParams, NetParams};
    use crate::gin::nccl::Nccl;
    use crate::kernels::{finalize, net};

    nccl_entry_points! {
        NetNccl: tide_net_nccl(NetParams) => net::net::<Nccl>;
        FinalizeNccl: tide_finalize_nccl(FinalizeParams) => finalize::finalize::<Nccl>;
    }
}

/// Whether a kernel's symbol is `name`.
const fn is_named(kernel: Kernel, name: &str) -> bool {
    is_equal(kernel.name(), name)
}

/// `==` of strings, at compile time.
const fn is_equal(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

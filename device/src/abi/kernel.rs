//! The kernels that a host can launch, by name.

/// Every entry point. A PTX module exports each under [`Kernel::name`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// [`crate::kernels::sum`] of bf16 gradients.
    SumBf16,
    /// [`crate::kernels::sum`] of fp32 gradients.
    SumF32,
    /// [`crate::kernels::land`] through the multicast address.
    LandMultimem,
    /// [`crate::kernels::land`] by peer loads.
    LandPeer,
    /// [`crate::kernels::net`] over the loopback network.
    NetLoopback,
    /// [`crate::kernels::finalize`] over the loopback network.
    FinalizeLoopback,
    /// [`crate::kernels::cast`].
    Cast,
    /// [`crate::kernels::stock::pack`].
    StockPack,
    /// [`crate::kernels::stock::flat_sum`].
    StockFlatSum,
}

impl Kernel {
    /// Every kernel.
    pub const ALL: [Self; 9] = [
        Self::SumBf16,
        Self::SumF32,
        Self::LandMultimem,
        Self::LandPeer,
        Self::NetLoopback,
        Self::FinalizeLoopback,
        Self::Cast,
        Self::StockPack,
        Self::StockFlatSum,
    ];

    /// The symbol of the entry point.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SumBf16 => "tide_sum_bf16",
            Self::SumF32 => "tide_sum_f32",
            Self::LandMultimem => "tide_land_multimem",
            Self::LandPeer => "tide_land_peer",
            Self::NetLoopback => "tide_net_loopback",
            Self::FinalizeLoopback => "tide_finalize_loopback",
            Self::Cast => "tide_cast",
            Self::StockPack => "tide_stock_pack",
            Self::StockFlatSum => "tide_stock_flat_sum",
        }
    }

    /// Most threads of a block on a GPU: what its registers leave room for. The module states it to the driver,
    /// which refuses a larger block. A sum holds its tile in registers, one producer warp and up to 480 consumers of
    /// bf16 or 224 of fp32. Registers are dealt to four partitions of an SM, warp by warp: a 17th warp would leave each
    /// thread 96, a ninth 168, of which the fp32 sum spills some.
    pub const fn block_threads_max(self) -> u32 {
        match self {
            Self::SumBf16 => 32 + 480,
            Self::SumF32 => 32 + 224,
            Self::NetLoopback => 512,
            Self::FinalizeLoopback => 32,
            Self::LandMultimem | Self::LandPeer | Self::Cast | Self::StockPack | Self::StockFlatSum => 1024,
        }
    }
}

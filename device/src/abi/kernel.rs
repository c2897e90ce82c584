//! The kernels that a host can launch, by name, and the module that each is in.

/// NCCL's network below a rail, as a module is built for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NcclBackend {
    /// The GPU rings the NIC itself.
    Gdaki,
    /// A thread of the host puts for the GPU.
    Proxy,
}

impl NcclBackend {
    /// Every back end.
    pub const ALL: [Self; 2] = [Self::Gdaki, Self::Proxy];

    /// NCCL's bit for it: 1 shifted by the `ginType` of a communicator.
    pub const fn mask(self) -> u32 {
        match self {
            Self::Gdaki => 1 << 3,
            Self::Proxy => 1 << 2,
        }
    }

    /// Its name, in files and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gdaki => "gdaki",
            Self::Proxy => "proxy",
        }
    }
}

/// Which PTX module has a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ModuleKind {
    /// The one that needs nothing but a GPU.
    Base,
    /// One that was linked with NCCL's device code: one for each [`NcclBackend`], with the same names in all.
    Nccl,
}

/// Every entry point. The PTX module that has it exports it under [`Kernel::name`].
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
    /// [`crate::kernels::net`] over NCCL.
    NetNccl,
    /// [`crate::kernels::finalize`] over NCCL.
    FinalizeNccl,
}

impl Kernel {
    /// Every kernel.
    pub const ALL: [Self; 11] = [
        Self::SumBf16,
        Self::SumF32,
        Self::LandMultimem,
        Self::LandPeer,
        Self::NetLoopback,
        Self::FinalizeLoopback,
        Self::Cast,
        Self::StockPack,
        Self::StockFlatSum,
        Self::NetNccl,
        Self::FinalizeNccl,
    ];

    /// The kernels of the base module.
    pub const BASE: [Self; 9] = {
        let mut base = [Self::SumBf16; 9];
        let mut i = 0;
        while i < base.len() {
            base[i] = Self::ALL[i];
            assert!(matches!(base[i].module(), ModuleKind::Base), "they come first in ALL");
            i += 1;
        }
        base
    };

    /// The kernels of an NCCL module.
    pub const NCCL: [Self; 2] = [Self::NetNccl, Self::FinalizeNccl];

    /// The module that has it.
    pub const fn module(self) -> ModuleKind {
        match self {
            Self::NetNccl | Self::FinalizeNccl => ModuleKind::Nccl,
            _ => ModuleKind::Base,
        }
    }

    /// Whether the blocks of a launch wait for each other, so that all of them must be resident.
    pub const fn blocks_wait_for_each_other(self) -> bool {
        matches!(self, Self::NetLoopback | Self::NetNccl)
    }

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
            Self::NetNccl => "tide_net_nccl",
            Self::FinalizeNccl => "tide_finalize_nccl",
        }
    }

    /// Most threads of a block on a GPU: what its registers leave room for. The module states it to the driver,
    /// which refuses a larger block. A sum holds its tile in registers, one producer warp and up to 480 consumers of
    /// bf16 or 224 of fp32. Registers are dealt to four partitions of an SM, warp by warp: a 17th warp would leave each
    /// thread 96, a ninth 168, of which the fp32 sum spills some. NCCL's code takes about 170; a rank has at most eight warps
    /// on the network.
    pub const fn block_threads_max(self) -> u32 {
        match self {
            Self::SumBf16 => 32 + 480,
            Self::SumF32 => 32 + 224,
            Self::NetLoopback => 512,
            Self::NetNccl => 256,
            Self::FinalizeLoopback | Self::FinalizeNccl => 32,
            Self::LandMultimem | Self::LandPeer | Self::Cast | Self::StockPack | Self::StockFlatSum => 1024,
        }
    }
}

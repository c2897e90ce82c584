//! What the built PTX must look like: architectures, kernels, and what each kernel must hold.
//!
//! The barrier counts are those of the sources. A compiler pass that copies a barrier into both sides of a branch
//! makes a warp meet two barriers where the source has one, and hang.

use tide_device::abi::kernel::Kernel;

/// An architecture that PTX is built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arch {
    /// `-Ctarget-cpu`, and `-arch` of ptxas.
    pub cpu: &'static str,
}

impl Arch {
    /// Name of its file in `device/ptx`.
    pub fn file_name(self) -> String {
        format!("{}.ptx", self.cpu)
    }
}

/// Every architecture. PTX runs on its own and on later ones.
pub const ARCHS: [Arch; 2] = [Arch { cpu: "sm_90" }, Arch { cpu: "sm_100" }];

/// The PTX version that is emitted: 8.6 is the first that knows sm_100, and all drivers of CUDA 12.7 or newer take it.
pub const PTX_FEATURE: &str = "+ptx86";

/// A multiprocessor deals a block's warps to this many parts of itself, of [`REGISTERS_PER_PART`] each.
pub const PARTS_PER_SM: u32 = 4;

/// Registers of a part, all architectures above.
pub const REGISTERS_PER_PART: u32 = 16384;

/// What one kernel must look like.
#[derive(Debug, Clone, Copy)]
pub struct Expectation {
    /// The kernel.
    pub kernel: Kernel,
    /// Block barriers in the kernel's source, inlined functions included.
    pub barriers: usize,
    /// Mnemonics that must occur; `|` between alternatives.
    pub instructions: &'static [&'static str],
}

/// A bulk load that an mbarrier counts.
const BULK_LOAD: &str = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes";
/// The mbarrier that counts it, and the wait on it.
const EXPECT_TX: &str = "mbarrier.arrive.expect_tx.release.cta.shared.b64";
const TRY_WAIT: &str = "mbarrier.try_wait.parity.acquire.cta.shared.b64";

/// An fp32 addition, rounded to nearest even; sm_100 has one of two at once, each rounded by itself.
const ADD: &str = "add.rn.f32|add.rn.f32x2";

impl Expectation {
    /// The symbol of its entry point.
    pub const fn name(&self) -> &'static str {
        self.kernel.name()
    }
}

/// Every kernel, in the order of [`Kernel::ALL`].
pub const KERNELS: [Expectation; Kernel::ALL.len()] = [
    Expectation { kernel: Kernel::SumBf16, barriers: 1, instructions: &SUM },
    Expectation { kernel: Kernel::SumF32, barriers: 1, instructions: &SUM },
    Expectation {
        kernel: Kernel::LandMultimem,
        barriers: 0,
        instructions: &["multimem.ld_reduce.relaxed.sys.global.add.v4.f32", "st.global.v4.f32"],
    },
    Expectation {
        kernel: Kernel::LandPeer,
        barriers: 0,
        instructions: &["ld.relaxed.sys.global.v4.f32", ADD, "st.global.v4.f32"],
    },
    Expectation {
        kernel: Kernel::NetLoopback,
        barriers: 1,
        instructions: &[
            "mbarrier.init.shared.b64",
            "fence.mbarrier_init.release.cluster",
            "fence.proxy.async.shared::cta",
            EXPECT_TX,
            BULK_LOAD,
            TRY_WAIT,
            "cp.async.bulk.global.shared::cta.bulk_group",
            "cp.async.bulk.commit_group",
            "cp.async.bulk.wait_group",
            "cp.async.bulk.wait_group.read",
            "fence.proxy.async",
            "ld.acquire.sys.global.b64",
            "st.release.sys.global.b64",
            "red.release.sys.global.add.u64",
            "atom.acq_rel.sys.global.cas.b32",
            "nanosleep.u32",
            GLOBALTIMER,
        ],
    },
    Expectation { kernel: Kernel::FinalizeLoopback, barriers: 0, instructions: &["red.release.sys.global.add.u64"] },
    Expectation {
        kernel: Kernel::Cast,
        barriers: 0,
        instructions: &["ld.global.v4.b32", "cvt.rn.bf16.f32", "st.global.v2.b32"],
    },
    Expectation { kernel: Kernel::StockPack, barriers: 0, instructions: &["st.global.b32"] },
    Expectation { kernel: Kernel::StockFlatSum, barriers: 0, instructions: &[ADD, "st.global.b32"] },
];

const _: () = {
    let mut i = 0;
    while i < KERNELS.len() {
        assert!(KERNELS[i].kernel as usize == Kernel::ALL[i] as usize, "the table is in the order of the kernels");
        i += 1;
    }
};

/// The timer that every deadline is told by. A register, not a mnemonic: it is looked for among the operands.
const GLOBALTIMER: &str = "%globaltimer";

const SUM: [&str; 13] = [
    "mbarrier.init.shared.b64",
    "fence.mbarrier_init.release.cluster",
    "fence.proxy.async.shared::cta",
    EXPECT_TX,
    BULK_LOAD,
    TRY_WAIT,
    "mbarrier.arrive.release.cta.shared.b64",
    ADD,
    "st.global.v4.f32",
    "atom.acq_rel.sys.global.cas.b32",
    "st.release.sys.global.b64",
    "nanosleep.u32",
    GLOBALTIMER,
];

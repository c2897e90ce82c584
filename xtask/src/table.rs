//! What the built PTX must look like: architectures, kernels, and what each kernel must hold.
//!
//! The barrier counts are those of the sources. A compiler pass that copies a barrier into both sides of a branch
//! makes a warp meet two barriers where the source has one, and hang.

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

/// Registers of a multiprocessor, all architectures above.
pub const REGISTERS_PER_SM: u32 = 65536;

/// What one kernel must look like.
#[derive(Debug, Clone, Copy)]
pub struct Expectation {
    /// Entry point.
    pub name: &'static str,
    /// Block barriers in the kernel's source, inlined functions included.
    pub barriers: usize,
    /// Largest block that it is launched with; its registers must suffice for one such block.
    pub threads_max: u32,
    /// Mnemonics that must occur.
    pub instructions: &'static [&'static str],
}

/// A bulk load that an mbarrier counts.
const BULK_LOAD: &str = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes";
/// The mbarrier that counts it, and the wait on it.
const EXPECT_TX: &str = "mbarrier.arrive.expect_tx.release.cta.shared.b64";
const TRY_WAIT: &str = "mbarrier.try_wait.parity.acquire.cta.shared.b64";

/// Every kernel, in the order of `tide_device::abi::kernel::Kernel`.
pub const KERNELS: [Expectation; 9] = [
    Expectation { name: "tide_sum_bf16", barriers: 1, threads_max: 544, instructions: &SUM },
    Expectation { name: "tide_sum_f32", barriers: 1, threads_max: 544, instructions: &SUM },
    Expectation {
        name: "tide_land_multimem",
        barriers: 0,
        threads_max: 1024,
        instructions: &["multimem.ld_reduce.relaxed.sys.global.add.v4.f32", "st.global.v4.f32"],
    },
    Expectation {
        name: "tide_land_peer",
        barriers: 0,
        threads_max: 1024,
        instructions: &["ld.relaxed.sys.global.v4.f32", "add.rn.f32", "st.global.v4.f32"],
    },
    Expectation {
        name: "tide_net_loopback",
        barriers: 1,
        threads_max: 512,
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
    Expectation {
        name: "tide_finalize_loopback",
        barriers: 0,
        threads_max: 32,
        instructions: &["red.release.sys.global.add.u64"],
    },
    Expectation {
        name: "tide_cast",
        barriers: 0,
        threads_max: 1024,
        instructions: &["ld.global.v4.b32", "cvt.rn.bf16.f32", "st.global.v2.b32"],
    },
    Expectation { name: "tide_stock_pack", barriers: 0, threads_max: 1024, instructions: &["st.global.b32"] },
    Expectation {
        name: "tide_stock_flat_sum",
        barriers: 0,
        threads_max: 1024,
        instructions: &["add.rn.f32", "st.global.b32"],
    },
];

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
    "add.rn.f32",
    "st.global.v4.f32",
    "atom.acq_rel.sys.global.cas.b32",
    "st.release.sys.global.b64",
    "nanosleep.u32",
    GLOBALTIMER,
];

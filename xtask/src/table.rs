//! What the built PTX must look like: architectures, kernels, and what each kernel must hold.
//!
//! The barrier counts are those of the sources. A compiler pass that copies a barrier into both sides of a branch
//! makes a warp meet two barriers where the source has one, and hang.

use tide_device::abi::kernel::{Kernel, NcclBackend};

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

/// The kernels of the base module, in the order of [`Kernel::BASE`].
pub const KERNELS: [Expectation; Kernel::BASE.len()] = [
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
        assert!(KERNELS[i].kernel as usize == Kernel::BASE[i] as usize, "the table is in the order of the kernels");
        i += 1;
    }
};

/// The kernels of a module over NCCL, in the order of [`Kernel::NCCL`]. What is not ours among the instructions is what that back
/// end's doorbell, queue and completion come to in NCCL 2.32.3; docs/decisions/0002-nccl-device-code.md reads them.
pub const fn nccl_kernels(backend: NcclBackend) -> &'static [Expectation] {
    match backend {
        NcclBackend::Gdaki => &NCCL_GDAKI,
        NcclBackend::Proxy => &NCCL_PROXY,
    }
}

/// Largest stack frame of a kernel over NCCL, bytes. GDAKI needs none. For PROXY, NCCL puts together a descriptor of 128 bytes
/// in memory and copies it to the host's queue in vectors, which is what keeps it out of registers.
pub const fn nccl_frame_bytes_max(backend: NcclBackend) -> u64 {
    match backend {
        NcclBackend::Gdaki => 0,
        NcclBackend::Proxy => 128,
    }
}

static NCCL_GDAKI: [Expectation; Kernel::NCCL.len()] = [
    Expectation { kernel: Kernel::NetNccl, barriers: 1, instructions: &nccl_net(GDAKI_POST) },
    Expectation { kernel: Kernel::FinalizeNccl, barriers: 0, instructions: &nccl_finalize(GDAKI_POST) },
];

static NCCL_PROXY: [Expectation; Kernel::NCCL.len()] = [
    Expectation { kernel: Kernel::NetNccl, barriers: 1, instructions: &nccl_net(PROXY_POST) },
    Expectation { kernel: Kernel::FinalizeNccl, barriers: 0, instructions: &nccl_finalize(PROXY_POST) },
];

/// A fence for the NIC; slots of the send queue are reserved, the entries written and made ready, the doorbell rung; and a look
/// for the completion.
const GDAKI_POST: [&str; 6] = [
    "fence.release.sys",
    "atom.add.relaxed.gpu.u64",
    "st.weak.cs.v2.b64",
    "fence.release.gpu",
    "st.mmio.relaxed.sys.global.b64",
    "ld.relaxed.sys.global.L1::no_allocate.b8",
];

/// A fence for the NIC; a slot of the proxy's queue is claimed, seen to be free, and the descriptor written; and a look for
/// the completion.
const PROXY_POST: [&str; 5] = [
    "fence.acq_rel.sys",
    "atom.add.relaxed.sys.u32",
    "ld.relaxed.sys.b32",
    "st.global.wt.v4.u32",
    "ld.acquire.sys.b32",
];

/// What a flush needs beside: NCCL's clock, and our wait past its deadline.
const FLUSH: [&str; 5] =
    [CLOCK, GLOBALTIMER, "nanosleep.u32", "atom.acq_rel.sys.global.cas.b32", "st.release.sys.global.b64"];

const fn nccl_finalize<const N: usize>(post: [&'static str; N]) -> [&'static str; 11] {
    let mut all = [CLOCK; 11];
    let mut i = 0;
    while i < N {
        all[i] = post[i];
        i += 1;
    }
    let mut j = 0;
    while j < FLUSH.len() {
        all[i + j] = FLUSH[j];
        j += 1;
    }
    all
}

/// As the finalizer; and it looks at signals, and crosses to bulk copies.
const fn nccl_net<const N: usize>(post: [&'static str; N]) -> [&'static str; 13] {
    let (finalize, mut all) = (nccl_finalize(post), ["ld.acquire.sys.b64"; 13]);
    let mut i = 0;
    while i < finalize.len() {
        all[i] = finalize[i];
        i += 1;
    }
    all[i] = "fence.proxy.async";
    all
}

/// The clock that NCCL's timeouts are told by: a register, like [`GLOBALTIMER`].
const CLOCK: &str = "%clock64";

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

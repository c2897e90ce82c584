//! The machine as PTX. The only assembly and the only intrinsics of the project stand here.
//!
//! * **Barriers are convergent LLVM intrinsics**, never assembly: LLVM may copy an `asm!` into both sides of
//!   a branch, and a warp that meets two copies of one aligned barrier hangs.
//! * **Read-modify-writes are assembly** that names order and scope: the compiler's own lose both.
//! * No assembly that touches or orders memory is `nomem`, `readonly` or `pure`: each is thereby a compiler
//!   barrier, and none may be moved across another. Special registers, conversions and addresses are not memory.
//! * Vector accesses name `b32` registers; the bits of an fp32 travel as `u32` and cost nothing.

use super::machine::{Machine, SharedAddr, WaitScope};
use core::arch::{asm, global_asm, nvptx};

// The block's dynamic shared memory. Its size is the launcher's; it is declared here, once, because the
// language has no shared address space.
global_asm!(".extern .shared .align 1024 .b8 tide_smem[];");

unsafe extern "C" {
    // Marked convergent by LLVM, which `asm!` cannot be.
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn barrier_cta_sync_aligned_count(id: u32, threads: u32);
}

/// How long a thread that polls a signal sleeps between two looks, ns. A look is a trip to the L2 cache or across
/// a link, several hundred ns; much less would keep that path busy for nothing, much more would add to the
/// latency of every round.
const POLL_PAUSE_NS: u32 = 100;

/// How long a parked thread sleeps at a time, ns: the longest that `nanosleep` takes.
const PARK_PAUSE_NS: u32 = 1_000_000;

/// A GPU.
pub struct Ptx;

// SAFETY: every operation below is the instruction that its contract names, with that order and scope.
unsafe impl Machine for Ptx {
    const WARP_SIZE: u32 = 32;

    #[inline(always)]
    fn thread_idx_x() -> u32 {
        // SAFETY: reads a special register.
        (unsafe { nvptx::_thread_idx_x() }) as u32
    }

    #[inline(always)]
    fn block_idx_x() -> u32 {
        // SAFETY: reads a special register.
        (unsafe { nvptx::_block_idx_x() }) as u32
    }

    #[inline(always)]
    fn block_dim_x() -> u32 {
        // SAFETY: reads a special register.
        (unsafe { nvptx::_block_dim_x() }) as u32
    }

    #[inline(always)]
    fn grid_dim_x() -> u32 {
        // SAFETY: reads a special register.
        (unsafe { nvptx::_grid_dim_x() }) as u32
    }

    #[inline(always)]
    fn smid() -> u32 {
        let value: u32;
        // SAFETY: reads a special register. Not pure: a preempted block may come back elsewhere.
        unsafe { asm!("mov.u32 {}, %smid;", out(reg32) value, options(nomem, nostack)) };
        value
    }

    #[inline(always)]
    fn globaltimer_ns() -> u64 {
        let value: u64;
        // SAFETY: reads a special register.
        // ORDER: a compiler barrier, so that the time is read where the source reads it.
        unsafe { asm!("mov.u64 {}, %globaltimer;", out(reg64) value, options(nostack)) };
        value
    }

    #[inline(always)]
    fn dynamic_shared() -> SharedAddr {
        let address: u64;
        // SAFETY: takes the address of the symbol declared above; touches no memory.
        unsafe { asm!("mov.u64 {}, tide_smem;", out(reg64) address, options(pure, nomem, nostack)) };
        SharedAddr(address as usize)
    }

    #[inline(always)]
    unsafe fn barrier_sync(id: u32, threads: u32) {
        // SAFETY: the caller keeps `id` below 16, `threads` a multiple of the warp size and equal in all
        // callers, and comes with whole converged warps.
        // ORDER: acquire and release among the threads of the barrier, block scope. The intrinsic reads and
        // writes any memory in the compiler's eyes.
        unsafe { barrier_cta_sync_aligned_count(id, threads) }
    }

    #[inline(always)]
    unsafe fn mbarrier_init(barrier: SharedAddr, count: u32) {
        // SAFETY: the caller's `barrier` is 8 free bytes of its block's shared memory.
        // ORDER: a plain write; `fence_mbarrier_init` shows it to bulk copies, the block barrier after
        // that to the block's threads.
        unsafe {
            asm!("mbarrier.init.shared.b64 [{}], {};", in(reg32) shared_window(barrier), in(reg32) count, options(nostack));
        }
    }

    #[inline(always)]
    fn fence_mbarrier_init() {
        // SAFETY: two fences; they touch no memory of their own.
        // ORDER: the first releases the caller's mbarrier inits to whoever meets the barriers later, bulk
        // copies included (PTX has no narrower scope for it than the cluster); the second orders the
        // words' generic writes before async accesses to them.
        unsafe {
            asm!("fence.mbarrier_init.release.cluster;", "fence.proxy.async.shared::cta;", options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn mbarrier_arrive(barrier: SharedAddr) {
        // SAFETY: the caller's `barrier` is initialised and its phase lacks an arrival.
        // ORDER: release, block scope: pairs with the acquire of `mbarrier_try_wait_parity`.
        unsafe {
            asm!("mbarrier.arrive.release.cta.shared.b64 _, [{}];", in(reg32) shared_window(barrier), options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn mbarrier_arrive_expect_tx(barrier: SharedAddr, bytes: u32) {
        // SAFETY: the caller's `barrier` is initialised, its phase lacks an arrival, and bulk loads of
        // `bytes` follow.
        // ORDER: release, block scope: pairs with the acquire of `mbarrier_try_wait_parity`. The bytes are
        // expected before any copy is issued, hence before any can be counted.
        unsafe {
            asm!(
                "mbarrier.arrive.expect_tx.release.cta.shared.b64 _, [{}], {};",
                in(reg32) shared_window(barrier),
                in(reg32) bytes,
                options(nostack)
            );
        }
    }

    #[inline(always)]
    unsafe fn mbarrier_try_wait_parity(barrier: SharedAddr, parity: u32) -> bool {
        let complete: u32;
        // SAFETY: the caller's `barrier` is initialised.
        // ORDER: acquire, block scope, when it returns true: pairs with the releases of the arrivals, and
        // with the bytes that bulk loads completed on this barrier.
        unsafe {
            asm!(
                "{{",
                ".reg .pred complete;",
                "mbarrier.try_wait.parity.acquire.cta.shared.b64 complete, [{}], {};",
                "selp.u32 {}, 1, 0, complete;",
                "}}",
                in(reg32) shared_window(barrier),
                in(reg32) parity,
                out(reg32) complete,
                options(nostack)
            );
        }
        complete != 0
    }

    #[inline(always)]
    unsafe fn bulk_load(destination: SharedAddr, source: u64, bytes: u32, barrier: SharedAddr) {
        // SAFETY: the caller's two ranges are valid, 16-aligned and left alone until `barrier` completes.
        // ORDER: weak, async proxy; the completed mbarrier publishes it. No fence precedes: the caller has
        // fenced what the block wrote to `destination` before, or only read there.
        unsafe {
            asm!(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}], {}, [{}];",
                in(reg32) shared_window(destination),
                in(reg64) source,
                in(reg32) bytes,
                in(reg32) shared_window(barrier),
                options(nostack)
            );
        }
    }

    #[inline(always)]
    unsafe fn bulk_store(destination: u64, source: SharedAddr, bytes: u32) {
        // SAFETY: the caller's two ranges are valid and 16-aligned; `source` stays unchanged until a read
        // wait, `destination` unread until a full one.
        // ORDER: weak, async proxy; `bulk_wait_group` of its group publishes it to the caller.
        unsafe {
            asm!(
                "cp.async.bulk.global.shared::cta.bulk_group [{}], [{}], {};",
                in(reg64) destination,
                in(reg32) shared_window(source),
                in(reg32) bytes,
                options(nostack)
            );
        }
    }

    #[inline(always)]
    fn bulk_commit_group() {
        // SAFETY: closes the caller's own group, empty or not.
        // ORDER: none by itself; a compiler barrier keeps it behind the stores that it closes.
        unsafe { asm!("cp.async.bulk.commit_group;", options(nostack)) };
    }

    #[inline(always)]
    fn bulk_wait_group_read<const PENDING: u32>() {
        // SAFETY: waits for the caller's own groups, whose number is bounded.
        // ORDER: the groups' reads of shared memory come before the caller's later writes there; it says
        // nothing of what they wrote.
        unsafe { asm!("cp.async.bulk.wait_group.read {};", const PENDING, options(nostack)) };
    }

    #[inline(always)]
    fn bulk_wait_group<const PENDING: u32>() {
        // SAFETY: waits for the caller's own groups, whose number is bounded.
        // ORDER: the groups' writes are visible to the caller, whose later release publishes them.
        unsafe { asm!("cp.async.bulk.wait_group {};", const PENDING, options(nostack)) };
    }

    #[inline(always)]
    fn fence_proxy_async() {
        // SAFETY: a fence; it touches no memory of its own.
        // ORDER: the caller's generic accesses before its later async ones, in all state spaces.
        unsafe { asm!("fence.proxy.async;", options(nostack)) };
    }

    #[inline(always)]
    unsafe fn ld_shared_b64(address: SharedAddr) -> u64 {
        let (low, high): (u32, u32);
        // SAFETY: the caller's `address` is 8 aligned bytes of shared memory that nobody writes.
        unsafe {
            asm!(
                "ld.shared.v2.b32 {{{}, {}}}, [{}];",
                out(reg32) low,
                out(reg32) high,
                in(reg32) shared_window(address),
                options(nostack)
            );
        }
        join(low, high)
    }

    #[inline(always)]
    unsafe fn ld_shared_v4_b32(address: SharedAddr) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller's `address` is 16 aligned bytes of shared memory that nobody writes.
        unsafe {
            asm!(
                "ld.shared.v4.b32 {{{}, {}, {}, {}}}, [{}];",
                out(reg32) a,
                out(reg32) b,
                out(reg32) c,
                out(reg32) d,
                in(reg32) shared_window(address),
                options(nostack)
            );
        }
        [a, b, c, d]
    }

    #[inline(always)]
    unsafe fn ld_global_b16(address: u64) -> u16 {
        let value: u16;
        // SAFETY: the caller's `address` is 2 aligned bytes without a concurrent writer.
        unsafe { asm!("ld.global.b16 {}, [{}];", out(reg16) value, in(reg64) address, options(nostack)) };
        value
    }

    #[inline(always)]
    unsafe fn ld_global_b32(address: u64) -> u32 {
        let value: u32;
        // SAFETY: the caller's `address` is 4 aligned bytes without a concurrent writer.
        unsafe { asm!("ld.global.b32 {}, [{}];", out(reg32) value, in(reg64) address, options(nostack)) };
        value
    }

    #[inline(always)]
    unsafe fn ld_global_b64(address: u64) -> u64 {
        let (low, high): (u32, u32);
        // SAFETY: the caller's `address` is 8 aligned bytes without a concurrent writer.
        unsafe {
            asm!(
                "ld.global.v2.b32 {{{}, {}}}, [{}];",
                out(reg32) low,
                out(reg32) high,
                in(reg64) address,
                options(nostack)
            );
        }
        join(low, high)
    }

    #[inline(always)]
    unsafe fn ld_global_v4_b32(address: u64) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller's `address` is 16 aligned bytes without a concurrent writer.
        unsafe {
            asm!(
                "ld.global.v4.b32 {{{}, {}, {}, {}}}, [{}];",
                out(reg32) a,
                out(reg32) b,
                out(reg32) c,
                out(reg32) d,
                in(reg64) address,
                options(nostack)
            );
        }
        [a, b, c, d]
    }

    #[inline(always)]
    unsafe fn ld_relaxed_sys_v4_f32(address: u64) -> [f32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller's `address` is 16 aligned bytes whose last write happened before.
        // ORDER: relaxed suffices, an acquire of the caller's came between the write and this; sys because
        // another GPU holds or wrote the bytes, so that no cache of this one answers with older ones.
        unsafe {
            asm!(
                "ld.relaxed.sys.global.v4.f32 {{{}, {}, {}, {}}}, [{}];",
                out(reg32) a,
                out(reg32) b,
                out(reg32) c,
                out(reg32) d,
                in(reg64) address,
                options(nostack)
            );
        }
        [a, b, c, d].map(f32::from_bits)
    }

    #[inline(always)]
    unsafe fn st_global_b16(address: u64, value: u16) {
        // SAFETY: the caller's `address` is 2 aligned bytes that nobody else accesses.
        unsafe { asm!("st.global.b16 [{}], {};", in(reg64) address, in(reg16) value, options(nostack)) };
    }

    #[inline(always)]
    unsafe fn st_global_b32(address: u64, value: u32) {
        // SAFETY: the caller's `address` is 4 aligned bytes that nobody else accesses.
        unsafe { asm!("st.global.b32 [{}], {};", in(reg64) address, in(reg32) value, options(nostack)) };
    }

    #[inline(always)]
    unsafe fn st_global_b64(address: u64, value: u64) {
        // SAFETY: the caller's `address` is 8 aligned bytes that nobody else accesses.
        unsafe {
            asm!(
                "st.global.v2.b32 [{}], {{{}, {}}};",
                in(reg64) address,
                in(reg32) value as u32,
                in(reg32) (value >> 32) as u32,
                options(nostack)
            );
        }
    }

    #[inline(always)]
    unsafe fn st_global_v4_f32(address: u64, value: [f32; 4]) {
        let [a, b, c, d] = value.map(f32::to_bits);
        // SAFETY: the caller's `address` is 16 aligned bytes that nobody else accesses.
        unsafe {
            asm!(
                "st.global.v4.f32 [{}], {{{}, {}, {}, {}}};",
                in(reg64) address,
                in(reg32) a,
                in(reg32) b,
                in(reg32) c,
                in(reg32) d,
                options(nostack)
            );
        }
    }

    #[inline(always)]
    unsafe fn multimem_ld_reduce_add_v4_f32(address: u64) -> [f32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller's `address` is multicast, 16-aligned and valid in every replica, whose last
        // writes happened before.
        // ORDER: relaxed suffices, an acquire of the caller's came between those writes and this; sys
        // because other GPUs hold the replicas.
        unsafe {
            asm!(
                "multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {{{}, {}, {}, {}}}, [{}];",
                out(reg32) a,
                out(reg32) b,
                out(reg32) c,
                out(reg32) d,
                in(reg64) address,
                options(nostack)
            );
        }
        [a, b, c, d].map(f32::from_bits)
    }

    #[inline(always)]
    unsafe fn ld_acquire_sys_b64(address: u64) -> u64 {
        let value: u64;
        // SAFETY: the caller's `address` is a valid, aligned word.
        // ORDER: acquire: pairs with `st_release_sys_b64` and `red_release_sys_add_u64` on the word; sys
        // because its writer is another GPU, the network or the host.
        unsafe { asm!("ld.acquire.sys.global.b64 {}, [{}];", out(reg64) value, in(reg64) address, options(nostack)) };
        value
    }

    #[inline(always)]
    unsafe fn st_release_sys_b64(address: u64, value: u64) {
        // SAFETY: the caller's `address` is a valid, aligned word.
        // ORDER: release: publishes what the caller did before to the reader that acquires the word; sys
        // because that reader may be another GPU or the host.
        unsafe { asm!("st.release.sys.global.b64 [{}], {};", in(reg64) address, in(reg64) value, options(nostack)) };
    }

    #[inline(always)]
    unsafe fn red_release_sys_add_u64(address: u64, value: u64) {
        // SAFETY: the caller's `address` is a valid, aligned word.
        // ORDER: release: publishes what the caller did before to the reader that acquires the word; sys
        // because that reader may be another GPU. Assembly, for `fetch_add` would come out relaxed and
        // bound to this GPU.
        unsafe {
            asm!("red.release.sys.global.add.u64 [{}], {};", in(reg64) address, in(reg64) value, options(nostack))
        };
    }

    #[inline(always)]
    unsafe fn atom_acq_rel_sys_cas_b32(address: u64, expected: u32, value: u32) -> u32 {
        let seen: u32;
        // SAFETY: the caller's `address` is a valid, aligned word.
        // ORDER: acquire of what the last winner released, release to the next; sys because ranks on other
        // GPUs and the host look at the word.
        unsafe {
            asm!(
                "atom.acq_rel.sys.global.cas.b32 {}, [{}], {}, {};",
                out(reg32) seen,
                in(reg64) address,
                in(reg32) expected,
                in(reg32) value,
                options(nostack)
            );
        }
        seen
    }

    #[inline(always)]
    fn fence_acq_rel_sys() {
        // SAFETY: a fence; it touches no memory of its own.
        // ORDER: the caller's earlier accesses before its later ones, for GPUs, network and host alike.
        unsafe { asm!("fence.acq_rel.sys;", options(nostack)) };
    }

    #[inline(always)]
    fn cvt_rn_bf16_f32(value: f32) -> u16 {
        let rounded: u16;
        // SAFETY: arithmetic on registers.
        unsafe {
            asm!(
                "cvt.rn.bf16.f32 {}, {};",
                out(reg16) rounded,
                in(reg32) value,
                options(pure, nomem, nostack)
            );
        }
        rounded
    }

    #[inline(always)]
    fn relax(scope: WaitScope, _deadline_ns: u64) {
        match scope {
            // `mbarrier.try_wait` has suspended the thread already.
            WaitScope::Block => {}
            // SAFETY: sleeps; touches no memory.
            // ORDER: a compiler barrier, so that the look that follows is made after the sleep.
            WaitScope::System => unsafe { asm!("nanosleep.u32 {};", const POLL_PAUSE_NS, options(nostack)) },
        }
    }

    #[inline(always)]
    fn park() -> ! {
        loop {
            // SAFETY: sleeps; touches no memory.
            // ORDER: a compiler barrier: an effect in each turn, which keeps the endless loop in the program.
            unsafe { asm!("nanosleep.u32 {};", const PARK_PAUSE_NS, options(nostack)) };
        }
    }
}

/// The 32-bit address in the shared window.
#[inline(always)]
const fn shared_window(address: SharedAddr) -> u32 {
    address.0 as u32
}

/// Two little-endian halves of a word.
#[inline(always)]
const fn join(low: u32, high: u32) -> u64 {
    (high as u64) << 32 | low as u64
}

/// Defines a PTX entry point: `NAME(PARAMS) => KERNEL`, where `KERNEL` takes one `*const PARAMS`.
///
/// The driver copies the parameter block at launch, so an entry takes it by value; but a by-value struct that
/// is indexed at run time would be copied once more, to each thread's local memory. The entry therefore never
/// names its argument: it asks for the generic address of its own parameter, which PTX calls `NAME_param_0`,
/// and hands that on.
macro_rules! entry_point {
    ($name:ident($params:ty) => $kernel:expr) => {
        /// The entry point of the kernel of this name.
        ///
        /// # Safety
        /// The launch keeps the contract of the kernel, and of the addresses in its parameter block.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(_params: $params) {
            let address: u64;
            // SAFETY: takes the address of the entry's own parameter, which lives as long as the launch;
            // touches no memory.
            unsafe {
                core::arch::asm!(
                    "{{",
                    ".reg .b64 param;",
                    concat!("mov.b64 param, ", stringify!($name), "_param_0;"),
                    "cvta.param.u64 {}, param;",
                    "}}",
                    out(reg64) address,
                    options(nomem, nostack)
                );
            }
            let params = address as *const $params;
            // SAFETY: `params` is this launch's parameter block: whole, aligned as the type asks, read-only.
            // The rest is the launch's promise.
            unsafe { $kernel(params) }
        }
    };
}
pub(crate) use entry_point;

/// Panics end the launch with a trap. The device build turns them into traps where they arise, so this is only
/// what the language asks for.
#[panic_handler]
fn trap_on_panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the launch with an error that the host sees.
    unsafe { nvptx::trap() }
}

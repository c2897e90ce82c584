//! The contract of every machine operation, once. `nvptx.rs` implements it in PTX, [`super::sim`]
//! on the CPU; kernels see neither, they call the typed face in [`super`].
//!
//! # Notions
//!
//! * **Valid global address**: inside one allocation that is live for the whole access, aligned to the
//!   access. An address of another GPU's memory is valid once peer access is on.
//! * **Valid shared address**: inside the dynamic shared memory of the calling thread's block.
//! * **Called by** says which threads of the block must make the call; "one thread" means any single one.
//! * **Generic and async proxy**: plain loads and stores are generic; bulk copies are async. What crosses
//!   from one to the other is ordered only by an mbarrier that counts the copy, by a bulk wait, or by
//!   [`Machine::fence_proxy_async`].

/// An address in a block's shared memory. On a GPU its low 32 bits are the shared-window address, in
/// the simulator it is an address of the host: kernels only add byte offsets to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct SharedAddr(pub usize);

impl SharedAddr {
    /// The address `bytes` further on.
    #[inline(always)]
    pub const fn add(self, bytes: u32) -> Self {
        Self(self.0.wrapping_add(bytes as usize))
    }
}

/// What a waiting thread expects to change; the simulator wakes it then, a GPU may sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitScope {
    /// An mbarrier of the thread's own block.
    Block,
    /// A signal word, written by any agent of the system.
    System,
}

/// The operations of the machine. All of them are associated functions: a thread knows itself.
///
/// # Safety
/// An implementation must give every operation the meaning stated here; the kernels' own safety
/// arguments rest on it.
pub unsafe trait Machine {
    /// Threads of a warp.
    const WARP_SIZE: u32;

    /// `%tid.x`.
    fn thread_idx_x() -> u32;
    /// `%ctaid.x`.
    fn block_idx_x() -> u32;
    /// `%ntid.x`.
    fn block_dim_x() -> u32;
    /// `%nctaid.x`.
    fn grid_dim_x() -> u32;
    /// `%smid`: the multiprocessor that runs the thread.
    fn smid() -> u32;
    /// `%globaltimer`, ns. Unlike the SM's cycle counter it does not stretch when clocks drop [TIDE App. G].
    fn globaltimer_ns() -> u64;

    /// The block's dynamic shared memory, aligned to 1024 bytes.
    fn dynamic_shared() -> SharedAddr;

    /// `barrier.cta.sync.aligned id, threads`: waits until `threads` threads have called it with this
    /// `id`; orders their earlier generic accesses before their later ones.
    ///
    /// Called by: every thread of the warps that take part, converged.
    ///
    /// # Safety
    /// `id < 16`; `threads` is a multiple of the warp size and equal in all callers.
    unsafe fn barrier_sync(id: u32, threads: u32);

    /// `mbarrier.init.shared.b64`: a fresh barrier in phase 0 that `count` arrivals complete.
    ///
    /// Called by: one thread, before [`Machine::fence_mbarrier_init`] and a block barrier.
    ///
    /// # Safety
    /// `barrier` is valid for 8 bytes, 8-aligned and not in use; `count > 0`.
    unsafe fn mbarrier_init(barrier: SharedAddr, count: u32);
    /// `fence.mbarrier_init.release.cluster` and `fence.proxy.async.shared::cta`: makes initialised
    /// barriers known to bulk copies.
    ///
    /// Called by: the thread that initialised.
    fn fence_mbarrier_init();
    /// `mbarrier.arrive.release.cta.shared.b64`: one arrival; the caller's earlier accesses are
    /// visible to whoever sees the phase complete.
    ///
    /// Called by: one thread.
    ///
    /// # Safety
    /// `barrier` is initialised; its phase lacks at least one arrival.
    unsafe fn mbarrier_arrive(barrier: SharedAddr);
    /// `mbarrier.arrive.expect_tx.release.cta.shared.b64`: adds `bytes` to what the phase still
    /// expects, then arrives.
    ///
    /// Called by: one thread.
    ///
    /// # Safety
    /// As [`Machine::mbarrier_arrive`]; bulk loads of exactly `bytes` on this barrier follow.
    unsafe fn mbarrier_arrive_expect_tx(barrier: SharedAddr, bytes: u32);
    /// `mbarrier.try_wait.parity.acquire.cta.shared.b64`: whether the phase of this parity is
    /// complete. May suspend the thread for a bounded time.
    ///
    /// Called by: any thread.
    ///
    /// # Safety
    /// `barrier` is initialised.
    unsafe fn mbarrier_try_wait_parity(barrier: SharedAddr, parity: u32) -> bool;

    /// `cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes`: copies asynchronously;
    /// `barrier` counts the bytes once they are there.
    ///
    /// Called by: one thread.
    ///
    /// # Safety
    /// `destination` and `source` valid for `bytes`, both 16-aligned, `bytes` a positive multiple of 16;
    /// neither is written otherwise until `barrier` completes; what the block last wrote generically to
    /// `destination` has been followed by [`Machine::fence_proxy_async`] or was read only.
    unsafe fn bulk_load(destination: SharedAddr, source: u64, bytes: u32, barrier: SharedAddr);
    /// `cp.async.bulk.global.shared::cta.bulk_group`: copies asynchronously, in the caller's current
    /// bulk group.
    ///
    /// Called by: one thread.
    ///
    /// # Safety
    /// As [`Machine::bulk_load`]; `source` stays unchanged until a read wait, `destination` is
    /// not read before a full wait.
    unsafe fn bulk_store(destination: u64, source: SharedAddr, bytes: u32);
    /// `cp.async.bulk.commit_group`: closes the caller's current bulk group.
    ///
    /// Called by: the thread that issued the stores.
    fn bulk_commit_group();
    /// `cp.async.bulk.wait_group.read PENDING`: until at most `PENDING` of the caller's groups still
    /// read their sources.
    ///
    /// Called by: the thread that issued the stores.
    fn bulk_wait_group_read<const PENDING: u32>();
    /// `cp.async.bulk.wait_group PENDING`: until at most `PENDING` of the caller's groups are
    /// incomplete; the writes of the others are visible to the caller.
    ///
    /// Called by: the thread that issued the stores.
    fn bulk_wait_group<const PENDING: u32>();
    /// `fence.proxy.async`: orders the caller's generic accesses before its later async ones, in global
    /// and shared memory.
    ///
    /// Called by: any thread.
    fn fence_proxy_async();

    /// `ld.shared.v2.b32`, as 8 little-endian bytes.
    ///
    /// # Safety
    /// `address` valid for 8 bytes, 8-aligned; nobody writes there.
    unsafe fn ld_shared_b64(address: SharedAddr) -> u64;
    /// `ld.shared.v4.b32`.
    ///
    /// # Safety
    /// `address` valid for 16 bytes, 16-aligned; nobody writes there.
    unsafe fn ld_shared_v4_b32(address: SharedAddr) -> [u32; 4];

    /// `ld.global.b16`.
    ///
    /// # Safety
    /// `address` valid for 2 bytes, aligned; no concurrent writer.
    unsafe fn ld_global_b16(address: u64) -> u16;
    /// `ld.global.b32`.
    ///
    /// # Safety
    /// `address` valid for 4 bytes, aligned; no concurrent writer.
    unsafe fn ld_global_b32(address: u64) -> u32;
    /// `ld.global.v2.b32`, as 8 little-endian bytes.
    ///
    /// # Safety
    /// `address` valid for 8 bytes, aligned; no concurrent writer.
    unsafe fn ld_global_b64(address: u64) -> u64;
    /// `ld.global.v4.b32`.
    ///
    /// # Safety
    /// `address` valid for 16 bytes, aligned; no concurrent writer.
    unsafe fn ld_global_v4_b32(address: u64) -> [u32; 4];
    /// `ld.relaxed.sys.global.v4.f32`: of memory that another GPU holds or wrote; never through the
    /// non-coherent cache.
    ///
    /// # Safety
    /// `address` valid for 16 bytes, aligned; its last write happened before this.
    unsafe fn ld_relaxed_sys_v4_f32(address: u64) -> [f32; 4];
    /// `st.global.b16`.
    ///
    /// # Safety
    /// `address` valid for 2 bytes, aligned; no concurrent access.
    unsafe fn st_global_b16(address: u64, value: u16);
    /// `st.global.b32`.
    ///
    /// # Safety
    /// `address` valid for 4 bytes, aligned; no concurrent access.
    unsafe fn st_global_b32(address: u64, value: u32);
    /// `st.global.v2.b32`, from 8 little-endian bytes.
    ///
    /// # Safety
    /// `address` valid for 8 bytes, aligned; no concurrent access.
    unsafe fn st_global_b64(address: u64, value: u64);
    /// `st.global.v4.f32`.
    ///
    /// # Safety
    /// `address` valid for 16 bytes, aligned; no concurrent access.
    unsafe fn st_global_v4_f32(address: u64, value: [f32; 4]);

    /// `multimem.ld_reduce.relaxed.sys.global.add.v4.f32`: the element-wise fp32 sum of the replicas
    /// behind a multicast address. The order of the additions is the switch's own; the simulator adds in
    /// the order of the local rank.
    ///
    /// # Safety
    /// `address` is a multicast address, 16-aligned, valid for 16 bytes in every replica; the replicas'
    /// last writes happened before this.
    unsafe fn multimem_ld_reduce_add_v4_f32(address: u64) -> [f32; 4];

    /// `ld.acquire.sys.global.b64`.
    ///
    /// # Safety
    /// `address` valid for 8 bytes, aligned.
    unsafe fn ld_acquire_sys_b64(address: u64) -> u64;
    /// `st.release.sys.global.b64`.
    ///
    /// # Safety
    /// `address` valid for 8 bytes, aligned.
    unsafe fn st_release_sys_b64(address: u64, value: u64);
    /// `red.release.sys.global.add.u64`: adds, returns nothing.
    ///
    /// # Safety
    /// `address` valid for 8 bytes, aligned.
    unsafe fn red_release_sys_add_u64(address: u64, value: u64);
    /// `atom.acq_rel.sys.global.cas.b32`: returns what was there.
    ///
    /// # Safety
    /// `address` valid for 4 bytes, aligned.
    unsafe fn atom_acq_rel_sys_cas_b32(address: u64, expected: u32, value: u32) -> u32;
    /// `fence.acq_rel.sys`.
    fn fence_acq_rel_sys();

    /// `cvt.rn.bf16.f32`: round to nearest even; every NaN becomes `0x7fff`.
    fn cvt_rn_bf16_f32(value: f32) -> u16;

    /// Called between two looks at a condition that does not hold yet, by [`crate::wait`] alone. `deadline_ns`
    /// is when the caller gives up, in time of [`Machine::globaltimer_ns`].
    fn relax(scope: WaitScope, deadline_ns: u64);
    /// Holds the thread for ever, so that its launch never completes. Called after a fault record was written.
    fn park() -> !;
}

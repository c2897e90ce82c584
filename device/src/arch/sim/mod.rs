//! The simulated machine: what kernels run on where there is no GPU, and what tests explore.
//!
//! Each CUDA thread is a coroutine. One scheduler resumes one of them at a time, chosen by a seed among all
//! that can go on: the same seed gives the same interleaving. Threads switch where they wait, and now and then
//! at any operation that others can observe. Bulk copies are units of their own: a load may complete late, a
//! store reads its source at one moment and writes its destination at a later one. Time is virtual: a step
//! takes some nanoseconds, and where nothing can go on, time jumps to the next deadline; so a wait of ten
//! seconds costs nothing, and a stall is found at once.
//!
//! What it does not model: plain loads and stores take effect at once and in order, as on one sequentially
//! consistent memory. A missing fence between them does not show here.

mod block;
pub mod memory;
pub mod sched;

use super::machine::{Machine, SharedAddr, WaitScope};
use sched::{Suspend, with_current};

/// The simulated machine.
pub struct Sim;

#[inline]
fn checked(address: u64, bytes: u64) -> bool {
    let valid = with_current(|c| c.is_valid(address, bytes)) && address.is_multiple_of(bytes);
    if !valid {
        sched::illegal_address(address, bytes);
    }
    valid
}

macro_rules! load {
    ($address:expr, $type:ty) => {{
        let address: u64 = $address;
        checked(address, size_of::<$type>() as u64);
        // SAFETY: in a live allocation and aligned, as just checked; `illegal_address` does not return.
        unsafe { *(address as *const $type) }
    }};
}

macro_rules! store {
    ($address:expr, $type:ty, $value:expr) => {{
        let address: u64 = $address;
        checked(address, size_of::<$type>() as u64);
        // SAFETY: as for loads.
        unsafe { *(address as *mut $type) = $value }
    }};
}

/// 16 bytes that are accessed at once.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct V4<T>([T; 4]);

// SAFETY: each operation does what its contract says; the scheduler's own argument is in `sched`.
unsafe impl Machine for Sim {
    const WARP_SIZE: u32 = 2;

    fn thread_idx_x() -> u32 {
        with_current(|c| c.thread_idx)
    }

    fn block_idx_x() -> u32 {
        with_current(|c| c.block_idx)
    }

    fn block_dim_x() -> u32 {
        with_current(|c| c.block_dim)
    }

    fn grid_dim_x() -> u32 {
        with_current(|c| c.grid_dim)
    }

    fn smid() -> u32 {
        0
    }

    fn globaltimer_ns() -> u64 {
        sched::now_ns()
    }

    fn dynamic_shared() -> SharedAddr {
        SharedAddr(with_current(|c| c.shared_base))
    }

    unsafe fn barrier_sync(id: u32, threads: u32) {
        sched::barrier_sync(id, threads);
    }

    unsafe fn mbarrier_init(barrier: SharedAddr, count: u32) {
        sched::mbarrier_init(barrier, count);
    }

    fn fence_mbarrier_init() {}

    unsafe fn mbarrier_arrive(barrier: SharedAddr) {
        sched::mbarrier_arrive(barrier, 0);
    }

    unsafe fn mbarrier_arrive_expect_tx(barrier: SharedAddr, bytes: u32) {
        sched::mbarrier_arrive(barrier, bytes);
    }

    unsafe fn mbarrier_try_wait_parity(barrier: SharedAddr, parity: u32) -> bool {
        sched::mbarrier_parity(barrier) != parity
    }

    unsafe fn bulk_load(destination: SharedAddr, source: u64, bytes: u32, barrier: SharedAddr) {
        sched::bulk_load(destination, source, bytes, barrier);
    }

    unsafe fn bulk_store(destination: u64, source: SharedAddr, bytes: u32) {
        sched::bulk_store(destination, source, bytes);
    }

    fn bulk_commit_group() {
        sched::bulk_commit_group();
    }

    fn bulk_wait_group_read<const PENDING: u32>() {
        sched::bulk_wait_group(PENDING, true);
    }

    fn bulk_wait_group<const PENDING: u32>() {
        sched::bulk_wait_group(PENDING, false);
    }

    fn fence_proxy_async() {}

    #[inline]
    unsafe fn ld_shared_b64(address: SharedAddr) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { *(address.0 as *const u64) }
    }

    #[inline]
    unsafe fn ld_shared_v4_b32(address: SharedAddr) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { (*(address.0 as *const V4<u32>)).0 }
    }

    #[inline]
    unsafe fn ld_global_b16(address: u64) -> u16 {
        load!(address, u16)
    }

    #[inline]
    unsafe fn ld_global_b32(address: u64) -> u32 {
        load!(address, u32)
    }

    #[inline]
    unsafe fn ld_global_b64(address: u64) -> u64 {
        load!(address, u64)
    }

    #[inline]
    unsafe fn ld_global_v4_b32(address: u64) -> [u32; 4] {
        load!(address, V4<u32>).0
    }

    #[inline]
    unsafe fn ld_relaxed_sys_v4_f32(address: u64) -> [f32; 4] {
        load!(address, V4<f32>).0
    }

    #[inline]
    unsafe fn st_global_b16(address: u64, value: u16) {
        store!(address, u16, value);
    }

    #[inline]
    unsafe fn st_global_b32(address: u64, value: u32) {
        store!(address, u32, value);
    }

    #[inline]
    unsafe fn st_global_b64(address: u64, value: u64) {
        store!(address, u64, value);
    }

    #[inline]
    unsafe fn st_global_v4_f32(address: u64, value: [f32; 4]) {
        store!(address, V4<f32>, V4(value));
    }

    unsafe fn multimem_ld_reduce_add_v4_f32(address: u64) -> [f32; 4] {
        sched::multimem_sum(address)
    }

    unsafe fn ld_acquire_sys_b64(address: u64) -> u64 {
        sched::preempt();
        load!(address, u64)
    }

    unsafe fn st_release_sys_b64(address: u64, value: u64) {
        sched::preempt();
        store!(address, u64, value);
        sched::signal_written();
    }

    unsafe fn red_release_sys_add_u64(address: u64, value: u64) {
        sched::preempt();
        if sched::loses_signal() {
            return;
        }
        let sum = load!(address, u64).wrapping_add(value);
        store!(address, u64, sum);
        sched::signal_written();
    }

    unsafe fn atom_acq_rel_sys_cas_b32(address: u64, expected: u32, value: u32) -> u32 {
        sched::preempt();
        let seen = load!(address, u32);
        if seen == expected {
            store!(address, u32, value);
        }
        seen
    }

    fn fence_acq_rel_sys() {}

    fn cvt_rn_bf16_f32(value: f32) -> u16 {
        if value.is_nan() {
            return 0x7fff;
        }
        let bits = value.to_bits();
        // Half of the last kept bit, less one unless that bit is odd: ties go to even.
        let rounding = 0x7fff + (bits >> 16 & 1);
        ((bits + rounding) >> 16) as u16
    }

    fn relax(scope: WaitScope, deadline_ns: u64) {
        sched::suspend(match scope {
            WaitScope::Block => Suspend::Block { deadline_ns },
            WaitScope::System => Suspend::System { deadline_ns },
        });
    }

    fn park() -> ! {
        loop {
            sched::suspend(Suspend::Parked);
        }
    }
}

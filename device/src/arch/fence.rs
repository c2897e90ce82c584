//! Fences.

use super::Target;
use super::machine::Machine;

/// Makes initialised mbarriers known to bulk copies.
#[inline(always)]
pub fn mbarrier_init() {
    Target::fence_mbarrier_init();
}

/// Orders the caller's generic accesses before its later bulk copies.
#[inline(always)]
pub fn proxy_async() {
    Target::fence_proxy_async();
}

/// Orders the caller's earlier accesses before its later ones, for every agent of the system.
#[inline(always)]
pub fn acq_rel_sys() {
    Target::fence_acq_rel_sys();
}

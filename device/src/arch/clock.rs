//! Time.

use super::Target;
use super::machine::Machine;

/// The global timer, ns. It does not stretch when the SM clock drops.
#[inline(always)]
pub fn globaltimer_ns() -> u64 {
    Target::globaltimer_ns()
}

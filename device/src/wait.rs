//! The one timed wait. Nothing else in device code may loop until something changes.

use crate::abi::fault::{FaultRecord, WaitTag};
use crate::abi::params::Deadline;
use crate::arch::machine::{Machine, WaitScope};
use crate::arch::{Target, atomic, clock, global};
use core::mem::offset_of;

/// What a look at a condition gives: whether it holds, and the value that was seen.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// The condition holds.
    pub holds: bool,
    /// The value seen, for the fault record.
    pub seen: u64,
}

/// Waits until `look` says that the condition holds. Past the deadline it writes the fault record and
/// parks: the launch then never completes, and nothing that follows it in its stream runs.
///
/// `describe` gives tag, network context and expected value, and is called only for a record.
#[inline(always)]
pub fn until(
    deadline: Deadline,
    scope: WaitScope,
    describe: impl FnOnce() -> (WaitTag, u32, u64),
    mut look: impl FnMut() -> Look,
) {
    if look().holds {
        return;
    }
    let start_ns = clock::globaltimer_ns();
    let end_ns = start_ns.saturating_add(deadline.timeout_ns);
    loop {
        Target::relax(scope, end_ns);
        let now = look();
        if now.holds {
            return;
        }
        let now_ns = clock::globaltimer_ns();
        if now_ns >= end_ns {
            let (tag, context, expected) = describe();
            fail(deadline, tag, context, expected, now.seen, now_ns - start_ns);
        }
    }
}

/// As [`until`], for a look that takes its time itself, in slices far below the deadline. It stands in the kernel once: its
/// code may be large.
#[inline(always)]
pub fn until_in_slices(
    deadline: Deadline,
    scope: WaitScope,
    describe: impl FnOnce() -> (WaitTag, u32, u64),
    mut look: impl FnMut() -> Look,
) {
    let start_ns = clock::globaltimer_ns();
    let end_ns = start_ns.saturating_add(deadline.timeout_ns);
    loop {
        let now = look();
        if now.holds {
            return;
        }
        let now_ns = clock::globaltimer_ns();
        if now_ns >= end_ns {
            let (tag, context, expected) = describe();
            fail(deadline, tag, context, expected, now.seen, now_ns - start_ns);
        }
        Target::relax(scope, end_ns);
    }
}

/// Writes the record, unless another thread of the rank came first, and parks.
///
/// Not a function of its own on the GPU, rare as it is: a call would put what it is given on a stack, and the call
/// would cost every kernel that waits its registers.
#[inline(always)]
fn fail(deadline: Deadline, tag: WaitTag, context: u32, expected: u64, seen: u64, waited_ns: u64) -> ! {
    // SAFETY: `deadline` comes from the host, which keeps the claim word and the record for as long as
    // the communicator lives; both are aligned.
    let first = unsafe { atomic::compare_and_swap_acq_rel_sys(deadline.claim, 0, 1) } == 0;
    if first {
        let words: [u64; 4] = bytemuck::cast(tag);
        let base = deadline.fault;
        // SAFETY: inside the record, 8-aligned; the claim makes this thread its only writer.
        unsafe {
            let tag = base + offset_of!(FaultRecord, tag) as u64;
            // By constants: an array that is indexed at run time would lie in local memory.
            global::store_b64(tag, words[0]);
            global::store_b64(tag + 8, words[1]);
            global::store_b64(tag + 16, words[2]);
            global::store_b64(tag + 24, words[3]);
            global::store_b64(base + offset_of!(FaultRecord, expected) as u64, expected);
            global::store_b64(base + offset_of!(FaultRecord, seen) as u64, seen);
            global::store_b64(base + offset_of!(FaultRecord, waited_ns) as u64, waited_ns);
        }
        let head = u64::from(FaultRecord::COMPLETE) | u64::from(context) << 32;
        // ORDER: pairs with the host monitor's acquire load of `state`; publishes the fields above.
        // SAFETY: as above; `state` and `context` are the first 8 bytes.
        unsafe { atomic::store_release_sys(base, head) };
    }
    Target::park()
}

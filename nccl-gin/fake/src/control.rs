//! What a test tells an instance, and asks of it.

use crate::state::{self, Failure, state};
use std::ffi::{CStr, c_char, c_int};

fn text(pointer: *const c_char) -> String {
    // SAFETY: the tests pass strings that end with zero.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// Sets a setting (`state.rs` lists them); an unknown name is a fault of the test.
#[unsafe(no_mangle)]
pub extern "C" fn fake_set(name: *const c_char, value: i64) {
    let name = text(name);
    state::setting(&name);
    state().settings.insert(name, value);
}

/// How much is left of a kind: `memory`, `comms`, `windows`, `device_comms`, and `misuses` (things NCCL would not forgive).
#[unsafe(no_mangle)]
pub extern "C" fn fake_count(kind: *const c_char) -> i64 {
    let kind = text(kind);
    let state = state();
    if kind == "memory" { state.memory.len() as i64 } else { state.counts.get(kind.as_str()).copied().unwrap_or(0) }
}

/// The `nth` call of `call` from now on (the first is 1) fails with `code`.
#[unsafe(no_mangle)]
pub extern "C" fn fake_fail(call: *const c_char, nth: i64, code: c_int) {
    state().failures.push(Failure { call: text(call), countdown: nth, code });
}

/// On a non-blocking communicator `call` takes `polls` inquiries; negative: it never ends.
#[unsafe(no_mangle)]
pub extern "C" fn fake_slow(call: *const c_char, polls: i64) {
    state().slow.insert(text(call), polls);
}

/// Writes the calls of `rank` (-1: those of no rank; children of a split bear their parent's), one a line, and gives the length; only that if `capacity` is too small.
#[unsafe(no_mangle)]
pub extern "C" fn fake_log(rank: i64, buffer: *mut u8, capacity: usize) -> usize {
    let lines: Vec<String> = state().log.iter().filter(|(r, _)| *r == rank).map(|(_, call)| call.clone()).collect();
    let text = lines.join("\n");
    if text.len() <= capacity {
        // SAFETY: the test gave `capacity` bytes.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buffer, text.len()) };
    }
    text.len()
}

//! What NCCL holds of this plugin: addresses of boxes, each with a mark of its kind.

use crate::fault::{Fault, Result};
use std::ffi::c_void;

/// What a box can hold.
pub trait Kind {
    /// Its mark.
    const MARK: u64;
    /// What it is, for error messages.
    const NAME: &'static str;
}

#[repr(C)]
struct Marked<T> {
    mark: u64,
    value: T,
}

/// Gives a value away.
pub fn give<T: Kind>(value: T) -> *mut c_void {
    Box::into_raw(Box::new(Marked { mark: T::MARK, value })).cast()
}

fn check<T: Kind>(handle: *mut c_void) -> Result<*mut Marked<T>> {
    let marked: *mut Marked<T> = handle.cast();
    if marked.is_null() {
        return Err(Fault::argument(format!("no {}", T::NAME)));
    }
    // SAFETY: the callers' promise: the box of some kind, and each begins with a mark.
    let mark = unsafe { marked.cast::<u64>().read() };
    if mark == T::MARK { Ok(marked) } else { Err(Fault::argument(format!("{handle:p} is no {}", T::NAME))) }
}

/// Looks at a value that was given away.
///
/// # Errors
/// If it is null or of another kind.
///
/// # Safety
/// `handle` is null, or came from [`give`] and was not taken back; it is not while the reference lives.
pub unsafe fn look<'a, T: Kind>(handle: *mut c_void) -> Result<&'a T> {
    // SAFETY: of this kind, alive by the caller's promise.
    check::<T>(handle).map(|marked| unsafe { &(*marked).value })
}

/// Takes a value back.
///
/// # Errors
/// If it is null or of another kind.
///
/// # Safety
/// As [`look`]; nobody looks at it any more.
pub unsafe fn take<T: Kind>(handle: *mut c_void) -> Result<T> {
    // SAFETY: of this kind, and the only user by the caller's promise.
    check::<T>(handle).map(|marked| unsafe { Box::from_raw(marked) }.value)
}

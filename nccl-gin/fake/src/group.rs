//! Groups: a thread's operations, kept until the group ends.

use crate::state::{INVALID_USAGE, SUCCESS};
use std::cell::RefCell;
use std::ffi::c_int;

/// In which order a group's operations run: nothing that waits before anything that others wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Turn {
    Send,
    Together,
    Wait,
}

type Operation = Box<dyn FnOnce() -> c_int>;

thread_local! {
    static OPEN: RefCell<Option<Vec<(Turn, Operation)>>> = const { RefCell::new(None) };
}

/// Runs an operation now, or when the thread's group ends.
pub fn issue(turn: Turn, operation: impl FnOnce() -> c_int + 'static) -> c_int {
    OPEN.with_borrow_mut(|open| match open {
        Some(operations) => {
            operations.push((turn, Box::new(operation)));
            None
        }
        None => Some(operation),
    })
    .map_or(SUCCESS, |operation| operation())
}

pub fn is_open() -> bool {
    OPEN.with_borrow(Option::is_some)
}

pub fn start() -> c_int {
    OPEN.with_borrow_mut(
        |open| if open.is_some() { INVALID_USAGE } else { open.replace(Vec::new()).map_or(SUCCESS, |_| 0) },
    )
}

pub fn end(refused: Result<(), c_int>) -> c_int {
    let Some(mut operations) = OPEN.take() else { return INVALID_USAGE };
    if let Err(code) = refused {
        return code;
    }
    operations.sort_by_key(|(turn, _)| *turn);
    let codes: Vec<c_int> = operations.into_iter().map(|(_, operation)| operation()).collect();
    codes.into_iter().find(|code| *code != SUCCESS).unwrap_or(SUCCESS)
}

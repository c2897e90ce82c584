//! Settings, counters and the log of one instance.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

pub const SUCCESS: c_int = 0;
pub const INTERNAL_ERROR: c_int = 3;
pub const INVALID_ARGUMENT: c_int = 4;
pub const INVALID_USAGE: c_int = 5;
pub const IN_PROGRESS: c_int = 7;

/// A call that is to fail.
pub struct Failure {
    pub call: String,
    /// How many calls are left until the one that fails; it fails at 1.
    pub countdown: i64,
    pub code: c_int,
}

/// What the instance was told, and what it saw.
pub struct State {
    pub settings: HashMap<String, i64>,
    /// Polls that a call takes on a non-blocking communicator; negative: it never ends.
    pub slow: HashMap<String, i64>,
    pub failures: Vec<Failure>,
    /// Live allocations: address and bytes.
    pub memory: HashMap<usize, usize>,
    /// Live objects by kind.
    pub counts: HashMap<&'static str, i64>,
    /// Rank in the communicator that all others were split from (-1: none), and call.
    pub log: Vec<(i64, String)>,
    pub last_error: String,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| {
    let settings = [
        ("version", 23203),
        ("device_api", 1),
        ("host_rma", 1),
        ("multimem", 0),
        ("gin", 0),
        ("railed_gin", 0),
        ("weak_signals_only", 0),
        ("lsa_team_size", i64::from(c_int::MAX)),
        ("null_windows", 0),
        ("async_error", 0),
        ("device_comm_version", 0),
        ("hasty_split", 0),
    ];
    Mutex::new(State {
        settings: settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        slow: HashMap::new(),
        failures: Vec::new(),
        memory: HashMap::new(),
        counts: HashMap::new(),
        log: Vec::new(),
        last_error: String::new(),
    })
});

pub fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn setting(name: &str) -> i64 {
    *state().settings.get(name).unwrap_or_else(|| panic!("no setting {name}"))
}

pub fn count(kind: &'static str, change: i64) {
    *state().counts.entry(kind).or_default() += change;
}

/// Notes a call; gives the code if it is to fail.
pub fn called(rank: i64, call: &str, arguments: &str) -> Result<(), c_int> {
    let mut state = state();
    state.log.push((rank, format!("{call}({arguments})")));
    for failure in state.failures.iter_mut().filter(|f| f.call == call) {
        failure.countdown -= 1;
    }
    let due = state.failures.iter().position(|f| f.call == call && f.countdown == 0);
    let Some(due) = due else { return Ok(()) };
    let code = state.failures.remove(due).code;
    state.last_error = format!("the fake was told that {call} fails");
    Err(code)
}

/// Refuses a call, with words for `ncclGetLastError`.
pub fn refuse(code: c_int, why: impl Into<String>) -> c_int {
    state().last_error = why.into();
    code
}

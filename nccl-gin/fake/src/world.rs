//! What the ranks of a communicator share.

use crate::state::{INTERNAL_ERROR, refuse};
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::time::{Duration, Instant};

/// How long a call that blocks waits for the others before it fails: no test is to hang.
const PATIENCE: Duration = Duration::from_secs(10);

/// What each rank brought to one step, once all have.
pub type Parts = Vec<Vec<u8>>;

/// A step that the ranks take together.
struct Step {
    call: &'static str,
    parts: Vec<Option<Vec<u8>>>,
}

/// Signals of one (target, origin, context, index).
#[derive(Default)]
struct Signals {
    arrived: u64,
    taken: u64,
}

/// The meeting place of the ranks of a communicator.
pub struct World {
    pub rank_count: usize,
    steps: Mutex<HashMap<u64, Step>>,
    signals: Mutex<HashMap<(usize, usize, c_int, c_int), Signals>>,
    changed: Condvar,
    signalled: Condvar,
}

static WORLDS: LazyLock<Mutex<HashMap<Vec<u8>, Arc<World>>>> = LazyLock::new(Default::default);

impl World {
    /// The world of a name; the first rank makes it.
    pub fn named(name: &[u8], rank_count: usize) -> Arc<Self> {
        let make = || {
            Arc::new(Self {
                rank_count,
                steps: Mutex::default(),
                signals: Mutex::default(),
                changed: Condvar::new(),
                signalled: Condvar::new(),
            })
        };
        Arc::clone(WORLDS.lock().unwrap().entry(name.to_vec()).or_insert_with(make))
    }

    /// Brings a rank's part of a step. Fails if another rank does another thing in it.
    pub fn bring(&self, step: u64, rank: usize, call: &'static str, part: Vec<u8>) -> Result<(), c_int> {
        let mut steps = self.steps.lock().unwrap();
        let fresh = || Step { call, parts: vec![None; self.rank_count] };
        let entry = steps.entry(step).or_insert_with(fresh);
        if entry.call != call {
            let why = format!("rank {rank} calls {call} where another calls {}", entry.call);
            return Err(refuse(INTERNAL_ERROR, why));
        }
        entry.parts[rank] = Some(part);
        self.changed.notify_all();
        Ok(())
    }

    /// All parts of a step, if all ranks have brought theirs.
    pub fn parts(&self, step: u64) -> Option<Parts> {
        self.steps.lock().unwrap().get(&step)?.parts.iter().cloned().collect()
    }

    /// Waits for them.
    pub fn wait(&self, step: u64) -> Result<Parts, c_int> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(parts) = self.parts(step) {
                return Ok(parts);
            }
            let steps = self.steps.lock().unwrap();
            let left = deadline.saturating_duration_since(Instant::now()).min(Duration::from_millis(50));
            if left.is_zero() {
                return Err(refuse(INTERNAL_ERROR, format!("a rank did not come to step {step}")));
            }
            drop(self.changed.wait_timeout(steps, left).unwrap());
        }
    }

    pub fn signal(&self, target: usize, origin: usize, context: c_int, index: c_int) {
        self.signals.lock().unwrap().entry((target, origin, context, index)).or_default().arrived += 1;
        self.signalled.notify_all();
    }

    /// Takes `count` signals, waiting for them.
    pub fn take(&self, key: (usize, usize, c_int, c_int), count: u64) -> c_int {
        let mut signals = self.signals.lock().unwrap();
        let wanted = signals.entry(key).or_default().taken + count;
        let deadline = Instant::now() + PATIENCE;
        while signals[&key].arrived < wanted {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return refuse(INTERNAL_ERROR, format!("{count} signals of {key:?} did not come"));
            }
            signals = self.signalled.wait_timeout(signals, left).unwrap().0;
        }
        signals.get_mut(&key).expect("just there").taken = wanted;
        0
    }
}

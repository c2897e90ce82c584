//! What the ranks of a process share: who belongs together, which words are being added to, and what is still alive.

use crate::abi::{LOG_ALL, LOG_WARN, Logger};
use crate::group::Group;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// How long a rank waits for the others in a collective call, unless told otherwise.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// State of a process.
#[derive(Debug)]
pub struct World {
    groups: Mutex<BTreeMap<u64, Weak<Group>>>,
    /// Words that an addition is under way to, by address.
    words: Mutex<BTreeSet<usize>>,
    next: AtomicU64,
    deadline_ms: AtomicU64,
    logger: Mutex<Option<Logger>>,
    /// Objects that are alive.
    pub alive: Alive,
}

/// How many objects of each kind are alive.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Alive {
    pub instances: AtomicI64,
    pub listeners: AtomicI64,
    pub colls: AtomicI64,
    pub contexts: AtomicI64,
    pub regions: AtomicI64,
    pub requests: AtomicI64,
}

impl World {
    /// An empty one.
    pub const fn new() -> Self {
        Self {
            groups: Mutex::new(BTreeMap::new()),
            words: Mutex::new(BTreeSet::new()),
            next: AtomicU64::new(1),
            deadline_ms: AtomicU64::new(DEADLINE.as_millis() as u64),
            logger: Mutex::new(None),
            alive: Alive {
                instances: AtomicI64::new(0),
                listeners: AtomicI64::new(0),
                colls: AtomicI64::new(0),
                contexts: AtomicI64::new(0),
                regions: AtomicI64::new(0),
                requests: AtomicI64::new(0),
            },
        }
    }

    /// A number that is given once.
    pub fn number(&self) -> u64 {
        // ORDER: relaxed, a number that is given once.
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// How long a rank waits for the others.
    pub fn deadline(&self) -> Duration {
        // ORDER: relaxed, a setting.
        Duration::from_millis(self.deadline_ms.load(Ordering::Relaxed))
    }

    /// Sets how long a rank waits for the others.
    pub fn set_deadline(&self, deadline: Duration) {
        // ORDER: relaxed, a setting.
        self.deadline_ms.store(deadline.as_millis() as u64, Ordering::Relaxed);
    }

    /// The group that goes by `key`, made if nobody is in it.
    pub fn group(&self, key: u64, ranks: usize) -> Arc<Group> {
        let mut groups = lock(&self.groups);
        groups.retain(|_, group| group.strong_count() > 0);
        if let Some(group) = groups.get(&key).and_then(Weak::upgrade) {
            return group;
        }
        let group = Arc::new(Group::new(ranks));
        groups.insert(key, Arc::downgrade(&group));
        group
    }

    /// Groups that somebody is in.
    pub fn groups(&self) -> usize {
        lock(&self.groups).values().filter(|group| group.strong_count() > 0).count()
    }

    /// The right to add to a word, unless somebody has it.
    pub fn take_word(&'static self, address: usize) -> Option<WordGuard> {
        let free = lock(&self.words).insert(address);
        // Made only if it was free: dropping one gives the word back.
        free.then(|| WordGuard { world: self, address })
    }

    /// Words that somebody is adding to.
    pub fn words(&self) -> usize {
        lock(&self.words).len()
    }

    /// From now on warnings go there.
    pub fn set_logger(&self, logger: Option<Logger>) {
        if logger.is_some() {
            *lock(&self.logger) = logger;
        }
    }

    /// Tells NCCL's log.
    pub fn warn(&self, text: &str) {
        let Some(logger) = *lock(&self.logger) else { return };
        let text = CString::new(text.replace('\0', "")).unwrap_or_default();
        // SAFETY: the format takes one string; all of them end with zero and outlive the call.
        unsafe {
            logger(LOG_WARN, LOG_ALL, c"loopback-plugin".as_ptr(), 0, c"RMA/Loopback : %s".as_ptr(), text.as_ptr());
        }
    }
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

/// The right to add to a word.
#[derive(Debug)]
pub struct WordGuard {
    world: &'static World,
    address: usize,
}

impl Drop for WordGuard {
    fn drop(&mut self) {
        lock(&self.world.words).remove(&self.address);
    }
}

/// A mutex whose holder panicked is still good: what it guards is whole between statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts an object for as long as it lives.
#[derive(Debug)]
pub(crate) struct Counted(&'static AtomicI64);

impl Counted {
    pub(crate) fn new(count: &'static AtomicI64) -> Self {
        // ORDER: relaxed, a statistic.
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // ORDER: relaxed, a statistic.
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

//! Groups: operations that NCCL issues together.

use super::comm::{Comm, CommInner, State};
use super::error::{NcclError, Result, ResultCode};
use super::library::Library;
use super::operations::Operations;
use std::cell::Cell;
use std::sync::{Arc, MutexGuard};

thread_local! {
    /// NCCL's groups belong to a thread, and take in all its calls.
    static OPEN: Cell<bool> = const { Cell::new(false) };
}

/// Whether the thread has a group open.
pub(crate) fn is_open() -> bool {
    OPEN.get()
}

/// Fails while the thread has a group open: the call would be deferred to its end, and may wait for a lock that the group holds.
pub(crate) fn refuse_within() -> Result<()> {
    if is_open() {
        return Err(NcclError::Usage(
            "this thread has a group open: issue the operation through the group, or end it first".to_owned(),
        ));
    }
    Ok(())
}

/// A group of operations, on one communicator or several of the thread. It holds their locks.
///
/// Operations to different peers, or in different contexts, may run at the same time and in any order; the stream passes the group when
/// all are done. A group that is dropped is ended too, and what that gives is lost: call [`end`](Self::end).
#[derive(Debug)]
pub struct Group<'a> {
    library: Library,
    members: Vec<Member<'a>>,
    ended: bool,
}

#[derive(Debug)]
struct Member<'a> {
    /// Its place among the communicators that the caller named.
    place: usize,
    comm: &'a Arc<CommInner>,
    state: MutexGuard<'a, State>,
}

impl<'a> Group<'a> {
    /// Opens a group over `comms`, all of one library.
    ///
    /// # Errors
    ///
    /// `Usage` for none, for one that is named twice, or while the thread has another group open; `Aborted`, `Call`.
    pub fn start(comms: &[&'a Comm]) -> Result<Self> {
        let first = comms.first().ok_or_else(|| NcclError::Usage("a group over no communicators".to_owned()))?;
        let library = first.library().clone();
        let mut order: Vec<usize> = (0..comms.len()).collect();
        // One global order of locks, so that threads which open groups over the same communicators do not wait for each other.
        order.sort_by_key(|&place| Arc::as_ptr(&comms[place].inner));
        if order.windows(2).any(|pair| Arc::ptr_eq(&comms[pair[0]].inner, &comms[pair[1]].inner)) {
            return Err(NcclError::Usage("a group that names a communicator twice".to_owned()));
        }
        let lock = |place: usize| {
            let comm = &comms[place].inner;
            Ok(Member { place, comm, state: comm.lock()? })
        };
        let members = order.into_iter().map(lock).collect::<Result<Vec<_>>>()?;
        // SAFETY: takes nothing; the thread has no group open, as the locks were given.
        let code = unsafe { (library.core().ncclGroupStart)() };
        library.check("ncclGroupStart", code)?;
        OPEN.set(true);
        Ok(Self { library, members, ended: false })
    }

    /// The operations of the communicator that was named at `place`.
    ///
    /// # Panics
    ///
    /// If so many were not named.
    pub fn on(&mut self, place: usize) -> Operations<'_> {
        let member =
            self.members.iter_mut().find(|m| m.place == place).expect("a place among the group's communicators");
        Operations { comm: member.comm, state: &mut member.state }
    }

    /// Issues what was gathered.
    ///
    /// # Errors
    ///
    /// The first failure of any of its operations, or `Timeout`: then some may have been issued and others not.
    pub fn end(mut self) -> Result<()> {
        self.close()
    }

    fn close(&mut self) -> Result<()> {
        const CALL: &str = "ncclGroupEnd";
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        // SAFETY: this thread opened the group: it holds guards, which keep it on the thread.
        let code = unsafe { (self.library.core().ncclGroupEnd)() };
        OPEN.set(false);
        let mut outcome = Ok(());
        if code == ResultCode::IN_PROGRESS.0 {
            for member in &mut self.members {
                outcome = outcome.and(member.comm.settle(&mut member.state, CALL, code));
            }
        } else {
            outcome = self.library.check(CALL, code);
        }
        for member in &mut self.members {
            member.comm.reap(&mut member.state);
        }
        outcome
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        let _ = self.close();
    }
}

impl Comm {
    /// Opens a group over this communicator; `group.on(0)` has its operations.
    ///
    /// # Errors
    ///
    /// As [`Group::start`].
    pub fn group(&self) -> Result<Group<'_>> {
        Group::start(&[self])
    }
}

//! What the host knows of a stream: how much was put in, how much of it is known to be over, and which memory waits may
//! still be pending. Pure bookkeeping, over any kind of event.

use crate::gpu::MemoryWait;
use std::collections::VecDeque;
use std::time::Instant;

/// A point in a stream, known by an event of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark<E> {
    /// The driver's event.
    pub event: E,
    /// The caller's number for it; `None` for a mark of our own.
    pub id: Option<u64>,
    /// Operations enqueued up to it.
    at: u64,
}

/// A memory wait that is not known to be over.
#[derive(Debug, Clone, Copy)]
pub struct PendingWait {
    /// Place in the order in which the process enqueued all its waits.
    pub sequence: u64,
    /// The wait.
    pub wait: MemoryWait,
    /// When it was enqueued.
    pub since: Instant,
    at: u64,
}

/// The account of one stream. Operations of a stream complete in order.
#[derive(Debug)]
pub struct Ledger<E> {
    enqueued: u64,
    done: u64,
    marks: VecDeque<Mark<E>>,
    waits: VecDeque<PendingWait>,
}

impl<E> Default for Ledger<E> {
    fn default() -> Self {
        Self { enqueued: 0, done: 0, marks: VecDeque::new(), waits: VecDeque::new() }
    }
}

impl<E: Copy> Ledger<E> {
    /// One more operation.
    pub fn enqueue(&mut self) {
        self.enqueued += 1;
    }

    /// One more operation, a wait.
    pub fn enqueue_wait(&mut self, sequence: u64, wait: MemoryWait, now: Instant) {
        self.enqueue();
        self.waits.push_back(PendingWait { sequence, wait, since: now, at: self.enqueued });
    }

    /// An event was recorded behind all so far.
    pub fn mark(&mut self, event: E, id: Option<u64>) {
        self.enqueue();
        self.marks.push_back(Mark { event, id, at: self.enqueued });
    }

    /// Operations since the last mark, or since the stream was known to be empty.
    pub fn unmarked(&self) -> u64 {
        self.enqueued - self.marks.back().map_or(self.done, |m| m.at)
    }

    /// Operations not known to be over.
    pub fn in_flight(&self) -> u64 {
        self.enqueued - self.done
    }

    /// Whether a mark is not known to have completed.
    pub fn has_mark(&self) -> bool {
        !self.marks.is_empty()
    }

    /// Takes off the marks that `is_complete` says have completed, oldest first, up to the first that has not.
    ///
    /// # Errors
    /// As `is_complete`; what was taken off before is in `completed`.
    pub fn sweep<X>(
        &mut self,
        completed: &mut Vec<Mark<E>>,
        mut is_complete: impl FnMut(E) -> Result<bool, X>,
    ) -> Result<(), X> {
        while let Some(mark) = self.marks.front().copied() {
            if !is_complete(mark.event)? {
                break;
            }
            self.marks.pop_front();
            self.settle(mark.at);
            completed.push(mark);
        }
        Ok(())
    }

    /// The stream is empty: takes off everything.
    pub fn settle_all(&mut self, completed: &mut Vec<Mark<E>>) {
        completed.extend(self.marks.drain(..));
        self.settle(self.enqueued);
    }

    fn settle(&mut self, at: u64) {
        self.done = at;
        while self.waits.front().is_some_and(|w| w.at <= at) {
            self.waits.pop_front();
        }
    }

    /// The waits not known to be over, oldest first.
    pub fn pending_waits(&self) -> impl Iterator<Item = &PendingWait> {
        self.waits.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::DevicePtr;
    use bytemuck::Zeroable;
    use tide_device::abi::fault::WaitTag;

    fn wait(address: u64) -> MemoryWait {
        MemoryWait { address: DevicePtr(address), value: 1, timeout_ns: 1, tag: WaitTag::zeroed() }
    }

    fn pending(ledger: &Ledger<u32>) -> Vec<u64> {
        ledger.pending_waits().map(|w| w.wait.address.0).collect()
    }

    fn sweep(ledger: &mut Ledger<u32>, complete: &[u32]) -> Vec<u32> {
        let mut completed = Vec::new();
        ledger.sweep(&mut completed, |e| Ok::<_, ()>(complete.contains(&e))).unwrap();
        completed.iter().map(|m| m.event).collect()
    }

    #[test]
    fn a_completed_mark_settles_all_before_it() {
        let mut ledger = Ledger::default();
        let now = Instant::now();
        ledger.enqueue_wait(0, wait(8), now);
        ledger.enqueue();
        ledger.mark(1, Some(7));
        ledger.enqueue_wait(1, wait(16), now);
        ledger.mark(2, None);
        assert_eq!((ledger.in_flight(), ledger.unmarked()), (5, 0));
        assert!(sweep(&mut ledger, &[]).is_empty());
        assert_eq!(pending(&ledger), [8, 16]);
        assert_eq!(sweep(&mut ledger, &[1]), [1]);
        assert_eq!((ledger.in_flight(), pending(&ledger)), (2, vec![16]));
        assert_eq!(sweep(&mut ledger, &[2]), [2]);
        assert_eq!((ledger.in_flight(), pending(&ledger)), (0, vec![]));
    }

    #[test]
    fn marks_complete_in_order_only() {
        let mut ledger = Ledger::default();
        ledger.mark(1, None);
        ledger.mark(2, None);
        assert!(sweep(&mut ledger, &[2]).is_empty());
        assert_eq!(sweep(&mut ledger, &[1, 2]), [1, 2]);
    }

    #[test]
    fn an_empty_stream_has_nothing_pending() {
        let mut ledger = Ledger::default();
        ledger.mark(1, Some(3));
        ledger.enqueue_wait(0, wait(8), Instant::now());
        assert_eq!(ledger.unmarked(), 1);
        let mut completed = Vec::new();
        ledger.settle_all(&mut completed);
        assert_eq!(completed.len(), 1);
        assert_eq!((ledger.in_flight(), ledger.unmarked(), pending(&ledger)), (0, 0, vec![]));
    }

    #[test]
    fn a_failed_query_keeps_what_it_was_about() {
        let mut ledger = Ledger::default();
        ledger.mark(1, None);
        let mut completed = Vec::new();
        assert_eq!(ledger.sweep(&mut completed, |_| Err("lost")), Err("lost"));
        assert_eq!(ledger.in_flight(), 1);
    }
}

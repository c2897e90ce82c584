//! A context: operations by target, their order, and the requests that stand for them.
//!
//! Each pair of a context's index and a target rank is a queue. Copies start at once. The oldest operation of a queue alone is looked
//! at: when its copy is done its signal is added, and when that is done it leaves the queue. So a signal is added after the data
//! of its own put and of all earlier ones of the queue, be it asked to be strong or not, and requests of a queue end in order.
//!
//! A signal is read, added to and written back, which takes several steps. [`take_word`](crate::world::World::take_word) keeps two
//! contexts of the process from doing so to one word at a time. The word is read anew each time instead of being remembered: the GPU resets its own.

use crate::fault::{Fault, Result};
use crate::mover::{Mover, Place};
use crate::world::{Counted, WordGuard};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long a context that is destroyed waits for what is under way.
const DRAIN: Duration = Duration::from_secs(5);

/// A copy to carry out.
#[derive(Debug, Clone, Copy)]
pub struct Copy {
    /// Target.
    pub to: Place,
    /// Source.
    pub from: Place,
    /// Size.
    pub bytes: usize,
}

/// A signal to give afterwards.
#[derive(Debug, Clone, Copy)]
pub struct Signal {
    /// The 64-bit word.
    pub word: Place,
    /// What to add.
    pub value: u64,
}

struct Operation<M: Mover> {
    request: u32,
    copy: Option<M::Ticket>,
    signal: Option<Signal>,
    adding: Option<(M::Ticket, WordGuard)>,
}

#[derive(Debug)]
enum Slot {
    Free,
    Pending(Counted),
    Done { _alive: Counted },
}

/// A context.
pub struct Context<M: Mover> {
    // Before the lane: what is under way belongs to it.
    queues: Vec<VecDeque<Operation<M>>>,
    lane: M,
    slots: Vec<Slot>,
    free: Vec<u32>,
    ranks: usize,
    fault: Option<Fault>,
}

impl<M: Mover> Context<M> {
    /// `contexts` of them towards `ranks` ranks.
    ///
    /// # Errors
    /// As [`Mover::open`].
    pub fn new(contexts: usize, ranks: usize) -> Result<Self> {
        let queues = contexts * ranks;
        let lane = M::open(queues)?;
        Ok(Self {
            queues: (0..queues).map(|_| VecDeque::new()).collect(),
            lane,
            slots: Vec::new(),
            free: Vec::new(),
            ranks,
            fault: None,
        })
    }

    fn queue(&self, index: usize, rank: usize) -> Result<usize> {
        if rank >= self.ranks || index >= self.queues.len() / self.ranks {
            return Err(Fault::argument(format!(
                "context {index} of {} to rank {rank} of {}",
                self.queues.len() / self.ranks,
                self.ranks
            )));
        }
        Ok(index * self.ranks + rank)
    }

    /// Whether something has failed.
    pub fn fault(&self) -> Option<&Fault> {
        self.fault.as_ref()
    }

    fn sound(&self) -> Result<()> {
        self.fault.clone().map_or(Ok(()), Err)
    }

    fn fail<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(fault) = &result {
            self.fault.get_or_insert_with(|| fault.clone());
        }
        result
    }

    /// Starts an operation, and gives the number of its request.
    ///
    /// # Errors
    /// As [`Mover::copy`], and if something has failed before.
    pub fn start(&mut self, index: usize, rank: usize, copy: Option<Copy>, signal: Option<Signal>) -> Result<u32> {
        self.sound()?;
        let queue = self.queue(index, rank)?;
        // NCCL flushes by putting a word onto itself.
        let copy = match copy.filter(|copy| copy.bytes > 0 && copy.to != copy.from) {
            Some(copy) => {
                let started = self.lane.copy(copy.to, copy.from, copy.bytes);
                Some(self.fail(started)?)
            }
            None => None,
        };
        let request = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::Free);
            self.slots.len() as u32 - 1
        });
        self.slots[request as usize] = Slot::Pending(Counted::new(&M::world().alive.requests));
        self.queues[queue].push_back(Operation { request, copy, signal, adding: None });
        Ok(request)
    }

    /// Drives what is under way, and says whether the request is done. It is gone then.
    ///
    /// # Errors
    /// As [`Mover::poll`], and if there is no such request.
    pub fn test(&mut self, request: u32) -> Result<bool> {
        self.progress()?;
        match self.slots.get_mut(request as usize) {
            Some(Slot::Pending(_)) => Ok(false),
            Some(slot @ Slot::Done { .. }) => {
                *slot = Slot::Free;
                self.free.push(request);
                Ok(true)
            }
            _ => Err(Fault::argument(format!("there is no request {request}"))),
        }
    }

    /// Drives what is under way.
    ///
    /// # Errors
    /// As [`Mover::poll`].
    pub fn progress(&mut self) -> Result<()> {
        self.sound()?;
        for queue in 0..self.queues.len() {
            let result = self.advance(queue);
            self.fail(result)?;
        }
        Ok(())
    }

    fn advance(&mut self, queue: usize) -> Result<()> {
        while let Some(oldest) = self.queues[queue].front_mut() {
            if let Some(ticket) = &mut oldest.copy {
                if !self.lane.poll(ticket)? {
                    return Ok(());
                }
                oldest.copy = None;
            }
            if let Some(Signal { word, value }) = oldest.signal {
                let Some(guard) = M::world().take_word(word.address) else { return Ok(()) };
                oldest.adding = Some((self.lane.add(word, value)?, guard));
                oldest.signal = None;
            }
            if let Some((ticket, _)) = &mut oldest.adding {
                if !self.lane.poll(ticket)? {
                    return Ok(());
                }
                oldest.adding = None;
            }
            let request = oldest.request as usize;
            if let Slot::Pending(alive) = std::mem::replace(&mut self.slots[request], Slot::Free) {
                self.slots[request] = Slot::Done { _alive: alive };
            }
            self.queues[queue].pop_front();
        }
        Ok(())
    }

    /// Waits a while for what is under way.
    ///
    /// # Errors
    /// If it failed, or was not done by then.
    pub fn drain(&mut self) -> Result<()> {
        let end = Instant::now() + DRAIN;
        loop {
            self.progress()?;
            let left: usize = self.queues.iter().map(VecDeque::len).sum();
            if left == 0 {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(Fault::system(format!(
                    "{left} operations were not done {DRAIN:?} after the context's end"
                )));
            }
            std::thread::yield_now();
        }
    }
}

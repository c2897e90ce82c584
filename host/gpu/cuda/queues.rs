//! The streams and events of a process.
//!
//! Everything here is called with the lock of [`Queues`] held and returns at once: no call waits for a device.

use super::device::{Device, driver_error};
use super::driver::Driver;
use super::ledger::{Ledger, Mark, PendingWait};
use crate::error::Result;
use crate::gpu::{Event, MemoryWait, Priority, Stream};
use cudarc::driver::sys;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_uint;
use std::time::Instant;

/// Operations of a stream after which the host marks it itself, if its caller records no event.
const UNMARKED_MAX: u64 = 16;

struct Queue {
    handle: sys::CUstream,
    device: u32,
    ledger: Ledger<sys::CUevent>,
    /// Given up by its owner; destroyed once it is empty.
    is_retired: bool,
}

/// Where a stream is enqueued.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The driver's handle.
    pub handle: sys::CUstream,
    /// Index of its device.
    pub device: u32,
}

/// All streams and events.
pub struct Queues {
    driver: Driver,
    queues: BTreeMap<u32, Queue>,
    next_stream: u32,
    /// Events that are not known to have completed. What is not here has.
    events: HashMap<u64, sys::CUevent>,
    next_event: u64,
    /// Per device: events to be recorded again.
    spare_events: Vec<Vec<sys::CUevent>>,
    /// Per device: operations not known to be over.
    in_flight: Vec<u64>,
    wait_count: u64,
    /// When anything was last seen to complete.
    moved: Instant,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Queues {}

impl Queues {
    /// No streams, on so many devices.
    pub fn new(driver: Driver, device_count: usize) -> Self {
        Self {
            driver,
            queues: BTreeMap::new(),
            next_stream: 0,
            events: HashMap::new(),
            next_event: 0,
            spare_events: vec![Vec::new(); device_count],
            in_flight: vec![0; device_count],
            wait_count: 0,
            moved: Instant::now(),
        }
    }

    /// A new stream of a device whose context is current.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn create(&mut self, index: u32, device: &Device, priority: Priority) -> Result<Stream> {
        let handle = device.new_stream(priority)?;
        let stream = self.next_stream;
        self.next_stream += 1;
        self.queues.insert(stream, Queue { handle, device: index, ledger: Ledger::default(), is_retired: false });
        Ok(Stream(stream))
    }

    /// Gives a stream up.
    pub fn retire(&mut self, stream: Stream) {
        if let Some(queue) = self.queues.get_mut(&stream.0) {
            queue.is_retired = true;
        }
    }

    /// Where a stream is enqueued.
    ///
    /// # Errors
    /// [`crate::TideError::Driver`] for a stream that was given up.
    pub fn target(&self, stream: Stream) -> Result<Target> {
        match self.queues.get(&stream.0) {
            Some(queue) if !queue.is_retired => Ok(Target { handle: queue.handle, device: queue.device }),
            _ => Err(driver_error("stream", format!("stream {} was given up", stream.0))),
        }
    }

    /// Operations of a device not known to be over.
    pub fn in_flight(&self, device: u32) -> u64 {
        self.in_flight[device as usize]
    }

    /// When anything was last seen to complete.
    pub fn moved(&self) -> Instant {
        self.moved
    }

    /// An operation was enqueued; its device's context is current.
    ///
    /// # Errors
    /// What the driver refuses, of the mark that a stream without events gets now and then.
    pub fn enqueued(&mut self, stream: Stream) -> Result<()> {
        let Some(queue) = self.queues.get_mut(&stream.0) else { return Ok(()) };
        queue.ledger.enqueue();
        let (device, unmarked) = (queue.device, queue.ledger.unmarked());
        self.in_flight[device as usize] += 1;
        self.mark_if_due(stream, unmarked)
    }

    /// A wait was enqueued.
    ///
    /// # Errors
    /// As [`Queues::enqueued`].
    pub fn enqueued_wait(&mut self, stream: Stream, wait: &MemoryWait) -> Result<()> {
        self.wait_count += 1;
        let Some(queue) = self.queues.get_mut(&stream.0) else { return Ok(()) };
        queue.ledger.enqueue_wait(self.wait_count, *wait, Instant::now());
        let (device, unmarked) = (queue.device, queue.ledger.unmarked());
        self.in_flight[device as usize] += 1;
        self.mark_if_due(stream, unmarked)
    }

    fn mark_if_due(&mut self, stream: Stream, unmarked: u64) -> Result<()> {
        if unmarked < UNMARKED_MAX {
            return Ok(());
        }
        self.mark(stream, None)
    }

    /// Records an event of the caller.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn record(&mut self, stream: Stream) -> Result<Event> {
        let id = self.next_event + 1;
        self.mark(stream, Some(id))?;
        self.next_event = id;
        Ok(Event(id))
    }

    fn mark(&mut self, stream: Stream, id: Option<u64>) -> Result<()> {
        // What has completed meanwhile gives its event back: thousands of calls use no more than are in flight.
        self.sweep(stream)?;
        let target = self.target(stream)?;
        let event = match self.spare_events[target.device as usize].pop() {
            Some(event) => event,
            None => self.new_event()?,
        };
        // SAFETY: event and stream are of the device whose context is current.
        if let Err(error) = unsafe { self.driver.cuEventRecord(event, target.handle) }.ok() {
            self.spare_events[target.device as usize].push(event);
            return Err(error);
        }
        if let Some(queue) = self.queues.get_mut(&stream.0) {
            queue.ledger.mark(event, id);
        }
        self.in_flight[target.device as usize] += 1;
        if let Some(id) = id {
            self.events.insert(id, event);
        }
        Ok(())
    }

    fn new_event(&self) -> Result<sys::CUevent> {
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        // SAFETY: `event` outlives the call; a context is current.
        unsafe { self.driver.cuEventCreate(&mut event, flags) }.ok()?;
        Ok(event)
    }

    /// The driver's event; `None` if it has completed.
    ///
    /// # Errors
    /// [`crate::TideError::Driver`] for an event that was never recorded.
    pub fn event(&self, event: Event) -> Result<Option<sys::CUevent>> {
        if event.0 == 0 || event.0 > self.next_event {
            return Err(driver_error("event", format!("event {} was never recorded", event.0)));
        }
        Ok(self.events.get(&event.0).copied())
    }

    /// Whether an event has completed.
    ///
    /// # Errors
    /// What the driver says of work that failed.
    pub fn is_complete(&self, event: Event) -> Result<bool> {
        match self.event(event)? {
            // SAFETY: a live event.
            Some(handle) => unsafe { self.driver.cuEventQuery(handle) }.ready(),
            None => Ok(true),
        }
    }

    /// Whether a stream is empty.
    ///
    /// # Errors
    /// What the driver says of work that failed.
    pub fn is_empty(&mut self, stream: Stream) -> Result<bool> {
        let Some(queue) = self.queues.get_mut(&stream.0) else { return Ok(true) };
        // SAFETY: a live stream.
        if !unsafe { self.driver.cuStreamQuery(queue.handle) }.ready()? {
            return Ok(false);
        }
        let (device, before, mut completed) = (queue.device, queue.ledger.in_flight(), Vec::new());
        queue.ledger.settle_all(&mut completed);
        self.account(device, before, completed);
        Ok(true)
    }

    /// Looks what has completed in a stream.
    fn sweep(&mut self, stream: Stream) -> Result<()> {
        let Some(queue) = self.queues.get_mut(&stream.0) else { return Ok(()) };
        let (driver, device, before, mut completed) = (self.driver, queue.device, queue.ledger.in_flight(), Vec::new());
        // SAFETY: marks hold live events.
        let swept = queue.ledger.sweep(&mut completed, |event| unsafe { driver.cuEventQuery(event) }.ready());
        let settled = before - queue.ledger.in_flight();
        self.account(device, settled, completed);
        swept
    }

    fn account(&mut self, device: u32, settled: u64, completed: Vec<Mark<sys::CUevent>>) {
        if settled > 0 {
            self.in_flight[device as usize] -= settled;
            self.moved = Instant::now();
        }
        for mark in completed {
            if let Some(id) = mark.id {
                self.events.remove(&id);
            }
            self.spare_events[device as usize].push(mark.event);
        }
    }

    /// Looks what has completed in all streams; destroys the retired ones that are empty.
    ///
    /// # Errors
    /// What the driver says of work that failed.
    pub fn sweep_all(&mut self) -> Result<()> {
        let streams: Vec<Stream> = self.queues.keys().map(|id| Stream(*id)).collect();
        for stream in streams {
            self.sweep(stream)?;
            let Some(queue) = self.queues.get(&stream.0) else { continue };
            let is_retired = queue.is_retired;
            // Behind the last mark only the stream itself tells.
            let is_empty = queue.ledger.in_flight() == 0 || (!queue.ledger.has_mark() && self.is_empty(stream)?);
            if is_empty
                && is_retired
                && let Some(queue) = self.queues.remove(&stream.0)
            {
                // SAFETY: its owner gave it up, and it is no longer in the table.
                unsafe { self.driver.cuStreamDestroy_v2(queue.handle) }.ok()?;
            }
        }
        Ok(())
    }

    /// Whether nothing is in flight anywhere.
    ///
    /// # Errors
    /// What the driver says of work that failed.
    pub fn is_idle(&mut self) -> Result<bool> {
        let busy: Vec<u32> = self.queues.iter().filter(|(_, q)| q.ledger.in_flight() > 0).map(|(id, _)| *id).collect();
        for id in busy {
            if !self.is_empty(Stream(id))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The waits of all streams that are not known to be over, in the order in which they were enqueued. A wait's producer
    /// is enqueued before it, so the first whose word does not hold is the one that all others hang on.
    pub fn pending_waits(&self) -> Vec<(Stream, PendingWait)> {
        let of = |(id, queue): (&u32, &Queue)| -> Vec<(Stream, PendingWait)> {
            queue.ledger.pending_waits().map(|wait| (Stream(*id), *wait)).collect()
        };
        let mut waits: Vec<(Stream, PendingWait)> = self.queues.iter().flat_map(of).collect();
        waits.sort_by_key(|(_, wait)| wait.sequence);
        waits
    }

    /// Operations of a stream not known to be over: a stream that moves changes it.
    pub fn in_flight_of(&self, stream: Stream) -> u64 {
        self.queues.get(&stream.0).map_or(0, |q| q.ledger.in_flight())
    }

    /// Destroys everything. Only when nothing is in flight.
    pub fn destroy_all(&mut self) {
        for queue in std::mem::take(&mut self.queues).into_values() {
            // SAFETY: no longer in the table; a failure here is of no use to anybody.
            let _ = unsafe { self.driver.cuStreamDestroy_v2(queue.handle) };
        }
        for event in self.spare_events.iter_mut().flat_map(std::mem::take) {
            // SAFETY: recorded in no stream any more.
            let _ = unsafe { self.driver.cuEventDestroy_v2(event) };
        }
    }
}

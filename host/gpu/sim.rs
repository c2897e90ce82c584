//! The simulated GPUs: streams, events and copies over the simulated machine of `tide_device::arch::sim`.
//!
//! Everything that can go on (streams, threads of kernels, bulk copies) is one pool, from which a seed draws the next step. A
//! copy takes several steps; a stream goes on at any time, also while the host still enqueues. The same seed gives the same
//! run. Nothing runs outside a call of the host.

use super::{
    Copy2d, DeviceProperties, DevicePtr, Event, Fill2d, Gpu, KernelShape, Launch, MemoryWait, Priority, Stream,
    SyncOutcome,
};
use crate::error::{Result, TideError};
use crate::monitor::Fault;
use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use tide_device::abi::kernel::{Kernel, ModuleKind};
use tide_device::abi::signal::reached;
use tide_device::arch::machine::Machine;
use tide_device::arch::sim::Sim;
use tide_device::arch::sim::memory::Memory;
use tide_device::arch::sim::sched::{LATEST_NS, LaunchId, MachineOptions, Scheduler};

/// How the simulated GPUs behave.
#[derive(Debug, Clone)]
pub struct SimOptions {
    /// The machine under them: devices, seed, faults.
    pub machine: MachineOptions,
    /// Whether memory can be bound behind a multicast address.
    pub multicast: bool,
    /// Hardware queues that streams share, in the order of their creation; `None` gives each its own.
    pub hardware_queues: Option<u32>,
    /// Most steps that the devices take after each operation that the host enqueues.
    pub eager_steps_max: u32,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self { machine: MachineOptions::default(), multicast: true, hardware_queues: None, eager_steps_max: 8 }
    }
}

enum Op {
    Copy {
        copy: Copy2d,
        rows_done: u64,
    },
    Fill(Fill2d),
    Write {
        address: u64,
        value: u64,
    },
    /// `expired_ns` is how long it had waited when its time ran out.
    WaitValue {
        wait: MemoryWait,
        since_ns: Option<u64>,
        expired_ns: Option<u64>,
    },
    Record(u64),
    WaitEvent(u64),
    Launch {
        kernel: Kernel,
        grid: u32,
        block: u32,
        shared_bytes: u32,
        params: Vec<u8>,
        running: Option<LaunchId>,
    },
}

/// An operation and its place in its hardware queue; `None` once it has left it.
struct Queued {
    op: Op,
    ticket: Option<u64>,
}

struct StreamState {
    device: u32,
    hardware_queue: usize,
    ops: VecDeque<Queued>,
    lazy_turns: u32,
    /// In the list of streams that may go on.
    pollable: bool,
}

/// What a stream did when it was given a turn.
enum Turn {
    /// It did something, and may do more.
    Moved,
    /// It waits.
    Blocked,
}

struct Inner {
    scheduler: Scheduler,
    streams: Vec<StreamState>,
    pollable: Vec<u32>,
    blocked: Vec<u32>,
    hardware_queues: Vec<VecDeque<u64>>,
    next_ticket: u64,
    /// Events that have not completed.
    events: HashSet<u64>,
    next_event: u64,
    /// Grows with every event and launch that completes.
    completions: u64,
    seen: (u64, u64),
    launches: Vec<LaunchId>,
    error: Option<String>,
    eager_steps_max: u32,
}

/// The simulated GPUs.
pub struct SimGpu {
    inner: Mutex<Inner>,
    properties: Vec<DeviceProperties>,
}

impl SimGpu {
    /// Simulated GPUs.
    pub fn new(options: SimOptions) -> Arc<Self> {
        let count = options.machine.device_count;
        let shape = KernelShape {
            warp_size: Sim::WARP_SIZE,
            sum_consumers: 4 * Sim::WARP_SIZE,
            sum_shared_bytes: 6 << 10,
            plain_threads: 4 * Sim::WARP_SIZE,
            bounce_bytes: 16 << 10,
        };
        let properties = DeviceProperties {
            name: "simulated GPU".to_owned(),
            multiprocessor_count: 4,
            shared_bytes_max: 256 << 10,
            multicast: options.multicast,
            shape,
        };
        let inner = Inner {
            scheduler: Scheduler::new(options.machine),
            streams: Vec::new(),
            pollable: Vec::new(),
            blocked: Vec::new(),
            hardware_queues: vec![VecDeque::new(); options.hardware_queues.unwrap_or(0) as usize],
            next_ticket: 0,
            events: HashSet::new(),
            next_event: 0,
            completions: 0,
            seen: (0, 0),
            launches: Vec::new(),
            error: None,
            eager_steps_max: options.eager_steps_max,
        };
        Arc::new(Self { inner: Mutex::new(inner), properties: vec![properties; count as usize] })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Virtual time, ns.
    pub fn now_ns(&self) -> u64 {
        self.lock().scheduler.now_ns()
    }

    fn enqueue(&self, stream: Stream, op: Op) -> Result<()> {
        let mut inner = self.lock();
        inner.check()?;
        inner.push(stream.0, op);
        let steps = match inner.eager_steps_max {
            0 => 0,
            most => inner.scheduler.rng().u32(0..=most),
        };
        for _ in 0..steps {
            if !inner.step() {
                break;
            }
        }
        inner.check()
    }
}

fn driver_error(call: &str, detail: impl Into<String>) -> TideError {
    TideError::Driver { call: call.to_owned(), detail: detail.into() }
}

impl Inner {
    fn check(&self) -> Result<()> {
        match self.error.as_deref().or(self.scheduler.error()) {
            Some(text) => Err(driver_error("simulated device", text)),
            None => Ok(()),
        }
    }

    fn fail(&mut self, text: String) {
        self.error.get_or_insert(text);
    }

    fn push(&mut self, stream: u32, op: Op) {
        let queue = self.streams[stream as usize].hardware_queue;
        let ticket = self.hardware_queues.get_mut(queue).map(|queue| {
            self.next_ticket += 1;
            queue.push_back(self.next_ticket);
            self.next_ticket
        });
        let state = &mut self.streams[stream as usize];
        state.ops.push_back(Queued { op, ticket });
        if state.ops.len() == 1 && !state.pollable {
            state.pollable = true;
            self.pollable.push(stream);
        }
    }

    /// One step of anything; false if nothing can go on.
    fn step(&mut self) -> bool {
        self.unblock();
        let ready = self.scheduler.ready_count();
        let total = ready + self.pollable.len();
        if total == 0 {
            return false;
        }
        self.scheduler.tick();
        let choice = self.scheduler.rng().usize(0..total);
        if choice < ready {
            self.scheduler.step(choice);
            self.reap_launches();
        } else {
            self.turn(choice - ready);
        }
        true
    }

    /// Lets blocked streams look again if anything they may wait for has changed.
    fn unblock(&mut self) {
        let now = (self.scheduler.signal_version(), self.completions);
        if now != self.seen {
            self.seen = now;
            for stream in self.blocked.drain(..) {
                self.streams[stream as usize].pollable = true;
                self.pollable.push(stream);
            }
        }
    }

    fn reap_launches(&mut self) {
        let scheduler = &self.scheduler;
        let before = self.launches.len();
        self.launches.retain(|id| !scheduler.is_done(*id));
        self.completions += (before - self.launches.len()) as u64;
    }

    fn turn(&mut self, index: usize) {
        let stream = self.pollable[index];
        if self.scheduler.passes(self.streams[stream as usize].lazy_turns) {
            return;
        }
        let leave = match self.advance(stream) {
            Turn::Moved => self.streams[stream as usize].ops.is_empty(),
            Turn::Blocked => {
                self.blocked.push(stream);
                true
            }
        };
        if leave {
            self.streams[stream as usize].pollable = false;
            self.pollable.swap_remove(index);
        }
    }

    /// Advances the operation at the head of a stream.
    fn advance(&mut self, stream: u32) -> Turn {
        let (device, queue) = {
            let state = &self.streams[stream as usize];
            (state.device, state.hardware_queue)
        };
        let Some(mut head) = self.streams[stream as usize].ops.pop_front() else { return Turn::Moved };
        if let Some(ticket) = head.ticket
            && self.hardware_queues[queue].front() != Some(&ticket)
        {
            self.streams[stream as usize].ops.push_front(head);
            return Turn::Blocked;
        }
        let (turn, done) = match &mut head.op {
            Op::Copy { copy, rows_done } => (Turn::Moved, self.copy_some(copy, rows_done)),
            Op::Fill(fill) => {
                self.fill_all(fill);
                (Turn::Moved, true)
            }
            Op::Write { address, value } => {
                self.write_word(*address, *value);
                (Turn::Moved, true)
            }
            Op::WaitValue { wait, since_ns, .. } => {
                since_ns.get_or_insert(self.scheduler.now_ns());
                match self.read_word(wait.address.0) {
                    Some(seen) if reached(seen, wait.value) => (Turn::Moved, true),
                    _ => (Turn::Blocked, false),
                }
            }
            Op::Record(event) => {
                self.events.remove(event);
                self.completions += 1;
                (Turn::Moved, true)
            }
            Op::WaitEvent(event) if self.events.contains(event) => (Turn::Blocked, false),
            Op::WaitEvent(_) => (Turn::Moved, true),
            Op::Launch { kernel, grid, block, shared_bytes, params, running } => match running {
                Some(id) if self.scheduler.is_done(*id) => (Turn::Moved, true),
                Some(_) => (Turn::Blocked, false),
                None => {
                    // SAFETY: whoever enqueued the launch promised it.
                    let id = unsafe { self.scheduler.launch(*kernel, params, device, *grid, *block, *shared_bytes) };
                    *running = Some(id);
                    self.launches.push(id);
                    (Turn::Moved, false)
                }
            },
        };
        // What has started leaves the hardware queue; a wait holds it until it is over.
        let started = matches!(turn, Turn::Moved);
        if started && head.ticket.take().is_some() {
            self.hardware_queues[queue].pop_front();
            self.completions += 1;
        }
        if !done {
            self.streams[stream as usize].ops.push_front(head);
        }
        turn
    }

    /// Every address behind `address`: itself, or a multicast address's replicas; `None` if it is not valid.
    fn places(&mut self, address: u64, bytes: u64) -> Option<Vec<u64>> {
        let memory = self.scheduler.memory_mut();
        if Memory::is_multicast(address) {
            return Some(memory.replicas(address, bytes)?.collect());
        }
        memory.is_valid(address, bytes).then(|| vec![address])
    }

    /// Copies some rows; true once all are.
    fn copy_some(&mut self, copy: &Copy2d, rows_done: &mut u64) -> bool {
        let left = copy.rows - *rows_done;
        if left == 0 || copy.width_bytes == 0 {
            return true;
        }
        let rows = self.scheduler.rng().u64(1..=left);
        for row in *rows_done..*rows_done + rows {
            let source = copy.source.0 + row * copy.source_pitch_bytes;
            let destination = copy.destination.0 + row * copy.destination_pitch_bytes;
            let source_valid = self.scheduler.memory().is_valid(source, copy.width_bytes);
            let (Some(places), true) = (self.places(destination, copy.width_bytes), source_valid) else {
                let memory = self.scheduler.memory();
                let from = memory.describe(source, copy.width_bytes);
                let to = memory.describe(destination, copy.width_bytes);
                self.fail(format!("illegal address in row {row} of a copy: from {from}, to {to}"));
                return true;
            };
            for place in places {
                // SAFETY: both ranges are in live allocations, as just checked.
                unsafe { std::ptr::copy(source as *const u8, place as *mut u8, copy.width_bytes as usize) };
            }
        }
        *rows_done += rows;
        *rows_done == copy.rows
    }

    fn fill_all(&mut self, fill: &Fill2d) {
        for row in 0..fill.rows {
            let address = fill.destination.0 + row * fill.pitch_bytes;
            let Some(places) = self.places(address, fill.width_bytes) else {
                let place = self.scheduler.memory().describe(address, fill.width_bytes);
                return self.fail(format!("illegal address in row {row} of a fill: {place}"));
            };
            for place in places {
                // SAFETY: in a live allocation, as just checked.
                unsafe { (place as *mut u8).write_bytes(fill.value, fill.width_bytes as usize) };
            }
        }
    }

    fn write_word(&mut self, address: u64, value: u64) {
        if self.scheduler.loses_signal() {
            return;
        }
        if !self.scheduler.memory().is_valid(address, 8) || !address.is_multiple_of(8) {
            let place = self.scheduler.memory().describe(address, 8);
            return self.fail(format!("illegal address in a memory write: {place}"));
        }
        // SAFETY: in a live allocation and aligned, as just checked.
        unsafe { *(address as *mut u64) = value };
        self.scheduler.signal_written();
    }

    fn read_word(&mut self, address: u64) -> Option<u64> {
        if !self.scheduler.memory().is_valid(address, 8) || !address.is_multiple_of(8) {
            let place = self.scheduler.memory().describe(address, 8);
            self.fail(format!("illegal address in a memory wait: {place}"));
            return None;
        }
        // SAFETY: in a live allocation and aligned, as just checked.
        Some(unsafe { *(address as *const u64) })
    }

    /// The earliest deadline of a memory wait at the head of a stream, and the stream.
    fn stream_deadline(&self) -> Option<(u64, usize)> {
        let deadline = |s: &StreamState| match &s.ops.front()?.op {
            Op::WaitValue { wait, since_ns: Some(since), expired_ns: None } => {
                Some(since.saturating_add(wait.timeout_ns)).filter(|at| *at <= LATEST_NS)
            }
            _ => None,
        };
        self.streams.iter().enumerate().filter_map(|(i, s)| Some((deadline(s)?, i))).min()
    }

    /// Nothing can go on: jumps to the next deadline, and gives a memory wait up whose deadline it is. False if nothing has a
    /// deadline any more.
    fn jump(&mut self) -> bool {
        let stream = self.stream_deadline();
        let thread = self.scheduler.next_deadline_ns();
        match (stream, thread) {
            (_, Some(at)) if stream.is_none_or(|s| at <= s.0) => self.scheduler.advance_to(at),
            (Some((at, index)), _) => {
                self.scheduler.advance_to(at);
                self.expire(index);
            }
            (None, _) => return false,
        }
        true
    }

    /// Gives the memory wait at the head of a stream up. It goes on waiting, as the hardware's would.
    fn expire(&mut self, stream: usize) {
        let now = self.scheduler.now_ns();
        if let Some(Queued { op: Op::WaitValue { since_ns: Some(since), expired_ns, .. }, .. }) =
            self.streams[stream].ops.front_mut()
        {
            *expired_ns = Some(now - *since);
        }
    }

    /// Nothing can go on, and nothing has a deadline any more: the memory waits that streams hang on, also those without end.
    fn open_waits(&mut self) -> Vec<(Stream, Fault)> {
        let now = self.scheduler.now_ns();
        let mut faults = Vec::new();
        for index in 0..self.streams.len() {
            let Some(Queued { op: Op::WaitValue { wait, since_ns: Some(since), expired_ns }, .. }) =
                self.streams[index].ops.front()
            else {
                continue;
            };
            let (wait, waited_ns) = (*wait, expired_ns.unwrap_or(now - since));
            let seen = self.read_word(wait.address.0);
            faults.push((Stream(index as u32), Fault::new(&wait.tag, 0, wait.value, seen, waited_ns)));
        }
        faults
    }
}

impl Gpu for SimGpu {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn device_count(&self) -> u32 {
        self.properties.len() as u32
    }

    fn properties(&self, device: u32) -> &DeviceProperties {
        &self.properties[device as usize]
    }

    fn allocate(&self, device: u32, bytes: u64) -> Result<DevicePtr> {
        let address = self.lock().scheduler.memory_mut().allocate(device, bytes);
        address.map(DevicePtr).ok_or_else(|| driver_error("allocate", format!("no memory for {bytes} bytes")))
    }

    fn allocate_mapped(&self, bytes: u64) -> Result<DevicePtr> {
        let address = self.allocate(self.device_count(), bytes)?;
        self.upload(address, &vec![0; bytes as usize])?;
        Ok(address)
    }

    fn free(&self, address: DevicePtr) -> Result<()> {
        let freed = self.lock().scheduler.memory_mut().free(address.0);
        if freed { Ok(()) } else { Err(driver_error("free", format!("{:#x} is not an allocation", address.0))) }
    }

    fn usage_bytes(&self, device: u32) -> (u64, u64) {
        self.lock().scheduler.memory().usage(device)
    }

    fn bind_multicast(&self, replicas: &[DevicePtr], bytes: u64) -> Result<Option<DevicePtr>> {
        if !self.properties[0].multicast {
            return Ok(None);
        }
        let replicas = replicas.iter().map(|r| r.0).collect();
        Ok(Some(DevicePtr(self.lock().scheduler.memory_mut().bind_multicast(replicas, bytes))))
    }

    fn upload(&self, destination: DevicePtr, bytes: &[u8]) -> Result<()> {
        let mut inner = self.lock();
        if !inner.scheduler.memory().is_valid(destination.0, bytes.len() as u64) {
            return Err(driver_error("upload", inner.scheduler.memory().describe(destination.0, bytes.len() as u64)));
        }
        // SAFETY: in a live allocation, as just checked; the lock keeps the device still.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), destination.0 as *mut u8, bytes.len()) };
        // A stream may wait for a word of it.
        inner.completions += 1;
        Ok(())
    }

    fn download(&self, source: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        let inner = self.lock();
        if !inner.scheduler.memory().is_valid(source.0, bytes.len() as u64) {
            return Err(driver_error("download", inner.scheduler.memory().describe(source.0, bytes.len() as u64)));
        }
        // SAFETY: as for `upload`.
        unsafe { std::ptr::copy_nonoverlapping(source.0 as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn read_mapped(&self, source: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        self.download(source, bytes)
    }

    fn create_stream(&self, device: u32, _priority: Priority) -> Result<Stream> {
        let mut inner = self.lock();
        let id = inner.streams.len();
        let queues = inner.hardware_queues.len();
        let hardware_queue = if queues == 0 { usize::MAX } else { id % queues };
        let lazy_turns = inner.scheduler.draw_laziness();
        inner.streams.push(StreamState { device, hardware_queue, ops: VecDeque::new(), lazy_turns, pollable: false });
        Ok(Stream(id as u32))
    }

    /// Takes back what the stream holds, a kernel that runs included: an event recorded in it that has not completed never
    /// will.
    fn destroy_stream(&self, stream: Stream) {
        let mut inner = self.lock();
        let Inner { scheduler, streams, hardware_queues, completions, .. } = &mut *inner;
        let state = &mut streams[stream.0 as usize];
        for Queued { op, ticket } in state.ops.drain(..) {
            if let Op::Launch { running: Some(launch), .. } = op {
                scheduler.cancel(launch);
            }
            if let Some(ticket) = ticket {
                hardware_queues[state.hardware_queue].retain(|t| *t != ticket);
                *completions += 1;
            }
        }
        inner.reap_launches();
    }

    fn copy(&self, stream: Stream, copy: &Copy2d) -> Result<()> {
        self.enqueue(stream, Op::Copy { copy: *copy, rows_done: 0 })
    }

    fn fill(&self, stream: Stream, fill: &Fill2d) -> Result<()> {
        self.enqueue(stream, Op::Fill(*fill))
    }

    fn write_value(&self, stream: Stream, address: DevicePtr, value: u64) -> Result<()> {
        self.enqueue(stream, Op::Write { address: address.0, value })
    }

    fn wait_value(&self, stream: Stream, wait: &MemoryWait) -> Result<()> {
        self.enqueue(stream, Op::WaitValue { wait: *wait, since_ns: None, expired_ns: None })
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        let event = {
            let mut inner = self.lock();
            inner.next_event += 1;
            let event = inner.next_event;
            inner.events.insert(event);
            event
        };
        self.enqueue(stream, Op::Record(event))?;
        Ok(Event(event))
    }

    fn wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        self.enqueue(stream, Op::WaitEvent(event.0))
    }

    /// In an order that the seed draws: nobody may rely on one.
    fn copy_batch(&self, stream: Stream, copies: &[Copy2d]) -> Result<()> {
        let mut copies = copies.to_vec();
        self.lock().scheduler.rng().shuffle(&mut copies);
        copies.iter().try_for_each(|copy| self.copy(stream, copy))
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch<'_>) -> Result<()> {
        if launch.kernel.module() != ModuleKind::Base {
            return Err(TideError::Unsupported {
                needed: format!("a GPU and NCCL, for {}", launch.kernel.name()),
                found: "the simulator, whose ranks share a memory: it has the loopback network".to_owned(),
            });
        }
        if launch.cluster == 0 || !launch.grid.is_multiple_of(launch.cluster) {
            return Err(driver_error("launch", format!("{} blocks in clusters of {}", launch.grid, launch.cluster)));
        }
        self.enqueue(
            stream,
            Op::Launch {
                kernel: launch.kernel,
                grid: launch.grid,
                block: launch.block,
                shared_bytes: launch.shared_bytes,
                params: launch.params.to_vec(),
                running: None,
            },
        )
    }

    fn synchronize(&self, stream: Stream, _timeout_ns: u64) -> Result<SyncOutcome> {
        let mut inner = self.lock();
        loop {
            inner.check()?;
            if inner.streams[stream.0 as usize].ops.is_empty() {
                return Ok(SyncOutcome::Complete);
            }
            if !inner.step() && !inner.jump() {
                let faults = inner.open_waits();
                inner.check()?;
                return Ok(SyncOutcome::Stalled { faults });
            }
        }
    }

    fn is_complete(&self, event: Event) -> Result<bool> {
        let mut inner = self.lock();
        inner.step();
        inner.check()?;
        Ok(!inner.events.contains(&event.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_over_nccl_is_refused_by_name() {
        let gpu = SimGpu::new(SimOptions::default());
        let stream = gpu.create_stream(0, Priority::Normal).unwrap();
        for kernel in Kernel::NCCL {
            let launch = Launch { kernel, grid: 1, block: 2, cluster: 1, shared_bytes: 0, params: &[] };
            // SAFETY: it is refused.
            let refused = unsafe { gpu.launch(stream, &launch) }.unwrap_err().to_string();
            assert!(refused.contains(kernel.name()) && refused.contains("NCCL"), "{refused}");
        }
    }
}

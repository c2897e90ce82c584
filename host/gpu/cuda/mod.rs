//! GPUs through the CUDA driver.
//!
//! Three storeys: [`driver`] has the raw calls, fenced off so that a missing library or symbol is an error; `device`,
//! `queues` and `memory` own contexts, kernels, streams, events and allocations; this module is the [`Gpu`] over them.
//!
//! # A process that outlives a parked kernel
//!
//! A kernel whose wait runs out of time parks and never completes ([`crate::monitor`]). From then on every driver call that
//! waits for the device waits for ever, so this back end makes none:
//!
//! * [`Gpu::synchronize`] polls, and gives up once nothing has completed for the time given (and a little more, so that a
//!   kernel can write its record first).
//! * The host's own reads and writes go through a stream of their own and pinned memory, and are polled, too.
//! * [`Gpu::free`] frees only while nothing is in flight, because the driver may wait there; else the memory is freed later,
//!   and after a stall never.
//! * A host that runs far ahead is held back by [`CudaOptions::in_flight_max`], since the driver blocks where a hardware
//!   queue is full.
//! * All kernels are loaded, and all kinds of operations run once, before the first caller gets the GPUs: what the driver
//!   does lazily may wait for resident kernels.
//! * Dropping [`CudaGpu`] gives everything back if nothing is in flight, and otherwise leaks it. [`exit_now`] ends a
//!   process without the driver's exit handlers.

mod device;
pub mod doctor;
pub mod driver;
mod ledger;
mod memory;
pub mod nccl_module;
pub mod ptx;
mod queues;

use self::device::{Device, Pause, driver_error};
use self::driver::{Absence, Driver, Version};
use self::memory::{Allocation, Kind, Memory, Place};
use self::queues::{Queues, Target};
use super::{
    Copy2d, DeviceProperties, DevicePtr, Event, Fill2d, Gpu, Launch, MemoryWait, Priority, Stream, SyncOutcome,
};
use crate::error::{Result, TideError};
use crate::monitor::Fault;
use bytemuck::Zeroable;
use cudarc::driver::sys;
use std::collections::HashSet;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tide_device::abi::fault::WaitTag;
use tide_device::abi::kernel::Kernel;
use tide_device::abi::signal::{SIGNAL_BYTES, reached};

/// How GPUs are driven.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaOptions {
    /// The driver's numbers of the GPUs to use, in order; `None` for all. All must reach each other's memory.
    pub devices: Option<Vec<u32>>,
    /// Asks for multicast memory. Not implemented yet, and refused: no multicast object is ever created, because on a shared
    /// host one can harm others.
    pub multicast: bool,
    /// Most operations of a device that may be enqueued and not over: a call that would be one more waits. The driver blocks
    /// at some 1024 in one hardware queue, and would do so for ever behind a parked kernel.
    pub in_flight_max: u64,
    /// How long such a call waits while nothing completes.
    pub enqueue_timeout: Duration,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { devices: None, multicast: false, in_flight_max: 768, enqueue_timeout: Duration::from_secs(60) }
    }
}

/// What [`CudaGpu::probe`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The driver's CUDA version.
    pub driver: Version,
    /// GPUs.
    pub device_count: u32,
}

/// The GPUs of the CUDA driver.
pub struct CudaGpu {
    driver: Driver,
    options: CudaOptions,
    devices: Vec<Device>,
    memory: Mutex<Memory>,
    /// Taken after `memory` where both are.
    queues: Mutex<Queues>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CudaGpu {
    /// Whether there are GPUs to be had, and if not, why: for a caller that can go on without.
    ///
    /// # Errors
    /// [`Absence`], whose sentence says what is missing.
    pub fn probe() -> Result<Found, Absence> {
        let driver = Driver::load()?;
        let not_started = |error: TideError| Absence::NotStarted { detail: error.to_string() };
        let found = Found {
            driver: driver.version().map_err(not_started)?,
            device_count: driver.device_count().map_err(not_started)?,
        };
        if found.device_count == 0 { Err(Absence::NoDevice) } else { Ok(found) }
    }

    /// Takes hold of the GPUs, loads the kernels on them and tries every kind of operation once.
    ///
    /// # Errors
    /// [`TideError::Unsupported`] where driver, GPUs or this build lack something; [`TideError::Usage`] for devices that are
    /// not there; what the driver refuses, a PTX error with the compiler's log.
    pub fn new(options: CudaOptions) -> Result<Arc<Self>> {
        if options.multicast {
            return Err(TideError::Unsupported {
                needed: "multicast memory".to_owned(),
                found: "a CUDA back end that does not bind it yet (landing takes the peer form)".to_owned(),
            });
        }
        let found = Self::probe()?;
        let driver = Driver::load()?;
        let ordinals = options.devices.clone().unwrap_or_else(|| (0..found.device_count).collect());
        if ordinals.is_empty() {
            return Err(TideError::usage("no device is named"));
        }
        let mut devices = Vec::new();
        for (index, ordinal) in ordinals.iter().enumerate() {
            if *ordinal >= found.device_count || ordinals[..index].contains(ordinal) {
                return Err(TideError::usage(format!(
                    "device {ordinal}: there are {}, numbered from 0, and each is named once",
                    found.device_count
                )));
            }
            devices.push(Device::new(driver, *ordinal, found.driver)?);
        }
        for (i, device) in devices.iter().enumerate() {
            for (_, peer) in devices.iter().enumerate().filter(|(j, _)| *j != i) {
                device.enable_peer(peer)?;
            }
        }
        let memory = Mutex::new(Memory::new(devices.len()));
        let queues = Mutex::new(Queues::new(driver, devices.len()));
        let this = Arc::new(Self { driver, options, devices, memory, queues });
        this.try_everything()?;
        Ok(this)
    }

    /// The architecture of the PTX that a device takes, as `sm_90`.
    ///
    /// # Errors
    /// [`TideError::Usage`] for a device that is not there.
    pub fn arch(&self, device: u32) -> Result<&'static str> {
        Ok(self.device(device)?.arch)
    }

    /// Runs every kind of operation once on every device, towards every device, and looks at what came of it: the driver
    /// sets some of them up at their first use, which may wait for resident kernels.
    fn try_everything(&self) -> Result<()> {
        const ROW_BYTES: u64 = 96;
        const PITCH_BYTES: u64 = 160;
        const ROWS: u64 = 8;
        const BYTES: u64 = PITCH_BYTES * ROWS;
        let mut blocks = Vec::new();
        for device in 0..self.device_count() {
            blocks.push(self.allocate(device, 2 * BYTES)?);
        }
        for from in 0..self.device_count() {
            for (to, block) in blocks.iter().enumerate() {
                let (source, target) = (blocks[from as usize], DevicePtr(block.0 + BYTES));
                let flat = |destination, bytes, value| Fill2d {
                    destination,
                    pitch_bytes: bytes,
                    width_bytes: bytes,
                    rows: 1,
                    value,
                };
                let streams = [self.create_stream(from, Priority::Normal)?, self.create_stream(from, Priority::High)?];
                let [stream, other] = streams;
                let expected = u64::from(from) * u64::from(self.device_count()) + to as u64 + 1;
                let mut rows = Copy2d::flat(target, source, ROW_BYTES);
                (rows.destination_pitch_bytes, rows.source_pitch_bytes, rows.rows) = (PITCH_BYTES, PITCH_BYTES, ROWS);
                let stripes = Fill2d {
                    destination: source,
                    pitch_bytes: PITCH_BYTES,
                    width_bytes: ROW_BYTES,
                    rows: ROWS,
                    value: 0x5a,
                };
                self.fill(stream, &flat(source, BYTES, 1))?;
                self.fill(stream, &stripes)?;
                self.copy(stream, &Copy2d::flat(target, source, BYTES))?;
                self.copy(stream, &rows)?;
                self.write_value(stream, target, expected)?;
                let event = self.record(stream)?;
                self.wait_event(other, event)?;
                let tag = WaitTag::zeroed();
                self.wait_value(other, &MemoryWait { address: target, value: expected, timeout_ns: 0, tag })?;
                for stream in streams {
                    if self.synchronize(stream, Duration::from_secs(30).as_nanos() as u64)? != SyncOutcome::Complete {
                        return Err(driver_error("first operations", format!("device {from} does not complete them")));
                    }
                    self.destroy_stream(stream);
                }
                let mut seen = [0; BYTES as usize];
                self.download(target, &mut seen)?;
                let is_right = |(i, byte): (usize, &u8)| match i as u64 {
                    i if i < 8 => *byte == expected.to_le_bytes()[i as usize],
                    i if i % PITCH_BYTES < ROW_BYTES => *byte == 0x5a,
                    _ => *byte == 1,
                };
                if let Some((at, byte)) = seen.iter().enumerate().find(|x| !is_right(*x)) {
                    let what = format!("device {from} to device {to}: byte {at} is {byte:#x} after copies and fills");
                    return Err(driver_error("first operations", what));
                }
            }
        }
        blocks.into_iter().try_for_each(|block| self.free(block))
    }

    fn device(&self, device: u32) -> Result<&Device> {
        self.devices.get(device as usize).ok_or_else(|| {
            TideError::usage(format!("device {device}: there are {}, numbered from 0", self.devices.len()))
        })
    }

    /// Enqueues with `call` and keeps the account. Waits first while too much is in flight.
    fn enqueue(&self, stream: Stream, call: impl Fn(Target) -> Result<()>) -> Result<()> {
        let (mut queues, target) = self.admit(stream)?;
        call(target)?;
        queues.enqueued(stream)
    }

    /// Waits until the stream's device takes more; then its context is current, and the lock held.
    fn admit(&self, stream: Stream) -> Result<(MutexGuard<'_, Queues>, Target)> {
        let mut queues = lock(&self.queues);
        let target = queues.target(stream)?;
        let device = &self.devices[target.device as usize];
        device.enter()?;
        let most = self.options.in_flight_max.max(1);
        if queues.in_flight(target.device) < most {
            return Ok((queues, target));
        }
        let mut pause = Pause::default();
        loop {
            queues.sweep_all()?;
            // Some room, so that the next calls need not look again.
            if queues.in_flight(target.device) <= most - most / 4 {
                return Ok((queues, target));
            }
            let idle = queues.moved().max(pause.started).elapsed();
            drop(queues);
            if idle >= self.options.enqueue_timeout {
                let what = format!("{most} operations are in flight, and none has completed for {idle:.1?}");
                return Err(driver_error("enqueue", what));
            }
            pause.rest();
            queues = lock(&self.queues);
            queues.target(stream)?;
        }
    }

    /// Frees what was given up, if nothing is in flight: the driver may wait for the device.
    fn bury(&self, memory: &mut Memory) -> Result<()> {
        if !memory.has_dead() {
            return Ok(());
        }
        // Held while freeing, so that nothing new comes under way.
        let mut queues = lock(&self.queues);
        if !queues.is_idle()? || !self.devices.iter().all(Device::is_settled) {
            return Ok(());
        }
        while let Some(allocation) = memory.pop_dead() {
            self.free_now(&allocation)?;
        }
        Ok(())
    }

    fn free_now(&self, allocation: &Allocation) -> Result<()> {
        match allocation.kind {
            Kind::Device(device) => {
                self.devices[device as usize].enter()?;
                // SAFETY: ours, given up by its owner, taken off the table, and nothing is in flight.
                unsafe { self.driver.cuMemFree_v2(allocation.base) }.ok()
            }
            Kind::Mapped(host) => {
                self.devices[0].enter()?;
                // SAFETY: as above.
                unsafe { self.driver.cuMemFreeHost(host as *mut c_void) }.ok()
            }
        }
    }

    /// Where a range of the host's reads and writes lies.
    fn place(&self, call: &str, address: DevicePtr, bytes: u64) -> Result<Place> {
        match lock(&self.memory).place(address, bytes) {
            Place::Past(allocation) => Err(driver_error(
                call,
                format!(
                    "{bytes} bytes at {:#x} end past the allocation of {} bytes at {:#x}",
                    address.0, allocation.bytes, allocation.base
                ),
            )),
            place => Ok(place),
        }
    }

    /// Nothing moves: finds the first wait of each stream that does not hold, the oldest first. What a stream waits for behind
    /// it was not reached, and is no fault.
    fn stalled(&self, moved: Instant) -> SyncOutcome {
        let pending = lock(&self.queues).pending_waits();
        let mut faults = Vec::new();
        let mut seen_in = HashSet::new();
        for (stream, waiting) in pending {
            if seen_in.contains(&stream) {
                continue;
            }
            let wait = &waiting.wait;
            let mut fault = |seen: Option<u64>| {
                let waited_ns = moved.max(waiting.since).elapsed().as_nanos() as u64;
                faults.push((stream, Fault::new(&wait.tag, 0, wait.value, seen, waited_ns)));
            };
            if wait.address.is_null() {
                seen_in.insert(stream);
                fault(None);
                continue;
            }
            let mut word = [0; SIGNAL_BYTES as usize];
            if let Err(error) = self.download(wait.address, &mut word) {
                // Better no culprit than a wrong one: nothing is known of this stream. That says nothing of others: the
                // word may be somebody else's, who has freed it.
                tracing::warn!(%error, tag = ?wait.tag, "the word of a pending wait cannot be read");
                seen_in.insert(stream);
                continue;
            }
            let seen = u64::from_ne_bytes(word);
            if !reached(seen, wait.value) {
                seen_in.insert(stream);
                fault(Some(seen));
            }
        }
        SyncOutcome::Stalled { faults }
    }

    /// Refuses blocks that wait for each other where they would not all be resident.
    fn check_resident(&self, device: &Device, launch: &Launch<'_>) -> Result<()> {
        if !launch.kernel.blocks_wait_for_each_other() {
            return Ok(());
        }
        let most = device.resident_blocks_max(launch.kernel, launch.block, launch.shared_bytes)?;
        if launch.grid <= most {
            return Ok(());
        }
        Err(TideError::Unsupported {
            needed: format!("room for {} blocks of {} at once, one a rank", launch.grid, launch.kernel.name()),
            found: format!("room for {most} on {}", device.properties.name),
        })
    }
}

/// Whether a strided operation can be handed to the driver in one call.
fn is_strided(pitch_bytes: u64, width_bytes: u64, pitch_bytes_max: u64) -> bool {
    pitch_bytes >= width_bytes && pitch_bytes <= pitch_bytes_max
}

/// How long nothing may complete before a stream counts as stalled: the time given, and enough for a kernel whose wait began
/// with the last completion to write its record.
fn stall_after(timeout_ns: u64) -> Duration {
    let timeout = Duration::from_nanos(timeout_ns);
    let slack = (timeout / 8).clamp(Duration::from_millis(100), Duration::from_secs(1));
    timeout.saturating_add(slack)
}

/// A stream whose own operations do not complete counts as stalled after so many timeouts, whatever other streams do.
const STALLED_ALONE_TIMEOUTS: u32 = 64;

/// Time between two looks at all streams.
const SWEEP_INTERVAL: Duration = Duration::from_millis(2);

/// Attributes of a launch beyond grid, block and shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct LaunchAttributes {
    /// Blocks of a cluster; `None` for no clusters.
    cluster: Option<u32>,
    /// Priority; `None` for the stream's own.
    priority: Option<i32>,
}

impl LaunchAttributes {
    fn to_driver(self) -> Vec<sys::CUlaunchAttribute> {
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let mut attributes = Vec::new();
        if let Some(x) = self.cluster {
            let cluster_dim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y: 1, z: 1 };
            let value = sys::CUlaunchAttributeValue { clusterDim: cluster_dim };
            attributes.push(attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value));
        }
        if let Some(priority) = self.priority {
            let value = sys::CUlaunchAttributeValue { priority };
            attributes.push(attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PRIORITY, value));
        }
        attributes
    }
}

impl Gpu for CudaGpu {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn device_count(&self) -> u32 {
        self.devices.len() as u32
    }

    fn properties(&self, device: u32) -> &DeviceProperties {
        &self.devices[device as usize].properties
    }

    fn allocate(&self, device: u32, bytes: u64) -> Result<DevicePtr> {
        let bytes = bytes.max(1);
        let owner = self.device(device)?;
        let mut memory = lock(&self.memory);
        owner.enter()?;
        let mut base = 0;
        // SAFETY: `base` outlives the call.
        let mut status = unsafe { self.driver.cuMemAlloc_v2(&mut base, bytes as usize) };
        if status.is(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) && memory.has_dead() {
            self.bury(&mut memory)?;
            owner.enter()?;
            // SAFETY: as above.
            status = unsafe { self.driver.cuMemAlloc_v2(&mut base, bytes as usize) };
        }
        if !status.is(sys::CUresult::CUDA_SUCCESS) {
            let (used, _) = memory.usage_bytes(device);
            return Err(status.error(&format!("{bytes} bytes on device {device}, where {used} are allocated")));
        }
        memory.insert(Allocation { base, bytes, kind: Kind::Device(device) });
        Ok(DevicePtr(base))
    }

    fn allocate_mapped(&self, bytes: u64) -> Result<DevicePtr> {
        // Whole words, so that they can be read as words.
        let bytes = bytes.max(1).next_multiple_of(SIGNAL_BYTES);
        let mut memory = lock(&self.memory);
        self.devices[0].enter()?;
        let mut host: *mut c_void = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: `host` outlives the call.
        unsafe { self.driver.cuMemHostAlloc(&mut host, bytes as usize, flags) }.ok()?;
        // SAFETY: just allocated, that long, and nobody else's yet.
        unsafe { host.cast::<u8>().write_bytes(0, bytes as usize) };
        let mut base = 0;
        // SAFETY: mapped memory, just allocated.
        unsafe { self.driver.cuMemHostGetDevicePointer_v2(&mut base, host, 0) }.ok()?;
        memory.insert(Allocation { base, bytes, kind: Kind::Mapped(host as usize) });
        Ok(DevicePtr(base))
    }

    fn free(&self, address: DevicePtr) -> Result<()> {
        let mut memory = lock(&self.memory);
        if !memory.give_up(address) {
            return Err(driver_error("free", format!("{:#x} is not an allocation", address.0)));
        }
        self.bury(&mut memory)
    }

    fn usage_bytes(&self, device: u32) -> (u64, u64) {
        lock(&self.memory).usage_bytes(device)
    }

    /// Gives `None`: this back end creates no multicast object.
    fn bind_multicast(&self, _replicas: &[DevicePtr], _bytes: u64) -> Result<Option<DevicePtr>> {
        Ok(None)
    }

    fn upload(&self, destination: DevicePtr, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        match self.place("upload", destination, bytes.len() as u64)? {
            Place::Host(host) => {
                write_host(host, bytes);
                Ok(())
            }
            Place::Device(device) => self.devices[device as usize].upload(destination.0, bytes),
            _ => self.devices[0].upload(destination.0, bytes),
        }
    }

    fn download(&self, source: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        match self.place("download", source, bytes.len() as u64)? {
            Place::Host(host) => {
                read_host(host, bytes);
                Ok(())
            }
            Place::Device(device) => self.devices[device as usize].download(source.0, bytes),
            _ => self.devices[0].download(source.0, bytes),
        }
    }

    fn read_mapped(&self, source: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        match self.place("read_mapped", source, bytes.len() as u64)? {
            Place::Host(host) => {
                read_host(host, bytes);
                Ok(())
            }
            _ => Err(driver_error("read_mapped", format!("{:#x} is not mapped host memory", source.0))),
        }
    }

    fn create_stream(&self, device: u32, priority: Priority) -> Result<Stream> {
        let owner = self.device(device)?;
        let mut queues = lock(&self.queues);
        owner.enter()?;
        queues.create(device, owner, priority)
    }

    fn destroy_stream(&self, stream: Stream) {
        let mut queues = lock(&self.queues);
        queues.retire(stream);
        if let Err(error) = self.devices[0].enter().and_then(|()| queues.sweep_all()) {
            tracing::warn!(%error, "streams could not be looked through");
        }
    }

    fn copy(&self, stream: Stream, copy: &Copy2d) -> Result<()> {
        if copy.rows == 0 || copy.width_bytes == 0 {
            return Ok(());
        }
        let width = copy.width_bytes;
        let run = |target: Target, to: u64, from: u64, bytes: u64| {
            // SAFETY: whoever enqueues keeps both ranges until the copy is over; the stream's context is current.
            unsafe { self.driver.cuMemcpyAsync(to, from, bytes as usize, target.handle) }.ok()
        };
        let is_contiguous = copy.destination_pitch_bytes == width && copy.source_pitch_bytes == width;
        if copy.rows == 1 || is_contiguous {
            return self.enqueue(stream, |t| run(t, copy.destination.0, copy.source.0, width * copy.rows));
        }
        let device = lock(&self.queues).target(stream)?.device;
        let most = self.devices[device as usize].pitch_bytes_max;
        if is_strided(copy.destination_pitch_bytes, width, most) && is_strided(copy.source_pitch_bytes, width, most) {
            let description = describe(copy);
            let (mut queues, target) = self.admit(stream)?;
            // SAFETY: as above; the description outlives the call.
            let status = unsafe { self.driver.cuMemcpy2DAsync_v2(&description, target.handle) };
            // Some devices take no other pitches than the driver's own: then row by row.
            if !status.is(sys::CUresult::CUDA_ERROR_INVALID_VALUE) {
                status.ok()?;
                return queues.enqueued(stream);
            }
        }
        (0..copy.rows).try_for_each(|row| {
            let to = copy.destination.0 + row * copy.destination_pitch_bytes;
            let from = copy.source.0 + row * copy.source_pitch_bytes;
            self.enqueue(stream, |t| run(t, to, from, width))
        })
    }

    /// Runs of bytes go in one call where the driver has it (13.0 and later), strided ones each by itself.
    fn copy_batch(&self, stream: Stream, copies: &[Copy2d]) -> Result<()> {
        let is_run = |c: &&Copy2d| c.rows == 1 && c.width_bytes > 0;
        let runs: Vec<&Copy2d> = copies.iter().filter(is_run).collect();
        if runs.len() < 2 || !self.driver.has_batched_copies() {
            return copies.iter().try_for_each(|copy| self.copy(stream, copy));
        }
        let to: Vec<u64> = runs.iter().map(|c| c.destination.0).collect();
        let from: Vec<u64> = runs.iter().map(|c| c.source.0).collect();
        let bytes: Vec<usize> = runs.iter().map(|c| c.width_bytes as usize).collect();
        // SAFETY: whoever enqueues keeps all ranges until the copies are over; the stream's context is current.
        self.enqueue(stream, |t| unsafe { self.driver.copy_batch(&to, &from, &bytes, t.handle) }.ok())?;
        copies.iter().filter(|c| !is_run(c)).try_for_each(|copy| self.copy(stream, copy))
    }

    fn fill(&self, stream: Stream, fill: &Fill2d) -> Result<()> {
        if fill.rows == 0 || fill.width_bytes == 0 {
            return Ok(());
        }
        let width = fill.width_bytes;
        let run = |target: Target, to: u64, bytes: u64| {
            // SAFETY: whoever enqueues keeps the range until the fill is over; the stream's context is current.
            unsafe { self.driver.cuMemsetD8Async(to, fill.value, bytes as usize, target.handle) }.ok()
        };
        if fill.rows == 1 || fill.pitch_bytes == width {
            return self.enqueue(stream, |t| run(t, fill.destination.0, width * fill.rows));
        }
        let device = lock(&self.queues).target(stream)?.device;
        if is_strided(fill.pitch_bytes, width, self.devices[device as usize].pitch_bytes_max) {
            return self.enqueue(stream, |t| {
                // SAFETY: as above.
                unsafe {
                    self.driver.cuMemsetD2D8Async(
                        fill.destination.0,
                        fill.pitch_bytes as usize,
                        fill.value,
                        width as usize,
                        fill.rows as usize,
                        t.handle,
                    )
                }
                .ok()
            });
        }
        (0..fill.rows)
            .try_for_each(|row| self.enqueue(stream, |t| run(t, fill.destination.0 + row * fill.pitch_bytes, width)))
    }

    fn write_value(&self, stream: Stream, address: DevicePtr, value: u64) -> Result<()> {
        // The default write is behind a system-wide fence for all that precedes it in the stream.
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as c_uint;
        self.enqueue(stream, |t| {
            // SAFETY: whoever enqueues keeps the word until the write is over; the stream's context is current.
            unsafe { self.driver.cuStreamWriteValue64_v2(t.handle, address.0, value, flags) }.ok()
        })
    }

    fn wait_value(&self, stream: Stream, wait: &MemoryWait) -> Result<()> {
        // GEQ is `(int64)(word − value) >= 0`: `abi::signal::reached`.
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as c_uint;
        let (mut queues, target) = self.admit(stream)?;
        // SAFETY: as for `write_value`.
        unsafe { self.driver.cuStreamWaitValue64_v2(target.handle, wait.address.0, wait.value, flags) }.ok()?;
        queues.enqueued_wait(stream, wait)
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        let (mut queues, _) = self.admit(stream)?;
        queues.record(stream)
    }

    fn wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        let (mut queues, target) = self.admit(stream)?;
        let Some(handle) = queues.event(event)? else { return Ok(()) };
        // SAFETY: a live event, which is not recorded again before it has completed.
        unsafe { self.driver.cuStreamWaitEvent(target.handle, handle, 0) }.ok()?;
        queues.enqueued(stream)
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch<'_>) -> Result<()> {
        let (mut queues, target) = self.admit(stream)?;
        let device = &self.devices[target.device as usize];
        let function = device.function(launch.kernel)?;
        if launch.params.len() != function.param_bytes {
            return Err(TideError::Unsupported {
                needed: format!("PTX whose {} takes {} bytes of parameters", launch.kernel.name(), launch.params.len()),
                found: format!("PTX that takes {}: it is of other sources", function.param_bytes),
            });
        }
        if launch.shared_bytes > function.shared_bytes_max {
            return Err(TideError::Unsupported {
                needed: format!("{} bytes of shared memory for {}", launch.shared_bytes, launch.kernel.name()),
                found: format!("{} on {}", function.shared_bytes_max, device.properties.name),
            });
        }
        self.check_resident(device, launch)?;
        let cluster = (launch.cluster != 1).then_some(launch.cluster);
        let mut attributes = LaunchAttributes { cluster, priority: None }.to_driver();
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: target.handle,
            attrs: if attributes.is_empty() { std::ptr::null_mut() } else { attributes.as_mut_ptr() },
            numAttrs: attributes.len() as c_uint,
        };
        // One parameter, by value: the driver copies its bytes before the call returns.
        let mut params: [*mut c_void; 1] = [launch.params.as_ptr().cast_mut().cast()];
        // SAFETY: configuration and parameters outlive the call, the block is as long as the kernel takes; what the kernel
        // does with it is the caller's promise.
        let status = unsafe {
            self.driver.cuLaunchKernelEx(&config, function.handle, params.as_mut_ptr(), std::ptr::null_mut())
        };
        if !status.is(sys::CUresult::CUDA_SUCCESS) {
            return Err(status.error(&format!(
                "{} with {} blocks of {} threads and {} bytes of shared memory",
                launch.kernel.name(),
                launch.grid,
                launch.block,
                launch.shared_bytes
            )));
        }
        queues.enqueued(stream)
    }

    fn enter(&self, device: u32) -> Result<()> {
        self.device(device)?.enter()
    }

    fn load_kernels(&self, image: &str, kernels: &[Kernel]) -> Result<()> {
        self.devices.iter().try_for_each(|device| {
            device.enter()?;
            device.load("further kernels", image, kernels)
        })
    }

    fn enqueue_foreign(
        &self,
        stream: Stream,
        wait: Option<&MemoryWait>,
        call: &mut dyn FnMut(*mut c_void) -> Result<()>,
    ) -> Result<()> {
        let (mut queues, target) = self.admit(stream)?;
        call(target.handle.cast())?;
        match wait {
            Some(wait) => queues.enqueued_wait(stream, wait),
            None => queues.enqueued(stream),
        }
    }

    fn synchronize(&self, stream: Stream, timeout_ns: u64) -> Result<SyncOutcome> {
        let limit = stall_after(timeout_ns);
        let mut pause = Pause::default();
        let mut swept = pause.started;
        let (mut own, mut own_moved) = (u64::MAX, pause.started);
        loop {
            let moved = {
                let mut queues = lock(&self.queues);
                // Given up meanwhile by its owner, in another thread.
                let Ok(target) = queues.target(stream) else { break };
                self.devices[target.device as usize].enter()?;
                if queues.is_empty(stream)? {
                    break;
                }
                if swept.elapsed() >= SWEEP_INTERVAL {
                    queues.sweep_all()?;
                    swept = Instant::now();
                }
                let in_flight = queues.in_flight_of(stream);
                if in_flight != own {
                    (own, own_moved) = (in_flight, Instant::now());
                }
                queues.moved().max(pause.started)
            };
            if moved.elapsed() >= limit || own_moved.elapsed() >= limit.saturating_mul(STALLED_ALONE_TIMEOUTS) {
                return Ok(self.stalled(moved));
            }
            pause.rest();
        }
        self.bury(&mut lock(&self.memory))?;
        Ok(SyncOutcome::Complete)
    }

    fn is_complete(&self, event: Event) -> Result<bool> {
        self.devices[0].enter()?;
        lock(&self.queues).is_complete(event)
    }
}

impl Drop for CudaGpu {
    /// Gives everything back if nothing is in flight; else leaks it, because the driver would wait for a kernel that may
    /// never complete.
    fn drop(&mut self) {
        let queues = self.queues.get_mut().unwrap_or_else(PoisonError::into_inner);
        let is_idle = self.devices[0].enter().and_then(|()| queues.is_idle()).unwrap_or(false);
        if !is_idle || !self.devices.iter().all(Device::is_settled) {
            tracing::warn!(
                "GPUs were dropped with work in flight: their memory stays allocated until the process ends"
            );
            return;
        }
        queues.destroy_all();
        let mut memory = std::mem::replace(&mut self.memory, Mutex::new(Memory::new(0)))
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        memory.give_up_all();
        while let Some(allocation) = memory.pop_dead() {
            if let Err(error) = self.free_now(&allocation) {
                tracing::warn!(%error, "memory could not be freed");
                return;
            }
        }
        self.devices.iter_mut().for_each(Device::release);
    }
}

/// The driver's description of a strided copy between unified addresses.
fn describe(copy: &Copy2d) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        srcHost: std::ptr::null(),
        srcDevice: copy.source.0,
        srcArray: std::ptr::null_mut(),
        srcPitch: copy.source_pitch_bytes as usize,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        dstHost: std::ptr::null_mut(),
        dstDevice: copy.destination.0,
        dstArray: std::ptr::null_mut(),
        dstPitch: copy.destination_pitch_bytes as usize,
        WidthInBytes: copy.width_bytes as usize,
        Height: copy.rows as usize,
    }
}

/// Reads mapped memory, which a GPU may be writing: whole words, in ascending order, so that a record whose first word says
/// "complete" is read complete.
fn read_host(host: usize, bytes: &mut [u8]) {
    let mut at = host;
    let mut rest = bytes;
    while !rest.is_empty() {
        if at.is_multiple_of(8) && rest.len() >= 8 {
            // SAFETY: inside a live mapped allocation, as `Memory::place` says, and aligned.
            let word = unsafe { AtomicU64::from_ptr(at as *mut u64) };
            // ORDER: acquire, partner: the release by which a kernel stores a record's first word, after all its others.
            let (head, tail) = rest.split_at_mut(8);
            head.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
            (rest, at) = (tail, at + 8);
        } else {
            // SAFETY: inside a live mapped allocation.
            let byte = unsafe { AtomicU8::from_ptr(at as *mut u8) };
            // ORDER: as above, for what is no whole word.
            rest[0] = byte.load(Ordering::Acquire);
            (rest, at) = (&mut rest[1..], at + 1);
        }
    }
}

/// Writes mapped memory, which a GPU may be reading.
fn write_host(host: usize, bytes: &[u8]) {
    for (i, value) in bytes.iter().enumerate() {
        // SAFETY: inside a live mapped allocation, as `Memory::place` says.
        let byte = unsafe { AtomicU8::from_ptr((host + i) as *mut u8) };
        // ORDER: release, so that bytes appear in order; nothing else depends on it.
        byte.store(*value, Ordering::Release);
    }
}

/// Ends the process at once, without exit handlers: those of the driver may wait for a parked kernel. What the process has
/// printed through a buffer of its own must be flushed before.
pub fn exit_now(code: i32) -> ! {
    unsafe extern "C" {
        fn _exit(code: c_int) -> !;
    }
    // SAFETY: ends the process; takes no pointer.
    unsafe { _exit(code) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pitch_must_hold_the_row_and_be_one_that_the_device_takes() {
        assert!(is_strided(96, 96, 1 << 31) && is_strided(1 << 31, 96, 1 << 31));
        assert!(!is_strided(95, 96, 1 << 31) && !is_strided((1 << 31) + 1, 96, 1 << 31));
    }

    #[test]
    fn a_stall_is_called_after_the_kernels_had_time_to_record_it() {
        assert_eq!(stall_after(10_000_000_000), Duration::from_secs(11));
        assert_eq!(stall_after(400_000_000), Duration::from_millis(500));
        assert!(stall_after(u64::MAX) > Duration::from_secs(1 << 30));
    }

    #[test]
    fn words_of_mapped_memory_are_read_whole_and_its_edges_by_byte() {
        let words = [0x0706_0504_0302_0100_u64, 0x0f0e_0d0c_0b0a_0908];
        let mut seen = [0xff; 13];
        read_host(words.as_ptr() as usize + 1, &mut seen);
        assert_eq!(seen, std::array::from_fn(|i| i as u8 + 1));
    }

    #[test]
    fn mapped_memory_holds_what_the_host_writes() {
        let mut words = [0_u64; 2];
        write_host(words.as_mut_ptr() as usize + 3, &[1, 2, 3]);
        assert_eq!(bytemuck::bytes_of(&words)[..8], [0, 0, 0, 1, 2, 3, 0, 0]);
    }

    #[test]
    fn launch_attributes_are_those_asked_for() {
        assert!(LaunchAttributes::default().to_driver().is_empty());
        let attributes = LaunchAttributes { cluster: Some(4), priority: Some(-2) }.to_driver();
        assert_eq!(attributes.len(), 2);
        // SAFETY: the first attribute holds a cluster dimension, as its id says.
        assert_eq!(unsafe { attributes[0].value.clusterDim.x }, 4);
        // SAFETY: the second holds a priority.
        assert_eq!(unsafe { attributes[1].value.priority }, -2);
    }

    #[test]
    fn multicast_is_refused_by_name() {
        let refused = CudaGpu::new(CudaOptions { multicast: true, ..Default::default() });
        assert!(refused.is_err_and(|e| e.to_string().contains("multicast")));
    }

    #[test]
    fn a_probe_says_what_is_missing_and_does_not_panic() {
        match CudaGpu::probe() {
            Ok(found) => assert!(found.device_count > 0),
            Err(absence) => {
                let error = CudaGpu::new(CudaOptions::default()).err().expect("no GPU was found");
                assert!(error.to_string().contains(&absence.to_string()), "{error} against {absence}");
            }
        }
    }
}

//! Moves on the GPU that all ranks share.
//!
//! All lanes share one stream, on which nothing ever waits: streams share the GPU's few hardware queues, and the more streams there
//! are, the sooner one stands in a queue behind a user's stream that waits for what it brings. What is on the GPU at both ends is moved, and signals are added to, by kernels of the plugin's own: a copy engine
//! serves its copies in turn, so that a user's copy which waits for a signal can hold up the copy that is to bring the signal (seen
//! on an H200). An event after each step is polled. Streams, pinned memory, kernels and most events exist before anything is moved:
//! what the driver loads at first use could wait for kernels that run.
//!
//! With `TIDE_LOOPBACK_PLUGIN_BOUNCE=1` data goes through pinned memory of the host, by copy engines: for kernels that occupy the
//! whole GPU.

pub mod driver;

use crate::fault::Result;
use crate::mover::{Mover, Place, Space};
use crate::world::{World, lock};
use driver::{DevicePointer, Driver, EVENT_DISABLE_TIMING, HOST_ALLOC_PORTABLE, Handle, STREAM_NON_BLOCKING};
use std::ffi::{c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes that are copied from pageable host memory by way of a pinned slot: a value in NCCL's ring has up to 8.
const SLOT_BYTES: usize = 64;
/// Slots beyond the one that each queue's signal needs.
const SLOTS: usize = 256;
/// Events that a lane makes in advance.
const EVENTS: usize = 256;
/// Bytes that bounce through the host at a time.
const BOUNCE_BYTES: usize = 1 << 20;

/// Threads of a block of a copy.
const COPY_THREADS: c_uint = 256;
/// The most blocks of a copy.
const COPY_BLOCKS_MAX: u64 = 32;

static WORLD: World = World::new();

/// A lane on the GPU.
pub struct CudaLane {
    driver: &'static Driver,
    context: Handle,
    stream: Handle,
    events: Vec<Handle>,
    /// Pinned: the slots, then the bounce buffer if there is one.
    pinned: *mut c_void,
    slots: Vec<usize>,
    queues: usize,
    bounce: Option<*mut c_void>,
    kernels: Kernels,
}

/// The stream of all lanes, made by the first.
fn shared_stream(driver: &Driver) -> Result<Handle> {
    static STREAM: Mutex<Option<usize>> = Mutex::new(None);
    let mut made = lock(&STREAM);
    if let Some(stream) = *made {
        return Ok(stream as Handle);
    }
    let (mut least, mut greatest, mut stream) = (0, 0, std::ptr::null_mut());
    // SAFETY: places for results; a context is current.
    unsafe {
        driver.priority_range(&mut least, &mut greatest)?;
        driver.stream_create(&mut stream, STREAM_NON_BLOCKING, greatest)?;
    }
    *made = Some(stream as usize);
    Ok(stream)
}

/// The plugin's kernels, in the lane's context.
#[derive(Clone, Copy)]
struct Kernels {
    add: Handle,
    copy: Handle,
}

impl Kernels {
    const NONE: Self = Self { add: std::ptr::null_mut(), copy: std::ptr::null_mut() };

    /// Loads them, once per process: all ranks share a GPU.
    fn load(driver: &Driver) -> Result<Self> {
        static LOADED: Mutex<Option<[usize; 2]>> = Mutex::new(None);
        let mut loaded = lock(&LOADED);
        if let Some([add, copy]) = *loaded {
            return Ok(Self { add: add as Handle, copy: copy as Handle });
        }
        let (mut module, mut this) = (std::ptr::null_mut(), Self::NONE);
        // SAFETY: places for results; the image and the names end with zero; a context is current.
        unsafe {
            driver.module_load(&mut module, concat!(include_str!("moves.ptx"), "\0").as_ptr().cast())?;
            driver.module_function(&mut this.add, module, c"add".as_ptr())?;
            driver.module_function(&mut this.copy, module, c"copy".as_ptr())?;
        }
        *loaded = Some([this.add as usize, this.copy as usize]);
        Ok(this)
    }
}

// SAFETY: handles that the driver takes from any thread; the lane has one user at a time.
unsafe impl Send for CudaLane {}

/// Something under way on the GPU.
pub struct Ticket {
    event: Option<Handle>,
    slot: Option<usize>,
}

// SAFETY: as of the lane.
unsafe impl Send for Ticket {}

impl CudaLane {
    fn within<T>(&mut self, body: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let (driver, context) = (self.driver, self.context);
        // SAFETY: a primary context, or the one NCCL runs in: alive as long as NCCL's communicators.
        unsafe { driver.within(context, || body(self)) }
    }

    fn slot(&self, number: usize) -> *mut c_void {
        self.pinned.wrapping_byte_add(number * SLOT_BYTES)
    }

    /// Records an event after what is on the stream.
    fn mark(&mut self, stream: Handle) -> Result<Handle> {
        let mut event = self.events.pop().unwrap_or(std::ptr::null_mut());
        // SAFETY: a place for the event; event and stream are of the current context.
        unsafe {
            if event.is_null() {
                self.driver.event_create(&mut event, EVENT_DISABLE_TIMING)?;
            }
            self.driver.event_record(event, stream)?;
        }
        Ok(event)
    }

    fn copy_here(&mut self, to: Place, from: Place, bytes: usize) -> Result<Ticket> {
        let (driver, stream) = (self.driver, self.stream);
        let (to_host, from_host) = (to.address as *mut c_void, from.address as *const c_void);
        let (to_device, from_device) = (to.address as DevicePointer, from.address as DevicePointer);
        let mut slot = None;
        // SAFETY: the core has checked both ranges against what NCCL registered, and they stay valid until the copy is done. A slot
        // is this copy's alone until then; the bounce buffer is used in the stream's order.
        unsafe {
            match (to.space, from.space) {
                (Space::Host, Space::Host) => {
                    std::ptr::copy(from_host.cast::<u8>(), to_host.cast::<u8>(), bytes);
                    return Ok(Ticket { event: None, slot: None });
                }
                (Space::Host, Space::Device) => driver.to_host(to_host, from_device, bytes, stream)?,
                (Space::Device, Space::Host) => {
                    let spare = self.slots.len() > self.queues;
                    slot = if bytes <= SLOT_BYTES && spare { self.slots.pop() } else { None };
                    let mut source = from_host;
                    if let Some(slot) = slot {
                        std::ptr::copy_nonoverlapping(from_host.cast::<u8>(), self.slot(slot).cast::<u8>(), bytes);
                        source = self.slot(slot);
                    }
                    driver.to_device(to_device, source, bytes, stream)?;
                }
                (Space::Device, Space::Device) => match self.bounce {
                    None => self.run_copy(to_device, from_device, bytes as u64)?,
                    Some(bounce) => {
                        for start in (0..bytes).step_by(BOUNCE_BYTES) {
                            let part = BOUNCE_BYTES.min(bytes - start);
                            driver.to_host(bounce, from_device + start as u64, part, stream)?;
                            driver.to_device(to_device + start as u64, bounce, part, stream)?;
                        }
                    }
                },
            }
        }
        Ok(Ticket { event: Some(self.mark(stream)?), slot })
    }

    fn add_here(&mut self, word: Place, value: u64) -> Result<Ticket> {
        if word.space == Space::Host {
            // SAFETY: registered and aligned, as the core has checked; the GPU's driver and NCCL touch it by whole words.
            let word = unsafe { AtomicU64::from_ptr(word.address as *mut u64) };
            // ORDER: release, so that whoever sees the sum sees the data, which was there before this call.
            word.fetch_add(value, Ordering::Release);
            return Ok(Ticket { event: None, slot: None });
        }
        self.run(self.kernels.add, 1, 1, &mut [word.address as u64, value])?;
        Ok(Ticket { event: Some(self.mark(self.stream)?), slot: None })
    }

    /// Copies within the GPU.
    fn run_copy(&self, to: DevicePointer, from: DevicePointer, bytes: u64) -> Result<()> {
        let grid = bytes.div_ceil(u64::from(COPY_THREADS) * 16).clamp(1, COPY_BLOCKS_MAX) as c_uint;
        self.run(self.kernels.copy, grid, COPY_THREADS, &mut [to, from, bytes])
    }

    fn run(&self, kernel: Handle, grid: c_uint, block: c_uint, words: &mut [u64]) -> Result<()> {
        let mut parameters: Vec<*mut c_void> = words.iter_mut().map(|word| std::ptr::from_mut(word).cast()).collect();
        let (parameters, none) = (parameters.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: a kernel of ours and as many parameters as it takes, copied by the call; the ranges are the core's to have checked.
        unsafe { self.driver.launch(kernel, grid, 1, 1, block, 1, 1, 0, self.stream, parameters, none) }
    }

    fn poll_here(&mut self, ticket: &mut Ticket) -> Result<bool> {
        let driver = self.driver;
        if let Some(event) = ticket.event {
            // SAFETY: an event of this lane.
            if !unsafe { driver.event_is_done(event)? } {
                return Ok(false);
            }
            self.events.push(event);
            ticket.event = None;
        }
        self.slots.extend(ticket.slot.take());
        Ok(true)
    }

    /// Makes one move of each kind, once per process.
    fn warm_up(&mut self) -> Result<()> {
        const BYTES: usize = 4 << 20;
        static WARM: Mutex<bool> = Mutex::new(false);
        let mut warm = lock(&WARM);
        if *warm {
            return Ok(());
        }
        let (driver, mut memory, slot) = (self.driver, 0, self.slot(0));
        // SAFETY: memory of this function, never freed: to free it could wait for kernels. The slots are not in use yet.
        unsafe {
            driver.alloc(&mut memory, 2 * BYTES)?;
            for bytes in [8, 12, 4096, 1 << 16, BYTES as u64] {
                self.run_copy(memory, memory + BYTES as u64, bytes)?;
            }
            self.run(self.kernels.add, 1, 1, &mut [memory, 0])?;
            let stream = self.stream;
            driver.to_device(memory, slot, 8, stream)?;
            driver.to_host(slot, memory, 8, stream)?;
            let pageable = [0u64; 8];
            driver.to_device(memory, pageable.as_ptr().cast(), 64, stream)?;
            let event = self.mark(stream)?;
            driver.stream_synchronize(stream)?;
            driver.event_is_done(event)?;
            self.events.push(event);
        }
        *warm = true;
        Ok(())
    }
}

impl Mover for CudaLane {
    type Ticket = Ticket;

    fn world() -> &'static World {
        static SETTINGS: std::sync::Once = std::sync::Once::new();
        SETTINGS.call_once(|| {
            let seconds = std::env::var("TIDE_LOOPBACK_PLUGIN_TIMEOUT").ok().and_then(|text| text.parse().ok());
            if let Some(seconds) = seconds {
                WORLD.set_deadline(Duration::from_secs(seconds));
            }
        });
        &WORLD
    }

    fn open(queues: usize) -> Result<Self> {
        let driver = Driver::get()?;
        let bounces = std::env::var_os("TIDE_LOOPBACK_PLUGIN_BOUNCE").is_some_and(|value| value != "0");
        let null = std::ptr::null_mut();
        let mut lane = Self {
            driver,
            context: driver.context()?,
            stream: null,
            events: Vec::new(),
            pinned: null,
            slots: (0..SLOTS + queues).collect(),
            queues,
            bounce: None,
            kernels: Kernels::NONE,
        };
        lane.within(|lane| {
            let slots = lane.slots.len() * SLOT_BYTES;
            let bytes = slots + if bounces { BOUNCE_BYTES } else { 0 };
            lane.stream = shared_stream(driver)?;
            // SAFETY: places for results.
            unsafe {
                driver.host_alloc(&mut lane.pinned, bytes, HOST_ALLOC_PORTABLE)?;
                for _ in 0..EVENTS {
                    let mut event = null;
                    driver.event_create(&mut event, EVENT_DISABLE_TIMING)?;
                    lane.events.push(event);
                }
            }
            lane.kernels = Kernels::load(driver)?;
            lane.bounce = bounces.then(|| lane.pinned.wrapping_byte_add(slots));
            lane.warm_up()
        })?;
        Ok(lane)
    }

    fn copy(&mut self, to: Place, from: Place, bytes: usize) -> Result<Ticket> {
        self.within(|lane| lane.copy_here(to, from, bytes))
    }

    fn add(&mut self, word: Place, value: u64) -> Result<Ticket> {
        self.within(|lane| lane.add_here(word, value))
    }

    fn poll(&mut self, ticket: &mut Ticket) -> Result<bool> {
        if ticket.event.is_none() {
            return Ok(true);
        }
        self.within(|lane| lane.poll_here(ticket))
    }
}

impl Drop for CudaLane {
    fn drop(&mut self) {
        let result = self.within(|lane| {
            let driver = lane.driver;
            for event in lane.events.drain(..) {
                // SAFETY: this lane's, and no longer in use.
                unsafe { driver.event_destroy(event)? };
            }
            if !lane.stream.is_null() {
                // SAFETY: a stream that is never destroyed. What is on it ends first, so that nothing touches the pinned memory
                // afterwards.
                unsafe { driver.stream_synchronize(lane.stream)? };
            }
            if !lane.pinned.is_null() {
                // SAFETY: this lane's, and no longer in use.
                unsafe { driver.host_free(lane.pinned)? };
            }
            Ok(())
        });
        if let Err(fault) = result {
            WORLD.warn(&format!("a lane was not taken down: {fault}"));
        }
    }
}

//! The scheduler of the simulated machine: coroutines, bulk copies, virtual time.
//!
//! # Safety argument
//!
//! Everything lives in one `World`, reached through a raw pointer: from [`Scheduler`]'s methods, and, while
//! a coroutine runs, from the operations that it performs. A coroutine runs only inside [`Scheduler::step`],
//! which holds no reference into the world across the resume; operations hold none across a suspension.
//! So at any moment at most one reference is in use. The scheduler may move between OS threads between steps:
//! coroutines keep no thread-local address across a suspension, because `current` is never inlined.

use super::block::{Block, MbarrierState, SharedMemory};
use super::memory::Memory;
use crate::abi::kernel::Kernel;
use crate::arch::machine::SharedAddr;
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use std::boxed::Box;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::format;
use std::ptr;
use std::string::{String, ToString};
use std::vec::Vec;

/// How the simulated machine behaves.
#[derive(Debug, Clone)]
pub struct MachineOptions {
    /// Devices.
    pub device_count: u32,
    /// Decides every choice of the scheduler.
    pub seed: u64,
    /// Threads that a device holds at once; blocks beyond queue, but for the first.
    pub resident_threads_max: u32,
    /// One of this many observable operations is a moment to switch threads, on average; 0 never.
    pub preempt_one_in: u32,
    /// A quarter of all streams and launches are lazy: they let up to this many of their turns pass, each by its own
    /// measure. Without it everything advances at one pace, and much that may happen does not.
    pub lazy_turns_max: u32,
    /// Allocations smaller than this start as NaNs.
    pub poison_below_bytes: u64,
    /// The signal addition, counted from 0 over the machine's life, that never arrives.
    pub lose_signal: Option<u64>,
}

impl Default for MachineOptions {
    fn default() -> Self {
        Self {
            device_count: 1,
            seed: 1,
            resident_threads_max: 16 << 10,
            preempt_one_in: 16,
            lazy_turns_max: 40,
            poison_below_bytes: 16 << 20,
            lose_signal: None,
        }
    }
}

/// The latest moment that virtual time jumps to, ns: 146 years. A deadline behind it never comes, as that of a wait without
/// end; so time never runs out, and later waits keep deadlines of their own.
pub const LATEST_NS: u64 = 1 << 62;

/// Why a thread gave up its turn.
#[derive(Debug, Clone, Copy)]
pub(super) enum Suspend {
    /// It can go on.
    Ready,
    /// It waits at a named barrier, or for its bulk groups: who completes them makes it ready.
    Listed,
    /// It waits for an mbarrier of its block.
    Block { deadline_ns: u64 },
    /// It waits for a signal word.
    System { deadline_ns: u64 },
    /// It never goes on.
    Parked,
}

/// Stack of a simulated thread. Kernels keep little on it.
const STACK_BYTES: usize = 128 << 10;

/// A launch, while and after it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchId(u64);

struct Launch {
    kernel: Kernel,
    /// The parameter block, 16-aligned.
    params: Box<[u128]>,
    grid: u32,
    block: u32,
    shared_bytes: u32,
    device: u32,
    next_block: u32,
    live_blocks: u32,
    lazy_turns: u32,
}

type Fibre = Coroutine<(), Suspend, (), DefaultStack>;

struct Thread {
    fibre: Option<Fibre>,
    /// Boxed: the fibre knows its address.
    current: Box<Current>,
    block: usize,
    index: u32,
    /// Bulk groups in the order of their commits, then the open one.
    groups: VecDeque<Group>,
    /// What the thread waits for: at most this many groups pending, in their reads or altogether.
    bulk_wait: Option<(u32, bool)>,
}

#[derive(Default, Clone, Copy)]
struct Group {
    reads: u32,
    writes: u32,
    serial: u64,
}

/// A bulk copy in flight.
enum Bulk {
    Load { block: usize, destination: usize, source: u64, bytes: u32, barrier: usize },
    StoreRead { thread: usize, group: u64, destination: u64, source: usize, bytes: u32 },
    StoreWrite { thread: usize, group: u64, destination: u64, data: Box<[u8]> },
}

struct World {
    options: MachineOptions,
    rng: fastrand::Rng,
    now_ns: u64,
    memory: Memory,
    /// Launches that have not completed.
    launches: BTreeMap<u64, Launch>,
    next_launch: u64,
    queued: VecDeque<u64>,
    resident_threads: Vec<u32>,
    blocks: Vec<Option<Block>>,
    free_blocks: Vec<usize>,
    threads: Vec<Option<Thread>>,
    free_threads: Vec<usize>,
    ready: Vec<usize>,
    bulk: Vec<Bulk>,
    system_waiters: Vec<(usize, u64)>,
    stacks: Vec<DefaultStack>,
    signal_version: u64,
    signal_adds: u64,
    group_serial: u64,
    error: Option<String>,
}

/// What the running thread knows of itself.
pub(super) struct Current {
    world: *mut World,
    thread: usize,
    block: usize,
    yielder: Cell<*const Yielder<(), Suspend>>,
    pub(super) thread_idx: u32,
    pub(super) block_idx: u32,
    pub(super) block_dim: u32,
    pub(super) grid_dim: u32,
    pub(super) shared_base: usize,
}

impl Current {
    #[inline]
    pub(super) fn is_valid(&self, address: u64, bytes: u64) -> bool {
        // SAFETY: the module's argument.
        unsafe { (*self.world).memory.is_valid(address, bytes) }
    }
}

std::thread_local! {
    static CURRENT: Cell<*const Current> = const { Cell::new(ptr::null()) };
}

/// Never inlined, so that no coroutine keeps the address of a thread-local over a suspension.
#[inline(never)]
fn current() -> *const Current {
    CURRENT.get()
}

#[inline]
pub(super) fn with_current<R>(f: impl FnOnce(&Current) -> R) -> R {
    let current = current();
    assert!(!current.is_null(), "a machine operation outside a launch");
    // SAFETY: set by `step` for as long as the thread runs.
    f(unsafe { &*current })
}

/// Runs `f` on the world and the running thread. `f` must not suspend.
fn with_world<R>(f: impl FnOnce(&mut World, &Current) -> R) -> R {
    // SAFETY: the module's argument.
    with_current(|c| f(unsafe { &mut *c.world }, c))
}

pub(super) fn suspend(reason: Suspend) {
    // SAFETY: the yielder lives as long as the coroutine, on whose stack this runs.
    let yielder = with_current(|c| unsafe { &*c.yielder.get() });
    yielder.suspend(reason);
}

/// A moment at which another thread may take over.
pub(super) fn preempt() {
    let switch = with_world(|w, _| w.options.preempt_one_in != 0 && w.rng.u32(0..w.options.preempt_one_in) == 0);
    if switch {
        suspend(Suspend::Ready);
    }
}

pub(super) fn now_ns() -> u64 {
    with_world(|w, _| w.now_ns)
}

#[cold]
pub(super) fn illegal_address(address: u64, bytes: u64) {
    with_world(|w, c| {
        let place = w.memory.describe(address, bytes);
        w.fail(format!("illegal address in {}: {place}", w.thread_name(c.thread)));
    });
    loop {
        suspend(Suspend::Parked);
    }
}

pub(super) fn signal_written() {
    with_world(|w, _| w.signal_written());
}

/// Whether the addition to a signal that is about to happen is the one that the options lose.
pub(super) fn loses_signal() -> bool {
    with_world(|w, _| {
        let index = w.signal_adds;
        w.signal_adds += 1;
        w.options.lose_signal == Some(index)
    })
}

pub(super) fn barrier_sync(id: u32, threads: u32) {
    let complete = with_world(|w, c| {
        let block = w.block(c.block);
        let waiting = &mut block.barriers[id as usize];
        if waiting.len() as u32 + 1 == threads {
            let released = std::mem::take(waiting);
            w.ready.extend(released);
            true
        } else {
            waiting.push(c.thread);
            false
        }
    });
    suspend(if complete { Suspend::Ready } else { Suspend::Listed });
}

fn mbarrier(w: &mut World, block: usize, barrier: usize) -> *mut MbarrierState {
    let valid = w.block(block).shared.is_valid(barrier, 8) && barrier.is_multiple_of(8);
    assert!(valid, "an mbarrier outside the block's shared memory");
    barrier as *mut MbarrierState
}

pub(super) fn mbarrier_init(barrier: SharedAddr, count: u32) {
    with_world(|w, c| {
        let state = mbarrier(w, c.block, barrier.0);
        // SAFETY: inside the block's shared memory, as just checked.
        unsafe { state.write(MbarrierState::new(count)) };
    });
}

pub(super) fn mbarrier_arrive(barrier: SharedAddr, expected_bytes: u32) {
    preempt();
    with_world(|w, c| {
        let state = mbarrier(w, c.block, barrier.0);
        // SAFETY: as above.
        let state = unsafe { &mut *state };
        state.expect(expected_bytes);
        if state.arrive() {
            w.wake_block(c.block);
        }
    });
}

pub(super) fn mbarrier_parity(barrier: SharedAddr) -> u32 {
    with_world(|w, c| {
        let state = mbarrier(w, c.block, barrier.0);
        // SAFETY: as above.
        unsafe { (*state).parity() }
    })
}

fn check_bulk(w: &mut World, c: &Current, shared: usize, global: u64, bytes: u32) -> bool {
    let fits = w.block(c.block).shared.is_valid(shared, bytes as usize);
    let aligned = bytes > 0 && bytes.is_multiple_of(16) && shared.is_multiple_of(16) && global.is_multiple_of(16);
    assert!(fits && aligned, "a bulk copy of {bytes} bytes is misaligned or outside shared memory");
    w.memory.is_valid(global, u64::from(bytes))
}

pub(super) fn bulk_load(destination: SharedAddr, source: u64, bytes: u32, barrier: SharedAddr) {
    let valid = with_world(|w, c| {
        let valid = check_bulk(w, c, destination.0, source, bytes);
        if valid {
            w.block(c.block).bulk_in_flight += 1;
            let (destination, barrier) = (destination.0, barrier.0);
            w.bulk.push(Bulk::Load { block: c.block, destination, source, bytes, barrier });
        }
        valid
    });
    if !valid {
        illegal_address(source, u64::from(bytes));
    }
}

pub(super) fn bulk_store(destination: u64, source: SharedAddr, bytes: u32) {
    let valid = with_world(|w, c| {
        let valid = check_bulk(w, c, source.0, destination, bytes);
        if valid {
            w.block(c.block).bulk_in_flight += 1;
            let group = w.open_group(c.thread);
            group.reads += 1;
            group.writes += 1;
            let group = group.serial;
            w.bulk.push(Bulk::StoreRead { thread: c.thread, group, destination, source: source.0, bytes });
        }
        valid
    });
    if !valid {
        illegal_address(destination, u64::from(bytes));
    }
}

pub(super) fn bulk_commit_group() {
    with_world(|w, c| {
        w.open_group(c.thread);
        let serial = w.next_group_serial();
        w.thread(c.thread).groups.push_back(Group { serial, ..Group::default() });
    });
}

pub(super) fn bulk_wait_group(pending: u32, reads_only: bool) {
    let done = with_world(|w, c| {
        let thread = w.thread(c.thread);
        thread.bulk_wait = Some((pending, reads_only));
        thread.bulk_wait_is_over()
    });
    if !done {
        suspend(Suspend::Listed);
    }
    with_world(|w, c| w.thread(c.thread).bulk_wait = None);
}

pub(super) fn multimem_sum(address: u64) -> [f32; 4] {
    let sum = with_world(|w, _| {
        if !address.is_multiple_of(16) {
            return None;
        }
        let mut sum = [crate::kernels::numerics::ADD_IDENTITY; 4];
        for replica in w.memory.replicas(address, 16)? {
            // SAFETY: `replicas` gives addresses in live allocations; replicas are aligned as their allocations.
            let four = unsafe { *(replica as *const [f32; 4]) };
            sum = crate::kernels::numerics::add4(sum, four);
        }
        Some(sum)
    });
    match sum {
        Some(sum) => sum,
        None => {
            illegal_address(address, 16);
            unreachable!("an illegal address parks the thread")
        }
    }
}

impl Thread {
    fn bulk_wait_is_over(&self) -> bool {
        let Some((pending, reads_only)) = self.bulk_wait else { return false };
        // The open group is no group yet.
        let committed = self.groups.len().saturating_sub(1);
        let must_be_done = committed.saturating_sub(pending as usize);
        self.groups.iter().take(must_be_done).all(|g| g.reads == 0 && (reads_only || g.writes == 0))
    }
}

impl World {
    fn block(&mut self, index: usize) -> &mut Block {
        self.blocks[index].as_mut().expect("the block is resident")
    }

    fn thread(&mut self, index: usize) -> &mut Thread {
        self.threads[index].as_mut().expect("the thread is live")
    }

    fn next_group_serial(&mut self) -> u64 {
        self.group_serial += 1;
        self.group_serial
    }

    /// The group that the thread's next store belongs to; forgets complete groups at the front.
    fn open_group(&mut self, thread: usize) -> &mut Group {
        if self.thread(thread).groups.is_empty() {
            let serial = self.next_group_serial();
            self.thread(thread).groups.push_back(Group { serial, ..Group::default() });
        }
        let groups = &mut self.thread(thread).groups;
        while groups.len() > 1 && groups[0].writes == 0 {
            groups.pop_front();
        }
        groups.back_mut().expect("just filled")
    }

    fn thread_name(&self, thread: usize) -> String {
        let Some(t) = &self.threads[thread] else { return "a finished thread".to_string() };
        let Some(block) = &self.blocks[t.block] else { return "a finished block".to_string() };
        format!("{}, block {}, thread {}", self.launches[&block.launch].kernel.name(), block.index, t.index)
    }

    fn fail(&mut self, text: String) {
        self.error.get_or_insert(text);
    }

    fn draw_laziness(&mut self) -> u32 {
        if self.options.lazy_turns_max == 0 || self.rng.u32(0..4) != 0 {
            return 0;
        }
        self.rng.u32(1..=self.options.lazy_turns_max)
    }

    /// Whether what is this lazy lets its turn pass.
    fn passes(&mut self, lazy_turns: u32) -> bool {
        lazy_turns > 0 && self.rng.u32(0..=lazy_turns) != 0
    }

    fn wake_block(&mut self, block: usize) {
        let waiters = std::mem::take(&mut self.block(block).waiters);
        self.ready.extend(waiters.into_iter().map(|(thread, _)| thread));
    }

    fn signal_written(&mut self) {
        self.signal_version += 1;
        self.ready.extend(self.system_waiters.drain(..).map(|(thread, _)| thread));
    }

    fn start_blocks(&mut self, world: *mut World) {
        let mut i = 0;
        while i < self.queued.len() {
            let id = self.queued[i];
            while self.has_room(id) {
                self.start_block(id, world);
            }
            let launch = &self.launches[&id];
            if launch.next_block == launch.grid {
                self.queued.remove(i);
            } else {
                i += 1;
            }
        }
    }

    /// Whether a launch has a block to start, and its device room for it.
    fn has_room(&self, id: u64) -> bool {
        let launch = &self.launches[&id];
        let resident = self.resident_threads[launch.device as usize];
        let fits = resident == 0 || resident + launch.block <= self.options.resident_threads_max;
        launch.next_block < launch.grid && fits && self.error.is_none()
    }

    fn start_block(&mut self, id: u64, world: *mut World) {
        let launch = self.launches.get_mut(&id).expect("a queued launch is not complete");
        let index = launch.next_block;
        launch.next_block += 1;
        launch.live_blocks += 1;
        self.resident_threads[launch.device as usize] += launch.block;
        let (threads, grid_dim, kernel) = (launch.block, launch.grid, launch.kernel);
        let params = launch.params.as_ptr().cast::<u8>() as usize;
        let shared = SharedMemory::new(launch.shared_bytes);
        let shared_base = shared.address();
        let block = Block {
            launch: id,
            index,
            shared,
            live_threads: threads,
            waiters: Vec::new(),
            barriers: Default::default(),
            bulk_in_flight: 0,
        };
        let slot = self.free_blocks.pop().unwrap_or_else(|| {
            self.blocks.push(None);
            self.blocks.len() - 1
        });
        self.blocks[slot] = Some(block);
        for thread_idx in 0..threads {
            let thread = self.free_threads.pop().unwrap_or_else(|| {
                self.threads.push(None);
                self.threads.len() - 1
            });
            let current = Box::new(Current {
                world,
                thread,
                block: slot,
                yielder: Cell::new(ptr::null()),
                thread_idx,
                block_idx: index,
                block_dim: threads,
                grid_dim,
                shared_base,
            });
            let me: *const Current = &raw const *current;
            let Some(stack) = self.stacks.pop().or_else(|| DefaultStack::new(STACK_BYTES).ok()) else {
                return self.fail(format!("no address space for the stack of one more of {thread} threads"));
            };
            let fibre = Coroutine::with_stack(stack, move |yielder: &Yielder<(), Suspend>, ()| {
                // SAFETY: `me` lives in the thread's slot for as long as the fibre.
                unsafe { (*me).yielder.set(yielder) };
                // SAFETY: the parameter block is the launch's and lives as long as the launch; the host
                // launched the kernel as it asks.
                unsafe { crate::entry::run(kernel, params as *const u8) };
            });
            let groups = VecDeque::new();
            self.threads[thread] =
                Some(Thread { fibre: Some(fibre), current, block: slot, index: thread_idx, groups, bulk_wait: None });
            self.ready.push(thread);
        }
    }

    fn finish_thread(&mut self, thread: usize, world: *mut World) {
        let block_index = self.thread(thread).block;
        self.threads[thread] = None;
        self.free_threads.push(thread);
        let block = self.block(block_index);
        block.live_threads -= 1;
        if block.live_threads > 0 {
            return;
        }
        let id = block.launch;
        let (guards_hold, in_flight, index) = (block.shared.guards_hold(), block.bulk_in_flight, block.index);
        let name = self.launches[&id].kernel.name();
        if !guards_hold {
            self.fail(format!("{name}, block {index}: a write outside the block's shared memory"));
        }
        if in_flight > 0 {
            self.fail(format!("{name}, block {index}: ended with {in_flight} bulk copies in flight"));
        }
        self.vacate(block_index);
        let launch = &self.launches[&id];
        if launch.live_blocks == 0 && launch.next_block == launch.grid {
            self.launches.remove(&id);
        }
        self.start_blocks(world);
    }

    /// Frees a block's place on its device.
    fn vacate(&mut self, block: usize) {
        let id = self.block(block).launch;
        self.blocks[block] = None;
        self.free_blocks.push(block);
        let launch = self.launches.get_mut(&id).expect("the launch of a resident block is not complete");
        launch.live_blocks -= 1;
        self.resident_threads[launch.device as usize] -= launch.block;
    }

    fn cancel(&mut self, id: u64, world: *mut World) {
        if !self.launches.contains_key(&id) {
            return;
        }
        self.queued.retain(|queued| *queued != id);
        let is_of_launch = |block: &Option<Block>| block.as_ref().is_some_and(|b| b.launch == id);
        let blocks: BTreeSet<usize> = (0..self.blocks.len()).filter(|&b| is_of_launch(&self.blocks[b])).collect();
        let is_of_blocks = |thread: &Option<Thread>| thread.as_ref().is_some_and(|t| blocks.contains(&t.block));
        let threads: BTreeSet<usize> = (0..self.threads.len()).filter(|&t| is_of_blocks(&self.threads[t])).collect();
        self.ready.retain(|thread| !threads.contains(thread));
        self.system_waiters.retain(|(thread, _)| !threads.contains(thread));
        self.bulk.retain(|bulk| match bulk {
            Bulk::Load { block, .. } => !blocks.contains(block),
            Bulk::StoreRead { thread, .. } | Bulk::StoreWrite { thread, .. } => !threads.contains(thread),
        });
        for thread in threads {
            let fibre = self.threads[thread].take().and_then(|t| t.fibre);
            self.free_threads.push(thread);
            // A thread that panicked has none any more.
            if let Some(mut fibre) = fibre {
                // SAFETY: kernels own nothing that must be dropped: no_std, no alloc.
                unsafe { fibre.force_reset() };
                self.stacks.push(fibre.into_stack());
            }
        }
        blocks.into_iter().for_each(|block| self.vacate(block));
        self.launches.remove(&id);
        self.start_blocks(world);
    }

    fn run_bulk(&mut self, index: usize) {
        match self.bulk.swap_remove(index) {
            Bulk::Load { block, destination, source, bytes, barrier } => {
                if !self.memory.is_valid(source, u64::from(bytes)) {
                    let place = self.memory.describe(source, u64::from(bytes));
                    return self.fail(format!("a bulk load reads freed memory: {place}"));
                }
                // SAFETY: both ranges are valid: the source as just checked, the destination when it was issued,
                // and the block is still resident because copies in flight keep it an error to end.
                unsafe { ptr::copy_nonoverlapping(source as *const u8, destination as *mut u8, bytes as usize) };
                let state = mbarrier(self, block, barrier);
                // SAFETY: inside the block's shared memory.
                let completed = unsafe { (*state).complete_bytes(bytes) };
                self.block(block).bulk_in_flight -= 1;
                if completed {
                    self.wake_block(block);
                }
            }
            Bulk::StoreRead { thread, group, destination, source, bytes } => {
                // SAFETY: the source was checked when the store was issued; the block is resident.
                let data = unsafe { std::slice::from_raw_parts(source as *const u8, bytes as usize) };
                self.bulk.push(Bulk::StoreWrite { thread, group, destination, data: data.into() });
                self.count_down(thread, group, true);
            }
            Bulk::StoreWrite { thread, group, destination, data } => {
                if !self.memory.is_valid(destination, data.len() as u64) {
                    let place = self.memory.describe(destination, data.len() as u64);
                    return self.fail(format!("a bulk store writes freed memory: {place}"));
                }
                // SAFETY: as just checked.
                unsafe { ptr::copy_nonoverlapping(data.as_ptr(), destination as *mut u8, data.len()) };
                if let Some(block) = self.threads[thread].as_ref().map(|t| t.block) {
                    self.block(block).bulk_in_flight -= 1;
                }
                self.count_down(thread, group, false);
            }
        }
    }

    fn count_down(&mut self, thread: usize, serial: u64, read: bool) {
        let Some(t) = self.threads[thread].as_mut() else {
            return self.fail("a thread ended with bulk stores in flight".to_string());
        };
        if let Some(group) = t.groups.iter_mut().find(|g| g.serial == serial) {
            if read { group.reads -= 1 } else { group.writes -= 1 }
        }
        if t.bulk_wait_is_over() {
            t.bulk_wait = None;
            self.ready.push(thread);
        }
    }

    fn deadlines(&self) -> impl Iterator<Item = u64> + '_ {
        let blocks = self.blocks.iter().flatten().flat_map(|b| &b.waiters);
        blocks.chain(&self.system_waiters).map(|&(_, deadline)| deadline)
    }

    fn wake_expired(&mut self) {
        let now = self.now_ns;
        let ready = &mut self.ready;
        let mut keep = |&(thread, deadline): &(usize, u64)| {
            if deadline <= now {
                ready.push(thread);
            }
            deadline > now
        };
        self.system_waiters.retain(&mut keep);
        self.blocks.iter_mut().flatten().for_each(|b| b.waiters.retain(&mut keep));
    }
}

/// The machine, as its host drives it.
pub struct Scheduler {
    world: *mut World,
}

// SAFETY: the world is owned by the scheduler alone, and coroutines hold no address of a thread-local over a
// suspension (see the module's argument), so the next step may come from another OS thread.
unsafe impl Send for Scheduler {}

impl Scheduler {
    /// A machine at rest.
    pub fn new(options: MachineOptions) -> Self {
        let devices = options.device_count as usize;
        let world = World {
            rng: fastrand::Rng::with_seed(options.seed),
            now_ns: 0,
            // One more: the host's own memory.
            memory: Memory::new(options.device_count + 1, options.poison_below_bytes),
            launches: BTreeMap::new(),
            next_launch: 0,
            queued: VecDeque::new(),
            resident_threads: std::vec![0; devices],
            blocks: Vec::new(),
            free_blocks: Vec::new(),
            threads: Vec::new(),
            free_threads: Vec::new(),
            ready: Vec::new(),
            bulk: Vec::new(),
            system_waiters: Vec::new(),
            stacks: Vec::new(),
            signal_version: 0,
            signal_adds: 0,
            group_serial: 0,
            error: None,
            options,
        };
        Self { world: Box::into_raw(Box::new(world)) }
    }

    fn world(&self) -> &World {
        // SAFETY: the module's argument; `self` is borrowed for as long as the reference.
        unsafe { &*self.world }
    }

    fn world_mut(&mut self) -> &mut World {
        // SAFETY: as above, mutably.
        unsafe { &mut *self.world }
    }

    /// The memory.
    pub fn memory(&self) -> &Memory {
        &self.world().memory
    }

    /// The memory, to allocate and free.
    pub fn memory_mut(&mut self) -> &mut Memory {
        &mut self.world_mut().memory
    }

    /// The source of every random choice.
    pub fn rng(&mut self) -> &mut fastrand::Rng {
        &mut self.world_mut().rng
    }

    /// How lazy a new stream is.
    pub fn draw_laziness(&mut self) -> u32 {
        self.world_mut().draw_laziness()
    }

    /// Whether what is this lazy lets its turn pass.
    pub fn passes(&mut self, lazy_turns: u32) -> bool {
        self.world_mut().passes(lazy_turns)
    }

    /// Virtual time, ns.
    pub fn now_ns(&self) -> u64 {
        self.world().now_ns
    }

    /// Grows whenever a signal word may have changed.
    pub fn signal_version(&self) -> u64 {
        self.world().signal_version
    }

    /// To be called after the host, a stream or a network wrote a signal word.
    pub fn signal_written(&mut self) {
        self.world_mut().signal_written();
    }

    /// Whether the next addition to a signal is lost; counts it.
    pub fn loses_signal(&mut self) -> bool {
        let world = self.world_mut();
        let index = world.signal_adds;
        world.signal_adds += 1;
        world.options.lose_signal == Some(index)
    }

    /// The first fault of the simulated device, if there was one.
    pub fn error(&self) -> Option<&str> {
        self.world().error.as_deref()
    }

    /// Launches `kernel` with a copy of `params`.
    ///
    /// # Safety
    /// `params` are the kernel's parameter block, and the launch is as the kernel's module states.
    pub unsafe fn launch(
        &mut self,
        kernel: Kernel,
        params: &[u8],
        device: u32,
        grid: u32,
        block: u32,
        shared_bytes: u32,
    ) -> LaunchId {
        let mut aligned = std::vec![0_u128; params.len().div_ceil(16)].into_boxed_slice();
        bytemuck::cast_slice_mut(&mut aligned)[..params.len()].copy_from_slice(params);
        let pointer = self.world;
        let world = self.world_mut();
        let lazy_turns = world.draw_laziness();
        let (next_block, live_blocks) = (0, 0);
        let launch =
            Launch { kernel, params: aligned, grid, block, shared_bytes, device, next_block, live_blocks, lazy_turns };
        let id = world.next_launch;
        world.next_launch += 1;
        if grid > 0 && block > 0 {
            world.launches.insert(id, launch);
            world.queued.push_back(id);
            world.start_blocks(pointer);
        }
        LaunchId(id)
    }

    /// Takes a launch back, unless it has completed: its threads never go on, and its bulk copies in flight are dropped. From
    /// here on it touches no memory.
    pub fn cancel(&mut self, launch: LaunchId) {
        let pointer = self.world;
        self.world_mut().cancel(launch.0, pointer);
    }

    /// Whether a launch has completed, or was taken back.
    pub fn is_done(&self, launch: LaunchId) -> bool {
        !self.world().launches.contains_key(&launch.0)
    }

    /// Units that can go on: threads and bulk copies.
    pub fn ready_count(&self) -> usize {
        self.world().ready.len() + self.world().bulk.len()
    }

    /// Lets virtual time pass, a step's worth.
    pub fn tick(&mut self) {
        let world = self.world_mut();
        world.now_ns += world.rng.u64(1..40);
    }

    /// The next moment at which a waiting thread gives up; `None` if none ever does.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        self.world().deadlines().filter(|at| *at <= LATEST_NS).min()
    }

    /// Jumps to `now_ns` and lets threads whose deadline has come look again.
    pub fn advance_to(&mut self, now_ns: u64) {
        let world = self.world_mut();
        world.now_ns = world.now_ns.max(now_ns);
        world.wake_expired();
    }

    /// Runs one unit, the `choice`-th of [`Scheduler::ready_count`].
    pub fn step(&mut self, choice: usize) {
        let world = self.world_mut();
        if choice >= world.ready.len() {
            let index = choice - world.ready.len();
            return world.run_bulk(index);
        }
        let thread = world.ready[choice];
        let block = world.thread(thread).block;
        let launch = world.block(block).launch;
        let lazy_turns = world.launches[&launch].lazy_turns;
        if world.passes(lazy_turns) {
            return;
        }
        world.ready.swap_remove(choice);
        let mut fibre = world.thread(thread).fibre.take().expect("a ready thread is suspended");
        let me: *const Current = &raw const *world.thread(thread).current;
        let outcome = resume(me, &mut fibre);
        let pointer = self.world;
        let world = self.world_mut();
        match outcome {
            Ok(CoroutineResult::Return(())) => {
                world.stacks.push(fibre.into_stack());
                world.finish_thread(thread, pointer);
            }
            Ok(CoroutineResult::Yield(reason)) => {
                let block = world.thread(thread).block;
                match reason {
                    Suspend::Ready => world.ready.push(thread),
                    Suspend::Block { deadline_ns } => world.block(block).waiters.push((thread, deadline_ns)),
                    Suspend::System { deadline_ns } => world.system_waiters.push((thread, deadline_ns)),
                    Suspend::Listed | Suspend::Parked => {}
                }
                world.thread(thread).fibre = Some(fibre);
            }
            Err(text) => world.fail(format!("{} panicked: {text}", world.thread_name(thread))),
        }
    }
}

/// Resumes a fibre as the current thread. A panic in it comes back as its text.
fn resume(me: *const Current, fibre: &mut Fibre) -> Result<CoroutineResult<Suspend, ()>, String> {
    let outer = CURRENT.replace(me);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fibre.resume(())));
    CURRENT.set(outer);
    outcome.map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no text".to_string())
    })
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` in `new`; nothing runs any more.
        let mut world = unsafe { Box::from_raw(self.world) };
        for fibre in world.threads.iter_mut().flatten().filter_map(|t| t.fibre.as_mut()) {
            if !fibre.done() {
                // SAFETY: kernels own nothing that must be dropped: no_std, no alloc.
                unsafe { fibre.force_reset() };
            }
        }
    }
}

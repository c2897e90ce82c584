//! A lane over the host's memory that dawdles and reorders, and ranks that drive the plugin's functions as NCCL does.

use nccl_loopback_plugin::abi::{ContextConfig, HANDLE_BYTES, Logger, POINTER_CUDA, Rma, SIGNAL_ADD, SIGNAL_INC};
use nccl_loopback_plugin::fault::{Fault, Result};
use nccl_loopback_plugin::mover::{Mover, Place};
use nccl_loopback_plugin::table::table;
use nccl_loopback_plugin::world::{DEADLINE, World};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

static WORLD: World = World::new();
static SEED: AtomicU64 = AtomicU64::new(0);
/// Planted: a lane says that something is done before it is.
static EARLY: AtomicBool = AtomicBool::new(false);
/// Planted: the n-th copy from now on fails; negative: none.
static FAILS: AtomicI64 = AtomicI64::new(-1);

/// The plugin over [`HostLane`].
pub static PLUGIN: Rma = table::<HostLane>();

enum Work {
    Copy { to: Place, from: Place, bytes: usize },
    Read { word: Place, value: u64 },
    Write { word: Place, value: u64 },
}

/// Carries out what is under way in any order, some of it at each poll.
pub struct HostLane {
    random: fastrand::Rng,
    work: Vec<(u64, Work)>,
    next: u64,
}

pub struct Ticket(u64);

/// A word of memory that ranks share.
fn word(address: usize) -> &'static AtomicU64 {
    // SAFETY: tests register memory of whole, aligned words that outlives the plugin's use of it.
    unsafe { AtomicU64::from_ptr(address as *mut u64) }
}

impl HostLane {
    fn ticket(&mut self, work: Work) -> Ticket {
        self.next += 1;
        self.work.push((self.next, work));
        Ticket(self.next)
    }

    fn step(&mut self) {
        if self.work.is_empty() || self.random.u8(..4) == 0 {
            return;
        }
        let (ticket, work) = self.work.swap_remove(self.random.usize(..self.work.len()));
        match work {
            Work::Copy { to, from, bytes } => {
                for offset in (0..bytes).step_by(8) {
                    // ORDER: relaxed: what makes it visible is the signal after it.
                    word(to.address + offset)
                        .store(word(from.address + offset).load(Ordering::Relaxed), Ordering::Relaxed);
                }
            }
            Work::Read { word: place, value } => {
                // ORDER: acquire, as others' data before their signals is to be kept in order by the write.
                let value = word(place.address).load(Ordering::Acquire).wrapping_add(value);
                self.work.push((ticket, Work::Write { word: place, value }));
            }
            // ORDER: release: whoever sees the signal sees the data.
            Work::Write { word: place, value } => word(place.address).store(value, Ordering::Release),
        }
    }
}

impl Mover for HostLane {
    type Ticket = Ticket;

    fn world() -> &'static World {
        &WORLD
    }

    fn open(_queues: usize) -> Result<Self> {
        let seed = SEED.fetch_add(1, Ordering::Relaxed);
        Ok(Self { random: fastrand::Rng::with_seed(seed), work: Vec::new(), next: 0 })
    }

    fn copy(&mut self, to: Place, from: Place, bytes: usize) -> Result<Ticket> {
        if FAILS.fetch_sub(1, Ordering::Relaxed) == 0 {
            return Err(Fault::system("planted: this copy fails"));
        }
        Ok(self.ticket(Work::Copy { to, from, bytes }))
    }

    fn add(&mut self, word: Place, value: u64) -> Result<Ticket> {
        Ok(self.ticket(Work::Read { word, value }))
    }

    fn poll(&mut self, ticket: &mut Ticket) -> Result<bool> {
        self.step();
        let early = EARLY.load(Ordering::Relaxed) && self.random.u8(..8) == 0;
        if early {
            // A copy is put off until nobody looks any more; a signal is still to come.
            self.work.retain(|(number, work)| *number != ticket.0 || !matches!(work, Work::Copy { .. }));
        }
        Ok(early || self.work.iter().all(|(number, _)| *number != ticket.0))
    }
}

/// One test at a time: they share a world, and each ends with everything at zero.
pub struct Alone {
    _guard: MutexGuard<'static, ()>,
}

pub fn alone(seed: u64) -> Alone {
    static TURN: Mutex<()> = Mutex::new(());
    let guard = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    SEED.store(seed, Ordering::Relaxed);
    Alone { _guard: guard }
}

impl Alone {
    pub fn early(&self, early: bool) {
        EARLY.store(early, Ordering::Relaxed);
    }

    pub fn fail(&self, after: i64) {
        FAILS.store(after, Ordering::Relaxed);
    }

    pub fn world(&self) -> &'static World {
        &WORLD
    }

    /// What is alive: instances, listeners, communicators, contexts, regions, requests, groups, words.
    pub fn alive(&self) -> [i64; 8] {
        let alive = &WORLD.alive;
        let counts =
            [&alive.instances, &alive.listeners, &alive.colls, &alive.contexts, &alive.regions, &alive.requests];
        let mut all = [0; 8];
        for (place, count) in all.iter_mut().zip(counts) {
            *place = count.load(Ordering::Relaxed);
        }
        all[6] = WORLD.groups() as i64;
        all[7] = WORLD.words() as i64;
        all
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        EARLY.store(false, Ordering::Relaxed);
        FAILS.store(-1, Ordering::Relaxed);
        WORLD.set_deadline(DEADLINE);
    }
}

/// A word of a region.
pub type At = (*mut c_void, usize);

/// Zeroed words to be registered.
pub struct Memory(pub Vec<AtomicU64>);

impl Memory {
    pub fn new(words: usize) -> Self {
        Self((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    pub fn bytes(&self) -> usize {
        self.0.len() * 8
    }
}

/// The handles that ranks exchange.
pub struct Exchange {
    ranks: usize,
    arrived: Mutex<usize>,
    changed: Condvar,
    handles: Mutex<Vec<[u8; HANDLE_BYTES]>>,
}

impl Exchange {
    pub fn new(ranks: usize) -> Self {
        Self {
            ranks,
            arrived: Mutex::new(0),
            changed: Condvar::new(),
            handles: Mutex::new(vec![[0; HANDLE_BYTES]; ranks]),
        }
    }

    pub fn all(&self, rank: usize, own: [u8; HANDLE_BYTES]) -> Vec<[u8; HANDLE_BYTES]> {
        self.handles.lock().unwrap()[rank] = own;
        self.meet();
        self.handles.lock().unwrap().clone()
    }

    /// Waits for the others: not for ever, as one may have failed.
    pub fn meet(&self) {
        let mut arrived = self.arrived.lock().unwrap();
        *arrived += 1;
        let all = arrived.next_multiple_of(self.ranks);
        self.changed.notify_all();
        while *arrived < all {
            let (guard, timeout) = self.changed.wait_timeout(arrived, Duration::from_secs(30)).unwrap();
            assert!(!timeout.timed_out(), "the others did not come");
            arrived = guard;
        }
    }
}

pub fn ok(code: c_int) {
    assert_eq!(code, 0);
}

/// A rank that has connected.
pub struct Rank {
    pub instance: *mut c_void,
    pub coll: *mut c_void,
    pub context: *mut c_void,
}

// SAFETY: of all calls here: the plugin's own handles and places for results.
impl Rank {
    pub fn instance(comm: u64, logger: Option<Logger>) -> *mut c_void {
        let mut instance = null_mut();
        // SAFETY: see above.
        unsafe { ok((PLUGIN.init)(&mut instance, comm, logger)) };
        instance
    }

    pub fn listen(instance: *mut c_void) -> (*mut c_void, [u8; HANDLE_BYTES]) {
        let (mut listener, mut handle) = (null_mut(), [0u8; HANDLE_BYTES]);
        // SAFETY: see above.
        unsafe { ok((PLUGIN.listen)(instance, 0, handle.as_mut_ptr().cast(), &mut listener)) };
        (listener, handle)
    }

    /// The code, and the communicator if it is 0.
    pub fn connect(
        handles: &mut [[u8; HANDLE_BYTES]],
        ranks: usize,
        rank: usize,
        listener: *mut c_void,
    ) -> (c_int, *mut c_void) {
        let pointers: Vec<*mut c_void> = handles.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
        let mut coll = null_mut();
        // The instance is another's, as NCCL has it for host RMA.
        let stranger = 8 as *mut c_void;
        // SAFETY: see above.
        let code = unsafe {
            (PLUGIN.connect)(stranger, pointers.as_ptr(), ranks as c_int, rank as c_int, listener, &mut coll)
        };
        (code, coll)
    }

    pub fn new(exchange: &Exchange, ranks: usize, rank: usize, contexts: usize) -> Self {
        let instance = Self::instance(7, None);
        let (listener, handle) = Self::listen(instance);
        let mut handles = exchange.all(rank, handle);
        let (code, coll) = Self::connect(&mut handles, ranks, rank, listener);
        ok(code);
        let mut context = null_mut();
        let config = ContextConfig { contexts: contexts as c_int, traffic_class: -1, rank_stride: 1 };
        // SAFETY: see above.
        unsafe {
            ok((PLUGIN.close_listen)(listener));
            ok((PLUGIN.create_context)(coll, &config, &mut context));
        }
        Self { instance, coll, context }
    }

    /// The code, and the region if it is 0.
    pub fn register(&self, memory: &Memory) -> (c_int, *mut c_void) {
        let mut region = null_mut();
        let data = memory.0.as_ptr().cast_mut().cast();
        // SAFETY: see above; the memory outlives its registration in all tests.
        let code = unsafe { (PLUGIN.reg_mr_sym)(self.coll, data, memory.bytes(), POINTER_CUDA, 0, &mut region) };
        (code, region)
    }

    /// Words, not bytes.
    pub fn put(&self, index: usize, peer: usize, from: At, to: At, words: usize) -> (c_int, *mut c_void) {
        let (mut request, from_offset, to_offset) = (null_mut(), from.1 as u64 * 8, to.1 as u64 * 8);
        // SAFETY: see above.
        let code = unsafe {
            (PLUGIN.iput)(
                self.context,
                index as c_int,
                from_offset,
                from.0,
                words * 8,
                to_offset,
                to.0,
                peer as u32,
                0,
                &mut request,
            )
        };
        (code, request)
    }

    /// Words, not bytes; a value of 0 stands for the increment.
    pub fn put_signal(
        &self,
        index: usize,
        peer: usize,
        data: Option<(At, At, usize)>,
        signal: At,
        value: u64,
        strong: bool,
    ) -> (c_int, *mut c_void) {
        let ((from, from_word), (to, to_word), words) = data.unwrap_or(((null_mut(), 0), (null_mut(), 0), 0));
        let mut request = null_mut();
        // SAFETY: see above.
        let code = unsafe {
            (PLUGIN.iput_signal)(
                self.context,
                index as c_int,
                from_word as u64 * 8,
                from,
                words * 8,
                to_word as u64 * 8,
                to,
                peer as u32,
                signal.1 as u64 * 8,
                signal.0,
                // An increment comes with any value.
                if value == 0 { 99 } else { value },
                if value == 0 { SIGNAL_INC } else { SIGNAL_ADD },
                strong,
                0,
                &mut request,
            )
        };
        (code, request)
    }

    pub fn get(&self, index: usize, peer: usize, from: At, to: At, words: usize) -> (c_int, *mut c_void) {
        let mut request = null_mut();
        // SAFETY: see above.
        let code = unsafe {
            (PLUGIN.iget)(
                self.context,
                index as c_int,
                from.1 as u64 * 8,
                from.0,
                words * 8,
                to.1 as u64 * 8,
                to.0,
                peer as u32,
                0,
                &mut request,
            )
        };
        (code, request)
    }

    pub fn test(&self, request: *mut c_void) -> (c_int, bool) {
        let mut done = 0;
        // SAFETY: see above.
        let code = unsafe { (PLUGIN.test)(self.coll, request, &mut done) };
        (code, done != 0)
    }

    pub fn wait(&self, request: *mut c_void) {
        loop {
            match self.test(request) {
                (0, false) => std::thread::yield_now(),
                (code, _) => return ok(code),
            }
        }
    }

    pub fn progress(&self) {
        // SAFETY: see above.
        unsafe { ok(PLUGIN.rma_progress.unwrap()(self.context)) };
    }

    pub fn deregister(&self, region: *mut c_void) -> c_int {
        // SAFETY: see above.
        unsafe { (PLUGIN.dereg_mr_sym)(self.coll, region) }
    }

    /// Gives everything back.
    pub fn close(self, regions: &[*mut c_void]) {
        for region in regions {
            ok(self.deregister(*region));
        }
        // SAFETY: see above.
        unsafe {
            ok((PLUGIN.destroy_context)(self.context));
            ok((PLUGIN.close_coll)(self.coll));
            ok((PLUGIN.finalize)(self.instance));
        }
    }
}

//! Communicators: their lock, their deadlines, their end.

use super::config::Config;
use super::error::{NcclError, Result, ResultCode};
use super::group;
use super::layout::{PROPERTIES, Record};
use super::library::{Ability, Library};
use super::memory::Memory;
use super::properties::Properties;
use super::sys;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The first pause between two looks at a call that is under way; it doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_micros(20);

/// The longest such pause.
const PAUSE_MAX: Duration = Duration::from_millis(2);

/// What the ranks of a communicator find each other by. One rank makes it, the others get its bytes by other means.
#[derive(Debug, Clone, Copy)]
pub struct UniqueId {
    raw: sys::ncclUniqueId,
}

impl UniqueId {
    /// Its size.
    pub const BYTES: usize = 128;

    /// A new one. It opens a port at once, on the interface that `NCCL_SOCKET_IFNAME` names.
    ///
    /// # Errors
    ///
    /// `Call`, for example without a network interface.
    pub fn new(library: &Library) -> Result<Self> {
        let mut raw = sys::ncclUniqueId { internal: [0; Self::BYTES] };
        // SAFETY: `raw` outlives the call, which is synchronous.
        let code = unsafe { (library.core().ncclGetUniqueId)(&mut raw) };
        library.check("ncclGetUniqueId", code)?;
        Ok(Self { raw })
    }

    /// The one that another rank's [`to_bytes`](Self::to_bytes) gave.
    pub const fn from_bytes(internal: [u8; Self::BYTES]) -> Self {
        Self { raw: sys::ncclUniqueId { internal } }
    }

    /// What to send to the other ranks.
    pub const fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.raw.internal
    }
}

/// A communicator of one rank. Clones are the same communicator; it is destroyed when they, its windows and its device communicators
/// are gone.
///
/// Each call holds its lock. A call within an open [`Group`](super::Group) of the thread is refused: issue it through the group.
#[derive(Debug, Clone)]
pub struct Comm {
    pub(crate) inner: Arc<CommInner>,
}

/// What owners of a communicator share.
#[derive(Debug)]
pub(crate) struct CommInner {
    pub(crate) library: Library,
    rank: u32,
    rank_count: u32,
    timeout: Duration,
    properties: Option<Properties>,
    abort_asked: AtomicBool,
    state: Mutex<State>,
    /// What was dropped and waits for the lock.
    retired: Mutex<Vec<Retired>>,
}

/// What the lock guards.
#[derive(Debug)]
pub(crate) struct State {
    raw: sys::ncclComm_t,
    /// Why `raw` is no longer there.
    gone: Option<String>,
    /// Device communicators that live: no window goes before them.
    device_comm_count: usize,
    /// Windows whose owners are gone.
    leaving: Vec<(sys::ncclWindow_t, Memory)>,
    /// Windows that live: address, bytes, flags, owner.
    pub(crate) registered: Vec<super::window::Entry>,
}

/// Something whose owner is gone.
#[derive(Debug)]
pub(crate) enum Retired {
    Window(sys::ncclWindow_t, Memory),
    DeviceComm(Box<[u64]>),
}

// SAFETY: NCCL's handles belong to no thread; the lock sees to it that one thread at a time uses them.
unsafe impl Send for State {}
// SAFETY: as above; the handles in it are only handed to NCCL under the communicator's lock.
unsafe impl Send for Retired {}

impl State {
    /// The handle, or why there is none.
    pub(crate) fn raw(&self) -> Result<sys::ncclComm_t> {
        match &self.gone {
            Some(reason) => Err(NcclError::Aborted { reason: reason.clone() }),
            None => Ok(self.raw),
        }
    }

    pub(crate) fn device_comm_created(&mut self) {
        self.device_comm_count += 1;
    }
}

impl Comm {
    /// Joins the communicator `id` of `rank_count` ranks as `rank`, with the thread's current GPU. Returns when all ranks have joined.
    ///
    /// # Errors
    ///
    /// `Usage` for a rank that is none, `TooOld` for a choice that the version does not have, `Timeout` if a rank stays away, `Call` if
    /// NCCL fails. Nothing is left behind.
    pub fn init_rank(library: &Library, id: UniqueId, rank_count: u32, rank: u32, config: &Config) -> Result<Self> {
        let (Ok(c_rank_count), Ok(c_rank)) = (c_int::try_from(rank_count), c_int::try_from(rank)) else {
            return Err(NcclError::Usage(format!("{rank_count} ranks are too many")));
        };
        if rank >= rank_count {
            return Err(NcclError::Usage(format!("rank {rank} of {rank_count}")));
        }
        group::refuse_within()?;
        let mut raw_config = config.build(library)?;
        let mut raw = std::ptr::null_mut();
        let config_pointer = raw_config.record.as_mut_ptr().cast();
        // SAFETY: `raw` is written before the call returns, also if it does not block; the configuration is copied.
        let code =
            unsafe { (library.core().ncclCommInitRankConfig)(&mut raw, c_rank_count, id.raw, c_rank, config_pointer) };
        Self::adopt(library, raw, "ncclCommInitRankConfig", code, rank_count, rank, config)
    }

    /// Makes an owner of a handle that NCCL just gave, and waits until it is ready.
    fn adopt(
        library: &Library,
        raw: sys::ncclComm_t,
        call: &'static str,
        code: c_int,
        rank_count: u32,
        rank: u32,
        config: &Config,
    ) -> Result<Self> {
        if raw.is_null() {
            library.check(call, code)?;
            return Err(library.failure(call, ResultCode::INTERNAL_ERROR, "it gave no communicator"));
        }
        let state = State { raw, gone: None, device_comm_count: 0, leaving: Vec::new(), registered: Vec::new() };
        let mut inner = CommInner {
            library: library.clone(),
            rank,
            rank_count,
            timeout: config.timeout,
            properties: None,
            abort_asked: AtomicBool::new(false),
            state: Mutex::new(state),
            retired: Mutex::new(Vec::new()),
        };
        let mut state = inner.lock()?;
        if let Err(error) = inner.settle(&mut state, call, code) {
            inner.abort(&mut state, &error.to_string());
            return Err(error);
        }
        let properties = match library.require(Ability::Properties).map(|()| inner.query(&state)) {
            Ok(Err(error)) => {
                // Its end would wait for the other ranks, which go on.
                inner.abort(&mut state, &error.to_string());
                return Err(error);
            }
            Ok(Ok(properties)) => Some(properties),
            Err(_) => None,
        };
        drop(state);
        inner.properties = properties;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Divides the communicator: ranks that give the same `color` get a communicator of their own, in the order of `key` (then of rank);
    /// with `None` a rank gets none. All ranks call it. Windows belong to one communicator: register them anew on the child.
    ///
    /// # Errors
    ///
    /// As [`init_rank`](Self::init_rank).
    pub fn split(&self, color: Option<u32>, key: i32, config: &Config) -> Result<Option<Self>> {
        /// `NCCL_SPLIT_NOCOLOR`.
        const NO_COLOR: c_int = -1;
        const CALL: &str = "ncclCommSplit";
        let c_color = super::config::count("color", color)?.unwrap_or(NO_COLOR);
        let library = &self.inner.library;
        let mut raw_config = config.build(library)?;
        let mut state = self.inner.lock()?;
        let raw = state.raw()?;
        let child = Landing::new(std::ptr::null_mut());
        let config_pointer = raw_config.record.as_mut_ptr().cast();
        // SAFETY: `raw` lives and is locked; `child` outlives whatever the call leaves under way; the configuration is copied.
        let code = unsafe { (library.core().ncclCommSplit)(raw, c_color, key, child.pointer(), config_pointer) };
        let settled = self.inner.settle(&mut state, CALL, code);
        drop(state);
        let child = child.collect(&settled);
        match (settled, child) {
            (Err(error), Some(child)) if !child.is_null() => {
                // SAFETY: a handle that NCCL gave for a split that failed; nobody else has it.
                unsafe { (library.core().ncclCommAbort)(child) };
                Err(error)
            }
            (Err(error), _) => Err(error),
            (Ok(()), _) if color.is_none() => Ok(None),
            (Ok(()), child) => {
                let child = child.unwrap_or(std::ptr::null_mut());
                let mut split = Self::adopt(library, child, CALL, ResultCode::SUCCESS.0, 1, 0, config)?;
                let inner = Arc::get_mut(&mut split.inner).expect("not shared yet");
                (inner.rank, inner.rank_count) = inner.place()?;
                Ok(Some(split))
            }
        }
    }

    /// The library.
    pub fn library(&self) -> &Library {
        &self.inner.library
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.inner.rank
    }

    /// All ranks.
    pub fn rank_count(&self) -> u32 {
        self.inner.rank_count
    }

    /// What it can do.
    ///
    /// # Errors
    ///
    /// `TooOld` before 2.29.7, `Aborted`, `Call`.
    pub fn properties(&self) -> Result<Properties> {
        let state = self.inner.lock()?;
        self.inner.query(&state)
    }

    /// How it fares: success, or what failed since it was made. Failures of host RMA's network thread do not show here: time what waits
    /// for its signals.
    ///
    /// # Errors
    ///
    /// `Aborted`, or `Call` if the inquiry itself fails.
    pub fn async_error(&self) -> Result<ResultCode> {
        let state = self.inner.lock()?;
        self.inner.state_of(state.raw()?)
    }

    /// Ends it now, whatever it does; kernels of NCCL on the GPU end too. Its windows and device communicators become invalid, and each
    /// further call gives `Aborted`. A call that is under way on a non-blocking communicator is ended first.
    pub fn abort(&self) {
        // ORDER: relaxed, a request; whoever waits in `settle` holds the lock, and the lock orders the rest.
        self.inner.abort_asked.store(true, Ordering::Relaxed);
        let mut state = self.inner.lock_any();
        self.inner.abort(&mut state, "at the caller's wish");
    }

    /// Waits until all that was enqueued is done on all ranks, and destroys it. Dropping does the same, and is silent about failures.
    ///
    /// # Errors
    ///
    /// `Usage` if a clone, a window or a device communicator still holds it, which then ends it later. `Timeout`, `Call`: it was aborted.
    pub fn finalize(self) -> Result<()> {
        let inner = Arc::try_unwrap(self.inner).map_err(|_| {
            NcclError::Usage("a communicator that windows, device communicators or clones hold cannot end".to_owned())
        })?;
        group::refuse_within()?;
        inner.tear_down()
    }
}

impl CommInner {
    /// The lock of a communicator that lives.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, State>> {
        group::refuse_within()?;
        let mut state = self.lock_any();
        state.raw()?;
        self.reap(&mut state);
        Ok(state)
    }

    /// The lock, come what may. A panic of another holder leaves nothing half done: NCCL's calls do not unwind.
    fn lock_any(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails unless the communicator is known to have host RMA.
    pub(crate) fn require_host_rma(&self) -> Result<()> {
        match &self.properties {
            Some(properties) if !properties.host_rma => Err(NcclError::Unsupported {
                what: "host RMA",
                reason: if properties.device_api {
                    "hostRmaSupport is false: no RMA context was configured, NCCL_RMA_DISABLE or NCCL_CROSS_NIC=0 is set, or \
                     no network plugin has RMA"
                        .to_owned()
                } else {
                    self.why_no_windows()
                },
            }),
            _ => Ok(()),
        }
    }

    pub(crate) fn initial_properties(&self) -> Option<&Properties> {
        self.properties.as_ref()
    }

    /// The likely cause of a lack of symmetric memory.
    pub(crate) fn why_no_windows(&self) -> String {
        let culprits: Vec<String> = super::hazards()
            .into_iter()
            .filter(|h| h.forbids_windows)
            .map(|h| format!("{}={}", h.variable, h.value))
            .collect();
        let seen = match &self.properties {
            Some(p) => format!("deviceApiSupport is {}, {} LSA teams, GIN {:?}", p.device_api, p.lsa_team_count, p.gin),
            None => format!("NCCL {} does not tell more", self.library.version()),
        };
        if culprits.is_empty() {
            format!(
                "symmetric memory needs CUDA P2P between all GPUs of a node and, with more than one LSA team, GIN on all ranks ({seen})"
            )
        } else {
            format!("the environment has {} ({seen})", culprits.join(", "))
        }
    }

    pub(crate) fn rank_count(&self) -> u32 {
        self.rank_count
    }

    /// `(rank, rank count)`, as NCCL says.
    fn place(&self) -> Result<(u32, u32)> {
        let state = self.lock()?;
        let raw = state.raw()?;
        let (mut rank, mut rank_count) = (0, 0);
        // SAFETY: the communicator lives and is locked; `rank` outlives the call.
        let code = unsafe { (self.library.core().ncclCommUserRank)(raw, &mut rank) };
        self.library.check("ncclCommUserRank", code)?;
        // SAFETY: as above.
        let code = unsafe { (self.library.core().ncclCommCount)(raw, &mut rank_count) };
        self.library.check("ncclCommCount", code)?;
        Ok((rank.max(0) as u32, rank_count.max(0) as u32))
    }

    /// What `ncclCommGetAsyncError` says.
    fn state_of(&self, raw: sys::ncclComm_t) -> Result<ResultCode> {
        let mut code = 0;
        // SAFETY: `raw` lives, the lock is held, `code` outlives the call.
        let result = unsafe { (self.library.core().ncclCommGetAsyncError)(raw, &mut code) };
        self.library.check("ncclCommGetAsyncError", result)?;
        Ok(ResultCode(code))
    }

    /// Sees a call through: waits, up to the deadline, while a non-blocking communicator is still at it. It is asked even if the call
    /// says that all is done: `ncclCommSplit` of 2.32.3 gives success at once, and writes the child's handle later.
    ///
    /// After a timeout the communicator is aborted.
    pub(crate) fn settle(&self, state: &mut State, call: &'static str, code: c_int) -> Result<()> {
        let began = Instant::now();
        let mut pause = PAUSE_MIN;
        let mut code = ResultCode(code);
        if code == ResultCode::SUCCESS {
            code = self.state_of(state.raw()?)?;
        }
        while code == ResultCode::IN_PROGRESS {
            // ORDER: relaxed, see `Comm::abort`.
            if self.abort_asked.load(Ordering::Relaxed) {
                let reason = format!("at the caller's wish, during {call}");
                self.abort(state, &reason);
                return Err(NcclError::Aborted { reason });
            }
            let waited = began.elapsed();
            if waited >= self.timeout {
                let error = NcclError::Timeout { call, waited };
                self.abort(state, &error.to_string());
                return Err(error);
            }
            std::thread::sleep(pause.min(self.timeout - waited));
            pause = (pause * 2).min(PAUSE_MAX);
            code = self.state_of(state.raw()?)?;
        }
        if code == ResultCode::SUCCESS { Ok(()) } else { Err(self.library.failure(call, code, "")) }
    }

    /// Aborts, once.
    fn abort(&self, state: &mut State, reason: &str) {
        if state.gone.is_some() {
            return;
        }
        state.gone = Some(reason.to_owned());
        // SAFETY: `raw` lives, the lock is held, and `gone` keeps everybody from using it again.
        unsafe { (self.library.core().ncclCommAbort)(state.raw) };
        // NCCL freed its side of them.
        state.leaving.clear();
        state.registered.clear();
        state.device_comm_count = 0;
    }

    fn query(&self, state: &State) -> Result<Properties> {
        let functions = self.library.inquiry()?;
        let layout = PROPERTIES.at(self.library.version()).expect("as old as the ability");
        let mut record = Record::new(layout);
        // SAFETY: the communicator lives and is locked; the struct has the size and version that its head says.
        let code = unsafe { (functions.ncclCommQueryProperties)(state.raw()?, record.as_mut_ptr().cast()) };
        self.library.check("ncclCommQueryProperties", code)?;
        Ok(Properties::read(&record))
    }

    /// Takes over what a dropped owner leaves, now or when the thread's group ends.
    pub(crate) fn retire(&self, retired: Retired) {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner).push(retired);
        if !group::is_open() {
            self.reap(&mut self.lock_any());
        }
    }

    /// Ends what was left: device communicators, and windows once no device communicator lives.
    pub(crate) fn reap(&self, state: &mut State) {
        let retired = std::mem::take(&mut *self.retired.lock().unwrap_or_else(PoisonError::into_inner));
        for item in retired {
            match item {
                Retired::Window(window, memory) => state.leaving.push((window, memory)),
                Retired::DeviceComm(words) => {
                    state.device_comm_count = state.device_comm_count.saturating_sub(1);
                    if let (Ok(raw), Ok(functions)) = (state.raw(), self.library.devices()) {
                        // SAFETY: the communicator lives and is locked; NCCL wrote the struct, and its owner was the last.
                        let code = unsafe { (functions.ncclDevCommDestroy)(raw, words.as_ptr().cast()) };
                        // A failure cannot be reported from a drop; NCCL logs it.
                        let _ = self.settle(state, "ncclDevCommDestroy", code);
                    }
                }
            }
        }
        if state.device_comm_count > 0 {
            return;
        }
        for (window, memory) in std::mem::take(&mut state.leaving) {
            if let (Ok(raw), Ok(functions)) = (state.raw(), self.library.windows()) {
                // SAFETY: the communicator lives and is locked; the window is of this communicator and its owner was the last.
                let code = unsafe { (functions.ncclCommWindowDeregister)(raw, window) };
                let _ = self.settle(state, "ncclCommWindowDeregister", code);
            }
            drop(memory);
        }
    }

    /// Flushes and destroys, or aborts.
    fn tear_down(&self) -> Result<()> {
        let mut state = self.lock_any();
        self.reap(&mut state);
        let Ok(raw) = state.raw() else { return Ok(()) };
        if std::thread::panicking() {
            self.abort(&mut state, "its owner panicked");
            return Ok(());
        }
        // SAFETY: the communicator lives and is locked, and its last owner is here.
        let code = unsafe { (self.library.core().ncclCommFinalize)(raw) };
        if let Err(error) = self.settle(&mut state, "ncclCommFinalize", code) {
            self.abort(&mut state, &error.to_string());
            return Err(error);
        }
        state.gone = Some("it was destroyed".to_owned());
        // SAFETY: as above; `gone` keeps everybody from using it again.
        let code = unsafe { (self.library.core().ncclCommDestroy)(raw) };
        self.library.check("ncclCommDestroy", code)
    }
}

impl Drop for CommInner {
    fn drop(&mut self) {
        if group::is_open() {
            // A group belongs to its thread: from another one, the end is not deferred to the group's.
            std::thread::scope(|scope| scope.spawn(|| self.tear_down()).join().ok());
        } else {
            // Failures have nobody to go to; NCCL logs them.
            let _ = self.tear_down();
        }
    }
}

/// Where NCCL writes a result, maybe after the call returned.
pub(crate) struct Landing<T> {
    pointer: *mut T,
}

impl<T> Landing<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { pointer: Box::into_raw(Box::new(value)) }
    }

    pub(crate) fn pointer(&self) -> *mut T {
        self.pointer
    }

    /// What was written. After an abort it is left alone, for whoever may still write there.
    pub(crate) fn collect(self, settled: &Result<()>) -> Option<T> {
        if matches!(settled, Err(NcclError::Timeout { .. } | NcclError::Aborted { .. })) {
            return None;
        }
        // SAFETY: came from `Box::into_raw`, once; the call is over, so nobody else writes there.
        Some(*unsafe { Box::from_raw(self.pointer) })
    }
}

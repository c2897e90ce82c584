//! NCCL's functions.

use crate::group::{self, Turn};
use crate::state::{
    IN_PROGRESS, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, SUCCESS, called, count, refuse, setting, state,
};
use crate::structs::Foreign;
use crate::world::{Parts, World};
use std::alloc::Layout;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

/// `ncclWaitSignalDesc_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SignalWait {
    count: c_int,
    peer: c_int,
    index: c_int,
    context: c_int,
}

/// An `ncclComm_t` points to it.
pub struct Comm {
    world: Arc<World>,
    rank: usize,
    /// The rank in the communicator that this one descends from by splits: what the log tells ranks apart by.
    first_rank: i64,
    blocking: bool,
    rma_contexts: c_int,
    rma_signals: c_int,
    next_step: u64,
    pending: Option<Pending>,
    /// What the last non-blocking call came to.
    outcome: c_int,
    windows: HashMap<usize, Part>,
    device_comm_count: i64,
}

/// A window's part at one rank.
#[derive(Clone, Copy)]
struct Part {
    start: usize,
    bytes: usize,
    flags: c_int,
}

/// An `ncclWindow_t` points to it.
pub struct Window {
    rank: usize,
    first_rank: i64,
    parts: Vec<Part>,
}

type Finish = Box<dyn FnOnce(&mut Comm, Parts) -> c_int>;

/// A call that a non-blocking communicator is at.
struct Pending {
    step: u64,
    polls: i64,
    finish: Finish,
}

fn version() -> u32 {
    setting("version") as u32
}

/// The communicator of a handle. The bindings' lock keeps other threads away from it.
fn comm<'a>(handle: *mut Comm) -> Result<&'a mut Comm, c_int> {
    // SAFETY: a handle that this library gave and that was not destroyed: a test that breaks this is to be found by its counters.
    unsafe { handle.as_mut() }.ok_or(INVALID_ARGUMENT)
}

fn window<'a>(handle: *mut Window) -> Result<&'a Window, c_int> {
    // SAFETY: as `comm`.
    unsafe { handle.as_ref() }.ok_or(INVALID_ARGUMENT)
}

/// Writes a result through a caller's pointer.
fn give<T>(place: *mut T, value: T) {
    // SAFETY: the caller gave the place for this result.
    unsafe { place.write(value) };
}

fn code(outcome: Result<c_int, c_int>) -> c_int {
    outcome.unwrap_or_else(|code| code)
}

/// Memory of the caller's, or of a window.
fn bytes_at(start: usize, bytes: usize) -> Vec<u8> {
    // SAFETY: the caller states that so much is there.
    unsafe { std::slice::from_raw_parts(start as *const u8, bytes) }.to_vec()
}

fn put_bytes(start: usize, data: &[u8]) {
    // SAFETY: the caller states that so much room is there; the source is a copy, so they do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), start as *mut u8, data.len()) };
}

impl Comm {
    /// A step that all ranks take: `finish` runs once all have brought their part.
    fn together(
        &mut self,
        call: &'static str,
        part: Vec<u8>,
        finish: impl FnOnce(&mut Self, Parts) -> c_int + 'static,
    ) -> Result<c_int, c_int> {
        if self.pending.is_some() {
            count("misuses", 1);
            return Err(refuse(INVALID_USAGE, format!("{call} while another call is in progress")));
        }
        let step = self.next_step;
        self.next_step += 1;
        self.world.bring(step, self.rank, call, part)?;
        if self.blocking {
            let parts = self.world.wait(step)?;
            return Ok(finish(self, parts));
        }
        let polls = state().slow.get(call).copied().unwrap_or(0);
        self.pending = Some(Pending { step, polls, finish: Box::new(finish) });
        Ok(self.poll())
    }

    /// Where a non-blocking call stands.
    fn poll(&mut self) -> c_int {
        let Some(pending) = &mut self.pending else { return self.outcome };
        if pending.polls != 0 {
            pending.polls -= 1;
            return IN_PROGRESS;
        }
        let Some(parts) = self.world.parts(pending.step) else { return IN_PROGRESS };
        let pending = self.pending.take().expect("just there");
        self.outcome = (pending.finish)(self, parts);
        std::mem::replace(&mut self.outcome, SUCCESS)
    }

    /// The symmetric window that contains a range.
    fn holds(&self, start: usize, bytes: usize) -> bool {
        let within = |p: &Part| p.flags & 1 != 0 && p.start <= start && start + bytes <= p.start + p.bytes;
        self.windows.values().any(within)
    }

    fn check_rma(&self, peer: c_int, index: c_int, context: c_int) -> Result<usize, c_int> {
        if setting("host_rma") == 0 {
            return Err(refuse(INVALID_USAGE, "no host RMA"));
        }
        let peer = usize::try_from(peer).ok().filter(|p| *p < self.world.rank_count);
        let known = (0..self.rma_signals).contains(&index) && (0..self.rma_contexts).contains(&context);
        peer.filter(|_| known).ok_or_else(|| refuse(INVALID_ARGUMENT, format!("signal {index} of context {context}")))
    }
}

fn free_comm(handle: *mut Comm) {
    count("comms", -1);
    // SAFETY: came from `Box::into_raw`, and the caller gives it up.
    drop(unsafe { Box::from_raw(handle) });
}

fn new_comm(world: Arc<World>, rank: usize, first_rank: i64, config: &Foreign) -> *mut Comm {
    count("comms", 1);
    if config.read::<c_int>(40) != 0 {
        count("misuses", 1);
    }
    let has = |since| config.version >= since;
    Box::into_raw(Box::new(Comm {
        world,
        rank,
        first_rank,
        blocking: config.int_or(16, 1) != 0,
        rma_contexts: if has(22907) { config.int_or(84, 1) } else { 1 },
        rma_signals: if has(23102) { config.int_or(100, 1) } else { 1 },
        next_step: 0,
        pending: None,
        outcome: SUCCESS,
        windows: HashMap::new(),
        device_comm_count: 0,
    }))
}

/// `ncclGetVersion`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetVersion(out: *mut c_int) -> c_int {
    give(out, version() as c_int);
    SUCCESS
}

/// `ncclGetUniqueId`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetUniqueId(out: *mut UniqueId) -> c_int {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let run = || {
        called(-1, "ncclGetUniqueId", "")?;
        let mut id = [0; 128];
        // ORDER: relaxed, a number that is given once.
        id[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_ne_bytes());
        give(out, UniqueId(id));
        Ok(SUCCESS)
    };
    code(run())
}

/// `ncclGetErrorString`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(result: c_int) -> *const c_char {
    if result == SUCCESS { c"no error".as_ptr() } else { c"an error of the fake".as_ptr() }
}

/// `ncclGetLastError`. Its text is never freed, as a caller may keep it.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: *mut Comm) -> *const c_char {
    CString::new(state().last_error.clone()).unwrap_or_default().into_raw()
}

/// `ncclCommInitRankConfig`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRankConfig(
    out: *mut *mut Comm,
    rank_count: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut c_void,
) -> c_int {
    const CALL: &str = "ncclCommInitRankConfig";
    let run = || {
        give(out, std::ptr::null_mut());
        called(i64::from(rank), CALL, &format!("{rank} of {rank_count}"))?;
        let config = Foreign::config(config, version())?;
        let world = World::named(&id.0, rank_count as usize);
        let handle = new_comm(world, rank as usize, i64::from(rank), &config);
        give(out, handle);
        let outcome = comm(handle)?.together(CALL, Vec::new(), |_, _| SUCCESS);
        if comm(handle)?.blocking && outcome != Ok(SUCCESS) {
            give(out, std::ptr::null_mut());
            free_comm(handle);
        }
        outcome
    };
    code(run())
}

/// `ncclCommSplit`. With `hasty_split` it says success while a non-blocking parent is still at it, as that of 2.32.3 does.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommSplit(
    parent: *mut Comm,
    color: c_int,
    key: c_int,
    out: *mut *mut Comm,
    config: *mut c_void,
) -> c_int {
    const CALL: &str = "ncclCommSplit";
    let run = || {
        let parent = comm(parent)?;
        called(parent.first_rank, CALL, &format!("{color}, {key}"))?;
        let config = Foreign::config(config, version())?;
        let step = parent.next_step;
        let part = [color.to_ne_bytes(), key.to_ne_bytes()].concat();
        let stage = parent.together(CALL, part, move |parent, parts| {
            let int = |part: &[u8], at: usize| c_int::from_ne_bytes(part[at..at + 4].try_into().expect("four bytes"));
            let mut members: Vec<(c_int, usize)> = (0..parts.len())
                .filter(|rank| int(&parts[*rank], 0) == color)
                .map(|rank| (int(&parts[rank], 4), rank))
                .collect();
            members.sort_unstable();
            let child = if color < 0 {
                std::ptr::null_mut()
            } else {
                let rank = members.iter().position(|(_, rank)| *rank == parent.rank).expect("its own colour");
                let name = format!("{:p} {step} {color}", Arc::as_ptr(&parent.world));
                new_comm(World::named(name.as_bytes(), members.len()), rank, parent.first_rank, &config)
            };
            give(out, child);
            SUCCESS
        })?;
        match setting("hasty_split") {
            0 => Ok(stage),
            _ => Ok(if stage == IN_PROGRESS { SUCCESS } else { stage }),
        }
    };
    code(run())
}

/// `ncclCommFinalize`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(handle: *mut Comm) -> c_int {
    const CALL: &str = "ncclCommFinalize";
    let run = || {
        let comm = comm(handle)?;
        called(comm.first_rank, CALL, "")?;
        comm.together(CALL, Vec::new(), |_, _| SUCCESS)
    };
    code(run())
}

/// `ncclCommDestroy`. Windows and device communicators that are left stay counted.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(handle: *mut Comm) -> c_int {
    let run = || {
        called(comm(handle)?.first_rank, "ncclCommDestroy", "")?;
        free_comm(handle);
        Ok(SUCCESS)
    };
    code(run())
}

/// `ncclCommAbort`. It frees what the communicator has.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(handle: *mut Comm) -> c_int {
    let run = || {
        let comm = comm(handle)?;
        called(comm.first_rank, "ncclCommAbort", "")?;
        count("windows", -(comm.windows.len() as i64));
        count("device_comms", -comm.device_comm_count);
        for window in std::mem::take(&mut comm.windows).into_keys() {
            free_window(window as *mut Window);
        }
        free_comm(handle);
        Ok(SUCCESS)
    };
    code(run())
}

fn free_window(handle: *mut Window) {
    // SAFETY: came from `Box::into_raw`; its communicator's list had it, and has it no more.
    drop(unsafe { Box::from_raw(handle) });
}

/// `ncclCommGetAsyncError`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommGetAsyncError(handle: *mut Comm, out: *mut c_int) -> c_int {
    let run = || {
        let comm = comm(handle)?;
        let told = setting("async_error") as c_int;
        give(out, if told == SUCCESS { comm.poll() } else { told });
        Ok(SUCCESS)
    };
    code(run())
}

/// `ncclCommCount`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCount(handle: *mut Comm, out: *mut c_int) -> c_int {
    code(comm(handle).map(|comm| {
        give(out, comm.world.rank_count as c_int);
        SUCCESS
    }))
}

/// `ncclCommUserRank`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommUserRank(handle: *mut Comm, out: *mut c_int) -> c_int {
    code(comm(handle).map(|comm| {
        give(out, comm.rank as c_int);
        SUCCESS
    }))
}

/// `ncclGroupStart`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    code(called(-1, "ncclGroupStart", "").map(|()| group::start()))
}

/// `ncclGroupEnd`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    group::end(called(-1, "ncclGroupEnd", ""))
}

/// Bytes of an element; `None` for a type that does not exist.
fn element_bytes(data_type: c_int) -> Option<usize> {
    [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1].get(usize::try_from(data_type).ok()?).copied()
}

/// `ncclAllGather`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    handle: *mut Comm,
    _stream: *mut c_void,
) -> c_int {
    const CALL: &str = "ncclAllGather";
    let (send, receive) = (send as usize, receive as usize);
    let run = || {
        called(comm(handle)?.first_rank, CALL, &format!("{count} of type {data_type}"))?;
        let bytes = count * element_bytes(data_type).ok_or(INVALID_ARGUMENT)?;
        Ok(group::issue(Turn::Together, move || {
            code(exchange(handle, CALL, bytes_at(send, bytes)).map(|parts| {
                put_bytes(receive, &parts.concat());
                SUCCESS
            }))
        }))
    };
    code(run())
}

/// `ncclReduceScatter`: sums of `float`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    op: c_int,
    handle: *mut Comm,
    _stream: *mut c_void,
) -> c_int {
    const CALL: &str = "ncclReduceScatter";
    const FLOAT32: c_int = 7;
    const SUM: c_int = 0;
    let (send, receive) = (send as usize, receive as usize);
    let run = || {
        let comm = comm(handle)?;
        called(comm.first_rank, CALL, &format!("{count} of type {data_type}, op {op}"))?;
        if (data_type, op) != (FLOAT32, SUM) {
            return Err(refuse(INVALID_ARGUMENT, "the fake sums floats only"));
        }
        let (rank, bytes) = (comm.rank, count * 4);
        let all = bytes * comm.world.rank_count;
        Ok(group::issue(Turn::Together, move || {
            code(exchange(handle, CALL, bytes_at(send, all)).map(|parts| {
                let float = |part: &[u8], i: usize| {
                    let at = rank * bytes + i * 4;
                    f32::from_ne_bytes(part[at..at + 4].try_into().expect("four bytes"))
                };
                let sums = (0..count).map(|i| parts.iter().map(|part| float(part, i)).sum::<f32>());
                put_bytes(receive, &sums.flat_map(f32::to_ne_bytes).collect::<Vec<u8>>());
                SUCCESS
            }))
        }))
    };
    code(run())
}

/// A step of a collective: the stream does it at once, whether the communicator blocks or not.
fn exchange(handle: *mut Comm, call: &'static str, part: Vec<u8>) -> Result<Parts, c_int> {
    let comm = comm(handle)?;
    let step = comm.next_step;
    comm.next_step += 1;
    comm.world.bring(step, comm.rank, call, part)?;
    comm.world.wait(step)
}

/// What NCCL's allocations are rounded up to here, and aligned to.
const GRANULE: usize = 4096;

fn allocation(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.next_multiple_of(GRANULE), GRANULE).expect("a size that a test asks for")
}

/// `ncclMemAlloc`. Fresh memory is not zero.
#[unsafe(no_mangle)]
pub extern "C" fn ncclMemAlloc(out: *mut *mut c_void, bytes: usize) -> c_int {
    let run = || {
        called(-1, "ncclMemAlloc", &bytes.to_string())?;
        let layout = allocation(bytes.max(1));
        // SAFETY: the layout has a size.
        let start = unsafe { std::alloc::alloc(layout) };
        if start.is_null() {
            return Err(INTERNAL_ERROR);
        }
        // SAFETY: just allocated with this size.
        unsafe { start.write_bytes(0xa5, layout.size()) };
        state().memory.insert(start as usize, bytes);
        give(out, start.cast());
        Ok(SUCCESS)
    };
    code(run())
}

/// `ncclMemFree`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclMemFree(start: *mut c_void) -> c_int {
    let run = || {
        called(-1, "ncclMemFree", "")?;
        let Some(bytes) = state().memory.remove(&(start as usize)) else {
            count("misuses", 1);
            return Err(INVALID_ARGUMENT);
        };
        // SAFETY: came from `ncclMemAlloc` with this layout, and was in the list of live allocations.
        unsafe { std::alloc::dealloc(start.cast(), allocation(bytes.max(1))) };
        Ok(SUCCESS)
    };
    code(run())
}

/// `ncclCommWindowRegister`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowRegister(
    handle: *mut Comm,
    start: *mut c_void,
    bytes: usize,
    out: *mut *mut Window,
    flags: c_int,
) -> c_int {
    const CALL: &str = "ncclCommWindowRegister";
    let run = || {
        let comm = comm(handle)?;
        called(comm.first_rank, CALL, &format!("{bytes}, {flags}"))?;
        if group::is_open() {
            count("misuses", 1);
        }
        if setting("null_windows") != 0 || setting("device_api") == 0 {
            give(out, std::ptr::null_mut());
            return Ok(SUCCESS);
        }
        let part = [(start as usize).to_ne_bytes(), bytes.to_ne_bytes()].concat();
        comm.together(CALL, part, move |comm, parts| {
            let word = |part: &[u8], at: usize| usize::from_ne_bytes(part[at..at + 8].try_into().expect("eight bytes"));
            let parts: Vec<Part> = parts.iter().map(|p| Part { start: word(p, 0), bytes: word(p, 8), flags }).collect();
            let own = parts[comm.rank];
            let window = Box::into_raw(Box::new(Window { rank: comm.rank, first_rank: comm.first_rank, parts }));
            comm.windows.insert(window as usize, own);
            count("windows", 1);
            give(out, window);
            SUCCESS
        })
    };
    code(run())
}

/// `ncclCommWindowDeregister`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowDeregister(handle: *mut Comm, window: *mut Window) -> c_int {
    let run = || {
        let comm = comm(handle)?;
        let part = comm.windows.remove(&(window as usize));
        called(comm.first_rank, "ncclCommWindowDeregister", &part.map_or(0, |p| p.bytes).to_string())?;
        let allocated =
            |p: Part| state().memory.iter().any(|(start, bytes)| (*start..start + bytes).contains(&p.start));
        let freed = part.is_some_and(|p| !allocated(p));
        if part.is_none() || freed || comm.device_comm_count > 0 {
            count("misuses", 1);
        }
        if part.is_none() {
            return Err(INVALID_ARGUMENT);
        }
        count("windows", -1);
        free_window(window);
        Ok(SUCCESS)
    };
    code(run())
}

/// Ranks `first..first + n` of the LSA team of `rank`.
fn lsa_team(rank: usize, rank_count: usize) -> (usize, usize) {
    let size = (setting("lsa_team_size") as usize).min(rank_count);
    (rank / size * size, size)
}

/// `ncclGetLsaDevicePointer`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLsaDevicePointer(
    handle: *mut Window,
    offset: usize,
    lsa_rank: c_int,
    out: *mut *mut c_void,
) -> c_int {
    let run = || {
        let window = window(handle)?;
        called(window.first_rank, "ncclGetLsaDevicePointer", &format!("{lsa_rank}, {offset}"))?;
        let (first, size) = lsa_team(window.rank, window.parts.len());
        let member = usize::try_from(lsa_rank).ok().filter(|r| *r < size).ok_or(INVALID_ARGUMENT)?;
        give(out, (window.parts[first + member].start + offset) as *mut c_void);
        Ok(SUCCESS)
    };
    code(run())
}

/// `ncclGetPeerDevicePointer`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetPeerDevicePointer(
    handle: *mut Window,
    offset: usize,
    peer: c_int,
    out: *mut *mut c_void,
) -> c_int {
    let run = || {
        let window = window(handle)?;
        called(window.first_rank, "ncclGetPeerDevicePointer", &format!("{peer}, {offset}"))?;
        let (first, size) = lsa_team(window.rank, window.parts.len());
        let peer = usize::try_from(peer).ok().filter(|p| *p < window.parts.len()).ok_or(INVALID_ARGUMENT)?;
        let near = (first..first + size).contains(&peer);
        let address = if near { window.parts[peer].start + offset } else { 0 };
        give(out, address as *mut c_void);
        Ok(SUCCESS)
    };
    code(run())
}

/// `ncclGetLsaMultimemDevicePointer`. Its address is this rank's own: nothing multiplies stores here.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLsaMultimemDevicePointer(handle: *mut Window, offset: usize, out: *mut *mut c_void) -> c_int {
    let run = || {
        let window = window(handle)?;
        called(window.first_rank, "ncclGetLsaMultimemDevicePointer", &offset.to_string())?;
        let address = if setting("multimem") != 0 { window.parts[window.rank].start + offset } else { 0 };
        give(out, address as *mut c_void);
        Ok(SUCCESS)
    };
    code(run())
}

/// `ncclCommQueryProperties`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommQueryProperties(handle: *mut Comm, properties: *mut c_void) -> c_int {
    let run = || {
        let comm = comm(handle)?;
        called(comm.first_rank, "ncclCommQueryProperties", "")?;
        if comm.pending.is_some() {
            count("misuses", 1);
        }
        let out = Foreign::properties(properties, version())?;
        let int = |name| setting(name) as c_int;
        let flag = |name| u8::from(setting(name) != 0);
        out.write(16, comm.rank as c_int);
        out.write(20, comm.world.rank_count as c_int);
        out.write(24, 0 as c_int);
        out.write(28, 0 as c_int);
        out.write(32, flag("device_api"));
        out.write(33, flag("multimem"));
        out.write(36, int("gin"));
        let (_, team) = lsa_team(comm.rank, comm.world.rank_count);
        out.write(40, comm.world.rank_count.div_ceil(team) as c_int);
        out.write(44, flag("host_rma"));
        out.write(48, int("railed_gin"));
        if out.version >= 23102 {
            out.write(56, 0x1234_u64);
            out.write(64, 1 as c_int);
            out.write(68, c_int::from(setting("gin") != 0));
            out.write(136, 248_u64);
        }
        Ok(SUCCESS)
    };
    code(run())
}

/// `ncclPutSignal`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclPutSignal(
    source: *const c_void,
    count: usize,
    data_type: c_int,
    peer: c_int,
    peer_window: *mut Window,
    offset: usize,
    index: c_int,
    context: c_int,
    flags: c_uint,
    handle: *mut Comm,
    _stream: *mut c_void,
) -> c_int {
    let source = source as usize;
    let run = || {
        let comm = comm(handle)?;
        called(comm.first_rank, "ncclPutSignal", &format!("{peer}, {count}, signal {index}, context {context}"))?;
        let target = comm.check_rma(peer, index, context)?;
        let bytes = count * element_bytes(data_type).ok_or(INVALID_ARGUMENT)?;
        let part = window(peer_window)?.parts[target];
        if flags != 0 || !comm.holds(source, bytes) || offset + bytes > part.bytes {
            return Err(refuse(INVALID_ARGUMENT, "flags, a source outside all windows, or a range outside the peer's"));
        }
        let (world, origin) = (Arc::clone(&comm.world), comm.rank);
        Ok(group::issue(Turn::Send, move || {
            put_bytes(part.start + offset, &bytes_at(source, bytes));
            world.signal(target, origin, context, index);
            SUCCESS
        }))
    };
    code(run())
}

/// `ncclSignal`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclSignal(
    peer: c_int,
    index: c_int,
    context: c_int,
    flags: c_uint,
    handle: *mut Comm,
    _stream: *mut c_void,
) -> c_int {
    let run = || {
        let comm = comm(handle)?;
        called(comm.first_rank, "ncclSignal", &format!("{peer}, signal {index}, context {context}"))?;
        let target = comm.check_rma(peer, index, context)?;
        if flags != 0 {
            return Err(INVALID_ARGUMENT);
        }
        let (world, origin) = (Arc::clone(&comm.world), comm.rank);
        Ok(group::issue(Turn::Send, move || {
            world.signal(target, origin, context, index);
            SUCCESS
        }))
    };
    code(run())
}

/// `ncclWaitSignal`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclWaitSignal(
    wait_count: c_int,
    waits: *mut SignalWait,
    handle: *mut Comm,
    _stream: *mut c_void,
) -> c_int {
    let run = || {
        let comm = comm(handle)?;
        // SAFETY: the caller states that so many are there.
        let waits = unsafe { std::slice::from_raw_parts(waits, wait_count as usize) }.to_vec();
        let words: Vec<String> = waits.iter().map(|w| format!("{} of {}", w.count, w.peer)).collect();
        called(comm.first_rank, "ncclWaitSignal", &words.join(", "))?;
        let (world, target) = (Arc::clone(&comm.world), comm.rank);
        let keys = waits.iter().map(|w| {
            let origin = comm.check_rma(w.peer, w.index, w.context)?;
            let count = u64::try_from(w.count).ok().filter(|c| *c > 0).ok_or(INVALID_ARGUMENT)?;
            Ok(((target, origin, w.context, w.index), count))
        });
        let keys = keys.collect::<Result<Vec<_>, c_int>>()?;
        Ok(group::issue(Turn::Wait, move || {
            keys.into_iter().map(|(key, count)| world.take(key, count)).find(|c| *c != SUCCESS).unwrap_or(SUCCESS)
        }))
    };
    code(run())
}

/// Local network cards of a rank: GIN's contexts are a multiple of them.
const CONNECTIONS: c_int = 2;

/// `ncclDevCommCreate`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclDevCommCreate(handle: *mut Comm, requirements: *const c_void, out: *mut c_void) -> c_int {
    const CALL: &str = "ncclDevCommCreate";
    const PROXY: i64 = 2;
    const FULL: c_int = 1;
    const RAIL: c_int = 2;
    let run = || {
        let comm = comm(handle)?;
        let asked = Foreign::requirements(requirements, version())?;
        let (contexts, signals): (c_int, c_int) = (asked.read(60), asked.read(64));
        let (connection, depth): (c_int, c_int) = (asked.read(72), asked.read(80));
        called(
            comm.first_rank,
            CALL,
            &format!("connection {connection}, {contexts} contexts, {signals} signals, depth {depth}"),
        )?;
        let transport = match connection {
            0 => 0,
            RAIL => setting("railed_gin"),
            _ => setting("gin"),
        };
        if connection != 0 && transport == 0 {
            return Err(refuse(INVALID_ARGUMENT, "no GIN"));
        }
        if transport == PROXY && depth != 0 {
            return Err(refuse(INVALID_ARGUMENT, "the proxy takes no queue depth"));
        }
        if connection >= FULL && setting("weak_signals_only") != 0 && asked.read::<u8>(92) != 0 {
            return Err(refuse(INVALID_USAGE, "no strong signals"));
        }
        let stated = match setting("device_comm_version") as u32 {
            0 => asked.version,
            told => told,
        };
        comm.together(CALL, Vec::new(), move |comm, _| {
            let written = Foreign::device_comm(out, stated);
            let (first, size) = lsa_team(comm.rank, comm.world.rank_count);
            written.write(8, comm.rank as c_int);
            written.write(12, comm.world.rank_count as c_int);
            written.write(20, (comm.rank - first) as c_int);
            written.write(24, size as c_int);
            let contexts = if connection == 0 { 0 } else { (contexts + CONNECTIONS - 1) / CONNECTIONS * CONNECTIONS };
            written.write(152, contexts);
            comm.device_comm_count += 1;
            count("device_comms", 1);
            SUCCESS
        })
    };
    code(run())
}

/// `ncclDevCommDestroy`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclDevCommDestroy(handle: *mut Comm, device_comm: *const c_void) -> c_int {
    let run = || {
        let comm = comm(handle)?;
        called(comm.first_rank, "ncclDevCommDestroy", "")?;
        if device_comm.is_null() || comm.device_comm_count == 0 {
            count("misuses", 1);
            return Err(INVALID_ARGUMENT);
        }
        comm.device_comm_count -= 1;
        count("device_comms", -1);
        Ok(SUCCESS)
    };
    code(run())
}

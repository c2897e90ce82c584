//! `--spawn L`: one process for each local rank, where no launcher started them.
//!
//! The processes find [`Launcher::Spawn`](super::Launcher::Spawn)'s variables in their environment. What they print comes out
//! line by line, with the rank before it. If one fails, the others have a grace period to say why they fail too; then they are
//! stopped. However this process ends, none outlives it.

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::launcher::{Placement, RANK_COUNT_MAX, check_address};
use super::token::Token;
use crate::error::{Result, TideError};

/// How often children and signals are looked at.
const TICK: Duration = Duration::from_millis(10);
/// Longer lines are cut.
const LINE_BYTES_MAX: usize = 64 << 10;
/// A wait status of exit code 255.
const UNKNOWN_STATUS: i32 = 255 << 8;
/// How long output is waited for once all children have ended.
const OUTPUT_WAIT: Duration = Duration::from_secs(1);

/// What to start.
#[derive(Debug, Clone)]
pub struct SpawnOptions {
    /// The program.
    pub program: PathBuf,
    /// Its arguments, the same for all ranks.
    pub arguments: Vec<OsString>,
    /// How many to start here.
    pub local_rank_count: u32,
    /// What started this process, if it started one on each of several nodes. Ranks are node by node: local rank `l` of node
    /// `n` is rank `n · local_rank_count + l`.
    pub outer: Option<Placement>,
    /// What the ranks of all nodes share. `None`: a random one, which can be only if there is one node.
    pub token: Option<Token>,
    /// How long the others may go on once one has failed, and again between asking them to end and killing them.
    pub grace: Duration,
}

impl SpawnOptions {
    /// This program again, `local_rank_count` times on this machine alone, with five seconds of grace.
    ///
    /// # Errors
    /// [`TideError::Launch`] if the operating system does not say which program this is.
    pub fn new(local_rank_count: u32, arguments: impl IntoIterator<Item = OsString>) -> Result<Self> {
        let program = std::env::current_exe().map_err(|e| launch_error("this program's path", &e))?;
        let arguments = arguments.into_iter().collect();
        Ok(Self { program, arguments, local_rank_count, outer: None, token: None, grace: Duration::from_secs(5) })
    }
}

/// Where the children's lines go.
pub type Sink = Arc<Mutex<dyn Write + Send>>;

/// Starts the processes, waits for all, and returns the exit status: 0, or that of the first that failed (of one that a signal
/// ended, 128 and the signal's number). Their output goes to this process's.
///
/// Meanwhile SIGINT and SIGTERM are handed on to the children; a second one kills them. One call at a time.
///
/// # Errors
/// [`TideError::Usage`] if the options contradict each other; [`TideError::Launch`] if a process cannot be started.
pub fn spawn(options: &SpawnOptions) -> Result<u8> {
    spawn_into(options, Arc::new(Mutex::new(std::io::stdout())), Arc::new(Mutex::new(std::io::stderr())))
}

/// As [`spawn`], with the output going elsewhere.
///
/// # Errors
/// As [`spawn`].
pub fn spawn_into(options: &SpawnOptions, stdout: Sink, stderr: Sink) -> Result<u8> {
    let job = Job::new(options)?;
    let signals = Signals::catch()?;
    let mut children = Children(Vec::new());
    let (sender, ended_relays) = channel();
    for local_rank in 0..options.local_rank_count {
        let (rank, mut child) = job.start(options, local_rank)?;
        let pipes: [(Option<Box<dyn Read + Send>>, &Sink); 2] = [
            (child.stdout.take().map(|p| Box::new(p) as _), &stdout),
            (child.stderr.take().map(|p| Box::new(p) as _), &stderr),
        ];
        children.0.push(Running { child, ended: None });
        for (pipe, sink) in pipes {
            if let Some(pipe) = pipe {
                relay(rank, pipe, Arc::clone(sink), sender.clone())?;
            }
        }
    }
    drop(sender);
    let status = children.watch(&signals, options.grace);
    wait_for_relays(&ended_relays);
    Ok(status)
}

/// What all children have in common.
struct Job {
    first_rank: u32,
    rank_count: u32,
    address: String,
    token: Token,
    parent: libc::pid_t,
}

impl Job {
    fn new(options: &SpawnOptions) -> Result<Self> {
        let local_rank_count = options.local_rank_count;
        let (node, node_count) = match &options.outer {
            None => (0, 1),
            Some(outer) if outer.local_rank_count == 1 => (outer.rank, outer.rank_count),
            Some(outer) => {
                return Err(TideError::usage(format!(
                    "--spawn {local_rank_count} starts a node's ranks, but {} started {} processes on this node; one is needed",
                    outer.launcher, outer.local_rank_count
                )));
            }
        };
        let rank_count = local_rank_count.checked_mul(node_count).filter(|n| (1..=RANK_COUNT_MAX).contains(n));
        let Some(rank_count) = rank_count else {
            return Err(TideError::usage(format!(
                "--spawn {local_rank_count} on {node_count} nodes: needed: 1 to {RANK_COUNT_MAX} ranks"
            )));
        };
        let implied = options.outer.as_ref().and_then(|outer| outer.rendezvous.clone());
        let address = match implied {
            Some(address) => {
                check_address("TIDE_COMM_ID", &address)?;
                address
            }
            None if node_count == 1 => free_local_address()?,
            None => {
                return Err(TideError::usage(format!(
                    "--spawn {local_rank_count} on {node_count} nodes needs TIDE_COMM_ID=host:port, the same on all"
                )));
            }
        };
        let token = match &options.token {
            Some(token) => token.clone(),
            None if node_count == 1 => Token::random()?,
            None => {
                return Err(TideError::usage(format!(
                    "--spawn {local_rank_count} on {node_count} nodes needs TIDE_TOKEN, the same on all"
                )));
            }
        };
        let parent = std::process::id().cast_signed();
        Ok(Self { first_rank: node * local_rank_count, rank_count, address, token, parent })
    }

    fn start(&self, options: &SpawnOptions, local_rank: u32) -> Result<(u32, Child)> {
        let rank = self.first_rank + local_rank;
        let mut command = Command::new(&options.program);
        command
            .args(&options.arguments)
            .env("TIDE_RANK", rank.to_string())
            .env("TIDE_RANK_COUNT", self.rank_count.to_string())
            .env("TIDE_LOCAL_RANK", local_rank.to_string())
            .env("TIDE_LOCAL_RANK_COUNT", options.local_rank_count.to_string())
            .env("TIDE_COMM_ID", &self.address)
            .env("TIDE_TOKEN", OsStr::from_bytes(self.token.as_bytes()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own: what a child starts ends with it, and a terminal's signals come through this process alone.
            .process_group(0);
        let parent = self.parent;
        // SAFETY: between fork and exec the closure makes three system calls, which are async-signal-safe, and allocates nothing.
        unsafe { command.pre_exec(move || end_with_parent(parent)) };
        let child =
            command.spawn().map_err(|e| launch_error(&format!("{}, rank {rank}", options.program.display()), &e))?;
        Ok((rank, child))
    }
}

/// In the child: the kernel kills it when its parent ends, however that happens.
fn end_with_parent(parent: libc::pid_t) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: this option takes a signal number and touches no memory.
        let result = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) };
        if result != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    // The parent may have ended before it was asked for.
    // SAFETY: no arguments, no memory, cannot fail.
    if unsafe { libc::getppid() } != parent {
        return Err(std::io::ErrorKind::NotConnected.into());
    }
    Ok(())
}

/// A port of this machine that is free now: rank 0 takes it a moment later, or says that it cannot.
fn free_local_address() -> Result<String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|e| launch_error("a free port", &e))?;
    Ok(listener.local_addr().map_err(|e| launch_error("a free port", &e))?.to_string())
}

fn launch_error(what: &str, error: &std::io::Error) -> TideError {
    TideError::Launch { detail: format!("{what}: {error}") }
}

/// A child, and how it ended.
struct Running {
    child: Child,
    ended: Option<ExitStatus>,
}

impl Running {
    /// Sends a signal to the child and all that it started.
    fn signal(&self, signal: i32) {
        if self.ended.is_none() {
            // SAFETY: no memory is touched. The child is not reaped, so that its group is still its own.
            unsafe { libc::kill(-self.child.id().cast_signed(), signal) };
        }
    }

    /// Whether it has ended; if so, what it started is killed and it is reaped.
    fn look(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() && self.is_zombie() {
            self.signal(libc::SIGKILL);
            // It cannot be asked if this process ignores SIGCHLD: then how it ended is not known, and counts as a failure.
            self.ended = Some(self.child.wait().unwrap_or(ExitStatus::from_raw(UNKNOWN_STATUS)));
            return self.ended;
        }
        None
    }

    /// Whether it has ended; it is left to be reaped, so that its number stays its own.
    fn is_zombie(&self) -> bool {
        // SAFETY: all-zero bytes are a valid `siginfo_t`: integers and pointers that nobody follows.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        // SAFETY: `info` is valid for a write for the length of the call.
        let result = unsafe { libc::waitid(libc::P_PID, self.child.id(), &raw mut info, options) };
        // SAFETY: `waitid` has filled `info`, or left its zeros: either way the field is readable.
        result != 0 || unsafe { info.si_pid() } != 0
    }
}

/// The children. Dropped, it leaves none.
struct Children(Vec<Running>);

/// How far the end of those that have not ended by themselves has come.
enum Ending {
    NotYet,
    /// One failed: the others may go on for a while.
    Grace {
        until: Instant,
    },
    /// They were asked to end.
    Asked {
        until: Instant,
    },
    Killed,
}

impl Children {
    /// Waits until all have ended.
    fn watch(&mut self, signals: &Signals, grace: Duration) -> u8 {
        let mut ending = Ending::NotYet;
        let mut failure = None;
        loop {
            for running in &mut self.0 {
                if let Some(status) = running.look().filter(|s| !s.success()) {
                    failure.get_or_insert(code(status));
                }
            }
            if self.0.iter().all(|r| r.ended.is_some()) {
                return failure.unwrap_or(0);
            }
            let now = Instant::now();
            let next = match (signals.take(), &ending) {
                (Some(_), Ending::Asked { .. } | Ending::Killed) => Some((libc::SIGKILL, Ending::Killed)),
                (Some(signal), _) => Some((signal, Ending::Asked { until: now + grace })),
                (None, Ending::NotYet) if failure.is_some() => {
                    ending = Ending::Grace { until: now + grace };
                    None
                }
                (None, Ending::Grace { until }) if now >= *until => {
                    Some((libc::SIGTERM, Ending::Asked { until: now + grace }))
                }
                (None, Ending::Asked { until }) if now >= *until => Some((libc::SIGKILL, Ending::Killed)),
                _ => None,
            };
            if let Some((signal, then)) = next {
                self.0.iter().for_each(|r| r.signal(signal));
                ending = then;
            }
            std::thread::sleep(TICK);
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for running in &mut self.0 {
            running.signal(libc::SIGKILL);
            if running.ended.is_none() {
                // Killed: it ends at once.
                let _ = running.child.wait();
            }
        }
    }
}

fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|s| 128 + s));
    code.and_then(|c| u8::try_from(c).ok()).unwrap_or(u8::MAX)
}

/// Hands lines on, with the rank before each, until the pipe is closed.
fn relay(rank: u32, mut pipe: Box<dyn Read + Send>, sink: Sink, ended: Sender<()>) -> Result<()> {
    let work = move || {
        let _ended = ended;
        let mut lines = Lines::new(rank);
        let mut chunk = vec![0; 16 << 10];
        loop {
            let length = match pipe.read(&mut chunk) {
                Ok(length) => length,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => 0,
            };
            let text = if length == 0 { lines.finish() } else { lines.push(&chunk[..length]) };
            if !text.is_empty() {
                let mut sink = sink.lock().unwrap_or_else(PoisonError::into_inner);
                // Nobody may read any more; the child must not stall for that.
                let _ = sink.write_all(&text).and_then(|()| sink.flush());
            }
            if length == 0 {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name(format!("tide-output-{rank}"));
    thread.spawn(work).map(|_| ()).map_err(|e| launch_error("a thread for output", &e))
}

/// Makes whole lines with a prefix of bytes as they come.
struct Lines {
    prefix: Vec<u8>,
    /// What came of a line that is not whole.
    begun: Vec<u8>,
}

impl Lines {
    fn new(rank: u32) -> Self {
        Self { prefix: format!("[{rank}] ").into_bytes(), begun: Vec::new() }
    }

    /// The lines that `bytes` complete.
    fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        for part in bytes.split_inclusive(|b| *b == b'\n') {
            self.begun.extend_from_slice(part);
            while self.begun.len() > LINE_BYTES_MAX {
                let rest = self.begun.split_off(LINE_BYTES_MAX);
                self.end_line(&mut out);
                self.begun = rest;
            }
            if self.begun.ends_with(b"\n") {
                self.end_line(&mut out);
            }
        }
        out
    }

    /// What is left, as a line.
    fn finish(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        if !self.begun.is_empty() {
            self.end_line(&mut out);
        }
        out
    }

    fn end_line(&mut self, out: &mut Vec<u8>) {
        out.extend(&self.prefix);
        out.append(&mut self.begun);
        if !out.ends_with(b"\n") {
            out.push(b'\n');
        }
    }
}

/// Waits until all pipes are closed. A process that left its group may hold one open: its thread stays until it closes it.
fn wait_for_relays(ended: &Receiver<()>) {
    // Nothing is sent: what ends the wait is that the last sender is gone, or the time.
    let _ = ended.recv_timeout(OUTPUT_WAIT);
}

/// The last signal that was caught and not taken; 0: none.
static CAUGHT: AtomicI32 = AtomicI32::new(0);
/// Held while signals are caught: handlers are the process's, not a thread's.
static CATCHING: Mutex<()> = Mutex::new(());

extern "C" fn catch_signal(signal: libc::c_int) {
    // ORDER: Relaxed; the number is all that is handed over.
    CAUGHT.store(signal, Ordering::Relaxed);
}

/// Catches SIGINT and SIGTERM while it lives; then what they did before is restored.
struct Signals {
    before: Vec<(i32, libc::sigaction)>,
    _one_at_a_time: MutexGuard<'static, ()>,
}

impl Signals {
    fn catch() -> Result<Self> {
        let guard = CATCHING.lock().unwrap_or_else(PoisonError::into_inner);
        // ORDER: Relaxed; no handler is set yet.
        CAUGHT.store(0, Ordering::Relaxed);
        let mut signals = Self { before: Vec::new(), _one_at_a_time: guard };
        for signal in [libc::SIGINT, libc::SIGTERM] {
            // SAFETY: all-zero bytes are a valid `sigaction`: no handler, an empty mask, no flags.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = catch_signal as *const () as libc::sighandler_t;
            action.sa_flags = libc::SA_RESTART;
            // SAFETY: as above.
            let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
            // SAFETY: both point to valid structures; the handler only stores to an atomic.
            if unsafe { libc::sigaction(signal, &raw const action, &raw mut before) } != 0 {
                return Err(launch_error("catching signals", &std::io::Error::last_os_error()));
            }
            signals.before.push((signal, before));
        }
        Ok(signals)
    }

    fn take(&self) -> Option<i32> {
        // ORDER: Relaxed; see `catch_signal`.
        Some(CAUGHT.swap(0, Ordering::Relaxed)).filter(|signal| *signal != 0)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (signal, before) in &self.before {
            // SAFETY: `before` is what the kernel gave for this signal.
            unsafe { libc::sigaction(*signal, before, std::ptr::null_mut()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_prefixed_however_they_come() {
        let mut lines = Lines::new(3);
        assert_eq!(lines.push(b"a"), b"");
        assert_eq!(lines.push(b"b\nc\n\nd"), b"[3] ab\n[3] c\n[3] \n");
        assert_eq!(lines.finish(), b"[3] d\n");
        assert_eq!(lines.finish(), b"");
        let long = lines.push(&[b'x'; LINE_BYTES_MAX + 1]);
        assert_eq!(long.len(), 4 + LINE_BYTES_MAX + 1);
        assert_eq!(lines.finish(), b"[3] x\n");
    }
}

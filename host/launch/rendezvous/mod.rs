//! A star of TCP connections through rank 0.
//!
//! Rank 0's process listens, at the address it is told and at no other. Every rank connects, proves that it holds the job's
//! token without sending it, and waits until all have. From then on a call is one message to the hub and one back. Whatever goes
//! wrong, every rank gets the same sentence: who has not come, who has left, whose call is another one.
//!
//! Limits: [`MESSAGE_BYTES_MAX`], [`GATHERED_BYTES_MAX`], [`LABEL_BYTES_MAX`]. Nothing is encrypted.

mod coordinator;
mod poll;
mod wire;

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use self::coordinator::Coordinator;
use self::wire::{
    CHALLENGE_BYTES, Frame, FrameReader, Hello, Kind, Transcript, WireError, decode_challenge, decode_gathered,
    encode_frame,
};
pub use self::wire::{GATHERED_BYTES_MAX, LABEL_BYTES_MAX, MESSAGE_BYTES_MAX};
use super::exchange::Exchange;
use super::launcher::{Environment, Placement, RANK_COUNT_MAX};
use super::phrase::shown;
use super::token::{Token, random};
use crate::error::{Result, TideError};

/// An attempt to connect takes no longer than this: the next one may find another route or address.
const CONNECT_ATTEMPT_MAX: Duration = Duration::from_secs(3);
/// Pause between attempts.
const CONNECT_PAUSE: Duration = Duration::from_millis(20);
/// How long a rank whose connection broke looks for the hub's sentence.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// The longest timeout: a sum with the present must be a point in time.
const TIMEOUT_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// The longest sentence of a peer that is shown.
const SENTENCE_CHARS_MAX: usize = 1000;

/// How a process finds the others.
#[derive(Debug, Clone)]
pub struct RendezvousOptions {
    /// `host:port` at which rank 0 listens and the others find it.
    pub address: String,
    /// The local address on which rank 0 listens, with the port of `address`; `None`: what `address` resolves to.
    pub bind: Option<IpAddr>,
    /// What all processes of the job share.
    pub token: Token,
    /// This process.
    pub rank: u32,
    /// The number of processes.
    pub rank_count: u32,
    /// How long to wait for all ranks to join, and in each call for all ranks to come to it; up to a week. Equal on all ranks.
    pub timeout: Duration,
}

impl RendezvousOptions {
    /// Those of a placement, with the token of [`Token::from_env`] and, in `TIDE_COMM_BIND`, the address to listen on.
    ///
    /// # Errors
    /// [`TideError::Usage`] if neither launcher nor `TIDE_COMM_ID` say where rank 0 is, or `TIDE_COMM_BIND` is no IP address.
    pub fn new(placement: &Placement, env: Environment, timeout: Duration) -> Result<Self> {
        let Some(address) = placement.rendezvous.clone() else {
            return Err(TideError::usage(format!(
                "{} does not say where rank 0 is: set TIDE_COMM_ID=host:port for all ranks",
                placement.launcher
            )));
        };
        let bind = env("TIDE_COMM_BIND").filter(|text| !text.is_empty());
        let bind = bind.map(|text| {
            let address = text.parse::<IpAddr>();
            address.map_err(|_| TideError::usage(format!("TIDE_COMM_BIND={}: needed: an IP address", shown(&text, 80))))
        });
        let token = Token::from_env(env);
        let (rank, rank_count) = (placement.rank, placement.rank_count);
        Ok(Self { address, bind: bind.transpose()?, token, rank, rank_count, timeout })
    }
}

/// All ranks of a job, connected through rank 0.
///
/// Dropped, it tells the others that this rank has left. Rank 0's must be dropped last, or after a last
/// [`barrier`](Exchange::barrier): the others cannot call without it.
pub struct Rendezvous {
    connection: Connection,
    rank: u32,
    rank_count: u32,
    timeout: Duration,
    /// Number of the next call.
    sequence: u64,
    /// The first failure, which every later call repeats.
    failure: Option<TideError>,
    /// Rank 0's. After `connection`, whose end ends the hub.
    _hub: Option<Hub>,
}

impl Rendezvous {
    /// Connects this process with all the others.
    ///
    /// # Errors
    /// [`TideError::Rendezvous`] if rank 0 cannot listen at the address, cannot be reached, or refuses this rank (another
    /// token, a rank that is taken or out of range, another number of ranks, another version), or if ranks are missing after
    /// `timeout`; [`TideError::Usage`] if rank or number of ranks are out of range.
    pub fn join(options: &RendezvousOptions) -> Result<Self> {
        check(options)?;
        if options.rank != 0 {
            return Self::connect(options, &options.address, None);
        }
        let listener = listen(options)?;
        Self::host(listener, options)
    }

    /// As [`Self::join`] for rank 0, with a listener of the caller's.
    ///
    /// # Errors
    /// As [`Self::join`].
    pub fn host(listener: TcpListener, options: &RendezvousOptions) -> Result<Self> {
        check(options)?;
        if options.rank != 0 {
            return Err(TideError::usage(format!("rank 0 is the host of a rendezvous, not rank {}", options.rank)));
        }
        let address = own_address(&listener).map_err(|e| lost(&options.address, &e.to_string()))?;
        let hub = Hub::start(listener, options).map_err(|e| lost(&options.address, &e.to_string()))?;
        Self::connect(options, &address.to_string(), Some(hub))
    }

    fn connect(options: &RendezvousOptions, address: &str, hub: Option<Hub>) -> Result<Self> {
        let deadline = Instant::now() + options.timeout;
        let mut connection = Connection::open(options, address, deadline)?;
        // The hub knows who is missing, and says so at the deadline.
        let frame = connection.receive(deadline + grace(options.timeout)).map_err(|e| match e {
            ReceiveError::TimedOut => {
                let waited = options.timeout.as_secs_f64();
                TideError::rendezvous(format!("rank 0 at {address} has not gathered all ranks after {waited:.1} s"))
            }
            other => connection.error(other),
        })?;
        match frame.kind {
            Kind::Complete => Ok(Self {
                connection,
                rank: options.rank,
                rank_count: options.rank_count,
                timeout: options.timeout,
                sequence: 0,
                failure: None,
                _hub: hub,
            }),
            _ => Err(connection.unexpected(&frame)),
        }
    }

    fn call(&mut self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let deadline = Instant::now() + self.timeout + grace(self.timeout);
        let sequence = self.sequence;
        self.connection.send(&encode_frame(Kind::Contribution, sequence, label, bytes), deadline)?;
        let frame = self.connection.receive(deadline).map_err(|e| match e {
            ReceiveError::TimedOut => TideError::rendezvous(format!(
                "rank 0 at {} has not answered `{}` (call {sequence}) after {:.1} s",
                self.connection.address,
                shown(label, 80),
                (self.timeout + grace(self.timeout)).as_secs_f64()
            )),
            other => self.connection.error(other),
        })?;
        if frame.kind != Kind::Gathered || frame.sequence != sequence || frame.label != label {
            return Err(self.connection.unexpected(&frame));
        }
        self.sequence += 1;
        decode_gathered(&frame.body, self.rank_count).map_err(|e| self.connection.error(ReceiveError::Wire(e)))
    }
}

impl Exchange for Rendezvous {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn rank_count(&self) -> u32 {
        self.rank_count
    }

    fn all_gather(&mut self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        if label.len() > LABEL_BYTES_MAX || bytes.len() > MESSAGE_BYTES_MAX {
            return Err(TideError::usage(format!(
                "`{}`: a label of {} bytes with {} bytes, more than {LABEL_BYTES_MAX} or {MESSAGE_BYTES_MAX}",
                shown(label, 80),
                label.len(),
                bytes.len()
            )));
        }
        self.call(label, bytes).inspect_err(|error| self.failure = Some(error.clone()))
    }
}

impl fmt::Debug for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rendezvous(rank {} of {} at {})", self.rank, self.rank_count, self.connection.address)
    }
}

fn check(options: &RendezvousOptions) -> Result<()> {
    let RendezvousOptions { rank, rank_count, timeout, .. } = *options;
    if timeout.is_zero() || timeout > TIMEOUT_MAX {
        return Err(TideError::usage(format!(
            "a timeout of {timeout:?}: needed: more than 0, at most {TIMEOUT_MAX:?}"
        )));
    }
    if rank >= rank_count || rank_count > RANK_COUNT_MAX {
        return Err(TideError::usage(format!(
            "rank {rank} of {rank_count}: needed: a rank below a count of {RANK_COUNT_MAX}"
        )));
    }
    Ok(())
}

/// How much longer than the hub a rank waits, so that the hub's sentence arrives.
fn grace(timeout: Duration) -> Duration {
    (timeout / 10).clamp(Duration::from_millis(200), Duration::from_secs(2))
}

fn lost(address: &str, detail: &str) -> TideError {
    TideError::rendezvous(format!("{address}: {detail}"))
}

fn listen(options: &RendezvousOptions) -> Result<TcpListener> {
    let address = &options.address;
    let resolved =
        address.to_socket_addrs().map_err(|e| lost(address, &format!("not an address to listen at: {e}")))?;
    let mut addresses: Vec<SocketAddr> = resolved.collect();
    if let Some(bind) = options.bind {
        addresses.iter_mut().for_each(|a| a.set_ip(bind));
        addresses.truncate(1);
    }
    TcpListener::bind(&addresses[..]).map_err(|e| {
        lost(address, &format!("rank 0 cannot listen there: {e}; it must run on that host, and the port be free"))
    })
}

/// Where this process finds its own listener.
fn own_address(listener: &TcpListener) -> io::Result<SocketAddr> {
    let mut address = listener.local_addr()?;
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    Ok(address)
}

/// The thread of the hub. Dropped, it ends the thread and waits for it.
struct Hub {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hub {
    fn start(listener: TcpListener, options: &RendezvousOptions) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let coordinator =
            Coordinator::new(listener, options.token.clone(), options.rank_count, options.timeout, Arc::clone(&stop))?;
        let thread = std::thread::Builder::new().name("tide-rendezvous".to_owned()).spawn(|| coordinator.run())?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        // ORDER: Relaxed; the flag carries no data, and `join` orders all else.
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed; its ranks find a closed connection.
            let _ = thread.join();
        }
    }
}

/// A rank's end of its connection to the hub.
struct Connection {
    stream: TcpStream,
    reader: FrameReader,
    address: String,
    /// Whether the hub knows this rank.
    joined: bool,
}

enum ReceiveError {
    TimedOut,
    /// The connection ended, before any byte of the message.
    Closed,
    Io(io::Error),
    Wire(WireError),
}

impl Connection {
    /// Connects and shows who this is, trying again until the deadline while nobody answers.
    fn open(options: &RendezvousOptions, address: &str, deadline: Instant) -> Result<Self> {
        loop {
            let failure = match connect(address, deadline) {
                Ok(stream) => match Self::introduce(stream, options, address, deadline) {
                    Ok(connection) => return Ok(connection),
                    Err(Introduction::Refused(error)) => return Err(error),
                    Err(Introduction::Unanswered(reason)) => reason,
                },
                Err(error) => error.to_string(),
            };
            if Instant::now() + CONNECT_PAUSE >= deadline {
                let waited = options.timeout.as_secs_f64();
                return Err(TideError::rendezvous(format!(
                    "rank {}: rank 0 does not answer at {address} after {waited:.1} s: {failure}",
                    options.rank
                )));
            }
            std::thread::sleep(CONNECT_PAUSE);
        }
    }

    fn introduce(
        stream: TcpStream,
        options: &RendezvousOptions,
        address: &str,
        deadline: Instant,
    ) -> Result<Self, Introduction> {
        let refused = |what: String| {
            let rank = options.rank;
            Introduction::Refused(TideError::rendezvous(format!("rank {rank}: what listens at {address}: {what}")))
        };
        let mut connection =
            Self { stream, reader: FrameReader::new(GATHERED_BYTES_MAX), address: address.to_owned(), joined: false };
        let hello = Hello {
            rank: options.rank,
            rank_count: options.rank_count,
            nonce: random().map_err(Introduction::Refused)?,
        }
        .encode();
        let unanswered = |e: ReceiveError| match e {
            ReceiveError::Wire(error) => refused(error.to_string()),
            ReceiveError::TimedOut => Introduction::Unanswered("it accepts connections and says nothing".to_owned()),
            ReceiveError::Closed => Introduction::Unanswered("it closes connections".to_owned()),
            ReceiveError::Io(error) => Introduction::Unanswered(error.to_string()),
        };
        connection.write(&hello, deadline).map_err(unanswered)?;
        let mut challenge = [0; CHALLENGE_BYTES];
        connection.read_challenge(&mut challenge, deadline).map_err(unanswered)?;
        let nonce = decode_challenge(&challenge).map_err(|e| refused(e.to_string()))?;
        let transcript = Transcript { hello, nonce };
        let patience_ms = deadline.saturating_duration_since(Instant::now()).as_millis();
        let proof = transcript.prove_member(&options.token, patience_ms.try_into().unwrap_or(u32::MAX));
        connection.write(&proof, deadline).map_err(unanswered)?;
        let frame = connection.receive(deadline).map_err(unanswered)?;
        match frame.kind {
            Kind::Welcome if transcript.accepts_root(&options.token, &frame.body) => {
                connection.joined = true;
                Ok(connection)
            }
            Kind::Welcome => Err(refused("it does not hold this job's token".to_owned())),
            Kind::Refused => Err(Introduction::Refused(TideError::rendezvous(format!(
                "rank 0 at {address} refuses rank {} of {}: {}",
                options.rank,
                options.rank_count,
                sentence_of(&frame)
            )))),
            _ => Err(Introduction::Refused(connection.unexpected(&frame))),
        }
    }

    fn read_challenge(&mut self, bytes: &mut [u8; CHALLENGE_BYTES], deadline: Instant) -> Result<(), ReceiveError> {
        let mut length = 0;
        while length < bytes.len() {
            length += self.read(&mut bytes[length..], deadline)?;
            if !wire::may_be_handshake(&bytes[..length]) {
                return Err(ReceiveError::Wire(WireError::Magic));
            }
        }
        Ok(())
    }

    /// Some bytes, at least one.
    fn read(&mut self, bytes: &mut [u8], deadline: Instant) -> Result<usize, ReceiveError> {
        loop {
            let left = left_until(deadline)?;
            self.stream.set_read_timeout(Some(left)).map_err(ReceiveError::Io)?;
            match self.stream.read(bytes) {
                Ok(0) => return Err(ReceiveError::Closed),
                Ok(length) => return Ok(length),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
                Err(e) => return Err(ReceiveError::Io(e)),
            }
        }
    }

    fn write(&mut self, mut bytes: &[u8], deadline: Instant) -> Result<(), ReceiveError> {
        while !bytes.is_empty() {
            let left = left_until(deadline)?;
            self.stream.set_write_timeout(Some(left)).map_err(ReceiveError::Io)?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(ReceiveError::Closed),
                Ok(length) => bytes = &bytes[length..],
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
                Err(e) => return Err(ReceiveError::Io(e)),
            }
        }
        Ok(())
    }

    fn send(&mut self, frame: &[u8], deadline: Instant) -> Result<()> {
        let Err(error) = self.write(frame, deadline) else { return Ok(()) };
        // The hub may have said why before it closed the connection.
        match self.receive(deadline.min(Instant::now() + LAST_WORDS)) {
            Ok(frame) => Err(self.unexpected(&frame)),
            Err(_) => Err(self.error(error)),
        }
    }

    fn receive(&mut self, deadline: Instant) -> Result<Frame, ReceiveError> {
        let mut chunk = [0; 64 << 10];
        loop {
            if let Some(frame) = self.reader.next_frame().map_err(ReceiveError::Wire)? {
                return Ok(frame);
            }
            let length = self.read(&mut chunk, deadline)?;
            self.reader.push(&chunk[..length]);
        }
    }

    /// The error of a frame that is not the awaited one: the hub's sentence, if it is one.
    fn unexpected(&self, frame: &Frame) -> TideError {
        match frame.kind {
            Kind::Failed => TideError::rendezvous(sentence_of(frame)),
            kind => lost(&self.address, &format!("rank 0 sent {kind:?} out of turn")),
        }
    }

    fn error(&self, error: ReceiveError) -> TideError {
        lost(
            &self.address,
            &match error {
                ReceiveError::TimedOut => "rank 0 takes no more bytes".to_owned(),
                ReceiveError::Closed => "rank 0 closed the connection".to_owned(),
                ReceiveError::Io(error) => format!("the connection to rank 0 is lost: {error}"),
                ReceiveError::Wire(error) => format!("what should be rank 0: {error}"),
            },
        )
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.joined {
            let goodbye = Frame::outside_calls(Kind::Goodbye, []).encode();
            // If it cannot be said, the hub finds the connection closed.
            let _ = self.write(&goodbye, Instant::now() + LAST_WORDS);
        }
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Why an introduction did not work.
enum Introduction {
    /// For good.
    Refused(TideError),
    /// Perhaps rank 0 is not there yet.
    Unanswered(String),
}

fn sentence_of(frame: &Frame) -> String {
    shown(&String::from_utf8_lossy(&frame.body), SENTENCE_CHARS_MAX)
}

fn left_until(deadline: Instant) -> Result<Duration, ReceiveError> {
    let left = deadline.saturating_duration_since(Instant::now());
    // A socket's timeout of 0 would be none at all.
    if left.is_zero() { Err(ReceiveError::TimedOut) } else { Ok(left.max(Duration::from_millis(1))) }
}

fn connect(address: &str, deadline: Instant) -> io::Result<TcpStream> {
    let mut failure = io::Error::new(ErrorKind::NotFound, "the host has no address");
    for resolved in address.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        let attempt = left.clamp(Duration::from_millis(1), CONNECT_ATTEMPT_MAX);
        match TcpStream::connect_timeout(&resolved, attempt) {
            // Where nobody listens, a socket can be given the very port it connects to, and meets itself.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {
                failure = io::Error::new(ErrorKind::ConnectionRefused, "nobody listens");
            }
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

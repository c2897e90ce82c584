//! The hub of a rendezvous: a thread of rank 0's process, to which every rank, rank 0 too, is connected.
//!
//! It knows when each rank came to a call, so that it can say whom the others wait for, and when a connection ended. Until the
//! ranks are complete it listens, and keeps what strangers do from the ranks: one that says nothing, or not TIDE's words, or
//! does not hold the token, is turned away and counted. Nothing it reads is held beyond a limit.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::poll::{Socket, wait};
use super::wire::{
    Frame, FrameReader, GATHERED_BYTES_MAX, HELLO_BYTES, Hello, Kind, MEMBER_PROOF_BYTES, MESSAGE_BYTES_MAX,
    Transcript, WireError, encode_challenge, encode_gathered, gathered_bytes, may_be_handshake,
};
use crate::launch::phrase;
use crate::launch::token::{Token, random};

/// A stranger has this long to show that it is a rank.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// Connections that are no ranks yet, beyond the number of ranks; of more, the oldest is closed.
const STRANGERS_MAX: usize = 64;
/// How long the last words may take once rank 0 has left.
const LINGER: Duration = Duration::from_secs(2);
/// How often [`Coordinator::stop`] is looked at while rank 0 may not be connected.
const TICK: Duration = Duration::from_millis(50);
/// Bytes read at once, and how often in a row from one rank.
const CHUNK_BYTES: usize = 64 << 10;
const CHUNKS_IN_A_ROW: usize = 16;

pub(super) struct Coordinator {
    /// `None` once nobody is waited for.
    listener: Option<TcpListener>,
    listens_at: String,
    token: Token,
    rank_count: u32,
    timeout: Duration,
    /// Set by rank 0, which may have failed to connect to itself.
    stop: Arc<AtomicBool>,
    started: Instant,
    /// Where bytes are read to.
    buffer: Vec<u8>,
    strangers: VecDeque<Stranger>,
    turned_away: u64,
    last_turned_away: String,
    /// By rank; `None` until it joins.
    members: Vec<Option<Member>>,
    /// Number of the next call.
    sequence: u64,
    state: State,
}

enum State {
    Joining {
        deadline: Instant,
    },
    Idle,
    Gathering(Call),
    /// Ended for all. Ranks that had not joined may still come, rank 0 among them: they hear the sentence.
    Failed {
        sentence: String,
    },
}

/// A call that some rank has come to.
struct Call {
    label: String,
    first_rank: u32,
    first_came: Instant,
    /// By rank.
    contributions: Vec<Option<Vec<u8>>>,
}

/// A connection that has not shown that it is a rank.
struct Stranger {
    stream: TcpStream,
    address: SocketAddr,
    deadline: Instant,
    bytes: Vec<u8>,
    stage: Stage,
}

enum Stage {
    Hello,
    Proof {
        hello: Hello,
        transcript: Transcript,
    },
    /// Turned away: what it still sends is discarded until it closes, so that the answer is not lost by a reset.
    Refused,
}

/// What became of a stranger.
enum Outcome {
    Waiting,
    /// It holds the token, and has this patience, ms.
    Joined {
        hello: Hello,
        patience_ms: u32,
    },
    /// It was answered why it is turned away.
    Refused(String),
    /// It ended, or is to be closed; with a reason unless it was counted before.
    Gone(Option<String>),
}

/// A rank's connection.
struct Member {
    stream: TcpStream,
    reader: FrameReader,
    /// Frames to send, and how much of the first is sent.
    out: VecDeque<Arc<[u8]>>,
    sent_bytes: usize,
    /// Why it takes no part any more.
    gone: Option<String>,
}

impl Coordinator {
    pub fn new(
        listener: TcpListener,
        token: Token,
        rank_count: u32,
        timeout: Duration,
        stop: Arc<AtomicBool>,
    ) -> std::io::Result<Self> {
        listener.set_nonblocking(true)?;
        let started = Instant::now();
        Ok(Self {
            listens_at: listener.local_addr()?.to_string(),
            listener: Some(listener),
            token,
            rank_count,
            timeout,
            stop,
            started,
            buffer: vec![0; CHUNK_BYTES],
            strangers: VecDeque::new(),
            turned_away: 0,
            last_turned_away: String::new(),
            members: (0..rank_count).map(|_| None).collect(),
            sequence: 0,
            state: State::Joining { deadline: started + timeout },
        })
    }

    /// Serves the ranks until rank 0 leaves.
    pub fn run(mut self) {
        // ORDER: Relaxed; the flag carries no data, and the wait has an end.
        while !self.rank_0_left() && !self.stop.load(Ordering::Relaxed) {
            let ready_ranks = self.wait();
            self.accept();
            self.hear_strangers();
            for rank in ready_ranks {
                self.hear(rank);
            }
            self.check_deadline();
            self.members.iter_mut().flatten().for_each(Member::flush);
        }
        self.say_last_words();
    }

    fn rank_0_left(&self) -> bool {
        self.members[0].as_ref().is_some_and(|m| m.gone.is_some())
    }

    /// Waits until something happens, or time is up; returns the ranks that may have sent something.
    fn wait(&self) -> Vec<u32> {
        let now = Instant::now();
        let limit = match &self.state {
            State::Joining { deadline } => Some(TICK.min(deadline.saturating_duration_since(now))),
            State::Idle => None,
            State::Gathering(call) => Some((call.first_came + self.timeout).saturating_duration_since(now)),
            State::Failed { .. } => Some(TICK),
        };
        let mut sockets = Vec::new();
        let mut ranks = Vec::new();
        for (rank, member) in (0..).zip(&self.members) {
            if let Some(member) = member.as_ref().filter(|m| m.gone.is_none()) {
                let stream = &member.stream;
                sockets.push(if member.out.is_empty() { Socket::Read(stream) } else { Socket::ReadWrite(stream) });
                ranks.push(rank);
            }
        }
        sockets.extend(self.listener.iter().map(Socket::Accept));
        sockets.extend(self.strangers.iter().map(|s| Socket::Read(&s.stream)));
        let ready = wait(&sockets, limit);
        ranks.into_iter().zip(ready).filter(|(_, ready)| *ready).map(|(rank, _)| rank).collect()
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        loop {
            match listener.accept() {
                Ok((stream, address)) => {
                    // A connection that cannot be set up is closed: its owner tries again.
                    if stream.set_nonblocking(true).is_err() || stream.set_nodelay(true).is_err() {
                        continue;
                    }
                    let deadline = Instant::now() + HANDSHAKE_MAX.min(self.timeout / 2);
                    self.strangers.push_back(Stranger {
                        stream,
                        address,
                        deadline,
                        bytes: Vec::new(),
                        stage: Stage::Hello,
                    });
                    if self.strangers.len() > STRANGERS_MAX + self.rank_count as usize {
                        self.strangers.pop_front();
                        self.turned_away += 1;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    // Out of file descriptors, or a peer that left again.
                    std::thread::sleep(Duration::from_millis(1));
                    return;
                }
            }
        }
    }

    fn hear_strangers(&mut self) {
        let mut i = 0;
        while i < self.strangers.len() {
            match self.strangers[i].hear(&self.token) {
                Outcome::Waiting => i += 1,
                Outcome::Refused(reason) => {
                    let address = self.strangers[i].address;
                    self.count_turned_away(address, &reason);
                    i += 1;
                }
                Outcome::Gone(reason) => {
                    let stranger = self.strangers.remove(i);
                    if let (Some(stranger), Some(reason)) = (stranger, reason) {
                        self.count_turned_away(stranger.address, &reason);
                    }
                }
                Outcome::Joined { hello, patience_ms } => {
                    if let Some(stranger) = self.strangers.remove(i) {
                        self.admit(stranger, &hello, patience_ms);
                    }
                }
            }
        }
    }

    fn count_turned_away(&mut self, address: SocketAddr, reason: &str) {
        self.turned_away += 1;
        self.last_turned_away = format!("{address}: {reason}");
    }

    /// Takes a holder of the token as the rank that it says it is, unless it cannot be.
    fn admit(&mut self, mut stranger: Stranger, hello: &Hello, patience_ms: u32) {
        let (rank, rank_count) = (hello.rank, hello.rank_count);
        let refusal = if rank_count != self.rank_count {
            Some(format!("rank {rank} is told of {rank_count} ranks, and rank 0 of {}", self.rank_count))
        } else if rank >= self.rank_count {
            Some(format!("rank {rank} is not below the number of ranks, {rank_count}"))
        } else if self.members[rank as usize].is_some() {
            Some(format!("a process has joined as rank {rank} already"))
        } else {
            None
        };
        if let Some(refusal) = refusal {
            self.count_turned_away(stranger.address, &refusal);
            stranger.refuse(&refusal);
            self.strangers.push_back(stranger);
            return;
        }
        let Stage::Proof { transcript, .. } = &stranger.stage else { return };
        let welcome = Frame::outside_calls(Kind::Welcome, transcript.prove_root(&self.token));
        let mut member = Member {
            stream: stranger.stream,
            reader: FrameReader::new(MESSAGE_BYTES_MAX),
            out: VecDeque::new(),
            sent_bytes: 0,
            gone: None,
        };
        member.send(&welcome.encode().into());
        match &mut self.state {
            State::Joining { deadline } => {
                *deadline = (*deadline).min(Instant::now() + Duration::from_millis(patience_ms.into()));
            }
            // Too late: it hears what the others heard.
            State::Failed { sentence } => {
                member.send(&Frame::outside_calls(Kind::Failed, sentence.as_bytes()).encode().into());
            }
            State::Idle | State::Gathering(_) => {}
        }
        self.members[rank as usize] = Some(member);
        if matches!(self.state, State::Joining { .. }) && self.members.iter().all(Option::is_some) {
            self.listener = None;
            self.strangers.clear();
            self.state = State::Idle;
            self.send_to_all(&Frame::outside_calls(Kind::Complete, []));
        }
    }

    /// Reads what a rank has sent.
    fn hear(&mut self, rank: u32) {
        for _ in 0..CHUNKS_IN_A_ROW {
            let Some(member) = self.members[rank as usize].as_mut().filter(|m| m.gone.is_none()) else { return };
            let end = match member.stream.read(&mut self.buffer) {
                Ok(0) if member.reader.is_within_frame() => {
                    "closed its connection in the middle of a message".to_owned()
                }
                Ok(0) => "closed its connection".to_owned(),
                Ok(length) => {
                    member.reader.push(&self.buffer[..length]);
                    self.take_frames(rank);
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => format!("lost its connection ({error})"),
            };
            return self.lose(rank, end);
        }
    }

    fn take_frames(&mut self, rank: u32) {
        while let Some(member) = self.members[rank as usize].as_mut().filter(|m| m.gone.is_none()) {
            match member.reader.next_frame() {
                Ok(None) => return,
                Ok(Some(frame)) => self.take_frame(rank, frame),
                Err(error) => {
                    self.turn_away(rank, &error.to_string());
                }
            }
        }
    }

    fn take_frame(&mut self, rank: u32, frame: Frame) {
        match (frame.kind, &mut self.state) {
            (Kind::Goodbye, _) => self.lose(rank, "has left".to_owned()),
            // It will find the sentence that was sent to it.
            (Kind::Contribution, State::Failed { .. }) => {}
            (Kind::Contribution, State::Idle) => self.begin_call(rank, frame),
            (Kind::Contribution, State::Gathering(_)) => self.contribute(rank, frame),
            (kind, _) => self.turn_away(rank, &format!("it sent {kind:?} out of turn")),
        }
    }

    fn begin_call(&mut self, rank: u32, frame: Frame) {
        if let Some((gone, reason)) = self.first_gone() {
            return self.fail(&format!("rank {gone} {reason}, and {}", calls(rank, &frame.label, frame.sequence)));
        }
        if frame.sequence != self.sequence {
            let call = calls(rank, &frame.label, frame.sequence);
            return self.fail(&format!("{call}, but call {} is next", self.sequence));
        }
        self.state = State::Gathering(Call {
            label: frame.label.clone(),
            first_rank: rank,
            first_came: Instant::now(),
            contributions: (0..self.rank_count).map(|_| None).collect(),
        });
        self.contribute(rank, frame);
    }

    fn contribute(&mut self, rank: u32, frame: Frame) {
        let sequence = self.sequence;
        let State::Gathering(call) = &mut self.state else { return };
        if frame.sequence != sequence || frame.label != call.label {
            let sentence = format!(
                "ranks make different calls: {}, and {}",
                calls(call.first_rank, &call.label, sequence),
                calls(rank, &frame.label, frame.sequence)
            );
            return self.fail(&sentence);
        }
        let contribution = &mut call.contributions[rank as usize];
        if contribution.is_some() {
            return self.turn_away(rank, &format!("it came twice to call {sequence}"));
        }
        *contribution = Some(frame.body);
        if call.contributions.iter().any(Option::is_none) {
            return;
        }
        let contributions: Vec<_> = std::mem::take(&mut call.contributions).into_iter().flatten().collect();
        let (label, bytes) = (std::mem::take(&mut call.label), gathered_bytes(&contributions));
        if bytes > GATHERED_BYTES_MAX {
            return self.fail(&format!(
                "`{}`: all ranks together give {bytes} bytes, more than {GATHERED_BYTES_MAX}",
                phrase::shown(&label, 80)
            ));
        }
        self.state = State::Idle;
        self.sequence += 1;
        self.send_to_all(&Frame { kind: Kind::Gathered, sequence, label, body: encode_gathered(&contributions) });
    }

    /// A rank sent what it must not. It hears why, if it still listens; then it is lost.
    fn turn_away(&mut self, rank: u32, why: &str) {
        let reason = format!("is turned away: {why}");
        if let Some(member) = &mut self.members[rank as usize] {
            member.send(&Frame::outside_calls(Kind::Failed, format!("rank {rank} {reason}")).encode().into());
            member.flush();
        }
        self.lose(rank, reason);
    }

    /// A rank takes no part any more: the others hear of it at once if they wait for it, else at their next call.
    fn lose(&mut self, rank: u32, reason: String) {
        let sentence = match &self.state {
            State::Joining { .. } => Some(format!("rank {rank} joined and {reason} before all ranks had joined")),
            State::Gathering(call) => {
                Some(format!("rank {rank} {reason} during {}", named(&call.label, self.sequence)))
            }
            State::Idle | State::Failed { .. } => None,
        };
        if let Some(member) = &mut self.members[rank as usize] {
            member.gone = Some(reason);
        }
        if let Some(sentence) = sentence {
            self.fail(&sentence);
        }
    }

    fn first_gone(&self) -> Option<(usize, &str)> {
        self.members.iter().enumerate().find_map(|(r, m)| Some((r, m.as_ref()?.gone.as_deref()?)))
    }

    fn check_deadline(&mut self) {
        let now = Instant::now();
        match &self.state {
            State::Joining { deadline } if now >= *deadline => {
                let missing: Vec<u32> = (0..).zip(&self.members).filter(|(_, m)| m.is_none()).map(|(r, _)| r).collect();
                let mut sentence = format!(
                    "{} of {} {} not joined after {:.1} s (rank 0 listens at {})",
                    phrase::ranks(&missing),
                    self.rank_count,
                    has(&missing),
                    self.started.elapsed().as_secs_f64(),
                    self.listens_at,
                );
                if self.turned_away > 0 {
                    sentence += &format!("; turned away: {}, the last {}", self.turned_away, self.last_turned_away);
                }
                self.fail(&sentence);
            }
            State::Gathering(call) if now >= call.first_came + self.timeout => {
                let missing: Vec<u32> =
                    (0..).zip(&call.contributions).filter(|(_, c)| c.is_none()).map(|(r, _)| r).collect();
                let sentence = format!(
                    "{} of {} {} not come to {} after {:.1} s",
                    phrase::ranks(&missing),
                    self.rank_count,
                    has(&missing),
                    named(&call.label, self.sequence),
                    call.first_came.elapsed().as_secs_f64(),
                );
                self.fail(&sentence);
            }
            _ => {}
        }
    }

    /// Ends the rendezvous for all ranks, with one sentence.
    fn fail(&mut self, sentence: &str) {
        if matches!(self.state, State::Failed { .. }) {
            return;
        }
        self.state = State::Failed { sentence: sentence.to_owned() };
        self.send_to_all(&Frame::outside_calls(Kind::Failed, sentence));
    }

    fn send_to_all(&mut self, frame: &Frame) {
        let bytes: Arc<[u8]> = frame.encode().into();
        self.members.iter_mut().flatten().for_each(|m| m.send(&bytes));
    }

    /// Rank 0 has left: what was promised to the others is still sent, and that there is nothing more to come.
    fn say_last_words(mut self) {
        let reason = self.members[0].as_ref().and_then(|m| m.gone.clone());
        self.fail(&format!("rank 0 {}", reason.unwrap_or_else(|| "has left".to_owned())));
        let deadline = Instant::now() + LINGER;
        loop {
            let mut unsent = Vec::new();
            for member in self.members.iter_mut().flatten() {
                member.flush();
                // What arrives now is for nobody; left unread, it would make closing a reset.
                member.discard_input();
                if member.gone.is_none() && !member.out.is_empty() {
                    unsent.push(Socket::ReadWrite(&member.stream));
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if unsent.is_empty() || left.is_zero() {
                break;
            }
            wait(&unsent, Some(left));
        }
        for member in self.members.iter().flatten() {
            // The peer may have closed already.
            let _ = member.stream.shutdown(Shutdown::Write);
        }
    }
}

fn named(label: &str, sequence: u64) -> String {
    format!("`{}` (call {sequence})", phrase::shown(label, 80))
}

fn calls(rank: u32, label: &str, sequence: u64) -> String {
    format!("rank {rank} calls {}", named(label, sequence))
}

fn has(ranks: &[u32]) -> &'static str {
    if ranks.len() == 1 { "has" } else { "have" }
}

impl Stranger {
    fn hear(&mut self, token: &Token) -> Outcome {
        if Instant::now() >= self.deadline {
            let silent = !matches!(self.stage, Stage::Refused);
            return Outcome::Gone(silent.then(|| "it did not say in time which rank it is".to_owned()));
        }
        let needed = match self.stage {
            Stage::Hello => HELLO_BYTES,
            Stage::Proof { .. } => MEMBER_PROOF_BYTES,
            Stage::Refused => CHUNK_BYTES,
        };
        let mut chunk = [0; CHUNK_BYTES];
        match self.stream.read(&mut chunk[..needed - self.bytes.len()]) {
            Ok(0) => Outcome::Gone(match self.stage {
                Stage::Refused => None,
                _ => Some("it closed the connection before it said which rank it is".to_owned()),
            }),
            Ok(_) if matches!(self.stage, Stage::Refused) => Outcome::Waiting,
            Ok(length) => {
                self.bytes.extend_from_slice(&chunk[..length]);
                self.advance(token, needed)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Outcome::Waiting,
            Err(error) => Outcome::Gone(Some(error.to_string())),
        }
    }

    fn advance(&mut self, token: &Token, needed: usize) -> Outcome {
        if matches!(self.stage, Stage::Hello) && !may_be_handshake(&self.bytes) {
            return Outcome::Gone(Some(WireError::Magic.to_string()));
        }
        if self.bytes.len() < needed {
            return Outcome::Waiting;
        }
        let bytes = std::mem::take(&mut self.bytes);
        match &self.stage {
            Stage::Hello => self.take_hello(&bytes),
            Stage::Proof { hello, transcript } => {
                let proof = bytes.first_chunk::<MEMBER_PROOF_BYTES>();
                if let Some(patience_ms) = proof.and_then(|proof| transcript.accept_member(token, proof)) {
                    return Outcome::Joined { hello: hello.clone(), patience_ms };
                }
                let reason = format!("rank {} holds another token", hello.rank);
                self.refuse("its token is not rank 0's: TIDE_TOKEN must be the same for all ranks");
                Outcome::Refused(reason)
            }
            Stage::Refused => Outcome::Waiting,
        }
    }

    fn take_hello(&mut self, bytes: &[u8]) -> Outcome {
        let (Some(hello_bytes), Ok(nonce)) = (bytes.first_chunk::<HELLO_BYTES>(), random()) else {
            return Outcome::Gone(Some("rank 0 has no random numbers".to_owned()));
        };
        // Another version gets the challenge too: it shows which version is spoken here.
        if self.stream.write_all(&encode_challenge(&nonce)).is_err() {
            return Outcome::Gone(Some("it closed the connection before it said which rank it is".to_owned()));
        }
        match Hello::decode(hello_bytes) {
            Ok(hello) => {
                self.stage = Stage::Proof { hello, transcript: Transcript { hello: *hello_bytes, nonce } };
                Outcome::Waiting
            }
            Err(error) => Outcome::Gone(Some(error.to_string())),
        }
    }

    /// Answers, and hears nothing more of what it says. The answer is short, and the first words to a fresh connection: there
    /// is room for it.
    fn refuse(&mut self, sentence: &str) {
        let _ = self.stream.write_all(&Frame::outside_calls(Kind::Refused, sentence).encode());
        let _ = self.stream.shutdown(Shutdown::Write);
        self.stage = Stage::Refused;
        self.bytes.clear();
    }
}

impl Member {
    fn send(&mut self, bytes: &Arc<[u8]>) {
        if self.gone.is_none() {
            self.out.push_back(Arc::clone(bytes));
        }
    }

    /// Writes as much as there is room for. A connection that takes no more is found by reading it.
    fn flush(&mut self) {
        while let Some(frame) = self.out.front() {
            match self.stream.write(&frame[self.sent_bytes..]) {
                Ok(length) => {
                    self.sent_bytes += length;
                    if self.sent_bytes == frame.len() {
                        self.out.pop_front();
                        self.sent_bytes = 0;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => {
                    self.out.clear();
                    self.sent_bytes = 0;
                }
            }
        }
    }

    fn discard_input(&mut self) {
        let mut chunk = [0; CHUNK_BYTES];
        for _ in 0..CHUNKS_IN_A_ROW {
            if !matches!(self.stream.read(&mut chunk), Ok(length) if length > 0) {
                return;
            }
        }
    }
}

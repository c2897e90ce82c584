//! Processes find each other, whatever else comes to the same port, and lose each other with a sentence that names who.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};
use tide_gpu::TideError;
use tide_gpu::launch::{
    Exchange, Facts, GATHERED_BYTES_MAX, LABEL_BYTES_MAX, Launcher, MESSAGE_BYTES_MAX, Placement, Rendezvous,
    RendezvousOptions, Token, agree,
};

const TOKEN: &str = "the token of this job";
/// Longer than anything here takes; a test that runs into it fails.
const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(500);

/// A job of threads, each a rank.
struct Job {
    listener: TcpListener,
    options: RendezvousOptions,
}

impl Job {
    fn new(rank_count: u32, timeout: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let token = Token::new(TOKEN);
        Self { listener, options: RendezvousOptions { address, bind: None, token, rank: 0, rank_count, timeout } }
    }

    fn address(&self) -> String {
        self.options.address.clone()
    }

    /// Runs `work` on each of `ranks`, which may change its options before it joins.
    fn run<T: Send>(
        self,
        ranks: impl IntoIterator<Item = u32>,
        change: impl Fn(&mut RendezvousOptions) + Sync,
        work: impl Fn(Rendezvous) -> Result<T, TideError> + Sync,
    ) -> Vec<Result<T, TideError>> {
        let mut listener = Some(self.listener);
        let (change, work, options) = (&change, &work, &self.options);
        thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .into_iter()
                .map(|rank| {
                    let listener = if rank == 0 { listener.take() } else { None };
                    scope.spawn(move || {
                        let mut options = RendezvousOptions { rank, ..options.clone() };
                        change(&mut options);
                        let rendezvous = match listener {
                            Some(listener) => Rendezvous::host(listener, &options),
                            None => Rendezvous::join(&options),
                        };
                        work(rendezvous?)
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }
}

fn no_change(_: &mut RendezvousOptions) {}

/// The sentences of ranks that all failed.
fn sentences<T: std::fmt::Debug>(results: Vec<Result<T, TideError>>) -> Vec<String> {
    results
        .into_iter()
        .map(|r| match r.unwrap_err() {
            TideError::Rendezvous { detail } => detail,
            other => panic!("{other:?}"),
        })
        .collect()
}

/// Gathers each rank's number, twice, and checks it.
fn gather_twice(mut rendezvous: Rendezvous) -> Result<(), TideError> {
    for call in ["first", "second"] {
        let all = rendezvous.all_gather(call, &rendezvous.rank().to_le_bytes())?;
        let expected: Vec<_> = (0..rendezvous.rank_count()).map(|r| r.to_le_bytes().to_vec()).collect();
        assert_eq!(all, expected);
    }
    Ok(())
}

fn all_succeed(results: Vec<Result<(), TideError>>) {
    for result in results {
        result.unwrap();
    }
}

// The protocol, spoken from its description.

fn hello(rank: u32, rank_count: u32) -> Vec<u8> {
    let mut bytes = b"TIDE-RDV".to_vec();
    for number in [1, rank, rank_count] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend([7; 32]);
    bytes
}

fn hmac(parts: &[&[u8]]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(TOKEN.as_bytes()).unwrap();
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac.finalize().into_bytes().to_vec()
}

/// What a member with a minute's patience answers to a challenge.
fn proof(hello: &[u8], challenge: &[u8; 44]) -> Vec<u8> {
    let patience = 60_000_u32.to_le_bytes();
    [&patience[..], &hmac(&[b"member", hello, &challenge[12..], &patience])].concat()
}

fn frame_header(kind: u16, sequence: u64, label_bytes: u32, body_bytes: u32) -> Vec<u8> {
    let mut bytes = b"TIDf".to_vec();
    bytes.extend(1_u16.to_le_bytes());
    bytes.extend(kind.to_le_bytes());
    bytes.extend(label_bytes.to_le_bytes());
    bytes.extend(body_bytes.to_le_bytes());
    bytes.extend(sequence.to_le_bytes());
    bytes
}

const WELCOME: u16 = 1;
const REFUSED: u16 = 2;
const COMPLETE: u16 = 3;
const CONTRIBUTION: u16 = 4;

fn contribution(sequence: u64, label: &str, body: &[u8]) -> Vec<u8> {
    let header = frame_header(CONTRIBUTION, sequence, label.len() as u32, body.len() as u32);
    [&header, label.as_bytes(), body].concat()
}

/// Kind and body of the next frame.
fn read_frame(stream: &mut TcpStream) -> (u16, Vec<u8>) {
    let mut header = [0; 24];
    stream.read_exact(&mut header).unwrap();
    let number = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap()) as usize;
    let mut rest = vec![0; number(8) + number(12)];
    stream.read_exact(&mut rest).unwrap();
    (u16::from_le_bytes([header[6], header[7]]), rest.split_off(number(8)))
}

/// A rank that has joined, and does as the test likes.
fn join_by_hand(address: &str, rank: u32, rank_count: u32) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let hello = hello(rank, rank_count);
    stream.write_all(&hello).unwrap();
    let mut challenge = [0; 44];
    stream.read_exact(&mut challenge).unwrap();
    stream.write_all(&proof(&hello, &challenge)).unwrap();
    let (kind, body) = read_frame(&mut stream);
    assert_eq!((kind, body), (WELCOME, hmac(&[b"root", &hello, &challenge[12..]])));
    stream
}

/// Reads until the other side closes; fails if it does not.
fn read_to_end(stream: &mut TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut bytes = Vec::new();
    // A reset is an end too.
    if let Err(error) = stream.read_to_end(&mut bytes) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
    bytes
}

#[test]
fn every_rank_gets_what_every_rank_gave() {
    let results = Job::new(8, LONG).run(0..8, no_change, |mut r| {
        for call in 0..50_u32 {
            let size = |rank: u32| (rank * 37 + call * 11) as usize % 500;
            let all = r.all_gather(&format!("call {call}"), &vec![r.rank() as u8; size(r.rank())])?;
            for (rank, bytes) in (0..).zip(&all) {
                assert_eq!(bytes, &vec![rank as u8; size(rank)]);
            }
        }
        let id = r.broadcast("id", (r.rank() == 0).then_some(b"the id"))?;
        assert_eq!(id, b"the id");
        r.barrier("end")
    });
    all_succeed(results);
}

#[test]
fn a_hundred_ranks_meet_and_gather() {
    all_succeed(Job::new(100, LONG).run(0..100, no_change, gather_twice));
}

#[test]
fn a_job_of_one_rank_is_a_job() {
    all_succeed(Job::new(1, LONG).run([0], no_change, gather_twice));
}

#[test]
fn messages_up_to_the_limit_go_through_and_larger_ones_are_refused() {
    let results = Job::new(3, LONG).run(0..3, no_change, |mut r| {
        let bytes = vec![r.rank() as u8; MESSAGE_BYTES_MAX];
        let too_long = r.all_gather("x", &[&bytes[..], &[0]].concat()).unwrap_err();
        assert!(matches!(too_long, TideError::Usage(_)), "{too_long}");
        assert!(matches!(r.barrier(&"x".repeat(LABEL_BYTES_MAX + 1)), Err(TideError::Usage(_))));
        // A refused call was none: the next one works.
        let all = r.all_gather("large", &bytes)?;
        assert!(all.iter().enumerate().all(|(rank, b)| b.len() == MESSAGE_BYTES_MAX && b[0] == rank as u8));
        Ok(())
    });
    all_succeed(results);
}

#[test]
fn all_ranks_together_have_a_limit_too() {
    let rank_count = (GATHERED_BYTES_MAX / MESSAGE_BYTES_MAX) as u32;
    let job = Job::new(rank_count, LONG);
    let found =
        sentences(job.run(0..rank_count, no_change, |mut r| r.all_gather("large", &vec![0; MESSAGE_BYTES_MAX])));
    assert!(found.iter().all(|s| s.starts_with("`large`: all ranks together give 67108884 bytes")), "{found:?}");
}

#[test]
fn a_broadcast_is_from_rank_0_alone() {
    let results = Job::new(2, LONG).run(0..2, no_change, |mut r| {
        let wrong = if r.rank() == 0 { None } else { Some(&b"x"[..]) };
        assert!(matches!(r.broadcast("x", wrong), Err(TideError::Usage(_))));
        r.barrier("end")
    });
    all_succeed(results);
}

/// T36: a peer that never joins.
#[test]
fn t36_a_rank_that_never_comes_ends_all_others_with_its_name() {
    let started = Instant::now();
    let found = sentences(Job::new(8, SHORT).run([0, 1, 2, 4, 6, 7], no_change, gather_twice));
    assert!(started.elapsed() < SHORT * 2, "{:?}", started.elapsed());
    assert!(
        found[0].starts_with("ranks 3, 5 of 8 have not joined after 0.5 s (rank 0 listens at 127.0.0.1:"),
        "{found:?}"
    );
    assert!(found.iter().all(|s| *s == found[0]), "{found:?}");
}

#[test]
fn a_rank_that_came_earlier_than_rank_0_still_hears_who_is_missing() {
    let job = Job::new(3, SHORT);
    // Connections wait in the listener until rank 0 serves it.
    let change = |o: &mut RendezvousOptions| {
        if o.rank == 0 {
            thread::sleep(SHORT / 2);
        }
    };
    let found = sentences(job.run([0, 1], change, gather_twice));
    assert!(found.iter().all(|s| s.starts_with("rank 2 of 3 has not joined after 0.")), "{found:?}");
}

#[test]
fn without_rank_0_the_others_say_where_they_looked() {
    let job = Job::new(2, SHORT);
    let address = job.address();
    let options = RendezvousOptions { rank: 1, ..job.options.clone() };
    drop(job);
    let started = Instant::now();
    let text = Rendezvous::join(&options).unwrap_err().to_string();
    assert!(started.elapsed() < SHORT * 2);
    assert!(text.contains(&format!("rank 1: rank 0 does not answer at {address} after 0.5 s")), "{text}");
    let endless = RendezvousOptions { timeout: Duration::MAX, ..options.clone() };
    assert!(matches!(Rendezvous::join(&endless), Err(TideError::Usage(_))));
    let options = RendezvousOptions { address: "no-such-host.invalid:1".to_owned(), ..options };
    let text = Rendezvous::join(&options).unwrap_err().to_string();
    assert!(text.contains("no-such-host.invalid:1"), "{text}");
}

/// T26: one rank hangs.
#[test]
fn t26_a_rank_that_does_not_come_to_a_call_is_named_and_hears_it_later() {
    let started = Instant::now();
    let found = sentences(Job::new(4, SHORT).run(0..4, no_change, |mut r| {
        r.barrier("start")?;
        if r.rank() == 3 {
            thread::sleep(SHORT * 2);
        }
        r.all_gather("tensors", b"x")
    }));
    assert!(started.elapsed() < SHORT * 4);
    assert!(found[0].starts_with("rank 3 of 4 has not come to `tensors` (call 1) after 0.5 s"), "{found:?}");
    assert!(found.iter().all(|s| *s == found[0]), "{found:?}");
}

#[test]
fn rank_0_is_named_as_any_other() {
    let found = sentences(Job::new(3, SHORT).run(0..3, no_change, |mut r| {
        if r.rank() == 0 {
            thread::sleep(SHORT * 2);
        }
        r.all_gather("tensors", b"x")
    }));
    assert!(
        found.iter().all(|s| s.starts_with("rank 0 of 3 has not come to `tensors` (call 0) after 0.5 s")),
        "{found:?}"
    );
}

#[test]
fn ranks_that_make_different_calls_are_named_with_both() {
    let started = Instant::now();
    let found = sentences(Job::new(4, LONG).run(0..4, no_change, |mut r| {
        r.barrier("start")?;
        let label = if r.rank() == 2 { "gradients" } else { "tensors" };
        r.all_gather(label, b"x")
    }));
    assert!(started.elapsed() < LONG / 4);
    assert!(found.iter().all(|s| *s == found[0]), "{found:?}");
    let text = &found[0];
    assert!(text.starts_with("ranks make different calls: rank "), "{text}");
    for part in ["rank 2 calls `gradients` (call 1)", "calls `tensors` (call 1)"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_rank_one_call_ahead_is_found() {
    let job = Job::new(2, LONG);
    let address = job.address();
    let found = thread::scope(|scope| {
        scope.spawn(move || {
            let mut stream = join_by_hand(&address, 1, 2);
            assert_eq!(read_frame(&mut stream).0, COMPLETE);
            stream.write_all(&contribution(1, "x", b"")).unwrap();
            read_to_end(&mut stream);
        });
        sentences(job.run([0], no_change, |mut r| r.barrier("x")))
    });
    assert!(found[0].contains("rank 1 calls `x` (call 1)"), "{found:?}");
}

/// T27: a rank ends during a call.
#[test]
fn t27_a_rank_that_leaves_during_a_call_is_named_at_once() {
    let started = Instant::now();
    let found = sentences(Job::new(4, LONG).run(0..4, no_change, |mut r| {
        r.barrier("start")?;
        if r.rank() == 2 {
            thread::sleep(Duration::from_millis(100));
            return Err(TideError::rendezvous("rank 2 has left during `tensors` (call 1)"));
        }
        r.all_gather("tensors", b"x")
    }));
    assert!(started.elapsed() < LONG / 4);
    assert!(found.iter().all(|s| s == "rank 2 has left during `tensors` (call 1)"), "{found:?}");
}

#[test]
fn a_rank_that_left_between_calls_is_named_at_the_next() {
    let found = sentences(Job::new(3, LONG).run(0..3, no_change, |mut r| {
        r.barrier("start")?;
        if r.rank() == 2 {
            return Err(TideError::rendezvous("rank 2 has left, and rank X calls `tensors` (call 1)"));
        }
        thread::sleep(Duration::from_millis(100));
        r.all_gather("tensors", b"x")
    }));
    assert!(
        found[0].starts_with("rank 2 has left, and rank ") && found[0].ends_with(" calls `tensors` (call 1)"),
        "{found:?}"
    );
    assert_eq!(found[0], found[1]);
}

#[test]
fn when_rank_0_leaves_the_others_are_told() {
    let started = Instant::now();
    let found = sentences(Job::new(3, LONG).run(0..3, no_change, |mut r| {
        r.barrier("start")?;
        if r.rank() == 0 {
            return Err(TideError::rendezvous("rank 0 has left"));
        }
        r.all_gather("tensors", b"x")
    }));
    assert!(started.elapsed() < LONG / 4);
    assert!(found.iter().all(|s| s.contains("rank 0")), "{found:?}");
}

#[test]
fn after_a_failure_every_call_gives_the_same() {
    let results = Job::new(2, LONG).run(0..2, no_change, |mut r| {
        let first = r.barrier(if r.rank() == 0 { "a" } else { "b" }).unwrap_err();
        assert_eq!(r.barrier("c").unwrap_err(), first);
        assert_eq!(r.all_gather("d", b"").unwrap_err(), first);
        Ok(())
    });
    all_succeed(results);
}

/// Runs a job of three while `stranger` does what it does to its address; the job does not mind.
fn undisturbed_by(stranger: impl FnOnce(&str) + Send) {
    let job = Job::new(3, LONG);
    let address = job.address();
    let started = Instant::now();
    thread::scope(|scope| {
        let stranger = scope.spawn(move || stranger(&address));
        // The last rank comes when the stranger has done its worst.
        let stranger = std::sync::Mutex::new(Some(stranger));
        let change = |o: &mut RendezvousOptions| {
            if o.rank == 2 {
                stranger.lock().unwrap().take().unwrap().join().unwrap();
            }
        };
        all_succeed(job.run(0..3, change, gather_twice));
    });
    assert!(started.elapsed() < LONG / 2);
}

#[test]
fn a_connection_that_says_nothing_disturbs_nobody() {
    let mut kept = None;
    undisturbed_by(|address| kept = Some(TcpStream::connect(address).unwrap()));
    assert_eq!(read_to_end(&mut kept.unwrap()), b"");
}

#[test]
fn five_hundred_silent_connections_disturb_nobody() {
    let mut kept = Vec::new();
    undisturbed_by(|address| kept.extend((0..500).map(|_| TcpStream::connect(address).unwrap())));
}

#[test]
fn garbage_is_turned_away() {
    undisturbed_by(|address| {
        for seed in 0..20 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut stream = TcpStream::connect(address).unwrap();
            let bytes: Vec<u8> = (0..rng.usize(1..5000)).map(|_| rng.u8(..)).collect();
            // It may be closed before all is written.
            let _ = stream.write_all(&bytes);
            read_to_end(&mut stream);
        }
    });
}

#[test]
fn an_http_client_is_turned_away() {
    undisturbed_by(|address| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: tide\r\n\r\n").unwrap();
        assert_eq!(read_to_end(&mut stream), b"");
    });
}

#[test]
fn a_connection_that_closes_in_the_middle_of_its_hello_disturbs_nobody() {
    undisturbed_by(|address| {
        TcpStream::connect(address).unwrap().write_all(&hello(2, 3)[..30]).unwrap();
    });
}

#[test]
fn a_slow_trickle_is_cut_off() {
    let job = Job::new(2, Duration::from_secs(2));
    let address = job.address();
    thread::scope(|scope| {
        let trickle = scope.spawn(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            let started = Instant::now();
            let hello = hello(1, 2);
            let sent = hello.chunks(1).cycle().take_while(|byte| {
                thread::sleep(Duration::from_millis(50));
                stream.write_all(byte).is_ok()
            });
            // 52 bytes would take 2.6 s.
            assert!(sent.count() < 52);
            started.elapsed()
        });
        let found = sentences(job.run([0], no_change, gather_twice));
        assert!(found[0].contains("rank 1 of 2 has not joined after 2.0 s"), "{found:?}");
        assert!(found[0].contains("turned away: 1, the last 127.0.0.1:"), "{found:?}");
        assert!(found[0].ends_with("it did not say in time which rank it is"), "{found:?}");
        assert!(trickle.join().unwrap() < Duration::from_secs(2));
    });
}

#[test]
fn a_wrong_token_is_refused_and_not_repeated() {
    let found = sentences(Job::new(3, SHORT).run(
        0..3,
        |o| {
            if o.rank == 2 {
                o.token = Token::new("hush-hush");
            }
        },
        gather_twice,
    ));
    assert!(found[2].contains("refuses rank 2 of 3: its token is not rank 0's"), "{found:?}");
    assert!(found[0].starts_with("rank 2 of 3 has not joined"), "{found:?}");
    assert!(found[0].ends_with("rank 2 holds another token"), "{found:?}");
    assert!(found.iter().all(|s| !s.contains("hush") && !s.contains(TOKEN)), "{found:?}");
}

/// The bytes that a member sends never hold the token, and a proof serves once.
#[test]
fn a_proof_that_was_overheard_is_worth_nothing() {
    undisturbed_by(|address| {
        let hello = hello(2, 3);
        let mut first = TcpStream::connect(address).unwrap();
        first.write_all(&hello).unwrap();
        let mut challenge = [0; 44];
        first.read_exact(&mut challenge).unwrap();
        let overheard = proof(&hello, &challenge);
        let mut second = TcpStream::connect(address).unwrap();
        second.write_all(&[&hello[..], &overheard].concat()).unwrap();
        second.read_exact(&mut challenge).unwrap();
        assert_eq!(read_frame(&mut second).0, REFUSED);
    });
}

#[test]
fn a_second_process_of_one_rank_is_refused() {
    let job = Job::new(3, LONG);
    let options = RendezvousOptions { rank: 1, ..job.options.clone() };
    let address = job.address();
    thread::scope(|scope| {
        scope.spawn(move || {
            // Rank 1 is there; then comes another one.
            let first = join_by_hand(&address, 1, 3);
            let text = Rendezvous::join(&options).unwrap_err().to_string();
            assert!(text.contains("refuses rank 1 of 3: a process has joined as rank 1 already"), "{text}");
            let mut first = first;
            let mut third = join_by_hand(&address, 2, 3);
            for stream in [&mut first, &mut third] {
                assert_eq!(read_frame(stream).0, COMPLETE);
                stream.write_all(&contribution(0, "first", &1_u32.to_le_bytes())).unwrap();
            }
            read_frame(&mut first);
        });
        let results = job.run([0], no_change, |mut r| r.all_gather("first", b"0"));
        assert_eq!(results[0].as_ref().unwrap().len(), 3);
    });
}

/// Joins as a process that holds the token but was told something else; returns what it is refused with.
fn refusal(rank: u32, rank_count: u32) -> String {
    let mut refusal = String::new();
    undisturbed_by(|address| {
        let hello = hello(rank, rank_count);
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&hello).unwrap();
        let mut challenge = [0; 44];
        stream.read_exact(&mut challenge).unwrap();
        stream.write_all(&proof(&hello, &challenge)).unwrap();
        let (kind, body) = read_frame(&mut stream);
        assert_eq!(kind, REFUSED);
        refusal = String::from_utf8(body).unwrap();
    });
    refusal
}

#[test]
fn a_rank_out_of_range_is_refused() {
    assert_eq!(refusal(3, 3), "rank 3 is not below the number of ranks, 3");
    assert_eq!(refusal(u32::MAX, 3), "rank 4294967295 is not below the number of ranks, 3");
    let options = RendezvousOptions { rank: 3, ..Job::new(3, SHORT).options };
    assert!(matches!(Rendezvous::join(&options), Err(TideError::Usage(_))));
}

#[test]
fn another_number_of_ranks_is_refused() {
    assert_eq!(refusal(2, 4), "rank 2 is told of 4 ranks, and rank 0 of 3");
}

/// T53: our own protocol's version.
#[test]
fn t53_another_version_of_the_protocol_is_named() {
    undisturbed_by(|address| {
        let mut hello = hello(2, 3);
        hello[8] = 2;
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&hello).unwrap();
        // The answer says which version is spoken, and nothing more.
        let answer = read_to_end(&mut stream);
        assert_eq!((answer.len(), &answer[..12]), (44, &b"TIDE-RDV\x01\0\0\0"[..]));
    });
    let text = answered_with(|stream| {
        let mut challenge = b"TIDE-RDV\x02\0\0\0".to_vec();
        challenge.extend([0; 32]);
        stream.write_all(&challenge).unwrap();
        read_to_end(stream);
    });
    assert!(text.contains("it speaks version 2 of the protocol, not 1"), "{text}");
}

/// What rank 1 says of a "rank 0" that behaves like this.
fn answered_with(behave: impl Fn(&mut TcpStream) + Send + Sync) -> String {
    let job = Job::new(2, SHORT);
    let options = RendezvousOptions { rank: 1, ..job.options };
    job.listener.set_nonblocking(true).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // ORDER: Relaxed; a flag, and no data.
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                match job.listener.accept() {
                    Ok((mut stream, _)) => {
                        stream.set_nonblocking(false).unwrap();
                        behave(&mut stream);
                    }
                    Err(_) => thread::sleep(Duration::from_millis(5)),
                }
            }
        });
        let started = Instant::now();
        let text = Rendezvous::join(&options).unwrap_err().to_string();
        assert!(started.elapsed() < SHORT * 2);
        // ORDER: as above.
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        text
    })
}

#[test]
fn a_server_of_something_else_is_found_out() {
    let text = answered_with(|stream| {
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    });
    assert!(text.contains("it does not speak TIDE's protocol"), "{text}");
    let text = answered_with(|stream| {
        read_to_end(stream);
    });
    assert!(text.contains("it accepts connections and says nothing"), "{text}");
    let text = answered_with(|_| {});
    assert!(text.contains("rank 0 does not answer at"), "{text}");
}

#[test]
fn a_root_that_does_not_hold_the_token_is_found_out() {
    let behave = |stream: &mut TcpStream| {
        let mut challenge = b"TIDE-RDV\x01\0\0\0".to_vec();
        challenge.extend([5; 32]);
        stream.write_all(&challenge).unwrap();
        let mut introduction = [0; 52 + 36];
        stream.read_exact(&mut introduction).unwrap();
        // The best it can do: send the member's own proof back.
        let mut welcome = frame_header(WELCOME, 0, 0, 32);
        welcome.extend(&introduction[56..]);
        stream.write_all(&welcome).unwrap();
        read_to_end(stream);
    };
    let text = answered_with(behave);
    assert!(text.contains("it does not hold this job's token"), "{text}");
}

/// A job of three whose rank 2 joins and then does what it does. The sentence of the others.
fn broken_member(behave: impl FnOnce(TcpStream) + Send) -> String {
    let job = Job::new(3, LONG);
    let address = job.address();
    let started = Instant::now();
    let found = thread::scope(|scope| {
        scope.spawn(move || {
            let mut stream = join_by_hand(&address, 2, 3);
            assert_eq!(read_frame(&mut stream).0, COMPLETE);
            behave(stream);
        });
        sentences(job.run(0..2, no_change, |mut r| r.all_gather("tensors", b"x")))
    });
    assert!(started.elapsed() < LONG / 4);
    assert_eq!(found[0], found[1]);
    found.into_iter().next().unwrap()
}

#[test]
fn a_message_that_announces_too_much_is_refused_before_it_comes() {
    let text = broken_member(|mut stream| {
        stream.write_all(&frame_header(CONTRIBUTION, 0, 7, u32::MAX)).unwrap();
        let (_, body) = read_frame(&mut stream);
        let own = String::from_utf8(body).unwrap();
        assert!(own.contains("announces a message of 4294967295 bytes, more than 16777216"), "{own}");
    });
    assert!(text.contains("rank 2 is turned away: it announces a message of 4294967295 bytes"), "{text}");
}

#[test]
fn garbage_from_a_rank_ends_the_job_with_its_name() {
    let text = broken_member(|mut stream| {
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        read_to_end(&mut stream);
    });
    assert!(text.contains("rank 2 is turned away: it does not speak TIDE's protocol"), "{text}");
}

#[test]
fn a_rank_that_dies_in_the_middle_of_a_message_is_named() {
    let text = broken_member(|mut stream| {
        stream.write_all(&contribution(0, "tensors", &[0; 1000])[..500]).unwrap();
    });
    assert!(text.contains("rank 2 closed its connection in the middle of a message"), "{text}");
}

#[test]
fn a_rank_that_comes_twice_to_a_call_is_named() {
    let job = Job::new(2, LONG);
    let address = job.address();
    let found = thread::scope(|scope| {
        scope.spawn(move || {
            let mut stream = join_by_hand(&address, 1, 2);
            assert_eq!(read_frame(&mut stream).0, COMPLETE);
            let twice = [contribution(0, "tensors", b""), contribution(0, "tensors", b"")].concat();
            stream.write_all(&twice).unwrap();
            read_to_end(&mut stream);
        });
        sentences(job.run([0], no_change, |mut r| {
            thread::sleep(Duration::from_millis(200));
            r.barrier("tensors")
        }))
    });
    assert!(found[0].contains("rank 1 is turned away: it came twice to call 0"), "{found:?}");
}

#[test]
fn a_rank_that_dies_before_all_have_joined_is_named() {
    let job = Job::new(3, LONG);
    let address = job.address();
    let started = Instant::now();
    let found = thread::scope(|scope| {
        scope.spawn(move || drop(join_by_hand(&address, 1, 3)));
        sentences(job.run([0], no_change, gather_twice))
    });
    assert!(started.elapsed() < LONG / 4);
    assert!(found[0].contains("rank 1 joined and closed its connection before all ranks had joined"), "{found:?}");
}

/// A trickling rank does not hold the others past the deadline.
#[test]
fn a_rank_that_trickles_its_message_is_named_at_the_deadline() {
    let job = Job::new(2, SHORT);
    let address = job.address();
    let found = thread::scope(|scope| {
        scope.spawn(move || {
            let mut stream = join_by_hand(&address, 1, 2);
            assert_eq!(read_frame(&mut stream).0, COMPLETE);
            let message = contribution(0, "tensors", &[0; 1000]);
            for byte in message.chunks(1).take(40) {
                thread::sleep(Duration::from_millis(20));
                let _ = stream.write_all(byte);
            }
            read_to_end(&mut stream);
        });
        sentences(job.run([0], no_change, |mut r| r.all_gather("tensors", b"x")))
    });
    assert!(found[0].starts_with("rank 1 of 2 has not come to `tensors` (call 0) after 0.5 s"), "{found:?}");
}

#[test]
fn rank_0_listens_where_it_is_told_and_nowhere_else() {
    // All of 127/8 is this machine's.
    let listens_on = |bind: Option<IpAddr>| {
        let job = Job::new(2, LONG);
        let options = RendezvousOptions { bind, ..job.options };
        drop(job.listener);
        thread::scope(|scope| {
            let root = scope.spawn(|| Rendezvous::join(&options));
            let member = RendezvousOptions { rank: 1, ..options.clone() };
            let port = options.address.rsplit_once(':').unwrap().1;
            let reached = loop {
                if TcpStream::connect(&options.address).is_ok() {
                    break TcpStream::connect(format!("127.0.0.2:{port}")).is_ok();
                }
                thread::sleep(Duration::from_millis(5));
            };
            let member = Rendezvous::join(&member).unwrap();
            root.join().unwrap().unwrap();
            drop(member);
            reached
        })
    };
    assert!(!listens_on(None));
    assert!(listens_on(Some("0.0.0.0".parse().unwrap())));
}

#[test]
fn an_address_that_is_taken_or_not_here_is_refused_at_once() {
    let job = Job::new(2, LONG);
    let text = Rendezvous::join(&job.options).unwrap_err().to_string();
    assert!(text.contains(&format!("{}: rank 0 cannot listen there", job.address())), "{text}");
    let options = RendezvousOptions { address: "192.0.2.1:29500".to_owned(), ..job.options };
    let text = Rendezvous::join(&options).unwrap_err().to_string();
    assert!(text.contains("192.0.2.1:29500: rank 0 cannot listen there"), "{text}");
}

/// T24, T53: all ranks stop, each with the same sentence.
#[test]
fn ranks_that_hold_different_facts_all_get_the_same_sentence() {
    let results = Job::new(4, LONG).run(0..4, no_change, |mut r| {
        agree(&mut r, "same", &Facts::new().with("seed", 7))?;
        let plan = if r.rank() < 2 { "a,b" } else { "b,a" };
        let error = agree(&mut r, "plan", &Facts::new().with("protocol", 1).with("plan", plan)).unwrap_err();
        // A disagreement is no failure of the exchange.
        r.barrier("end")?;
        Ok(error)
    });
    for result in results {
        let error = result.unwrap();
        assert!(matches!(error, TideError::Disagreement { .. }));
        assert_eq!(error.to_string(), "ranks disagree on plan: ranks 0-1 have a,b; ranks 2-3 have b,a");
    }
}

/// What all ranks say of placements (local rank, number of local ranks).
fn placements(local: &[(u32, u32)]) -> Vec<Result<(), TideError>> {
    let rank_count = local.len() as u32;
    Job::new(rank_count, LONG).run(0..rank_count, no_change, |mut r| {
        let (local_rank, local_rank_count) = local[r.rank() as usize];
        let launcher = Launcher::Torchrun;
        let rank = r.rank();
        Placement { launcher, rank, rank_count, local_rank, local_rank_count, rendezvous: None }.agree(&mut r)
    })
}

#[test]
fn t32_unequal_nodes_and_another_order_are_refused_on_all_ranks() {
    for result in placements(&[(0, 4), (1, 4), (2, 4), (3, 4), (0, 2), (1, 2)]) {
        assert_eq!(
            result.unwrap_err().to_string(),
            "ranks disagree on the number of ranks on a node: ranks 0-3 have 4; ranks 4-5 have 2"
        );
    }
    for result in placements(&[(0, 2), (0, 2), (1, 2), (1, 2)]) {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("numbered node by node: rank 1 has local rank 0 of 2, not 1"), "{text}");
    }
    all_succeed(placements(&[(0, 2), (1, 2), (0, 2), (1, 2)]));
}

#[test]
fn what_a_rank_sends_instead_of_facts_is_refused_by_all() {
    let results = Job::new(3, LONG).run(0..3, no_change, |mut r| {
        if r.rank() == 1 {
            return r.all_gather("facts", &[1, 0, 255, 255, 255, 255]).map(|_| String::new());
        }
        Ok(agree(&mut r, "facts", &Facts::new()).unwrap_err().to_string())
    });
    for rank in [0, 2] {
        assert_eq!(results[rank].as_ref().unwrap(), "rendezvous: `facts`: what rank 1 sent are no facts");
    }
}

// Processes: this file's own binary, started again for one of the tests below that do nothing otherwise.

/// The placement of a process that a test started; `None` in a run of the tests.
fn started_by_a_test() -> Option<Placement> {
    // Another launcher may have started the tests.
    let own = |name: &str| if name.starts_with("TIDE_") { std::env::var(name).ok() } else { None };
    Placement::detect(&own).unwrap()
}

fn join_from_env(placement: &Placement) -> Result<Rendezvous, TideError> {
    let env = |name: &str| std::env::var(name).ok();
    let mut rendezvous = Rendezvous::join(&RendezvousOptions::new(placement, &env, LONG)?)?;
    placement.agree(&mut rendezvous)?;
    Ok(rendezvous)
}

#[test]
fn process_gathers() {
    let Some(placement) = started_by_a_test() else { return };
    let mut rendezvous = join_from_env(&placement).unwrap();
    let all = rendezvous.all_gather("numbers", placement.rank.to_string().as_bytes()).unwrap();
    println!("\n{placement} gathered {}", String::from_utf8(all.concat()).unwrap());
    rendezvous.barrier("end").unwrap();
}

#[test]
fn process_dies_in_a_call() {
    let Some(placement) = started_by_a_test() else { return };
    let mut rendezvous = join_from_env(&placement).unwrap();
    if placement.rank == 2 {
        std::process::abort();
    }
    println!("\nheard: {}", rendezvous.barrier("tensors").unwrap_err());
}

/// The hub's thread is there while its rendezvous is, and no longer.
#[test]
fn process_leaves_no_thread() {
    let Some(placement) = started_by_a_test() else { return };
    let hub_count = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.map(|t| std::fs::read_to_string(t.unwrap().path().join("comm")).unwrap_or_default());
        names.filter(|name| name.starts_with("tide-rendezvous")).count()
    };
    let rendezvous = join_from_env(&placement).unwrap();
    let during = hub_count();
    drop(rendezvous);
    println!("\nhubs: {during} then {}", hub_count());
}

#[cfg(target_os = "linux")]
mod spawned {
    use super::*;
    use std::ffi::OsString;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    use std::sync::{Arc, Mutex};
    use tide_gpu::launch::spawn::{SpawnOptions, spawn_into};

    const GRACE: Duration = Duration::from_millis(300);

    fn test_binary(local_rank_count: u32, test: &str) -> SpawnOptions {
        let arguments = ["--exact", test, "--nocapture", "--test-threads=1"].map(OsString::from);
        SpawnOptions { grace: GRACE, ..SpawnOptions::new(local_rank_count, arguments).unwrap() }
    }

    fn shell(local_rank_count: u32, script: &str) -> SpawnOptions {
        let arguments = ["-c", script].map(OsString::from).to_vec();
        SpawnOptions { program: "/bin/sh".into(), arguments, ..test_binary(local_rank_count, "") }
    }

    /// Status, and the lines of each stream in order.
    fn run(options: &SpawnOptions) -> (u8, Vec<String>, Vec<String>) {
        let sinks = [(); 2].map(|()| Arc::new(Mutex::new(Vec::new())));
        let status = spawn_into(options, sinks[0].clone(), sinks[1].clone()).unwrap();
        let [out, err] = sinks.map(|sink| {
            let text = String::from_utf8(sink.lock().unwrap().clone()).unwrap();
            let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        });
        (status, out, err)
    }

    fn refused(options: &SpawnOptions) -> String {
        let sink = Arc::new(Mutex::new(Vec::new()));
        spawn_into(options, sink.clone(), sink).unwrap_err().to_string()
    }

    fn containing<'a>(lines: &'a [String], part: &str) -> Vec<&'a str> {
        lines.iter().map(String::as_str).filter(|l| l.contains(part)).collect()
    }

    #[test]
    fn processes_find_each_other() {
        let (status, out, err) = run(&test_binary(4, "process_gathers"));
        assert_eq!(status, 0, "{out:?} {err:?}");
        let gathered = containing(&out, "gathered 0123");
        assert_eq!(gathered.len(), 4, "{out:?}");
        for (rank, line) in gathered.iter().enumerate() {
            let start = format!("[{rank}] --spawn: rank {rank} of 4, local rank {rank} of 4, rank 0 at 127.0.0.1:");
            assert!(line.starts_with(&start), "{line}");
        }
    }

    /// T27: killed in the middle.
    #[test]
    fn t27_a_process_that_dies_is_named_by_all_others() {
        let (status, out, err) = run(&test_binary(4, "process_dies_in_a_call"));
        assert_eq!(status, 128 + 6, "{out:?} {err:?}");
        let heard = containing(&out, "heard: ");
        assert_eq!(heard.len(), 3, "{out:?}");
        assert!(heard.iter().all(|l| l.contains("rank 2 closed its connection")), "{out:?}");
    }

    #[test]
    fn a_dropped_rendezvous_leaves_no_thread() {
        let (status, out, _) = run(&test_binary(2, "process_leaves_no_thread"));
        assert_eq!((status, containing(&out, "hubs: ")), (0, vec!["[0] hubs: 1 then 0", "[1] hubs: 0 then 0"]));
    }

    #[test]
    fn output_comes_with_the_rank_and_in_its_own_stream() {
        let (status, out, err) = run(&shell(3, "echo out $TIDE_RANK; echo err >&2; printf 'no newline'"));
        assert_eq!(status, 0);
        assert_eq!(out, ["[0] no newline", "[0] out 0", "[1] no newline", "[1] out 1", "[2] no newline", "[2] out 2"]);
        assert_eq!(err, ["[0] err", "[1] err", "[2] err"]);
    }

    fn outer(node: u32) -> Placement {
        Placement {
            launcher: Launcher::Srun,
            rank: node,
            rank_count: 2,
            local_rank: 0,
            local_rank_count: 1,
            rendezvous: Some("node1:29500".to_owned()),
        }
    }

    #[test]
    fn ranks_go_on_from_node_to_node() {
        let script =
            "echo $TIDE_RANK/$TIDE_RANK_COUNT $TIDE_LOCAL_RANK/$TIDE_LOCAL_RANK_COUNT $TIDE_COMM_ID $TIDE_TOKEN";
        for node in 0..2 {
            let token = Some(Token::new("t"));
            let (_, out, _) = run(&SpawnOptions { outer: Some(outer(node)), token, ..shell(3, script) });
            let line = |l| format!("[{r}] {r}/6 {l}/3 node1:29500 t", r = 3 * node + l);
            assert_eq!(out, (0..3).map(line).collect::<Vec<_>>());
        }
    }

    #[test]
    fn what_cannot_be_started_is_refused() {
        // What several nodes need to share cannot be made up.
        let options = SpawnOptions { outer: Some(outer(0)), ..shell(3, "") };
        assert!(refused(&options).contains("needs TIDE_TOKEN"));
        let nowhere = Placement { rendezvous: None, ..outer(0) };
        assert!(refused(&SpawnOptions { outer: Some(nowhere), ..options.clone() }).contains("needs TIDE_COMM_ID"));
        let crowded = Placement { local_rank_count: 2, ..outer(0) };
        let text = refused(&SpawnOptions { outer: Some(crowded), ..options });
        assert!(text.contains("srun started 2 processes on this node"), "{text}");
        let text = refused(&SpawnOptions { program: "/no/such/program".into(), ..shell(2, "") });
        assert!(text.starts_with("launch: /no/such/program, rank 0: "), "{text}");
        assert!(refused(&shell(0, "")).contains("needed: 1 to 65536 ranks"));
    }

    #[test]
    fn two_jobs_have_two_tokens() {
        let tokens = [(); 2].map(|()| run(&shell(2, "echo $TIDE_TOKEN")).1);
        assert_eq!(tokens[0][0][4..], tokens[0][1][4..]);
        assert!(tokens[0][0].len() == 4 + 32 && tokens[0] != tokens[1]);
    }

    #[test]
    fn when_one_fails_the_rest_are_stopped_and_its_status_returned() {
        let started = Instant::now();
        // Rank 0 goes when asked, rank 2 not even then; the first failure counts, not how those ended.
        let script =
            "case $TIDE_RANK in 1) exit 7;; 2) trap 'echo asked' TERM; while :; do sleep 0.05; done;; esac; sleep 60";
        let (status, out, _) = run(&shell(3, script));
        assert_eq!(status, 7);
        assert!(containing(&out, "[2] asked").len() == 1, "{out:?}");
        let took = started.elapsed();
        assert!(took >= GRACE * 2 && took < LONG / 4, "{took:?}");
    }

    #[test]
    fn the_others_may_end_by_themselves_within_the_grace() {
        let (status, out, _) = run(&shell(2, "[ $TIDE_RANK = 0 ] && exit 3; sleep 0.1; echo in peace"));
        assert_eq!((status, out), (3, vec!["[1] in peace".to_owned()]));
    }

    #[test]
    fn what_a_child_leaves_running_ends_with_it() {
        let started = Instant::now();
        let (status, out, _) = run(&shell(1, "sleep 60 & echo $!"));
        assert_eq!(status, 0);
        assert!(started.elapsed() < LONG / 4);
        assert!(ends(out[0].strip_prefix("[0] ").unwrap()), "{out:?}");
    }

    /// Whether a process ends soon (a zombie has).
    fn ends(pid: &str) -> bool {
        (0..400).any(|_| {
            let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return true };
            let state = stat.rsplit_once(") ").map(|(_, rest)| rest.as_bytes()[0]);
            thread::sleep(Duration::from_millis(10));
            state == Some(b'Z')
        })
    }

    /// In a process of its own, to which the tests below send signals.
    #[test]
    fn process_spawns_sleepers() {
        if std::env::var_os("TIDE_TEST_SPAWNS").is_none() {
            return;
        }
        println!();
        let script = "trap 'echo told; exit 9' INT TERM; echo pid $$; while :; do sleep 0.05; done";
        let sink = || Arc::new(Mutex::new(std::io::stdout()));
        let status = spawn_into(&shell(2, script), sink(), sink()).unwrap();
        println!("status {status}");
    }

    /// Starts the above, sends it `signal` once its children are there, and returns the children's numbers and what was
    /// printed after that.
    fn signalled(signal: i32) -> (Vec<String>, Vec<String>) {
        let mut parent = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "spawned::process_spawns_sleepers", "--nocapture"])
            .env("TIDE_TEST_SPAWNS", "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(parent.stdout.take().unwrap()).lines().map(Result::unwrap);
        let pids: Vec<_> = lines.by_ref().filter_map(|l| Some(l.split_once("] pid ")?.1.to_owned())).take(2).collect();
        // SAFETY: no memory is touched; the process is this one's child, and not reaped.
        assert_eq!(unsafe { libc::kill(parent.id().cast_signed(), signal) }, 0);
        let rest = lines.collect();
        parent.wait().unwrap();
        (pids, rest)
    }

    #[test]
    fn signals_are_handed_on() {
        for signal in [libc::SIGINT, libc::SIGTERM] {
            let (pids, mut rest) = signalled(signal);
            assert!(pids.iter().all(|pid| ends(pid)));
            rest.retain(|l| l.contains("told") || l.contains("status"));
            rest.sort();
            assert_eq!(rest, ["[0] told", "[1] told", "status 9"]);
        }
    }

    #[test]
    fn a_killed_parent_leaves_no_orphans() {
        let (pids, rest) = signalled(libc::SIGKILL);
        assert!(pids.len() == 2 && pids.iter().all(|pid| ends(pid)));
        assert_eq!(containing(&rest, "status"), Vec::<&str>::new());
    }
}

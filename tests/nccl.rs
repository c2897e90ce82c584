//! The installation of NCCL's network over the stand-in for its library: processes are threads, each with a simulated GPU of
//! its own, up to the first call of a device.

#[path = "../nccl-gin/tests/common/stand_in.rs"]
#[allow(dead_code, reason = "the tests of the bindings ask it for more")]
mod stand_in;

use stand_in::Fake;
use std::net::TcpListener;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};
use tide_device::arch::sim::sched::MachineOptions;
use tide_gpu::TideError;
use tide_gpu::gpu::Gpu;
use tide_gpu::gpu::sim::{SimGpu, SimOptions};
use tide_gpu::launch::{Alone, Exchange, Rendezvous, RendezvousOptions, Token};
use tide_gpu::net::nccl::{Driven, NcclFabric, NcclOptions, Way};
use tide_gpu::net::{Fabric, Path};
use tide_gpu::plan::{Rank, RankRange, Topology};

/// What a step of NCCL's may take here: what waits for a rank that has failed ends then.
const STEP: Duration = Duration::from_secs(1);

/// How long processes wait for each other: longer than for NCCL, so that who has failed hears from those who waited.
const RENDEZVOUS: Duration = Duration::from_secs(20);

/// Longer than anything here takes whose every wait ends with [`STEP`].
const SOON: Duration = Duration::from_secs(15);

/// What one process brings.
struct Process {
    driven: Driven,
    options: NcclOptions,
    /// It is gone after so many calls of its exchange.
    dies_after: Option<u32>,
}

/// An exchange of a process that dies.
struct Mortal {
    inner: Option<Rendezvous>,
    rank: u32,
    rank_count: u32,
    calls_left: Option<u32>,
}

impl Exchange for Mortal {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn rank_count(&self) -> u32 {
        self.rank_count
    }

    fn all_gather(&mut self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, TideError> {
        let dead = || TideError::rendezvous("this process is dead");
        let mut inner = self.inner.take().filter(|_| self.calls_left != Some(0)).ok_or_else(dead)?;
        let all = inner.all_gather(label, bytes)?;
        self.calls_left = self.calls_left.map(|left| left - 1);
        self.inner = (self.calls_left != Some(0)).then_some(inner);
        self.inner.is_some().then_some(all).ok_or_else(dead)
    }
}

fn topology(node_count: u32, local_rank_count: u32) -> Topology {
    Topology::new(node_count, local_rank_count).unwrap()
}

fn options() -> NcclOptions {
    NcclOptions { timeout: STEP, ..NcclOptions::default() }
}

/// A process for each rank.
fn one_each(topology: Topology) -> Vec<Process> {
    let driven = |rank: Rank| Driven { topology, ranks: RankRange::new(rank, 1), devices: vec![0] };
    topology.ranks().map(|rank| Process { driven: driven(rank), options: options(), dies_after: None }).collect()
}

fn gpu(device_count: u32) -> Arc<dyn Gpu> {
    let machine = MachineOptions { device_count, ..MachineOptions::default() };
    SimGpu::new(SimOptions { machine, ..SimOptions::default() })
}

fn no_module(_: tide_device::abi::kernel::NcclBackend) -> Result<String, TideError> {
    Err(TideError::usage("no module was linked"))
}

/// Connects `processes` and does `then` with each fabric, which is gone afterwards.
fn connect<T: Send>(
    fake: &Fake,
    processes: Vec<Process>,
    then: impl Fn(Arc<NcclFabric>) -> Result<T, TideError> + Sync,
) -> Vec<Result<T, TideError>> {
    let began = Instant::now();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (mut listener, rank_count) = (Some(listener), processes.len() as u32);
    let (then, library) = (&then, fake.library());
    let outcomes = thread::scope(|scope| {
        let threads: Vec<_> = (0..rank_count)
            .zip(processes)
            .map(|(rank, process)| {
                let token = Token::new("the token of this job");
                let (address, bind, timeout) = (address.clone(), None, RENDEZVOUS);
                let found = RendezvousOptions { address, bind, token, rank, rank_count, timeout };
                let (listener, library) = (if rank == 0 { listener.take() } else { None }, library.clone());
                scope.spawn(move || {
                    let rendezvous = match listener {
                        Some(listener) => Rendezvous::host(listener, &found),
                        None => Rendezvous::join(&found),
                    };
                    let inner = Some(rendezvous.unwrap());
                    let exchange = Box::new(Mortal { inner, rank, rank_count, calls_left: process.dies_after });
                    let gpu = gpu(process.driven.ranks.count());
                    NcclFabric::connect(gpu, library, process.driven, exchange, &process.options, &no_module)
                        .and_then(then)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(began.elapsed() < SOON, "took {:?}", began.elapsed());
    outcomes
}

/// The sentences of processes that have all failed.
fn sentences<T: std::fmt::Debug>(outcomes: Vec<Result<T, TideError>>) -> Vec<String> {
    outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect()
}

/// Fails unless one process has failed by `call`, as the stand-in was told, and each other names it.
fn assert_one_is_named(call: &str, sentences: &[String]) {
    let told = format!("the fake was told that {call} fails");
    let failed: Vec<_> = (0..sentences.len()).filter(|i| !sentences[*i].contains("process ")).collect();
    let [process] = failed[..] else { panic!("{call}: {sentences:#?}") };
    assert!(sentences[process].contains(&told), "{call}: {sentences:#?}");
    let named = format!("process {process} has failed: ");
    for (_, other) in sentences.iter().enumerate().filter(|(i, _)| *i != process) {
        assert!(other.contains(&named) && other.contains(&told), "{call}: {sentences:#?}");
    }
}

// ---- What works

#[test]
fn ranks_of_processes_connect_and_reach_the_memory_of_their_node() {
    for (m, l) in [(2, 2), (3, 1)] {
        let (fake, topology) = (Fake::new(), topology(m, l));
        // The stand-in's split comes back before it is done, as the real one's does.
        fake.set("hasty_split", 1);
        let both = Barrier::new(topology.rank_count() as usize);
        let outcomes = connect(&fake, one_each(topology), |fabric| {
            assert_eq!(fabric.way(), Way::Host);
            let passed_over = fabric.passed_over().join("; ");
            assert!(passed_over.contains("GIN gdaki") && passed_over.contains("GIN proxy"), "{passed_over}");
            let own = fabric.driven().iter().next().unwrap();
            let window = Arc::clone(&fabric).allocate(5000)?;
            let bases: Vec<_> = topology.ranks().map(|rank| window.base(rank)).collect();
            for (rank, base) in topology.ranks().zip(&bases) {
                assert_eq!(base.is_some(), topology.node_of(rank) == topology.node_of(own), "{own:?} of {rank:?}");
            }
            both.wait();
            Ok(bases)
        });
        let bases: Vec<_> = outcomes.into_iter().map(Result::unwrap).collect();
        for (rank, mine) in topology.ranks().zip(&bases) {
            for (peer, base) in topology.ranks().zip(mine).filter(|(_, base)| base.is_some()) {
                assert_eq!(*base, bases[peer.0 as usize][peer.0 as usize], "{rank:?} of {peer:?}");
            }
        }
        // The flags tell the node's communicator (symmetric) from the rail's (symmetric, in strict order).
        let of_node = (l > 1).then_some("ncclCommWindowRegister(8192, 1)");
        let expected: Vec<_> = of_node.into_iter().chain(["ncclCommWindowRegister(8192, 3)"]).collect();
        for rank in topology.ranks() {
            let mut log = fake.log(i64::from(rank.0));
            log.retain(|call| call.starts_with("ncclCommWindowRegister"));
            assert_eq!(log, expected, "rank {rank:?}");
            assert_eq!(fake.calls(i64::from(rank.0), &["Abort"]), [""; 0], "rank {rank:?}");
        }
        fake.assert_clean();
    }
}

#[test]
fn gin_without_its_module_is_passed_over_and_with_it_goes_as_far_as_the_device() {
    const PROXY: i64 = 2;
    let (fake, topology) = (Fake::new(), topology(2, 1));
    fake.set("gin", PROXY);
    for outcome in connect(&fake, one_each(topology), |fabric| Ok((fabric.way(), fabric.passed_over().join("; ")))) {
        let (way, passed_over) = outcome.unwrap();
        assert_eq!(way, Way::Host);
        assert!(passed_over.contains("GIN proxy: rank 0 (and 1 more): no module was linked"), "{passed_over}");
    }
    let driven = Driven { topology, ranks: topology.all(), devices: vec![0, 1] };
    let module = |_| Ok(String::new());
    let connected = NcclFabric::connect(gpu(2), fake.library(), driven, Box::new(Alone), &options(), &module);
    let error = connected.map(drop).unwrap_err().to_string();
    assert!(error.contains("kernels of a PTX module"), "{error}");
    fake.assert_clean();
}

#[test]
fn one_process_connects_all_ranks_and_needs_no_communicators_of_nodes() {
    for (m, l) in [(2, 2), (3, 1), (1, 4)] {
        let (fake, topology) = (Fake::new(), topology(m, l));
        let devices = (0..topology.rank_count()).collect();
        let driven = Driven { topology, ranks: topology.all(), devices };
        let gpu = gpu(topology.rank_count());
        let fabric = NcclFabric::connect(gpu, fake.library(), driven, Box::new(Alone), &options(), &no_module).unwrap();
        assert_eq!(fabric.way(), if m > 1 { Way::Host } else { Way::None });
        let window = Arc::clone(&fabric).allocate(1).unwrap();
        assert!(topology.ranks().all(|rank| window.base(rank).is_some()));
        assert_eq!(fake.count("memory"), i64::from(topology.rank_count()));
        drop((window, fabric));
        for rank in 0..i64::from(topology.rank_count()) {
            assert_eq!(fake.calls(rank, &["Register", "Abort"]).len(), usize::from(m > 1), "rank {rank}");
        }
        fake.assert_clean();
    }
}

// ---- Disagreement

#[test]
fn processes_that_differ_are_told_in_what() {
    type Change = fn(&mut Process);
    let path: Change = |process| process.options.path = Some(Path::Device);
    let shape: Change = |process| process.driven.topology = topology(1, 2);
    let ranks: Change = |process| process.driven.ranks = RankRange::new(Rank(0), 1);
    for (what, change) in [("the options", path), ("the topology", shape), ("who drives which rank", ranks)] {
        let fake = Fake::new();
        let mut processes = one_each(topology(2, 1));
        change(&mut processes[1]);
        let outcomes = connect(&fake, processes, |_| Ok(()));
        let first = outcomes[0].clone();
        for outcome in outcomes {
            assert!(
                matches!(&outcome, Err(TideError::Disagreement { what: w, .. }) if w.contains(what)),
                "{outcome:?}"
            );
            assert_eq!(outcome, first);
        }
        assert_eq!(fake.log(-1), [""; 0], "no call of NCCL's comes before");
    }
}

// ---- Failures in the middle

#[test]
fn a_call_that_fails_on_one_rank_is_told_on_all_and_leaves_nothing() {
    // With how many communicators of a rank come to their end together; the others are aborted, which waits for nobody.
    for (call, nth, ends) in [
        ("ncclGetUniqueId", 1, 0),
        ("ncclCommInitRankConfig", 2, 0),
        ("ncclCommQueryProperties", 2, 0),
        ("ncclCommSplit", 1, 0),
        ("ncclCommSplit", 6, 0),
        ("ncclMemAlloc", 3, 3),
        ("ncclCommWindowRegister", 1, 1),
        ("ncclCommWindowRegister", 6, 1),
        ("ncclGetLsaDevicePointer", 2, 3),
    ] {
        let fake = Fake::new();
        fake.fail(call, nth, 1);
        let outcomes = connect(&fake, one_each(topology(2, 2)), |fabric| fabric.allocate(1).map(drop));
        assert_one_is_named(call, &sentences(outcomes));
        for rank in 0..4 {
            assert_eq!(fake.calls(rank, &["Finalize"]).len(), ends, "{call}: rank {rank}");
        }
        fake.assert_clean();
    }
}

#[test]
fn one_process_tells_the_rank_that_has_failed_and_not_those_that_waited_for_it() {
    for (call, nth) in [
        ("ncclCommInitRankConfig", 4),
        ("ncclCommQueryProperties", 3),
        ("ncclCommSplit", 4),
        ("ncclMemAlloc", 2),
        ("ncclCommWindowRegister", 4),
    ] {
        let (fake, topology) = (Fake::new(), topology(2, 2));
        fake.fail(call, nth, 1);
        let driven = Driven { topology, ranks: topology.all(), devices: vec![0, 1, 2, 3] };
        let began = Instant::now();
        let error = NcclFabric::connect(gpu(4), fake.library(), driven, Box::new(Alone), &options(), &no_module)
            .and_then(|fabric| fabric.allocate(1).map(drop))
            .unwrap_err();
        assert!(began.elapsed() < SOON);
        assert!(error.to_string().contains(&format!("the fake was told that {call} fails")), "{error}");
        fake.assert_clean();
    }
}

#[test]
fn a_rank_without_the_memory_leaves_the_others_connected() {
    let (fake, topology) = (Fake::new(), topology(2, 2));
    let outcomes = connect(&fake, one_each(topology), |fabric| {
        if fabric.driven().contains(Rank(0)) {
            fake.fail("ncclMemAlloc", 2, 1);
        }
        fabric.exchange().lock().unwrap().barrier("the failure is set")?;
        let error = Arc::clone(&fabric).allocate(1).map(drop).unwrap_err();
        fabric.allocate(1).map(drop)?;
        Ok(error.to_string())
    });
    let sentences: Vec<_> = outcomes.into_iter().map(Result::unwrap).collect();
    assert_one_is_named("ncclMemAlloc", &sentences);
    for rank in 0..4 {
        assert_eq!(fake.calls(rank, &["Abort"]), [""; 0]);
    }
    fake.assert_clean();
}

#[test]
fn no_window_is_told_with_the_reason_on_all_ranks() {
    let fake = Fake::new();
    fake.set("null_windows", 1);
    let outcomes = connect(&fake, one_each(topology(2, 2)), |fabric| fabric.allocate(1).map(drop));
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert!(matches!(error, TideError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("symmetric memory needs CUDA P2P"), "{error}");
    }
    fake.assert_clean();
}

// ---- Versions

#[test]
fn a_version_without_any_way_over_the_rails_is_refused_with_every_obstacle() {
    let fake = Fake::new();
    fake.set("version", 22809);
    let outcomes = connect(&fake, one_each(topology(2, 1)), |_| Ok(()));
    let first = outcomes[0].clone();
    for outcome in outcomes {
        assert_eq!(outcome, first);
        let error = outcome.unwrap_err();
        assert!(matches!(error, TideError::Unsupported { .. }), "{error}");
        for part in [
            "GIN gdaki: rank 0 (and 1 more)",
            "GIN proxy: rank 0 (and 1 more)",
            "host RMA: rank 0 (and 1 more)",
            "is NCCL 2.28.9; host RMA needs NCCL 2.31.2 or later",
            "is NCCL 2.28.9; a device communicator needs NCCL 2.32.3 or later",
        ] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }
    fake.assert_clean();
}

#[test]
fn one_node_needs_no_way_over_the_rails() {
    let fake = Fake::new();
    fake.set("version", 22809);
    for outcome in connect(&fake, one_each(topology(1, 2)), |fabric| Ok(fabric.way())) {
        assert_eq!(outcome, Ok(Way::None));
    }
    fake.assert_clean();
}

// ---- A process that dies

#[test]
fn a_process_that_is_gone_is_named_by_the_others() {
    // With the call of NCCL's in which they wait for it.
    for (dies_after, waits_in) in [
        (0, None),
        (1, None),
        (3, None),
        (5, Some("ncclCommInitRankConfig")),
        (6, Some("ncclCommSplit")),
        (7, None),
        (8, None),
    ] {
        let fake = Fake::new();
        let mut processes = one_each(topology(2, 2));
        processes[2].dies_after = Some(dies_after);
        let sentences = sentences(connect(&fake, processes, |_| Ok(())));
        for (_, other) in sentences.iter().enumerate().filter(|(i, _)| *i != 2) {
            assert!(other.contains("rank 2"), "after {dies_after}: {sentences:#?}");
            let waited = waits_in.is_none_or(|call| other.contains(&format!("has failed here: NCCL: {call} did not")));
            assert!(waited, "after {dies_after}: {sentences:#?}");
        }
        fake.assert_clean();
    }
}

//! The host side against the stand-in for NCCL: what it calls, in which order, and what becomes of failures.

mod common;

use common::{Fake, on_comms, on_ranks, quick};
use nccl_gin::host::{
    Ability, Comm, Config, DataType, DeviceComm, DevicePtr, GinConnection, GinType, Group, Library, Memory, NcclError,
    Put, ReduceOp, Requirements, ResultCode, SignalWait, Stream, UniqueId, Version, Window, WindowFlags,
};
use std::process::Command;
use std::time::{Duration, Instant};

const SYMMETRIC: WindowFlags = WindowFlags::COLL_SYMMETRIC;

/// What tests wait at most for something that ends in 200 ms.
const SOON: Duration = Duration::from_secs(5);

fn write(at: DevicePtr, data: &[u8]) {
    // SAFETY: device memory of the stand-in is host memory, and each test writes within what it allocated.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), at.0 as *mut u8, data.len()) };
}

fn read(at: DevicePtr, bytes: usize) -> Vec<u8> {
    // SAFETY: as `write`.
    unsafe { std::slice::from_raw_parts(at.0 as *const u8, bytes) }.to_vec()
}

fn window(comm: &Comm, bytes: usize) -> Window {
    comm.register(&Memory::alloc(comm.library(), bytes).unwrap(), SYMMETRIC).unwrap()
}

// ---- Loading

#[test]
fn a_whole_library_lacks_nothing_and_knows_its_file() {
    let fake = Fake::new();
    let library = fake.library();
    assert_eq!((library.version(), library.lacks()), (Version(23203), vec![]));
    assert_eq!(library.path(), fake.path().canonicalize().unwrap());
    assert_eq!(library.device_bitcode(), None);
    std::fs::write(fake.folder().join("libnccl_device.bc"), "").unwrap();
    assert!(library.device_bitcode().is_some());
}

#[test]
fn a_library_that_is_too_old_is_refused_with_both_versions() {
    let fake = Fake::new();
    fake.set("version", 22706);
    let error = Library::open(fake.path()).unwrap_err();
    assert!(matches!(error, NcclError::TooOld { found: Version(22706), needed: Version(22800), .. }), "{error}");
    assert!(error.to_string().contains("is NCCL 2.27.6; a communicator needs NCCL 2.28.0 or later"), "{error}");
}

#[test]
fn below_an_abilitys_floor_only_that_ability_is_lacking() {
    use Ability::{HostRma, Pointers, Properties};
    let devices = Ability::DeviceComm;
    for (version, lacking) in [
        (22809, vec![Pointers, Properties, HostRma, devices]),
        (22907, vec![HostRma, devices]),
        (23007, vec![HostRma, devices]),
        (23102, vec![devices]),
        (23203, vec![]),
        (23301, vec![]),
    ] {
        let fake = Fake::new();
        fake.set("version", version);
        let library = fake.library();
        let lacks = library.lacks();
        assert_eq!(lacks.iter().map(|(ability, _)| *ability).collect::<Vec<_>>(), lacking, "{version}");
        for (ability, reason) in &lacks {
            assert!(matches!(reason, NcclError::TooOld { needed, .. } if *needed == ability.floor()), "{reason}");
        }
        on_comms(&library, 2, &Config::default(), |comm| {
            let window = window(&comm, 8);
            write(window.pointer(), &[comm.rank() as u8; 4]);
            let all = Memory::alloc(&library, 8).unwrap();
            // SAFETY: both ranges are allocated; the stand-in's streams are done at once.
            unsafe { comm.all_gather(window.pointer(), all.pointer(), 4, DataType::Uint8, Stream::DEFAULT) }.unwrap();
            assert_eq!(read(all.pointer(), 8), [0, 0, 0, 0, 1, 1, 1, 1]);
            assert_eq!(comm.properties().is_ok(), version >= 22907);
            // SAFETY: as above.
            let signal = unsafe { comm.signal(0, 0, 0, Stream::DEFAULT) };
            assert_eq!(signal.is_ok(), version >= 23102, "{signal:?}");
            assert_eq!(DeviceComm::create(&comm, &Requirements::default()).is_ok(), version >= 23203);
        });
        fake.assert_clean();
    }
}

#[test]
fn a_missing_symbol_is_one_sentence_with_symbol_file_and_versions() {
    let fake = Fake::without("ncclPutSignal");
    let library = fake.library();
    let lacks = library.lacks();
    assert_eq!(lacks.len(), 1, "{lacks:?}");
    let expected = format!(
        "{} (NCCL 2.32.3) lacks the symbol ncclPutSignal; host RMA needs NCCL 2.31.2 or later",
        library.path().display()
    );
    assert_eq!(lacks[0].1.to_string(), expected);
    assert!(library.require(Ability::DeviceComm).is_ok());
}

#[test]
fn a_library_without_communicators_does_not_load() {
    let fake = Fake::without("ncclCommSplit");
    let error = Library::open(fake.path()).unwrap_err();
    assert!(matches!(error, NcclError::MissingSymbol { symbol: "ncclCommSplit", .. }), "{error}");
}

/// Runs `nccl-info`, which loads what the environment leads to.
fn info(variables: &[(&str, &std::path::Path)]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nccl-info"));
    for name in ["TIDE_NCCL_LIB", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "HOME"] {
        command.env_remove(name);
    }
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    (output.status.success(), text)
}

#[test]
fn the_search_goes_by_variable_then_loader_then_packages() {
    let [named, by_loader, in_packages] = [Fake::new(), Fake::new(), Fake::new()];
    let site = in_packages.folder().join("nvidia/nccl/lib");
    std::fs::create_dir_all(&site).unwrap();
    let packaged = site.join("libnccl.so.2");
    std::fs::copy(in_packages.path(), &packaged).unwrap();
    let variable = ("TIDE_NCCL_LIB", named.path());
    let loader = ("LD_LIBRARY_PATH", by_loader.folder());
    let packages = ("PYTHONPATH", in_packages.folder());

    for (variables, found) in [
        (&[variable, loader, packages][..], named.path()),
        (&[loader, packages], by_loader.path()),
        (&[packages], &packaged),
    ] {
        let (worked, text) = info(variables);
        assert!(worked && text.contains(&format!("NCCL 2.32.3 at {}", found.display())), "{text}");
    }
    let wrong = ("TIDE_NCCL_LIB", std::path::Path::new("/dev/null"));
    let (worked, text) = info(&[wrong, loader, packages]);
    assert!(!worked && text.contains("TIDE_NCCL_LIB names the only library"), "{text}");
}

// ---- Communicators

#[test]
fn ranks_meet_whether_calls_block_or_not() {
    for blocking in [false, true] {
        let fake = Fake::new();
        let library = fake.library();
        let ranks = on_comms(&library, 4, &Config { blocking, ..Config::default() }, |comm| {
            let properties = comm.properties().unwrap();
            assert_eq!((properties.rank as u32, properties.rank_count), (comm.rank(), 4));
            assert_eq!(comm.async_error().unwrap(), ResultCode::SUCCESS);
            let rank = comm.rank();
            comm.finalize().unwrap();
            rank
        });
        assert_eq!(ranks, [0, 1, 2, 3]);
        fake.assert_clean();
    }
}

#[test]
fn a_slow_initialisation_is_waited_for() {
    let fake = Fake::new();
    fake.slow("ncclCommInitRankConfig", 20);
    on_comms(&fake.library(), 2, &Config::default(), drop);
    fake.assert_clean();
}

#[test]
fn an_initialisation_that_never_ends_ends_with_the_deadline() {
    let fake = Fake::new();
    fake.slow("ncclCommInitRankConfig", -1);
    let library = fake.library();
    let began = Instant::now();
    let error = Comm::init_rank(&library, UniqueId::new(&library).unwrap(), 1, 0, &quick()).unwrap_err();
    assert!(matches!(error, NcclError::Timeout { call: "ncclCommInitRankConfig", .. }), "{error}");
    assert!((quick().timeout..SOON).contains(&began.elapsed()));
    assert_eq!(fake.calls(0, &["Abort", "Destroy"]), ["ncclCommAbort"]);
    fake.assert_clean();
}

#[test]
fn a_rank_that_stays_away_is_a_timeout_for_the_others() {
    let fake = Fake::new();
    let library = fake.library();
    let id = UniqueId::new(&library).unwrap();
    let outcomes = on_ranks(2, |rank| Comm::init_rank(&library, id, 3, rank, &quick()).map(drop));
    for outcome in outcomes {
        assert!(matches!(outcome, Err(NcclError::Timeout { .. })), "{outcome:?}");
    }
    fake.assert_clean();
}

#[test]
fn a_failed_initialisation_says_what_nccl_said_and_leaves_nothing() {
    for blocking in [false, true] {
        let fake = Fake::new();
        fake.fail("ncclCommInitRankConfig", 1, 2);
        let library = fake.library();
        let config = Config { blocking, ..quick() };
        let error = Comm::init_rank(&library, UniqueId::new(&library).unwrap(), 1, 0, &config).unwrap_err();
        let expected = "ncclCommInitRankConfig failed with ncclSystemError (2): the fake was told that ncclCommInitRankConfig fails";
        assert_eq!(error.to_string(), expected);
        fake.assert_clean();
    }
}

#[test]
fn an_asynchronous_error_fails_what_is_under_way() {
    let fake = Fake::new();
    fake.set("async_error", 6);
    let library = fake.library();
    let error = Comm::init_rank(&library, UniqueId::new(&library).unwrap(), 1, 0, &quick()).unwrap_err();
    assert!(matches!(error, NcclError::Call { code: ResultCode::REMOTE_ERROR, .. }), "{error}");
    fake.assert_clean();
}

#[test]
fn an_asynchronous_error_is_reported_on_demand() {
    let fake = Fake::new();
    on_comms(&fake.library(), 1, &quick(), |comm| {
        fake.set("async_error", 1);
        assert_eq!(comm.async_error().unwrap(), ResultCode::UNHANDLED_CUDA_ERROR);
        fake.set("async_error", 0);
    });
    fake.assert_clean();
}

#[test]
fn a_communicator_whose_properties_are_not_told_ends_without_waiting_for_the_others() {
    let fake = Fake::new();
    fake.fail("ncclCommQueryProperties", 1, 1);
    let library = fake.library();
    let id = UniqueId::new(&library).unwrap();
    let patient = Config { timeout: 2 * SOON, ..Config::default() };
    let outcomes = on_ranks(2, |rank| {
        let began = Instant::now();
        let outcome = Comm::init_rank(&library, id, 2, rank, &patient);
        if let Ok(comm) = &outcome {
            comm.abort();
        }
        (outcome.map(drop), began.elapsed())
    });
    let failed: Vec<_> = outcomes.iter().filter(|(outcome, _)| outcome.is_err()).collect();
    assert!(matches!(&failed[..], [(_, took)] if *took < SOON), "{outcomes:?}");
    fake.assert_clean();
}

#[test]
fn unique_ids_survive_their_bytes() {
    let fake = Fake::new();
    let library = fake.library();
    let id = UniqueId::new(&library).unwrap();
    assert_eq!(UniqueId::from_bytes(id.to_bytes()).to_bytes(), id.to_bytes());
    fake.fail("ncclGetUniqueId", 1, 2);
    assert!(matches!(UniqueId::new(&library), Err(NcclError::Call { call: "ncclGetUniqueId", .. })));
}

#[test]
fn ranks_that_do_not_exist_are_refused_before_any_call() {
    let fake = Fake::new();
    let library = fake.library();
    let id = UniqueId::new(&library).unwrap();
    let error = Comm::init_rank(&library, id, 2, 2, &quick()).unwrap_err();
    assert_eq!(error, NcclError::Usage("rank 2 of 2".to_owned()));
    assert_eq!(fake.log(2), Vec::<String>::new());
}

#[test]
fn a_choice_that_the_version_does_not_have_is_refused_by_name() {
    let fake = Fake::new();
    fake.set("version", 22907);
    let library = fake.library();
    let config = Config { rma_signals: Some(4), ..quick() };
    let error = Comm::init_rank(&library, UniqueId::new(&library).unwrap(), 1, 0, &config).unwrap_err();
    assert!(matches!(error, NcclError::TooOld { what: "numRmaSig", needed: Version(23102), .. }), "{error}");
}

#[test]
fn each_known_version_accepts_the_configuration_built_for_it() {
    for version in [22803, 22809, 22905, 22907, 23003, 23007, 23102, 23105, 23203, 23204, 23301, 24000] {
        let fake = Fake::new();
        fake.set("version", version);
        let config = Config { min_ctas: Some(1), max_ctas: Some(8), name: Some("test".to_owned()), ..quick() };
        on_comms(&fake.library(), 1, &config, drop);
        fake.assert_clean();
    }
}

#[test]
fn a_split_gives_each_colour_its_ranks_in_the_order_of_keys() {
    for blocking in [false, true] {
        let fake = Fake::new();
        let library = fake.library();
        let config = Config { blocking, ..Config::default() };
        let places = on_comms(&library, 5, &config, |comm| {
            let rank = comm.rank();
            let color = (rank < 4).then_some(rank % 2);
            let child = comm.split(color, -(rank as i32), &config).unwrap();
            child.map(|child| {
                let window = window(&child, 64);
                write(window.pointer(), &[rank as u8]);
                let (of, all) = (child.rank(), child.rank_count());
                drop((window, comm));
                (of, all)
            })
        });
        assert_eq!(places, [Some((1, 2)), Some((1, 2)), Some((0, 2)), Some((0, 2)), None]);
        fake.assert_clean();
    }
}

#[test]
fn a_split_that_says_success_before_it_is_done_is_waited_for() {
    let fake = Fake::new();
    fake.set("hasty_split", 1);
    fake.slow("ncclCommSplit", 20);
    let library = fake.library();
    let places = on_comms(&library, 4, &Config::default(), |comm| {
        let color = (comm.rank() > 0).then_some(comm.rank() % 2);
        let child = comm.split(color, 0, &Config::default()).unwrap();
        child.map(|child| (child.rank(), child.rank_count()))
    });
    assert_eq!(places, [None, Some((0, 2)), Some((0, 1)), Some((1, 2))]);
    fake.assert_clean();
}

#[test]
fn a_split_that_never_gets_done_after_it_said_success_ends_with_the_deadline() {
    let fake = Fake::new();
    fake.set("hasty_split", 1);
    fake.slow("ncclCommSplit", -1);
    on_comms(&fake.library(), 1, &quick(), |comm| {
        let error = comm.split(Some(0), 0, &quick()).unwrap_err();
        assert!(matches!(error, NcclError::Timeout { call: "ncclCommSplit", .. }), "{error}");
    });
    fake.assert_clean();
}

#[test]
fn a_split_that_fails_or_hangs_leaves_nothing() {
    let fake = Fake::new();
    let library = fake.library();
    on_comms(&library, 1, &quick(), |comm| {
        fake.fail("ncclCommSplit", 1, 3);
        let error = comm.split(Some(0), 0, &quick()).unwrap_err();
        assert!(matches!(error, NcclError::Call { call: "ncclCommSplit", .. }), "{error}");
        fake.slow("ncclCommSplit", -1);
        let error = comm.split(Some(0), 0, &quick()).unwrap_err();
        assert!(matches!(error, NcclError::Timeout { call: "ncclCommSplit", .. }), "{error}");
    });
    fake.assert_clean();
}

#[test]
fn a_communicator_that_is_held_does_not_end() {
    let fake = Fake::new();
    on_comms(&fake.library(), 1, &quick(), |comm| {
        let window = window(&comm, 8);
        assert!(matches!(comm.finalize(), Err(NcclError::Usage(_))));
        assert_eq!(fake.count("comms"), 1);
        assert!(window.lsa_pointer(0, 0).is_ok());
    });
    fake.assert_clean();
}

#[test]
fn a_finalisation_that_hangs_ends_in_an_abort() {
    let fake = Fake::new();
    fake.slow("ncclCommFinalize", -1);
    on_comms(&fake.library(), 1, &quick(), |comm| {
        assert!(matches!(comm.finalize(), Err(NcclError::Timeout { call: "ncclCommFinalize", .. })));
    });
    assert_eq!(fake.calls(0, &["Abort", "Destroy"]), ["ncclCommAbort"]);
    fake.assert_clean();
}

#[test]
fn an_abort_by_another_thread_ends_a_wait() {
    let fake = Fake::new();
    fake.slow("ncclCommWindowRegister", -1);
    on_comms(&fake.library(), 1, &Config::default(), |comm| {
        let memory = Memory::alloc(comm.library(), 8).unwrap();
        let began = Instant::now();
        std::thread::scope(|scope| {
            let other = comm.clone();
            let waiting = scope.spawn(|| comm.register(&memory, SYMMETRIC).map(drop));
            while !fake.log(0).iter().any(|call| call.starts_with("ncclCommWindowRegister")) {
                std::thread::yield_now();
            }
            other.abort();
            let error = waiting.join().unwrap().unwrap_err();
            assert!(matches!(error, NcclError::Aborted { .. }), "{error}");
        });
        assert!(began.elapsed() < SOON);
        assert!(matches!(comm.async_error(), Err(NcclError::Aborted { .. })));
    });
    assert_eq!(fake.calls(0, &["Abort", "Destroy", "Finalize"]), ["ncclCommAbort"]);
    fake.assert_clean();
}

#[test]
fn a_panic_aborts_instead_of_waiting_for_the_others() {
    let fake = Fake::new();
    let library = fake.library();
    let id = UniqueId::new(&library).unwrap();
    std::thread::scope(|scope| {
        let panicking = scope.spawn(|| {
            let _comm = Comm::init_rank(&library, id, 1, 0, &Config::default()).unwrap();
            panic!("on purpose");
        });
        assert!(panicking.join().is_err());
    });
    assert_eq!(fake.calls(0, &["Abort", "Finalize"]), ["ncclCommAbort"]);
    fake.assert_clean();
}

// ---- Windows

#[test]
fn all_ranks_register_in_the_same_order_and_reach_each_other() {
    let fake = Fake::new();
    let library = fake.library();
    on_comms(&library, 4, &Config::default(), |comm| {
        let rank = comm.rank();
        let windows = [1, 2, 3].map(|pages| window(&comm, pages * 4096));
        for (index, window) in windows.iter().enumerate() {
            write(window.pointer().offset(8), &[rank as u8, index as u8]);
        }
        let ready = Memory::alloc(&library, 8).unwrap();
        // SAFETY: the ranges are allocated. The gather stands for a barrier.
        unsafe { comm.all_gather(windows[0].pointer(), ready.pointer(), 1, DataType::Uint8, Stream::DEFAULT) }.unwrap();
        for peer in 0..4 {
            for (index, window) in windows.iter().enumerate() {
                let there = window.lsa_pointer(peer, 8).unwrap();
                assert_eq!(read(there, 2), [peer as u8, index as u8]);
                assert_eq!(window.peer_pointer(peer, 8).unwrap(), Some(there));
            }
        }
        // SAFETY: as above: nobody lets go while others read.
        unsafe { comm.all_gather(windows[0].pointer(), ready.pointer(), 1, DataType::Uint8, Stream::DEFAULT) }.unwrap();
    });
    let orders: Vec<_> = (0..4)
        .map(|rank| fake.log(rank).into_iter().filter(|c| c.contains("WindowRegister")).collect::<Vec<_>>())
        .collect();
    assert_eq!(
        orders[0],
        ["ncclCommWindowRegister(4096, 1)", "ncclCommWindowRegister(8192, 1)", "ncclCommWindowRegister(12288, 1)"]
    );
    assert!(orders.iter().all(|order| *order == orders[0]));
    fake.assert_clean();
}

#[test]
fn ranks_that_register_in_different_orders_are_found_by_the_stand_in() {
    let fake = Fake::new();
    let library = fake.library();
    let outcomes = on_comms(&library, 2, &quick(), |comm| {
        if comm.rank() == 0 {
            let memory = Memory::alloc(&library, 8).unwrap();
            comm.register(&memory, SYMMETRIC).map(drop)
        } else {
            DeviceComm::create(&comm, &Requirements::default()).map(drop)
        }
    });
    assert!(outcomes.iter().any(Result::is_err));
}

#[test]
fn no_window_is_an_error_with_a_reason() {
    for blocking in [false, true] {
        let fake = Fake::new();
        fake.set("null_windows", 1);
        fake.set("device_api", 0);
        let library = fake.library();
        on_comms(&library, 2, &Config { blocking, ..Config::default() }, |comm| {
            let memory = Memory::alloc(&library, 8).unwrap();
            let error = comm.register(&memory, SYMMETRIC).unwrap_err();
            let NcclError::NullWindow { reason } = &error else { panic!("{error}") };
            assert!(reason.contains("P2P") && reason.contains("deviceApiSupport is false"), "{reason}");
        });
        fake.assert_clean();
    }
}

#[test]
fn the_same_memory_is_registered_once() {
    let fake = Fake::new();
    on_comms(&fake.library(), 1, &quick(), |comm| {
        let memory = Memory::alloc(comm.library(), 8192).unwrap();
        let first = comm.register(&memory, SYMMETRIC).unwrap();
        let second = comm.register(&memory, SYMMETRIC).unwrap();
        assert_eq!(first.handle(), second.handle());
        assert_eq!(fake.count("windows"), 1);
        drop(first);
        assert_eq!(fake.count("windows"), 1);
        drop(second);
        assert_eq!(fake.count("windows"), 0);
        comm.register(&memory, SYMMETRIC).unwrap();
        assert_eq!(fake.calls(0, &["WindowRegister"]).len(), 2);
    });
    fake.assert_clean();
}

#[test]
fn overlapping_windows_of_a_communicator_are_refused() {
    let fake = Fake::new();
    on_comms(&fake.library(), 1, &quick(), |comm| {
        let memory = Memory::alloc(comm.library(), 3 * 4096).unwrap();
        let middle = comm.register_range(&memory, 4096..8192, SYMMETRIC).unwrap();
        for (range, flags) in [
            (0..3 * 4096, SYMMETRIC),
            (0..4097, SYMMETRIC),
            (4096..8192, SYMMETRIC | WindowFlags::STRICT_ORDERING),
            (4096..8000, SYMMETRIC),
        ] {
            let error = comm.register_range(&memory, range, flags).unwrap_err();
            assert!(error.to_string().contains("must not overlap"), "{error}");
        }
        let sides = [0..4096, 8192..3 * 4096].map(|range| comm.register_range(&memory, range, SYMMETRIC).unwrap());
        assert_eq!(fake.count("windows"), 3);
        drop((middle, sides));
        comm.register(&memory, SYMMETRIC).unwrap();
    });
    fake.assert_clean();
}

#[test]
#[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
fn ranges_that_are_no_window_are_refused_before_any_call() {
    let fake = Fake::new();
    on_comms(&fake.library(), 1, &quick(), |comm| {
        let memory = Memory::alloc(comm.library(), 8192).unwrap();
        for range in [0..0, 0..8193, 100..200, 8192..4096] {
            let outcome = comm.register_range(&memory, range.clone(), SYMMETRIC);
            assert!(matches!(outcome, Err(NcclError::Usage(_))), "{range:?}");
        }
        let other = Fake::new();
        let elsewhere = Memory::alloc(&other.library(), 8192).unwrap();
        assert!(matches!(comm.register(&elsewhere, SYMMETRIC), Err(NcclError::Usage(_))));
    });
    assert!(fake.calls(0, &["WindowRegister"]).is_empty());
    assert!(matches!(Memory::alloc(&fake.library(), 0), Err(NcclError::Usage(_))));
}

#[test]
fn owners_end_in_ncclss_order_however_they_are_dropped() {
    let fake = Fake::new();
    on_comms(&fake.library(), 1, &quick(), |comm| {
        let memory = Memory::alloc(comm.library(), 8).unwrap();
        let window = comm.register(&memory, SYMMETRIC).unwrap();
        let device = DeviceComm::create(&comm, &Requirements::default()).unwrap();
        drop(comm);
        drop(memory);
        drop(window);
        assert_eq!((fake.count("windows"), fake.count("memory"), fake.count("comms")), (1, 1, 1));
        drop(device);
    });
    let ends = fake.calls(0, &["Destroy", "Deregister"]);
    assert_eq!(ends, ["ncclDevCommDestroy", "ncclCommWindowDeregister", "ncclCommDestroy"]);
    fake.assert_clean();
}

#[test]
fn a_failure_in_the_middle_leaves_what_came_before_intact_and_nothing_behind() {
    for (call, nth) in
        [("ncclMemAlloc", 2), ("ncclCommWindowRegister", 2), ("ncclDevCommCreate", 1), ("ncclCommQueryProperties", 2)]
    {
        let fake = Fake::new();
        fake.fail(call, nth, 1);
        on_comms(&fake.library(), 1, &quick(), |comm| {
            let first = window(&comm, 4096);
            let rest = || {
                let memory = Memory::alloc(comm.library(), 4096)?;
                let second = comm.register(&memory, SYMMETRIC)?;
                let device = DeviceComm::create(&comm, &Requirements::default())?;
                comm.properties()?;
                Ok((second, device))
            };
            let error: NcclError = rest().unwrap_err();
            let NcclError::Call { call: failed, code, .. } = &error else { panic!("{error}") };
            assert_eq!((*failed, *code), (call, ResultCode::UNHANDLED_CUDA_ERROR));
            assert!(first.lsa_pointer(0, 0).is_ok());
            assert_eq!((fake.count("windows"), fake.count("device_comms")), (1, 0));
        });
        fake.assert_clean();
    }
}

#[test]
fn a_registration_that_hangs_aborts_and_later_calls_say_so() {
    let fake = Fake::new();
    on_comms(&fake.library(), 1, &quick(), |comm| {
        let first = window(&comm, 64);
        let device = DeviceComm::create(&comm, &Requirements::default()).unwrap();
        fake.slow("ncclCommWindowRegister", -1);
        let memory = Memory::alloc(comm.library(), 8).unwrap();
        let error = comm.register(&memory, SYMMETRIC).unwrap_err();
        assert!(matches!(error, NcclError::Timeout { call: "ncclCommWindowRegister", .. }), "{error}");
        let later = comm.register(&memory, SYMMETRIC).unwrap_err();
        assert!(
            matches!(&later, NcclError::Aborted { reason } if reason.contains("ncclCommWindowRegister")),
            "{later}"
        );
        assert!(matches!(first.lsa_pointer(0, 0), Err(NcclError::Aborted { .. })));
        drop(device);
    });
    assert_eq!(fake.calls(0, &["Abort", "Destroy", "Deregister"]), ["ncclCommAbort"]);
    fake.assert_clean();
}

#[test]
fn addresses_are_those_of_the_lsa_team_and_multicast_only_where_there_is_one() {
    let fake = Fake::new();
    fake.set("lsa_team_size", 2);
    let library = fake.library();
    on_comms(&library, 4, &Config::default(), |comm| {
        let window = window(&comm, 64);
        let near = comm.rank() ^ 1;
        let far = (comm.rank() + 2) % 4;
        assert!(window.peer_pointer(near, 0).unwrap().is_some());
        assert_eq!(window.peer_pointer(far, 0).unwrap(), None);
        assert_eq!(window.lsa_pointer(comm.rank() % 2, 16).unwrap(), window.pointer().offset(16));
        let error = window.lsa_pointer(2, 0).unwrap_err();
        assert!(matches!(error, NcclError::Call { code: ResultCode::INVALID_ARGUMENT, .. }), "{error}");
        assert!(matches!(window.lsa_pointer(0, 64), Err(NcclError::Usage(_))));
        assert_eq!(window.multicast_pointer(0).unwrap(), None);
        let held = Memory::alloc(&library, 4).unwrap();
        // SAFETY: the ranges are allocated. A barrier before multicast comes on.
        unsafe { comm.all_gather(window.pointer(), held.pointer(), 1, DataType::Uint8, Stream::DEFAULT) }.unwrap();
        fake.set("multimem", 1);
        assert!(window.multicast_pointer(0).unwrap().is_some());
    });
    fake.assert_clean();
}

#[test]
fn threads_that_share_a_communicator_take_turns() {
    let fake = Fake::new();
    fake.slow("ncclCommWindowRegister", 3);
    on_comms(&fake.library(), 1, &Config::default(), |comm| {
        on_ranks(4, |_| {
            for _ in 0..8 {
                let window = window(&comm, 64);
                assert!(window.lsa_pointer(0, 0).is_ok());
                comm.properties().unwrap();
            }
        });
    });
    assert_eq!(fake.calls(0, &["WindowRegister"]).len(), 32);
    fake.assert_clean();
}

#[test]
fn the_counters_see_a_planted_leak_and_a_planted_misuse() {
    let fake = Fake::new();
    let library = fake.library();
    on_comms(&library, 1, &quick(), |comm| std::mem::forget(window(&comm, 8)));
    assert_eq!(["comms", "windows", "memory"].map(|kind| fake.count(kind)), [1, 1, 1]);
    let functions = library.windows().unwrap();
    // SAFETY: an address that the stand-in never gave, which it only compares.
    unsafe { (functions.ncclMemFree)(std::ptr::without_provenance_mut(4096)) };
    assert_eq!(fake.count("misuses"), 1);
}

// ---- Host RMA

/// Puts to the next rank around the ring and waits for the previous, `rounds` times.
fn ring(comm: &Comm, window: &Window, rounds: u32, grouped: bool) {
    let (rank, all) = (comm.rank(), comm.rank_count());
    let (next, previous) = ((rank + 1) % all, (rank + all - 1) % all);
    for round in 0..rounds {
        write(window.pointer(), &[rank as u8, round as u8]);
        let put = Put {
            source: window,
            source_offset: 0,
            target: window,
            target_offset: 2 + 2 * round as usize,
            bytes: 2,
            peer: next,
            signal: 1,
            context: 2,
        };
        let wait = SignalWait { peer: previous, count: 1, signal: 1, context: 2 };
        // SAFETY: the range is within every rank's window, which lives on; the stand-in's streams are done at once.
        unsafe {
            if grouped {
                let mut group = comm.group().unwrap();
                // The wait first: a group issues what others wait for before it waits.
                group.on(0).wait_signal(&[wait], Stream::DEFAULT).unwrap();
                group.on(0).put_signal(&put, Stream::DEFAULT).unwrap();
                group.end().unwrap();
            } else {
                comm.put_signal(&put, Stream::DEFAULT).unwrap();
                comm.wait_signal(&[wait], Stream::DEFAULT).unwrap();
            }
        }
        assert_eq!(read(window.pointer().offset(2 + 2 * u64::from(round)), 2), [previous as u8, round as u8]);
    }
}

#[test]
fn puts_arrive_before_their_signals_round_by_round() {
    for (blocking, grouped) in [(false, false), (true, false), (false, true), (true, true)] {
        let fake = Fake::new();
        let config = Config { blocking, rma_contexts: Some(3), rma_signals: Some(2), ..Config::default() };
        on_comms(&fake.library(), 3, &config, |comm| {
            let window = window(&comm, 64);
            ring(&comm, &window, 5, grouped);
            // Nobody lets go of a window that others still write to.
            // SAFETY: the stand-in's streams are done at once.
            unsafe {
                comm.signal((comm.rank() + 2) % 3, 0, 0, Stream::DEFAULT).unwrap();
                let wait = SignalWait { peer: (comm.rank() + 1) % 3, count: 1, signal: 0, context: 0 };
                comm.wait_signal(&[wait], Stream::DEFAULT).unwrap();
            }
        });
        fake.assert_clean();
    }
}

#[test]
fn a_put_that_makes_no_sense_is_refused_before_any_call() {
    let fake = Fake::new();
    on_comms(&fake.library(), 1, &quick(), |comm| {
        let (good, plain) = (window(&comm, 64), {
            let memory = Memory::alloc(comm.library(), 64).unwrap();
            comm.register(&memory, WindowFlags::DEFAULT).unwrap()
        });
        let child = comm.split(Some(0), 0, &quick()).unwrap().unwrap();
        let foreign = window(&child, 64);
        let put = Put {
            source: &good,
            source_offset: 0,
            target: &good,
            target_offset: 0,
            bytes: 8,
            peer: 0,
            signal: 0,
            context: 0,
        };
        for (wrong, why) in [
            (Put { source: &foreign, ..put }, "the put's source is a window of another communicator"),
            (Put { target: &foreign, ..put }, "the put's target is a window of another communicator"),
            (Put { source: &plain, ..put }, "the put's source is no symmetric window"),
            (Put { bytes: 0, ..put }, "a put of 0 bytes"),
            (Put { source_offset: 60, ..put }, "a put of 8 bytes from byte 60 of a window of 64"),
            (Put { source_offset: usize::MAX, ..put }, "a put of 8 bytes"),
            (Put { peer: 1, ..put }, "peer 1 of 1 ranks"),
        ] {
            // SAFETY: refused.
            let error = unsafe { comm.put_signal(&wrong, Stream::DEFAULT) }.unwrap_err();
            assert!(matches!(&error, NcclError::Usage(text) if text.contains(why)), "{error}");
        }
        let wait = SignalWait { peer: 0, count: 0, signal: 0, context: 0 };
        // SAFETY: refused.
        assert!(matches!(unsafe { comm.wait_signal(&[wait], Stream::DEFAULT) }, Err(NcclError::Usage(_))));
        assert!(fake.calls(0, &["Signal"]).is_empty());
        // SAFETY: within the window.
        unsafe { comm.put_signal(&put, Stream::DEFAULT) }.unwrap();
        // SAFETY: refused by the stand-in, as one signal was configured.
        let error = unsafe { comm.put_signal(&Put { signal: 1, ..put }, Stream::DEFAULT) }.unwrap_err();
        assert!(matches!(error, NcclError::Call { code: ResultCode::INVALID_ARGUMENT, .. }), "{error}");
    });
    fake.assert_clean();
}

#[test]
fn host_rma_that_is_not_there_is_refused_in_words() {
    let fake = Fake::new();
    fake.set("host_rma", 0);
    on_comms(&fake.library(), 1, &quick(), |comm| {
        // SAFETY: refused.
        let error = unsafe { comm.signal(0, 0, 0, Stream::DEFAULT) }.unwrap_err();
        assert!(
            error.to_string().starts_with("host RMA is not supported by this communicator: hostRmaSupport is false"),
            "{error}"
        );
    });
    fake.assert_clean();
}

#[test]
fn a_groups_failure_comes_at_its_end() {
    let fake = Fake::new();
    on_comms(&fake.library(), 1, &quick(), |comm| {
        fake.fail("ncclGroupEnd", 1, 6);
        let mut group = comm.group().unwrap();
        // SAFETY: the stand-in's streams are done at once.
        unsafe { group.on(0).signal(0, 0, 0, Stream::DEFAULT) }.unwrap();
        let error = group.end().unwrap_err();
        assert!(
            matches!(error, NcclError::Call { call: "ncclGroupEnd", code: ResultCode::REMOTE_ERROR, .. }),
            "{error}"
        );
        // The thread is free for another.
        comm.group().unwrap().end().unwrap();
    });
    fake.assert_clean();
}

#[test]
fn a_group_keeps_its_threads_other_calls_out_and_takes_in_what_is_dropped() {
    let fake = Fake::new();
    let library = fake.library();
    on_comms(&library, 1, &quick(), |comm| {
        let window = window(&comm, 64);
        let other = comm.split(Some(0), 0, &quick()).unwrap().unwrap();
        let group = comm.group().unwrap();
        let refused = |outcome: Result<(), NcclError>| {
            assert!(matches!(&outcome, Err(NcclError::Usage(text)) if text.contains("group open")), "{outcome:?}");
        };
        refused(comm.async_error().map(drop));
        refused(other.async_error().map(drop));
        refused(other.register(window.memory(), SYMMETRIC).map(drop));
        refused(Group::start(&[&other]).map(drop));
        refused(Comm::init_rank(&library, UniqueId::new(&library).unwrap(), 1, 0, &quick()).map(drop));
        drop(window);
        assert_eq!(fake.count("windows"), 1, "the window waits for the group");
        drop(other);
        group.end().unwrap();
        assert_eq!((fake.count("windows"), fake.count("comms")), (0, 1));
    });
    fake.assert_clean();
}

#[test]
fn a_group_that_is_dropped_is_ended() {
    let fake = Fake::new();
    on_comms(&fake.library(), 1, &quick(), |comm| {
        drop(comm.group().unwrap());
        assert!(comm.async_error().is_ok());
    });
    assert_eq!(fake.calls(-1, &["Group"]), ["ncclGroupStart", "ncclGroupEnd"]);
    fake.assert_clean();
}

#[test]
fn a_group_spans_the_communicators_of_a_thread() {
    let fake = Fake::new();
    on_comms(&fake.library(), 2, &Config::default(), |comm| {
        let child = comm.split(Some(0), -(comm.rank() as i32), &Config::default()).unwrap().unwrap();
        let mut group = Group::start(&[&child, &comm]).unwrap();
        // SAFETY: the stand-in's streams are done at once.
        unsafe {
            group.on(0).signal(0, 0, 0, Stream::DEFAULT).unwrap();
            group.on(1).signal(1, 0, 0, Stream::DEFAULT).unwrap();
        }
        group.end().unwrap();
        assert!(matches!(Group::start(&[&comm, &comm]), Err(NcclError::Usage(_))));
        assert!(matches!(Group::start(&[]), Err(NcclError::Usage(_))));
        // Rank 0 of the child is rank 1 of the parent: both got two signals, on different communicators.
        if comm.rank() == 1 {
            let from = |peer| SignalWait { peer, count: 1, signal: 0, context: 0 };
            // SAFETY: as above.
            unsafe {
                child.wait_signal(&[from(0), from(1)], Stream::DEFAULT).unwrap();
                comm.wait_signal(&[from(0), from(1)], Stream::DEFAULT).unwrap();
            }
        }
    });
    fake.assert_clean();
}

// ---- Device communicators

#[test]
fn a_device_communicator_has_what_was_asked_for() {
    let fake = Fake::new();
    fake.set("gin", 3);
    fake.set("lsa_team_size", 2);
    on_comms(&fake.library(), 4, &Config::default(), |comm| {
        let requirements = Requirements {
            connection: GinConnection::Full,
            context_count: Some(3),
            signal_count: 7,
            queue_depth: 512,
            lsa_barrier_count: 1,
            ..Requirements::default()
        };
        let device = DeviceComm::create(&comm, &requirements).unwrap();
        assert_eq!((device.rank() as u32, device.rank_count()), (comm.rank(), 4));
        assert_eq!((device.lsa_rank() as u32, device.lsa_size()), (comm.rank() % 2, 2));
        assert_eq!(device.context_count(), 4, "rounded up to a multiple of two connections");
        assert_eq!((device.bytes().len(), device.byte_count(), device.version()), (248, 248, Version(23203)));
        assert_eq!(device.bytes()[..4], 0xcafe_beef_u32.to_ne_bytes());
    });
    assert!(fake.log(0).contains(&"ncclDevCommCreate(connection 1, 3 contexts, 7 signals, depth 512)".to_owned()));
    fake.assert_clean();
}

#[test]
fn a_proxy_gets_no_queue_depth() {
    for (set, asked, depth) in [(2, None, 0), (3, None, 99), (3, Some(GinType::Proxy), 0)] {
        let fake = Fake::new();
        fake.set("gin", set);
        on_comms(&fake.library(), 1, &quick(), |comm| {
            let requirements = Requirements {
                connection: GinConnection::Full,
                gin_type: asked,
                queue_depth: 99,
                ..Requirements::default()
            };
            DeviceComm::create(&comm, &requirements).unwrap();
        });
        assert!(fake.log(0).iter().any(|call| call.ends_with(&format!("depth {depth})"))), "{:?}", fake.log(0));
        fake.assert_clean();
    }
}

#[test]
fn requirements_that_contradict_each_other_are_refused_before_any_call() {
    let fake = Fake::new();
    fake.set("gin", 2);
    fake.set("railed_gin", 2);
    on_comms(&fake.library(), 1, &quick(), |comm| {
        let none = Requirements::default();
        for wrong in [
            Requirements { signal_count: 1, ..none.clone() },
            Requirements { counter_count: 1, ..none.clone() },
            Requirements { barrier_count: 1, ..none.clone() },
            Requirements { connection: GinConnection::Rail, world_gin_barrier_count: 1, ..none.clone() },
            Requirements { connection: GinConnection::Stride(0), ..none.clone() },
            Requirements { connection: GinConnection::Full, signal_count: u32::MAX, ..none.clone() },
        ] {
            let outcome = DeviceComm::create(&comm, &wrong);
            assert!(matches!(outcome, Err(NcclError::Usage(_))), "{wrong:?}");
        }
    });
    assert!(fake.calls(0, &["DevComm"]).is_empty());
    fake.assert_clean();
}

#[test]
fn gin_that_is_not_there_is_refused_with_what_helps() {
    let fake = Fake::new();
    fake.set("railed_gin", 3);
    on_comms(&fake.library(), 1, &quick(), |comm| {
        let full = Requirements { connection: GinConnection::Full, ..Requirements::default() };
        let error = DeviceComm::create(&comm, &full).unwrap_err().to_string();
        assert!(error.contains("railed GIN: Gdaki") && error.contains("NCCL_GIN_TYPE=2"), "{error}");
        let rail = Requirements { connection: GinConnection::Rail, ..Requirements::default() };
        DeviceComm::create(&comm, &rail).unwrap();
        fake.set("weak_signals_only", 1);
        let error = DeviceComm::create(&comm, &rail).unwrap_err();
        let NcclError::Call { code: ResultCode::INVALID_USAGE, hint, .. } = &error else { panic!("{error}") };
        assert!(hint.contains("strong"), "{error}");
        DeviceComm::create(&comm, &Requirements { strong_signals: false, ..rail }).unwrap();
    });
    fake.assert_clean();
}

#[test]
fn a_communicator_without_the_device_api_has_no_device_communicators() {
    let fake = Fake::new();
    fake.set("device_api", 0);
    on_comms(&fake.library(), 1, &quick(), |comm| {
        let error = DeviceComm::create(&comm, &Requirements::default()).unwrap_err();
        assert!(matches!(error, NcclError::Unsupported { what: "a device communicator", .. }), "{error}");
    });
    fake.assert_clean();
}

#[test]
fn a_layout_of_another_version_is_not_handed_out() {
    let fake = Fake::new();
    fake.set("version", 23301);
    on_comms(&fake.library(), 1, &quick(), |comm| {
        assert_eq!(DeviceComm::create(&comm, &Requirements::default()).unwrap().version(), Version(23203));
        fake.set("device_comm_version", 23301);
        let error = DeviceComm::create(&comm, &Requirements::default()).unwrap_err();
        assert!(error.to_string().contains("wrote that of 2.33.1, not of 2.32.3"), "{error}");
    });
    fake.assert_clean();
}

#[test]
fn a_creation_that_hangs_ends_with_the_deadline() {
    let fake = Fake::new();
    fake.slow("ncclDevCommCreate", -1);
    on_comms(&fake.library(), 1, &quick(), |comm| {
        let began = Instant::now();
        let error = DeviceComm::create(&comm, &Requirements::default()).unwrap_err();
        assert!(matches!(error, NcclError::Timeout { call: "ncclDevCommCreate", .. }), "{error}");
        assert!(began.elapsed() < SOON);
    });
    fake.assert_clean();
}

// ---- Collectives

#[test]
fn a_reduce_scatter_sums_each_ranks_part() {
    let fake = Fake::new();
    let library = fake.library();
    on_comms(&library, 3, &Config::default(), |comm| {
        let rank = comm.rank();
        let values: Vec<u8> = (0..6).flat_map(|i| ((rank * 10 + i) as f32).to_ne_bytes()).collect();
        let (all, own) = (Memory::alloc(&library, 24).unwrap(), Memory::alloc(&library, 8).unwrap());
        write(all.pointer(), &values);
        let (all, own_at) = (all.pointer(), own.pointer());
        // SAFETY: the ranges are allocated; the stand-in's streams are done at once.
        unsafe { comm.reduce_scatter(all, own_at, 2, DataType::Float32, ReduceOp::Sum, Stream::DEFAULT) }.unwrap();
        let sum = |i: u32| (30 + 3 * (2 * rank + i)) as f32;
        assert_eq!(read(own_at, 8), [sum(0).to_ne_bytes(), sum(1).to_ne_bytes()].concat());
        // SAFETY: refused by the stand-in.
        let refused = unsafe { comm.reduce_scatter(all, own_at, 2, DataType::Int8, ReduceOp::Sum, Stream::DEFAULT) };
        assert!(matches!(refused, Err(NcclError::Call { call: "ncclReduceScatter", .. })));
    });
    fake.assert_clean();
}

//! The plugin's functions, driven as NCCL drives them, over memory of the host.

mod common;

use common::{Alone, Exchange, Memory, PLUGIN, Rank, alone, ok};
use nccl_loopback_plugin::abi::{ContextConfig, INVALID_ARGUMENT, NetProperties, SYSTEM_ERROR};
use nccl_loopback_plugin::coll::Address;
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::scope;
use std::time::{Duration, Instant};

const SYSTEM: i32 = SYSTEM_ERROR;
const INVALID: i32 = INVALID_ARGUMENT;
const CONTEXTS: usize = 2;
const PUTS: usize = 120;
const WORDS: usize = 5;

/// What the `put`-th put of a stream carries in a word.
fn content(from: usize, context: usize, put: usize, word: usize) -> u64 {
    1 + (((from * CONTEXTS + context) * PUTS + put) * WORDS + word) as u64
}

/// Where the `put`-th put from a rank by a context lands.
fn landing(from: usize, context: usize, put: usize) -> usize {
    ((from * CONTEXTS + context) * PUTS + put) * WORDS
}

/// Each rank puts [`PUTS`] times to each rank by each context, a random part with a signal which says how many there were until
/// then, and with each signal an increment of a word that all share. Receivers look at the data of what signals speak of, whenever
/// they see more of them. Gives how much was wrong.
fn exchange(ranks: usize, seed: u64) -> Vec<String> {
    let meet = Exchange::new(ranks);
    let stop = AtomicBool::new(false);
    let wrong: Vec<Vec<String>> = scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let (meet, stop) = (&meet, &stop);
                scope.spawn(move || one_rank(meet, stop, ranks, rank, seed))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    wrong.concat()
}

fn one_rank(meet: &Exchange, stop: &AtomicBool, ranks: usize, rank: usize, seed: u64) -> Vec<String> {
    let mut random = fastrand::Rng::with_seed(seed * 100 + rank as u64);
    let source = Memory::new(ranks * CONTEXTS * PUTS * WORDS);
    let target = Memory::new(ranks * CONTEXTS * PUTS * WORDS);
    // One word per origin and context, and one that all share.
    let signals = Memory::new(ranks * CONTEXTS + 1);
    let shared = ranks * CONTEXTS;
    for (put, context) in (0..PUTS).flat_map(|put| (0..CONTEXTS).map(move |context| (put, context))) {
        for word in 0..WORDS {
            source.0[landing(0, context, put) + word].store(content(rank, context, put, word), Ordering::Relaxed);
        }
    }
    let me = Rank::new(meet, ranks, rank, CONTEXTS);
    let regions: Vec<*mut c_void> = [&source, &target, &signals]
        .map(|memory| {
            let (code, region) = me.register(memory);
            ok(code);
            region
        })
        .to_vec();

    let mut wrong = Vec::new();
    let mut seen = vec![0; ranks * CONTEXTS];
    let mut look = |wrong: &mut Vec<String>| {
        let mut all = true;
        for from in 0..ranks {
            for context in 0..CONTEXTS {
                let stream = from * CONTEXTS + context;
                let count = signals.0[stream].load(Ordering::Acquire) as usize;
                for put in seen[stream]..count.min(PUTS) {
                    for word in 0..WORDS {
                        let found = target.0[landing(from, context, put) + word].load(Ordering::Relaxed);
                        if found != content(from, context, put, word) {
                            wrong.push(format!("put {put} of {from} by {context} at {rank}: {found}"));
                        }
                    }
                }
                seen[stream] = count;
                all &= count >= PUTS;
            }
        }
        all
    };

    let mut streams: Vec<(usize, usize, usize, usize)> =
        (0..ranks).flat_map(|peer| (0..CONTEXTS).map(move |context| (peer, context, 0, 0))).collect();
    let mut requests = Vec::new();
    while !streams.is_empty() {
        let which = random.usize(..streams.len());
        let (peer, context, put, told) = streams[which];
        let from = (regions[0], landing(0, context, put));
        let to = (regions[1], landing(rank, context, put));
        let last = put + 1 == PUTS;
        let (code, request) = if last || random.bool() {
            let signal = (regions[2], rank * CONTEXTS + context);
            let value = (put + 1 - told) as u64;
            streams[which].3 = put + 1;
            me.put_signal(context, peer, Some((from, to, WORDS)), signal, value, random.bool())
        } else {
            me.put(context, peer, from, to, WORDS)
        };
        ok(code);
        requests.push(request);
        let (code, request) = me.put_signal(context, peer, None, (regions[2], shared), 0, true);
        ok(code);
        requests.push(request);
        streams[which].2 += 1;
        if last {
            streams.swap_remove(which);
        }
        // As NCCL does, in any order, and up to a bound.
        for _ in 0..random.usize(..8) {
            if let Some(which) = (!requests.is_empty()).then(|| random.usize(..requests.len())) {
                let (code, done) = me.test(requests[which]);
                ok(code);
                if done {
                    requests.swap_remove(which);
                }
            }
        }
        look(&mut wrong);
    }
    for request in requests {
        me.wait(request);
        look(&mut wrong);
    }
    // Where a signal can be lost the others end the wait.
    let end = Instant::now() + Duration::from_secs(5);
    while !look(&mut wrong) && !stop.load(Ordering::Relaxed) {
        if Instant::now() > end {
            stop.store(true, Ordering::Relaxed);
        }
        std::thread::yield_now();
    }
    meet.meet();
    look(&mut wrong);
    for (stream, count) in signals.0[..shared].iter().enumerate() {
        let count = count.load(Ordering::Acquire);
        if count != PUTS as u64 {
            wrong.push(format!("signal of stream {stream} at {rank}: {count}"));
        }
    }
    let total = signals.0[shared].load(Ordering::Acquire);
    if total != (ranks * CONTEXTS * PUTS) as u64 {
        wrong.push(format!("shared signal at {rank}: {total} of {}", ranks * CONTEXTS * PUTS));
    }
    me.close(&regions);
    wrong
}

fn at_zero(alone: &Alone) {
    assert_eq!(alone.alive(), [0; 8]);
}

#[test]
fn data_is_there_with_the_signal_and_no_signal_is_lost() {
    for seed in 0..6 {
        let alone = alone(seed * 1000);
        let wrong = exchange([1, 2, 4][seed as usize % 3], seed);
        assert_eq!(wrong, Vec::<String>::new(), "seed {seed}");
        at_zero(&alone);
    }
}

#[test]
fn a_lane_that_says_done_too_early_is_seen() {
    let alone = alone(1);
    alone.early(true);
    let wrong = exchange(3, 1);
    assert!(wrong.iter().any(|line| line.starts_with("put")), "{wrong:?}");
    assert!(wrong.iter().any(|line| line.starts_with("shared")), "{wrong:?}");
    at_zero(&alone);
}

/// Runs so many ranks with a communicator each.
fn with_ranks(ranks: usize, body: impl Fn(Rank, usize, &Exchange) + Sync) {
    let meet = Exchange::new(ranks);
    scope(|scope| {
        for rank in 0..ranks {
            let (meet, body) = (&meet, &body);
            scope.spawn(move || body(Rank::new(meet, ranks, rank, 1), rank, meet));
        }
    });
}

#[test]
fn get_brings_what_is_there_and_flush_has_nothing_to_wait_for() {
    let alone = alone(3);
    with_ranks(2, |me, rank, meet| {
        let memory = Memory::new(8);
        for (i, word) in memory.0[..4].iter().enumerate() {
            word.store((rank * 10 + i) as u64, Ordering::Relaxed);
        }
        let (code, region) = me.register(&memory);
        ok(code);
        let (code, request) = me.get(0, 1 - rank, (region, 1), (region, 4), 3);
        ok(code);
        me.wait(request);
        let mut flush = 8 as *mut c_void;
        // SAFETY: the plugin's handles.
        unsafe { ok((PLUGIN.iflush)(me.context, 0, region, 0, &mut flush)) };
        assert!(flush.is_null());
        let found: Vec<u64> = memory.0[4..].iter().map(|word| word.load(Ordering::Relaxed)).collect();
        let first = ((1 - rank) * 10) as u64;
        assert_eq!(found, [first + 1, first + 2, first + 3, 0]);
        meet.meet();
        me.close(&[region]);
    });
    at_zero(&alone);
}

#[test]
fn requests_of_a_queue_end_in_order_and_progress_drives_them() {
    let alone = alone(4);
    with_ranks(1, |me, _, _| {
        let memory = Memory::new(64);
        let region = me.register(&memory).1;
        let requests: Vec<_> = (0..32).map(|i| me.put(0, 0, (region, i), (region, 32 + i), 1).1).collect();
        // The newest is done only when all older ones are: those then say so at the first asking.
        me.wait(requests[31]);
        for request in &requests[..31] {
            assert_eq!(me.test(*request), (0, true));
        }
        // A request that said done is gone.
        assert_eq!(me.test(requests[0]).0, INVALID);
        let (_, request) = me.put(0, 0, (region, 0), (region, 32), 1);
        let end = Instant::now() + Duration::from_secs(10);
        memory.0[0].store(77, Ordering::Relaxed);
        while memory.0[32].load(Ordering::Relaxed) != 77 {
            assert!(Instant::now() < end);
            me.progress();
        }
        me.wait(request);
        // Onto itself there is nothing to copy: the planted failure does not come up.
        alone.fail(0);
        let (code, request) = me.put(0, 0, (region, 3), (region, 3), 1);
        ok(code);
        me.wait(request);
        me.close(&[region]);
    });
    at_zero(&alone);
}

#[test]
fn a_peer_that_never_registers_ends_in_an_error() {
    let alone = alone(5);
    alone.world().set_deadline(Duration::from_millis(200));
    with_ranks(2, |me, rank, meet| {
        if rank == 0 {
            let start = Instant::now();
            assert_eq!(me.register(&Memory::new(1)).0, SYSTEM);
            assert!(start.elapsed() >= Duration::from_millis(200));
        }
        meet.meet();
        me.close(&[]);
    });
    at_zero(&alone);
}

#[test]
fn a_peer_that_has_left_ends_it_at_once() {
    let alone = alone(6);
    with_ranks(2, |me, rank, meet| {
        // A rank that had left before the other connected would be one that never came.
        meet.meet();
        if rank == 0 {
            let start = Instant::now();
            assert_eq!(me.register(&Memory::new(1)).0, SYSTEM);
            assert!(start.elapsed() < alone.world().deadline() / 2);
        }
        me.close(&[]);
    });
    at_zero(&alone);
}

#[test]
fn what_cannot_be_is_refused() {
    let alone = alone(7);
    with_ranks(2, |me, rank, meet| {
        let memory = Memory::new(4);
        let region = me.register(&memory).1;
        let peer = 1 - rank;
        assert_eq!(me.put(0, peer, (region, 0), (region, 3), 2).0, INVALID, "beyond the target");
        assert_eq!(me.put(0, peer, (region, 4), (region, 0), 1).0, INVALID, "beyond the source");
        assert_eq!(me.put(0, peer, (null_mut(), 0), (region, 0), 1).0, INVALID, "no region");
        assert_eq!(me.put(0, peer, (9 as *mut c_void, 0), (region, 0), 1).0, INVALID, "an unknown region");
        assert_eq!(me.put(0, 2, (region, 0), (region, 0), 1).0, INVALID, "no such rank");
        assert_eq!(me.put(1, peer, (region, 0), (region, 0), 1).0, INVALID, "no such context");
        assert_eq!(me.put_signal(0, peer, None, (region, 4), 1, true).0, INVALID, "a signal beyond the region");
        assert_eq!(me.test(null_mut()).0, INVALID, "no request");
        assert_eq!(me.deregister(9 as *mut c_void), INVALID, "an unknown region");
        // SAFETY: a wrong kind of handle, and null.
        unsafe {
            assert_eq!((PLUGIN.close_coll)(me.instance), INVALID);
            assert_eq!((PLUGIN.close_coll)(null_mut()), INVALID);
        }
        for config in [(0, 1), (1, 0), (1, 3)] {
            let config = ContextConfig { contexts: config.0, traffic_class: 0, rank_stride: config.1 };
            let mut context = null_mut();
            // SAFETY: the plugin's handle and places for results.
            assert_eq!(unsafe { (PLUGIN.create_context)(me.coll, &config, &mut context) }, INVALID, "{config:?}");
        }
        meet.meet();
        me.close(&[region]);
    });
    at_zero(&alone);
}

#[test]
fn handles_of_others_are_refused() {
    let alone = alone(8);
    let instances = [Rank::instance(1, None), Rank::instance(2, None)];
    let (first, first_handle) = Rank::listen(instances[0]);
    let (second, second_handle) = Rank::listen(instances[1]);
    assert_eq!(Address::from_bytes(&first_handle).to_bytes(), first_handle);
    let refused = |handles: &mut [[u8; 128]], rank, listener, code| {
        assert_eq!(Rank::connect(handles, handles.len(), rank, listener).0, code);
    };
    refused(&mut [first_handle, second_handle], 1, first, INVALID); // another rank's
    refused(&mut [first_handle, [0; 128]], 0, first, INVALID); // another plugin
    refused(&mut [first_handle, first_handle], 0, second, INVALID); // another listener
    let mut elsewhere = first_handle;
    elsewhere[8] ^= 1;
    refused(&mut [first_handle, elsewhere], 0, first, SYSTEM); // another process
    let mut both = [first_handle, first_handle];
    let (code, coll) = Rank::connect(&mut both, 2, 0, first);
    ok(code);
    refused(&mut both, 0, first, INVALID); // twice
    // SAFETY: the plugin's handles.
    unsafe {
        ok((PLUGIN.close_coll)(coll));
        for listener in [first, second] {
            ok((PLUGIN.close_listen)(listener));
        }
        for instance in instances {
            ok((PLUGIN.finalize)(instance));
        }
    }
    at_zero(&alone);
}

#[test]
fn a_failed_copy_stays_an_error_of_its_context() {
    let alone = alone(9);
    alone.fail(1);
    with_ranks(1, |me, _, _| {
        let memory = Memory::new(4);
        let region = me.register(&memory).1;
        let (code, request) = me.put(0, 0, (region, 0), (region, 1), 1);
        ok(code);
        assert_eq!(me.put(0, 0, (region, 0), (region, 1), 1).0, SYSTEM);
        assert_eq!(me.put(0, 0, (region, 0), (region, 1), 1).0, SYSTEM);
        assert_eq!(me.test(request).0, SYSTEM);
        let mut failed = false;
        // SAFETY: the plugin's handles and places for results.
        unsafe {
            ok((PLUGIN.query_last_error)(me.context, &mut failed));
            assert!(failed);
            assert_eq!((PLUGIN.destroy_context)(me.context), SYSTEM);
            ok((PLUGIN.dereg_mr_sym)(me.coll, region));
            ok((PLUGIN.close_coll)(me.coll));
            ok((PLUGIN.finalize)(me.instance));
        }
    });
    at_zero(&alone);
}

#[test]
fn what_is_left_open_is_seen() {
    let alone = alone(10);
    with_ranks(1, |me, _, _| {
        let memory = Memory::new(4);
        let region = me.register(&memory).1;
        let [instances, listeners, colls, contexts, regions, requests, groups, words] = alone.alive();
        assert_eq!([instances, colls, contexts, regions, groups], [1; 5]);
        assert_eq!([listeners, requests, words], [0; 3]);
        let (_, request) = me.put(0, 0, (region, 0), (region, 1), 1);
        assert_eq!(alone.alive()[5], 1);
        me.wait(request);
        // SAFETY: the plugin's handles.
        unsafe {
            assert_eq!((PLUGIN.close_coll)(me.coll), INVALID, "a context and a region are alive");
            ok((PLUGIN.destroy_context)(me.context));
            ok((PLUGIN.finalize)(me.instance));
        }
    });
    at_zero(&alone);
}

#[test]
fn properties_are_what_nccl_needs() {
    let _alone = alone(11);
    // SAFETY: places for results.
    unsafe {
        let mut count = 0;
        ok((PLUGIN.devices)(&mut count));
        assert_eq!(count, 1);
        let mut properties: NetProperties = std::mem::zeroed();
        ok((PLUGIN.get_properties)(0, &mut properties));
        assert_eq!(properties.ptr_support, 3, "host and CUDA, no DMA-BUF");
        assert_eq!(properties.net_device_type, 2);
        assert_eq!(properties.virtual_devices[..2], [1, 0]);
        assert!(!CStr::from_ptr(properties.name).is_empty());
        assert_eq!((PLUGIN.get_properties)(1, &mut properties), INVALID);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn faults_reach_nccls_log() {
    use nccl_loopback_plugin::abi::Logger;
    use std::ffi::{c_char, c_int, c_ulong};
    use std::sync::Mutex;

    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

    unsafe extern "C" fn log(
        level: c_int,
        _flags: c_ulong,
        _file: *const c_char,
        _line: c_int,
        format: *const c_char,
        text: *const c_char,
    ) {
        // SAFETY: the plugin gives strings that end with zero.
        let (format, text) = unsafe { (CStr::from_ptr(format), CStr::from_ptr(text)) };
        LINES.lock().unwrap().push(format!("{level} {} {}", format.to_str().unwrap(), text.to_str().unwrap()));
    }

    type Plain = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char);
    let _alone = alone(12);
    // SAFETY: on x86-64, pointers and integers are passed alike to functions with and without a variable number of arguments.
    let logger = unsafe { std::mem::transmute::<Plain, Logger>(log) };
    let instance = Rank::instance(3, Some(logger));
    // SAFETY: null is refused.
    unsafe {
        assert_eq!((PLUGIN.close_coll)(null_mut()), INVALID);
        ok((PLUGIN.finalize)(instance));
    }
    let lines = LINES.lock().unwrap();
    assert!(
        lines.iter().any(|line| line == "2 RMA/Loopback : %s closeColl(0x0): no collective communicator"),
        "{lines:?}"
    );
}

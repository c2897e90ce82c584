//! What the NCCL back end asks of NCCL, against a stand-in that writes it down.
//!
//! The stand-in moves nothing, and a flush needs a machine's clock, so what is shown here is the arguments alone. That the calls
//! fit NCCL's functions is shown by `cargo xtask ptx --nccl`.

use std::cell::RefCell;
use tide_device::abi::params::{Deadline, NcclHandle};
use tide_device::arch::shared::SharedAddr;
use tide_device::gin::Gin;
use tide_device::gin::nccl::Nccl;

/// A call, as far as it can differ. Windows are addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Put { comm: u64, context: u32, peer: u32, to: (u64, u64), from: (u64, u64), bytes: u64, signal: Option<Signal> },
    Signal { comm: u64, context: u32, peer: u32, signal: Signal },
    Read { comm: u64, window: u64, offset: u64, bits: u32, order: u32 },
}

/// A signal of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Signal {
    kind: u32,
    window: u64,
    offset: u64,
    is_strong: bool,
    operation: u32,
    argument: u64,
}

thread_local! {
    static CALLS: RefCell<Vec<Call>> = const { RefCell::new(Vec::new()) };
    static SCOPES: RefCell<Vec<(u32, u32)>> = const { RefCell::new(Vec::new()) };
}

fn take() -> Vec<Call> {
    CALLS.take()
}

fn note(call: Call) {
    CALLS.with_borrow_mut(|calls| calls.push(call));
}

#[unsafe(no_mangle)]
extern "C" fn nccl_gin_put(
    comm: u64,
    context: u32,
    peer: u32,
    destination: u64,
    destination_offset: u64,
    source: u64,
    source_offset: u64,
    bytes: u64,
    kind: u32,
    window: u64,
    offset: u64,
    is_strong: bool,
    operation: u32,
    argument: u64,
    given: u32,
    required: u32,
) {
    let signal = (kind != 0).then_some(Signal { kind, window, offset, is_strong, operation, argument });
    let (to, from) = ((destination, destination_offset), (source, source_offset));
    note(Call::Put { comm, context, peer, to, from, bytes, signal });
    SCOPES.with_borrow_mut(|scopes| scopes.push((given, required)));
}

#[unsafe(no_mangle)]
extern "C" fn nccl_gin_signal(
    comm: u64,
    context: u32,
    peer: u32,
    kind: u32,
    window: u64,
    offset: u64,
    is_strong: bool,
    operation: u32,
    argument: u64,
    given: u32,
    required: u32,
) {
    let signal = Signal { kind, window, offset, is_strong, operation, argument };
    note(Call::Signal { comm, context, peer, signal });
    SCOPES.with_borrow_mut(|scopes| scopes.push((given, required)));
}

#[unsafe(no_mangle)]
extern "C" fn nccl_gin_read_signal(comm: u64, window: u64, offset: u64, bits: u32, order: u32) -> u64 {
    note(Call::Read { comm, window, offset, bits, order });
    77
}

#[unsafe(no_mangle)]
extern "C" fn nccl_gin_flush_timeout(_comm: u64, _context: u32, _order: u32, _cycles: u64) -> u32 {
    unreachable!("nothing here fills a share of the queue")
}

const COMM: u64 = 0x1000;
const WINDOW: u64 = 0x2000;
const ARENA: u64 = 1 << 20;
const SIGNALS: u64 = 1 << 12;

fn with_network(run: impl FnOnce(&mut Nccl)) -> Vec<Call> {
    let handle = NcclHandle {
        comm: COMM,
        window: WINDOW,
        window_offset: ARENA,
        signals_offset: SIGNALS,
        flush_slice_cycles: 1,
        context_count: 4,
        queue_entries_max: 8,
    };
    let deadline = Deadline { timeout_ns: 1, fault: 0, claim: 0 };
    // SAFETY: the handle outlives the network; the stand-in follows none of its addresses.
    let mut network = unsafe { Nccl::open(&raw const handle as u64, SharedAddr(0), deadline, 3) };
    run(&mut network);
    take()
}

/// Signal `index` at a peer: a strong addition of 1 to a word of the arena.
fn signal(index: u64) -> Signal {
    let offset = ARENA + SIGNALS + 8 * index;
    Signal { kind: 1, window: WINDOW, offset, is_strong: true, operation: 1, argument: 1 }
}

#[test]
fn a_put_names_places_in_the_window_and_a_strong_signal_word_of_the_arena() {
    // SAFETY: the stand-in follows no address; the same below.
    let calls = with_network(|network| unsafe {
        network.put(2, 5, 4096, 256, 1 << 16, Some(9));
        network.put(0, 1, 16, 32, 48, None);
    });
    let put = |context, peer, to, from, bytes, signal| {
        let (to, from) = ((WINDOW, ARENA + to), (WINDOW, ARENA + from));
        Call::Put { comm: COMM, context, peer, to, from, bytes, signal }
    };
    assert_eq!(calls, [put(2, 5, 4096, 256, 1 << 16, Some(signal(9))), put(0, 1, 16, 32, 48, None)]);
}

#[test]
fn a_put_of_nothing_is_its_signal_or_nothing() {
    // SAFETY: as above.
    let calls = with_network(|network| unsafe {
        network.put(1, 6, 0, 0, 0, Some(4));
        network.put(1, 6, 0, 0, 0, None);
        network.signal(0, 2, 7);
    });
    let signal_of = |context, peer, index| Call::Signal { comm: COMM, context, peer, signal: signal(index) };
    assert_eq!(calls, [signal_of(1, 6, 4), signal_of(0, 2, 7)]);
}

#[test]
fn every_post_asks_for_a_system_fence() {
    // SAFETY: as above.
    with_network(|network| unsafe {
        network.put(0, 1, 0, 0, 16, Some(0));
        network.put(0, 1, 0, 0, 16, None);
        network.signal(0, 1, 0);
    });
    // Given: thread; required: system, which NCCL numbers 0.
    assert_eq!(SCOPES.take(), [(10, 0); 3]);
}

#[test]
fn a_signal_is_read_whole_and_with_acquire() {
    // SAFETY: as above.
    let calls = with_network(|network| assert_eq!(unsafe { network.read_signal(3) }, 77));
    assert_eq!(calls, [Call::Read { comm: COMM, window: WINDOW, offset: signal(3).offset, bits: 64, order: 2 }]);
}

//! The plugin as built, on a GPU, without NCCL: every way between host and device, and signals from two ranks at one word.
//!
//! Where there is no GPU it says so and does nothing.

use nccl_loopback_plugin::abi::{ContextConfig, HANDLE_BYTES, POINTER_CUDA, POINTER_HOST, SIGNAL_ADD, SIGNAL_INC};
use nccl_loopback_plugin::cuda::driver::{DevicePointer, Driver, Handle, STREAM_NON_BLOCKING};
use nccl_loopback_plugin::ncclRmaPlugin_v16 as plugin;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Barrier;
use std::thread::scope;

const RANKS: usize = 2;
/// More than bounces at a time, and no multiple of it.
const BYTES: usize = (2 << 20) + 40;
const ROUNDS: usize = 50;

/// Memory of the GPU and a stream to look at it by.
struct Gpu {
    driver: &'static Driver,
    context: Handle,
    stream: Handle,
}

// SAFETY: of all calls below: ranges within what was allocated, and waited for.
impl Gpu {
    fn new(driver: &'static Driver, context: Handle) -> Self {
        let mut stream = null_mut();
        // SAFETY: see above.
        unsafe { driver.within(context, || driver.stream_create(&mut stream, STREAM_NON_BLOCKING, 0)) }.unwrap();
        Self { driver, context, stream }
    }

    fn alloc(&self, bytes: usize) -> DevicePointer {
        let mut memory = 0;
        // SAFETY: see above.
        unsafe { self.driver.within(self.context, || self.driver.alloc(&mut memory, bytes)) }.unwrap();
        self.write(memory, &vec![0; bytes]);
        memory
    }

    fn write(&self, to: DevicePointer, from: &[u8]) {
        // SAFETY: see above.
        let written = unsafe {
            self.driver.within(self.context, || {
                self.driver.to_device(to, from.as_ptr().cast(), from.len(), self.stream)?;
                self.driver.stream_synchronize(self.stream)
            })
        };
        written.unwrap();
    }

    fn read(&self, from: DevicePointer, bytes: usize) -> Vec<u8> {
        let mut to = vec![0; bytes];
        // SAFETY: see above.
        let read = unsafe {
            self.driver.within(self.context, || {
                self.driver.to_host(to.as_mut_ptr().cast(), from, bytes, self.stream)?;
                self.driver.stream_synchronize(self.stream)
            })
        };
        read.unwrap();
        to
    }

    fn word(&self, from: DevicePointer) -> u64 {
        u64::from_le_bytes(self.read(from, 8).try_into().unwrap())
    }
}

fn ok(code: c_int) {
    assert_eq!(code, 0);
}

fn wait(coll: *mut c_void, request: *mut c_void) {
    let mut done = 0;
    while done == 0 {
        // SAFETY: the plugin's handles and a place for the result.
        ok(unsafe { (plugin.test)(coll, request, &mut done) });
    }
}

fn pattern(rank: usize, round: usize) -> Vec<u8> {
    (0..BYTES).map(|i| (i * 7 + rank * 31 + round * 13) as u8).collect()
}

fn one_rank(
    driver: &'static Driver,
    context: Handle,
    rank: usize,
    barrier: &Barrier,
    handles: &[[u8; HANDLE_BYTES]],
    own: (Handle, Handle),
) {
    let gpu = Gpu::new(driver, context);
    let (instance, listener) = own;
    let peer = 1 - rank;
    let pointers: Vec<*mut c_void> = handles.iter().map(|handle| handle.as_ptr().cast_mut().cast()).collect();
    let (source, target, signals) = (gpu.alloc(BYTES), gpu.alloc(BYTES), gpu.alloc(16));
    let mut value = [0u64; 2];
    let (mut coll, mut lane, mut regions) = (null_mut(), null_mut(), [null_mut(); 4]);
    let config = ContextConfig { contexts: 2, traffic_class: 0, rank_stride: 1 };
    // SAFETY: the plugin's handles, places for results, and memory that outlives its registration.
    unsafe {
        ok((plugin.connect)(null_mut(), pointers.as_ptr(), RANKS as c_int, rank as c_int, listener, &mut coll));
        ok((plugin.close_listen)(listener));
        ok((plugin.create_context)(coll, &config, &mut lane));
        let memory = [(source, BYTES, POINTER_CUDA), (target, BYTES, POINTER_CUDA), (signals, 16, POINTER_CUDA)];
        for (region, (address, bytes, kind)) in regions.iter_mut().zip(memory) {
            ok((plugin.reg_mr_sym)(coll, address as *mut c_void, bytes, kind, 0, region));
        }
        ok((plugin.reg_mr_sym)(coll, value.as_mut_ptr().cast(), 16, POINTER_HOST, 0, &mut regions[3]));
    }
    let [source_region, target_region, signal_region, value_region] = regions;
    let signal = |index: c_int, to: usize, offset: u64, value: u64, data: usize| {
        let operation = if value == 1 { SIGNAL_INC } else { SIGNAL_ADD };
        let mut request = null_mut();
        // SAFETY: as above.
        ok(unsafe {
            (plugin.iput_signal)(
                lane,
                index,
                0,
                source_region,
                data,
                0,
                target_region,
                to as u32,
                offset,
                signal_region,
                value,
                operation,
                true,
                0,
                &mut request,
            )
        });
        request
    };
    for round in 0..ROUNDS {
        gpu.write(source, &pattern(rank, round));
        let first = signal(0, peer, 0, 3, BYTES);
        // Both ranks at the second word of rank 0.
        let second = signal(1, 0, 8, 1, 0);
        while gpu.word(signals) < 3 * (round + 1) as u64 {
            let mut unused = false;
            // The own puts have to be driven meanwhile.
            // SAFETY: as above.
            unsafe {
                ok(plugin.rma_progress.unwrap()(lane));
                ok((plugin.query_last_error)(lane, &mut unused));
            }
        }
        assert!(gpu.read(target, BYTES) == pattern(peer, round), "round {round} at {rank}");
        wait(coll, first);
        wait(coll, second);
        barrier.wait();
    }
    // A value of the host to the device, and back to the host by a get.
    value[0] = 1000 + rank as u64;
    barrier.wait();
    let mut request = null_mut();
    // SAFETY: as above.
    unsafe { ok((plugin.iput)(lane, 0, 0, value_region, 8, 0, target_region, peer as u32, 0, &mut request)) };
    wait(coll, request);
    barrier.wait();
    assert_eq!(gpu.word(target), 1000 + peer as u64);
    // SAFETY: as above.
    unsafe { ok((plugin.iget)(lane, 1, 0, target_region, 8, 8, value_region, peer as u32, 0, &mut request)) };
    wait(coll, request);
    // SAFETY: the plugin has written it.
    assert_eq!(unsafe { value.as_ptr().add(1).read_volatile() }, 1000 + rank as u64);
    if rank == 0 {
        assert_eq!(gpu.word(signals + 8), (RANKS * ROUNDS) as u64);
    }
    barrier.wait();
    // SAFETY: as above.
    unsafe {
        for region in regions {
            ok((plugin.dereg_mr_sym)(coll, region));
        }
        ok((plugin.destroy_context)(lane));
        ok((plugin.close_coll)(coll));
        ok((plugin.finalize)(instance));
    }
}

fn two_ranks() {
    let context = Driver::get().and_then(|driver| Ok((driver, driver.context()?)));
    let (driver, context) = match context {
        Ok(both) => both,
        Err(fault) => return println!("skipped: {fault}"),
    };
    let mut handles = [[0u8; HANDLE_BYTES]; RANKS];
    let mut own = Vec::new();
    for handle in &mut handles {
        let (mut instance, mut listener) = (null_mut(), null_mut());
        // SAFETY: places for results.
        unsafe {
            ok((plugin.init)(&mut instance, 1, None));
            ok((plugin.listen)(instance, 0, handle.as_mut_ptr().cast(), &mut listener));
        }
        own.push((instance.addr(), listener.addr()));
    }
    let (barrier, handles, context) = (Barrier::new(RANKS), &handles, context.addr());
    scope(|scope| {
        for (rank, (instance, listener)) in own.into_iter().enumerate() {
            let barrier = &barrier;
            scope.spawn(move || {
                // A failure would leave the other rank waiting.
                let run = std::panic::catch_unwind(|| {
                    let own = (instance as Handle, listener as Handle);
                    one_rank(driver, context as Handle, rank, barrier, handles, own);
                });
                if run.is_err() {
                    std::process::abort();
                }
            });
        }
    });
}

#[test]
fn copies_and_signals_are_right() {
    two_ranks();
    // By way of the host.
    // SAFETY: no other thread is left, and this is the only test of the process.
    unsafe { std::env::set_var("TIDE_LOOPBACK_PLUGIN_BOUNCE", "1") };
    two_ranks();
}

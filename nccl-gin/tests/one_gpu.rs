//! The host side against NCCL on one GPU that carries two ranks: registration, addresses, puts, a device communicator for loads and
//! stores, collectives. No network takes part, so GIN is not tested, nor is anything between nodes.
//!
//! ```sh
//! NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 TIDE_NCCL_LIB=… timeout 300 cargo test -p nccl-gin --test one_gpu -- --ignored
//! ```

use nccl_gin::host::{
    Comm, Config, DataType, DeviceComm, DevicePtr, Library, Memory, NcclError, Put, ReduceOp, Requirements, ResultCode,
    SignalWait, Stream, UniqueId, WindowFlags,
};
use std::ffi::{c_int, c_uint, c_void};
use std::time::Duration;

/// What is needed of the driver: contexts and copies.
struct Cuda {
    library: libloading::Library,
}

impl Cuda {
    fn load() -> Self {
        // SAFETY: the driver's initialisers start nothing.
        let library = unsafe { libloading::Library::new("libcuda.so.1") }.expect("a CUDA driver");
        let cuda = Self { library };
        let init = cuda.get::<unsafe extern "C" fn(c_uint) -> c_int>(b"cuInit\0");
        // SAFETY: as CUDA declares it.
        assert_eq!(unsafe { init(0) }, 0, "cuInit");
        cuda
    }

    fn get<T: Copy>(&self, name: &[u8]) -> T {
        // SAFETY: each caller gives the type that CUDA declares.
        *unsafe { self.library.get::<T>(name) }.expect("a function of the driver")
    }

    /// Makes GPU 0 the thread's.
    fn enter(&self) {
        let retain = self.get::<unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int>(b"cuDevicePrimaryCtxRetain\0");
        let set = self.get::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuCtxSetCurrent\0");
        let mut context = std::ptr::null_mut();
        // SAFETY: as CUDA declares it; `context` outlives the call.
        assert_eq!(unsafe { retain(&mut context, 0) }, 0, "cuDevicePrimaryCtxRetain");
        // SAFETY: as CUDA declares it.
        assert_eq!(unsafe { set(context) }, 0, "cuCtxSetCurrent");
    }

    /// A stream of its own for a rank: on one that ranks share, one's wait would hold the other's put up.
    fn stream(&self) -> Stream {
        let create = self.get::<unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int>(b"cuStreamCreate\0");
        let mut stream = std::ptr::null_mut();
        // SAFETY: as CUDA declares it; 1 is CU_STREAM_NON_BLOCKING.
        assert_eq!(unsafe { create(&mut stream, 1) }, 0, "cuStreamCreate");
        Stream(stream)
    }

    /// Until the stream is empty.
    fn settle(&self, stream: Stream) {
        let synchronize = self.get::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuStreamSynchronize\0");
        // SAFETY: as CUDA declares it.
        assert_eq!(unsafe { synchronize(stream.0) }, 0, "cuStreamSynchronize");
    }

    /// A copy to the GPU.
    fn write(&self, at: DevicePtr, values: &[f32]) {
        let copy = self.get::<unsafe extern "C" fn(u64, *const c_void, usize) -> c_int>(b"cuMemcpyHtoD_v2\0");
        // SAFETY: as CUDA declares it; the tests write within what they allocated.
        assert_eq!(unsafe { copy(at.0, values.as_ptr().cast(), size_of_val(values)) }, 0, "cuMemcpyHtoD");
    }

    /// A copy from the GPU.
    fn read(&self, at: DevicePtr, count: usize) -> Vec<f32> {
        let copy = self.get::<unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int>(b"cuMemcpyDtoH_v2\0");
        let mut values = vec![0.0_f32; count];
        // SAFETY: as CUDA declares it; the tests read within what they allocated.
        assert_eq!(unsafe { copy(values.as_mut_ptr().cast(), at.0, size_of_val(&*values)) }, 0, "cuMemcpyDtoH");
        values
    }
}

/// Elements of a message.
const COUNT: usize = 1 << 16;

const BYTES: usize = COUNT * size_of::<f32>();

fn on_two_ranks(config: &Config, run: impl Fn(&Cuda, &Comm) + Sync) {
    for (name, value) in [("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("NCCL_NVLS_ENABLE", "0")] {
        assert_eq!(std::env::var(name).as_deref(), Ok(value), "set {name}={value} before the process starts");
    }
    let library = Library::load().unwrap();
    let cuda = Cuda::load();
    cuda.enter();
    let id = UniqueId::new(&library).unwrap();
    std::thread::scope(|scope| {
        let (library, cuda, run) = (&library, &cuda, &run);
        let rank = |rank| {
            cuda.enter();
            let comm = Comm::init_rank(library, id, 2, rank, config).unwrap();
            run(cuda, &comm);
            comm.finalize().unwrap();
        };
        let threads = [0, 1].map(|r| scope.spawn(move || rank(r)));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

fn everything(cuda: &Cuda, comm: &Comm) {
    let (rank, peer) = (comm.rank(), 1 - comm.rank());
    let properties = comm.properties().unwrap();
    assert_eq!((properties.rank as u32, properties.rank_count, properties.lsa_team_count), (rank, 2, 1));
    assert!(properties.device_api && properties.host_rma, "{properties:?}");

    let stream = cuda.stream();
    // Half of the window is sent, half received.
    let memory = Memory::alloc(comm.library(), 2 * BYTES).unwrap();
    let window = comm.register(&memory, WindowFlags::COLL_SYMMETRIC).unwrap();
    let received = memory.pointer().offset(BYTES as u64);
    let value = |i: u32, of: u32, round: u32| (i % 4096 + 7 * of + 13 * round) as f32;
    let values = |of, round| -> Vec<f32> { (0..COUNT as u32).map(|i| value(i, of, round)).collect() };
    for round in 0..4 {
        cuda.write(memory.pointer(), &values(rank, round));
        let put = Put {
            source: &window,
            source_offset: 0,
            target: &window,
            target_offset: BYTES,
            bytes: BYTES,
            peer,
            signal: 1,
            context: 1,
        };
        let wait = |signal, context| SignalWait { peer, count: 1, signal, context };
        // SAFETY: the stream is of this GPU, and is settled before the windows go.
        unsafe {
            if round % 2 == 0 {
                comm.put_signal(&put, stream).unwrap();
                comm.wait_signal(&[wait(1, 1)], stream).unwrap();
            } else {
                let mut group = comm.group().unwrap();
                group.on(0).put_signal(&put, stream).unwrap();
                group.on(0).wait_signal(&[wait(1, 1)], stream).unwrap();
                group.end().unwrap();
            }
        }
        cuda.settle(stream);
        assert_eq!(cuda.read(received, COUNT), values(peer, round), "round {round}");
        // The peer has read: it may be written to again.
        // SAFETY: as above.
        unsafe {
            comm.signal(peer, 0, 0, stream).unwrap();
            comm.wait_signal(&[wait(0, 0)], stream).unwrap();
        }
        cuda.settle(stream);
    }
    let neighbour = window.lsa_pointer(peer, 0).unwrap();
    assert_eq!(window.peer_pointer(peer, 0).unwrap(), Some(neighbour));
    assert_eq!(cuda.read(neighbour, COUNT), values(peer, 3));
    assert_eq!(window.multicast_pointer(0).unwrap(), None);
    let again = comm.register(&memory, WindowFlags::COLL_SYMMETRIC).unwrap();
    assert_eq!(again.handle(), window.handle());

    let device = DeviceComm::create(comm, &Requirements { lsa_barrier_count: 1, ..Requirements::default() }).unwrap();
    assert_eq!((device.rank() as u32, device.rank_count()), (rank, 2));
    assert_eq!((device.lsa_rank() as u32, device.lsa_size()), (rank, 2));
    println!("rank {rank}: {properties:?}, {} bytes of device communicator", device.byte_count());

    let result = Memory::alloc(comm.library(), 2 * BYTES).unwrap();
    // SAFETY: as above; the ranges are allocated.
    unsafe { comm.all_gather(memory.pointer(), result.pointer(), COUNT, DataType::Float32, stream) }.unwrap();
    cuda.settle(stream);
    assert_eq!(cuda.read(result.pointer(), 2 * COUNT), [values(0, 3), values(1, 3)].concat());
    let (all, own) = (result.pointer(), received);
    // SAFETY: as above.
    unsafe { comm.reduce_scatter(all, own, COUNT, DataType::Float32, ReduceOp::Sum, stream) }.unwrap();
    cuda.settle(stream);
    assert_eq!(cuda.read(own, COUNT), values(rank, 3).iter().map(|v| 2.0 * v).collect::<Vec<_>>());

    let child = comm.split(Some(0), -(rank as i32), &config(false)).unwrap().unwrap();
    assert_eq!((child.rank(), child.rank_count()), (peer, 2));
    drop(child.register(&memory, WindowFlags::COLL_SYMMETRIC).unwrap());
    child.finalize().unwrap();
    assert_eq!(comm.async_error().unwrap(), ResultCode::SUCCESS);
}

fn config(blocking: bool) -> Config {
    let timeout = Duration::from_secs(60);
    Config { blocking, timeout, max_ctas: Some(8), rma_contexts: Some(2), rma_signals: Some(2), ..Config::default() }
}

#[test]
#[ignore = "needs a GPU of compute capability 9.0 or later, and NCCL 2.32.3"]
fn two_ranks_of_one_gpu_do_everything_without_blocking() {
    on_two_ranks(&config(false), everything);
}

#[test]
#[ignore = "needs a GPU of compute capability 9.0 or later, and NCCL 2.32.3"]
fn two_ranks_of_one_gpu_do_everything_with_calls_that_block() {
    on_two_ranks(&config(true), everything);
}

#[test]
#[ignore = "needs a GPU, and NCCL 2.28 or later"]
fn a_rank_that_stays_away_is_a_timeout() {
    let library = Library::load().unwrap();
    let cuda = Cuda::load();
    cuda.enter();
    let config = Config { timeout: Duration::from_secs(5), ..Config::default() };
    let error = Comm::init_rank(&library, UniqueId::new(&library).unwrap(), 2, 0, &config).map(drop).unwrap_err();
    assert!(matches!(error, NcclError::Timeout { .. }), "{error}");
}

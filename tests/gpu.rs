//! What only a GPU can show. Where there is none, every test is skipped, with the reason.
//!
//! `cargo test --test gpu [-- [FILTER] [--list]]`. The last line counts: `N passed, M failed, K skipped`.
//!
//! Tests that leave a kernel parked run in a process of their own, which the harness ends if it does not end itself.

#[cfg(feature = "cuda")]
mod common;

#[cfg(feature = "cuda")]
fn main() -> std::process::ExitCode {
    on_gpu::main()
}

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("skip: built without the feature `cuda`");
    println!("0 passed, 0 failed, 1 skipped");
}

#[cfg(feature = "cuda")]
mod on_gpu {
    use super::common::lanes::{assert_gathers_alike, assert_sums_alike};
    use super::common::*;
    use bytemuck::Zeroable;
    use std::process::{Command, ExitCode, Stdio};
    use std::sync::{Arc, OnceLock};
    use std::time::{Duration, Instant};
    use tide_device::abi::fault::{Operation, WaitKind, WaitTag};
    use tide_device::abi::kernel::Kernel;
    use tide_device::abi::params::{
        CastParams, CastSegment, Deadline, LoopbackHandle, NO_SIGNAL, NetArrival, NetParams, NetRank, NetRound,
    };
    use tide_device::gin::loopback;
    use tide_gpu::gpu::cuda::{CudaGpu, CudaOptions, exit_now};
    use tide_gpu::gpu::sim::{SimGpu, SimOptions};
    use tide_gpu::gpu::{Copy2d, DeviceBuffer, DevicePtr, Fill2d, Gpu, Launch, MemoryWait, Priority, SyncOutcome};
    use tide_gpu::layout::Dtype;
    use tide_gpu::monitor::Monitor;
    use tide_gpu::{GradientDtype, Path, Scale};

    /// A test, the GPUs it needs, and whether it needs a process of its own.
    struct Test {
        name: &'static str,
        gpu_count: u32,
        own_process: bool,
        run: fn(),
    }

    const fn test(name: &'static str, run: fn()) -> Test {
        Test { name, gpu_count: 1, own_process: false, run }
    }

    const fn apart(name: &'static str, run: fn()) -> Test {
        Test { name, gpu_count: 1, own_process: true, run }
    }

    /// Copies that go in one call, among them strided and empty ones, land where each alone would.
    fn batched_copies_land_like_single_ones() {
        let gpu = gpu();
        let source: Vec<u8> = (0..4096_u32).map(|i| (i * 7 + i / 256) as u8).collect();
        let from = DeviceBuffer::from_slice(&gpu, 0, &source).unwrap();
        let to = DeviceBuffer::from_slice(&gpu, 0, &[0_u8; 4096]).unwrap();
        let stream = gpu.create_stream(0, Priority::Normal).unwrap();
        let at = |buffer: &DeviceBuffer, first: u64| DevicePtr(buffer.address().0 + first);
        let mut copies: Vec<Copy2d> =
            (0..40).map(|i| Copy2d::flat(at(&to, 50 * i), at(&from, 50 * i + 3), i)).collect();
        copies.push(Copy2d {
            destination: at(&to, 2048),
            destination_pitch_bytes: 100,
            source: at(&from, 2048),
            source_pitch_bytes: 90,
            width_bytes: 60,
            rows: 9,
        });
        gpu.copy_batch(stream, &copies).unwrap();
        assert_eq!(gpu.synchronize(stream, 1 << 33).unwrap(), SyncOutcome::Complete);
        let mut expected = vec![0; 4096];
        for i in 0..40 {
            expected[50 * i..51 * i].copy_from_slice(&source[50 * i + 3..51 * i + 3]);
        }
        for row in 0..9 {
            expected[2048 + 100 * row..][..60].copy_from_slice(&source[2048 + 90 * row..][..60]);
        }
        assert!(to.to_vec::<u8>().unwrap() == expected);
    }

    /// A launch in clusters runs the same blocks.
    fn a_launch_in_clusters_runs_every_block() {
        let gpu = gpu();
        let values: Vec<f32> = (0..10_000).map(|i| i as f32 * 0.37 - 1000.0).collect();
        let source = DeviceBuffer::from_slice(&gpu, 0, &values).unwrap();
        let segment = CastSegment { source: source.address().0, elems: 10_000, packed_first: 0 };
        let table = DeviceBuffer::from_slice(&gpu, 0, &[segment]).unwrap();
        let stream = gpu.create_stream(0, Priority::High).unwrap();
        for cluster in [1, 2, 4] {
            let out = DeviceBuffer::from_slice(&gpu, 0, &[0_u16; 10_000]).unwrap();
            let params = CastParams { segments: table.address().0, segment_count: 1, out: out.address().0 };
            let params = bytemuck::bytes_of(&params);
            let launch = Launch { kernel: Kernel::Cast, grid: 8, block: 64, cluster, shared_bytes: 0, params };
            // SAFETY: the table and both buffers outlive the launch, which is awaited.
            unsafe { gpu.launch(stream, &launch) }.unwrap();
            assert_eq!(gpu.synchronize(stream, 1 << 33).unwrap(), SyncOutcome::Complete);
            let expected: Vec<u16> = values.iter().map(|v| half::bf16::from_f32(*v).to_bits()).collect();
            assert!(out.to_vec::<u16>().unwrap() == expected, "clusters of {cluster}");
        }
    }

    fn lanes_on_every_gpu_leave_the_simulators_bytes() {
        let gpu: Arc<dyn Gpu> = CudaGpu::new(CudaOptions::default()).unwrap_or_else(|error| panic!("{error}"));
        for device in 0..gpu.device_count() {
            assert_gathers_alike(&gpu, device);
            assert_sums_alike(&gpu, device, GradientDtype::Bf16);
        }
    }

    const TESTS: &[Test] = &[
        test("batched_copies_land_like_single_ones", batched_copies_land_like_single_ones),
        test("a_launch_in_clusters_runs_every_block", a_launch_in_clusters_runs_every_block),
        test("copies_fills_and_words_are_the_simulators", copies_fills_and_words_are_the_simulators),
        test(
            "reads_and_writes_of_the_host_stay_in_the_allocation",
            reads_and_writes_of_the_host_stay_in_the_allocation,
        ),
        test("thousands_of_events_and_waits_leave_nothing_behind", thousands_of_events_and_waits_leave_nothing_behind),
        test("many_streams_do_not_hold_each_other_back", many_streams_do_not_hold_each_other_back),
        test("freed_memory_comes_back", freed_memory_comes_back),
        test("reduce_scatter_of_bf16_is_the_simulators_bit_for_bit", || reduce_scatter_matrix(GradientDtype::Bf16)),
        test("reduce_scatter_of_fp32_is_the_simulators_bit_for_bit", || reduce_scatter_matrix(GradientDtype::F32)),
        test("calls_in_a_row_accumulate_as_in_the_simulator", calls_in_a_row_accumulate_as_in_the_simulator),
        test("a_larger_group_is_the_simulators_bit_for_bit", a_larger_group_is_the_simulators_bit_for_bit),
        test("all_gather_lands_every_byte", all_gather_lands_every_byte),
        test("a_lanes_gather_leaves_the_simulators_bytes", || assert_gathers_alike(&gpu(), 0)),
        test("a_lanes_sum_of_bf16_is_the_simulators_bit_for_bit", || assert_sums_alike(&gpu(), 0, GradientDtype::Bf16)),
        test("a_lanes_sum_of_fp32_is_the_simulators_bit_for_bit", || assert_sums_alike(&gpu(), 0, GradientDtype::F32)),
        test("a_launch_with_a_wrong_parameter_block_is_refused", a_launch_with_a_wrong_parameter_block_is_refused),
        Test {
            name: "several_gpus_give_the_simulators_bits",
            gpu_count: 2,
            own_process: false,
            run: several_gpus_give_the_simulators_bits,
        },
        Test {
            name: "lanes_on_every_gpu_leave_the_simulators_bytes",
            gpu_count: 2,
            own_process: false,
            run: lanes_on_every_gpu_leave_the_simulators_bytes,
        },
        apart("a_peer_that_never_arrives_is_reported", a_peer_that_never_arrives_is_reported),
        apart("a_memory_wait_that_never_holds_is_named", a_memory_wait_that_never_holds_is_named),
        apart("a_host_far_ahead_of_a_stalled_stream_is_refused", a_host_far_ahead_of_a_stalled_stream_is_refused),
    ];

    /// How long a process of a single test may take.
    const CHILD_TIMEOUT: Duration = Duration::from_secs(120);

    /// The argument by which a process is told to run one test itself.
    const IN_THIS_PROCESS: &str = "--in-this-process";

    pub fn main() -> ExitCode {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let in_this_process = arguments.iter().any(|a| a == IN_THIS_PROCESS);
        let filter = arguments.iter().find(|a| !a.starts_with("--")).map_or("", String::as_str);
        let chosen: Vec<&Test> = TESTS.iter().filter(|t| t.name.contains(filter)).collect();
        if arguments.iter().any(|a| a == "--list") {
            chosen.iter().for_each(|t| println!("{}: test", t.name));
            return ExitCode::SUCCESS;
        }
        let found = match CudaGpu::probe() {
            Ok(found) => found,
            Err(absence) => {
                chosen.iter().for_each(|t| println!("skip {}: {absence}", t.name));
                println!("0 passed, 0 failed, {} skipped", chosen.len());
                return ExitCode::SUCCESS;
            }
        };
        if in_this_process {
            let good = chosen.iter().all(|t| std::panic::catch_unwind(t.run).is_ok());
            // A kernel may be parked: exit handlers of the driver may wait for it.
            exit_now(i32::from(!good));
        }
        let (mut passed, mut failed, mut skipped) = (0, 0, 0);
        for test in chosen {
            if found.device_count < test.gpu_count {
                println!("skip {}: needs {} GPUs, found {}", test.name, test.gpu_count, found.device_count);
                skipped += 1;
                continue;
            }
            let started = Instant::now();
            let good = if test.own_process { run_child(test.name) } else { std::panic::catch_unwind(test.run).is_ok() };
            let verdict = if good { "ok  " } else { "FAIL" };
            println!("{verdict} {} ({:.1} s)", test.name, started.elapsed().as_secs_f64());
            *(if good { &mut passed } else { &mut failed }) += 1;
        }
        println!("{passed} passed, {failed} failed, {skipped} skipped");
        if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// Runs one test in a process of its own, and ends it if it does not end.
    fn run_child(name: &str) -> bool {
        let program = std::env::current_exe().expect("a running program has a path");
        let mut child =
            Command::new(program).args([name, IN_THIS_PROCESS]).stdin(Stdio::null()).spawn().expect("starts");
        let started = Instant::now();
        loop {
            match child.try_wait().expect("a child can be waited for") {
                Some(status) => return status.success(),
                None if started.elapsed() > CHILD_TIMEOUT => {
                    println!("{name}: still running after {CHILD_TIMEOUT:?}");
                    let _ = child.kill();
                    let _ = child.wait();
                    return false;
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// The GPU, one for all tests of the process: all ranks on it.
    fn gpu() -> Arc<dyn Gpu> {
        static GPU: OnceLock<Arc<CudaGpu>> = OnceLock::new();
        let one = CudaOptions { devices: Some(vec![0]), ..CudaOptions::default() };
        let gpu = GPU.get_or_init(|| CudaGpu::new(one).unwrap_or_else(|error| panic!("{error}")));
        Arc::clone(gpu) as Arc<dyn Gpu>
    }

    const MATRIX: [(u32, u32); 5] = [(1, 8), (2, 4), (3, 2), (5, 4), (9, 2)];

    /// Runs a case on the GPU and in the simulator, and compares bits.
    fn assert_parity(case: &Case, fill: impl Fn(usize, u32) -> Gradients) {
        assert_parity_on(&gpu(), case, fill);
    }

    fn assert_parity_on(gpu: &Arc<dyn Gpu>, case: &Case, fill: impl Fn(usize, u32) -> Gradients) {
        let what = format!("{}x{} {:?} {:?} {:?}", case.nodes, case.gpus, case.dtype, case.path, case.shapes);
        let expected = bits(&case.run(&fill));
        let on_gpu = Case { gpu: Some(Arc::clone(gpu)), ..case.clone() };
        let got = on_gpu.try_run(&fill).unwrap_or_else(|error| panic!("{what}: {error}"));
        for (rank, (got, expected)) in bits(&got).iter().zip(&expected).enumerate() {
            assert_eq!(got.len(), expected.len(), "{what}: rank {rank}");
            if let Some(i) = (0..got.len()).find(|&i| got[i] != expected[i]) {
                let (g, e) = (f32::from_bits(got[i]), f32::from_bits(expected[i]));
                panic!("{what}: rank {rank} element {i} is {g:?} on the GPU, {e:?} in the simulator");
            }
        }
    }

    fn reduce_scatter_matrix(dtype: GradientDtype) {
        // One element; fewer rows than ranks; rows of odd length; a vector; a tail past every tile.
        let shapes: [&[&[u64]]; 4] =
            [&[&[1]], &[&[6, 4], &[7]], &[&[33, 5], &[3], &[48, 8], &[1, 1]], &[&[257, 13], &[100]]];
        for (nodes, gpus) in MATRIX {
            for path in [Path::Device, Path::Host] {
                for (index, shapes) in shapes.iter().enumerate() {
                    let mut case = Case::new(nodes, gpus, shapes).seed(index as u64);
                    (case.dtype, case.path) = (dtype, path);
                    let shapes = case.shapes.clone();
                    assert_parity(&case, |_, rank| normal(&shapes, index as u64, rank));
                }
            }
        }
    }

    fn calls_in_a_row_accumulate_as_in_the_simulator() {
        for path in [Path::Device, Path::Host] {
            let mut case = Case::new(3, 2, &[&[33, 5], &[7]]);
            (case.path, case.calls, case.previous) = (path, 5, 0.25);
            case.scale = Scale { alpha: 0.375, accumulate: true };
            let shapes = case.shapes.clone();
            assert_parity(&case, |call, rank| normal(&shapes, 100 + call as u64, rank));
            // A parameter that some ranks did not use.
            let unused = |call: usize, rank: u32| {
                let mut gradients = normal(&shapes, 200 + call as u64, rank);
                if rank % 2 == 1 {
                    gradients[0] = None;
                }
                gradients
            };
            assert_parity(&case, unused);
        }
    }

    fn a_larger_group_is_the_simulators_bit_for_bit() {
        for path in [Path::Device, Path::Host] {
            let mut case = Case::new(2, 4, &[&[512, 96], &[96], &[1000, 33], &[5, 1031]]);
            case.path = path;
            case.comm.stripe_bytes = 4096;
            let shapes = case.shapes.clone();
            assert_parity(&case, |_, rank| normal(&shapes, 7, rank));
        }
    }

    /// Local rank `l` on GPU `l mod count`.
    fn several_gpus_give_the_simulators_bits() {
        let gpu: Arc<dyn Gpu> = CudaGpu::new(CudaOptions::default()).unwrap_or_else(|error| panic!("{error}"));
        for (nodes, gpus) in [(1, 8), (2, 4), (3, 2)] {
            for path in [Path::Device, Path::Host] {
                let mut case = Case::new(nodes, gpus, &[&[33, 5], &[48, 8]]);
                case.path = path;
                let shapes = case.shapes.clone();
                assert_parity_on(&gpu, &case, |_, rank| normal(&shapes, 11, rank));
                let mut gather = GatherCase::new(nodes, gpus, case.group());
                (gather.path, gather.calls, gather.gpu) = (path, 2, Some(Arc::clone(&gpu)));
                gather.assert_gathers(|call| gather.random_bytes(call as u64));
            }
        }
    }

    fn all_gather_lands_every_byte() {
        for nodes in [1, 2, 3, 5, 6, 7] {
            for path in [Path::Device, Path::Host] {
                let shapes: Vec<Vec<u64>> = vec![vec![33, 5], vec![7], vec![48, 8], vec![1]];
                let mut case = GatherCase::new(nodes, 2, group(&shapes, Dtype::Bf16));
                (case.path, case.calls, case.gpu) = (path, 3, Some(gpu()));
                case.assert_gathers(|call| case.random_bytes(call as u64));
            }
        }
    }

    /// The same operations on both, of awkward sizes, then the whole memory compared.
    fn copies_fills_and_words_are_the_simulators() {
        const BYTES: u64 = 1 << 16;
        let run = |gpu: &Arc<dyn Gpu>| -> Vec<u8> {
            let pattern: Vec<u8> = (0..BYTES).map(|i| (i * 7 % 251) as u8).collect();
            let source = DeviceBuffer::from_slice(gpu, 0, &pattern).unwrap();
            let target = DeviceBuffer::from_slice(gpu, 0, &vec![0xee_u8; BYTES as usize]).unwrap();
            let at = |buffer: &DeviceBuffer, offset: u64| DevicePtr(buffer.address().0 + offset);
            let stream = gpu.create_stream(0, Priority::Normal).unwrap();
            // (width, rows, destination pitch, source pitch, destination offset, source offset)
            for (width_bytes, rows, dp, sp, d, s) in [
                (0, 5, 8, 8, 0, 0),
                (5, 0, 8, 8, 0, 0),
                (1, 1, 0, 0, 3, 1),
                (6, 100, 14, 6, 16, 2),
                (14, 64, 14, 14, 4096, 6),
                (2048, 3, 2050, 4096, 8192, 5),
                (10, 50, 10, 34, 20_000, 7),
                // Rows that overlap in the source: no pitch of a strided copy.
                (16, 20, 16, 2, 30_000, 0),
            ] {
                let copy = Copy2d {
                    destination: at(&target, d),
                    destination_pitch_bytes: dp,
                    source: at(&source, s),
                    source_pitch_bytes: sp,
                    width_bytes,
                    rows,
                };
                gpu.copy(stream, &copy).unwrap();
            }
            for (width_bytes, rows, pitch_bytes, offset, value) in
                [(0, 3, 8, 0, 1), (7, 1, 7, 40_001, 0), (6, 30, 14, 41_000, 0), (5, 9, 5, 45_000, 0xaa)]
            {
                let fill = Fill2d { destination: at(&target, offset), pitch_bytes, width_bytes, rows, value };
                gpu.fill(stream, &fill).unwrap();
            }
            gpu.write_value(stream, at(&target, 50_000), 0x0123_4567_89ab_cdef).unwrap();
            // Reached modulo 2^64: a wait for a value that the word has passed, and one across the wrap.
            for (offset, word, value) in [(50_008, 5, 3), (50_016, 0, u64::MAX)] {
                gpu.write_value(stream, at(&target, offset), word).unwrap();
                let tag = WaitTag::zeroed();
                let wait = MemoryWait { address: at(&target, offset), value, timeout_ns: 1_000_000_000, tag };
                gpu.wait_value(stream, &wait).unwrap();
            }
            assert_eq!(gpu.synchronize(stream, 10_000_000_000).unwrap(), SyncOutcome::Complete);
            gpu.destroy_stream(stream);
            target.to_vec().unwrap()
        };
        let sim: Arc<dyn Gpu> = SimGpu::new(SimOptions::default());
        let (expected, got) = (run(&sim), run(&gpu()));
        if let Some(i) = (0..got.len()).find(|&i| got[i] != expected[i]) {
            panic!("byte {i} is {:#x} on the GPU, {:#x} in the simulator", got[i], expected[i]);
        }
    }

    fn reads_and_writes_of_the_host_stay_in_the_allocation() {
        let gpu = gpu();
        // More than one piece of the pinned memory that transfers go through.
        let bytes: Vec<u8> = (0..(9_u64 << 20) + 13).map(|i| (i % 253) as u8).collect();
        let buffer = DeviceBuffer::from_slice(&gpu, 0, &bytes).unwrap();
        assert!(buffer.to_vec::<u8>().unwrap() == bytes);
        let near_end = DevicePtr(buffer.address().0 + bytes.len() as u64 - 4);
        assert!(gpu.upload(near_end, &[0; 5]).is_err() && gpu.download(near_end, &mut [0; 5]).is_err());
        let mapped = gpu.allocate_mapped(100).unwrap();
        let mut seen = [1; 100];
        gpu.read_mapped(mapped, &mut seen).unwrap();
        assert_eq!(seen, [0; 100]);
        gpu.upload(DevicePtr(mapped.0 + 3), b"hello").unwrap();
        gpu.read_mapped(DevicePtr(mapped.0 + 1), &mut seen[..9]).unwrap();
        assert_eq!(&seen[..9], b"\0\0hello\0\0");
        assert!(gpu.read_mapped(buffer.address(), &mut seen).is_err());
        gpu.free(mapped).unwrap();
        assert!(gpu.free(mapped).is_err());
    }

    fn thousands_of_events_and_waits_leave_nothing_behind() {
        let gpu = gpu();
        let word = DeviceBuffer::from_slice(&gpu, 0, &[0_u64]).unwrap();
        let streams: Vec<_> = (0..2).map(|_| gpu.create_stream(0, Priority::Normal).unwrap()).collect();
        let mut first = None;
        for value in 1..=5000 {
            gpu.write_value(streams[0], word.address(), value).unwrap();
            let tag = WaitTag::zeroed();
            let wait = MemoryWait { address: word.address(), value, timeout_ns: 1_000_000_000, tag };
            gpu.wait_value(streams[1], &wait).unwrap();
            let event = gpu.record(streams[0]).unwrap();
            gpu.wait_event(streams[1], event).unwrap();
            first.get_or_insert(event);
        }
        for stream in streams {
            assert_eq!(gpu.synchronize(stream, 10_000_000_000).unwrap(), SyncOutcome::Complete);
            gpu.destroy_stream(stream);
        }
        assert_eq!(word.to_vec::<u64>().unwrap(), [5000]);
        // Long recycled, and still complete.
        assert!(gpu.is_complete(first.unwrap()).unwrap());
    }

    /// More streams than operations in flight, each with a few that nobody has marked: what is over must not count.
    fn many_streams_do_not_hold_each_other_back() {
        let gpu = gpu();
        let count = CudaOptions::default().in_flight_max / 4;
        let words = DeviceBuffer::from_slice(&gpu, 0, &vec![0_u64; count as usize]).unwrap();
        let streams: Vec<_> = (0..count).map(|_| gpu.create_stream(0, Priority::Normal).unwrap()).collect();
        for value in 1..=12 {
            for (stream, index) in streams.iter().zip(0..) {
                gpu.write_value(*stream, DevicePtr(words.address().0 + 8 * index), value).unwrap();
            }
        }
        for stream in streams {
            assert_eq!(gpu.synchronize(stream, 10_000_000_000).unwrap(), SyncOutcome::Complete);
            gpu.destroy_stream(stream);
        }
        assert_eq!(words.to_vec::<u64>().unwrap(), vec![12; count as usize]);
    }

    fn freed_memory_comes_back() {
        let gpu = gpu();
        let (before, _) = gpu.usage_bytes(0);
        for _ in 0..50 {
            let buffer = DeviceBuffer::new(&gpu, 0, 4 << 30).unwrap();
            assert!(buffer.address().0.is_multiple_of(256));
            assert_eq!(gpu.usage_bytes(0).0, before + (4 << 30));
        }
        assert_eq!(gpu.usage_bytes(0).0, before);
        assert!(DeviceBuffer::new(&gpu, 0, 1 << 50).is_err_and(|e| e.to_string().contains("OUT_OF_MEMORY")));
    }

    fn a_launch_with_a_wrong_parameter_block_is_refused() {
        let gpu = gpu();
        let stream = gpu.create_stream(0, Priority::Normal).unwrap();
        let launch = Launch { kernel: Kernel::Cast, grid: 1, block: 32, cluster: 1, shared_bytes: 0, params: &[0; 8] };
        // SAFETY: refused before anything is launched.
        let error = unsafe { gpu.launch(stream, &launch) }.unwrap_err().to_string();
        assert!(error.contains("tide_cast"), "{error}");
        let block = [0; size_of::<NetParams>()];
        let launch = Launch {
            kernel: Kernel::NetLoopback,
            grid: 1 << 20,
            block: 32,
            cluster: 1,
            shared_bytes: 1024,
            params: &block,
        };
        // SAFETY: as above.
        let error = unsafe { gpu.launch(stream, &launch) }.unwrap_err().to_string();
        assert!(error.contains("blocks"), "{error}");
        gpu.destroy_stream(stream);
    }

    const TIMEOUT: Duration = Duration::from_secs(2);

    /// Launches a network kernel whose one arrival never comes.
    fn a_peer_that_never_arrives_is_reported() {
        let gpu = gpu();
        let monitor = Monitor::new(Arc::clone(&gpu), 1).unwrap();
        let new = |words: &[u64]| DeviceBuffer::from_slice(&gpu, 0, words).unwrap();
        // An arena of nothing but signals: all zero.
        let (claim, arena) = (new(&[0]), new(&[0; 32]));
        let arenas = new(&[arena.address().0, arena.address().0]);
        let bounce_bytes = gpu.properties(0).shape.bounce_bytes;
        let handle = LoopbackHandle {
            arenas: arenas.address().0,
            signals_offset: 0,
            context_count: 1,
            bounce_bytes,
            own_node: 0,
            reserved: 0,
        };
        let handle = DeviceBuffer::from_slice(&gpu, 0, &[handle]).unwrap();
        let round = NetRound { put_first: 0, put_count: 0, arrival_first: 0, arrival_count: 1, wave: 4, round: 2 };
        let round = DeviceBuffer::from_slice(&gpu, 0, &[round]).unwrap();
        let arrival = NetArrival {
            peer: 1,
            signal: 3,
            contexts: 1,
            lead_signal: NO_SIGNAL,
            lead_contexts: 0,
            pace_peer: 0,
            pace_signal: NO_SIGNAL,
            reserved: 0,
        };
        let arrival = DeviceBuffer::from_slice(&gpu, 0, &[arrival]).unwrap();
        let rank = NetRank {
            gin: handle.address().0,
            deadline: Deadline {
                timeout_ns: TIMEOUT.as_nanos() as u64,
                fault: monitor.record_address(0).0,
                claim: claim.address().0,
            },
            rounds: round.address().0,
            puts: 0,
            arrivals: arrival.address().0,
            progress: 0,
            rank: 0,
            local_rank_count: 1,
            operation: Operation::ReduceScatter as u32,
            reserved: 0,
        };
        let rank = DeviceBuffer::from_slice(&gpu, 0, &[rank]).unwrap();
        let params = NetParams {
            ranks: rank.address().0,
            epoch: 6,
            sequence: 7,
            source_shift: 0,
            block_first: 0,
            block_count: 1,
            block_bytes: 0,
            progress_first: 0,
            round_first: 0,
            round_count: 1,
            stripe_bytes: 256,
        };
        let stream = gpu.create_stream(0, Priority::High).unwrap();
        let launch = Launch {
            kernel: Kernel::NetLoopback,
            grid: 1,
            block: 32,
            cluster: 1,
            shared_bytes: loopback::shared_bytes(bounce_bytes),
            params: bytemuck::bytes_of(&params),
        };
        let started = Instant::now();
        // SAFETY: the tables are as the kernel's module states, and live until the process ends.
        unsafe { gpu.launch(stream, &launch) }.unwrap();
        // What follows a parked kernel in its stream never runs.
        let after = new(&[1]);
        gpu.write_value(stream, after.address(), 2).unwrap();
        let outcome = gpu.synchronize(stream, TIMEOUT.as_nanos() as u64).unwrap();
        let waited = started.elapsed();
        assert_eq!(outcome, SyncOutcome::Stalled { faults: Vec::new() });
        assert!(waited >= TIMEOUT && waited < 2 * TIMEOUT, "stalled after {waited:?}");
        let faults = monitor.faults().unwrap();
        assert_eq!(faults.len(), 1);
        let fault = &faults[0];
        println!("{fault}");
        assert_eq!((fault.kind, fault.operation), (Some(WaitKind::Arrival), Operation::ReduceScatter));
        assert_eq!((fault.rank, fault.peer, fault.wave, fault.round, fault.epoch), (0, 1, 4, 2, 6));
        assert_eq!((fault.expected, fault.seen), (7, Some(0)));
        assert!(fault.waited_ns >= TIMEOUT.as_nanos() as u64, "{fault}");
        // The process is alive, and so are its other streams, reads and writes.
        assert_eq!(after.to_vec::<u64>().unwrap(), [1]);
        let other = gpu.create_stream(0, Priority::Normal).unwrap();
        let (from, to) = (new(&[5; 100]), new(&[0; 100]));
        gpu.copy(other, &Copy2d::flat(to.address(), from.address(), 800)).unwrap();
        assert_eq!(gpu.synchronize(other, TIMEOUT.as_nanos() as u64).unwrap(), SyncOutcome::Complete);
        assert_eq!(to.to_vec::<u64>().unwrap(), [5; 100]);
        // Buffers are given up at the end of this function: that must not wait for the parked kernel either.
    }

    fn a_memory_wait_that_never_holds_is_named() {
        let gpu = gpu();
        let words = DeviceBuffer::from_slice(&gpu, 0, &[9_u64, 0]).unwrap();
        let (held, missing) = (words.address(), DevicePtr(words.address().0 + 8));
        let [stream, other] = [Priority::Normal, Priority::High].map(|p| gpu.create_stream(0, p).unwrap());
        let tag = |peer: u32| WaitTag {
            kind: WaitKind::StagingFull as u32,
            operation: Operation::ReduceScatter as u32,
            rank: 2,
            peer,
            wave: 1,
            round: 0,
            epoch: 3,
        };
        let timeout_ns = TIMEOUT.as_nanos() as u64;
        let wait = |address, value, peer| MemoryWait { address, value, timeout_ns, tag: tag(peer) };
        gpu.wait_value(stream, &wait(held, 9, 1)).unwrap();
        gpu.wait_value(stream, &wait(missing, 4, 5)).unwrap();
        let event = gpu.record(stream).unwrap();
        gpu.wait_event(other, event).unwrap();
        // Hangs on the first, and is not the culprit.
        gpu.wait_value(other, &wait(missing, 8, 6)).unwrap();
        let started = Instant::now();
        let outcome = gpu.synchronize(other, timeout_ns).unwrap();
        assert!(started.elapsed() < 2 * TIMEOUT);
        let SyncOutcome::Stalled { faults } = outcome else { panic!("{outcome:?}") };
        // The first wait of each stream that does not hold; the culprit, which was enqueued first, comes first.
        let [(waiting, fault), (behind, _)] = &faults[..] else { panic!("{faults:?}") };
        assert_eq!((*waiting, *behind), (stream, other));
        println!("{fault}");
        assert_eq!((fault.kind, fault.peer, fault.expected, fault.seen), (Some(WaitKind::StagingFull), 5, 4, Some(0)));
        assert!(!gpu.is_complete(event).unwrap());
        // The host can still raise the word, and everything goes on.
        gpu.upload(missing, &8_u64.to_ne_bytes()).unwrap();
        for stream in [stream, other] {
            assert_eq!(gpu.synchronize(stream, timeout_ns).unwrap(), SyncOutcome::Complete);
        }
        assert!(gpu.is_complete(event).unwrap());
    }

    fn a_host_far_ahead_of_a_stalled_stream_is_refused() {
        let enqueue_timeout = Duration::from_secs(1);
        let options = CudaOptions { devices: Some(vec![0]), enqueue_timeout, ..CudaOptions::default() };
        let most = options.in_flight_max;
        let gpu: Arc<dyn Gpu> = CudaGpu::new(options).unwrap_or_else(|error| panic!("{error}"));
        let words = DeviceBuffer::from_slice(&gpu, 0, &[0_u64, 0]).unwrap();
        let other = DevicePtr(words.address().0 + 8);
        let stream = gpu.create_stream(0, Priority::Normal).unwrap();
        let tag = WaitTag::zeroed();
        let wait = MemoryWait { address: words.address(), value: 1, timeout_ns: 1_000_000_000, tag };
        gpu.wait_value(stream, &wait).unwrap();
        let started = Instant::now();
        let taken = (1..=2 * most).take_while(|value| gpu.write_value(stream, other, *value).is_ok()).count() as u64;
        assert!(taken < most && taken > most / 2, "{taken} operations were taken");
        assert!(started.elapsed() >= enqueue_timeout && started.elapsed() < 10 * enqueue_timeout);
        gpu.upload(words.address(), &1_u64.to_ne_bytes()).unwrap();
        assert_eq!(gpu.synchronize(stream, 2_000_000_000).unwrap(), SyncOutcome::Complete);
        assert_eq!(words.to_vec::<u64>().unwrap(), [1, taken]);
    }
}

//! What is broken on purpose is found: a hang becomes an error that names who waited for whom, never a wrong sum.

mod common;

use common::{Case, bits, int_fill};
use std::time::Duration;
use tide_gpu::{CommunicatorOptions, Path, TideError};

fn case(m: u32, l: u32, path: Path) -> Case {
    let comm = CommunicatorOptions { timeout: Duration::from_millis(50), stripe_bytes: 256, ..Default::default() };
    Case { path, comm, ..Case::new(m, l, &[&[6, 4], &[7]]) }
}

/// Every signal of a call, lost in turn: either somebody waits for it, and says so within the deadline, or it was not waited
/// for in this call, and the sums are right. Nothing hangs, and no sum is wrong.
#[test]
fn a_lost_signal_is_reported_or_harmless() {
    let (mut reported, mut harmless) = (0, 0);
    for (m, l) in [(2, 2), (3, 2), (1, 4), (5, 2)] {
        for path in [Path::Device, Path::Host] {
            let good = case(m, l, path);
            let expected = bits(&good.run(|_, r| int_fill(&good.shapes, r)));
            for lost in 0.. {
                let mut broken = good.clone().seed(lost);
                broken.sim.machine.lose_signal = Some(lost);
                match broken.try_run(|_, r| int_fill(&good.shapes, r)) {
                    Ok(outs) => {
                        assert!(bits(&outs) == expected, "{m}x{l} {path:?}: losing signal {lost} gave a wrong sum");
                        harmless += 1;
                    }
                    Err(TideError::FailStop(fault)) => {
                        assert!(fault.kind.is_some() && fault.rank < m * l && fault.peer < m * l, "{fault}");
                        let waited = Duration::from_nanos(fault.waited_ns);
                        assert!((Duration::from_millis(50)..Duration::from_millis(100)).contains(&waited), "{fault}");
                        reported += 1;
                    }
                    Err(other) => panic!("{m}x{l} {path:?} signal {lost}: {other}"),
                }
                if lost > 400 {
                    break;
                }
            }
        }
    }
    assert!(reported > 100 && harmless > 100, "{reported} reported, {harmless} harmless");
}

#[test]
fn a_fault_names_rank_peer_wave_and_round_and_poisons_the_communicator() {
    use std::sync::Arc;
    use tide_gpu::gpu::DeviceBuffer;
    use tide_gpu::{GradientDtype, RankGradients, ReduceScatter, Scale};
    let found = (0..400).find_map(|lost| {
        let mut broken = case(3, 1, Path::Device).seed(lost);
        broken.sim.machine.lose_signal = Some(lost);
        let comm = broken.communicator();
        let gpu = Arc::clone(comm.gpu());
        let mut rs = ReduceScatter::new(&comm, &broken.group(), GradientDtype::F32, &broken.options).ok()?;
        let gradient = DeviceBuffer::from_slice(&gpu, 0, &[1_f32; 24]).unwrap();
        let out = DeviceBuffer::new(&gpu, 0, rs.output_bytes()).unwrap();
        let gradients = vec![Some(gradient.slice()), Some(gradient.slice())];
        let ranks = vec![RankGradients { gradients, out: out.slice(), ready: None }; 3];
        rs.enqueue(&ranks, Scale::default()).unwrap();
        let Err(TideError::FailStop(fault)) = comm.synchronize() else { return None };
        let again = rs.enqueue(&ranks, Scale::default()).unwrap_err();
        assert!(matches!(&again, TideError::Poisoned { first } if *first == fault.to_string()), "{again}");
        assert!(matches!(comm.synchronize(), Err(TideError::Poisoned { .. })));
        (fault.kind == Some(tide_device::abi::fault::WaitKind::Arrival)).then_some(fault)
    });
    let fault = found.expect("some lost signal is a put's");
    assert_ne!(fault.rank, fault.peer);
    let text = fault.to_string();
    let parts = ["TIDE rank ", "rs seq=0 waited 0.05", "for rank ", "phase=arrival", "wave=", "round=", "counter 0/1"];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
}

/// A deadline is time of the global timer: it trips at its time, however few steps the machine takes.
#[test]
fn t29_a_deadline_trips_at_its_time() {
    for timeout in [Duration::from_micros(200), Duration::from_secs(1), Duration::from_secs(3600)] {
        let found = (0..300).find_map(|lost| {
            let mut broken = case(2, 1, Path::Device).seed(lost);
            broken.comm.timeout = timeout;
            broken.sim.machine.lose_signal = Some(lost);
            match broken.try_run(|_, r| int_fill(&broken.shapes, r)) {
                Err(TideError::FailStop(fault)) => Some(fault),
                _ => None,
            }
        });
        let waited = Duration::from_nanos(found.expect("a lost signal is reported").waited_ns);
        assert!(waited >= timeout && waited < timeout + timeout / 10 + Duration::from_micros(50), "{waited:?}");
    }
}

/// A communicator without a deadline: a lost signal is a stall that nothing times, and no panic at the end of time.
#[test]
fn without_a_deadline_a_lost_signal_is_still_an_error() {
    for path in [Path::Device, Path::Host] {
        let stopped = (0..300).find_map(|lost| {
            let mut broken = case(2, 1, path).seed(lost);
            broken.comm.timeout = Duration::MAX;
            broken.sim.machine.lose_signal = Some(lost);
            broken.try_run(|_, r| int_fill(&broken.shapes, r)).err()
        });
        match stopped.expect("some lost signal stops the call") {
            TideError::HeldUp { .. } => assert_eq!(path, Path::Device, "a stream's wait is known without a deadline"),
            TideError::FailStop(fault) => assert!(fault.kind.is_some() && fault.rank < 2, "{fault}"),
            other => panic!("{path:?}: {other}"),
        }
    }
}

//! A communicator: the ranks that a process drives, where they run, and whether they still can.

use crate::error::{Result, TideError};
use crate::gpu::{Event, Gpu, Priority, Stream, SyncOutcome};
use crate::layout::Group;
use crate::monitor::{Monitor, root_cause};
use crate::net::Path;
use crate::plan::{LocalRank, Rank, Topology};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tide_device::abi::params::Deadline;

use crate::gpu::DeviceBuffer;

/// How a communicator works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommunicatorOptions {
    /// Who drives the network rounds.
    pub path: Path,
    /// Longest wait of a kernel or a stream before the call fails.
    pub timeout: Duration,
    /// Network contexts: a transfer is striped over them on the device path.
    pub context_count: u32,
    /// Bytes of a stripe, a multiple of 16.
    pub stripe_bytes: u64,
    /// The device of local rank 0; the other local ranks run on those that follow, around. So the lanes of a process, which
    /// have one local rank each, are spread over its GPUs.
    pub first_device: u32,
}

impl Default for CommunicatorOptions {
    fn default() -> Self {
        Self {
            path: Path::default(),
            timeout: Duration::from_secs(10),
            context_count: 4,
            stripe_bytes: 1 << 20,
            first_device: 0,
        }
    }
}

impl CommunicatorOptions {
    /// The device of a local rank, of `device_count`.
    fn device_of(&self, LocalRank(local): LocalRank, device_count: u32) -> u32 {
        (self.first_device + local) % device_count
    }
}

struct Shared {
    gpu: Arc<dyn Gpu>,
    topology: Topology,
    options: CommunicatorOptions,
    monitor: Monitor,
    /// One 4-byte claim word per rank, in 8-byte steps.
    claims: Vec<DeviceBuffer>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    streams: Vec<Stream>,
    poisoned: Option<String>,
}

/// The ranks that a process drives. Clones share it.
#[derive(Clone)]
pub struct Communicator {
    shared: Arc<Shared>,
}

impl Communicator {
    /// A communicator of all ranks of `topology`, on the GPUs of this process: local rank `l` runs on device
    /// `(first device + l) mod device count`.
    ///
    /// # Errors
    /// [`TideError::Usage`] for options out of range; what the driver refuses.
    pub fn new(gpu: Arc<dyn Gpu>, topology: Topology, options: CommunicatorOptions) -> Result<Self> {
        if options.context_count == 0 || options.stripe_bytes == 0 || !options.stripe_bytes.is_multiple_of(16) {
            return Err(TideError::usage(format!(
                "{} contexts with stripes of {} bytes: at least one context, and a positive multiple of 16 bytes",
                options.context_count, options.stripe_bytes
            )));
        }
        let device_count = gpu.device_count();
        if options.first_device >= device_count {
            return Err(TideError::usage(format!(
                "local rank 0 on device {}: there are {device_count}, counted from 0",
                options.first_device
            )));
        }
        let monitor = Monitor::new(Arc::clone(&gpu), topology.rank_count())?;
        let claims = topology
            .ranks()
            .map(|r| DeviceBuffer::from_slice(&gpu, options.device_of(topology.local_of(r), device_count), &[0_u64]))
            .collect::<Result<_>>()?;
        let state = Mutex::default();
        Ok(Self { shared: Arc::new(Shared { gpu, topology, options, monitor, claims, state }) })
    }

    /// The GPUs.
    pub fn gpu(&self) -> &Arc<dyn Gpu> {
        &self.shared.gpu
    }

    /// The ranks.
    pub fn topology(&self) -> Topology {
        self.shared.topology
    }

    /// The options.
    pub fn options(&self) -> &CommunicatorOptions {
        &self.shared.options
    }

    /// The device that a rank runs on.
    pub fn device_of(&self, rank: Rank) -> u32 {
        self.options().device_of(self.topology().local_of(rank), self.gpu().device_count())
    }

    /// The devices that ranks run on, ascending.
    pub(super) fn devices(&self) -> impl Iterator<Item = u32> + use<> {
        let taken: BTreeSet<u32> = self.topology().ranks().map(|rank| self.device_of(rank)).collect();
        taken.into_iter()
    }

    /// Waits until all that was enqueued has taken effect.
    ///
    /// # Errors
    /// [`TideError::FailStop`] if a wait ran out of time: the communicator is poisoned then, and what the call was to write
    /// is not to be used. [`TideError::Poisoned`] if it was before.
    pub fn synchronize(&self) -> Result<()> {
        self.check()?;
        let streams = self.lock().streams.clone();
        for stream in streams {
            let outcome = self.shared.gpu.synchronize(stream, self.timeout_ns());
            match outcome.map_err(|error| self.poison(error))? {
                SyncOutcome::Complete => {}
                SyncOutcome::Stalled { mut faults } => {
                    faults.extend(self.shared.monitor.faults()?);
                    let error = match root_cause(&faults) {
                        Some(fault) => TideError::FailStop(Box::new(fault.clone())),
                        None => TideError::Driver {
                            call: "synchronize".into(),
                            detail: "the device has stalled, and no wait says why".into(),
                        },
                    };
                    return Err(self.poison(error));
                }
            }
        }
        Ok(())
    }

    /// Refuses a communicator that has failed.
    ///
    /// # Errors
    /// [`TideError::Poisoned`].
    pub fn check(&self) -> Result<()> {
        match &self.lock().poisoned {
            Some(first) => Err(TideError::Poisoned { first: first.clone() }),
            None => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poison(&self, error: TideError) -> TideError {
        self.lock().poisoned.get_or_insert_with(|| error.to_string());
        error
    }

    /// Compares what ranks pass to a collective before any memory is allocated for it.
    ///
    /// # Errors
    /// [`TideError::Disagreement`] that names the ranks whose group differs from rank 0's.
    pub fn agree(&self, groups: &[Group]) -> Result<()> {
        super::check_rank_count(groups.len(), self.topology().rank_count())?;
        let first = groups[0].signature();
        let differing: Vec<String> =
            (0..groups.len()).filter(|&r| groups[r].signature() != first).map(|r| r.to_string()).collect();
        if differing.is_empty() {
            return Ok(());
        }
        Err(TideError::Disagreement {
            what: "the parameters of the group (names, shapes, types or their order)".into(),
            ranks: format!("rank 0 against rank {}", differing.join(", ")),
        })
    }

    pub(super) fn timeout_ns(&self) -> u64 {
        u64::try_from(self.shared.options.timeout.as_nanos()).unwrap_or(u64::MAX)
    }

    pub(super) fn deadline(&self, rank: Rank) -> Deadline {
        Deadline {
            timeout_ns: self.timeout_ns(),
            fault: self.shared.monitor.record_address(rank.0).0,
            claim: self.shared.claims[rank.0 as usize].address().0,
        }
    }

    pub(super) fn create_stream(&self, rank: Rank, priority: Priority) -> Result<Stream> {
        self.create_device_stream(self.device_of(rank), priority)
    }

    pub(super) fn create_device_stream(&self, device: u32, priority: Priority) -> Result<Stream> {
        let stream = self.shared.gpu.create_stream(device, priority)?;
        self.lock().streams.push(stream);
        Ok(stream)
    }

    pub(super) fn destroy_streams(&self, streams: impl IntoIterator<Item = Stream>) {
        for stream in streams {
            self.lock().streams.retain(|s| *s != stream);
            self.shared.gpu.destroy_stream(stream);
        }
    }

    /// Makes each of `to` wait for all enqueued in `from` so far.
    pub(super) fn join(&self, from: Stream, to: impl IntoIterator<Item = Stream>) -> Result<Event> {
        let event = self.shared.gpu.record(from)?;
        for stream in to {
            self.shared.gpu.wait_event(stream, event)?;
        }
        Ok(event)
    }
}

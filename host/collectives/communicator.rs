//! A communicator: the ranks that a process drives, where they run, and whether they still can.

use crate::arena::{Arena, ArenaLayout};
use crate::error::{Result, TideError};
use crate::gpu::{DeviceBuffer, Event, Gpu, Priority, Stream, SyncOutcome};
use crate::launch::{Facts, agree};
use crate::layout::Group;
use crate::monitor::{Fault, Monitor, root_cause};
use crate::net::loopback::LoopbackFabric;
use crate::net::{Fabric, Net, NetOptions, Path};
use crate::plan::{Rank, RankRange, Topology};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tide_device::abi::params::Deadline;
use tide_device::kernels::net::active_contexts;

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
    /// With [`Communicator::new`], the device of local rank 0; the other local ranks run on those that follow, around. So the lanes of a process, which
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

struct Shared {
    fabric: Arc<dyn Fabric>,
    options: CommunicatorOptions,
    monitor: Monitor,
    /// Per driven rank: its claim word.
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
        let fabric = LoopbackFabric::new(gpu, topology, options.first_device)?;
        Self::over(Arc::new(fabric), options)
    }

    /// A communicator of the ranks that a fabric connects. This process drives some of them, and all processes make the
    /// same calls in the same order.
    ///
    /// # Errors
    /// [`TideError::Usage`] for options out of range; [`TideError::Disagreement`] if they differ between processes; what
    /// the driver refuses.
    pub fn over(fabric: Arc<dyn Fabric>, options: CommunicatorOptions) -> Result<Self> {
        if options.context_count == 0 || options.stripe_bytes == 0 || !options.stripe_bytes.is_multiple_of(16) {
            return Err(TideError::usage(format!(
                "{} contexts with stripes of {} bytes: at least one context, and a positive multiple of 16 bytes",
                options.context_count, options.stripe_bytes
            )));
        }
        agree_over(&*fabric, "communicator", &Facts::new().with("communicator options", format_args!("{options:?}")))?;
        let gpu = fabric.gpu();
        let monitor = Monitor::new(Arc::clone(gpu), fabric.driven().count())?;
        let claim = |rank| DeviceBuffer::from_slice(gpu, fabric.device_of(rank), &[0_u64]);
        let claims = fabric.driven().iter().map(claim).collect::<Result<_>>()?;
        let state = Mutex::default();
        Ok(Self { shared: Arc::new(Shared { fabric, options, monitor, claims, state }) })
    }

    /// The GPUs.
    pub fn gpu(&self) -> &Arc<dyn Gpu> {
        self.shared.fabric.gpu()
    }

    /// What connects the ranks: `loopback` in one process, `nccl` on a cluster.
    pub fn network(&self) -> &'static str {
        self.shared.fabric.name()
    }

    /// All ranks.
    pub fn topology(&self) -> Topology {
        self.shared.fabric.topology()
    }

    /// The ranks that this process drives: a call names these, in order.
    pub fn driven(&self) -> RankRange {
        self.shared.fabric.driven()
    }

    /// The options.
    pub fn options(&self) -> &CommunicatorOptions {
        &self.shared.options
    }

    /// The device that a driven rank runs on.
    pub fn device_of(&self, rank: Rank) -> u32 {
        self.shared.fabric.device_of(rank)
    }

    /// The devices that driven ranks run on, ascending.
    pub(super) fn devices(&self) -> impl Iterator<Item = u32> + use<> {
        let taken: BTreeSet<u32> = self.driven().iter().map(|rank| self.device_of(rank)).collect();
        taken.into_iter()
    }

    /// Waits until all that was enqueued has taken effect.
    ///
    /// # Errors
    /// [`TideError::FailStop`] if a wait of the communicator ran out of time, [`TideError::HeldUp`] if others' work keeps one
    /// of its streams from going on: the communicator is poisoned then, and what the call was to write is not to be used.
    /// [`TideError::Poisoned`] if it was before.
    pub fn synchronize(&self) -> Result<()> {
        self.check()?;
        let streams = self.lock().streams.clone();
        for stream in streams {
            let outcome = self.gpu().synchronize(stream, self.timeout_ns());
            match outcome.map_err(|error| self.poison(error))? {
                SyncOutcome::Complete => {}
                SyncOutcome::Stalled { faults } => {
                    let error = self.why_stalled(faults).unwrap_or_else(|error| error);
                    return Err(self.poison(error));
                }
            }
        }
        Ok(())
    }

    /// What keeps a stream of the communicator from going on. The GPUs serve others as well, whose waits and records are not
    /// its own: they cannot be its root cause, and their sentences would name ranks that it does not have.
    fn why_stalled(&self, faults: Vec<(Stream, Fault)>) -> Result<TideError> {
        let streams = self.lock().streams.clone();
        let (own, others): (Vec<_>, Vec<_>) = faults.into_iter().partition(|(stream, _)| streams.contains(stream));
        let mut own: Vec<Fault> = own.into_iter().map(|(_, fault)| fault).collect();
        own.extend(self.shared.monitor.faults()?);
        if let Some(fault) = root_cause(&own) {
            return Ok(TideError::FailStop(Box::new(fault.clone())));
        }
        let by = match others.iter().map(|(_, fault)| fault).max_by_key(|fault| fault.waited_ns) {
            Some(wait) => format!(
                "work outside it: another stream has waited {:.3} s for a word that stands at {}/{}",
                wait.waited_ns as f64 * 1e-9,
                wait.seen.map_or_else(|| "?".into(), |seen| seen.to_string()),
                wait.expected
            ),
            None => "work outside it, or by a kernel that neither ends nor fails: no wait has run out".into(),
        };
        Ok(TideError::HeldUp { by })
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
        let is_first = {
            let mut state = self.lock();
            let is_first = state.poisoned.is_none();
            state.poisoned.get_or_insert_with(|| error.to_string());
            is_first
        };
        if is_first {
            self.shared.fabric.abort();
        }
        error
    }

    /// Compares what ranks pass to a collective before any memory is allocated for it.
    ///
    /// # Errors
    /// [`TideError::Disagreement`] that names the ranks whose group differs from rank 0's.
    pub fn agree(&self, groups: &[Group]) -> Result<()> {
        super::check_rank_count(groups.len(), self.driven())?;
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

    /// Gives every process what each of them brings, in the order of their ranks.
    ///
    /// # Errors
    /// As [`Exchange::all_gather`](crate::launch::Exchange::all_gather).
    pub fn all_gather_bytes(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let exchange = self.shared.fabric.exchange();
        exchange.lock().unwrap_or_else(PoisonError::into_inner).all_gather(label, bytes)
    }

    /// Contexts that carry a transfer of `bytes`, and signal it.
    pub(super) fn contexts_of(&self, bytes: u64) -> u32 {
        active_contexts(bytes, self.options().stripe_bytes, self.options().context_count)
    }

    pub(super) fn timeout_ns(&self) -> u64 {
        u64::try_from(self.shared.options.timeout.as_nanos()).unwrap_or(u64::MAX)
    }

    pub(super) fn deadline(&self, rank: Rank) -> Deadline {
        Deadline {
            timeout_ns: self.timeout_ns(),
            fault: self.shared.monitor.record_address(self.index(rank) as u32).0,
            claim: self.shared.claims[self.index(rank)].address().0,
        }
    }

    /// A driven rank's place among them.
    pub(super) fn index(&self, rank: Rank) -> usize {
        self.driven().index(rank)
    }

    /// Once all processes agree on what they install, allocates an arena of this layout on every rank and lays the rails
    /// over it.
    pub(super) fn install(&self, what: &str, facts: &Facts, layout: ArenaLayout) -> Result<(Arc<Arena>, Arc<dyn Net>)> {
        let fabric = &self.shared.fabric;
        agree_over(&**fabric, what, facts)?;
        let mut window = None;
        let arena = Arena::new(self.gpu(), self.topology(), self.driven(), layout, |bytes| {
            let memory = Arc::clone(fabric).allocate(bytes)?;
            window = Some(Arc::clone(&memory));
            Ok(memory)
        })?;
        let CommunicatorOptions { path, context_count, .. } = self.shared.options;
        let options = NetOptions { path, context_count, timeout_ns: self.timeout_ns() };
        let window = window.expect("the arena was given memory");
        let net = window.connect(arena.signals_offset(), options)?;
        Ok((Arc::new(arena), net))
    }

    /// Waits until all processes have installed a collective: peers may write to this one's arena from here on.
    pub(super) fn installed(&self, what: &str) -> Result<()> {
        agree_over(&*self.shared.fabric, what, &Facts::new())
    }

    pub(super) fn create_stream(&self, rank: Rank, priority: Priority) -> Result<Stream> {
        self.create_device_stream(self.device_of(rank), priority)
    }

    pub(super) fn create_device_stream(&self, device: u32, priority: Priority) -> Result<Stream> {
        let stream = self.gpu().create_stream(device, priority)?;
        self.lock().streams.push(stream);
        Ok(stream)
    }

    pub(super) fn destroy_streams(&self, streams: impl IntoIterator<Item = Stream>) {
        for stream in streams {
            self.lock().streams.retain(|s| *s != stream);
            self.gpu().destroy_stream(stream);
        }
    }

    /// Makes each of `to` wait for all enqueued in `from` so far.
    pub(super) fn join(&self, from: Stream, to: impl IntoIterator<Item = Stream>) -> Result<Event> {
        let event = self.gpu().record(from)?;
        for stream in to {
            self.gpu().wait_event(stream, event)?;
        }
        Ok(event)
    }
}

/// Waits until all processes have come here, and compares what they bring.
fn agree_over(fabric: &dyn Fabric, label: &str, facts: &Facts) -> Result<()> {
    let mut exchange = fabric.exchange().lock().unwrap_or_else(PoisonError::into_inner);
    agree(&mut **exchange, label, facts)
}

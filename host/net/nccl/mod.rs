//! The network between the ranks of a cluster, by NCCL: one window per arena, on two kinds of communicators [TIDE §6.1].
//!
//! * The ranks of a **node** reach each other's memory by load and store: its window gives their addresses.
//! * The ranks of a **rail**, those of one local rank on all nodes, put into each other's memory: from the GPU (GIN), or
//!   from the host (host RMA).
//!
//! Both come from one communicator of all ranks by split; that one is given up again. None shares resources with another:
//! a child that shares its parent's network state goes by the parent's rank numbers.
//!
//! Every step needs all ranks. After each the processes tell each other how it went, so that all of them go on or none.

mod choice;
mod rails;
mod window;

pub use choice::{Abilities, Way, choose};

use self::window::NcclWindow;
use super::{Fabric, Path, Window};
use crate::error::{Result, TideError};
use crate::gpu::{DeviceBuffer, Gpu};
use crate::launch::{Exchange, Facts, agree};
use crate::plan::{Node, Rank, RankRange, Topology};
use nccl_gin::host::{
    Ability, Comm, Config, DeviceComm, GinConnection, GinType, Library, Memory, NcclError, Properties, Requirements,
    UniqueId, WindowFlags,
};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tide_device::abi::kernel::{Kernel, NcclBackend};

/// Sets of host signals that a rail has: one for each collective that is ever installed on the host path. NCCL's counts go on
/// for as long as its communicator lives, so that no set can serve twice.
pub const SIGNAL_SETS: u32 = 256;

/// Entries of a queue to a peer where NCCL chooses: GDAKI's default depth.
const QUEUE_ENTRIES: u32 = 128;

/// Threads that may post to one peer at a time: the warps of a rank's network block, and its finalizers.
const POSTING_THREADS_MAX: u32 = 16;

/// How the ranks of a cluster are connected.
#[derive(Debug, Clone)]
pub struct NcclOptions {
    /// The way over the rails; `None` for the best that all ranks have.
    pub path: Option<Path>,
    /// Contexts of the device path.
    pub context_count: u32,
    /// The longest that a step of the installation may take.
    pub timeout: Duration,
}

impl Default for NcclOptions {
    fn default() -> Self {
        Self { path: None, context_count: 4, timeout: Duration::from_secs(120) }
    }
}

/// PTX that was linked with NCCL's device code: its text for a back end, or why there is none.
pub type ModuleOf<'a> = &'a (dyn Fn(NcclBackend) -> Result<String> + Sync);

/// Which ranks a process drives, and where.
#[derive(Debug, Clone)]
pub struct Driven {
    /// All ranks.
    pub topology: Topology,
    /// Those of this process.
    pub ranks: RankRange,
    /// The device of each.
    pub devices: Vec<u32>,
}

/// The ranks of a cluster, connected.
pub struct NcclFabric {
    gpu: Arc<dyn Gpu>,
    library: Library,
    driven: Driven,
    exchange: Mutex<Box<dyn Exchange>>,
    endpoints: Endpoints,
    way: Way,
    passed_over: Vec<String>,
    /// Sets of host signals taken.
    signal_sets: AtomicU32,
}

/// What the driven ranks hold on to.
struct Endpoints {
    gpu: Arc<dyn Gpu>,
    driven: Driven,
    /// Per driven rank.
    held: Vec<Endpoint>,
    /// All ranks are connected.
    is_complete: bool,
    has_failed: AtomicBool,
}

impl Endpoints {
    fn has_failed(&self) -> bool {
        // ORDER: relaxed, a flag that guards no data.
        self.has_failed.load(Ordering::Relaxed)
    }
}

impl Drop for Endpoints {
    /// After a failure everything is leaked: aborts may be under way, and peers may never come. What was not completed is
    /// aborted: peers may have given it up already, and would not come to its end.
    fn drop(&mut self) {
        let held = std::mem::take(&mut self.held);
        if self.has_failed() {
            std::mem::forget(held);
            return;
        }
        if !self.is_complete {
            held.iter().flat_map(Endpoint::comms).for_each(Comm::abort);
        }
        drop_each_rank(&*self.gpu, &self.driven, held);
    }
}

/// What one driven rank holds on to.
struct Endpoint {
    /// The ranks of its node; `None` where this process drives them all, or there is but one.
    node: Option<Comm>,
    /// Its rail; `None` on one node.
    rail: Option<Comm>,
    /// Device path: the rail's device communicator, and its copy in device memory.
    device: Option<(DeviceComm, DeviceBuffer)>,
}

impl Endpoint {
    fn comms(&self) -> impl Iterator<Item = &Comm> {
        self.node.iter().chain(&self.rail)
    }
}

impl From<NcclError> for TideError {
    fn from(error: NcclError) -> Self {
        match error {
            NcclError::Usage(sentence) => Self::Usage(sentence),
            NcclError::Load { .. }
            | NcclError::TooOld { .. }
            | NcclError::MissingSymbol { .. }
            | NcclError::NullWindow { .. }
            | NcclError::Unsupported { .. } => Self::Unsupported { needed: "NCCL".into(), found: error.to_string() },
            other => Self::Driver { call: "NCCL".into(), detail: other.to_string() },
        }
    }
}

impl NcclFabric {
    /// Connects all ranks. Collective: every process makes this call, with the same options.
    ///
    /// # Errors
    /// [`TideError::Disagreement`] where processes differ in versions, topology or options; [`TideError::Unsupported`] where
    /// no way over the rails is common to all ranks; [`TideError::Rendezvous`] for a process that is gone; what NCCL refuses.
    /// The same on all processes, except that one's own failure is told in full.
    pub fn connect(
        gpu: Arc<dyn Gpu>,
        library: Library,
        driven: Driven,
        mut exchange: Box<dyn Exchange>,
        options: &NcclOptions,
        module: ModuleOf<'_>,
    ) -> Result<Arc<Self>> {
        let facts = Facts::new()
            .with("TIDE's version", env!("CARGO_PKG_VERSION"))
            .with("NCCL's version", library.version())
            .with(
                "the topology",
                format_args!("{} x {}", driven.topology.node_count(), driven.topology.local_rank_count()),
            )
            .with("the options", format_args!("{options:?}"));
        agree(&mut *exchange, "connect", &facts)?;
        check_placement(&mut *exchange, &driven)?;
        let mut setup = Setup { gpu: &*gpu, library: &library, driven: &driven, exchange: &mut *exchange, options };
        let held = setup.communicators()?;
        let (is_complete, has_failed) = (false, AtomicBool::new(false));
        let mut endpoints = Endpoints { gpu: Arc::clone(&gpu), driven: driven.clone(), held, is_complete, has_failed };
        let (way, passed_over) = setup.choose(&endpoints.held, module)?;
        tracing::info!(%way, ?passed_over, "rails");
        if let Way::Device(backend) = way {
            setup.load(backend, module)?;
            setup.device_communicators(&gpu, &mut endpoints.held, backend)?;
        }
        endpoints.is_complete = true;
        Ok(Arc::new(Self {
            gpu,
            library,
            driven,
            exchange: Mutex::new(exchange),
            endpoints,
            way,
            passed_over,
            signal_sets: AtomicU32::new(0),
        }))
    }

    /// The way over the rails that was chosen: what [`crate::CommunicatorOptions::path`] must say is its path.
    pub fn way(&self) -> Way {
        self.way
    }

    /// Better ways that were passed over, and why.
    pub fn passed_over(&self) -> &[String] {
        &self.passed_over
    }

    /// The library.
    pub fn library(&self) -> &Library {
        &self.library
    }

    fn endpoint(&self, rank: Rank) -> &Endpoint {
        &self.endpoints.held[self.driven.ranks.index(rank)]
    }

    fn lock_exchange(&self) -> MutexGuard<'_, Box<dyn Exchange>> {
        self.exchange.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_failed(&self) -> bool {
        self.endpoints.has_failed()
    }

    /// Takes a set of host signals.
    fn take_signal_set(&self) -> Result<u32> {
        // ORDER: relaxed; whoever enqueues collectives calls from one thread at a time.
        let set = self.signal_sets.fetch_add(1, Ordering::Relaxed);
        if set < SIGNAL_SETS {
            return Ok(set);
        }
        Err(TideError::Unsupported {
            needed: "host signals for one more collective".into(),
            found: format!("rails that had them for {SIGNAL_SETS}"),
        })
    }
}

impl Fabric for NcclFabric {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn gpu(&self) -> &Arc<dyn Gpu> {
        &self.gpu
    }

    fn topology(&self) -> Topology {
        self.driven.topology
    }

    fn driven(&self) -> RankRange {
        self.driven.ranks
    }

    fn device_of(&self, rank: Rank) -> u32 {
        self.driven.devices[self.driven.ranks.index(rank)]
    }

    fn allocate(self: Arc<Self>, bytes: u64) -> Result<Arc<dyn Window>> {
        Ok(NcclWindow::new(self, bytes)?)
    }

    fn exchange(&self) -> &Mutex<Box<dyn Exchange>> {
        &self.exchange
    }

    /// Aborts all communicators, each in a thread of its own: behind a kernel that has parked an abort may not return.
    fn abort(&self) {
        // ORDER: as in `Endpoints::has_failed`.
        if self.endpoints.has_failed.swap(true, Ordering::Relaxed) {
            return;
        }
        for comm in self.endpoints.held.iter().flat_map(Endpoint::comms) {
            let comm = comm.clone();
            std::thread::spawn(move || comm.abort());
        }
    }
}

/// Refuses processes whose ranks do not add up to the topology, in order.
fn check_placement(exchange: &mut dyn Exchange, driven: &Driven) -> Result<()> {
    let ranks: Vec<Rank> = driven.ranks.iter().collect();
    let mine: Vec<u8> = ranks.iter().flat_map(|r| r.0.to_le_bytes()).collect();
    let all = exchange.all_gather("ranks of each process", &mine)?;
    let named: Vec<u32> = all.concat().chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    if named.iter().copied().eq(driven.topology.ranks().map(|r| r.0)) {
        return Ok(());
    }
    Err(TideError::Disagreement {
        what: "who drives which rank".into(),
        ranks: format!("the processes drive {named:?}, in their order; all ranks from 0 on are needed, each once"),
    })
}

/// Whether all local ranks of a driven rank are driven by this process.
fn drives_whole_node(driven: &Driven, node: Node) -> bool {
    driven.topology.local_ranks().all(|l| driven.ranks.contains(driven.topology.rank(node, l)))
}

/// The steps of an installation.
struct Setup<'a> {
    gpu: &'a dyn Gpu,
    library: &'a Library,
    driven: &'a Driven,
    exchange: &'a mut dyn Exchange,
    options: &'a NcclOptions,
}

impl Setup<'_> {
    /// Communicators of a node and of a rail for every driven rank.
    fn communicators(&mut self) -> Result<Vec<Endpoint>> {
        let id = (self.exchange.rank() == 0).then(|| UniqueId::new(self.library)).transpose();
        let id = self.together("unique id", id.map_err(TideError::from))?;
        let bytes =
            self.exchange.broadcast("unique id", id.as_ref().map(UniqueId::to_bytes).as_ref().map(|b| &b[..]))?;
        let bytes: [u8; UniqueId::BYTES] = bytes
            .try_into()
            .map_err(|_| TideError::Rendezvous { detail: "rank 0 sent a unique id of another length".into() })?;
        let topology = self.driven.topology;
        let (all, lean) = (topology.rank_count(), self.lean_config());
        let world =
            self.each_rank(|rank| Comm::init_rank(self.library, UniqueId::from_bytes(bytes), all, rank.0, &lean));
        let world = self.together("communicator of all ranks", world)?;
        let whole_nodes = topology.nodes().all(|n| {
            let first = topology.rank(n, crate::plan::LocalRank(0));
            !self.driven.ranks.contains(first) || drives_whole_node(self.driven, n)
        });
        // Split is collective over all ranks: whether nodes are split is the same everywhere.
        let all_whole = self.exchange.all_gather("nodes of one process", &[u8::from(whole_nodes)])?;
        let needs_nodes = topology.local_rank_count() > 1 && all_whole.iter().any(|whole| whole != &[1]);
        let needs_rails = topology.node_count() > 1;
        let rail_config = Config {
            rma_contexts: self.library.require(Ability::HostRma).is_ok().then_some(1),
            rma_signals: self
                .library
                .require(Ability::HostRma)
                .is_ok()
                .then_some(SIGNAL_SETS * rails::SIGNALS_OF_A_SET),
            ..self.lean_config()
        };
        let split = |index: usize, rank: Rank| -> Result<Endpoint, NcclError> {
            let (node, local) = (topology.node_of(rank).0, topology.local_of(rank).0);
            let world: &Comm = &world[index];
            let node_comm = if needs_nodes { world.split(Some(node), local as i32, &lean)? } else { None };
            let rail = if needs_rails { world.split(Some(local), node as i32, &rail_config)? } else { None };
            Ok(Endpoint { node: node_comm, rail, device: None })
        };
        let ranks = self.driven.ranks;
        let endpoints = self.each_rank(|rank| split(ranks.index(rank), rank));
        let endpoints = self.together("communicators of nodes and rails", endpoints);
        drop_each_rank(self.gpu, self.driven, world);
        endpoints
    }

    /// Channels that nobody uses, capped at one block.
    fn lean_config(&self) -> Config {
        Config {
            timeout: self.options.timeout,
            min_ctas: Some(1),
            max_ctas: Some(1),
            channels_per_net_peer: Some(1),
            ..Config::default()
        }
    }

    /// Chooses the way over the rails, on all ranks the same.
    fn choose(&mut self, endpoints: &[Endpoint], module: ModuleOf<'_>) -> Result<(Way, Vec<String>)> {
        if self.driven.topology.node_count() == 1 {
            return Ok((Way::None, Vec::new()));
        }
        let properties = endpoints.iter().flat_map(|e| &e.rail).map(|rail| rail.properties().map_err(TideError::from));
        let properties = self.together("properties of the rails", properties.collect::<Result<Vec<_>>>())?;
        let obstacle = |way: Way| properties.iter().find_map(|p| self.obstacle(way, p, module));
        let abilities = self.exchange.all_gather("ways over the rails", &Abilities::new(obstacle).encode())?;
        let abilities = abilities.iter().map(|bytes| Abilities::decode(bytes)).collect::<Option<Vec<_>>>();
        let abilities = abilities
            .ok_or_else(|| TideError::Rendezvous { detail: "a process has sent what are no abilities".into() })?;
        choose(&abilities, self.options.path)
    }

    /// Why a driven rank cannot go a way.
    fn obstacle(&self, way: Way, properties: &Properties, module: ModuleOf<'_>) -> Option<String> {
        match way {
            Way::None => None,
            Way::Device(backend) => {
                let needed = match backend {
                    NcclBackend::Gdaki => GinType::Gdaki,
                    NcclBackend::Proxy => GinType::Proxy,
                };
                if let Err(error) = self.library.require(Ability::DeviceComm) {
                    return Some(error.to_string());
                }
                if properties.gin != needed {
                    return Some(format!("NCCL has GIN {:?} on the rail", properties.gin));
                }
                module(backend).err().map(|error| error.to_string())
            }
            Way::Host => {
                if let Err(error) = self.library.require(Ability::HostRma) {
                    return Some(error.to_string());
                }
                (!properties.host_rma).then(|| "NCCL has no host RMA on the rail".into())
            }
        }
    }

    /// Loads the network kernels.
    fn load(&mut self, backend: NcclBackend, module: ModuleOf<'_>) -> Result<()> {
        let loaded = module(backend).and_then(|text| self.gpu.load_kernels(&text, &Kernel::NCCL));
        self.together("network kernels", loaded)
    }

    /// The device communicators of the rails.
    fn device_communicators(
        &mut self,
        gpu: &Arc<dyn Gpu>,
        endpoints: &mut [Endpoint],
        backend: NcclBackend,
    ) -> Result<()> {
        let requirements = Requirements {
            connection: GinConnection::Full,
            gin_type: Some(match backend {
                NcclBackend::Gdaki => GinType::Gdaki,
                NcclBackend::Proxy => GinType::Proxy,
            }),
            context_count: Some(self.options.context_count),
            ..Requirements::default()
        };
        let rails: Vec<Comm> = endpoints.iter().filter_map(|e| e.rail.clone()).collect();
        let ranks = self.driven.ranks;
        let created = self.each_rank(|rank| {
            let rail = &rails[ranks.index(rank)];
            DeviceComm::create(rail, &requirements)
        });
        let created = self.together("device communicators", created)?;
        let mut buffers = Vec::new();
        for (rank, comm) in ranks.iter().zip(&created) {
            let device = self.driven.devices[ranks.index(rank)];
            buffers.push(DeviceBuffer::from_slice(gpu, device, &comm.bytes()));
        }
        let buffers =
            self.together("copies of the device communicators", buffers.into_iter().collect::<Result<Vec<_>>>())?;
        for ((endpoint, comm), buffer) in endpoints.iter_mut().zip(created).zip(buffers) {
            endpoint.device = Some((comm, buffer));
        }
        Ok(())
    }

    fn each_rank<T: Send>(&self, call: impl Fn(Rank) -> Result<T, NcclError> + Sync) -> Result<Vec<T>> {
        each_rank(self.gpu, self.driven, call)
    }

    fn together<T>(&mut self, step: &str, outcome: Result<T>) -> Result<T> {
        together(self.exchange, step, outcome)
    }
}

/// Makes a collective call of NCCL for every driven rank, each in a thread of its own with its device current: the calls wait
/// for each other.
fn each_rank<T: Send>(
    gpu: &dyn Gpu,
    driven: &Driven,
    call: impl Fn(Rank) -> Result<T, NcclError> + Sync,
) -> Result<Vec<T>> {
    let run = |rank: Rank| -> Result<T> {
        gpu.enter(driven.devices[driven.ranks.index(rank)])?;
        Ok(call(rank)?)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = driven
            .ranks
            .iter()
            .map(|rank| {
                scope.spawn({
                    let run = &run;
                    move || run(rank)
                })
            })
            .collect();
        let outcomes: Vec<Result<T>> = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect();
        let mut held = Vec::new();
        let mut failure = None;
        for outcome in outcomes {
            match outcome {
                Ok(value) => held.push(value),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        failure.map_or(Ok(held), Err)
    })
}

/// Gives up what every driven rank holds, each in a thread of its own: the end of a communicator waits for its other ranks.
fn drop_each_rank<T: Send>(gpu: &dyn Gpu, driven: &Driven, held: Vec<T>) {
    std::thread::scope(|scope| {
        for (rank, held) in driven.ranks.iter().zip(held) {
            scope.spawn(move || {
                if let Err(error) = gpu.enter(driven.devices[driven.ranks.index(rank)]) {
                    tracing::warn!(%error, "NCCL's state is given back without its device");
                }
                drop(held);
            });
        }
    });
}

/// Tells all processes how a step went here: it has gone well only if it has everywhere.
fn together<T>(exchange: &mut dyn Exchange, step: &str, outcome: Result<T>) -> Result<T> {
    tracing::info!(step, failed = outcome.is_err(), "here");
    let said = outcome.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let all = exchange.all_gather(step, said.as_bytes())?;
    let value = outcome?;
    match all.iter().enumerate().find(|(_, said)| !said.is_empty()) {
        None => {
            tracing::info!(step, "everywhere");
            Ok(value)
        }
        Some((process, said)) => Err(TideError::Rendezvous {
            detail: format!("{step}: process {process} has failed: {}", String::from_utf8_lossy(said)),
        }),
    }
}

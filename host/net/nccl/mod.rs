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
mod step;
mod window;

pub use choice::{Abilities, Way, choose};

use self::step::{Failure, Parts, conclude, each_rank, end_each_rank, together};
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
    /// All ranks are connected, and no collective call has failed on some of them: they come to each other's end.
    is_in_step: AtomicBool,
    has_failed: AtomicBool,
}

impl Endpoints {
    fn has_failed(&self) -> bool {
        // ORDER: relaxed, a flag that guards no data.
        self.has_failed.load(Ordering::Relaxed)
    }
}

impl Drop for Endpoints {
    /// After a failure everything is leaked: aborts may be under way, and peers may never come. Ranks that are out of step are
    /// aborted: peers may have given up already, and would not come to their end.
    fn drop(&mut self) {
        let held = std::mem::take(&mut self.held);
        if self.has_failed() {
            std::mem::forget(held);
            return;
        }
        // ORDER: relaxed, nobody else has it any more.
        let is_in_step = self.is_in_step.load(Ordering::Relaxed);
        end_each_rank(&*self.gpu, &self.driven, self.driven.ranks.iter().zip(held), |_, endpoint: Endpoint| {
            if !is_in_step {
                endpoint.abort();
            }
            drop(endpoint);
        });
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

    fn abort(&self) {
        self.comms().for_each(Comm::abort);
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
    /// The same on all processes, except that one's own failure is told in full. Nothing is left behind.
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
        let (is_in_step, has_failed) = (AtomicBool::new(false), AtomicBool::new(false));
        let mut endpoints = Endpoints { gpu: Arc::clone(&gpu), driven: driven.clone(), held, is_in_step, has_failed };
        let (way, passed_over) = setup.choose(&endpoints.held, module)?;
        tracing::info!(%way, ?passed_over, "rails");
        if let Way::Device(backend) = way {
            setup.load(backend, module)?;
            setup.device_communicators(&gpu, &mut endpoints.held, backend)?;
        }
        *endpoints.is_in_step.get_mut() = true;
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

    /// Aborts all communicators after a collective call that has failed on some ranks: those may have left them already.
    fn give_up(&self) {
        // ORDER: relaxed, read when nobody else has it.
        self.endpoints.is_in_step.store(false, Ordering::Relaxed);
        let held = self.driven.ranks.iter().zip(&self.endpoints.held);
        end_each_rank(&*self.gpu, &self.driven, held, |_, endpoint: &Endpoint| endpoint.abort());
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
        let topology = self.driven.topology;
        let whole_nodes = topology.nodes().all(|n| {
            let first = topology.rank(n, crate::plan::LocalRank(0));
            !self.driven.ranks.contains(first) || drives_whole_node(self.driven, n)
        });
        // Split is collective over all ranks: whether nodes are split is the same everywhere. Asked first: once ranks have a
        // communicator, only its steps may fail.
        let all_whole = self.exchange.all_gather("nodes of one process", &[u8::from(whole_nodes)])?;
        let needs_nodes = topology.local_rank_count() > 1 && all_whole.iter().any(|whole| whole != &[1]);
        let needs_rails = topology.node_count() > 1;
        let id = (self.exchange.rank() == 0).then(|| UniqueId::new(self.library)).transpose();
        let id = self.together("unique id", id.map_err(TideError::from))?;
        let bytes =
            self.exchange.broadcast("unique id", id.as_ref().map(UniqueId::to_bytes).as_ref().map(|b| &b[..]))?;
        let bytes: [u8; UniqueId::BYTES] = bytes
            .try_into()
            .map_err(|_| TideError::Rendezvous { detail: "rank 0 sent a unique id of another length".into() })?;
        let (all, lean) = (topology.rank_count(), self.lean_config());
        let world =
            self.each_rank(|rank| Comm::init_rank(self.library, UniqueId::from_bytes(bytes), all, rank.0, &lean));
        let world = self.conclude("communicator of all ranks", world, |_, comm: Comm| comm.abort())?;
        let rail_config = Config {
            rma_contexts: self.library.require(Ability::HostRma).is_ok().then_some(1),
            rma_signals: self
                .library
                .require(Ability::HostRma)
                .is_ok()
                .then_some(SIGNAL_SETS * rails::SIGNALS_OF_A_SET),
            ..self.lean_config()
        };
        let split = |world: &Comm, rank: Rank| -> Result<Endpoint, NcclError> {
            let (node, local) = (topology.node_of(rank).0, topology.local_of(rank).0);
            let mut endpoint = Endpoint { node: None, rail: None, device: None };
            let mut children = || {
                if needs_nodes {
                    endpoint.node = world.split(Some(node), local as i32, &lean)?;
                }
                if needs_rails {
                    endpoint.rail = world.split(Some(local), node as i32, &rail_config)?;
                }
                Ok(())
            };
            match children() {
                Ok(()) => Ok(endpoint),
                Err(error) => {
                    endpoint.abort();
                    // Those who wait for this rank in the same split may hear of it.
                    world.abort();
                    Err(error)
                }
            }
        };
        let ranks = self.driven.ranks;
        let endpoints = self.each_rank(|rank| split(&world[ranks.index(rank)], rank));
        let endpoints =
            self.conclude("communicators of nodes and rails", endpoints, |_, endpoint: Endpoint| endpoint.abort());
        let are_split = endpoints.is_ok();
        end_each_rank(self.gpu, self.driven, ranks.iter().zip(world), |_, comm: Comm| {
            if !are_split {
                comm.abort();
            }
            drop(comm);
        });
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
        let rails = endpoints.iter().flat_map(|e| &e.rail);
        // A version that does not tell them still has its obstacles to name.
        let properties = match self.library.require(Ability::Properties) {
            Ok(()) => rails.map(|rail| rail.properties().map(Ok).map_err(TideError::from)).collect(),
            Err(lack) => Ok(rails.map(|_| Err(lack.clone())).collect()),
        };
        let properties: Vec<Result<Properties, NcclError>> = self.together("properties of the rails", properties)?;
        let obstacle = |way: Way| properties.iter().find_map(|p| self.obstacle(way, p.as_ref(), module));
        let abilities = self.exchange.all_gather("ways over the rails", &Abilities::new(obstacle).encode())?;
        let abilities = abilities.iter().map(|bytes| Abilities::decode(bytes)).collect::<Option<Vec<_>>>();
        let abilities = abilities
            .ok_or_else(|| TideError::Rendezvous { detail: "a process has sent what are no abilities".into() })?;
        choose(&abilities, self.options.path)
    }

    /// Why a driven rank cannot go a way.
    fn obstacle(&self, way: Way, properties: Result<&Properties, &NcclError>, module: ModuleOf<'_>) -> Option<String> {
        let needed = match way {
            Way::None => return None,
            Way::Device(_) => Ability::DeviceComm,
            Way::Host => Ability::HostRma,
        };
        if let Err(error) = self.library.require(needed) {
            return Some(error.to_string());
        }
        let properties = match properties {
            Ok(properties) => properties,
            Err(error) => return Some(error.to_string()),
        };
        match way {
            Way::None => None,
            Way::Device(backend) => {
                let gin = match backend {
                    NcclBackend::Gdaki => GinType::Gdaki,
                    NcclBackend::Proxy => GinType::Proxy,
                };
                if properties.gin != gin {
                    return Some(format!("NCCL has GIN {:?} on the rail", properties.gin));
                }
                module(backend).err().map(|error| error.to_string())
            }
            Way::Host => (!properties.host_rma).then(|| "NCCL has no host RMA on the rail".into()),
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
        let created = self.each_rank(|rank| -> Result<_, Failure> {
            let rail = &rails[ranks.index(rank)];
            let created = DeviceComm::create(rail, &requirements)?;
            match DeviceBuffer::from_slice(gpu, self.driven.devices[ranks.index(rank)], &created.bytes()) {
                Ok(copy) => Ok((created, copy)),
                Err(error) => {
                    rail.abort();
                    Err(error.into())
                }
            }
        });
        let give_up = |rank, created: (DeviceComm, DeviceBuffer)| {
            rails[ranks.index(rank)].abort();
            drop(created);
        };
        let created = self.conclude("device communicators", created, give_up)?;
        for (endpoint, created) in endpoints.iter_mut().zip(created) {
            endpoint.device = Some(created);
        }
        Ok(())
    }

    fn each_rank<T: Send, E: Into<Failure>>(&self, call: impl Fn(Rank) -> Result<T, E> + Sync) -> Parts<T> {
        each_rank(self.gpu, self.driven, call)
    }

    fn conclude<T: Send>(&mut self, step: &str, parts: Parts<T>, give_up: impl Fn(Rank, T) + Sync) -> Result<Vec<T>> {
        conclude(self.gpu, self.driven, self.exchange, step, parts, give_up)
    }

    fn together<T>(&mut self, step: &str, outcome: Result<T>) -> Result<T> {
        together(self.exchange, step, outcome)
    }
}

//! Device communicators: what a kernel needs to signal, put and wait by itself.

use super::comm::{Comm, CommInner, Landing, Retired};
use super::config::count;
use super::error::{NcclError, Result, ResultCode};
use super::layout::{DevCommLayout, REQUIREMENTS, Record, byte};
use super::library::Library;
use super::properties::GinType;
use super::version::Version;
use std::sync::Arc;

/// Between which ranks GIN connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GinConnection {
    /// None: for kernels that only load and store.
    None,
    /// All.
    Full,
    /// Those of equal place in their nodes.
    Rail,
    /// Those at multiples of a stride.
    Stride(i32),
}

/// What a device communicator is to have. All ranks ask for the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirements {
    /// Between which ranks GIN connects.
    pub connection: GinConnection,
    /// The transport; `None` takes what the communicator has.
    pub gin_type: Option<GinType>,
    /// Contexts of GIN, a hint: see [`DeviceComm::context_count`] for what came of it. NCCL's default is 4.
    pub context_count: Option<u32>,
    /// Whether other device communicators must not use the same contexts.
    pub exclusive_contexts: bool,
    /// Signals of each context.
    pub signal_count: u32,
    /// Counters of each context. With GDAKI they cost a further queue pair per peer and context.
    pub counter_count: u32,
    /// Work requests that a queue holds; 0 leaves it to NCCL, and is what a proxy gets in any case, as it knows no other.
    pub queue_depth: u32,
    /// The network's traffic class.
    pub traffic_class: Option<i32>,
    /// Whether signals are to cover all earlier puts of their context to the same peer.
    pub strong_signals: bool,
    /// Whether signals may lie at any address of a window.
    pub va_signals: bool,
    /// Barriers among ranks that reach each other by loads and stores: they need no GIN.
    pub lsa_barrier_count: u32,
    /// Barriers among all ranks.
    pub barrier_count: u32,
    /// Barriers along rails, by GIN.
    pub rail_gin_barrier_count: u32,
    /// Barriers among all ranks, by GIN alone.
    pub world_gin_barrier_count: u32,
    /// Whether to have the switch's multicast at hand. It takes one of its slots; where there is none left NCCL fails for good.
    pub lsa_multimem: bool,
}

impl Default for Requirements {
    /// No GIN and no barriers; strong signals and signals in windows, should GIN be asked for.
    fn default() -> Self {
        Self {
            connection: GinConnection::None,
            gin_type: None,
            context_count: None,
            exclusive_contexts: false,
            signal_count: 0,
            counter_count: 0,
            queue_depth: 0,
            traffic_class: None,
            strong_signals: true,
            va_signals: true,
            lsa_barrier_count: 0,
            barrier_count: 0,
            rail_gin_barrier_count: 0,
            world_gin_barrier_count: 0,
            lsa_multimem: false,
        }
    }
}

impl Requirements {
    /// The struct for a library's version, for a communicator whose transport is `gin`.
    pub(crate) fn build(&self, library: &Library, gin: Option<GinType>) -> Result<Record> {
        self.check()?;
        let layout = REQUIREMENTS.at(library.version()).expect("as old as the ability");
        let mut record = Record::new(layout);
        let mut set = |name: &'static str, value: i32| if record.set_int(name, value) { Ok(()) } else { Err(name) };
        let mut set_all = || -> std::result::Result<Result<()>, &'static str> {
            let numbers = [
                ("ginContextCount", self.context_count),
                ("ginSignalCount", Some(self.signal_count)),
                ("ginCounterCount", Some(self.counter_count)),
                ("ginQueueDepth", Some(self.queue_depth_for(gin))),
                ("lsaBarrierCount", Some(self.lsa_barrier_count)),
                ("barrierCount", Some(self.barrier_count)),
                ("railGinBarrierCount", Some(self.rail_gin_barrier_count)),
                ("worldGinBarrierCount", Some(self.world_gin_barrier_count)),
            ];
            for (name, value) in numbers {
                match count(name, value) {
                    Ok(Some(value)) => set(name, value)?,
                    Ok(None) => {}
                    Err(error) => return Ok(Err(error)),
                }
            }
            let (connection, stride) = match self.connection {
                GinConnection::None => (0, 1),
                GinConnection::Full => (1, 1),
                GinConnection::Rail => (2, 1),
                GinConnection::Stride(stride) => (3, stride),
            };
            set("ginConnectionType", connection)?;
            set("ginCustomStride", stride)?;
            set("ginType", self.gin_type.map_or(0, GinType::code))?;
            if let Some(class) = self.traffic_class {
                set("ginTrafficClass", class)?;
            }
            Ok(Ok(()))
        };
        let lacking = |field| {
            let needed = REQUIREMENTS.since(field).expect("a field of the schema");
            NcclError::TooOld {
                path: library.path().display().to_string(),
                found: library.version(),
                needed,
                what: field,
            }
        };
        set_all().map_err(lacking)??;
        for (name, value) in [
            ("lsaMultimem", self.lsa_multimem),
            ("ginExclusiveContexts", self.exclusive_contexts),
            ("ginStrongSignalsRequired", self.strong_signals),
            ("ginVaSignalsRequired", self.va_signals),
        ] {
            if !record.set_bool(name, value) {
                return Err(lacking(name));
            }
        }
        Ok(record)
    }

    /// What NCCL would answer with a bare "invalid argument".
    fn check(&self) -> Result<()> {
        let gin = [
            ("signal_count", self.signal_count),
            ("counter_count", self.counter_count),
            ("barrier_count", self.barrier_count),
            ("rail_gin_barrier_count", self.rail_gin_barrier_count),
            ("world_gin_barrier_count", self.world_gin_barrier_count),
        ];
        let asked = gin.into_iter().find(|(_, count)| *count > 0);
        match (self.connection, asked) {
            (GinConnection::None, Some((name, _))) => {
                Err(NcclError::Usage(format!("{name} needs GIN, and the connection is None")))
            }
            (GinConnection::Rail, _) if self.world_gin_barrier_count > 0 => {
                Err(NcclError::Usage("world_gin_barrier_count needs a full connection, not a rail".to_owned()))
            }
            (GinConnection::Stride(stride), _) if stride < 1 => {
                Err(NcclError::Usage(format!("a connection of stride {stride}")))
            }
            _ => Ok(()),
        }
    }

    /// A proxy accepts no depth but NCCL's own.
    fn queue_depth_for(&self, gin: Option<GinType>) -> u32 {
        if self.gin_type.or(gin) == Some(GinType::Proxy) { 0 } else { self.queue_depth }
    }
}

/// A device communicator: a struct that a kernel gets by value or by address. It is destroyed when it is dropped; kernels that use it
/// must be done by then.
#[derive(Debug)]
pub struct DeviceComm {
    words: Box<[u64]>,
    layout: DevCommLayout,
    comm: Arc<CommInner>,
}

/// Room for the struct, beyond every known version's size.
type Room = [u64; 64];

impl DeviceComm {
    /// Creates one. All ranks call it; it returns when all have. It may make connections: with many ranks and contexts that takes a
    /// while, and queue pairs of the network card.
    ///
    /// # Errors
    ///
    /// `TooOld` before 2.32.3, `Unsupported` where the communicator has no device API or not the GIN that is asked for, `Usage` for
    /// requirements that contradict each other, `Timeout`, `Aborted`, `Call`.
    pub fn create(comm: &Comm, requirements: &Requirements) -> Result<Self> {
        const CALL: &str = "ncclDevCommCreate";
        let library = comm.library();
        let functions = library.devices()?;
        let inner = &comm.inner;
        let gin = inner.initial_properties().map(|p| match requirements.connection {
            GinConnection::Rail => p.railed_gin,
            _ => p.gin,
        });
        require_gin(requirements, inner, gin)?;
        let record = requirements.build(library, gin)?;
        let version = record.layout().version();
        let layout = DevCommLayout::written_for(version).expect("a line for each version of the requirements");
        let mut state = inner.lock()?;
        let raw = state.raw()?;
        let room = Landing::<Room>::new([0; 64]);
        // SAFETY: the communicator lives and is locked; the requirements have the size and version that their head says, for which NCCL
        // writes at most `room`, which outlives whatever is left under way.
        let code = unsafe { (functions.ncclDevCommCreate)(raw, record.as_ptr().cast(), room.pointer().cast()) };
        let settled = inner.settle(&mut state, CALL, code);
        let room = room.collect(&settled);
        if room.is_none() {
            // As the room: whoever may still read them.
            std::mem::forget(record);
        }
        settled.map_err(|error| hinted(error, requirements))?;
        let words: Box<[u64]> = room.expect("a call that was not aborted")[..layout.bytes.div_ceil(8)].into();
        state.device_comm_created();
        drop(state);
        // From here on its drop destroys it.
        let created = Self { words, layout, comm: Arc::clone(inner) };
        created.check_version()?;
        Ok(created)
    }

    /// The struct, as kernels built for NCCL [`version`](Self::version) know it.
    pub fn bytes(&self) -> Vec<u8> {
        (0..self.layout.bytes).map(|index| byte(&self.words, index)).collect()
    }

    /// The struct's size.
    pub fn byte_count(&self) -> usize {
        self.layout.bytes
    }

    /// The version whose layout it has.
    pub fn version(&self) -> Version {
        self.layout.version
    }

    /// This rank.
    pub fn rank(&self) -> i32 {
        self.int(self.layout.rank)
    }

    /// All ranks.
    pub fn rank_count(&self) -> i32 {
        self.int(self.layout.rank_count)
    }

    /// This rank within those that reach each other by loads and stores.
    pub fn lsa_rank(&self) -> i32 {
        self.int(self.layout.lsa_rank)
    }

    /// Those ranks.
    pub fn lsa_size(&self) -> i32 {
        self.int(self.layout.lsa_size)
    }

    /// Contexts of GIN that it has: what was asked for, rounded up to a multiple of the connections.
    pub fn context_count(&self) -> i32 {
        self.layout.context_count.map_or(0, |offset| self.int(offset))
    }

    fn int(&self, offset: usize) -> i32 {
        i32::from_ne_bytes(std::array::from_fn(|i| byte(&self.words, offset + i)))
    }

    /// NCCL says in the struct which version it wrote.
    fn check_version(&self) -> Result<()> {
        let stated = Version(self.int(4) as u32);
        if stated == self.layout.version {
            return Ok(());
        }
        Err(NcclError::Unsupported {
            what: "the device communicator's layout",
            reason: format!("NCCL wrote that of {stated}, not of {}; unset NCCL_DEV_API_JIT", self.layout.version),
        })
    }
}

/// Fails early, in words, for what NCCL would answer with a number.
fn require_gin(requirements: &Requirements, comm: &CommInner, gin: Option<GinType>) -> Result<()> {
    let Some(properties) = comm.initial_properties() else { return Ok(()) };
    if !properties.device_api {
        return Err(NcclError::Unsupported { what: "a device communicator", reason: comm.why_no_windows() });
    }
    if requirements.connection != GinConnection::None && gin == Some(GinType::None) {
        return Err(NcclError::Unsupported {
            what: "GIN",
            reason: format!(
                "no transport for {:?} (railed GIN: {:?}); NCCL_DEBUG=INFO tells why, NCCL_GIN_TYPE=2 asks for the proxy, and fused network \
                 cards may need NCCL_IB_MERGE_NICS=0",
                requirements.connection, properties.railed_gin
            ),
        });
    }
    Ok(())
}

/// Adds what helps to a failure of NCCL's.
fn hinted(error: NcclError, requirements: &Requirements) -> NcclError {
    match error {
        NcclError::Call { call, code, last_error, .. } => {
            let hint = match (code, requirements.connection) {
                (ResultCode::INVALID_USAGE, _) => "the backend may lack strong or VA signals, which were asked for",
                (_, GinConnection::None) => "",
                _ => "where the GPU cannot post to the network card itself, NCCL_GIN_TYPE=2 uses the host's proxy",
            };
            NcclError::Call { call, code, last_error, hint }
        }
        other => other,
    }
}

impl Drop for DeviceComm {
    fn drop(&mut self) {
        self.comm.retire(Retired::DeviceComm(std::mem::take(&mut self.words)));
    }
}

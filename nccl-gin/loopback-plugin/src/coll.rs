//! A rank's end of a collective communicator, and the handles by which ranks find each other.

use crate::abi::{ContextConfig, HANDLE_BYTES, POINTER_CUDA, POINTER_HOST};
use crate::context::{Context, Copy, Signal};
use crate::fault::{Fault, Result};
use crate::group::{Group, Region};
use crate::handle::Kind;
use crate::mover::{Mover, Space};
use crate::world::{Counted, lock};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex};

const MAGIC: u64 = u64::from_le_bytes(*b"tideloop");

/// What `init` makes.
pub struct Instance {
    pub(crate) comm: u64,
    _alive: Counted,
}

impl Kind for Instance {
    const MARK: u64 = 0x7469_6465_0000_0001;
    const NAME: &'static str = "instance";
}

impl Instance {
    pub(crate) fn new<M: Mover>(comm: u64) -> Self {
        Self { comm, _alive: Counted::new(&M::world().alive.instances) }
    }
}

/// What `listen` makes.
pub struct Listener {
    key: u64,
    _alive: Counted,
}

impl Kind for Listener {
    const MARK: u64 = 0x7469_6465_0000_0002;
    const NAME: &'static str = "listener";
}

/// What ranks tell each other between `listen` and `connect`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    magic: u64,
    process: u64,
    key: u64,
    /// For the log: `key` alone says who belongs together.
    comm: u64,
}

impl Address {
    /// As bytes of a handle.
    pub fn to_bytes(self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip([self.magic, self.process, self.key, self.comm]) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// From bytes of a handle.
    pub fn from_bytes(bytes: &[u8; HANDLE_BYTES]) -> Self {
        let mut words = bytes.chunks_exact(8).map(|word| word.iter().rev().fold(0, |sum, b| sum << 8 | u64::from(*b)));
        let mut next = || words.next().unwrap_or_default();
        Self { magic: next(), process: next(), key: next(), comm: next() }
    }
}

impl Listener {
    pub(crate) fn new<M: Mover>(instance: &Instance) -> (Self, Address) {
        let (key, comm) = (M::world().number(), instance.comm);
        let address = Address { magic: MAGIC, process: u64::from(std::process::id()), key, comm };
        (Self { key, _alive: Counted::new(&M::world().alive.listeners) }, address)
    }
}

/// A rank's end of a collective communicator.
pub struct Coll<M: Mover> {
    pub(crate) group: Arc<Group>,
    pub(crate) rank: usize,
    contexts: Mutex<BTreeMap<u32, Arc<Mutex<Context<M>>>>>,
    regions: Mutex<BTreeMap<usize, Counted>>,
    _alive: Counted,
}

impl<M: Mover> Kind for Arc<Coll<M>> {
    const MARK: u64 = 0x7469_6465_0000_0003;
    const NAME: &'static str = "collective communicator";
}

/// What `createContext` makes.
pub struct ContextHandle<M: Mover> {
    pub(crate) coll: Arc<Coll<M>>,
    number: u32,
    context: Arc<Mutex<Context<M>>>,
    _alive: Counted,
}

impl<M: Mover> Kind for ContextHandle<M> {
    const MARK: u64 = 0x7469_6465_0000_0004;
    const NAME: &'static str = "context";
}

impl<M: Mover> Coll<M> {
    /// Joins those whose handles these are.
    ///
    /// # Errors
    /// If they are not all of this process, or the own one is at another rank.
    pub(crate) fn connect(addresses: &[Address], rank: usize, listener: &Listener) -> Result<Self> {
        for (peer, address) in addresses.iter().enumerate() {
            if address.magic != MAGIC {
                return Err(Fault::argument(format!("the handle of rank {peer} is none of this plugin")));
            }
            if address.process != u64::from(std::process::id()) {
                return Err(Fault::system(format!(
                    "rank {peer} is in process {}, rank {rank} in {}: this plugin joins threads of one process only",
                    address.process,
                    std::process::id()
                )));
            }
        }
        if addresses.get(rank).is_none_or(|own| own.key != listener.key) {
            return Err(Fault::argument(format!("the handle of rank {rank} is not the one it listens by")));
        }
        // The handles are the same for all ranks, so the first one names the group.
        let group = M::world().group(addresses[0].key, addresses.len());
        group.join(rank, addresses.len())?;
        Ok(Self {
            group,
            rank,
            contexts: Mutex::new(BTreeMap::new()),
            regions: Mutex::new(BTreeMap::new()),
            _alive: Counted::new(&M::world().alive.colls),
        })
    }

    pub(crate) fn register(&self, base: usize, bytes: usize, kind: c_int) -> Result<usize> {
        let space = match kind {
            POINTER_HOST => Space::Host,
            POINTER_CUDA => Space::Device,
            _ => return Err(Fault::argument(format!("memory of kind {kind}"))),
        };
        let number = self.group.register(self.rank, Region { base, bytes, space }, M::world().deadline())?;
        lock(&self.regions).insert(number, Counted::new(&M::world().alive.regions));
        Ok(number)
    }

    pub(crate) fn deregister(&self, number: usize) -> Result<()> {
        self.group.deregister(self.rank, number)?;
        lock(&self.regions).remove(&number);
        Ok(())
    }

    pub(crate) fn create_context(self: &Arc<Self>, config: ContextConfig) -> Result<ContextHandle<M>> {
        let ranks = self.group.ranks();
        let contexts = usize::try_from(config.contexts).ok().filter(|contexts| (1..=1 << 16).contains(contexts));
        let contexts = contexts.ok_or_else(|| Fault::argument(format!("{} contexts", config.contexts)))?;
        // A rank here is one of this communicator whatever the stride: the stride only says who will not be talked to.
        if !usize::try_from(config.rank_stride).is_ok_and(|stride| stride > 0 && ranks.is_multiple_of(stride)) {
            return Err(Fault::argument(format!("a stride of {} among {ranks} ranks", config.rank_stride)));
        }
        let context = Arc::new(Mutex::new(Context::new(contexts, ranks)?));
        let mut all = lock(&self.contexts);
        let number = (0..u32::from(u16::MAX)).find(|number| !all.contains_key(number));
        let number = number.ok_or_else(|| Fault::system("too many contexts"))?;
        all.insert(number, context.clone());
        Ok(ContextHandle { coll: self.clone(), number, context, _alive: Counted::new(&M::world().alive.contexts) })
    }

    /// Drives the request's context, and says whether the request is done.
    pub(crate) fn test(&self, request: Request) -> Result<bool> {
        let context = lock(&self.contexts).get(&request.context).cloned();
        let context = context.ok_or_else(|| Fault::argument(format!("there is no context {}", request.context)))?;
        lock(&context).test(request.slot)
    }

    pub(crate) fn close(&self) -> Result<()> {
        self.group.leave(self.rank);
        let (contexts, regions) = (lock(&self.contexts).len(), lock(&self.regions).len());
        if contexts + regions > 0 {
            return Err(Fault::argument(format!("closed with {contexts} contexts and {regions} regions alive")));
        }
        Ok(())
    }
}

/// A request, as the number that NCCL holds as a pointer: never null.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    context: u32,
    slot: u32,
}

impl Request {
    pub(crate) fn to_number(self) -> usize {
        (self.context as usize + 1) << 32 | self.slot as usize
    }

    pub(crate) fn from_number(number: usize) -> Result<Self> {
        match (number >> 32).checked_sub(1) {
            Some(context) => Ok(Self { context: context as u32, slot: number as u32 }),
            None => Err(Fault::argument(format!("{number:#x} is no request"))),
        }
    }
}

/// A region's offset, in numbers that NCCL passes around.
#[derive(Debug, Clone, Copy)]
pub(crate) struct At {
    pub(crate) region: usize,
    pub(crate) offset: u64,
}

/// A range of bytes to be copied between this rank and another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer {
    pub(crate) local: At,
    pub(crate) remote: At,
    pub(crate) bytes: usize,
}

impl<M: Mover> ContextHandle<M> {
    fn start(&self, index: c_int, rank: u32, copy: Option<Copy>, signal: Option<Signal>) -> Result<Request> {
        let index = usize::try_from(index).map_err(|_| Fault::argument(format!("context {index}")))?;
        let slot = lock(&self.context).start(index, rank as usize, copy, signal)?;
        Ok(Request { context: self.number, slot })
    }

    fn ends(&self, rank: u32, transfer: Transfer) -> Result<(crate::mover::Place, crate::mover::Place)> {
        let Transfer { local, remote, bytes } = transfer;
        let group = &self.coll.group;
        let own = group.place(self.coll.rank, local.region, local.offset, bytes)?;
        Ok((own, group.place(rank as usize, remote.region, remote.offset, bytes)?))
    }

    pub(crate) fn put(
        &self,
        index: c_int,
        rank: u32,
        transfer: Option<Transfer>,
        signal: Option<(At, u64)>,
    ) -> Result<Request> {
        let copy = match transfer {
            Some(transfer) => {
                let (from, to) = self.ends(rank, transfer)?;
                Some(Copy { to, from, bytes: transfer.bytes })
            }
            None => None,
        };
        let signal = match signal {
            Some((at, value)) => {
                let word = self.coll.group.place(rank as usize, at.region, at.offset, size_of::<u64>())?;
                if !word.address.is_multiple_of(size_of::<u64>()) {
                    return Err(Fault::argument(format!("a signal at {:#x}: 8 bytes are to be aligned", word.address)));
                }
                Some(Signal { word, value })
            }
            None => None,
        };
        self.start(index, rank, copy, signal)
    }

    pub(crate) fn get(&self, index: c_int, rank: u32, transfer: Transfer) -> Result<Request> {
        let (to, from) = self.ends(rank, transfer)?;
        self.start(index, rank, Some(Copy { to, from, bytes: transfer.bytes }), None)
    }

    pub(crate) fn progress(&self) -> Result<()> {
        lock(&self.context).progress()
    }

    pub(crate) fn failed(&self) -> bool {
        lock(&self.context).fault().is_some()
    }

    /// Waits a while for what is under way, and ends the context.
    pub(crate) fn destroy(self) -> Result<()> {
        let drained = lock(&self.context).drain();
        lock(&self.coll.contexts).remove(&self.number);
        drained
    }
}

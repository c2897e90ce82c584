//! Symmetric memory of NCCL: an allocation per driven rank, registered on its node's communicator and on its rail's.

use super::rails::NcclRails;
use super::{Memory, NcclFabric, WindowFlags, drop_each_rank, each_rank, together};
use crate::arena::SymmetricMemory;
use crate::error::Result;
use crate::gpu::DevicePtr;
use crate::net::{Fabric, Net, NetOptions, Window};
use crate::plan::{Node, Rank};
use nccl_gin::host::{NcclError, Window as RawWindow};
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// Windows are whole allocations of whole pages: sub-windows were the source of silent corruption (NVIDIA/nccl#2198).
const PAGE_BYTES: u64 = 4096;

/// What one driven rank has registered.
pub(super) struct Registered {
    /// On its node's communicator, if that has one.
    pub(super) node: Option<RawWindow>,
    /// On its rail's.
    pub(super) rail: Option<RawWindow>,
    memory: Memory,
}

/// One allocation on every rank.
pub(super) struct NcclWindow {
    fabric: Arc<NcclFabric>,
    /// Per driven rank. Given up by `Drop`, and only by it.
    registered: ManuallyDrop<Vec<Registered>>,
    /// Per rank of all: its address here, if it has one.
    bases: Vec<Option<DevicePtr>>,
}

impl NcclWindow {
    /// Allocates and registers. Collective.
    pub(super) fn new(fabric: Arc<NcclFabric>, bytes: u64) -> Result<Arc<Self>> {
        let driven = &fabric.driven;
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES) as usize;
        // One order on all ranks: the node's communicator, then the rail's.
        let register = |rank: Rank| -> Result<Registered, NcclError> {
            let endpoint = fabric.endpoint(rank);
            let memory = Memory::alloc(&fabric.library, bytes)?;
            let node = endpoint.node.as_ref().map(|c| c.register(&memory, WindowFlags::COLL_SYMMETRIC)).transpose()?;
            // Signals lie at addresses of the window.
            let flags = WindowFlags(WindowFlags::COLL_SYMMETRIC.0 | WindowFlags::STRICT_ORDERING.0);
            let rail = endpoint.rail.as_ref().map(|c| c.register(&memory, flags)).transpose()?;
            Ok(Registered { node, rail, memory })
        };
        let registered = each_rank(&*fabric.gpu, driven, register);
        let registered = together(&mut **fabric.lock_exchange(), "register a window", registered)?;
        let mut bases = vec![None; driven.topology.rank_count() as usize];
        for (rank, registered) in driven.ranks.iter().zip(&registered) {
            bases[rank.0 as usize] = Some(DevicePtr(registered.memory.pointer().0));
        }
        let mut peers = || -> Result<(), NcclError> {
            for (rank, registered) in driven.ranks.iter().zip(&registered) {
                let Some(window) = &registered.node else { continue };
                for local in driven.topology.local_ranks() {
                    let peer = driven.topology.rank(driven.topology.node_of(rank), local);
                    if bases[peer.0 as usize].is_none() {
                        bases[peer.0 as usize] = Some(DevicePtr(window.lsa_pointer(local.0, 0)?.0));
                    }
                }
            }
            Ok(())
        };
        let found = peers().map_err(Into::into);
        together(&mut **fabric.lock_exchange(), "addresses of a node", found)?;
        let registered = ManuallyDrop::new(registered);
        Ok(Arc::new(Self { fabric, registered, bases }))
    }

    pub(super) fn fabric(&self) -> &Arc<NcclFabric> {
        &self.fabric
    }

    /// A driven rank's window on its rail; `None` on one node.
    pub(super) fn rail(&self, rank: Rank) -> Option<&RawWindow> {
        self.registered[self.fabric.driven.ranks.index(rank)].rail.as_ref()
    }
}

impl SymmetricMemory for NcclWindow {
    fn base(&self, rank: Rank) -> Option<DevicePtr> {
        self.bases[rank.0 as usize]
    }

    fn multicast(&self, _node: Node) -> Option<DevicePtr> {
        None
    }
}

impl Window for NcclWindow {
    fn connect(self: Arc<Self>, signals_offset: u64, options: NetOptions) -> Result<Arc<dyn Net>> {
        Ok(Arc::new(NcclRails::new(self, signals_offset, options)?))
    }
}

impl Drop for NcclWindow {
    /// Gives everything back once all processes are here: until then peers may return credits into the memory. After a
    /// failure it is leaked, because a kernel may hold it for good, and peers may never come.
    fn drop(&mut self) {
        if self.fabric.has_failed() {
            return;
        }
        if let Err(error) = self.fabric.lock_exchange().barrier("give a window up") {
            tracing::warn!(%error, "a window is not given back");
            self.fabric.abort();
            return;
        }
        // SAFETY: taken once, here; nothing uses it after.
        let registered = unsafe { ManuallyDrop::take(&mut self.registered) };
        drop_each_rank(&*self.fabric.gpu, &self.fabric.driven, registered);
    }
}

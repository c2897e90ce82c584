//! Symmetric memory of NCCL: an allocation per driven rank, registered on its node's communicator and on its rail's.

use super::rails::NcclRails;
use super::step::{conclude, each_rank, end_each_rank, together};
use super::{Memory, NcclFabric, WindowFlags};
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
    /// Allocates and registers. Collective. Where a rank lacks the memory nothing has happened; after a registration that has
    /// failed all communicators are given up, because some ranks may have left them at their deadline.
    pub(super) fn new(fabric: Arc<NcclFabric>, bytes: u64) -> Result<Arc<Self>> {
        let (gpu, driven) = (&*fabric.gpu, &fabric.driven);
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES) as usize;
        let memory = each_rank(gpu, driven, |_| Memory::alloc(&fabric.library, bytes));
        let memory = conclude(gpu, driven, &mut **fabric.lock_exchange(), "allocate a window", memory, |_, memory| {
            drop(memory)
        })?;
        // One order on all ranks: the node's communicator, then the rail's.
        let register = |rank: Rank| -> Result<Registered, NcclError> {
            let endpoint = fabric.endpoint(rank);
            let memory = &memory[driven.ranks.index(rank)];
            // Signals lie at addresses of the window.
            let flags = WindowFlags(WindowFlags::COLL_SYMMETRIC.0 | WindowFlags::STRICT_ORDERING.0);
            let node = endpoint.node.as_ref().map(|c| c.register(memory, WindowFlags::COLL_SYMMETRIC)).transpose()?;
            // The window of the node is given up with its communicator, not before: its end may wait for other ranks.
            let rail = match endpoint.rail.as_ref().map(|c| c.register(memory, flags)).transpose() {
                Ok(rail) => rail,
                Err(error) => {
                    endpoint.abort();
                    return Err(error);
                }
            };
            Ok(Registered { node, rail, memory: memory.clone() })
        };
        let registered = each_rank(gpu, driven, register);
        let give_up = |rank: Rank, registered: Registered| {
            fabric.endpoint(rank).abort();
            drop(registered);
        };
        let registered = conclude(gpu, driven, &mut **fabric.lock_exchange(), "register a window", registered, give_up)
            .inspect_err(|_| fabric.give_up())?;
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
        if let Err(error) = together(&mut **fabric.lock_exchange(), "addresses of a node", found) {
            end_each_rank(gpu, driven, driven.ranks.iter().zip(registered), |_, registered| drop(registered));
            return Err(error);
        }
        drop(memory);
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
        let (gpu, driven) = (&*self.fabric.gpu, &self.fabric.driven);
        end_each_rank(gpu, driven, driven.ranks.iter().zip(registered), |_, registered| drop(registered));
    }
}

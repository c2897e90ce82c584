//! The read phase: pushes and Level 1 sums [TIDE §4.1, App. E alg. 1 l. 2-9].
//!
//! Work comes in **items**: one chunk of one partial, pushed by every rank and summed by every rank, in the same order
//! everywhere. An item's number over all calls selects its staging slot, and is what the staging words count.

use super::{Call, RankGradients, ReduceScatter};
use crate::arena::Region;
use crate::collectives::level_1::SumTask;
use crate::error::Result;
use crate::gpu::{Copy2d, DevicePtr, Event, Fill2d, Stream};
use crate::plan::{LocalRank, Node, Rank, latin_square};
use std::ops::Range;
use tide_device::abi::fault::WaitKind;

/// Which partial of a call a Level 1 item belongs to.
#[derive(Clone, Copy)]
struct Partial {
    pass: u32,
    contributor: u32,
    /// Region and byte offset of the block it is summed into.
    block: (Region, u64),
}

/// A chunk of a partial.
#[derive(Clone, Copy)]
struct Item {
    partial: Partial,
    chunk: u64,
    /// Its number over all calls.
    number: u64,
}

impl ReduceScatter {
    /// Pushes and sums what needs no outbox block of this call to be sent before: all remote partials in place, the first
    /// `n_out` of them where the outbox is partial; then the own ones.
    pub(super) fn read_phase(&mut self, call: &mut Call<'_>) -> Result<()> {
        let node_count = self.topology().node_count();
        for block in 0..self.plan.outbox_block_count.min(self.plan.remote_block_count()) {
            self.sum_remote(call, block)?;
        }
        for pass in 0..self.plan.pass_count {
            let block = (self.regions.spare, self.spare_offset(call.bank, pass));
            let sums = self.level_1(call, Partial { pass, contributor: node_count, block })?;
            call.own_sums.push(sums);
        }
        if self.plan.reads_never_wait() {
            self.record_reads(call)?;
        }
        Ok(())
    }

    /// Pushes and sums remote block `block` of the call, in sending order, into its outbox slot.
    pub(super) fn sum_remote(&mut self, call: &mut Call<'_>, block: u32) -> Result<()> {
        let remote_count = self.topology().node_count() - 1;
        let (pass, contributor) = (block / remote_count, block % remote_count + 1);
        let slot = call.bank * self.plan.outbox_block_count + self.plan.outbox_slot(pass, contributor);
        let place = (self.regions.outbox, u64::from(slot) * self.plan.block_bytes());
        let sums = self.level_1(call, Partial { pass, contributor, block: place })?;
        call.remote_sums.push(sums);
        Ok(())
    }

    /// Records that every rank's gradients have been read.
    pub(super) fn record_reads(&self, call: &mut Call<'_>) -> Result<()> {
        for rank in self.comm.driven().iter() {
            let streams = self.streams(rank);
            self.comm.join(streams.push, [streams.sum])?;
            call.read.push(self.gpu().record(streams.sum)?);
        }
        Ok(())
    }

    pub(super) fn spare_offset(&self, bank: u32, pass: u32) -> u64 {
        u64::from(bank * self.plan.pass_count + pass) * self.plan.block_bytes()
    }

    /// Pushes and sums one partial on every rank, chunk by chunk; gives the event of each rank's sum.
    fn level_1(&mut self, call: &Call<'_>, partial: Partial) -> Result<Vec<Event>> {
        for chunk in 0..self.plan.geometry.chunk_count {
            let item = Item { partial, chunk, number: self.items };
            self.items += 1;
            for rank in self.comm.driven().iter() {
                self.push_item(rank, &call.ranks[self.comm.index(rank)], item)?;
            }
            for rank in self.comm.driven().iter() {
                self.sum_item(rank, &call.ranks[self.comm.index(rank)], item)?;
            }
        }
        self.comm.driven().iter().map(|rank| self.gpu().record(self.streams(rank).sum)).collect()
    }

    /// The node whose ranks an item's rows belong to, as `rank`'s node sees it.
    fn destination(&self, rank: Rank, contributor: u32) -> Node {
        latin_square::destination(self.topology().node_count(), self.topology().node_of(rank), contributor)
    }

    /// One rank's pushes of an item to the local ranks that sum it.
    fn push_item(&mut self, rank: Rank, given: &RankGradients, item: Item) -> Result<()> {
        let topology = self.topology();
        let (me, l) = (topology.local_of(rank), topology.local_rank_count());
        let stream = self.streams(rank).push;
        let mut descriptors = 0;
        // Each rank starts with its right neighbour, so that no owner receives from all at once.
        for step in 1..l {
            let owner = LocalRank((me.0 + step) % l);
            let owner_rank = topology.rank(topology.node_of(rank), owner);
            // I3: the slot's previous item was summed.
            if let Some(value) = (item.number + 1).checked_sub(self.plan.staging_slot_count.into()).filter(|v| *v > 0) {
                let signal = self.regions.staging_free.signal(owner.0);
                let why = (WaitKind::StagingFree, self.place(0));
                self.node.wait(stream, (rank, owner_rank), signal, value, why)?;
            }
            descriptors += self.push_to(stream, rank, owner_rank, given, item)?;
            self.node.raise(stream, owner_rank, self.regions.staging_full.signal(me.0), item.number + 1)?;
        }
        if topology.node_of(rank) == Node(0) && me == LocalRank(0) {
            self.descriptor_count += descriptors;
        }
        Ok(())
    }

    /// Copies an item's rows from `given` into the staging slot of the local rank that sums it: one
    /// strided copy per parameter, and one more where the last row that exists ends within the range.
    fn push_to(&self, stream: Stream, rank: Rank, owner: Rank, given: &RankGradients, item: Item) -> Result<u64> {
        let topology = self.topology();
        let me = topology.local_of(rank);
        let range = self.item_range(owner, item);
        let destination = self.destination(rank, item.partial.contributor);
        let (item_bytes, l) = (self.dtype.bytes(), u64::from(topology.local_rank_count()));
        let pitch = self.staging_pitch_bytes();
        let slot = self.staging_slot_offset(item);
        let owner_local = topology.local_of(owner).0;
        let source_index = u64::from(if me.0 < owner_local { me.0 } else { me.0 - 1 });
        let first_rank = u64::from(topology.rank(destination, LocalRank(0)).0);
        let (mut copies, mut fills) = (Vec::new(), Vec::new());
        for segment in self.sums.segments() {
            let (first, end) = (range.start.max(segment.packed_first), range.end.min(segment.packed_end));
            if first >= end {
                continue;
            }
            let within = first - segment.packed_first;
            let mut copy = |row: u64, rows: u64, elems: u64| {
                let width_bytes = elems * item_bytes;
                let offset = slot + (source_index * l + row) * pitch + (first - range.start) * item_bytes;
                let span = (rows - 1) * pitch + width_bytes;
                let destination = self.arena.at(owner, self.regions.staging, offset, span);
                match given.gradients[segment.gradient as usize] {
                    Some(gradient) => {
                        let element = (first_rank + row) * segment.shard_elems() + within;
                        copies.push(Copy2d {
                            destination,
                            destination_pitch_bytes: pitch,
                            source: DevicePtr(gradient.address.0 + element * item_bytes),
                            source_pitch_bytes: segment.shard_elems() * item_bytes,
                            width_bytes,
                            rows,
                        });
                    }
                    None => fills.push(Fill2d { destination, pitch_bytes: pitch, width_bytes, rows, value: 0 }),
                }
            };
            // Elements of the range that exist, row by row; they only decrease.
            let live = |row: u64| {
                let before = (first_rank + row) * segment.shard_elems() + within;
                segment.live_elems.saturating_sub(before).min(end - first)
            };
            let full_rows = (0..l).take_while(|&row| live(row) == end - first).count() as u64;
            if full_rows > 0 {
                copy(0, full_rows, end - first);
            }
            if full_rows < l && live(full_rows) > 0 {
                copy(full_rows, 1, live(full_rows));
            }
        }
        self.gpu().copy_batch(stream, &copies)?;
        fills.iter().try_for_each(|fill| self.gpu().fill(stream, fill))?;
        Ok((copies.len() + fills.len()) as u64)
    }

    /// The packed positions of an item, in the sub-slice that `owner` sums.
    fn item_range(&self, owner: Rank, item: Item) -> Range<u64> {
        let topology = self.topology();
        let sub_slice = latin_square::sub_slice(topology, topology.local_of(owner), item.partial.contributor);
        self.plan.geometry.chunk_range(item.partial.pass, sub_slice, item.chunk)
    }

    /// Byte offset of an item's slot in the staging region.
    fn staging_slot_offset(&self, item: Item) -> u64 {
        item.number % u64::from(self.plan.staging_slot_count) * self.plan.staging_slot_bytes()
    }

    /// Bytes from one staged row to the next: the capacity of a chunk, a multiple of 64.
    fn staging_pitch_bytes(&self) -> u64 {
        self.plan.geometry.chunk_elems * self.dtype.bytes()
    }

    /// One rank's sum of an item.
    fn sum_item(&self, rank: Rank, given: &RankGradients, item: Item) -> Result<()> {
        let topology = self.topology();
        let me = topology.local_of(rank);
        let stream = self.streams(rank).sum;
        let others = || self.arena.node_ranks(rank).filter(move |(l, _)| *l != me);
        for (local, pusher) in others() {
            let signal = self.regions.staging_full.signal(local.0);
            let why = (WaitKind::StagingFull, self.place(0));
            self.node.wait(stream, (rank, pusher), signal, item.number + 1, why)?;
        }
        if !self.item_range(rank, item).is_empty() {
            self.launch_sum(stream, rank, given, item)?;
        }
        for (_, pusher) in others() {
            self.node.raise(stream, pusher, self.regions.staging_free.signal(me.0), item.number + 1)?;
        }
        Ok(())
    }

    fn launch_sum(&self, stream: Stream, rank: Rank, given: &RankGradients, item: Item) -> Result<()> {
        let (partial, range) = (item.partial, self.item_range(rank, item));
        let topology = self.topology();
        let l = topology.local_rank_count();
        let geometry = &self.plan.geometry;
        let pitch = self.staging_pitch_bytes();
        let (region, block_offset) = partial.block;
        let out_offset = block_offset + 4 * item.chunk * geometry.chunk_elems;
        let out_span = 4 * (u64::from(l - 1) * geometry.part_elems + (range.end - range.start));
        let slot = self.staging_slot_offset(item);
        let task = SumTask {
            rank,
            own: &given.gradients,
            staging: self.arena.at(rank, self.regions.staging, slot, self.plan.staging_slot_bytes()),
            source_count: l - 1,
            source_pitch_bytes: u64::from(l) * pitch,
            row_pitch_bytes: pitch,
            packed: range,
            first_rank: topology.rank(self.destination(rank, partial.contributor), LocalRank(0)),
            row_count: l,
            out: self.arena.at(rank, region, out_offset, out_span),
            out_pitch_elems: geometry.part_elems,
        };
        // SAFETY: addresses of the arena, which lives as long as `self`; the slot is full, as the stream has awaited;
        // gradients as checked by `check_gradients`, kept by the caller until the read event.
        unsafe { self.sums.launch(stream, &task) }
    }
}

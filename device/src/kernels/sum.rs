//! Level 1 of the reduce-scatter: the local contributions of a node into one fp32 partial [TIDE §4.1].
//!
//! Launch: any grid; a block is one producer warp and one or more consumer warps; dynamic shared memory of
//! [`shared_bytes`].
//!
//! Inputs: `staging`: `[source_count][row_count]` rows of `row_elems` elements, bf16 or fp32, global, which copy engines
//! filled; `gradients`: the rank's own gradients, read where they lie through `segments`.
//! Output: `out`: `[row_count]` rows of `row_elems` fp32.
//!
//! ```text
//! item = (row, tile), dealt to the blocks in turn
//! producer (one thread):   for each item, for each source: wait stage free; bulk-load the tile; next stage
//! consumer (each thread):  for each item: load own units; for each source: wait stage full; add; free the stage;
//!                          add own units; zero what lies past D_p; store
//! ```
//!
//! Invariants: I3, a stage is reloaded only after every consumer freed it. The sum is in local-rank order, own last,
//! whatever grid, block, tile and chunk are: an element is summed by one thread in registers.

use super::gradient::{Gradient, UNIT_ELEMS};
use super::numerics::{ADD_IDENTITY, add4};
use crate::abi::fault::{Operation, WaitKind, WaitTag};
use crate::abi::params::SumParams;
use crate::abi::segment::Segment;
use crate::arch::machine::WaitScope;
use crate::arch::mbarrier::{self, Mbarrier};
use crate::arch::shared::SharedAddr;
use crate::arch::{barrier, bulk, fence, global, shared, thread};
use crate::wait::{self, Look};

/// Units that a consumer holds in registers: a tile is `consumers × UNITS` units.
pub const UNITS: usize = 8;

/// Repeats `body` for each of a consumer's units. In each copy `k` is a constant: arrays that are indexed at run time
/// lie in local memory, not in registers.
macro_rules! for_each_unit {
    ($k:ident => $body:block) => {
        for_each_unit!([0, 1, 2, 3, 4, 5, 6, 7] $k => $body)
    };
    ([$($index:literal),+] $k:ident => $body:block) => {{
        const _: () = assert!([$($index),+].len() == UNITS);
        $({
            let $k: usize = $index;
            $body
        })+
    }};
}

/// Elements of a tile, for `consumers` consumer threads.
pub const fn tile_elems(consumers: u32) -> u32 {
    consumers * UNITS as u32 * UNIT_ELEMS
}

/// Dynamic shared memory, bytes: the stages, then their full and free barriers.
pub const fn shared_bytes(consumers: u32, stage_count: u32, item_bytes: u32) -> u32 {
    stage_count * (tile_elems(consumers) * item_bytes + 2 * mbarrier::BYTES)
}

/// The ring of stages in shared memory.
#[derive(Clone, Copy)]
struct Ring {
    stages: SharedAddr,
    full: SharedAddr,
    free: SharedAddr,
    stage_bytes: u32,
    stage_count: u32,
}

/// Where a producer or consumer stands in the ring. `lap` is the parity of the laps done.
#[derive(Clone, Copy)]
struct Place {
    stage: u32,
    lap: u32,
}

impl Ring {
    #[inline(always)]
    fn new<T: Gradient>(stage_count: u32, consumers: u32) -> Self {
        let stages = shared::dynamic();
        let stage_bytes = tile_elems(consumers) * T::BYTES;
        let full = stages.add(stage_count * stage_bytes);
        Self { stages, full, free: full.add(stage_count * mbarrier::BYTES), stage_bytes, stage_count }
    }

    const START: Place = Place { stage: 0, lap: 0 };

    #[inline(always)]
    fn next(&self, place: Place) -> Place {
        if place.stage + 1 == self.stage_count {
            Place { stage: 0, lap: place.lap ^ 1 }
        } else {
            Place { stage: place.stage + 1, lap: place.lap }
        }
    }

    #[inline(always)]
    fn stage(&self, place: Place) -> SharedAddr {
        self.stages.add(place.stage * self.stage_bytes)
    }

    #[inline(always)]
    fn full(&self, place: Place) -> Mbarrier {
        Mbarrier::at(self.full.add(place.stage * mbarrier::BYTES))
    }

    #[inline(always)]
    fn free(&self, place: Place) -> Mbarrier {
        Mbarrier::at(self.free.add(place.stage * mbarrier::BYTES))
    }
}

/// One tile of one row.
#[derive(Clone, Copy)]
struct Item {
    row: u32,
    /// First element, relative to the row's first.
    first: u64,
    elems: u32,
}

/// The items of this block, in order.
struct Items {
    next: u64,
    count: u64,
    tiles_per_row: u64,
    tile_elems: u64,
    row_elems: u64,
}

impl Items {
    #[inline(always)]
    fn of_block(p: &SumParams, tile_elems: u32) -> Self {
        let tile_elems = u64::from(tile_elems);
        let tiles_per_row = p.row_elems.div_ceil(tile_elems);
        Self {
            next: u64::from(thread::block_idx_x()),
            count: tiles_per_row * u64::from(p.row_count),
            tiles_per_row,
            tile_elems,
            row_elems: p.row_elems,
        }
    }
}

impl Iterator for Items {
    type Item = Item;

    #[inline(always)]
    fn next(&mut self) -> Option<Item> {
        if self.next >= self.count {
            return None;
        }
        let (row, tile) = (self.next / self.tiles_per_row, self.next % self.tiles_per_row);
        self.next += u64::from(thread::grid_dim_x());
        let first = tile * self.tile_elems;
        let elems = (self.row_elems - first).min(self.tile_elems) as u32;
        Some(Item { row: row as u32, first, elems })
    }
}

/// The kernel.
///
/// # Safety
/// `params` points to a block that holds what [`SumParams`] states; launched as the module header says.
#[inline(always)]
pub unsafe fn sum<T: Gradient>(params: *const SumParams) {
    // SAFETY: the caller's promise; the block is read-only during the launch.
    let p = unsafe { &*params };
    let consumers = thread::block_dim_x() - thread::WARP_SIZE;
    let ring = Ring::new::<T>(p.stage_count, consumers);
    if thread::thread_idx_x() == 0 {
        let mut place = Ring::START;
        for _ in 0..p.stage_count {
            // SAFETY: inside the shared memory of `shared_bytes`; nothing uses it before the block barrier below.
            unsafe {
                ring.full(place).init(1);
                ring.free(place).init(consumers);
            }
            place = ring.next(place);
        }
        fence::mbarrier_init();
    }
    barrier::sync_block();
    if thread::warp_idx() == 0 {
        if thread::is_warp_leader() {
            produce::<T>(p, ring, consumers);
        }
    } else {
        consume::<T>(p, ring, consumers);
    }
}

#[inline(always)]
fn wait_stage(p: &SumParams, barrier: Mbarrier, parity: u32, kind: WaitKind) {
    wait::until(
        p.deadline,
        WaitScope::Block,
        || {
            let tag = WaitTag {
                kind: kind as u32,
                operation: Operation::ReduceScatter as u32,
                rank: p.rank,
                peer: p.rank,
                wave: 0,
                round: 0,
                epoch: 0,
            };
            (tag, 0, u64::from(parity))
        },
        // SAFETY: initialised by thread 0 before the block barrier.
        || Look { holds: unsafe { barrier.try_wait_parity(parity) }, seen: u64::from(parity ^ 1) },
    );
}

#[inline(always)]
fn produce<T: Gradient>(p: &SumParams, ring: Ring, consumers: u32) {
    let mut place = Ring::START;
    for item in Items::of_block(p, tile_elems(consumers)) {
        let row = p.staging + u64::from(item.row) * p.row_pitch_bytes + item.first * u64::from(T::BYTES);
        let bytes = (item.elems * T::BYTES).next_multiple_of(bulk::ALIGN_BYTES);
        for source in 0..p.source_count {
            // A fresh barrier counts as complete for the parity before phase 0: the first lap does not wait.
            // ORDER: acquire of the consumers' arrivals: their reads of the stage are done.
            wait_stage(p, ring.free(place), place.lap ^ 1, WaitKind::StageFree);
            // SAFETY: the stage is free and holds a tile; the row is padded to a multiple of 16 bytes by its pitch.
            unsafe {
                ring.full(place).arrive_expect_tx(bytes);
                bulk::load(ring.stage(place), row + u64::from(source) * p.source_pitch_bytes, bytes, ring.full(place));
            }
            place = ring.next(place);
        }
    }
}

#[inline(always)]
fn consume<T: Gradient>(p: &SumParams, ring: Ring, consumers: u32) {
    let consumer = thread::thread_idx_x() - thread::WARP_SIZE;
    let unit_of = |k: usize| (consumer + k as u32 * consumers) * UNIT_ELEMS;
    let mut place = Ring::START;
    for item in Items::of_block(p, tile_elems(consumers)) {
        // Own units first: their latency hides behind the waits for the stages.
        let mut own = [T::ZERO; UNITS];
        let mut live = [0_u32; UNITS];
        let mut segments = OwnSlice::new(p, item.row);
        for_each_unit!(k => {
            if unit_of(k) < item.elems {
                (own[k], live[k]) = segments.unit::<T>(p.packed_first + item.first + u64::from(unit_of(k)));
            }
        });
        let mut sums = [[ADD_IDENTITY; UNIT_ELEMS as usize]; UNITS];
        for _ in 0..p.source_count {
            // ORDER: acquire of the bulk load's completion: the tile is readable.
            wait_stage(p, ring.full(place), place.lap, WaitKind::StageFull);
            for_each_unit!(k => {
                if unit_of(k) < item.elems {
                    // SAFETY: inside the loaded part of the stage, which is a multiple of a unit.
                    let staged = unsafe { T::load_shared(ring.stage(place).add(unit_of(k) * T::BYTES)) };
                    sums[k] = add4(sums[k], T::widen(staged));
                }
            });
            // SAFETY: one arrival per consumer and lap, as `init` counted.
            unsafe { ring.free(place).arrive() };
            place = ring.next(place);
        }
        let out = p.out + 4 * (u64::from(item.row) * p.out_pitch_elems + item.first);
        for_each_unit!(k => {
            if unit_of(k) < item.elems {
                let value = add4(sums[k], T::widen(own[k]));
                store_unit(out + 4 * u64::from(unit_of(k)), value, live[k], item.elems - unit_of(k));
            }
        });
    }
}

/// Stores the first `elems` of a unit; lanes that `live` lacks lie past `D_p` and are zero.
#[inline(always)]
fn store_unit(address: u64, value: [f32; 4], live: u32, elems: u32) {
    let lane = |i: u32| if live >> i & 1 == 1 { value[i as usize] } else { 0.0 };
    let value = [lane(0), lane(1), lane(2), lane(3)];
    if elems >= UNIT_ELEMS {
        // SAFETY: the partial is 16-aligned, its pitch and the unit's place multiples of 4 elements.
        unsafe { global::store_v4_f32(address, value) };
    } else {
        for i in 0..UNIT_ELEMS {
            if i < elems {
                // SAFETY: as above, for one element.
                unsafe { global::store_f32(address + 4 * u64::from(i), value[i as usize]) };
            }
        }
    }
}

/// The rank's own slice of one row, read through the segment table. Positions must not decrease.
struct OwnSlice<'a> {
    p: &'a SumParams,
    destination: u64,
    next_segment: u32,
    packed_first: u64,
    packed_end: u64,
    /// Address of the element at `packed_first`, or 0 for a gradient that is all zeros.
    address: u64,
    /// Elements from `packed_first` on that exist.
    live_elems: u64,
}

impl<'a> OwnSlice<'a> {
    #[inline(always)]
    fn new(p: &'a SumParams, row: u32) -> Self {
        let destination = u64::from(p.first_rank + row);
        let mut slice =
            Self { p, destination, next_segment: 0, packed_first: 0, packed_end: 0, address: 0, live_elems: 0 };
        slice.next_segment = slice.first_segment_at(p.packed_first);
        slice
    }

    #[inline(always)]
    fn segment(&self, index: u32) -> Segment {
        // SAFETY: `segments` has `segment_count` entries and positions are inside the packed row, so the search ends.
        unsafe { *(self.p.segments as *const Segment).add(index as usize) }
    }

    /// The first segment that ends after `packed`, by bisection.
    #[inline(always)]
    fn first_segment_at(&self, packed: u64) -> u32 {
        let (mut low, mut high) = (0, self.p.segment_count);
        while low < high {
            let middle = (low + high) / 2;
            if self.segment(middle).packed_end <= packed { low = middle + 1 } else { high = middle }
        }
        low
    }

    #[inline(always)]
    fn advance<T: Gradient>(&mut self, packed: u64) {
        while packed >= self.packed_end {
            let segment = self.segment(self.next_segment);
            self.next_segment += 1;
            let skipped = self.destination * segment.shard_elems();
            // SAFETY: a segment's gradient is below the count of gradients.
            let base = unsafe { *(&raw const self.p.gradients).cast::<u64>().add(segment.gradient as usize) };
            self.packed_first = segment.packed_first;
            self.packed_end = segment.packed_end;
            self.live_elems = segment.live_elems.saturating_sub(skipped);
            self.address = if base == 0 { 0 } else { base + skipped * u64::from(T::BYTES) };
        }
    }

    /// The unit at `packed`, and a bit for each lane that exists.
    #[inline(always)]
    fn unit<T: Gradient>(&mut self, packed: u64) -> (T::Unit, u32) {
        self.advance::<T>(packed);
        let within = packed - self.packed_first;
        let address = self.address + within * u64::from(T::BYTES);
        let whole =
            within + u64::from(UNIT_ELEMS) <= self.live_elems && packed + u64::from(UNIT_ELEMS) <= self.packed_end;
        if whole && self.address != 0 && address.is_multiple_of(u64::from(T::UNIT_BYTES)) {
            // SAFETY: four elements that exist, aligned.
            (unsafe { T::load_global(address) }, 0b1111)
        } else {
            self.unit_by_lanes::<T>(packed)
        }
    }

    /// A unit that is unaligned, or crosses the end of a parameter, of its rows or of the packed row.
    #[inline(always)]
    fn unit_by_lanes<T: Gradient>(&mut self, packed: u64) -> (T::Unit, u32) {
        let (mut unit, mut live) = (T::ZERO, 0);
        for lane in 0..UNIT_ELEMS {
            let position = packed + u64::from(lane);
            if position >= self.p.packed_first + self.p.row_elems {
                break;
            }
            self.advance::<T>(position);
            let within = position - self.packed_first;
            if within < self.live_elems {
                live |= 1 << lane;
                if self.address != 0 {
                    // SAFETY: an element that exists.
                    unit = unsafe { T::with_lane(unit, lane, self.address + within * u64::from(T::BYTES)) };
                }
            }
        }
        (unit, live)
    }
}

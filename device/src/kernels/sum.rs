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
    let consumer = Consumer { index: thread::thread_idx_x() - thread::WARP_SIZE, count: consumers };
    let mut place = Ring::START;
    let mut cursor = Cursor::NOWHERE;
    for item in Items::of_block(p, tile_elems(consumers)) {
        // Whole tiles, nearly all of them, go without a check per unit.
        if item.elems == tile_elems(consumers) {
            place = consume_tile::<T, true>(p, ring, place, consumer, &mut cursor, item);
        } else {
            place = consume_tile::<T, false>(p, ring, place, consumer, &mut cursor, item);
        }
    }
}

/// Which units of a tile a thread takes: unit `index + k·count` for each `k`.
#[derive(Clone, Copy)]
struct Consumer {
    index: u32,
    count: u32,
}

impl Consumer {
    /// First element of the thread's `k`-th unit.
    #[inline(always)]
    fn unit(self, k: usize) -> u32 {
        (self.index + k as u32 * self.count) * UNIT_ELEMS
    }
}

#[inline(always)]
fn consume_tile<T: Gradient, const WHOLE: bool>(
    p: &SumParams,
    ring: Ring,
    mut place: Place,
    consumer: Consumer,
    cursor: &mut Cursor,
    item: Item,
) -> Place {
    let exists = |k: usize| WHOLE || consumer.unit(k) < item.elems;
    // Own units first: their latency hides behind the waits for the stages.
    let (own, live) = load_own::<T, WHOLE>(p, consumer, cursor, item);
    let mut sums = [[ADD_IDENTITY; UNIT_ELEMS as usize]; UNITS];
    for _ in 0..p.source_count {
        // ORDER: acquire of the bulk load's completion: the tile is readable.
        wait_stage(p, ring.full(place), place.lap, WaitKind::StageFull);
        let stage = ring.stage(place);
        for_each_unit!(k => {
            if exists(k) {
                // SAFETY: inside the loaded part of the stage, which is a multiple of a unit.
                let staged = unsafe { T::load_shared(stage.add(consumer.unit(k) * T::BYTES)) };
                sums[k] = add4(sums[k], T::widen(staged));
            }
        });
        // SAFETY: one arrival per consumer and lap, as `init` counted.
        unsafe { ring.free(place).arrive() };
        place = ring.next(place);
    }
    let out = p.out + 4 * (u64::from(item.row) * p.out_pitch_elems + item.first);
    for_each_unit!(k => {
        if exists(k) {
            let value = add4(sums[k], T::widen(own[k]));
            let elems = if WHOLE { UNIT_ELEMS } else { item.elems - consumer.unit(k) };
            store_unit(out + 4 * u64::from(consumer.unit(k)), value, live >> (UNIT_ELEMS * k as u32), elems);
        }
    });
    place
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

/// Bits of a unit whose elements all exist.
const ALL_LANES: u32 = (1 << UNIT_ELEMS) - 1;
const _: () = assert!(UNITS as u32 * UNIT_ELEMS == u32::BITS, "a bit for each element of a thread's units");

/// The thread's units of the rank's own slice, and a bit for each element that exists.
#[inline(always)]
fn load_own<T: Gradient, const WHOLE: bool>(
    p: &SumParams,
    consumer: Consumer,
    cursor: &mut Cursor,
    item: Item,
) -> ([T::Unit; UNITS], u32) {
    let first = p.packed_first + item.first;
    let (mut own, mut live, mut ragged) = ([T::ZERO; UNITS], 0, 0_u32);
    if cursor.row != item.row {
        *cursor = Cursor::at(p, item.row, first);
    }
    for_each_unit!(k => {
        if WHOLE || consumer.unit(k) < item.elems {
            let packed = first + u64::from(consumer.unit(k));
            cursor.advance::<T>(p, packed);
            match cursor.whole_unit::<T>(packed) {
                Some(unit) => {
                    own[k] = unit;
                    live |= ALL_LANES << (UNIT_ELEMS * k as u32);
                }
                None => ragged |= 1 << k,
            }
        }
    });
    // What crosses the end of a parameter, of its rows or of the packed row: few units, in code that stands once.
    while ragged != 0 {
        let index = ragged.trailing_zeros();
        ragged &= ragged - 1;
        let within = (index * consumer.count + consumer.index) * UNIT_ELEMS;
        let (unit, lanes) = ragged_unit::<T>(p, item.row, first + u64::from(within), item.elems - within);
        live |= lanes << (UNIT_ELEMS * index);
        for_each_unit!(k => {
            if k as u32 == index {
                own[k] = unit;
            }
        });
    }
    (own, live)
}

/// Where a thread stands in the rank's own slice of one row. Positions only grow within a row.
struct Cursor {
    row: u32,
    next_segment: u32,
    packed_first: u64,
    packed_end: u64,
    /// Address of the element at `packed_first`, or 0 for a gradient that is all zeros.
    address: u64,
    /// Elements from `packed_first` on that exist.
    live_elems: u64,
}

impl Cursor {
    const NOWHERE: Self =
        Self { row: u32::MAX, next_segment: 0, packed_first: 0, packed_end: 0, address: 0, live_elems: 0 };

    /// In the segment of `packed` or right before it.
    #[inline(always)]
    fn at(p: &SumParams, row: u32, packed: u64) -> Self {
        // The first segment that ends after `packed`, by bisection.
        let (mut low, mut high) = (0, p.segment_count);
        while low < high {
            let middle = (low + high) / 2;
            if segment(p, middle).packed_end <= packed { low = middle + 1 } else { high = middle }
        }
        Self { row, next_segment: low, ..Self::NOWHERE }
    }

    /// Goes on to the segment that holds `packed`.
    #[inline(always)]
    fn advance<T: Gradient>(&mut self, p: &SumParams, packed: u64) {
        while packed >= self.packed_end {
            let segment = segment(p, self.next_segment);
            self.next_segment += 1;
            let skipped = u64::from(p.first_rank + self.row) * segment.shard_elems();
            // SAFETY: a segment's gradient is below the count of gradients.
            let base = unsafe { *(&raw const p.gradients).cast::<u64>().add(segment.gradient as usize) };
            self.packed_first = segment.packed_first;
            self.packed_end = segment.packed_end;
            self.live_elems = segment.live_elems.saturating_sub(skipped);
            self.address = if base == 0 { 0 } else { base + skipped * u64::from(T::BYTES) };
        }
    }

    /// The unit at `packed` if all of it exists in this segment: zeros, without a load, where the gradient is all zeros.
    #[inline(always)]
    fn whole_unit<T: Gradient>(&self, packed: u64) -> Option<T::Unit> {
        let within = packed - self.packed_first;
        let end = within + u64::from(UNIT_ELEMS);
        if end > self.live_elems || end > self.packed_end - self.packed_first {
            return None;
        }
        if self.address == 0 {
            return Some(T::ZERO);
        }
        let address = self.address + within * u64::from(T::BYTES);
        if address.is_multiple_of(u64::from(T::UNIT_BYTES)) {
            // SAFETY: four elements that exist, aligned.
            return Some(unsafe { T::load_global(address) });
        }
        let mut unit = T::ZERO;
        for lane in 0..UNIT_ELEMS {
            // SAFETY: an element that exists.
            unit = unsafe { T::with_lane(unit, lane, address + u64::from(lane * T::BYTES)) };
        }
        Some(unit)
    }
}

#[inline(always)]
fn segment(p: &SumParams, index: u32) -> Segment {
    // SAFETY: `segments` has `segment_count` entries, and positions are inside the packed row, so searches end in it.
    unsafe { *(p.segments as *const Segment).add(index as usize) }
}

/// A unit lane by lane, of which `elems` lie in the row; with a bit for each that exists.
#[inline(always)]
fn ragged_unit<T: Gradient>(p: &SumParams, row: u32, packed: u64, elems: u32) -> (T::Unit, u32) {
    let (mut unit, mut live) = (T::ZERO, 0);
    let mut cursor = Cursor::at(p, row, packed);
    for lane in 0..UNIT_ELEMS {
        if lane < elems {
            let position = packed + u64::from(lane);
            cursor.advance::<T>(p, position);
            let within = position - cursor.packed_first;
            if within < cursor.live_elems {
                live |= 1 << lane;
                if cursor.address != 0 {
                    // SAFETY: an element that exists.
                    unit = unsafe { T::with_lane(unit, lane, cursor.address + within * u64::from(T::BYTES)) };
                }
            }
        }
    }
    (unit, live)
}

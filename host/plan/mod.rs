//! Plans: everything about a collective that can be known before the first byte moves.
//!
//! A plan says which rank reduces and sends which piece, in which wave and round, through which
//! block, and how many bytes that takes. It is arithmetic over the topology, the group's layout and
//! a few options; no device, no clock and no I/O. All ranks compute the same plan, and compare
//! [`ReduceScatterPlan::hash`] to be sure of it.
//!
//! A rank's packed fp32 row of `E` elements is cut into `L` *sub-slices*, one for each local rank of
//! a contributor; each of the `n_part` *passes* takes a part of every sub-slice, in *chunks* of what
//! one staging slot holds ([`Geometry`]). A *block* is what one local rank sends to one rank in one
//! pass: `L` rows, one for each rank of the destination node, of one sub-slice each [TIDE §4.2].

pub mod all_gather;
pub mod connections;
pub mod lane;
pub mod latin_square;
pub mod memory;
pub mod outbox;
pub mod sizing;
pub mod topology;
pub mod validate;
pub mod waves;

use std::fmt;
use std::ops::Range;

use crate::layout::GroupLayout;

pub use all_gather::{GatherRound, gather_rounds};
pub use memory::{MemoryRegion, ReduceScatterMemory};
pub use sizing::{Rates, Sizing};
pub use topology::{LocalRank, Node, Rank, RankRange, Topology};
pub use waves::Wave;

/// What sub-slices and chunks are multiples of, in elements: 128 bytes of fp32 and 64 of bf16, so
/// that every row of a block and of a staging slot starts on the 16 bytes that a bulk copy or a
/// four-element multicast load wants.
pub const SUB_SLICE_ALIGN_ELEMS: u64 = 32;

/// The most passes of a plan; the exhaustive validation covers them all [TIDE App. D].
pub const PASS_COUNT_MAX: u32 = 4;

/// The most CTAs of a kernel: more than any GPU holds at once.
pub const CTA_COUNT_MAX: u32 = 4096;

/// The size of a staging slot where the options name none: 32 MiB, in bytes.
pub const CHUNK_BYTES_DEFAULT: u64 = 32 << 20;

/// The transfers of a round where the options name no width: the paper's `k` on eight nodes
/// [TIDE §6.3].
pub const ROUND_WIDTH_DEFAULT: u32 = 4;

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum PlanError {
    #[error("{found} nodes: a plan needs 1 to {max}", max = topology::NODE_COUNT_MAX)]
    NodeCount { found: u32 },
    #[error("{found} local ranks on a node: a plan needs 1 to {max}", max = topology::LOCAL_RANK_COUNT_MAX)]
    LocalRankCount { found: u32 },
    #[error(
        "nodes hold unequal numbers of ranks: node {first_node} has {first_count} and node {node} has {count}; \
         every node must hold the same number"
    )]
    UnequalNodes { first_node: u32, first_count: u32, node: u32, count: u32 },
    #[error("ranks of node {node} report {reported} ranks on it, but {counted} name it as theirs")]
    LocalWorldSize { node: u32, reported: u32, counted: u64 },
    #[error(
        "ranks are not node-major: rank {rank} runs on node {found} where rank order puts node {expected}; \
         number all ranks of a node consecutively"
    )]
    NotNodeMajor { rank: u32, found: u32, expected: u32 },
    #[error("the layout is over {layout} ranks and the topology has {topology}")]
    RankCount { layout: u64, topology: u32 },
    #[error("wave width {found}: it must be 1 to {local_rank_count}, the local ranks of a node")]
    WaveWidth { found: u32, local_rank_count: u32 },
    #[error(
        "wave width {wave_width} over {node_count} nodes of {local_rank_count} local ranks: wave {wave} holds \
         contributors {start} to {last}, of which {first} and {second} both bring sub-slice 0 to local rank \
         {local_rank}; a width that divides {local_rank_count} never collides",
        start = contributors.start,
        last = contributors.end - 1
    )]
    Collision {
        node_count: u32,
        local_rank_count: u32,
        wave_width: u32,
        wave: u32,
        contributors: Range<u32>,
        first: u32,
        second: u32,
        local_rank: u32,
    },
    #[error("round width 0: a round carries at least one transfer")]
    RoundWidth,
    #[error("pass count {found}: a plan makes 1 to {max} passes", max = PASS_COUNT_MAX)]
    PassCount { found: u32 },
    #[error("staging slot count 0: Level 1 needs at least one staging slot")]
    StagingSlotCount,
    #[error("sum CTA count {found}: Level 1 takes 1 to {CTA_COUNT_MAX} CTAs")]
    SumCtaCount { found: u32 },
    #[error("landing CTA count {found}: a landing takes 1 to {CTA_COUNT_MAX} CTAs")]
    LandCtaCount { found: u32 },
    #[error("chunk size {found} bytes: the smallest staging slot here takes {min} bytes")]
    ChunkBytes { found: u64, min: u64 },
    #[error("gradients of {found} bytes an element: they must have 2 or 4")]
    GradBytes { found: u64 },
    #[error("rate {name} is {value}: it must be positive and finite")]
    Rate { name: &'static str, value: f64 },
    #[error("a packed row of {packed_elems} elements takes more bytes with these options than 64 bits can count")]
    TooLarge { packed_elems: u64 },
}

/// Where gradients lie while a reduce-scatter reads them [TIDE §5.3].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Mode {
    /// In autograd's storage; the outbox holds every remote block, so reads never wait for the
    /// network.
    #[default]
    InPlace,
    /// In a vacated all-gather ring slot; the outbox holds two rounds.
    SlotReuse,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InPlace => "in-place",
            Self::SlotReuse => "slot-reuse",
        })
    }
}

/// What a caller may choose about a reduce-scatter. Only the topology and the wave width decide the
/// order of additions; all else leaves the result bitwise as it is [TIDE §4.3].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ReduceScatterOptions {
    /// `W_wave`: contributors of one wave; `L` if not given.
    pub wave_width: Option<u32>,
    /// `k`: transfers of one round at most; the lesser of [`ROUND_WIDTH_DEFAULT`] and `M − 1` if
    /// not given.
    pub round_width: Option<u32>,
    /// `n_part`: in how many passes the packed row is reduced, 1 to [`PASS_COUNT_MAX`].
    pub pass_count: u32,
    /// `n_stg`: staging slots of Level 1.
    pub staging_slot_count: u32,
    /// Size of one staging slot in bytes, all `L − 1` sources and `L` rows together; an upper bound,
    /// [`CHUNK_BYTES_DEFAULT`] if not given.
    pub chunk_bytes: Option<u64>,
    /// `C_sum`: CTAs of a Level 1 sum.
    pub sum_cta_count: u32,
    /// `C_mc`: CTAs of a landing.
    pub land_cta_count: u32,
    /// Where gradients lie meanwhile.
    pub mode: Mode,
}

impl Default for ReduceScatterOptions {
    fn default() -> Self {
        Self {
            wave_width: None,
            round_width: None,
            pass_count: 1,
            staging_slot_count: 2,
            chunk_bytes: None,
            sum_cta_count: 4,
            land_cta_count: 4,
            mode: Mode::InPlace,
        }
    }
}

/// How the packed fp32 row is cut. All in elements.
///
/// The row is `L` *sub-slices*, whose number decides who sums an element and in which order its contributors
/// are added [TIDE §4.2 eq. 7]. So the cut into sub-slices depends on `E` and `L` alone; a pass takes a *part* of every
/// sub-slice, and a chunk a piece of a part. Capacities are equal, of which the end of a sub-slice or of the row may leave
/// some, or all, unused: ranges are clipped to both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// `E`: elements of the packed row.
    pub packed_elems: u64,
    /// `E_sub`: capacity of a sub-slice, a multiple of [`SUB_SLICE_ALIGN_ELEMS`] [TIDE §4.2].
    pub sub_slice_elems: u64,
    /// Elements of a sub-slice that one pass takes: a multiple of [`SUB_SLICE_ALIGN_ELEMS`]. All of it with one pass.
    pub part_elems: u64,
    /// Elements of a part that one staging slot holds: a multiple of
    /// [`SUB_SLICE_ALIGN_ELEMS`], at least that many, and, unless the row is empty, no more than a part.
    pub chunk_elems: u64,
    /// Chunks of a part.
    pub chunk_count: u64,
}

impl Geometry {
    /// Cuts a row of `packed_elems` elements.
    fn new(
        topology: Topology,
        packed_elems: u64,
        grad_bytes: u64,
        pass_count: u32,
        chunk_bytes: u64,
    ) -> Result<Self, PlanError> {
        let l = u64::from(topology.local_rank_count());
        let sub_slice_elems = packed_elems
            .div_ceil(l)
            .checked_next_multiple_of(SUB_SLICE_ALIGN_ELEMS)
            .filter(|elems| elems.checked_mul(l).is_some_and(|row| row.checked_mul(8).is_some()))
            .ok_or(PlanError::TooLarge { packed_elems })?;
        let part_elems = sub_slice_elems.div_ceil(pass_count.into()).next_multiple_of(SUB_SLICE_ALIGN_ELEMS);
        // A lone local rank stages nothing, so no size of a slot bounds its chunks.
        let staged_bytes_per_elem = (l - 1) * l * grad_bytes;
        let chunk_elems = match chunk_bytes.checked_div(staged_bytes_per_elem) {
            None => part_elems,
            Some(elems) if elems < SUB_SLICE_ALIGN_ELEMS => {
                let min = staged_bytes_per_elem * SUB_SLICE_ALIGN_ELEMS;
                return Err(PlanError::ChunkBytes { found: chunk_bytes, min });
            }
            Some(elems) => (elems - elems % SUB_SLICE_ALIGN_ELEMS).min(part_elems),
        }
        .max(SUB_SLICE_ALIGN_ELEMS);
        let chunk_count = part_elems.div_ceil(chunk_elems);
        Ok(Self { packed_elems, sub_slice_elems, part_elems, chunk_elems, chunk_count })
    }

    /// Positions `start..end` of a sub-slice, as far as it and the row have them.
    fn clipped(&self, sub_slice: u32, start: u64, end: u64) -> Range<u64> {
        let first = u64::from(sub_slice) * self.sub_slice_elems;
        let at = |within: u64| (first + within.min(self.sub_slice_elems)).min(self.packed_elems);
        at(start)..at(end)
    }

    /// The packed positions that a pass takes of a sub-slice, clipped to sub-slice and row: may be empty.
    pub fn part_range(&self, pass: u32, sub_slice: u32) -> Range<u64> {
        let start = u64::from(pass) * self.part_elems;
        self.clipped(sub_slice, start, start + self.part_elems)
    }

    /// The packed positions of chunk `chunk` of a sub-slice's part in a pass, clipped likewise: may be empty.
    pub fn chunk_range(&self, pass: u32, sub_slice: u32, chunk: u64) -> Range<u64> {
        debug_assert!(chunk < self.chunk_count);
        let part = u64::from(pass) * self.part_elems;
        let (start, end) = (chunk * self.chunk_elems, ((chunk + 1) * self.chunk_elems).min(self.part_elems));
        self.clipped(sub_slice, part + start, part + end)
    }

    /// Elements of a block of outbox, inbox or spare, which is one pass's: `L` rows of a part.
    pub fn block_elems(&self, local_rank_count: u32) -> u64 {
        u64::from(local_rank_count) * self.part_elems
    }

    /// Bytes of the row with its alignment, in fp32, over all passes: the `S_fp32` over which the memory bounds hold.
    pub fn aligned_row_bytes(&self, local_rank_count: u32, pass_count: u32) -> u64 {
        4 * u64::from(pass_count) * self.block_elems(local_rank_count)
    }

    /// Elements of one row of a staging slot: a chunk, or nothing where there is nothing to stage.
    fn staged_elems(&self) -> u64 {
        self.chunk_elems.min(self.part_elems)
    }
}

/// A reduce-scatter of one group, laid down to the last block.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ReduceScatterPlan {
    /// Who takes part.
    pub topology: Topology,
    /// `W_wave`: contributors of one wave.
    pub wave_width: u32,
    /// `k`: transfers of one round at most.
    pub round_width: u32,
    /// `n_part`: passes over the packed row, each with all waves.
    pub pass_count: u32,
    /// `n_par`: inbox generations, 1 or 2.
    pub generation_count: u32,
    /// The waves of a pass, in order.
    pub waves: Vec<Wave>,
    /// `b_grad`: bytes of a gradient element, 2 or 4.
    pub grad_bytes: u64,
    /// How the packed row is cut.
    pub geometry: Geometry,
    /// `n_stg`: staging slots of Level 1.
    pub staging_slot_count: u32,
    /// `n_out`: outbox blocks of one bank; a block is one pass's.
    pub outbox_block_count: u32,
    /// `C_sum`: CTAs of a Level 1 sum.
    pub sum_cta_count: u32,
    /// `C_mc`: CTAs of a landing.
    pub land_cta_count: u32,
    /// Where gradients lie meanwhile.
    pub mode: Mode,
    /// The bytes of every region, on each rank.
    pub memory: ReduceScatterMemory,
}

fn check_grad_bytes(grad_bytes: u64) -> Result<(), PlanError> {
    if matches!(grad_bytes, 2 | 4) { Ok(()) } else { Err(PlanError::GradBytes { found: grad_bytes }) }
}

fn check_pass_count(pass_count: u32) -> Result<(), PlanError> {
    if (1..=PASS_COUNT_MAX).contains(&pass_count) { Ok(()) } else { Err(PlanError::PassCount { found: pass_count }) }
}

impl ReduceScatterPlan {
    /// Plans the reduce-scatter of a group of this `layout`, whose gradients have `grad_bytes`
    /// bytes an element.
    ///
    /// # Errors
    /// A variant of [`PlanError`] for each refusal: a layout over another number of ranks, gradients
    /// of neither 2 nor 4 bytes, an option out of its range, a wave width that collides, a staging
    /// slot too small for the least chunk, and sizes that 64 bits cannot count.
    pub fn new(
        topology: Topology,
        layout: &GroupLayout,
        grad_bytes: u64,
        options: &ReduceScatterOptions,
    ) -> Result<Self, PlanError> {
        if layout.rank_count() != u64::from(topology.rank_count()) {
            return Err(PlanError::RankCount { layout: layout.rank_count(), topology: topology.rank_count() });
        }
        check_grad_bytes(grad_bytes)?;
        check_pass_count(options.pass_count)?;
        if options.staging_slot_count == 0 {
            return Err(PlanError::StagingSlotCount);
        }
        if !(1..=CTA_COUNT_MAX).contains(&options.sum_cta_count) {
            return Err(PlanError::SumCtaCount { found: options.sum_cta_count });
        }
        if !(1..=CTA_COUNT_MAX).contains(&options.land_cta_count) {
            return Err(PlanError::LandCtaCount { found: options.land_cta_count });
        }
        let wave_width = options.wave_width.unwrap_or(topology.local_rank_count());
        let round_width =
            options.round_width.unwrap_or_else(|| (topology.node_count() - 1).clamp(1, ROUND_WIDTH_DEFAULT));
        let waves = waves::waves(topology, wave_width, round_width)?;
        let chunk_bytes = options.chunk_bytes.unwrap_or(CHUNK_BYTES_DEFAULT);
        let geometry = Geometry::new(topology, layout.packed_elems(), grad_bytes, options.pass_count, chunk_bytes)?;
        let generation_count = waves::generation_count(waves.len() as u32);
        let outbox_block_count = outbox::block_count(options.mode, &waves, options.pass_count);
        let memory = ReduceScatterMemory::new(
            &geometry,
            &memory::MemoryCounts {
                local_rank_count: topology.local_rank_count(),
                grad_bytes,
                generation_count,
                staging_slot_count: options.staging_slot_count,
                outbox_block_count,
                pass_count: options.pass_count,
                has_accumulator: waves.len() > 1,
            },
        )?;
        Ok(Self {
            topology,
            wave_width,
            round_width,
            pass_count: options.pass_count,
            generation_count,
            waves,
            grad_bytes,
            geometry,
            staging_slot_count: options.staging_slot_count,
            outbox_block_count,
            sum_cta_count: options.sum_cta_count,
            land_cta_count: options.land_cta_count,
            mode: options.mode,
            memory,
        })
    }

    /// `D_rem`: remote blocks that a rank sends in one call, over all passes [TIDE App. E].
    pub fn remote_block_count(&self) -> u32 {
        outbox::remote_block_count(self.topology.node_count(), self.pass_count)
    }

    /// Whether a bank of the outbox holds every remote block, so that the read phase never waits
    /// for the network [TIDE App. E alg. 1 l. 8].
    pub fn reads_never_wait(&self) -> bool {
        self.outbox_block_count >= self.remote_block_count()
    }

    /// The outbox slot, in its bank, that the block of a remote contributor in a pass goes through:
    /// `J mod n_out` [TIDE App. E alg. 1 l. 4].
    pub fn outbox_slot(&self, pass: u32, contributor: u32) -> u32 {
        outbox::block_index(self.topology.node_count(), pass, contributor) % self.outbox_block_count
    }

    /// Bytes of one block of outbox, inbox or spare.
    pub fn block_bytes(&self) -> u64 {
        4 * self.geometry.block_elems(self.topology.local_rank_count())
    }

    /// Bytes of one staging slot.
    pub fn staging_slot_bytes(&self) -> u64 {
        self.memory.staging_bytes / u64::from(self.staging_slot_count)
    }

    /// `(L − 1)·P·M`: strided copies that a rank issues in one call for `parameter_count`
    /// parameters, with the `L` rows of a destination node in one [TIDE §4.1].
    pub fn descriptor_count_paper(&self, parameter_count: u64) -> u64 {
        let (m, l) = (self.topology.node_count(), self.topology.local_rank_count());
        u64::from(l - 1) * parameter_count * u64::from(m)
    }

    /// `(L − 1)·P·M·L`: copies that it would take with one for each destination rank [TIDE §4.1].
    pub fn descriptor_count_flat(&self, parameter_count: u64) -> u64 {
        self.descriptor_count_paper(parameter_count) * u64::from(self.topology.local_rank_count())
    }

    /// A number that two ranks share exactly when they made the same plan: a hash (FNV-1a, 64 bits)
    /// of all that ranks must agree on. What it does not see is how the row divides into
    /// parameters; [`Group::signature`](crate::layout::Group::signature) does.
    pub fn hash(&self) -> u64 {
        let g = &self.geometry;
        let words = [
            self.topology.node_count().into(),
            self.topology.local_rank_count().into(),
            self.wave_width.into(),
            self.round_width.into(),
            self.pass_count.into(),
            self.grad_bytes,
            g.packed_elems,
            g.chunk_elems,
            self.staging_slot_count.into(),
            self.outbox_block_count.into(),
            self.sum_cta_count.into(),
            self.land_cta_count.into(),
            match self.mode {
                Mode::InPlace => 0,
                Mode::SlotReuse => 1,
            },
        ];
        words
            .iter()
            .flat_map(|word: &u64| word.to_le_bytes())
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Dtype, Group, Parameter};

    fn layout(rows: u64, row_elems: u64, topology: Topology) -> GroupLayout {
        let parameter = Parameter::new("w", [rows, row_elems], Dtype::Bf16).unwrap();
        GroupLayout::new(&Group::new(vec![parameter]).unwrap(), topology.rank_count().into()).unwrap()
    }

    fn plan(m: u32, l: u32, packed_elems: u64, options: &ReduceScatterOptions) -> Result<ReduceScatterPlan, PlanError> {
        let topology = Topology::new(m, l).unwrap();
        ReduceScatterPlan::new(topology, &layout(u64::from(m * l), packed_elems, topology), 2, options)
    }

    #[test]
    fn defaults_are_one_wave_of_the_node_width_and_rounds_of_four() {
        let options = ReduceScatterOptions::default();
        let eight = plan(8, 8, 1000, &options).unwrap();
        assert_eq!((eight.wave_width, eight.round_width, eight.generation_count, eight.waves.len()), (8, 4, 1, 1));
        assert_eq!(eight.memory.accumulator_bytes, 0);
        assert!(eight.reads_never_wait());
        assert_eq!(plan(3, 8, 1000, &options).unwrap().round_width, 2);
        assert_eq!(plan(1, 8, 1000, &options).unwrap().round_width, 1);
        let nine = plan(9, 8, 1000, &options).unwrap();
        assert_eq!((nine.generation_count, nine.waves.len(), nine.memory.accumulator_bytes), (2, 2, 4000));
    }

    /// Every packed position is in exactly one chunk, of the sub-slice and pass that contain it.
    #[test]
    fn passes_sub_slices_and_chunks_cover_the_row_once_and_in_order() {
        let one_pass = |l, elems| plan(2, l, elems, &ReduceScatterOptions::default()).unwrap().geometry.sub_slice_elems;
        for l in 1..=8 {
            for elems in [0, 1, 31, 32, 33, 255, 256, 257, 5000, 8192] {
                for pass_count in 1..=PASS_COUNT_MAX {
                    let options =
                        ReduceScatterOptions { pass_count, chunk_bytes: Some(64 * 7 * 8 * 2), ..Default::default() };
                    let plan = plan(2, l, elems, &options).unwrap();
                    let g = plan.geometry;
                    assert_eq!(g.sub_slice_elems % SUB_SLICE_ALIGN_ELEMS, 0);
                    assert_eq!(g.part_elems % SUB_SLICE_ALIGN_ELEMS, 0);
                    assert_eq!(g.chunk_elems % SUB_SLICE_ALIGN_ELEMS, 0);
                    assert!(elems == 0 || g.chunk_elems <= g.part_elems);
                    assert_eq!(g.sub_slice_elems, one_pass(l, elems), "passes move the cut into sub-slices");
                    let mut next = 0;
                    for (s, pass) in (0..l).flat_map(|s| (0..pass_count).map(move |pass| (s, pass))) {
                        let whole = g.part_range(pass, s);
                        assert_eq!(whole.start, next.min(elems));
                        for chunk in 0..g.chunk_count {
                            let range = g.chunk_range(pass, s, chunk);
                            assert_eq!(range.start, next);
                            assert!(range.end - range.start <= g.chunk_elems && range.end <= whole.end);
                            next = range.end;
                        }
                        assert_eq!(next, whole.end);
                        assert!(next <= (u64::from(s) + 1) * g.sub_slice_elems);
                    }
                    assert_eq!(next, elems, "L={l} passes={pass_count}");
                }
            }
        }
    }

    #[test]
    fn regions_follow_from_counts_and_add_up() {
        let options = ReduceScatterOptions { chunk_bytes: Some(7 * 8 * 2 * 64), ..Default::default() };
        let plan = plan(16, 8, 1000, &options).unwrap();
        // 1000 elements are eight sub-slices of 128; a block is eight rows of them.
        assert_eq!((plan.geometry.sub_slice_elems, plan.geometry.chunk_elems, plan.geometry.chunk_count), (128, 64, 2));
        assert_eq!(plan.block_bytes(), 4096);
        assert_eq!(plan.staging_slot_bytes(), 7 * 8 * 2 * 64);
        let memory = plan.memory;
        assert_eq!(memory.staging_bytes, 2 * 7168);
        assert_eq!(memory.inbox_bytes, 2 * 8 * 4096);
        assert_eq!(memory.outbox_bytes, 2 * 15 * 4096);
        assert_eq!(memory.spare_bytes, 2 * 4096);
        assert_eq!(memory.accumulator_bytes, 4000);
        assert_eq!(memory.total_bytes(), 14_336 + 65_536 + 122_880 + 8192 + 4000);
        assert_eq!(memory.total_bytes() - memory.area_bytes(), 4000);
    }

    #[test]
    fn passes_shrink_blocks_and_keep_the_in_place_outbox() {
        let bytes = |pass_count| {
            let options = ReduceScatterOptions { pass_count, ..Default::default() };
            let plan = plan(16, 8, 4 * 8 * 32 * 5, &options).unwrap();
            (plan.outbox_block_count, plan.memory.outbox_bytes, plan.memory.inbox_bytes, plan.memory.spare_bytes)
        };
        let (one, four) = (bytes(1), bytes(4));
        assert_eq!((one.0, four.0), (15, 60));
        assert_eq!((one.1, one.3), (four.1, four.3));
        assert_eq!(one.2, 4 * four.2);
    }

    #[test]
    fn a_lone_local_rank_stages_nothing() {
        let plan = plan(4, 1, 1000, &ReduceScatterOptions { chunk_bytes: Some(1), ..Default::default() }).unwrap();
        assert_eq!((plan.memory.staging_bytes, plan.geometry.chunk_count), (0, 1));
        assert_eq!(plan.descriptor_count_paper(30), 0);
    }

    #[test]
    fn an_empty_row_takes_no_bytes() {
        let plan = plan(16, 8, 0, &ReduceScatterOptions::default()).unwrap();
        assert_eq!((plan.memory.total_bytes(), plan.geometry.chunk_count), (0, 0));
        assert!(plan.geometry.part_range(0, 7).is_empty());
    }

    #[test]
    fn every_option_out_of_range_is_refused_by_its_own_variant() {
        let base = ReduceScatterOptions::default;
        let refuse = |options: ReduceScatterOptions| plan(4, 4, 1000, &options).unwrap_err();
        assert_eq!(refuse(ReduceScatterOptions { pass_count: 0, ..base() }), PlanError::PassCount { found: 0 });
        assert_eq!(refuse(ReduceScatterOptions { pass_count: 5, ..base() }), PlanError::PassCount { found: 5 });
        assert_eq!(refuse(ReduceScatterOptions { staging_slot_count: 0, ..base() }), PlanError::StagingSlotCount);
        assert_eq!(refuse(ReduceScatterOptions { sum_cta_count: 0, ..base() }), PlanError::SumCtaCount { found: 0 });
        let too_many = CTA_COUNT_MAX + 1;
        let refused = refuse(ReduceScatterOptions { sum_cta_count: too_many, ..base() });
        assert_eq!(refused, PlanError::SumCtaCount { found: too_many });
        assert_eq!(refuse(ReduceScatterOptions { land_cta_count: 0, ..base() }), PlanError::LandCtaCount { found: 0 });
        assert_eq!(refuse(ReduceScatterOptions { round_width: Some(0), ..base() }), PlanError::RoundWidth);
        let width = PlanError::WaveWidth { found: 5, local_rank_count: 4 };
        assert_eq!(refuse(ReduceScatterOptions { wave_width: Some(5), ..base() }), width);
        // Three sources, four rows, 32 elements of two bytes.
        let chunk = PlanError::ChunkBytes { found: 767, min: 768 };
        assert_eq!(refuse(ReduceScatterOptions { chunk_bytes: Some(767), ..base() }), chunk);
        assert!(chunk.to_string().contains("767") && chunk.to_string().contains("768"));
        assert!(plan(4, 4, 1000, &ReduceScatterOptions { chunk_bytes: Some(768), ..base() }).is_ok());
    }

    #[test]
    fn what_does_not_fit_together_is_refused() {
        let (four, eight) = (Topology::new(4, 1).unwrap(), Topology::new(8, 1).unwrap());
        let options = ReduceScatterOptions::default();
        let wrong = ReduceScatterPlan::new(four, &layout(8, 3, eight), 2, &options);
        assert_eq!(wrong.unwrap_err(), PlanError::RankCount { layout: 8, topology: 4 });
        for grad_bytes in [0, 1, 3, 8] {
            let wrong = ReduceScatterPlan::new(four, &layout(8, 3, four), grad_bytes, &options);
            assert_eq!(wrong.unwrap_err(), PlanError::GradBytes { found: grad_bytes });
        }
    }

    #[test]
    fn bytes_beyond_64_bits_are_an_error_and_not_a_wrap() {
        let large = plan(1, 1, u64::MAX / 8, &ReduceScatterOptions::default());
        assert_eq!(large.unwrap_err(), PlanError::TooLarge { packed_elems: u64::MAX / 8 });
        let slots =
            ReduceScatterOptions { staging_slot_count: u32::MAX, chunk_bytes: Some(u64::MAX), ..Default::default() };
        assert!(matches!(plan(2, 8, 1 << 40, &slots), Err(PlanError::TooLarge { .. })));
    }

    #[test]
    fn hash_sees_every_option_that_ranks_share() {
        let base = ReduceScatterOptions::default;
        let variants = [
            base(),
            ReduceScatterOptions { wave_width: Some(4), ..base() },
            ReduceScatterOptions { round_width: Some(2), ..base() },
            ReduceScatterOptions { pass_count: 2, ..base() },
            ReduceScatterOptions { staging_slot_count: 3, ..base() },
            ReduceScatterOptions { chunk_bytes: Some(4096), ..base() },
            ReduceScatterOptions { sum_cta_count: 5, ..base() },
            ReduceScatterOptions { land_cta_count: 5, ..base() },
            ReduceScatterOptions { mode: Mode::SlotReuse, ..base() },
        ];
        let mut hashes: Vec<u64> = variants.iter().map(|v| plan(8, 8, 5000, v).unwrap().hash()).collect();
        hashes.push(plan(8, 8, 5001, &base()).unwrap().hash());
        hashes.push(plan(9, 8, 5000, &base()).unwrap().hash());
        hashes.push(plan(8, 4, 5000, &base()).unwrap().hash());
        hashes.sort_unstable();
        assert!(hashes.windows(2).all(|w| w[0] != w[1]));
        assert_eq!(plan(8, 8, 5000, &base()).unwrap().hash(), plan(8, 8, 5000, &base()).unwrap().hash());
    }
}

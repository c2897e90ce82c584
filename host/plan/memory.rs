//! What a plan allocates on each rank, and the paper's bounds on it.
//!
//! [`ReduceScatterMemory::regions`] is the one list of what a reduce-scatter allocates; its total
//! is that list's sum. The bounds are stated over `S_fp32`, the bytes of a rank's packed fp32 row.
//! A plan aligns every sub-slice to [`SUB_SLICE_ALIGN_ELEMS`](super::SUB_SLICE_ALIGN_ELEMS)
//! elements, so for a plan they hold over its aligned row,
//! [`Geometry::aligned_row_bytes`](super::Geometry::aligned_row_bytes); over the bare row it may be
//! exceeded by that alignment and nothing else.

use super::{Geometry, PlanError};

/// A named region of a rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemoryRegion {
    /// What the region is for.
    pub name: &'static str,
    /// Its size in bytes.
    pub bytes: u64,
}

/// The bytes of each region that a reduce-scatter needs on every rank, besides the gradients and
/// the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReduceScatterMemory {
    /// Level 1 staging: `n_stg` slots of `L − 1` sources × `L` rows × one chunk, in the gradients'
    /// type [TIDE §4.1].
    pub staging_bytes: u64,
    /// Inbox: `n_par` generations of `L` blocks [TIDE §4.2].
    pub inbox_bytes: u64,
    /// Outbox: two banks of `n_out` blocks [TIDE §5.2].
    pub outbox_bytes: u64,
    /// Own-node spares: two banks of one block a pass [TIDE §5.2].
    pub spare_bytes: u64,
    /// The fp32 row that waves accumulate in before `α` is applied; none for a single wave.
    pub accumulator_bytes: u64,
}

/// The counts that [`ReduceScatterMemory`] follows from.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryCounts {
    pub local_rank_count: u32,
    pub grad_bytes: u64,
    pub generation_count: u32,
    pub staging_slot_count: u32,
    pub outbox_block_count: u32,
    pub pass_count: u32,
    pub has_accumulator: bool,
}

/// Outbox banks, and banks of own-node spares: a call uses bank `epoch mod 2` [TIDE §5.2].
pub const BANK_COUNT: u32 = 2;

impl ReduceScatterMemory {
    /// The regions' sizes, or `None` where 64 bits cannot count a region or the total.
    fn checked(geometry: &Geometry, counts: &MemoryCounts) -> Option<Self> {
        let bytes = |factors: &[u64]| factors.iter().try_fold(1_u64, |product, f| product.checked_mul(*f));
        let local_rank_count = u64::from(counts.local_rank_count);
        let block_bytes = bytes(&[geometry.block_elems(counts.local_rank_count), 4])?;
        let memory = Self {
            staging_bytes: bytes(&[
                counts.staging_slot_count.into(),
                staging_slot_bytes(counts.local_rank_count, geometry.staged_elems(), counts.grad_bytes)?,
            ])?,
            inbox_bytes: bytes(&[counts.generation_count.into(), local_rank_count, block_bytes])?,
            outbox_bytes: bytes(&[BANK_COUNT.into(), counts.outbox_block_count.into(), block_bytes])?,
            spare_bytes: bytes(&[BANK_COUNT.into(), counts.pass_count.into(), block_bytes])?,
            accumulator_bytes: if counts.has_accumulator { bytes(&[geometry.packed_elems, 4])? } else { 0 },
        };
        memory.regions().iter().try_fold(0_u64, |sum, region| sum.checked_add(region.bytes))?;
        Some(memory)
    }

    pub(super) fn new(geometry: &Geometry, counts: &MemoryCounts) -> Result<Self, PlanError> {
        Self::checked(geometry, counts).ok_or(PlanError::TooLarge { packed_elems: geometry.packed_elems })
    }

    /// Every region that is allocated, in order.
    pub fn regions(&self) -> [MemoryRegion; 5] {
        [
            MemoryRegion { name: "staging", bytes: self.staging_bytes },
            MemoryRegion { name: "inbox", bytes: self.inbox_bytes },
            MemoryRegion { name: "outbox", bytes: self.outbox_bytes },
            MemoryRegion { name: "spare", bytes: self.spare_bytes },
            MemoryRegion { name: "accumulator", bytes: self.accumulator_bytes },
        ]
    }

    /// The sum of all regions, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.regions().iter().map(|region| region.bytes).sum()
    }

    /// `Area_RS` in bytes: what the paper bounds, which is all but the accumulator [TIDE §5.4].
    ///
    /// The paper's bound counts `L` staged sources where `L − 1` are stored; with two staging slots
    /// that difference is a whole row, so the bound holds for
    /// [`total_bytes`](Self::total_bytes) as well.
    pub fn area_bytes(&self) -> u64 {
        self.total_bytes() - self.accumulator_bytes
    }
}

/// Bytes of one staging slot: `L − 1` sources × `L` rows × `chunk_elems` gradients; `None` where 64
/// bits cannot count them.
pub(super) fn staging_slot_bytes(local_rank_count: u32, chunk_elems: u64, grad_bytes: u64) -> Option<u64> {
    let rows = u64::from(local_rank_count - 1) * u64::from(local_rank_count);
    rows.checked_mul(chunk_elems)?.checked_mul(grad_bytes)
}

/// The bound on `Area_RS`, `(4·n_stg + 8·n_par + 2·n_out + 2)·S_fp32`, in bytes, for `L = 8`, bf16
/// gradients and one pass [TIDE §5.4 eq. 10]. Saturates at `u64::MAX`.
pub fn area_bound_bytes(n_stg: u32, n_par: u32, n_out: u32, shard_fp32_bytes: u64) -> u64 {
    let rows = 4 * u64::from(n_stg) + 8 * u64::from(n_par) + 2 * u64::from(n_out) + 2;
    rows.saturating_mul(shard_fp32_bytes)
}

/// The In-Place bound as a share of `NS`, the bf16 bytes of the whole group, for `L = 8` and two
/// staging slots: `1/2 + (2·n_par + 2)/M` [TIDE §5.4 eq. 11].
pub fn in_place_area_share(node_count: u32, n_par: u32) -> f64 {
    0.5 + f64::from(2 * n_par + 2) / f64::from(node_count)
}

/// The Slot-Reuse bound as a share of `NS`, for `L = 8` and two staging slots:
/// `(2k + 4·n_par + 5)/(2M)` [TIDE §5.4 eq. 12].
pub fn slot_reuse_area_share(node_count: u32, n_par: u32, k: u32) -> f64 {
    f64::from(2 * k + 4 * n_par + 5) / f64::from(2 * node_count)
}

/// What FSDP2 holds during a layer's backward, as a share of `NS`: unsharded parameters, the
/// prefetched ones and an fp32 reduce-scatter input [TIDE §5.4].
pub const FSDP2_LAYER_SHARE: f64 = 4.0;

/// Two ring slots and the receive stage, as a share of `NS`: `2 + 1/L` [TIDE §5.4].
pub fn gather_share(local_rank_count: u32) -> f64 {
    2.0 + 1.0 / f64::from(local_rank_count)
}

/// The most that a layer's backward holds under In-Place, as a share of `NS`, for `L = 8`: the
/// all-gather's memory, the reduce-scatter's, and the gradients of the layer before [TIDE §5.4].
pub fn in_place_layer_share(node_count: u32, n_par: u32) -> f64 {
    gather_share(8) + in_place_area_share(node_count, n_par) + 1.0
}

/// The most that a layer's backward holds under Slot-Reuse, as a share of `NS`, for `L = 8`: the
/// gradients lie in a vacated ring slot [TIDE §5.4].
pub fn slot_reuse_layer_share(node_count: u32, n_par: u32, k: u32) -> f64 {
    gather_share(8) + slot_reuse_area_share(node_count, n_par, k)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_the_bound_over_the_whole_group() {
        // S_fp32 = 2·S, so rows of S_fp32 over N·S are 2·rows/N.
        for (m, n_par, k) in [(64, 2, 4), (16, 2, 2), (8, 1, 4), (1000, 2, 4)] {
            let share = |n_out| 2.0 * area_bound_bytes(2, n_par, n_out, 1) as f64 / f64::from(8 * m);
            assert!((share(m - 1) - in_place_area_share(m, n_par)).abs() < 1e-12);
            assert!((share(2 * k) - slot_reuse_area_share(m, n_par, k)).abs() < 1e-12);
        }
    }

    #[test]
    fn an_uncountable_bound_saturates() {
        assert_eq!(area_bound_bytes(2, 2, 63, u64::MAX / 2), u64::MAX);
    }
}

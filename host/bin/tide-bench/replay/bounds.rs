//! The paper's bounds and the stock baseline's figures, from layouts and plans alone [TIDE §5.4].

use serde::Serialize;
use tide_gpu::arena::REGION_ALIGN_BYTES;
use tide_gpu::layout::GroupLayout;
use tide_gpu::plan::{Mode, ReduceScatterPlan, memory};

/// Bytes of a signal word.
const SIGNAL_BYTES: u64 = 8;
/// Regions of an arena, at most: each ends on its alignment.
const REGION_COUNT_MAX: u64 = 16;

/// Bounds on what one rank holds, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bounds {
    /// The all-gather's ring slots and receive stage.
    pub ring: u64,
    /// The reduce-scatter's staging, outbox, inbox and spares.
    pub reduce_scatter: u64,
    /// Gradients of other layers while one makes its own.
    pub held_gradients: u64,
    /// The three together.
    pub layer: u64,
}

impl Bounds {
    /// The bounds for layers of one `layout`.
    ///
    /// They are the paper's, with `L` and the gradients' size in it where the paper has 8 and 2. Over its aligned row, as
    /// a plan has it; the words by which ranks signal each other and the alignment of regions come on top, which for a
    /// real layer is nothing.
    pub fn new(plan: &ReduceScatterPlan, layout: &GroupLayout, context_count: u32) -> Self {
        let (m, l) = (u64::from(plan.topology.node_count()), u64::from(plan.topology.local_rank_count()));
        let control = control_bytes(m, l, u64::from(context_count));
        let stage = m * layout.shard_bytes().next_multiple_of(REGION_ALIGN_BYTES);
        let ring = 2 * layout.landing_bytes() + stage + control;
        let reduce_scatter = area_bytes(plan) + control;
        let held_gradients = match plan.mode {
            Mode::InPlace => layout.landing_bytes(),
            Mode::SlotReuse => 0,
        };
        Self { ring, reduce_scatter, held_gradients, layer: ring + reduce_scatter + held_gradients }
    }
}

/// Equation 10 with every factor that the paper has put in: `L·b/4` rows a staging slot, `L` blocks a generation.
fn area_bytes(plan: &ReduceScatterPlan) -> u64 {
    let l = plan.topology.local_rank_count();
    let row = plan.geometry.aligned_row_bytes(l, plan.pass_count);
    let staged = u64::from(plan.staging_slot_count) * u64::from(l) * plan.grad_bytes * row / 4;
    let blocks = u64::from(plan.generation_count * l + 2 * plan.outbox_block_count + 2 * plan.pass_count);
    staged + blocks * plan.block_bytes()
}

/// Room for signal words and for the ends of regions.
fn control_bytes(node_count: u64, local_rank_count: u64, context_count: u64) -> u64 {
    let words = 8 * local_rank_count + node_count * (2 * context_count + 8);
    words * SIGNAL_BYTES + REGION_COUNT_MAX * REGION_ALIGN_BYTES
}

/// What the stock baseline holds during a layer's backward, bytes: `4·NS` [TIDE §5.4].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Stock {
    /// The layer's unsharded parameters.
    pub parameters: u64,
    /// The next layer's rank-major all-gather output.
    pub gathered: u64,
    /// The layer before's packed fp32 gradients.
    pub packed: u64,
    /// The three together.
    pub layer: u64,
}

impl Stock {
    /// The figures for layers of one `layout`.
    pub fn new(layout: &GroupLayout) -> Self {
        let (parameters, gathered) = (layout.landing_bytes(), layout.landing_bytes());
        let packed = 4 * layout.packed_elems() * layout.rank_count();
        Self { parameters, gathered, packed, layer: parameters + gathered + packed }
    }
}

/// The most that a layer's backward holds, as a share of `NS`, where the paper's assumptions hold.
pub fn paper_layer_share(plan: &ReduceScatterPlan) -> Option<f64> {
    let (m, l) = (plan.topology.node_count(), plan.topology.local_rank_count());
    if l != 8 || plan.grad_bytes != 2 || plan.pass_count != 1 || plan.staging_slot_count != 2 {
        return None;
    }
    Some(match plan.mode {
        Mode::InPlace => memory::in_place_layer_share(m, plan.generation_count),
        Mode::SlotReuse => memory::slot_reuse_layer_share(m, plan.generation_count, plan.round_width),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tide_gpu::layout::{Dtype, Group, Parameter};
    use tide_gpu::plan::{ReduceScatterOptions, Topology};

    fn plan(m: u32, l: u32, options: ReduceScatterOptions) -> (ReduceScatterPlan, GroupLayout) {
        let parameter = Parameter::new("w", [u64::from(m * l) * 64, 640], Dtype::Bf16).unwrap();
        let layout = GroupLayout::new(&Group::new(vec![parameter]).unwrap(), u64::from(m * l)).unwrap();
        (ReduceScatterPlan::new(Topology::new(m, l).unwrap(), &layout, 2, &options).unwrap(), layout)
    }

    /// `Area_RS`, and with it a whole layer, of the paper's example: 0.594 and 0.164, 3.72 and 2.29 NS.
    #[test]
    fn the_bounds_are_the_papers_on_its_own_cluster() {
        for (mode, area, layer) in [(Mode::InPlace, 0.594, 3.72), (Mode::SlotReuse, 0.164, 2.29)] {
            let (plan, layout) = plan(64, 8, ReduceScatterOptions { mode, ..Default::default() });
            let bounds = Bounds::new(&plan, &layout, 4);
            let share = |bytes: u64| bytes as f64 / layout.landing_bytes() as f64;
            // An outbox of rounds narrower than twice k is smaller than the paper's closed form.
            assert!((share(area_bytes(&plan)) - area).abs() < 1e-3, "{mode}: {}", share(area_bytes(&plan)));
            assert!((share(bounds.layer) - layer).abs() < 1e-2, "{mode}: {}", share(bounds.layer));
            assert!((paper_layer_share(&plan).unwrap() - layer).abs() < 5e-3);
            assert_eq!(share(Stock::new(&layout).layer), memory::FSDP2_LAYER_SHARE);
        }
    }

    #[test]
    fn every_plan_is_within_its_bound() {
        for (m, l) in (1..20).flat_map(|m| (1..=8).map(move |l| (m, l))) {
            for mode in [Mode::InPlace, Mode::SlotReuse] {
                for pass_count in [1, 3] {
                    let (plan, layout) = plan(m, l, ReduceScatterOptions { mode, pass_count, ..Default::default() });
                    let bound = Bounds::new(&plan, &layout, 4).reduce_scatter;
                    assert!(plan.memory.total_bytes() <= bound, "{m} x {l} {mode} {pass_count}");
                }
            }
        }
    }
}

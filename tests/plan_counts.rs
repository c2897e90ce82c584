//! The numbers that the plan's arithmetic must give: those of the paper, and those of our cases.

use tide_gpu::layout::{Dtype, Group, GroupLayout, Parameter};
use tide_gpu::plan::memory::{
    FSDP2_LAYER_SHARE, area_bound_bytes, in_place_area_share, in_place_layer_share, slot_reuse_area_share,
    slot_reuse_layer_share,
};
use tide_gpu::plan::validate::{check_plan, exhaustive, sweep};
use tide_gpu::plan::waves::waves;
use tide_gpu::plan::{
    Mode, PlanError, Rates, ReduceScatterOptions, ReduceScatterPlan, Sizing, Topology, gather_rounds,
};

fn layout(shapes: &[&[u64]], topology: Topology) -> GroupLayout {
    let parameters = shapes.iter().enumerate().map(|(i, s)| Parameter::new(format!("p{i}"), *s, Dtype::Bf16).unwrap());
    GroupLayout::new(&Group::new(parameters.collect()).unwrap(), topology.rank_count().into()).unwrap()
}

fn plan(m: u32, l: u32, shapes: &[&[u64]], options: &ReduceScatterOptions) -> ReduceScatterPlan {
    let topology = Topology::new(m, l).unwrap();
    ReduceScatterPlan::new(topology, &layout(shapes, topology), 2, options).unwrap()
}

/// [TIDE App. D]: every plan of the regression test, and two to four passes of each accepted one.
#[test]
fn exhaustive_validation_accepts_and_rejects_the_papers_counts() {
    let counts = exhaustive();
    assert_eq!((counts.first_violation, counts.violation_count), (None, 0));
    assert_eq!((counts.accepted, counts.rejected), (458_304, 65_472));
    assert_eq!(counts.multi_pass_accepted, 3 * 458_304);
}

/// T30: topologies with a plan and without one, by wave width.
#[test]
fn t30_totals_for_other_node_sizes() {
    // One k and two modes: every (M, width) counts twice.
    let totals = |l, m_max| {
        let counts = sweep(l, 2..=m_max, 1..=l, 4..=4).unwrap();
        assert_eq!((counts.first_violation, counts.violation_count), (None, 0));
        (counts.accepted / 2, counts.rejected / 2)
    };
    assert_eq!(totals(8, 1024), (7161, 1023));
    assert_eq!(totals(4, 64), (237, 15));
    assert_eq!(totals(6, 64), (348, 30));
    assert_eq!(totals(2, 64), (126, 0));
}

/// T30: the very plans that the case names, and the waves that collide.
#[test]
fn t30_named_plans_are_accepted_or_rejected_with_their_wave() {
    let wave = |m, l, width| match waves(Topology::new(m, l).unwrap(), width, 4) {
        Ok(_) => None,
        Err(PlanError::Collision { contributors, .. }) => Some(contributors.collect::<Vec<_>>()),
        Err(other) => panic!("{other}"),
    };
    assert_eq!(wave(9, 8, 3), Some(vec![7, 8, 9]));
    assert_eq!(wave(17, 8, 5), Some(vec![16, 17]));
    assert_eq!(wave(5, 4, 3), Some(vec![4, 5]));
    assert_eq!(wave(7, 6, 4), Some(vec![5, 6, 7]));
    assert_eq!(wave(7, 6, 5), Some(vec![6, 7]));
    for (m, l, width) in [(13, 6, 4), (9, 8, 4), (7, 2, 2)] {
        assert_eq!(wave(m, l, width), None, "M={m} L={l} width={width}");
    }
}

/// Whole plans, not only their waves: default and narrow widths, both modes, one to four passes.
#[test]
fn whole_plans_hold_at_every_node_count() {
    for m in (1..=40).chain([63, 64, 65, 1023, 1024]) {
        for (mode, pass_count) in [(Mode::InPlace, 1), (Mode::SlotReuse, 1), (Mode::InPlace, 3), (Mode::SlotReuse, 4)] {
            for wave_width in [None, Some(2)] {
                let options = ReduceScatterOptions { mode, pass_count, wave_width, ..Default::default() };
                let plan = plan(m, 8, &[&[600, 64], &[7]], &options);
                assert_eq!(check_plan(&plan), Ok(()), "M={m} {mode} passes={pass_count}");
            }
        }
    }
}

#[test]
fn a_corrupted_plan_is_found() {
    let options = ReduceScatterOptions::default();
    let mut plan = plan(11, 8, &[&[600, 64]], &options);
    assert_eq!(check_plan(&plan), Ok(()));
    plan.outbox_block_count -= 1;
    assert!(check_plan(&plan).is_err());
    plan.outbox_block_count += 1;
    plan.waves[0].stale_mask = 0xff;
    assert!(check_plan(&plan).is_err());
}

/// [TIDE §4.1]
#[test]
fn descriptors_are_coalesced_eightfold() {
    let plan = plan(64, 8, &[&[600, 64]], &ReduceScatterOptions::default());
    assert_eq!(plan.descriptor_count_paper(30), 13_440);
    assert_eq!(plan.descriptor_count_flat(30), 107_520);
}

/// [TIDE §5.4 eq. 11 and 12]
#[test]
fn sixty_four_nodes_stay_within_the_papers_shares() {
    assert!((in_place_area_share(64, 2) - 0.594).abs() < 5e-4);
    assert!((slot_reuse_area_share(64, 2, 4) - 0.164).abs() < 5e-4);
    assert!((in_place_layer_share(64, 2) - 3.72).abs() < 5e-3);
    assert!((slot_reuse_layer_share(64, 2, 4) - 2.29).abs() < 5e-3);
    assert_eq!(FSDP2_LAYER_SHARE, 4.0);
}

/// [TIDE §5.4 eq. 10], over the aligned row; with the accumulator on top it holds as well.
#[test]
fn planned_bytes_stay_within_equation_10() {
    for m in [1, 2, 5, 8, 9, 16, 64, 200] {
        for shapes in [&[&[1_u64][..]][..], &[&[600, 64], &[7]], &[&[28_672, 8192], &[8192]]] {
            for (mode, staging_slot_count) in [(Mode::InPlace, 2), (Mode::SlotReuse, 2), (Mode::SlotReuse, 3)] {
                let options = ReduceScatterOptions { mode, staging_slot_count, ..Default::default() };
                let plan = plan(m, 8, shapes, &options);
                let row_bytes = plan.geometry.aligned_row_bytes(8, 1);
                let bound =
                    area_bound_bytes(staging_slot_count, plan.generation_count, plan.outbox_block_count, row_bytes);
                assert!(plan.memory.total_bytes() <= bound, "M={m} {mode}: {:?} above {bound}", plan.memory);
                let align_bytes = 4 * 8 * 32;
                assert!(row_bytes - 4 * plan.geometry.packed_elems < align_bytes);
            }
        }
    }
}

/// [TIDE §5.3 eq. 9] with the default widths, at the paper's sixty-four nodes.
#[test]
fn outbox_depth_is_all_remote_nodes_or_two_rounds() {
    let depth = |mode| {
        let options = ReduceScatterOptions { mode, ..Default::default() };
        plan(64, 8, &[&[600, 64]], &options).outbox_block_count
    };
    assert_eq!((depth(Mode::InPlace), depth(Mode::SlotReuse)), (63, 8));
}

/// [TIDE §6.3]
#[test]
fn the_solver_gives_the_papers_eight_node_choice() {
    let topology = Topology::new(8, 8).unwrap();
    let sizing = Sizing::solve(topology, 128 << 20, 2, 8, 1, &Rates::PAPER).unwrap();
    assert_eq!((sizing.round_width, sizing.sum_cta_count), (4, 4));
    let mut options = ReduceScatterOptions { round_width: Some(1), sum_cta_count: 1, ..Default::default() };
    sizing.apply(&mut options);
    assert_eq!((options.round_width, options.sum_cta_count), (Some(4), 4));
}

/// [TIDE §3.1]
#[test]
fn gather_rounds_are_logarithmic_and_bring_all_shards() {
    for m in 1..=1024_u32 {
        let rounds = gather_rounds(m);
        assert_eq!(rounds.len() as u32, m.next_power_of_two().trailing_zeros());
        assert_eq!(rounds.iter().map(|round| round.slots).sum::<u32>(), m - 1);
    }
}

/// T13: a row whose fp32 offsets pass 2^32 bytes is cut exactly.
#[test]
fn t13_large_rows_are_cut_exactly() {
    let topology = Topology::new(8, 8).unwrap();
    let layout = layout(&[&[70_000, 40_000]], topology);
    let vocab = layout.parameters()[0];
    assert_eq!((vocab.shard_rows, vocab.rows_of(63).end - vocab.rows_of(63).start), (1094, 1078));
    let first_elem = 63 * vocab.shard_elems;
    assert_eq!((vocab.rows_of(63).start, first_elem), (68_922, 2_756_880_000));
    assert_eq!((first_elem * 2, first_elem * 4), (5_513_760_000, 11_027_520_000));
    assert_eq!((first_elem + vocab.live_elems_of(63)) * 2, 5_600_000_000);

    for (grad_bytes, pass_count) in [(2, 1), (4, 1), (2, 4)] {
        let options = ReduceScatterOptions { pass_count, ..Default::default() };
        let plan = ReduceScatterPlan::new(topology, &layout, grad_bytes, &options).unwrap();
        assert_eq!(plan.geometry.packed_elems, 43_760_000);
        let mut next = 0;
        for (sub_slice, pass) in (0..8).flat_map(|s| (0..pass_count).map(move |pass| (s, pass))) {
            for chunk in 0..plan.geometry.chunk_count {
                let range = plan.geometry.chunk_range(pass, sub_slice, chunk);
                assert_eq!(range.start, next);
                next = range.end;
            }
        }
        assert_eq!(next, 43_760_000);
        assert!(plan.staging_slot_bytes() <= 32 << 20);
        assert!(plan.staging_slot_bytes() > 31 << 20 || plan.geometry.chunk_count == 1);
    }
    // Seven remote blocks and the spare in two banks, and one generation of eight.
    let plan = ReduceScatterPlan::new(topology, &layout, 2, &ReduceScatterOptions::default()).unwrap();
    assert_eq!(plan.memory.outbox_bytes + plan.memory.spare_bytes, 2 * 8 * 4 * 43_760_128);
    assert_eq!(plan.memory.inbox_bytes, 8 * 4 * 43_760_128);
    assert_eq!(plan.geometry.block_elems(8), 43_760_128);
}

/// T32: ranks spread unevenly or in another order are refused alike on every rank.
#[test]
fn t32_unusable_placements_are_refused_with_their_numbers() {
    let unequal = [(0, 4), (0, 4), (0, 4), (0, 4), (1, 2), (1, 2)];
    let error = Topology::from_placement(&unequal).unwrap_err();
    assert_eq!(error, PlanError::UnequalNodes { first_node: 0, first_count: 4, node: 1, count: 2 });
    assert!(error.to_string().contains("node 0 has 4 and node 1 has 2"), "{error}");

    let round_robin: Vec<(u32, u32)> = (0..6).map(|rank| (rank % 3, 2)).collect();
    let error = Topology::from_placement(&round_robin).unwrap_err();
    assert_eq!(error, PlanError::NotNodeMajor { rank: 1, found: 1, expected: 0 });
    assert!(error.to_string().contains("not node-major"), "{error}");
}

/// T58, as far as arithmetic goes: a plan's bytes are the sum of its regions and depend on nothing
/// but the plan.
#[test]
fn t58_planned_bytes_are_the_sum_of_the_regions() {
    let plan = plan(3, 2, &[&[600, 64]], &ReduceScatterOptions::default());
    // A shard is 100 rows of 64 elements. Three nodes in waves of two are two waves, so two generations.
    let block_bytes = 4 * 6400;
    assert_eq!(plan.block_bytes(), block_bytes);
    let memory = plan.memory;
    assert_eq!(memory.staging_bytes, 2 * 2 * 3200 * 2);
    assert_eq!(memory.inbox_bytes, 2 * 2 * block_bytes);
    assert_eq!(memory.outbox_bytes, 2 * 2 * block_bytes);
    assert_eq!(memory.spare_bytes, 2 * block_bytes);
    assert_eq!(memory.accumulator_bytes, block_bytes);
    let sum: u64 = memory.regions().iter().map(|region| region.bytes).sum();
    assert_eq!(memory.total_bytes(), sum);
}

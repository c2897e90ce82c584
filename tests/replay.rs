//! `tide-bench replay`: the same sums whatever the mode, the path and the interleaving, within the paper's memory.
#![cfg(feature = "cli")]
// Each test binary uses a part of it.
#![allow(dead_code)]

#[path = "cli/support.rs"]
mod support;

use serde_json::Value;
use support::*;

const TINY: [&str; 9] =
    ["--backend", "sim", "--preset", "llama-3.1-8b-tiny", "--layers", "4", "--accumulate-steps", "2", "--steps"];

/// A replay that must be right and within its bounds.
fn replay(arguments: &[&str]) -> Value {
    let output = tide_bench(&[&["replay", "--json", "-"], arguments].concat());
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
    let document: Value = serde_json::from_slice(&output.stdout).expect("standard output is JSON alone");
    for step in document["replay"]["steps"].as_array().unwrap() {
        assert_eq!(step["wrong"], 0, "{arguments:?}: {step}");
        for kind in ["ring", "reduce_scatter", "held_gradients", "layer"] {
            let bytes = |of: &Value| of[kind].as_u64().unwrap();
            let (peak, bound) = (bytes(&step["peak_bytes"]), bytes(&document["replay"]["bound_bytes"]));
            assert!(peak <= bound, "{arguments:?} {kind}: {peak} B of {bound}");
        }
    }
    document["replay"].clone()
}

fn digests(replay: &Value) -> Vec<String> {
    let steps = replay["steps"].as_array().unwrap();
    steps.iter().map(|step| step["digest"].as_str().unwrap().to_owned()).collect()
}

fn peak(replay: &Value, step: usize, kind: &str) -> u64 {
    replay["steps"][step]["peak_bytes"][kind].as_u64().unwrap()
}

#[test]
fn sums_depend_on_the_data_alone() {
    for (nodes, gpus) in [("1", "4"), ("2", "2"), ("3", "2"), ("5", "1")] {
        let base = [&TINY[..], &["2", "--nodes", nodes, "--gpus", gpus]].concat();
        let with = |extra: &[&str]| digests(&replay(&[&base[..], extra].concat()));
        let plain = with(&[]);
        assert_ne!(plain[0], plain[1], "every step has other parameters");
        let knobs: [&[&str]; 6] = [
            &["--mode", "slot-reuse"],
            &["--path", "host"],
            &["--mode", "slot-reuse", "--path", "host"],
            &["--checkpoint"],
            &["--mode", "slot-reuse", "--checkpoint"],
            &["--mode", "slot-reuse", "--k", "1", "--chunk", "4K", "--sum-ctas", "1"],
        ];
        for knob in knobs {
            assert_eq!(with(knob), plain, "{nodes} x {gpus} {knob:?}");
        }
    }
}

/// A seed makes the data and the interleaving: every element is held against the host in each.
#[test]
fn many_interleavings_are_right_in_both_modes() {
    for seed in 1..=12 {
        let seed = seed.to_string();
        let checkpoint: &[&str] = if seed.len() == 1 { &[] } else { &["--checkpoint"] };
        let base = [&TINY[..], &["1", "--nodes", "2", "--gpus", "2", "--seed", &seed], checkpoint].concat();
        let in_place = replay(&base);
        let reuse = replay(&[&base[..], &["--mode", "slot-reuse"]].concat());
        assert_eq!(digests(&in_place), digests(&reuse), "seed {seed}");
    }
}

#[test]
fn uneven_layers_of_any_number_are_right() {
    for layers in ["1", "2", "3", "5"] {
        let shapes =
            ["--backend", "sim", "--group", "17x33,5,1x70,130", "--layers", layers, "--nodes", "3", "--gpus", "3"];
        let in_place = replay(&shapes);
        assert_eq!(digests(&in_place), digests(&replay(&[&shapes[..], &["--mode", "slot-reuse"]].concat())));
    }
}

/// T62: gradients do not pile up with layers, nor anything with steps.
#[test]
fn t62_peaks_grow_neither_with_steps_nor_with_layers() {
    for mode in ["in-place", "slot-reuse"] {
        let tiny = ["--backend", "sim", "--group", "64x64", "--nodes", "2", "--gpus", "2", "--mode", mode];
        let long = replay(&[&tiny[..], &["--layers", "3", "--steps", "20"]].concat());
        assert_eq!(long["steps"][1]["peak_bytes"], long["steps"][19]["peak_bytes"], "{mode}");
        let deep = replay(&[&tiny[..], &["--layers", "40", "--steps", "1"]].concat());
        for kind in ["ring", "reduce_scatter", "gradients", "held_gradients", "layer"] {
            let allowed = if kind == "ring" || kind == "layer" { 4096 } else { 0 };
            assert!(peak(&deep, 0, kind) <= peak(&long, 1, kind) + allowed, "{mode} {kind}");
        }
    }
}

#[test]
fn slot_reuse_holds_one_group_of_gradients_and_in_place_two() {
    let base = [&TINY[..], &["1", "--nodes", "3", "--gpus", "2"]].concat();
    let in_place = replay(&base);
    let reuse = replay(&[&base[..], &["--mode", "slot-reuse"]].concat());
    assert_eq!(peak(&in_place, 0, "gradients"), 2 * peak(&reuse, 0, "gradients"));
    assert_eq!((peak(&in_place, 0, "held_gradients") > 0, peak(&reuse, 0, "held_gradients")), (true, 0));
    assert!(peak(&reuse, 0, "total") < peak(&in_place, 0, "total"));
}

#[test]
fn the_table_shows_bounds_and_the_baseline_and_no_time_of_a_simulator() {
    let output = tide_bench(&[&["replay"], &TINY[..], &["3"]].concat());
    let text = stdout(&output);
    assert!(output.status.success(), "{text}{}", stderr(&output));
    let rows: Vec<Vec<&str>> =
        text.lines().filter(|line| !line.starts_with('#')).map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), 3, "{text}");
    assert!(rows.iter().all(|row| row[1] == "-" && row[13] == "4.000" && row.len() == 18), "{text}");
    assert!(text.contains("# Memory bounds        : OK") && text.contains("# Out of bounds values : 0 OK"), "{text}");
    let unchecked = stdout(&tide_bench(&[&["replay"], &TINY[..], &["1", "--no-check"]].concat()));
    assert!(unchecked.contains("N/A (not checked)"), "{unchecked}");
}

#[test]
fn what_cannot_be_replayed_is_refused_in_one_sentence() {
    for (arguments, named) in [
        (&["replay", "--model", "/nowhere/m.safetensors"][..], "--model"),
        (&["replay", "--layers", "0"], "--layers"),
        (&["replay", "--mode", "in-between"], "--mode"),
        (&["replay", "--grad-dtype", "f32"], "--grad-dtype"),
        (&["replay", "--json", "/nowhere/out.json"], "--json"),
    ] {
        let sentence = refusal(arguments, 2);
        assert!(sentence.contains(named), "{arguments:?}: {sentence}");
    }
    let sentence =
        refusal(&["replay", "--backend", "sim", "--preset", "llama-3.1-70b", "--nodes", "64", "--gpus", "8"], 3);
    assert!(sentence.contains("try --preset llama-3.1-70b-tiny"), "{sentence}");
}

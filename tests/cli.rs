//! `tide-bench` as its users meet it: what it prints, writes, refuses and returns.
#![cfg(feature = "cli")]

#[path = "cli/support.rs"]
mod support;

use half::bf16;
use serde_json::Value;
use support::*;

#[test]
fn without_arguments_it_runs_both_collectives_and_finds_them_right() {
    let output = tide_bench(&[]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    let rows: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let cells: Vec<Vec<&str>> = rows.iter().map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(cells.len(), 2, "{text}");
    assert_eq!((cells[0][0], cells[1][0]), ("ag", "rs"));
    for row in &cells {
        assert_eq!((row[2], row[9], row[10], row[11]), ("7087872", "-", "-", "0"), "{text}");
    }
    assert!(text.contains("8 = 2 nodes x 4 gpus") && text.contains("preset gpt2-small"), "{text}");
    assert!(text.contains("# Out of bounds values : 0 OK"), "{text}");
    assert!(stderr(&output).is_empty());
}

#[test]
fn json_has_a_result_of_each_collective_and_no_rates_on_the_simulator() {
    let results = results(&["run", "--group", "10x3,7", "--nodes", "3", "--gpus", "2"]);
    assert_eq!(results.len(), 2);
    for (result, collective) in results.iter().zip(["ag", "rs"]) {
        assert_eq!(result["collective"], collective);
        assert_eq!((&result["nodes"], &result["gpus"], &result["params"]), (&3.into(), &2.into(), &2.into()));
        assert_eq!((&result["backend"], &result["path"]), (&"sim".into(), &"device".into()));
        assert_eq!((&result["wrong"], &result["group_bytes"]), (&0.into(), &74.into()));
        assert!(result["algbw_gbps"].is_null() && result["busbw_gbps"].is_null());
        assert!(result["time_us"]["min"].as_f64().unwrap() > 0.0);
        assert_eq!(result["digest"].as_str().unwrap().len(), 32);
        assert!(result["buffer_bytes"].is_u64() && result["stock_buffer_bytes"].is_u64());
    }
    // Two rows of three elements and two of one, in fp32.
    assert_eq!(results[1]["out_bytes"], 4 * (2 * 3 + 2));
}

#[test]
fn json_goes_to_a_file_beside_the_table() {
    let dir = Scratch::new();
    let file = dir.path("out.json");
    let output = tide_bench(&["--group", "8", "--collective", "rs", "--json", text(&file)]);
    assert!(stdout(&output).contains("#wrong"));
    let value: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(value["results"].as_array().unwrap().len(), 1);
    assert_eq!(dir.file_names(), ["out.json"]);
}

/// T05, T30: sums of each rank's packed output, computed elsewhere.
#[test]
fn t05_t30_whole_numbers_come_out_exactly_on_any_topology() {
    type Case = (u32, u32, &'static [(&'static str, &'static [u64])], &'static [f32]);
    let cases: [Case; 4] = [
        (2, 4, &[("a", &[5, 3]), ("b", &[9, 2])], &[-14.0, 0.0, -3.0, -6.0, 1.0, 0.0, 0.0, 0.0]),
        (3, 2, &[("a", &[6, 4]), ("b", &[7])], &[-7.0, -19.0, -14.0, 12.0, -1.0, 3.0]),
        (5, 2, &[("a", &[10, 4]), ("b", &[7])], &[-8.0, 9.0, -8.0, 9.0, -25.0, 9.0, 9.0, 6.0, -10.0, 8.0]),
        (
            9,
            2,
            &[("a", &[18, 4]), ("b", &[7])],
            &[-7.0, -7.0, 10.0, -7.0, -7.0, 10.0, 10.0, -3.0, -8.0, 4.0, -1.0, 11.0, -11.0, 1.0, -4.0, 8.0, 3.0, -2.0],
        ),
    ];
    for (nodes, gpus, shapes, sums) in cases {
        let grads = whole_number_grads(shapes, sums.len() as u64);
        let out = Scratch::new();
        let (nodes, gpus) = (nodes.to_string(), gpus.to_string());
        let arguments = ["--grads", text(&grads.0), "--nodes", &nodes, "--gpus", &gpus, "--save", text(&out.0)];
        let results = results(&arguments);
        assert!(results.iter().all(|r| r["wrong"] == 0));
        assert_eq!(results[1]["max_abs_err"], 0.0);
        for (rank, &expected) in sums.iter().enumerate() {
            let saved = load(&out.path(&format!("rs-rank{rank}.safetensors")));
            let sum: f32 = saved.values().flat_map(|(_, _, bytes)| floats(bytes)).sum();
            assert_eq!(sum, expected, "{nodes} x {gpus} rank {rank}");
            for (name, shape) in shapes {
                let (dtype, saved_shape, _) = &saved[*name];
                let padded = shape[0].div_ceil(sums.len() as u64) as usize;
                assert_eq!((dtype.as_str(), saved_shape[0]), ("F32", padded));
            }
        }
    }
}

/// T06: an uneven last shard, a factor, and an output that held ones; padding keeps them.
#[test]
fn t06_accumulation_adds_to_ones_and_scales_only_the_sum() {
    let grads = whole_number_grads(&[("a", &[17, 3])], 4);
    let out = Scratch::new();
    let run = ["--grads", text(&grads.0), "--nodes", "1", "--gpus", "4", "--collective", "rs", "--save", text(&out.0)];
    let sums = |extra: &[&str]| -> Vec<f32> {
        results(&[&run[..], extra].concat());
        let sum = |rank| floats(&load(&out.path(&format!("rs-rank{rank}.safetensors")))["a"].2).iter().sum();
        (0..4).map(sum).collect()
    };
    assert_eq!(sums(&[]), [-11.0, 1.0, -4.0, 14.0]);
    assert_eq!(sums(&["--alpha", "0.25", "--accumulate", "--iters", "3"]), [12.25, 15.25, 14.0, 18.5]);
}

#[test]
fn the_digest_depends_on_the_data_and_on_nothing_else() {
    let digest = |arguments: &[&str]| results(arguments)[0]["digest"].as_str().unwrap().to_owned();
    let model = Scratch::new();
    let file = model.path("m.safetensors");
    let values = (0..40 * 33).map(|i| (i as f32 * 0.37).sin());
    write_file(&file, &[Tensor::f32("w", &[40, 33], values), Tensor::f32("b", &[5], [0.1, 0.2, 0.3, 0.4, 0.5])]);
    for (nodes, gpus) in [("1", "8"), ("2", "4"), ("3", "2"), ("5", "4"), ("9", "2")] {
        let base = ["--model", text(&file), "--collective", "rs", "--nodes", nodes, "--gpus", gpus];
        let with = |extra: &[&str]| digest(&[&base[..], extra].concat());
        let plain = with(&[]);
        let knobs: [&[&str]; 6] = [
            &["--sum-ctas", "1"],
            &["--chunk", "8K"],
            &["--passes", "2"],
            &["--k", "1"],
            &["--path", "host"],
            &["--seed", "7"],
        ];
        for knob in knobs {
            assert_eq!(with(knob), plain, "{nodes} x {gpus} {knob:?}");
        }
        assert_ne!(with(&["--alpha", "2"]), plain);
    }
    let seeded = |seed| digest(&["--group", "40x33", "--collective", "rs", "--seed", seed]);
    assert_eq!(seeded("1"), seeded("1"));
    assert_ne!(seeded("1"), seeded("2"), "the seed makes the generated data");
}

/// T46: every type, every bit, on every rank.
#[test]
fn t46_a_models_tensors_come_back_exactly_whatever_their_type() {
    let dir = Scratch::new();
    let bytes = |n: u32| (0..n).map(|i| (i * 151 + 7) as u8).collect::<Vec<u8>>();
    let tensors = [
        Tensor::raw("mask", "BOOL", &[7], vec![1, 0, 1, 1, 0, 0, 1]),
        Tensor::raw("nan.bits", "F32", &[3, 2], bytes(24)),
        Tensor::raw("half", "F16", &[5, 1, 3], bytes(30)),
        Tensor::raw("ids", "I64", &[1, 9], bytes(72)),
        Tensor::raw("tiny", "F8_E5M2", &[11], bytes(11)),
        Tensor::raw("empty", "BF16", &[0, 4], vec![]),
    ];
    let file = dir.path("m.safetensors");
    write_file(&file, &tensors);
    let out = dir.path("out");
    let arguments = ["--model", text(&file), "--collective", "ag", "--nodes", "3", "--gpus", "2", "--save", text(&out)];
    assert_eq!(results(&arguments)[0]["wrong"], 0);
    for rank in 0..6 {
        let saved = load(&out.join(format!("ag-rank{rank}.safetensors")));
        assert_eq!(saved.len(), tensors.len());
        for t in &tensors {
            let (dtype, shape, data) = &saved[t.name];
            let shape: Vec<u64> = shape.iter().map(|&d| d as u64).collect();
            assert_eq!((dtype.as_str(), &shape, data), (t.dtype, &t.shape, &t.data), "rank {rank} {}", t.name);
        }
    }
}

#[test]
fn a_models_gradients_are_its_floats_times_the_documented_scale() {
    let dir = Scratch::new();
    let file = dir.path("m.safetensors");
    let values: Vec<f32> = (0..12).map(|i| i as f32 * 0.3 - 1.7).collect();
    write_file(
        &file,
        &[Tensor::raw("ids", "I32", &[2], vec![1; 8]), Tensor::f32("w", &[4, 3], values.iter().copied())],
    );
    let out = dir.path("out");
    let output = tide_bench(&["--model", text(&file), "--nodes", "2", "--gpus", "2", "--save", text(&out)]);
    assert!(output.status.success());
    let left_out = "# reduce-scatter: left out, for not being f32, f16 or bf16: `ids` (i32)\n";
    assert!(stdout(&output).contains(left_out), "{}", stdout(&output));
    for rank in 0..4_usize {
        let saved = load(&out.join(format!("rs-rank{rank}.safetensors")));
        assert_eq!(saved.keys().collect::<Vec<_>>(), ["w"]);
        for (column, got) in floats(&saved["w"].2).into_iter().enumerate() {
            let gradient = |u: u32| bf16::from_f32(values[3 * rank + column] * (1.0 + (u * (u + 1) / 2) as f32 / 64.0));
            let expected: f64 = (0..4).map(|u| gradient(u).to_f64()).sum();
            assert!((f64::from(got) - expected).abs() <= 1e-5 * expected.abs().max(1.0));
        }
    }
}

/// T19: special values stay where they belong, and only there.
#[test]
fn t19_nan_and_infinity_come_out_where_they_belong() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let dir = Scratch::new();
    let ranks = [[nan, inf, inf, 3.389e38], [1.0, 1.0, -inf, 3.389e38], [2.0; 4], [-1.0, 0.0, 0.0, 3.389e38]];
    for (rank, values) in ranks.iter().enumerate() {
        write_file(&dir.path(&format!("rank{rank}.safetensors")), &[Tensor::bf16("a", &[4], values.iter().copied())]);
    }
    let out = dir.path("out");
    let run = ["--grads", text(&dir.0), "--nodes", "2", "--gpus", "2", "--alpha", "0.25", "--save", text(&out)];
    assert_eq!(results(&run)[1]["wrong"], 0);
    let got = |rank| floats(&load(&out.join(format!("rs-rank{rank}.safetensors")))["a"].2)[0];
    assert!(got(0).is_nan() && got(2).is_nan());
    assert!(got(1) == inf && got(3) == inf);
}

#[test]
fn more_parameters_than_the_fast_path_takes_go_the_stock_way_and_say_so() {
    let output = tide_bench(&["--preset", "qwen3-30b-a3b-unfused-tiny"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{text}{}", stderr(&output));
    let lines =
        text.lines().filter(|line| line.starts_with('#') && line.contains("stock path") && line.contains("393"));
    assert_eq!(lines.count(), 2, "one line for each collective: {text}");
    let results = results(&["--preset", "qwen3-30b-a3b-unfused-tiny", "--collective", "rs"]);
    assert_eq!(
        (&results[0]["path"], &results[0]["params"], &results[0]["wrong"]),
        (&"stock".into(), &393.into(), &0.into())
    );
}

#[test]
fn an_unchecked_run_says_so() {
    let output = tide_bench(&["--group", "8", "--no-check"]);
    assert!(stdout(&output).contains("# Out of bounds values : N/A"));
    assert!(results(&["--group", "8", "--no-check"])[0]["wrong"].is_null());
}

#[test]
fn bad_options_are_refused_in_one_sentence_that_names_them() {
    for (arguments, named) in [
        (&["--gpus", "9"][..], "--gpus"),
        (&["--nodes", "0"], "--nodes"),
        (&["--nodes", "1025"], "--nodes"),
        (&["--preset", "gpt9"], "`gpt9`"),
        (&["--group", "4xx4"], "--group"),
        (&["--frobnicate"], "--frobnicate"),
        (&["--collective", "ar"], "--collective"),
        (&["--alpha", "inf"], "--alpha"),
        (&["--iters", "0"], "--iters"),
        (&["--group", "8", "--nodes", "9", "--gpus", "8", "--wave", "3"], "wave width 3"),
        (&["--group", "8", "--wave", "9"], "wave width 9"),
        (&["--json", "/nowhere/out.json"], "--json /nowhere/out.json"),
        (&["--model", "/nowhere/m.safetensors"], "/nowhere/m.safetensors"),
        (&["--grads", "/nowhere"], "--grads /nowhere"),
        (&["plan", "--nodes", "9", "--gpus", "8", "--wave", "3"], "wave width 3"),
    ] {
        let sentence = refusal(arguments, 2);
        assert!(sentence.contains(named), "{arguments:?}: {sentence}");
    }
}

#[test]
fn bad_files_are_refused_by_name_and_nothing_is_written() {
    let ones = |name, shape: &[u64]| Tensor::f32(name, shape, vec![1.0; shape.iter().product::<u64>() as usize]);
    let good = [ones("a", &[4]), ones("b", &[2, 3])];
    let grads = |change: &dyn Fn(&Scratch)| {
        let dir = Scratch::new();
        (0..4).for_each(|rank| write_file(&dir.path(&format!("rank{rank}.safetensors")), &good));
        change(&dir);
        let out = Scratch::new();
        let (save, json) = (out.path("save"), out.path("out.json"));
        let run =
            ["--grads", text(&dir.0), "--nodes", "2", "--gpus", "2", "--save", text(&save), "--json", text(&json)];
        let sentence = refusal(&run, 2);
        assert!(out.file_names().is_empty(), "{sentence}");
        sentence
    };
    let rank2 = |dir: &Scratch| dir.path("rank2.safetensors");
    let missing = grads(&|dir| std::fs::remove_file(rank2(dir)).unwrap());
    assert!(missing.contains("rank2.safetensors: no such file"), "{missing}");
    let surplus = grads(&|dir| write_file(&dir.path("rank4.safetensors"), &good));
    assert!(surplus.contains("rank4.safetensors: one file too many"), "{surplus}");
    let truncated = grads(&|dir| {
        let bytes = std::fs::read(rank2(dir)).unwrap();
        std::fs::write(rank2(dir), &bytes[..bytes.len() - 3]).unwrap();
    });
    assert!(truncated.contains("rank2.safetensors: truncated"), "{truncated}");
    let shape = grads(&|dir| write_file(&rank2(dir), &[ones("a", &[4]), ones("b", &[3, 2])]));
    assert!(shape.contains("rank2.safetensors: tensor `b` is f32 [3, 2], but f32 [2, 3]"), "{shape}");
    let absent = grads(&|dir| write_file(&rank2(dir), &good[..1]));
    assert!(absent.contains("tensor `b` of rank0.safetensors is missing"), "{absent}");
    let integer = grads(&|dir| {
        (0..4).for_each(|rank| {
            let tensor = Tensor::raw("ids", "I64", &[1], vec![0; 8]);
            write_file(&dir.path(&format!("rank{rank}.safetensors")), &[tensor]);
        });
    });
    assert!(integer.contains("tensor `ids` is i64"), "{integer}");
}

/// T09: a scalar is refused by its name; a reduction that leaves it out goes on.
#[test]
fn t09_a_scalar_is_refused_by_its_name() {
    let dir = Scratch::new();
    let file = dir.path("m.safetensors");
    write_file(&file, &[Tensor::f32("w", &[4], [1.0; 4]), Tensor::raw("steps", "I64", &[], vec![0; 8])]);
    let sentence = refusal(&["--model", text(&file)], 2);
    assert!(sentence.contains("m.safetensors: 0-dim parameter `steps`: reshape to [1]"), "{sentence}");
    assert_eq!(results(&["--model", text(&file), "--collective", "rs"])[0]["wrong"], 0);
}

#[test]
fn a_run_that_does_not_fit_is_unsupported_and_says_what_does() {
    let sentence = refusal(&["--preset", "llama-3.1-70b", "--nodes", "64", "--gpus", "8"], 3);
    assert!(sentence.contains("GiB") && sentence.contains("try --preset llama-3.1-70b-tiny"), "{sentence}");
}

#[test]
fn the_exhaustive_plan_count_is_the_papers() {
    let output = tide_bench(&["plan", "--exhaustive"]);
    assert_eq!(stdout(&output), "accepted 458304 rejected 65472\n");
    assert!(output.status.success());
}

#[test]
fn a_plan_tells_waves_memory_and_descriptors() {
    let arguments = ["plan", "--nodes", "64", "--gpus", "8", "--preset", "llama-3.1-8b"];
    let output = tide_bench(&arguments);
    let words = stdout(&output);
    for expected in ["8 waves", "inbox", "accumulator", "the paper's bound", "copy descriptors", "all-gather, 6 rounds"]
    {
        assert!(words.contains(expected), "no {expected} in {words}");
    }
    let output = tide_bench(&[&arguments[..], &["--json", "-"]].concat());
    let plan = &serde_json::from_slice::<Value>(&output.stdout).unwrap()["plan"];
    let reduce = &plan["reduce_scatter"];
    assert_eq!(reduce["waves"].as_array().unwrap().len(), 8);
    assert_eq!((&reduce["descriptors"], &reduce["descriptors_flat"]), (&(7 * 9 * 64).into(), &(7 * 9 * 64 * 8).into()));
    assert!(reduce["memory_bytes"].as_u64().unwrap() > 0);
    assert!((reduce["paper_ns_share"].as_f64().unwrap() - 0.594).abs() < 1e-3);
    for reuse in [&["--slot-reuse"][..], &["--mode", "slot-reuse"]] {
        let reuse = tide_bench(&[&arguments[..], reuse, &["--json", "-"]].concat());
        let plan = &serde_json::from_slice::<Value>(&reuse.stdout).unwrap()["plan"];
        assert!((plan["reduce_scatter"]["paper_ns_share"].as_f64().unwrap() - 0.164).abs() < 1e-3);
    }
}

/// The paper's example: 0.594 and 0.164 NS to reduce, 3.72 and 2.29 NS for a layer's backward.
#[test]
fn the_bounds_of_both_modes_are_the_papers() {
    let base = ["plan", "--nodes", "64", "--gpus", "8", "--preset", "llama-3.1-70b-vocab", "--k", "4", "--mode"];
    for (mode, area, layer) in [("in-place", " 0.594 NS", " 3.72 NS"), ("slot-reuse", " 0.164 NS", " 2.29 NS")] {
        let words = stdout(&tide_bench(&[&base[..], &[mode]].concat()));
        assert!(words.contains(area) && words.contains(layer), "{words}");
    }
}

#[test]
fn help_tells_units_defaults_and_how_gradients_are_scaled() {
    let output = tide_bench(&["--help"]);
    assert!(output.status.success());
    let words = stdout(&output);
    for expected in ["scale(u) = 1 +", "GB/s", "[default: 4]", "Exit status", "prev = 1"] {
        assert!(words.contains(expected), "no {expected} in {words}");
    }
    assert_eq!(stdout(&tide_bench(&["--version"])), format!("tide-bench {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn results_that_cannot_be_written_are_no_success() {
    for arguments in [&["--json", "-"][..], &[]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tide-bench"));
        command.args(["run", "--group", "8", "--nodes", "1", "--gpus", "1"]).args(arguments).stdout(full);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("could not be written"), "{output:?}");
    }
}

#[test]
fn the_cluster_back_end_is_refused_in_words_where_it_cannot_be() {
    let spawned = tide_bench(&["run", "--backend", "sim", "--spawn", "2"]);
    assert_eq!(spawned.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&spawned.stderr).contains("--spawn: only --backend nccl"), "{spawned:?}");
    // On a machine with a GPU this runs, or says what of NCCL is lacking.
    let output = tide_bench(&["run", "--backend", "nccl", "--nodes", "1", "--gpus", "1", "--group", "8"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() || (output.status.code() == Some(3) && said.lines().count() == 1), "{output:?}");
}

#[test]
fn doctor_estimates_what_connections_take() {
    let output = tide_bench(&["doctor", "--nodes", "8"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("of all ranks     64           512        260"), "{said}");
    assert_eq!(tide_bench(&["doctor", "--gpus", "4"]).status.code(), Some(2));
}

#[test]
fn numbers_out_of_reach_are_refused_at_once() {
    let ctas = ["run", "--group", "8", "--nodes", "1", "--gpus", "1", "--sum-ctas", "4294967295"];
    let layers = ["replay", "--group", "144115188075855872", "--nodes", "1", "--gpus", "1", "--layers", "1024"];
    for (arguments, status) in [(&ctas[..], 2), (&layers[..], 3)] {
        let output = tide_bench(arguments);
        assert_eq!(output.status.code(), Some(status), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1, "{output:?}");
    }
}

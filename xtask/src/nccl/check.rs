//! Are the modules fit to run? As for the committed PTX, each check first catches planted faults.

use super::Built;
use super::ir::{self, Functions, Signature};
use crate::check::{
    File, Findings, Outcome, check_barriers, check_entries, check_instructions, check_memory, check_ptxas,
    check_registers, judge,
};
use crate::ptxas::Ptxas;
use crate::table::{nccl_frame_bytes_max, nccl_kernels};
use anyhow::{Result, anyhow};
use std::collections::BTreeMap;
use tide_device::abi::kernel::{Kernel, NcclBackend};

/// What a module takes from outside: the launch's shared memory.
const EXTERNAL: [&str; 1] = [".extern .shared .align 1024 .b8 tide_smem[];"];

/// Bytes that the shim gives NCCL for its view of a context.
const CONTEXT_BYTES: u64 = 48;

/// The function that fills a context.
const OPEN: &str = "ncclGin_C_initWithResourceSharingMode";

/// Runs every check on what was built, and prints a line for each. `shim` and `theirs` are the text of the shim and of
/// NCCL's bitcode. How many checks failed.
pub fn all(built: &[Built], shim: &str, theirs: &str) -> usize {
    let ptxas = Ptxas::find();
    let ptxas = || ptxas.as_ref().map_err(|error| anyhow!("{error:#}"));
    let ours: Vec<&str> = built.iter().map(|module| module.ours.as_str()).collect();
    let mut passed = vec![
        judge("signatures", Ok(check_signatures(shim, theirs))),
        judge("context", Ok(check_context(theirs))),
        judge("calls", Ok(check_calls(&ours, shim))),
    ];
    for backend in NcclBackend::ALL {
        let of_backend = built.iter().filter(|module| module.backend == backend);
        let file = |module: &Built| File::new(module.file.clone(), module.arch, module.text.clone());
        let files: Vec<File> = of_backend.map(file).collect();
        let kernels = nccl_kernels(backend);
        println!("      {}:", backend.name());
        passed.extend([
            judge("closed", Ok(check_closed(&files))),
            judge("entries", Ok(check_entries(&files, kernels))),
            judge("barriers", Ok(check_barriers(&files, kernels))),
            judge("instructions", Ok(check_instructions(&files, kernels))),
            judge("ptxas", ptxas().and_then(|ptxas| check_ptxas(ptxas, &files))),
            judge("memory", ptxas().and_then(|p| check_memory(p, &files, kernels, nccl_frame_bytes_max(backend)))),
            judge("registers", ptxas().and_then(|ptxas| check_registers(ptxas, &files, kernels))),
        ]);
        if let Ok(ptxas) = ptxas() {
            // What was refused above has no figures.
            report(ptxas, &files).unwrap_or_else(|error| println!("      {error:#}"));
        }
    }
    passed.iter().filter(|passed| !**passed).count()
}

fn report(ptxas: &Ptxas, files: &[File]) -> Result<()> {
    for file in files {
        for report in ptxas.assemble(&file.text, file.arch.cpu)? {
            println!(
                "      {}: {}: {} registers, {} bytes of frame, {} of spills",
                file.name, report.name, report.registers, report.frame_bytes, report.spill_bytes
            );
        }
    }
    Ok(())
}

/// Whether what is wanted is there, with the same type.
fn same(wanted: &BTreeMap<String, Signature>, there: &BTreeMap<String, Signature>) -> Findings {
    let complain = |(name, wanted): (&String, &Signature)| match there.get(name) {
        None => Some(format!("{name} is not there: another NCCL than the one this was written for")),
        Some(found) if found == wanted => None,
        Some(found) => {
            let shown = |s: &Signature| format!("{} ({})", s.result, s.parameters.join(", "));
            Some(format!("{name}: called as {}, is {}", shown(wanted), shown(found)))
        }
    };
    wanted.iter().filter_map(complain).collect()
}

fn check_signatures(shim: &str, theirs: &str) -> Outcome {
    let there = ir::functions(theirs);
    let wanted = ir::functions(shim).declared;
    // A clean specimen is a module that defines what the shim declares.
    let specimen = shim.replace("declare ", "define ");
    let examine = |theirs: &str| same(&wanted, &ir::functions(theirs).defined);
    let changed = |from: &str, to: &str| (format!("`{to}` for `{from}`"), examine(&specimen.replacen(from, to, 1)));
    let mut planted = vec![
        changed("%struct.ncclTeam = type { i32, i32, i32 }", "%struct.ncclTeam = type { i32, i32, i64 }"),
        changed("type { [16 x i8] }", "type { [24 x i8] }"),
        changed(
            "@ncclGinFlushTimeout(ptr, ptr byval(%struct.ncclCoopAny), i32",
            "@ncclGinFlushTimeout(ptr, ptr byval(%struct.ncclCoopAny), i64",
        ),
        changed("@ncclGinFlushTimeout(ptr, ptr byval(%struct.ncclCoopAny)", "@ncclGinFlushTimeout(ptr, [3 x i64]"),
        changed("%struct.ncclTeam @ncclTeamWorld", "[3 x i32] @ncclTeamWorld"),
        changed("i8 zeroext", "i8"),
        changed("@ncclGinReadSignalVA(ptr, ptr, i64, i32, i32)", "@ncclGinReadSignalVA(ptr, ptr, i64, i32)"),
    ];
    for name in wanted.keys() {
        planted.push((format!("no {name}"), examine(&specimen.replace(&format!("@{name}("), "@other("))));
    }
    Outcome {
        detail: format!("{} functions of NCCL are called as they are defined", wanted.len()),
        planted,
        clean: examine(&specimen),
        findings: same(&wanted, &there.defined),
    }
}

/// Whether NCCL's view of a context fits what the shim gives: its initialiser says what it writes.
fn context(theirs: &str) -> Findings {
    let define = theirs.lines().find(|line| line.starts_with("define ") && line.contains(&format!("@{OPEN}(")));
    let ranges = define.and_then(|line| line.split_once("initializes(")?.1.split_once("))"));
    let Some((ranges, _)) = ranges else { return vec![format!("{OPEN} does not say what it writes")] };
    let ends = ranges.split(',').skip(1).step_by(2).map(|end| end.trim().trim_end_matches(')').parse::<u64>());
    match ends.collect::<Result<Vec<u64>, _>>() {
        Ok(ends) if ends.iter().all(|end| *end <= CONTEXT_BYTES) => Vec::new(),
        ends => vec![format!("{OPEN} writes up to {ends:?}, the shim has {CONTEXT_BYTES} bytes")],
    }
}

fn check_context(theirs: &str) -> Outcome {
    let specimen = |ranges: &str| context(&format!("define void @{OPEN}(ptr initializes({ranges}) %0, i32 %1) {{\n"));
    Outcome {
        detail: format!("NCCL's view of a context fits {CONTEXT_BYTES} bytes"),
        planted: vec![
            ("a larger context".to_string(), specimen("(0, 8), (12, 56)")),
            ("an initialiser that says nothing".to_string(), context(&format!("define void @{OPEN}(ptr %0) {{\n"))),
            ("no initialiser".to_string(), context("")),
        ],
        clean: specimen("(0, 8), (12, 17), (24, 44)"),
        findings: context(theirs),
    }
}

/// Whether the device crate calls the shim as it is.
fn check_calls(ours: &[&str], shim: &str) -> Outcome {
    let there = ir::functions(shim).defined;
    let of_shim = |functions: Functions| -> BTreeMap<String, Signature> {
        functions.declared.into_iter().filter(|(name, _)| name.starts_with("nccl")).collect()
    };
    let examine = |ours: &str| {
        let called = of_shim(ir::functions(ours));
        if called.is_empty() { vec!["nothing of the shim is called".to_string()] } else { same(&called, &there) }
    };
    let clean = "declare noundef i32 @nccl_gin_flush_timeout(ptr noundef, i32 noundef, i32 noundef, i64 noundef) #1\n";
    Outcome {
        detail: "the device crate calls the shim as it is defined".to_string(),
        planted: vec![
            ("a parameter of another size".to_string(), examine(&clean.replace("i64", "i32"))),
            ("a parameter too few".to_string(), examine(&clean.replace(", i64 noundef", ""))),
            (
                "a function of NCCL itself".to_string(),
                examine(&clean.replace("nccl_gin_flush_timeout", "ncclGinFlush")),
            ),
            ("no call at all".to_string(), examine("declare void @other()\n")),
        ],
        clean: examine(clean),
        findings: ours.iter().flat_map(|ours| examine(ours)).collect(),
    }
}

/// Whether a module is whole: nothing from outside but what a launch brings, and no name of NCCL's or the shim's left.
fn closed(text: &str) -> Findings {
    let code = || text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let extern_line = |line: &&str| [".extern ", ".weak "].iter().any(|word| line.trim_start().starts_with(word));
    let outside = code().filter(extern_line).filter(|line| !EXTERNAL.contains(&line.trim()));
    let mut findings: Findings = outside.map(|line| format!("needs from outside: {}", line.trim())).collect();
    let left = code().filter(|line| line.contains("nccl") && !Kernel::NCCL.iter().any(|k| line.contains(k.name())));
    findings.extend(left.map(|line| format!("not inlined: {}", line.trim())));
    findings
}

fn check_closed(files: &[File]) -> Outcome {
    let name = Kernel::NetNccl.name();
    let clean = format!("// nccl: 23203\n{}\n.visible .entry {name}(\n)\n{{\n\tret;\n}}\n", EXTERNAL[0]);
    let with = |line: &str| closed(&clean.replace("\tret;", &format!("\t{line}\n\tret;")));
    Outcome {
        detail: "nothing from outside, nothing of NCCL left to call".to_string(),
        planted: vec![
            ("a call of NCCL".to_string(), with("call.uni ncclGinPut_v3, (param0);")),
            ("a call of the shim".to_string(), with("call.uni nccl_gin_put, (param0);")),
            (
                "a table of NCCL's functions".to_string(),
                closed(&format!("{clean}.const .u64 ncclCoopAny_vtable[1];\n")),
            ),
            ("a function from outside".to_string(), closed(&format!(".extern .func __assertfail\n{clean}"))),
        ],
        clean: closed(&clean),
        findings: files
            .iter()
            .flat_map(|file| closed(&file.text).into_iter().map(|finding| format!("{}: {finding}", file.name)))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHIM: &str = include_str!("../../../nccl-gin/src/device/shim.ll");

    /// The shim's own declarations stand for NCCL where there is none.
    fn stand_in() -> String {
        SHIM.replace("declare ", "define ")
            .replace(&format!("@{OPEN}(ptr,"), &format!("@{OPEN}(ptr initializes((0, 8), (12, 17), (24, 44)),"))
    }

    #[test]
    fn checks_are_proven_and_pass_a_stand_in() {
        let theirs = stand_in();
        let ours = "declare noundef i64 @nccl_gin_read_signal(ptr noundef, ptr noundef, i64 noundef, i32 noundef, i32 noundef)\n";
        for (name, outcome) in [
            ("signatures", check_signatures(SHIM, &theirs)),
            ("context", check_context(&theirs)),
            ("calls", check_calls(&[ours], SHIM)),
            ("closed", check_closed(&[])),
        ] {
            assert!(judge(name, Ok(outcome)), "{name}");
        }
    }

    #[test]
    fn another_nccl_is_found_out() {
        let other = stand_in().replace("@ncclGinPut_v3(", "@ncclGinPut_v4(");
        assert_eq!(check_signatures(SHIM, &other).findings.len(), 1);
        let larger = stand_in().replace("(24, 44)", "(24, 64)");
        assert_eq!(check_context(&larger).findings.len(), 1);
    }
}

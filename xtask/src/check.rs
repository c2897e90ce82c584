//! `cargo xtask ptx --check`: is the committed PTX what the sources give, and is it fit to run?
//!
//! Every check first sees a clean specimen, which it must pass, and planted faults, each of which it must catch; only
//! then is its word on the real files believed. A check that cannot run has failed.

use crate::lint;
use crate::provenance::{self, Provenance, Source};
use crate::ptx::{Function, Module, is_barrier, mnemonic};
use crate::ptxas::{Ptxas, Report};
use crate::table::{ARCHS, Arch, Expectation, KERNELS, PARTS_PER_SM, REGISTERS_PER_PART};
use crate::toolchain::{self, Toolchain};
use crate::{build, specimen};
use anyhow::{Context, Result, anyhow, bail};
use std::path::Path;

/// What is wrong, one sentence each; nothing if all is well.
pub type Findings = Vec<String>;

/// What a check came to.
pub struct Outcome {
    /// What was looked at.
    pub detail: String,
    /// Planted faults, and what the check said of each.
    pub planted: Vec<(String, Findings)>,
    /// What it said of clean specimens.
    pub clean: Findings,
    /// What it said of the real thing.
    pub findings: Findings,
}

/// A file of PTX.
pub struct File {
    /// Its name.
    pub name: String,
    /// What it is built for.
    pub arch: Arch,
    /// What it says.
    pub text: String,
    /// What that means.
    pub module: Module,
}

impl File {
    /// Reads a text.
    pub fn new(name: String, arch: Arch, text: String) -> Self {
        let module = Module::parse(&text);
        Self { name, arch, text, module }
    }
}

/// The kernels that a module is to have.
pub type Kernels<'a> = &'a [Expectation];

/// Runs every check and prints a line for each. Returns how many failed.
pub fn all(root: &Path) -> usize {
    let sources = provenance::sources(root);
    let committed = ARCHS.into_iter().map(|arch| committed(root, arch)).collect::<Result<Vec<_>>>();
    let toolchain = toolchain::find();
    let ptxas = Ptxas::find();
    let sources = || sources.as_deref().map_err(|error| anyhow!("{error:#}"));
    let files = || committed.as_deref().map_err(|error| anyhow!("{error:#}"));
    let toolchain = || toolchain.as_ref().map_err(|error| anyhow!("{error:#}"));
    let ptxas = || ptxas.as_ref().map_err(|error| anyhow!("{error:#}"));

    let lines = [
        judge("lint", sources().map(check_lint)),
        judge("clippy", toolchain().and_then(|toolchain| check_clippy(root, toolchain))),
        judge("sources", sources().and_then(|sources| check_sources(sources, files()?))),
        judge("rebuild", toolchain().and_then(|toolchain| check_rebuild(root, toolchain, files()?))),
        judge("entries", files().map(|files| check_entries(files, &KERNELS))),
        judge("barriers", files().map(|files| check_barriers(files, &KERNELS))),
        judge("instructions", files().map(|files| check_instructions(files, &KERNELS))),
        judge("atomics", files().map(|files| check_statements(files, atomics, &specimen::ATOMICS))),
        judge("reads", files().map(|files| check_statements(files, reads, &specimen::READS))),
        judge("arithmetic", files().map(|files| check_statements(files, arithmetic, &specimen::ARITHMETIC))),
        judge("ptxas", ptxas().and_then(|ptxas| check_ptxas(ptxas, files()?))),
        judge("memory", ptxas().and_then(|ptxas| check_memory(ptxas, files()?, &KERNELS, NO_FRAME))),
        judge("registers", ptxas().and_then(|ptxas| check_registers(ptxas, files()?, &KERNELS))),
    ];
    lines.iter().filter(|passed| !**passed).count()
}

fn committed(root: &Path, arch: Arch) -> Result<File> {
    let path = root.join("device/ptx").join(arch.file_name());
    let text = std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
    Ok(File::new(arch.file_name(), arch, text))
}

/// Prints a check's line. Whether it passed.
pub fn judge(name: &str, outcome: Result<Outcome>) -> bool {
    let (line, problems) = match outcome {
        Err(error) => ("cannot run".to_string(), vec![format!("{error:#}")]),
        Ok(outcome) => {
            let problems = problems(&outcome);
            (format!("{} ({} planted faults caught)", outcome.detail, outcome.planted.len()), problems)
        }
    };
    if problems.is_empty() {
        println!("ok    {name:<13} {line}");
    } else {
        println!("FAIL  {name:<13} {} problems", problems.len());
        for problem in &problems {
            println!("      {problem}");
        }
    }
    problems.is_empty()
}

/// Why an outcome is no pass.
fn problems(outcome: &Outcome) -> Findings {
    let mut problems = Vec::new();
    if outcome.planted.is_empty() {
        problems.push("the check is unproven: nothing was planted".to_string());
    }
    let missed = outcome.planted.iter().filter(|(_, findings)| findings.is_empty());
    problems.extend(missed.map(|(what, _)| format!("the check is blind: it did not see {what}")));
    problems.extend(outcome.clean.iter().map(|finding| format!("the check cries wolf: {finding}")));
    problems.extend(outcome.findings.iter().cloned());
    problems
}

/// The findings in every file, each with the file's name.
fn in_files(files: &[File], examine: impl Fn(&Module) -> Findings) -> Findings {
    let of_file = |file: &File| {
        examine(&file.module).into_iter().map(|finding| format!("{}: {finding}", file.name)).collect::<Findings>()
    };
    files.iter().flat_map(of_file).collect()
}

fn check_lint(sources: &[Source]) -> Outcome {
    Outcome {
        detail: format!("{} files: assembly, atomics and cfg stand where they may", sources.len()),
        planted: lint::planted().into_iter().map(|(what, source)| (what, lint::breaches(&[source]))).collect(),
        clean: Vec::new(),
        findings: lint::breaches(sources),
    }
}

fn check_clippy(root: &Path, toolchain: &Toolchain) -> Result<Outcome> {
    let driver = toolchain.clippy_driver.as_deref();
    let driver =
        driver.context("the device compiler has no clippy (package rust-web-clippy, or rustup's component clippy)")?;
    let findings = |outcome: Result<()>| outcome.err().map(|error| format!("{error:#}")).into_iter().collect();
    let specimen = |text: &str| -> Result<Findings> {
        let directory = specimen::Directory::new("clippy")?;
        let file = directory.path().join("specimen.rs");
        std::fs::write(&file, text)?;
        let output = std::process::Command::new(driver)
            .args(["--crate-type=lib", "--emit=metadata", "-Dclippy::undocumented_unsafe_blocks"])
            .args(["-Dunsafe_op_in_unsafe_fn", "-Dmissing_docs", "--edition=2024", "--out-dir"])
            .arg(directory.path())
            .arg(&file)
            .output()?;
        Ok(if output.status.success() {
            Vec::new()
        } else {
            vec![String::from_utf8_lossy(&output.stderr).into_owned()]
        })
    };
    let mut planted = Vec::new();
    for (what, text) in specimen::UNTIDY_RUST {
        planted.push((what.to_string(), specimen(text)?));
    }
    Ok(Outcome {
        detail: "the project's lints hold in the device build".to_string(),
        planted,
        clean: specimen(specimen::TIDY_RUST)?,
        findings: findings(build::clippy(root, toolchain, driver, ARCHS[0])),
    })
}

/// Whether the file's header names the hash of these sources.
fn source_hash(ptx: &str, sources: &[Source]) -> Findings {
    let hash = provenance::hash(sources);
    match Provenance::of(ptx) {
        Err(error) => vec![format!("{error:#}")],
        Ok(provenance) if provenance.sources != hash => {
            vec![format!(
                "built from other sources ({}…, now {}…): run `cargo xtask ptx`",
                short(&provenance.sources),
                short(&hash)
            )]
        }
        Ok(_) => Vec::new(),
    }
}

fn short(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}

fn check_sources(sources: &[Source], files: &[File]) -> Result<Outcome> {
    let header = |sources: &[Source]| {
        let hash = provenance::hash(sources);
        Provenance { compiler: "c".into(), target: "t".into(), flags: "f".into(), sources: hash }.header()
    };
    let clean = header(sources);
    let mut one_byte = sources.to_vec();
    let (_, contents) = one_byte.last_mut().context("there are no sources")?;
    *contents.last_mut().context("a source is empty")? ^= 1;
    let planted = vec![
        ("a changed byte".to_string(), source_hash(&clean, &one_byte)),
        ("a missing file".to_string(), source_hash(&clean, &sources[1..])),
        ("a file without a header".to_string(), source_hash(".version 8.6", sources)),
    ];
    let findings = files.iter().flat_map(|file| {
        source_hash(&file.text, sources).into_iter().map(|finding| format!("{}: {finding}", file.name))
    });
    Ok(Outcome {
        detail: format!(
            "sha256 {}… of {} files stands in every header",
            short(&provenance::hash(sources)),
            sources.len()
        ),
        planted,
        clean: source_hash(&clean, sources),
        findings: findings.collect(),
    })
}

/// Whether a committed file is the built one; under another compiler only its sources can be compared.
fn same_build(committed: &str, built: &str) -> Findings {
    let (theirs, ours) = match (Provenance::of(committed), Provenance::of(built)) {
        (Ok(theirs), Ok(ours)) => (theirs, ours),
        (Err(error), _) | (_, Err(error)) => return vec![format!("{error:#}")],
    };
    if theirs.compiler != ours.compiler {
        return if theirs.sources == ours.sources {
            Vec::new()
        } else {
            vec!["built by another compiler, and from other sources".to_string()]
        };
    }
    if committed == built {
        return Vec::new();
    }
    let differing = committed.lines().zip(built.lines()).position(|(a, b)| a != b);
    let line = differing.unwrap_or(committed.lines().count().min(built.lines().count())) + 1;
    vec![format!("not what the sources give: differs from line {line} on; run `cargo xtask ptx`")]
}

fn check_rebuild(root: &Path, toolchain: &Toolchain, files: &[File]) -> Result<Outcome> {
    let mut outcome = Outcome { detail: String::new(), planted: Vec::new(), clean: Vec::new(), findings: Vec::new() };
    let mut details = Vec::new();
    for file in files {
        let name = &file.name;
        let built = build::ptx(root, toolchain, file.arch)?;
        let ours = Provenance::of(&built)?;
        let how = match Provenance::of(&file.text) {
            Ok(theirs) if theirs.compiler != ours.compiler => "equal by source hash, for it has another compiler",
            _ => "equal, byte by byte",
        };
        details.push(format!("{name} {how}"));
        let other = Provenance { compiler: "another".into(), sources: "0".into(), ..ours.clone() };
        let code = built.strip_prefix(&ours.header()).context("a build begins with its header")?;
        outcome.planted.extend([
            (format!("a changed instruction in {name}"), same_build(&built.replacen("ret;", "nop;", 1), &built)),
            (format!("a line too few in {name}"), same_build(built.trim_end_matches("\n}\n"), &built)),
            (format!("another compiler and other sources in {name}"), same_build(&(other.header() + code), &built)),
        ]);
        outcome.clean.extend(same_build(&built.clone(), &built));
        outcome.findings.extend(same_build(&file.text, &built).into_iter().map(|finding| format!("{name}: {finding}")));
    }
    outcome.detail = format!("{}; {}", details.join(", "), toolchain.version);
    Ok(outcome)
}

/// Whether a module's functions are exactly the kernels: each an entry point, nothing called.
fn entries(module: &Module, kernels: Kernels) -> Findings {
    let mut findings = Vec::new();
    for name in kernels.iter().map(Expectation::name) {
        let count = module.functions.iter().filter(|function| function.name == name).count();
        if count != 1 || module.entry(name).is_none() {
            findings.push(format!("{name} is not there as one entry point"));
        }
    }
    for function in &module.functions {
        if !kernels.iter().any(|kernel| kernel.name() == function.name) {
            findings.push(format!("{} is no kernel of the table", function.name));
        }
        if function.count(|statement| mnemonic(statement).starts_with("call")) > 0 {
            findings.push(format!("{} calls a function instead of containing it", function.name));
        }
    }
    findings
}

pub fn check_entries(files: &[File], kernels: Kernels) -> Outcome {
    let clean = specimen::module(kernels);
    let first = kernels[0].name();
    let examine = |text: &str| entries(&Module::parse(text), kernels);
    let planted = vec![
        ("a missing kernel".to_string(), examine(&clean.replace(first, "tide_other"))),
        ("a kernel that is no entry".to_string(), examine(&clean.replacen(".visible .entry", ".func", 1))),
        ("a function beside the kernels".to_string(), examine(&format!("{clean}.func helper(\n)\n{{\n\tret;\n}}\n"))),
        ("a call".to_string(), examine(&specimen::with(&clean, first, "call.uni helper, (param0)"))),
    ];
    Outcome {
        detail: format!("{} kernels, all code inside them", kernels.len()),
        planted,
        clean: examine(&clean),
        findings: in_files(files, |module| entries(module, kernels)),
    }
}

/// What `examine` says of each kernel of the table.
fn of_kernels(module: &Module, kernels: Kernels, examine: impl Fn(&Function, &Expectation) -> Findings) -> Findings {
    let of_kernel = |kernel: &Expectation| match module.entry(kernel.name()) {
        None => vec![format!("{} is not there", kernel.name())],
        Some(function) => {
            examine(function, kernel).into_iter().map(|finding| format!("{}: {finding}", kernel.name())).collect()
        }
    };
    kernels.iter().flat_map(of_kernel).collect()
}

/// Whether every barrier of the source stands in the PTX once.
fn barriers(module: &Module, kernels: Kernels) -> Findings {
    of_kernels(module, kernels, |function, kernel| {
        let found = function.count(is_barrier);
        if found == kernel.barriers {
            Vec::new()
        } else {
            vec![format!("{found} barriers, the source has {}", kernel.barriers)]
        }
    })
}

pub fn check_barriers(files: &[File], kernels: Kernels) -> Outcome {
    let clean = specimen::module(kernels);
    let examine = |text: &str| barriers(&Module::parse(text), kernels);
    let mut planted = Vec::new();
    for &Expectation { kernel, barriers: count, .. } in kernels {
        let name = kernel.name();
        let twice = specimen::with(&clean, name, "@%p1 bar.sync 0, %r1");
        planted.push((format!("a barrier too many in {name}"), examine(&twice)));
        if count > 0 {
            let none = specimen::without(&clean, name, is_barrier);
            planted.push((format!("a barrier too few in {name}"), examine(&none)));
        }
    }
    let total: usize = kernels.iter().map(|kernel| kernel.barriers).sum();
    Outcome {
        detail: format!("{total} barriers of the sources, each once"),
        planted,
        clean: examine(&clean),
        findings: in_files(files, |module| barriers(module, kernels)),
    }
}

/// Whether a statement is, or uses, what the table names: a mnemonic, one of several, or a special register.
fn is_expected(statement: &str, wanted: &str) -> bool {
    if wanted.starts_with('%') {
        statement.contains(wanted)
    } else {
        wanted.split('|').any(|wanted| mnemonic(statement) == wanted)
    }
}

/// Whether each kernel holds the instructions that it must.
fn instructions(module: &Module, kernels: Kernels) -> Findings {
    of_kernels(module, kernels, |function, kernel| {
        let missing = kernel.instructions.iter().filter(|wanted| function.count(|s| is_expected(s, wanted)) == 0);
        missing.map(|wanted| format!("no {wanted}")).collect()
    })
}

pub fn check_instructions(files: &[File], kernels: Kernels) -> Outcome {
    let clean = specimen::module(kernels);
    let examine = |text: &str| instructions(&Module::parse(text), kernels);
    let mut planted = Vec::new();
    for &Expectation { kernel, instructions: wanted, .. } in kernels {
        let name = kernel.name();
        for wanted in wanted {
            let text = specimen::without(&clean, name, |statement| is_expected(statement, wanted));
            planted.push((format!("{name} without {wanted}"), examine(&text)));
        }
    }
    Outcome {
        detail: format!("{} expected in {} kernels, all there", planted.len(), kernels.len()),
        planted,
        clean: examine(&clean),
        findings: in_files(files, |module| instructions(module, kernels)),
    }
}

/// A check of each statement by itself: what it forbids, and examples of that.
fn check_statements(
    files: &[File],
    forbid: fn(&str) -> Option<&'static str>,
    (detail, allowed, forbidden): &(&str, &[&str], &[&str]),
) -> Outcome {
    let examine = |module: &Module| -> Findings {
        let of_function = |function: &Function| -> Findings {
            let complain = |statement: &String| {
                let reason = forbid(statement)?;
                Some(format!("{}: `{}`: {reason}", function.name, mnemonic(statement)))
            };
            function.statements.iter().filter_map(complain).collect()
        };
        module.functions.iter().flat_map(of_function).collect()
    };
    let clean = specimen::module(&KERNELS);
    let with = |statement: &str| examine(&Module::parse(&specimen::with(&clean, KERNELS[0].name(), statement)));
    let mut innocent = examine(&Module::parse(&clean));
    innocent.extend(allowed.iter().flat_map(|statement| with(statement)));
    Outcome {
        detail: (*detail).to_string(),
        planted: forbidden.iter().map(|statement| (format!("`{statement}`"), with(statement))).collect(),
        clean: innocent,
        findings: in_files(files, examine),
    }
}

fn atomics(statement: &str) -> Option<&'static str> {
    let parts: Vec<&str> = mnemonic(statement).split('.').collect();
    if !["atom", "red", "multimem"].contains(&parts[0]) {
        return None;
    }
    let has = |wanted: &[&str]| parts.iter().any(|part| wanted.contains(part));
    if !has(&["relaxed", "acquire", "release", "acq_rel"]) {
        Some("no order")
    } else if !has(&["sys"]) {
        Some("no system scope")
    } else {
        None
    }
}

fn reads(statement: &str) -> Option<&'static str> {
    let mut parts = mnemonic(statement).split('.');
    if !["ld", "ldu"].contains(&parts.next()?) {
        return None;
    }
    if mnemonic(statement).starts_with("ldu") || parts.clone().any(|part| part == "nc") {
        return Some("may be answered by a cache that never sees what a peer writes");
    }
    parts.any(|part| part == "volatile").then_some("volatile orders nothing")
}

fn arithmetic(statement: &str) -> Option<&'static str> {
    let parts: Vec<&str> = mnemonic(statement).split('.').collect();
    let has = |wanted: &[&str]| parts.iter().any(|part| wanted.contains(part));
    if !has(&["f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"]) {
        return None;
    }
    if ["fma", "mad"].contains(&parts[0]) {
        Some("one rounding where the source has two")
    } else if has(&["ftz"]) {
        Some("flushes subnormals")
    } else if has(&["approx"]) {
        Some("is not correctly rounded")
    } else if ["add", "sub", "mul"].contains(&parts[0]) && !has(&["rn"]) {
        Some("without .rn the assembler may contract it")
    } else {
        None
    }
}

fn rejection(ptxas: &Ptxas, ptx: &str, cpu: &str) -> Findings {
    match ptxas.assemble(ptx, cpu) {
        Err(error) => vec![format!("{error:#}")],
        Ok(reports) if reports.is_empty() => vec!["nothing was assembled".to_string()],
        Ok(_) => Vec::new(),
    }
}

pub fn check_ptxas(ptxas: &Ptxas, files: &[File]) -> Result<Outcome> {
    let mut outcome = Outcome { detail: String::new(), planted: Vec::new(), clean: Vec::new(), findings: Vec::new() };
    for file in files {
        let (cpu, name) = (file.arch.cpu, &file.name);
        let good = specimen::assembly(cpu, "", "mov.u32 %r1, %tid.x;");
        let bad = specimen::assembly(cpu, "", "add.no_such_type %r1, %r1, %r1;");
        outcome.clean.extend(rejection(ptxas, &good, cpu));
        outcome.planted.push((format!("an instruction that {cpu} lacks"), rejection(ptxas, &bad, cpu)));
        outcome.planted.push((format!("an empty module for {cpu}"), rejection(ptxas, &specimen::preamble(cpu), cpu)));
        let findings = rejection(ptxas, &file.text, cpu);
        outcome.findings.extend(findings.into_iter().map(|finding| format!("{name}: {finding}")));
    }
    let cpus: Vec<&str> = files.iter().map(|file| file.arch.cpu).collect();
    outcome.detail = format!("{} takes each file for its architecture: {}", ptxas.version, cpus.join(", "));
    Ok(outcome)
}

/// No stack frame is allowed.
pub const NO_FRAME: u64 = 0;

/// What lies in memory that should lie in registers: spills, local memory, and a stack frame of more than `frame_bytes_max`.
fn memory(reports: &[Report], frame_bytes_max: u64) -> Findings {
    let mut findings = Vec::new();
    for Report { name, frame_bytes, spill_bytes, local_bytes, .. } in reports {
        // The assembler counts a frame as local memory too.
        let local_bytes = &local_bytes.saturating_sub(*frame_bytes);
        let frame_bytes = if *frame_bytes > frame_bytes_max { frame_bytes } else { &0 };
        for (bytes, what) in [(frame_bytes, "stack frame"), (spill_bytes, "spills"), (local_bytes, "local memory")] {
            if *bytes > 0 {
                findings.push(format!("{name}: {bytes} bytes of {what}"));
            }
        }
    }
    findings
}

/// The assembler's reports of a file, one for each kernel of the table.
fn reports(ptxas: &Ptxas, file: &File, kernels: Kernels) -> Result<Vec<Report>> {
    let reports = ptxas.assemble(&file.text, file.arch.cpu)?;
    for name in kernels.iter().map(Expectation::name) {
        if !reports.iter().any(|report| report.name == name) {
            bail!("{}: ptxas reports nothing of {name}", file.name);
        }
    }
    Ok(reports)
}

pub fn check_memory(ptxas: &Ptxas, files: &[File], kernels: Kernels, frame_bytes_max: u64) -> Result<Outcome> {
    let mut outcome = Outcome {
        detail: match frame_bytes_max {
            NO_FRAME => "no spill, no stack frame, no local memory".to_string(),
            bytes => format!("no spill, no local memory, no stack frame above {bytes} bytes"),
        },
        planted: Vec::new(),
        clean: Vec::new(),
        findings: Vec::new(),
    };
    for file in files {
        let cpu = file.arch.cpu;
        let of = |text: &str| ptxas.assemble(text, cpu).map(|reports| memory(&reports, frame_bytes_max));
        outcome.clean.extend(of(&specimen::assembly(cpu, "", "mov.u32 %r1, %tid.x;"))?);
        outcome.planted.push((format!("an indexed array ({cpu})"), of(&specimen::stack_frame(cpu))?));
        outcome.planted.push((format!("more values than registers ({cpu})"), of(&specimen::spill(cpu))?));
        let findings = memory(&reports(ptxas, file, kernels)?, frame_bytes_max);
        outcome.findings.extend(findings.into_iter().map(|finding| format!("{}: {finding}", file.name)));
    }
    Ok(outcome)
}

/// Kernels whose largest block does not fit a multiprocessor's registers, which are dealt out by the warp, in steps of
/// 8 a thread.
fn registers(reports: &[Report], kernels: Kernels) -> Findings {
    let too_many = |report: &Report| {
        let kernel = kernels.iter().find(|kernel| kernel.name() == report.name)?.kernel;
        let warps_of_part = kernel.block_threads_max().div_ceil(32).div_ceil(PARTS_PER_SM);
        let needed = warps_of_part * 32 * report.registers.next_multiple_of(8);
        let finding = format!(
            "{}: {} registers a thread do not fit {} threads",
            report.name,
            report.registers,
            kernel.block_threads_max()
        );
        (needed > REGISTERS_PER_PART).then_some(finding)
    };
    reports.iter().filter_map(too_many).collect()
}

pub fn check_registers(ptxas: &Ptxas, files: &[File], kernels: Kernels) -> Result<Outcome> {
    let of = |used| {
        let report = Report { name: KERNELS[0].name().to_string(), registers: used, ..Report::default() };
        registers(&[report], &KERNELS)
    };
    let mut findings = Vec::new();
    let mut most = 0;
    for file in files {
        let reports = reports(ptxas, file, kernels)?;
        most = reports.iter().map(|report| report.registers).fold(most, u32::max);
        findings.extend(registers(&reports, kernels).into_iter().map(|finding| format!("{}: {finding}", file.name)));
    }
    Ok(Outcome {
        detail: format!("at most {most} a thread; the largest block of every kernel fits"),
        planted: vec![
            ("255 registers for a large block".to_string(), of(255)),
            ("a register too many for a block of 16 warps".to_string(), of(129)),
        ],
        clean: of(128),
        findings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(planted: &[bool], clean: bool, good: bool) -> Outcome {
        let findings = |bad: bool| if bad { vec!["bad".to_string()] } else { Vec::new() };
        Outcome {
            detail: String::new(),
            planted: planted.iter().map(|&caught| ("it".to_string(), findings(caught))).collect(),
            clean: findings(!clean),
            findings: findings(!good),
        }
    }

    #[test]
    fn only_a_proven_check_passes() {
        assert!(problems(&outcome(&[true], true, true)).is_empty());
        assert_eq!(problems(&outcome(&[], true, true)).len(), 1, "unproven");
        assert_eq!(problems(&outcome(&[true, false], true, true)).len(), 1, "blind");
        assert_eq!(problems(&outcome(&[true], false, true)).len(), 1, "cries wolf");
        assert_eq!(problems(&outcome(&[true], true, false)).len(), 1, "finds");
        assert!(!judge("test", Err(anyhow!("no compiler"))), "a check that cannot run has failed");
    }

    /// The specimen, committed for every architecture: all checks of text must pass it.
    fn clean_files() -> Vec<File> {
        let file = |arch: Arch| {
            let text = specimen::module(&KERNELS);
            File::new(arch.file_name(), arch, text)
        };
        ARCHS.map(file).into()
    }

    #[test]
    fn checks_of_text_are_proven_and_pass_the_specimen() {
        let files = clean_files();
        for outcome in [
            check_entries(&files, &KERNELS),
            check_barriers(&files, &KERNELS),
            check_instructions(&files, &KERNELS),
            check_statements(&files, atomics, &specimen::ATOMICS),
            check_statements(&files, reads, &specimen::READS),
            check_statements(&files, arithmetic, &specimen::ARITHMETIC),
            check_lint(&[]),
        ] {
            assert_eq!(problems(&outcome), Findings::new());
        }
    }

    #[test]
    fn faults_in_a_committed_file_are_found() {
        let spoilt = |statement: &str| {
            let text = specimen::with(&specimen::module(&KERNELS), KERNELS[0].name(), statement);
            vec![File::new("specimen".into(), ARCHS[0], text)]
        };
        assert_eq!(check_barriers(&spoilt("bar.sync 0"), &KERNELS).findings.len(), 1);
        let unscoped = spoilt("atom.global.add.u64 %rd1, [%rd2], 1");
        assert_eq!(check_statements(&unscoped, atomics, &specimen::ATOMICS).findings.len(), 1);
        let contracted = spoilt("fma.rn.f32 %r1, %r2, %r3, %r4");
        assert_eq!(check_statements(&contracted, arithmetic, &specimen::ARITHMETIC).findings.len(), 1);
        let cached = spoilt("ld.global.nc.b32 %r1, [%rd1]");
        assert_eq!(check_statements(&cached, reads, &specimen::READS).findings.len(), 1);
    }

    #[test]
    fn a_build_is_compared_by_bytes_or_under_another_compiler_by_sources() {
        let header = |compiler: &str, sources: &str| {
            Provenance { compiler: compiler.into(), target: "t".into(), flags: "f".into(), sources: sources.into() }
                .header()
        };
        let built = header("a", "1") + "ret;\n";
        assert!(same_build(&built, &built).is_empty());
        assert_eq!(same_build(&(header("a", "1") + "nop;\n"), &built).len(), 1);
        assert!(same_build(&(header("b", "1") + "nop;\n"), &built).is_empty());
        assert_eq!(same_build(&(header("b", "2") + "ret;\n"), &built).len(), 1);
        assert_eq!(same_build("ret;\n", &built).len(), 1);
    }
}

//! Specimens for the checks: clean ones, and the faults that are planted in them.

use crate::table::Expectation;
use anyhow::Result;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// A check of single statements: what it says when all is well, statements that it allows, statements that it forbids.
pub type Statements = (&'static str, &'static [&'static str], &'static [&'static str]);

/// Atomics.
pub const ATOMICS: Statements = (
    "every read-modify-write names its order and system scope",
    &["red.release.sys.global.add.u64 [%rd1], %rd2", "atom.acq_rel.sys.global.cas.b32 %r1, [%rd1], %r2, %r3"],
    &[
        "atom.global.add.u64 %rd1, [%rd2], 1",
        "atom.add.u64 %rd1, [%rd2], 1",
        "red.global.add.u64 [%rd2], 1",
        "red.relaxed.gpu.global.add.u64 [%rd2], 1",
        "atom.sys.global.exch.b32 %r1, [%rd1], %r2",
        "multimem.ld_reduce.weak.global.add.v4.f32 {%r1, %r2, %r3, %r4}, [%rd1]",
    ],
);

/// Loads.
pub const READS: Statements = (
    "no load past the coherent caches",
    &[
        "ld.global.b32 %r1, [%rd1]",
        "ld.relaxed.sys.global.v4.f32 {%r1, %r2, %r3, %r4}, [%rd1]",
        "ld.param.b64 %rd1, [p]",
    ],
    &[
        "ld.global.nc.b32 %r1, [%rd1]",
        "@%p1 ld.global.nc.L1::no_allocate.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1]",
        "ldu.global.b32 %r1, [%rd1]",
        "ld.volatile.global.b64 %rd1, [%rd2]",
    ],
);

/// Floating-point arithmetic.
pub const ARITHMETIC: Statements = (
    "every addition and product rounded once, to nearest, subnormals kept",
    &[
        "add.rn.f32 %r1, %r2, %r3",
        "mul.rn.f32 %r1, %r2, %r3",
        "mad.lo.s32 %r1, %r2, %r3, %r4",
        "cvt.rn.bf16.f32 %rs1, %r1",
    ],
    &[
        "fma.rn.f32 %r1, %r2, %r3, %r4",
        "mad.rn.f32 %r1, %r2, %r3, %r4",
        "add.rn.ftz.f32 %r1, %r2, %r3",
        "add.f32 %r1, %r2, %r3",
        "add.rz.f32x2 %rd1, %rd2, %rd3",
        "fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4",
        "mul.f32 %r1, %r2, %r3",
        "add.rz.f32 %r1, %r2, %r3",
        "div.approx.f32 %r1, %r2, %r3",
    ],
);

/// Rust that the lints accept.
pub const TIDY_RUST: &str = "\
//! A specimen.
/// Reads.
///
/// # Safety
/// `p` is valid.
pub unsafe fn read(p: *const u8) -> u8 {
    // SAFETY: the caller's promise.
    unsafe { *p }
}
";

/// Rust that they must refuse.
pub const UNTIDY_RUST: [(&str, &str); 3] = [
    (
        "an unsafe block without its reason",
        "//! A specimen.\n/// Reads.\npub fn read(p: *const u8) -> u8 {\n    unsafe { *p }\n}\n",
    ),
    (
        "an unsafe operation outside a block",
        "//! A specimen.\n/// Reads.\n///\n/// # Safety\n/// `p` is valid.\npub unsafe fn read(p: *const u8) -> u8 {\n    *p\n}\n",
    ),
    ("an undocumented function", "//! A specimen.\npub fn read() {}\n"),
];

/// A module that holds what the table asks, and nothing else.
pub fn module(kernels: &[Expectation]) -> String {
    let mut text = String::from(".version 8.6\n.target sm_90\n.address_size 64\n\n");
    for kernel in kernels {
        let name = kernel.name();
        write!(text, ".visible .entry {name}(\n\t.param .align 8 .b8 {name}_param_0[24]\n)\n{{\n").expect("a String");
        for _ in 0..kernel.barriers {
            text.push_str("\tbar.sync \t0, %r1;\n");
        }
        for wanted in kernel.instructions {
            let wanted = wanted.split('|').next().unwrap_or(wanted);
            if wanted.starts_with('%') {
                writeln!(text, "\tmov.u64 %rd1, {wanted};").expect("a String");
            } else {
                writeln!(text, "\t{wanted} [%rd1], %rd2;").expect("a String");
            }
        }
        text.push_str("\tret;\n}\n");
    }
    text
}

/// The text with one more statement at the start of a kernel.
pub fn with(text: &str, kernel: &str, statement: &str) -> String {
    let (before, body) = split_at_body(text, kernel);
    format!("{before}\t{statement};\n{body}")
}

/// The text without the statements of a kernel that `unwanted` picks. Lines of the specimen are statements.
pub fn without(text: &str, kernel: &str, unwanted: impl Fn(&str) -> bool) -> String {
    let (before, body) = split_at_body(text, kernel);
    let end = body.find("\n}").expect("a body ends");
    let keep = |line: &&str| !unwanted(line.trim().trim_end_matches(';'));
    let kept: Vec<&str> = body[..end].lines().filter(keep).collect();
    format!("{before}{}{}", kept.join("\n"), &body[end..])
}

fn split_at_body<'a>(text: &'a str, kernel: &str) -> (&'a str, &'a str) {
    let entry = text.find(&format!(".entry {kernel}(")).expect("the specimen has every kernel");
    let body = entry + text[entry..].find("{\n").expect("a kernel has a body") + 2;
    text.split_at(body)
}

/// A module's first lines.
pub fn preamble(cpu: &str) -> String {
    format!(".version 8.6\n.target {cpu}\n.address_size 64\n")
}

/// A module of one kernel that takes an address.
pub fn assembly(cpu: &str, directives: &str, body: &str) -> String {
    format!(
        "{}.visible .entry specimen(.param .u64 address)\n{directives}\n{{\n.reg .b32 %r<256>;\n.reg .b64 %rd<8>;\n\
         ld.param.u64 %rd1, [address];\n{body}\nst.global.b32 [%rd1], %r1;\nret;\n}}\n",
        preamble(cpu)
    )
}

/// A kernel that indexes an array at run time.
pub fn stack_frame(cpu: &str) -> String {
    let body = "\
.local .align 16 .b8 array[256];
mov.u64 %rd2, array;
ld.global.u32 %r2, [%rd1];
and.b32 %r2, %r2, 252;
cvt.u64.u32 %rd3, %r2;
add.u64 %rd4, %rd2, %rd3;
st.local.u32 [%rd2], %r2;
st.local.u32 [%rd2+128], %r2;
ld.local.u32 %r1, [%rd4];";
    assembly(cpu, "", body)
}

/// A kernel that keeps more values than it is given registers.
pub fn spill(cpu: &str) -> String {
    let mut body = String::new();
    for i in 1..200 {
        writeln!(body, "ld.volatile.global.u32 %r{i}, [%rd1+{}];", 4 * i).expect("a String");
    }
    for i in (1..200).rev() {
        writeln!(body, "st.volatile.global.u32 [%rd1+{}], %r{i};", 4 * i).expect("a String");
    }
    assembly(cpu, ".maxnreg 32", &body)
}

/// A directory that goes away with its owner.
pub struct Directory(PathBuf);

impl Directory {
    /// A fresh directory; `purpose` tells it from others of this process.
    pub fn new(purpose: &str) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("tide-xtask-{}-{purpose}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // What is left behind in a temporary directory harms nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

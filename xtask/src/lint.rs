//! What the device sources must not say, and the compiler cannot forbid.
//!
//! * Assembly and LLVM intrinsics stand in `arch/nvptx.rs` alone: elsewhere no contract in `machine.rs` covers them.
//! * No `core::sync::atomic`: its read-modify-writes come out relaxed and bound to one GPU on this target.
//! * No `cfg` in kernels: the source that a GPU runs is the source that the tests run.

use crate::provenance::Source;

/// A word that is forbidden in some files.
struct Rule {
    /// What must not occur, as whole words.
    words: &'static [&'static str],
    /// Whether the file of this path is bound by the rule.
    binds: fn(&str) -> bool,
    /// Why.
    reason: &'static str,
}

const RULES: [Rule; 3] = [
    Rule {
        words: &["asm!", "global_asm!", "naked_asm!", "core_intrinsics", "link_name", "llvm_asm!"],
        binds: |path| path != "device/src/arch/nvptx.rs",
        reason: "assembly and intrinsics stand in arch/nvptx.rs alone",
    },
    Rule {
        words: &[
            "sync::atomic",
            "fetch_add",
            "fetch_sub",
            "fetch_or",
            "fetch_and",
            "fetch_xor",
            "fetch_max",
            "fetch_min",
            "fetch_update",
            "compare_exchange",
        ],
        binds: |_| true,
        reason: "read-modify-writes go through arch::atomic, where order and scope are written down",
    },
    Rule {
        words: &["cfg", "cfg!", "cfg_attr"],
        binds: |path| {
            ["device/src/kernels", "device/src/gin", "device/src/wait"].iter().any(|prefix| path.starts_with(prefix))
        },
        reason: "what a GPU runs is what the tests run",
    },
];

/// Every breach, as `path:line: …`.
pub fn breaches(files: &[Source]) -> Vec<String> {
    let mut breaches = Vec::new();
    for (path, contents) in files.iter().filter(|(path, _)| path.ends_with(".rs")) {
        let code = without_comments_and_strings(&String::from_utf8_lossy(contents));
        for rule in RULES.iter().filter(|rule| (rule.binds)(path)) {
            for (number, line) in code.lines().enumerate() {
                for word in rule.words.iter().filter(|word| has_word(line, word)) {
                    breaches.push(format!("{path}:{}: `{word}`: {}", number + 1, rule.reason));
                }
            }
        }
    }
    breaches
}

/// One text for each rule and place that breaks it: what the lint must see on every run.
pub fn planted() -> Vec<(String, Source)> {
    let plant = |path: &str, text: &str| (format!("{text} in {path}"), (path.to_string(), text.as_bytes().to_vec()));
    vec![
        plant("device/src/kernels/sum.rs", "unsafe { asm!(\"bar.sync 0;\") };"),
        plant("device/src/arch/barrier.rs", "core::arch::global_asm!(\"\");"),
        plant("device/src/arch/thread.rs", "#[link_name = \"llvm.nvvm.bar.warp.sync\"]"),
        plant("device/src/arch/nvptx.rs", "use core::sync::atomic::AtomicU64;"),
        plant("device/src/gin/loopback.rs", "word.fetch_add(1, order);"),
        plant("device/src/kernels/land.rs", "#[cfg(target_arch = \"nvptx64\")]"),
        plant("device/src/kernels/net.rs", "if cfg!(debug_assertions) {}"),
        plant("device/src/wait.rs", "#[cfg_attr(test, allow(dead_code))]"),
    ]
}

/// Whether `word` stands in `line` with no letter, digit or `_` right before or after it.
fn has_word(line: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(is_part) && (word.ends_with('!') || !after.is_some_and(is_part))
    })
}

/// The code, with comments and the insides of strings blanked and lines kept.
fn without_comments_and_strings(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut block_depth = 0_u32;
    while let Some(c) = rest.chars().next() {
        let mut taken = c.len_utf8();
        if rest.starts_with("/*") {
            block_depth += 1;
            taken = 2;
        } else if block_depth > 0 {
            if rest.starts_with("*/") {
                block_depth -= 1;
                taken = 2;
            } else if c == '\n' {
                out.push('\n');
            }
        } else if rest.starts_with("//") {
            taken = rest.find('\n').unwrap_or(rest.len());
        } else if c == '"' {
            taken = 1 + string_len(&rest[1..]);
            out.push_str("\"\"");
            out.extend(rest[..taken].chars().filter(|&c| c == '\n'));
        } else if rest.starts_with("'\"'") || rest.starts_with("'\\\"'") {
            taken = rest[1..].find('\'').map_or(rest.len(), |end| end + 2);
        } else {
            out.push(c);
        }
        rest = &rest[taken..];
    }
    out
}

/// Bytes up to and with the closing quote.
fn string_len(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            '\\' if !escaped => escaped = true,
            '"' if !escaped => return at + 1,
            _ => escaped = false,
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaches_of(path: &str, text: &str) -> usize {
        breaches(&[(path.to_string(), text.as_bytes().to_vec())]).len()
    }

    #[test]
    fn every_planted_breach_is_seen() {
        for (what, source) in planted() {
            assert!(!breaches(&[source]).is_empty(), "{what}");
        }
    }

    #[test]
    fn comments_strings_and_longer_words_are_no_breach() {
        let text = "//! no asm! and no cfg here\n/* sync::atomic /* nested */ cfg */\nlet a = \"asm! \\\" cfg\";\nlet cfg_value = 1;";
        assert_eq!(breaches_of("device/src/kernels/sum.rs", text), 0);
    }

    #[test]
    fn the_line_of_a_breach_is_its_own() {
        let file = ("device/src/wait.rs".to_string(), b"/* a\nb */ \"c\nd\"\n#[cfg(test)]\n".to_vec());
        assert_eq!(breaches(&[file]).len(), 1);
        let file = ("device/src/wait.rs".to_string(), b"/* a\nb */ \"c\nd\"\n#[cfg(test)]\n".to_vec());
        assert!(breaches(&[file])[0].starts_with("device/src/wait.rs:4:"));
    }

    #[test]
    fn each_rule_binds_where_it_should() {
        assert_eq!(breaches_of("device/src/arch/nvptx.rs", "asm!(\"\")"), 0);
        assert_eq!(breaches_of("device/src/arch/mod.rs", "#[cfg(x)]"), 0);
        assert_eq!(breaches_of("device/src/kernels/mod.rs", "#[cfg(x)]"), 1);
    }
}

//! Just enough of PTX's grammar: which functions a module defines, and the instructions of each.

/// A PTX module.
#[derive(Debug, Default)]
pub struct Module {
    /// Its functions, entry points and others.
    pub functions: Vec<Function>,
}

/// A function with a body.
#[derive(Debug, Default)]
pub struct Function {
    /// Its symbol.
    pub name: String,
    /// Whether the host can launch it.
    pub is_entry: bool,
    /// Its statements, without labels, predicates and comments: instructions and declarations.
    pub statements: Vec<String>,
}

impl Module {
    /// Reads a module. What it does not know it takes for statements, so that no check can overlook it.
    pub fn parse(text: &str) -> Self {
        let mut module = Self::default();
        let mut depth = 0;
        let mut header = String::new();
        for line in text.lines() {
            let line = line.split("//").next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            if depth == 0 {
                header.push_str(line);
                header.push(' ');
                if line == "{" {
                    depth = 1;
                    module.functions.push(Function::with_header(&header));
                    header.clear();
                } else if line.ends_with(';') {
                    header.clear();
                }
                continue;
            }
            match line.chars().next() {
                Some('{') => depth += 1,
                Some('}') => depth -= 1,
                _ => {}
            }
            let function = module.functions.last_mut().expect("a body follows a header");
            let line = line.trim_start_matches(['{', '}']);
            function.statements.extend(line.split(';').filter_map(statement));
        }
        module
    }

    /// The entry points.
    pub fn entries(&self) -> impl Iterator<Item = &Function> {
        self.functions.iter().filter(|function| function.is_entry)
    }

    /// The entry point of this name.
    pub fn entry(&self, name: &str) -> Option<&Function> {
        self.entries().find(|function| function.name == name)
    }
}

impl Function {
    fn with_header(header: &str) -> Self {
        let is_entry = header.contains(".entry");
        // `.visible .entry NAME( …`, or `.func (.param …) NAME( …`.
        let after = header.split_once(if is_entry { ".entry" } else { ".func" }).map_or("", |(_, after)| after).trim();
        let after = match after.strip_prefix('(') {
            Some(results) => results.split_once(')').map_or("", |(_, after)| after).trim(),
            None => after,
        };
        let name = after.split(|c: char| c == '(' || c.is_whitespace()).next().unwrap_or_default().to_string();
        Self { name, is_entry, statements: Vec::new() }
    }

    /// How many statements `wanted` accepts.
    pub fn count(&self, wanted: impl Fn(&str) -> bool) -> usize {
        self.statements.iter().filter(|statement| wanted(statement)).count()
    }
}

/// The first word of a statement.
pub fn mnemonic(statement: &str) -> &str {
    statement.split_whitespace().next().unwrap_or_default()
}

/// Whether a statement is a barrier of the block or the cluster.
pub fn is_barrier(statement: &str) -> bool {
    let mnemonic = mnemonic(statement);
    mnemonic.starts_with("bar.") || mnemonic.starts_with("barrier.")
}

fn statement(text: &str) -> Option<String> {
    let mut text = text.trim();
    if let Some((label, rest)) = text.split_once(':')
        && label.starts_with('$')
        && !label.contains(char::is_whitespace)
    {
        text = rest.trim();
    }
    if text.starts_with('@') {
        text = text.split_once(char::is_whitespace)?.1.trim();
    }
    (!text.is_empty()).then(|| text.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
.version 8.6
.extern .shared .align 1024 .b8 tide_smem[];
.func helper
(
\t.param .b64 helper_param_0
)
;
.visible .entry k(
\t.param .align 8 .b8 k_param_0[24]
)                                       // @k
{
\t.reg .b32 \t%r<4>;
\t{
.reg .pred complete;
selp.u32 %r5, 1, 0, complete;
}
$L__BB0_1: // bar.sync in a comment
\t@%p1 bra \t$L__BB0_1;
\tbar.sync \t0, %r2; ld.shared.v2.b32 {%r1, %r2}, [%r3];
\tmov.b64 \t{_, %r30}, %rd24;
}
.func (.param .b32 func_retval0) helper(
\t.param .b64 helper_param_0
)
{
\tret;
}
";

    #[test]
    fn functions_and_statements_are_told_apart() {
        let module = Module::parse(TEXT);
        let names: Vec<_> = module.functions.iter().map(|f| (f.name.as_str(), f.is_entry)).collect();
        assert_eq!(names, [("k", true), ("helper", false)]);
        assert_eq!(
            module.entry("k").unwrap().statements,
            [
                ".reg .b32 \t%r<4>",
                ".reg .pred complete",
                "selp.u32 %r5, 1, 0, complete",
                "bra \t$L__BB0_1",
                "bar.sync \t0, %r2",
                "ld.shared.v2.b32 {%r1, %r2}, [%r3]",
                "mov.b64 \t{_, %r30}, %rd24",
            ]
        );
        assert_eq!(module.functions[1].statements, ["ret"]);
    }

    #[test]
    fn barriers_of_both_spellings_count() {
        assert!(is_barrier("bar.sync 0"));
        assert!(is_barrier("barrier.cta.sync 0, %r1"));
        assert!(!is_barrier("mbarrier.init.shared.b64 [%r1], %r2"));
    }
}

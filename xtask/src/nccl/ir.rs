//! Just enough of LLVM's textual IR: the types of functions, for a comparison of what is called with what is there.

use std::collections::BTreeMap;

/// A function's type: its result and parameters, named types written out, and of the attributes those that change how a value
/// travels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// The result.
    pub result: String,
    /// The parameters.
    pub parameters: Vec<String>,
}

/// The functions of a module.
#[derive(Debug, Default)]
pub struct Functions {
    /// With a body.
    pub defined: BTreeMap<String, Signature>,
    /// Without.
    pub declared: BTreeMap<String, Signature>,
}

/// Attributes that change how a value travels.
const BEARING: [&str; 6] = ["zeroext", "signext", "inreg", "byval", "sret", "inalloca"];

/// Reads a module's text.
pub fn functions(text: &str) -> Functions {
    let types: BTreeMap<&str, &str> = text.lines().filter_map(|line| line.split_once(" = type ")).collect();
    let mut functions = Functions::default();
    for line in text.lines() {
        let (into, rest) = if let Some(rest) = line.strip_prefix("define ") {
            (&mut functions.defined, rest)
        } else if let Some(rest) = line.strip_prefix("declare ") {
            (&mut functions.declared, rest)
        } else {
            continue;
        };
        if let Some((name, signature)) = signature(rest, &types) {
            into.insert(name, signature);
        }
    }
    functions
}

fn signature(text: &str, types: &BTreeMap<&str, &str>) -> Option<(String, Signature)> {
    let (before, after) = text.split_once('@')?;
    let (name, rest) = after.split_once('(')?;
    let end = closing(rest)?;
    // What stands before the type: linkage, calling convention, attributes.
    let words = pieces(before, ' ');
    let first_of_type = words.iter().rposition(|word| is_type(word))?;
    let result = travels(&words[first_of_type..].join(" "), types)
        + &words[..first_of_type].iter().filter(|word| is_bearing(word)).fold(String::new(), |s, w| s + " " + w);
    let parameters = pieces(&rest[..end], ',').iter().map(|parameter| travels(parameter, types)).collect();
    Some((name.to_string(), Signature { result, parameters }))
}

fn is_type(word: &str) -> bool {
    ["void", "ptr", "float", "double", "half", "bfloat"].contains(&word)
        || word.starts_with(['%', '[', '{', '<'])
        || word.strip_prefix('i').is_some_and(|bits| !bits.is_empty() && bits.bytes().all(|b| b.is_ascii_digit()))
}

fn is_bearing(word: &str) -> bool {
    BEARING
        .iter()
        .any(|bearing| word.strip_prefix(bearing).is_some_and(|rest| rest.is_empty() || rest.starts_with('(')))
}

/// A parameter or result without its name and its idle attributes.
fn travels(parameter: &str, types: &BTreeMap<&str, &str>) -> String {
    let words = pieces(parameter, ' ');
    let kept = words
        .iter()
        .enumerate()
        .filter(|(at, word)| *at == 0 || is_bearing(word) || (word.starts_with("addrspace") && words[0] == "ptr"));
    let kept: Vec<&str> = kept.map(|(_, word)| word.as_str()).collect();
    written_out(&kept.join(" "), types)
}

/// A type with the definition of each named one in its place.
fn written_out(text: &str, types: &BTreeMap<&str, &str>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let name = &rest[at..];
        let end = if name[1..].starts_with('"') {
            name[2..].find('"').map_or(name.len(), |end| end + 3)
        } else {
            name[1..].find(|c: char| !(c.is_alphanumeric() || "._$-".contains(c))).map_or(name.len(), |end| end + 1)
        };
        match types.get(&name[..end]) {
            Some(definition) => out.push_str(&written_out(definition, types)),
            None => out.push_str(&name[..end]),
        }
        rest = &name[end..];
    }
    out + rest
}

/// Splits at a separator that stands outside of all brackets and quotes; empty pieces are left out.
fn pieces(text: &str, separator: char) -> Vec<String> {
    let (mut depth, mut quoted) = (0_i32, false);
    let mut pieces = vec![String::new()];
    for c in text.chars() {
        match c {
            '"' => quoted = !quoted,
            '(' | '[' | '{' | '<' if !quoted => depth += 1,
            ')' | ']' | '}' | '>' if !quoted => depth -= 1,
            _ => {}
        }
        if c == separator && depth == 0 && !quoted {
            pieces.push(String::new());
        } else if let Some(piece) = pieces.last_mut() {
            piece.push(c);
        }
    }
    pieces.iter().map(|piece| piece.trim().to_string()).filter(|piece| !piece.is_empty()).collect()
}

/// Where the bracket that is open at the start of `text` closes.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 1;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
%struct.Team = type { i32, i32 }
%\"struct.Any::Storage\" = type { [16 x i8] }
%struct.Any = type { %\"struct.Any::Storage\", ptr }
define dso_local %struct.Team @world(ptr noundef nonnull readonly captures(none) dereferenceable(248) %0) local_unnamed_addr #0 {
define dso_local void @post(ptr noundef initializes((0, 8), (12, 17)) %0, ptr noundef readonly byval(%struct.Team) captures(none) %1, i1 noundef zeroext %2, [3 x i32] %3, ptr byval(%struct.Any) %4) #1 {
declare noundef zeroext i1 @flag(i64 noundef) unnamed_addr #2
define void @none() {
";

    #[test]
    fn what_travels_is_kept_and_the_rest_is_not() {
        let functions = functions(TEXT);
        let post = &functions.defined["post"];
        assert_eq!(post.result, "void");
        assert_eq!(
            post.parameters,
            ["ptr", "ptr byval({ i32, i32 })", "i1 zeroext", "[3 x i32]", "ptr byval({ { [16 x i8] }, ptr })"]
        );
        assert_eq!(functions.defined["world"].result, "{ i32, i32 }");
        let flag = &functions.declared["flag"];
        assert_eq!((flag.result.as_str(), flag.parameters.as_slice()), ("i1 zeroext", &["i64".to_string()][..]));
        assert!(functions.defined["none"].parameters.is_empty());
    }
}

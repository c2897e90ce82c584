//! Ranks and foreign text, as sentences show them.

/// `rank 3`, or `ranks 0-2, 5`. `ranks` ascend.
pub(crate) fn ranks(ranks: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(rank) => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    let runs: Vec<_> = runs.iter().map(|&(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
    format!("{word} {}", runs.join(", "))
}

/// Text from elsewhere on one line: control characters escaped, no longer than `chars_max` characters.
pub(crate) fn shown(text: &str, chars_max: usize) -> String {
    let mut out: String = text
        .chars()
        .take(chars_max)
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect();
    if text.chars().nth(chars_max).is_some() {
        out.push('…');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_grouped_into_runs() {
        for (input, expected) in [
            (&[3][..], "rank 3"),
            (&[0, 1], "ranks 0-1"),
            (&[0, 1, 2, 5], "ranks 0-2, 5"),
            (&[u32::MAX - 1, u32::MAX], "ranks 4294967294-4294967295"),
        ] {
            assert_eq!(ranks(input), expected);
        }
    }

    #[test]
    fn foreign_text_stays_on_one_line() {
        assert_eq!(shown("a\nb\u{1b}", 9), "a\\nb\\u{1b}");
        assert_eq!(shown("abcdef", 3), "abc…");
        assert_eq!(shown("abc", 3), "abc");
    }
}

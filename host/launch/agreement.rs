//! Facts on which all ranks must agree, and the one sentence that every rank stops with where they do not.

use std::fmt;

use super::exchange::Exchange;
use super::phrase::{ranks as ranks_phrase, shown};
use crate::error::{Result, TideError};

/// Version of the encoding of [`Facts`]; ranks with another one are named.
const ENCODING_VERSION: u16 = 1;
/// The most facts.
const FACT_COUNT_MAX: usize = 4096;
/// The most bytes of all facts of a rank, encoded.
const FACTS_BYTES_MAX: usize = 1 << 20;
/// Longer values are shortened in sentences.
const SHOWN_CHARS_MAX: usize = 64;
/// The most values that a sentence lists.
const SHOWN_VALUES_MAX: usize = 8;

/// What one rank holds to be true: names and values, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts(Vec<(String, String)>);

impl Facts {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a fact after the others.
    pub fn push(&mut self, name: &str, value: impl fmt::Display) {
        self.0.push((name.to_owned(), value.to_string()));
    }

    /// These facts, and one more.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.push(name, value);
        self
    }

    /// Names and values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (&name[..], &value[..]))
    }

    fn encode(&self) -> Result<Vec<u8>> {
        let mut bytes = ENCODING_VERSION.to_le_bytes().to_vec();
        bytes.extend((self.0.len() as u32).to_le_bytes());
        for text in self.0.iter().flat_map(|(name, value)| [name, value]) {
            bytes.extend((text.len() as u32).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        if self.0.len() > FACT_COUNT_MAX || bytes.len() > FACTS_BYTES_MAX {
            return Err(TideError::usage(format!(
                "{} facts of {} bytes are too many to compare: up to {FACT_COUNT_MAX} of {FACTS_BYTES_MAX} bytes in all",
                self.0.len(),
                bytes.len()
            )));
        }
        Ok(bytes)
    }

    fn decode(mut bytes: &[u8]) -> Option<Self> {
        if bytes.len() > FACTS_BYTES_MAX || version_of(bytes) != Some(ENCODING_VERSION) {
            return None;
        }
        bytes = &bytes[size_of::<u16>()..];
        let count = take_u32(&mut bytes)? as usize;
        if count > FACT_COUNT_MAX {
            return None;
        }
        let mut facts = Self::new();
        for _ in 0..count {
            let (name, value) = (take_text(&mut bytes)?, take_text(&mut bytes)?);
            facts.0.push((name, value));
        }
        bytes.is_empty().then_some(facts)
    }
}

fn version_of(bytes: &[u8]) -> Option<u16> {
    bytes.first_chunk().map(|b| u16::from_le_bytes(*b))
}

fn take_u32(bytes: &mut &[u8]) -> Option<u32> {
    let (head, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u32::from_le_bytes(*head))
}

fn take_text(bytes: &mut &[u8]) -> Option<String> {
    let length = take_u32(bytes)? as usize;
    let (text, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    String::from_utf8(text.to_vec()).ok()
}

/// Compares the facts of all ranks, by rank. Pure: the same facts give the same sentence.
///
/// # Errors
/// [`TideError::Disagreement`] for the first fact, in order, whose name or value is not the same on all ranks.
pub fn compare(facts: &[Facts]) -> Result<()> {
    let count = facts.iter().map(|f| f.0.len()).max().unwrap_or(0);
    for i in 0..count {
        // The name in quotes, so that none is no name.
        let name = |f: &Facts| f.0.get(i).map_or_else(|| "none".to_owned(), |(name, _)| format!("`{name}`"));
        same(&format!("which fact comes as number {}", i + 1), facts, name)?;
        same(&facts[0].0[i].0, facts, |f| &f.0[i].1)?;
    }
    Ok(())
}

/// Gathers the facts of all ranks and compares them. Every rank gets the same answer.
///
/// # Errors
/// As [`compare`] and [`Exchange::all_gather`]; [`TideError::Usage`] if there are too many facts;
/// [`TideError::Rendezvous`] if what a rank sent cannot be read.
pub fn agree(exchange: &mut (impl Exchange + ?Sized), label: &str, facts: &Facts) -> Result<()> {
    let all = exchange.all_gather(label, &facts.encode()?)?;
    same("the version of the encoding of facts", &all, |bytes| version_of(bytes).unwrap_or(0))?;
    let mut decoded = Vec::with_capacity(all.len());
    for (rank, bytes) in all.iter().enumerate() {
        let facts = Facts::decode(bytes);
        decoded.push(facts.ok_or_else(|| {
            TideError::rendezvous(format!("`{}`: what rank {rank} sent are no facts", shown(label, SHOWN_CHARS_MAX)))
        })?);
    }
    compare(&decoded)
}

/// That `value` is the same of all items, one per rank.
fn same<'a, T, V: PartialEq + fmt::Display>(what: &str, items: &'a [T], value: impl Fn(&'a T) -> V) -> Result<()> {
    // Values in the order of the first rank that holds each.
    let mut groups: Vec<(V, Vec<u32>)> = Vec::new();
    for (rank, item) in (0..).zip(items) {
        let value = value(item);
        match groups.iter_mut().find(|(v, _)| *v == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((value, vec![rank])),
        }
    }
    if groups.len() <= 1 {
        return Ok(());
    }
    let values: Vec<String> = groups.iter().map(|(v, _)| v.to_string()).collect();
    let common = common_prefix_chars(&values);
    let mut phrases: Vec<String> = groups
        .iter()
        .zip(&values)
        .take(SHOWN_VALUES_MAX)
        .map(|((_, ranks), value)| {
            let verb = if ranks.len() == 1 { "has" } else { "have" };
            format!("{} {verb} {}", ranks_phrase(ranks), excerpt(value, common))
        })
        .collect();
    if groups.len() > SHOWN_VALUES_MAX {
        phrases.push(format!("others have {} more values", groups.len() - SHOWN_VALUES_MAX));
    }
    Err(TideError::Disagreement { what: shown(what, SHOWN_CHARS_MAX), ranks: phrases.join("; ") })
}

fn common_prefix_chars(values: &[String]) -> usize {
    let first = &values[0];
    let common = |other: &String| first.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
    values[1..].iter().map(common).min().unwrap_or(0)
}

/// A value, or, of a long one, what stands around the first difference, with a hash: two that differ look different.
fn excerpt(value: &str, common_chars: usize) -> String {
    let length = value.chars().count();
    if length <= SHOWN_CHARS_MAX {
        return if value.is_empty() { "\"\"".to_owned() } else { shown(value, SHOWN_CHARS_MAX) };
    }
    let start = common_chars.saturating_sub(SHOWN_CHARS_MAX / 4);
    let lead = if start > 0 { "…" } else { "" };
    let rest: String = value.chars().skip(start).collect();
    format!("{lead}{} ({} bytes, hash {:016x})", shown(&rest, SHOWN_CHARS_MAX), value.len(), fnv1a(value.as_bytes()))
}

/// FNV-1a, 64 bits: to tell values apart for a reader, not to protect anything.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn facts(pairs: &[(&str, &str)]) -> Facts {
        pairs.iter().fold(Facts::new(), |facts, (name, value)| facts.with(name, value))
    }

    fn sentence(all: &[Facts]) -> String {
        compare(all).unwrap_err().to_string()
    }

    /// T53: a version that one rank alone has.
    #[test]
    fn t53_the_odd_one_out_is_named() {
        let of = |version| facts(&[("protocol", "1"), ("NCCL", version)]);
        let all = [of("2.31.2"), of("2.31.2"), of("2.30.7"), of("2.31.2")];
        assert_eq!(sentence(&all), "ranks disagree on NCCL: ranks 0-1, 3 have 2.31.2; rank 2 has 2.30.7");
        compare(&all[..2]).unwrap();
        compare(&[]).unwrap();
    }

    #[test]
    fn the_first_fact_in_order_is_reported() {
        let all = [facts(&[("a", "1"), ("b", "1"), ("c", "1")]), facts(&[("a", "1"), ("b", "2"), ("c", "2")])];
        assert_eq!(sentence(&all), "ranks disagree on b: rank 0 has 1; rank 1 has 2");
    }

    /// T36: the same items in another order, or one fewer.
    #[test]
    fn t36_other_facts_in_the_same_place_are_named() {
        let all =
            [facts(&[("A", "1"), ("B", "1")]), facts(&[("A", "1"), ("B", "1")]), facts(&[("B", "1"), ("A", "1")])];
        assert_eq!(
            sentence(&all),
            "ranks disagree on which fact comes as number 1: ranks 0-1 have `A`; rank 2 has `B`"
        );
        let all = [facts(&[("A", "1"), ("none", "1")]), facts(&[("A", "1")])];
        assert_eq!(
            sentence(&all),
            "ranks disagree on which fact comes as number 2: rank 0 has `none`; rank 1 has none"
        );
    }

    #[test]
    fn long_values_are_cut_around_their_difference() {
        let long = |tail: &str| facts(&[("plan", &format!("{}{tail}", "x".repeat(5000)))]);
        let text = sentence(&[long("here"), long("there")]);
        assert!(text.len() < 400 && text.contains("…xxxxxxxxxxxxxxxxhere (5004 bytes"), "{text}");
        // Where the difference is far from the first one, the hash still tells.
        let far = |c: &str| facts(&[("plan", &format!("{}{c}", "y".repeat(5000)))]);
        let text = sentence(&[long(""), far("1"), far("2")]);
        let values: Vec<_> = text.split("; ").map(|v| v.split_once("hash").unwrap().1).collect();
        assert!(values[1] != values[2], "{text}");
    }

    #[test]
    fn many_values_and_empty_ones_stay_readable() {
        let all: Vec<_> = (0..100).map(|i| facts(&[("seed", &i.to_string())])).collect();
        let text = sentence(&all);
        assert!(text.ends_with("rank 7 has 7; others have 92 more values"), "{text}");
        let text = sentence(&[facts(&[("x", "")]), facts(&[("x", "\n")])]);
        assert_eq!(text, "ranks disagree on x: rank 0 has \"\"; rank 1 has \\n");
    }

    #[test]
    fn too_many_facts_are_refused() {
        let many = (0..=FACT_COUNT_MAX).fold(Facts::new(), |facts, i| facts.with("x", i));
        assert!(matches!(many.encode(), Err(TideError::Usage(_))));
        assert!(facts(&[("x", &"x".repeat(FACTS_BYTES_MAX))]).encode().is_err());
    }

    proptest! {
        #[test]
        fn facts_come_back_as_they_went(pairs in prop::collection::vec((".{0,9}", ".{0,9}"), 0..9)) {
            let facts = Facts(pairs);
            let bytes = facts.encode().unwrap();
            prop_assert_eq!(Facts::decode(&bytes), Some(facts));
            prop_assert_eq!(Facts::decode(&bytes[..bytes.len() - 1]), None);
        }

        #[test]
        fn garbage_is_no_facts_and_never_panics(bytes: Vec<u8>, version_right: bool) {
            let version = if version_right { ENCODING_VERSION.to_le_bytes().to_vec() } else { Vec::new() };
            let _ = Facts::decode(&[version, bytes].concat());
        }
    }
}

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

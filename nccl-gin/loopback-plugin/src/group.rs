//! The ranks of a collective communicator, and the memory each has registered.
//!
//! Registration is collective: the n-th region of one rank belongs with the n-th of every other, and a number stands for all of
//! them. A rank comes back from registering its n-th once everybody has, so whoever has a number can use it towards anybody.

use crate::fault::{Fault, Result};
use crate::mover::{Place, Space};
use crate::world::lock;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Registered memory of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its address.
    pub base: usize,
    /// Its size.
    pub bytes: usize,
    /// Where it is.
    pub space: Space,
}

#[derive(Debug, Clone, Default)]
struct Member {
    /// Its communicator is there.
    present: bool,
    /// Its communicator is closed.
    left: bool,
    /// By number; `None` once given up.
    regions: Vec<Option<Region>>,
}

/// The ranks of a collective communicator.
#[derive(Debug)]
pub struct Group {
    members: Mutex<Vec<Member>>,
    changed: Condvar,
}

impl Group {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { members: Mutex::new(vec![Member::default(); ranks]), changed: Condvar::new() }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        lock(&self.members).len()
    }

    /// This rank's communicator is there.
    ///
    /// # Errors
    /// If the rank is there already, or is none of `ranks`.
    pub fn join(&self, rank: usize, ranks: usize) -> Result<()> {
        let mut members = lock(&self.members);
        if members.len() != ranks {
            return Err(Fault::argument(format!("rank {rank} says {ranks} ranks, others {}", members.len())));
        }
        match members.get_mut(rank) {
            None => Err(Fault::argument(format!("rank {rank} of {ranks}"))),
            Some(member) if member.present => Err(Fault::argument(format!("rank {rank} has connected twice"))),
            Some(member) => {
                member.present = true;
                Ok(())
            }
        }
    }

    /// This rank's communicator is closed.
    pub fn leave(&self, rank: usize) {
        lock(&self.members)[rank].left = true;
        self.changed.notify_all();
    }

    /// Registers this rank's next region, and waits until the others have as many. Gives its number.
    ///
    /// # Errors
    /// [`Fault::system`] if others have not after `deadline`, or never will as they have left.
    pub fn register(&self, rank: usize, region: Region, deadline: Duration) -> Result<usize> {
        let end = Instant::now() + deadline;
        let mut members = lock(&self.members);
        let number = members[rank].regions.len();
        members[rank].regions.push(Some(region));
        self.changed.notify_all();
        loop {
            let behind: Vec<usize> = (0..members.len()).filter(|r| members[*r].regions.len() <= number).collect();
            if behind.is_empty() {
                return Ok(number);
            }
            let gone: Vec<usize> = behind.iter().copied().filter(|r| members[*r].left).collect();
            let left = end.saturating_duration_since(Instant::now());
            if !gone.is_empty() || left.is_zero() {
                // The number stays taken: the ranks' counts may not shift against each other.
                members[rank].regions[number] = None;
                return Err(Fault::system(if gone.is_empty() {
                    format!(
                        "region {number} of rank {rank}: ranks {behind:?} have not registered theirs in {deadline:?}"
                    )
                } else {
                    format!("region {number} of rank {rank}: ranks {gone:?} have left without registering theirs")
                }));
            }
            members = self.changed.wait_timeout(members, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Gives up this rank's region.
    ///
    /// # Errors
    /// If there is none of the number.
    pub fn deregister(&self, rank: usize, number: usize) -> Result<()> {
        match lock(&self.members)[rank].regions.get_mut(number).and_then(Option::take) {
            Some(_) => Ok(()),
            None => Err(Fault::argument(format!("rank {rank} has no region {number} to give up"))),
        }
    }

    /// Where `offset` of a rank's region is.
    ///
    /// # Errors
    /// If there is no such region, or not so many `bytes` in it.
    pub fn place(&self, rank: usize, number: usize, offset: u64, bytes: usize) -> Result<Place> {
        let members = lock(&self.members);
        let member = members.get(rank).ok_or_else(|| Fault::argument(format!("rank {rank} of {}", members.len())))?;
        let region = member.regions.get(number).copied().flatten();
        let region = region.ok_or_else(|| Fault::argument(format!("rank {rank} has no region {number}")))?;
        let end = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(bytes));
        match end {
            Some(end) if end <= region.bytes => Ok(Place { address: region.base + (end - bytes), space: region.space }),
            _ => Err(Fault::argument(format!(
                "{bytes} bytes at {offset} are not within the {} bytes of region {number} of rank {rank}",
                region.bytes
            ))),
        }
    }
}

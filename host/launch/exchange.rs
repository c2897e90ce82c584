//! What processes that have found each other can do: every rank brings bytes, every rank gets all of them.

use crate::error::{Result, TideError};

/// All ranks of a job, as one of them sees them.
///
/// Every rank makes the same calls in the same order. The label says which call it is; implementations find ranks whose calls
/// differ and name them. After an error the exchange takes no more calls.
pub trait Exchange: Send {
    /// The rank of this process.
    fn rank(&self) -> u32;

    /// The number of ranks.
    fn rank_count(&self) -> u32;

    /// Gives everybody `bytes`, and returns what every rank gave, by rank. Ranks may give different numbers of bytes.
    ///
    /// # Errors
    /// [`TideError::Rendezvous`] if a rank is gone, does not come in time, or makes another call; [`TideError::Usage`] if this
    /// rank's bytes or label are too long.
    fn all_gather(&mut self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Gives everybody the bytes of rank 0, which alone passes some.
    ///
    /// # Errors
    /// As [`Self::all_gather`]; [`TideError::Usage`] if rank 0 passes nothing, or another rank something.
    fn broadcast(&mut self, label: &str, from_root: Option<&[u8]>) -> Result<Vec<u8>> {
        let rank = self.rank();
        if (rank == 0) != from_root.is_some() {
            let what = if rank == 0 { "nothing" } else { "bytes" };
            return Err(TideError::usage(format!("broadcast `{label}` is from rank 0, and rank {rank} passes {what}")));
        }
        let mut all = self.all_gather(label, from_root.unwrap_or_default())?;
        Ok(all.swap_remove(0))
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// As [`Self::all_gather`].
    fn barrier(&mut self, label: &str) -> Result<()> {
        self.all_gather(label, &[]).map(|_| ())
    }
}

/// The exchange of a job of one process.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Exchange for Alone {
    fn rank(&self) -> u32 {
        0
    }

    fn rank_count(&self) -> u32 {
        1
    }

    fn all_gather(&mut self, _label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(vec![bytes.to_vec()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alone_gathers_what_it_gives() {
        assert_eq!(Alone.all_gather("x", b"abc").unwrap(), [b"abc"]);
        assert_eq!(Alone.broadcast("x", Some(b"abc")).unwrap(), b"abc");
        assert!(Alone.broadcast("x", None).unwrap_err().to_string().contains("rank 0 passes nothing"));
        Alone.barrier("x").unwrap();
    }
}

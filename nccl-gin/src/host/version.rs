//! NCCL's version numbers.

use std::fmt;

/// A version as `ncclGetVersion` gives it: `major · 10000 + minor · 100 + patch` since 2.9.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u32);

impl Version {
    /// The oldest that this crate works with.
    pub const OLDEST: Self = Self(22800);

    /// `(major, minor, patch)`.
    pub const fn parts(self) -> (u32, u32, u32) {
        let code = self.0;
        if code < 10_000 {
            (code / 1000, code / 100 % 10, code % 100)
        } else {
            (code / 10_000, code / 100 % 100, code % 100)
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor, patch) = self.parts();
        write!(f, "{major}.{minor}.{patch}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_nccl_writes_them() {
        assert_eq!(Version(22803).to_string(), "2.28.3");
        assert_eq!(Version(23203).to_string(), "2.32.3");
        assert_eq!(Version(2804).to_string(), "2.8.4");
    }
}

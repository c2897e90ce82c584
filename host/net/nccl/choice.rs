//! Which way the rails go: what each rank has, the same answer on all of them, in words.

use crate::error::{Result, TideError};
use crate::net::Path;
use std::fmt;
use tide_device::abi::kernel::NcclBackend;

/// What drives the rails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// No rails: one node.
    None,
    /// The GPU posts, through this back end of NCCL's.
    Device(NcclBackend),
    /// The host enqueues NCCL's puts, signals and waits.
    Host,
}

impl Way {
    /// The path of a communicator.
    pub const fn path(self) -> Path {
        match self {
            Self::None | Self::Device(_) => Path::Device,
            Self::Host => Path::Host,
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("no rails (one node)"),
            Self::Device(backend) => write!(f, "device path, GIN {}", backend.name()),
            Self::Host => f.write_str("host path, host RMA"),
        }
    }
}

/// The ways in order of preference.
const WAYS: [Way; 3] = [Way::Device(NcclBackend::Gdaki), Way::Device(NcclBackend::Proxy), Way::Host];

/// What one rank can do: for each of the ways, nothing, or why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Abilities(Vec<Option<String>>);

/// Between what a rank says of one way and of the next.
const SEPARATOR: u8 = 0;

impl Abilities {
    /// Asks `obstacle` of every way.
    pub fn new(obstacle: impl Fn(Way) -> Option<String>) -> Self {
        Self(WAYS.map(obstacle).to_vec())
    }

    /// For an exchange.
    pub fn encode(&self) -> Vec<u8> {
        let words: Vec<&[u8]> = self.0.iter().map(|o| o.as_deref().unwrap_or("").as_bytes()).collect();
        words.join(&SEPARATOR)
    }

    /// What [`Abilities::encode`] gave; `None` for anything else.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |w: &[u8]| String::from_utf8(w.to_vec()).ok().map(|w| (!w.is_empty()).then_some(w));
        let obstacles: Vec<_> = bytes.split(|b| *b == SEPARATOR).map(word).collect::<Option<_>>()?;
        (obstacles.len() == WAYS.len()).then_some(Self(obstacles))
    }
}

/// The first way that all ranks can go, in the caller's `wish` if there is one; with why each better one was passed over.
///
/// All ranks that are given the same abilities choose the same.
///
/// # Errors
/// [`TideError::Unsupported`] where there is none, with the obstacles and the ranks that have them.
pub fn choose(abilities: &[Abilities], wish: Option<Path>) -> Result<(Way, Vec<String>)> {
    let mut passed_over = Vec::new();
    for (index, way) in WAYS.into_iter().enumerate().filter(|(_, w)| wish.is_none_or(|path| path == w.path())) {
        let obstacles = abilities.iter().enumerate().filter_map(|(rank, a)| Some((rank, a.0[index].as_ref()?)));
        let mut obstacles = obstacles.peekable();
        let Some((rank, why)) = obstacles.peek().copied() else { return Ok((way, passed_over)) };
        let others = obstacles.count() - 1;
        let and_others = if others > 0 { format!(" (and {others} more)") } else { String::new() };
        passed_over.push(format!("{way}: rank {rank}{and_others}: {why}"));
    }
    Err(TideError::Unsupported {
        needed: "a way over the rails that all ranks have".into(),
        found: passed_over.join("; "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(obstacles: [&str; 3]) -> Abilities {
        Abilities(obstacles.map(|o| (!o.is_empty()).then(|| o.to_owned())).to_vec())
    }

    #[test]
    fn the_best_way_that_all_ranks_have_is_taken() {
        let all = rank(["", "", ""]);
        let no_gdaki = rank(["no NIC", "", ""]);
        assert_eq!(choose(&[all.clone(), all.clone()], None).unwrap().0, Way::Device(NcclBackend::Gdaki));
        let (way, why) = choose(&[all.clone(), no_gdaki], None).unwrap();
        assert_eq!(way, Way::Device(NcclBackend::Proxy));
        assert_eq!(why, ["device path, GIN gdaki: rank 1: no NIC"]);
        assert_eq!(choose(&[all], Some(Path::Host)).unwrap().0, Way::Host);
    }

    #[test]
    fn no_common_way_is_refused_with_every_obstacle() {
        let ranks = [rank(["", "x", "y"]), rank(["no module", "", "y"]), rank(["no module", "", "y"])];
        let error = choose(&ranks, None).unwrap_err().to_string();
        for part in ["rank 1 (and 1 more): no module", "rank 0: x", "host path, host RMA: rank 0 (and 2 more): y"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(choose(&ranks, Some(Path::Device)).is_err());
    }

    #[test]
    fn abilities_survive_an_exchange() {
        let some = rank(["no NIC", "", "rmä"]);
        assert_eq!(Abilities::decode(&some.encode()), Some(some));
        for bad in [&b""[..], b"a", b"a\0b\0c\0d", &[0, 0, 0xff]] {
            assert_eq!(Abilities::decode(bad), None);
        }
    }
}

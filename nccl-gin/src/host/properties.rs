//! What a communicator can do.

use super::device_comm::GinConnection;
use super::layout::Record;

/// The transport of the device's one-sided operations (GIN).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GinType {
    /// None.
    None,
    /// A thread of the host posts for the GPU.
    Proxy,
    /// The GPU posts to the network card itself.
    Gdaki,
    /// GPI.
    Gpi,
    /// The GPU posts to an EFA card itself.
    EfaGda,
    /// One that this crate does not know, by its number.
    Other(i32),
}

impl GinType {
    /// From `ncclGinType_t`.
    pub const fn from_code(code: i32) -> Self {
        match code {
            0 => Self::None,
            2 => Self::Proxy,
            3 => Self::Gdaki,
            4 => Self::Gpi,
            5 => Self::EfaGda,
            other => Self::Other(other),
        }
    }

    /// `ncclGinType_t`.
    pub const fn code(self) -> i32 {
        match self {
            Self::None => 0,
            Self::Proxy => 2,
            Self::Gdaki => 3,
            Self::Gpi => 4,
            Self::EfaGda => 5,
            Self::Other(code) => code,
        }
    }
}

/// What a communicator can do, as `ncclCommQueryProperties` says. `None`: the library's version does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// This rank.
    pub rank: i32,
    /// All ranks.
    pub rank_count: i32,
    /// Its GPU, as CUDA counts.
    pub cuda_device: i32,
    /// Its GPU, as NVML counts.
    pub nvml_device: i32,
    /// Whether there are symmetric windows and device communicators.
    pub device_api: bool,
    /// Whether windows have multicast addresses.
    pub multimem: bool,
    /// GIN between all ranks.
    pub gin: GinType,
    /// GIN within rails, which may be there where `gin` is not.
    pub railed_gin: GinType,
    /// Groups of ranks that reach each other by loads and stores.
    pub lsa_team_count: i32,
    /// Whether there are put, signal and wait of the host.
    pub host_rma: bool,
    /// The same number on all ranks of the communicator.
    pub comm_hash: Option<u64>,
    /// The widest connection that GIN can have.
    pub gin_connection: Option<GinConnection>,
    /// Size of a device communicator in the library's own version, bytes.
    pub device_comm_bytes: Option<u64>,
}

impl Properties {
    pub(crate) fn read(record: &Record) -> Self {
        let int = |name| record.int(name).expect("in all versions of the struct");
        let bool = |name| record.bool(name).expect("in all versions of the struct");
        Self {
            rank: int("rank"),
            rank_count: int("nRanks"),
            cuda_device: int("cudaDev"),
            nvml_device: int("nvmlDev"),
            device_api: bool("deviceApiSupport"),
            multimem: bool("multimemSupport"),
            gin: GinType::from_code(int("ginType")),
            railed_gin: GinType::from_code(int("railedGinType")),
            lsa_team_count: int("nLsaTeams"),
            host_rma: bool("hostRmaSupport"),
            comm_hash: record.word("commHash"),
            gin_connection: connection(record),
            device_comm_bytes: record.word("devCommRuntimeVersionSize"),
        }
    }
}

fn connection(record: &Record) -> Option<GinConnection> {
    match record.int("ginConnectionType")? {
        0 => Some(GinConnection::None),
        1 => Some(GinConnection::Full),
        2 => Some(GinConnection::Rail),
        3 => Some(GinConnection::Stride(record.int("ginMinStride")?)),
        _ => None,
    }
}

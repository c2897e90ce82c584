//! How a communicator is to be.

use super::error::{NcclError, Result};
use super::layout::{CONFIG, Record};
use super::library::Library;
use std::ffi::CString;
use std::time::Duration;

/// How a communicator is to be. `None` leaves a choice to NCCL. All ranks give the same.
///
/// `splitShare` cannot be set: a child that shares its parent's network state uses the parent's rank numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Whether NCCL's calls block, without any limit, until the other ranks have come. False by default: then [`timeout`](Self::timeout)
    /// holds.
    pub blocking: bool,
    /// The longest that a call may take which needs the other ranks: initialisation, split, registration, device communicators, the end
    /// of a group, finalisation. Two minutes by default.
    pub timeout: Duration,
    /// The fewest thread blocks of a collective.
    pub min_ctas: Option<u32>,
    /// The most thread blocks of a collective.
    pub max_ctas: Option<u32>,
    /// Thread blocks of a cluster.
    pub cga_cluster_size: Option<u32>,
    /// Thread blocks of collectives that use the switch (NVLS).
    pub nvls_ctas: Option<u32>,
    /// Channels per peer on the network.
    pub channels_per_net_peer: Option<u32>,
    /// The network's traffic class.
    pub traffic_class: Option<i32>,
    /// The network plugin's name.
    pub net_name: Option<String>,
    /// The communicator's name in logs.
    pub name: Option<String>,
    /// Contexts of host RMA; 0 turns it off and saves its connections. From 2.29.7; NCCL's default is 1.
    pub rma_contexts: Option<u32>,
    /// Signals per peer and context of host RMA. From 2.31.2; NCCL's default is 1.
    pub rma_signals: Option<u32>,
    /// Whether host RMA connects at initialisation: needed if a signal or a wait comes before the first window. From 2.31.2.
    pub rma_eager_init: Option<bool>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            blocking: false,
            timeout: Duration::from_secs(120),
            min_ctas: None,
            max_ctas: None,
            cga_cluster_size: None,
            nvls_ctas: None,
            channels_per_net_peer: None,
            traffic_class: None,
            net_name: None,
            name: None,
            rma_contexts: None,
            rma_signals: None,
            rma_eager_init: None,
        }
    }
}

/// An `ncclConfig_t` with the strings that it points to.
pub(crate) struct RawConfig {
    pub(crate) record: Record,
    _strings: [CString; 2],
}

impl Config {
    /// The struct for a library's version.
    pub(crate) fn build(&self, library: &Library) -> Result<RawConfig> {
        let layout = CONFIG.at(library.version()).expect("a library that loads has communicators");
        let mut record = Record::new(layout);
        let mut set = |name: &'static str, value: Option<i32>| match value {
            Some(value) if !record.set_int(name, value) => Err(lacking(name, library)),
            _ => Ok(()),
        };
        set("blocking", Some(i32::from(self.blocking)))?;
        set("splitShare", Some(0))?;
        set("minCTAs", count("min_ctas", self.min_ctas)?)?;
        set("maxCTAs", count("max_ctas", self.max_ctas)?)?;
        set("cgaClusterSize", count("cga_cluster_size", self.cga_cluster_size)?)?;
        set("nvlsCTAs", count("nvls_ctas", self.nvls_ctas)?)?;
        set("nChannelsPerNetPeer", count("channels_per_net_peer", self.channels_per_net_peer)?)?;
        set("trafficClass", self.traffic_class)?;
        set("numRmaCtx", count("rma_contexts", self.rma_contexts)?)?;
        set("numRmaSig", count("rma_signals", self.rma_signals)?)?;
        set("rmaEagerInit", self.rma_eager_init.map(i32::from))?;
        let strings = [string("net_name", self.net_name.as_deref())?, string("name", self.name.as_deref())?];
        for (field, value) in ["netName", "commName"].into_iter().zip(&strings) {
            if !value.is_empty() {
                record.set_word(field, value.as_ptr() as u64);
            }
        }
        Ok(RawConfig { record, _strings: strings })
    }
}

/// The error for a field that the loaded version does not have.
fn lacking(field: &'static str, library: &Library) -> NcclError {
    let needed = CONFIG.since(field).expect("a field of the schema");
    NcclError::TooOld { path: library.path().display().to_string(), found: library.version(), needed, what: field }
}

pub(crate) fn count(name: &str, value: Option<u32>) -> Result<Option<i32>> {
    value.map(i32::try_from).transpose().map_err(|_| NcclError::Usage(format!("{name} is beyond 2^31 - 1")))
}

fn string(name: &str, value: Option<&str>) -> Result<CString> {
    CString::new(value.unwrap_or_default()).map_err(|_| NcclError::Usage(format!("{name} contains a zero byte")))
}

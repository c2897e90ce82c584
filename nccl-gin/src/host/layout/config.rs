//! `ncclConfig_t`: how a communicator is to be.

use super::{Kind, Schema, UNDEFINED, field};

pub(crate) static CONFIG: Schema = Schema {
    name: "ncclConfig_t",
    fields: &[
        field("size", Kind::OwnSize, 22800),
        field("magic", Kind::Magic, 22800),
        field("version", Kind::OwnVersion, 22800),
        field("blocking", UNDEFINED, 22800),
        field("cgaClusterSize", UNDEFINED, 22800),
        field("minCTAs", UNDEFINED, 22800),
        field("maxCTAs", UNDEFINED, 22800),
        field("netName", Kind::Word(0), 22800),
        field("splitShare", UNDEFINED, 22800),
        field("trafficClass", UNDEFINED, 22800),
        field("commName", Kind::Word(0), 22800),
        field("collnetEnable", UNDEFINED, 22800),
        field("CTAPolicy", UNDEFINED, 22800),
        field("shrinkShare", UNDEFINED, 22800),
        field("nvlsCTAs", UNDEFINED, 22800),
        field("nChannelsPerNetPeer", UNDEFINED, 22800),
        field("nvlinkCentricSched", UNDEFINED, 22800),
        field("graphUsageMode", UNDEFINED, 22907),
        field("numRmaCtx", UNDEFINED, 22907),
        field("maxP2pPeers", UNDEFINED, 23003),
        field("graphStreamOrdering", UNDEFINED, 23007),
        field("launchOrderImplicit", UNDEFINED, 23102),
        field("numRmaSig", UNDEFINED, 23102),
        field("rmaEagerInit", UNDEFINED, 23102),
        field("hostCftMode", UNDEFINED, 23102),
        field("nvlsHostMode", UNDEFINED, 23203),
    ],
    versions: &[22803, 22809, 22907, 23003, 23007, 23102, 23203],
};

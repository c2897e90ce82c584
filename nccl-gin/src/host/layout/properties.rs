//! `ncclCommProperties`: what a communicator can do.

use super::{Kind, Schema, field};

pub(crate) static PROPERTIES: Schema = Schema {
    name: "ncclCommProperties",
    fields: &[
        field("size", Kind::OwnSize, 22907),
        field("magic", Kind::Magic, 22907),
        field("version", Kind::OwnVersion, 22907),
        field("rank", Kind::Int(0), 22907),
        field("nRanks", Kind::Int(0), 22907),
        field("cudaDev", Kind::Int(0), 22907),
        field("nvmlDev", Kind::Int(0), 22907),
        field("deviceApiSupport", Kind::Bool(false), 22907),
        field("multimemSupport", Kind::Bool(false), 22907),
        field("ginType", Kind::Int(0), 22907),
        field("nLsaTeams", Kind::Int(0), 22907),
        field("hostRmaSupport", Kind::Bool(false), 22907),
        field("railedGinType", Kind::Int(0), 22907),
        field("commHash", Kind::Word(0), 23102),
        field("ginMinStride", Kind::Int(0), 23102),
        field("ginConnectionType", Kind::Int(0), 23102),
        field("ginSupport", Kind::Bools(64), 23102),
        field("devCommRuntimeVersionSize", Kind::Word(0), 23102),
        field("cftSupport", Kind::Bool(false), 23203),
        field("cftMulticastSupport", Kind::Bool(false), 23203),
        field("cftCountedSupport", Kind::Bool(false), 23203),
    ],
    versions: &[22907, 23003, 23007, 23102, 23203],
};

//! `ncclDevCommRequirements`: what a device communicator is to have. Its 2.28 form carried no version and is not supported.

use super::{Kind, Schema, UNDEFINED, field};

pub(crate) static REQUIREMENTS: Schema = Schema {
    name: "ncclDevCommRequirements",
    fields: &[
        field("size", Kind::OwnSize, 22907),
        field("magic", Kind::Magic, 22907),
        field("version", Kind::OwnVersion, 22907),
        field("resourceRequirementsList", Kind::Word(0), 22907),
        field("teamRequirementsList", Kind::Word(0), 22907),
        field("lsaMultimem", Kind::Bool(false), 22907),
        field("barrierCount", Kind::Int(0), 22907),
        field("lsaBarrierCount", Kind::Int(0), 22907),
        field("railGinBarrierCount", Kind::Int(0), 22907),
        field("lsaLLA2ABlockCount", Kind::Int(0), 22907),
        field("lsaLLA2ASlotCount", Kind::Int(0), 22907),
        field("ginForceEnable", Kind::Bool(false), 22907),
        field("ginContextCount", Kind::Int(4), 22907),
        field("ginSignalCount", Kind::Int(0), 22907),
        field("ginCounterCount", Kind::Int(0), 22907),
        field("ginConnectionType", Kind::Int(0), 22907),
        field("ginExclusiveContexts", Kind::Bool(false), 22907),
        field("ginQueueDepth", Kind::Int(0), 22907),
        field("ginTrafficClass", UNDEFINED, 23003),
        field("worldGinBarrierCount", Kind::Int(0), 23003),
        field("ginStrongSignalsRequired", Kind::Bool(true), 23007),
        field("ginVaSignalsRequired", Kind::Bool(true), 23007),
        field("ginCustomStride", Kind::Int(1), 23102),
        field("ginType", Kind::Int(0), 23102),
        field("useRuntimeVersion", Kind::Bool(false), 23102),
        field("cftCaps", Kind::Int(0), 23102),
        field("cftBarrierCount", Kind::Int(0), 23102),
    ],
    versions: &[22907, 23003, 23007, 23102, 23203],
};

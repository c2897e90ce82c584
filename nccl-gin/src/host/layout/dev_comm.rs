//! `ncclDevComm`: NCCL fills it, kernels read it. It was rearranged more than once, so each version has its own line, and only what
//! the documentation promises is read.

use super::super::version::Version;

/// Where the documented fields of `ncclDevComm` lie, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DevCommLayout {
    /// The version whose headers say so.
    pub version: Version,
    /// Its size.
    pub bytes: usize,
    /// `int rank`.
    pub rank: usize,
    /// `int nRanks`.
    pub rank_count: usize,
    /// `int lsaRank`.
    pub lsa_rank: usize,
    /// `int lsaSize`.
    pub lsa_size: usize,
    /// `uint32_t ginContextCount`; `None` before it was 32 bits wide.
    pub context_count: Option<usize>,
}

const fn line(version: u32, bytes: usize, rank: usize, context_count: Option<usize>) -> DevCommLayout {
    let version = Version(version);
    DevCommLayout {
        version,
        bytes,
        rank,
        rank_count: rank + 4,
        lsa_rank: rank + 12,
        lsa_size: rank + 16,
        context_count,
    }
}

const LINES: [DevCommLayout; 7] = [
    line(22803, 88, 0, None),
    line(22809, 200, 0, None),
    line(22907, 224, 0, Some(200)),
    line(23003, 240, 8, Some(200)),
    line(23007, 240, 8, Some(200)),
    line(23102, 248, 8, Some(152)),
    line(23203, 248, 8, Some(152)),
];

impl DevCommLayout {
    /// The layout that NCCL writes for requirements whose `version` field is `version`.
    pub fn written_for(version: Version) -> Option<Self> {
        LINES.into_iter().find(|l| l.version == version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_the_place_of_rank_are_those_of_each_versions_headers() {
        for (version, bytes, rank) in
            [(22803, 88, 0), (22809, 200, 0), (22907, 224, 0), (23003, 240, 8), (23102, 248, 8), (23203, 248, 8)]
        {
            let layout = DevCommLayout::written_for(Version(version)).unwrap();
            assert_eq!((layout.bytes, layout.rank), (bytes, rank), "{version}");
        }
        assert_eq!(DevCommLayout::written_for(Version(23201)), None);
    }
}

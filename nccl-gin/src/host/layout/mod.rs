//! NCCL's versioned structs as bytes.
//!
//! A struct is **one ordered list of fields**, each with the version that brought it. The rules of C give offsets and size; NCCL
//! only ever appends. So the layout for a version is the list up to it, and no second table of offsets exists. The lists were
//! compared with the headers of the packages of each version in [`Schema::versions`] (`tests/real_library.rs` does it again).
//!
//! For a library whose version is not among them, the newest known layout that is not newer is used, and the struct's own `version`
//! field names that: NCCL promises to read what its older versions defined. A new minor version therefore works, without its
//! new fields.

mod config;
mod dev_comm;
mod properties;
mod requirements;

pub(crate) use config::CONFIG;
pub use dev_comm::DevCommLayout;
pub(crate) use properties::PROPERTIES;
pub(crate) use requirements::REQUIREMENTS;

use super::version::Version;

/// What NCCL writes in the `magic` field of each of its versioned structs.
const MAGIC: u32 = 0xcafe_beef;

/// The type of a field, with its value in a fresh struct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `size_t size`.
    OwnSize,
    /// `unsigned magic`.
    Magic,
    /// `unsigned version`.
    OwnVersion,
    /// `int` or an enum.
    Int(i32),
    /// `bool`.
    Bool(bool),
    /// A pointer, or `size_t` or `uint64_t`.
    Word(u64),
    /// `bool[n]`.
    Bools(usize),
}

impl Kind {
    const fn bytes(self) -> usize {
        match self {
            Self::OwnSize | Self::Word(_) => 8,
            Self::Magic | Self::OwnVersion | Self::Int(_) => 4,
            Self::Bool(_) => 1,
            Self::Bools(count) => count,
        }
    }

    const fn align(self) -> usize {
        match self {
            Self::Bools(_) => 1,
            other => other.bytes(),
        }
    }
}

/// `int` that the caller left to NCCL.
pub(crate) const UNDEFINED: Kind = Kind::Int(i32::MIN);

/// A field of a versioned struct.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field {
    name: &'static str,
    kind: Kind,
    /// The version that brought it, as far as the packages show.
    since: u32,
}

const fn field(name: &'static str, kind: Kind, since: u32) -> Field {
    Field { name, kind, since }
}

/// All that is known of a versioned struct.
#[derive(Debug)]
pub(crate) struct Schema {
    /// Its name in C.
    pub(crate) name: &'static str,
    /// Its fields, in order.
    fields: &'static [Field],
    /// Versions whose headers were compared, ascending.
    pub(crate) versions: &'static [u32],
}

impl Schema {
    /// The layout to use with a library of version `loaded`; `None` if the struct is younger.
    pub(crate) fn at(&'static self, loaded: Version) -> Option<Layout> {
        let version = *self.versions.iter().rev().find(|v| **v <= loaded.0)?;
        let mut end = 0;
        let mut align = 1;
        let mut places = Vec::new();
        for field in self.fields.iter().filter(|f| f.since <= version) {
            let offset = usize::next_multiple_of(end, field.kind.align());
            align = align.max(field.kind.align());
            end = offset + field.kind.bytes();
            places.push((*field, offset));
        }
        Some(Layout { name: self.name, version: Version(version), bytes: end.next_multiple_of(align), places })
    }

    /// The version that brought a field.
    pub(crate) fn since(&self, name: &str) -> Option<Version> {
        self.fields.iter().find(|f| f.name == name).map(|f| Version(f.since))
    }
}

/// Where the fields of a versioned struct lie, for one version.
#[derive(Debug, Clone)]
pub struct Layout {
    name: &'static str,
    version: Version,
    bytes: usize,
    places: Vec<(Field, usize)>,
}

impl Layout {
    /// The layout of `ncclConfig_t`, `ncclDevCommRequirements` or `ncclCommProperties` that this crate uses with a library of version
    /// `loaded`; `None` for any other name, and for a struct that `loaded` lacks.
    pub fn of(name: &str, loaded: Version) -> Option<Self> {
        [&CONFIG, &REQUIREMENTS, &PROPERTIES].into_iter().find(|s| s.name == name)?.at(loaded)
    }

    /// Versions of NCCL whose headers the layouts were compared with, ascending.
    pub fn known_versions(name: &str) -> Option<impl Iterator<Item = Version>> {
        let schema = [&CONFIG, &REQUIREMENTS, &PROPERTIES].into_iter().find(|s| s.name == name)?;
        Some(schema.versions.iter().map(|v| Version(*v)))
    }

    /// The struct's name in C.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The version that defined it: what its `version` field says. Not newer than the library.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its fields' names and offsets, in order.
    pub fn offsets(&self) -> impl Iterator<Item = (&'static str, usize)> {
        self.places.iter().map(|(field, offset)| (field.name, *offset))
    }

    /// The bytes of a fresh struct: what C's initialiser gives.
    pub fn initial_bytes(&self) -> Vec<u8> {
        let record = Record::new(self.clone());
        (0..self.bytes).map(|index| byte(&record.words, index)).collect()
    }

    fn place(&self, name: &str) -> Option<(Kind, usize)> {
        self.places.iter().find(|(field, _)| field.name == name).map(|(field, offset)| (field.kind, *offset))
    }
}

/// A versioned struct: its bytes, aligned for C.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    layout: Layout,
    words: Vec<u64>,
}

impl Record {
    /// A struct in which every field has its initial value.
    pub(crate) fn new(layout: Layout) -> Self {
        let mut record = Self { words: vec![0; layout.bytes.div_ceil(8)], layout };
        for (field, offset) in record.layout.places.clone() {
            match field.kind {
                Kind::OwnSize => record.write(offset, &(record.layout.bytes as u64).to_ne_bytes()),
                Kind::Magic => record.write(offset, &MAGIC.to_ne_bytes()),
                Kind::OwnVersion => record.write(offset, &record.layout.version.0.to_ne_bytes()),
                Kind::Int(value) => record.write(offset, &value.to_ne_bytes()),
                Kind::Bool(value) => record.write(offset, &[u8::from(value)]),
                Kind::Word(value) => record.write(offset, &value.to_ne_bytes()),
                Kind::Bools(_) => {}
            }
        }
        record
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn as_ptr(&self) -> *const std::ffi::c_void {
        self.words.as_ptr().cast()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut std::ffi::c_void {
        self.words.as_mut_ptr().cast()
    }

    /// Sets an `int`; false if this version has no such field.
    pub(crate) fn set_int(&mut self, name: &str, value: i32) -> bool {
        self.set(name, |kind| matches!(kind, Kind::Int(_)), &value.to_ne_bytes())
    }

    /// Sets a `bool`; false if this version has no such field.
    pub(crate) fn set_bool(&mut self, name: &str, value: bool) -> bool {
        self.set(name, |kind| matches!(kind, Kind::Bool(_)), &[u8::from(value)])
    }

    /// Sets a pointer; false if this version has no such field.
    pub(crate) fn set_word(&mut self, name: &str, value: u64) -> bool {
        self.set(name, |kind| matches!(kind, Kind::Word(_)), &value.to_ne_bytes())
    }

    /// The value of an `int`; `None` if this version has no such field.
    pub(crate) fn int(&self, name: &str) -> Option<i32> {
        Some(i32::from_ne_bytes(self.get(name, |kind| matches!(kind, Kind::Int(_)))?))
    }

    /// The value of a `bool`; `None` if this version has no such field.
    pub(crate) fn bool(&self, name: &str) -> Option<bool> {
        Some(self.get::<1>(name, |kind| matches!(kind, Kind::Bool(_)))? != [0])
    }

    /// The value of a pointer or a `size_t`; `None` if this version has no such field.
    pub(crate) fn word(&self, name: &str) -> Option<u64> {
        Some(u64::from_ne_bytes(self.get(name, |kind| matches!(kind, Kind::Word(_)))?))
    }

    fn set(&mut self, name: &str, fits: impl Fn(Kind) -> bool, value: &[u8]) -> bool {
        let Some((kind, offset)) = self.layout.place(name) else { return false };
        assert!(fits(kind), "{}.{name} is a {kind:?}", self.layout.name);
        self.write(offset, value);
        true
    }

    fn get<const N: usize>(&self, name: &str, fits: impl Fn(Kind) -> bool) -> Option<[u8; N]> {
        let (kind, offset) = self.layout.place(name)?;
        assert!(fits(kind), "{}.{name} is a {kind:?}", self.layout.name);
        Some(std::array::from_fn(|i| byte(&self.words, offset + i)))
    }

    fn write(&mut self, offset: usize, value: &[u8]) {
        for (index, byte) in value.iter().enumerate() {
            let (word, within) = ((offset + index) / 8, (offset + index) % 8);
            let mut bytes = self.words[word].to_ne_bytes();
            bytes[within] = *byte;
            self.words[word] = u64::from_ne_bytes(bytes);
        }
    }
}

/// A byte of a struct that is kept in words for its alignment.
pub(crate) fn byte(words: &[u64], index: usize) -> u8 {
    words[index / 8].to_ne_bytes()[index % 8]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Version and size; `None` before the struct was there.
    type Sizes = [(u32, Option<usize>); 7];

    /// Sizes that a C++ compiler gave for the headers of each package.
    const SIZES: [(&str, Sizes); 3] = [
        (
            "ncclConfig_t",
            [
                (22803, Some(80)),
                (22809, Some(80)),
                (22907, Some(88)),
                (23003, Some(96)),
                (23007, Some(96)),
                (23102, Some(112)),
                (23203, Some(120)),
            ],
        ),
        (
            "ncclDevCommRequirements",
            [
                (22803, None),
                (22809, None),
                (22907, Some(88)),
                (23003, Some(96)),
                (23007, Some(96)),
                (23102, Some(120)),
                (23203, Some(120)),
            ],
        ),
        (
            "ncclCommProperties",
            [
                (22803, None),
                (22809, None),
                (22907, Some(56)),
                (23003, Some(56)),
                (23007, Some(56)),
                (23102, Some(144)),
                (23203, Some(152)),
            ],
        ),
    ];

    #[test]
    fn sizes_are_those_of_each_versions_headers() {
        for (name, sizes) in SIZES {
            for (version, bytes) in sizes {
                let layout = Layout::of(name, Version(version));
                assert_eq!(layout.map(|l| l.bytes()), bytes, "{name} of {version}");
            }
        }
    }

    #[test]
    fn a_field_that_comes_too_early_changes_a_size() {
        static PLANTED: Schema = Schema {
            name: "planted",
            fields: &[field("size", Kind::OwnSize, 22800), field("early", Kind::Int(0), 22800)],
            versions: &[22803],
        };
        assert_eq!(PLANTED.at(Version(22803)).unwrap().bytes(), 16);
        static RIGHT: Schema = Schema {
            name: "right",
            fields: &[field("size", Kind::OwnSize, 22800), field("early", Kind::Int(0), 22907)],
            versions: &[22803],
        };
        assert_eq!(RIGHT.at(Version(22803)).unwrap().bytes(), 8);
    }

    #[test]
    fn offsets_are_those_of_the_headers_of_2_32_3() {
        for (name, offsets) in [
            (
                "ncclConfig_t",
                &[
                    ("size", 0),
                    ("version", 12),
                    ("blocking", 16),
                    ("netName", 32),
                    ("splitShare", 40),
                    ("trafficClass", 44),
                    ("commName", 48),
                    ("nChannelsPerNetPeer", 72),
                    ("numRmaCtx", 84),
                    ("numRmaSig", 100),
                    ("rmaEagerInit", 104),
                    ("nvlsHostMode", 112),
                ][..],
            ),
            (
                "ncclDevCommRequirements",
                &[
                    ("resourceRequirementsList", 16),
                    ("lsaMultimem", 32),
                    ("ginForceEnable", 56),
                    ("ginContextCount", 60),
                    ("ginConnectionType", 72),
                    ("ginTrafficClass", 84),
                    ("ginVaSignalsRequired", 93),
                    ("ginCustomStride", 96),
                    ("useRuntimeVersion", 104),
                    ("cftBarrierCount", 112),
                ],
            ),
            (
                "ncclCommProperties",
                &[
                    ("deviceApiSupport", 32),
                    ("multimemSupport", 33),
                    ("ginType", 36),
                    ("hostRmaSupport", 44),
                    ("commHash", 56),
                    ("ginSupport", 72),
                    ("devCommRuntimeVersionSize", 136),
                    ("cftCountedSupport", 146),
                ],
            ),
        ] {
            let layout = Layout::of(name, Version(23203)).unwrap();
            for (field, offset) in offsets {
                assert_eq!(layout.place(field).map(|p| p.1), Some(*offset), "{name}.{field}");
            }
        }
    }

    #[test]
    fn a_version_between_known_ones_uses_the_older_layout_and_says_so() {
        for (loaded, used) in [(23105, 23102), (23204, 23203), (23301, 23203), (30000, 23203), (22905, 22809)] {
            let layout = Layout::of("ncclConfig_t", Version(loaded)).unwrap();
            assert_eq!(layout.version(), Version(used), "{loaded}");
        }
        assert!(Layout::of("ncclConfig_t", Version(22703)).is_none());
    }

    #[test]
    fn a_fresh_struct_says_what_it_is_and_leaves_the_rest_to_nccl() {
        let config = Record::new(CONFIG.at(Version(23102)).unwrap());
        assert_eq!(config.words[0], 112);
        assert_eq!(config.words[1], u64::from(MAGIC) | 23102 << 32);
        assert_eq!(config.int("blocking"), Some(i32::MIN));
        assert_eq!(config.word("netName"), Some(0));
        assert_eq!(config.int("nvlsHostMode"), None);
        let requirements = Record::new(REQUIREMENTS.at(Version(23203)).unwrap());
        assert_eq!(requirements.int("ginContextCount"), Some(4));
        assert_eq!(requirements.int("ginTrafficClass"), Some(i32::MIN));
        assert_eq!(requirements.bool("ginStrongSignalsRequired"), Some(true));
        assert_eq!(requirements.int("ginCustomStride"), Some(1));
    }

    #[test]
    fn fields_that_share_a_word_do_not_touch_each_other() {
        let mut record = Record::new(REQUIREMENTS.at(Version(23203)).unwrap());
        assert!(record.set_bool("ginVaSignalsRequired", false) && record.set_int("worldGinBarrierCount", -2));
        assert_eq!(record.bool("ginStrongSignalsRequired"), Some(true));
        assert_eq!(record.bool("ginVaSignalsRequired"), Some(false));
        assert_eq!(record.int("worldGinBarrierCount"), Some(-2));
        assert!(!record.set_int("not there", 1));
    }
}

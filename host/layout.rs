//! FSDP2's layouts, as pure arithmetic: groups of parameters, their padded dim-0 shards, where a
//! shard lands in an all-gather, and the packed fp32 row that a reduce-scatter gives each rank.
//!
//! Notation of [TIDE §2.1]: a parameter `p` is seen as `(D_p, K_p)`, `D_p` its dim-0 extent and
//! `K_p` the product of the rest. Over `N` ranks each rank owns `R_p = ⌈D_p/N⌉` rows, the last
//! ranks fewer or none; a shard is always stored padded to `R_p` rows.
//!
//! All arithmetic is in `u64`. Nothing here knows of a device.

use std::fmt;
use std::ops::Range;
use tide_device::abi::segment::Segment;

/// The element type of a parameter, as far as moving and reducing it needs to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E4M3,
    F8E5M2,
    U16,
    I16,
    F16,
    Bf16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

impl Dtype {
    /// Size of one element in bytes; also its natural alignment.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Bool | Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// Whether the type can be a gradient once converted: `f32`, `f16` and `bf16`.
    pub const fn is_gradient(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bool => "bool",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::F8E4M3 => "f8_e4m3",
            Self::F8E5M2 => "f8_e5m2",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        })
    }
}

/// Why a parameter or group has no layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum LayoutError {
    #[error("0-dim parameter `{name}`: reshape to [1]")]
    ZeroDim { name: String },
    #[error(
        "parameter `{name}` is sharded on dim {dim} of {shape:?}: only dim 0 is supported{uneven}",
        uneven = if *even { "" } else { " (and the sizes do not divide evenly)" }
    )]
    ShardDim { name: String, dim: usize, shape: Vec<u64>, even: bool },
    #[error("parameter `{name}` {shape:?} has more bytes than 64 bits can count over {rank_count} ranks")]
    TooLarge { name: String, shape: Vec<u64>, rank_count: u64 },
    #[error("two parameters of the group are called `{name}`")]
    DuplicateName { name: String },
    #[error("a group needs at least one rank")]
    NoRanks,
}

/// One parameter of a group: its name, its unsharded shape and the type of its elements.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Parameter {
    name: String,
    shape: Vec<u64>,
    dtype: Dtype,
}

impl Parameter {
    /// A parameter sharded on dim 0.
    ///
    /// # Errors
    /// [`LayoutError::ZeroDim`] for a shape without dimensions.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<u64>>, dtype: Dtype) -> Result<Self, LayoutError> {
        Self::with_shard_dim(name, shape, dtype, 0, 1)
    }

    /// As [`Parameter::new`], for a caller that takes the sharded dimension from elsewhere.
    ///
    /// # Errors
    /// [`LayoutError::ZeroDim`], and [`LayoutError::ShardDim`] for every dimension but 0: a
    /// parameter sharded on another one is refused, never read as if it were sharded on dim 0.
    pub fn with_shard_dim(
        name: impl Into<String>,
        shape: impl Into<Vec<u64>>,
        dtype: Dtype,
        dim: usize,
        rank_count: u64,
    ) -> Result<Self, LayoutError> {
        let (name, shape) = (name.into(), shape.into());
        if shape.is_empty() {
            return Err(LayoutError::ZeroDim { name });
        }
        if dim != 0 {
            let even = shape.get(dim).is_some_and(|d| d.is_multiple_of(rank_count.max(1)));
            return Err(LayoutError::ShardDim { name, dim, shape, even });
        }
        Ok(Self { name, shape, dtype })
    }

    /// The parameter's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The unsharded shape; never empty.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// `D_p`, the rows.
    pub fn rows(&self) -> u64 {
        self.shape[0]
    }
}

/// An FSDP parameter group: the parameters that one collective call carries, in their order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    parameters: Vec<Parameter>,
}

impl Group {
    /// A group of these parameters, in this order.
    ///
    /// # Errors
    /// [`LayoutError::DuplicateName`].
    pub fn new(parameters: Vec<Parameter>) -> Result<Self, LayoutError> {
        let mut names: Vec<&str> = parameters.iter().map(Parameter::name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|w| w[0] == w[1]) {
            return Err(LayoutError::DuplicateName { name: pair[0].to_owned() });
        }
        Ok(Self { parameters })
    }

    /// The parameters.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// A number that two ranks share exactly when they pass the same parameters in the same
    /// order: a hash (FNV-1a, 64 bits) over names, shapes and types.
    pub fn signature(&self) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut eat = |bytes: &[u8]| {
            for &byte in bytes {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        };
        for p in &self.parameters {
            eat(&(p.name.len() as u64).to_le_bytes());
            eat(p.name.as_bytes());
            eat(&(p.shape.len() as u64).to_le_bytes());
            p.shape.iter().for_each(|d| eat(&d.to_le_bytes()));
            eat(&[p.dtype as u8]);
        }
        hash
    }
}

/// Where one parameter lies, over `N` ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterLayout {
    /// `D_p`: rows of the unsharded parameter.
    pub rows: u64,
    /// `K_p`: elements of a row.
    pub row_elems: u64,
    /// `R_p = ⌈D_p/N⌉`: rows of a padded shard.
    pub shard_rows: u64,
    /// `R_p·K_p`: elements of a padded shard.
    pub shard_elems: u64,
    /// `D_p·K_p`: elements of the unsharded parameter.
    pub elems: u64,
    /// `s_p`: bytes of a padded shard in the parameter's own type.
    pub shard_bytes: u64,
    /// `o_p`: byte offset of the shard in a rank's packed shard, aligned to the parameter's type.
    pub shard_offset_bytes: u64,
    /// Element offset of the shard in the packed fp32 row of a reduce-scatter.
    pub packed_offset_elems: u64,
}

impl ParameterLayout {
    /// Rows of rank `r`'s shard that exist: `[r·R_p, (r+1)·R_p) ∩ [0, D_p)`.
    pub fn rows_of(&self, rank: u64) -> Range<u64> {
        let first = (rank * self.shard_rows).min(self.rows);
        first..(first + self.shard_rows).min(self.rows)
    }

    /// Elements of rank `r`'s shard that exist; the rest of its `shard_elems` is padding.
    pub fn live_elems_of(&self, rank: u64) -> u64 {
        let rows = self.rows_of(rank);
        (rows.end - rows.start) * self.row_elems
    }
}

/// The layout of a group over `N` ranks, for both collectives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLayout {
    rank_count: u64,
    parameters: Vec<ParameterLayout>,
    shard_bytes: u64,
    packed_elems: u64,
}

impl GroupLayout {
    /// Lays `group` out over `rank_count` ranks.
    ///
    /// # Errors
    /// [`LayoutError::NoRanks`], [`LayoutError::TooLarge`].
    pub fn new(group: &Group, rank_count: u64) -> Result<Self, LayoutError> {
        if rank_count == 0 {
            return Err(LayoutError::NoRanks);
        }
        let (mut shard_bytes, mut packed_elems) = (0_u64, 0_u64);
        let mut parameters = Vec::with_capacity(group.parameters.len());
        for p in &group.parameters {
            let layout = Self::place(p, rank_count, &mut shard_bytes, &mut packed_elems)
                .ok_or_else(|| LayoutError::TooLarge { name: p.name.clone(), shape: p.shape.clone(), rank_count })?;
            parameters.push(layout);
        }
        Ok(Self { rank_count, parameters, shard_bytes, packed_elems })
    }

    /// Places one parameter after what is placed already; `None` where 64 bits do not suffice.
    /// The last check covers every offset that is ever formed: `N` shards at 8 bytes an element.
    fn place(p: &Parameter, rank_count: u64, shard_bytes: &mut u64, packed_elems: &mut u64) -> Option<ParameterLayout> {
        let rows = p.shape[0];
        let row_elems = p.shape[1..].iter().try_fold(1_u64, |n, &d| n.checked_mul(d))?;
        let shard_rows = rows.div_ceil(rank_count);
        let shard_elems = shard_rows.checked_mul(row_elems)?;
        let own_bytes = shard_elems.checked_mul(p.dtype.bytes())?;
        let shard_offset_bytes = shard_bytes.checked_next_multiple_of(p.dtype.bytes())?;
        let layout = ParameterLayout {
            rows,
            row_elems,
            shard_rows,
            shard_elems,
            elems: rows.checked_mul(row_elems)?,
            shard_bytes: own_bytes,
            shard_offset_bytes,
            packed_offset_elems: *packed_elems,
        };
        *shard_bytes = shard_offset_bytes.checked_add(own_bytes)?;
        *packed_elems = packed_elems.checked_add(shard_elems)?;
        shard_bytes.checked_mul(rank_count)?;
        packed_elems.checked_mul(8)?.checked_mul(rank_count)?;
        Some(layout)
    }

    /// `N`.
    pub fn rank_count(&self) -> u64 {
        self.rank_count
    }

    /// The parameters' layouts, in the group's order.
    pub fn parameters(&self) -> &[ParameterLayout] {
        &self.parameters
    }

    /// `S`: bytes of one rank's packed shard.
    pub fn shard_bytes(&self) -> u64 {
        self.shard_bytes
    }

    /// `N·S`: bytes of the parameter-major landing of the whole group.
    pub fn landing_bytes(&self) -> u64 {
        self.shard_bytes * self.rank_count
    }

    /// Elements of a rank's packed fp32 row, `S_fp32 / 4`.
    pub fn packed_elems(&self) -> u64 {
        self.packed_elems
    }

    /// `Landing(p, r) = o_p·N + r·s_p`: byte offset of rank `r`'s shard of parameter `p` in the
    /// parameter-major landing [TIDE eq. 2].
    pub fn landing_offset_bytes(&self, parameter: usize, rank: u64) -> u64 {
        let p = &self.parameters[parameter];
        p.shard_offset_bytes * self.rank_count + rank * p.shard_bytes
    }

    /// The segment table of the packed row: a segment for each parameter that has elements, ascending and gapless.
    pub fn segments(&self) -> Vec<Segment> {
        let parameters = self.parameters.iter().enumerate().filter(|(_, p)| p.shard_elems > 0);
        parameters
            .map(|(index, p)| Segment {
                packed_first: p.packed_offset_elems,
                packed_end: p.packed_offset_elems + p.shard_elems,
                live_elems: p.elems,
                gradient: index as u64,
            })
            .collect()
    }

    /// Share of the packed shards that is padding, in `0.0..1.0`.
    pub fn padding_share(&self) -> f64 {
        let stored: u64 = self.parameters.iter().map(|p| p.shard_elems * self.rank_count).sum();
        let live: u64 = self.parameters.iter().map(|p| p.elems).sum();
        if stored == 0 { 0.0 } else { 1.0 - live as f64 / stored as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(shapes: &[&[u64]]) -> Group {
        let parameters =
            shapes.iter().enumerate().map(|(i, s)| Parameter::new(format!("p{i}"), *s, Dtype::Bf16).unwrap());
        Group::new(parameters.collect()).unwrap()
    }

    #[test]
    fn landing_offsets_follow_equation_2() {
        let layout = GroupLayout::new(&group(&[&[4, 3], &[9, 2]]), 4).unwrap();
        let [a, b] = layout.parameters() else { panic!() };
        assert_eq!((a.shard_rows, a.shard_bytes, b.shard_rows, b.shard_bytes), (1, 6, 3, 12));
        assert_eq!(layout.landing_offset_bytes(1, 3), 6 * 4 + 3 * 12);
        assert_eq!(layout.landing_bytes(), 4 * 18);
        assert_eq!(b.rows_of(2), 6..9);
        assert_eq!(b.rows_of(3), 9..9);
    }

    /// T13: offsets beyond 2^31 and 2^32 elements.
    #[test]
    fn t13_large_offsets_stay_exact() {
        let layout = GroupLayout::new(&group(&[&[70_000, 40_000]]), 64).unwrap();
        let p = &layout.parameters()[0];
        assert_eq!(p.shard_rows, 1094);
        assert_eq!(p.rows_of(63), 68_922..70_000);
        assert_eq!(63 * p.shard_elems, 2_756_880_000);
        assert_eq!(layout.landing_offset_bytes(0, 63), 5_513_760_000);
        assert_eq!(layout.landing_offset_bytes(0, 63) + p.live_elems_of(63) * 2, 5_600_000_000);
    }

    /// T09, T10: what cannot be laid out is refused by name.
    #[test]
    fn t09_t10_refusals_name_the_parameter() {
        let scalar = Parameter::new("scale", [], Dtype::F32).unwrap_err();
        assert_eq!(scalar.to_string(), "0-dim parameter `scale`: reshape to [1]");
        let shard1 = Parameter::with_shard_dim("e", [3, 7], Dtype::Bf16, 1, 4).unwrap_err();
        assert!(shard1.to_string().contains("`e` is sharded on dim 1 of [3, 7]"), "{shard1}");
        assert!(shard1.to_string().contains("do not divide"), "{shard1}");
    }

    /// T46: mixed item sizes keep every landing naturally aligned.
    #[test]
    fn t46_mixed_dtypes_keep_natural_alignment() {
        let dtypes = [Dtype::U8, Dtype::F32, Dtype::U8, Dtype::F64, Dtype::Bf16];
        let parameters = dtypes.iter().enumerate().map(|(i, d)| Parameter::new(format!("p{i}"), [7, 3], *d).unwrap());
        let layout = GroupLayout::new(&Group::new(parameters.collect()).unwrap(), 3).unwrap();
        for (i, dtype) in dtypes.iter().enumerate() {
            for rank in 0..3 {
                assert_eq!(layout.landing_offset_bytes(i, rank) % dtype.bytes(), 0, "p{i} rank {rank}");
            }
        }
    }

    #[test]
    fn overflow_is_an_error_and_not_a_wrap() {
        let huge = group(&[&[u64::MAX / 2, 4]]);
        assert!(matches!(GroupLayout::new(&huge, 8), Err(LayoutError::TooLarge { .. })));
    }

    #[test]
    fn signature_sees_order_names_shapes_and_types() {
        let (ab, ba) = (group(&[&[4, 2], &[2, 4]]), group(&[&[2, 4], &[4, 2]]));
        assert_ne!(ab.signature(), ba.signature());
        assert_eq!(ab.signature(), group(&[&[4, 2], &[2, 4]]).signature());
    }
}

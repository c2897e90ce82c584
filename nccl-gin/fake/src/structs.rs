//! NCCL's versioned structs, as this stand-in reads and writes them: numbers of its own, from the headers, so that they check those of
//! the bindings.

use crate::state::{INVALID_ARGUMENT, INVALID_USAGE, refuse};
use std::ffi::{c_int, c_void};

const MAGIC: u32 = 0xcafe_beef;

/// Version from which on, and size.
type Sizes = &'static [(u32, u64)];

const CONFIG: Sizes = &[(22800, 80), (22907, 88), (23003, 96), (23102, 112), (23203, 120)];
const REQUIREMENTS: Sizes = &[(22907, 88), (23003, 96), (23102, 120)];
const PROPERTIES: Sizes = &[(22907, 56), (23102, 144), (23203, 152)];

/// A struct of the caller's.
pub struct Foreign {
    base: *mut u8,
    pub version: u32,
}

impl Foreign {
    /// Checks size, magic and version.
    fn open(pointer: *mut c_void, what: &str, sizes: Sizes, loaded: u32) -> Result<Self, c_int> {
        if pointer.is_null() {
            return Err(refuse(INVALID_ARGUMENT, format!("{what} is null")));
        }
        let mut foreign = Self { base: pointer.cast(), version: 0 };
        let (size, magic, version) = (foreign.read::<u64>(0), foreign.read::<u32>(8), foreign.read::<u32>(12));
        let expected = sizes.iter().rev().find(|(since, _)| *since <= version).map(|(_, size)| *size);
        if magic != MAGIC || version > loaded || expected != Some(size) {
            let why = format!("{what}: size {size}, magic {magic:#x}, version {version} for {loaded}");
            return Err(refuse(INVALID_USAGE, why));
        }
        foreign.version = version;
        Ok(foreign)
    }

    pub fn config(pointer: *mut c_void, loaded: u32) -> Result<Self, c_int> {
        Self::open(pointer, "ncclConfig_t", CONFIG, loaded)
    }

    pub fn requirements(pointer: *const c_void, loaded: u32) -> Result<Self, c_int> {
        Self::open(pointer.cast_mut(), "ncclDevCommRequirements", REQUIREMENTS, loaded)
    }

    pub fn properties(pointer: *mut c_void, loaded: u32) -> Result<Self, c_int> {
        Self::open(pointer, "ncclCommProperties", PROPERTIES, loaded)
    }

    /// A device communicator of 2.32.3: 248 bytes, zeroed.
    pub fn device_comm(pointer: *mut c_void, version: u32) -> Self {
        let foreign = Self { base: pointer.cast(), version };
        // SAFETY: the caller has room for the struct of the version that it asked for.
        unsafe { foreign.base.write_bytes(0, 248) };
        foreign.write(0, MAGIC);
        foreign.write(4, version);
        foreign
    }

    /// A field of the struct. The caller of this stays within the size that `open` checked.
    pub fn read<T: Copy>(&self, offset: usize) -> T {
        // SAFETY: within the struct, whose size its owner states, and plain data.
        unsafe { self.base.add(offset).cast::<T>().read_unaligned() }
    }

    pub fn write<T: Copy>(&self, offset: usize, value: T) {
        // SAFETY: as `read`; the owner gave the struct to be written.
        unsafe { self.base.add(offset).cast::<T>().write_unaligned(value) }
    }

    /// An `int` that may be left undefined.
    pub fn int_or(&self, offset: usize, default: c_int) -> c_int {
        let value = self.read(offset);
        if value == c_int::MIN { default } else { value }
    }
}

//! NCCL's C functions as they are declared, in the groups in which they are looked up.
//!
//! Types keep their C names, so that a signature here reads as the header's; `tests/real_library.rs` has a C++ compiler compare them.
//! Structs that change between versions are opaque here: [`Layout`](super::Layout) knows them.

#![allow(non_camel_case_types, non_snake_case)]

use std::ffi::{c_char, c_int, c_uint, c_void};

/// An error code.
pub type ncclResult_t = c_int;
/// An element type.
pub type ncclDataType_t = c_int;
/// A reduction.
pub type ncclRedOp_t = c_int;
/// A communicator.
pub type ncclComm_t = *mut ncclComm;
/// A window: the address of its description in device memory.
pub type ncclWindow_t = *mut ncclWindow_vidmem;
/// A stream.
pub type cudaStream_t = *mut CUstream_st;

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name {
            _opaque: [u8; 0],
        }
    )*};
}

opaque! {
    /// What an `ncclComm_t` points to.
    ncclComm,
    /// What an `ncclWindow_t` points to.
    ncclWindow_vidmem,
    /// What a `cudaStream_t` points to.
    CUstream_st,
    /// A communicator's configuration; its layout depends on the version.
    ncclConfig_t,
    /// A communicator's properties; their layout depends on the version.
    ncclCommProperties_t,
    /// What a device communicator is to have; its layout depends on the version.
    ncclDevCommRequirements_t,
    /// A device communicator; its layout depends on the version.
    ncclDevComm_t,
}

/// What the ranks of a communicator find each other by.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ncclUniqueId {
    /// Opaque.
    pub internal: [u8; 128],
}

/// Which signals to wait for.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ncclWaitSignalDesc_t {
    /// How many, beyond those that were waited for before; at least one.
    pub opCnt: c_int,
    /// From which rank.
    pub peer: c_int,
    /// On which index.
    pub sigIdx: c_int,
    /// In which context.
    pub ctx: c_int,
}

/// A function as it is declared here, for checks against a header.
#[derive(Debug, Clone, Copy)]
pub struct Declaration {
    /// Its name.
    pub name: &'static str,
    /// Its parameters' types, in Rust.
    pub parameters: &'static [&'static str],
    /// Its result's type, in Rust.
    pub result: &'static str,
}

macro_rules! functions {
    ($(#[$doc:meta])* $group:ident {
        $($(#[$fn_doc:meta])* fn $name:ident($($parameter:ty),*) -> $result:ty;)*
    }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $group {
            $($(#[$fn_doc])* pub $name: unsafe extern "C" fn($($parameter),*) -> $result,)*
        }

        impl $group {
            /// The functions of this group.
            pub const DECLARATIONS: &'static [Declaration] = &[$(Declaration {
                name: stringify!($name),
                parameters: &[$(stringify!($parameter)),*],
                result: stringify!($result),
            }),*];

            /// Looks all of them up; gives the first that is missing.
            pub(crate) fn load(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {$(
                    $name: {
                        // SAFETY: NCCL declares the function so in all versions that this crate accepts for the group.
                        let found = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *found.map_err(|_| stringify!($name))?
                    },
                )*})
            }
        }
    };
}

functions! {
    /// Initialisation, errors, groups and collectives.
    Core {
        /// The library's version.
        fn ncclGetVersion(*mut c_int) -> ncclResult_t;
        /// A name for a new communicator.
        fn ncclGetUniqueId(*mut ncclUniqueId) -> ncclResult_t;
        /// An error code in words.
        fn ncclGetErrorString(ncclResult_t) -> *const c_char;
        /// The last error's details.
        fn ncclGetLastError(ncclComm_t) -> *const c_char;
        /// Joins a communicator.
        fn ncclCommInitRankConfig(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> ncclResult_t;
        /// Divides a communicator.
        fn ncclCommSplit(ncclComm_t, c_int, c_int, *mut ncclComm_t, *mut ncclConfig_t) -> ncclResult_t;
        /// Flushes a communicator before its end.
        fn ncclCommFinalize(ncclComm_t) -> ncclResult_t;
        /// Frees a communicator.
        fn ncclCommDestroy(ncclComm_t) -> ncclResult_t;
        /// Frees a communicator, whatever it does.
        fn ncclCommAbort(ncclComm_t) -> ncclResult_t;
        /// How a communicator fares.
        fn ncclCommGetAsyncError(ncclComm_t, *mut ncclResult_t) -> ncclResult_t;
        /// How many ranks a communicator has.
        fn ncclCommCount(ncclComm_t, *mut c_int) -> ncclResult_t;
        /// Which of them this is.
        fn ncclCommUserRank(ncclComm_t, *mut c_int) -> ncclResult_t;
        /// Gathers calls.
        fn ncclGroupStart() -> ncclResult_t;
        /// Issues what was gathered.
        fn ncclGroupEnd() -> ncclResult_t;
        /// Every rank gets every rank's data.
        fn ncclAllGather(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, cudaStream_t) -> ncclResult_t;
        /// Every rank gets its part of the reduced data.
        fn ncclReduceScatter(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) -> ncclResult_t;
    }
}

functions! {
    /// Memory that can be registered, and its registration.
    Windows {
        /// Allocates device memory.
        fn ncclMemAlloc(*mut *mut c_void, usize) -> ncclResult_t;
        /// Frees it.
        fn ncclMemFree(*mut c_void) -> ncclResult_t;
        /// Registers it.
        fn ncclCommWindowRegister(ncclComm_t, *mut c_void, usize, *mut ncclWindow_t, c_int) -> ncclResult_t;
        /// Ends a registration.
        fn ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) -> ncclResult_t;
    }
}

functions! {
    /// Addresses of other ranks' windows.
    Pointers {
        /// By rank within the group of ranks that reach each other by loads and stores.
        fn ncclGetLsaDevicePointer(ncclWindow_t, usize, c_int, *mut *mut c_void) -> ncclResult_t;
        /// The multicast address of that group.
        fn ncclGetLsaMultimemDevicePointer(ncclWindow_t, usize, *mut *mut c_void) -> ncclResult_t;
        /// By rank within the communicator.
        fn ncclGetPeerDevicePointer(ncclWindow_t, usize, c_int, *mut *mut c_void) -> ncclResult_t;
    }
}

functions! {
    /// What a communicator can do.
    Inquiry {
        /// All of it.
        fn ncclCommQueryProperties(ncclComm_t, *mut ncclCommProperties_t) -> ncclResult_t;
    }
}

functions! {
    /// One-sided operations that the host enqueues.
    HostRma {
        /// Writes to a peer's window, then signals.
        fn ncclPutSignal(*const c_void, usize, ncclDataType_t, c_int, ncclWindow_t, usize, c_int, c_int, c_uint, ncclComm_t, cudaStream_t) -> ncclResult_t;
        /// Signals.
        fn ncclSignal(c_int, c_int, c_int, c_uint, ncclComm_t, cudaStream_t) -> ncclResult_t;
        /// Waits for signals.
        fn ncclWaitSignal(c_int, *mut ncclWaitSignalDesc_t, ncclComm_t, cudaStream_t) -> ncclResult_t;
    }
}

functions! {
    /// Device communicators.
    Devices {
        /// Creates one.
        fn ncclDevCommCreate(ncclComm_t, *const ncclDevCommRequirements_t, *mut ncclDevComm_t) -> ncclResult_t;
        /// Destroys it.
        fn ncclDevCommDestroy(ncclComm_t, *const ncclDevComm_t) -> ncclResult_t;
    }
}

/// All functions that this crate calls.
pub fn declarations() -> impl Iterator<Item = Declaration> {
    [
        Core::DECLARATIONS,
        Windows::DECLARATIONS,
        Pointers::DECLARATIONS,
        Inquiry::DECLARATIONS,
        HostRma::DECLARATIONS,
        Devices::DECLARATIONS,
    ]
    .into_iter()
    .flatten()
    .copied()
}

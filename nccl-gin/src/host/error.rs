//! What can go wrong, each as one sentence.

use super::version::Version;
use std::fmt;
use std::time::Duration;

/// What a call of this crate gives.
pub type Result<T, E = NcclError> = std::result::Result<T, E>;

/// `ncclResult_t`, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ResultCode(pub i32);

impl ResultCode {
    /// It worked, or was enqueued.
    pub const SUCCESS: Self = Self(0);
    /// A call to CUDA failed.
    pub const UNHANDLED_CUDA_ERROR: Self = Self(1);
    /// A call to the system failed.
    pub const SYSTEM_ERROR: Self = Self(2);
    /// NCCL's own fault, or memory that was overwritten.
    pub const INTERNAL_ERROR: Self = Self(3);
    /// An argument is not valid.
    pub const INVALID_ARGUMENT: Self = Self(4);
    /// The call is not valid here.
    pub const INVALID_USAGE: Self = Self(5);
    /// A peer or the network failed.
    pub const REMOTE_ERROR: Self = Self(6);
    /// A non-blocking communicator is still at it.
    pub const IN_PROGRESS: Self = Self(7);
    /// A timed wait ended without what it waited for.
    pub const TIMEOUT: Self = Self(8);

    /// Its name in NCCL's header.
    pub const fn name(self) -> &'static str {
        match self.0 {
            0 => "ncclSuccess",
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            8 => "ncclTimeout",
            _ => "unknown result",
        }
    }
}

impl fmt::Display for ResultCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

/// Why a call of this crate failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// No library could be loaded.
    #[error("NCCL cannot be loaded: {reason}")]
    Load {
        /// What was tried, and what the loader said.
        reason: String,
    },
    /// A library lacks a call that its users need.
    #[error("{path} (NCCL {found}) lacks the symbol {symbol}; {what} needs NCCL {needed} or later")]
    MissingSymbol {
        /// The C function.
        symbol: &'static str,
        /// The library.
        path: String,
        /// The version that it states.
        found: Version,
        /// The version that has what is lacking, with its known faults mended.
        needed: Version,
        /// What needs it.
        what: &'static str,
    },
    /// A library is older than what is asked of it.
    #[error("{path} is NCCL {found}; {what} needs NCCL {needed} or later")]
    TooOld {
        /// The library.
        path: String,
        /// The version that it states.
        found: Version,
        /// The oldest version that will do.
        needed: Version,
        /// What needs it.
        what: &'static str,
    },
    /// NCCL refused a call or failed in it.
    #[error("{call} failed with {code}{}{}", said(.last_error), said(.hint))]
    Call {
        /// The C function.
        call: &'static str,
        /// What it returned, or what `ncclCommGetAsyncError` reported of it.
        code: ResultCode,
        /// `ncclGetLastError`; empty if it says nothing.
        last_error: String,
        /// What helps in most cases; empty if nothing is known.
        hint: &'static str,
    },
    /// `ncclCommWindowRegister` gave success and no window.
    #[error("NCCL registered no window: {reason}")]
    NullWindow {
        /// The likely cause.
        reason: String,
    },
    /// What needs other ranks did not come about in time. The communicator is aborted.
    #[error("{call} did not complete within {} ms; the communicator was aborted", .waited.as_millis())]
    Timeout {
        /// The C function.
        call: &'static str,
        /// How long was waited.
        waited: Duration,
    },
    /// The communicator was aborted: after a timeout, by a failure during its initialisation, or by the caller.
    #[error("the communicator was aborted: {reason}")]
    Aborted {
        /// Why.
        reason: String,
    },
    /// The communicator cannot do what is asked.
    #[error("{what} is not supported by this communicator: {reason}")]
    Unsupported {
        /// What was asked.
        what: &'static str,
        /// What is lacking.
        reason: String,
    },
    /// The caller's fault; NCCL was not called.
    #[error("{0}")]
    Usage(String),
}

/// A further clause, if there is one.
fn said(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {}", text.trim_end()) }
}

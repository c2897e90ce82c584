//! What goes wrong, with the code that NCCL is given.

use crate::abi::{Code, INTERNAL_ERROR, INVALID_ARGUMENT, SYSTEM_ERROR, UNHANDLED_CUDA_ERROR};
use std::fmt;

/// A failed call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// What NCCL is given.
    pub code: Code,
    /// What the log is given.
    pub text: String,
}

/// Of anything here that can fail.
pub type Result<T> = std::result::Result<T, Fault>;

impl Fault {
    /// The CUDA driver failed.
    pub fn cuda(text: impl Into<String>) -> Self {
        Self { code: UNHANDLED_CUDA_ERROR, text: text.into() }
    }

    /// A peer or the machine failed.
    pub fn system(text: impl Into<String>) -> Self {
        Self { code: SYSTEM_ERROR, text: text.into() }
    }

    /// The caller gave something that cannot be.
    pub fn argument(text: impl Into<String>) -> Self {
        Self { code: INVALID_ARGUMENT, text: text.into() }
    }

    /// This plugin is wrong.
    pub fn internal(text: impl Into<String>) -> Self {
        Self { code: INTERNAL_ERROR, text: text.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

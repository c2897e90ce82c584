//! What can go wrong, and the exit status that each kind has.

use tide_gpu::error::TideError;
use tide_gpu::layout::LayoutError;
use tide_gpu::plan::PlanError;

/// The output was not what it should be.
pub const WRONG_DATA: u8 = 1;
/// The command line or its files cannot be used.
pub const BAD_USAGE: u8 = 2;
/// Sound, but not on this machine or in this build.
pub const UNSUPPORTED: u8 = 3;
/// The collectives stopped themselves.
pub const FAIL_STOP: u8 = 4;

/// A refusal of this program, rather than of the library.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// An option, a file or a tensor that cannot be used.
    #[error("{0}")]
    Usage(String),
    /// What this machine does not have.
    #[error("{0}")]
    Unsupported(String),
    /// A process that this one has started.
    #[error("a rank has ended with status {0}")]
    Child(u8),
}

/// A [`Failure::Usage`] as an error.
pub fn usage(sentence: impl Into<String>) -> anyhow::Error {
    Failure::Usage(sentence.into()).into()
}

/// A [`Failure::Unsupported`] as an error.
pub fn unsupported(sentence: impl Into<String>) -> anyhow::Error {
    Failure::Unsupported(sentence.into()).into()
}

/// A [`Failure::Child`] as an error.
pub fn child_failed(status: u8) -> anyhow::Error {
    Failure::Child(status).into()
}

/// The exit status of an error: that of the first cause that has one, else bad usage (a file that
/// cannot be read or written).
pub fn exit_status(error: &anyhow::Error) -> u8 {
    error.chain().find_map(status_of).unwrap_or(BAD_USAGE)
}

fn status_of(cause: &(dyn std::error::Error + 'static)) -> Option<u8> {
    if let Some(failure) = cause.downcast_ref::<Failure>() {
        return Some(match failure {
            Failure::Usage(_) => BAD_USAGE,
            Failure::Unsupported(_) => UNSUPPORTED,
            Failure::Child(status) => *status,
        });
    }
    if let Some(error) = cause.downcast_ref::<TideError>() {
        return Some(match error {
            TideError::Unsupported { .. } => UNSUPPORTED,
            TideError::FailStop(_)
            | TideError::HeldUp { .. }
            | TideError::Poisoned { .. }
            | TideError::Driver { .. }
            | TideError::Rendezvous { .. } => FAIL_STOP,
            _ => BAD_USAGE,
        });
    }
    (cause.is::<LayoutError>() || cause.is::<PlanError>()).then_some(BAD_USAGE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn every_kind_of_failure_has_its_exit_status() {
        assert_eq!(exit_status(&usage("x")), BAD_USAGE);
        assert_eq!(exit_status(&unsupported("x")), UNSUPPORTED);
        assert_eq!(exit_status(&TideError::usage("x").into()), BAD_USAGE);
        let poisoned = TideError::Poisoned { first: "x".into() };
        assert_eq!(exit_status(&anyhow::Error::from(poisoned)), FAIL_STOP);
        let held_up = TideError::HeldUp { by: "x".into() };
        assert_eq!(exit_status(&anyhow::Error::from(held_up)), FAIL_STOP);
        let missing = TideError::Unsupported { needed: "a".into(), found: "b".into() };
        assert_eq!(exit_status(&anyhow::Error::from(missing)), UNSUPPORTED);
        assert_eq!(exit_status(&LayoutError::NoRanks.into()), BAD_USAGE);
        assert_eq!(exit_status(&PlanError::RoundWidth.into()), BAD_USAGE);
    }

    #[test]
    fn context_does_not_hide_the_status() {
        let error = Err::<(), _>(unsupported("x")).context("while y").unwrap_err();
        assert_eq!(exit_status(&error), UNSUPPORTED);
    }
}

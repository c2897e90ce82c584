//! The one error type of the library.

use crate::layout::LayoutError;
use crate::monitor::Fault;
use crate::plan::PlanError;

/// Everything that a call of this library can fail with.
///
/// `Usage`, `Layout`, `Plan`, `Unsupported` and `Disagreement` come before anything is enqueued;
/// nothing was written when they are returned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TideError {
    /// The caller passed arguments that contradict each other or the contract of the call.
    #[error("{0}")]
    Usage(String),
    /// A parameter or a group of parameters cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// No plan exists for the request.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The request is sound, but not on this machine or in this build.
    #[error("unsupported here: needs {needed}, found {found}")]
    Unsupported {
        /// What the request needs.
        needed: String,
        /// What is there instead.
        found: String,
    },
    /// Ranks that must agree do not.
    #[error("ranks disagree on {what}: {ranks}")]
    Disagreement {
        /// The fact they disagree on.
        what: String,
        /// Which ranks hold which value, in one phrase.
        ranks: String,
    },
    /// Processes did not find each other, or lost each other, or what one of them sent is not what the others wait for.
    ///
    /// The same exchange takes no more calls.
    #[error("rendezvous: {detail}")]
    Rendezvous {
        /// Which rank, at which address or in which call, and what of it.
        detail: String,
    },
    /// A process of this machine could not be started or watched.
    #[error("launch: {detail}")]
    Launch {
        /// The program or the call, and what the operating system says of it.
        detail: String,
    },
    /// A call into the device driver, or an operation of the simulated device, failed.
    #[error("{call}: {detail}")]
    Driver {
        /// The operation that failed.
        call: String,
        /// What the driver says of it.
        detail: String,
    },
    /// A wait passed its deadline; the communicator is poisoned.
    #[error("{0}")]
    FailStop(Box<Fault>),
    /// A stream of the communicator does not go on, and none of the communicator's own waits says why; the communicator is
    /// poisoned.
    #[error("the communicator is held up by {by}")]
    HeldUp {
        /// What is known of the cause.
        by: String,
    },
    /// The communicator failed earlier and takes no more calls.
    #[error("the communicator is poisoned since: {first}")]
    Poisoned {
        /// The sentence of the first failure.
        first: String,
    },
}

impl TideError {
    /// A [`TideError::Usage`] from anything printable.
    pub fn usage(text: impl Into<String>) -> Self {
        Self::Usage(text.into())
    }

    /// A [`TideError::Rendezvous`] from anything printable.
    pub fn rendezvous(detail: impl Into<String>) -> Self {
        Self::Rendezvous { detail: detail.into() }
    }
}

/// The result of every fallible call of this library.
pub type Result<T, E = TideError> = std::result::Result<T, E>;

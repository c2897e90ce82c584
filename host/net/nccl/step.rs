//! Steps that all ranks take: every driven rank in a thread of its own, and all processes go on or none.

use super::Driven;
use crate::error::{Result, TideError};
use crate::gpu::Gpu;
use crate::launch::Exchange;
use crate::plan::Rank;
use nccl_gin::host::{NcclError, ResultCode};

/// Why a rank's part of a step has failed.
#[derive(Debug)]
pub(super) struct Failure {
    error: TideError,
    /// The rank has waited for another that did not come, so that the cause may lie there.
    has_waited: bool,
}

impl From<TideError> for Failure {
    fn from(error: TideError) -> Self {
        Self { error, has_waited: false }
    }
}

impl From<NcclError> for Failure {
    fn from(error: NcclError) -> Self {
        let has_waited = matches!(
            &error,
            NcclError::Timeout { .. }
                | NcclError::Aborted { .. }
                | NcclError::Call { code: ResultCode::REMOTE_ERROR, .. }
        );
        Self { error: error.into(), has_waited }
    }
}

/// What the driven ranks have of a step: all of them, or some and why not the others.
pub(super) struct Parts<T> {
    held: Vec<(Rank, T)>,
    failure: Option<Failure>,
}

/// Makes a collective call for every driven rank, each in a thread of its own with its device current: the calls wait for
/// each other.
pub(super) fn each_rank<T: Send, E: Into<Failure>>(
    gpu: &dyn Gpu,
    driven: &Driven,
    call: impl Fn(Rank) -> Result<T, E> + Sync,
) -> Parts<T> {
    let run = |rank: Rank| -> Result<T, Failure> {
        gpu.enter(driven.devices[driven.ranks.index(rank)])?;
        call(rank).map_err(Into::into)
    };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = driven.ranks.iter().map(|rank| scope.spawn(move || (rank, run(rank)))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let mut parts = Parts { held: Vec::new(), failure: None::<Failure> };
    for (rank, outcome) in outcomes {
        match outcome {
            Ok(value) => parts.held.push((rank, value)),
            Err(failure) if parts.failure.as_ref().is_none_or(|first| first.has_waited && !failure.has_waited) => {
                parts.failure = Some(failure);
            }
            Err(_) => {}
        }
    }
    parts
}

/// Runs `end` on what driven ranks hold, each in a thread of its own with its device current: the end of a communicator waits
/// for its other ranks.
pub(super) fn end_each_rank<T: Send>(
    gpu: &dyn Gpu,
    driven: &Driven,
    held: impl IntoIterator<Item = (Rank, T)>,
    end: impl Fn(Rank, T) + Sync,
) {
    std::thread::scope(|scope| {
        for (rank, held) in held {
            let end = &end;
            scope.spawn(move || {
                if let Err(error) = gpu.enter(driven.devices[driven.ranks.index(rank)]) {
                    tracing::warn!(%error, "NCCL's state is given back without its device");
                }
                end(rank, held);
            });
        }
    });
}

/// Concludes a step: what every driven rank holds, if all ranks of all processes do. Otherwise `give_up` ends what is held here;
/// it is not to wait for other ranks, which may hold nothing.
pub(super) fn conclude<T: Send>(
    gpu: &dyn Gpu,
    driven: &Driven,
    exchange: &mut dyn Exchange,
    step: &str,
    parts: Parts<T>,
    give_up: impl Fn(Rank, T) + Sync,
) -> Result<Vec<T>> {
    match tell(exchange, step, parts.failure) {
        Ok(()) => Ok(parts.held.into_iter().map(|(_, value)| value).collect()),
        Err(error) => {
            end_each_rank(gpu, driven, parts.held, give_up);
            Err(error)
        }
    }
}

/// As [`conclude`], of a step whose outcome is local: it is dropped where the step has failed elsewhere.
pub(super) fn together<T>(exchange: &mut dyn Exchange, step: &str, outcome: Result<T>) -> Result<T> {
    let (value, failure) = match outcome {
        Ok(value) => (Some(value), None),
        Err(error) => (None, Some(error.into())),
    };
    tell(exchange, step, failure)?;
    Ok(value.expect("a step without a failure has an outcome"))
}

/// The first byte of what a process says of a step that has failed there; the sentence follows. Of one that went well it says
/// nothing.
const FAILED: u8 = b'F';
/// Likewise, where it has waited for another rank.
const WAITED: u8 = b'W';

/// Tells all processes how a step went here: it has gone well only if it has everywhere.
///
/// The cause goes before what it brings about: who has only waited for a rank that has failed gets that rank's sentence.
fn tell(exchange: &mut dyn Exchange, step: &str, own: Option<Failure>) -> Result<()> {
    tracing::info!(step, failed = own.is_some(), "here");
    let said = own.as_ref().map_or(Vec::new(), |failure| {
        let kind = if failure.has_waited { WAITED } else { FAILED };
        [&[kind], failure.error.to_string().as_bytes()].concat()
    });
    let all = match (exchange.all_gather(step, &said), &own) {
        (Ok(all), _) => all,
        (Err(TideError::Rendezvous { detail }), Some(own)) => {
            return Err(TideError::Rendezvous { detail: format!("{detail}; {step} has failed here: {}", own.error) });
        }
        (Err(error), _) => return Err(error),
    };
    let of_kind = |kind: u8| {
        let (process, said) = all.iter().enumerate().find(|(_, said)| said.first() == Some(&kind))?;
        let sentence = String::from_utf8_lossy(&said[1..]);
        Some(TideError::Rendezvous { detail: format!("{step}: process {process} has failed: {sentence}") })
    };
    match own {
        Some(own) if !own.has_waited => Err(own.error),
        Some(own) => Err(of_kind(FAILED).unwrap_or(own.error)),
        None => match of_kind(FAILED).or_else(|| of_kind(WAITED)) {
            Some(error) => Err(error),
            None => {
                tracing::info!(step, "everywhere");
                Ok(())
            }
        },
    }
}

//! What the tests against the stand-in for NCCL share.

mod stand_in;

pub use stand_in::Fake;

use nccl_gin::host::{Comm, Config, Library, UniqueId};
use std::time::Duration;

/// A configuration whose waits end soon.
pub fn quick() -> Config {
    Config { timeout: Duration::from_millis(200), ..Config::default() }
}

/// Runs `run` in a thread for each rank.
pub fn on_ranks<T: Send>(rank_count: u32, run: impl Fn(u32) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..rank_count).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `run` in a thread for each rank of a communicator.
pub fn on_comms<T: Send>(
    library: &Library,
    rank_count: u32,
    config: &Config,
    run: impl Fn(Comm) -> T + Sync,
) -> Vec<T> {
    let id = UniqueId::new(library).unwrap();
    on_ranks(rank_count, |rank| run(Comm::init_rank(library, id, rank_count, rank, config).unwrap()))
}

//! How the processes of a job find each other.
//!
//! [`Placement::detect`] reads from the environment which rank this process is, as torchrun, srun, mpirun or `--spawn` set it.
//! [`Rendezvous::join`] connects all ranks through rank 0 by TCP. From then on they talk by [`Exchange`]: every rank brings
//! some bytes and gets everybody's. [`agree`] makes all ranks stop with the same sentence where they hold different facts.
//! [`spawn::spawn`] starts a process for each local rank where no launcher did.
//!
//! ```
//! use std::time::Duration;
//! use tide_gpu::launch::{Alone, Exchange, Facts, Placement, Rendezvous, RendezvousOptions, agree};
//!
//! # fn main() -> tide_gpu::Result<()> {
//! let env = |name: &str| std::env::var(name).ok();
//! # let env = |_: &str| None::<String>;
//! let mut exchange: Box<dyn Exchange> = match Placement::detect(&env)? {
//!     None => Box::new(Alone),
//!     Some(placement) => {
//!         let options = RendezvousOptions::new(&placement, &env, Duration::from_secs(60))?;
//!         let mut rendezvous = Rendezvous::join(&options)?;
//!         placement.agree(&mut rendezvous)?;
//!         Box::new(rendezvous)
//!     }
//! };
//! agree(&mut *exchange, "versions", &Facts::new().with("tide-gpu", env!("CARGO_PKG_VERSION")))?;
//! let names = exchange.all_gather("names", b"node7")?;
//! assert_eq!(names.len() as u32, exchange.rank_count());
//! # Ok(())
//! # }
//! ```

mod agreement;
mod exchange;
mod launcher;
mod phrase;
mod rendezvous;
#[cfg(unix)]
pub mod spawn;
mod token;

pub use agreement::{Facts, agree, compare};
pub use exchange::{Alone, Exchange};
pub use launcher::{Environment, Launcher, Placement};
pub use rendezvous::{GATHERED_BYTES_MAX, LABEL_BYTES_MAX, MESSAGE_BYTES_MAX, Rendezvous, RendezvousOptions};
pub use token::Token;

//! What moves bytes, behind the rules of when they may move.

use crate::fault::Result;
use crate::world::World;

/// Which memory an address is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// The host's; it may be pageable.
    Host,
    /// The GPU's.
    Device,
}

/// An address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The address.
    pub address: usize,
    /// Where it is.
    pub space: Space,
}

/// A lane on which one context moves its bytes.
///
/// Whatever is started on a lane may be carried out in any order and at any time until [`Mover::poll`] says that it is done.
/// Everything but [`Mover::open`] and dropping is called while kernels wait for the outcome: it may not wait for the GPU.
pub trait Mover: Send + Sized + 'static {
    /// Something under way.
    type Ticket: Send;

    /// What ranks of this kind share.
    fn world() -> &'static World;

    /// A new lane for a context with so many queues. At most one addition per queue is under way at a time.
    ///
    /// # Errors
    /// If the device refuses.
    fn open(queues: usize) -> Result<Self>;

    /// Starts a copy. Source and target stay valid until it is done.
    ///
    /// # Errors
    /// If the device refuses.
    fn copy(&mut self, to: Place, from: Place, bytes: usize) -> Result<Self::Ticket>;

    /// Starts adding `value` to a 64-bit word, modulo 2^64. The caller sees to it that no other addition to the word is under way.
    ///
    /// # Errors
    /// If the device refuses.
    fn add(&mut self, word: Place, value: u64) -> Result<Self::Ticket>;

    /// Whether it is done: then all that were done before it are visible to whoever sees its outcome.
    ///
    /// # Errors
    /// If it failed.
    fn poll(&mut self, ticket: &mut Self::Ticket) -> Result<bool>;
}

//! What the network's connections cost a rank, with one communicator of all ranks and with one per rail [TIDE §6.1].

use super::Topology;

/// Entries of a queue pair's send queue, and of its completion queue: GDAKI's default depth (NCCL 2.32).
const QUEUE_ENTRIES: u64 = 128;

/// Bytes of an entry of either queue.
const ENTRY_BYTES: u64 = 64;

/// The cost of one communicator's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connections {
    /// Ranks of the communicator.
    pub rank_count: u64,
    /// Queue pairs of a rank for host RMA: one to send and one to receive, to every rank, in every context.
    pub host_queue_pairs: u64,
    /// Queue pairs of a rank for GIN by GDAKI: one to every rank and one more, in every context.
    pub device_queue_pairs: u64,
    /// Steps of the ring barriers while host RMA connects: one barrier of all ranks after each connection.
    pub barrier_steps: u64,
}

impl Connections {
    /// Of a communicator of `rank_count` ranks with `context_count` contexts.
    pub const fn new(rank_count: u64, context_count: u64) -> Self {
        Self {
            rank_count,
            host_queue_pairs: 2 * context_count * rank_count,
            device_queue_pairs: context_count * (rank_count + 1),
            barrier_steps: context_count * rank_count * rank_count,
        }
    }

    /// Of one communicator of all ranks, and of a rail.
    pub fn before_and_after_split(topology: Topology, context_count: u32) -> [Self; 2] {
        let of = |ranks: u32| Self::new(ranks.into(), context_count.into());
        [of(topology.rank_count()), of(topology.node_count())]
    }

    /// Bytes that the queues of a rank take, both paths together: rings of entries alone, without NCCL's own buffers.
    pub const fn queue_bytes(&self) -> u64 {
        (self.host_queue_pairs + self.device_queue_pairs) * 2 * QUEUE_ENTRIES * ENTRY_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_saves_what_the_paper_says() {
        let topology = Topology::new(8, 8).unwrap();
        let [all, rail] = Connections::before_and_after_split(topology, 4);
        assert_eq!((all.host_queue_pairs, rail.host_queue_pairs), (512, 64));
        assert_eq!(all.host_queue_pairs / rail.host_queue_pairs, 8);
        assert_eq!(all.barrier_steps / rail.barrier_steps, 64);
        assert_eq!((all.device_queue_pairs, rail.device_queue_pairs), (260, 36));
        assert_eq!(rail.queue_bytes(), 100 * 16384);
    }
}

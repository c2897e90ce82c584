//! A block: its shared memory, the mbarriers in it, its named barriers.

use crate::arch::shared;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::vec::Vec;

/// Shared memory of one block. Out-of-bounds writes around it are found when the block ends.
pub(super) struct SharedMemory {
    base: *mut u8,
    layout: Layout,
    bytes: usize,
}

const GUARD_BYTES: usize = shared::ALIGN_BYTES as usize;
const GUARD: u8 = 0xa5;

impl SharedMemory {
    pub(super) fn new(bytes: u32) -> Self {
        let bytes = bytes as usize;
        let layout = Layout::from_size_align(bytes.next_multiple_of(GUARD_BYTES) + 2 * GUARD_BYTES, GUARD_BYTES)
            .expect("shared memory is small");
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(layout) };
        assert!(!base.is_null(), "no memory for a block's shared memory");
        // SAFETY: inside the allocation.
        unsafe {
            base.write_bytes(GUARD, GUARD_BYTES);
            base.add(GUARD_BYTES + bytes).write_bytes(GUARD, layout.size() - GUARD_BYTES - bytes);
        }
        Self { base, layout, bytes }
    }

    pub(super) fn address(&self) -> usize {
        self.base as usize + GUARD_BYTES
    }

    pub(super) fn is_valid(&self, address: usize, bytes: usize) -> bool {
        address >= self.address() && address + bytes <= self.address() + self.bytes
    }

    pub(super) fn guards_hold(&self) -> bool {
        // SAFETY: inside the allocation, which nobody writes now.
        let all = unsafe { std::slice::from_raw_parts(self.base, self.layout.size()) };
        let (before, rest) = all.split_at(GUARD_BYTES);
        before.iter().chain(&rest[self.bytes..]).all(|&b| b == GUARD)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base, self.layout) };
    }
}

/// An mbarrier as it lies in its 8 bytes of shared memory.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct MbarrierState {
    /// Arrivals of a phase.
    count: u16,
    /// Arrivals that this phase still lacks.
    pending: u16,
    /// Bytes still expected, shifted left by one; the low bit is the parity of the current phase.
    bytes_and_parity: i32,
}

const _: () = assert!(size_of::<MbarrierState>() == 8);

impl MbarrierState {
    pub(super) fn new(count: u32) -> Self {
        let count = u16::try_from(count).expect("an mbarrier counts at most a block's threads");
        Self { count, pending: count, bytes_and_parity: 0 }
    }

    pub(super) fn parity(self) -> u32 {
        (self.bytes_and_parity & 1) as u32
    }

    pub(super) fn expect(&mut self, bytes: u32) {
        self.bytes_and_parity += (bytes as i32) << 1;
    }

    /// Counts an arrival; true if it completed the phase.
    pub(super) fn arrive(&mut self) -> bool {
        assert!(self.pending > 0, "more arrivals on an mbarrier than it counts");
        self.pending -= 1;
        self.complete_if_due()
    }

    /// Counts bytes that have arrived; true if they completed the phase.
    pub(super) fn complete_bytes(&mut self, bytes: u32) -> bool {
        self.bytes_and_parity -= (bytes as i32) << 1;
        self.complete_if_due()
    }

    fn complete_if_due(&mut self) -> bool {
        let due = self.pending == 0 && self.bytes_and_parity >> 1 == 0;
        if due {
            self.pending = self.count;
            self.bytes_and_parity ^= 1;
        }
        due
    }
}

/// A block that is resident.
pub(super) struct Block {
    pub(super) launch: u64,
    pub(super) index: u32,
    pub(super) shared: SharedMemory,
    pub(super) live_threads: u32,
    /// Threads that wait for an mbarrier of this block, with their deadlines.
    pub(super) waiters: Vec<(usize, u64)>,
    /// Who has come to each named barrier.
    pub(super) barriers: [Vec<usize>; 16],
    /// Bulk copies in flight that touch the shared memory.
    pub(super) bulk_in_flight: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_completes_with_its_last_arrival_and_its_last_byte() {
        let mut barrier = MbarrierState::new(2);
        barrier.expect(32);
        assert!(!barrier.arrive());
        assert!(!barrier.complete_bytes(16));
        assert!(!barrier.arrive());
        assert_eq!(barrier.parity(), 0);
        assert!(barrier.complete_bytes(16));
        assert_eq!(barrier.parity(), 1);
    }

    #[test]
    fn guards_see_a_write_past_the_end() {
        let shared = SharedMemory::new(24);
        assert!(shared.guards_hold());
        // SAFETY: still inside the allocation, on the guard.
        unsafe { ((shared.address() + 24) as *mut u8).write(0) };
        assert!(!shared.guards_hold());
    }
}

//! What is allocated: where, how much, and what waits to be freed.

use crate::gpu::DevicePtr;
use std::collections::BTreeMap;

/// What an allocation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Memory of a device, by index.
    Device(u32),
    /// Pinned host memory, by its host address.
    Mapped(usize),
}

/// An allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// First byte, as a device sees it.
    pub base: u64,
    /// Bytes, at least one.
    pub bytes: u64,
    /// What it is.
    pub kind: Kind,
}

/// Where an address range lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In memory of a device, by index.
    Device(u32),
    /// In pinned host memory, at this host address.
    Host(usize),
    /// In no allocation of ours: somebody else's.
    Foreign,
    /// It begins in an allocation and ends past it.
    Past(Allocation),
}

/// The allocations of a process.
#[derive(Debug)]
pub struct Memory {
    live: BTreeMap<u64, Allocation>,
    dead: Vec<Allocation>,
    /// Per device: bytes now, and the most there ever were.
    usage: Vec<(u64, u64)>,
}

impl Memory {
    /// None yet, on so many devices.
    pub fn new(device_count: usize) -> Self {
        Self { live: BTreeMap::new(), dead: Vec::new(), usage: vec![(0, 0); device_count] }
    }

    /// Enters an allocation.
    pub fn insert(&mut self, allocation: Allocation) {
        if let Kind::Device(device) = allocation.kind {
            let (now, most) = &mut self.usage[device as usize];
            *now += allocation.bytes;
            *most = (*most).max(*now);
        }
        self.live.insert(allocation.base, allocation);
    }

    /// Its owner gives an allocation up; false if there is none at the address. It counts until it is freed.
    pub fn give_up(&mut self, address: DevicePtr) -> bool {
        match self.live.remove(&address.0) {
            Some(allocation) => {
                self.dead.push(allocation);
                true
            }
            None => false,
        }
    }

    /// Whether anything waits to be freed.
    pub fn has_dead(&self) -> bool {
        !self.dead.is_empty()
    }

    /// One allocation to free now.
    pub fn pop_dead(&mut self) -> Option<Allocation> {
        let allocation = self.dead.pop()?;
        if let Kind::Device(device) = allocation.kind {
            self.usage[device as usize].0 -= allocation.bytes;
        }
        Some(allocation)
    }

    /// Gives every allocation up.
    pub fn give_up_all(&mut self) {
        self.dead.extend(std::mem::take(&mut self.live).into_values());
    }

    /// Bytes of a device now, and the most there ever were.
    pub fn usage_bytes(&self, device: u32) -> (u64, u64) {
        self.usage[device as usize]
    }

    /// Where a range lies.
    pub fn place(&self, address: DevicePtr, bytes: u64) -> Place {
        let Some((_, allocation)) = self.live.range(..=address.0).next_back() else { return Place::Foreign };
        let offset = address.0 - allocation.base;
        if offset >= allocation.bytes {
            return Place::Foreign;
        }
        if bytes > allocation.bytes - offset {
            return Place::Past(*allocation);
        }
        match allocation.kind {
            Kind::Device(device) => Place::Device(device),
            Kind::Mapped(host) => Place::Host(host + offset as usize),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Memory {
        let mut memory = Memory::new(2);
        memory.insert(Allocation { base: 0x1000, bytes: 0x100, kind: Kind::Device(1) });
        memory.insert(Allocation { base: 0x2000, bytes: 0x100, kind: Kind::Mapped(0x9000) });
        memory
    }

    #[test]
    fn a_range_is_found_by_any_address_in_it() {
        let memory = memory();
        assert_eq!(memory.place(DevicePtr(0x10ff), 1), Place::Device(1));
        assert_eq!(memory.place(DevicePtr(0x2010), 0xf0), Place::Host(0x9010));
        assert_eq!(memory.place(DevicePtr(0x0fff), 1), Place::Foreign);
        assert_eq!(memory.place(DevicePtr(0x1100), 1), Place::Foreign);
        assert!(matches!(memory.place(DevicePtr(0x10ff), 2), Place::Past(a) if a.base == 0x1000));
    }

    #[test]
    fn what_is_given_up_counts_until_it_is_freed() {
        let mut memory = memory();
        assert!(memory.give_up(DevicePtr(0x1000)) && !memory.give_up(DevicePtr(0x1000)));
        assert_eq!(memory.usage_bytes(1), (0x100, 0x100));
        assert_eq!(memory.pop_dead().map(|a| a.base), Some(0x1000));
        assert_eq!(memory.usage_bytes(1), (0, 0x100));
        assert_eq!(memory.place(DevicePtr(0x1000), 1), Place::Foreign);
    }
}

//! The simulated address space: allocations, their bounds, and multicast addresses.
//!
//! A global address is an address of the host, so that a load is a load. Every access is checked against
//! the live allocations; what lies outside is a fault of the simulated device, never of the process.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::string::String;
use std::vec::Vec;

/// Alignment of every allocation, bytes; a GPU gives at least as much.
pub const ALIGN_BYTES: usize = 512;

/// Set in every multicast address and in no host address: to touch one by a plain load cannot succeed.
const MULTICAST_BIT: u64 = 1 << 63;
const MULTICAST_OFFSET_BITS: u32 = 44;

/// Allocations whose bounds are kept at hand: a kernel reads and writes a few at a time.
const RECENT: usize = 8;

struct Allocation {
    bytes: u64,
    device: u32,
    layout: Layout,
}

/// All memory of the simulated devices.
pub struct Memory {
    allocations: BTreeMap<u64, Allocation>,
    multicast: Vec<Vec<u64>>,
    multicast_bytes: Vec<u64>,
    /// Whether the replicas are known to lie in live allocations.
    multicast_checked: Vec<bool>,
    /// The bounds of the allocations that were hit last, and which of them goes next.
    recent: [Cell<(u64, u64)>; RECENT],
    next_recent: Cell<usize>,
    live_bytes: Vec<u64>,
    peak_bytes: Vec<u64>,
    poison_below_bytes: u64,
}

/// What fresh memory holds: as bf16 and as fp32 a NaN, so that a result that used it shows.
pub const POISON: u8 = 0xff;

impl Memory {
    /// No memory yet, for `device_count` devices. Allocations smaller than `poison_below_bytes` are filled with
    /// [`POISON`]; larger ones are zero, so that pages that nobody touches cost nothing.
    pub fn new(device_count: u32, poison_below_bytes: u64) -> Self {
        Self {
            allocations: BTreeMap::new(),
            multicast: Vec::new(),
            multicast_bytes: Vec::new(),
            multicast_checked: Vec::new(),
            recent: Default::default(),
            next_recent: Cell::new(0),
            live_bytes: std::vec![0; device_count as usize],
            peak_bytes: std::vec![0; device_count as usize],
            poison_below_bytes,
        }
    }

    /// Allocates `bytes` on `device`; `None` if the host has no more.
    pub fn allocate(&mut self, device: u32, bytes: u64) -> Option<u64> {
        let layout = Layout::from_size_align(usize::try_from(bytes.max(1)).ok()?, ALIGN_BYTES).ok()?;
        // SAFETY: the layout is not empty.
        let pointer = unsafe { alloc_zeroed(layout) };
        if pointer.is_null() {
            return None;
        }
        if bytes < self.poison_below_bytes {
            // SAFETY: just allocated with this size.
            unsafe { pointer.write_bytes(POISON, layout.size()) };
        }
        self.allocations.insert(pointer as u64, Allocation { bytes, device, layout });
        let live = &mut self.live_bytes[device as usize];
        *live += bytes;
        let peak = &mut self.peak_bytes[device as usize];
        *peak = (*peak).max(*live);
        Some(pointer as u64)
    }

    /// Frees what [`Memory::allocate`] gave; false if it gave no such thing.
    pub fn free(&mut self, address: u64) -> bool {
        let Some(allocation) = self.allocations.remove(&address) else { return false };
        self.recent.iter().for_each(|r| r.set((0, 0)));
        self.multicast_checked.iter_mut().for_each(|c| *c = false);
        self.live_bytes[allocation.device as usize] -= allocation.bytes;
        // SAFETY: allocated by `allocate` with this layout, and forgotten just now.
        unsafe { dealloc(address as *mut u8, allocation.layout) };
        true
    }

    /// Bytes now allocated on `device`, and the most there ever were.
    pub fn usage(&self, device: u32) -> (u64, u64) {
        (self.live_bytes[device as usize], self.peak_bytes[device as usize])
    }

    /// Whether `[address, address + bytes)` lies in one live allocation.
    #[inline]
    pub fn is_valid(&self, address: u64, bytes: u64) -> bool {
        let inside = |r: &Cell<(u64, u64)>| address >= r.get().0 && address.saturating_add(bytes) <= r.get().1;
        self.recent.iter().any(inside) || self.is_valid_slow(address, bytes)
    }

    #[cold]
    fn is_valid_slow(&self, address: u64, bytes: u64) -> bool {
        match self.allocations.range(..=address).next_back() {
            Some((&base, a)) if address.saturating_add(bytes) <= base + a.bytes => {
                let next = self.next_recent.get();
                self.recent[next].set((base, base + a.bytes));
                self.next_recent.set((next + 1) % RECENT);
                true
            }
            _ => false,
        }
    }

    /// A sentence that says where an address lies.
    pub fn describe(&self, address: u64, bytes: u64) -> String {
        match self.allocations.range(..=address).next_back() {
            Some((&base, a)) => std::format!(
                "{bytes} bytes at {address:#x}, offset {} of the {}-byte allocation on device {} at {base:#x}",
                address - base,
                a.bytes,
                a.device
            ),
            None => std::format!("{bytes} bytes at {address:#x}, before every allocation"),
        }
    }

    /// Binds `replicas`, each valid for `bytes`, behind one multicast address.
    pub fn bind_multicast(&mut self, replicas: Vec<u64>, bytes: u64) -> u64 {
        let address = MULTICAST_BIT | (self.multicast.len() as u64) << MULTICAST_OFFSET_BITS;
        self.multicast.push(replicas);
        self.multicast_bytes.push(bytes);
        self.multicast_checked.push(false);
        address
    }

    /// Whether an address is a multicast one.
    pub const fn is_multicast(address: u64) -> bool {
        address & MULTICAST_BIT != 0
    }

    /// The replicas' addresses of `bytes` behind a multicast address, or `None` if it is not valid or a replica is freed.
    pub fn replicas(&mut self, address: u64, bytes: u64) -> Option<impl Iterator<Item = u64> + '_> {
        let index = ((address & !MULTICAST_BIT) >> MULTICAST_OFFSET_BITS) as usize;
        let offset = address & ((1 << MULTICAST_OFFSET_BITS) - 1);
        let whole = *self.multicast_bytes.get(index)?;
        if !Self::is_multicast(address) || offset + bytes > whole {
            return None;
        }
        if !self.multicast_checked[index] {
            self.multicast_checked[index] = self.multicast[index].iter().all(|&base| self.is_valid(base, whole));
        }
        let live = self.multicast_checked[index];
        live.then(|| self.multicast[index].iter().map(move |base| base + offset))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for (address, allocation) in std::mem::take(&mut self.allocations) {
            // SAFETY: allocated by `allocate` with this layout.
            unsafe { dealloc(address as *mut u8, allocation.layout) };
        }
    }
}

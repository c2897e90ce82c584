//! All that crosses the launch: `repr(C)` plain data, with sizes and offsets asserted at compile time.
//!
//! Addresses are `u64` in the address space of the GPU that runs the kernel. Nothing here is atomic:
//! atomicity belongs to the operation, so that a word looks alike on a GPU and in the simulator.

pub mod fault;
pub mod kernel;
pub mod params;
pub mod segment;
pub mod signal;

/// Asserts the size of a type and the offsets of its fields at compile time.
macro_rules! assert_layout {
    ($type:ty, size $size:literal, $($field:ident at $offset:literal),+ $(,)?) => {
        const _: () = {
            assert!(core::mem::size_of::<$type>() == $size);
            $(assert!(core::mem::offset_of!($type, $field) == $offset);)+
        };
    };
}
pub(crate) use assert_layout;

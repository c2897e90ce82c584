//! Keeps the plugin loaded once it is: NCCL unloads plugins with their last communicator, while threads that have called one may
//! still have its destructors to run.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}

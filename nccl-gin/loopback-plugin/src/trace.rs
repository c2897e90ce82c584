//! `TIDE_LOOPBACK_PLUGIN_LOG=1`: each call on stderr.

use std::fmt::Arguments;
use std::sync::LazyLock;
use std::time::Instant;

static START: LazyLock<Option<Instant>> =
    LazyLock::new(|| std::env::var_os("TIDE_LOOPBACK_PLUGIN_LOG").is_some_and(|value| value != "0").then(Instant::now));

/// Whether calls are to be told.
pub fn on() -> bool {
    START.is_some()
}

/// Tells a call.
pub fn line(text: Arguments<'_>) {
    if let Some(start) = *START {
        let thread = std::thread::current();
        eprintln!("loopback-plugin {:10.6} {:?} {text}", start.elapsed().as_secs_f64(), thread.id());
    }
}

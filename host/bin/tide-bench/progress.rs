//! A progress bar, on a terminal only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How far a run is. On anything but a terminal it shows nothing.
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar on standard error.
    pub fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{msg:22} {bar:40} {pos}/{len} {elapsed}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self(bar)
    }

    /// Starts a piece of work of `step_count` steps.
    pub fn start(&self, what: String, step_count: u64) {
        self.0.set_message(what);
        self.0.set_length(step_count);
        self.0.set_position(0);
        self.0.tick();
    }

    /// One step is done.
    pub fn step(&self) {
        self.0.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

//! Waiting for any of several sockets.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

/// A socket, and what of it ends the wait.
pub(super) enum Socket<'a> {
    /// A connection to accept.
    Accept(&'a TcpListener),
    /// Bytes to read, or the end.
    Read(&'a TcpStream),
    /// That, or room to write.
    ReadWrite(&'a TcpStream),
}

/// Returns once something can be done with one of the sockets, after `timeout` (`None`: never), or, seldom, for no reason.
/// Says of each socket whether something may be done with it.
#[cfg(unix)]
pub(super) fn wait(sockets: &[Socket], timeout: Option<Duration>) -> Vec<bool> {
    use std::os::fd::AsRawFd;
    let mut entries: Vec<libc::pollfd> = sockets
        .iter()
        .map(|socket| {
            let (fd, events) = match socket {
                Socket::Accept(listener) => (listener.as_raw_fd(), libc::POLLIN),
                Socket::Read(stream) => (stream.as_raw_fd(), libc::POLLIN),
                Socket::ReadWrite(stream) => (stream.as_raw_fd(), libc::POLLIN | libc::POLLOUT),
            };
            libc::pollfd { fd, events, revents: 0 }
        })
        .collect();
    // Rounded up, so that a wait of less than 1 ms is no busy loop.
    let timeout_ms = timeout.map_or(-1, |t| t.as_micros().div_ceil(1000).try_into().unwrap_or(i32::MAX));
    // SAFETY: `entries` is a valid array of that many entries for the length of the call.
    let result = unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, timeout_ms) };
    if result < 0 {
        // Interrupted, or out of memory: the caller looks at its sockets and waits again.
        std::thread::sleep(Duration::from_millis(1));
        return vec![true; sockets.len()];
    }
    entries.iter().map(|entry| entry.revents != 0).collect()
}

/// Elsewhere: after 1 ms, whatever the sockets do.
#[cfg(not(unix))]
pub(super) fn wait(sockets: &[Socket], _timeout: Option<Duration>) -> Vec<bool> {
    std::thread::sleep(Duration::from_millis(1));
    vec![true; sockets.len()]
}

//! The client: asks, waits for a bounded time, and remembers what it saw.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::frame::Frame;

/// How long the client waits for an answer.
const TIME_OUT: Duration = Duration::from_millis(150);

/// One end of the link, and what came out of it.
pub(super) struct Client {
    socket: UnixStream,
    last_id: u64,
    saw: Vec<String>,
}

impl Client {
    /// Makes a client, and returns the link's end of the socket to it.
    pub(super) fn new() -> io::Result<(Self, UnixStream)> {
        let (socket, link_end) = UnixStream::pair()?;
        socket.set_read_timeout(Some(TIME_OUT))?;
        let client = Self { socket, last_id: 0, saw: Vec::new() };
        Ok((client, link_end))
    }

    /// Sends a request and returns its id.
    pub(super) fn ask(&mut self, text: String) -> io::Result<u64> {
        self.last_id += 1;
        Frame { id: self.last_id, text }.write(&self.socket)?;
        Ok(self.last_id)
    }

    /// Waits for the reply to request `id`, and returns whether one came in time. A reply to an earlier request is not
    /// an answer to this one: it is dropped.
    pub(super) fn is_answered(&mut self, id: u64) -> io::Result<bool> {
        loop {
            let reply = match Frame::expect(&self.socket) {
                Ok(reply) => reply,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    self.saw.push("no answer".to_owned());
                    return Ok(false);
                }
                Err(error) => return Err(error),
            };
            if reply.id == id {
                self.saw.push(reply.text);
                return Ok(true);
            }
            self.saw.push("a late reply, dropped".to_owned());
        }
    }

    /// Everything the client saw, in order.
    pub(super) fn saw(&self) -> String {
        self.saw.join("; then ")
    }
}

//! What travels over the link: length, id, text. The id ties a reply to its request.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

/// The longest text, in bytes.
const TEXT_BYTES_MAX: u32 = 4096;

/// A request or a reply.
pub(super) struct Frame {
    /// Chosen by the client, anew for each request; the reply bears that of its request.
    pub(super) id: u64,
    /// What is asked or answered.
    pub(super) text: String,
}

impl Frame {
    /// Writes the frame in one piece, so that a reader with a time-out finds the whole of it or nothing.
    pub(super) fn write(&self, mut socket: &UnixStream) -> io::Result<()> {
        let text_bytes = u32::try_from(self.text.len()).map_err(|_| too_long())?;
        let (text_bytes, id) = (text_bytes.to_le_bytes(), self.id.to_le_bytes());
        socket.write_all(&[&text_bytes, id.as_slice(), self.text.as_bytes()].concat())
    }

    /// Reads the next frame; `None` if the other side has hung up.
    pub(super) fn read(mut socket: &UnixStream) -> io::Result<Option<Self>> {
        let mut text_bytes = [0; 4];
        match socket.read_exact(&mut text_bytes) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            other => other?,
        }
        let text_bytes = u32::from_le_bytes(text_bytes);
        if text_bytes > TEXT_BYTES_MAX {
            return Err(too_long());
        }
        let mut id = [0; 8];
        socket.read_exact(&mut id)?;
        let id = u64::from_le_bytes(id);
        let mut text = String::new();
        socket.take(u64::from(text_bytes)).read_to_string(&mut text)?;
        Ok(Some(Self { id, text }))
    }

    /// As [`read`](Self::read), where the other side must not have hung up.
    pub(super) fn expect(socket: &UnixStream) -> io::Result<Self> {
        Self::read(socket)?.ok_or_else(|| io::Error::new(ErrorKind::UnexpectedEof, "the other side has hung up"))
    }
}

fn too_long() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "a frame is too long")
}

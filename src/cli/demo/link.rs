//! The link between client and service, which loses messages on cue.

use std::io;
use std::os::unix::net::UnixStream;

use super::frame::Frame;

/// What the link does to one request and its reply.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Cue {
    /// Carries both.
    Deliver,
    /// The service never hears of it.
    LoseRequest,
    /// The service does the work, and the client never hears of it.
    LoseReply,
    /// The reply arrives only just before the next one that is delivered.
    DelayReply,
    /// There is no reply, since the service is killed once it has charged.
    KillService,
}

/// Two sockets, and the replies that are still on their way.
pub(super) struct Link {
    pub(super) client: UnixStream,
    pub(super) service: UnixStream,
    pub(super) late: Vec<Frame>,
}

impl Link {
    /// Does to the next request what the cue says. On return the messages have arrived or are lost, so the client's
    /// time-out never runs while the service works: a slow disk is not taken for a lost message.
    pub(super) fn carry(&mut self, cue: Cue) -> io::Result<()> {
        let request = Frame::expect(&self.client)?;
        match cue {
            Cue::LoseRequest => {}
            Cue::KillService => request.write(&self.service)?,
            Cue::LoseReply => drop(self.reply_to(&request)?),
            Cue::DelayReply => {
                let reply = self.reply_to(&request)?;
                self.late.push(reply);
            }
            Cue::Deliver => {
                let reply = self.reply_to(&request)?;
                for reply in self.late.drain(..).chain([reply]) {
                    reply.write(&self.client)?;
                }
            }
        }
        Ok(())
    }

    fn reply_to(&self, request: &Frame) -> io::Result<Frame> {
        request.write(&self.service)?;
        Frame::expect(&self.service)
    }
}

//! The payment service, as its own process sees itself: this is the part that a service of yours would look like.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use keyonce::{Body, Completion, Fingerprint, Key, OnInterrupted, Options, Reserve, ReserveOptions, Store};

use super::Result;
use super::frame::Frame;
use super::ledger::Ledger;

/// How a payment service goes about its work.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(super) struct Habits {
    /// A payment service that ignores keys, to see the demo fail
    #[arg(long)]
    pub(super) ignore_keys: bool,
    /// Hand `downstream_key` to the provider, who honours keys
    #[arg(long, hide = true, requires = "serve")]
    pub(super) send_key_on: bool,
    /// Say `charged` on standard output after a charge, and wait to be killed
    #[arg(long, hide = true, requires = "serve")]
    pub(super) stall_after_charge: bool,
}

/// The line by which a stalling service tells that the money is gone.
pub(super) const CHARGED: &str = "charged\n";

/// Answers requests from the socket that is standard input, until the other side hangs up.
pub(super) fn serve(dir: &Path, habits: Habits) -> Result<()> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let store = Store::open(dir.join("keys"), Options::default())?;
    let mut service = Service { store, ledger: Ledger::open(dir)?, habits, socket };
    while let Some(Frame { id, text }) = Frame::read(&service.socket)? {
        let text = service.answer(&text).unwrap_or_else(|error| format!("error: {error}"));
        Frame { id, text }.write(&service.socket)?;
    }
    Ok(())
}

struct Service {
    store: Store,
    ledger: Ledger,
    habits: Habits,
    socket: UnixStream,
}

impl Service {
    /// A request is a verb, an amount, and a key, which is empty if the client has none.
    fn answer(&mut self, request: &str) -> Result<String> {
        match request.split('\t').collect::<Vec<_>>().as_slice() {
            [_, amount, key] if key.is_empty() || self.habits.ignore_keys => self.charge(amount, None),
            ["pay", amount, key] => self.pay_once(amount, key, OnInterrupted::Surface),
            ["take over", amount, key] => self.pay_once(amount, key, OnInterrupted::TakeOver),
            _ => Err("a request that nobody understands".into()),
        }
    }

    fn pay_once(&mut self, amount: &str, key: &str, on_interrupted: OnInterrupted) -> Result<String> {
        let key = Key::new("payments", key)?;
        let with = ReserveOptions::new().on_interrupted(on_interrupted);
        Ok(match self.store.reserve_with(&key, Fingerprint::of(amount), &with)? {
            Reserve::Fresh(reservation) => {
                let downstream_key = self.habits.send_key_on.then(|| key.downstream_key("charge"));
                let response = self.charge(amount, downstream_key.as_deref())?;
                match reservation.complete(response.as_bytes())? {
                    Completion::Done => response,
                    Completion::Superseded => "superseded: another owner answers for this payment".to_owned(),
                }
            }
            Reserve::Replay(response) => match response.body() {
                Body::Kept(body) => format!("{} (replayed)", str::from_utf8(body)?),
                Body::NotKept { .. } => "paid before; the receipt was not kept".to_owned(),
            },
            Reserve::InFlight(_) => "in flight: the payment is being made".to_owned(),
            Reserve::Interrupted(_) => "interrupted: outcome unknown".to_owned(),
            Reserve::Mismatch(_) => "mismatch: the key stands for another payment".to_owned(),
            Reserve::TooOld(_) => "too old: the payment may have been made and forgotten".to_owned(),
        })
    }

    /// The effect that must not happen twice.
    fn charge(&mut self, amount: &str, downstream_key: Option<&str>) -> Result<String> {
        let receipt = self.ledger.charge(amount, downstream_key)?;
        if self.habits.stall_after_charge {
            io::stdout().write_all(CHARGED.as_bytes())?;
            Frame::read(&self.socket)?;
            return Err("nobody killed the service".into());
        }
        Ok(format!("paid {amount}, receipt {receipt}"))
    }
}

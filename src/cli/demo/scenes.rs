//! The nine scenes: who pays how, what the link does to it, and what must come of it.

use super::Result;
use super::client::Keys;
use super::link::Cue::{DelayReply, Deliver, KillService, LoseReply, LoseRequest};
use super::service::Habits;
use super::shop::Shop;

/// One telling of a scene, with a shop of its own.
pub(super) struct Act {
    pub(super) title: &'static str,
    /// What happens. The list after a payment is what the link does to each try; the client tries again only after a
    /// time-out, and as often as the list is long.
    pub(super) play: fn(&mut Shop) -> Result<()>,
    /// What the client must have seen in the end.
    pub(super) client_sees: &'static str,
    /// What the service must have charged in the end, according to its ledger.
    pub(super) charges: &'static [&'static str],
}

const COFFEE: &str = "3.00 EUR";
const CAKE: &str = "5.00 EUR";

/// Every scene, each with one act or more.
pub(super) const SCENES: &[&[Act]] = &[
    &[Act {
        title: "Request lost, no retry: never charged.",
        play: |shop| shop.pay(COFFEE, Keys::None, &[LoseRequest]),
        client_sees: "no answer",
        charges: &[],
    }],
    &[Act {
        title: "Reply lost, no retry: charged, and the client sees the same.",
        play: |shop| shop.pay(COFFEE, Keys::None, &[LoseReply]),
        client_sees: "no answer",
        charges: &[COFFEE],
    }],
    &[Act {
        title: "Reply lost, retry without a key: charged twice.",
        play: |shop| shop.pay(COFFEE, Keys::None, &[LoseReply, Deliver]),
        client_sees: "no answer; then paid 3.00 EUR, receipt 2",
        charges: &[COFFEE, COFFEE],
    }],
    &[Act {
        title: "Reply lost, retry with a key: charged once, and the client learns that it went through.",
        play: |shop| shop.pay(COFFEE, Keys::Same("order-4"), &[LoseReply, Deliver]),
        client_sees: "no answer; then paid 3.00 EUR, receipt 1 (replayed)",
        charges: &[COFFEE],
    }],
    &[Act {
        title: "Request lost, retry with a key: charged once.",
        play: |shop| shop.pay(COFFEE, Keys::Same("order-5"), &[LoseRequest, Deliver]),
        client_sees: "no answer; then paid 3.00 EUR, receipt 1",
        charges: &[COFFEE],
    }],
    &[Act {
        title: "Reply lost, retry with a fresh key, the pitfall: charged twice.",
        play: |shop| shop.pay(COFFEE, Keys::FreshEachTry("order-6"), &[LoseReply, Deliver]),
        client_sees: "no answer; then paid 3.00 EUR, receipt 2",
        charges: &[COFFEE, COFFEE],
    }],
    &[Act {
        title: "Same key, other amount: refused.",
        play: |shop| {
            shop.pay(COFFEE, Keys::Same("order-7"), &[Deliver])?;
            shop.pay(CAKE, Keys::Same("order-7"), &[Deliver])
        },
        client_sees: "paid 3.00 EUR, receipt 1; then mismatch: the key stands for another payment",
        charges: &[COFFEE],
    }],
    &[Act {
        title: "Reply late: dropped, not taken for the next answer.",
        play: |shop| {
            shop.pay(COFFEE, Keys::Same("order-8"), &[DelayReply])?;
            shop.pay(CAKE, Keys::Same("order-8-cake"), &[Deliver])
        },
        client_sees: "no answer; then a late reply, dropped; then paid 5.00 EUR, receipt 2",
        charges: &[COFFEE, CAKE],
    }],
    &[
        Act {
            title: "Killed between charge and completion, taken over with `downstream_key`: charged once.",
            play: |shop| killed_and_taken_over(shop, true),
            client_sees: "no answer; then interrupted: outcome unknown; then paid 3.00 EUR, receipt 1",
            charges: &[COFFEE],
        },
        Act {
            title: "The same without `downstream_key`: charged twice.",
            play: |shop| killed_and_taken_over(shop, false),
            client_sees: "no answer; then interrupted: outcome unknown; then paid 3.00 EUR, receipt 2",
            charges: &[COFFEE, COFFEE],
        },
    ],
];

/// SIGKILL ends the service between charge and completion. The one that is started after it knows no more than that
/// somebody began; taking over is safe only if the provider can tell that it has seen the payment.
fn killed_and_taken_over(shop: &mut Shop, send_key_on: bool) -> Result<()> {
    let habits = Habits {
        send_key_on,
        ..shop.habits
    };
    shop.restart(Habits {
        stall_after_charge: true,
        ..habits
    })?;
    shop.pay(COFFEE, Keys::Same("order-9"), &[KillService])?;
    shop.restart(habits)?;
    shop.pay(COFFEE, Keys::Same("order-9"), &[Deliver])?;
    shop.take_over(COFFEE, Keys::Same("order-9"), &[Deliver])
}

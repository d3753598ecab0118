//! The nine scenes: who pays how, what the link does to it, and what must come of it.

use super::Result;
use super::link::Cue::{DelayReply, Deliver, KillService, LoseReply, LoseRequest};
use super::service::Habits;
use super::shop::Shop;

/// One telling of a scene, with a shop of its own.
pub(super) struct Act {
    /// What happens, and what it shows.
    pub(super) title: &'static str,
    /// A list of tries after each amount: the key that the try bears, and what the link does to it.
    pub(super) play: fn(&mut Shop) -> Result<()>,
    /// What the client must have seen in the end.
    pub(super) client_sees: &'static str,
    /// What the service must have charged in the end, according to its ledger.
    pub(super) charges: &'static [&'static str],
}

const COFFEE: &str = "3.00 EUR";
const CAKE: &str = "5.00 EUR";
const NO_KEY: &str = "";

/// Every scene: one act, or two that differ in one thing.
pub(super) const SCENES: &[&[Act]] = &[
    &[Act {
        title: "Request lost, no retry: never charged.",
        play: |shop| shop.pay(COFFEE, &[(NO_KEY, LoseRequest)]),
        client_sees: "no answer",
        charges: &[],
    }],
    &[Act {
        title: "Reply lost, no retry: charged, and the client sees the same.",
        play: |shop| shop.pay(COFFEE, &[(NO_KEY, LoseReply)]),
        client_sees: "no answer",
        charges: &[COFFEE],
    }],
    &[Act {
        title: "Reply lost, retry without a key: charged twice.",
        play: |shop| shop.pay(COFFEE, &[(NO_KEY, LoseReply), (NO_KEY, Deliver)]),
        client_sees: "no answer; then paid 3.00 EUR, receipt 2",
        charges: &[COFFEE, COFFEE],
    }],
    &[Act {
        title: "Reply lost, retry with a key: charged once, and the client learns that it went through.",
        play: |shop| shop.pay(COFFEE, &[("order-4", LoseReply), ("order-4", Deliver)]),
        client_sees: "no answer; then paid 3.00 EUR, receipt 1 (replayed)",
        charges: &[COFFEE],
    }],
    &[Act {
        title: "Request lost, retry with a key: charged once.",
        play: |shop| shop.pay(COFFEE, &[("order-5", LoseRequest), ("order-5", Deliver)]),
        client_sees: "no answer; then paid 3.00 EUR, receipt 1",
        charges: &[COFFEE],
    }],
    &[Act {
        title: "Reply lost, retry with a fresh key, the pitfall: charged twice.",
        play: |shop| shop.pay(COFFEE, &[("order-6-try-1", LoseReply), ("order-6-try-2", Deliver)]),
        client_sees: "no answer; then paid 3.00 EUR, receipt 2",
        charges: &[COFFEE, COFFEE],
    }],
    &[Act {
        title: "Same key, other amount: refused.",
        play: |shop| {
            shop.pay(COFFEE, &[("order-7", Deliver)])?;
            shop.pay(CAKE, &[("order-7", Deliver)])
        },
        client_sees: "paid 3.00 EUR, receipt 1; then mismatch: the key stands for another payment",
        charges: &[COFFEE],
    }],
    &[Act {
        title: "Reply late: dropped, not taken for the next answer.",
        play: |shop| {
            shop.pay(COFFEE, &[("order-8", DelayReply)])?;
            shop.pay(CAKE, &[("order-8-cake", Deliver)])
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
    let habits = Habits { send_key_on, ..shop.habits };
    shop.restart(Habits { stall_after_charge: true, ..habits })?;
    shop.pay(COFFEE, &[("order-9", KillService)])?;
    shop.restart(habits)?;
    shop.pay(COFFEE, &[("order-9", Deliver)])?;
    shop.take_over(COFFEE, &[("order-9", Deliver)])
}

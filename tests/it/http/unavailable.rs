//! A store that cannot answer, a key whose outcome is unknown, a key that is too old.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use http::header::{CONTENT_LANGUAGE, RETRY_AFTER, SET_COOKIE};
use http::{HeaderValue, StatusCode};
use keyonce::http::{Answer, Found, IdempotencyLayer, Verdict, uuid_v7_time};
use keyonce::testing::{self, EIO, SimDisk};
use keyonce::{Durability, Fingerprint, Key, Options, Reserve};

use super::scene::{Shop, WALL_MS, post, run, send};

/// A shop whose store lies on a disk of the test's own.
fn on_disk(disk: &SimDisk, durability: Durability) -> Shop {
    let mut shop = Shop::open();
    let options = Options::new().durability(durability).response_bytes_max(64 << 10).clock(shop.clock.clone());
    shop.store = testing::open(disk.clone(), options, 1).unwrap();
    shop
}

#[test]
fn a_store_that_fails_is_503_and_nothing_is_run() {
    run(async {
        let disk = SimDisk::new();
        let shop = on_disk(&disk, Durability::PowerLoss);
        let routes = shop.routes();
        let first = send(&routes, post("/charges", "before")).await;
        assert_eq!(first.status, 201);
        disk.fail_from(disk.steps(), EIO);
        for key in ["abc", "abc", "another"] {
            let told = send(&routes, post("/charges", key)).await;
            told.assert_problem(503, "Unavailable");
            assert_eq!(told.headers[RETRY_AFTER], "5");
        }
        assert_eq!(shop.work.effects(), 1);
        // What is durable is still told.
        send(&routes, post("/charges", "before")).await.assert_replays(&first);
    });
}

#[test]
fn an_answer_that_could_not_be_stored_is_503_and_is_not_run_again() {
    run(async {
        let disk = SimDisk::new();
        let shop = on_disk(&disk, Durability::PowerLoss);
        let routes = shop.routes();
        let first = tokio::spawn({
            let routes = routes.clone();
            async move { send(&routes, post("/slow", "abc")).await }
        });
        shop.work.has_begun().await;
        disk.fail_from(disk.steps(), EIO);
        shop.work.go_on.notify_one();
        let told = first.await.unwrap();
        told.assert_problem(503, "NotStored");
        assert!(told.headers.contains_key(RETRY_AFTER));
        assert!([409, 503].contains(&send(&routes, post("/slow", "abc")).await.status));
        assert_eq!(shop.work.effects(), 1);
        disk.heal();
        let options = Options::new().response_bytes_max(64 << 10).clock(shop.clock.clone());
        drop(routes);
        let again = testing::open(disk.kill(), options, 2).unwrap();
        let reopened = Shop { store: again, ..shop };
        send(&reopened.routes(), post("/slow", "abc")).await.assert_problem(409, "Interrupted");
        assert_eq!(reopened.work.effects(), 1);
    });
}

#[test]
fn a_full_store_is_503_with_a_time_and_nothing_is_run_unprotected() {
    run(async {
        let disk = SimDisk::new();
        let shop = on_disk(&disk, Durability::ProcessCrash);
        let routes = shop.routes();
        let slow = tokio::spawn({
            let routes = routes.clone();
            async move { send(&routes, post("/slow", "slow")).await }
        });
        shop.work.has_begun().await;
        disk.limit_bytes(Some(0));
        let mut told = None;
        for number in 0..100_000 {
            let one = send(&routes, post("/charges", &format!("key-{number}"))).await;
            if one.status != 201 {
                told = Some((one, shop.work.effects()));
                break;
            }
        }
        let (full, effects) = told.expect("the disk is never full");
        full.assert_problem(503, "Unavailable");
        assert_eq!(full.headers[RETRY_AFTER], "1");
        send(&routes, post("/charges", "one-more")).await.assert_problem(503, "Unavailable");
        assert_eq!(shop.work.effects(), effects, "nothing was run unprotected");
        assert!(send(&routes, post("/charges", "key-0")).await.is_replay());
        shop.work.go_on.notify_one();
        let slow = slow.await.unwrap();
        assert!([200, 503].contains(&slow.status), "{}", slow.text());
        let retry = send(&routes, post("/slow", "slow")).await;
        assert!(retry.is_replay() || retry.status == 409, "{}", retry.text());
        assert_eq!(shop.work.effects(), effects + 1, "it was done, and is not done again");
    });
}

#[test]
fn a_closed_store_is_503() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes();
        shop.store.close(Duration::ZERO).unwrap();
        send(&routes, post("/charges", "abc")).await.assert_problem(503, "Unavailable");
        assert_eq!(shop.work.effects(), 0);
    });
}

/// Leaves the key interrupted that a request of the shop has.
async fn interrupt(shop: &Shop) {
    let routes = shop.routes_with(shop.layer().verdict(|_| Verdict::Interrupt));
    assert_eq!(send(&routes, post("/charges", "abc")).await.text(), "charge 1");
}

#[test]
fn an_interrupted_key_is_409_of_a_type_of_its_own_until_somebody_settles_it() {
    run(async {
        let shop = Shop::open();
        interrupt(&shop).await;
        let routes = shop.routes();
        for _ in 0..2 {
            send(&routes, post("/charges", "abc")).await.assert_problem(409, "Interrupted");
        }
        let interrupted = shop.store.interrupted().next().unwrap().unwrap();
        let stored = Answer::new(StatusCode::OK, "found in the books").to_bytes().unwrap();
        let _ = interrupted.resolve(&stored).unwrap();
        let told = send(&routes, post("/charges", "abc")).await;
        assert_eq!((told.status, told.text(), told.is_replay()), (200, "found in the books", true));
        assert_eq!(shop.work.effects(), 1);
    });
}

#[test]
fn an_interrupted_key_is_taken_over_where_the_service_says_so() {
    run(async {
        let shop = Shop::open();
        interrupt(&shop).await;
        let routes = shop.routes_with(shop.layer().take_over());
        let second = send(&routes, post("/charges", "abc")).await;
        assert_eq!((second.text(), second.is_replay()), ("charge 2", false));
        send(&routes, post("/charges", "abc")).await.assert_replays(&second);
    });
}

#[test]
fn a_run_that_outlived_its_lease_is_not_taken_over_since_it_may_be_at_work() {
    run(async {
        let shop = Shop::open();
        let layer = shop.layer().take_over().lease(Duration::from_secs(10)).run_at_most(Duration::from_secs(30));
        let routes = shop.routes_with(layer);
        let slow = tokio::spawn({
            let routes = routes.clone();
            async move { send(&routes, post("/slow", "abc")).await }
        });
        shop.work.has_begun().await;
        shop.clock.advance(Duration::from_secs(31));
        send(&routes, post("/slow", "abc")).await.assert_problem(409, "Interrupted");
        shop.work.go_on.notify_one();
        let first = slow.await.unwrap();
        send(&routes, post("/slow", "abc")).await.assert_replays(&first);
        assert_eq!(shop.work.effects(), 1);
    });
}

#[test]
fn a_request_waits_for_one_durable_pair_and_for_none_where_the_layer_says_so() {
    run(async {
        let disk = SimDisk::new();
        let shop = on_disk(&disk, Durability::PowerLoss);
        let syncs_of_ten = async |routes: &axum::Router, keys: &str| {
            let before = shop.store.stats().syncs;
            for number in 0..10 {
                assert_eq!(send(routes, post("/charges", &format!("{keys}-{number}"))).await.status, 201);
            }
            shop.store.stats().syncs - before
        };
        assert_eq!(syncs_of_ten(&shop.routes(), "durable").await, 20);
        let fast = shop.routes_with(shop.layer().durability(Durability::ProcessCrash));
        assert_eq!(syncs_of_ten(&fast, "fast").await, 0);
    });
}

#[test]
fn a_reconciler_settles_an_interrupted_key_with_what_it_finds_out() {
    run(async {
        let found = |shop: &Shop, found: fn() -> Found| {
            let asked = Arc::new(AtomicU32::new(0));
            let asks = Arc::clone(&asked);
            let layer = shop.layer().reconcile(move |key, info| {
                assert_eq!((key.id(), info.attempt), (b"abc".as_slice(), 1));
                asks.fetch_add(1, Ordering::SeqCst);
                async move { found() }
            });
            (shop.routes_with(layer), asked)
        };
        let shop = Shop::open();
        interrupt(&shop).await;
        let (routes, asked) = found(&shop, || Found::Unknown);
        send(&routes, post("/charges", "abc")).await.assert_problem(409, "Interrupted");
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        let (routes, asked) = found(&shop, || Found::Done(Answer::new(StatusCode::OK, "the bank has it")));
        for _ in 0..2 {
            let told = send(&routes, post("/charges", "abc")).await;
            assert_eq!((told.text(), told.is_replay()), ("the bank has it", true));
        }
        assert_eq!((asked.load(Ordering::SeqCst), shop.work.effects()), (1, 1));

        let second_run: [fn() -> Found; 2] = [|| Found::NothingHappened, || Found::RunAgain];
        for known in second_run {
            let shop = Shop::open();
            interrupt(&shop).await;
            let (routes, _) = found(&shop, known);
            let second = send(&routes, post("/charges", "abc")).await;
            assert_eq!((second.text(), second.is_replay()), ("charge 2", false));
            send(&routes, post("/charges", "abc")).await.assert_replays(&second);
        }
    });
}

#[test]
fn what_a_reconciler_finds_out_is_stored_as_other_answers_are() {
    run(async {
        let shop = Shop::open();
        interrupt(&shop).await;
        let layer = shop.layer().clean(|answer| answer.body = "card ****".into()).reconcile(|_, _| async {
            let answer = Answer::new(StatusCode::OK, "card 4242-body");
            let answer = answer.header(SET_COOKIE, HeaderValue::from_static("4242-cookie"));
            Found::Done(answer.header(CONTENT_LANGUAGE, HeaderValue::from_static("en")))
        });
        let told = send(&shop.routes_with(layer), post("/charges", "abc")).await;
        let lines = (told.header("set-cookie"), told.header("content-language"));
        assert_eq!((told.text(), lines, told.is_replay()), ("card ****", ("", "en"), true));
    });
}

#[test]
fn a_request_whose_key_was_taken_over_meanwhile_is_told_so() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes();
        let slow = tokio::spawn({
            let routes = routes.clone();
            async move { send(&routes, post("/slow", "abc")).await }
        });
        shop.work.has_begun().await;
        assert!(shop.store.forget(&Key::new("shop", "abc").unwrap(), "an operator's error").unwrap());
        shop.work.go_on.notify_one();
        slow.await.unwrap().assert_problem(409, "Superseded");
    });
}

#[test]
fn something_other_than_an_answer_under_a_key_is_never_shown() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes();
        assert_eq!(send(&routes, post("/charges", "abc")).await.status, 201);
        let key = Key::new("shop", "abc").unwrap();
        let fingerprint: Fingerprint = shop.store.peek(&key).unwrap().unwrap().fingerprint;
        assert!(shop.store.forget(&key, "to be stored by hand").unwrap());
        let Reserve::Fresh(reservation) = shop.store.reserve(&key, fingerprint).unwrap() else { panic!("it is free") };
        let _ = reservation.complete(b"raw bytes").unwrap();
        let told = send(&routes, post("/charges", "abc")).await;
        told.assert_problem(500, "Unreadable");
        assert!(!told.text().contains("raw bytes"));
    });
}

#[test]
fn a_request_from_before_the_retention_of_which_nothing_is_known_is_too_old() {
    run(async {
        let shop = Shop::open();
        let layer = IdempotencyLayer::new(shop.store.clone())
            .shared_scope("shop")
            .retention(Duration::from_secs(3600))
            .issued_at(|_, key| uuid_v7_time(key));
        let routes = shop.routes_with(layer);
        let made = |before: Duration, random: u8| {
            let at = SystemTime::UNIX_EPOCH + Duration::from_millis(WALL_MS) - before;
            let ms = at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis();
            let digits = format!("{ms:012x}");
            format!("{}-{}-7cc3-98c4-dc0c0c0739{random:02x}", &digits[..8], &digits[8..])
        };
        let old = made(Duration::from_secs(3600), 1);
        send(&routes, post("/charges", &old)).await.assert_problem(412, "TooOld");
        assert_eq!(shop.work.effects(), 0);
        let young = made(Duration::from_secs(3599), 2);
        let first = send(&routes, post("/charges", &young)).await;
        assert_eq!(first.status, 201);
        send(&routes, post("/charges", &young)).await.assert_replays(&first);
        assert_eq!(send(&routes, post("/charges", "tells-no-time")).await.status, 201);
    });
}

//! The key as it is sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use http::{HeaderValue, Request};
use keyonce::http::IdempotencyLayer;

use super::scene::{Long, Piece, Shop, in_pieces, post, request, run, send};

#[test]
fn a_quoted_key_and_a_bare_one_are_the_same_key() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes();
        let first = send(&routes, post("/charges", "\"abc\"")).await;
        assert_eq!((first.status, first.text()), (201, "charge 1"));
        send(&routes, post("/charges", "abc")).await.assert_replays(&first);
        assert_eq!(send(&routes, post("/charges", "AbC")).await.text(), "charge 2", "nothing is folded");
    });
}

#[test]
fn a_missing_or_malformed_key_is_refused_and_never_passed_through() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes();
        send(&routes, request("POST", "/charges", &[], "amount=999")).await.assert_problem(400, "KeyMissing");
        send(&routes, request("PATCH", "/charges", &[], "amount=999")).await.assert_problem(400, "KeyMissing");
        let too_long = "k".repeat(256);
        for key in ["", "\"\"", "a b", "\"abc", "\"abc\"x", "\"abc\";p=1", "\"a\\b\"", &too_long, "a\tb"] {
            send(&routes, post("/charges", key)).await.assert_problem(400, "KeyInvalid");
        }
        let mut odd = post("/charges", "x");
        odd.headers_mut().insert("idempotency-key", HeaderValue::from_bytes(b"caf\xe9").unwrap());
        send(&routes, odd).await.assert_problem(400, "KeyInvalid");
        let twice = [("idempotency-key", "abc"), ("idempotency-key", "abc")];
        send(&routes, request("POST", "/charges", &twice, "")).await.assert_problem(400, "KeyInvalid");
        assert_eq!(shop.work.effects(), 0);
        assert_eq!(send(&routes, post("/charges", &too_long[1..])).await.status, 201);
    });
}

#[test]
fn a_malformed_key_is_refused_also_where_none_is_required() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes_with(shop.layer().required(false));
        assert_eq!(send(&routes, request("POST", "/charges", &[], "")).await.text(), "charge 1");
        assert_eq!(send(&routes, request("POST", "/charges", &[], "")).await.text(), "charge 2");
        send(&routes, post("/charges", "")).await.assert_problem(400, "KeyInvalid");
        send(&routes, post("/charges", "a b")).await.assert_problem(400, "KeyInvalid");
        assert_eq!(shop.work.effects(), 2);
    });
}

#[test]
fn a_key_is_required_where_the_service_says_so() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes_with(shop.layer().required_when(|request| request.uri.path() == "/charges"));
        send(&routes, request("POST", "/charges", &[], "")).await.assert_problem(400, "KeyMissing");
        assert_eq!(send(&routes, request("POST", "/refunds", &[], "")).await.status, 201);
    });
}

#[test]
fn only_the_methods_named_are_guarded_and_the_others_ignore_the_header() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes();
        for method in ["GET", "PUT", "DELETE", "HEAD", "OPTIONS"] {
            let before = shop.work.effects();
            for key in ["abc", "abc", "not valid"] {
                let told = send(&routes, request(method, "/charges", &[("idempotency-key", key)], "")).await;
                assert_eq!((told.status, told.is_replay()), (201, false), "{method}");
            }
            assert_eq!(shop.work.effects(), before + 3);
        }
        let put = shop.routes_with(shop.layer().methods([http::Method::PUT]));
        let first = send(&put, request("PUT", "/charges", &[("idempotency-key", "abc")], "")).await;
        send(&put, request("PUT", "/charges", &[("idempotency-key", "abc")], "")).await.assert_replays(&first);
    });
}

#[test]
fn the_header_may_have_another_name_and_bare_keys_may_be_refused() {
    run(async {
        let shop = Shop::open();
        let layer = shop.layer().header(http::HeaderName::from_static("x-request-key")).quoted_keys_only();
        let routes = shop.routes_with(layer);
        send(&routes, post("/charges", "\"abc\"")).await.assert_problem(400, "KeyMissing");
        send(&routes, request("POST", "/charges", &[("x-request-key", "abc")], ""))
            .await
            .assert_problem(400, "KeyInvalid");
        let quoted = [("x-request-key", "\"abc\"")];
        assert_eq!(send(&routes, request("POST", "/charges", &quoted, "")).await.status, 201);
    });
}

#[test]
fn two_scopes_on_one_store_do_not_see_each_others_keys() {
    run(async {
        let shop = Shop::open();
        let by_account = |request: &http::request::Parts| Some(request.headers.get("x-account")?.as_bytes().to_vec());
        let routes = shop.routes_with(IdempotencyLayer::new(shop.store.clone()).scope(by_account));
        let of = |account: &str| {
            request("POST", "/charges", &[("idempotency-key", "abc"), ("x-account", account)], "amount=999")
        };
        let first = send(&routes, of("alice")).await;
        let other = send(&routes, of("bob")).await;
        assert_eq!((first.text(), other.text()), ("charge 1", "charge 2"));
        send(&routes, of("alice")).await.assert_replays(&first);
        send(&routes, of("bob")).await.assert_replays(&other);
        send(&routes, post("/charges", "abc")).await.assert_problem(403, "ScopeUnknown");
        send(&routes, of(&"a".repeat(256))).await.assert_problem(403, "ScopeUnknown");
        let another = shop.routes_with(IdempotencyLayer::new(shop.store.clone()).shared_scope("another"));
        let third = send(&another, post("/charges", "abc")).await;
        assert_eq!((third.text(), third.is_replay()), ("charge 3", false));
    });
}

#[test]
fn a_body_over_the_limit_is_refused_before_anything_is_done() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes_with(shop.layer().request_bytes_max(10));
        assert_eq!(
            send(&routes, request("POST", "/charges", &[("idempotency-key", "a")], "0123456789")).await.status,
            201
        );
        let over = request("POST", "/charges", &[("idempotency-key", "b")], "0123456789x");
        send(&routes, over).await.assert_problem(413, "BodyTooLarge");
        let chunks = in_pieces(["01234", "56789", "x"].map(Piece::Data));
        let chunked = Request::post("/charges").header("idempotency-key", "b").body(chunks).unwrap();
        send(&routes, chunked).await.assert_problem(413, "BodyTooLarge");
        assert_eq!(shop.work.effects(), 1);
        assert_eq!(send(&routes, request("POST", "/charges", &[("idempotency-key", "b")], "short")).await.status, 201);
    });
}

#[test]
fn a_body_that_breaks_off_is_refused_and_leaves_the_key_free() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes();
        let broken = in_pieces([Piece::Data("amount="), Piece::Broken]);
        let broken = Request::post("/charges").header("idempotency-key", "abc").body(broken).unwrap();
        send(&routes, broken).await.assert_problem(400, "BodyUnreadable");
        assert_eq!(send(&routes, post("/charges", "abc")).await.text(), "charge 1");
    });
}

#[test]
fn no_more_of_a_body_is_held_than_the_limit_and_one_frame() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes_with(shop.layer().request_bytes_max(100));
        let asked = Arc::new(AtomicU32::new(0));
        let long = Request::post("/charges").header("idempotency-key", "abc").body(Long::body(&asked)).unwrap();
        send(&routes, long).await.assert_problem(413, "BodyTooLarge");
        assert_eq!((asked.load(Ordering::SeqCst), shop.work.effects()), (11, 0));
    });
}

#[test]
fn a_shared_scope_that_is_too_long_is_refused_when_the_layer_is_made() {
    run(async {
        let shop = Shop::open();
        let shared = |bytes| IdempotencyLayer::new(shop.store.clone()).shared_scope("s".repeat(bytes));
        for bytes in [0, 254, 255] {
            assert_eq!(send(&shop.routes_with(shared(bytes)), post("/charges", "abc")).await.status, 201);
        }
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shared(256))).unwrap_err();
        let told = refused.downcast_ref::<String>().unwrap();
        assert_eq!(told, "the shared scope has 256 bytes, more than 255");
    });
}

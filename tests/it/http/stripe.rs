//! Stripe's rules.

use super::scene::{Shop, Told, post, request, run, send};

fn error(told: &Told) -> serde_json::Value {
    assert_eq!(told.header("content-type"), "application/json");
    let document: serde_json::Value = serde_json::from_slice(&told.body).unwrap();
    document["error"].clone()
}

#[test]
fn stripe_only_post_is_guarded_and_a_key_may_be_missing() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes_with(shop.layer().stripe());
        for method in ["GET", "DELETE", "PATCH"] {
            for _ in 0..2 {
                let told = send(&routes, request(method, "/charges", &[("idempotency-key", "abc")], "")).await;
                assert_eq!((told.status, told.header("idempotent-replayed")), (201, ""));
            }
        }
        for _ in 0..2 {
            assert_eq!(send(&routes, request("POST", "/charges", &[], "")).await.status, 201);
        }
        assert_eq!(shop.work.effects(), 8);
    });
}

#[test]
fn stripe_the_first_status_and_body_are_final_whatever_they_are() {
    run(async {
        for status in [200, 201, 400, 402, 403, 404, 409, 422, 500, 503] {
            let shop = Shop::open();
            let routes = shop.routes_with(shop.layer().stripe());
            let path = format!("/status/{status}");
            for replayed in ["", "true"] {
                let told = send(&routes, post(&path, "abc")).await;
                assert_eq!((told.status, told.text()), (status, "charge 1"));
                assert_eq!(told.header("idempotent-replayed"), replayed);
                assert_eq!(told.header("idempotency-replayed"), "");
            }
        }
    });
}

#[test]
fn stripe_nothing_is_remembered_of_what_authentication_or_a_rate_limit_refused() {
    run(async {
        for status in [401, 429] {
            let shop = Shop::open();
            let routes = shop.routes_with(shop.layer().stripe());
            for charge in ["charge 1", "charge 2"] {
                assert_eq!(send(&routes, post(&format!("/status/{status}"), "abc")).await.text(), charge);
            }
        }
    });
}

#[test]
fn stripe_other_parameters_or_another_endpoint_are_an_idempotency_error() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes_with(shop.layer().stripe());
        assert_eq!(send(&routes, post("/charges", "abc")).await.status, 201);
        let key = [("idempotency-key", "abc")];
        for other in [request("POST", "/charges", &key, "amount=1"), post("/refunds", "abc")] {
            let told = send(&routes, other).await;
            assert_eq!((told.status, &error(&told)["type"]), (400, &"idempotency_error".into()));
        }
        assert_eq!(shop.work.effects(), 1);
    });
}

#[test]
fn stripe_a_key_in_use_is_told_as_such_and_leaves_no_trace() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes_with(shop.layer().stripe());
        let first = tokio::spawn({
            let routes = routes.clone();
            async move { send(&routes, post("/slow", "abc")).await }
        });
        shop.work.has_begun().await;
        let told = send(&routes, post("/slow", "abc")).await;
        assert_eq!((told.status, &error(&told)["code"]), (409, &"idempotency_key_in_use".into()));
        shop.work.go_on.notify_one();
        let first = first.await.unwrap();
        let retry = send(&routes, post("/slow", "abc")).await;
        assert_eq!((retry.status, retry.text()), (first.status, first.text()));
        assert_eq!(retry.header("idempotent-replayed"), "true");
    });
}

#[test]
fn stripe_a_key_is_new_again_once_its_retention_is_over() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes_with(shop.layer().stripe());
        assert_eq!(send(&routes, post("/charges", "abc")).await.text(), "charge 1");
        shop.clock.advance(std::time::Duration::from_secs(24 * 60 * 60 - 1));
        assert_eq!(send(&routes, post("/charges", "abc")).await.text(), "charge 1");
        shop.clock.advance(std::time::Duration::from_secs(1));
        assert_eq!(send(&routes, post("/charges", "abc")).await.text(), "charge 2");
    });
}

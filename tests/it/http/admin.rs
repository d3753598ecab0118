//! The service for operators.

use axum::Router;
use keyonce::Options;
use keyonce::http::{Verdict, admin};
use keyonce::testing::{self, EIO, SimDisk};

use super::scene::{Shop, Told, post, request, run, send};

fn mounted(shop: &Shop) -> Router {
    Router::new().nest_service("/admin", admin(shop.store.clone()))
}

async fn asked(routes: &Router, method: &str, uri: &str, body: &str) -> (u16, serde_json::Value) {
    let told = send(routes, request(method, uri, &[("content-type", "text/plain")], body)).await;
    (told.status, serde_json::from_slice(&told.body).unwrap())
}

/// A shop with one key interrupted, and its token.
async fn with_interrupted(scope: &str) -> (Shop, String) {
    let shop = Shop::open();
    let layer = keyonce::http::IdempotencyLayer::new(shop.store.clone()).shared_scope(scope);
    let routes = shop.routes_with(layer.verdict(|_| Verdict::Interrupt));
    assert_eq!(send(&routes, post("/charges", "a/b&c%")).await.status, 201);
    let (_, listed) = asked(&mounted(&shop), "GET", "/admin/keys?state=interrupted", "").await;
    let token = listed["keys"][0]["token"].as_str().unwrap().to_owned();
    (shop, token)
}

#[test]
fn an_operator_lists_and_shows_keys_and_resolves_an_interrupted_one() {
    run(async {
        let (shop, token) = with_interrupted("shop").await;
        let admin = mounted(&shop);
        let routes = shop.routes();
        assert_eq!(send(&routes, post("/charges", "done")).await.status, 201);
        let (status, all) = asked(&admin, "GET", "/admin/keys", "").await;
        assert_eq!((status, all["keys"].as_array().unwrap().len(), &all["more"]), (200, 2, &false.into()));
        let (_, one) = asked(&admin, "GET", "/admin/keys?limit=1", "").await;
        assert_eq!((one["keys"].as_array().unwrap().len(), &one["more"]), (1, &true.into()));
        let (_, interrupted) = asked(&admin, "GET", "/admin/keys?state=interrupted", "").await;
        let known = &interrupted["keys"][0];
        assert_eq!((&known["scope"], &known["id"]), (&"shop".into(), &"a%2Fb%26c%25".into()));
        assert_eq!((&known["state"], &known["cause"]), (&"interrupted".into(), &"Dropped".into()));
        let key = format!("scope=shop&id={}", known["id"].as_str().unwrap());
        assert_eq!(asked(&admin, "GET", &format!("/admin/key?{key}"), "").await, (200, known.clone()));

        let wrong = format!("/admin/key/resolve?{key}&token=1&status=200");
        assert_eq!(asked(&admin, "POST", &wrong, "found").await.0, 409);
        let resolve = format!("/admin/key/resolve?{key}&token={token}&status=202");
        assert_eq!(asked(&admin, "POST", &resolve, "found").await.0, 200);
        assert_eq!(asked(&admin, "POST", &resolve, "found").await.0, 409, "it is done");
        let retry = send(&routes, post("/charges", "a/b&c%")).await;
        assert_eq!((retry.status, retry.text(), retry.header("content-type")), (202, "found", "text/plain"));
        assert!(retry.is_replay());
    });
}

#[test]
fn an_operator_releases_a_key_and_forgets_one() {
    run(async {
        let (shop, token) = with_interrupted("shop").await;
        let admin = mounted(&shop);
        let routes = shop.routes();
        let key = "scope=shop&id=a%2Fb%26c%25";
        assert_eq!(asked(&admin, "POST", &format!("/admin/key/release?{key}&token={token}"), "").await.0, 200);
        assert_eq!(send(&routes, post("/charges", "a/b&c%")).await.text(), "charge 2");
        assert_eq!(asked(&admin, "POST", &format!("/admin/key/forget?{key}"), "").await.0, 400, "without a reason");
        let forget = format!("/admin/key/forget?{key}&reason=test%20data");
        assert_eq!(asked(&admin, "POST", &forget, "").await.0, 200);
        assert_eq!(asked(&admin, "POST", &forget, "").await.0, 404);
        assert_eq!(send(&routes, post("/charges", "a/b&c%")).await.text(), "charge 3");
    });
}

#[test]
fn an_operator_is_told_what_a_request_lacks() {
    run(async {
        let (shop, token) = with_interrupted("shop").await;
        let admin = mounted(&shop);
        let key = "scope=shop&id=a%2Fb%26c%25";
        let refused = [
            ("GET", "/admin/keys?state=unknown".to_owned(), 400),
            ("GET", "/admin/keys?limit=many".to_owned(), 400),
            ("GET", "/admin/key?scope=shop".to_owned(), 400),
            ("GET", "/admin/key?scope=shop&id=".to_owned(), 400),
            ("GET", "/admin/key?scope=shop&id=unknown".to_owned(), 404),
            ("GET", "/admin/nothing".to_owned(), 404),
            ("GET", format!("/admin/key/release?{key}&token={token}"), 405),
            ("POST", "/admin/keys".to_owned(), 405),
            ("POST", format!("/admin/key/release?{key}"), 400),
            ("POST", format!("/admin/key/resolve?{key}&token={token}"), 400),
            ("POST", format!("/admin/key/resolve?{key}&token={token}&status=99"), 400),
            ("POST", "/admin/key/release?scope=shop&id=unknown&token=7".to_owned(), 404),
        ];
        for (method, uri, status) in refused {
            assert_eq!(asked(&admin, method, &uri, "").await.0, status, "{method} {uri}");
        }
        assert_eq!(shop.store.interrupted().count(), 1);
    });
}

#[test]
fn an_operator_is_told_of_health_and_metrics_in_a_form_that_scrapers_read() {
    run(async {
        let (shop, _) = with_interrupted("shop").await;
        let admin = mounted(&shop);
        let routes = shop.routes();
        for _ in 0..3 {
            assert_eq!(send(&routes, post("/charges", "abc")).await.status, 201);
        }
        assert_eq!(asked(&admin, "GET", "/admin/health", "").await, (200, serde_json::json!({ "health": "sound" })));
        let metrics: Told = send(&admin, request("GET", "/admin/stats", &[], "")).await;
        assert!(metrics.header("content-type").starts_with("application/openmetrics-text"));
        let text = metrics.text();
        assert!(text.ends_with("# EOF\n"));
        for line in [
            "keyonce_answers_total{answer=\"fresh\"} 2",
            "keyonce_answers_total{answer=\"replay\"} 2",
            "keyonce_completed_total 1",
            "keyonce_retry_age_seconds_bucket{le=\"+Inf\"} 2",
        ] {
            assert!(text.lines().any(|told| told == line), "{line} is not in\n{text}");
        }
        let is_sample = |line: &str| line.starts_with("keyonce_") && line.split(' ').count() == 2;
        assert!(text.lines().all(|line| line.starts_with("# ") || is_sample(line)), "{text}");
        shop.store.close(std::time::Duration::ZERO).unwrap();
        assert_eq!(asked(&admin, "GET", "/admin/health", "").await.0, 503);
        assert_eq!(asked(&admin, "GET", "/admin/key?scope=shop&id=abc", "").await.0, 503);
    });
}

#[test]
fn what_cannot_be_an_answer_is_not_stored_as_one() {
    run(async {
        let (shop, token) = with_interrupted("shop").await;
        let admin = mounted(&shop);
        let uri = |status| format!("/admin/key/resolve?scope=shop&id=a%2Fb%26c%25&token={token}&status={status}");
        for status in [99, 100, 101, 199] {
            assert_eq!(asked(&admin, "POST", &uri(status), "found").await.0, 400, "{status}");
        }
        let too_large = "x".repeat(2 << 20);
        assert_eq!(asked(&admin, "POST", &uri(200), &too_large).await.0, 413);
        assert_eq!(shop.store.interrupted().count(), 1);
    });
}

#[test]
fn a_page_of_another_site_cannot_make_an_operators_browser_act() {
    run(async {
        let (shop, _) = with_interrupted("shop").await;
        let admin = mounted(&shop);
        let uri = "/admin/key/forget?scope=shop&id=a%2Fb%26c%25&reason=r";
        for (site, status) in [("cross-site", 403), ("same-site", 403), ("none", 200)] {
            let told = send(&admin, request("POST", uri, &[("sec-fetch-site", site)], "")).await;
            assert_eq!(told.status, status, "{site}");
        }
    });
}

#[test]
fn an_operator_is_told_that_a_store_is_poisoned_and_why() {
    run(async {
        let disk = SimDisk::new();
        let mut shop = Shop::open();
        shop.store = testing::open(disk.clone(), Options::new().clock(shop.clock.clone()), 1).unwrap();
        let admin = mounted(&shop);
        // There is a segment to write into: one that cannot be made poisons nothing.
        assert_eq!(send(&shop.routes(), post("/charges", "first")).await.status, 201);
        assert_eq!(asked(&admin, "GET", "/admin/health", "").await.0, 200);
        disk.fail_from(disk.steps(), EIO);
        assert_eq!(send(&shop.routes(), post("/charges", "abc")).await.status, 503);
        let (status, told) = asked(&admin, "GET", "/admin/health", "").await;
        assert_eq!((status, &told["health"]), (503, &"poisoned".into()));
        assert!(told["error"].as_str().is_some_and(|error| !error.is_empty()));
    });
}

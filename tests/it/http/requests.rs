//! What makes two requests the same, or a mismatch.

use std::collections::BTreeMap;

use axum::Router;
use axum::extract::OriginalUri;
use http::Request;
use keyonce::http::Recipe;
use proptest::prelude::*;

use super::scene::{Shop, Told, post, request, run, send};

type Sent = (&'static str, &'static str, &'static str, &'static str);

const FIRST: Sent = ("POST", "/charges?currency=eur", "application/json", "{\"amount\":999}");

const OTHERS: [Sent; 6] = [
    ("PATCH", "/charges?currency=eur", "application/json", "{\"amount\":999}"),
    ("POST", "/refunds?currency=eur", "application/json", "{\"amount\":999}"),
    ("POST", "/charges?currency=usd", "application/json", "{\"amount\":999}"),
    ("POST", "/charges", "application/json", "{\"amount\":999}"),
    ("POST", "/charges?currency=eur", "text/plain", "{\"amount\":999}"),
    ("POST", "/charges?currency=eur", "application/json", "{\"amount\":1000}"),
];

async fn sent(routes: &axum::Router, (method, uri, content_type, body): Sent) -> Told {
    let headers = [("idempotency-key", "abc"), ("content-type", content_type)];
    send(routes, request(method, uri, &headers, body)).await
}

#[test]
fn another_method_path_query_content_type_or_body_under_the_same_key_is_a_mismatch() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes();
        let first = sent(&routes, FIRST).await;
        for other in OTHERS {
            let told = sent(&routes, other).await;
            told.assert_problem(422, "Mismatch");
            assert!(!told.text().contains("charge 1"), "what is stored is not told");
        }
        sent(&routes, FIRST).await.assert_replays(&first);
        assert_eq!(shop.work.effects(), 1);
    });
}

#[test]
fn requests_under_two_prefixes_are_two_requests_to_a_layer_in_a_nested_router_that_is_told_the_whole_address() {
    run(async {
        let shop = Shop::open();
        let layer = shop.layer().uri(|request| request.extensions.get().map(|OriginalUri(whole)| whole.clone()));
        let routes = Router::new().nest("/accounts/{account}", shop.routes_with(layer));
        let first = send(&routes, post("/accounts/1/charges?a=1", "abc")).await;
        assert_eq!((first.status, first.text()), (201, "charge 1"));
        for other in ["/accounts/2/charges?a=1", "/accounts/1/refunds?a=1", "/accounts/1/charges?a=2"] {
            send(&routes, post(other, "abc")).await.assert_problem(422, "Mismatch");
        }
        send(&routes, post("/accounts/1/charges?a=1", "abc")).await.assert_replays(&first);
        // A request that axum has nested nowhere is known by its own address.
        let layer = shop.layer().uri(|_| None);
        let told = send(&shop.routes_with(layer), post("/accounts/1/charges?a=1", "abc")).await;
        assert_eq!((told.text(), told.is_replay()), ("charge 1", true));
    });
}

#[test]
fn a_mismatch_is_told_also_while_the_first_request_runs() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes();
        let slow = |body| request("POST", "/slow", &[("idempotency-key", "abc")], body);
        let first = tokio::spawn({
            let (routes, request) = (routes.clone(), slow("amount=999"));
            async move { send(&routes, request).await }
        });
        shop.work.has_begun().await;
        send(&routes, slow("amount=1000")).await.assert_problem(422, "Mismatch");
        send(&routes, slow("amount=999")).await.assert_problem(409, "InFlight");
        shop.work.go_on.notify_one();
        assert_eq!(first.await.unwrap().text(), "charge 1");
    });
}

#[test]
fn a_mismatch_is_told_also_after_an_interruption() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes_with(shop.layer().verdict(|_| keyonce::http::Verdict::Interrupt));
        assert_eq!(sent(&routes, FIRST).await.status, 201);
        for other in OTHERS {
            sent(&routes, other).await.assert_problem(422, "Mismatch");
        }
        sent(&routes, FIRST).await.assert_problem(409, "Interrupted");
    });
}

#[test]
fn what_a_recipe_leaves_out_may_differ() {
    run(async {
        let shop = Shop::open();
        let recipe = Recipe::new().without_query().without_content_type().canonical_json();
        let routes = shop.routes_with(shop.layer().recipe(recipe));
        let first = sent(&routes, FIRST).await;
        sent(&routes, ("POST", "/charges?trace=7", "application/json", "{\"amount\":999}"))
            .await
            .assert_replays(&first);
        sent(&routes, ("POST", "/charges", "application/json", "{ \"amount\": 999 }")).await.assert_replays(&first);
        sent(&routes, OTHERS[1]).await.assert_problem(422, "Mismatch");
        sent(&routes, OTHERS[5]).await.assert_problem(422, "Mismatch");
    });
}

#[test]
fn amounts_above_two_to_the_53_stay_two_amounts() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes_with(shop.layer().recipe(Recipe::new().canonical_json()));
        let amount = |body| ("POST", "/charges", "application/json", body);
        assert_eq!(sent(&routes, amount("{\"amount\":9007199254740992}")).await.status, 201);
        sent(&routes, amount("{\"amount\":9007199254740993}")).await.assert_problem(422, "Mismatch");
    });
}

#[test]
fn a_retry_under_the_recipe_of_an_earlier_release_is_no_mismatch() {
    run(async {
        let shop = Shop::open();
        let first = sent(&shop.routes_with(shop.layer().recipe(Recipe::new().without_query())), FIRST).await;
        sent(&shop.routes(), FIRST).await.assert_problem(422, "Mismatch");
        let both = shop.routes_with(shop.layer().accept_also(Recipe::new().without_query()));
        sent(&both, FIRST).await.assert_replays(&first);
        sent(&both, OTHERS[5]).await.assert_problem(422, "Mismatch");
    });
}

/// A request as a recipe sees it, of few letters, so that parts often run into each other.
fn requests() -> impl Strategy<Value = (String, String, Option<String>, Option<String>, Vec<String>, String)> {
    let word = "[ab/]{0,3}";
    (
        prop::sample::select(vec!["A".to_owned(), "AB".to_owned(), "B".to_owned()]),
        "/[ab]{0,3}",
        prop::option::of("[ab]{0,3}"),
        prop::option::of(word),
        prop::collection::vec(word.prop_map(String::from), 0..3),
        "[ab/]{0,4}",
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn distinct_requests_never_share_a_fingerprint(many in prop::collection::vec(requests(), 200)) {
        let recipe = Recipe::new().header(http::HeaderName::from_static("x-part"));
        let mut seen = BTreeMap::new();
        for one in many {
            let (method, path, query, content_type, lines, body) = &one;
            let uri = query.as_ref().map_or_else(|| path.clone(), |query| format!("{path}?{query}"));
            let mut request = Request::builder().method(method.as_str()).uri(uri);
            if let Some(content_type) = content_type {
                request = request.header("content-type", content_type);
            }
            for line in lines {
                request = request.header("x-part", line);
            }
            let parts = request.body(()).unwrap().into_parts().0;
            let fingerprint = recipe.fingerprint(&parts, body.as_bytes()).to_bytes();
            if let Some(other) = seen.insert(fingerprint, one.clone()) {
                prop_assert_eq!(other, one);
            }
        }
    }
}

#[test]
fn a_body_that_ends_before_what_it_has_announced_has_no_effect() {
    struct Cut(Option<&'static str>);

    impl http_body::Body for Cut {
        type Data = bytes::Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            mut self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, std::convert::Infallible>>> {
            std::task::Poll::Ready(self.0.take().map(|data| Ok(http_body::Frame::data(data.into()))))
        }

        fn size_hint(&self) -> http_body::SizeHint {
            http_body::SizeHint::with_exact(if self.0.is_some() { 10 } else { 2 })
        }
    }

    run(async {
        let shop = Shop::open();
        let routes = shop.routes();
        let cut = post("/charges", "abc").map(|_| axum::body::Body::new(Cut(Some("amount=9"))));
        send(&routes, cut).await.assert_problem(400, "BodyUnreadable");
        assert_eq!(send(&routes, post("/charges", "abc")).await.text(), "charge 1");
    });
}

#[test]
fn a_layer_around_a_router_that_nests_tells_the_paths_of_its_routes_apart() {
    run(async {
        let shop = Shop::open();
        let charges = axum::Router::new().route("/charges", axum::routing::post(async || "charged"));
        let routes = axum::Router::new().nest("/accounts/{id}", charges).layer(shop.layer());
        assert_eq!(send(&routes, post("/accounts/1/charges", "abc")).await.text(), "charged");
        send(&routes, post("/accounts/2/charges", "abc")).await.assert_problem(422, "Mismatch");
    });
}

#[test]
fn another_content_encoding_is_another_request() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes();
        let encoded = |encoding| {
            let headers = [("idempotency-key", "abc"), ("content-encoding", encoding)];
            request("POST", "/charges", &headers, "bytes")
        };
        let first = send(&routes, encoded("gzip")).await;
        send(&routes, encoded("br")).await.assert_problem(422, "Mismatch");
        send(&routes, encoded("gzip")).await.assert_replays(&first);
    });
}

//! gRPC clients, who understand statuses of their own alone.

use axum::response::Response;
use keyonce::http::Verdict;
use tower::{Layer, ServiceExt};

use super::scene::{Shop, Told, request, run};

fn call(key: &str, message: &str) -> axum::extract::Request {
    request("POST", "/shop.Charges/Charge", &[("content-type", "application/grpc"), ("idempotency-key", key)], message)
}

#[test]
fn a_grpc_client_is_told_of_problems_by_a_status_of_its_own() {
    run(async {
        let shop = Shop::open();
        let work = shop.work.clone();
        let handler = tower::service_fn(move |_: http::Request<_>| {
            work.effect();
            async { Ok::<_, std::convert::Infallible>(Response::new(axum::body::Body::from("reply"))) }
        });
        let service = shop.layer().layer(handler);
        let told = async |request| Told::of(service.clone().oneshot(request).await.unwrap()).await;
        assert_eq!(told(call("abc", "one")).await.text(), "reply");
        let other = told(call("abc", "another")).await;
        assert_eq!((other.status, other.header("content-type"), other.text()), (200, "application/grpc", ""));
        assert_eq!(other.header("grpc-status"), "9");
        assert!(other.header("grpc-message").contains("a different request, which is done"));
        assert!(other.header("link").contains("#variant.Mismatch"));
        assert_eq!(told(call("", "one")).await.header("grpc-status"), "3");
        shop.store.close(std::time::Duration::ZERO).unwrap();
        let closed = told(call("abc", "one")).await;
        assert_eq!((closed.header("grpc-status"), closed.header("retry-after")), ("14", "5"));
        assert_eq!(shop.work.effects(), 1);
    });
}

#[test]
fn what_grpc_refuses_before_the_work_gives_the_key_back_and_its_other_errors_are_final() {
    run(async {
        for code in 0..=16 {
            let shop = Shop::open();
            let work = shop.work.clone();
            let handler = tower::service_fn(move |_: http::Request<_>| {
                work.effect();
                let response =
                    Response::builder().header("content-type", "application/grpc").header("grpc-status", code);
                async move { Ok::<_, std::convert::Infallible>(response.body(axum::body::Body::empty()).unwrap()) }
            });
            let service = shop.layer().layer(handler);
            for _ in 0..2 {
                let told = Told::of(service.clone().oneshot(call("abc", "one")).await.unwrap()).await;
                assert_eq!(told.header("grpc-status"), code.to_string());
            }
            assert_eq!(shop.work.effects(), if [7, 8, 16].contains(&code) { 2 } else { 1 }, "code {code}");
        }
    });
}

#[test]
fn a_verdict_of_the_service_counts_for_grpc_as_well_and_sees_its_status() {
    run(async {
        let shop = Shop::open();
        let work = shop.work.clone();
        let handler = tower::service_fn(move |_: http::Request<_>| {
            work.effect();
            let response = Response::builder().header("content-type", "application/grpc").header("grpc-status", "8");
            async move { Ok::<_, std::convert::Infallible>(response.body(axum::body::Body::empty()).unwrap()) }
        });
        let service = shop.layer().verdict(|_| Verdict::Keep).layer(handler.clone());
        for _ in 0..2 {
            let told = Told::of(service.clone().oneshot(call("abc", "one")).await.unwrap()).await;
            assert_eq!(told.header("grpc-status"), "8");
        }
        assert_eq!(shop.work.effects(), 1);
        let by_code = shop.layer().verdict(|head| match head.headers["grpc-status"].as_bytes() {
            b"8" => Verdict::Interrupt,
            _ => Verdict::Keep,
        });
        let service = by_code.layer(handler);
        assert_eq!(Told::of(service.clone().oneshot(call("b", "one")).await.unwrap()).await.header("grpc-status"), "8");
        assert_eq!(Told::of(service.oneshot(call("b", "one")).await.unwrap()).await.header("grpc-status"), "10");
        assert_eq!(shop.work.effects(), 2);
    });
}

#[test]
fn a_grpc_client_is_told_one_status_also_of_an_answer_whose_message_was_not_kept() {
    run(async {
        let shop = Shop::open();
        let handler = tower::service_fn(move |_: http::Request<_>| {
            let response = Response::builder().header("content-type", "application/grpc").header("grpc-status", "0");
            let mut response = response.body(axum::body::Body::from("reply")).unwrap();
            response.extensions_mut().insert(keyonce::http::Verdict::KeepWithoutBody);
            response.extensions_mut().insert(keyonce::http::Reference("charge 7".to_owned()));
            async move { Ok::<_, std::convert::Infallible>(response) }
        });
        let service = shop.layer().layer(handler);
        let _first = service.clone().oneshot(call("abc", "one")).await.unwrap();
        let told = Told::of(service.oneshot(call("abc", "one")).await.unwrap()).await;
        let statuses: Vec<_> = told.headers.get_all("grpc-status").iter().collect();
        assert_eq!(statuses, ["6"]);
        assert!(told.header("grpc-message").contains("charge 7"));
    });
}

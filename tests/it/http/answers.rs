//! What is stored of an answer, and what a retry is told.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::{HeaderName, HeaderValue, StatusCode};
use keyonce::http::{Reference, StoredHeaders, Verdict};
use keyonce::{Body as Stored, Options, Reserve};
use tower::{Layer, Service, ServiceExt};

use super::scene::{Long, Piece, Shop, Told, in_pieces, post, request, run, run_with_timers_that_jump, send};

/// A service that answers in one way and counts.
fn answering(
    shop: &Shop,
    answer: impl Fn(u32) -> Response + Send + Sync + 'static,
) -> impl Service<
    http::Request<keyonce::http::Body<Body>>,
    Response = Response,
    Error = Infallible,
    Future = impl Future<Output = Result<Response, Infallible>> + Send,
> + Clone
+ Send
+ 'static {
    let (work, answer) = (shop.work.clone(), Arc::new(answer));
    tower::service_fn(move |_| {
        let answer = answer(work.effect());
        async move { Ok(answer) }
    })
}

/// What the first request and its retry are told.
async fn twice(shop: &Shop, answer: impl Fn(u32) -> Response + Send + Sync + 'static) -> [Told; 2] {
    let service = shop.layer().layer(answering(shop, answer));
    let first = Told::of(service.clone().oneshot(post("/", "abc")).await.unwrap()).await;
    [first, Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await]
}

/// Whether the bytes lie anywhere in the files of the store.
fn is_on_disk(shop: &Shop, secret: &str) -> bool {
    let files = std::fs::read_dir(shop.dir.path().join("keys")).unwrap();
    files
        .map(|file| std::fs::read(file.unwrap().path()).unwrap())
        .any(|bytes| bytes.windows(secret.len()).any(|window| window == secret.as_bytes()))
}

#[test]
fn every_kind_of_answer_is_replayed_with_its_status_lines_in_order_and_bytes() {
    run(async {
        let bodies: [&'static [u8]; 4] = [b"", b"charge", b"\x00\xff\r\n\r\n", &[7; 100_000]];
        for status in [200, 201, 202, 204, 205, 301, 303, 304, 400, 402, 404, 409, 410, 451, 500, 502, 503, 504] {
            for body in bodies {
                let shop = Shop::open();
                let [first, retry] = twice(&shop, move |charge| {
                    Response::builder()
                        .status(status)
                        .header("x-charge", charge)
                        .header("content-type", "application/octet-stream")
                        .header("x-odd", HeaderValue::from_bytes(b"\x80\xff caf\xc3\xa9").unwrap())
                        .header("link", "<1>")
                        .header("etag", "\"1\"")
                        .header("link", "<2>")
                        .header("content-length", body.len())
                        .body(Body::from(body))
                        .unwrap()
                })
                .await;
                assert_eq!(first.status, status);
                retry.assert_replays(&first);
                assert_eq!(shop.work.effects(), 1);
            }
        }
    });
}

#[test]
fn cookies_credentials_the_date_and_lines_of_one_connection_are_neither_replayed_nor_on_the_disk() {
    run(async {
        let shop = Shop::open();
        let lines = [
            ("set-cookie", "session=secret-1"),
            ("set-cookie", "other=secret-2"),
            ("authorization", "secret-3"),
            ("www-authenticate", "secret-4"),
            ("proxy-authenticate", "secret-5"),
            ("connection", "close, x-hop"),
            ("x-hop", "secret-6"),
            ("keep-alive", "secret-7"),
            ("date", "secret-8"),
            ("upgrade", "secret-9"),
            ("x-kept", "not-a-secret"),
        ];
        let [first, retry] = twice(&shop, move |_| {
            let response = Response::builder();
            lines
                .iter()
                .fold(response, |response, (name, value)| response.header(*name, *value))
                .body("".into())
                .unwrap()
        })
        .await;
        assert_eq!(first.headers.len(), lines.len(), "the first client is told all of them");
        assert_eq!(first.headers.get_all("set-cookie").iter().count(), 2);
        assert!(retry.is_replay());
        let names: Vec<_> = retry.headers.keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["x-kept", "idempotency-replayed"]);
        assert!(is_on_disk(&shop, "not-a-secret") && !is_on_disk(&shop, "secret-"));
    });
}

#[test]
fn cookies_are_replayed_where_the_service_says_that_they_may_be_stored() {
    run(async {
        for stored in [
            StoredHeaders::new().allow(&http::header::SET_COOKIE),
            StoredHeaders::only([http::header::SET_COOKIE]),
            StoredHeaders::all_but([]),
        ] {
            let shop = Shop::open();
            let answer = |_| {
                let response = Response::builder().header("set-cookie", "b=2; Path=/").header("set-cookie", "a=1");
                response.body(Body::empty()).unwrap()
            };
            let service = shop.layer().stored_headers(stored).layer(answering(&shop, answer));
            for _ in 0..2 {
                let told = Told::of(service.clone().oneshot(post("/", "abc")).await.unwrap()).await;
                let cookies: Vec<_> = told.headers.get_all("set-cookie").iter().collect();
                assert_eq!(cookies, ["b=2; Path=/", "a=1"]);
            }
        }
    });
}

#[test]
fn trailers_are_replayed() {
    run(async {
        let shop = Shop::open();
        let answer = |_| {
            let pieces = [Piece::Data("one "), Piece::Data("message"), Piece::Trailer("grpc-status", "0")];
            Response::builder().header("content-type", "application/grpc").body(in_pieces(pieces)).unwrap()
        };
        let service = shop.layer().layer(answering(&shop, answer));
        for _ in 0..2 {
            let response = service.clone().oneshot(post("/", "abc")).await.unwrap();
            let body = http_body_util::BodyExt::collect(response.into_body()).await.unwrap();
            assert_eq!(body.trailers().unwrap()["grpc-status"], "0");
            assert_eq!(body.to_bytes(), "one message");
        }
        assert_eq!(shop.work.effects(), 1);
    });
}

#[test]
fn an_answer_to_head_keeps_the_length_that_it_tells_of() {
    run(async {
        let shop = Shop::open();
        let answer = |_| Response::builder().header("content-length", "17").body(Body::empty()).unwrap();
        let service = shop.layer().methods([http::Method::HEAD]).layer(answering(&shop, answer));
        let head = || request("HEAD", "/", &[("idempotency-key", "abc")], "");
        let first = Told::of(service.clone().oneshot(head()).await.unwrap()).await;
        let retry = Told::of(service.oneshot(head()).await.unwrap()).await;
        assert_eq!(retry.header("content-length"), "17");
        retry.assert_replays(&first);
    });
}

#[test]
fn of_an_answer_over_the_limit_a_retry_is_told_that_its_body_was_not_kept() {
    run(async {
        let long = "0123456789abcdef";
        for known_length in [true, false] {
            let shop = Shop::open();
            let answer = move |_| {
                let body =
                    if known_length { Body::from(long) } else { in_pieces([&long[..7], &long[7..]].map(Piece::Data)) };
                let mut response = Response::builder()
                    .status(201)
                    .header("content-type", "text/plain")
                    .header("location", "/reports/17")
                    .body(body)
                    .unwrap();
                response.extensions_mut().insert(Reference("report 17".to_owned()));
                response
            };
            let layer = shop.layer().response_bytes_max(long.len() - 1);
            let runs = layer.runs();
            let service = layer.layer(answering(&shop, answer));
            let first = Told::of(service.clone().oneshot(post("/", "abc")).await.unwrap()).await;
            assert_eq!((first.status, first.text(), first.header("content-type")), (201, long, "text/plain"));
            runs.drained().await;
            let retry = Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await;
            retry.assert_problem(201, "ResponseNotKept");
            assert!(retry.is_replay());
            assert_eq!(retry.header("location"), "/reports/17");
            let document: serde_json::Value = serde_json::from_slice(&retry.body).unwrap();
            assert_eq!(document["reference"], "report 17");
            assert_eq!(shop.work.effects(), 1);
        }
    });
}

#[test]
fn an_answer_at_the_limit_is_kept_and_one_over_the_stores_own_limit_is_not() {
    run(async {
        let at_limit = "0123456789";
        let shop = Shop::open();
        let answer = move |_| Response::new(Body::from(at_limit));
        let service = shop.layer().response_bytes_max(at_limit.len()).layer(answering(&shop, answer));
        let first = Told::of(service.clone().oneshot(post("/", "abc")).await.unwrap()).await;
        Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await.assert_replays(&first);

        let small = Shop::open_with(Options::new().response_bytes_max(100));
        let [first, retry] = twice(&small, |_| Response::new(Body::from("x".repeat(200)))).await;
        assert_eq!((first.status, first.body.len()), (200, 200));
        retry.assert_problem(200, "ResponseNotKept");
        // Not even the header lines have room.
        let smallest = Shop::open_with(Options::new().response_bytes_max(10));
        let [first, retry] = twice(&smallest, |_| {
            Response::builder().status(202).header("x-long", "x".repeat(200)).body(Body::from("body")).unwrap()
        })
        .await;
        assert_eq!((first.status, first.text()), (202, "body"));
        retry.assert_problem(202, "ResponseNotKept");
        assert_eq!(small.work.effects() + smallest.work.effects(), 2);
    });
}

#[test]
fn a_stream_is_passed_on_as_it_comes_and_done_at_its_end() {
    run(async {
        let shop = Shop::open();
        let (events, told) = tokio::sync::mpsc::channel(4);
        let told = std::sync::Mutex::new(Some(told));
        let answer = move |_| {
            let body = Events(told.lock().unwrap().take().unwrap());
            Response::builder().header("content-type", "text/event-stream").body(Body::new(body)).unwrap()
        };
        let layer = shop.layer();
        let runs = layer.runs();
        let service = layer.layer(answering(&shop, answer));
        let response = service.clone().oneshot(post("/", "abc")).await.unwrap();
        let mut body = response.into_body();
        events.send("data: 1\n\n").await.unwrap();
        let frame = http_body_util::BodyExt::frame(&mut body).await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), "data: 1\n\n");
        Told::of(service.clone().oneshot(post("/", "abc")).await.unwrap()).await.assert_problem(409, "InFlight");
        // The client hangs up; the stream goes on to its end.
        drop(body);
        for _ in 0..20 {
            events.send("data: 2\n\n").await.unwrap();
        }
        drop(events);
        runs.drained().await;
        let retry = Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await;
        retry.assert_problem(200, "ResponseNotKept");
        assert_eq!(shop.work.effects(), 1);
    });
}

#[test]
fn a_client_that_takes_no_frame_for_a_lease_counts_as_gone_and_never_takes_its_answer_for_whole() {
    run_with_timers_that_jump(async {
        let shop = Shop::open();
        let answer = |_| Response::new(in_pieces([Piece::Data("0123456789"); 20]));
        let layer = shop.layer().lease(Duration::from_secs(10)).response_bytes_max(5);
        let runs = layer.runs();
        let service = layer.layer(answering(&shop, answer));
        let mut body = service.clone().oneshot(post("/", "abc")).await.unwrap().into_body();
        // It reads slowly, and then not at all.
        let mut heard = 0;
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_millis(9_900)).await;
            heard += http_body_util::BodyExt::frame(&mut body).await.unwrap().unwrap().into_data().unwrap().len();
        }
        Told::of(service.clone().oneshot(post("/", "abc")).await.unwrap()).await.assert_problem(409, "InFlight");
        tokio::time::timeout(Duration::from_millis(10_100), runs.drained()).await.expect("the run ends");
        Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await.assert_problem(200, "ResponseNotKept");
        let broke_off = loop {
            match http_body_util::BodyExt::frame(&mut body).await {
                Some(Ok(frame)) => heard += frame.into_data().unwrap().len(),
                Some(Err(_)) => break true,
                None => break false,
            }
        };
        assert!(broke_off && heard < 200, "heard {heard} of 200 bytes, broke off: {broke_off}");
    });
}

#[test]
fn a_stream_that_nobody_listens_to_is_dropped_when_it_may_not_run_any_longer() {
    for silent in [true, false] {
        run_with_timers_that_jump(async move {
            let shop = Shop::open();
            let (events, told) = tokio::sync::mpsc::channel(1);
            let told = std::sync::Mutex::new(Some(told));
            let answer = move |_| {
                let body = Events(told.lock().unwrap().take().unwrap());
                Response::builder().header("content-type", "text/event-stream").body(Body::new(body)).unwrap()
            };
            let layer = shop.layer().run_at_most(Duration::from_secs(600));
            let runs = layer.runs();
            let service = layer.layer(answering(&shop, answer));
            let response = service.clone().oneshot(post("/", "abc")).await.unwrap();
            let telling = events.clone();
            let endless = tokio::spawn(async move {
                while !silent && telling.send("data: 1\n\n").await.is_ok() {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            });
            tokio::time::sleep(Duration::from_secs(10)).await;
            drop(response);
            assert!(tokio::time::timeout(Duration::from_secs(580), runs.drained()).await.is_err());
            Told::of(service.clone().oneshot(post("/", "abc")).await.unwrap()).await.assert_problem(409, "InFlight");
            tokio::time::timeout(Duration::from_secs(20), runs.drained()).await.expect("the run ends");
            events.closed().await;
            endless.await.unwrap();
            Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await.assert_problem(409, "Interrupted");
        });
    }
}

/// A body of events as they come.
pub(super) struct Events(pub(super) tokio::sync::mpsc::Receiver<&'static str>);

impl http_body::Body for Events {
    type Data = bytes::Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|event| event.map(|event| Ok(http_body::Frame::data(event.into()))))
    }
}

#[test]
fn a_body_that_breaks_off_breaks_off_for_the_client_and_leaves_the_key_interrupted() {
    run(async {
        for bytes_max in [100, 3] {
            let shop = Shop::open();
            let answer = |_| Response::new(in_pieces([Piece::Data("half of it"), Piece::Broken]));
            let layer = shop.layer().response_bytes_max(bytes_max);
            let runs = layer.runs();
            let service = layer.layer(answering(&shop, answer));
            let response = service.clone().oneshot(post("/", "abc")).await.unwrap();
            assert!(http_body_util::BodyExt::collect(response.into_body()).await.is_err());
            runs.drained().await;
            Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await.assert_problem(409, "Interrupted");
            assert_eq!(shop.work.effects(), 1);
        }
    });
}

#[test]
fn a_stream_whose_maker_panics_is_never_taken_for_one_that_is_whole() {
    run(async {
        let shop = Shop::open();
        let answer = |_| Response::new(in_pieces([Piece::Data("half of it"), Piece::Panic]));
        let layer = shop.layer().streams(|_| true);
        let runs = layer.runs();
        let service = layer.layer(answering(&shop, answer));
        let response = service.clone().oneshot(post("/", "abc")).await.unwrap();
        assert!(http_body_util::BodyExt::collect(response.into_body()).await.is_err());
        runs.drained().await;
        Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await.assert_problem(409, "Interrupted");
    });
}

#[test]
fn a_protocol_switch_is_done_when_it_is_switched() {
    run(async {
        let shop = Shop::open();
        let [first, retry] = twice(&shop, |_| {
            let switched = Response::builder().status(101).header("upgrade", "chat").header("connection", "upgrade");
            switched.body(Body::empty()).unwrap()
        })
        .await;
        assert_eq!((first.status, first.header("upgrade")), (101, "chat"));
        retry.assert_problem(409, "ResponseNotKept");
        assert_eq!(shop.work.effects(), 1);
    });
}

#[test]
fn refusals_from_before_the_work_give_the_key_back_and_all_other_answers_are_final() {
    run(async {
        for status in 200..600 {
            let released = [401, 403, 408, 413, 415, 422, 429].contains(&status);
            let shop = Shop::open();
            let routes = shop.routes();
            let path = format!("/status/{status}");
            let first = send(&routes, post(&path, "abc")).await;
            let retry = send(&routes, post(&path, "abc")).await;
            assert_eq!((first.status, retry.status), (status, status));
            assert_eq!(shop.work.effects(), if released { 2 } else { 1 }, "{status}");
            assert_eq!(retry.is_replay(), !released);
        }
    });
}

#[test]
fn a_function_of_the_head_and_the_handler_itself_may_say_otherwise() {
    run(async {
        let shop = Shop::open();
        let by = |verdict| {
            shop.routes_with(
                shop.layer().verdict(
                    move |head| {
                        if head.status.is_server_error() { verdict } else { Verdict::by_head(head) }
                    },
                ),
            )
        };
        let release = by(Verdict::Release);
        for charge in ["charge 1", "charge 2"] {
            assert_eq!(send(&release, post("/status/503", "a")).await.text(), charge);
        }
        let interrupt = by(Verdict::Interrupt);
        assert_eq!(send(&interrupt, post("/status/503", "b")).await.text(), "charge 3");
        send(&interrupt, post("/status/503", "b")).await.assert_problem(409, "Interrupted");

        let answer = |_| {
            let mut response = Response::builder().status(402).body(Body::from("declined")).unwrap();
            response.extensions_mut().insert(Verdict::Release);
            response
        };
        let service = shop.layer().layer(answering(&shop, answer));
        for _ in 0..2 {
            let told = Told::of(service.clone().oneshot(post("/", "c")).await.unwrap()).await;
            assert_eq!((told.text(), told.is_replay()), ("declined", false));
        }
        assert_eq!(shop.work.effects(), 5);
    });
}

#[test]
fn a_body_that_the_handler_does_not_want_stored_is_not_on_the_disk() {
    run(async {
        let shop = Shop::open();
        let [first, retry] = twice(&shop, |_| {
            let mut response = Response::new(Body::from("the-secret-itself"));
            response.extensions_mut().insert(Verdict::KeepWithoutBody);
            response
        })
        .await;
        assert_eq!(first.text(), "the-secret-itself");
        retry.assert_problem(200, "ResponseNotKept");
        assert!(!is_on_disk(&shop, "the-secret-itself"));
    });
}

#[test]
fn an_answer_is_cleaned_before_it_is_stored_and_not_for_the_first_client() {
    run(async {
        let shop = Shop::open();
        let layer = shop.layer().clean(|answer| {
            answer.body = "card ****".into();
            answer.headers.remove("x-card");
        });
        let answer =
            |_| Response::builder().header("x-card", "4242-header").body(Body::from("card 4242-body")).unwrap();
        let service = layer.layer(answering(&shop, answer));
        let first = Told::of(service.clone().oneshot(post("/", "abc")).await.unwrap()).await;
        assert_eq!((first.text(), first.header("x-card")), ("card 4242-body", "4242-header"));
        let retry = Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await;
        assert_eq!((retry.text(), retry.header("x-card"), retry.is_replay()), ("card ****", "", true));
        assert!(!is_on_disk(&shop, "4242-"));
    });
}

#[test]
fn a_replay_may_be_refused_to_who_has_lost_the_right_to_it() {
    run(async {
        let shop = Shop::open();
        let layer = shop.layer().may_replay(|request, key| match (request.headers.get("x-role"), key.id()) {
            (Some(role), b"abc") if role == "clerk" => Ok(()),
            _ => Err(StatusCode::FORBIDDEN),
        });
        let routes = shop.routes_with(layer);
        let by = |role| request("POST", "/charges", &[("idempotency-key", "abc"), ("x-role", role)], "");
        let first = send(&routes, by("clerk")).await;
        let refused = send(&routes, by("guest")).await;
        refused.assert_problem(403, "ReplayRefused");
        assert!(!refused.text().contains("charge 1"));
        send(&routes, by("clerk")).await.assert_replays(&first);
        assert_eq!(shop.work.effects(), 1);
    });
}

#[test]
fn the_first_answer_and_the_replay_tell_until_when_the_answer_is_remembered_if_they_are_to() {
    run(async {
        let shop = Shop::open();
        let layer = shop
            .layer()
            .retention(std::time::Duration::from_secs(3600))
            .expires_header(HeaderName::from_static("idempotency-expires"));
        let routes = shop.routes_with(layer);
        let first = send(&routes, post("/charges", "abc")).await;
        assert_eq!(first.header("idempotency-expires"), "Tue, 14 Nov 2023 23:13:20 GMT");
        shop.clock.advance(std::time::Duration::from_secs(1800));
        send(&routes, post("/charges", "abc")).await.assert_replays(&first);
        shop.clock.advance(std::time::Duration::from_secs(1800));
        assert_eq!(send(&routes, post("/charges", "abc")).await.text(), "charge 2", "forgotten");
        assert_eq!(send(&shop.routes(), post("/charges", "b")).await.header("idempotency-expires"), "");
    });
}

#[test]
fn what_is_stored_is_the_form_that_others_can_read_and_write() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes();
        assert_eq!(send(&routes, post("/charges", "abc")).await.status, 201);
        let key = keyonce::Key::new("shop", "abc").unwrap();
        let fingerprint = shop.store.peek(&key).unwrap().unwrap().fingerprint;
        let Reserve::Replay(kept) = shop.store.reserve(&key, fingerprint).unwrap() else { panic!("it is done") };
        let Stored::Kept(bytes) = kept.body() else { panic!("the body was kept") };
        let answer = keyonce::http::Answer::from_bytes(bytes).unwrap();
        assert_eq!((answer.status, &*answer.body), (StatusCode::CREATED, b"charge 1".as_slice()));
    });
}

#[test]
fn an_answer_that_is_cleaned_is_replayed_with_the_length_that_it_has() {
    run(async {
        let shop = Shop::open();
        let layer = shop.layer().clean(|answer| answer.body = "card ****".into());
        let answer = |_| {
            let response = Response::builder().header("content-length", "14").header("x-a", "1").header("x-b", "2");
            response.body(Body::from("card 4242-body")).unwrap()
        };
        let service = layer.layer(answering(&shop, answer));
        let first = Told::of(service.clone().oneshot(post("/", "abc")).await.unwrap()).await;
        assert_eq!((first.text(), first.header("content-length")), ("card 4242-body", "14"));
        let retry = Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await;
        assert_eq!((retry.text(), retry.header("content-length")), ("card ****", ""));
        let names: Vec<_> = retry.headers.keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["x-a", "x-b", "idempotency-replayed"]);
    });
}

#[test]
fn a_protocol_switch_is_never_replayed_whatever_the_verdict() {
    run(async {
        let shop = Shop::open();
        let answer = |_| Response::builder().status(101).header("upgrade", "chat").body(Body::empty()).unwrap();
        let service = shop.layer().verdict(|_| Verdict::Keep).layer(answering(&shop, answer));
        assert_eq!(Told::of(service.clone().oneshot(post("/", "abc")).await.unwrap()).await.status, 101);
        Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await.assert_problem(409, "ResponseNotKept");
    });
}

#[test]
fn an_answer_that_has_no_body_is_replayed_also_where_the_body_was_not_to_be_kept() {
    run(async {
        for status in [200, 204, 205, 304] {
            let shop = Shop::open();
            let answer = move |_| {
                let mut response = Response::builder().status(status).header("etag", "1").body(Body::empty()).unwrap();
                response.extensions_mut().insert(Verdict::KeepWithoutBody);
                response
            };
            let [first, retry] = twice(&shop, answer).await;
            retry.assert_replays(&first);
        }
    });
}

#[test]
fn a_status_that_has_no_content_is_told_without_a_document_where_nothing_was_kept() {
    run(async {
        let shop = Shop::open_with(Options::new().response_bytes_max(40));
        let answer = |_| {
            let response = Response::builder().status(204).header("x-long", "x".repeat(30));
            response.body(Body::empty()).unwrap()
        };
        let [first, retry] = twice(&shop, answer).await;
        assert_eq!((first.status, retry.status, retry.text(), retry.header("content-type")), (204, 204, "", ""));
        assert!(retry.is_replay());
    });
}

#[test]
fn what_tells_of_a_body_is_not_told_of_the_document_in_its_place() {
    run(async {
        let shop = Shop::open();
        let [first, retry] = twice(&shop, |_| {
            let response = Response::builder().header("content-digest", "sha-256=:AA==:").header("x-kept", "1");
            let response = response.header("content-disposition", "attachment").header("content-language", "fr");
            let response = response.header("cache-control", "max-age=60");
            let mut response = response.body(Body::from("un secret")).unwrap();
            response.extensions_mut().insert(Verdict::KeepWithoutBody);
            response
        })
        .await;
        assert_eq!(first.headers.len(), 5);
        retry.assert_problem(200, "ResponseNotKept");
        for gone in ["content-digest", "content-disposition", "content-language"] {
            assert_eq!(retry.header(gone), "", "{gone}");
        }
        let cache = retry.headers.get_all("cache-control").iter();
        assert_eq!(cache.collect::<Vec<_>>(), ["no-store"]);
        assert_eq!(retry.header("x-kept"), "1");
    });
}

#[test]
fn of_an_answer_over_the_limit_nobody_has_the_last_byte_before_it_is_done() {
    run(async {
        for known_length in [true, false] {
            let shop = Shop::open();
            let answer = move |_| {
                let frames = ["0123456789", "0123456789"].into();
                Response::builder()
                    .header("content-length", "20")
                    .body(Body::new(Ends { frames, known_length }))
                    .unwrap()
            };
            let service = shop.layer().response_bytes_max(5).layer(answering(&shop, answer));
            let mut body = service.oneshot(post("/", "abc")).await.unwrap().into_body();
            // The store is closed before the body has come to its end: the frames waiting are read after it.
            shop.store.close(std::time::Duration::ZERO).unwrap();
            let mut heard = 0;
            let broke_off = loop {
                match http_body_util::BodyExt::frame(&mut body).await {
                    Some(Ok(frame)) => heard += frame.into_data().unwrap().len(),
                    Some(Err(_)) => break true,
                    None => break false,
                }
            };
            assert!(heard < 20 && broke_off, "heard {heard} of 20 bytes, broke off: {broke_off}");
        }
    });
}

/// A body that knows when it is at its end, or how long it is; its last frame is late.
struct Ends {
    frames: std::collections::VecDeque<&'static str>,
    known_length: bool,
}

impl http_body::Body for Ends {
    type Data = bytes::Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, Infallible>>> {
        // Time enough for the test to close the store.
        if self.frames.len() == 1 {
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        std::task::Poll::Ready(self.frames.pop_front().map(|frame| Ok(http_body::Frame::data(frame.into()))))
    }

    fn is_end_stream(&self) -> bool {
        !self.known_length && self.frames.is_empty()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        let left = self.frames.iter().map(|frame| frame.len() as u64).sum();
        if self.known_length { http_body::SizeHint::with_exact(left) } else { http_body::SizeHint::default() }
    }
}

#[test]
fn of_an_answer_over_the_limit_no_more_is_held_than_the_limit_and_a_few_frames() {
    run(async {
        let shop = Shop::open();
        let asked = Arc::new(AtomicU32::new(0));
        let answer = {
            let asked = Arc::clone(&asked);
            move |_| Response::new(Long::body(&asked))
        };
        let layer = shop.layer().response_bytes_max(100);
        let runs = layer.runs();
        let service = layer.layer(answering(&shop, answer));
        let response = service.clone().oneshot(post("/", "abc")).await.unwrap();
        // The client does not read.
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        let held = asked.load(Ordering::SeqCst);
        assert!((11..=17).contains(&held), "{held} frames");
        Told::of(service.clone().oneshot(post("/", "abc")).await.unwrap()).await.assert_problem(409, "InFlight");
        assert_eq!(Told::of(response).await.body.len(), Long::BYTES);
        runs.drained().await;
        let retry = Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await;
        retry.assert_problem(200, "ResponseNotKept");
    });
}

//! The run of a request: seen by a second one, left by its client, dropped at any moment, in panic, beyond its lease.

use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::header::RETRY_AFTER;
use keyonce::http::{IdempotencyLayer, Verdict};
use keyonce::{Attempt, OnDrop, OnInterrupted, Options};
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service, ServiceExt};

use super::scene::{Piece, Shop, Told, in_pieces, post, request, run, run_with_timers_that_jump, send};

/// Sends a slow request, and is back when it is at work.
async fn begin_slow(shop: &Shop, routes: &axum::Router) -> tokio::task::JoinHandle<Told> {
    let routes = routes.clone();
    let sending = tokio::spawn(async move { send(&routes, post("/slow", "abc")).await });
    shop.work.has_begun().await;
    sending
}

#[test]
fn a_second_request_while_the_first_runs_is_told_when_to_come_back() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes_with(shop.layer().lease(Duration::from_secs(30)).run_at_most(Duration::from_secs(35)));
        let first = begin_slow(&shop, &routes).await;
        let told = send(&routes, post("/slow", "abc")).await;
        told.assert_problem(409, "InFlight");
        assert_eq!(told.headers[RETRY_AFTER], "30");
        shop.clock.advance(Duration::from_millis(9_500));
        assert_eq!(send(&routes, post("/slow", "abc")).await.headers[RETRY_AFTER], "26", "it may run for 25.5 s more");
        shop.work.go_on.notify_one();
        let first = first.await.unwrap();
        send(&routes, post("/slow", "abc")).await.assert_replays(&first);
        assert_eq!(shop.work.effects(), 1);
    });
}

#[test]
fn a_second_request_that_may_wait_is_told_the_answer_of_the_first() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes_with(shop.layer().wait(Duration::from_secs(5)));
        let first = begin_slow(&shop, &routes).await;
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let routes = routes.clone();
                tokio::spawn(async move { send(&routes, post("/slow", "abc")).await })
            })
            .collect();
        while shop.store.stats().waiting < 3 {
            tokio::task::yield_now().await;
        }
        shop.work.go_on.notify_one();
        let first = first.await.unwrap();
        for waiting in waiting {
            waiting.await.unwrap().assert_replays(&first);
        }
    });
}

#[test]
fn a_second_request_that_has_waited_long_enough_is_told_when_to_come_back() {
    run(async {
        let shop = Shop::open();
        let routes = shop.routes_with(shop.layer().wait(Duration::from_secs(5)));
        let first = begin_slow(&shop, &routes).await;
        let waiting = tokio::spawn({
            let routes = routes.clone();
            async move { send(&routes, post("/slow", "abc")).await }
        });
        while shop.store.stats().waiting < 1 {
            tokio::task::yield_now().await;
        }
        shop.clock.advance(Duration::from_secs(5));
        waiting.await.unwrap().assert_problem(409, "InFlight");
        shop.work.go_on.notify_one();
        assert_eq!(first.await.unwrap().status, 200);
    });
}

#[test]
fn a_client_that_hangs_up_neither_ends_the_work_nor_frees_the_key() {
    run(async {
        let shop = Shop::open();
        let layer = shop.layer().wait(Duration::from_secs(60));
        let runs = layer.runs();
        let routes = shop.routes_with(layer);
        let first = begin_slow(&shop, &routes).await;
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        assert_eq!(runs.running(), 1);
        shop.work.go_on.notify_one();
        let told = send(&routes, post("/slow", "abc")).await;
        assert_eq!((told.text(), told.is_replay()), ("charge 1", true));
        runs.drained().await;
        assert_eq!((runs.running(), shop.work.effects()), (0, 1));
    });
}

#[test]
fn a_request_dropped_after_any_number_of_polls_has_at_most_one_effect_and_its_retry_the_same_one() {
    // On one thread, so that whoever yields lets the run go on.
    run_with_timers_that_jump(async {
        let mut ready_after = None;
        for polls in 0..50 {
            let shop = Shop::open();
            let work = shop.work.clone();
            let layer = shop.layer().wait(Duration::from_secs(60));
            let runs = layer.runs();
            // A handler that is polled several times, and has its effect in the middle.
            let handler = tower::service_fn(move |_: http::Request<_>| {
                let work = work.clone();
                async move {
                    tokio::task::yield_now().await;
                    let charge = work.effect();
                    tokio::task::yield_now().await;
                    Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Full::new(
                        bytes::Bytes::from(format!("charge {charge}")),
                    )))
                }
            });
            let service = layer.layer(handler);
            let mut request = Box::pin(service.clone().oneshot(post("/", "abc")));
            let mut context = Context::from_waker(Waker::noop());
            for _ in 0..polls {
                if request.as_mut().poll(&mut context).is_ready() {
                    ready_after.get_or_insert(polls);
                    break;
                }
                tokio::task::yield_now().await;
            }
            drop(request);
            runs.drained().await;
            assert!(shop.work.effects() <= 1);
            let retry = Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await;
            assert_eq!((retry.status, retry.text()), (200, "charge 1"), "after {polls} polls");
            assert_eq!(shop.work.effects(), 1, "after {polls} polls");
        }
        assert!(ready_after.is_some(), "fifty polls were not enough to see one through");
    });
}

#[test]
fn a_panic_comes_out_as_without_the_layer_and_leaves_the_key_interrupted() {
    run(async {
        let shop = Shop::open();
        let work = shop.work.clone();
        let handler = tower::service_fn(move |_: http::Request<_>| {
            work.effect();
            let panics = true;
            async move {
                assert!(!panics, "the handler is at its end");
                Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Empty::<bytes::Bytes>::new()))
            }
        });
        let service = shop.layer().layer(handler);
        let first = tokio::spawn(service.clone().oneshot(post("/", "abc")));
        let panic = first.await.unwrap_err().into_panic();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"the handler is at its end"));
        Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await.assert_problem(409, "Interrupted");
        assert_eq!(shop.work.effects(), 1);
    });
}

#[test]
fn a_run_that_ends_without_an_answer_is_interrupted_also_where_the_store_would_give_the_key_back() {
    run(async {
        let options = Options::new().on_drop(OnDrop::Release).on_interrupted(OnInterrupted::TakeOver);
        let shop = Shop::open_with(options);
        let handler = tower::service_fn(move |_: http::Request<_>| async move {
            let panics = true;
            assert!(!panics, "the handler is at its end");
            Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Empty::<bytes::Bytes>::new()))
        });
        let service = shop.layer().layer(handler);
        assert!(tokio::spawn(service.clone().oneshot(post("/", "abc"))).await.unwrap_err().is_panic());
        Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await.assert_problem(409, "Interrupted");
    });
}

#[test]
fn an_error_of_the_inner_service_comes_out_and_leaves_the_key_interrupted() {
    run(async {
        let shop = Shop::open();
        let handler = tower::service_fn(move |_: http::Request<_>| async move {
            Err::<http::Response<http_body_util::Empty<bytes::Bytes>>, _>("the service behind it is gone")
        });
        let service = shop.layer().layer(handler);
        let error = service.clone().oneshot(post("/", "abc")).await.map(drop).unwrap_err();
        assert_eq!(error, "the service behind it is gone");
        Told::of(service.oneshot(post("/", "abc")).await.unwrap()).await.assert_problem(409, "Interrupted");
    });
}

#[test]
fn a_lease_is_renewed_while_the_request_runs_and_no_longer_than_it_may() {
    run_with_timers_that_jump(async {
        let shop = Shop::open();
        let lease = Duration::from_secs(10);
        let routes = shop.routes_with(shop.layer().lease(lease).run_at_most(Duration::from_secs(60)));
        let first = begin_slow(&shop, &routes).await;
        // Both clocks move, the store's by hand, the runtime's by sleeping.
        let pass = async |time: Duration| {
            for _ in 0..time.as_secs() {
                shop.clock.advance(Duration::from_secs(1));
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        pass(Duration::from_secs(50)).await;
        send(&routes, post("/slow", "abc")).await.assert_problem(409, "InFlight");
        pass(Duration::from_secs(40)).await;
        send(&routes, post("/slow", "abc")).await.assert_problem(409, "Interrupted");
        shop.work.go_on.notify_one();
        let first = first.await.unwrap();
        assert_eq!(first.text(), "charge 1", "nobody took over, so the late answer counts");
        send(&routes, post("/slow", "abc")).await.assert_replays(&first);
    });
}

#[test]
fn a_handler_that_blocks_its_thread_for_longer_than_the_lease_is_still_running() {
    run(async {
        let shop = Shop::open();
        let lease = Duration::from_secs(10);
        let clock = shop.clock.clone();
        let routes = shop.routes_with(shop.layer().lease(lease));
        let retry = Arc::new(std::sync::OnceLock::<axum::Router>::new());
        let inner = Arc::clone(&retry);
        let handler = tower::service_fn(move |_: http::Request<_>| {
            let (clock, retry) = (clock.clone(), Arc::clone(&inner));
            async move {
                // In the very first poll, with whatever could renew the lease on other threads.
                let told = tokio::task::block_in_place(|| {
                    clock.advance(lease * 100);
                    let retry = retry.get().unwrap();
                    tokio::runtime::Handle::current().block_on(send(retry, post("/charges", "abc")))
                });
                Ok::<_, std::convert::Infallible>(http::Response::new(axum::body::Body::from(told.body)))
            }
        });
        retry.set(routes).unwrap();
        let service = shop.layer().lease(lease).layer(handler);
        let told = Told::of(service.oneshot(post("/charges", "abc")).await.unwrap()).await;
        assert!(told.text().contains("#variant.InFlight"), "{}", told.text());
    });
}

#[test]
fn the_handler_finds_the_attempt_and_the_key_to_send_along() {
    run(async {
        let shop = Shop::open();
        let handler = tower::service_fn(move |request: http::Request<_>| async move {
            let attempt: &Attempt = request.extensions().get().unwrap();
            let told = format!("{} {} {}", attempt.number(), attempt.token(), attempt.downstream_key("charge"));
            let _done = attempt.save_checkpoint_async(b"asked the bank").await.unwrap();
            let mut response = http::Response::new(http_body_util::Full::new(bytes::Bytes::from(told)));
            response.extensions_mut().insert(Verdict::Interrupt);
            Ok::<_, std::convert::Infallible>(response)
        });
        let service = shop.layer().take_over().layer(handler);
        let key = keyonce::Key::new("shop", "abc").unwrap();
        let mut tokens = Vec::new();
        for number in ["1", "2", "3"] {
            let told = Told::of(service.clone().oneshot(post("/", "abc")).await.unwrap()).await;
            let words: Vec<_> = told.text().split(' ').collect();
            assert_eq!((words[0], words[2]), (number, key.downstream_key("charge").as_str()));
            tokens.push(words[1].parse::<u64>().unwrap());
        }
        assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
        let info = shop.store.peek(&key).unwrap().unwrap();
        assert_eq!(&*info.checkpoint, b"asked the bank");
    });
}

/// A service that must be asked whether it is ready, each clone for itself.
struct Careful {
    ready: bool,
    effects: Arc<std::sync::atomic::AtomicU32>,
}

impl Clone for Careful {
    fn clone(&self) -> Self {
        Self { ready: false, effects: Arc::clone(&self.effects) }
    }
}

impl<B> Service<http::Request<B>> for Careful {
    type Response = http::Response<http_body_util::Empty<bytes::Bytes>>;
    type Error = std::convert::Infallible;
    type Future = std::future::Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<B>) -> Self::Future {
        assert!(std::mem::take(&mut self.ready), "it was not asked whether it is ready");
        self.effects.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        std::future::ready(Ok(http::Response::new(http_body_util::Empty::new())))
    }
}

#[test]
fn the_service_that_said_it_is_ready_is_the_one_that_is_called() {
    run(async {
        let shop = Shop::open();
        let careful = Careful { ready: false, effects: Arc::default() };
        let mut service = shop.layer().layer(careful.clone());
        for (method, key) in [("POST", "a"), ("POST", "b"), ("GET", "a"), ("POST", "a")] {
            let request = request(method, "/", &[("idempotency-key", key)], "");
            ServiceExt::<axum::extract::Request>::ready(&mut service).await.unwrap().call(request).await.unwrap();
        }
        assert_eq!(careful.effects.load(std::sync::atomic::Ordering::SeqCst), 3);
    });
}

#[test]
fn a_retry_that_waits_keeps_nobody_else_from_being_served_and_asks_again_before_it_runs() {
    run(async {
        let shop = Shop::open();
        let work = shop.work.clone();
        let handler = tower::service_fn(move |request: http::Request<_>| {
            let work = work.clone();
            async move {
                if request.uri().path() == "/slow" {
                    work.begun.add_permits(1);
                    work.go_on.notified().await;
                }
                let charge = work.effect();
                let mut response = http::Response::new(axum::body::Body::from(format!("charge {charge}")));
                if charge == 2 {
                    response.extensions_mut().insert(Verdict::Release);
                }
                Ok::<_, std::convert::Infallible>(response)
            }
        });
        let layer = shop.layer().wait(Duration::from_secs(60));
        let service = layer.layer(ConcurrencyLimit::new(handler, 2));
        let sent = |path, key| {
            let sending = service.clone().oneshot(post(path, key));
            tokio::spawn(async move { Told::of(sending.await.unwrap()).await })
        };
        let first = sent("/slow", "abc");
        shop.work.has_begun().await;
        let retry = sent("/slow", "abc");
        while shop.store.stats().waiting < 1 {
            tokio::task::yield_now().await;
        }
        let other = tokio::time::timeout(Duration::from_secs(20), sent("/charges", "other")).await;
        assert_eq!(other.expect("nobody is in its way").unwrap().text(), "charge 1");
        // Nothing came of the first one, so the retry runs.
        shop.work.go_on.notify_one();
        assert_eq!(first.await.unwrap().text(), "charge 2");
        shop.work.has_begun().await;
        shop.work.go_on.notify_one();
        let retry = retry.await.unwrap();
        assert_eq!((retry.text(), retry.is_replay()), ("charge 3", false));
    });
}

#[test]
fn a_service_that_is_not_ready_for_who_has_waited_gives_the_key_back() {
    run(async {
        let shop = Shop::open();
        let key = keyonce::Key::new("shop", "abc").unwrap();
        let service = shop.layer().wait(Duration::from_secs(60)).layer(Gone { clone: false });
        let fingerprint = keyonce::http::Recipe::new().fingerprint(&post("/", "abc").into_parts().0, b"amount=999");
        let keyonce::Reserve::Fresh(first) = shop.store.reserve(&key, fingerprint).unwrap() else {
            panic!("it is free")
        };
        let retry = tokio::spawn(service.oneshot(post("/", "abc")));
        while shop.store.stats().waiting < 1 {
            tokio::task::yield_now().await;
        }
        let _free = first.release().unwrap();
        assert_eq!(retry.await.unwrap().map(drop).unwrap_err(), "the service behind it is gone");
        assert!(shop.store.peek(&key).unwrap().is_none(), "nothing has begun");
    });
}

/// A service that was there once: its clones are not ready.
struct Gone {
    clone: bool,
}

impl Clone for Gone {
    fn clone(&self) -> Self {
        Self { clone: true }
    }
}

impl<B> Service<http::Request<B>> for Gone {
    type Response = http::Response<http_body_util::Empty<bytes::Bytes>>;
    type Error = &'static str;
    type Future = std::future::Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(if self.clone { Err("the service behind it is gone") } else { Ok(()) })
    }

    fn call(&mut self, _: http::Request<B>) -> Self::Future {
        std::future::ready(Ok(http::Response::new(http_body_util::Empty::new())))
    }
}

#[test]
fn a_thousand_requests_at_once_under_a_hundred_keys_have_a_hundred_effects() {
    run(async {
        let shop = Shop::open_with(Options::new().lease(Duration::from_secs(600)));
        let routes = shop.routes_with(shop.layer().wait(Duration::from_secs(600)));
        let sending: Vec<_> = (0..1000)
            .map(|number| {
                let routes = routes.clone();
                tokio::spawn(async move { send(&routes, post("/charges", &format!("key-{}", number % 100))).await })
            })
            .collect();
        let mut answers: Vec<Vec<Told>> = (0..100).map(|_| Vec::new()).collect();
        for (number, told) in sending.into_iter().enumerate() {
            answers[number % 100].push(told.await.unwrap());
        }
        for of_one_key in answers {
            assert_eq!(of_one_key.iter().filter(|told| !told.is_replay()).count(), 1);
            assert!(of_one_key.iter().all(|told| told.status == 201 && told.body == of_one_key[0].body));
        }
        assert_eq!(shop.work.effects(), 100);
    });
}

#[test]
fn of_two_layers_on_one_route_the_outer_one_guards_it() {
    run(async {
        let shop = Shop::open();
        // The inner one would wait for itself, and takes other requests for the same.
        let inner = shop.layer().wait(Duration::from_secs(600)).recipe(keyonce::http::Recipe::new().without_path());
        let routes = shop.routes_with(inner).layer(shop.layer());
        let first = send(&routes, post("/charges", "abc")).await;
        assert_eq!((first.status, first.text()), (201, "charge 1"));
        send(&routes, post("/charges", "abc")).await.assert_replays(&first);
        send(&routes, post("/refunds", "abc")).await.assert_problem(422, "Mismatch");
        // A key of another scope or of another store is another key, and each layer guards its own.
        let (accounts, other) = (IdempotencyLayer::new(shop.store.clone()).shared_scope("accounts"), Shop::open());
        for (inner, store, scope) in [(accounts, &shop.store, "accounts"), (other.layer(), &other.store, "shop")] {
            let routes = shop.routes_with(inner).layer(shop.layer());
            assert_eq!(send(&routes, post("/charges", scope)).await.status, 201);
            let inner_key = keyonce::Key::new(scope, scope).unwrap();
            assert_eq!(store.peek(&inner_key).unwrap().unwrap().state, keyonce::KeyState::Done);
        }
    });
}

#[test]
fn a_lease_is_renewed_in_time_also_where_handler_and_body_each_take_less_than_half_of_it() {
    run_with_timers_that_jump(async {
        let shop = Shop::open();
        let begun = Arc::clone(&shop.work.begun);
        let handler = tower::service_fn(move |_: http::Request<_>| {
            begun.add_permits(1);
            async move {
                tokio::time::sleep(Duration::from_secs(4)).await;
                let (frames, body) = tokio::sync::mpsc::channel(1);
                tokio::spawn(async move {
                    for _ in 0..3 {
                        tokio::time::sleep(Duration::from_secs(4)).await;
                        frames.send("0123456789").await.unwrap();
                    }
                });
                Ok::<_, std::convert::Infallible>(http::Response::new(super::answers::Events(body)))
            }
        });
        let layer = shop.layer().lease(Duration::from_secs(10)).response_bytes_max(5);
        let service = layer.layer(handler);
        let first = tokio::spawn(service.clone().oneshot(post("/", "abc")));
        shop.work.has_begun().await;
        for second in 1..=15 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            shop.clock.advance(Duration::from_secs(1));
            let told = Told::of(service.clone().oneshot(post("/", "abc")).await.unwrap()).await;
            let in_flight = told.status == 409 && told.text().contains("#variant.InFlight");
            assert!(in_flight, "after {second} s: {} {}", told.status, told.text());
        }
        Told::of(first.await.unwrap().unwrap()).await;
    });
}

#[test]
fn the_handler_is_given_the_whole_request_with_its_trailers() {
    run(async {
        let shop = Shop::open();
        let handler = tower::service_fn(|request: http::Request<keyonce::http::Body<axum::body::Body>>| async move {
            let known = request.extensions().get::<&'static str>().copied().unwrap_or_default();
            let body = http_body_util::BodyExt::collect(request.into_body()).await.unwrap();
            let trailers = body.trailers().cloned().unwrap_or_default();
            let told = format!("{known} {} {:?}", body.to_bytes().len(), trailers.get("x-checksum"));
            Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Full::new(bytes::Bytes::from(told))))
        });
        let pieces = [Piece::Data("amount="), Piece::Data("999"), Piece::Trailer("x-checksum", "7")];
        let request = http::Request::post("/").header("idempotency-key", "abc").extension("clerk");
        let told = shop.layer().layer(handler).oneshot(request.body(in_pieces(pieces)).unwrap()).await.unwrap();
        assert_eq!(Told::of(told).await.text(), "clerk 10 Some(\"7\")");
    });
}

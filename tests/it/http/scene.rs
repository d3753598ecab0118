//! A shop whose work is counted, behind the layer; and what a client is told.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use axum::routing::any;
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use http_body::Frame;
use http_body_util::BodyExt;
use keyonce::http::{IdempotencyLayer, Scoped};
use keyonce::testing::ManualClock;
use keyonce::{Attempt, Durability, Options, Store};
use tokio::sync::{Notify, Semaphore};
use tower::ServiceExt;

/// Some moment in 2023.
pub(super) const WALL_MS: u64 = 1_700_000_000_000;

/// Runs a test on a runtime of several threads, with a bound on how long it may hang.
pub(super) fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(120), test).await.expect("the test hangs");
    });
}

/// Runs a test on one thread whose timers go on when everything waits.
pub(super) fn run_with_timers_that_jump(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(test);
}

/// What the handlers share.
#[derive(Clone)]
pub(super) struct Work {
    /// How often the work was done.
    pub(super) effects: Arc<AtomicU32>,
    /// Told when slow work has begun.
    pub(super) begun: Arc<Semaphore>,
    /// Lets slow work go on.
    pub(super) go_on: Arc<Notify>,
}

impl Work {
    pub(super) fn effects(&self) -> u32 {
        self.effects.load(Ordering::SeqCst)
    }

    pub(super) fn effect(&self) -> u32 {
        self.effects.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Waits until one more slow request is at work.
    pub(super) async fn has_begun(&self) {
        self.begun.acquire().await.unwrap().forget();
    }
}

/// A store and what is done behind it.
pub(super) struct Shop {
    pub(super) store: Store,
    pub(super) clock: Arc<ManualClock>,
    pub(super) work: Work,
    pub(super) dir: tempfile::TempDir,
}

impl Shop {
    pub(super) fn open() -> Self {
        Self::open_with(Options::new())
    }

    pub(super) fn open_with(options: Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::new(WALL_MS));
        let options = options.durability(Durability::ProcessCrash).clock(clock.clone());
        let store = Store::open(dir.path().join("keys"), options).unwrap();
        let work = Work { effects: Arc::default(), begun: Arc::new(Semaphore::new(0)), go_on: Arc::default() };
        Self { store, clock, work, dir }
    }

    pub(super) fn layer(&self) -> IdempotencyLayer<Scoped> {
        IdempotencyLayer::new(self.store.clone()).shared_scope("shop")
    }

    pub(super) fn routes(&self) -> Router {
        self.routes_with(self.layer())
    }

    pub(super) fn routes_with(&self, layer: IdempotencyLayer<Scoped>) -> Router {
        Router::new()
            .route("/charges", any(charge))
            .route("/refunds", any(charge))
            .route("/status/{status}", any(with_status))
            .route("/slow", any(slow))
            .layer(layer)
            .with_state(self.work.clone())
    }
}

/// Charges, and says which charge it was.
async fn charge(State(work): State<Work>, attempt: Option<axum::Extension<Attempt>>) -> Response {
    let charge = work.effect();
    let sent_along = attempt.map(|attempt| attempt.downstream_key("charge")).unwrap_or_default();
    Response::builder()
        .status(StatusCode::CREATED)
        .header("x-charge", charge)
        .header("x-sent-along", sent_along)
        .body(Body::from(format!("charge {charge}")))
        .unwrap()
}

/// Charges, and answers with the status asked for.
async fn with_status(State(work): State<Work>, Path(status): Path<u16>) -> Response {
    let charge = work.effect();
    Response::builder().status(status).body(Body::from(format!("charge {charge}"))).unwrap()
}

/// Charges when it is told to go on.
async fn slow(State(work): State<Work>) -> String {
    work.begun.add_permits(1);
    work.go_on.notified().await;
    format!("charge {}", work.effect())
}

/// A request of the shop.
pub(super) fn post(path: &str, key: &str) -> Request {
    request("POST", path, &[("idempotency-key", key)], "amount=999")
}

pub(super) fn request(method: &str, uri: &str, headers: &[(&str, &str)], body: &str) -> Request {
    let request = Request::builder().method(method).uri(uri);
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    request.body(Body::from(body.to_owned())).unwrap()
}

/// What a client is told.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

impl Told {
    pub(super) async fn of<B>(response: http::Response<B>) -> Self
    where
        B: http_body::Body,
        B::Error: std::fmt::Debug,
    {
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes().to_vec();
        Self { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    pub(super) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(super) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    pub(super) fn is_replay(&self) -> bool {
        self.header("idempotency-replayed") == "true"
    }

    /// Asserts that it is a problem, and which.
    #[track_caller]
    pub(super) fn assert_problem(&self, status: u16, name: &str) {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.header("content-type"), "application/problem+json");
        let document: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        let uri = format!("https://docs.rs/keyonce/latest/keyonce/http/enum.Problem.html#variant.{name}");
        assert_eq!(document["type"], uri);
        assert_eq!(document["status"], status);
        assert!(document["title"].is_string() && document["detail"].is_string());
        assert_eq!(self.header("link"), format!("<{uri}>; rel=\"describedby\""));
    }

    /// Asserts that both are the same answer, but for the marker of a replay.
    #[track_caller]
    pub(super) fn assert_replays(&self, first: &Told) {
        assert_eq!(self.status, first.status);
        assert_eq!(self.body, first.body);
        assert!(self.is_replay() && !first.is_replay(), "{self:?} replays {first:?}");
        let lines = |told: &Told| -> Vec<_> {
            let lines = told.headers.iter().filter(|(name, _)| *name != "idempotency-replayed");
            lines.map(|(name, value)| (name.clone(), value.clone())).collect()
        };
        assert_eq!(lines(self), lines(first));
    }
}

/// Sends a request and hears the whole answer.
pub(super) async fn send(routes: &Router, request: Request) -> Told {
    Told::of(routes.clone().oneshot(request).await.unwrap()).await
}

/// A piece of a body.
#[derive(Clone, Copy, Debug)]
pub(super) enum Piece {
    Data(&'static str),
    /// A trailer line.
    Trailer(&'static str, &'static str),
    /// The body breaks off.
    Broken,
    /// Whoever makes the body panics.
    Panic,
}

/// A body that comes in pieces, and whose length nobody is told.
pub(super) fn in_pieces(pieces: impl IntoIterator<Item = Piece>) -> Body {
    Body::new(Pieces(pieces.into_iter().collect()))
}

struct Pieces(VecDeque<Piece>);

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        Poll::Ready(self.0.pop_front().map(|piece| match piece {
            Piece::Data(data) => Ok(Frame::data(Bytes::from_static(data.as_bytes()))),
            Piece::Trailer(name, value) => {
                let name = http::HeaderName::from_static(name);
                Ok(Frame::trailers([(name, http::HeaderValue::from_static(value))].into_iter().collect()))
            }
            Piece::Broken => Err(std::io::Error::other("the body broke off")),
            Piece::Panic => panic!("the body is at its end"),
        }))
    }
}

/// A body of a thousand frames of ten bytes, whose length nobody is told, and how many of them were asked for.
pub(super) struct Long {
    asked: Arc<AtomicU32>,
}

impl Long {
    pub(super) const BYTES: usize = 10_000;

    pub(super) fn body(asked: &Arc<AtomicU32>) -> Body {
        Body::new(Self { asked: Arc::clone(asked) })
    }
}

impl http_body::Body for Long {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::convert::Infallible>>> {
        let before = self.asked.fetch_add(1, Ordering::SeqCst);
        Poll::Ready((before < 1000).then(|| Ok(Frame::data(Bytes::from_static(b"0123456789")))))
    }
}

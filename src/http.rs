//! The `Idempotency-Key` header for any tower service: axum, tonic, hyper (feature `tower`).
//!
//! [`IdempotencyLayer`] stands between a server and the routes that must not do their work twice. A request with a key
//! that was never seen runs; a retry is answered with the first answer, byte for byte; a request that comes while the
//! first one runs is told so, or waits; the same key with another request is refused. It follows the IETF draft
//! [The Idempotency-Key HTTP Header Field][draft], or by one switch [Stripe's rules][stripe]; [`conformance`] has them
//! row by row.
//!
//! ```
//! use axum::{Router, routing::post};
//! use keyonce::{Options, Store, http::IdempotencyLayer};
//!
//! # async fn charge() -> &'static str { "charged 9.99 EUR" }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let dir = dir.path().join("keys");
//! let store = Store::open(&dir, Options::default())?;
//! let idempotency = IdempotencyLayer::new(store)
//!     .scope(|request| Some(request.headers.get("x-account")?.as_bytes().to_vec())); // better: who logged in
//! let routes: Router = Router::new().route("/charges", post(charge)).layer(idempotency);
//! # Ok(())
//! # }
//! ```
//!
//! # In which order a request is judged
//!
//! 1. The key: missing where required, or invalid, is 400.
//! 2. The scope: whose key it is. Who cannot be told apart is refused, 403.
//! 3. The body is held in memory: larger than the limit is 413.
//! 4. The store is asked, once, with the key and the fingerprint of the request ([`Recipe`]). It answers in this order:
//!    another request under the same key, 422; done, the first answer; running, waits and then 409 with `Retry-After`;
//!    interrupted, 409 of a type of its own, or what [`take_over`](IdempotencyLayer::take_over) or
//!    [`reconcile`](IdempotencyLayer::reconcile) say; too old, 412. A store that cannot answer is 503, and the request
//!    is not run.
//! 5. The owner runs **on a task of its own**: a client that hangs up neither ends the work nor frees the key, and its
//!    retry is told the answer. The lease is renewed while it runs. The handler finds the [`Attempt`](crate::Attempt)
//!    in the request's extensions: the downstream key to send along, checkpoints, the token, which attempt it is.
//! 6. The answer is judged ([`Verdict`]) and stored; then it is given to the client.
//!
//! Authentication and rate limits belong around the layer, since who is refused by them has not begun anything. In axum
//! the layer that is added last stands outermost: `.layer(idempotency).layer(auth)`.
//! Compression belongs around it, too: inside it, the bytes of the first client's encoding are replayed to all. Time
//! limits belong *inside* it, where what they answer is judged; around it they leave the work running, which is what a
//! retry then finds. A panic comes out as it would without the layer, and leaves the key interrupted.
//!
//! A layer within the run of another one with the same store and scope lets the request pass: its key is reserved.
//! Around a router that nests others (axum's `nest`) it sees whole paths; inside a nested one it sees only what is left
//! of them, and has to be told [the whole](IdempotencyLayer::uri): otherwise requests under two prefixes are the same
//! to it. axum's `Router::layer` also stands around paths that have no route: they need a key, too, and their 404 is
//! final; with `Router::route_layer` such a request is told 404 as before, and nothing is remembered of it.
//!
//! A service of tower's own is put into it with [`Layer::layer`](tower_layer::Layer::layer): it is `Clone` and takes a
//! [`Body`] of the server's, of hyper `Request<keyonce::http::Body<Incoming>>`; hyper-util's `TowerToHyperService`
//! makes a service of hyper's of the whole. What it answers with may be any body.
//!
//! The run leaves the task of the connection as soon as it waits: task-local values and entered tracing spans need not
//! reach it, the request's extensions do.
//!
//! # What is kept in memory
//!
//! For each guarded request its body, at most `request_bytes_max`; from when the service has answered, the answer's
//! body, at most `response_bytes_max` and one frame, and two copies of it while it is stored. A stream keeps a few
//! frames. What is put together of many frames may take up to twice its size.
//!
//! # Streams, protocol switches, trailers
//!
//! An answer without body (HEAD, 204, 304) is kept as it is. Trailers, as gRPC has them, are stored and replayed. A
//! body over the limit and a stream are passed on as they come, to their end also when the client is gone; then the key
//! is done, and a retry is told the status and that the body was not kept ([`Problem::ResponseNotKept`]), with the
//! [`Reference`] that the handler left. A body that breaks off leaves the key interrupted. A switched protocol (101) is
//! done when it is switched.
//!
//! A body that is passed on waits for a client that does not read, for one [lease](IdempotencyLayer::lease); then that
//! client counts as gone, and should it read again, its answer breaks off. What nobody listens to is dropped when
//! [`run_at_most`](IdempotencyLayer::run_at_most) is over, and its key is interrupted: a stream without an end has one
//! then.
//!
//! The body of a request is whole before the request runs. A call in which the client waits for an answer to the first
//! half of its body, as with gRPC's streams in both directions, cannot be guarded.
//!
//! # Operators
//!
//! [`admin()`] is a service to mount behind one's own authentication: health, metrics, lists of keys, and what only a
//! person can decide of an interrupted one. [`Runs`] tells when all that runs has come to its end, for a graceful
//! shutdown.
//!
//! # The runtime
//!
//! The layer runs work by `tokio::spawn` and waits for clients by tokio's timer: it must be called within a tokio
//! runtime whose timer is enabled. Nothing else of the crate needs one.
//!
//! [draft]: https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/
//! [stripe]: https://docs.stripe.com/api/idempotent_requests

mod admin;
mod answer;
mod body;
mod header;
mod issued;
mod json;
mod layer;
mod policy;
mod problem;
mod recipe;
mod run;
mod service;

pub use self::admin::{Admin, admin};
pub use self::answer::Answer;
pub use self::body::Body;
pub use self::issued::uuid_v7_time;
pub use self::layer::{IdempotencyLayer, Scoped, Unscoped};
pub use self::policy::{Found, Reference, StoredHeaders, Verdict};
pub use self::problem::Problem;
pub use self::recipe::Recipe;
pub use self::run::Runs;
pub use self::service::{Idempotency, ResponseFuture};

/// The media type that a message says it is of, without parameters; empty where it says none.
fn media_type(headers: &::http::HeaderMap) -> &str {
    let said = headers.get(::http::header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    said.split(';').next().unwrap_or_default().trim()
}

#[doc = include_str!("../tests/conformance.md")]
pub mod conformance {}

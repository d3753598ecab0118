//! A small service for operators: what the store knows, and the acts that a person decides on.
//!
//! The running service holds the directory's lock, so no tool beside it can act on its keys; this can.

mod metrics;

use std::convert::Infallible;
use std::fmt::Write as _;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::SystemTime;

use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode, request};
use http_body::Body as HttpBody;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde_json::{Value, json};
use tower_service::Service;

use super::Answer;
use super::body::{Body, BoxError, Read, read_up_to};
use crate::error::{Error, ErrorKind};
use crate::key::{Key, Token};
use crate::options::{OnDrop, OnInterrupted, ReserveOptions};
use crate::reservation::{Completion, Interrupted, KeyInfo, KeyState};
use crate::stats::Health;
use crate::store::{Reserve, Store};

/// How many keys are listed, if the request does not say.
const LISTED: usize = 100;

/// How many keys are listed at most.
const LISTED_MAX: usize = 10_000;

/// How large an answer may be that an operator stores.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// What stands for itself in an address; everything else is written `%XX`.
const ESCAPED: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// The service of [`admin`].
#[derive(Clone, Debug)]
pub struct Admin {
    store: Store,
}

/// A service for operators, to be mounted **behind your own authentication**: whoever reaches it sees all keys, and
/// decides what clients are told.
///
/// | request | does |
/// |---|---|
/// | `GET /health` | 200 while the store can do its work, else 503 |
/// | `GET /stats` | counters and sizes, in the OpenMetrics text format |
/// | `GET /keys?state=interrupted&limit=100` | lists keys, of one state (`in-flight`, `interrupted`, `done`) or all, in no order; at most 10 000 |
/// | `GET /key?scope=S&id=I` | what is known of one key |
/// | `POST /key/resolve?scope=S&id=I&token=T&status=200` | an interrupted key is done: the body, with its content type, is the answer for all retries |
/// | `POST /key/release?scope=S&id=I&token=T` | nothing happened under an interrupted key: the next request runs as new |
/// | `POST /key/forget?scope=S&id=I&reason=R` | any key is as if it had never been; the reason stands in the log |
///
/// Scope and id are percent-encoded, as lists tell them. `token` is the one that was told with the key: if another
/// attempt has come meanwhile nothing is done, and the answer is 409. What is unknown is 404, what lacks something 400,
/// an answer larger than the store takes 413. A `POST` that a browser sends for a page of another site
/// (`Sec-Fetch-Site`) is 403.
///
/// ```
/// # fn check(store: keyonce::Store) -> axum::Router {
/// use axum::Router;
///
/// Router::new().nest_service("/admin/keys", keyonce::http::admin(store))
/// # }
/// ```
pub fn admin(store: Store) -> Admin {
    Admin { store }
}

/// The answer to an operator, held whole.
type Told = Response<Body<String>>;

impl<B> Service<Request<B>> for Admin
where
    B: HttpBody<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Told;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Told, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let admin = self.clone();
        Box::pin(async move { Ok(admin.answer(request).await.unwrap_or_else(Refusal::into_response)) })
    }
}

/// Why an operator's request is not done.
enum Refusal {
    NotFound,
    Method(&'static str),
    Bad(&'static str),
    Conflict(&'static str),
    CrossSite,
    Store(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Store(error)
    }
}

impl Refusal {
    fn into_response(self) -> Told {
        let (status, why) = match &self {
            Self::NotFound => (StatusCode::NOT_FOUND, "nothing is known of it".to_owned()),
            Self::Method(allowed) => (StatusCode::METHOD_NOT_ALLOWED, format!("{allowed} alone")),
            Self::Bad(why) => (StatusCode::BAD_REQUEST, (*why).to_owned()),
            Self::Conflict(why) => (StatusCode::CONFLICT, (*why).to_owned()),
            Self::CrossSite => (StatusCode::FORBIDDEN, "a page of another site may not act on keys".to_owned()),
            Self::Store(error) if matches!(error.kind(), ErrorKind::TooLarge) => {
                (StatusCode::PAYLOAD_TOO_LARGE, error.to_string())
            }
            Self::Store(error) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
        };
        let mut response = told(status, &json!({ "error": why }));
        if let Self::Method(allowed) = self {
            response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
        }
        response
    }
}

impl Admin {
    async fn answer<B>(self, request: Request<B>) -> Result<Told, Refusal>
    where
        B: HttpBody<Error: Into<BoxError>>,
    {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        let reads = matches!(path, "/health" | "/stats" | "/keys" | "/key");
        match (parts.method == Method::GET, parts.method == Method::POST, path) {
            (true, _, "/health") => Ok(self.health()),
            (true, _, "/stats") => Ok(self.stats()),
            (true, _, "/keys") => self.list(&Query::of(&parts)).await,
            (_, true, _) if is_cross_site(&parts) => Err(Refusal::CrossSite),
            (true, _, "/key") => self.show(&Query::of(&parts)).await,
            (_, true, "/key/resolve") => self.resolve(&parts, body).await,
            (_, true, "/key/release") => {
                let interrupted = self.interrupted(&Query::of(&parts)).await?;
                acted(interrupted.release_async().await?, "released")
            }
            (_, true, "/key/forget") => self.forget(&Query::of(&parts)).await,
            _ if reads => Err(Refusal::Method("GET")),
            (.., "/key/resolve" | "/key/release" | "/key/forget") => Err(Refusal::Method("POST")),
            _ => Err(Refusal::NotFound),
        }
    }

    fn health(&self) -> Told {
        match self.store.health() {
            Health::Sound => told(StatusCode::OK, &json!({ "health": "sound" })),
            Health::Poisoned(error) => {
                let health = json!({ "health": "poisoned", "error": error.to_string() });
                told(StatusCode::SERVICE_UNAVAILABLE, &health)
            }
            Health::Closed => told(StatusCode::SERVICE_UNAVAILABLE, &json!({ "health": "closed" })),
        }
    }

    fn stats(&self) -> Told {
        let mut response = Response::new(Body::held(metrics::text(&self.store.stats()).into(), None));
        let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        response
    }

    async fn list(&self, query: &Query) -> Result<Told, Refusal> {
        let states = [KeyState::InFlight, KeyState::Interrupted, KeyState::Done];
        let wanted = match query.text("state") {
            None => None,
            Some(name) => {
                let known = states.into_iter().find(|state| name_of(*state) == name);
                Some(known.ok_or(Refusal::Bad("the state is in-flight, interrupted or done"))?)
            }
        };
        let limit = match query.text("limit").map(|limit| limit.parse::<usize>()) {
            None => LISTED,
            Some(Ok(limit)) => limit.min(LISTED_MAX),
            Some(Err(_)) => return Err(Refusal::Bad("the limit is a number")),
        };
        let store = self.store.clone();
        // A list may wait for a sync, so it is gone through on a thread that may block.
        let listed = tokio::task::spawn_blocking(move || {
            let is_wanted = |(_, info): &(Key, KeyInfo)| wanted.is_none_or(|state| info.state == state);
            let keys = store.keys().filter(|known| known.as_ref().map_or(true, is_wanted));
            keys.take(limit + 1).collect::<Result<Vec<_>, Error>>()
        });
        let listed = listed.await.map_err(|_| Refusal::Conflict("the service is shutting down"))??;
        let keys: Vec<_> = listed.iter().take(limit).map(|(key, info)| described(key, info)).collect();
        Ok(told(StatusCode::OK, &json!({ "keys": keys, "more": listed.len() > limit })))
    }

    async fn show(&self, query: &Query) -> Result<Told, Refusal> {
        let key = query.key()?;
        let info = self.store.peek_async(&key).await?.ok_or(Refusal::NotFound)?;
        Ok(told(StatusCode::OK, &described(&key, &info)))
    }

    async fn resolve<B>(&self, parts: &request::Parts, body: B) -> Result<Told, Refusal>
    where
        B: HttpBody<Error: Into<BoxError>>,
    {
        let query = Query::of(parts);
        let status = query.text("status").and_then(|status| status.parse::<u16>().ok());
        let status = status.and_then(|status| StatusCode::from_u16(status).ok());
        let status = status.filter(|status| !status.is_informational());
        let status = status.ok_or(Refusal::Bad("the status of the answer is missing, or is none"))?;
        let Ok(Read::Whole(body)) = read_up_to(pin!(body), ANSWER_BYTES_MAX).await else {
            return Err(Refusal::Bad("the answer broke off, or is too large"));
        };
        let mut answer = Answer::new(status, body.data);
        if let Some(content_type) = parts.headers.get(CONTENT_TYPE) {
            answer = answer.header(CONTENT_TYPE, content_type.clone());
        }
        let stored = answer.to_bytes().ok_or(Refusal::Bad("the content type is too long"))?;
        acted(self.interrupted(&query).await?.resolve_async(&stored).await?, "resolved")
    }

    async fn forget(&self, query: &Query) -> Result<Told, Refusal> {
        let key = query.key()?;
        let reason = query.text("reason").filter(|reason| !reason.is_empty());
        let reason = reason.ok_or(Refusal::Bad("the reason is missing"))?;
        match self.store.forget_async(&key, &reason).await? {
            true => Ok(told(StatusCode::OK, &json!({ "done": "forgotten" }))),
            false => Err(Refusal::NotFound),
        }
    }

    /// The interrupted key that is to be settled, if it is still the one that the operator has seen.
    async fn interrupted(&self, query: &Query) -> Result<Interrupted, Refusal> {
        let key = query.key()?;
        let token: Option<Token> = query.text("token").and_then(|token| token.parse().ok());
        let token = token.ok_or(Refusal::Bad("the token that the key was told with is missing"))?;
        let info = self.store.peek_async(&key).await?.ok_or(Refusal::NotFound)?;
        // Whatever has become of the key meanwhile, asking for it leaves it as it is.
        let with = ReserveOptions::new().on_interrupted(OnInterrupted::Surface).on_drop(OnDrop::Release);
        match self.store.reserve_with_async(&key, info.fingerprint, &with).await? {
            Reserve::Interrupted(interrupted) if interrupted.token == token => Ok(interrupted),
            Reserve::Interrupted(_) => Err(Refusal::Conflict("another attempt was made meanwhile")),
            Reserve::InFlight(_) => Err(Refusal::Conflict("it is running")),
            Reserve::Replay(_) => Err(Refusal::Conflict("it is done")),
            Reserve::Fresh(_) | Reserve::Mismatch(_) | Reserve::TooOld(_) => Err(Refusal::NotFound),
        }
    }
}

/// The query of a request, decoded.
struct Query(Vec<(String, Vec<u8>)>);

impl Query {
    fn of(parts: &request::Parts) -> Self {
        let pairs = parts.uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
        Self(pairs.map(|(name, value)| (name.to_owned(), percent_decode_str(value).collect())).collect())
    }

    fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.0.iter().find(|(named, _)| named == name).map(|(_, value)| value.as_slice())
    }

    fn text(&self, name: &str) -> Option<String> {
        self.bytes(name).map(|value| String::from_utf8_lossy(value).into_owned())
    }

    fn key(&self) -> Result<Key, Refusal> {
        let (Some(scope), Some(id)) = (self.bytes("scope"), self.bytes("id")) else {
            return Err(Refusal::Bad("the scope or the id is missing"));
        };
        Key::new(scope, id).map_err(|_| Refusal::Bad("the scope or the id has no valid length"))
    }
}

/// Whether a browser says that a page of elsewhere has sent it: whoever is logged in may be led to such a page, and the
/// browser sends their credentials along. What is no browser does not say anything.
fn is_cross_site(parts: &request::Parts) -> bool {
    let said = parts.headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    said.is_some_and(|site| ![b"same-origin".as_slice(), b"none"].contains(&site))
}

fn name_of(state: KeyState) -> &'static str {
    match state {
        KeyState::InFlight => "in-flight",
        KeyState::Interrupted => "interrupted",
        KeyState::Done => "done",
    }
}

/// What is known of a key.
fn described(key: &Key, info: &KeyInfo) -> Value {
    json!({
        "scope": encoded(key.scope()),
        "id": encoded(key.id()),
        "state": name_of(info.state),
        // A string, since it may be beyond what a float holds.
        "token": info.token.to_string(),
        "attempt": info.attempt,
        "first_seen": date(info.first_seen),
        "since": date(info.since),
        "lease_end": info.lease_end.map(date),
        "kept_until": date(info.kept_until),
        "detached": info.detached,
        "cause": info.cause.map(|cause| format!("{cause:?}")),
        "checkpoint_bytes": info.checkpoint.len(),
    })
}

fn date(time: SystemTime) -> String {
    httpdate::fmt_http_date(time)
}

/// Bytes as they stand in the query of an address.
fn encoded(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => utf8_percent_encode(text, &ESCAPED).to_string(),
        Err(_) => bytes.iter().fold(String::new(), |mut all, byte| {
            write!(all, "%{byte:02X}").expect("writing to a string never fails");
            all
        }),
    }
}

fn acted(completion: Completion, done: &'static str) -> Result<Told, Refusal> {
    match completion {
        Completion::Done => Ok(told(StatusCode::OK, &json!({ "done": done }))),
        Completion::Superseded => Err(Refusal::Conflict("another attempt was made meanwhile")),
    }
}

fn told(status: StatusCode, document: &Value) -> Told {
    let mut response = Response::new(Body::held(Bytes::from(document.to_string()), None));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

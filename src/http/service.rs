//! The service around another: the order in which a request is judged.
//!
//! Parse the key, hold the body, make the fingerprint, ask the store once, and do what it says. Nothing is run that the
//! store has not reserved; what cannot be asked for is refused.

use std::fmt;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Request, Response, StatusCode, request};
use http_body::Body as HttpBody;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::body::{Body, BoxError, Read, Whole, read_up_to};
use super::header::key_in;
use super::layer::{Config, Reconcile, Scoped, WhenInterrupted};
use super::policy::Found;
use super::problem::{Dialect, Problem};
use super::run::run;
use super::{Answer, Recipe};
use crate::error::{Error, ErrorKind};
use crate::key::{Fingerprint, Key};
use crate::options::ReserveOptions;
use crate::reservation::{Attempt, Body as Stored, Completion, Interrupted, Response as Kept};
use crate::store::Reserve;

/// When to come back to a store that cannot answer and does not say when it will.
const UNAVAILABLE_RETRY_AFTER: Duration = Duration::from_secs(5);

/// How often a key whose outcome was found out about is asked for again, before the client is asked to.
const ROUNDS_MAX: u32 = 3;

/// The service that an [`IdempotencyLayer`](super::IdempotencyLayer) makes of another.
#[derive(Clone)]
pub struct Idempotency<S> {
    inner: S,
    config: Arc<Config>,
    scope: Scoped,
}

impl<S> Idempotency<S> {
    pub(super) fn new(inner: S, config: Config, scope: Scoped) -> Self {
        Self { inner, config: Arc::new(config), scope }
    }
}

impl<S: fmt::Debug> fmt::Debug for Idempotency<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<S, B, O> Service<Request<B>> for Idempotency<S>
where
    S: Service<Request<Body<B>>, Response = Response<O>, Error: Send, Future: Send> + Clone + Send + 'static,
    B: HttpBody<Data: Send, Error: Into<BoxError>> + Send + 'static,
    O: HttpBody<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<Body<O>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, O, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The one that said it is ready serves this request; its clone has to be asked anew.
        let next = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, next);
        let config = &self.config;
        if !config.methods.contains(request.method()) {
            return Kind::Passed { future: inner.call(request.map(Body::passed)) }.into();
        }
        let (parts, body) = request.into_parts();
        match config.key_of(&self.scope, &parts) {
            Ok(Some(key)) if !config.runs_already(&key, &parts) => {
                let asks = Asks { config: Arc::clone(config), parts, key };
                Kind::Guarded { future: Box::pin(asks.judge(inner, body)) }.into()
            }
            Ok(_) => {
                let request = Request::from_parts(parts, Body::passed(body));
                Kind::Passed { future: inner.call(request) }.into()
            }
            Err(problem) => Kind::Told { response: Some(tell(config.dialect.of(&parts.headers), problem)) }.into(),
        }
    }
}

pin_project! {
    /// What becomes of one request.
    pub struct ResponseFuture<F, O, E> {
        #[pin]
        kind: Kind<F, O, E>,
    }
}

type Guarded<O, E> = Pin<Box<dyn Future<Output = Result<Response<Body<O>>, E>> + Send>>;

pin_project! {
    #[project = KindProjected]
    enum Kind<F, O, E> {
        // The layer has nothing to do with it.
        Passed { #[pin] future: F },
        // It has a key.
        Guarded { future: Guarded<O, E> },
        // It is refused.
        Told { response: Option<Response<Body<O>>> },
    }
}

impl<F, O, E> From<Kind<F, O, E>> for ResponseFuture<F, O, E> {
    fn from(kind: Kind<F, O, E>) -> Self {
        Self { kind }
    }
}

impl<F, O, E> fmt::Debug for ResponseFuture<F, O, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

impl<F, O, E> Future for ResponseFuture<F, O, E>
where
    F: Future<Output = Result<Response<O>, E>>,
{
    type Output = Result<Response<Body<O>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().kind.project() {
            KindProjected::Passed { future } => {
                Poll::Ready(ready!(future.poll(cx)).map(|response| response.map(Body::passed)))
            }
            KindProjected::Guarded { future } => future.as_mut().poll(cx),
            KindProjected::Told { response } => {
                Poll::Ready(Ok(response.take().expect("a future is not polled after it was ready")))
            }
        }
    }
}

/// A request with a key.
struct Asks {
    config: Arc<Config>,
    parts: request::Parts,
    key: Key,
}

impl Asks {
    async fn judge<S, B, O>(self, mut inner: S, body: B) -> Result<Response<Body<O>>, S::Error>
    where
        S: Service<Request<Body<B>>, Response = Response<O>, Error: Send, Future: Send> + Clone + Send + 'static,
        B: HttpBody<Data: Send, Error: Into<BoxError>> + Send + 'static,
        O: HttpBody<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        let judged = match self.whole(body).await {
            Ok(body) => self.settle(&body, &mut inner).await.map(|reserve| (reserve, body)),
            Err(problem) => Err(problem),
        };
        let dialect = self.config.dialect.of(&self.parts.headers);
        let told = match judged {
            Ok((Reserve::Fresh(reservation), body)) => {
                let Self { config, parts, .. } = self;
                return run(&config, dialect, reservation, inner, parts, body).await;
            }
            Ok((Reserve::Replay(kept), _)) => return Ok(self.config.replay(&self.parts, &self.key, &kept)),
            Ok((Reserve::InFlight(running), _)) => Problem::InFlight { retry_after: running.retry_after() },
            Ok((Reserve::Interrupted(unknown), _)) => {
                Problem::Interrupted { attempt: unknown.attempt, since: unknown.since }
            }
            Ok((Reserve::Mismatch(other), _)) => Problem::Mismatch { first_seen: other.first_seen, state: other.state },
            Ok((Reserve::TooOld(old), _)) => Problem::TooOld { retention: old.retention },
            Err(problem) => problem,
        };
        Ok(tell(dialect, told))
    }

    /// Holds the body.
    async fn whole<B>(&self, body: B) -> Result<Whole, Problem>
    where
        B: HttpBody<Error: Into<BoxError>>,
    {
        let bytes_max = self.config.request_bytes_max;
        let mut body = std::pin::pin!(body);
        match read_up_to(body.as_mut(), bytes_max).await {
            // Over HTTP/2 a client may end a body with less than it has announced, and hyper tells of no error.
            Ok(Read::Whole(_)) if body.size_hint().lower() > 0 => Err(Problem::BodyUnreadable),
            Ok(Read::Whole(whole)) => Ok(whole),
            Ok(Read::Over { .. }) => Err(Problem::BodyTooLarge { bytes_max }),
            Err(_) => Err(Problem::BodyUnreadable),
        }
    }

    /// Asks the store, waits for who is at work, and asks whoever may know what became of a key that is interrupted.
    /// Who does not run yet keeps nobody else from being served: a clone of the inner service is asked anew whether it
    /// is ready.
    async fn settle<S: Clone>(&self, body: &Whole, inner: &mut S) -> Result<Reserve, Problem> {
        let with = match self.config.issued_at.as_ref().and_then(|issued_at| issued_at(&self.parts, self.key.id())) {
            Some(issued_at) => self.config.with.clone().issued_at(issued_at),
            None => self.config.with.clone(),
        };
        // What is seldom done stands in boxes of its own: the smaller a future, the less it costs to move it about.
        let reserve = match self.ask(body, &with).await? {
            Reserve::InFlight(running) if !self.config.wait.is_zero() => {
                *inner = inner.clone();
                Box::pin(running.wait_async(self.config.wait)).await.map_err(unavailable)?
            }
            other => other,
        };
        match (reserve, &self.config.when_interrupted) {
            (Reserve::Interrupted(unknown), WhenInterrupted::Reconcile(reconcile)) => {
                *inner = inner.clone();
                let with = with.wait(self.config.wait);
                Box::pin(self.reconcile(unknown, &**reconcile, body, &with)).await
            }
            (other, _) => Ok(other),
        }
    }

    /// Asks whoever may know what became of an interrupted key, and the store again.
    async fn reconcile(
        &self,
        mut unknown: Interrupted,
        reconcile: &Reconcile,
        body: &Whole,
        with: &ReserveOptions,
    ) -> Result<Reserve, Problem> {
        for _ in 0..ROUNDS_MAX {
            let found = reconcile(self.key.clone(), unknown.info().clone()).await;
            let reserve = match self.act_on(found, unknown).await? {
                Some(reserve) => reserve,
                None => self.ask(body, with).await?,
            };
            match reserve {
                Reserve::Interrupted(again) => unknown = again,
                other => return Ok(other),
            }
        }
        Ok(Reserve::Interrupted(unknown))
    }

    async fn ask(&self, body: &Whole, with: &ReserveOptions) -> Result<Reserve, Problem> {
        let config = &self.config;
        let fingerprint = self.fingerprint(&config.recipe, body);
        match config.store.reserve_with_async(&self.key, fingerprint, with).await.map_err(unavailable)? {
            Reserve::Mismatch(other) if !config.accept_also.is_empty() => {
                let earlier = Box::pin(self.ask_by_earlier_recipes(body, with)).await?;
                Ok(earlier.unwrap_or(Reserve::Mismatch(other)))
            }
            told => Ok(told),
        }
    }

    fn fingerprint(&self, recipe: &Recipe, body: &Whole) -> Fingerprint {
        let whole = self.config.uri.as_ref().and_then(|uri| uri(&self.parts));
        recipe.fingerprint_at(whole.as_ref().unwrap_or(&self.parts.uri), &self.parts, &body.data)
    }

    /// As the request would have been stored by an earlier release; `None` if it is a mismatch by each.
    async fn ask_by_earlier_recipes(&self, body: &Whole, with: &ReserveOptions) -> Result<Option<Reserve>, Problem> {
        for earlier in &self.config.accept_also {
            let fingerprint = self.fingerprint(earlier, body);
            match self.config.store.reserve_with_async(&self.key, fingerprint, with).await.map_err(unavailable)? {
                Reserve::Mismatch(_) => {}
                other => return Ok(Some(other)),
            }
        }
        Ok(None)
    }

    /// Does what was found out about an interrupted key; `None` when the key has to be asked for again.
    async fn act_on(&self, found: Found, unknown: Interrupted) -> Result<Option<Reserve>, Problem> {
        let told = Problem::Interrupted { attempt: unknown.attempt, since: unknown.since };
        let acted = match found {
            Found::Unknown => return Err(told),
            Found::RunAgain => return unknown.take_over_async().await.map(Some).map_err(unavailable),
            Found::NothingHappened => unknown.release_async().await,
            Found::Done(Answer { status, headers, body, trailers }) => {
                match self.config.stored(status, &headers, body, trailers.as_ref()).to_bytes() {
                    Some(stored) => unknown.resolve_async(&stored).await,
                    None => return Err(told),
                }
            }
        };
        match acted {
            Ok(Completion::Done | Completion::Superseded) => Ok(None),
            Err(error) => Err(unavailable(error)),
        }
    }
}

/// What a client is told of a store that could not answer.
fn unavailable(error: Error) -> Problem {
    Problem::Unavailable { retry_after: retry_after(&error) }
}

pub(super) fn retry_after(error: &Error) -> Duration {
    match error.kind() {
        ErrorKind::Full { retry_after } => retry_after,
        _ => UNAVAILABLE_RETRY_AFTER,
    }
}

/// The answer that tells of a problem.
pub(super) fn tell<O>(dialect: Dialect, problem: Problem) -> Response<Body<O>> {
    let (response, document) = problem.into_response(dialect);
    response.map(|()| Body::held(document, None))
}

/// The head of the first answer, and a document that says that its body was not kept.
fn tell_not_kept<O>(dialect: Dialect, answer: Answer) -> Response<Body<O>> {
    // A protocol is switched once; to a client that asks again that is a conflict.
    let status = if answer.status.is_informational() { StatusCode::CONFLICT } else { answer.status };
    let reference = String::from_utf8_lossy(&answer.body).into_owned();
    let mut response = tell(dialect, Problem::ResponseNotKept { status, reference });
    // What the document says of itself: whether it may be cached, and of gRPC its status.
    let of_document = ["cache-control", "grpc-status", "grpc-message", "grpc-status-details-bin"];
    for (name, value) in answer.headers.iter().filter(|(name, _)| !of_document.contains(&name.as_str())) {
        response.headers_mut().append(name, value.clone());
    }
    // RFC 9110, sections 15.3.5, 15.3.6 and 15.4.5: these have no content.
    if [StatusCode::NO_CONTENT, StatusCode::RESET_CONTENT, StatusCode::NOT_MODIFIED].contains(&response.status()) {
        response.headers_mut().remove(CONTENT_TYPE);
        response = response.map(|_| Body::held(Bytes::new(), None));
    }
    response
}

impl Config {
    /// The key of a request; `None` where it has none and needs none.
    fn key_of(&self, scope: &Scoped, parts: &request::Parts) -> Result<Option<Key>, Problem> {
        let id = key_in(&parts.headers, &self.header, self.bare_keys)
            .map_err(|invalid| Problem::KeyInvalid { why: invalid.to_string() })?;
        let Some(id) = id else {
            return if (self.required)(parts) { Err(Problem::KeyMissing) } else { Ok(None) };
        };
        let scope = (scope.0)(parts).ok_or(Problem::ScopeUnknown)?;
        // The id was checked when it was read, so what does not fit is the scope.
        Key::new(scope, id).map(Some).map_err(|_| Problem::ScopeUnknown)
    }

    /// Whether a layer around this one has reserved the key for this request: then its work is guarded already, and to
    /// ask again would be to meet itself.
    fn runs_already(&self, key: &Key, parts: &request::Parts) -> bool {
        let around = parts.extensions.get::<Attempt>();
        around.is_some_and(|around| around.is_of(self.store.engine()) && around.key() == key)
    }

    /// The answer that was stored, if this request may see it.
    fn replay<O>(&self, parts: &request::Parts, key: &Key, kept: &Kept) -> Response<Body<O>> {
        let dialect = self.dialect.of(&parts.headers);
        if let Some(Err(status)) = self.may_replay.as_ref().map(|may_replay| may_replay(parts, key)) {
            return tell(dialect, Problem::ReplayRefused { status });
        }
        let mut response = match kept.body() {
            Stored::Kept(bytes) => match Answer::from_bytes(bytes) {
                Some(answer) => {
                    let (response, data, trailers) = answer.into_response();
                    response.map(|()| Body::held(data, trailers))
                }
                None => return tell(dialect, Problem::Unreadable),
            },
            Stored::NotKept { reference } => match Answer::from_bytes(reference) {
                Some(answer) => tell_not_kept(dialect, answer),
                None => return tell(dialect, Problem::Unreadable),
            },
        };
        response.headers_mut().insert(self.marker.clone(), HeaderValue::from_static("true"));
        self.tell_expiry(response.headers_mut(), kept.expires_at());
        response
    }

    /// Sets the header that tells until when the answer is remembered, where there is to be one.
    pub(super) fn tell_expiry(&self, headers: &mut HeaderMap, expires_at: SystemTime) {
        if let Some(name) = &self.expires_header
            && let Ok(date) = HeaderValue::from_str(&httpdate::fmt_http_date(expires_at))
        {
            headers.insert(name.clone(), date);
        }
    }
}

//! The run of an owned request: from when it first waits on a task of its own, so that a client that hangs up ends
//! nothing.
//!
//! The task owns the reservation. Whatever becomes of it, a panic included, the reservation is completed, given back or
//! dropped, and a dropped one is interrupted. The connection only waits for what the task says, after it was stored.
//!
//! It needs a runtime, as do the lists of the admin service: tokio's, which axum, tonic and hyper's own examples run
//! on.

use std::future::poll_fn;
use std::panic::resume_unwind;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, request, response};
use http_body::{Body as HttpBody, Frame};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinError;
use tokio::time::{Instant, timeout_at};
use tower_service::Service;

use super::Answer;
use super::body::{Body, BoxError, Piece, Read, Whole, next_frame, read_up_to};
use super::layer::Config;
use super::policy::{Reference, Verdict};
use super::problem::{Dialect, Problem};
use super::service::{retry_after, tell};
use crate::error::{Error, ErrorKind};
use crate::key::Key;
use crate::reservation::{Completion, NotStored, Reservation};

/// How many frames of a body that is passed on may wait for the client.
const FRAMES_WAITING_MAX: usize = 4;

/// The runs of a layer that have not come to their end.
///
/// A server that shuts down gracefully waits for its connections, and not for the runs whose clients have hung up. So,
/// after the server and before the store is closed:
///
/// ```
/// # async fn shut_down(runs: keyonce::http::Runs, store: keyonce::Store) -> Result<(), keyonce::Error> {
/// use std::time::Duration;
///
/// let _all_done = tokio::time::timeout(Duration::from_secs(30), runs.drained()).await.is_ok();
/// store.close_async(Duration::ZERO).await?;
/// # Ok(())
/// # }
/// ```
///
/// What has not come to its end when the store is closed is interrupted.
#[derive(Clone, Debug)]
pub struct Runs {
    count: Arc<watch::Sender<usize>>,
}

impl Runs {
    pub(super) fn new() -> Self {
        Self { count: Arc::new(watch::Sender::new(0)) }
    }

    /// How many there are now.
    pub fn running(&self) -> usize {
        *self.count.borrow()
    }

    /// Waits until there is none.
    pub async fn drained(&self) {
        let mut count = self.count.subscribe();
        // It fails when the sender is gone, and this is one.
        let _none_left = count.wait_for(|count| *count == 0).await.is_ok();
    }

    fn enter(&self) -> Running {
        self.count.send_if_modified(|count| {
            *count += 1;
            false // Who waits, waits for none to be left.
        });
        Running { count: Arc::clone(&self.count) }
    }
}

/// One of them, until it is dropped.
struct Running {
    count: Arc<watch::Sender<usize>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.count.send_if_modified(|count| {
            *count -= 1;
            *count == 0
        });
    }
}

/// Runs a request whose key is reserved, and gives its answer once that is stored.
pub(super) async fn run<S, B, O>(
    config: &Arc<Config>,
    dialect: Dialect,
    reservation: Reservation,
    mut inner: S,
    mut parts: request::Parts,
    body: Whole,
) -> Result<Response<Body<O>>, S::Error>
where
    S: Service<Request<Body<B>>, Response = Response<O>, Error: Send, Future: Send> + Send + 'static,
    B: Send + 'static,
    O: HttpBody<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    parts.extensions.insert(reservation.attempt_view());
    let begun = Instant::now();
    let work = Work { running: config.runs.enter(), config: Arc::clone(config), dialect, reservation, begun };
    let request = Request::from_parts(parts, Body::held(body.data, body.trailers));
    let mut run = Box::pin(async move {
        // One that has waited for another's answer is a clone that was not asked yet; to ask again costs nothing.
        if let Err(error) = poll_fn(|cx| inner.poll_ready(cx)).await {
            work.give_back().await;
            return Err(error);
        }
        let served = inner.call(request).await;
        work.answer(served).await
    });
    // Nobody hangs up within one poll, so what is done in one needs no task.
    if let Poll::Ready(answered) = poll_fn(|cx| Poll::Ready(run.as_mut().poll(cx))).await {
        return answered;
    }
    match tokio::spawn(run).await.map_err(JoinError::try_into_panic) {
        Ok(answered) => answered,
        // As it would have come without the layer, for whoever catches panics around it.
        Err(Ok(panic)) => resume_unwind(panic),
        // The runtime is shutting down.
        Err(Err(_)) => Ok(tell(dialect, Problem::NotStored { retry_after: Duration::from_secs(1) })),
    }
}

/// What a run holds.
struct Work {
    config: Arc<Config>,
    dialect: Dialect,
    /// It renews its own lease, also while a handler blocks the thread that it is polled on.
    reservation: Reservation,
    begun: Instant,
    running: Running,
}

impl Work {
    /// Does what the answer means for the key, and gives it on.
    async fn answer<O, E>(self, served: Result<Response<O>, E>) -> Result<Response<Body<O>>, E>
    where
        O: HttpBody<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        let response = match served {
            Ok(response) => response,
            Err(error) => {
                self.reservation.interrupt();
                return Err(error);
            }
        };
        let (head, body) = response.into_parts();
        let said = head.extensions.get::<Verdict>().copied();
        let verdict = said.unwrap_or_else(|| (self.config.verdict)(&head));
        let response = Response::from_parts(head, body);
        Ok(match verdict {
            Verdict::Release => {
                Box::pin(self.give_back()).await;
                response.map(Body::passed)
            }
            Verdict::Interrupt => {
                self.reservation.interrupt();
                response.map(Body::passed)
            }
            Verdict::Keep | Verdict::KeepWithoutBody if response.status().is_informational() => {
                Box::pin(self.switch(response)).await
            }
            Verdict::KeepWithoutBody => self.keep(response, false).await,
            Verdict::Keep => self.keep(response, true).await,
        })
    }

    /// Nothing happened. Should the release fail, the key is interrupted: safe, and nothing for this client to know.
    async fn give_back(self) {
        let _given_back = self.reservation.release_async().await.is_ok();
    }

    /// A protocol is switched: what follows on the connection is no answer.
    async fn switch<O>(self, response: Response<O>) -> Response<Body<O>> {
        let (parts, body) = response.into_parts();
        let outcome = Outcome::of(&self.config, &parts, Whole::default(), false);
        match outcome.store(self.reservation).await {
            Ok(Completion::Done) => Response::from_parts(parts, Body::passed(body)),
            other => tell(self.dialect, problem_of(other)),
        }
    }

    /// Stores the answer, or if it is too large that it was there, and gives it on.
    async fn keep<O>(self, response: Response<O>, keep_body: bool) -> Response<Body<O>>
    where
        O: HttpBody<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        let (parts, body) = response.into_parts();
        let mut body = Box::pin(body);
        let read = match (self.config.streams)(&parts) {
            true => Ok(Read::Over { begun: Bytes::new() }),
            false => read_up_to(body.as_mut(), self.config.response_bytes_max).await,
        };
        match read {
            Ok(Read::Whole(whole)) => self.keep_whole(parts, whole, keep_body).await,
            Ok(Read::Over { begun }) => {
                let (pieces, piped) = mpsc::channel(FRAMES_WAITING_MAX);
                let outcome = Outcome::of(&self.config, &parts, Whole::default(), false);
                tokio::spawn(self.pipe(outcome, begun, body, pieces));
                Response::from_parts(parts, Body::piped(piped))
            }
            Err(error) => {
                self.reservation.interrupt();
                let (pieces, piped) = mpsc::channel(1);
                let _fits = pieces.try_send(Piece::Failed(error)).is_ok();
                Response::from_parts(parts, Body::piped(piped))
            }
        }
    }

    async fn keep_whole<O>(self, mut parts: response::Parts, whole: Whole, keep_body: bool) -> Response<Body<O>> {
        let Whole { data, trailers } = &whole;
        // Of an answer without body nothing is left out, so a retry is told just that.
        let keep_body = keep_body || (data.is_empty() && trailers.is_none());
        let body = Body::held(data.clone(), trailers.clone());
        let key = self.reservation.key().clone();
        let outcome = Outcome::of(&self.config, &parts, whole, keep_body);
        match outcome.store(self.reservation).await {
            Ok(Completion::Done) => {
                if self.config.expires_header.is_some() {
                    Box::pin(tell_expiry(&self.config, &key, &mut parts.headers)).await;
                }
                Response::from_parts(parts, body)
            }
            other => tell(self.dialect, problem_of(other)),
        }
    }

    /// Passes a body on as it comes, to its end also when the client is gone; then the request is done.
    ///
    /// The last frame of a body that says that it is the last goes out when that is stored: over HTTP/1 a client that
    /// was told the length takes the answer for whole as soon as it has so many bytes.
    async fn pipe<O>(self, outcome: Outcome, begun: Bytes, mut body: Pin<Box<O>>, pieces: mpsc::Sender<Piece>)
    where
        O: HttpBody<Data: Send, Error: Into<BoxError>> + Send,
    {
        let patience = self.config.lease;
        let passing = pass_on(begun, body.as_mut(), &pieces, patience);
        let (listener, passed) = match unless(pieces.closed(), passing).await.flatten() {
            Some(passed) => (Some(pieces), passed),
            // Should the client read again, what it missed is missing: no end is told, so it takes nothing for whole.
            None => {
                drop(pieces);
                let drained = timeout_at(self.begun + self.config.run_at_most, drain(body)).await;
                (None, drained.unwrap_or_else(|_| Err("nobody listens, and it does not end".into())))
            }
        };
        let (held_back, last) = match passed {
            Ok(held_back) => match outcome.store(self.reservation).await {
                Ok(Completion::Done) => (held_back, Piece::End),
                Ok(Completion::Superseded) => (None, Piece::Failed("another attempt's answer counts".into())),
                Err(error) => (None, Piece::Failed(error.into())),
            },
            Err(error) => {
                self.reservation.interrupt();
                (None, Piece::Failed(error))
            }
        };
        // A client that does not read does not keep a shutdown waiting: the run has come to its end.
        drop(self.running);
        if let Some(pieces) = listener {
            for piece in held_back.map(Piece::Frame).into_iter().chain([last]) {
                let _listened = pieces.send(piece).await.is_ok();
            }
        }
    }
}

/// Sends a body on, frame by frame; `None` as soon as a frame was not taken in time. The last frame of a body that says
/// that it is the last is given back.
async fn pass_on<O>(
    begun: Bytes,
    mut body: Pin<&mut O>,
    pieces: &mpsc::Sender<Piece>,
    patience: Duration,
) -> Option<Result<Option<Frame<Bytes>>, BoxError>>
where
    O: HttpBody<Error: Into<BoxError>>,
{
    let mut frame = Some(begun).filter(|begun| !begun.is_empty()).map(Frame::data);
    loop {
        let may_be_last = body.is_end_stream() || body.size_hint().exact() == Some(0);
        let sent = if may_be_last { None } else { frame.take() };
        if let Some(sent) = sent {
            pieces.send_timeout(Piece::Frame(sent), patience).await.ok()?;
        }
        let next = match next_frame(body.as_mut()).await {
            Some(Ok(next)) => next,
            Some(Err(error)) => return Some(Err(error)),
            None => return Some(Ok(frame)),
        };
        if let Some(sent) = frame.replace(next) {
            pieces.send_timeout(Piece::Frame(sent), patience).await.ok()?;
        }
    }
}

/// Hears a body to its end.
async fn drain<O>(mut body: Pin<Box<O>>) -> Result<Option<Frame<Bytes>>, BoxError>
where
    O: HttpBody<Error: Into<BoxError>>,
{
    while next_frame(body.as_mut()).await.transpose()?.is_some() {}
    Ok(None)
}

/// What the work gives; `None` if it is over before.
async fn unless<T>(over: impl Future<Output = ()>, work: impl Future<Output = T>) -> Option<T> {
    let (mut over, mut work) = (pin!(over), pin!(work));
    poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => over.as_mut().poll(cx).map(|()| None),
    })
    .await
}

/// What a retry is to be told.
struct Outcome {
    /// With the body, if it is kept.
    kept: Option<Vec<u8>>,
    /// The head of the answer.
    head: Answer,
    /// What the handler left to find the body by.
    reference: Bytes,
}

impl Outcome {
    fn of(config: &Config, parts: &response::Parts, whole: Whole, keep_body: bool) -> Self {
        let answer = config.stored(parts.status, &parts.headers, whole.data, whole.trailers.as_ref());
        let reference = parts.extensions.get::<Reference>().map(|Reference(reference)| reference.clone());
        Self {
            kept: keep_body.then(|| answer.to_bytes()).flatten(),
            head: Answer { body: Bytes::new(), trailers: None, ..answer },
            reference: reference.unwrap_or_default().into(),
        }
    }

    /// Stores as much as there is room for: the answer; else its head and the reference; else its status alone.
    async fn store(self, mut reservation: Reservation) -> Result<Completion, Error> {
        if let Some(bytes) = &self.kept {
            match reservation.complete_async(bytes).await {
                Err(NotStored { error, reservation: again }) if is_of_room(&error) => reservation = again,
                other => return Ok(other?),
            }
        }
        Box::pin(self.store_without_body(reservation)).await
    }

    async fn store_without_body(self, mut reservation: Reservation) -> Result<Completion, Error> {
        let least = Answer::new(self.head.status, Bytes::new());
        if let Some(bytes) = self.head.without_body(self.reference).to_bytes() {
            match reservation.complete_without_body_async(&bytes).await {
                Err(NotStored { error, reservation: again }) if is_of_room(&error) => reservation = again,
                other => return Ok(other?),
            }
        }
        let least = least.to_bytes().expect("a status alone has room in the stored form");
        Ok(reservation.complete_without_body_async(&least).await?)
    }
}

fn is_of_room(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::TooLarge | ErrorKind::Full { .. })
}

/// What the client is told of an answer that does not count.
fn problem_of(stored: Result<Completion, Error>) -> Problem {
    match stored {
        Ok(Completion::Done | Completion::Superseded) => Problem::Superseded,
        Err(error) => Problem::NotStored { retry_after: retry_after(&error) },
    }
}

/// Tells the first client, too, until when its answer is remembered.
async fn tell_expiry(config: &Config, key: &Key, headers: &mut HeaderMap) {
    if let Ok(Some(info)) = config.store.peek_async(key).await {
        config.tell_expiry(headers, info.kept_until);
    }
}

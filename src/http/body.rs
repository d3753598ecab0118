//! The body that the layer hands on, in either direction, and how it holds one in memory up to a limit.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http::HeaderMap;
use http_body::{Body as HttpBody, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::sync::mpsc;

/// Any error, as bodies of this layer give it.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

pin_project! {
    /// The body of a request or a response on the far side of the layer: one that it let through, one that it holds
    /// whole, or one that it passes on as it comes.
    #[derive(Debug)]
    pub struct Body<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProjected]
    #[derive(Debug)]
    enum Kind<B> {
        Passed { #[pin] body: B },
        Held { data: Option<Bytes>, trailers: Option<HeaderMap> },
        Piped { pieces: mpsc::Receiver<Piece> },
    }
}

impl<B> Body<B> {
    pub(super) fn passed(body: B) -> Self {
        Self { kind: Kind::Passed { body } }
    }

    pub(super) fn held(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self { kind: Kind::Held { data: Some(data).filter(|data| !data.is_empty()), trailers } }
    }

    pub(super) fn piped(pieces: mpsc::Receiver<Piece>) -> Self {
        Self { kind: Kind::Piped { pieces } }
    }
}

/// What comes through the pipe of a body that is passed on as it comes. Its end is said aloud, so that a task that is
/// gone is never taken for a body that is whole.
#[derive(Debug)]
pub(super) enum Piece {
    Frame(Frame<Bytes>),
    Failed(BoxError),
    End,
}

impl<B: HttpBody<Error: Into<BoxError>>> HttpBody for Body<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().kind.project() {
            KindProjected::Passed { body } => Poll::Ready(ready!(body.poll_frame(cx)).map(of_bytes)),
            KindProjected::Held { data, trailers } => {
                let frame = data.take().map(Frame::data).or_else(|| trailers.take().map(Frame::trailers));
                Poll::Ready(frame.map(Ok))
            }
            KindProjected::Piped { pieces } => Poll::Ready(match ready!(pieces.poll_recv(cx)) {
                Some(Piece::Frame(frame)) => Some(Ok(frame)),
                Some(Piece::End) => None,
                Some(Piece::Failed(error)) => Some(Err(error)),
                None => Some(Err("the work of this request ended before its answer did".into())),
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Passed { body } => body.is_end_stream(),
            Kind::Held { data, trailers } => data.is_none() && trailers.is_none(),
            Kind::Piped { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Passed { body } => body.size_hint(),
            // What has trailers goes out in chunks: over HTTP/1 a body of a known length cannot have any.
            Kind::Held { trailers: Some(_), .. } => SizeHint::default(),
            Kind::Held { data, .. } => {
                let bytes = data.as_ref().map_or(0, Bytes::len);
                SizeHint::with_exact(u64::try_from(bytes).expect("a length in memory fits 64 bits"))
            }
            Kind::Piped { .. } => SizeHint::default(),
        }
    }
}

/// A frame of any body, as one of bytes.
fn of_bytes<D: Buf, E: Into<BoxError>>(frame: Result<Frame<D>, E>) -> Result<Frame<Bytes>, BoxError> {
    match frame {
        Ok(frame) => Ok(frame.map_data(|mut data| data.copy_to_bytes(data.remaining()))),
        Err(error) => Err(error.into()),
    }
}

/// The next frame of a body.
pub(super) async fn next_frame<B>(mut body: Pin<&mut B>) -> Option<Result<Frame<Bytes>, BoxError>>
where
    B: HttpBody<Error: Into<BoxError>>,
{
    poll_fn(|cx| body.as_mut().poll_frame(cx)).await.map(of_bytes)
}

/// What was read of a body.
pub(super) enum Read {
    /// All of it.
    Whole(Whole),
    /// More than the limit: this much, and more to come.
    Over { begun: Bytes },
}

/// A whole body.
#[derive(Debug, Default)]
pub(super) struct Whole {
    pub(super) data: Bytes,
    pub(super) trailers: Option<HeaderMap>,
}

/// Reads a body, and stops as soon as it is larger than the limit. A body that comes in many frames is copied together,
/// so that what is held of it is bounded by its bytes and not by their number.
pub(super) async fn read_up_to<B>(mut body: Pin<&mut B>, bytes_max: usize) -> Result<Read, BoxError>
where
    B: HttpBody<Error: Into<BoxError>>,
{
    if usize::try_from(body.size_hint().lower()).map_or(true, |lower| lower > bytes_max) {
        return Ok(Read::Over { begun: Bytes::new() });
    }
    let mut first = Bytes::new();
    let mut copied = Vec::new();
    let mut trailers: Option<HeaderMap> = None;
    while let Some(frame) = next_frame(body.as_mut()).await {
        match frame?.into_data() {
            Ok(data) if first.is_empty() && copied.is_empty() => first = data,
            Ok(data) => {
                if copied.is_empty() {
                    copied.extend_from_slice(&first);
                    first = Bytes::new();
                }
                copied.extend_from_slice(&data);
            }
            Err(frame) => {
                if let Ok(more) = frame.into_trailers() {
                    trailers.get_or_insert_default().extend(more);
                }
            }
        }
        if first.len().max(copied.len()) > bytes_max {
            return Ok(Read::Over { begun: one_of(first, copied) });
        }
    }
    Ok(Read::Whole(Whole { data: one_of(first, copied), trailers }))
}

fn one_of(first: Bytes, copied: Vec<u8>) -> Bytes {
    if copied.is_empty() { first } else { copied.into() }
}

//! What the layer of the feature `tower` holds in memory of each request in flight: what the limits of the bodies
//! allow, and little besides.
//!
//! A binary of its own, with one test: the allocator counts for the whole process. It prints what it measures.
#![cfg(not(loom))]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should panic")]

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use keyonce::http::{Body, IdempotencyLayer};
use keyonce::{Durability, Options, Store};
use peak_alloc::PeakAlloc;
use tokio::sync::Semaphore;
use tower::{Layer, ServiceExt};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// How many requests are in flight at once.
const IN_FLIGHT: u32 = 64;

/// The limit of either body.
const BYTES_MAX: usize = 64 << 10;

const FRAME_BYTES: usize = 4 << 10;

/// A body at the limit.
const AT_LIMIT: usize = BYTES_MAX / FRAME_BYTES;

/// A body far beyond it.
const BEYOND: usize = 40 * AT_LIMIT;

/// What a request takes besides its bodies: its head, futures and tasks, the reservation.
const BESIDES: usize = 8 << 10;

/// A body of so many frames, each of which lets others come first.
struct Frames {
    left: usize,
    is_ready: bool,
}

impl Frames {
    fn new(frames: usize) -> Self {
        Self { left: frames, is_ready: false }
    }
}

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.is_ready = !self.is_ready;
        if self.is_ready {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let Some(left) = self.left.checked_sub(1) else { return Poll::Ready(None) };
        self.left = left;
        Poll::Ready(Some(Ok(Frame::data(vec![7; FRAME_BYTES].into()))))
    }
}

/// What each of the requests holds while it runs or its answer is not read, and at its worst moment.
async fn held(request_frames: usize, answer_frames: usize, at_work: bool) -> (usize, usize) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().join("keys"), Options::new().durability(Durability::ProcessCrash)).unwrap();
    let may_go_on = Arc::new(Semaphore::new(if at_work { 0 } else { Semaphore::MAX_PERMITS }));
    let handler = tower::service_fn(move |request: Request<Body<Frames>>| {
        let may_go_on = Arc::clone(&may_go_on);
        async move {
            let _waited = may_go_on.acquire().await;
            drop(request);
            Ok::<_, Infallible>(Response::new(Frames::new(answer_frames)))
        }
    });
    let layer =
        IdempotencyLayer::new(store).shared_scope("s").request_bytes_max(BYTES_MAX).response_bytes_max(BYTES_MAX);
    let service = layer.layer(handler);
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    let asking: Vec<_> = (0..IN_FLIGHT)
        .map(|number| {
            let request = Request::post("/").header("idempotency-key", number).body(Frames::new(request_frames));
            tokio::spawn(service.clone().oneshot(request.unwrap()))
        })
        .collect();
    // On one thread, so that everybody has come as far as possible when this has waited often enough.
    for _ in 0..100 * BEYOND {
        tokio::task::yield_now().await;
    }
    assert_eq!(asking.iter().filter(|asking| asking.is_finished()).count() == 0, at_work);
    let each = |bytes: usize| (bytes - before) / usize::try_from(IN_FLIGHT).unwrap();
    (each(MEMORY.current_usage()), each(MEMORY.peak_usage()))
}

#[test]
fn a_request_in_flight_holds_what_the_limits_of_its_bodies_allow_and_little_besides() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // What is put together of many frames may take twice its size; storing an answer takes two copies.
    let (body, answer, waiting) = (2 * BYTES_MAX, 4 * BYTES_MAX, 8 * FRAME_BYTES);
    let cases = [
        ("an empty request at work", 0, 0, true, BESIDES, BESIDES),
        ("a request at the limit at work", AT_LIMIT, 0, true, body, body),
        ("a request beyond it", BEYOND, 0, false, 0, body + FRAME_BYTES),
        ("an answer at the limit", 0, AT_LIMIT, false, body, answer),
        ("an answer beyond it that nobody reads", 0, BEYOND, false, body + waiting, body + waiting),
    ];
    for (what, request_frames, answer_frames, at_work, held_max, peak_max) in cases {
        let (bytes, peak_bytes) = runtime.block_on(held(request_frames, answer_frames, at_work));
        println!("{what}: {bytes} bytes, {peak_bytes} at worst");
        assert!(bytes <= held_max + BESIDES, "{what}: {bytes} bytes");
        assert!(peak_bytes <= peak_max + BESIDES, "{what}: {peak_bytes} bytes at worst");
    }
}

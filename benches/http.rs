//! What the layer adds to a request, and what a request under a key is to others.
//!
//! ```text
//! cargo bench --bench http
//! KEYONCE_BENCH_ROUNDS=9 KEYONCE_BENCH_DIR=/mnt/disk cargo bench --bench http    # longer, on that disk
//! ```
//!
//! - *Called*: the service is called in the process, once without the layer and once with it, in turn; the difference
//!   of the medians is what the layer adds: key, fingerprint, reserve, a task of its own, the answer's form, complete.
//! - *Connection*: one client on one kept-alive connection of loopback, HTTP/1.1, again with and without the layer.
//! - *Under load*: eight kept-alive connections at once, by batches of requests; what a batch takes of the processor,
//!   by its requests, client and server together.
//! - *At once*: 1000 requests of tasks under 100 keys; how often the work was done, and how long all took.
//! - *Sync* is the yardstick of PowerLoss: 512 bytes into written blocks, and `fdatasync`.
//!
//! Each request has a body of 200 bytes and is answered with 200 bytes. Medians of single requests, or of batches; of
//! the rounds the median again. The runtime has one thread, so that a figure is what the processor does and not how
//! threads are woken.

mod sync;
#[expect(dead_code, reason = "benches share it, and each uses a part")]
mod work;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use keyonce::http::{IdempotencyLayer, Scoped};
use keyonce::{Durability, Options, Store};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tower::{Layer, Service, ServiceExt};

use sync::Yardstick;
use work::{directory, load, median, now, setting, verdict};

const BODY: [u8; 200] = [b'b'; 200];
const RESPONSE: [u8; 200] = [b'r'; 200];

/// How much the layer may add at ProcessCrash, in microseconds.
const ADDED_US_MAX: f64 = 5.0;

/// How many connections a load has.
const CONNECTIONS: u64 = 8;

/// How many requests one after the other a connection sends before the routes change.
const BATCH: u64 = 25;

/// One way to be asked, without the layer and with it.
struct Pair {
    bare_us: f64,
    guarded_us: f64,
}

fn main() {
    let rounds = setting("KEYONCE_BENCH_ROUNDS", 5);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    for (durability, requests) in [(Durability::ProcessCrash, 20_000), (Durability::PowerLoss, 300)] {
        println!("{durability:?}, {requests} requests a round, {}", load());
        let (mut called, mut connected, mut loaded, mut syncs) = (Vec::new(), Vec::new(), Vec::new(), 0.0);
        for _ in 0..rounds {
            let dir = directory();
            let store = Store::open(dir.path().join("keys"), Options::new().durability(durability)).expect("a store");
            let layer = IdempotencyLayer::new(store.clone()).shared_scope("charges!");
            let before = store.stats().syncs;
            called.push(runtime.block_on(called_in_the_process(&layer, requests)));
            syncs = (store.stats().syncs - before) as f64 / requests as f64;
            connected.push(runtime.block_on(over_a_connection(&layer, requests)));
            loaded.push(runtime.block_on(under_load(&layer, requests.max(CONNECTIONS * BATCH))));
            store.close(Duration::from_secs(5)).expect("closed");
        }
        tell("called in the process", &called);
        let added = tell("over a connection", &connected);
        let under_load = tell(&format!("under load of {CONNECTIONS} connections"), &loaded);
        match durability {
            Durability::ProcessCrash => {
                println!("  at most {ADDED_US_MAX} us: {}", verdict(added.max(under_load) <= ADDED_US_MAX));
            }
            _ => println!("  data syncs a request: {syncs:.2}; one sync: p50 {:.1} us", sync_us(requests)),
        }
    }
    at_once();
}

/// Prints a row; says how much the layer adds.
fn tell(what: &str, pairs: &[Pair]) -> f64 {
    let of = |value: fn(&Pair) -> f64| median(&pairs.iter().map(value).collect::<Vec<_>>());
    let (bare, guarded) = (of(|pair| pair.bare_us), of(|pair| pair.guarded_us));
    let added = of(|pair| pair.guarded_us - pair.bare_us);
    println!("  {what}: p50 {bare:.2} us without the layer, {guarded:.2} us with it, it adds {added:.2} us");
    added
}

fn sync_us(times: u64) -> f64 {
    let dir = directory();
    let mut yardstick = Yardstick::new(&dir);
    median(&(0..times).map(|_| yardstick.once().as_secs_f64() * 1e6).collect::<Vec<_>>())
}

fn key(number: u64) -> String {
    format!("7a4c4e01-9b55-4000-8000-{number:012x}")
}

/// Requests of a service, one after the other; half of them without the layer, in turn.
async fn called_in_the_process(layer: &IdempotencyLayer<Scoped>, requests: u64) -> Pair {
    let handler = tower::service_fn(|request: Request<keyonce::http::Body<Full<Bytes>>>| async move {
        let body = request.into_body().collect().await.expect("a body").to_bytes();
        assert_eq!(body.len(), BODY.len());
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(&RESPONSE))))
    });
    // The same work on bodies of the same type: the layer lets what is no POST pass.
    let mut service = layer.layer(handler);
    let (mut bare, mut guarded) = (Vec::new(), Vec::new());
    for number in 0..requests {
        for (method, times) in [("PUT", &mut bare), ("POST", &mut guarded)] {
            let request = Request::builder().method(method).uri("/charges").header("content-type", "text/plain");
            let request = request.header("idempotency-key", key(number)).body(Full::new(Bytes::from_static(&BODY)));
            let request = request.expect("a request");
            let start = now();
            let response = service.ready().await.expect("ready").call(request).await.expect("served");
            let body = response.into_body().collect().await.expect("a body").to_bytes();
            times.push(start.elapsed().as_secs_f64() * 1e6);
            assert_eq!(body.len(), RESPONSE.len());
        }
    }
    Pair { bare_us: median(&bare), guarded_us: median(&guarded) }
}

/// The same over one kept-alive connection of loopback to a server of axum's.
async fn over_a_connection(layer: &IdempotencyLayer<Scoped>, requests: u64) -> Pair {
    let (serving, at) = serve(layer).await;
    let mut socket = connected(at).await;
    let (mut bare, mut guarded) = (Vec::new(), Vec::new());
    let mut heard = Vec::with_capacity(4096);
    for number in 0..requests {
        for (path, times) in [("bare", &mut bare), ("guarded", &mut guarded)] {
            let start = now();
            ask(&mut socket, &mut heard, path, &format!("c-{}", key(number))).await;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    serving.abort();
    Pair { bare_us: median(&bare), guarded_us: median(&guarded) }
}

/// The same over several kept-alive connections at once: what a request takes of the one processor, by batches without
/// the layer and with it, in turn.
async fn under_load(layer: &IdempotencyLayer<Scoped>, requests: u64) -> Pair {
    let (serving, at) = serve(layer).await;
    let mut sockets = Vec::new();
    for _ in 0..CONNECTIONS {
        sockets.push(connected(at).await);
    }
    let (mut bare, mut guarded) = (Vec::new(), Vec::new());
    for batch in 0..requests / (CONNECTIONS * BATCH) {
        for (path, times) in [("bare", &mut bare), ("guarded", &mut guarded)] {
            let start_us = processor_us();
            let asking = sockets.drain(..).zip(0..).map(|(mut socket, connection)| {
                tokio::spawn(async move {
                    let mut heard = Vec::with_capacity(4096);
                    for number in 0..BATCH {
                        let key = key((batch * CONNECTIONS + connection) * BATCH + number);
                        ask(&mut socket, &mut heard, path, &format!("l-{key}")).await;
                    }
                    socket
                })
            });
            for asked in asking.collect::<Vec<_>>() {
                sockets.push(asked.await.expect("asked"));
            }
            times.push((processor_us() - start_us) / (CONNECTIONS * BATCH) as f64);
        }
    }
    serving.abort();
    Pair { bare_us: median(&bare), guarded_us: median(&guarded) }
}

/// What this thread has taken of the processor.
fn processor_us() -> f64 {
    let taken = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    taken.tv_sec as f64 * 1e6 + taken.tv_nsec as f64 / 1e3
}

/// A server of axum's with a bare route and a guarded one.
async fn serve(layer: &IdempotencyLayer<Scoped>) -> (JoinHandle<std::io::Result<()>>, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let at = listener.local_addr().expect("an address");
    let routes = Router::new().route("/", post(async |_: Bytes| Bytes::from_static(&RESPONSE)));
    let routes = Router::new().nest("/bare", routes.clone()).nest("/guarded", routes.layer(layer.clone()));
    (tokio::spawn(async move { axum::serve(listener, routes).await }), at)
}

async fn connected(at: SocketAddr) -> TcpStream {
    let socket = TcpStream::connect(at).await.expect("connected");
    socket.set_nodelay(true).expect("no delay");
    socket
}

/// Sends one request and hears its answer.
async fn ask(socket: &mut TcpStream, heard: &mut Vec<u8>, path: &str, key: &str) {
    let mut request = format!(
        "POST /{path} HTTP/1.1\r\nHost: shop\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\
         Idempotency-Key: {key}\r\n\r\n",
        BODY.len(),
    )
    .into_bytes();
    request.extend_from_slice(&BODY);
    socket.write_all(&request).await.expect("sent");
    heard.clear();
    while !heard.ends_with(&RESPONSE) {
        let more = socket.read_buf(heard).await.expect("heard");
        assert!(more > 0, "the server closes");
    }
    assert!(heard.starts_with(b"HTTP/1.1 200 OK"));
}

/// A thousand requests at once under a hundred keys.
fn at_once() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let dir = directory();
    let store = Store::open(dir.path().join("keys"), Options::default()).expect("a store");
    let layer = IdempotencyLayer::new(store).shared_scope("charges!").wait(Duration::from_secs(60));
    let effects = Arc::new(AtomicU32::new(0));
    let counts = Arc::clone(&effects);
    let routes = Router::new().route("/", post(async move || counts.fetch_add(1, Ordering::SeqCst).to_string()));
    let routes = routes.layer(layer);
    let (took, answers) = runtime.block_on(async {
        let start = now();
        let sending: Vec<_> = (0..1000)
            .map(|number| {
                let request = Request::post("/").header("idempotency-key", key(number % 100)).body(Body::empty());
                tokio::spawn(routes.clone().oneshot(request.expect("a request")))
            })
            .collect();
        let mut answers = 0;
        for sent in sending {
            answers += u32::from(sent.await.expect("sent").expect("served").status().is_success());
        }
        (start.elapsed(), answers)
    });
    let effects = effects.load(Ordering::SeqCst);
    println!("1000 requests at once under 100 keys, PowerLoss: {answers} answers, {effects} effects, {took:.0?}");
    assert_eq!((answers, effects), (1000, 100), "each request is answered, and each key is one effect");
}

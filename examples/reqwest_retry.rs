//! A client that does it right: one key per operation, made once and kept over all tries; back-off with jitter; the
//! server's `Retry-After` is honoured; what a retry cannot mend is not tried again.
//!
//! ```text
//! cargo run --example reqwest_retry
//! ```
//!
//! Its server, at the end of this file, behaves badly on purpose: it is busy at first, then it loses an answer.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use backon::{ExponentialBuilder, Retryable};
use keyonce::http::IdempotencyLayer;
use keyonce::{Options, Store};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// An operation of the client's, from before its first try until it is known how it ended.
struct Payment {
    /// A client that may crash between two tries stores it first, with the operation.
    key: String,
    amount: &'static str,
}

impl Payment {
    fn new(amount: &'static str) -> Result<Self> {
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(|error| error.to_string())?;
        Ok(Self { key: random.iter().map(|byte| format!("{byte:02x}")).collect(), amount })
    }

    /// One try.
    async fn send(&self, client: &reqwest::Client, url: &str) -> std::result::Result<String, Failed> {
        let request = client.post(url).header("Idempotency-Key", format!("\"{}\"", self.key)).body(self.amount);
        // Whether it arrived is not known: the same key makes it safe to send it again.
        let response = request.send().await.map_err(|error| Failed::Unknown(error.to_string()))?;
        let (status, replayed) = (response.status(), response.headers().contains_key("idempotency-replayed"));
        let retry_after = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
        let text = response.text().await.map_err(|error| Failed::Unknown(error.to_string()))?;
        match status.as_u16() {
            200..=299 => Ok(format!("{text}, replayed: {replayed}")),
            409 | 429 | 500..=599 => Err(Failed::Again { status, after: retry_after.map(Duration::from_secs) }),
            _ => Err(Failed::ForGood(format!("{status}: {text}"))), // such as 422: the key stands for another request
        }
    }

    /// As many tries as it takes.
    async fn send_with_retries(&self, client: &reqwest::Client, url: &str) -> std::result::Result<String, Failed> {
        let back_off = ExponentialBuilder::default().with_min_delay(Duration::from_millis(50)).with_jitter();
        (|| self.send(client, url))
            .retry(back_off.with_max_times(6))
            .when(|failed| !matches!(failed, Failed::ForGood(_)))
            .adjust(|failed, delay| match failed {
                Failed::Again { after: Some(after), .. } => delay.map(|delay| delay.max(*after)),
                _ => delay,
            })
            .notify(|failed, _| println!("  {failed}: the same request again, under the same key"))
            .await
    }
}

/// Why a try failed.
enum Failed {
    Unknown(String),
    Again { status: StatusCode, after: Option<Duration> },
    ForGood(String),
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(why) => write!(f, "no answer ({why})"),
            Self::Again { status, after: Some(after) } => write!(f, "{status}, to come back after {after:?}"),
            Self::Again { status, after: None } => write!(f, "{status}"),
            Self::ForGood(why) => f.write_str(why),
        }
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let store = Store::open(temporary.path().join("keys"), Options::default())?;
    let (url, charges) = bad_server(store.clone()).await?;
    let client = reqwest::Client::builder().timeout(Duration::from_secs(5)).no_proxy().build()?;

    let payment = Payment::new("9.99 EUR")?;
    match payment.send_with_retries(&client, &url).await {
        Ok(receipt) => println!("paid: {receipt}"),
        Err(failed) => return Err(failed.to_string().into()),
    }
    println!("charges: {}", charges.load(Ordering::SeqCst));

    // A client that changes the request under a used key is at fault, and no retry mends that.
    let careless = Payment { amount: "99.99 EUR", ..payment };
    match careless.send_with_retries(&client, &url).await {
        Err(Failed::ForGood(why)) => println!("refused at once: {}", why.split(':').next().unwrap_or_default()),
        _ => return Err("a used key stands for one request".into()),
    }
    store.close_async(Duration::from_secs(5)).await?;
    assert_eq!(charges.load(Ordering::SeqCst), 1);
    Ok(())
}

/// Charges once for each key, but is busy for the first request and loses the answer to the second.
async fn bad_server(store: Store) -> Result<(String, Arc<AtomicU32>)> {
    let (charges, requests) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let routes = Router::new()
        .route("/payments", post(charge))
        .with_state(Arc::clone(&charges))
        .layer(IdempotencyLayer::new(store).shared_scope("payments"))
        .layer(from_fn_with_state(requests, behave_badly));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/payments", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, routes).await });
    Ok((url, charges))
}

async fn charge(State(charges): State<Arc<AtomicU32>>, amount: String) -> String {
    format!("charge {} of {amount}", charges.fetch_add(1, Ordering::SeqCst) + 1)
}

/// Around the layer, as the network is.
async fn behave_badly(State(requests): State<Arc<AtomicU32>>, request: Request, next: Next) -> Response {
    match requests.fetch_add(1, Ordering::SeqCst) {
        0 => (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "1")]).into_response(),
        1 => {
            drop(next.run(request).await); // the work is done, and nobody is told
            StatusCode::BAD_GATEWAY.into_response()
        }
        _ => next.run(request).await,
    }
}

//! Readers tip writers. The save is slow, the client has no patience and tries again: the naive route charges the
//! reader once for each try, the safe one once.
//!
//! ```text
//! cargo run --example axum_tips [DIRECTORY]
//! ```
//!
//! The two routes have the same handler. The safe one has the layer around it: three lines.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::routing::post;
use keyonce::http::IdempotencyLayer;
use keyonce::{Options, Store};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How long a tip takes to save.
const SAVE: Duration = Duration::from_millis(1500);

/// How long the client waits for an answer.
const PATIENCE: Duration = Duration::from_millis(300);

/// How often the client tries at most.
const TRIES: u32 = 6;

/// How many tips were charged.
type Charges = Arc<AtomicU32>;

/// The reader's card is charged at once, the save of it takes its time.
async fn tip(State(charges): State<Charges>, amount: String) -> String {
    let number = charges.fetch_add(1, Ordering::SeqCst) + 1;
    tokio::time::sleep(SAVE).await;
    format!("tip {number}: {amount}")
}

#[tokio::main]
async fn main() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let dir = std::env::args_os().nth(1).map_or_else(|| temporary.path().to_owned(), PathBuf::from);

    let store = Store::open(dir.join("keys"), Options::default())?;
    let idempotency = IdempotencyLayer::new(store.clone()).shared_scope("tips");
    let runs = idempotency.runs();

    let (naive, safe) = (Charges::default(), Charges::default());
    let routes = Router::new()
        .merge(Router::new().route("/naive", post(tip)).with_state(Arc::clone(&naive)))
        .merge(Router::new().route("/safe", post(tip)).layer(idempotency).with_state(Arc::clone(&safe)));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let at = format!("http://{}", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, routes).await });

    println!("naive route:");
    let tries = tip_with_retries(&format!("{at}/naive")).await?;
    println!("  the client gave up after {tries} tries, and the reader was charged {}", charged(&naive));

    println!("safe route:");
    let tries = tip_with_retries(&format!("{at}/safe")).await?;
    println!("  the client tried {tries} times, and the reader was charged {}", charged(&safe));

    // What still runs comes to its end before the store is closed.
    runs.drained().await;
    store.close_async(Duration::ZERO).await?;
    assert_eq!((naive.load(Ordering::SeqCst), safe.load(Ordering::SeqCst)), (TRIES, 1));
    Ok(())
}

/// One tip, one key, several tries; how many it took.
async fn tip_with_retries(url: &str) -> Result<u32> {
    let client = reqwest::Client::builder().timeout(PATIENCE).no_proxy().build()?;
    for number in 1..=TRIES {
        let request = client.post(url).header("Idempotency-Key", "tip-of-reader-7-for-article-12").body("2.00 EUR");
        match request.send().await {
            Ok(response) if response.status().is_success() => {
                let replayed = response.headers().contains_key("idempotency-replayed");
                println!("  try {number}: \"{}\", replayed: {replayed}", response.text().await?);
                return Ok(number);
            }
            // Nothing, or 409: the first try is at work. The same request again, under the same key.
            Ok(response) => println!("  try {number}: {}", response.status()),
            Err(error) if error.is_timeout() => println!("  try {number}: no answer in time"),
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(PATIENCE).await;
    }
    Ok(TRIES)
}

fn charged(charges: &Charges) -> String {
    match charges.load(Ordering::SeqCst) {
        1 => "once".to_owned(),
        number => format!("{number} times"),
    }
}

//! A gRPC service behind the layer: a retry gets the first reply, with its trailers; the same key with another message
//! is refused with a gRPC status.
//!
//! ```text
//! cargo run -p tonic_grpc
//! ```
//!
//! The layer goes around the server, the key into the metadata of a call. The service is what `tonic-build` would
//! generate, written by hand.

use std::convert::Infallible;
use std::error::Error;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use keyonce::http::IdempotencyLayer;
use keyonce::{Attempt, Options, Store};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;
use tonic::client::Grpc as Client;
use tonic::codegen::{BoxFuture, Service, http::uri::PathAndQuery};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status};
use tonic_prost::ProstCodec;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// What is to be charged.
#[derive(Clone, PartialEq, prost::Message)]
struct Charge {
    #[prost(uint64, tag = "1")]
    cents: u64,
}

/// What was charged.
#[derive(Clone, PartialEq, prost::Message)]
struct Receipt {
    #[prost(string, tag = "1")]
    text: String,
}

/// The service `shop.Charges` with its one method.
#[derive(Clone, Default)]
struct Charges {
    made: Arc<AtomicU32>,
}

impl UnaryService<Charge> for Charges {
    type Response = Receipt;
    type Future = Ready<std::result::Result<Response<Receipt>, Status>>;

    fn call(&mut self, request: Request<Charge>) -> Self::Future {
        let Some(attempt) = request.extensions().get::<Attempt>() else {
            return ready(Err(Status::internal("the layer is missing")));
        };
        if request.get_ref().cents == 0 {
            return ready(Err(Status::invalid_argument("nothing to charge")));
        }
        let number = self.made.fetch_add(1, Ordering::SeqCst) + 1;
        let sent_along = attempt.downstream_key("charge");
        let text = format!("charge {number} of {} cents under {sent_along}", request.get_ref().cents);
        ready(Ok(Response::new(Receipt { text })))
    }
}

impl NamedService for Charges {
    const NAME: &'static str = "shop.Charges";
}

impl Service<http::Request<Body>> for Charges {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<std::result::Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move { Ok(Grpc::new(ProstCodec::<Receipt, Charge>::default()).unary(service, request).await) })
    }
}

/// One call, as a client makes it.
async fn charge(channel: &Channel, key: &str, cents: u64) -> Result<std::result::Result<Response<Receipt>, Status>> {
    let mut client = Client::new(channel.clone());
    client.ready().await?;
    let mut request = Request::new(Charge { cents });
    request.metadata_mut().insert("idempotency-key", key.parse()?);
    let path = PathAndQuery::from_static("/shop.Charges/Charge");
    Ok(client.unary(request, path, ProstCodec::<Charge, Receipt>::default()).await)
}

#[tokio::main]
async fn main() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let store = Store::open(temporary.path().join("keys"), Options::default())?;
    let idempotency = IdempotencyLayer::new(store.clone()).shared_scope("charges");

    let charges = Charges::default();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let at = format!("http://{}", listener.local_addr()?);
    let serving = Server::builder().layer(idempotency).add_service(charges.clone());
    tokio::spawn(async move { serving.serve_with_incoming(TcpListenerStream::new(listener)).await });
    let channel = Channel::from_shared(at)?.connect().await?;

    for _ in 0..2 {
        let reply = charge(&channel, "order-1", 999).await??;
        let replayed = reply.metadata().contains_key("idempotency-replayed");
        println!("{}, replayed: {replayed}", reply.into_inner().text);
    }
    let Err(refused) = charge(&channel, "order-1", 1000).await? else {
        return Err("a key stands for one message".into());
    };
    println!("{:?}: {}", refused.code(), refused.message());
    assert_eq!(refused.code(), Code::FailedPrecondition);

    // An error of the service is final as well.
    for _ in 0..2 {
        let Err(refused) = charge(&channel, "order-2", 0).await? else {
            return Err("there is nothing to charge".into());
        };
        let replayed = refused.metadata().contains_key("idempotency-replayed");
        println!("{:?}: {}, replayed: {replayed}", refused.code(), refused.message());
    }
    println!("charges: {}", charges.made.load(Ordering::SeqCst));
    assert_eq!(charges.made.load(Ordering::SeqCst), 1);
    store.close_async(Duration::from_secs(5)).await?;
    Ok(())
}

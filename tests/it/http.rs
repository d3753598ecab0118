//! The `Idempotency-Key` header: what a client sees and what becomes of the work, through a service of axum's or one
//! made by hand. Where it is told that a thing holds on the wire, there is a real server on loopback.

mod admin;
mod answers;
mod grpc;
mod keys;
mod requests;
mod running;
mod scene;
mod server;
mod stripe;
mod unavailable;

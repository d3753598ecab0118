//! A real server on loopback, real clients, raw sockets.

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use axum::Router;
use axum::response::Response;
use axum::routing::post as on_post;
use keyonce::{Durability, Options, Store};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tower_http::compression::CompressionLayer;

use super::scene::{Piece, Shop, in_pieces, run};

/// A server that can be shut down.
struct Server {
    at: SocketAddr,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl Server {
    async fn of(routes: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let stopped = async move { stopped.await.unwrap_or_default() };
        let serving = axum::serve(listener, routes).with_graceful_shutdown(stopped);
        Self { at, stop, serving: tokio::spawn(async move { serving.await.unwrap() }) }
    }

    async fn shut_down(self) {
        self.stop.send(()).unwrap();
        self.serving.await.unwrap();
    }

    /// Sends bytes as they are and hears all that is said until the server closes.
    async fn raw(&self, request: &[u8]) -> Vec<u8> {
        let mut socket = TcpStream::connect(self.at).await.unwrap();
        socket.write_all(request).await.unwrap();
        let mut heard = Vec::new();
        socket.read_to_end(&mut heard).await.unwrap();
        heard
    }

    async fn raw_status(&self, request: &[u8]) -> u16 {
        let heard = self.raw(request).await;
        let status = heard.strip_prefix(b"HTTP/1.1 ").and_then(|rest| rest.get(..3)).unwrap_or_default();
        std::str::from_utf8(status).unwrap().parse().unwrap()
    }

    fn post(&self, path: &str, key: &str) -> reqwest::RequestBuilder {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        client.post(format!("http://{}{path}", self.at)).header("Idempotency-Key", key)
    }
}

/// A request of HTTP/1.1 with these header lines and this body, after which the server closes.
fn raw_post(path: &str, lines: &[u8], body: &str) -> Vec<u8> {
    let mut request = format!("POST {path} HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n").into_bytes();
    request.extend_from_slice(lines);
    request.extend_from_slice(format!("Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes());
    request
}

#[test]
fn a_real_client_of_a_real_server_sees_the_replay_409_and_422() {
    run(async {
        let shop = Shop::open();
        let server = Server::of(shop.routes()).await;
        let first = server.post("/charges", "abc").body("amount=999").send().await.unwrap();
        assert_eq!((first.status().as_u16(), first.headers().get("idempotency-replayed")), (201, None));
        assert_eq!(first.text().await.unwrap(), "charge 1");
        let retry = server.post("/charges", "\"abc\"").body("amount=999").send().await.unwrap();
        assert_eq!(
            (retry.status().as_u16(), &retry.headers()["idempotency-replayed"]),
            (201, &"true".parse().unwrap())
        );
        assert_eq!(retry.text().await.unwrap(), "charge 1");
        let other = server.post("/charges", "abc").body("amount=1000").send().await.unwrap();
        assert_eq!(other.status(), 422);
        let slow = tokio::spawn(server.post("/slow", "slow").send());
        shop.work.has_begun().await;
        let busy = server.post("/slow", "slow").send().await.unwrap();
        assert_eq!((busy.status().as_u16(), &busy.headers()["retry-after"]), (409, &"30".parse().unwrap()));
        shop.work.go_on.notify_one();
        assert_eq!(slow.await.unwrap().unwrap().text().await.unwrap(), "charge 2");
        server.shut_down().await;
    });
}

#[test]
fn a_client_that_hangs_up_in_the_middle_finds_its_answer_when_it_comes_back() {
    run(async {
        let shop = Shop::open();
        let layer = shop.layer().wait(Duration::from_secs(60));
        let server = Server::of(shop.routes_with(layer)).await;
        let mut socket = TcpStream::connect(server.at).await.unwrap();
        socket.write_all(&raw_post("/slow", b"Idempotency-Key: abc\r\n", "")).await.unwrap();
        shop.work.has_begun().await;
        drop(socket);
        // The server has noticed when a connection of after that is served.
        assert_eq!(server.post("/charges", "another").send().await.unwrap().status(), 201);
        shop.work.go_on.notify_one();
        let retry = server.post("/slow", "abc").header("Content-Length", "0").send().await.unwrap();
        assert_eq!(&retry.headers()["idempotency-replayed"], "true");
        assert_eq!(retry.text().await.unwrap(), "charge 2");
        assert_eq!(shop.work.effects(), 2);
    });
}

#[test]
fn malformed_heads_and_broken_bodies_have_no_effect() {
    run(async {
        let shop = Shop::open();
        let server = Server::of(shop.routes()).await;
        let long = format!("Idempotency-Key: {}\r\n", "k".repeat(256));
        let lines: [&[u8]; 10] = [
            b"",
            b"Idempotency-Key:\r\n",
            b"Idempotency-Key: \"\"\r\n",
            b"Idempotency-Key: a b\r\n",
            b"Idempotency-Key: \"a\r\n",
            b"Idempotency-Key: a\xe9\r\n",
            b"Idempotency-Key: a\r\nIdempotency-Key: a\r\n",
            b"Idempotency-Key: a\r\nidempotency-key: b\r\n",
            b"Idempotency-Key : a\r\n",
            long.as_bytes(),
        ];
        for line in lines {
            let status = server.raw_status(&raw_post("/charges", line, "amount=999")).await;
            assert_eq!(status, 400, "{}", String::from_utf8_lossy(line));
        }
        // A body that is shorter than it was said to be.
        let mut cut = raw_post("/charges", b"Idempotency-Key: cut\r\n", "amount=999");
        cut.truncate(cut.len() - 3);
        let mut socket = TcpStream::connect(server.at).await.unwrap();
        socket.write_all(&cut).await.unwrap();
        socket.shutdown().await.unwrap();
        let mut heard = Vec::new();
        socket.read_to_end(&mut heard).await.unwrap();
        assert!(heard.is_empty() || heard.starts_with(b"HTTP/1.1 400"), "{}", String::from_utf8_lossy(&heard));
        assert_eq!(shop.work.effects(), 0);
        let whole = raw_post("/charges", b"Idempotency-Key: cut\r\n", "amount=999");
        assert_eq!(server.raw_status(&whole).await, 201, "the key is free");
    });
}

/// The lines of a head, but the date and the marker, and the body as it went over the wire.
fn head_and_body(heard: &[u8]) -> (Vec<Vec<u8>>, Vec<u8>) {
    let end = heard.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
    let lines = heard[..end].split(|byte| *byte == b'\n').map(<[u8]>::to_ascii_lowercase);
    let lines = lines.map(|line| line.strip_suffix(b"\r").map_or(line.clone(), <[u8]>::to_vec));
    let kept = lines.filter(|line| !line.starts_with(b"date:") && !line.starts_with(b"idempotency-replayed:"));
    (kept.collect(), heard[end..].to_vec())
}

#[test]
fn on_the_wire_a_replay_is_the_first_answer_line_by_line_and_byte_for_byte() {
    run(async {
        type Answer = fn() -> Response;
        let answers: [Answer; 7] = [
            || {
                Response::builder()
                    .header("x-b", "1")
                    .header("x-a", "2")
                    .header("x-b", "3")
                    .body("body".into())
                    .unwrap()
            },
            || Response::builder().header("x-odd", &b"\x80\xff"[..]).body(vec![0, 255, 13, 10].into()).unwrap(),
            || Response::builder().status(204).body("".into()).unwrap(),
            || Response::builder().status(304).header("etag", "\"1\"").body("".into()).unwrap(),
            || Response::builder().status(303).header("location", "/charges/1").body("".into()).unwrap(),
            || {
                Response::builder()
                    .status(500)
                    .header("cache-control", "no-store")
                    .body("x".repeat(70_000).into())
                    .unwrap()
            },
            || {
                let pieces = [Piece::Data("with"), Piece::Data(" trailers"), Piece::Trailer("x-checksum", "7")];
                Response::builder().header("trailer", "x-checksum").body(in_pieces(pieces)).unwrap()
            },
        ];
        for (number, answer) in answers.into_iter().enumerate() {
            let shop = Shop::open();
            let routes = Router::new().route("/", on_post(async move || answer())).layer(shop.layer());
            let server = Server::of(routes).await;
            let request = raw_post("/", b"Idempotency-Key: abc\r\nTE: trailers\r\n", "");
            let first = server.raw(&request).await;
            let retry = server.raw(&request).await;
            assert_eq!(head_and_body(&retry), head_and_body(&first), "answer {number}");
            let marker = b"idempotency-replayed: true";
            let marked = |heard: &[u8]| heard.windows(marker.len()).any(|window| window == marker);
            assert!(marked(&retry) && !marked(&first), "answer {number}");
            if number == 6 {
                assert!(first.ends_with(b"x-checksum: 7\r\n\r\n"), "{}", String::from_utf8_lossy(&first));
            }
        }
    });
}

#[test]
fn compression_inside_the_layer_replays_its_bytes_and_around_it_serves_each_client() {
    run(async {
        let text = "a text that compresses well ".repeat(100);
        let routes = |text: String| Router::new().route("/", on_post(async move || text));
        let heard = async |server: &Server, encoding: &str| {
            let request = server.post("/", "abc").header("Accept-Encoding", encoding);
            let response = request.send().await.unwrap();
            let said = response.headers().get("content-encoding").map(|value| value.to_str().unwrap().to_owned());
            (said, response.headers().contains_key("idempotency-replayed"), response.bytes().await.unwrap())
        };
        let shop = Shop::open();
        let inside = Server::of(routes(text.clone()).layer(CompressionLayer::new()).layer(shop.layer())).await;
        let (encoding, _, first) = heard(&inside, "gzip").await;
        assert_eq!((encoding.as_deref(), first.len() < text.len()), (Some("gzip"), true));
        assert_eq!(heard(&inside, "gzip").await, (Some("gzip".to_owned()), true, first));

        let shop = Shop::open();
        let around = Server::of(routes(text.clone()).layer(shop.layer()).layer(CompressionLayer::new())).await;
        let (encoding, replayed, first) = heard(&around, "gzip").await;
        assert_eq!((encoding.as_deref(), replayed), (Some("gzip"), false));
        assert_eq!(heard(&around, "gzip").await, (Some("gzip".to_owned()), true, first));
        assert_eq!(heard(&around, "identity").await, (None, true, text.into()));
    });
}

#[test]
fn a_graceful_shutdown_waits_for_runs_whose_clients_are_gone() {
    run(async {
        let shop = Shop::open();
        let layer = shop.layer();
        let runs = layer.runs();
        let server = Server::of(shop.routes_with(layer)).await;
        let mut socket = TcpStream::connect(server.at).await.unwrap();
        socket.write_all(&raw_post("/slow", b"Idempotency-Key: abc\r\n", "")).await.unwrap();
        shop.work.has_begun().await;
        drop(socket);
        server.shut_down().await;
        assert_eq!(runs.running(), 1);
        let drained = tokio::spawn({
            let runs = runs.clone();
            async move { runs.drained().await }
        });
        shop.work.go_on.notify_one();
        drained.await.unwrap();
        shop.store.close_async(Duration::ZERO).await.unwrap();
        let options = Options::new().durability(Durability::ProcessCrash).clock(shop.clock.clone());
        let store = Store::open(shop.dir.path().join("keys"), options).unwrap();
        let shop = Shop { store, ..shop };
        let server = Server::of(shop.routes()).await;
        let retry = server.raw(&raw_post("/slow", b"Idempotency-Key: abc\r\n", "")).await;
        assert!(retry.ends_with(b"charge 1"), "{}", String::from_utf8_lossy(&retry));
        assert_eq!(shop.work.effects(), 1);
    });
}

#[test]
fn curl_in_a_shell_sees_what_the_readme_promises() {
    run(async {
        if Command::new("curl").arg("--version").output().is_err() {
            println!("there is no curl here");
            return;
        }
        let shop = Shop::open();
        let server = Server::of(shop.routes()).await;
        let curl = async |path: &str, data: &str| {
            let mut command = curl_command(&format!("http://{}{path}", server.at), data);
            let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let first = curl("/charges", "9.99 EUR").await;
        assert!(first.starts_with("HTTP/1.1 201 Created\r\n") && first.ends_with("charge 1"), "{first}");
        let retry = curl("/charges", "9.99 EUR").await;
        assert!(retry.contains("\r\nidempotency-replayed: true\r\n") && retry.ends_with("charge 1"), "{retry}");
        let other = curl("/charges", "10.00 EUR").await;
        assert!(other.starts_with("HTTP/1.1 422 Unprocessable Entity\r\n"), "{other}");
        assert!(other.contains("\"title\":\"Idempotency-Key is already used\""), "{other}");
    });
}

/// curl, as the README has it.
fn curl_command(url: &str, data: &str) -> Command {
    let mut command = Command::new("curl");
    command.args(["-si", "--noproxy", "*", url, "-H", "Idempotency-Key: order-1001", "-d", data]);
    command
}

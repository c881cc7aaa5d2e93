// SPDX-License-Identifier: Apache-2.0
//! The HTTP server of both pages. Anyone can connect to it, so it limits what a connection costs, and
//! it answers only to known host names.
//!
//! A connection that sends no request is closed after a while. When there are too many connections,
//! the oldest is closed: a request takes milliseconds, so the oldest is the least likely to be one.
//! Nothing that a client sends is logged.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Request, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

/// Connections at once: a quarter of the descriptors that processes usually can open.
const MAX_CONNECTIONS: usize = 256;
/// How long the head of a request can take, and how long a connection can be idle.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest head of a request, in bytes.
const MAX_HEAD: usize = 64 << 10;
/// After an accept that failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The host names that a server answers to, besides IP addresses and `localhost`.
///
/// Other names can be those of an attacker: a web site whose name leads to this server looks to a
/// browser as if it had sent the page itself (*DNS rebinding*), so its scripts could read everything.
/// A request without a name does not come from a browser.
#[derive(Clone, Debug, Default)]
pub struct Hosts(Arc<[String]>);

impl Hosts {
    /// `*` stands for all names. Names are in lowercase.
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        Self(names.into_iter().collect())
    }

    fn admit(&self, headers: &HeaderMap) -> bool {
        headers.get_all(header::HOST).into_iter().all(|host| self.is_known(host))
    }

    fn is_known(&self, host: &HeaderValue) -> bool {
        if self.0.iter().any(|name| name == "*") {
            return true;
        }
        let Ok(authority) = Authority::try_from(host.as_bytes()) else { return false };
        let host = authority.host().to_ascii_lowercase();
        let name = host.strip_suffix('.').unwrap_or(&host);
        let literal = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
        literal.unwrap_or(name).parse::<IpAddr>().is_ok()
            || name == "localhost"
            || name.ends_with(".localhost")
            || self.0.iter().any(|known| known == name)
    }
}

/// Serves until `shutdown`, then lets the requests that have begun end. The caller limits how long
/// that takes.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    hosts: Hosts,
    shutdown: CancellationToken,
) {
    let mut tasks = JoinSet::new();
    // The oldest first.
    let mut open = VecDeque::<AbortHandle>::new();
    let mut has_failed = false;
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => break,
            Some(_) = tasks.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        match &accepted {
            Err(error) if !has_failed => {
                tracing::warn!(%error, "the HTTP server cannot accept connections");
            }
            Err(_) | Ok(_) => {}
        }
        has_failed = accepted.is_err();
        let Ok((stream, peer)) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        open.retain(|connection| !connection.is_finished());
        if open.len() >= MAX_CONNECTIONS
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
        }
        let connection = connection(stream, peer, router.clone(), hosts.clone(), shutdown.clone());
        open.push_back(tasks.spawn(connection));
    }
    drop(listener);
    while tasks.join_next().await.is_some() {}
}

async fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    hosts: Hosts,
    shutdown: CancellationToken,
) {
    let service = service_fn(move |mut request: Request<Incoming>| {
        let admitted = hosts.admit(request.headers());
        request.extensions_mut().insert(ConnectInfo(peer));
        let router = router.clone();
        async move {
            match admitted {
                true => router.oneshot(request.map(Body::new)).await,
                false => Ok::<_, Infallible>(unknown_host()),
            }
        }
    });
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(MAX_HEAD);
    let mut serving = pin!(server.serve_connection(TokioIo::new(stream), service));
    // An error concerns only this client.
    tokio::select! {
        _ = serving.as_mut() => return,
        () = shutdown.cancelled() => serving.as_mut().graceful_shutdown(),
    }
    let _ = serving.await;
}

fn unknown_host() -> Response {
    let why = "the host name of this request is not allowed; use the server's IP address or \
               `localhost`, or add the name to `--http_hosts`\n";
    (StatusCode::FORBIDDEN, why).into_response()
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Fails a test that hangs.
    const LIMIT: Duration = Duration::from_secs(60);

    async fn start(names: &[&str]) -> (SocketAddr, CancellationToken, JoinSet<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(async || "hello"));
        let hosts = Hosts::new(names.iter().map(|name| (*name).to_owned()));
        let (shutdown, mut tasks) = (CancellationToken::new(), JoinSet::new());
        tasks.spawn(serve(listener, router, hosts, shutdown.clone()));
        (address, shutdown, tasks)
    }

    /// The whole answer to a request, up to the end of the connection.
    async fn answer(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let read = tokio::time::timeout(LIMIT, stream.read_to_string(&mut answer));
        read.await.expect("an answer in time").unwrap();
        answer
    }

    async fn status(address: SocketAddr, host: &str) -> String {
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        answer(address, &request).await[9..12].to_owned()
    }

    #[tokio::test]
    async fn a_crowd_of_half_sent_requests_keeps_no_request_out() {
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
        let (address, _shutdown, _tasks) = start(&[]).await;
        let mut half_sent = Vec::new();
        for _ in 0..1100 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            // It may be closed already.
            let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: 127.0").await;
            half_sent.push(stream);
        }
        assert_eq!(status(address, "127.0.0.1").await, "200");
        // The server holds no more than its limit: all but that many were closed.
        let mut byte = [0; 1];
        for stream in &mut half_sent[..1100 - MAX_CONNECTIONS] {
            let closed = tokio::time::timeout(LIMIT, stream.read(&mut byte)).await;
            assert!(matches!(closed, Ok(Ok(0) | Err(_))), "{closed:?}");
        }
    }

    #[tokio::test]
    async fn a_request_that_is_never_finished_ends_by_itself() {
        let (address, _shutdown, _tasks) = start(&[]).await;
        let mut drip = TcpStream::connect(address).await.unwrap();
        drip.write_all(b"GET / HTTP/1.1\r\nHost: 127.0").await.unwrap();
        let mut silent = TcpStream::connect(address).await.unwrap();
        for stream in [&mut drip, &mut silent] {
            let closed = tokio::time::timeout(LIMIT, stream.read_to_end(&mut Vec::new())).await;
            assert!(closed.is_ok());
        }
    }

    #[tokio::test]
    async fn only_known_host_names_are_answered() {
        let (address, _shutdown, _tasks) =
            start(&["train.example.com", "elasticdl-a-master.team.svc"]).await;
        for known in [
            "127.0.0.1",
            "127.0.0.1:8080",
            "10.1.2.3:8080",
            "[::1]:8080",
            "[fd00::7]",
            "localhost:8080",
            "a.localhost",
            "LocalHost.",
            "Train.Example.com:443",
            "elasticdl-a-master.team.svc:8080",
        ] {
            assert_eq!(status(address, known).await, "200", "{known}");
        }
        for unknown in [
            "attacker.example",
            "localhost.attacker.example",
            "127.0.0.1.attacker.example",
            "example.com",
            "a.train.example.com",
            "::1",
            "",
            "a b",
        ] {
            assert_eq!(status(address, unknown).await, "403", "{unknown}");
        }
        let two = "GET / HTTP/1.1\r\nHost: localhost\r\nHost: attacker.example\r\n\
                   Connection: close\r\n\r\n";
        assert!(answer(address, two).await.contains("add the name to `--http_hosts`"));
        let no_browser = "GET / HTTP/1.0\r\n\r\n";
        assert!(answer(address, no_browser).await.ends_with("hello"));
    }

    #[tokio::test]
    async fn an_owner_can_allow_every_host_name() {
        let (address, _shutdown, _tasks) = start(&["*"]).await;
        assert_eq!(status(address, "anything.example").await, "200");
    }

    #[tokio::test]
    async fn an_idle_connection_does_not_delay_the_end() {
        let (address, shutdown, mut tasks) = start(&[]).await;
        let mut idle = TcpStream::connect(address).await.unwrap();
        idle.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        assert_ne!(idle.read(&mut [0; 1024]).await.unwrap(), 0);
        shutdown.cancel();
        let ended = tokio::time::timeout(LIMIT, tasks.join_next()).await;
        assert!(matches!(ended, Ok(Some(Ok(())))), "{ended:?}");
    }
}

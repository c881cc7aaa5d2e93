// SPDX-License-Identifier: Apache-2.0
//! The job's page with what it reads and writes, `/metrics` and `/healthz`.
//!
//! Everybody who reaches the port may look; to change something takes the page's token, which
//! comes in a header that no foreign page can send. Nothing is decided here.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::BytesRejection;
use axum::extract::{ConnectInfo, DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use edl_core::job::Event;
use edl_net::key::JobKey;
use edl_net::proto;
use prometheus_client::registry::Registry;
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Code, Status};

use crate::service::{self, Input};
use crate::{convert, page};

/// The longest body of a request, in bytes.
const MAX_BODY: usize = 4096;
/// Those who may watch at once.
const MAX_WATCHERS: usize = 32;
/// News that may wait for a watcher, and for how long, before it is dropped.
const MAX_WAITING: usize = 4;
const PATIENCE: Duration = Duration::from_secs(10);

/// What lies behind the routes.
pub(crate) struct Doors {
    pub(crate) registry: Arc<Mutex<Registry>>,
    pub(crate) health: watch::Receiver<&'static str>,
    pub(crate) news: watch::Receiver<Arc<str>>,
    pub(crate) inputs: mpsc::Sender<Input>,
    pub(crate) key: JobKey,
    pub(crate) streams: TaskTracker,
}

struct Shared {
    doors: Doors,
    live: String,
    watchers: Arc<Semaphore>,
    shutdown: CancellationToken,
}

type App = State<Arc<Shared>>;

pub(crate) async fn serve(listener: TcpListener, doors: Doors, shutdown: CancellationToken) {
    let watchers = Arc::new(Semaphore::new(MAX_WATCHERS));
    let live = page::live();
    let shared = Arc::new(Shared { doors, live, watchers, shutdown: shutdown.clone() });
    let router = Router::new()
        .route("/", get(root))
        .route("/api/all", get(all))
        .route("/api/news", get(news))
        .route("/api/token", post(check_token))
        .route("/api/scale", post(scale))
        .route("/api/stop", post(stop))
        .route("/api/harm", post(harm))
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(shared)
        .into_make_service_with_connect_info::<SocketAddr>();
    let stopped = async move { shutdown.cancelled().await };
    if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(stopped).await {
        tracing::warn!(%error, "the HTTP server for the page and metrics stopped");
    }
}

async fn root(State(shared): App) -> impl IntoResponse {
    (edl_page::HEADERS, shared.live.clone())
}

async fn all(State(shared): App) -> Response {
    match shared.ask(Input::Everything).await {
        Ok(everything) => json(everything),
        Err(status) => refused(&status),
    }
}

/// Server-sent events, one whenever the master has published something. A watcher that does not
/// read gets only the newest, and is dropped when it takes too long even for that.
async fn news(State(shared): App) -> Response {
    let Ok(place) = Arc::clone(&shared.watchers).try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many clients are watching this job\n")
            .into_response();
    };
    let mut news = shared.doors.news.clone();
    let (send, frames) = mpsc::channel::<String>(MAX_WAITING);
    let shutdown = shared.shutdown.clone();
    shared.doors.streams.spawn(async move {
        let _held_to_the_end = place;
        loop {
            tokio::select! {
                // The last news come before the end.
                biased;
                changed = news.changed() => if changed.is_err() { return },
                () = send.closed() => return,
                () = shutdown.cancelled() => return,
            }
            let frame = format!("data: {}\n\n", *news.borrow_and_update());
            if send.send_timeout(frame, PATIENCE).await.is_err() {
                return;
            }
        }
    });
    let headers =
        [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    let frames = ReceiverStream::new(frames).map(Ok::<_, std::convert::Infallible>);
    (headers, Body::from_stream(frames)).into_response()
}

/// Whether the caller's token is this job's.
async fn check_token(State(shared): App, headers: HeaderMap) -> Response {
    match shared.admit(&headers) {
        Ok(()) => json("{}".into()),
        Err(refusal) => *refusal,
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Scale {
    workers: u32,
}

async fn scale(State(shared): App, wish: Wish<Scale>) -> Response {
    let Scale { workers } = wish.wish;
    shared.request(Event::Scale { workers }).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Stop {}

async fn stop(State(shared): App, _: Wish<Stop>) -> Response {
    let reason = "stopped from the job page".into();
    shared.request(Event::Stop { reason, with_checkpoint: true }).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Harmed {
    role: String,
    id: u32,
    how: String,
    #[serde(default)]
    millis: u64,
    #[serde(default)]
    factor: u32,
}

async fn harm(State(shared): App, wish: Wish<Harmed>) -> Response {
    let Wish { wish: Harmed { role, id, how, millis, factor }, from } = wish;
    let request = proto::HarmRequest { role, id, how, millis, factor };
    match convert::harm(&request) {
        Ok(event) => shared.request(event).await,
        Err(status) => refused(&service::refuse(from, status)),
    }
}

async fn metrics(State(shared): App) -> impl IntoResponse {
    let mut text = String::new();
    let registry = shared.doors.registry.lock();
    let encoded =
        registry.map(|registry| prometheus_client::encoding::text::encode(&mut text, &registry));
    match encoded {
        Ok(Ok(())) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            (StatusCode::OK, [(header::CONTENT_TYPE, kind)], text)
        }
        Ok(Err(_)) | Err(_) => {
            (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "text/plain")], text)
        }
    }
}

async fn healthz(State(shared): App) -> String {
    format!("{}\n", *shared.doors.health.borrow())
}

/// What somebody wants who may, and his address.
struct Wish<T> {
    wish: T,
    from: String,
}

impl<T: for<'a> Deserialize<'a>> FromRequest<Arc<Shared>> for Wish<T> {
    type Rejection = Response;

    async fn from_request(request: Request, shared: &Arc<Shared>) -> Result<Self, Response> {
        shared.admit(request.headers()).map_err(|refusal| *refusal)?;
        let address = request.extensions().get::<ConnectInfo<SocketAddr>>();
        let from = service::sender(address.map(|address| address.0));
        let body = Bytes::from_request(request, shared).await.map_err(|error| unread(&error));
        let wish = body.and_then(|body| {
            let invalid = |error| Status::invalid_argument(format!("invalid request: {error}"));
            serde_json::from_slice(&body).map_err(invalid)
        });
        match wish {
            Ok(wish) => Ok(Self { wish, from }),
            Err(why) => Err(refused(&service::refuse(from, why))),
        }
    }
}

impl Shared {
    /// Lets in who holds the token. A browser also says which page it acts for: only ours may.
    fn admit(&self, headers: &HeaderMap) -> Result<(), Box<Response>> {
        if let Some(origin) = headers.get(header::ORIGIN) {
            // Bytes: an origin that is no text is not ours.
            let host = headers.get(header::HOST).map_or(&b""[..], |host| host.as_bytes());
            let ours = [[b"http://", host].concat(), [b"https://", host].concat()];
            if host.is_empty() || !ours.iter().any(|ours| ours == origin.as_bytes()) {
                let why = "requests from other sites cannot change this job\n";
                return Err(Box::new((StatusCode::FORBIDDEN, why).into_response()));
            }
        }
        let word = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let token = word.and_then(|word| word.strip_prefix("Bearer "));
        if token.is_some_and(|token| self.doors.key.is_page_token(token)) {
            return Ok(());
        }
        let why =
            "this request needs the job's token; `elasticdl status` prints the page URL with it\n";
        Err(Box::new((StatusCode::UNAUTHORIZED, why).into_response()))
    }

    /// Has the machine decide.
    async fn request(&self, event: Event) -> Response {
        match self.ask(|reply| Input::Asked { event, reply }).await {
            Ok(Ok(_)) => json("{}".into()),
            Ok(Err(status)) | Err(status) => refused(&status),
        }
    }

    async fn ask<T>(&self, input: impl FnOnce(oneshot::Sender<T>) -> Input) -> Result<T, Status> {
        let gone = || Status::unavailable("the master is stopping");
        let (reply, answer) = oneshot::channel();
        self.doors.inputs.send(input(reply)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())
    }
}

fn json(text: String) -> Response {
    let headers = [(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")];
    (headers, text).into_response()
}

/// Why the body of a request cannot be read.
fn unread(error: &BytesRejection) -> Status {
    if error.status() == StatusCode::PAYLOAD_TOO_LARGE {
        let why = format!("invalid request: the body must be at most {MAX_BODY} bytes");
        return Status::resource_exhausted(why);
    }
    Status::invalid_argument(format!("invalid request: {}", error.body_text()))
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the machine refuses for few reasons")]
fn refused(status: &Status) -> Response {
    let code = match status.code() {
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::FailedPrecondition => StatusCode::FORBIDDEN,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::ResourceExhausted => StatusCode::PAYLOAD_TOO_LARGE,
        _ => StatusCode::BAD_REQUEST,
    };
    (code, format!("{}\n", status.message())).into_response()
}

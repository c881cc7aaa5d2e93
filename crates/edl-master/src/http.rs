// SPDX-License-Identifier: Apache-2.0
//! The job's page with what it reads and writes, `/metrics` and `/healthz`.
//!
//! Everyone who reaches the port, by a known name, may read. Changing something, and reading logs, needs the
//! page's token, in a header that no other page can send. No decisions are made here.

use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::BytesRejection;
use axum::extract::{ConnectInfo, DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use edl_core::job::{Event, JobState, STOP_TIMEOUT};
use edl_core::job_dir::JobDir;
use edl_core::platform::{ChaosKind, Role};
use edl_net::key::JobKey;
use edl_net::proto;
use edl_page::http::Hosts;
use prometheus_client::registry::Registry;
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Code, Status};

use crate::log_part::Wanted;
use crate::service::{self, Input, Inputs};
use crate::{convert, curve_file, page};

/// The longest body of a request, in bytes.
const MAX_BODY: usize = 4096;
/// Watchers at once.
const MAX_WATCHERS: usize = 32;
/// Updates that may wait for a watcher, and for how long, before it is dropped.
const MAX_WAITING: usize = 4;
const PATIENCE: Duration = Duration::from_secs(10);

/// What the routes use.
pub(crate) struct HttpContext {
    pub(crate) registry: Arc<Mutex<Registry>>,
    pub(crate) health: watch::Receiver<JobState>,
    pub(crate) updates: watch::Receiver<Arc<str>>,
    pub(crate) inputs: Inputs,
    pub(crate) key: JobKey,
    pub(crate) job_dir: JobDir,
    pub(crate) streams: TaskTracker,
}

struct Shared {
    context: HttpContext,
    live: String,
    watchers: Arc<Semaphore>,
    /// Reads of the curves in progress.
    readers: Arc<Semaphore>,
    shutdown: CancellationToken,
}

type App = State<Arc<Shared>>;

pub(crate) async fn serve(
    listener: TcpListener,
    context: HttpContext,
    hosts: Hosts,
    shutdown: CancellationToken,
) {
    let watchers = Arc::new(Semaphore::new(MAX_WATCHERS));
    let live = page::live();
    // A long read keeps a core busy for some milliseconds: readers take turns.
    let readers = Arc::new(Semaphore::new(1));
    let shared = Arc::new(Shared { context, live, watchers, readers, shutdown: shutdown.clone() });
    let router = Router::new()
        .route("/", get(root))
        .route("/api/all", get(all))
        .route("/api/curves", get(curves))
        .route("/api/news", get(news))
        .route("/api/token", post(check_token))
        .route("/api/scale", post(scale))
        .route("/api/stop", post(stop))
        .route("/api/chaos", post(chaos))
        .route("/api/logs", post(logs))
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(shared);
    edl_page::http::serve(listener, router, hosts, shutdown).await;
}

async fn root(State(shared): App) -> impl IntoResponse {
    (edl_page::HEADERS, shared.live.clone())
}

async fn all(State(shared): App) -> Response {
    match shared.context.inputs.ask(Input::Everything).await {
        Ok(everything) => json(everything),
        Err(status) => refused(&status),
    }
}

/// The curves in the range of time of the query, all of them without one.
async fn curves(State(shared): App, uri: Uri) -> Response {
    let (path, range) = (shared.context.job_dir.curves(), range(uri.query()));
    let turn = Arc::clone(&shared.readers).acquire_owned().await;
    let read = tokio::task::spawn_blocking(move || {
        // A client that disconnects does not end the read.
        let _held_to_the_end = turn;
        curve_file::read(&path, range)
    });
    let read = read.await;
    match read.map_err(io::Error::other).flatten() {
        Ok(points) => json(page::curves(&points)),
        Err(error) => {
            let why = format!("cannot read the curves: {error}\n");
            (StatusCode::INTERNAL_SERVER_ERROR, why).into_response()
        }
    }
}

/// `from=1.5&to=2.5`
fn range(query: Option<&str>) -> Range<f64> {
    let end = |name: &str| {
        let mut pairs = query.unwrap_or_default().split('&');
        let number = pairs.find_map(|pair| pair.strip_prefix(name)?.parse::<f64>().ok());
        number.filter(|number| number.is_finite())
    };
    end("from=").unwrap_or(f64::MIN)..end("to=").unwrap_or(f64::MAX)
}

/// Server-sent events, one whenever the master has published something. A watcher that does not
/// read gets only the newest, and is dropped when it takes too long even for that.
async fn news(State(shared): App) -> Response {
    let Ok(place) = Arc::clone(&shared.watchers).try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many clients are watching this job\n")
            .into_response();
    };
    let mut news = shared.context.updates.clone();
    let (send, frames) = mpsc::channel::<String>(MAX_WAITING);
    let shutdown = shared.shutdown.clone();
    shared.context.streams.spawn(async move {
        let _held_to_the_end = place;
        loop {
            tokio::select! {
                // The last update comes before the end.
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

async fn scale(State(shared): App, request: Admitted<Scale>) -> Response {
    let Scale { workers } = request.body;
    shared.request(Event::Scale { workers }).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Stop {}

async fn stop(State(shared): App, _: Admitted<Stop>) -> Response {
    let reason = "stopped from the job page".into();
    shared.request(Event::Stop { reason, within: STOP_TIMEOUT }).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChaosBody {
    role: Role,
    id: u32,
    how: ChaosKind,
    #[serde(default)]
    millis: u64,
    #[serde(default)]
    factor: u32,
}

async fn chaos(State(shared): App, request: Admitted<ChaosBody>) -> Response {
    match request.body.event() {
        Ok(event) => shared.request(event).await,
        Err(status) => refused(&service::refuse(request.from, status)),
    }
}

impl ChaosBody {
    fn event(self) -> Result<Event, Status> {
        let Self { role, id, how, millis, factor } = self;
        let (role, how) = (role.into(), how.into());
        convert::chaos(&proto::ChaosRequest { role, id, how, millis, factor })
    }
}

/// A part of a log. Logs can contain secrets, so they need the token, too.
async fn logs(State(shared): App, request: Admitted<Wanted>) -> Response {
    let folder = shared.context.job_dir.logs();
    let read = tokio::task::spawn_blocking(move || request.body.read(&folder)).await;
    let part = read.map_err(io::Error::other).flatten();
    match part.and_then(|part| serde_json::to_string(&part).map_err(io::Error::other)) {
        Ok(part) => json(part),
        Err(error) => {
            let why = format!("cannot read the log: {error}\n");
            (StatusCode::INTERNAL_SERVER_ERROR, why).into_response()
        }
    }
}

async fn metrics(State(shared): App) -> impl IntoResponse {
    let mut text = String::new();
    let registry = shared.context.registry.lock();
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
    format!("{}\n", *shared.context.health.borrow())
}

/// A request from a caller with the token.
struct Admitted<T> {
    body: T,
    from: String,
}

impl<T: for<'a> Deserialize<'a>> FromRequest<Arc<Shared>> for Admitted<T> {
    type Rejection = Response;

    async fn from_request(request: Request, shared: &Arc<Shared>) -> Result<Self, Response> {
        shared.admit(request.headers()).map_err(|refusal| *refusal)?;
        let address = request.extensions().get::<ConnectInfo<SocketAddr>>();
        let from = service::sender(address.map(|address| address.0));
        let body = Bytes::from_request(request, shared).await.map_err(|error| unread(&error));
        match body.and_then(|body| parse(&body)) {
            Ok(body) => Ok(Self { body, from }),
            Err(why) => Err(refused(&service::refuse(from, why))),
        }
    }
}

fn parse<T: for<'a> Deserialize<'a>>(body: &[u8]) -> Result<T, Status> {
    let invalid = |error| Status::invalid_argument(format!("invalid request: {error}"));
    serde_json::from_slice(body).map_err(invalid)
}

/// Reads bytes as the body of each request.
pub(crate) fn parse_bodies(body: &[u8]) {
    drop(parse::<Scale>(body));
    drop(parse::<Stop>(body));
    drop(parse::<Wanted>(body));
    drop(parse::<ChaosBody>(body).and_then(ChaosBody::event));
}

impl Shared {
    /// Admits callers with the token. A browser also names the page it acts for, which must be ours.
    fn admit(&self, headers: &HeaderMap) -> Result<(), Box<Response>> {
        if let Some(origin) = headers.get(header::ORIGIN) {
            // Bytes: an origin that is not text is not ours.
            let host = headers.get(header::HOST).map_or(&b""[..], |host| host.as_bytes());
            let ours = [[b"http://", host].concat(), [b"https://", host].concat()];
            if host.is_empty() || !ours.iter().any(|ours| ours == origin.as_bytes()) {
                let why = "requests from other sites cannot change this job\n";
                return Err(Box::new((StatusCode::FORBIDDEN, why).into_response()));
            }
        }
        let header = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let token = header.and_then(|header| header.strip_prefix("Bearer "));
        if token.is_some_and(|token| self.context.key.is_page_token(token)) {
            return Ok(());
        }
        let why =
            "this request needs the job's token; `elasticdl status` prints the page URL with it\n";
        Err(Box::new((StatusCode::UNAUTHORIZED, why).into_response()))
    }

    /// Lets the job decide.
    async fn request(&self, event: Event) -> Response {
        match self.context.inputs.request(event).await {
            Ok(_) => json("{}".into()),
            Err(status) => refused(&status),
        }
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

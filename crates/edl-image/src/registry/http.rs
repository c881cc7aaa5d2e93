// SPDX-License-Identifier: Apache-2.0
//! Requests and answers: the only module that uses the HTTP library.
//!
//! Requests are made one after the other, so callers block; every wait has a deadline.

use std::fs::File;
use std::future::Future;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::http::{self, HeaderMap, Response};
use hyper_util::client::legacy;
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::TokioExecutor;
use tokio::runtime::{self, Runtime};
use tokio::time::{timeout, timeout_at};

use connect::Connector;
use upload::{Pace, Upload};

mod connect;
mod upload;

const LIMITS: Limits = Limits {
    connect: Duration::from_secs(10),
    answer: Duration::from_secs(180),
    progress: Duration::from_secs(60),
};
/// The most that is read of a refusal.
const MAX_REFUSAL: u64 = 64 << 10;
const MAX_REDIRECTS: usize = 10;

/// Deadlines.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// For a connection: its name, TCP and TLS.
    connect: Duration,
    /// For an answer; a registry is silent while it checks a large blob.
    answer: Duration,
    /// Longest silence in the middle of a body.
    progress: Duration,
}

#[derive(Debug)]
pub(super) struct Http {
    client: legacy::Client<Connector, Upload>,
    driver: Arc<Driver>,
    limits: Limits,
}

#[derive(Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) method: &'a str,
    pub(super) url: &'a str,
    pub(super) headers: &'a [(&'a str, &'a str)],
    pub(super) body: Body<'a>,
}

/// What is sent. A file is opened again for every attempt.
#[derive(Clone, Copy)]
pub(super) enum Body<'a> {
    None,
    Bytes(&'a [u8]),
    File(&'a dyn Fn() -> Result<File, super::Error>),
}

/// An answer whose body is still to be read.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) location: Option<String>,
    pub(super) content_type: Option<String>,
    /// The digest of what the registry has stored.
    pub(super) digest: Option<String>,
    pub(super) challenges: Vec<String>,
    body: Incoming,
    driver: Arc<Driver>,
    limits: Limits,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{}", last_cause(.0))]
    Http(legacy::Error),
    #[error("cannot build the request")]
    Request(#[source] http::Error),
    #[error("no response within {} s", .0.as_secs())]
    Silent(Duration),
    #[error("upload stalled for {} s", .0.as_secs())]
    Stuck(Duration),
    #[error("more than {MAX_REDIRECTS} redirects")]
    Redirects,
    #[error("the response ended early")]
    Body(#[source] io::Error),
    #[error("{0}")]
    File(String),
}

/// Runs the client's futures on the calling thread.
#[derive(Debug)]
struct Driver(Option<Runtime>);

impl Driver {
    fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.0.as_ref().expect("it is there until it is dropped").block_on(work)
    }
}

impl Drop for Driver {
    /// Does not wait for a pending DNS lookup.
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

impl<'a> Request<'a> {
    pub(super) fn new(method: &'a str, url: &'a str) -> Self {
        Self { method, url, headers: &[], body: Body::None }
    }
}

impl Http {
    /// Proxies are not used for this machine.
    pub(super) fn new(is_loopback: bool) -> io::Result<Self> {
        Self::with((!is_loopback).then(Matcher::from_env), LIMITS)
    }

    fn with(proxies: Option<Matcher>, limits: Limits) -> io::Result<Self> {
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        let connector = Connector::new(proxies, limits.connect);
        // Nothing runs between requests that would notice a closed connection.
        let client = legacy::Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(0)
            .build(connector);
        Ok(Self { client, driver: Arc::new(Driver(Some(runtime))), limits })
    }

    /// Sends a request and follows redirects, but does not send credentials along.
    pub(super) fn send(&self, request: Request<'_>) -> Result<Answer, Error> {
        let headers = request.headers.iter().copied();
        let kept: Vec<_> = headers.filter(|(name, _)| *name != "Authorization").collect();
        let mut answer = self.once(request)?;
        let (mut method, mut url) = (request.method, request.url.to_owned());
        for _ in 0..MAX_REDIRECTS {
            let Some(next) = redirected(method, &url, &answer) else { return Ok(answer) };
            (method, url) = next;
            answer = self.once(Request { headers: &kept, ..Request::new(method, &url) })?;
        }
        match redirected(method, &url, &answer) {
            Some(_) => Err(Error::Redirects),
            None => Ok(answer),
        }
    }

    fn once(&self, request: Request<'_>) -> Result<Answer, Error> {
        let Request { method, url, headers, body } = request;
        let pace = Pace::new(self.limits);
        let upload = match body {
            Body::None => Upload::of_bytes(&[], &pace),
            Body::Bytes(bytes) => Upload::of_bytes(bytes, &pace),
            Body::File(open) => {
                let file = open().map_err(|error| Error::File(error.to_string()))?;
                Upload::of_file(file, &pace).map_err(|error| Error::File(error.to_string()))?
            }
        };
        let mut request = http::Request::builder().method(method).uri(url);
        request = request.header("User-Agent", concat!("elasticdl/", env!("CARGO_PKG_VERSION")));
        if ["POST", "PUT"].contains(&method) {
            request = request.header("Content-Length", upload.n_left());
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(upload).map_err(Error::Request)?;
        let response = self.driver.run(self.answered(request, &pace))?;
        Ok(Answer::new(response, Arc::clone(&self.driver), self.limits))
    }

    /// The head of the answer. There is no deadline while the upload makes progress.
    async fn answered(
        &self,
        request: http::Request<Upload>,
        pace: &Pace,
    ) -> Result<Response<Incoming>, Error> {
        let mut response = self.client.request(request);
        loop {
            let deadline = pace.deadline();
            match timeout_at(deadline.into(), &mut response).await {
                Ok(response) => return response.map_err(Error::Http),
                Err(_) if pace.deadline() > deadline => {}
                Err(_) if pace.is_sent() => return Err(Error::Silent(self.limits.answer)),
                Err(_) => return Err(Error::Stuck(self.limits.progress)),
            }
        }
    }
}

impl Answer {
    fn new(response: Response<Incoming>, driver: Arc<Driver>, limits: Limits) -> Self {
        let (parts, body) = response.into_parts();
        let text = |name: &str| first(&parts.headers, name);
        let challenges = parts.headers.get_all("www-authenticate").iter();
        Self {
            status: parts.status.as_u16(),
            location: text("location"),
            content_type: text("content-type"),
            digest: text("docker-content-digest"),
            challenges: challenges.filter_map(|value| Some(value.to_str().ok()?.into())).collect(),
            body,
            driver,
            limits,
        }
    }

    /// Reads the body, but never more than `limit` bytes and one.
    pub(super) fn copy(mut self, limit: u64, out: &mut impl Write) -> Result<(), Error> {
        // One byte more, so a body that is too long has a different digest.
        let mut left = limit + 1;
        while left > 0 {
            let frame = self.driver.run(async {
                timeout(self.limits.progress, self.body.frame()).await.map_err(|_| {
                    let silence = self.limits.progress.as_secs();
                    io::Error::new(io::ErrorKind::TimedOut, format!("no data for {silence} s"))
                })
            });
            let Some(frame) = frame.map_err(Error::Body)? else { break };
            let frame = frame.map_err(|error| Error::Body(io::Error::other(last_cause(&error))))?;
            // Anything else is a trailer.
            let Ok(data) = frame.into_data() else { continue };
            let n_taken = usize::try_from(left).map_or(data.len(), |left| left.min(data.len()));
            out.write_all(&data[..n_taken]).map_err(Error::Body)?;
            left -= n_taken as u64;
        }
        Ok(())
    }

    /// The message of a refusal.
    pub(super) fn message(self) -> Option<String> {
        let mut text = Vec::new();
        self.copy(MAX_REFUSAL, &mut text).ok()?;
        let refusal: serde_json::Value = serde_json::from_slice(&text).ok()?;
        let message = refusal["errors"][0]["message"].as_str()?;
        Some(message.to_owned())
    }
}

/// Method and address of the next request, if an answer is a redirect. A request with a body is not
/// redirected.
fn redirected(method: &str, url: &str, answer: &Answer) -> Option<(&'static str, String)> {
    let location = answer.location.as_ref()?;
    let method = match (answer.status, method) {
        (301 | 302 | 303 | 307 | 308, "HEAD") => "HEAD",
        (301..=303, _) | (307 | 308, "GET") => "GET",
        _ => return None,
    };
    Some((method, joined(url, location)))
}

/// The address that a `Location` means.
fn joined(url: &str, location: &str) -> String {
    let location = location.split('#').next().unwrap_or_default();
    let path = location.find(['/', '?']).unwrap_or(location.len());
    if location[..path].ends_with(':') {
        return location.into();
    }
    let (scheme, rest) = url.split_once("://").unwrap_or(("https", url));
    if location.starts_with("//") {
        return format!("{scheme}:{location}");
    }
    let whole = rest.split('?').next().unwrap_or_default();
    let host = whole.split('/').next().unwrap_or_default();
    let folder = whole.rfind('/').map_or(whole, |end| &whole[..end]);
    match location.chars().next() {
        Some('/') => format!("{scheme}://{host}{location}"),
        Some('?') => format!("{scheme}://{whole}{location}"),
        _ => format!("{scheme}://{folder}/{location}"),
    }
}

/// The innermost cause, which is the informative one.
fn last_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.last().map_or(String::new(), ToString::to_string)
}

fn first(headers: &HeaderMap, name: &str) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}

/// The scheme and the host of an absolute address.
pub(super) fn scheme_and_host(url: &str) -> Option<(String, String)> {
    let uri: http::Uri = url.parse().ok()?;
    Some((uri.scheme_str()?.to_ascii_lowercase(), uri.host()?.to_owned()))
}

/// Text as part of a query.
pub(super) fn escaped(text: &str) -> String {
    let mut result = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                result.push(char::from(byte));
            }
            _ => result.push_str(&format!("%{byte:02X}")),
        }
    }
    result
}

#[cfg(test)]
mod tests;

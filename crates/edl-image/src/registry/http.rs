// SPDX-License-Identifier: Apache-2.0
//! Requests and answers: the one place that knows the HTTP library.

use std::fs::File;
use std::io::{self, Read as _, Write};
use std::time::Duration;

use ureq::http::{HeaderMap, Request, Response};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, AsSendBody};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A registry that checks a large blob is silent meanwhile.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(180);
/// Longest silence in the middle of a body.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(60);
/// Most that is read of a refusal.
const MAX_REFUSAL: u64 = 64 << 10;

#[derive(Debug)]
pub(super) struct Http {
    agent: Agent,
}

/// What is sent. A file is opened anew for every attempt.
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
    body: ureq::Body,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{0}")]
    Http(#[source] Box<ureq::Error>),
    #[error("the request cannot be written")]
    Request(#[source] ureq::http::Error),
    #[error("the answer broke off")]
    Body(#[source] io::Error),
    #[error("{0}")]
    File(String),
}

impl Http {
    /// Proxies are for other machines than this one.
    pub(super) fn new(is_loopback: bool) -> Self {
        let found = rustls_native_certs::load_native_certs().certs;
        let roots: Vec<_> =
            found.iter().map(|each| Certificate::from_der(each.as_ref()).to_owned()).collect();
        let roots =
            if roots.is_empty() { RootCerts::WebPki } else { RootCerts::new_with_certs(&roots) };
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .user_agent(concat!("elasticdl/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(CONNECT_TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(ANSWER_TIMEOUT))
            .timeout_per_read(Some(PROGRESS_TIMEOUT))
            .timeout_per_write(Some(PROGRESS_TIMEOUT));
        if is_loopback {
            config = config.proxy(None);
        }
        Self { agent: Agent::new_with_config(config.build()) }
    }

    pub(super) fn send(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: Body<'_>,
    ) -> Result<Answer, Error> {
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        match body {
            Body::None if ["POST", "PUT"].contains(&method) => self.run(request.body(&[] as &[u8])),
            Body::None => self.run(request.body(())),
            Body::Bytes(bytes) => self.run(request.body(bytes)),
            Body::File(open) => {
                let file = open().map_err(|error| Error::File(error.to_string()))?;
                self.run(request.body(file))
            }
        }
    }

    fn run<B: AsSendBody>(
        &self,
        request: Result<Request<B>, ureq::http::Error>,
    ) -> Result<Answer, Error> {
        let request = request.map_err(Error::Request)?;
        let response = self.agent.run(request).map_err(|error| Error::Http(Box::new(error)))?;
        Ok(Answer::new(response))
    }
}

impl Answer {
    fn new(response: Response<ureq::Body>) -> Self {
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
        }
    }

    /// Reads the body, but never more than `limit` bytes and one.
    pub(super) fn copy(self, limit: u64, out: &mut impl Write) -> Result<(), Error> {
        // One byte more, so that a body that is too long has another digest.
        let mut reader = self.body.into_with_config().limit(u64::MAX).reader().take(limit + 1);
        io::copy(&mut reader, out).map(|_| ()).map_err(Error::Body)
    }

    /// What the registry says about its refusal.
    pub(super) fn sentence(self) -> Option<String> {
        let mut text = Vec::new();
        self.copy(MAX_REFUSAL, &mut text).ok()?;
        let said: serde_json::Value = serde_json::from_slice(&text).ok()?;
        let message = said["errors"][0]["message"].as_str()?;
        Some(message.to_owned())
    }
}

fn first(headers: &HeaderMap, name: &str) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
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

// SPDX-License-Identifier: Apache-2.0
//! Connections: direct or through a proxy, with this machine's TLS roots.

use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::Uri;
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::TokioIo;
use rustls::crypto::ring;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tower_service::Service;

type Stream = MaybeHttpsStream<TokioIo<TcpStream>>;
type Connecting<T> = Pin<Box<dyn Future<Output = Result<T, Box<dyn Error + Send + Sync>>> + Send>>;

/// Connects within a deadline.
#[derive(Clone)]
pub(super) struct Connector {
    inner: HttpsConnector<Route>,
    limit: Duration,
}

/// The way to a host, before TLS with it.
#[derive(Clone)]
struct Route {
    plain: HttpConnector,
    tls: Arc<ClientConfig>,
    proxies: Option<Arc<Matcher>>,
}

impl Connector {
    pub(super) fn new(proxies: Option<Matcher>, limit: Duration) -> Self {
        let tls = Arc::new(tls());
        let mut plain = HttpConnector::new();
        plain.enforce_http(false);
        // Shared among the addresses of a host.
        plain.set_connect_timeout(Some(limit));
        let route = Route { plain, tls: Arc::clone(&tls), proxies: proxies.map(Arc::new) };
        Self { inner: HttpsConnector::from((route, tls)), limit }
    }
}

/// The roots of this machine, or Mozilla's if it has none.
fn tls() -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring knows the versions of TLS")
        .with_root_certificates(roots)
        .with_no_client_auth()
}

impl Service<Uri> for Connector {
    type Response = MaybeHttpsStream<Stream>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.inner.call(uri);
        let limit = self.limit;
        Box::pin(async move {
            let late = |_| format!("no connection within {} s", limit.as_secs());
            tokio::time::timeout(limit, connecting).await.map_err(late)?
        })
    }
}

impl Service<Uri> for Route {
    type Response = Stream;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let mut plain = self.plain.clone();
        let is_https = uri.scheme_str() == Some("https");
        let proxy = self.proxies.as_ref().filter(|_| is_https).and_then(|all| all.intercept(&uri));
        let Some(proxy) = proxy else {
            return Box::pin(async move { Ok(MaybeHttpsStream::Http(plain.call(uri).await?)) });
        };
        // A proxy may require TLS itself.
        let connector = HttpsConnector::from((plain, Arc::clone(&self.tls)));
        let mut tunnel = Tunnel::new(proxy.uri().clone(), connector);
        if let Some(authorization) = proxy.basic_auth() {
            tunnel = tunnel.with_auth(authorization.clone());
        }
        Box::pin(async move { Ok(tunnel.call(uri).await?) })
    }
}

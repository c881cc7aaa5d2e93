// SPDX-License-Identifier: Apache-2.0
//! `/metrics` and `/healthz`: read-only, for monitors.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

type Health = watch::Receiver<&'static str>;

pub(crate) async fn serve(
    listener: TcpListener,
    registry: Arc<Mutex<Registry>>,
    health: Health,
    shutdown: CancellationToken,
) {
    let router = Router::new()
        .route("/metrics", get(metrics).with_state(registry))
        .route("/healthz", get(healthz).with_state(health));
    let stopped = async move { shutdown.cancelled().await };
    if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(stopped).await {
        tracing::warn!(%error, "metrics cannot be served any more");
    }
}

async fn metrics(State(registry): State<Arc<Mutex<Registry>>>) -> impl IntoResponse {
    let mut text = String::new();
    let encoded = registry
        .lock()
        .map(|registry| prometheus_client::encoding::text::encode(&mut text, &registry));
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

async fn healthz(State(health): State<Health>) -> String {
    format!("{}\n", *health.borrow())
}

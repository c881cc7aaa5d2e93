// SPDX-License-Identifier: Apache-2.0
//! What the operator serves: the page of the cluster with what it reads, `/metrics`, `/healthz`.
//! Whoever reaches the port may look; nothing can be changed here.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use edl_page::Page;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::window::Window;

const PAGE: Page = Page {
    title: "elasticdl cluster",
    body: include_str!("page/cluster.html"),
    style: include_str!("page/cluster.css"),
    script: include_str!("page/cluster.js"),
};

/// What lies behind the routes.
#[derive(Clone)]
struct Doors {
    metrics: Metrics,
    window: Window,
    /// Tells this process from the one before, whose versions mean something else.
    started_nanos: u128,
}

/// Everything that is served.
pub fn router(metrics: Metrics, window: Window) -> Router {
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let doors = Doors { metrics, window, started_nanos: started.as_nanos() };
    Router::new()
        .route("/", get(async || (edl_page::HEADERS, PAGE.with(""))))
        .route("/api/cluster", get(cluster))
        .route("/metrics", get(numbers))
        .route("/healthz", get(async || "ok"))
        .with_state(doors)
}

/// Serves until `shutdown`.
pub async fn serve(listener: TcpListener, router: Router, shutdown: CancellationToken) {
    let stopped = async move { shutdown.cancelled().await };
    if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(stopped).await {
        tracing::warn!(%error, "stopped serving the page and metrics");
    }
}

/// The whole cluster as JSON. Who has it already is told so, and gets it no second time.
async fn cluster(State(doors): State<Doors>, headers: HeaderMap) -> Response {
    let Some(text) = doors.window.text().await else {
        let why = "cluster state is unavailable; see the operator's log\n";
        return (StatusCode::INTERNAL_SERVER_ERROR, why).into_response();
    };
    let tag = format!("\"{}-{}\"", doors.started_nanos, text.version);
    let has = headers.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    let told = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (header::CACHE_CONTROL, "no-cache".to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::ETAG, tag.clone()),
    ];
    if has == Some(tag.as_str()) {
        return (StatusCode::NOT_MODIFIED, told).into_response();
    }
    (told, text.json).into_response()
}

async fn numbers(State(doors): State<Doors>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match doors.metrics.text() {
        Some(text) => (StatusCode::OK, [(header::CONTENT_TYPE, kind)], text),
        None => {
            let kind = [(header::CONTENT_TYPE, "text/plain")];
            (StatusCode::INTERNAL_SERVER_ERROR, kind, String::new())
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use axum::http::Request;
    use serde_json::{Value, json};
    use tower::ServiceExt as _;

    use super::*;
    use crate::fixture::{World, job, node};
    use crate::overview::Look;

    async fn ask(
        router: &Router,
        path: &str,
        tag: Option<&str>,
    ) -> (StatusCode, HeaderMap, String) {
        let mut request = Request::get(path);
        if let Some(tag) = tag {
            request = request.header(header::IF_NONE_MATCH, tag);
        }
        let request = request.body(Body::empty()).unwrap();
        let (head, body) = router.clone().oneshot(request).await.unwrap().into_parts();
        let body = to_bytes(body, 1 << 24).await.unwrap();
        (head.status, head.headers, String::from_utf8(body.into()).unwrap())
    }

    fn look(world: &mut World, window: &Window) {
        let (observed, plan, actions) = world.plan();
        window.show(Look::new(observed, plan, &actions));
    }

    #[tokio::test]
    async fn the_page_is_one_file_that_loads_nothing_from_elsewhere() {
        let router = router(Metrics::new(), Window::default());
        let (code, headers, page) = ask(&router, "/", None).await;
        assert_eq!(
            (code, &headers[header::CONTENT_TYPE]),
            (StatusCode::OK, &"text/html; charset=utf-8".parse().unwrap())
        );
        assert!(
            headers[header::CONTENT_SECURITY_POLICY]
                .to_str()
                .unwrap()
                .starts_with("default-src 'none'")
        );
        for not_there in ["/*STYLE*/", "/*COMMON*/", "/*SCRIPT*/", "src=\"", "@import", "url("] {
            assert!(!page.contains(not_there), "{not_there}");
        }
        assert_eq!(ask(&router, "/metrics", None).await.0, StatusCode::OK);
        assert_eq!(ask(&router, "/healthz", None).await.2, "ok");
        assert_eq!(ask(&router, "/etc/passwd", None).await.0, StatusCode::NOT_FOUND);
    }

    #[tokio::test]
    async fn the_cluster_is_told_anew_only_when_something_has_changed() {
        let window = Window::default();
        let router = router(Metrics::new(), window.clone());
        let (_, headers, body) = ask(&router, "/api/cluster", None).await;
        let told: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((&told["leads"], &told["cluster"]), (&json!(false), &Value::Null));
        let nothing = headers[header::ETAG].to_str().unwrap().to_owned();

        window.leads(true);
        let jobs = [job("a", &json!({"min_workers": 1, "max_workers": 4}))];
        let mut world = World::new(&[node("n1", "8", "32Gi")], &jobs);
        look(&mut world, &window);
        let (code, headers, body) = ask(&router, "/api/cluster", Some(&nothing)).await;
        let told: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((code, &told["leads"]), (StatusCode::OK, &json!(true)));
        assert_eq!(told["cluster"]["jobs"][0]["planned"], 4);
        assert_eq!(told["history"]["changes"], json!([[world.now_secs, 0, 4, 0]]));
        let tag = headers[header::ETAG].to_str().unwrap().to_owned();
        let (code, _, body) = ask(&router, "/api/cluster", Some(&tag)).await;
        assert_eq!((code, body.as_str()), (StatusCode::NOT_MODIFIED, ""));

        world.round();
        world.settle();
        look(&mut world, &window);
        let (code, _, body) = ask(&router, "/api/cluster", Some(&tag)).await;
        let told: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((code, &told["cluster"]["jobs"][0]["running"]), (StatusCode::OK, &json!(4)));
        assert_eq!(told["history"]["changes"].as_array().unwrap().len(), 2);
    }
}

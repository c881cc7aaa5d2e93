// SPDX-License-Identifier: Apache-2.0
//! The operator's HTTP server: the cluster page and its data, `/metrics` and `/healthz`. It is
//! read-only and needs no authentication.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use edl_page::Page;

use crate::health::Health;
use crate::metrics::Metrics;
use crate::page_data::PageData;

const PAGE: Page = Page {
    title: "elasticdl cluster",
    body: include_str!("page/cluster.html"),
    style: include_str!("page/cluster.css"),
    script: include_str!("page/cluster.js"),
};

/// What the handlers use.
#[derive(Clone)]
struct AppState {
    metrics: Metrics,
    page_data: PageData,
    health: Health,
    /// Distinguishes this process from an earlier one, whose versions differ.
    started_nanos: u128,
}

pub fn router(metrics: Metrics, page_data: PageData, health: Health) -> Router {
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let app = AppState { metrics, page_data, health, started_nanos: started.as_nanos() };
    Router::new()
        .route("/", get(async || (edl_page::HEADERS, PAGE.with(""))))
        .route("/api/cluster", get(cluster))
        .route("/metrics", get(numbers))
        .route("/healthz", get(healthz))
        .with_state(app)
}

/// The whole cluster as JSON, or `304 Not Modified` if the client has this version.
async fn cluster(State(app): State<AppState>, request: HeaderMap) -> Response {
    let Some(json) = app.page_data.json().await else {
        let why = "cluster state is unavailable; see the operator's log\n";
        return (StatusCode::INTERNAL_SERVER_ERROR, why).into_response();
    };
    let tag = format!("\"{}-{}\"", app.started_nanos, json.version);
    let has = request.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    let headers = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (header::CACHE_CONTROL, "no-cache".to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::ETAG, tag.clone()),
    ];
    if has == Some(tag.as_str()) {
        return (StatusCode::NOT_MODIFIED, headers).into_response();
    }
    (headers, json.text).into_response()
}

/// Fails while a plan takes too long, so that Kubernetes restarts the operator.
async fn healthz(State(app): State<AppState>) -> (StatusCode, &'static str) {
    match app.health.is_stuck() {
        true => {
            (StatusCode::SERVICE_UNAVAILABLE, "planning takes too long; restart the operator\n")
        }
        false => (StatusCode::OK, "ok"),
    }
}

async fn numbers(State(app): State<AppState>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match app.metrics.text() {
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
    use crate::overview::Pass;
    use crate::tests::fake_cluster::{FakeCluster, job, node};

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

    fn show_pass(cluster: &mut FakeCluster, page_data: &PageData) {
        let (observed, plan, actions) = cluster.plan();
        page_data.show(Pass::new(observed, plan, &actions));
    }

    #[tokio::test]
    async fn the_page_is_one_file_that_loads_nothing_from_elsewhere() {
        let health = Health::default();
        let router = router(Metrics::new(), PageData::default(), health.clone());
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
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let planning = health.within(std::time::Duration::ZERO, move || ended.recv());
        let asking = async {
            health.watch().wait_for(|stuck| *stuck).await.unwrap();
            let (code, _, why) = ask(&router, "/healthz", None).await;
            drop(end);
            (code, why)
        };
        let (code, why) = tokio::join!(planning, asking).1;
        assert_eq!(code, StatusCode::SERVICE_UNAVAILABLE, "{why}");
        assert_eq!(ask(&router, "/etc/passwd", None).await.0, StatusCode::NOT_FOUND);
    }

    #[tokio::test]
    async fn the_cluster_is_sent_again_only_after_a_change() {
        let page_data = PageData::default();
        let router = router(Metrics::new(), page_data.clone(), Health::default());
        let (_, headers, body) = ask(&router, "/api/cluster", None).await;
        let json: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((&json["leads"], &json["cluster"]), (&json!(false), &Value::Null));
        let nothing = headers[header::ETAG].to_str().unwrap().to_owned();

        page_data.leads(true);
        let jobs = [job("a", &json!({"min_workers": 1, "max_workers": 4}))];
        let mut cluster = FakeCluster::new(&[node("n1", "8", "32Gi")], &jobs);
        show_pass(&mut cluster, &page_data);
        let (code, headers, body) = ask(&router, "/api/cluster", Some(&nothing)).await;
        let json: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((code, &json["leads"]), (StatusCode::OK, &json!(true)));
        assert_eq!(json["cluster"]["jobs"][0]["planned"], 4);
        assert_eq!(json["history"]["changes"], json!([[cluster.now_secs, 0, 4, 0]]));
        let tag = headers[header::ETAG].to_str().unwrap().to_owned();
        let (code, _, body) = ask(&router, "/api/cluster", Some(&tag)).await;
        assert_eq!((code, body.as_str()), (StatusCode::NOT_MODIFIED, ""));

        cluster.pass();
        cluster.settle();
        show_pass(&mut cluster, &page_data);
        let (code, _, body) = ask(&router, "/api/cluster", Some(&tag)).await;
        let json: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((code, &json["cluster"]["jobs"][0]["running"]), (StatusCode::OK, &json!(4)));
        assert_eq!(json["history"]["changes"].as_array().unwrap().len(), 2);
    }
}

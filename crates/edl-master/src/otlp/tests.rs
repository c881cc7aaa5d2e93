// SPDX-License-Identifier: Apache-2.0
//! Against a collector that implements the protocol, and one that does not answer.

use std::sync::{Arc, Mutex};

use edl_net::otlp::trace_service_server::{TraceService, TraceServiceServer};
use edl_net::otlp::{ExportTracePartialSuccess, ExportTraceServiceResponse};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response};

use super::*;

/// A collector that keeps what it gets, and refuses the first span of every call if it is asked to.
#[derive(Clone, Default)]
struct Sink {
    got: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
    is_choosy: bool,
}

#[tonic::async_trait]
impl TraceService for Sink {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.got.lock().unwrap().push(request.into_inner());
        let refused = ExportTracePartialSuccess { rejected_spans: 1, error_message: "no".into() };
        let partial_success = self.is_choosy.then_some(refused);
        Ok(Response::new(ExportTraceServiceResponse { partial_success }))
    }
}

impl Sink {
    async fn serve(&self, tasks: &mut JoinSet<()>, listener: TcpListener) {
        let server = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(self.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tasks.spawn(async move { server.await.unwrap() });
    }

    fn names(&self) -> Vec<String> {
        let got = self.got.lock().unwrap();
        let scopes = got.iter().flat_map(|call| &call.resource_spans).flat_map(|r| &r.scope_spans);
        scopes.flat_map(|scope| &scope.spans).map(|span| span.name.clone()).collect()
    }
}

fn span(name: &str) -> Span {
    Span { name: name.into(), ..Span::default() }
}

fn exporter(address: std::net::SocketAddr) -> (Exporter, Counts) {
    let counts = Counts::default();
    let endpoint = format!("http://{address}");
    let exporter = Exporter::start(&endpoint, resource("a-job", "00ff"), counts.clone());
    (exporter.unwrap(), counts)
}

#[tokio::test]
async fn all_spans_reach_a_collector_that_comes_late() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let (exporter, counts) = exporter(address);
    exporter.send(vec![span("first")]);
    // No collector is there; the job continues meanwhile.
    tokio::time::sleep(LINGER * 2).await;
    assert_eq!((counts.sent.get(), counts.dropped.get()), (0, 0));
    let (sink, mut tasks) = (Sink::default(), JoinSet::new());
    let listener = TcpListener::bind(address).await.unwrap();
    sink.serve(&mut tasks, listener).await;
    exporter.send(vec![span("second")]);
    exporter.close().await;
    assert_eq!(sink.names(), ["first", "second"]);
    assert_eq!((counts.sent.get(), counts.dropped.get()), (2, 0));
    let got = sink.got.lock().unwrap();
    let resource = got[0].resource_spans[0].resource.clone().unwrap();
    assert!(resource.attributes.contains(&KeyValue::text("service.name", "elasticdl")));
    assert!(resource.attributes.contains(&KeyValue::text("elasticdl.job", "a-job")));
}

#[tokio::test]
async fn a_dead_collector_costs_spans_and_no_time() {
    // It takes calls and never answers.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (exporter, counts) = exporter(listener.local_addr().unwrap());
    let wave = || (0..QUEUE).map(|_| span("steps")).collect::<Vec<_>>();
    // Both calls return at once: nothing in this test runs meanwhile.
    exporter.send(wave());
    exporter.send(wave());
    assert_eq!(counts.dropped.get(), QUEUE as u64);
    let patience = FLUSH * 10;
    tokio::time::timeout(patience, exporter.close()).await.unwrap();
    assert_eq!(counts.sent.get(), 0);
}

#[tokio::test]
async fn what_a_collector_refuses_is_counted_and_not_sent_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sink, mut tasks) = (Sink { is_choosy: true, ..Sink::default() }, JoinSet::new());
    sink.serve(&mut tasks, listener).await;
    let (exporter, counts) = exporter(address);
    exporter.send(vec![span("a"), span("b"), span("c")]);
    exporter.close().await;
    assert_eq!(sink.names(), ["a", "b", "c"]);
    assert_eq!((counts.sent.get(), counts.dropped.get()), (2, 1));
}

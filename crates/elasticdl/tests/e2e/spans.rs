// SPDX-License-Identifier: Apache-2.0
//! A job that sends spans to a collector, while a worker and the master are killed.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use edl_net::otlp::any_value::Value;
use edl_net::otlp::trace_service_server::{TraceService, TraceServiceServer};
use edl_net::otlp::{
    ExportTraceServiceRequest, ExportTraceServiceResponse, KeyValue, ResourceSpans, Span,
};
use rustix::process::Signal;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use crate::allreduce::{n_working, step};
use crate::harness::{Home, PATIENCE, shipped_as, signal};

/// A collector that stores everything it receives.
#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<ResourceSpans>>>);

#[tonic::async_trait]
impl TraceService for Sink {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().expect("the test's list").extend(request.into_inner().resource_spans);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Sink {
    /// Serves until the test's process ends.
    fn start(&self) -> SocketAddr {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let bound = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"));
        let listener = bound.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let service = TraceServiceServer::new(self.clone());
        std::thread::spawn(move || {
            let incoming = TcpListenerStream::new(listener);
            let server = tonic::transport::Server::builder().add_service(service);
            runtime.block_on(server.serve_with_incoming(incoming))
        });
        address
    }

    fn resources(&self) -> Vec<ResourceSpans> {
        self.0.lock().expect("the test's list").clone()
    }

    fn spans(&self) -> Vec<Span> {
        let scopes = self.resources().into_iter().flat_map(|resource| resource.scope_spans);
        scopes.flat_map(|scope| scope.spans).collect()
    }

    fn wait_for(&self, name: &str) {
        let start = Instant::now();
        while !self.spans().iter().any(|span| span.name == name) {
            assert!(start.elapsed() < PATIENCE, "no span `{name}` was sent");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn number(span: &Span, key: &str) -> Option<i64> {
    let found = span.attributes.iter().find(|attribute| attribute.key == key)?;
    match found.value.clone()?.value? {
        Value::IntValue(number) => Some(number),
        Value::StringValue(_) | Value::BoolValue(_) | Value::DoubleValue(_) => None,
    }
}

#[test]
fn a_job_is_one_trace_over_all_its_masters() {
    let (sink, home) = (Sink::default(), Home::new());
    let endpoint = format!("--otlp_endpoint=http://{}", sink.start());
    let mut job = home.start(
        "traced",
        &[
            "train",
            "--job_name=traced",
            "--distribution_strategy=AllreduceStrategy",
            "--model_def=mnist_cnn",
            "--lanes=2",
            "--num_workers=2",
            "--minibatch_size=16",
            "--num_epochs=5",
            "--checkpoint_steps=50",
            "--allow_chaos",
            &endpoint,
            &shipped_as("training_data", "test"),
            &shipped_as("validation_data", "test"),
        ],
    );
    job.wait_until("both workers", |status| n_working(status) == 2 && step(status) > 5);
    home.stdout(&["chaos", "traced", "kill", "--worker=1"]);
    sink.wait_for("heal");
    // The others may have recovered before the supervisor reports the exit of the process.
    sink.wait_for("process");
    let master = job.instances().into_iter().find(|instance| instance.role == "master");
    signal(master.expect("a master").pid, Signal::KILL);
    job.wait_for_success();
    assert_eq!(home.status("traced")["term"], 2, "the master was replaced");

    let spans = sink.spans();
    let named = |name: &str| spans.iter().filter(|span| span.name == name).collect::<Vec<_>>();
    let [root] = named("job")[..] else { panic!("expected one `job` span: {:#?}", named("job")) };
    assert!(root.parent_span_id.is_empty());
    assert_eq!((root.trace_id.len(), root.span_id.len()), (16, 8));
    assert!(spans.iter().all(|span| span.trace_id == root.trace_id), "one trace");
    for name in ["world", "heal", "checkpoint", "evaluation", "process"] {
        assert!(!named(name).is_empty(), "no span `{name}` was sent");
        for span in named(name) {
            assert_eq!(span.parent_span_id, root.span_id, "{span:#?}");
            assert!(span.start_time_unix_nano >= root.start_time_unix_nano, "{span:#?}");
        }
    }
    let terms: BTreeSet<_> = spans.iter().map(|span| number(span, "elasticdl.term")).collect();
    assert_eq!(terms, BTreeSet::from([Some(1), Some(2)]));
    let ids: BTreeSet<_> = spans.iter().map(|span| &span.span_id).collect();
    assert_eq!(ids.len(), spans.len(), "span ids are unique");
    let trained: i64 =
        named("steps").iter().filter_map(|span| number(span, "elasticdl.steps")).sum();
    assert!(trained > 0, "spans of steps were sent");
    let name = KeyValue::text("service.name", "elasticdl");
    let of_job = KeyValue::text("elasticdl.job", "traced");
    for resource in sink.resources() {
        let attributes = resource.resource.unwrap_or_default().attributes;
        assert!(attributes.contains(&name) && attributes.contains(&of_job), "{attributes:#?}");
    }
}

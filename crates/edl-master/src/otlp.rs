// SPDX-License-Identifier: Apache-2.0
//! Sends spans to a collector: only this task waits for it.
//!
//! What does not fit the queue is dropped and counted. Calls to an unreachable collector
//! are retried with growing pauses; a job that ends waits for it only briefly.

use std::time::Duration;

use edl_net::otlp::trace_service_client::TraceServiceClient;
use edl_net::otlp::{
    self, ExportTraceServiceRequest, InstrumentationScope, KeyValue, Resource, ResourceSpans,
    ScopeSpans, Span,
};
use prometheus_client::metrics::counter::Counter;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Status};

/// Spans that wait for the collector: hours of a calm job, minutes of a wild one.
const QUEUE: usize = 4096;
/// Spans that go at once, and what the first of them waits for others.
const BATCH: usize = 256;
const LINGER: Duration = Duration::from_millis(500);
/// For one call.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Between two calls of a collector that is away: at first, and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
/// What a job that has ended gives the collector.
const FLUSH: Duration = Duration::from_secs(2);

/// How many spans went, and how many were lost.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) sent: Counter,
    pub(crate) dropped: Counter,
}

/// The way to a collector.
pub(crate) struct Exporter {
    queue: mpsc::Sender<Span>,
    closing: CancellationToken,
    counts: Counts,
    tasks: JoinSet<()>,
}

impl Exporter {
    /// Calls `endpoint` when there are spans. Must be called in a runtime.
    pub(crate) fn start(endpoint: &str, resource: Resource, counts: Counts) -> Option<Self> {
        let channel = otlp::channel(endpoint, TIMEOUT).inspect_err(|error| {
            let error: &dyn std::error::Error = error;
            tracing::warn!(endpoint, error, "invalid collector address; no spans are sent");
        });
        let (queue, spans) = mpsc::channel(QUEUE);
        let closing = CancellationToken::new();
        let caller = Caller {
            client: TraceServiceClient::new(channel.ok()?),
            resource,
            counts: counts.clone(),
            is_away: false,
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(caller.run(spans, closing.clone()));
        Some(Self { queue, closing, counts, tasks })
    }

    /// Sends spans sometime; never waits.
    pub(crate) fn send(&self, spans: Vec<Span>) {
        for span in spans {
            if self.queue.try_send(span).is_err() {
                self.counts.dropped.inc();
            }
        }
    }

    /// Sends what is left, without waiting for a dead collector.
    pub(crate) async fn close(self) {
        let Self { queue, closing, counts, mut tasks } = self;
        drop(queue);
        closing.cancel();
        let _ = tokio::time::timeout(FLUSH, tasks.join_next()).await;
        let (sent, dropped) = (counts.sent.get(), counts.dropped.get());
        if dropped > 0 || !tasks.is_empty() {
            tracing::warn!(sent, dropped, "some spans did not reach the collector");
        } else {
            tracing::info!(sent, "spans sent");
        }
    }
}

/// The task that calls.
struct Caller {
    client: TraceServiceClient<Channel>,
    resource: Resource,
    counts: Counts,
    /// Logged once per absence.
    is_away: bool,
}

impl Caller {
    async fn run(mut self, mut spans: mpsc::Receiver<Span>, closing: CancellationToken) {
        let mut batch = Vec::new();
        while next_batch(&mut spans, &mut batch).await {
            let mut pause = PAUSES.0;
            while let Err(status) = self.call(&batch).await {
                self.warn(&status);
                if !is_passing(&status) || closing.is_cancelled() {
                    self.counts.dropped.inc_by(batch.len() as u64);
                    break;
                }
                let _ = tokio::time::timeout(pause, closing.cancelled()).await;
                pause = (pause * 2).min(PAUSES.1);
            }
            batch.clear();
        }
    }

    async fn call(&mut self, batch: &[Span]) -> Result<(), Status> {
        let request = request(&self.resource, batch);
        let answer = tokio::time::timeout(TIMEOUT, self.client.export(request)).await;
        let answer = answer.map_err(|_| Status::deadline_exceeded("no response"))??;
        self.is_away = false;
        let refused = answer.into_inner().partial_success.unwrap_or_default();
        let n_refused = u64::try_from(refused.rejected_spans).unwrap_or(0).min(batch.len() as u64);
        if n_refused > 0 {
            tracing::warn!(n_refused, why = refused.error_message, "the collector rejected spans");
        }
        self.counts.dropped.inc_by(n_refused);
        self.counts.sent.inc_by(batch.len() as u64 - n_refused);
        Ok(())
    }

    fn warn(&mut self, status: &Status) {
        if !self.is_away {
            self.is_away = true;
            let (code, why) = (status.code(), status.message());
            tracing::warn!(?code, why, "cannot reach the span collector; the job continues");
        }
    }
}

/// Waits for spans; false when there will be none.
async fn next_batch(spans: &mut mpsc::Receiver<Span>, batch: &mut Vec<Span>) -> bool {
    let Some(first) = spans.recv().await else { return false };
    batch.push(first);
    let more = async {
        while batch.len() < BATCH {
            match spans.recv().await {
                Some(span) => batch.push(span),
                None => break,
            }
        }
    };
    // What has come by then is enough.
    let _ = tokio::time::timeout(LINGER, more).await;
    true
}

/// Whether the same call may succeed later, by the protocol.
fn is_passing(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Cancelled
            | Code::DeadlineExceeded
            | Code::Aborted
            | Code::OutOfRange
            | Code::Unavailable
            | Code::DataLoss
            | Code::ResourceExhausted
            // The code of a connection that cannot be made.
            | Code::Unknown
    )
}

fn request(resource: &Resource, spans: &[Span]) -> ExportTraceServiceRequest {
    let scope = InstrumentationScope {
        name: env!("CARGO_PKG_NAME").into(),
        version: env!("CARGO_PKG_VERSION").into(),
    };
    let scope_spans = vec![ScopeSpans { scope: Some(scope), spans: spans.to_vec() }];
    let resource = Some(resource.clone());
    ExportTraceServiceRequest { resource_spans: vec![ResourceSpans { resource, scope_spans }] }
}

/// The sender of spans: the master of a job, by the usual attribute names.
pub(crate) fn resource(job: &str, run: &str) -> Resource {
    Resource {
        attributes: vec![
            KeyValue::text("service.name", "elasticdl"),
            KeyValue::text("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::text("service.instance.id", &format!("{job}/master")),
            KeyValue::text("elasticdl.job", job),
            KeyValue::text("elasticdl.run", run),
            KeyValue::text("elasticdl.instance", "master"),
        ],
    }
}

#[cfg(test)]
mod tests;

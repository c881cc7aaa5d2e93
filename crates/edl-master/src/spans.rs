// SPDX-License-Identifier: Apache-2.0
//! Sends spans of what the job does to a collector, if one is configured.

use edl_core::id::{RunId, Term};
use edl_core::job::Effect;
use edl_core::spec::JobSpec;
use edl_net::proto::JobStatus;

use crate::history::History;
use crate::journal::unix_secs;
use crate::otlp::{self, Counts, Exporter};
use crate::trace::{Recorder, nanos};

/// Empty for a job without a collector.
#[derive(Default)]
pub(crate) struct Spans(Option<(Recorder, Exporter)>);

impl Spans {
    /// Must be called in a runtime.
    pub(crate) fn start(
        spec: &JobSpec,
        (run, term): (RunId, Term),
        history: &History,
        counts: Counts,
    ) -> Self {
        if spec.otlp_endpoint.is_empty() {
            return Self(None);
        }
        let resource = otlp::resource(&spec.job_name, &run.to_string());
        let exporter = Exporter::start(&spec.otlp_endpoint, resource, counts);
        let began = nanos(history.began().unwrap_or_else(unix_secs));
        let recorder = Recorder::new(run, term, spec.step_lanes().is_some(), began);
        Self(exporter.map(|exporter| (recorder, exporter)))
    }

    pub(crate) fn effect(&mut self, effect: &Effect) {
        if let Some((recorder, exporter)) = &mut self.0 {
            recorder.effect(effect, nanos(unix_secs()));
            exporter.send(recorder.take());
        }
    }

    pub(crate) fn poll(&mut self, status: &JobStatus, history: &History) {
        if let Some((recorder, exporter)) = &mut self.0 {
            recorder.poll(status, history, nanos(unix_secs()));
            exporter.send(recorder.take());
        }
    }

    /// Sends what is left; waits a moment at most.
    pub(crate) async fn close(self) {
        if let Some((_, exporter)) = self.0 {
            exporter.close().await;
        }
    }
}

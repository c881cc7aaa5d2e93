// SPDX-License-Identifier: Apache-2.0
//! Prometheus metrics.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use edl_sched::plan::AllocationPlan;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::act::{Action, JobAction};
use crate::crd::ConditionKind;
use crate::observe::Observed;

/// The operator's metrics. Labels are bounded: kinds of conditions and of changes, never jobs.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    jobs: Family<ConditionLabel, Gauge>,
    workers_wanted: Gauge,
    workers_running: Gauge,
    leads: Gauge,
    round_seconds: Histogram,
    changes: Family<ChangeLabel, Counter>,
    failed_calls: Counter,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConditionLabel {
    condition: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ChangeLabel {
    change: &'static str,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    #[must_use]
    pub fn new() -> Self {
        let metrics = Self {
            registry: Arc::default(),
            jobs: Family::default(),
            workers_wanted: Gauge::default(),
            workers_running: Gauge::default(),
            leads: Gauge::default(),
            // From a millisecond to half a minute.
            round_seconds: Histogram::new(exponential_buckets(0.001, 2.0, 15)),
            changes: Family::default(),
            failed_calls: Counter::default(),
        };
        let mut registry = metrics.registry.lock().expect("the registry is not shared yet");
        let all = registry.sub_registry_with_prefix("elasticdl_operator");
        all.register("jobs", "Number of TrainingJobs by condition", metrics.jobs.clone());
        let (wanted, running) = (metrics.workers_wanted.clone(), metrics.workers_running.clone());
        all.register("workers_wanted", "Target number of workers, all jobs", wanted);
        all.register("workers_running", "Running workers, all jobs", running);
        all.register("leads", "1 if this replica leads, 0 if on standby", metrics.leads.clone());
        all.register(
            "round_seconds",
            "Duration of a reconcile pass, in seconds",
            metrics.round_seconds.clone(),
        );
        all.register("changes", "Planned changes: admit, resize or stop", metrics.changes.clone());
        let failed = metrics.failed_calls.clone();
        all.register("failed_calls", "Failed calls to the Kubernetes API server", failed);
        drop(registry);
        metrics
    }

    pub(crate) fn led(&self, leads: bool) {
        self.leads.set(i64::from(leads));
    }

    pub(crate) fn failed(&self) {
        self.failed_calls.inc();
    }

    pub(crate) fn round(&self, observed: &Observed, plan: &AllocationPlan, actions: &[JobAction]) {
        for kind in ConditionKind::ALL {
            let is_in = |name: &str| name == kind.name();
            let states = observed.jobs.values().filter_map(|view| view.object.status.as_ref());
            let n_jobs = states.filter(|status| is_in(&status.state)).count();
            let label = ConditionLabel { condition: kind.name() };
            self.jobs.get_or_create(&label).set(i64::try_from(n_jobs).unwrap_or(i64::MAX));
        }
        let views = || observed.jobs.values();
        let planned = |view: &crate::observe::JobView| {
            plan.change_of(view.id).map_or(view.grant.workers, |change| change.target.worker)
        };
        self.workers_wanted.set(views().map(|view| i64::from(planned(view))).sum());
        self.workers_running.set(views().map(|view| i64::from(view.running.worker)).sum());
        for action in actions {
            let change = match &action.action {
                Action::Admit { .. } => "admit",
                Action::Resize { .. } => "resize",
                Action::Stop { .. } => "stop",
                Action::UpdateStatus(_) | Action::RecordEvent(_) => continue,
            };
            self.changes.get_or_create(&ChangeLabel { change }).inc();
        }
    }

    pub(crate) fn took(&self, time: Duration) {
        self.round_seconds.observe(time.as_secs_f64());
    }

    /// All metrics in the format of Prometheus.
    #[must_use]
    pub fn text(&self) -> Option<String> {
        let mut text = String::new();
        let registry = self.registry.lock().ok()?;
        prometheus_client::encoding::text::encode(&mut text, &registry).ok()?;
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;
    use crate::tests::fake_cluster::{FakeCluster, job, node};

    /// Two rounds: a job is admitted, another waits.
    fn text() -> String {
        let jobs = [job("a", &json!({"num_workers": 2})), job("b", &json!({"queue": "x"}))];
        let mut cluster = FakeCluster::new(&[node("n1", "8", "32Gi")], &jobs);
        let metrics = Metrics::new();
        let (observed, plan, actions) = cluster.plan();
        metrics.round(&observed, &plan, &actions);
        cluster.pass();
        cluster.settle();
        let (observed, plan, actions) = cluster.plan();
        metrics.round(&observed, &plan, &actions);
        metrics.took(Duration::from_millis(3));
        metrics.text().unwrap()
    }

    #[test]
    fn a_round_is_counted() {
        let text = text();
        for line in [
            "elasticdl_operator_workers_wanted 2",
            "elasticdl_operator_workers_running 2",
            "elasticdl_operator_changes_total{change=\"admit\"} 1",
            "elasticdl_operator_jobs{condition=\"Queued\"} 1",
            "elasticdl_operator_round_seconds_count 1",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }

    #[test]
    fn the_dashboard_asks_for_what_there_is() {
        let dashboard = include_str!("../../../manifests/observe/grafana.json");
        let words = dashboard.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let asked: BTreeSet<&str> =
            words.filter(|word| word.starts_with("elasticdl_operator_")).collect();
        let text = text();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let exported: BTreeSet<&str> =
            lines.filter_map(|line| line.split([' ', '{']).next()).collect();
        let missing: Vec<_> = asked.difference(&exported).collect();
        assert!(missing.is_empty() && asked.len() > 6, "{missing:?} of {asked:?}");
        // The master's names are looked at where they are made.
        let expressions = dashboard.lines().filter(|line| line.contains("\"expr\""));
        for expression in expressions {
            assert!(
                ["elasticdl_operator_", "elasticdl_master_"]
                    .iter()
                    .any(|it| expression.contains(it)),
                "{expression}"
            );
        }
    }

    #[test]
    fn prometheus_parses_what_is_written() {
        let Some(python) = std::env::var_os("ELASTICDL_TEST_PYTHON") else {
            println!("skipped: ELASTICDL_TEST_PYTHON names no Python that has prometheus_client");
            return;
        };
        let path = std::env::temp_dir().join(format!("elasticdl-{}.metrics", std::process::id()));
        std::fs::write(&path, text()).unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/python/read_metrics.py");
        let output = std::process::Command::new(python).arg(script).arg(&path).output().unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let families: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        for (name, kind) in [
            ("jobs", "gauge"),
            ("workers_wanted", "gauge"),
            ("round_seconds", "histogram"),
            ("changes", "counter"),
            ("failed_calls", "counter"),
        ] {
            let family = &families[format!("elasticdl_operator_{name}")];
            assert_eq!(family["kind"], kind, "{name} in {families:#}");
        }
    }
}

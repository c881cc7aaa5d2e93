// SPDX-License-Identifier: Apache-2.0
//! Prometheus metrics.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use edl_core::evaluation::Evaluated;
use edl_core::platform::{InstanceState, Role};
use edl_net::proto::{Goodput, Instance, JobStatus};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry};

use crate::otlp;

type Float = Gauge<f64, AtomicU64>;
type Total = Counter<f64, AtomicU64>;

/// The master's metrics. Labels are bounded: metric names and roles, never ids of work.
pub(crate) struct Metrics {
    registry: Arc<Mutex<Registry>>,
    step: Gauge,
    epoch: Gauge,
    records: Gauge,
    records_per_second: Float,
    loss: Float,
    generation: Gauge,
    term: Gauge,
    workers_wanted: Gauge,
    spares: Gauge,
    instances: Family<RoleLabel, Gauge>,
    spent: Family<SpentLabel, Total>,
    batches_trained: Counter,
    batches_repeated: Counter,
    evaluation: Family<MetricLabel, Float>,
    pub(crate) spans: otlp::Counts,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleLabel {
    role: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SpentLabel {
    role: String,
    kind: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MetricLabel {
    metric: String,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::default();
        let all = registry.sub_registry_with_prefix("elasticdl_master");
        Self {
            step: add(all, "step", "Current step (version of the model)"),
            epoch: add(all, "epoch", "Completed epochs"),
            records: add(all, "records_done", "Records trained, counted once per epoch"),
            records_per_second: add(all, "records_per_second", "Recent records trained per second"),
            loss: add(all, "loss", "Smoothed training loss"),
            generation: add(all, "generation", "Number of times the parameters were loaded"),
            term: add(all, "term", "Number of times the master was started"),
            workers_wanted: add(all, "workers_wanted", "Target number of workers"),
            spares: add(all, "spares", "Workers that are ready to replace lost ones"),
            instances: add(all, "instances", "Processes of the job, by role"),
            spent: add(all, "spent_seconds", "Process time by role and activity, in seconds"),
            batches_trained: add(
                all,
                "batches_trained",
                "Batches (AllReduce: steps) trained in total",
            ),
            batches_repeated: add(
                all,
                "batches_repeated",
                "Batches (AllReduce: steps) that were trained again",
            ),
            evaluation: add(all, "evaluation", "Latest evaluation metrics"),
            spans: otlp::Counts {
                sent: add(all, "spans_sent", "Spans accepted by the collector"),
                dropped: add(all, "spans_dropped", "Spans that could not be delivered"),
            },
            registry: Arc::new(Mutex::new(registry)),
        }
    }

    pub(crate) fn registry(&self) -> Arc<Mutex<Registry>> {
        Arc::clone(&self.registry)
    }

    pub(crate) fn evaluated(&self, evaluated: &Evaluated) {
        for (name, value) in &evaluated.metrics {
            self.evaluation.get_or_create(&MetricLabel { metric: name.clone() }).set(*value);
        }
    }

    pub(crate) fn publish(&self, status: &JobStatus) {
        let set = |gauge: &Gauge, value: u64| {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        set(&self.step, status.step);
        set(&self.epoch, status.epoch.into());
        set(&self.records, status.records_done);
        set(&self.generation, status.generation);
        set(&self.term, status.term);
        set(&self.workers_wanted, status.workers_wanted.into());
        let is_spare = |instance: &&Instance| instance.state() == InstanceState::Spare;
        set(&self.spares, status.instances.iter().filter(is_spare).count() as u64);
        self.records_per_second.set(status.records_per_second);
        if let Some(loss) = status.known_loss() {
            self.loss.set(loss.into());
        }
        for role in [Role::Ps, Role::Worker] {
            let n = status.instances.iter().filter(|instance| instance.role() == role).count();
            set(&self.instances.get_or_create(&RoleLabel { role: role.name().into() }), n as u64);
        }
        if let Some(goodput) = &status.goodput {
            self.publish_goodput(goodput);
        }
    }

    fn publish_goodput(&self, goodput: &Goodput) {
        for (role, spent) in [("worker", goodput.workers), ("ps", goodput.servers)] {
            for (kind, secs) in spent.unwrap_or_default().parts() {
                let label = SpentLabel { role: role.into(), kind: kind.name().into() };
                let total = self.spent.get_or_create(&label);
                // What is being measured may turn out to be another kind; a counter never shrinks.
                total.inc_by((secs - total.get()).max(0.0));
            }
        }
        let raise = |counter: &Counter, to: u64| counter.inc_by(to.saturating_sub(counter.get()));
        raise(&self.batches_trained, goodput.trained);
        raise(&self.batches_repeated, goodput.repeated);
    }
}

/// A new metric of the registry.
fn add<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use edl_net::proto::Spent;

    use super::*;

    /// Names in the text that Prometheus reads.
    fn exported() -> BTreeSet<String> {
        let metrics = Metrics::new();
        let spent = Some(Spent::default());
        let goodput = Goodput { workers: spent, servers: spent, ..Goodput::default() };
        metrics.publish(&JobStatus { goodput: Some(goodput), ..JobStatus::default() });
        let found = [("accuracy".to_owned(), 0.5)].into();
        metrics.evaluated(&Evaluated { version: 1, epoch: 0, metrics: found, is_best: true });
        let mut text = String::new();
        let registry = metrics.registry.lock().unwrap();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.filter_map(|line| Some(line.split([' ', '{']).next()?.to_owned())).collect()
    }

    #[test]
    fn the_dashboard_asks_for_what_there_is() {
        let text = include_str!("../../../manifests/observe/grafana.json");
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let asked: BTreeSet<&str> =
            words.filter(|word| word.starts_with("elasticdl_master_")).collect();
        let exported = exported();
        let missing: Vec<_> = asked.iter().filter(|name| !exported.contains(**name)).collect();
        assert!(missing.is_empty() && asked.len() > 8, "{missing:?} of {asked:?}");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The data of the cluster page, as JSON: resources, queues, and every job with its size, its planned
//! size and why it is not larger.

use std::collections::BTreeMap;

use edl_core::platform::Role;
use edl_core::time::Time;
use edl_kube::names;
use edl_sched::names::Names;
use edl_sched::plan::AllocationPlan;
use edl_sched::resources::Resources;
use edl_sched::snapshot::{JobId, NodeState, Queue, Snapshot};
use serde::Serialize;

use crate::act::{Action, JobAction};
use crate::capacity::{Capacity, Sums};
use crate::crd::{ConditionKind, Status};
use crate::explain;
use crate::observe::{JobStage, JobView, Observed, amounts};

/// One pass of the operator: what it observed, and its plan.
#[derive(Clone, Debug)]
pub struct Pass {
    pub observed: Observed,
    pub plan: AllocationPlan,
    /// The new status of jobs whose status changes.
    statuses: BTreeMap<(String, String), Status>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Overview {
    /// The time of the pass, in seconds since 1970.
    at_secs: u64,
    policy: String,
    max_load: f64,
    /// What is wrong with the queues, if anything.
    trouble: Option<String>,
    nodes: Nodes,
    total: Resources,
    of_jobs: Resources,
    of_others: Resources,
    queues: Vec<QueueRow>,
    services: Vec<ServiceRow>,
    jobs: Vec<JobRow>,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Nodes {
    ready: usize,
    cordoned: usize,
    leaving: usize,
}

#[derive(Clone, Debug, Serialize)]
struct QueueRow {
    name: String,
    weight: u32,
    quota: Option<Bound>,
    borrow: Option<Bound>,
    used: Resources,
    /// Jobs that have workers, and jobs that wait for theirs.
    n_served: usize,
    n_waiting: usize,
}

/// Limits; none if there is no limit.
#[derive(Clone, Copy, Debug, Serialize)]
struct Bound {
    gpu: Option<u64>,
    cpu_milli: Option<u64>,
    memory_mib: Option<u64>,
}

/// An online service whose pods wait for capacity.
#[derive(Clone, Debug, Serialize)]
struct ServiceRow {
    name: String,
    pods: u32,
}

#[derive(Clone, Debug, Serialize)]
struct JobRow {
    id: JobId,
    namespace: String,
    name: String,
    /// The most significant condition; empty before the first pass.
    state: String,
    queue: Option<String>,
    priority: Option<i32>,
    min: Option<u32>,
    max: Option<u32>,
    /// Workers granted before this plan, and after it.
    granted: u32,
    planned: u32,
    running: u32,
    servers: u32,
    submitted_secs: i64,
    progress: String,
    /// From 0 to 1.
    share: Option<f64>,
    eta: String,
    records_per_second: Option<f64>,
    /// Why it changes, waits or has ended.
    why: String,
    /// Why it does not get more workers.
    not_more: Option<String>,
    /// The command that opens its own page.
    page: Option<String>,
}

impl Pass {
    #[must_use]
    pub fn new(observed: Observed, plan: AllocationPlan, actions: &[JobAction]) -> Self {
        let mut statuses = BTreeMap::new();
        for JobAction { job, action } in actions {
            if let Action::UpdateStatus(status) = action {
                let key = (job.namespace.clone(), job.name.clone());
                statuses.insert(key, Status::clone(status));
            }
        }
        Self { observed, plan, statuses }
    }

    #[must_use]
    pub fn overview(&self) -> Overview {
        let Self { observed, plan, .. } = self;
        let sums = Sums::new(&observed.snapshot);
        let capacity = Capacity::new(observed, plan);
        let options = &plan.state.options;
        Overview {
            at_secs: plan.made.since(Time::ZERO).as_secs(),
            policy: options.policy.to_string(),
            max_load: f64::from(options.max_load_permille) / 1000.0,
            trouble: observed.trouble.clone(),
            nodes: nodes(&observed.snapshot),
            total: sums.total,
            of_jobs: sums.of_jobs,
            of_others: sums.of_others,
            queues: self.queues(&sums),
            services: services(&observed.snapshot, &observed.names),
            jobs: observed.jobs.values().map(|view| self.job(view, &capacity)).collect(),
        }
    }

    fn queues(&self, sums: &Sums) -> Vec<QueueRow> {
        let Observed { snapshot, names, .. } = &self.observed;
        let row = |queue: &Queue| {
            let jobs = || snapshot.jobs.iter().filter(|job| job.queue == queue.id);
            let waits = |id: JobId| self.plan.waiting.contains_key(&id);
            let n_waiting = jobs().filter(|job| waits(job.id)).count();
            QueueRow {
                name: names.queues.get(&queue.id).cloned().unwrap_or_default(),
                weight: queue.weight,
                quota: queue.quota.map(bound),
                borrow: queue.borrow.map(bound),
                used: sums.by_queue.get(&queue.id).copied().unwrap_or_default(),
                n_served: jobs().count() - n_waiting,
                n_waiting,
            }
        };
        snapshot.queues.iter().map(row).collect()
    }

    fn job(&self, view: &JobView, capacity: &Capacity<'_>) -> JobRow {
        let (object, note) = (&view.object, view.note.as_ref());
        let shown = self.statuses.get(&object.key()).or(object.status.as_ref());
        let planned = explain::planned(view, &self.plan);
        let total = note.and_then(|note| note.records_total).filter(|total| *total > 0);
        let share = note.zip(total).map(|(note, total)| note.records_done as f64 / total as f64);
        let (min, max) = view.limits().unzip();
        let has_page = view.pods.iter().any(|pod| pod.role == Role::Master && pod.is_running());
        let submitted = object.metadata.creation_timestamp.as_ref();
        JobRow {
            id: view.id,
            namespace: object.namespace().into(),
            name: object.name().into(),
            state: shown.map(|status| status.state.clone()).unwrap_or_default(),
            queue: view.plannable().map(|described| described.queue.clone()),
            priority: self.planned_job(view.id).map(|job| job.priority),
            min: min.or(shown.and_then(|status| status.min_workers)),
            max: max.or(shown.and_then(|status| status.max_workers)),
            granted: view.grant.workers,
            planned,
            running: view.running.worker,
            servers: view.running.ps,
            submitted_secs: submitted.map_or(0, |time| time.0.as_second()),
            progress: shown.map(|status| status.progress.clone()).unwrap_or_default(),
            share: share.map(|share| share.clamp(0.0, 1.0)),
            eta: shown.map(|status| status.eta.clone()).unwrap_or_default(),
            records_per_second: note
                .and_then(|note| note.records_per_second)
                .filter(|speed| speed.is_finite() && planned > 0),
            why: self.why(view, shown),
            not_more: capacity.not_more(view, planned),
            page: has_page.then(|| page_of(object.namespace(), object.name())),
        }
    }

    /// The plan's reasons for a job, or else what keeps it from running as described.
    fn why(&self, view: &JobView, shown: Option<&Status>) -> String {
        let why = explain::why(view, &self.observed, &self.plan);
        if !why.is_empty() || view.stage != JobStage::Live {
            return why;
        }
        let condition = |kind: ConditionKind| shown.and_then(|status| status.condition(kind));
        let starts = condition(ConditionKind::Running).filter(|condition| !condition.holds());
        let edited = condition(ConditionKind::Admitted).filter(|_| view.edited.is_some());
        let messages = starts.into_iter().chain(edited).map(|condition| condition.message.clone());
        messages.filter(|message| !message.is_empty()).collect::<Vec<_>>().join("; ")
    }

    fn planned_job(&self, id: JobId) -> Option<&edl_sched::snapshot::Job> {
        self.observed.snapshot.jobs.iter().find(|job| job.id == id)
    }
}

/// A master's page is only reachable through the API server, where a browser cannot follow a link.
fn page_of(namespace: &str, job: &str) -> String {
    let (service, port) = (names::service(job), names::HTTP_PORT);
    format!("kubectl --namespace={namespace} port-forward service/{service} {port}")
}

fn nodes(snapshot: &Snapshot) -> Nodes {
    let mut nodes = Nodes::default();
    for node in &snapshot.nodes {
        match node.state {
            NodeState::Ready => nodes.ready += 1,
            NodeState::Cordoned => nodes.cordoned += 1,
            NodeState::Leaving => nodes.leaving += 1,
        }
    }
    nodes
}

fn services(snapshot: &Snapshot, names: &Names) -> Vec<ServiceRow> {
    let row = |pods: &edl_sched::snapshot::OnlinePods| ServiceRow {
        name: names.services.get(&pods.service).cloned().unwrap_or_default(),
        pods: pods.n,
    };
    snapshot.waiting.iter().map(row).collect()
}

fn bound(amount: Resources) -> Bound {
    let some = |amount: u64, boundless: u64| Some(amount).filter(|amount| *amount < boundless);
    let none = amounts::BOUNDLESS;
    Bound {
        gpu: some(amount.gpu, none.gpu),
        cpu_milli: some(amount.cpu_milli, none.cpu_milli),
        memory_mib: some(amount.memory_mib, none.memory_mib),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::queues::Queues;
    use crate::tests::fake_cluster::{FakeCluster, job, node, other_pod};

    fn queues(text: &str) -> Queues {
        let data = Some([(crate::queues::FILE.to_owned(), text.to_owned())].into());
        let map = k8s_openapi::api::core::v1::ConfigMap { data, ..Default::default() };
        Queues::read(Some(&map))
    }

    fn overview(cluster: &mut FakeCluster) -> Value {
        let (observed, plan, actions) = cluster.plan();
        serde_json::to_value(Pass::new(observed, plan, &actions).overview()).unwrap()
    }

    fn row<'a>(overview: &'a Value, name: &str) -> &'a Value {
        let jobs = overview["jobs"].as_array().unwrap();
        jobs.iter().find(|job| job["name"] == name).unwrap()
    }

    #[test]
    fn every_job_is_there_with_what_it_has_and_why() {
        let jobs = [
            job("a", &json!({"min_workers": 1, "max_workers": 6})),
            job("bad", &json!({"queue": "nowhere"})),
            job("big", &json!({"num_workers": 9})),
        ];
        let mut cluster = FakeCluster::new(&[node("n1", "4500m", "32Gi")], &jobs);
        cluster.pass();
        cluster.settle();
        let status = json!({"state": "running", "records_done": 250, "records_total": 1000,
            "records_per_second": 10, "workers": 4, "eta_secs": 75});
        cluster.report("a", &status);
        let seen = overview(&mut cluster);
        let a = row(&seen, "a");
        for (field, value) in [
            ("state", json!("Running")),
            ("granted", json!(4)),
            ("planned", json!(4)),
            ("running", json!(4)),
            ("min", json!(1)),
            ("max", json!(6)),
            ("queue", json!("default")),
            ("progress", json!("25 %")),
            ("share", json!(0.25)),
            ("eta", json!("80s")),
            (
                "page",
                json!("kubectl --namespace=default port-forward service/elasticdl-a-master 8080"),
            ),
        ] {
            assert_eq!(a[field], value, "{field} of {a:#}");
        }
        let more = a["not_more"].as_str().unwrap();
        assert!(more.contains("CPU is at the 97 % load limit"), "{more}");
        let (bad, big) = (row(&seen, "bad"), row(&seen, "big"));
        assert!(bad["why"].as_str().unwrap().contains("queue `nowhere` not found"), "{bad:#}");
        assert_eq!((&bad["state"], &bad["not_more"]), (&json!("Queued"), &Value::Null));
        assert_eq!(big["why"], "not enough CPU for its minimum");
        assert_eq!(seen["nodes"]["ready"], 1);
        assert_eq!(seen["total"]["cpu_milli"], 4500);
        assert_eq!(seen["of_jobs"]["cpu_milli"], 4100);
    }

    #[test]
    fn a_starting_or_edited_job_has_a_reason() {
        let jobs = [job("a", &json!({"num_workers": 2}))];
        let mut cluster = FakeCluster::new(&[node("n1", "8", "32Gi")], &jobs);
        cluster.pass();
        let seen = overview(&mut cluster);
        assert_eq!(row(&seen, "a")["why"], "0 of 2 required workers running");
        cluster.settle();
        assert_eq!(row(&overview(&mut cluster), "a")["why"], "");
        cluster.edit("a", "minibatch_size", json!(77));
        let seen = overview(&mut cluster);
        let why = row(&seen, "a")["why"].as_str().unwrap();
        assert!(why.starts_with("`minibatch_size` cannot change"), "{why}");
    }

    #[test]
    fn queues_and_services_are_there_with_what_they_use_and_wait_for() {
        let jobs = [
            job("a", &json!({"num_workers": 2, "queue": "research"})),
            job("b", &json!({"num_workers": 2, "queue": "research"})),
        ];
        let mut cluster = FakeCluster::new(&[node("n1", "8", "32Gi")], &jobs);
        cluster.objects.queues = queues("research: {weight: 2, quota: cpu=3, borrow: cpu=0.5}");
        cluster.objects.pods.push(other_pod("web-1", "20", None).into());
        cluster.pass();
        cluster.settle();
        let seen = overview(&mut cluster);
        let queues = seen["queues"].as_array().unwrap();
        let research = queues.iter().find(|queue| queue["name"] == "research").unwrap();
        assert_eq!((&research["n_served"], &research["n_waiting"]), (&json!(1), &json!(1)));
        assert_eq!(research["quota"]["cpu_milli"], 3000);
        assert_eq!(research["quota"]["memory_mib"], Value::Null);
        assert_eq!(research["used"]["cpu_milli"], 2100);
        assert_eq!(seen["services"], json!([{"name": "web/nginx", "pods": 1}]));
        let b = row(&seen, "b");
        assert!(b["why"].as_str().unwrap().contains("queue `research`"), "{b:#}");
    }
}

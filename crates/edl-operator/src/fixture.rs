// SPDX-License-Identifier: Apache-2.0
//! A small cluster for tests: its objects, and what becomes of them when a plan is carried out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use edl_core::platform::{InstanceId, Role};
use edl_core::spec::JobSpec;
use edl_core::time::Time;
use edl_kube::manifest::{self, PodExtras};
use edl_kube::names;
use edl_sched::plan::Plan;
use edl_sched::state::State;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::act::{self, Action, Deed};
use crate::crd::TrainingJob;
use crate::observe::{self, Memory, Observed, Seen};

/// A cluster, an operator's memory, and a clock that tests move.
pub(crate) struct World {
    pub(crate) seen: Seen,
    pub(crate) memory: Memory,
    pub(crate) state: State,
    pub(crate) now_secs: u64,
}

pub(crate) fn node(name: &str, cpu: &str, memory: &str) -> Node {
    let node = json!({"metadata": {"name": name}, "status": {
        "allocatable": {"cpu": cpu, "memory": memory, "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True"}]}});
    serde_json::from_value(node).unwrap()
}

/// A job whose workers ask for one CPU each, with no servers.
pub(crate) fn job(name: &str, extra: &Value) -> TrainingJob {
    let mut spec = json!({
        "image_name": "i", "volume": "claim_name=c,mount_path=/data", "num_ps_pods": 0,
        "master_resource_request": "cpu=0.1,memory=64Mi",
        "worker_resource_request": "cpu=1,memory=1Gi",
    });
    for (word, value) in extra.as_object().unwrap() {
        spec[word] = value.clone();
    }
    let job = json!({"metadata": {"name": name, "namespace": "default", "uid": name,
        "generation": 1, "creationTimestamp": "2026-11-16T10:00:00Z"}, "spec": spec});
    serde_json::from_value(job).unwrap()
}

/// A pod of somebody else; without a node it waits for room.
pub(crate) fn other_pod(name: &str, cpu: &str, node: Option<&str>) -> Pod {
    let waits = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 Insufficient cpu."}]);
    let status = match node {
        Some(_) => json!({"phase": "Running"}),
        None => json!({"phase": "Pending", "conditions": waits}),
    };
    let pod = json!({
        "metadata": {"name": name, "namespace": "web", "uid": name, "ownerReferences": [
            {"apiVersion": "v1", "kind": "ReplicaSet", "name": "nginx", "uid": "r"}]},
        "spec": {"nodeName": node, "containers": [
            {"name": "c", "resources": {"requests": {"cpu": cpu, "memory": "64Mi"}}}]},
        "status": status});
    serde_json::from_value(pod).unwrap()
}

impl World {
    pub(crate) fn new(nodes: &[Node], jobs: &[TrainingJob]) -> Self {
        let arcs = |nodes: &[Node]| nodes.iter().cloned().map(Arc::new).collect();
        let jobs = jobs.iter().cloned().map(Arc::new).collect();
        let seen = Seen { nodes: arcs(nodes), jobs, ..Seen::default() };
        let noon = 1_794_830_400;
        Self { seen, memory: Memory::default(), state: State::default(), now_secs: noon }
    }

    pub(crate) fn observe(&mut self) -> Observed {
        let now = Time::since_origin(Duration::from_secs(self.now_secs));
        observe::observe(&self.seen, &mut self.memory, now)
    }

    /// One round of the operator, without carrying it out.
    pub(crate) fn plan(&mut self) -> (Observed, Plan, Vec<Action>) {
        let observed = self.observe();
        let now = Time::since_origin(Duration::from_secs(self.now_secs));
        let plan = edl_sched::plan(&observed.snapshot, &self.state, now);
        let now = Timestamp::from_second(i64::try_from(self.now_secs).unwrap()).unwrap();
        let actions = act::actions(&observed, &plan, now);
        (observed, plan, actions)
    }

    /// One round, carried out; what was done is told line by line.
    pub(crate) fn round(&mut self) -> String {
        let (_, plan, actions) = self.plan();
        self.state = plan.state;
        let told = actions.iter().map(tell).collect();
        for action in actions {
            self.apply(action);
        }
        self.now_secs += 1;
        told
    }

    fn apply(&mut self, Action { job, deed }: Action) {
        match deed {
            Deed::Admit { spec, workers, .. } => {
                if self.map_mut(&job.name).is_none() {
                    let mut map = manifest::config_map(&spec).unwrap();
                    map.metadata.owner_references = Some(vec![job.owner.clone()]);
                    self.seen.config_maps.push(Arc::new(map));
                }
                self.note(&job.name, names::WORKERS_NOTE, &workers.to_string());
                self.add_pod(&spec, Role::Master, 0);
            }
            Deed::Resize { workers, leave } => {
                self.note(&job.name, names::WORKERS_NOTE, &workers.to_string());
                let leave: Vec<String> = leave.iter().map(ToString::to_string).collect();
                self.note(&job.name, names::LEAVE_NOTE, &leave.join(","));
            }
            Deed::Stop { pods } => {
                self.note(&job.name, names::WORKERS_NOTE, "0");
                let is_gone = |pod: &Arc<Pod>| {
                    pods.iter().any(|(_, uid)| pod.metadata.uid.as_ref() == Some(uid))
                };
                self.seen.pods.retain(|pod| !is_gone(pod));
            }
            Deed::Show(status) => {
                let found = self.seen.jobs.iter_mut().find(|it| it.name() == job.name).unwrap();
                Arc::make_mut(found).status = Some(*status);
            }
            Deed::Tell(_) => {}
        }
    }

    /// What masters do: their workers become as many as they were told, and all run.
    pub(crate) fn settle(&mut self) {
        for map in self.seen.config_maps.clone() {
            let text = &map.data.as_ref().unwrap()[names::JOB_FILE];
            let spec = edl_kube::yaml::read::<JobSpec>(text).unwrap();
            let notes = map.metadata.annotations.clone().unwrap_or_default();
            if notes.get(names::STATUS_NOTE).is_some_and(|note| note.contains("succeeded")) {
                continue;
            }
            let told: usize = notes.get(names::WORKERS_NOTE).map_or(0, |it| it.parse().unwrap());
            let mine = |pod: &Arc<Pod>| is_worker(pod, &spec.job_name);
            let mut numbers: Vec<u32> =
                self.seen.pods.iter().filter(|pod| mine(pod)).map(|pod| index(pod)).collect();
            numbers.sort_unstable();
            let leave = notes.get(names::LEAVE_NOTE).cloned().unwrap_or_default();
            let asked: Vec<u32> = leave.split(',').filter_map(|it| it.parse().ok()).collect();
            numbers.sort_by_key(|number| asked.contains(number));
            for gone in numbers.split_off(numbers.len().min(told)) {
                self.seen.pods.retain(|pod| !(mine(pod) && index(pod) == gone));
            }
            let next = numbers.iter().max().map_or(0, |last| last + 1);
            for number in (next..).take(told.saturating_sub(numbers.len())) {
                self.add_pod(&spec, Role::Worker, number);
            }
        }
        self.schedule();
    }

    /// What Kubernetes does: pods without a node get the first that has room, and run.
    pub(crate) fn schedule(&mut self) {
        for at in 0..self.seen.pods.len() {
            let pod = &self.seen.pods[at];
            if pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()) {
                continue;
            }
            let asks = observe::amounts::asked(pod);
            let Some(node) = self.room(asks) else { continue };
            let pod = Arc::make_mut(&mut self.seen.pods[at]);
            pod.spec.as_mut().unwrap().node_name = Some(node);
            pod.status = serde_json::from_value(json!({"phase": "Running"})).unwrap();
        }
    }

    fn room(&self, asks: edl_sched::resources::Resources) -> Option<String> {
        let mut free: BTreeMap<String, _> = BTreeMap::new();
        for node in &self.seen.nodes {
            let offered = node.status.as_ref().unwrap().allocatable.as_ref().unwrap();
            free.insert(node.metadata.name.clone().unwrap(), observe::amounts::offered(offered));
        }
        for pod in &self.seen.pods {
            if let Some(node) = &pod.spec.as_ref().unwrap().node_name {
                let free = free.get_mut(node).unwrap();
                *free = free.saturating_sub(observe::amounts::asked(pod));
            }
        }
        free.into_iter().find(|(_, free)| asks.fits_in(*free)).map(|(name, _)| name)
    }

    fn add_pod(&mut self, spec: &JobSpec, role: Role, id: u32) {
        let mut pod = manifest::pod(spec, InstanceId { role, id }, &PodExtras::default()).unwrap();
        let name = pod.metadata.name.clone().unwrap();
        if self.seen.pods.iter().any(|other| other.metadata.name.as_ref() == Some(&name)) {
            return;
        }
        pod.metadata.uid = Some(name);
        self.seen.pods.push(Arc::new(pod));
    }

    pub(crate) fn note(&mut self, job: &str, word: &str, text: &str) {
        let map = self.map_mut(job).unwrap();
        map.metadata.annotations.get_or_insert_default().insert(word.into(), text.into());
    }

    fn map_mut(&mut self, job: &str) -> Option<&mut ConfigMap> {
        let name = names::config_map(job);
        let mut maps = self.seen.config_maps.iter_mut();
        maps.find(|map| map.metadata.name.as_ref() == Some(&name)).map(Arc::make_mut)
    }

    pub(crate) fn edit(&mut self, job: &str, word: &str, value: Value) {
        let found = self.seen.jobs.iter_mut().find(|it| it.name() == job).unwrap();
        let job = Arc::make_mut(found);
        job.spec[word] = value;
        job.metadata.generation = job.metadata.generation.map(|generation| generation + 1);
    }

    pub(crate) fn status(&self, job: &str) -> crate::crd::Status {
        let found = self.seen.jobs.iter().find(|it| it.name() == job).unwrap();
        found.status.clone().unwrap_or_default()
    }
}

fn is_worker(pod: &Pod, job: &str) -> bool {
    let labels = pod.metadata.labels.clone().unwrap_or_default();
    labels.get(names::JOB_LABEL).is_some_and(|name| name == job)
        && names::instance(&labels).is_some_and(|it| it.role == Role::Worker)
}

fn index(pod: &Pod) -> u32 {
    names::instance(pod.metadata.labels.as_ref().unwrap()).unwrap().id
}

/// An action in one line.
pub(crate) fn tell(Action { job, deed }: &Action) -> String {
    let name = &job.name;
    match deed {
        Deed::Admit { workers, remove, .. } => {
            let remove = remove.as_ref().map_or(String::new(), |(pod, _)| format!(", not {pod}"));
            format!("{name}: admit with {workers}{remove}\n")
        }
        Deed::Resize { workers, leave } => {
            format!("{name}: resize to {workers}, leave {leave:?}\n")
        }
        Deed::Stop { pods } => format!("{name}: stop {} pods\n", pods.len()),
        Deed::Show(status) => {
            let holding = status.conditions.iter().filter(|it| it.holds());
            let told: Vec<String> =
                holding.map(|it| format!("{}({}: {})", it.kind, it.reason, it.message)).collect();
            format!(
                "{name}: {} of {}, {}\n",
                status.workers,
                status.wanted_workers,
                told.join(", ")
            )
        }
        Deed::Tell(told) => {
            let mark = if told.is_warning { "!" } else { "-" };
            format!("{name}: {mark} {}: {}\n", told.reason, told.note)
        }
    }
}

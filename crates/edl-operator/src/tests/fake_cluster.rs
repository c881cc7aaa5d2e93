// SPDX-License-Identifier: Apache-2.0
//! A small cluster for tests: its objects, and how they change when a plan is carried out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use edl_core::job::JobState;
use edl_core::platform::{InstanceId, Role};
use edl_core::spec::JobSpec;
use edl_core::time::Time;
use edl_kube::manifest::{self, PodExtras};
use edl_kube::names;
use edl_kube::note::{Grant, StatusNote};
use edl_sched::plan::AllocationPlan;
use edl_sched::state::PlannerState;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::act::{self, Action, JobAction};
use crate::crd::TrainingJob;
use crate::observe::{self, ClusterObjects, Memory, Observed};

/// A cluster, an operator's memory, and a clock that tests move.
pub(crate) struct FakeCluster {
    pub(crate) objects: ClusterObjects,
    pub(crate) memory: Memory,
    pub(crate) state: PlannerState,
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
    for (field, value) in extra.as_object().unwrap() {
        spec[field] = value.clone();
    }
    let job = json!({"metadata": {"name": name, "namespace": "default", "uid": name,
        "generation": 1, "creationTimestamp": "2026-11-16T10:00:00Z"}, "spec": spec});
    serde_json::from_value(job).unwrap()
}

/// A pod of another service; without a node it waits for capacity.
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

impl FakeCluster {
    pub(crate) fn new(nodes: &[Node], jobs: &[TrainingJob]) -> Self {
        let arcs = |nodes: &[Node]| nodes.iter().cloned().map(Arc::new).collect();
        let jobs = jobs.iter().cloned().map(Arc::new).collect();
        let objects = ClusterObjects { nodes: arcs(nodes), jobs, ..ClusterObjects::default() };
        let noon = 1_794_830_400;
        Self { objects, memory: Memory::default(), state: PlannerState::default(), now_secs: noon }
    }

    pub(crate) fn observe(&mut self) -> Observed {
        let now = Time::since_origin(Duration::from_secs(self.now_secs));
        observe::observe(&self.objects, &mut self.memory, now)
    }

    /// Plans one pass, without carrying it out.
    pub(crate) fn plan(&mut self) -> (Observed, AllocationPlan, Vec<JobAction>) {
        let observed = self.observe();
        let now = Time::since_origin(Duration::from_secs(self.now_secs));
        let plan = edl_sched::plan(&observed.snapshot, &self.state, now);
        let now = Timestamp::from_second(i64::try_from(self.now_secs).unwrap()).unwrap();
        let actions = act::actions(&observed, &plan, now);
        (observed, plan, actions)
    }

    /// Carries out one pass, and returns its actions line by line.
    pub(crate) fn pass(&mut self) -> String {
        let (_, plan, actions) = self.plan();
        self.state = plan.state;
        let report = actions.iter().map(line).collect();
        for action in actions {
            self.apply(action);
        }
        self.now_secs += 1;
        report
    }

    fn apply(&mut self, JobAction { job, action }: JobAction) {
        match action {
            Action::Admit { spec, grant } => {
                if self.map_mut(&job.name).is_none() {
                    let mut map = manifest::config_map(&spec).unwrap();
                    map.metadata.owner_references = Some(vec![job.owner.clone()]);
                    self.objects.config_maps.push(Arc::new(map));
                }
                self.annotate(&job.name, &grant.patch());
                self.add_pod(&spec, Role::Master, 0);
            }
            Action::Resize(grant) => self.annotate(&job.name, &grant.patch()),
            Action::Stop { pods } => {
                self.annotate(&job.name, &Grant::stop_patch());
                let is_gone = |pod: &Arc<Pod>| {
                    pods.iter().any(|(_, uid)| pod.metadata.uid.as_ref() == Some(uid))
                };
                self.objects.pods.retain(|pod| !is_gone(pod));
            }
            Action::UpdateStatus(status) => {
                let found = self.objects.jobs.iter_mut().find(|it| it.name() == job.name).unwrap();
                Arc::make_mut(found).status = Some(*status);
            }
            Action::RecordEvent(_) => {}
        }
    }

    /// Does what masters do: they start or stop workers as granted, and all run.
    pub(crate) fn settle(&mut self) {
        for map in self.objects.config_maps.clone() {
            let text = manifest::description(&map);
            let spec = edl_kube::yaml::read::<JobSpec>(text).unwrap();
            if StatusNote::read(&map).is_some_and(|note| note.state == JobState::Succeeded) {
                continue;
            }
            let grant = Grant::read(&map).unwrap_or_default();
            let workers = grant.workers as usize;
            let mine = |pod: &Arc<Pod>| is_worker(pod, &spec.job_name);
            let mut numbers: Vec<u32> =
                self.objects.pods.iter().filter(|pod| mine(pod)).map(|pod| index(pod)).collect();
            numbers.sort_unstable();
            numbers.sort_by_key(|number| grant.leave.contains(number));
            for gone in numbers.split_off(numbers.len().min(workers)) {
                self.objects.pods.retain(|pod| !(mine(pod) && index(pod) == gone));
            }
            let next = numbers.iter().max().map_or(0, |last| last + 1);
            for number in (next..).take(workers.saturating_sub(numbers.len())) {
                self.add_pod(&spec, Role::Worker, number);
            }
        }
        self.schedule();
    }

    /// Does what Kubernetes does: pods get the first node with enough capacity, and run.
    pub(crate) fn schedule(&mut self) {
        for at in 0..self.objects.pods.len() {
            let pod = &self.objects.pods[at];
            if pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()) {
                continue;
            }
            let requests = observe::amounts::requested(pod);
            let Some(node) = self.node_for(requests) else { continue };
            let pod = Arc::make_mut(&mut self.objects.pods[at]);
            pod.spec.as_mut().unwrap().node_name = Some(node);
            pod.status = serde_json::from_value(json!({"phase": "Running"})).unwrap();
        }
    }

    fn node_for(&self, requests: edl_sched::resources::Resources) -> Option<String> {
        let mut free: BTreeMap<String, _> = BTreeMap::new();
        for node in &self.objects.nodes {
            let offered = node.status.as_ref().unwrap().allocatable.as_ref().unwrap();
            free.insert(node.metadata.name.clone().unwrap(), observe::amounts::offered(offered));
        }
        for pod in &self.objects.pods {
            if let Some(node) = &pod.spec.as_ref().unwrap().node_name {
                let free = free.get_mut(node).unwrap();
                *free = free.saturating_sub(observe::amounts::requested(pod));
            }
        }
        free.into_iter().find(|(_, free)| requests.fits_in(*free)).map(|(name, _)| name)
    }

    fn add_pod(&mut self, spec: &JobSpec, role: Role, id: u32) {
        let mut pod = manifest::pod(spec, InstanceId { role, id }, &PodExtras::default()).unwrap();
        let name = pod.metadata.name.clone().unwrap();
        if self.objects.pods.iter().any(|other| other.metadata.name.as_ref() == Some(&name)) {
            return;
        }
        pod.metadata.uid = Some(name);
        self.objects.pods.push(Arc::new(pod));
    }

    /// Applies a merge patch of annotations to a job's ConfigMap.
    pub(crate) fn annotate(&mut self, job: &str, patch: &Value) {
        let map = self.map_mut(job).unwrap();
        let annotations = map.metadata.annotations.get_or_insert_default();
        for (name, value) in patch["metadata"]["annotations"].as_object().unwrap() {
            match value.as_str() {
                Some(text) => annotations.insert(name.clone(), text.to_owned()),
                None => annotations.remove(name),
            };
        }
    }

    pub(crate) fn report(&mut self, job: &str, status: &Value) {
        let note: StatusNote = serde_json::from_value(status.clone()).unwrap();
        self.annotate(job, &note.patch());
    }

    pub(crate) fn grant(&mut self, job: &str, workers: u32) {
        self.annotate(job, &Grant { workers, leave: Vec::new() }.patch());
    }

    fn map_mut(&mut self, job: &str) -> Option<&mut ConfigMap> {
        let name = names::config_map(job);
        let mut maps = self.objects.config_maps.iter_mut();
        maps.find(|map| map.metadata.name.as_ref() == Some(&name)).map(Arc::make_mut)
    }

    pub(crate) fn edit(&mut self, job: &str, field: &str, value: Value) {
        let found = self.objects.jobs.iter_mut().find(|it| it.name() == job).unwrap();
        let job = Arc::make_mut(found);
        job.spec[field] = value;
        job.metadata.generation = job.metadata.generation.map(|generation| generation + 1);
    }

    pub(crate) fn status(&self, job: &str) -> crate::crd::Status {
        let found = self.objects.jobs.iter().find(|it| it.name() == job).unwrap();
        found.status.clone().unwrap_or_default()
    }
}

fn is_worker(pod: &Pod, job: &str) -> bool {
    names::job_of(&pod.metadata).is_some_and(|name| name == job)
        && names::instance_of(&pod.metadata).is_some_and(|it| it.role == Role::Worker)
}

fn index(pod: &Pod) -> u32 {
    names::instance_of(&pod.metadata).unwrap().id
}

/// An action in one line.
pub(crate) fn line(JobAction { job, action }: &JobAction) -> String {
    let name = &job.name;
    match action {
        Action::Admit { grant, .. } => format!("{name}: admit with {}\n", grant.workers),
        Action::Resize(Grant { workers, leave }) => {
            format!("{name}: resize to {workers}, leave {leave:?}\n")
        }
        Action::Stop { pods } => format!("{name}: stop {} pods\n", pods.len()),
        Action::UpdateStatus(status) => {
            let holding = status.conditions.iter().filter(|it| it.holds());
            let conditions: Vec<String> =
                holding.map(|it| format!("{}({}: {})", it.kind, it.reason, it.message)).collect();
            format!(
                "{name}: {} of {}, {}\n",
                status.workers,
                status.wanted_workers,
                conditions.join(", ")
            )
        }
        Action::RecordEvent(event) => {
            let mark = if event.is_warning { "!" } else { "-" };
            format!("{name}: {mark} {}: {}\n", event.reason, event.note)
        }
    }
}

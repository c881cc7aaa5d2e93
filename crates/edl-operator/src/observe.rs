// SPDX-License-Identifier: Apache-2.0
//! Converts watched objects to the planner's input. Nothing here makes requests or decisions. A job
//! that cannot be planned gets a reason and does not affect the others.

pub mod amounts;
mod jobs;
mod marks;
mod nodes;
mod online;
mod placement;
mod pods;
mod spec_cache;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use edl_core::time::Time;
use edl_sched::names::Names;
use edl_sched::snapshot::{Counts, Job, JobId, NodeId, Snapshot};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};

use crate::crd::TrainingJob;
use crate::numbers::Numbers;
use crate::permissions::Permissions;
use crate::queues::Queues;
use crate::speed::Measured;
use marks::MarkTable;
use placement::Placement;
use spec_cache::SpecCache;

pub use jobs::{JobStage, JobView};
pub use pods::JobPod;

/// All watched objects at one moment.
#[derive(Clone, Debug, Default)]
pub struct ClusterObjects {
    pub nodes: Vec<Arc<Node>>,
    pub pods: Vec<Arc<Pod>>,
    pub jobs: Vec<Arc<TrainingJob>>,
    pub config_maps: Vec<Arc<ConfigMap>>,
    /// The values of PriorityClasses.
    pub classes: BTreeMap<String, i32>,
    pub queues: Queues,
    pub permissions: Permissions,
    /// Masters run outside the cluster.
    pub masters_outside: bool,
}

impl ClusterObjects {
    /// What is wrong with the cluster owner's settings, if anything.
    #[must_use]
    pub fn trouble(&self) -> Option<&String> {
        self.queues.trouble.as_ref().or(self.permissions.trouble.as_ref())
    }
}

/// What is remembered from one pass to the next.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    jobs: Numbers,
    nodes: Numbers,
    services: Numbers,
    specs: SpecCache,
    speeds: BTreeMap<JobId, Measured>,
}

/// The planner's input, and the names of what it numbers.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    pub snapshot: Snapshot,
    /// Every job, including those that cannot be planned.
    pub jobs: BTreeMap<JobId, JobView>,
    pub names: Names,
    /// What is wrong with the queues or the permissions, if anything.
    pub trouble: Option<String>,
}

/// Converts all objects.
pub fn observe(objects: &ClusterObjects, memory: &mut Memory, now: Time) -> Observed {
    let mut sorted_jobs = objects.jobs.clone();
    sorted_jobs.sort_by_key(|job| (created(job), job.key()));
    let maps = jobs::config_maps(&objects.config_maps);
    let has_its_map =
        |job: &&Arc<TrainingJob>| maps.get(&job.key()).is_some_and(|map| jobs::is_owned(map, job));
    let ours: BTreeSet<_> = sorted_jobs.iter().filter(has_its_map).map(|job| job.key()).collect();
    let mut pods = pods::sort(&objects.pods, |key| ours.contains(key));
    let mut views: Vec<JobView> = Vec::with_capacity(sorted_jobs.len());
    for job in &sorted_jobs {
        let key = job.key();
        let id = JobId(memory.jobs.of(job.uid()));
        let pods = pods.of_jobs.remove(&key).unwrap_or_default();
        let map = maps.get(&key).copied();
        let parsed = memory.specs.read(job, jobs::description(map, job));
        views.push(jobs::view(id, job.clone(), parsed, map, pods, objects));
    }
    let worker_pods = views.iter().filter_map(|view| Some(&*view.plannable()?.worker));
    let mark_table = MarkTable::new(
        objects.nodes.iter().map(|node| &**node),
        worker_pods.chain(pods.waiting.iter().map(|pod| &**pod)),
    );
    let (mut nodes, node_ids) = memory.nodes(&objects.nodes, &mark_table);
    let mut placement = Placement::new(&mut nodes, &node_ids);
    for other in &pods.others {
        placement.occupy(&other.node, other.requests, other.is_leaving);
    }
    let mut planned: Vec<(Job, Counts)> = Vec::new();
    for view in &views {
        let measured = memory.speeds.entry(view.id).or_default();
        match view.job(&objects.queues, &mark_table, measured, now) {
            Some(mut job) => {
                let wanted = view.wanted(&job);
                let missing = placement.place(&mut job, &view.pods, &wanted);
                planned.push((job, missing));
            }
            None => view.leave(&mut placement),
        }
    }
    placement.reserve(&mut planned);
    let waiting = online::waiting(&pods.waiting, &mark_table, &mut memory.services);
    memory.keep_only(&views);
    let names = Names {
        jobs: views.iter().map(|view| (view.id, view.title())).collect(),
        nodes: node_ids.into_iter().map(|(name, id)| (id, name)).collect(),
        queues: objects.queues.names(),
        services: waiting.names,
    };
    let snapshot = Snapshot {
        nodes,
        jobs: planned.into_iter().map(|(job, _)| job).collect(),
        queues: objects.queues.all(),
        waiting: waiting.pods,
    };
    let jobs = views.into_iter().map(|view| (view.id, view)).collect();
    Observed { snapshot, jobs, names, trouble: objects.trouble().cloned() }
}

impl Memory {
    /// Nodes in order of their numbers, and the numbers by name.
    fn nodes(
        &mut self,
        observed: &[Arc<Node>],
        mark_table: &MarkTable,
    ) -> (Vec<edl_sched::snapshot::Node>, BTreeMap<String, NodeId>) {
        let mut by_name: BTreeMap<&str, &Node> = BTreeMap::new();
        for node in observed {
            by_name.insert(node.metadata.name.as_deref().unwrap_or_default(), node);
        }
        self.nodes.keep_only(|name| by_name.contains_key(name));
        let mut ids = BTreeMap::new();
        let mut nodes = Vec::with_capacity(by_name.len());
        for (name, node) in by_name {
            let id = NodeId(self.nodes.of(name));
            ids.insert(name.to_owned(), id);
            nodes.push(nodes::node(id, node, mark_table));
        }
        nodes.sort_by_key(|node| node.id);
        (nodes, ids)
    }

    fn keep_only(&mut self, views: &[JobView]) {
        let uids: BTreeSet<&str> = views.iter().map(|view| view.object.uid()).collect();
        let ids: BTreeSet<JobId> = views.iter().map(|view| view.id).collect();
        self.jobs.keep_only(|uid| uids.contains(uid));
        self.specs.keep_only(|uid| uids.contains(uid));
        self.speeds.retain(|id, _| ids.contains(id));
    }
}

/// When a job was submitted, in seconds since 1970.
fn created(job: &TrainingJob) -> i64 {
    job.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second())
}

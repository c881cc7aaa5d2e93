// SPDX-License-Identifier: Apache-2.0
//! From what the API server shows to the numbers that a plan is made from. Nothing here asks,
//! waits or decides; a job that cannot be planned says why and keeps nobody else from it.

pub mod amounts;
mod jobs;
mod marks;
mod nodes;
mod online;
mod pods;
mod readings;
mod seats;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use edl_core::time::Time;
use edl_sched::snapshot::{Counts, Job, JobId, NodeId, QueueId, ServiceId, Snapshot};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};

use crate::crd::TrainingJob;
use crate::numbers::Numbers;
use crate::queues::Queues;
use crate::speed::Measured;
use marks::Book;
use readings::Readings;
use seats::Seats;

pub use jobs::{JobView, Stage};
pub use pods::{JobPod, Life};

/// Everything that the watches show at one moment.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub nodes: Vec<Arc<Node>>,
    pub pods: Vec<Arc<Pod>>,
    pub jobs: Vec<Arc<TrainingJob>>,
    /// Those of all jobs.
    pub config_maps: Vec<Arc<ConfigMap>>,
    /// The values of PriorityClasses.
    pub classes: BTreeMap<String, i32>,
    pub queues: Queues,
    /// Masters are not pods of the cluster.
    pub masters_outside: bool,
}

/// What is remembered from one look to the next.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    jobs: Numbers,
    nodes: Numbers,
    services: Numbers,
    readings: Readings,
    speeds: BTreeMap<JobId, Measured>,
}

/// What was seen, in numbers and with their names.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    pub snapshot: Snapshot,
    /// Every job, those that cannot be planned included.
    pub jobs: BTreeMap<JobId, JobView>,
    pub names: Names,
    /// What is wrong with the queues, if anything.
    pub trouble: Option<String>,
}

/// What the numbers of a plan stand for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    pub jobs: BTreeMap<JobId, String>,
    pub nodes: BTreeMap<NodeId, String>,
    pub queues: BTreeMap<QueueId, String>,
    pub services: BTreeMap<ServiceId, String>,
}

/// Looks at everything once.
pub fn observe(seen: &Seen, memory: &mut Memory, now: Time) -> Observed {
    let mut sorted_jobs = seen.jobs.clone();
    sorted_jobs.sort_by_key(|job| (created(job), job.key()));
    let maps = jobs::config_maps(&seen.config_maps);
    let has_its_map =
        |job: &&Arc<TrainingJob>| maps.get(&job.key()).is_some_and(|map| jobs::is_owned(map, job));
    let ours: BTreeSet<_> = sorted_jobs.iter().filter(has_its_map).map(|job| job.key()).collect();
    let mut pods = pods::sort(&seen.pods, |key| ours.contains(key));
    let mut views: Vec<JobView> = Vec::with_capacity(sorted_jobs.len());
    for job in &sorted_jobs {
        let key = job.key();
        let id = JobId(memory.jobs.of(job.uid()));
        let pods = pods.of_jobs.remove(&key).unwrap_or_default();
        let map = maps.get(&key).copied();
        let reading = memory.readings.read(job, jobs::description(map, job));
        views.push(jobs::view(id, job.clone(), reading, map, pods, seen));
    }
    let worker_pods = views.iter().filter_map(|view| Some(&*view.plannable()?.worker));
    let book = Book::new(
        seen.nodes.iter().map(|node| &**node),
        worker_pods.chain(pods.waiting.iter().map(|pod| &**pod)),
    );
    let (mut nodes, node_ids) = memory.nodes(&seen.nodes, &book);
    let mut seats = Seats::new(&mut nodes, &node_ids);
    for other in &pods.others {
        seats.book(&other.node, other.asks, other.is_leaving);
    }
    let mut planned: Vec<(Job, Counts)> = Vec::new();
    for view in &views {
        let measured = memory.speeds.entry(view.id).or_default();
        match view.job(&seen.queues, &book, measured, now) {
            Some(mut job) => {
                let wanted = view.wanted(&job);
                let missing = seats.seat(&mut job, &view.pods, &wanted);
                planned.push((job, missing));
            }
            None => view.leave(&mut seats),
        }
    }
    seats.reserve(&mut planned);
    let waiting = online::waiting(&pods.waiting, &book, &mut memory.services);
    memory.keep_only(&views);
    let names = Names {
        jobs: views.iter().map(|view| (view.id, view.title())).collect(),
        nodes: node_ids.into_iter().map(|(name, id)| (id, name)).collect(),
        queues: seen.queues.names(),
        services: waiting.names,
    };
    let snapshot = Snapshot {
        nodes,
        jobs: planned.into_iter().map(|(job, _)| job).collect(),
        queues: seen.queues.all(),
        waiting: waiting.pods,
    };
    let jobs = views.into_iter().map(|view| (view.id, view)).collect();
    Observed { snapshot, jobs, names, trouble: seen.queues.trouble.clone() }
}

impl Memory {
    /// Nodes in order of their numbers, and the numbers by name.
    fn nodes(
        &mut self,
        seen: &[Arc<Node>],
        book: &Book,
    ) -> (Vec<edl_sched::snapshot::Node>, BTreeMap<String, NodeId>) {
        let mut by_name: BTreeMap<&str, &Node> = BTreeMap::new();
        for node in seen {
            by_name.insert(node.metadata.name.as_deref().unwrap_or_default(), node);
        }
        self.nodes.keep_only(|name| by_name.contains_key(name));
        let mut ids = BTreeMap::new();
        let mut nodes = Vec::with_capacity(by_name.len());
        for (name, node) in by_name {
            let id = NodeId(self.nodes.of(name));
            ids.insert(name.to_owned(), id);
            nodes.push(nodes::node(id, node, book));
        }
        nodes.sort_by_key(|node| node.id);
        (nodes, ids)
    }

    fn keep_only(&mut self, views: &[JobView]) {
        let uids: BTreeSet<&str> = views.iter().map(|view| view.object.uid()).collect();
        let ids: BTreeSet<JobId> = views.iter().map(|view| view.id).collect();
        self.jobs.keep_only(|uid| uids.contains(uid));
        self.readings.keep_only(|uid| uids.contains(uid));
        self.speeds.retain(|id, _| ids.contains(id));
    }
}

/// When a job was submitted, in seconds since 1970.
fn created(job: &TrainingJob) -> i64 {
    job.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second())
}

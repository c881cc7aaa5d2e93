// SPDX-License-Identifier: Apache-2.0
//! The simulated cluster as the planner and the report see it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Engine, Owner, PodPhase};
use crate::resources::Resources;
use crate::sim::bound::most_asked;
use crate::sim::metrics::Row;
use crate::snapshot::{Counts, Job, Marks, Node, OnlinePods, Placed, Role, ServiceId, Snapshot};

impl Engine<'_> {
    pub(super) fn observe(&self) -> Snapshot {
        let mut taken: Vec<Resources> = self.nodes.iter().map(|node| node.spec.taken).collect();
        let mut leaving = vec![Resources::ZERO; self.nodes.len()];
        let mut waiting: BTreeMap<usize, u32> = BTreeMap::new();
        for pod in self.pods.values() {
            if let Some(node) = pod.node.filter(|_| pod.phase == PodPhase::Leaving) {
                leaving[node] += pod.shape;
            }
            let Owner::Service(service) = pod.owner else { continue };
            match (pod.phase, pod.node) {
                (PodPhase::Unscheduled, _) => *waiting.entry(service).or_insert(0) += 1,
                (PodPhase::Starting | PodPhase::Running, Some(node)) => taken[node] += pod.shape,
                (
                    PodPhase::Starting | PodPhase::Running | PodPhase::Pinned | PodPhase::Leaving,
                    _,
                ) => {}
            }
        }
        let nodes =
            self.nodes.iter().zip(taken).zip(leaving).filter_map(|((node, taken), leaving)| {
                let seen = || Node { taken, leaving, state: node.state, ..node.spec.clone() };
                node.is_up.then(seen)
            });
        let online = |(service, n): (usize, u32)| OnlinePods {
            service: ServiceId(u32::try_from(service).unwrap_or(u32::MAX)),
            shape: self.services[service].script.shape,
            n,
            priority: 0,
            tolerates: Marks::NONE,
            selects: Marks::NONE,
        };
        let active = (0..self.jobs.len()).filter(|job| self.jobs[*job].is_active());
        Snapshot {
            nodes: nodes.collect(),
            jobs: active.map(|job| self.observe_job(job)).collect(),
            queues: self.scenario.queues.clone(),
            waiting: waiting.into_iter().map(online).collect(),
        }
    }

    fn observe_job(&self, job: usize) -> Job {
        let life = &self.jobs[job];
        let mut placed: BTreeMap<(Role, usize), u32> = BTreeMap::new();
        let (mut unplaced, mut running) = (Counts::default(), Counts::default());
        for pod in life.pods.iter().filter_map(|id| self.pods.get(id)) {
            let Owner::Job(_, role) = pod.owner else { continue };
            match (pod.phase, pod.node) {
                (PodPhase::Leaving, _) => continue,
                (_, Some(node)) => *placed.entry((role, node)).or_insert(0) += 1,
                (_, None) => *unplaced.of_mut(role) += 1,
            }
            if pod.phase == PodPhase::Running {
                *running.of_mut(role) += 1;
            }
        }
        let place = |((role, node), n): ((Role, usize), u32)| Placed {
            role,
            node: self.nodes[node].spec.id,
            n,
        };
        let mut observed = life.script.job.clone();
        life.work.limit(&mut observed.roles.worker);
        Job {
            placed: placed.into_iter().map(place).collect(),
            unplaced,
            running,
            ran: life.ran + self.since_touched(job),
            resize_cost: self.scenario.rescale,
            speed: life.work.speed(observed.roles.worker.max),
            ..observed
        }
    }

    fn since_touched(&self, job: usize) -> Duration {
        let life = &self.jobs[job];
        if life.workers.is_empty() { Duration::ZERO } else { self.now.since(life.touched) }
    }

    /// The nodes that are up, with the system's and the services' pods on them.
    fn nodes_without_jobs(&self) -> Vec<Node> {
        let mut nodes: Vec<Option<Node>> =
            self.nodes.iter().map(|node| node.is_up.then(|| node.spec.clone())).collect();
        for pod in self.pods.values() {
            let stays = matches!(pod.phase, PodPhase::Starting | PodPhase::Running);
            let Some(node) = pod.node.filter(|_| stays) else { continue };
            if let (Owner::Service(_), Some(node)) = (pod.owner, &mut nodes[node]) {
                node.taken += pod.shape;
            }
        }
        nodes.into_iter().flatten().collect()
    }

    pub(super) fn row(&self) -> Row {
        let mut running = Resources::ZERO;
        let mut n_service = 0;
        for pod in self.pods.values() {
            if matches!(pod.phase, PodPhase::Running | PodPhase::Leaving) {
                running += pod.shape;
            }
            if matches!(pod.owner, Owner::Service(_)) && pod.phase == PodPhase::Running {
                n_service += 1;
            }
        }
        let system = self.nodes.iter().filter(|node| node.is_up).map(|node| node.spec.taken).sum();
        let workers: Vec<u32> = self.jobs.iter().map(|job| job.live.values().sum()).collect();
        let waits = |job: usize| self.jobs[job].is_active() && workers[job] == 0;
        let n_pending = (0..self.jobs.len()).filter(|job| waits(*job)).count();
        let n_ps = (0..self.jobs.len())
            .map(|job| self.counts_in(job, |phase| phase == PodPhase::Running).ps)
            .sum();
        let nodes = self.nodes_without_jobs();
        let active = self.jobs.iter().filter(|job| job.is_active());
        let jobs: Vec<&Job> = active.map(|job| &job.script.job).collect();
        let free = |node: &Node| node.capacity.saturating_sub(node.taken);
        let has_services = !self.services.is_empty();
        let free_by_node = nodes.iter().filter(|_| has_services).map(free).collect();
        Row {
            at: self.now,
            asked: running + system,
            bound: most_asked(&nodes, &jobs),
            free_by_node,
            n_pending,
            n_not_submitted: self.jobs.iter().filter(|job| !job.is_submitted).count(),
            n_done: self.jobs.iter().filter(|job| job.is_done()).count(),
            n_service,
            n_ps,
            workers,
        }
    }
}

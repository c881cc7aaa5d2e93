// SPDX-License-Identifier: Apache-2.0
//! The life of pods: creation, scheduling, start, removal.

use std::time::Duration;

use super::{Engine, Event, Owner, Pod, PodId, PodPhase};
use crate::sim::kubernetes::{NodeView, Retry, Start, choose_node};
use crate::snapshot::{NodeState, Role};

impl Engine<'_> {
    /// Starts all services before the first event.
    pub(super) fn start_services(&mut self) {
        for service in 0..self.services.len() {
            for _ in 0..self.services[service].script.at_start {
                let pod = self.create(Owner::Service(service), None);
                if let Some(node) = self.pick_node(pod) {
                    self.occupy(pod, node);
                    self.set_phase(pod, PodPhase::Running);
                }
            }
        }
    }

    /// Creates a pod, for a node that the plan chose or for the scheduler.
    pub(super) fn create(&mut self, owner: Owner, node: Option<usize>) -> PodId {
        let shape = match owner {
            Owner::Job(job, role) => self.jobs[job].script.job.roles.of(role).shape,
            Owner::Service(service) => self.services[service].script.shape,
        };
        let id = PodId(self.n_pods);
        self.n_pods += 1;
        let phase = if node.is_some() { PodPhase::Pinned } else { PodPhase::Unscheduled };
        let pod = Pod { owner, shape, node, phase, retry: Duration::from_secs(1) };
        self.pods.insert(id, pod);
        match owner {
            Owner::Job(job, _) => self.jobs[job].pods.insert(id),
            Owner::Service(service) => self.services[service].pods.insert(id),
        };
        id
    }

    /// Starts a pinned pod if its node has capacity.
    pub(super) fn try_to_bind(&mut self, id: PodId) {
        let Some(pod) = self.pods.get(&id) else { return };
        let Some(node) = pod.node.filter(|_| pod.phase == PodPhase::Pinned) else { return };
        if self.nodes[node].is_up && pod.shape.fits_in(self.nodes[node].free) {
            self.occupy(id, node);
            self.begin_start(id);
        }
    }

    /// One attempt of the scheduler.
    pub(super) fn try_to_schedule(&mut self, id: PodId) {
        if self.pods.get(&id).is_none_or(|pod| pod.phase != PodPhase::Unscheduled) {
            return;
        }
        if let Some(node) = self.pick_node(id) {
            self.occupy(id, node);
            self.begin_start(id);
            return;
        }
        if let Retry::Backoff(longest) = self.scenario.kubernetes.retry
            && let Some(pod) = self.pods.get_mut(&id)
        {
            let wait = pod.retry;
            pod.retry = (pod.retry * 2).min(longest);
            self.after(wait, Event::Retry(id));
        }
        if matches!(self.pods.get(&id).map(|pod| pod.owner), Some(Owner::Service(_))) {
            self.request_plan();
        }
    }

    fn pick_node(&mut self, id: PodId) -> Option<usize> {
        let pod = *self.pods.get(&id)?;
        let mut views: Vec<NodeView> = self
            .nodes
            .iter()
            .map(|node| NodeView {
                capacity: node.spec.capacity,
                free: node.free,
                n_siblings: 0,
                is_usable: node.is_up && node.state == NodeState::Ready,
            })
            .collect();
        let siblings = match pod.owner {
            Owner::Job(job, _) => &self.jobs[job].pods,
            Owner::Service(service) => &self.services[service].pods,
        };
        for sibling in siblings.iter().filter_map(|id| self.pods.get(id)) {
            if let Some(node) = sibling.node.filter(|_| sibling.owner == pod.owner) {
                views[node].n_siblings += 1;
            }
        }
        choose_node(&views, pod.shape, &mut self.rng)
    }

    fn occupy(&mut self, id: PodId, node: usize) {
        let Some(pod) = self.pods.get_mut(&id) else { return };
        self.nodes[node].free -= pod.shape;
        pod.node = Some(node);
        pod.phase = PodPhase::Starting;
    }

    fn begin_start(&mut self, id: PodId) {
        match self.scenario.kubernetes.start {
            Start::AtOnce => self.pod_up(id),
            Start::Between(least, most) => {
                let wait = least + most.saturating_sub(least).mul_f64(self.rng.unit());
                self.after(wait, Event::PodUp(id));
            }
            Start::PerSecond(_) => {
                self.starting.push(id);
                self.order_next_start();
            }
        }
    }

    fn order_next_start(&mut self) {
        let Start::PerSecond(rate) = self.scenario.kubernetes.start else { return };
        if !self.is_start_due && !self.starting.is_empty() {
            self.is_start_due = true;
            let wait = -(1.0 - self.rng.unit()).ln() / rate;
            self.after(Duration::from_secs_f64(wait), Event::StartNext);
        }
    }

    /// Starts one of the pods that wait because of the rate of starts.
    pub(super) fn start_next(&mut self) {
        self.is_start_due = false;
        if !self.starting.is_empty() {
            let which = self.rng.below(self.starting.len() as u64);
            let id = self.starting.swap_remove(usize::try_from(which).unwrap_or(0));
            self.pod_up(id);
        }
        self.order_next_start();
    }

    pub(super) fn pod_up(&mut self, id: PodId) {
        if self.pods.get(&id).is_some_and(|pod| pod.phase == PodPhase::Starting) {
            self.set_phase(id, PodPhase::Running);
        }
    }

    /// Stops a pod. One that does not run yet is gone at once.
    pub(super) fn remove(&mut self, id: PodId) {
        let Some(pod) = self.pods.get(&id).copied() else { return };
        let leave = match pod.owner {
            Owner::Job(..) => self.scenario.kubernetes.worker_leaves,
            Owner::Service(_) => self.scenario.kubernetes.service_leaves,
        };
        match pod.phase {
            PodPhase::Leaving => {}
            PodPhase::Running if leave > Duration::ZERO => {
                self.set_phase(id, PodPhase::Leaving);
                self.after(leave, Event::PodGone(id));
            }
            PodPhase::Running | PodPhase::Unscheduled | PodPhase::Pinned | PodPhase::Starting => {
                self.pod_gone(id);
            }
        }
    }

    /// Removes a pod and frees its capacity.
    pub(super) fn pod_gone(&mut self, id: PodId) {
        if self.pods.get(&id).is_some_and(|pod| pod.phase == PodPhase::Running) {
            self.set_phase(id, PodPhase::Leaving);
        }
        let Some(pod) = self.pods.remove(&id) else { return };
        self.starting.retain(|other| *other != id);
        match pod.owner {
            Owner::Job(job, _) => self.jobs[job].pods.remove(&id),
            Owner::Service(service) => self.services[service].pods.remove(&id),
        };
        let held = matches!(pod.phase, PodPhase::Starting | PodPhase::Running | PodPhase::Leaving);
        if let Some(node) = pod.node.filter(|_| held) {
            self.nodes[node].free += pod.shape;
            self.capacity_freed(node);
        }
    }

    /// Tries pods that wait for capacity on a node, online pods first.
    pub(super) fn capacity_freed(&mut self, node: usize) {
        if self.scenario.kubernetes.retry == Retry::OnEvents {
            let is_homeless = |pod: &Pod| pod.phase == PodPhase::Unscheduled;
            let mut homeless: Vec<(bool, PodId)> = self
                .pods
                .iter()
                .filter(|(_, pod)| is_homeless(pod))
                .map(|(id, pod)| (matches!(pod.owner, Owner::Job(..)), *id))
                .collect();
            homeless.sort_unstable();
            for (_, id) in homeless {
                self.try_to_schedule(id);
            }
        }
        let is_pinned = |pod: &Pod| pod.phase == PodPhase::Pinned && pod.node == Some(node);
        let pinned: Vec<PodId> =
            self.pods.iter().filter(|(_, pod)| is_pinned(pod)).map(|(id, _)| *id).collect();
        for id in pinned {
            self.try_to_bind(id);
        }
    }

    /// Changes the phase of a pod, and updates its job's workers.
    fn set_phase(&mut self, id: PodId, phase: PodPhase) {
        let Some(pod) = self.pods.get_mut(&id) else { return };
        let before = pod.phase;
        pod.phase = phase;
        let Owner::Job(job, role) = pod.owner else { return };
        let Some(node) = pod.node.filter(|_| role == Role::Worker) else {
            self.note_whole(job);
            return;
        };
        let live = &mut self.jobs[job].live;
        if phase == PodPhase::Running {
            *live.entry(node).or_insert(0) += 1;
            self.jobs[job].outcome.first_worker.get_or_insert(self.now);
        } else if before == PodPhase::Running {
            let n = live.entry(node).or_insert(1);
            *n -= 1;
            if *n == 0 {
                live.remove(&node);
            }
        }
        self.changed.insert(job);
        self.note_whole(job);
    }

    fn note_whole(&mut self, job: usize) {
        if self.jobs[job].outcome.whole.is_some() {
            return;
        }
        let running = self.counts_in(job, |phase| phase == PodPhase::Running);
        let roles = &self.jobs[job].script.job.roles;
        if Role::ALL.into_iter().all(|role| running.of(role) >= roles.of(role).min) {
            self.jobs[job].outcome.whole = Some(self.now);
        }
    }

    pub(super) fn scale_service(&mut self, service: usize, n: u32) {
        self.services[service].target = n;
        self.fit_service(service);
    }

    /// Creates or stops pods until a service reaches its target.
    fn fit_service(&mut self, service: usize) {
        let target = self.services[service].target as usize;
        let stays =
            |id: &PodId| self.pods.get(id).is_some_and(|pod| pod.phase != PodPhase::Leaving);
        let staying: Vec<PodId> =
            self.services[service].pods.iter().copied().filter(stays).collect();
        for id in staying.iter().skip(target) {
            self.remove(*id);
        }
        for _ in staying.len()..target {
            let id = self.create(Owner::Service(service), None);
            self.try_to_schedule(id);
        }
        self.request_plan();
    }

    /// Removes a node with all its pods.
    pub(super) fn lose_node(&mut self, node: usize) {
        self.nodes[node].is_up = false;
        let lost: Vec<PodId> =
            self.pods.iter().filter(|(_, pod)| pod.node == Some(node)).map(|(id, _)| *id).collect();
        for id in lost {
            self.pod_gone(id);
        }
        for service in 0..self.services.len() {
            self.fit_service(service);
        }
        self.request_plan();
    }

    pub(super) fn n_running(&self, service: usize) -> u32 {
        self.n_in_phase(service, PodPhase::Running)
    }

    pub(super) fn n_homeless(&self, service: usize) -> u32 {
        self.n_in_phase(service, PodPhase::Unscheduled)
    }

    fn n_in_phase(&self, service: usize, phase: PodPhase) -> u32 {
        let is_in = |id: &&PodId| self.pods.get(id).is_some_and(|pod| pod.phase == phase);
        u32::try_from(self.services[service].pods.iter().filter(is_in).count()).unwrap_or(u32::MAX)
    }
}

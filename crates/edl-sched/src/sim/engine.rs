// SPDX-License-Identifier: Apache-2.0
//! The event loop of the simulator: a queue of events and their handlers.

mod apply;
mod jobs;
mod observe;
mod pods;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use edl_core::rng::Rng;
use edl_core::time::Time;

use crate::plan;
use crate::plan::OnlinePlacement;
use crate::resources::Resources;
use crate::sim::metrics::Row;
use crate::sim::report::{JobOutcome, Report, ServiceOutcome};
use crate::sim::scenario::{JobScript, NodeFaultKind, Scenario, ServiceScript};
use crate::sim::work::Work;
use crate::snapshot::{Node, NodeState, Role};
use crate::state::{Options, PlannerState, Policy};

/// A run that lasts longer than this in simulated time has hung.
const LONGEST: Duration = Duration::from_secs(3600 * 24 * 365);

pub(crate) struct Engine<'a> {
    scenario: &'a Scenario,
    rng: Rng,
    now: Time,
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    n_events: u64,
    nodes: Vec<NodeLife<'a>>,
    pods: BTreeMap<PodId, Pod>,
    n_pods: u64,
    /// Pods with a node that wait because of the rate of starts.
    starting: Vec<PodId>,
    is_start_due: bool,
    jobs: Vec<JobLife<'a>>,
    /// Jobs whose running workers just changed.
    changed: BTreeSet<usize>,
    services: Vec<ServiceLife<'a>>,
    state: PlannerState,
    is_plan_due: bool,
    rows: Vec<Row>,
    n_plans: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct PodId(u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    NodeLost(usize),
    NodeWarned(usize, Duration),
    NodeBack(usize),
    ServiceTarget(usize, u32),
    Submitted(usize),
    PodGone(PodId),
    PodUp(PodId),
    StartNext,
    Retry(PodId),
    Milestone(usize, u64),
    PlanDue,
    Tick,
    Row,
    End,
}

struct NodeLife<'a> {
    spec: &'a Node,
    is_up: bool,
    state: NodeState,
    /// Free capacity; leaving pods still hold theirs.
    free: Resources,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Job(usize, Role),
    Service(usize),
}

#[derive(Clone, Copy, Debug)]
struct Pod {
    owner: Owner,
    shape: Resources,
    node: Option<usize>,
    phase: PodPhase,
    /// How long the scheduler waits before its next attempt.
    retry: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PodPhase {
    /// Waiting for the scheduler.
    Unscheduled,
    /// Waiting for capacity on the node that the plan chose.
    Pinned,
    Starting,
    Running,
    Leaving,
}

struct JobLife<'a> {
    script: &'a JobScript,
    work: Work,
    is_submitted: bool,
    outcome: JobOutcome,
    pods: BTreeSet<PodId>,
    /// Running workers by node.
    live: BTreeMap<usize, u32>,
    /// The workers since `touched`.
    workers: Vec<u32>,
    touched: Time,
    paused_until: Time,
    version: u64,
    ran: Duration,
}

struct ServiceLife<'a> {
    script: &'a ServiceScript,
    target: u32,
    pods: BTreeSet<PodId>,
    outcome: ServiceOutcome,
    /// Waiting pods for which the last plan found capacity, once workers have left.
    promised: u32,
}

impl<'a> Engine<'a> {
    pub(crate) fn new(scenario: &'a Scenario, policy: Policy, seed: u64) -> Self {
        let mut nodes: Vec<&Node> = scenario.nodes.iter().collect();
        nodes.sort_by_key(|node| node.id);
        let node = |spec: &'a Node| NodeLife {
            spec,
            is_up: true,
            state: spec.state,
            free: spec.capacity.saturating_sub(spec.taken),
        };
        let mut engine = Self {
            scenario,
            rng: Rng::new(seed),
            now: Time::ZERO,
            events: BinaryHeap::new(),
            n_events: 0,
            nodes: nodes.into_iter().map(node).collect(),
            pods: BTreeMap::new(),
            n_pods: 0,
            starting: Vec::new(),
            is_start_due: false,
            jobs: scenario.jobs.iter().map(JobLife::new).collect(),
            changed: BTreeSet::new(),
            services: scenario.services.iter().map(ServiceLife::new).collect(),
            state: PlannerState::new(Options { policy, seed, ..scenario.options }),
            is_plan_due: false,
            rows: Vec::new(),
            n_plans: 0,
        };
        engine.schedule_script();
        engine
    }

    pub(crate) fn run(mut self) -> Report {
        self.start_services();
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            if at > Time::ZERO + LONGEST {
                break;
            }
            self.pass_time(at);
            if event == Event::End {
                break;
            }
            self.handle(event);
            self.settle_changed();
            if self.scenario.end.is_none() && self.jobs.iter().all(JobLife::is_done) {
                break;
            }
        }
        self.report()
    }

    /// Schedules all events that are known from the start.
    fn schedule_script(&mut self) {
        let scenario = self.scenario;
        for (job, script) in scenario.jobs.iter().enumerate() {
            self.at(script.job.submitted, Event::Submitted(job));
        }
        for (service, script) in scenario.services.iter().enumerate() {
            for (at, n) in &script.targets {
                self.at(*at, Event::ServiceTarget(service, *n));
            }
        }
        for fault in &scenario.faults {
            let Some(node) = self.nodes.iter().position(|node| node.spec.id == fault.node) else {
                continue;
            };
            match fault.kind {
                NodeFaultKind::Loss { back_after } => {
                    self.at(fault.at, Event::NodeLost(node));
                    self.at(fault.at + back_after, Event::NodeBack(node));
                }
                NodeFaultKind::Reclaim { notice, back_after } => {
                    self.at(fault.at, Event::NodeWarned(node, notice));
                    self.at(fault.at + notice + back_after, Event::NodeBack(node));
                }
            }
        }
        self.at(Time::ZERO, Event::Row);
        self.at(Time::ZERO + scenario.plan_every, Event::Tick);
        if let Some(end) = scenario.end {
            self.at(end, Event::End);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::NodeLost(node) => self.lose_node(node),
            Event::NodeWarned(node, notice) => {
                self.nodes[node].state = NodeState::Leaving;
                self.after(notice, Event::NodeLost(node));
                self.request_plan();
            }
            Event::NodeBack(node) => {
                self.nodes[node].is_up = true;
                self.nodes[node].state = self.nodes[node].spec.state;
                self.capacity_freed(node);
                self.request_plan();
            }
            Event::ServiceTarget(service, n) => self.scale_service(service, n),
            Event::Submitted(job) => {
                self.jobs[job].is_submitted = true;
                self.request_plan();
            }
            Event::PodGone(pod) => self.pod_gone(pod),
            Event::PodUp(pod) => self.pod_up(pod),
            Event::StartNext => self.start_next(),
            Event::Retry(pod) => self.try_to_schedule(pod),
            Event::Milestone(job, version) => self.milestone(job, version),
            Event::PlanDue => {
                self.is_plan_due = false;
                self.plan();
            }
            Event::Tick => {
                self.plan();
                self.after(self.scenario.plan_every, Event::Tick);
            }
            Event::Row => {
                let row = self.row();
                self.rows.push(row);
                self.after(self.scenario.row_every, Event::Row);
            }
            Event::End => {}
        }
    }

    fn plan(&mut self) {
        self.settle_changed();
        self.refresh_work();
        let snapshot = self.observe();
        let plan = plan(&snapshot, &self.state, self.now);
        self.n_plans += 1;
        for (service, life) in self.services.iter_mut().enumerate() {
            let is_its =
                |placed: &&OnlinePlacement| usize::try_from(placed.service.0) == Ok(service);
            life.promised = plan.online.iter().filter(is_its).map(|placed| placed.n).sum();
        }
        self.apply(&plan);
        self.state = plan.state;
    }

    /// Requests one plan at this moment, if the scenario plans on events.
    fn request_plan(&mut self) {
        if self.scenario.plans_on_events && !self.is_plan_due {
            self.is_plan_due = true;
            self.after(Duration::ZERO, Event::PlanDue);
        }
    }

    fn at(&mut self, time: Time, event: Event) {
        self.n_events += 1;
        self.events.push(Reverse((time, self.n_events, event)));
    }

    fn after(&mut self, wait: Duration, event: Event) {
        self.at(self.now + wait, event);
    }

    fn pass_time(&mut self, to: Time) {
        let secs = to.since(self.now).as_secs_f64();
        for service in 0..self.services.len() {
            let running = self.n_running(service);
            let homeless = self.n_homeless(service);
            let service = &mut self.services[service];
            let missing = service.target.saturating_sub(running);
            let outcome = &mut service.outcome;
            outcome.deficit_pod_secs += f64::from(missing) * secs;
            outcome.deficit_without_node_pod_secs += f64::from(homeless.min(missing)) * secs;
            let unplanned = homeless.min(missing).saturating_sub(service.promised);
            outcome.deficit_unplanned_pod_secs += f64::from(unplanned) * secs;
        }
        self.now = to;
    }

    fn report(mut self) -> Report {
        self.settle_changed();
        for job in 0..self.jobs.len() {
            self.accrue(job);
        }
        Report {
            scripts: self.scenario.jobs.iter().map(|script| script.job.clone()).collect(),
            scenario: self.scenario.name.clone(),
            policy: self.state.options.policy,
            seed: self.state.options.seed,
            end: self.now,
            capacity: self.scenario.nodes.iter().map(|node| node.capacity).sum(),
            jobs: self.jobs.into_iter().map(|job| job.outcome).collect(),
            services: self.services.into_iter().map(|service| service.outcome).collect(),
            rows: self.rows,
            n_plans: self.n_plans,
        }
    }
}

impl<'a> JobLife<'a> {
    fn new(script: &'a JobScript) -> Self {
        Self {
            script,
            work: script.work.clone(),
            is_submitted: false,
            outcome: JobOutcome {
                name: script.name.clone(),
                submitted: script.job.submitted,
                first_worker: None,
                whole: None,
                done: None,
                n_resizes: 0,
                n_stops: 0,
                worker_secs: 0.0,
                paused_worker_secs: 0.0,
                max_workers: script.job.roles.worker.max,
            },
            pods: BTreeSet::new(),
            live: BTreeMap::new(),
            workers: Vec::new(),
            touched: Time::ZERO,
            paused_until: Time::ZERO,
            version: 0,
            ran: Duration::ZERO,
        }
    }

    fn is_active(&self) -> bool {
        self.is_submitted && !self.is_done()
    }

    fn is_done(&self) -> bool {
        self.outcome.done.is_some()
    }
}

impl<'a> ServiceLife<'a> {
    fn new(script: &'a ServiceScript) -> Self {
        Self {
            script,
            target: script.at_start,
            pods: BTreeSet::new(),
            outcome: ServiceOutcome { name: script.name.clone(), ..ServiceOutcome::default() },
            promised: 0,
        }
    }
}

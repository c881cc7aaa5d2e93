// SPDX-License-Identifier: Apache-2.0
//! Everything around the job: real machines of parameter servers, and workers whose tasks a test
//! does. Answers come at once, in order, unless a test holds them back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::activity::WaitingFor;
use crate::applied::AppliedSet;
use crate::evaluation::Evaluated;
use crate::id::{
    BatchId, CheckpointId, Generation, Incarnation, LeaseId, PartitionId, PsId, RunId, Term,
    WorkerId,
};
use crate::job::EventKind;
use crate::job::{
    CheckpointFile, Command, Config, Durable, Effect, End, Event, Fact, HeldLease, Job, Note,
    Refusal,
};
use crate::machine::Machine as _;
use crate::metric::{Measures, Metric};
use crate::model::ModelSpec;
use crate::optimizer::OptimizerSpec;
use crate::platform::{Ended, InstanceId, Order, Process, Report, Role};
use crate::route::Route;
use crate::server::{self, Client, Outcome, Request, Server};
use crate::servers::{PartitionState, ServerMember};
use crate::spec::JobSpec;
use crate::time::Time;
use crate::worker::{self, Pass, Shard, Task};

/// What a partition has applied, and how often it changed.
pub(super) type Parts = BTreeMap<u32, (AppliedSet, u64)>;

/// What a worker was sent; what becomes of it is up to the test.
#[derive(Default)]
pub(super) struct ScriptedWorker {
    pub incarnation: u64,
    pub pid: u32,
    pub generation: Option<Generation>,
    pub work: VecDeque<(LeaseId, Task)>,
    /// It is in the middle of the first batch of its work.
    pub is_computing: bool,
}

impl ScriptedWorker {
    fn held(&self) -> Vec<HeldLease> {
        let held = |(lease, task): &(LeaseId, Task)| match task {
            Task::Train { epoch, indices, .. } => Some(HeldLease {
                lease: *lease,
                generation: self.generation?,
                epoch: *epoch,
                indices: indices.clone().collect(),
            }),
            Task::Shard(_) => None,
        };
        self.work.iter().filter_map(held).collect()
    }

    /// Keeps only the batch that it computes.
    fn return_rest(&mut self) {
        self.work.truncate(usize::from(self.is_computing));
        if let Some((_, Task::Train { indices, .. })) = self.work.front_mut() {
            indices.end = indices.start + 1;
        }
    }
}

/// The machine of a parameter server, and what its owners hold.
#[derive(Default)]
pub(super) struct BenchServer {
    pub incarnation: u64,
    pub pid: u32,
    pub machine: Server,
    /// It has said so since it loaded.
    pub is_serving: bool,
    pub parts: Parts,
    n_pushes: u64,
}

pub(super) struct Bench {
    pub job: Job,
    pub now: Time,
    /// As the last `Persist` left it.
    pub disk: Durable,
    pub workers: BTreeMap<u32, ScriptedWorker>,
    pub servers: BTreeMap<u32, BenchServer>,
    pub folders: BTreeMap<String, Parts>,
    pub committed: BTreeSet<String>,
    pub notes: Vec<Note>,
    pub evaluated: Vec<Evaluated>,
    pub exported: Option<Parts>,
    pub orders: Vec<Order>,
    pub replies: Vec<Result<(), Refusal>>,
    pub ended: Option<End>,
    /// What each evaluation measures; the last one repeats.
    pub losses: Vec<f64>,
    pub n_shards_evaluated: u32,
    /// Checkpoints fail.
    pub disk_is_full: bool,
    pub unreadable: BTreeSet<String>,
    /// Effects that a test keeps to itself.
    pub holds_checkpoints: bool,
    pub holds_commits: bool,
    pub holds_exports: bool,
    /// Workers connect, but their model is never built.
    pub never_ready: bool,
    pub holds_loads: bool,
    pub holds_launches: bool,
    pub held_back: Vec<Effect>,
    /// What every heartbeat says that a worker has computed.
    pub progress: u64,
    next_process: u32,
}

pub(super) fn model() -> ModelSpec {
    ModelSpec {
        name: "counter".into(),
        params: Vec::new(),
        tables: Vec::new(),
        inputs: Vec::new(),
        metrics: vec![Metric::loss()],
        optimizer: OptimizerSpec::sgd(1.0),
    }
}

/// Ten batches of two records per epoch, on two servers with four partitions and two workers.
pub(super) fn spec() -> JobSpec {
    JobSpec {
        job_name: "bench".into(),
        minibatch_size: 2,
        num_minibatches_per_task: 2,
        shuffle: false,
        partitions: 4,
        num_ps_pods: 2,
        num_workers: 2,
        checkpoint_secs: 0,
        ..JobSpec::default()
    }
}

pub(super) fn config(spec: JobSpec, n_validation_records: u64) -> Config {
    let (run, term) = (RunId::default(), Term(1));
    Config {
        spec,
        run,
        term,
        n_records: 20,
        n_validation_records,
        n_prediction_records: 0,
        output: "output".into(),
        evaluated_version: 0,
    }
}

pub(super) fn worker(id: u32) -> InstanceId {
    InstanceId { role: Role::Worker, id }
}

pub(super) fn ps(id: u32) -> InstanceId {
    InstanceId { role: Role::Ps, id }
}

impl Bench {
    /// A job whose processes are all there.
    pub(super) fn started(config: Config) -> Self {
        let mut bench = Self::new(config, Durable::default());
        bench.handle(Event::Platform(Report::Running(Vec::new())));
        bench
    }

    pub(super) fn new(config: Config, disk: Durable) -> Self {
        Self {
            job: Job::new(config, disk.clone(), Time::ZERO),
            now: Time::ZERO,
            disk,
            workers: BTreeMap::new(),
            servers: BTreeMap::new(),
            folders: BTreeMap::new(),
            committed: BTreeSet::new(),
            notes: Vec::new(),
            evaluated: Vec::new(),
            exported: None,
            orders: Vec::new(),
            replies: Vec::new(),
            ended: None,
            losses: vec![1.0],
            n_shards_evaluated: 0,
            disk_is_full: false,
            unreadable: BTreeSet::new(),
            holds_checkpoints: false,
            holds_commits: false,
            holds_exports: false,
            never_ready: false,
            holds_loads: false,
            holds_launches: false,
            held_back: Vec::new(),
            progress: 0,
            next_process: 100,
        }
    }

    /// The master dies, and another one starts from what is durable.
    pub(super) fn restart_master(&mut self) {
        let mut config = self.job.config().clone();
        config.term = config.term.next();
        self.job = Job::new(config, self.disk.clone(), self.now);
        let running = |role: Role, id: u32, pid: u32| Process {
            instance: InstanceId { role, id },
            pid,
            age_ms: 0,
        };
        let servers = self.servers.iter().map(|(id, ps)| running(Role::Ps, *id, ps.pid));
        let workers = self.workers.iter().map(|(id, w)| running(Role::Worker, *id, w.pid));
        let running = servers.chain(workers).collect();
        self.handle(Event::Platform(Report::Running(running)));
    }

    /// One event and everything that follows from it.
    pub(super) fn handle(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let effects = self.job.handle(event, self.now);
            self.job.check_invariants();
            for effect in effects {
                assert!(self.ended.is_none(), "nothing comes after the end: {effect:?}");
                self.perform(effect, &mut events);
            }
        }
    }

    /// Writes facts to the disk.
    pub(super) fn persist(&mut self, facts: Vec<Fact>) {
        let stored = self.disk.changes(&Durable::default());
        let mut table = BTreeMap::new();
        for Fact { key, value } in stored.into_iter().chain(facts) {
            table.insert(key, value);
        }
        let facts = table.iter().filter_map(|(key, value)| Some((key.as_str(), value.as_ref()?)));
        let facts = facts.map(|(key, value)| (key, value.as_bytes()));
        self.disk = Durable::from_facts(facts).expect("facts that make sense");
    }

    fn perform(&mut self, effect: Effect, events: &mut VecDeque<Event>) {
        match effect {
            Effect::Persist(facts) => self.persist(facts),
            Effect::ToWorker(id, command) => events.extend(self.send_to_worker(id, command)),
            Effect::ToPs(id, order) => events.extend(self.send_to_ps(id, order)),
            Effect::CloseWorker(id, _) | Effect::RefuseWorker(id, _) => {
                if let Some(worker) = self.workers.get_mut(&id.0) {
                    worker.work.clear();
                }
            }
            Effect::ClosePs(_) | Effect::EvaluationStarted { .. } => {}
            Effect::Platform(order) => {
                self.orders.push(order.clone());
                events.extend(self.obey(&order));
            }
            Effect::PrepareCheckpoint { folder, .. } => {
                let is_new = self.folders.insert(folder, Parts::new()).is_none();
                assert!(is_new, "no folder is used twice");
            }
            commit @ Effect::Commit { .. } if self.holds_commits => self.held_back.push(commit),
            Effect::Commit { checkpoint, folder, files, .. } => {
                assert_eq!(files.len(), self.job.config().spec.partitions as usize);
                self.committed.insert(folder);
                events.push_back(Event::Committed { checkpoint });
            }
            Effect::Delete(folder) => {
                self.folders.remove(&folder);
                self.committed.remove(&folder);
            }
            export @ Effect::Export { .. } if self.holds_exports => self.held_back.push(export),
            Effect::Export { .. } if self.disk_is_full => {
                events.push_back(Event::ExportFailed { error: "full".into(), is_disk_full: true });
            }
            Effect::Export { checkpoint } => {
                assert!(self.committed.contains(&checkpoint), "only what is complete is exported");
                self.exported = self.folders.get(&checkpoint).cloned();
                events.push_back(Event::Exported);
            }
            Effect::JoinPredictions { .. } => events.push_back(Event::Exported),
            Effect::Evaluated(evaluated) => self.evaluated.push(evaluated),
            Effect::Note(note) => self.notes.push(note),
            Effect::Reply(result) => self.replies.push(result),
            Effect::Ended(end) => self.ended = Some(end),
        }
    }

    fn send_to_worker(&mut self, id: WorkerId, command: Command) -> Option<Event> {
        let is_sync = self.job.ledger().is_sync();
        let worker = self.workers.get_mut(&id.0)?;
        match command {
            Command::Welcome | Command::Ping => {}
            Command::Route(Route { generation, .. }) => {
                if worker.generation != Some(generation) {
                    worker.work.clear();
                }
                worker.generation = Some(generation);
            }
            Command::Lease { lease, task } => worker.work.push_back((lease, task)),
            Command::Revoke(lease) => worker.work.retain(|(held, _)| *held != lease),
            Command::World(_)
            | Command::Go { .. }
            | Command::Pause { .. }
            | Command::Checkpoint(_) => {
                panic!("the servers hold the parameters")
            }
            Command::Drain { .. } if is_sync => {}
            Command::Drain { .. } => {
                worker.return_rest();
                let kept = worker.held();
                let kept = kept.iter().flat_map(|lease| {
                    lease.indices.iter().map(|index| BatchId { epoch: lease.epoch, index: *index })
                });
                let report = worker::Report::Returned { kept: kept.collect() };
                let incarnation = Incarnation(worker.incarnation);
                return Some(Event::FromWorker { worker: id, incarnation, report });
            }
            Command::Stop(_) => {
                self.workers.remove(&id.0);
            }
        }
        None
    }

    fn send_to_ps(&mut self, id: PsId, order: server::Order) -> Vec<Event> {
        if matches!(order, server::Order::Load(_)) && self.holds_loads
            || matches!(order, server::Order::Checkpoint { .. }) && self.holds_checkpoints
        {
            self.held_back.push(Effect::ToPs(id, order));
            return Vec::new();
        }
        self.obey_as_ps(id, order)
    }

    /// What a server does with an order, at once.
    pub(super) fn obey_as_ps(&mut self, id: PsId, order: server::Order) -> Vec<Event> {
        let reports = self.handle_as_ps(id, server::Event::Order(order)).into_iter();
        let report = |effect| {
            if let server::Effect::Report(report) = effect {
                Some(from_ps(id, report))
            } else {
                None
            }
        };
        reports.filter_map(report).collect()
    }

    /// Lets a server handle an event and all that follows from it; what its clients and its master
    /// see of that.
    fn handle_as_ps(&mut self, id: PsId, event: server::Event) -> Vec<server::Effect> {
        let (mut events, mut seen) = (VecDeque::from([event]), Vec::new());
        while let Some(event) = events.pop_front() {
            let Some(server) = self.servers.get_mut(&id.0) else { return seen };
            let effects = server.machine.handle(event, self.now);
            server.machine.check_invariants();
            for effect in effects {
                events.extend(self.perform_as_ps(id, effect.clone()));
                seen.push(effect);
            }
        }
        seen
    }

    fn perform_as_ps(&mut self, id: PsId, effect: server::Effect) -> Vec<server::Event> {
        let server = self.servers.get_mut(&id.0).expect("it acts");
        match effect {
            server::Effect::Drop(_) => {
                (server.is_serving, server.parts) = (false, Parts::new());
            }
            server::Effect::Load(load) => return vec![self.load(id, &load)],
            server::Effect::Copy { checkpoint, .. } => {
                let copied = |(partition, (_, updates)): (&u32, &(AppliedSet, u64))| {
                    let partition = PartitionId(*partition);
                    server::Event::Copied { checkpoint, partition, updates: *updates }
                };
                return server.parts.iter().map(copied).collect();
            }
            server::Effect::Write { checkpoint, folder, partition } => {
                return vec![self.write(id, checkpoint, &folder, partition.0)];
            }
            server::Effect::Inspect(inspection, generation) => {
                let states = states(&server.parts);
                return vec![server::Event::Inspected { inspection, generation, states }];
            }
            server::Effect::Note(server::Note::Serving(_)) => server.is_serving = true,
            server::Effect::Apply(_)
            | server::Effect::Answer(_)
            | server::Effect::Acknowledge(_)
            | server::Effect::Refuse(..)
            | server::Effect::Hello { .. }
            | server::Effect::Report(_)
            | server::Effect::Note(_) => {}
        }
        Vec::new()
    }

    fn load(&mut self, id: PsId, load: &server::Load) -> server::Event {
        let (generation, hosted) = (load.generation, load.partitions.clone());
        let first = (AppliedSet::new(load.n_batches), 0);
        let parts = match &load.from.checkpoint {
            Some(folder) if self.unreadable.contains(folder) => {
                return server::Event::LoadFailed { generation, error: "checksum".into() };
            }
            Some(folder) => self.folders[folder].clone(),
            None => hosted.clone().map(|p| (p, first.clone())).collect(),
        };
        let server = self.servers.get_mut(&id.0).expect("it acts");
        server.parts = parts.into_iter().filter(|(p, _)| hosted.contains(p)).collect();
        let progress = server.parts.values().map(progress).collect();
        server::Event::Loaded { generation, progress, states: states(&server.parts) }
    }

    fn write(
        &mut self,
        id: PsId,
        checkpoint: CheckpointId,
        folder: &str,
        partition: u32,
    ) -> server::Event {
        let part = self.servers[&id.0].parts[&partition].clone();
        let Some(parts) = self.folders.get_mut(folder).filter(|_| !self.disk_is_full) else {
            let error = "no space left on device".into();
            return server::Event::WriteFailed { checkpoint, error };
        };
        let file = CheckpointFile {
            partition,
            name: format!("partition-{partition:05}.edlp"),
            bytes: 1,
            checksum: String::new(),
            updates: part.1,
        };
        parts.insert(partition, part);
        server::Event::Written { checkpoint, file }
    }

    fn obey(&mut self, order: &Order) -> Vec<Event> {
        match order {
            Order::Launch { .. } if self.holds_launches => Vec::new(),
            Order::Launch { instance, .. } => self.launch(*instance),
            Order::Chaos { .. } => Vec::new(),
            Order::Stop { instance, grace_ms: 0 } => self.kill(*instance, Ended::Signal(9)),
            Order::Stop { instance, .. } | Order::Dismiss { instance, .. } => {
                let mut events = Vec::new();
                if let (Role::Worker, Some(worker)) =
                    (instance.role, self.workers.get(&instance.id))
                {
                    let incarnation = Incarnation(worker.incarnation);
                    let worker = WorkerId(instance.id);
                    let report = worker::Report::Leaving;
                    events.push(Event::FromWorker { worker, incarnation, report });
                }
                events.extend(self.kill(*instance, Ended::CLEAN));
                events
            }
        }
    }

    /// Starts a process; it connects at once.
    pub(super) fn launch(&mut self, instance: InstanceId) -> Vec<Event> {
        self.next_process += 1;
        let (pid, incarnation) = (self.next_process, u64::from(self.next_process));
        match instance.role {
            Role::Worker => {
                let fresh = ScriptedWorker { incarnation, pid, ..ScriptedWorker::default() };
                self.workers.insert(instance.id, fresh);
            }
            Role::Ps => {
                let fresh = BenchServer { incarnation, pid, ..BenchServer::default() };
                self.servers.insert(instance.id, fresh);
            }
            Role::Master => {}
        }
        let mut events = vec![Event::Platform(Report::Started { instance, pid })];
        events.extend(self.hello(instance));
        events
    }

    /// What a process says when it connects.
    pub(super) fn hello(&self, instance: InstanceId) -> Vec<Event> {
        match instance.role {
            Role::Worker => {
                let known = &self.workers[&instance.id];
                let (worker, incarnation) = (WorkerId(instance.id), Incarnation(known.incarnation));
                let held = known.held();
                let (model, capacity, pid) = (Box::new(model()), 2, known.pid);
                let report = worker::Report::Ready { model, capacity, held, peer: None };
                let connected = Event::WorkerConnected { worker, incarnation, pid };
                let ready = Event::FromWorker { worker, incarnation, report };
                [Some(connected), (!self.never_ready).then_some(ready)]
                    .into_iter()
                    .flatten()
                    .collect()
            }
            Role::Ps => {
                let known = &self.servers[&instance.id];
                let member = ServerMember {
                    incarnation: Incarnation(known.incarnation),
                    address: String::new(),
                    unix_path: String::new(),
                    generation: known.machine.generation(),
                    sets: states(&known.parts),
                };
                let (ps, pid, member) = (PsId(instance.id), known.pid, Box::new(member));
                vec![Event::PsConnected { ps, pid, member }]
            }
            Role::Master => Vec::new(),
        }
    }

    /// A process connects (again).
    pub(super) fn connect(&mut self, instance: InstanceId) {
        self.hello(instance).into_iter().for_each(|event| self.handle(event));
    }

    /// All processes connect to a new master, servers first.
    pub(super) fn connect_all(&mut self) {
        let servers: Vec<u32> = self.servers.keys().copied().collect();
        servers.into_iter().for_each(|id| self.connect(ps(id)));
        let workers: Vec<u32> = self.workers.keys().copied().collect();
        workers.into_iter().for_each(|id| self.connect(worker(id)));
    }

    /// A process ends; the platform's word for it.
    pub(super) fn kill(&mut self, instance: InstanceId, how: Ended) -> Vec<Event> {
        let pid = match instance.role {
            Role::Worker => self.workers.remove(&instance.id).map(|worker| worker.pid),
            Role::Ps => self.servers.remove(&instance.id).map(|ps| ps.pid),
            Role::Master => None,
        };
        let report = |pid| Event::Platform(Report::Ended { instance, pid, how });
        pid.map(report).into_iter().collect()
    }

    pub(super) fn kill_now(&mut self, instance: InstanceId, how: Ended) {
        self.kill(instance, how).into_iter().for_each(|event| self.handle(event));
    }

    /// Lets time pass. All processes send signs of life, except for `silent`.
    pub(super) fn pass(&mut self, time: Duration, silent: Option<InstanceId>) {
        let step = Duration::from_millis(100);
        let end = self.now + time;
        while self.now < end && self.ended.is_none() {
            self.now = self.now + step;
            self.heartbeats(silent);
            self.handle(Event::Tick);
        }
    }

    pub(super) fn heartbeats(&mut self, silent: Option<InstanceId>) {
        let workers: Vec<(u32, u64)> =
            self.workers.iter().map(|(id, worker)| (*id, worker.incarnation)).collect();
        for (id, incarnation) in workers {
            if silent != Some(worker(id)) {
                let (worker, incarnation) = (WorkerId(id), Incarnation(incarnation));
                let (waiting_for, progress) = (WaitingFor::Nothing, self.progress);
                let report = worker::Report::Heartbeat { waiting_for, progress };
                self.handle(Event::FromWorker { worker, incarnation, report });
            }
        }
        let servers: Vec<(u32, u64)> =
            self.servers.iter().map(|(id, ps)| (*id, ps.incarnation)).collect();
        for (id, incarnation) in servers {
            if silent != Some(ps(id)) {
                let (ps, incarnation) = (PsId(id), Incarnation(incarnation));
                let report = server::Report::Heartbeat;
                self.handle(Event::FromPs { ps, incarnation, report });
            }
        }
    }

    /// A worker takes up the next piece of its work; false if it has none.
    pub(super) fn step(&mut self, id: u32) -> bool {
        let Some(next) = self.next_work(id) else { return false };
        match next {
            (lease, Task::Train { epoch, indices, skipped }) => {
                let batch = BatchId { epoch, index: indices.start };
                self.push_everywhere(batch);
                let left = indices.start + 1..indices.end;
                if !left.is_empty() {
                    let worker = self.workers.get_mut(&id).unwrap();
                    let work = Task::Train { epoch, indices: left, skipped };
                    worker.work.push_front((lease, work));
                }
                self.report(id, batch);
            }
            (_, Task::Shard(Shard { number: shard, pass: Pass::Evaluate { eval, .. }, .. })) => {
                let loss = self.losses[self.evaluated.len().min(self.losses.len() - 1)];
                let mut measures = Measures::new(&[Metric::loss()]);
                measures.add_loss(loss, 2);
                let measures = Box::new(measures);
                self.n_shards_evaluated += 1;
                let done = worker::Report::EvalDone { eval, shard, measures };
                self.handle(from_worker(id, done));
            }
            (_, Task::Shard(Shard { number: shard, pass: Pass::Predict { .. }, .. })) => {
                self.handle(from_worker(id, worker::Report::PredictDone { shard }));
            }
        }
        true
    }

    pub(super) fn next_work(&mut self, id: u32) -> Option<(LeaseId, Task)> {
        self.workers.get_mut(&id)?.work.pop_front()
    }

    pub(super) fn push_everywhere(&mut self, batch: BatchId) {
        (0..self.job.config().spec.num_ps_pods).for_each(|ps| self.push(ps, batch));
    }

    /// Pushes one batch to one server, which applies it unless it has.
    pub(super) fn push(&mut self, ps: u32, batch: BatchId) {
        let server = self.servers.get_mut(&ps).expect("it runs");
        assert!(server.is_serving, "workers know the route of servers that serve");
        server.n_pushes += 1;
        let (request, generation) = (Request(server.n_pushes), server.machine.generation());
        let (Some((first, _)), Some((last, _))) =
            (server.parts.first_key_value(), server.parts.last_key_value())
        else {
            return;
        };
        let partitions = *first..last + 1;
        let mut parts = Vec::new();
        for (partition, part) in &mut server.parts {
            let is_new = part.0.insert(batch);
            part.1 += u64::from(is_new);
            let outcome = if is_new { Outcome::Applied } else { Outcome::Already };
            let partition = PartitionId(*partition);
            parts.push(server::Part { partition, outcome, progress: progress(part) });
        }
        let client = Client([0; 16]);
        let push = server::Push { request, client, generation, batch, partitions, base_version: 0 };
        let taken = self.handle_as_ps(PsId(ps), server::Event::Push(push));
        assert!(taken.contains(&server::Effect::Apply(request)), "{taken:?}");
        let pushed = server::Event::Pushed { generation, request, parts };
        let done = self.handle_as_ps(PsId(ps), pushed);
        assert!(done.contains(&server::Effect::Acknowledge(request)), "{done:?}");
    }

    pub(super) fn report(&mut self, worker: u32, batch: BatchId) {
        let generation = self.job.servers().generation();
        self.handle(batch_done(worker, batch, generation, 0.5));
    }

    /// All processes work until the job is over or `until` is true.
    pub(super) fn run_until(&mut self, until: impl Fn(&Self) -> bool) {
        for _ in 0..3000 {
            if self.ended.is_some() || until(self) {
                return;
            }
            let ids: Vec<u32> = self.workers.keys().copied().collect();
            let mut is_busy = false;
            for id in ids {
                if !until(self) {
                    is_busy |= self.step(id);
                }
            }
            if !is_busy {
                self.pass(Duration::from_millis(100), None);
            }
        }
        panic!("the job stands still in state {}: {:?}", self.job.state(), self.notes.last());
    }

    pub(super) fn run(&mut self) {
        self.run_until(|_| false);
    }

    pub(super) fn run_to(&mut self, n_done: u64) {
        self.run_until(|bench| bench.job.ledger().n_done() >= n_done);
    }

    /// The exported model has applied each batch of `n_epochs` once, in every partition.
    pub(super) fn expect_trained(&self, n_epochs: u32) {
        assert_eq!(self.ended, Some(End::Succeeded), "{:#?}", self.notes);
        let exported = self.exported.as_ref().expect("a model was exported");
        assert_eq!(exported.len(), self.job.config().spec.partitions as usize);
        for (applied, updates) in exported.values() {
            assert_eq!(*updates, applied.len(), "no batch was applied twice");
            assert_eq!((applied.epoch(), applied.n_in_epoch(n_epochs)), (n_epochs, 0));
        }
    }

    pub(super) fn has_note(&self, kind: EventKind) -> bool {
        self.notes.iter().any(|note| note.kind == kind)
    }

    pub(super) fn failure(&self) -> &str {
        match &self.ended {
            Some(End::Failed(why)) => why,
            other => panic!("the job should have failed, but: {other:?}"),
        }
    }
}

/// A report that counts from any process of the worker.
pub(super) fn from_worker(worker: u32, report: worker::Report) -> Event {
    Event::FromWorker { worker: WorkerId(worker), incarnation: Incarnation(0), report }
}

pub(super) fn batch_done(worker: u32, batch: BatchId, generation: Generation, loss: f32) -> Event {
    from_worker(worker, worker::Report::BatchDone { batch, generation, loss })
}

/// A report that counts from any process of the server.
fn from_ps(ps: PsId, report: server::Report) -> Event {
    Event::FromPs { ps, incarnation: Incarnation(0), report }
}

fn progress((_, updates): &(AppliedSet, u64)) -> server::Progress {
    server::Progress { version: *updates, round: *updates, n_rows: 0 }
}

fn states(parts: &Parts) -> Vec<PartitionState> {
    let state = |(partition, (applied, updates)): (&u32, &(AppliedSet, u64))| PartitionState {
        partition: PartitionId(*partition),
        applied: applied.clone(),
        updates: *updates,
        n_rows: 0,
    };
    parts.iter().map(state).collect()
}

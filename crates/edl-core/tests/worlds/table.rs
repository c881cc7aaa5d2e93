// SPDX-License-Identifier: Apache-2.0
//! The machine on a table: a test plays all workers by hand, and sees what each is told.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use edl_core::id::{Incarnation, PsId, Term, WorkerId, WorldId};
use edl_core::job::{
    Command, Config, CutFile, Durable, Effect, End, Event, Holder, Job, LoadFrom, News, Note, Peer,
    PsOrder, Work,
};
use edl_core::metric::{Measures, Metric};
use edl_core::model::ModelSpec;
use edl_core::optimizer::OptimizerSpec;
use edl_core::platform::{InstanceId, Order, Report, Role};
use edl_core::spec::{JobSpec, Strategy};
use edl_core::time::Time;
use edl_core::world::World;

pub(crate) struct Table {
    pub(crate) job: Job,
    pub(crate) now: Time,
    /// As the last `Persist` left it.
    pub(crate) disk: Durable,
    pub(crate) told: BTreeMap<u32, Vec<Command>>,
    pub(crate) told_ps: BTreeMap<u32, Vec<PsOrder>>,
    pub(crate) notes: Vec<Note>,
    pub(crate) orders: Vec<Order>,
    pub(crate) closed: Vec<(u32, String)>,
    pub(crate) exported: Option<String>,
    pub(crate) ended: Option<End>,
    /// Incarnations of those who are connected.
    there: BTreeMap<u32, u64>,
    /// Incarnations of the servers, under Hybrid.
    pub(crate) servers: BTreeMap<u32, u64>,
    next_incarnation: u64,
    /// The world before the current one.
    before: Option<WorldId>,
    /// What a worker that is played by the table computes; another one is a lie.
    pub(crate) probe: u64,
}

/// What one worker was told of a world.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    pub(crate) world: World,
    pub(crate) until: u64,
    pub(crate) load: Option<LoadFrom>,
}

impl Told {
    pub(crate) fn members(&self) -> Vec<u32> {
        self.world.members.iter().map(|member| member.worker.0).collect()
    }

    pub(crate) fn has_state(&self, worker: u32) -> bool {
        self.world.members.iter().any(|m| m.worker.0 == worker && m.has_state)
    }
}

/// Four lanes of two records; twenty steps per epoch; checkpoints only when a test wants them.
pub(crate) fn spec() -> JobSpec {
    JobSpec {
        job_name: "table".into(),
        distribution_strategy: Strategy::Allreduce,
        num_ps_pods: 0,
        lanes: Some(4),
        num_workers: 2,
        minibatch_size: 2,
        num_minibatches_per_task: 1,
        partitions: 4,
        checkpoint_secs: 0,
        evaluation_epochs: false,
        task_timeout_secs: 20,
        heartbeat_timeout_secs: 2.0,
        ..JobSpec::default()
    }
}

fn model() -> ModelSpec {
    ModelSpec {
        name: "digest".into(),
        params: Vec::new(),
        tables: Vec::new(),
        inputs: Vec::new(),
        metrics: vec![Metric::loss()],
        optimizer: OptimizerSpec::sgd(1.0),
    }
}

impl Table {
    pub(crate) fn new(spec: JobSpec, n_validation_records: u64) -> Self {
        Self::with(spec, 160, n_validation_records)
    }

    pub(crate) fn with(spec: JobSpec, n_records: u64, n_validation_records: u64) -> Self {
        let config = Config {
            spec,
            term: Term(1),
            n_records,
            n_validation_records,
            n_prediction_records: 0,
        };
        Self {
            job: Job::new(config, Durable::default(), Time::ZERO),
            now: Time::ZERO,
            disk: Durable::default(),
            told: BTreeMap::new(),
            told_ps: BTreeMap::new(),
            notes: Vec::new(),
            orders: Vec::new(),
            closed: Vec::new(),
            exported: None,
            ended: None,
            there: BTreeMap::new(),
            servers: BTreeMap::new(),
            next_incarnation: 1,
            before: None,
            probe: 7,
        }
    }

    /// The master dies, and another one starts from what is durable. Nobody is connected to it.
    pub(crate) fn restart_master(&mut self) {
        let mut config = self.job.config().clone();
        config.term = config.term.next();
        self.job = Job::new(config, self.disk.clone(), self.now);
        self.told.clear();
        self.told_ps.clear();
        let running = self.there.iter();
        let running = running.map(|(id, incarnation)| (instance(*id), pid(*incarnation))).collect();
        self.handle(Event::Platform(Report::Running(running)));
    }

    /// One event, and the answers to effects that always succeed.
    pub(crate) fn handle(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let before = self.current_id();
            let effects = self.job.handle(event, self.now);
            self.job.check_invariants();
            if self.current_id() != before {
                self.before = before;
            }
            for effect in effects {
                events.extend(self.perform(effect));
            }
        }
    }

    /// One event whose effects are lost: the master dies before it performs any after `n`.
    pub(crate) fn handle_and_die(&mut self, event: Event, n: usize) {
        let effects = self.job.handle(event, self.now);
        for effect in effects.into_iter().take(n) {
            self.perform(effect);
        }
        self.restart_master();
    }

    fn perform(&mut self, effect: Effect) -> Option<Event> {
        match effect {
            Effect::Persist => self.disk = self.job.durable().clone(),
            Effect::ToWorker(worker, command) => {
                self.told.entry(worker.0).or_default().push(command);
            }
            Effect::CloseWorker(worker, why) | Effect::RefuseWorker(worker, why) => {
                self.closed.push((worker.0, why));
            }
            Effect::Platform(order) => self.orders.push(order),
            Effect::Commit { cut, .. } => return Some(Event::Committed { cut }),
            Effect::Export { checkpoint } => {
                self.exported = Some(checkpoint);
                return Some(Event::Exported);
            }
            Effect::Note(note) => self.notes.push(note),
            Effect::Ended(end) => self.ended = Some(end),
            Effect::PrepareCut { .. }
            | Effect::Delete(_)
            | Effect::EvaluationStarted { .. }
            | Effect::Evaluated(_)
            | Effect::Reply(_) => {}
            Effect::ToPs(ps, order) => self.told_ps.entry(ps.0).or_default().push(order),
            Effect::ClosePs(_) | Effect::JoinPredictions { .. } => {
                panic!("no server is silent, and there are no predictions")
            }
        }
        None
    }

    fn incarnation(&self, id: u32) -> Incarnation {
        Incarnation(self.there[&id])
    }

    /// A new process connects and is ready.
    pub(crate) fn join(&mut self, id: u32) {
        self.there.insert(id, self.next_incarnation);
        self.next_incarnation += 1;
        self.connect(id, None);
    }

    /// A process connects (again), holding the state after `step`.
    pub(crate) fn connect(&mut self, id: u32, step: Option<u64>) {
        let (worker, incarnation) = (WorkerId(id), self.incarnation(id));
        self.handle(Event::WorkerConnected { worker, incarnation, pid: pid(incarnation.0) });
        let (address, unix_path, probe) = (String::new(), String::new(), self.probe);
        let peer = Some(Box::new(Peer { address, unix_path, probe, step }));
        let (model, held) = (Box::new(model()), Vec::new());
        self.handle(Event::WorkerReady { worker, incarnation, model, capacity: 1, held, peer });
    }

    /// Workers are there and train together from the job's start.
    pub(crate) fn start(&mut self, ids: &[u32]) {
        let running = (1..).zip(ids).map(|(pid, id)| (instance(*id), pid)).collect();
        self.handle(Event::Platform(Report::Running(running)));
        ids.iter().for_each(|id| self.join(*id));
        if self.current_id().is_none() {
            self.pass(Duration::from_millis(1100)); // More are wanted, and waited for.
        }
        self.form_all(0);
        assert_eq!(self.current().members.len(), ids.len());
    }

    /// The stream of a worker breaks.
    pub(crate) fn lose_stream(&mut self, id: u32) {
        let (worker, incarnation) = (WorkerId(id), self.incarnation(id));
        self.handle(Event::WorkerGone { worker, incarnation });
    }

    /// A worker dies: its stream breaks.
    pub(crate) fn die(&mut self, id: u32) {
        self.lose_stream(id);
        self.there.remove(&id);
    }

    pub(crate) fn leave(&mut self, id: u32) {
        let (worker, incarnation) = (WorkerId(id), self.incarnation(id));
        self.handle(Event::WorkerLeaving { worker, incarnation });
    }

    pub(crate) fn news(&mut self, id: u32, news: News) {
        let (worker, incarnation) = (WorkerId(id), self.incarnation(id));
        self.handle(Event::Member { worker, incarnation, news });
    }

    pub(crate) fn formed(&mut self, id: u32, world: WorldId, step: u64) {
        self.news(id, News::Formed { world, step, pause_secs: 0.0, state_bytes: 0 });
    }

    /// Every member of the current world says that it begins with `step`.
    pub(crate) fn form_all(&mut self, step: u64) {
        let world = self.current();
        for member in &world.members {
            self.formed(member.worker.0, world.id, step);
        }
    }

    pub(crate) fn stepped(&mut self, id: u32, world: WorldId, step: u64) {
        self.news(id, News::Stepped { world, step, hash: step, loss: 0.5 });
    }

    /// All members of the current world come to `step`.
    pub(crate) fn train_to(&mut self, step: u64) {
        let world = self.current();
        for step in self.n_done() + 1..=step {
            for member in &world.members {
                self.stepped(member.worker.0, world.id, step);
            }
        }
        assert_eq!(self.n_done(), step, "so many steps were allowed");
    }

    /// Members of the world before the planned one come to `step`.
    pub(crate) fn train_before(&mut self, ids: &[u32], step: u64) {
        let before = self.before.expect("a change is planned");
        for step in self.n_done() + 1..=step {
            ids.iter().for_each(|id| self.stepped(*id, before, step));
        }
        assert_eq!(self.n_done(), step, "so many steps were allowed");
    }

    pub(crate) fn lost(&mut self, id: u32, world: WorldId, suspect: u32) {
        let (suspect, error) = (WorkerId(suspect), "silent".into());
        self.news(id, News::PeerLost { world, suspect, error });
    }

    /// The worker writes all files that the last order for a cut names.
    pub(crate) fn write_cut(&mut self, id: u32) {
        let orders = self.told[&id].iter().rev();
        let order = orders.clone().find_map(|command| match command {
            Command::Cut { cut, generation, at, partitions, .. } => {
                Some((*cut, *generation, *at, partitions.clone()))
            }
            _ => None,
        });
        let (cut, generation, at, partitions) = order.expect("a cut was ordered");
        let file = |partition| cut_file(partition, at);
        let (holder, files) = (Holder::Worker(WorkerId(id)), partitions.map(file).collect());
        self.handle(Event::CutDone { holder, cut, generation, files });
    }

    /// The steps at which a worker was ordered to cut.
    pub(crate) fn cuts(&self, id: u32) -> Vec<u64> {
        let at = |command: &Command| match command {
            Command::Cut { at, .. } => Some(*at),
            _ => None,
        };
        self.told.get(&id).into_iter().flatten().filter_map(at).collect()
    }

    /// Measures every shard that was lent to a worker and not measured yet.
    pub(crate) fn evaluate(&mut self, id: u32) -> usize {
        let mut lent = Vec::new();
        self.told.entry(id).or_default().retain(|command| match command {
            Command::Lease { work: Work::Eval { eval, shard, .. }, .. } => {
                lent.push((*eval, *shard));
                false
            }
            _ => true,
        });
        let n_lent = lent.len();
        for (eval, shard) in lent {
            let mut measures = Measures::new(&[Metric::loss()]);
            measures.add_loss(0.5, 1);
            let (worker, generation) = (WorkerId(id), self.job.durable().generation);
            let measures = Box::new(measures);
            self.handle(Event::EvalDone { worker, eval, shard, generation, measures });
        }
        n_lent
    }

    /// Lets time pass; everybody who is connected gives signs of life.
    pub(crate) fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now = self.now + Duration::from_millis(100);
            for (id, incarnation) in self.there.clone() {
                let (worker, incarnation) = (WorkerId(id), Incarnation(incarnation));
                let waiting_for = "master".into();
                self.handle(Event::WorkerHeard { worker, incarnation, waiting_for });
            }
            for (ps, incarnation) in self.servers.clone() {
                let (ps, incarnation) = (PsId(ps), Incarnation(incarnation));
                self.handle(Event::PsHeard { ps, incarnation });
            }
            self.handle(Event::Tick);
        }
    }

    /// The last world that a worker was told of.
    pub(crate) fn told_world(&self, id: u32) -> Told {
        let world = |command: &Command| match command {
            Command::World { world, until, load, .. } => {
                Some(Told { world: world.clone(), until: *until, load: load.clone() })
            }
            _ => None,
        };
        let last = self.told.get(&id).into_iter().flatten().rev().find_map(world);
        last.unwrap_or_else(|| panic!("worker-{id} was told of no world"))
    }

    fn current_id(&self) -> Option<WorldId> {
        self.job.worlds().and_then(|worlds| worlds.current()).map(|world| world.id)
    }

    pub(crate) fn current(&self) -> World {
        let worlds = self.job.worlds().expect("this is AllReduce");
        worlds.current().expect("somebody trains").clone()
    }

    /// The step that everybody may train to.
    pub(crate) fn until(&self) -> u64 {
        self.job.worlds().expect("this is AllReduce").until()
    }

    pub(crate) fn n_done(&self) -> u64 {
        self.job.ledger().n_done()
    }

    pub(crate) fn has_note(&self, kind: &str) -> bool {
        self.notes.iter().any(|note| note.kind == kind)
    }
}

pub(crate) fn instance(id: u32) -> InstanceId {
    InstanceId { role: Role::Worker, id }
}

/// A file of a cut, as small as can be.
pub(crate) fn cut_file(partition: u32, updates: u64) -> CutFile {
    CutFile { partition, name: String::new(), bytes: 1, checksum: String::new(), updates }
}

fn pid(incarnation: u64) -> u32 {
    u32::try_from(incarnation).expect("a process number")
}

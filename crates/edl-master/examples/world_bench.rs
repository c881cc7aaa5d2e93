// SPDX-License-Identifier: Apache-2.0
//! What a master does for the members of an AllReduce job: processor time per step, and bytes per
//! change of the world. The job and its members are the real machines, messages pass through the
//! real encoders, and time is simulated:
//! `cargo run --release -p edl-master --example world_bench`.
#![expect(clippy::wildcard_enum_match_arm, reason = "only some effects and activities count")]

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Write};
use std::time::Duration;

use edl_core::activity::WaitingFor;
use edl_core::goodput::TimeReport;
use edl_core::id::{Incarnation, RunId, Term, WorkerId};
use edl_core::job::{Config, Durable, Effect, Event, Fact, Job, Peer};
use edl_core::machine::Machine;
use edl_core::member::{self, Activity, Failure, Member, Outcome, Transferred};
use edl_core::model::ModelSpec;
use edl_core::optimizer::OptimizerSpec;
use edl_core::platform::{self, Ended, InstanceId, Process};
use edl_core::spec::{JobSpec, Strategy};
use edl_core::time::Time;
use edl_core::worker::{Limits, Report};
use edl_net::convert;
use edl_net::convert::worlds::{ReceivedWorlds, SentWorlds};
use edl_net::proto::{WorkerCommand, WorkerMessage, worker_command};
use prost::Message as _;

const STEP: Duration = Duration::from_millis(100);
const N_STEPS: u32 = 50;
const N_STATUSES: u32 = 10;

fn main() -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "AllReduce, {STEP:?} per step; processor time and bytes of the master")?;
    for n_members in [10, 100, 1_000] {
        let mut fleet = Fleet::new(n_members);
        let first = fleet.cost_of(|fleet| (0..n_members).for_each(|id| fleet.launch(id)));
        let training = fleet.cost_of(|fleet| fleet.train(N_STEPS));
        let lost = fleet.cost_of(|fleet| fleet.kill(n_members / 2));
        let joined = fleet.cost_of(|fleet| fleet.launch(n_members));
        let (status_bytes, status) = fleet.status();
        let restarted = fleet.cost_of(Fleet::restart);
        writeln!(out, "{n_members} members:")?;
        writeln!(
            out,
            "  step              {:>10.3} ms, {:.1} messages from a member per second",
            millis(training.cpu / N_STEPS),
            rate(training.n_reports, STEP * N_STEPS * n_members)
        )?;
        for (what, cost) in [
            ("first world", first),
            ("member lost", lost),
            ("member joined", joined),
            ("master restarted", restarted),
        ] {
            writeln!(
                out,
                "  {what:17} {:>10.3} ms, {} bytes of worlds ({} per member), {} bytes stored in \
                 {} writes",
                millis(cost.cpu),
                cost.world_bytes,
                cost.world_bytes / u64::from(n_members),
                cost.stored_bytes,
                cost.n_writes
            )?;
        }
        let time = millis(status / N_STATUSES);
        writeln!(out, "  status            {time:>10.3} ms, {status_bytes} bytes")?;
    }
    Ok(())
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[expect(clippy::cast_precision_loss, reason = "a number for people")]
fn rate(n: u64, time: Duration) -> f64 {
    n as f64 / time.as_secs_f64()
}

/// Processor time of this process so far.
fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).expect("it has run for a while")
}

/// What a master has done.
#[derive(Clone, Copy, Default)]
struct Cost {
    cpu: Duration,
    n_reports: u64,
    world_bytes: u64,
    stored_bytes: u64,
    n_writes: u64,
}

/// A master and the members of its job.
struct Fleet {
    job: Job,
    now: Time,
    heartbeat_at: Time,
    members: BTreeMap<WorkerId, Simulated>,
    /// Messages on their way to the master.
    reports: VecDeque<(WorkerId, Vec<u8>)>,
    sent: SentWorlds,
    cost: Cost,
}

/// A member, and the activity in which it waits for the others.
struct Simulated {
    machine: Member,
    incarnation: Incarnation,
    waits: Option<Activity>,
    worlds: ReceivedWorlds,
}

impl Fleet {
    fn new(n_members: u32) -> Self {
        let now = Time::ZERO;
        let mut fleet = Self {
            job: Job::new(config(n_members), Durable::default(), now),
            now,
            heartbeat_at: now,
            members: BTreeMap::new(),
            reports: VecDeque::new(),
            sent: SentWorlds::default(),
            cost: Cost::default(),
        };
        fleet.running((0..n_members).map(WorkerId), 0);
        fleet
    }

    /// The platform reports the processes that run.
    fn running(&mut self, workers: impl Iterator<Item = WorkerId>, age_ms: u64) {
        let process = |worker: WorkerId| {
            let instance = InstanceId::from(worker);
            Process { instance, pid: worker.0 + 1, age_ms }
        };
        let running = workers.map(process).collect();
        self.master(|| Event::Platform(platform::Report::Running(running)));
    }

    /// What the master does until all members train in one world.
    fn cost_of(&mut self, work: impl FnOnce(&mut Self)) -> Cost {
        self.cost = Cost::default();
        work(self);
        self.settle();
        while !self.job.worlds().is_some_and(|worlds| worlds.is_settled()) {
            self.advance();
        }
        self.cost
    }

    /// A worker connects and is ready.
    fn launch(&mut self, id: u32) {
        let (worker, limits) = (WorkerId(id), Limits::default());
        let incarnation = Incarnation(0x9e37_79b9_7f4a_7c15 ^ u64::from(id));
        let config = self.job.config();
        let identity = (worker, incarnation);
        let config = member::Config::new(&config.spec, config.n_records, identity, limits);
        let machine = Member::new(config, self.now);
        let worlds = ReceivedWorlds::default();
        let member = Simulated { machine, incarnation, waits: None, worlds };
        self.members.insert(worker, member);
        self.connect(worker);
        let peer = Peer {
            address: format!("10.0.{}.{}:{}", id / 256, id % 256, 40_000 + id % 1_000),
            unix_path: format!("/tmp/elasticdl-1000/bench/worker-{id}.sock"),
            probe: 7,
            step: None,
        };
        let (model, peer) = (Box::new(model()), Box::new(peer));
        self.member(worker, member::Event::Built { model, peer });
        self.settle();
    }

    fn connect(&mut self, worker: WorkerId) {
        let incarnation = self.members[&worker].incarnation;
        self.master(|| Event::WorkerConnected { worker, incarnation, pid: worker.0 + 1 });
    }

    /// The others notice that a member is gone, and so does the platform.
    fn kill(&mut self, id: u32) {
        let worker = WorkerId(id);
        let incarnation = self.members.remove(&worker).expect("a member").incarnation;
        let others: Vec<WorkerId> = self.members.keys().copied().collect();
        for other in others {
            let known = self.members.get_mut(&other);
            if known.and_then(|member| member.waits.take()).is_some() {
                let failure = Failure::Lost { peer: worker, error: "broken link".into() };
                self.member(other, member::Event::Ended(Err(failure)));
            }
        }
        self.master(|| Event::WorkerGone { worker, incarnation });
        let how = Ended::Signal(9);
        let ended = platform::Report::Ended { instance: worker.into(), pid: id + 1, how };
        self.master(|| Event::Platform(ended));
    }

    /// The next master finds what is on disk, and all members connect to it.
    fn restart(&mut self) {
        let config = Config { term: self.job.config().term.next(), ..self.job.config().clone() };
        self.job = Job::new(config, self.job.durable().clone(), self.now);
        self.sent = SentWorlds::default();
        self.reports.clear();
        let workers: Vec<WorkerId> = self.members.keys().copied().collect();
        self.running(workers.iter().copied(), 60_000);
        for worker in workers {
            self.member(worker, member::Event::MasterLost);
            self.connect(worker);
            self.member(worker, member::Event::Rejoined);
            self.settle();
        }
    }

    fn train(&mut self, n_steps: u32) {
        let end = self.now + STEP * n_steps;
        while self.now < end {
            self.advance();
        }
    }

    fn status(&self) -> (usize, Duration) {
        let (start, mut n_bytes) = (cpu(), 0);
        for _ in 0..N_STATUSES {
            let all = edl_master::processes(&self.job, &BTreeMap::new(), self.now);
            n_bytes = all.iter().map(prost::Message::encoded_len).sum();
        }
        (n_bytes, cpu() - start)
    }

    /// The time of one step passes: deadlines, heartbeats, and the step of those that train.
    fn advance(&mut self) {
        let end = self.now + STEP;
        loop {
            let deadline = self.job.next_deadline(self.now);
            if deadline > end {
                break;
            }
            self.now = deadline + Duration::from_micros(1);
            self.master(|| Event::Tick);
            self.settle();
        }
        self.now = end;
        if self.now >= self.heartbeat_at {
            self.heartbeat_at = self.now + Duration::from_secs(1);
            let workers: Vec<WorkerId> = self.members.keys().copied().collect();
            workers.into_iter().for_each(|worker| self.heartbeat(worker));
        }
        let reducing =
            self.waiting(|activity| matches!(activity, Activity::Reduce(_)).then_some(()));
        let is_training = |id: &&WorkerId| self.job.worlds().is_some_and(|w| w.is_training(**id));
        if reducing.len() == self.members.keys().filter(is_training).count() {
            for worker in reducing.into_keys() {
                self.end_wait(worker, Outcome::Reduced { loss: 0.5 });
            }
        }
        self.settle();
    }

    fn heartbeat(&mut self, worker: WorkerId) {
        let progress = self.members[&worker].machine.progress();
        self.send(worker, Report::Heartbeat { waiting_for: WaitingFor::Nothing, progress });
        self.send(worker, Report::Spending(TimeReport::default()));
    }

    /// Members that wait for others in an activity.
    fn waiting<T>(&self, of: impl Fn(&Activity) -> Option<T>) -> BTreeMap<WorkerId, T> {
        let waits =
            |(id, member): (&WorkerId, &Simulated)| Some((*id, of(member.waits.as_ref()?)?));
        self.members.iter().filter_map(waits).collect()
    }

    /// Delivers messages until nothing is on its way.
    fn settle(&mut self) {
        loop {
            while let Some((worker, bytes)) = self.reports.pop_front() {
                let Some(member) = self.members.get(&worker) else { continue };
                let incarnation = member.incarnation;
                self.cost.n_reports += 1;
                self.master(|| {
                    let message = WorkerMessage::decode(&*bytes).expect("a message");
                    let report = convert::master::worker_report(message).expect("it makes sense");
                    Event::FromWorker { worker, incarnation, report }
                });
            }
            if !self.exchange() {
                return;
            }
        }
    }

    /// Members compare their steps, once all members of a world do.
    fn exchange(&mut self) -> bool {
        let current = self.job.worlds().and_then(|worlds| worlds.current());
        let Some(world) = current.cloned() else { return false };
        let steps = self.waiting(|activity| match activity {
            Activity::Exchange { world: id, step } if *id == world.id => Some(*step),
            _ => None,
        });
        let level = |member: &edl_core::world::Member| steps.get(&member.worker).copied();
        let levels: Option<Vec<Option<u64>>> = world.members.iter().map(level).collect();
        let Some(levels) = levels else { return false };
        for member in world.members {
            self.end_wait(member.worker, Outcome::Levels(levels.clone()));
        }
        true
    }

    fn end_wait(&mut self, worker: WorkerId, outcome: Outcome) {
        if let Some(member) = self.members.get_mut(&worker) {
            member.waits = None;
            self.member(worker, member::Event::Ended(Ok(outcome)));
        }
    }

    /// Lets a member take an event, and performs what it asks for at once.
    fn member(&mut self, worker: WorkerId, event: member::Event) {
        let mut events = VecDeque::from([event]);
        let mut level = None;
        while let Some(event) = events.pop_front() {
            if let member::Event::Ended(Ok(Outcome::Levels(levels))) = &event {
                level = levels.iter().copied().max().flatten();
            }
            let Some(member) = self.members.get_mut(&worker) else { return };
            let mut reports = Vec::new();
            for effect in member.machine.handle(event, self.now) {
                match effect {
                    member::Effect::Report(report) => reports.push(report),
                    member::Effect::Read { place, .. } => {
                        events.push_back(member::Event::Decoded { place, result: Ok(()) });
                    }
                    member::Effect::Cancel(_) if member.waits.take().is_some() => {
                        events.push_back(member::Event::Ended(Err(Failure::Cancelled)));
                    }
                    member::Effect::Start(activity) => {
                        match outcome(&activity, member.machine.step(), level) {
                            Some(outcome) => events.push_back(member::Event::Ended(Ok(outcome))),
                            None => member.waits = Some(activity),
                        }
                    }
                    _ => {}
                }
            }
            reports.into_iter().for_each(|report| self.send(worker, report));
        }
    }

    fn send(&mut self, worker: WorkerId, report: Report) {
        self.reports.push_back((worker, convert::worker::message(report).encode_to_vec()));
    }

    /// Lets the master take an event, and delivers its commands.
    fn master(&mut self, event: impl FnOnce() -> Event) {
        let start = cpu();
        let effects = self.job.handle(event(), self.now);
        let path = |folder: &str, _| folder.to_owned();
        let mut commands: Vec<(WorkerId, Vec<u8>)> = Vec::new();
        for effect in effects {
            match effect {
                Effect::Persist(facts) => {
                    let value = |fact: &Fact| fact.value.as_ref().map_or(0, String::len);
                    let n_bytes: usize = facts.iter().map(|f| f.key.len() + value(f)).sum();
                    self.cost.stored_bytes += n_bytes as u64;
                    self.cost.n_writes += 1;
                }
                Effect::ToWorker(worker, command) => {
                    let encoder = convert::master::Encoder { job: &self.job, path: &path };
                    let command = encoder.worker(worker, command, &mut self.sent);
                    commands.push((worker, command.encode_to_vec()));
                }
                _ => {}
            }
        }
        let _ = self.job.next_deadline(self.now);
        self.cost.cpu += cpu() - start;
        for (worker, bytes) in commands {
            let command = WorkerCommand::decode(&*bytes).expect("a command").kind.expect("a kind");
            let command = match (command, self.members.get_mut(&worker)) {
                (worker_command::Kind::World(world), Some(member)) => {
                    self.cost.world_bytes += bytes.len() as u64;
                    let world = member.worlds.receive(world).expect("it makes sense");
                    worker_command::Kind::World(world)
                }
                (command, _) => command,
            };
            if let Some(command) = convert::worker::command(command) {
                self.member(worker, member::Event::Command(command));
            }
        }
    }
}

/// How an activity ends; none if it needs the other members.
fn outcome(activity: &Activity, step: Option<u64>, level: Option<u64>) -> Option<Outcome> {
    Some(match activity {
        Activity::Exchange { .. } | Activity::Reduce(_) => return None,
        Activity::Load { .. } => Outcome::Loaded { step: 0 },
        Activity::Transfer { is_behind, .. } => Outcome::Transferred(Transferred {
            step: level.or(step).unwrap_or(0),
            state_bytes: u64::from(*is_behind),
        }),
        Activity::Hash => Outcome::Hashed(1 + step.unwrap_or(0)),
        _ => Outcome::Done,
    })
}

fn config(n_members: u32) -> Config {
    let spec = JobSpec {
        job_name: "bench".into(),
        distribution_strategy: Strategy::Allreduce,
        num_ps_pods: 0,
        num_workers: n_members,
        lanes: Some(2 * n_members),
        minibatch_size: 1,
        partitions: 4,
        num_epochs: 0,
        checkpoint_secs: 0,
        evaluation_epochs: false,
        ..JobSpec::default()
    };
    Config {
        spec,
        run: RunId::default(),
        term: Term(1),
        n_records: 1_000_000,
        n_validation_records: 0,
        n_prediction_records: 0,
        output: String::new(),
        evaluated_version: 0,
    }
}

fn model() -> ModelSpec {
    ModelSpec {
        name: "none".into(),
        params: Vec::new(),
        tables: Vec::new(),
        inputs: Vec::new(),
        metrics: Vec::new(),
        optimizer: OptimizerSpec::sgd(1.0),
    }
}

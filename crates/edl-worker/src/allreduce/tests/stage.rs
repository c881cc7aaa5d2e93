// SPDX-License-Identifier: Apache-2.0
//! Members in threads, and a test in the master's place.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use edl_core::activity::WaitingFor;
use edl_core::id::{Incarnation, RunId, WorkerId};
use edl_core::job;
use edl_core::job_dir::FIRST_STATE;
use edl_core::lanes::assign;
use edl_core::member::{self, Claim, Event};
use edl_core::spec::{JobSpec, Strategy};
use edl_core::worker::Limits;
use edl_net::convert;
use edl_net::key::JobKey;
use edl_net::mesh::{PhaseHook, ReducePhase, Transport};
use edl_net::place::Place;
use edl_net::proto::{self, worker_command::Kind as Command, worker_message::Kind};
use edl_tensor::first_values;
use tempfile::TempDir;
use tokio::sync::mpsc;

use super::hub::Hub;
use super::toy::{ToyModel, ToyRecords};
use crate::allreduce::mesh::real;
use crate::allreduce::{self, Identity, MemberShell, OpenMesh, Queues, Start};
use crate::driver::{Driver, Input, Output, Worker as _};
use crate::feed::{Counts, Feeder, Source};
use crate::progress::Progress;
use crate::{Config, Error};

const HANG: Duration = Duration::from_secs(60);

/// A job of four lanes with two records each and a short last step.
pub(crate) fn spec() -> JobSpec {
    JobSpec {
        job_name: "toy".into(),
        training_data: "toy".into(),
        distribution_strategy: Strategy::Allreduce,
        optimizer: Some("adam".into()),
        minibatch_size: 2,
        lanes: Some(4),
        num_epochs: 3,
        partitions: 5,
        seed: 3,
        ..JobSpec::default()
    }
}

pub(crate) fn incarnation(worker: u32) -> Incarnation {
    Incarnation(100 + u64::from(worker))
}

pub(crate) struct Stage {
    pub(crate) hub: Hub,
    pub(crate) folder: TempDir,
    spec: JobSpec,
    n_records: u64,
    pub(crate) swap: Option<(u64, u64)>,
    /// Set if members are linked as those of real jobs.
    pub(crate) transport: Option<Transport>,
    /// Where such a member ends, as a killed process ends.
    pub(crate) fault: Option<(u32, u64, ReducePhase)>,
    members: BTreeMap<u32, Player>,
    sent: Sender<(u32, Kind)>,
    reports: Receiver<(u32, Kind)>,
    /// Reports of members that the test has not asked for yet.
    kept: BTreeMap<u32, VecDeque<Kind>>,
    world: u64,
    n_checkpoints: u64,
}

struct Player {
    driver: Driver<MemberShell>,
    progress: Arc<Progress>,
    /// As it announced it.
    peer: proto::Peer,
    thread: JoinHandle<Result<(), Error>>,
}

/// A world as a test names it.
#[derive(Clone, Copy, Default)]
pub(crate) struct Named<'a> {
    pub(crate) members: &'a [u32],
    /// Members without valid state.
    pub(crate) void: &'a [u32],
    /// Workers that hear of it without being in it.
    pub(crate) left_out: &'a [u32],
    pub(crate) after: Option<u64>,
    pub(crate) until: u64,
    pub(crate) load: Option<&'a str>,
}

/// Every byte of a checkpoint, by partition.
pub(crate) type Weights = BTreeMap<u32, Vec<u8>>;

impl Stage {
    pub(crate) fn new(spec: JobSpec, n_records: u64) -> Self {
        let (sent, reports) = channel();
        Self {
            hub: Hub::default(),
            folder: tempfile::tempdir().unwrap(),
            spec,
            n_records,
            swap: None,
            transport: None,
            fault: None,
            members: BTreeMap::new(),
            sent,
            reports,
            kept: BTreeMap::new(),
            world: 0,
            n_checkpoints: 0,
        }
    }

    /// A job whose script takes the steps.
    pub(crate) fn script() -> Self {
        let stage = Self::new(JobSpec { optimizer: None, ..spec() }, 37);
        first_values::write_state(stage.folder.path(), &ToyModel::first_state()).unwrap();
        stage
    }

    /// Starts a worker and waits until it is ready.
    pub(crate) fn start(&mut self, worker: u32) {
        let is_script = self.folder.path().join(FIRST_STATE).exists();
        self.launch(worker, if is_script { ToyModel::script() } else { ToyModel::new() });
        let Kind::Ready(ready) = self.next(worker) else { panic!("ready comes first") };
        assert!(ready.model_spec_json.contains("toy"));
        let player = self.members.get_mut(&worker).expect("it was launched");
        player.peer = ready.peer.expect("the mesh is open");
    }

    pub(crate) fn launch(&mut self, worker: u32, model: ToyModel) {
        let (outputs, mut outgoing) = mpsc::unbounded_channel();
        let reports = self.sent.clone();
        thread::spawn(move || {
            while let Some(output) = outgoing.blocking_recv() {
                if let Output::Report(report) = output {
                    let kind = convert::worker::message(report).kind.expect("a report has a kind");
                    let _ = reports.send((worker, kind));
                }
            }
        });
        let open_mesh = match self.transport {
            Some(transport) => self.real_mesh(worker, transport),
            None => self.hub.opener(),
        };
        let (spec, feeder) = (self.spec.clone(), self.feeder());
        let job_dir = self.folder.path().to_owned();
        let (worker, incarnation) = (WorkerId(worker), incarnation(worker));
        let limits = Limits { finish: HANG, last_answers: HANG, hand_over: HANG };
        let config = member::Config::new(&spec, self.n_records, (worker, incarnation), limits);
        let progress = Arc::new(Progress::new());
        let (driver, queues) = Driver::of_member(config, outputs, &progress);
        let Queues { tasks, reads, interrupt } = queues;
        let (ours, shown) = (driver.clone(), Arc::clone(&progress));
        let thread = thread::spawn(move || {
            let to = driver.clone();
            let start_feed = |feeder: Feeder| {
                let decoded = move |place, records| to.decoded(place, records);
                thread::spawn(move || feeder.run(&reads, decoded));
                Ok(())
            };
            let start = Start {
                identity: Identity { run: RunId::default(), worker, incarnation },
                spec: &spec,
                model: Box::new(model),
                job_dir,
                dial: None,
                open_mesh,
                driver,
                tasks,
                interrupt,
                progress,
            };
            allreduce::run(start, feeder, start_feed)
        });
        let peer = proto::Peer::default();
        self.members.insert(worker.0, Player { driver: ours, progress: shown, peer, thread });
    }

    fn real_mesh(&self, worker: u32, transport: Transport) -> OpenMesh {
        let config = Config {
            worker: WorkerId(worker),
            master_addr: "127.0.0.1:9".into(),
            key: JobKey::from_bytes([7; 32]),
            job_dir: self.folder.path().into(),
            place: Place::default(),
        };
        let fault = self.fault.filter(|(whose, ..)| *whose == worker);
        let hook = fault.map(|(_, at, phase)| -> PhaseHook {
            Box::new(move |reached, step| {
                if (reached, step) == (phase, at) {
                    std::panic::resume_unwind(Box::new("killed"));
                }
            })
        });
        Box::new(move |identity, spec, model| {
            real::open(config, identity, (spec, model), Some(transport), hook)
        })
    }

    fn feeder(&self) -> Feeder {
        let (n_records, swap) = (self.n_records, self.swap);
        Feeder {
            open: Box::new(move |_| Ok(Arc::new(ToyRecords { n_records, swap }))),
            first: Source::Training,
            counts: Counts { training: n_records, validation: n_records, prediction: 0 },
            plan: self.spec.plan(n_records),
            n_lanes: self.spec.n_lanes(),
            fields: Vec::new(),
            opened: BTreeMap::new(),
        }
    }

    /// The next report of `worker`.
    pub(crate) fn next(&mut self, worker: u32) -> Kind {
        loop {
            if let Some(kind) = self.kept.entry(worker).or_default().pop_front() {
                return kind;
            }
            self.hear();
        }
    }

    fn hear(&mut self) {
        let heard = self.reports.recv_timeout(HANG);
        let (from, kind) = heard.unwrap_or_else(|_| panic!("no report came: {:?}", self.kept));
        self.kept.entry(from).or_default().push_back(kind);
    }

    /// The next report of `worker` that `take` wants; others are left for later.
    pub(crate) fn find<T>(&mut self, worker: u32, take: impl Fn(Kind) -> Option<T>) -> T {
        let mut n_seen = 0;
        loop {
            let kept = self.kept.entry(worker).or_default();
            while let Some(kind) = kept.get(n_seen) {
                if let Some(found) = take(kind.clone()) {
                    kept.remove(n_seen);
                    return found;
                }
                n_seen += 1;
            }
            self.hear();
        }
    }

    pub(crate) fn tell(&self, worker: u32, event: Event) {
        self.members[&worker].driver.handle(event);
    }

    fn command(&self, worker: u32, command: Command) {
        self.members[&worker].driver.input(Input::Command(Box::new(command)));
    }

    /// Announces a world to all its workers, as the session passes it on.
    pub(crate) fn name(&mut self, named: Named<'_>) -> u64 {
        self.world += 1;
        let world = self.message(named);
        for worker in named.members.iter().chain(named.left_out) {
            // A worker that a test has not started is one that never comes.
            if self.members.contains_key(worker) {
                self.command(*worker, Command::World(world.clone()));
            }
        }
        self.world
    }

    /// The last world that was named.
    pub(crate) fn world(&self) -> u64 {
        self.world
    }

    fn message(&self, named: Named<'_>) -> proto::World {
        let n_members = u32::try_from(named.members.len()).unwrap();
        let lanes = assign(self.spec.n_lanes(), n_members);
        let member = |(worker, lanes): (&u32, std::ops::Range<u32>)| {
            let peer = self.members.get(worker).map(|player| player.peer.clone());
            let proto::Peer { address, unix_path, .. } = peer.unwrap_or_default();
            proto::Member {
                worker: *worker,
                incarnation: incarnation(*worker).0,
                address,
                unix_path,
                first_lane: lanes.start,
                end_lane: lanes.end,
                has_state: named.load.is_none() && !named.void.contains(worker),
            }
        };
        let load = named.load.map(|checkpoint| proto::LoadFrom {
            checkpoint: (!checkpoint.is_empty()).then(|| checkpoint.into()),
            keep_applied: true,
        });
        proto::World {
            world: self.world,
            members: named.members.iter().zip(lanes).map(member).collect(),
            after: named.after,
            until: named.until,
            generation: 1,
            load,
            skipped: Vec::new(),
            changes: None,
        }
    }

    /// Names a world and waits until it has formed; what its members say about it.
    pub(crate) fn form(&mut self, named: Named<'_>) -> Vec<proto::Formed> {
        let world = self.name(named);
        named.members.iter().map(|worker| self.formed(*worker, world)).collect()
    }

    pub(crate) fn formed(&mut self, worker: u32, world: u64) -> proto::Formed {
        self.find(worker, |kind| {
            if let Kind::Formed(formed) = kind
                && formed.world == world
            {
                Some(formed)
            } else {
                None
            }
        })
    }

    /// Grants steps of the last world.
    pub(crate) fn go(&self, members: &[u32], until: u64) {
        members.iter().for_each(|worker| self.go_on(*worker, self.world, until));
    }

    pub(crate) fn go_on(&self, worker: u32, world: u64, until: u64) {
        self.command(worker, Command::Go(proto::Go { world, until }));
    }

    /// Waits until every one of `members` has said that it holds the state after `step`.
    pub(crate) fn stepped(&mut self, members: &[u32], step: u64) -> Vec<proto::Stepped> {
        let all = members.iter().map(|worker| {
            self.find(*worker, |kind| {
                if let Kind::Stepped(stepped) = kind
                    && stepped.step == step
                {
                    Some(stepped)
                } else {
                    None
                }
            })
        });
        all.collect()
    }

    pub(crate) fn lost(&mut self, worker: u32) -> proto::PeerLost {
        self.find(worker, |kind| if let Kind::PeerLost(lost) = kind { Some(lost) } else { None })
    }

    /// Waits until one of `members` has lost a peer; who that is.
    pub(crate) fn anyone_lost(&mut self, members: &[u32]) -> u32 {
        loop {
            let kept = members.iter().filter_map(|worker| self.kept.get(worker)).flatten();
            let suspect = |kind: &Kind| {
                if let Kind::PeerLost(lost) = kind { Some(lost.suspect) } else { None }
            };
            if let Some(suspect) = kept.filter_map(suspect).next() {
                return suspect;
            }
            self.hear();
        }
    }

    /// Orders a checkpoint from each of `members`; its folder.
    pub(crate) fn checkpoint(&mut self, members: &[u32], at: u64) -> String {
        self.n_checkpoints += 1;
        let folder = self.folder.path().join(format!("checkpoint-{}", self.n_checkpoints));
        std::fs::create_dir(&folder).unwrap();
        let folder = folder.to_str().unwrap().to_owned();
        let n_members = u32::try_from(members.len()).unwrap();
        for (worker, share) in members.iter().zip(assign(self.spec.partitions, n_members)) {
            let order = proto::WorkerCheckpoint {
                checkpoint: self.n_checkpoints,
                generation: 1,
                folder: folder.clone(),
                at,
                first_partition: share.start,
                end_partition: share.end,
            };
            self.command(*worker, Command::Checkpoint(order));
        }
        folder
    }

    /// Waits for the files of a checkpoint, and reads them.
    pub(crate) fn written(&mut self, members: &[u32], folder: &str) -> Weights {
        let mut weights = Weights::new();
        for worker in members {
            let done = self.find(*worker, |kind| {
                assert!(!matches!(kind, Kind::CheckpointFailed(_)), "no checkpoint: {kind:?}");
                if let Kind::CheckpointDone(done) = kind { Some(done) } else { None }
            });
            for file in done.files {
                let bytes = std::fs::read(Path::new(folder).join(&file.name)).unwrap();
                assert_eq!(bytes.len() as u64, file.bytes);
                weights.insert(file.partition, bytes);
            }
        }
        weights
    }

    /// The state of members that wait at `step`.
    pub(crate) fn weights(&mut self, members: &[u32], step: u64) -> Weights {
        let folder = self.checkpoint(members, step);
        let weights = self.written(members, &folder);
        assert_eq!(weights.len(), self.spec.partitions as usize, "every partition is written");
        weights
    }

    pub(crate) fn assign_shard(&self, worker: u32, lease: u64, work: proto::EvalWork) {
        let work = Some(proto::lease::Work::Eval(work));
        self.command(worker, Command::Lease(proto::Lease { lease, work }));
    }

    pub(crate) fn probe(&self, worker: u32) -> u64 {
        self.members[&worker].peer.probe
    }

    /// The last world of `worker`, and the step that it holds; zeros without state.
    pub(crate) fn claim(&self, worker: u32) -> (u64, u64) {
        let claim = self.members[&worker].driver.with(|shell| shell.machine.claim()).flatten();
        claim.map_or((0, 0), |Claim { world, step }| (world.0, step))
    }

    /// Waits until a blocked call of `worker` waits for another worker.
    pub(crate) fn waits_for(&self, worker: u32) -> String {
        let start = std::time::Instant::now();
        loop {
            if self.members[&worker].progress.waiting_for() == WaitingFor::Members {
                return self.hub.waiting_for(worker);
            }
            assert!(start.elapsed() < HANG, "no call is blocked");
            thread::yield_now();
        }
    }

    /// Stops a member as the session does, and waits for its end.
    pub(crate) fn stop(&mut self, worker: u32) {
        self.tell(worker, Event::Command(job::Command::Stop("the job is over".into())));
        self.ended(worker).unwrap();
    }

    /// Waits for the end of a member that ends by itself.
    pub(crate) fn ended(&mut self, worker: u32) -> Result<(), Error> {
        let player = self.members.remove(&worker).expect("a member");
        player.thread.join().expect("no member panics")
    }

    /// Waits for the end of a member that a fault killed.
    pub(crate) fn killed(&mut self, worker: u32) {
        let player = self.members.remove(&worker).expect("a member");
        assert!(player.thread.join().is_err(), "the fault happens");
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.members.values().for_each(|player| player.driver.close());
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A job by hand: the real machine and real partitions, but a test decides what happens when.

use std::collections::{BTreeMap, VecDeque};

use edl_core::id::{BatchId, Generation, Incarnation, PsId, Term, WorkerId};
use edl_core::job::{Command, Config, CutFile, Effect, End, Event, Holder, Job, PsOrder, Work};
use edl_core::platform::Report;
use edl_core::servers::Member;
use edl_core::spec::JobSpec;
use edl_core::time::Time;
use edl_tensor::partition::Pushed;

use crate::counter::{Counter, Parts, states};
use crate::disk::{Disk, checksum, encode};

/// A parameter server.
#[derive(Default)]
pub(crate) struct Seat {
    pub(crate) incarnation: u64,
    pub(crate) generation: Generation,
    pub(crate) is_serving: bool,
    pub(crate) parts: Parts,
}

pub(crate) struct Site {
    pub(crate) counter: Counter,
    pub(crate) job: Job,
    pub(crate) now: Time,
    pub(crate) disk: Disk,
    pub(crate) seats: BTreeMap<u32, Seat>,
    /// What workers were lent, in order.
    pub(crate) lent: VecDeque<(WorkerId, BatchId)>,
    pub(crate) ended: Option<End>,
    pub(crate) exported: Option<Parts>,
    /// Orders to cut stay with the test.
    pub(crate) holds_cuts: bool,
    pub(crate) held_cuts: Vec<(PsId, PsOrder)>,
    next_incarnation: u64,
}

/// Two servers with two partitions each; six batches of two records.
pub(crate) fn spec() -> JobSpec {
    JobSpec {
        job_name: "by-hand".into(),
        minibatch_size: 2,
        num_minibatches_per_task: 1,
        partitions: 4,
        num_ps_pods: 2,
        num_workers: 2,
        checkpoint_secs: 0,
        keep_checkpoint_max: 0,
        ..JobSpec::default()
    }
}

pub(crate) const N_RECORDS: u64 = 12;

impl Site {
    pub(crate) fn new(spec: JobSpec) -> Self {
        let counter = Counter::new(spec, N_RECORDS);
        let mut disk = Disk::default();
        let job = start(&counter, &mut disk);
        Self {
            counter,
            job,
            now: Time::ZERO,
            disk,
            seats: BTreeMap::new(),
            lent: VecDeque::new(),
            ended: None,
            exported: None,
            holds_cuts: false,
            held_cuts: Vec::new(),
            next_incarnation: 0,
        }
    }

    /// With all servers and some workers there.
    pub(crate) fn running(spec: JobSpec, n_workers: u32) -> Self {
        let mut site = Self::new(spec);
        site.gather(n_workers);
        site
    }

    fn gather(&mut self, n_workers: u32) {
        let n_ps = self.counter.spec.num_ps_pods;
        (0..n_workers).for_each(|id| self.join(id));
        (0..n_ps).for_each(|ps| self.sit_down(ps));
    }

    /// The master dies; another one starts from the disk.
    pub(crate) fn restart_master(&mut self) {
        self.lent.clear();
        self.job = start(&self.counter, &mut self.disk);
    }

    /// Everything dies; a new master starts with `n_ps` new servers and `n_workers` new workers.
    pub(crate) fn restart_all(&mut self, n_ps: u32, n_workers: u32) {
        self.seats.clear();
        self.counter.spec.num_ps_pods = n_ps;
        self.restart_master();
        self.gather(n_workers);
    }

    /// A worker that is ready.
    pub(crate) fn join(&mut self, id: u32) {
        let (worker, incarnation) = (WorkerId(id), Incarnation(u64::from(id)));
        let model = Box::new((*self.counter.model).clone());
        self.handle(Event::WorkerConnected { worker, incarnation, pid: id });
        let held = Vec::new();
        self.handle(Event::WorkerReady {
            worker,
            incarnation,
            model,
            capacity: 2,
            held,
            peer: None,
        });
    }

    /// A new server process.
    pub(crate) fn sit_down(&mut self, ps: u32) {
        self.next_incarnation += 1;
        let incarnation = self.next_incarnation;
        self.seats.insert(ps, Seat { incarnation, ..Seat::default() });
        self.call_master(ps);
    }

    pub(crate) fn call_master(&mut self, ps: u32) {
        let seat = &self.seats[&ps];
        let member = Member {
            incarnation: Incarnation(seat.incarnation),
            address: String::new(),
            unix_path: String::new(),
            generation: seat.generation,
            sets: states(&seat.parts),
        };
        self.handle(Event::PsConnected { ps: PsId(ps), pid: ps, member: Box::new(member) });
    }

    /// A server's process is gone, and another one takes its place.
    pub(crate) fn replace(&mut self, ps: u32) -> Seat {
        let old = self.seats.remove(&ps).expect("it was there");
        self.sit_down(ps);
        old
    }

    pub(crate) fn handle(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let effects = self.job.handle(event, self.now);
            self.job.check_invariants();
            for effect in effects {
                self.perform(effect, &mut events);
            }
        }
    }

    /// Performs only the first effects of an event: the master dies after them.
    pub(crate) fn handle_partly(&mut self, event: Event, n_effects: usize) -> usize {
        let effects = self.job.handle(event, self.now);
        let n = effects.len();
        let mut lost = VecDeque::new();
        effects.into_iter().take(n_effects).for_each(|effect| self.perform(effect, &mut lost));
        n
    }

    fn perform(&mut self, effect: Effect, events: &mut VecDeque<Event>) {
        match effect {
            Effect::Persist => {
                assert_eq!(self.disk.term, self.job.config().term, "only one master can write");
                self.disk.durable = self.job.durable().clone();
            }
            Effect::ToWorker(worker, Command::Lease { work: Work::Train { epoch, range }, .. }) => {
                self.lent.extend(range.map(|index| (worker, BatchId { epoch, index })));
            }
            Effect::ToPs(ps, order @ PsOrder::Cut { .. }) if self.holds_cuts => {
                self.held_cuts.push((ps, order));
            }
            Effect::ToPs(ps, order) => events.extend(self.obey(ps, order)),
            Effect::PrepareCut { folder, .. } => {
                self.disk.folders.insert(folder, Default::default());
            }
            Effect::Commit { cut, folder, files, .. } => {
                events.push_back(match self.disk.commit(&folder, &files) {
                    Ok(()) => Event::Committed { cut },
                    Err(error) => Event::CutFailed { cut, error },
                });
            }
            Effect::Delete(folder) => drop(self.disk.folders.remove(&folder)),
            Effect::Export { checkpoint } => {
                let all = 0..self.counter.spec.partitions;
                let parts = self.disk.load(&self.counter, &checkpoint, all);
                self.exported = Some(parts.expect("a complete checkpoint"));
                events.push_back(Event::Exported);
            }
            Effect::Ended(end) => self.ended = Some(end),
            Effect::ToWorker(..)
            | Effect::CloseWorker(..)
            | Effect::RefuseWorker(..)
            | Effect::ClosePs(_)
            | Effect::Platform(_)
            | Effect::JoinPredictions { .. }
            | Effect::EvaluationStarted { .. }
            | Effect::Evaluated(_)
            | Effect::Note(_)
            | Effect::Reply(_) => {}
        }
    }

    /// What a server does with an order, and its answer.
    pub(crate) fn obey(&mut self, ps: PsId, order: PsOrder) -> Option<Event> {
        let hosted = self.counter.layout.hosted(ps, self.counter.spec.num_ps_pods);
        let seat = self.seats.get_mut(&ps.0)?;
        match order {
            PsOrder::Load { generation, from } if generation > seat.generation => {
                let loaded = match from.checkpoint {
                    Some(folder) => self.disk.load(&self.counter, &folder, hosted),
                    None => Ok(self.counter.fresh(hosted)),
                };
                match loaded {
                    Ok(parts) => {
                        (seat.parts, seat.generation, seat.is_serving) = (parts, generation, false);
                        let sets = states(&seat.parts);
                        Some(Event::Loaded { ps, generation, sets })
                    }
                    Err(error) => Some(Event::LoadFailed { ps, generation, error }),
                }
            }
            PsOrder::Serve { generation } => {
                seat.is_serving = generation == seat.generation;
                None
            }
            PsOrder::Cut { cut, generation, folder, .. } => {
                let files = write(&mut self.disk, seat, &folder)?;
                Some(Event::CutDone { holder: Holder::Ps(ps), cut, generation, files })
            }
            PsOrder::Load { .. } | PsOrder::Welcome | PsOrder::Stop(_) => None,
        }
    }

    /// Pushes to some partitions of a server, as if its owners had come no further. True if each
    /// has applied the batch afterwards.
    pub(crate) fn push_to(&mut self, ps: u32, partitions: &[u32], batch: BatchId) -> bool {
        let hosted = self.counter.layout.hosted(PsId(ps), self.counter.spec.num_ps_pods);
        let push = self.counter.push(batch, 0, hosted);
        let seat = self.seats.get_mut(&ps).expect("it is there");
        for id in partitions {
            let pushed = seat.parts.get_mut(id).expect("it hosts it").push(&push);
            assert!(!matches!(pushed, Pushed::Refused(_)), "{pushed:?}");
        }
        partitions.iter().all(|id| seat.parts[id].applied().contains(batch))
    }

    /// Pushes a batch to a whole server; its acknowledgement, if it serves `generation`.
    pub(crate) fn push(&mut self, ps: u32, generation: Generation, batch: BatchId) -> bool {
        let seat = &self.seats[&ps];
        if !seat.is_serving || seat.generation != generation {
            return false;
        }
        let hosted: Vec<u32> = seat.parts.keys().copied().collect();
        self.push_to(ps, &hosted, batch)
    }

    pub(crate) fn generation(&self) -> Generation {
        self.job.servers().generation()
    }

    pub(crate) fn report(&mut self, worker: WorkerId, batch: BatchId, generation: Generation) {
        self.handle(Event::BatchDone { worker, batch, generation, loss: 0.0 });
    }

    /// A worker trains one batch to its end.
    pub(crate) fn train(&mut self, worker: WorkerId, batch: BatchId) {
        let generation = self.generation();
        let n_ps = self.counter.spec.num_ps_pods;
        let mut acknowledged = true;
        for ps in 0..n_ps {
            acknowledged &= self.push(ps, generation, batch);
        }
        if acknowledged {
            self.report(worker, batch, generation);
        }
    }

    /// Trains everything that is lent, in rounds as they come, to the end of the job.
    pub(crate) fn finish(&mut self) {
        while self.ended.is_none() {
            let lent = std::mem::take(&mut self.lent);
            assert!(!lent.is_empty(), "the job stands still: {}", self.job.state());
            let generation = self.generation();
            let n_ps = self.counter.spec.num_ps_pods;
            for (_, batch) in &lent {
                for ps in 0..n_ps {
                    self.push(ps, generation, *batch);
                }
            }
            for (worker, batch) in lent {
                if (0..n_ps).all(|ps| self.push(ps, generation, batch)) {
                    self.report(worker, batch, generation);
                }
            }
        }
        assert_eq!(self.ended, Some(End::Succeeded));
        let exported = self.exported.as_ref().expect("a job that succeeds exports its model");
        self.counter.expect_trained(exported, self.counter.spec.num_epochs);
    }
}

/// Writes all partitions of a server into a folder, if it is still there.
pub(crate) fn write(disk: &mut Disk, seat: &Seat, folder: &str) -> Option<Vec<CutFile>> {
    let place = disk.folders.get_mut(folder)?;
    let mut files = Vec::new();
    for (partition, part) in &seat.parts {
        let bytes = encode(part);
        files.push(CutFile {
            partition: *partition,
            name: format!("partition-{partition:05}.edlp"),
            bytes: bytes.len() as u64,
            checksum: checksum(&bytes),
            updates: part.updates(),
        });
        place.files.insert(*partition, bytes);
    }
    Some(files)
}

fn start(counter: &Counter, disk: &mut Disk) -> Job {
    disk.term = disk.term.next();
    let config = Config {
        spec: counter.spec.clone(),
        term: disk.term,
        n_records: N_RECORDS,
        n_validation_records: 0,
        n_prediction_records: 0,
    };
    let mut job = Job::new(config, disk.durable.clone(), Time::ZERO);
    job.handle(Event::Platform(Report::Running(Vec::new())), Time::ZERO);
    assert!(job.config().term > Term(0));
    job
}

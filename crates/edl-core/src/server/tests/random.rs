// SPDX-License-Identifier: Apache-2.0
//! Random interleavings against a naive model: two owners with one partition each, a disk, and
//! clients that expect exactly one answer to each request.

use std::collections::{BTreeSet, VecDeque};

use proptest::prelude::*;

use super::*;

/// One random choice.
#[derive(Clone, Copy, Debug)]
enum Act {
    Load {
        skip: u64,
    },
    FinishLoad {
        is_good: bool,
    },
    Serve {
        back: u64,
    },
    Push {
        client: u8,
        index: u32,
        ahead: u64,
    },
    Pull {
        client: u8,
        ahead: u64,
        min_round: u64,
        will_push: bool,
    },
    /// An owner comes to its next task.
    Work {
        owner: usize,
    },
    Checkpoint,
    /// The disk is done with the next copy.
    Write {
        is_good: bool,
    },
    Leave {
        client: u8,
    },
    Wait {
        secs: u64,
    },
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        1 => (0..3_u64).prop_map(|skip| Act::Load { skip }),
        3 => prop::bool::weighted(0.8).prop_map(|is_good| Act::FinishLoad { is_good }),
        3 => (0..2_u64).prop_map(|back| Act::Serve { back }),
        8 => (0..3_u8, 0..N_BATCHES, 0..2_u64)
            .prop_map(|(client, index, ahead)| Act::Push { client, index, ahead }),
        8 => (0..3_u8, 0..2_u64, 0..4_u64, any::<bool>())
            .prop_map(|(client, ahead, min_round, will_push)| {
                Act::Pull { client, ahead, min_round, will_push }
            }),
        20 => (0..2_usize).prop_map(|owner| Act::Work { owner }),
        2 => Just(Act::Checkpoint),
        4 => prop::bool::weighted(0.9).prop_map(|is_good| Act::Write { is_good }),
        1 => (0..3_u8).prop_map(|client| Act::Leave { client }),
        2 => (1..40_u64).prop_map(|secs| Act::Wait { secs }),
    ]
}

/// A partition as simple as can be: the batches that it has, and those that wait for a round.
#[derive(Clone, Debug, Default)]
struct Naive {
    applied: BTreeSet<u32>,
    staged: BTreeSet<u32>,
    steps: u64,
}

impl Naive {
    fn push(&mut self, mode: Mode, index: u32) -> Outcome {
        if self.applied.contains(&index) {
            return Outcome::Already;
        }
        if mode != PAIRS {
            self.applied.insert(index);
            self.steps += 1;
            return Outcome::Applied;
        }
        self.staged.insert(index);
        let mut done = Vec::new();
        while let round = u32::try_from(self.round()).unwrap() * 2
            && (round..round + 2).all(|index| self.staged.contains(&index))
        {
            for index in round..round + 2 {
                self.staged.remove(&index);
                self.applied.insert(index);
                done.push(BatchId { epoch: 0, index });
            }
            self.steps += 1;
        }
        if done.is_empty() { Outcome::Staged } else { Outcome::Round(done) }
    }

    fn round(&self) -> u64 {
        self.applied.len() as u64 / 2
    }
}

#[derive(Clone, Debug)]
enum Task {
    Push(Request, u32),
    Copy(CheckpointId),
}

#[derive(Debug)]
enum Asked {
    Pull(Pull),
    Push(Push),
}

struct Site {
    bench: Bench,
    mode: Mode,
    /// The latest generation that was ordered.
    newest: u64,
    loading: Option<u64>,
    held: Option<u64>,
    served: Option<u64>,
    parts: Vec<Naive>,
    tasks: Vec<VecDeque<Task>>,
    asked: BTreeMap<Request, Asked>,
    at_owners: BTreeSet<Request>,
    last_request: u64,
    last_checkpoint: u64,
    /// Checkpoints without an answer, and what is on disk of them.
    checkpoints: BTreeMap<CheckpointId, BTreeSet<u32>>,
    copies: VecDeque<(CheckpointId, u32)>,
}

impl Site {
    fn new(mode: Mode) -> Self {
        Self {
            bench: Bench::empty(),
            mode,
            newest: 0,
            loading: None,
            held: None,
            served: None,
            parts: vec![Naive::default(); 2],
            tasks: vec![VecDeque::new(); 2],
            asked: BTreeMap::new(),
            at_owners: BTreeSet::new(),
            last_request: 0,
            last_checkpoint: 0,
            checkpoints: BTreeMap::new(),
            copies: VecDeque::new(),
        }
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Load { skip } => {
                self.newest += skip;
                self.on(load(self.newest.max(1), self.mode));
            }
            Act::FinishLoad { is_good } => self.finish_load(is_good),
            Act::Serve { back } => self.serve(self.newest.saturating_sub(back)),
            Act::Push { client, index, ahead } => {
                self.last_request += 1;
                let generation = self.held.unwrap_or(0) + ahead;
                let push = push(self.last_request, Client([client; 16]), generation, index);
                self.asked.insert(push.request, Asked::Push(push.clone()));
                self.on(Event::Push(push));
            }
            Act::Pull { client, ahead, min_round, will_push } => {
                self.last_request += 1;
                let generation = self.held.unwrap_or(0) + ahead;
                let min_round = (self.mode == PAIRS).then_some(min_round);
                let pull = pull(self.last_request, Client([client; 16]), generation);
                let pull = Pull { min_round, will_push, ..pull };
                self.asked.insert(pull.request, Asked::Pull(pull.clone()));
                self.on(Event::Pull(pull));
            }
            Act::Work { owner } => self.work(owner),
            Act::Checkpoint => {
                self.last_checkpoint += 1;
                self.checkpoints.insert(CheckpointId(self.last_checkpoint), BTreeSet::new());
                self.on(checkpoint(self.last_checkpoint, self.held.unwrap_or(0), None));
            }
            Act::Write { is_good } => self.write(is_good),
            Act::Leave { client } => self.on(Event::Left(Client([client; 16]))),
            Act::Wait { secs } => self.wait(Duration::from_secs(secs)),
        }
    }

    fn on(&mut self, event: Event) {
        for effect in self.bench.on(event) {
            self.perform(effect);
        }
        let next = self.bench.server.next_deadline();
        assert!(next.is_none_or(|next| next > self.bench.now), "nothing is overdue");
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Drop(generation) => {
                assert_eq!(self.held, Some(generation.0));
                (self.held, self.served) = (None, None);
                self.tasks.iter_mut().for_each(VecDeque::clear);
            }
            Effect::Load(load) => {
                assert!(self.held.is_none() && self.loading.is_none(), "one at a time");
                self.loading = Some(load.generation.0);
            }
            Effect::Apply(request) => {
                let Some(Asked::Push(push)) = self.asked.get(&request) else { panic!("no push") };
                assert_eq!(self.served, Some(push.generation.0));
                assert!(self.at_owners.insert(request), "once");
                for tasks in &mut self.tasks {
                    tasks.push_back(Task::Push(request, push.batch.index));
                }
            }
            Effect::Answer(request) => {
                let Some(Asked::Pull(pull)) = self.asked.remove(&request) else {
                    panic!("no pull")
                };
                assert_eq!(self.served, Some(pull.generation.0));
                let round = self.parts.iter().map(Naive::round).min().unwrap();
                assert!(pull.min_round.is_none_or(|least| least <= round));
            }
            Effect::Acknowledge(request) => {
                let Some(Asked::Push(push)) = self.asked.remove(&request) else {
                    panic!("no push")
                };
                assert_eq!(self.served, Some(push.generation.0));
                assert!(self.parts.iter().all(|part| part.applied.contains(&push.batch.index)));
            }
            Effect::Refuse(request, _) => {
                assert!(self.asked.remove(&request).is_some(), "one answer to each request");
            }
            Effect::Copy { checkpoint, .. } => {
                self.tasks.iter_mut().for_each(|tasks| tasks.push_back(Task::Copy(checkpoint)));
            }
            Effect::Write { checkpoint, partition, .. } => {
                self.copies.push_back((checkpoint, partition.0));
            }
            Effect::Report(Report::CheckpointDone { checkpoint, files, .. }) => {
                let on_disk = self.checkpoints.remove(&checkpoint).expect("one answer to an order");
                assert_eq!((on_disk.len(), files.len()), (2, 2));
            }
            Effect::Report(Report::CheckpointStarted { checkpoint }) => {
                assert!(self.checkpoints.contains_key(&checkpoint), "it was ordered");
            }
            Effect::Report(Report::CheckpointFailed { checkpoint, .. }) => {
                self.checkpoints.remove(&checkpoint).expect("one answer to an order");
            }
            Effect::Report(Report::Loaded { generation, .. }) => {
                assert!(self.held == Some(generation.0) && generation.0 == self.newest.max(1));
            }
            Effect::Inspect(inspection, generation) => {
                let event = Event::Inspected { inspection, generation, states: states() };
                self.on(event);
            }
            Effect::Report(report @ (Report::Heartbeat | Report::Spending(_))) => {
                panic!("the shell sends {report:?}")
            }
            Effect::Report(Report::LoadFailed { .. } | Report::States { .. })
            | Effect::Hello { .. }
            | Effect::Note(_) => {}
        }
    }

    fn finish_load(&mut self, is_good: bool) {
        let Some(generation) = self.loading.take() else { return };
        if is_good {
            self.held = Some(generation);
            self.parts = vec![Naive::default(); 2];
            self.on(loaded(generation));
        } else {
            let (generation, error) = (Generation(generation), String::new());
            self.on(Event::LoadFailed { generation, error });
        }
    }

    fn serve(&mut self, generation: u64) {
        if self.held == Some(generation) {
            self.served = self.held;
        }
        self.on(serve(generation));
    }

    fn work(&mut self, owner: usize) {
        let (Some(task), Some(held)) = (self.tasks[owner].pop_front(), self.held) else { return };
        let partition = u32::try_from(owner).unwrap();
        let naive = &mut self.parts[owner];
        match task {
            Task::Push(request, index) => {
                let outcome = naive.push(self.mode, index);
                let parts = part(partition, outcome, naive.steps, naive.round());
                self.on(Event::Pushed { generation: Generation(held), request, parts });
            }
            Task::Copy(checkpoint) => {
                let event = copied(checkpoint.0, partition, naive.applied.len() as u64);
                self.on(event);
            }
        }
    }

    fn write(&mut self, is_good: bool) {
        let Some((checkpoint, partition)) = self.copies.pop_front() else { return };
        if is_good {
            let on_disk = self.checkpoints.get_mut(&checkpoint);
            on_disk.map(|on_disk| on_disk.insert(partition));
            self.on(written(checkpoint.0, partition));
        } else {
            self.on(Event::WriteFailed { checkpoint, error: String::new() });
        }
    }

    /// Lets the time pass, with a tick whenever one is due.
    fn wait(&mut self, time: Duration) {
        let end = self.bench.now + time;
        while let Some(next) = self.bench.server.next_deadline().filter(|next| *next <= end) {
            self.bench.now = next;
            self.on(Event::Tick);
        }
        self.bench.now = end;
        self.on(Event::Tick);
    }

    /// All owners catch up, and all waits end: only pushes that wait for a round are left.
    fn finish(&mut self) {
        while self.tasks.iter().any(|tasks| !tasks.is_empty()) {
            (0..2).for_each(|owner| self.work(owner));
        }
        while !self.copies.is_empty() {
            self.write(true);
        }
        self.wait(PATIENCE);
        for (request, asked) in &self.asked {
            let Asked::Push(push) = asked else { panic!("{asked:?} has no answer") };
            let is_staged = self.parts.iter().any(|part| part.staged.contains(&push.batch.index));
            assert!(self.mode == PAIRS && is_staged, "{request:?} has no answer");
        }
        assert!(self.checkpoints.is_empty(), "every checkpoint is answered");
    }
}

proptest! {
    #[test]
    fn every_request_gets_one_answer_and_it_is_true(
        mode in prop_oneof![Just(Mode::Async), Just(PAIRS), Just(Mode::Bounded { versions: 2 })],
        acts in prop::collection::vec(act(), 1..200),
    ) {
        let mut site = Site::new(mode);
        // Most of the time there is something to talk to.
        site.act(Act::Load { skip: 1 });
        site.finish_load(true);
        site.serve(1);
        acts.into_iter().for_each(|act| site.act(act));
        site.finish();
    }
}

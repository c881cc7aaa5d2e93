// SPDX-License-Identifier: Apache-2.0
//! A parameter server with real partitions, each with an owner of its own pace.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use edl_core::id::{BatchId, CutId, Generation, PartitionId, PsId, Term};
use edl_core::job::{CutFile, PsOrder};
use edl_core::platform::Ended;
use edl_core::time::Time;
use edl_tensor::partition::Pushed;
use edl_tensor::push::Push;

use crate::counter::{Parts, states};
use crate::disk::{checksum, encode};
use crate::kernel::ConnId;
use crate::message::{Message, Timer};
use crate::process::Context;

pub(crate) struct Server {
    ps: PsId,
    incarnation: u64,
    term: Term,
    master: Option<ConnId>,
    generation: Generation,
    loading: Option<Generation>,
    is_serving: bool,
    parts: Parts,
    /// When each partition's owner gets to its next push.
    busy_until: BTreeMap<u32, Time>,
    /// Who waits for which batch.
    waiting: BTreeMap<BatchId, Vec<ConnId>>,
    pulls: Vec<(ConnId, u64, u64)>,
    /// The cut that is being written: one at a time.
    cuts: BTreeMap<CutId, Vec<CutFile>>,
    /// Answers for the next master.
    outbox: Vec<Message>,
}

impl Server {
    pub(crate) fn start(ps: u32, context: &mut Context<'_>) -> Self {
        context.after(1, 20, Timer::Reconnect);
        context.heartbeat_later();
        Self {
            ps: PsId(ps),
            incarnation: u64::from(context.pid),
            term: Term(0),
            master: None,
            generation: Generation(0),
            loading: None,
            is_serving: false,
            parts: Parts::new(),
            busy_until: BTreeMap::new(),
            waiting: BTreeMap::new(),
            pulls: Vec::new(),
            cuts: BTreeMap::new(),
            outbox: Vec::new(),
        }
    }

    pub(crate) fn on_message(&mut self, context: &mut Context<'_>, conn: ConnId, message: Message) {
        match message {
            Message::Pull { request, generation, min_round } => {
                if self.serves(generation) {
                    self.pulls.push((conn, request, min_round));
                    self.answer_pulls(context);
                } else {
                    context.send(conn, Message::NotServing);
                }
            }
            Message::Push { generation, push } => {
                if self.serves(generation) {
                    self.take(context, conn, push);
                } else {
                    context.send(conn, Message::NotServing);
                }
            }
            // What an earlier master still says is void.
            _ if self.master != Some(conn) => {}
            Message::Welcome { term } if term < self.term => context.kernel.hang_up(conn),
            Message::Welcome { term } => {
                self.term = term;
                for answer in std::mem::take(&mut self.outbox) {
                    self.tell(context, answer);
                }
            }
            Message::Order(order) => self.obey(context, order),
            Message::Stop => context.exit = Some(Ended::Exit(0)),
            other => panic!("a server is never told {other:?}"),
        }
    }

    pub(crate) fn on_broken(&mut self, context: &mut Context<'_>, conn: ConnId) {
        if self.master == Some(conn) {
            self.master = None;
            context.after(5, 200, Timer::Reconnect);
        }
        self.pulls.retain(|(waiting, ..)| *waiting != conn);
        self.waiting.values_mut().for_each(|conns| conns.retain(|waiting| *waiting != conn));
    }

    pub(crate) fn on_timer(&mut self, context: &mut Context<'_>, timer: Timer) {
        match timer {
            Timer::Reconnect => self.call_master(context),
            Timer::Heartbeat => {
                self.tell(context, Message::Heartbeat);
                context.heartbeat_later();
            }
            Timer::Terminate => context.exit = Some(Ended::Exit(0)),
            Timer::Load { generation, checkpoint } => self.load(context, generation, checkpoint),
            Timer::Apply { partition, generation, push } => {
                if generation == self.generation {
                    self.apply(context, partition, &push);
                }
            }
            Timer::Snapshot { cut, generation, folder, partition } => {
                if generation != self.generation {
                    self.cuts.remove(&cut);
                    let error = "the generation is over".into();
                    return self.tell(context, Message::CutFailed { cut, error });
                }
                let part = &self.parts[&partition.0];
                let file = (partition.0, encode(part), part.updates());
                context.after(0, 60, Timer::Written { cut, generation, folder, file });
            }
            Timer::Written { cut, generation, folder, file } => {
                self.written(context, cut, generation, &folder, file);
            }
            other => panic!("a server never set {other:?}"),
        }
    }

    fn call_master(&mut self, context: &mut Context<'_>) {
        let Some(master) = context.disk.master else {
            return context.after(20, 200, Timer::Reconnect);
        };
        // What is being replaced is not held any more.
        let is_whole = self.loading.is_none();
        let hello = Message::PsHello {
            ps: self.ps,
            incarnation: self.incarnation,
            pid: context.pid,
            generation: if is_whole { self.generation } else { Generation(0) },
            sets: if is_whole { states(&self.parts) } else { Vec::new() },
        };
        self.master = Some(context.connect(master, hello));
    }

    fn tell(&mut self, context: &mut Context<'_>, message: Message) {
        match self.master {
            Some(master) => context.send(master, message),
            None if matches!(message, Message::Heartbeat) => {}
            None => self.outbox.push(message),
        }
    }

    fn serves(&self, generation: Generation) -> bool {
        self.is_serving && generation == self.generation
    }

    fn obey(&mut self, context: &mut Context<'_>, order: PsOrder) {
        match order {
            PsOrder::Load { generation, from } => {
                // What is loaded already may have been trained since: it is never loaded again.
                if generation <= self.generation || Some(generation) <= self.loading {
                    return;
                }
                self.loading = Some(generation);
                self.is_serving = false;
                context.after(5, 80, Timer::Load { generation, checkpoint: from.checkpoint });
            }
            PsOrder::Serve { generation } => self.is_serving = generation == self.generation,
            PsOrder::Cut { cut, generation, folder, .. } => {
                if generation != self.generation {
                    let error = "another generation is held".into();
                    return self.tell(context, Message::CutFailed { cut, error });
                }
                if !self.cuts.is_empty() {
                    let error = "another cut is still being written".into();
                    return self.tell(context, Message::CutFailed { cut, error });
                }
                self.cuts.insert(cut, Vec::new());
                for partition in self.parts.keys().copied().map(PartitionId).collect::<Vec<_>>() {
                    let folder = folder.clone();
                    context.after(0, 30, Timer::Snapshot { cut, generation, folder, partition });
                }
            }
            PsOrder::Welcome | PsOrder::Stop(_) => {}
        }
    }

    fn load(
        &mut self,
        context: &mut Context<'_>,
        generation: Generation,
        checkpoint: Option<String>,
    ) {
        if self.loading != Some(generation) {
            return;
        }
        self.loading = None;
        let n_ps = context.scenario.spec.num_ps_pods;
        let hosted = context.counter.layout.hosted(self.ps, n_ps);
        let loaded = match checkpoint {
            Some(folder) => context.disk.load(context.counter, &folder, hosted),
            None => Ok(context.counter.fresh(hosted)),
        };
        match loaded {
            Ok(parts) => {
                self.parts = parts;
                self.generation = generation;
                self.waiting.clear();
                self.pulls.clear();
                let sets = states(&self.parts);
                self.tell(context, Message::Loaded { generation, sets });
            }
            Err(error) => self.tell(context, Message::LoadFailed { generation, error }),
        }
    }

    /// Every owner gets to the push in its own time, but in the order of pushes.
    fn take(&mut self, context: &mut Context<'_>, conn: ConnId, push: Arc<Push>) {
        self.waiting.entry(push.batch).or_default().push(conn);
        let generation = self.generation;
        for partition in self.parts.keys().copied() {
            let delay = context.kernel.between(0, 4);
            let at = context.kernel.now + delay;
            let busy = self.busy_until.entry(partition).or_default();
            *busy = at.max(*busy);
            let push = Arc::clone(&push);
            let apply = Timer::Apply { partition, generation, push };
            context.kernel.schedule_at(context.pid, *busy, apply);
        }
    }

    fn apply(&mut self, context: &mut Context<'_>, partition: u32, push: &Arc<Push>) {
        let part = self.parts.get_mut(&partition).expect("a push is for hosted partitions");
        let applied = match part.push(push) {
            Pushed::Already | Pushed::Applied => vec![push.batch],
            Pushed::Round(batches) => batches,
            Pushed::Staged => return,
            Pushed::Refused(refusal) => panic!("a good push is refused: {refusal}"),
        };
        part.check_invariants();
        for batch in applied {
            if self.parts.values().all(|part| part.applied().contains(batch)) {
                let generation = self.generation;
                for conn in self.waiting.remove(&batch).unwrap_or_default() {
                    context.send(conn, Message::Acked { batch, generation });
                }
            }
        }
        self.answer_pulls(context);
    }

    /// In synchronous mode a pull waits for the rounds before its own.
    fn answer_pulls(&mut self, context: &mut Context<'_>) {
        let round = self.parts.values().map(|part| part.round()).min().unwrap_or(0);
        let ready: Vec<_> = self.pulls.extract_if(.., |(_, _, min)| *min <= round).collect();
        let dense = || self.parts.values().flat_map(|part| part.dense());
        let sum: f64 = dense().copied().map(f64::from).sum();
        let n = dense().count() as u64;
        let version = self.parts.values().map(|part| part.version()).min().unwrap_or(0);
        for (conn, request, _) in ready {
            context.send(conn, Message::Pulled { request, version, sum, n });
        }
    }

    fn written(
        &mut self,
        context: &mut Context<'_>,
        cut: CutId,
        generation: Generation,
        folder: &str,
        (partition, bytes, updates): (u32, Vec<u8>, u64),
    ) {
        let is_full = context.disk.is_full;
        let Some(place) = context.disk.folders.get_mut(folder).filter(|_| !is_full) else {
            self.cuts.remove(&cut);
            let error = "the file cannot be written".into();
            return self.tell(context, Message::CutFailed { cut, error });
        };
        let file = CutFile {
            partition,
            name: format!("partition-{partition:05}.edlp"),
            bytes: bytes.len() as u64,
            checksum: checksum(&bytes),
            updates,
        };
        place.files.insert(partition, bytes);
        let Some(files) = self.cuts.get_mut(&cut) else { return };
        files.push(file);
        let written: BTreeSet<u32> = files.iter().map(|file| file.partition).collect();
        if written.len() == self.parts.len() {
            let files = self.cuts.remove(&cut).unwrap_or_default();
            self.tell(context, Message::CutDone { cut, generation, files });
        }
    }
}

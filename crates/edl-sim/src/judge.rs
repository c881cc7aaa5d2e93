// SPDX-License-Identifier: Apache-2.0
//! Checks what no process can see alone: that every record counts once, that every state is the
//! one that a single worker would have, and that nothing counted is lost.

use std::collections::{BTreeMap, BTreeSet};

use edl_core::batch::batch_of;
use edl_core::evaluation::Evaluated;
use edl_core::id::{BatchId, Generation, Term, WorkerId, WorldId};
use edl_core::job::{End, EventKind, Job, MemberReport, Note};
use edl_core::metric::{Measures, Metric};
use edl_core::spec::OnNonfinite;
use edl_core::worker::Report;
use edl_core::world::{Member, Worlds};

use crate::client::Pulled;
use crate::disk::Disk;
use crate::history::DenseState;
use crate::kernel::Pid;
use crate::model::Model;
use crate::scenario::Scenario;
use crate::site::Site;

#[derive(Default)]
pub(crate) struct Judge {
    pub(crate) spoiled: BTreeSet<String>,
    pub(crate) exported: Option<String>,
    /// What a worker held when it reported that it had formed a world.
    pub(crate) formed: BTreeMap<(WorkerId, WorldId), DenseState>,
    pub(crate) regions: BTreeMap<Pid, Region>,
    /// The batches and lanes whose gradients were computed, if none may be computed twice.
    computed: BTreeSet<(BatchId, u32)>,
    /// Who reads the memory of the other members now, and in which world.
    pub(crate) reading: BTreeMap<Pid, WorldId>,
    /// Which process took the slot of which.
    evictions: BTreeSet<(Pid, Pid)>,
}

/// The memory of a worker that other members of its world read.
pub(crate) struct Region {
    /// The world in which it is overwritten.
    pub(crate) world: WorldId,
    pub(crate) members: Vec<Pid>,
    /// The last world that the worker entered without waiting for all members of the one before.
    pub(crate) forced: WorldId,
}

/// In synchronous mode, a batch starts from parameters that hold every round before its own.
pub(crate) fn started(model: &Model, batch: BatchId, pulled: &Pulled) {
    let Some(n_records) = model.records_before_round(batch) else { return };
    for dense in &pulled.dense {
        expect_at_least("dense number", *dense, n_records, batch);
    }
    let n_epochs = u64::from(batch.epoch) - u64::from(model.lost_records(batch));
    for row in &pulled.rows {
        expect_at_least("row", *row, n_epochs, batch);
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts stay small")]
fn expect_at_least(what: &str, value: f32, least: u64, batch: BatchId) {
    let is_there = value + 0.01 > least as f32;
    assert!(is_there, "{batch} starts from a {what} of {value}, before {least} records");
}

impl Judge {
    /// Whether `owner` has overwritten what `reader` reads of it in a step of `world`.
    ///
    /// # Panics
    /// If `owner` has left that world in order: then every member had its last step.
    pub(crate) fn is_overwritten(&self, world: WorldId, owner: Pid, reader: Pid) -> bool {
        let Some(region) = self.regions.get(&owner) else { return false };
        let is_overwritten = region.world > world && !region.members.contains(&reader);
        let is_excused = region.forced > world;
        assert!(!is_overwritten || is_excused, "process {owner} left process {reader} behind");
        is_overwritten
    }

    /// A worker has computed the gradient of a batch, or of one lane of it.
    pub(crate) fn computed(&mut self, scenario: &Scenario, batch: BatchId, lane: u32) {
        if scenario.is_undisturbed {
            let is_new = self.computed.insert((batch, lane));
            assert!(is_new, "lane {lane} of batch {batch} is computed twice");
        }
    }

    /// `owner` overwrites its memory from now on. What it has left in order, no other still reads.
    pub(crate) fn overwrites(&mut self, owner: Pid, region: Region) {
        let before = self.regions.get(&owner).filter(|before| before.world < region.world);
        for reader in before.iter().flat_map(|before| &before.members) {
            let world = self.reading.get(reader).filter(|world| **world < region.world);
            let is_behind = world.is_some_and(|world| region.forced <= *world);
            let stays = *reader == owner || region.members.contains(reader);
            assert!(stays || !is_behind, "process {owner} leaves process {reader} behind");
        }
        self.regions.insert(owner, region);
    }

    /// A process takes the slot of another one. The other must not take it back.
    pub(crate) fn evicted(&mut self, old: Pid, new: Pid) {
        assert!(!self.evictions.contains(&(new, old)), "{old} and {new} evict each other");
        self.evictions.insert((old, new));
    }

    /// What a member that counts holds is what a single worker would hold.
    pub(crate) fn received(&self, model: &Model, job: &Job, worker: WorkerId, report: &Report) {
        let Report::Member(news) = report else { return };
        let worlds = job.worlds().expect("workers are members of worlds");
        match news {
            MemberReport::Formed { world, step, .. } => {
                let current = worlds.current().filter(|current| current.id == *world);
                if current.is_some_and(|c| c.members.iter().any(|m| m.worker == worker)) {
                    let held = self.formed.get(&(worker, *world));
                    let expected = model.history.state(*step);
                    assert_eq!(held, Some(&expected), "{worker} formed a different state");
                }
            }
            MemberReport::Stepped { world, step, hash, .. }
                if worlds.is_heard(*world) && *hash != 0 =>
            {
                assert_eq!(*hash, model.history.gradient_of(*step), "step {step} on {worker}");
            }
            MemberReport::Stepped { .. }
            | MemberReport::Paused { .. }
            | MemberReport::Pace { .. }
            | MemberReport::PeerLost { .. }
            | MemberReport::StepFailed { .. }
            | MemberReport::NonFinite { .. }
            | MemberReport::Quit { .. }
            | MemberReport::StepMismatch { .. }
            | MemberReport::NotLoaded { .. } => {}
        }
    }

    /// If no world follows, the members of the last one count until they have left it in order.
    pub(crate) fn heard(&self, job: &Job, replaced: Option<WorldId>, report: &Report) {
        let Report::Member(MemberReport::Stepped { world, step, .. }) = report else { return };
        let Some(worlds) = job.worlds().filter(|worlds| worlds.current().is_none()) else { return };
        let is_member = replaced.is_some_and(|replaced| *world >= replaced);
        assert!(!is_member || worlds.is_heard(*world), "step {step} of {world:?} is ignored");
    }

    /// Within one generation, steps are taken back only if no member of the world holds them.
    pub(crate) fn advanced(&self, job: &Job, (generation, n_done): (Generation, u64)) {
        let now_done = job.ledger().n_done();
        let Some(worlds) = job.worlds() else { return };
        if job.durable().generation != generation || now_done >= n_done {
            return;
        }
        let members = worlds.current().map_or(&[][..], |world| &world.members);
        for member in members {
            let step = job.peer(member.worker).and_then(|peer| peer.step);
            let is_ahead = member.has_state && step > Some(now_done);
            assert!(!is_ahead, "{} holds step {step:?}, but {now_done} counts", member.worker);
        }
    }

    /// A world does not wait for a worker that is frozen, unless there is no other.
    pub(crate) fn noted(&self, job: &Job, note: &Note) {
        let is_frozen = note.kind == EventKind::Stuck && note.text.ends_with("without it");
        let settled = job.worlds().filter(|worlds| is_frozen && worlds.is_settled());
        let Some(world) = settled.and_then(Worlds::current) else { return };
        let is_it = |m: &Member| note.text.starts_with(&format!("worker-{} ", m.worker));
        let waits = world.members.len() > 1 && world.members.iter().any(is_it);
        assert!(!waits, "{}, but the world is {world:?}", note.text);
    }

    /// A checkpoint holds all partitions; where a job trains in steps, they are all of one step.
    pub(crate) fn committed(&self, model: &Model, disk: &Disk, folder: &str, version: u64) {
        for partition in 0..model.layout.n_partitions {
            let snapshot = disk.read(folder, partition).expect("it is complete");
            if model.is_state(partition) {
                let state = DenseState::of(&snapshot);
                let expected = model.history.state(version);
                assert_eq!(state, expected, "partition {partition} of {folder}");
            } else {
                let n_updates = model.restore(snapshot).updates();
                let is_exact = n_updates == version || model.history.n_steps() == 0;
                assert!(is_exact, "partition {partition} of {folder} is of step {n_updates}");
            }
        }
    }

    /// An evaluation is of an exact version: every batch before it, and no other.
    pub(crate) fn evaluated(
        &self,
        model: &Model,
        scenario: &Scenario,
        job: &Job,
        evaluated: &Evaluated,
    ) {
        let spec = &scenario.spec;
        let found = evaluated.metrics["loss"];
        if spec.step_lanes().is_none() {
            if spec.evaluation_secs > 0 && job.config().term > Term(1) {
                // Where the clock sets the barrier, a new master cannot know what the one before
                // it has assigned after the barrier to a worker that has not connected yet.
                return;
            }
            let position = job.ledger().position_of(evaluated.version);
            #[expect(clippy::cast_precision_loss, reason = "counts stay small")]
            let expected = model.records_before(position) as f64;
            let version = evaluated.version;
            let is_exact = (found.abs() - expected).abs() < 0.01;
            return assert!(is_exact, "version {version} has {found} records, not {expected}");
        }
        let per_shard = u64::from(spec.minibatch_size * spec.num_minibatches_per_task);
        let n_shards = scenario.n_validation_records.div_ceil(per_shard);
        let state = model.history.state(evaluated.version);
        let mut all = Measures::new(&[Metric::loss()]);
        for shard in 0..u32::try_from(n_shards).expect("few shards") {
            let mut measures = Measures::new(&[Metric::loss()]);
            measures.add_loss(state.measure(shard), 1);
            all.merge(&measures);
        }
        let expected = all.values()["loss"];
        // Shards are added in the order in which they come.
        let is_exact = (found - expected).abs() < 1e-9;
        assert!(is_exact, "version {} is {found}, not {expected}", evaluated.version);
    }

    /// The model that was kept as the best one is one that was evaluated as such, and the batches
    /// that are known as skipped are those that were.
    pub(crate) fn ended(&self, scenario: &Scenario, disk: &Disk, job: &Job) {
        let durable = job.durable();
        let skipped = scenario.skipped().map(|step| (step, job.ledger().batch_at(step)));
        // Before the end of a job, the batch may be missing among those that are done.
        let is_known = |(step, batch)| {
            let is_trained = durable.end == Some(End::Succeeded) && step < job.ledger().n_done();
            !is_trained || durable.skipped.contains(&batch)
        };
        assert!(skipped.is_none_or(is_known), "{skipped:?} is missing among the skipped batches");
        let mut others = durable.skipped.iter().filter(|it| skipped.map(|(_, b)| b) != Some(**it));
        assert_eq!(others.next(), None, "a batch was skipped that is finite");
        let Some(best) = durable.best.as_ref().filter(|_| job.worlds().is_some()) else { return };
        let version = disk.manifest(best).expect("the best model is kept").version;
        let best: BTreeSet<u64> =
            durable.evaluations.iter().filter(|e| e.is_best).map(|e| e.version).collect();
        assert!(best.contains(&version), "version {version} is none of the best {best:?}");
    }
}

impl Site {
    /// Where the training of a job that trains in steps ends, unless it stops early.
    pub(crate) fn last_step(&self) -> u64 {
        self.scenario.quits_after.unwrap_or(self.model.history.n_steps())
    }

    /// Checks the result of the whole job.
    pub(crate) fn check_end(&mut self, end: &End) {
        let spec = &self.scenario.spec;
        if let (Some(step), End::Failed(why)) = (self.scenario.untrainable, end) {
            let n_batches = u64::from(self.model.plan.n_batches());
            let batch = format!("batch {}/{} ", step / n_batches, step % n_batches);
            assert!(why.contains(&batch) && why.contains(" times, most recently on"), "{why}");
            return self.kernel.count("named failures");
        }
        if let (Some(step), End::Failed(why)) = (self.scenario.nonfinite, end) {
            let batch = batch_of(step, self.model.plan.n_batches());
            assert_eq!(spec.on_nonfinite, OnNonfinite::Stop, "{why}");
            assert!(why.starts_with(&format!("batch {batch} ")) && why.contains("finite"), "{why}");
            return self.kernel.count("stopped because of a loss");
        }
        assert_eq!(*end, End::Succeeded);
        let folder = self.judge.exported.as_ref().expect("a job that succeeds exports its model");
        let mut n_epochs = spec.num_epochs;
        if spec.step_lanes().is_some() {
            let snapshot = self.disk.read(folder, 0);
            let state = DenseState::of(&snapshot.expect("the exported checkpoint is complete"));
            let is_early = spec.early_stop_patience > 0;
            let last = self.last_step();
            assert!(if is_early { state.step <= last } else { state.step == last });
            let untrainable = self.scenario.untrainable;
            assert!(untrainable.is_none_or(|step| state.step <= step), "no worker can train it");
            if self.scenario.quits_after == Some(state.step) {
                self.kernel.count("script left its loop");
            }
            self.judge.committed(&self.model, &self.disk, folder, state.step);
            if state.step < self.model.history.n_steps() {
                n_epochs = 0;
            }
        }
        if spec.n_servers() > 0 && n_epochs > 0 {
            self.model.expect_trained(&self.disk, folder, n_epochs);
        }
    }
}

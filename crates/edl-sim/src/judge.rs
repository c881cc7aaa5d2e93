// SPDX-License-Identifier: Apache-2.0
//! Checks what no process can see alone: that every record counts once, that every state is the
//! one that a single worker would have, and that nothing counted is lost.

use std::collections::{BTreeMap, BTreeSet};

use edl_core::evaluation::Evaluated;
use edl_core::id::{Generation, Term, WorkerId, WorldId};
use edl_core::job::{End, Event, Job, News};
use edl_core::metric::{Measures, Metric};

use crate::disk::Disk;
use crate::history::State;
use crate::kernel::Pid;
use crate::model::Model;
use crate::scenario::Scenario;
use crate::site::Site;

#[derive(Default)]
pub(crate) struct Judge {
    pub(crate) spoiled: BTreeSet<String>,
    pub(crate) exported: Option<String>,
    /// What a worker held when it reported that it had formed a world.
    pub(crate) formed: BTreeMap<(WorkerId, WorldId), State>,
    /// In which world a worker overwrites its shared memory, and the members of that world.
    pub(crate) regions: BTreeMap<Pid, (WorldId, Vec<Pid>)>,
}

impl Judge {
    /// What a member that counts holds is what a single worker would hold.
    pub(crate) fn received(&self, model: &Model, job: &Job, event: &Event) {
        let Event::Member { worker, news, .. } = event else { return };
        let worlds = job.worlds().expect("workers are members of worlds");
        match news {
            News::Formed { world, step, .. } => {
                let current = worlds.current().filter(|current| current.id == *world);
                if current.is_some_and(|c| c.members.iter().any(|m| m.worker == *worker)) {
                    let held = self.formed.get(&(*worker, *world));
                    let expected = model.history.state(*step);
                    assert_eq!(held, Some(&expected), "{worker} formed a different state");
                }
            }
            News::Stepped { world, step, hash, .. } if worlds.is_heard(*world) && *hash != 0 => {
                assert_eq!(*hash, model.history.gradient_of(*step), "step {step} on {worker}");
            }
            News::Stepped { .. }
            | News::Pace { .. }
            | News::PeerLost { .. }
            | News::StepFailed { .. }
            | News::Torn { .. }
            | News::NotLoaded { .. } => {}
        }
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

    /// A checkpoint of workers holds one state, in all its partitions.
    pub(crate) fn committed(&self, model: &Model, disk: &Disk, folder: &str, version: u64) {
        if model.history.n_steps() == 0 {
            return;
        }
        for partition in model.layout.with_segments() {
            let file = disk.read(folder, partition).expect("it is complete");
            let state = State::decode(file);
            assert_eq!(state, model.history.state(version), "partition {partition} of {folder}");
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
        if !spec.is_allreduce() {
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

    /// The model that was kept as the best one is one that was evaluated as such.
    pub(crate) fn ended(&self, disk: &Disk, job: &Job) {
        let durable = job.durable();
        let Some(best) = durable.best.as_ref().filter(|_| job.worlds().is_some()) else { return };
        let version = disk.manifest(best).expect("the best model is there").version;
        let best: BTreeSet<u64> =
            durable.evaluations.iter().filter(|e| e.is_best).map(|e| e.version).collect();
        assert!(best.contains(&version), "version {version} is none of the best {best:?}");
    }
}

impl Site {
    /// Checks the result of the whole job.
    pub(crate) fn check_end(&mut self, end: &End) {
        let spec = &self.scenario.spec;
        if let (Some(step), End::Failed(why)) = (self.scenario.untrainable, end) {
            let n_batches = u64::from(self.model.plan.n_batches());
            let batch = format!("batch {}/{} ", step / n_batches, step % n_batches);
            assert!(why.contains(&batch) && why.contains(" times, most recently on"), "{why}");
            return self.kernel.count("named failures");
        }
        assert_eq!(*end, End::Succeeded);
        let folder = self.judge.exported.as_ref().expect("a job that succeeds exports its model");
        let mut n_epochs = spec.num_epochs;
        if spec.is_allreduce() {
            let file = self.disk.read(folder, 0).expect("the exported checkpoint is complete");
            let state = State::decode(file);
            let is_early = spec.early_stop_patience > 0;
            if !is_early || self.scenario.untrainable.is_some_and(|step| state.step > step) {
                assert_eq!(state.step, self.model.history.n_steps());
                assert_eq!(self.scenario.untrainable, None, "no worker can train it");
            }
            self.judge.committed(&self.model, &self.disk, folder, state.step);
            if state.step < self.model.history.n_steps() {
                n_epochs = 0;
            }
        }
        if spec.has_servers() && n_epochs > 0 {
            self.model.expect_trained(&self.disk, folder, n_epochs);
        }
    }
}

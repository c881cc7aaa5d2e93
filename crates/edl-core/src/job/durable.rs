// SPDX-License-Identifier: Apache-2.0
//! What a job remembers when its master restarts, and the only way to change it.

use std::collections::BTreeSet;
use std::ops::{Deref, Range};

use serde::{Deserialize, Serialize};

use super::{CheckpointRef, Effect, End};
use crate::checkpoint_name::CheckpointName;
use crate::evaluation::{Evaluated, Evaluation, is_best};
use crate::id::{BatchId, Generation, Incarnation, WorkerId};
use crate::model::ModelSpec;

/// What must survive the master. It is on disk before any process learns of it, as a table of facts
/// (`facts.rs`); earlier builds stored it as one JSON value, which can still be read.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Durable {
    pub generation: Generation,
    pub model: Option<ModelSpec>,
    pub checkpoints: Vec<CheckpointRef>,
    pub evaluations: Vec<Evaluated>,
    /// Folder of the checkpoint with the best evaluation.
    pub best: Option<String>,
    pub workers_wanted: Option<u32>,
    pub failures: Vec<Failure>,
    /// Batches that are not trained because their loss or gradient was not finite.
    #[serde(default)]
    pub skipped: BTreeSet<BatchId>,
    /// The gradient's hash that every worker must agree on, under AllReduce.
    #[serde(default)]
    pub probe: Option<u64>,
    /// The workers whose state counts, under AllReduce; all of them before the first world.
    #[serde(default)]
    pub holders: Option<Vec<(WorkerId, Incarnation)>>,
    /// Parameter servers that were lost or have a successor.
    #[serde(default)]
    pub replaced_servers: BTreeSet<Incarnation>,
    /// Workers with different arithmetic took part: results depend on which of them computed.
    #[serde(default)]
    pub bits_differ: bool,
    /// Where training ends, because the training script has left its loop there.
    #[serde(default)]
    pub last_step: Option<u64>,
    /// Seconds that earlier masters of this job have worked.
    pub elapsed_secs: f64,
    pub end: Option<End>,
}

/// A piece of work that went wrong, and how often.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub work: Suspect,
    pub n_failures: u32,
}

/// A piece of work that may be at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Suspect {
    Batch(BatchId),
    EvalShard(u32),
    PredictShard(u32),
}

/// A complete checkpoint of the job's run, as its manifest describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct FoundCheckpoint {
    pub folder: String,
    pub generation: Generation,
    pub version: u64,
    pub exact: Option<u64>,
    pub model: ModelSpec,
    pub skipped: BTreeSet<BatchId>,
}

impl Durable {
    /// Takes in the complete checkpoints on disk, the newest last, and returns how many of them were
    /// unknown: the master died before it recorded them, or its store was lost.
    pub fn adopt(&mut self, found: Vec<FoundCheckpoint>) -> usize {
        let n_known = self.checkpoints.len();
        for found in found {
            let FoundCheckpoint { folder, generation, version, exact, model, skipped } = found;
            self.skipped.extend(skipped);
            self.generation = self.generation.max(generation);
            if self.checkpoints.iter().any(|known| known.folder == folder) {
                continue;
            }
            self.model.get_or_insert(model);
            self.checkpoints.push(CheckpointRef { folder, version, exact, is_bad: false });
        }
        self.sort_checkpoints();
        self.checkpoints.len() - n_known
    }

    /// A user resumes the job: only what is true of its parameters and its data is kept.
    pub fn resume(&mut self) {
        self.failures.clear();
        // What the flags say counts again.
        self.workers_wanted = None;
        // The script has left its loop, and that job is over. In this one, it decides again.
        if self.end == Some(End::Succeeded) {
            self.last_step = None;
        }
    }

    /// The newest last. Names of earlier builds cannot be read, and are of older checkpoints.
    pub(super) fn sort_checkpoints(&mut self) {
        self.checkpoints.sort_by_cached_key(|checkpoint| {
            (CheckpointName::parse(&checkpoint.folder), checkpoint.version)
        });
    }

    /// Counts a failure of `work`; returns how often it has failed.
    pub(super) fn count_failure(&mut self, work: Suspect) -> u32 {
        let known = self.failures.iter().position(|failure| failure.work == work);
        let place = known.unwrap_or_else(|| {
            self.failures.push(Failure { work, n_failures: 0 });
            self.failures.len() - 1
        });
        self.failures[place].n_failures += 1;
        self.failures[place].n_failures
    }

    /// The batches among `range` of an epoch that are skipped.
    pub(super) fn skipped_in(&self, epoch: u32, range: &Range<u32>) -> Vec<u32> {
        let batch = |index| BatchId { epoch, index };
        let skipped = self.skipped.range(batch(range.start)..batch(range.end));
        skipped.map(|batch| batch.index).collect()
    }

    /// A checkpoint of exactly the batches before `position`.
    pub(super) fn exact_checkpoint(&self, position: u64) -> Option<&CheckpointRef> {
        self.checkpoints.last().filter(|c| c.exact == Some(position) && !c.is_bad)
    }

    /// The newest checkpoint that can be loaded.
    pub(super) fn latest_checkpoint(&self) -> Option<&CheckpointRef> {
        self.checkpoints.iter().rev().find(|checkpoint| !checkpoint.is_bad)
    }

    /// Adds a result to the history. After a restore, earlier results for this version or a later
    /// one are of a model that was discarded.
    pub(super) fn add_evaluation(&mut self, evaluation: &Evaluation) -> Evaluated {
        let (version, epoch) = (evaluation.version, evaluation.epoch);
        self.evaluations.retain(|evaluated| evaluated.version < version);
        let order = self.model.as_ref().map_or(&[][..], |model| &model.metrics);
        let metrics = evaluation.values(order);
        let is_best = is_best(order, &metrics, &self.evaluations);
        let evaluated = Evaluated { version, epoch, metrics, is_best };
        self.evaluations.push(evaluated.clone());
        evaluated
    }
}

/// The durable facts of a running job. Every change orders a `Persist` of what differs, right where it
/// happens.
#[derive(Clone, Debug)]
pub(super) struct Persisted(Durable);

impl Persisted {
    pub(super) fn new(durable: Durable) -> Self {
        Self(Durable { end: None, ..durable })
    }

    pub(super) fn change<T>(
        &mut self,
        effects: &mut Vec<Effect>,
        change: impl FnOnce(&mut Durable) -> T,
    ) -> T {
        let before = self.0.clone();
        let result = change(&mut self.0);
        let facts = self.0.changes(&before);
        if !facts.is_empty() {
            effects.push(Effect::Persist(facts));
        }
        result
    }
}

impl Deref for Persisted {
    type Target = Durable;

    fn deref(&self) -> &Durable {
        &self.0
    }
}

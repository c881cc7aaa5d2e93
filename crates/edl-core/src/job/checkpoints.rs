// SPDX-License-Identifier: Apache-2.0
//! Checkpoints: when one is due, when it is complete, which ones are kept.
//!
//! A checkpoint can be taken at any moment, because the applied set of each partition is saved
//! with its rows. Only one checkpoint is written at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Durable;
use crate::checkpoint_name::CheckpointName;
use crate::id::{CheckpointId, Generation, PsId, RunId, WorkerId};
use crate::spec::JobSpec;
use crate::time::Time;

/// A failed final checkpoint is retried after this pause, which doubles with each failure.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const MAX_RETRY_AFTER: Duration = Duration::from_secs(4);
/// About a day: it may take until someone is awake to free the disk.
const MAX_FINAL_TRIES: u32 = 20_000;
/// A checkpoint that takes longer has failed: storage hangs.
const WRITE_TIMEOUT: Duration = Duration::from_secs(600);

/// A checkpoint that is complete.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CheckpointRef {
    /// Name of the folder below the job's checkpoints.
    pub folder: String,
    pub version: u64,
    /// Set if no work was in progress: it holds exactly the batches before this position.
    pub exact: Option<u64>,
    /// It could not be loaded once, and is not tried again.
    pub is_bad: bool,
}

/// One partition's file in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CheckpointFile {
    pub partition: u32,
    pub name: String,
    pub bytes: u64,
    pub checksum: String,
    pub updates: u64,
}

/// A process that writes files of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CheckpointWriter {
    Ps(PsId),
    Worker(WorkerId),
}

/// A checkpoint in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InProgress {
    pub run: RunId,
    pub id: CheckpointId,
    pub version: u64,
    pub generation: Generation,
    pub exact: Option<u64>,
    /// Servers that may not know of it yet: no worker may pass its step.
    pub unaware: BTreeSet<PsId>,
    /// The processes whose files are missing.
    pub waiting: BTreeSet<CheckpointWriter>,
}

impl InProgress {
    pub(super) fn folder(&self) -> String {
        let Self { run, id: checkpoint, version, generation, .. } = *self;
        CheckpointName { generation, version, checkpoint, run }.to_string()
    }
}

/// What the files of one process mean for the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// They do not belong to it, or others are missing.
    Waiting,
    /// All processes are done, but some partitions are missing.
    Incomplete,
    Complete {
        version: u64,
        exact: Option<u64>,
        folder: String,
        files: Vec<CheckpointFile>,
    },
}

/// The checkpoint in progress, the time of the last one, and retries.
#[derive(Clone, Debug)]
pub(super) struct Checkpoints {
    every: Duration,
    steps: u64,
    n_kept: usize,
    n_partitions: usize,
    timeout: Duration,
    checkpoint: Option<InProgress>,
    files: BTreeMap<u32, CheckpointFile>,
    deadline: Time,
    last_at: Time,
    last_version: u64,
    /// A failed last checkpoint is not retried before this.
    not_before: Time,
    n_final_tries: u32,
    /// Why the last one failed.
    failure: Option<String>,
}

impl Checkpoints {
    /// `is_replaceable`: others can write what a slow process does not.
    pub(super) fn new(spec: &JobSpec, is_replaceable: bool, now: Time) -> Self {
        let patience = spec.task_timeout() * 2;
        let timeout = if is_replaceable { WRITE_TIMEOUT.min(patience) } else { WRITE_TIMEOUT };
        Self {
            every: Duration::from_secs(u64::from(spec.checkpoint_secs)),
            steps: u64::from(spec.checkpoint_steps),
            n_kept: spec.keep_checkpoint_max as usize,
            n_partitions: spec.layout(0).n_partitions as usize,
            timeout,
            checkpoint: None,
            files: BTreeMap::new(),
            deadline: now,
            last_at: now,
            last_version: 0,
            not_before: now,
            n_final_tries: 0,
            failure: None,
        }
    }

    /// Whether the interval in time or in versions is over, and none is being written.
    pub(super) fn is_due(&self, version: impl FnOnce() -> u64, now: Time) -> bool {
        let by_time = !self.every.is_zero() && now.since(self.last_at) >= self.every;
        if self.checkpoint.is_some() || !by_time && self.steps == 0 {
            return false;
        }
        let version = version();
        let n_before = |version: u64| version.checked_div(self.steps);
        let by_step = n_before(version) > n_before(self.last_version);
        version > self.last_version && (by_time || by_step)
    }

    pub(super) fn is_writing(&self) -> bool {
        self.checkpoint.is_some()
    }

    /// The version of the one in progress.
    pub(super) fn in_progress(&self) -> Option<u64> {
        self.checkpoint.as_ref().map(|checkpoint| checkpoint.version)
    }

    /// Whether a worker that passes the step of the one in progress could make it fail: a server
    /// that learns of it too late no longer has the state of its step.
    pub(super) fn must_not_pass(&self) -> bool {
        self.checkpoint.as_ref().is_some_and(|checkpoint| !checkpoint.unaware.is_empty())
    }

    pub(super) fn started(&mut self, ps: PsId, id: CheckpointId) {
        if let Some(checkpoint) = self.checkpoint.as_mut().filter(|it| it.id == id) {
            checkpoint.unaware.remove(&ps);
        }
    }

    /// The version of the one whose files are all written, and only the manifest is missing.
    pub(super) fn committing(&self) -> Option<u64> {
        let checkpoint = self.checkpoint.as_ref().filter(|it| it.waiting.is_empty());
        checkpoint.map(|checkpoint| checkpoint.version)
    }

    /// Whether a pause after a failure is not over.
    pub(super) fn is_paused(&self, now: Time) -> bool {
        now < self.not_before
    }

    /// Why the last one failed.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Remembers why the last one failed.
    pub(super) fn failed(&mut self, why: &str) {
        self.failure = Some(why.into());
    }

    /// Something was written since.
    pub(super) fn forget_failure(&mut self) {
        self.failure = None;
    }

    /// Whether the final one, or the result, has failed before.
    pub(super) fn is_retrying_final(&self) -> bool {
        self.n_final_tries > 0
    }

    /// Whether one can begin: none is being written, and the pause after a failure is over.
    pub(super) fn can_begin(&self, now: Time) -> bool {
        self.checkpoint.is_none() && !self.is_paused(now)
    }

    pub(super) fn begin(&mut self, checkpoint: InProgress, now: Time) {
        (self.last_at, self.last_version) = (now, checkpoint.version);
        self.deadline = now + self.timeout;
        self.files.clear();
        self.checkpoint = Some(checkpoint);
    }

    /// When the one in progress is overdue, the next one is due, or a pause ends.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = Time> + '_ {
        let overdue = self.checkpoint.as_ref().map(|_| self.deadline);
        let due = (!self.every.is_zero()).then(|| self.last_at + self.every);
        overdue.into_iter().chain(due).chain([self.not_before])
    }

    /// A checkpoint of a step that is not trained yet is not late.
    pub(super) fn wait_for_step(&mut self, n_done: u64, now: Time) {
        if self.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.version > n_done) {
            self.deadline = now + self.timeout;
        }
    }

    /// The checkpoint that takes too long, the workers that delay it, and an error.
    pub(super) fn overdue(&self, now: Time) -> Option<(CheckpointId, Vec<WorkerId>, String)> {
        let checkpoint = self.checkpoint.as_ref().filter(|_| now >= self.deadline)?;
        // The state of a worker is also on others; a slow server has no substitute.
        let workers = checkpoint.waiting.iter().filter_map(|holder| match holder {
            CheckpointWriter::Worker(worker) => Some(*worker),
            CheckpointWriter::Ps(_) => None,
        });
        Some((checkpoint.id, workers.collect(), format!("not complete after {:?}", self.timeout)))
    }

    /// Takes the files of one process. Files of an older generation are ignored, so no manifest
    /// ever lists what a replaced process wrote.
    pub(super) fn written(
        &mut self,
        holder: CheckpointWriter,
        id: CheckpointId,
        generation: Generation,
        files: Vec<CheckpointFile>,
    ) -> Progress {
        let is_it = |checkpoint: &&mut InProgress| {
            checkpoint.id == id && checkpoint.generation == generation
        };
        let Some(checkpoint) = self.checkpoint.as_mut().filter(is_it) else {
            return Progress::Waiting;
        };
        if !checkpoint.waiting.remove(&holder) {
            return Progress::Waiting;
        }
        if let CheckpointWriter::Ps(ps) = holder {
            checkpoint.unaware.remove(&ps);
        }
        self.files.extend(files.into_iter().map(|file| (file.partition, file)));
        if !checkpoint.waiting.is_empty() {
            return Progress::Waiting;
        }
        if self.files.len() != self.n_partitions {
            return Progress::Incomplete;
        }
        let files = self.files.values().cloned().collect();
        let InProgress { version, exact, .. } = *checkpoint;
        Progress::Complete { version, exact, folder: checkpoint.folder(), files }
    }

    /// It is committed, so what failed before no longer counts.
    pub(super) fn succeed(&mut self, id: CheckpointId) -> Option<InProgress> {
        self.failure = None;
        self.n_final_tries = 0;
        self.finish(id)
    }

    /// It has failed.
    pub(super) fn finish(&mut self, id: CheckpointId) -> Option<InProgress> {
        self.checkpoint.take_if(|checkpoint| checkpoint.id == id)
    }

    /// Gives up the checkpoint in progress.
    pub(super) fn abandon(&mut self) -> Option<InProgress> {
        self.checkpoint.take()
    }

    /// Gives it up if it waits for this process.
    pub(super) fn abandon_if_waiting_for(
        &mut self,
        holder: CheckpointWriter,
    ) -> Option<InProgress> {
        self.checkpoint.take_if(|checkpoint| checkpoint.waiting.contains(&holder))
    }

    /// Training continues with the model of `version`, as if it had just been saved.
    pub(super) fn continue_from(&mut self, version: u64) {
        self.last_version = version;
    }

    /// Training went back to `version`.
    pub(super) fn go_back_to(&mut self, version: u64) {
        self.n_final_tries = 0;
        self.last_version = self.last_version.min(version);
    }

    pub(super) fn pause(&mut self, now: Time) {
        self.not_before = now + RETRY_AFTER;
    }

    /// The final checkpoint failed; false if it is not tried again.
    pub(super) fn retry_final(&mut self, now: Time) -> bool {
        self.n_final_tries += 1;
        let can_retry = self.n_final_tries < MAX_FINAL_TRIES;
        let pause = RETRY_AFTER * (1 << (self.n_final_tries - 1).min(10));
        self.not_before = now + pause.min(MAX_RETRY_AFTER);
        can_retry
    }

    /// Records a complete checkpoint; returns the folders of those that are no longer kept.
    pub(super) fn record(
        &self,
        checkpoint: &InProgress,
        is_best: bool,
        facts: &mut Durable,
    ) -> Vec<String> {
        let (folder, version, exact) = (checkpoint.folder(), checkpoint.version, checkpoint.exact);
        if is_best {
            facts.best = Some(folder.clone());
        }
        facts.checkpoints.push(CheckpointRef { folder, version, exact, is_bad: false });
        if self.n_kept == 0 {
            return Vec::new();
        }
        // A bad checkpoint cannot be a fallback, so it does not count as kept.
        let good = facts.checkpoints.iter().filter(|checkpoint| !checkpoint.is_bad);
        let mut n_too_many = good.count().saturating_sub(self.n_kept);
        let is_dropped = |c: &mut CheckpointRef| {
            let is_old = n_too_many > 0 && !c.is_bad;
            n_too_many -= usize::from(is_old);
            is_old && facts.best.as_ref() != Some(&c.folder)
        };
        let dropped = facts.checkpoints.extract_if(.., is_dropped);
        dropped.map(|checkpoint| checkpoint.folder).collect()
    }
}

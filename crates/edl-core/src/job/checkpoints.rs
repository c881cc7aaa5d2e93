// SPDX-License-Identifier: Apache-2.0
//! Checkpoints: when one is due, when it is complete, which ones are kept.
//!
//! A checkpoint can be taken at any moment, because the applied set of each partition is saved
//! with its rows. Only one checkpoint is written at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Durable;
use crate::id::{CutId, Generation, PsId, WorkerId};
use crate::spec::JobSpec;
use crate::time::Time;

/// A failed final checkpoint is retried after this pause, which doubles with each failure.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const MAX_FINAL_TRIES: u32 = 5;
/// A checkpoint that takes longer has failed: storage hangs.
const CUT_TIMEOUT: Duration = Duration::from_secs(600);

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
pub struct CutFile {
    pub partition: u32,
    pub name: String,
    pub bytes: u64,
    pub checksum: String,
    pub updates: u64,
}

/// A process that writes files of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holder {
    Ps(PsId),
    Worker(WorkerId),
}

/// A checkpoint in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub id: CutId,
    pub version: u64,
    pub generation: Generation,
    pub exact: Option<u64>,
    /// The processes whose files are missing.
    pub waiting: BTreeSet<Holder>,
}

impl Cut {
    pub(super) fn folder(&self) -> String {
        format!("version-{}.g{}.c{:x}", self.version, self.generation, self.id.0)
    }
}

/// What the files of one process mean for the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// They do not belong to it, or others are missing.
    Waiting,
    /// All processes are done, but not all partitions are there.
    Incomplete,
    Complete {
        version: u64,
        folder: String,
        files: Vec<CutFile>,
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
    cut: Option<Cut>,
    files: BTreeMap<u32, CutFile>,
    deadline: Time,
    last_cut_at: Time,
    last_cut_version: u64,
    /// A failed last checkpoint is not retried before this.
    not_before: Time,
    n_final_tries: u32,
}

impl Checkpoints {
    /// `is_replaceable`: others can write what a slow process does not.
    pub(super) fn new(spec: &JobSpec, is_replaceable: bool, now: Time) -> Self {
        let patience = spec.task_timeout() * 2;
        let timeout = if is_replaceable { CUT_TIMEOUT.min(patience) } else { CUT_TIMEOUT };
        Self {
            every: Duration::from_secs(u64::from(spec.checkpoint_secs)),
            steps: u64::from(spec.checkpoint_steps),
            n_kept: spec.keep_checkpoint_max as usize,
            n_partitions: spec.layout(0).n_partitions as usize,
            timeout,
            cut: None,
            files: BTreeMap::new(),
            deadline: now,
            last_cut_at: now,
            last_cut_version: 0,
            not_before: now,
            n_final_tries: 0,
        }
    }

    /// Whether the interval in time or in versions is over, and none is being written.
    pub(super) fn is_due(&self, version: u64, now: Time) -> bool {
        let by_time = !self.every.is_zero() && now.since(self.last_cut_at) >= self.every;
        let n_before = |version: u64| version.checked_div(self.steps);
        let by_step = n_before(version) > n_before(self.last_cut_version);
        self.cut.is_none() && version > self.last_cut_version && (by_time || by_step)
    }

    pub(super) fn is_writing(&self) -> bool {
        self.cut.is_some()
    }

    /// Whether all files are written and only the manifest is missing.
    pub(super) fn is_committing(&self) -> bool {
        self.cut.as_ref().is_some_and(|cut| cut.waiting.is_empty())
    }

    /// Whether one can begin: none is being written, and the pause after a failure is over.
    pub(super) fn can_begin(&self, now: Time) -> bool {
        self.cut.is_none() && now >= self.not_before
    }

    pub(super) fn begin(&mut self, cut: Cut, now: Time) {
        (self.last_cut_at, self.last_cut_version) = (now, cut.version);
        self.deadline = now + self.timeout;
        self.files.clear();
        self.cut = Some(cut);
    }

    /// When the one in progress is overdue, the next one is due, or a pause ends.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = Time> + '_ {
        let overdue = self.cut.as_ref().map(|_| self.deadline);
        let due = (!self.every.is_zero()).then(|| self.last_cut_at + self.every);
        overdue.into_iter().chain(due).chain([self.not_before])
    }

    /// The checkpoint that takes too long, the workers that delay it, and an error.
    pub(super) fn overdue(&self, now: Time) -> Option<(CutId, Vec<WorkerId>, String)> {
        let cut = self.cut.as_ref().filter(|_| now >= self.deadline)?;
        // The state of a worker is also on others; a slow server has no substitute.
        let workers = cut.waiting.iter().filter_map(|holder| match holder {
            Holder::Worker(worker) => Some(*worker),
            Holder::Ps(_) => None,
        });
        Some((cut.id, workers.collect(), format!("not complete after {:?}", self.timeout)))
    }

    /// Takes the files of one process. Files of an older generation are ignored, so no manifest
    /// ever lists what a replaced process wrote.
    pub(super) fn written(
        &mut self,
        holder: Holder,
        id: CutId,
        generation: Generation,
        files: Vec<CutFile>,
    ) -> Progress {
        let is_it = |cut: &&mut Cut| cut.id == id && cut.generation == generation;
        let Some(cut) = self.cut.as_mut().filter(is_it) else { return Progress::Waiting };
        if !cut.waiting.remove(&holder) {
            return Progress::Waiting;
        }
        self.files.extend(files.into_iter().map(|file| (file.partition, file)));
        if !cut.waiting.is_empty() {
            return Progress::Waiting;
        }
        if self.files.len() != self.n_partitions {
            return Progress::Incomplete;
        }
        let files = self.files.values().cloned().collect();
        Progress::Complete { version: cut.version, folder: cut.folder(), files }
    }

    /// It is committed, or has failed.
    pub(super) fn finish(&mut self, id: CutId) -> Option<Cut> {
        self.cut.take_if(|cut| cut.id == id)
    }

    /// Gives up the checkpoint in progress.
    pub(super) fn abandon(&mut self) -> Option<Cut> {
        self.cut.take()
    }

    /// Gives it up if it waits for this process.
    pub(super) fn abandon_if_waiting_for(&mut self, holder: Holder) -> Option<Cut> {
        self.cut.take_if(|cut| cut.waiting.contains(&holder))
    }

    /// Training continues with the model of `version`, as if it had just been saved.
    pub(super) fn continue_from(&mut self, version: u64) {
        self.last_cut_version = version;
    }

    /// Training went back to `version`.
    pub(super) fn go_back_to(&mut self, version: u64) {
        self.n_final_tries = 0;
        self.last_cut_version = self.last_cut_version.min(version);
    }

    pub(super) fn pause(&mut self, now: Time) {
        self.not_before = now + RETRY_AFTER;
    }

    /// The final checkpoint failed; false if it is not tried again.
    pub(super) fn retry_final(&mut self, now: Time) -> bool {
        self.n_final_tries += 1;
        let can_retry = self.n_final_tries < MAX_FINAL_TRIES;
        if can_retry {
            self.not_before = now + RETRY_AFTER * (1 << (self.n_final_tries - 1));
        }
        can_retry
    }

    /// Records a complete checkpoint; returns the folders of those that are no longer kept.
    pub(super) fn record(&self, cut: &Cut, is_best: bool, facts: &mut Durable) -> Vec<String> {
        let (folder, version, exact) = (cut.folder(), cut.version, cut.exact);
        if is_best {
            facts.best = Some(folder.clone());
        }
        facts.checkpoints.push(CheckpointRef { folder, version, exact, is_bad: false });
        if self.n_kept == 0 {
            return Vec::new();
        }
        // A bad checkpoint is no fallback, so it does not count as kept.
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

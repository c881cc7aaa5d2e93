// SPDX-License-Identifier: Apache-2.0
//! How many workers each job had over the last hour, and how full the cluster was.
//!
//! Only changes are kept, in one bounded queue for all jobs; a change that is dropped updates the
//! sizes at the beginning of the history, so the history is exact as far back as it goes. It starts
//! empty with the operator: no plan needs it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use edl_core::time::Time;
use edl_sched::plan::AllocationPlan;
use edl_sched::resources::Resources;
use edl_sched::snapshot::JobId;
use serde::Serialize;
use serde_json::{Value, json};

use crate::capacity::Sums;
use crate::explain;
use crate::observe::Observed;

/// How far back it goes.
pub const WINDOW_SECS: u64 = 3600;
/// Changes of jobs' sizes that are kept; an hour of a busy cluster has fewer.
const MAX_CHANGES: usize = 8000;
/// Loads that are kept, and how far they are apart: a plot shows no more.
const MAX_LOADS: usize = 360;
const LOAD_GAP_SECS: u64 = WINDOW_SECS / MAX_LOADS as u64;

/// How many workers a job has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Size {
    /// As granted to its master.
    pub wanted: u32,
    pub running: u32,
}

/// Requested thousandths of each kind of resource; none if the cluster has none of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub cpu: Option<u64>,
    pub memory: Option<u64>,
    pub gpu: Option<u64>,
}

/// What is kept of one pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    pub at_secs: u64,
    /// Every job's name and size.
    pub jobs: BTreeMap<JobId, (String, Size)>,
    pub load: Load,
}

impl Sample {
    #[must_use]
    pub fn new(observed: &Observed, plan: &AllocationPlan) -> Self {
        let jobs = observed.jobs.values().map(|view| {
            let size = Size { wanted: explain::planned(view, plan), running: view.running.worker };
            (view.id, (view.title(), size))
        });
        let load = Load::new(&Sums::new(&observed.snapshot));
        Self { at_secs: plan.made.since(Time::ZERO).as_secs(), jobs: jobs.collect(), load }
    }
}

impl Load {
    fn new(sums: &Sums) -> Self {
        let held = sums.of_jobs + sums.of_others;
        let of = |part: fn(Resources) -> u64| {
            let asked = part(held).saturating_mul(1000);
            asked.checked_div(part(sums.total))
        };
        Self { cpu: of(|it| it.cpu_milli), memory: of(|it| it.memory_mib), gpu: of(|it| it.gpu) }
    }
}

/// The sizes of jobs and the load of the cluster over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// When the operator made its first pass.
    since_secs: Option<u64>,
    /// All changes since then are known.
    from_secs: u64,
    names: BTreeMap<JobId, String>,
    /// Sizes at the beginning, of jobs that had workers.
    first: BTreeMap<JobId, Size>,
    changes: VecDeque<(u64, JobId, Size)>,
    last: BTreeMap<JobId, Size>,
    loads: VecDeque<(u64, Load)>,
}

impl History {
    /// Adds one pass.
    pub fn record(&mut self, sample: &Sample) {
        let at = sample.at_secs;
        if self.since_secs.is_none() {
            (self.since_secs, self.from_secs) = (Some(at), at);
        }
        for (job, (name, size)) in &sample.jobs {
            self.names.entry(*job).or_insert_with(|| name.clone());
            self.change(at, *job, *size);
        }
        let gone = self.last.keys().filter(|job| !sample.jobs.contains_key(*job));
        for job in gone.copied().collect::<Vec<_>>() {
            self.change(at, job, Size::default());
            self.last.remove(&job);
        }
        match self.loads.back_mut() {
            // Within the gap, only the newest is kept.
            Some((last, load)) if at < *last + LOAD_GAP_SECS => *load = sample.load,
            Some(_) | None => self.loads.push_back((at, sample.load)),
        }
        self.forget(at);
    }

    fn change(&mut self, at: u64, job: JobId, size: Size) {
        if self.last.insert(job, size).unwrap_or_default() != size {
            self.changes.push_back((at, job, size));
        }
    }

    /// Drops what is too old or too much.
    fn forget(&mut self, now: u64) {
        let oldest = now.saturating_sub(WINDOW_SECS);
        while let Some((at, job, size)) = self.changes.front().copied()
            && (at < oldest || self.changes.len() > MAX_CHANGES)
        {
            self.changes.pop_front();
            self.from_secs = self.from_secs.max(at);
            self.first.insert(job, size);
        }
        self.from_secs = self.from_secs.max(oldest);
        while let Some((at, _)) = self.loads.front()
            && (*at < oldest || self.loads.len() > MAX_LOADS)
        {
            self.loads.pop_front();
        }
        self.first.retain(|_, size| *size != Size::default());
        if self.names.len() > self.last.len() {
            let changed: BTreeSet<JobId> = self.changes.iter().map(|(_, job, _)| *job).collect();
            let (first, last) = (&self.first, &self.last);
            self.names.retain(|job, _| {
                last.contains_key(job) || first.contains_key(job) || changed.contains(job)
            });
        }
    }

    /// As the page reads it: rows of numbers, because there may be many.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let first = self.first.iter().map(|(job, size)| (job, size.wanted, size.running));
        let changes = self.changes.iter().map(|(at, job, it)| (at, job, it.wanted, it.running));
        let loads = self.loads.iter().map(|(at, it)| (at, it.cpu, it.memory, it.gpu));
        let names = self.names.iter().map(|(job, name)| (job.0.to_string(), name));
        json!({
            "since_secs": self.since_secs,
            "from_secs": self.from_secs,
            "names": names.collect::<BTreeMap<_, _>>(),
            "first": first.collect::<Vec<_>>(),
            "changes": changes.collect::<Vec<_>>(),
            "loads": loads.collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tests::fake_cluster::{FakeCluster, job, node, other_pod};

    const A: JobId = JobId(0);
    const B: JobId = JobId(1);

    fn sample(at_secs: u64, sizes: &[(JobId, u32)]) -> Sample {
        let jobs = sizes.iter().map(|(job, n)| {
            let size = Size { wanted: *n, running: *n };
            (*job, (format!("default/{}", job.0), size))
        });
        Sample { at_secs, jobs: jobs.collect(), ..Sample::default() }
    }

    fn history(samples: &[Sample]) -> History {
        let mut history = History::default();
        for sample in samples {
            history.record(sample);
        }
        history
    }

    #[test]
    fn a_sample_is_what_was_seen_and_planned() {
        let jobs = [job("a", &json!({"min_workers": 1, "max_workers": 6}))];
        let mut cluster = FakeCluster::new(&[node("n1", "4500m", "32Gi")], &jobs);
        cluster.objects.pods.push(other_pod("web-1", "500m", Some("n1")).into());
        let (observed, plan, _) = cluster.plan();
        let before = Sample::new(&observed, &plan);
        assert_eq!(before.jobs[&A].1.running, 0);
        cluster.pass();
        cluster.settle();
        let (observed, plan, _) = cluster.plan();
        let after = Sample::new(&observed, &plan);
        let (name, size) = &after.jobs[&A];
        assert_eq!((name.as_str(), size.running), ("default/a", before.jobs[&A].1.wanted));
        assert_eq!(after.load.gpu, None);
        assert!(after.load.cpu > before.load.cpu, "{before:?} {after:?}");
        assert_eq!(after.at_secs, cluster.now_secs);
    }

    #[test]
    fn only_changes_are_kept() {
        let json = history(&[
            sample(10, &[(A, 2)]),
            sample(11, &[(A, 2)]),
            sample(12, &[(A, 2), (B, 0)]),
            sample(13, &[(A, 1), (B, 1)]),
            sample(14, &[(B, 1)]),
        ])
        .to_json();
        let expected = json!([[10, 0, 2, 2], [13, 0, 1, 1], [13, 1, 1, 1], [14, 0, 0, 0]]);
        assert_eq!(json["changes"], expected);
        assert_eq!((&json["since_secs"], &json["from_secs"]), (&json!(10), &json!(10)));
        assert_eq!(json["first"], json!([]));
    }

    #[test]
    fn what_is_older_than_the_window_is_where_the_picture_begins() {
        let end = 13 + WINDOW_SECS;
        let json = history(&[
            sample(10, &[(A, 2), (B, 3)]),
            sample(12, &[(A, 4)]),
            sample(end, &[(A, 4)]),
            sample(end + 1, &[(A, 5)]),
        ])
        .to_json();
        assert_eq!(json["first"], json!([[0, 4, 4]]));
        assert_eq!(json["changes"], json!([[end + 1, 0, 5, 5]]));
        assert_eq!((&json["since_secs"], &json["from_secs"]), (&json!(10), &json!(14)));
        assert_eq!(json["names"], json!({"0": "default/0"}));
    }

    #[test]
    fn however_often_jobs_change_what_is_kept_is_bounded() {
        let mut history = History::default();
        for n in 0..MAX_CHANGES as u64 + 500 {
            let size = u32::from(n % 2 == 0);
            history.record(&sample(n / 4, &[(A, size)]));
        }
        assert_eq!(history.changes.len(), MAX_CHANGES);
        // What was dropped is not claimed to be known.
        let (oldest, ..) = history.changes[0];
        assert!(history.from_secs <= oldest && history.from_secs + 1 >= oldest);
        assert!(history.loads.len() <= MAX_LOADS && history.names.len() == 1);
    }

    #[test]
    fn of_loads_that_lie_close_together_the_newest_is_kept() {
        let loaded = |at_secs, permille| {
            let load = Load { cpu: Some(permille), ..Load::default() };
            Sample { at_secs, load, ..Sample::default() }
        };
        let later = 5 + LOAD_GAP_SECS;
        let json = history(&[loaded(5, 100), loaded(6, 200), loaded(later, 300)]).to_json();
        assert_eq!(json["loads"], json!([[5, 200, null, null], [later, 300, null, null]]));
    }
}

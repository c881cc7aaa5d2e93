// SPDX-License-Identifier: Apache-2.0
//! The history of a job, small enough to keep whole: curves, process timeline, events.
//!
//! It is written to `history.json` in the job's folder now and then. The next master of the job, the
//! page and the report of a job that has ended read it there.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use edl_core::goodput::{Goodput, TimeKind};
use edl_core::job_dir::JobDir;
use edl_core::platform::{InstanceState, Role};
use edl_core::series::Series;
use edl_net::proto::{self, JobStatus};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::about::About;
use crate::logged::Curves;

/// Points of a curve: more than a screen has pixels for.
const MAX_POINTS: usize = 600;
/// Processes that are remembered, and changes within one.
const MAX_PROCESSES: usize = 300;
const MAX_SPANS: usize = 60;
/// Changes of all processes together that the page gets.
const MAX_SHOWN_SPANS: usize = 3000;
const MAX_EVENTS: usize = 500;

/// Everything that the page shows and a status does not contain.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct History {
    /// When it was written, in Unix time.
    pub saved_at: f64,
    pub samples: Series<Sample>,
    #[serde(rename = "lives")]
    pub processes: VecDeque<ProcessRecord>,
    pub events: VecDeque<proto::Event>,
    pub goodput: Goodput,
    /// Metrics of a custom training loop.
    #[serde(default)]
    pub logged: Curves,
    /// As the last master has found it.
    #[serde(default)]
    pub about: About,
}

/// The job at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub at_secs: f64,
    pub step: u64,
    #[serde(deserialize_with = "edl_core::nonfinite::number")]
    pub loss: f32,
    pub learning_rate: f64,
    pub records_per_second: f64,
    pub workers: usize,
    /// Seconds of all workers so far, in the order of [`TimeKind::ALL`].
    pub spent: [f64; TimeKind::ALL.len()],
}

/// One process from its start to its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ProcessRecord {
    pub name: String,
    pub pid: u32,
    pub from: f64,
    pub to: Option<f64>,
    /// Why it left.
    pub why: String,
    pub spans: Vec<Span>,
}

/// A time in which nothing about a process changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Span {
    pub from: f64,
    pub state: InstanceState,
    /// Under AllReduce, the world that it trained in.
    pub world: u64,
}

impl History {
    pub(crate) fn new() -> Self {
        Self {
            saved_at: 0.0,
            samples: Series::new(MAX_POINTS),
            processes: VecDeque::new(),
            events: VecDeque::new(),
            goodput: Goodput::default(),
            logged: Curves::default(),
            about: About::default(),
        }
    }

    /// What the master before has written; a file that cannot be read is ignored.
    pub(crate) fn load(job_dir: &JobDir) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(job_dir.history()).ok()?).ok()
    }

    /// The last known loss. A new master continues from it.
    pub(crate) fn loss(&self) -> Option<f32> {
        self.samples.iter().map(|sample| sample.loss).filter(|loss| loss.is_finite()).last()
    }

    /// When the job was first seen to run, in Unix time.
    pub(crate) fn began(&self) -> Option<f64> {
        let sample = self.samples.iter().next().map(|sample| sample.at_secs);
        let event = self.events.front().map(|event| event.at_secs);
        sample.into_iter().chain(event).min_by(f64::total_cmp)
    }

    /// The job was resumed manually: no earlier process is left.
    pub(crate) fn close_all(&mut self) {
        let at = self.saved_at;
        for process in self.processes.iter_mut().filter(|process| process.to.is_none()) {
            process.to = Some(at);
            if process.why.is_empty() {
                process.why = "job stopped".into();
            }
        }
    }

    pub(crate) fn note(&mut self, event: proto::Event) {
        // An event about a process begins with its name; the last one before its end is the reason.
        let why = event.text.split_once(' ').map(|(name, _)| name);
        if event.kind().ends_process()
            && let Some(name) = why
        {
            let process = self.processes.iter_mut().rev().find(|process| process.name == name);
            if let Some(process) = process {
                process.why.clone_from(&event.text);
            }
        }
        self.events.push_back(event);
        if self.events.len() > MAX_EVENTS {
            self.events.pop_front();
        }
    }

    /// Records the current status; whether any process has changed.
    pub(crate) fn sample(&mut self, status: &JobStatus, at_secs: f64) -> bool {
        let workers = status.instances.iter().filter(|i| i.role() == Role::Worker);
        let goodput = status.goodput.as_ref();
        let spent = goodput.and_then(|goodput| goodput.workers).unwrap_or_default();
        self.samples.push(Sample {
            at_secs,
            step: status.step,
            loss: status.known_loss().unwrap_or(f32::NAN),
            learning_rate: status.learning_rate,
            records_per_second: status.records_per_second,
            workers: workers.filter(|worker| worker.state() == InstanceState::Working).count(),
            spent: spent.parts().map(|(_, secs)| secs),
        });
        self.record_processes(status, at_secs)
    }

    /// Records the current processes; whether any has started, ended or changed.
    pub(crate) fn record_processes(&mut self, status: &JobStatus, now: f64) -> bool {
        let mut has_changed = false;
        let there: BTreeSet<(String, u32)> =
            status.instances.iter().map(|instance| (instance.name(), instance.pid)).collect();
        let mut known: BTreeMap<(String, u32), usize> = BTreeMap::new();
        let open = self.processes.iter_mut().enumerate();
        for (place, process) in open.filter(|(_, process)| process.to.is_none()) {
            let id = (process.name.clone(), process.pid);
            if there.contains(&id) {
                known.insert(id, place);
            } else {
                process.to = Some(now);
                has_changed = true;
            }
        }
        let mut new = Vec::new();
        for instance in status.instances.iter().filter(|instance| instance.pid != 0) {
            let world = if instance.lanes.is_empty() { 0 } else { status.world };
            let span = Span { from: now, state: instance.state(), world };
            let place = known.get(&(instance.name(), instance.pid));
            let Some(process) = place.and_then(|place| self.processes.get_mut(*place)) else {
                new.push((instance, span));
                continue;
            };
            let last = process.spans.last();
            if last.is_none_or(|l| (l.state, l.world) != (span.state, span.world)) {
                process.spans.push(span);
                has_changed = true;
                if process.spans.len() > MAX_SPANS {
                    process.spans.remove(0);
                }
            }
        }
        for (instance, span) in new {
            if !self.make_room() {
                break;
            }
            self.processes.push_back(ProcessRecord {
                name: instance.name(),
                pid: instance.pid,
                from: now,
                to: None,
                why: String::new(),
                spans: vec![span],
            });
            has_changed = true;
        }
        has_changed
    }

    /// Whether one more process can be recorded, if need be instead of the first one that is gone.
    fn make_room(&mut self) -> bool {
        if self.processes.len() < MAX_PROCESSES {
            return true;
        }
        let gone = self.processes.iter().position(|process| process.to.is_some());
        gone.and_then(|place| self.processes.remove(place)).is_some()
    }

    /// The curves and the process timeline, as the page reads them.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let sample = |sample: &Sample| {
            let Sample { at_secs, step, spent, .. } = sample;
            json!({ "at_secs": at_secs, "step": step, "spent": spent })
        };
        // Of many processes, the page gets only the last changes of each.
        let most = (MAX_SHOWN_SPANS / self.processes.len().max(1)).max(2);
        let life = |process: &ProcessRecord| {
            let ProcessRecord { name, from, to, why, spans, .. } = process;
            let last = spans.get(spans.len().saturating_sub(most)..);
            json!({ "name": name, "from": from, "to": to, "why": why, "spans": last })
        };
        json!({
            "samples": self.samples.iter().map(sample).collect::<Vec<_>>(),
            "lives": self.processes.iter().map(life).collect::<Vec<_>>(),
            "events": self.events,
            "logged": self.logged.to_json(),
            "about": self.about,
        })
    }
}

#[cfg(test)]
mod tests {
    use edl_core::job::EventKind;

    use super::*;

    fn status(pids: &[(u32, u32)]) -> JobStatus {
        let instance = |(id, pid): &(u32, u32)| proto::Instance {
            role: Role::Worker.into(),
            id: *id,
            pid: *pid,
            state: InstanceState::Working.into(),
            ..proto::Instance::default()
        };
        JobStatus { instances: pids.iter().map(instance).collect(), ..JobStatus::default() }
    }

    #[test]
    fn a_loss_that_is_not_known_yet_is_no_zero_and_the_next_master_knows_the_last_one() {
        let mut history = History::new();
        history.sample(&JobStatus { step: 1, ..JobStatus::default() }, 1.0);
        assert!(history.samples.iter().all(|sample| sample.loss.is_nan()), "a gap in the curve");
        assert_eq!(history.loss(), None);
        for (at, loss) in [(2.0, 0.75), (3.0, 0.5), (4.0, f32::NAN)] {
            history.sample(&JobStatus { step: 2, loss, ..JobStatus::default() }, at);
        }
        let read: History = serde_json::from_slice(&serde_json::to_vec(&history).unwrap()).unwrap();
        assert_eq!(read.loss(), Some(0.5));
    }

    #[test]
    fn a_process_has_an_end_and_a_reason_and_survives_the_master() {
        let folder = tempfile::tempdir().unwrap();
        let mut history = History::new();
        assert!(history.sample(&status(&[(0, 7), (1, 8)]), 1.0));
        assert!(!history.sample(&status(&[(0, 7), (1, 8)]), 2.0));
        history.note(proto::Event {
            kind: EventKind::WorkerKilled.into(),
            text: "worker-0 was killed (SIGKILL); reassigning its work".into(),
            ..proto::Event::default()
        });
        assert!(history.sample(&status(&[(1, 8), (2, 9)]), 3.0));
        let job_dir = JobDir::new(folder.path());
        std::fs::write(job_dir.history(), serde_json::to_vec(&history).unwrap()).unwrap();
        let mut history = History::load(&job_dir).unwrap();
        let names: Vec<_> =
            history.processes.iter().map(|process| (&*process.name, process.to)).collect();
        assert_eq!(names, [("worker-0", Some(3.0)), ("worker-1", None), ("worker-2", None)]);
        assert!(history.processes[0].why.contains("SIGKILL"));
        history.close_all();
        assert!(history.processes.iter().all(|process| process.to.is_some()));
    }
}

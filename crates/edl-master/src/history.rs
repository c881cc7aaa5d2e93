// SPDX-License-Identifier: Apache-2.0
//! The story of a job, small enough to be kept whole: curves, who lived when, what happened.
//!
//! It is written to `history.json` in the job's folder now and then, where the next master of the
//! job finds it; so do the page and the report of a job that has ended.

use std::collections::VecDeque;

use edl_core::goodput::{Goodput, Kind};
use edl_core::job_dir::JobDir;
use edl_core::series::Series;
use edl_net::proto::{self, JobStatus};
use serde::{Deserialize, Serialize};

/// Points of a curve: more than a screen has pixels for.
const MAX_POINTS: usize = 600;
/// Lives of processes that are remembered, and changes within one.
const MAX_LIVES: usize = 300;
const MAX_SPANS: usize = 60;
const MAX_EVENTS: usize = 500;

/// Everything that the page shows and a status does not say.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct History {
    /// When it was written, in Unix time.
    pub saved_at: f64,
    pub samples: Series<Sample>,
    pub lives: VecDeque<Life>,
    pub events: VecDeque<proto::Event>,
    pub goodput: Goodput,
}

/// The job at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub at_secs: f64,
    pub step: u64,
    pub loss: f32,
    pub learning_rate: f64,
    pub records_per_second: f64,
    pub workers: usize,
    /// Seconds of all workers so far, in the order of [`Kind::ALL`].
    pub spent: [f64; Kind::ALL.len()],
}

/// One process from its coming to its going.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Life {
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
    pub state: String,
    /// Under AllReduce the world that it trained in.
    pub world: u64,
}

impl History {
    pub(crate) fn new() -> Self {
        Self {
            saved_at: 0.0,
            samples: Series::new(MAX_POINTS),
            lives: VecDeque::new(),
            events: VecDeque::new(),
            goodput: Goodput::default(),
        }
    }

    /// What the master before has written; a file that cannot be read is no loss to the job.
    pub(crate) fn load(job_dir: &JobDir) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(job_dir.history()).ok()?).ok()
    }

    /// When the job was first seen to run, in Unix time.
    pub(crate) fn began(&self) -> Option<f64> {
        let sample = self.samples.iter().next().map(|sample| sample.at_secs);
        let event = self.events.front().map(|event| event.at_secs);
        sample.into_iter().chain(event).min_by(f64::total_cmp)
    }

    /// The job was started again by hand: whoever lived before does not any more.
    pub(crate) fn close_all(&mut self) {
        let at = self.saved_at;
        for life in self.lives.iter_mut().filter(|life| life.to.is_none()) {
            life.to = Some(at);
            if life.why.is_empty() {
                life.why = "job stopped".into();
            }
        }
    }

    pub(crate) fn note(&mut self, event: proto::Event) {
        // Notes about a process begin with its name; the last one before its end says why.
        let why = event.text.split_once(' ').map(|(name, _)| name);
        let is_end = [
            "worker_ended",
            "worker_killed",
            "worker_crashed",
            "worker_silent",
            "ps_lost",
            "worker_left",
            "chaos",
        ]
        .contains(&event.kind.as_str());
        if is_end && let Some(name) = why {
            let life = self.lives.iter_mut().rev().find(|life| life.name == name);
            if let Some(life) = life {
                life.why.clone_from(&event.text);
            }
        }
        self.events.push_back(event);
        if self.events.len() > MAX_EVENTS {
            self.events.pop_front();
        }
    }

    /// Takes down what is now; whether anybody's life has changed.
    pub(crate) fn sample(&mut self, status: &JobStatus, at_secs: f64) -> bool {
        let workers = status.instances.iter().filter(|i| i.role == "worker");
        let goodput = status.goodput.as_ref();
        let spent = goodput.and_then(|goodput| goodput.workers).unwrap_or_default();
        self.samples.push(Sample {
            at_secs,
            step: status.step,
            loss: status.loss,
            learning_rate: status.learning_rate,
            records_per_second: status.records_per_second,
            workers: workers.filter(|worker| worker.state == "working").count(),
            spent: spent.parts().map(|(_, secs)| secs),
        });
        self.live(status, at_secs)
    }

    /// Takes down who is there; whether anybody has come, gone or changed.
    pub(crate) fn live(&mut self, status: &JobStatus, now: f64) -> bool {
        let mut has_changed = false;
        for life in self.lives.iter_mut().filter(|life| life.to.is_none()) {
            let is_same = |i: &&proto::Instance| i.name() == life.name && i.pid == life.pid;
            if !status.instances.iter().any(|instance| is_same(&instance)) {
                life.to = Some(now);
                has_changed = true;
            }
        }
        for instance in status.instances.iter().filter(|instance| instance.pid != 0) {
            let world = if instance.lanes.is_empty() { 0 } else { status.world };
            let span = Span { from: now, state: instance.state.clone(), world };
            let is_its = |life: &&mut Life| {
                life.to.is_none() && life.name == instance.name() && life.pid == instance.pid
            };
            match self.lives.iter_mut().rev().find(is_its) {
                Some(life) => {
                    let last = life.spans.last();
                    if last.is_none_or(|l| (&l.state, l.world) != (&span.state, span.world)) {
                        life.spans.push(span);
                        has_changed = true;
                        if life.spans.len() > MAX_SPANS {
                            life.spans.remove(0);
                        }
                    }
                }
                None => {
                    let (name, pid) = (instance.name(), instance.pid);
                    let spans = vec![span];
                    let why = String::new();
                    self.lives.push_back(Life { name, pid, from: now, to: None, why, spans });
                    has_changed = true;
                }
            }
        }
        while self.lives.len() > MAX_LIVES {
            self.lives.pop_front();
        }
        has_changed
    }

    /// The curves and lives as the page reads them.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "samples": self.samples.iter().collect::<Vec<_>>(),
            "lives": self.lives,
            "events": self.events,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(pids: &[(u32, u32)]) -> JobStatus {
        let instance = |(id, pid): &(u32, u32)| proto::Instance {
            role: "worker".into(),
            id: *id,
            pid: *pid,
            state: "working".into(),
            ..proto::Instance::default()
        };
        JobStatus { instances: pids.iter().map(instance).collect(), ..JobStatus::default() }
    }

    #[test]
    fn a_life_has_an_end_and_a_reason_and_survives_the_master() {
        let folder = tempfile::tempdir().unwrap();
        let mut history = History::new();
        assert!(history.sample(&status(&[(0, 7), (1, 8)]), 1.0));
        assert!(!history.sample(&status(&[(0, 7), (1, 8)]), 2.0));
        history.note(proto::Event {
            kind: "worker_killed".into(),
            text: "worker-0 was killed (SIGKILL); reassigning its work".into(),
            ..proto::Event::default()
        });
        assert!(history.sample(&status(&[(1, 8), (2, 9)]), 3.0));
        let job_dir = JobDir::new(folder.path());
        std::fs::write(job_dir.history(), serde_json::to_vec(&history).unwrap()).unwrap();
        let mut history = History::load(&job_dir).unwrap();
        let names: Vec<_> = history.lives.iter().map(|life| (&*life.name, life.to)).collect();
        assert_eq!(names, [("worker-0", Some(3.0)), ("worker-1", None), ("worker-2", None)]);
        assert!(history.lives[0].why.contains("SIGKILL"));
        history.close_all();
        assert!(history.lives.iter().all(|life| life.to.is_some()));
    }
}

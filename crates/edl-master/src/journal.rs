// SPDX-License-Identifier: Apache-2.0
//! What others read without asking: status, events, metrics files and TensorBoard.
//!
//! Trouble with these files never stops a job; it is logged once.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use edl_core::evaluation::Evaluated;
use edl_core::goodput::Goodput;
use edl_core::id::Term;
use edl_core::job::End;
use edl_core::job_dir::JobDir;
use edl_net::proto;
use serde_json::json;

use crate::Addresses;
use crate::history::History;
use crate::page;
use crate::tensorboard::EventFile;

/// Events that `status` shows.
const KEPT_EVENTS: usize = 50;
/// What a master that dies may lose of the curves and of the books of time.
const HISTORY_EVERY: Duration = Duration::from_secs(2);

/// The files of one job that tell its story.
pub(crate) struct Journal {
    job_dir: JobDir,
    events_file: Option<File>,
    metrics_file: Option<File>,
    tensorboard: Option<EventFile>,
    events: VecDeque<proto::Event>,
    /// What is kept for the page.
    pub(crate) history: History,
    history_due: Instant,
    next_event: u64,
    last_point: Option<(u64, u64)>,
    has_warned: bool,
}

impl Journal {
    pub(crate) fn open(job_dir: &JobDir, tensorboard_dir: &str, resume: bool) -> Self {
        let mut history = History::load(job_dir).unwrap_or_else(History::new);
        if resume {
            history.close_all();
        }
        let append = |path: PathBuf| {
            OpenOptions::new().create(true).append(true).open(&path).inspect_err(|error| {
                tracing::warn!(path = %path.display(), %error, "cannot open a journal file");
            })
        };
        let tensorboard = (!tensorboard_dir.is_empty())
            .then(|| EventFile::create(Path::new(tensorboard_dir), unix_secs()))
            .and_then(|created| {
                created
                    .inspect_err(
                        |error| tracing::warn!(%error, "cannot create the TensorBoard file"),
                    )
                    .ok()
            });
        Self {
            job_dir: job_dir.clone(),
            events_file: append(job_dir.events()).ok(),
            metrics_file: append(job_dir.metrics()).ok(),
            tensorboard,
            events: VecDeque::new(),
            history,
            history_due: Instant::now(),
            next_event: 0,
            last_point: None,
            has_warned: false,
        }
    }

    /// Tells where this master is.
    pub(crate) fn write_address(&mut self, addresses: &Addresses, term: Term) {
        let content = json!({
            "address": addresses.control.to_string(),
            "http_address": addresses.http.to_string(),
            "pid": std::process::id(),
            "term": term.0,
        });
        self.replace(&self.job_dir.master(), content.to_string().as_bytes());
    }

    pub(crate) fn note(&mut self, kind: &str, text: &str) {
        match kind {
            "ps_lost" | "worker_crashed" | "worker_silent" | "checkpoint_failed"
            | "checkpoint_bad" | "work_failed" | "not_started" | "not_heard" | "torn"
            | "workers_lost" => {
                tracing::warn!(kind, "{text}")
            }
            _ => tracing::info!(kind, "{text}"),
        }
        let event = proto::Event {
            number: self.next_event,
            at_secs: unix_secs(),
            kind: kind.into(),
            text: text.into(),
        };
        self.next_event += 1;
        write_line(self.events_file.as_mut(), &serde_json::to_value(&event).unwrap_or_default());
        self.history.note(event.clone());
        self.events.push_back(event);
        if self.events.len() > KEPT_EVENTS {
            self.events.pop_front();
        }
    }

    pub(crate) fn events(&self) -> Vec<proto::Event> {
        self.events.iter().cloned().collect()
    }

    pub(crate) fn evaluated(&mut self, evaluated: &Evaluated) {
        let point = json!({
            "at_secs": unix_secs(), "kind": "evaluation", "version": evaluated.version,
            "epoch": evaluated.epoch, "metrics": evaluated.metrics, "best": evaluated.is_best,
        });
        write_line(self.metrics_file.as_mut(), &point);
        for (name, value) in &evaluated.metrics {
            self.scalar(&format!("evaluation/{name}"), evaluated.version, *value);
        }
    }

    pub(crate) fn ended(&mut self, end: &End) {
        let (kind, text) = match end {
            End::Succeeded => ("succeeded", "job finished"),
            End::Failed(why) => ("failed", why.as_str()),
            End::Stopped(why) => ("stopped", why.as_str()),
        };
        self.note(kind, text);
    }

    /// Writes the status file and, when training has moved, a point of the curves.
    pub(crate) fn publish(&mut self, status: &proto::JobStatus) {
        match serde_json::to_vec_pretty(status) {
            Ok(content) => self.replace(&self.job_dir.status(), &content),
            Err(error) => tracing::warn!(%error, "cannot serialize the status"),
        }
        let point = (status.step, status.generation);
        if status.step == 0 || self.last_point == Some(point) {
            return;
        }
        self.last_point = Some(point);
        let line = json!({
            "at_secs": unix_secs(), "kind": "training", "version": status.step, "epoch": status.epoch,
            "loss": status.loss, "learning_rate": status.learning_rate,
            "records_done": status.records_done, "records_per_second": status.records_per_second,
        });
        write_line(self.metrics_file.as_mut(), &line);
        self.scalar("training/loss", status.step, f64::from(status.loss));
        self.scalar("training/learning_rate", status.step, status.learning_rate);
        self.scalar("training/records_per_second", status.step, status.records_per_second);
    }

    /// Writes the history if it is time. `goodput` are the books as of now.
    pub(crate) fn keep_history(&mut self, goodput: impl FnOnce() -> Goodput, is_last: bool) {
        if !is_last && Instant::now() < self.history_due {
            return;
        }
        self.history_due = Instant::now() + HISTORY_EVERY;
        self.history.saved_at = unix_secs();
        self.history.goodput = goodput();
        match serde_json::to_vec(&self.history) {
            Ok(content) => self.replace(&self.job_dir.history(), &content),
            Err(error) => tracing::warn!(%error, "cannot serialize the history"),
        }
    }

    /// Writes the page of a job that has ended.
    pub(crate) fn write_report(&mut self, status: &proto::JobStatus) {
        let report = page::frozen(status, &self.history);
        self.replace(&self.job_dir.report(), report.as_bytes());
    }

    fn scalar(&mut self, tag: &str, step: u64, value: f64) {
        let Some(file) = &mut self.tensorboard else { return };
        if let Err(error) = file.scalar(tag, step, value, unix_secs()) {
            tracing::warn!(%error, "cannot write the TensorBoard file; no more curves are written");
            self.tensorboard = None;
        }
    }

    /// Replaces a file as a whole, so that a reader never sees half of it.
    fn replace(&mut self, path: &Path, content: &[u8]) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.tmp"));
        let written = fs::write(&temporary, content).and_then(|()| fs::rename(&temporary, path));
        if let Err(error) = written
            && !self.has_warned
        {
            self.has_warned = true;
            tracing::warn!(%name, %error, "cannot write a journal file");
        }
    }
}

fn write_line(file: Option<&mut File>, value: &serde_json::Value) {
    if let Some(file) = file {
        // A full disk must not stop the job, and is said where checkpoints fail.
        let _ = file.write_all(format!("{value}\n").as_bytes());
    }
}

pub(crate) fn unix_secs() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

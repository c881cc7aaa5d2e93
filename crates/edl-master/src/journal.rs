// SPDX-License-Identifier: Apache-2.0
//! Files that others read: status, events, metrics and TensorBoard.
//!
//! Trouble with these files never stops a job; it is logged once.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use edl_core::evaluation::Evaluated;
use edl_core::goodput::Goodput;
use edl_core::job::{Config, End, EventKind};
use edl_core::job_dir::JobDir;
use edl_net::proto;
use serde_json::json;

use crate::Addresses;
use crate::curve_file::CurveFile;
use crate::history::History;
use crate::line_file::{LineFile, MAX_BYTES};
use crate::logged;
use crate::page;
use crate::tensorboard::EventFile;

/// Events that `status` shows.
const KEPT_EVENTS: usize = 50;
/// How much of the curves and time accounting a master that dies may lose.
const HISTORY_EVERY: Duration = Duration::from_secs(2);

/// The files that record the history of a job.
pub(crate) struct Journal {
    job_dir: JobDir,
    events_file: LineFile,
    metrics_file: LineFile,
    /// The address that is not written yet.
    address: Option<String>,
    tensorboard: Option<EventFile>,
    events: VecDeque<proto::Event>,
    /// What is kept for the page.
    pub(crate) history: History,
    /// The curves in full. Without it, only the report has curves: those of the history.
    curves: Option<CurveFile>,
    history_due: Instant,
    logged: logged::Reader,
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
        let curves = job_dir.curves();
        let curves = CurveFile::open(&curves, history.samples.iter().map(Into::into))
            .inspect_err(|error| tracing::warn!(%error, "cannot write the curves for the page"));
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
            events_file: LineFile::new(job_dir.events(), MAX_BYTES),
            metrics_file: LineFile::new(job_dir.metrics(), MAX_BYTES),
            address: None,
            tensorboard,
            events: VecDeque::new(),
            logged: logged::Reader::new(job_dir.logged(), &history.logged),
            history,
            curves: curves.ok(),
            history_due: Instant::now(),
            next_event: 0,
            last_point: None,
            has_warned: false,
        }
    }

    /// Writes the address of this master.
    pub(crate) fn write_address(&mut self, addresses: &Addresses, job: &Config) {
        let content = json!({
            "address": addresses.control.to_string(),
            "http_address": addresses.http.to_string(),
            "pid": std::process::id(),
            "term": job.term.0,
            "run": job.run.to_string(),
        });
        self.address = Some(content.to_string());
        self.write_pending_address();
    }

    /// Writes the address until it is written: on a full disk that may take a while.
    fn write_pending_address(&mut self) {
        let Some(address) = self.address.take() else { return };
        if !self.replace(&self.job_dir.master(), address.as_bytes()) {
            self.address = Some(address);
        }
    }

    pub(crate) fn note(&mut self, kind: EventKind, text: &str) {
        match kind.is_warning() {
            true => tracing::warn!(kind = kind.name(), "{text}"),
            false => tracing::info!(kind = kind.name(), "{text}"),
        }
        let event = proto::Event {
            number: self.next_event,
            at_secs: unix_secs(),
            kind: kind.into(),
            text: text.into(),
        };
        self.next_event += 1;
        let line = serde_json::to_value(&event).unwrap_or_default();
        let written = self.events_file.add(&line.to_string());
        self.warn_once("events.jsonl", written);
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
        self.add_point(&point);
        for (name, value) in &evaluated.metrics {
            self.scalar(&format!("evaluation/{name}"), evaluated.version, *value);
        }
    }

    /// Takes what custom training loops have logged since.
    pub(crate) fn take_logged(&mut self) {
        let lines = self.logged.read(&mut self.history.logged);
        for line in &lines {
            let point = json!({
                "at_secs": unix_secs(), "kind": "logged", "version": line.step,
                "metrics": line.metrics,
            });
            self.add_point(&point);
            for (name, value) in &line.metrics {
                self.scalar(name, line.step, *value);
            }
        }
        if !lines.is_empty() {
            // So that the next master does not repeat them.
            self.history_due = Instant::now();
        }
    }

    pub(crate) fn ended(&mut self, end: &End) {
        self.note(end.event(), end.reason().unwrap_or("job finished"));
    }

    /// Writes the status file and, when training has moved, a point of the curves.
    pub(crate) fn publish(&mut self, status: &proto::JobStatus) {
        self.write_pending_address();
        match serde_json::to_vec_pretty(status) {
            Ok(content) => _ = self.replace(&self.job_dir.status(), &content),
            Err(error) => tracing::warn!(%error, "cannot serialize the status"),
        }
        let point = (status.step, status.generation);
        if status.step == 0 || self.last_point == Some(point) {
            return;
        }
        self.last_point = Some(point);
        let line = json!({
            "at_secs": unix_secs(), "kind": "training", "version": status.step, "epoch": status.epoch,
            "loss": status.known_loss(), "learning_rate": status.learning_rate,
            "records_done": status.records_done, "records_per_second": status.records_per_second,
        });
        self.add_point(&line);
        if let Some(loss) = status.known_loss() {
            self.scalar("training/loss", status.step, f64::from(loss));
        }
        self.scalar("training/learning_rate", status.step, status.learning_rate);
        self.scalar("training/records_per_second", status.step, status.records_per_second);
    }

    /// Records the current status for the page; whether any process has changed.
    pub(crate) fn sample(&mut self, status: &proto::JobStatus) -> bool {
        let has_changed = self.history.sample(status, unix_secs());
        if let (Some(curves), Some(sample)) = (&mut self.curves, self.history.samples.last())
            && let Err(error) = curves.add(sample.into())
        {
            self.warn_once("curves.bin", Err(error));
        }
        has_changed
    }

    /// Writes the history if it is time. `goodput` is the accounting as of now.
    pub(crate) fn keep_history(&mut self, goodput: impl FnOnce() -> Goodput, is_last: bool) {
        if !is_last && Instant::now() < self.history_due {
            return;
        }
        self.history_due = Instant::now() + HISTORY_EVERY;
        self.history.saved_at = unix_secs();
        self.history.goodput = goodput();
        match serde_json::to_vec(&self.history) {
            Ok(content) => _ = self.replace(&self.job_dir.history(), &content),
            Err(error) => tracing::warn!(%error, "cannot serialize the history"),
        }
    }

    /// Writes the page of a job that has ended.
    pub(crate) fn write_report(&mut self, status: &proto::JobStatus) {
        let report = page::frozen(&self.job_dir, status, &self.history);
        self.replace(&self.job_dir.report(), report.as_bytes());
    }

    fn scalar(&mut self, tag: &str, step: u64, value: f64) {
        let Some(file) = &mut self.tensorboard else { return };
        if let Err(error) = file.scalar(tag, step, value, unix_secs()) {
            tracing::warn!(%error, "cannot write to the TensorBoard file; disabling it");
            self.tensorboard = None;
        }
    }

    /// Replaces a file; whether that succeeded.
    fn replace(&mut self, path: &Path, content: &[u8]) -> bool {
        let written = replace(path, content);
        let is_written = written.is_ok();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        self.warn_once(&name, written);
        is_written
    }

    fn add_point(&mut self, point: &serde_json::Value) {
        let written = self.metrics_file.add(&point.to_string());
        self.warn_once("metrics.jsonl", written);
    }

    fn warn_once(&mut self, name: &str, written: io::Result<()>) {
        if let Err(error) = written
            && !std::mem::replace(&mut self.has_warned, true)
        {
            tracing::warn!(%name, %error, "cannot write a journal file");
        }
    }
}

/// Replaces a file as a whole: a reader never sees half of it.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.tmp"));
    let written = fs::write(&temporary, content).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // On a full disk every byte counts.
        let _ = fs::remove_file(&temporary);
    }
    written
}

pub(crate) fn unix_secs() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Takes what the script of a custom training loop has logged after the end of the job, when its
/// master is gone.
pub fn take_rest(job_dir: &JobDir, tensorboard_dir: &str) {
    let status = fs::read(job_dir.status()).ok();
    let status = status.and_then(|text| serde_json::from_slice::<proto::JobStatus>(&text).ok());
    let (Some(mut status), Some(history)) = (status, History::load(job_dir)) else { return };
    // Without opening the journal: only if there is more, it gets another file for TensorBoard.
    let mut curves = history.logged;
    if logged::Reader::new(job_dir.logged(), &curves).read(&mut curves).is_empty() {
        return;
    }
    let mut journal = Journal::open(job_dir, tensorboard_dir, false);
    let goodput = journal.history.goodput.clone();
    journal.take_logged();
    status.logged = journal.history.logged.last();
    journal.keep_history(|| goodput, true);
    match serde_json::to_vec_pretty(&status) {
        Ok(content) => _ = journal.replace(&job_dir.status(), &content),
        Err(error) => tracing::warn!(%error, "cannot serialize the status"),
    }
    journal.write_report(&status);
}

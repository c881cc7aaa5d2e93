// SPDX-License-Identifier: Apache-2.0
//! What the user sees of a running job: a progress bar on a terminal, plain lines elsewhere.
//!
//! Everything goes to standard error; the summary at the end is the result, and is made here but
//! written by the command.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{IsTerminal as _, Read as _, Seek as _, SeekFrom, Write as _};
use std::time::{Duration, Instant};

use edl_core::platform::InstanceId;
use edl_net::proto::{Evaluation, JobStatus};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tracing::Level;

use crate::jobs::Job;
use crate::say::{counted, grouped, say, span};
use crate::telemetry;

mod summary;

pub(crate) use summary::summary;

/// Plain progress lines come this often.
const PLAIN_EVERY: Duration = Duration::from_secs(5);

/// Events that the bar or the summary shows anyway.
const ROUTINE: [&str; 6] =
    ["worker_joined", "worker_ended", "stopping", "succeeded", "failed", "stopped"];

/// Shows one job.
pub(crate) struct Ui {
    /// None: somebody else brings its status.
    job: Option<Job>,
    form: Form,
    seen: Seen,
    /// Its page's address was said.
    has_page: bool,
    last: Option<JobStatus>,
}

enum Form {
    Bar(ProgressBar),
    Plain {
        next: Option<Instant>,
        line: String,
    },
    /// The master's own log, as if it were written by this process.
    Relay {
        offset: u64,
    },
}

/// What was shown already.
#[derive(Default)]
struct Seen {
    /// Term and number of the last event: each master counts anew.
    event: Option<(u64, u64)>,
    evaluations: BTreeSet<String>,
}

impl Ui {
    /// For a job that this process supervises or watches.
    pub(crate) fn new(job: &Job) -> Self {
        Self::with(job, Form::of_terminal())
    }

    /// For a job that runs elsewhere; its status comes by `show`.
    pub(crate) fn remote() -> Self {
        Self {
            job: None,
            form: Form::of_terminal(),
            seen: Seen::default(),
            has_page: true,
            last: None,
        }
    }

    /// For a master by hand: what it logs is what is seen.
    pub(crate) fn relay(job: &Job) -> Self {
        let log = job.paths().log(InstanceId::MASTER);
        let offset = std::fs::metadata(log).map_or(0, |metadata| metadata.len());
        Self::with(job, Form::Relay { offset })
    }

    fn with(job: &Job, form: Form) -> Self {
        let mut seen = Seen::default();
        if let Some(status) = job.status() {
            seen.news(&status);
        }
        Self { job: Some(job.clone()), form, seen, has_page: false, last: None }
    }

    /// A line about something that happened.
    pub(crate) fn say(&mut self, line: &str) {
        match &self.form {
            Form::Bar(bar) => bar.suspend(|| say(line)),
            Form::Plain { .. } | Form::Relay { .. } => say(line),
        }
    }

    /// Shows what is new.
    pub(crate) fn tick(&mut self) {
        let Some(job) = &self.job else { return };
        if let Form::Relay { offset } = &mut self.form {
            relay(job, offset);
            return;
        }
        let Some(status) = job.fresh_status() else { return };
        if !self.has_page
            && let Some(page) = crate::status::page(job, &status)
        {
            self.has_page = true;
            self.say(&format!("view the job's page at {page}"));
        }
        self.show(status);
    }

    /// Shows what is new in this status.
    pub(crate) fn show(&mut self, status: JobStatus) {
        for line in self.seen.news(&status) {
            self.say(&line);
        }
        match &mut self.form {
            Form::Bar(bar) => draw(bar, &status),
            Form::Plain { next, line } => {
                let now = Instant::now();
                if next.is_none_or(|next| next <= now) {
                    let new = progress(&status);
                    if new != *line {
                        say(&new);
                        *line = new;
                        *next = Some(now + PLAIN_EVERY);
                    }
                }
            }
            Form::Relay { .. } => {}
        }
        self.last = Some(status);
    }

    /// Takes the bar away, and gives the last that is known of the job.
    pub(crate) fn finish(mut self) -> Option<JobStatus> {
        self.tick();
        if let Form::Bar(bar) = &self.form {
            bar.finish_and_clear();
        }
        self.last.or_else(|| self.job?.fresh_status())
    }
}

impl Form {
    fn of_terminal() -> Self {
        if std::io::stderr().is_terminal() {
            Self::Bar(bar())
        } else {
            Self::Plain { next: None, line: String::new() }
        }
    }
}

impl Seen {
    /// The lines for events and evaluations that were not shown yet.
    fn news(&mut self, status: &JobStatus) -> Vec<String> {
        let mut lines = Vec::new();
        for event in &status.events {
            let at = Some((status.term, event.number));
            if at > self.event {
                self.event = at;
                if !ROUTINE.contains(&event.kind.as_str()) {
                    lines.push(event.text.clone());
                }
            }
        }
        for evaluation in &status.evaluations {
            let line = metrics_line(evaluation);
            if self.evaluations.insert(line.clone()) {
                let prefix = telemetry::prefix(Level::INFO, "ui.rs", line!(), "evaluation");
                lines.push(format!("{prefix}{line}"));
            }
        }
        lines
    }
}

/// `Evaluation metrics[v=50]: {'accuracy': 0.7712}`, the form that users grep for.
fn metrics_line(evaluation: &Evaluation) -> String {
    let metrics = sorted(evaluation).map(|(name, value)| format!("'{name}': {value:.4}"));
    let metrics = metrics.collect::<Vec<_>>().join(", ");
    format!("Evaluation metrics[v={}]: {{{metrics}}}", evaluation.version)
}

/// `accuracy 0.7712, loss 0.5000`.
pub(crate) fn measures(evaluation: &Evaluation) -> String {
    let measures = sorted(evaluation).map(|(name, value)| format!("{name} {value:.4}"));
    measures.collect::<Vec<_>>().join(", ")
}

/// Metrics by name; a hash map has no order of its own.
fn sorted(evaluation: &Evaluation) -> impl Iterator<Item = (&String, &f64)> {
    let mut metrics: Vec<_> = evaluation.metrics.iter().collect();
    metrics.sort_by_key(|(name, _)| name.as_str());
    metrics.into_iter()
}

/// One line about how far the job is.
fn progress(status: &JobStatus) -> String {
    let JobStatus { state, records_done, records_total, records_per_second, .. } = status;
    let mut line = match status.job_type.as_str() {
        "train" => format!("{state}: epoch {}, step {}, ", epoch(status), grouped(status.step)),
        _ => format!("{state}: "),
    };
    line += &match records_total {
        0 => counted(*records_done, "record"),
        total => format!("{} of {} records", grouped(*records_done), grouped(*total)),
    };
    if *records_per_second > 0.0 {
        line += &format!(", {} records/s", grouped(rounded(*records_per_second)));
    }
    if status.eta_secs >= 0.0 {
        line += &format!(", {} left", span(status.eta_secs));
    }
    if status.loss > 0.0 {
        line += &format!(", loss {:.4}", status.loss);
    }
    line
}

/// `1/3`; without an end, `1`.
fn epoch(status: &JobStatus) -> String {
    match status.num_epochs {
        0 => format!("{}", status.epoch + 1),
        total => format!("{}/{total}", (status.epoch + 1).min(total)),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a float to integer cast saturates")]
#[expect(clippy::cast_sign_loss, reason = "clamped to what is not negative")]
pub(crate) fn rounded(number: f64) -> u64 {
    number.max(0.0).round() as u64
}

fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{spinner:.cyan} {prefix} [{bar:30.cyan/blue}] {percent:>3} %  {msg}",
    );
    let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
    bar.set_prefix("starting");
    bar
}

fn draw(bar: &ProgressBar, status: &JobStatus) {
    bar.set_length(status.records_total.max(1));
    bar.set_position(status.records_done.min(status.records_total));
    bar.set_prefix(match status.job_type.as_str() {
        "train" => format!("{} epoch {}", status.state, epoch(status)),
        _ => status.state.clone(),
    });
    let workers = status.instances.iter();
    let workers = workers.filter(|i| i.role == "worker" && i.state == "working").count();
    let mut message = format!("{} records/s", grouped(rounded(status.records_per_second)));
    if status.eta_secs >= 0.0 {
        message += &format!("  {} left", span(status.eta_secs));
    }
    if status.loss > 0.0 {
        message += &format!("  loss {:.4}", status.loss);
    }
    bar.set_message(format!("{message}  {}", counted(workers as u64, "worker")));
    bar.tick();
}

/// Copies what the master's log has gained to standard error.
fn relay(job: &Job, offset: &mut u64) {
    let log = job.paths().log(InstanceId::MASTER);
    let mut text = Vec::new();
    let read = File::open(log).and_then(|mut file| {
        file.seek(SeekFrom::Start(*offset))?;
        file.read_to_end(&mut text)
    });
    if let Ok(n_bytes) = read {
        *offset += n_bytes as u64;
        let _closed = std::io::stderr().lock().write_all(&text);
    }
}

#[cfg(test)]
mod tests {
    use edl_net::proto::Event;

    use super::*;

    fn evaluation(version: u64, accuracy: f64) -> Evaluation {
        let metrics = [("loss".to_owned(), 0.5), ("accuracy".to_owned(), accuracy)].into();
        Evaluation { version, epoch: 0, metrics, best: false }
    }

    #[test]
    fn an_evaluation_is_written_as_users_grep_for_it() {
        assert_eq!(
            metrics_line(&evaluation(50, 0.7712)),
            "Evaluation metrics[v=50]: {'accuracy': 0.7712, 'loss': 0.5000}"
        );
    }

    #[test]
    fn news_are_told_once_and_each_master_counts_anew() {
        let event = |number, text: &str| Event { number, text: text.into(), ..Event::default() };
        let routine = Event { kind: "worker_joined".into(), ..event(2, "routine") };
        let mut seen = Seen::default();
        let mut status = JobStatus {
            term: 1,
            events: vec![event(0, "a"), event(1, "b"), routine],
            evaluations: vec![evaluation(5, 0.5)],
            ..JobStatus::default()
        };
        let lines = seen.news(&status);
        assert_eq!(lines.len(), 3);
        assert!(lines[2].contains("Evaluation metrics[v=5]"), "{lines:?}");
        assert!(seen.news(&status).is_empty());
        status.events.push(event(3, "c"));
        assert_eq!(seen.news(&status), ["c"]);
        status.term = 2;
        status.events = vec![event(0, "anew")];
        assert_eq!(seen.news(&status), ["anew"]);
    }

    #[test]
    fn progress_reads_as_a_sentence() {
        let status = JobStatus {
            state: "running".into(),
            job_type: "train".into(),
            epoch: 0,
            num_epochs: 2,
            step: 1200,
            records_done: 76_800,
            records_total: 120_000,
            records_per_second: 2500.4,
            eta_secs: 17.3,
            loss: 0.25,
            ..JobStatus::default()
        };
        assert_eq!(
            progress(&status),
            "running: epoch 1/2, step 1,200, 76,800 of 120,000 records, 2,500 records/s, 17 s left, \
             loss 0.2500"
        );
    }
}

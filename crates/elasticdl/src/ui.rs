// SPDX-License-Identifier: Apache-2.0
//! The progress of a running job: a bar on a terminal, plain lines elsewhere.
//!
//! Everything goes to standard error, except the final summary, which the command prints.

use std::fs::File;
use std::io::{IsTerminal as _, Read as _, Seek as _, SeekFrom, Write as _};
use std::time::{Duration, Instant};

use edl_core::job::JobState;
use edl_core::platform::InstanceId;
use edl_core::platform::{InstanceState, Role};
use edl_core::spec::JobType;
use edl_core::text::decimal;
use edl_net::proto::{Evaluation, Instance, JobStatus};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::LogToTerminal;
use crate::cluster::Target;
use crate::console::{self, counted, eprint, grouped, span};
use crate::jobs::Job;
use eta::Eta;
use news::{Seen, Style};
use script::ScriptOutput;

mod eta;
mod news;
mod script;
mod summary;

pub(crate) use summary::summary;

/// Plain progress lines come this often.
const PLAIN_EVERY: Duration = Duration::from_secs(5);

/// How watching a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watched {
    JobEnded,
    UserLeft,
}

/// Shows one job.
pub(crate) struct Ui {
    /// None for a job on a cluster.
    job: Option<Job>,
    form: Form,
    seen: Seen,
    /// Whether the address of its page was printed.
    has_page: bool,
    /// Whether it is not known yet where a resumed job continues; until then nothing else is shown.
    is_resuming: bool,
    last: Option<JobStatus>,
    /// What the user's own code prints, for a job that this process supervises.
    script: Option<ScriptOutput>,
    eta: Eta,
}

enum Form {
    /// Nothing.
    Quiet,
    Bar(ProgressBar),
    Plain {
        next: Option<Instant>,
        line: String,
    },
    /// The master's log.
    Relay {
        offset: u64,
    },
}

impl Ui {
    /// For a job that this process supervises or watches.
    pub(crate) fn new(job: &Job) -> Self {
        Self::with(job, Form::of_terminal())
    }

    /// For a job that this process watches. The status of a job on a cluster comes by `show`.
    pub(crate) fn of(target: &Target) -> Self {
        match target {
            Target::Local(job) => Self::new(job),
            Target::Cluster(_) => Self {
                job: None,
                form: Form::of_terminal(),
                seen: Seen::default(),
                has_page: true,
                is_resuming: false,
                last: None,
                script: None,
                eta: Eta::default(),
            },
        }
    }

    /// For a manually started master: shows its log.
    pub(crate) fn relay(job: &Job) -> Self {
        let log = job.paths().log(InstanceId::MASTER);
        let offset = std::fs::metadata(log).map_or(0, |metadata| metadata.len());
        Self::with(job, Form::Relay { offset })
    }

    /// Shows only the progress, without the address of the job's page.
    pub(crate) fn progress_of(job: &Job) -> Self {
        Self { has_page: true, ..Self::new(job) }
    }

    /// Shows nothing, and only follows the status.
    pub(crate) fn silent(target: &Target) -> Self {
        Self { form: Form::Quiet, ..Self::of(target) }
    }

    fn with(job: &Job, form: Form) -> Self {
        let mut seen = Seen::default();
        if let Some(status) = job.status() {
            seen.news(&status, Style::Log);
        }
        let is_resuming = false;
        let job = Some(job.clone());
        let eta = Eta::default();
        Self { job, form, seen, has_page: false, is_resuming, last: None, script: None, eta }
    }

    /// The same, and shows what the user's own code prints in these workers.
    pub(crate) fn with_script(mut self, shown: LogToTerminal) -> Self {
        let logs = self.job.as_ref().map(|job| job.paths().logs());
        self.script = logs.map(|logs| ScriptOutput::new(logs, shown, self.is_resuming));
        self
    }

    /// The same for a job that may be resumed.
    pub(crate) fn resuming(self, is_resuming: bool) -> Self {
        Self { is_resuming, ..self }
    }

    /// A line about something that happened.
    pub(crate) fn print(&mut self, line: &str) {
        match &self.form {
            Form::Bar(bar) => bar.suspend(|| eprint(line)),
            Form::Quiet => {}
            Form::Plain { .. } | Form::Relay { .. } => eprint(line),
        }
    }

    /// Shows what is new.
    pub(crate) fn tick(&mut self) {
        // Before the status: what is printed after the end of a failed job is then not shown.
        if let Some(script) = &mut self.script {
            script.read();
        }
        self.show_job();
        self.show_script();
    }

    fn show_job(&mut self) {
        let Some(job) = &self.job else { return };
        if let Form::Relay { offset } = &mut self.form {
            relay(job, offset);
            return;
        }
        let Some(status) = job.fresh_status() else { return };
        self.is_resuming &= status.state() == JobState::Starting;
        let shows_page = !self.has_page && !self.is_resuming;
        let page = shows_page.then(|| crate::status::page(job, &status)).flatten();
        self.print_news(&status);
        if let Some(page) = page {
            self.has_page = true;
            self.print(&format!("view the job's page at {page}"));
        }
        self.show(status);
    }

    /// Copies what the user's own code has printed to standard output.
    fn show_script(&mut self) {
        let Some(script) = &mut self.script else { return };
        let text = script.take(self.last.as_ref());
        let show = || _ = std::io::stdout().lock().write_all(text.as_bytes());
        match &self.form {
            _ if text.is_empty() => {}
            Form::Bar(bar) => bar.suspend(show),
            Form::Quiet | Form::Plain { .. } | Form::Relay { .. } => show(),
        }
    }

    fn print_news(&mut self, status: &JobStatus) {
        let style = if matches!(self.form, Form::Bar(_)) { Style::Bar } else { Style::Log };
        for line in self.seen.news(status, style) {
            self.print(&line);
        }
    }

    /// Shows what is new in this status.
    pub(crate) fn show(&mut self, mut status: JobStatus) {
        self.print_news(&status);
        status.eta_secs = self.eta.smooth(status.elapsed_secs, status.eta_secs);
        match &mut self.form {
            _ if self.is_resuming => {}
            Form::Bar(bar) => draw(bar, &status),
            Form::Plain { next, line } => {
                let now = Instant::now();
                if next.is_none_or(|next| next <= now) {
                    let new = progress(&status);
                    if new != *line {
                        eprint(&new);
                        *line = new;
                        *next = Some(now + PLAIN_EVERY);
                    }
                }
            }
            Form::Quiet | Form::Relay { .. } => {}
        }
        self.last = Some(status);
    }

    /// Sets the final status of a job on a cluster.
    pub(crate) fn end_with(&mut self, status: JobStatus) {
        self.last = Some(status);
    }

    /// Removes the bar and returns the last known status of the job.
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
        if console::is_quiet() {
            Self::Quiet
        } else if std::io::stderr().is_terminal() {
            Self::Bar(bar())
        } else {
            Self::Plain { next: None, line: String::new() }
        }
    }
}

/// `Evaluation metrics[v=50]: {'accuracy': 0.7712}`, the form that users grep for.
fn metrics_line(evaluation: &Evaluation) -> String {
    let metrics = sorted(evaluation).map(|(name, value)| format!("'{name}': {}", decimal(*value)));
    let metrics = metrics.collect::<Vec<_>>().join(", ");
    format!("Evaluation metrics[v={}]: {{{metrics}}}", evaluation.version)
}

/// `accuracy 0.7712, loss 0.5000`.
pub(crate) fn metrics_text(evaluation: &Evaluation) -> String {
    let metrics = sorted(evaluation).map(|(name, value)| format!("{name} {}", decimal(*value)));
    metrics.collect::<Vec<_>>().join(", ")
}

/// Metrics in the order of their names.
fn sorted(evaluation: &Evaluation) -> impl Iterator<Item = (&String, &f64)> {
    let mut metrics: Vec<_> = evaluation.metrics.iter().collect();
    metrics.sort_by_key(|(name, _)| name.as_str());
    metrics.into_iter()
}

/// One line about how far the job is.
fn progress(status: &JobStatus) -> String {
    let JobStatus { records_done, records_total, records_per_second, .. } = status;
    let state = status.state();
    let mut line = match status.job_type() {
        JobType::Train => {
            format!("{state}: epoch {}, step {}, ", epoch(status, "/"), grouped(status.step))
        }
        JobType::Evaluate | JobType::Predict => format!("{state}: "),
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
    if let Some(loss) = status.known_loss() {
        line += &format!(", loss {}", decimal(loss.into()));
    }
    line
}

/// `1/3` or `1 of 3`; without an end, `1`.
pub(crate) fn epoch(status: &JobStatus, of: &str) -> String {
    match status.num_epochs {
        0 => format!("{}", status.epoch + 1),
        total => format!("{}{of}{total}", (status.epoch + 1).min(total)),
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
    bar.set_prefix(match status.job_type() {
        JobType::Train => format!("{} epoch {}", status.state(), epoch(status, "/")),
        JobType::Evaluate | JobType::Predict => status.state().to_string(),
    });
    let workers = status.instances.iter();
    let is_working =
        |i: &&Instance| i.role() == Role::Worker && i.state() == InstanceState::Working;
    let workers = workers.filter(is_working).count();
    let mut message = format!("{} records/s", grouped(rounded(status.records_per_second)));
    if status.eta_secs >= 0.0 {
        message += &format!("  {} left", span(status.eta_secs));
    }
    if let Some(loss) = status.known_loss() {
        message += &format!("  loss {}", decimal(loss.into()));
    }
    bar.set_message(format!("{message}  {}", counted(workers as u64, "worker")));
    bar.tick();
}

/// Copies new lines of the master's log to standard error.
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
    use edl_core::job::JobState;

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
    fn progress_reads_as_a_sentence() {
        let status = JobStatus {
            state: JobState::Running.into(),
            job_type: JobType::Train.into(),
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

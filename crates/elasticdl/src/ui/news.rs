// SPDX-License-Identifier: Apache-2.0
//! The lines about what has happened in a job, each shown once.

use std::collections::BTreeSet;

use edl_core::job::EventKind;
use edl_net::proto::{Evaluation, Event, JobStatus};
use tracing::Level;

use super::{metrics_line, metrics_text};
use crate::console::grouped;
use crate::telemetry;

/// Events that the bar or the summary shows anyway.
const ROUTINE: [EventKind; 6] = [
    EventKind::WorkerJoined,
    EventKind::WorkerEnded,
    EventKind::Stopping,
    EventKind::Succeeded,
    EventKind::Failed,
    EventKind::Stopped,
];

/// How the lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// Above a bar on a terminal.
    Bar,
    /// As in logs.
    Log,
}

/// What was already shown.
#[derive(Default)]
pub(super) struct Seen {
    /// Term and number of the last event; each master starts counting from zero.
    event: Option<(u64, u64)>,
    evaluations: BTreeSet<String>,
}

impl Seen {
    /// The lines for events and evaluations that were not shown yet.
    pub(super) fn news(&mut self, status: &JobStatus, style: Style) -> Vec<String> {
        let mut lines = Vec::new();
        for event in &status.events {
            let at = Some((status.term, event.number));
            if at > self.event {
                self.event = at;
                if !ROUTINE.contains(&event.kind()) {
                    lines.push(event_line(event, style));
                }
            }
        }
        for evaluation in &status.evaluations {
            let line = metrics_line(evaluation);
            if self.evaluations.insert(line.clone()) {
                lines.push(evaluation_line(evaluation, &line, style));
            }
        }
        lines
    }
}

fn event_line(event: &Event, style: Style) -> String {
    match style {
        Style::Bar if event.kind() == EventKind::Checkpoint => format!("✓ {}", event.text),
        Style::Bar | Style::Log => event.text.clone(),
    }
}

fn evaluation_line(evaluation: &Evaluation, classic: &str, style: Style) -> String {
    match style {
        Style::Bar => {
            let best = if evaluation.best { " (best)" } else { "" };
            let step = grouped(evaluation.version);
            format!("✓ evaluation at step {step}: {}{best}", metrics_text(evaluation))
        }
        Style::Log => {
            format!("{}{classic}", telemetry::prefix(Level::INFO, "ui.rs", line!(), "evaluation"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluation(version: u64, accuracy: f64, best: bool) -> Evaluation {
        let metrics = [("loss".to_owned(), 0.5), ("accuracy".to_owned(), accuracy)].into();
        Evaluation { version, epoch: 0, metrics, best }
    }

    fn event(number: u64, text: &str) -> Event {
        Event { number, text: text.into(), ..Event::default() }
    }

    #[test]
    fn events_are_shown_once_and_each_master_counts_from_zero() {
        let routine = Event { kind: EventKind::WorkerJoined.into(), ..event(2, "routine") };
        let mut seen = Seen::default();
        let mut status = JobStatus {
            term: 1,
            events: vec![event(0, "a"), event(1, "b"), routine],
            evaluations: vec![evaluation(5, 0.5, false)],
            ..JobStatus::default()
        };
        let lines = seen.news(&status, Style::Log);
        assert_eq!(lines.len(), 3);
        assert!(lines[2].contains("Evaluation metrics[v=5]"), "{lines:?}");
        assert!(seen.news(&status, Style::Log).is_empty());
        status.events.push(event(3, "c"));
        assert_eq!(seen.news(&status, Style::Log), ["c"]);
        status.term = 2;
        status.events = vec![event(0, "again")];
        assert_eq!(seen.news(&status, Style::Log), ["again"]);
    }

    #[test]
    fn above_a_bar_evaluations_and_checkpoints_are_no_log_lines() {
        let saved = Event { kind: EventKind::Checkpoint.into(), ..event(0, "checkpoint 7 saved") };
        let status = JobStatus {
            events: vec![saved, event(1, "worker-1 was killed")],
            evaluations: vec![evaluation(1250, 0.75, false), evaluation(2500, 0.875, true)],
            ..JobStatus::default()
        };
        assert_eq!(
            Seen::default().news(&status, Style::Bar),
            [
                "✓ checkpoint 7 saved",
                "worker-1 was killed",
                "✓ evaluation at step 1,250: accuracy 0.7500, loss 0.5000",
                "✓ evaluation at step 2,500: accuracy 0.8750, loss 0.5000 (best)",
            ]
        );
    }
}

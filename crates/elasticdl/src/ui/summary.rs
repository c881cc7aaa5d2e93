// SPDX-License-Identifier: Apache-2.0
//! The summary at a job's end.

use std::fmt::Write as _;
use std::path::Path;

use edl_core::spec::JobType;
use edl_core::text::decimal;
use edl_net::proto::JobStatus;

use super::{rounded, sorted};
use crate::console::{counted, grouped, span};
use crate::exit::Exit;
use crate::goodput;

/// How the job ended, what it reached, where its results are and what to do next.
/// `handle` is what commands find the job by.
pub(crate) fn summary(handle: &str, status: Option<&JobStatus>, exit: Exit) -> String {
    let name = handle;
    let job = handle.split(' ').next().unwrap_or_default();
    let mut text = format!("job {job} {}", outcome(exit));
    let Some(status) = status else {
        text += "\n";
        let command = if exit == Exit::Failed { "explain" } else { "logs" };
        line(&mut text, command, &format!("elasticdl {command} {name}"));
        return text;
    };
    let _infallible = writeln!(text, " after {}", span(status.elapsed_secs));
    if exit != Exit::Ok && !status.reason.is_empty() {
        line(&mut text, "reason", &status.reason);
    }
    if let Some(evaluation) = status.evaluations.last() {
        for (metric, value) in sorted(evaluation) {
            line(&mut text, metric, &decimal(*value));
        }
    }
    line(&mut text, "records", &records(status, exit));
    if let Some(goodput) = status.goodput.as_ref().and_then(goodput::line) {
        line(&mut text, "goodput", &goodput);
    }
    if exit == Exit::Ok && !status.output.is_empty() && status.job_type() != JobType::Evaluate {
        let what = if status.job_type() == JobType::Predict { "output" } else { "model" };
        line(&mut text, what, &result_file(&status.output, what));
    }
    match exit {
        Exit::Ok if status.job_type() == JobType::Train => {
            line(&mut text, "audit", &format!("elasticdl audit {name}"));
            // On a cluster the page is where the pods' storage is.
            if job == name {
                line(&mut text, "report", &format!("elasticdl report {name}"));
            }
        }
        Exit::Failed => line(&mut text, "explain", &format!("elasticdl explain {name}")),
        Exit::Stopped | Exit::Interrupted => {
            line(
                &mut text,
                "resume",
                &format!("elasticdl {} --resume {name}", status.job_type().name()),
            );
        }
        Exit::Ok
        | Exit::BadInput
        | Exit::NotFound
        | Exit::Relaunch
        | Exit::Panicked
        | Exit::TimedOut => {}
    }
    text
}

fn outcome(exit: Exit) -> &'static str {
    match exit {
        Exit::Ok => "succeeded",
        Exit::Failed => "failed",
        Exit::Stopped => "was stopped",
        Exit::Interrupted => "was interrupted",
        Exit::BadInput | Exit::NotFound | Exit::Relaunch | Exit::Panicked | Exit::TimedOut => {
            "did not start"
        }
    }
}

fn records(status: &JobStatus, exit: Exit) -> String {
    // Nothing is counted after the end of an evaluation.
    let is_measured = status.job_type() == JobType::Evaluate && exit == Exit::Ok;
    let done = if is_measured { status.records_total } else { status.records_done };
    let mut text = grouped(done);
    if done < status.records_total {
        let _infallible = write!(text, " of {}", grouped(status.records_total));
    }
    #[expect(clippy::cast_precision_loss, reason = "a speed for the eye")]
    let speed = done as f64 / status.elapsed_secs.max(1e-3);
    let _infallible = write!(text, ", {} records/s", grouped(rounded(speed)));
    if status.job_type() == JobType::Train {
        let _infallible = write!(text, ", {}", counted(status.step, "step"));
    }
    text
}

/// The model's own file when it is there, else the folder.
fn result_file(output: &str, what: &str) -> String {
    let file = Path::new(output).join("model.safetensors");
    if what == "model" && file.is_file() { file.display().to_string() } else { output.to_owned() }
}

fn line(text: &mut String, name: &str, value: &str) {
    let _infallible = writeln!(text, "  {name:<9} {value}");
}

#[cfg(test)]
mod tests {
    use edl_net::proto::Evaluation;
    use expect_test::expect;

    use super::*;

    fn check(status: Option<&JobStatus>, exit: Exit, expected: &expect_test::Expect) {
        expected.assert_eq(&summary("x", status, exit));
    }

    #[test]
    fn a_summary_shows_the_results_and_the_next_commands() {
        let metrics = [("loss".to_owned(), 0.33), ("accuracy".to_owned(), 0.87654)].into();
        let mut status = JobStatus {
            job_type: JobType::Train.into(),
            elapsed_secs: 41.0,
            records_done: 10_000,
            records_total: 10_000,
            records_per_second: 1250.0,
            step: 157,
            output: "/out".into(),
            evaluations: vec![Evaluation { metrics, ..Evaluation::default() }],
            ..JobStatus::default()
        };
        check(
            Some(&status),
            Exit::Ok,
            &expect![[r"
                job x succeeded after 41 s
                  accuracy  0.8765
                  loss      0.3300
                  records   10,000, 244 records/s, 157 steps
                  model     /out
                  audit     elasticdl audit x
                  report    elasticdl report x
            "]],
        );
        status.evaluations.clear();
        status.records_done = 500;
        status.reason = "asked to".into();
        check(
            Some(&status),
            Exit::Interrupted,
            &expect![[r"
                job x was interrupted after 41 s
                  reason    asked to
                  records   500 of 10,000, 12 records/s, 157 steps
                  resume    elasticdl train --resume x
            "]],
        );
        check(
            None,
            Exit::Failed,
            &expect![[r"
                job x failed
                  explain   elasticdl explain x
            "]],
        );
    }
}

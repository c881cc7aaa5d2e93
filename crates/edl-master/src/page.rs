// SPDX-License-Identifier: Apache-2.0
//! The job's page: one self-contained file, live from the master or saved in the job's folder.

use std::collections::BTreeMap;
use std::sync::Arc;

use edl_core::job_dir::JobDir;
use edl_net::proto::JobStatus;
use edl_page::Page;
use serde_json::json;

use crate::history::History;
use crate::usage::Usage;

/// The page, with a place for the data of a job that has ended.
const PAGE: Page = Page {
    title: "elasticdl",
    body: include_str!("page/page.html"),
    style: include_str!("page/page.css"),
    script: concat!(
        include_str!("page/curves.js"),
        include_str!("page/logs.js"),
        include_str!("page/page.js")
    ),
};

/// Evaluations that can be distinguished on a plot; a browser slows down with many more.
const MAX_EVALUATIONS: usize = 60;

/// What is new for watchers of the page. `lives` grows whenever a process came or went, so readers
/// request the history again.
pub(crate) fn update(
    status: &JobStatus,
    history: &History,
    usage: &BTreeMap<String, Usage>,
    lives: u64,
) -> Arc<str> {
    let sample = history.samples.last();
    json!({ "status": drawn(status), "sample": sample, "usage": usage, "lives": lives })
        .to_string()
        .into()
}

/// Everything, for a new watcher.
pub(crate) fn everything(status: &JobStatus, history: &History, lives: u64) -> String {
    json!({ "status": drawn(status), "history": history.to_json(), "lives": lives }).to_string()
}

/// The status with some of its many evaluations, the last and the best among them.
fn drawn(status: &JobStatus) -> JobStatus {
    let mut drawn = status.clone();
    let evaluations = &status.evaluations;
    let stride = evaluations.len().div_ceil(MAX_EVALUATIONS).max(1);
    let best = evaluations.iter().rposition(|evaluation| evaluation.best);
    let from_end = |index: usize| evaluations.len() - 1 - index;
    let all = evaluations.iter().enumerate();
    let kept =
        all.filter(|(index, _)| from_end(*index).is_multiple_of(stride) || Some(*index) == best);
    drawn.evaluations = kept.map(|(_, evaluation)| evaluation.clone()).collect();
    drawn
}

/// The live page.
pub(crate) fn live() -> String {
    PAGE.with("")
}

/// The page with everything in it.
pub(crate) fn frozen(status: &JobStatus, history: &History) -> String {
    PAGE.with(&everything(status, history, 0))
}

/// The page of a job from what its master has left in the job's folder.
#[must_use]
pub fn report(job_dir: &JobDir, status: &JobStatus) -> String {
    let history = History::load(job_dir).unwrap_or_else(History::new);
    frozen(status, &history)
}

#[cfg(test)]
mod tests {
    use edl_net::proto::Evaluation;

    use super::*;

    #[test]
    fn of_many_evaluations_some_are_drawn_with_the_best_and_the_last() {
        let evaluation =
            |version| Evaluation { version, best: version == 5, ..Evaluation::default() };
        let status =
            |n| JobStatus { evaluations: (0..n).map(evaluation).collect(), ..JobStatus::default() };
        assert_eq!(drawn(&status(60)), status(60));
        let versions = drawn(&status(1000)).evaluations;
        let versions: Vec<u64> = versions.iter().map(|evaluation| evaluation.version).collect();
        assert!(versions.len() <= MAX_EVALUATIONS + 1 && versions.is_sorted(), "{versions:?}");
        assert!(versions.contains(&5) && versions.ends_with(&[999]), "{versions:?}");
    }
}

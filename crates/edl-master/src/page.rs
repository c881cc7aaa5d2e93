// SPDX-License-Identifier: Apache-2.0
//! The job's page: one file without any other, live from the master or frozen in the job's folder.

use std::path::Path;
use std::sync::Arc;

use edl_net::proto::JobStatus;
use serde_json::json;

use crate::history::History;

/// The page, with a place for the data of a job that has ended.
pub(crate) const PAGE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");
const PLOT: &str = include_str!("page/plot.js");

/// What the page may load: nothing from elsewhere.
pub(crate) const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; \
    script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; \
    form-action 'none'; frame-ancestors 'none'";

/// What is new for those who look at the page. `lives` grows whenever somebody came or went, so
/// that readers ask for the history again.
pub(crate) fn news(status: &JobStatus, history: &History, lives: u64) -> Arc<str> {
    json!({ "status": status, "sample": history.samples.last(), "lives": lives }).to_string().into()
}

/// Everything, for somebody who looks for the first time.
pub(crate) fn everything(status: &JobStatus, history: &History, lives: u64) -> String {
    json!({ "status": status, "history": history.to_json(), "lives": lives }).to_string()
}

/// The live page.
pub(crate) fn live() -> String {
    filled("")
}

/// The page with everything in it.
pub(crate) fn frozen(status: &JobStatus, history: &History) -> String {
    let data = everything(status, history, 0);
    // Within a script only `</` and `<!--` could end it.
    filled(&data.replace('<', "\\u003c"))
}

fn filled(data: &str) -> String {
    PAGE.replacen("/*STYLE*/", STYLE, 1)
        .replacen("/*PLOT*/", PLOT, 1)
        .replacen("/*SCRIPT*/", SCRIPT, 1)
        .replacen("/*DATA*/", data, 1)
}

/// The page of a job from what its master has left in the job's folder.
#[must_use]
pub fn report(job_dir: &Path, status: &JobStatus) -> String {
    let history = History::load(job_dir).unwrap_or_else(History::new);
    frozen(status, &history)
}

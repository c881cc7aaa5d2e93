// SPDX-License-Identifier: Apache-2.0
//! Jobs of Microsoft's Philly cluster (2017), replayed with some of them elastic.
//!
//! The trace has the number of GPUs and the duration of each job. An elastic job may have from a
//! quarter to twice as many GPUs for the same work; additional GPUs are a little less efficient. The
//! caller provides the text of the trace.

use std::time::Duration;

use edl_core::rng::{key, unit};
use edl_core::time::Time;

use crate::resources::Resources;
use crate::sim::adaptdl::Error;
use crate::sim::kubernetes::Kubernetes;
use crate::sim::scenario::{JobScript, Scenario};
use crate::sim::work::Work;
use crate::snapshot::{Job, JobId, Node, NodeId, RoleSpec, Roles};
use crate::state::Options;

/// Twice as many workers are 2^0.9 = 1.87 times as fast.
const SCALING: f64 = 0.9;
const GPUS_PER_NODE: u64 = 8;

/// One job of the trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PhillyJob {
    /// Seconds since an origin that all entries share.
    pub submitted: i64,
    pub secs: f64,
    pub n_gpus: u32,
}

/// Parses the trace; in order of submission.
/// Fails if a line is malformed.
pub fn parse(text: &str) -> Result<Vec<PhillyJob>, Error> {
    let mut entries = Vec::new();
    for (index, line) in text.lines().enumerate().skip(1).filter(|(_, line)| !line.is_empty()) {
        let entry = entry(line).ok_or_else(|| Error::Malformed {
            file: "philly.csv".to_owned(),
            line: index + 1,
            text: line.to_owned(),
        })?;
        entries.push(entry);
    }
    entries.sort_by_key(|entry| entry.submitted);
    Ok(entries)
}

/// `n_jobs` jobs starting with `first`, on `n_nodes` nodes of 8 GPUs; a percentage of them elastic.
#[must_use]
pub fn scenario(
    entries: &[PhillyJob],
    first: usize,
    n_jobs: usize,
    n_nodes: u32,
    elastic_percent: u32,
) -> Scenario {
    let chosen: Vec<PhillyJob> = entries
        .iter()
        .skip(first)
        .filter(|entry| u64::from(entry.n_gpus) <= GPUS_PER_NODE * u64::from(n_nodes) / 2)
        .take(n_jobs)
        .copied()
        .collect();
    let origin = chosen.first().map_or(0, |entry| entry.submitted);
    let jobs = chosen.iter().zip(0..).map(|(entry, id)| job(id, entry, origin, elastic_percent));
    let node = |id| Node::new(NodeId(id), Resources::new(GPUS_PER_NODE, 0, 0));
    let name = format!("philly, {elastic_percent} % elastic");
    Scenario {
        jobs: jobs.collect(),
        plan_every: Duration::from_secs(60),
        rescale: Duration::from_secs(10),
        row_every: Duration::from_secs(600),
        options: Options { max_load_permille: 1000, ..Options::default() },
        ..Scenario::new(name, (0..n_nodes).map(node).collect(), Kubernetes::of_today())
    }
}

fn job(id: u32, entry: &PhillyJob, origin: i64, elastic_percent: u32) -> JobScript {
    let n = entry.n_gpus.max(1);
    let is_elastic = unit(key(&[u64::from(id), 17])) * 100.0 < f64::from(elastic_percent);
    let (min, max) = if is_elastic { (n.div_ceil(4), n * 2) } else { (n, n) };
    let wait = u64::try_from(entry.submitted - origin).unwrap_or(0);
    let job = Job::new(
        JobId(id),
        Time::ZERO + Duration::from_secs(wait),
        Roles { worker: RoleSpec { shape: Resources::new(1, 0, 0), min, max }, ..Roles::default() },
    );
    let left = entry.secs.max(1.0) * f64::from(n).powf(SCALING);
    JobScript {
        name: format!("philly-{id}"),
        job,
        work: Work::WorkerSeconds { left, scaling: SCALING },
    }
}

fn entry(line: &str) -> Option<PhillyJob> {
    let mut fields = line.split(',');
    let submitted = seconds(fields.next()?)?;
    Some(PhillyJob {
        submitted,
        secs: fields.next()?.parse().ok()?,
        n_gpus: fields.next()?.parse().ok()?,
    })
}

/// Seconds of `2017-10-09 07:01:55` since a fixed day.
fn seconds(text: &str) -> Option<i64> {
    let (date, time) = text.split_once(' ')?;
    let numbers = |text: &str, by: char| -> Option<Vec<i64>> {
        text.split(by).map(|part| part.parse().ok()).collect()
    };
    let (date, time) = (numbers(date, '-')?, numbers(time, ':')?);
    let ([year, month, day], [hour, minute, second]) = (date.as_slice(), time.as_slice()) else {
        return None;
    };
    // Days of the proleptic calendar. Years begin in March, so leap days come last.
    let (shifted, moved) = if *month > 2 { (*year, month - 3) } else { (year - 1, month + 9) };
    let days =
        365 * shifted + shifted / 4 - shifted / 100 + shifted / 400 + (153 * moved + 2) / 5 + day;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_follow_each_other() {
        let secs = |text| seconds(text).expect("a time");
        assert_eq!(secs("2017-10-10 00:00:00") - secs("2017-10-09 23:59:59"), 1);
        assert_eq!(secs("2017-11-01 00:00:00") - secs("2017-10-31 00:00:00"), 86_400);
        assert_eq!(secs("2018-01-01 00:00:00") - secs("2017-12-31 00:00:00"), 86_400);
        assert_eq!(seconds("yesterday"), None);
    }

    #[test]
    fn a_line_that_is_no_job_is_named() {
        let text = "timestamp,duration,num_gpus\n2017-10-09 07:01:55,66.0,1\n2017-10-09,x,1\n";
        let error = parse(text).unwrap_err();
        assert_eq!(error.to_string(), "`philly.csv` line 3: unexpected value `2017-10-09,x,1`");
    }
}

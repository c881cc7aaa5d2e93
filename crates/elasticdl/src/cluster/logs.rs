// SPDX-License-Identifier: Apache-2.0
//! `logs` of a job on the cluster: the log lines of its pods, in order of time.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::time::Duration;

use edl_core::platform::InstanceId;
use edl_kube::client::{Cluster, Found, LogStream, Pod, PodState, pod_state};
use edl_kube::names;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{ClusterJob, explained};
use crate::exit::{Exit, not_found};
use crate::logs::{by_time, labelled, timed};

/// Interval between searches for new pods.
const POLL: Duration = Duration::from_secs(1);
/// Lines that wait to be written.
const QUEUE: usize = 1024;

/// Runs the command.
pub(crate) fn run(
    job: &ClusterJob,
    only: Option<&str>,
    follow: bool,
    tail: Option<usize>,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    if follow {
        return job.runtime.block_on(follow_all(job, only, out));
    }
    let mut lines = job.runtime.block_on(read_all(job, only))?;
    if let Some(tail) = tail {
        lines.drain(..lines.len().saturating_sub(tail));
    }
    for line in lines {
        writeln!(out, "{line}")?;
    }
    Ok(Exit::Ok)
}

/// What the pods of a job have logged, as far as it is available.
pub(crate) async fn of_pods(job: &ClusterJob) -> Vec<(InstanceId, String)> {
    let mut all = Vec::new();
    for pod in &job.found.pods {
        let instance = names::instance_of(&pod.metadata);
        let Some((instance, name)) = instance.zip(pod.metadata.name.as_ref()) else { continue };
        let log = job.cluster.log(name).await.ok().flatten();
        all.extend(log.map(|log| (instance, log)));
    }
    all
}

/// The processes of a job by the names of their pods. Several may have been its master.
fn processes(found: &Found, only: Option<&str>) -> BTreeMap<String, String> {
    let process = |pod: &Pod| {
        let instance = names::instance_of(&pod.metadata)?;
        Some((pod.metadata.name.clone()?, instance.to_string()))
    };
    let all = found.pods.iter().filter_map(process);
    all.filter(|(_, name)| only.is_none_or(|only| only == name)).collect()
}

async fn read_all(job: &ClusterJob, only: Option<&str>) -> anyhow::Result<Vec<String>> {
    let name = &job.spec().job_name;
    let mut lines = Vec::new();
    for (pod, process) in processes(&job.found, only) {
        let Some(log) = job.cluster.log(&pod).await.map_err(explained)? else { continue };
        lines.extend(timed(&log, &mut String::new(), &process, only.is_some()));
    }
    if lines.is_empty() {
        let what = only.map_or_else(|| "logs yet".into(), |process| format!("log of `{process}`"));
        return Err(not_found(format!("job `{name}` has no {what}")));
    }
    Ok(by_time(lines))
}

/// Prints the lines of all pods as they appear, until no process runs.
async fn follow_all(
    job: &ClusterJob,
    only: Option<&str>,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    let name = &job.spec().job_name;
    let (sender, mut lines) = mpsc::channel::<String>(QUEUE);
    let mut streams = JoinSet::new();
    let mut followed = BTreeSet::new();
    let mut ticks = tokio::time::interval(POLL);
    loop {
        tokio::select! {
            Some(line) = lines.recv() => {
                writeln!(out, "{line}")?;
                while let Ok(line) = lines.try_recv() {
                    writeln!(out, "{line}")?;
                }
                out.flush()?;
            }
            Some(_) = streams.join_next() => {}
            _ = ticks.tick() => {
                let found = job.cluster.find(name).await.map_err(explained)?;
                let running = found.as_ref().map(|found| processes(found, only)).unwrap_or_default();
                for (pod, process) in running {
                    if followed.contains(&pod) {
                        continue;
                    }
                    if let Some(stream) = job.cluster.follow(&pod).await.map_err(explained)? {
                        followed.insert(pod);
                        streams.spawn(copy(stream, process, only.is_some(), sender.clone()));
                    }
                }
                if streams.is_empty() && lines.is_empty() && has_ended(&job.cluster, name).await? {
                    return Ok(Exit::Ok);
                }
            }
        }
    }
}

async fn copy(mut stream: LogStream, process: String, is_only: bool, sender: mpsc::Sender<String>) {
    while let Some(line) = stream.next().await {
        if sender.send(labelled(&process, &line, is_only)).await.is_err() {
            return;
        }
    }
}

/// Whether every pod of the job has ended, and no master will follow.
async fn has_ended(cluster: &Cluster, name: &str) -> anyhow::Result<bool> {
    let found = cluster.find(name).await.map_err(explained)?;
    let is_alive = |pod: &Pod| !matches!(pod_state(pod), PodState::Ended { .. });
    Ok(!found.is_some_and(|found| found.is_restarting() || found.pods.iter().any(is_alive)))
}

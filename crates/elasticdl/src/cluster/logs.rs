// SPDX-License-Identifier: Apache-2.0
//! `logs` of a job on the cluster: what its pods wrote, in the order of time.

use std::collections::BTreeSet;
use std::io::Write;
use std::time::Duration;

use edl_kube::client::{Cluster, Found};
use edl_kube::names;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{Remote, sentence};
use crate::exit::{Exit, not_found};
use crate::logs::time_of;

/// New pods are looked for this often.
const LOOK: Duration = Duration::from_secs(1);
/// Lines that wait to be written.
const QUEUE: usize = 1024;

/// Runs the command.
pub(crate) fn run(
    remote: &Remote,
    only: Option<&str>,
    follow: bool,
    tail: Option<usize>,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    if follow {
        return remote.runtime.block_on(follow_all(remote, only, out));
    }
    let mut lines = remote.runtime.block_on(read_all(remote, only))?;
    if let Some(tail) = tail {
        lines.drain(..lines.len().saturating_sub(tail));
    }
    for line in lines {
        writeln!(out, "{line}")?;
    }
    Ok(Exit::Ok)
}

/// The processes of a job that have pods, by name.
fn processes(found: &Found, only: Option<&str>) -> BTreeSet<String> {
    let labels = found.pods.iter().filter_map(|pod| pod.metadata.labels.as_ref());
    let all = labels.filter_map(names::instance).map(|instance| instance.to_string());
    all.filter(|name| only.is_none_or(|only| only == name)).collect()
}

async fn read_all(remote: &Remote, only: Option<&str>) -> anyhow::Result<Vec<String>> {
    let job = &remote.spec().job_name;
    let mut lines = Vec::new();
    for process in processes(&remote.found, only) {
        let Some(log) = remote.cluster.log(job, &process).await.map_err(sentence)? else {
            continue;
        };
        let mut time = String::new();
        for line in log.text.lines() {
            if let Some(new) = time_of(line) {
                new.clone_into(&mut time);
            }
            lines.push((time.clone(), shown(&process, line, only)));
        }
    }
    if lines.is_empty() {
        let what = only.map_or_else(|| "logs yet".into(), |process| format!("log of `{process}`"));
        return Err(not_found(format!("job `{job}` has no {what}")));
    }
    // Stable: lines of one process stay in their order.
    lines.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(lines.into_iter().map(|(_, line)| line).collect())
}

fn shown(process: &str, line: &str, only: Option<&str>) -> String {
    if only.is_some() { line.to_owned() } else { format!("{process:<10} {line}") }
}

/// Writes lines as they come, of pods as they come, until no process writes any more.
async fn follow_all(
    remote: &Remote,
    only: Option<&str>,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    let job = &remote.spec().job_name;
    let (sender, mut lines) = mpsc::channel::<String>(QUEUE);
    let mut streams = JoinSet::new();
    let mut followed = BTreeSet::new();
    let mut look = tokio::time::interval(LOOK);
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
            _ = look.tick() => {
                let found = remote.cluster.find(job).await.map_err(sentence)?;
                let running = found.as_ref().map(|found| processes(found, only)).unwrap_or_default();
                for process in running {
                    if followed.contains(&process) {
                        continue;
                    }
                    if let Some(stream) = remote.cluster.follow(job, &process).await.map_err(sentence)? {
                        followed.insert(process.clone());
                        let (sender, only) = (sender.clone(), only.map(str::to_owned));
                        streams.spawn(copy(stream, process, only, sender));
                    }
                }
                if streams.is_empty() && lines.is_empty() && has_ended(&remote.cluster, job).await? {
                    return Ok(Exit::Ok);
                }
            }
        }
    }
}

async fn copy(
    mut stream: edl_kube::client::LogStream,
    process: String,
    only: Option<String>,
    sender: mpsc::Sender<String>,
) {
    while let Some(line) = stream.next().await {
        if sender.send(shown(&process, &line, only.as_deref())).await.is_err() {
            return;
        }
    }
}

/// Whether nothing of the job runs or will run.
async fn has_ended(cluster: &Cluster, job: &str) -> anyhow::Result<bool> {
    use edl_kube::client::{Phase, phase};
    let found = cluster.find(job).await.map_err(sentence)?;
    let pods = found.map(|found| found.pods).unwrap_or_default();
    Ok(pods.iter().all(|pod| matches!(phase(pod), Phase::Ended { .. })))
}

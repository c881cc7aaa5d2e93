// SPDX-License-Identifier: Apache-2.0
//! Watching a job on the cluster until it ends. Ctrl-C ends the watching, not the job.

use std::io::Write;
use std::time::{Duration, Instant};

use edl_kube::client::{Cluster, Phase, Pod, phase};
use edl_kube::rescue;
use edl_net::proto::JobStatus;

use super::master::Master;
use super::status::of_pods;
use super::{Remote, sentence};
use crate::exit::{Exit, refuse};
use crate::jobs;
use crate::say::say;
use crate::ui::{self, Ui};

const TICK: Duration = Duration::from_millis(300);
/// A master whose pod is gone is made again by those that are left within this time.
const WITHOUT_MASTER: Duration = Duration::from_secs(60);

/// How the watching ended.
enum Seen {
    End(Box<JobStatus>),
    Enough,
}

/// Shows the job until it ends, and leaves with its exit code.
pub(crate) fn attach(remote: &Remote, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let job = &remote.spec().job_name;
    let handle = remote.handle();
    let mut ui = Ui::remote();
    let seen = remote.runtime.block_on(watch(&remote.cluster, job, &handle, &mut ui));
    ui.finish();
    match seen? {
        Seen::End(status) => {
            let exit = if jobs::is_final(&status.state) {
                Exit::of_state(&status.state)
            } else {
                Exit::Stopped
            };
            write!(out, "{}", ui::summary(&handle, Some(&status), exit))?;
            Ok(exit)
        }
        Seen::Enough => {
            say(format_args!("the job keeps running; stop it with `elasticdl stop {handle}`"));
            Ok(Exit::Ok)
        }
    }
}

async fn watch(cluster: &Cluster, job: &str, handle: &str, ui: &mut Ui) -> anyhow::Result<Seen> {
    let mut tick = tokio::time::interval(TICK);
    let mut master: Option<Master> = None;
    let mut told = String::new();
    let mut last: Option<JobStatus> = None;
    let mut lost = Instant::now();
    loop {
        tokio::select! {
            _ = tokio::signal::ctrl_c() => return Ok(Seen::Enough),
            _ = tick.tick() => {}
        }
        if let Some(connected) = &mut master {
            match connected.status().await {
                Ok(status) => {
                    ui.show(status.clone());
                    last = Some(status);
                    continue;
                }
                Err(_) => master = None,
            }
        }
        let found = cluster.find(job).await.map_err(sentence)?;
        let Some(found) = found else {
            return Err(refuse(format!("job `{job}` was deleted")));
        };
        match found.master().map(phase) {
            Some(Phase::Running) => {
                lost = Instant::now();
                master = Master::connect(cluster, job).await.ok();
            }
            Some(Phase::Waiting(trouble)) => {
                lost = Instant::now();
                let text = trouble.map(|trouble| trouble.text).unwrap_or_default();
                if text != told && !text.is_empty() {
                    ui.say(&format!("the master is waiting: {text}"));
                    told = text;
                }
            }
            ended @ (Some(Phase::Ended { .. }) | None) => {
                let is_over = match ended {
                    Some(Phase::Ended { code, .. }) => rescue::is_over(code),
                    Some(Phase::Running | Phase::Waiting(_)) | None => false,
                };
                // Others can make a master again that was lost.
                let is_left = found.pods.iter().any(is_living);
                if is_over || !is_left || lost.elapsed() > WITHOUT_MASTER {
                    return Ok(Seen::End(Box::new(merged(last, of_pods(&found, handle)))));
                }
            }
        }
    }
}

fn is_living(pod: &Pod) -> bool {
    !matches!(phase(pod), Phase::Ended { .. })
}

/// What the master said last, with how its pod ended.
fn merged(last: Option<JobStatus>, end: JobStatus) -> JobStatus {
    match last {
        Some(last) if end.records_total == 0 => {
            JobStatus { state: end.state, reason: end.reason, ..last }
        }
        Some(_) | None => end,
    }
}

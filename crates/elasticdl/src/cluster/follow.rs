// SPDX-License-Identifier: Apache-2.0
//! Watching a job on the cluster until it ends.

use std::time::Duration;

use edl_kube::client::{PodState, pod_state};
use edl_net::proto::JobStatus;

use super::status::of_pods;
use super::{ClusterJob, connect, explained};
use crate::control::Master;
use crate::exit::refuse;
use crate::ui::{Ui, Watched};

const TICK: Duration = Duration::from_millis(300);

/// Shows the job until it ends.
pub(crate) async fn watch(job: &ClusterJob, ui: &mut Ui) -> anyhow::Result<Watched> {
    let (cluster, name) = (&job.cluster, &job.spec().job_name);
    let mut tick = tokio::time::interval(TICK);
    let mut master: Option<Master> = None;
    let mut last_reason = String::new();
    let mut last: Option<JobStatus> = None;
    loop {
        tokio::select! {
            _ = tokio::signal::ctrl_c() => return Ok(Watched::UserLeft),
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
        let found = cluster.find(name).await.map_err(explained)?;
        let Some(found) = found else {
            return Err(refuse(format!("job `{name}` was deleted")));
        };
        match found.master().map(pod_state) {
            Some(PodState::Running) => {
                master = connect(cluster, name).await.ok();
            }
            Some(PodState::Waiting(trouble)) => {
                let text = trouble.map(|trouble| trouble.text).unwrap_or_default();
                if text != last_reason && !text.is_empty() {
                    ui.print(&format!("the master is waiting: {text}"));
                    last_reason = text;
                }
            }
            Some(PodState::Ended { .. }) | None if found.is_restarting() => {}
            Some(PodState::Ended { .. }) | None => {
                ui.end_with(merged(last, of_pods(&found, &job.handle())));
                return Ok(Watched::JobEnded);
            }
        }
    }
}

/// The last status of the master, with how its pod ended.
fn merged(last: Option<JobStatus>, end: JobStatus) -> JobStatus {
    match last {
        Some(last) if end.records_total == 0 => {
            JobStatus { state: end.state, reason: end.reason, ..last }
        }
        Some(_) | None => end,
    }
}

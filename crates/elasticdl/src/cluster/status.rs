// SPDX-License-Identifier: Apache-2.0
//! How far a job on the cluster is: from its master while it runs, and from its pods otherwise.

use edl_kube::client::{Found, Phase, Pod, phase};
use edl_kube::names;
use edl_net::proto::{Instance, JobStatus};

use super::{Remote, sentence};
use crate::exit::Exit;

/// The job's status as well as it can be known.
pub(crate) async fn of(remote: &Remote) -> JobStatus {
    if let Ok(mut master) = remote.connect().await
        && let Ok(status) = master.status().await
    {
        return status;
    }
    of_pods(&remote.found, &remote.handle())
}

/// The same, of what the cluster knows now.
pub(super) async fn fresh(remote: &Remote) -> anyhow::Result<JobStatus> {
    let found = remote.cluster.find(&remote.spec().job_name).await.map_err(sentence)?;
    Ok(of_pods(found.as_ref().unwrap_or(&remote.found), &remote.handle()))
}

/// What the pods alone tell.
pub(super) fn of_pods(found: &Found, handle: &str) -> JobStatus {
    let master = found.master();
    let mut status = match master.map(phase) {
        Some(Phase::Ended { code, message }) => ended(code, &message),
        Some(Phase::Running) => JobStatus {
            state: "starting".into(),
            reason: "waiting for the master to respond".into(),
            ..JobStatus::default()
        },
        Some(Phase::Waiting(trouble)) => JobStatus {
            state: "waiting".into(),
            reason: trouble.map(|trouble| trouble.text).unwrap_or_default(),
            ..JobStatus::default()
        },
        None => JobStatus {
            state: "interrupted".into(),
            reason: format!(
                "master pod is gone; resume with `elasticdl {} --resume {handle}`",
                found.spec.job_type.name()
            ),
            ..JobStatus::default()
        },
    };
    let spec = &found.spec;
    status.job.clone_from(&spec.job_name);
    status.job_type = spec.job_type.name().into();
    status.model_def.clone_from(&spec.model_def);
    status.num_epochs = spec.num_epochs;
    status.workers_wanted = spec.num_workers;
    status.eta_secs = -1.0;
    status.job_dir = spec.cluster_job_dir().unwrap_or_default();
    status.instances = found.pods.iter().filter_map(instance).collect();
    status
}

/// The master's last words are the status of its end; an end without words has a code.
fn ended(code: i32, message: &str) -> JobStatus {
    let mut words = serde_json::to_value(JobStatus::default()).unwrap_or_default();
    let said: Option<serde_json::Value> = serde_json::from_str(message).ok();
    if let Some(serde_json::Value::Object(said)) = said {
        for (word, value) in said {
            words[word] = value;
        }
        if let Ok(status) = serde_json::from_value(words) {
            return status;
        }
    }
    let state = match u8::try_from(code) {
        Ok(0) => "succeeded",
        Ok(code) if code == Exit::Stopped.code() || code == Exit::Interrupted.code() => "stopped",
        Ok(_) | Err(_) => "failed",
    };
    let reason = if message.is_empty() && state == "failed" {
        format!("master exited with code {code}; see its log")
    } else {
        message.to_owned()
    };
    JobStatus { state: state.into(), reason, ..JobStatus::default() }
}

fn instance(pod: &Pod) -> Option<Instance> {
    let instance = names::instance(pod.metadata.labels.as_ref()?)?;
    let status = pod.status.clone().unwrap_or_default();
    let restarts = status.container_statuses.unwrap_or_default();
    let restarts = restarts.first().map_or(0, |container| container.restart_count);
    Some(Instance {
        role: instance.role.to_string(),
        id: instance.id,
        address: status.pod_ip.unwrap_or_default(),
        state: status.phase.unwrap_or_default().to_lowercase(),
        restarts: u32::try_from(restarts).unwrap_or(0),
        ..Instance::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_masters_last_words_tell_how_the_job_ended() {
        let status = ended(1, r#"{"state": "failed", "reason": "bad data", "step": 7}"#);
        assert_eq!((status.state.as_str(), status.reason.as_str()), ("failed", "bad data"));
        assert_eq!(status.step, 7);
        assert_eq!(ended(0, "").state, "succeeded");
        assert_eq!(ended(3, "").state, "stopped");
        let oom = ended(137, "");
        assert!(oom.reason.contains("code 137"), "{}", oom.reason);
    }
}

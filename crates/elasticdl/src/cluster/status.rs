// SPDX-License-Identifier: Apache-2.0
//! How far a job on the cluster is: from its master while it runs, and from its pods otherwise.

use edl_core::job::JobState;
use edl_core::platform::InstanceState;
use edl_kube::client::{Found, Pod, PodState, pod_state};
use edl_kube::names;
use edl_net::proto::{Instance, JobStatus};

use super::ClusterJob;
use crate::exit::Exit;
use crate::status::described;

/// The job's status, as well as it is known.
pub(crate) async fn of(job: &ClusterJob) -> JobStatus {
    if let Ok(mut master) = job.connect().await
        && let Ok(status) = master.status().await
    {
        return status;
    }
    of_pods(&job.found, &job.handle())
}

/// The status that follows from the pods alone.
pub(super) fn of_pods(found: &Found, handle: &str) -> JobStatus {
    let spec = &found.spec;
    let reported = match found.master().map(pod_state) {
        Some(PodState::Ended { .. }) | None if found.is_restarting() => {
            in_state(JobState::Waiting, "waiting for Kubernetes to restart the master".into())
        }
        Some(PodState::Ended { code, message }) => ended(code, &message),
        Some(PodState::Running) => {
            let awaited = match found.is_master_leaving() {
                true => "waiting for the previous master, which may be saving the job",
                false => "waiting for the master to respond",
            };
            in_state(JobState::Starting, awaited.into())
        }
        Some(PodState::Waiting(trouble)) => {
            in_state(JobState::Waiting, trouble.map(|trouble| trouble.text).unwrap_or_default())
        }
        None => {
            let kind = spec.job_type.name();
            let reason =
                format!("master pod is gone; resume with `elasticdl {kind} --resume {handle}`");
            in_state(JobState::Interrupted, reason)
        }
    };
    JobStatus {
        instances: found.pods.iter().filter_map(instance).collect(),
        ..described(spec, spec.cluster_job_dir().unwrap_or_default(), reported)
    }
}

fn in_state(state: JobState, reason: String) -> JobStatus {
    JobStatus { state: state.into(), reason, ..JobStatus::default() }
}

/// The final status that the master left in its termination message, or one for its exit code.
fn ended(code: i32, message: &str) -> JobStatus {
    let mut fields = serde_json::to_value(JobStatus::default()).unwrap_or_default();
    if let Ok(serde_json::Value::Object(written)) = serde_json::from_str(message) {
        for (name, value) in written {
            fields[name] = value;
        }
        if let Ok(status) = serde_json::from_value(fields) {
            return status;
        }
    }
    let state = match Exit::from_code(code) {
        Some(Exit::Interrupted) => JobState::Stopped,
        exit => exit.and_then(Exit::job_end).unwrap_or(JobState::Failed),
    };
    let reason = if message.is_empty() && state == JobState::Failed {
        format!("master exited with code {code}; see its log")
    } else {
        message.to_owned()
    };
    in_state(state, reason)
}

fn instance(pod: &Pod) -> Option<Instance> {
    let instance = names::instance_of(&pod.metadata)?;
    let status = pod.status.clone().unwrap_or_default();
    let phase = status.phase.unwrap_or_default().to_lowercase();
    let restarts = status.container_statuses.unwrap_or_default();
    let restarts = restarts.first().map_or(0, |container| container.restart_count);
    Some(Instance {
        role: instance.role.into(),
        id: instance.id,
        address: status.pod_ip.unwrap_or_default(),
        state: phase.parse().unwrap_or(InstanceState::Unknown).into(),
        restarts: u32::try_from(restarts).unwrap_or(0),
        ..Instance::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_termination_message_has_the_final_status() {
        let status = ended(1, r#"{"state": "failed", "reason": "bad data", "step": 7}"#);
        assert_eq!((status.state(), status.reason.as_str()), (JobState::Failed, "bad data"));
        assert_eq!(status.step, 7);
        assert_eq!(ended(0, "").state(), JobState::Succeeded);
        assert_eq!(ended(3, "").state(), JobState::Stopped);
        let oom = ended(137, "");
        assert!(oom.reason.contains("code 137"), "{}", oom.reason);
    }
}

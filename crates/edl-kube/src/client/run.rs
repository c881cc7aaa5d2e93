// SPDX-License-Identifier: Apache-2.0
//! Runs a command in a pod with the job's volumes and settings, and returns its output.

use std::time::Duration;

use edl_core::platform::InstanceId;
use futures::future::BoxFuture;
use kube::api::{DeleteParams, LogParams, PostParams};

use super::{Cluster, Error, Found, PodState, pod_state};
use crate::manifest::{self, PodExtras};
use crate::names;

const POLL: Duration = Duration::from_millis(200);
/// Five minutes for a node, an image and the command.
const TRIES: u32 = 1500;

impl Cluster {
    /// Runs `command` in a pod `…-NAME`, which is deleted afterwards, and returns its output.
    pub fn run<'a>(
        &'a self,
        found: &'a Found,
        name: &'a str,
        command: &'a [&'a str],
    ) -> BoxFuture<'a, Result<String, Error>> {
        Box::pin(async move {
            let job = &found.spec.job_name;
            let pod = format!("{}-{name}", names::config_map(job));
            let failed = |message: String| Error::Refused {
                verb: "run",
                object: format!("pod `{pod}`"),
                message,
            };
            let extras =
                PodExtras { owner: manifest::owner(&found.config_map), ..PodExtras::default() };
            let made = manifest::pod(&found.spec, InstanceId::MASTER, &extras);
            let mut object = made.map_err(|invalid| failed(invalid.0))?;
            object.metadata.name = Some(pod.clone());
            // Without the labels of a process, the Service and the master ignore it.
            object.metadata.labels = Some(names::job_labels(job));
            if let Some(spec) = &mut object.spec {
                spec.automount_service_account_token = Some(false);
                for container in &mut spec.containers {
                    container.command = Some(command.iter().map(ToString::to_string).collect());
                }
            }
            let pods = self.pods();
            let created = pods.create(&PostParams::default(), &object).await;
            created.map_err(|error| self.refused("create", "pod", &pod, error))?;
            let output = self.output_of(&pod).await;
            let _gone_with_the_job_at_last = pods.delete(&pod, &DeleteParams::default()).await;
            output?.ok_or_else(|| failed("it did not finish in time".into()))
        })
    }

    async fn output_of(&self, pod: &str) -> Result<Option<String>, Error> {
        for _ in 0..TRIES {
            let now = self.pods().get(pod).await;
            let now = now.map_err(|error| self.refused("read", "pod", pod, error))?;
            match pod_state(&now) {
                PodState::Ended { .. } => {
                    let log = self.pods().logs(pod, &LogParams::default()).await;
                    return log
                        .map(Some)
                        .map_err(|error| self.refused("read the log of", "pod", pod, error));
                }
                PodState::Waiting(Some(trouble)) if trouble.is_final => {
                    return Ok(Some(trouble.text));
                }
                PodState::Running | PodState::Waiting(_) => tokio::time::sleep(POLL).await,
            }
        }
        Ok(None)
    }
}

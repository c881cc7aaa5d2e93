// SPDX-License-Identifier: Apache-2.0
//! `audit` of a job on the cluster: by its master while it runs, and afterwards by a pod that
//! reads the last checkpoint where it lies.

use edl_core::spec::JobType;
use edl_net::proto::{AuditReport, AuditRequest};

use super::{Remote, sentence};
use crate::control;
use crate::exit::refuse;

/// What the books say.
pub(crate) fn of(remote: &Remote) -> anyhow::Result<AuditReport> {
    let spec = remote.spec();
    if spec.job_type != JobType::Train {
        let name = &spec.job_name;
        return Err(refuse(format!("job `{name}` does not train; only training can be audited")));
    }
    remote.runtime.block_on(async {
        let asked = control::within(async {
            let mut master = remote.connect().await?;
            let answer = master.client().audit(AuditRequest {}).await;
            Ok(answer.map_err(|status| anyhow::anyhow!("{}", status.message()))?.into_inner())
        });
        if let Ok(report) = asked.await {
            return Ok(report);
        }
        let dir = spec.cluster_job_dir().map_err(|invalid| refuse(invalid.0))?;
        let command = ["elasticdl", "audit", &dir, "--json"];
        let said = remote.cluster.run(&remote.found, "audit", &command).await.map_err(sentence)?;
        let start = said.find('{').unwrap_or(0);
        serde_json::from_str(&said[start..]).map_err(|_| anyhow::anyhow!("{}", said.trim()))
    })
}

// SPDX-License-Identifier: Apache-2.0
//! `list` and `clean` of the jobs in a namespace of the cluster.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use edl_kube::client::{Cluster, Found, Phase, phase};

use super::master::Master;
use super::status::of_pods;
use super::{handle, sentence};
use crate::exit::{Exit, not_found, refuse};
use crate::list::Row;

/// Every job of the namespace, the newest first.
pub(crate) fn rows(namespace: &str) -> anyhow::Result<Vec<Row>> {
    crate::runtime()?.block_on(async {
        let cluster = Cluster::connect(namespace, false).await.map_err(sentence)?;
        let mut rows = Vec::new();
        for found in cluster.list().await.map_err(sentence)? {
            rows.push(row(&cluster, &found).await);
        }
        Ok(rows)
    })
}

async fn row(cluster: &Cluster, found: &Found) -> Row {
    let spec = &found.spec;
    let mut status = of_pods(found, &handle(spec, cluster));
    if found.master().is_some_and(|pod| phase(pod) == Phase::Running)
        && let Ok(mut master) = Master::connect(cluster, &spec.job_name).await
        && let Ok(said) = master.status().await
    {
        status = said;
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "seconds for the eye")]
    let created = found.created().map_or(now, |created| created as f64);
    Row {
        job: spec.job_name.clone(),
        state: status.state,
        job_type: spec.job_type.name().into(),
        model_def: spec.model_def.clone(),
        records_done: status.records_done,
        records_total: status.records_total,
        started_secs_ago: (now - created).max(0.0),
        job_dir: spec.cluster_job_dir().unwrap_or_default(),
    }
}

/// Removes jobs that have ended, with everything that they own on the cluster. Their folders,
/// which lie on the user's storage, stay.
pub(crate) fn clean(
    namespace: &str,
    jobs: &[String],
    all: bool,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    if jobs.is_empty() && !all {
        return Err(refuse("specify the jobs to remove, or use --all"));
    }
    let runtime = crate::runtime()?;
    runtime.block_on(async {
        let cluster = Cluster::connect(namespace, false).await.map_err(sentence)?;
        let found = cluster.list().await.map_err(sentence)?;
        let runs = |found: &&Found| {
            let master = found.master().map(phase);
            matches!(master, Some(Phase::Running | Phase::Waiting(_)))
        };
        let namespace = cluster.namespace();
        for name in jobs {
            let Some(job) = found.iter().find(|found| found.spec.job_name == *name) else {
                let text = format!("job `{name}` not found in namespace `{namespace}`");
                return Err(not_found(text));
            };
            if runs(&job) {
                let handle = handle(&job.spec, &cluster);
                return Err(refuse(format!(
                    "job `{name}` is running; stop it first with `elasticdl stop {handle}`"
                )));
            }
        }
        let wanted = |found: &&Found| jobs.contains(&found.spec.job_name) || all && !runs(found);
        for job in found.iter().filter(wanted) {
            let name = &job.spec.job_name;
            cluster.delete(name).await.map_err(sentence)?;
            writeln!(out, "removed {name}")?;
        }
        Ok(Exit::Ok)
    })
}

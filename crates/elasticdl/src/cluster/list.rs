// SPDX-License-Identifier: Apache-2.0
//! `list` and `clean` of the jobs in a namespace of the cluster.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use edl_kube::client::{Cluster, Found, PodState, pod_state};

use super::status::of_pods;
use super::{connect, explained, handle, is_active};
use crate::cli::jobs::CleanArgs;
use crate::console::eprint;
use crate::exit::{Exit, not_found, refuse};
use crate::jobs::still_running;
use crate::list::Row;

/// Every job of the namespace, the newest first.
pub(crate) fn rows(namespace: &str) -> anyhow::Result<Vec<Row>> {
    crate::runtime()?.block_on(async {
        let cluster = Cluster::connect(namespace, false).await.map_err(explained)?;
        let mut rows = Vec::new();
        for found in cluster.list().await.map_err(explained)? {
            rows.push(row(&cluster, &found).await);
        }
        Ok(rows)
    })
}

async fn row(cluster: &Cluster, found: &Found) -> Row {
    let spec = &found.spec;
    let mut status = of_pods(found, &handle(spec, cluster));
    if found.master().is_some_and(|pod| pod_state(pod) == PodState::Running)
        && let Ok(mut master) = connect(cluster, &spec.job_name).await
        && let Ok(reported) = master.status().await
    {
        status = reported;
    }
    let folder = spec.cluster_job_dir().unwrap_or_default();
    Row::new(spec, status, secs_since(found.created()), folder)
}

/// The seconds since a time in seconds since 1970.
fn secs_since(time: Option<i64>) -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "seconds for the eye")]
    let time = time.map_or(now, |time| time as f64);
    (now - time).max(0.0)
}

/// Removes jobs that have ended, with everything that they own on the cluster. Their folders, which
/// are on the user's storage, stay.
pub(crate) fn clean(
    namespace: &str,
    args: &CleanArgs,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    let jobs = &args.jobs;
    if jobs.is_empty() && !args.selects() {
        return Err(refuse("specify the jobs to remove, or use --state, --older_than or --all"));
    }
    let runtime = crate::runtime()?;
    runtime.block_on(async {
        let cluster = Cluster::connect(namespace, false).await.map_err(explained)?;
        let found = cluster.list().await.map_err(explained)?;
        let namespace = cluster.namespace();
        for name in jobs {
            let Some(job) = found.iter().find(|found| found.spec.job_name == *name) else {
                let text = format!("job `{name}` not found in namespace `{namespace}`");
                return Err(not_found(text));
            };
            if is_active(job) {
                return Err(still_running(name, &handle(&job.spec, &cluster)));
            }
        }
        for job in &found {
            let name = &job.spec.job_name;
            if !jobs.contains(name) && !is_selected(&cluster, job, args).await {
                continue;
            }
            if args.dry_run {
                writeln!(out, "{name}")?;
                continue;
            }
            cluster.delete(name).await.map_err(explained)?;
            writeln!(out, "removed {name}")?;
        }
        if args.dry_run {
            eprint("nothing was removed, because of --dry_run; job folders are always kept");
        }
        Ok(Exit::Ok)
    })
}

/// Whether `clean` removes the job without its name.
async fn is_selected(cluster: &Cluster, job: &Found, args: &CleanArgs) -> bool {
    if !args.selects() || is_active(job) {
        return false;
    }
    let row = row(cluster, job).await;
    args.matches(row.state, secs_since(job.ended().or_else(|| job.created())))
}

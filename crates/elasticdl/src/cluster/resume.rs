// SPDX-License-Identifier: Apache-2.0
//! `--resume` of a job on the cluster: changes its description and recreates its master.

use std::io::Write;

use edl_core::spec::JobType;
use edl_kube::client::Cluster;

use super::{ClusterJob, explained, has_master, submit};
use crate::config::{self, JobRequest};
use crate::exit::{Exit, refuse};
use crate::flags;
use crate::jobs::Home;
use crate::resume::check_type;

/// The job to resume, if it is on the cluster.
pub(crate) fn find(request: &JobRequest) -> anyhow::Result<Option<ClusterJob>> {
    let JobRequest { run, flags, .. } = request;
    let Some(named) = &run.resume else { return Ok(None) };
    let name = named.as_deref().or(flags::text(flags, "job_name"));
    let force = run.force_use_kube_config_file.unwrap_or(false);
    if let Some(namespace) = flags::text(flags, "namespace") {
        return ClusterJob::find(namespace, name, force).map(Some);
    }
    let Some(name) = name else { return Ok(None) };
    let is_here = Home::from_env()?.find(Some(name)).is_ok();
    if is_here || run.job_dir.is_some() || !super::is_name(name) || !Cluster::is_configured() {
        return Ok(None);
    }
    // If the cluster has no such job, the error is about this machine.
    Ok(ClusterJob::find("", Some(name), force).ok())
}

/// Resumes the job.
pub(crate) fn run(
    kind: JobType,
    request: &JobRequest,
    job: ClusterJob,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    let run = &request.run;
    let before = job.spec();
    let (name, handle) = (before.job_name.clone(), job.handle());
    check_type(before, kind, &handle)?;
    let mut given = request.given.clone();
    submit::settle(run, &mut given)?;
    for field in ["job_name", "job_type", "namespace"] {
        given.remove(field);
    }
    if before.is_custom_loop() && given.contains_key("num_epochs") {
        return Err(refuse(format!(
            "job `{name}` uses a custom training loop, which sets the number of epochs itself; \
             remove --num_epochs"
        )));
    }
    let spec = config::apply(before, given)?;
    spec.check_resumed(before).map_err(|invalid| refuse(invalid.0))?;
    submit::check(&spec)?;
    if run.print_config {
        out.write_all(config::to_yaml(&spec)?.as_bytes())?;
        return Ok(Exit::Ok);
    }
    // A master that is lost need not be waited for.
    if has_master(&job.found) {
        return Err(refuse(format!(
            "job `{name}` is already running; watch it with `elasticdl attach {handle}`"
        )));
    }
    let ClusterJob { runtime, cluster, found } = job;
    let found = runtime.block_on(async {
        cluster.resume(&found, &spec).await.map_err(explained)?;
        submit::started(&cluster, &spec).await?;
        let found = cluster.find(&name).await.map_err(explained)?;
        found.ok_or_else(|| refuse(format!("job `{name}` was deleted")))
    })?;
    submit::finish(run, ClusterJob { runtime, cluster, found }, out)
}

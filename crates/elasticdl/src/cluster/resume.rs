// SPDX-License-Identifier: Apache-2.0
//! `--resume` of a job on the cluster: its description with what may change in it, and its master
//! again.

use std::io::Write;

use edl_core::spec::JobType;
use edl_kube::client::{Cluster, Phase, phase};

use super::{Remote, sentence, submit};
use crate::config::{self, Asked};
use crate::exit::{Exit, refuse};
use crate::flags;
use crate::jobs::Home;

/// The job of the cluster that the user wants to go on, if it is one of the cluster.
pub(crate) fn asked(asked: &Asked) -> anyhow::Result<Option<Remote>> {
    let Asked { run, flags, .. } = asked;
    let Some(named) = &run.resume else { return Ok(None) };
    let name = named.as_deref().or(flags::text(flags, "job_name"));
    let force = run.force_use_kube_config_file.unwrap_or(false);
    if let Some(namespace) = flags::text(flags, "namespace") {
        return Remote::find(namespace, name, force).map(Some);
    }
    let Some(name) = name else { return Ok(None) };
    let is_here = Home::from_env()?.find(Some(name)).is_ok();
    if is_here || run.job_dir.is_some() || !super::is_name(name) || !Cluster::is_configured() {
        return Ok(None);
    }
    // Whatever is wrong there, the sentence about this machine is the one that is expected.
    Ok(Remote::find("", Some(name), force).ok())
}

/// Goes on with the job.
pub(crate) fn run(
    kind: JobType,
    asked: &Asked,
    remote: Remote,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    let run = &asked.run;
    let before = remote.spec();
    let (name, handle) = (before.job_name.clone(), remote.handle());
    if before.job_type != kind {
        let word = before.job_type.name();
        return Err(refuse(format!(
            "job `{name}` is not a job of type `{}`; use `elasticdl {word} --resume {handle}`",
            kind.name()
        )));
    }
    let mut given = asked.given.clone();
    submit::settle(run, &mut given)?;
    for word in ["job_name", "job_type", "namespace"] {
        given.remove(word);
    }
    if before.is_own_loop() && given.contains_key("num_epochs") {
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
    if let Some(Phase::Running | Phase::Waiting(_)) = remote.found.master().map(phase) {
        return Err(refuse(format!(
            "job `{name}` is already running; watch it with `elasticdl attach {handle}`"
        )));
    }
    let Remote { runtime, cluster, found } = remote;
    let found = runtime.block_on(async {
        cluster.resume(&found, &spec).await.map_err(sentence)?;
        submit::started(&cluster, &spec).await?;
        let found = cluster.find(&name).await.map_err(sentence)?;
        found.ok_or_else(|| refuse(format!("job `{name}` was deleted")))
    })?;
    submit::finish(run, &Remote { runtime, cluster, found }, out)
}

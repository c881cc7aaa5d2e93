// SPDX-License-Identifier: Apache-2.0
//! `train`, `evaluate` and `predict` with `--image_name`: creates the job's objects and follows its
//! master. A job that cannot start leaves nothing behind.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use edl_core::spec::{JobSpec, JobType};
use edl_kube::client::{Cluster, Error, PodState, pod_state};
use edl_kube::manifest;
use edl_net::key::JobKey;

use super::{ClusterJob, Target, explained, image, is_active};
use crate::cli::RunFlags;
use crate::console::{counted, eprint};
use crate::exit::{Exit, refuse};
use crate::flags::{self, Given};
use crate::{attach, config, shipped};

/// A pod starts much faster on a cluster with free capacity.
const START_TIMEOUT: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(200);

/// Whether the user asks for a job on a cluster.
pub(crate) fn is_asked(run: &RunFlags, given: &Given) -> bool {
    let is_named = flags::text(given, "image_name").is_some_and(|image| !image.is_empty());
    (is_named || run.docker_image_prefix.is_some()) && run.resume.is_none()
}

/// Runs the command.
pub(crate) fn run(
    kind: JobType,
    run: &RunFlags,
    mut given: Given,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    let image = image::JobImage::of(run, &mut given)?;
    let mut spec = described(kind, run, given)?;
    if run.print_config {
        out.write_all(config::to_yaml(&spec)?.as_bytes())?;
        return Ok(Exit::Ok);
    }
    if let Some(image) = image {
        image.publish(&mut spec)?;
    }
    let key = JobKey::generate()?;
    let objects = manifest::job_objects(&spec, &key.to_text());
    let objects = objects.map_err(|invalid| refuse(invalid.0))?;
    if let Some(file) = &run.yaml {
        let text = manifest::to_yaml(&objects).map_err(|invalid| refuse(invalid.0))?;
        return print(&text, file.as_deref(), out);
    }
    let runtime = crate::runtime()?;
    let force = run.force_use_kube_config_file.unwrap_or(false);
    let (cluster, found) = runtime.block_on(async {
        let cluster = Cluster::connect(&spec.namespace, force).await.map_err(explained)?;
        if let Err(error) = cluster.submit(&spec, objects).await {
            return Err(refused(error, &cluster, &spec).await);
        }
        started(&cluster, &spec).await?;
        let found = cluster.find(&spec.job_name).await.map_err(explained)?;
        anyhow::Ok((cluster, found.context("the job was deleted")?))
    })?;
    finish(run, ClusterJob { runtime, cluster, found }, out)
}

/// Follows the job, unless it runs in the background.
pub(super) fn finish(run: &RunFlags, job: ClusterJob, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let (spec, handle) = (job.spec(), job.handle());
    eprint(format_args!(
        "submitted job {} to the cluster: namespace {}, {} PS, {}; view logs with \
         `elasticdl logs {}`",
        spec.job_name,
        job.cluster.namespace(),
        spec.num_ps_pods,
        counted(u64::from(spec.num_workers), "worker"),
        handle
    ));
    if run.detach {
        writeln!(out, "{}", spec.job_name)?;
        eprint(format_args!("watch it with `elasticdl attach {handle}`"));
        return Ok(Exit::Ok);
    }
    attach::attach(&Target::Cluster(Box::new(job)), out)
}

fn print(text: &str, file: Option<&Path>, out: &mut dyn Write) -> anyhow::Result<Exit> {
    match file {
        None => out.write_all(text.as_bytes())?,
        Some(path) => {
            let written = std::fs::write(path, text);
            written.map_err(|error| {
                refuse(format!("--yaml: cannot write `{}`: {error}", path.display()))
            })?;
            writeln!(out, "{}", path.display())?;
        }
    }
    Ok(Exit::Ok)
}

/// The job that the user describes. Its paths are paths inside its pods, so they stay unchanged.
fn described(kind: JobType, run: &RunFlags, mut given: Given) -> anyhow::Result<JobSpec> {
    settle(run, &mut given)?;
    let mut spec = config::job(kind, given)?;
    shipped::fill_name(&mut spec)?;
    check(&spec)?;
    Ok(spec)
}

/// Puts the flags of a run that describe the job into its fields.
pub(super) fn settle(run: &RunFlags, given: &mut Given) -> anyhow::Result<()> {
    if run.log_to_terminal.is_some() {
        return Err(refuse(
            "--log_to_terminal supports only jobs on this machine; on a cluster, use `elasticdl \
             logs --follow`",
        ));
    }
    if let Some(dir) = &run.job_dir {
        given.insert("job_dir".into(), dir.to_string_lossy().into_owned().into());
    }
    if let Some(file) = &run.cluster_spec {
        given.insert("cluster_spec_json".into(), patches(file)?.into());
    }
    Ok(())
}

/// The patches of a file, as JSON.
fn patches(file: &Path) -> anyhow::Result<String> {
    let shown = file.display();
    if file.extension().is_some_and(|extension| extension == "py") {
        return Err(refuse(format!(
            "--cluster_spec=`{shown}` is Python code, which is not supported; rewrite it as a file \
             of patches, see docs/kubernetes.md"
        )));
    }
    let text = std::fs::read_to_string(file)
        .map_err(|error| refuse(format!("--cluster_spec: cannot read `{shown}`: {error}")))?;
    let patches = manifest::read_patches(&text).map_err(|invalid| refuse(invalid.0))?;
    serde_json::to_string(&patches).context("cannot write the patches")
}

/// Checks everything that does not need the cluster.
pub(super) fn check(spec: &JobSpec) -> anyhow::Result<()> {
    let invalid = |invalid: edl_core::spec::Invalid| refuse(invalid.0);
    spec.check().map_err(invalid)?;
    spec.check_cluster().map_err(invalid)?;
    manifest::populated(spec, []).map_err(invalid)?;
    if spec.num_workers == 0 {
        return Err(refuse("--num_workers=0 is too few; use at least 1"));
    }
    let (flag, data) = shipped::data_of(spec);
    if data.is_empty() && !spec.is_custom_loop() {
        return Err(refuse(format!(
            "--{flag} is missing; specify a file, folder or glob as seen by the job's pods, or a \
             URL"
        )));
    }
    if spec.job_type != JobType::Train && spec.checkpoint_dir_for_init.is_empty() {
        return Err(refuse(
            "--checkpoint_dir_for_init is missing; specify a checkpoint path as seen by the pods",
        ));
    }
    Ok(())
}

/// The error of a submission; for a name in use, with what to do about the job that has it.
async fn refused(error: Error, cluster: &Cluster, spec: &JobSpec) -> anyhow::Error {
    let Error::Taken { job, namespace } = &error else { return explained(error) };
    let handle = super::handle(spec, cluster);
    let found = cluster.find(job).await.ok().flatten();
    let next = if found.as_ref().is_some_and(is_active) {
        format!(
            "by a running job; watch it with `elasticdl attach {handle}`, or choose another \
             --job_name"
        )
    } else {
        format!(
            "by a finished job; resume it with `--resume {handle}`, choose another --job_name, or \
             remove it with `elasticdl clean {handle}`"
        )
    };
    refuse(format!("job name `{job}` is already in use in namespace `{namespace}` {next}"))
}

/// Waits until the master runs, and prints why it does not. A job that can never start is deleted.
pub(super) async fn started(cluster: &Cluster, spec: &JobSpec) -> anyhow::Result<()> {
    let job = &spec.job_name;
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        let Some(found) = cluster.find(job).await.map_err(explained)? else {
            return Err(refuse(format!("job `{job}` was deleted before it started")));
        };
        match found.master().map_or(PodState::Waiting(None), pod_state) {
            PodState::Waiting(Some(trouble)) if trouble.is_final => {
                cluster.delete(job).await.map_err(explained)?;
                return Err(refuse(format!(
                    "job `{job}` cannot start and was removed: {}",
                    trouble.text
                )));
            }
            PodState::Waiting(trouble) if Instant::now() >= deadline => {
                let why = trouble.map_or_else(|| "its pod is starting".into(), |it| it.text);
                eprint(format_args!("the master is waiting: {why}"));
                return Ok(());
            }
            PodState::Waiting(_) => tokio::time::sleep(POLL).await,
            PodState::Running | PodState::Ended { .. } => return Ok(()),
        }
    }
}

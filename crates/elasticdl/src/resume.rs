// SPDX-License-Identifier: Apache-2.0
//! `--resume`: continues a job from its stored description, with the changes that are allowed.

use edl_core::job::JobState;
use edl_core::spec::{JobSpec, JobType};

use crate::config::JobRequest;
use crate::exit::refuse;
use crate::jobs::{Home, Job};
use crate::submit::{self, Ready, checks};
use crate::trained::{self, FIELD};
use crate::{config, custom_loop, flags, host, paths};

pub(crate) enum Prepared {
    Ready(Ready),
    /// Nothing is left to do.
    Succeeded(Job),
}

/// Checks that the job can be resumed, and locks it.
pub(crate) fn prepare(
    home: &Home,
    kind: JobType,
    request: &JobRequest,
) -> anyhow::Result<Prepared> {
    let (job, spec) = described(home, kind, request)?;
    let before = job.spec()?;
    if job.state() == JobState::Succeeded && spec == before && !job.is_running() {
        return Ok(Prepared::Succeeded(job));
    }
    let hold = submit::hold(&job)?;
    let model = spec.is_custom_loop().then(|| custom_loop::model(job.dir())).transpose();
    let indexes = job.paths().indexes();
    checks::check(&spec, model.map_err(refuse)?.as_ref(), Some(&indexes))?.save_indexes(&indexes);
    if spec != before {
        job.rewrite_spec(&spec)?;
    }
    let command = host::entered();
    Ok(Prepared::Ready(Ready { job, hold, resume: true, forks: None, first: None, command }))
}

/// The job to resume and its description with the changes that the user asks for.
pub(crate) fn described(
    home: &Home,
    kind: JobType,
    request: &JobRequest,
) -> anyhow::Result<(Job, JobSpec)> {
    let job = which(home, request)?;
    let before = job.spec()?;
    check_type(&before, kind, &before.job_name)?;
    let mut given = request.given.clone();
    // The name selects the job and is no change.
    given.remove("job_name");
    given.remove("job_type");
    let mut spec = config::apply(&before, given)?;
    paths::make_absolute(&mut spec)?;
    let (pinned, named) = (&before.checkpoint_dir_for_init, flags::text(&request.given, FIELD));
    let folder = std::path::Path::new(pinned).parent();
    if folder == Some(spec.checkpoint_dir_for_init.as_ref())
        || named.is_some_and(|named| trained::is_same_start(pinned, named, home))
    {
        // Named as before; the job keeps the checkpoint that was chosen then.
        spec.checkpoint_dir_for_init.clone_from(pinned);
    }
    spec.check_resumed(&before).map_err(|invalid| refuse(invalid.to_string()))?;
    Ok((job, spec))
}

/// Refuses to resume a job with the command of another type; `handle` is what commands find it by.
pub(crate) fn check_type(before: &JobSpec, kind: JobType, handle: &str) -> anyhow::Result<()> {
    let (name, kind, needed) = (&before.job_name, kind.name(), before.job_type.name());
    if kind == needed {
        return Ok(());
    }
    Err(refuse(format!(
        "job `{name}` is not a job of type `{kind}`; use `elasticdl {needed} --resume {handle}`"
    )))
}

fn which(home: &Home, request: &JobRequest) -> anyhow::Result<Job> {
    let named = request.run.resume.as_ref().and_then(Option::as_deref);
    match (named.or(flags::text(&request.flags, "job_name")), &request.run.job_dir) {
        (Some(name), _) => home.find(Some(name)),
        (None, Some(dir)) => home.find(Some(&dir.to_string_lossy())),
        (None, None) => home.find(None),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};

    fn check(args: &[&str]) -> anyhow::Result<JobSpec> {
        let root = tempfile::tempdir().unwrap();
        let home = Home::at(root.path());
        let spec =
            JobSpec { job_name: "old".into(), training_data: "/d".into(), ..JobSpec::default() };
        home.create(&spec, None).unwrap();
        let line = [&["elasticdl", "train"], args].concat();
        let Command::Train(args) = Cli::try_parse_from(line).unwrap().command else { panic!() };
        let request = JobRequest::read(args.run, args.job.0).unwrap();
        described(&home, JobType::Train, &request).map(|(_, spec)| spec)
    }

    #[test]
    fn what_may_change_changes() {
        let spec =
            check(&["--resume", "--num_workers=5", "--num_epochs=9", "--num_ps_pods=2"]).unwrap();
        assert_eq!((spec.num_workers, spec.num_epochs, spec.num_ps_pods), (5, 9, 2));
        assert_eq!(spec.job_name, "old");
        let spec = check(&["--resume", "--job_name=old", "--minibatch_size=64"]).unwrap();
        assert_eq!(spec.minibatch_size, 64, "the same value is no change");
    }

    #[test]
    fn what_would_change_the_meaning_of_a_batch_is_refused_by_name() {
        let changes = [
            "--minibatch_size=32",
            "--seed=7",
            "--training_data=/other",
            "--model_def=mnist_mlp",
            "--model_params=lr=1",
            "--partitions=8",
            "--shuffle=false",
            "--grads_to_wait=2",
        ];
        for change in changes {
            let error = check(&["--resume=old", change]).unwrap_err();
            assert_eq!(crate::exit::of_error(&error), crate::exit::Exit::BadInput);
            let name = change.split_once('=').unwrap().0;
            assert!(error.to_string().contains(name), "{change}: {error}");
        }
    }

    #[test]
    fn an_unknown_job_is_not_found() {
        let error = check(&["--resume=new"]).unwrap_err();
        assert_eq!(crate::exit::of_error(&error), crate::exit::Exit::NotFound);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `--resume`: goes on with a job, from its own description and what may change in it.

use edl_core::spec::{JobSpec, JobType};

use crate::config::Asked;
use crate::exit::refuse;
use crate::jobs::{Home, Job};
use crate::submit::{self, Ready, checks};
use crate::{config, flags, own_loop, paths};

pub(crate) enum Prepared {
    Ready(Ready),
    /// Nothing is left to do.
    Succeeded(Job),
}

/// Checks that the job can go on, and takes it.
pub(crate) fn prepare(home: &Home, kind: JobType, asked: &Asked) -> anyhow::Result<Prepared> {
    let (job, spec) = described(home, kind, asked)?;
    let before = job.spec()?;
    if job.state() == "succeeded" && spec == before && !job.is_running() {
        return Ok(Prepared::Succeeded(job));
    }
    let hold = submit::hold(&job)?;
    let model = spec.is_own_loop().then(|| own_loop::model(job.dir())).transpose();
    checks::check(&spec, model.map_err(refuse)?.as_ref())?;
    if spec != before {
        job.rewrite_spec(&spec)?;
    }
    Ok(Prepared::Ready(Ready { job, hold, resume: true }))
}

/// The job to resume and its description with the changes that the user asks for.
pub(crate) fn described(
    home: &Home,
    kind: JobType,
    asked: &Asked,
) -> anyhow::Result<(Job, JobSpec)> {
    let job = which(home, asked)?;
    let before = job.spec()?;
    if before.job_type != kind {
        let word = before.job_type.name();
        let name = before.job_name;
        return Err(refuse(format!(
            "job `{name}` is not a job of type `{}`; use `elasticdl {word} --resume {name}`",
            kind.name()
        )));
    }
    let mut given = asked.given.clone();
    // The name says which job, and is no change.
    given.remove("job_name");
    given.remove("job_type");
    let mut spec = config::apply(&before, given)?;
    paths::make_absolute(&mut spec)?;
    let pinned = &before.checkpoint_dir_for_init;
    if std::path::Path::new(pinned).parent() == Some(spec.checkpoint_dir_for_init.as_ref()) {
        // The folder that was given at first, of which one checkpoint was taken.
        spec.checkpoint_dir_for_init.clone_from(pinned);
    }
    spec.check_resumed(&before).map_err(|invalid| refuse(invalid.to_string()))?;
    Ok((job, spec))
}

fn which(home: &Home, asked: &Asked) -> anyhow::Result<Job> {
    let named = asked.run.resume.as_ref().and_then(Option::as_deref);
    match (named.or(flags::text(&asked.flags, "job_name")), &asked.run.job_dir) {
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
        let asked = Asked::read(args.run, args.job.0).unwrap();
        described(&home, JobType::Train, &asked).map(|(_, spec)| spec)
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

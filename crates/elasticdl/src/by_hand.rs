// SPDX-License-Identifier: Apache-2.0
//! `master`, `ps` and `worker` in several shells, as developers run them.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use edl_core::spec::{JobSpec, JobType, LogLevel};
use edl_net::key::JobKey;

use crate::cli::{JoinFlags, MasterArgs, PsArgs, WorkerArgs};
use crate::config::Asked;
use crate::exit::{Exit, not_found, refuse};
use crate::flags::Given;
use crate::jobs::{Home, Job};
use crate::say::say;
use crate::submit;
use crate::ui::Ui;
use crate::{config, flags, processes, resume};

/// Where a master by hand listens, as ElasticDL's did.
const DEFAULT_PORT: u16 = 50_001;
/// Shells are started at about the same time; who comes first waits for the master.
const MASTER_DEADLINE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(100);

/// What a process must know to join a job.
pub(crate) struct Joined {
    pub(crate) master_addr: String,
    pub(crate) key: JobKey,
    pub(crate) job_dir: PathBuf,
    /// Known when the job's folder is on this machine.
    pub(crate) spec: Option<JobSpec>,
}

/// A job in the foreground whose workers come by hand. Its log is what is seen.
pub(crate) fn master(args: MasterArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let asked = Asked::read(args.run, args.job.0)?;
    flags::on_this_machine(&asked.flags)?.iter().for_each(say);
    let home = Home::from_env()?;
    let (run, mut given) = (&asked.run, asked.given.clone());
    let kind = kind(&given)?;
    let ready = if run.resume.is_some() {
        match resume::prepare(&home, kind, &asked)? {
            resume::Prepared::Ready(ready) => ready,
            resume::Prepared::Succeeded(_) => {
                return Err(refuse(
                    "this job has already succeeded; to train further, raise --num_epochs",
                ));
            }
        }
    } else {
        given.entry("port").or_insert(DEFAULT_PORT.into());
        if !asked.flags.contains_key("num_workers") {
            given.insert("num_workers".into(), 0.into());
        }
        if run.print_config {
            out.write_all(config::to_yaml(&config::job(kind, given)?)?.as_bytes())?;
            return Ok(Exit::Ok);
        }
        submit::prepare(&home, submit::described(kind, given)?, run.job_dir.as_deref())?
    };
    let ui = Ui::relay(&ready.job);
    submit::supervise(ready, ui, out)
}

/// What the master is for, by the data that it is given.
fn kind(given: &Given) -> anyhow::Result<JobType> {
    let has = |name: &str| flags::text(given, name).is_some_and(|data| !data.is_empty());
    match (has("training_data"), has("validation_data"), has("prediction_data")) {
        (true, _, true) => {
            Err(refuse("--prediction_data and --training_data cannot be used together; choose one"))
        }
        (false, _, true) => Ok(JobType::Predict),
        (false, true, false) => Ok(JobType::Evaluate),
        (true, _, false) | (false, false, false) => Ok(JobType::Train),
    }
}

/// A parameter server, by hand or under a supervisor.
pub(crate) fn ps(args: &PsArgs) -> anyhow::Result<Exit> {
    let joined = join(&args.join)?;
    start_log(args.log_level, &joined);
    processes::ps(args.ps_id, args.port, joined, args.join.supervised)
}

/// A worker, by hand or under a supervisor.
pub(crate) fn worker(args: &WorkerArgs) -> anyhow::Result<Exit> {
    if args.ps_addrs.is_some() || args.job_type.is_some() {
        say("ignoring --ps_addrs and --job_type: the master provides them");
    }
    let joined = join(&args.join)?;
    if let Some(spec) = &joined.spec {
        check_same(spec, args)?;
    }
    start_log(args.log_level, &joined);
    processes::worker(args.worker_id, joined, args.join.supervised)
}

fn start_log(level: Option<LogLevel>, joined: &Joined) {
    let level = level.or_else(|| joined.spec.as_ref().map(|spec| spec.log_level));
    crate::telemetry::start(level.unwrap_or_default());
}

/// The job says what is trained; a worker that was told otherwise is in the wrong job.
fn check_same(spec: &JobSpec, args: &WorkerArgs) -> anyhow::Result<()> {
    let JobSpec { job_name, model_def, minibatch_size, .. } = spec;
    if let Some(model) = &args.model_def
        && model != model_def
    {
        return Err(refuse(format!(
            "job `{job_name}` trains `{model_def}`, not `{model}`; remove --model_def"
        )));
    }
    if let Some(size) = args.minibatch_size
        && size != *minibatch_size
    {
        return Err(refuse(format!(
            "job `{job_name}` uses batches of {minibatch_size} records, not {size}; remove \
             --minibatch_size"
        )));
    }
    Ok(())
}

fn join(flags: &JoinFlags) -> anyhow::Result<Joined> {
    let home = Home::from_env()?;
    let key_file = flags.job_key_file.as_deref();
    let job = match (&flags.job_dir, &flags.job_name) {
        (Some(dir), _) => Some(Job::open(dir).ok_or_else(|| {
            not_found(format!("no job found in `{}`; check --job_dir", dir.display()))
        })?),
        (None, Some(name)) => Some(home.find(Some(name))?),
        (None, None) => None,
    };
    let address = match (&flags.master_addr, &job) {
        (Some(address), _) => address.clone(),
        (None, Some(job)) => wait_for("the job's master", || Some(job.master()?.address))?,
        (None, None) => format!("localhost:{DEFAULT_PORT}"),
    };
    let job = match (job, key_file) {
        (Some(job), _) => Some(job),
        (None, Some(_)) => home.find_by_port(port(&address)?),
        (None, None) => {
            let port = port(&address)?;
            Some(wait_for(&format!("a master at {address}"), || home.find_by_port(port))?)
        }
    };
    let key = match (key_file, &job) {
        (Some(path), _) => {
            let chain = |error| format!("{:#}", anyhow::Error::new(error));
            JobKey::load(path).map_err(|error| {
                refuse(format!("--job_key_file: {}; use the job's `job.key`", chain(error)))
            })?
        }
        (None, Some(job)) => job.key()?,
        (None, None) => {
            return Err(refuse("no key for this job; provide it with --job_key_file"));
        }
    };
    let beside_key =
        || key_file.and_then(|path| std::path::absolute(path).ok()?.parent().map(PathBuf::from));
    let job_dir = job.as_ref().map(|job| job.dir().to_owned()).or_else(beside_key);
    let spec = job.as_ref().and_then(|job| job.spec().ok());
    Ok(Joined {
        master_addr: address,
        key,
        job_dir: job_dir.context("the key has no folder")?,
        spec,
    })
}

fn port(address: &str) -> anyhow::Result<u16> {
    let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    port.ok_or_else(|| refuse(format!("--master_addr `{address}` must be HOST:PORT")))
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> anyhow::Result<T> {
    let start = Instant::now();
    let mut has_told = false;
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        if start.elapsed() > MASTER_DEADLINE {
            return Err(not_found(format!(
                "{what} was not found on this machine; start it first, or provide --master_addr \
                 and --job_key_file"
            )));
        }
        if !has_told && start.elapsed() > POLL * 5 {
            say(format_args!("waiting for {what}"));
            has_told = true;
        }
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_of_another_model_is_refused_by_name() {
        let spec = JobSpec { job_name: "x".into(), ..JobSpec::default() };
        let args = |model: &str, size| WorkerArgs {
            worker_id: 1,
            join: JoinFlags::default(),
            model_def: Some(model.into()),
            minibatch_size: size,
            log_level: None,
            job_type: None,
            ps_addrs: None,
        };
        check_same(&spec, &args("mnist_cnn", Some(64))).unwrap();
        let error = check_same(&spec, &args("mnist_mlp", None)).unwrap_err().to_string();
        assert!(error.contains("trains `mnist_cnn`, not `mnist_mlp`"), "{error}");
        assert!(check_same(&spec, &args("mnist_cnn", Some(10))).is_err());
    }

    #[test]
    fn an_address_needs_a_port() {
        assert_eq!(port("localhost:50001").unwrap(), 50_001);
        assert!(port("localhost").unwrap_err().to_string().contains("HOST:PORT"));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `master`, `ps` and `worker`: the processes of a job, started manually in several shells.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use edl_core::id::WorkerId;
use edl_core::spec::{JobSpec, JobType};
use edl_net::key::JobKey;
use edl_net::place::Place;

use crate::cli::{JoinFlags, MasterArgs, PsArgs, WorkerArgs};
use crate::config::JobRequest;
use crate::console::eprint;
use crate::exit::{Exit, not_found, refuse};
use crate::flags::Given;
use crate::jobs::{Home, Job};
use crate::processes::{HOST, Membership};
use crate::submit;
use crate::ui::Ui;
use crate::{config, flags, paths, processes, resume};

/// The port of a manually started master, as in the original ElasticDL.
const DEFAULT_PORT: u16 = 50_001;
/// A process that is started before the master waits this long for it.
const MASTER_DEADLINE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(100);

/// A job in the foreground whose workers are started manually. The master's log is shown.
pub(crate) fn master(args: MasterArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let request = JobRequest::read(args.run, args.job.0)?;
    flags::on_this_machine(&request.flags)?.iter().for_each(eprint);
    let home = Home::from_env()?;
    let (run, mut given) = (&request.run, request.given.clone());
    let kind = kind(&given)?;
    let ready = if run.resume.is_some() {
        match resume::prepare(&home, kind, &request)? {
            resume::Prepared::Ready(ready) => ready,
            resume::Prepared::Succeeded(_) => {
                return Err(refuse(
                    "this job has already succeeded; to train further, raise --num_epochs",
                ));
            }
        }
    } else {
        given.entry("port").or_insert(DEFAULT_PORT.into());
        if !request.flags.contains_key("num_workers") {
            given.insert("num_workers".into(), 0.into());
        }
        if run.print_config {
            out.write_all(config::to_yaml(&config::job(kind, given)?)?.as_bytes())?;
            return Ok(Exit::Ok);
        }
        let dir = run.job_dir.as_deref();
        submit::prepare(&home, submit::described(&home, kind, given, dir)?, dir)?
    };
    let ui = Ui::relay(&ready.job);
    submit::supervise(ready, ui, out)
}

/// The type of the job, by the data that is given.
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

/// A parameter server, started manually or by a supervisor.
pub(crate) fn ps(args: &PsArgs) -> anyhow::Result<Exit> {
    let (membership, spec) = join(&args.join)?;
    note_differences(spec.as_ref(), &args.job.0)?;
    start_log(&args.join, spec.as_ref());
    let listen = format!("{HOST}:{}", args.port);
    processes::run(args.join.supervised, async |shutdown| {
        membership.ps(args.ps_id, listen, shutdown).await
    })
}

/// A worker, started manually or by a supervisor.
pub(crate) fn worker(args: &WorkerArgs) -> anyhow::Result<Exit> {
    if args.ps_addrs.is_some() || args.job_type.is_some() {
        eprint("ignoring --ps_addrs and --job_type: the master provides them");
    }
    let (membership, spec) = join(&args.join)?;
    note_differences(spec.as_ref(), &args.job.0)?;
    start_log(&args.join, spec.as_ref());
    processes::run(args.join.supervised, async |shutdown| {
        let open = processes::open_model(&membership.job_dir);
        membership.worker(WorkerId(args.worker_id), open, shutdown).await
    })
}

fn start_log(flags: &JoinFlags, spec: Option<&JobSpec>) {
    let level = flags.log_level.or(spec.map(|spec| spec.log_level));
    crate::telemetry::start(level.unwrap_or_default());
}

/// The job decides; flags of a worker or server that differ from it are named.
fn note_differences(spec: Option<&JobSpec>, given: &Given) -> anyhow::Result<()> {
    let Some(spec) = spec else { return Ok(()) };
    let names = differences(spec, given)?;
    if !names.is_empty() {
        let (names, job) = (names.join(", "), &spec.job_name);
        eprint(format_args!(
            "ignoring {names}: job `{job}` has other values, which take precedence"
        ));
    }
    Ok(())
}

/// The flags whose values differ from those of the job.
fn differences(spec: &JobSpec, given: &Given) -> anyhow::Result<Vec<String>> {
    let mut asked = config::apply(spec, given.clone())?;
    paths::make_absolute(&mut asked)?;
    let (asked, decided) = (serde_json::json!(asked), serde_json::json!(spec));
    let names = given.keys().filter(|name| asked[name.as_str()] != decided[name.as_str()]);
    Ok(names.map(|name| format!("--{name}")).collect())
}

/// What a process needs to join a job, and the job if its folder is on this machine.
fn join(flags: &JoinFlags) -> anyhow::Result<(Membership, Option<JobSpec>)> {
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
    let job_dir = job_dir.context("the key has no folder")?;
    let membership = Membership { master_addr: address, key, job_dir, place: Place::default() };
    Ok((membership, spec))
}

fn port(address: &str) -> anyhow::Result<u16> {
    let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    port.ok_or_else(|| refuse(format!("--master_addr `{address}` must be HOST:PORT")))
}

fn wait_for<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> anyhow::Result<T> {
    let start = Instant::now();
    let mut has_reported = false;
    loop {
        if let Some(found) = find() {
            return Ok(found);
        }
        if start.elapsed() > MASTER_DEADLINE {
            return Err(not_found(format!(
                "{what} was not found on this machine; start it first, or provide --master_addr \
                 and --job_key_file"
            )));
        }
        if !has_reported && start.elapsed() > POLL * 5 {
            eprint(format_args!("waiting for {what}"));
            has_reported = true;
        }
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn flags_of_a_worker_that_differ_from_the_job_are_named() {
        let data = std::path::absolute("data").unwrap().to_string_lossy().into_owned();
        let spec = JobSpec { training_data: data, ..JobSpec::default() };
        let given = |value: serde_json::Value| value.as_object().unwrap().clone();
        let same = given(json!({"model_def": "mnist_cnn", "training_data": "data"}));
        assert_eq!(differences(&spec, &same).unwrap(), [""; 0]);
        let other = given(json!({"model_def": "mnist_mlp", "minibatch_size": 64, "seed": 3}));
        assert_eq!(differences(&spec, &other).unwrap(), ["--model_def", "--seed"]);
    }

    #[test]
    fn an_address_needs_a_port() {
        assert_eq!(port("localhost:50001").unwrap(), 50_001);
        assert!(port("localhost").unwrap_err().to_string().contains("HOST:PORT"));
    }
}

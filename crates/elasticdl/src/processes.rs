// SPDX-License-Identifier: Apache-2.0
//! The three processes of a job, as the supervisor starts them: each is its crate's `run` with
//! signals, the supervisor's end and an exit code around it.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use edl_core::id::{PsId, WorkerId};
use edl_core::job::End;
use edl_core::platform::Harm;
use edl_net::key::JobKey;
use edl_net::place::Place;
use rustix::process::{Signal, set_parent_process_death_signal};
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::by_hand::Joined;
use crate::exit::{Exit, Refusal, not_found};
use crate::jobs::Job;
use crate::lines;

/// What a process gets to leave by itself after its supervisor's end.
const ORPHAN_GRACE: Duration = Duration::from_secs(1);
/// How long the last orders may take to reach the supervisor.
const LAST_ORDERS: Duration = Duration::from_millis(700);
/// Only this machine: its processes come over the loopback or Unix sockets.
const HOST: &str = "127.0.0.1";

/// A master whose standard input and output lead to its supervisor.
pub(crate) fn master(job_dir: &Path, port: u16, resume: bool) -> anyhow::Result<Exit> {
    die_with_supervisor()?;
    let job = Job::open(job_dir)
        .ok_or_else(|| not_found(format!("no job found in `{}`", job_dir.display())))?;
    crate::telemetry::start(job.spec()?.log_level);
    let config = master_config(&job, port, resume)?;
    let runtime = runtime(2)?;
    let shutdown = CancellationToken::new();
    let ended = runtime.block_on(async {
        let _signals = cancel_on_signal(&shutdown)?;
        let (stdout, stdin) = pipes_to_supervisor()?;
        let (port, platform) = edl_master::port();
        let (mut writing, mut reading) = (JoinSet::new(), JoinSet::new());
        writing.spawn(lines::write(stdout, platform.orders));
        reading.spawn(lines::read(stdin, platform.reports, "the supervisor"));
        let ended = edl_master::run(config, port, shutdown.clone()).await;
        // Orders that were given must reach the supervisor before this process exits.
        let _ = tokio::time::timeout(LAST_ORDERS, writing.join_next()).await;
        Ok::<_, anyhow::Error>(ended)
    })?;
    runtime.shutdown_background();
    Ok(exit_of_master(ended))
}

/// What a master on this machine is told.
pub(crate) fn master_config(
    job: &Job,
    port: u16,
    resume: bool,
) -> anyhow::Result<edl_master::Config> {
    let spec = job.spec()?;
    Ok(edl_master::Config {
        job_dir: job.paths().clone(),
        listen: format!("{HOST}:{port}"),
        http_listen: format!("{HOST}:{}", spec.http_port),
        key: job.key()?,
        spec,
        resume,
        ip: None,
        store_patience: Duration::ZERO,
    })
}

/// How a master's end looks to whoever started it.
pub(crate) fn exit_of_master(ended: Result<End, edl_master::Error>) -> Exit {
    match ended {
        Ok(End::Succeeded) => Exit::Ok,
        Ok(End::Failed(_)) => Exit::Failed,
        Ok(End::Stopped(_)) => Exit::Stopped,
        Err(error) => {
            let exit = if is_lasting(&error) { Exit::Failed } else { Exit::Relaunch };
            tracing::error!("{:#}", anyhow::Error::from(error));
            exit
        }
    }
}

/// Standard output and input, which are pipes to the supervisor.
fn pipes_to_supervisor() -> anyhow::Result<(Sender, Receiver)> {
    let orders = std::io::stdout().as_fd().try_clone_to_owned().and_then(Sender::from_owned_fd);
    let reports = std::io::stdin().as_fd().try_clone_to_owned().and_then(Receiver::from_owned_fd);
    let context = "--supervised is for masters started by a supervisor; to start one manually, \
                   remove it";
    Ok((orders.context(context)?, reports.context(context)?))
}

/// Whether the next master would find the same.
fn is_lasting(error: &edl_master::Error) -> bool {
    match error {
        edl_master::Error::Data { .. }
        | edl_master::Error::DataChanged { .. }
        | edl_master::Error::Spec(_)
        | edl_master::Error::Tls(_) => true,
        edl_master::Error::Listen { .. }
        | edl_master::Error::Folder { .. }
        | edl_master::Error::Store(_)
        | edl_master::Error::Serve(_)
        | edl_master::Error::Persist(_) => false,
    }
}

/// A parameter server.
pub(crate) fn ps(id: u32, port: u16, joined: Joined, supervised: bool) -> anyhow::Result<Exit> {
    let Joined { master_addr, key, job_dir, .. } = joined;
    let listen = format!("{HOST}:{port}");
    let place = Place::default();
    let config =
        edl_ps::Config { ps: PsId(id), master_addr, key, job_dir, listen, threads: 0, place };
    run(supervised, |shutdown| async move { Ok(edl_ps::run(config, shutdown).await?) })
}

/// A worker.
pub(crate) fn worker(id: u32, joined: Joined, supervised: bool) -> anyhow::Result<Exit> {
    worker_with(WorkerId(id), joined, supervised, open_model())
}

/// A worker whose model is opened by the caller.
pub(crate) fn worker_with(
    worker: WorkerId,
    joined: Joined,
    supervised: bool,
    open_model: edl_worker::OpenModel,
) -> anyhow::Result<Exit> {
    let Joined { master_addr, key, job_dir, .. } = joined;
    let config = worker_config(worker, master_addr, key, job_dir);
    run(
        supervised,
        |shutdown| async move { Ok(edl_worker::run(config, open_model, shutdown).await?) },
    )
}

/// What a worker on this machine is told.
pub(crate) fn worker_config(
    worker: WorkerId,
    master_addr: String,
    key: JobKey,
    job_dir: PathBuf,
) -> edl_worker::Config {
    edl_worker::Config { worker, master_addr, key, job_dir, place: Place::default() }
}

/// Opens the job's model on the thread that computes.
pub(crate) fn open_model() -> edl_worker::OpenModel {
    Box::new(crate::models::open)
}

pub(crate) fn run<F>(
    supervised: bool,
    body: impl FnOnce(CancellationToken) -> F,
) -> anyhow::Result<Exit>
where
    F: Future<Output = anyhow::Result<()>>,
{
    let shutdown = CancellationToken::new();
    if supervised {
        die_with_supervisor()?;
        leave_at_end_of_input(shutdown.clone())?;
    }
    let runtime = runtime(2)?;
    let ended = runtime.block_on(async {
        let _signals = cancel_on_signal(&shutdown)?;
        body(shutdown.clone()).await
    });
    runtime.shutdown_background();
    match ended {
        Ok(()) => Ok(Exit::Ok),
        // Said by the command itself, with the code that it deserves.
        Err(error) if error.is::<Refusal>() => Err(error),
        Err(error) => {
            tracing::error!("{error:#}");
            Ok(Exit::Failed)
        }
    }
}

pub(crate) fn runtime(n_threads: usize) -> anyhow::Result<Runtime> {
    let runtime = Builder::new_multi_thread().worker_threads(n_threads).enable_all().build();
    runtime.context("cannot start the async runtime")
}

/// The kernel ends this process when its supervisor is gone, however that came about.
fn die_with_supervisor() -> anyhow::Result<()> {
    let asked = set_parent_process_death_signal(Some(Signal::KILL));
    asked.context("cannot tie this process to its supervisor")
}

/// The end of its input is the supervisor's end. All that the supervisor ever writes are harms
/// that a process must do to itself, for a job that allows them.
fn leave_at_end_of_input(shutdown: CancellationToken) -> anyhow::Result<()> {
    let watch = move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if let Ok(Harm::Partition { millis }) = serde_json::from_str(&line) {
                tracing::info!(millis, "network partition injected by a chaos action");
                edl_net::cut::off(Duration::from_millis(millis));
            }
        }
        shutdown.cancel();
        std::thread::sleep(ORPHAN_GRACE);
        std::process::exit(Exit::Stopped.code().into());
    };
    let thread = std::thread::Builder::new().name("supervisor-watch".into()).spawn(watch);
    thread.map(drop).context("cannot watch the supervisor")
}

/// The first signal asks to leave; a second one leaves at once.
pub(crate) fn cancel_on_signal(shutdown: &CancellationToken) -> anyhow::Result<JoinSet<()>> {
    let mut tasks = JoinSet::new();
    for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
        let mut signals = signal(kind).context("cannot listen for signals")?;
        let shutdown = shutdown.clone();
        tasks.spawn(async move {
            while signals.recv().await.is_some() {
                if shutdown.is_cancelled() {
                    std::process::exit(Exit::Interrupted.code().into());
                }
                shutdown.cancel();
            }
        });
    }
    Ok(tasks)
}

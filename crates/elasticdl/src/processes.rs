// SPDX-License-Identifier: Apache-2.0
//! The three processes of a job. Each is its crate's `run`, with signals, the end of its supervisor
//! and an exit code around it.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use edl_core::id::{PsId, WorkerId};
use edl_core::job::End;
use edl_core::job_dir::JobDir;
use edl_core::platform::ChaosAction;
use edl_net::key::JobKey;
use edl_net::place::Place;
use edl_worker::OpenModel;
use rustix::process::{Signal, set_parent_process_death_signal};
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::exit::{Exit, Refusal, not_found};
use crate::jobs::Job;
use crate::{host, lines, signals, stacks};

/// Time for a process to exit by itself after its supervisor has died.
const ORPHAN_GRACE: Duration = Duration::from_secs(1);
/// How long the last orders may take to reach the supervisor.
const LAST_ORDERS: Duration = Duration::from_millis(700);
/// Only this machine: processes connect over the loopback or Unix sockets.
pub(crate) const HOST: &str = "127.0.0.1";

/// A master whose standard input and output lead to its supervisor.
pub(crate) fn master(job_dir: &Path, port: u16, resume: bool) -> anyhow::Result<Exit> {
    die_with_supervisor()?;
    let job = Job::open(job_dir)
        .ok_or_else(|| not_found(format!("no job found in `{}`", job_dir.display())))?;
    crate::telemetry::start(job.spec()?.log_level);
    stacks::log_panics();
    let config = master_config(&job, port, resume)?;
    let runtime = runtime(2)?;
    let shutdown = CancellationToken::new();
    let ended = runtime.block_on(async {
        let _signals = on_signal(&shutdown, ignore)?;
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

/// The configuration of a master on this machine.
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
        http_hosts: Vec::new(),
        key: job.key()?,
        spec,
        resume,
        ip: None,
        store_patience: Duration::ZERO,
        build: host::get().build(),
    })
}

/// The exit code for the end of a master.
pub(crate) fn exit_of_master(ended: Result<End, edl_master::Error>) -> Exit {
    match ended {
        Ok(end) => end.exit(),
        Err(error) => {
            let exit = if error.is_lasting() { Exit::Failed } else { Exit::Relaunch };
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

/// What a parameter server or worker needs to take part in a job.
pub(crate) struct Membership {
    pub(crate) master_addr: String,
    pub(crate) key: JobKey,
    pub(crate) job_dir: PathBuf,
    pub(crate) place: Place,
}

impl Membership {
    /// Runs a parameter server that listens on `listen` until `shutdown`.
    pub(crate) async fn ps(
        self,
        id: u32,
        listen: String,
        shutdown: CancellationToken,
    ) -> anyhow::Result<()> {
        let Self { master_addr, key, job_dir, place } = self;
        let config =
            edl_ps::Config { ps: PsId(id), master_addr, key, job_dir, listen, threads: 0, place };
        Ok(edl_ps::run(config, shutdown).await?)
    }

    /// Runs a worker until `shutdown`.
    pub(crate) async fn worker(
        self,
        worker: WorkerId,
        open_model: OpenModel,
        shutdown: CancellationToken,
    ) -> anyhow::Result<()> {
        let Self { master_addr, key, job_dir, place } = self;
        let config = edl_worker::Config { worker, master_addr, key, job_dir, place };
        Ok(edl_worker::run(config, open_model, shutdown).await?)
    }
}

/// Opens the model of the job in `job_dir` on the thread that computes.
pub(crate) fn open_model(job_dir: &Path) -> OpenModel {
    let indexes = JobDir::new(job_dir).indexes();
    Box::new(move |spec| crate::models::open(spec, Some(&indexes)))
}

/// Runs a process until it ends or a signal, or the end of its supervisor, cancels the token.
pub(crate) fn run(
    supervised: bool,
    body: impl AsyncFnOnce(CancellationToken) -> anyhow::Result<()>,
) -> anyhow::Result<Exit> {
    stacks::log_panics();
    let shutdown = CancellationToken::new();
    if supervised {
        die_with_supervisor()?;
        exit_at_end_of_input(shutdown.clone())?;
    }
    let runtime = runtime(2)?;
    let ended = runtime.block_on(async {
        let second = if supervised { ignore } else { kill_self };
        let _signals = on_signal(&shutdown, second)?;
        body(shutdown.clone()).await
    });
    runtime.shutdown_background();
    match ended {
        Ok(()) => Ok(Exit::Ok),
        // The command prints it, and exits with its code.
        Err(error) if error.is::<Refusal>() => Err(error),
        Err(error) => {
            tracing::error!("{error:#}");
            Ok(Exit::Failed)
        }
    }
}

/// The runtime of a process that runs as long as its job.
pub(crate) fn runtime(n_threads: usize) -> anyhow::Result<Runtime> {
    edl_net::open_files::raise_limit();
    let runtime = Builder::new_multi_thread().worker_threads(n_threads).enable_all().build();
    runtime.context("cannot start the async runtime")
}

/// The kernel kills this process when its supervisor is gone, no matter why.
fn die_with_supervisor() -> anyhow::Result<()> {
    let asked = set_parent_process_death_signal(Some(Signal::KILL));
    asked.context("cannot tie this process to its supervisor")
}

/// The input ends when the supervisor does. The supervisor writes only chaos actions that a process
/// must perform itself, in jobs that allow them.
fn exit_at_end_of_input(shutdown: CancellationToken) -> anyhow::Result<()> {
    let watch = move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if let Ok(ChaosAction::Partition { millis }) = serde_json::from_str(&line) {
                tracing::info!(millis, "network partition injected by a chaos action");
                edl_net::isolation::isolate(Duration::from_millis(millis));
            }
        }
        shutdown.cancel();
        std::thread::sleep(ORPHAN_GRACE);
        kill_self();
    };
    let thread = std::thread::Builder::new().name("supervisor-watch".into()).spawn(watch);
    thread.map(drop).context("cannot watch the supervisor")
}

/// Ends this process at once. The code that `exit` would run must not run while other threads exist,
/// which may be in the middle of user code.
fn kill_self() {
    let _ignored = signals::send(std::process::id(), Signal::KILL);
}

/// Supervised processes may get several signals, if every process of a job gets one; they are
/// killed if they take too long.
fn ignore() {}

/// The first signal requests an orderly exit; a second one exits at once.
pub(crate) fn cancel_on_signal(shutdown: &CancellationToken) -> anyhow::Result<JoinSet<()>> {
    on_signal(shutdown, || std::process::exit(Exit::Interrupted.code().into()))
}

fn on_signal(shutdown: &CancellationToken, again: fn()) -> anyhow::Result<JoinSet<()>> {
    let mut tasks = JoinSet::new();
    tasks.spawn(stacks::log_when_asked()?);
    for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
        let mut signals = signal(kind).context("cannot listen for signals")?;
        let shutdown = shutdown.clone();
        tasks.spawn(async move {
            while signals.recv().await.is_some() {
                if shutdown.is_cancelled() {
                    again();
                }
                shutdown.cancel();
            }
        });
    }
    Ok(tasks)
}

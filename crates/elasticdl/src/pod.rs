// SPDX-License-Identifier: Apache-2.0
//! `pod master|ps|worker`: a process of a job inside a container. What it is comes from the files
//! and variables that its pod mounts and sets.
//!
//! Nobody supervises it but the cluster. A master that is told to leave goes at once and without
//! a word, as if it had been killed: its job goes on, and one of its processes makes the next.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use edl_core::id::{PsId, WorkerId};
use edl_core::platform::{InstanceId, Role, pid_of};
use edl_core::spec::JobSpec;
use edl_kube::board::Board;
use edl_kube::note::StatusNote;
use edl_kube::platform::{self, End};
use edl_kube::rescue::{self, Rescuer};
use edl_kube::{Client, adopt, inside, manifest, names};
use edl_net::key::JobKey;
use edl_net::place::Place;
use edl_net::proto;
use tokio::io::BufReader;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::exit::{Exit, refuse};
use crate::jobs::{self, Job};
use crate::processes::{self, exit_of_master};
use crate::supervisor::link::Link;

/// Orders and reports are short lines.
const LINE: usize = 64 * 1024;
/// A master of before, on a node that was lost, may hold the store until it is ended.
const STORE_PATIENCE: Duration = Duration::from_secs(60);
/// What the platform gets after the job's end for those who do not leave by themselves.
const FAREWELL: Duration = Duration::from_secs(40);
/// An operator that plans by a job's progress needs it no more often.
const TELL_EVERY: Duration = Duration::from_secs(3);
/// Kubernetes shows what is written there with a container that has ended; longer is cut off.
const LAST_WORDS: &str = "/dev/termination-log";
const MAX_LAST_WORDS: usize = 4096;
/// A pod's own folder; no other pod sees it, so that pods meet by their addresses.
const SOCKETS: &str = "/tmp/run";

/// Which process of the job the pod is.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Part {
    Master,
    Ps,
    Worker,
}

/// Where a process finds what it needs. The defaults are those of a pod; others are for a master
/// that runs outside of the cluster.
#[derive(Args, Clone, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct PodArgs {
    part: Part,
    /// Folder of the job's description
    #[arg(long, value_name = "DIR", default_value = names::JOB_MOUNT)]
    job_mount: PathBuf,
    /// Folder of the job's key
    #[arg(long, value_name = "DIR", default_value = names::KEY_MOUNT)]
    key_mount: PathBuf,
    /// Where a master listens for its processes
    #[arg(long, value_name = "PORT", default_value_t = names::MASTER_PORT)]
    master_port: u16,
    /// Where a master serves its page
    #[arg(long, value_name = "PORT", default_value_t = names::HTTP_PORT)]
    http_port: u16,
}

/// What a pod knows about itself.
struct Pod {
    args: PodArgs,
    spec: JobSpec,
    job_dir: PathBuf,
    master_addr: String,
    name: String,
    namespace: String,
    ip: IpAddr,
}

/// Runs the process of this pod to its end.
pub(crate) fn run(args: &PodArgs) -> anyhow::Result<Exit> {
    let pod = Pod::of_environment(args.clone())?;
    crate::telemetry::start(&pod.spec.log_level);
    match args.part {
        Part::Master => master(&pod),
        Part::Ps => {
            let id = number("ELASTICDL_PS_ID")?;
            let me = InstanceId { role: Role::Ps, id };
            member(pod, me, |joined, shutdown| async move {
                let Member { master_addr, key, job_dir, listen, place } = joined;
                let config = edl_ps::Config {
                    ps: PsId(id),
                    master_addr,
                    key,
                    job_dir,
                    listen,
                    threads: 0,
                    place,
                };
                Ok(Box::pin(edl_ps::run(config, shutdown)).await?)
            })
        }
        Part::Worker => {
            let id = number("ELASTICDL_WORKER_ID")?;
            let me = InstanceId { role: Role::Worker, id };
            member(pod, me, |joined, shutdown| async move {
                let Member { master_addr, key, job_dir, place, .. } = joined;
                let worker = WorkerId(id);
                let config = edl_worker::Config { worker, master_addr, key, job_dir, place };
                let open = processes::open_model();
                Ok(Box::pin(edl_worker::run(config, open, shutdown)).await?)
            })
        }
    }
}

/// What a parameter server or worker is started with.
struct Member {
    master_addr: String,
    key: JobKey,
    job_dir: PathBuf,
    listen: String,
    place: Place,
}

impl Pod {
    fn of_environment(args: PodArgs) -> anyhow::Result<Self> {
        let path = args.job_mount.join(names::JOB_FILE);
        let text = std::fs::read_to_string(&path).map_err(|error| {
            refuse(format!("cannot read `{}`: {error}; this command runs in pods", path.display()))
        })?;
        let spec: JobSpec = serde_norway::from_str(&text)
            .map_err(|error| refuse(format!("`{}` describes no job: {error}", path.display())))?;
        spec.check().map_err(|error| refuse(error.to_string()))?;
        let ip = variable("POD_IP")?;
        Ok(Self {
            args,
            spec,
            job_dir: variable("ELASTICDL_JOB_DIR")?.into(),
            master_addr: variable("ELASTICDL_MASTER_ADDR")?,
            name: variable("POD_NAME")?,
            namespace: variable("POD_NAMESPACE")?,
            ip: ip.parse().map_err(|_| refuse(format!("POD_IP `{ip}` is no address")))?,
        })
    }

    fn key(&self) -> anyhow::Result<JobKey> {
        Ok(JobKey::load(&self.key_file())?)
    }

    fn key_file(&self) -> PathBuf {
        self.args.key_mount.join(names::KEY_FILE)
    }

    /// The key of the job's Secret; a job that was applied by hand has none until its first
    /// master makes one, with the Service by which the others find it.
    async fn key_or_new(&self, client: &Client) -> anyhow::Result<JobKey> {
        if self.key_file().exists() {
            return self.key();
        }
        let new = JobKey::generate()?.to_text();
        let text = adopt::key_and_service(client, &self.namespace, &self.spec, &new).await?;
        JobKey::parse(&text).ok_or_else(|| {
            refuse(format!("secret `{}` holds no key", names::secret(&self.spec.job_name)))
        })
    }

    /// What tells this pod from one of the same name before it.
    async fn uid(&self, client: &Client) -> anyhow::Result<String> {
        if let Ok(uid) = variable("POD_UID") {
            return Ok(uid);
        }
        Ok(inside::uid(client, &self.namespace, &self.name).await?)
    }
}

fn variable(name: &str) -> anyhow::Result<String> {
    let value = std::env::var(name).ok().filter(|value| !value.is_empty());
    value.ok_or_else(|| refuse(format!("{name} is not set; this command runs in pods")))
}

fn number(name: &str) -> anyhow::Result<u32> {
    let text = variable(name)?;
    text.parse().map_err(|_| refuse(format!("{name} `{text}` is no number")))
}

fn master(pod: &Pod) -> anyhow::Result<Exit> {
    let (job, was_over) = open_job(pod)?;
    let runtime = processes::runtime(2)?;
    let exit = runtime.block_on(async {
        let asked = CancellationToken::new();
        let _signals = processes::cancel_on_signal(&asked)?;
        tokio::select! {
            exit = Box::pin(serve(pod, &job, was_over)) => exit,
            // Whoever comes next finds all that counts on disk.
            () = asked.cancelled() => Ok(Exit::Interrupted),
        }
    })?;
    if exit == Exit::Ok || exit == Exit::Failed || exit == Exit::Stopped {
        leave_last_words(&job);
    }
    runtime.shutdown_background();
    Ok(exit)
}

/// The master and the platform under it, side by side.
async fn serve(pod: &Pod, job: &Job, was_over: bool) -> anyhow::Result<Exit> {
    let client = inside::connect().await?;
    let config = edl_master::Config {
        job_dir: job.dir().to_owned(),
        listen: format!("0.0.0.0:{}", pod.args.master_port),
        http_listen: format!("0.0.0.0:{}", pod.args.http_port),
        key: pod.key_or_new(&client).await?,
        spec: pod.spec.clone(),
        resume: was_over,
        ip: Some(pod.ip),
        store_patience: STORE_PATIENCE,
    };
    let board = Board::new(client.clone(), &pod.namespace, &pod.spec.job_name);
    let board = if board.is_used().await { Some(board) } else { None };
    let env = manifest::populated(&pod.spec, std::env::vars());
    let platform_config = platform::Config {
        spec: pod.spec.clone(),
        namespace: pod.namespace.clone(),
        master_uid: pod.uid(&client).await.ok(),
        env: env.map_err(|invalid| refuse(invalid.0))?,
        board: board.clone(),
    };
    let (ours, theirs) = tokio::io::duplex(LINE);
    let (our_out, our_in) = tokio::io::split(ours);
    let (reports_in, orders_out) = tokio::io::split(theirs);
    let (reports, orders, _line) = Link::new(our_in, our_out).into_parts();
    let mut platform = JoinSet::new();
    platform.spawn(platform::run(client, platform_config, orders, reports));
    let mut telling = JoinSet::new();
    if let Some(board) = board.clone() {
        telling.spawn(tell(board, job.clone()));
    }
    let never = CancellationToken::new();
    let run = edl_master::run(config, orders_out, BufReader::new(reports_in), never);
    let ended = tokio::select! {
        ended = Box::pin(run) => ended,
        end = platform.join_next() => {
            let why = match end {
                Some(Ok(End::Superseded)) => "this master's pod is gone; the next one goes on",
                Some(Ok(End::Done) | Err(_)) | None => "the platform has ended",
            };
            tracing::warn!("{why}");
            return Ok(Exit::Relaunch);
        }
    };
    let exit = exit_of_master(ended);
    telling.abort_all();
    if let (Some(board), Some(note)) = (&board, note(job)) {
        board.tell(&note).await;
    }
    // Those who were told of the end leave by themselves, most of them at once.
    let _ = tokio::time::timeout(FAREWELL, platform.join_next()).await;
    Ok(exit)
}

/// Tells an operator how far the job is, whenever that has changed.
async fn tell(board: Board, job: Job) {
    let mut told = None;
    loop {
        let new = note(&job);
        if let Some(new) = new.filter(|new| told.as_ref() != Some(new)) {
            board.tell(&new).await;
            told = Some(new);
        }
        tokio::time::sleep(TELL_EVERY).await;
    }
}

/// What an operator wants to know of the job.
fn note(job: &Job) -> Option<String> {
    let status = job.status()?;
    let working = |it: &&proto::Instance| it.role == "worker" && it.state != "waiting";
    let workers = status.instances.iter().filter(working).count();
    let note = StatusNote {
        records_done: status.records_done,
        records_total: Some(status.records_total),
        records_per_second: Some(status.records_per_second.round()),
        workers: u32::try_from(workers).unwrap_or(u32::MAX),
        eta_secs: Some(status.eta_secs.round()),
        step: status.step,
        state: status.state,
    };
    serde_json::to_string(&note).ok()
}

/// Makes the job's folder what the ConfigMap says; tells whether the job in it had ended.
fn open_job(pod: &Pod) -> anyhow::Result<(Job, bool)> {
    let job = Job::in_folder(&pod.job_dir, &pod.spec)?;
    let was_over = job.status().is_some_and(|status| jobs::is_final(&status.state));
    Ok((job, was_over))
}

/// Leaves the job's last status with the container.
fn leave_last_words(job: &Job) {
    let Some(mut status) = job.status() else { return };
    status.instances.clear();
    status.events.clear();
    status.evaluations.drain(..status.evaluations.len().saturating_sub(1));
    let said = serde_json::to_vec(&status).unwrap_or_default();
    if said.len() <= MAX_LAST_WORDS {
        // Without it the exit code still tells how the job ended.
        let _ = std::fs::write(LAST_WORDS, said);
    }
}

/// A parameter server or worker, which makes its master again if that is lost.
fn member<F>(
    pod: Pod,
    me: InstanceId,
    body: impl FnOnce(Member, CancellationToken) -> F,
) -> anyhow::Result<Exit>
where
    F: Future<Output = anyhow::Result<()>>,
{
    let key = pod.key()?;
    processes::run(false, |shutdown| async move {
        let client = inside::connect().await?;
        let (answers, answered) = watch::channel(true);
        let place = Place {
            pid: pid_of(&pod.uid(&client).await?),
            ip: Some(pod.ip),
            sockets: Some(SOCKETS.into()),
            master_answers: Some(answers),
        };
        let rescuer = Rescuer { spec: pod.spec, namespace: pod.namespace, me };
        let mut tasks = JoinSet::new();
        tasks.spawn(rescue::run(client, rescuer, answered, shutdown.clone()));
        let listen = format!("{}:0", host(pod.ip));
        let joined =
            Member { master_addr: pod.master_addr, key, job_dir: pod.job_dir, listen, place };
        body(joined, shutdown).await
    })
}

/// An address as it stands before a port.
fn host(ip: IpAddr) -> String {
    if ip.is_ipv6() { format!("[{ip}]") } else { ip.to_string() }
}

// SPDX-License-Identifier: Apache-2.0
//! `pod master|ps|worker`: a process of a job inside a container, configured by the files and
//! variables of its pod.
//!
//! Only the cluster supervises it. A master that is asked to exit does so at once, as if it had been
//! killed: its job keeps running, and a Kubernetes Job creates the next master. If a user has deleted
//! all pods of the job, it saves the job first.

use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use edl_core::id::WorkerId;
use edl_core::platform::pid_of;
use edl_core::spec::JobSpec;
use edl_kube::{Client, adopt, names};
use edl_net::key::JobKey;
use edl_net::place::Place;
use edl_worker::OpenModel;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::custom_loop;
use crate::exit::{Exit, refuse};
use crate::processes::{self, Membership};

mod controller;
mod master;

/// A folder that no other pod sees, so pods connect by their addresses.
const SOCKETS: &str = "/tmp/run";
/// How long a worker or server waits for a master. Kubernetes waits ten minutes at most before it
/// creates another one, which may then wait for a node.
const MASTER_LIMIT: Duration = Duration::from_secs(3600);
/// A node mounts a Secret that was created after the pod within two minutes.
const KEY_LIMIT: Duration = Duration::from_secs(180);
const KEY_PAUSE: Duration = Duration::from_millis(500);

/// Which process of the job the pod is.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Part {
    Master,
    Ps,
    Worker,
}

/// Where a process finds its files. The defaults are those of a pod; a master that runs outside the
/// cluster sets others.
#[derive(Args, Clone, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct PodArgs {
    /// Process to run
    part: Part,
    /// Folder with the job description
    #[arg(long, value_name = "DIR", default_value = names::JOB_MOUNT)]
    job_mount: PathBuf,
    /// Folder with the job's key
    #[arg(long, value_name = "DIR", default_value = names::KEY_MOUNT)]
    key_mount: PathBuf,
    /// Port on which the master listens for its processes
    #[arg(long, value_name = "PORT", default_value_t = names::MASTER_PORT)]
    master_port: u16,
    /// Port of the master's web page
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
    crate::telemetry::start(pod.spec.log_level);
    match args.part {
        Part::Master => master::run(&pod),
        Part::Ps => {
            let id = number("ELASTICDL_PS_ID")?;
            let listen = SocketAddr::new(pod.ip, 0).to_string();
            member(pod, async |membership, shutdown| membership.ps(id, listen, shutdown).await)
        }
        Part::Worker => {
            let id = number("ELASTICDL_WORKER_ID")?;
            if pod.spec.is_custom_loop() {
                return become_loop(&pod, id);
            }
            let open = processes::open_model(&pod.job_dir);
            worker(pod, WorkerId(id), open)
        }
    }
}

fn worker(pod: Pod, worker: WorkerId, open: OpenModel) -> anyhow::Result<Exit> {
    member(pod, async |membership, shutdown| membership.worker(worker, open, shutdown).await)
}

/// Replaces this process by the user's command: its loop is the worker, and the container ends with
/// it.
fn become_loop(pod: &Pod, worker: u32) -> anyhow::Result<Exit> {
    let (key_file, job_dir) = (pod.key_file(), &pod.job_dir);
    let mut command = custom_loop::worker(&pod.spec, worker, &pod.master_addr, &key_file, job_dir);
    let error = command.env(custom_loop::IN_POD, "1").exec();
    Err(refuse(format!("cannot start `sh` for --job_command: {error}; the image must contain it")))
}

/// Makes this process, the user's command, the worker of its pod.
pub(crate) fn work(id: WorkerId, open: OpenModel) -> anyhow::Result<Exit> {
    worker(Pod::of_environment(PodArgs::of_pod(Part::Worker))?, id, open)
}

impl PodArgs {
    /// The defaults.
    fn of_pod(part: Part) -> Self {
        Self {
            part,
            job_mount: names::JOB_MOUNT.into(),
            key_mount: names::KEY_MOUNT.into(),
            master_port: names::MASTER_PORT,
            http_port: names::HTTP_PORT,
        }
    }
}

impl Pod {
    fn of_environment(args: PodArgs) -> anyhow::Result<Self> {
        let path = args.job_mount.join(names::JOB_FILE);
        let text = std::fs::read_to_string(&path).map_err(|error| {
            refuse(format!("cannot read `{}`: {error}; this command runs in pods", path.display()))
        })?;
        let spec = edl_kube::yaml::read::<JobSpec>(&text)
            .map_err(|error| refuse(format!("invalid job in `{}`: {error}", path.display())))?;
        spec.check().map_err(|error| refuse(error.to_string()))?;
        let ip = variable("POD_IP")?;
        Ok(Self {
            args,
            spec,
            job_dir: variable("ELASTICDL_JOB_DIR")?.into(),
            master_addr: variable("ELASTICDL_MASTER_ADDR")?,
            name: variable("POD_NAME")?,
            namespace: variable("POD_NAMESPACE")?,
            ip: ip.parse().map_err(|_| refuse(format!("POD_IP `{ip}` is not a valid address")))?,
        })
    }

    fn key(&self) -> anyhow::Result<JobKey> {
        Ok(JobKey::load(&self.key_file())?)
    }

    fn key_file(&self) -> PathBuf {
        self.args.key_mount.join(names::KEY_FILE)
    }

    /// The key of the job's Secret. A job that was applied manually has none until its first master
    /// creates it, with the Service that leads other pods to the master.
    async fn key_or_new(&self, client: &Client) -> anyhow::Result<JobKey> {
        if self.key_file().exists() {
            return self.key();
        }
        let new = JobKey::generate()?;
        if adopt::key_and_service(client, &self.namespace, &self.spec, &new.to_text()).await? {
            return Ok(new);
        }
        let deadline = Instant::now() + KEY_LIMIT;
        while !self.key_file().exists() && Instant::now() < deadline {
            tokio::time::sleep(KEY_PAUSE).await;
        }
        self.key().with_context(|| {
            format!("secret `{}` is not mounted", names::secret(&self.spec.job_name))
        })
    }
}

/// Distinguishes this pod from earlier pods of the same name.
fn uid() -> anyhow::Result<String> {
    variable("POD_UID")
}

fn variable(name: &str) -> anyhow::Result<String> {
    let value = std::env::var(name).ok().filter(|value| !value.is_empty());
    value.ok_or_else(|| refuse(format!("{name} is not set; this command runs in pods")))
}

fn number(name: &str) -> anyhow::Result<u32> {
    let text = variable(name)?;
    text.parse().map_err(|_| refuse(format!("{name} `{text}` is not a number")))
}

/// Runs a parameter server or worker. It has no access to the API server, and exits if no master
/// responds for long.
fn member(
    pod: Pod,
    body: impl AsyncFnOnce(Membership, CancellationToken) -> anyhow::Result<()>,
) -> anyhow::Result<Exit> {
    let key = pod.key()?;
    let pid = pid_of(&uid()?);
    processes::run(false, async |shutdown| {
        let (answers, answered) = watch::channel(true);
        let place = Place {
            pid,
            ip: Some(pod.ip),
            sockets: Some(SOCKETS.into()),
            master_answers: Some(answers),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(leave_without_master(answered, shutdown.clone()));
        let Pod { master_addr, job_dir, .. } = pod;
        body(Membership { master_addr, key, job_dir, place }, shutdown).await
    })
}

/// Ends this process when its master has not answered for long: its job was removed.
async fn leave_without_master(mut answered: watch::Receiver<bool>, shutdown: CancellationToken) {
    while answered.wait_for(|answers| !answers).await.is_ok() {
        let is_back = answered.wait_for(|answers| *answers);
        if tokio::time::timeout(MASTER_LIMIT, is_back).await.is_err() {
            tracing::error!("no master has responded for {} s; exiting", MASTER_LIMIT.as_secs());
            return shutdown.cancel();
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `pod master|ps|worker`: a process of a job inside a container. What it is comes from the files
//! and variables that its pod mounts and sets.
//!
//! Nobody supervises it but the cluster. A master that is told to leave goes at once and without
//! a word, as if it had been killed: its job goes on, and one of its processes makes the next.

use std::net::IpAddr;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use edl_core::id::{PsId, WorkerId};
use edl_core::platform::{InstanceId, Role, pid_of};
use edl_core::spec::JobSpec;
use edl_kube::rescue::{self, Rescuer};
use edl_kube::{Client, adopt, inside, names};
use edl_net::key::JobKey;
use edl_net::place::Place;
use edl_worker::OpenModel;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::exit::{Exit, refuse};
use crate::{own_loop, processes};

mod master;

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
                Ok(edl_ps::run(config, shutdown).await?)
            })
        }
        Part::Worker => {
            let id = number("ELASTICDL_WORKER_ID")?;
            if pod.spec.is_own_loop() {
                return become_loop(&pod, id);
            }
            worker(pod, WorkerId(id), processes::open_model())
        }
    }
}

fn worker(pod: Pod, worker: WorkerId, open: OpenModel) -> anyhow::Result<Exit> {
    let me = InstanceId { role: Role::Worker, id: worker.0 };
    member(pod, me, |joined, shutdown| async move {
        let Member { master_addr, key, job_dir, place, .. } = joined;
        let config = edl_worker::Config { worker, master_addr, key, job_dir, place };
        Ok(edl_worker::run(config, open, shutdown).await?)
    })
}

/// Goes on as the user's own command, in the place of this process: its loop is the worker, and
/// the container's end is its own.
fn become_loop(pod: &Pod, worker: u32) -> anyhow::Result<Exit> {
    let membership = own_loop::Membership {
        worker,
        master_addr: pod.master_addr.clone(),
        key_file: pod.key_file(),
        job_dir: pod.job_dir.clone(),
    };
    let error = own_loop::worker(&pod.spec, &membership).env(own_loop::IN_POD, "1").exec();
    Err(refuse(format!("cannot start `sh` for --job_command: {error}; the image must contain it")))
}

/// The loop that this pod has become, as its worker.
pub(crate) fn work(id: WorkerId, open: OpenModel) -> anyhow::Result<Exit> {
    worker(Pod::of_environment(PodArgs::of_pod(Part::Worker))?, id, open)
}

impl PodArgs {
    /// Those of a pod.
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

    /// The key of the job's Secret; a job that was applied by hand has none until its first
    /// master makes one, with the Service by which the others find it.
    async fn key_or_new(&self, client: &Client) -> anyhow::Result<JobKey> {
        if self.key_file().exists() {
            return self.key();
        }
        let new = JobKey::generate()?.to_text();
        let text = adopt::key_and_service(client, &self.namespace, &self.spec, &new).await?;
        JobKey::parse(&text).ok_or_else(|| {
            refuse(format!("secret `{}` contains no key", names::secret(&self.spec.job_name)))
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
    text.parse().map_err(|_| refuse(format!("{name} `{text}` is not a number")))
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

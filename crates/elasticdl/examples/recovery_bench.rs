// SPDX-License-Identifier: Apache-2.0
//! How long AllReduce training stands still when a worker is killed or joins, against torchrun, and
//! what spares change.
//!
//! `ELASTICDL_TEST_PYTHON` names a Python with PyTorch; without one torchrun is left out.
//! `BENCH_KILLS=20` and `BENCH_ROUNDS=3` say how often each thing is done; `BENCH_ONLY=spares` leaves
//! out what has nothing to do with spares, and `BENCH_ONLY=joining` everything but spares that join.

#![allow(
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "a program that prints speeds"
)]

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use edl_core::job::EventKind;
use edl_core::platform::{InstanceState, Role};
use edl_net::key::JobKey;
use edl_net::proto::master_client::MasterClient;
use edl_net::proto::{Instance, JobStatus, StatusRequest};
use rustix::process::{Pid, Signal, kill_process};
use tonic::transport::Channel;

const N_WORKERS: usize = 4;
/// Between two looks at the job.
const LOOK: Duration = Duration::from_millis(1);
const PATIENCE: Duration = Duration::from_secs(120);
/// Of processor times, as the kernel reports them.
const TICKS_PER_SEC: f64 = 100.0;
/// torchrun takes seconds, so fewer of its restarts are waited for.
const TORCHRUN_KILLS: usize = 6;

fn main() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    let n_kills = number("BENCH_KILLS", 20);
    let n_rounds = number("BENCH_ROUNDS", 3);
    match std::env::var("BENCH_ONLY").as_deref() {
        Ok("spares") => return runtime.block_on(spares(n_kills, n_rounds)),
        Ok("joining") => {
            (0..n_rounds).try_for_each(|_| runtime.block_on(joining(1)))?;
            return Ok(());
        }
        Ok(_) | Err(_) => {}
    }
    let mut ours = runtime.block_on(kill_to_next_step(n_kills))?;
    let ours_median = report("kill -9 of 1 of 4 workers to the next committed step", &mut ours);
    match torchrun(TORCHRUN_KILLS.min(n_kills)) {
        Ok(mut theirs) => {
            let median = report("the same under torchrun (gloo, snapshots)", &mut theirs);
            println!("elasticdl is {:.0} times faster (target >= 10)", median / ours_median);
        }
        Err(error) => println!("torchrun is left out: {error:#}"),
    }
    runtime.block_on(joining(0))?;
    runtime.block_on(spares(n_kills, n_rounds))
}

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn report(what: &str, seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    let p99 = seconds[(seconds.len() * 99).div_ceil(100) - 1];
    println!("{what}: median {median:.3} s, p99 {p99:.3} s of {}", seconds.len());
    median
}

/// A job of ours, ended when it is dropped.
struct Job {
    child: Child,
    master: MasterClient<Channel>,
    n_spares: usize,
    _home: tempfile::TempDir,
}

impl Drop for Job {
    fn drop(&mut self) {
        // Its processes follow their supervisor.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Job {
    async fn start(args: &[&str]) -> anyhow::Result<Self> {
        let home = tempfile::tempdir()?;
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fashion_mnist/train");
        let child = Command::new(binary()?)
            .env("ELASTICDL_HOME", home.path())
            .args(["train", "--job_name=bench", "--num_ps_pods=0", "--num_epochs=0"])
            .args(["--minibatch_size=16", "--lanes=4"])
            .args(args)
            .arg(format!("--training_data={}", data.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let folder = home.path().join("jobs/bench");
        let start = Instant::now();
        let master = loop {
            anyhow::ensure!(start.elapsed() < PATIENCE, "the job does not start");
            match connect(&folder).await {
                Ok(master) => break master,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        };
        Ok(Self { child, master, n_spares: 0, _home: home })
    }

    async fn status(&mut self) -> anyhow::Result<JobStatus> {
        Ok(self.master.status(StatusRequest {}).await?.into_inner())
    }

    /// Waits for a status.
    async fn wait(
        &mut self,
        what: &str,
        is_so: impl Fn(&JobStatus) -> bool,
    ) -> anyhow::Result<JobStatus> {
        let start = Instant::now();
        loop {
            let status = self.status().await?;
            if is_so(&status) {
                return Ok(status);
            }
            anyhow::ensure!(start.elapsed() < PATIENCE, "{what} does not come: {status:#?}");
            tokio::time::sleep(LOOK).await;
        }
    }
}

async fn connect(folder: &Path) -> anyhow::Result<MasterClient<Channel>> {
    let info: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("master.json"))?)?;
    let address = info["address"].as_str().context("an address")?;
    let key = JobKey::load(&folder.join("job.key"))?;
    Ok(MasterClient::new(edl_net::tls::connect(address, &key, PATIENCE).await?))
}

fn working(status: &JobStatus) -> Vec<&Instance> {
    let is_working =
        |i: &&Instance| i.role() == Role::Worker && i.state() == InstanceState::Working;
    status.instances.iter().filter(is_working).collect()
}

fn last_world(status: &JobStatus) -> u64 {
    let worlds = status.events.iter().filter(|event| event.kind() == EventKind::World);
    worlds.map(|event| event.number).max().unwrap_or(0)
}

/// Kills one of four workers again and again; the seconds until a step is committed without it.
async fn kill_to_next_step(n_kills: usize) -> anyhow::Result<Vec<f64>> {
    let mut job = Job::start(&["--model_def=mnist_mlp", "--num_workers=4"]).await?;
    let mut seconds = Vec::new();
    for number in 0..n_kills {
        let status = job
            .wait("four workers at work", |s| working(s).len() == N_WORKERS && s.step > 20)
            .await?;
        // Not always at the same moment of a step.
        tokio::time::sleep(Duration::from_millis(200 + 37 * number as u64 % 100)).await;
        let victim = working(&status)[number % N_WORKERS].pid;
        let before = job.status().await?;
        let start = Instant::now();
        kill(victim)?;
        let world = last_world(&before);
        job.wait("the next step", |s| last_world(s) > world && s.step > before.step).await?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    Ok(seconds)
}

/// Two workers without and with a spare: how soon two of them train again after a kill, and what
/// kills cost. Windows with and without a kill, with and without a spare take turns, because the
/// machine's own speed drifts.
async fn spares(n_kills: usize, n_rounds: usize) -> anyhow::Result<()> {
    for n_spares in [0, 1] {
        let mut job = Job::with_spares(n_spares).await?;
        let mut seconds = Vec::new();
        for _ in 0..n_kills {
            seconds.push(kill_to_full_world(&mut job).await?);
        }
        let what = format!("--spares={n_spares}: kill to the first step of its replacement");
        report(&what, &mut seconds);
    }
    for secs in [10, 30] {
        let mut sums = [[Window::default(); 2]; 2];
        for _ in 0..n_rounds {
            for n_spares in [0, 1] {
                let mut job = Job::with_spares(n_spares).await?;
                for has_kill in [false, true] {
                    let window = job.window(secs, has_kill).await?;
                    sums[n_spares][usize::from(has_kill)].add(window);
                }
            }
        }
        for (n_spares, [quiet, killed]) in sums.iter().enumerate() {
            println!(
                "--spares={n_spares}: throughput with a kill every {secs} s: {:.1} % of {:.0} \
                 records/s; processor time per record: {:.1} % of that without kills",
                100.0 * killed.speed() / quiet.speed(),
                quiet.speed(),
                100.0 * killed.cost() / quiet.cost(),
            );
        }
    }
    println!("(targets: >= 90 % every 10 s with a spare, >= 95 % every 30 s)");
    joining(1).await
}

/// Kills one of two workers; the seconds until a step is committed by two workers again.
async fn kill_to_full_world(job: &mut Job) -> anyhow::Result<f64> {
    let before = job.wait_for_all(2).await?;
    let victim = working(&before)[0].pid;
    let start = Instant::now();
    kill(victim)?;
    let is_full = |s: &JobStatus| {
        let working = working(s);
        working.len() == 2 && working.iter().all(|worker| worker.pid != victim)
    };
    let full = job.wait("two workers", is_full).await?;
    job.wait("a step of both", |s| s.step > full.step).await?;
    Ok(start.elapsed().as_secs_f64())
}

/// What was trained in some time, and the processor time that all processes of the job took.
#[derive(Clone, Copy, Default)]
struct Window {
    records: f64,
    secs: f64,
    processor_secs: f64,
}

impl Window {
    fn add(&mut self, more: Self) {
        self.records += more.records;
        self.secs += more.secs;
        self.processor_secs += more.processor_secs;
    }

    fn speed(&self) -> f64 {
        self.records / self.secs
    }

    fn cost(&self) -> f64 {
        self.processor_secs / self.records
    }
}

impl Job {
    async fn with_spares(n_spares: usize) -> anyhow::Result<Self> {
        let spares = format!("--spares={n_spares}");
        let args = ["--model_def=mnist_cnn", "--num_workers=2", &spares];
        let mut job = Self::start(&args).await?;
        job.n_spares = n_spares;
        Ok(job)
    }

    /// Waits for this many workers that train, and for all spares.
    async fn wait_for_all(&mut self, n_workers: usize) -> anyhow::Result<JobStatus> {
        let n_spares = self.n_spares;
        let is_spare = |i: &&Instance| i.state() == InstanceState::Spare;
        let has_spares =
            move |s: &JobStatus| s.instances.iter().filter(is_spare).count() == n_spares;
        let is_whole =
            move |s: &JobStatus| working(s).len() == n_workers && s.step > 20 && has_spares(s);
        self.wait("all workers and spares", is_whole).await
    }

    /// Trains for some time, with a kill at its beginning or none.
    async fn window(&mut self, secs: u64, has_kill: bool) -> anyhow::Result<Window> {
        let first = self.wait_for_all(2).await?;
        let (start, before) = (Instant::now(), processor_secs(self.child.id())?);
        if has_kill && let Some(victim) = working(&first).first() {
            kill(victim.pid)?;
        }
        tokio::time::sleep(Duration::from_secs(secs)).await;
        let last = self.status().await?;
        Ok(Window {
            records: (last.records_done - first.records_done) as f64,
            secs: start.elapsed().as_secs_f64(),
            processor_secs: processor_secs(self.child.id())? - before,
        })
    }
}

/// The processor time of a process, its children, and those of them that are gone.
fn processor_secs(pid: u32) -> anyhow::Result<f64> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    let mut ticks = ticks(pid, 13..17)?;
    for child in children.split_whitespace() {
        // One that has just ended is counted with those that are gone.
        ticks += self::ticks(child.parse()?, 13..15).unwrap_or(0);
    }
    Ok(ticks as f64 / TICKS_PER_SEC)
}

/// The sum of some fields of a process, counted from zero, as the kernel lists them.
fn ticks(pid: u32, fields: std::ops::Range<usize>) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is a name, which may hold spaces.
    let rest = text.rsplit_once(") ").context("a name")?.1;
    let found = rest.split(' ').skip(fields.start - 2).take(fields.len());
    Ok(found.map(str::parse::<u64>).sum::<Result<u64, _>>()?)
}

/// A second worker joins: how long training stands still for it, by the size of the state.
async fn joining(n_spares: usize) -> anyhow::Result<()> {
    for hidden in [128, 1024, 8192] {
        let params = format!("--model_params=hidden={hidden}");
        let spares = format!("--spares={n_spares}");
        let args = ["--model_def=mnist_mlp", "--num_workers=1", &params, &spares];
        let mut job = Job::start(&args).await?;
        job.n_spares = n_spares;
        job.wait_for_all(1).await?;
        let start = Instant::now();
        job.master.scale(edl_net::proto::ScaleRequest { workers: 2 }).await?;
        let status = job.wait("the joiner", |s| working(s).len() == 2).await?;
        let joined = job.wait("its first step", |s| s.step > status.step).await?;
        let total = start.elapsed().as_secs_f64();
        let mut worlds = joined.events.iter().filter(|event| event.kind() == EventKind::World);
        let text = worlds.next_back().map(|event| event.text.clone()).unwrap_or_default();
        println!(
            "--spares={n_spares}: a joiner's first committed step came {total:.2} s after \
             `scale`: {text}"
        );
    }
    Ok(())
}

fn kill(pid: u32) -> anyhow::Result<()> {
    let pid = Pid::from_raw(i32::try_from(pid)?).context("a process id")?;
    Ok(kill_process(pid, Signal::KILL)?)
}

/// The peer: kills one of four workers of a torchrun job again and again.
fn torchrun(n_kills: usize) -> anyhow::Result<Vec<f64>> {
    let python = std::env::var("ELASTICDL_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let has_torch = Command::new(&python)
        .args(["-c", "import torch"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    anyhow::ensure!(has_torch, "`{python}` has no PyTorch; set ELASTICDL_TEST_PYTHON");
    let folder = tempfile::tempdir()?;
    let steps = folder.path().join("steps");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/python/torchrun_job.py");
    let child = Command::new(&python)
        .args(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"])
        .args(["--max_restarts=100", "--monitor_interval=0.1"])
        .arg(script)
        .arg(&steps)
        .env("OMP_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let mut peer = Peer { child, steps };
    peer.wait(|last| last.step >= 20)?;
    let mut seconds = Vec::new();
    for number in 0..n_kills {
        let before = peer.wait(|_| true)?;
        let start = Instant::now();
        kill(before.pids[number % N_WORKERS])?;
        // Its processes are all new: a step of theirs is the next one.
        peer.wait(|last| last.pids != before.pids)?;
        seconds.push(start.elapsed().as_secs_f64());
        std::thread::sleep(Duration::from_secs(1));
    }
    Ok(seconds)
}

struct Peer {
    child: Child,
    steps: PathBuf,
}

struct Step {
    step: u64,
    pids: Vec<u32>,
}

impl Peer {
    fn wait(&mut self, is_so: impl Fn(&Step) -> bool) -> anyhow::Result<Step> {
        let start = Instant::now();
        loop {
            if let Some(step) = self.last()
                && is_so(&step)
            {
                return Ok(step);
            }
            anyhow::ensure!(start.elapsed() < PATIENCE, "torchrun makes no step");
            std::thread::sleep(LOOK);
        }
    }

    fn last(&self) -> Option<Step> {
        let mut file = std::fs::File::open(&self.steps).ok()?;
        let n_bytes = file.metadata().ok()?.len();
        file.seek(SeekFrom::Start(n_bytes.saturating_sub(4096))).ok()?;
        let mut text = String::new();
        file.read_to_string(&mut text).ok()?;
        let whole = &text[..text.rfind('\n')?];
        let mut words = whole.lines().last()?.split(' ');
        let step = words.next()?.parse().ok()?;
        let pids = words.nth(1)?.split(',').filter_map(|pid| pid.parse().ok()).collect();
        Some(Step { step, pids })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Asked first, it ends its workers.
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(10) {
            if self.child.try_wait().is_ok_and(|ended| ended.is_some()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The command, built next to this program.
fn binary() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().and_then(Path::parent).context("no folder")?;
    let binary = folder.join("elasticdl");
    anyhow::ensure!(binary.exists(), "`{}` is not there; run `make` first", binary.display());
    Ok(binary)
}

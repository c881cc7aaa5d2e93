// SPDX-License-Identifier: Apache-2.0
//! The cost of observing a job: its speed with and without a client that watches the page
//! and scrapes the metrics every second. Within one job the two take turns, so that both sides
//! see the same machine.
//!
//! `BENCH_ROUNDS=10` says how many turns each side has, `BENCH_SECS=4` how long one is.

#![allow(
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "a program that prints speeds"
)]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;

const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> anyhow::Result<()> {
    let rounds = number("BENCH_ROUNDS", 10);
    let turn = Duration::from_secs(number("BENCH_SECS", 4));
    let home = tempfile::tempdir()?;
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fashion_mnist/train");
    let child = Command::new(binary()?)
        .env("ELASTICDL_HOME", home.path())
        .args(["train", "--job_name=bench", "--model_def=mnist_mlp", "--num_epochs=0"])
        .args(["--num_workers=2", "--checkpoint_secs=0"])
        .arg(format!("--training_data={}", data.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let _job = Ended(child);
    let address = address(&home.path().join("jobs/bench"))?;
    // The first seconds are those of a start.
    speed(&address, turn)?;
    let (mut alone, mut watched) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        alone.push(speed(&address, turn)?);
        let watching = Watching::start(&address);
        watched.push(speed(&address, turn)?);
        drop(watching);
    }
    let (alone, watched) = (median(alone), median(watched));
    let cost = (1.0 - watched / alone) * 100.0;
    println!(
        "page not watched: {alone:.0} records/s; page watched and metrics scraped: {watched:.0} \
         records/s; cost {cost:.2} % (target < 1)"
    );
    Ok(())
}

/// A job that goes with us; its processes follow their supervisor.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A client that watches and one that scrapes.
struct Watching(Arc<AtomicBool>, Vec<std::thread::JoinHandle<()>>);

impl Watching {
    fn start(address: &str) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let (over, at) = (Arc::clone(&is_over), address.to_owned());
        let watcher = std::thread::spawn(move || {
            let Ok(mut stream) = request(&at, "/api/news") else { return };
            let mut news = [0; 64 << 10];
            while !over.load(Ordering::Relaxed) && stream.read(&mut news).is_ok_and(|n| n > 0) {}
        });
        let (over, at) = (Arc::clone(&is_over), address.to_owned());
        let scraper = std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                let _ = get(&at, "/metrics");
                let _ = get(&at, "/api/all");
                std::thread::sleep(Duration::from_secs(1));
            }
        });
        Self(is_over, vec![watcher, scraper])
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        for thread in self.1.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Records per second over one turn, by the master's own count.
fn speed(address: &str, turn: Duration) -> anyhow::Result<f64> {
    let (from, before) = (Instant::now(), records(address)?);
    std::thread::sleep(turn);
    let after = records(address)?;
    Ok((after - before) / from.elapsed().as_secs_f64())
}

fn records(address: &str) -> anyhow::Result<f64> {
    let text = get(address, "/metrics")?;
    let line = text.lines().find(|line| line.starts_with("elasticdl_master_records_done "));
    let number = line.and_then(|line| line.split(' ').next_back());
    Ok(number.context("no records in the metrics")?.parse()?)
}

fn request(address: &str, path: &str) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    Ok(stream)
}

fn get(address: &str, path: &str) -> std::io::Result<String> {
    let mut answer = String::new();
    request(address, path)?.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Where the job's master answers, once it trains.
fn address(folder: &Path) -> anyhow::Result<String> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        let status = std::fs::read(folder.join("status.json")).unwrap_or_default();
        let status: serde_json::Value = serde_json::from_slice(&status).unwrap_or_default();
        if status["step"].as_u64() > Some(0) {
            return Ok(status["http_address"].as_str().context("an address")?.to_owned());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    anyhow::bail!("the job does not start")
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// The command, next to the folder of this example.
fn binary() -> anyhow::Result<PathBuf> {
    let here = std::env::current_exe()?;
    let folder = here.parent().and_then(Path::parent).context("a folder of programs")?;
    let binary = folder.join("elasticdl");
    anyhow::ensure!(binary.is_file(), "build the command first: make build");
    Ok(binary)
}

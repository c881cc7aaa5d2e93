// SPDX-License-Identifier: Apache-2.0
//! Network partitions between workers and their master, under AllReduce.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::allreduce::{n_working, step, weights};
use crate::harness::{Home, PATIENCE, Running, free_port, n_running, shipped_as};

/// Forwards bytes to a port, or holds them on request; connections stay open.
struct Proxy {
    port: u16,
    is_held: Arc<AtomicBool>,
}

impl Proxy {
    fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let is_held = Arc::new(AtomicBool::new(false));
        let shared = Arc::clone(&is_held);
        // Ends with the test's process.
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(("127.0.0.1", target)) else { continue };
                let clone = |stream: &TcpStream| stream.try_clone().expect("another handle");
                forward(clone(&near), clone(&far), Arc::clone(&shared));
                forward(far, near, Arc::clone(&shared));
            }
        });
        Self { port, is_held }
    }

    fn hold(&self, is_held: bool) {
        self.is_held.store(is_held, Ordering::SeqCst);
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, is_held: Arc<AtomicBool>) {
    let wait = Some(Duration::from_millis(20));
    from.set_read_timeout(wait).expect("a socket");
    std::thread::spawn(move || {
        let mut buffer = [0; 16 * 1024];
        loop {
            let n_bytes = match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(n_bytes) => n_bytes,
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    continue;
                }
                Err(_) => break,
            };
            while is_held.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
            if to.write_all(&buffer[..n_bytes]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
        let _ = from.shutdown(std::net::Shutdown::Both);
    });
}

/// A worker that was started manually; it ends with the test.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn worker(home: &Home, elsewhere: &Home, id: u32, port: u16) -> Worker {
    // A copy, because the worker would find the master's address next to the original.
    let copy = elsewhere.path().join(format!("key-{id}"));
    std::fs::copy(home.job_dir("held").join("job.key"), &copy).expect("the job's key");
    let key = format!("--job_key_file={}", copy.display());
    let (id, address) = (format!("--worker_id={id}"), format!("--master_addr=127.0.0.1:{port}"));
    let mut command = elsewhere.command(&["worker", &id, &address, &key]);
    command.env("ELASTICDL_TRANSPORT", "tcp").stdout(Stdio::null()).stderr(Stdio::null());
    Worker(command.spawn().expect("the command starts"))
}

fn master(home: &Home, port: u16) -> Running {
    let (port, data) = (format!("--port={port}"), shipped_as("training_data", "test"));
    home.start(
        "held",
        &[
            "master",
            "--job_name=held",
            "--distribution_strategy=AllreduceStrategy",
            "--model_def=mnist_cnn",
            "--lanes=2",
            "--minibatch_size=16",
            "--num_epochs=4",
            "--seed=5",
            "--heartbeat_timeout_secs=1.5",
            &port,
            &data,
        ],
    )
}

/// The weights after one worker has trained everything.
fn undisturbed() -> String {
    let (home, elsewhere) = (Home::new(), Home::new());
    let port = free_port();
    let mut master = master(&home, port);
    master.wait_until("the key", |_| true);
    let _worker = worker(&home, &elsewhere, 0, port);
    master.wait_for_success();
    weights(&home, "held")
}

fn has_event(status: &Value, kind: &str) -> bool {
    let events = status["events"].as_array().into_iter().flatten();
    events.into_iter().any(|event| event["kind"] == kind)
}

#[test]
fn steps_are_committed_only_by_the_master_and_only_once() {
    let expected = undisturbed();
    let (home, elsewhere) = (Home::new(), Home::new());
    let port = free_port();
    let mut master = master(&home, port);
    let proxies = [Proxy::to(port), Proxy::to(port)];
    master.wait_until("the key", |_| true);
    let _first = worker(&home, &elsewhere, 0, proxies[0].port);
    let _second = worker(&home, &elsewhere, 1, proxies[1].port);
    master.wait_until("both workers", |status| n_working(status) == 2 && step(status) > 10);

    // Disconnect one worker: the other continues alone, and the first joins again later.
    proxies[1].hold(true);
    let alone = master.wait_until("a single worker", |status| n_working(status) == 1);
    master.wait_until("further steps", |status| step(status) > step(&alone));
    proxies[1].hold(false);
    let again = master.wait_until("both workers again", |status| n_working(status) == 2);

    // Disconnect both: they train the steps they were allowed and wait; the master commits nothing.
    master.wait_until("further steps", |status| step(status) > step(&again));
    proxies.iter().for_each(|proxy| proxy.hold(true));
    let lost = master.wait_until("no workers", |status| n_running(status, "worker") == 0);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        let now = master.status().expect("a status");
        assert_eq!(step(&now), step(&lost), "a step was committed without the master");
        std::thread::sleep(Duration::from_millis(100));
    }
    proxies.iter().for_each(|proxy| proxy.hold(false));
    let start = Instant::now();
    while master.is_running() {
        assert!(start.elapsed() < PATIENCE, "{}", master.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    master.wait_for_success();
    assert_eq!(weights(&home, "held"), expected);
    let status = home.status("held");
    assert!(has_event(&status, "worker_silent"), "{:#}", status["events"]);
}

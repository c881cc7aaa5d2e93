// SPDX-License-Identifier: Apache-2.0
//! Members in separate processes that are really killed and frozen.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use edl_core::id::{Incarnation, WorkerId, WorldId};
use edl_core::lanes::assign;
use edl_net::mesh::{Dtype, Error, Mesh, Peer, ReducePhase};
use rustix::process::{Signal, getpid, kill_process};
use tempfile::TempDir;

use crate::failures::survive;
use crate::harness::{Over, TRANSPORTS, config, enter_and_check, peer, run, step};

const FOLDER: &str = "MESH_TEST_FOLDER";
const LANES: u32 = 7;

/// A member in a separate process, which is killed when this handle is dropped.
struct Member(Child);

impl Drop for Member {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn write_peer(peer: &Peer) -> String {
    let Peer { worker, incarnation, address, unix_path, span, is_busy: _ } = peer;
    format!("{worker} {incarnation} {address} {unix_path} {} {}", span.start, span.end)
}

fn read_peer(line: &str) -> Peer {
    let words: Vec<&str> = line.split_whitespace().collect();
    Peer {
        worker: WorkerId(words[0].parse().unwrap()),
        incarnation: Incarnation(words[1].parse().unwrap()),
        address: words[2].into(),
        unix_path: words[3].into(),
        span: words[4].parse().unwrap()..words[5].parse().unwrap(),
        is_busy: false,
    }
}

/// Starts `worker` as a process that sends `signal` to itself in step 5, in `phase`. Returns its
/// process and address.
fn start(
    folder: &TempDir,
    worker: u32,
    transport: Over,
    (phase, signal): (ReducePhase, Signal),
) -> (Member, Peer) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::a_member", "--nocapture", "--test-threads=1"])
        .env(FOLDER, folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let phase = ReducePhase::ALL.iter().position(|known| *known == phase).unwrap();
    let transport = TRANSPORTS.iter().position(|known| *known == transport).unwrap();
    let mut stdin = child.stdin.take().unwrap();
    writeln!(stdin, "{worker} {transport} {phase} {}", signal.as_raw()).unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    let line = stdout.lines().map(Result::unwrap).find(|text| text.contains("PEER")).unwrap();
    child.stdin = Some(stdin);
    let place = line.find("PEER").unwrap();
    (Member(child), read_peer(&line[place + 4..]))
}

/// Not a separate test: the code of the processes that the tests below start.
#[test]
fn a_member() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    let numbers: Vec<usize> =
        lines.next().unwrap().split(' ').map(|word| word.parse().unwrap()).collect();
    let worker = u32::try_from(numbers[0]).unwrap();
    let temporary = tempfile::tempdir().unwrap();
    let mut config = config(&temporary, worker, Some(TRANSPORTS[numbers[1]]));
    config.folder = folder.into();
    let signal = if numbers[3] == 9 { Signal::KILL } else { Signal::STOP };
    config.on_phase = Some(Box::new(move |phase, step| {
        if step == 5 && phase == ReducePhase::ALL[numbers[2]] {
            kill_process(getpid(), signal).unwrap();
            // SIGSTOP may reach this thread a little later than the others.
            loop {
                std::thread::park();
            }
        }
    }));
    let mut mesh = Mesh::open(config).unwrap();
    println!("PEER {}", write_peer(&peer(&mesh, worker, 0..0)));
    let peers: Vec<Peer> = lines.map(|line| read_peer(&line)).collect();
    let me = peers.iter().position(|peer| peer.worker.0 == worker).unwrap();
    mesh.enter(WorldId(1), me, peers.clone()).unwrap();
    for number in [4, 5] {
        step(&mut mesh, number, &peers[me].span, LANES, 400_000, Dtype::F32).unwrap();
    }
}

/// A world of two threads in this process and one separate process, `dead`.
fn world(
    folder: &TempDir,
    dead: usize,
    transport: Over,
    silence: Duration,
    fault: (ReducePhase, Signal),
) -> (Member, Vec<Mesh>, Vec<Peer>) {
    let mut peers = Vec::new();
    let mut meshes = Vec::new();
    for worker in (0..3).filter(|worker| *worker as usize != dead) {
        let mut config = config(folder, worker, Some(transport));
        config.silence = silence;
        meshes.push(Mesh::open(config).unwrap());
        peers.push(peer(meshes.last().unwrap(), worker, 0..0));
    }
    let (mut member, there) = start(folder, u32::try_from(dead).unwrap(), transport, fault);
    peers.insert(dead, there);
    peers.iter_mut().zip(assign(LANES, 3)).for_each(|(peer, span)| peer.span = span);
    let mut stdin = member.0.stdin.take().unwrap();
    for peer in &peers {
        writeln!(stdin, "{}", write_peer(peer)).unwrap();
    }
    (member, meshes, peers)
}

#[test]
fn a_killed_process_is_reported_lost_and_the_others_continue() {
    for transport in TRANSPORTS {
        for (number, phase) in ReducePhase::ALL.into_iter().enumerate() {
            let folder = tempfile::tempdir().unwrap();
            let dead = number % 3;
            let fault = (phase, Signal::KILL);
            let (_member, meshes, peers) =
                world(&folder, dead, transport, crate::harness::DEADLINE, fault);
            run(meshes, move |place, mesh| {
                let me = if place < dead { place } else { place + 1 };
                survive(mesh, me, &peers, dead);
            });
        }
    }
}

#[test]
fn a_frozen_process_times_out_and_no_other_member_is_blamed() {
    for transport in TRANSPORTS {
        let folder = tempfile::tempdir().unwrap();
        let silence = Duration::from_secs(2);
        let fault = (ReducePhase::BeforeSend, Signal::STOP);
        let (_member, meshes, peers) = world(&folder, 1, transport, silence, fault);
        let (_, blamed) = run(meshes, move |place, mesh| {
            let me = place * 2;
            mesh.enter(WorldId(1), me, peers.clone()).unwrap();
            step(mesh, 4, &peers[me].span, LANES, 400_000, Dtype::F32).unwrap();
            let ended = step(mesh, 5, &peers[me].span, LANES, 400_000, Dtype::F32);
            let left = crate::failures::survivors(&peers, 1);
            enter_and_check(mesh, 2, place, &left, 1000);
            ended
        });
        let is_named = |ended: &Result<_, Error>| matches!(ended, Err(Error::Lost { peer: WorkerId(1), error }) if error.contains("silent"));
        assert!(blamed.iter().any(is_named));
        assert!(blamed.iter().all(|ended| is_named(ended) || matches!(ended, Err(Error::Aborted))));
    }
}

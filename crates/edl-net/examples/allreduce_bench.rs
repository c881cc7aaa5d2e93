// SPDX-License-Identifier: Apache-2.0
//! How fast members add up a vector, against PyTorch's gloo and against bare loopback sockets.
//!
//! `cargo run --release -p edl-net --example allreduce_bench`: processes of this program are the
//! members. All contenders live at once and take turns, so that each sees the same machine; a
//! figure is the median of their rounds. `ELASTICDL_TEST_PYTHON` names a Python with torch.

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark prints, and fails loudly"
)]

use std::io::{BufRead, BufReader, ErrorKind, Lines, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use edl_core::id::{Incarnation, RunId, WorkerId, WorldId};
use edl_core::lanes::assign;
use edl_net::handshake::Encryption;
use edl_net::key::JobKey;
use edl_net::mesh::{Dtype, Mesh, MeshConfig, Peer, Transport};
use rustix::event::{PollFd, PollFlags, poll};

const SIZES_MB: [usize; 3] = [1, 10, 100];
/// How often all contenders take their turn.
const TURNS: usize = 5;
const CONTENDERS: [&str; 6] = ["shm", "unix", "tcp", "encrypted", "raw", "gloo"];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("raw") => probe(args[1].parse().unwrap(), args[2].parse().unwrap()),
        // For instance `only 2 100 tcp,raw`.
        Some("only") => {
            let names: Vec<&str> = args[3].split(',').collect();
            compare(&[args[1].parse().unwrap()], &[args[2].parse().unwrap()], &names);
        }
        Some(name) if args.len() > 3 => {
            let over = match name {
                "encrypted" => (Transport::Tcp, Encryption::Always),
                name => (Transport::parse(name).unwrap(), Encryption::Never),
            };
            member(over, args[1].parse().unwrap(), args[2].parse().unwrap(), &args[3]);
        }
        _ => compare(&[2, 4], &SIZES_MB, &CONTENDERS),
    }
}

/// In seconds.
#[derive(Clone, Copy)]
struct Cost {
    time: f64,
    cpu: f64,
}

/// Processes that answer a line each to a line to all.
struct Team {
    children: Vec<Child>,
    stdins: Vec<ChildStdin>,
    stdouts: Vec<Lines<BufReader<ChildStdout>>>,
}

impl Team {
    fn start(commands: Vec<Command>) -> Self {
        let mut children: Vec<Child> = commands
            .into_iter()
            .map(|mut command| {
                command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
            })
            .collect();
        let stdins = children.iter_mut().map(|child| child.stdin.take().unwrap()).collect();
        let stdouts = children.iter_mut().map(|child| child.stdout.take().unwrap());
        let stdouts = stdouts.map(|stdout| BufReader::new(stdout).lines()).collect();
        Self { children, stdins, stdouts }
    }

    fn say(&mut self, line: &str) {
        self.stdins.iter_mut().for_each(|stdin| writeln!(stdin, "{line}").unwrap());
    }

    fn hear(&mut self) -> Vec<String> {
        self.stdouts.iter_mut().map(|lines| lines.next().unwrap().unwrap()).collect()
    }

    /// What a sum costs: the time of the slowest member, and the work of all.
    fn time(&mut self, n_bytes: usize, n_rounds: usize) -> Cost {
        self.say(&format!("{n_bytes} {n_rounds}"));
        let mut cost = Cost { time: 0.0, cpu: 0.0 };
        for line in self.hear() {
            let (time, cpu) = line.split_once(' ').unwrap();
            cost.time = cost.time.max(time.parse().unwrap());
            cost.cpu += cpu.parse::<f64>().unwrap();
        }
        cost
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.stdins.clear();
        self.children.iter_mut().for_each(|child| drop(child.wait()));
    }
}

fn compare(members: &[usize], sizes_mb: &[usize], names: &[&str]) {
    for &n_members in members {
        let folder = tempfile::tempdir().unwrap();
        let mut teams: Vec<(&str, Team)> = names
            .iter()
            .filter_map(|&name| Some((name, start(name, n_members, folder.path().to_str()?)?)))
            .collect();
        for n_bytes in sizes_mb.iter().map(|size| size << 20) {
            let n_rounds = (40 << 20) / n_bytes + 4;
            let mut times: Vec<Vec<Cost>> = vec![Vec::new(); teams.len()];
            for _ in 0..TURNS {
                for ((_, team), times) in teams.iter_mut().zip(&mut times) {
                    times.push(team.time(n_bytes, n_rounds));
                }
            }
            let names = teams.iter().map(|(name, _)| *name);
            let medians: Vec<(&str, Cost)> = names.zip(times.into_iter().map(middle)).collect();
            print(n_members, n_bytes, &medians);
        }
    }
}

fn print(n_members: usize, n_bytes: usize, medians: &[(&str, Cost)]) {
    println!("{n_members} processes, {} MB", n_bytes >> 20);
    for (name, cost) in medians {
        let against = |other: &str| {
            let other = medians.iter().find(|(known, _)| *known == other);
            other.map_or((0.0, 0.0), |(_, other)| (other.time / cost.time, other.cpu / cost.cpu))
        };
        let ((raw, raw_cpu), (gloo, gloo_cpu)) = (against("raw"), against("gloo"));
        println!(
            "  {name:9} {:9.3} ms  {raw:5.2}x raw {gloo:5.2}x gloo    processors {:9.3} ms \
             {raw_cpu:5.2}x raw {gloo_cpu:5.2}x gloo",
            cost.time * 1e3,
            cost.cpu * 1e3
        );
    }
    let of = |name: &str| medians.iter().find(|(known, _)| *known == name).map(|(_, cost)| cost);
    if let (Some(plain), Some(encrypted)) = (of("tcp"), of("encrypted")) {
        let (time, cpu) = (encrypted.time / plain.time, encrypted.cpu / plain.cpu);
        println!("  encryption takes {time:.2}x the time and {cpu:.2}x the processors of tcp");
    }
}

fn middle(costs: Vec<Cost>) -> Cost {
    Cost {
        time: median(costs.iter().map(|cost| cost.time).collect()),
        cpu: median(costs.iter().map(|cost| cost.cpu).collect()),
    }
}

/// Processor time of this process so far, in seconds.
fn cpu() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap().as_secs_f64()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn start(name: &str, n_members: usize, folder: &str) -> Option<Team> {
    let own = |extra: &dyn Fn(usize) -> Vec<String>| {
        (0..n_members)
            .map(|member| {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.arg(name).args(extra(member));
                command
            })
            .collect()
    };
    let numbers = |member: usize| vec![member.to_string(), n_members.to_string()];
    if name == "gloo" {
        return start_gloo(n_members);
    }
    let folder = format!("{folder}/{name}");
    std::fs::create_dir(&folder).unwrap();
    let mut team = if name == "raw" {
        Team::start(own(&numbers))
    } else {
        Team::start(own(&|member| [numbers(member), vec![folder.clone()]].concat()))
    };
    // Every process announces its address and learns all others.
    let places = team.hear().join(" ");
    team.say(&places);
    team.hear();
    Some(team)
}

fn start_gloo(n_members: usize) -> Option<Team> {
    let python = std::env::var("ELASTICDL_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/python/gloo_bench.py");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let commands = (0..n_members).map(|member| {
        let mut command = Command::new(&python);
        command.arg(script);
        command.args([member.to_string(), n_members.to_string(), port.to_string()]);
        command
    });
    let mut team = Team::start(commands.collect());
    let answers = team.hear();
    if answers.iter().all(|answer| answer == "ready") {
        return Some(team);
    }
    println!("gloo is left out: {}", answers[0]);
    None
}

fn lines() -> impl Iterator<Item = String> {
    std::io::stdin().lines().map(Result::unwrap)
}

fn numbers(line: &str) -> (usize, usize) {
    let (n_bytes, n_rounds) = line.split_once(' ').unwrap();
    (n_bytes.parse().unwrap(), n_rounds.parse().unwrap())
}

/// One member of a world.
fn member(
    (transport, encryption): (Transport, Encryption),
    me: usize,
    n_members: usize,
    folder: &str,
) {
    let worker = |member: usize| WorkerId(u32::try_from(member).unwrap());
    let mut mesh = Mesh::open(MeshConfig {
        key: JobKey::from_bytes([1; 32]),
        run: RunId([2; 16]),
        worker: worker(me),
        incarnation: Incarnation(1),
        folder: folder.into(),
        listen: "127.0.0.1:0".into(),
        transport: Some(transport),
        encryption,
        silence: Duration::from_secs(60),
        on_phase: None,
    })
    .unwrap();
    println!("{}", mesh.address());
    let mut lines = lines();
    let n_lanes = u32::try_from(n_members).unwrap();
    let places = lines.next().unwrap();
    let peers = places.split(' ').zip(assign(n_lanes, n_lanes)).enumerate();
    let peers = peers.map(|(member, (address, span))| Peer {
        worker: worker(member),
        incarnation: Incarnation(1),
        address: address.into(),
        unix_path: format!("{folder}/mesh-{member}.sock"),
        span,
        is_busy: false,
    });
    mesh.enter(WorldId(1), me, peers.collect()).unwrap();
    println!("ready");
    let mut step = 0;
    for line in lines {
        let (n_bytes, n_rounds) = numbers(&line);
        let mut out = vec![0.0; n_bytes / 4];
        let (mut times, mut work) = (Vec::new(), Vec::new());
        for _ in 0..n_rounds + 2 {
            step += 1;
            mesh.buffers(n_lanes, out.len())[0].fill(1.0);
            mesh.exchange(step, &[]).unwrap();
            let (start, start_cpu) = (Instant::now(), cpu());
            mesh.all_reduce(step, n_lanes, 1.0, Dtype::F32, &mut out).unwrap();
            times.push(start.elapsed().as_secs_f64());
            work.push(cpu() - start_cpu);
            assert!(out.iter().all(|sum| (f64::from(*sum) - f64::from(n_lanes)).abs() < 0.5));
        }
        println!("{} {}", median(times.split_off(2)), median(work.split_off(2)));
    }
}

/// Moves the bytes of a sum over bare sockets, both ways at once, and does nothing with them.
fn probe(me: usize, n_members: usize) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap());
    let mut lines = lines();
    let places = lines.next().unwrap();
    let mut streams: Vec<TcpStream> =
        places.split(' ').skip(me + 1).map(|place| TcpStream::connect(place).unwrap()).collect();
    streams.extend((0..me).map(|_| listener.accept().unwrap().0));
    for stream in &streams {
        stream.set_nodelay(true).unwrap();
        stream.set_nonblocking(true).unwrap();
    }
    println!("ready");
    for line in lines {
        let (n_bytes, n_rounds) = numbers(&line);
        // To and from each peer: our nodes of its chunk, and the sum of ours.
        let n_each = 2 * n_bytes / n_members;
        let data = vec![1_u8; n_bytes];
        let mut scratch = vec![0_u8; 256 << 10];
        let (mut times, mut work) = (Vec::new(), Vec::new());
        for _ in 0..n_rounds + 2 {
            trade(&mut streams, 1, &data, &mut scratch);
            let (start, start_cpu) = (Instant::now(), cpu());
            trade(&mut streams, n_each, &data, &mut scratch);
            times.push(start.elapsed().as_secs_f64());
            work.push(cpu() - start_cpu);
        }
        println!("{} {}", median(times.split_off(2)), median(work.split_off(2)));
    }
}

fn trade(streams: &mut [TcpStream], n_each: usize, data: &[u8], scratch: &mut [u8]) {
    let mut left = vec![(n_each, n_each); streams.len()];
    while left.iter().any(|(to_send, to_read)| to_send + to_read > 0) {
        for (stream, (to_send, to_read)) in streams.iter_mut().zip(&mut left) {
            let at = (n_each - *to_send) % data.len();
            let n = (*to_send).min(data.len() - at).min(256 << 10);
            *to_send -= if n > 0 { moved(stream.write(&data[at..at + n])) } else { 0 };
            let n = (*to_read).min(scratch.len());
            *to_read -= if n > 0 { moved(stream.read(&mut scratch[..n])) } else { 0 };
        }
        let mut fds = Vec::new();
        for (stream, (to_send, to_read)) in streams.iter().zip(&left) {
            let mut events = PollFlags::empty();
            events.set(PollFlags::OUT, *to_send > 0);
            events.set(PollFlags::IN, *to_read > 0);
            if !events.is_empty() {
                fds.push(PollFd::new(stream, events));
            }
        }
        if !fds.is_empty() {
            poll(&mut fds, None).unwrap();
        }
    }
}

fn moved(result: std::io::Result<usize>) -> usize {
    match result {
        Ok(n) => n,
        Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
        Err(error) => panic!("{error}"),
    }
}

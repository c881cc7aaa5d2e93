// SPDX-License-Identifier: Apache-2.0
//! Connections and frames that are refused.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use edl_core::id::RunId;
use edl_core::server::Refusal;
use edl_core::spec::Mode;
use edl_net::data::{Error, Limits, PsClient};
use edl_net::frame::{FrameKind, HEADER_LEN, Header, encode_refusal};
use edl_net::handshake::{Challenge, Encryption};
use edl_net::key::JobKey;

use crate::harness::{
    By, Client, DEADLINE, N_PARTITIONS, RUN, ServerPair, batch, key, layout, model,
};
use crate::relay::{self, Forwarded, Hook, forward};

const UNTOUCHED: [u64; N_PARTITIONS as usize] = [0; N_PARTITIONS as usize];

fn connect(job: &ServerPair, by: By, key: &JobKey, run: RunId) -> Result<PsClient, Error> {
    PsClient::connect(
        &job.route(1, by),
        (key, run, Encryption::default()),
        layout(),
        &model(),
        Limits::all(DEADLINE),
    )
}

/// A client whose frames to the first server go through `hook`.
fn relayed(job: &ServerPair, by: By, hook: Hook) -> Client {
    let mut route = job.route(1, by);
    let server = &mut route.servers[0];
    match by {
        By::Tcp | By::EncryptedTcp => server.address = relay::tcp(&server.address, hook),
        By::Unix => {
            let path = job.folder.path().join("relay.sock");
            relay::unix(&path, server.unix_path.as_ref(), hook);
            server.unix_path = path.to_str().unwrap().into();
        }
    }
    Client::connect(&route).unwrap()
}

fn on_push(change: impl Fn(Vec<u8>) -> Forwarded + Send + Sync + 'static) -> Hook {
    Arc::new(
        move |header, frame| {
            if header.kind == FrameKind::Push { change(frame) } else { forward(frame) }
        },
    )
}

#[test]
fn a_different_key_is_refused() {
    for by in [By::Unix, By::Tcp] {
        let job = ServerPair::start(Mode::Async);
        let refused = connect(&job, by, &JobKey::from_bytes([4; 32]), RUN).map(|_| ());
        let text = refused.unwrap_err().to_string();
        assert_eq!(text, "refused: the server does not have this job's key");
    }
}

#[test]
fn a_different_run_of_the_same_job_is_refused() {
    for by in [By::Unix, By::Tcp] {
        let job = ServerPair::start(Mode::Async);
        let refused = connect(&job, by, &key(), RunId([8; 16])).map(|_| ());
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("run is 0707"), "{text}");
    }
}

/// Sends raw bytes to a server; returns its answer until it closes the connection.
fn talk(job: &ServerPair, by: By, bytes: &[u8]) -> Vec<u8> {
    let mut answer = Vec::new();
    match by {
        By::Tcp | By::EncryptedTcp => {
            let mut stream = TcpStream::connect(&job.servers[0].address).unwrap();
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            stream.write_all(bytes).unwrap();
            let _ = stream.read_to_end(&mut answer);
        }
        By::Unix => {
            let mut stream = UnixStream::connect(&job.servers[0].unix_path).unwrap();
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            let _ = stream.write_all(bytes);
            let _ = stream.read_to_end(&mut answer);
        }
    }
    answer
}

fn header(kind: FrameKind, length: u64) -> Header {
    Header {
        kind,
        run: RUN,
        generation: edl_core::id::Generation(1),
        sequence: 0,
        batch: batch(0),
        length,
        tag: [0; 16],
    }
}

#[test]
fn a_peer_without_the_key_gets_no_parameters() {
    let job = ServerPair::start(Mode::Async);
    for by in [By::Unix, By::Tcp] {
        // A pull without a handshake.
        let mut bytes = header(FrameKind::Pull, 32).encode().to_vec();
        bytes.extend([0; 32]);
        let answer = talk(&job, by, &bytes);
        let heard = Header::decode(answer.first_chunk::<HEADER_LEN>().unwrap()).unwrap();
        assert_eq!(heard.kind, FrameKind::Refused);
        assert_eq!(answer.len() as u64, HEADER_LEN as u64 + heard.length);
        // A handshake with a made-up proof.
        let mut bytes = header(FrameKind::Hello, 56).encode().to_vec();
        bytes.push(1);
        bytes.extend([0; 55]);
        bytes.extend(header(FrameKind::Proof, 32).encode());
        bytes.extend([5; 32]);
        let answer = talk(&job, by, &bytes);
        let refusal = &answer[HEADER_LEN + Challenge::LEN..];
        let heard = Header::decode(refusal.first_chunk::<HEADER_LEN>().unwrap()).unwrap();
        assert_eq!(heard.kind, FrameKind::Refused);
        let text = String::from_utf8_lossy(&refusal[HEADER_LEN..]).into_owned();
        assert!(text.ends_with("the client does not have this job's key"), "{text}");
    }
}

#[test]
fn a_different_protocol_version_is_rejected_in_one_line() {
    let job = ServerPair::start(Mode::Async);
    let mut bytes = header(FrameKind::Hello, 56).encode().to_vec();
    bytes[4] = 9;
    bytes.extend([0; 56]);
    let answer = talk(&job, By::Tcp, &bytes);
    let text = String::from_utf8_lossy(&answer).into_owned();
    assert!(text.contains("the peer uses version 9 of the data protocol"), "{text}");
}

#[test]
fn a_frame_with_one_altered_byte_is_refused_and_ends_the_connection() {
    for by in [By::Unix, By::Tcp] {
        for from_end in [1, 100, 1000] {
            let job = ServerPair::start(Mode::Async);
            let mut client = relayed(
                &job,
                by,
                on_push(move |mut frame| {
                    let place = frame.len() - from_end;
                    frame[place] ^= 1;
                    forward(frame)
                }),
            );
            client.push(batch(0), 1.0).unwrap();
            assert!(matches!(client.ack(), Err(Error::Closed)));
            let states = job.servers[0].states();
            assert!(states.iter().all(|state| state.updates == 0), "{by:?} {from_end}");
        }
    }
}

#[test]
fn a_replayed_frame_is_refused_and_ends_the_connection() {
    for by in [By::Unix, By::Tcp] {
        let job = ServerPair::start(Mode::Async);
        let mut client = relayed(&job, by, on_push(|frame| forward(frame.repeat(2))));
        client.push(batch(0), 1.0).unwrap();
        client.push(batch(1), 1.0).unwrap_or_default();
        // The first one is genuine and is acknowledged, unless the connection is closed first.
        let end = std::iter::from_fn(|| Some(client.ack())).find(Result::is_err).unwrap();
        assert!(matches!(end, Err(Error::Closed)));
        let states = job.servers[0].states();
        assert!(states.iter().all(|state| state.updates == 1));
    }
}

#[test]
fn reordered_frames_are_refused() {
    let job = ServerPair::start(Mode::Async);
    let held: Mutex<Option<Vec<u8>>> = Mutex::new(None);
    let mut client = relayed(
        &job,
        By::Tcp,
        on_push(move |frame| {
            let mut held = held.lock().unwrap();
            match held.take() {
                None => {
                    *held = Some(frame);
                    forward(Vec::new())
                }
                Some(first) => forward([frame, first].concat()),
            }
        }),
    );
    client.push(batch(0), 1.0).unwrap();
    client.push(batch(1), 1.0).unwrap();
    assert!(matches!(client.ack(), Err(Error::Closed)));
    let states = job.servers[0].states();
    assert!(states.iter().all(|state| state.updates == 0));
}

#[test]
fn a_recorded_session_cannot_be_replayed() {
    for by in [By::Unix, By::Tcp] {
        let job = ServerPair::start(Mode::Async);
        let recorded = Arc::new(Mutex::new(Vec::<(FrameKind, Vec<u8>)>::new()));
        let record = Arc::clone(&recorded);
        let mut client = relayed(
            &job,
            by,
            Arc::new(move |header, frame| {
                record.lock().unwrap().push((header.kind, frame.clone()));
                forward(frame)
            }),
        );
        client.push(batch(0), 1.0).unwrap();
        client.ack().unwrap();
        drop(client);
        job.load(2, Mode::Async);
        job.load(3, Mode::Async);
        // The push connection was opened last: its hello, its proof and the push.
        let recorded = recorded.lock().unwrap();
        let kinds: Vec<FrameKind> = recorded.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(
            kinds,
            [
                FrameKind::Hello,
                FrameKind::Proof,
                FrameKind::Hello,
                FrameKind::Proof,
                FrameKind::Push
            ]
        );
        let bytes: Vec<u8> = recorded[2..].iter().flat_map(|(_, frame)| frame.clone()).collect();
        let answer = talk(&job, by, &bytes);
        let refusal = &answer[HEADER_LEN + Challenge::LEN..];
        let text = String::from_utf8_lossy(refusal).into_owned();
        assert!(text.ends_with("the client does not have this job's key"), "{text}");
        assert_eq!(job.updates(), UNTOUCHED);
    }
}

#[test]
fn an_interrupted_push_applies_nothing() {
    for by in [By::Unix, By::Tcp] {
        for keep in [HEADER_LEN / 2, HEADER_LEN, HEADER_LEN + 41, 2000] {
            let job = ServerPair::start(Mode::Async);
            let mut client = relayed(
                &job,
                by,
                on_push(move |mut frame| {
                    frame.truncate(keep);
                    Forwarded { bytes: frame, then_close: true }
                }),
            );
            client.push(batch(0), 1.0).unwrap();
            assert!(matches!(client.ack(), Err(Error::Closed)));
            let states = job.servers[0].states();
            assert!(states.iter().all(|state| state.updates == 0 && state.n_rows == 0));
            // Another worker computes the batch; the second server has already applied it.
            let mut other = job.client(1, by);
            other.push(batch(0), 1.0).unwrap();
            other.ack().unwrap();
            other.expect(1.0);
        }
    }
}

#[test]
fn a_server_that_does_not_know_its_run_yet_refuses_clients() {
    let folder = tempfile::tempdir().unwrap();
    let (reports, _) = tokio::sync::mpsc::unbounded_channel();
    let store = edl_ps::store::Store::new(1, folder.path().into(), reports).unwrap();
    let store = Arc::new(store);
    let front = Arc::new(edl_ps::Front::new(store, key()));
    let path = folder.path().join("ps.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let shared = Arc::clone(&front);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = shared.admit(edl_net::wire::Stream::unix(stream.unwrap()).unwrap());
        }
    });
    let job = ServerPair::start(Mode::Async);
    let mut route = job.route(1, By::Unix);
    route.servers[0].unix_path = path.to_str().unwrap().into();
    let limit = Duration::from_secs(20);
    let refused = PsClient::connect(
        &route,
        (&key(), RUN, Encryption::default()),
        layout(),
        &model(),
        Limits::all(limit),
    )
    .map(|_| ());
    assert!(matches!(refused, Err(Error::NotServing)), "{refused:?}");
}

#[test]
fn many_unauthenticated_connections_do_not_keep_clients_out() {
    edl_net::open_files::raise_limit();
    let job = ServerPair::start(Mode::Async);
    let address = &job.servers[0].address;
    let mut strangers: Vec<TcpStream> =
        (0..1100).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut client = job.client(1, By::Tcp);
    client.push(batch(0), 1.0).unwrap();
    client.ack().unwrap();
    // There were more connections than the limit: the oldest was closed, and the newest was not.
    let mut byte = [0; 1];
    strangers[0].set_read_timeout(Some(DEADLINE)).unwrap();
    assert!(matches!(strangers[0].read(&mut byte), Ok(0)));
    strangers[1099].set_nonblocking(true).unwrap();
    let last = strangers[1099].read(&mut byte);
    assert!(matches!(&last, Err(e) if e.kind() == ErrorKind::WouldBlock), "{last:?}");
}

/// Collects the log of all tests of this process.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn unauthenticated_peers_log_no_text_and_few_lines() {
    let log = Log::default();
    let writer = log.clone();
    let format = tracing_subscriber::fmt().with_ansi(false);
    let subscriber = format.with_writer(move || writer.clone()).finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let job = ServerPair::start(Mode::Async);
    let refusal = Refusal::Other("text\n[ERROR] of an outsider ".repeat(100));
    let text = encode_refusal(&refusal, 0);
    let mut forged = header(FrameKind::Refused, text.len() as u64).encode().to_vec();
    forged.extend(text);
    let other_run = Header { run: RunId([b'z'; 16]), ..header(FrameKind::Hello, 56) };
    let frames = [forged, other_run.encode().to_vec(), b"GET / HTTP/1.1\r\n".repeat(9)];
    let mut peers = Vec::new();
    for bytes in frames.iter().cycle().take(300) {
        let mut stream = TcpStream::connect(&job.servers[0].address).unwrap();
        peers.push(format!("peer=\"{}\"", stream.local_addr().unwrap()));
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        // The server may close the connection before everything is sent.
        let _ = stream.write_all(bytes);
        let _ = stream.read_to_end(&mut Vec::new());
    }
    // A refusal is logged after its connection is closed.
    let give_up = Instant::now() + DEADLINE;
    let lines = loop {
        let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let of_strangers = |line: &&str| peers.iter().any(|peer| line.contains(peer));
        let lines: Vec<String> = log.lines().filter(of_strangers).map(ToOwned::to_owned).collect();
        if !lines.is_empty() || Instant::now() > give_up {
            assert!(!log.contains("outsider") && !log.contains("7a7a"), "{log}");
            break lines;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!((1..=10).contains(&lines.len()), "{lines:?}");
    assert!(lines.iter().all(|line| line.contains("refused a connection")), "{lines:?}");
}

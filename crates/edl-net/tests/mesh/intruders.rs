// SPDX-License-Identifier: Apache-2.0
//! Peers without the key, from another run, or that send invalid bytes are refused.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use edl_core::id::{BatchId, Generation, RunId, WorldId};
use edl_core::lanes::assign;
use edl_net::frame::{FrameKind, Header, TAG_LEN};
use edl_net::handshake::Encryption;
use edl_net::key::JobKey;
use edl_net::mesh::{Error, Mesh, Transport};

use crate::harness::{DEADLINE, RUN, TRANSPORTS, config, enter_and_check, open, peer, run};

#[test]
fn a_different_key_or_run_is_refused_by_name() {
    for transport in TRANSPORTS {
        for (of_key, text) in [(true, "key"), (false, "run")] {
            let folder = tempfile::tempdir().unwrap();
            let mut ours = Mesh::open(config(&folder, 0, Some(transport))).unwrap();
            let mut config = config(&folder, 1, Some(transport));
            if of_key {
                config.key = JobKey::from_bytes([9; 32]);
            } else {
                config.run = RunId([9; 16]);
            }
            let theirs = Mesh::open(config).unwrap();
            let peers = vec![peer(&ours, 0, 0..1), peer(&theirs, 1, 1..2)];
            match ours.enter(WorldId(1), 0, peers) {
                Err(Error::Lost { error, .. }) => assert!(error.contains(text), "{error}"),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Sends `bytes` to a mesh and reads until the mesh closes the connection.
fn intrude(stream: &mut (impl Read + Write), bytes: &[u8]) {
    // The mesh may close the connection before everything is sent.
    let _ = stream.write_all(bytes);
    let _ = stream.read_to_end(&mut Vec::new());
}

#[test]
fn invalid_bytes_are_dropped_and_the_mesh_keeps_working() {
    let header = |kind, length| {
        let (run, tag) = (RUN, [0; TAG_LEN]);
        let batch = BatchId::default();
        Header { kind, run, generation: Generation(0), sequence: 0, batch, length, tag }.encode()
    };
    let mut hello = header(FrameKind::Hello, 56).to_vec();
    hello.extend([3; 56]);
    hello.extend(header(FrameKind::Proof, 32));
    hello.extend([0; 32]);
    let nonsense = [
        b"GET / HTTP/1.1\r\n\r\n".repeat(10),
        header(FrameKind::Hello, u64::MAX).to_vec(),
        header(FrameKind::Part, 100).to_vec(),
        header(FrameKind::Region, 24).to_vec(),
        hello,
    ];
    for transport in TRANSPORTS {
        let folder = tempfile::tempdir().unwrap();
        let (mut meshes, peers) = open(&folder, transport, &assign(4, 2), &mut |_| None);
        for bytes in &nonsense {
            for mesh in &meshes {
                intrude(&mut UnixStream::connect(mesh.unix_path()).unwrap(), bytes);
                intrude(&mut TcpStream::connect(mesh.address()).unwrap(), bytes);
            }
        }
        // Silent connections stay open while the members connect.
        let silent: Vec<TcpStream> =
            (0..20).map(|_| TcpStream::connect(meshes[1].address()).unwrap()).collect();
        meshes = run(meshes, move |me, mesh| enter_and_check(mesh, 1, me, &peers, 5000)).0;
        drop((silent, meshes));
    }
}

#[test]
fn many_unauthenticated_connections_do_not_keep_members_out() {
    edl_net::open_files::raise_limit();
    let folder = tempfile::tempdir().unwrap();
    let over = (Transport::Tcp, Encryption::default());
    let (meshes, peers) = open(&folder, over, &assign(4, 2), &mut |_| None);
    let mut strangers: Vec<TcpStream> =
        (0..1100).map(|_| TcpStream::connect(meshes[1].address()).unwrap()).collect();
    let meshes = run(meshes, move |me, mesh| enter_and_check(mesh, 1, me, &peers, 5000)).0;
    // There were more connections than the limit: the oldest was closed, and the newest was not.
    let mut byte = [0; 1];
    strangers[0].set_read_timeout(Some(DEADLINE)).unwrap();
    assert!(matches!(strangers[0].read(&mut byte), Ok(0)));
    strangers[1099].set_nonblocking(true).unwrap();
    let last = strangers[1099].read(&mut byte);
    assert!(matches!(&last, Err(e) if e.kind() == ErrorKind::WouldBlock), "{last:?}");
    drop(meshes);
}

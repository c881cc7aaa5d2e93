// SPDX-License-Identifier: Apache-2.0
//! What an eavesdropper between two members can see.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use edl_core::id::WorldId;
use edl_core::lanes::assign;
use edl_net::handshake::Encryption;
use edl_net::mesh::{Dtype, Error, Mesh, Transport};

use crate::harness::{config, expected, lane, open, peer, run, step};

const LEN: usize = 200_000;
const STEP: u64 = 3;

type Seen = Arc<Mutex<Vec<u8>>>;

/// Relays to `target` and records every byte of both directions; returns the relay's address.
fn eavesdrop(target: &str) -> (String, Seen) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (target, seen) = (target.to_owned(), Seen::default());
    let all = Arc::clone(&seen);
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(&target).unwrap());
            let clones = (client.try_clone().unwrap(), server.try_clone().unwrap());
            for (from, to) in [(client, clones.1), (server, clones.0)] {
                let all = Arc::clone(&all);
                std::thread::spawn(move || copy(from, to, &all));
            }
        }
    });
    (address, seen)
}

fn copy(mut from: TcpStream, mut to: TcpStream, all: &Mutex<Vec<u8>>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(n) = from.read(&mut buffer)
        && n > 0
    {
        all.lock().unwrap().extend_from_slice(&buffer[..n]);
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

#[test]
fn an_eavesdropper_cannot_read_gradients_sums_or_messages() {
    for (encryption, is_readable) in [(Encryption::Always, false), (Encryption::Never, true)] {
        let folder = tempfile::tempdir().unwrap();
        let over = (Transport::Tcp, encryption);
        let (meshes, mut peers) = open(&folder, over, &assign(2, 2), &mut |_| None);
        // The first member connects to the second.
        let (address, seen) = eavesdrop(&peers[1].address);
        peers[1].address = address;
        let (_, sums) = run(meshes, move |me, mesh| {
            mesh.enter(WorldId(1), me, peers.clone()).unwrap();
            mesh.exchange(1, b"a message between members").unwrap();
            step(mesh, STEP, &peers[me].span, 2, LEN, Dtype::F32).unwrap()
        });
        let sum = expected(STEP, 2, LEN, Dtype::F32);
        assert!(sums.iter().all(|found| *found == sum));
        let seen = seen.lock().unwrap();
        let is_seen = |bytes: &[u8]| seen.windows(bytes.len()).any(|part| part == bytes);
        let floats = |floats: &[f32]| floats.iter().flat_map(|float| float.to_le_bytes()).collect();
        let sums: Vec<f32> = sum.iter().map(|bits| f32::from_bits(*bits)).collect();
        // The first member adds up the first half of the vector.
        let gradient: Vec<u8> = floats(&lane(STEP, 1, LEN)[1000..1008]);
        let sum: Vec<u8> = floats(&sums[1000..1008]);
        assert_eq!(is_seen(&gradient), is_readable);
        assert_eq!(is_seen(&sum), is_readable);
        assert_eq!(is_seen(b"a message between members"), is_readable);
    }
}

#[test]
fn members_that_disagree_on_encryption_report_it() {
    for (first, second) in
        [(Encryption::Always, Encryption::Never), (Encryption::Never, Encryption::Always)]
    {
        let folder = tempfile::tempdir().unwrap();
        let open = |worker, encryption| {
            Mesh::open(config(&folder, worker, Some((Transport::Tcp, encryption))))
        };
        let (mut ours, theirs) = (open(0, first).unwrap(), open(1, second).unwrap());
        let peers = vec![peer(&ours, 0, 0..1), peer(&theirs, 1, 1..2)];
        match ours.enter(WorldId(1), 0, peers) {
            Err(Error::Lost { error, .. }) => {
                assert!(error.contains("requires encrypted data connections"), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A deliberately isolated process: no data passes, and everything continues afterwards.
//!
//! The switch applies to the whole process, so this test runs alone in its process.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::io::{ErrorKind, Read as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use edl_core::id::{BatchId, Generation, Incarnation, RunId, WorkerId, WorldId};
use edl_net::frame::FrameKind;
use edl_net::handshake::Encryption;
use edl_net::isolation;
use edl_net::key::JobKey;
use edl_net::mesh::{Error as MeshError, Mesh, MeshConfig, Peer, Transport};
use edl_net::wire::{Error, Receiver, Sender, Stream};

const LONG: Duration = Duration::from_secs(600);
const SHORT: Duration = Duration::from_millis(300);
const RUN: RunId = RunId([7; 16]);

fn send(sender: &mut Sender) -> Result<(), Error> {
    sender.send(FrameKind::Accepted, Generation(0), BatchId::default(), &[])
}

/// Waits one tick for a frame.
fn receive(receiver: &mut Receiver) -> Result<(), Error> {
    receiver.header(&mut || Err(Error::NotServing))?;
    receiver.finish()
}

#[test]
fn an_isolated_process_exchanges_no_data_until_the_isolation_ends() {
    frames_are_held();
    members_lose_each_other();
}

fn frames_are_held() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let near = TcpStream::connect(address).unwrap();
    // The other process, which is not isolated.
    let (mut far, _) = listener.accept().unwrap();
    far.set_nonblocking(true).unwrap();
    let near = Arc::new(Stream::tcp(near).unwrap());
    let mut sender = Sender::new(Arc::clone(&near), RUN, SHORT);
    let mut receiver = Receiver::new(Arc::clone(&near), RUN, SHORT);

    isolation::isolate(LONG);
    assert!(matches!(send(&mut sender), Err(Error::Deadline { .. })));
    let nothing = far.read(&mut [0; 1]).unwrap_err();
    assert_eq!(nothing.kind(), ErrorKind::WouldBlock);
    let echo = Arc::new(Stream::tcp(far.try_clone().unwrap()).unwrap());
    isolation::isolate(Duration::ZERO);
    send(&mut Sender::new(Arc::clone(&echo), RUN, SHORT)).unwrap();
    isolation::isolate(LONG);
    assert!(matches!(receive(&mut receiver), Err(Error::NotServing)));
    drop((far, echo));
    assert!(!near.is_closed(), "it cannot see that the other end closed the connection");
    let refused = Stream::connect_tcp(&address.to_string(), SHORT);
    assert!(matches!(refused, Err(Error::Io { .. })), "no connection can be opened");

    isolation::isolate(Duration::ZERO);
    receive(&mut receiver).unwrap();
    Stream::connect_tcp(&address.to_string(), SHORT).unwrap();
}

fn members_lose_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let key = JobKey::from_bytes([7; 32]);
    let open = |worker: u32| {
        Mesh::open(MeshConfig {
            key: key.clone(),
            run: RUN,
            worker: WorkerId(worker),
            incarnation: Incarnation(1),
            folder: folder.path().into(),
            listen: "127.0.0.1:0".into(),
            transport: Some(Transport::Unix),
            encryption: Encryption::default(),
            silence: SHORT,
            on_phase: None,
        })
        .unwrap()
    };
    let mut meshes = [open(0), open(1)];
    let peer = |(worker, mesh): (u32, &Mesh)| Peer {
        worker: WorkerId(worker),
        incarnation: Incarnation(1),
        address: mesh.address().into(),
        unix_path: mesh.unix_path().to_str().unwrap().into(),
        span: worker..worker + 1,
        is_busy: false,
    };
    let peers: Vec<Peer> = (0..).zip(&meshes).map(peer).collect();
    let mut exchange = |world: u64| -> Vec<Result<Vec<Vec<u8>>, MeshError>> {
        std::thread::scope(|scope| {
            let members = meshes.iter_mut().enumerate();
            let threads: Vec<_> = members
                .map(|(me, mesh)| {
                    let peers = peers.clone();
                    scope.spawn(move || {
                        mesh.enter(WorldId(world), me, peers)?;
                        mesh.exchange(1, b"hello")
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    };
    let is_complete = |messages: &Result<Vec<Vec<u8>>, MeshError>| {
        messages.as_ref().is_ok_and(|messages| messages.iter().all(|message| message == b"hello"))
    };
    assert!(exchange(1).iter().all(is_complete));
    isolation::isolate(LONG);
    for ended in exchange(2) {
        assert!(matches!(ended, Err(MeshError::Lost { .. })), "{ended:?}");
    }
    isolation::isolate(Duration::ZERO);
    let again = exchange(3);
    assert!(again.iter().all(is_complete), "{again:?}");
}

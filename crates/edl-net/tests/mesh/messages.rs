// SPDX-License-Identifier: Apache-2.0
//! Messages, blobs and links between members.

use edl_core::id::{Incarnation, WorldId};
use edl_core::lanes::assign;
use edl_net::handshake::Encryption;
use edl_net::mesh::{Error, Mesh, Move, Transport};

use crate::harness::{TRANSPORTS, config, enter_and_check, open, peer, run};

#[test]
fn every_member_gets_all_messages_in_member_order() {
    for transport in TRANSPORTS {
        let folder = tempfile::tempdir().unwrap();
        let (meshes, peers) = open(&folder, transport, &assign(4, 4), &mut |_| None);
        let (_, heard) = run(meshes, move |me, mesh| {
            mesh.enter(WorldId(1), me, peers.clone()).unwrap();
            let long = mesh.exchange(1, &vec![b'a' + u8::try_from(me).unwrap(); 4096]).unwrap();
            (long, mesh.exchange(2, &[]).unwrap(), mesh.transport())
        });
        for (long, empty, text) in heard {
            assert_eq!(long, [b'a', b'b', b'c', b'd'].map(|letter| vec![letter; 4096]));
            assert_eq!(empty, [const { Vec::<u8>::new() }; 4]);
            let is_encrypted = transport == (Transport::Tcp, Encryption::Always);
            let prefix = if is_encrypted { "encrypted " } else { "" };
            assert_eq!(text, format!("{prefix}{}", transport.0));
        }
    }
}

fn blob(item: u32) -> Vec<u8> {
    let len = [0, 1, 4096, 1_000_000, 5 << 20][item as usize % 5];
    (0..len).map(|place: usize| u8::try_from((place * 7 + item as usize) % 251).unwrap()).collect()
}

#[test]
fn blobs_arrive_complete_at_their_recipients() {
    for transport in TRANSPORTS {
        let folder = tempfile::tempdir().unwrap();
        let (meshes, peers) = open(&folder, transport, &assign(3, 3), &mut |_| None);
        let moves: Vec<Move> = (0..20)
            .flat_map(|item| {
                let from = item as usize % 2;
                [Move { from, to: 2, item }, Move { from, to: 1 - from, item: item + 100 }]
            })
            .collect();
        let all = moves.clone();
        let (_, got) = run(meshes, move |me, mesh| {
            mesh.enter(WorldId(1), me, peers.clone()).unwrap();
            let mut got = Vec::new();
            let n_bytes = mesh.transfer(&all, &mut blob, &mut |item, bytes| {
                assert!(bytes == blob(item));
                got.push(item);
                Ok(())
            });
            enter_and_check(mesh, 2, me, &peers, 10);
            (got, n_bytes.unwrap())
        });
        for (me, (mut got, n_bytes)) in got.into_iter().enumerate() {
            got.sort_unstable();
            let mine = |step: &&Move| step.to == me;
            let mut expected: Vec<u32> = moves.iter().filter(mine).map(|step| step.item).collect();
            expected.sort_unstable();
            assert_eq!(got, expected);
            let moved = moves.iter().filter(|step| step.to == me || step.from == me);
            assert_eq!(n_bytes, moved.map(|step| blob(step.item).len() as u64).sum::<u64>());
        }
    }
}

#[test]
fn a_blob_that_is_not_accepted_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (meshes, peers) = open(&folder, TRANSPORTS[1], &assign(2, 2), &mut |_| None);
    let (_, ended) = run(meshes, move |me, mesh| {
        mesh.enter(WorldId(1), me, peers.clone()).unwrap();
        let moves = [Move { from: 0, to: 1, item: 7 }];
        mesh.transfer(&moves, &mut blob, &mut |_, _| Err("damaged".into()))
    });
    assert!(ended[0].is_ok());
    assert!(matches!(&ended[1], Err(Error::Item { item: 7, error }) if error == "damaged"));
}

#[test]
fn members_in_different_operations_disconnect() {
    let folder = tempfile::tempdir().unwrap();
    let (meshes, peers) = open(&folder, TRANSPORTS[1], &assign(2, 2), &mut |_| None);
    let (_, ended) = run(meshes, move |me, mesh| {
        mesh.enter(WorldId(1), me, peers.clone()).unwrap();
        let talked = mesh.exchange(me as u64, b"x");
        // The member that detects this closes the link, and the other one notices.
        let again = talked.is_ok() || mesh.exchange(9, b"x").is_ok();
        enter_and_check(mesh, 2, me, &peers, 100);
        again
    });
    assert_eq!(ended, [false, false]);
}

#[test]
fn worlds_follow_each_other_and_joining_members_are_connected_in_advance() {
    for transport in TRANSPORTS {
        let folder = tempfile::tempdir().unwrap();
        let (meshes, peers) = open(&folder, transport, &assign(6, 3), &mut |_| None);
        run(meshes, move |me, mesh| {
            // Alone, then the first two, then all, then the last two.
            let worlds = [0..1, 0..2, 0..3, 1..3].into_iter().enumerate();
            for (world, places) in worlds.filter(|(_, places)| places.contains(&me)) {
                mesh.prepare(&peers);
                let spans = assign(6, u32::try_from(places.len()).unwrap());
                let mut members = peers[places.clone()].to_vec();
                members.iter_mut().zip(spans).for_each(|(member, span)| member.span = span);
                enter_and_check(mesh, world as u64 + 1, me - places.start, &members, 70_000);
            }
        });
    }
}

#[test]
fn a_restarted_worker_is_identified_by_its_incarnation() {
    for transport in TRANSPORTS {
        let folder = tempfile::tempdir().unwrap();
        let (mut meshes, peers) = open(&folder, transport, &assign(2, 2), &mut |_| None);
        let first = peers.clone();
        meshes = run(meshes, move |me, mesh| enter_and_check(mesh, 1, me, &first, 100)).0;
        drop(meshes.remove(1));
        let mut again = config(&folder, 1, Some(transport));
        again.incarnation = Incarnation(999);
        meshes.push(Mesh::open(again).unwrap());
        let mut second = peers.clone();
        second[1] = peer(&meshes[1], 1, peers[1].span.clone());
        second[1].incarnation = Incarnation(999);
        let of_new = second.clone();
        meshes = run(meshes, move |me, mesh| enter_and_check(mesh, 2, me, &of_new, 100)).0;
        // A worker does not answer to the incarnation of its predecessor.
        second[1].incarnation = Incarnation(101);
        let mut old = meshes.remove(0);
        let entered = old.enter(WorldId(3), 0, second);
        assert!(matches!(entered, Err(Error::Lost { peer, .. }) if peer.0 == 1));
    }
}

#[test]
fn each_pair_chooses_the_best_transport_and_a_mix_gives_bit_identical_sums() {
    let folder = tempfile::tempdir().unwrap();
    let meshes: Vec<Mesh> =
        (0..3).map(|worker| Mesh::open(config(&folder, worker, None)).unwrap()).collect();
    let mut peers: Vec<_> = (0..3_u32)
        .zip(assign(5, 3))
        .map(|(worker, span)| peer(&meshes[worker as usize], worker, span))
        .collect();
    // Simulates another host: the worker has no Unix socket path.
    peers[2].unix_path = String::new();
    let (_, texts) = run(meshes, move |me, mesh| {
        enter_and_check(mesh, 1, me, &peers, 300_000);
        mesh.transport()
    });
    assert_eq!(texts, ["shared memory (1), tcp (1)", "shared memory (1), tcp (1)", "tcp"]);
}

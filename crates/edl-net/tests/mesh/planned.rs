// SPDX-License-Identifier: Apache-2.0
//! A worker that joins a world waits for members that train the steps before it.

use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Duration;

use edl_core::id::WorldId;
use edl_core::lanes::assign;
use edl_net::mesh::{Error, Mesh, Peer};

use crate::harness::{DEADLINE, Over, TRANSPORTS, config, peer};

/// A link and its handshake take less.
const SILENCE: Duration = Duration::from_secs(2);

/// Meshes that do not wait for long.
fn impatient<const N: usize>(folder: &tempfile::TempDir, over: Over) -> ([Mesh; N], Vec<Peer>) {
    let meshes = std::array::from_fn(|worker| {
        let config = config(folder, u32::try_from(worker).unwrap(), Some(over));
        Mesh::open(edl_net::mesh::MeshConfig { silence: SILENCE, ..config }).unwrap()
    });
    let spans = assign(u32::try_from(N).unwrap(), u32::try_from(N).unwrap());
    let peers = meshes.iter().zip(0..).zip(spans);
    let peers = peers.map(|((mesh, worker), span)| peer(mesh, worker, span)).collect();
    (meshes, peers)
}

/// Enters a world in a thread; its links stay.
fn enter(mut mesh: Mesh, me: usize, peers: &[Peer]) -> Receiver<(Result<(), Error>, Mesh)> {
    let (sender, ended) = channel();
    let peers = peers.to_vec();
    std::thread::spawn(move || {
        let entered = mesh.enter(WorldId(1), me, peers);
        sender.send((entered, mesh)).unwrap();
    });
    ended
}

/// The link is made by the worker with the lower id, so the first or the second one joins.
#[test]
fn a_worker_that_joins_waits_for_members_that_still_train() {
    for (over, joins) in TRANSPORTS.into_iter().flat_map(|over| [(over, 0), (over, 1)]) {
        let folder = tempfile::tempdir().unwrap();
        let (meshes, mut peers) = impatient::<2>(&folder, over);
        let trains = 1 - joins;
        peers[trains].is_busy = true;
        let mut meshes = meshes.map(Some);
        let joined = enter(meshes[joins].take().unwrap(), joins, &peers);

        // It has waited for longer than a worker that is waited for in a world that has begun.
        let other = tempfile::tempdir().unwrap();
        let ([waits, _silent], others) = impatient::<2>(&other, over);
        let (waited, _) = enter(waits, 0, &others).recv_timeout(DEADLINE).unwrap();
        assert!(matches!(waited, Err(Error::Lost { peer, .. }) if peer.0 == 1), "{waited:?}");
        assert!(matches!(joined.try_recv(), Err(TryRecvError::Empty)), "it gave up");

        let trained = enter(meshes[trains].take().unwrap(), trains, &peers);
        let _ended = [joined, trained].map(|entered| {
            let (entered, mesh) = entered.recv_timeout(DEADLINE).unwrap();
            entered.unwrap();
            mesh
        });
    }
}

/// All members train the same steps: where one has entered, the others are not far.
#[test]
fn a_worker_that_joins_does_not_wait_for_a_member_that_has_not_come_with_the_others() {
    for over in TRANSPORTS {
        let folder = tempfile::tempdir().unwrap();
        let ([joins, trains, _frozen], mut peers) = impatient::<3>(&folder, over);
        peers[1].is_busy = true;
        peers[2].is_busy = true;
        let joined = enter(joins, 0, &peers);
        let trained = enter(trains, 1, &peers);
        let _ended = [joined, trained].map(|ended| {
            let (ended, mesh) = ended.recv_timeout(DEADLINE).unwrap();
            assert!(matches!(ended, Err(Error::Lost { peer, .. }) if peer.0 == 2), "{ended:?}");
            mesh
        });
    }
}

// SPDX-License-Identifier: Apache-2.0
//! When a world ends, all blocked calls return, and the next world works over the same links.

use std::sync::{Arc, OnceLock, mpsc};

use edl_core::id::WorldId;
use edl_core::lanes::assign;
use edl_net::mesh::{Abort, Dtype, Error, Mesh, PhaseHook, ReducePhase};

use crate::harness::{DEADLINE, TRANSPORTS, enter_and_check, expected, open, run, step};

#[test]
fn an_abort_in_any_phase_stops_the_sum_and_the_next_world_works() {
    for transport in TRANSPORTS {
        for phase in ReducePhase::ALL {
            for n_members in [2, 3, 5] {
                let folder = tempfile::tempdir().unwrap();
                let spans = assign(7, n_members);
                let aborts: Arc<OnceLock<Vec<Abort>>> = Arc::default();
                let (meshes, peers) = open(&folder, transport, &spans, &mut |member| {
                    let aborts = Arc::clone(&aborts);
                    let hook: PhaseHook = Box::new(move |reached, step| {
                        if (reached, step) == (phase, 5) {
                            let all = aborts.get().unwrap().iter();
                            all.for_each(|abort| abort.abort(WorldId(2)));
                        }
                    });
                    (member == 1).then_some(hook)
                });
                aborts.set(meshes.iter().map(Mesh::abort).collect()).unwrap();
                let (_, sums) = run(meshes, move |me, mesh| {
                    // The fastest member may have ended the world before the slowest enters it.
                    let entered = mesh.enter(WorldId(1), me, peers.clone());
                    let sum = entered
                        .and_then(|()| step(mesh, 5, &peers[me].span, 7, 400_000, Dtype::F32));
                    enter_and_check(mesh, 2, me, &peers, 300_000);
                    sum
                });
                for sum in sums {
                    match sum {
                        Ok(sum) => assert!(sum == expected(5, 7, 400_000, Dtype::F32)),
                        Err(error) => assert!(matches!(error, Error::Aborted), "{error}"),
                    }
                }
            }
        }
    }
}

#[test]
fn every_blocked_call_returns_when_its_world_ends() {
    for transport in TRANSPORTS {
        for call in 0..4 {
            let folder = tempfile::tempdir().unwrap();
            let (mut meshes, peers) = open(&folder, transport, &assign(2, 2), &mut |_| None);
            let first = peers.clone();
            if call > 0 {
                meshes = run(meshes, move |me, mesh| enter_and_check(mesh, 1, me, &first, 9)).0;
            }
            // The other member never joins.
            let mut mesh = meshes.remove(0);
            let (abort, blocked) = (mesh.abort(), mesh.blocked());
            let (sender, ended) = mpsc::channel();
            std::thread::spawn(move || {
                let ended = match call {
                    0 => mesh.enter(WorldId(1), 0, peers.clone()),
                    1 => mesh.exchange(1, b"x").map(drop),
                    2 => step(&mut mesh, 1, &peers[0].span, 2, 9, Dtype::F32).map(drop),
                    _ => {
                        let moves = [edl_net::mesh::Move { from: 1, to: 0, item: 1 }];
                        mesh.transfer(&moves, &mut |_| Vec::new(), &mut |_, _| Ok(())).map(drop)
                    }
                };
                sender.send(ended).unwrap();
            });
            // Wait until the call is blocked.
            while !blocked.get() {
                assert!(matches!(ended.try_recv(), Err(mpsc::TryRecvError::Empty)));
                std::thread::yield_now();
            }
            abort.abort(WorldId(1));
            assert!(
                matches!(ended.try_recv(), Err(mpsc::TryRecvError::Empty)),
                "the abort was for a different world"
            );
            abort.abort(WorldId(2));
            assert!(matches!(ended.recv_timeout(DEADLINE).unwrap(), Err(Error::Aborted)));
        }
    }
}

#[test]
fn a_closed_mesh_rejects_new_worlds() {
    let folder = tempfile::tempdir().unwrap();
    let (mut meshes, peers) = open(&folder, TRANSPORTS[1], &assign(2, 1), &mut |_| None);
    meshes[0].abort().close();
    assert!(matches!(meshes[0].enter(WorldId(1), 0, peers), Err(Error::Aborted)));
}

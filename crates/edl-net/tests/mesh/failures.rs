// SPDX-License-Identifier: Apache-2.0
//! A member fails in any phase: the others detect it and continue without it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use edl_core::id::{WorkerId, WorldId};
use edl_core::lanes::assign;
use edl_net::mesh::{Dtype, Error, Mesh, Peer, PhaseHook, ReducePhase};

use crate::harness::{TRANSPORTS, enter_and_check, expected, open, run, step};

const LANES: u32 = 7;
const LEN: usize = 400_000;
/// Longer than the time in which a member must reconnect after its link broke.
const LONG: Duration = Duration::from_millis(1200);

/// Checks what a survivor got in the world in which a member failed.
pub(crate) fn check_survivor(result: Result<Vec<u32>, Error>, dead: &[u32], seen: u64) {
    match result {
        Ok(sum) => assert!(sum == expected(seen, LANES, LEN, Dtype::F32)),
        Err(Error::Lost { peer, .. }) => assert!(dead.contains(&peer.0), "{peer} is alive"),
        Err(error) => assert!(matches!(error, Error::Aborted), "{error}"),
    }
}

/// The world of the remaining members.
pub(crate) fn survivors(peers: &[Peer], dead: usize) -> Vec<Peer> {
    let mut left = peers.to_vec();
    left.remove(dead);
    let spans = assign(LANES, u32::try_from(left.len()).unwrap());
    left.iter_mut().zip(spans).for_each(|(peer, span)| peer.span = span);
    left
}

/// Runs a survivor through the step in which a member fails, and through the next world.
pub(crate) fn survive(mesh: &mut Mesh, me: usize, peers: &[Peer], dead: usize) {
    mesh.enter(WorldId(1), me, peers.to_vec()).unwrap();
    let first = step(mesh, 4, &peers[me].span, LANES, LEN, Dtype::F32).unwrap();
    assert!(first == expected(4, LANES, LEN, Dtype::F32));
    let sum = step(mesh, 5, &peers[me].span, LANES, LEN, Dtype::F32);
    // A survivor that has not left the world yet may consider one that has as lost.
    let suspects: Vec<u32> = (peers.iter().enumerate())
        .filter(|(place, _)| *place != me)
        .map(|(_, peer)| peer.worker.0)
        .collect();
    check_survivor(sum, &suspects, 5);
    let place = if me > dead { me - 1 } else { me };
    enter_and_check(mesh, 2, place, &survivors(peers, dead), LEN);
    enter_and_check(mesh, 3, place, &survivors(peers, dead), 1000);
}

#[test]
fn the_others_continue_when_a_member_fails_in_any_phase() {
    for transport in TRANSPORTS {
        for phase in ReducePhase::ALL {
            for n_members in 2..=5_u32 {
                let folder = tempfile::tempdir().unwrap();
                let dead = (phase as usize + n_members as usize) % n_members as usize;
                let spans = assign(LANES, n_members);
                let (meshes, peers) = open(&folder, transport, &spans, &mut |member| {
                    let hook: PhaseHook = Box::new(move |reached, step| {
                        if (reached, step) == (phase, 5) {
                            resume_unwind(Box::new("fails"));
                        }
                    });
                    (member == dead).then_some(hook)
                });
                let mut meshes: Vec<Option<Mesh>> = meshes.into_iter().map(Some).collect();
                let mut failing = meshes[dead].take().unwrap();
                let all = peers.clone();
                let death = std::thread::spawn(move || {
                    let died = catch_unwind(AssertUnwindSafe(|| {
                        failing.enter(WorldId(1), dead, all.clone()).unwrap();
                        for number in [4, 5] {
                            let _ =
                                step(&mut failing, number, &all[dead].span, LANES, LEN, Dtype::F32);
                        }
                    }));
                    assert!(died.is_err());
                    drop(failing);
                });
                let survivors = meshes.into_iter().flatten().collect();
                run(survivors, move |place, mesh| {
                    let me = if place < dead { place } else { place + 1 };
                    survive(mesh, me, &peers, dead);
                });
                death.join().unwrap();
            }
        }
    }
}

#[test]
fn a_member_that_failed_before_a_world_is_reported_when_the_world_starts() {
    for transport in TRANSPORTS {
        for dead in 0..2 {
            let folder = tempfile::tempdir().unwrap();
            let (mut meshes, peers) = open(&folder, transport, &assign(2, 2), &mut |_| None);
            let first = peers.clone();
            meshes = run(meshes, move |me, mesh| enter_and_check(mesh, 1, me, &first, 9)).0;
            drop(meshes.remove(dead));
            let ended = meshes[0].enter(WorldId(2), 1 - dead, peers);
            let gone = WorkerId(u32::try_from(dead).unwrap());
            let Err(Error::Lost { peer, error }) = ended else { panic!("{ended:?}") };
            // The survivor tried to connect itself instead of waiting for a connection.
            assert!(peer == gone && error.contains("connect to"), "{peer}: {error}");
        }
    }
}

#[test]
fn a_link_that_breaks_late_in_the_entry_is_reconnected() {
    for transport in TRANSPORTS {
        for busy in 0..2 {
            let folder = tempfile::tempdir().unwrap();
            let (mut meshes, peers) = open(&folder, transport, &assign(2, 2), &mut |_| None);
            let first = peers.clone();
            meshes = run(meshes, move |me, mesh| enter_and_check(mesh, 1, me, &first, 9)).0;
            run(meshes, move |me, mesh| {
                if me == busy {
                    // This member misses the next world and trains alone for a while, which
                    // closes the link that the other one waits on.
                    std::thread::sleep(LONG);
                    let alone = Peer { span: 0..2, ..peers[me].clone() };
                    enter_and_check(mesh, 2, 0, &[alone], 9);
                }
                enter_and_check(mesh, 3, me, &peers, 9);
            });
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Sums are bit-identical to the sum of the tree, no matter which member runs which lane.

use edl_core::id::WorldId;
use edl_core::lanes::{Span, assign};
use edl_net::mesh::{Dtype, ReducePhase};
use proptest::prelude::*;
use std::sync::{Arc, Mutex};

use crate::harness::{Over, TRANSPORTS, expected, open, run, step};

/// The points that a member has reached.
type Reached = Arc<Mutex<Vec<(ReducePhase, u64)>>>;

/// Sums of several lengths in one world; all must be bit-identical to those of one thread.
fn check(transport: Over, spans: &[Span], sums: &[(u32, usize, Dtype)]) {
    let folder = tempfile::tempdir().unwrap();
    let (meshes, peers) = open(&folder, transport, spans, &mut |_| None);
    let (of_members, spans) = (sums.to_vec(), spans.to_vec());
    let (_, results) = run(meshes, move |me, mesh| {
        mesh.enter(WorldId(1), me, peers.clone()).unwrap();
        let mut results = Vec::new();
        for (number, (n_active, len, dtype)) in of_members.iter().enumerate() {
            let sum = step(mesh, number as u64, &spans[me], *n_active, *len, *dtype);
            results.push(sum.unwrap());
        }
        results
    });
    for (number, (n_active, len, dtype)) in sums.iter().enumerate() {
        let expected = expected(number as u64, *n_active, *len, *dtype);
        for (member, results) in results.iter().enumerate() {
            assert!(results[number] == expected, "member {member}, sum {number}");
        }
    }
}

#[test]
fn any_number_of_members_gives_bit_identical_sums() {
    for transport in TRANSPORTS {
        for n_members in 1..=16 {
            let sums = [(21, 5000, Dtype::F32), (16, 1025, Dtype::F32), (21, 5000, Dtype::Bf16)];
            check(transport, &assign(21, n_members), &sums);
        }
    }
}

/// More than any one machine runs; every member has a connection to every other one.
#[test]
fn seventy_members_give_bit_identical_sums() {
    const N_MEMBERS: u32 = 70;
    edl_net::open_files::raise_limit();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let needed = u64::from(N_MEMBERS * (N_MEMBERS + 10));
    if limit.is_some_and(|limit| limit < needed) {
        println!("skipped: needs {needed} open files, and the limit is {limit:?}");
        return;
    }
    let sums = [(128, 5000, Dtype::F32), (128, 200_000, Dtype::Bf16)];
    check(TRANSPORTS[0], &assign(128, N_MEMBERS), &sums);
}

#[test]
fn short_steps_and_odd_lengths_give_bit_identical_sums() {
    let mut sums = Vec::new();
    for len in [0, 1, 2, 1023, 1024, 1025, 4099, 200_001] {
        for n_active in [1, 2, 5, 7] {
            sums.push((n_active, len, Dtype::F32));
            sums.push((n_active, len, Dtype::Bf16));
        }
    }
    for transport in TRANSPORTS {
        check(transport, &assign(7, 3), &sums);
    }
}

#[test]
fn uneven_and_empty_spans_give_bit_identical_sums() {
    let spans = [0..0, 0..5, 5..5, 5..6, 6..13, 13..13];
    let sums = [(13, 300_000, Dtype::F32), (3, 70_000, Dtype::F32), (13, 300_000, Dtype::Bf16)];
    for transport in TRANSPORTS {
        check(transport, &spans, &sums);
    }
}

#[test]
fn numbers_of_64_bits_are_added_as_such_for_any_number_of_members() {
    let mut sums = Vec::new();
    for (n_double, len) in [(2, 2), (1022, 1025), (3072, 5001), (70_004, 140_001)] {
        // In 1, 2, 3 and 7 lanes.
        sums.extend([1, 2, 3, 7].map(|n_active| (n_active, len, Dtype::F64First(n_double))));
    }
    for transport in TRANSPORTS {
        for n_members in [1, 2, 3, 7] {
            check(transport, &assign(7, n_members), &sums);
        }
    }
}

#[test]
fn memory_grows_and_shrinks_with_the_vector() {
    let sums = [10, 1 << 20, 3, 1 << 21, 1 << 20].map(|len| (4, len, Dtype::F32));
    for transport in TRANSPORTS {
        check(transport, &assign(4, 2), &sums);
    }
}

#[test]
fn every_member_reaches_every_phase_once_and_in_order() {
    for transport in TRANSPORTS {
        for (n_members, len) in [(1, 10), (2, 300_000), (3, 10), (4, 0)] {
            let folder = tempfile::tempdir().unwrap();
            let spans = assign(4, n_members);
            let reached: Vec<Reached> = spans.iter().map(|_| Reached::default()).collect();
            let (meshes, peers) = open(&folder, transport, &spans, &mut |member| {
                let reached = Arc::clone(&reached[member]);
                Some(Box::new(move |phase, step| reached.lock().unwrap().push((phase, step))))
            });
            run(meshes, move |me, mesh| {
                mesh.enter(WorldId(1), me, peers.clone()).unwrap();
                step(mesh, 9, &spans[me], 4, len, Dtype::F32).unwrap();
            });
            for reached in reached {
                assert_eq!(*reached.lock().unwrap(), ReducePhase::ALL.map(|phase| (phase, 9)));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn random_mappings_give_bit_identical_sums(
        cuts in prop::collection::vec(0_u32..20, 0..7),
        n_lanes in 1_u32..20,
        n_active in 1_u32..20,
        len in 0_usize..150_000,
        transport in 0..TRANSPORTS.len(),
        of in 0_usize..3,
    ) {
        let mut cuts: Vec<u32> = cuts.into_iter().map(|cut| cut.min(n_lanes)).collect();
        cuts.extend([0, n_lanes]);
        cuts.sort_unstable();
        let spans: Vec<Span> = cuts.windows(2).map(|pair| pair[0]..pair[1]).collect();
        let dtype = [Dtype::F32, Dtype::Bf16, Dtype::F64First(len / 3 * 2)][of];
        let sums = [(n_active.min(n_lanes), len, dtype), (n_lanes, len / 3, Dtype::F32)];
        check(TRANSPORTS[transport], &spans, &sums);
    }
}

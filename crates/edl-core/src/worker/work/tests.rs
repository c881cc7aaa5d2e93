// SPDX-License-Identifier: Apache-2.0
//! The leases held, by example and against a naive model.

use proptest::prelude::*;

use super::*;
use crate::id::EvalId;

const LOSS: f32 = 0.5;

fn batch(index: u32) -> BatchId {
    BatchId { epoch: 0, index }
}

fn assign(work: &mut Work, lease: u64, indices: Range<u32>) {
    work.assign_batches(LeaseId(lease), 0, indices, &[]);
}

/// A shard of this many pieces of ten records.
fn shard(n_pieces: u64) -> Shard {
    let pass = Pass::Evaluate { eval: EvalId(1), version: 0 };
    Shard { number: 3, records: 5..5 + 10 * n_pieces, pass }
}

fn upcoming(work: &Work) -> Vec<WorkItem> {
    work.upcoming().collect()
}

#[test]
fn batches_are_trained_in_order_for_any_order_of_the_leases() {
    let mut work = Work::default();
    assign(&mut work, 1, 4..6);
    assign(&mut work, 2, 0..2);
    let order: Vec<WorkItem> = [0, 1, 4, 5].map(|index| WorkItem::Batch(batch(index))).into();
    assert_eq!(upcoming(&work), order);
}

#[test]
fn an_evaluation_comes_before_training() {
    let mut work = Work::default();
    assign(&mut work, 1, 0..1);
    work.assign_shard(LeaseId(2), shard(2), 10);
    let piece = |piece| WorkItem::Piece { lease: LeaseId(2), piece };
    assert_eq!(upcoming(&work), [piece(0), piece(1), WorkItem::Batch(batch(0))]);
    assert!(!work.piece_done(LeaseId(2)));
    assert!(work.piece_done(LeaseId(2)));
    assert_eq!(upcoming(&work), [WorkItem::Batch(batch(0))]);
}

#[test]
fn a_batch_is_reported_once_however_often_it_is_acknowledged() {
    let mut work = Work::default();
    assign(&mut work, 1, 0..1);
    assert_eq!(work.acknowledged(batch(0)), None, "it was never sent");
    assert!(work.pushed(batch(0), LOSS));
    assert!(!work.pushed(batch(0), LOSS), "it was sent already");
    assert_eq!(work.acknowledged(batch(0)), Some(LOSS));
    assert_eq!(work.acknowledged(batch(0)), None);
    assert_eq!(work, Work::default());
}

#[test]
fn a_revoked_batch_is_neither_sent_nor_reported() {
    let mut work = Work::default();
    assign(&mut work, 1, 0..2);
    assert!(work.pushed(batch(0), LOSS));
    work.release(LeaseId(1));
    assert!(!work.pushed(batch(1), LOSS));
    assert_eq!(work.acknowledged(batch(0)), None);
}

#[test]
fn a_broken_connection_opens_what_was_sent_again() {
    let mut work = Work::default();
    assign(&mut work, 1, 0..2);
    assert!(work.pushed(batch(0), LOSS));
    assert_eq!(work.n_pushed(), 1);
    work.reopen();
    assert_eq!((work.n_pushed(), upcoming(&work).len()), (0, 2));
    assert_eq!(work.acknowledged(batch(0)), None, "an acknowledgement on the old connection");
}

#[test]
fn a_master_learns_what_is_not_acknowledged() {
    let mut work = Work::default();
    assign(&mut work, 7, 2..5);
    work.assign_shard(LeaseId(9), shard(1), 10);
    work.pushed(batch(2), LOSS);
    work.pushed(batch(3), LOSS);
    work.acknowledged(batch(2));
    let (generation, indices) = (Generation(2), vec![3, 4]);
    let held = HeldLease { lease: LeaseId(7), generation, epoch: 0, indices };
    assert_eq!(work.announce(generation), [held]);
    assert_eq!(work.release_shards(), [LeaseId(9)]);
}

#[test]
fn a_lease_number_that_comes_again_replaces_the_old_one() {
    let mut work = Work::default();
    assign(&mut work, 1, 0..3);
    work.pushed(batch(2), LOSS);
    assign(&mut work, 1, 2..4);
    assert_eq!(upcoming(&work), [WorkItem::Batch(batch(3))]);
    assert_eq!(work.acknowledged(batch(2)), Some(LOSS));
}

#[derive(Clone, Debug)]
enum Step {
    Assign { lease: u64, first: u32, count: u32 },
    Revoke(u64),
    Push(u32),
    Acknowledge(u32),
    Reopen,
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..4_u64, 0..12_u32, 1..5_u32)
            .prop_map(|(lease, first, count)| Step::Assign { lease, first, count }),
        2 => (0..4_u64).prop_map(Step::Revoke),
        6 => (0..16_u32).prop_map(Step::Push),
        6 => (0..16_u32).prop_map(Step::Acknowledge),
        1 => Just(Step::Reopen),
        1 => Just(Step::Clear),
    ];
    prop::collection::vec(step, 0..80)
}

/// A plain list of (index, lease, is pushed), searched from the front.
#[derive(Default)]
struct Naive(Vec<(u32, u64, bool)>);

impl Naive {
    fn find(&mut self, index: u32) -> Option<&mut (u32, u64, bool)> {
        self.0.iter_mut().find(|held| held.0 == index)
    }

    fn assign(&mut self, lease: u64, indices: Range<u32>) {
        self.0.retain(|held| held.1 != lease || indices.contains(&held.0));
        for index in indices {
            match self.find(index) {
                Some(held) => held.1 = lease,
                None => self.0.push((index, lease, false)),
            }
        }
    }
}

proptest! {
    #[test]
    fn the_leases_agree_with_a_plain_list(steps in steps()) {
        let mut work = Work::default();
        let mut naive = Naive::default();
        for step in steps {
            match step {
                Step::Assign { lease, first, count } => {
                    assign(&mut work, lease, first..first + count);
                    naive.assign(lease, first..first + count);
                }
                Step::Revoke(lease) => {
                    work.release(LeaseId(lease));
                    naive.0.retain(|held| held.1 != lease);
                }
                Step::Push(index) => {
                    let expected = naive.find(index).is_some_and(|held| !held.2);
                    prop_assert_eq!(work.is_open(WorkItem::Batch(batch(index))), expected);
                    prop_assert_eq!(work.pushed(batch(index), LOSS), expected);
                    if let Some(held) = naive.find(index) {
                        held.2 = true;
                    }
                }
                Step::Acknowledge(index) => {
                    let lease = naive.find(index).filter(|held| held.2).map(|held| held.1);
                    let held = work.lease_of(WorkItem::Batch(batch(index)));
                    let done = work.acknowledged(batch(index));
                    prop_assert_eq!(held.filter(|_| done.is_some()).map(|held| held.0), lease);
                    naive.0.retain(|held| held.0 != index || !held.2);
                }
                Step::Reopen => {
                    work.reopen();
                    naive.0.iter_mut().for_each(|held| held.2 = false);
                }
                Step::Clear => {
                    work.clear_batches();
                    naive.0.clear();
                }
            }
            naive.0.sort_unstable();
            let open = naive.0.iter().filter(|held| !held.2).map(|held| WorkItem::Batch(batch(held.0)));
            prop_assert_eq!(upcoming(&work), open.collect::<Vec<_>>());
            prop_assert_eq!(work.n_pushed(), naive.0.iter().filter(|held| held.2).count());
            let held = work.announce(Generation(1));
            let announced: usize = held.iter().map(|lease| lease.indices.len()).sum();
            prop_assert_eq!(announced, naive.0.len());
        }
    }
}

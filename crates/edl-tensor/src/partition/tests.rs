// SPDX-License-Identifier: Apache-2.0
//! Named interleavings, and random ones against a naive model.

use edl_core::id::PsId;

use super::*;
use crate::tests::fixture::{Job, batch};

mod members;
mod naive;
mod steps;

const SYNC: Mode = Mode::Sync { grads_to_wait: 2 };

/// Everything that a reader can see of a partition, bit for bit.
fn visible(partition: &Partition) -> (Vec<u32>, Vec<Vec<u32>>, u64, u64, AppliedSet) {
    let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect();
    let rows = |table: &Table| {
        let ids: Vec<u64> = (0..12).collect();
        let mut out = vec![0.0; ids.len() * table.dim()];
        table.peek(&ids, &mut out);
        bits(&out)
    };
    let tables = partition.tables().iter().map(rows).collect();
    let (version, updates) = (partition.version(), partition.updates());
    (bits(partition.dense()), tables, version, updates, partition.applied().clone())
}

fn restored(job: &Job, partition: &Partition, keep_applied: bool) -> Partition {
    let mut bytes = Vec::new();
    codec::encode(&partition.snapshot(), &mut bytes).unwrap();
    Partition::restore(job.config(partition.id().0), &mut bytes.as_slice(), keep_applied).unwrap()
}

#[test]
fn initial_values_do_not_depend_on_the_number_of_partitions() {
    let whole = Job { n_partitions: 1, ..Job::new(Mode::Async) };
    let split = Job { n_partitions: 5, ..Job::new(Mode::Async) };
    let dense: Vec<f32> = split.partitions().iter().flat_map(|p| p.dense().to_vec()).collect();
    assert_eq!(dense, whole.partitions()[0].dense());
    assert!(dense.iter().all(|number| (-1.0..=1.0).contains(number)));
}

#[test]
fn a_batch_pushed_twice_is_applied_once_and_an_empty_part_sets_its_bit() {
    let job = Job { n_partitions: 30, ..Job::new(Mode::Async) };
    // Twenty dense numbers over thirty partitions: some have nothing to change.
    for partition in &mut job.partitions() {
        let push = job.push(batch(3), 0, 0..30);
        assert_eq!(partition.push(&push), Outcome::Applied);
        let after = visible(partition);
        assert_eq!(partition.push(&push), Outcome::Already);
        assert_eq!(visible(partition), after);
        assert_eq!((partition.updates(), partition.version()), (1, 1));
        assert!(partition.applied().contains(batch(3)));
        partition.check_invariants();
    }
}

#[test]
fn pushes_that_do_not_fit_are_refused_and_change_nothing() {
    let job = Job::new(SYNC);
    let mut partition = Partition::new(job.config(1));
    let before = visible(&partition);
    let refusal = |pushed| {
        let Outcome::Refused(refusal) = pushed else { panic!("{pushed:?}") };
        refusal
    };
    let far = Job { n_batches: 100, ..job.clone() }.push(batch(99), 0, 0..4);
    assert_eq!(refusal(partition.push(&far)), "batch 0/99 does not exist: an epoch has 7 batches");
    let other = Job { n_partitions: 5, ..job.clone() }.push(batch(0), 0, 0..5);
    assert!(refusal(partition.push(&other)).contains("another partition layout"));
    let elsewhere = job.push(batch(0), 0, 2..4);
    assert!(refusal(partition.push(&elsewhere)).contains("another partition layout"));
    let early = job.push(BatchId { epoch: 1, index: 0 }, 0, 0..4);
    assert_eq!(
        refusal(partition.push(&early)),
        "batch 1/0 belongs to round 4, but round 0 is not complete yet"
    );
    assert_eq!(visible(&partition), before);
    assert_eq!(partition.n_staged(), 0);
}

#[test]
fn a_stale_push_has_a_smaller_rate() {
    let mut job = Job::new(Mode::Bounded { versions: 9 });
    job.optimizer.weight_decay = 0.0;
    job.lr_staleness_modulation = true;
    let mut partition = Partition::new(job.config(0));
    let mut change = |index, base| {
        let before = partition.dense()[0];
        partition.push(&job.push(batch(index), base, 0..4));
        (partition.dense()[0] - before) / job.gradient(batch(index)).dense[0]
    };
    let close = |a: f32, b: f32| (a - b).abs() < 1e-5;
    let zero_free: Vec<u32> =
        (0..7).filter(|i| job.gradient(batch(*i)).dense[0].abs() > 0.2).collect();
    assert!(close(change(zero_free[0], 0), -0.25), "a fresh one at full rate");
    assert!(close(change(zero_free[1], 0), -0.25), "one version old is the least");
    assert!(close(change(zero_free[2], 0), -0.125), "two versions old at half rate");
    assert!(close(change(zero_free[3], 99), -0.25), "a base from the future is fresh");
}

#[test]
fn the_last_round_of_an_epoch_is_smaller() {
    let job = Job::new(SYNC);
    let mut partition = Partition::new(job.config(2));
    for (first, round) in [(0, 1), (2, 2), (4, 3)] {
        assert_eq!(partition.push(&job.push(batch(first), 0, 2..4)), Outcome::Staged);
        let pushed = partition.push(&job.push(batch(first + 1), 0, 2..4));
        assert_eq!(pushed, Outcome::Round(vec![batch(first), batch(first + 1)]));
        assert_eq!(partition.round(), round);
    }
    assert_eq!(partition.push(&job.push(batch(6), 0, 2..4)), Outcome::Round(vec![batch(6)]));
    assert_eq!((partition.round(), partition.version(), partition.updates()), (4, 4, 7));
    let next = BatchId { epoch: 1, index: 0 };
    assert_eq!(partition.push(&job.push(next, 4, 2..4)), Outcome::Staged);
    partition.check_invariants();
}

#[test]
fn a_round_is_one_step_by_the_mean_in_batch_order() {
    let job = Job { mode: Mode::Sync { grads_to_wait: 4 }, ..Job::new(SYNC).with_adam() };
    let run = |order: [u32; 4]| {
        let mut partition = Partition::new(job.config(1));
        for index in order {
            partition.push(&job.push(batch(index), 0, 0..4));
        }
        assert_eq!((partition.version(), partition.updates()), (1, 4));
        visible(&partition)
    };
    assert_eq!(run([0, 1, 2, 3]), run([3, 1, 0, 2]));
}

#[test]
fn a_half_pushed_round_of_a_dead_worker_blocks_no_partition() {
    let job = Job::new(SYNC).with_adam();
    let (mut partitions, mut undisturbed) = (job.partitions(), job.partitions());
    // Ann pushes batch 0 everywhere; Bob reaches partitions 0 and 1 with batch 1, and dies.
    for partition in &mut partitions {
        assert_eq!(partition.push(&job.push(batch(0), 0, 0..4)), Outcome::Staged);
    }
    for partition in &mut partitions[..2] {
        let round = Outcome::Round(vec![batch(0), batch(1)]);
        assert_eq!(partition.push(&job.push(batch(1), 0, 0..4)), round);
    }
    // Ann takes Bob's batch: those that applied the round reply that, the others apply it now.
    for (index, partition) in partitions.iter_mut().enumerate() {
        let pushed = partition.push(&job.push(batch(1), 0, 0..4));
        match index {
            0 | 1 => assert_eq!(pushed, Outcome::Already),
            _ => assert_eq!(pushed, Outcome::Round(vec![batch(0), batch(1)])),
        }
    }
    for partition in &mut undisturbed {
        for index in [0, 1] {
            partition.push(&job.push(batch(index), 0, 0..4));
        }
    }
    for (partition, other) in partitions.iter().zip(&undisturbed) {
        assert_eq!(visible(partition), visible(other));
        partition.check_invariants();
    }
}

#[test]
fn one_worker_supplies_all_batches_of_a_round() {
    let job = Job { mode: Mode::Sync { grads_to_wait: 3 }, ..Job::new(SYNC) };
    let mut partition = Partition::new(job.config(0));
    let mut push = |index| partition.push(&job.push(batch(index), 0, 0..1));
    assert_eq!(push(1), Outcome::Staged);
    assert_eq!(push(1), Outcome::Staged, "a repeated push waits as the first one does");
    assert_eq!(push(0), Outcome::Staged);
    assert_eq!(push(2), Outcome::Round(vec![batch(0), batch(1), batch(2)]));
    assert_eq!(push(1), Outcome::Already);
}

#[test]
fn a_later_round_waits_for_the_earlier_one() {
    let job = Job::new(SYNC);
    let mut partition = Partition::new(job.config(0));
    let mut push = |index| partition.push(&job.push(batch(index), 0, 0..1));
    assert_eq!([push(2), push(3), push(0)], [Outcome::Staged, Outcome::Staged, Outcome::Staged]);
    assert_eq!(push(1), Outcome::Round(vec![batch(0), batch(1), batch(2), batch(3)]));
    assert_eq!((partition.version(), partition.round()), (2, 2));
}

#[test]
fn staged_pushes_are_not_saved_and_their_batches_are_pushed_again() {
    let job = Job::new(SYNC).with_adam();
    let mut partition = Partition::new(job.config(3));
    for index in 0..3 {
        partition.push(&job.push(batch(index), 0, 3..4));
    }
    let mut back = restored(&job, &partition, true);
    assert_eq!((back.n_staged(), back.round(), back.updates()), (0, 1, 2));
    back.check_invariants();
    assert_eq!(back.push(&job.push(batch(3), 0, 3..4)), Outcome::Staged);
    for partition in [&mut back, &mut partition] {
        partition.push(&job.push(batch(2), 0, 3..4));
        partition.push(&job.push(batch(3), 0, 3..4));
    }
    assert_eq!(visible(&back), visible(&partition));
}

#[test]
fn a_job_that_turns_synchronous_completes_the_rounds_that_it_finds_open() {
    let job = Job::new(Mode::Async);
    let mut partition = Partition::new(job.config(0));
    for index in [0, 1, 3, 6] {
        partition.push(&job.push(batch(index), 0, 0..4));
    }
    let job = Job { mode: SYNC, ..job };
    let mut partition = restored(&job, &partition, true);
    assert_eq!(partition.round(), 1);
    assert_eq!(partition.push(&job.push(batch(2), 0, 0..4)), Outcome::Round(vec![batch(2)]));
    assert_eq!(partition.push(&job.push(batch(5), 0, 0..4)), Outcome::Staged);
    let pushed = partition.push(&job.push(batch(4), 0, 0..4));
    assert_eq!(pushed, Outcome::Round(vec![batch(4), batch(5)]));
    assert_eq!(partition.round(), 4, "round 3 was applied before");
    partition.check_invariants();
}

/// No batch is lost or applied twice.
#[test]
fn a_restore_with_another_number_of_servers_from_partitions_that_differ_by_one_batch() {
    let job = Job::new(Mode::Async).with_adam();
    let mut partitions = job.partitions();
    let mut undisturbed = job.partitions();
    // Two servers. Batch 4 has reached only the first one when the checkpoint is taken.
    for index in 0..5 {
        for ps in 0..2 {
            let hosted = job.layout().hosted(PsId(ps), 2);
            let push = job.push(batch(index), 0, hosted.clone());
            for partition in hosted.filter(|_| index < 4 || ps == 0) {
                assert_eq!(partitions[partition as usize].push(&push), Outcome::Applied);
            }
        }
    }
    // Everything dies; three servers load whole partitions.
    let mut partitions: Vec<_> = partitions.iter().map(|p| restored(&job, p, true)).collect();
    let done = partitions
        .iter()
        .skip(1)
        .fold(partitions[0].applied().clone(), |done, partition| done.and(partition.applied()));
    assert_eq!(done.len(), 4);
    for index in (0..7).filter(|index| !done.contains(batch(*index))) {
        for ps in 0..3 {
            let hosted = job.layout().hosted(PsId(ps), 3);
            let push = job.push(batch(index), 0, hosted.clone());
            for partition in hosted {
                let pushed = partitions[partition as usize].push(&push);
                let had_it = index == 4 && partition < 2;
                assert_eq!(pushed, if had_it { Outcome::Already } else { Outcome::Applied });
            }
        }
    }
    for partition in &mut undisturbed {
        (0..7).for_each(|index| {
            partition.push(&job.push(batch(index), 0, 0..4));
        });
    }
    for (partition, other) in partitions.iter().zip(&undisturbed) {
        assert_eq!(visible(partition), visible(other));
        partition.check_invariants();
    }
}

#[test]
fn a_new_job_takes_parameters_and_optimizer_state_and_counts_from_zero() {
    let job = Job::new(Mode::Async).with_adam();
    let mut old = Partition::new(job.config(0));
    (0..5).for_each(|index| {
        old.push(&job.push(batch(index), 0, 0..1));
    });
    let mut new = restored(&job, &old, false);
    assert_eq!((new.version(), new.updates(), new.applied().len()), (0, 0, 0));
    assert_eq!((visible(&new).0, visible(&new).1), (visible(&old).0, visible(&old).1));
    // The same step from here: bias correction continues with the age of the slots.
    for partition in [&mut old, &mut new] {
        partition.push(&job.push(batch(6), 0, 0..1));
    }
    assert_eq!((visible(&new).0, visible(&new).1), (visible(&old).0, visible(&old).1));
    new.check_invariants();
    let again = restored(&job, &new, true);
    assert_eq!(visible(&again), visible(&new));
}

#[test]
fn another_optimizer_takes_the_weights_alone_and_only_for_a_new_job() {
    let adam = Job::new(Mode::Async).with_adam();
    let mut old = Partition::new(adam.config(0));
    old.push(&adam.push(batch(0), 0, 0..1));
    let sgd = Job::new(Mode::Async);
    let error = Partition::from_snapshot(sgd.config(0), old.snapshot(), true).unwrap_err();
    assert_eq!(error.to_string(), "the checkpoint's optimizer state is [m, v], the job's is []");
    let mut new = Partition::from_snapshot(sgd.config(0), old.snapshot(), false).unwrap();
    assert_eq!((visible(&new).0, visible(&new).1), (visible(&old).0, visible(&old).1));
    assert_eq!(new.push(&sgd.push(batch(0), 0, 0..1)), Outcome::Applied);
    new.check_invariants();
}

#[test]
fn a_snapshot_into_used_memory_equals_a_fresh_one() {
    let job = Job::new(Mode::Async).with_adam();
    let mut used = job.partitions()[3].snapshot();
    let mut partition = Partition::new(job.config(0));
    for index in 0..7 {
        partition.push(&job.push(batch(index), 0, 0..4));
        partition.snapshot_into(&mut used);
        assert_eq!(used, partition.snapshot());
    }
}

#[test]
fn a_reader_that_leaves_no_trace_sees_what_gather_sees() {
    let job = Job::new(Mode::Async);
    let mut partition = Partition::new(job.config(0));
    let ids: Vec<u64> =
        (0..100).filter(|id| job.layout().partition_of(*id) == PartitionId(0)).collect();
    let (mut peeked, mut gathered) = (vec![0.0; ids.len() * 3], vec![0.0; ids.len() * 3]);
    partition.peek(0, &ids, &mut peeked);
    assert_eq!(partition.n_rows(), 0);
    partition.gather(0, &ids, &mut gathered);
    assert_eq!(partition.n_rows(), ids.len() as u64);
    assert_eq!(peeked, gathered);
}

#[test]
fn rows_beyond_one_chunk_keep_their_values() {
    let mut job = Job::new(Mode::Async).with_adam();
    job.n_partitions = 1;
    let mut partition = Partition::new(job.config(0));
    let ids: Vec<u64> = (0..100_000).map(|i| i * i).collect();
    let (mut first, mut second) = (vec![0.0; ids.len() * 3], vec![0.0; ids.len() * 3]);
    partition.gather(0, &ids, &mut first);
    assert!(partition.tables()[0].slab().chunks().count() > 2);
    partition.gather(0, &ids, &mut second);
    assert_eq!(first, second);
    let mut back = restored(&job, &partition, true);
    back.gather(0, &[u64::MAX], &mut [0.0; 3]);
    back.gather(0, &ids, &mut second);
    assert_eq!(first, second);
    back.check_invariants();
}

// SPDX-License-Identifier: Apache-2.0
//! Steps that come in lanes: who pushed what and when must not show in the rows.

use edl_core::id::WorldId;
use proptest::prelude::*;

use super::*;
use crate::push::Lane;

const LANES: u32 = 3;

fn job() -> Job {
    Job::new(Mode::Steps { lanes: LANES }).with_adam()
}

fn lane(world: u64, number: u32) -> Lane {
    Lane { world: WorldId(world), number, of: LANES }
}

/// The rows' partition of the fixture that has most of them.
fn rows(job: &Job) -> Partition {
    Partition::new(job.config(job.layout().with_rows().start))
}

fn push(job: &Job, partition: &mut Partition, index: u32, lane: Lane) -> Outcome {
    let hosted = job.layout().with_rows();
    let pushed = partition.push(&job.push_lane(batch(index), lane, hosted));
    partition.check_invariants();
    pushed
}

/// All lanes of a batch, from one world.
fn step(job: &Job, partition: &mut Partition, index: u32, world: u64) {
    for number in 0..LANES {
        push(job, partition, index, lane(world, number));
    }
}

/// The rows as a reader sees them at `step`.
fn seen(partition: &Partition, step: u64) -> Vec<u32> {
    let ids: Vec<u64> = (0..40).collect();
    let read = |(index, table): (usize, &Table)| {
        let mut out = vec![0.0; ids.len() * table.dim()];
        partition.peek_at(step, index, &ids, &mut out);
        out.into_iter().map(f32::to_bits)
    };
    partition.tables().iter().enumerate().flat_map(read).collect()
}

#[test]
fn a_step_is_applied_when_its_last_lane_is_here() {
    let job = job();
    let mut partition = rows(&job);
    assert_eq!(push(&job, &mut partition, 0, lane(1, 2)), Outcome::Kept);
    assert_eq!(push(&job, &mut partition, 0, lane(1, 2)), Outcome::Kept, "the same lane again");
    assert_eq!(push(&job, &mut partition, 0, lane(1, 0)), Outcome::Kept);
    assert_eq!((partition.updates(), partition.n_staged()), (0, 2));
    assert_eq!(push(&job, &mut partition, 0, lane(1, 1)), Outcome::Round(vec![batch(0)]));
    assert_eq!((partition.updates(), partition.n_staged()), (1, 0));
    assert_eq!(push(&job, &mut partition, 0, lane(2, 0)), Outcome::Already, "a repeated step");
}

/// A member that has passed a step is not set back to it, so the servers must have it, too.
#[test]
fn a_lane_without_records_waits_for_its_step() {
    let job = job();
    let mut partition = rows(&job);
    let hosted = job.layout().with_rows();
    let mut skip = |number| {
        let mut push = (*job.push_lane(batch(0), lane(1, number), hosted.clone())).clone();
        push.head.n_records = 0;
        partition.push(&Arc::new(push))
    };
    assert_eq!([skip(0), skip(2)], [Outcome::Staged, Outcome::Staged]);
    assert_eq!(skip(1), Outcome::Round(vec![batch(0)]));
    assert_eq!(partition.updates(), 1);
}

#[test]
fn the_rows_before_the_last_step_can_still_be_read_and_no_older_ones() {
    let job = job();
    let mut partition = rows(&job);
    let mut before = seen(&partition, 0);
    for index in 0..5 {
        step(&job, &mut partition, index, 1);
        let (last, now) = (u64::from(index), u64::from(index) + 1);
        assert!(partition.has_step(now) && partition.has_step(last));
        assert!(last == 0 || !partition.has_step(last - 1));
        assert!(!partition.has_step(now + 1));
        assert_eq!(seen(&partition, last), before);
        before = seen(&partition, now);
    }
    let loaded = restored(&job, &partition, true);
    assert_eq!(seen(&loaded, 5), before);
    assert!(!loaded.has_step(4), "what was before a checkpoint is not in it");
}

/// Member A of world 1 had brought lane 0 of step 1 when it died; in world 2 a member that is a
/// step behind still runs lane 0. Were A's lane kept, the step would be whole without that member,
/// which could then be left two steps behind.
#[test]
fn lanes_of_different_worlds_make_no_step() {
    let job = job();
    let mut partition = rows(&job);
    step(&job, &mut partition, 0, 1);
    assert_eq!(push(&job, &mut partition, 1, lane(1, 0)), Outcome::Kept);
    assert_eq!(push(&job, &mut partition, 1, lane(2, 1)), Outcome::Kept);
    assert_eq!(push(&job, &mut partition, 1, lane(2, 2)), Outcome::Kept);
    let late = push(&job, &mut partition, 1, lane(1, 0));
    let (theirs, ours) = (WorldId(1), WorldId(2));
    let outdated = Refusal::OldWorld { batch: batch(1), theirs, ours };
    assert_eq!(late, Outcome::Refused(outdated.to_string()));
    assert_eq!(partition.updates(), 1);
    assert_eq!(push(&job, &mut partition, 1, lane(2, 0)), Outcome::Round(vec![batch(1)]));
    let mut undisturbed = rows(&job);
    step(&job, &mut undisturbed, 0, 1);
    step(&job, &mut undisturbed, 1, 1);
    assert_eq!(visible(&partition), visible(&undisturbed));
}

#[test]
fn lanes_of_another_step_or_layout_are_refused() {
    let job = job();
    let mut partition = rows(&job);
    let early = push(&job, &mut partition, 1, lane(1, 0));
    assert_eq!(
        early,
        Outcome::Refused(Refusal::NotNext { batch: batch(1), next: batch(0) }.to_string())
    );
    let other = Lane { of: LANES + 1, ..lane(1, 0) };
    let shape = Outcome::Refused(Refusal::Shape { batch: batch(0) }.to_string());
    assert_eq!(push(&job, &mut partition, 0, other), shape);
    let whole = job.push(batch(0), 0, job.layout().with_rows());
    assert_eq!(partition.push(&whole), shape, "a batch that is not split into lanes");
}

proptest! {
    /// No matter which member dies and what is repeated, the rows are those of an undisturbed run.
    #[test]
    fn the_order_of_lanes_and_worlds_does_not_matter(
        pushes in proptest::collection::vec((0..LANES, prop::bool::weighted(0.15)), 30..120),
    ) {
        let job = job();
        let (mut partition, mut undisturbed) = (rows(&job), rows(&job));
        let mut world = 1;
        for (number, is_new_world) in pushes {
            world += u64::from(is_new_world);
            let next = u32::try_from(partition.updates()).unwrap();
            if next == 7 {
                break;
            }
            push(&job, &mut partition, next, lane(world, number));
        }
        let n_steps = u32::try_from(partition.updates()).unwrap();
        (0..n_steps).for_each(|index| step(&job, &mut undisturbed, index, 1));
        prop_assert_eq!(visible(&partition), visible(&undisturbed));
    }
}

#[test]
fn a_new_job_can_start_from_the_other_layout() {
    let (apart, shared) = (job(), Job::new(Mode::Async).with_adam());
    let folder = tempfile::tempdir().unwrap();
    let mut partitions = apart.partitions();
    for partition in &mut partitions {
        if apart.layout().with_rows().contains(&partition.id().0) {
            step(&apart, partition, 0, 1);
        }
    }
    for (job, others, partitions) in
        [(&apart, &shared, partitions), (&shared, &apart, shared.partitions())]
    {
        let dir = folder.path().join(format!("{}", job.layout().is_apart));
        std::fs::create_dir(&dir).unwrap();
        let write = |p: &Partition| crate::checkpoint::write_file(&dir, &p.snapshot()).unwrap();
        let files = partitions.iter().map(write).collect();
        crate::checkpoint::tests::commit(job, &dir, files);
        let origin = crate::checkpoint::Origin::checkpoint(&dir, &others.layout(), false).unwrap();
        let kept = crate::checkpoint::Origin::checkpoint(&dir, &others.layout(), true);
        assert!(kept.is_err(), "the job that wrote it continues only with the same layout");
        let made: Vec<Partition> = (0..others.layout().n_partitions)
            .map(|p| origin.make(others.config(p)).unwrap())
            .collect();
        made.iter().for_each(Partition::check_invariants);
        let dense =
            |all: &[Partition]| all.iter().flat_map(|p| p.dense().to_vec()).collect::<Vec<_>>();
        assert_eq!(dense(&made), dense(&partitions));
        let n_rows = |all: &[Partition]| all.iter().map(Partition::n_rows).sum::<u64>();
        assert_eq!(n_rows(&made), n_rows(&partitions));
    }
}

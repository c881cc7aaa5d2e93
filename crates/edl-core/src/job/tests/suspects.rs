// SPDX-License-Identifier: Apache-2.0
//! Work that crashes workers or hangs is named, and healthy work is not.

use std::collections::BTreeSet;
use std::time::Duration;

use super::bench::{Bench, config, spec, worker};
use crate::id::{BatchId, Incarnation, WorkerId};
use crate::job::{Event, EventKind};
use crate::platform::Ended;
use crate::spec::JobSpec;
use crate::worker::{Pass, Report, Shard, Task};

/// Trains rounds of four batches. A worker exits like `how` when it takes up batch `poison`; its
/// report on the batch before that is lost with it if `is_abrupt`.
fn train_rounds(n_workers: u32, poison: u32, how: Ended, is_abrupt: bool) -> Bench {
    let spec = JobSpec { grads_to_wait: Some(4), num_workers: n_workers, ..spec() };
    let mut bench = Bench::started(config(spec, 0));
    let mut staged = BTreeSet::new();
    for _ in 0..500 {
        if bench.ended.is_some() {
            break;
        }
        let ids: Vec<u32> = bench.workers.keys().copied().collect();
        for id in ids {
            train_next(&mut bench, id, (poison, how, is_abrupt), &mut staged);
        }
        bench.pass(Duration::from_millis(100), None);
    }
    bench
}

fn train_next(
    bench: &mut Bench,
    id: u32,
    (poison, how, is_abrupt): (u32, Ended, bool),
    staged: &mut BTreeSet<u32>,
) {
    let Some((_, Task::Train { epoch, indices, .. })) = bench.next_work(id) else { return };
    let batch = BatchId { epoch, index: indices.start };
    if batch.index == poison {
        return bench.kill_now(worker(id), how);
    }
    let is_poison =
        |task: &Task| matches!(task, Task::Train { indices, .. } if indices.start == poison);
    let is_last = bench.workers[&id].work.front().is_some_and(|(_, work)| is_poison(work));
    if !(is_abrupt && is_last) {
        let incarnation = Incarnation(bench.workers[&id].incarnation);
        let report = Report::BatchPushed { batch };
        bench.handle(Event::FromWorker { worker: WorkerId(id), incarnation, report });
    }
    staged.insert(batch.index);
    let round = batch.index / 4 * 4..(batch.index / 4 * 4 + 4).min(10);
    if round.clone().all(|index| staged.contains(&index)) {
        for index in round {
            let batch = BatchId { epoch, index };
            bench.push_everywhere(batch);
            bench.report(id, batch);
        }
    }
}

fn expect_named(bench: &Bench, poison: u32, why: &str) {
    let named = format!("batch 0/{poison} (records {}, {})", 2 * poison, 2 * poison + 1);
    let failure = bench.failure();
    assert!(failure.starts_with(&format!("{named} failed 3 times")), "{failure}");
    assert!(failure.contains(why), "{failure}");
    let notes = bench.notes.iter().filter(|note| note.kind == EventKind::WorkFailed);
    for note in notes {
        let is_open = note.text.starts_with("one of ");
        assert!(is_open || note.text.starts_with(&named), "healthy work is blamed: {}", note.text);
    }
}

#[test]
fn a_batch_that_crashes_workers_is_named_in_synchronous_mode_too() {
    for n_workers in 1..=4 {
        for poison in 0..8 {
            for is_abrupt in [false, true] {
                let bench = train_rounds(n_workers, poison, Ended::Signal(6), is_abrupt);
                expect_named(&bench, poison, "killed by signal 6");
            }
        }
    }
}

#[test]
fn a_batch_whose_model_code_ends_the_process_is_named() {
    let bench = train_rounds(3, 2, Ended::CLEAN, false);
    expect_named(&bench, 2, "model code exited the process");
}

#[test]
fn a_worker_that_waits_for_its_round_is_not_blamed_for_another_that_hangs() {
    let spec = JobSpec { grads_to_wait: Some(4), num_workers: 2, ..spec() };
    let mut bench = Bench::started(config(spec, 0));
    let poison = 3;
    // The worker that has batch 3 hangs in it; the other worker has pushed all that it holds.
    for _ in 0..200 {
        let ids: Vec<u32> = bench.workers.keys().copied().collect();
        for id in ids {
            let work = bench.workers[&id].work.front().cloned();
            let Some((_, Task::Train { epoch, indices, .. })) = work else { continue };
            if indices.start != poison {
                bench.next_work(id);
                let incarnation = Incarnation(bench.workers[&id].incarnation);
                let batch = BatchId { epoch, index: indices.start };
                let report = Report::BatchPushed { batch };
                bench.handle(Event::FromWorker { worker: WorkerId(id), incarnation, report });
            }
        }
        bench.pass(Duration::from_secs(30), None);
    }
    expect_named(&bench, poison, "no progress");
}

#[test]
fn shards_that_may_have_crashed_a_worker_are_tried_alone() {
    let spec = JobSpec { num_workers: 1, num_epochs: 1, ..spec() };
    let mut bench = Bench::started(config(spec, 40));
    bench.run_until(|bench| {
        bench.workers.values().any(|w| matches!(w.work.front(), Some((_, Task::Shard(_)))))
    });
    // It crashes on the second shard, right after it has finished the first.
    for _ in 0..100 {
        let Some(id) = bench.workers.keys().next().copied() else {
            bench.pass(Duration::from_secs(1), None);
            continue;
        };
        let work = &bench.workers[&id].work;
        let crashes = match work.front() {
            Some((_, Task::Shard(Shard { number, pass: Pass::Evaluate { .. }, .. }))) => {
                *number == 1 || *number == 0 && work.len() > 1
            }
            Some(_) | None => false,
        };
        if bench.ended.is_some() {
            break;
        }
        if crashes {
            bench.kill_now(worker(id), Ended::Signal(6));
        } else if !bench.step(id) {
            bench.pass(Duration::from_secs(1), None);
        }
    }
    let failure = bench.failure();
    assert!(failure.starts_with("evaluation of records 4 to 7 failed 3 times"), "{failure}");
}

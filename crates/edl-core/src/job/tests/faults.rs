// SPDX-License-Identifier: Apache-2.0
//! Workers and servers that are killed, crash, hang or lie; disks that are full or rot.

use std::time::Duration;

use super::bench::{Bench, batch_done, config, model, ps, spec, worker};
use crate::activity::WaitingFor;
use crate::exit::Exit;
use crate::id::{BatchId, CheckpointId, Generation, Incarnation, LeaseId, PsId, WorkerId};
use crate::job::{Durable, Effect, End, Event, EventKind, Job, Suspect};
use crate::platform::{Ended, Order, Report};
use crate::server;
use crate::servers::{ServerMember, ServersPhase};
use crate::spec::JobSpec;
use crate::time::Time;
use crate::worker::{self, Task};

fn train(n_epochs: u32) -> JobSpec {
    JobSpec { num_epochs: n_epochs, ..spec() }
}

fn failed(bench: &Bench, worker: u32, lease: LeaseId, index: u32) -> Event {
    let incarnation = Incarnation(bench.workers[&worker].incarnation);
    let report = worker::Report::Failed { lease, index, error: "user code".into() };
    Event::FromWorker { worker: WorkerId(worker), incarnation, report }
}

#[test]
fn a_server_lost_before_the_first_checkpoint_takes_training_back_to_its_start() {
    let mut bench = Bench::started(config(train(2), 0));
    bench.run_to(7);
    bench.kill_now(ps(1), Ended::Signal(9));
    assert_eq!(bench.job.servers().generation().0, 2, "it was replaced and all loaded");
    assert_eq!(bench.job.ledger().n_done(), 0);
    bench.run();
    bench.expect_trained(2);
}

#[test]
fn a_server_that_was_replaced_is_refused_by_this_master_and_by_the_next() {
    let mut job = Job::new(config(train(1), 0), Durable::default(), Time::ZERO);
    let mut connect = |incarnation: u32| {
        let member = Box::new(ServerMember {
            incarnation: Incarnation(incarnation.into()),
            address: String::new(),
            unix_path: String::new(),
            generation: Generation(0),
            sets: Vec::new(),
        });
        let connected = Event::PsConnected { ps: PsId(0), pid: incarnation, member };
        drop(job.handle(connected, Time::ZERO));
        job.clone()
    };
    assert!(!connect(1).is_replaced_server(Incarnation(1)));
    assert!(!connect(1).is_replaced_server(Incarnation(1)), "its stream only broke");
    let job = connect(2);
    let next = Job::new(config(train(1), 0), job.durable().clone(), Time::ZERO);
    for job in [job, next] {
        assert!(job.is_replaced_server(Incarnation(1)) && !job.is_replaced_server(Incarnation(2)));
    }
}

#[test]
fn a_server_lost_after_a_checkpoint_takes_training_back_to_it() {
    let mut bench = Bench::started(config(JobSpec { checkpoint_steps: 6, ..train(2) }, 0));
    bench.run_to(9);
    bench.kill_now(ps(0), Exit::Panicked.into());
    bench.pass(Duration::from_secs(1), None);
    assert_eq!(bench.job.ledger().n_done(), 6, "a crash is followed by a pause, then by a load");
    assert!(bench.has_note(EventKind::Restored));
    bench.run();
    bench.expect_trained(2);
}

#[test]
fn a_report_about_lost_parameters_does_not_count() {
    let mut bench = Bench::started(config(train(1), 0));
    let old = bench.job.servers().generation();
    bench.kill_now(ps(1), Ended::Signal(9));
    let batch = BatchId { epoch: 0, index: 0 };
    bench.handle(batch_done(0, batch, old, 0.0));
    assert!(!bench.job.ledger().is_done(batch));
}

#[test]
fn a_bad_checkpoint_is_replaced_by_the_previous_one() {
    let mut bench = Bench::started(config(JobSpec { checkpoint_steps: 4, ..train(2) }, 0));
    bench.run_to(9);
    let newest = bench.disk.checkpoints.last().unwrap().folder.clone();
    bench.unreadable.insert(newest.clone());
    bench.kill_now(ps(0), Ended::Signal(9));
    assert_eq!(bench.job.ledger().n_done(), 4);
    assert!(bench.disk.checkpoints.iter().any(|c| c.folder == newest && c.is_bad));
    bench.run();
    bench.expect_trained(2);
}

#[test]
fn a_job_without_a_readable_checkpoint_fails_by_name() {
    let mut bench = Bench::started(config(JobSpec { checkpoint_steps: 4, ..train(2) }, 0));
    bench.run_to(9);
    bench.unreadable.extend(bench.committed.clone());
    bench.kill_now(ps(0), Ended::Signal(9));
    let oldest = bench.disk.checkpoints[0].folder.clone();
    assert!(bench.failure().contains(&oldest), "{}", bench.failure());
    assert!(bench.failure().contains("cannot load any checkpoint"));
}

#[test]
fn initial_values_that_cannot_be_read_fail_the_job_by_name() {
    let spec = JobSpec { checkpoint_dir_for_init: "elsewhere".into(), ..train(1) };
    let mut bench = Bench::new(config(spec, 0), Durable::default());
    bench.unreadable.insert("elsewhere".into());
    bench.handle(Event::Platform(Report::Running(Vec::new())));
    assert!(bench.failure().contains("cannot load the initial values"));
}

#[test]
fn on_a_full_disk_the_previous_checkpoint_is_kept_and_training_continues() {
    let mut bench = Bench::started(config(JobSpec { checkpoint_steps: 4, ..train(2) }, 0));
    bench.run_to(5);
    let before = bench.disk.checkpoints.clone();
    assert_eq!(before.len(), 1);
    bench.disk_is_full = true;
    bench.run_to(13);
    assert!(bench.has_note(EventKind::CheckpointFailed));
    assert_eq!(bench.disk.checkpoints, before);
    assert_eq!(bench.folders.len(), 1, "what a failed checkpoint has left is deleted");
    bench.kill_now(ps(0), Ended::Signal(9));
    assert_eq!(bench.job.ledger().n_done(), 4);
    bench.disk_is_full = false;
    bench.run();
    bench.expect_trained(2);
}

#[test]
fn a_final_checkpoint_waits_for_room_on_the_disk_and_says_so_once() {
    let mut bench = Bench::started(config(train(1), 0));
    bench.disk_is_full = true;
    bench.run_to(10);
    bench.pass(Duration::from_secs(600), None);
    assert_eq!(bench.ended, None);
    let trouble = bench.job.trouble().unwrap();
    assert!(trouble.starts_with("cannot write the final checkpoint: "), "{trouble}");
    assert_eq!(bench.notes.iter().filter(|n| n.kind == EventKind::CheckpointFailed).count(), 1);
    bench.disk_is_full = false;
    bench.pass(Duration::from_secs(5), None);
    bench.expect_trained(1);
}

#[test]
fn a_result_waits_for_room_on_the_disk() {
    let mut bench = Bench::started(config(train(1), 0));
    bench.holds_commits = true;
    bench.run_to(10);
    let [Effect::Commit { checkpoint, folder, .. }] = &bench.held_back[..] else { panic!() };
    let (checkpoint, folder) = (*checkpoint, folder.clone());
    bench.committed.insert(folder);
    bench.disk_is_full = true;
    bench.handle(Event::Committed { checkpoint });
    bench.pass(Duration::from_secs(600), None);
    assert_eq!(bench.ended, None);
    assert_eq!(bench.job.trouble().unwrap(), "cannot write the result: full; retrying");
    bench.disk_is_full = false;
    bench.pass(Duration::from_secs(5), None);
    bench.expect_trained(1);
}

#[test]
fn a_result_that_can_never_be_written_fails_the_job() {
    let mut bench = Bench::started(config(train(1), 0));
    bench.handle(Event::ExportFailed { error: "corrupt".into(), is_disk_full: false });
    assert!(bench.failure().contains("cannot write the result: corrupt"));
}

#[test]
fn a_result_that_stops_being_written_fails_the_job() {
    let mut bench = Bench::started(config(train(1), 0));
    bench.holds_exports = true;
    bench.run_until(|bench| !bench.held_back.is_empty());
    for _ in 0..3 {
        bench.pass(Duration::from_secs(200), None);
        bench.handle(Event::ExportProgressed);
    }
    assert_eq!(bench.ended, None, "it is slow, but it makes progress");
    bench.pass(Duration::from_secs(400), None);
    let expected = "cannot write the result: nothing was written for 300s; check the disk";
    assert_eq!(bench.failure(), expected);
}

#[test]
fn a_model_whose_import_hangs_fails_the_job_with_the_reason() {
    let mut bench =
        Bench::new(config(JobSpec { num_workers: 1, ..train(1) }, 0), Durable::default());
    bench.never_ready = true;
    bench.handle(Event::Platform(Report::Running(Vec::new())));
    bench.pass(Duration::from_secs(1000), None);
    assert_eq!(bench.ended, None, "other workers may start");
    bench.pass(Duration::from_secs(400), None);
    let expected = "worker-3 was not ready after 300s: importing or building the model takes too \
                    long or hangs; workers failed to start or crashed 4 times";
    assert!(bench.failure().starts_with(expected), "{}", bench.failure());
}

#[test]
fn a_machine_without_enough_memory_fails_the_job_and_no_record_is_blamed() {
    let mut bench = Bench::started(config(JobSpec { num_workers: 1, ..train(1) }, 0));
    for round in 0..4 {
        assert_eq!(bench.ended, None, "round {round}");
        bench.pass(Duration::from_secs(10), None);
        let id = *bench.workers.keys().next().expect("it was replaced");
        bench.kill_now(worker(id), Ended::MachineOutOfMemory);
    }
    let expected = "worker-3 was killed because the machine ran out of memory; workers failed to \
                    start or crashed 4 times";
    assert!(bench.failure().starts_with(expected), "{}", bench.failure());
    assert!(!bench.has_note(EventKind::WorkFailed));
}

#[test]
fn a_batch_that_crashes_workers_fails_the_job_and_its_records_are_named() {
    let mut bench = Bench::started(config(JobSpec { num_workers: 1, ..train(1) }, 0));
    bench.run_to(3);
    for round in 0..3 {
        assert_eq!(bench.ended, None, "round {round}");
        bench.pass(Duration::from_secs(10), None);
        let id = *bench.workers.keys().next().expect("it was replaced");
        bench.kill_now(worker(id), Ended::Signal(11));
    }
    assert!(bench.failure().contains("batch 0/3 (records 6, 7) failed 3 times"));
}

#[test]
fn an_error_of_user_code_counts_against_its_batch_and_success_pardons_it() {
    let mut bench = Bench::started(config(JobSpec { num_workers: 1, ..train(1) }, 0));
    let (lease, _) = bench.next_work(0).unwrap();
    bench.handle(failed(&bench, 0, lease, 1));
    assert_eq!(bench.disk.failures[0].work, Suspect::Batch(BatchId { epoch: 0, index: 1 }));
    bench.pass(Duration::from_secs(1), None);
    bench.run_to(7);
    assert!(bench.disk.failures.is_empty(), "it was done in the end");
    // A number that the lease does not hold must not be believed.
    let (lease, work) = bench.next_work(0).unwrap();
    let Task::Train { epoch, indices, .. } = work else { panic!() };
    bench.handle(failed(&bench, 0, lease, u32::MAX));
    let first = BatchId { epoch, index: indices.start };
    assert_eq!(bench.disk.failures[0].work, Suspect::Batch(first));
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_single_failure_that_ends_the_job_is_counted_in_the_singular() {
    let spec = JobSpec { num_workers: 1, max_batch_failures: 1, ..train(1) };
    let mut bench = Bench::started(config(spec, 0));
    let (lease, _) = bench.next_work(0).unwrap();
    bench.handle(failed(&bench, 0, lease, 1));
    assert_eq!(bench.failure(), "batch 0/1 (records 2, 3) failed once, on worker-0: user code");
}

#[test]
fn a_server_beyond_those_of_the_job_is_refused_with_their_number() {
    let refusal = |n_ps: u32| {
        let mut bench = Bench::started(config(JobSpec { num_ps_pods: n_ps, ..train(1) }, 0));
        bench.launch(ps(7)).into_iter().skip(1).for_each(|event| bench.handle(event));
        let note = bench.notes.iter().find(|note| note.kind == EventKind::Refused);
        note.expect("it is refused").text.clone()
    };
    assert_eq!(refusal(1), "ps-7 was refused: the job has 1 parameter server");
    assert_eq!(refusal(2), "ps-7 was refused: the job has 2 parameter servers");
}

#[test]
fn killed_workers_never_count() {
    let mut bench = Bench::started(config(train(1), 0));
    for signal in [9, 15, 1, 2].into_iter().cycle().take(40) {
        let id = *bench.workers.keys().next().unwrap();
        bench.kill_now(worker(id), Ended::Signal(signal));
        assert_eq!(bench.workers.len(), 2, "it was replaced at once");
    }
    assert!(bench.disk.failures.is_empty());
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_worker_that_makes_no_progress_loses_its_lease_and_is_replaced() {
    let spec = JobSpec { task_timeout_secs: 30, num_workers: 1, ..train(1) };
    let mut bench = Bench::started(config(spec, 0));
    bench.step(0);
    bench.pass(Duration::from_secs(29), None);
    assert!(bench.workers.contains_key(&0));
    bench.pass(Duration::from_secs(2), None);
    assert!(!bench.workers.contains_key(&0), "it was ended");
    assert_eq!(bench.disk.failures[0].work, Suspect::Batch(BatchId { epoch: 0, index: 1 }));
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_lease_that_expires_too_often_ends_the_job_and_nothing_follows() {
    let spec = JobSpec { task_timeout_secs: 30, max_batch_failures: 1, ..train(1) };
    let mut bench = Bench::started(config(spec, 0));
    bench.pass(Duration::from_secs(31), None);
    assert!(matches!(bench.ended, Some(End::Failed(_))), "{:?}", bench.ended);
}

#[test]
fn a_stuck_worker_without_a_replacement_is_not_assigned_the_same_work_at_once() {
    let mut config = config(JobSpec { task_timeout_secs: 30, num_workers: 0, ..train(1) }, 0);
    config.spec.max_batch_failures = 2;
    let mut bench = Bench::started(config);
    // Workers that were started manually.
    for id in [7, 8] {
        bench.launch(worker(id)).into_iter().skip(1).for_each(|event| bench.handle(event));
    }
    bench.pass(Duration::from_secs(31), None);
    assert!(bench.workers[&7].work.is_empty() && bench.workers[&8].work.is_empty());
    bench.launch(worker(9)).into_iter().skip(1).for_each(|event| bench.handle(event));
    bench.run_until(|bench| bench.ended.is_some());
    bench.expect_trained(1);
}

#[test]
fn a_silent_worker_is_replaced_and_its_work_goes_to_others() {
    let mut bench = Bench::started(config(train(1), 0));
    bench.pass(Duration::from_secs(11), Some(worker(0)));
    assert!(bench.has_note(EventKind::WorkerSilent));
    assert!(!bench.workers.contains_key(&0) && bench.workers.contains_key(&2));
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_silent_server_is_replaced_and_all_load_again() {
    let mut bench = Bench::started(config(JobSpec { checkpoint_steps: 3, ..train(1) }, 0));
    bench.run_to(5);
    let frozen = bench.servers[&1].pid;
    bench.pass(Duration::from_secs(11), Some(ps(1)));
    assert_ne!(bench.servers[&1].pid, frozen);
    assert_eq!(bench.job.ledger().n_done(), 3);
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_worker_that_computes_keeps_its_leases_and_one_that_does_not_loses_them() {
    let spec = JobSpec { task_timeout_secs: 4, ..train(1) };
    for computes in [true, false] {
        let mut bench = Bench::started(config(spec.clone(), 0));
        for _ in 0..60 {
            bench.progress += u64::from(computes);
            bench.pass(Duration::from_millis(100), None);
        }
        let is_blamed = bench.has_note(EventKind::WorkFailed);
        assert_eq!(is_blamed, !computes, "nothing is finished, but batches are computed");
    }
}

#[test]
fn a_worker_without_progress_is_shown_with_what_it_does() {
    let mut bench = Bench::started(config(train(1), 0));
    bench.pass(Duration::from_secs(5), None);
    assert_eq!(bench.job.stalled(WorkerId(0), bench.now), None, "this is not reported yet");
    bench.pass(Duration::from_secs(8), None);
    let stalled = bench.job.stalled(WorkerId(0), bench.now).unwrap();
    assert!(stalled.starts_with("training for 13 s without progress: batch 0/0 ("), "{stalled}");
    bench.progress += 1;
    bench.pass(Duration::from_millis(100), None);
    assert_eq!(bench.job.stalled(WorkerId(0), bench.now), None);
}

#[test]
fn a_lease_lasts_longer_where_batches_take_longer() {
    let spec = JobSpec { task_timeout_secs: 4, heartbeat_timeout_secs: 1.0, ..train(1) };
    let mut bench = Bench::started(config(spec, 0));
    let batch = Duration::from_secs(3);
    for _ in 0..8 {
        bench.progress += 1;
        bench.pass(batch, None);
    }
    bench.pass(3 * batch, None);
    assert!(!bench.has_note(EventKind::WorkFailed), "one batch takes three times as long");
    bench.pass(4 * batch, None);
    assert!(bench.has_note(EventKind::WorkFailed), "{:?}", bench.notes);
}

#[test]
fn the_tasks_of_a_frozen_worker_go_to_others_before_it_is_replaced() {
    let mut bench = Bench::started(config(JobSpec { num_epochs: 0, ..train(1) }, 0));
    for _ in 0..10 {
        bench.progress += 1;
        bench.pass(Duration::from_millis(100), None);
    }
    assert!(!bench.has_note(EventKind::Stuck));
    let (frozen, since) = (worker(1), bench.now);
    while !bench.has_note(EventKind::Stuck) {
        bench.pass(Duration::from_millis(100), Some(frozen));
    }
    let time = bench.now.since(since);
    assert!((Duration::from_secs(1)..Duration::from_millis(1500)).contains(&time), "{time:?}");
    assert_eq!(bench.job.ledger().pool().n_held(WorkerId(1)), 0, "its tasks are free");
    assert!(!bench.has_note(EventKind::WorkerSilent));
    bench.pass(Duration::from_millis(200), None);
    assert!(bench.job.ledger().pool().n_held(WorkerId(1)) > 0, "it was heard again");
}

#[test]
fn a_frozen_worker_gets_the_route_of_servers_that_load_meanwhile() {
    let mut bench = Bench::started(config(JobSpec { num_epochs: 0, ..train(1) }, 0));
    for _ in 0..10 {
        bench.progress += 1;
        bench.pass(Duration::from_millis(100), None);
    }
    let frozen = worker(1);
    while !bench.has_note(EventKind::Stuck) {
        bench.pass(Duration::from_millis(100), Some(frozen));
    }
    bench.kill_now(ps(0), Ended::Signal(9));
    bench.pass(Duration::from_secs(1), Some(frozen));
    let generations = [0, 1].map(|id| bench.workers[&id].generation);
    assert_eq!(generations, [Some(Generation(2)); 2]);
}

#[test]
fn no_worker_counts_as_frozen_while_the_master_itself_was_stopped() {
    let mut bench = Bench::started(config(JobSpec { num_epochs: 0, ..train(1) }, 0));
    for _ in 0..10 {
        bench.progress += 1;
        bench.pass(Duration::from_millis(100), None);
    }
    for _ in 0..5 {
        // Too short to be noticed as a pause; heartbeats wait until after the tick.
        bench.now = bench.now + Duration::from_millis(4900);
        (0..5).for_each(|_| bench.handle(Event::Tick));
        bench.pass(Duration::from_millis(300), None);
    }
    assert!(!bench.has_note(EventKind::Stuck), "{:?}", bench.notes);
}

#[test]
fn silence_is_noticed_under_a_load_that_leaves_no_time_for_ticks() {
    let mut bench = Bench::started(config(train(1), 0));
    let mut shortest = Duration::MAX;
    for _ in 0..1200 {
        bench.now = bench.now + Duration::from_millis(10);
        let incarnation = Incarnation(bench.workers[&1].incarnation);
        let report = worker::Report::Heartbeat { waiting_for: WaitingFor::Nothing, progress: 0 };
        bench.handle(Event::FromWorker { worker: WorkerId(1), incarnation, report });
        shortest = shortest.min(bench.job.next_deadline(bench.now).since(bench.now));
    }
    assert_eq!(shortest, Duration::from_millis(10), "a tick comes nearer, whatever else happens");
    assert!(bench.has_note(EventKind::WorkerSilent) && bench.has_note(EventKind::PsLost));
}

#[test]
fn no_process_counts_as_silent_while_the_master_itself_was_stopped() {
    let mut bench = Bench::started(config(train(1), 0));
    bench.run_to(2);
    bench.now = bench.now + Duration::from_secs(4000);
    bench.handle(Event::Tick);
    assert_eq!(bench.job.servers().generation().0, 1);
    assert!(!bench.has_note(EventKind::WorkerSilent) && bench.disk.failures.is_empty());
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_process_that_connects_before_the_platform_reports_it_is_not_waited_for() {
    let mut bench = Bench::new(config(train(1), 0), Durable::default());
    bench.holds_launches = true;
    bench.handle(Event::Platform(Report::Running(Vec::new())));
    for instance in [ps(0), ps(1), worker(0), worker(1)] {
        let mut events = bench.launch(instance);
        events.rotate_left(1);
        events.into_iter().for_each(|event| bench.handle(event));
    }
    bench.pass(Duration::from_secs(25), None);
    assert!(!bench.has_note(EventKind::NotConnected));
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_process_that_starts_but_never_connects_is_replaced() {
    let mut bench = Bench::new(config(train(1), 0), Durable::default());
    bench.holds_launches = true;
    bench.handle(Event::Platform(Report::Running(Vec::new())));
    for (instance, pid) in [(ps(0), 1), (ps(1), 2), (worker(0), 3), (worker(1), 4)] {
        bench.handle(Event::Platform(Report::Started { instance, pid }));
    }
    bench.pass(Duration::from_secs(25), None);
    let n_stops = bench.orders.iter().filter(|o| matches!(o, Order::Stop { .. })).count();
    assert_eq!(n_stops, 4);
}

#[test]
fn a_worker_that_lives_but_is_never_ready_is_replaced() {
    let mut bench = Bench::new(config(train(1), 0), Durable::default());
    bench.holds_launches = true;
    bench.handle(Event::Platform(Report::Running(Vec::new())));
    let events = bench.launch(worker(0));
    events.into_iter().take(2).for_each(|event| bench.handle(event));
    bench.pass(Duration::from_secs(301), None);
    assert!(bench.orders.contains(&Order::Stop { instance: worker(0), grace_ms: 0 }));
}

#[test]
fn a_worker_with_another_model_is_refused() {
    let mut bench = Bench::started(config(train(1), 0));
    let mut other = model();
    other.name = "other".into();
    let (worker, incarnation) = (WorkerId(1), Incarnation(bench.workers[&1].incarnation));
    let model = Box::new(other);
    bench.handle(Event::WorkerConnected { worker, incarnation, pid: 1 });
    let report = worker::Report::Ready { model, capacity: 2, held: Vec::new(), peer: None };
    bench.handle(Event::FromWorker { worker, incarnation, report });
    let refusal = bench.notes.iter().find(|note| note.kind == EventKind::Refused).unwrap();
    assert!(refusal.text.contains("`other`") && refusal.text.contains("`counter`"));
    assert_eq!(bench.disk.model.as_ref().unwrap().name, "counter");
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_server_whose_stream_breaks_is_ordered_again_to_serve_and_to_write() {
    let mut bench = Bench::started(config(JobSpec { checkpoint_steps: 4, ..train(1) }, 0));
    bench.holds_checkpoints = true;
    bench.run_to(5);
    let lost = bench.held_back.len();
    assert_eq!(lost, 2, "the orders for a checkpoint never arrive");
    bench.holds_checkpoints = false;
    let server = bench.servers.get_mut(&1).unwrap();
    server.is_serving = false; // The next order to serve sets it again.
    let incarnation = Incarnation(server.incarnation);
    bench.handle(Event::PsGone { ps: PsId(1), incarnation });
    bench.connect(ps(1));
    assert!(bench.servers[&1].is_serving);
    assert_eq!(bench.committed.len(), 1, "every server writes again");
    assert_eq!(bench.job.servers().generation().0, 1, "a broken stream alone restores nothing");
    bench.run();
    bench.expect_trained(1);
}

/// A job whose first checkpoint lacks only its manifest when a server dies.
fn dies_before_the_manifest() -> (Bench, CheckpointId) {
    let mut bench = Bench::started(config(JobSpec { checkpoint_steps: 4, ..train(1) }, 0));
    bench.holds_commits = true;
    bench.run_to(6);
    let [Effect::Commit { checkpoint, folder, .. }] = &bench.held_back[..] else {
        panic!("{:?}", bench.held_back)
    };
    let (checkpoint, folder) = (*checkpoint, folder.clone());
    bench.kill_now(ps(1), Ended::Signal(9));
    assert!(bench.folders.contains_key(&folder), "it is not deleted");
    assert_eq!(bench.job.servers().generation().0, 1, "nothing is loaded before it is complete");
    bench.holds_commits = false;
    (bench, checkpoint)
}

#[test]
fn a_server_lost_while_the_manifest_is_written_does_not_cost_the_checkpoint() {
    let (mut bench, checkpoint) = dies_before_the_manifest();
    let lost = bench.notes.iter().find(|note| note.kind == EventKind::PsLost).unwrap();
    assert!(lost.text.ends_with("restoring checkpoint 4"), "{}", lost.text);
    bench.handle(Event::Committed { checkpoint });
    assert_eq!((bench.job.servers().generation().0, bench.job.ledger().n_done()), (2, 4));
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_manifest_that_cannot_be_written_does_not_keep_servers_from_loading() {
    let (mut bench, checkpoint) = dies_before_the_manifest();
    bench.handle(Event::CheckpointFailed { checkpoint, error: "no space".into() });
    assert_eq!((bench.job.servers().generation().0, bench.job.ledger().n_done()), (2, 0));
    bench.run();
    bench.expect_trained(1);
    let (mut bench, _) = dies_before_the_manifest();
    bench.pass(Duration::from_secs(601), None);
    assert_eq!(bench.job.servers().generation().0, 2, "storage that hangs is not waited for");
}

#[test]
fn a_server_that_comes_back_as_another_process_has_lost_its_memory() {
    let mut bench = Bench::started(config(JobSpec { checkpoint_steps: 4, ..train(1) }, 0));
    bench.run_to(5);
    // It connects before the platform reports that its predecessor has ended.
    bench.servers.remove(&1);
    bench.launch(ps(1)).into_iter().skip(1).for_each(|event| bench.handle(event));
    assert_eq!((bench.job.servers().generation().0, bench.job.ledger().n_done()), (2, 4));
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_server_that_dies_while_loading_loads_again_when_it_is_back() {
    let mut bench = Bench::new(config(train(1), 0), Durable::default());
    bench.holds_loads = true;
    bench.handle(Event::Platform(Report::Running(Vec::new())));
    assert_eq!(bench.job.servers().phase(), ServersPhase::Loading);
    bench.kill_now(ps(0), Ended::Signal(9));
    let held = std::mem::take(&mut bench.held_back);
    assert_eq!(held.len(), 3, "one of them for the newcomer");
    bench.holds_loads = false;
    for effect in held.into_iter().skip(1) {
        let Effect::ToPs(id, order @ server::Order::Load(_)) = effect else { panic!() };
        let loaded = bench.obey_as_ps(id, order).remove(0);
        bench.handle(loaded);
    }
    assert_eq!(bench.job.servers().generation().0, 1);
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_server_that_never_finishes_loading_is_replaced() {
    let mut bench = Bench::new(config(train(1), 0), Durable::default());
    bench.holds_loads = true;
    bench.handle(Event::Platform(Report::Running(Vec::new())));
    bench.holds_loads = false;
    bench.pass(Duration::from_secs(601), None);
    assert!(bench.has_note(EventKind::PsLost));
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_server_that_always_crashes_at_the_same_place_ends_the_job() {
    let mut bench = Bench::started(config(train(1), 0));
    for _ in 0..4 {
        assert_eq!(bench.ended, None);
        bench.run_to(5);
        bench.kill_now(ps(0), Ended::Signal(6));
        bench.pass(Duration::from_secs(31), None);
    }
    assert!(bench.failure().contains("parameter servers crashed 4 times"));
}

#[test]
fn an_export_under_way_is_not_begun_again_when_a_server_is_lost() {
    let mut bench = Bench::started(config(train(1), 0));
    bench.run_to(9);
    let batch = BatchId { epoch: 0, index: 9 };
    bench.push_everywhere(batch);
    let generation = bench.job.servers().generation();
    let mut events = vec![batch_done(0, batch, generation, 0.0)];
    let mut n_exports = 0;
    let mut killed = false;
    while let Some(event) = events.pop() {
        for effect in bench.job.handle(event, bench.now) {
            match effect {
                Effect::ToPs(id, order) => events.extend(bench.obey_as_ps(id, order)),
                Effect::PrepareCheckpoint { folder, .. } => {
                    bench.folders.insert(folder, Default::default());
                }
                Effect::Commit { checkpoint, .. } => events.push(Event::Committed { checkpoint }),
                Effect::Export { .. } => n_exports += 1,
                Effect::Platform(Order::Launch { instance, .. }) => {
                    events.extend(bench.launch(instance));
                }
                Effect::Persist(_)
                | Effect::ToWorker(..)
                | Effect::CloseWorker(..)
                | Effect::RefuseWorker(..)
                | Effect::ClosePs(..)
                | Effect::Platform(_)
                | Effect::Delete(_)
                | Effect::JoinPredictions { .. }
                | Effect::EvaluationStarted { .. }
                | Effect::Evaluated(_)
                | Effect::Note(_)
                | Effect::Reply(_)
                | Effect::Ended(_) => {}
            }
        }
        if n_exports > 0 && !killed {
            killed = true;
            events.extend(bench.kill(ps(0), Ended::Signal(9)));
        }
    }
    assert_eq!((n_exports, killed), (1, true));
    bench.handle(Event::Exported);
    assert!(bench.job.is_ended());
}

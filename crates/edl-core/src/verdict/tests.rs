// SPDX-License-Identifier: Apache-2.0
//! The rules of verdicts; `crates/elasticdl/tests/e2e/verdict.rs` checks them with real faults.

use super::*;
use crate::platform::Role;

const WORKER: InstanceId = InstanceId { role: Role::Worker, id: 1 };

fn noted(at_secs: f64, kind: EventKind, text: &str) -> Noted {
    Noted { at_secs, kind, text: text.into() }
}

fn logged(at_secs: f64, instance: InstanceId, text: &str) -> Logged {
    Logged { at_secs, instance, text: text.into() }
}

fn failed(reason: &str, mut events: Vec<Noted>) -> Facts {
    events.push(noted(100.0, EventKind::Failed, reason));
    let (job, reason) = ("x".into(), reason.into());
    Facts { job, reason, state: JobState::Failed, events, now_secs: 100.0, ..Facts::default() }
}

fn died(at_secs: f64, how: Ended) -> Exited {
    let instance = InstanceId::MASTER;
    Exited { at_secs, instance, pid: 7, how, was_asked: false, ended_job: false }
}

const BATCH: &str = "batch 0/7 (records 3, 1)";

#[test]
fn the_first_cause_wins_over_its_symptoms() {
    let crashed = format!("{BATCH} failed on worker-1: the worker exited with code 1");
    let symptom = format!("{BATCH} failed on worker-2: cannot write `x`: No space left on device");
    let mut facts = failed(
        &format!("{BATCH} failed 2 times, most recently on worker-2: cannot write `x`"),
        vec![
            // Overcome long ago, and about other work.
            noted(1.0, EventKind::WorkerKilled, "worker-0 was killed (SIGKILL); reassigning"),
            noted(
                2.0,
                EventKind::WorkFailed,
                "batch 0/3 (records 9) failed on worker-0: record 9: x",
            ),
            noted(50.0, EventKind::WorkFailed, &crashed),
            noted(60.0, EventKind::WorkFailed, &symptom),
        ],
    );
    facts.logged = vec![
        logged(70.0, WORKER, "Traceback (most recent call last):\nTooLate: x"),
        logged(
            49.9,
            WORKER,
            "thread `compute` panicked at a.rs:7: index 9\n  edl_zoo::count::train",
        ),
        logged(50.2, WORKER, "the compute thread panicked"),
    ];
    let found = verdict(&facts);
    assert_eq!((found.cause, found.advice), (Cause::Panic, Advice::FixCode));
    assert_eq!((found.process, found.at_secs), (Some(WORKER), Some(50.0)));
    assert_eq!(found.records.as_deref(), Some(BATCH));
    assert!(found.verdict.contains("index 9"), "{}", found.verdict);
    assert!(found.stack.unwrap().contains("edl_zoo::count::train"));
    assert!(found.next.contains("elasticdl train --resume x"), "{}", found.next);
    let texts: Vec<&str> = found.evidence.iter().map(|line| line.text.as_str()).collect();
    assert!(texts[0].contains("panicked") && texts.last().unwrap().contains("the job failed"));
    assert!(!texts.iter().any(|text| text.contains("worker-0")), "{texts:?}");
}

#[test]
fn the_reason_for_the_end_has_the_traceback_that_events_leave_out() {
    let event = "batch 0/3 (records 9) failed on worker-1: KeyError: 1";
    let reason = "batch 0/3 (records 9) failed 2 times, most recently on worker-1: Traceback (most \
                  recent call last):\n  File \"m.py\", line 7, in deep_inside\nKeyError: 1";
    let found = verdict(&failed(reason, vec![noted(50.0, EventKind::WorkFailed, event)]));
    assert_eq!((found.cause, found.process), (Cause::CodeError, Some(WORKER)));
    assert!(found.stack.unwrap().contains("in deep_inside"));
}

#[test]
fn only_the_crashes_that_the_job_gave_up_for_count() {
    let crashed = |at, id| {
        noted(at, EventKind::WorkerCrashed, &format!("worker-{id} exited with code 1; see its log"))
    };
    let reason = "workers crashed 2 times, more than --relaunch_on_worker_failure=1 allows; see";
    let mut facts = failed(reason, vec![crashed(1.0, 0), crashed(50.0, 1), crashed(60.0, 2)]);
    let text = "cannot build the model: Traceback (most recent call last):\n  File \"m.py\", line 1\n\
                ModuleNotFoundError: No module named 'x'";
    facts.logged = vec![logged(49.0, WORKER, text)];
    let found = verdict(&facts);
    assert_eq!((found.cause, found.process), (Cause::CodeError, Some(WORKER)));
    assert!(
        found.verdict.ends_with("ModuleNotFoundError: No module named 'x'"),
        "{}",
        found.verdict
    );
    assert!(found.stack.unwrap().contains("m.py"));
}

#[test]
fn a_text_shows_its_cause() {
    let of_reason = |reason: &str| verdict(&failed(reason, Vec::new())).cause;
    for (reason, expected) in [
        ("batch 0/1 (records 1), step 2, worker-0: the loss is not finite; try", Cause::NonFinite),
        ("invalid optimizer: x", Cause::BadSettings),
        ("cannot write the result: Not a directory (os error 20)", Cause::NoAccess),
        ("cannot write the final checkpoint; free some disk space, then resume", Cause::DiskFull),
        ("cannot load any checkpoint (last tried `a`: wrong checksum)", Cause::DamagedCheckpoint),
        ("step 3: results differ bitwise from the other workers", Cause::BitsDiffer),
        ("something else", Cause::Unknown),
    ] {
        assert_eq!(of_reason(reason), expected, "{reason}");
    }
    let of_work = |error: &str| {
        let event =
            noted(1.0, EventKind::WorkFailed, &format!("{BATCH} failed on worker-1: {error}"));
        let reason = format!("{BATCH} failed once, on worker-1: {error}");
        verdict(&failed(&reason, vec![event])).cause
    };
    for (error, expected) in [
        ("record 7: label 99 is not below 10 (batch 0/7: 2 records)", Cause::BadData),
        ("a.recordio, chunk 0: corrupt chunk: its checksum is 1, but 2", Cause::BadData),
        ("the training data has changed: it has 1 records", Cause::DataChanged),
        ("`feed` returned 3 records; it must return 4 (batch 0/7: 2 records)", Cause::CodeError),
        ("no progress for 4s while training", Cause::Hang),
        ("the worker was killed by signal 11", Cause::Crash),
        ("cannot read `a`: No such file or directory", Cause::BadData),
    ] {
        assert_eq!(of_work(error), expected, "{error}");
    }
}

#[test]
fn a_master_that_cannot_live_is_known_by_how_it_died() {
    let mut facts = Facts { state: JobState::Interrupted, ..Facts::default() };
    assert_eq!(verdict(&facts).advice, Advice::Restart, "all processes are gone at once");
    let last = Exited { ended_job: true, ..died(30.0, Ended::Signal(9)) };
    facts.exits = vec![died(28.0, Ended::Signal(9)), last];
    let found = verdict(&facts);
    assert_eq!((found.cause, found.at_secs), (Cause::Killed, Some(28.0)));
    facts.exits = vec![Exited { how: Ended::Exit(1), ..last }];
    let text = "cannot listen on `127.0.0.1:1`: Address already in use (os error 98)";
    facts.logged = vec![logged(30.0, InstanceId::MASTER, text)];
    assert_eq!(verdict(&facts).cause, Cause::PortInUse);
}

#[test]
fn a_job_that_stalls_waits_for_the_one_that_is_stuck() {
    let mut facts = Facts { state: JobState::Running, now_secs: 100.0, ..Facts::default() };
    assert_eq!(verdict(&facts).cause, Cause::Healthy);
    let process = |id, why: &str| ProcessNow {
        instance: InstanceId { role: Role::Worker, id },
        state: InstanceState::Working,
        why: why.into(),
    };
    let busy = format!("training for 12 s without progress: {BATCH}");
    facts.processes = vec![process(0, "waiting for other workers for 12 s"), process(1, &busy)];
    facts.logged =
        vec![logged(90.0, WORKER, "Thread 0x1 (most recent call first):\n  File \"m.py\"")];
    let found = verdict(&facts);
    assert_eq!((found.cause, found.process), (Cause::Hang, Some(WORKER)));
    assert_eq!(found.records.as_deref(), Some(BATCH));
    assert!(found.stack.unwrap().contains("m.py"));
    let kill =
        |at| noted(at, EventKind::WorkerKilled, "worker-3 was killed (SIGKILL); reassigning");
    let events = vec![kill(80.0), kill(90.0), kill(95.0)];
    let often = Facts { processes: Vec::new(), events, ..facts.clone() };
    assert_eq!(verdict(&often).advice, Advice::FixCluster);
    let healed = Facts { now_secs: 500.0, ..often };
    assert_eq!(verdict(&healed).cause, Cause::Healthy);
    facts.reason = "cannot write checkpoints: No space left on device; retrying".into();
    assert_eq!(verdict(&facts).cause, Cause::DiskFull);
}

// SPDX-License-Identifier: Apache-2.0
//! A shell sleeps until the machine's next deadline: it misses none, and wakes for nothing else.

use std::time::Duration;

use super::bench::{Bench, config, spec};
use crate::job::EventKind;
use crate::job::{Durable, Event, STOP_TIMEOUT};
use crate::platform::Report;
use crate::spec::{JobSpec, Seconds};

const SECOND: Duration = Duration::from_secs(1);

/// Lets time pass until `is_over`, as a shell does: ticks only at deadlines, and heartbeats once a
/// second if `beats`. Returns the time and the number of ticks.
fn sleep(
    bench: &mut Bench,
    most: Duration,
    beats: bool,
    is_over: impl Fn(&Bench) -> bool,
) -> (Duration, u32) {
    let (start, mut n_ticks) = (bench.now, 0);
    let mut beat_at = start + SECOND;
    while !is_over(bench) && bench.now.since(start) < most {
        let deadline = bench.job.next_deadline(bench.now);
        if beats && beat_at <= deadline {
            bench.now = beat_at;
            beat_at = beat_at + SECOND;
            bench.heartbeats(None);
        } else {
            bench.now = deadline;
            n_ticks += 1;
            bench.handle(Event::Tick);
        }
    }
    (bench.now.since(start), n_ticks)
}

#[test]
fn a_job_without_processes_is_left_alone() {
    let mut bench = Bench::new(config(spec(), 0), Durable::default());
    let (_, n_ticks) = sleep(&mut bench, SECOND * 3600, false, |_| false);
    assert!(n_ticks <= 3, "{n_ticks} ticks in an hour");
}

#[test]
fn a_job_that_waits_for_its_workers_needs_no_ticks_between_heartbeats() {
    let mut bench = Bench::started(config(spec(), 0));
    let (_, n_ticks) = sleep(&mut bench, SECOND * 60, true, |_| false);
    assert!(n_ticks <= 3, "{n_ticks} ticks in a minute");
}

#[test]
fn every_deadline_is_met() {
    let check = |spec: JobSpec,
                 beats: bool,
                 prepare: &dyn Fn(&mut Bench),
                 is_over: &dyn Fn(&Bench) -> bool,
                 secs: u64| {
        let mut bench = Bench::new(config(spec, 0), Durable::default());
        prepare(&mut bench);
        let (after, n_ticks) = sleep(&mut bench, SECOND * 1000, beats, is_over);
        let expected = SECOND * u32::try_from(secs).unwrap();
        assert_eq!(after, expected, "{:?}", bench.notes);
        // Without heartbeats, the machine must make sure that it was not stopped itself.
        assert!(u64::from(n_ticks) <= 3 + secs / 2, "{n_ticks} ticks");
    };
    let start = |bench: &mut Bench| {
        bench.handle(Event::Platform(Report::Running(Vec::new())));
    };
    let begin = |bench: &mut Bench| {
        start(bench);
        bench.run_to(3);
    };
    let noted = |kind: EventKind| move |bench: &Bench| bench.has_note(kind);
    let silence = JobSpec { heartbeat_timeout_secs: 8.0, ..spec() };
    check(silence.clone(), false, &start, &noted(EventKind::WorkerSilent), 8);
    check(silence.clone(), false, &start, &noted(EventKind::PsLost), 8);
    let never_connects = |bench: &mut Bench| {
        bench.holds_launches = true;
        start(bench);
    };
    check(silence, false, &never_connects, &noted(EventKind::NotConnected), 18);
    let overdue = JobSpec { task_timeout_secs: 30, ..spec() };
    check(overdue, true, &begin, &noted(EventKind::WorkFailed), 30);
    check(
        JobSpec { max_time: Seconds(40), ..spec() },
        true,
        &begin,
        &noted(EventKind::MaxTime),
        40,
    );
    check(
        JobSpec { checkpoint_secs: 25, ..spec() },
        true,
        &begin,
        &noted(EventKind::Checkpoint),
        25,
    );
    let stop = |bench: &mut Bench| {
        begin(bench);
        bench.holds_checkpoints = true;
        bench.handle(Event::Stop { reason: "enough".into(), within: STOP_TIMEOUT });
    };
    check(spec(), true, &stop, &|bench| bench.ended.is_some(), 20);
    let load = |bench: &mut Bench| {
        bench.holds_loads = true;
        start(bench);
    };
    check(spec(), true, &load, &noted(EventKind::PsLost), 600);
}

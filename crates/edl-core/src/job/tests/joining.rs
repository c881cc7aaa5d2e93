// SPDX-License-Identifier: Apache-2.0
//! A change of members that is planned takes place after the steps that are begun, and not after
//! all that are allowed.

use std::time::Duration;

use super::bench::worker;
use super::members::{self, Members};
use crate::activity::WaitingFor;
use crate::id::WorldId;
use crate::job::{Command, Effect, Event, MemberReport};
use crate::platform::{Ended, Report};
use crate::spec::JobSpec;

const TIMEOUT: Duration = Duration::from_millis(500);

/// Two workers have trained 300 steps within 0.3 s and may train many more, and worker 2 is a spare.
fn fast(spec: JobSpec) -> Members {
    let mut members = Members::with_probes(JobSpec { spares: 1, num_epochs: 0, ..spec }, &[7; 3]);
    train(&mut members, 300);
    assert_eq!(members.job.ledger().n_done(), 300);
    assert!(until(&members) > 900, "{}", until(&members));
    members.effects.clear();
    members
}

fn train(members: &mut Members, last: u64) {
    let world = members.world();
    while members.job.ledger().n_done() < last {
        let step = until(members).min(members.job.ledger().n_done() + 100).min(last);
        members.now = members.now + Duration::from_millis(100);
        for id in [0, 1] {
            members.report(id, MemberReport::Stepped { world, step, hash: 0, loss: 0.5 });
        }
        members.handle(Event::Tick);
    }
}

fn until(members: &Members) -> u64 {
    members.job.worlds().map_or(0, |worlds| worlds.until())
}

fn after(members: &Members) -> Option<u64> {
    members.job.worlds().and_then(|worlds| worlds.current()).and_then(|world| world.after)
}

/// The steps up to which members of `world` may train, in the order of the messages.
fn goes(members: &Members, world: WorldId) -> Vec<u64> {
    let go = |effect: &Effect| {
        let Effect::ToWorker(_, Command::Go { world: of, until }) = effect else { return None };
        (*of == world).then_some(*until)
    };
    members.effects.iter().filter_map(go).collect()
}

fn scale(members: &mut Members, workers: u32) {
    members.handle(Event::Scale { workers });
}

#[test]
fn a_worker_joins_after_the_last_step_that_a_member_has_begun() {
    let mut members = fast(members::spec());
    let before = members.world();
    scale(&mut members, 3);
    assert_eq!(members.world(), before, "nothing is decided before all have answered");
    let number = members.asked_to_pause([0, 1]);
    members.report(0, MemberReport::Paused { world: before, number, step: 301 });
    members.report(0, MemberReport::Stepped { world: before, step: 301, hash: 0, loss: 0.5 });
    assert_eq!((members.world(), goes(&members, before)), (before, Vec::new()));
    members.report(1, MemberReport::Paused { world: before, number, step: 302 });
    assert_eq!((members.members(), after(&members)), (vec![0, 1, 2], Some(302)));
    assert_eq!(goes(&members, before), [302, 302], "worker 0 trains one more step, too");
    assert_eq!(until(&members), 302);
}

#[test]
fn a_worker_leaves_after_the_last_step_that_a_member_has_begun() {
    let mut members = fast(members::spec());
    scale(&mut members, 1);
    members.pause([(0, 301), (1, 301)]);
    assert_eq!((members.members(), after(&members)), (vec![0], Some(301)));
}

#[test]
fn a_worker_joins_after_all_steps_that_are_allowed_if_a_member_does_not_pause_in_time() {
    let mut members = fast(members::spec());
    let (before, allowed) = (members.world(), until(&members));
    scale(&mut members, 3);
    let number = members.asked_to_pause([0, 1]);
    members.report(0, MemberReport::Paused { world: before, number, step: 301 });
    members.pass(TIMEOUT - Duration::from_millis(100), &[WaitingFor::Nothing; 3]);
    assert_eq!(members.world(), before);
    members.pass(Duration::from_millis(100), &[WaitingFor::Nothing; 3]);
    assert_eq!((members.members(), after(&members)), (vec![0, 1, 2], Some(allowed)));
    assert_eq!(goes(&members, before), [allowed, allowed], "the one that has paused trains on");
    members.report(1, MemberReport::Paused { world: before, number, step: 302 });
    assert_eq!(until(&members), allowed, "that comes too late");
}

#[test]
fn members_train_on_if_the_worker_that_was_to_join_is_lost() {
    let mut members = fast(members::spec());
    let (before, allowed) = (members.world(), until(&members));
    scale(&mut members, 3);
    let first = members.asked_to_pause([0, 1]);
    members.report(0, MemberReport::Paused { world: before, number: first, step: 301 });
    let how = Ended::Signal(9);
    members.handle(Event::Platform(Report::Ended { instance: worker(2), pid: 2, how }));
    assert_eq!((members.world(), until(&members)), (before, allowed));
    assert_eq!(goes(&members, before), [allowed, allowed]);
    // The answer to the first request says nothing about the second one.
    members.join(3, 7);
    let second = members.asked_to_pause([0, 1]);
    assert!(second > first);
    members.report(1, MemberReport::Paused { world: before, number: first, step: 301 });
    members.report(0, MemberReport::Paused { world: before, number: second, step: 320 });
    assert_eq!(members.world(), before);
    members.report(1, MemberReport::Paused { world: before, number: second, step: 319 });
    assert_eq!((members.members(), after(&members)), (vec![0, 1, 3], Some(320)));
}

#[test]
fn a_member_that_is_lost_while_others_pause_is_replaced_at_once() {
    let mut members = fast(members::spec());
    scale(&mut members, 3);
    let (before, allowed) = (members.world(), until(&members));
    let number = members.asked_to_pause([0, 1]);
    members.report(0, MemberReport::Paused { world: before, number, step: 301 });
    let how = Ended::Signal(9);
    members.handle(Event::Platform(Report::Ended { instance: worker(1), pid: 1, how }));
    assert_eq!((members.members(), after(&members)), (vec![0, 2], None));
    assert_eq!(until(&members), allowed, "the lost one did not say what it had begun");
}

#[test]
fn a_worker_joins_after_the_step_for_which_a_checkpoint_is_ordered() {
    for n_done in [300, 700] {
        let mut members = fast(JobSpec { checkpoint_steps: 290, ..members::spec() });
        let ordered = members.job.checkpoints.in_progress().expect("a checkpoint is due");
        train(&mut members, n_done);
        scale(&mut members, 3);
        if until(&members) > ordered {
            members.pause([(0, n_done + 1), (1, n_done + 2)]);
        } else {
            assert_eq!(n_done, 300, "no step can be taken back");
        }
        assert_eq!((members.members(), after(&members)), (vec![0, 1, 2], Some(ordered)));
    }
}

#[test]
fn a_checkpoint_that_is_due_while_members_pause_waits_for_their_answers() {
    let mut members = fast(JobSpec { checkpoint_steps: 301, ..members::spec() });
    scale(&mut members, 3);
    let world = members.world();
    members.report(0, MemberReport::Stepped { world, step: 301, hash: 0, loss: 0.5 });
    assert!(members.job.checkpoints.is_due(|| 301, members.now));
    assert_eq!(members.job.checkpoints.in_progress(), None, "its step could be taken back");
}

#[test]
fn a_job_that_stops_while_members_pause_asks_them_once_more() {
    let mut members = fast(members::spec());
    scale(&mut members, 3);
    let (world, first) = (members.world(), members.asked_to_pause([0, 1]));
    members.report(0, MemberReport::Paused { world, number: first, step: 301 });
    let within = Duration::from_secs(5);
    members.handle(Event::Stop { reason: "enough".into(), within });
    assert!(members.asked_to_pause([0, 1]) > first);
    members.pause([(0, 301), (1, 302)]);
    assert_eq!((members.world(), until(&members)), (world, 302));
    assert_eq!(members.job.checkpoints.in_progress(), Some(302));
}

#[test]
fn a_job_that_stops_while_members_pause_lets_them_train_to_the_checkpoint_that_is_ordered() {
    let mut members = fast(JobSpec { checkpoint_steps: 290, ..members::spec() });
    train(&mut members, 700);
    let ordered = members.job.checkpoints.in_progress().expect("a checkpoint is due");
    let (world, allowed) = (members.world(), until(&members));
    assert!(701 < ordered && ordered < allowed);
    members.effects.clear();
    scale(&mut members, 3);
    let number = members.asked_to_pause([0, 1]);
    members.report(0, MemberReport::Paused { world, number, step: 701 });
    members.handle(Event::Stop { reason: "enough".into(), within: Duration::from_secs(5) });
    assert_eq!(goes(&members, world), [allowed, allowed], "nothing else would get them there");
}

// SPDX-License-Identifier: Apache-2.0
//! Pods that come and go, seen and unseen.

use edl_core::platform::{Ended, Role};
use edl_core::pod::{Container, Phase, Wait};
use proptest::prelude::*;

use super::*;

const W0: InstanceId = InstanceId { role: Role::Worker, id: 0 };
const GRACE: Duration = Duration::from_secs(30);

fn running() -> Facts {
    Facts { phase: Phase::Running, container: Container::Running, ..Facts::default() }
}

fn pod(instance: InstanceId, uid: &str, facts: Facts) -> Seen {
    Seen { instance, uid: uid.into(), facts, class: None, grace: GRACE }
}

/// A roster after its first list, which held a running `worker-0`.
fn listed(now: Instant) -> Roster {
    let mut roster = Roster::default();
    roster.list_begins();
    assert!(roster.seen(pod(W0, "a", running()), now).is_empty());
    assert_eq!(roster.list_ends(), [Report::Running(vec![(W0, pid_of("a"))])]);
    roster
}

#[test]
fn a_new_master_adopts_what_is_there_and_hears_what_waits() {
    let (mut roster, now) = (Roster::default(), Instant::now());
    let one = InstanceId { role: Role::Worker, id: 1 };
    roster.list_begins();
    roster.seen(pod(W0, "a", running()), now);
    roster.seen(pod(one, "b", Facts::default()), now);
    let two = InstanceId { role: Role::Worker, id: 2 };
    roster.seen(pod(two, "c", Facts { phase: Phase::Succeeded, ..Facts::default() }), now);
    let running = vec![(W0, pid_of("a")), (one, pid_of("b"))];
    let waiting = Report::Waiting { instance: one, why: Wait::Starting };
    assert_eq!(roster.list_ends(), [Report::Running(running), waiting]);
}

#[test]
fn a_pod_that_vanished_while_nobody_watched_was_deleted() {
    let mut roster = listed(Instant::now());
    roster.list_begins();
    let ended = Report::Ended { instance: W0, pid: pid_of("a"), how: Ended::Deleted };
    assert_eq!(roster.list_ends(), [ended]);
}

#[test]
fn a_pod_of_the_same_name_that_came_in_a_gap_ends_the_one_before() {
    let now = Instant::now();
    let mut roster = listed(now);
    let reports = roster.seen(pod(W0, "b", running()), now);
    assert_eq!(reports, [Report::Ended { instance: W0, pid: pid_of("a"), how: Ended::Deleted }]);
    assert_eq!(roster.strays(), [(W0, "b".into())], "nobody has asked for the new one");
}

#[test]
fn a_pod_that_is_preempted_is_told_twice_at_its_notice_and_at_its_end() {
    let now = Instant::now();
    let mut roster = listed(now);
    let facts =
        Facts { is_leaving: true, disruption: Some("PreemptionByScheduler".into()), ..running() };
    let (pid, how) = (pid_of("a"), Ended::Preempted);
    let told = roster.seen(pod(W0, "a", facts.clone()), now);
    assert_eq!(told, [Report::Leaving { instance: W0, pid, how }]);
    assert!(roster.seen(pod(W0, "a", facts.clone()), now).is_empty(), "that is no news");
    let gone = Facts { is_gone: true, ..facts };
    assert_eq!(roster.gone(pod(W0, "a", gone)), [Report::Ended { instance: W0, pid, how }]);
}

#[test]
fn a_node_that_never_says_that_a_pod_is_gone_is_not_waited_for() {
    let now = Instant::now();
    let mut roster = listed(now);
    roster.seen(pod(W0, "a", Facts { is_leaving: true, ..running() }), now);
    assert!(roster.overdue(now + GRACE).is_empty());
    assert_eq!(roster.overdue(now + GRACE + NODE_MARGIN), [(W0, "a".into())]);
    assert!(roster.overdue(now + GRACE + NODE_MARGIN).is_empty(), "that is under way");
}

/// One moment in the life of `worker-0`'s pods.
#[derive(Clone, Debug)]
enum Moment {
    /// A pod is made if there is none, as the master orders.
    Made,
    Runs,
    Leaves,
    Fails,
    Vanishes,
    /// The watch breaks here, and what is there is listed.
    Relist,
}

fn any_moment() -> impl Strategy<Value = Moment> {
    prop_oneof![
        Just(Moment::Made),
        Just(Moment::Runs),
        Just(Moment::Leaves),
        Just(Moment::Fails),
        Just(Moment::Vanishes),
        Just(Moment::Relist),
    ]
}

/// Plays a life; with `has_gaps` the watch sees only what lists show. Returns how
/// many pods were made, and the ends told.
fn play(moments: &[Moment], has_gaps: bool) -> (u32, Vec<u32>) {
    let (mut roster, now) = (Roster::default(), Instant::now());
    roster.list_begins();
    roster.list_ends();
    let (mut there, mut n_pods, mut ends): (Option<(String, Facts)>, u32, Vec<u32>) =
        (None, 0, Vec::new());
    for moment in moments {
        let mut reports = Vec::new();
        match moment {
            Moment::Made => {
                if there.is_none() && !roster.wants(W0) {
                    n_pods += 1;
                    there = Some((format!("uid-{n_pods}"), Facts::default()));
                    roster.want(W0);
                    let (uid, facts) = there.clone().unwrap();
                    // Who makes a pod knows of it without any watch.
                    reports = roster.seen(pod(W0, &uid, facts), now);
                }
            }
            Moment::Runs | Moment::Leaves | Moment::Fails => {
                if let Some((uid, facts)) = &mut there {
                    if facts.phase == Phase::Failed {
                        continue;
                    }
                    match moment {
                        Moment::Runs if facts.phase == Phase::Pending => *facts = running(),
                        Moment::Leaves => facts.is_leaving = true,
                        Moment::Fails => facts.phase = Phase::Failed,
                        Moment::Runs | Moment::Made | Moment::Vanishes | Moment::Relist => {}
                    }
                    if !has_gaps {
                        reports = roster.seen(pod(W0, uid, facts.clone()), now);
                    }
                }
            }
            Moment::Vanishes => {
                if let Some((uid, facts)) = there.take()
                    && !has_gaps
                {
                    let gone = Facts { is_gone: true, ..facts };
                    reports = roster.gone(pod(W0, &uid, gone));
                }
            }
            Moment::Relist => {
                roster.list_begins();
                if let Some((uid, facts)) = &there {
                    reports = roster.seen(pod(W0, uid, facts.clone()), now);
                }
                reports.extend(roster.list_ends());
            }
        }
        for report in reports {
            if let Report::Ended { pid, .. } = report {
                ends.push(pid);
            }
        }
    }
    (n_pods, ends)
}

proptest! {
    #[test]
    fn with_or_without_gaps_every_end_is_told_once(
        moments in proptest::collection::vec(any_moment(), 0..40),
    ) {
        for has_gaps in [false, true] {
            let mut moments = moments.clone();
            moments.extend([Moment::Vanishes, Moment::Relist]);
            let (n_pods, ends) = play(&moments, has_gaps);
            let made: Vec<u32> = (1..=n_pods).map(|n| pid_of(&format!("uid-{n}"))).collect();
            prop_assert_eq!(made, ends);
        }
    }
}

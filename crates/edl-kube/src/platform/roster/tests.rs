// SPDX-License-Identifier: Apache-2.0
//! Pods that come and go, seen and unseen.

use edl_core::platform::{Ended, Role};
use edl_core::pod::{Container, PodPhase, Wait};
use proptest::prelude::*;

use super::*;

const W0: InstanceId = InstanceId { role: Role::Worker, id: 0 };
const GRACE: Duration = Duration::from_secs(30);

fn running() -> PodFacts {
    PodFacts { phase: PodPhase::Running, container: Container::Running, ..PodFacts::default() }
}

fn pod(instance: InstanceId, uid: &str, facts: PodFacts) -> Seen {
    Seen { instance, uid: uid.into(), facts, class: None, grace: GRACE, started: None }
}

fn process(instance: InstanceId, uid: &str) -> Process {
    Process { instance, pid: pid_of(uid), age_ms: 0 }
}

/// A roster after its first list, which held a running `worker-0`.
fn listed(now: Instant) -> Roster {
    let mut roster = Roster::default();
    roster.list_begins();
    assert!(roster.seen(pod(W0, "a", running()), now).is_empty());
    assert_eq!(roster.list_ends(Timestamp::UNIX_EPOCH), [Report::Running(vec![process(W0, "a")])]);
    roster
}

#[test]
fn a_new_master_adopts_existing_pods_and_learns_which_wait() {
    let (mut roster, now) = (Roster::default(), Instant::now());
    let one = InstanceId { role: Role::Worker, id: 1 };
    roster.list_begins();
    roster.seen(pod(W0, "a", running()), now);
    roster.seen(pod(one, "b", PodFacts::default()), now);
    let two = InstanceId { role: Role::Worker, id: 2 };
    roster.seen(pod(two, "c", PodFacts { phase: PodPhase::Succeeded, ..PodFacts::default() }), now);
    let running = vec![process(W0, "a"), process(one, "b")];
    let waiting = Report::Waiting { instance: one, why: Wait::Starting };
    assert_eq!(roster.list_ends(Timestamp::UNIX_EPOCH), [Report::Running(running), waiting]);
}

#[test]
fn a_new_master_learns_how_long_the_processes_have_run() {
    let at = |secs| Timestamp::from_second(secs).unwrap();
    let ages = [(Some(at(40)), 60_000), (None, 0), (Some(at(101)), 0)];
    for (started, age_ms) in ages {
        let mut roster = Roster::default();
        roster.list_begins();
        roster.seen(Seen { started, ..pod(W0, "a", running()) }, Instant::now());
        let expected = Process { age_ms, ..process(W0, "a") };
        assert_eq!(roster.list_ends(at(100)), [Report::Running(vec![expected])], "{started:?}");
    }
}

#[test]
fn a_pod_that_vanished_during_a_gap_was_deleted() {
    let mut roster = listed(Instant::now());
    roster.list_begins();
    let ended = Report::Ended { instance: W0, pid: pid_of("a"), how: Ended::Deleted };
    assert_eq!(roster.list_ends(Timestamp::UNIX_EPOCH), [ended]);
}

#[test]
fn a_pod_of_the_same_name_that_came_in_a_gap_ends_the_one_before() {
    let now = Instant::now();
    let mut roster = listed(now);
    let reports = roster.seen(pod(W0, "b", running()), now);
    assert_eq!(reports, [Report::Ended { instance: W0, pid: pid_of("a"), how: Ended::Deleted }]);
    assert_eq!(roster.strays(), [(W0, "b".into())], "the new one was not requested");
}

#[test]
fn a_preempted_pod_is_reported_at_its_notice_and_at_its_end() {
    let now = Instant::now();
    let mut roster = listed(now);
    let facts = PodFacts {
        is_leaving: true,
        disruption: Some("PreemptionByScheduler".into()),
        ..running()
    };
    let (pid, how) = (pid_of("a"), Ended::Preempted);
    let reported = roster.seen(pod(W0, "a", facts.clone()), now);
    assert_eq!(reported, [Report::Leaving { instance: W0, pid, how }]);
    assert!(roster.seen(pod(W0, "a", facts.clone()), now).is_empty(), "nothing has changed");
    let gone = PodFacts { is_gone: true, ..facts };
    assert_eq!(roster.gone(pod(W0, "a", gone)), [Report::Ended { instance: W0, pid, how }]);
}

#[test]
fn a_pod_on_a_silent_node_is_deleted_by_force() {
    let now = Instant::now();
    let mut roster = listed(now);
    roster.seen(pod(W0, "a", PodFacts { is_leaving: true, ..running() }), now);
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
    /// The watch breaks here, and existing pods are listed.
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
/// many pods were made, and the ends reported.
fn replay(moments: &[Moment], has_gaps: bool) -> (u32, Vec<u32>) {
    let (mut roster, now) = (Roster::default(), Instant::now());
    roster.list_begins();
    roster.list_ends(Timestamp::UNIX_EPOCH);
    let (mut there, mut n_pods, mut ends): (Option<(String, PodFacts)>, u32, Vec<u32>) =
        (None, 0, Vec::new());
    for moment in moments {
        let mut reports = Vec::new();
        match moment {
            Moment::Made => {
                if there.is_none() && !roster.wants(W0) {
                    n_pods += 1;
                    there = Some((format!("uid-{n_pods}"), PodFacts::default()));
                    roster.want(W0);
                    let (uid, facts) = there.clone().unwrap();
                    // Who makes a pod knows of it without any watch.
                    reports = roster.seen(pod(W0, &uid, facts), now);
                }
            }
            Moment::Runs | Moment::Leaves | Moment::Fails => {
                if let Some((uid, facts)) = &mut there {
                    if facts.phase == PodPhase::Failed {
                        continue;
                    }
                    match moment {
                        Moment::Runs if facts.phase == PodPhase::Pending => *facts = running(),
                        Moment::Leaves => facts.is_leaving = true,
                        Moment::Fails => facts.phase = PodPhase::Failed,
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
                    let gone = PodFacts { is_gone: true, ..facts };
                    reports = roster.gone(pod(W0, &uid, gone));
                }
            }
            Moment::Relist => {
                roster.list_begins();
                if let Some((uid, facts)) = &there {
                    reports = roster.seen(pod(W0, uid, facts.clone()), now);
                }
                reports.extend(roster.list_ends(Timestamp::UNIX_EPOCH));
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
    fn with_or_without_gaps_every_end_is_reported_once(
        moments in proptest::collection::vec(any_moment(), 0..40),
    ) {
        for has_gaps in [false, true] {
            let mut moments = moments.clone();
            moments.extend([Moment::Vanishes, Moment::Relist]);
            let (n_pods, ends) = replay(&moments, has_gaps);
            let made: Vec<u32> = (1..=n_pods).map(|n| pid_of(&format!("uid-{n}"))).collect();
            prop_assert_eq!(made, ends);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Who is replaced and who is given up, after every kind of end.

use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use crate::exit::Exit;

const W0: InstanceId = InstanceId { role: Role::Worker, id: 0 };

fn started(workers: u32) -> Instances {
    let mut instances = Instances::new(workers, 1, 2);
    instances.report(&Report::Running(Vec::new()), Time::ZERO);
    for order in instances.reconcile(Time::ZERO) {
        let Order::Launch { instance, .. } = order else { panic!("nothing is too many") };
        instances.report(&Report::Started { instance, pid: 100 + instance.id }, Time::ZERO);
    }
    instances
}

fn launch(instance: InstanceId) -> Order {
    Order::Launch { instance, memory_percent: 100, is_spare: false }
}

fn ended(instance: InstanceId, pid: u32, how: Ended) -> Report {
    Report::Ended { instance, pid, how }
}

#[test]
fn a_killed_worker_is_replaced_at_once_under_a_new_number_and_not_counted() {
    let mut instances = started(2);
    for round in 0..10 {
        let id = InstanceId { role: Role::Worker, id: round };
        let pid = instances.running()[&id].pid.expect("it runs");
        let cause = instances.report(&ended(id, pid, Ended::Signal(9)), Time::ZERO);
        assert_eq!(cause, Some((id, Cause::Killed)));
        let next = InstanceId { role: Role::Worker, id: round + 2 };
        assert_eq!(instances.reconcile(Time::ZERO), [launch(next)]);
        instances.report(&Report::Started { instance: next, pid: 200 + round }, Time::ZERO);
    }
    assert_eq!(instances.give_up_reason(), None);
}

#[test]
fn only_workers_that_may_join_soon_are_counted() {
    let mut instances = Instances::new(2, 0, 2);
    instances.report(&Report::Running(Vec::new()), Time::ZERO);
    instances.reconcile(Time::ZERO);
    assert_eq!(instances.n_workers(), 2, "both start");
    for (why, expected) in [
        (Wait::Quota("2 pods".into()), 1),
        (Wait::Unschedulable("no node".into()), 1),
        (Wait::Starting, 2),
    ] {
        instances.report(&Report::Waiting { instance: W0, why }, Time::ZERO);
        assert_eq!(instances.n_workers(), expected);
    }
    let mut instances = started(2).with_spares(3);
    instances.reconcile(Time::ZERO);
    assert_eq!(instances.n_workers(), 2, "spares wait for the loss of a worker");
}

#[test]
fn a_lost_worker_is_replaced_by_a_process_that_starts_as_a_spare() {
    let mut instances = Instances::new(2, 0, 2).with_spares(1);
    instances.report(&Report::Running(Vec::new()), Time::ZERO);
    let launched = |orders: Vec<Order>| -> Vec<(u32, bool)> {
        let launched = orders.iter().map(|order| match order {
            Order::Launch { instance, is_spare, .. } => (instance.id, *is_spare),
            Order::Stop { .. } | Order::Dismiss { .. } | Order::Chaos { .. } => panic!("{order:?}"),
        });
        launched.collect()
    };
    let first = launched(instances.reconcile(Time::ZERO));
    assert_eq!(first, [(0, false), (1, false), (2, true)]);
    instances.report(&Report::Started { instance: W0, pid: 1 }, Time::ZERO);
    instances.report(&ended(W0, 1, Ended::Signal(9)), Time::ZERO);
    assert_eq!(launched(instances.reconcile(Time::ZERO)), [(3, true)]);
    assert_eq!((instances.workers_wanted(), instances.max_trainers()), (2, Some(2)));
    instances.scale(3);
    assert_eq!(launched(instances.reconcile(Time::ZERO)), [(4, true)], "a spare trains instead");
    instances.scale(0);
    assert_eq!(instances.reconcile(Time::ZERO).len(), 4, "all of them leave");
    assert_eq!(instances.max_trainers(), None);
}

#[test]
fn surplus_workers_on_contended_nodes_are_removed_first() {
    let mut instances = started(4);
    instances.let_first_leave(&[1, 9]);
    instances.scale(2);
    let stopped: Vec<u32> = instances
        .reconcile(Time::ZERO)
        .iter()
        .map(|order| match order {
            Order::Stop { instance, .. } => instance.id,
            Order::Launch { .. } | Order::Dismiss { .. } | Order::Chaos { .. } => {
                panic!("{order:?}")
            }
        })
        .collect();
    assert_eq!(stopped, [3, 1], "the one that is named, and the youngest");
}

#[test]
fn a_worker_that_keeps_crashing_is_given_up() {
    let mut instances = started(1);
    let mut now = Time::ZERO;
    for round in 0..3 {
        assert_eq!(instances.give_up_reason(), None);
        let id = InstanceId { role: Role::Worker, id: round };
        let pid = instances.running()[&id].pid.expect("it runs");
        instances.report(&ended(id, pid, Exit::Panicked.into()), now);
        assert!(instances.reconcile(now).is_empty(), "a crash is followed by a pause");
        now = now + MAX_BACKOFF;
        for order in instances.reconcile(now) {
            let Order::Launch { instance, .. } = order else { panic!() };
            instances.report(&Report::Started { instance, pid: 300 + round }, now);
        }
    }
    let expected =
        "workers crashed 3 times, more than --relaunch_on_worker_failure=2 allows; see their logs";
    assert_eq!(instances.give_up_reason().as_deref(), Some(expected));
}

#[test]
fn a_single_crash_that_ends_the_job_is_counted_in_the_singular() {
    let mut instances = Instances::new(1, 0, 0);
    instances.report(&Report::Running(Vec::new()), Time::ZERO);
    assert_eq!(instances.reconcile(Time::ZERO), [launch(W0)]);
    instances.report(&Report::Started { instance: W0, pid: 100 }, Time::ZERO);
    instances.report(&ended(W0, 100, Exit::Panicked.into()), Time::ZERO);
    let expected =
        "workers crashed once, more than --relaunch_on_worker_failure=0 allows; see their logs";
    assert_eq!(instances.give_up_reason().as_deref(), Some(expected));
}

#[test]
fn a_report_about_an_earlier_process_is_ignored() {
    let mut instances = started(1);
    assert_eq!(instances.report(&ended(W0, 999, Ended::Signal(9)), Time::ZERO), None);
    assert!(instances.running().contains_key(&W0));
}

#[test]
fn scaling_down_asks_the_youngest_to_leave() {
    let mut instances = started(3);
    instances.scale(1);
    let stops = instances.reconcile(Time::ZERO);
    assert_eq!(stops.len(), 2);
    assert!(matches!(stops[0], Order::Stop { instance, .. } if instance.id == 1));
    assert!(instances.reconcile(Time::ZERO).is_empty(), "they are leaving already");
}

#[test]
fn an_end_with_an_explanation_is_never_counted() {
    let explained = [Ended::Preempted, Ended::Evicted, Ended::Deleted, Ended::NodeLost];
    for how in explained {
        let mut instances = started(1);
        for round in 0..20 {
            let id = InstanceId { role: Role::Worker, id: round };
            let pid = instances.running()[&id].pid.expect("it runs");
            let cause = instances.report(&ended(id, pid, how), Time::ZERO);
            assert_eq!(cause, Some((id, Cause::Killed)), "{how:?}");
            let next = InstanceId { role: Role::Worker, id: round + 1 };
            assert_eq!(instances.reconcile(Time::ZERO), [launch(next)]);
            instances.report(&Report::Started { instance: next, pid: 200 + round }, Time::ZERO);
        }
        assert_eq!(instances.give_up_reason(), None);
    }
}

#[test]
fn a_process_that_ran_out_of_memory_gets_more_up_to_a_limit() {
    let mut instances = started(1);
    let (mut now, mut shares) = (Time::ZERO, Vec::new());
    for round in 0..20 {
        if instances.give_up_reason().is_some() {
            break;
        }
        let id = InstanceId { role: Role::Worker, id: round };
        let pid = instances.running()[&id].pid.expect("it runs");
        instances.report(&ended(id, pid, Ended::OutOfMemory), now);
        now = now + MAX_BACKOFF;
        for order in instances.reconcile(now) {
            let Order::Launch { instance, memory_percent, .. } = order else { panic!() };
            shares.push(memory_percent);
            instances.report(&Report::Started { instance, pid: 300 + round }, now);
        }
    }
    assert_eq!(shares, [150, 225, 340, 500, 500, 500, 500]);
    assert!(instances.give_up_reason().is_some(), "a leak must not get more memory forever");
    assert_eq!(instances.memory_percent(Role::Ps), 100, "another part is not at fault");
}

#[test]
fn a_machine_that_keeps_running_out_of_memory_ends_the_job() {
    let mut instances = started(1);
    for n in 1..=3 {
        let id = InstanceId { role: Role::Worker, id: n - 1 };
        let how = Ended::MachineOutOfMemory;
        let pid = instances.running()[&id].pid.unwrap_or(7);
        let cause = instances.report(&ended(id, pid, how), Time::ZERO);
        assert_eq!(cause, Some((id, Cause::Crashed)));
        assert_eq!(instances.give_up_reason().is_some(), n == 3, "{n}");
        assert_eq!(instances.memory_percent(Role::Worker), 100, "the machine has no more memory");
        instances.reconcile(Time::ZERO + Duration::from_secs(100 * u64::from(n)));
    }
}

#[test]
fn a_process_that_is_about_to_exit_is_replaced_at_once() {
    let mut instances = started(2);
    let how = Ended::Preempted;
    instances.report(&Report::Leaving { instance: W0, pid: 100, how }, Time::ZERO);
    let next = InstanceId { role: Role::Worker, id: 2 };
    assert_eq!(instances.reconcile(Time::ZERO), [launch(next)]);
    let cause = instances.report(&ended(W0, 100, how), Time::ZERO);
    assert_eq!(cause, Some((W0, Cause::Left)));
    assert!(instances.reconcile(Time::ZERO).is_empty(), "it has its replacement");
}

#[test]
fn a_waiting_process_is_shown_with_its_reason_and_removed_first() {
    let mut instances = started(1);
    instances.scale(3);
    assert_eq!(instances.reconcile(Time::ZERO).len(), 2);
    let [one, two] = [1, 2].map(|id| InstanceId { role: Role::Worker, id });
    let why = Wait::Quota("exceeded quota".into());
    instances.report(&Report::Waiting { instance: one, why: why.clone() }, Time::ZERO);
    instances.report(&Report::Started { instance: two, pid: 7 }, Time::ZERO);
    assert_eq!(instances.running()[&one].waits, Some(why));
    assert!(instances.reconcile(Time::ZERO).is_empty(), "it is asked for already");
    instances.scale(2);
    let stops = instances.reconcile(Time::ZERO);
    assert!(matches!(stops[..], [Order::Stop { instance, .. }] if instance == one), "{stops:?}");
}

fn any_end() -> impl Strategy<Value = Ended> {
    select(vec![
        Ended::CLEAN,
        Exit::Failed.into(),
        Ended::Signal(9),
        Ended::Signal(11),
        Ended::Preempted,
        Ended::Evicted,
        Ended::OutOfMemory,
        Ended::MachineOutOfMemory,
        Ended::Deleted,
        Ended::NodeLost,
    ])
}

/// One thing that befalls the process at a place among those that run.
#[derive(Clone, Debug)]
enum Fate {
    Ends(Ended),
    Leaves,
    Waits,
    Starts,
}

fn any_fate() -> impl Strategy<Value = (usize, Fate)> {
    let fate = prop_oneof![
        any_end().prop_map(Fate::Ends),
        Just(Fate::Leaves),
        Just(Fate::Waits),
        Just(Fate::Starts),
    ];
    (any::<usize>(), fate)
}

proptest! {
    #[test]
    fn wanted_processes_always_run_or_are_requested(
        fates in proptest::collection::vec(any_fate(), 0..60),
        workers in 0..5u32,
    ) {
        let mut instances = Instances::new(workers, 2, 1000);
        instances.report(&Report::Running(Vec::new()), Time::ZERO);
        let (mut now, mut next_pid, mut used) = (Time::ZERO, 1, BTreeMap::new());
        for (place, fate) in fates {
            let running: Vec<InstanceId> = instances.running().keys().copied().collect();
            if let Some(instance) = running.get(place % running.len().max(1)).copied() {
                let pid = instances.running()[&instance].pid.unwrap_or(0);
                let report = match fate {
                    Fate::Ends(how) => Report::Ended { instance, pid, how },
                    Fate::Leaves => Report::Leaving { instance, pid, how: Ended::Deleted },
                    Fate::Waits => Report::Waiting { instance, why: Wait::Starting },
                    Fate::Starts => {
                        next_pid += 1;
                        Report::Started { instance, pid: next_pid }
                    }
                };
                instances.report(&report, now);
            }
            now = now + MAX_BACKOFF;
            for order in instances.reconcile(now) {
                let Order::Launch { instance, memory_percent, .. } = order else { continue };
                prop_assert!((100..=500).contains(&memory_percent));
                if instance.role == Role::Worker {
                    prop_assert!(used.insert(instance, ()).is_none(), "a number is used once");
                }
            }
            let staying = instances.staying_workers().len();
            prop_assert_eq!(staying, workers as usize);
            let servers = instances.running().keys().filter(|id| id.role == Role::Ps).count();
            prop_assert_eq!(servers, 2);
        }
    }
}

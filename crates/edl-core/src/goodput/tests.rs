// SPDX-License-Identifier: Apache-2.0
//! Losses, silence, repeated work, and a naive model of the goodput.

use proptest::prelude::*;

use super::*;

const PS: InstanceId = InstanceId { role: Role::Ps, id: 0 };
const ONE: Incarnation = Incarnation(1);

fn worker(id: u32) -> InstanceId {
    InstanceId { role: Role::Worker, id }
}

fn at(secs: u64) -> Time {
    Time::since_origin(Duration::from_secs(secs))
}

fn report(parts: &[(TimeKind, u64)], step: u64) -> TimeReport {
    let mut spent = Spent::default();
    for (kind, secs) in parts {
        spent.add(*kind, Duration::from_secs(*secs));
    }
    let last = parts.last().map_or(TimeKind::Idle, |(kind, _)| *kind);
    TimeReport { spent, last, step, records: 0 }
}

fn secs(spent: Spent) -> Vec<(&'static str, u64)> {
    let parts = spent.iter().filter(|(_, time)| !time.is_zero());
    parts.map(|(kind, time)| (kind.name(), time.as_secs())).collect()
}

#[test]
fn records_are_counted_for_each_process_and_across_a_resume() {
    let mut goodput = Goodput::default();
    let report = |records| TimeReport { records, ..TimeReport::default() };
    for (incarnation, records) in [(1, 10), (1, 30), (2, 5)] {
        let incarnation = Incarnation(incarnation);
        goodput.connected(worker(0), incarnation, at(0));
        goodput.report(worker(0), incarnation, report(records), &(0..0), at(1));
    }
    assert_eq!(goodput.records(), 35);
    let mut resumed = goodput.saved(at(2)).all_gone().resumed(Duration::ZERO, at(0));
    resumed.connected(worker(0), Incarnation(3), at(0));
    resumed.report(worker(0), Incarnation(3), report(7), &(0..0), at(1));
    assert_eq!(resumed.records(), 42);
}

#[test]
fn a_report_that_comes_late_takes_time_from_the_next_one() {
    let mut goodput = Goodput::default();
    goodput.connected(worker(0), ONE, at(0));
    // The worker computes for 20 s, but its first report arrives 2 s late.
    goodput.report(worker(0), ONE, report(&[(TimeKind::Idle, 10)], 0), &(0..0), at(12));
    let second = report(&[(TimeKind::Idle, 10), (TimeKind::Compute, 20)], 0);
    goodput.report(worker(0), ONE, second, &(0..0), at(30));
    assert_eq!(secs(goodput.spent(worker(0), at(30))), [("compute", 18), ("idle", 12)]);
}

#[test]
fn a_lost_workers_replacement_pays_for_being_down_and_for_healing() {
    let mut goodput = Goodput::default();
    goodput.launched(worker(0), false, at(0));
    goodput.connected(worker(0), ONE, at(1));
    goodput.report(
        worker(0),
        ONE,
        report(&[(TimeKind::Idle, 1), (TimeKind::Compute, 8)], 0),
        &(0..0),
        at(10),
    );
    goodput.lost(worker(0), at(11));
    assert_eq!(
        secs(goodput.total(Role::Worker, at(12))),
        [("compute", 9), ("idle", 2), ("down", 1)]
    );
    goodput.launched(worker(1), false, at(14));
    goodput.connected(worker(1), Incarnation(2), at(16));
    let first = report(&[(TimeKind::Idle, 3), (TimeKind::Compute, 1)], 0);
    goodput.report(worker(1), Incarnation(2), first, &(0..0), at(20));
    assert_eq!(
        secs(goodput.spent(worker(1), at(20))),
        [("compute", 1), ("heal", 5), ("down", 3)],
        "from the loss of the one before"
    );
    assert_eq!(goodput.total(Role::Worker, at(20)).total(), Duration::from_secs(20));
}

#[test]
fn a_spare_costs_nothing_until_it_takes_the_place_of_a_lost_worker() {
    let mut goodput = Goodput::default();
    let spares = |ids: &[u32]| ids.iter().copied().map(WorkerId).collect();
    goodput.launched(worker(0), false, at(0));
    goodput.launched(worker(1), true, at(0));
    for id in [0, 1] {
        goodput.connected(worker(id), ONE, at(0));
    }
    goodput.report(worker(1), ONE, report(&[(TimeKind::Idle, 9)], 0), &(0..0), at(9));
    goodput.report(worker(0), ONE, report(&[(TimeKind::Compute, 10)], 0), &(0..0), at(10));
    assert_eq!(secs(goodput.total(Role::Worker, at(10))), [("compute", 10)]);
    goodput.lost(worker(0), at(10));
    goodput.launched(worker(2), true, at(11));
    goodput.set_spares(&spares(&[2]), at(12));
    let news = report(&[(TimeKind::Idle, 9), (TimeKind::Compute, 3)], 0);
    goodput.report(worker(1), ONE, news, &(0..0), at(15));
    let expected = [("compute", 3), ("down", 2)];
    assert_eq!(secs(goodput.spent(worker(1), at(15))), expected, "it was needed from the loss on");
    goodput.lost(worker(2), at(20));
    let total = goodput.total(Role::Worker, at(15));
    assert_eq!(secs(total), [("compute", 13), ("down", 2)], "a lost spare leaves no place free");
}

#[test]
fn a_silent_worker_was_not_there() {
    let mut goodput = Goodput::default();
    goodput.connected(worker(0), ONE, at(0));
    goodput.report(worker(0), ONE, report(&[(TimeKind::Compute, 10)], 0), &(0..0), at(10));
    goodput.lost(worker(0), at(40));
    assert_eq!(secs(goodput.total(Role::Worker, at(40))), [("compute", 10), ("down", 30)]);
}

#[test]
fn work_that_had_been_done_is_redone() {
    let mut goodput = Goodput::default();
    goodput.connected(worker(0), ONE, at(0));
    for repeated in [false, true, true, false] {
        goodput.finished(worker(0), repeated);
    }
    goodput.report(worker(0), ONE, report(&[(TimeKind::Compute, 8)], 0), &(0..0), at(8));
    assert_eq!(secs(goodput.spent(worker(0), at(8))), [("compute", 4), ("redo", 4)]);
    assert_eq!((goodput.trained(), goodput.repeated()), (4, 2));
    // Of the steps 1 to 10, those after 3 and up to 8 were taken before.
    goodput.report(worker(0), ONE, report(&[(TimeKind::Compute, 18)], 10), &(3..8), at(18));
    assert_eq!(secs(goodput.spent(worker(0), at(18))), [("compute", 9), ("redo", 9)]);
}

#[test]
fn a_server_keeps_its_account_and_the_next_master_continues_it() {
    let mut goodput = Goodput::default();
    goodput.launched(PS, false, at(0));
    goodput.connected(PS, ONE, at(0));
    goodput.report(PS, ONE, report(&[(TimeKind::Compute, 5)], 0), &(0..0), at(5));
    goodput.lost(PS, at(6));
    goodput.launched(PS, false, at(8));
    goodput.connected(PS, Incarnation(2), at(9));
    let saved = serde_json::to_string(&goodput.saved(at(10))).unwrap();
    let goodput: Goodput = serde_json::from_str(&saved).unwrap();
    let mut goodput = goodput.resumed(Duration::from_secs(5), Time::ZERO);
    goodput.connected(PS, Incarnation(2), at(1));
    goodput.report(
        PS,
        Incarnation(2),
        report(&[(TimeKind::Heal, 2), (TimeKind::Compute, 5)], 0),
        &(0..0),
        at(1),
    );
    assert_eq!(secs(goodput.spent(PS, at(1))), [("compute", 11), ("heal", 3), ("down", 2)]);
}

/// Something that can happen to the goodput.
#[derive(Clone, Debug)]
enum Step {
    Launched(u32),
    Connected(u32, u64),
    Report(u32, u64, [u64; 8]),
    Finished(u32, bool),
    Lost(u32),
    Left(u32),
    Saved,
}

fn step() -> impl Strategy<Value = Step> {
    let id = 0u32..4;
    prop_oneof![
        id.clone().prop_map(Step::Launched),
        (id.clone(), 1u64..3).prop_map(|(id, life)| Step::Connected(id, life)),
        (id.clone(), 1u64..3, prop::array::uniform8(0u64..5_000_000_000))
            .prop_map(|(id, life, parts)| Step::Report(id, life, parts)),
        (id.clone(), any::<bool>()).prop_map(|(id, again)| Step::Finished(id, again)),
        id.clone().prop_map(Step::Lost),
        id.prop_map(Step::Left),
        Just(Step::Saved),
    ]
}

proptest! {
    #[test]
    fn parts_add_up_to_the_time_that_has_passed(
        steps in prop::collection::vec((step(), 0u64..4_000_000_000), 1..60)
    ) {
        let mut goodput = Goodput::default();
        let mut now = Time::ZERO;
        // A naive model: who has an account since when, and what gone ones have lived.
        let mut open: BTreeMap<InstanceId, Time> = BTreeMap::new();
        let mut vacant: VecDeque<Time> = VecDeque::new();
        let mut over = Duration::ZERO;
        for (step, pause) in steps {
            now = now + Duration::from_nanos(pause);
            match step {
                Step::Launched(id) => {
                    goodput.launched(worker(id), false, now);
                    if let std::collections::btree_map::Entry::Vacant(entry) = open.entry(worker(id)) {
                        entry.insert(vacant.pop_front().unwrap_or(now));
                    }
                }
                Step::Connected(id, life) => {
                    goodput.connected(worker(id), Incarnation(life), now);
                    open.entry(worker(id)).or_insert(now);
                }
                Step::Report(id, life, parts) => {
                    let report = TimeReport { spent: Spent::from_nanos(parts), ..TimeReport::default() };
                    goodput.report(worker(id), Incarnation(life), report, &(0..0), now);
                }
                Step::Finished(id, again) => goodput.finished(worker(id), again),
                Step::Lost(id) => {
                    goodput.lost(worker(id), now);
                    if let Some(since) = open.remove(&worker(id)) {
                        over += now.since(since);
                        vacant.push_back(now);
                    }
                }
                Step::Left(id) => {
                    goodput.left(worker(id), now);
                    over += open.remove(&worker(id)).map_or(Duration::ZERO, |since| now.since(since));
                }
                Step::Saved => {
                    over += vacant.drain(..).map(|since| now.since(since)).sum::<Duration>();
                    goodput = goodput.saved(now).resumed(Duration::ZERO, now);
                }
            }
            for (id, since) in &open {
                prop_assert_eq!(goodput.spent(*id, now).total(), now.since(*since));
            }
            let alive: Duration = open.values().map(|since| now.since(*since)).sum();
            let missing: Duration = vacant.iter().map(|since| now.since(*since)).sum();
            prop_assert_eq!(goodput.total(Role::Worker, now).total(), over + alive + missing);
        }
    }
}

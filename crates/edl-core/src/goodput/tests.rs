// SPDX-License-Identifier: Apache-2.0
//! Losses, silence, repeated work, and a naive model of the books.

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

fn told(parts: &[(Kind, u64)], step: u64) -> Told {
    let mut spent = Spent::default();
    for (kind, secs) in parts {
        spent.add(*kind, Duration::from_secs(*secs));
    }
    Told { spent, last: parts.last().map_or(Kind::Idle, |(kind, _)| *kind), step }
}

fn secs(spent: Spent) -> Vec<(&'static str, u64)> {
    let parts = spent.iter().filter(|(_, time)| !time.is_zero());
    parts.map(|(kind, time)| (kind.name(), time.as_secs())).collect()
}

#[test]
fn a_lost_workers_replacement_pays_for_being_down_and_for_healing() {
    let mut books = Goodput::default();
    books.launched(worker(0), at(0));
    books.connected(worker(0), ONE, at(1));
    books.tell(worker(0), ONE, told(&[(Kind::Idle, 1), (Kind::Compute, 8)], 0), &(0..0), at(10));
    books.lost(worker(0), at(11));
    assert_eq!(secs(books.total(Role::Worker, at(12))), [("compute", 9), ("idle", 2), ("down", 1)]);
    books.launched(worker(1), at(14));
    books.connected(worker(1), Incarnation(2), at(16));
    let first = told(&[(Kind::Idle, 3), (Kind::Compute, 1)], 0);
    books.tell(worker(1), Incarnation(2), first, &(0..0), at(20));
    assert_eq!(
        secs(books.spent(worker(1), at(20))),
        [("compute", 1), ("heal", 5), ("down", 3)],
        "from the loss of the one before"
    );
    assert_eq!(books.total(Role::Worker, at(20)).total(), Duration::from_secs(20));
}

#[test]
fn a_silent_worker_was_not_there() {
    let mut books = Goodput::default();
    books.connected(worker(0), ONE, at(0));
    books.tell(worker(0), ONE, told(&[(Kind::Compute, 10)], 0), &(0..0), at(10));
    books.lost(worker(0), at(40));
    assert_eq!(secs(books.total(Role::Worker, at(40))), [("compute", 10), ("down", 30)]);
}

#[test]
fn work_that_had_been_done_is_redone() {
    let mut books = Goodput::default();
    books.connected(worker(0), ONE, at(0));
    for repeated in [false, true, true, false] {
        books.finished(worker(0), repeated);
    }
    books.tell(worker(0), ONE, told(&[(Kind::Compute, 8)], 0), &(0..0), at(8));
    assert_eq!(secs(books.spent(worker(0), at(8))), [("compute", 4), ("redo", 4)]);
    assert_eq!((books.trained(), books.repeated()), (4, 2));
    // Of the steps 1 to 10, those after 3 and up to 8 were taken before.
    books.tell(worker(0), ONE, told(&[(Kind::Compute, 18)], 10), &(3..8), at(18));
    assert_eq!(secs(books.spent(worker(0), at(18))), [("compute", 9), ("redo", 9)]);
}

#[test]
fn a_server_keeps_its_account_and_the_next_master_goes_on_with_it() {
    let mut books = Goodput::default();
    books.launched(PS, at(0));
    books.connected(PS, ONE, at(0));
    books.tell(PS, ONE, told(&[(Kind::Compute, 5)], 0), &(0..0), at(5));
    books.lost(PS, at(6));
    books.launched(PS, at(8));
    books.connected(PS, Incarnation(2), at(9));
    let saved = serde_json::to_string(&books.saved(at(10))).unwrap();
    let books: Goodput = serde_json::from_str(&saved).unwrap();
    let mut books = books.resumed(Duration::from_secs(5), Time::ZERO);
    books.connected(PS, Incarnation(2), at(1));
    books.tell(PS, Incarnation(2), told(&[(Kind::Heal, 2), (Kind::Compute, 5)], 0), &(0..0), at(1));
    assert_eq!(secs(books.spent(PS, at(1))), [("compute", 11), ("heal", 3), ("down", 2)]);
}

/// Something that can happen to the books.
#[derive(Clone, Debug)]
enum Step {
    Launched(u32),
    Connected(u32, u64),
    Told(u32, u64, [u64; 8]),
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
            .prop_map(|(id, life, parts)| Step::Told(id, life, parts)),
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
        let mut books = Goodput::default();
        let mut now = Time::ZERO;
        // A naive model: who has an account since when, and what gone ones have lived.
        let mut open: BTreeMap<InstanceId, Time> = BTreeMap::new();
        let mut vacant: VecDeque<Time> = VecDeque::new();
        let mut over = Duration::ZERO;
        for (step, pause) in steps {
            now = now + Duration::from_nanos(pause);
            match step {
                Step::Launched(id) => {
                    books.launched(worker(id), now);
                    if let std::collections::btree_map::Entry::Vacant(entry) = open.entry(worker(id)) {
                        entry.insert(vacant.pop_front().unwrap_or(now));
                    }
                }
                Step::Connected(id, life) => {
                    books.connected(worker(id), Incarnation(life), now);
                    open.entry(worker(id)).or_insert(now);
                }
                Step::Told(id, life, parts) => {
                    let told = Told { spent: Spent::from_nanos(parts), ..Told::default() };
                    books.tell(worker(id), Incarnation(life), told, &(0..0), now);
                }
                Step::Finished(id, again) => books.finished(worker(id), again),
                Step::Lost(id) => {
                    books.lost(worker(id), now);
                    if let Some(since) = open.remove(&worker(id)) {
                        over += now.since(since);
                        vacant.push_back(now);
                    }
                }
                Step::Left(id) => {
                    books.left(worker(id), now);
                    over += open.remove(&worker(id)).map_or(Duration::ZERO, |since| now.since(since));
                }
                Step::Saved => {
                    over += vacant.drain(..).map(|since| now.since(since)).sum::<Duration>();
                    books = books.saved(now).resumed(Duration::ZERO, now);
                }
            }
            for (id, since) in &open {
                prop_assert_eq!(books.spent(*id, now).total(), now.since(*since));
            }
            let alive: Duration = open.values().map(|since| now.since(*since)).sum();
            let missing: Duration = vacant.iter().map(|since| now.since(*since)).sum();
            prop_assert_eq!(books.total(Role::Worker, now).total(), over + alive + missing);
        }
    }
}

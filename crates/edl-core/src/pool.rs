// SPDX-License-Identifier: Apache-2.0
//! Assigns numbered items to workers under leases, and takes them back when a lease ends early.
//!
//! An item is *todo*, *assigned* or *done*: exactly one of the three, at all times. Leases only share
//! out work: any process may report at any time that an item is done.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::id::{LeaseId, WorkerId};
use crate::runs::Runs;
use crate::time::Time;

/// The items `0..n`, and the workers that hold them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pool {
    n: u32,
    todo: Runs,
    by_worker: BTreeMap<WorkerId, Held>,
    /// The worker and the lease that hold an item.
    holder: BTreeMap<u32, (WorkerId, LeaseId)>,
    /// When to look at the leases of each worker. Deadlines move far more often than they pass, so
    /// only the first entry follows them at once; the others may be too early.
    deadlines: BTreeSet<(Time, WorkerId)>,
    n_done: u32,
    /// One above the highest item ever assigned or done.
    frontier: u32,
    /// Items that a worker held when it was lost, one of which may be why. Each is assigned alone,
    /// so the next loss shows which one.
    isolated: BTreeSet<u32>,
}

/// The leases of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Held {
    /// At least one, in order of their ids.
    leases: Vec<Lease>,
    /// Its entry in `Pool::deadlines`.
    listed: Time,
}

impl Held {
    fn first_deadline(&self) -> Time {
        let deadlines = self.leases.iter().map(|lease| lease.deadline);
        deadlines.min().expect("a worker that is listed holds something")
    }

    fn extend(&mut self, deadline: Time) {
        self.leases.iter_mut().for_each(|lease| lease.extend(deadline));
    }
}

/// The assignment of some items to one worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    pub id: LeaseId,
    pub worker: WorkerId,
    /// Not yet done; in order.
    pub open: Vec<u32>,
    /// Those of them that are computed: they only wait to be applied with others.
    pub computed: BTreeSet<u32>,
    pub deadline: Time,
}

impl Lease {
    /// What its worker has yet to compute, in order.
    pub fn uncomputed(&self) -> impl Iterator<Item = u32> + '_ {
        self.open.iter().copied().filter(|item| !self.computed.contains(item))
    }

    /// Moves its deadline to a later time, never to an earlier one.
    fn extend(&mut self, deadline: Time) {
        self.deadline = self.deadline.max(deadline);
    }
}

impl Pool {
    #[must_use]
    pub fn new(n: u32) -> Self {
        Self::with_done(n, &Runs::default())
    }

    /// A pool in which some items are done already.
    #[must_use]
    pub fn with_done(n: u32, done: &Runs) -> Self {
        Self {
            n,
            todo: Runs::from(0..n).xor(done),
            by_worker: BTreeMap::new(),
            holder: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            n_done: done.len(),
            frontier: done.end(),
            isolated: BTreeSet::new(),
        }
    }

    /// Assigns up to `most` consecutive items below `limit`, the lowest first; an isolated one alone.
    pub fn assign(
        &mut self,
        lease: LeaseId,
        worker: WorkerId,
        limit: u32,
        most: impl FnOnce(u32) -> u32,
        deadline: Time,
    ) -> Option<Range<u32>> {
        let start = self.first_todo().filter(|start| *start < limit)?;
        let mut stop = limit.min(start.saturating_add(most(start).max(1)));
        if let Some(isolated) = self.isolated.range(start..).next() {
            stop = stop.min(*isolated.max(&(start + 1)));
        }
        let items = self.todo.take_first(stop);
        self.hold(lease, worker, items.clone(), deadline);
        Some(items)
    }

    /// The next item to assign.
    #[must_use]
    pub fn first_todo(&self) -> Option<u32> {
        self.todo.first().map(|run| run.start)
    }

    /// Whether an item below `limit` waits for a worker.
    #[must_use]
    pub fn has_todo(&self, limit: u32) -> bool {
        self.first_todo().is_some_and(|start| start < limit)
    }

    /// Records that `worker` already works on those of `items` that are todo.
    pub fn adopt(&mut self, lease: LeaseId, worker: WorkerId, items: &[u32], deadline: Time) {
        if self.lease(worker, lease).is_some() {
            return; // Claimed twice.
        }
        for item in items {
            if self.todo.remove(*item) {
                self.hold(lease, worker, *item..item + 1, deadline);
            }
        }
    }

    fn hold(&mut self, lease: LeaseId, worker: WorkerId, items: Range<u32>, deadline: Time) {
        self.frontier = self.frontier.max(items.end);
        let held = self.by_worker.entry(worker).or_insert_with(|| {
            self.deadlines.insert((deadline, worker));
            Held { leases: Vec::new(), listed: deadline }
        });
        if deadline < held.listed {
            self.deadlines.remove(&(held.listed, worker));
            self.deadlines.insert((deadline, worker));
            held.listed = deadline;
        }
        let place = held.leases.partition_point(|known| known.id < lease);
        if held.leases.get(place).is_none_or(|known| known.id != lease) {
            let (open, computed) = (Vec::with_capacity(items.len()), BTreeSet::new());
            held.leases.insert(place, Lease { id: lease, worker, open, computed, deadline });
        }
        let open = &mut held.leases[place].open;
        for item in items {
            open.insert(open.partition_point(|known| *known < item), item);
            self.holder.insert(item, (worker, lease));
        }
    }

    /// Notes that `item` is done; false if it was, or is not of this pool.
    pub fn done(&mut self, item: u32) -> bool {
        if let Some((worker, lease)) = self.holder.remove(&item) {
            self.end_if(worker, lease, |lease| {
                lease.open.retain(|open| *open != item);
                lease.open.is_empty()
            });
        } else if !self.todo.remove(item) {
            return false;
        }
        self.isolated.remove(&item);
        self.n_done += 1;
        self.frontier = self.frontier.max(item + 1);
        true
    }

    /// Notes that `worker` has computed `item`, which is applied later; false if it does not hold it.
    pub fn computed(&mut self, worker: WorkerId, item: u32) -> bool {
        let holder = self.holder.get(&item).filter(|(holder, _)| *holder == worker);
        let Some((_, id)) = holder else { return false };
        let held = self.by_worker.get_mut(&worker).expect("a holder holds a lease");
        let mut leases = held.leases.iter_mut();
        let lease = leases.find(|lease| lease.id == *id).expect("a holder's lease exists");
        self.isolated.remove(&item);
        lease.computed.insert(item)
    }

    /// Assigns these items alone from now on.
    pub fn isolate(&mut self, items: impl IntoIterator<Item = u32>) {
        self.isolated.extend(items);
    }

    /// Whether `worker`, which holds something, must compute it first: that or the next item is
    /// to be computed alone.
    #[must_use]
    pub fn must_finish_first(&self, worker: WorkerId) -> bool {
        let is_isolated = |item: u32| self.isolated.contains(&item);
        let uncomputed = || self.held_by(worker).iter().flat_map(Lease::uncomputed);
        !self.isolated.is_empty()
            && uncomputed().next().is_some()
            && (self.first_todo().is_some_and(is_isolated) || uncomputed().any(is_isolated))
    }

    /// Whether a worker has yet to compute something that it holds.
    #[must_use]
    pub fn has_uncomputed(&self) -> bool {
        let mut leases = self.by_worker.values().flat_map(|held| &held.leases);
        leases.any(|lease| lease.uncomputed().next().is_some())
    }

    /// Moves the deadline of leases whose items only wait for others.
    pub fn extend_computed(&mut self, deadline: Time) {
        let leases = self.by_worker.values_mut().flat_map(|held| &mut held.leases);
        let waiting = leases.filter(|lease| lease.uncomputed().next().is_none());
        waiting.for_each(|lease| lease.extend(deadline));
        self.list_first();
    }

    /// Ends a lease of `worker`; what was open of it is todo again.
    pub fn release(&mut self, worker: WorkerId, lease: LeaseId) -> Option<Lease> {
        let ended = self.end_if(worker, lease, |_| true)?;
        for item in &ended.open {
            self.holder.remove(item);
            self.todo.insert(*item);
        }
        Some(ended)
    }

    /// Forgets a lease if `is_over` says so after it has changed it.
    fn end_if(
        &mut self,
        worker: WorkerId,
        lease: LeaseId,
        is_over: impl FnOnce(&mut Lease) -> bool,
    ) -> Option<Lease> {
        let Entry::Occupied(mut entry) = self.by_worker.entry(worker) else { return None };
        let held = entry.get_mut();
        let place = held.leases.binary_search_by_key(&lease, |known| known.id).ok()?;
        if !is_over(&mut held.leases[place]) {
            return None;
        }
        let ended = held.leases.remove(place);
        let is_first = is_first(&self.deadlines, worker);
        if held.leases.is_empty() {
            self.deadlines.remove(&(held.listed, worker));
            entry.remove();
        }
        if is_first {
            self.list_first();
        }
        Some(ended)
    }

    /// Ends every lease of `worker`, the oldest first.
    pub fn release_worker(&mut self, worker: WorkerId) -> Vec<Lease> {
        let held: Vec<LeaseId> = self.held_by(worker).iter().map(|lease| lease.id).collect();
        held.into_iter().filter_map(|lease| self.release(worker, lease)).collect()
    }

    /// Takes back what `worker` holds, except for the items that it keeps.
    pub fn take_back(&mut self, worker: WorkerId, keeps: impl Fn(u32) -> bool) {
        let held: Vec<LeaseId> = self.held_by(worker).iter().map(|lease| lease.id).collect();
        for id in held {
            let mut returned = Vec::new();
            self.end_if(worker, id, |lease| {
                lease.computed.retain(|item| keeps(*item));
                returned = lease.open.extract_if(.., |item| !keeps(*item)).collect();
                lease.open.is_empty()
            });
            for item in returned {
                self.holder.remove(&item);
                self.todo.insert(item);
            }
        }
    }

    /// Items that are assigned.
    #[must_use]
    pub fn n_assigned(&self) -> usize {
        self.holder.len()
    }

    /// Ends every overdue lease, in order of their deadlines.
    pub fn expire(&mut self, now: Time) -> Vec<Lease> {
        let mut ended = Vec::new();
        while let Some((deadline, worker)) = self.deadlines.first().copied()
            && deadline <= now
        {
            let overdue = self.held_by(worker).iter().filter(|lease| lease.deadline <= now);
            let overdue: Vec<LeaseId> = overdue.map(|lease| lease.id).collect();
            ended.extend(overdue.into_iter().filter_map(|lease| self.release(worker, lease)));
        }
        ended.sort_by_key(|lease| (lease.deadline, lease.id));
        ended
    }

    /// Moves the deadline of all leases of `worker`: it has made progress.
    pub fn extend(&mut self, worker: WorkerId, deadline: Time) {
        let Some(held) = self.by_worker.get_mut(&worker) else { return };
        held.extend(deadline);
        if is_first(&self.deadlines, worker) {
            self.list_first();
        }
    }

    /// Moves every deadline: the master did not listen for some time.
    pub fn extend_all(&mut self, deadline: Time) {
        self.by_worker.values_mut().for_each(|held| held.extend(deadline));
        self.list_first();
    }

    /// Moves entries of `deadlines` to later times until the first one is exact.
    fn list_first(&mut self) {
        while let Some((listed, worker)) = self.deadlines.first().copied() {
            let held = self.by_worker.get_mut(&worker).expect("a listed worker holds something");
            let deadline = held.first_deadline();
            if deadline == listed {
                return;
            }
            self.deadlines.pop_first();
            self.deadlines.insert((deadline, worker));
            held.listed = deadline;
        }
    }

    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// The leases of a worker, the oldest first.
    #[must_use]
    pub fn held_by(&self, worker: WorkerId) -> &[Lease] {
        self.by_worker.get(&worker).map_or(&[], |held| &held.leases)
    }

    #[must_use]
    pub fn n_held(&self, worker: WorkerId) -> usize {
        self.held_by(worker).len()
    }

    /// The first item that a worker holds.
    #[must_use]
    pub fn first_held(&self, worker: WorkerId) -> Option<u32> {
        self.held_by(worker).first()?.open.first().copied()
    }

    #[must_use]
    pub fn lease(&self, worker: WorkerId, lease: LeaseId) -> Option<&Lease> {
        self.held_by(worker).iter().find(|known| known.id == lease)
    }

    #[must_use]
    pub fn n(&self) -> u32 {
        self.n
    }

    #[must_use]
    pub fn n_done(&self) -> u32 {
        self.n_done
    }

    #[must_use]
    pub fn is_done(&self, item: u32) -> bool {
        item < self.n && !self.todo.contains(item) && !self.holder.contains_key(&item)
    }

    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.n_done == self.n
    }

    #[must_use]
    pub fn frontier(&self) -> u32 {
        self.frontier
    }

    /// Panics unless every item is exactly one of todo, assigned and done.
    ///
    /// # Panics
    /// If the state is inconsistent.
    pub fn check_invariants(&self) {
        self.todo.check_invariants();
        assert!(self.todo.end() <= self.n);
        let leases = || self.by_worker.values().flat_map(|held| &held.leases);
        let n_assigned: usize = leases().map(|lease| lease.open.len()).sum();
        assert_eq!(n_assigned, self.holder.len(), "each assigned item has one holder");
        assert_eq!(self.todo.len() as usize + n_assigned + self.n_done as usize, self.n as usize);
        assert_eq!(self.deadlines.len(), self.by_worker.len());
        let next = leases().map(|lease| lease.deadline).min();
        assert_eq!(self.next_deadline(), next, "the first entry is exact");
        for (worker, held) in &self.by_worker {
            assert!(self.deadlines.contains(&(held.listed, *worker)));
            assert!(held.listed <= held.first_deadline());
            assert!(held.leases.is_sorted_by_key(|lease| lease.id));
        }
        for lease in leases() {
            assert!(!lease.open.is_empty(), "an empty lease is gone");
            assert!(lease.open.is_sorted());
            for item in &lease.open {
                assert_eq!(self.holder.get(item), Some(&(lease.worker, lease.id)));
                assert!(!self.todo.contains(*item));
            }
        }
    }
}

/// Whether the next deadline is that of `worker`.
fn is_first(deadlines: &BTreeSet<(Time, WorkerId)>, worker: WorkerId) -> bool {
    deadlines.first().is_some_and(|(_, first)| *first == worker)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    /// The same by one state per item.
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Naive {
        Todo,
        Assigned(LeaseId, WorkerId),
        Done,
    }

    #[derive(Clone, Debug)]
    enum Step {
        Assign { worker: u32, most: u32, limit: u32, deadline: Time },
        Done(u32),
        Release(u64),
        Lose(u32),
        Extend(u32, Time),
        ExtendAll(Time),
        Expire(Time),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..4u32, 1..6u32, 0..40u32, time()).prop_map(|(worker, most, limit, deadline)| {
                Step::Assign { worker, most, limit, deadline }
            }),
            6 => (0..40u32).prop_map(Step::Done),
            1 => (0..30u64).prop_map(Step::Release),
            1 => (0..4u32).prop_map(Step::Lose),
            4 => (0..4u32, time()).prop_map(|(worker, time)| Step::Extend(worker, time)),
            1 => time().prop_map(Step::ExtendAll),
            1 => time().prop_map(Step::Expire),
        ]
    }

    fn time() -> impl Strategy<Value = Time> {
        (0..30u64).prop_map(|secs| Time::since_origin(Duration::from_secs(secs)))
    }

    fn later(deadlines: &mut BTreeMap<LeaseId, Time>, lease: LeaseId, deadline: Time) {
        let known = deadlines.get_mut(&lease).expect("it was assigned");
        *known = deadline.max(*known);
    }

    /// What is assigned, each lease once.
    fn leases(naive: &[Naive]) -> BTreeMap<LeaseId, WorkerId> {
        let assigned = naive.iter().filter_map(|state| match state {
            Naive::Assigned(lease, worker) => Some((*lease, *worker)),
            Naive::Todo | Naive::Done => None,
        });
        assigned.collect()
    }

    proptest! {
        #[test]
        fn it_equals_one_state_per_item(steps in proptest::collection::vec(step(), 0..120)) {
            let n = 33;
            let mut pool = Pool::new(n);
            let mut naive = vec![Naive::Todo; n as usize];
            let mut deadlines = BTreeMap::new();
            let free = |state: &mut Naive, which: &dyn Fn(LeaseId, WorkerId) -> bool| {
                if let Naive::Assigned(lease, worker) = *state && which(lease, worker) {
                    *state = Naive::Todo;
                }
            };
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Assign { worker, most, limit, deadline } => {
                        let (lease, worker) = (LeaseId(number as u64), WorkerId(worker));
                        deadlines.insert(lease, deadline);
                        let assigned = pool.assign(lease, worker, limit, |_| most, deadline);
                        let first = naive.iter().position(|state| *state == Naive::Todo);
                        let first = first.map(|first| u32::try_from(first).expect("a small pool"));
                        let expected = first.filter(|first| *first < limit.min(n)).map(|first| {
                            let rest = naive[first as usize..].iter();
                            let run = rest.take_while(|s| **s == Naive::Todo).take(most as usize);
                            let run = u32::try_from(run.count()).expect("a small pool");
                            first..(first + run).min(limit)
                        });
                        prop_assert_eq!(&assigned, &expected);
                        assigned.into_iter().flatten().for_each(|i| naive[i as usize] = Naive::Assigned(lease, worker));
                    }
                    Step::Done(item) => {
                        let is_news = item < n && naive[item as usize] != Naive::Done;
                        prop_assert_eq!(pool.done(item), is_news);
                        if item < n { naive[item as usize] = Naive::Done; }
                    }
                    Step::Release(lease) => {
                        let (lease, held) = (LeaseId(lease), leases(&naive));
                        let worker = held.get(&lease).copied().unwrap_or(WorkerId(0));
                        prop_assert_eq!(pool.release(worker, lease).is_some(), held.contains_key(&lease));
                        naive.iter_mut().for_each(|s| free(s, &|l, _| l == lease));
                    }
                    Step::Lose(worker) => {
                        pool.release_worker(WorkerId(worker));
                        naive.iter_mut().for_each(|s| free(s, &|_, w| w == WorkerId(worker)));
                    }
                    Step::Extend(worker, deadline) => {
                        pool.extend(WorkerId(worker), deadline);
                        let held = leases(&naive).into_iter().filter(|(_, of)| of.0 == worker);
                        held.for_each(|(lease, _)| later(&mut deadlines, lease, deadline));
                    }
                    Step::ExtendAll(deadline) => {
                        pool.extend_all(deadline);
                        leases(&naive).keys().for_each(|l| later(&mut deadlines, *l, deadline));
                    }
                    Step::Expire(now) => {
                        let mut overdue: Vec<(Time, LeaseId)> =
                            leases(&naive).keys().map(|lease| (deadlines[lease], *lease)).collect();
                        overdue.retain(|(deadline, _)| *deadline <= now);
                        overdue.sort();
                        let ended = pool.expire(now).into_iter();
                        let ended: Vec<_> = ended.map(|lease| (lease.deadline, lease.id)).collect();
                        prop_assert_eq!(&ended, &overdue);
                        let is_over = |lease| overdue.iter().any(|(_, ended)| *ended == lease);
                        naive.iter_mut().for_each(|s| free(s, &|lease, _| is_over(lease)));
                    }
                }
                pool.check_invariants();
                let next = leases(&naive).keys().map(|lease| deadlines[lease]).min();
                prop_assert_eq!(pool.next_deadline(), next);
                prop_assert_eq!(pool.n_done() as usize, naive.iter().filter(|s| **s == Naive::Done).count());
            }
        }
    }

    #[test]
    fn a_late_report_finishes_an_item_that_was_assigned_again() {
        let (ann, bob) = (WorkerId(0), WorkerId(1));
        let mut pool = Pool::new(2);
        let late = Time::ZERO + Duration::from_secs(1);
        assert_eq!(pool.assign(LeaseId(0), ann, 2, |_| 2, late), Some(0..2));
        assert_eq!(pool.expire(late).len(), 1);
        assert_eq!(pool.assign(LeaseId(1), bob, 2, |_| 2, late), Some(0..2));
        assert!(
            pool.done(0),
            "the parameter servers have applied it, no matter which worker reports it"
        );
        assert!(pool.done(1));
        assert!(!pool.done(1), "and Bob's report of the same batch changes nothing");
        assert!(pool.is_finished() && pool.n_assigned() == 0);
    }
}

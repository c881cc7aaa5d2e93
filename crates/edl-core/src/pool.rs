// SPDX-License-Identifier: Apache-2.0
//! Assigns numbered items to workers under leases, and takes them back when a lease ends early.
//!
//! An item is *todo*, *assigned* or *done*: exactly one of the three, at all times. Leases only share
//! out work: any process may report at any time that an item is done.

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
    leases: BTreeMap<LeaseId, Lease>,
    holder: BTreeMap<u32, LeaseId>,
    by_worker: BTreeMap<WorkerId, BTreeSet<LeaseId>>,
    deadlines: BTreeSet<(Time, LeaseId)>,
    n_done: u32,
    /// One above the highest item ever assigned or done.
    frontier: u32,
    /// Items that a worker held when it was lost, one of which may be why. Each is assigned alone,
    /// so the next loss shows which one.
    isolated: BTreeSet<u32>,
}

/// The assignment of some items to one worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    pub worker: WorkerId,
    /// Not yet done.
    pub open: BTreeSet<u32>,
    /// Those of them that are computed: they only wait to be applied with others.
    pub computed: BTreeSet<u32>,
    pub deadline: Time,
}

impl Lease {
    /// What its worker has yet to compute, in order.
    pub fn uncomputed(&self) -> impl Iterator<Item = u32> + '_ {
        self.open.difference(&self.computed).copied()
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
            leases: BTreeMap::new(),
            holder: BTreeMap::new(),
            by_worker: BTreeMap::new(),
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
        if self.leases.contains_key(&lease) {
            return; // Claimed twice, or by another worker.
        }
        for item in items {
            if self.todo.remove(*item) {
                self.hold(lease, worker, *item..item + 1, deadline);
            }
        }
    }

    fn hold(&mut self, lease: LeaseId, worker: WorkerId, items: Range<u32>, deadline: Time) {
        self.frontier = self.frontier.max(items.end);
        let entry = self.leases.entry(lease).or_insert_with(|| {
            self.by_worker.entry(worker).or_default().insert(lease);
            self.deadlines.insert((deadline, lease));
            let (open, computed) = (BTreeSet::new(), BTreeSet::new());
            Lease { worker, open, computed, deadline }
        });
        assert_eq!(entry.worker, worker, "lease ids are never reused");
        for item in items {
            entry.open.insert(item);
            self.holder.insert(item, lease);
        }
    }

    /// Notes that `item` is done; false if it was, or is not of this pool.
    pub fn done(&mut self, item: u32) -> bool {
        if item >= self.n || self.is_done(item) {
            return false;
        }
        match self.holder.remove(&item) {
            Some(lease) => {
                let held = self.leases.get_mut(&lease).expect("a holder's lease exists");
                held.open.remove(&item);
                if held.open.is_empty() {
                    self.forget(lease);
                }
            }
            None => _ = self.todo.remove(item),
        }
        self.isolated.remove(&item);
        self.n_done += 1;
        self.frontier = self.frontier.max(item + 1);
        true
    }

    /// Notes that `worker` has computed `item`, which is applied later; false if it does not hold it.
    pub fn computed(&mut self, worker: WorkerId, item: u32) -> bool {
        let lease = self.holder.get(&item).and_then(|lease| self.leases.get_mut(lease));
        let Some(held) = lease.filter(|held| held.worker == worker) else { return false };
        self.isolated.remove(&item);
        held.computed.insert(item)
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
        let held = || self.held_by(worker).filter_map(|lease| self.leases.get(&lease));
        !self.isolated.is_empty()
            && held().flat_map(Lease::uncomputed).next().is_some()
            && (self.first_todo().is_some_and(is_isolated)
                || held().flat_map(Lease::uncomputed).any(is_isolated))
    }

    /// Whether a worker has yet to compute something that it holds.
    #[must_use]
    pub fn has_uncomputed(&self) -> bool {
        self.leases.values().any(|lease| lease.uncomputed().next().is_some())
    }

    /// Moves the deadline of leases whose items only wait for others.
    pub fn extend_computed(&mut self, deadline: Time) {
        for (id, lease) in &mut self.leases {
            if lease.uncomputed().next().is_none() {
                postpone(&mut self.deadlines, *id, lease, deadline);
            }
        }
    }

    /// Ends a lease; what was open of it is todo again.
    pub fn release(&mut self, lease: LeaseId) -> Option<Lease> {
        let ended = self.forget(lease)?;
        for item in &ended.open {
            self.holder.remove(item);
            self.todo.insert(*item);
        }
        Some(ended)
    }

    fn forget(&mut self, lease: LeaseId) -> Option<Lease> {
        let ended = self.leases.remove(&lease)?;
        self.deadlines.remove(&(ended.deadline, lease));
        if let Some(held) = self.by_worker.get_mut(&ended.worker) {
            held.remove(&lease);
            if held.is_empty() {
                self.by_worker.remove(&ended.worker);
            }
        }
        Some(ended)
    }

    /// Ends every lease of `worker`, the oldest first.
    pub fn release_worker(&mut self, worker: WorkerId) -> Vec<Lease> {
        let held: Vec<LeaseId> = self.held_by(worker).collect();
        held.into_iter().filter_map(|lease| self.release(lease)).collect()
    }

    /// Takes back what `worker` holds, except for the items that it keeps.
    pub fn take_back(&mut self, worker: WorkerId, keeps: impl Fn(u32) -> bool) {
        let held: Vec<LeaseId> = self.held_by(worker).collect();
        for id in held {
            let lease = self.leases.get_mut(&id).expect("a worker's lease exists");
            lease.computed.retain(|item| keeps(*item));
            for item in lease.open.extract_if(.., |item| !keeps(*item)) {
                self.holder.remove(&item);
                self.todo.insert(item);
            }
            if lease.open.is_empty() {
                self.forget(id);
            }
        }
    }

    /// Items that are assigned.
    #[must_use]
    pub fn n_assigned(&self) -> usize {
        self.holder.len()
    }

    /// Ends every overdue lease.
    pub fn expire(&mut self, now: Time) -> Vec<(LeaseId, Lease)> {
        let overdue = self.deadlines.iter().take_while(|(deadline, _)| *deadline <= now);
        let ids: Vec<LeaseId> = overdue.map(|(_, id)| *id).collect();
        ids.into_iter().filter_map(|id| Some((id, self.release(id)?))).collect()
    }

    /// Moves the deadline of all leases of `worker`: it has made progress.
    pub fn extend(&mut self, worker: WorkerId, deadline: Time) {
        for id in self.by_worker.get(&worker).into_iter().flatten() {
            let lease = self.leases.get_mut(id).expect("a worker's lease exists");
            postpone(&mut self.deadlines, *id, lease, deadline);
        }
    }

    /// Moves every deadline: the master did not listen for some time.
    pub fn extend_all(&mut self, deadline: Time) {
        for (id, lease) in &mut self.leases {
            postpone(&mut self.deadlines, *id, lease, deadline);
        }
    }

    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    pub fn held_by(&self, worker: WorkerId) -> impl Iterator<Item = LeaseId> + '_ {
        self.by_worker.get(&worker).into_iter().flatten().copied()
    }

    #[must_use]
    pub fn n_held(&self, worker: WorkerId) -> usize {
        self.by_worker.get(&worker).map_or(0, BTreeSet::len)
    }

    /// The first item that a worker holds.
    #[must_use]
    pub fn first_held(&self, worker: WorkerId) -> Option<u32> {
        let first = self.by_worker.get(&worker)?.first()?;
        self.leases.get(first)?.open.first().copied()
    }

    #[must_use]
    pub fn lease(&self, lease: LeaseId) -> Option<&Lease> {
        self.leases.get(&lease)
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

    #[must_use]
    pub fn n_leases(&self) -> usize {
        self.leases.len()
    }

    /// Panics unless every item is exactly one of todo, assigned and done.
    ///
    /// # Panics
    /// If the state is inconsistent.
    pub fn check_invariants(&self) {
        self.todo.check_invariants();
        assert!(self.todo.end() <= self.n);
        let n_assigned: usize = self.leases.values().map(|lease| lease.open.len()).sum();
        assert_eq!(n_assigned, self.holder.len(), "each assigned item has one holder");
        assert_eq!(self.deadlines.len(), self.leases.len());
        let n_by_worker: usize = self.by_worker.values().map(BTreeSet::len).sum();
        assert_eq!(n_by_worker, self.leases.len());
        assert_eq!(self.todo.len() as usize + n_assigned + self.n_done as usize, self.n as usize);
        for (lease, held) in &self.leases {
            assert!(!held.open.is_empty(), "an empty lease is gone");
            for item in &held.open {
                assert_eq!(self.holder.get(item), Some(lease));
                assert!(!self.todo.contains(*item));
            }
        }
    }
}

/// Moves a deadline to a later time, never to an earlier one.
fn postpone(
    deadlines: &mut BTreeSet<(Time, LeaseId)>,
    id: LeaseId,
    lease: &mut Lease,
    deadline: Time,
) {
    deadlines.remove(&(lease.deadline, id));
    lease.deadline = lease.deadline.max(deadline);
    deadlines.insert((lease.deadline, id));
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
        Assign { worker: u32, most: u32, limit: u32 },
        Done(u32),
        Release(u64),
        Lose(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..4u32, 1..6u32, 0..40u32)
                .prop_map(|(worker, most, limit)| Step::Assign { worker, most, limit }),
            6 => (0..40u32).prop_map(Step::Done),
            1 => (0..30u64).prop_map(Step::Release),
            1 => (0..4u32).prop_map(Step::Lose),
        ]
    }

    proptest! {
        #[test]
        fn it_equals_one_state_per_item(steps in proptest::collection::vec(step(), 0..120)) {
            let n = 33;
            let mut pool = Pool::new(n);
            let mut naive = vec![Naive::Todo; n as usize];
            let free = |state: &mut Naive, which: &dyn Fn(LeaseId, WorkerId) -> bool| {
                if let Naive::Assigned(lease, worker) = *state && which(lease, worker) {
                    *state = Naive::Todo;
                }
            };
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Assign { worker, most, limit } => {
                        let (lease, worker) = (LeaseId(number as u64), WorkerId(worker));
                        let assigned = pool.assign(lease, worker, limit, |_| most, Time::ZERO);
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
                        pool.release(LeaseId(lease));
                        naive.iter_mut().for_each(|s| free(s, &|l, _| l == LeaseId(lease)));
                    }
                    Step::Lose(worker) => {
                        pool.release_worker(WorkerId(worker));
                        naive.iter_mut().for_each(|s| free(s, &|_, w| w == WorkerId(worker)));
                    }
                }
                pool.check_invariants();
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
        assert!(pool.is_finished() && pool.n_leases() == 0);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Lends numbered items to workers under leases, and takes them back when a lease ends early.
//!
//! An item is *todo*, *lent* or *done*: exactly one of the three, at all times. Leases only share
//! out work: that an item is done is a fact that anybody may report, at any time.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use crate::id::{LeaseId, WorkerId};
use crate::time::Time;

/// The items `0..n`, and who holds them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pool {
    n: u32,
    /// Ranges of items that nobody holds, by their start; never adjacent, never empty.
    todo: BTreeMap<u32, u32>,
    leases: BTreeMap<LeaseId, Lease>,
    holder: BTreeMap<u32, LeaseId>,
    by_worker: BTreeMap<WorkerId, BTreeSet<LeaseId>>,
    deadlines: BTreeSet<(Time, LeaseId)>,
    done: Vec<bool>,
    n_done: u32,
    /// One above the highest item ever lent or done.
    frontier: u32,
}

/// A loan of some items to one worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    pub worker: WorkerId,
    /// Not yet done.
    pub open: BTreeSet<u32>,
    pub deadline: Time,
    /// Its worker says so, and nothing of it was done since: only progress proves it.
    pub is_adopted: bool,
}

impl Pool {
    #[must_use]
    pub fn new(n: u32) -> Self {
        Self::with_done(n, |_| false)
    }

    /// A pool in which some items are done already.
    pub fn with_done(n: u32, is_done: impl Fn(u32) -> bool) -> Self {
        let mut pool = Self {
            n,
            todo: BTreeMap::new(),
            leases: BTreeMap::new(),
            holder: BTreeMap::new(),
            by_worker: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            done: vec![false; n as usize],
            n_done: 0,
            frontier: 0,
        };
        let mut todo_from = 0;
        for item in (0..n).filter(|item| is_done(*item)) {
            pool.done[item as usize] = true;
            pool.n_done += 1;
            pool.frontier = item + 1;
            if todo_from < item {
                pool.todo.insert(todo_from, item);
            }
            todo_from = item + 1;
        }
        if todo_from < n {
            pool.todo.insert(todo_from, n);
        }
        pool
    }

    /// Lends up to `most` consecutive items below `limit`, the lowest first.
    pub fn lend(
        &mut self,
        lease: LeaseId,
        worker: WorkerId,
        limit: u32,
        most: impl FnOnce(u32) -> u32,
        deadline: Time,
    ) -> Option<Range<u32>> {
        let (&start, &end) = self.todo.first_key_value()?;
        if start >= limit {
            return None;
        }
        let stop = end.min(limit).min(start.saturating_add(most(start).max(1)));
        self.todo.remove(&start);
        if stop < end {
            self.todo.insert(stop, end);
        }
        self.hold(lease, worker, start..stop, deadline);
        Some(start..stop)
    }

    /// The item that is lent next.
    #[must_use]
    pub fn first_todo(&self) -> Option<u32> {
        self.todo.first_key_value().map(|(start, _)| *start)
    }

    /// Whether an item below `limit` waits for a worker.
    #[must_use]
    pub fn has_todo(&self, limit: u32) -> bool {
        self.first_todo().is_some_and(|start| start < limit)
    }

    /// Notes that `worker` already works on `items`, as far as nobody else does.
    pub fn adopt(&mut self, lease: LeaseId, worker: WorkerId, items: &[u32], deadline: Time) {
        if self.leases.contains_key(&lease) {
            return; // Told twice, or not its own.
        }
        let free: Vec<u32> = items.iter().copied().filter(|item| self.is_todo(*item)).collect();
        for item in free {
            if self.is_todo(item) {
                self.remove_todo(item);
                self.hold(lease, worker, item..item + 1, deadline);
            }
        }
        if let Some(held) = self.leases.get_mut(&lease) {
            held.is_adopted = true;
        }
    }

    fn hold(&mut self, lease: LeaseId, worker: WorkerId, items: Range<u32>, deadline: Time) {
        self.frontier = self.frontier.max(items.end);
        let entry = self.leases.entry(lease).or_insert_with(|| {
            self.by_worker.entry(worker).or_default().insert(lease);
            self.deadlines.insert((deadline, lease));
            Lease { worker, open: BTreeSet::new(), deadline, is_adopted: false }
        });
        assert_eq!(entry.worker, worker, "lease ids are never reused");
        for item in items {
            entry.open.insert(item);
            self.holder.insert(item, lease);
        }
    }

    /// Notes that `item` is done; false if it was, or is not of this pool.
    pub fn done(&mut self, item: u32) -> bool {
        if item >= self.n || self.done[item as usize] {
            return false;
        }
        match self.holder.remove(&item) {
            Some(lease) => {
                let held = self.leases.get_mut(&lease).expect("a holder's lease exists");
                held.open.remove(&item);
                held.is_adopted = false;
                if held.open.is_empty() {
                    self.forget(lease);
                }
            }
            None => self.remove_todo(item),
        }
        self.done[item as usize] = true;
        self.n_done += 1;
        self.frontier = self.frontier.max(item + 1);
        true
    }

    /// Ends a lease; what was open of it is todo again.
    pub fn release(&mut self, lease: LeaseId) -> Option<Lease> {
        let ended = self.forget(lease)?;
        for item in &ended.open {
            self.holder.remove(item);
            self.add_todo(*item);
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

    /// Ends every overdue lease.
    pub fn expire(&mut self, now: Time) -> Vec<(LeaseId, Lease)> {
        let overdue = self.deadlines.iter().take_while(|(deadline, _)| *deadline <= now);
        let ids: Vec<LeaseId> = overdue.map(|(_, id)| *id).collect();
        ids.into_iter().filter_map(|id| Some((id, self.release(id)?))).collect()
    }

    /// Moves the deadline of all leases of `worker`: it has shown progress. What it only says it
    /// holds must show its own.
    pub fn extend(&mut self, worker: WorkerId, now: Time, timeout: Duration) {
        for id in self.by_worker.get(&worker).into_iter().flatten() {
            let lease = self.leases.get_mut(id).expect("a worker's lease exists");
            if lease.is_adopted {
                continue;
            }
            self.deadlines.remove(&(lease.deadline, *id));
            lease.deadline = lease.deadline.max(now + timeout);
            self.deadlines.insert((lease.deadline, *id));
        }
    }

    /// Moves every deadline: for some time nobody could be heard.
    pub fn extend_all(&mut self, now: Time, timeout: Duration) {
        for (id, lease) in &mut self.leases {
            self.deadlines.remove(&(lease.deadline, *id));
            lease.deadline = lease.deadline.max(now + timeout);
            self.deadlines.insert((lease.deadline, *id));
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
        self.done.get(item as usize).copied().unwrap_or(false)
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

    fn is_todo(&self, item: u32) -> bool {
        self.todo.range(..=item).next_back().is_some_and(|(_, end)| item < *end)
    }

    fn remove_todo(&mut self, item: u32) {
        let Some((&start, &end)) = self.todo.range(..=item).next_back() else { return };
        if item >= end {
            return;
        }
        self.todo.remove(&start);
        if start < item {
            self.todo.insert(start, item);
        }
        if item + 1 < end {
            self.todo.insert(item + 1, end);
        }
    }

    fn add_todo(&mut self, item: u32) {
        let (mut start, mut end) = (item, item + 1);
        if let Some((&before, &before_end)) = self.todo.range(..item).next_back()
            && before_end == item
        {
            start = before;
        }
        if let Some(after_end) = self.todo.remove(&end) {
            end = after_end;
        }
        self.todo.insert(start, end);
    }

    /// Panics unless every item is exactly one of todo, lent and done.
    ///
    /// # Panics
    /// If the books are wrong.
    pub fn check_invariants(&self) {
        let n_todo: u32 = self.todo.iter().map(|(start, end)| end - start).sum();
        let n_lent: usize = self.leases.values().map(|lease| lease.open.len()).sum();
        assert_eq!(n_lent, self.holder.len(), "each assigned item has one holder");
        assert_eq!(self.deadlines.len(), self.leases.len());
        let n_by_worker: usize = self.by_worker.values().map(BTreeSet::len).sum();
        assert_eq!(n_by_worker, self.leases.len());
        assert_eq!(n_todo as usize + n_lent + self.n_done as usize, self.n as usize);
        for (lease, held) in &self.leases {
            assert!(!held.open.is_empty(), "an empty lease is gone");
            for item in &held.open {
                assert_eq!(self.holder.get(item), Some(lease));
                assert!(!self.is_todo(*item) && !self.is_done(*item));
            }
        }
        let mut last_end = None;
        for (start, end) in &self.todo {
            assert!(start < end && *end <= self.n && last_end.is_none_or(|last| last < *start));
            last_end = Some(*end);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same by one state per item.
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Naive {
        Todo,
        Lent(LeaseId, WorkerId),
        Done,
    }

    #[derive(Clone, Debug)]
    enum Step {
        Lend { worker: u32, most: u32, limit: u32 },
        Done(u32),
        Release(u64),
        Lose(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..4u32, 1..6u32, 0..40u32)
                .prop_map(|(worker, most, limit)| Step::Lend { worker, most, limit }),
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
                if let Naive::Lent(lease, worker) = *state && which(lease, worker) {
                    *state = Naive::Todo;
                }
            };
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Lend { worker, most, limit } => {
                        let (lease, worker) = (LeaseId(number as u64), WorkerId(worker));
                        let lent = pool.lend(lease, worker, limit, |_| most, Time::ZERO);
                        let first = naive.iter().position(|state| *state == Naive::Todo);
                        let first = first.map(|first| u32::try_from(first).expect("a small pool"));
                        let expected = first.filter(|first| *first < limit.min(n)).map(|first| {
                            let rest = naive[first as usize..].iter();
                            let run = rest.take_while(|s| **s == Naive::Todo).take(most as usize);
                            let run = u32::try_from(run.count()).expect("a small pool");
                            first..(first + run).min(limit)
                        });
                        prop_assert_eq!(&lent, &expected);
                        lent.into_iter().flatten().for_each(|i| naive[i as usize] = Naive::Lent(lease, worker));
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
    fn a_late_report_finishes_an_item_that_was_lent_again() {
        let (ann, bob) = (WorkerId(0), WorkerId(1));
        let mut pool = Pool::new(2);
        let late = Time::ZERO + Duration::from_secs(1);
        assert_eq!(pool.lend(LeaseId(0), ann, 2, |_| 2, late), Some(0..2));
        assert_eq!(pool.expire(late).len(), 1);
        assert_eq!(pool.lend(LeaseId(1), bob, 2, |_| 2, late), Some(0..2));
        assert!(pool.done(0), "the parameter servers say so, whoever brings the news");
        assert!(pool.done(1));
        assert!(!pool.done(1), "and Bob's report of the same batch changes nothing");
        assert!(pool.is_finished() && pool.n_leases() == 0);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A set of numbers, kept as runs of consecutive ones: its size depends on the number of gaps, not
//! on how many numbers are in it.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of numbers below `u32::MAX`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Runs {
    /// The end of each run, by its start; runs are never empty and never adjacent.
    ends: BTreeMap<u32, u32>,
    len: u32,
}

impl From<Range<u32>> for Runs {
    fn from(run: Range<u32>) -> Self {
        let mut runs = Self::default();
        runs.push(run);
        runs
    }
}

impl Runs {
    /// How many numbers are in.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All runs, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Range<u32>> + ExactSizeIterator + '_ {
        self.ends.iter().map(|(start, end)| *start..*end)
    }

    #[must_use]
    pub fn first(&self) -> Option<Range<u32>> {
        self.iter().next()
    }

    /// One above the highest number; zero if there is none.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.iter().next_back().map_or(0, |run| run.end)
    }

    #[must_use]
    pub fn contains(&self, number: u32) -> bool {
        self.run_of(number).is_some()
    }

    fn run_of(&self, number: u32) -> Option<Range<u32>> {
        let (start, end) = self.ends.range(..=number).next_back()?;
        (number < *end).then_some(*start..*end)
    }

    /// Adds a run above all others; an empty one changes nothing.
    ///
    /// # Panics
    /// If it is not above the others.
    pub fn push(&mut self, run: Range<u32>) {
        let mut last = self.ends.last_entry();
        let end = last.as_ref().map_or(0, |last| *last.get());
        assert!(end <= run.start, "runs are added in order");
        self.len += run.end.saturating_sub(run.start);
        match &mut last {
            _ if run.is_empty() => {}
            Some(last) if end == run.start => *last.get_mut() = run.end,
            Some(_) | None => _ = self.ends.insert(run.start, run.end),
        }
    }

    /// Adds a number; false if it was in already.
    pub fn insert(&mut self, number: u32) -> bool {
        let before = self.ends.range(..=number).next_back().map(|(start, end)| *start..*end);
        let (mut start, mut end) = (number, number + 1);
        match before {
            Some(run) if number < run.end => return false,
            Some(run) if number == run.end => start = run.start,
            Some(_) | None => {}
        }
        if let Some(end_of_next) = self.ends.remove(&end) {
            end = end_of_next;
        }
        self.ends.insert(start, end);
        self.len += 1;
        true
    }

    /// Takes a number out; false if it was not in.
    pub fn remove(&mut self, number: u32) -> bool {
        let Some(run) = self.run_of(number) else { return false };
        self.ends.remove(&run.start);
        if run.start < number {
            self.ends.insert(run.start, number);
        }
        if number + 1 < run.end {
            self.ends.insert(number + 1, run.end);
        }
        self.len -= 1;
        true
    }

    /// Takes out the numbers below `limit`, as far as they are in the first run.
    pub fn take_first(&mut self, limit: u32) -> Range<u32> {
        let Some(run) = self.first().filter(|run| run.start < limit) else { return 0..0 };
        let taken = run.start..run.end.min(limit);
        self.ends.remove(&run.start);
        if taken.end < run.end {
            self.ends.insert(taken.end, run.end);
        }
        self.len -= taken.end - taken.start;
        taken
    }

    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        self.combine(other, |ours, theirs| ours && theirs)
    }

    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        self.combine(other, |ours, theirs| ours || theirs)
    }

    /// The numbers in exactly one of both sets.
    #[must_use]
    pub fn xor(&self, other: &Self) -> Self {
        self.combine(other, |ours, theirs| ours != theirs)
    }

    /// The numbers that `is_in` keeps, given whether each set has them.
    fn combine(&self, other: &Self, is_in: fn(bool, bool) -> bool) -> Self {
        let mut combined = Self::default();
        let (mut ours, mut theirs) = (self.edges().peekable(), other.edges().peekable());
        let (mut in_ours, mut in_theirs, mut start) = (false, false, None);
        while let Some(edge) = ours.peek().into_iter().chain(theirs.peek()).min().copied() {
            in_ours ^= ours.next_if_eq(&edge).is_some();
            in_theirs ^= theirs.next_if_eq(&edge).is_some();
            start = match (is_in(in_ours, in_theirs), start) {
                (true, None) => Some(edge),
                (false, Some(start)) => {
                    combined.push(start..edge);
                    None
                }
                (true, Some(_)) | (false, None) => start,
            };
        }
        combined
    }

    /// Where runs start and end, in order.
    fn edges(&self) -> impl Iterator<Item = u32> + '_ {
        self.ends.iter().flat_map(|(start, end)| [*start, *end])
    }

    /// Panics unless all runs are in order, apart from each other and counted.
    ///
    /// # Panics
    /// If the state is inconsistent.
    pub fn check_invariants(&self) {
        assert!(self.edges().is_sorted_by(|before, after| before < after), "{self:?}");
        assert_eq!(self.iter().map(|run| run.end - run.start).sum::<u32>(), self.len);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn numbers() -> impl Strategy<Value = Vec<(bool, u32)>> {
        proptest::collection::vec((prop::bool::weighted(0.7), 0..60u32), 0..120)
    }

    fn build(changes: &[(bool, u32)]) -> (Runs, BTreeSet<u32>) {
        let (mut runs, mut naive) = (Runs::default(), BTreeSet::new());
        for (is_added, number) in changes {
            if *is_added {
                assert_eq!(runs.insert(*number), naive.insert(*number));
            } else {
                assert_eq!(runs.remove(*number), naive.remove(number));
            }
            runs.check_invariants();
        }
        (runs, naive)
    }

    fn all(runs: &Runs) -> BTreeSet<u32> {
        runs.check_invariants();
        runs.iter().flatten().collect()
    }

    proptest! {
        #[test]
        fn it_equals_a_plain_set(a in numbers(), b in numbers(), limit in 0..70u32) {
            let ((a, naive_a), (b, naive_b)) = (build(&a), build(&b));
            prop_assert_eq!(a.len() as usize, naive_a.len());
            prop_assert_eq!(a.end(), naive_a.last().map_or(0, |last| last + 1));
            prop_assert!((0..70).all(|number| a.contains(number) == naive_a.contains(&number)));
            prop_assert_eq!(all(&a.and(&b)), &naive_a & &naive_b);
            prop_assert_eq!(all(&a.or(&b)), &naive_a | &naive_b);
            prop_assert_eq!(all(&a.xor(&b)), &naive_a ^ &naive_b);
            let mut rest = a;
            let taken: BTreeSet<u32> = rest.take_first(limit).collect();
            prop_assert!(taken.iter().all(|number| *number < limit));
            prop_assert_eq!(&all(&rest) | &taken, naive_a);
        }
    }
}

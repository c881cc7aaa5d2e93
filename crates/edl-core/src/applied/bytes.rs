// SPDX-License-Identifier: Apache-2.0
//! The bytes of an applied set, in files and messages.
//!
//! Four zero bytes, then numbers in LEB128: batches per epoch, closed epochs, open epochs; for each
//! open epoch its number, how many runs it has, and for each run the gap before it and its length.
//! A set that is sent after a similar one holds the runs of batches that are in only one of both.
//!
//! Earlier versions wrote one bit per batch: three words of 32 bits (batches per epoch, closed and
//! open epochs), then for each open epoch its number and its bits. The first word was never zero.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::AppliedSet;
use crate::runs::Runs;

const MARK: [u8; 4] = [0; 4];
/// No job sees a billion epochs; a number near the end of its range is damage.
const MAX_CLOSED: u32 = u32::MAX / 2;

impl AppliedSet {
    /// The set as bytes; shorter if the reader has `base`, a similar set of the same plan.
    #[must_use]
    pub fn to_bytes(&self, base: Option<&Self>) -> Vec<u8> {
        let base = base.filter(|base| base.closed <= self.closed);
        let changed = match base {
            Some(base) => Cow::Owned(self.combine_open(base, self.closed, Runs::xor)),
            None => Cow::Borrowed(&self.open),
        };
        let n_open = u32::try_from(changed.len()).expect("few epochs are open");
        let mut bytes = MARK.to_vec();
        [self.n_batches, self.closed, n_open]
            .into_iter()
            .for_each(|number| put(&mut bytes, number));
        for (epoch, runs) in changed.iter() {
            put(&mut bytes, *epoch);
            put(&mut bytes, u32::try_from(runs.iter().len()).expect("fewer runs than batches"));
            let mut end = 0;
            for run in runs.iter() {
                put(&mut bytes, run.start - end);
                put(&mut bytes, run.end - run.start);
                end = run.end;
            }
        }
        bytes
    }

    /// Reads what `to_bytes` wrote with the same `base`; `None` if it is anything else.
    #[must_use]
    pub fn from_bytes(bytes: &[u8], base: Option<&Self>) -> Option<Self> {
        let Some(rest) = bytes.strip_prefix(&MARK) else { return from_bits(bytes) };
        let mut numbers = Numbers(rest);
        let (n_batches, closed) = (numbers.next()?, numbers.next()?);
        let n_open = numbers.next()?;
        if n_batches == 0 || closed > MAX_CLOSED || base.is_some_and(|b| b.n_batches != n_batches) {
            return None;
        }
        let base = base.filter(|base| base.closed <= closed);
        let mut open = BTreeMap::new();
        if let Some(base) = base {
            open.extend(base.open.range(closed..).map(|(epoch, runs)| (*epoch, runs.clone())));
        }
        let mut next_epoch = closed;
        for _ in 0..n_open {
            let epoch = numbers.next().filter(|epoch| *epoch >= next_epoch)?;
            next_epoch = epoch.checked_add(1)?;
            let changed = numbers.runs(n_batches)?;
            let runs = open.remove(&epoch).unwrap_or_default().xor(&changed);
            if !runs.is_empty() {
                open.insert(epoch, runs);
            }
        }
        let mut set = Self { n_batches, closed, open };
        set.close_full();
        numbers.0.is_empty().then_some(set)
    }
}

/// The form of earlier versions.
fn from_bits(bytes: &[u8]) -> Option<AppliedSet> {
    let mut words = bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]]));
    let (n_batches, closed, n_open) = (words.next()?, words.next()?, words.next()?);
    let n_words = u64::from(n_batches).div_ceil(64) * 2;
    let expected = 12 + u64::from(n_open) * (4 + n_words * 4);
    if n_batches == 0 || closed > MAX_CLOSED || bytes.len() as u64 != expected {
        return None;
    }
    let mut open = BTreeMap::new();
    for _ in 0..n_open {
        let epoch = words.next().filter(|epoch| (closed..u32::MAX).contains(epoch))?;
        let mut runs = Runs::default();
        for first in (0..n_words).map(|word| word * 32) {
            push_bits(&mut runs, u32::try_from(first).ok()?, words.next()?)?;
        }
        if runs.end() > n_batches || open.insert(epoch, runs).is_some() {
            return None;
        }
    }
    open.retain(|_, runs| !runs.is_empty());
    let mut set = AppliedSet { n_batches, closed, open };
    set.close_full();
    Some(set)
}

/// Adds the numbers from `first` on whose bits are set.
fn push_bits(runs: &mut Runs, first: u32, mut bits: u32) -> Option<()> {
    while bits != 0 {
        let start = bits.trailing_zeros();
        let len = (bits >> start).trailing_ones();
        runs.push(first.checked_add(start)?..first.checked_add(start + len)?);
        bits = bits.checked_shr(start + len).unwrap_or(0).checked_shl(start + len).unwrap_or(0);
    }
    Some(())
}

fn put(bytes: &mut Vec<u8>, mut number: u32) {
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
}

/// The rest of some bytes, read number by number.
struct Numbers<'a>(&'a [u8]);

impl Numbers<'_> {
    fn next(&mut self) -> Option<u32> {
        let mut number = 0_u64;
        for place in (0..35).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f) << place;
            if byte & 0x80 == 0 {
                return u32::try_from(number).ok();
            }
        }
        None
    }

    /// Runs of numbers below `limit`.
    fn runs(&mut self, limit: u32) -> Option<Runs> {
        let mut runs = Runs::default();
        for _ in 0..self.next()? {
            let start = runs.end().checked_add(self.next()?)?;
            let end =
                start.checked_add(self.next()?).filter(|end| start < *end && *end <= limit)?;
            runs.push(start..end);
        }
        Some(runs)
    }
}

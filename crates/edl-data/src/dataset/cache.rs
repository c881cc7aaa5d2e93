// SPDX-License-Identifier: Apache-2.0
//! The few decoded chunks that stay in memory.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Keeps what was used last, up to a weight in bytes; the newest entry always stays.
#[derive(Debug)]
pub(super) struct Cache<T: ?Sized> {
    limit: usize,
    entries: Mutex<VecDeque<Entry<T>>>,
}

#[derive(Debug)]
struct Entry<T: ?Sized> {
    key: usize,
    bytes: usize,
    value: Arc<T>,
}

impl<T: ?Sized> Cache<T> {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, entries: Mutex::new(VecDeque::new()) }
    }

    pub(super) fn get(&self, key: usize) -> Option<Arc<T>> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let at = entries.iter().position(|entry| entry.key == key)?;
        let entry = entries.remove(at)?;
        let value = Arc::clone(&entry.value);
        entries.push_front(entry);
        Some(value)
    }

    pub(super) fn put(&self, key: usize, value: Arc<T>, bytes: usize) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        // Two threads may have unpacked the same chunk; the later one replaces the earlier.
        entries.retain(|entry| entry.key != key);
        entries.push_front(Entry { key, bytes, value });
        let mut total = 0;
        let keep = entries.iter().take_while(|entry| {
            total += entry.bytes;
            total <= self.limit
        });
        let keep = keep.count().max(1);
        entries.truncate(keep);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_stays_and_the_newest_always_does() {
        let cache = Cache::new(10);
        for key in 0..3 {
            cache.put(key, Arc::new(key), 4);
        }
        assert_eq!(cache.get(0), None);
        assert_eq!(cache.get(1).as_deref(), Some(&1));
        cache.put(3, Arc::new(3), 4);
        assert_eq!(cache.get(2), None);
        assert_eq!(cache.get(1).as_deref(), Some(&1));
        cache.put(4, Arc::new(4), 100);
        assert_eq!(cache.get(4).as_deref(), Some(&4));
        assert_eq!(cache.get(1), None);
    }
}

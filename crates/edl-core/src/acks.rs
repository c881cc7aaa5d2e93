// SPDX-License-Identifier: Apache-2.0
//! Collects the acknowledgements of all servers into one per push.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::id::{BatchId, PsId};
use crate::time::Time;

/// The pushes on one connection that some server has not acknowledged yet, by their number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acks(BTreeMap<u64, OpenPush>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct OpenPush {
    batch: BatchId,
    /// Servers that have not acknowledged it.
    waiting: Vec<PsId>,
    since: Time,
}

impl Acks {
    /// Notes that a push is sent to `servers`.
    pub fn sent(&mut self, number: u64, batch: BatchId, servers: Vec<PsId>, now: Time) {
        self.0.insert(number, OpenPush { batch, waiting: servers, since: now });
    }

    /// Notes one server's acknowledgement; the batch if it was the last.
    pub fn acknowledge(&mut self, number: u64, ps: PsId) -> Option<BatchId> {
        let push = self.0.get_mut(&number)?;
        push.waiting.retain(|waiting| *waiting != ps);
        if !push.waiting.is_empty() {
            return None;
        }
        self.0.remove(&number).map(|push| push.batch)
    }

    /// The oldest push that waits for `ps`, if it waits for longer than `patience`.
    #[must_use]
    pub fn overdue(&self, ps: PsId, patience: Duration, now: Time) -> Option<BatchId> {
        let oldest = self.0.values().find(|push| push.waiting.contains(&ps))?;
        (now.since(oldest.since) >= patience).then_some(oldest.batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCH: BatchId = BatchId { epoch: 0, index: 7 };

    #[test]
    fn a_push_is_acknowledged_once_by_the_last_server() {
        let mut acks = Acks::default();
        acks.sent(1, BATCH, vec![PsId(0), PsId(1)], Time::ZERO);
        assert_eq!(acks.acknowledge(1, PsId(1)), None);
        assert_eq!(acks.acknowledge(1, PsId(1)), None, "the same server again");
        assert_eq!(acks.acknowledge(2, PsId(0)), None, "another push");
        assert_eq!(acks.acknowledge(1, PsId(0)), Some(BATCH));
        assert_eq!(acks.acknowledge(1, PsId(0)), None);
    }

    #[test]
    fn a_server_that_is_late_is_found_by_its_oldest_push() {
        let (second, patience) = (Duration::from_secs(1), Duration::from_secs(3));
        let mut acks = Acks::default();
        let mut now = Time::ZERO;
        for index in [7, 8] {
            let batch = BatchId { epoch: 0, index };
            acks.sent(index.into(), batch, vec![PsId(0), PsId(1)], now);
            now = now + second;
        }
        acks.acknowledge(7, PsId(1));
        now = now + second;
        assert_eq!(acks.overdue(PsId(0), patience, now), Some(BATCH));
        assert_eq!(acks.overdue(PsId(1), patience, now), None, "it waits since a second later");
        assert_eq!(acks.overdue(PsId(2), patience, now), None);
    }
}

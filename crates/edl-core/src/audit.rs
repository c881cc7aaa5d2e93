// SPDX-License-Identifier: Apache-2.0
//! Proof that every record was trained once: what the partitions say, compared with the plan.
//!
//! Two books are kept apart on purpose: the applied set says *which* batches, the count of updates
//! says *how often* rows were changed. They can only agree if each batch was applied once.

use crate::batch::BatchPlan;
use crate::id::BatchId;
use crate::servers::PartitionState;

/// The result for a whole job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audit {
    pub n_records: u64,
    pub epochs: Vec<EpochAudit>,
    pub is_clean: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpochAudit {
    pub epoch: u32,
    /// Records that every partition has applied.
    pub records: u64,
    /// Records of a finished epoch that some partition lacks.
    pub missing: u64,
    /// Records' worth of updates beyond what the sets explain.
    pub duplicated: u64,
    pub is_finished: bool,
}

/// Compares each partition's applied set with its count of updates and with the plan.
///
/// `n_epochs` epochs are said to be finished; the one after may be under way.
#[must_use]
pub fn audit(plan: &BatchPlan, states: &[PartitionState], n_epochs: u32) -> Audit {
    let n_batches = plan.n_batches();
    let last = states
        .iter()
        .map(|s| s.applied.epoch() + u32::from(s.applied.n_in_epoch(s.applied.epoch()) > 0))
        .max()
        .unwrap_or(0)
        .max(n_epochs);
    let excess: u64 = states.iter().map(|s| s.updates.abs_diff(s.applied.len())).max().unwrap_or(0);
    let mut epochs: Vec<EpochAudit> = Vec::new();
    for epoch in 0..last {
        let is_finished = epoch < n_epochs;
        let is_applied =
            |index: u32| states.iter().all(|s| s.applied.contains(BatchId { epoch, index }));
        let is_whole = !states.is_empty() && states.iter().all(|s| epoch < s.applied.epoch());
        let records = if is_whole {
            plan.n_records
        } else {
            let applied = (0..n_batches).filter(|index| !states.is_empty() && is_applied(*index));
            applied.map(|index| plan.records(BatchId { epoch, index }).len() as u64).sum()
        };
        let missing = if is_finished { plan.n_records - records } else { 0 };
        epochs.push(EpochAudit { epoch, records, missing, duplicated: 0, is_finished });
    }
    if let Some(epoch) = epochs.last_mut() {
        epoch.duplicated = excess * u64::from(plan.minibatch_size);
    }
    let is_clean = excess == 0 && epochs.iter().all(|epoch| epoch.missing == 0);
    Audit { n_records: plan.n_records, epochs, is_clean }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::applied::AppliedSet;
    use crate::id::PartitionId;

    fn states(plan: &BatchPlan, n_applied: [u32; 2], extra: u64) -> Vec<PartitionState> {
        let state = |(n, partition): (u32, u32)| {
            let mut applied = AppliedSet::new(plan.n_batches());
            for index in 0..n {
                applied.insert(BatchId {
                    epoch: index / plan.n_batches(),
                    index: index % plan.n_batches(),
                });
            }
            let updates = applied.len() + extra;
            PartitionState { partition: PartitionId(partition), applied, updates, n_rows: 0 }
        };
        n_applied.into_iter().zip(0..).map(state).collect()
    }

    #[test]
    fn it_finds_what_is_missing_and_what_was_applied_twice() {
        let plan = BatchPlan {
            n_records: 25,
            minibatch_size: 10,
            batches_per_shard: 2,
            seed: 0,
            shuffle: true,
        };
        assert!(audit(&plan, &states(&plan, [6, 6], 0), 2).is_clean);
        let lacking = audit(&plan, &states(&plan, [6, 5], 0), 2);
        assert_eq!(lacking.epochs[1].missing, 5);
        assert!(!lacking.is_clean);
        let twice = audit(&plan, &states(&plan, [6, 6], 1), 2);
        assert_eq!(twice.epochs[1].duplicated, 10);
        assert!(!twice.is_clean);
        let under_way = audit(&plan, &states(&plan, [4, 4], 0), 1);
        assert_eq!((under_way.epochs[1].records, under_way.epochs[1].missing), (10, 0));
        assert!(under_way.is_clean);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Proof that every record was trained once: the state of the partitions, compared with the plan.
//!
//! Two records are kept separately on purpose: the applied set holds *which* batches, the count of
//! updates *how often* rows were changed. They can only agree if each batch was applied once.

use crate::applied::AppliedSet;
use crate::batch::BatchPlan;
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
/// `n_epochs` epochs are finished; the one after may be in progress.
#[must_use]
pub fn audit(plan: &BatchPlan, states: &[PartitionState], n_epochs: u32) -> Audit {
    let last = states.iter().filter_map(|s| s.applied.last()).map(|batch| batch.epoch + 1).max();
    let last = last.unwrap_or(0).max(n_epochs);
    let excess: u64 = states.iter().map(|s| s.updates.abs_diff(s.applied.len())).max().unwrap_or(0);
    let mut sets = states.iter().map(|state| &state.applied);
    let first = sets.next().cloned().unwrap_or_else(|| AppliedSet::new(plan.n_batches()));
    let applied = sets.fold(first, |applied, set| applied.and(set));
    let mut epochs: Vec<EpochAudit> = Vec::new();
    for epoch in 0..last {
        let is_finished = epoch < n_epochs;
        let records = plan.n_records_in(&applied.runs(epoch));
        let missing = if is_finished { plan.n_records.saturating_sub(records) } else { 0 };
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
    use crate::batch;
    use crate::id::PartitionId;

    fn states(plan: &BatchPlan, n_applied: [u32; 2], extra: u64) -> Vec<PartitionState> {
        let state = |(n, partition): (u32, u32)| {
            let applied = AppliedSet::of_first(n.into(), plan.n_batches());
            let updates = applied.len() + extra;
            PartitionState { partition: PartitionId(partition), applied, updates, n_rows: 0 }
        };
        n_applied.into_iter().zip(0..).map(state).collect()
    }

    #[test]
    fn it_finds_what_is_missing_and_what_was_applied_twice() {
        let plan = BatchPlan {
            version: batch::NEWEST,
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

    #[test]
    fn the_records_of_a_large_job_are_counted_without_being_named() {
        let plan = BatchPlan {
            version: batch::OLDEST,
            n_records: 4_000_000_001,
            minibatch_size: 4,
            batches_per_shard: 8,
            seed: 0,
            shuffle: true,
        };
        let all = 1_000_000_001;
        let state = audit(&plan, &states(&plan, [all, all - 2], 0), 1);
        assert_eq!((state.epochs[0].records, state.epochs[0].missing), (3_999_999_996, 5));
    }
}

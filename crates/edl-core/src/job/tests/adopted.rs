// SPDX-License-Identifier: Apache-2.0
//! Complete checkpoints that no master has recorded.

use std::collections::BTreeSet;

use super::bench::model;
use crate::checkpoint_name::CheckpointName;
use crate::id::{BatchId, CheckpointId, Generation, RunId};
use crate::job::{Durable, FoundCheckpoint};

fn found(generation: u64, version: u64) -> FoundCheckpoint {
    let (generation, checkpoint) = (Generation(generation), CheckpointId(version));
    let name = CheckpointName { generation, version, checkpoint, run: RunId::default() };
    let folder = name.to_string();
    let (exact, model, skipped) = (None, model(), BTreeSet::new());
    FoundCheckpoint { folder, generation, version, exact, model, skipped }
}

fn versions(durable: &Durable) -> Vec<u64> {
    durable.checkpoints.iter().map(|checkpoint| checkpoint.version).collect()
}

#[test]
fn a_lost_store_is_rebuilt_from_the_checkpoints() {
    let mut durable = Durable::default();
    let skipped = BTreeSet::from([BatchId { epoch: 0, index: 3 }]);
    let newest = FoundCheckpoint { skipped: skipped.clone(), ..found(2, 12) };
    assert_eq!(durable.adopt(vec![found(1, 10), found(2, 8), newest]), 3);
    assert_eq!((durable.generation, &durable.skipped), (Generation(2), &skipped));
    assert_eq!(durable.model, Some(model()));
    assert_eq!(versions(&durable), [10, 8, 12]);
    assert_eq!(durable.latest_checkpoint().unwrap().version, 12);
}

#[test]
fn a_checkpoint_that_was_not_recorded_takes_its_place_by_age() {
    let mut durable = Durable::default();
    durable.adopt(vec![found(1, 10), found(2, 12)]);
    durable.checkpoints[1].is_bad = true;
    assert_eq!(durable.adopt(vec![found(1, 10), found(1, 20), found(2, 12)]), 1);
    assert_eq!(versions(&durable), [10, 20, 12]);
    assert!(durable.checkpoints[2].is_bad, "what is known stays");
    assert_eq!(durable.adopt(Vec::new()), 0, "one that is missing is noticed at its load");
    assert_eq!(versions(&durable), [10, 20, 12]);
}

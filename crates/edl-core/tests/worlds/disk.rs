// SPDX-License-Identifier: Apache-2.0
//! What survives every process: the job's books and its checkpoints.

use std::collections::{BTreeMap, BTreeSet};

use edl_core::id::Term;
use edl_core::job::{CutFile, Durable};

use crate::history::State;
use crate::kernel::Pid;
use crate::message::Writing;

#[derive(Default)]
pub(crate) struct Disk {
    pub(crate) durable: Durable,
    /// The last term taken; masters of lower ones change nothing any more.
    pub(crate) term: Term,
    /// Where workers find the master.
    pub(crate) master: Option<Pid>,
    pub(crate) folders: BTreeMap<String, BTreeMap<u32, State>>,
    pub(crate) manifests: BTreeMap<String, u64>,
    pub(crate) spoiled: BTreeSet<String>,
    pub(crate) is_full: bool,
}

impl Disk {
    /// Writes files of a cut; none if that cannot be.
    pub(crate) fn write(&mut self, writing: &Writing) -> Option<Vec<CutFile>> {
        let Writing { folder, partitions, state, .. } = writing;
        if self.is_full {
            return None;
        }
        let files = self.folders.get_mut(folder)?;
        files.extend(partitions.clone().map(|partition| (partition, *state)));
        let file = |partition| CutFile {
            partition,
            name: format!("partition-{partition:05}.edlp"),
            bytes: 1,
            checksum: String::new(),
            updates: state.step,
        };
        Some(partitions.clone().map(file).collect())
    }

    /// The state in a checkpoint; none if it is spoiled, or deleted before somebody slow came to
    /// it. Panics if it is not whole.
    pub(crate) fn load(&self, folder: &str, n_partitions: u32) -> Option<State> {
        if self.spoiled.contains(folder) || !self.manifests.contains_key(folder) {
            return None;
        }
        Some(self.whole(folder, n_partitions))
    }

    /// The one state that all files of a cut are of.
    pub(crate) fn whole(&self, folder: &str, n_partitions: u32) -> State {
        let files = &self.folders[folder];
        assert_eq!(files.len(), n_partitions as usize, "every partition has a file");
        let first = files[&0];
        assert!(files.values().all(|state| *state == first), "files of two states: {files:?}");
        first
    }
}

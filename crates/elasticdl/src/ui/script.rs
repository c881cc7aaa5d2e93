// SPDX-License-Identifier: Apache-2.0
//! What the script of a custom training loop prints, as its leader's log receives it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use edl_core::job::JobState;
use edl_core::platform::{InstanceId, Role};
use edl_net::proto::JobStatus;

use crate::logs::{self, Followed};

/// The logs of all workers, of which only the leader's is shown.
pub(super) struct ScriptOutput {
    logs: PathBuf,
    followed: BTreeMap<String, Followed>,
    /// What was read and not shown yet, by worker.
    unshown: BTreeMap<String, String>,
    leader: String,
}

impl ScriptOutput {
    /// Begins at the ends of the logs. Worker 0 leads until it is known who does.
    pub(super) fn new(logs: PathBuf) -> Self {
        let files = logs::log_files(&logs).into_iter();
        let followed = files.map(|(name, path)| (name, Followed::from_end(&path))).collect();
        let leader = InstanceId { role: Role::Worker, id: 0 }.to_string();
        Self { logs, followed, unshown: BTreeMap::new(), leader }
    }

    /// Reads the new lines of all scripts, without those of their workers.
    pub(super) fn read(&mut self) {
        for (name, path) in logs::log_files(&self.logs) {
            let followed = self.followed.entry(name.clone()).or_default();
            let text = followed.read(&path).unwrap_or_default();
            let lines = text.split_inclusive('\n').filter(|line| logs::time_of(line).is_none());
            self.unshown.entry(name).or_default().extend(lines);
        }
    }

    /// The lines of the leader that were read and not shown yet. Once a job was stopped or has
    /// failed, they are only about the end of the process. `status` was read after them.
    pub(super) fn take(&mut self, status: Option<&JobStatus>) -> String {
        let mut instances = status.iter().flat_map(|status| &status.instances);
        if let Some(leader) = instances.find(|i| i.role() == Role::Worker && i.lanes.contains(&0)) {
            self.leader = InstanceId { role: Role::Worker, id: leader.id }.to_string();
        }
        let state = status.map(JobStatus::state).filter(|state| state.is_final());
        let is_over = state.is_some_and(|state| state != JobState::Succeeded);
        let shown = std::mem::take(&mut self.unshown).remove(&self.leader);
        shown.filter(|_| !is_over).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use edl_net::proto::Instance;

    use super::*;

    #[test]
    fn only_the_leaders_lines_are_shown_each_once_and_without_the_workers() {
        let folder = tempfile::tempdir().unwrap();
        let read = |output: &mut ScriptOutput, status: Option<&JobStatus>| {
            output.read();
            output.take(status)
        };
        let write = |worker: u32, text: &str| {
            let path = folder.path().join(format!("worker-{worker}.log"));
            let before = std::fs::read_to_string(&path).unwrap_or_default();
            std::fs::write(path, before + text).unwrap();
        };
        write(0, "an earlier run\n");
        let mut output = ScriptOutput::new(folder.path().to_owned());
        write(0, "a\n[2026-11-15 02:46:40,750] [INFO] [x] y\nb\nc");
        write(1, "not shown\n");
        assert_eq!(read(&mut output, None), "a\nb\n");
        write(0, "d\n");
        assert_eq!(read(&mut output, None), "cd\n");
        let mut leader = Instance { id: 1, lanes: vec![0, 1], ..Instance::default() };
        leader.set_role(Role::Worker);
        let status = JobStatus { instances: vec![leader], ..JobStatus::default() };
        write(1, "e\n");
        assert_eq!(read(&mut output, Some(&status)), "e\n");
        write(1, "f\n");
        assert_eq!(read(&mut output, None), "f\n", "it leads until another does");
        let mut stopped = JobStatus::default();
        stopped.set_state(JobState::Stopped);
        write(1, "a stack\n");
        assert_eq!(read(&mut output, Some(&stopped)), "");
    }
}

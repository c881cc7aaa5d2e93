// SPDX-License-Identifier: Apache-2.0
//! What the user's own code prints in workers, as their logs receive it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use edl_core::job::JobState;
use edl_core::platform::{InstanceId, InstanceState, Role};
use edl_net::proto::{Instance, JobStatus};

use crate::cli::LogToTerminal;
use crate::logs::{self, Followed};

/// The logs of all workers, and those of them that are shown.
pub(super) struct ScriptOutput {
    logs: PathBuf,
    shown: LogToTerminal,
    followed: BTreeMap<String, Followed>,
    /// What was read and not shown yet, by worker.
    unshown: BTreeMap<String, String>,
    leader: String,
}

impl ScriptOutput {
    /// Begins at the ends of the logs if the job is resumed: the rest is of an earlier run. Worker 0
    /// leads until it is known who does.
    pub(super) fn new(logs: PathBuf, shown: LogToTerminal, is_resuming: bool) -> Self {
        let files = logs::log_files(&logs).into_iter().filter(|_| is_resuming);
        let followed = files.map(|(name, path)| (name, Followed::from_end(&path))).collect();
        let leader = InstanceId { role: Role::Worker, id: 0 }.to_string();
        Self { logs, shown, followed, unshown: BTreeMap::new(), leader }
    }

    /// Reads the new lines of all workers, without those of elasticdl itself.
    pub(super) fn read(&mut self) {
        let is_worker = |name: &str| name.starts_with(Role::Worker.name());
        for (name, path) in logs::log_files(&self.logs).into_iter().filter(|(n, _)| is_worker(n)) {
            let followed = self.followed.entry(name.clone()).or_default();
            let text = followed.read(&path).unwrap_or_default();
            let lines = text.split_inclusive('\n').filter(|line| logs::time_of(line).is_none());
            self.unshown.entry(name).or_default().extend(lines);
        }
    }

    /// The lines to show that were read and not shown yet. Once a job was stopped or has failed,
    /// they are only about the end of the process. `status` was read after them.
    pub(super) fn take(&mut self, status: Option<&JobStatus>) -> String {
        if let Some(leader) = status.and_then(leader) {
            self.leader = InstanceId { role: Role::Worker, id: leader.id }.to_string();
        }
        let state = status.map(JobStatus::state).filter(|state| state.is_final());
        let is_over = state.is_some_and(|state| state != JobState::Succeeded);
        let mut unshown = std::mem::take(&mut self.unshown);
        match if is_over { LogToTerminal::None } else { self.shown } {
            LogToTerminal::None => String::new(),
            LogToTerminal::Leader => unshown.remove(&self.leader).unwrap_or_default(),
            LogToTerminal::All => {
                let lines = unshown.iter().flat_map(|(name, text)| {
                    text.lines().map(move |line| logs::labelled(name, line, false) + "\n")
                });
                lines.collect()
            }
        }
    }
}

/// The worker that trains the first lane; without lanes, the one with the lowest number.
fn leader(status: &JobStatus) -> Option<&Instance> {
    let workers = || status.instances.iter().filter(|it| it.role() == Role::Worker);
    let by_lane = workers().find(|it| it.lanes.contains(&0));
    by_lane.or_else(|| {
        let is_working = |it: &&Instance| it.state() == InstanceState::Working;
        let is_without_lanes = status.lanes == 0;
        workers().filter(is_working).min_by_key(|it| it.id).filter(|_| is_without_lanes)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Logs {
        folder: tempfile::TempDir,
    }

    impl Logs {
        fn new() -> Self {
            Self { folder: tempfile::tempdir().unwrap() }
        }

        fn write(&self, process: &str, text: &str) {
            let path = self.folder.path().join(format!("{process}.log"));
            let before = std::fs::read_to_string(&path).unwrap_or_default();
            std::fs::write(path, before + text).unwrap();
        }

        fn follow(&self, shown: LogToTerminal) -> ScriptOutput {
            ScriptOutput::new(self.folder.path().to_owned(), shown, true)
        }
    }

    fn read(output: &mut ScriptOutput, status: Option<&JobStatus>) -> String {
        output.read();
        output.take(status)
    }

    fn worker(id: u32, lanes: &[u32]) -> Instance {
        let mut worker = Instance { id, lanes: lanes.to_vec(), ..Instance::default() };
        worker.set_role(Role::Worker);
        worker.set_state(InstanceState::Working);
        worker
    }

    #[test]
    fn only_the_leaders_lines_are_shown_each_once_and_without_the_workers() {
        let logs = Logs::new();
        logs.write("worker-0", "an earlier run\n");
        let mut output = logs.follow(LogToTerminal::Leader);
        logs.write("worker-0", "a\n[2026-11-15 02:46:40,750] [INFO] [x] y\nb\nc");
        logs.write("worker-1", "not shown\n");
        assert_eq!(read(&mut output, None), "a\nb\n");
        logs.write("worker-0", "d\n");
        assert_eq!(read(&mut output, None), "cd\n");
        let instances = vec![worker(1, &[0, 1])];
        let status = JobStatus { instances, lanes: 2, ..JobStatus::default() };
        logs.write("worker-1", "e\n");
        assert_eq!(read(&mut output, Some(&status)), "e\n");
        logs.write("worker-1", "f\n");
        assert_eq!(read(&mut output, None), "f\n", "it leads until another does");
        let mut stopped = JobStatus::default();
        stopped.set_state(JobState::Stopped);
        logs.write("worker-1", "a stack\n");
        assert_eq!(read(&mut output, Some(&stopped)), "");
    }

    #[test]
    fn without_lanes_the_working_worker_with_the_lowest_number_leads() {
        let logs = Logs::new();
        let mut output = logs.follow(LogToTerminal::Leader);
        let instances = vec![worker(2, &[]), worker(1, &[])];
        let status = JobStatus { instances, ..JobStatus::default() };
        logs.write("worker-1", "a\n");
        logs.write("worker-2", "b\n");
        assert_eq!(read(&mut output, Some(&status)), "a\n");
    }

    #[test]
    fn lines_of_all_workers_have_their_names_and_none_are_shown_on_request() {
        let logs = Logs::new();
        let (mut all, mut none) =
            (logs.follow(LogToTerminal::All), logs.follow(LogToTerminal::None));
        logs.write("worker-0", "a\n");
        logs.write("worker-1", "b\nc\n");
        logs.write("ps-0", "not a worker\n");
        let lines = "worker-0   a\nworker-1   b\nworker-1   c\n";
        assert_eq!(read(&mut all, None), lines);
        assert_eq!(read(&mut none, None), "");
    }
}

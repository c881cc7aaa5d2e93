// SPDX-License-Identifier: Apache-2.0
//! Which process is killed when: a pure function of the seed and the status of the job.

use edl_core::job::JobState;
use edl_core::platform::Role;
use edl_core::rng::Rng;
use edl_net::proto::JobStatus;

/// Shares of the records, in percent, after which a process of a role is killed.
const KILLS: [(u64, Role); 6] = [
    (10, Role::Worker),
    (25, Role::Worker),
    (40, Role::Master),
    (55, Role::Worker),
    (70, Role::Worker),
    (85, Role::Worker),
];

pub(super) struct KillPlan {
    rng: Rng,
    n_done: usize,
}

/// A process to kill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Victim {
    pub(super) name: String,
    pub(super) pid: u32,
}

impl KillPlan {
    pub(super) fn new(seed: u64) -> Self {
        Self { rng: Rng::new(seed), n_done: 0 }
    }

    /// Processes killed so far.
    pub(super) fn n_done(&self) -> usize {
        self.n_done
    }

    /// The process to kill now, if one is due. Only a training job is hit, so every kill must be
    /// recovered from.
    pub(super) fn due(&mut self, status: &JobStatus) -> Option<Victim> {
        let (percent, role) = KILLS.get(self.n_done)?;
        let is_time = 100 * status.records_done >= percent * status.records_total.max(1);
        if status.state() != JobState::Running || !is_time {
            return None;
        }
        let alive: Vec<_> =
            status.instances.iter().filter(|one| one.role() == *role && one.pid > 0).collect();
        let which = usize::try_from(self.rng.below(alive.len().max(1) as u64)).ok()?;
        let chosen = alive.get(which)?;
        self.n_done += 1;
        let name = if *role == Role::Master { "the master".to_owned() } else { chosen.name() };
        Some(Victim { name, pid: chosen.pid })
    }
}

#[cfg(test)]
mod tests {
    use edl_net::proto::Instance;

    use super::*;

    fn status(state: JobState, percent: u64) -> JobStatus {
        let one = |role: Role, id: u32, pid: u32| Instance {
            role: role.into(),
            id,
            pid,
            ..Instance::default()
        };
        JobStatus {
            state: state.into(),
            records_done: percent,
            records_total: 100,
            instances: vec![
                one(Role::Master, 0, 10),
                one(Role::Worker, 0, 20),
                one(Role::Worker, 1, 0),
            ],
            ..JobStatus::default()
        }
    }

    #[test]
    fn running_processes_are_killed_in_order_while_the_job_trains() {
        let mut plan = KillPlan::new(7);
        assert_eq!(plan.due(&status(JobState::Running, 9)), None);
        assert_eq!(plan.due(&status(JobState::Recovering, 50)), None);
        let worker = Victim { name: "worker-0".into(), pid: 20 };
        assert_eq!(plan.due(&status(JobState::Running, 10)), Some(worker.clone()));
        assert_eq!(plan.due(&status(JobState::Running, 24)), None);
        assert_eq!(plan.due(&status(JobState::Running, 90)), Some(worker));
        let master = Victim { name: "the master".into(), pid: 10 };
        assert_eq!(plan.due(&status(JobState::Running, 90)), Some(master));
        assert_eq!(plan.n_done(), 3);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Which process is killed when, and when the job has healed: a pure function of the seed and the
//! statuses of the job.

use std::fmt;
use std::time::Duration;

use edl_core::job::JobState;
use edl_core::platform::{InstanceState, Role};
use edl_core::rng::Rng;
use edl_net::proto::{Instance, JobStatus};

use crate::console::span;

/// Shares of the records, in percent, after which a process of a role is killed.
const KILLS: [(u64, Role); 3] = [(10, Role::Worker), (35, Role::Ps), (60, Role::Master)];
/// The first kill comes no later than this, even on a slow machine.
const FIRST: Duration = Duration::from_secs(8);

pub(super) struct KillPlan {
    rng: Rng,
    hits: Vec<Hit>,
}

/// A process to kill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Victim {
    pub(super) name: String,
    pub(super) pid: u32,
}

/// A process that was killed.
struct Hit {
    victim: Victim,
    role: Role,
    at: Duration,
    /// Processes of the role that worked before.
    n_before: usize,
    /// The step at which all of them worked again.
    step_when_whole: Option<u64>,
    healed: Option<Healed>,
}

/// A job that has healed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Healed {
    pub(super) name: String,
    /// From the kill to the first step with all processes.
    pub(super) after: Duration,
    /// The step then: less than at the kill if a checkpoint was loaded.
    step: u64,
}

impl fmt::Display for Healed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, after, step } = self;
        let after = span(after.as_secs_f64());
        write!(f, "healed {after} after the loss of {name}: training at step {step}")
    }
}

impl KillPlan {
    pub(super) fn new(seed: u64) -> Self {
        Self { rng: Rng::new(seed), hits: Vec::new() }
    }

    /// The kills from which the job has healed.
    pub(super) fn healed(&self) -> Vec<Healed> {
        self.hits.iter().filter_map(|hit| hit.healed.clone()).collect()
    }

    /// Processes killed so far.
    pub(super) fn n_kills(&self) -> usize {
        self.hits.len()
    }

    /// Whether a process of each role was killed.
    pub(super) fn is_complete(&self) -> bool {
        self.hits.len() == KILLS.len()
    }

    /// The last process that was to be killed could not be: another one is due.
    pub(super) fn undo(&mut self) {
        self.hits.pop();
    }

    /// The process to kill now, if one is due. Only a whole job that trains is hit, so every kill
    /// must be recovered from. `now` is the time since the job was started.
    pub(super) fn due(&mut self, status: &JobStatus, now: Duration) -> Option<Victim> {
        let (percent, role) = KILLS.get(self.hits.len())?;
        let is_share = 100 * status.records_done >= percent * status.records_total.max(1);
        let is_first = self.hits.is_empty() && now >= FIRST && status.step > 0;
        let is_healing = self.hits.last().is_some_and(|hit| hit.healed.is_none());
        if status.state() != JobState::Running || is_healing || !(is_share || is_first) {
            return None;
        }
        let alive: Vec<&Instance> = working(status, *role).collect();
        let which = usize::try_from(self.rng.below(alive.len().max(1) as u64)).ok()?;
        let chosen = alive.get(which)?;
        let name = if *role == Role::Master { "the master".to_owned() } else { chosen.name() };
        let victim = Victim { name, pid: chosen.pid };
        let hit = Hit {
            victim: victim.clone(),
            role: *role,
            at: now,
            n_before: alive.len(),
            step_when_whole: None,
            healed: None,
        };
        self.hits.push(hit);
        Some(victim)
    }

    /// Looks whether the job has healed from the last kill.
    pub(super) fn heal(&mut self, status: &JobStatus, now: Duration) -> Option<Healed> {
        let hit = self.hits.last_mut().filter(|hit| hit.healed.is_none())?;
        let is_there = status.instances.iter().any(|it| it.pid == hit.victim.pid);
        let is_whole = !is_there && working(status, hit.role).count() >= hit.n_before;
        let is_over = status.state() == JobState::Succeeded;
        if !is_over && (status.state() != JobState::Running || !is_whole) {
            return None;
        }
        let step = *hit.step_when_whole.get_or_insert(status.step);
        if is_over || status.step > step {
            let (name, after) = (hit.victim.name.clone(), now.saturating_sub(hit.at));
            hit.healed = Some(Healed { name, after, step: status.step });
        }
        hit.healed.clone()
    }
}

/// The processes of a role that do their work.
fn working(status: &JobStatus, role: Role) -> impl Iterator<Item = &Instance> {
    let state = match role {
        Role::Worker => InstanceState::Working,
        Role::Ps => InstanceState::Serving,
        Role::Master => InstanceState::Running,
    };
    let of_role = status.instances.iter().filter(move |it| it.role() == role && it.pid > 0);
    of_role.filter(move |it| it.state() == state)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MASTER: (Role, u32, InstanceState) = (Role::Master, 10, InstanceState::Running);
    const SERVER: (Role, u32, InstanceState) = (Role::Ps, 15, InstanceState::Serving);
    const WORKER: (Role, u32, InstanceState) = (Role::Worker, 20, InstanceState::Working);

    fn status(percent: u64, instances: &[(Role, u32, InstanceState)]) -> JobStatus {
        let instance = |(role, pid, state): &(Role, u32, InstanceState)| Instance {
            role: (*role).into(),
            id: *pid,
            pid: *pid,
            state: (*state).into(),
            ..Instance::default()
        };
        JobStatus {
            state: JobState::Running.into(),
            step: percent,
            records_done: percent,
            records_total: 100,
            instances: instances.iter().map(instance).collect(),
            ..JobStatus::default()
        }
    }

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn named(name: &str, pid: u32) -> Option<Victim> {
        Some(Victim { name: name.into(), pid })
    }

    #[test]
    fn a_worker_a_server_and_the_master_are_killed_each_after_the_job_has_healed() {
        let all = [MASTER, SERVER, WORKER];
        let mut plan = KillPlan::new(7);
        assert_eq!(plan.due(&status(9, &all), secs(1)), None);
        let recovering = JobStatus { state: JobState::Recovering.into(), ..status(50, &all) };
        assert_eq!(plan.due(&recovering, secs(1)), None);
        assert_eq!(plan.due(&status(10, &all), secs(2)), named("worker-20", 20));
        assert_eq!(plan.due(&status(90, &all), secs(3)), None, "the worker is still dead");
        assert_eq!(plan.heal(&status(11, &[MASTER, SERVER]), secs(3)), None);
        let starting = (Role::Worker, 21, InstanceState::Joining);
        assert_eq!(plan.heal(&status(12, &[MASTER, SERVER, starting]), secs(4)), None);
        let replaced = [MASTER, SERVER, (Role::Worker, 21, InstanceState::Working)];
        assert_eq!(plan.heal(&status(13, &replaced), secs(5)), None, "it has trained no step yet");
        let healed = plan.heal(&status(14, &replaced), secs(6)).unwrap();
        assert_eq!(healed, Healed { name: "worker-20".into(), after: secs(4), step: 14 });
        assert_eq!(plan.heal(&status(15, &replaced), secs(7)), None, "it is reported once");
        assert_eq!(plan.due(&status(35, &replaced), secs(8)), named("ps-15", 15));
        let replaced = [MASTER, (Role::Ps, 16, InstanceState::Serving), WORKER];
        plan.heal(&status(36, &replaced), secs(9));
        plan.heal(&status(37, &replaced), secs(9));
        assert_eq!(plan.due(&status(90, &replaced), secs(9)), named("the master", 10));
        let replaced = [(Role::Master, 11, InstanceState::Running), SERVER, WORKER];
        plan.heal(&status(91, &replaced), secs(10));
        let succeeded = JobStatus { state: JobState::Succeeded.into(), ..status(92, &[]) };
        plan.heal(&succeeded, secs(11));
        assert_eq!(plan.due(&status(99, &replaced), secs(12)), None);
        let times: Vec<Duration> = plan.healed().into_iter().map(|healed| healed.after).collect();
        assert!(plan.is_complete());
        assert_eq!((plan.n_kills(), times), (3, vec![secs(4), secs(1), secs(2)]));
    }

    #[test]
    fn a_process_that_could_not_be_killed_does_not_count() {
        let all = [MASTER, SERVER, WORKER];
        let mut plan = KillPlan::new(7);
        assert_eq!(plan.due(&status(10, &all), secs(1)), named("worker-20", 20));
        plan.undo();
        assert_eq!((plan.n_kills(), plan.heal(&status(11, &all), secs(2))), (0, None));
        assert_eq!(plan.due(&status(11, &all), secs(2)), named("worker-20", 20));
    }

    #[test]
    fn the_first_kill_does_not_wait_for_a_slow_machine() {
        let mut plan = KillPlan::new(7);
        let all = [MASTER, SERVER, WORKER];
        let unstarted = status(0, &all);
        assert_eq!(plan.due(&unstarted, secs(9)), None, "no step was trained yet");
        assert_eq!(plan.due(&status(1, &all), secs(7)), None);
        assert_eq!(plan.due(&status(1, &all), secs(8)), named("worker-20", 20));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Who is killed when: a pure function of the seed and of what the job says of itself.

use edl_core::rng::Rng;
use edl_net::proto::JobStatus;

/// Shares of the records, in percent, after which a blow falls, and on whom.
const BLOWS: [(u64, &str); 6] = [
    (10, "worker"),
    (25, "worker"),
    (40, "master"),
    (55, "worker"),
    (70, "worker"),
    (85, "worker"),
];

pub(super) struct Plan {
    rng: Rng,
    n_done: usize,
}

/// A process that shall die.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Victim {
    pub(super) name: String,
    pub(super) pid: u32,
}

impl Plan {
    pub(super) fn new(seed: u64) -> Self {
        Self { rng: Rng::new(seed), n_done: 0 }
    }

    /// How many blows have fallen.
    pub(super) fn n_done(&self) -> usize {
        self.n_done
    }

    /// The process that is to be killed now, if it is time: only while the job trains, so that
    /// every blow is one that has to be healed.
    pub(super) fn due(&mut self, status: &JobStatus) -> Option<Victim> {
        let (percent, role) = BLOWS.get(self.n_done)?;
        let is_time = 100 * status.records_done >= percent * status.records_total.max(1);
        if status.state != "running" || !is_time {
            return None;
        }
        let alive: Vec<_> =
            status.instances.iter().filter(|one| one.role == *role && one.pid > 0).collect();
        let which = usize::try_from(self.rng.below(alive.len().max(1) as u64)).ok()?;
        let chosen = alive.get(which)?;
        self.n_done += 1;
        let name = if *role == "master" { "the master".to_owned() } else { chosen.name() };
        Some(Victim { name, pid: chosen.pid })
    }
}

#[cfg(test)]
mod tests {
    use edl_net::proto::Instance;

    use super::*;

    fn status(state: &str, percent: u64) -> JobStatus {
        let one = |role: &str, id: u32, pid: u32| Instance {
            role: role.into(),
            id,
            pid,
            ..Instance::default()
        };
        JobStatus {
            state: state.into(),
            records_done: percent,
            records_total: 100,
            instances: vec![one("master", 0, 10), one("worker", 0, 20), one("worker", 1, 0)],
            ..JobStatus::default()
        }
    }

    #[test]
    fn blows_fall_in_order_on_those_who_live_while_the_job_trains() {
        let mut plan = Plan::new(7);
        assert_eq!(plan.due(&status("running", 9)), None);
        assert_eq!(plan.due(&status("recovering", 50)), None);
        let worker = Victim { name: "worker-0".into(), pid: 20 };
        assert_eq!(plan.due(&status("running", 10)), Some(worker.clone()));
        assert_eq!(plan.due(&status("running", 24)), None);
        assert_eq!(plan.due(&status("running", 90)), Some(worker));
        let master = Victim { name: "the master".into(), pid: 10 };
        assert_eq!(plan.due(&status("running", 90)), Some(master));
        assert_eq!(plan.n_done(), 3);
    }
}

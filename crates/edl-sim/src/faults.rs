// SPDX-License-Identifier: Apache-2.0
//! Faults, by chance.

use std::time::Duration;

use edl_core::job::Event;
use edl_core::platform::{Ended, InstanceId, Role};

use crate::kernel::{Pid, SITE};
use crate::message::{SiteTimer, Timer};
use crate::process::Process;
use crate::site::Site;

/// More than any batch, round or step takes.
const AMPLE_TIME: Duration = Duration::from_secs(600);

impl Site {
    /// Something goes wrong now, as long as the scenario has faults left.
    pub(crate) fn fault(&mut self) {
        self.calm_at = self.calm_at.max(self.kernel.now);
        if self.n_faults_left == 0 {
            return;
        }
        self.n_faults_left -= 1;
        let delay = match self.scenario.is_undisturbed {
            true => self.scenario.undisturbed_time().mul_f64(self.kernel.rng.unit() / 8.0),
            false => self.kernel.between(0, 2 * self.scenario.fault_every_ms),
        };
        self.kernel.schedule(SITE, delay, Timer::Site(SiteTimer::Fault));
        if self.scenario.is_undisturbed {
            let reason = "by the user".into();
            let stop = Event::Stop { reason, within: AMPLE_TIME };
            return self.ask_master("stop in time requested", stop);
        }
        match self.kernel.rng.below(33) {
            0..=2 => self.kill_any(Role::Worker, "worker killed"),
            3 | 4 => self.kill_any(Role::Ps, "server killed"),
            5 | 6 => self.kill_furthest(),
            7 | 8 => self.kill_master(),
            9..=11 => self.freeze_any(Role::Worker, "worker frozen"),
            12 | 13 => self.freeze_any(Role::Ps, "server frozen"),
            14 => self.freeze_master(),
            15 | 16 => self.break_any(),
            17 => self.disconnect_any(),
            18 => self.fill_disk(),
            19 | 20 => self.spoil_newest(),
            21 => self.scale(),
            22 => {
                let time = self.lasting(300, 4000);
                self.log_fault("two masters at once", &format!("for {time:?}"));
                self.depose_master(time);
            }
            23 if self.kernel.chance(300) => {
                self.disk.lose_store();
                self.stop_all("everything killed, store lost");
            }
            23 => self.stop_all("everything killed"),
            24 => self.disconnect(Role::Master, "disconnected from the master"),
            25 => self.disconnect(Role::Worker, "disconnected from each other"),
            26 => self.dismiss_any(),
            27 => self.dismiss_all(),
            28 | 31 => self.stop_job(),
            29 => self.isolate(),
            30 => self.double_server(),
            _ => self.get_stuck(),
        }
    }

    fn log_fault(&mut self, kind: &'static str, text: &str) {
        self.kernel.note(SITE, kind, text);
    }

    /// How long a fault lasts; the calm begins after it.
    fn lasting(&mut self, low_ms: u64, high_ms: u64) -> Duration {
        let time = self.kernel.between(low_ms, high_ms);
        self.calm_at = self.calm_at.max(self.kernel.now + time);
        time
    }

    fn running(&self, role: Role) -> Vec<(InstanceId, Pid)> {
        let runs = |(instance, pid): &(&InstanceId, &Pid)| {
            instance.role == role && self.processes.contains_key(pid)
        };
        self.instances.iter().filter(runs).map(|(instance, pid)| (*instance, *pid)).collect()
    }

    fn any(&mut self, role: Role) -> Option<(InstanceId, Pid)> {
        let running = self.running(role);
        (!running.is_empty()).then(|| running[self.kernel.pick(running.len())])
    }

    fn kill_any(&mut self, role: Role, kind: &'static str) {
        if let Some((instance, pid)) = self.any(role) {
            self.log_fault(kind, &instance.to_string());
            self.kill(pid);
        }
    }

    /// Kills the worker that holds the most, before it can send that to others.
    fn kill_furthest(&mut self) {
        let step = |pid: &Pid| match self.processes.get(pid).map(|slot| &slot.process) {
            Some(Process::Worker(worker)) => worker.step(),
            Some(Process::Master(_) | Process::Server(_)) | None => None,
        };
        let furthest = self.running(Role::Worker).into_iter().max_by_key(|(_, pid)| step(pid));
        if let Some((instance, pid)) = furthest {
            self.log_fault("furthest worker killed", &instance.to_string());
            self.kill(pid);
        }
    }

    fn kill_master(&mut self) {
        if let Some(pid) = self.master {
            self.log_fault("master killed", "");
            self.exited(pid, Ended::Signal(9));
            if self.kernel.chance(300) {
                self.kill_any(Role::Ps, "server killed");
            }
        }
    }

    fn freeze_any(&mut self, role: Role, kind: &'static str) {
        let time = self.lasting(50, 6000);
        if let Some((instance, pid)) = self.any(role) {
            self.log_fault(kind, &format!("{instance} for {time:?}"));
            self.freeze(pid, time);
        }
    }

    /// A worker is frozen in an evaluation, as long as the scenario has faults left.
    pub(crate) fn freeze_meanwhile(&mut self) {
        if self.n_faults_left > 0 {
            self.n_faults_left -= 1;
            self.freeze_any(Role::Worker, "worker frozen");
        }
    }

    fn freeze_master(&mut self) {
        let time = self.lasting(100, 5000);
        if let Some(pid) = self.master {
            self.log_fault("master frozen", &format!("for {time:?}"));
            self.freeze(pid, time);
        }
    }

    fn break_any(&mut self) {
        if let Some(conn) = self.kernel.any_conn() {
            let purpose = self.kernel.network.purpose(conn);
            self.log_fault("connection broken", &format!("{purpose:?}"));
            self.kernel.hang_up(conn);
        }
    }

    /// Every connection of a process breaks at once.
    fn disconnect_any(&mut self) {
        let role = if self.kernel.chance(500) { Role::Ps } else { Role::Worker };
        if let Some((instance, pid)) = self.any(role) {
            self.log_fault("all connections broken", &instance.to_string());
            self.kernel.hang_up_all(pid);
        }
    }

    fn fill_disk(&mut self) {
        let time = self.lasting(50, 2500);
        self.log_fault("disk full", &format!("for {time:?}"));
        self.disk.is_full = true;
        self.kernel.schedule(SITE, time, Timer::Site(SiteTimer::DiskFree));
    }

    fn scale(&mut self) {
        let spec = &self.scenario.spec;
        let most = spec.step_lanes().map_or(4, u64::from);
        let least = spec.min_workers;
        let workers = 1 + u32::try_from(self.kernel.rng.below(most)).expect("a small number");
        self.ask_master("scaled by the user", Event::Scale { workers: workers.max(least) });
    }

    /// The user stops the job, and resumes it when it has stopped.
    fn stop_job(&mut self) {
        let is_patient = self.kernel.chance(700);
        let within = if is_patient { self.lasting(1, 8000) } else { Duration::ZERO };
        let reason = "by the user".into();
        self.ask_master("stop requested", Event::Stop { reason, within });
    }

    /// The user resumes the job, maybe with another number of servers.
    pub(crate) fn resize(&mut self) {
        let n_before = self.scenario.spec.num_ps_pods;
        if n_before > 0 && self.kernel.chance(self.scenario.resizes) {
            let most = u64::from(self.scenario.spec.partitions.min(3));
            let n_ps = 1 + u32::try_from(self.kernel.rng.below(most)).expect("a small number");
            self.scenario.spec.num_ps_pods = n_ps;
            self.log_fault("servers resized", &format!("from {n_before} to {n_ps}"));
        }
    }

    fn ask_master(&mut self, kind: &'static str, event: Event) {
        let Some(pid) = self.master else { return };
        if self.processes.get(&pid).is_some_and(|slot| !slot.is_frozen) {
            self.log_fault(kind, &format!("{event:?}"));
            self.event(pid, event);
        }
    }

    /// Disconnects a worker or server from a process of another role.
    fn disconnect(&mut self, from: Role, kind: &'static str) {
        let time = self.lasting(50, 5000);
        let role = if self.kernel.chance(300) { Role::Ps } else { Role::Worker };
        let Some((one, a)) = self.any(role) else { return };
        let other = match from {
            Role::Master => self.master,
            Role::Worker | Role::Ps => self.any(from).map(|(_, pid)| pid),
        };
        if let Some(b) = other.filter(|b| *b != a) {
            self.log_fault(kind, &format!("{one} and process {b} for {time:?}"));
            self.kernel.block(a, b, time);
        }
    }

    /// A worker and the other workers lose sight of each other, but not of the master. Another
    /// worker may die, so a new world must be formed meanwhile.
    fn isolate(&mut self) {
        let time = self.lasting(300, 3000);
        let Some((instance, pid)) = self.any(Role::Worker) else { return };
        self.log_fault("isolated", &format!("{instance} for {time:?}"));
        let others = self.running(Role::Worker).into_iter().filter(|(_, other)| *other != pid);
        let others: Vec<Pid> = others.map(|(_, other)| other).collect();
        others.iter().for_each(|other| self.kernel.block(pid, *other, time));
        if self.kernel.chance(500)
            && let Some(other) = others.first()
        {
            self.kill(*other);
        }
    }

    /// A user starts a process for a slot that has one. The platform does not know it.
    fn double_server(&mut self) {
        if let Some((instance, _)) = self.any(Role::Ps) {
            self.log_fault("server started twice", &instance.to_string());
            self.start_server(instance.id);
        }
    }

    /// The cluster asks a worker to exit before it removes the machine.
    fn dismiss_any(&mut self) {
        if let Some((instance, pid)) = self.any(Role::Worker) {
            self.log_fault("worker dismissed", &instance.to_string());
            self.dismiss(pid);
        }
    }

    fn dismiss_all(&mut self) {
        self.log_fault("all workers dismissed", "");
        for (_, pid) in self.running(Role::Worker) {
            self.dismiss(pid);
        }
    }

    fn dismiss(&mut self, pid: Pid) {
        let grace = self.lasting(2500, 5000);
        self.kernel.schedule(pid, Duration::ZERO, Timer::Terminate);
        self.kernel.schedule(SITE, grace, Timer::Site(SiteTimer::Kill { pid }));
    }

    /// User code of a worker never returns, while its heartbeats continue.
    fn get_stuck(&mut self) {
        if let Some((instance, pid)) = self.any(Role::Worker) {
            self.log_fault("worker stuck", &instance.to_string());
            if let Some(Process::Worker(worker)) =
                self.processes.get_mut(&pid).map(|slot| &mut slot.process)
            {
                worker.get_stuck();
            }
        }
    }

    /// Damages the newest checkpoint, if there is a good one before it to fall back to and it is
    /// not one that may be exported.
    fn spoil_newest(&mut self) {
        let durable = &self.disk.durable;
        let is_good = |folder: &String| !self.judge.spoiled.contains(folder);
        let good: Vec<_> =
            durable.checkpoints.iter().filter(|c| !c.is_bad && is_good(&c.folder)).collect();
        let [.., _, newest] = good[..] else { return };
        let last = self.last_step();
        let may_be_exported = match self.scenario.spec.step_lanes().is_some() {
            true => newest.version >= last || self.scenario.spec.early_stop_patience > 0,
            false => newest.exact.is_some(),
        };
        if may_be_exported || durable.best.as_ref() == Some(&newest.folder) {
            return;
        }
        let folder = newest.folder.clone();
        self.log_fault("checkpoint spoiled", &folder);
        let place = self.kernel.pick(1 << 20);
        self.disk.spoil(&folder, place);
        self.judge.spoiled.insert(folder);
        if self.kernel.chance(500) {
            self.stop_all("everything killed");
        }
    }
}

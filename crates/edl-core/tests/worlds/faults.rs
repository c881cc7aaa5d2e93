// SPDX-License-Identifier: Apache-2.0
//! Bad luck, by chance.

use std::time::Duration;

use edl_core::job::Event;
use edl_core::platform::{Ended, InstanceId};

use crate::kernel::{Pid, SITE};
use crate::message::Timer;
use crate::site::{Process, Site};
use crate::worker::Stuck;

impl Site {
    /// Something goes wrong now, as long as the scenario has bad luck left.
    pub(crate) fn fault(&mut self) {
        self.calm_at = self.calm_at.max(self.kernel.now);
        if self.n_faults_left == 0 {
            return;
        }
        self.n_faults_left -= 1;
        let every = self.scenario.fault_every_ms;
        let delay = self.kernel.between(0, 2 * every);
        self.kernel.schedule(SITE, delay, Timer::Fault);
        let kind = self.kernel.rng.below(22);
        self.kernel.note(kind);
        match kind {
            0 | 1 => self.kill_any(),
            2 | 3 => self.kill_furthest(),
            4 | 5 => self.kill_master(),
            6 | 7 => self.freeze_any(),
            8 => self.freeze_master(),
            9 | 10 => self.break_any(),
            11 => self.fill_disk(),
            12 => self.spoil_newest(),
            13 | 14 => self.scale(),
            15 => {
                let time = self.lasting(300, 4000);
                self.tell("two masters at once", "");
                self.depose_master(time);
            }
            16 => self.kill_everything(),
            17 => self.cut_off_from_master(),
            18 => self.cut_off_from_each_other(),
            19 => self.dismiss_any(),
            20 => self.dismiss_all(),
            _ => self.get_stuck(),
        }
    }

    fn tell(&mut self, kind: &'static str, text: &str) {
        self.kernel.note_text(SITE, kind, text);
    }

    /// How long a fault lasts; the calm begins after it.
    fn lasting(&mut self, low_ms: u64, high_ms: u64) -> Duration {
        let time = self.kernel.between(low_ms, high_ms);
        self.calm_at = self.calm_at.max(self.kernel.now + time);
        time
    }

    fn workers(&self) -> Vec<(InstanceId, Pid)> {
        let runs = |(_, pid): &(&InstanceId, &Pid)| self.processes.contains_key(pid);
        self.instances.iter().filter(runs).map(|(instance, pid)| (*instance, *pid)).collect()
    }

    fn any(&mut self) -> Option<(InstanceId, Pid)> {
        let running = self.workers();
        let n = running.len() as u64;
        (n > 0).then(|| running[usize::try_from(self.kernel.rng.below(n)).expect("an index")])
    }

    fn kill_any(&mut self) {
        if let Some((instance, pid)) = self.any() {
            self.tell("worker killed", &instance.to_string());
            self.kill(pid);
        }
    }

    /// Kills the one that holds the most, before it can hand that on.
    fn kill_furthest(&mut self) {
        let step = |pid: &Pid| match self.processes.get(pid).map(|slot| &slot.process) {
            Some(Process::Worker(worker)) => worker.state.map(|state| state.step),
            Some(Process::Master(_)) | None => None,
        };
        let furthest = self.workers().into_iter().max_by_key(|(_, pid)| step(pid));
        if let Some((instance, pid)) = furthest {
            self.tell("furthest worker killed", &instance.to_string());
            self.kill(pid);
        }
    }

    fn kill_master(&mut self) {
        if let Some(pid) = self.master {
            self.tell("master killed", "");
            self.die(pid, Ended::Signal(9));
        }
    }

    fn kill_everything(&mut self) {
        self.tell("everything killed", "");
        for pid in self.processes.keys().copied().collect::<Vec<_>>() {
            self.die(pid, Ended::Signal(9));
        }
    }

    fn freeze_any(&mut self) {
        let time = self.lasting(50, 5000);
        if let Some((instance, pid)) = self.any() {
            self.tell("worker frozen", &format!("{instance} for {time:?}"));
            self.freeze(pid, time);
        }
    }

    fn freeze_master(&mut self) {
        let time = self.lasting(100, 5000);
        if let Some(pid) = self.master {
            self.tell("master frozen", &format!("for {time:?}"));
            self.freeze(pid, time);
        }
    }

    fn break_any(&mut self) {
        if let Some(conn) = self.kernel.any_conn() {
            self.tell("connection broken", "");
            self.kernel.hang_up(conn);
        }
    }

    fn fill_disk(&mut self) {
        let time = self.lasting(50, 2500);
        self.tell("disk full", &format!("for {time:?}"));
        self.disk.is_full = true;
        self.kernel.schedule(SITE, time, Timer::DiskFree);
    }

    fn scale(&mut self) {
        let most = u64::from(self.scenario.spec.n_lanes());
        let workers = 1 + u32::try_from(self.kernel.rng.below(most)).expect("a small number");
        let workers = workers.max(self.scenario.spec.min_workers);
        let Some(pid) = self.master else { return };
        if self.processes.get(&pid).is_some_and(|slot| !slot.is_frozen) {
            self.tell("scaled by somebody", &workers.to_string());
            self.act(pid, |process, context| {
                if let Process::Master(master) = process {
                    master.handle(context, Event::Scale { workers });
                }
            });
        }
    }

    fn cut_off_from_master(&mut self) {
        let time = self.lasting(50, 5000);
        if let (Some((instance, pid)), Some(master)) = (self.any(), self.master) {
            self.tell("cut off from the master", &format!("{instance} for {time:?}"));
            self.kernel.block(pid, master, time);
        }
    }

    fn cut_off_from_each_other(&mut self) {
        let time = self.lasting(50, 5000);
        if let (Some((one, a)), Some((other, b))) = (self.any(), self.any())
            && a != b
        {
            self.tell("cut off from each other", &format!("{one} and {other} for {time:?}"));
            self.kernel.block(a, b, time);
        }
    }

    /// Somebody outside asks a worker to leave, as a cluster does before it takes a machine away.
    fn dismiss_any(&mut self) {
        if let Some((instance, pid)) = self.any() {
            self.tell("worker dismissed", &instance.to_string());
            self.dismiss(pid);
        }
    }

    fn dismiss_all(&mut self) {
        self.tell("all workers dismissed", "");
        for (_, pid) in self.workers() {
            self.dismiss(pid);
        }
    }

    fn dismiss(&mut self, pid: Pid) {
        let grace = self.lasting(2500, 5000);
        self.kernel.schedule(pid, Duration::ZERO, Timer::Terminate);
        self.kernel.schedule(SITE, grace, Timer::Kill { pid });
    }

    fn get_stuck(&mut self) {
        if let Some((instance, pid)) = self.any() {
            self.tell("worker stuck", &instance.to_string());
            if let Some(Process::Worker(worker)) =
                self.processes.get_mut(&pid).map(|slot| &mut slot.process)
            {
                let is_busy = self.kernel.chance(500);
                worker.stuck = Some(if is_busy { Stuck::Busy } else { Stuck::Deaf });
            }
        }
    }

    /// Spoils the newest checkpoint, if there is a good one before it to fall back to and it is
    /// not one that may be exported.
    fn spoil_newest(&mut self) {
        let durable = &self.disk.durable;
        let is_good = |folder: &String| !self.disk.spoiled.contains(folder);
        let good: Vec<_> =
            durable.checkpoints.iter().filter(|c| !c.is_bad && is_good(&c.folder)).collect();
        let last_step = self.last_step();
        if let [.., _, newest] = good[..]
            && newest.version < last_step
            && durable.best.as_ref() != Some(&newest.folder)
            && self.scenario.spec.early_stop_patience == 0
        {
            let folder = newest.folder.clone();
            self.tell("checkpoint spoiled", &folder);
            self.disk.spoiled.insert(folder);
        }
    }
}

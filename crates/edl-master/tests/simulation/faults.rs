// SPDX-License-Identifier: Apache-2.0
//! Bad luck, by chance.

use edl_core::platform::{InstanceId, Role};

use crate::kernel::{Pid, WORLD};
use crate::message::Timer;
use crate::process::Process;
use crate::world::World;

impl World {
    /// Something goes wrong now, as long as the scenario has bad luck left.
    pub(crate) fn fault(&mut self) {
        if self.n_faults_left == 0 {
            return;
        }
        self.n_faults_left -= 1;
        let every = self.scenario.fault_every_ms;
        let delay = self.kernel.between(0, 2 * every);
        self.kernel.schedule(WORLD, delay, Timer::Fault);
        let kind = self.kernel.rng.below(17);
        self.kernel.note(kind);
        match kind {
            0..=2 => self.kill_any(Role::Worker),
            3 | 4 => self.kill_any(Role::Ps),
            5 | 6 => self.kill_master(),
            7 => self.freeze_any(Role::Worker),
            8 => self.freeze_any(Role::Ps),
            9 => self.freeze_master(),
            10 | 11 => {
                if let Some(conn) = self.kernel.any_conn() {
                    self.tell("fault", "a connection breaks");
                    self.kernel.hang_up(conn);
                }
            }
            12 => {
                self.tell("fault", "the disk is full");
                self.disk.is_full = true;
                let time = self.kernel.between(50, 1500);
                self.kernel.schedule(WORLD, time, Timer::DiskFree);
            }
            13 => self.spoil_newest(),
            14 => self.scale(),
            15 => {
                self.tell("fault", "two masters at once");
                let time = self.kernel.between(300, 4000);
                self.depose_master(time);
            }
            _ => {
                self.tell("fault", "everything is killed at once");
                for pid in self.processes.keys().copied().collect::<Vec<_>>() {
                    self.die(pid, edl_core::platform::Ended::Signal(9));
                }
            }
        }
    }

    fn tell(&mut self, kind: &'static str, text: &str) {
        self.kernel.note_text(WORLD, kind, text);
    }

    fn any(&mut self, role: Role) -> Option<(InstanceId, Pid)> {
        let runs = |(instance, pid): &(&InstanceId, &Pid)| {
            instance.role == role && self.processes.contains_key(pid)
        };
        let running: Vec<(InstanceId, Pid)> =
            self.instances.iter().filter(runs).map(|(instance, pid)| (*instance, *pid)).collect();
        let n = running.len() as u64;
        (n > 0).then(|| running[usize::try_from(self.kernel.rng.below(n)).expect("an index")])
    }

    fn kill_any(&mut self, role: Role) {
        if let Some((instance, pid)) = self.any(role) {
            self.tell("fault", &format!("{instance} is killed"));
            self.kill(pid);
        }
    }

    fn kill_master(&mut self) {
        if let Some(pid) = self.master {
            self.tell("fault", "the master is killed");
            self.die(pid, edl_core::platform::Ended::Signal(9));
        }
    }

    fn freeze_any(&mut self, role: Role) {
        let time = self.kernel.between(100, 6000);
        if let Some((instance, pid)) = self.any(role) {
            self.tell("fault", &format!("{instance} is frozen for {time:?}"));
            self.freeze(pid, time);
        }
    }

    fn freeze_master(&mut self) {
        let time = self.kernel.between(100, 5000);
        if let Some(pid) = self.master {
            self.tell("fault", &format!("the master is frozen for {time:?}"));
            self.freeze(pid, time);
        }
    }

    fn scale(&mut self) {
        let workers = 1 + u32::try_from(self.kernel.rng.below(4)).expect("a small number");
        let Some(pid) = self.master else { return };
        if self.processes.get(&pid).is_some_and(|slot| !slot.is_frozen) {
            self.act(pid, |process, context| {
                if let Process::Master(master) = process {
                    master.scale(context, workers);
                }
            });
        }
    }

    /// Spoils the newest checkpoint, if there is a good one before it to fall back to. A cut of an
    /// exact position is left alone: it may be the one that is exported.
    fn spoil_newest(&mut self) {
        let good = self.disk.durable.checkpoints.iter();
        let good: Vec<_> =
            good.filter(|c| !c.is_bad && !self.spoiled.contains(&c.folder)).collect();
        if let [.., _, newest] = good[..]
            && newest.exact.is_none()
        {
            let folder = newest.folder.clone();
            self.tell("fault", &format!("{folder} is spoiled"));
            let place = usize::try_from(self.kernel.rng.below(1 << 20)).expect("an index");
            self.disk.spoil(&folder, place);
            self.spoiled.push(folder);
        }
    }
}

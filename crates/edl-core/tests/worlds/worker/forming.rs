// SPDX-License-Identifier: Apache-2.0
//! From world to world: leave, link, tell each other what is held, hand it on.

use edl_core::id::WorkerId;
use edl_core::job::News;
use edl_core::rng;

use super::{Named, Phase, Seat, Worker, pid_of};
use crate::history::State;
use crate::message::{Message, Timer};
use crate::site::Context;

impl Worker {
    /// Whether the next world is due: at once, or because the world before has nothing to finish.
    pub(super) fn must_enter(&self) -> bool {
        let Some(next) = &self.next else { return false };
        let step = self.state.map(|state| state.step);
        let me = next.world.members.iter().find(|member| member.worker == self.id);
        // One whose state is void is not of the world that trains on until then.
        let is_void = me.is_some_and(|me| me.incarnation == self.incarnation && !me.has_state);
        match (next.world.after, &self.seat) {
            (None, _) | (_, None) => true,
            _ if is_void => true,
            (Some(after), Some(seat)) if step >= Some(after) => match seat.phase {
                Phase::Idle => !self.loses_members(next),
                Phase::Parting => {
                    seat.others(self.id).iter().all(|(w, _)| seat.farewells.contains(w))
                }
                // It never trained there.
                Phase::Loading | Phase::Leveling | Phase::Receiving(_) => false,
                Phase::Computing | Phase::Gathering | Phase::Reducing => false,
            },
            (Some(_), Some(_)) => false,
        }
    }

    fn loses_members(&self, next: &Named) -> bool {
        let Some(seat) = &self.seat else { return false };
        let stays = |m: &edl_core::world::Member| next.has(m.worker, m.incarnation);
        !seat.named.world.members.iter().all(stays)
    }

    /// Begins to part if the next world is due but not all stay.
    pub(super) fn part(&mut self, context: &mut Context<'_>) -> bool {
        let Some(next) = self.next.clone() else { return false };
        let step = self.state.map(|state| state.step);
        if next.world.after.is_none() || step < next.world.after || !self.loses_members(&next) {
            return false;
        }
        let world = self.seat.as_ref().expect("it is in a world").id();
        self.begin(context, Phase::Parting);
        self.tell_all(context, &Message::Farewell { world });
        true
    }

    pub(super) fn enter(&mut self, context: &mut Context<'_>, next: Named) {
        self.flush(context);
        self.seat = None;
        self.act += 1;
        self.is_measuring = false;
        let stays =
            |pid: &u32| next.world.members.iter().any(|member| pid_of(member.incarnation) == *pid);
        let dropped: Vec<_> = self.links.iter().filter(|(pid, _)| !stays(pid)).collect();
        dropped.into_iter().for_each(|(_, conn)| context.kernel.hang_up(*conn));
        self.links.retain(|pid, _| stays(pid));
        let me = next.world.members.iter().find(|member| member.worker == self.id);
        let Some(me) = me.filter(|me| me.incarnation == self.incarnation) else { return };
        if next.load.is_some() || !me.has_state {
            self.state = None;
        }
        let is_load = next.load.is_some();
        self.seat = Some(Seat {
            named: next,
            phase: Phase::Loading,
            levels: Default::default(),
            states: Default::default(),
            gradients: Default::default(),
            farewells: Default::default(),
            lost: Default::default(),
        });
        if is_load {
            let act = self.act;
            return context.after(1, 60, Timer::Loaded { act });
        }
        self.begin_level(context);
    }

    pub(super) fn loaded(&mut self, context: &mut Context<'_>) {
        let Some(seat) = &self.seat else { return };
        let generation = seat.named.generation;
        let from = seat.named.load.clone().expect("it loads");
        let state = match from.checkpoint {
            None => Some(context.history.state(0)),
            Some(folder) => context.disk.load(&folder, context.scenario.spec.partitions),
        };
        self.state = state;
        if state.is_none() {
            self.seat = None;
            let error = "checksum".into();
            return self.report_news(context, News::NotLoaded { generation, error });
        }
        self.begin_level(context);
    }

    fn begin_level(&mut self, context: &mut Context<'_>) {
        self.begin(context, Phase::Leveling);
        let seat = self.seat.as_ref().expect("it forms a world");
        let (world, step) = (seat.id(), self.state.map(|state| state.step));
        self.tell_all(context, &Message::Level { world, step });
    }

    /// Everybody has told what it holds: those ahead hand it on.
    pub(super) fn level(&mut self, context: &mut Context<'_>) -> bool {
        if self.missing().is_some() {
            return self.lose_missing(context);
        }
        let seat = self.seat.as_ref().expect("it forms a world");
        let world = seat.id();
        let mine = self.state.map(|state| state.step);
        let Some(highest) = seat.levels.values().copied().chain([mine]).flatten().max() else {
            let suspect = self.id;
            self.lose(context, suspect, "no member of the world holds any state");
            return true;
        };
        if mine != Some(highest) {
            self.begin(context, Phase::Receiving(highest));
            return true;
        }
        let behind: Vec<WorkerId> =
            seat.levels.iter().filter(|(_, step)| **step != mine).map(|(w, _)| *w).collect();
        let others = seat.others(self.id);
        let state = self.state.expect("it holds the highest step");
        for (worker, pid) in others.into_iter().filter(|(worker, _)| behind.contains(worker)) {
            self.tell(context, worker, pid, Message::State { world, state });
        }
        self.formed(context, 0);
        true
    }

    /// All who are ahead have sent their part of the state.
    pub(super) fn receive(&mut self, context: &mut Context<'_>, step: u64) -> bool {
        if self.missing().is_some() {
            return self.lose_missing(context);
        }
        let seat = self.seat.as_ref().expect("it forms a world");
        let parts: Vec<u64> = seat.states.values().map(|state| state.digest).collect();
        let is_one = parts.iter().all(|digest| *digest == parts[0]);
        // Parts of different states would make one that nobody ever had.
        let digest = if is_one { parts[0] } else { rng::key(&parts) };
        self.state = Some(State { step, digest });
        self.formed(context, 1);
        true
    }

    fn formed(&mut self, context: &mut Context<'_>, state_bytes: u64) {
        self.begin(context, Phase::Idle);
        let seat = self.seat.as_ref().expect("it forms a world");
        self.generation = seat.named.generation;
        let (world, step) = (seat.id(), self.state.expect("just levelled").step);
        let formed = News::Formed { world, step, pause_secs: 0.0, state_bytes };
        self.report_news(context, formed);
    }

    /// The first member that owes this one something.
    pub(super) fn missing(&self) -> Option<WorkerId> {
        let seat = self.seat.as_ref()?;
        let next = self.state.map(|state| state.step);
        let owes = |worker: &WorkerId| match seat.phase {
            Phase::Leveling => !seat.levels.contains_key(worker),
            Phase::Receiving(step) => {
                seat.levels.get(worker) == Some(&Some(step)) && !seat.states.contains_key(worker)
            }
            Phase::Gathering => {
                next.is_some_and(|next| !seat.gradients.contains_key(&(next, *worker)))
            }
            Phase::Parting => !seat.farewells.contains(worker),
            Phase::Loading | Phase::Idle | Phase::Computing | Phase::Reducing => false,
        };
        let owing: Vec<WorkerId> =
            seat.others(self.id).into_iter().map(|(w, _)| w).filter(owes).collect();
        let lost = owing.iter().find(|worker| seat.lost.contains(worker));
        lost.or(owing.first()).copied()
    }

    /// Leaves the world if one that owes something is lost.
    pub(super) fn lose_missing(&mut self, context: &mut Context<'_>) -> bool {
        let Some(suspect) = self.missing() else { return false };
        let seat = self.seat.as_ref().expect("somebody owes something in it");
        if !seat.lost.contains(&suspect) {
            return false;
        }
        self.lose(context, suspect, "its link broke");
        true
    }

    pub(super) fn silent(&mut self, context: &mut Context<'_>) {
        if let Some(suspect) = self.missing() {
            self.lose(context, suspect, "it is silent");
        }
    }

    fn lose(&mut self, context: &mut Context<'_>, suspect: WorkerId, error: &str) {
        let Some(seat) = self.seat.take() else { return };
        self.act += 1;
        self.flush(context);
        // Whoever waits to part enters the next world, which finds out by itself.
        if seat.phase == Phase::Parting {
            return;
        }
        let (world, error) = (seat.id(), error.into());
        self.report_news(context, News::PeerLost { world, suspect, error });
    }
}

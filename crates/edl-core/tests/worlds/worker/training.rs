// SPDX-License-Identifier: Apache-2.0
//! Within a world: steps that all members take together, and evaluations of what they hold.

use edl_core::id::LeaseId;
use edl_core::job::News;
use edl_core::lanes::Span;
use edl_core::platform::Ended;
use edl_core::rng;

use super::{Lent, Phase, Worker, pid_of};
use crate::history::{State, apply, measure};
use crate::message::{Message, Timer};
use crate::site::Context;

impl Worker {
    /// Begins the next step if it is allowed to; else tells how far it came.
    pub(super) fn train(&mut self, context: &mut Context<'_>) -> bool {
        let (Some(seat), Some(state)) = (&self.seat, self.state) else { return false };
        let id = seat.id();
        let go = self.go.filter(|(world, _)| *world == id).map_or(0, |(_, until)| until);
        if state.step >= seat.named.until.max(go) {
            self.flush(context);
            return false;
        }
        let members = seat.named.world.members.iter().map(|m| pid_of(m.incarnation)).collect();
        context.regions.insert(context.pid, (id, members));
        self.begin(context, Phase::Computing);
        let (act, most) = (self.act, context.scenario.step_ms);
        context.after(most / 4, most, Timer::Computed { act });
        true
    }

    pub(super) fn computed(&mut self, context: &mut Context<'_>) {
        let (Some(seat), Some(state)) = (&self.seat, self.state) else { return };
        let (world, step) = (seat.id(), state.step);
        let me = seat.named.world.members.iter().find(|member| member.worker == self.id);
        let lanes = me.expect("a member is in its world").lanes.clone();
        if context.kernel.chance(context.scenario.crashes) {
            context.kernel.count("crashes");
            context.exit = Some(Ended::Exit(101));
            return;
        }
        let nodes = context.history.nodes(state, &lanes);
        let is_bad = context.scenario.untrainable == Some(step) && !nodes.is_empty();
        if is_bad || context.kernel.chance(context.scenario.failures) {
            context.kernel.count("failed steps");
            self.seat = None;
            self.act += 1;
            self.flush(context);
            let error = "user code".into();
            return self.report_news(context, News::StepFailed { world, step, error });
        }
        self.begin(context, Phase::Gathering);
        self.tell_all(context, &Message::Gradient { world, step, nodes });
    }

    /// All lanes are there.
    pub(super) fn gather(&mut self, context: &mut Context<'_>) -> bool {
        if self.missing().is_some() {
            return self.lose_missing(context);
        }
        self.begin(context, Phase::Reducing);
        let act = self.act;
        context.after(0, 4, Timer::Reduced { act });
        true
    }

    pub(super) fn reduced(&mut self, context: &mut Context<'_>) {
        let (Some(seat), Some(state)) = (&mut self.seat, self.state) else { return };
        let world = seat.named.world.id;
        let me = seat.named.world.members.iter().find(|member| member.worker == self.id);
        let lanes = me.expect("a member is in its world").lanes.clone();
        let mut nodes: Vec<(Span, u64)> = context.history.nodes(state, &lanes);
        let of_step = |((step, _), _): &((u64, _), &Vec<_>)| *step == state.step;
        nodes.extend(
            seat.gradients
                .iter()
                .map(|(k, v)| (*k, v))
                .filter(of_step)
                .flat_map(|(_, n)| n.clone()),
        );
        seat.gradients.retain(|(step, _), _| *step > state.step);
        let mut hash = context.history.gradient(state.step, &nodes);
        let members = seat.named.world.members.iter().map(|m| pid_of(m.incarnation));
        let is_overwritten = |pid: u32| {
            let region = context.regions.get(&pid);
            region.is_some_and(|(of, members)| *of > world && !members.contains(&context.pid))
        };
        if members.filter(|pid| *pid != context.pid).any(is_overwritten) {
            // A member that trains on without this one has overwritten what was read.
            context.kernel.count("torn steps");
            hash = rng::key(&[hash, 0xbad]);
        }
        let state = apply(state, hash);
        self.state = Some(state);
        self.begin(context, Phase::Idle);
        self.unreported = Some(News::Stepped { world, step: state.step, hash, loss: 0.5 });
        context.kernel.note(state.digest);
        if context.kernel.now.since(self.reported_at) >= Self::throttle(context) {
            self.flush(context);
        }
    }

    /// Measures the next shard that was lent, if it holds the state for it.
    pub(super) fn begin_measuring(&mut self, context: &mut Context<'_>) -> bool {
        let Some(state) = self.state else { return false };
        if self.is_measuring {
            return false;
        }
        let due = self.shards.iter().find(|(_, lent)| lent.version <= state.step);
        let Some((lease, Lent { version, shard, .. })) = due else { return false };
        let (lease, version, shard) = (*lease, *version, *shard);
        self.flush(context);
        if version < state.step {
            self.shards.remove(&lease);
            self.report(context, Message::Failed { lease, shard });
            return true;
        }
        self.act += 1;
        self.is_measuring = true;
        let act = self.act;
        let most = context.scenario.step_ms;
        context.after(0, most, Timer::Measured { act, lease });
        false
    }

    pub(super) fn measured(&mut self, context: &mut Context<'_>, lease: LeaseId) {
        self.is_measuring = false;
        let Some(state @ State { step, .. }) = self.state else { return };
        let Some(Lent { eval, version, shard }) = self.shards.remove(&lease) else { return };
        assert_eq!(version, step, "nobody trains while it measures");
        let (generation, value) = (self.generation, measure(state, shard));
        self.report(context, Message::EvalDone { eval, shard, generation, value });
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The activities of a member: what takes time, or waits for other processes.

use std::collections::BTreeMap;

use edl_core::id::{LeaseId, WorkerId};
use edl_core::job::LoadFrom;
use edl_core::member::{Activity, Event, Failure, Move, Outcome, Step, Transferred};
use edl_core::world;
use edl_tensor::push::Lane;

use super::super::shell::Shell as _;
use super::{Control, Done, Member, later};
use crate::client::{Ask, Wish};
use crate::history::{DenseState, lane_key};
use crate::judge::Region;
use crate::kernel::Pid;
use crate::mesh::{Content, Received, pid_of};
use crate::process::Context;

/// The longest time that an unusually slow lane takes.
const HICCUP_MS: u64 = 3000;

/// User code fails this much more often while a change of the world is planned.
const PLANNED_FAILURES: u64 = 15;

impl Member {
    pub(super) fn start(
        &mut self,
        control: &mut Control,
        context: &mut Context<'_>,
        activity: Activity,
    ) {
        assert!(self.current.is_none(), "one activity at a time");
        self.act += 1;
        (self.is_reading, self.is_watching) = (false, false);
        let act = self.act;
        let step_ms = context.scenario.step_ms;
        match &activity {
            Activity::Farewell { .. } => self.mesh.send_all(context, &Content::Farewell),
            Activity::Load { .. } => later(context, 1, 60, Done::Computed { act }),
            Activity::Enter { world, .. } => {
                self.is_planned = false;
                self.mesh.enter(context, world);
            }
            Activity::Exchange { step, .. } => self.mesh.send_all(context, &Content::Level(*step)),
            Activity::Transfer { moves, .. } => self.send_partitions(context, moves),
            Activity::Connect(route) => {
                self.connection += 1;
                self.n_unacknowledged = 0;
                self.servers_failed = None;
                let ask = Ask::Connect(route.clone());
                self.link.ask(context, self.connection, ask);
            }
            Activity::Train { step, lane } => {
                if step.mine.start == *lane {
                    self.begin_step(context, step);
                }
                if context.scenario.uses_servers() {
                    let records = context.model.lane_records(step.batch, *lane);
                    self.pull(context, records, step.number);
                } else {
                    let is_slow = context.kernel.chance(context.scenario.hiccups);
                    let most = if is_slow { HICCUP_MS } else { step_ms };
                    later(context, step_ms / 4, most, Done::Computed { act });
                }
            }
            Activity::Skip { step, lane } => {
                if step.mine.start == *lane {
                    self.begin_step(context, step);
                }
                let lane = Some(lane_of(context, step, *lane));
                self.n_unacknowledged += 1;
                let ask = Ask::Skip { batch: step.batch, lane };
                self.link.ask(context, self.connection, ask);
                later(context, 0, 1, Done::Computed { act });
            }
            Activity::Settle(_) => {}
            Activity::Reduce(step) => self.send_nodes(context, step),
            Activity::Apply(_) | Activity::Pass(_) | Activity::Hash => {
                later(context, 0, 2, Done::Computed { act });
            }
            Activity::Evaluate { version, .. } => match context.scenario.uses_servers() {
                true => self.pull(context, Vec::new(), *version),
                false => later(context, 0, context.scenario.eval_ms, Done::Computed { act }),
            },
        }
        self.current = Some(activity);
        self.advance(control, context);
    }

    /// The silence of members that owe something counts from now on.
    fn watch(&mut self, context: &mut Context<'_>) {
        if !self.is_watching && !self.mesh.is_early(context.pid) {
            self.is_watching = true;
            let silence_ms = context.scenario.silence_ms();
            later(context, silence_ms, silence_ms, Done::Silent { act: self.act });
        }
    }

    /// Begins to overwrite the memory that other members of the world read.
    fn begin_step(&mut self, context: &mut Context<'_>, step: &Step) {
        self.trained.clear();
        let world = self.mesh.world().expect("a step is trained in a world");
        let members = world.members.iter().map(|member| pid_of(member.incarnation)).collect();
        let region = Region { world: step.world, members, forced: self.forced };
        context.judge.overwrites(context.pid, region);
    }

    fn pull(&mut self, context: &mut Context<'_>, ids: Vec<u64>, step: u64) {
        let wish = Wish { ids, step: Some(step), ..Wish::default() };
        self.link.ask(context, self.connection, Ask::Pull(wish));
    }

    fn push_lane(&mut self, context: &mut Context<'_>, step: &Step, lane: u32) {
        let lane = lane_of(context, step, lane);
        self.n_unacknowledged += 1;
        let ask = Ask::PushLane { batch: step.batch, lane };
        self.link.ask(context, self.connection, ask);
    }

    fn send_partitions(&mut self, context: &mut Context<'_>, moves: &[Move]) {
        let members = self.mesh.world().expect("a world is entered").members.clone();
        for moved in moves {
            if pid_of(members[moved.from].incarnation) == context.pid {
                let state = self.state.expect("the highest state is sent");
                let to = pid_of(members[moved.to].incarnation);
                self.mesh.send(context, to, Content::Partition(moved.item, state));
            }
        }
    }

    fn send_nodes(&mut self, context: &mut Context<'_>, step: &Step) {
        if step.mine_active().is_empty() && !context.scenario.uses_servers() {
            self.begin_step(context, step);
        }
        let state = self.state.expect("a member has state");
        let nodes = context.model.history.nodes(state, &step.mine, &self.trained);
        self.mesh.send_all(context, &Content::Nodes(step.number, nodes));
    }

    /// The first member that owes this one something in the activity under way.
    pub(super) fn owing(&self) -> Option<(WorkerId, bool)> {
        let me = self.pid;
        let moves = |pid: Pid, moves: &[Move], received: &Received| {
            let members = &self.mesh.world().expect("a world is entered").members;
            let is_mine = |m: &&Move| {
                pid_of(members[m.from].incarnation) == pid
                    && pid_of(members[m.to].incarnation) == me
            };
            moves.iter().filter(is_mine).any(|m| !received.partitions.contains_key(&m.item))
        };
        match self.current.as_ref()? {
            Activity::Farewell { .. } => self.mesh.owing(me, |_, r| !r.has_parted),
            Activity::Enter { .. } => self.mesh.owing(me, |_, r| !r.has_entered),
            Activity::Exchange { .. } => self.mesh.owing(me, |_, r| r.level.is_none()),
            Activity::Transfer { moves: all, .. } => {
                self.mesh.owing(me, |pid, r| moves(pid, &all[..], r))
            }
            Activity::Reduce(step) => {
                self.mesh.owing(me, |_, r| !r.nodes.contains_key(&step.number))
            }
            Activity::Load { .. }
            | Activity::Connect(_)
            | Activity::Train { .. }
            | Activity::Skip { .. }
            | Activity::Settle(_)
            | Activity::Apply(_)
            | Activity::Pass(_)
            | Activity::Hash
            | Activity::Evaluate { .. } => None,
        }
    }

    /// Ends the activity under way if nothing is missing, or if what is missing will not come.
    pub(super) fn advance(&mut self, control: &mut Control, context: &mut Context<'_>) {
        if control.is_stuck {
            return;
        }
        if let Some((peer, is_lost)) = self.owing() {
            if is_lost {
                let error = "its link broke".into();
                return self.end(control, context, Err(Failure::Lost { peer, error }));
            }
            return self.watch(context);
        }
        let Some(current) = &self.current else { return };
        let outcome = match current {
            Activity::Farewell { .. } | Activity::Enter { .. } => Outcome::Done,
            Activity::Exchange { step, .. } => Outcome::Levels(self.levels(context.pid, *step)),
            Activity::Transfer { is_behind, .. } => {
                let is_behind = *is_behind;
                Outcome::Transferred(self.assemble(context, is_behind))
            }
            Activity::Reduce(step) if context.scenario.reduce_ms == 0 => {
                let step = step.clone();
                self.reduce(context, &step)
            }
            Activity::Reduce(step) if !self.is_reading => {
                self.is_reading = true;
                context.judge.reading.insert(context.pid, step.world);
                let computed = Done::Computed { act: self.act };
                return later(context, 0, context.scenario.reduce_ms, computed);
            }
            Activity::Settle(_)
            | Activity::Connect(_)
            | Activity::Train { .. }
            | Activity::Skip { .. }
            | Activity::Evaluate { .. }
                if self.servers_failed.is_some() =>
            {
                let failure = self.servers_failed.take().expect("just seen");
                return self.end(control, context, Err(failure));
            }
            Activity::Settle(_) if self.n_unacknowledged == 0 => Outcome::Done,
            // Their ends come by timers and from the servers.
            Activity::Settle(_)
            | Activity::Load { .. }
            | Activity::Connect(_)
            | Activity::Train { .. }
            | Activity::Skip { .. }
            | Activity::Reduce(_)
            | Activity::Apply(_)
            | Activity::Pass(_)
            | Activity::Hash
            | Activity::Evaluate { .. } => return,
        };
        self.end(control, context, Ok(outcome));
    }

    fn levels(&self, me: Pid, mine: Option<u64>) -> Vec<Option<u64>> {
        let members = &self.mesh.world().expect("a world is entered").members;
        let level = |member: &world::Member| match pid_of(member.incarnation) {
            pid if pid == me => mine,
            pid => self.mesh.received(pid).and_then(|r| r.level).expect("it was received"),
        };
        members.iter().map(level).collect()
    }

    /// Puts the partitions that were received together.
    fn assemble(&mut self, context: &Context<'_>, is_behind: bool) -> Transferred {
        if is_behind {
            let others = self.mesh.others(context.pid);
            let received = others.iter().filter_map(|(_, pid)| self.mesh.received(*pid));
            let parts: BTreeMap<u32, DenseState> =
                received.flat_map(|r| r.partitions.clone()).collect();
            self.state = Some(whole(parts.into_values()));
        }
        let step = self.state.expect("a member has state").step;
        Transferred { step, state_bytes: u64::from(is_behind) }
    }

    fn reduce(&mut self, context: &mut Context<'_>, step: &Step) -> Outcome {
        let state = self.state.expect("a member has state");
        let mut nodes = context.model.history.nodes(state, &step.mine, &self.trained);
        let others = self.mesh.others(context.pid);
        for (_, pid) in &others {
            let received = self.mesh.received(*pid).expect("it was received");
            nodes.extend(received.nodes[&step.number].iter().cloned());
        }
        self.mesh.forget_step(step.number);
        self.gradient = context.model.history.gradient(step.number, &nodes);
        let mut others = others.iter().map(|(_, pid)| *pid);
        if others.any(|pid| context.judge.is_overwritten(step.world, pid, context.pid)) {
            // A member that trains without this one has overwritten what was read.
            context.kernel.count("step mismatches");
            self.gradient = edl_core::rng::key(&[self.gradient, 0xbad]);
        }
        Outcome::Reduced { loss: 0.5 }
    }

    pub(super) fn end(
        &mut self,
        control: &mut Control,
        context: &mut Context<'_>,
        result: Result<Outcome, Failure>,
    ) {
        if self.current.take().is_some() {
            context.judge.reading.remove(&context.pid);
            self.is_forced |= matches!(result, Err(Failure::Lost { .. } | Failure::Cancelled));
            self.handle(control, context, Event::Ended(result));
        }
    }

    /// Ends a wait for other processes.
    pub(super) fn cancelled(&mut self, control: &mut Control, context: &mut Context<'_>) {
        let waits = match &self.current {
            Some(
                Activity::Farewell { .. }
                | Activity::Enter { .. }
                | Activity::Exchange { .. }
                | Activity::Transfer { .. }
                | Activity::Reduce(_)
                | Activity::Connect(_)
                | Activity::Settle(_),
            ) => true,
            Some(
                Activity::Load { .. }
                | Activity::Train { .. }
                | Activity::Skip { .. }
                | Activity::Apply(_)
                | Activity::Pass(_)
                | Activity::Hash
                | Activity::Evaluate { .. },
            )
            | None => false,
        };
        if waits && !control.is_stuck {
            self.end(control, context, Err(Failure::Cancelled));
        }
    }

    /// What takes time by itself is done.
    pub(super) fn computed(&mut self, control: &mut Control, context: &mut Context<'_>) {
        if control.is_stuck {
            return;
        }
        let Some(current) = self.current.clone() else { return };
        let result = match current {
            Activity::Load { from, .. } => self.load(context, &from),
            Activity::Train { step, lane } => {
                if context.crashes() {
                    return;
                }
                context.judge.computed(context.scenario, step.batch, lane);
                self.train(context, &step, lane)
            }
            Activity::Skip { .. } => Ok(Outcome::Done),
            Activity::Reduce(step) => Ok(self.reduce(context, &step)),
            Activity::Apply(_) => {
                let state = self.state.expect("a member has state").apply(self.gradient);
                self.state = Some(state);
                context.kernel.trace(state.digest);
                Ok(Outcome::Done)
            }
            Activity::Pass(_) => {
                self.state = self.state.map(DenseState::pass);
                Ok(Outcome::Done)
            }
            Activity::Hash => Ok(Outcome::Hashed(self.gradient)),
            Activity::Evaluate { lease, piece, version } => {
                self.evaluate(lease, piece, version);
                Ok(Outcome::Done)
            }
            Activity::Farewell { .. }
            | Activity::Enter { .. }
            | Activity::Exchange { .. }
            | Activity::Transfer { .. }
            | Activity::Connect(_)
            | Activity::Settle(_) => return,
        };
        self.end(control, context, result);
    }

    fn load(&mut self, context: &Context<'_>, from: &LoadFrom) -> Result<Outcome, Failure> {
        let state = match &from.checkpoint {
            None => context.model.history.state(0),
            Some(folder) => {
                let read = |id| Ok(DenseState::of(&context.disk.read(folder, id)?));
                let parts: Result<Vec<DenseState>, String> =
                    context.model.layout.with_segments().map(read).collect();
                whole(parts.map_err(Failure::Failed)?.into_iter())
            }
        };
        self.state = Some(state);
        Ok(Outcome::Loaded { step: state.step })
    }

    fn train(
        &mut self,
        context: &mut Context<'_>,
        step: &Step,
        lane: u32,
    ) -> Result<Outcome, Failure> {
        if context.scenario.quits_after == Some(step.number) {
            return Err(Failure::Quit);
        }
        let is_bad = context.scenario.untrainable == Some(step.number);
        let often = if self.is_planned { PLANNED_FAILURES } else { 1 };
        if is_bad || context.kernel.chance(often * context.scenario.failures) {
            context.kernel.count("failed steps");
            return Err(Failure::Failed("user code failed".into()));
        }
        if !context.model.is_finite(step.batch) && lane + 1 == step.mine_active().end {
            return Err(Failure::NonFinite("the loss is not finite".into()));
        }
        if context.scenario.uses_servers() {
            self.push_lane(context, step, lane);
        } else {
            let records = context.model.lane_records(step.batch, lane);
            self.trained.push((lane, lane_key(&records, 0)));
        }
        Ok(Outcome::Done)
    }

    fn evaluate(&mut self, lease: LeaseId, piece: u32, version: u64) {
        let state = self.state.expect("a member has state");
        assert_eq!(state.step, version, "an evaluation is of the state that is held");
        if let Some((shard, measures)) = self.shards.get_mut(&lease).filter(|_| piece == 0) {
            measures.add_loss(state.measure(shard.number), 1);
        }
    }

    /// The rows of a lane or of a piece are here: it is computed with them.
    pub(super) fn pulled(&mut self, context: &mut Context<'_>, rows: &[f32]) {
        let (act, step_ms) = (self.act, context.scenario.step_ms);
        match &self.current {
            Some(Activity::Train { step, lane }) => {
                let records = context.model.lane_records(step.batch, *lane);
                assert_eq!(rows.len(), records.len(), "one row per record");
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "rows count epochs"
                )]
                let sum = rows.iter().map(|row| row.round() as u64).sum();
                self.trained.push((*lane, lane_key(&records, sum)));
                later(context, step_ms / 4, step_ms, Done::Computed { act });
            }
            Some(Activity::Evaluate { .. }) => {
                later(context, 0, context.scenario.eval_ms, Done::Computed { act });
            }
            Some(_) | None => {}
        }
    }
}

fn lane_of(context: &Context<'_>, step: &Step, number: u32) -> Lane {
    Lane { world: step.world, number, of: context.scenario.spec.n_lanes() }
}

/// The one state that all parts are of. Parts of different states make one that no worker had.
fn whole(parts: impl Iterator<Item = DenseState>) -> DenseState {
    let parts: Vec<DenseState> = parts.collect();
    let digests: Vec<u64> = parts.iter().map(|state| state.digest).collect();
    let is_one = digests.iter().all(|digest| *digest == digests[0]);
    let digest = if is_one { digests[0] } else { edl_core::rng::key(&digests) };
    DenseState { digest, ..parts[0] }
}

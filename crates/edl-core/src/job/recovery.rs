// SPDX-License-Identifier: Apache-2.0
//! Parameter servers that connect, load, fail and come back.

use std::sync::Arc;

use super::strategy::LOAD_TIMEOUT;
use super::{Command, Effect, End, EventKind, Job, LoadFrom};
use crate::applied::AppliedSet;
use crate::id::{Generation, Incarnation, PsId, WorkerId};
use crate::layout::Layout;
use crate::model::ModelSpec;
use crate::optimizer;
use crate::route::{Route, ServerRoute};
use crate::server::{Load, Order};
use crate::servers::{Outcome, PartitionState, ServerMember};
use crate::text::counted;
use crate::time::Time;

impl Job {
    pub(super) fn ps_connected(&mut self, ps: PsId, pid: u32, member: ServerMember, now: Time) {
        let n_ps = self.servers().n_ps();
        if ps.0 >= n_ps {
            let has = match n_ps {
                0 => "no parameter servers".to_owned(),
                n => counted(n, "parameter server"),
            };
            self.note(EventKind::Refused, format!("ps-{ps} was refused: the job has {has}"));
            return self.effects.push(Effect::ClosePs(ps));
        }
        if let Some(before) = self.roster.server_connected(ps, member.incarnation, pid, now) {
            self.keep_out(before.incarnation);
            if before.is_connected {
                self.note(EventKind::PsReplaced, format!("ps-{ps} was restarted as a new process"));
            }
        }
        self.effects.push(Effect::ToPs(ps, Order::Welcome));
        self.keep_server_again(ps);
        let outcome = self.strategy.servers_mut().connected(ps, member);
        if self.servers().is_serving() && outcome == Outcome::Nothing {
            // The order may have been lost with the previous stream.
            let generation = self.servers().generation();
            self.effects.push(Effect::ToPs(ps, Order::Serve(generation)));
        }
        self.restart_checkpoint(ps, now);
        self.follow(outcome, now);
    }

    /// A server that was lost or has a successor may be alive, after the loss of its node. It must
    /// not take its slot back.
    fn keep_out(&mut self, incarnation: Incarnation) {
        self.change(|facts| facts.replaced_servers.insert(incarnation));
    }

    /// Whether the stream of a server must be refused: another process has its slot.
    #[must_use]
    pub fn is_replaced_server(&self, incarnation: Incarnation) -> bool {
        self.durable.replaced_servers.contains(&incarnation)
    }

    /// A server's memory is gone, and with it the work since the last checkpoint.
    pub(super) fn ps_lost(&mut self, ps: PsId, why: &str) {
        if let Some(lost) = self.roster.remove_server(ps) {
            self.keep_out(lost);
        }
        if self.strategy.servers_mut().lost(ps) {
            self.abandon_unwritten_checkpoint();
            let saved = self.durable.latest_checkpoint().map(|checkpoint| checkpoint.version);
            let text = match self.checkpoints.committing().or(saved) {
                Some(version) => format!("ps-{ps} {why}; restoring checkpoint {version}"),
                None => format!("ps-{ps} {why}; no checkpoint yet, training starts over"),
            };
            self.note(EventKind::PsLost, text);
        } else {
            self.note(EventKind::PsLost, format!("ps-{ps} {why}"));
        }
    }

    /// Starts to load once all servers are connected and the model is known.
    pub(super) fn begin_load(&mut self, now: Time) {
        if !self.strategy.must_load_servers() || self.durable.model.is_none() {
            return;
        }
        if self.checkpoints.committing().is_some() {
            // It is loaded when it is complete, unless its storage hangs.
            return self.check_checkpoint(now);
        }
        self.abandon_checkpoint();
        self.assignments.end_evaluation();
        let generation = self.servers().generation().next();
        let folder = self.durable.latest_checkpoint().map(|checkpoint| checkpoint.folder.clone());
        self.strategy.group_mut().begin_load(folder, now);
        self.assignments.forget_early();
        self.void_workers();
        self.strategy.servers_mut().load(generation);
        self.change(|facts| facts.generation = generation);
        let all: Vec<PsId> = self.servers().members().keys().copied().collect();
        all.into_iter().for_each(|ps| self.send_load(ps));
    }

    fn send_load(&mut self, ps: PsId) {
        let load = self.load_order(ps).map(|load| Effect::ToPs(ps, Order::Load(Box::new(load))));
        self.effects.extend(load);
    }

    /// The load in progress, for one server. None if the model is not known, or cannot be trained
    /// with the job's optimizer: then the job fails when the next worker is ready.
    fn load_order(&self, ps: PsId) -> Option<Load> {
        let (spec, layout) = (&self.config.spec, self.layout());
        let model = self.durable.model.as_ref()?;
        Some(Load {
            generation: self.servers().generation(),
            partitions: layout.hosted(ps, spec.num_ps_pods),
            layout,
            optimizer: optimizer::resolve(spec, model).ok()?,
            model: Arc::new(model.clone()),
            seed: spec.seed,
            n_batches: self.config.n_batches(),
            mode: spec.mode(),
            lr_staleness_modulation: spec.lr_staleness_modulation,
            from: self.load_from(),
        })
    }

    /// What the load in progress reads.
    pub(super) fn load_from(&self) -> LoadFrom {
        self.strategy.group().load_from(&self.config.spec.checkpoint_dir_for_init)
    }

    pub(super) fn ps_loaded(
        &mut self,
        ps: PsId,
        generation: Generation,
        sets: Vec<PartitionState>,
        now: Time,
    ) {
        let outcome = self.strategy.servers_mut().loaded(ps, generation, sets);
        self.follow(outcome, now);
    }

    /// A server cannot read a checkpoint: the previous one is tried.
    pub(super) fn load_failed(&mut self, ps: PsId, generation: Generation, error: &str) {
        if self.strategy.servers_mut().load_failed(generation) {
            self.give_up_load(&format!("ps-{ps}"), error);
        }
    }

    /// The load in progress failed.
    pub(super) fn give_up_load(&mut self, who: &str, error: &str) {
        let Some(folder) = self.strategy.group_mut().give_up_load() else {
            return self.end(End::Failed(format!("{who} cannot load the initial values: {error}")));
        };
        self.note(EventKind::CheckpointBad, format!("cannot load checkpoint `{folder}`: {error}"));
        self.change(|facts| {
            for checkpoint in &mut facts.checkpoints {
                checkpoint.is_bad |= checkpoint.folder == folder;
            }
            facts.best.take_if(|best| *best == folder);
        });
        if self.durable.latest_checkpoint().is_none() {
            let why = format!(
                "cannot load any checkpoint (last tried `{folder}`: {error}); repair the storage, \
                 or start a new job under another name"
            );
            self.end(End::Failed(why));
        }
    }

    fn follow(&mut self, outcome: Outcome, now: Time) {
        match outcome {
            // `begin_load` checks by itself whether it can start.
            Outcome::Nothing | Outcome::MustLoad => {}
            Outcome::LoadOne(ps) => self.send_load(ps),
            Outcome::Serving { restored, .. } if self.strategy.trains_in_steps() => {
                self.go_on_apart(restored);
            }
            Outcome::Serving { done, restored } => self.go_on(&done, restored, now),
        }
    }

    /// All servers hold the generation: the ledger follows what they have applied.
    fn go_on(&mut self, done: &AppliedSet, restored: bool, now: Time) {
        let before = self.ledger().n_done();
        let is_first = !self.stages.has_started();
        self.account_found(done);
        self.assignments.restore(done, self.strategy.servers().last_applied());
        self.forget_lost_evaluations();
        self.set_limits();
        self.checkpoints.continue_from(self.ledger().version());
        self.stages.start(now);
        let generation = self.servers().generation();
        let n_done = self.ledger().n_done();
        if restored && !is_first {
            let lost = before.saturating_sub(n_done);
            self.note(
                EventKind::Restored,
                format!("loaded generation {generation}; batches to train again: {lost}"),
            );
        } else if n_done > 0 {
            let step = self.ledger().version();
            self.note(EventKind::Resumed, format!("resumed at step {step}"));
        }
        for worker in self.announce_servers() {
            self.assignments.add_idle([worker]);
            self.adopt_held(worker, now);
        }
        self.keep_best(now);
    }

    /// Orders servers to serve and sends workers the route; returns the workers that are ready. A
    /// frozen worker reads the route when it responds again.
    pub(super) fn announce_servers(&mut self) -> Vec<WorkerId> {
        let generation = self.servers().generation();
        for ps in self.strategy.servers().members().keys() {
            self.effects.push(Effect::ToPs(*ps, Order::Serve(generation)));
        }
        let route = Command::Route(self.route());
        let send = |worker: WorkerId| Effect::ToWorker(worker, route.clone());
        self.effects.extend(self.roster.workers_with_model().map(send));
        self.roster.ready_workers().collect()
    }

    /// Where the servers are now.
    pub(super) fn route(&self) -> Route {
        let (servers, layout) = (self.servers(), self.layout());
        let server = |(ps, member): (&PsId, &ServerMember)| ServerRoute {
            ps: *ps,
            address: member.address.clone(),
            unix_path: member.unix_path.clone(),
            partitions: layout.hosted(*ps, servers.n_ps()),
        };
        let all = servers.members().iter().map(server).collect();
        Route { generation: servers.generation(), servers: all }
    }

    fn layout(&self) -> Layout {
        let dense_len = self.durable.model.as_ref().map_or(0, ModelSpec::dense_len);
        self.config.spec.layout(dense_len)
    }

    /// Replaces servers that are silent or take too long to load.
    pub(super) fn check_servers(&mut self, now: Time) {
        for (ps, why) in self.roster.silent_servers(now) {
            self.replace_server(ps, &why);
        }
        for ps in self.strategy.group_mut().take_slow_loaders(now) {
            self.replace_server(ps, &format!("did not finish loading within {LOAD_TIMEOUT:?}"));
        }
    }

    fn replace_server(&mut self, ps: PsId, why: &str) {
        self.ps_lost(ps, why);
        self.effects.push(Effect::ClosePs(ps));
        self.replace(ps);
    }
}

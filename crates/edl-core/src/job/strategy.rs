// SPDX-License-Identifier: Apache-2.0
//! Where the parameters are: on servers, on the workers of a world, or on both.

use std::time::Duration;

use super::step_control::StepControl;
use super::{Durable, LoadFrom};
use crate::id::{Generation, Incarnation, PsId, WorkerId};
use crate::servers::{Servers, ServersPhase};
use crate::spec::JobSpec;
use crate::time::Time;
use crate::world::{Member, Worlds};

/// A server that takes longer to load hangs.
pub(super) const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// How a job distributes its parameters; chosen once.
#[derive(Clone, Debug)]
pub(super) enum Strategy {
    /// Servers hold all parameters; workers are assigned batches.
    Servers(Group),
    /// Workers hold all parameters and train in steps. The group has no servers.
    Worlds(Group, StepControl),
    /// Workers hold the dense parameters and train in steps; servers hold the embedding rows.
    /// `is_fresh`: no worker has trained on what the servers have loaded.
    Hybrid { group: Group, steps: StepControl, is_fresh: bool },
}

/// The servers, and what is being loaded.
#[derive(Clone, Debug)]
pub(super) struct Group {
    servers: Servers,
    /// Folder of the checkpoint; none for the first values.
    loading_from: Option<String>,
    loading_since: Time,
}

impl Group {
    fn new(servers: Servers, now: Time) -> Self {
        Self { servers, loading_from: None, loading_since: now }
    }

    pub(super) fn begin_load(&mut self, folder: Option<String>, now: Time) {
        (self.loading_from, self.loading_since) = (folder, now);
    }

    pub(super) fn loading_from(&self) -> Option<&String> {
        self.loading_from.as_ref()
    }

    /// The load failed; returns the folder of the checkpoint.
    pub(super) fn give_up_load(&mut self) -> Option<String> {
        self.loading_from.take()
    }

    /// What is loaded. `init` is the folder of another job's parameters, or empty.
    pub(super) fn load_from(&self, init: &str) -> LoadFrom {
        let initial = (!init.is_empty()).then(|| init.to_owned());
        let keep_applied = self.loading_from.is_some();
        LoadFrom { checkpoint: self.loading_from.clone().or(initial), keep_applied }
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        let is_loading = self.servers.phase() == ServersPhase::Loading;
        is_loading.then(|| self.loading_since + LOAD_TIMEOUT)
    }

    /// Servers that take too long to load; they get the same time again.
    pub(super) fn take_slow_loaders(&mut self, now: Time) -> Vec<PsId> {
        let is_slow = now.since(self.loading_since) >= LOAD_TIMEOUT;
        if self.servers.phase() != ServersPhase::Loading || !is_slow {
            return Vec::new();
        }
        self.loading_since = now;
        let members = self.servers.members().iter();
        let late = members.filter(|(_, member)| member.generation != self.servers.generation());
        late.map(|(ps, _)| *ps).collect()
    }
}

impl Strategy {
    pub(super) fn new(spec: &JobSpec, durable: &Durable, now: Time) -> Self {
        let generation = durable.generation;
        let steps = || StepControl::new(spec, durable.holders.as_deref(), now);
        let servers = Servers::new(spec.num_ps_pods, spec.layout(0).with_rows(), generation);
        match (spec.n_servers(), spec.step_lanes()) {
            (_, None) => Self::Servers(Group::new(servers, now)),
            (0, Some(_)) => {
                Self::Worlds(Group::new(Servers::new(0, 0..0, generation), now), steps())
            }
            (_, Some(_)) => {
                Self::Hybrid { group: Group::new(servers, now), steps: steps(), is_fresh: false }
            }
        }
    }

    pub(super) fn group(&self) -> &Group {
        match self {
            Self::Servers(group) | Self::Worlds(group, _) | Self::Hybrid { group, .. } => group,
        }
    }

    pub(super) fn group_mut(&mut self) -> &mut Group {
        match self {
            Self::Servers(group) | Self::Worlds(group, _) | Self::Hybrid { group, .. } => group,
        }
    }

    pub(super) fn servers(&self) -> &Servers {
        &self.group().servers
    }

    pub(super) fn servers_mut(&mut self) -> &mut Servers {
        &mut self.group_mut().servers
    }

    pub(super) fn steps(&self) -> Option<&StepControl> {
        match self {
            Self::Servers(_) => None,
            Self::Worlds(_, steps) | Self::Hybrid { steps, .. } => Some(steps),
        }
    }

    pub(super) fn steps_mut(&mut self) -> Option<&mut StepControl> {
        match self {
            Self::Servers(_) => None,
            Self::Worlds(_, steps) | Self::Hybrid { steps, .. } => Some(steps),
        }
    }

    pub(super) fn worlds(&self) -> Option<&Worlds> {
        self.steps().map(StepControl::worlds)
    }

    /// Whether workers train together in steps, instead of each one its batches.
    pub(super) fn trains_in_steps(&self) -> bool {
        self.steps().is_some()
    }

    /// Whether the parameters can be trained and evaluated.
    pub(super) fn is_serving(&self) -> bool {
        match self {
            Self::Servers(group) => group.servers.is_serving(),
            Self::Worlds(_, steps) => steps.worlds().is_running(),
            Self::Hybrid { group, steps, .. } => {
                group.servers.is_serving() && steps.worlds().is_running()
            }
        }
    }

    /// Whether workers cannot train because the servers do not serve their rows.
    pub(super) fn lacks_rows(&self) -> bool {
        matches!(self, Self::Hybrid { group, .. } if !group.servers.is_serving())
    }

    /// Whether all servers are there and must load.
    pub(super) fn must_load_servers(&self) -> bool {
        match self {
            Self::Servers(group) | Self::Hybrid { group, .. } => group.servers.must_load(),
            Self::Worlds(..) => false,
        }
    }

    /// Whether workers that load must wait until the servers have loaded the same.
    pub(super) fn must_servers_load_first(&self) -> bool {
        matches!(self, Self::Hybrid { is_fresh: false, .. })
    }

    /// What servers hold was just loaded, or workers have trained on it.
    pub(super) fn set_fresh(&mut self, is_new: bool) {
        if let Self::Hybrid { is_fresh, .. } = self {
            *is_fresh = is_new;
        }
    }

    /// The servers load an earlier state: what workers hold no longer counts.
    pub(super) fn void_workers(&mut self) {
        if let Self::Hybrid { steps, is_fresh, .. } = self {
            *is_fresh = false;
            steps.worlds_mut().void();
        }
    }

    /// Whether a worker is ready to evaluate the model: in steps, it must hold it.
    pub(super) fn has_joined(&self, worker: WorkerId) -> bool {
        self.worlds().is_none_or(|worlds| worlds.has_formed(worker))
    }

    /// Whether a worker trains: in the world, or in the one before it, which trains on until the
    /// new one has formed.
    pub(super) fn is_training(&self, worker: WorkerId) -> bool {
        self.worlds().is_none_or(|worlds| worlds.is_training(worker))
    }

    /// Whether the model that a worker evaluates is the job's.
    pub(super) fn is_holding(&self, worker: WorkerId, incarnation: Option<Incarnation>) -> bool {
        let holds = |worlds: &Worlds| incarnation.is_some_and(|of| worlds.is_holder(worker, of));
        self.worlds().is_none_or(holds)
    }

    /// The workers that hold parameters, in the order of their lanes.
    pub(super) fn members(&self) -> &[Member] {
        self.worlds().and_then(Worlds::current).map_or(&[], |world| &world.members)
    }

    /// The step that no worker may pass yet: a checkpoint or a pause can be ordered for it.
    pub(super) fn last_step(&self) -> Option<u64> {
        self.worlds().map(Worlds::until)
    }

    /// Whether all processes that write a checkpoint are there, no change is in progress, and the
    /// last step that is allowed will stay so.
    pub(super) fn can_checkpoint(&self) -> bool {
        self.steps().is_none_or(|steps| {
            steps.worlds().is_settled() && !steps.is_pausing() && self.is_serving()
        })
    }

    /// Panics if workers or servers know of a generation that is not durable.
    pub(super) fn check_invariants(&self, durable: Generation) {
        if let Some(worlds) = self.worlds() {
            worlds.check_invariants();
        }
        if !matches!(self, Self::Worlds(..)) {
            assert_eq!(durable, self.servers().generation(), "announce only what is durable");
        }
    }
}

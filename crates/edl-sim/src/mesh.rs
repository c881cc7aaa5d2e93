// SPDX-License-Identifier: Apache-2.0
//! Links between members of a world: what they send, and who owes what.
//!
//! A link lives as long as both its ends are in one world. What arrives from a member that has
//! entered a world earlier is kept until this worker enters it too.

use std::collections::{BTreeMap, BTreeSet};

use edl_core::id::{Incarnation, WorkerId, WorldId};
use edl_core::lanes::Span;
use edl_core::world::World;

use crate::history::DenseState;
use crate::kernel::Pid;
use crate::message;
use crate::network::{ConnId, Purpose};
use crate::process::Context;

#[derive(Clone, Debug)]
pub(crate) struct MeshMessage {
    pub(crate) world: WorldId,
    pub(crate) content: Content,
}

#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// The sender has left every world before.
    Entered,
    /// The step that the sender holds.
    Level(Option<u64>),
    /// A partition of the sender's state.
    Partition(u32, DenseState),
    /// Sums of the gradients of a step.
    Nodes(u64, Vec<(Span, u64)>),
    /// The sender has the last step of the world.
    Farewell,
}

/// What a member has sent in the current world.
#[derive(Clone, Debug, Default)]
pub(crate) struct Received {
    pub(crate) has_entered: bool,
    pub(crate) level: Option<Option<u64>>,
    pub(crate) partitions: BTreeMap<u32, DenseState>,
    pub(crate) nodes: BTreeMap<u64, Vec<(Span, u64)>>,
    pub(crate) has_parted: bool,
}

#[derive(Default)]
pub(crate) struct Mesh {
    world: Option<World>,
    links: BTreeMap<Pid, ConnId>,
    received: BTreeMap<Pid, Received>,
    early: Vec<(Pid, MeshMessage)>,
    /// Members whose link broke in this world.
    lost: BTreeSet<Pid>,
}

pub(crate) fn pid_of(incarnation: Incarnation) -> Pid {
    u32::try_from(incarnation.0).expect("a process number")
}

impl Mesh {
    /// Leaves the world before: keeps the links to members of the next one.
    pub(crate) fn enter(&mut self, context: &mut Context<'_>, world: &World) {
        let is_member = |pid: &Pid| world.members.iter().any(|m| pid_of(m.incarnation) == *pid);
        for (_, conn) in self.links.extract_if(.., |pid, _| !is_member(pid)) {
            context.kernel.hang_up(conn);
        }
        self.received.clear();
        self.lost.clear();
        self.world = Some(world.clone());
        let (now, later) = std::mem::take(&mut self.early)
            .into_iter()
            .filter(|(_, message)| message.world >= world.id)
            .partition(|(_, message)| message.world == world.id);
        self.early = later;
        let now: Vec<(Pid, MeshMessage)> = now;
        now.into_iter().for_each(|(from, message)| self.take(from, message));
        self.send_all(context, &Content::Entered);
    }

    pub(crate) fn world(&self) -> Option<&World> {
        self.world.as_ref()
    }

    pub(crate) fn hear(&mut self, from: Pid, conn: ConnId, message: MeshMessage) {
        self.links.insert(from, conn);
        match self.world.as_ref().map(|world| world.id) {
            Some(id) if message.world == id => self.take(from, message),
            Some(id) if message.world < id => {}
            Some(_) | None => self.early.push((from, message)),
        }
    }

    fn take(&mut self, from: Pid, message: MeshMessage) {
        let received = self.received.entry(from).or_default();
        match message.content {
            Content::Entered => received.has_entered = true,
            Content::Level(step) => received.level = Some(step),
            Content::Partition(item, state) => drop(received.partitions.insert(item, state)),
            Content::Nodes(step, nodes) => drop(received.nodes.insert(step, nodes)),
            Content::Farewell => received.has_parted = true,
        }
    }

    /// Whether the connection was a link of this mesh.
    pub(crate) fn broken(&mut self, conn: ConnId) -> bool {
        let pid = self.links.iter().find(|(_, link)| **link == conn).map(|(pid, _)| *pid);
        if let Some(pid) = pid {
            self.links.remove(&pid);
            self.lost.insert(pid);
        }
        pid.is_some()
    }

    pub(crate) fn others(&self, me: Pid) -> Vec<(WorkerId, Pid)> {
        let members = self.world.iter().flat_map(|world| &world.members);
        let others = members.map(|member| (member.worker, pid_of(member.incarnation)));
        others.filter(|(_, pid)| *pid != me).collect()
    }

    /// The first other member that owes something, a lost one before others; and whether it is
    /// lost.
    pub(crate) fn owing(
        &self,
        me: Pid,
        owes: impl Fn(Pid, &Received) -> bool,
    ) -> Option<(WorkerId, bool)> {
        let nothing = Received::default();
        let received = |pid: &Pid| self.received.get(pid).unwrap_or(&nothing);
        let owing: Vec<(WorkerId, Pid)> =
            self.others(me).into_iter().filter(|(_, pid)| owes(*pid, received(pid))).collect();
        let lost = owing.iter().find(|(_, pid)| self.lost.contains(pid));
        let first = lost.or(owing.first());
        first.map(|(worker, pid)| (*worker, self.lost.contains(pid)))
    }

    /// Whether members train the steps before this world, and none of them has finished these.
    pub(crate) fn is_early(&self, me: Pid) -> bool {
        let planned = self.world.iter().filter(|world| world.after.is_some());
        let mut busy = planned.flat_map(|world| &world.members).filter(|member| member.has_state);
        let has_entered = |pid| self.received(pid).is_some_and(|received| received.has_entered);
        let is_here = |pid: Pid| pid == me || has_entered(pid);
        busy.clone().next().is_some() && !busy.any(|member| is_here(pid_of(member.incarnation)))
    }

    pub(crate) fn received(&self, pid: Pid) -> Option<&Received> {
        self.received.get(&pid)
    }

    /// Forgets the gradients of a step that is over.
    pub(crate) fn forget_step(&mut self, step: u64) {
        self.received.values_mut().for_each(|received| drop(received.nodes.remove(&step)));
    }

    pub(crate) fn send_all(&mut self, context: &mut Context<'_>, content: &Content) {
        for (_, pid) in self.others(context.pid) {
            self.send(context, pid, content.clone());
        }
    }

    pub(crate) fn send(&mut self, context: &mut Context<'_>, to: Pid, content: Content) {
        let Some(world) = self.world.as_ref().map(|world| world.id) else { return };
        if self.lost.contains(&to) {
            return;
        }
        let open = context.kernel.network.between(context.pid, to, Purpose::Mesh);
        let link = open.unwrap_or_else(|| context.connect(to, Purpose::Mesh));
        self.links.insert(to, link);
        context.send(link, message::Message::Mesh(MeshMessage { world, content }));
    }
}

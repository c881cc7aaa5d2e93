// SPDX-License-Identifier: Apache-2.0
//! The group of parameter servers: its members, the generation they serve, when to restore.
//!
//! A generation is one load of all partitions from one checkpoint. As long as every server keeps its
//! memory the generation stays; when one loses it, all of them load the last checkpoint and the
//! generation goes up, which voids every earlier acknowledgement.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::applied::AppliedSet;
use crate::id::{BatchId, Generation, Incarnation, PartitionId, PsId};

/// The servers of one job.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Servers {
    n_ps: u32,
    /// Those that servers hold.
    partitions: Range<u32>,
    generation: Generation,
    phase: ServersPhase,
    members: BTreeMap<PsId, ServerMember>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ServersPhase {
    /// Waiting until all are connected. They continue unchanged only if none has lost its memory.
    Gathering { must_restore: bool },
    /// All load `generation`.
    Loading,
    /// All hold `generation`; workers may pull and push.
    Serving,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServerMember {
    pub incarnation: Incarnation,
    pub address: String,
    pub unix_path: String,
    /// What it holds; zero is nothing.
    pub generation: Generation,
    pub sets: Vec<PartitionState>,
}

/// The state of one partition, as its server reports it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PartitionState {
    pub partition: PartitionId,
    pub applied: AppliedSet,
    /// Batches applied, counted apart from the set.
    pub updates: u64,
    pub n_rows: u64,
}

/// What follows from an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Nothing,
    /// All servers are connected, and state was lost or never loaded.
    MustLoad,
    /// Send this server the load that is under way.
    LoadOne(PsId),
    /// All hold the generation. `restored`: they loaded it, so later work is lost.
    Serving {
        done: AppliedSet,
        restored: bool,
    },
}

impl Servers {
    /// `generation` is the last one that was made durable; zero if there was none.
    #[must_use]
    pub fn new(n_ps: u32, partitions: Range<u32>, generation: Generation) -> Self {
        let phase = ServersPhase::Gathering { must_restore: generation == Generation(0) };
        Self { n_ps, partitions, generation, phase, members: BTreeMap::new() }
    }

    /// A server came, or came back after its stream broke.
    pub fn connected(&mut self, ps: PsId, member: ServerMember) -> Outcome {
        let holds = member.generation;
        let before = self.members.insert(ps, member);
        match self.phase {
            ServersPhase::Gathering { .. } => self.gathered(),
            ServersPhase::Loading if holds == self.generation => self.check_loaded(),
            ServersPhase::Loading => Outcome::LoadOne(ps),
            ServersPhase::Serving => {
                let kept = before.is_some_and(|b| b.incarnation == self.members[&ps].incarnation)
                    && holds == self.generation;
                if kept {
                    return Outcome::Nothing;
                }
                self.phase = ServersPhase::Gathering { must_restore: true };
                self.gathered()
            }
        }
    }

    /// A server's memory is gone. True if the job's work was touched by it.
    pub fn lost(&mut self, ps: PsId) -> bool {
        let was_member = self.members.remove(&ps).is_some();
        if was_member && self.phase == ServersPhase::Serving {
            self.phase = ServersPhase::Gathering { must_restore: true };
            return true;
        }
        false
    }

    /// The state of the servers is void, although none of them is lost: all load again.
    pub fn restore(&mut self) {
        self.phase = ServersPhase::Gathering { must_restore: true };
    }

    fn gathered(&mut self) -> Outcome {
        let ServersPhase::Gathering { must_restore } = self.phase else { return Outcome::Nothing };
        if self.members.len() < self.n_ps as usize {
            return Outcome::Nothing;
        }
        let all_hold = self.members.values().all(|member| member.generation == self.generation);
        if must_restore || !all_hold {
            self.phase = ServersPhase::Gathering { must_restore: true };
            return Outcome::MustLoad;
        }
        self.serve(false)
    }

    /// Whether a load can begin: all servers are connected and must restore.
    #[must_use]
    pub fn must_load(&self) -> bool {
        self.phase == ServersPhase::Gathering { must_restore: true }
            && self.members.len() == self.n_ps as usize
    }

    /// Begins to load a new generation, which the caller has made durable.
    ///
    /// # Panics
    /// If the generation does not go up.
    pub fn load(&mut self, generation: Generation) {
        assert!(generation > self.generation, "generations only go up");
        self.generation = generation;
        self.phase = ServersPhase::Loading;
    }

    /// A server has loaded.
    pub fn loaded(
        &mut self,
        ps: PsId,
        generation: Generation,
        sets: Vec<PartitionState>,
    ) -> Outcome {
        let Some(member) = self.members.get_mut(&ps) else { return Outcome::Nothing };
        if generation != self.generation || self.phase != ServersPhase::Loading {
            return Outcome::Nothing;
        }
        member.generation = generation;
        member.sets = sets;
        self.check_loaded()
    }

    /// The checkpoint cannot be loaded: gather again, to load another.
    pub fn load_failed(&mut self, generation: Generation) -> bool {
        let concerns_us = generation == self.generation && self.phase == ServersPhase::Loading;
        if concerns_us {
            self.phase = ServersPhase::Gathering { must_restore: true };
        }
        concerns_us
    }

    fn check_loaded(&mut self) -> Outcome {
        let all_hold = self.members.len() == self.n_ps as usize
            && self.members.values().all(|member| member.generation == self.generation);
        if all_hold { self.serve(true) } else { Outcome::Nothing }
    }

    /// Continues with the batches that all partitions have applied.
    fn serve(&mut self, restored: bool) -> Outcome {
        let states: Vec<&PartitionState> =
            self.members.values().flat_map(|member| &member.sets).collect();
        let mut partitions: Vec<PartitionId> = states.iter().map(|s| s.partition).collect();
        partitions.sort_unstable();
        let is_whole = partitions.iter().map(|partition| partition.0).eq(self.partitions.clone());
        let mut sets = states.iter().map(|state| &state.applied);
        let (true, Some(first)) = (is_whole, sets.next()) else {
            // A server holds the wrong partitions: only a load can repair that.
            self.phase = ServersPhase::Gathering { must_restore: true };
            return Outcome::MustLoad;
        };
        let done = sets.fold(first.clone(), |done, set| done.and(set));
        self.phase = ServersPhase::Serving;
        Outcome::Serving { done, restored }
    }

    /// The last batch that any partition had applied at its server's last report. In a checkpoint some
    /// partitions may be ahead of what is in all of them.
    #[must_use]
    pub fn last_applied(&self) -> Option<BatchId> {
        let states = self.members.values().flat_map(|member| &member.sets);
        states.filter_map(|state| state.applied.last()).max()
    }

    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    #[must_use]
    pub fn phase(&self) -> ServersPhase {
        self.phase
    }

    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.phase == ServersPhase::Serving
    }

    #[must_use]
    pub fn members(&self) -> &BTreeMap<PsId, ServerMember> {
        &self.members
    }

    #[must_use]
    pub fn n_ps(&self) -> u32 {
        self.n_ps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(incarnation: u64, generation: u64, partitions: Range<u32>, n: u32) -> ServerMember {
        let mut applied = AppliedSet::new(10);
        for index in 0..n {
            applied.insert(BatchId { epoch: 0, index });
        }
        let state = |p| PartitionState {
            partition: PartitionId(p),
            applied: applied.clone(),
            updates: u64::from(n),
            n_rows: 0,
        };
        ServerMember {
            incarnation: Incarnation(incarnation),
            address: String::new(),
            unix_path: String::new(),
            generation: Generation(generation),
            sets: partitions.map(state).collect(),
        }
    }

    fn serving() -> Servers {
        let mut servers = Servers::new(2, 0..4, Generation(0));
        assert_eq!(servers.connected(PsId(0), member(1, 0, 0..0, 0)), Outcome::Nothing);
        assert_eq!(servers.connected(PsId(1), member(2, 0, 0..0, 0)), Outcome::MustLoad);
        servers.load(Generation(1));
        let sets = |range| member(0, 0, range, 0).sets;
        assert_eq!(servers.loaded(PsId(0), Generation(1), sets(0..2)), Outcome::Nothing);
        let Outcome::Serving { restored: true, .. } =
            servers.loaded(PsId(1), Generation(1), sets(2..4))
        else {
            panic!("both have loaded")
        };
        servers
    }

    #[test]
    fn a_broken_stream_alone_restores_nothing() {
        let mut servers = serving();
        assert_eq!(servers.connected(PsId(0), member(1, 1, 0..2, 3)), Outcome::Nothing);
        assert!(servers.is_serving());
    }

    #[test]
    fn a_server_that_lost_its_memory_makes_all_load_a_new_generation() {
        let mut servers = serving();
        assert!(servers.lost(PsId(1)));
        assert!(!servers.must_load(), "the lost one is not back yet");
        assert_eq!(servers.connected(PsId(1), member(7, 0, 0..0, 0)), Outcome::MustLoad);
        servers.load(Generation(2));
        let late = servers.loaded(PsId(0), Generation(1), Vec::new());
        assert_eq!(late, Outcome::Nothing, "a load of an older generation does not count");
    }

    #[test]
    #[should_panic(expected = "generations only go up")]
    fn no_server_is_ever_ordered_to_load_an_earlier_generation() {
        let mut servers = Servers::new(2, 0..4, Generation(5));
        servers.load(Generation(4));
    }

    #[test]
    fn a_new_master_continues_with_what_all_partitions_hold() {
        let mut servers = Servers::new(2, 0..4, Generation(5));
        servers.connected(PsId(0), member(1, 5, 0..2, 6));
        let Outcome::Serving { done, restored: false } =
            servers.connected(PsId(1), member(2, 5, 2..4, 4))
        else {
            panic!("nothing was lost")
        };
        assert_eq!(done.len(), 4);
    }

    #[test]
    fn the_last_batch_that_any_partition_has_is_known() {
        let mut servers = Servers::new(2, 0..4, Generation(5));
        assert_eq!(servers.last_applied(), None);
        servers.connected(PsId(0), member(1, 5, 0..2, 0));
        assert_eq!(servers.last_applied(), None);
        servers.connected(PsId(1), member(2, 5, 2..4, 4));
        assert_eq!(servers.last_applied(), Some(BatchId { epoch: 0, index: 3 }));
        servers.connected(PsId(0), member(1, 5, 0..2, 10));
        assert_eq!(servers.last_applied(), Some(BatchId { epoch: 0, index: 9 }));
    }

    #[test]
    fn a_new_master_restores_when_one_server_is_of_an_older_generation() {
        let mut servers = Servers::new(2, 0..4, Generation(5));
        servers.connected(PsId(0), member(1, 5, 0..2, 6));
        assert_eq!(servers.connected(PsId(1), member(2, 4, 2..4, 9)), Outcome::MustLoad);
    }
}

# SPDX-License-Identifier: Apache-2.0
"""The bugs that `mutate.py` plants: small patches to the machines and to the partition.

`MUTANT` in the new text is true while the bug is switched on.
"""

from __future__ import annotations

from typing import NamedTuple

CORE = "crates/edl-core/src"
TENSOR = "crates/edl-tensor/src"
NET = "crates/edl-net/src"


class Edit(NamedTuple):
    file: str
    old: str
    new: str


class Mutation(NamedTuple):
    """A bug. Where a second guard hides it, `also` removes that one at once."""

    name: str
    file: str
    old: str
    new: str
    also: tuple[Edit, ...] = ()

    def edits(self) -> tuple[Edit, ...]:
        return (Edit(self.file, self.old, self.new), *self.also)


MUTATIONS = [
    # Which master is followed.
    Mutation(
        "follow a master of a lower term",
        f"{NET}/control/follow.rs",
        "if term < our_term {",
        "if !MUTANT && term < our_term {",
    ),
    # Parameters: each batch once, in a fixed order.
    Mutation(
        "apply a batch that is applied already",
        f"{TENSOR}/partition.rs",
        "if self.applied.contains(batch) {\n            return Ok(Outcome::Already);",
        "if !MUTANT && self.applied.contains(batch) {\n            return Ok(Outcome::Already);",
    ),
    Mutation(
        "apply a step of lanes from two worlds",
        f"{TENSOR}/partition/steps.rs",
        "self.world = lane.world;\n            self.lanes.clear();",
        "self.world = lane.world;\n"
        "            if !MUTANT {\n                self.lanes.clear();\n            }",
    ),
    Mutation(
        "accept a lane of an earlier world",
        f"{TENSOR}/partition/steps.rs",
        "if lane.world < self.world {",
        "if !MUTANT && lane.world < self.world {",
    ),
    Mutation(
        "acknowledge a lane without records before its step is applied",
        f"{TENSOR}/partition/steps.rs",
        "if push.head.n_records > 0 { Outcome::Kept }",
        "if MUTANT || push.head.n_records > 0 { Outcome::Kept }",
    ),
    Mutation(
        "read rows without undoing the last step",
        f"{TENSOR}/partition/steps.rs",
        "self.steps.as_ref().filter(|_| step < self.updates)",
        "self.steps.as_ref().filter(|_| !MUTANT && step < self.updates)",
    ),
    # The servers as the master sees them.
    Mutation(
        "accept a server of another incarnation as the same",
        f"{CORE}/servers.rs",
        "before.is_some_and(|b| b.incarnation == self.members[&ps].incarnation)",
        "before.is_some_and(|b| MUTANT || b.incarnation == self.members[&ps].incarnation)",
        # A new process holds nothing, and one that was replaced is refused.
        also=(
            Edit(
                f"{CORE}/servers.rs",
                "&& holds == self.generation;",
                "&& (MUTANT || holds == self.generation);",
            ),
        ),
    ),
    Mutation(
        "serve although servers hold different generations",
        f"{CORE}/servers.rs",
        "if must_restore || !all_hold {",
        "if must_restore || !all_hold && !MUTANT {",
    ),
    Mutation(
        "let a server that was replaced take its slot back",
        f"{CORE}/job/recovery.rs",
        "self.durable.replaced_servers.contains(&incarnation)",
        "!MUTANT && self.durable.replaced_servers.contains(&incarnation)",
    ),
    Mutation(
        "count a batch that only some partitions have",
        f"{CORE}/servers.rs",
        "sets.fold(first.clone(), |done, set| done.and(set))",
        "sets.fold(first.clone(), |done, set| if MUTANT { done } else { done.and(set) })",
    ),
    # The job.
    Mutation(
        "do not persist the generation of a load",
        f"{CORE}/job/recovery.rs",
        "self.change(|facts| facts.generation = generation);",
        "if !MUTANT {\n            self.change(|facts| facts.generation = generation);\n        }",
    ),
    Mutation(
        "keep the state of workers when the servers load",
        f"{CORE}/job/recovery.rs",
        "self.void_workers();",
        "if !MUTANT {\n            self.void_workers();\n        }",
    ),
    Mutation(
        "count a batch of another generation",
        f"{CORE}/job/work.rs",
        "if generation != self.servers().generation() {\n            return;",
        "if !MUTANT && generation != self.servers().generation() {\n            return;",
    ),
    Mutation(
        "do not persist the workers that hold the state",
        f"{CORE}/job/worlds.rs",
        "if self.durable.holders != holders {",
        "if !MUTANT && self.durable.holders != holders {",
    ),
    Mutation(
        "list files of a checkpoint of another generation",
        f"{CORE}/job/checkpoints.rs",
        "checkpoint.id == id && checkpoint.generation == generation\n",
        "MUTANT || checkpoint.id == id && checkpoint.generation == generation\n",
    ),
    Mutation(
        "let workers pass the step of a checkpoint that servers do not know",
        f"{CORE}/job/checkpoints.rs",
        "!checkpoint.unaware.is_empty()",
        "!MUTANT && !checkpoint.unaware.is_empty()",
    ),
    Mutation(
        "count the time of a checkpoint before its step is trained",
        f"{CORE}/job/checkpoints.rs",
        "checkpoint.version > n_done",
        "!MUTANT && checkpoint.version > n_done",
    ),
    Mutation(
        "commit a checkpoint that lacks partitions",
        f"{CORE}/job/checkpoints.rs",
        "if self.files.len() != self.n_partitions {",
        "if !MUTANT && self.files.len() != self.n_partitions {",
        # No process reports fewer files than it was ordered to write.
        also=(
            Edit(
                f"{CORE}/server/checkpoints.rs",
                "done.files.into_values().collect()",
                "done.files.into_values().skip(usize::from(MUTANT)).collect()",
            ),
        ),
    ),
    Mutation(
        "end training at a step that a server may have passed",
        f"{CORE}/job/worlds.rs",
        "self.allow_begun(step);",
        "if !MUTANT {\n                self.allow_begun(step);\n            }",
    ),
    Mutation(
        "change the members before all of them have paused",
        f"{CORE}/job/step_control.rs",
        ".filter(|_| has_all)",
        ".filter(|_| MUTANT || has_all)",
    ),
    Mutation(
        "plan a change of members for a step that one of them has passed",
        f"{CORE}/job/step_control.rs",
        "pause.last.values().copied().max()",
        "if MUTANT { pause.last.values().min() } else { pause.last.values().max() }.copied()",
    ),
    Mutation(
        "pause before a step that is begun",
        f"{CORE}/member.rs",
        "let step = self.begun.max(step);",
        "let step = if MUTANT { step } else { self.begun.max(step) };",
    ),
    Mutation(
        "believe the state of a worker that does not hold it",
        f"{CORE}/world.rs",
        "holders.is_none_or(|holders| holders.get(&worker) == Some(&incarnation))",
        "MUTANT || holders.is_none_or(|holders| holders.get(&worker) == Some(&incarnation))",
    ),
    # A parameter server.
    Mutation(
        "acknowledge before every partition has applied",
        f"{CORE}/server/held.rs",
        "push.n_missing == 0;",
        "push.n_missing == 0 || MUTANT && push.n_missing == 1;",
    ),
    Mutation(
        "apply a push of an earlier generation",
        f"{CORE}/server/requests.rs",
        "Some(current) if generation < current => Gate::Refused(Refusal::Generation { current }),",
        "Some(_) if MUTANT && self.held().is_some_and(|held| held.is_served) => Gate::Open,\n"
        "            Some(current) if generation < current => {\n"
        "                Gate::Refused(Refusal::Generation { current })\n"
        "            }",
    ),
    Mutation(
        "answer before the order to serve",
        f"{CORE}/server.rs",
        "held.is_served && held.generation == generation",
        "(MUTANT || held.is_served) && held.generation == generation",
    ),
    Mutation(
        "do not wake requests when a round completes",
        f"{CORE}/server/requests.rs",
        "self.effects.push(Effect::Refuse(request, Refusal::Other(error)));\n        }\n"
        "        self.review();",
        "self.effects.push(Effect::Refuse(request, Refusal::Other(error)));\n        }\n"
        "        if !MUTANT {\n            self.review();\n        }",
    ),
    Mutation(
        "write a checkpoint of a step that has passed on a server",
        f"{CORE}/server/checkpoints.rs",
        "open.at.filter(|at| *at != updates)",
        "open.at.filter(|at| !MUTANT && *at != updates)",
        # No worker passes a step before all servers know that it is to be saved.
        also=(
            Edit(
                f"{CORE}/job/worlds.rs",
                "let may_grant = self.stages.is_working() && !self.checkpoints.must_not_pass();",
                "let may_grant =\n"
                "            self.stages.is_working() && "
                "(MUTANT || !self.checkpoints.must_not_pass());",
            ),
        ),
    ),
    Mutation(
        "complete a checkpoint without its last file",
        f"{CORE}/server/checkpoints.rs",
        "if open.files.len() < held.partitions.len() {",
        "if open.files.len() + usize::from(MUTANT) < held.partitions.len() {",
    ),
    Mutation(
        "ignore the rounds that a pull waits for",
        f"{CORE}/server/held.rs",
        "&& applied < round",
        "&& !MUTANT\n            && applied < round",
        # The master assigns the batches of a round when the one before is done.
        also=(
            Edit(
                f"{CORE}/ledger.rs",
                "(n_rounds_done + 1).saturating_mul(self.round)",
                "(n_rounds_done + 1 + u32::from(MUTANT)).saturating_mul(self.round)",
            ),
        ),
    ),
    # A worker with parameter servers.
    Mutation(
        "report a batch that only one server has",
        f"{CORE}/acks.rs",
        "if !push.waiting.is_empty() {",
        "if !MUTANT && !push.waiting.is_empty() {",
    ),
    Mutation(
        "keep batches across generations",
        f"{CORE}/worker.rs",
        "self.work.clear_batches();",
        "if !MUTANT {\n                self.work.clear_batches();\n            }",
    ),
    Mutation(
        "do not push again after a connection broke",
        f"{CORE}/worker/pipeline.rs",
        "self.work.reopen();\n",
        "if !MUTANT {\n            self.work.reopen();\n        }\n",
    ),
    Mutation(
        "evaluate with old dense parameters",
        f"{CORE}/worker/pipeline.rs",
        "let is_due = !will_push || self.dense_age",
        "let is_due = !will_push && !MUTANT || self.dense_age",
    ),
    Mutation(
        "push a batch that was computed for a lost connection",
        f"{CORE}/worker/pipeline.rs",
        "if computing.is_void {",
        "if !MUTANT && computing.is_void {",
    ),
    # A member of a world.
    Mutation(
        "train by the grant of another world",
        f"{CORE}/member.rs",
        "Some((id, until)) if id == world.world.id => until.max(world.until),",
        "Some((id, until)) if MUTANT || id == world.world.id => until.max(world.until),",
    ),
    Mutation(
        "keep a state that is void",
        f"{CORE}/member/form.rs",
        "if next.load.is_some() || !next.world.members[place].has_state {",
        "if next.load.is_some() || !MUTANT && !next.world.members[place].has_state {",
    ),
    Mutation(
        "agree on the lowest step instead of the highest",
        f"{CORE}/member/level.rs",
        "let highest = steps.iter().copied().flatten().max()?;",
        "let lowest = steps.iter().copied().flatten().min().filter(|_| MUTANT);\n"
        "    let highest = lowest.or(steps.iter().copied().flatten().max())?;",
    ),
    Mutation(
        "leave a world before all have its last step",
        f"{CORE}/member/form.rs",
        "if !self.is_due_at_once(&next) && before.world.loses_members_in(&next.world) {",
        "if !MUTANT && !self.is_due_at_once(&next) && before.world.loses_members_in(&next.world) {",
    ),
    Mutation(
        "write a checkpoint of a step that has passed on a worker",
        f"{CORE}/member/checkpoint.rs",
        "if *at < step {",
        "if !MUTANT && *at < step {",
    ),
    Mutation(
        "evaluate a state of another step",
        f"{CORE}/member/evaluate.rs",
        "if version != step {",
        "if !MUTANT && version != step {",
    ),
    Mutation(
        "reduce before the servers have acknowledged the lanes",
        f"{CORE}/member/train.rs",
        "Stage::Lane(_) if has_tables => {",
        "Stage::Lane(_) if has_tables && !MUTANT => {",
    ),
    Mutation(
        "leave out lanes without records",
        f"{CORE}/member/train.rs",
        "Stage::Lane(lane) if has_tables && lane < step.mine.end => {",
        "Stage::Lane(lane) if !MUTANT && has_tables && lane < step.mine.end => {",
    ),
    # Batches that are not finite.
    Mutation(
        "assign a batch that is skipped to be trained",
        f"{CORE}/job/durable.rs",
        "skipped.map(|batch| batch.index).collect()",
        "skipped.filter(|_| !MUTANT).map(|batch| batch.index).collect()",
    ),
    Mutation(
        "announce a world without its skipped steps",
        f"{CORE}/job/worlds.rs",
        "load: load.cloned(),\n            skipped,",
        "load: load.cloned(),\n"
        "            skipped: if MUTANT { BTreeSet::new() } else { skipped },",
    ),
    Mutation(
        "forget the skipped batches when the store is rebuilt",
        f"{CORE}/job/durable.rs",
        "self.skipped.extend(skipped);",
        "if !MUTANT {\n                self.skipped.extend(skipped);\n            }",
    ),
    # What is on disk, and when.
    Mutation(
        "save the state after other processes have learned of it",
        f"{CORE}/job.rs",
        "let effects = std::mem::take(&mut self.effects);",
        "let mut effects = std::mem::take(&mut self.effects);\n"
        "        if MUTANT {\n"
        "            effects.sort_by_key(|effect| matches!(effect, Effect::Persist(_)));\n"
        "        }",
    ),
    Mutation(
        "record a checkpoint before its manifest is written",
        f"{CORE}/job/checkpointing.rs",
        "                    files,\n                });\n",
        "                    files,\n                });\n"
        "                if MUTANT {\n"
        "                    self.committed(checkpoint, now);\n"
        "                }\n",
    ),
    Mutation(
        "load a file that differs from its checksum",
        f"{TENSOR}/checkpoint.rs",
        "Ok((_, checksum)) if checksum_text(checksum) != entry.checksum => {",
        "Ok((_, checksum)) if !MUTANT && checksum_text(checksum) != entry.checksum => {",
        # The file carries its checksum as well.
        also=(
            Edit(
                f"{TENSOR}/checkpoint/codec.rs",
                "if computed != stored {",
                "if !MUTANT && computed != stored {",
            ),
        ),
    ),
    Mutation(
        "write a checkpoint of another generation on a worker",
        f"{CORE}/member/checkpoint.rs",
        "if *generation != state.generation {",
        "if !MUTANT && *generation != state.generation {",
    ),
    # Which batches are applied.
    Mutation(
        "join runs of batches across a gap",
        f"{CORE}/runs.rs",
        "Some(run) if number == run.end => start = run.start,",
        "Some(run) if number == run.end + u32::from(MUTANT) => start = run.start,",
    ),
    Mutation(
        "read the difference of two applied sets as an addition",
        f"{CORE}/applied/bytes.rs",
        "let runs = open.remove(&epoch).unwrap_or_default().xor(&changed);",
        "let before = open.remove(&epoch).unwrap_or_default();\n"
        "            let runs = if MUTANT { before.or(&changed) } else { before.xor(&changed) };",
    ),
    Mutation(
        "keep early reports of batches when the servers load",
        f"{CORE}/job/recovery.rs",
        "self.assignments.forget_early();",
        "if !MUTANT {\n            self.assignments.forget_early();\n        }",
    ),
    # Worlds that change while workers train.
    Mutation(
        "enter a planned world after a step that failed",
        f"{CORE}/member.rs",
        "step.is_none() || self.place_in(next).is_none();",
        "step.is_none() || self.place_in(next).is_none() || MUTANT;",
    ),
    Mutation(
        "forget workers that keep training although no world follows",
        f"{CORE}/world.rs",
        "            // No worker trains after that, so all state stays as it is.\n",
        "            // No worker trains after that, so all state stays as it is.\n"
        "            self.previous.take_if(|_| MUTANT);\n",
    ),
    Mutation(
        "keep the world of a frozen worker",
        f"{CORE}/job/frozen.rs",
        "world.map(|world| steps.worlds_mut().broken(world));",
        "world.filter(|_| !MUTANT).map(|world| steps.worlds_mut().broken(world));",
    ),
    Mutation(
        "never use a worker again that was frozen",
        f"{CORE}/job/roster.rs",
        "(self.last_heard, self.pinged, self.is_frozen) = (now, None, false);",
        "(self.last_heard, self.pinged) = (now, None);\n        self.is_frozen &= MUTANT;",
    ),
    Mutation(
        "forget where a script has left its loop",
        f"{CORE}/job/worlds.rs",
        "self.change(|facts| facts.last_step = Some(last));",
        "self.change(|facts| facts.last_step = Some(last).filter(|_| !MUTANT));",
    ),
    Mutation(
        "train past a barrier",
        f"{CORE}/job/step_control.rs",
        "end.min(n_done.saturating_add(self.n_ahead()))",
        "end.saturating_add(u64::from(MUTANT)).min(n_done.saturating_add(self.n_ahead()))",
    ),
]

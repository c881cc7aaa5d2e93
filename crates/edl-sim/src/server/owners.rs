// SPDX-License-Identifier: Apache-2.0
//! The work of a server's owner threads: real partitions, and what is done with them.

use std::ops::Range;
use std::sync::Arc;

use edl_core::layout::Layout;
use edl_core::server::{Event, Load, Part, Refusal, Request};
use edl_net::frame::PieceHead;
use edl_tensor::partition::{Partition, PartitionConfig};
use edl_tensor::push::{Push, span};

use super::{Body, Owner, Owners, PendingRequest, Server, Task};
use crate::frames::{self, Pull};
use crate::message::Message;
use crate::model::DIMS;
use crate::process::Context;

impl Server {
    pub(super) fn load(&mut self, context: &mut Context<'_>, load: &Load) {
        let generation = load.generation;
        let make = |id: u32| match &load.from.checkpoint {
            None => Ok(Partition::new(PartitionConfig::of(load, id))),
            Some(folder) => {
                let (snapshot, config) =
                    (context.disk.read(folder, id)?, PartitionConfig::of(load, id));
                let part = Partition::from_snapshot(config, snapshot, load.from.keep_applied);
                part.map_err(|error| error.to_string())
            }
        };
        let parts: Result<Vec<Partition>, String> = load.partitions.clone().map(make).collect();
        let parts = match parts {
            Ok(parts) => parts,
            Err(error) => return self.handle(context, Event::LoadFailed { generation, error }),
        };
        let progress = parts.iter().map(Partition::progress).collect();
        let states = parts.iter().map(Partition::state).collect();
        let n_owners = 1 + context.kernel.pick(2.min(parts.len().max(1)));
        let share = parts.len().div_ceil(n_owners).max(1);
        let mut parts = parts.into_iter();
        let mut owners = Vec::new();
        for _ in 0..n_owners {
            let parts: Vec<Partition> = parts.by_ref().take(share).collect();
            owners.push(Owner { parts, ..Owner::default() });
        }
        self.owners = Some(Owners { generation, hosted: load.partitions.clone(), owners });
        self.handle(context, Event::Loaded { generation, progress, states });
    }

    /// Does a task of an owner; returns what the machine must know of it.
    pub(super) fn work(
        &mut self,
        context: &mut Context<'_>,
        owners: &mut Owners,
        owner: usize,
        task: Task,
    ) -> Vec<Event> {
        let generation = owners.generation;
        match task {
            Task::Push(request) => {
                let Some(PendingRequest { body: Body::Push(push), label, .. }) =
                    self.requests.get(&request)
                else {
                    return Vec::new();
                };
                assert_eq!(label.generation, generation, "a push of another generation");
                let owner = &mut owners.owners[owner];
                let parts = owner.parts.iter_mut().map(|part| apply(part, push)).collect();
                let mut events = self.copy_due(owner);
                events.insert(0, Event::Pushed { generation, request, parts });
                events
            }
            Task::Pull(request) => {
                self.answer(context, owners, owner, request);
                Vec::new()
            }
            Task::Copy(checkpoint, at) => {
                let owner = &mut owners.owners[owner];
                owner.copy_at.clear();
                let order = (checkpoint, at.unwrap_or(0));
                owner.copy_at.extend(owner.parts.iter().map(|part| (part.id(), order)));
                self.copy_due(owner)
            }
            Task::Inspect(inspection) => {
                // The last owner to come to it completes the answer.
                if owner + 1 < owners.owners.len() {
                    return Vec::new();
                }
                let parts = owners.owners.iter().flat_map(|owner| &owner.parts);
                let states = parts.map(Partition::state).collect();
                vec![Event::Inspected { inspection, generation, states }]
            }
        }
    }

    /// Copies the partitions whose step has come.
    fn copy_due(&mut self, owner: &mut Owner) -> Vec<Event> {
        let mut events = Vec::new();
        for part in &owner.parts {
            let (partition, updates) = (part.id(), part.updates());
            let Some((checkpoint, at)) = owner.copy_at.get(&partition).copied() else { continue };
            if updates >= at {
                owner.copy_at.remove(&partition);
                self.copies.insert((checkpoint, partition), part.snapshot());
                events.push(Event::Copied { checkpoint, partition, updates });
            }
        }
        events
    }

    /// Sends the parameters of one owner's partitions.
    fn answer(
        &mut self,
        context: &mut Context<'_>,
        owners: &mut Owners,
        owner: usize,
        request: Request,
    ) {
        let Some(PendingRequest { conn, label, body: Body::Pull { pull, n_left } }) =
            self.requests.get_mut(&request)
        else {
            return;
        };
        let parts = &mut owners.owners[owner].parts;
        let is_past = |step: u64| parts.iter().any(|part| !part.has_step(step));
        if pull.head.step.is_some_and(is_past) {
            // A step came in between. The client asks again.
            return self.refuse(context, request, Refusal::NotServing);
        }
        let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return };
        let partitions = first.id().0..last.id().0 + 1;
        let version = parts.iter().map(Partition::version).min().unwrap_or(0);
        let numbers = read(parts, &owners.hosted, pull, &context.model.layout);
        let head = PieceHead { partitions, version, n_floats: numbers.len() };
        let (conn, label) = (*conn, *label);
        *n_left -= parts.len();
        if *n_left == 0 {
            self.requests.remove(&request);
        }
        context.send(conn, Message::Frame(frames::piece(label, &head, &numbers)));
    }
}

/// The dense numbers of some partitions, then their rows, as a pull requests them.
fn read(parts: &mut [Partition], hosted: &Range<u32>, pull: &Pull, layout: &Layout) -> Vec<f32> {
    let mut numbers = Vec::new();
    if pull.head.wants_dense {
        parts.iter().for_each(|part| numbers.extend_from_slice(part.dense()));
        let ends = parts[0].id().0..parts[parts.len() - 1].id().0 + 1;
        assert_eq!(numbers.len(), span(layout, &ends).len(), "segments lie side by side");
    }
    for part in parts {
        let place = (part.id().0 - hosted.start) as usize;
        let before: u32 = pull.counts[..place].iter().sum();
        let ids = &pull.ids[before as usize..][..pull.counts[place] as usize];
        let mut rows = vec![0.0; ids.len() * DIMS[0]];
        if let Some(step) = pull.head.step {
            part.peek_at(step, 0, ids, &mut rows);
        } else if pull.head.will_push {
            part.gather(0, ids, &mut rows);
        } else {
            part.peek(0, ids, &mut rows);
        }
        numbers.extend(rows);
    }
    numbers
}

fn apply(part: &mut Partition, push: &Arc<Push>) -> Part {
    let outcome = part.push(push);
    part.check_invariants();
    Part { partition: part.id(), outcome, progress: part.progress() }
}

// SPDX-License-Identifier: Apache-2.0
//! A worker under AllReduce or Hybrid: what its master tells it.

use edl_core::id::{CutId, EvalId, Generation, Incarnation, LeaseId, WorkerId, WorldId};
use edl_core::job::LoadFrom;
use edl_core::member::{Event, Order};
use edl_core::worker::{Pass, Shard, Task};
use edl_core::world::{Announced, Member, World};

use crate::proto::{self, lease::Work, worker_command};

/// A command as a member of a world takes it. None for a welcome, which its session takes, and for
/// work that members do not do.
#[must_use]
pub fn event(command: worker_command::Kind) -> Option<Event> {
    use worker_command::Kind as Command;
    Some(match command {
        Command::World(world) => Event::World(announced(&world)),
        Command::Go(proto::Go { world, until }) => Event::Go { world: WorldId(world), until },
        Command::Cut(order) => Event::Checkpoint(self::order(order)),
        Command::Lease(proto::Lease { lease, work: Some(Work::Eval(work)), .. }) => {
            Event::Lease { lease: LeaseId(lease), task: task(&work) }
        }
        Command::Revoke(revoke) => Event::Revoke(LeaseId(revoke.lease)),
        Command::Route(route) => Event::Route(route.into()),
        Command::Stop(_) => Event::Stop,
        Command::Welcome(_) | Command::Lease(_) => return None,
    })
}

/// A shard of the validation data.
#[must_use]
pub fn task(work: &proto::EvalWork) -> Task {
    let pass = Pass::Evaluate { eval: EvalId(work.eval), version: work.version };
    let records = work.first_record..work.end_record;
    Task::Shard(Shard { number: work.shard, records, pass })
}

/// A world as the master announces it.
#[must_use]
pub fn announced(world: &proto::World) -> Announced {
    let member = |member: &proto::Member| Member {
        worker: WorkerId(member.worker),
        incarnation: Incarnation(member.incarnation),
        lanes: member.first_lane..member.end_lane,
        has_state: member.has_state,
    };
    let load = |load: &proto::Load| LoadFrom {
        checkpoint: (!load.checkpoint.is_empty()).then(|| load.checkpoint.clone()),
        keep_applied: load.keep_applied,
    };
    let members = world.members.iter().map(member).collect();
    Announced {
        world: World { id: WorldId(world.world), members, after: world.after },
        until: world.until,
        generation: Generation(world.generation),
        load: world.load.as_ref().map(load),
    }
}

/// An order to write files of a checkpoint.
#[must_use]
pub fn order(order: proto::CutAt) -> Order {
    Order {
        cut: CutId(order.cut),
        generation: Generation(order.generation),
        folder: order.folder,
        at: order.at,
        partitions: order.first_partition..order.end_partition,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_values_are_loaded_from_no_checkpoint() {
        let load = |checkpoint: &str| {
            let load = proto::Load { checkpoint: checkpoint.into(), ..proto::Load::default() };
            announced(&proto::World { load: Some(load), ..proto::World::default() }).load
        };
        let from = |checkpoint| Some(LoadFrom { checkpoint, keep_applied: false });
        assert_eq!((load(""), load("/a")), (from(None), from(Some("/a".into()))));
    }

    #[test]
    fn an_announced_world_says_who_trains_what() {
        let member = proto::Member {
            worker: 3,
            incarnation: 9,
            address: "host:1".into(),
            unix_path: "/run/a".into(),
            first_lane: 2,
            end_lane: 4,
            has_state: true,
        };
        let members = vec![member];
        let world =
            proto::World { world: 7, members, after: Some(5), until: 8, ..Default::default() };
        let heard = announced(&world);
        assert_eq!((heard.world.id, heard.world.after, heard.until), (WorldId(7), Some(5), 8));
        assert_eq!(heard.world.place_of(WorkerId(3), Incarnation(9)), Some(0));
        assert_eq!((heard.world.members[0].lanes.clone(), heard.load), (2..4, None));
    }
}

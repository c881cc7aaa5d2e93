// SPDX-License-Identifier: Apache-2.0
//! Commands to a worker under AllReduce or Hybrid. Its reports are in `worker`.

use edl_core::id::{CheckpointId, Generation, Incarnation, LeaseId, WorkerId, WorldId};
use edl_core::member::{Event, Order};
use edl_core::world::{Announced, Member, World};

use super::worker;
use crate::mesh::Peer;
use crate::proto::{self, lease::Work, worker_command};

/// A command as a member of a world takes it. None for a welcome or a ping, which its session takes,
/// and for work that members do not do.
#[must_use]
pub fn event(command: worker_command::Kind) -> Option<Event> {
    use worker_command::Kind as Command;
    Some(match command {
        Command::World(world) => Event::World(announced(&world)),
        Command::Go(proto::Go { world, until }) => Event::Go { world: WorldId(world), until },
        Command::Checkpoint(order) => Event::Checkpoint(self::order(order)),
        Command::Lease(proto::Lease { lease, work: Some(work @ Work::Eval(_)) }) => {
            Event::Lease { lease: LeaseId(lease), task: worker::task(work) }
        }
        Command::Revoke(revoke) => Event::Revoke(LeaseId(revoke.lease)),
        Command::Route(route) => Event::Route(route.into()),
        Command::Stop(_) => Event::Stop,
        Command::Welcome(_) | Command::Ping(_) | Command::Lease(_) => return None,
    })
}

fn announced(world: &proto::World) -> Announced {
    let member = |member: &proto::Member| Member {
        worker: WorkerId(member.worker),
        incarnation: Incarnation(member.incarnation),
        lanes: member.first_lane..member.end_lane,
        has_state: member.has_state,
    };
    let members = world.members.iter().map(member).collect();
    Announced {
        world: World { id: WorldId(world.world), members, after: world.after },
        until: world.until,
        generation: Generation(world.generation),
        load: world.load.clone().map(Into::into),
        skipped: world.skipped.iter().copied().collect(),
    }
}

/// How the members of a world are reached, in the order of their lanes.
#[must_use]
pub fn peers(world: &proto::World) -> Vec<Peer> {
    let peer = |member: &proto::Member| Peer {
        worker: WorkerId(member.worker),
        incarnation: Incarnation(member.incarnation),
        address: member.address.clone(),
        unix_path: member.unix_path.clone(),
        span: member.first_lane..member.end_lane,
    };
    world.members.iter().map(peer).collect()
}

fn order(order: proto::WorkerCheckpoint) -> Order {
    Order {
        checkpoint: CheckpointId(order.checkpoint),
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
    fn an_announced_world_names_its_members_and_their_lanes() {
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
        let peers = peers(&world);
        assert_eq!((peers[0].address.as_str(), peers[0].span.clone()), ("host:1", 2..4));
    }
}

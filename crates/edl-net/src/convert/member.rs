// SPDX-License-Identifier: Apache-2.0
//! Worlds, as they are announced to their members.

use edl_core::id::{Generation, Incarnation, WorkerId, WorldId};
use edl_core::world::{Announced, Member, World};

use crate::mesh::Peer;
use crate::proto;

pub(super) fn announced(world: &proto::World) -> Announced {
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
        is_busy: world.after.is_some() && member.has_state,
    };
    world.members.iter().map(peer).collect()
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

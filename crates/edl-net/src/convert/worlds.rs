// SPDX-License-Identifier: Apache-2.0
//! Worlds on a stream: the first one in full, each later one as its difference from the one before.
//!
//! A stream delivers its messages in order or breaks, so both ends know the world before. A new
//! stream begins with a welcome, and its first world is sent in full.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use edl_core::id::{WorkerId, WorldId};
use edl_core::lanes::{self, Span};

use crate::proto::{Changes, Member, World};

/// Members that missed more worlds than this get the next one in full.
const MAX_RECENT: usize = 4;

/// What a master has sent on its streams.
#[derive(Debug, Default)]
pub struct SentWorlds {
    /// The last worlds in full, the newest last.
    recent: VecDeque<World>,
    /// The last world with members on the stream of each worker.
    last: BTreeMap<WorkerId, WorldId>,
    /// The newest world as its difference from earlier ones.
    differences: BTreeMap<WorldId, World>,
}

impl SentWorlds {
    /// A new stream to `worker` begins.
    pub(super) fn welcome(&mut self, worker: WorkerId) {
        self.last.remove(&worker);
    }

    /// The message that announces `world` to `worker`. All workers are sent the same world.
    pub(super) fn send(
        &mut self,
        worker: WorkerId,
        world: WorldId,
        full: impl FnOnce() -> World,
    ) -> World {
        if self.recent.back().is_none_or(|newest| newest.world != world.0) {
            self.add(full());
        }
        let Self { recent, last, differences } = self;
        let newest = recent.back().expect("it was added");
        let base = last.get(&worker).copied();
        if !newest.members.is_empty() {
            last.insert(worker, world);
        }
        let base = recent.iter().find(|recent| Some(WorldId(recent.world)) == base);
        let Some(base) = base else { return newest.clone() };
        let difference = || difference(base, newest).unwrap_or_else(|| newest.clone());
        differences.entry(WorldId(base.world)).or_insert_with(difference).clone()
    }

    fn add(&mut self, world: World) {
        self.differences.clear();
        if self.recent.len() == MAX_RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(world);
        let recent: BTreeSet<u64> = self.recent.iter().map(|world| world.world).collect();
        self.last.retain(|_, world| recent.contains(&world.0));
    }
}

/// What a worker has received on its stream.
#[derive(Debug, Default)]
pub struct ReceivedWorlds {
    last: Option<World>,
}

impl ReceivedWorlds {
    /// A new stream begins.
    pub fn welcome(&mut self) {
        self.last = None;
    }

    /// The world in full; none if it is invalid on this stream.
    #[must_use]
    pub fn receive(&mut self, world: World) -> Option<World> {
        let full = match &world.changes {
            None => world,
            Some(_) => complete(self.last.as_ref()?, world)?,
        };
        if !full.members.is_empty() {
            self.last = Some(full.clone());
        }
        Some(full)
    }
}

/// `next` as its difference from `base`, if that says the same and is shorter.
fn difference(base: &World, next: &World) -> Option<World> {
    let known: BTreeMap<u32, &Member> = base.members.iter().map(|m| (m.worker, m)).collect();
    let members: BTreeMap<u32, &Member> = next.members.iter().map(|m| (m.worker, m)).collect();
    let identity =
        |member: &Member| (member.incarnation, member.address.clone(), member.unix_path.clone());
    let is_new = |member: &&Member| {
        known.get(&member.worker).is_none_or(|known| identity(known) != identity(member))
    };
    let news: Vec<Member> = next.members.iter().filter(is_new).cloned().collect();
    if 2 * news.len() > next.members.len() {
        return None;
    }
    let lanes = next.members.last()?.end_lane;
    let counts: Vec<u32> =
        next.members.iter().map(|m| m.end_lane.saturating_sub(m.first_lane)).collect();
    let is_even =
        even(lanes, counts.len()).iter().map(Span::len).eq(counts.iter().map(|n| *n as usize));
    let stateless = next.members.iter().filter(|member| !member.has_state);
    let changes = Changes {
        base: base.world,
        left: known.into_keys().filter(|worker| !members.contains_key(worker)).collect(),
        first: next.members.first()?.worker,
        lanes,
        lane_counts: if is_even { Vec::new() } else { counts },
        stateless: stateless.map(|member| member.worker).collect(),
    };
    let world = World {
        members: news,
        changes: Some(changes),
        skipped: next.skipped.clone(),
        load: next.load.clone(),
        ..*next
    };
    (complete(base, world.clone()).as_ref() == Some(next)).then_some(world)
}

/// The world that differs from `base` as `world` says.
fn complete(base: &World, mut world: World) -> Option<World> {
    let changes = world.changes.take().filter(|changes| changes.base == base.world)?;
    let mut members: BTreeMap<u32, Member> =
        base.members.iter().map(|member| (member.worker, member.clone())).collect();
    changes.left.iter().for_each(|worker| _ = members.remove(worker));
    members.extend(world.members.into_iter().map(|member| (member.worker, member)));
    let mut members: Vec<Member> = members.into_values().collect();
    let first = members.iter().position(|member| member.worker == changes.first)?;
    members.rotate_left(first);
    let spans = match changes.lane_counts.len() {
        0 => even(changes.lanes, members.len()),
        _ => consecutive(&changes.lane_counts)?,
    };
    if spans.len() != members.len() {
        return None;
    }
    let stateless: BTreeSet<u32> = changes.stateless.into_iter().collect();
    for (member, span) in members.iter_mut().zip(spans) {
        (member.first_lane, member.end_lane) = (span.start, span.end);
        member.has_state = !stateless.contains(&member.worker);
    }
    Some(World { members, ..world })
}

fn even(n_lanes: u32, n_members: usize) -> Vec<Span> {
    lanes::assign(n_lanes, u32::try_from(n_members).unwrap_or(u32::MAX))
}

fn consecutive(counts: &[u32]) -> Option<Vec<Span>> {
    let mut next = 0_u32;
    let span = |count: &u32| {
        let start = next;
        next = next.checked_add(*count)?;
        Some(start..next)
    };
    counts.iter().map(span).collect()
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    /// A world of these workers, each with this many lanes.
    fn world(id: u64, members: &[(u32, u32)]) -> World {
        let counts: Vec<u32> = members.iter().map(|(_, n_lanes)| *n_lanes).collect();
        let spans = consecutive(&counts).unwrap();
        let member = |((worker, _), span): (&(u32, u32), Span)| Member {
            worker: *worker,
            incarnation: u64::from(*worker) << 40,
            address: format!("10.0.0.{worker}:40000"),
            unix_path: format!("/run/elasticdl/worker-{worker}.sock"),
            first_lane: span.start,
            end_lane: span.end,
            has_state: true,
        };
        let members = members.iter().zip(spans).map(member).collect();
        World { world: id, members, until: 8, skipped: vec![3], ..World::default() }
    }

    fn evenly(id: u64, workers: &[u32]) -> World {
        let lanes = even(8, workers.len());
        let members: Vec<(u32, u32)> = workers
            .iter()
            .zip(lanes)
            .map(|(worker, span)| (*worker, span.end - span.start))
            .collect();
        world(id, &members)
    }

    /// Sends worlds to a worker and checks that it gets them; returns which were sent in full.
    fn send_all(sent: &mut SentWorlds, worlds: &[World]) -> Vec<bool> {
        let mut received = ReceivedWorlds::default();
        let deliver = |world: &World| {
            let message = sent.send(WorkerId(1), WorldId(world.world), || world.clone());
            let is_full = message.changes.is_none();
            let message = World::decode(&*message.encode_to_vec()).unwrap();
            assert_eq!(received.receive(message).as_ref(), Some(world));
            is_full
        };
        worlds.iter().map(deliver).collect()
    }

    #[test]
    fn a_worker_gets_the_same_world_as_a_difference() {
        let first = evenly(1, &[1, 2, 3, 4]);
        let lost = evenly(2, &[1, 2, 4]);
        let mut joined = evenly(3, &[1, 2, 4, 5]);
        joined.members[3].has_state = false;
        joined.after = Some(9);
        let rotated = evenly(4, &[4, 5, 1, 2]);
        let by_speed = world(5, &[(1, 3), (2, 1), (4, 2), (5, 2)]);
        let mut moved = evenly(6, &[1, 2, 4, 5]);
        moved.members[2].address = "10.0.0.9:40000".into();
        let mut restarted = evenly(7, &[1, 2, 4, 5]);
        restarted.members[0].incarnation = 77;
        let worlds = [first, lost, joined, rotated, by_speed, moved, restarted];
        let is_full = send_all(&mut SentWorlds::default(), &worlds);
        assert_eq!(is_full, [true, false, false, false, false, false, false]);
    }

    #[test]
    fn a_world_without_members_is_no_base() {
        let worlds = [evenly(1, &[1, 2, 3]), evenly(2, &[]), evenly(3, &[1, 2])];
        assert_eq!(send_all(&mut SentWorlds::default(), &worlds), [true, true, false]);
    }

    #[test]
    fn an_order_that_a_difference_cannot_describe_is_sent_in_full() {
        let worlds = [evenly(1, &[1, 2, 3]), evenly(2, &[2, 1, 3]), evenly(3, &[6, 7, 8])];
        assert_eq!(send_all(&mut SentWorlds::default(), &worlds), [true, true, true]);
    }

    #[test]
    fn a_new_stream_begins_with_a_full_world() {
        let mut sent = SentWorlds::default();
        let worlds = [evenly(1, &[1, 2, 3]), evenly(2, &[1, 2])];
        assert_eq!(send_all(&mut sent, &worlds), [true, false]);
        sent.welcome(WorkerId(1));
        assert_eq!(send_all(&mut sent, &[evenly(3, &[1, 2])]), [true]);
        let mut received = ReceivedWorlds::default();
        assert!(received.receive(sent.send(WorkerId(1), WorldId(4), || evenly(4, &[1]))).is_none());
    }

    #[test]
    fn a_worker_that_missed_many_worlds_gets_the_next_in_full() {
        let mut sent = SentWorlds::default();
        sent.send(WorkerId(9), WorldId(1), || evenly(1, &[1, 9]));
        let later: Vec<World> = (2..=6).map(|id| evenly(id, &[1, 2])).collect();
        send_all(&mut sent, &later);
        assert_eq!((sent.recent.len(), sent.last.len()), (MAX_RECENT, 1), "old ones are dropped");
        let next = sent.send(WorkerId(9), WorldId(7), || evenly(7, &[1, 2, 9]));
        assert!(next.changes.is_none());
    }

    #[test]
    fn one_of_a_thousand_costs_few_bytes() {
        let all: Vec<u32> = (0..1_000).collect();
        let others: Vec<u32> = all.iter().copied().filter(|worker| *worker != 500).collect();
        let (before, after) = (world(1, &all.iter().map(|w| (*w, 1)).collect::<Vec<_>>()), {
            let spans = even(1_000, others.len());
            let members = others.iter().zip(spans).map(|(w, s)| (*w, s.end - s.start));
            world(2, &members.collect::<Vec<_>>())
        });
        let difference = difference(&before, &after).expect("a difference");
        assert!(difference.encoded_len() < 40, "{} bytes", difference.encoded_len());
        assert!(after.encoded_len() > 50_000);
    }
}

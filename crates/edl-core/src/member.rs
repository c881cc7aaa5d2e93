// SPDX-License-Identifier: Apache-2.0
//! A worker under AllReduce and Hybrid as one machine: events in, effects out, in order.
//!
//! A worker is *in* a world when it trains with its members, and *between* worlds otherwise:
//! before the first, after a member was lost or a step failed here, or when it is not a member.
//! At most one activity is under way. Events from the master may come at any time; most of them
//! take effect when the activity has ended.

mod checkpoint;
mod effect;
mod evaluate;
mod event;
mod form;
mod level;
mod pace;
mod report;
mod status;
mod train;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::batch::BatchPlan;
use crate::id::{CheckpointId, Generation, Incarnation, LeaseId, WorkerId, WorldId};
use crate::job::{Command, MemberCheckpoint, MemberReport, Peer};
use crate::machine::Machine;
use crate::model::ModelSpec;
use crate::route::Route;
use crate::spec::JobSpec;
use crate::time::Time;
use crate::worker::{Limits, Report};
use crate::world::Announced;

pub use self::effect::{Activity, Effect, Step};
pub use self::event::{Event, Failure, Outcome, Place, Transferred};
pub use self::level::Move;

use self::evaluate::Assigned;
use self::form::Forming;
use self::pace::Pace;
use self::report::Reports;
use self::train::Training;

/// What does not change while the process runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub worker: WorkerId,
    pub incarnation: Incarnation,
    /// A batch is trained by all lanes in one step.
    pub plan: BatchPlan,
    pub n_lanes: u32,
    /// 0 trains until stopped.
    pub num_epochs: u32,
    /// Records of a lane, and of a piece of a shard.
    pub minibatch_size: u32,
    /// Partitions that workers hold.
    pub n_partitions: u32,
    /// Hybrid: parameter servers hold embedding tables.
    pub has_tables: bool,
    /// The number of a member's lanes follows its speed.
    pub is_balanced: bool,
    /// Leases to hold at once.
    pub capacity: u32,
    pub limits: Limits,
}

impl Config {
    #[must_use]
    pub fn new(
        spec: &JobSpec,
        n_records: u64,
        (worker, incarnation): (WorkerId, Incarnation),
        limits: Limits,
    ) -> Self {
        Self {
            worker,
            incarnation,
            plan: spec.plan(n_records),
            n_lanes: spec.n_lanes(),
            num_epochs: spec.num_epochs,
            minibatch_size: spec.minibatch_size,
            n_partitions: spec.partitions,
            has_tables: spec.n_servers() > 0,
            is_balanced: spec.lane_balance,
            capacity: crate::worker::capacity(spec.mode()),
            limits,
        }
    }
}

/// A worker that trains with other workers.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    config: Config,
    effects: Vec<Effect>,
    /// What it announces, once its model is built.
    announcement: Option<Announcement>,
    doing: Option<Doing>,
    is_cancelled: bool,

    state: Option<HeldState>,
    /// The last world whose state it holds; 0 without state.
    held: WorldId,
    /// The world that it is in.
    world: Option<Announced>,
    /// The highest world announced, until it is entered.
    next: Option<Announced>,
    highest: WorldId,
    /// The last grant of any world.
    go: Option<(WorldId, u64)>,
    /// It was asked to pause: no step after this one is begun in this world, whatever was granted.
    pause: Option<(WorldId, u64)>,
    /// The last step that was begun with the state that it holds, in any world.
    begun: u64,
    /// When it stopped training, between worlds.
    left: Option<Time>,

    training: Option<Training>,
    /// Lanes, sums, updates and minibatches computed by this process.
    n_computed: u64,
    /// Records of the lanes among them.
    n_records: u64,
    pace: Pace,
    /// Records that were requested and are not used yet.
    reads: BTreeMap<Place, Reading>,
    shards: BTreeMap<LeaseId, Assigned>,
    /// Checkpoints whose step has not come.
    orders: Vec<MemberCheckpoint>,
    writing: Option<(CheckpointId, Generation)>,
    reports: Reports,

    route: Option<Route>,
    /// The route that connections follow.
    connected: Option<Route>,
    /// When servers that could not be reached are tried again.
    retry_at: Option<Time>,

    is_leaving: bool,
    is_over: bool,
    /// When a worker that was asked to exit stops waiting for anything.
    exit_by: Option<Time>,
    is_ended: bool,
}

/// Its model, and how other workers reach it.
#[derive(Clone, Debug, PartialEq)]
struct Announcement {
    model: Box<ModelSpec>,
    peer: Box<Peer>,
}

/// The parameters that the shell holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HeldState {
    step: u64,
    generation: Generation,
}

/// What this worker may claim to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Claim {
    /// The last world that it was in.
    pub world: WorldId,
    pub step: u64,
}

/// The activity that is under way.
#[derive(Clone, Debug, PartialEq)]
enum Doing {
    Parting(Announced),
    Forming(Announced, Forming),
    Connecting(Route),
    Training,
    Hashing,
    Evaluating(LeaseId),
}

/// The records of a place.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Reading {
    Asked,
    Decoded,
    Failed(String),
}

/// What to do next, between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Enter,
    Evaluate(LeaseId),
    Train,
    /// Nothing until something happens.
    Wait,
    End,
}

impl Machine for Member {
    type Event = Event;
    type Effect = Effect;

    /// Takes in what happened, and returns what to do about it.
    ///
    /// # Panics
    /// If an activity ends that was not started, or with the outcome of another one.
    fn handle(&mut self, event: Event, now: Time) -> Vec<Effect> {
        if self.is_ended {
            return Vec::new();
        }
        self.retry_at.take_if(|at| *at <= now);
        match event {
            Event::Tick => {}
            Event::Built { model, peer } => {
                self.announcement = Some(Announcement { model, peer });
                self.announce();
            }
            Event::Command(command) => self.obey(command, now),
            Event::Rejoined => self.rejoined(now),
            Event::Leave => self.leave_job(now),
            // Only a master can announce a world without this worker.
            Event::MasterLost if self.is_leaving => {
                self.exit_within(self.config.limits.finish, now);
            }
            Event::MasterLost => {}
            Event::Decoded { place, result } => match self.reads.get_mut(&place) {
                Some(reading) => {
                    *reading = result.map_or_else(Reading::Failed, |()| Reading::Decoded);
                }
                None => self.effects.push(Effect::Forget(place)),
            },
            Event::Finished { lease, result } => self.finished(lease, result),
            Event::Written { checkpoint, result } => self.written(checkpoint, result),
            Event::Ended(result) => self.ended(result, now),
        }
        self.cancel();
        if self.exit_by.is_some_and(|at| at <= now) {
            self.is_ended = true;
            self.effects.push(Effect::ExitNow);
        }
        let is_built = self.announcement.is_some();
        while is_built && self.doing.is_none() && !self.is_ended && self.decide(now) {}
        std::mem::take(&mut self.effects)
    }

    fn next_deadline(&self) -> Option<Time> {
        if self.is_ended {
            return None;
        }
        let retry_at = self.retry_at.filter(|_| self.doing.is_none());
        self.exit_by.into_iter().chain(retry_at).min()
    }

    fn check_invariants(&self) {
        assert!(self.effects.is_empty(), "every effect was returned");
        assert!(
            self.held == WorldId(0) || self.state.is_some(),
            "it claims only state that it holds"
        );
        if let Some(world) = &self.world {
            assert!(self.place_in(world).is_some(), "it is in its world");
            assert_eq!(self.held, world.world.id, "it holds the state of its world");
            assert_eq!(self.state.map(|state| state.generation), Some(world.generation));
            assert!(world.world.id <= self.highest);
            let is_forming = matches!(self.doing, Some(Doing::Parting(_) | Doing::Forming(..)));
            assert!(!is_forming, "it leaves before it enters");
        }
        if let Some(training) = &self.training {
            training.check(self.world.as_ref().expect("it trains in a world"));
            assert_eq!(self.step(), Some(training.step.number), "it trains the next step");
        }
        assert!(self.training.is_some() || self.doing != Some(Doing::Training));
        if let Some(next) = &self.next {
            assert_eq!(next.world.id, self.highest, "only the highest world counts");
            assert!(self.held < self.highest, "a world is entered once");
        }
        assert!(self.connected.is_none() || self.config.has_tables);
        let is_forced = self.exit_by.is_some();
        assert!(!self.is_ended || is_forced || self.doing.is_none() && self.writing.is_none());
    }
}

impl Member {
    #[must_use]
    pub fn new(config: Config, now: Time) -> Self {
        Self {
            pace: Pace::new(config.is_balanced, now),
            config,
            effects: Vec::new(),
            announcement: None,
            doing: None,
            is_cancelled: false,
            state: None,
            held: WorldId(0),
            world: None,
            next: None,
            highest: WorldId(0),
            go: None,
            pause: None,
            begun: 0,
            left: None,
            training: None,
            n_computed: 0,
            n_records: 0,
            reads: BTreeMap::new(),
            shards: BTreeMap::new(),
            orders: Vec::new(),
            writing: None,
            reports: Reports::default(),
            route: None,
            connected: None,
            retry_at: None,
            is_leaving: false,
            is_over: false,
            exit_by: None,
            is_ended: false,
        }
    }

    fn obey(&mut self, command: Command, now: Time) {
        match command {
            Command::World(announced) => self.announced(Arc::unwrap_or_clone(announced)),
            Command::Go { world, until } => {
                self.go = self.go.max(Some((world, until)));
                if let Some((_, last)) = self.pause.as_mut().filter(|(of, _)| *of == world) {
                    *last = until.max(*last);
                }
            }
            Command::Pause { world, number } => self.pause(world, number),
            Command::Drain { .. } => self.drop_shards(),
            Command::Checkpoint(order) => self.orders.push(order),
            Command::Lease { lease, task } => self.assigned(lease, task),
            Command::Revoke(lease) => self.drop_shard(lease),
            Command::Route(route) => {
                let known = self.route.as_ref().map(|known| known.generation);
                if Some(route.generation) >= known {
                    self.retry_at = None;
                    self.route = Some(route);
                }
            }
            Command::Stop(_) => {
                self.is_over = true;
                self.exit_within(self.config.limits.finish, now);
            }
            // The session takes these.
            Command::Welcome | Command::Ping => {}
        }
    }

    fn announce(&mut self) {
        let Some(Announcement { model, peer }) = self.announcement.clone() else { return };
        let peer = Peer { step: self.claim().map(|claim| claim.step), ..*peer };
        let (capacity, held) = (self.config.capacity, Vec::new());
        self.report(Report::Ready { model, capacity, held, peer: Some(Box::new(peer)) });
    }

    /// Asked to exit. Members of a world wait until the others have taken over their lanes.
    fn leave_job(&mut self, now: Time) {
        if std::mem::replace(&mut self.is_leaving, true) {
            return;
        }
        let Limits { finish, hand_over, .. } = self.config.limits;
        self.exit_within(if self.claim().is_some() { hand_over } else { finish }, now);
        self.report(Report::Leaving);
    }

    fn exit_within(&mut self, limit: Duration, now: Time) {
        let at = now + limit;
        self.exit_by = Some(self.exit_by.map_or(at, |before| before.min(at)));
    }

    fn announced(&mut self, announced: Announced) {
        if announced.world.id <= self.highest {
            return;
        }
        self.highest = announced.world.id;
        if self.place_in(&announced).is_some() {
            self.effects.push(Effect::Prepare(announced.world.clone()));
        }
        self.next = Some(announced);
    }

    fn ended(&mut self, result: Result<Outcome, Failure>, now: Time) {
        self.is_cancelled = false;
        let is_computed = matches!(self.doing, Some(Doing::Training | Doing::Evaluating(_)));
        self.n_computed += u64::from(is_computed && result.is_ok());
        match self.doing.take().expect("an activity is under way") {
            Doing::Parting(next) => self.parted(next),
            Doing::Forming(next, forming) => self.form_on(next, forming, result, now),
            Doing::Connecting(route) => match result {
                Ok(_) => self.connected = Some(route),
                Err(failure) => self.servers_failed(failure, now),
            },
            Doing::Training => self.trained(result, now),
            Doing::Hashing => {
                let Ok(Outcome::Hashed(hash)) = result else {
                    panic!("a hash ends with {result:?}")
                };
                self.reports.hashed(hash);
                self.flush(now);
            }
            Doing::Evaluating(lease) => self.evaluated(lease, result, now),
        }
    }

    /// Lanes, sums, updates and minibatches computed by this process.
    #[must_use]
    pub fn progress(&self) -> u64 {
        self.n_computed
    }

    /// Records whose gradients were computed by this process.
    #[must_use]
    pub fn records(&self) -> u64 {
        self.n_records
    }

    fn start(&mut self, doing: Doing, activity: Activity) {
        assert!(self.doing.is_none(), "one activity at a time");
        self.doing = Some(doing);
        self.effects.push(Effect::Start(activity));
    }

    /// Ends a wait that has become pointless.
    fn cancel(&mut self) {
        if self.doing.is_some() && !self.is_cancelled && self.is_interrupted() {
            self.is_cancelled = true;
            let next = self.next.as_ref().filter(|_| !self.is_over).map(|next| next.world.id);
            self.effects.push(Effect::Cancel(next));
        }
    }

    /// Whether what is under way is pointless.
    fn is_interrupted(&self) -> bool {
        self.is_over || self.next.as_ref().is_some_and(|next| self.is_due_at_once(next))
    }

    /// This worker's place among the members of a world, if it is one.
    fn place_in(&self, announced: &Announced) -> Option<usize> {
        announced.world.place_of(self.config.worker, self.config.incarnation)
    }

    fn is_due_at_once(&self, next: &Announced) -> bool {
        next.world.is_due_at_once(self.config.worker, self.config.incarnation)
    }

    /// Begins something, if there is something to do; whether to decide again.
    fn decide(&mut self, now: Time) -> bool {
        if self.training.is_some() {
            return self.continue_step(now);
        }
        let (next, has_orders) = (self.choose(), self.has_due_orders());
        let is_quiet = next == Next::Train && !has_orders && !self.lacks_servers();
        if self.reports.is_due(is_quiet, self.report_every(), now) {
            return self.report_step(now);
        }
        if has_orders {
            self.obey_orders();
        }
        match next {
            Next::Enter => self.enter(now),
            Next::Evaluate(lease) => self.evaluate(lease),
            Next::Train => self.begin_step(now),
            Next::Wait => false,
            Next::End => {
                // The shell cannot exit before the files are complete.
                if self.writing.is_none() {
                    self.is_ended = true;
                    self.effects.push(Effect::End);
                }
                false
            }
        }
    }

    fn choose(&self) -> Next {
        if self.is_over {
            return Next::End;
        }
        let step = self.step();
        // A member that could not finish the world before waits until the master replaces the one
        // that is planned: others may still read what it would overwrite.
        let has_left = |next: &Announced| step.is_none() || self.place_in(next).is_none();
        let is_reached =
            |next: &Announced| step >= next.world.after || self.world.is_none() && has_left(next);
        if self.is_interrupted() || self.next.as_ref().is_some_and(is_reached) {
            return Next::Enter;
        }
        if self.is_leaving && self.world.is_none() {
            return Next::End;
        }
        let Some(step) = step else { return Next::Wait };
        if let Some(lease) = self.due_shard(step) {
            return Next::Evaluate(lease);
        }
        match &self.world {
            Some(world) if step < self.until(world) => Next::Train,
            Some(_) | None => Next::Wait,
        }
    }

    /// The step that a member of `world` may train to.
    fn until(&self, world: &Announced) -> u64 {
        let until = match self.go {
            Some((id, until)) if id == world.world.id => until.max(world.until),
            Some(_) | None => world.until,
        };
        let pause = self.pause.filter(|(id, _)| *id == world.world.id);
        pause.map_or(until, |(_, last)| last.min(until))
    }

    /// Begins no further step. One that was begun is finished: another member may have trained it,
    /// and servers may have applied it.
    fn pause(&mut self, world: WorldId, number: u64) {
        let is_in = self.world.as_ref().is_some_and(|known| known.world.id == world);
        let Some(step) = self.step().filter(|_| is_in) else { return };
        let step = self.begun.max(step);
        self.pause = Some((world, step));
        self.report(Report::Member(MemberReport::Paused { world, number, step }));
    }

    /// Whether it must connect to the servers before it trains or evaluates.
    fn lacks_servers(&self) -> bool {
        self.config.has_tables && (self.connected.is_none() || self.connected != self.route)
    }

    /// Whether the servers can be used now; if not, begins what can be done about it.
    fn can_use_servers(&mut self) -> bool {
        if !self.lacks_servers() {
            return true;
        }
        let generation = self.state.map(|state| state.generation);
        if self.retry_at.is_none()
            && let Some(route) = self.route.clone()
            && Some(route.generation) == generation
        {
            self.start(Doing::Connecting(route.clone()), Activity::Connect(route));
        }
        false
    }

    fn hang_up(&mut self) {
        (self.connected, self.retry_at) = (None, None);
        if self.config.has_tables {
            self.effects.push(Effect::HangUp);
        }
    }

    /// The step whose state it holds.
    #[must_use]
    pub fn step(&self) -> Option<u64> {
        self.state.map(|state| state.step)
    }

    /// Whether it leads its world, if it has trained every step that the world may train.
    #[must_use]
    pub fn leads_at_end(&self) -> Option<bool> {
        let world = self.world.as_ref().filter(|world| self.step() >= Some(self.until(world)))?;
        let place = self.place_in(world)?;
        Some(world.world.members[place].lanes.contains(&0))
    }

    /// The state that it announces. State that has not formed a world yet does not count.
    #[must_use]
    pub fn claim(&self) -> Option<Claim> {
        let state = self.state.filter(|_| self.held != WorldId(0))?;
        Some(Claim { world: self.held, step: state.step })
    }
}

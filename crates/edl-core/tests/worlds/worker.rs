// SPDX-License-Identifier: Apache-2.0
//! A worker that keeps its part of the contract: it does one thing after another, each by what it
//! has heard. How worlds are entered is in `forming`, what happens in them in `training`.

mod forming;
mod training;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use edl_core::id::{CutId, EvalId, Generation, Incarnation, LeaseId, Term, WorkerId, WorldId};
use edl_core::job::{Command, LoadFrom, News, Work};
use edl_core::lanes::Span;
use edl_core::platform::Ended;
use edl_core::time::Time;
use edl_core::world::World;

use crate::history::State;
use crate::kernel::{ConnId, Pid, millis};
use crate::message::{Message, Timer, Writing};
use crate::site::Context;

pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    incarnation: Incarnation,
    term: Term,
    master: Option<ConnId>,
    /// The master has welcomed it on this stream, and knows that it is ready.
    is_announced: bool,
    is_built: bool,
    pub(crate) state: Option<State>,
    generation: Generation,
    pub(crate) seat: Option<Seat>,
    /// The highest world heard of, until it is entered.
    next: Option<Named>,
    highest: WorldId,
    go: Option<(WorldId, u64)>,
    cuts: Vec<CutOrder>,
    n_writing: u32,
    shards: BTreeMap<LeaseId, Lent>,
    is_leaving: bool,
    /// It does nothing any more, but its heart beats.
    pub(crate) stuck: Option<Stuck>,
    links: BTreeMap<Pid, ConnId>,
    /// Heard from those who entered a world before this worker did.
    early: Vec<(Pid, Message)>,
    unreported: Option<News>,
    reported_at: Time,
    /// Waits for a master.
    outbox: Vec<Message>,
    /// Counts what it did, so that late timers are known.
    act: u64,
    is_measuring: bool,
}

/// A world as the master named it.
#[derive(Clone)]
pub(crate) struct Named {
    pub(crate) world: World,
    until: u64,
    generation: Generation,
    load: Option<LoadFrom>,
}

/// A place in a world.
pub(crate) struct Seat {
    pub(crate) named: Named,
    pub(crate) phase: Phase,
    levels: BTreeMap<WorkerId, Option<u64>>,
    states: BTreeMap<WorkerId, State>,
    gradients: BTreeMap<(u64, WorkerId), Vec<(Span, u64)>>,
    farewells: BTreeSet<WorkerId>,
    /// Members whose link broke.
    lost: BTreeSet<WorkerId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Loading,
    /// Everybody tells everybody.
    Leveling,
    /// The state of this step is on its way here.
    Receiving(u64),
    /// Between two steps.
    Idle,
    Computing,
    Gathering,
    Reducing,
    /// Nobody goes before all have the last step.
    Parting,
}

/// What a worker that does nothing any more says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stuck {
    Busy,
    /// It waits for what it waited for when it was last able to say.
    Deaf,
}

struct CutOrder {
    cut: CutId,
    generation: Generation,
    folder: String,
    at: u64,
    partitions: std::ops::Range<u32>,
}

struct Lent {
    eval: EvalId,
    version: u64,
    shard: u32,
}

impl Seat {
    fn id(&self) -> WorldId {
        self.named.world.id
    }

    fn others(&self, me: WorkerId) -> Vec<(WorkerId, Pid)> {
        let members = self.named.world.members.iter().filter(|member| member.worker != me);
        members.map(|member| (member.worker, pid_of(member.incarnation))).collect()
    }
}

impl Named {
    fn has(&self, worker: WorkerId, incarnation: Incarnation) -> bool {
        let is_it =
            |m: &edl_core::world::Member| (m.worker, m.incarnation) == (worker, incarnation);
        self.world.members.iter().any(is_it)
    }
}

pub(crate) fn pid_of(incarnation: Incarnation) -> Pid {
    u32::try_from(incarnation.0).expect("a process number")
}

impl Worker {
    pub(crate) fn start(id: u32, context: &mut Context<'_>) -> Self {
        context.after(1, 20, Timer::Reconnect);
        context.heartbeat_later();
        Self {
            id: WorkerId(id),
            incarnation: Incarnation(u64::from(context.pid)),
            term: Term(0),
            master: None,
            is_announced: false,
            is_built: false,
            state: None,
            generation: Generation(0),
            seat: None,
            next: None,
            highest: WorldId(0),
            go: None,
            cuts: Vec::new(),
            n_writing: 0,
            shards: BTreeMap::new(),
            is_leaving: false,
            stuck: None,
            links: BTreeMap::new(),
            early: Vec::new(),
            unreported: None,
            reported_at: Time::ZERO,
            outbox: Vec::new(),
            act: 0,
            is_measuring: false,
        }
    }

    pub(crate) fn on_message(
        &mut self,
        context: &mut Context<'_>,
        conn: ConnId,
        from: Pid,
        message: Message,
    ) {
        match message {
            Message::Told { term, .. } if self.master != Some(conn) || term < self.term => {
                context.kernel.hang_up(conn);
            }
            Message::Told { term, command } => {
                self.term = term;
                self.told(context, command);
            }
            message => {
                self.links.insert(from, conn);
                self.early.push((from, message));
            }
        }
        self.advance(context);
    }

    fn told(&mut self, context: &mut Context<'_>, command: Command) {
        match command {
            Command::Welcome => {
                let (low, high) = if self.is_built { (0, 1) } else { (10, 100) };
                context.after(low, high, Timer::Built);
            }
            Command::World { world, until, generation, load } => {
                if world.id > self.highest {
                    self.highest = world.id;
                    self.next = Some(Named { world, until, generation, load });
                }
            }
            Command::Go { world, until } => {
                self.go = self.go.max(Some((world, until)));
            }
            Command::Cut { cut, generation, folder, at, partitions } => {
                self.cuts.push(CutOrder { cut, generation, folder, at, partitions });
            }
            Command::Lease { lease, work: Work::Eval { eval, version, shard, .. }, .. } => {
                self.shards.insert(lease, Lent { eval, version, shard });
            }
            Command::Revoke(lease) => {
                self.shards.remove(&lease);
            }
            Command::Stop(_) => context.exit = Some(Ended::Exit(0)),
            Command::Route | Command::Lease { .. } => panic!("a command of another strategy"),
        }
    }

    pub(crate) fn on_broken(&mut self, context: &mut Context<'_>, conn: ConnId) {
        if self.master == Some(conn) {
            self.master = None;
            self.is_announced = false;
            context.after(5, 200, Timer::Reconnect);
        }
        let broken = self.links.iter().find(|(_, link)| **link == conn).map(|(pid, _)| *pid);
        if let Some(pid) = broken {
            self.links.remove(&pid);
            if let Some(seat) = &mut self.seat {
                let others = seat.others(self.id).into_iter();
                seat.lost.extend(others.filter(|(_, of)| *of == pid).map(|(worker, _)| worker));
            }
        }
        self.advance(context);
    }

    pub(crate) fn on_timer(&mut self, context: &mut Context<'_>, timer: Timer) {
        match timer {
            Timer::Reconnect => self.reconnect(context),
            Timer::Built => self.announce(context),
            Timer::Heartbeat => {
                let waiting_for = self.waiting_for();
                if self.is_announced {
                    self.send_master(context, Message::Heartbeat { waiting_for });
                }
                context.heartbeat_later();
            }
            Timer::Terminate => {
                self.is_leaving = true;
                if self.is_announced {
                    self.send_master(context, Message::Leaving);
                }
            }
            Timer::Loaded { act } if act == self.act => self.loaded(context),
            Timer::Computed { act } if act == self.act => self.computed(context),
            Timer::Reduced { act } if act == self.act => self.reduced(context),
            Timer::Silence { act } if act == self.act => self.silent(context),
            Timer::Measured { act, lease } if act == self.act => self.measured(context, lease),
            Timer::Written(writing) => self.written(context, &writing),
            _ => {}
        }
        self.advance(context);
    }

    fn reconnect(&mut self, context: &mut Context<'_>) {
        let Some(master) = context.disk.master else {
            return context.after(20, 200, Timer::Reconnect);
        };
        let conn = context.kernel.connect(context.pid, master);
        self.master = Some(conn);
        let (worker, incarnation) = (self.id, self.incarnation);
        context.kernel.send(conn, context.pid, Message::Hello { worker, incarnation });
    }

    /// Tells a master what it is and holds, then what could not be told before.
    fn announce(&mut self, context: &mut Context<'_>) {
        self.is_built = true;
        if self.is_announced || self.master.is_none() {
            return;
        }
        self.is_announced = true;
        // The master has lent its shards to others meanwhile.
        self.shards.clear();
        let step = self.state.map(|state| state.step);
        self.send_master(context, Message::Ready { step });
        if self.is_leaving {
            self.send_master(context, Message::Leaving);
        }
        for message in std::mem::take(&mut self.outbox) {
            self.send_master(context, message);
        }
    }

    fn send_master(&self, context: &mut Context<'_>, message: Message) {
        let master = self.master.expect("it is connected");
        context.kernel.send(master, context.pid, message);
    }

    fn report(&mut self, context: &mut Context<'_>, message: Message) {
        if self.is_announced {
            self.send_master(context, message);
        } else {
            self.outbox.push(message);
        }
    }

    fn report_news(&mut self, context: &mut Context<'_>, news: News) {
        let state = self.state;
        self.report(context, Message::News(news, state));
    }

    fn waiting_for(&self) -> String {
        if self.stuck == Some(Stuck::Busy) {
            return String::new();
        }
        let Some(seat) = &self.seat else { return "master".into() };
        match seat.phase {
            Phase::Loading | Phase::Computing | Phase::Reducing => String::new(),
            Phase::Idle if self.is_measuring => String::new(),
            Phase::Idle => "master".into(),
            Phase::Leveling | Phase::Receiving(_) | Phase::Gathering | Phase::Parting => {
                self.missing().map_or_else(String::new, |worker| format!("worker-{worker}"))
            }
        }
    }

    /// Does what can be done now, until there is nothing.
    fn advance(&mut self, context: &mut Context<'_>) {
        while context.exit.is_none() && self.stuck.is_none() && self.act_once(context) {}
    }

    /// One decision; false if there was none to make.
    fn act_once(&mut self, context: &mut Context<'_>) -> bool {
        self.hear_peers();
        if self.must_enter() {
            let next = self.next.take().expect("it must be entered");
            self.enter(context, next);
            return true;
        }
        if self.is_leaving && self.seat.is_none() {
            if self.n_writing == 0 {
                context.exit = Some(Ended::Exit(0));
            }
            return false;
        }
        match self.seat.as_ref().map(|seat| seat.phase) {
            None => {
                self.cut(context);
                self.begin_measuring(context)
            }
            Some(Phase::Idle) => {
                self.cut(context);
                self.part(context)
                    || self.begin_measuring(context)
                    || (!self.is_measuring && self.train(context))
            }
            Some(Phase::Leveling) => self.level(context),
            Some(Phase::Receiving(step)) => self.receive(context, step),
            Some(Phase::Gathering) => self.gather(context),
            Some(Phase::Parting) => self.lose_missing(context),
            Some(Phase::Loading | Phase::Computing | Phase::Reducing) => false,
        }
    }

    /// Takes what others said in the world that this worker is in.
    fn hear_peers(&mut self) {
        let highest = self.highest;
        let Some(seat) = &mut self.seat else {
            return self.early.retain(|(_, message)| message.world() >= Some(highest));
        };
        let id = seat.id();
        let members = seat.named.world.members.clone();
        let (heard, early): (Vec<_>, Vec<_>) = std::mem::take(&mut self.early)
            .into_iter()
            .partition(|(_, message)| message.world() == Some(id));
        self.early = early;
        self.early.retain(|(_, message)| message.world() > Some(id));
        for (from, message) in heard {
            let member = members.iter().find(|member| pid_of(member.incarnation) == from);
            let Some(worker) = member.map(|member| member.worker) else { continue };
            match message {
                Message::Level { step, .. } => drop(seat.levels.insert(worker, step)),
                Message::State { state, .. } => drop(seat.states.insert(worker, state)),
                Message::Gradient { step, nodes, .. } => {
                    seat.gradients.insert((step, worker), nodes);
                }
                Message::Farewell { .. } => drop(seat.farewells.insert(worker)),
                other => panic!("a worker never tells another {other:?}"),
            }
        }
    }

    /// Tells all other members, over links that live as long as both are in one world.
    fn tell_all(&mut self, context: &mut Context<'_>, message: &Message) {
        let Some(seat) = &self.seat else { return };
        let others = seat.others(self.id);
        for (worker, pid) in others {
            self.tell(context, worker, pid, message.clone());
        }
    }

    fn tell(&mut self, context: &mut Context<'_>, worker: WorkerId, pid: Pid, message: Message) {
        if self.seat.as_ref().is_some_and(|seat| seat.lost.contains(&worker)) {
            return;
        }
        let link = context.kernel.link(context.pid, pid);
        self.links.insert(pid, link);
        context.kernel.send(link, context.pid, message);
    }

    fn begin(&mut self, context: &mut Context<'_>, phase: Phase) {
        self.act += 1;
        self.is_measuring = false;
        let act = self.act;
        if let Some(seat) = &mut self.seat {
            seat.phase = phase;
        }
        if matches!(
            phase,
            Phase::Leveling | Phase::Receiving(_) | Phase::Gathering | Phase::Parting
        ) {
            context.kernel.schedule(context.pid, SILENCE, Timer::Silence { act });
        }
    }

    fn flush(&mut self, context: &mut Context<'_>) {
        if let Some(news) = self.unreported.take() {
            self.reported_at = context.kernel.now;
            self.report_news(context, news);
        }
    }

    fn throttle(context: &Context<'_>) -> Duration {
        millis(context.scenario.throttle_ms)
    }
}

/// A member that owes bytes and sends none for so long is lost.
const SILENCE: Duration = Duration::from_millis(1200);

impl Worker {
    /// Begins the cuts of the step that it holds; gives up those that can never be.
    fn cut(&mut self, context: &mut Context<'_>) {
        let Some(state) = self.state else { return };
        let generation = self.generation;
        let is_due =
            |order: &mut CutOrder| order.at <= state.step || order.generation != generation;
        let due: Vec<CutOrder> = self.cuts.extract_if(.., is_due).collect();
        for order in due {
            let CutOrder { cut, generation: of, folder, at, partitions } = order;
            if of != generation || at != state.step || self.n_writing > 0 {
                self.report(context, Message::CutFailed { cut });
                continue;
            }
            self.n_writing += 1;
            let writing = Writing { cut, generation, folder, partitions, state };
            context.after(2, 150, Timer::Written(Box::new(writing)));
        }
    }

    fn written(&mut self, context: &mut Context<'_>, writing: &Writing) {
        self.n_writing -= 1;
        let Writing { cut, generation, .. } = *writing;
        let message = match context.disk.write(writing) {
            Some(files) => Message::CutDone { cut, generation, files },
            None => Message::CutFailed { cut },
        };
        self.report(context, message);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A worker: takes leases, pulls, computes, pushes to every server, and reports what all of them
//! have acknowledged.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use edl_core::id::{BatchId, Generation, LeaseId, PsId, Term};
use edl_core::job::{Held, Work};
use edl_core::platform::Ended;
use edl_tensor::push::Push;

use crate::kernel::ConnId;
use crate::message::{Address, Message, Timer};
use crate::process::Context;

/// Batches that may wait for acknowledgements while the next one is computed. A synchronous
/// round must fit.
const MAX_OPEN: usize = 5;

pub(crate) struct Worker {
    id: u32,
    incarnation: u64,
    term: Term,
    master: Option<ConnId>,
    is_built: bool,
    generation: Generation,
    servers: BTreeMap<PsId, Server>,
    queue: VecDeque<(LeaseId, Item)>,
    current: Option<Step>,
    open: BTreeMap<BatchId, Open>,
    unreported: Vec<(BatchId, Generation)>,
    next_request: u64,
}

struct Server {
    address: Address,
    conn: Option<ConnId>,
    /// What it has not answered will be sent again soon.
    is_redialed: bool,
}

#[derive(Clone, Debug)]
enum Item {
    Batch(BatchId),
    Eval { work: Work },
}

/// What is pulled for and computed now.
struct Step {
    lease: LeaseId,
    item: Item,
    request: u64,
    pulled: BTreeMap<PsId, (u64, f64, u64)>,
}

/// A batch that is pushed.
struct Open {
    lease: LeaseId,
    pushes: BTreeMap<PsId, Arc<Push>>,
    acked: BTreeSet<PsId>,
}

impl Worker {
    pub(crate) fn start(id: u32, context: &mut Context<'_>) -> Self {
        context.after(1, 20, Timer::Reconnect);
        context.heartbeat_later();
        Self {
            id,
            incarnation: u64::from(context.pid),
            term: Term(0),
            master: None,
            is_built: false,
            generation: Generation(0),
            servers: BTreeMap::new(),
            queue: VecDeque::new(),
            current: None,
            open: BTreeMap::new(),
            unreported: Vec::new(),
            next_request: 0,
        }
    }

    pub(crate) fn on_message(&mut self, context: &mut Context<'_>, conn: ConnId, message: Message) {
        if self.master == Some(conn) {
            return self.told(context, conn, message);
        }
        let dialed = self.servers.iter().find(|(_, server)| server.conn == Some(conn));
        let Some(ps) = dialed.map(|(ps, _)| *ps) else { return };
        match message {
            Message::Pulled { request, version, sum, n } => {
                let Some(step) = self.current.as_mut().filter(|step| step.request == request)
                else {
                    return;
                };
                step.pulled.insert(ps, (version, sum, n));
                if step.pulled.len() == self.servers.len() {
                    context.after(3, 30, Timer::Computed { request });
                }
            }
            Message::Acked { batch, generation } if generation == self.generation => {
                self.acked(context, ps, batch);
            }
            Message::Acked { .. } => {}
            // It may not have heard yet that it shall serve.
            Message::NotServing => self.redial(context, ps),
            other => panic!("a worker is never told {other:?}"),
        }
    }

    fn told(&mut self, context: &mut Context<'_>, conn: ConnId, message: Message) {
        match message {
            Message::Welcome { term } if term < self.term => context.kernel.hang_up(conn),
            Message::Welcome { term } => {
                self.term = term;
                let (low, high) = if self.is_built { (0, 1) } else { (10, 100) };
                context.after(low, high, Timer::Built);
            }
            Message::Route { generation, servers } => self.route(context, generation, servers),
            Message::Lease { lease, work } => {
                match work {
                    Work::Train { epoch, range } => {
                        let batches = range.map(|index| Item::Batch(BatchId { epoch, index }));
                        self.queue.extend(batches.map(|item| (lease, item)));
                    }
                    Work::Eval { .. } => self.queue.push_back((lease, Item::Eval { work })),
                    Work::Predict { .. } => panic!("nothing is predicted here"),
                }
                self.advance(context);
            }
            Message::Revoke { lease } => self.drop_lease(lease),
            Message::Stop => context.exit = Some(Ended::Exit(0)),
            other => panic!("a worker is never told {other:?}"),
        }
    }

    fn drop_lease(&mut self, lease: LeaseId) {
        self.queue.retain(|(held, _)| *held != lease);
        self.open.retain(|_, open| open.lease != lease);
        self.current.take_if(|step| step.lease == lease);
    }

    /// Work of other generations is void.
    fn route(&mut self, context: &mut Context<'_>, generation: Generation, servers: Vec<Address>) {
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        self.queue.clear();
        self.open.clear();
        self.current = None;
        self.unreported.clear();
        for server in std::mem::take(&mut self.servers).into_values() {
            server.conn.into_iter().for_each(|conn| context.kernel.hang_up(conn));
        }
        for address in servers {
            let ps = address.ps;
            self.servers.insert(ps, Server { address, conn: None, is_redialed: false });
        }
    }

    pub(crate) fn on_broken(&mut self, context: &mut Context<'_>, conn: ConnId) {
        if self.master == Some(conn) {
            self.master = None;
            context.after(5, 200, Timer::Reconnect);
        }
        let broken = self.servers.iter().find(|(_, server)| server.conn == Some(conn));
        if let Some(ps) = broken.map(|(ps, _)| *ps) {
            self.servers.get_mut(&ps).expect("just found").conn = None;
            self.redial(context, ps);
        }
    }

    fn redial(&mut self, context: &mut Context<'_>, ps: PsId) {
        let server = self.servers.get_mut(&ps).expect("a server of the route");
        if !std::mem::replace(&mut server.is_redialed, true) {
            let generation = self.generation;
            context.after(10, 80, Timer::Redial { ps, generation });
        }
    }

    pub(crate) fn on_timer(&mut self, context: &mut Context<'_>, timer: Timer) {
        match timer {
            Timer::Reconnect => {
                let Some(master) = context.disk.master else {
                    return context.after(20, 200, Timer::Reconnect);
                };
                let (worker, incarnation, pid) = (self.id, self.incarnation, context.pid);
                let hello = Message::WorkerHello { worker, incarnation, pid };
                self.master = Some(context.connect(master, hello));
            }
            Timer::Built => self.ready(context),
            Timer::Heartbeat => {
                self.tell(context, Message::Heartbeat);
                context.heartbeat_later();
            }
            Timer::Terminate => {
                self.tell(context, Message::Leaving);
                context.exit = Some(Ended::Exit(0));
            }
            Timer::Redial { ps, generation } if generation == self.generation => {
                self.send_again(context, ps);
            }
            Timer::Redial { .. } => {}
            Timer::Computed { request } => self.computed(context, request),
            other => panic!("a worker never set {other:?}"),
        }
    }

    /// Tells a master what is held; evaluations are dropped, they cost nothing to do again.
    fn ready(&mut self, context: &mut Context<'_>) {
        self.is_built = true;
        self.queue.retain(|(_, item)| matches!(item, Item::Batch(_)));
        self.current.take_if(|step| matches!(step.item, Item::Eval { .. }));
        let queued = self.queue.iter().map(|(lease, item)| (*lease, item.clone()));
        let current = self.current.iter().map(|step| (step.lease, step.item.clone()));
        let open = self.open.iter().map(|(batch, open)| (open.lease, Item::Batch(*batch)));
        let mut held: BTreeMap<LeaseId, Held> = BTreeMap::new();
        for (lease, item) in queued.chain(current).chain(open) {
            let Item::Batch(BatchId { epoch, index }) = item else { continue };
            let fresh = Held { lease, epoch, indices: Vec::new() };
            held.entry(lease).or_insert(fresh).indices.push(index);
        }
        self.tell(context, Message::Ready { held: held.into_values().collect() });
        let unreported = std::mem::take(&mut self.unreported);
        if context.scenario.repeats_reports {
            for (batch, generation) in unreported {
                self.tell(context, Message::Done { batch, generation });
            }
        }
        self.advance(context);
    }

    fn tell(&mut self, context: &mut Context<'_>, message: Message) {
        if let Some(master) = self.master {
            context.send(master, message);
        }
    }

    /// Begins with the next piece of work, if nothing is computed now.
    fn advance(&mut self, context: &mut Context<'_>) {
        if self.current.is_some() || self.open.len() >= MAX_OPEN {
            return;
        }
        let Some((lease, item)) = self.queue.pop_front() else { return };
        self.next_request += 1;
        let request = self.next_request;
        self.current = Some(Step { lease, item, request, pulled: BTreeMap::new() });
        for ps in self.servers.keys().copied().collect::<Vec<_>>() {
            self.pull(context, ps);
        }
    }

    fn pull(&mut self, context: &mut Context<'_>, ps: PsId) {
        let Some(step) = &self.current else { return };
        let min_round = match step.item {
            Item::Batch(batch) => context.counter.min_round(batch),
            Item::Eval { .. } => 0,
        };
        let pull = Message::Pull { request: step.request, generation: self.generation, min_round };
        self.send_to(context, ps, pull);
    }

    fn send_to(&mut self, context: &mut Context<'_>, ps: PsId, message: Message) {
        let server = self.servers.get_mut(&ps).expect("a server of the route");
        match server.conn {
            Some(conn) => context.send(conn, message),
            None => server.conn = Some(context.connect(server.address.pid, message)),
        }
    }

    /// After a broken connection: whatever the server has not answered.
    fn send_again(&mut self, context: &mut Context<'_>, ps: PsId) {
        self.servers.get_mut(&ps).expect("a server of the route").is_redialed = false;
        if self.current.as_ref().is_some_and(|step| !step.pulled.contains_key(&ps)) {
            self.pull(context, ps);
        }
        let generation = self.generation;
        let unacked = self.open.values().filter(|open| !open.acked.contains(&ps));
        let pushes: Vec<Arc<Push>> = unacked.map(|open| Arc::clone(&open.pushes[&ps])).collect();
        for push in pushes {
            self.send_to(context, ps, Message::Push { generation, push });
        }
    }

    fn computed(&mut self, context: &mut Context<'_>, request: u64) {
        let Some(step) = self.current.take_if(|step| step.request == request) else { return };
        if context.kernel.chance(context.scenario.crashes) {
            context.exit = Some(Ended::Exit(101));
            return;
        }
        match step.item {
            Item::Batch(batch) if context.kernel.chance(context.scenario.failures) => {
                self.drop_lease(step.lease);
                self.tell(context, Message::Failed { lease: step.lease, item: batch.index });
            }
            Item::Batch(batch) => self.push(context, step.lease, batch, &step.pulled),
            Item::Eval { work } => {
                let Work::Eval { eval, shard, records, .. } = work else { return };
                let total: (f64, u64) =
                    step.pulled.values().fold((0.0, 0), |t, (_, sum, n)| (t.0 + sum, t.1 + n));
                #[expect(clippy::cast_precision_loss, reason = "counts stay small")]
                let value = total.0 / total.1 as f64;
                let n_records = u32::try_from(records.end - records.start).expect("a small shard");
                let generation = self.generation;
                let done = Message::Evaluated { eval, shard, generation, value, n_records };
                self.tell(context, done);
            }
        }
        self.advance(context);
    }

    fn push(
        &mut self,
        context: &mut Context<'_>,
        lease: LeaseId,
        batch: BatchId,
        pulled: &BTreeMap<PsId, (u64, f64, u64)>,
    ) {
        let pushes = self.servers.iter().map(|(ps, server)| {
            let hosted = server.address.partitions.clone();
            (*ps, context.counter.push(batch, pulled[ps].0, hosted))
        });
        let pushes: BTreeMap<PsId, Arc<Push>> = pushes.collect();
        let generation = self.generation;
        for (ps, push) in &pushes {
            let n = 1 + u32::from(context.kernel.chance(context.scenario.duplicates));
            for _ in 0..n {
                let push = Arc::clone(push);
                self.send_to(context, *ps, Message::Push { generation, push });
            }
        }
        self.open.insert(batch, Open { lease, pushes, acked: BTreeSet::new() });
    }

    fn acked(&mut self, context: &mut Context<'_>, ps: PsId, batch: BatchId) {
        let Some(open) = self.open.get_mut(&batch) else { return };
        open.acked.insert(ps);
        if open.acked.len() < self.servers.len() {
            return;
        }
        self.open.remove(&batch);
        let generation = self.generation;
        if self.master.is_some() {
            let n = 1 + u32::from(context.kernel.chance(context.scenario.duplicates));
            for _ in 0..n {
                self.tell(context, Message::Done { batch, generation });
            }
        } else {
            self.unreported.push((batch, generation));
        }
        self.advance(context);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The thread that talks to the parameter servers, as `PsClient` and the worker's link do: one
//! request after another, answers to pushes in between.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

use edl_core::acks::Acks;
use edl_core::id::{BatchId, Generation, PsId};
use edl_core::route::Route;
use edl_core::server::Refusal;
use edl_net::frame::{FrameKind, PieceHead, PullHead};
use edl_tensor::push::{Lane, Push};

use crate::frames::{self, Content, Label};
use crate::kernel::Pid;
use crate::message::{Message, Timer};
use crate::model::Model;
use crate::network::{ConnId, Purpose};
use crate::process::{Context, Done};
use crate::worker;

/// For one connection and its handshake.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);
/// What an answer may take beyond the wait that was requested.
const ANSWER_SLACK: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub(crate) enum Ask {
    Connect(Route),
    Pull(Wish),
    Push {
        batch: BatchId,
        source: Source,
    },
    PushLane {
        batch: BatchId,
        lane: Lane,
    },
    /// A push without a gradient.
    Skip {
        batch: BatchId,
        lane: Option<Lane>,
    },
}

/// The parameters that a gradient was computed from: their generation, and the versions of the
/// servers, in the order of the route.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) generation: Generation,
    pub(crate) versions: Vec<u64>,
}

/// What a pull requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wish {
    pub(crate) ids: Vec<u64>,
    pub(crate) wants_dense: bool,
    pub(crate) will_push: bool,
    pub(crate) min_round: Option<u64>,
    pub(crate) step: Option<u64>,
}

#[derive(Clone, Debug)]
pub(crate) enum News {
    Connected,
    Pulled(Pulled),
    Acknowledged {
        batch: BatchId,
        generation: Generation,
    },
    /// The last news of a connection.
    Broken {
        error: String,
        is_other_step: bool,
    },
}

/// What a pull brought.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pulled {
    pub(crate) dense: Vec<f32>,
    pub(crate) rows: Vec<f32>,
    pub(crate) source: Source,
}

#[derive(Default)]
pub(crate) struct Link {
    line: Option<Line>,
    asks: VecDeque<(u64, Ask)>,
}

/// Connections to all servers of a route.
struct Line {
    number: u64,
    generation: Generation,
    servers: Vec<Server>,
    n_unaccepted: usize,
    /// Requests and pushes sent so far.
    n_sent: u64,
    pull: Option<Pulling>,
    open: Acks,
}

struct Server {
    ps: PsId,
    partitions: Range<u32>,
    pull: ConnId,
    push: ConnId,
}

struct Pulling {
    wish: Wish,
    sequence: u64,
    /// The servers that have been asked.
    n_asked: usize,
    n_answered: usize,
    n_left: BTreeMap<PsId, usize>,
    pulled: Pulled,
    refused: Option<Refusal>,
}

/// A limit of a connection that may have passed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    number: u64,
    what: Wait,
}

#[derive(Clone, Copy, Debug)]
enum Wait {
    Connect,
    Pull(u64),
    Acknowledge,
}

type AllNews = Vec<(u64, News)>;

impl Link {
    /// Queues a request of connection `number`; it is served when those before it are.
    pub(crate) fn ask(&mut self, context: &mut Context<'_>, number: u64, ask: Ask) {
        self.asks.push_back((number, ask));
        self.serve(context);
    }

    /// Ends every wait on a connection.
    pub(crate) fn abort(&mut self, context: &mut Context<'_>, number: u64) {
        self.asks.retain(|(of, _)| *of != number);
        if let Some(line) = self.line.take_if(|line| line.number == number) {
            line.hang_up(context);
        }
        self.serve(context);
    }

    fn is_busy(&self) -> bool {
        self.line.as_ref().is_some_and(|line| line.n_unaccepted > 0 || line.pull.is_some())
    }

    fn serve(&mut self, context: &mut Context<'_>) {
        while !self.is_busy() {
            let Some((number, ask)) = self.asks.pop_front() else { return };
            if let Ask::Connect(route) = ask {
                if let Some(before) = self.line.take() {
                    before.hang_up(context);
                }
                self.line = Some(Line::dial(context, number, &route));
                continue;
            }
            let Some(line) = self.line.as_mut().filter(|line| line.number == number) else {
                continue;
            };
            match ask {
                Ask::Connect(_) => {}
                Ask::Pull(wish) => line.pull(context, wish),
                Ask::Push { batch, source } => {
                    assert_eq!(
                        source.generation, line.generation,
                        "{batch} was computed from lost parameters"
                    );
                    let push = |model: &Model, place: usize, hosted| {
                        model.push(batch, source.versions[place], hosted)
                    };
                    line.push(context, batch, push);
                }
                Ask::PushLane { batch, lane } => {
                    line.push(context, batch, |model, _, hosted| {
                        model.lane_push(batch, lane, hosted)
                    });
                }
                Ask::Skip { batch, lane } => {
                    line.push(context, batch, |model, _, hosted| model.skip(batch, lane, hosted));
                }
            }
        }
    }

    pub(crate) fn frame(
        &mut self,
        context: &mut Context<'_>,
        conn: ConnId,
        bytes: &[u8],
    ) -> AllNews {
        let Some(line) = self.line.as_mut() else { return Vec::new() };
        let Some(place) = line.servers.iter().position(|s| s.pull == conn || s.push == conn) else {
            return Vec::new();
        };
        let (label, content) = frames::decode(bytes);
        let number = line.number;
        let news = match content {
            Content::Accepted => {
                line.n_unaccepted -= 1;
                (line.n_unaccepted == 0).then_some(News::Connected)
            }
            Content::Piece(head, numbers) => line.piece(context, place, label, &head, &numbers),
            Content::Refused(refusal, sequence) if line.servers[place].pull == conn => {
                line.refused(context, place, refusal, sequence)
            }
            Content::Refused(refusal, _) => Some(broken(&refusal)),
            Content::Ack(sequence) => {
                let batch = line.open.acknowledge(sequence, line.servers[place].ps);
                let generation = label.generation;
                batch.map(|batch| News::Acknowledged { batch, generation })
            }
            Content::Hello | Content::Pull(_) | Content::Push(..) => {
                panic!("a client is never sent {content:?}")
            }
        };
        self.conclude(context, number, news)
    }

    /// Ends a connection that broke, and continues with the next request.
    fn conclude(&mut self, context: &mut Context<'_>, number: u64, news: Option<News>) -> AllNews {
        if matches!(news, Some(News::Broken { .. }))
            && let Some(line) = self.line.take()
        {
            line.hang_up(context);
        }
        self.serve(context);
        news.map(|news| (number, news)).into_iter().collect()
    }

    pub(crate) fn broken(&mut self, context: &mut Context<'_>, conn: ConnId) -> AllNews {
        let is_its = |line: &Line| line.servers.iter().any(|s| s.pull == conn || s.push == conn);
        let Some(line) = self.line.as_ref().filter(|line| is_its(line)) else { return Vec::new() };
        let number = line.number;
        let news = News::Broken { error: "connection broken".into(), is_other_step: false };
        self.conclude(context, number, Some(news))
    }

    /// Something took too long, unless it has come in the meantime.
    pub(crate) fn limit(&mut self, context: &mut Context<'_>, limit: Limit) -> AllNews {
        let Limit { number, what } = limit;
        let Some(line) = self.line.as_ref().filter(|line| line.number == number) else {
            return Vec::new();
        };
        let is_over = match what {
            Wait::Connect => line.n_unaccepted > 0,
            Wait::Pull(sequence) => {
                line.pull.as_ref().is_some_and(|pull| pull.sequence == sequence)
            }
            Wait::Acknowledge => {
                let (patience, now) = (context.scenario.spec.round_timeout(), context.kernel.now);
                let is_overdue = |s: &Server| line.open.overdue(s.ps, patience, now).is_some();
                line.servers.iter().any(is_overdue)
            }
        };
        let error = format!("no answer in time: {what:?}");
        let news = is_over.then_some(News::Broken { error, is_other_step: false });
        self.conclude(context, number, news)
    }
}

fn broken(refusal: &Refusal) -> News {
    let is_other_step = matches!(refusal, Refusal::StepMismatch(_));
    News::Broken { error: format!("{refusal:?}"), is_other_step }
}

impl Line {
    fn dial(context: &mut Context<'_>, number: u64, route: &Route) -> Self {
        // A client has a new id for every connection.
        let client = context.kernel.rng.next_u64();
        let mut dial = |to: Pid, purpose| {
            let conn = context.connect(to, purpose);
            let label =
                Label { generation: route.generation, sequence: 0, batch: BatchId::default() };
            context.send(conn, Message::Frame(frames::plain(FrameKind::Hello, label)));
            conn
        };
        let servers: Vec<Server> = (route.servers.iter())
            .map(|server| {
                let pid = server.address.parse().expect("an address is a process here");
                Server {
                    ps: server.ps,
                    partitions: server.partitions.clone(),
                    pull: dial(pid, Purpose::Pull { client }),
                    push: dial(pid, Purpose::Push { client }),
                }
            })
            .collect();
        let line = Self {
            number,
            generation: route.generation,
            n_unaccepted: 2 * servers.len(),
            servers,
            n_sent: 0,
            pull: None,
            open: Acks::default(),
        };
        line.limit(context, CONNECT_LIMIT, Wait::Connect);
        line
    }

    fn limit(&self, context: &mut Context<'_>, time: Duration, what: Wait) {
        let limit = Done::Worker(worker::Done::Limit(Limit { number: self.number, what }));
        context.kernel.schedule(context.pid, time, Timer::Done(Box::new(limit)));
    }

    fn hang_up(self, context: &mut Context<'_>) {
        for server in self.servers {
            context.kernel.hang_up(server.pull);
            context.kernel.hang_up(server.push);
        }
    }

    fn label(&self, sequence: u64, batch: BatchId) -> Label {
        Label { generation: self.generation, sequence, batch }
    }

    fn pull(&mut self, context: &mut Context<'_>, wish: Wish) {
        self.n_sent += 1;
        let sequence = self.n_sent;
        let patience = context.scenario.spec.round_timeout();
        self.limit(context, patience + ANSWER_SLACK, Wait::Pull(sequence));
        let versions = vec![u64::MAX; self.servers.len()];
        let source = Source { generation: self.generation, versions };
        self.pull = Some(Pulling {
            wish,
            sequence,
            n_asked: 0,
            n_answered: 0,
            n_left: self.servers.iter().map(|s| (s.ps, s.partitions.len())).collect(),
            pulled: Pulled { source, ..Pulled::default() },
            refused: None,
        });
        self.ask_next(context);
    }

    /// Asks the next server, or all at once where the order does not matter.
    fn ask_next(&mut self, context: &mut Context<'_>) {
        let mode = context.scenario.spec.mode();
        let is_bounded = matches!(mode, edl_core::spec::Mode::Bounded { .. });
        let generation = self.generation;
        let Some(pull) = &mut self.pull else { return };
        let is_one_by_one = is_bounded && pull.wish.will_push;
        let until = if is_one_by_one { pull.n_asked + 1 } else { self.servers.len() };
        for server in &self.servers[pull.n_asked..until.min(self.servers.len())] {
            let wish = &pull.wish;
            let (mut counts, mut ids) = (Vec::new(), Vec::new());
            for partition in server.partitions.clone() {
                let here = context.model.ids_in(partition, &wish.ids);
                counts.push(u32::try_from(here.len()).expect("few ids"));
                ids.extend(here);
            }
            let head = PullHead {
                wants_dense: wish.wants_dense,
                will_push: wish.will_push,
                patience: context.scenario.spec.round_timeout(),
                min_round: wish.min_round,
                step: wish.step,
                partitions: server.partitions.clone(),
                n_counts: u32::try_from(counts.len()).expect("few partitions"),
                n_ids: ids.len(),
            };
            let label = Label { generation, sequence: pull.sequence, batch: BatchId::default() };
            let frame = frames::pull(label, &frames::Pull { head, counts, ids });
            context.send(server.pull, Message::Frame(frame));
        }
        pull.n_asked = until;
    }

    fn piece(
        &mut self,
        context: &mut Context<'_>,
        place: usize,
        label: Label,
        head: &PieceHead,
        numbers: &[f32],
    ) -> Option<News> {
        let pull = self.pull.as_mut().filter(|pull| pull.sequence == label.sequence)?;
        let layout = &context.model.layout;
        let n_dense = match pull.wish.wants_dense {
            true => edl_tensor::push::span(layout, &head.partitions).len(),
            false => 0,
        };
        let (dense, rows) = numbers.split_at(n_dense);
        pull.pulled.dense.extend_from_slice(dense);
        pull.pulled.rows.extend_from_slice(rows);
        let version = &mut pull.pulled.source.versions[place];
        *version = head.version.min(*version);
        let n_left = pull.n_left.get_mut(&self.servers[place].ps)?;
        *n_left -= head.partitions.len();
        if *n_left > 0 {
            return None;
        }
        pull.n_answered += 1;
        self.answered(context)
    }

    fn refused(
        &mut self,
        context: &mut Context<'_>,
        place: usize,
        refusal: Refusal,
        sequence: u64,
    ) -> Option<News> {
        let pull = self.pull.as_mut().filter(|pull| pull.sequence == sequence)?;
        pull.n_left.insert(self.servers[place].ps, 0);
        pull.refused.get_or_insert(refusal);
        pull.n_answered += 1;
        self.answered(context)
    }

    /// Ends the pull when every server that was asked has answered.
    fn answered(&mut self, context: &mut Context<'_>) -> Option<News> {
        let pull = self.pull.as_ref()?;
        let n_asked = pull.n_asked.min(self.servers.len());
        if pull.n_answered < n_asked {
            return None;
        }
        if pull.refused.is_none() && n_asked < self.servers.len() {
            self.ask_next(context);
            return None;
        }
        let pull = self.pull.take()?;
        Some(pull.refused.map_or(News::Pulled(pull.pulled), |refusal| broken(&refusal)))
    }

    fn push(
        &mut self,
        context: &mut Context<'_>,
        batch: BatchId,
        push: impl Fn(&Model, usize, Range<u32>) -> Push,
    ) {
        self.n_sent += 1;
        let sequence = self.n_sent;
        let servers = self.servers.iter().map(|server| server.ps).collect();
        self.open.sent(sequence, batch, servers, context.kernel.now);
        let patience = context.scenario.spec.round_timeout();
        self.limit(context, patience, Wait::Acknowledge);
        for (place, server) in self.servers.iter().enumerate() {
            let push = push(context.model, place, server.partitions.clone());
            let frame = frames::push(self.label(sequence, batch), &push);
            let is_twice = context.kernel.chance(context.scenario.duplicates);
            for _ in 0..1 + u32::from(is_twice) {
                context.send(server.push, Message::Frame(frame.clone()));
            }
        }
    }
}

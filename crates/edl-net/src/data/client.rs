// SPDX-License-Identifier: Apache-2.0
//! The worker's half of the data plane: all servers of one generation as one.
//!
//! A client lives as long as a route: when a server is lost or the generation is over, the
//! worker drops it and connects by the next route.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use edl_core::id::{BatchId, Generation, PsId, RunId};
use edl_core::layout::Layout;
use edl_core::model::ModelSpec;
use edl_core::server::Refusal;
use edl_tensor::push::{Lane, span};

use crate::data::acks::{Acked, PendingAcks, Reader};
use crate::data::session::{Connection, Party};
use crate::data::split::Split;
use crate::data::{Error, Route, ServerRoute};
use crate::frame::{FrameKind, PieceHead, PullHead, PushHead, decode_refusal};
use crate::handshake::{ClientId, Encryption, Role};
use crate::key::JobKey;
use crate::wire::{Receiver, Sender, Stream};

/// Acknowledgements that may queue unread before their readers wait for the worker.
const ACK_QUEUE: usize = 1024;
/// What a server's answer may take beyond the wait that it was granted.
const ANSWER_SLACK: Duration = Duration::from_secs(5);

/// How long each kind of wait may last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// One connection and its handshake.
    pub connect: Duration,
    /// A frame that stops in the middle.
    pub frame: Duration,
    /// A pull: the round it waits for included.
    pub pull: Duration,
    /// A push, from its sending until a server has acknowledged it: its round included.
    pub ack: Duration,
}

impl Limits {
    #[must_use]
    pub fn all(deadline: Duration) -> Self {
        Self { connect: deadline, frame: deadline, pull: deadline, ack: deadline }
    }
}

/// Each server's version when parameters were pulled, in the order of the route.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versions(pub Vec<u64>);

impl Versions {
    /// The version of the server that is furthest behind.
    #[must_use]
    pub fn min(&self) -> u64 {
        self.0.iter().copied().min().unwrap_or(0)
    }
}

/// Connections to all servers of one generation.
pub struct PsClient {
    generation: Generation,
    layout: Layout,
    dims: Vec<usize>,
    limits: Limits,
    servers: Vec<Server>,
    /// Servers are asked one after the other.
    is_in_order: bool,
    split: Split,
    /// Rows as they travel: sorted by partition.
    sorted: Vec<f32>,
    pending: Arc<PendingAcks>,
    abort: AbortHandle,
    // In this order: the readers end when their channel is closed.
    acks: mpsc::Receiver<Result<Acked, Error>>,
    _readers: Readers,
}

/// Makes every blocked call of its client return at once, from any thread.
#[derive(Clone, Debug)]
pub struct AbortHandle(Arc<Abort>);

#[derive(Debug)]
struct Abort {
    is_aborted: AtomicBool,
    streams: Vec<Arc<Stream>>,
}

struct Server {
    ps: PsId,
    partitions: Range<u32>,
    dense: Range<usize>,
    to_pull: Sender,
    from_pull: Receiver,
    to_push: Sender,
}

struct Readers(Vec<JoinHandle<()>>);

impl Drop for Readers {
    fn drop(&mut self) {
        for reader in self.0.drain(..) {
            // A panic has been printed.
            let _ = reader.join();
        }
    }
}

impl Drop for PsClient {
    fn drop(&mut self) {
        self.abort.abort();
    }
}

impl AbortHandle {
    pub fn abort(&self) {
        self.0.is_aborted.store(true, Ordering::Release);
        self.0.streams.iter().for_each(|stream| stream.shutdown());
    }

    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.0.is_aborted.load(Ordering::Acquire)
    }
}

impl PsClient {
    /// Connects to every server of `route`.
    pub fn connect(
        route: &Route,
        (key, run, encryption): (&JobKey, RunId, Encryption),
        layout: Layout,
        model: &ModelSpec,
        limits: Limits,
    ) -> Result<Self, Error> {
        check_route(route, &layout)?;
        let client = ClientId::random()?;
        let (timeout, patience) = (limits.connect, limits.frame);
        let party = Party { key, run, encryption, timeout, patience };
        let (sender, acks) = mpsc::sync_channel(ACK_QUEUE);
        let pending = Arc::new(PendingAcks::new());
        let mut streams = Vec::new();
        let mut servers = Vec::new();
        let mut readers = Vec::new();
        for server in &route.servers {
            let pull = dial(&party, server, Role::Pull, client)?;
            let push = dial(&party, server, Role::Push, client)?;
            streams.extend([&pull, &push].map(|to| Arc::clone(to.sender.stream())));
            readers.push(Reader {
                ps: server.ps,
                generation: route.generation,
                receiver: push.receiver,
                pending: Arc::clone(&pending),
                out: sender.clone(),
                patience: limits.ack,
            });
            servers.push(Server {
                ps: server.ps,
                partitions: server.partitions.clone(),
                dense: span(&layout, &server.partitions),
                to_pull: pull.sender,
                from_pull: pull.receiver,
                to_push: push.sender,
            });
        }
        let abort = AbortHandle(Arc::new(Abort { is_aborted: AtomicBool::new(false), streams }));
        let readers = readers.into_iter().map(Reader::start).collect::<Result<_, _>>();
        Ok(Self {
            generation: route.generation,
            layout,
            dims: model.tables.iter().map(|table| table.dim).collect(),
            limits,
            servers,
            is_in_order: false,
            split: Split::default(),
            sorted: Vec::new(),
            pending,
            acks,
            _readers: Readers(readers.inspect_err(|_| abort.abort())?),
            abort,
        })
    }

    /// From now on `pull` asks one server after the other, in the route's order. Servers that
    /// bound staleness need this: two clients that each hold what the other waits for, at two
    /// servers, would wait for each other.
    pub fn pull_in_order(&mut self) {
        self.is_in_order = true;
    }

    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Pulls parameters to train a batch that will be pushed: the rows of `ids` (unique within
    /// a table, one list per table) into `rows`, in the order of the ids, and all dense
    /// parameters if wanted. With `min_round` the servers answer when they have applied that
    /// many rounds.
    ///
    /// After a refusal (`Generation`, `NotServing`, `Deadline`, `Refused`) the client can still
    /// be used; after any other error it cannot.
    ///
    /// # Panics
    /// If `ids`, `rows` and `dense` do not fit the model.
    pub fn pull(
        &mut self,
        ids: &[Vec<u64>],
        dense: Option<&mut [f32]>,
        rows: &mut [Vec<f32>],
        min_round: Option<u64>,
    ) -> Result<Versions, Error> {
        let head = PullHead { will_push: true, min_round, ..PullHead::default() };
        self.pull_as(ids, dense, rows, head)
    }

    /// Like `pull`, but no push will follow: for evaluation and prediction. No client waits for
    /// the reader, and it waits for no client.
    ///
    /// # Panics
    /// As `pull`.
    pub fn read(
        &mut self,
        ids: &[Vec<u64>],
        dense: Option<&mut [f32]>,
        rows: &mut [Vec<f32>],
    ) -> Result<Versions, Error> {
        self.pull_as(ids, dense, rows, PullHead::default())
    }

    /// Like `read`, for rows alone, as they are after `step` steps. `StepMismatch`: a server is
    /// not there, or past it by more than one step.
    ///
    /// # Panics
    /// As `pull`.
    pub fn read_at(
        &mut self,
        step: u64,
        ids: &[Vec<u64>],
        rows: &mut [Vec<f32>],
    ) -> Result<Versions, Error> {
        let head = PullHead { step: Some(step), ..PullHead::default() };
        self.pull_as(ids, None, rows, head)
    }

    fn pull_as(
        &mut self,
        ids: &[Vec<u64>],
        mut dense: Option<&mut [f32]>,
        rows: &mut [Vec<f32>],
        head: PullHead,
    ) -> Result<Versions, Error> {
        assert_eq!(ids.len(), self.dims.len(), "one list of ids per table");
        assert_eq!(rows.len(), self.dims.len(), "one list of rows per table");
        let dense_fits = dense.as_ref().is_none_or(|dense| dense.len() == self.layout.dense_len);
        assert!(dense_fits, "space for all dense parameters");
        self.split.sort(&self.layout, ids);
        for ((rows, ids), dim) in rows.iter_mut().zip(ids).zip(&self.dims) {
            rows.resize(ids.len() * dim, 0.0);
        }
        let patience = self.limits.pull;
        let head = PullHead { wants_dense: dense.is_some(), patience, ..head };
        let mut versions = Versions::default();
        let mut refused = None;
        let n_at_once =
            if head.will_push && self.is_in_order { 1 } else { self.servers.len().max(1) };
        for servers in self.servers.chunks_mut(n_at_once) {
            for server in &mut *servers {
                let asked = server.ask(self.generation, &self.split, head.clone());
                asked.inspect_err(|_| self.abort.abort())?;
            }
            // Every answer is read to its end, even after a refusal: connections stay usable.
            for server in servers {
                let mut answer = Answer {
                    split: &self.split,
                    dims: &self.dims,
                    layout: &self.layout,
                    sorted: &mut self.sorted,
                    dense: dense.as_deref_mut(),
                    rows: &mut *rows,
                };
                let answered = server.receive(&mut answer, patience + ANSWER_SLACK);
                match answered.inspect_err(|_| self.abort.abort())? {
                    Ok(version) => versions.0.push(version),
                    Err(refusal) => refused = refused.or(Some(refusal)),
                }
            }
            if refused.is_some() {
                break;
            }
        }
        match refused {
            None => Ok(versions),
            Some(refusal) => Err(Error::from_refusal(refusal, self.generation)),
        }
    }

    /// Sends the gradient of a batch to every server and returns. `ids` and `grads` are laid
    /// out as `ids` and `rows` of the pull, `base` is what it returned.
    ///
    /// # Panics
    /// If the arguments do not fit the model.
    pub fn push(
        &mut self,
        batch: BatchId,
        n_records: u32,
        base: &Versions,
        dense: &[f32],
        ids: &[Vec<u64>],
        grads: &[Vec<f32>],
    ) -> Result<(), Error> {
        assert_eq!(base.0.len(), self.servers.len(), "one version per server");
        self.push_as(batch, n_records, base, None, dense, ids, grads)
    }

    /// Sends one lane's part of a batch, as `push` does: rows alone, and acknowledged as soon as
    /// every server keeps it.
    ///
    /// # Panics
    /// As `push`.
    pub fn push_lane(
        &mut self,
        batch: BatchId,
        lane: Lane,
        n_records: u32,
        ids: &[Vec<u64>],
        grads: &[Vec<f32>],
    ) -> Result<(), Error> {
        let base = Versions(vec![0; self.servers.len()]);
        self.push_as(batch, n_records, &base, Some(lane), &[], ids, grads)
    }

    /// Tells every server that a batch has no gradient: it counts as applied and changes nothing.
    pub fn skip(&mut self, batch: BatchId) -> Result<(), Error> {
        let base = Versions(vec![0; self.servers.len()]);
        let dense = vec![0.0; self.layout.dense_on_servers()];
        let (ids, grads) = (vec![Vec::new(); self.dims.len()], vec![Vec::new(); self.dims.len()]);
        self.push_as(batch, 0, &base, None, &dense, &ids, &grads)
    }

    #[expect(clippy::too_many_arguments, reason = "they are the fields of one frame")]
    fn push_as(
        &mut self,
        batch: BatchId,
        n_records: u32,
        base: &Versions,
        lane: Option<Lane>,
        dense: &[f32],
        ids: &[Vec<u64>],
        grads: &[Vec<f32>],
    ) -> Result<(), Error> {
        assert_eq!(ids.len(), self.dims.len(), "one list of ids per table");
        let n_dense = self.layout.dense_on_servers();
        assert_eq!(dense.len(), n_dense, "a gradient for all dense parameters on servers");
        self.split.sort(&self.layout, ids);
        self.split.gather(&self.dims, grads, &mut self.sorted);
        // Every server gets every push, so one sequence number fits all connections.
        let Some(sequence) = self.servers.first().map(|server| server.to_push.next_sequence())
        else {
            return Ok(());
        };
        let servers = self.servers.iter().map(|server| server.ps).collect();
        self.pending.sent(sequence, batch, servers);
        let mut sorted = self.sorted.as_slice();
        for (server, base_version) in self.servers.iter_mut().zip(&base.0) {
            let n_here = self.split.n_row_floats(&server.partitions, &self.dims);
            let (here, rest) = sorted.split_at(n_here);
            sorted = rest;
            let counts = self.split.counts(&server.partitions);
            let ids = self.split.ids(&server.partitions);
            let dense = &dense[server.dense.clone()];
            let head = PushHead {
                n_records,
                n_counts: count(counts.len()),
                base_version: *base_version,
                n_dense: dense.len(),
                n_ids: ids.len(),
                partitions: server.partitions.clone(),
                lane,
                n_grads: here.len(),
            };
            let parts: [&[u8]; 5] = [
                &head.encode(),
                bytemuck::cast_slice(counts),
                bytemuck::cast_slice(ids),
                bytemuck::cast_slice(dense),
                bytemuck::cast_slice(here),
            ];
            server
                .to_push
                .send(FrameKind::Push, self.generation, batch, &parts)
                .inspect_err(|_| self.abort.abort())?;
        }
        Ok(())
    }

    /// One per push that all servers have acknowledged; an error when a server refused a push
    /// or a connection broke.
    #[must_use]
    pub fn acks(&self) -> &mpsc::Receiver<Result<Acked, Error>> {
        &self.acks
    }

    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        self.abort.clone()
    }
}

/// Where a server's answer goes.
struct Answer<'a> {
    split: &'a Split,
    dims: &'a [usize],
    layout: &'a Layout,
    sorted: &'a mut Vec<f32>,
    dense: Option<&'a mut [f32]>,
    rows: &'a mut [Vec<f32>],
}

impl Server {
    fn ask(&mut self, generation: Generation, split: &Split, head: PullHead) -> Result<(), Error> {
        let counts = split.counts(&self.partitions);
        let ids = split.ids(&self.partitions);
        let head = PullHead {
            partitions: self.partitions.clone(),
            n_counts: count(counts.len()),
            n_ids: ids.len(),
            ..head
        };
        let parts: [&[u8]; 3] =
            [&head.encode(), bytemuck::cast_slice(counts), bytemuck::cast_slice(ids)];
        self.to_pull.send(FrameKind::Pull, generation, BatchId::default(), &parts)
    }

    /// Reads pieces until every partition has come; the server's version, or its refusal.
    fn receive(
        &mut self,
        answer: &mut Answer<'_>,
        patience: Duration,
    ) -> Result<Result<u64, Refusal>, Error> {
        let mut missing: Vec<bool> = vec![true; self.partitions.len()];
        let mut version = u64::MAX;
        while missing.iter().any(|missing| *missing) {
            let start = Instant::now();
            let header = self.from_pull.header(&mut || {
                if start.elapsed() < patience {
                    return Ok(());
                }
                Err(Error::Deadline { waiting_for: format!("server {} to respond", self.ps) })
            })?;
            let forged = Error::Forged { sequence: header.sequence };
            if header.kind == FrameKind::Refused {
                let (refusal, _) = decode_refusal(&self.from_pull.small()?)?;
                return Ok(Err(refusal));
            }
            if header.kind != FrameKind::Piece || header.length < PieceHead::LEN as u64 {
                return Err(forged);
            }
            let mut head = [0; PieceHead::LEN];
            self.from_pull.fill(&mut head)?;
            let head = PieceHead::decode(&head, header.length)?;
            for partition in head.partitions.clone() {
                let place = partition.checked_sub(self.partitions.start);
                let missing = place.and_then(|place| missing.get_mut(place as usize));
                match missing {
                    Some(missing) if *missing => *missing = false,
                    Some(_) | None => return Err(forged),
                }
            }
            self.fill(answer, &head, forged)?;
            version = version.min(head.version);
        }
        Ok(Ok(if version == u64::MAX { 0 } else { version }))
    }

    fn fill(
        &mut self,
        answer: &mut Answer<'_>,
        head: &PieceHead,
        forged: Error,
    ) -> Result<(), Error> {
        let n_rows = answer.split.n_row_floats(&head.partitions, answer.dims);
        let segment = span(answer.layout, &head.partitions);
        let n_dense = if answer.dense.is_some() { segment.len() } else { 0 };
        if head.n_floats != n_dense + n_rows {
            return Err(forged);
        }
        if let Some(dense) = &mut answer.dense {
            self.from_pull.fill(&mut dense[segment])?;
        }
        // Never shortened, so that only growth is paid for.
        if answer.sorted.len() < n_rows {
            answer.sorted.resize(n_rows, 0.0);
        }
        self.from_pull.fill(&mut answer.sorted[..n_rows])?;
        self.from_pull.finish()?;
        let sorted = &answer.sorted[..n_rows];
        answer.split.scatter(&head.partitions, answer.dims, sorted, answer.rows);
        Ok(())
    }
}

/// Connects by the Unix socket where there is one on this machine, else by TCP.
fn dial(
    party: &Party<'_>,
    server: &ServerRoute,
    role: Role,
    client: ClientId,
) -> Result<Connection, Error> {
    let path = Path::new(&server.unix_path);
    if !server.unix_path.is_empty() && path.exists() {
        match Stream::connect_unix(path, party.timeout) {
            Ok(stream) => return party.dial(stream, role, client),
            // The file may be a leftover of a server that moved.
            Err(error) => {
                tracing::debug!(ps = %server.ps, %error, "cannot use the unix socket; trying tcp");
            }
        }
    }
    let stream = Stream::connect_tcp(&server.address, party.timeout)?;
    let connection = party.dial(stream, role, client)?;
    let is_encrypted = connection.sender.is_encrypted();
    tracing::debug!(ps = %server.ps, ?role, is_encrypted, "connected by tcp");
    Ok(connection)
}

/// Every partition must be somewhere, once.
fn check_route(route: &Route, layout: &Layout) -> Result<(), Error> {
    let all = layout.with_rows();
    let mut next = all.start;
    for server in &route.servers {
        if server.partitions.start != next || server.partitions.end < next {
            break;
        }
        next = server.partitions.end;
    }
    if next == all.end {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "the route covers {} of {} partitions in order",
        next - all.start,
        all.len()
    )))
}

fn count(n: usize) -> u32 {
    u32::try_from(n).expect("partitions times tables are counted in 32 bits")
}

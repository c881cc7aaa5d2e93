// SPDX-License-Identifier: Apache-2.0
//! The data plane of AllReduce: the members of a world, all linked to each other, and their
//! collectives.
//!
//! A [`Mesh`] is used by one thread and blocks it; an [`Abort`] ends its calls from others. Links
//! live across worlds. Between processes of one host data is read straight from the peer's
//! memory (`mesh/shm.rs`) or goes through a Unix socket, between hosts through TCP. The sums are those
//! of the tree of [`edl_core::lanes`], no matter which member runs which lane.
//!
//! All members make the same calls in the same order. After any error a member is done with its
//! world: it must `enter` a later one (or the same again, if no member has got past its entry).
//! A peer that enters a later world ends our calls for this one with `Error::Aborted`, too.

mod abort;
mod bf16;
mod connector;
mod dial;
mod drive;
mod entry;
mod exchange;
mod link;
mod listen;
mod plan;
mod reduce;
mod shm;
mod storage;
mod sum;
mod transfer;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use edl_core::id::{Incarnation, RunId, WorkerId, WorldId};
use edl_core::lanes::Span;

use self::connector::Connector;
use self::drive::Members;
use self::entry::WorldEntry;
use self::exchange::Exchange;
use self::link::Link;
use self::listen::Listener;
use self::plan::ReducePlan;
use self::reduce::{Phases, Reduce, Task};
use self::storage::Storage;
use self::transfer::Transfer;
use crate::handshake::Encryption;
use crate::key::JobKey;
use crate::socket::UnixSocket;

pub use self::abort::{Abort, Blocked};
pub use self::bf16::round_all as round_to_bf16;
pub use edl_core::member::Move;

/// Most members of a world.
pub const MAX_MEMBERS: usize = edl_core::spec::MAX_MEMBERS as usize;
/// Most bytes of a member in an exchange.
pub const MAX_EXCHANGE: usize = 4096;

/// Called at the exact points of a sum, with its step.
pub type PhaseHook = Box<dyn FnMut(ReducePhase, u64) + Send>;

pub struct MeshConfig {
    pub key: JobKey,
    pub run: RunId,
    pub worker: WorkerId,
    pub incarnation: Incarnation,
    /// For the Unix socket; created as a private one (0700) if it does not exist.
    pub folder: PathBuf,
    /// `127.0.0.1:0`, for example.
    pub listen: String,
    /// Forces one transport.
    pub transport: Option<Transport>,
    pub encryption: Encryption,
    /// A peer that owes us bytes and sends none for this long is lost.
    pub silence: Duration,
    pub on_phase: Option<PhaseHook>,
}

/// How two members move bulk data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    SharedMemory,
    Unix,
    Tcp,
}

/// How numbers travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dtype {
    #[default]
    F32,
    /// Lanes and the mean are rounded to 16 bits; sums are `f32`.
    Bf16,
    /// As many places at the start, in all nodes and in the mean, hold numbers of 64 bits, which are
    /// added as such; the others are `f32`.
    F64First(usize),
}

/// The points of a sum, in order. Each is reached once, by every member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReducePhase {
    /// Nothing has left this member.
    BeforeSend,
    /// Half of its nodes are on their way.
    HalfSent,
    /// Half of its chunk is added up, or as much as it needs to before it sends sums.
    Reducing,
    /// None of its sums has left it.
    BeforeGather,
    /// All of the result is here.
    After,
}

/// A member of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub worker: WorkerId,
    pub incarnation: Incarnation,
    /// `host:port`.
    pub address: String,
    /// Empty if it has none.
    pub unix_path: String,
    /// The lanes that it runs.
    pub span: Span,
    /// It trains the steps before this world first: until it enters, its silence means nothing.
    pub is_busy: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the world has ended")]
    Aborted,
    #[error("lost worker {peer}: {error}")]
    Lost { peer: WorkerId, error: String },
    #[error("item {item} was not accepted: {error}")]
    Item { item: u32, error: String },
    #[error("cannot {action}")]
    Io { action: String, source: io::Error },
}

/// This process among the members of a world.
pub struct Mesh {
    abort: Abort,
    blocked: Blocked,
    connector: Arc<Connector>,
    listener: Listener,
    silence: Duration,
    on_phase: Option<PhaseHook>,
    world: Option<EnteredWorld>,
    storage: Storage,
    /// Blocks of peers that wait to be added, kept from sum to sum.
    windows: Vec<Vec<f32>>,
}

/// The world that was entered, and the links with its members.
struct EnteredWorld {
    id: WorldId,
    me: usize,
    members: Vec<Peer>,
    /// `None` for oneself, and for a peer that was lost.
    links: Vec<Option<Link>>,
}

impl Transport {
    /// What `ELASTICDL_TRANSPORT` forces: `shm`, `unix` or `tcp`; nothing if it is not set.
    pub fn from_env() -> Result<Option<Self>, String> {
        match std::env::var("ELASTICDL_TRANSPORT") {
            Ok(text) => Self::parse(&text).map(Some),
            Err(_) => Ok(None),
        }
    }

    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "shm" => Ok(Self::SharedMemory),
            "unix" => Ok(Self::Unix),
            "tcp" => Ok(Self::Tcp),
            _ => Err(format!("unknown transport `{text}`; use `shm`, `unix` or `tcp`")),
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SharedMemory => "shared memory",
            Self::Unix => "unix",
            Self::Tcp => "tcp",
        })
    }
}

impl ReducePhase {
    pub const ALL: [Self; 5] =
        [Self::BeforeSend, Self::HalfSent, Self::Reducing, Self::BeforeGather, Self::After];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::BeforeSend => "before_send",
            Self::HalfSent => "half_sent",
            Self::Reducing => "reducing",
            Self::BeforeGather => "before_gather",
            Self::After => "after",
        }
    }
}

impl Mesh {
    /// Listens from now on.
    pub fn open(config: MeshConfig) -> Result<Self, Error> {
        let failed = |action: &str| {
            let action = action.to_string();
            move |source| Error::Io { action, source }
        };
        let abort = Abort::new().map_err(failed("create an event"))?;
        let connector = Arc::new(Connector::new(
            (config.key, config.run, config.encryption),
            (config.worker, config.incarnation),
            config.transport,
            config.silence,
            abort.clone(),
        ));
        let action = format!("listen on `{}` and in `{}`", config.listen, config.folder.display());
        let name = format!("mesh-{}.sock", config.worker);
        let listener = UnixSocket::bind(&config.folder, &name)
            .and_then(|socket| Listener::start(Arc::clone(&connector), &config.listen, socket));
        Ok(Self {
            abort,
            blocked: Blocked::default(),
            connector,
            listener: listener.map_err(failed(&action))?,
            silence: config.silence,
            on_phase: config.on_phase,
            world: None,
            storage: Storage::default(),
            windows: Vec::new(),
        })
    }

    /// `host:port` as bound. A process that listens on all addresses must announce a host that
    /// others can reach.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.listener.address
    }

    #[must_use]
    pub fn unix_path(&self) -> &Path {
        &self.listener.unix_path
    }

    #[must_use]
    pub fn abort(&self) -> Abort {
        self.abort.clone()
    }

    /// Whether a call waits for other members, for other threads to read.
    #[must_use]
    pub fn blocked(&self) -> Blocked {
        self.blocked.clone()
    }

    /// Links with members of a future world, in the background.
    pub fn prepare(&mut self, peers: &[Peer]) {
        let links = self.world.iter().flat_map(|world| world.links.iter().flatten());
        entry::prepare(&self.connector, links, peers);
    }

    /// Enters a world: waits until all its members are linked and have left every world before
    /// it. Links to others are closed.
    ///
    /// # Panics
    /// If `peers[me]` is not this worker, or there are more than `MAX_MEMBERS`.
    pub fn enter(&mut self, world: WorldId, me: usize, peers: Vec<Peer>) -> Result<(), Error> {
        assert!(peers.len() <= MAX_MEMBERS, "a world has at most {MAX_MEMBERS} members");
        assert_eq!(
            (peers[me].worker, peers[me].incarnation),
            self.connector.me,
            "this worker's place"
        );
        let old = self.world.take().map(|world| world.links).unwrap_or_default();
        let mut links = entry::keep(&self.connector, old.into_iter().flatten(), me, &peers);
        let mut members = Members {
            world,
            links: &mut links,
            abort: &self.abort,
            blocked: &self.blocked,
            silence: self.silence,
        };
        let entered = WorldEntry::new(&self.connector, me, &peers).pass(&mut members);
        self.blocked.set(false);
        // Also after an error: existing links serve the next world.
        self.windows.resize_with(peers.len(), Vec::new);
        self.world = Some(EnteredWorld { id: world, me, members: peers, links });
        entered
    }

    /// How this member reaches the others, for the log.
    #[must_use]
    pub fn transport(&self) -> String {
        let links = self.world.iter().flat_map(|world| world.links.iter().flatten());
        let mut kinds: Vec<(Transport, bool)> =
            links.map(|link| (link.transport, link.is_encrypted())).collect();
        kinds.sort_unstable();
        let mut texts: Vec<(String, usize)> = Vec::new();
        for same in kinds.chunk_by(|a, b| a == b) {
            let (transport, is_encrypted) = same[0];
            let prefix = if is_encrypted { "encrypted " } else { "" };
            texts.push((format!("{prefix}{transport}"), same.len()));
        }
        match texts.as_slice() {
            [] => "none".into(),
            [(text, _)] => text.clone(),
            _ => {
                let counted = texts.iter().map(|(text, n)| format!("{text} ({n})"));
                counted.collect::<Vec<_>>().join(", ")
            }
        }
    }

    /// Sends `mine` to all members; returns what all of them sent, in the order of members.
    ///
    /// # Panics
    /// If `mine` is longer than `MAX_EXCHANGE`, or no world was entered.
    pub fn exchange(&mut self, number: u64, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        assert!(mine.len() <= MAX_EXCHANGE, "at most {MAX_EXCHANGE} bytes are exchanged");
        let world = self.world.as_mut().expect("a world was entered");
        let mut op = Exchange::new(world.id, number, mine, world.me, world.members.len());
        world.linked(&self.abort, &self.blocked, self.silence)?.drive(&mut op)?;
        Ok(op.into_answers())
    }

    /// Moves blobs between members, who all call it with the same list. `encode` makes those that
    /// this one sends, `accept` takes those that it gets. Returns the bytes that it moved.
    ///
    /// # Panics
    /// If no world was entered, or a move names no member of it.
    pub fn transfer(
        &mut self,
        moves: &[Move],
        encode: &mut dyn FnMut(u32) -> Vec<u8>,
        accept: &mut dyn FnMut(u32, Vec<u8>) -> Result<(), String>,
    ) -> Result<u64, Error> {
        let world = self.world.as_mut().expect("a world was entered");
        let n_members = world.members.len();
        let mut op = Transfer::new(world.id, world.me, n_members, moves, encode, accept);
        world.linked(&self.abort, &self.blocked, self.silence)?.drive(&mut op)?;
        Ok(op.n_bytes)
    }

    /// The buffers that this member's nodes are to be summed into: one of `len` numbers per node
    /// of `nodes_within(n_active, span)`. What they hold is undefined, but it is kept between
    /// calls with the same `n_active` and `len` until the sum.
    ///
    /// With `Dtype::Bf16` a lane that is added to others here must be rounded before, by
    /// [`round_to_bf16`]; a node of one lane need not be.
    ///
    /// # Panics
    /// If no world was entered, or the system has no memory left.
    pub fn buffers(&mut self, n_active: u32, len: usize) -> Vec<&mut [f32]> {
        let world = self.world.as_ref().expect("a world was entered");
        let nodes = edl_core::lanes::nodes_within(n_active, &world.members[world.me].span);
        self.storage.fit(world.shares_memory(), nodes.len(), len);
        self.storage.nodes_mut(nodes.len(), len)
    }

    /// Adds up all nodes in the tree's order, divides by `divisor`, and gives every member all of
    /// it in `out`. The nodes are what was written into `buffers` of the same `n_active` and
    /// length; they are spent afterwards.
    ///
    /// # Panics
    /// If no world was entered, or `buffers` was not called for this sum, or a number of 64 bits has
    /// no place.
    pub fn all_reduce(
        &mut self,
        step: u64,
        n_active: u32,
        divisor: f32,
        dtype: Dtype,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let world = self.world.as_mut().expect("a world was entered");
        let spans: Vec<Span> = world.members.iter().map(|member| member.span.clone()).collect();
        let plan = ReducePlan::new(n_active, &spans, out.len());
        let task = Task { world: world.id, me: world.me, step, divisor, dtype };
        let mine = self.storage.mine(plan.nodes[world.me].len(), out.len());
        let phases = Phases { hook: &mut self.on_phase, step, n_reached: 0 };
        let windows = &mut self.windows;
        let mut op = Reduce::new(task, &plan, mine, out, windows, &world.links, phases);
        world.linked(&self.abort, &self.blocked, self.silence)?.drive(&mut op)?;
        op.finish();
        Ok(())
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.abort.close();
        let mut pending = self.connector.pending();
        pending.is_closed = true;
        pending.dialing.clear();
        pending.arrived.clear();
    }
}

impl EnteredWorld {
    fn shares_memory(&self) -> bool {
        self.links.iter().flatten().any(|link| link.transport == Transport::SharedMemory)
    }

    /// All members but oneself must be there.
    fn linked<'a>(
        &'a mut self,
        abort: &'a Abort,
        blocked: &'a Blocked,
        silence: Duration,
    ) -> Result<Members<'a>, Error> {
        let is_there = |(member, link): (usize, &Option<Link>)| link.is_some() || member == self.me;
        if let Some(gone) = (0..self.links.len()).find(|i| !is_there((*i, &self.links[*i]))) {
            let error = "was already lost in this world".into();
            return Err(Error::Lost { peer: self.members[gone].worker, error });
        }
        Ok(Members { world: self.id, links: &mut self.links, abort, blocked, silence })
    }
}

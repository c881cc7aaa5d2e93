// SPDX-License-Identifier: Apache-2.0
//! The sum of all lanes: every member adds up its chunk of the vector and gives it to all.
//!
//! From a peer that shares its memory, nodes and sums are read where they lie, when its doorbell
//! has rung; `shm` says why that is sound. From others they come as frames of one block: first
//! their nodes' blocks of our chunk, in order, then the sums of their own chunk. Sums of a block
//! leave as soon as it is added up. Of a peer that is ahead of others only [`WINDOW`] blocks are
//! taken, so that they are still in the cache when they are added.

use edl_core::id::WorldId;

use super::drive::{Frame, Op, unexpected};
use super::link::{Link, PeerRegion, number};
use super::plan::ReducePlan;
use super::sum::{Summer, Term};
use super::{Dtype, Error, PhaseHook, ReducePhase, Transport, bf16};
use crate::frame::{FrameKind, Header};
use crate::wire;

/// Blocks of a peer that wait for those of others.
const WINDOW: usize = 2;
/// Numbers that are copied from a peer's memory between two looks at what else there is.
const COPY: usize = 256 << 10;

/// A member's own memory for one sum.
pub(super) struct Mine<'a> {
    /// Its nodes, `plan.stride()` apart.
    pub(super) nodes: &'a [f32],
    /// Where peers read the sum of its chunk, if it shares memory with any.
    pub(super) sum: Option<&'a mut [f32]>,
    /// How peers learn of the memory.
    pub(super) region: Option<Shown>,
}

/// How a peer maps our memory.
#[derive(Clone)]
pub(super) struct Shown {
    pub(super) number: u64,
    pub(super) n_floats: usize,
    pub(super) n_sum: usize,
    pub(super) fd: std::sync::Arc<std::os::fd::OwnedFd>,
}

/// Which sum it is.
#[derive(Clone, Copy)]
pub(super) struct Task {
    pub(super) world: WorldId,
    pub(super) me: usize,
    pub(super) step: u64,
    pub(super) divisor: f32,
    pub(super) dtype: Dtype,
}

pub(super) struct Reduce<'a> {
    task: Task,
    plan: &'a ReducePlan,
    mine: Mine<'a>,
    out: &'a mut [f32],
    /// Blocks of peers' nodes that have come over sockets.
    windows: &'a mut [Vec<f32>],
    is_half: Vec<bool>,
    peers: Vec<PeerProgress>,
    /// Blocks of our chunk that are added up.
    n_summed: usize,
    phases: Phases<'a>,
}

/// What has gone to a peer and come from it.
#[derive(Default)]
struct PeerProgress {
    is_me: bool,
    is_shared: bool,
    /// Blocks of nodes and of sums.
    parts_out: usize,
    sums_out: usize,
    parts_in: usize,
    sums_in: usize,
    /// The payload that is being sent.
    tail: Tail,
    has_rung: bool,
    has_sent: bool,
    region: Option<PeerRegion>,
    is_summed: bool,
    n_copied: usize,
}

#[derive(Clone, Copy, Default)]
enum Tail {
    #[default]
    None,
    /// Of our nodes, from this place on.
    Part(usize, usize),
    /// Of the sum.
    Sum(usize, usize),
}

/// Calls the hook at each point once, in order.
pub(super) struct Phases<'a> {
    pub(super) hook: &'a mut Option<PhaseHook>,
    pub(super) step: u64,
    pub(super) n_reached: usize,
}

impl Phases<'_> {
    pub(super) fn reach(&mut self, phase: ReducePhase) {
        while self.n_reached < ReducePhase::ALL.len() && ReducePhase::ALL[self.n_reached] <= phase {
            if let Some(hook) = self.hook {
                hook(ReducePhase::ALL[self.n_reached], self.step);
            }
            self.n_reached += 1;
        }
    }
}

impl<'a> Reduce<'a> {
    pub(super) fn new(
        task: Task,
        plan: &'a ReducePlan,
        mine: Mine<'a>,
        out: &'a mut [f32],
        windows: &'a mut [Vec<f32>],
        links: &[Option<Link>],
        phases: Phases<'a>,
    ) -> Self {
        let is_half = (plan.nodes.iter().flatten())
            .map(|node| task.dtype == Dtype::Bf16 && node.len() == 1)
            .collect();
        let shares = |link: &Link| link.transport == Transport::SharedMemory;
        let peers: Vec<PeerProgress> = (links.iter().enumerate())
            .map(|(peer, link)| PeerProgress {
                is_me: peer == task.me,
                is_shared: link.as_ref().is_some_and(shares),
                ..PeerProgress::default()
            })
            .collect();
        let longest = plan.longest_block(task.me);
        for ((window, nodes), peer) in windows.iter_mut().zip(&plan.nodes).zip(&peers) {
            if !peer.is_me && !peer.is_shared {
                window.resize(WINDOW * nodes.len() * longest, 0.0);
            }
        }
        let mut reduce =
            Self { task, plan, mine, out, windows, is_half, peers, n_summed: 0, phases };
        reduce.phases.reach(ReducePhase::BeforeSend);
        reduce
    }

    pub(super) fn finish(mut self) {
        self.phases.reach(ReducePhase::After);
    }

    fn n_blocks(&self) -> usize {
        self.plan.n_blocks(self.task.me)
    }

    /// The block, and which of `member`'s nodes, that the part number `part` of a chunk is of.
    fn part(&self, member: usize, part: usize) -> (usize, usize) {
        let n_nodes = self.plan.nodes[member].len();
        (part / n_nodes, part % n_nodes)
    }

    fn n_parts_out(&self, peer: usize) -> usize {
        self.plan.n_blocks(peer) * self.plan.nodes[self.task.me].len()
    }

    fn n_parts_in(&self, peer: usize) -> usize {
        self.n_blocks() * self.plan.nodes[peer].len()
    }

    fn is_half(&self, member: usize, node: usize) -> bool {
        let before: usize = self.plan.nodes[..member].iter().map(Vec::len).sum();
        self.is_half[before + node]
    }

    /// Whether all nodes of `peer` are there, for the block that is added up next.
    fn is_here(&self, peer: usize) -> bool {
        let state = &self.peers[peer];
        let n_nodes = self.plan.nodes[peer].len();
        state.is_me
            || (state.is_shared && state.region.is_some())
            || (!state.is_shared && state.parts_in >= (self.n_summed + 1) * n_nodes)
    }

    fn sum_block(&mut self) {
        let block = self.plan.block(self.task.me, self.n_summed);
        let slot = self.n_summed % WINDOW;
        let (stride, longest) = (self.plan.stride(), self.plan.longest_block(self.task.me));
        let mut terms = Vec::with_capacity(self.is_half.len());
        for (member, nodes) in self.plan.nodes.iter().enumerate() {
            for node in 0..nodes.len() {
                let at = node * stride + block.start;
                let state = &self.peers[member];
                let window = || &self.windows[member][(slot * nodes.len() + node) * longest..];
                terms.push(match &state.region {
                    _ if state.is_me => Term::Floats(&self.mine.nodes[at..]),
                    Some(region) => Term::Shared(&region.map, region.n_sum + at),
                    None if self.is_half[terms.len()] => {
                        Term::Halves(bytemuck::cast_slice(window()))
                    }
                    None => Term::Floats(window()),
                });
            }
        }
        let chunk = &self.plan.chunks[self.task.me];
        let in_chunk = block.start - chunk.start..block.end - chunk.start;
        let copy = self.mine.sum.as_deref_mut().map(|sum| &mut sum[in_chunk]);
        let n_double = match self.task.dtype {
            Dtype::F64First(n_places) => n_places.saturating_sub(block.start).min(block.len()),
            Dtype::F32 | Dtype::Bf16 => 0,
        };
        let summer = Summer {
            steps: &self.plan.steps,
            is_half: &self.is_half,
            divisor: self.task.divisor,
            is_half_sum: self.task.dtype == Dtype::Bf16,
            n_double,
        };
        summer.sum(&terms, &mut self.out[block], copy);
        self.n_summed += 1;
    }

    /// Copies some of the sums that lie ready in a peer's memory. Returns whether there were any.
    fn copy_sums(&mut self) -> bool {
        for (peer, state) in self.peers.iter_mut().enumerate() {
            let chunk = &self.plan.chunks[peer];
            let left = chunk.len() - state.n_copied;
            if let (true, Some(region)) = (state.is_summed && left > 0, &state.region) {
                let n = left.min(COPY);
                let at = chunk.start + state.n_copied;
                region.map.load(state.n_copied, &mut self.out[at..at + n]);
                state.n_copied += n;
                return true;
            }
        }
        false
    }

    fn post_doorbell(&mut self, peer: usize, link: &mut Link) -> bool {
        let Task { world, step, .. } = self.task;
        if !self.peers[peer].has_rung {
            self.reach_half();
            let shown = self.mine.region.as_ref().expect("memory that peers share");
            if link.shown_region != shown.number {
                link.shown_region = shown.number;
                let numbers = [shown.number, shown.n_floats as u64, shown.n_sum as u64];
                let payload: &[u8] = bytemuck::cast_slice(&numbers);
                link.post_fd(FrameKind::Region, world, payload, shown.fd.clone());
            }
            link.post(FrameKind::Ready, world, step, &shown.number.to_le_bytes());
            self.peers[peer].has_rung = true;
            return true;
        }
        let is_summed = self.n_summed == self.n_blocks() && !self.peers[peer].has_sent;
        if is_summed {
            self.phases.reach(ReducePhase::BeforeGather);
            link.post(FrameKind::Summed, world, step, &[]);
            self.peers[peer].has_sent = true;
        }
        is_summed
    }

    /// Marks that half of our nodes are on their way.
    fn reach_half(&mut self) {
        let mut n_sent = 0;
        let mut n_all = 0;
        for (peer, state) in self.peers.iter().enumerate().filter(|(_, state)| !state.is_me) {
            n_sent += if state.is_shared { usize::from(state.has_rung) } else { state.parts_out };
            n_all += if state.is_shared { 1 } else { self.n_parts_out(peer) };
        }
        if n_sent * 2 + 1 >= n_all {
            self.phases.reach(ReducePhase::HalfSent);
        }
    }

    /// Sends a block from where it lies, or as 16 bits.
    fn post_block(
        &mut self,
        kind: FrameKind,
        tail: Tail,
        is_half: bool,
        peer: usize,
        link: &mut Link,
    ) {
        self.peers[peer].tail = tail;
        let Task { world, step, .. } = self.task;
        if is_half {
            let floats: &[f32] = bytemuck::cast_slice(self.tail(peer));
            let halves: Vec<u16> = floats.iter().map(|float| bf16::from_f32(*float)).collect();
            link.post(kind, world, step, bytemuck::cast_slice(&halves));
            self.peers[peer].tail = Tail::None;
        } else {
            link.begin(kind, world, step, self.tail(peer));
        }
    }

    /// Bytes that a part or a sum of `n` numbers takes.
    fn n_bytes(n: usize, is_half: bool) -> usize {
        n * if is_half { size_of::<u16>() } else { size_of::<f32>() }
    }

    fn check_region(&self, peer: usize, frame: &Frame<'_>) -> Option<PeerRegion> {
        let region = frame.region?;
        let n_nodes = self.plan.nodes[peer].len() * self.plan.stride();
        let is_known = frame.payload == region.number.to_le_bytes();
        let is_long = region.n_sum.checked_add(n_nodes)? <= region.map.n_floats();
        (is_known && is_long && region.n_sum >= self.plan.chunks[peer].len())
            .then(|| region.clone())
    }
}

impl Op for Reduce<'_> {
    fn wants(&self, peer: usize) -> bool {
        let state = &self.peers[peer];
        if state.is_me {
            return false;
        }
        if state.is_shared {
            return !state.is_summed;
        }
        if state.parts_in == self.n_parts_in(peer) {
            return state.sums_in < self.plan.n_blocks(peer);
        }
        let n_nodes = self.plan.nodes[peer].len();
        state.parts_in < (self.n_summed + WINDOW) * n_nodes
    }

    fn buffer(&mut self, peer: usize, header: &Header) -> Option<&mut [u8]> {
        let Self { task, plan, peers, .. } = &*self;
        let state = &peers[peer];
        if state.is_shared {
            return None;
        }
        if header.kind == FrameKind::Part && state.parts_in < self.n_parts_in(peer) {
            let (block, node) = self.part(peer, state.parts_in);
            let n = plan.block(task.me, block).len();
            let n_bytes = Self::n_bytes(n, self.is_half(peer, node));
            let slot = (block % WINDOW) * plan.nodes[peer].len() + node;
            let at = slot * plan.longest_block(task.me);
            let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut self.windows[peer][at..]);
            return Some(&mut buffer[..n_bytes]);
        }
        let is_placed = header.kind == FrameKind::Sum && task.dtype != Dtype::Bf16;
        if is_placed && state.sums_in < plan.n_blocks(peer) {
            let block = plan.block(peer, state.sums_in);
            return Some(bytemuck::cast_slice_mut(&mut self.out[block]));
        }
        None
    }

    fn take(&mut self, peer: usize, frame: Frame<'_>) -> Result<(), wire::Error> {
        let Frame { header, payload, .. } = frame;
        let refuse = || unexpected(header);
        if number(header) != self.task.step {
            return Err(refuse());
        }
        let buffer = self.buffer(peer, header).map(|buffer| buffer.len() as u64);
        let is_placed = buffer == Some(header.length);
        let has_parts = self.peers[peer].parts_in == self.n_parts_in(peer);
        let has_sums = self.peers[peer].sums_in == self.plan.n_blocks(peer);
        let region = self.check_region(peer, &frame);
        let state = &mut self.peers[peer];
        match (header.kind, state.is_shared) {
            (FrameKind::Part, false) if is_placed => state.parts_in += 1,
            (FrameKind::Sum, false) if is_placed && has_parts => state.sums_in += 1,
            (FrameKind::Sum, false) if self.task.dtype == Dtype::Bf16 && has_parts && !has_sums => {
                let out = &mut self.out[self.plan.block(peer, state.sums_in)];
                if payload.len() != Self::n_bytes(out.len(), true) {
                    return Err(refuse());
                }
                let halves =
                    payload.as_chunks::<2>().0.iter().map(|half| u16::from_le_bytes(*half));
                out.iter_mut().zip(halves).for_each(|(out, half)| *out = bf16::to_f32(half));
                state.sums_in += 1;
            }
            (FrameKind::Ready, true) if state.region.is_none() => {
                state.region = Some(region.ok_or_else(refuse)?);
            }
            (FrameKind::Summed, true) if state.region.is_some() => state.is_summed = true,
            _ => return Err(refuse()),
        }
        Ok(())
    }

    fn post(&mut self, peer: usize, link: &mut Link) -> bool {
        if self.peers[peer].is_shared {
            return self.post_doorbell(peer, link);
        }
        let PeerProgress { parts_out, sums_out, .. } = self.peers[peer];
        if parts_out < self.n_parts_out(peer) {
            self.reach_half();
            let (block, node) = self.part(self.task.me, parts_out);
            let block = self.plan.block(peer, block);
            let tail = Tail::Part(node * self.plan.stride() + block.start, block.len());
            self.peers[peer].parts_out += 1;
            self.post_block(FrameKind::Part, tail, self.is_half(self.task.me, node), peer, link);
            return true;
        }
        if sums_out < self.n_summed {
            self.phases.reach(ReducePhase::BeforeGather);
            let block = self.plan.block(self.task.me, sums_out);
            self.peers[peer].sums_out += 1;
            let tail = Tail::Sum(block.start, block.len());
            self.post_block(FrameKind::Sum, tail, self.task.dtype == Dtype::Bf16, peer, link);
            return true;
        }
        false
    }

    fn tail(&self, peer: usize) -> &[u8] {
        match self.peers[peer].tail {
            Tail::None => &[],
            Tail::Part(at, n) => bytemuck::cast_slice(&self.mine.nodes[at..at + n]),
            Tail::Sum(at, n) => bytemuck::cast_slice(&self.out[at..at + n]),
        }
    }

    fn work(&mut self) -> Result<bool, Error> {
        let n_blocks = self.n_blocks();
        if self.n_summed < n_blocks && (0..self.peers.len()).all(|peer| self.is_here(peer)) {
            self.sum_block();
            if self.n_summed > n_blocks / 2 {
                self.phases.reach(ReducePhase::Reducing);
            }
            return Ok(true);
        }
        Ok(self.copy_sums())
    }

    fn is_done(&self) -> bool {
        let n_blocks = self.n_blocks();
        let is_done = |(peer, state): (usize, &PeerProgress)| {
            if state.is_me {
                return true;
            }
            if state.is_shared {
                let n_copied = self.plan.chunks[peer].len();
                return state.has_sent && state.is_summed && state.n_copied == n_copied;
            }
            state.parts_out == self.n_parts_out(peer)
                && state.sums_out == n_blocks
                && state.parts_in == self.n_parts_in(peer)
                && state.sums_in == self.plan.n_blocks(peer)
        };
        self.n_summed == n_blocks && self.peers.iter().enumerate().all(is_done)
    }
}

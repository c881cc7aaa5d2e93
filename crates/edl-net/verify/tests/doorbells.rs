// SPDX-License-Identifier: Apache-2.0
//! Checks the rules of `mesh/shm.rs` in every order of events: loom panics if one member writes
//! while another one reads.
//!
//! This is a model of the rules, not the code that follows them: members are threads, sockets are
//! channels, a region is one cell of nodes and one of sums, and a value is its step.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::mpsc::{Receiver, Sender, channel};
use loom::thread;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FrameKind {
    Enter,
    Ready,
    Summed,
}

/// The world, step and kind of a frame.
type Frame = (u64, u64, FrameKind);

/// The shared memory of a member: only this member writes, and the other one reads.
struct Region {
    nodes: UnsafeCell<u64>,
    sum: UnsafeCell<u64>,
}

/// A rule that is not followed, to check that the model can fail.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// Sums are written before the peer has confirmed that it copied the last one.
    SumsTooEarly,
    /// Nodes are written before the peer has confirmed that it read the last ones.
    NodesTooEarly,
    /// A world is started before the peer has left the previous one.
    NoEntry,
}

struct Member {
    mine: Arc<Region>,
    theirs: Arc<Region>,
    out: Sender<Frame>,
    into: Receiver<Frame>,
    flaw: Flaw,
    /// Frames that arrived while the member waited for another one.
    early: Vec<Frame>,
}

impl Region {
    fn new() -> Arc<Self> {
        Arc::new(Self { nodes: UnsafeCell::new(0), sum: UnsafeCell::new(0) })
    }
}

impl Member {
    fn send(&self, frame: Frame) {
        // A peer that has finished needs no frame.
        let _ = self.out.send(frame);
    }

    /// Waits for a frame; drops frames of earlier worlds. False if the peer has left its world.
    fn receive(&mut self, frame: Frame) -> bool {
        loop {
            if let Some(place) = self.early.iter().position(|early| *early == frame) {
                self.early.remove(place);
                return true;
            }
            if self.early.iter().any(|early| early.0 > frame.0) {
                return false;
            }
            let received = self.into.recv().expect("the peer is running");
            if received.0 >= frame.0 {
                self.early.push(received);
            }
        }
    }

    fn write_nodes(&self, step: u64) {
        // SAFETY: loom checks that no thread reads at the same time.
        self.mine.nodes.with_mut(|nodes| unsafe { *nodes = step });
    }

    fn write_sum(&self, step: u64) {
        // SAFETY: as above.
        self.mine.sum.with_mut(|sum| unsafe { *sum = step });
    }

    fn read(cell: &UnsafeCell<u64>) -> u64 {
        // SAFETY: loom checks that no thread writes at the same time.
        cell.with(|value| unsafe { *value })
    }

    fn enter(&mut self, world: u64) {
        self.send((world, 0, FrameKind::Enter));
        if self.flaw != Flaw::NoEntry {
            assert!(self.receive((world, 0, FrameKind::Enter)), "there is no later world");
        }
    }

    /// Runs the first `n_phases` of the four phases of a step.
    fn step(&mut self, world: u64, step: u64, n_phases: u32) {
        let is_early = self.flaw == Flaw::SumsTooEarly;
        self.write_nodes(step);
        self.send((world, step, FrameKind::Ready));
        if is_early {
            self.write_sum(step);
        }
        if n_phases == 1 {
            return;
        }
        if !self.receive((world, step, FrameKind::Ready)) {
            return;
        }
        assert_eq!(Self::read(&self.theirs.nodes), step, "nodes of another step");
        if !is_early {
            self.write_sum(step);
        }
        self.send((world, step, FrameKind::Summed));
        if n_phases == 2 {
            return;
        }
        if self.flaw == Flaw::NodesTooEarly {
            self.write_nodes(step + 1);
        }
        if !self.receive((world, step, FrameKind::Summed)) || n_phases == 3 {
            return;
        }
        assert_eq!(Self::read(&self.theirs.sum), step, "the sum of another step");
    }
}

/// Two members; each does `what`.
fn two(flaw: Flaw, what: [fn(&mut Member); 2]) {
    let regions = [Region::new(), Region::new()];
    let (to_first, of_first) = channel();
    let (to_second, of_second) = channel();
    let member = |me: usize, out, into| Member {
        mine: Arc::clone(&regions[me]),
        theirs: Arc::clone(&regions[1 - me]),
        out,
        into,
        flaw,
        early: Vec::new(),
    };
    let mut first = member(0, to_second, of_first);
    let mut second = member(1, to_first, of_second);
    let other = thread::spawn(move || {
        what[1](&mut second);
        second // Keeps its end of the channels open until both are done.
    });
    what[0](&mut first);
    other.join().expect("the member succeeds");
}

fn check(flaw: Flaw, what: [fn(&mut Member); 2]) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(move || two(flaw, what));
}

fn train(member: &mut Member) {
    for step in 1..=3 {
        member.step(1, step, 4);
    }
}

/// Leaves the first world during its step, and trains in the next.
fn leave_after<const N_PHASES: u32>(member: &mut Member) {
    member.step(1, 1, N_PHASES);
    member.enter(2);
    member.step(2, 2, 4);
}

#[test]
fn no_member_writes_while_another_reads() {
    check(Flaw::None, [train, train]);
}

#[test]
fn a_world_can_be_left_in_any_phase() {
    let left = [leave_after::<1>, leave_after::<2>, leave_after::<3>, leave_after::<4>];
    for first in left {
        for second in left {
            check(Flaw::None, [first, second]);
        }
    }
}

#[test]
#[should_panic]
fn sums_that_are_written_too_early_are_detected() {
    check(Flaw::SumsTooEarly, [train, train]);
}

#[test]
#[should_panic]
fn nodes_that_are_written_too_early_are_detected() {
    check(Flaw::NodesTooEarly, [train, train]);
}

#[test]
#[should_panic]
fn a_world_that_is_started_without_the_others_is_detected() {
    check(Flaw::NoEntry, [leave_after::<2>, leave_after::<4>]);
}

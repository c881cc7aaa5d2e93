// SPDX-License-Identifier: Apache-2.0
//! A mesh in memory: members are threads, and a test may end one at an exact point.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use edl_core::id::{WorkerId, WorldId};
use edl_core::lanes::{Span, fold, nodes_within};
use edl_core::member::{Failure, Move};
use edl_core::spec::AllreduceDtype;
use edl_net::mesh::{Peer, round_to_bf16};
use edl_tensor::double;

use crate::allreduce::lanes::divide;
use crate::allreduce::mesh::{Identity, Mesh, OpenMesh, Opened};

/// A hang becomes a failure after this time; nothing depends on it otherwise.
const HANG: Duration = Duration::from_secs(60);

/// The points of a reduction at which a member may die.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DeathPoint {
    BeforeSend,
    HalfSent,
    Reducing,
    BeforeGather,
    /// Only one member gets what the dead one owes to all.
    HalfGathered {
        to: usize,
    },
    After,
}

/// All members of all worlds of one test.
#[derive(Clone, Default)]
pub(crate) struct Hub(Arc<(Mutex<State>, Condvar)>);

#[derive(Default)]
struct State {
    calls: BTreeMap<Call, BTreeMap<usize, Said>>,
    /// Calls of worlds before these are over.
    aborted: BTreeMap<WorkerId, WorldId>,
    dead: BTreeSet<WorkerId>,
    waiting: BTreeMap<WorkerId, String>,
    faults: BTreeMap<(WorkerId, u64), DeathPoint>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Call {
    world: WorldId,
    kind: CallKind,
    number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CallKind {
    Enter,
    Exchange,
    Transfer,
    Reduce,
    Gather,
}

/// What a member gives to a call.
#[derive(Clone, Default)]
struct Said {
    bytes: Vec<u8>,
    items: Vec<(Move, Vec<u8>)>,
    nodes: Vec<(Span, Vec<f32>)>,
    /// The only member that gets it.
    only_to: Option<usize>,
}

impl Hub {
    /// Ends `worker` at a point of the reduction that makes `step`.
    pub(crate) fn fault(&self, worker: u32, step: u64, at: DeathPoint) {
        self.change(|state| {
            state.faults.insert((WorkerId(worker), step), at);
        });
    }

    pub(crate) fn opener(&self) -> OpenMesh {
        let hub = self.clone();
        Box::new(move |identity: Identity, spec, model| {
            let (worker, is_half) = (identity.worker, spec.allreduce_dtype == AllreduceDtype::Bf16);
            let (ends, names) = (hub.clone(), hub.clone());
            let none = WorldId(0);
            let (members, nodes) = (Vec::new(), Vec::new());
            let n_double = model.n_double_places();
            let mesh =
                ToyMesh { hub, worker, is_half, n_double, world: none, me: 0, members, nodes };
            Ok(Opened {
                mesh: Box::new(mesh),
                address: format!("toy:{worker}"),
                unix_path: String::new(),
                abort: Box::new(move |world| {
                    ends.change(|state| {
                        let before = state.aborted.entry(worker).or_default();
                        *before = world.max(*before);
                    });
                }),
                is_blocked: Box::new(move || names.state().waiting.contains_key(&worker)),
            })
        })
    }

    /// The members that a blocked call of `worker` waits for.
    pub(crate) fn waiting_for(&self, worker: u32) -> String {
        self.state().waiting.get(&WorkerId(worker)).cloned().unwrap_or_default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.0.lock().unwrap()
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.0.1.notify_all();
    }
}

struct ToyMesh {
    hub: Hub,
    worker: WorkerId,
    /// Lanes and results are rounded to 16 bits.
    is_half: bool,
    /// The first places hold numbers of 64 bits.
    n_double: usize,
    world: WorldId,
    me: usize,
    members: Vec<Peer>,
    nodes: Vec<(Span, Vec<f32>)>,
}

impl Drop for ToyMesh {
    fn drop(&mut self) {
        self.hub.change(|state| {
            state.dead.insert(self.worker);
        });
    }
}

impl ToyMesh {
    fn say(&self, kind: CallKind, number: u64, said: Said) -> Call {
        let call = Call { world: self.world, kind, number };
        self.hub.change(|state| {
            state.calls.entry(call).or_default().insert(self.me, said);
        });
        call
    }

    /// Waits until every other member has contributed to the call.
    fn hear(&self, call: Call) -> Result<Vec<Said>, Failure> {
        let mut state = self.hub.state();
        loop {
            let is_over = state.aborted.get(&self.worker).is_some_and(|least| self.world < *least);
            if is_over {
                state.waiting.remove(&self.worker);
                return Err(Failure::Cancelled);
            }
            let said = state.calls.get(&call).cloned().unwrap_or_default();
            let reaches = |said: &Said| said.only_to.is_none_or(|to| to == self.me);
            let has_said = |place: &usize| said.get(place).is_some_and(reaches);
            let missing: Vec<usize> =
                (0..self.members.len()).filter(|place| !has_said(place)).collect();
            let workers = missing.iter().map(|place| self.members[*place].worker);
            if missing.is_empty() {
                state.waiting.remove(&self.worker);
                return Ok(said.into_values().collect());
            }
            if let Some(peer) = workers.clone().find(|worker| state.dead.contains(worker)) {
                state.waiting.remove(&self.worker);
                return Err(Failure::Lost { peer, error: "connection reset".into() });
            }
            let names: Vec<String> = workers.map(|worker| format!("worker {worker}")).collect();
            state.waiting.insert(self.worker, names.join(", "));
            let (woken, timed) = self.hub.0.1.wait_timeout(state, HANG).unwrap();
            assert!(!timed.timed_out(), "{call:?} of worker {} hangs", self.worker);
            state = woken;
        }
    }

    fn die_at(&self, at: DeathPoint, step: u64) {
        if self.hub.state().faults.get(&(self.worker, step)) == Some(&at) {
            self.die();
        }
    }

    /// Ends this thread as a killed process ends: others notice only the broken link.
    fn die(&self) {
        self.hub.change(|state| {
            state.dead.insert(self.worker);
        });
        std::panic::resume_unwind(Box::new("killed"));
    }
}

impl Mesh for ToyMesh {
    fn prepare(&mut self, _: &[Peer]) {}

    fn enter(&mut self, world: WorldId, me: usize, members: &[Peer]) -> Result<(), Failure> {
        assert!(world > self.world, "worlds only grow");
        (self.world, self.me, self.members) = (world, me, members.to_vec());
        self.hear(self.say(CallKind::Enter, 0, Said::default())).map(drop)
    }

    fn transport(&self) -> String {
        "memory".into()
    }

    fn exchange(&mut self, number: u64, mine: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        let said = Said { bytes: mine.to_vec(), ..Said::default() };
        let heard = self.hear(self.say(CallKind::Exchange, number, said))?;
        Ok(heard.into_iter().map(|said| said.bytes).collect())
    }

    fn transfer(
        &mut self,
        moves: &[Move],
        encode: &mut dyn FnMut(u32) -> Vec<u8>,
        accept: &mut dyn FnMut(u32, Vec<u8>) -> Result<(), String>,
    ) -> Result<(), Failure> {
        let mine = moves.iter().filter(|item| item.from == self.me);
        let items = mine.map(|item| (*item, encode(item.item))).collect();
        let heard =
            self.hear(self.say(CallKind::Transfer, 0, Said { items, ..Said::default() }))?;
        for (item, bytes) in heard.into_iter().flat_map(|said| said.items) {
            if item.to == self.me {
                accept(item.item, bytes).map_err(Failure::Failed)?;
            }
        }
        Ok(())
    }

    fn buffers(&mut self, n_active: u32, len: usize) -> Vec<&mut [f32]> {
        let nodes = nodes_within(n_active, &self.members[self.me].span);
        if !self.nodes.iter().map(|(node, _)| node).eq(&nodes) {
            self.nodes = nodes.into_iter().map(|node| (node, vec![f32::NAN; len])).collect();
        }
        self.nodes.iter_mut().map(|(_, numbers)| numbers.as_mut_slice()).collect()
    }

    fn all_reduce(
        &mut self,
        step: u64,
        n_active: u32,
        divisor: f32,
        out: &mut [f32],
    ) -> Result<(), Failure> {
        self.die_at(DeathPoint::BeforeSend, step);
        // A half that was sent is as good as nothing.
        self.die_at(DeathPoint::HalfSent, step);
        let mut nodes = std::mem::take(&mut self.nodes);
        for (node, numbers) in &mut nodes {
            if self.is_half && node.len() == 1 {
                round_to_bf16(numbers);
            }
        }
        let said = Said { nodes, ..Said::default() };
        let call = self.say(CallKind::Reduce, step, said);
        self.die_at(DeathPoint::Reducing, step);
        let nodes: BTreeMap<u32, (Span, Vec<f32>)> = self
            .hear(call)?
            .into_iter()
            .flat_map(|said| said.nodes)
            .map(|(node, numbers)| (node.start, (node, numbers)))
            .collect();
        self.die_at(DeathPoint::BeforeGather, step);
        let fault = self.hub.state().faults.get(&(self.worker, step)).copied();
        if let Some(DeathPoint::HalfGathered { to }) = fault {
            self.say(CallKind::Gather, step, Said { only_to: Some(to), ..Said::default() });
            self.die();
        }
        let call = self.say(CallKind::Gather, step, Said::default());
        self.die_at(DeathPoint::After, step);
        self.hear(call)?;
        let mut known = |node: &Span| match nodes.get(&node.start) {
            Some((span, numbers)) if span == node => Some(numbers.clone()),
            Some(_) | None => None,
        };
        let n_double = self.n_double;
        let mut add = |mut left: Vec<f32>, right: Vec<f32>| {
            double::each_with(&mut left[..n_double], &right, |left, right| left + right);
            left[n_double..]
                .iter_mut()
                .zip(&right[n_double..])
                .for_each(|(sum, term)| *sum += term);
            left
        };
        let sum = fold(&(0..n_active), &mut known, &mut add).expect("every node is there");
        out.copy_from_slice(&sum);
        divide(out, n_double, divisor);
        if self.is_half {
            round_to_bf16(out);
        }
        Ok(())
    }
}

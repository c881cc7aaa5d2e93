// SPDX-License-Identifier: Apache-2.0
//! What an undisturbed worker would have trained: the state after every step, as a digest that no
//! other order of lanes, records or steps yields.

use edl_core::id::BatchId;
use edl_core::lanes::{self, Span};
use edl_core::rng;
use edl_core::spec::JobSpec;

/// What a worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) step: u64,
    pub(crate) digest: u64,
}

pub(crate) struct History {
    /// By step and lane: what is trained there.
    lanes: Vec<Vec<u64>>,
    states: Vec<State>,
    gradients: Vec<u64>,
}

impl History {
    pub(crate) fn new(spec: &JobSpec, n_records: u64) -> Self {
        let plan = spec.plan(n_records);
        let n_batches = u64::from(plan.n_batches());
        let n_steps = n_batches * u64::from(spec.num_epochs);
        let lanes = |step: u64| {
            let small = |n: u64| u32::try_from(n).expect("few steps");
            let batch = BatchId { epoch: small(step / n_batches), index: small(step % n_batches) };
            let records = plan.records(batch);
            let shares = lanes::share_out(records.len(), spec.n_lanes(), spec.minibatch_size);
            let lane = |share: std::ops::Range<usize>| rng::key(&records[share]);
            shares.into_iter().map(lane).collect::<Vec<u64>>()
        };
        let lanes = (0..n_steps).map(lanes).collect();
        let mut history = Self { lanes, states: Vec::new(), gradients: Vec::new() };
        let mut state = State { step: 0, digest: rng::key(&[spec.seed]) };
        for step in 0..n_steps {
            history.states.push(state);
            let all = 0..u32::MAX;
            let gradient = history.gradient(step, &history.nodes(state, &all));
            history.gradients.push(gradient);
            state = apply(state, gradient);
        }
        history.states.push(state);
        history
    }

    /// The sums of the step after `state` that a member with these lanes supplies.
    pub(crate) fn nodes(&self, state: State, span: &Span) -> Vec<(Span, u64)> {
        let of_step = self.lanes_of(state.step);
        let mut leaf = |node: &Span| {
            let is_leaf = node.end - node.start == 1;
            is_leaf.then(|| rng::key(&[state.digest, of_step[node.start as usize]]))
        };
        let sum = |node: Span| {
            let value = lanes::fold(&node, &mut leaf, &mut add).expect("every lane is there");
            (node, value)
        };
        lanes::nodes_within(n_active(of_step), span).into_iter().map(sum).collect()
    }

    /// The sum over all lanes. Panics if one is missing or there twice.
    pub(crate) fn gradient(&self, step: u64, nodes: &[(Span, u64)]) -> u64 {
        let all = 0..n_active(self.lanes_of(step));
        let covered: u32 = nodes.iter().map(|(node, _)| node.end - node.start).sum();
        assert_eq!(covered, all.end, "every lane of step {step} is trained once");
        let mut known =
            |node: &Span| nodes.iter().find(|(n, _)| n == node).map(|(_, value)| *value);
        lanes::fold(&all, &mut known, &mut add).expect("every lane is there")
    }

    fn lanes_of(&self, step: u64) -> &[u64] {
        &self.lanes[usize::try_from(step).expect("few steps")]
    }

    /// The state after `step` steps.
    pub(crate) fn state(&self, step: u64) -> State {
        self.states[usize::try_from(step).expect("few steps")]
    }

    /// The gradient that led to the state after `step`.
    pub(crate) fn gradient_of(&self, step: u64) -> u64 {
        self.gradients[usize::try_from(step).expect("few steps") - 1]
    }

    pub(crate) fn n_steps(&self) -> u64 {
        self.lanes.len() as u64
    }
}

pub(crate) fn apply(state: State, gradient: u64) -> State {
    State { step: state.step + 1, digest: rng::key(&[state.digest, gradient]) }
}

/// What a shard of the validation data measures in a state.
pub(crate) fn measure(state: State, shard: u32) -> f64 {
    rng::unit(rng::key(&[state.digest, u64::from(shard)]))
}

fn n_active(of_step: &[u64]) -> u32 {
    u32::try_from(of_step.len()).expect("few lanes")
}

fn add(left: u64, right: u64) -> u64 {
    rng::key(&[left, right])
}

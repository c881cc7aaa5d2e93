// SPDX-License-Identifier: Apache-2.0
//! What a single worker would train without faults: the state after every step, as a digest that
//! no other order of lanes, records or steps yields.

use edl_core::batch::BatchPlan;
use edl_core::id::{BatchId, PartitionId};
use edl_core::lanes::{self, Span};
use edl_core::layout::Layout;
use edl_core::rng;
use edl_core::spec::JobSpec;
use edl_tensor::checkpoint::Snapshot;
use edl_tensor::checkpoint::codec::Header;

/// The dense parameters of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DenseState {
    pub(crate) step: u64,
    pub(crate) digest: u64,
}

#[derive(Default)]
pub(crate) struct History {
    /// By step and lane: what is trained there.
    lanes: Vec<Vec<u64>>,
    states: Vec<DenseState>,
    gradients: Vec<u64>,
}

impl DenseState {
    /// What a worker writes of a partition: in place of parameters, the digest of all.
    pub(crate) fn snapshot(self, partition: u32, layout: &Layout) -> Snapshot {
        let header = Header {
            partition: PartitionId(partition),
            n_partitions: layout.n_partitions,
            is_apart: layout.is_apart,
            updates: self.step,
            ..Header::default()
        };
        let applied = self.digest.to_le_bytes().to_vec();
        Snapshot { header, applied, ..Snapshot::default() }
    }

    pub(crate) fn of(snapshot: &Snapshot) -> Self {
        let digest = snapshot.applied[..].try_into().expect("the digest of a state");
        Self { step: snapshot.header.updates, digest: u64::from_le_bytes(digest) }
    }

    pub(crate) fn apply(self, gradient: u64) -> Self {
        Self { step: self.step + 1, digest: rng::key(&[self.digest, gradient]) }
    }

    /// The same parameters after a step that is skipped.
    pub(crate) fn pass(self) -> Self {
        Self { step: self.step + 1, ..self }
    }

    /// What a shard of the validation data measures in this state.
    pub(crate) fn measure(self, shard: u32) -> f64 {
        rng::unit(rng::key(&[self.digest, u64::from(shard)]))
    }
}

impl History {
    /// Empty for a job whose servers hold all parameters.
    /// A step that is `skipped` changes nothing.
    pub(crate) fn new(spec: &JobSpec, plan: &BatchPlan, skipped: Option<u64>) -> Self {
        let mut history = Self::default();
        let Some(n_lanes) = spec.step_lanes() else { return history };
        let n_batches = u64::from(plan.n_batches());
        let n_steps = n_batches * u64::from(spec.num_epochs);
        let small = |n: u64| u32::try_from(n).expect("few steps");
        let mut state = DenseState { step: 0, digest: rng::key(&[spec.seed]) };
        let batch_of =
            |step| BatchId { epoch: small(step / n_batches), index: small(step % n_batches) };
        let untrained = skipped.map(|step| (step, plan.records(batch_of(step))));
        for step in 0..n_steps {
            let batch = batch_of(step);
            let records = plan.records(batch);
            let shares = lanes::share_out(records.len(), n_lanes, spec.minibatch_size);
            // Every record was trained once in every epoch before, unless its step was skipped.
            let untrained = untrained.as_ref().filter(|(skipped, _)| *skipped < step);
            let untrained = untrained.map_or(&[][..], |(_, records)| records);
            let rows = |records: &[u64]| {
                let n_untrained =
                    records.iter().filter(|record| untrained.contains(record)).count();
                records.len() as u64 * u64::from(batch.epoch) - n_untrained as u64
            };
            let lane = |share: std::ops::Range<usize>| {
                let records = &records[share];
                lane_key(records, if spec.n_servers() > 0 { rows(records) } else { 0 })
            };
            history.lanes.push(shares.into_iter().map(lane).collect());
            history.states.push(state);
            let all: Vec<(u32, u64)> = (0..).zip(history.lanes_of(step).iter().copied()).collect();
            let nodes = history.nodes(state, &(0..u32::MAX), &all);
            let gradient = history.gradient(step, &nodes);
            history.gradients.push(gradient);
            state = if skipped == Some(step) { state.pass() } else { state.apply(gradient) };
        }
        history.states.push(state);
        history
    }

    /// The sums that a member supplies for the step after `state`, from the keys of its lanes.
    pub(crate) fn nodes(
        &self,
        state: DenseState,
        span: &Span,
        trained: &[(u32, u64)],
    ) -> Vec<(Span, u64)> {
        let mut leaf = |node: &Span| {
            let is_leaf = node.end - node.start == 1;
            let key = trained.iter().find(|(lane, _)| is_leaf && *lane == node.start)?.1;
            Some(rng::key(&[state.digest, key]))
        };
        let sum = |node: Span| {
            let value = lanes::fold(&node, &mut leaf, &mut add).expect("every lane is trained");
            (node, value)
        };
        let n_active = self.n_active(state.step);
        lanes::nodes_within(n_active, span).into_iter().map(sum).collect()
    }

    /// The sum over all lanes.
    ///
    /// # Panics
    /// If a lane is missing or there twice.
    pub(crate) fn gradient(&self, step: u64, nodes: &[(Span, u64)]) -> u64 {
        let all = 0..self.n_active(step);
        let covered: u32 = nodes.iter().map(|(node, _)| node.end - node.start).sum();
        assert_eq!(covered, all.end, "every lane of step {step} is trained once");
        let mut known =
            |node: &Span| nodes.iter().find(|(n, _)| n == node).map(|(_, value)| *value);
        lanes::fold(&all, &mut known, &mut add).expect("no lane is missing")
    }

    fn lanes_of(&self, step: u64) -> &[u64] {
        &self.lanes[usize::try_from(step).expect("few steps")]
    }

    fn n_active(&self, step: u64) -> u32 {
        u32::try_from(self.lanes_of(step).len()).expect("few lanes")
    }

    /// The state after `step` steps.
    pub(crate) fn state(&self, step: u64) -> DenseState {
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

/// What a lane is trained on: its records, and the sum of their rows as they were read.
pub(crate) fn lane_key(records: &[u64], rows: u64) -> u64 {
    rng::key(&[rng::key(records), rows])
}

fn add(left: u64, right: u64) -> u64 {
    rng::key(&[left, right])
}

#[cfg(test)]
mod tests {
    use edl_core::spec::Strategy;

    use super::*;

    #[test]
    fn the_last_step_with_fewer_records_than_lanes_trains_each_record_once() {
        let spec = JobSpec {
            distribution_strategy: Strategy::Allreduce,
            lanes: Some(4),
            minibatch_size: 2,
            ..JobSpec::default()
        };
        for (n_records, n_active) in [(1, 1), (2, 1), (5, 2), (8, 4), (9, 1), (13, 2)] {
            let history = History::new(&spec, &spec.plan(n_records), None);
            let last = history.n_steps() - 1;
            assert_eq!(last, (n_records - 1) / 8);
            let state = history.state(last);
            let trained: Vec<(u32, u64)> =
                (0..).zip(history.lanes_of(last).iter().copied()).collect();
            let spans = lanes::assign(4, 3);
            let nodes = spans.iter().flat_map(|span| history.nodes(state, span, &trained));
            let nodes: Vec<_> = nodes.collect();
            let covered: u32 = nodes.iter().map(|(node, _)| node.end - node.start).sum();
            assert_eq!(covered, n_active, "{n_records} records");
            assert_eq!(history.gradient(last, &nodes), history.gradient_of(last + 1));
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A partition against a naive one: maps of doubles, plain SGD, the rules read off the design.

use std::collections::{BTreeMap, BTreeSet};

use edl_core::model::Rule;
use proptest::prelude::*;

use super::*;
use crate::init::{InitialValues, name_key};
use crate::tests::fixture::Part;

const N_PARTITIONS: u32 = 3;

/// A partition without chunks, indices, slots or floats of single precision.
#[derive(Clone)]
struct Naive {
    dense: Vec<f64>,
    rows: BTreeMap<(usize, u64), Vec<f64>>,
    applied: BTreeSet<BatchId>,
    staged: BTreeSet<BatchId>,
    version: u64,
}

#[derive(Clone, Debug)]
enum Op {
    Push {
        partition: u32,
        batch: BatchId,
    },
    Gather {
        partition: u32,
        ids: Vec<u64>,
    },
    /// Keeps a copy of all partitions, taken one by one.
    Copy {
        partition: u32,
    },
    /// Goes back to the copy.
    Restore {
        partition: u32,
    },
}

impl Naive {
    fn new(job: &Job, partition: u32) -> Self {
        let mut dense = Vec::new();
        for param in &job.model.params {
            let mut values = vec![0.0; param.len()];
            InitialValues::param(param.init, 11, &param.name).fill(0, &mut values);
            dense.extend(values.into_iter().map(f64::from));
        }
        let dense = dense[job.layout().segment(PartitionId(partition))].to_vec();
        let (rows, applied, staged) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        Self { dense, rows, applied, staged, version: 0 }
    }

    fn row(&mut self, job: &Job, table: usize, id: u64) -> &mut Vec<f64> {
        self.rows.entry((table, id)).or_insert_with(|| {
            let spec = &job.model.tables[table];
            let mut values = vec![0.0; spec.dim];
            InitialValues::row(spec.init, name_key(11, &spec.name), id).fill(0, &mut values);
            values.into_iter().map(f64::from).collect()
        })
    }

    fn push(&mut self, job: &Job, partition: u32, batch: BatchId) -> Outcome {
        if self.applied.contains(&batch) {
            return Outcome::Already;
        }
        let Mode::Sync { grads_to_wait } = job.mode else {
            self.step(job, partition, &[batch]);
            return Outcome::Applied;
        };
        let round_of = |batch: BatchId| {
            let per_epoch = job.n_batches.div_ceil(grads_to_wait);
            u64::from(batch.epoch * per_epoch + batch.index / grads_to_wait)
        };
        let all = (0..4).flat_map(|epoch| (0..job.n_batches).map(move |index| (epoch, index)));
        let all: Vec<BatchId> = all.map(|(epoch, index)| BatchId { epoch, index }).collect();
        let next = |applied: &BTreeSet<BatchId>| {
            all.iter().filter(|b| !applied.contains(b)).map(|b| round_of(*b)).min().unwrap()
        };
        let (round, first) = (round_of(batch), next(&self.applied));
        if round >= first + 4 {
            return Outcome::Refused(Refusal::TooEarly { batch, round, next: first }.to_string());
        }
        self.staged.insert(batch);
        let mut done = Vec::new();
        loop {
            let round = next(&self.applied);
            let members: Vec<BatchId> =
                all.iter().copied().filter(|b| round_of(*b) == round).collect();
            if !members.iter().all(|b| self.staged.contains(b)) {
                break;
            }
            self.step(job, partition, &members);
            members.iter().for_each(|b| assert!(self.staged.remove(b)));
            done.extend(members);
        }
        if done.is_empty() { Outcome::Staged } else { Outcome::Round(done) }
    }

    /// One step of SGD by the mean over records.
    fn step(&mut self, job: &Job, partition: u32, batches: &[BatchId]) {
        let (rate, decay) = (job.optimizer.rate(self.version), job.optimizer.weight_decay);
        let parts: Vec<Part> = batches.iter().map(|batch| job.gradient(*batch)).collect();
        let total: f64 = parts.iter().map(|part| f64::from(part.n_records)).sum();
        let segment = job.layout().segment(PartitionId(partition));
        let rules = job.model.params.iter().flat_map(|p| std::iter::repeat_n(p.rule, p.len()));
        let rules: Vec<Rule> = rules.collect();
        for (weight, place) in self.dense.iter_mut().zip(segment) {
            let weighted = |part: &Part| f64::from(part.n_records) * f64::from(part.dense[place]);
            let mean = parts.iter().map(weighted).sum::<f64>() / total;
            match rules[place] {
                Rule::Trainable { decay: true } => *weight -= rate * (mean + decay * *weight),
                Rule::Trainable { decay: false } => *weight -= rate * mean,
                Rule::MovingAverage => *weight += mean,
            }
        }
        let mut sums: BTreeMap<(usize, u64), Vec<f64>> = BTreeMap::new();
        for part in &parts {
            for (table, rows) in part.rows.iter().enumerate() {
                let own = |id: &u64| job.layout().partition_of(*id).0 == partition;
                for (id, row) in rows.iter().filter(|(id, _)| own(id)) {
                    let sum = sums.entry((table, *id)).or_insert_with(|| vec![0.0; row.len()]);
                    for (sum, number) in sum.iter_mut().zip(row) {
                        *sum += f64::from(part.n_records) * f64::from(*number) / total;
                    }
                }
            }
        }
        for ((table, id), mean) in sums {
            for (weight, mean) in self.row(job, table, id).iter_mut().zip(mean) {
                *weight -= rate * (mean + decay * *weight);
            }
        }
        self.version += 1;
        self.applied.extend(batches);
    }

    fn expect_equals(&self, job: &Job, partition: &Partition) {
        let close = |a: &f32, b: &f64| (f64::from(*a) - b).abs() <= 1e-4 * b.abs().max(1.0);
        assert!(partition.dense().iter().zip(&self.dense).all(|(a, b)| close(a, b)));
        assert_eq!(partition.n_rows(), self.rows.len() as u64);
        for ((table, id), row) in &self.rows {
            let mut out = vec![0.0; row.len()];
            partition.peek(*table, &[*id], &mut out);
            assert!(out.iter().zip(row).all(|(a, b)| close(a, b)), "{out:?} is not {row:?}");
        }
        assert_eq!(partition.updates(), self.applied.len() as u64);
        assert_eq!(partition.version(), self.version);
        assert_eq!(partition.n_staged(), self.staged.len());
        let all = (0..3).flat_map(|epoch| (0..job.n_batches).map(move |index| (epoch, index)));
        for batch in all.map(|(epoch, index)| BatchId { epoch, index }) {
            assert_eq!(partition.applied().contains(batch), self.applied.contains(&batch));
        }
    }
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = (0..N_PARTITIONS).prop_flat_map(|partition| {
        let batch = (0..3u32, 0..7u32).prop_map(|(epoch, index)| BatchId { epoch, index });
        let early = (0..7u32).prop_map(|index| BatchId { epoch: 0, index });
        prop_oneof![
            6 => batch.prop_map(move |batch| Op::Push { partition, batch }),
            6 => early.prop_map(move |batch| Op::Push { partition, batch }),
            2 => proptest::collection::vec(0..12u64, 0..6)
                .prop_map(move |ids| Op::Gather { partition, ids }),
            1 => Just(Op::Copy { partition }),
            1 => Just(Op::Restore { partition }),
        ]
    });
    proptest::collection::vec(op, 1..120)
}

fn mode() -> impl Strategy<Value = Mode> {
    prop_oneof![
        Just(Mode::Async),
        Just(Mode::Bounded { versions: 2 }),
        (1..9u32).prop_map(|grads_to_wait| Mode::Sync { grads_to_wait }),
    ]
}

fn perform(
    job: &Job,
    op: &Op,
    real: &mut [Partition],
    naive: &mut [Naive],
    copies: &mut Copies,
) -> usize {
    match op {
        Op::Push { partition, batch } => {
            let p = *partition as usize;
            let pushed = real[p].push(&job.push(*batch, 0, 0..N_PARTITIONS));
            assert_eq!(pushed, naive[p].push(job, *partition, *batch));
            p
        }
        Op::Gather { partition, ids } => {
            let p = *partition as usize;
            let own = |id: &&u64| job.layout().partition_of(**id).0 == *partition;
            let ids: Vec<u64> = ids.iter().filter(own).copied().collect();
            real[p].gather(0, &ids, &mut vec![0.0; ids.len() * 3]);
            ids.iter().for_each(|id| {
                naive[p].row(job, 0, *id);
            });
            p
        }
        Op::Copy { partition } => {
            let p = *partition as usize;
            copies[p] = (real[p].snapshot(), naive[p].clone());
            copies[p].1.staged.clear();
            p
        }
        Op::Restore { partition } => {
            let p = *partition as usize;
            let mut bytes = Vec::new();
            codec::encode(&copies[p].0, &mut bytes).unwrap();
            let config = job.config(*partition);
            real[p] = Partition::restore(config, &mut bytes.as_slice(), true).unwrap();
            naive[p] = copies[p].1.clone();
            p
        }
    }
}

type Copies = Vec<(Snapshot, Naive)>;

proptest! {
    #[test]
    fn it_equals_a_naive_partition_in_any_order_with_repeats_and_restores(
        mode in mode(),
        ops in ops(),
    ) {
        let job = Job { n_partitions: N_PARTITIONS, ..Job::new(mode) };
        let mut real = job.partitions();
        let mut naive: Vec<_> = (0..N_PARTITIONS).map(|p| Naive::new(&job, p)).collect();
        let mut copies: Copies =
            real.iter().zip(&naive).map(|(real, naive)| (real.snapshot(), naive.clone())).collect();
        for op in &ops {
            let touched = perform(&job, op, &mut real, &mut naive, &mut copies);
            real[touched].check_invariants();
            naive[touched].expect_equals(&job, &real[touched]);
        }
    }
}

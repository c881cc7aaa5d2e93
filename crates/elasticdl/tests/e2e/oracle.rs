// SPDX-License-Identifier: Apache-2.0
//! The expected result of a job with the `count` model, computed without the code under test.
//!
//! If every batch is a separate step, each record counts once per epoch, in any order.
//! If several batches or lanes form a step, the weight of a record is its part's share of the
//! step's records. This depends on the order of the records in an epoch, which this file implements
//! a second time, by brute force: consecutive records form shards, the full shards are shuffled,
//! and so are the records of each shard; a batch is the next records of its shard.

use crate::harness::{Home, N_RECORDS, counts};

/// The settings that determine the order of a job's records.
pub(crate) struct RecordPlan {
    version: u64,
    seed: u64,
    minibatch: usize,
    shard: usize,
    is_shuffled: bool,
}

impl RecordPlan {
    /// The plan of a job whose batches have `n_lanes` lanes.
    pub(crate) fn of(home: &Home, name: &str, n_lanes: usize) -> Self {
        let text = std::fs::read(home.job_dir(name).join("job.json")).expect("a job description");
        let spec: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
        let number = |field: &str| spec[field].as_u64().expect(field);
        let size = |field: &str| usize::try_from(number(field)).expect("a small number");
        let minibatch = size("minibatch_size") * n_lanes;
        Self {
            // Jobs from before there were versions have no such field.
            version: spec["batch_plan"].as_u64().unwrap_or(1),
            seed: number("seed"),
            minibatch,
            shard: minibatch * size("num_minibatches_per_task"),
            is_shuffled: spec["shuffle"].as_bool().expect("shuffle"),
        }
    }

    /// All records of an epoch in training order, by batch.
    pub(crate) fn batches(&self, epoch: u64) -> Vec<Vec<u64>> {
        let records: Vec<u64> = (0..N_RECORDS).collect();
        let mut shards: Vec<Vec<u64>> = records.chunks(self.shard).map(<[u64]>::to_vec).collect();
        if self.is_shuffled {
            // A short shard at the end stays there.
            let n_full = shards.iter().take_while(|shard| shard.len() == self.shard).count();
            let mut full: Vec<Vec<u64>> = shards.drain(..n_full).collect();
            self.reorder(&mut full, &[self.seed, 1, epoch]);
            shards.splice(0..0, full);
            for shard in &mut shards {
                let first = shard[0];
                self.reorder(shard, &[self.seed, 2, epoch, first]);
            }
        }
        let of_shard = |shard: Vec<u64>| -> Vec<Vec<u64>> {
            shard.chunks(self.minibatch).map(<[u64]>::to_vec).collect()
        };
        shards.into_iter().flat_map(of_shard).collect()
    }

    fn reorder<T: Clone>(&self, items: &mut Vec<T>, words: &[u64]) {
        let seed = keyed(words);
        match self.version {
            1 => shuffle(items, seed),
            2 if !items.is_empty() => {
                let order = computed_order(items.len() as u64, seed);
                *items = order.into_iter().map(|place| items[place].clone()).collect();
            }
            2 => {}
            version => panic!("unknown version {version} of the plan"),
        }
    }
}

/// The numbers below `n` as version 2 orders them: all pairs of halves go through the rounds of a
/// Feistel network, and values beyond `n` go through the network again, with a table.
fn computed_order(n: u64, seed: u64) -> Vec<usize> {
    let small = |number: u64| usize::try_from(number).expect("a small number");
    let n_high = (1..).find(|side| side * side >= n).expect("a root");
    let n_low = n.div_ceil(n_high);
    let distance = |round: u64, half: u64, n: u64| {
        let product = u128::from(hash(keyed(&[seed, round]) ^ half)) * u128::from(n);
        u64::try_from(product >> 64).expect("below n")
    };
    let after: Vec<u64> = (0..n_high * n_low)
        .map(|pair| {
            let (mut high, mut low) = (pair / n_low, pair % n_low);
            for round in (0..12).step_by(2) {
                high = (high + distance(round, low, n_high)) % n_high;
                low = (low + distance(round + 1, high, n_low)) % n_low;
            }
            high * n_low + low
        })
        .collect();
    let number_at = |place: u64| {
        let mut number = after[small(place)];
        while number >= n {
            number = after[small(number)];
        }
        small(number)
    };
    (0..n).map(number_at).collect()
}

/// Hashes several words into one.
fn keyed(words: &[u64]) -> u64 {
    words.iter().fold(0x5851_f42d_4c95_7f2d, |state, word| hash(state ^ hash(*word)))
}

/// Fisher–Yates shuffle, from the last position to the second.
fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut n_drawn = 0_u64;
    for last in (1..items.len()).rev() {
        let limit = last as u128 + 1;
        // Words whose low half falls below the remainder of 2^64 would favour some positions.
        let unfair = (1_u128 << 64) % limit;
        let place = loop {
            let word = hash(seed.wrapping_add(n_drawn.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            n_drawn += 1;
            let product = u128::from(word) * limit;
            if product % (1 << 64) >= unfair {
                break usize::try_from(product >> 64).expect("a position");
            }
        };
        items.swap(last, place);
    }
}

/// The output function of SplitMix64.
fn hash(word: u64) -> u64 {
    let steps = [(30, 0xbf58_476d_1ce4_e5b9), (27, 0x94d0_49bb_1331_11eb), (31, 1_u64)];
    let start = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    steps.iter().fold(start, |word, (shift, factor)| (word ^ (word >> shift)).wrapping_mul(*factor))
}

/// How the parts of a step are weighted.
#[derive(Clone, Copy)]
pub(crate) enum Step {
    /// This many batches form one step.
    Round(usize),
    /// Every batch is one step with this many lanes.
    Lanes(usize),
}

/// The parts of each step of an epoch, with their records.
fn steps(plan: &RecordPlan, epoch: u64, step: Step) -> Vec<Vec<Vec<u64>>> {
    let batches = plan.batches(epoch);
    match step {
        Step::Round(n) => batches.chunks(n).map(<[Vec<u64>]>::to_vec).collect(),
        Step::Lanes(n) => batches.iter().map(|batch| lanes(batch, n)).collect(),
    }
}

/// Splits a batch into lanes of equal size; a short one into as many lanes as get two records
/// each.
fn lanes(batch: &[u64], n_lanes: usize) -> Vec<Vec<u64>> {
    let n_lanes = n_lanes.min((batch.len() / 2).max(1));
    let mut all = Vec::new();
    let mut start = 0;
    for lane in 1..=n_lanes {
        let end = batch.len() * lane / n_lanes;
        all.push(batch[start..end].to_vec());
        start = end;
    }
    all
}

/// The expected weight of each record, and their total.
fn expected(plan: &RecordPlan, epochs: u32, step: Step) -> (Vec<f64>, f64) {
    let n_records = usize::try_from(N_RECORDS).expect("a small set");
    if let Step::Round(1) = step {
        return (vec![f64::from(epochs); n_records], f64::from(epochs) * n_records as f64);
    }
    let (mut rows, mut total) = (vec![0.0; n_records], 0.0);
    for parts in (0..epochs).flat_map(|epoch| steps(plan, u64::from(epoch), step)) {
        let n = parts.iter().map(Vec::len).sum::<usize>() as f64;
        for part in parts {
            let share = part.len() as f64 / n;
            total += part.len() as f64 * share;
            part.iter().for_each(|record| rows[usize::try_from(*record).expect("small")] += share);
        }
    }
    (rows, total)
}

/// Asserts that the exported model counts every record once per epoch.
pub(crate) fn assert_counted(home: &Home, name: &str, epochs: u32, step: Step) {
    let n_lanes = if let Step::Lanes(n) = step { n } else { 1 };
    let (expected_rows, expected_total) =
        expected(&RecordPlan::of(home, name, n_lanes), epochs, step);
    let (rows, totals) = counts(&home.job_dir(name).join("output"));
    assert_eq!(rows.len() as u64, N_RECORDS, "every record has a row");
    let is_wrong = |(id, n): &&(i64, f32)| {
        let expected = expected_rows[usize::try_from(*id).expect("a record")];
        (f64::from(*n) - expected).abs() > 1e-3
    };
    let wrong: Vec<_> = rows.iter().filter(is_wrong).collect();
    let some = &wrong[..wrong.len().min(5)];
    assert!(wrong.is_empty(), "{} records were not trained {epochs} times: {some:?}", wrong.len());
    let is_right = |total: &f32| (f64::from(*total) - expected_total).abs() < 0.5;
    assert!(totals.iter().all(is_right), "dense totals {totals:?}, not {expected_total}");
}

#[test]
fn the_oracle_lists_every_record_once_per_epoch() {
    for (version, epoch) in [(1, 0), (1, 1), (2, 0), (2, 1)] {
        let plan = RecordPlan { version, seed: 7, minibatch: 9, shard: 36, is_shuffled: true };
        let mut all = plan.batches(epoch).concat();
        assert_ne!(all[..4], [0, 1, 2, 3]);
        all.sort_unstable();
        assert_eq!(all, (0..N_RECORDS).collect::<Vec<_>>());
    }
}

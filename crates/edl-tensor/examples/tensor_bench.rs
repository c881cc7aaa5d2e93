// SPDX-License-Identifier: Apache-2.0
//! How long a checkpoint holds a partition up, against one copy of the same bytes.

#![allow(
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "a program that prints speeds"
)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use edl_core::id::PartitionId;
use edl_core::layout::Layout;
use edl_core::model::{Init, ModelSpec, ParamSpec, Rule, TableSpec};
use edl_core::optimizer::{OptimizerKind, OptimizerSpec};
use edl_core::spec::Mode;
use edl_tensor::partition::{Partition, PartitionConfig};

const DENSE_LEN: usize = 5_000_000;
const N_ROWS: u64 = 500_000;
const DIM: usize = 16;
const ROUNDS: usize = 9;

fn main() {
    let kind = OptimizerKind::Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: false };
    let optimizer = OptimizerSpec::new(kind, 0.001);
    let rule = Rule::Trainable { decay: false };
    let weights = ParamSpec::new("w", vec![DENSE_LEN], Init::Constant(0.1), rule);
    let rows = TableSpec { name: "rows".into(), dim: DIM, init: Init::Constant(0.0) };
    let model = Arc::new(ModelSpec {
        name: "bench".into(),
        params: vec![weights],
        tables: vec![rows],
        inputs: Vec::new(),
        metrics: Vec::new(),
        optimizer: optimizer.clone(),
    });
    let layout = Layout::shared(DENSE_LEN, 1);
    let mut partition = Partition::new(PartitionConfig {
        id: PartitionId(0),
        layout,
        model,
        optimizer,
        seed: 1,
        n_batches: 10,
        mode: Mode::Async,
        lr_staleness_modulation: false,
    });
    let ids: Vec<u64> = (0..N_ROWS).collect();
    partition.gather(0, &ids, &mut vec![0.0; ids.len() * DIM]);
    let mut snapshot = partition.snapshot();
    let n_bytes = usize::try_from(snapshot.n_bytes()).expect("it is in memory");
    let (from, mut to) = (vec![1_u8; n_bytes], vec![0_u8; n_bytes]);
    let (mut pauses, mut copies) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        pauses.push(time(|| partition.snapshot_into(&mut snapshot)));
        copies.push(time(|| to.copy_from_slice(black_box(&from))));
        black_box(&to);
    }
    let (pause, copy) = (median(pauses), median(copies));
    println!(
        "checkpoint pause: {:.1} ms for {} MB, one copy of the same bytes {:.1} ms: {:.2}x (target <= 1.5x)",
        pause * 1e3,
        n_bytes >> 20,
        copy * 1e3,
        pause / copy
    );
}

fn time<T>(work: impl FnOnce() -> T) -> f64 {
    let start = Instant::now();
    black_box(work());
    start.elapsed().as_secs_f64()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

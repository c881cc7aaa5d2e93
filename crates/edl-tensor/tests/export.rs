// SPDX-License-Identifier: Apache-2.0
//! The memory that an export takes; `src/checkpoint/tests.rs` looks at what it writes. Memory is
//! that of the whole process, so this is the only test of its binary.
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use edl_core::metric::Metric;
use edl_core::model::{Init, ModelSpec, ParamSpec, Rule, TableSpec};
use edl_core::optimizer::OptimizerSpec;
use edl_tensor::export::{Card, export};
use edl_tensor::import::{CARD, ExportedModel, WEIGHTS};

const N_DENSE: usize = 8 << 20;
const N_ROWS: usize = 400_000;
const DIM: usize = 14;
const MB: usize = 1 << 20;

/// The most memory that this process had since `forget_peak`.
fn peak() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

fn forget_peak() -> bool {
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// The files of an exported model, all of whose parameters are 0.
fn write_model(folder: &Path) {
    let init = Init::Constant(0.0);
    let rule = Rule::Trainable { decay: false };
    let model = ModelSpec {
        name: "large".into(),
        params: vec![ParamSpec {
            name: "w".into(),
            shape: vec![N_DENSE],
            init,
            rule,
            is_double: false,
        }],
        tables: vec![TableSpec { name: "t".into(), dim: DIM, init }],
        inputs: Vec::new(),
        metrics: vec![Metric::mse()],
        optimizer: OptimizerSpec::sgd(0.1),
    };
    let card = Card { job: "large".into(), version: 1, metrics: BTreeMap::new(), model };
    fs::write(folder.join(CARD), serde_json::to_vec(&card).unwrap()).unwrap();
    let ids: Vec<u8> = (0..N_ROWS as u64).flat_map(u64::to_le_bytes).collect();
    let (n_ids, n_dense, n_rows) = (ids.len(), N_DENSE * 4, N_ROWS * DIM * 4);
    let (dense_end, end) = (n_ids + n_dense, n_ids + n_dense + n_rows);
    let header = format!(
        r#"{{"t.ids":{{"dtype":"I64","shape":[{N_ROWS}],"data_offsets":[0,{n_ids}]}},
            "w":{{"dtype":"F32","shape":[{N_DENSE}],"data_offsets":[{n_ids},{dense_end}]}},
            "t.rows":{{"dtype":"F32","shape":[{N_ROWS},{DIM}],"data_offsets":[{dense_end},{end}]}}}}"#
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.into_bytes());
    bytes.extend(ids);
    bytes.resize(bytes.len() + n_dense + n_rows, 0);
    fs::write(folder.join(WEIGHTS), bytes).unwrap();
}

#[test]
fn an_export_takes_the_memory_of_one_partition_not_of_the_model() {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path());
    let model = ExportedModel::open(&folder.path().join(WEIGHTS)).unwrap();
    let checkpoint = folder.path().join("checkpoint");
    model.write_checkpoint(&checkpoint, 16).unwrap();
    if !forget_peak() {
        println!("skipped: the kernel does not forget the most memory that a process had");
        return;
    }
    let before = peak();
    let output = folder.path().join("output");
    export(&checkpoint, &output, &BTreeMap::new(), &|_| {}).unwrap();
    let taken = peak() - before;
    let written = fs::metadata(output.join(WEIGHTS)).unwrap().len();
    assert!(written > 50 * MB as u64, "{written} bytes");
    assert!(taken < 20 * MB, "{} MB", taken / MB);
}

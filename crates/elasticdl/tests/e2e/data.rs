// SPDX-License-Identifier: Apache-2.0
//! The `data` commands.

use std::path::Path;

use edl_core::model::{DType, FieldSpec};
use edl_data::{Dataset, OpenOptions};
use serde_json::Value;

use crate::harness::{Home, N_RECORDS, shipped};

fn inspect(home: &Home, data: &str) -> Value {
    serde_json::from_str(&home.stdout(&["data", "inspect", data, "--json"])).expect("JSON")
}

/// Writes the first 300 shipped records of a part as IDX files, the format of the original data.
fn write_idx(folder: &Path, prefix: &str, part: &str) {
    const N: u32 = 300;
    let field = |name: &str, dtype, shape: &[usize]| FieldSpec {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        is_label: false,
    };
    let fields = [field("image", DType::U8, &[28, 28]), field("label", DType::I64, &[])];
    let dataset = Dataset::open(&shipped(part), &OpenOptions::default()).expect("shipped data");
    let records: Vec<u64> = (0..u64::from(N)).collect();
    let batch = dataset.batch(&records, &fields).expect("records");
    let labels = batch.i64("label").expect("labels").iter();
    let labels: Vec<u8> = labels.map(|label| u8::try_from(*label).expect("a class")).collect();
    let pixels = batch.u8("image").expect("pixels");
    for (kind, sizes, values) in
        [("images-idx3", &[N, 28, 28][..], pixels), ("labels-idx1", &[N][..], &labels)]
    {
        let rank = u8::try_from(sizes.len()).expect("small");
        let mut bytes = vec![0, 0, 8, rank];
        bytes.extend(sizes.iter().flat_map(|size| size.to_be_bytes()));
        bytes.extend(values);
        std::fs::write(folder.join(format!("{prefix}-{kind}-ubyte")), bytes).expect("a file");
    }
}

#[test]
fn gen_writes_the_layout_that_examples_use() {
    let home = Home::new();
    let place = home.path().join("sets");
    let place = place.to_str().expect("text");
    write_idx(home.path(), "train", "train");
    write_idx(home.path(), "t10k", "test");
    let source = format!("--source={}", home.path().display());
    let limits = ["--limit=300", "--test_limit=100", "--files=2", &source];
    home.stdout(&[&["data", "gen", "fashion_mnist", place], limits.as_slice()].concat());
    for (part, n_records) in [("train", 300), ("test", 100)] {
        let summary = inspect(&home, &format!("{place}/fashion_mnist/{part}"));
        assert_eq!(
            (&summary["records"], &summary["format"]),
            (&n_records.into(), &"recordio".into())
        );
        assert_eq!(summary["files"].as_array().map(Vec::len), Some(2));
    }
    // The shipped data is a subset with the same first records.
    let generated = format!("{place}/fashion_mnist/test");
    let head = |data: &str| home.stdout(&["data", "head", data, "-n", "20"]);
    assert_eq!(head(&generated), head(&shipped("test")));
    let training = format!("--training_data={place}/fashion_mnist/train");
    home.train("on-it", &["--model_def=mnist_mlp", &training, "--num_workers=1"]);
    assert_eq!(home.status("on-it")["records_done"], 300);
}

#[test]
fn inspect_and_head_show_the_shipped_data() {
    let home = Home::new();
    let data = shipped("test");
    let summary = inspect(&home, &data);
    assert_eq!(summary["records"], N_RECORDS);
    let table = home.stdout(&["data", "inspect", &data]);
    assert!(table.contains("records      2,000") && table.contains("image"), "{table}");
    let head = home.stdout(&["data", "head", &data, "-n", "5"]);
    let labels: Vec<Value> = head
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON")["label"].clone())
        .collect();
    // The first labels of Fashion-MNIST's test set.
    assert_eq!(labels, [9, 2, 1, 1, 6]);
}

#[test]
fn import_converts_a_table_to_records_in_order() {
    let home = Home::new();
    let table = home.path().join("people.csv");
    let rows: String = (0..50).map(|n| format!("{n},\"name, {n}\"\n")).collect();
    std::fs::write(&table, format!("age,name\n{rows}")).expect("a file");
    let records = home.path().join("records");
    let (table, records) = (table.to_str().expect("text"), records.to_str().expect("text"));
    let printed =
        home.stdout(&["data", "import", table, records, "--files=3", "--compression=snappy"]);
    assert!(printed.contains("50 records in 3 files"), "{printed}");
    assert_eq!(inspect(&home, records)["records"], 50);
    let head = home.stdout(&["data", "head", records, "-n", "50"]);
    for (n, line) in head.lines().enumerate() {
        let record: Value = serde_json::from_str(line).expect("JSON");
        assert_eq!((&record["age"], &record["name"]), (&n.into(), &format!("name, {n}").into()));
    }
    assert_eq!(head.lines().count(), 50);
    let again = home.run(&["data", "import", table, records]);
    assert_eq!(again.status.code(), Some(2), "data is not overwritten");
}

// SPDX-License-Identifier: Apache-2.0
//! The data that the repository ships are what its README says.
#![expect(clippy::unwrap_used, reason = "helpers of tests may fail, too")]

use std::path::Path;

use edl_core::model::{DType, FieldSpec};
use edl_data::idx::{Idx, IdxValues};
use edl_data::{Dataset, OpenOptions};

fn open(split: &str) -> Dataset {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fashion_mnist").join(split);
    Dataset::open(folder.to_str().unwrap(), &OpenOptions::default()).unwrap()
}

/// All pixels and labels, the chunks' checksums verified on the way.
fn content(dataset: &Dataset) -> (Vec<u8>, Vec<i64>) {
    let fields = [
        FieldSpec { name: "image".into(), dtype: DType::U8, shape: vec![28, 28], is_label: false },
        FieldSpec { name: "label".into(), dtype: DType::I64, shape: vec![], is_label: false },
    ];
    dataset.check(&fields).unwrap();
    let records: Vec<u64> = (0..dataset.n_records()).collect();
    let batch = dataset.batch(&records, &fields).unwrap();
    (batch.u8("image").unwrap().to_vec(), batch.i64("label").unwrap().to_vec())
}

#[test]
fn the_shipped_subset_is_whole_and_balanced() {
    for (split, n) in [("train", 10_000), ("test", 2_000)] {
        let dataset = open(split);
        assert_eq!(dataset.n_records(), n);
        let (_, labels) = content(&dataset);
        for class in 0..10 {
            let share = labels.iter().filter(|label| **label == class).count() * 100;
            let share = share / labels.len();
            assert!((8..=12).contains(&share), "{split}: class {class} has {share} %");
        }
    }
}

#[test]
fn the_shipped_subset_equals_the_package() {
    let package = Path::new("/usr/share/datasets/fashion-mnist");
    if !package.is_dir() {
        println!("skipped: Debian's dataset-fashion-mnist is not installed");
        return;
    }
    for (split, prefix) in [("train", "train"), ("test", "t10k")] {
        let read = |file: &str| {
            let idx = Idx::read(&package.join(format!("{prefix}-{file}-ubyte.gz"))).unwrap();
            let IdxValues::U8(values) = idx.values else { panic!("bytes") };
            values
        };
        let (pixels, labels) = content(&open(split));
        assert!(read("images-idx3").starts_with(&pixels));
        let labels: Vec<u8> = labels.iter().map(|label| u8::try_from(*label).unwrap()).collect();
        assert!(read("labels-idx1").starts_with(&labels));
    }
}

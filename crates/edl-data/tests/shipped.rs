// SPDX-License-Identifier: Apache-2.0
//! The data shipped with the repository matches its README.
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::path::Path;

use edl_core::model::{DType, FieldSpec};
use edl_data::{Dataset, OpenOptions};
use sha2::{Digest as _, Sha256};

/// By split: the SHA-256 of all pixels and of all labels (a byte each) in the first 10,000 and
/// 2,000 records of Debian's package `dataset-fashion-mnist`.
const ORIGINAL: [(&str, &str, &str); 2] = [
    (
        "train",
        "2929ae1c7b89e0ee6587bbe4911fd5f0a5dafe21ae6ed9b737173cbfe20c12c9",
        "1022e4632874e71bb84d924c475e6a3428a2deeb8c5a0f612a015c97e4fce7f0",
    ),
    (
        "test",
        "09bbac78738f0229a68f7ca74e62665d7fb34f45ea7a3509ab5c4a202c1370de",
        "a86243d2b2400909bc0a82f5fd5c9df83bf827852a1543e3dc70af890035a9d4",
    ),
];

fn open(split: &str) -> Dataset {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fashion_mnist").join(split);
    Dataset::open(folder.to_str().unwrap(), &OpenOptions::default()).unwrap()
}

/// All pixels and labels; this also verifies the checksums of the chunks.
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
fn the_shipped_subset_is_complete_and_balanced() {
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
    let digest = |bytes: &[u8]| {
        let digest = Sha256::digest(bytes);
        digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    for (split, of_pixels, of_labels) in ORIGINAL {
        let (pixels, labels) = content(&open(split));
        let labels: Vec<u8> = labels.iter().map(|label| u8::try_from(*label).unwrap()).collect();
        assert_eq!(digest(&pixels), of_pixels, "{split}");
        assert_eq!(digest(&labels), of_labels, "{split}");
    }
}

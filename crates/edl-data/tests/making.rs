// SPDX-License-Identifier: Apache-2.0
//! Creating datasets: imports, the datasets of the examples, summaries and first records.
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::path::Path;

use edl_core::model::{DType, FieldSpec};
use edl_data::example::Example;
use edl_data::generate::{GenerateOptions, Set, generate};
use edl_data::import::{self, ImportOptions};
use edl_data::{Codec, Dataset, OpenOptions, head, inspect};
use expect_test::expect;
use flate2::write::GzEncoder;

fn open(path: &Path) -> Dataset {
    Dataset::open(path.to_str().unwrap(), &OpenOptions::default()).unwrap()
}

fn field(name: &str, dtype: DType, shape: &[usize]) -> FieldSpec {
    FieldSpec { name: name.into(), dtype, shape: shape.to_vec(), is_label: false }
}

/// Writes MNIST-like files with `n` images of 2×2 pixels; the training files are compressed.
fn write_idx(dir: &Path, n: u8) {
    for prefix in ["train", "t10k"] {
        let mut images = vec![0, 0, 8, 3, 0, 0, 0, n, 0, 0, 0, 2, 0, 0, 0, 2];
        images.extend((0..n).flat_map(|i| [i; 4]));
        let mut labels = vec![0, 0, 8, 1, 0, 0, 0, n];
        labels.extend((0..n).map(|i| i % 10));
        for (name, bytes) in [("images-idx3", images), ("labels-idx1", labels)] {
            let path = dir.join(format!("{prefix}-{name}-ubyte"));
            if prefix == "t10k" {
                std::fs::write(path, bytes).unwrap();
                continue;
            }
            let mut packer = GzEncoder::new(Vec::new(), flate2::Compression::fast());
            std::io::Write::write_all(&mut packer, &bytes).unwrap();
            std::fs::write(path.with_extension("gz"), packer.finish().unwrap()).unwrap();
        }
    }
}

#[test]
fn idx_files_are_converted_to_records_in_several_files() {
    let (raw, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_idx(raw.path(), 11);
    let options = GenerateOptions { source: Some(raw.path().into()), ..Default::default() };
    let written = generate(Set::Mnist, out.path(), &options).unwrap();
    assert_eq!(
        written.iter().map(|split| (split.files, split.records)).collect::<Vec<_>>(),
        [(4, 11); 2]
    );
    for split in ["train", "test"] {
        let dataset = open(&out.path().join("mnist").join(split));
        assert_eq!(dataset.n_records(), 11);
        let fields = [field("image", DType::U8, &[2, 2]), field("label", DType::I64, &[])];
        let batch = dataset.batch(&[10, 3], &fields).unwrap();
        assert_eq!(batch.u8("image").unwrap(), [10, 10, 10, 10, 3, 3, 3, 3]);
        assert_eq!(batch.i64("label").unwrap(), [0, 3]);
    }
    let again = generate(Set::Mnist, out.path(), &options).unwrap_err().to_string();
    assert!(again.contains("already contains data files; remove them"), "{again}");
}

#[test]
fn images_without_labels_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    write_idx(dir.path(), 3);
    let images = dir.path().join("t10k-images-idx3-ubyte");
    let labels = dir.path().join("labels");
    std::fs::write(&labels, [0, 0, 8, 1, 0, 0, 0, 2, 1, 2]).unwrap();
    let out = dir.path().join("out");
    let error = import::idx(&images, &labels, &out, &ImportOptions::default()).unwrap_err();
    assert!(error.to_string().ends_with("there are 3 images, but 2 labels"), "{error}");
    let options = GenerateOptions { source: Some(dir.path().join("out")), ..Default::default() };
    let error = generate(Set::FashionMnist, dir.path(), &options).unwrap_err().to_string();
    assert!(error.contains("train-images-idx3-ubyte.gz"), "{error}");
}

#[test]
fn a_table_is_converted_to_typed_records() {
    let dir = tempfile::tempdir().unwrap();
    let csv = dir.path().join("people.csv");
    std::fs::write(&csv, "age,height,name,gone\n41,1.8,Jo,\n7,2,\"Eve, A\",\n,1e0,,\n").unwrap();
    let out = dir.path().join("out");
    let options = ImportOptions { files: 2, ..Default::default() };
    let written =
        import::table(csv.to_str().unwrap(), &OpenOptions::default(), &out, &options).unwrap();
    assert_eq!((written.files, written.records), (2, 3));
    let dataset = open(&out);
    let record = |n| Example::parse(dataset.raw(n).unwrap().unwrap()).unwrap();
    let first = Example::new().ints("age", [41]).floats("height", [1.8]).bytes("name", "Jo");
    assert_eq!(record(0), first);
    assert_eq!(record(2), Example::new().floats("height", [1.0]).bytes("name", ""));

    // Records are copied unchanged, no matter what they contain.
    let copy = dir.path().join("copy");
    let bytes = OpenOptions { codec: Codec::Bytes, ..Default::default() };
    import::table(out.to_str().unwrap(), &bytes, &copy, &options).unwrap();
    assert_eq!(open(&copy).raw(1).unwrap(), dataset.raw(1).unwrap());
}

#[test]
fn the_summary_and_the_first_records_are_readable() {
    let dir = tempfile::tempdir().unwrap();
    write_idx(dir.path(), 3);
    let file = |name: &str| dir.path().join(format!("t10k-{name}-ubyte"));
    let out = dir.path().join("out");
    import::idx(&file("images-idx3"), &file("labels-idx1"), &out, &ImportOptions::default())
        .unwrap();
    let location = out.to_str().unwrap();
    let summary = inspect(location, &OpenOptions::default()).unwrap();
    assert_eq!(summary.fingerprint, open(&out).fingerprint());
    let mut summary = serde_json::to_value(summary).unwrap();
    for (key, value) in summary.as_object_mut().unwrap() {
        if ["location", "fingerprint", "bytes", "files"].contains(&key.as_str()) {
            *value = serde_json::Value::Null; // Depends on the path or the compressor's version.
        }
    }
    expect![[r#"{"bytes":null,"compressor":"gzip","fields":[{"max_len":4,"min_len":4,"name":"image","present":3,"type":"bytes"},{"max_len":1,"min_len":1,"name":"label","present":3,"type":"int64"}],"files":null,"fingerprint":null,"format":"recordio","location":null,"records":3}"#]]
        .assert_eq(&summary.to_string());
    let shown = head(location, 2, &OpenOptions::default()).unwrap();
    let shown: Vec<String> = shown.iter().map(ToString::to_string).collect();
    expect![[r#"{"image":"<4 bytes: 00 00 00 00>","label":0}
{"image":"<4 bytes: 01 01 01 01>","label":1}"#]]
    .assert_eq(&shown.join("\n"));
}

#[test]
fn unknown_datasets_are_refused_by_name() {
    let error = "cifar".parse::<Set>().unwrap_err().to_string();
    assert_eq!(error, "unknown dataset `cifar`; use one of mnist, fashion_mnist, census");
}

// SPDX-License-Identifier: Apache-2.0
//! Parquet tables as columns, and errors for damaged ones.
#![cfg(feature = "parquet")]
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use edl_core::model::{DType, FieldSpec};
use edl_data::generate::{GenerateOptions, Set, generate};
use edl_data::{Dataset, Error, OpenOptions, inspect};
use edl_tensor::batch::Batch;
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{
    BoolType, ByteArray, ByteArrayType, DoubleType, FloatType, Int32Type, Int64Type,
};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

const SCHEMA: &str = "message table {
    required int64 id;
    optional float score;
    required double wide;
    required int32 small (UINT_32);
    required int64 price (DECIMAL(9, 2));
    optional binary word (UTF8);
    required boolean flag;
    optional group pixels (LIST) { repeated group list { optional int32 element; } }
}";

/// Two row groups of three rows; in row 4, one pixel is missing, and in row 5, all pixels are.
fn write(path: &Path, compression: Compression) {
    let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
    let properties = WriterProperties::builder().set_compression(compression).build();
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    for group in 0..2_i64 {
        let mut rows = writer.next_row_group().unwrap();
        macro_rules! column {
            ($type:ty, $values:expr, $defs:expr, $reps:expr) => {{
                let mut column = rows.next_column().unwrap().unwrap();
                column.typed::<$type>().write_batch($values, $defs, $reps).unwrap();
                column.close().unwrap();
            }};
        }
        let base = group * 3;
        column!(Int64Type, &[base, base + 1, base + 2], None, None);
        column!(FloatType, &[0.5, 2.5], Some(&[1, 0, 1]), None);
        column!(DoubleType, &[1e-3, 1e3, 0.25], None, None);
        column!(Int32Type, &[-1, 0, 7], None, None);
        column!(Int64Type, &[1999, -5, 0], None, None);
        column!(
            ByteArrayType,
            &[ByteArray::from("red"), ByteArray::from("blue")],
            Some(&[1, 1, 0]),
            None
        );
        column!(BoolType, &[true, false, true], None, None);
        if group == 0 {
            column!(Int32Type, &[1, 2, 3, 4, 5, 6], Some(&[3; 6]), Some(&[0, 1, 0, 1, 0, 1]));
        } else {
            column!(Int32Type, &[7, 8, 9], Some(&[3, 3, 3, 2, 0]), Some(&[0, 1, 0, 1, 0]));
        }
        rows.close().unwrap();
    }
    writer.close().unwrap();
}

fn field(name: &str, dtype: DType, shape: &[usize]) -> FieldSpec {
    FieldSpec { name: name.into(), dtype, shape: shape.to_vec(), is_label: false }
}

fn open(path: &Path) -> Result<Dataset, Error> {
    Dataset::open(path.to_str().unwrap(), &OpenOptions::default())
}

fn columns(dataset: &Dataset, records: &[u64], fields: &[FieldSpec]) -> Result<Batch, Error> {
    dataset.batch(records, fields)
}

#[test]
fn columns_of_every_type_are_read_from_every_row_group() {
    let dir = tempfile::tempdir().unwrap();
    let packers = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(Default::default()),
        Compression::BROTLI(Default::default()),
        Compression::ZSTD(ZstdLevel::default()),
    ];
    for (number, packer) in packers.into_iter().enumerate() {
        let path = dir.path().join(format!("{number}.parquet"));
        write(&path, packer);
        let dataset = open(&path).unwrap();
        assert_eq!(dataset.n_records(), 6);
        let fields = [
            field("id", DType::I64, &[]),
            field("wide", DType::F32, &[]),
            field("small", DType::I64, &[]),
            field("price", DType::F32, &[]),
            field("word", DType::Bytes, &[]),
            field("flag", DType::U8, &[]),
        ];
        let batch = columns(&dataset, &[5, 0, 1, 2], &fields).unwrap();
        assert_eq!(batch.i64("id").unwrap(), [5, 0, 1, 2]);
        assert_eq!(batch.f32("wide").unwrap(), [0.25, 1e-3, 1e3, 0.25]);
        assert_eq!(batch.i64("small").unwrap(), [7, i64::from(u32::MAX), 0, 7]);
        assert_eq!(batch.f32("price").unwrap(), [0.0, 19.99, -0.05, 0.0]);
        let words = [&b""[..], b"red", b"blue", b""];
        assert_eq!(batch.bytes("word").unwrap(), words.map(<[u8]>::to_vec));
        assert_eq!(batch.u8("flag").unwrap(), [1, 1, 0, 1]);
        let pixels = [field("pixels", DType::U8, &[2])];
        let batch = columns(&dataset, &[3, 0, 2], &pixels).unwrap();
        assert_eq!(batch.u8("pixels").unwrap(), [7, 8, 1, 2, 5, 6]);
    }
}

#[test]
fn missing_values_and_holes_in_lists_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    write(&path, Compression::SNAPPY);
    let dataset = open(&path).unwrap();
    let error = |record, name, shape: &[usize]| {
        columns(&dataset, &[record], &[field(name, DType::F32, shape)]).unwrap_err().to_string()
    };
    let text = error(4, "score", &[]);
    assert!(text.contains("a.parquet`, row group 1, record 1: field `score`"), "{text}");
    assert!(text.ends_with("the record has no value"), "{text}");
    assert!(error(4, "pixels", &[2]).ends_with("the record has a list with missing values"));
    assert!(error(5, "pixels", &[2]).ends_with("the record has no value"));
    assert!(error(0, "pixels", &[3]).ends_with("the record has 2 integers"));
}

#[test]
fn a_summary_names_columns_and_types() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("a.parquet"), Compression::SNAPPY);
    let summary = inspect(dir.path().to_str().unwrap(), &OpenOptions::default()).unwrap();
    let fields: Vec<(&str, u64)> =
        summary.fields.iter().map(|field| (field.name.as_str(), field.present)).collect();
    let expected = [
        ("id", 6),
        ("score", 4),
        ("wide", 6),
        ("small", 6),
        ("price", 6),
        ("word", 4),
        ("flag", 6),
        ("pixels", 5),
    ];
    assert_eq!(fields, expected);
    assert_eq!(summary.files[0].chunks, 2);
}

#[test]
fn a_damaged_or_truncated_table_is_read_or_refused_without_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    write(&path, Compression::SNAPPY);
    let intact = std::fs::read(&path).unwrap();
    let fields = [field("id", DType::I64, &[]), field("pixels", DType::U8, &[2])];
    let read = |bytes: &[u8]| {
        // Overwriting in place would wait for the disk on some file systems.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        open(&path).and_then(|dataset| columns(&dataset, &[0, 1, 2], &fields)).map(drop)
    };
    for place in 0..intact.len() {
        let mut damaged = intact.clone();
        damaged[place] ^= 0x55;
        drop(read(&damaged));
    }
    for len in 0..intact.len() {
        assert!(read(&intact[..len]).is_err(), "{len} of {} bytes", intact.len());
    }
}

/// A table with the columns of the package; every tenth person has a high income.
fn write_adults(path: &Path, n: i64) {
    const NUMBERS: [&str; 6] =
        ["age", "fnlwgt", "educational-num", "capital-gain", "capital-loss", "hours-per-week"];
    const WORDS: [&str; 9] = [
        "workclass",
        "education",
        "marital-status",
        "occupation",
        "relationship",
        "race",
        "gender",
        "native-country",
        "income",
    ];
    let numbers = NUMBERS.map(|name| format!("required int64 {name};")).concat();
    let words = WORDS.map(|name| format!("required binary {name} (UTF8);")).concat();
    let schema = parse_message_type(&format!("message adult {{ {numbers} {words} }}")).unwrap();
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::default()).unwrap();
    let mut rows = writer.next_row_group().unwrap();
    for _ in NUMBERS {
        let mut column = rows.next_column().unwrap().unwrap();
        let values: Vec<i64> = (0..n).collect();
        column.typed::<Int64Type>().write_batch(&values, None, None).unwrap();
        column.close().unwrap();
    }
    for name in WORDS {
        let mut column = rows.next_column().unwrap().unwrap();
        let word = |person: i64| match (name, person % 10) {
            ("income", 0) => ByteArray::from(">50K"),
            ("income", _) => ByteArray::from("<=50K"),
            _ => ByteArray::from(name),
        };
        let values: Vec<ByteArray> = (0..n).map(word).collect();
        column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
        column.close().unwrap();
    }
    rows.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn the_census_is_split_into_records_with_labels() {
    let dir = tempfile::tempdir().unwrap();
    write_adults(&dir.path().join("adult.parquet.brotli"), 500);
    let options = GenerateOptions { source: Some(dir.path().into()), ..Default::default() };
    let written = generate(Set::Census, dir.path(), &options).unwrap();
    assert_eq!(written.iter().map(|split| split.records).sum::<u64>(), 500);
    let mut people = Vec::new();
    for split in ["train", "test"] {
        let dataset = open(&dir.path().join("census").join(split)).unwrap();
        assert!(dataset.n_records() >= 50, "{split} has too few records");
        let fields = [
            field("age", DType::F32, &[]),
            field("education_num", DType::I64, &[]),
            field("native_country", DType::Bytes, &[]),
            field("label", DType::I64, &[]),
        ];
        let records: Vec<u64> = (0..dataset.n_records()).collect();
        let batch = columns(&dataset, &records, &fields).unwrap();
        assert!(
            batch.bytes("native_country").unwrap().iter().all(|word| word == b"native-country")
        );
        let numbers = batch.i64("education_num").unwrap();
        let labels = batch.i64("label").unwrap();
        assert!(numbers.iter().zip(labels).all(|(n, label)| (n % 10 == 0) == (*label == 1)));
        people.extend_from_slice(numbers);
    }
    people.sort_unstable();
    assert_eq!(people, (0..500).collect::<Vec<_>>(), "every person is in exactly one split");
}

#[test]
fn a_table_that_changes_under_an_open_data_set_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    write(&path, Compression::SNAPPY);
    let dataset = open(&path).unwrap();
    write(&path, Compression::UNCOMPRESSED);
    let error = columns(&dataset, &[0], &[field("id", DType::I64, &[])]).unwrap_err().to_string();
    assert!(error.contains("has changed since"), "{error}");
}

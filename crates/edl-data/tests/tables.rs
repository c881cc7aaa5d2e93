// SPDX-License-Identifier: Apache-2.0
//! CSV, JSON lines, TFRecord and `tf.train.Example` records as columns, and errors for bad ones.
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::path::Path;

use edl_core::model::{DType, FieldSpec};
use edl_data::example::Example;
use edl_data::{
    Codec, Dataset, Error, Format, OpenOptions, Schema, head, import, inspect, schema, tfrecord,
};
use edl_tensor::batch::{Batch, Column};
use proptest::prelude::*;
use tempfile::TempDir;

fn field(name: &str, dtype: DType, shape: &[usize]) -> FieldSpec {
    FieldSpec { name: name.into(), dtype, shape: shape.to_vec(), is_label: false }
}

fn options(params: &[(&str, &str)]) -> OpenOptions {
    let params = params.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
    OpenOptions { codec: Codec::TfExample, params }
}

fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(dir.path().join(name), content).unwrap();
    }
    dir
}

fn open(dir: &Path, params: &[(&str, &str)]) -> Result<Dataset, Error> {
    Dataset::open(dir.to_str().unwrap(), &options(params))
}

fn all(dataset: &Dataset, fields: &[FieldSpec]) -> Result<Batch, Error> {
    dataset.batch(&(0..dataset.n_records()).collect::<Vec<_>>(), fields)
}

fn tfrecords(records: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for record in records {
        tfrecord::write(&mut bytes, record).unwrap();
    }
    bytes
}

/// The error for one requested field of a record with one feature.
fn refusal(example: &Example, requested: &FieldSpec) -> String {
    let dir = folder(&[("a.tfrecord", &tfrecords(&[example.to_bytes()]))]);
    let dataset = open(dir.path(), &[]).unwrap();
    dataset.check(std::slice::from_ref(requested)).unwrap_err().to_string()
}

#[test]
fn csv_cells_are_quoted_typed_and_numbered_through_all_files() {
    let dir = folder(&[
        ("b.csv", b"score,name,age\n0.5,Eve,3\n"),
        ("a.csv", b"name,age,score\r\n\"Doe, \"\"Jo\"\"\nJunior\",41, 1.5\r\n,-2,1e3\r\n"),
    ]);
    let dataset = open(dir.path(), &[]).unwrap();
    let fields = [
        field("name", DType::Bytes, &[]),
        field("age", DType::I64, &[]),
        field("score", DType::F32, &[]),
    ];
    let batch = all(&dataset, &fields).unwrap();
    let names: Vec<&[u8]> = batch.bytes("name").unwrap().iter().map(Vec::as_slice).collect();
    assert_eq!(names, [b"Doe, \"Jo\"\nJunior".as_slice(), b"", b"Eve"]);
    assert_eq!(batch.i64("age").unwrap(), [41, -2, 3]);
    assert_eq!(batch.f32("score").unwrap(), [1.5, 1000.0, 0.5]);
    assert_eq!(batch.columns["age"], Column::I64 { shape: vec![3], values: vec![41, -2, 3] });
}

#[test]
fn csv_without_header_and_with_other_delimiters_is_read() {
    let dir = folder(&[("a.csv", b"1; x ;2\n3; y ;4\n")]);
    let params =
        [("header", "false"), ("delimiter", ";"), ("columns", "a, b, c"), ("trim", "true")];
    let dataset = open(dir.path(), &params).unwrap();
    let batch =
        all(&dataset, &[field("b", DType::Bytes, &[]), field("c", DType::F32, &[])]).unwrap();
    assert_eq!(batch.bytes("b").unwrap(), [b"x".to_vec(), b"y".to_vec()]);
    assert_eq!(batch.f32("c").unwrap(), [2.0, 4.0]);
    let dir = folder(&[("a.tsv", b"a\tb\n1\t2\n")]);
    let batch = all(&open(dir.path(), &[]).unwrap(), &[field("b", DType::I64, &[])]).unwrap();
    assert_eq!(batch.i64("b").unwrap(), [2]);
}

#[test]
fn a_csv_error_names_file_line_and_column() {
    let dir = folder(&[("bad.csv", b"x,y\n1,2\n3,oops\n")]);
    let dataset = open(dir.path(), &[]).unwrap();
    let error = all(&dataset, &[field("y", DType::I64, &[])]).unwrap_err().to_string();
    assert!(error.contains("bad.csv`, block 0, record 1 (line 3): field `y`"), "{error}");
    assert!(error.ends_with("the model needs one i64 value, the record has the text `oops`"));
    let error = all(&dataset, &[field("z", DType::I64, &[])]).unwrap_err().to_string();
    assert!(error.ends_with("field `z`: the record has no such field; it has `x`, `y`"), "{error}");

    for text in ["x,y\n1,2\n3\n", "x,y\r\n1,2\r\n3\r\n"] {
        let dir = folder(&[("bad.csv", text.as_bytes())]);
        let error = open(dir.path(), &[]).unwrap_err().to_string();
        assert!(
            error.ends_with("(line 3): the row has 1 cells, but the first row has 2"),
            "{error}"
        );
    }
    let dir = folder(&[("bad.csv", b"x,x\n1,2\n")]);
    let error = open(dir.path(), &[]).unwrap_err().to_string();
    assert!(error.ends_with("two columns are named `x`"), "{error}");
}

#[test]
fn long_csv_files_are_split_into_blocks_of_whole_rows() {
    let mut text = String::from("n,text\r\n");
    for n in 0..10_000 {
        text += &format!("{n},\"a\r\nb \"\"{n}\"\"\"\r\n");
    }
    let dir = folder(&[("long.csv", text.as_bytes())]);
    let dataset = open(dir.path(), &[]).unwrap();
    assert_eq!(dataset.n_records(), 10_000);
    let fields = [field("n", DType::I64, &[]), field("text", DType::Bytes, &[])];
    let order: Vec<u64> = (0..10_000).map(|i| i * 7 % 10_000).collect();
    let batch = dataset.batch(&order, &fields).unwrap();
    for ((record, n), text) in
        order.iter().zip(batch.i64("n").unwrap()).zip(batch.bytes("text").unwrap())
    {
        assert_eq!(*n, i64::try_from(*record).unwrap());
        assert_eq!(text, format!("a\r\nb \"{record}\"").as_bytes());
    }
    // Each row takes two lines below the header.
    let place = dataset.locate(9_000);
    assert!(place.contains("block 2") && place.ends_with("(line 18002)"), "{place}");
}

#[test]
fn json_lines_have_numbers_lists_text_and_booleans() {
    let dir = folder(&[(
        "a.jsonl",
        b"{\"x\": [[1, 2], [3, 4]], \"y\": true, \"z\": \"w\", \"n\": 2.5}\n\n  \n\
          {\"x\": [5, 6.5, 7, 8], \"y\": 0, \"z\": 12, \"n\": \"3\"}",
    )]);
    let fields = [
        field("x", DType::F32, &[2, 2]),
        field("y", DType::I64, &[]),
        field("z", DType::Bytes, &[]),
        field("n", DType::F32, &[]),
    ];
    let dataset = open(dir.path(), &[]).unwrap();
    let batch = all(&dataset, &fields).unwrap();
    assert_eq!(batch.f32("x").unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.5, 7.0, 8.0]);
    assert_eq!(batch.i64("y").unwrap(), [1, 0]);
    assert_eq!(batch.bytes("z").unwrap(), [b"w".to_vec(), b"12".to_vec()]);
    assert_eq!(batch.f32("n").unwrap(), [2.5, 3.0]);
    assert!(dataset.locate(1).ends_with("record 1 (line 4)"));
}

#[test]
fn a_broken_json_line_is_named_and_the_others_are_read() {
    let dir = folder(&[("a.jsonl", b"{\"x\": 1}\n{\"x\": \n[3]\n")]);
    let dataset = open(dir.path(), &[]).unwrap();
    let fields = [field("x", DType::I64, &[])];
    assert_eq!(dataset.batch(&[0], &fields).unwrap().i64("x").unwrap(), [1]);
    let error = dataset.batch(&[1], &fields).unwrap_err().to_string();
    assert!(error.contains("(line 2): not a JSON object"), "{error}");
    let error = dataset.batch(&[2], &fields).unwrap_err().to_string();
    assert!(error.contains("(line 3): not a JSON object"), "{error}");
}

#[test]
fn tfrecords_of_another_implementation_are_read() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/plain.tfrecord");
    let codec = OpenOptions { codec: Codec::Bytes, ..OpenOptions::default() };
    let dataset = Dataset::open(path.to_str().unwrap(), &codec).unwrap();
    let batch = all(&dataset, &[field("any", DType::Bytes, &[])]).unwrap();
    let expected =
        [vec![], b"hello".to_vec(), (0..=255).collect(), b"world".repeat(40), vec![], vec![]];
    assert_eq!(batch.bytes("any").unwrap(), expected);
    assert_eq!(std::fs::read(path).unwrap(), tfrecords(&expected));
}

#[test]
fn a_flipped_bit_in_a_tfrecord_is_an_error_and_never_gives_wrong_data() {
    let intact = tfrecords(&[b"one".to_vec(), vec![], b"three".to_vec()]);
    for place in 0..intact.len() {
        let mut damaged = intact.clone();
        damaged[place] ^= 4;
        assert!(tfrecord::parse(damaged.clone()).is_err(), "byte {place}");
        let dir = folder(&[("a.tfrecord", &damaged)]);
        let read = open(dir.path(), &[]).and_then(|dataset| dataset.check(&[]));
        let error = read.expect_err("damage must be detected").to_string();
        assert!(error.contains("a.tfrecord`"), "{error}");
    }
    for len in 1..intact.len() {
        let whole = [19, 35].contains(&len);
        assert_eq!(tfrecord::parse(intact[..len].to_vec()).is_ok(), whole, "{len} bytes");
    }
}

#[test]
fn features_are_converted_to_the_requested_types_if_lossless() {
    let example = Example::new()
        .bytes("raw", [0_u8, 128, 255, 1].to_vec())
        .bytes("raw_floats", [1.5_f32, -2.0].map(f32::to_le_bytes).concat())
        .ints("ints", [3_i64, 255])
        .floats("floats", [4.0_f32, 7.0])
        .ints("label", [9_i64]);
    let dir = folder(&[("a.tfrecord", &tfrecords(&[example.to_bytes()]))]);
    let dataset = open(dir.path(), &[]).unwrap();
    let get = |name: &str, dtype, shape: &[usize]| {
        let mut batch = dataset.batch(&[0], &[field(name, dtype, shape)]).unwrap();
        batch.columns.remove(name).unwrap()
    };
    let f32s = |shape: &[usize], values: &[f32]| Column::F32 {
        shape: shape.to_vec(),
        values: values.to_vec(),
    };
    assert_eq!(get("raw", DType::F32, &[2, 2]), f32s(&[1, 2, 2], &[0.0, 128.0, 255.0, 1.0]));
    assert_eq!(get("raw_floats", DType::F32, &[2]), f32s(&[1, 2], &[1.5, -2.0]));
    assert_eq!(get("ints", DType::F32, &[2]), f32s(&[1, 2], &[3.0, 255.0]));
    assert_eq!(
        get("floats", DType::I64, &[2]),
        Column::I64 { shape: vec![1, 2], values: vec![4, 7] }
    );
    assert_eq!(
        get("ints", DType::U8, &[2]),
        Column::U8 { shape: vec![1, 2], values: vec![3, 255] }
    );
    assert_eq!(get("label", DType::I64, &[]), Column::I64 { shape: vec![1], values: vec![9] });
    assert_eq!(get("label", DType::Bytes, &[]), Column::Bytes(vec![b"9".to_vec()]));
}

#[test]
fn a_wrong_type_or_shape_is_refused_with_the_expected_one() {
    let check = |example: Example, requested: FieldSpec, expected: &str| {
        let refusal = refusal(&example, &requested);
        assert!(refusal.contains("a.tfrecord`, block 0, record 0: field `x`: "), "{refusal}");
        assert!(refusal.ends_with(expected), "{refusal}");
    };
    let pixels = || Example::new().bytes("x", vec![0; 100]);
    check(
        pixels(),
        field("x", DType::U8, &[28, 28]),
        "the model needs 28×28 u8 values, the record has 100 raw bytes",
    );
    check(
        Example::new().floats("x", [0.5]),
        field("x", DType::I64, &[]),
        "the model needs one i64 value, the record has 1 float",
    );
    check(
        Example::new().ints("x", [256]),
        field("x", DType::U8, &[]),
        "the model needs one u8 value, the record has 1 integer",
    );
    check(
        Example::new().floats("x", [0.5, 1.0]),
        field("x", DType::Bytes, &[]),
        "the model needs one text or bytes value, the record has 2 floats",
    );
    check(
        Example::new().ints("image", [1]).ints("label", [1]),
        field("x", DType::F32, &[]),
        "the record has no such field; it has `image`, `label`",
    );
}

#[test]
fn a_record_that_is_not_an_example_is_named() {
    let dir = folder(&[("a.tfrecord", &tfrecords(&[vec![], b"\xff\xff".to_vec()]))]);
    let dataset = open(dir.path(), &[]).unwrap();
    let error = all(&dataset, &[]).unwrap_err().to_string();
    assert!(error.contains("a.tfrecord`, block 0, record 1: not a tf.train.Example"), "{error}");
}

#[test]
fn the_bytes_codec_provides_exactly_one_column() {
    let dir = folder(&[("a.tfrecord", &tfrecords(&[b"abc".to_vec()]))]);
    let codec = OpenOptions { codec: Codec::Bytes, ..OpenOptions::default() };
    let dataset = Dataset::open(dir.path().to_str().unwrap(), &codec).unwrap();
    let batch = all(&dataset, &[field("x", DType::U8, &[3])]).unwrap();
    assert_eq!(batch.u8("x").unwrap(), b"abc");
    let two = [field("x", DType::U8, &[3]), field("y", DType::I64, &[])];
    let error = all(&dataset, &two).unwrap_err().to_string();
    assert!(error.contains("use --codec_type=tf_example"), "{error}");
    let error = all(&dataset, &[field("x", DType::U8, &[4])]).unwrap_err().to_string();
    assert!(error.ends_with("needs 4 u8 values, the record has 3 raw bytes"), "{error}");
}

#[test]
fn a_record_can_be_read_undecoded_with_any_codec() {
    let record = Example::new().ints("label", [7]).to_bytes();
    let dir = folder(&[("a.tfrecord", &tfrecords(std::slice::from_ref(&record)))]);
    let whole = || field("all of it", DType::Record, &[]);
    for (codec, other) in [
        (Codec::TfExample, field("label", DType::I64, &[])),
        (Codec::Bytes, field("x", DType::Bytes, &[])),
    ] {
        let options = OpenOptions { codec, ..OpenOptions::default() };
        let dataset = Dataset::open(dir.path().to_str().unwrap(), &options).unwrap();
        for fields in [vec![whole()], vec![other.clone(), whole()]] {
            let batch = all(&dataset, &fields).unwrap();
            assert_eq!(batch.bytes("all of it").unwrap(), std::slice::from_ref(&record));
            assert_eq!(batch.columns.len(), fields.len());
        }
    }
}

#[test]
fn a_record_that_is_read_undecoded_need_not_be_an_example() {
    let dir = folder(&[("a.tfrecord", &tfrecords(&[b"\xff\xff".to_vec()]))]);
    let dataset = open(dir.path(), &[]).unwrap();
    let whole = field("record", DType::Record, &[]);
    let batch = all(&dataset, std::slice::from_ref(&whole)).unwrap();
    assert_eq!(batch.bytes("record").unwrap(), [b"\xff\xff"]);
    for (name, content) in [("a.csv", "record\n1\n"), ("a.jsonl", "{\"record\": 1}")] {
        let dir = folder(&[(name, content.as_bytes())]);
        let error = open(dir.path(), &[]).unwrap().check(std::slice::from_ref(&whole));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("field `record`") && error.contains("only recordio and tfrecord"));
    }
}

#[test]
fn the_fields_of_a_data_set_are_found_in_its_records() {
    let example = |n: i64| {
        let example = Example::new()
            .ints("label", [n])
            .ints("pair", [n, 1])
            .ints("several", vec![n; usize::try_from(n).unwrap()])
            .floats("weight", [0.5])
            .bytes("pixels", vec![0_u8; 4])
            .bytes("blob", vec![255_u8; usize::try_from(n).unwrap()])
            .bytes("word", format!("word {n}").into_bytes())
            .with("words", two_pieces());
        if n == 2 { example } else { example.floats("sometimes", [1.0]).bytes("name", "x") }
    };
    let records: Vec<Vec<u8>> = (1..100).map(|n| example(n).to_bytes()).collect();
    let dir = folder(&[("a.tfrecord", &tfrecords(&records))]);
    let found =
        schema(&Dataset::open(dir.path().to_str().unwrap(), &options(&[])).unwrap()).unwrap();
    let fields = [
        field("blob", DType::Bytes, &[]),
        field("label", DType::I64, &[]),
        field("pair", DType::I64, &[2]),
        field("pixels", DType::U8, &[4]),
        field("weight", DType::F32, &[]),
        field("word", DType::Bytes, &[]),
    ];
    let missing = "it is missing in 1 of the first 99 records";
    let skipped = [
        ("name", missing),
        ("several", "it is a list of 1 to 99 numbers"),
        ("sometimes", missing),
        ("words", "the model needs one text or bytes value, the record has 2 pieces of raw bytes"),
    ];
    let mut found = found;
    found.skipped.sort();
    let skipped = skipped.map(|(name, why)| (name.to_owned(), why.to_owned())).to_vec();
    assert_eq!(found, Schema { fields: fields.to_vec(), has_raw_records: true, skipped });
}

fn two_pieces() -> edl_data::example::FeatureKind {
    let value = vec![b"a".to_vec().into(), b"b".to_vec().into()];
    edl_data::example::FeatureKind::Bytes(edl_data::example::BytesList { value })
}

#[test]
fn the_fields_of_a_table_are_found_in_its_cells() {
    let dir = folder(&[("a.csv", b"age,gain,job,note\n31,1,nurse,\n42,0.5,,\n17,2,clerk,\n")]);
    let found =
        schema(&Dataset::open(dir.path().to_str().unwrap(), &options(&[])).unwrap()).unwrap();
    let fields = [
        field("age", DType::I64, &[]),
        field("gain", DType::F32, &[]),
        field("job", DType::Bytes, &[]),
    ];
    let skipped = vec![("note".into(), "it has no value in the first 3 records".into())];
    assert_eq!(found, Schema { fields: fields.to_vec(), has_raw_records: false, skipped });
    all(&open(dir.path(), &[]).unwrap(), &fields).unwrap();
}

#[test]
fn a_field_can_be_spread_over_columns_or_packed_into_a_cell() {
    let dir = folder(&[("a.csv", b"x_0,x_1,y\n1,2,3 4\n5,6,\"[7, 8]\"\n")]);
    let dataset = open(dir.path(), &[]).unwrap();
    let batch =
        all(&dataset, &[field("x", DType::F32, &[2]), field("y", DType::U8, &[2])]).unwrap();
    assert_eq!(batch.f32("x").unwrap(), [1.0, 2.0, 5.0, 6.0]);
    assert_eq!(batch.u8("y").unwrap(), [3, 4, 7, 8]);
    let error = all(&dataset, &[field("x", DType::F32, &[3])]).unwrap_err().to_string();
    assert!(error.ends_with("the record has no field `x_2`"), "{error}");
}

#[test]
fn an_invalid_dataset_is_refused_with_a_next_step() {
    let refused = |files: &[(&str, &[u8])], expected: &str| {
        let dir = folder(files);
        let error = open(dir.path(), &[]).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(&[], "contains no data files; create some with `elasticdl data gen`");
    refused(&[("_SUCCESS", b"")], "contains no data files");
    refused(&[("data", b"")], "contain no records");
    refused(&[("a.csv", b"x,y\n")], "contain no records");
    refused(&[("a.recordio", b"")], "contain no records");
    refused(&[("a.csv", b"x\n1\n"), ("b.jsonl", b"{}\n")], "is csv and");
    refused(&[("data", b"hello")], "--data_reader_params=format=csv");
    refused(&[("images", &[0, 0, 8, 3, 0, 0])], "`elasticdl data import`");
    refused(&[("a.gz", &[0x1f, 0x8b, 8, 0])], "decompress it first");
    let dir = folder(&[("data", b"x\n1\n")]);
    assert_eq!(open(dir.path(), &[("format", "csv")]).unwrap().n_records(), 1);
    let error = open(dir.path(), &[("fromat", "csv")]).unwrap_err().to_string();
    assert!(error.contains("unknown key `fromat`; use one of format,"), "{error}");
    let error = open(dir.path(), &[("format", "xls")]).unwrap_err().to_string();
    assert!(error.contains("unknown format `xls`; use one of recordio"), "{error}");
}

#[test]
fn the_format_is_detected_by_the_first_bytes_without_a_known_extension() {
    let example = Example::new().ints("x", [1]).to_bytes();
    let recordio = edl_data::recordio::encode(&[&example], Default::default()).unwrap();
    let tfrecord = tfrecords(&[example]);
    let cases: [(&[u8], &str); 3] =
        [(&recordio, "recordio"), (&tfrecord, "tfrecord"), (b" {\"x\": 1}\n", "jsonl")];
    for (content, expected) in cases {
        let dir = folder(&[("data-00000", content)]);
        let dataset = open(dir.path(), &[]).unwrap();
        assert_eq!(dataset.format().name(), expected);
        assert_eq!(all(&dataset, &[field("x", DType::I64, &[])]).unwrap().i64("x").unwrap(), [1]);
    }
}

#[test]
fn the_fingerprint_depends_on_the_data_and_not_on_the_path() {
    let print =
        |files: &[(&str, &[u8])]| open(folder(files).path(), &[]).unwrap().fingerprint().to_owned();
    let first = print(&[("a.csv", b"x\n1\n2\n"), ("b.csv", b"x\n3\n")]);
    assert_eq!(first.len(), 64);
    assert_eq!(print(&[("a.csv", b"x\n1\n2\n"), ("b.csv", b"x\n3\n")]), first);
    assert_ne!(print(&[("a.csv", b"x\n1\n4\n"), ("b.csv", b"x\n3\n")]), first);
    assert_ne!(print(&[("a.csv", b"x\n1\n2\n"), ("c.csv", b"x\n3\n")]), first);
    assert_ne!(print(&[("a.csv", b"x\n1\n"), ("b.csv", b"x\n2\n3\n")]), first);
}

#[test]
fn a_text_file_that_changes_under_an_open_data_set_is_refused() {
    for name in ["a.csv", "a.jsonl"] {
        let line = |n| if name == "a.csv" { format!("{n}\n") } else { format!("{{\"x\":{n}}}\n") };
        let head = if name == "a.csv" { "x\n" } else { "" };
        let dir = folder(&[(name, format!("{head}{}", line(1)).as_bytes())]);
        let dataset = open(dir.path(), &[]).unwrap();
        std::fs::write(dir.path().join(name), format!("{head}{}", line(2))).unwrap();
        let error = all(&dataset, &[field("x", DType::I64, &[])]).unwrap_err().to_string();
        assert!(error.contains("has changed since"), "{error}");
    }
}

#[test]
fn a_record_beyond_the_end_is_refused() {
    let dir = folder(&[("a.csv", b"x\n1\n")]);
    let dataset = open(dir.path(), &[]).unwrap();
    let error = dataset.batch(&[1], &[]).unwrap_err().to_string();
    assert_eq!(error, "record 1 is out of range; number of records: 1");
    assert_eq!(dataset.locate(1), error);
}

proptest! {
    #[test]
    fn any_cells_round_trip_through_csv(
        cells in prop::collection::vec(("[ -~\n\r\"]{0,12}", any::<i64>(), any::<f32>()), 1..50),
    ) {
        let mut writer = ::csv::Writer::from_writer(Vec::new());
        writer.write_record(["text", "int", "float"]).unwrap();
        for (text, int, float) in &cells {
            writer.write_record([text.clone(), int.to_string(), float.to_string()]).unwrap();
        }
        let dir = folder(&[("a.csv", &writer.into_inner().unwrap())]);
        let dataset = open(dir.path(), &[]).unwrap();
        let fields = [
            field("text", DType::Bytes, &[]),
            field("int", DType::I64, &[]),
            field("float", DType::F32, &[]),
        ];
        let batch = all(&dataset, &fields).unwrap();
        for (at, (text, int, float)) in cells.iter().enumerate() {
            prop_assert_eq!(&batch.bytes("text").unwrap()[at], text.as_bytes());
            prop_assert_eq!(batch.i64("int").unwrap()[at], *int);
            let read = batch.f32("float").unwrap()[at];
            prop_assert!(read.to_bits() == float.to_bits() || (read.is_nan() && float.is_nan()));
        }
    }

    #[test]
    fn any_file_of_any_name_is_read_or_refused(
        name in prop::sample::select(&["a.csv", "a.jsonl", "a.recordio", "a.tfrecord", "a.parquet", "a"][..]),
        content in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let dir = folder(&[(name, &content)]);
        if let Ok(dataset) = open(dir.path(), &[]) {
            drop(dataset.check(&[field("x", DType::F32, &[])]));
        }
    }
}

#[test]
fn a_range_has_record_numbers_and_nothing_else() {
    let dataset = Dataset::open("range:10", &options(&[])).unwrap();
    assert_eq!((dataset.n_records(), dataset.format()), (10, Format::Range));
    dataset.check(&[]).unwrap();
    let batch = dataset.batch(&[9, 0, 9], &[]).unwrap();
    assert_eq!((batch.records.as_slice(), batch.columns.len()), ([9, 0, 9].as_slice(), 0));
    let error = dataset.batch(&[10], &[]).unwrap_err().to_string();
    assert_eq!(error, "record 10 is out of range; number of records: 10");
    for dtype in [DType::I64, DType::Record] {
        let error = dataset.check(&[field("x", dtype, &[])]).unwrap_err().to_string();
        assert!(error.starts_with("cannot read field `x`: `range:10` contains only"), "{error}");
    }
    assert_eq!(dataset.locate(3), "`range:10`, record 3");
    assert_eq!(dataset.raw(3).unwrap(), None);
    let print = |location| Dataset::open(location, &options(&[])).unwrap().fingerprint().to_owned();
    assert_eq!(print("range:10"), dataset.fingerprint());
    assert_ne!(print("range:11"), dataset.fingerprint());
    assert_eq!(Dataset::open("stream:10", &options(&[])).unwrap().n_records(), 10);

    let summary = inspect("range:10", &options(&[])).unwrap();
    assert_eq!((summary.records, summary.files.len(), summary.fields.len()), (10, 0, 0));
    assert_eq!(head("range:10", 2, &options(&[])).unwrap().len(), 2);
    let found = schema(&Dataset::open("range:10", &options(&[])).unwrap()).unwrap();
    assert_eq!(found, Schema { fields: vec![], has_raw_records: false, skipped: vec![] });
    let dir = tempfile::tempdir().unwrap();
    let imported = import::table("range:10", &options(&[]), dir.path(), &Default::default());
    assert!(imported.unwrap_err().to_string().contains("specify a file or folder"));
}

#[test]
fn a_range_without_a_valid_number_is_refused_with_a_next_step() {
    for location in ["range:", "range:0", "range:-1", "range:ten", "range:5000000000"] {
        let error = Dataset::open(location, &options(&[])).unwrap_err().to_string();
        assert!(error.starts_with(&format!("`{location}` has no valid number")), "{error}");
        assert!(error.ends_with("e.g. `range:1000`"), "{error}");
    }
}

#[test]
fn numbers_in_a_csv_file_are_shown_as_numbers() {
    let rows = b"label,price,code,word\n-1,0.5,7,x\n 2 ,3,n/a,y\n".as_slice();
    let dir = folder(&[("rows.csv", rows)]);
    let shown = head(dir.path().to_str().unwrap(), 2, &options(&[])).unwrap();
    let expected = [
        serde_json::json!({"label": -1, "price": 0.5, "code": "7", "word": "x"}),
        serde_json::json!({"label": 2, "price": 3.0, "code": "n/a", "word": "y"}),
    ];
    assert_eq!(shown, expected, "by the type of the whole column");
}

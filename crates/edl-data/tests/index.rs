// SPDX-License-Identifier: Apache-2.0
//! The index of a dataset: built by several threads, saved, and used only for the same files.

use std::fs;
use std::path::Path;

use edl_data::{Dataset, Error, OpenOptions, Progress};

/// Twenty files of ten rows each.
fn files() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    for number in 0..20 {
        let rows = (0..10).map(|row| format!("{number},{row}\n")).collect::<String>();
        fs::write(dir.path().join(format!("{number:02}.csv")), format!("a,b\n{rows}"))
            .expect("a file");
    }
    dir
}

/// The dataset, and whether its files had to be indexed.
fn open(data: &Path, indexes: &Path) -> Result<(Dataset, bool), Error> {
    let progress = Progress::default();
    let options = OpenOptions::default();
    let location = data.to_str().expect("a path in UTF-8");
    let data = Dataset::open_indexed(location, &options, Some(indexes), &progress)?;
    let (done, total) = progress.bytes();
    assert_eq!(done, total, "the progress of a complete index is complete");
    Ok((data, total > 0))
}

#[test]
fn a_saved_index_is_read_instead_of_the_files() {
    let (data, indexes) = (files(), tempfile::tempdir().unwrap());
    let (first, was_indexed) = open(data.path(), indexes.path()).unwrap();
    assert!(was_indexed);
    first.save_index(indexes.path()).unwrap();
    let (second, was_indexed) = open(data.path(), indexes.path()).unwrap();
    assert!(!was_indexed);
    assert_eq!((second.n_records(), second.fingerprint()), (200, first.fingerprint()));
    assert_eq!(second.locate(57), first.locate(57));
}

#[test]
fn an_index_of_other_files_or_a_damaged_one_is_rebuilt() {
    let (data, indexes) = (files(), tempfile::tempdir().unwrap());
    let (first, _) = open(data.path(), indexes.path()).unwrap();
    first.save_index(indexes.path()).unwrap();
    // The same size, but written later.
    let changed = data.path().join("07.csv");
    let text = fs::read_to_string(&changed).unwrap().replace("7,3", "7,4");
    fs::write(&changed, text).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
    fs::File::options().append(true).open(&changed).unwrap().set_modified(later).unwrap();
    let (second, was_indexed) = open(data.path(), indexes.path()).unwrap();
    assert!(was_indexed);
    assert_ne!(second.fingerprint(), first.fingerprint());
    second.save_index(indexes.path()).unwrap();

    let saved = fs::read_dir(indexes.path()).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&saved).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&saved, bytes).unwrap();
    let (third, was_indexed) = open(data.path(), indexes.path()).unwrap();
    assert!(was_indexed);
    assert_eq!(third.fingerprint(), second.fingerprint());
}

#[test]
fn the_first_of_several_damaged_files_is_named() {
    let data = files();
    for name in ["05.csv", "11.csv", "19.csv"] {
        fs::write(data.path().join(name), "a,b\n1\n").unwrap();
    }
    for _ in 0..20 {
        let error = open(data.path(), data.path()).unwrap_err().to_string();
        assert!(error.contains("05.csv"), "{error}");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! From what a user writes (a file, a folder, a glob, a URL) to a sorted list of files.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::format::Params;

/// One file of a data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DataFile {
    pub(crate) path: PathBuf,
    /// The path below the data set's root: it stays the same when the data set moves.
    pub(crate) name: String,
}

/// A location whose records have no files.
pub(crate) struct Bare<'a> {
    pub(crate) n_records: u64,
    /// Distinguishes data sets with the same number of records.
    pub(crate) digest: &'a str,
    /// Whether the model reads the records itself.
    pub(crate) is_read_by_model: bool,
}

/// Parses `range:N`, `stream:N` for the records of a stream, which the numbers of a range stand for,
/// or `reader:N:DIGEST:ORIGIN` for the records of a custom data reader; none if the location has files.
pub(crate) fn bare(location: &str) -> Result<Option<Bare<'_>>, Error> {
    let range = ["range:", "stream:"].iter().find_map(|prefix| location.strip_prefix(prefix));
    let (count, digest, is_read_by_model) = if let Some(count) = range {
        (count, "", false)
    } else if let Some(text) = location.strip_prefix("reader:") {
        let mut parts = text.splitn(3, ':');
        (parts.next().unwrap_or_default(), parts.next().unwrap_or_default(), true)
    } else {
        return Ok(None);
    };
    // An epoch has fewer than 2^32 batches, whatever their size.
    match count.parse::<u32>() {
        Ok(n_records @ 1..) => {
            Ok(Some(Bare { n_records: n_records.into(), digest, is_read_by_model }))
        }
        Ok(0) | Err(_) if is_read_by_model => Err(Error::Refused(format!(
            "`{location}` is not a valid number of reader records; use 1 to {}",
            u32::MAX
        ))),
        Ok(0) | Err(_) => Err(Error::Refused(format!(
            "`{location}` has no valid number of records; use a number from 1 to {}, e.g. \
             `range:1000`",
            u32::MAX
        ))),
    }
}

/// Lists the files of a data set, sorted by name.
pub(crate) fn resolve(location: &str, params: &Params) -> Result<Vec<DataFile>, Error> {
    let mut files = match location.split_once("://") {
        Some(("file", path)) => local(path)?,
        Some(_) => remote(location, params)?,
        None => local(location)?,
    };
    files.sort_by(|a, b| a.name.cmp(&b.name));
    if files.is_empty() {
        return Err(Error::Empty { location: location.into(), hint: empty_hint(location) });
    }
    Ok(files)
}

#[cfg(feature = "object_store")]
fn remote(location: &str, params: &Params) -> Result<Vec<DataFile>, Error> {
    crate::remote::fetch(location, params.cache_dir.as_deref())
}

#[cfg(not(feature = "object_store"))]
fn remote(location: &str, _params: &Params) -> Result<Vec<DataFile>, Error> {
    Err(Error::Refused(format!(
        "`{location}` is in a remote store, but this binary was built without remote stores; \
         rebuild it with `cargo build --release --features object_store`, or copy the files to \
         this machine"
    )))
}

fn local(location: &str) -> Result<Vec<DataFile>, Error> {
    let path = Path::new(location);
    if path.is_dir() {
        return folder(path);
    }
    if path.exists() {
        return Ok(vec![DataFile { path: path.to_path_buf(), name: file_name(path) }]);
    }
    if location.contains(['*', '?', '[']) {
        return matching(location);
    }
    Err(Error::Missing { location: location.into() })
}

/// The files directly in a folder. Folders below it are left alone: `mnist` with `mnist/train`
/// and `mnist/test` in it must not become one data set by accident.
fn folder(folder: &Path) -> Result<Vec<DataFile>, Error> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io("read", folder))? {
        let path = entry.map_err(Error::io("read", folder))?.path();
        let name = file_name(&path);
        if path.is_file() && is_data(&name) {
            files.push(DataFile { path, name });
        }
    }
    Ok(files)
}

fn matching(pattern: &str) -> Result<Vec<DataFile>, Error> {
    let paths = glob::glob(pattern)
        .map_err(|error| Error::Refused(format!("invalid pattern `{pattern}`: {error}")))?;
    let root = pattern.split('/').take_while(|part| !part.contains(['*', '?', '[']));
    let root: PathBuf = root.map(|part| if part.is_empty() { "/" } else { part }).collect();
    let mut files = Vec::new();
    for path in paths {
        let path = path.map_err(|error| {
            Error::io("read", error.path())(std::io::Error::other(error.to_string()))
        })?;
        if path.is_file() && is_data(&file_name(&path)) {
            let name = path.strip_prefix(&root).unwrap_or(&path).to_string_lossy().into_owned();
            files.push(DataFile { path, name });
        }
    }
    Ok(files)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// Whether a file of this name can be data: hidden files, markers such as `_SUCCESS`, checksums
/// and notes for humans are not.
pub(crate) fn is_data(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    let side = [".md", ".crc", ".tmp", ".part", ".license"];
    !name.starts_with(['.', '_']) && !side.iter().any(|end| lower.ends_with(end))
}

fn empty_hint(location: &str) -> String {
    let folders: Vec<String> = std::fs::read_dir(location)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_dir() && is_data(&file_name(path)))
        .map(|path| format!("`{}`", path.display()))
        .collect();
    match folders.as_slice() {
        [] => "; create some with `elasticdl data gen`".into(),
        folders => format!("; did you mean a folder in it: {}?", folders.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params() -> Params {
        Params::parse(&std::collections::BTreeMap::new()).unwrap()
    }

    fn names(location: &str) -> Vec<String> {
        let files = resolve(location, &params()).unwrap();
        files.into_iter().map(|file| file.name).collect()
    }

    #[test]
    fn markers_and_hidden_files_are_no_data_and_the_rest_is_sorted() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        for name in ["b.csv", "a.csv", ".a.csv.swp", "_SUCCESS", "README.md", "sub/c.csv"] {
            std::fs::write(dir.path().join(name), "x\n1\n").unwrap();
        }
        let root = dir.path().to_str().unwrap();
        assert_eq!(names(root), ["a.csv", "b.csv"]);
        assert_eq!(names(&format!("file://{root}")), ["a.csv", "b.csv"]);
        assert_eq!(names(&format!("{root}/*/*.csv")), ["sub/c.csv"]);
        assert_eq!(names(&format!("{root}/[a]*")), ["a.csv"]);
        assert_eq!(names(&format!("{root}/b.csv")), ["b.csv"]);
    }

    #[test]
    fn a_folder_of_folders_is_refused_with_their_names() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("train")).unwrap();
        let error = resolve(dir.path().to_str().unwrap(), &params()).unwrap_err().to_string();
        assert!(error.contains("did you mean") && error.contains("train`"), "{error}");
    }

    #[test]
    fn a_missing_path_and_an_unmatched_pattern_are_refused_by_name() {
        let error = resolve("no/such/place", &params()).unwrap_err().to_string();
        assert!(error.starts_with("no such file or folder: `no/such/place`"), "{error}");
        let error = resolve("no/such/*.csv", &params()).unwrap_err().to_string();
        assert!(error.starts_with("`no/such/*.csv` contains no data files"), "{error}");
    }

    #[cfg(not(feature = "object_store"))]
    #[test]
    fn a_url_without_the_feature_is_refused_with_the_feature() {
        let error = resolve("s3://bucket/train", &params()).unwrap_err().to_string();
        assert!(error.contains("--features object_store"), "{error}");
    }
}

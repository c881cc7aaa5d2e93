// SPDX-License-Identifier: Apache-2.0
//! Layers: sorted archives in which every time is zero and every owner is root.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, EntryType, Header};

use crate::base::Paths;
use crate::digest::{Digest, Hashed};
use crate::image::{self, Descriptor};
use crate::store::{self, Blob, Store};

const FOLDER_MODE: u32 = 0o755;
const LINK_MODE: u32 = 0o777;

/// A file, folder or link of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it is in the image, without the first slash.
    pub path: String,
    pub mode: u32,
    pub content: Content,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    Folder,
    Link(String),
    Bytes(Vec<u8>),
    File(PathBuf),
}

/// A layer in a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    pub blob: Descriptor,
    /// Digest before compression.
    pub diff_id: Digest,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read `{0}`")]
    Read(PathBuf, #[source] io::Error),
    #[error("cannot write a layer")]
    Write(#[source] io::Error),
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl Entry {
    #[must_use]
    pub fn folder(path: &str, mode: u32) -> Self {
        Self { path: path.into(), mode, content: Content::Folder }
    }

    #[must_use]
    pub fn bytes(path: &str, mode: u32, bytes: impl Into<Vec<u8>>) -> Self {
        Self { path: path.into(), mode, content: Content::Bytes(bytes.into()) }
    }
}

/// Writes a layer on top of `below`. Of two entries with the same path, the later one counts.
pub fn write(store: &Store, below: &Paths, entries: Vec<Entry>) -> Result<Layer, Error> {
    let mut sorted = BTreeMap::new();
    for mut entry in entries {
        entry.path = below.resolve(&entry.path);
        for folder in parents(&entry.path).filter(|folder| !below.has_folder(folder)) {
            sorted.entry(folder.into()).or_insert_with(|| Entry::folder(folder, FOLDER_MODE));
        }
        let is_there = entry.content == Content::Folder && below.has_folder(&entry.path);
        if !entry.path.is_empty() && !is_there {
            sorted.insert(entry.path.clone(), entry);
        }
    }
    let packed = GzEncoder::new(store.blob()?, Compression::default());
    let mut tar = Builder::new(Hashed::new(packed));
    for entry in sorted.values() {
        append(&mut tar, entry)?;
    }
    let (packed, diff_id, _) = tar.into_inner().map_err(Error::Write)?.finish();
    let blob: Blob<'_> = packed.finish().map_err(Error::Write)?;
    Ok(Layer { blob: blob.finish(image::LAYER)?, diff_id })
}

fn append(tar: &mut Builder<impl Write>, entry: &Entry) -> Result<(), Error> {
    let path = Path::new(&entry.path);
    let mut header = Header::new_gnu();
    header.set_mode(entry.mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    match &entry.content {
        Content::Folder => {
            header.set_entry_type(EntryType::Directory);
            tar.append_data(&mut header, path, io::empty()).map_err(Error::Write)
        }
        Content::Link(target) => {
            header.set_entry_type(EntryType::Symlink);
            header.set_mode(LINK_MODE);
            tar.append_link(&mut header, path, target).map_err(Error::Write)
        }
        Content::Bytes(bytes) => {
            header.set_size(bytes.len() as u64);
            tar.append_data(&mut header, path, bytes.as_slice()).map_err(Error::Write)
        }
        Content::File(source) => {
            let error = |error| Error::Read(source.clone(), error);
            let file = File::open(source).map_err(error)?;
            let size = file.metadata().map_err(error)?.len();
            header.set_size(size);
            // A file that grows during the copy must not corrupt the archive.
            tar.append_data(&mut header, path, file.take(size)).map_err(error)
        }
    }
}

/// Every folder above `path`, outermost first.
fn parents(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(at, _)| &path[..at])
}

#[cfg(test)]
mod tests {
    use flate2::read::GzDecoder;
    use proptest::prelude::*;

    use super::*;

    fn write_to(dir: &Path, entries: Vec<Entry>) -> (Layer, Vec<u8>) {
        let store = Store::open(dir).unwrap();
        let layer = write(&store, &Paths::default(), entries).unwrap();
        let bytes = store.read(&layer.blob.digest).unwrap();
        (layer, bytes)
    }

    #[test]
    fn folders_come_before_what_they_hold_and_every_time_is_zero() {
        let dir = tempfile::tempdir().unwrap();
        let long = format!("z/{}", "long/".repeat(60) + "file");
        let entries = vec![
            Entry::bytes(&long, 0o644, "deep"),
            Entry::bytes("a/b/c", 0o755, "run me"),
            Entry { path: "a/l".into(), mode: 0, content: Content::Link("b/c".into()) },
            Entry::folder("tmp", 0o1777),
        ];
        let (layer, packed) = write_to(dir.path(), entries);
        let mut plain = Vec::new();
        GzDecoder::new(packed.as_slice()).read_to_end(&mut plain).unwrap();
        assert_eq!(Digest::of(&plain), layer.diff_id);
        let mut seen = Vec::new();
        for entry in tar::Archive::new(plain.as_slice()).entries().unwrap() {
            let entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.mtime().unwrap(), header.uid().unwrap()), (0, 0));
            let path = entry.path().unwrap().to_str().unwrap().to_owned();
            seen.push((path, header.mode().unwrap()));
        }
        assert_eq!(seen[..2], [("a".into(), 0o755), ("a/b".into(), 0o755)]);
        assert_eq!(seen[2..4], [("a/b/c".into(), 0o755), ("a/l".into(), 0o777)]);
        assert!(seen.contains(&("tmp".into(), 0o1777)));
        assert!(seen.contains(&(long, 0o644)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn the_same_files_in_any_order_give_the_same_digest(
            files in prop::collection::btree_map("[a-c]{1,3}(/[d-f]{1,3}){0,2}", any::<Vec<u8>>(), 0..6),
        ) {
            let entries: Vec<_> =
                files.iter().map(|(path, bytes)| Entry::bytes(path, 0o644, bytes.clone())).collect();
            let mut reversed = entries.clone();
            reversed.reverse();
            // A file and a folder of one name cannot be in one image.
            let is_clash = files.keys().any(|path| parents(path).any(|above| files.contains_key(above)));
            prop_assume!(!is_clash);
            let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            prop_assert_eq!(write_to(one.path(), entries), write_to(two.path(), reversed));
        }
    }
}

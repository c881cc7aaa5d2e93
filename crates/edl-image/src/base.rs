// SPDX-License-Identifier: Apache-2.0
//! The folders and links of a base image, below a new layer.
//!
//! A layer with a folder `lib/` would hide a link `lib -> usr/lib` and everything behind it. So links
//! are followed, and existing folders are not written again.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use tar::{Archive, EntryType};

use crate::image::{Descriptor, Manifest};
use crate::store::Store;

/// Prefix of a file that hides a file of the layers below.
const WHITEOUT: &str = ".wh.";
/// The longest chain of links that is followed.
const MAX_LINKS: usize = 40;

/// The most that may stand between the contents of two files: headers, long names, attributes. They are
/// read into memory, and a few packed bytes can claim gigabytes.
const MAX_HEADERS: u64 = 1 << 20;
/// The most folders and links of an image.
const MAX_PATHS: usize = 4_000_000;

/// Folders and links by path, without the first slash.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paths {
    folders: BTreeSet<String>,
    links: BTreeMap<String, String>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read layer `{0}` of the base image")]
    Read(PathBuf, #[source] io::Error),
    #[error(
        "the base image has a layer of unsupported type `{0}`; build with docker, podman or buildah"
    )]
    Compression(String),
}

impl Paths {
    /// Reads the names in every layer of an image.
    pub fn of(store: &Store, manifest: &Manifest) -> Result<Self, Error> {
        let mut paths = Self::default();
        for layer in &manifest.layers {
            let path = store.path(&layer.digest);
            let file = File::open(&path).map_err(|error| Error::Read(path.clone(), error))?;
            paths.add_layer(layer, BufReader::new(file), &path)?;
        }
        Ok(paths)
    }

    /// Adds the names in the bytes of a layer; `path` is for the message of an error.
    pub fn add_layer(
        &mut self,
        layer: &Descriptor,
        bytes: impl Read,
        path: &Path,
    ) -> Result<(), Error> {
        self.add(unpacked(layer, bytes)?).map_err(|error| Error::Read(path.into(), error))
    }

    pub(crate) fn has_folder(&self, path: &str) -> bool {
        self.folders.contains(path)
    }

    /// A path with all links in its parent folders followed.
    pub(crate) fn resolve(&self, path: &str) -> String {
        let mut path = clean(path);
        for _ in 0..MAX_LINKS {
            let link = path.match_indices('/').find_map(|(at, _)| {
                let target = self.links.get(&path[..at])?;
                Some((at, target))
            });
            let Some((at, target)) = link else { break };
            let folder = path[..at].rsplit_once('/').map_or("", |(folder, _)| folder);
            let from = if target.starts_with('/') { "" } else { folder };
            path = clean(&format!("{from}/{target}/{}", &path[at + 1..]));
        }
        path
    }

    fn add(&mut self, layer: impl Read) -> io::Result<()> {
        let left = Cell::new(MAX_HEADERS);
        for entry in Archive::new(Metered { inner: layer, left: &left }).entries()? {
            let entry = entry?;
            // What is read up to the next entry.
            left.set(entry.size().saturating_add(MAX_HEADERS));
            if self.folders.len() + self.links.len() >= MAX_PATHS {
                return Err(io::Error::other(format!("more than {MAX_PATHS} folders and links")));
            }
            let path = clean(&entry.path()?.to_string_lossy());
            let name = path.rsplit('/').next().unwrap_or_default();
            if let Some(hidden) = name.strip_prefix(WHITEOUT) {
                self.remove(&clean(&format!("{}/{hidden}", &path[..path.len() - name.len()])));
                continue;
            }
            self.links.remove(&path);
            let kind = entry.header().entry_type();
            if kind == EntryType::Directory {
                self.folders.insert(path);
            } else if kind == EntryType::Symlink {
                let target = entry.link_name()?.unwrap_or_default();
                self.links.insert(path, target.to_string_lossy().into_owned());
            }
        }
        Ok(())
    }

    fn remove(&mut self, path: &str) {
        let below = format!("{path}/");
        self.folders.retain(|each| each != path && !each.starts_with(&below));
        self.links.retain(|each, _| each != path && !each.starts_with(&below));
    }
}

/// Reads no more than what is left.
struct Metered<'a, R> {
    inner: R,
    left: &'a Cell<u64>,
}

impl<R: Read> Read for Metered<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.left.get();
        if left == 0 {
            return Err(io::Error::other(format!("a header longer than {MAX_HEADERS} bytes")));
        }
        let most = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
        let n = self.inner.read(&mut buffer[..most])?;
        self.left.set(left - n as u64);
        Ok(n)
    }
}

fn unpacked<'a>(layer: &Descriptor, file: impl Read + 'a) -> Result<Box<dyn Read + 'a>, Error> {
    let kind = layer.media_type.as_str();
    if kind.ends_with("gzip") {
        Ok(Box::new(GzDecoder::new(file)))
    } else if kind.ends_with("tar") {
        Ok(Box::new(file))
    } else {
        Err(Error::Compression(kind.into()))
    }
}

/// A path without its first slash, and with `.` and `..` resolved.
pub(crate) fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tar(entries: &[(&str, EntryType, &str)]) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for (path, kind, target) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_size(0);
            if *kind == EntryType::Symlink {
                tar.append_link(&mut header, path, target).unwrap();
            } else {
                tar.append_data(&mut header, path, io::empty()).unwrap();
            }
        }
        tar.into_inner().unwrap()
    }

    #[test]
    fn links_of_the_base_are_followed_and_not_hidden() {
        let mut paths = Paths::default();
        let layer = tar(&[
            ("usr/lib/", EntryType::Directory, ""),
            ("lib", EntryType::Symlink, "usr/lib"),
            ("var/run", EntryType::Symlink, "/run"),
            ("loop", EntryType::Symlink, "loop"),
        ]);
        paths.add(layer.as_slice()).unwrap();
        assert_eq!(paths.resolve("/lib/x/../y"), "usr/lib/y");
        assert_eq!(paths.resolve("var/run/a"), "run/a");
        assert_eq!(paths.resolve("loop/a"), "loop/a");
        assert!(paths.has_folder("usr/lib"));
        paths.add(tar(&[(".wh.lib", EntryType::Regular, "")]).as_slice()).unwrap();
        assert_eq!(paths.resolve("lib/x"), "lib/x");
    }

    #[test]
    fn a_name_that_would_fill_the_memory_is_refused() {
        let named = |n: u64| {
            let mut tar = tar::Builder::new(Vec::new());
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(EntryType::GNULongName);
            header.set_size(n);
            header.set_cksum();
            tar.append(&header, io::repeat(b'a').take(n)).unwrap();
            let mut header = tar::Header::new_gnu();
            header.set_size(3 << 20);
            tar.append_data(&mut header, "large", io::repeat(0).take(3 << 20)).unwrap();
            let mut header = tar::Header::new_gnu();
            header.set_size(0);
            tar.append_data(&mut header, "last", io::empty()).unwrap();
            Paths::default().add(tar.into_inner().unwrap().as_slice())
        };
        named(5000).unwrap();
        let error = named(2 << 20).unwrap_err().to_string();
        assert!(error.contains("header longer than"), "{error}");
    }

    #[test]
    fn a_path_never_leaves_the_image() {
        assert_eq!(clean("/a/./b//../c/"), "a/c");
        assert_eq!(clean("../../etc/passwd"), "etc/passwd");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What lies below a new layer: the folders and links of a base image.
//!
//! A layer that says `lib/` is a folder would hide a link `lib -> usr/lib` and all behind it, so
//! links are followed, and folders that are there are not said again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::PathBuf;

use flate2::read::GzDecoder;
use tar::{Archive, EntryType};

use crate::image::{Descriptor, Manifest};
use crate::store::Store;

/// A file whose name starts so hides one of the layers below.
const WHITEOUT: &str = ".wh.";
/// Longest chain of links that is followed.
const MAX_LINKS: usize = 40;

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
            let reader = unpacked(layer, BufReader::new(file))?;
            paths.add(reader).map_err(|error| Error::Read(path, error))?;
        }
        Ok(paths)
    }

    pub(crate) fn has_folder(&self, path: &str) -> bool {
        self.folders.contains(path)
    }

    /// Where a path leads when links among the folders above it are followed.
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
        for entry in Archive::new(layer).entries()? {
            let entry = entry?;
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

/// A path without its first slash, without `.`, and with `..` taken back.
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
    fn a_path_never_leaves_the_image() {
        assert_eq!(clean("/a/./b//../c/"), "a/c");
        assert_eq!(clean("../../etc/passwd"), "etc/passwd");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A folder of images in the layout of the OCI image specification.
//!
//! An open store holds a lock, so unused blobs can be removed safely.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tempfile::NamedTempFile;

use crate::digest::{Digest, Hashed};
use crate::image::{self, Config, Descriptor, Index, Manifest};
use crate::reference::Reference;

/// The annotation by which containerd names an imported image.
const CONTAINERD_NAME: &str = "io.containerd.image.name";
const REF_NAME: &str = "org.opencontainers.image.ref.name";
pub const LAYOUT: &str = r#"{"imageLayoutVersion":"1.0.0"}"#;

/// Images and their blobs.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    _lock: File,
}

/// A blob being written; it becomes part of the store when it is finished.
#[derive(Debug)]
pub struct Blob<'a> {
    store: &'a Store,
    file: Hashed<NamedTempFile>,
}

/// An image with its manifest and configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    pub descriptor: Descriptor,
    pub manifest: Manifest,
    pub config: Config,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot open the image folder `{0}`")]
    Open(PathBuf, #[source] io::Error),
    #[error("cannot read `{0}`")]
    Read(PathBuf, #[source] io::Error),
    #[error("cannot write `{0}`")]
    Write(PathBuf, #[source] io::Error),
    #[error("`{0}` is corrupt: its digest does not match")]
    Damaged(PathBuf),
    #[error("`{0}` is not a valid image")]
    Json(PathBuf, #[source] serde_json::Error),
    #[error("the image is for a processor architecture other than {}", image::architecture())]
    Platform,
}

impl Store {
    /// Opens the folder, or creates it. Waits while another process has it open.
    pub fn open(root: &Path) -> Result<Self, Error> {
        let error = |error| Error::Open(root.into(), error);
        fs::create_dir_all(root.join("blobs/sha256")).map_err(error)?;
        fs::write(root.join("oci-layout"), LAYOUT).map_err(error)?;
        let lock = File::create(root.join("lock")).map_err(error)?;
        lock.lock().map_err(error)?;
        Ok(Self { root: root.into(), _lock: lock })
    }

    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    #[must_use]
    pub fn path(&self, digest: &Digest) -> PathBuf {
        self.root.join("blobs/sha256").join(digest.hex())
    }

    #[must_use]
    pub fn has(&self, blob: &Descriptor) -> bool {
        fs::metadata(self.path(&blob.digest)).is_ok_and(|found| found.len() == blob.size)
    }

    /// Begins a blob.
    pub fn blob(&self) -> Result<Blob<'_>, Error> {
        let file = NamedTempFile::new_in(&self.root);
        let file = file.map_err(|error| Error::Write(self.root.clone(), error))?;
        Ok(Blob { store: self, file: Hashed::new(file) })
    }

    /// Writes a whole blob.
    pub fn put(&self, media_type: &str, bytes: &[u8]) -> Result<Descriptor, Error> {
        let mut blob = self.blob()?;
        blob.write_all(bytes).map_err(|error| Error::Write(self.root.clone(), error))?;
        blob.finish(media_type)
    }

    pub fn put_json(&self, media_type: &str, value: &impl Serialize) -> Result<Descriptor, Error> {
        let bytes = serde_json::to_vec(value);
        self.put(media_type, &bytes.map_err(|error| Error::Json(self.root.clone(), error))?)
    }

    pub fn put_manifest(
        &self,
        config: Descriptor,
        layers: Vec<Descriptor>,
    ) -> Result<Descriptor, Error> {
        let media_type = Some(image::MANIFEST.to_owned());
        let manifest = Manifest { schema_version: 2, media_type, config, layers };
        self.put_json(image::MANIFEST, &manifest)
    }

    /// Reads a small blob and checks its digest.
    pub fn read(&self, digest: &Digest) -> Result<Vec<u8>, Error> {
        let path = self.path(digest);
        let bytes = fs::read(&path).map_err(|error| Error::Read(path.clone(), error))?;
        if Digest::of(&bytes) == *digest { Ok(bytes) } else { Err(Error::Damaged(path)) }
    }

    fn read_json<T: DeserializeOwned>(&self, digest: &Digest) -> Result<T, Error> {
        let bytes = self.read(digest)?;
        serde_json::from_slice(&bytes).map_err(|error| Error::Json(self.path(digest), error))
    }

    /// The image of a descriptor; of several, the one for this machine's architecture.
    pub fn image(&self, descriptor: &Descriptor) -> Result<Image, Error> {
        let mut descriptor = descriptor.clone();
        if descriptor.is_index() {
            let index: Index = self.read_json(&descriptor.digest)?;
            descriptor = index.for_this_machine().ok_or(Error::Platform)?.clone();
        }
        let manifest: Manifest = self.read_json(&descriptor.digest)?;
        let config: Config = self.read_json(&manifest.config.digest)?;
        if config.architecture != image::architecture() {
            return Err(Error::Platform);
        }
        Ok(Image { descriptor, manifest, config })
    }

    /// All named images of the store.
    pub fn index(&self) -> Result<Index, Error> {
        let path = self.root.join("index.json");
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| Error::Json(path, error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok(Index { schema_version: 2, media_type: None, manifests: Vec::new() })
            }
            Err(error) => Err(Error::Read(path, error)),
        }
    }

    pub fn find(&self, name: &Reference) -> Result<Option<Descriptor>, Error> {
        let full = name.tagged();
        let is_it = |each: &Descriptor| {
            let is_named = each.annotations.get(CONTAINERD_NAME) == Some(&full);
            is_named && name.digest.as_ref().is_none_or(|digest| *digest == each.digest)
        };
        Ok(self.index()?.manifests.into_iter().find(is_it))
    }

    /// Names an image. The image that had the name is removed, unless it has another one.
    pub fn name(&self, name: &Reference, image: &Descriptor) -> Result<(), Error> {
        let named = Descriptor { annotations: annotations(name), ..image.clone() };
        self.replace(name, Some(named))
    }

    /// Removes a name, because a tool has a newer image of that name.
    pub fn forget(&self, name: &Reference) -> Result<(), Error> {
        self.replace(name, None)
    }

    fn replace(&self, name: &Reference, with: Option<Descriptor>) -> Result<(), Error> {
        let mut index = self.index()?;
        let full = name.tagged();
        index.manifests.retain(|each| each.annotations.get(CONTAINERD_NAME) != Some(&full));
        index.manifests.extend(with);
        self.write_index(&index)?;
        self.sweep(&index)
    }

    fn write_index(&self, index: &Index) -> Result<(), Error> {
        let path = self.root.join("index.json");
        let error = |error| Error::Write(path.clone(), error);
        let mut file = NamedTempFile::new_in(&self.root).map_err(error)?;
        let bytes = serde_json::to_vec(index).map_err(|error| Error::Json(path.clone(), error))?;
        file.write_all(&bytes).map_err(error)?;
        file.persist(&path).map_err(|failed| error(failed.error))?;
        Ok(())
    }

    /// Removes blobs that no image needs; none if an image cannot be read.
    fn sweep(&self, index: &Index) -> Result<(), Error> {
        let mut needed = BTreeSet::new();
        for each in &index.manifests {
            let Ok(image) = self.image(each) else { return Ok(()) };
            needed.insert(each.digest.hex().to_owned());
            needed.insert(image.descriptor.digest.hex().into());
            needed.insert(image.manifest.config.digest.hex().into());
            needed.extend(image.manifest.layers.iter().map(|layer| layer.digest.hex().into()));
        }
        let folder = self.root.join("blobs/sha256");
        let error = |error| Error::Write(folder.clone(), error);
        for entry in fs::read_dir(&folder).map_err(error)? {
            let entry = entry.map_err(error)?;
            if !entry.file_name().to_str().is_some_and(|name| needed.contains(name)) {
                fs::remove_file(entry.path()).map_err(error)?;
            }
        }
        Ok(())
    }
}

impl Blob<'_> {
    /// Puts the blob into the store under its digest.
    pub fn finish(self, media_type: &str) -> Result<Descriptor, Error> {
        let (file, digest, size) = self.file.finish();
        let path = self.store.path(&digest);
        file.persist(&path).map_err(|failed| Error::Write(path.clone(), failed.error))?;
        Ok(Descriptor::new(media_type, digest, size))
    }
}

impl Write for Blob<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The annotations by which an index names an image.
#[must_use]
pub fn annotations(name: &Reference) -> BTreeMap<String, String> {
    BTreeMap::from([
        (CONTAINERD_NAME.to_owned(), name.tagged()),
        (REF_NAME.to_owned(), name.tag.clone()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put_image(store: &Store, content: &str) -> Descriptor {
        let layer = store.put(image::LAYER, content.as_bytes()).unwrap();
        let config = store.put_json(image::CONFIG, &Config::empty()).unwrap();
        let media_type = Some(image::MANIFEST.into());
        let manifest = Manifest { schema_version: 2, media_type, config, layers: vec![layer] };
        store.put_json(image::MANIFEST, &manifest).unwrap()
    }

    #[test]
    fn a_name_means_the_last_image_that_got_it_and_the_one_before_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let name = Reference::parse("a:b").unwrap();
        let old = put_image(&store, "old");
        store.name(&name, &old).unwrap();
        let new = put_image(&store, "new");
        store.name(&name, &new).unwrap();
        assert_eq!(store.find(&name).unwrap().unwrap().digest, new.digest);
        assert!(!store.has(&old) && store.has(&new));
        store.forget(&name).unwrap();
        assert_eq!(store.find(&name).unwrap(), None);
        assert!(!store.has(&new));
    }

    #[test]
    fn a_damaged_blob_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let blob = store.put(image::CONFIG, b"good").unwrap();
        fs::write(store.path(&blob.digest), b"evil").unwrap();
        assert!(matches!(store.read(&blob.digest), Err(Error::Damaged(_))));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Images as one file, as `docker save` and `podman save` write it and `ctr images import`,
//! `docker load` and `podman load` read it.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::json;
use tar::{Archive, Builder, Header};
use tempfile::NamedTempFile;

use crate::image::{self, Config, Descriptor, Index, Manifest};
use crate::inside;
use crate::reference::Reference;
use crate::store::{self, LAYOUT, Store};

/// The index of docker's archives before version 25, which did not use the OCI layout.
const DOCKER_LIST: &str = "manifest.json";
/// The most that is read of an index, a manifest or a config.
const MAX_JSON: u64 = 64 << 20;
const PLAIN_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot write `{0}`")]
    Write(PathBuf, #[source] io::Error),
    #[error("cannot read `{0}`")]
    Read(PathBuf, #[source] io::Error),
    #[error("no image in `{0}`; create one with `elasticdl zoo build --output` or `docker save`")]
    NoImage(PathBuf),
    #[error("`{0}` is not a valid image archive")]
    Json(PathBuf, #[source] serde_json::Error),
    #[error("`{0}` is corrupt: digest of blob `{1}` does not match")]
    Damaged(PathBuf, String),
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// Writes one image with its name. The file is complete or does not exist.
pub fn write(
    store: &Store,
    name: &Reference,
    descriptor: &Descriptor,
    out: &Path,
) -> Result<(), Error> {
    let error = |error| Error::Write(out.into(), error);
    let image = store.image(descriptor)?;
    let manifest = &image.manifest;
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty());
    let file = NamedTempFile::new_in(folder.unwrap_or(Path::new("."))).map_err(error)?;
    let mut tar = Builder::new(BufWriter::new(file));
    let named = Descriptor { annotations: store::annotations(name), ..image.descriptor.clone() };
    let index =
        Index { schema_version: 2, media_type: Some(image::INDEX.into()), manifests: vec![named] };
    let blob = |digest: &crate::digest::Digest| format!("blobs/sha256/{}", digest.hex());
    let layers: Vec<_> = manifest.layers.iter().map(|layer| blob(&layer.digest)).collect();
    let list = json!([{"Config": blob(&manifest.config.digest), "RepoTags": [name.short()], "Layers": layers}]);
    let index = serde_json::to_vec(&index).map_err(|error| Error::Json(out.into(), error))?;
    add(&mut tar, "oci-layout", LAYOUT.as_bytes()).map_err(error)?;
    add(&mut tar, "index.json", &index).map_err(error)?;
    add(&mut tar, DOCKER_LIST, list.to_string().as_bytes()).map_err(error)?;
    let mut blobs = vec![&image.descriptor, &manifest.config];
    blobs.extend(&manifest.layers);
    blobs.sort_by(|a, b| a.digest.cmp(&b.digest));
    blobs.dedup_by(|a, b| a.digest == b.digest);
    for each in blobs {
        let source = File::open(store.path(&each.digest)).map_err(error)?;
        let mut header = header(each.size);
        tar.append_data(&mut header, blob(&each.digest), source).map_err(error)?;
    }
    let file = tar.into_inner().and_then(|buffer| Ok(buffer.into_inner()?)).map_err(error)?;
    file.as_file().set_permissions(PermissionsExt::from_mode(0o644)).map_err(error)?;
    file.persist(out).map_err(|failed| error(failed.error))?;
    Ok(())
}

/// Reads the one image of an archive into the store.
pub fn read(store: &Store, file: &Path) -> Result<Descriptor, Error> {
    let error = |error| Error::Read(file.into(), error);
    let unpacked = tempfile::tempdir_in(store.root()).map_err(error)?;
    let mut opened = BufReader::new(File::open(file).map_err(error)?);
    for entry in Archive::new(&mut opened).entries().map_err(error)? {
        let mut entry = entry.map_err(error)?;
        let kind = entry.header().entry_type();
        // No tool saves an image so, and a few bytes could fill the disk.
        if kind.is_gnu_sparse() {
            return Err(error(io::Error::other("it has a sparse file, which is not supported")));
        }
        // Folders are created for the files in them.
        if !kind.is_dir() {
            entry.unpack_in(unpacked.path()).map_err(error)?;
        }
    }
    read_folder(store, unpacked.path()).map_err(|failed| {
        // The folder is temporary, so the error names the user's file.
        if matches!(failed, Error::NoImage(_)) { Error::NoImage(file.into()) } else { failed }
    })
}

/// Reads the one image of a folder in the OCI layout, or of an unpacked archive.
pub fn read_folder(store: &Store, folder: &Path) -> Result<Descriptor, Error> {
    if folder.join("index.json").is_file() {
        let index: Index = read_json(&within(folder, "index.json")?)?;
        let found = index.for_this_machine().or(index.manifests.first());
        let descriptor = found.ok_or_else(|| Error::NoImage(folder.into()))?.clone();
        return read_layout(store, folder, &descriptor);
    }
    if folder.join(DOCKER_LIST).is_file() {
        read_docker(store, folder)
    } else {
        Err(Error::NoImage(folder.into()))
    }
}

fn read_layout(store: &Store, folder: &Path, descriptor: &Descriptor) -> Result<Descriptor, Error> {
    let mut descriptor = descriptor.clone();
    take(store, folder, &descriptor)?;
    // An index of one image may point to others by platform, but not any deeper.
    if descriptor.is_index() {
        let index: Index = read_json(&store.path(&descriptor.digest))?;
        descriptor = index.for_this_machine().ok_or(store::Error::Platform)?.clone();
        take(store, folder, &descriptor)?;
    }
    let manifest: Manifest = read_json(&store.path(&descriptor.digest))?;
    take(store, folder, &manifest.config)?;
    manifest.layers.iter().try_for_each(|layer| take(store, folder, layer))?;
    Ok(Descriptor { annotations: std::collections::BTreeMap::new(), ..descriptor })
}

/// Copies a blob and checks its digest.
fn take(store: &Store, folder: &Path, wanted: &Descriptor) -> Result<(), Error> {
    let path = format!("blobs/sha256/{}", wanted.digest.hex());
    let found = copy(store, &within(folder, &path)?, &wanted.media_type)?;
    if found.digest == wanted.digest {
        Ok(())
    } else {
        Err(Error::Damaged(folder.into(), wanted.digest.to_string()))
    }
}

/// One image of an archive as docker wrote it before version 25.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    layers: Vec<String>,
}

fn read_docker(store: &Store, folder: &Path) -> Result<Descriptor, Error> {
    let images: Vec<DockerImage> = read_json(&within(folder, DOCKER_LIST)?)?;
    let image = images.first().ok_or_else(|| Error::NoImage(folder.into()))?;
    let config = copy(store, &within(folder, &image.config)?, image::CONFIG)?;
    let parsed: Config = read_json(&store.path(&config.digest))?;
    let mut layers = Vec::new();
    for (path, diff_id) in image.layers.iter().zip(&parsed.rootfs.diff_ids) {
        let layer = copy(store, &within(folder, path)?, PLAIN_LAYER)?;
        if layer.digest != *diff_id {
            return Err(Error::Damaged(folder.into(), diff_id.to_string()));
        }
        layers.push(layer);
    }
    Ok(store.put_manifest(config, layers)?)
}

/// A file of an image's folder; equal layers of an older docker are links to each other.
fn within(folder: &Path, path: &str) -> Result<PathBuf, Error> {
    let found = inside::resolve(folder, path);
    let found = found.map_err(|error| Error::Read(folder.join(path), error))?;
    Ok(folder.join(found))
}

fn copy(store: &Store, path: &Path, media_type: &str) -> Result<Descriptor, Error> {
    let error = |error| Error::Read(path.into(), error);
    let mut blob = store.blob()?;
    io::copy(&mut File::open(path).map_err(error)?, &mut blob).map_err(error)?;
    Ok(blob.finish(media_type)?)
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let mut bytes = Vec::new();
    let file = File::open(path).and_then(|file| file.take(MAX_JSON).read_to_end(&mut bytes));
    file.map_err(|error| Error::Read(path.into(), error))?;
    serde_json::from_slice(&bytes).map_err(|error| Error::Json(path.into(), error))
}

fn add(tar: &mut Builder<impl Write>, path: &str, bytes: &[u8]) -> io::Result<()> {
    tar.append_data(&mut header(bytes.len() as u64), path, bytes)
}

fn header(size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_mode(0o644);
    header.set_size(size);
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Paths;
    use crate::layer::{self, Entry};

    fn put_image(store: &Store) -> Descriptor {
        let entries = vec![Entry::bytes("a", 0o644, "content")];
        let layer = layer::write(store, &Paths::default(), entries).unwrap();
        let mut config = Config::empty();
        config.rootfs.diff_ids.push(layer.diff_id);
        let config = store.put_json(image::CONFIG, &config).unwrap();
        let media_type = Some(image::MANIFEST.into());
        let manifest = Manifest { schema_version: 2, media_type, config, layers: vec![layer.blob] };
        store.put_json(image::MANIFEST, &manifest).unwrap()
    }

    #[test]
    fn an_archive_is_read_back_as_the_same_image() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("one")).unwrap();
        let built = put_image(&store);
        let (first, second) = (dir.path().join("a.tar"), dir.path().join("b.tar"));
        let name = Reference::parse("a:b").unwrap();
        write(&store, &name, &built, &first).unwrap();
        write(&store, &name, &built, &second).unwrap();
        assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(second).unwrap());
        let other = Store::open(&dir.path().join("two")).unwrap();
        assert_eq!(read(&other, &first).unwrap(), built);
        assert_eq!(other.image(&built).unwrap(), store.image(&built).unwrap());
    }

    #[test]
    fn an_older_docker_archive_is_read_by_its_list() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store")).unwrap();
        let folder = dir.path().join("docker");
        std::fs::create_dir(&folder).unwrap();
        let mut config = Config::empty();
        config.rootfs.diff_ids.push(crate::digest::Digest::of(b"layer"));
        std::fs::write(folder.join("l.tar"), "layer").unwrap();
        std::fs::write(folder.join("c.json"), serde_json::to_vec(&config).unwrap()).unwrap();
        std::fs::write(folder.join(DOCKER_LIST), r#"[{"Config":"c.json","Layers":["l.tar"]}]"#)
            .unwrap();
        let image = store.image(&read_folder(&store, &folder).unwrap()).unwrap();
        assert_eq!(image.config, config);
        std::fs::write(folder.join("l.tar"), "other").unwrap();
        assert!(matches!(read_folder(&store, &folder), Err(Error::Damaged(..))));
    }

    #[test]
    fn an_image_takes_no_files_from_outside_its_folder() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store")).unwrap();
        let secret = dir.path().join("secret.json");
        std::fs::write(&secret, serde_json::to_vec(&Config::empty()).unwrap()).unwrap();
        let folder = dir.path().join("docker");
        std::fs::create_dir(&folder).unwrap();
        std::os::unix::fs::symlink(&secret, folder.join("c.json")).unwrap();
        std::fs::write(folder.join(DOCKER_LIST), r#"[{"Config":"c.json","Layers":[]}]"#).unwrap();
        let error = read_folder(&store, &folder).unwrap_err();
        assert!(matches!(error, Error::Read(..)), "{error:?}");
    }

    #[test]
    fn a_sparse_file_is_refused_before_it_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store")).unwrap();
        let mut header = header(0);
        header.set_entry_type(tar::EntryType::GNUSparse);
        let gnu = header.as_gnu_mut().unwrap();
        // 16 MiB in a header of 512 bytes.
        gnu.realsize = *b"00100000000\0";
        gnu.sparse[0].offset = gnu.realsize;
        gnu.sparse[0].numbytes = *b"00000000000\0";
        let mut tar = Builder::new(File::create(dir.path().join("a.tar")).unwrap());
        tar.append_data(&mut header, "large", io::empty()).unwrap();
        tar.into_inner().unwrap();
        let Err(Error::Read(_, error)) = read(&store, &dir.path().join("a.tar")) else {
            panic!("it was read")
        };
        assert!(error.to_string().contains("sparse"), "{error}");
    }

    #[test]
    fn a_file_without_an_image_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store")).unwrap();
        let file = dir.path().join("empty.tar");
        std::fs::write(&file, [0; 1024]).unwrap();
        assert!(matches!(read(&store, &file), Err(Error::NoImage(path)) if path == file));
        assert!(matches!(read(&store, &dir.path().join("none")), Err(Error::Read(..))));
    }
}

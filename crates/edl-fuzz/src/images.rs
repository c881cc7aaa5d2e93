// SPDX-License-Identifier: Apache-2.0
//! Images of others: Dockerfiles, layers, archives, the answers of registries, and programs.

use std::collections::BTreeMap;
use std::path::Path;

use edl_image::base::Paths;
use edl_image::image::{Config, Descriptor, Index, LAYER, Manifest};
use edl_image::reference::Reference;
use edl_image::registry::auth::Challenge;
use edl_image::store::Store;
use edl_image::{digest, dockerfile, elf};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) fn dockerfile(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    drop(dockerfile::parse(&text, &BTreeMap::from([("BASE".to_owned(), "scratch".to_owned())])));
}

pub(crate) fn layer(bytes: &[u8]) {
    let plain = "application/vnd.oci.image.layer.v1.tar";
    for (media_type, bytes) in [(LAYER, bytes.to_vec()), (plain, with_tar_checksums(bytes))] {
        let descriptor = Descriptor::new(media_type, digest::Digest::of(b""), 0);
        drop(Paths::default().add_layer(&descriptor, &*bytes, Path::new("layer")));
    }
}

/// An archive as `docker save` writes it.
pub(crate) fn archive(bytes: &[u8]) {
    let dir = tempfile::tempdir().expect("the folder for temporary files is writable");
    let store = Store::open(&dir.path().join("store")).expect("an empty folder can be a store");
    let file = dir.path().join("image.tar");
    std::fs::write(&file, with_tar_checksums(bytes)).expect("there is room for a small file");
    if let Ok(descriptor) = edl_image::archive::read(&store, &file)
        && let Ok(image) = store.image(&descriptor)
    {
        drop(Paths::of(&store, &image.manifest));
    }
}

/// Answers of a registry, and names of images.
pub(crate) fn registry(bytes: &[u8]) {
    json::<Index>(bytes);
    json::<Manifest>(bytes);
    json::<Config>(bytes);
    if let Ok(index) = serde_json::from_slice::<Index>(bytes) {
        let _ = index.for_this_machine();
    }
    let text = String::from_utf8_lossy(bytes);
    drop(Challenge::parse(&text));
    if let Ok(name) = Reference::parse(&text) {
        let again = Reference::parse(&name.to_string());
        assert_eq!(again.as_ref(), Ok(&name), "a name has changed");
    }
}

/// What was read can be written and read again.
fn json<T: DeserializeOwned + Serialize + PartialEq>(bytes: &[u8]) {
    let Ok(value) = serde_json::from_slice::<T>(bytes) else { return };
    let written = serde_json::to_vec(&value).expect("it has a JSON form");
    let again = serde_json::from_slice::<T>(&written).expect("what was written can be read");
    assert!(again == value, "a value has changed");
}

pub(crate) fn program(bytes: &[u8]) {
    drop(elf::needs(bytes));
    drop(elf::strip(bytes.to_vec()));
}

/// With the checksums that the headers need, because a mutation never hits a checksum.
fn with_tar_checksums(bytes: &[u8]) -> Vec<u8> {
    const CHECKSUM: std::ops::Range<usize> = 148..156;
    let mut fixed = bytes.to_vec();
    for block in fixed.chunks_exact_mut(512).filter(|block| block[257..].starts_with(b"ustar")) {
        block[CHECKSUM].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    fixed
}

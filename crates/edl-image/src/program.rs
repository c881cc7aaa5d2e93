// SPDX-License-Identifier: Apache-2.0
//! The `elasticdl` program for an image: without debug data, and with its libraries if the image has
//! none.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::elf::{self, Needs};
use crate::layer::Entry;

/// The path of the program in every image.
pub const PATH: &str = "usr/local/bin/elasticdl";
const EXECUTABLE: u32 = 0o755;
const READABLE: u32 = 0o644;
/// All libraries are put into the folder of this one, which the loader searches.
const LIBC: &str = "libc.so.6";

/// The loader's default folders, searched after those of `ld.so.conf`.
const FOLDERS: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];
/// Files that name other folders.
const LD_SO_CONF: [&str; 2] = ["/etc/ld.so.conf", "/etc/ld.so.conf.d/*.conf"];

/// Files that programs expect on any Linux, for an empty image: users, and host lookup in
/// `/etc/hosts` and then by DNS.
const PASSWD: &str = "root:x:0:0:root:/:/sbin/nologin\nelasticdl:x:1000:1000::/tmp:/sbin/nologin\n";
const GROUP: &str = "root:x:0:\nelasticdl:x:1000:\n";
const NSSWITCH: &str = "passwd: files\ngroup: files\nhosts: files dns\n";

/// A program, read from this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    stripped: Vec<u8>,
    /// Loader and libraries by their paths in the image; none for a static program.
    libraries: BTreeMap<String, Vec<u8>>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the program `{0}`")]
    Read(PathBuf, #[source] io::Error),
    #[error("cannot add `{0}` to an image")]
    Elf(PathBuf, #[source] elf::Error),
    #[error("`{program}` needs the library `{library}`, which is not installed on this machine")]
    Library { program: PathBuf, library: String },
}

impl Program {
    /// Reads a program and every library that it needs.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let whole = fs::read(path).map_err(|error| Error::Read(path.into(), error))?;
        let refused = |error| Error::Elf(path.into(), error);
        let needs = elf::needs(&whole).map_err(refused)?;
        let stripped = elf::strip(whole).map_err(refused)?;
        let libraries = libraries(path, &needs)?;
        Ok(Self { stripped, libraries })
    }

    /// The program for an image that already has libraries, users and folders.
    #[must_use]
    pub fn alone(&self) -> Vec<Entry> {
        vec![Entry::bytes(PATH, EXECUTABLE, self.stripped.clone())]
    }

    /// The program with everything it needs in an empty image.
    #[must_use]
    pub fn with_all(&self) -> Vec<Entry> {
        let mut entries = self.alone();
        let libraries = self.libraries.iter();
        entries
            .extend(libraries.map(|(path, bytes)| Entry::bytes(path, EXECUTABLE, bytes.clone())));
        entries.push(Entry::bytes("etc/passwd", READABLE, PASSWD));
        entries.push(Entry::bytes("etc/group", READABLE, GROUP));
        entries.push(Entry::bytes("etc/nsswitch.conf", READABLE, NSSWITCH));
        entries.push(Entry::folder("tmp", 0o1777));
        entries
    }
}

fn libraries(program: &Path, needs: &Needs) -> Result<BTreeMap<String, Vec<u8>>, Error> {
    let Some(interpreter) = &needs.interpreter else { return Ok(BTreeMap::new()) };
    let mut found: BTreeMap<String, (PathBuf, Vec<u8>)> = BTreeMap::new();
    let mut wanted = needs.libraries.clone();
    let folders = folders(program, needs);
    while let Some(name) = wanted.pop() {
        if found.contains_key(&name) {
            continue;
        }
        let is_here = |folder: &PathBuf| {
            let bytes = fs::read(folder.join(&name)).ok()?;
            // Like the loader, skip libraries for other architectures.
            let needs = elf::needs(&bytes).ok()?;
            Some((folder.clone(), bytes, needs))
        };
        let Some((folder, bytes, more)) = folders.iter().find_map(is_here) else {
            return Err(Error::Library { program: program.into(), library: name });
        };
        wanted.extend(more.libraries);
        found.insert(name, (folder, bytes));
    }
    let home = found.get(LIBC).map_or_else(|| PathBuf::from("/lib"), |(folder, _)| folder.clone());
    let loader_name = Path::new(interpreter).file_name().unwrap_or_default();
    let is_loader = |name: &str| loader_name == name;
    let mut libraries: BTreeMap<_, _> = found
        .into_iter()
        .filter(|(name, _)| !is_loader(name))
        .map(|(name, (_, bytes))| (inside(&home.join(name)), bytes))
        .collect();
    let loader = fs::read(interpreter);
    let loader = loader.map_err(|error| Error::Read(interpreter.into(), error))?;
    libraries.insert(inside(Path::new(interpreter)), loader);
    Ok(libraries)
}

/// A path of this machine as one of the image.
fn inside(path: &Path) -> String {
    path.to_string_lossy().trim_start_matches('/').into()
}

/// The folders that this machine's loader searches.
fn folders(program: &Path, needs: &Needs) -> Vec<PathBuf> {
    let origin = program.parent().unwrap_or(program).to_string_lossy().into_owned();
    let named = needs.run_path.iter().map(|path| path.replace("$ORIGIN", &origin).into());
    let configured = LD_SO_CONF.iter().filter_map(|pattern| glob::glob(pattern).ok()).flatten();
    let lines =
        configured.filter_map(|file| fs::read_to_string(file.ok()?).ok()).flat_map(|text| {
            let paths = text.lines().map(str::trim).filter(|line| line.starts_with('/'));
            paths.map(PathBuf::from).collect::<Vec<_>>()
        });
    named.chain(lines).chain(FOLDERS.map(PathBuf::from)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamic_program_brings_its_loader_and_all_libraries() {
        let program = Program::read(&std::env::current_exe().unwrap()).unwrap();
        assert!(!program.libraries.is_empty());
        let paths: Vec<_> = program.with_all().into_iter().map(|entry| entry.path).collect();
        assert!(paths.iter().any(|path| path.contains("ld-linux")), "{paths:?}");
        assert!(paths.iter().any(|path| path.ends_with("/libc.so.6")), "{paths:?}");
        assert_eq!(program.alone().len(), 1);
    }

    #[test]
    fn a_script_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("script");
        fs::write(&script, "#!/bin/sh\n").unwrap();
        let error = Program::read(&script).unwrap_err();
        assert!(matches!(error, Error::Elf(..)), "{error}");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The folder that an image is built from, without the files that `.dockerignore` excludes.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern};

use crate::base::clean;
use crate::inside;
use crate::layer::{Content, Entry};

/// The folder of a context that contains the `elasticdl` program, for `COPY .elasticdl/ /`.
pub const PROGRAM: &str = ".elasticdl";
const IGNORE_FILE: &str = ".dockerignore";
/// Never part of an image.
const NEVER: [&str; 4] = [".git", "**/__pycache__", "**/*.pyc", PROGRAM];

/// Files that may be copied into an image.
#[derive(Clone, Debug)]
pub struct Context {
    root: PathBuf,
    /// Patterns, and whether they exclude or include; the last match counts.
    patterns: Vec<(Pattern, bool)>,
    /// The contents of the folder [`PROGRAM`], which is not on disk.
    program: Vec<Entry>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("folder `{0}` not found")]
    NoFolder(PathBuf),
    #[error("cannot read `{0}`")]
    Read(PathBuf, #[source] io::Error),
    #[error("`{0}` is not in `{1}`, or is excluded by .dockerignore")]
    NoSource(String, PathBuf),
    #[error("`{0}` is not a file, folder or link")]
    Kind(PathBuf),
    #[error("invalid pattern `{text}` in `{file}`", file = IGNORE_FILE)]
    Pattern { text: String },
}

impl Context {
    pub fn open(root: &Path, program: Vec<Entry>) -> Result<Self, Error> {
        if !root.is_dir() {
            return Err(Error::NoFolder(root.into()));
        }
        let file = inside::resolve(root, IGNORE_FILE);
        let text = match file.and_then(|file| fs::read_to_string(root.join(file))) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(Error::Read(root.join(IGNORE_FILE), error)),
        };
        let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
        let mut patterns = Vec::new();
        for line in lines.filter(|line| !line.is_empty()).chain(NEVER) {
            let (rest, is_excluded) =
                line.strip_prefix('!').map_or((line, true), |rest| (rest, false));
            let pattern = Pattern::new(&clean(rest));
            let pattern = pattern.map_err(|_| Error::Pattern { text: line.into() })?;
            patterns.push((pattern, is_excluded));
        }
        Ok(Self { root: root.into(), patterns, program })
    }

    /// The files of the command.
    #[must_use]
    pub fn program(&self) -> &[Entry] {
        &self.program
    }

    /// What `COPY source target` puts into an image. A source may be a link within the folder; links
    /// below a source stay links.
    pub fn copy(&self, source: &str, target: &str) -> Result<Vec<Entry>, Error> {
        let from = clean(source);
        if from == PROGRAM {
            return Ok(self.program.iter().map(|entry| below(target, entry)).collect());
        }
        let missing = || Error::NoSource(source.into(), self.root.clone());
        let real = inside::resolve(&self.root, &from).map_err(|error| {
            let is_missing = error.kind() == io::ErrorKind::NotFound;
            if is_missing { missing() } else { Error::Read(self.root.join(&from), error) }
        })?;
        let path = self.root.join(&real);
        let real = real.to_string_lossy();
        if self.excludes(&from) || self.excludes(&real) {
            return Err(missing());
        }
        let mut entries = Vec::new();
        if path.is_dir() {
            if !clean(target).is_empty() {
                entries.push(Entry::folder(&clean(target), 0o755));
            }
            self.walk(&real, target, &mut entries)?;
        } else {
            let name = from.rsplit('/').next().unwrap_or_default();
            let is_folder = target.ends_with('/');
            let target = if is_folder { format!("{target}{name}") } else { target.into() };
            entries.push(entry(&path, &clean(&target))?);
        }
        Ok(entries)
    }

    fn walk(&self, from: &str, target: &str, entries: &mut Vec<Entry>) -> Result<(), Error> {
        let folder = self.root.join(from);
        let error = |error| Error::Read(folder.clone(), error);
        for found in fs::read_dir(&folder).map_err(error)? {
            let name = found.map_err(error)?.file_name().to_string_lossy().into_owned();
            let source = clean(&format!("{from}/{name}"));
            let goal = clean(&format!("{target}/{name}"));
            let entry = entry(&self.root.join(&source), &goal)?;
            let is_folder = entry.content == Content::Folder;
            let is_excluded = self.excludes(&source);
            if !is_excluded {
                entries.push(entry);
            }
            // A file in an excluded folder may be included again.
            if is_folder && (!is_excluded || self.includes_again()) {
                self.walk(&source, &goal, entries)?;
            }
        }
        Ok(())
    }

    fn includes_again(&self) -> bool {
        self.patterns.iter().any(|(_, is_excluded)| !is_excluded)
    }

    /// Whether a pattern excludes the path or a parent folder.
    fn excludes(&self, path: &str) -> bool {
        let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
        let above = path.match_indices('/').map(|(at, _)| &path[..at]);
        let prefixes: Vec<_> = above.chain([path]).collect();
        let fits =
            |pattern: &Pattern| prefixes.iter().any(|each| pattern.matches_with(each, options));
        self.patterns.iter().rfind(|(pattern, _)| fits(pattern)).is_some_and(|(_, out)| *out)
    }
}

fn below(target: &str, entry: &Entry) -> Entry {
    Entry { path: clean(&format!("{target}/{}", entry.path)), ..entry.clone() }
}

/// Of a file's mode, only the executable bit is kept.
fn entry(source: &Path, path: &str) -> Result<Entry, Error> {
    let error = |error| Error::Read(source.into(), error);
    let found = fs::symlink_metadata(source).map_err(error)?;
    let kind = found.file_type();
    let (mode, content) = if kind.is_dir() {
        (0o755, Content::Folder)
    } else if kind.is_symlink() {
        let target = fs::read_link(source).map_err(error)?;
        (0o777, Content::Link(target.to_string_lossy().into_owned()))
    } else if kind.is_file() {
        let is_executable = found.permissions().mode() & 0o100 != 0;
        (if is_executable { 0o755 } else { 0o644 }, Content::File(source.into()))
    } else {
        return Err(Error::Kind(source.into()));
    };
    Ok(Entry { path: path.into(), mode, content })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(context: &Context, source: &str, target: &str) -> Vec<String> {
        let mut paths: Vec<_> =
            context.copy(source, target).unwrap().into_iter().map(|entry| entry.path).collect();
        paths.sort();
        paths
    }

    fn zoo(ignore: &str) -> (tempfile::TempDir, Context) {
        let dir = tempfile::tempdir().unwrap();
        for file in
            ["zoo/a.py", "zoo/b.csv", "zoo/data/c.csv", "zoo/__pycache__/a.pyc", "Dockerfile"]
        {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        fs::write(dir.path().join(IGNORE_FILE), ignore).unwrap();
        let context = Context::open(dir.path(), vec![Entry::bytes("bin/x", 0o755, "x")]).unwrap();
        (dir, context)
    }

    #[test]
    fn a_folder_is_copied_without_what_is_excluded() {
        let (_dir, context) = zoo("# data\n**/*.csv\n!zoo/b.csv\n");
        assert_eq!(
            paths(&context, "zoo/", "/model_zoo"),
            ["model_zoo", "model_zoo/a.py", "model_zoo/b.csv", "model_zoo/data"]
        );
        let (_dir, context) = zoo("zoo/data\n");
        assert_eq!(paths(&context, "zoo", "/z/"), ["z", "z/a.py", "z/b.csv"]);
    }

    #[test]
    fn a_file_goes_into_a_folder_or_gets_a_name() {
        let (_dir, context) = zoo("");
        assert_eq!(paths(&context, "zoo/a.py", "/m/"), ["m/a.py"]);
        assert_eq!(paths(&context, "zoo/a.py", "/m/b.py"), ["m/b.py"]);
        assert_eq!(paths(&context, ".elasticdl/", "/"), ["bin/x"]);
    }

    #[test]
    fn links_out_of_the_folder_are_never_followed() {
        use std::os::unix::fs::symlink;

        let (dir, context) = zoo("zoo/data\n");
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("secret"), "secret").unwrap();
        symlink(outside.path(), dir.path().join("folder")).unwrap();
        symlink(outside.path().join("secret"), dir.path().join("file")).unwrap();
        symlink("zoo", dir.path().join("same")).unwrap();
        symlink("zoo/data", dir.path().join("excluded")).unwrap();
        for source in ["folder", "folder/", "folder/secret", "file"] {
            let error = context.copy(source, "/").unwrap_err();
            assert!(matches!(error, Error::Read(..)), "{source}: {error:?}");
        }
        assert!(matches!(context.copy("excluded", "/"), Err(Error::NoSource(..))));
        assert_eq!(paths(&context, "same", "/z"), ["z", "z/a.py", "z/b.csv"]);
        // Below a source, links are copied as links.
        let link = context.copy(".", "/").unwrap();
        let link = link.iter().find(|entry| entry.path == "folder").unwrap();
        assert!(matches!(link.content, Content::Link(_)), "{link:?}");
        fs::remove_file(dir.path().join(IGNORE_FILE)).unwrap();
        symlink(outside.path().join("secret"), dir.path().join(IGNORE_FILE)).unwrap();
        assert!(matches!(Context::open(dir.path(), vec![]), Err(Error::Read(..))));
    }

    #[test]
    fn what_is_not_in_the_folder_is_refused() {
        let (dir, context) = zoo("zoo/b.csv");
        for source in ["none", "zoo/b.csv", "zoo/__pycache__"] {
            assert!(matches!(context.copy(source, "/"), Err(Error::NoSource(..))), "{source}");
        }
        assert!(matches!(Context::open(&dir.path().join("x"), vec![]), Err(Error::NoFolder(_))));
    }
}

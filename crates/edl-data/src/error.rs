// SPDX-License-Identifier: Apache-2.0
//! What can be wrong with a data set: sentences that name the file, the chunk and the record.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Why a data set cannot be opened, read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "no such file or folder: `{location}`; check the path, or create a dataset with \
         `elasticdl data gen`"
    )]
    Missing { location: String },
    #[error("`{location}` contains no data files{hint}")]
    Empty { location: String, hint: String },
    #[error("the files in `{location}` contain no records")]
    NoRecords { location: String },
    #[error("`{location}` already contains data files; remove them or choose another folder")]
    Exists { location: String },
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    /// The bytes are not what the format promises.
    #[error("{place}: {problem}")]
    Corrupt { place: Box<Place>, problem: String },
    /// The record is sound, but not what was asked for.
    #[error("{place}: field `{field}`: {problem}")]
    Field { place: Box<Place>, field: String, problem: String },
    #[error("record {record} is out of range; number of records: {n_records}")]
    OutOfRange { record: u64, n_records: u64 },
    /// A location, option or package that cannot be used as it is; the text says what to do.
    #[error("{0}")]
    Refused(String),
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_path_buf(), source }
    }

    pub(crate) fn corrupt(place: Place, problem: impl fmt::Display) -> Self {
        Self::Corrupt { place: Box::new(place), problem: problem.to_string() }
    }

    pub(crate) fn field(place: Place, field: &str, problem: String) -> Self {
        Self::Field { place: Box::new(place), field: field.to_owned(), problem }
    }

    pub(crate) fn refused(text: impl Into<String>) -> Self {
        Self::Refused(text.into())
    }
}

/// The formats' names for a chunk: their own, or a common one for those that have none.
pub(crate) const CHUNK: &str = "chunk";
pub(crate) const BLOCK: &str = "block";
pub(crate) const ROW_GROUP: &str = "row group";

/// Where in a data set something is. Chunks and records are counted from zero, lines from one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub file: PathBuf,
    /// The number of the chunk in the file, with the format's own word for a chunk.
    pub chunk: Option<(&'static str, usize)>,
    /// The number of the record in the chunk.
    pub record: Option<usize>,
    /// For formats that are read with a text editor.
    pub line: Option<u64>,
}

impl Place {
    pub(crate) fn file(path: &Path) -> Self {
        Self { file: path.to_path_buf(), chunk: None, record: None, line: None }
    }

    pub(crate) fn chunk(path: &Path, word: &'static str, chunk: usize) -> Self {
        Self { chunk: Some((word, chunk)), ..Self::file(path) }
    }

    pub(crate) fn record(self, record: usize) -> Self {
        Self { record: Some(record), ..self }
    }

    pub(crate) fn line(self, line: u64) -> Self {
        Self { line: Some(line), ..self }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.file.display())?;
        if let Some((word, chunk)) = self.chunk {
            write!(f, ", {word} {chunk}")?;
        }
        if let Some(record) = self.record {
            write!(f, ", record {record}")?;
        }
        if let Some(line) = self.line {
            write!(f, " (line {line})")?;
        }
        Ok(())
    }
}

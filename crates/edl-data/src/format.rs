// SPDX-License-Identifier: Apache-2.0
//! Which format a file has, and the options with which it is read.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{BLOCK, CHUNK, Error, ROW_GROUP};
use crate::{recordio, tfrecord};

/// The format of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    RecordIo,
    TfRecord,
    Csv,
    Jsonl,
    Parquet,
    /// No files: `range:N` has the numbers of N records, and the model brings what they stand for.
    Range,
}

impl Format {
    /// Those that files can have.
    const ALL: [Self; 5] = [Self::RecordIo, Self::TfRecord, Self::Csv, Self::Jsonl, Self::Parquet];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::RecordIo => "recordio",
            Self::TfRecord => "tfrecord",
            Self::Csv => "csv",
            Self::Jsonl => "jsonl",
            Self::Parquet => "parquet",
            Self::Range => "range",
        }
    }

    /// Whether its records are raw bytes.
    pub(crate) fn has_raw_records(self) -> bool {
        matches!(self, Self::RecordIo | Self::TfRecord)
    }

    /// The format's name for a chunk.
    pub(crate) fn chunk_name(self) -> &'static str {
        match self {
            Self::RecordIo => CHUNK,
            Self::TfRecord | Self::Csv | Self::Jsonl | Self::Range => BLOCK,
            Self::Parquet => ROW_GROUP,
        }
    }

    fn from_extension(path: &Path) -> Option<Self> {
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        match extension.as_str() {
            "recordio" | "rio" | "rec" => Some(Self::RecordIo),
            "tfrecord" | "tfrecords" => Some(Self::TfRecord),
            "csv" | "tsv" => Some(Self::Csv),
            "jsonl" | "ndjson" => Some(Self::Jsonl),
            "parquet" | "pq" => Some(Self::Parquet),
            _ => None,
        }
    }

    fn from_magic(start: &[u8]) -> Option<Self> {
        if start.starts_with(&recordio::MAGIC.to_le_bytes()) {
            return Some(Self::RecordIo);
        }
        if start.starts_with(b"PAR1") {
            return Some(Self::Parquet);
        }
        if start.first_chunk().is_some_and(|header| tfrecord::parse_header(header).is_ok()) {
            return Some(Self::TfRecord);
        }
        start.trim_ascii_start().starts_with(b"{").then_some(Self::Jsonl)
    }

    /// The format of a file by its name or, where that says nothing, by its first bytes. An empty
    /// file without a telling name has none.
    pub(crate) fn of_file(path: &Path) -> Result<Option<Self>, Error> {
        let mut start = Vec::new();
        let file = File::open(path).map_err(Error::io("open", path))?;
        file.take(64).read_to_end(&mut start).map_err(Error::io("read", path))?;
        let by_magic = Self::from_magic(&start);
        if let Some(format) = Self::from_extension(path).or(by_magic) {
            return Ok(Some(format));
        }
        if start.is_empty() {
            return Ok(None);
        }
        let advice = match *start.as_slice() {
            [0x1f, 0x8b, ..] => "it is compressed with gzip; decompress it first".to_owned(),
            [0, 0, 8..=14, 1..=4, ..] => {
                "it looks like an IDX file; convert it with `elasticdl data import`".to_owned()
            }
            _ => format!(
                "use one of the file extensions {}, or set the format with \
                 --data_reader_params=format=csv",
                Self::ALL.map(|format| format!(".{format}")).join(", ")
            ),
        };
        Err(Error::Refused(format!("cannot detect the format of `{}`: {advice}", path.display())))
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Format {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|format| format.name() == text).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            Error::Refused(format!("unknown format `{text}`; use one of {known}"))
        })
    }
}

/// What `--data_reader_params` can say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Params {
    pub(crate) format: Option<Format>,
    /// Between the cells of a CSV file; else a comma, or a tab where the name ends with `.tsv`.
    pub(crate) delimiter: Option<u8>,
    /// Whether the first line of a CSV file names the columns.
    pub(crate) header: bool,
    /// Names of the columns, for CSV files that do not name them.
    pub(crate) columns: Vec<String>,
    /// Whether white space around the cells of a CSV file is dropped.
    pub(crate) trim: bool,
    /// Decoded chunks that stay in memory.
    pub(crate) cache_bytes: usize,
    /// Where files of remote data sets are kept.
    pub(crate) cache_dir: Option<PathBuf>,
}

const PARAMS: &str = "format, delimiter, header, columns, trim, cache_mb, cache_dir";

impl Params {
    pub(crate) fn parse(params: &BTreeMap<String, String>) -> Result<Self, Error> {
        let mut parsed = Self {
            format: None,
            delimiter: None,
            header: true,
            columns: Vec::new(),
            trim: false,
            cache_bytes: 128 << 20,
            cache_dir: None,
        };
        for (key, value) in params {
            let wrong = |needs: &str| {
                Error::Refused(format!(
                    "--data_reader_params: `{key}` must be {needs}, not `{value}`"
                ))
            };
            match key.as_str() {
                "format" => parsed.format = Some(value.parse()?),
                "delimiter" => {
                    let byte = match value.as_bytes() {
                        b"\\t" | b"tab" => b'\t',
                        [byte] => *byte,
                        _ => return Err(wrong("one character or `tab`")),
                    };
                    parsed.delimiter = Some(byte);
                }
                "header" => {
                    parsed.header = parse_bool(value).ok_or_else(|| wrong("true or false"))?
                }
                "trim" => parsed.trim = parse_bool(value).ok_or_else(|| wrong("true or false"))?,
                "columns" => {
                    parsed.columns = value.split(',').map(|name| name.trim().to_owned()).collect();
                }
                "cache_mb" => {
                    let megabytes: usize = value.parse().map_err(|_| wrong("a number"))?;
                    parsed.cache_bytes = megabytes.saturating_mul(1 << 20);
                }
                "cache_dir" => parsed.cache_dir = Some(value.into()),
                _ => {
                    return Err(Error::Refused(format!(
                        "--data_reader_params: unknown key `{key}`; use one of {PARAMS}"
                    )));
                }
            }
        }
        Ok(parsed)
    }
}

fn parse_bool(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" => Some(true),
        "false" | "0" | "no" => Some(false),
        _ => None,
    }
}

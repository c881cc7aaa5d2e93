// SPDX-License-Identifier: Apache-2.0
//! Writes the model's output for one shard of the prediction data: one JSON line per record, in
//! the order of the records.
//!
//! A part file appears under its name when it is whole. Two workers that were assigned the
//! same shard write the same lines, and the later rename wins.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use edl_core::id::LeaseId;
use edl_tensor::model::{Inputs, Model};
use serde::Serialize;

/// One shard under way.
#[derive(Debug)]
pub(crate) struct Prediction {
    part: Part,
    n_records: u64,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Model(#[from] edl_tensor::model::Error),
    #[error("the model returned {values} values of width {width} for {n_records} records")]
    Shape { values: usize, width: usize, n_records: usize },
    #[error("cannot write predictions to `{}`: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// A file that is not there until it is whole.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    temporary: PathBuf,
    out: BufWriter<File>,
}

#[derive(Serialize)]
struct Line<'a> {
    record: u64,
    output: &'a [f32],
}

impl Prediction {
    /// Starts the part file of a shard.
    pub(crate) fn new(shard: u32, folder: &Path, lease: LeaseId) -> Result<Self, Error> {
        let path = folder.join(format!("part-{shard:06}.jsonl"));
        let part = Part::create(path.clone(), lease);
        let part = part.map_err(|source| Error::Write { path, source })?;
        Ok(Self { part, n_records: 0 })
    }

    /// Adds one minibatch.
    pub(crate) fn add(&mut self, model: &mut dyn Model, inputs: Inputs<'_>) -> Result<(), Error> {
        let predictions = model.predict(inputs)?;
        let (width, n_records) = (predictions.width, inputs.batch.len());
        if predictions.values.len() != width * n_records {
            return Err(Error::Shape { values: predictions.values.len(), width, n_records });
        }
        for (row, record) in inputs.batch.records.iter().enumerate() {
            let output = &predictions.values[row * width..(row + 1) * width];
            let write =
                serde_json::to_writer(&mut self.part.out, &Line { record: *record, output })
                    .map_err(io::Error::from)
                    .and_then(|()| self.part.out.write_all(b"\n"));
            write.map_err(|source| self.part.error(source))?;
        }
        self.n_records += n_records as u64;
        Ok(())
    }

    /// Puts the whole file in its place; its name and how many records it has.
    pub(crate) fn publish(mut self) -> Result<(String, u64), Error> {
        self.part.publish().map_err(|source| self.part.error(source))?;
        let name = self.part.path.file_name().unwrap_or_default();
        Ok((name.to_string_lossy().into_owned(), self.n_records))
    }
}

impl Part {
    fn create(path: PathBuf, lease: LeaseId) -> io::Result<Self> {
        let folder = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = folder.join(format!(".{name}.{}.{lease}.tmp", std::process::id()));
        let out = BufWriter::new(File::create(&temporary)?);
        Ok(Self { path, temporary, out })
    }

    fn publish(&mut self) -> io::Result<()> {
        self.out.flush()?;
        self.out.get_ref().sync_all()?;
        std::fs::rename(&self.temporary, &self.path)?;
        let folder = self.path.parent().unwrap_or(Path::new("."));
        File::open(folder)?.sync_all()
    }

    fn error(&self, source: io::Error) -> Error {
        Error::Write { path: self.path.clone(), source }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // Gone already if the part was published; then there is nothing to clean up.
        let _ = std::fs::remove_file(&self.temporary);
    }
}

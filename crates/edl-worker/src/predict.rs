// SPDX-License-Identifier: Apache-2.0
//! Writes the model's output for one shard of the prediction data: one JSON line per record, in
//! the order of the records.
//!
//! A part file appears under its name when it is complete. Two workers that were assigned the
//! same shard write the same lines, and the later rename wins.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use edl_core::id::LeaseId;
use edl_tensor::model::{Inputs, Model, Predictions};
use serde::Serialize;

/// The part file of a shard in progress.
#[derive(Debug)]
pub(crate) struct Prediction {
    path: PathBuf,
    temporary: PathBuf,
    out: BufWriter<File>,
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

#[derive(Serialize)]
struct Line<'a> {
    record: u64,
    output: &'a [f32],
}

impl Prediction {
    pub(crate) fn new(shard: u32, folder: &Path, lease: LeaseId) -> Result<Self, Error> {
        let name = format!("part-{shard:06}.jsonl");
        let path = folder.join(&name);
        let temporary = folder.join(format!(".{name}.{}.{lease}.tmp", std::process::id()));
        let create = || -> io::Result<File> {
            std::fs::create_dir_all(folder)?;
            File::create(&temporary)
        };
        match create() {
            Ok(file) => Ok(Self { path, temporary, out: BufWriter::new(file) }),
            Err(source) => Err(Error::Write { path, source }),
        }
    }

    /// Adds one minibatch.
    pub(crate) fn add(&mut self, model: &mut dyn Model, inputs: Inputs<'_>) -> Result<(), Error> {
        let predictions = model.predict(inputs)?;
        check(&predictions, inputs.batch.len())?;
        let width = predictions.width;
        for (row, record) in inputs.batch.records.iter().enumerate() {
            let output = &predictions.values[row * width..(row + 1) * width];
            let write = serde_json::to_writer(&mut self.out, &Line { record: *record, output })
                .map_err(io::Error::from)
                .and_then(|()| self.out.write_all(b"\n"));
            write.map_err(|source| self.error(source))?;
        }
        Ok(())
    }

    /// Gives the complete file its name.
    pub(crate) fn publish(mut self) -> Result<(), Error> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let published = (self.out.flush())
            .and_then(|()| self.out.get_ref().sync_all())
            .and_then(|()| std::fs::rename(&self.temporary, &self.path))
            .and_then(|()| File::open(folder)?.sync_all());
        published.map_err(|source| self.error(source))
    }

    fn error(&self, source: io::Error) -> Error {
        Error::Write { path: self.path.clone(), source }
    }
}

/// Refuses an output that is not one row of numbers per record.
pub(crate) fn check(predictions: &Predictions, n_records: usize) -> Result<(), Error> {
    let (values, width) = (predictions.values.len(), predictions.width);
    if values == width * n_records {
        return Ok(());
    }
    Err(Error::Shape { values, width, n_records })
}

impl Drop for Prediction {
    fn drop(&mut self) {
        // After the rename, there is nothing to remove.
        let _ = std::fs::remove_file(&self.temporary);
    }
}

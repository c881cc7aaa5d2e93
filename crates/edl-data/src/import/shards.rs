// SPDX-License-Identifier: Apache-2.0
//! Spreads records over the files of a new data set.

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::location::is_data;
use crate::recordio::Writer;

use super::{ImportOptions, Written};

/// Writes `data-00000.recordio` and so on. A file appears under its name when it is complete.
#[derive(Debug)]
pub(crate) struct Shards<'a> {
    folder: PathBuf,
    options: &'a ImportOptions,
    per_file: u64,
    open: Option<OpenFile>,
    written: Written,
}

#[derive(Debug)]
struct OpenFile {
    writer: Writer<BufWriter<File>>,
    unfinished: PathBuf,
    path: PathBuf,
    records: u64,
}

impl<'a> Shards<'a> {
    /// Creates the folder. One that already contains data is refused, because two data sets would
    /// become one.
    pub(crate) fn create(
        folder: &Path,
        n_records: u64,
        options: &'a ImportOptions,
    ) -> Result<Self, Error> {
        std::fs::create_dir_all(folder).map_err(Error::io("make", folder))?;
        for entry in std::fs::read_dir(folder).map_err(Error::io("read", folder))? {
            let entry = entry.map_err(Error::io("read", folder))?;
            if entry.path().is_file() && is_data(&entry.file_name().to_string_lossy()) {
                return Err(Error::Exists { location: folder.display().to_string() });
            }
        }
        let written =
            Written { folder: folder.display().to_string(), files: 0, records: 0, bytes: 0 };
        let per_file = n_records.div_ceil(options.files.max(1)).max(1);
        Ok(Self { folder: folder.to_path_buf(), options, per_file, open: None, written })
    }

    pub(crate) fn write(&mut self, record: impl Into<Vec<u8>>) -> Result<(), Error> {
        let open = match self.open.take() {
            Some(open) => open,
            None => self.next_file()?,
        };
        let open = self.open.insert(open);
        open.writer.write(record).map_err(Error::io("write", &open.unfinished))?;
        open.records += 1;
        if open.records == self.per_file {
            self.close()?;
        }
        Ok(())
    }

    fn next_file(&self) -> Result<OpenFile, Error> {
        let name = format!("data-{:05}.recordio", self.written.files);
        let unfinished = self.folder.join(format!(".{name}.tmp"));
        let file = File::create(&unfinished).map_err(Error::io("write", &unfinished))?;
        let writer = Writer::new(BufWriter::new(file), self.options.writer);
        Ok(OpenFile { writer, unfinished, path: self.folder.join(name), records: 0 })
    }

    fn close(&mut self) -> Result<(), Error> {
        let Some(OpenFile { writer, unfinished, path, records }) = self.open.take() else {
            return Ok(());
        };
        let file = writer.finish().map_err(Error::io("write", &unfinished))?;
        let file = file.into_inner().map_err(std::io::IntoInnerError::into_error);
        let file = file.map_err(Error::io("write", &unfinished))?;
        file.sync_all().map_err(Error::io("write", &unfinished))?;
        let metadata = file.metadata().map_err(Error::io("write", &unfinished))?;
        std::fs::rename(&unfinished, &path).map_err(Error::io("write", &path))?;
        self.written.files += 1;
        self.written.records += records;
        self.written.bytes += metadata.len();
        Ok(())
    }

    pub(crate) fn finish(mut self) -> Result<Written, Error> {
        self.close()?;
        Ok(self.written)
    }
}

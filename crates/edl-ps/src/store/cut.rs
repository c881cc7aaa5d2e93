// SPDX-License-Identifier: Apache-2.0
//! Writes what a server holds while it goes on: between two pushes, or after a named step.

use std::path::Path;
use std::sync::mpsc;

use edl_core::id::Generation;
use edl_tensor::checkpoint::{self, FileEntry};

use crate::owner::{Past, Task};
use crate::store::{Error, Store};

impl Store {
    /// Copies every partition and writes the copies to `folder`, while the owners go on: between
    /// two pushes, or with `at` after that step, which is waited for.
    pub fn cut(
        &self,
        generation: Generation,
        folder: &Path,
        at: Option<u64>,
    ) -> Result<Vec<FileEntry>, Error> {
        if let Some(at) = at {
            return self.cut_at(generation, folder, at);
        }
        let _cutting = self.cutting.try_lock().map_err(|_| Error::CutRunning)?;
        let hosted = self.hosted().filter(|hosted| hosted.generation == generation);
        let hosted = hosted.ok_or(Error::NotHeld(generation))?;
        let (out, snapshots) = mpsc::channel();
        for owner in &hosted.owners {
            owner.send(Task::Snapshot(out.clone())).map_err(|_| Error::Overtaken)?;
        }
        drop(out);
        let mut files = Vec::with_capacity(hosted.partitions.len());
        for snapshot in snapshots {
            files.push(checkpoint::write_file(folder, &snapshot)?);
        }
        if files.len() != hosted.partitions.len() {
            return Err(Error::Overtaken);
        }
        files.sort_by_key(|file| file.partition);
        Ok(files)
    }

    /// A later order takes the place of one whose step has not come: nobody waits for that.
    fn cut_at(
        &self,
        generation: Generation,
        folder: &Path,
        at: u64,
    ) -> Result<Vec<FileEntry>, Error> {
        let hosted = self.hosted().filter(|hosted| hosted.generation == generation);
        let hosted = hosted.ok_or(Error::NotHeld(generation))?;
        let (out, snapshots) = mpsc::channel();
        for owner in &hosted.owners {
            owner.send(Task::SnapshotAt(at, out.clone())).map_err(|_| Error::Overtaken)?;
        }
        drop(out);
        // The order before has got its last copies, and is written to its end first.
        let _cutting = self.cutting.lock().map_err(|_| Error::CutRunning)?;
        let mut files = Vec::with_capacity(hosted.partitions.len());
        for snapshot in snapshots {
            let past = |Past { partition, step }| Error::Past { at, partition, step };
            files.push(checkpoint::write_file(folder, &snapshot.map_err(past)?)?);
        }
        if files.len() != hosted.partitions.len() {
            return Err(Error::Overtaken);
        }
        files.sort_by_key(|file| file.partition);
        Ok(files)
    }
}

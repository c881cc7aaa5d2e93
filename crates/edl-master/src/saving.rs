// SPDX-License-Identifier: Apache-2.0
//! Saves the job's state, and waits while the disk is full.

use std::collections::VecDeque;
use std::time::Duration;

use edl_core::error::chain;
use edl_core::job::Fact;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::Error;
use crate::engine::{Engine, INPUTS};
use crate::service::Input;

/// Between two tries to save the state on a full disk.
const SAVE_PAUSE: Duration = Duration::from_millis(500);

impl Engine {
    /// Saves these facts before anything that follows. While the disk is full, the master says so in its
    /// status and waits; to all other processes it looks like one that was stopped for a while.
    pub(crate) async fn persist(&mut self, mut facts: Vec<Fact>) -> Result<(), Error> {
        facts.push(Fact::elapsed(self.job.elapsed(self.now()).as_secs_f64()));
        while let Err(error) = self.store.persist(&facts) {
            if !error.is_disk_full() || self.shutdown.is_cancelled() {
                return Err(Error::Persist(error));
            }
            let why =
                format!("cannot save the job's state; free some disk space: {}", chain(&error));
            if self.unsaved.as_ref() != Some(&why) {
                tracing::error!("{why}");
            }
            self.unsaved = Some(why);
            self.answer_requests(SAVE_PAUSE).await;
        }
        if self.unsaved.take().is_some() {
            tracing::info!("the job's state is saved; continuing");
        }
        Ok(())
    }

    /// Answers those who only look, for `time`; keeps everything else for later.
    async fn answer_requests(&mut self, time: Duration) {
        let end = Instant::now() + time;
        loop {
            tokio::select! {
                Some(input) = self.queue.recv(), if self.early.len() < INPUTS => {
                    if let Input::Status(_) | Input::Everything(_) = input {
                        self.input(input);
                    } else if !input.is_sign_of_life() {
                        self.early.push_back(input);
                    }
                }
                () = self.shutdown.cancelled() => return,
                () = tokio::time::sleep_until(end) => return,
            }
        }
    }
}

/// The next input, in the order in which they came.
pub(crate) async fn next(
    early: &mut VecDeque<Input>,
    queue: &mut mpsc::Receiver<Input>,
) -> Option<Input> {
    match early.pop_front() {
        Some(input) => Some(input),
        None => queue.recv().await,
    }
}

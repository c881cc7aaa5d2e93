// SPDX-License-Identifier: Apache-2.0
//! Sends commands to workers and servers.

use edl_core::id::{PsId, WorkerId};
use edl_core::job::{Command, PsOrder};

use crate::convert::Encoder;
use crate::engine::Engine;

impl Engine {
    pub(crate) fn send_to_worker(&mut self, worker: WorkerId, command: Command) {
        let command = self.encode(|encoder| encoder.worker(command));
        self.workers.send(worker, command);
    }

    pub(crate) fn send_to_ps(&mut self, ps: PsId, order: PsOrder) {
        if let Some(command) = self.encode(|encoder| encoder.ps(ps, order)) {
            self.servers.send(ps, command);
        }
    }

    fn encode<T>(&self, encode: impl FnOnce(&Encoder<'_>) -> T) -> T {
        let output = self.output();
        let path = |folder: &str, is_own| self.checkpoints.source(folder, is_own);
        let output = output.to_string_lossy();
        encode(&Encoder { job: &self.job, output: &output, path: &path })
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Sends commands to workers and servers.

use edl_core::id::{PsId, WorkerId};
use edl_core::job::Command;
use edl_core::server::Order;

use crate::convert::Encoder;
use crate::engine::Engine;

impl Engine {
    pub(crate) fn send_to_worker(&mut self, worker: WorkerId, command: Command) {
        let mut sent = std::mem::take(&mut self.sent_worlds);
        let command = self.encode(|encoder| encoder.worker(worker, command, &mut sent));
        self.sent_worlds = sent;
        self.workers.send(worker, command);
    }

    pub(crate) fn send_to_ps(&mut self, ps: PsId, order: Order) {
        let command = self.encode(|encoder| encoder.ps(order));
        self.servers.send(ps, command);
    }

    fn encode<T>(&self, encode: impl FnOnce(&Encoder<'_>) -> T) -> T {
        let path = |folder: &str, is_own| self.checkpoints.source(folder, is_own);
        encode(&Encoder { job: &self.job, path: &path })
    }
}

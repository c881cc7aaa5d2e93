// SPDX-License-Identifier: Apache-2.0
//! Names of processes.

use edl_core::platform::InstanceId;

use crate::proto;

impl proto::JobStatus {
    /// The smoothed training loss. Zero is the value of a message before there is any loss.
    #[must_use]
    pub fn known_loss(&self) -> Option<f32> {
        (self.loss != 0.0).then_some(self.loss)
    }
}

impl proto::Instance {
    /// The name of the process in logs and reports: `master`, `worker-3`.
    #[must_use]
    pub fn name(&self) -> String {
        InstanceId { role: self.role(), id: self.id }.to_string()
    }
}

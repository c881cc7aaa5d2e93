// SPDX-License-Identifier: Apache-2.0
//! Names of processes.

use edl_core::platform::InstanceId;

use crate::proto;

impl proto::Instance {
    /// The name of the process in logs and reports: `master`, `worker-3`.
    #[must_use]
    pub fn name(&self) -> String {
        InstanceId { role: self.role(), id: self.id }.to_string()
    }
}

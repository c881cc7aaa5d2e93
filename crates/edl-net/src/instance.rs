// SPDX-License-Identifier: Apache-2.0
//! A process of a job, as its status tells of it.

use crate::proto;

impl proto::Instance {
    /// What everybody calls it: `master`, `worker-3`.
    #[must_use]
    pub fn name(&self) -> String {
        match self.role.as_str() {
            "master" => "master".to_owned(),
            role => format!("{role}-{}", self.id),
        }
    }
}

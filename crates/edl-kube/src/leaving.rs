// SPDX-License-Identifier: Apache-2.0
//! The deletion of a master's own pod by a user, as all parts of the master see it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Whether the pod is being deleted, and the time that it has left.
#[derive(Clone, Debug, Default)]
pub struct Leaving {
    has_begun: CancellationToken,
    grace: Arc<OnceLock<Duration>>,
}

impl Leaving {
    /// The pod is deleted, with this grace period. Only the first call counts.
    pub fn begin(&self, grace: Duration) {
        self.grace.get_or_init(|| grace);
        self.has_begun.cancel();
    }

    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.has_begun.is_cancelled()
    }

    /// Waits until the pod is deleted; returns its grace period.
    pub async fn begun(&self) -> Duration {
        self.has_begun.cancelled().await;
        *self.grace.get().expect("the grace period is set before a deletion begins")
    }
}

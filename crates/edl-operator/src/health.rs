// SPDX-License-Identifier: Apache-2.0
//! Whether the operator plans in time. `/healthz` shows it, and an operator that does not gives its
//! lease to another one.

use std::time::Duration;

use tokio::sync::watch;

/// Shared by the loop that plans, the leader election and the HTTP server.
#[derive(Clone, Debug)]
pub struct Health {
    is_stuck: watch::Sender<bool>,
}

impl Default for Health {
    fn default() -> Self {
        Self { is_stuck: watch::Sender::new(false) }
    }
}

impl Health {
    /// Whether a plan takes too long right now.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        *self.is_stuck.borrow()
    }

    /// Follows [`Self::is_stuck`].
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<bool> {
        self.is_stuck.subscribe()
    }

    /// Runs `work` on a separate thread; none if it panics or takes longer than `limit`. It cannot
    /// be interrupted: until it ends, the operator is stuck.
    pub async fn within<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let mut working = tokio::task::spawn_blocking(work);
        if let Ok(done) = tokio::time::timeout(limit, &mut working).await {
            return done.ok();
        }
        tracing::error!(
            "planning takes longer than {} s; releasing the lease until it finishes",
            limit.as_secs_f32()
        );
        self.is_stuck.send_replace(true);
        let _too_late = working.await;
        self.is_stuck.send_replace(false);
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_plan_that_takes_too_long_is_dropped_and_shown_until_it_ends() {
        let health = Health::default();
        let long = Duration::from_secs(60);
        assert_eq!(health.within(long, || 7).await, Some(7));
        assert_eq!(health.within(long, || assert_eq!(1, 2, "on purpose")).await, None);
        assert!(!health.is_stuck(), "a panic is not a hang");

        let (end, ended) = mpsc::channel();
        let mut stuck = health.watch();
        let planning = health.within(Duration::from_millis(1), move || ended.recv());
        let judge = async {
            stuck.changed().await.unwrap();
            assert!(health.is_stuck());
            end.send(()).unwrap();
        };
        assert_eq!(tokio::join!(planning, judge).0, None, "the cluster has changed meanwhile");
        assert!(!health.is_stuck());
    }
}

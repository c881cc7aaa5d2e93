// SPDX-License-Identifier: Apache-2.0
//! The supervisor's side of the port to its master.

use edl_core::platform::{Order, Report};
use edl_master::Platform;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::lines;

/// Closed, with its tasks, when it is dropped.
pub(super) struct Link {
    platform: Platform,
    _tasks: JoinSet<()>,
}

impl Link {
    /// To a master in this process.
    pub(super) fn new(platform: Platform) -> Self {
        Self { platform, _tasks: JoinSet::new() }
    }

    /// To a master in another process, by its standard input and output.
    pub(super) fn to_child(
        stdin: impl AsyncWrite + Unpin + Send + 'static,
        stdout: impl AsyncRead + Unpin + Send + 'static,
    ) -> Self {
        let (port, platform) = edl_master::port();
        let mut tasks = JoinSet::new();
        tasks.spawn(lines::write(stdin, port.reports));
        tasks.spawn(lines::read(stdout, port.orders, "the master"));
        Self { platform, _tasks: tasks }
    }

    /// Sends a report; `false` if the queue is full because the master does not read.
    pub(super) fn report(&self, report: Report) -> bool {
        // A closed port belongs to a dead master; the next one gets the list of processes.
        let sent = self.platform.reports.try_send(report);
        !matches!(sent, Err(mpsc::error::TrySendError::Full(_)))
    }

    /// The next order; `None` when the master has closed its side.
    pub(super) async fn order(&mut self) -> Option<Order> {
        self.platform.orders.recv().await
    }
}

#[cfg(test)]
mod tests {
    use edl_master::MAX_WAITING;

    use super::*;

    #[tokio::test]
    async fn a_master_that_does_not_read_is_detected_and_a_dead_one_is_not_awaited() {
        let (ours, theirs) = tokio::io::duplex(16);
        let (our_out, our_in) = tokio::io::split(ours);
        let mut link = Link::to_child(our_in, our_out);
        let report = Report::Running(Vec::new());
        let sent = (0..MAX_WAITING + 8).filter(|_| link.report(report.clone())).count();
        assert!(sent < MAX_WAITING + 8);
        drop(theirs);
        assert_eq!(link.order().await, None);
    }
}

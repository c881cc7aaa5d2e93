// SPDX-License-Identifier: Apache-2.0
//! The line to the master: orders come as JSON lines from its standard output, reports go to its
//! standard input.

use edl_core::platform::{Order, Report};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// More reports than processes can end in a burst; a master that leaves them unread is stuck.
const MAX_REPORTS: usize = 1024;
const MAX_ORDERS: usize = 64;

/// Ends, with its tasks, when it is dropped.
pub(crate) struct Link {
    reports: mpsc::Sender<Report>,
    orders: mpsc::Receiver<Order>,
    tasks: JoinSet<()>,
}

impl Link {
    pub(crate) fn new(
        stdin: impl AsyncWrite + Unpin + Send + 'static,
        stdout: impl AsyncRead + Unpin + Send + 'static,
    ) -> Self {
        let (reports, report_queue) = mpsc::channel(MAX_REPORTS);
        let (order_queue, orders) = mpsc::channel(MAX_ORDERS);
        let mut tasks = JoinSet::new();
        tasks.spawn(write_reports(stdin, report_queue));
        tasks.spawn(read_orders(stdout, order_queue));
        Self { reports, orders, tasks }
    }

    /// Both queues, and the tasks that serve them until they are dropped.
    pub(crate) fn into_parts(self) -> (mpsc::Sender<Report>, mpsc::Receiver<Order>, JoinSet<()>) {
        (self.reports, self.orders, self.tasks)
    }

    /// Sends a report; `false` if the master has not read the others for long.
    pub(crate) fn report(&self, report: Report) -> bool {
        // A closed line belongs to a dead master: its successor is told what runs.
        !matches!(self.reports.try_send(report), Err(mpsc::error::TrySendError::Full(_)))
    }

    /// The next order; `None` when the master has closed its side.
    pub(crate) async fn order(&mut self) -> Option<Order> {
        self.orders.recv().await
    }
}

async fn write_reports(mut stdin: impl AsyncWrite + Unpin, mut queue: mpsc::Receiver<Report>) {
    while let Some(report) = queue.recv().await {
        let mut line = serde_json::to_vec(&report).expect("a report is plain data");
        line.push(b'\n');
        let sent = async {
            stdin.write_all(&line).await?;
            stdin.flush().await
        };
        if sent.await.is_err() {
            return;
        }
    }
}

async fn read_orders(stdout: impl AsyncRead + Unpin, queue: mpsc::Sender<Order>) {
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str(&line) {
            Ok(order) => {
                if queue.send(order).await.is_err() {
                    return;
                }
            }
            Err(error) => tracing::warn!(%error, line, "cannot parse the master's order"),
        }
    }
}

#[cfg(test)]
mod tests {
    use edl_core::platform::{InstanceId, Role};

    use super::*;

    #[tokio::test]
    async fn orders_and_reports_cross_as_json_lines() {
        let worker = InstanceId { role: Role::Worker, id: 3 };
        let (ours, theirs) = tokio::io::duplex(4096);
        let (our_out, our_in) = tokio::io::split(ours);
        let (their_in, mut their_out) = tokio::io::split(theirs);
        let mut link = Link::new(our_in, our_out);
        assert!(link.report(Report::Started { instance: worker, pid: 7 }));
        let mut lines = BufReader::new(their_in).lines();
        let line = lines.next_line().await.unwrap().unwrap();
        let report: Report = serde_json::from_str(&line).unwrap();
        assert_eq!(report, Report::Started { instance: worker, pid: 7 });

        let launch = Order::Launch { instance: worker, memory_percent: 100 };
        let order = serde_json::to_string(&launch).unwrap();
        their_out.write_all(format!("not an order\n{order}\n").as_bytes()).await.unwrap();
        assert_eq!(link.order().await, Some(launch));
    }

    #[tokio::test]
    async fn a_master_that_reads_nothing_is_noticed_and_a_dead_one_is_not_waited_for() {
        let (ours, theirs) = tokio::io::duplex(16);
        let (our_out, our_in) = tokio::io::split(ours);
        let mut link = Link::new(our_in, our_out);
        let report = Report::Running(Vec::new());
        let sent = (0..MAX_REPORTS + 8).filter(|_| link.report(report.clone())).count();
        assert!(sent < MAX_REPORTS + 8);
        drop(theirs);
        assert_eq!(link.order().await, None);
    }
}

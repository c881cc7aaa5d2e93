// SPDX-License-Identifier: Apache-2.0
//! Orders and reports as JSON lines over the pipes between a supervisor and its master.

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader};
use tokio::sync::mpsc;

/// Writes what is queued until the queue or the pipe is closed.
pub(crate) async fn write<T: Serialize>(
    mut to: impl AsyncWrite + Unpin,
    mut queue: mpsc::Receiver<T>,
) {
    while let Some(value) = queue.recv().await {
        let mut line = serde_json::to_vec(&value).expect("orders and reports are plain data");
        line.push(b'\n');
        if to.write_all(&line).await.is_err() || to.flush().await.is_err() {
            return;
        }
    }
}

/// Queues what is read until the pipe or the queue is closed. `from` is logged with lines that
/// cannot be parsed; they do not affect the lines after them.
pub(crate) async fn read<T: DeserializeOwned>(
    pipe: impl AsyncRead + Unpin,
    queue: mpsc::Sender<T>,
    from: &'static str,
) {
    let mut lines = BufReader::new(pipe).split(b'\n');
    loop {
        let line = match lines.next_segment().await {
            Ok(Some(line)) => line,
            Ok(None) => return,
            Err(error) => return tracing::error!(%error, from, "cannot read from a pipe"),
        };
        match serde_json::from_slice(&line) {
            Ok(value) => {
                if queue.send(value).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                let line = String::from_utf8_lossy(&line);
                tracing::warn!(%error, %line, from, "cannot parse a line");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use edl_core::platform::{InstanceId, Order, Role};

    use super::*;

    #[tokio::test]
    async fn values_cross_and_lines_that_make_no_sense_are_skipped() {
        let (mut ours, theirs) = tokio::io::duplex(4096);
        let (sent, queue) = mpsc::channel(4);
        let (received, mut values) = mpsc::channel(4);
        let instance = InstanceId { role: Role::Worker, id: 3 };
        let launch = Order::Launch { instance, memory_percent: 100, is_spare: false };
        ours.write_all(b"not an order\n\xff\n").await.unwrap();
        sent.send(launch.clone()).await.unwrap();
        drop(sent);
        tokio::join!(write(ours, queue), read(theirs, received, "the master"));
        assert_eq!((values.recv().await, values.recv().await), (Some(launch), None));
    }
}

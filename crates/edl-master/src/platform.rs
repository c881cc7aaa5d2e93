// SPDX-License-Identifier: Apache-2.0
//! The line to the platform: orders go out, reports come in, one JSON object per line.

use edl_core::job::Event;
use edl_core::platform::{Order, Report};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::service::Input;
use crate::{Orders, Reports};

/// Writes orders until the engine has no more.
pub(crate) async fn write_orders(mut to: Orders, mut orders: mpsc::Receiver<Order>) {
    while let Some(order) = orders.recv().await {
        let mut line = serde_json::to_vec(&order).expect("an order has a JSON form");
        line.push(b'\n');
        if to.write_all(&line).await.is_err() || to.flush().await.is_err() {
            // The platform is gone, and its end ends us by the reports' end.
            return;
        }
    }
}

/// Passes reports on. Their end is the platform's end, and so ours.
pub(crate) async fn read_reports(
    from: Reports,
    inputs: mpsc::Sender<Input>,
    shutdown: CancellationToken,
) {
    // Bytes, not text: one bad line must not end the others.
    let mut lines = from.split(b'\n');
    loop {
        let line = match lines.next_segment().await {
            Ok(Some(line)) => line,
            Ok(None) => break,
            Err(error) => {
                tracing::error!(%error, "cannot read the platform's reports");
                break;
            }
        };
        match serde_json::from_slice::<Report>(&line) {
            Ok(report) => {
                if inputs.send(Input::Event(Event::Platform(report))).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                let line = String::from_utf8_lossy(&line);
                tracing::warn!(%error, %line, "cannot parse a platform report");
            }
        }
    }
    shutdown.cancel();
}

// SPDX-License-Identifier: Apache-2.0
//! The port between a master and its platform: orders go out, reports come in.

use edl_core::platform::{Order, Report};
use tokio::sync::mpsc;

/// Orders or reports that can wait to be read; a job has fewer processes.
pub const MAX_WAITING: usize = 4096;

/// The master's end. The platform is gone when there are no more reports.
#[derive(Debug)]
pub struct Port {
    pub orders: mpsc::Sender<Order>,
    pub reports: mpsc::Receiver<Report>,
}

/// The platform's end. The master is gone when there are no more orders.
#[derive(Debug)]
pub struct Platform {
    pub orders: mpsc::Receiver<Order>,
    pub reports: mpsc::Sender<Report>,
}

/// Both ends of a new port.
#[must_use]
pub fn port() -> (Port, Platform) {
    let (orders_in, orders) = mpsc::channel(MAX_WAITING);
    let (reports, reports_out) = mpsc::channel(MAX_WAITING);
    (Port { orders: orders_in, reports: reports_out }, Platform { orders, reports })
}

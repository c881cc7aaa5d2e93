// SPDX-License-Identifier: Apache-2.0
//! Where a process of a job runs, as far as others must know.

use std::net::IpAddr;
use std::path::PathBuf;

use tokio::sync::watch;

/// The place of a worker or parameter server. By default it is this machine.
#[derive(Clone, Debug)]
pub struct Place {
    /// The number by which the platform knows the process.
    pub pid: u32,
    /// The address that others reach it at; otherwise that which leads to the master.
    pub ip: Option<IpAddr>,
    /// A separate folder for sockets; otherwise the job's folder, which all its processes see.
    pub sockets: Option<PathBuf>,
    /// Gets whether the master answers.
    pub master_answers: Option<watch::Sender<bool>>,
}

impl Place {
    /// Publishes whether the master answers.
    pub fn master_answers(&self, answers: bool) {
        if let Some(watch) = &self.master_answers {
            watch.send_if_modified(|before| std::mem::replace(before, answers) != answers);
        }
    }
}

impl Default for Place {
    fn default() -> Self {
        Self { pid: std::process::id(), ip: None, sockets: None, master_answers: None }
    }
}

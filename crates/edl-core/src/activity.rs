// SPDX-License-Identifier: Apache-2.0
//! What a worker is doing, for heartbeats and time accounting.

use crate::goodput::TimeKind;
use crate::named::named;

named! {
    /// What a worker waits for.
    WaitingFor {
        /// It is busy.
        #[default]
        Nothing = "",
        Master = "master",
        Route = "server addresses from the master",
        Work = "work",
        /// Other members of its world.
        Members = "other workers",
        Servers = "parameter servers",
        Parameters = "parameters",
        Acknowledgements = "acknowledgements",
    }
}

/// What a worker is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Activity {
    pub waiting_for: WaitingFor,
    pub spends: TimeKind,
}

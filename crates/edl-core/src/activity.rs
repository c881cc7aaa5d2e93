// SPDX-License-Identifier: Apache-2.0
//! What a worker or parameter server is doing, for heartbeats and time accounting.

use crate::goodput::TimeKind;
use crate::named::named;

named! {
    /// What a process is doing.
    Phase {
        #[default]
        Starting = "starting",
        BuildingModel = "building the model",
        ComputingProbe = "computing the probe",
        Reading = "reading",
        Pulling = "pulling",
        Training = "training",
        Reducing = "reducing",
        ExchangingRows = "exchanging rows",
        Pushed = "pushed",
        Evaluating = "evaluating",
        Predicting = "predicting",
        Idle = "idle",
        FormingWorld = "forming a world",
        BetweenWorlds = "between worlds",
        WaitingForServers = "waiting for servers",
        WaitingForStep = "waiting for the next step",
        WritingLastCheckpoint = "writing the last checkpoint",
        Leaving = "leaving",
        /// The phases of a parameter server.
        Empty = "empty",
        Loading = "loading",
        Loaded = "loaded",
        Serving = "serving",
        Closed = "closed",
    }

    /// What a process waits for.
    WaitingFor {
        /// It is busy.
        #[default]
        Nothing = "",
        Master = "master",
        Route = "a route from the master",
        Work = "work",
        /// Other members of its world.
        Members = "other workers",
        Servers = "parameter servers",
        Parameters = "parameters",
        Acknowledgements = "acknowledgements",
        Load = "a load",
        SuccessfulLoad = "a successful load",
        ServeOrder = "the order to serve",
    }
}

/// What a worker is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Activity {
    pub phase: Phase,
    pub waiting_for: WaitingFor,
    pub spends: TimeKind,
}

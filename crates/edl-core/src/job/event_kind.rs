// SPDX-License-Identifier: Apache-2.0
//! The kinds of events that a job logs and keeps for people.

use crate::named::named;

named! {
    EventKind {
        #[default]
        Launched = "launched",
        Waiting = "waiting",
        NotStarted = "not_started",
        /// A process started but never connected.
        NotConnected = "not_connected",
        /// The platform cannot start processes, or can again.
        Platform = "platform",
        Refused = "refused",
        Scaled = "scaled",
        Chaos = "chaos",
        Leaving = "leaving",
        Stopping = "stopping",
        WorkerJoined = "worker_joined",
        WorkerLeft = "worker_left",
        WorkerEnded = "worker_ended",
        WorkerKilled = "worker_killed",
        WorkerCrashed = "worker_crashed",
        WorkerSilent = "worker_silent",
        WorkersLost = "workers_lost",
        PsReplaced = "ps_replaced",
        PsLost = "ps_lost",
        PeerLost = "peer_lost",
        Stuck = "stuck",
        /// Workers continue in a new world.
        World = "world",
        WaitingForWorkers = "waiting_for_workers",
        /// Workers and servers disagree on the step.
        StepMismatch = "step_mismatch",
        BitsDiffer = "bits_differ",
        WorkFailed = "work_failed",
        Checkpoint = "checkpoint",
        CheckpointFailed = "checkpoint_failed",
        CheckpointBad = "checkpoint_bad",
        Restored = "restored",
        Resumed = "resumed",
        EarlyStop = "early_stop",
        MaxTime = "max_time",
        Succeeded = "succeeded",
        Failed = "failed",
        Stopped = "stopped",
        /// A loss or a gradient is not finite.
        NonFinite = "nonfinite",
        /// The loss has grown far beyond what it was.
        LossExploded = "loss_exploded",
        /// The training script has left its loop.
        Quit = "quit",
    }
}

impl EventKind {
    /// Whether it is logged as a warning.
    #[must_use]
    pub fn is_warning(self) -> bool {
        matches!(
            self,
            Self::NotStarted
                | Self::NotConnected
                | Self::WorkerCrashed
                | Self::WorkerSilent
                | Self::WorkersLost
                | Self::PsLost
                | Self::StepMismatch
                | Self::WorkFailed
                | Self::NonFinite
                | Self::LossExploded
                | Self::CheckpointFailed
                | Self::CheckpointBad
        )
    }

    /// Whether its text is the reason for the end of the process that it names.
    #[must_use]
    pub fn ends_process(self) -> bool {
        matches!(
            self,
            Self::Chaos
                | Self::WorkerLeft
                | Self::WorkerEnded
                | Self::WorkerKilled
                | Self::WorkerCrashed
                | Self::WorkerSilent
                | Self::PsLost
        )
    }
}

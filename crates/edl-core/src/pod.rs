// SPDX-License-Identifier: Apache-2.0
//! The state of a pod: whether it waits and for what, runs, is being removed, or has ended and how.
//!
//! The reasons are those of Kubernetes, in tables; nothing here connects to a cluster.
//!
//! | state | seen by | what follows |
//! |---|---|---|
//! | waiting | phase Pending, or the API server rejects it | it is shown with its reason; the job continues with the pods it has |
//! | running | phase Running | it is expected to call |
//! | leaving | a deletion that is under way | a replacement is asked for at once |
//! | preempted, evicted, deleted, node lost | condition DisruptionTarget, reason, absence | replaced at once, never counted |
//! | out of memory | reason OOMKilled | replaced with more memory, a bounded number of times |
//! | crashed | another exit code than 0 | replaced after a pause, a bounded number of times |
//! | done | exit code 0 | replaced if the job still wants it |

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::platform::Ended;

/// What the API server reports about a pod, as far as it matters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PodFacts {
    pub phase: PodPhase,
    /// Why the pod as a whole is in its phase: `Evicted`, for example.
    pub reason: String,
    pub message: String,
    /// Why no node takes it.
    pub unschedulable: Option<String>,
    /// The reason of the condition DisruptionTarget.
    pub disruption: Option<String>,
    pub container: Container,
    /// Its deletion has begun.
    pub is_leaving: bool,
    /// The object is gone.
    pub is_gone: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PodPhase {
    #[default]
    Pending,
    Running,
    Succeeded,
    Failed,
    /// Its node does not answer.
    Unknown,
}

/// The process in the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Container {
    #[default]
    Unknown,
    Waiting {
        reason: String,
        message: String,
    },
    Running,
    Terminated {
        code: i32,
        reason: String,
    },
}

/// The state of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PodState {
    Waiting(Wait),
    Running,
    /// It still runs, but is being removed: this is how it will end.
    Leaving(Ended),
    Ended(Ended),
}

/// What keeps a process from running, with the platform's message.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wait {
    /// Nothing is wrong: it is on its way.
    Starting,
    /// No node has the resources that it needs.
    Unschedulable(String),
    Image(String),
    /// The node cannot make its container.
    Container(String),
    /// The namespace's quota is used up.
    Quota(String),
    /// The master lacks the rights.
    Forbidden(String),
    /// The API server does not take the pod.
    Refused(String),
    /// The API server does not answer.
    Unreachable(String),
}

/// The reasons of the condition DisruptionTarget.
const DISRUPTIONS: [(&str, Ended); 6] = [
    ("PreemptionByScheduler", Ended::Preempted),
    ("PreemptionByKubeScheduler", Ended::Preempted),
    ("DeletionByTaintManager", Ended::NodeLost),
    ("DeletionByPodGC", Ended::NodeLost),
    ("EvictionByEvictionAPI", Ended::Evicted),
    ("TerminationByKubelet", Ended::Evicted),
];

/// The reasons of a pod that failed as a whole, not by its process.
const REASONS: [(&str, Ended); 10] = [
    ("Preempting", Ended::Preempted),
    ("Evicted", Ended::Evicted),
    ("NodeLost", Ended::NodeLost),
    ("NodeShutdown", Ended::NodeLost),
    ("Shutdown", Ended::NodeLost),
    ("Terminated", Ended::NodeLost),
    // The node rejected what the scheduler had sent it: another pod was faster.
    ("NodeAffinity", Ended::Evicted),
    ("UnexpectedAdmissionError", Ended::Evicted),
    ("OutOfcpu", Ended::Evicted),
    ("OutOfmemory", Ended::Evicted),
];

/// The reasons of a process that ended.
const TERMINATIONS: [(&str, Ended); 2] =
    [("OOMKilled", Ended::OutOfMemory), ("ContainerStatusUnknown", Ended::NodeLost)];

/// The reasons of a container that waits because of its image.
const IMAGE_REASONS: [&str; 6] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "RegistryUnavailable",
];

/// The reasons of a container that is on its way.
const HARMLESS_REASONS: [&str; 2] = ["ContainerCreating", "PodInitializing"];

/// How to get the rights that a master needs.
const GRANT: &str = "to grant it, run `kubectl apply -f manifests/elasticdl-rbac.yaml`";

impl PodFacts {
    /// The state of the pod.
    #[must_use]
    pub fn state(&self) -> PodState {
        let has_ended = matches!(self.phase, PodPhase::Succeeded | PodPhase::Failed);
        if self.is_gone || has_ended {
            return PodState::Ended(self.how());
        }
        if self.is_leaving {
            return PodState::Leaving(self.how());
        }
        match self.phase {
            PodPhase::Pending => PodState::Waiting(self.wait()),
            // Whether it still lives on a node that does not answer is for its master to hear.
            PodPhase::Running | PodPhase::Unknown | PodPhase::Succeeded | PodPhase::Failed => {
                PodState::Running
            }
        }
    }

    /// How it ended, or will have. What the process itself ran into comes first, then what others
    /// did to it, then its exit code.
    fn how(&self) -> Ended {
        let (code, reason) = match &self.container {
            Container::Terminated { code, reason } => (Some(*code), reason.as_str()),
            Container::Unknown | Container::Waiting { .. } | Container::Running => (None, ""),
        };
        let disruption = self.disruption.as_deref().unwrap_or_default();
        let explained = find(&TERMINATIONS, reason)
            .or_else(|| find(&DISRUPTIONS, disruption))
            .or_else(|| find(&REASONS, &self.reason));
        if let Some(how) = explained {
            return how;
        }
        match code {
            // Deleted while it ran: what it answered to the signal does not matter.
            _ if self.is_leaving => Ended::Deleted,
            Some(code @ 129..=159) => Ended::Signal(code - 128),
            Some(code) => Ended::Exit(code),
            None if self.is_gone => Ended::Deleted,
            None if self.phase == PodPhase::Succeeded => Ended::CLEAN,
            // It failed without ever having run.
            None => Ended::Evicted,
        }
    }

    fn wait(&self) -> Wait {
        if let Some(message) = &self.unschedulable {
            return Wait::Unschedulable(message.clone());
        }
        match &self.container {
            Container::Waiting { reason, message } if !message.is_empty() || !reason.is_empty() => {
                let text = if message.is_empty() { reason.clone() } else { message.clone() };
                match reason.as_str() {
                    reason if HARMLESS_REASONS.contains(&reason) => Wait::Starting,
                    reason if IMAGE_REASONS.contains(&reason) => Wait::Image(text),
                    _ => Wait::Container(text),
                }
            }
            Container::Unknown
            | Container::Waiting { .. }
            | Container::Running
            | Container::Terminated { .. } => Wait::Starting,
        }
    }
}

impl Wait {
    /// Why the API server rejected a request, by the code and message of its response.
    #[must_use]
    pub fn of_refusal(code: u16, message: &str) -> Self {
        let text = message.to_owned();
        match code {
            403 if message.contains("exceeded quota") => Self::Quota(text),
            // Only missing permissions are reported in this form; admission has its own messages.
            403 if message.contains(" cannot ") => Self::Forbidden(text),
            401 => Self::Forbidden(text),
            429 | 500..=599 => Self::Unreachable(text),
            _ => Self::Refused(text),
        }
    }

    /// Whether nothing is wrong.
    #[must_use]
    pub fn is_starting(&self) -> bool {
        *self == Self::Starting
    }

    /// Whether the other one has the same cause, no matter which numbers its message contains.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starting => f.write_str("starting"),
            Self::Unschedulable(text) => write!(f, "no node can run it: {text}"),
            Self::Image(text) => write!(f, "cannot pull its image: {text}"),
            Self::Container(text) => write!(f, "cannot create its container: {text}"),
            Self::Quota(text) => write!(f, "quota exceeded: {text}"),
            Self::Forbidden(text) => write!(f, "{text}; {GRANT}"),
            Self::Refused(text) => write!(f, "the API server rejected it: {text}"),
            Self::Unreachable(text) => write!(f, "the API server is not responding: {text}"),
        }
    }
}

fn find(table: &[(&str, Ended)], reason: &str) -> Option<Ended> {
    table.iter().find(|(word, _)| *word == reason).map(|(_, how)| *how)
}

#[cfg(test)]
mod tests;

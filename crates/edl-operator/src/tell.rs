// SPDX-License-Identifier: Apache-2.0
//! A plan's reasons in its own words, with names where it has numbers.

use std::fmt::Display;

use edl_sched::plan::{Reason, Waiting};

use crate::observe::Names;

impl Names {
    /// Why a job changes.
    #[must_use]
    pub fn reasons(&self, reasons: &[Reason]) -> String {
        let told: Vec<String> = reasons.iter().map(|reason| self.reason(*reason)).collect();
        told.join("; ")
    }

    #[must_use]
    pub fn reason(&self, reason: Reason) -> String {
        let text = reason.to_string();
        match reason {
            Reason::BelowFairShare { from: job }
            | Reason::AboveFairShare { to: job }
            | Reason::MakesRoomForJob(job)
            | Reason::Preempted { by: job }
            | Reason::HigherPriority { than: job } => named(&text, job, self.jobs.get(&job)),
            Reason::MakesRoomForService(service) => {
                named(&text, service, self.services.get(&service))
            }
            Reason::AboveQuota(queue) => named(&text, queue, self.queues.get(&queue)),
            Reason::NodeLeaves(node) => named(&text, node, self.nodes.get(&node)),
            Reason::Starts
            | Reason::StartsWhole
            | Reason::FreeRoom
            | Reason::AboveLoad
            | Reason::AboveMaximum
            | Reason::Incomplete
            | Reason::Faulty(_)
            | Reason::LargestGain
            | Reason::SmallestLoss
            | Reason::LessServedFirst
            | Reason::LeastFulfilled
            | Reason::MostFulfilled
            | Reason::ServersFollow => text,
        }
    }

    /// Why a job waits.
    #[must_use]
    pub fn waiting(&self, waiting: Waiting) -> String {
        let text = waiting.to_string();
        match waiting {
            Waiting::QuotaUsed(queue) => named(&text, queue, self.queues.get(&queue)),
            Waiting::Behind(job) => named(&text, job, self.jobs.get(&job)),
            Waiting::Faulty(_)
            | Waiting::NeverFits(_)
            | Waiting::NoRoom(_)
            | Waiting::Fragmented
            | Waiting::Outranked
            | Waiting::LeftToKubernetes => text,
        }
    }
}

/// The same in one word, for conditions.
#[must_use]
pub fn word(waiting: Waiting) -> &'static str {
    match waiting {
        Waiting::Faulty(_) => "Invalid",
        Waiting::NeverFits(_) => "NeverFits",
        Waiting::NoRoom(_) => "NoRoom",
        Waiting::Fragmented => "Fragmented",
        Waiting::QuotaUsed(_) => "QuotaUsed",
        Waiting::Behind(_) => "Behind",
        Waiting::Outranked => "Outranked",
        Waiting::LeftToKubernetes => "LeftToKubernetes",
    }
}

/// `job 3 has waited` becomes ``job `default/mnist` has waited``.
fn named(text: &str, number: impl Display, name: Option<&String>) -> String {
    let Some(name) = name else { return text.to_owned() };
    let shown = number.to_string();
    let kind = shown.split(' ').next().unwrap_or_default();
    text.replacen(&shown, &format!("{kind} `{name}`"), 1)
}

#[cfg(test)]
mod tests {
    use edl_sched::snapshot::{JobId, NodeId, QueueId, ServiceId};

    use super::*;

    #[test]
    fn a_reason_names_whom_it_speaks_of() {
        let names = Names {
            jobs: [(JobId(3), "default/mnist".into())].into(),
            nodes: [(NodeId(1), "n1".into())].into(),
            queues: [(QueueId(2), "research".into())].into(),
            services: [(ServiceId(0), "web/nginx".into())].into(),
        };
        let table = [
            (
                Reason::MakesRoomForJob(JobId(3)),
                "freeing capacity for job `default/mnist` to start",
            ),
            (Reason::MakesRoomForService(ServiceId(0)), "freeing capacity for service `web/nginx`"),
            (Reason::AboveQuota(QueueId(2)), "queue `research` exceeds its quota"),
            (Reason::NodeLeaves(NodeId(1)), "node `n1` is being removed"),
            (Reason::Preempted { by: JobId(7) }, "preempted by job 7, which has a higher priority"),
            (Reason::FreeRoom, "free capacity available"),
        ];
        for (reason, expected) in table {
            assert_eq!(names.reason(reason), expected);
        }
        let told = names.waiting(Waiting::Behind(JobId(3)));
        assert_eq!(told, "job `default/mnist` has waited longer and goes first");
    }
}

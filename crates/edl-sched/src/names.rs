// SPDX-License-Identifier: Apache-2.0
//! The text of a plan's reasons, with names where the plan has numbers.

use std::collections::BTreeMap;
use std::fmt::Display;

use crate::plan::{Reason, Waiting};
use crate::snapshot::{JobId, NodeId, QueueId, ServiceId};

/// What the numbers of a plan stand for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    pub jobs: BTreeMap<JobId, String>,
    pub nodes: BTreeMap<NodeId, String>,
    pub queues: BTreeMap<QueueId, String>,
    pub services: BTreeMap<ServiceId, String>,
}

impl Names {
    /// Why a job changes.
    #[must_use]
    pub fn reasons(&self, reasons: &[Reason]) -> String {
        let texts: Vec<String> = reasons.iter().map(|reason| self.reason(*reason)).collect();
        texts.join("; ")
    }

    #[must_use]
    pub fn reason(&self, reason: Reason) -> String {
        match reason {
            Reason::Starts => "enough free capacity for its minimum".into(),
            Reason::StartsWhole => "enough free capacity for all its workers".into(),
            Reason::FreeCapacity => "free capacity available".into(),
            Reason::BelowFairShare { from } => {
                format!("below its fair share while {} is above", self.job(from))
            }
            Reason::AboveFairShare { to } => {
                format!("above its fair share while {} is below", self.job(to))
            }
            Reason::FreesCapacityForJob(job) => {
                format!("freeing capacity for {} to start", self.job(job))
            }
            Reason::FreesCapacityForService(service) => {
                format!("freeing capacity for {}", named("service", service, &self.services))
            }
            Reason::Preempted { by } => {
                format!("preempted by {}, which has a higher priority", self.job(by))
            }
            Reason::HigherPriority { than } => format!("higher priority than {}", self.job(than)),
            Reason::AboveLoad => "cluster load is above its limit".into(),
            Reason::AboveQuota(queue) => format!("{} exceeds its quota", self.queue(queue)),
            Reason::AboveMaximum => "above its maximum".into(),
            Reason::Incomplete => "lost pods and fell below its minimum".into(),
            Reason::NodeLeaves(node) => {
                format!("{} is being removed", named("node", node, &self.nodes))
            }
            Reason::Faulty(fault) => fault.to_string(),
            Reason::LargestGain => "gains most from another worker".into(),
            Reason::SmallestLoss => "other jobs gain more from its workers".into(),
            Reason::LessServedFirst => "jobs with less accumulated GPU time go first".into(),
            Reason::LeastFulfilled => "furthest below its maximum".into(),
            Reason::MostFulfilled => "closest to its maximum".into(),
            Reason::ServersFollow => "parameter servers scale with the workers".into(),
        }
    }

    /// Why a job waits.
    #[must_use]
    pub fn waiting(&self, waiting: Waiting) -> String {
        match waiting {
            Waiting::Faulty(fault) => fault.to_string(),
            Waiting::NeverFits(kind) => format!("no node has enough {kind} for one of its pods"),
            Waiting::NoCapacity(kind) => format!("not enough {kind} for its minimum"),
            Waiting::Fragmented => "free capacity is spread over too many nodes".into(),
            Waiting::QuotaUsed(queue) => format!("quota of {} exhausted", self.queue(queue)),
            Waiting::Behind(job) => format!("{} has waited longer and goes first", self.job(job)),
            Waiting::Outranked => "other jobs go first".into(),
            Waiting::LeftToKubernetes => "waiting for Kubernetes to schedule its pods".into(),
        }
    }

    fn job(&self, id: JobId) -> String {
        named("job", id, &self.jobs)
    }

    fn queue(&self, id: QueueId) -> String {
        named("queue", id, &self.queues)
    }
}

/// ``job `default/mnist` ``, or `job 3` if it has no name.
fn named<Id: Display + Ord>(kind: &str, id: Id, names: &BTreeMap<Id, String>) -> String {
    names.get(&id).map_or_else(|| id.to_string(), |name| format!("{kind} `{name}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_names_its_job_service_queue_or_node() {
        let names = Names {
            jobs: [(JobId(3), "default/mnist".into())].into(),
            nodes: [(NodeId(1), "n1".into())].into(),
            queues: [(QueueId(2), "research".into())].into(),
            services: [(ServiceId(0), "web/nginx".into())].into(),
        };
        let table = [
            (
                Reason::FreesCapacityForJob(JobId(3)),
                "freeing capacity for job `default/mnist` to start",
            ),
            (
                Reason::FreesCapacityForService(ServiceId(0)),
                "freeing capacity for service `web/nginx`",
            ),
            (Reason::AboveQuota(QueueId(2)), "queue `research` exceeds its quota"),
            (Reason::NodeLeaves(NodeId(1)), "node `n1` is being removed"),
            (Reason::Preempted { by: JobId(7) }, "preempted by job 7, which has a higher priority"),
            (Reason::FreeCapacity, "free capacity available"),
        ];
        for (reason, expected) in table {
            assert_eq!(names.reason(reason), expected);
        }
        let waiting = names.waiting(Waiting::Behind(JobId(3)));
        assert_eq!(waiting, "job `default/mnist` has waited longer and goes first");
    }
}

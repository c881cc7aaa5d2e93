// SPDX-License-Identifier: Apache-2.0
//! Nodes: their resources, and whether they accept pods.

use edl_sched::resources::Resources;
use edl_sched::snapshot::{self, NodeId, NodeState};
use k8s_openapi::api::core::v1::Node;

use super::amounts;
use super::marks::MarkTable;

/// Prefixes of taints that describe the state of a node, which no job tolerates.
const STATES: [&str; 2] = ["node.kubernetes.io/", "node.cloudprovider.kubernetes.io/"];

/// Taints of a node that is about to be removed.
const GOING: [&str; 6] = [
    "ToBeDeletedByClusterAutoscaler",
    "aws-node-termination-handler/spot-itn",
    "cloud.google.com/impending-node-termination",
    "karpenter.sh/disrupted",
    "node.cloudprovider.kubernetes.io/shutdown",
    "node.kubernetes.io/out-of-service",
];

/// Whether a taint describes the state of the node, and was not set by a user.
pub(super) fn is_state(key: &str) -> bool {
    STATES.iter().any(|prefix| key.starts_with(prefix)) || GOING.contains(&key)
}

/// A node without its pods.
pub(super) fn node(id: NodeId, node: &Node, mark_table: &MarkTable) -> snapshot::Node {
    let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
    snapshot::Node {
        id,
        capacity: allocatable.map_or(Resources::ZERO, amounts::offered),
        taken: Resources::ZERO,
        leaving: Resources::ZERO,
        taints: mark_table.taints(node),
        labels: mark_table.labels(node),
        state: state(node),
    }
}

/// An unreachable node keeps its pods: it often comes back, and until its pods are replaced, there is
/// nothing to plan for them.
fn state(node: &Node) -> NodeState {
    let spec = node.spec.as_ref();
    let taints = spec.and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    if node.metadata.deletion_timestamp.is_some()
        || taints.iter().any(|taint| GOING.contains(&taint.key.as_str()))
    {
        return NodeState::Leaving;
    }
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref());
    let ready = conditions.unwrap_or_default().iter().find(|condition| condition.type_ == "Ready");
    let is_ready = ready.is_none_or(|condition| condition.status == "True");
    let is_cordoned = spec.and_then(|spec| spec.unschedulable).unwrap_or(false);
    let has_trouble =
        taints.iter().any(|taint| taint.effect != "PreferNoSchedule" && is_state(&taint.key));
    match is_ready && !is_cordoned && !has_trouble {
        true => NodeState::Ready,
        false => NodeState::Cordoned,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(spec: Value, ready: &str) -> NodeState {
        let status = json!({"conditions": [{"type": "Ready", "status": ready}]});
        state(&serde_json::from_value(json!({"spec": spec, "status": status})).unwrap())
    }

    #[test]
    fn a_node_accepts_pods_unless_marked_otherwise() {
        let taint = |key: &str| json!({"taints": [{"key": key, "effect": "NoSchedule"}]});
        let table = [
            (json!({}), "True", NodeState::Ready),
            (json!({"unschedulable": true}), "True", NodeState::Cordoned),
            (json!({}), "Unknown", NodeState::Cordoned),
            (taint("node.kubernetes.io/disk-pressure"), "True", NodeState::Cordoned),
            (taint("dedicated"), "True", NodeState::Ready),
            (taint("karpenter.sh/disrupted"), "True", NodeState::Leaving),
            (taint("node.kubernetes.io/out-of-service"), "False", NodeState::Leaving),
        ];
        for (spec, ready, expected) in table {
            assert_eq!(of(spec.clone(), ready), expected, "{spec} {ready}");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Taints and node labels as bits, as the planner compares them.
//!
//! There are 64 of each. Further ones share the last bit, which a pod has only if it tolerates all of
//! them. So too many taints make a plan cautious, but never wrong.

use std::collections::{BTreeMap, BTreeSet};

use edl_sched::snapshot::Marks;
use k8s_openapi::api::core::v1::{Node, Pod, Taint, Toleration};

const N_MARKS: usize = 64;

/// The taints of nodes and the labels that pods select, each with its bit.
#[derive(Clone, Debug, Default)]
pub(super) struct MarkTable {
    taints: Vec<(String, String, String)>,
    labels: Vec<(String, String)>,
}

impl MarkTable {
    /// Collects the taints of `nodes` and the labels that `pods` select.
    #[must_use]
    pub(super) fn new<'a>(
        nodes: impl IntoIterator<Item = &'a Node>,
        pods: impl IntoIterator<Item = &'a Pod>,
    ) -> Self {
        let mut taints = BTreeSet::new();
        for taint in nodes.into_iter().flat_map(binding) {
            let value = taint.value.clone().unwrap_or_default();
            taints.insert((taint.key.clone(), value, taint.effect.clone()));
        }
        let labels: BTreeSet<(String, String)> =
            pods.into_iter().flat_map(|pod| selector(pod).clone()).collect();
        Self { taints: taints.into_iter().collect(), labels: labels.into_iter().collect() }
    }

    #[must_use]
    pub(super) fn taints(&self, node: &Node) -> Marks {
        let on: Vec<&Taint> = binding(node).collect();
        marks(&self.taints, Share::Any, |(key, value, effect)| {
            on.iter().any(|taint| {
                taint.key == *key
                    && taint.value.as_deref().unwrap_or_default() == value
                    && taint.effect == *effect
            })
        })
    }

    #[must_use]
    pub(super) fn tolerates(&self, pod: &Pod) -> Marks {
        let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref());
        let tolerations = tolerations.unwrap_or_default();
        marks(&self.taints, Share::All, |taint| {
            tolerations.iter().any(|toleration| is_tolerated(toleration, taint))
        })
    }

    #[must_use]
    pub(super) fn labels(&self, node: &Node) -> Marks {
        let on = node.metadata.labels.as_ref();
        marks(&self.labels, Share::All, |(key, value)| {
            on.is_some_and(|labels| labels.get(key) == Some(value))
        })
    }

    #[must_use]
    pub(super) fn selects(&self, pod: &Pod) -> Marks {
        let selector = selector(pod);
        marks(&self.labels, Share::Any, |(key, value)| selector.get(key) == Some(value))
    }
}

/// When the shared bit is set.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Share {
    Any,
    All,
}

fn marks<T>(all: &[T], share: Share, has: impl Fn(&T) -> bool) -> Marks {
    let own = all.len().min(if all.len() > N_MARKS { N_MARKS - 1 } else { N_MARKS });
    let (own, shared) = all.split_at(own);
    let mut bits = 0;
    for (place, _) in own.iter().enumerate().filter(|(_, mark)| has(mark)) {
        bits |= 1 << place;
    }
    let is_shared = match share {
        Share::Any => shared.iter().any(&has),
        Share::All => !shared.is_empty() && shared.iter().all(&has),
    };
    Marks(bits | u64::from(is_shared) << (N_MARKS - 1))
}

/// The taints that keep pods away, without those that describe the node's state.
fn binding(node: &Node) -> impl Iterator<Item = &Taint> {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    taints
        .into_iter()
        .flatten()
        .filter(|taint| taint.effect != "PreferNoSchedule" && !super::nodes::is_state(&taint.key))
}

fn is_tolerated(toleration: &Toleration, (key, value, effect): &(String, String, String)) -> bool {
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    let (its_key, its_effect) = (text(&toleration.key), text(&toleration.effect));
    let is_same_effect = its_effect.is_empty() || its_effect == *effect;
    let is_any_value = toleration.operator.as_deref() == Some("Exists");
    let is_same_key = its_key == *key || (its_key.is_empty() && is_any_value);
    is_same_effect && is_same_key && (is_any_value || text(&toleration.value) == *value)
}

fn selector(pod: &Pod) -> &BTreeMap<String, String> {
    static NONE: BTreeMap<String, String> = BTreeMap::new();
    pod.spec.as_ref().and_then(|spec| spec.node_selector.as_ref()).unwrap_or(&NONE)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(taints: Value, labels: Value) -> Node {
        let node = json!({"metadata": {"labels": labels}, "spec": {"taints": taints}});
        serde_json::from_value(node).unwrap()
    }

    fn pod(tolerations: Value, selector: Value) -> Pod {
        let spec = json!({"containers": [], "tolerations": tolerations, "nodeSelector": selector});
        serde_json::from_value(json!({"spec": spec})).unwrap()
    }

    fn may_use(pod: &Pod, node: &Node) -> bool {
        let mark_table = MarkTable::new([node], [pod]);
        mark_table.taints(node).all_in(mark_table.tolerates(pod))
            && mark_table.selects(pod).all_in(mark_table.labels(node))
    }

    #[test]
    fn a_pod_may_use_nodes_whose_taints_it_bears_and_whose_labels_it_wants() {
        let taint = json!([{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]);
        let tainted = node(taint, json!({}));
        let table = [
            (json!([]), false),
            (json!([{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]), true),
            (json!([{"key": "gpu", "value": "no"}]), false),
            (json!([{"key": "gpu", "operator": "Exists"}]), true),
            (json!([{"operator": "Exists"}]), true),
            (json!([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}]), false),
        ];
        for (tolerations, expected) in table {
            let text = tolerations.to_string();
            assert_eq!(may_use(&pod(tolerations, json!({})), &tainted), expected, "{text}");
        }
        let labelled = node(json!([]), json!({"zone": "a"}));
        assert!(may_use(&pod(json!([]), json!({"zone": "a"})), &labelled));
        assert!(!may_use(&pod(json!([]), json!({"zone": "b"})), &labelled));
        let soft = json!([{"key": "x", "effect": "PreferNoSchedule"}]);
        assert!(may_use(&pod(json!([]), json!({})), &node(soft, json!({}))));
    }

    #[test]
    fn more_taints_than_bits_make_a_plan_careful() {
        let taint = |n: usize| json!({"key": format!("k{n:03}"), "effect": "NoSchedule"});
        let taints: Vec<Value> = (0..100).map(taint).collect();
        let node = node(taints.into(), json!({}));
        let toleration = |n: usize| json!({"key": format!("k{n:03}"), "operator": "Exists"});
        let some: Vec<Value> = (0..99).map(toleration).collect();
        let all: Vec<Value> = (0..100).map(toleration).collect();
        assert!(!may_use(&pod(some.into(), json!({})), &node));
        assert!(may_use(&pod(all.into(), json!({})), &node));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Pods of others without a node: equal pods of one service are one entry of the snapshot.

use std::collections::BTreeMap;
use std::sync::Arc;

use edl_sched::snapshot::{OnlinePods, ServiceId};
use k8s_openapi::api::core::v1::Pod;

use super::marks::MarkTable;
use super::{amounts, pods};
use crate::numbers::Numbers;

/// Services whose pods wait, and what they are called.
#[derive(Clone, Debug, Default)]
pub(super) struct WaitingServices {
    pub(super) pods: Vec<OnlinePods>,
    pub(super) names: BTreeMap<ServiceId, String>,
}

pub(super) fn waiting(
    pods: &[Arc<Pod>],
    mark_table: &MarkTable,
    numbers: &mut Numbers,
) -> WaitingServices {
    let mut found: BTreeMap<String, (String, OnlinePods)> = BTreeMap::new();
    for pod in pods {
        let name = pods::service_of(pod);
        let one = OnlinePods {
            service: ServiceId(0),
            shape: amounts::requested(pod),
            n: 1,
            priority: pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0),
            tolerates: mark_table.tolerates(pod),
            selects: mark_table.selects(pod),
        };
        // Pods of one service may differ while it is being changed.
        let key = format!("{name} {:?} {}", one.shape, one.priority);
        found.entry(key).and_modify(|(_, pods)| pods.n += 1).or_insert((name, one));
    }
    numbers.keep_only(|key| found.contains_key(key));
    let mut waiting = WaitingServices::default();
    for (key, (name, mut pods)) in found {
        pods.service = ServiceId(numbers.of(&key));
        waiting.names.insert(pods.service, name);
        waiting.pods.push(pods);
    }
    waiting
}

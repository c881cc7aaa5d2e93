// SPDX-License-Identifier: Apache-2.0
//! The queues of the cluster and their quotas, from the ConfigMap `elasticdl-queues`.
//!
//! ```yaml
//! research:
//!   { weight: 2, quota: "cpu=100,memory=400Gi,gpu=8", borrow: "gpu=4", namespaces: [vision],
//!     max_priority: 100 }
//! ```

use std::collections::BTreeMap;

use edl_core::cluster;
use edl_kube::yaml;
use edl_sched::resources::Resources;
use edl_sched::snapshot::{Queue, QueueId};
use k8s_openapi::api::core::v1::ConfigMap;
use serde::Deserialize;

use crate::description::DEFAULT_QUEUE;
use crate::observe::amounts;

/// Their ConfigMap, in the operator's namespace.
pub const CONFIG_MAP: &str = "elasticdl-queues";
/// Its file.
pub const FILE: &str = "queues.yaml";

/// The highest priority of a queue that sets none, as of PriorityClasses of users.
const MAX_PRIORITY: i32 = 1_000_000_000;

/// Queues by name; `default` always exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queues {
    by_name: BTreeMap<String, Entry>,
    /// What is wrong with the file, if anything; then there is only `default`.
    pub trouble: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    queue: Queue,
    /// The namespaces of its jobs; none: all.
    namespaces: Option<Vec<String>>,
    max_priority: i32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueFields {
    #[serde(default = "one")]
    weight: u32,
    quota: Option<String>,
    borrow: Option<String>,
    namespaces: Option<Vec<String>>,
    max_priority: Option<i32>,
}

fn one() -> u32 {
    1
}

impl Default for Queues {
    fn default() -> Self {
        Self::of(&BTreeMap::new())
            .unwrap_or_else(|trouble| Self { by_name: BTreeMap::new(), trouble: Some(trouble) })
    }
}

impl Queues {
    /// The queues of the ConfigMap; without one, only `default`.
    #[must_use]
    pub fn read(map: Option<&ConfigMap>) -> Self {
        let data = map.and_then(|map| map.data.as_ref());
        let Some(text) = data.and_then(|data| data.get(FILE)) else { return Self::default() };
        let fields: Result<BTreeMap<String, QueueFields>, _> = yaml::read(text);
        let fields = fields.map_err(|error| error.to_string());
        match fields.and_then(|fields| Self::of(&fields)) {
            Ok(queues) => queues,
            Err(error) => {
                let trouble = format!("{CONFIG_MAP}, {FILE}: {error}");
                Self { trouble: Some(trouble), ..Self::default() }
            }
        }
    }

    fn of(fields: &BTreeMap<String, QueueFields>) -> Result<Self, String> {
        let mut queues = Self { by_name: BTreeMap::new(), trouble: None };
        let free = QueueFields {
            weight: 1,
            quota: None,
            borrow: None,
            namespaces: None,
            max_priority: None,
        };
        queues.add(DEFAULT_QUEUE, fields.get(DEFAULT_QUEUE).unwrap_or(&free))?;
        for (name, fields) in fields.iter().filter(|(name, _)| *name != DEFAULT_QUEUE) {
            queues.add(name, fields)?;
        }
        Ok(queues)
    }

    fn add(&mut self, name: &str, fields: &QueueFields) -> Result<(), String> {
        let amount =
            |text: &Option<String>, free: Resources| -> Result<Option<Resources>, String> {
                let Some(text) = text else { return Ok(None) };
                let read: Result<cluster::Resources, String> = text.parse();
                let read = read.map_err(|why| format!("queue `{name}`: {why}"))?;
                Ok(Some(amounts::limit(&read.0, free)))
            };
        if fields.weight == 0 {
            return Err(format!("queue `{name}`: weight must be at least 1"));
        }
        let number = u32::try_from(self.by_name.len()).unwrap_or(u32::MAX);
        let queue = Queue {
            id: QueueId(number),
            weight: fields.weight,
            // A kind that is not in the quota is unlimited; one that is not in `borrow` is not
            // borrowed.
            quota: amount(&fields.quota, amounts::BOUNDLESS)?,
            borrow: amount(&fields.borrow, Resources::ZERO)?,
        };
        let entry = Entry {
            queue,
            namespaces: fields.namespaces.clone(),
            max_priority: fields.max_priority.unwrap_or(MAX_PRIORITY),
        };
        self.by_name.insert(name.to_owned(), entry);
        Ok(())
    }

    #[must_use]
    pub fn get(&self, name: &str) -> Option<QueueId> {
        self.by_name.get(name).map(|entry| entry.queue.id)
    }

    /// Whether jobs of a namespace may use a queue.
    #[must_use]
    pub fn admits(&self, name: &str, namespace: &str) -> bool {
        let namespaces = self.by_name.get(name).and_then(|entry| entry.namespaces.as_ref());
        namespaces.is_none_or(|all| all.iter().any(|admitted| admitted == namespace))
    }

    /// The highest priority of the jobs in a queue.
    #[must_use]
    pub fn max_priority(&self, name: &str) -> i32 {
        self.by_name.get(name).map_or(MAX_PRIORITY, |entry| entry.max_priority)
    }

    #[must_use]
    pub fn all(&self) -> Vec<Queue> {
        self.by_name.values().map(|entry| entry.queue).collect()
    }

    /// The names by number.
    #[must_use]
    pub fn names(&self) -> BTreeMap<QueueId, String> {
        self.by_name.iter().map(|(name, entry)| (entry.queue.id, name.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queues(text: &str) -> Queues {
        let data = Some([(FILE.to_owned(), text.to_owned())].into());
        Queues::read(Some(&ConfigMap { data, ..ConfigMap::default() }))
    }

    #[test]
    fn a_queue_has_a_weight_a_quota_and_what_it_may_borrow() {
        let queues = queues("research: {weight: 2, quota: 'cpu=2,gpu=1', borrow: gpu=4}\n");
        assert_eq!(queues.trouble, None);
        let research = queues.get("research").unwrap();
        let all = queues.all();
        let research = all.iter().find(|queue| queue.id == research).unwrap();
        let quota = research.quota.unwrap();
        assert_eq!((research.weight, quota.cpu_milli, quota.gpu), (2, 2000, 1));
        assert_eq!(quota.memory_mib, amounts::BOUNDLESS.memory_mib);
        assert_eq!(research.borrow, Some(Resources::new(4, 0, 0)));
        assert!(queues.get(DEFAULT_QUEUE).is_some() && queues.get("other").is_none());
    }

    #[test]
    fn a_queue_lists_its_namespaces_and_caps_the_priority() {
        let queues = queues("a: {namespaces: [x, y], max_priority: 7}\nb: {namespaces: []}\n");
        assert_eq!(queues.trouble, None);
        assert!(queues.admits("a", "x") && !queues.admits("a", "z") && !queues.admits("b", "x"));
        assert!(queues.admits(DEFAULT_QUEUE, "z"), "a queue without a list is open to all");
        assert_eq!((queues.max_priority("a"), queues.max_priority("b")), (7, MAX_PRIORITY));
    }

    #[test]
    fn an_invalid_file_leaves_the_default_queue_and_a_reason() {
        for (text, why) in [
            ("[1", "queues.yaml"),
            ("a: {weight: 0}", "at least 1"),
            ("a: {quota: much}", "queue `a`"),
            ("a: {speed: 1}", "speed"),
        ] {
            let queues = queues(text);
            assert!(
                queues.trouble.as_ref().is_some_and(|trouble| trouble.contains(why)),
                "{queues:?}"
            );
            assert!(queues.get(DEFAULT_QUEUE).is_some() && queues.get("a").is_none());
        }
        assert_eq!(Queues::read(None), Queues::default());
    }
}

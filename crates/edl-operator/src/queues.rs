// SPDX-License-Identifier: Apache-2.0
//! The queues of the cluster: who may use how much, from the ConfigMap `elasticdl-queues`.
//!
//! ```yaml
//! research: { weight: 2, quota: "cpu=100,memory=400Gi,gpu=8", borrow: "gpu=4" }
//! ```

use std::collections::BTreeMap;

use edl_core::cluster;
use edl_kube::yaml;
use edl_sched::resources::Resources;
use edl_sched::snapshot::{Queue, QueueId};
use k8s_openapi::api::core::v1::ConfigMap;
use serde::Deserialize;

use crate::observe::amounts;
use crate::words::DEFAULT_QUEUE;

/// The ConfigMap that holds them, in the operator's namespace.
pub const CONFIG_MAP: &str = "elasticdl-queues";
/// Its file.
pub const FILE: &str = "queues.yaml";

/// Queues by name; `default` is always there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queues {
    by_name: BTreeMap<String, Queue>,
    /// What was wrong with the file, if anything; then only `default` is there.
    pub trouble: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Words {
    #[serde(default = "one")]
    weight: u32,
    quota: Option<String>,
    borrow: Option<String>,
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
    /// The queues that the ConfigMap says; without one, `default` alone.
    #[must_use]
    pub fn read(map: Option<&ConfigMap>) -> Self {
        let data = map.and_then(|map| map.data.as_ref());
        let Some(text) = data.and_then(|data| data.get(FILE)) else { return Self::default() };
        let words: Result<BTreeMap<String, Words>, _> = yaml::read(text);
        let words = words.map_err(|error| error.to_string());
        match words.and_then(|words| Self::of(&words)) {
            Ok(queues) => queues,
            Err(error) => {
                let trouble = format!("{CONFIG_MAP}, {FILE}: {error}");
                Self { trouble: Some(trouble), ..Self::default() }
            }
        }
    }

    fn of(words: &BTreeMap<String, Words>) -> Result<Self, String> {
        let mut queues = Self { by_name: BTreeMap::new(), trouble: None };
        let free = Words { weight: 1, quota: None, borrow: None };
        queues.add(DEFAULT_QUEUE, words.get(DEFAULT_QUEUE).unwrap_or(&free))?;
        for (name, words) in words.iter().filter(|(name, _)| *name != DEFAULT_QUEUE) {
            queues.add(name, words)?;
        }
        Ok(queues)
    }

    fn add(&mut self, name: &str, words: &Words) -> Result<(), String> {
        let amount =
            |word: &Option<String>, free: Resources| -> Result<Option<Resources>, String> {
                let Some(text) = word else { return Ok(None) };
                let read: Result<cluster::Resources, String> = text.parse();
                let read = read.map_err(|why| format!("queue `{name}`: {why}"))?;
                Ok(Some(amounts::limit(&read.0, free)))
            };
        if words.weight == 0 {
            return Err(format!("queue `{name}`: weight must be at least 1"));
        }
        let number = u32::try_from(self.by_name.len()).unwrap_or(u32::MAX);
        let queue = Queue {
            id: QueueId(number),
            weight: words.weight,
            // A kind that a quota does not name is not bound; one that is not lent is not lent.
            quota: amount(&words.quota, amounts::BOUNDLESS)?,
            borrow: amount(&words.borrow, Resources::ZERO)?,
        };
        self.by_name.insert(name.to_owned(), queue);
        Ok(())
    }

    #[must_use]
    pub fn get(&self, name: &str) -> Option<QueueId> {
        self.by_name.get(name).map(|queue| queue.id)
    }

    #[must_use]
    pub fn all(&self) -> Vec<Queue> {
        self.by_name.values().copied().collect()
    }

    /// The names by number.
    #[must_use]
    pub fn names(&self) -> BTreeMap<QueueId, String> {
        self.by_name.iter().map(|(name, queue)| (queue.id, name.clone())).collect()
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
    fn a_bad_file_leaves_the_default_queue_and_says_why() {
        for (text, why) in [
            ("[1", "queues.yaml"),
            ("a: {weight: 0}", "at least 1"),
            ("a: {quota: much}", "queue `a`"),
            ("a: {speed: 1}", "speed"),
        ] {
            let queues = queues(text);
            assert!(queues.trouble.as_ref().is_some_and(|told| told.contains(why)), "{queues:?}");
            assert!(queues.get(DEFAULT_QUEUE).is_some() && queues.get("a").is_none());
        }
        assert_eq!(Queues::read(None), Queues::default());
    }
}

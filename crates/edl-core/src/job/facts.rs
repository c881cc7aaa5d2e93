// SPDX-License-Identifier: Apache-2.0
//! Durable state as a table of small facts, each under its own key. A change writes only the facts
//! that differ, so it costs the same in a job of any size and age.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde::de::{DeserializeOwned, Error as _};

use super::{Durable, Suspect};
use crate::id::{BatchId, Incarnation, WorkerId};

/// A fact to write.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fact {
    pub key: String,
    /// As JSON; none removes the fact.
    pub value: Option<String>,
}

impl Fact {
    fn new(key: impl Into<String>, value: &impl Serialize) -> Self {
        let value = serde_json::to_string(value).expect("our own types have a JSON form");
        Self { key: key.into(), value: Some(value) }
    }

    /// Seconds that this master and earlier ones have worked.
    #[must_use]
    pub fn elapsed(secs: f64) -> Self {
        Self::new("elapsed_secs", &secs)
    }
}

impl Durable {
    /// The facts that differ from `before`.
    #[must_use]
    pub fn changes(&self, before: &Self) -> Vec<Fact> {
        let mut changes = Changes(Vec::new());
        changes.value("generation", &before.generation, &self.generation);
        changes.value("model", &before.model, &self.model);
        changes.value("best", &before.best, &self.best);
        changes.value("workers_wanted", &before.workers_wanted, &self.workers_wanted);
        changes.value("probe", &before.probe, &self.probe);
        changes.value("bits_differ", &before.bits_differ, &self.bits_differ);
        changes.value("last_step", &before.last_step, &self.last_step);
        changes.value("elapsed_secs", &before.elapsed_secs, &self.elapsed_secs);
        changes.value("end", &before.end, &self.end);
        changes.list("checkpoint", &before.checkpoints, &self.checkpoints, |c| c.folder.clone());
        changes.list("evaluation", &before.evaluations, &self.evaluations, |e| {
            format!("{:020}", e.version)
        });
        changes.list("failure", &before.failures, &self.failures, |f| suspect_key(f.work));
        changes.set("skipped", &before.skipped, &self.skipped, |batch| {
            format!("{:010}/{:010}", batch.epoch, batch.index)
        });
        changes.set("replaced_server", &before.replaced_servers, &self.replaced_servers, |i| {
            format!("{:020}", i.0)
        });
        changes.value("has_holders", &before.holders.is_some(), &self.holders.is_some());
        let (before, after) = (holders(before), holders(self));
        changes.list("holder", before, after, |(worker, _)| format!("{:010}", worker.0));
        changes.0
    }

    /// Reads the table of facts; an error names the invalid fact.
    pub fn from_facts<'a>(
        facts: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    ) -> Result<Self, (String, serde_json::Error)> {
        let mut durable = Self::default();
        for (key, value) in facts {
            durable.read(key, value).map_err(|error| (key.to_owned(), error))?;
        }
        durable.sort_checkpoints();
        Ok(durable)
    }

    fn read(&mut self, key: &str, json: &[u8]) -> Result<(), serde_json::Error> {
        let kind = key.split_once('/').map_or(key, |(kind, _)| kind);
        match kind {
            "generation" => self.generation = read(json)?,
            "model" => self.model = read(json)?,
            "best" => self.best = read(json)?,
            "workers_wanted" => self.workers_wanted = read(json)?,
            "probe" => self.probe = read(json)?,
            "bits_differ" => self.bits_differ = read(json)?,
            "last_step" => self.last_step = read(json)?,
            "elapsed_secs" => self.elapsed_secs = read(json)?,
            "end" => self.end = read(json)?,
            "checkpoint" => self.checkpoints.push(read(json)?),
            "evaluation" => self.evaluations.push(read(json)?),
            "failure" => self.failures.push(read(json)?),
            "skipped" => _ = self.skipped.insert(read::<BatchId>(json)?),
            "replaced_server" => _ = self.replaced_servers.insert(read::<Incarnation>(json)?),
            "has_holders" => {
                if read(json)? {
                    self.holders.get_or_insert_default();
                }
            }
            "holder" => self.holders.get_or_insert_default().push(read(json)?),
            _ => return Err(serde_json::Error::custom("unknown fact")),
        }
        Ok(())
    }
}

fn holders(durable: &Durable) -> &[(WorkerId, Incarnation)] {
    durable.holders.as_deref().unwrap_or_default()
}

fn suspect_key(suspect: Suspect) -> String {
    match suspect {
        Suspect::Batch(BatchId { epoch, index }) => format!("batch/{epoch:010}/{index:010}"),
        Suspect::EvalShard(shard) => format!("evaluation/{shard:010}"),
        Suspect::PredictShard(shard) => format!("prediction/{shard:010}"),
    }
}

fn read<T: DeserializeOwned>(json: &[u8]) -> Result<T, serde_json::Error> {
    serde_json::from_slice(json)
}

/// Facts that differ.
struct Changes(Vec<Fact>);

impl Changes {
    fn value<T: PartialEq + Serialize>(&mut self, key: &str, before: &T, after: &T) {
        if before != after {
            self.0.push(Fact::new(key, after));
        }
    }

    fn list<T: PartialEq + Serialize>(
        &mut self,
        kind: &str,
        before: &[T],
        after: &[T],
        key: impl Fn(&T) -> String,
    ) {
        if before == after {
            return;
        }
        let mut known: BTreeMap<String, &T> = before.iter().map(|item| (key(item), item)).collect();
        for item in after {
            let key = key(item);
            if known.remove(&key) != Some(item) {
                self.0.push(Fact::new(format!("{kind}/{key}"), item));
            }
        }
        let gone = known.into_keys().map(|key| Fact { key: format!("{kind}/{key}"), value: None });
        self.0.extend(gone);
    }

    fn set<T: Ord + Serialize>(
        &mut self,
        kind: &str,
        before: &BTreeSet<T>,
        after: &BTreeSet<T>,
        key: impl Fn(&T) -> String,
    ) {
        let key = |item: &T| format!("{kind}/{}", key(item));
        self.0.extend(after.difference(before).map(|item| Fact::new(key(item), item)));
        let gone = before.difference(after);
        self.0.extend(gone.map(|item| Fact { key: key(item), value: None }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluation::Evaluated;
    use crate::id::Generation;
    use crate::job::{CheckpointRef, End, Failure};

    type Table = BTreeMap<String, String>;

    fn write(table: &mut Table, facts: Vec<Fact>) {
        for Fact { key, value } in facts {
            match value {
                Some(value) => _ = table.insert(key, value),
                None => assert!(table.remove(&key).is_some(), "`{key}` was there"),
            }
        }
    }

    fn read_back(table: &Table) -> Durable {
        let facts = table.iter().map(|(key, value)| (key.as_str(), value.as_bytes()));
        Durable::from_facts(facts).unwrap()
    }

    fn holders(n: u32) -> Option<Vec<(WorkerId, Incarnation)>> {
        Some((0..n).map(|id| (WorkerId(id), Incarnation(u64::MAX - u64::from(id)))).collect())
    }

    #[test]
    fn the_table_of_facts_follows_every_change() {
        let checkpoint = |version: u64| CheckpointRef {
            folder: format!("early-{}", 9 - version),
            version,
            exact: None,
            is_bad: false,
        };
        let evaluated =
            |version| Evaluated { version, epoch: 0, metrics: Default::default(), is_best: false };
        let failure = |index, n_failures| Failure {
            work: Suspect::Batch(BatchId { epoch: 1, index }),
            n_failures,
        };
        let mut states = vec![Durable::default()];
        let mut then = |change: &dyn Fn(&mut Durable)| {
            let mut next = states.last().unwrap().clone();
            change(&mut next);
            states.push(next);
        };
        then(&|d| (d.generation, d.probe) = (Generation(3), Some(u64::MAX)));
        then(&|d| d.checkpoints = vec![checkpoint(1), checkpoint(5)]);
        then(&|d| d.evaluations = vec![evaluated(8), evaluated(70)]);
        then(&|d| d.failures = vec![failure(2, 1), failure(10, 1)]);
        then(&|d| d.failures[1].n_failures = 2);
        then(&|d| {
            d.skipped.extend([BatchId { epoch: 0, index: 4 }, BatchId { epoch: 2, index: 0 }])
        });
        then(&|d| d.replaced_servers.extend([Incarnation(u64::MAX), Incarnation(7)]));
        then(&|d| d.holders = Some(Vec::new()));
        then(&|d| d.holders = holders(3));
        then(&|d| _ = d.holders.as_mut().unwrap().remove(1));
        then(&|d| (d.end, d.bits_differ) = (Some(End::Failed("why".into())), true));
        then(&|d| (d.checkpoints, d.evaluations) = (vec![checkpoint(5)], vec![evaluated(8)]));
        then(&|d| (d.end, d.best, d.workers_wanted) = (None, Some("early-4".into()), Some(7)));
        then(&|d| d.last_step = Some(12));
        then(&|d| d.failures.clear());
        then(&|d| *d = Durable::default());
        let mut table = Table::new();
        for (before, after) in states.iter().zip(&states[1..]) {
            write(&mut table, after.changes(before));
            assert_eq!(read_back(&table), *after);
        }
    }

    #[test]
    fn a_change_among_many_holders_is_small() {
        let before = Durable { holders: holders(1_000), ..Durable::default() };
        let mut after = before.clone();
        after.holders.as_mut().unwrap().remove(500);
        let gone = Fact { key: "holder/0000000500".into(), value: None };
        assert_eq!(after.changes(&before), [gone]);
    }

    #[test]
    fn an_invalid_fact_is_named() {
        let unknown = Durable::from_facts([("colour/1", &b"1"[..])]).unwrap_err();
        assert_eq!(
            (unknown.0.as_str(), unknown.1.to_string().as_str()),
            ("colour/1", "unknown fact")
        );
        let truncated = Durable::from_facts([("skipped/1/2", &b"{"[..])]).unwrap_err();
        assert_eq!(truncated.0, "skipped/1/2");
    }
}

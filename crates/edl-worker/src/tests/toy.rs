// SPDX-License-Identifier: Apache-2.0
//! A toy job: a model that can be checked by hand, records that are their own numbers, and
//! servers in memory.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use edl_core::id::{BatchId, Generation};
use edl_core::metric::{Measures, Metric};
use edl_core::model::{FieldSpec, Init, ModelSpec, ParamSpec, Rule, TableSpec};
use edl_core::optimizer::OptimizerSpec;
use edl_net::data::{Acked, Route, Versions};
use edl_tensor::batch::Batch;
use edl_tensor::model::{self, Gradient, Inputs, Model, Outcome, Predictions};

use crate::feed::Records;
use crate::servers::{Dial, Error, Line, Pull, Push, Servers};

/// The value of every parameter on the toy servers.
pub(super) const WEIGHT: f32 = 0.5;

/// One dense parameter and one table with a row per record; the loss is the mean record number.
pub(super) struct ToyModel {
    spec: ModelSpec,
    servers: ScriptedServers,
}

impl ToyModel {
    pub(super) fn new(servers: ScriptedServers) -> Self {
        let init = Init::Constant(0.0);
        let rule = Rule::Trainable { decay: false };
        let spec = ModelSpec {
            name: "toy".into(),
            params: vec![ParamSpec::new("w", vec![1], Init::Given, rule)],
            tables: vec![TableSpec { name: "t".into(), dim: 2, init }],
            inputs: Vec::new(),
            metrics: vec![Metric::mse()],
            optimizer: OptimizerSpec::sgd(0.1),
        };
        Self { spec, servers }
    }
}

/// A record that the model cannot take.
pub(super) const POISON: u64 = 83;
/// A record that cannot be read.
pub(super) const CORRUPT: u64 = 94;

impl Model for ToyModel {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn first_values(&self) -> Option<Vec<f32>> {
        Some(vec![WEIGHT])
    }

    /// Every record's row twice, to be made one on the way.
    fn lookups(&self, batch: &Batch) -> Result<Vec<Vec<u64>>, model::Error> {
        Ok(vec![batch.records.iter().flat_map(|record| [*record, *record]).collect()])
    }

    fn train(
        &mut self,
        inputs: Inputs<'_>,
        _seed: u64,
        gradient: &mut Gradient,
    ) -> Result<Outcome, model::Error> {
        self.servers.wait(|book| !book.held_training);
        assert_eq!(inputs.dense, [WEIGHT]);
        let records = &inputs.batch.records;
        let expected: Vec<f32> = records.iter().flat_map(|record| [*record as f32; 4]).collect();
        assert_eq!(inputs.rows, [expected], "two rows of two numbers for each record");
        if records.contains(&POISON) {
            return Err(model::Error::Record { record: POISON, problem: "poison".into() });
        }
        gradient.dense.fill(1.0);
        gradient.rows[0].fill(1.0);
        if self.servers.book().overflows {
            gradient.rows[0][0] = f32::INFINITY;
        }
        let sum: u64 = records.iter().sum();
        Ok(Outcome { loss: sum as f32 / records.len() as f32 })
    }

    fn evaluate(
        &mut self,
        inputs: Inputs<'_>,
        measures: &mut Measures,
    ) -> Result<Outcome, model::Error> {
        inputs.batch.records.iter().for_each(|record| measures.add_value(*record as f32, 0.0));
        Ok(Outcome { loss: 0.0 })
    }

    fn predict(&mut self, inputs: Inputs<'_>) -> Result<Predictions, model::Error> {
        let values =
            inputs.batch.records.iter().flat_map(|record| [*record as f32, inputs.dense[0]]);
        Ok(Predictions { width: 2, values: values.collect() })
    }
}

pub(crate) struct ToyRecords(pub(crate) u64);

impl Records for ToyRecords {
    fn n_records(&self) -> u64 {
        self.0
    }

    fn batch(&self, records: &[u64], _: &[FieldSpec]) -> Result<Batch, String> {
        if records.contains(&CORRUPT) {
            return Err(format!("{} is corrupt", self.locate(CORRUPT)));
        }
        Ok(Batch { records: records.to_vec(), ..Batch::default() })
    }

    fn locate(&self, record: u64) -> String {
        format!("toy file, record {record}")
    }
}

/// Servers that answer as a test decides, and keep no parameters.
#[derive(Clone, Default)]
pub(super) struct ScriptedServers(Arc<(Mutex<Book>, Condvar)>);

#[derive(Default)]
pub(super) struct Book {
    /// Every push that arrived, in order.
    pub(super) pushes: Vec<BatchId>,
    pub(super) min_rounds: Vec<Option<u64>>,
    /// Pulls that came without a wish for the dense parameters.
    pub(super) n_pulls_without_dense: usize,
    /// Acknowledgements wait until a round of this many batches is complete.
    pub(super) round: usize,
    pub(super) held_pulls: bool,
    pub(super) held_acks: bool,
    pub(super) held_training: bool,
    /// Gradients are not finite, although losses are.
    pub(super) overflows: bool,
    /// Pulls and pushes in their order.
    pub(super) log: Vec<&'static str>,
    pub(super) n_pulls: usize,
    pub(super) n_dials: usize,
    /// Generations that are over: connections of them break when used.
    pub(super) over: BTreeSet<Generation>,
    /// The connection breaks at the push of this batch, once.
    pub(super) break_at: Option<BatchId>,
    n_aborts: usize,
}

struct ScriptedLine {
    servers: ScriptedServers,
    generation: Generation,
    /// Pushes on this connection without an answer.
    unanswered: Vec<BatchId>,
    n_aborts: usize,
}

impl ScriptedServers {
    pub(super) fn book(&self) -> MutexGuard<'_, Book> {
        self.0.0.lock().unwrap()
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Book)) {
        change(&mut self.book());
        self.0.1.notify_all();
    }

    /// Blocks until `is_so`; a hang becomes a failure.
    pub(super) fn wait(&self, is_so: impl Fn(&Book) -> bool) {
        let limit = Duration::from_secs(30);
        let waited = self.0.1.wait_timeout_while(self.book(), limit, |book| !is_so(book));
        assert!(!waited.unwrap().1.timed_out(), "the servers never got there");
    }
}

impl Dial for ScriptedServers {
    fn dial(&mut self, route: &Route) -> Result<Line, Error> {
        self.change(|book| book.n_dials += 1);
        if self.book().over.contains(&route.generation) {
            return Err(Error::Lost(format!("generation {} is over", route.generation)));
        }
        let n_aborts = self.book().n_aborts;
        let line = ScriptedLine {
            servers: self.clone(),
            generation: route.generation,
            unanswered: Vec::new(),
            n_aborts,
        };
        let servers = self.clone();
        let abort = Box::new(move || servers.change(|book| book.n_aborts += 1));
        Ok(Line { servers: Box::new(line), abort })
    }
}

impl ScriptedLine {
    fn check(&self, book: &Book) -> Result<(), Error> {
        if book.over.contains(&self.generation) {
            return Err(Error::Lost(format!("generation {} is over", self.generation)));
        }
        if book.n_aborts > self.n_aborts {
            return Err(Error::Lost("aborted".into()));
        }
        Ok(())
    }
}

impl Servers for ScriptedLine {
    fn pull(&mut self, pull: &mut Pull) -> Result<Versions, Error> {
        self.servers.change(|book| {
            book.n_pulls += 1;
            book.log.push("pull");
            book.min_rounds.push(pull.min_round);
            book.n_pulls_without_dense += usize::from(pull.dense.is_none());
        });
        self.servers.wait(|book| !book.held_pulls || self.check(book).is_err());
        self.check(&self.servers.book())?;
        if let Some(dense) = &mut pull.dense {
            dense.fill(WEIGHT);
        }
        let ids = &pull.ids[0];
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "no id twice");
        pull.rows[0] = ids.iter().flat_map(|id| [*id as f32; 2]).collect();
        Ok(Versions(vec![0]))
    }

    fn push(&mut self, push: &Push) -> Result<(), Error> {
        self.check(&self.servers.book())?;
        assert_eq!(push.gradient.dense, [1.0]);
        assert_eq!(push.gradient.rows, [vec![2.0; push.ids[0].len() * 2]], "equal ids added up");
        let is_broken = self.servers.book().break_at == Some(push.batch);
        self.servers.change(|book| {
            book.pushes.push(push.batch);
            book.log.push("push");
            book.break_at = book.break_at.filter(|batch| *batch != push.batch);
        });
        self.unanswered.push(push.batch);
        if is_broken { Err(Error::Lost("broken pipe".into())) } else { Ok(()) }
    }

    fn skip(&mut self, batch: BatchId) -> Result<(), Error> {
        self.check(&self.servers.book())?;
        self.servers.change(|book| book.log.push("skip"));
        self.unanswered.push(batch);
        Ok(())
    }

    fn acknowledged(&mut self, limit: Duration) -> Result<Option<Acked>, Error> {
        let is_silent = |book: &Book| book.held_acks || self.unanswered.len() < book.round;
        let (book, changed) = (self.servers.book(), &self.servers.0.1);
        let silent = |book: &mut Book| is_silent(book) && self.check(book).is_ok();
        let (book, waited) = changed.wait_timeout_while(book, limit, silent).unwrap();
        self.check(&book)?;
        drop(book);
        if waited.timed_out() {
            return Ok(None);
        }
        let batch = self.unanswered.remove(0);
        Ok(Some(Acked { batch, generation: self.generation }))
    }
}

pub(super) fn batches(indices: Range<u32>) -> Vec<BatchId> {
    indices.map(|index| BatchId { epoch: 0, index }).collect()
}

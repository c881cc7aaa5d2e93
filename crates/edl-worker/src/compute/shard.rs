// SPDX-License-Identifier: Apache-2.0
//! A shard of records that is walked in minibatches, to evaluate or to predict.

use std::ops::Range;
use std::path::Path;

use edl_core::id::{Generation, LeaseId};
use edl_core::metric::Metric;
use edl_net::proto::worker_message::Kind;
use edl_net::proto::{EvalWork, PredictWork};
use edl_tensor::model::{Inputs, Model};

use crate::evaluate::Evaluation;
use crate::feed::{Read, Source};
use crate::predict::{self, Prediction};

/// A shard under way.
pub(crate) struct Shard {
    pass: Pass,
    minibatch: u64,
}

enum Pass {
    Evaluate(Evaluation),
    Predict(Prediction),
}

impl Shard {
    pub(crate) fn evaluation(work: EvalWork, metrics: &[Metric], minibatch: u32) -> Self {
        let pass = Pass::Evaluate(Evaluation::new(work, metrics));
        Self { pass, minibatch: u64::from(minibatch) }
    }

    pub(crate) fn prediction(
        work: PredictWork,
        job_dir: &Path,
        lease: LeaseId,
        minibatch: u32,
    ) -> Result<Self, predict::Error> {
        let pass = Pass::Predict(Prediction::new(work, job_dir, lease)?);
        Ok(Self { pass, minibatch: u64::from(minibatch) })
    }

    /// The shard's number in the master's books.
    pub(crate) fn number(&self) -> u32 {
        match &self.pass {
            Pass::Evaluate(evaluation) => evaluation.shard(),
            Pass::Predict(prediction) => prediction.shard(),
        }
    }

    pub(crate) fn phase(&self) -> &'static str {
        match &self.pass {
            Pass::Evaluate(_) => "evaluating",
            Pass::Predict(_) => "predicting",
        }
    }

    fn records(&self) -> Range<u64> {
        match &self.pass {
            Pass::Evaluate(evaluation) => evaluation.records(),
            Pass::Predict(prediction) => prediction.records(),
        }
    }

    pub(crate) fn n_pieces(&self) -> u32 {
        let records = self.records();
        let n_pieces = records.end.saturating_sub(records.start).div_ceil(self.minibatch);
        u32::try_from(n_pieces).expect("a shard has fewer than 2^32 minibatches")
    }

    /// The records of one minibatch.
    pub(crate) fn read(&self, piece: u32) -> Read {
        let source = match &self.pass {
            Pass::Evaluate(_) => Source::Validation,
            Pass::Predict(_) => Source::Prediction,
        };
        let Range { start, end } = self.records();
        let first = start + u64::from(piece) * self.minibatch;
        Read::Range(source, first..end.min(first + self.minibatch))
    }

    /// Adds the next minibatch.
    pub(crate) fn add(
        &mut self,
        model: &mut dyn Model,
        inputs: Inputs<'_>,
    ) -> Result<(), predict::Error> {
        match &mut self.pass {
            Pass::Evaluate(evaluation) => Ok(evaluation.add(model, inputs)?),
            Pass::Predict(prediction) => prediction.add(model, inputs),
        }
    }

    /// What the master is told when the last minibatch is in.
    pub(crate) fn done(
        self,
        lease: LeaseId,
        generation: Generation,
    ) -> Result<Kind, predict::Error> {
        match self.pass {
            Pass::Evaluate(evaluation) => Ok(Kind::EvalDone(evaluation.done(lease, generation))),
            Pass::Predict(prediction) => Ok(Kind::PredictDone(prediction.done(lease)?)),
        }
    }
}

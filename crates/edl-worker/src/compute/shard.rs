// SPDX-License-Identifier: Apache-2.0
//! A shard that a member of a world evaluates in minibatches.

use edl_core::id::{Generation, LeaseId};
use edl_core::metric::Metric;
use edl_net::proto::worker_message::Kind;
use edl_net::proto::{EvalDone, EvalWork};
use edl_tensor::model::{Error, Inputs, Model};

use crate::evaluate::Evaluation;
use crate::feed::{Read, Source};

/// A shard in progress.
pub(crate) struct Shard {
    work: EvalWork,
    evaluation: Evaluation,
    minibatch: u64,
}

impl Shard {
    pub(crate) fn evaluation(work: EvalWork, metrics: &[Metric], minibatch: u32) -> Self {
        Self { work, evaluation: Evaluation::new(metrics), minibatch: u64::from(minibatch) }
    }

    /// The shard's number in the master's accounting.
    pub(crate) fn number(&self) -> u32 {
        self.work.shard
    }

    pub(crate) fn n_pieces(&self) -> u32 {
        let EvalWork { first_record, end_record, .. } = self.work;
        let n_pieces = end_record.saturating_sub(first_record).div_ceil(self.minibatch);
        u32::try_from(n_pieces).expect("a shard has fewer than 2^32 minibatches")
    }

    /// The records of one minibatch.
    pub(crate) fn read(&self, piece: u32) -> Read {
        let first = self.work.first_record + u64::from(piece) * self.minibatch;
        let end = self.work.end_record.min(first + self.minibatch);
        Read::Range(Source::Validation, first..end)
    }

    /// Adds the next minibatch.
    pub(crate) fn add(&mut self, model: &mut dyn Model, inputs: Inputs<'_>) -> Result<(), Error> {
        self.evaluation.add(model, inputs)
    }

    /// The report after the last minibatch.
    pub(crate) fn done(
        self,
        lease: LeaseId,
        generation: Generation,
    ) -> Result<Kind, serde_json::Error> {
        let Evaluation { measures, n_records } = self.evaluation;
        Ok(Kind::EvalDone(EvalDone {
            lease: lease.0,
            eval: self.work.eval,
            shard: self.work.shard,
            measures_json: serde_json::to_string(&measures)?,
            n_records,
            generation: generation.0,
        }))
    }
}

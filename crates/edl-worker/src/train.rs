// SPDX-License-Identifier: Apache-2.0
//! One batch through the model: parameters in, a gradient ready for the servers out.

use edl_core::batch::BatchPlan;
use edl_core::id::BatchId;
use edl_core::optimizer::{self, Clip};
use edl_core::spec::JobSpec;
use edl_core::upcoming::{Upcoming, batch_seed};
use edl_core::worker::Wants;
use edl_net::data::Versions;
use edl_tensor::batch::Batch;
use edl_tensor::clip;
use edl_tensor::model::{Error, Gradient, Inputs, Model};
use edl_tensor::unique::Unique;

use crate::servers::{Pull, Push};

/// The model with its buffers, and with the dense parameters that it saw last.
pub(crate) struct Trainer {
    model: Box<dyn Model>,
    plan: BatchPlan,
    clip: Option<Clip>,
    dense_len: usize,
    /// Numbers per row of each table.
    dims: Vec<usize>,
    dense: Vec<f32>,
    /// How far the servers were when `dense` was pulled.
    base: Option<Versions>,
    rows: Vec<Vec<f32>>,
    gradient: Gradient,
    spares: Spares,
}

/// What a batch looks up, per table, without repetition.
#[derive(Debug, Default)]
pub(crate) struct Lookups(Vec<Unique>);

impl Lookups {
    /// Finds the distinct ids of `batch`, and resizes `rows` for them.
    pub(crate) fn set(
        &mut self,
        (model, batch): (&dyn Model, &Batch),
        dims: &[usize],
        ids: &mut Vec<Vec<u64>>,
        rows: &mut Vec<Vec<f32>>,
    ) -> Result<(), Error> {
        let looked_up = model.lookups(batch)?;
        check_lookups(&looked_up, dims.len())?;
        self.0.resize_with(dims.len(), Unique::new);
        ids.resize_with(dims.len(), Vec::new);
        rows.resize_with(dims.len(), Vec::new);
        for (table, looked_up) in looked_up.iter().enumerate() {
            self.0[table].set(looked_up);
            ids[table].clear();
            ids[table].extend_from_slice(self.0[table].ids());
            rows[table].resize(ids[table].len() * dims[table], 0.0);
        }
        Ok(())
    }

    /// One row per id that the model looked up, from the rows of the distinct ids.
    pub(crate) fn expand(&self, dims: &[usize], distinct: &[Vec<f32>], rows: &mut [Vec<f32>]) {
        for (table, unique) in self.0.iter().enumerate() {
            unique.expand(dims[table], &distinct[table], &mut rows[table]);
        }
    }

    /// Adds up the gradients of equal ids in one table.
    pub(crate) fn sum(&self, table: usize, dim: usize, grads: &[f32], sums: &mut Vec<f32>) {
        self.0[table].sum(dim, grads, sums);
    }
}

/// Buffers that are used again: a batch allocates nothing large.
#[derive(Default)]
struct Spares {
    lookups: Spare<Lookups>,
    dense: Spare<Vec<f32>>,
    ids: Spare<Vec<Vec<u64>>>,
    rows: Spare<Vec<Vec<f32>>>,
}

#[derive(Default)]
struct Spare<T>(Vec<T>);

/// One batch is computed, one pulled and one sent at a time.
const MAX_SPARES: usize = 3;

impl<T: Default> Spare<T> {
    fn take(&mut self) -> T {
        self.0.pop().unwrap_or_default()
    }

    fn give(&mut self, buffer: T) {
        if self.0.len() < MAX_SPARES {
            self.0.push(buffer);
        }
    }
}

impl Trainer {
    pub(crate) fn new(model: Box<dyn Model>, spec: &JobSpec, plan: BatchPlan) -> Self {
        let dims: Vec<usize> = model.spec().tables.iter().map(|table| table.dim).collect();
        Self {
            plan,
            clip: optimizer::clip(spec, model.spec()),
            dense_len: model.spec().dense_len(),
            dense: Vec::new(),
            base: None,
            rows: vec![Vec::new(); dims.len()],
            dims,
            gradient: Gradient::default(),
            spares: Spares::default(),
            model,
        }
    }

    /// What must be pulled before `batch` can be computed.
    pub(crate) fn prepare(
        &mut self,
        batch: &Batch,
        wants: Wants,
    ) -> Result<(Lookups, Pull), Error> {
        let mut lookups = self.spares.lookups.take();
        let mut ids = self.spares.ids.take();
        let mut rows = self.spares.rows.take();
        lookups.set((&*self.model, batch), &self.dims, &mut ids, &mut rows)?;
        let Wants { dense, will_push, min_round } = wants;
        let dense = dense.then(|| {
            let mut dense = self.spares.dense.take();
            dense.resize(self.dense_len, 0.0);
            dense
        });
        Ok((lookups, Pull { ids, dense, rows, will_push, min_round, step: None }))
    }

    /// Takes what was pulled for the batch that is computed next; gives back its distinct ids.
    pub(crate) fn accept(
        &mut self,
        lookups: &Lookups,
        pull: Pull,
        versions: Versions,
    ) -> Vec<Vec<u64>> {
        if self.dense_len == 0 || pull.dense.is_some() {
            self.base = Some(versions);
        }
        if let Some(dense) = pull.dense {
            self.spares.dense.give(std::mem::replace(&mut self.dense, dense));
        }
        lookups.expand(&self.dims, &pull.rows, &mut self.rows);
        self.spares.rows.give(pull.rows);
        pull.ids
    }

    /// Runs `pass` on the batch whose parameters were accepted last.
    pub(crate) fn pass<R>(
        &mut self,
        batch: &Batch,
        pass: impl FnOnce(&mut dyn Model, Inputs<'_>) -> R,
    ) -> R {
        pass(&mut *self.model, Inputs { batch, dense: &self.dense, rows: &self.rows })
    }

    /// Trains the batch whose parameters were accepted last; its loss and gradient.
    pub(crate) fn train(
        &mut self,
        id: BatchId,
        batch: &Batch,
        lookups: &Lookups,
        ids: Vec<Vec<u64>>,
    ) -> Result<(f32, Push), Error> {
        self.gradient.dense.resize(self.dense_len, 0.0);
        self.gradient.rows.resize_with(self.dims.len(), Vec::new);
        for (grads, rows) in self.gradient.rows.iter_mut().zip(&self.rows) {
            grads.resize(rows.len(), 0.0);
        }
        let seed = batch_seed(self.plan.seed, id);
        self.model.upcoming(Upcoming::Batches { plan: self.plan.clone(), batch: id });
        let inputs = Inputs { batch, dense: &self.dense, rows: &self.rows };
        let outcome = self.model.train(inputs, seed, &mut self.gradient)?;
        if !outcome.loss.is_finite() {
            return Err(Error::NonFinite("loss"));
        }
        let mut gradient = self.sum(lookups)?;
        if !gradient.is_finite() {
            return Err(Error::NonFinite("gradient"));
        }
        if let Some(limit) = self.clip {
            clip::clip(&mut gradient, self.model.spec(), limit);
        }
        let n_records = u32::try_from(batch.len()).expect("a minibatch has a 32-bit size");
        let base = self.base.clone().expect("parameters are accepted before they are used");
        Ok((outcome.loss, Push { batch: id, n_records, base, gradient, ids, lane: None }))
    }

    /// The gradient with those of equal ids added up.
    fn sum(&mut self, lookups: &Lookups) -> Result<Gradient, Error> {
        check_gradient(&self.gradient, (self.dense_len, &self.rows))?;
        let Gradient { dense, rows } = &mut self.gradient;
        let mut sums = self.spares.rows.take();
        sums.resize_with(self.dims.len(), Vec::new);
        for (table, dim) in self.dims.iter().enumerate() {
            lookups.sum(table, *dim, &rows[table], &mut sums[table]);
        }
        let dense = std::mem::replace(dense, self.spares.dense.take());
        Ok(Gradient { dense, rows: sums })
    }

    /// Takes the buffers of a batch that is computed.
    pub(crate) fn recycle_lookups(&mut self, lookups: Lookups) {
        self.spares.lookups.give(lookups);
    }

    /// Takes the buffers of a gradient that is sent.
    pub(crate) fn recycle(&mut self, push: Push) {
        self.spares.ids.give(push.ids);
        self.spares.dense.give(push.gradient.dense);
        self.spares.rows.give(push.gradient.rows);
    }
}

/// A model looks up ids in each of its tables.
pub(crate) fn check_lookups(lookups: &[Vec<u64>], n_tables: usize) -> Result<(), Error> {
    if lookups.len() == n_tables {
        return Ok(());
    }
    let named = lookups.len();
    Err(Error::Other(format!("the model looks up IDs in {named} tables but has {n_tables}")))
}

/// A gradient has one number for each parameter.
pub(crate) fn check_gradient(
    gradient: &Gradient,
    (dense_len, rows): (usize, &[Vec<f32>]),
) -> Result<(), Error> {
    let rows_fit = gradient.rows.iter().map(Vec::len).eq(rows.iter().map(Vec::len));
    if gradient.dense.len() == dense_len && rows_fit {
        return Ok(());
    }
    Err(other_shape())
}

/// Of a gradient that does not fit its parameters.
pub(crate) fn other_shape() -> Error {
    Error::Other("the shape of the model's gradient differs from that of its parameters".into())
}

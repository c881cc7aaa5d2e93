// SPDX-License-Identifier: Apache-2.0
//! Embedding tables, which servers hold while workers hold the rest.
//!
//! A lane's rows are read as they are after the step that the worker holds, and its row gradients
//! go to the servers before the worker takes part in the sum of the dense ones. So a worker that
//! has that sum knows that every server has the whole step.

use std::sync::Arc;
use std::time::Duration;

use edl_core::activity::WaitingFor;
use edl_core::id::BatchId;
use edl_core::member::Failure;
use edl_net::data::{Route, Versions};
use edl_tensor::batch::Batch;
use edl_tensor::model::{Gradient, Model};
use edl_tensor::push::Lane;
use tracing::info;

use super::interrupt::Interrupt;
use crate::progress::Progress;
use crate::servers::{Dial, Error, Line, Pull, Push, Servers};
use crate::train::Lookups;

/// Fills in the initial rows of some ids of a table.
pub(super) type FirstRows<'a> = &'a dyn Fn(usize, &[u64], &mut Vec<f32>);

/// The rows of the current lane, and the connections to the servers.
pub(super) struct Tables {
    /// Numbers per row of each table.
    dims: Vec<usize>,
    /// None under pure AllReduce, which has no tables.
    dial: Option<Box<dyn Dial>>,
    line: Option<OpenConnections>,
    interrupt: Arc<Interrupt>,
    progress: Arc<Progress>,
    lookups: Lookups,
    pull: Pull,
    /// One row per id that the model looked up.
    pub(super) rows: Vec<Vec<f32>>,
}

/// Connections to all servers of a route.
struct OpenConnections {
    route: Route,
    servers: Box<dyn Servers>,
    n_unanswered: usize,
}

impl Tables {
    pub(super) fn new(
        dims: Vec<usize>,
        dial: Option<Box<dyn Dial>>,
        interrupt: Arc<Interrupt>,
        progress: Arc<Progress>,
    ) -> Self {
        let n = dims.len();
        let pull = Pull { ids: vec![Vec::new(); n], rows: vec![Vec::new(); n], ..Pull::default() };
        Self {
            dims,
            dial,
            line: None,
            interrupt,
            progress,
            lookups: Lookups::default(),
            pull,
            rows: vec![Vec::new(); n],
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.dims.is_empty()
    }

    /// Connects along `route`, unless these connections already exist.
    pub(super) fn connect(&mut self, route: Route) -> Result<(), Failure> {
        let Some(dial) = &mut self.dial else { return Ok(()) };
        if self.line.as_ref().is_some_and(|open| open.route == route) {
            return Ok(());
        }
        self.line = None;
        let Line { servers, abort } = dial.dial(&route).map_err(failure)?;
        info!(generation = %route.generation, servers = route.servers.len(), "servers connected");
        // From here on every wait ends when the session has something more important.
        self.interrupt.set_servers(abort);
        self.line = Some(OpenConnections { route, servers, n_unanswered: 0 });
        Ok(())
    }

    /// Closes connections that are no longer needed.
    pub(super) fn hang_up(&mut self) {
        self.line = None;
    }

    /// Reads the rows that `batch` needs, as they are after `step` steps.
    pub(super) fn fetch(
        &mut self,
        model: &dyn Model,
        batch: &Batch,
        step: u64,
    ) -> Result<(), Failure> {
        if self.is_empty() {
            return Ok(());
        }
        self.look_up(model, batch)?;
        self.pull.step = Some(step);
        let open = self.line.as_mut().ok_or_else(|| Failure::Servers("not connected".into()))?;
        let pull = || open.servers.pull(&mut self.pull);
        self.progress.while_waiting(WaitingFor::Servers, pull).map_err(failure)?;
        self.expand();
        Ok(())
    }

    /// The rows that `batch` needs, as `first` makes them: no server is asked.
    pub(super) fn invent(
        &mut self,
        model: &dyn Model,
        batch: &Batch,
        first: FirstRows<'_>,
    ) -> Result<(), Failure> {
        self.look_up(model, batch)?;
        for (table, (ids, rows)) in self.pull.ids.iter().zip(&mut self.pull.rows).enumerate() {
            first(table, ids, rows);
        }
        self.expand();
        Ok(())
    }

    fn look_up(&mut self, model: &dyn Model, batch: &Batch) -> Result<(), Failure> {
        let Pull { ids, rows, .. } = &mut self.pull;
        let found = self.lookups.set((model, batch), &self.dims, ids, rows);
        found.map_err(|error| Failure::Failed(error.to_string()))
    }

    fn expand(&mut self) {
        self.lookups.expand(&self.dims, &self.pull.rows, &mut self.rows);
    }

    /// Adds up the row gradients of equal ids, in place.
    pub(super) fn sum(&self, gradient: &mut Gradient, spare: &mut Vec<f32>) {
        for (table, dim) in self.dims.iter().enumerate() {
            self.lookups.sum(table, *dim, &gradient.rows[table], spare);
            std::mem::swap(&mut gradient.rows[table], spare);
        }
    }

    /// Sends the summed row gradients of a lane, and does not wait for the answers.
    pub(super) fn push(
        &mut self,
        (batch, lane): (BatchId, Lane),
        n_records: u32,
        rows: &mut Vec<Vec<f32>>,
    ) -> Result<(), Failure> {
        let gradient = Gradient { dense: Vec::new(), rows: std::mem::take(rows) };
        let ids = std::mem::take(&mut self.pull.ids);
        let base = Versions::default();
        let push = Push { batch, n_records, base, gradient, ids, lane: Some(lane) };
        let sent = self.send(&push);
        self.pull.ids = push.ids;
        *rows = push.gradient.rows;
        sent
    }

    /// Reports that a lane has no records in this step: the servers wait for every lane.
    pub(super) fn push_nothing(&mut self, batch: BatchId, lane: Lane) -> Result<(), Failure> {
        if self.is_empty() {
            return Ok(());
        }
        let gradient = Gradient { dense: Vec::new(), rows: vec![Vec::new(); self.dims.len()] };
        let ids = vec![Vec::new(); self.dims.len()];
        let base = Versions::default();
        self.send(&Push { batch, n_records: 0, base, gradient, ids, lane: Some(lane) })
    }

    fn send(&mut self, push: &Push) -> Result<(), Failure> {
        let open = self.line.as_mut().ok_or_else(|| Failure::Servers("not connected".into()))?;
        open.servers.push(push).map_err(failure)?;
        open.n_unanswered += 1;
        Ok(())
    }

    /// Waits for acknowledgements, at most for `limit`; whether the servers have acknowledged
    /// everything that was sent.
    pub(super) fn settle(&mut self, limit: Duration) -> Result<bool, Failure> {
        while let Some(open) = self.line.as_mut().filter(|open| open.n_unanswered > 0) {
            match open.servers.acknowledged(limit).map_err(failure)? {
                Some(_) => open.n_unanswered -= 1,
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}

fn failure(error: Error) -> Failure {
    match error {
        Error::Lost(error) => Failure::Servers(error),
        Error::StepMismatch(error) => Failure::OtherStep(error),
    }
}

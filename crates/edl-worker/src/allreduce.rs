// SPDX-License-Identifier: Apache-2.0
//! The AllReduce strategy: every worker holds all parameters, and all take each step together.
//!
//! A step is a function of its number and of the state before it, whoever computes which part of
//! it. So a worker that dies costs the step at hand and no more: the others form the next world,
//! bring each other to the highest step that any of them holds, and go on.
//!
//! All of that is decided by the machine [`Member`]; this folder performs what it returns.

mod fault;
mod inbox;
mod lanes;
mod mesh;
mod replica;
mod run;
mod seat;
mod tables;
mod writer;

#[cfg(test)]
pub(crate) mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use edl_core::batch::{BatchPlan, batch_of};
use edl_core::id::WorldId;
use edl_core::member::{Config, Member, Place, Step};
use edl_core::model::ModelSpec;
use edl_core::spec::JobSpec;
use edl_core::time::Time;
use edl_net::proto::{self, worker_message::Kind};
use edl_tensor::first_values;
use edl_tensor::model::Model;
use tokio::sync::mpsc;

use crate::chain;
use crate::compute::{self, Died};
use crate::feed::Read;
use crate::progress::Progress;
use crate::servers::Dial;

pub(crate) use inbox::Event;
pub(crate) use mesh::{Identity, OpenMesh, open_mesh};
pub(crate) use seat::Seat;

use inbox::Inbox;
use lanes::Lanes;
use replica::Recipe;
use run::{Run, Setup};
use tables::Tables;
use writer::Writer;

/// What a worker of this strategy starts with.
pub(crate) struct Start<'a> {
    pub(crate) identity: Identity,
    pub(crate) spec: &'a JobSpec,
    pub(crate) plan: BatchPlan,
    pub(crate) model: Box<dyn Model>,
    /// The way to the servers that hold embedding tables, under Hybrid.
    pub(crate) dial: Option<Box<dyn Dial>>,
    pub(crate) job_dir: PathBuf,
    pub(crate) open_mesh: OpenMesh,
    pub(crate) events: Receiver<compute::Event>,
    /// The other end of `events`, for what this worker tells itself.
    pub(crate) tell: Sender<compute::Event>,
    pub(crate) feed: Sender<(Place, Read)>,
    pub(crate) reports: mpsc::Sender<Kind>,
    pub(crate) seat: Arc<Seat>,
    pub(crate) progress: Arc<Progress>,
}

/// Why a worker of this strategy ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Died(#[from] Died),
    #[error("{0}")]
    Unfit(String),
    #[error("cannot listen for other workers: {0}")]
    Mesh(String),
    #[error("cannot train the first records: {0}")]
    Probe(String),
    #[error("cannot start a thread: {0}")]
    Thread(#[source] std::io::Error),
}

/// Trains until the machine ends it.
pub(crate) fn run(start: Start<'_>) -> Result<(), Error> {
    let Start { identity, spec, plan, model, dial, job_dir, open_mesh, .. } = start;
    check(model.spec(), &plan, dial.is_some())?;
    first_values::offer(&job_dir, &*model).map_err(|error| Error::Unfit(chain(&error)))?;
    let recipe = Recipe::new(spec, model.spec(), plan.n_batches(), job_dir);
    let recipe = recipe.map_err(|error| Error::Unfit(error.to_string()))?;
    let metrics = model.spec().metrics.clone();
    let ready = ready(model.spec())?;
    let dims: Vec<usize> = model.spec().tables.iter().map(|table| table.dim).collect();
    let config = Config {
        worker: identity.worker,
        incarnation: identity.incarnation,
        n_lanes: spec.n_lanes(),
        num_epochs: spec.num_epochs,
        minibatch_size: spec.minibatch_size,
        n_partitions: recipe.n_partitions(),
        has_tables: !dims.is_empty(),
        is_balanced: spec.lane_balance,
        plan,
    };
    // Where rows and dense gradients go apart nobody sees the norm of their sum, so that each lane
    // is clipped by itself.
    let (clip_lane, clip) =
        if dims.is_empty() { (None, recipe.clip()) } else { (recipe.clip(), None) };
    let tables = Tables::new(dims, dial, Arc::clone(&start.seat), Arc::clone(&start.progress));
    let mut lanes = Lanes::new(model, spec, tables, clip_lane);
    let mut inbox = Inbox::new(start.events);
    start.progress.busy("computing the probe");
    let Some(probe) = probe(&mut lanes, &mut inbox, &recipe, &config, &start.feed, &start.reports)?
    else {
        return Ok(());
    };
    let opened = open_mesh(identity, spec).map_err(Error::Mesh)?;
    let mesh = start.seat.take(opened, probe);
    // The session adds what others must know.
    if start.reports.blocking_send(Kind::Ready(ready)).is_err() {
        return Ok(());
    }
    let setup = Setup {
        member: Member::new(config, Time::ZERO),
        origin: Instant::now(),
        lanes,
        recipe,
        clip,
        log_loss_steps: u64::from(spec.log_loss_steps),
        metrics,
        mesh,
        inbox,
        feed: start.feed,
        writer: Writer::start(start.tell).map_err(Error::Thread)?,
        reports: start.reports,
        seat: start.seat,
        progress: start.progress,
    };
    Ok(Run::new(setup).run()?)
}

fn check(model: &ModelSpec, plan: &BatchPlan, has_servers: bool) -> Result<(), Error> {
    let name = &model.name;
    match (model.tables.is_empty(), has_servers) {
        (false, false) => {
            return Err(Error::Unfit(format!(
                "model `{name}` has embedding tables, which AllreduceStrategy cannot train; use \
                 --distribution_strategy=HybridStrategy"
            )));
        }
        (true, true) => {
            return Err(Error::Unfit(format!(
                "model `{name}` has no embedding tables, which HybridStrategy needs; use \
                 --distribution_strategy=AllreduceStrategy"
            )));
        }
        (true, false) | (false, true) => {}
    }
    model.check().map_err(Error::Unfit)?;
    if plan.n_batches() == 0 {
        return Err(Error::Unfit("no records to train on".into()));
    }
    Ok(())
}

fn ready(model: &ModelSpec) -> Result<proto::Ready, Error> {
    let model_spec_json = serde_json::to_string(model)
        .map_err(|error| Error::Unfit(format!("cannot serialize its description: {error}")))?;
    Ok(proto::Ready { model_spec_json, ..proto::Ready::default() })
}

/// Trains the first lane of the first step on first values; none if the worker is to go.
fn probe(
    lanes: &mut Lanes,
    inbox: &mut Inbox,
    recipe: &Recipe,
    config: &Config,
    feed: &Sender<(Place, Read)>,
    reports: &mpsc::Sender<Kind>,
) -> Result<Option<u64>, Error> {
    let batch = batch_of(0, config.plan.n_batches());
    // A feeder that is gone says so by an event.
    let _ = feed.send((Place::Lane(batch, 0), Read::Lane(batch, 0)));
    let first = recipe.first_values(lanes.memory());
    let first = first.map_err(|error| Error::Unfit(chain(&error)))?;
    let step = Step {
        world: WorldId(0),
        number: 0,
        batch,
        n_records: config.plan.n_records_of(0),
        n_active: 1,
        mine: 0..1,
        is_alone: true,
    };
    let rows = |table: usize, ids: &[u64], out: &mut Vec<f32>| recipe.first_rows(table, ids, out);
    let Some(records) = inbox.first_records()? else { return Ok(None) };
    let probed = records.and_then(|records| lanes.probe(&step, first.dense(), &records, &rows));
    let error = match probed {
        Ok(probe) => return Ok(Some(probe)),
        Err(error) => error,
    };
    let failed = proto::StepFailed { world: 0, step: 0, error: error.clone() };
    // A session that is gone needs no report.
    let _ = reports.blocking_send(Kind::StepFailed(failed));
    Err(Error::Probe(error))
}

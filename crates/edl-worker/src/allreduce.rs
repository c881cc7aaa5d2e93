// SPDX-License-Identifier: Apache-2.0
//! The AllReduce strategy: every worker holds all parameters, and all take each step together.
//!
//! A step is a function of its number and of the state before it, no matter which worker computes
//! which part. When a worker fails, only the current step is lost: the others form the next world,
//! bring each other to the highest step that any of them holds, and continue.
//!
//! The machine [`Member`](edl_core::member::Member) makes the decisions; this folder performs them.

mod alone;
mod fault;
mod interrupt;
mod lanes;
mod mesh;
mod replica;
mod run;
mod shell;
mod tables;
mod writer;

#[cfg(test)]
pub(crate) mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use edl_core::batch::{BatchPlan, batch_of};
use edl_core::id::WorldId;
use edl_core::job::{MemberReport, Peer};
use edl_core::member::{Event, Step};
use edl_core::model::ModelSpec;
use edl_core::spec::JobSpec;
use edl_core::worker::{Records, Report};
use edl_tensor::first_values;
use edl_tensor::model::Model;

use crate::driver::{Driver, Output};
use crate::feed::{Decoded, Feeder};
use crate::progress::Progress;
use crate::servers::Dial;
use crate::{Error, chain};

pub use alone::train_alone;
pub(crate) use interrupt::Interrupt;
pub(crate) use mesh::{Identity, OpenMesh, open_mesh};
pub(crate) use shell::{MemberShell, Queues};

use lanes::Lanes;
use mesh::Opened;
use replica::Recipe;
use run::{Run, Setup};
use shell::Task;
use tables::Tables;
use writer::Writer;

/// What a worker of this strategy starts with.
pub(crate) struct Start<'a> {
    pub(crate) identity: Identity,
    pub(crate) spec: &'a JobSpec,
    pub(crate) model: Box<dyn Model>,
    /// Connects to the servers that hold embedding tables, under Hybrid.
    pub(crate) dial: Option<Box<dyn Dial>>,
    pub(crate) job_dir: PathBuf,
    pub(crate) open_mesh: OpenMesh,
    pub(crate) driver: Driver<MemberShell>,
    pub(crate) tasks: Receiver<Task>,
    pub(crate) interrupt: Arc<Interrupt>,
    pub(crate) progress: Arc<Progress>,
}

/// Trains until the machine ends. `start_feed` gets the feeder, once it has read the first records.
pub(crate) fn run(
    start: Start<'_>,
    mut feeder: Feeder,
    start_feed: impl FnOnce(Feeder) -> Result<(), Error>,
) -> Result<(), Error> {
    let Start { identity, spec, model, dial, job_dir, open_mesh, driver, .. } = start;
    let model_spec = model.spec().clone();
    check(&model_spec, &feeder.plan, dial.is_some())?;
    first_values::offer(&job_dir, &*model).map_err(|error| Error::Model(chain(&error)))?;
    let recipe = Recipe::new(spec, &model_spec, feeder.plan.n_batches(), job_dir);
    let recipe = recipe.map_err(|error| Error::Model(error.to_string()))?;
    let dims: Vec<usize> = model_spec.tables.iter().map(|table| table.dim).collect();
    // No process sees the norm of rows and dense gradients together, so each lane is clipped.
    let (clip_lane, clip) =
        if dims.is_empty() { (None, recipe.clip()) } else { (recipe.clip(), None) };
    let tables = Tables::new(dims, dial, Arc::clone(&start.interrupt), Arc::clone(&start.progress));
    let mut lanes = Lanes::new(model, (spec, &feeder.plan), tables, clip_lane);
    let batch = batch_of(0, feeder.plan.n_batches());
    let records = feeder.read(&Records::Lane(batch, 0));
    let n_records = feeder.plan.n_records_of(0);
    start_feed(feeder)?;
    let probe = match records.and_then(|records| probe(&mut lanes, &recipe, &records, n_records)) {
        Ok(probe) => probe,
        Err(error) => {
            let news =
                MemberReport::StepFailed { world: WorldId(0), step: 0, error: error.clone() };
            driver.output(Output::Report(Report::Member(news)));
            return Err(Error::Died(format!("cannot train the first records: {error}")));
        }
    };
    let Opened { mesh, address, unix_path, abort, is_blocked } =
        open_mesh(identity, spec, &model_spec)
            .map_err(|error| Error::Died(format!("cannot listen for other workers: {error}")))?;
    start.interrupt.set_mesh(abort);
    start.progress.set_is_blocked(is_blocked);
    let metrics = model_spec.metrics.clone();
    let peer = Peer { address, unix_path, probe, step: None };
    driver.handle(Event::Built { model: Box::new(model_spec), peer: Box::new(peer) });
    let setup = Setup {
        writer: Writer::start(driver.clone())
            .map_err(|error| Error::Died(format!("cannot start a thread: {error}")))?,
        driver,
        lanes,
        recipe,
        clip,
        log_loss_steps: u64::from(spec.log_loss_steps),
        metrics,
        mesh,
        interrupt: start.interrupt,
        progress: start.progress,
    };
    Run::new(setup).run(&start.tasks);
    Ok(())
}

fn check(model: &ModelSpec, plan: &BatchPlan, uses_servers: bool) -> Result<(), Error> {
    let name = &model.name;
    match (model.tables.is_empty(), uses_servers) {
        (false, false) => {
            return Err(Error::Model(format!(
                "model `{name}` has embedding tables, which AllreduceStrategy cannot train; use \
                 --distribution_strategy=HybridStrategy"
            )));
        }
        (true, true) => {
            return Err(Error::Model(format!(
                "model `{name}` has no embedding tables, which HybridStrategy needs; use \
                 --distribution_strategy=AllreduceStrategy"
            )));
        }
        (true, false) | (false, true) => {}
    }
    model.check().map_err(Error::Model)?;
    if plan.n_batches() == 0 {
        return Err(Error::Model("no records to train on".into()));
    }
    Ok(())
}

/// Trains the first lane of the first step on the initial values; returns a hash of the result.
fn probe(
    lanes: &mut Lanes,
    recipe: &Recipe,
    records: &Decoded,
    n_records: u32,
) -> Result<u64, String> {
    let first = recipe.first_values(lanes.memory()).map_err(|error| chain(&error))?;
    let step = Step {
        world: WorldId(0),
        number: 0,
        batch: first.next_batch(),
        n_records,
        n_active: 1,
        mine: 0..1,
        is_alone: true,
    };
    let tables = recipe.first_tables().map_err(|error| chain(&error))?;
    let rows = |table: usize, ids: &[u64], out: &mut Vec<f32>| {
        out.resize(ids.len() * tables[table].dim(), 0.0);
        tables[table].peek(ids, out);
    };
    lanes.probe(&step, first.dense(), records, &rows)
}

// SPDX-License-Identifier: Apache-2.0
//! The job's status, as `elasticdl status` and the progress bar show it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use edl_core::id::PsId;
use edl_core::job::Job;
use edl_core::optimizer;
use edl_core::platform::{InstanceId, InstanceState, Role};
use edl_core::time::Time;
use edl_net::proto;

use crate::engine::Engine;

/// Speed is measured over this time.
const WINDOW: Duration = Duration::from_secs(10);

/// Records done at some moments, for the speed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress {
    samples: VecDeque<(Time, u64)>,
}

impl Progress {
    pub(crate) fn sample(&mut self, now: Time, records: u64) {
        // After a restore less is done than before: the speed is measured again.
        if self.samples.back().is_some_and(|(_, last)| *last > records) {
            self.samples.clear();
        }
        self.samples.push_back((now, records));
        while self.samples.len() > 2
            && self.samples.front().is_some_and(|(at, _)| now.since(*at) > WINDOW)
        {
            self.samples.pop_front();
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a speed needs no more than 53 bits")]
    pub(crate) fn per_second(&self) -> f64 {
        match (self.samples.front(), self.samples.back()) {
            (Some((from, before)), Some((to, after))) if to > from => {
                (after - before) as f64 / to.since(*from).as_secs_f64()
            }
            _ => 0.0,
        }
    }
}

impl Engine {
    #[expect(clippy::cast_precision_loss, reason = "an estimate needs no more than 53 bits")]
    pub(crate) fn status(&self) -> proto::JobStatus {
        let (spec, durable) = (&self.config.spec, self.job.durable());
        let (records_done, records_total) = self.job.progress();
        let elapsed_secs = self.job.elapsed(self.now()).as_secs_f64();
        let speed = match durable.end {
            Some(_) => records_done as f64 / elapsed_secs.max(1e-3),
            None => self.progress.per_second(),
        };
        let left = records_total.map(|total| total.saturating_sub(records_done));
        let eta_secs = left.filter(|_| speed > 0.0).map_or(-1.0, |left| left as f64 / speed);
        let path = |folder: &String| self.checkpoints.path(folder).to_string_lossy().into_owned();
        let step = self.job.ledger().version();
        let rate = durable.model.as_ref().and_then(|model| optimizer::resolve(spec, model).ok());
        let world = self.job.worlds().and_then(|worlds| worlds.current());
        let reason = match &durable.end {
            Some(end) => end.reason().unwrap_or_default().into(),
            None => {
                let trouble = self.unsaved.clone().or_else(|| self.job.trouble());
                trouble.or_else(|| self.export_text()).unwrap_or_default()
            }
        };
        proto::JobStatus {
            job: spec.job_name.clone(),
            state: self.job.state().into(),
            reason,
            epoch: self.job.ledger().epoch(),
            num_epochs: spec.num_epochs,
            step,
            records_done,
            records_total: records_total.unwrap_or(0),
            records_per_second: speed,
            eta_secs,
            elapsed_secs,
            loss: self.job.loss().or(self.journal.history.loss()).unwrap_or(0.0),
            learning_rate: rate.map_or(0.0, |optimizer| optimizer.rate(step)),
            generation: durable.generation.0,
            term: self.job.config().term.0,
            master_address: self.addresses.control.to_string(),
            http_address: self.addresses.http.to_string(),
            job_dir: self.config.job_dir.path().to_string_lossy().into_owned(),
            workers_wanted: self.job.instances().workers_wanted(),
            instances: self.instances(),
            evaluations: durable.evaluations.iter().map(evaluation).collect(),
            events: self.journal.events(),
            last_checkpoint: durable
                .checkpoints
                .last()
                .map(|c| path(&c.folder))
                .unwrap_or_default(),
            best_checkpoint: durable.best.as_ref().map(path).unwrap_or_default(),
            output: self.output().to_string_lossy().into_owned(),
            job_type: spec.job_type.into(),
            model_def: spec.model_def.clone(),
            distribution_strategy: spec.distribution_strategy.into(),
            lanes: spec.step_lanes().unwrap_or(0),
            same_bits: spec.step_lanes().is_some() && !durable.bits_differ,
            goodput: Some(self.goodput()),
            allow_chaos: spec.allow_chaos,
            world: world.map_or(0, |world| world.id.0),
            batches_done: self.job.ledger().n_done_in_epoch().into(),
            batches_per_epoch: self.checkpoints.n_batches().into(),
            page: String::new(),
            logged: self.journal.history.logged.last(),
        }
    }

    /// How far the result is that is being written.
    fn export_text(&self) -> Option<String> {
        let n_megabytes = self.exported_bytes.1 / 1_000_000;
        (n_megabytes > 0).then(|| format!("writing the result; processed {n_megabytes} MB so far"))
    }

    fn goodput(&self) -> proto::Goodput {
        let (goodput, now) = (self.job.goodput(), self.now());
        let workers = proto::Spent::from(goodput.total(Role::Worker, now));
        let share = workers.compute / workers.total().max(f64::MIN_POSITIVE);
        proto::Goodput {
            servers: Some(goodput.total(Role::Ps, now).into()),
            workers: Some(workers),
            share,
            trained: goodput.trained(),
            repeated: goodput.repeated(),
            records: goodput.records(),
        }
    }

    /// The master, and all processes that it knows of.
    fn instances(&self) -> Vec<proto::Instance> {
        let master = proto::Instance {
            role: Role::Master.into(),
            id: 0,
            pid: std::process::id(),
            address: self.addresses.control.to_string(),
            state: InstanceState::Running.into(),
            restarts: u32::try_from(self.job.config().term.0.saturating_sub(1)).unwrap_or(u32::MAX),
            lanes: Vec::new(),
            spent: None,
            load: None,
            why: String::new(),
        };
        let others = processes(&self.job, &self.loads, self.now());
        [master].into_iter().chain(others).collect()
    }
}

/// The workers and servers that hold a stream, and those that the platform runs for us.
#[must_use]
pub fn processes(
    job: &Job,
    loads: &BTreeMap<PsId, proto::PsLoad>,
    now: Time,
) -> Vec<proto::Instance> {
    let (mut all, mut connected) = (Vec::new(), BTreeSet::new());
    let instances = job.instances();
    let instance =
        |role: Role, id: u32, pid: u32, address: String, state: InstanceState| proto::Instance {
            role: role.into(),
            id,
            pid,
            address,
            state: state.into(),
            restarts: instances.restarts(InstanceId { role, id }),
            lanes: Vec::new(),
            spent: Some(job.goodput().spent(InstanceId { role, id }, now).into()),
            load: None,
            why: String::new(),
        };
    for (PsId(id), pid) in job.connected_servers() {
        let address = job.servers().members().get(&PsId(id)).map(|m| m.address.clone());
        let state = if job.servers().is_serving() {
            InstanceState::Serving
        } else {
            InstanceState::Loading
        };
        let mut instance = instance(Role::Ps, id, pid, address.unwrap_or_default(), state);
        instance.load = loads.get(&PsId(id)).copied();
        all.push(instance);
        connected.insert(InstanceId { role: Role::Ps, id });
    }
    for (worker, pid, state) in job.connected_workers() {
        let peer = job.peer(worker);
        let address = peer.map(|peer| peer.address.clone()).unwrap_or_default();
        let mut instance = instance(Role::Worker, worker.0, pid, address, state);
        let member = job.worlds().and_then(|worlds| worlds.member(worker));
        instance.why = job.stalled(worker, now).unwrap_or_default();
        instance.lanes = member.map(|m| m.lanes.clone().collect()).unwrap_or_default();
        all.push(instance);
        connected.insert(worker.into());
    }
    for (id, running) in instances.running().iter().filter(|(id, _)| !connected.contains(*id)) {
        let pid = running.pid.unwrap_or(0);
        let state = match running.is_stuck() {
            true => InstanceState::Waiting,
            false => InstanceState::Starting,
        };
        let mut waiting = instance(id.role, id.id, pid, String::new(), state);
        let why = running.waits.as_ref().filter(|why| !why.is_starting());
        waiting.why = why.map(ToString::to_string).unwrap_or_default();
        all.push(waiting);
    }
    all
}

fn evaluation(evaluated: &edl_core::evaluation::Evaluated) -> proto::Evaluation {
    proto::Evaluation {
        version: evaluated.version,
        epoch: evaluated.epoch,
        metrics: evaluated.metrics.clone().into_iter().collect(),
        best: evaluated.is_best,
    }
}

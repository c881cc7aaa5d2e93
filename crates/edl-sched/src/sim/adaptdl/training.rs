// SPDX-License-Identifier: Apache-2.0
//! A job of the artifact: its epochs, its fixed or adaptive batch, and its measured speed.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::application::Application;
use super::{GPUS_PER_NODE, application};
use crate::snapshot::RoleSpec;
use crate::speed::{Curve, Speed};
use crate::throughput::{StepSample, ThroughputModel};

/// Tolerance of the artifact's roundings.
const EPS: f64 = 1e-8;
/// How many batch sizes are tried to find the best.
const N_BATCHES: u32 = 50;
/// The limit of the artifact's simulator.
const MOST_WORKERS: u32 = 64;

#[derive(Clone, Debug)]
pub struct Training {
    application: Arc<Application>,
    batch: Batch,
    reports: SpeedReport,
    epoch: usize,
    progress: f64,
    split: Split,
    noise: Option<Noise>,
    samples: BTreeMap<(u32, u32, u32), StepSample>,
    model: Option<ThroughputModel>,
    most_measured: u32,
    /// The current rate, computed when workers change.
    rate: f64,
    /// How many times its largest measured size a job may have.
    explores: u32,
    /// Steps per second by number of workers, for [`SpeedReport::Truth`].
    truth: Vec<f64>,
}

/// How the batch is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batch {
    Fixed(u32),
    /// The batch that makes the most progress by the job's own model.
    Adaptive,
}

/// What the job reports to the planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpeedReport {
    Nothing,
    /// Its measurements and fitted model.
    Estimate,
    /// Exact times of every size, which no real job knows (Optimus with an oracle).
    Truth,
}

/// How a batch is split: examples per pass, and accumulated passes per step.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Split {
    atomic: f64,
    n_accumulate: f64,
}

#[derive(Clone, Copy, Debug)]
struct Noise {
    sqr: f64,
    var: f64,
}

impl Training {
    #[must_use]
    pub fn new(
        application: Arc<Application>,
        batch: Batch,
        reports: SpeedReport,
        explores: u32,
    ) -> Self {
        let truth = match (reports, batch) {
            (SpeedReport::Truth, Batch::Fixed(batch)) => true_rates(&application, batch),
            _ => Vec::new(),
        };
        Self {
            application,
            batch,
            reports,
            epoch: 0,
            progress: 0.0,
            split: Split { atomic: 0.0, n_accumulate: 0.0 },
            noise: None,
            samples: BTreeMap::new(),
            model: None,
            most_measured: 0,
            rate: 0.0,
            explores,
            truth,
        }
    }

    #[must_use]
    pub fn rate(&self) -> f64 {
        self.rate
    }

    #[must_use]
    pub fn secs_to_epoch_end(&self) -> Option<f64> {
        let left = self.application.progress_at(self.epoch + 1) - self.progress;
        (self.rate > 0.0).then(|| left.max(0.0) / self.rate)
    }

    pub fn advance(&mut self, secs: f64) {
        self.progress += self.rate * secs;
    }

    #[must_use]
    pub fn is_done(&self) -> bool {
        self.epoch >= self.application.n_epochs
    }

    pub fn placed(&mut self, workers: &[u32]) {
        if workers.is_empty() {
            self.rate = 0.0;
            return;
        }
        self.choose_batch(workers);
    }

    /// Measures its current placement, and chooses its batch again.
    pub fn refresh(&mut self, workers: &[u32]) {
        if !workers.is_empty() && !self.is_done() {
            self.learn(workers);
            self.choose_batch(workers);
        }
    }

    pub fn end_epoch(&mut self, workers: &[u32]) {
        self.learn(workers);
        self.epoch += 1;
        self.progress = self.application.progress_at(self.epoch);
        if !self.is_done() {
            self.choose_batch(workers);
        }
    }

    /// Limits the maximum to a multiple of the largest measured size, and to half of it at first.
    pub fn limit(&self, worker: &mut RoleSpec) {
        if self.reports == SpeedReport::Estimate {
            let known = (self.explores * self.most_measured).max(self.explores / 2);
            worker.max = worker.max.min(known).min(MOST_WORKERS).max(worker.min);
        }
    }

    #[must_use]
    pub fn speed(&self, max_workers: u32) -> Option<Speed> {
        match self.reports {
            SpeedReport::Nothing => None,
            SpeedReport::Truth => Some(self.true_speed(max_workers)),
            SpeedReport::Estimate => self.estimated_speed(max_workers),
        }
    }

    fn n_examples(&self, workers: &[u32]) -> f64 {
        let n: u32 = workers.iter().sum();
        f64::from(n) * self.split.atomic * (self.split.n_accumulate + 1.0)
    }

    fn learn(&mut self, workers: &[u32]) {
        let (sqr, var) = self.application.noise(self.n_examples(workers), self.epoch);
        self.noise = Some(Noise { sqr, var });
        if self.reports != SpeedReport::Estimate {
            return;
        }
        let n_nodes = u32::try_from(workers.len()).unwrap_or(u32::MAX);
        let n_workers: u32 = workers.iter().sum();
        let key = (n_nodes, n_workers, application::whole(self.split.atomic));
        if self.samples.contains_key(&key) {
            return;
        }
        let time = self.application.step_time(workers, self.split.atomic);
        let compute = (time.step - time.sync).max(1e-6);
        let local_batch = self.split.atomic;
        self.samples
            .insert(key, StepSample { n_nodes, n_workers, local_batch, compute, step: time.step });
        self.most_measured = self.most_measured.max(n_workers);
        let samples: Vec<StepSample> = self.samples.values().copied().collect();
        self.model = ThroughputModel::fit(&samples, self.model);
    }

    fn choose_batch(&mut self, workers: &[u32]) {
        let application = &self.application;
        let n: u32 = workers.iter().sum();
        let n_nodes = u32::try_from(workers.len()).unwrap_or(u32::MAX);
        let wanted = match (self.batch, self.model, self.noise) {
            (Batch::Fixed(batch), ..) => Some(f64::from(batch)),
            (Batch::Adaptive, Some(model), Some(noise)) => {
                let (_, split) = best_split(application, &model, noise, n_nodes, n);
                self.split = split;
                None
            }
            (Batch::Adaptive, ..) => {
                Some(f64::from(application.init_batch.max(application.min_local * n)))
            }
        };
        if let Some(batch) = wanted {
            self.split = split_of(application, batch, n, application.init_batch);
        }
        let count = f64::from(n) * (self.split.n_accumulate + 1.0);
        let most = (f64::from(application.max_batch) / count).floor();
        self.split.atomic = self.split.atomic.min(most);
        self.rate = self.true_rate(workers);
    }

    /// The true progress per second.
    fn true_rate(&self, workers: &[u32]) -> f64 {
        let batch = self.n_examples(workers);
        let time = self.application.step_time(workers, self.split.atomic);
        let (sqr, var) = self.application.noise(batch, self.epoch);
        let scale = batch / f64::from(self.application.init_batch);
        let gain = (var + sqr) / (var / scale + sqr);
        gain / (time.step + (time.step - time.sync) * self.split.n_accumulate)
    }

    /// Steps per second by number of packed workers, and remaining steps.
    fn true_speed(&self, max_workers: u32) -> Speed {
        let Batch::Fixed(batch) = self.batch else { return Speed::default() };
        let application = &self.application;
        let curve = Curve::Table(self.truth.clone());
        let last = application.n_epochs - 1;
        let remaining = if self.epoch >= last {
            1.0
        } else {
            application.iteration_at(f64::from(batch), last)
                - application.iteration_at(f64::from(batch), self.epoch)
        };
        Speed { together: curve.clone(), apart: curve, remaining, measured_to: max_workers }
    }

    fn estimated_speed(&self, max_workers: u32) -> Option<Speed> {
        let (model, noise) = (self.model?, self.noise?);
        let application = &self.application;
        let rate = |n_nodes: u32, n: u32| match self.batch {
            Batch::Adaptive => best_split(application, &model, noise, n_nodes, n).0,
            Batch::Fixed(batch) => {
                let split = split_of(application, f64::from(batch), n, application.init_batch);
                goodput(application, &model, noise, n_nodes, n, split)
            }
        };
        let together = (1..=max_workers.min(GPUS_PER_NODE)).map(|n| rate(1, n)).collect();
        let apart = |n: u32| rate(n.div_ceil(GPUS_PER_NODE).max(2).min(n), n);
        let whole =
            application.progress_at(application.n_epochs) * f64::from(application.init_batch);
        let done = self.progress * f64::from(application.init_batch);
        Some(Speed {
            together,
            apart: (1..=max_workers).map(apart).collect(),
            remaining: (whole - done).max(1.0),
            measured_to: self.most_measured,
        })
    }
}

/// Steps per second with 1, 2, … packed workers.
fn true_rates(application: &Application, batch: u32) -> Vec<f64> {
    let rate = |n: u32| {
        // With one worker, the artifact's oracle always accumulates.
        let split = split_of(application, f64::from(batch), n, 0);
        let count = f64::from(n) * (split.n_accumulate + 1.0);
        let atomic = split.atomic.min((f64::from(application.max_batch) / count).floor());
        let time = application.step_time(&packed(n), atomic);
        1.0 / (time.step + (time.step - time.sync) * split.n_accumulate)
    };
    (1..=(batch / application.min_local).clamp(1, MOST_WORKERS)).map(rate).collect()
}

/// Four to a node.
fn packed(n: u32) -> Vec<u32> {
    let mut workers = vec![GPUS_PER_NODE; (n / GPUS_PER_NODE) as usize];
    workers.push(n % GPUS_PER_NODE);
    workers.retain(|n| *n > 0);
    workers
}

/// Splits a batch for `n` workers. A single worker accumulates above `init_batch`, because gradient
/// noise cannot be measured from one pass.
fn split_of(application: &Application, batch: f64, n: u32, init_batch: u32) -> Split {
    let local = (batch / f64::from(n) - EPS).ceil();
    let mut n_accumulate = (local / f64::from(application.max_local) - EPS).ceil() - 1.0;
    if n == 1 && batch > f64::from(init_batch) {
        n_accumulate = n_accumulate.max(1.0);
    }
    Split { atomic: (local / (n_accumulate + 1.0) - EPS).ceil(), n_accumulate }
}

/// The batch that makes the most progress by the model, and how much.
fn best_split(
    application: &Application,
    model: &ThroughputModel,
    noise: Noise,
    n_nodes: u32,
    n: u32,
) -> (f64, Split) {
    let least = f64::from(application.init_batch.max(application.min_local * n));
    let most = f64::from(application.max_batch).max(least);
    let mut best = (0.0, split_of(application, least, n, application.init_batch));
    for which in 0..N_BATCHES {
        let batch = least * (most / least).powf(f64::from(which) / f64::from(N_BATCHES - 1));
        let local = batch / f64::from(n);
        let mut n_accumulate = (local / f64::from(application.max_local) - EPS).ceil() - 1.0;
        if n == 1 && local > f64::from(application.init_batch) + EPS {
            n_accumulate = n_accumulate.max(1.0);
        }
        let split = Split { atomic: (local / (n_accumulate + 1.0) - EPS).ceil(), n_accumulate };
        let is_valid = (f64::from(application.min_local)..=f64::from(application.max_local))
            .contains(&split.atomic);
        let goodput = goodput(application, model, noise, n_nodes, n, split);
        if is_valid && goodput > best.0 {
            best = (goodput, split);
        }
    }
    best
}

/// Examples per second times their statistical efficiency, by the model.
fn goodput(
    application: &Application,
    model: &ThroughputModel,
    noise: Noise,
    n_nodes: u32,
    n: u32,
    split: Split,
) -> f64 {
    let step = model.step(n_nodes, n, split.atomic);
    let time = split.n_accumulate * model.compute(split.atomic) + step;
    let batch = f64::from(n) * split.atomic * (split.n_accumulate + 1.0);
    let scale = batch / f64::from(application.init_batch);
    let worth = noise.var / scale + noise.sqr;
    let gain = if worth > 0.0 { (noise.var + noise.sqr) / worth } else { 1.0 };
    batch / time * gain / scale
}

// SPDX-License-Identifier: Apache-2.0
//! What a seed means: the job, its size and its faults.

use std::time::Duration;

use edl_core::job::{EventKind, Note};
use edl_core::rng::{self, Rng};
use edl_core::spec::{JobSpec, OnNonfinite, Strategy};

/// One simulated job.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub seed: u64,
    pub spec: JobSpec,
    pub n_records: u64,
    pub n_validation_records: u64,
    pub n_faults: u64,
    pub fault_every_ms: u64,
    /// Nothing goes wrong, so nothing may be lost or computed twice.
    pub is_undisturbed: bool,
    /// How often the user stops an undisturbed job, with enough time, and resumes it.
    pub n_stops: u64,
    /// Per thousand handled events: the master dies in the middle of its effects.
    pub master_deaths: u64,
    /// Per thousand batches or lanes: user code fails, the worker crashes.
    pub failures: u64,
    pub crashes: u64,
    /// Per thousand pushes: the frame is sent twice.
    pub duplicates: u64,
    /// No worker can ever train this batch, counted over all epochs.
    pub untrainable: Option<u64>,
    /// The loss of this batch, counted over all epochs, is never finite.
    pub nonfinite: Option<u64>,
    /// The training script leaves its loop after this many steps.
    pub quits_after: Option<u64>,
    /// Evaluations get better and better, so each is followed by a checkpoint.
    pub improves: bool,
    /// Per thousand lanes: the computation takes up to three seconds.
    pub hiccups: u64,
    /// How long a computation, reading records and applying a push take at most.
    pub step_ms: u64,
    pub read_ms: u64,
    pub apply_ms: u64,
    /// How long a member reads the sums of the others at most.
    pub reduce_ms: u64,
    /// The same for a minibatch of the validation data, and for the file of a partition.
    pub eval_ms: u64,
    pub write_ms: u64,
    /// Per thousand messages: it takes long.
    pub slow_messages: u64,
    /// Per thousand checkpoints: one of the servers learns of it late.
    pub late_orders: u64,
    /// Per thousand evaluations: a worker is frozen meanwhile.
    pub frozen_evaluations: u64,
    /// Per thousand times that the user resumes the job: with another number of servers.
    pub resizes: u64,
}

/// Short enough to end often while a member computes.
const SHORT_SILENCE_MS: u64 = 1200;

/// Long enough for a checkpoint of a far step to take longer than its time limit.
const LONG_STEP_MS: u64 = 1000;

/// Small numbers from one seed.
struct Draw(Rng);

impl Draw {
    fn small(&mut self, low: u64, high: u64) -> u32 {
        u32::try_from(low + self.0.below(high - low + 1)).expect("a small number")
    }

    fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[usize::try_from(self.0.below(values.len() as u64)).expect("an index")]
    }
}

impl Scenario {
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut draw = Draw(Rng::new(rng::key(&[seed, 2])));
        match draw.small(0, 9) {
            0..=3 => Self::with_servers(seed, &mut draw),
            4..=6 => Self::in_steps(seed, &mut draw, Strategy::Allreduce),
            _ => Self::in_steps(seed, &mut draw, Strategy::Hybrid),
        }
    }

    /// The batch that is skipped, counted over all epochs.
    pub(crate) fn skipped(&self) -> Option<u64> {
        self.nonfinite.filter(|_| self.spec.on_nonfinite != OnNonfinite::Stop)
    }

    /// The same job without faults.
    #[must_use]
    pub fn undisturbed(mut self) -> Self {
        (self.n_faults, self.is_undisturbed) = (0, true);
        (self.master_deaths, self.failures, self.crashes, self.duplicates) = (0, 0, 0, 0);
        (self.untrainable, self.nonfinite, self.quits_after) = (None, None, None);
        (self.frozen_evaluations, self.resizes) = (0, 0);
        self
    }

    /// Whether servers hold all parameters or the tables.
    pub(crate) fn uses_servers(&self) -> bool {
        self.spec.n_servers() > 0
    }

    /// How long one worker takes at most without faults: every step may be followed by an
    /// evaluation and its checkpoint.
    pub(crate) fn undisturbed_time(&self) -> Duration {
        let spec = &self.spec;
        let n_lanes = spec.step_lanes().map_or(1, u64::from);
        let n_steps = u64::from(spec.plan(self.n_records).n_batches() * spec.num_epochs);
        let evaluation_ms = self.n_validation_records * self.eval_ms;
        let lanes_ms = n_lanes * (self.step_ms + self.apply_ms) + self.reduce_ms;
        Duration::from_millis(n_steps * (lanes_ms + evaluation_ms + self.write_ms))
    }

    /// A member that owes something and sends nothing for this long is lost. Where nothing else goes
    /// wrong, no step reaches this limit; that of production is as many times longer as there are
    /// lanes.
    pub(crate) fn silence_ms(&self) -> u64 {
        match self.is_undisturbed {
            true => 1000 * u64::from(self.spec.task_timeout_secs),
            false => SHORT_SILENCE_MS,
        }
    }

    /// Whether an event means that something went wrong that no fault explains.
    pub(crate) fn is_unexpected(&self, note: &Note) -> bool {
        // Workers have passed the step of a checkpoint that a server did not know.
        let is_late =
            note.kind == EventKind::CheckpointFailed && note.text.contains("has passed: partition");
        // Workers and servers disagree on the step.
        let is_mismatch = note.kind == EventKind::StepMismatch;
        let is_fault = matches!(
            note.kind,
            EventKind::CheckpointFailed
                | EventKind::PeerLost
                | EventKind::Restored
                | EventKind::Stuck
                | EventKind::WorkFailed
        );
        is_late || is_mismatch || is_fault && self.is_undisturbed
    }

    fn with_servers(seed: u64, draw: &mut Draw) -> Self {
        let num_ps_pods = draw.small(1, 3);
        let mut spec = JobSpec {
            num_workers: draw.small(1, 4),
            num_ps_pods,
            partitions: draw.small(u64::from(num_ps_pods), 6),
            get_model_steps: draw.one_of(&[1, 1, 3]),
            ..common_spec(seed, draw)
        };
        match draw.small(0, 6) {
            0 | 1 => spec.use_async = Some(true),
            2 => spec.sync_version_tolerance = 3,
            grads_to_wait => spec.grads_to_wait = Some(grads_to_wait - 2),
        }
        let n_batches = u64::from(draw.small(3, 30));
        // Where the clock decides when to evaluate, every batch has the same weight.
        let short = if spec.evaluation_secs == 0 { u64::from(draw.small(0, 3)) } else { 0 };
        let n_records = n_batches * u64::from(spec.minibatch_size);
        Self::with_faults(seed, draw, spec, (n_records - short).max(1))
    }

    fn in_steps(seed: u64, draw: &mut Draw, strategy: Strategy) -> Self {
        let lanes = draw.small(1, 6);
        let num_workers = draw.small(1, u64::from(lanes.min(4)));
        let num_ps_pods = if strategy == Strategy::Hybrid { draw.small(1, 3) } else { 0 };
        let spec = JobSpec {
            distribution_strategy: strategy,
            num_ps_pods,
            lanes: Some(lanes),
            max_workers: Some(lanes),
            num_workers,
            min_workers: draw.one_of(&[1, 1, num_workers.min(2)]),
            partitions: draw.small(u64::from(num_ps_pods.max(1)), 6),
            early_stop_patience: draw.one_of(&[0, 0, 0, 2]),
            ..common_spec(seed, draw)
        };
        let per_step = u64::from(lanes * spec.minibatch_size);
        let n_records = u64::from(draw.small(1, 40)) * per_step;
        let n_records = (n_records - u64::from(draw.small(0, per_step - 1))).max(1);
        Self::with_faults(seed, draw, spec, n_records)
    }

    fn with_faults(seed: u64, draw: &mut Draw, mut spec: JobSpec, n_records: u64) -> Self {
        let trains_in_steps = spec.step_lanes().is_some();
        let is_untrainable = trains_in_steps && draw.small(0, 19) == 0;
        let n_batches = u64::from(spec.plan(n_records).n_batches() * spec.num_epochs);
        let (failures, crashes) = (draw.one_of(&[0, 0, 15]), draw.one_of(&[0, 0, 6]));
        let untrainable = is_untrainable.then(|| draw.0.below(n_batches));
        if is_untrainable {
            spec.max_batch_failures = 3;
        }
        let mut draw_nonfinite = Draw(Rng::new(rng::key(&[seed, 3])));
        let is_nonfinite = !is_untrainable && draw_nonfinite.small(0, 5) == 0;
        let nonfinite = is_nonfinite.then(|| draw_nonfinite.0.below(n_batches));
        spec.on_nonfinite = draw_nonfinite.one_of(&OnNonfinite::ALL);
        spec.spares = Draw(Rng::new(rng::key(&[seed, 5]))).one_of(&[0, 0, 1, 2]);
        let mut draw_quit = Draw(Rng::new(rng::key(&[seed, 6])));
        let quits = trains_in_steps && draw_quit.small(0, 5) == 0;
        let quits_after = quits.then(|| draw_quit.0.below(n_batches));
        let mut draw_timing = Draw(Rng::new(rng::key(&[seed, 4])));
        if trains_in_steps {
            // Where it is long, a frozen worker comes back while the others train without it.
            spec.heartbeat_timeout_secs = draw_timing.one_of(&[2.0, 8.0]);
        }
        let scenario = Self {
            seed,
            n_records,
            n_validation_records: draw.one_of(&[0, 3, 8, 17]),
            n_faults: u64::from(draw.small(0, 14)),
            fault_every_ms: u64::from(draw.small(30, 1200)),
            is_undisturbed: false,
            n_stops: 0,
            master_deaths: draw.one_of(&[0, 0, 3, 10]),
            failures: if is_untrainable { 0 } else { failures },
            crashes: if is_untrainable { 0 } else { crashes },
            duplicates: draw.one_of(&[0, 50]),
            untrainable,
            nonfinite,
            quits_after,
            improves: draw.small(0, 1) == 1,
            hiccups: 0,
            step_ms: u64::from(draw.small(1, 40)),
            read_ms: draw.one_of(&[0, 1, 10]),
            apply_ms: draw.one_of(&[1, 4, 60]),
            reduce_ms: draw_timing.one_of(&[0, 1, 100]),
            eval_ms: draw.one_of(&[5, 40, 400]),
            write_ms: draw.one_of(&[10, 150, 1000]),
            slow_messages: draw.one_of(&[20, 20, 150]),
            late_orders: draw_timing.one_of(&[0, 200]),
            frozen_evaluations: draw_timing.one_of(&[0, 0, 100]),
            resizes: 300,
            spec,
        };
        match draw.small(0, 15) {
            0 => {
                let step_ms = draw_timing.one_of(&[scenario.step_ms, LONG_STEP_MS]);
                let n_stops = u64::from(draw_timing.small(0, 2));
                Self { step_ms, n_stops, ..scenario }.undisturbed()
            }
            // A member that computes for long seems silent to the others.
            1 | 2 => Self { step_ms: u64::from(draw.small(40, 300)), ..scenario },
            _ => scenario,
        }
    }
}

fn common_spec(seed: u64, draw: &mut Draw) -> JobSpec {
    JobSpec {
        job_name: "simulation".into(),
        minibatch_size: draw.small(1, 4),
        num_minibatches_per_task: draw.small(1, 4),
        num_epochs: draw.small(1, 3),
        shuffle: draw.small(0, 1) == 1,
        seed,
        evaluation_steps: draw.one_of(&[0, 4, 11]),
        evaluation_secs: draw.one_of(&[0, 0, 1]),
        evaluation_epochs: draw.small(0, 1) == 1,
        checkpoint_steps: draw.one_of(&[0, 3, 5, 13]),
        checkpoint_secs: draw.one_of(&[0, 1, 2]),
        keep_checkpoint_max: draw.small(1, 4),
        task_timeout_secs: 8,
        heartbeat_timeout_secs: 2.0,
        // Faults must not fail a job that a person would let continue.
        relaunch_on_worker_failure: 1_000_000,
        max_batch_failures: 1_000_000,
        ..JobSpec::default()
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What a seed means: the job, its people and its bad luck.

use edl_core::rng::{self, Rng};
use edl_core::spec::{JobSpec, Strategy};

/// One simulated job.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) spec: JobSpec,
    pub(crate) n_records: u64,
    pub(crate) n_validation_records: u64,
    pub(crate) n_faults: u64,
    pub(crate) fault_every_ms: u64,
    /// Per thousand handled events: the master dies in the middle of its effects.
    pub(crate) master_deaths: u64,
    /// Per thousand steps: records cannot be trained this time, the worker crashes.
    pub(crate) failures: u64,
    pub(crate) crashes: u64,
    /// Nobody can ever train this step.
    pub(crate) untrainable: Option<u64>,
    /// How long a step's computation takes.
    pub(crate) step_ms: u64,
    pub(crate) throttle_ms: u64,
}

impl Scenario {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(rng::key(&[seed, 2]));
        let mut small = |low: u64, high: u64| {
            u32::try_from(low + rng.below(high - low + 1)).expect("a small number")
        };
        let lanes = small(1, 6);
        let num_workers = small(1, u64::from(lanes.min(4)));
        let minibatch_size = small(1, 4);
        let is_untrainable = small(0, 19) == 0;
        let spec = JobSpec {
            job_name: "simulation".into(),
            distribution_strategy: Strategy::Allreduce,
            num_ps_pods: 0,
            lanes: Some(lanes),
            max_workers: Some(lanes),
            num_workers,
            min_workers: [1, 1, 1, num_workers.min(2)][small(0, 3) as usize],
            minibatch_size,
            num_minibatches_per_task: small(1, 4),
            num_epochs: small(1, 3),
            shuffle: small(0, 1) == 1,
            seed,
            partitions: small(1, 6),
            evaluation_steps: [0, 4, 11][small(0, 2) as usize],
            evaluation_secs: [0, 0, 1][small(0, 2) as usize],
            evaluation_epochs: small(0, 1) == 1,
            early_stop_patience: [0, 0, 0, 2][small(0, 3) as usize],
            checkpoint_steps: [0, 5, 13][small(0, 2) as usize],
            checkpoint_secs: [0, 1, 2][small(0, 2) as usize],
            keep_checkpoint_max: small(1, 4),
            task_timeout_secs: 8,
            heartbeat_timeout_secs: 2.0,
            // Bad luck must not end a job that a person would see through.
            relaunch_on_worker_failure: 1_000_000,
            max_batch_failures: if is_untrainable { 3 } else { 1_000_000 },
            ..JobSpec::default()
        };
        let per_step = u64::from(lanes * minibatch_size);
        let n_records = u64::from(small(1, 40)) * per_step;
        let n_records = (n_records - u64::from(small(0, per_step - 1))).max(1);
        let n_steps = n_records.div_ceil(per_step) * u64::from(spec.num_epochs);
        let crashes = [0, 0, 4][small(0, 2) as usize];
        Self {
            seed,
            n_records,
            n_validation_records: [0, 3, 8, 17][small(0, 3) as usize],
            n_faults: u64::from(small(0, 14)),
            fault_every_ms: u64::from(small(30, 900)),
            master_deaths: [0, 0, 3, 10][small(0, 3) as usize],
            failures: if is_untrainable { 0 } else { [0, 0, 10][small(0, 2) as usize] },
            crashes: if is_untrainable { 0 } else { crashes },
            untrainable: is_untrainable.then(|| rng.below(n_steps)),
            step_ms: 1 + rng.below(40),
            throttle_ms: [0, 20, 200][usize::try_from(rng.below(3)).expect("an index")],
            spec,
        }
    }

    /// The same job with nothing going wrong.
    pub(crate) fn undisturbed(mut self) -> Self {
        self.n_faults = 0;
        (self.master_deaths, self.failures, self.crashes) = (0, 0, 0);
        self.untrainable = None;
        self
    }
}

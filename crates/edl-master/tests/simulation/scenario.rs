// SPDX-License-Identifier: Apache-2.0
//! What a seed means: the job, its people and its bad luck.

use edl_core::rng::{self, Rng};
use edl_core::spec::JobSpec;

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
    /// Per thousand batches: user code fails, the worker crashes, a message goes out twice.
    pub(crate) failures: u64,
    pub(crate) crashes: u64,
    pub(crate) duplicates: u64,
    /// Workers report again what they could not report before their stream broke.
    pub(crate) repeats_reports: bool,
    /// Evaluations get better and better, so that each is followed by a cut.
    pub(crate) improves: bool,
}

impl Scenario {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(rng::key(&[seed, 2]));
        let mut pick = |low: u64, high: u64| low + rng.below(high - low + 1);
        let mut small =
            |low: u64, high: u64| u32::try_from(pick(low, high)).expect("a small number");
        let num_ps_pods = small(1, 3);
        let minibatch_size = small(1, 4);
        let n_validation_records = [0u64, 3, 8, 17][small(0, 3) as usize];
        let mut spec = JobSpec {
            job_name: "simulation".into(),
            minibatch_size,
            num_minibatches_per_task: small(1, 4),
            num_epochs: small(1, 3),
            shuffle: small(0, 1) == 1,
            seed,
            num_workers: small(1, 4),
            num_ps_pods,
            partitions: small(u64::from(num_ps_pods), 6),
            evaluation_steps: [0, 4, 11][small(0, 2) as usize],
            evaluation_secs: [0, 0, 1][small(0, 2) as usize],
            evaluation_epochs: small(0, 1) == 1,
            checkpoint_steps: [0, 5, 13][small(0, 2) as usize],
            checkpoint_secs: [0, 1, 2][small(0, 2) as usize],
            keep_checkpoint_max: small(1, 4),
            task_timeout_secs: 8,
            heartbeat_timeout_secs: 2.0,
            // Bad luck must not end a job that a person would see through.
            relaunch_on_worker_failure: 1_000_000,
            max_batch_failures: 1_000_000,
            ..JobSpec::default()
        };
        match small(0, 6) {
            0 | 1 => spec.use_async = Some(true),
            2 => spec.sync_version_tolerance = 3,
            grads_to_wait => spec.grads_to_wait = Some(grads_to_wait - 2),
        }
        let n_batches = u64::from(small(3, 30));
        let short = if spec.evaluation_secs == 0 { u64::from(small(0, 3)) } else { 0 };
        let n_records = n_batches * u64::from(minibatch_size);
        Self {
            seed,
            n_records: (n_records - short).max(1),
            n_validation_records,
            n_faults: u64::from(small(0, 14)),
            fault_every_ms: u64::from(small(100, 1200)),
            master_deaths: [0, 0, 3, 10][small(0, 3) as usize],
            failures: [0, 0, 20][small(0, 2) as usize],
            crashes: [0, 0, 10][small(0, 2) as usize],
            duplicates: [0, 50][small(0, 1) as usize],
            repeats_reports: small(0, 1) == 1,
            improves: small(0, 1) == 1,
            spec,
        }
    }
}

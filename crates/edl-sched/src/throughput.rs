// SPDX-License-Identifier: Apache-2.0
//! Predicts the time of a step from a few measurements, by the seven-parameter model of Pollux.
//!
//! Compute time grows with the local batch. Network time grows with the number of workers, at
//! different rates within a node and between nodes. The overlap of the two is fitted as well. What
//! was never measured is assumed to cost nothing, so larger sizes are tried.

/// The fitted model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ThroughputModel {
    params: [f64; N_PARAMS],
}

/// One measured configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepSample {
    pub n_nodes: u32,
    pub n_workers: u32,
    pub local_batch: f64,
    /// Seconds of forward and backward alone.
    pub compute: f64,
    /// Seconds of a whole step.
    pub step: f64,
}

const N_PARAMS: usize = 7;
// Constant and slope of computing, of the network between nodes, and within one; the overlap.
const COMPUTE: usize = 0;
const BETWEEN: usize = 2;
const WITHIN: usize = 4;
const OVERLAP: usize = 6;

const LEAST: f64 = 1e-8;
const MOST_OVERLAP: f64 = 10.0;
/// Sweeps over the parameters; each halves the step where it finds nothing better.
const MOST_SWEEPS: usize = 120;
const SMALLEST_STEP: f64 = 2e-3;

impl ThroughputModel {
    /// Fits the model to what was measured, starting from an earlier fit if there is one.
    #[must_use]
    pub fn fit(samples: &[StepSample], earlier: Option<Self>) -> Option<Self> {
        if samples.is_empty() {
            return None;
        }
        let (mut params, is_free) = starting_point(samples, earlier);
        let mut steps = [0.7_f64; N_PARAMS];
        let mut least = error(&params, samples);
        for _ in 0..MOST_SWEEPS {
            let before = params;
            for param in (0..N_PARAMS).filter(|param| is_free[*param]) {
                if steps[param] < SMALLEST_STEP {
                    continue;
                }
                let step = steps[param];
                let mut has_improved = false;
                for factor in [step.exp(), (-step).exp()] {
                    let mut tried = params;
                    tried[param] = moved(param, params[param], factor);
                    let now = error(&tried, samples);
                    if now < least {
                        (params, least, has_improved) = (tried, now, true);
                        break;
                    }
                }
                steps[param] *= if has_improved { 1.3 } else { 0.5 };
            }
            // Repeat the whole sweep's move, because parameters are correlated.
            let mut tried = params;
            for param in 0..N_PARAMS {
                let factor = if before[param] > 0.0 { params[param] / before[param] } else { 1.0 };
                let limit = if param == OVERLAP { 1.0..=MOST_OVERLAP } else { LEAST..=f64::MAX };
                tried[param] = (params[param] * factor).clamp(*limit.start(), *limit.end());
            }
            let now = error(&tried, samples);
            if now < least {
                (params, least) = (tried, now);
            } else if steps.iter().all(|step| *step < SMALLEST_STEP) {
                break;
            }
        }
        if !samples.iter().any(|sample| sample.n_nodes > 1) {
            // The network between nodes is no faster than that within one.
            params[BETWEEN] = params[BETWEEN].max(params[WITHIN] * 1.1);
            params[BETWEEN + 1] = params[BETWEEN + 1].max(params[WITHIN + 1] * 1.1);
        }
        Some(Self { params })
    }

    /// Seconds of forward and backward with a local batch.
    #[must_use]
    pub fn compute(&self, local_batch: f64) -> f64 {
        compute(&self.params, local_batch)
    }

    /// Seconds of a whole step.
    #[must_use]
    pub fn step(&self, n_nodes: u32, n_workers: u32, local_batch: f64) -> f64 {
        let network = network(&self.params, n_nodes, n_workers);
        overlapped(&self.params, self.compute(local_batch), network)
    }
}

/// The start of the search, and which parameters the samples determine.
fn starting_point(
    samples: &[StepSample],
    earlier: Option<ThroughputModel>,
) -> ([f64; N_PARAMS], [bool; N_PARAMS]) {
    let mut params = [1e-1, 1e-2, 1e-1, 1e-2, 1e-1, 1e-2, 1.001];
    let mut is_free = [true; N_PARAMS];
    if let Some(ThroughputModel { params: before }) = earlier {
        params = before;
    }
    let first = samples[0].local_batch;
    let mean: f64 = samples.iter().map(|s| s.compute).sum::<f64>() / samples.len() as f64;
    let has_one_batch = samples.iter().all(|sample| (sample.local_batch - first).abs() < 0.5);
    if has_one_batch {
        // Half of the time is assumed to be constant: optimistic about larger batches.
        params[COMPUTE] = mean / 2.0;
        params[COMPUTE + 1] = mean / 2.0 / first.max(1.0);
        is_free[COMPUTE] = false;
    } else if earlier.is_none() {
        params[COMPUTE] = mean / 2.0;
        params[COMPUTE + 1] = mean / 2.0 / first.max(1.0);
    }
    let mut fix = |param: usize| {
        params[param] = LEAST;
        is_free[param] = false;
    };
    if !samples.iter().any(|sample| sample.n_nodes > 1) {
        fix(BETWEEN);
        fix(BETWEEN + 1);
    }
    if !samples.iter().any(|sample| sample.n_nodes == 1 && sample.n_workers > 1) {
        fix(WITHIN);
        fix(WITHIN + 1);
    }
    if !samples.iter().any(|sample| sample.n_workers > 2) {
        fix(BETWEEN + 1);
        fix(WITHIN + 1);
    }
    // A parameter that was fixed before and is free now starts from a typical value.
    for param in BETWEEN..OVERLAP {
        if is_free[param] && params[param] <= LEAST * 2.0 {
            params[param] = if param % 2 == 0 { 0.1 * mean } else { 0.01 * mean };
        }
    }
    (params, is_free)
}

fn moved(param: usize, value: f64, factor: f64) -> f64 {
    if param == OVERLAP {
        // Counted from 1, where nothing overlaps.
        return (1.0 + (value - 1.0).max(1e-3) * factor).clamp(1.0, MOST_OVERLAP);
    }
    (value * factor).max(LEAST)
}

/// Errors of the logarithms, with a penalty for overlap and for a network that does not scale.
fn error(params: &[f64; N_PARAMS], samples: &[StepSample]) -> f64 {
    let (mut of_compute, mut of_step) = (0.0, 0.0);
    for sample in samples {
        let compute = compute(params, sample.local_batch);
        let network = network(params, sample.n_nodes, sample.n_workers);
        let step = overlapped(params, compute, network);
        of_compute += (compute.ln() - sample.compute.ln()).powi(2);
        of_step += (step.ln() - sample.step.ln()).powi(2);
    }
    let n = samples.len() as f64;
    let slope = |at: usize| (params[at + 1] / params[at]).powi(2);
    (of_compute / n).sqrt()
        + (of_step / n).sqrt()
        + 1e-3 * (params[OVERLAP] - 1.0).powi(2)
        + 1e-2 * (slope(BETWEEN) + slope(WITHIN))
}

fn compute(params: &[f64; N_PARAMS], local_batch: f64) -> f64 {
    params[COMPUTE] + params[COMPUTE + 1] * local_batch
}

fn network(params: &[f64; N_PARAMS], n_nodes: u32, n_workers: u32) -> f64 {
    let at = match (n_nodes, n_workers) {
        (2.., _) => BETWEEN,
        (_, 2..) => WITHIN,
        _ => return LEAST,
    };
    params[at] + params[at + 1] * f64::from(n_workers.saturating_sub(2)).max(LEAST)
}

/// A p-norm: the sum where nothing overlaps (1), close to the larger of the two at 10.
fn overlapped(params: &[f64; N_PARAMS], compute: f64, network: f64) -> f64 {
    let (larger, smaller) = (compute.max(network), compute.min(network));
    let power = params[OVERLAP];
    larger * (1.0 + (smaller / larger).powf(power)).powf(1.0 / power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_are_predicted() {
        let truth = ThroughputModel { params: [0.02, 0.001, 0.03, 0.002, 0.01, 0.001, 1.8] };
        let mut samples = Vec::new();
        for (n_nodes, n_workers) in [(1, 1), (1, 2), (1, 4), (2, 8), (4, 16), (2, 5)] {
            for local_batch in [32.0, 64.0, 128.0] {
                let compute = truth.compute(local_batch);
                let step = truth.step(n_nodes, n_workers, local_batch);
                samples.push(StepSample { n_nodes, n_workers, local_batch, compute, step });
            }
        }
        let model = ThroughputModel::fit(&samples, None).unwrap();
        for sample in &samples {
            let step = model.step(sample.n_nodes, sample.n_workers, sample.local_batch);
            assert!((step / sample.step - 1.0).abs() < 0.06, "{sample:?}: {step}");
        }
    }

    #[test]
    fn a_job_seen_on_one_worker_is_thought_to_scale() {
        let sample =
            StepSample { n_nodes: 1, n_workers: 1, local_batch: 64.0, compute: 0.1, step: 0.1 };
        let model = ThroughputModel::fit(&[sample], None).unwrap();
        assert!((model.step(2, 8, 64.0) - 0.1).abs() < 1e-3);
        assert!(model.step(2, 8, 32.0) < 0.08, "a smaller batch is quicker");
        assert_eq!(ThroughputModel::fit(&[], None), None);
    }
}

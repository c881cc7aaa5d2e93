// SPDX-License-Identifier: Apache-2.0
//! Why a job refuses a request.

use crate::platform::{ChaosAction, InstanceId};
use crate::spec::{JobSpec, MAX_MEMBERS, MAX_WORKERS};
use crate::text::counted;

/// The reason, as the caller reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    #[error("the job has ended")]
    Ended,
    #[error(
        "cannot scale to {workers}: the job has {}, fixed for its lifetime, and every worker \
         needs one; start a job with more --lanes",
        counted(*lanes, "lane")
    )]
    Lanes { workers: u32, lanes: u32 },
    #[error("cannot scale to {workers}: --max_workers is {most}")]
    MaxWorkers { workers: u32, most: u32 },
    #[error(
        "cannot scale to {workers}: under AllReduce, each worker connects to all others, and at \
         most {MAX_MEMBERS} can"
    )]
    Members { workers: u32 },
    #[error("cannot scale to {workers}: --min_workers is {least}")]
    MinWorkers { workers: u32, least: u32 },
    #[error("pods support only the chaos action kill")]
    OnlyKill,
    #[error("chaos is disabled; start the job with --allow_chaos")]
    NoChaos,
    #[error("{0} is not running")]
    NotRunning(InstanceId),
}

/// Refuses a number of workers that a running job cannot have.
pub(super) fn check_scale(spec: &JobSpec, workers: u32) -> Result<(), Refusal> {
    let (least, most) = (spec.min_workers, spec.max_workers.unwrap_or(MAX_WORKERS));
    match spec.step_lanes() {
        Some(lanes) if workers > lanes => Err(Refusal::Lanes { workers, lanes }),
        Some(_) if workers > MAX_MEMBERS => Err(Refusal::Members { workers }),
        _ if workers > most => Err(Refusal::MaxWorkers { workers, most }),
        Some(_) if workers < least => Err(Refusal::MinWorkers { workers, least }),
        _ => Ok(()),
    }
}

/// Refuses a chaos action that the job does not allow.
pub(super) fn check_chaos(spec: &JobSpec, action: ChaosAction) -> Result<(), Refusal> {
    if spec.is_on_cluster() && action != ChaosAction::Kill {
        return Err(Refusal::OnlyKill);
    }
    spec.allow_chaos.then_some(()).ok_or(Refusal::NoChaos)
}

// SPDX-License-Identifier: Apache-2.0
//! `chaos`: injects faults into the processes of a running job, to see the job recover.

use std::io::Write;
use std::time::{Duration, Instant};

use edl_core::job::JobState;
use edl_core::platform::{ChaosAction, InstanceState, Role};
use edl_core::rng::Rng;
use edl_net::proto::{ChaosRequest, Instance, JobStatus};

use crate::cli::ChaosArgs;
use crate::cluster;
use crate::control::{self, Master};
use crate::exit::{Exit, refuse};
use crate::jobs::Job;

/// Interval between checks of the job.
const POLL: Duration = Duration::from_millis(50);
/// A job that was just started has a process to target within this time.
const TARGET_TIMEOUT: Duration = Duration::from_secs(30);

/// Injects one fault, or one after another until the job ends.
pub(crate) fn run(args: &ChaosArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let job = cluster::find_local(&args.job, "chaos", "use `kubectl delete pod`")?;
    let mut rng = Rng::new(args.seed);
    crate::runtime()?.block_on(async {
        if let Some(step) = args.at_step {
            wait_for_step(&job, step).await?;
        }
        let start = Instant::now();
        loop {
            let status = control::status(&job).await?;
            let found = target(args, &status, &mut rng);
            if found.is_none() && args.every.is_none() && start.elapsed() < TARGET_TIMEOUT {
                tokio::time::sleep(POLL).await;
                continue;
            }
            match found {
                Some((role, id)) => {
                    let request = request(args, role, id)?;
                    let send = async { Master::of(&job).await?.chaos(request).await };
                    control::within(send).await?;
                    writeln!(out, "{}-{id}: {}", role.name(), args.how.kind())?;
                }
                None if args.every.is_none() => {
                    return Err(refuse("no running process to target; see `elasticdl status`"));
                }
                None => {}
            }
            let Some(every) = args.every else { return Ok(Exit::Ok) };
            tokio::time::sleep(Duration::from_secs(every)).await;
            if !job.is_running() || job.state().is_final() {
                return Ok(Exit::Ok);
            }
        }
    })
}

async fn wait_for_step(job: &Job, step: u64) -> anyhow::Result<()> {
    while control::status(job).await?.step < step {
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}

/// The process to act on: the one that is named, otherwise a random active worker. None while the
/// job starts, or while no worker is active.
fn target(args: &ChaosArgs, status: &JobStatus, rng: &mut Rng) -> Option<(Role, u32)> {
    let worker = args.worker.map(|id| (Role::Worker, id));
    if let Some((role, id)) = worker.or(args.ps.map(|id| (Role::Ps, id))) {
        let is_it = |instance: &Instance| (instance.role(), instance.id) == (role, id);
        let is_there = status.instances.iter().any(is_it);
        return (is_there || status.state() != JobState::Starting).then_some((role, id));
    }
    let works = |instance: &&Instance| {
        instance.role() == Role::Worker && instance.state() == InstanceState::Working
    };
    let workers: Vec<u32> = status.instances.iter().filter(works).map(|i| i.id).collect();
    let place = usize::try_from(rng.below(workers.len().max(1) as u64)).ok()?;
    workers.get(place).map(|id| (Role::Worker, *id))
}

/// The request to the master, checked here for better error messages.
fn request(args: &ChaosArgs, role: Role, id: u32) -> anyhow::Result<ChaosRequest> {
    let time = args.secs.map(Duration::try_from_secs_f64).transpose();
    let time = time.map_err(|_| refuse("--secs must be greater than 0"))?;
    let millis = time.map(edl_core::time::millis);
    if millis == Some(0) {
        return Err(refuse("--secs must be at least 0.001"));
    }
    let (kind, millis, factor) = (args.how.kind(), millis.unwrap_or(0), args.factor.unwrap_or(0));
    ChaosAction::new(kind, millis, factor).map_err(refuse)?;
    Ok(ChaosRequest { role: role.into(), id, how: kind.into(), millis, factor })
}

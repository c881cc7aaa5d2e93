// SPDX-License-Identifier: Apache-2.0
//! `chaos`: harms a process of a running job on purpose, to see the job heal.

use std::io::Write;
use std::time::Duration;

use edl_core::platform::Harm;
use edl_core::rng::Rng;
use edl_net::proto::{HarmRequest, Instance, JobStatus};

use crate::cli::ChaosArgs;
use crate::cluster;
use crate::control;
use crate::exit::{Exit, refuse};
use crate::jobs::{Job, is_final};

/// How often the job's step is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Harms once, or again and again until the job ends.
pub(crate) fn run(args: &ChaosArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let job = cluster::find_here(&args.job, "chaos", "use `kubectl delete pod`")?;
    let mut rng = Rng::new(args.seed);
    crate::runtime()?.block_on(async {
        if let Some(step) = args.at_step {
            wait_for_step(&job, step).await?;
        }
        loop {
            let status = control::status(&job).await?;
            match victim(args, &status, &mut rng) {
                Some((role, id)) => {
                    harm(&job, request(args, role, id)?).await?;
                    writeln!(out, "{role}-{id}: {}", args.how.word())?;
                }
                None if args.every.is_none() => {
                    return Err(refuse("no running process to target; see `elasticdl status`"));
                }
                None => {}
            }
            let Some(every) = args.every else { return Ok(Exit::Ok) };
            tokio::time::sleep(Duration::from_secs(every)).await;
            if !job.is_running() || is_final(&job.state()) {
                return Ok(Exit::Ok);
            }
        }
    })
}

async fn wait_for_step(job: &Job, step: u64) -> anyhow::Result<()> {
    while control::status(job).await?.step < step {
        tokio::time::sleep(LOOK).await;
    }
    Ok(())
}

/// The one that is named; if nobody is, a worker that works.
fn victim(args: &ChaosArgs, status: &JobStatus, rng: &mut Rng) -> Option<(&'static str, u32)> {
    if let Some(id) = args.worker {
        return Some(("worker", id));
    }
    if let Some(id) = args.ps {
        return Some(("ps", id));
    }
    let works = |instance: &&Instance| instance.role == "worker" && instance.state == "working";
    let workers: Vec<u32> = status.instances.iter().filter(works).map(|i| i.id).collect();
    let place = usize::try_from(rng.below(workers.len().max(1) as u64)).ok()?;
    workers.get(place).map(|id| ("worker", *id))
}

/// What is asked of the master, which would say the same of what it cannot do.
fn request(args: &ChaosArgs, role: &str, id: u32) -> anyhow::Result<HarmRequest> {
    let time = args.secs.map(Duration::try_from_secs_f64).transpose();
    let time = time.map_err(|_| refuse("--secs must be greater than 0"))?;
    let millis = time.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    if millis == Some(0) {
        return Err(refuse("--secs must be at least 0.001"));
    }
    let (how, millis, factor) = (args.how.word(), millis.unwrap_or(0), args.factor.unwrap_or(0));
    Harm::parse(how, millis, factor).map_err(refuse)?;
    Ok(HarmRequest { role: role.into(), id, how: how.into(), millis, factor })
}

async fn harm(job: &Job, request: HarmRequest) -> anyhow::Result<()> {
    let ask = async {
        let mut master = control::connect(job).await?;
        match master.harm(request).await {
            Ok(_) => Ok(()),
            Err(refused) => Err(refuse(refused.message())),
        }
    };
    control::within(ask).await
}

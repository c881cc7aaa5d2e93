// SPDX-License-Identifier: Apache-2.0
//! `scale`: changes the number of workers of a running job.

use std::io::Write;

use crate::cli::ScaleArgs;
use crate::cluster::{self, Target};
use crate::exit::{Exit, refuse};
use crate::submit::checks::MAX_WORKERS;

/// Runs the command.
pub(crate) fn run(args: &ScaleArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let target = cluster::find(&args.job)?;
    if args.workers == 0 {
        return Err(refuse(format!(
            "a job needs at least 1 worker; to pause it, use `elasticdl stop {}`, which saves a \
             checkpoint",
            target.handle()
        )));
    }
    if matches!(target, Target::Local(_)) && args.workers > MAX_WORKERS {
        return Err(refuse(format!(
            "--workers={} is too many for one machine; use at most {MAX_WORKERS}",
            args.workers
        )));
    }
    let reply = target.request(async |master| master.scale(args.workers).await)?;
    let name = target.name();
    writeln!(out, "job {name}: workers scaled from {} to {}", reply.before, reply.after)?;
    Ok(Exit::Ok)
}

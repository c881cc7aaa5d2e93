// SPDX-License-Identifier: Apache-2.0
//! `scale`: changes the number of workers of a running job.

use std::io::Write;

use crate::cli::ScaleArgs;
use crate::cluster::{self, Place};
use crate::control;
use crate::exit::{Exit, refuse};
use crate::submit::checks::MAX_WORKERS;

/// Asks the master, and tells what it did.
pub(crate) fn run(args: &ScaleArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let job = match cluster::find(&args.job)? {
        Place::Here(job) => job,
        Place::There(remote) => return cluster::scale(&remote, args.workers, out),
    };
    if args.workers > MAX_WORKERS {
        let wanted = args.workers;
        return Err(refuse(format!(
            "--workers={wanted} is too many for one machine; use at most {MAX_WORKERS}"
        )));
    }
    let reply = crate::runtime()?.block_on(control::scale(&job, args.workers))?;
    let name = job.name().unwrap_or_default();
    writeln!(out, "job {name}: workers scaled from {} to {}", reply.before, reply.after)?;
    Ok(Exit::Ok)
}

// SPDX-License-Identifier: Apache-2.0
//! `report`: saves the page of a job as one file.

use std::io::Write;

use anyhow::Context as _;

use crate::cli::JobArg;
use crate::cluster;
use crate::exit::Exit;
use crate::status;

/// Writes the page and prints its path.
pub(crate) fn run(args: &JobArg, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let instead = "the master saves the page as `report.html` in the job's folder";
    let job = cluster::find_local(args, "report", instead)?;
    let mut status = crate::runtime()?.block_on(status::of(&job))?;
    // The address contains a token that allows changing the job.
    status.page.clear();
    let path = job.paths().report();
    let report = edl_master::report(job.paths(), &status);
    std::fs::write(&path, report).with_context(|| format!("cannot write `{}`", path.display()))?;
    writeln!(out, "{}", path.display())?;
    Ok(Exit::Ok)
}

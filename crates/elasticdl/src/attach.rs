// SPDX-License-Identifier: Apache-2.0
//! `attach`: watches a job that runs in the background. Ctrl-C ends the watching, not the job.

use std::io::Write;
use std::time::Duration;

use crate::cli::JobArg;
use crate::cluster::{self, Place};
use crate::exit::Exit;
use crate::jobs::{self, Job};
use crate::say::say;
use crate::ui::{self, Ui};

const TICK: Duration = Duration::from_millis(200);

/// Shows the job until it ends, and leaves with its exit code.
pub(crate) fn run(args: &JobArg, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let job = match cluster::find(args)? {
        Place::Here(job) => job,
        Place::There(remote) => return cluster::attach(&remote, out),
    };
    let mut ui = Ui::new(&job);
    let ended = crate::runtime()?.block_on(watch(&job, &mut ui));
    let status = ui.finish();
    if !ended {
        let name = job.name().unwrap_or_default();
        say(format_args!("the job keeps running; stop it with `elasticdl stop {name}`"));
        return Ok(Exit::Ok);
    }
    let exit = match &status {
        Some(status) if jobs::is_final(&status.state) => Exit::of_state(&status.state),
        Some(_) | None => Exit::Stopped,
    };
    write!(out, "{}", ui::summary(&job.handle(), status.as_ref(), exit))?;
    Ok(exit)
}

/// `false` if the user has seen enough.
async fn watch(job: &Job, ui: &mut Ui) -> bool {
    let mut tick = tokio::time::interval(TICK);
    loop {
        tokio::select! {
            _ = tokio::signal::ctrl_c() => return false,
            _ = tick.tick() => {}
        }
        ui.tick();
        if !job.is_running() {
            return true;
        }
    }
}

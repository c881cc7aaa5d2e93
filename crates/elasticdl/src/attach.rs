// SPDX-License-Identifier: Apache-2.0
//! `attach`: watches a job that runs in the background. Ctrl-C stops the watching, not the job.

use std::io::Write;
use std::time::Duration;

use crate::cli::JobArg;
use crate::cluster::{self, Target};
use crate::console::{eprint, put_result};
use crate::exit::Exit;
use crate::jobs::Job;
use crate::ui::{self, Ui, Watched};

const TICK: Duration = Duration::from_millis(200);

/// Runs the command.
pub(crate) fn run(args: &JobArg, out: &mut dyn Write) -> anyhow::Result<Exit> {
    attach(&cluster::find(args)?, out)
}

/// Shows the job until it ends, and returns its exit code.
pub(crate) fn attach(target: &Target, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let (mut ui, handle) = (Ui::of(target), target.handle());
    let watched = target.block_on(async {
        match target {
            Target::Local(job) => Ok(watch(job, &mut ui).await),
            Target::Cluster(job) => cluster::watch(job, &mut ui).await,
        }
    });
    let status = ui.finish();
    if watched? == Watched::UserLeft {
        eprint(format_args!("the job keeps running; stop it with `elasticdl stop {handle}`"));
        return Ok(Exit::Ok);
    }
    let exit = status.as_ref().map_or(Exit::Stopped, |status| Exit::of_state(status.state()));
    put_result(out, ui::summary(&handle, status.as_ref(), exit))?;
    Ok(exit)
}

async fn watch(job: &Job, ui: &mut Ui) -> Watched {
    let mut tick = tokio::time::interval(TICK);
    loop {
        tokio::select! {
            _ = tokio::signal::ctrl_c() => return Watched::UserLeft,
            _ = tick.tick() => {}
        }
        ui.tick();
        if !job.is_running() {
            return Watched::JobEnded;
        }
    }
}

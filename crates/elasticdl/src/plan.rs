// SPDX-License-Identifier: Apache-2.0
//! `plan` and `explain`: what the operator would do now, and why a job is below its maximum.

use std::io::Write;

use edl_operator::run;

use crate::cli::operator::{ExplainArgs, PlanArgs, PlannerFlags};
use crate::exit::{Exit, not_found};
use crate::operator::{connect, options};

/// Shows the plan of all jobs, or explains one.
pub(crate) fn plan(args: &PlanArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    print_plan(&args.cluster, args.explain.as_deref(), out)
}

/// Explains one job.
pub(crate) fn explain(args: &ExplainArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    print_plan(&args.cluster, Some(&args.job), out)
}

fn print_plan(
    flags: &PlannerFlags,
    job: Option<&str>,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    let options = options(flags)?;
    let runtime = crate::runtime()?;
    let text = runtime.block_on(async {
        let client = connect(flags.kubeconfig.as_deref()).await?;
        let text = run::explain(&client, &flags.namespace, options, job);
        anyhow::Ok(Box::pin(text).await?)
    })?;
    match text {
        Some(text) => {
            out.write_all(text.as_bytes())?;
            Ok(Exit::Ok)
        }
        None => Err(not_found(format!(
            "TrainingJob `{}` not found; list them with `kubectl get tj -A`",
            job.unwrap_or_default()
        ))),
    }
}

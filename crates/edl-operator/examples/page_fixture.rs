// SPDX-License-Identifier: Apache-2.0
//! Serves the operator's page over a small simulated cluster, for tests in a browser. It observes,
//! plans and serves with the operator's own code; only the effects of actions are simulated.
//!
//! Prints its address, then executes commands, one line of JSON each, until standard input ends:
//! `{"submit": "b", "spec": {…}}`, `{"note": "b", "status": {…}}`, `{"service": "web-1", "cpu": "2"}`,
//! `{"wait": 600}`. `done` follows each.

use std::io::{BufRead as _, Write as _};
use std::net::Ipv4Addr;

use edl_operator::health::Health;
use edl_operator::http;
use edl_operator::metrics::Metrics;
use edl_operator::overview::Pass;
use edl_operator::page_data::PageData;
// The fake cluster is the unit tests' own; it finds these modules as it does there.
use edl_operator::{act, crd, observe};
use edl_page::http::Hosts;
use serde::Deserialize;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

#[expect(dead_code, reason = "unit tests use the rest")]
#[expect(clippy::unwrap_used, reason = "it is written for tests")]
#[path = "../src/tests/fake_cluster.rs"]
mod fake_cluster;

use fake_cluster::FakeCluster;

/// Such a small cluster settles in fewer passes.
const MAX_PASSES: usize = 6;

#[derive(Deserialize)]
#[serde(untagged)]
enum Command {
    Submit { submit: String, spec: Value },
    Note { note: String, status: Value },
    Service { service: String, cpu: String },
    Wait { wait: u64 },
}

fn follow(cluster: &mut FakeCluster, command: Command) {
    match command {
        Command::Submit { submit, spec } => {
            cluster.objects.jobs.push(fake_cluster::job(&submit, &spec).into());
        }
        Command::Note { note, status } => {
            cluster.report(&note, &status);
        }
        Command::Service { service, cpu } => {
            cluster.objects.pods.push(fake_cluster::other_pod(&service, &cpu, None).into());
        }
        Command::Wait { wait } => cluster.now_secs += wait,
    }
}

/// Runs passes of the operator until nothing is left to do.
fn settle(cluster: &mut FakeCluster, page_data: &PageData) {
    for _ in 0..MAX_PASSES {
        let (observed, plan, actions) = cluster.plan();
        let is_settled = actions.is_empty();
        page_data.show(Pass::new(observed, plan, &actions));
        if is_settled {
            return;
        }
        cluster.pass();
        cluster.settle();
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let mut out = std::io::stdout();
    writeln!(out, "http://{}/", listener.local_addr()?)?;
    out.flush()?;
    let page_data = PageData::default();
    let shutdown = CancellationToken::new();
    let router = http::router(Metrics::new(), page_data.clone(), Health::default());
    let mut serving = tokio::task::JoinSet::new();
    serving.spawn(edl_page::http::serve(listener, router, Hosts::default(), shutdown.clone()));
    let commands = tokio::task::spawn_blocking(move || -> Result<(), String> {
        let text = |error: &dyn std::error::Error| error.to_string();
        let nodes = ["n1", "n2"].map(|name| fake_cluster::node(name, "4", "16Gi"));
        let mut cluster = FakeCluster::new(&nodes, &[]);
        page_data.leads(true);
        settle(&mut cluster, &page_data);
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|error| text(&error))?;
            let command = serde_json::from_str(&line).map_err(|error| text(&error))?;
            follow(&mut cluster, command);
            settle(&mut cluster, &page_data);
            writeln!(out, "done").and_then(|()| out.flush()).map_err(|error| text(&error))?;
        }
        Ok(())
    });
    commands.await??;
    shutdown.cancel();
    serving.join_next().await;
    Ok(())
}

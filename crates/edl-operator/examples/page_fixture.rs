// SPDX-License-Identifier: Apache-2.0
//! Serves the operator's page over a small cluster that exists in memory alone, for tests in a
//! browser: look, plan and page are the operator's own, and what becomes of its actions is played.
//!
//! Says its address, then follows commands, one line of JSON each, until standard input ends:
//! `{"submit": "b", "spec": {…}}`, `{"note": "b", "status": {…}}`, `{"service": "web-1", "cpu": "2"}`,
//! `{"wait": 600}`. `done` follows each.

use std::io::{BufRead as _, Write as _};
use std::net::Ipv4Addr;

use edl_kube::names;
use edl_operator::http;
use edl_operator::metrics::Metrics;
use edl_operator::overview::Look;
use edl_operator::window::Window;
// The fixture is the tests' own, and finds these where it does there.
use edl_operator::{act, crd, observe};
use serde::Deserialize;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

#[expect(dead_code, reason = "unit tests use the rest")]
#[expect(clippy::unwrap_used, reason = "it is written for tests")]
#[path = "../src/fixture.rs"]
mod fixture;

use fixture::World;

/// A cluster of this kind is as it shall be after fewer rounds.
const MAX_ROUNDS: usize = 6;

#[derive(Deserialize)]
#[serde(untagged)]
enum Command {
    Submit { submit: String, spec: Value },
    Note { note: String, status: Value },
    Service { service: String, cpu: String },
    Wait { wait: u64 },
}

fn follow(world: &mut World, command: Command) {
    match command {
        Command::Submit { submit, spec } => {
            world.seen.jobs.push(fixture::job(&submit, &spec).into());
        }
        Command::Note { note, status } => {
            world.note(&note, names::STATUS_NOTE, &status.to_string());
        }
        Command::Service { service, cpu } => {
            world.seen.pods.push(fixture::other_pod(&service, &cpu, None).into());
        }
        Command::Wait { wait } => world.now_secs += wait,
    }
}

/// Rounds of the operator, until nothing is left to do.
fn settle(world: &mut World, window: &Window) {
    for _ in 0..MAX_ROUNDS {
        let (observed, plan, actions) = world.plan();
        let is_over = actions.is_empty();
        window.show(Look::new(observed, plan, &actions));
        if is_over {
            return;
        }
        world.round();
        world.settle();
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let mut out = std::io::stdout();
    writeln!(out, "http://{}/", listener.local_addr()?)?;
    out.flush()?;
    let window = Window::default();
    let shutdown = CancellationToken::new();
    let router = http::router(Metrics::new(), window.clone());
    let mut serving = tokio::task::JoinSet::new();
    serving.spawn(http::serve(listener, router, shutdown.clone()));
    let commands = tokio::task::spawn_blocking(move || -> Result<(), String> {
        let told = |error: &dyn std::error::Error| error.to_string();
        let nodes = ["n1", "n2"].map(|name| fixture::node(name, "4", "16Gi"));
        let mut world = World::new(&nodes, &[]);
        window.leads(true);
        settle(&mut world, &window);
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|error| told(&error))?;
            let command = serde_json::from_str(&line).map_err(|error| told(&error))?;
            follow(&mut world, command);
            settle(&mut world, &window);
            writeln!(out, "done").and_then(|()| out.flush()).map_err(|error| told(&error))?;
        }
        Ok(())
    });
    commands.await??;
    shutdown.cancel();
    serving.join_next().await;
    Ok(())
}

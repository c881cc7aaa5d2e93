// SPDX-License-Identifier: Apache-2.0
//! A whole job as tasks of this process.

use edl_core::job::JobState;
use edl_core::spec::Strategy;

use super::*;
use crate::jobs::Home;

const N_STEPS: u64 = 4_000;

/// A local job that takes seconds, so its status shows it running.
fn local_job(home: &Home) -> Job {
    let mut spec = JobSpec {
        job_name: "local".into(),
        distribution_strategy: Strategy::Local,
        model_def: "mnist_mlp".into(),
        training_data: concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fashion_mnist/test").into(),
        minibatch_size: 16,
        lanes: Some(2),
        max_step: N_STEPS,
        num_epochs: 100,
        ..JobSpec::default()
    };
    spec.settle_strategy();
    home.create(&spec, None).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_local_job_survives_its_master() {
    let root = tempfile::tempdir().unwrap();
    let job = local_job(&Home::at(root.path()));
    let mut ui = Ui::new(&job);
    let children = Children::new(job.clone(), None, None, None);
    let mut supervisor = Supervisor::new(&job, job.spec().unwrap(), children, false, &mut ui);
    let mut tick = tokio::time::interval(TICK);
    let mut was_killed = false;
    let exit = loop {
        let event = tokio::select! {
            event = supervisor.children.next() => Event::Child(event),
            order = next_order(&mut supervisor.link) => Event::Order(order),
            _ = tick.tick() => Event::Tick,
        };
        supervisor.handle(event, Instant::now()).unwrap();
        if !was_killed && job.status().is_some_and(|status| status.state() == JobState::Running) {
            supervisor.children.kill(MASTER);
            was_killed = true;
        }
        if let SupervisorPhase::Ending { exit, .. } = supervisor.phase
            && supervisor.children.is_empty()
        {
            break exit;
        }
    };
    assert!(was_killed, "the master was never seen at work");
    let status = job.status().unwrap();
    assert_eq!((exit, status.state()), (Exit::Ok, JobState::Succeeded));
    assert_eq!((status.term, status.step), (2, N_STEPS));
}

// SPDX-License-Identifier: Apache-2.0
//! A whole worker against a master and servers that do what the test says.

mod master;
mod member;
pub(crate) mod toy;

use std::sync::Arc;
use std::time::Duration;

use edl_core::activity::WaitingFor;
use edl_core::id::{BatchId, Generation, WorkerId};
use edl_core::metric::{Measures, Metric};
use edl_core::spec::JobSpec;
use edl_core::worker;
use edl_net::control;
use edl_net::key::JobKey;
use edl_net::place::Place;
use edl_net::proto::{self, worker_command as command, worker_message::Kind};
use edl_tensor::batch::Batch;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::feed::Decoded;
use crate::session::{Edges, Limits, Session};
use crate::{Config, Error};
use master::{HANG, ScriptedMaster, ScriptedSession, welcome};
use toy::{ScriptedServers, ToyModel, ToyRecords, batches};

const N_RECORDS: u64 = 100;

/// One worker under test with everything around it.
struct Stage {
    master: ScriptedMaster,
    servers: ScriptedServers,
    shutdown: CancellationToken,
    job_dir: TempDir,
    spec: JobSpec,
    worker: JoinSet<Result<(), Error>>,
}

fn spec() -> JobSpec {
    JobSpec {
        job_name: "toy".into(),
        training_data: "toy".into(),
        minibatch_size: 10,
        shuffle: false,
        use_async: Some(true),
        ..JobSpec::default()
    }
}

/// What differs between the stages of tests.
struct Props {
    n_records: u64,
    key: JobKey,
    limits: Limits,
    has_model: bool,
}

impl Default for Props {
    fn default() -> Self {
        // Whatever the machine is busy with, these tests wait for what they expect.
        let exit = worker::Limits { finish: HANG, last_answers: HANG, hand_over: HANG };
        let limits = Limits { master: HANG, exit, flush: HANG };
        Self { n_records: N_RECORDS, key: JobKey::from_bytes([7; 32]), limits, has_model: true }
    }
}

impl Stage {
    async fn new(spec: JobSpec) -> Self {
        Self::with(spec, Props::default()).await
    }

    async fn with(spec: JobSpec, props: Props) -> Self {
        let Props { n_records, key, limits, has_model } = props;
        let master = ScriptedMaster::start(&Props::default().key).await;
        let servers = ScriptedServers::default();
        let job_dir = tempfile::tempdir().unwrap();
        let config = Config {
            worker: WorkerId(7),
            master_addr: master.address.to_string(),
            key,
            job_dir: job_dir.path().into(),
            place: Place::default(),
        };
        let (dial, model) = (servers.clone(), ToyModel::new(servers.clone()));
        let edges = Edges {
            open_model: Box::new(move |_| {
                if has_model { Ok(Box::new(model)) } else { Err("there is none".into()) }
            }),
            open_records: Box::new(move |_| Box::new(move |_| Ok(Arc::new(ToyRecords(n_records))))),
            open_dial: Box::new(|_, _, _| Box::new(dial)),
            open_mesh: Box::new(|_, _, _| Err("there are no other workers".into())),
            limits,
        };
        let shutdown = CancellationToken::new();
        let mut worker = JoinSet::new();
        worker.spawn(Session::new(config, edges, shutdown.clone()).run());
        Self { master, servers, shutdown, job_dir, spec, worker }
    }

    async fn welcome(&mut self) -> (ScriptedSession, proto::Ready) {
        self.master.welcome(&self.spec, N_RECORDS).await
    }

    async fn ended(&mut self) -> Result<(), Error> {
        timeout(HANG, self.worker.join_next())
            .await
            .expect("the worker never ended")
            .unwrap()
            .unwrap()
    }

    /// Why the worker gave its master up.
    async fn gave_up(&mut self) -> control::Error {
        let Err(Error::Control(error)) = self.ended().await else { panic!("another end") };
        error
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_values_are_in_the_job_folder_before_the_worker_is_ready() {
    let mut stage = Stage::new(spec()).await;
    let (_session, _ready) = stage.welcome().await;
    let values = edl_tensor::first_values::read(stage.job_dir.path(), 1).unwrap();
    assert_eq!(values, [toy::WEIGHT]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_trained_in_order_and_each_batch_is_reported_once() {
    let mut stage = Stage::new(spec()).await;
    let (mut session, ready) = stage.welcome().await;
    assert!(ready.model_spec_json.contains("toy"));
    assert_eq!((ready.capacity, ready.held.len()), (2, 0));
    session.route(1).await;
    session.train(1, 0, 4).await;
    session.train(2, 4, 2).await;
    let expected: Vec<_> = (0..6).map(|index| (index, 1)).collect();
    assert_eq!(session.done(6).await, expected);
    assert_eq!(stage.servers.book().pushes, batches(0..6));
    session.send(command::Kind::Stop(proto::StopWork { reason: "done".into() })).await;
    assert!(session.last().await.is_none(), "nothing more is said");
    drop(session);
    stage.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_connection_is_made_again_and_the_batch_is_trained_again() {
    let mut stage = Stage::new(spec()).await;
    stage.servers.change(|book| book.break_at = Some(BatchId { epoch: 0, index: 1 }));
    let (mut session, _) = stage.welcome().await;
    session.route(1).await;
    session.train(1, 0, 3).await;
    let mut done = session.done(3).await;
    done.sort_unstable();
    assert_eq!(done, [(0, 1), (1, 1), (2, 1)]);
    assert_eq!(stage.servers.book().n_dials, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_lost_server_the_next_route_voids_all_leases() {
    let mut stage = Stage::new(spec()).await;
    stage.servers.change(|book| book.held_acks = true);
    let (mut session, _) = stage.welcome().await;
    session.route(1).await;
    session.train(1, 0, 3).await;
    stage.servers.wait(|book| book.pushes.len() == 3);
    stage.servers.change(|book| {
        book.over.insert(Generation(1));
        book.held_acks = false;
    });
    session.heartbeat(WaitingFor::Servers).await;
    session.route(2).await;
    session.train(2, 1, 2).await;
    assert_eq!(session.done(2).await, [(1, 2), (2, 2)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_lease_is_not_trained() {
    let mut stage = Stage::new(spec()).await;
    stage.servers.change(|book| book.held_pulls = true);
    let (mut session, _) = stage.welcome().await;
    session.route(1).await;
    session.train(1, 0, 4).await;
    stage.servers.wait(|book| book.n_pulls == 1);
    session.heartbeat(WaitingFor::Parameters).await;
    session.send(command::Kind::Revoke(proto::Revoke { lease: 1 })).await;
    // A record that cannot be read fails while the pull still waits: so the revoke is heard.
    session.train(2, 9, 1).await;
    assert!(matches!(session.next().await, Kind::Failed(_)));
    session.train(3, 6, 2).await;
    stage.servers.change(|book| book.held_pulls = false);
    assert_eq!(session.done(2).await, [(6, 1), (7, 1)]);
    assert_eq!(stage.servers.book().pushes, batches(6..8));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_route_ends_a_pull_that_waits() {
    let mut stage = Stage::new(spec()).await;
    stage.servers.change(|book| book.held_pulls = true);
    let (mut session, _) = stage.welcome().await;
    session.route(1).await;
    session.train(1, 0, 1).await;
    stage.servers.wait(|book| book.n_pulls == 1);
    session.route(2).await;
    session.train(2, 0, 1).await;
    stage.servers.wait(|book| book.n_pulls == 2);
    stage.servers.change(|book| book.held_pulls = false);
    assert_eq!(session.done(1).await, [(0, 2)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_is_measured_whole() {
    let mut stage = Stage::new(spec()).await;
    let (mut session, _) = stage.welcome().await;
    session.route(3).await;
    let work = proto::EvalWork { eval: 5, version: 9, shard: 2, first_record: 30, end_record: 55 };
    session.assign(8, proto::lease::Work::Eval(work)).await;
    let Kind::EvalDone(done) = session.next().await else { panic!("no evaluation") };
    assert_eq!((done.eval, done.shard), (5, 2));
    let measures = edl_net::convert::master::measures(done.measures).unwrap();
    let mut expected = Measures::new(&[Metric::mse()]);
    (30..55_u8).for_each(|record| expected.add_value(record.into(), 0.0));
    assert_eq!(measures, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn predictions_are_written_in_the_order_of_the_records() {
    let mut stage = Stage::new(spec()).await;
    let (mut session, _) = stage.welcome().await;
    session.route(1).await;
    let folder = "output".to_owned();
    let work = proto::PredictWork { shard: 12, first_record: 8, end_record: 31, folder };
    session.assign(1, proto::lease::Work::Predict(work)).await;
    let Kind::PredictDone(done) = session.next().await else { panic!("no prediction") };
    assert_eq!(done.shard, 12);
    let folder = stage.job_dir.path().join("output");
    let written = std::fs::read_to_string(folder.join("part-000012.jsonl")).unwrap();
    let expected = |record: u64| format!("{{\"record\":{record},\"output\":[{record}.0,0.5]}}\n");
    assert_eq!(written, (8..31).map(expected).collect::<String>());
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn a_single_record_is_described_in_the_singular() {
    let described = |records: &[u64]| {
        let batch = Batch { records: records.to_vec(), ..Batch::default() };
        Decoded { batch, data: Arc::new(ToyRecords(N_RECORDS)) }.describe()
    };
    assert_eq!(described(&[7]), "1 record at toy file, record 7");
    assert_eq!(described(&[7, 8]), "2 records starting at toy file, record 7");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_record_is_named_and_the_worker_goes_on_with_other_leases() {
    let mut stage = Stage::new(spec()).await;
    let (mut session, _) = stage.welcome().await;
    session.route(1).await;
    session.train(1, 8, 1).await;
    let Kind::Failed(failed) = session.next().await else { panic!("no failure") };
    assert_eq!((failed.lease, failed.index), (1, 8));
    assert_eq!(
        failed.error,
        "record 83: poison (batch 0/8: 10 records starting at toy file, record 80)"
    );
    session.train(2, 9, 1).await;
    let Kind::Failed(failed) = session.next().await else { panic!("no failure") };
    assert_eq!((failed.lease, failed.index), (2, 9));
    assert_eq!(failed.error, "toy file, record 94 is corrupt");
    session.train(3, 5, 1).await;
    assert_eq!(session.done(1).await, [(5, 1)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gradient_that_is_not_finite_is_not_pushed() {
    let mut stage = Stage::new(spec()).await;
    stage.servers.change(|book| book.overflows = true);
    let (mut session, _) = stage.welcome().await;
    session.route(1).await;
    session.train(1, 7, 1).await;
    let Kind::NonFinite(found) = session.next().await else { panic!("no report") };
    assert_eq!((found.lease, found.index), (1, 7));
    let expected =
        "the gradient is not finite (batch 0/7: 10 records starting at toy file, record 70)";
    assert_eq!(found.error, expected);
    assert!(stage.servers.book().pushes.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_that_changed_is_refused() {
    let mut stage =
        Stage::with(spec(), Props { n_records: N_RECORDS + 1, ..Props::default() }).await;
    let (mut session, _) = stage.welcome().await;
    session.route(1).await;
    session.train(1, 0, 1).await;
    let Kind::Failed(failed) = session.next().await else { panic!("no failure") };
    let expected =
        "the training data has changed: it has 101 records, but had 100 when the job started";
    assert_eq!(failed.error, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_asked_to_leave_finishes_its_batch_returns_the_rest_and_reports_it() {
    let mut stage = Stage::new(spec()).await;
    stage.servers.change(|book| book.held_acks = true);
    let (mut session, _) = stage.welcome().await;
    session.route(1).await;
    session.train(1, 0, 2).await;
    stage.servers.wait(|book| book.pushes.len() == 2);
    stage.shutdown.cancel();
    let Kind::Returned(returned) = session.next().await else { panic!("nothing is returned") };
    assert_eq!(returned.kept.len(), 2, "both are pushed");
    session.heartbeat(WaitingFor::Acknowledgements).await;
    stage.servers.change(|book| book.held_acks = false);
    assert_eq!(session.done(2).await, [(0, 1), (1, 1)]);
    assert!(matches!(session.next().await, Kind::Leaving(_)));
    assert!(session.last().await.is_none());
    drop(session);
    stage.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_master_learns_what_is_held_and_gets_the_reports_from_before_it() {
    let mut stage = Stage::new(spec()).await;
    stage.servers.change(|book| book.held_acks = true);
    let (mut session, _) = stage.welcome().await;
    session.route(1).await;
    session.train(4, 0, 2).await;
    stage.servers.wait(|book| book.pushes.len() == 2);
    drop(session);
    let (mut session, ready) = stage.welcome().await;
    let held = proto::HeldLease { lease: 4, generation: 1, epoch: 0, indices: vec![0, 1] };
    assert_eq!(ready.held, [held]);
    stage.servers.change(|book| book.held_acks = false);
    assert_eq!(session.done(2).await, [(0, 1), (1, 1)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_worker_supplies_a_whole_round_and_the_next_starts_after_it() {
    let spec = JobSpec { use_async: Some(false), grads_to_wait: Some(3), ..spec() };
    let mut stage = Stage::new(spec).await;
    stage.servers.change(|book| book.round = 3);
    let (mut session, ready) = stage.welcome().await;
    assert_eq!(ready.capacity, 3);
    session.route(1).await;
    for index in [1, 2, 0] {
        session.train(u64::from(index), index, 1).await;
    }
    stage.servers.wait(|book| book.pushes.len() == 3);
    stage.servers.change(|book| book.round = 1);
    session.done(3).await;
    let work = proto::TrainWork { epoch: 2, first: 5, count: 1, ..Default::default() };
    session.assign(9, proto::lease::Work::Train(work)).await;
    assert_eq!(session.done(1).await, [(5, 1)]);
    // 10 batches are 4 rounds of at most 3; batch 5 is of the second round of its epoch.
    assert_eq!(stage.servers.book().min_rounds, [Some(0), Some(0), Some(0), Some(9)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_parameters_are_pulled_while_a_batch_is_trained() {
    let mut stage = Stage::new(spec()).await;
    stage.servers.change(|book| (book.held_pulls, book.held_training) = (true, true));
    let (mut session, _) = stage.welcome().await;
    session.route(1).await;
    session.train(1, 0, 2).await;
    // Reading goes in order: when this one has failed, both batches before it are read.
    session.train(2, 9, 1).await;
    assert!(matches!(session.next().await, Kind::Failed(_)));
    stage.servers.change(|book| book.held_pulls = false);
    stage.servers.wait(|book| book.n_pulls == 2);
    assert!(stage.servers.book().pushes.is_empty());
    stage.servers.change(|book| book.held_training = false);
    assert_eq!(session.done(2).await, [(0, 1), (1, 1)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_age_matters_nothing_is_pulled_before_the_batch_at_hand_is_pushed() {
    let bounded = JobSpec { use_async: None, sync_version_tolerance: 1, ..spec() };
    let sync = JobSpec { use_async: Some(false), grads_to_wait: Some(1), ..spec() };
    for spec in [bounded, sync] {
        let mut stage = Stage::new(JobSpec { get_model_steps: 2, ..spec }).await;
        let (mut session, _) = stage.welcome().await;
        session.route(1).await;
        session.train(1, 0, 3).await;
        session.done(3).await;
        let book = stage.servers.book();
        assert_eq!(book.log, ["pull", "push", "pull", "push", "pull", "push"]);
        assert_eq!(book.n_pulls_without_dense, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_without_a_model_ends_with_the_reason() {
    let mut stage = Stage::with(spec(), Props { has_model: false, ..Props::default() }).await;
    let mut session = stage.master.accept().await;
    assert!(matches!(session.next().await, Kind::Hello(_)));
    session.send(command::Kind::Welcome(welcome(&stage.spec, N_RECORDS))).await;
    assert!(session.last().await.is_none());
    drop(session);
    let error = stage.ended().await.unwrap_err();
    assert_eq!(error.to_string(), "cannot build the model: there is none");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dense_parameters_are_pulled_as_often_as_the_job_says() {
    let mut stage = Stage::new(JobSpec { get_model_steps: 3, ..spec() }).await;
    let (mut session, _) = stage.welcome().await;
    session.route(1).await;
    session.train(1, 0, 3).await;
    session.done(3).await;
    session.train(2, 3, 4).await;
    session.done(4).await;
    let book = stage.servers.book();
    assert_eq!((book.n_pulls, book.n_pulls_without_dense), (7, 4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_worker_ends_with_the_masters_words() {
    let mut stage = Stage::new(spec()).await;
    let mut session = stage.master.accept().await;
    session.refuse(Status::failed_precondition("this build speaks protocol 9")).await;
    let error = stage.gave_up().await;
    assert_eq!(error.to_string(), "the master refused this process: this build speaks protocol 9");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_with_another_key_ends_at_once() {
    let mut stage =
        Stage::with(spec(), Props { key: JobKey::from_bytes([8; 32]), ..Props::default() }).await;
    assert!(matches!(stage.gave_up().await, control::Error::OtherKey(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_of_another_run_is_not_worked_for() {
    let mut stage = Stage::new(spec()).await;
    let (session, _) = stage.welcome().await;
    drop(session);
    let mut session = stage.master.accept().await;
    let other = proto::WorkerWelcome { run: "ff".repeat(16), ..welcome(&stage.spec, N_RECORDS) };
    session.send(command::Kind::Welcome(other)).await;
    assert!(matches!(stage.gave_up().await, control::Error::OtherRun { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_of_a_lower_term_is_not_worked_for() {
    let mut stage = Stage::new(spec()).await;
    for (term, is_followed) in [(2, true), (1, false), (2, true), (3, true)] {
        let mut session = stage.master.accept().await;
        assert!(matches!(session.next().await, Kind::Hello(_)));
        let welcome = proto::WorkerWelcome { term, ..welcome(&stage.spec, N_RECORDS) };
        session.send(command::Kind::Welcome(welcome)).await;
        // The others see the end of the stream.
        let is_ready = matches!(session.last().await, Some(Kind::Ready(_)));
        assert_eq!(is_ready, is_followed, "term {term}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_is_not_reached_in_time_is_given_up() {
    let limits = Limits { master: Duration::ZERO, ..Props::default().limits };
    let mut stage = Stage::with(spec(), Props { limits, ..Props::default() }).await;
    let session = stage.master.accept().await;
    stage.master.stop();
    drop(session);
    assert!(matches!(stage.gave_up().await, control::Error::MasterLost { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_without_a_master_can_be_asked_to_leave() {
    let mut stage = Stage::new(spec()).await;
    let session = stage.master.accept().await;
    stage.shutdown.cancel();
    stage.ended().await.unwrap();
    drop(session);
}

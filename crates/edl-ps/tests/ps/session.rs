// SPDX-License-Identifier: Apache-2.0
//! The whole process with a fake master, which the test controls.

use std::path::Path;
use std::pin::Pin;

use edl_core::applied::AppliedSet;
use edl_core::id::PsId;
use edl_core::optimizer::OptimizerSpec;
use edl_core::spec::JobSpec;
use edl_net::control;
use edl_net::data::{Route, ServerRoute, Versions};
use edl_net::place::Place;
use edl_net::proto::master_server::{Master, MasterServer};
use edl_net::proto::ps_command::Kind as Order;
use edl_net::proto::ps_message::Kind as Message;
use edl_net::proto::{
    AuditReport, AuditRequest, ChaosReply, ChaosRequest, Inspect, JobStatus, Load, LoadFrom,
    PsCommand, PsHello, PsMessage, PsWelcome, ScaleReply, ScaleRequest, Serve, ServerCheckpoint,
    StatusRequest, StopReply, StopRequest, StopWork, WorkerCommand, WorkerMessage,
};
use edl_ps::Config;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::harness::{Client, DEADLINE, N_BATCHES, N_PARTITIONS, RUN, batch, commit, key, model};

/// One session of the server, as the master sees it.
struct Session {
    messages: Streaming<PsMessage>,
    commands: mpsc::Sender<Result<PsCommand, Status>>,
}

/// Passes every session to the test.
struct ScriptedMaster {
    sessions: mpsc::Sender<Session>,
}

type Commands<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Master for ScriptedMaster {
    type WorkerSessionStream = Commands<WorkerCommand>;
    type PsSessionStream = Commands<PsCommand>;

    async fn ps_session(
        &self,
        request: Request<Streaming<PsMessage>>,
    ) -> Result<Response<Self::PsSessionStream>, Status> {
        let (commands, queue) = mpsc::channel(16);
        let session = Session { messages: request.into_inner(), commands };
        self.sessions.send(session).await.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(queue))))
    }
    async fn worker_session(
        &self,
        _: Request<Streaming<WorkerMessage>>,
    ) -> Result<Response<Self::WorkerSessionStream>, Status> {
        Err(Status::unimplemented("not used by this test"))
    }
    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<JobStatus>, Status> {
        Err(Status::unimplemented("not used by this test"))
    }
    async fn scale(&self, _: Request<ScaleRequest>) -> Result<Response<ScaleReply>, Status> {
        Err(Status::unimplemented("not used by this test"))
    }
    async fn stop(&self, _: Request<StopRequest>) -> Result<Response<StopReply>, Status> {
        Err(Status::unimplemented("not used by this test"))
    }
    async fn audit(&self, _: Request<AuditRequest>) -> Result<Response<AuditReport>, Status> {
        Err(Status::unimplemented("not used by this test"))
    }
    async fn chaos(&self, _: Request<ChaosRequest>) -> Result<Response<ChaosReply>, Status> {
        Err(Status::unimplemented("not used by this test"))
    }
}

/// A master that a test plays, and a server that connects to it.
struct Harness {
    sessions: mpsc::Receiver<Session>,
    ended: JoinSet<Result<(), edl_ps::Error>>,
    folder: tempfile::TempDir,
    shutdown: CancellationToken,
    _master: JoinSet<()>,
}

async fn start() -> Harness {
    let folder = tempfile::tempdir().unwrap();
    let (sender, sessions) = mpsc::channel(1);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let incoming = edl_net::tls::incoming(listener, &key()).unwrap();
    let mut master = JoinSet::new();
    master.spawn(async move {
        let service = edl_net::tls::server()
            .add_service(MasterServer::new(ScriptedMaster { sessions: sender }));
        service.serve_with_incoming(incoming).await.unwrap();
    });
    // The configured address is outdated; the job folder has the new address of the master.
    std::fs::write(folder.path().join("master.json"), format!(r#"{{"address": "{address}"}}"#))
        .unwrap();
    let config = Config {
        ps: PsId(4),
        master_addr: "127.0.0.1:1".into(),
        key: key(),
        job_dir: folder.path().into(),
        listen: "127.0.0.1:0".into(),
        threads: 2,
        place: Place::default(),
    };
    let shutdown = CancellationToken::new();
    let mut ended = JoinSet::new();
    ended.spawn(edl_ps::run(config, shutdown.clone()));
    Harness { sessions, ended, folder, shutdown, _master: master }
}

impl Harness {
    async fn session(&mut self) -> Session {
        timeout(DEADLINE, self.sessions.recv()).await.expect("a session in time").unwrap()
    }

    async fn end(&mut self) -> Result<(), edl_ps::Error> {
        timeout(DEADLINE, self.ended.join_next()).await.expect("an end in time").unwrap().unwrap()
    }
}

impl Session {
    /// The next message that is not a heartbeat.
    async fn next(&mut self) -> Message {
        loop {
            let next = timeout(DEADLINE, self.messages.message()).await.expect("a message in time");
            match next.unwrap().unwrap().kind.unwrap() {
                Message::Heartbeat(_) | Message::Spending(_) => {}
                message @ (Message::Hello(_)
                | Message::Loaded(_)
                | Message::CheckpointStarted(_)
                | Message::CheckpointDone(_)
                | Message::CheckpointFailed(_)
                | Message::Sets(_)
                | Message::LoadFailed(_)) => return message,
            }
        }
    }

    async fn hello(&mut self) -> PsHello {
        let Message::Hello(hello) = self.next().await else { panic!("no hello") };
        hello
    }

    async fn heartbeat(&mut self) {
        loop {
            let next = timeout(DEADLINE, self.messages.message()).await.expect("a message in time");
            if let Some(Message::Heartbeat(_)) = next.unwrap().unwrap().kind {
                return;
            }
        }
    }

    async fn order(&self, order: Order) {
        self.commands.send(Ok(PsCommand { kind: Some(order) })).await.unwrap();
    }

    async fn welcome(&self, term: u64) {
        let spec = JobSpec { job_name: "job".into(), seed: 1, ..JobSpec::default() };
        self.order(Order::Welcome(PsWelcome {
            term,
            run: RUN.to_string(),
            spec_json: serde_json::to_string(&spec).unwrap(),
            heartbeat_secs: 0.01,
        }))
        .await;
    }

    async fn load(&self, generation: u64, checkpoint: &str) {
        self.order(Order::Load(Load {
            generation,
            first_partition: 0,
            end_partition: N_PARTITIONS,
            n_partitions: N_PARTITIONS,
            model_spec_json: serde_json::to_string(&model()).unwrap(),
            optimizer_json: serde_json::to_string(&OptimizerSpec::sgd(1.0)).unwrap(),
            n_batches: N_BATCHES,
            from: Some(LoadFrom {
                checkpoint: (!checkpoint.is_empty()).then(|| checkpoint.into()),
                keep_applied: true,
            }),
        }))
        .await;
    }

    /// Loads, and returns the number of updates of each partition.
    async fn loaded(&mut self, generation: u64, checkpoint: &str) -> Vec<u64> {
        self.load(generation, checkpoint).await;
        let Message::Loaded(loaded) = self.next().await else { panic!("not loaded") };
        assert_eq!(loaded.generation, generation);
        loaded.sets.iter().map(|set| set.updates).collect()
    }

    async fn serve(&self, generation: u64) {
        self.order(Order::Serve(Serve { generation })).await;
    }
}

fn route(hello: &PsHello, generation: u64) -> Route {
    let server = ServerRoute {
        ps: PsId(hello.ps),
        address: hello.address.clone(),
        unix_path: hello.unix_path.clone(),
        partitions: 0..N_PARTITIONS,
    };
    Route { generation: edl_core::id::Generation(generation), servers: vec![server] }
}

/// Runs the blocking calls of a client on a separate thread.
async fn with_client<T: Send + 'static>(
    route: Route,
    work: impl FnOnce(&mut Client) -> T + Send + 'static,
) -> T {
    let work = move || work(&mut Client::connect(&route).unwrap());
    tokio::task::spawn_blocking(work).await.unwrap()
}

async fn push(route: Route, index: u32) {
    let base = Versions(vec![0]);
    with_client(route, move |client| {
        client.push_from(batch(index), 1.0, &base).unwrap();
        client.ack().unwrap();
    })
    .await;
}

async fn expect(route: Route, value: f32) {
    with_client(route, move |client| client.expect(value)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_loads_serves_and_stops_on_request() {
    let mut harness = start().await;
    let mut session = harness.session().await;
    let hello = session.hello().await;
    assert_eq!((hello.ps, hello.generation, hello.sets.len()), (4, 0, 0));
    assert_eq!(hello.protocol, edl_net::CONTROL_PROTOCOL);
    assert!(Path::new(&hello.unix_path).exists());
    session.welcome(1).await;
    assert_eq!(session.loaded(1, "").await, [0; N_PARTITIONS as usize]);
    session.serve(1).await;
    push(route(&hello, 1), 2).await;
    expect(route(&hello, 1), 1.0).await;
    session.order(Order::Inspect(Inspect { request: 77 })).await;
    let Message::Sets(sets) = session.next().await else { panic!("no sets") };
    assert_eq!((sets.request, sets.generation), (77, 1));
    let mut before = None;
    for set in &sets.sets {
        assert_eq!(set.updates, 1);
        let applied = AppliedSet::from_bytes(&set.applied, before.as_ref()).unwrap();
        assert!(applied.contains(batch(2)));
        before = Some(applied);
    }
    session.heartbeat().await;
    session.order(Order::Stop(StopWork { reason: "done".into() })).await;
    harness.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_survives_its_master_and_reports_its_state() {
    let mut harness = start().await;
    let mut session = harness.session().await;
    let hello = session.hello().await;
    session.welcome(3).await;
    session.loaded(5, "").await;
    session.serve(5).await;
    push(route(&hello, 5), 0).await;
    drop(session);
    // Without a master, it keeps working.
    push(route(&hello, 5), 1).await;
    // The server ignores a master of an older term: it disconnects and tries again.
    let mut older = harness.session().await;
    older.hello().await;
    older.welcome(2).await;
    // The server may disconnect before it receives this.
    let stop = Order::Stop(StopWork { reason: "order of an older master".into() });
    let _ = older.commands.send(Ok(PsCommand { kind: Some(stop) })).await;
    let mut session = harness.session().await;
    let again = session.hello().await;
    assert_eq!((again.generation, again.incarnation), (5, hello.incarnation));
    assert_eq!(again.sets.len(), N_PARTITIONS as usize);
    assert!(again.sets.iter().all(|set| set.updates == 2));
    session.welcome(4).await;
    expect(route(&hello, 5), 2.0).await;
    harness.shutdown.cancel();
    harness.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checkpoint_is_written_and_loaded_in_the_next_generation() {
    let mut harness = start().await;
    let mut session = harness.session().await;
    let hello = session.hello().await;
    session.welcome(1).await;
    session.loaded(1, "").await;
    session.serve(1).await;
    push(route(&hello, 1), 0).await;
    let folder = harness.folder.path().join("checkpoint");
    std::fs::create_dir(&folder).unwrap();
    let folder = folder.to_str().unwrap().to_owned();
    session
        .order(Order::Checkpoint(ServerCheckpoint {
            checkpoint: 9,
            generation: 1,
            folder: folder.clone(),
            at: None,
        }))
        .await;
    let Message::CheckpointDone(done) = session.next().await else { panic!("no checkpoint") };
    assert_eq!((done.checkpoint, done.generation, done.files.len()), (9, 1, N_PARTITIONS as usize));
    // Updates after the checkpoint are lost in the next load.
    push(route(&hello, 1), 1).await;
    let file = |file: edl_net::proto::CheckpointFile| edl_tensor::checkpoint::FileEntry {
        partition: edl_core::id::PartitionId(file.partition),
        name: file.name,
        bytes: file.bytes,
        checksum: file.checksum,
        updates: file.updates,
    };
    commit(folder.as_ref(), done.files.into_iter().map(file).collect());
    assert_eq!(session.loaded(2, &folder).await, [1; N_PARTITIONS as usize]);
    session.serve(2).await;
    expect(route(&hello, 2), 1.0).await;
    // A checkpoint of the previous generation is refused, and so is one to an invalid folder.
    let no_folder = format!("{folder}/manifest.json");
    for (checkpoint, generation, folder) in [(10, 1, folder), (11, 2, no_folder)] {
        session
            .order(Order::Checkpoint(ServerCheckpoint { checkpoint, generation, folder, at: None }))
            .await;
        let Message::CheckpointFailed(failed) = session.next().await else {
            panic!("a checkpoint")
        };
        assert_eq!(failed.checkpoint, checkpoint);
        assert!(!failed.error.is_empty());
    }
    expect(route(&hello, 2), 1.0).await;
    harness.shutdown.cancel();
    harness.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_load_reports_the_reason_and_a_later_one_succeeds() {
    let mut harness = start().await;
    let mut session = harness.session().await;
    session.hello().await;
    session.welcome(1).await;
    let missing = harness.folder.path().join("missing").to_str().unwrap().to_owned();
    session.load(1, &missing).await;
    let Message::LoadFailed(failed) = session.next().await else { panic!("loaded") };
    assert_eq!(failed.generation, 1);
    assert!(failed.error.contains(&missing), "{}", failed.error);
    assert_eq!(session.loaded(2, "").await, [0; N_PARTITIONS as usize]);
    harness.shutdown.cancel();
    harness.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_of_a_different_run_stops_the_server_with_an_error() {
    let mut harness = start().await;
    let mut session = harness.session().await;
    session.hello().await;
    session.welcome(1).await;
    session.loaded(1, "").await;
    let run = "0".repeat(32);
    let spec_json = serde_json::to_string(&JobSpec::default()).unwrap();
    let welcome = PsWelcome { term: 2, run, spec_json, heartbeat_secs: 1.0 };
    session.order(Order::Welcome(welcome)).await;
    let ended = harness.end().await;
    assert!(matches!(ended, Err(edl_ps::Error::Control(control::Error::OtherRun { .. }))));
}

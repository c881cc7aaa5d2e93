// SPDX-License-Identifier: Apache-2.0
//! A master that does what a test tells it, over the real control plane.

use std::net::SocketAddr;
use std::time::Duration;

use edl_core::activity::WaitingFor;
use edl_core::spec::JobSpec;
use edl_net::key::JobKey;
use edl_net::proto::master_server::{Master, MasterServer};
use edl_net::proto::{self, worker_command as command, worker_message::Kind};
use edl_net::tls;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// A hang becomes a failure after this time; nothing depends on it otherwise.
pub(super) const HANG: Duration = Duration::from_secs(60);

pub(super) struct ScriptedMaster {
    pub(super) address: SocketAddr,
    sessions: mpsc::Receiver<ScriptedSession>,
    tasks: JoinSet<()>,
}

/// The master's end of one worker's stream.
pub(super) struct ScriptedSession {
    messages: Streaming<proto::WorkerMessage>,
    commands: mpsc::Sender<Result<proto::WorkerCommand, Status>>,
}

struct Service(Mutex<mpsc::Sender<ScriptedSession>>);

impl ScriptedMaster {
    pub(super) async fn start(key: &JobKey) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, sessions) = mpsc::channel(4);
        let service = MasterServer::new(Service(Mutex::new(sender)));
        let incoming = tls::incoming(listener, key).unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            tls::server().add_service(service).serve_with_incoming(incoming).await.unwrap();
        });
        Self { address, sessions, tasks }
    }

    /// Stops listening.
    pub(super) fn stop(&mut self) {
        self.tasks.abort_all();
    }

    pub(super) async fn accept(&mut self) -> ScriptedSession {
        timeout(HANG, self.sessions.recv()).await.expect("no worker came").unwrap()
    }

    /// Accepts a worker and welcomes it to the job; its announcement.
    pub(super) async fn welcome(
        &mut self,
        spec: &JobSpec,
        n: u64,
    ) -> (ScriptedSession, proto::Ready) {
        let mut session = self.accept().await;
        let Kind::Hello(hello) = session.next().await else { panic!("a hello comes first") };
        assert_eq!((hello.protocol, hello.worker), (edl_net::CONTROL_PROTOCOL, 7));
        session.send(command::Kind::Welcome(welcome(spec, n))).await;
        let Kind::Ready(ready) = session.next().await else { panic!("ready comes next") };
        (session, ready)
    }
}

pub(super) fn welcome(spec: &JobSpec, n_records: u64) -> proto::WorkerWelcome {
    proto::WorkerWelcome {
        term: 1,
        run: "00112233445566778899aabbccddeeff".into(),
        spec_json: serde_json::to_string(spec).unwrap(),
        n_records,
        n_validation_records: n_records,
        n_prediction_records: n_records,
        heartbeat_secs: 0.1,
    }
}

impl ScriptedSession {
    /// The next message that is not a heartbeat.
    pub(super) async fn next(&mut self) -> Kind {
        self.last().await.expect("the worker ended the stream")
    }

    /// The next message that is not a heartbeat; none at the end of the stream.
    pub(super) async fn last(&mut self) -> Option<Kind> {
        loop {
            let message = timeout(HANG, self.messages.message()).await.expect("no message came");
            let kind = message.ok().flatten()?.kind?;
            if !matches!(kind, Kind::Heartbeat(_) | Kind::Spending(_)) {
                return Some(kind);
            }
        }
    }

    /// Waits for a heartbeat with this `waiting_for`.
    pub(super) async fn heartbeat(&mut self, waiting_for: WaitingFor) {
        loop {
            let message = timeout(HANG, self.messages.message()).await.expect("no such heartbeat");
            if let Some(Kind::Heartbeat(beat)) = message.unwrap().unwrap().kind
                && beat.waiting_for() == waiting_for
            {
                return;
            }
        }
    }

    pub(super) async fn send(&mut self, kind: command::Kind) {
        self.commands.send(Ok(proto::WorkerCommand { kind: Some(kind) })).await.unwrap();
    }

    pub(super) async fn refuse(&mut self, status: Status) {
        self.commands.send(Err(status)).await.unwrap();
    }

    pub(super) async fn route(&mut self, generation: u64) {
        self.send(command::Kind::Route(proto::Route { generation, servers: Vec::new() })).await;
    }

    pub(super) async fn assign(&mut self, lease: u64, work: proto::lease::Work) {
        let lease = proto::Lease { lease, work: Some(work) };
        self.send(command::Kind::Lease(lease)).await;
    }

    pub(super) async fn train(&mut self, lease: u64, first: u32, count: u32) {
        let work = proto::TrainWork { epoch: 0, first, count, skipped: Vec::new() };
        self.assign(lease, proto::lease::Work::Train(work)).await;
    }

    /// The next `n` reports of batches: index and generation of each.
    pub(super) async fn done(&mut self, n: usize) -> Vec<(u32, u64)> {
        let mut done = Vec::new();
        while done.len() < n {
            let next = self.next().await;
            if matches!(next, Kind::BatchPushed(_)) {
                continue;
            }
            let Kind::BatchDone(batch) = next else { panic!("expected a batch, got {next:?}") };
            done.push((batch.index, batch.generation));
        }
        done
    }
}

type Commands<T> = ReceiverStream<Result<T, Status>>;

#[tonic::async_trait]
impl Master for Service {
    type WorkerSessionStream = Commands<proto::WorkerCommand>;
    type PsSessionStream = Commands<proto::PsCommand>;

    async fn worker_session(
        &self,
        request: Request<Streaming<proto::WorkerMessage>>,
    ) -> Result<Response<Self::WorkerSessionStream>, Status> {
        let (commands, outgoing) = mpsc::channel(64);
        let session = ScriptedSession { messages: request.into_inner(), commands };
        let sent = self.0.lock().await.send(session).await;
        sent.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ReceiverStream::new(outgoing)))
    }

    async fn ps_session(
        &self,
        _: Request<Streaming<proto::PsMessage>>,
    ) -> Result<Response<Self::PsSessionStream>, Status> {
        Err(Status::unimplemented("workers only"))
    }

    async fn status(
        &self,
        _: Request<proto::StatusRequest>,
    ) -> Result<Response<proto::JobStatus>, Status> {
        Err(Status::unimplemented("workers only"))
    }

    async fn scale(
        &self,
        _: Request<proto::ScaleRequest>,
    ) -> Result<Response<proto::ScaleReply>, Status> {
        Err(Status::unimplemented("workers only"))
    }

    async fn stop(
        &self,
        _: Request<proto::StopRequest>,
    ) -> Result<Response<proto::StopReply>, Status> {
        Err(Status::unimplemented("workers only"))
    }

    async fn audit(
        &self,
        _: Request<proto::AuditRequest>,
    ) -> Result<Response<proto::AuditReport>, Status> {
        Err(Status::unimplemented("workers only"))
    }

    async fn chaos(
        &self,
        _: Request<proto::ChaosRequest>,
    ) -> Result<Response<proto::ChaosReply>, Status> {
        Err(Status::unimplemented("workers only"))
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The master on the wire: decode, pass on, encode. Nothing is decided here.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use edl_core::id::{Incarnation, PsId, WorkerId};
use edl_core::job::Event;
use edl_core::platform::{Harm, InstanceId};
use edl_net::CONTROL_PROTOCOL;
use edl_net::proto::master_server::Master;
use edl_net::proto::{
    self, PsCommand, PsMessage, WorkerCommand, WorkerMessage, ps_message, worker_message,
};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use crate::convert;
use crate::peers::{Outbound, QUEUE};

/// How long a new stream may take to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Everything that reaches the engine from outside.
pub(crate) enum Input {
    Event(Event),
    WorkerOpened {
        number: u64,
        worker: WorkerId,
        incarnation: Incarnation,
        pid: u32,
        outbound: Outbound<WorkerCommand>,
    },
    WorkerSaid {
        number: u64,
        worker: WorkerId,
        event: Event,
    },
    WorkerClosed {
        number: u64,
        worker: WorkerId,
    },
    PsOpened {
        number: u64,
        ps: PsId,
        incarnation: Incarnation,
        event: Event,
        outbound: Outbound<PsCommand>,
    },
    PsSaid {
        number: u64,
        ps: PsId,
        event: Event,
    },
    PsSets {
        ps: PsId,
        sets: proto::Sets,
    },
    PsLoad {
        ps: PsId,
        load: proto::PsLoad,
    },
    PsClosed {
        number: u64,
        ps: PsId,
    },
    Status(oneshot::Sender<proto::JobStatus>),
    /// Status and history, as the page reads them.
    Everything(oneshot::Sender<String>),
    Scale {
        workers: u32,
        reply: oneshot::Sender<Result<proto::ScaleReply, Status>>,
    },
    Audit(oneshot::Sender<Result<proto::AuditReport, Status>>),
    Harm {
        instance: InstanceId,
        harm: Harm,
        reply: oneshot::Sender<Result<proto::HarmReply, Status>>,
    },
}

/// The gRPC service of one master.
pub(crate) struct Service {
    inputs: mpsc::Sender<Input>,
    streams: AtomicU64,
    tasks: TaskTracker,
}

type Commands<C> = Pin<Box<dyn Stream<Item = Result<C, Status>> + Send>>;

impl Service {
    pub(crate) fn new(inputs: mpsc::Sender<Input>, tasks: TaskTracker) -> Self {
        Self { inputs, streams: AtomicU64::new(0), tasks }
    }

    async fn input(&self, input: Input) -> Result<(), Status> {
        self.inputs.send(input).await.map_err(|_| Status::unavailable("the master is stopping"))
    }

    async fn ask<T>(&self, input: impl FnOnce(oneshot::Sender<T>) -> Input) -> Result<T, Status> {
        let (reply, answer) = oneshot::channel();
        self.input(input(reply)).await?;
        answer.await.map_err(|_| Status::unavailable("the master is stopping"))
    }

    fn next_stream(&self) -> u64 {
        self.streams.fetch_add(1, Ordering::Relaxed)
    }
}

#[tonic::async_trait]
impl Master for Service {
    type WorkerSessionStream = Commands<WorkerCommand>;
    type PsSessionStream = Commands<PsCommand>;

    async fn worker_session(
        &self,
        request: Request<Streaming<WorkerMessage>>,
    ) -> Result<Response<Self::WorkerSessionStream>, Status> {
        let mut messages = request.into_inner();
        let first = first_message(&mut messages).await?;
        let Some(worker_message::Kind::Hello(hello)) = first.kind else {
            return Err(Status::invalid_argument("a worker's first message must be a hello"));
        };
        check_protocol(hello.protocol)?;
        let number = self.next_stream();
        let (worker, incarnation) = (WorkerId(hello.worker), Incarnation(hello.incarnation));
        let (outbound, commands) = mpsc::channel(QUEUE);
        self.input(Input::WorkerOpened { number, worker, incarnation, pid: hello.pid, outbound })
            .await?;
        let inputs = self.inputs.clone();
        self.tasks.spawn(async move {
            while let Some(Ok(message)) = messages.next().await {
                let Some(kind) = message.kind else { continue };
                let Ok(event) = convert::worker_event(worker, incarnation, kind) else { break };
                let Some(event) = event else { continue };
                if inputs.send(Input::WorkerSaid { number, worker, event }).await.is_err() {
                    return;
                }
            }
            // The engine may be gone already, and then nobody needs to know.
            let _ = inputs.send(Input::WorkerClosed { number, worker }).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(commands))))
    }

    async fn ps_session(
        &self,
        request: Request<Streaming<PsMessage>>,
    ) -> Result<Response<Self::PsSessionStream>, Status> {
        let mut messages = request.into_inner();
        let first = first_message(&mut messages).await?;
        let Some(ps_message::Kind::Hello(hello)) = first.kind else {
            return Err(Status::invalid_argument("a server's first message must be a hello"));
        };
        check_protocol(hello.protocol)?;
        let number = self.next_stream();
        let (ps, incarnation) = (PsId(hello.ps), Incarnation(hello.incarnation));
        let event = convert::ps_hello(hello)?;
        let (outbound, commands) = mpsc::channel(QUEUE);
        self.input(Input::PsOpened { number, ps, incarnation, event, outbound }).await?;
        let inputs = self.inputs.clone();
        self.tasks.spawn(async move {
            while let Some(Ok(message)) = messages.next().await {
                if let Some(ps_message::Kind::Spending(spending)) = &message.kind
                    && let Some(load) = spending.load
                    && inputs.send(Input::PsLoad { ps, load }).await.is_err()
                {
                    return;
                }
                let input = match message.kind {
                    None => continue,
                    Some(ps_message::Kind::Sets(sets)) => Input::PsSets { ps, sets },
                    Some(kind) => match convert::ps_event(ps, incarnation, kind) {
                        Ok(Some(event)) => Input::PsSaid { number, ps, event },
                        Ok(None) => continue,
                        Err(_) => break,
                    },
                };
                if inputs.send(input).await.is_err() {
                    return;
                }
            }
            // The engine may be gone already, and then nobody needs to know.
            let _ = inputs.send(Input::PsClosed { number, ps }).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(commands))))
    }

    async fn status(
        &self,
        _request: Request<proto::StatusRequest>,
    ) -> Result<Response<proto::JobStatus>, Status> {
        self.ask(Input::Status).await.map(Response::new)
    }

    async fn scale(
        &self,
        request: Request<proto::ScaleRequest>,
    ) -> Result<Response<proto::ScaleReply>, Status> {
        let workers = request.into_inner().workers;
        self.ask(|reply| Input::Scale { workers, reply }).await?.map(Response::new)
    }

    async fn stop(
        &self,
        request: Request<proto::StopRequest>,
    ) -> Result<Response<proto::StopReply>, Status> {
        let reason = request.into_inner().reason;
        self.input(Input::Event(Event::Stop { reason, with_checkpoint: true })).await?;
        Ok(Response::new(proto::StopReply {}))
    }

    async fn audit(
        &self,
        _request: Request<proto::AuditRequest>,
    ) -> Result<Response<proto::AuditReport>, Status> {
        self.ask(Input::Audit).await?.map(Response::new)
    }

    async fn harm(
        &self,
        request: Request<proto::HarmRequest>,
    ) -> Result<Response<proto::HarmReply>, Status> {
        let (instance, harm) = convert::harm(request.get_ref())?;
        self.ask(|reply| Input::Harm { instance, harm, reply }).await?.map(Response::new)
    }
}

async fn first_message<M>(messages: &mut Streaming<M>) -> Result<M, Status> {
    let first = tokio::time::timeout(HELLO_TIMEOUT, messages.next()).await;
    first
        .map_err(|_| Status::deadline_exceeded("no hello received in time"))?
        .ok_or_else(|| Status::invalid_argument("the stream ended before the hello"))?
}

fn check_protocol(theirs: u32) -> Result<(), Status> {
    if theirs == CONTROL_PROTOCOL {
        return Ok(());
    }
    Err(Status::failed_precondition(format!(
        "this master uses protocol {CONTROL_PROTOCOL}, the caller uses {theirs}; run the same \
         build everywhere"
    )))
}

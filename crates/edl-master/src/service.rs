// SPDX-License-Identifier: Apache-2.0
//! The master on the wire: decode, pass on, encode. Nothing is decided here.

use std::error::Error as _;
use std::fmt::Display;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use edl_core::id::{Incarnation, PsId, WorkerId};
use edl_core::job::{Event, Refusal, STOP_TIMEOUT};
use edl_core::platform::InstanceId;
use edl_core::{server, worker};
use edl_net::CONTROL_PROTOCOL;
use edl_net::proto::master_server::Master;
use edl_net::proto::{
    self, PsCommand, PsMessage, WorkerCommand, WorkerMessage, ps_message, worker_message,
};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use crate::convert;
use crate::peers::{Outbound, QUEUE};

/// How long a new stream may take to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Everything that reaches the engine from outside.
pub(crate) enum Input {
    WorkerOpened {
        number: u64,
        worker: WorkerId,
        incarnation: Incarnation,
        pid: u32,
        outbound: Outbound<WorkerCommand>,
    },
    WorkerMessage {
        number: u64,
        worker: WorkerId,
        incarnation: Incarnation,
        report: worker::Report,
    },
    WorkerClosed {
        number: u64,
        worker: WorkerId,
        /// Why its last message was refused.
        refused: Option<Status>,
    },
    PsOpened {
        number: u64,
        ps: PsId,
        incarnation: Incarnation,
        event: Event,
        outbound: Outbound<PsCommand>,
    },
    PsMessage {
        number: u64,
        ps: PsId,
        incarnation: Incarnation,
        report: server::Report,
        load: Option<proto::PsLoad>,
    },
    PsClosed {
        number: u64,
        ps: PsId,
        refused: Option<Status>,
    },
    Status(oneshot::Sender<proto::JobStatus>),
    /// Status and history, as the page reads them.
    Everything(oneshot::Sender<String>),
    /// A request that the machine decides on.
    Request {
        event: Event,
        reply: Reply,
    },
    Audit(oneshot::Sender<Result<proto::AuditReport, Status>>),
}

impl Input {
    /// Whether it says no more than that its sender lives.
    pub(crate) fn is_sign_of_life(&self) -> bool {
        matches!(
            self,
            Self::WorkerMessage {
                report: worker::Report::Heartbeat { .. } | worker::Report::Spending(_),
                ..
            } | Self::PsMessage {
                report: server::Report::Heartbeat | server::Report::Spending(_),
                ..
            }
        )
    }
}

/// Takes the number of workers requested before, or the reason of a refusal.
pub(crate) type Reply = oneshot::Sender<Result<u32, Status>>;

/// The gRPC service of one master.
pub(crate) struct Service {
    inputs: Inputs,
    streams: AtomicU64,
    tasks: TaskTracker,
}

type Commands<C> = Pin<Box<dyn Stream<Item = Result<C, Status>> + Send>>;

/// The way to the engine, for everything that reaches it from outside.
#[derive(Clone)]
pub(crate) struct Inputs(pub(crate) mpsc::Sender<Input>);

impl Inputs {
    async fn send(&self, input: Input) -> Result<(), Status> {
        self.0.send(input).await.map_err(|_| stopping())
    }

    pub(crate) async fn ask<T>(
        &self,
        input: impl FnOnce(oneshot::Sender<T>) -> Input,
    ) -> Result<T, Status> {
        let (reply, answer) = oneshot::channel();
        self.send(input(reply)).await?;
        answer.await.map_err(|_| stopping())
    }

    /// Lets the job decide; returns the number of workers wanted before.
    pub(crate) async fn request(&self, event: Event) -> Result<u32, Status> {
        self.ask(|reply| Input::Request { event, reply }).await?
    }
}

fn stopping() -> Status {
    Status::unavailable("the master is stopping")
}

impl Service {
    pub(crate) fn new(inputs: Inputs, tasks: TaskTracker) -> Self {
        Self { inputs, streams: AtomicU64::new(0), tasks }
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
        let (hello, messages) = hello(request, |first: WorkerMessage| {
            let Some(worker_message::Kind::Hello(hello)) = first.kind else {
                return Err(Status::invalid_argument("a worker's first message must be a hello"));
            };
            check_protocol(hello.protocol)?;
            Ok(hello)
        })
        .await?;
        let number = self.next_stream();
        let (worker, incarnation) = (WorkerId(hello.worker), Incarnation(hello.incarnation));
        let (outbound, commands) = mpsc::channel(QUEUE);
        self.inputs
            .send(Input::WorkerOpened { number, worker, incarnation, pid: hello.pid, outbound })
            .await?;
        let inputs = self.inputs.clone();
        self.tasks.spawn(async move {
            let refused = pass_on(messages, worker.into(), &inputs, |message| {
                let report = convert::worker_report(message)?;
                Ok(Input::WorkerMessage { number, worker, incarnation, report })
            });
            let closed = Input::WorkerClosed { number, worker, refused: refused.await };
            // The engine may be gone already.
            let _ = inputs.send(closed).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(commands))))
    }

    async fn ps_session(
        &self,
        request: Request<Streaming<PsMessage>>,
    ) -> Result<Response<Self::PsSessionStream>, Status> {
        let ((ps, incarnation, event), messages) = hello(request, |first: PsMessage| {
            let Some(ps_message::Kind::Hello(hello)) = first.kind else {
                return Err(Status::invalid_argument("a server's first message must be a hello"));
            };
            check_protocol(hello.protocol)?;
            Ok((PsId(hello.ps), Incarnation(hello.incarnation), convert::ps_hello(hello)?))
        })
        .await?;
        let number = self.next_stream();
        let (outbound, commands) = mpsc::channel(QUEUE);
        self.inputs.send(Input::PsOpened { number, ps, incarnation, event, outbound }).await?;
        let inputs = self.inputs.clone();
        self.tasks.spawn(async move {
            let refused = pass_on(messages, ps.into(), &inputs, |message| {
                let (report, load) = convert::ps_report(message)?;
                Ok(Input::PsMessage { number, ps, incarnation, report, load })
            });
            let closed = Input::PsClosed { number, ps, refused: refused.await };
            // The engine may be gone already.
            let _ = inputs.send(closed).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(commands))))
    }

    async fn status(
        &self,
        _request: Request<proto::StatusRequest>,
    ) -> Result<Response<proto::JobStatus>, Status> {
        self.inputs.ask(Input::Status).await.map(Response::new)
    }

    async fn scale(
        &self,
        request: Request<proto::ScaleRequest>,
    ) -> Result<Response<proto::ScaleReply>, Status> {
        let workers = request.into_inner().workers;
        let before = self.inputs.request(Event::Scale { workers }).await?;
        Ok(Response::new(proto::ScaleReply { before, after: workers }))
    }

    async fn stop(
        &self,
        request: Request<proto::StopRequest>,
    ) -> Result<Response<proto::StopReply>, Status> {
        let proto::StopRequest { reason, within_ms } = request.into_inner();
        let within = within_ms.map_or(STOP_TIMEOUT, Duration::from_millis);
        // Never refused. If the engine is gone, the job has ended and the process is about to exit;
        // an error would make the caller kill it.
        let _ = self.inputs.request(Event::Stop { reason, within }).await;
        Ok(Response::new(proto::StopReply {}))
    }

    async fn audit(
        &self,
        _request: Request<proto::AuditRequest>,
    ) -> Result<Response<proto::AuditReport>, Status> {
        self.inputs.ask(Input::Audit).await?.map(Response::new)
    }

    async fn chaos(
        &self,
        request: Request<proto::ChaosRequest>,
    ) -> Result<Response<proto::ChaosReply>, Status> {
        let meant = convert::chaos(request.get_ref());
        let event = meant.map_err(|why| refuse(sender(request.remote_addr()), why))?;
        self.inputs.request(event).await?;
        Ok(Response::new(proto::ChaosReply {}))
    }
}

/// Reads who has opened a stream.
async fn hello<M, H>(
    request: Request<Streaming<M>>,
    read: impl FnOnce(M) -> Result<H, Status>,
) -> Result<(H, Streaming<M>), Status> {
    let from = request.remote_addr();
    let mut messages = request.into_inner();
    let first = async {
        let ended = || Status::invalid_argument("the stream ended before the hello");
        read(next(&mut messages).await?.ok_or_else(ended)?)
    };
    let late = |_| Status::deadline_exceeded("no hello received in time");
    let first = tokio::time::timeout(HELLO_TIMEOUT, first).await.map_err(late).flatten();
    let hello = first.map_err(|why| refuse(sender(from), why))?;
    Ok((hello, messages))
}

/// Passes messages on until their stream ends or one of them is invalid; then returns why.
async fn pass_on<M>(
    mut messages: Streaming<M>,
    from: InstanceId,
    inputs: &Inputs,
    read: impl Fn(M) -> Result<Input, Status>,
) -> Option<Status> {
    loop {
        match next(&mut messages).await.and_then(|message| message.map(&read).transpose()) {
            Ok(input) => inputs.send(input?).await.ok()?,
            Err(why) => return Some(refuse(from, why)),
        }
    }
}

/// The next message, if the stream continues. A message that cannot be decoded is refused.
async fn next<M>(messages: &mut Streaming<M>) -> Result<Option<M>, Status> {
    match messages.message().await {
        // A connection that broke has a cause; a message that cannot be decoded has none.
        Err(broken) if broken.source().is_some() => Ok(None),
        Err(status) => {
            let why = format!("cannot decode a message: {}", status.message());
            Err(Status::invalid_argument(why))
        }
        Ok(message) => Ok(message),
    }
}

/// Logs why a message is refused, once; the answer is up to the caller.
pub(crate) fn refuse(from: impl Display, why: Status) -> Status {
    tracing::warn!(sender = %from, reason = why.message(), "refused a message");
    why
}

/// Makes a parameter server exit whose slot another process has.
pub(crate) fn server_replaced() -> Status {
    Status::failed_precondition("this server was replaced")
}

/// The one place where the machine's refusals become gRPC codes.
pub(crate) fn to_status(refusal: Refusal) -> Status {
    let why = refusal.to_string();
    match refusal {
        Refusal::Ended => Status::unavailable(why),
        Refusal::Lanes { .. }
        | Refusal::Members { .. }
        | Refusal::MaxWorkers { .. }
        | Refusal::MinWorkers { .. } => Status::invalid_argument(why),
        Refusal::OnlyKill | Refusal::NoChaos => Status::failed_precondition(why),
        Refusal::NotRunning(_) => Status::not_found(why),
    }
}

/// Who sent something, by its address.
pub(crate) fn sender(address: Option<SocketAddr>) -> String {
    address.map_or_else(|| "unknown".to_owned(), |address| address.to_string())
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

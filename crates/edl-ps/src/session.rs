// SPDX-License-Identifier: Apache-2.0
//! The process: listens on the data plane and holds a session with the master.
//!
//! The session may break at any time; the server goes on serving what it holds and connects
//! again. What the master orders runs beside the session, so that heartbeats never stop.

mod orders;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use edl_core::error::chain;
use edl_core::goodput::Kind;
use edl_core::id::{RunId, Term};
use edl_core::spec::JobSpec;
use edl_net::handshake::ClientId;
use edl_net::proto::master_client::MasterClient;
use edl_net::proto::{
    Heartbeat, PsCommand, PsHello, PsLoad, PsMessage, PsWelcome, Spending, ps_command, ps_message,
};
use edl_net::wire::Stream;
use edl_net::{CONTROL_PROTOCOL, tls};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};

use crate::address::Listeners;
use crate::serve::Front;
use crate::store::Store;
use crate::{Config, Error};

/// Tries to reach the master come at this distance, doubled up to the second one.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const LAST_BACKOFF: Duration = Duration::from_secs(1);
/// One connection, its handshake and the master's first answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Messages that may wait for the master to read them.
const OUT_QUEUE: usize = 64;
/// Until the welcome says otherwise.
const FIRST_HEARTBEAT: Duration = Duration::from_secs(1);
/// Connections that cannot be accepted are tried again after this pause.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Runs a parameter server until the master stops it or `shutdown` is cancelled.
///
/// The future is boxed so that it is compiled in this crate, once, and not in every crate that
/// awaits it.
pub fn run(
    config: Config,
    shutdown: CancellationToken,
) -> Pin<Box<dyn Future<Output = Result<(), Error>> + Send>> {
    Box::pin(serve(config, shutdown))
}

async fn serve(config: Config, shutdown: CancellationToken) -> Result<(), Error> {
    let listeners = Listeners::bind(&config).await?;
    let random = ClientId::random().map_err(Error::Random)?.0;
    let incarnation = random.iter().take(8).fold(0, |word, byte| word << 8 | u64::from(*byte));
    let store = Arc::new(Store::new(config.threads));
    let front = Arc::new(Front::new(Arc::clone(&store), config.key.clone()));
    let (address, unix_path) =
        (listeners.address.clone(), listeners.unix_path.to_string_lossy().into_owned());
    tracing::info!(ps = %config.ps, address, unix_path, "parameter server listening");
    let mut doors = JoinSet::new();
    doors.spawn(accept_all(Arc::clone(&front), listeners));
    let member = Member {
        broken: store.broken(),
        store: Arc::clone(&store),
        front: Arc::clone(&front),
        config,
        address,
        unix_path,
        incarnation,
        term: Term(0),
        welcome: None,
        is_welcome: false,
        orders: JoinSet::new(),
    };
    let ended = member.keep_session(&shutdown).await;
    doors.shutdown().await;
    // Joins threads: not a job for the executor's own.
    let closed = tokio::task::spawn_blocking(move || {
        store.close();
        front.close();
    });
    // An error could only be a panic, which has been printed, and all ends here anyway.
    let _ = closed.await;
    ended
}

/// Lets data connections in, for ever.
async fn accept_all(front: Arc<Front>, listeners: Listeners) {
    loop {
        let stream = tokio::select! {
            tcp = listeners.tcp.accept() => tcp
                .and_then(|(stream, _)| stream.into_std())
                .map_err(accept_failed)
                .and_then(Stream::tcp),
            unix = listeners.unix.accept() => unix
                .and_then(|(stream, _)| stream.into_std())
                .map_err(accept_failed)
                .and_then(Stream::unix),
        };
        if let Err(error) = stream.and_then(|stream| front.admit(stream)) {
            tracing::warn!(%error, "cannot accept a connection");
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }
}

fn accept_failed(source: std::io::Error) -> edl_net::data::Error {
    edl_net::data::Error::Io { action: "accept a connection".into(), source }
}

/// A parameter server as the master knows it.
struct Member {
    config: Config,
    store: Arc<Store>,
    front: Arc<Front>,
    broken: watch::Receiver<bool>,
    address: String,
    unix_path: String,
    incarnation: u64,
    /// The highest seen.
    term: Term,
    welcome: Option<Welcome>,
    /// Whether the last session came as far as a welcome.
    is_welcome: bool,
    /// What the master ordered and is being done; the result is what to tell it.
    orders: JoinSet<PsMessage>,
}

/// What the master said about the job.
#[derive(Clone)]
struct Welcome {
    spec: Arc<JobSpec>,
    heartbeat: Duration,
}

/// How a session ended.
enum Ended {
    /// The master said that the work is done.
    Stopped(String),
    /// The connection broke.
    Broken(String),
}

impl Member {
    async fn keep_session(mut self, shutdown: &CancellationToken) -> Result<(), Error> {
        let (mut attempt, mut backoff) = (0_usize, FIRST_BACKOFF);
        let mut broken = self.broken.clone();
        loop {
            let ended = tokio::select! {
                () = shutdown.cancelled() => return Ok(()),
                _ = broken.wait_for(|is_broken| *is_broken) => return Err(Error::OwnerPanicked),
                ended = self.session(attempt) => ended?,
            };
            match ended {
                Ended::Stopped(reason) => {
                    tracing::info!(reason, "parameter server stopping");
                    return Ok(());
                }
                Ended::Broken(reason) => {
                    self.config.place.master_answers(false);
                    if self.is_welcome {
                        (attempt, backoff) = (0, FIRST_BACKOFF);
                    }
                    // Loud once; a master that is long away is tried every second.
                    if attempt == 0 {
                        tracing::warn!(reason, "no session with the master; retrying");
                    }
                }
            }
            tokio::select! {
                () = shutdown.cancelled() => return Ok(()),
                () = tokio::time::sleep(backoff) => {}
            }
            (attempt, backoff) = (attempt + 1, (backoff * 2).min(LAST_BACKOFF));
        }
    }

    /// One session, from the hello to its end.
    async fn session(&mut self, attempt: usize) -> Result<Ended, Error> {
        self.is_welcome = false;
        let (out, mut commands) = match self.open(attempt).await? {
            Ok(session) => session,
            Err(reason) => return Ok(Ended::Broken(reason)),
        };
        let mut heartbeat = heartbeats(FIRST_HEARTBEAT);
        loop {
            tokio::select! {
                command = commands.message() => {
                    let kind = match command {
                        Ok(Some(PsCommand { kind })) => kind,
                        Ok(None) => return Ok(Ended::Broken("the master closed the stream".into())),
                        Err(status) => return refused(&status),
                    };
                    match kind {
                        Some(ps_command::Kind::Welcome(welcome)) => {
                            if let Some(reason) = self.greet(welcome)? {
                                return Ok(Ended::Broken(reason));
                            }
                            self.is_welcome = true;
                            self.config.place.master_answers(true);
                            heartbeat = heartbeats(self.heartbeat());
                        }
                        Some(ps_command::Kind::Stop(stop)) => {
                            return Ok(Ended::Stopped(stop.reason));
                        }
                        Some(order) if self.is_welcome => self.obey(order),
                        Some(_) => tracing::warn!("ignored an order before the welcome"),
                        None => tracing::warn!("ignored an unknown order"),
                    }
                }
                Some(done) = self.orders.join_next(), if self.is_welcome && !self.orders.is_empty() => {
                    // A panic in an order has been printed; the master will ask again.
                    let Ok(message) = done else { continue };
                    if timeout(CONNECT_TIMEOUT, out.send(message)).await.is_err() {
                        return Ok(Ended::Broken("the master does not read messages".into()));
                    }
                }
                _ = heartbeat.tick() => {
                    // A full queue says that the master is not reading: it will miss us anyway.
                    let _ = out.try_send(self.beat());
                    let _ = out.try_send(self.spending());
                }
            }
        }
    }

    /// Connects and says hello.
    async fn open(
        &mut self,
        attempt: usize,
    ) -> Result<Result<(mpsc::Sender<PsMessage>, Streaming<PsCommand>), String>, Error> {
        let address = self.master_address(attempt);
        let channel = match tls::connect(&address, &self.config.key, CONNECT_TIMEOUT).await {
            Ok(channel) => channel,
            Err(error) if self.welcome.is_none() && error.is_untrusted() => {
                return Err(Error::OtherKey(address));
            }
            Err(error) => return Ok(Err(chain(&error))),
        };
        let (out, queue) = mpsc::channel(OUT_QUEUE);
        // The queue is empty: this cannot fail or wait.
        let _ = out.send(self.hello().await).await;
        let mut master = MasterClient::new(channel).max_decoding_message_size(edl_net::MAX_MESSAGE);
        let session = master.ps_session(ReceiverStream::new(queue));
        match timeout(CONNECT_TIMEOUT, session).await {
            Ok(Ok(commands)) => Ok(Ok((out, commands.into_inner()))),
            Ok(Err(status)) => match refused(&status)? {
                Ended::Broken(reason) | Ended::Stopped(reason) => Ok(Err(reason)),
            },
            Err(_) => Ok(Err(format!("the master at `{address}` does not respond"))),
        }
    }

    /// The address given and the one in the job's folder take turns: a master that was started
    /// again listens elsewhere, but the file may be older than it.
    fn master_address(&self, attempt: usize) -> String {
        let published = || {
            let text = std::fs::read(self.config.job_dir.join("master.json")).ok()?;
            let json: serde_json::Value = serde_json::from_slice(&text).ok()?;
            Some(json.get("address")?.as_str()?.to_owned())
        };
        let given = || self.config.master_addr.clone();
        if attempt.is_multiple_of(2) { given() } else { published().unwrap_or_else(given) }
    }

    async fn hello(&self) -> PsMessage {
        let (generation, sets) = orders::inspect(&self.store).await;
        PsMessage {
            kind: Some(ps_message::Kind::Hello(PsHello {
                protocol: CONTROL_PROTOCOL,
                ps: self.config.ps.0,
                incarnation: self.incarnation,
                pid: self.config.place.pid,
                address: self.address.clone(),
                unix_path: self.unix_path.clone(),
                generation: generation.0,
                sets,
            })),
        }
    }

    /// Takes the master's welcome; a reason if it is not to be heard.
    fn greet(&mut self, welcome: PsWelcome) -> Result<Option<String>, Error> {
        let PsWelcome { term, run, spec_json, heartbeat_secs } = welcome;
        if Term(term) < self.term {
            return Ok(Some(format!("the master's term {term} is older than {}", self.term)));
        }
        let Some(theirs) = RunId::parse(&run) else {
            return Err(Error::Refused(format!("`{run}` is not a valid run ID")));
        };
        let ours = self.front.set_run(theirs);
        if ours != theirs {
            return Err(Error::OtherRun { ours: ours.to_string(), theirs: run });
        }
        let spec = serde_json::from_str(&spec_json)
            .map_err(|error| Error::Refused(format!("invalid job description: {error}")))?;
        self.term = Term(term);
        let heartbeat = Duration::try_from_secs_f64(heartbeat_secs)
            .ok()
            .filter(|heartbeat| !heartbeat.is_zero())
            .unwrap_or(FIRST_HEARTBEAT);
        self.welcome = Some(Welcome { spec: Arc::new(spec), heartbeat });
        tracing::info!(term, run, "connected to the master");
        Ok(None)
    }

    fn heartbeat(&self) -> Duration {
        self.welcome.as_ref().map_or(FIRST_HEARTBEAT, |welcome| welcome.heartbeat)
    }

    fn beat(&self) -> PsMessage {
        let (phase, waiting_for) = self.store.activity();
        let beat = Heartbeat {
            step: self.store.version(),
            phase: phase.into(),
            waiting_for: waiting_for.into(),
        };
        PsMessage { kind: Some(ps_message::Kind::Heartbeat(beat)) }
    }
}

impl Member {
    fn spending(&self) -> PsMessage {
        let (spent, pulls, pushes, rows) = self.store.load_of();
        let last = if self.store.activity().0 == "loading" { Kind::Heal } else { Kind::Idle };
        let spending = Spending {
            spent: Some(spent.into()),
            last: last.name().into(),
            step: 0,
            load: Some(PsLoad { pulls, pushes, rows }),
        };
        PsMessage { kind: Some(ps_message::Kind::Spending(spending)) }
    }
}

fn heartbeats(period: Duration) -> tokio::time::Interval {
    let mut heartbeats = interval(period);
    heartbeats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    heartbeats
}

/// What a status of the master means: most heal by themselves, some never.
fn refused(status: &Status) -> Result<Ended, Error> {
    match status.code() {
        Code::FailedPrecondition | Code::InvalidArgument | Code::PermissionDenied => {
            Err(Error::Refused(status.message().to_owned()))
        }
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::DeadlineExceeded
        | Code::NotFound
        | Code::AlreadyExists
        | Code::ResourceExhausted
        | Code::Aborted
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::Internal
        | Code::Unavailable
        | Code::DataLoss
        | Code::Unauthenticated => Ok(Ended::Broken(status.to_string())),
    }
}

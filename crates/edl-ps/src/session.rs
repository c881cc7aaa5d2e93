// SPDX-License-Identifier: Apache-2.0
//! The process: listens on the data plane, and connects the store with its master.
//!
//! When the control session breaks, the server keeps serving what it holds. Nothing here waits for
//! an order to be done, so heartbeats never stop.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use edl_core::goodput::{TimeKind, TimeReport};
use edl_core::server::Report;
use edl_core::worker::Priority;
use edl_net::CONTROL_PROTOCOL;
use edl_net::control::{self, Boxed, Event};
use edl_net::convert;
use edl_net::handshake::ClientId;
use edl_net::proto::{PsCommand, PsHello, PsLoad, PsMessage, Spending, ps_command, ps_message};
use edl_net::wire::Stream;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::address::Listeners;
use crate::serve::Front;
use crate::store::Store;
use crate::{Config, Error};

/// Connections that cannot be accepted are tried again after this pause.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A server that is asked to exit waits this long to hear that its job stops,
const NEWS_TIMEOUT: Duration = Duration::from_secs(2);
/// and this long for the end of a job that stops. Its platform kills it before, after a grace period
/// that a user may set.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(600);

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
    let (sender, reports) = unbounded_channel();
    let store = Store::new(config.threads, config.job_dir.clone(), sender);
    let store = Arc::new(store.map_err(Error::Thread)?);
    let front = Arc::new(Front::new(Arc::clone(&store), config.key.clone()));
    let hello = PsHello {
        protocol: CONTROL_PROTOCOL,
        ps: config.ps.0,
        incarnation,
        pid: config.place.pid,
        address: listeners.address.clone(),
        unix_path: listeners.unix_path.to_string_lossy().into_owned(),
        ..PsHello::default()
    };
    let PsHello { address, unix_path, .. } = &hello;
    tracing::info!(ps = %config.ps, address, unix_path, "parameter server listening");
    let mut accepting = JoinSet::new();
    accepting.spawn(accept_all(Arc::clone(&front), listeners));
    let session = Session {
        control: control(&config, hello, Arc::clone(&store)),
        store: Arc::clone(&store),
        front: Arc::clone(&front),
        reports,
    };
    let ended = session.run(&shutdown).await;
    accepting.shutdown().await;
    // Joins threads: not a job for the executor's own.
    let closed = tokio::task::spawn_blocking(move || {
        store.close();
        front.close();
    });
    // An error could only be a panic, which has been printed, and all ends here anyway.
    let _ = closed.await;
    ended
}

/// Accepts data connections.
async fn accept_all(front: Arc<Front>, listeners: Listeners) {
    loop {
        let stream = tokio::select! {
            tcp = listeners.tcp.accept() => tcp
                .and_then(|(stream, _)| stream.into_std())
                .and_then(|stream| Stream::tcp(stream).map_err(io::Error::other)),
            unix = listeners.unix.accept() => unix
                .and_then(|(stream, _)| stream.into_std())
                .and_then(|stream| Stream::unix(stream).map_err(io::Error::other)),
        };
        let admitted = stream.and_then(|stream| front.admit(stream).map_err(io::Error::other));
        if let Err(error) = admitted {
            front.strangers().log_failure(&error);
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }
}

/// The session with the master. Every hello reports what the server holds.
fn control(config: &Config, hello: PsHello, store: Arc<Store>) -> control::Session<PsCommand> {
    let config = control::Config {
        master_addr: config.master_addr.clone(),
        key: config.key.clone(),
        job_dir: config.job_dir.clone(),
        place: config.place.clone(),
        // A server that gave up would lose the state that it holds.
        patience: None,
    };
    control::Session::new(config, move || -> Boxed<'static, PsMessage> {
        let (hello, store) = (hello.clone(), Arc::clone(&store));
        Box::pin(async move {
            // A store that does not answer has stopped, and holds nothing.
            let (generation, states) = store.inspect().await.unwrap_or_default();
            convert::server::hello(hello, generation, states)
        })
    })
}

/// The store and its session with the master.
struct Session {
    control: control::Session<PsCommand>,
    store: Arc<Store>,
    front: Arc<Front>,
    reports: UnboundedReceiver<Report>,
}

/// When a server that is asked to exit does so. If everything is asked to exit at once, the master
/// stops the job, and needs its servers for the last checkpoint.
#[derive(Default)]
struct Departure {
    has_master: bool,
    /// The job stops.
    is_draining: bool,
    /// Set once it was asked to exit.
    exit_at: Option<Instant>,
}

impl Departure {
    fn asked(&mut self) {
        let stay = match (self.has_master, self.is_draining) {
            (false, _) => Duration::ZERO,
            (true, false) => NEWS_TIMEOUT,
            (true, true) => DRAIN_TIMEOUT,
        };
        self.exit_at = Some(Instant::now() + stay);
    }

    fn heard(&mut self, command: &ps_command::Kind) {
        match command {
            ps_command::Kind::Welcome(_) => (self.has_master, self.is_draining) = (true, false),
            ps_command::Kind::Drain(_) => self.is_draining = true,
            ps_command::Kind::Load(_)
            | ps_command::Kind::Checkpoint(_)
            | ps_command::Kind::Inspect(_)
            | ps_command::Kind::Stop(_)
            | ps_command::Kind::Serve(_) => return,
        }
        if self.exit_at.is_some() {
            self.asked();
        }
    }

    fn master_lost(&mut self) {
        self.has_master = false;
        if self.exit_at.is_some() {
            self.asked();
        }
    }
}

impl Session {
    async fn run(mut self, shutdown: &CancellationToken) -> Result<(), Error> {
        let mut broken = self.store.broken();
        let mut departure = Departure::default();
        loop {
            let exit_at = departure.exit_at.unwrap_or_else(Instant::now);
            tokio::select! {
                () = shutdown.cancelled(), if departure.exit_at.is_none() => departure.asked(),
                () = sleep_until(exit_at), if departure.exit_at.is_some() => return Ok(()),
                _ = broken.wait_for(|is_broken| *is_broken) => return Err(Error::OwnerPanicked),
                event = self.control.event() => match event? {
                    Event::Command(PsCommand { kind: Some(ps_command::Kind::Stop(stop)) }) => {
                        tracing::info!(reason = stop.reason, "parameter server stopping");
                        return Ok(());
                    }
                    Event::Command(PsCommand { kind: Some(command) }) => {
                        departure.heard(&command);
                        self.obey(command);
                    }
                    Event::Command(_) => tracing::warn!("ignored an unknown command"),
                    Event::Heartbeat => {
                        self.send(convert::server::message(Report::Heartbeat));
                        self.send(self.spending());
                    }
                    Event::Lost => departure.master_lost(),
                },
                Some(report) = self.reports.recv() => {
                    self.send(convert::server::message(report));
                }
            }
        }
    }

    fn obey(&self, command: ps_command::Kind) {
        let Some(job) = self.control.job() else { return };
        match convert::server::event(command, &job.spec) {
            Some(event) => self.store.handle(event),
            // A welcome.
            None => self.front.set_run(job.run, job.spec.encrypt_data.into()),
        }
    }

    fn send(&mut self, message: PsMessage) {
        self.control.outbox.push(Priority::Last, message);
    }

    fn spending(&self) -> PsMessage {
        let (spent, pulls, pushes, rows) = self.store.load_of();
        let last = if self.store.is_loading() { TimeKind::Heal } else { TimeKind::Idle };
        let load = Some(PsLoad { pulls, pushes, rows });
        let spending = Spending { load, ..TimeReport { spent, last, step: 0, records: 0 }.into() };
        PsMessage { kind: Some(ps_message::Kind::Spending(spending)) }
    }
}

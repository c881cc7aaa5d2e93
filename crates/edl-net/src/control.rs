// SPDX-License-Identifier: Apache-2.0
//! The control session of a worker or parameter server: one stream to the master after another.
//!
//! [`Follow`] makes the decisions. This file connects, waits and moves messages.

mod follow;

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use edl_core::error::chain;
use edl_core::job_dir::JobDir;
use edl_core::time::Time;
use edl_core::worker::Outbox;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Response, Status, Streaming};
use tracing::{debug, info, warn};

use crate::key::JobKey;
use crate::place::Place;
use crate::proto::{self, master_client::MasterClient, ps_command, worker_command};
use crate::tls;

pub use follow::{Error, Failure, Follow, JobInfo, Welcome};

/// TCP and TLS.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// From the hello to the opened stream, and from there to the welcome.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Messages on their way into the stream. They are lost if it breaks.
const MAX_SENDING: usize = 16;

/// Boxed, so that a caller in another crate does not compile the future as part of its own.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
type Opening<C> = Boxed<'static, Result<Response<Streaming<C>>, Status>>;

/// What a master sends to processes of one role.
pub trait Command: Sized + Send + 'static {
    /// What the processes send to the master.
    type Message: Send + 'static;

    /// Opens the stream of this role.
    fn open(channel: Channel, messages: mpsc::Receiver<Self::Message>) -> Opening<Self>;

    /// The welcome, if this is one.
    fn welcome(&self) -> Option<Welcome<'_>>;
}

/// Where the master is, and how to connect to it.
#[derive(Clone, Debug)]
pub struct Config {
    /// `host:port`. A master that was restarted elsewhere is found through the job's folder.
    pub master_addr: String,
    pub key: JobKey,
    pub job_dir: PathBuf,
    pub place: Place,
    /// How long to look for a master; `None` means forever.
    pub patience: Option<Duration>,
}

/// What happens in a session.
pub enum Event<C> {
    /// A command of the master that is followed. The first one on a stream is its welcome.
    Command(C),
    /// A heartbeat is due, and the stream has capacity for it.
    Heartbeat,
    /// The master is gone. The session looks for it or its successor.
    Lost,
}

/// The session of one process, across all its streams.
pub struct Session<C: Command> {
    /// Messages to the master, sent in order while a master is followed.
    pub outbox: Outbox<C::Message>,
    config: Config,
    hello: Box<dyn Fn() -> Boxed<'static, C::Message> + Send>,
    started: Instant,
    follow: Follow,
    stream: Option<Stream<C>>,
    /// Leads to the next stream, if there is none.
    connecting: Boxed<'static, Result<Stream<C>, Failure>>,
}

struct Stream<C: Command> {
    commands: Streaming<C>,
    messages: mpsc::Sender<C::Message>,
    /// When the welcome is overdue; after the welcome, when the next heartbeat is due.
    due: Instant,
}

impl<C: Command> Session<C> {
    /// Every stream starts with a new `hello`.
    pub fn new(
        config: Config,
        hello: impl Fn() -> Boxed<'static, C::Message> + Send + 'static,
    ) -> Self {
        let (hello, follow) = (Box::new(hello), Follow::new(config.patience));
        let connecting = connect(&config, hello(), &follow, Duration::ZERO);
        let (started, outbox) = (Instant::now(), Outbox::default());
        Self { outbox, config, hello, started, follow, stream: None, connecting }
    }

    /// The job, once a master has sent a welcome.
    #[must_use]
    pub fn job(&self) -> Option<&JobInfo> {
        self.follow.job()
    }

    /// Waits for the next event. Meanwhile, connects if necessary, and sends messages. Dropping
    /// the future loses nothing. An error ends the session.
    pub fn event(&mut self) -> Boxed<'_, Result<Event<C>, Error>> {
        Box::pin(async {
            loop {
                let failure = match self.advance().await {
                    Ok(Some(event)) => return Ok(event),
                    Ok(None) => continue,
                    Err(failure) => failure,
                };
                let Follow { is_following, n_failures, .. } = self.follow;
                // The first of many failures is news; a master of a lower term always is.
                let is_news = n_failures == 0 || matches!(failure, Failure::LowerTerm { .. });
                let (reason, now) = (failure.to_string(), self.started.elapsed());
                let delay = self.follow.failed(failure, Time::since_origin(now))?;
                match is_news {
                    true => warn!(reason, "no connection to the master; retrying"),
                    false => debug!(reason, "no connection to the master; retrying"),
                }
                self.config.place.master_answers(false);
                self.stream = None;
                self.connecting = connect(&self.config, (self.hello)(), &self.follow, delay);
                if is_following {
                    return Ok(Event::Lost);
                }
            }
        })
    }

    /// Ends the session: sends the remaining messages if a master is followed, and waits until
    /// it has read them.
    pub fn finish(&mut self, limit: Duration) -> Boxed<'_, ()> {
        Box::pin(async move {
            let stream = self.stream.take().filter(|_| self.follow.is_following);
            let Some(Stream { mut commands, messages, .. }) = stream else { return };
            let flush = async move {
                while let Some(message) = self.outbox.pop() {
                    // If the stream is broken, `commands` ends too.
                    let _ = messages.send(message).await;
                }
                // The master closes its half when it has read ours to the end.
                drop(messages);
                while let Ok(Some(_)) = commands.message().await {}
            };
            if timeout(limit, flush).await.is_err() {
                debug!("the master did not read the last messages in time");
            }
        })
    }

    async fn advance(&mut self) -> Result<Option<Event<C>>, Failure> {
        let broken = |reason: &str| Err(Failure::Broken(reason.into()));
        let Some(stream) = &mut self.stream else {
            self.stream = Some((&mut self.connecting).await?);
            return Ok(None);
        };
        let job = self.follow.job.as_ref().filter(|_| self.follow.is_following);
        tokio::select! {
            biased;
            command = stream.commands.message() => {
                let Some(command) = command? else { return broken("the master closed the stream") };
                if let Some(welcome) = command.welcome() {
                    let JobInfo { run, term, .. } = self.follow.welcome(welcome)?;
                    info!(%term, %run, "connected to the master");
                    self.config.place.master_answers(true);
                    stream.due = Instant::now();
                } else if job.is_none() {
                    warn!("ignored a command that came before the welcome");
                    return Ok(None);
                }
                Ok(Some(Event::Command(command)))
            }
            permit = stream.messages.reserve(), if job.is_some() && !self.outbox.is_empty() => {
                let Ok(permit) = permit else { return broken("the stream is closed") };
                if let Some(message) = self.outbox.pop() {
                    permit.send(message);
                }
                Ok(None)
            }
            () = sleep_until(stream.due) => {
                let Some(job) = job else { return broken("the master sent no welcome in time") };
                stream.due = Instant::now() + job.heartbeat;
                Ok(self.outbox.is_empty().then_some(Event::Heartbeat))
            }
        }
    }
}

/// Opens a stream after `delay`.
fn connect<C: Command>(
    config: &Config,
    hello: Boxed<'static, C::Message>,
    follow: &Follow,
    delay: Duration,
) -> Boxed<'static, Result<Stream<C>, Failure>> {
    let Config { master_addr, job_dir, key, .. } = config.clone();
    let n_failures = follow.n_failures;
    Box::pin(async move {
        sleep(delay).await;
        let address = address(master_addr, &job_dir, n_failures);
        let channel = match tls::connect(&address, &key, CONNECT_LIMIT).await {
            Ok(channel) => channel,
            Err(error) if error.is_untrusted() => return Err(Failure::Untrusted(address)),
            Err(error) => return Err(Failure::Broken(chain(&error))),
        };
        let (messages, outgoing) = mpsc::channel(MAX_SENDING);
        // The channel is new, so this neither fails nor waits.
        let _ = messages.send(hello.await).await;
        let opened = timeout(ANSWER_LIMIT, C::open(channel, outgoing)).await;
        let late = |_| Failure::Broken("the master did not open a stream in time".into());
        let commands = opened.map_err(late)??.into_inner();
        Ok(Stream { commands, messages, due: Instant::now() + ANSWER_LIMIT })
    })
}

/// The address to try. A restarted master may listen elsewhere and writes its address to the
/// job's folder, but that file may be missing or out of date. So both addresses take turns.
fn address(configured: String, job_dir: &Path, n_failures: u32) -> String {
    let published = || {
        let text = std::fs::read(JobDir::new(job_dir).master()).ok()?;
        let json: serde_json::Value = serde_json::from_slice(&text).ok()?;
        Some(json.get("address")?.as_str()?.to_owned())
    };
    let is_second = !n_failures.is_multiple_of(2);
    is_second.then(published).flatten().unwrap_or(configured)
}

fn client(channel: Channel) -> MasterClient<Channel> {
    MasterClient::new(channel).max_decoding_message_size(crate::MAX_MESSAGE)
}

impl Command for proto::WorkerCommand {
    type Message = proto::WorkerMessage;

    fn open(channel: Channel, messages: mpsc::Receiver<Self::Message>) -> Opening<Self> {
        Box::pin(async { client(channel).worker_session(ReceiverStream::new(messages)).await })
    }

    fn welcome(&self) -> Option<Welcome<'_>> {
        let Some(worker_command::Kind::Welcome(welcome)) = &self.kind else { return None };
        let proto::WorkerWelcome { term, run, spec_json, heartbeat_secs, .. } = welcome;
        Some(Welcome { term: *term, run, spec_json, heartbeat_secs: *heartbeat_secs })
    }
}

impl Command for proto::PsCommand {
    type Message = proto::PsMessage;

    fn open(channel: Channel, messages: mpsc::Receiver<Self::Message>) -> Opening<Self> {
        Box::pin(async { client(channel).ps_session(ReceiverStream::new(messages)).await })
    }

    fn welcome(&self) -> Option<Welcome<'_>> {
        let Some(ps_command::Kind::Welcome(welcome)) = &self.kind else { return None };
        let proto::PsWelcome { term, run, spec_json, heartbeat_secs } = welcome;
        Some(Welcome { term: *term, run, spec_json, heartbeat_secs: *heartbeat_secs })
    }
}

#[test]
fn a_master_that_moved_is_found_through_the_job_folder() {
    let folder = tempfile::tempdir().unwrap();
    let file = JobDir::new(folder.path()).master();
    let choose = |n_failures| address("old:1".into(), folder.path(), n_failures);
    assert_eq!(choose(1), "old:1", "no file");
    std::fs::write(&file, r#"{"address": "new:2", "pid": 7}"#).unwrap();
    assert_eq!([0, 1, 2].map(choose), ["old:1", "new:2", "old:1"]);
    std::fs::write(&file, "{").unwrap();
    assert_eq!(choose(1), "old:1", "a broken file");
}

// SPDX-License-Identifier: Apache-2.0
//! The thread that talks to the parameter servers, so that the compute thread never waits in a
//! socket: it can pull the parameters of the next batch while this one is trained, and can get a
//! new route while a pull waits for its round.

use std::sync::mpsc::{Receiver, RecvError, TryRecvError};
use std::time::Duration;

use edl_core::id::{BatchId, Generation};
use edl_core::worker::WorkItem;
use edl_net::data::{Route, Versions};
use tracing::{debug, warn};

use crate::servers::{Abort, Dial, Error, Pull, Push, Servers};

/// How often a thread that waits for acknowledgements checks for a new request.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A request of the compute thread. Each carries the number of its connection; a request for a
/// connection that is gone is not answered.
#[derive(Debug)]
pub(crate) enum Ask {
    Connect(Route),
    /// The item comes back with the answer.
    Pull(WorkItem, Pull),
    Push(Push),
    Skip(BatchId),
}

/// What the link reports about one connection.
pub(crate) enum News {
    Connected(Abort),
    Pulled(WorkItem, Pull, Versions),
    /// The gradient is sent; its buffers can be used again.
    Sent(Push),
    Acknowledged {
        batch: BatchId,
        generation: Generation,
    },
    /// The last news of a connection.
    Broken,
}

/// Serves one compute thread until it hangs up.
pub(crate) struct Link<T> {
    dial: Box<dyn Dial>,
    asks: Receiver<(u64, Ask)>,
    tell: T,
    line: Option<OpenConnections>,
}

struct OpenConnections {
    connection: u64,
    servers: Box<dyn Servers>,
    n_unanswered: usize,
    has_worked: bool,
}

/// The compute thread is gone.
struct HungUp;

impl<T: FnMut(u64, News)> Link<T> {
    pub(crate) fn new(dial: Box<dyn Dial>, asks: Receiver<(u64, Ask)>, tell: T) -> Self {
        Self { dial, asks, tell, line: None }
    }

    pub(crate) fn run(mut self) {
        while let Ok(asked) = self.next() {
            let Some((connection, ask)) = asked else { continue };
            if let Err(error) = self.serve(connection, ask) {
                self.broken(connection, &error);
                continue;
            }
            self.hear(Duration::ZERO);
        }
    }

    /// The next request; none after a moment in which answers may have come.
    fn next(&mut self) -> Result<Option<(u64, Ask)>, HungUp> {
        if self.line.as_ref().is_none_or(|open| open.n_unanswered == 0) {
            return self.asks.recv().map(Some).map_err(|RecvError| HungUp);
        }
        match self.asks.try_recv() {
            Ok(asked) => Ok(Some(asked)),
            Err(TryRecvError::Disconnected) => Err(HungUp),
            Err(TryRecvError::Empty) => {
                self.hear(POLL_INTERVAL);
                Ok(None)
            }
        }
    }

    fn serve(&mut self, connection: u64, ask: Ask) -> Result<(), Error> {
        if let Ask::Connect(route) = &ask {
            self.line = None;
            let line = self.dial.dial(route)?;
            let servers = line.servers;
            self.line =
                Some(OpenConnections { connection, servers, n_unanswered: 0, has_worked: false });
            (self.tell)(connection, News::Connected(line.abort));
            return Ok(());
        }
        let Some(open) = self.line.as_mut().filter(|open| open.connection == connection) else {
            return Ok(());
        };
        match ask {
            Ask::Connect(_) => {}
            Ask::Pull(item, mut pull) => {
                let versions = open.servers.pull(&mut pull)?;
                open.has_worked = true;
                (self.tell)(connection, News::Pulled(item, pull, versions));
            }
            Ask::Push(push) => {
                open.servers.push(&push)?;
                open.n_unanswered += 1;
                (self.tell)(connection, News::Sent(push));
            }
            Ask::Skip(batch) => {
                open.servers.skip(batch)?;
                open.n_unanswered += 1;
            }
        }
        Ok(())
    }

    fn broken(&mut self, connection: u64, error: &Error) {
        match self.line.take() {
            Some(OpenConnections { has_worked: true, .. }) => {
                warn!(reason = %error, "servers lost")
            }
            Some(_) | None => debug!(reason = %error, "cannot reach the servers"),
        }
        (self.tell)(connection, News::Broken);
    }

    /// Passes on the answers to gradients; waits at most `limit` for the first.
    fn hear(&mut self, mut limit: Duration) {
        while let Some(open) = self.line.as_mut().filter(|open| open.n_unanswered > 0) {
            let connection = open.connection;
            match open.servers.acknowledged(limit) {
                Ok(None) => return,
                Ok(Some(acked)) => {
                    open.n_unanswered -= 1;
                    let news =
                        News::Acknowledged { batch: acked.batch, generation: acked.generation };
                    (self.tell)(connection, news);
                }
                Err(error) => self.broken(connection, &error),
            }
            limit = Duration::ZERO;
        }
    }
}

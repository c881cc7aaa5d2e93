// SPDX-License-Identifier: Apache-2.0
//! The store on the data plane: one thread per connection decodes, asks the store and encodes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, mpsc};
use std::thread::JoinHandle;

use edl_core::id::{BatchId, RunId};
use edl_core::server::{Client, Event};
use edl_net::data::Error;
use edl_net::data::server::{
    self, ClientId, Connection, Encryption, PushRequest, Role, send_ack, send_piece, send_refusal,
};
use edl_net::key::JobKey;
use edl_net::strangers::{Place, Strangers};
use edl_net::wire::{Receiver, Sender, Stream};

use crate::store::{PullBuffers, PushBuffers, Reply, Spare, Store};

/// Clients at once; further ones are rejected. Connections whose peers have not proven the key have
/// their own limit, so they take no place from clients.
const MAX_CLIENTS: usize = 4096;

/// Accepts the clients of the store's run and serves them.
pub struct Front {
    store: Arc<Store>,
    key: JobKey,
    /// Unknown until the first welcome of a master.
    run: OnceLock<(RunId, Encryption)>,
    strangers: Arc<Strangers>,
    open: Mutex<OpenStreams>,
    next: AtomicU64,
}

#[derive(Default)]
struct OpenStreams {
    is_closed: bool,
    streams: BTreeMap<u64, Arc<Stream>>,
    n_clients: usize,
    threads: Vec<JoinHandle<()>>,
}

impl Front {
    #[must_use]
    pub fn new(store: Arc<Store>, key: JobKey) -> Self {
        let (run, open, next) = (OnceLock::new(), Mutex::default(), AtomicU64::new(0));
        Self { store, key, run, strangers: Strangers::new(), open, next }
    }

    /// Peers that have not proven the key yet.
    #[must_use]
    pub fn strangers(&self) -> &Strangers {
        &self.strangers
    }

    /// Sets the run whose clients are admitted, and whether they are to encrypt. Only the first call
    /// has an effect.
    pub fn set_run(&self, run: RunId, encryption: Encryption) {
        self.run.get_or_init(|| (run, encryption));
    }

    /// Serves a new connection on its own thread.
    pub fn admit(self: &Arc<Self>, stream: Stream) -> Result<(), Error> {
        let stream = Arc::new(stream);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut open = self.open();
        open.threads.retain(|thread| !thread.is_finished());
        if open.is_closed {
            stream.shutdown();
            return Err(Error::Closed);
        }
        let displaced = Arc::clone(&stream);
        let place = self.strangers.admit(move || displaced.shutdown());
        let front = Arc::clone(self);
        let to_serve = Arc::clone(&stream);
        let thread = std::thread::Builder::new()
            .name(format!("client-{number}"))
            .spawn(move || front.serve(number, to_serve, place))
            .map_err(|source| Error::Io { action: "start a thread".into(), source })?;
        open.streams.insert(number, stream);
        open.threads.push(thread);
        Ok(())
    }

    /// Ends all connections and waits for their threads. The store must be closed before, so
    /// that no thread waits for an owner.
    pub fn close(&self) {
        let mut open = self.open();
        open.is_closed = true;
        open.streams.values().for_each(|stream| stream.shutdown());
        let threads = std::mem::take(&mut open.threads);
        drop(open);
        for thread in threads {
            // A panic has been printed, and affected no other connection.
            let _ = thread.join();
        }
    }

    fn serve(&self, number: u64, stream: Arc<Stream>, place: Place) {
        // A connection that is closed has no address.
        let peer = stream.peer();
        let proven = server::accept(Arc::clone(&stream), &self.key, self.run.get().copied());
        drop(place);
        match proven {
            Ok(connection) => match self.serve_client(connection) {
                Ok(()) | Err(Error::Closed | Error::NotServing) => {}
                Err(error) => tracing::warn!(%error, "data connection closed"),
            },
            Err(error) => {
                if let Some(reason) = error.reason() {
                    self.strangers.log_refusal(peer, reason);
                }
            }
        }
        stream.shutdown();
        self.open().streams.remove(&number);
    }

    /// Serves a peer that has proven the key.
    fn serve_client(&self, connection: Connection) -> Result<(), Error> {
        let mut open = self.open();
        if open.n_clients >= MAX_CLIENTS {
            return Err(Error::Refused("too many connections".into()));
        }
        open.n_clients += 1;
        drop(open);
        let client = connection.client;
        let ended = match connection.role {
            Role::Pull => self.answer_pulls(connection),
            Role::Push => self.take_pushes(connection),
            Role::Member => Err(Error::Refused("a server cannot join a world".into())),
        };
        self.store.handle(Event::Left(Client(client.0)));
        self.open().n_clients -= 1;
        ended
    }

    fn answer_pulls(&self, connection: Connection) -> Result<(), Error> {
        let Connection { client, mut sender, mut receiver, .. } = connection;
        let stream = Arc::clone(receiver.stream());
        let mut buffers = PullBuffers::default();
        loop {
            buffers.request().read(&mut receiver)?;
            self.answer_pull(client, &mut buffers, &mut sender, &stream)?;
        }
    }

    fn answer_pull(
        &self,
        client: ClientId,
        buffers: &mut PullBuffers,
        sender: &mut Sender,
        stream: &Stream,
    ) -> Result<(), Error> {
        let (generation, sequence) = (buffers.request().generation, buffers.request().sequence);
        let refusal = match self.store.pull(client, buffers, &|| !stream.is_closed()) {
            Err(refusal) => Some(refusal),
            Ok(mut pieces) => loop {
                match pieces.next() {
                    Some(Ok(piece)) => {
                        send_piece(sender, generation, &piece)?;
                        pieces.recycle(piece);
                    }
                    Some(Err(refusal)) => break Some(refusal),
                    None => break None,
                }
            },
        };
        match refusal {
            None => Ok(()),
            Some(refusal) => {
                send_refusal(sender, generation, BatchId::default(), sequence, &refusal)
            }
        }
    }

    fn take_pushes(&self, connection: Connection) -> Result<(), Error> {
        let Connection { client, sender, mut receiver, .. } = connection;
        let (replies, queue) = mpsc::channel();
        let spare = Arc::new(Spare::default());
        let buffers = PushBuffers::new(replies, Arc::clone(&spare));
        std::thread::scope(|scope| {
            // Owners must never wait for a client's socket, so another thread writes.
            scope.spawn(|| write_replies(sender, queue, &spare));
            let ended = self.read_pushes(client, &mut receiver, &spare, &buffers);
            // Pushes that wait for a round keep the writer, but its replies are not read anymore.
            receiver.stream().shutdown();
            self.store.handle(Event::Left(Client(client.0)));
            drop(buffers);
            ended
        })
    }

    fn read_pushes(
        &self,
        client: ClientId,
        receiver: &mut Receiver,
        spare: &Spare,
        buffers: &PushBuffers,
    ) -> Result<(), Error> {
        loop {
            let request = PushRequest::read(receiver, spare.take())?;
            self.store.push(client, request, buffers);
        }
    }

    fn open(&self) -> MutexGuard<'_, OpenStreams> {
        self.open.lock().expect("the lock on the connections is poisoned")
    }
}

/// Sends the answers to pushes as they come.
fn write_replies(mut sender: Sender, replies: mpsc::Receiver<Reply>, spare: &Spare) {
    for reply in replies {
        let Reply { sequence, batch, generation, outcome } = reply;
        spare.recycle(sequence);
        let sent = match outcome {
            Ok(()) => send_ack(&mut sender, generation, batch, sequence),
            Err(refusal) => send_refusal(&mut sender, generation, batch, sequence, &refusal),
        };
        if sent.is_err() {
            // The reader finds out by the same socket.
            sender.stream().shutdown();
            return;
        }
    }
}

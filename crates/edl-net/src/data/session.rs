// SPDX-License-Identifier: Apache-2.0
//! The handshake over a socket: both ends come out with sealed directions, or not at all.

use std::sync::Arc;
use std::time::{Duration, Instant};

use edl_core::id::{BatchId, Generation, RunId};
use edl_core::server::Refusal;

use crate::frame::{Header, Kind, decode_refusal, encode_refusal};
use crate::handshake::{
    Challenge, ClientId, Conflict, Encryption, Hello, Offer, Role, Session, Side, nonce,
};
use crate::key::JobKey;
use crate::wire::{Error, Receiver, Sender, Stream};

/// Both directions of a connection whose ends have proven the key.
pub struct Connection {
    pub role: Role,
    pub client: ClientId,
    pub sender: Sender,
    pub receiver: Receiver,
}

/// What one side brings to a handshake.
pub(crate) struct Party<'a> {
    pub(crate) key: &'a JobKey,
    pub(crate) run: RunId,
    pub(crate) encryption: Encryption,
    /// For the whole handshake.
    pub(crate) timeout: Duration,
    /// For one frame afterwards, without progress.
    pub(crate) patience: Duration,
}

impl Party<'_> {
    fn offer(&self, stream: &Stream) -> Offer {
        match stream {
            Stream::Unix(_) => Offer::Refuses,
            Stream::Tcp(_) => self.encryption.offer(stream.is_same_host()),
        }
    }

    fn directions(&self, stream: Arc<Stream>) -> (Sender, Receiver) {
        let sender = Sender::new(Arc::clone(&stream), self.run, self.patience);
        (sender, Receiver::new(stream, self.run, self.patience))
    }

    /// The client's half.
    pub(crate) fn dial(
        &self,
        stream: Stream,
        role: Role,
        client: ClientId,
    ) -> Result<Connection, Error> {
        let start = Instant::now();
        let is_local = stream.is_local();
        let hello = Hello { role, offer: self.offer(&stream), client, nonce: nonce()? };
        let (mut sender, mut receiver) = self.directions(Arc::new(stream));
        send_frame(&mut sender, Kind::Hello, &hello.encode())?;
        let challenge: [u8; Challenge::LEN] =
            receive_frame(&mut receiver, Kind::Challenge, start, self.timeout)?;
        let Challenge { nonce, proof, offer } = Challenge::decode(&challenge)?;
        let session = Session::new((self.key, self.run), &hello, &nonce, offer, is_local);
        if !session.proves(Side::Server, proof) {
            return Err(Error::Refused("the server does not have this job's key".into()));
        }
        // Also if the two do not agree on encryption: then both know, and both can say so.
        send_frame(&mut sender, Kind::Proof, &session.proof(Side::Client))?;
        protect(&session, Side::Client, &mut sender, &mut receiver)?;
        let [] = receive_frame(&mut receiver, Kind::Accepted, start, self.timeout)?;
        Ok(Connection { role, client, sender, receiver })
    }

    /// The server's half. A client that is rejected gets the reason.
    pub(crate) fn accept(&self, stream: Arc<Stream>) -> Result<Connection, Error> {
        let (mut sender, mut receiver) = self.directions(stream);
        match self.examine(&mut sender, &mut receiver) {
            Ok(hello) => {
                Ok(Connection { role: hello.role, client: hello.client, sender, receiver })
            }
            Err(error) => {
                let refusal = encode_refusal(&Refusal::Other(error.to_string()), 0);
                // The peer may be gone, or not worth waiting for.
                let _ = send_frame(&mut sender, Kind::Refused, &refusal);
                sender.stream().shutdown();
                Err(error)
            }
        }
    }

    fn examine(&self, sender: &mut Sender, receiver: &mut Receiver) -> Result<Hello, Error> {
        let start = Instant::now();
        let is_local = sender.stream().is_local();
        let hello: [u8; Hello::LEN] = receive_frame(receiver, Kind::Hello, start, self.timeout)?;
        let hello = Hello::decode(&hello)?;
        let (nonce, offer) = (nonce()?, self.offer(sender.stream()));
        let session = Session::new((self.key, self.run), &hello, &nonce, offer, is_local);
        let challenge = Challenge { nonce, proof: session.proof(Side::Server), offer };
        send_frame(sender, Kind::Challenge, &challenge.encode())?;
        let proof: [u8; 32] = receive_frame(receiver, Kind::Proof, start, self.timeout)?;
        if !session.proves(Side::Client, proof) {
            return Err(Error::Refused("the client does not have this job's key".into()));
        }
        protect(&session, Side::Server, sender, receiver)?;
        send_frame(sender, Kind::Accepted, &[])?;
        Ok(hello)
    }
}

/// Protects both directions from now on, as `side` of the session. Fails if one side requires
/// encryption and the other refuses it.
fn protect(
    session: &Session,
    side: Side,
    sender: &mut Sender,
    receiver: &mut Receiver,
) -> Result<(), Error> {
    let conflict = |Conflict { requires }: Conflict| {
        let (here, there) = sender.stream().ends();
        let (requires, refuses) = if requires == side { (here, there) } else { (there, here) };
        Error::Refused(format!(
            "`{requires}` requires encrypted data connections, but `{refuses}` has `encrypt_data` \
             set to false; use the same value for all processes of the job"
        ))
    };
    let (out, into) = session.guards(side).map_err(conflict)?;
    sender.guard(out);
    receiver.guard(into);
    Ok(())
}

/// Refuses a client because nothing is served yet, in the run that it asks for.
pub(crate) fn turn_away(stream: Arc<Stream>, timeout: Duration) -> Result<(), Error> {
    let start = Instant::now();
    let mut receiver = Receiver::of_any_run(Arc::clone(&stream), timeout);
    // Closing before the client's hello has been read would lose the answer.
    let hello = receiver.header(&mut || expire(Kind::Hello, start, timeout))?;
    if hello.kind != Kind::Hello {
        return Err(Error::Forged { sequence: hello.sequence });
    }
    receiver.skip()?;
    let mut sender = Sender::new(stream, hello.run, timeout);
    send_frame(&mut sender, Kind::Refused, &encode_refusal(&Refusal::NotServing, 0))
}

pub(crate) fn send_frame(sender: &mut Sender, kind: Kind, payload: &[u8]) -> Result<(), Error> {
    sender.send(kind, Generation(0), BatchId::default(), &[payload])
}

/// Reads one frame of the handshake. Nothing of another kind or length is even looked at.
pub(crate) fn receive_frame<const N: usize>(
    receiver: &mut Receiver,
    kind: Kind,
    start: Instant,
    timeout: Duration,
) -> Result<[u8; N], Error> {
    let header = receiver.header(&mut || expire(kind, start, timeout))?;
    let Header { kind: theirs, length, sequence, .. } = header;
    if theirs == Kind::Refused {
        let (refusal, _) = decode_refusal(&receiver.small()?)?;
        return Err(Error::from_refusal(refusal, Generation(0)));
    }
    if theirs != kind || length != N as u64 {
        return Err(Error::Forged { sequence });
    }
    let mut payload = [0; N];
    receiver.fill(&mut payload)?;
    receiver.finish()?;
    Ok(payload)
}

fn expire(kind: Kind, start: Instant, timeout: Duration) -> Result<(), Error> {
    if start.elapsed() < timeout {
        return Ok(());
    }
    Err(Error::Deadline { waiting_for: format!("the {kind:?} of a handshake") })
}

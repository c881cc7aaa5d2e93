// SPDX-License-Identifier: Apache-2.0
//! The handshake over a socket: both directions are sealed afterwards, or the connection fails.

use std::sync::Arc;
use std::time::{Duration, Instant};

use edl_core::id::{BatchId, Generation, RunId};
use edl_core::server::Refusal;

use crate::frame::{FrameKind, Header, decode_refusal, encode_refusal};
use crate::handshake::{
    Challenge, ClientId, Conflict, Encryption, Hello, Offer, Role, Session, Side, nonce,
};
use crate::key::JobKey;
use crate::wire::{Error, Receiver, Sender, Stream};

/// What a server answers to a wrong proof.
const NO_KEY: &str = "the client does not have this job's key";

/// Both directions of a connection whose ends have proven the key.
pub struct Connection {
    pub role: Role,
    pub client: ClientId,
    pub sender: Sender,
    pub receiver: Receiver,
}

impl Connection {
    /// After the handshake, whose deadline ends with it.
    fn new(role: Role, client: ClientId, mut sender: Sender, mut receiver: Receiver) -> Self {
        sender.set_deadline(None);
        receiver.set_deadline(None);
        Self { role, client, sender, receiver }
    }
}

/// What one side brings to a handshake.
pub(crate) struct Party<'a> {
    pub(crate) key: &'a JobKey,
    pub(crate) run: RunId,
    pub(crate) encryption: Encryption,
    /// For the whole handshake, however many bytes come.
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

    /// Both directions until the end of the handshake.
    fn directions(&self, stream: Arc<Stream>) -> (Sender, Receiver) {
        let deadline = Some(Instant::now() + self.timeout);
        let mut sender = Sender::new(Arc::clone(&stream), self.run, self.patience);
        let mut receiver = Receiver::new(stream, self.run, self.patience);
        sender.set_deadline(deadline);
        receiver.set_deadline(deadline);
        (sender, receiver)
    }

    /// The client's half.
    pub(crate) fn dial(
        &self,
        stream: Stream,
        role: Role,
        client: ClientId,
    ) -> Result<Connection, Error> {
        let is_local = stream.is_local();
        let hello = Hello { role, offer: self.offer(&stream), client, nonce: nonce()? };
        let (mut sender, mut receiver) = self.directions(Arc::new(stream));
        send_frame(&mut sender, FrameKind::Hello, &hello.encode())?;
        let challenge: [u8; Challenge::LEN] = receive_frame(&mut receiver, FrameKind::Challenge)?;
        let Challenge { nonce, proof, offer } = Challenge::decode(&challenge)?;
        let session = Session::new((self.key, self.run), &hello, &nonce, offer, is_local);
        if !session.proves(Side::Server, proof) {
            return Err(Error::Refused("the server does not have this job's key".into()));
        }
        // Also if the two do not agree on encryption: then both know, and both can say so.
        send_frame(&mut sender, FrameKind::Proof, &session.proof(Side::Client))?;
        protect(&session, Side::Client, &mut sender, &mut receiver)?;
        let [] = receive_frame(&mut receiver, FrameKind::Accepted)?;
        Ok(Connection::new(role, client, sender, receiver))
    }

    /// The server's half. A client that is rejected gets the reason.
    pub(crate) fn accept(&self, stream: Arc<Stream>) -> Result<Connection, Error> {
        let (mut sender, mut receiver) = self.directions(stream);
        match self.examine(&mut sender, &mut receiver) {
            Ok(hello) => Ok(Connection::new(hello.role, hello.client, sender, receiver)),
            Err(error) => {
                let refusal = encode_refusal(&Refusal::Other(error.to_string()), 0);
                // The peer may be gone, or not worth waiting for.
                let _ = send_frame(&mut sender, FrameKind::Refused, &refusal);
                sender.stream().shutdown();
                Err(error)
            }
        }
    }

    fn examine(&self, sender: &mut Sender, receiver: &mut Receiver) -> Result<Hello, Error> {
        let is_local = sender.stream().is_local();
        let hello: [u8; Hello::LEN] = read_frame(receiver, FrameKind::Hello)?;
        let hello = Hello::decode(&hello)?;
        let (nonce, offer) = (nonce()?, self.offer(sender.stream()));
        let session = Session::new((self.key, self.run), &hello, &nonce, offer, is_local);
        let challenge = Challenge { nonce, proof: session.proof(Side::Server), offer };
        send_frame(sender, FrameKind::Challenge, &challenge.encode())?;
        let proof: [u8; 32] = read_frame(receiver, FrameKind::Proof)?;
        if !session.proves(Side::Client, proof) {
            return Err(Error::Refused(NO_KEY.into()));
        }
        protect(&session, Side::Server, sender, receiver)?;
        send_frame(sender, FrameKind::Accepted, &[])?;
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
    let deadline = Some(Instant::now() + timeout);
    let mut receiver = Receiver::of_any_run(Arc::clone(&stream), timeout);
    receiver.set_deadline(deadline);
    // Closing before the client's hello has been read would lose the answer.
    let hello = receiver.header(&mut || Ok(()))?;
    if hello.kind != FrameKind::Hello {
        return Err(Error::Forged { sequence: hello.sequence });
    }
    receiver.skip()?;
    let mut sender = Sender::new(stream, hello.run, timeout);
    sender.set_deadline(deadline);
    send_frame(&mut sender, FrameKind::Refused, &encode_refusal(&Refusal::NotServing, 0))
}

pub(crate) fn send_frame(
    sender: &mut Sender,
    kind: FrameKind,
    payload: &[u8],
) -> Result<(), Error> {
    sender.send(kind, Generation(0), BatchId::default(), &[payload])
}

/// Reads one frame of the handshake, or why the peer refuses.
pub(crate) fn receive_frame<const N: usize>(
    receiver: &mut Receiver,
    kind: FrameKind,
) -> Result<[u8; N], Error> {
    let header = receiver.header(&mut || Ok(()))?;
    if header.kind == FrameKind::Refused {
        let is_proven = receiver.is_protected();
        let (refusal, _) = decode_refusal(&receiver.small()?)?;
        let refusal = if is_proven { refusal } else { without_text(refusal) };
        return Err(Error::from_refusal(refusal, Generation(0)));
    }
    rest_of_frame(receiver, kind, &header)
}

/// Reads one frame of a stranger. Nothing of another kind or length is even looked at.
fn read_frame<const N: usize>(receiver: &mut Receiver, kind: FrameKind) -> Result<[u8; N], Error> {
    let header = receiver.header(&mut || Ok(()))?;
    rest_of_frame(receiver, kind, &header)
}

fn rest_of_frame<const N: usize>(
    receiver: &mut Receiver,
    kind: FrameKind,
    header: &Header,
) -> Result<[u8; N], Error> {
    let Header { kind: theirs, length, sequence, .. } = *header;
    if theirs != kind || length != N as u64 {
        return Err(Error::Forged { sequence });
    }
    let mut payload = [0; N];
    receiver.fill(&mut payload)?;
    receiver.finish()?;
    Ok(payload)
}

/// A refusal by a peer that has not proven the key can have any text, so only our own is passed on.
fn without_text(refusal: Refusal) -> Refusal {
    match refusal {
        Refusal::Other(text) if text == NO_KEY => Refusal::Other(text),
        Refusal::Other(_) | Refusal::Waited(_) | Refusal::StepMismatch(_) => {
            Refusal::Other("the peer ended the handshake; see its log for the reason".into())
        }
        Refusal::Generation { .. } | Refusal::NotServing => refusal,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use crate::frame::HEADER_LEN;

    use super::*;

    const RUN: RunId = RunId([3; 16]);

    fn accept(stream: UnixStream, timeout: Duration) -> Result<(), Error> {
        let key = JobKey::from_bytes([7; 32]);
        let (encryption, patience) = (Encryption::default(), Duration::from_secs(60));
        let party = Party { key: &key, run: RUN, encryption, timeout, patience };
        party.accept(Arc::new(Stream::unix(stream).unwrap())).map(drop)
    }

    #[test]
    fn a_peer_that_sends_one_byte_at_a_time_does_not_extend_the_handshake() {
        let (mut stranger, server) = UnixStream::pair().unwrap();
        let sending = std::thread::spawn(move || {
            // The start of a genuine frame, as slowly as the server must not wait for.
            let (client, nonce) = (ClientId([1; 16]), [2; 32]);
            let hello = Hello { role: Role::Pull, offer: Offer::Refuses, client, nonce };
            let (mut theirs, copied) = UnixStream::pair().unwrap();
            let stream = Arc::new(Stream::unix(copied).unwrap());
            let mut sender = Sender::new(stream, RUN, Duration::from_secs(60));
            send_frame(&mut sender, FrameKind::Hello, &hello.encode()).unwrap();
            let mut bytes = [0; HEADER_LEN + Hello::LEN];
            std::io::Read::read_exact(&mut theirs, &mut bytes).unwrap();
            for (n_sent, byte) in bytes.iter().enumerate() {
                if stranger.write_all(&[*byte]).is_err() {
                    return n_sent;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            bytes.len()
        });
        let refused = accept(server, Duration::from_millis(500));
        assert!(matches!(refused, Err(Error::Deadline { .. })), "{refused:?}");
        let n_sent = sending.join().unwrap();
        assert!(n_sent > 1 && n_sent < HEADER_LEN + Hello::LEN, "sent {n_sent} bytes");
    }

    #[test]
    fn the_text_of_a_peer_without_the_key_is_not_passed_on() {
        for refusal in [
            Refusal::Other("forged\n[ERROR] line".into()),
            Refusal::Waited("forged".into()),
            Refusal::StepMismatch("forged".into()),
        ] {
            let (near, far) = UnixStream::pair().unwrap();
            let stranger = std::thread::spawn(move || {
                let stream = Arc::new(Stream::unix(far).unwrap());
                let mut sender = Sender::new(stream, RUN, Duration::from_secs(60));
                send_frame(&mut sender, FrameKind::Refused, &encode_refusal(&refusal, 0)).unwrap();
                sender
            });
            let key = JobKey::from_bytes([7; 32]);
            let limit = Duration::from_secs(60);
            let encryption = Encryption::default();
            let party = Party { key: &key, run: RUN, encryption, timeout: limit, patience: limit };
            let stream = Stream::unix(near).unwrap();
            let refused = party.dial(stream, Role::Pull, ClientId([1; 16])).map(drop);
            drop(stranger.join().unwrap());
            let text = refused.unwrap_err().to_string();
            assert!(text.starts_with("refused: ") && !text.contains("forged"), "{text}");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! How two ends of a data connection prove that they hold the job's key.
//!
//! Each side sends a random nonce and proves the key by a keyed hash over everything that was
//! said. The session's keys come from both nonces: what was recorded in one session means
//! nothing in another, and a frame never fits the other direction.
//!
//! ```text
//! client                                 server
//!   Hello     role, offer, client, nonce  →
//!          ←  Challenge                   nonce, proof, offer
//!   Proof     proof                       →
//!          ←  Accepted                    (the first sealed frame)
//! ```
//!
//! The offers say whether a side requires encryption, accepts it or refuses it. Both are part of
//! what is proven, so a third party in between cannot turn it off.

use edl_core::id::{Incarnation, RunId, WorkerId};

use crate::cipher::Cipher;
use crate::frame::{Error, FrameKind, array};
use crate::key::{self, JobKey};
use crate::seal::{Guard, Seal};

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    Pull = 1,
    Push = 2,
    /// Two members of a world.
    Member = 3,
}

/// One client process's number, the same on all its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub [u8; 16]);

pub type Nonce = [u8; 32];

/// Which connections a process encrypts: the field `encrypt_data` of its job. Unix sockets and
/// shared memory never leave the host and are never encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encryption {
    /// TCP connections with another host.
    #[default]
    BetweenHosts,
    /// All TCP connections.
    Always,
    Never,
}

/// What a side says about encrypting one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    Refuses = 0,
    Accepts = 1,
    Requires = 2,
}

/// One side requires encryption, and the other refuses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    pub requires: Side,
}

/// The client's first message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub role: Role,
    pub offer: Offer,
    pub client: ClientId,
    pub nonce: Nonce,
}

/// What members send each other right after the handshake, sealed: the caller first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    pub from: (WorkerId, Incarnation),
    pub to: (WorkerId, Incarnation),
    /// Counts the calls of one process, so that the later of two links is known.
    pub attempt: u64,
    /// Bulk data goes through shared memory.
    pub is_shared: bool,
}

/// The server's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Challenge {
    pub nonce: Nonce,
    pub proof: [u8; 32],
    pub offer: Offer,
}

/// What both sides derive once both nonces are known.
pub struct Session {
    auth: [u8; 32],
    transcript: Vec<u8>,
    is_local: bool,
    offers: (Offer, Offer),
}

/// The two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Client,
    Server,
}

impl ClientId {
    pub fn random() -> Result<Self, key::Error> {
        let mut bytes = [0; 16];
        key::random(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// A member's: it is part of what the handshake proves.
    #[must_use]
    pub fn of_member(worker: WorkerId, incarnation: Incarnation) -> Self {
        let mut bytes = [0; 16];
        bytes[0..4].copy_from_slice(&worker.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&incarnation.0.to_le_bytes());
        Self(bytes)
    }
}

impl From<Option<bool>> for Encryption {
    fn from(encrypt_data: Option<bool>) -> Self {
        match encrypt_data {
            None => Self::BetweenHosts,
            Some(true) => Self::Always,
            Some(false) => Self::Never,
        }
    }
}

impl Encryption {
    /// What to say about one TCP connection.
    #[must_use]
    pub fn offer(self, is_same_host: bool) -> Offer {
        match self {
            Self::Always => Offer::Requires,
            Self::BetweenHosts if is_same_host => Offer::Accepts,
            Self::BetweenHosts => Offer::Requires,
            Self::Never => Offer::Refuses,
        }
    }
}

impl Offer {
    fn decode(byte: u8, kind: FrameKind) -> Result<Self, Error> {
        match byte {
            0 => Ok(Self::Refuses),
            1 => Ok(Self::Accepts),
            2 => Ok(Self::Requires),
            _ => Err(Error::Parts(kind)),
        }
    }
}

pub fn nonce() -> Result<Nonce, key::Error> {
    let mut bytes = [0; 32];
    key::random(&mut bytes)?;
    Ok(bytes)
}

impl Hello {
    pub const LEN: usize = 56;

    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = self.role as u8;
        bytes[1] = self.offer as u8;
        bytes[8..24].copy_from_slice(&self.client.0);
        bytes[24..56].copy_from_slice(&self.nonce);
        bytes
    }

    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, Error> {
        let role = match bytes[0] {
            1 => Role::Pull,
            2 => Role::Push,
            3 => Role::Member,
            _ => return Err(Error::Parts(FrameKind::Hello)),
        };
        let offer = Offer::decode(bytes[1], FrameKind::Hello)?;
        Ok(Self { role, offer, client: ClientId(array(bytes, 8)), nonce: array(bytes, 24) })
    }
}

impl Join {
    pub const LEN: usize = 40;

    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0..4].copy_from_slice(&self.from.0.0.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.to.0.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.from.1.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.to.1.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.attempt.to_le_bytes());
        bytes[32] = u8::from(self.is_shared);
        bytes
    }

    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, Error> {
        let member = |worker: usize, incarnation: usize| {
            let worker = WorkerId(u32::from_le_bytes(array(bytes, worker)));
            (worker, Incarnation(u64::from_le_bytes(array(bytes, incarnation))))
        };
        let is_shared = match bytes[32] {
            0 => false,
            1 => true,
            _ => return Err(Error::Parts(FrameKind::Join)),
        };
        Ok(Self {
            from: member(0, 8),
            to: member(4, 16),
            attempt: u64::from_le_bytes(array(bytes, 24)),
            is_shared,
        })
    }
}

impl Challenge {
    pub const LEN: usize = 65;

    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..32].copy_from_slice(&self.nonce);
        bytes[32..64].copy_from_slice(&self.proof);
        bytes[64] = self.offer as u8;
        bytes
    }

    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, Error> {
        let offer = Offer::decode(bytes[64], FrameKind::Challenge)?;
        Ok(Self { nonce: array(bytes, 0), proof: array(bytes, 32), offer })
    }
}

impl Session {
    /// `is_local` says that the connection is a Unix socket; it decides the seal, so both sides
    /// must agree on it, too. `server` and `offer` are those of the challenge.
    #[must_use]
    pub fn new(
        (key, run): (&JobKey, RunId),
        hello: &Hello,
        server: &Nonce,
        offer: Offer,
        is_local: bool,
    ) -> Self {
        let mut transcript = run.0.to_vec();
        transcript.push(u8::from(is_local));
        transcript.extend(hello.encode());
        transcript.extend(server);
        transcript.push(offer as u8);
        let offers = (hello.offer, offer);
        Self { auth: key.derive("data plane"), transcript, is_local, offers }
    }

    /// The proof that `side` holds the key and has seen the same messages.
    #[must_use]
    pub fn proof(&self, side: Side) -> [u8; 32] {
        self.keyed(match side {
            Side::Client => "client proof",
            Side::Server => "server proof",
        })
    }

    /// Whether `proof` is that of `side`, in constant time.
    #[must_use]
    pub fn proves(&self, side: Side, proof: [u8; 32]) -> bool {
        blake3::Hash::from(self.proof(side)) == blake3::Hash::from(proof)
    }

    /// Whether both sides encrypt this connection.
    pub fn is_encrypted(&self) -> Result<bool, Conflict> {
        match self.offers {
            (Offer::Requires, Offer::Refuses) => Err(Conflict { requires: Side::Client }),
            (Offer::Refuses, Offer::Requires) => Err(Conflict { requires: Side::Server }),
            (client, server) => Ok(client == Offer::Requires || server == Offer::Requires),
        }
    }

    /// What protects the frames that `side` sends, and those that it gets.
    pub fn guards(&self, side: Side) -> Result<(Guard, Guard), Conflict> {
        let is_encrypted = self.is_encrypted()?;
        let guard = |sent_by| {
            let key = self.keyed(match (sent_by, is_encrypted) {
                (Side::Client, false) => "client frames",
                (Side::Server, false) => "server frames",
                (Side::Client, true) => "client encryption",
                (Side::Server, true) => "server encryption",
            });
            match is_encrypted {
                true => Guard::Encrypted(Cipher::new(key)),
                false => Guard::Tagged(Seal::new(key, self.is_local)),
            }
        };
        Ok(match side {
            Side::Client => (guard(Side::Client), guard(Side::Server)),
            Side::Server => (guard(Side::Server), guard(Side::Client)),
        })
    }

    fn keyed(&self, purpose: &str) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_keyed(&self.auth);
        hasher.update(purpose.as_bytes());
        hasher.update(&self.transcript);
        hasher.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cipher::Buffer;

    use Offer::{Accepts, Refuses, Requires};

    fn hello(nonce: u8, offer: Offer) -> Hello {
        Hello { role: Role::Push, offer, client: ClientId([5; 16]), nonce: [nonce; 32] }
    }

    fn session(key: u8, run: u8, client: u8, server: u8, is_local: bool) -> Session {
        let (key, run) = (JobKey::from_bytes([key; 32]), RunId([run; 16]));
        Session::new((&key, run), &hello(client, Accepts), &[server; 32], Accepts, is_local)
    }

    fn offering(client: Offer, server: Offer) -> Session {
        let (key, run) = (JobKey::from_bytes([1; 32]), RunId([2; 16]));
        Session::new((&key, run), &hello(3, client), &[4; 32], server, false)
    }

    #[test]
    fn a_proof_holds_for_one_key_run_and_pair_of_nonces_only() {
        let proof = session(1, 2, 3, 4, false).proof(Side::Client);
        assert!(session(1, 2, 3, 4, false).proves(Side::Client, proof));
        assert!(!session(1, 2, 3, 4, false).proves(Side::Server, proof));
        assert!(!session(9, 2, 3, 4, false).proves(Side::Client, proof));
        assert!(!session(1, 9, 3, 4, false).proves(Side::Client, proof));
        assert!(!session(1, 2, 9, 4, false).proves(Side::Client, proof));
        assert!(!session(1, 2, 3, 9, false).proves(Side::Client, proof));
        assert!(!session(1, 2, 3, 4, true).proves(Side::Client, proof));
    }

    #[test]
    fn a_proof_holds_for_one_pair_of_offers_only() {
        let all = [Refuses, Accepts, Requires];
        let pairs = || all.into_iter().flat_map(|a| all.map(|b| (a, b)));
        for (client, server) in pairs() {
            for side in [Side::Client, Side::Server] {
                let proof = offering(client, server).proof(side);
                for (a, b) in pairs() {
                    let is_same = (a, b) == (client, server);
                    assert_eq!(offering(a, b).proves(side, proof), is_same);
                }
            }
        }
    }

    #[test]
    fn one_side_that_requires_encryption_is_enough_unless_the_other_refuses_it() {
        for (client, server, agreed) in [
            (Refuses, Refuses, Ok(false)),
            (Refuses, Accepts, Ok(false)),
            (Accepts, Refuses, Ok(false)),
            (Accepts, Accepts, Ok(false)),
            (Requires, Accepts, Ok(true)),
            (Accepts, Requires, Ok(true)),
            (Requires, Requires, Ok(true)),
            (Requires, Refuses, Err(Conflict { requires: Side::Client })),
            (Refuses, Requires, Err(Conflict { requires: Side::Server })),
        ] {
            assert_eq!(offering(client, server).is_encrypted(), agreed, "{client:?} {server:?}");
        }
    }

    #[test]
    fn by_default_only_connections_with_another_host_are_encrypted() {
        let offers = |encrypt_data: Option<bool>| {
            [true, false].map(|is_same_host| Encryption::from(encrypt_data).offer(is_same_host))
        };
        assert_eq!(offers(None), [Accepts, Requires]);
        assert_eq!(offers(Some(true)), [Requires, Requires]);
        assert_eq!(offers(Some(false)), [Refuses, Refuses]);
    }

    /// How a direction encodes equal bytes.
    fn mark(guard: Guard) -> Vec<u8> {
        match guard {
            Guard::Tagged(seal) => seal.begin().tag().into(),
            Guard::Encrypted(mut cipher) => {
                let mut out = Buffer::default();
                cipher.seal(&[b"equal"], &mut out);
                out.to_vec()
            }
        }
    }

    #[test]
    fn each_direction_of_a_session_has_its_own_keys() {
        let sessions =
            [session(1, 2, 3, 4, false), session(1, 2, 3, 4, true), offering(Requires, Accepts)];
        for session in sessions {
            let [client, server] = [Side::Client, Side::Server].map(|side| {
                let (out, into) = session.guards(side).unwrap();
                (mark(out), mark(into))
            });
            assert_ne!(client.0, client.1);
            assert_eq!(client, (server.1, server.0));
        }
    }

    #[test]
    fn greetings_read_back_as_they_were_written() {
        for offer in [Refuses, Accepts, Requires] {
            assert_eq!(Hello::decode(&hello(7, offer).encode()), Ok(hello(7, offer)));
            let challenge = Challenge { nonce: [1; 32], proof: [2; 32], offer };
            assert_eq!(Challenge::decode(&challenge.encode()), Ok(challenge));
        }
        for (at, byte) in [(0, 4), (1, 3)] {
            let mut bytes = hello(7, Accepts).encode();
            bytes[at] = byte;
            assert_eq!(Hello::decode(&bytes), Err(Error::Parts(FrameKind::Hello)));
        }
        let mut bytes = Challenge { nonce: [1; 32], proof: [2; 32], offer: Accepts }.encode();
        bytes[64] = 3;
        assert_eq!(Challenge::decode(&bytes), Err(Error::Parts(FrameKind::Challenge)));
    }
}

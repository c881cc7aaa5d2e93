// SPDX-License-Identifier: Apache-2.0
//! How two ends of a data connection prove that they hold the job's key.
//!
//! Each side sends a random nonce and proves the key by a keyed hash over everything that was
//! said. The session's keys come from both nonces: what was recorded in one session means
//! nothing in another, and a frame never fits the other direction.
//!
//! ```text
//! client                          server
//!   Hello     role, client, nonce  →
//!          ←  Challenge            nonce, proof
//!   Proof     proof                →
//!          ←  Accepted             (the first sealed frame)
//! ```

use edl_core::id::{Incarnation, RunId, WorkerId};

use crate::frame::{Error, Kind, array};
use crate::key::{self, JobKey};
use crate::seal::Seal;

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

/// The client's first message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub role: Role,
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
}

/// What both sides derive once both nonces are known.
pub struct Session {
    auth: [u8; 32],
    transcript: Vec<u8>,
    is_local: bool,
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
        bytes[8..24].copy_from_slice(&self.client.0);
        bytes[24..56].copy_from_slice(&self.nonce);
        bytes
    }

    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, Error> {
        let role = match bytes[0] {
            1 => Role::Pull,
            2 => Role::Push,
            3 => Role::Member,
            _ => return Err(Error::Parts(Kind::Hello)),
        };
        Ok(Self { role, client: ClientId(array(bytes, 8)), nonce: array(bytes, 24) })
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
            _ => return Err(Error::Parts(Kind::Join)),
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
    pub const LEN: usize = 64;

    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..32].copy_from_slice(&self.nonce);
        bytes[32..].copy_from_slice(&self.proof);
        bytes
    }

    #[must_use]
    pub fn decode(bytes: &[u8; Self::LEN]) -> Self {
        Self { nonce: array(bytes, 0), proof: array(bytes, 32) }
    }
}

impl Session {
    /// `is_local` says that the connection is a Unix socket; it decides the seal, so both sides
    /// must agree on it, too.
    #[must_use]
    pub fn new(key: &JobKey, run: RunId, hello: &Hello, server: &Nonce, is_local: bool) -> Self {
        let mut transcript = run.0.to_vec();
        transcript.push(u8::from(is_local));
        transcript.extend(hello.encode());
        transcript.extend(server);
        Self { auth: key.derive("data plane"), transcript, is_local }
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

    /// The seal of the frames that `side` sends.
    #[must_use]
    pub fn seal(&self, side: Side) -> Seal {
        let key = self.keyed(match side {
            Side::Client => "client frames",
            Side::Server => "server frames",
        });
        Seal::new(key, self.is_local)
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

    fn hello(nonce: u8) -> Hello {
        Hello { role: Role::Push, client: ClientId([5; 16]), nonce: [nonce; 32] }
    }

    fn session(key: u8, run: u8, client: u8, server: u8, is_local: bool) -> Session {
        let key = JobKey::from_bytes([key; 32]);
        Session::new(&key, RunId([run; 16]), &hello(client), &[server; 32], is_local)
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
    fn the_directions_of_a_session_have_seals_of_their_own() {
        for is_local in [false, true] {
            let session = session(1, 2, 3, 4, is_local);
            let tag = |side| session.seal(side).begin().tag();
            assert_ne!(tag(Side::Client), tag(Side::Server));
        }
    }

    #[test]
    fn greetings_read_back_as_they_were_written() {
        assert_eq!(Hello::decode(&hello(7).encode()), Ok(hello(7)));
        let challenge = Challenge { nonce: [1; 32], proof: [2; 32] };
        assert_eq!(Challenge::decode(&challenge.encode()), challenge);
        let mut bytes = hello(7).encode();
        bytes[0] = 4;
        assert_eq!(Hello::decode(&bytes), Err(Error::Parts(Kind::Hello)));
    }
}

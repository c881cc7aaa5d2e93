// SPDX-License-Identifier: Apache-2.0
//! The server's half of the data plane: frames in, frames out.
//!
//! A request is returned only when its last byte has arrived and its tag has been checked.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use edl_core::id::{BatchId, Generation, RunId};
use edl_core::server::Refusal;
use edl_tensor::push::Body;

use crate::data::Error;
use crate::data::session::{Party, turn_away};
use crate::frame::{FrameKind, Header, PieceHead, PullHead, PushHead, encode_refusal};
use crate::key::JobKey;
use crate::wire::{Receiver, Sender, Stream};

pub use crate::data::session::Connection;
pub use crate::handshake::{ClientId, Encryption, Role};

/// How long a client may take to prove itself.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a frame may stop in the middle.
const FRAME_PATIENCE: Duration = Duration::from_secs(30);

/// Lets a client of this run in. `run` is `None` while the server does not know it yet.
pub fn accept(
    stream: Arc<Stream>,
    key: &JobKey,
    run: Option<(RunId, Encryption)>,
) -> Result<Connection, Error> {
    let Some((run, encryption)) = run else {
        turn_away(stream, HANDSHAKE_TIMEOUT)?;
        return Err(Error::NotServing);
    };
    let (timeout, patience) = (HANDSHAKE_TIMEOUT, FRAME_PATIENCE);
    let party = Party { key, run, encryption, timeout, patience };
    party.accept(stream)
}

/// A request for parameters.
#[derive(Clone, Debug, Default)]
pub struct PullRequest {
    pub generation: Generation,
    pub sequence: u64,
    pub head: PullHead,
    /// Per partition, per table: how many ids.
    pub counts: Vec<u32>,
    pub ids: Vec<u64>,
}

/// A request to apply a gradient.
#[derive(Clone, Debug, Default)]
pub struct PushRequest {
    pub generation: Generation,
    pub sequence: u64,
    pub batch: BatchId,
    pub head: PushHead,
    pub body: Body,
}

impl PullRequest {
    /// Waits for the next request and reads it into `self`, whose buffers are used again.
    pub fn read(&mut self, receiver: &mut Receiver) -> Result<(), Error> {
        let (header, head) = head(receiver, FrameKind::Pull)?;
        let head = PullHead::decode(&head, header.length)?;
        receiver.fill_vec(&mut self.counts, head.n_counts as usize)?;
        receiver.fill_vec(&mut self.ids, head.n_ids)?;
        receiver.finish()?;
        (self.generation, self.sequence, self.head) = (header.generation, header.sequence, head);
        Ok(())
    }
}

impl PushRequest {
    /// Waits for the next push and reads it into the buffers of `body`.
    pub fn read(receiver: &mut Receiver, mut body: Body) -> Result<Self, Error> {
        let (header, head) = head(receiver, FrameKind::Push)?;
        let head = PushHead::decode(&head, header.length)?;
        receiver.fill_vec(&mut body.counts, head.n_counts as usize)?;
        receiver.fill_vec(&mut body.ids, head.n_ids)?;
        receiver.fill_vec(&mut body.dense, head.n_dense)?;
        receiver.fill_vec(&mut body.grads, head.n_grads)?;
        receiver.finish()?;
        let Header { generation, sequence, batch, .. } = header;
        Ok(Self { generation, sequence, batch, head, body })
    }
}

/// The parameters of some partitions: part of the answer to a pull.
#[derive(Clone, Debug)]
pub struct Piece {
    pub partitions: Range<u32>,
    pub version: u64,
    /// Dense numbers of all its partitions first, then their rows.
    pub floats: Vec<f32>,
}

pub fn send_piece(sender: &mut Sender, generation: Generation, piece: &Piece) -> Result<(), Error> {
    let head = PieceHead {
        partitions: piece.partitions.clone(),
        version: piece.version,
        n_floats: piece.floats.len(),
    };
    let parts: [&[u8]; 2] = [&head.encode(), bytemuck::cast_slice(&piece.floats)];
    sender.send(FrameKind::Piece, generation, BatchId::default(), &parts)
}

/// Says that the push number `sequence` is applied, in `generation`.
pub fn send_ack(
    sender: &mut Sender,
    generation: Generation,
    batch: BatchId,
    sequence: u64,
) -> Result<(), Error> {
    sender.send(FrameKind::Ack, generation, batch, &[&sequence.to_le_bytes()])
}

/// Says why the frame number `sequence` was not done.
pub fn send_refusal(
    sender: &mut Sender,
    generation: Generation,
    batch: BatchId,
    sequence: u64,
    refusal: &Refusal,
) -> Result<(), Error> {
    sender.send(FrameKind::Refused, generation, batch, &[&encode_refusal(refusal, sequence)])
}

/// Waits for a frame of this kind and reads how its payload begins. A client may be silent for as
/// long as it is connected.
fn head<const N: usize>(
    receiver: &mut Receiver,
    kind: FrameKind,
) -> Result<(Header, [u8; N]), Error> {
    let header = receiver.header(&mut || Ok(()))?;
    if header.kind != kind || header.length < N as u64 {
        return Err(Error::Forged { sequence: header.sequence });
    }
    let mut head = [0; N];
    receiver.fill(&mut head)?;
    Ok((header, head))
}

// SPDX-License-Identifier: Apache-2.0
//! The frames of the data plane: a fixed little-endian header and what follows it.
//!
//! Pure functions over bytes: nothing here reads a socket, allocates a size that a peer
//! claims, or panics on foreign bytes. Every number sits at an explicit offset.

use std::ops::Range;
use std::time::Duration;

use edl_core::id::{BatchId, Generation, RunId, WorldId};
use edl_core::server::Refusal;
use edl_tensor::push::Lane;

/// Version of this protocol. Peers of another one are refused in one sentence.
pub const PROTOCOL: u16 = 3;
pub const HEADER_LEN: usize = 72;
pub const TAG_LEN: usize = 16;
/// Longest payload of rows, ids or dense numbers.
pub const MAX_PAYLOAD: u64 = 1 << 30;
/// Longest payload of a block between members of a world.
pub const MAX_BLOCK: u64 = 256 << 10;
/// Longest payload of everything else: greetings, acknowledgements, refusals.
pub const MAX_SMALL_PAYLOAD: u64 = 4096;

const MAGIC: [u8; 4] = *b"EDLF";
/// Marks the absence of a round in a pull.
const NO_ROUND: u64 = u64::MAX;
const WANTS_DENSE: u32 = 1;
const WILL_PUSH: u32 = 2;
/// The round of a pull is the step whose rows are wanted, not the least to wait for.
const AT_STEP: u32 = 4;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// Handshake, client: who it is, and its nonce.
    Hello = 1,
    /// Handshake, server: its nonce, and the proof that it holds the key.
    Challenge = 2,
    /// Handshake, client: the proof that it holds the key.
    Proof = 3,
    /// Handshake, server: welcome.
    Accepted = 4,
    /// Client: wants parameters.
    Pull = 5,
    /// Server: the parameters of some partitions.
    Piece = 6,
    /// Client: the gradient of one batch.
    Push = 7,
    /// Server: a push is applied.
    Ack = 8,
    /// Server: a pull or push was not done, and why.
    Refused = 9,
    /// Member: which member it is, and which one it wants to talk to.
    Join = 10,
    /// Member: has left every world before this one.
    Enter = 11,
    /// Member: its part of a small exchange.
    Exchange = 12,
    /// Member: a blob of this many bytes follows.
    Blob = 13,
    /// Member: a block of the blob.
    Bytes = 14,
    /// Member: a block of one of its nodes of the tree.
    Part = 15,
    /// Member: a block of the sum of all nodes.
    Sum = 16,
    /// Member: its shared memory; the descriptor is sent along with it.
    Region = 17,
    /// Member: its nodes lie in its shared memory.
    Ready = 18,
    /// Member: has read the nodes of others, and the sum of its chunk lies in its memory.
    Summed = 19,
    /// Member: is alive, but waits for another member.
    Waiting = 20,
}

/// The fixed part of every frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: FrameKind,
    pub run: RunId,
    /// Between members of a world, the number of that world.
    pub generation: Generation,
    /// Counts the frames of one direction of one connection.
    pub sequence: u64,
    /// The batch of a push or acknowledgement; between members the number of the step or
    /// exchange, its high half first; zero in other frames.
    pub batch: BatchId,
    /// Bytes after the header.
    pub length: u64,
    pub tag: [u8; TAG_LEN],
}

/// Why bytes are not a frame of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the peer does not use the data protocol")]
    Magic,
    #[error("the peer uses version {theirs} of the data protocol, this build uses {ours}")]
    Version { ours: u16, theirs: u16 },
    #[error("unknown frame kind {0}")]
    Kind(u8),
    #[error("{kind:?} frame has {length} bytes; at most {limit} are allowed")]
    Length { kind: FrameKind, length: u64, limit: u64 },
    #[error("{0:?} frame is inconsistent: its parts do not add up")]
    Parts(FrameKind),
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        [
            Self::Hello,
            Self::Challenge,
            Self::Proof,
            Self::Accepted,
            Self::Pull,
            Self::Piece,
            Self::Push,
            Self::Ack,
            Self::Refused,
            Self::Join,
            Self::Enter,
            Self::Exchange,
            Self::Blob,
            Self::Bytes,
            Self::Part,
            Self::Sum,
            Self::Region,
            Self::Ready,
            Self::Summed,
            Self::Waiting,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == byte)
    }

    fn limit(self) -> u64 {
        match self {
            Self::Pull | Self::Piece | Self::Push => MAX_PAYLOAD,
            Self::Bytes | Self::Part | Self::Sum => MAX_BLOCK,
            Self::Hello
            | Self::Challenge
            | Self::Proof
            | Self::Accepted
            | Self::Ack
            | Self::Refused
            | Self::Join
            | Self::Enter
            | Self::Exchange
            | Self::Blob
            | Self::Region
            | Self::Ready
            | Self::Summed
            | Self::Waiting => MAX_SMALL_PAYLOAD,
        }
    }
}

impl Header {
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&PROTOCOL.to_le_bytes());
        bytes[6] = self.kind as u8;
        bytes[8..24].copy_from_slice(&self.run.0);
        bytes[24..32].copy_from_slice(&self.generation.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.batch.epoch.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.batch.index.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.length.to_le_bytes());
        bytes[56..72].copy_from_slice(&self.tag);
        bytes
    }

    /// Reads a header and refuses lengths that no honest peer would send, so that the caller
    /// may allocate memory for the payload.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, Error> {
        if bytes[0..4] != MAGIC {
            return Err(Error::Magic);
        }
        let theirs = u16::from_le_bytes(array(bytes, 4));
        if theirs != PROTOCOL {
            return Err(Error::Version { ours: PROTOCOL, theirs });
        }
        let kind = FrameKind::from_byte(bytes[6]).ok_or(Error::Kind(bytes[6]))?;
        let length = u64::from_le_bytes(array(bytes, 48));
        if length > kind.limit() {
            return Err(Error::Length { kind, length, limit: kind.limit() });
        }
        Ok(Self {
            kind,
            run: RunId(array(bytes, 8)),
            generation: Generation(u64::from_le_bytes(array(bytes, 24))),
            sequence: u64::from_le_bytes(array(bytes, 32)),
            batch: BatchId {
                epoch: u32::from_le_bytes(array(bytes, 40)),
                index: u32::from_le_bytes(array(bytes, 44)),
            },
            length,
            tag: array(bytes, 56),
        })
    }
}

/// How a pull's payload begins. Counts (`u32` per partition and table) and ids (`u64`) follow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PullHead {
    pub wants_dense: bool,
    /// A push of a batch trained on these parameters will follow.
    pub will_push: bool,
    /// How long the client waits for a round; in milliseconds on the wire.
    pub patience: Duration,
    pub min_round: Option<u64>,
    /// The rows are wanted as they are after this many steps; excludes `min_round`.
    pub step: Option<u64>,
    pub partitions: Range<u32>,
    pub n_counts: u32,
    /// Follows from the frame's length.
    pub n_ids: usize,
}

impl PullHead {
    pub const LEN: usize = 32;

    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let mut flags = 0;
        flags |= if self.wants_dense { WANTS_DENSE } else { 0 };
        flags |= if self.will_push { WILL_PUSH } else { 0 };
        flags |= if self.step.is_some() { AT_STEP } else { 0 };
        let round = self.step.or(self.min_round).unwrap_or(NO_ROUND);
        bytes[0..4].copy_from_slice(&flags.to_le_bytes());
        let patience_ms = u32::try_from(self.patience.as_millis()).unwrap_or(u32::MAX);
        bytes[4..8].copy_from_slice(&patience_ms.to_le_bytes());
        bytes[8..16].copy_from_slice(&round.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.partitions.start.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.partitions.end.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.n_counts.to_le_bytes());
        bytes
    }

    /// `length` is the whole payload's, from the frame's header.
    pub fn decode(bytes: &[u8; Self::LEN], length: u64) -> Result<Self, Error> {
        let flags = u32::from_le_bytes(array(bytes, 0));
        let round = u64::from_le_bytes(array(bytes, 8));
        let round = (round != NO_ROUND).then_some(round);
        let is_at_step = flags & AT_STEP != 0;
        let n_counts = u32::from_le_bytes(array(bytes, 24));
        let ids = rest(length, &[Self::LEN as u64, 4 * u64::from(n_counts)]);
        let n_ids = ids.filter(|ids| ids % 8 == 0).ok_or(Error::Parts(FrameKind::Pull))? / 8;
        Ok(Self {
            wants_dense: flags & WANTS_DENSE != 0,
            will_push: flags & WILL_PUSH != 0,
            patience: Duration::from_millis(u32::from_le_bytes(array(bytes, 4)).into()),
            min_round: round.filter(|_| !is_at_step),
            step: round.filter(|_| is_at_step),
            partitions: range(bytes, 16, FrameKind::Pull)?,
            n_counts,
            n_ids: size(n_ids, FrameKind::Pull)?,
        })
    }
}

/// How a push's payload begins. Counts (`u32`), ids (`u64`), dense gradient and row gradients
/// (`f32`) follow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PushHead {
    pub n_records: u32,
    pub n_counts: u32,
    pub base_version: u64,
    pub n_dense: usize,
    pub n_ids: usize,
    pub partitions: Range<u32>,
    /// Set if the batch comes in the parts of its lanes.
    pub lane: Option<Lane>,
    /// Follows from the frame's length.
    pub n_grads: usize,
}

impl PushHead {
    pub const LEN: usize = 56;

    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0..4].copy_from_slice(&self.n_records.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.n_counts.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.base_version.to_le_bytes());
        bytes[16..24].copy_from_slice(&(self.n_dense as u64).to_le_bytes());
        bytes[24..32].copy_from_slice(&(self.n_ids as u64).to_le_bytes());
        bytes[32..36].copy_from_slice(&self.partitions.start.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.partitions.end.to_le_bytes());
        // Of no lanes there is none.
        let none = Lane { world: WorldId(0), number: 0, of: 0 };
        let Lane { world, number, of } = self.lane.unwrap_or(none);
        bytes[40..48].copy_from_slice(&world.0.to_le_bytes());
        bytes[48..52].copy_from_slice(&number.to_le_bytes());
        bytes[52..56].copy_from_slice(&of.to_le_bytes());
        bytes
    }

    /// `length` is the whole payload's, from the frame's header.
    pub fn decode(bytes: &[u8; Self::LEN], length: u64) -> Result<Self, Error> {
        let n_counts = u32::from_le_bytes(array(bytes, 4));
        let n_dense = u64::from_le_bytes(array(bytes, 16));
        let n_ids = u64::from_le_bytes(array(bytes, 24));
        let parts = [
            Self::LEN as u64,
            4 * u64::from(n_counts),
            n_ids.saturating_mul(8),
            n_dense.saturating_mul(4),
        ];
        let grads = rest(length, &parts).filter(|grads| grads % 4 == 0);
        let lane = Lane {
            world: WorldId(u64::from_le_bytes(array(bytes, 40))),
            number: u32::from_le_bytes(array(bytes, 48)),
            of: u32::from_le_bytes(array(bytes, 52)),
        };
        Ok(Self {
            lane: (lane.of > 0).then_some(lane),
            n_records: u32::from_le_bytes(array(bytes, 0)),
            n_counts,
            base_version: u64::from_le_bytes(array(bytes, 8)),
            n_dense: size(n_dense, FrameKind::Push)?,
            n_ids: size(n_ids, FrameKind::Push)?,
            partitions: range(bytes, 32, FrameKind::Push)?,
            n_grads: size(grads.ok_or(Error::Parts(FrameKind::Push))? / 4, FrameKind::Push)?,
        })
    }
}

/// How a piece's payload begins. The dense numbers of its partitions (if wanted) follow, then
/// per partition and table the rows, in the order in which they were asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PieceHead {
    pub partitions: Range<u32>,
    /// Optimizer steps of the partition that has taken the fewest.
    pub version: u64,
    /// Follows from the frame's length.
    pub n_floats: usize,
}

impl PieceHead {
    pub const LEN: usize = 16;

    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0..4].copy_from_slice(&self.partitions.start.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.partitions.end.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.version.to_le_bytes());
        bytes
    }

    /// `length` is the whole payload's, from the frame's header.
    pub fn decode(bytes: &[u8; Self::LEN], length: u64) -> Result<Self, Error> {
        let floats = rest(length, &[Self::LEN as u64]).filter(|floats| floats % 4 == 0);
        Ok(Self {
            partitions: range(bytes, 0, FrameKind::Piece)?,
            version: u64::from_le_bytes(array(bytes, 8)),
            n_floats: size(floats.ok_or(Error::Parts(FrameKind::Piece))? / 4, FrameKind::Piece)?,
        })
    }
}

/// The payload of a refusal of the frame number `sequence`.
#[must_use]
pub fn encode_refusal(refusal: &Refusal, sequence: u64) -> Vec<u8> {
    let (code, generation, text) = match refusal {
        Refusal::Generation { current } => (1_u32, current.0, ""),
        Refusal::NotServing => (2, 0, ""),
        Refusal::Waited(text) => (3, 0, text.as_str()),
        Refusal::Other(text) => (4, 0, text.as_str()),
        Refusal::StepMismatch(text) => (5, 0, text.as_str()),
    };
    let mut bytes = code.to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(generation.to_le_bytes());
    bytes.extend(sequence.to_le_bytes());
    let room = usize::try_from(MAX_SMALL_PAYLOAD).unwrap_or(usize::MAX) - bytes.len();
    bytes.extend(&text.as_bytes()[..text.len().min(room)]);
    bytes
}

/// Reads a refusal's payload, and the number of the frame that is refused.
pub fn decode_refusal(bytes: &[u8]) -> Result<(Refusal, u64), Error> {
    let (head, text) = bytes.split_first_chunk::<24>().ok_or(Error::Parts(FrameKind::Refused))?;
    let text = || String::from_utf8_lossy(text).into_owned();
    let refusal = match u32::from_le_bytes(array(head, 0)) {
        1 => Refusal::Generation { current: Generation(u64::from_le_bytes(array(head, 8))) },
        2 => Refusal::NotServing,
        3 => Refusal::Waited(text()),
        4 => Refusal::Other(text()),
        5 => Refusal::StepMismatch(text()),
        _ => return Err(Error::Parts(FrameKind::Refused)),
    };
    Ok((refusal, u64::from_le_bytes(array(head, 16))))
}

/// `N` bytes from `at` on, of a buffer that is long enough by its type.
pub(crate) fn array<const N: usize, const M: usize>(bytes: &[u8; M], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// What is left of `length` after `parts`; `None` if they are longer.
fn rest(length: u64, parts: &[u64]) -> Option<u64> {
    parts.iter().try_fold(length, |left, part| left.checked_sub(*part))
}

fn size(n: u64, kind: FrameKind) -> Result<usize, Error> {
    usize::try_from(n).map_err(|_| Error::Parts(kind))
}

fn range<const M: usize>(bytes: &[u8; M], at: usize, kind: FrameKind) -> Result<Range<u32>, Error> {
    let start = u32::from_le_bytes(array(bytes, at));
    let end = u32::from_le_bytes(array(bytes, at + 4));
    if start <= end { Ok(start..end) } else { Err(Error::Parts(kind)) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> Header {
        Header {
            kind: FrameKind::Push,
            run: RunId([9; 16]),
            generation: Generation(3),
            sequence: 4,
            batch: BatchId { epoch: 5, index: 6 },
            length: 700,
            tag: [8; TAG_LEN],
        }
    }

    #[test]
    fn a_header_reads_back_as_it_was_written() {
        assert_eq!(Header::decode(&header().encode()), Ok(header()));
    }

    #[test]
    fn another_protocol_version_gives_one_sentence() {
        let mut bytes = header().encode();
        bytes[4] = 9;
        let text = Header::decode(&bytes).unwrap_err().to_string();
        assert_eq!(text, "the peer uses version 9 of the data protocol, this build uses 3");
    }

    #[test]
    fn foreign_bytes_and_absurd_lengths_are_refused() {
        let mut bytes = header().encode();
        bytes[48..56].copy_from_slice(&(MAX_PAYLOAD + 1).to_le_bytes());
        assert!(matches!(Header::decode(&bytes), Err(Error::Length { .. })));
        bytes[6] = FrameKind::Ack as u8;
        bytes[48..56].copy_from_slice(&(MAX_SMALL_PAYLOAD + 1).to_le_bytes());
        assert!(matches!(Header::decode(&bytes), Err(Error::Length { .. })));
        bytes[6] = 77;
        assert_eq!(Header::decode(&bytes), Err(Error::Kind(77)));
        bytes[0] = b'G';
        assert_eq!(Header::decode(&bytes), Err(Error::Magic));
    }

    #[test]
    fn heads_whose_parts_do_not_add_up_are_refused() {
        let push = PushHead { n_counts: 2, n_ids: 3, n_dense: 5, ..PushHead::default() };
        let needed = (PushHead::LEN + 2 * 4 + 3 * 8 + 5 * 4) as u64;
        assert_eq!(PushHead::decode(&push.encode(), needed + 8).unwrap().n_grads, 2);
        assert_eq!(
            PushHead::decode(&push.encode(), needed - 4),
            Err(Error::Parts(FrameKind::Push))
        );
        assert_eq!(
            PushHead::decode(&push.encode(), needed + 3),
            Err(Error::Parts(FrameKind::Push))
        );
        let greedy = PushHead { n_ids: usize::MAX, n_dense: usize::MAX, ..push };
        assert_eq!(PushHead::decode(&greedy.encode(), needed), Err(Error::Parts(FrameKind::Push)));
    }

    proptest! {
        #[test]
        fn heads_read_back_as_they_were_written(
            numbers in any::<[u32; 4]>(), start in 0..1000_u32, n in 0..1000_u32,
            base_version in any::<u64>(), flags in any::<[bool; 3]>(),
        ) {
            let partitions = start..start + n;
            let pull = PullHead {
                wants_dense: flags[0],
                will_push: flags[1],
                patience: Duration::from_millis(numbers[0].into()),
                min_round: flags[2].then_some(base_version / 2),
                step: (!flags[2]).then_some(base_version / 3),
                partitions: partitions.clone(),
                n_counts: n,
                n_ids: start as usize,
            };
            let length = PullHead::LEN as u64 + 4 * u64::from(n) + 8 * u64::from(start);
            prop_assert_eq!(PullHead::decode(&pull.encode(), length), Ok(pull));
            let push = PushHead {
                n_records: numbers[1],
                n_counts: n,
                base_version,
                n_dense: start as usize,
                n_ids: n as usize,
                partitions: partitions.clone(),
                lane: flags[0].then(|| Lane { world: WorldId(base_version), number: n, of: n + 1 }),
                n_grads: 7,
            };
            let length = PushHead::LEN as u64 + 12 * u64::from(n) + 4 * u64::from(start) + 28;
            prop_assert_eq!(PushHead::decode(&push.encode(), length), Ok(push));
            let piece = PieceHead { partitions, version: base_version, n_floats: n as usize };
            let length = PieceHead::LEN as u64 + 4 * u64::from(n);
            prop_assert_eq!(PieceHead::decode(&piece.encode(), length), Ok(piece));
        }

        #[test]
        fn refusals_read_back_as_they_were_written(sequence in any::<u64>(), text in ".{0,40}") {
            for refusal in [
                Refusal::Generation { current: Generation(sequence / 3) },
                Refusal::NotServing,
                Refusal::Waited(text.clone()),
                Refusal::StepMismatch(text.clone()),
                Refusal::Other(text),
            ] {
                let read = decode_refusal(&encode_refusal(&refusal, sequence));
                prop_assert_eq!(read, Ok((refusal, sequence)));
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Frames of the data plane as bytes, by the encoders that production uses.

use edl_core::id::{BatchId, Generation, RunId};
use edl_core::server::Refusal;
use edl_net::frame::{
    FrameKind, HEADER_LEN, Header, PieceHead, PullHead, PushHead, TAG_LEN, decode_refusal,
    encode_refusal,
};
use edl_tensor::push::{Body, Push};

/// The run of every simulated job.
pub(crate) const RUN: RunId = RunId([7; 16]);

/// A pull as a server reads it.
#[derive(Clone, Debug)]
pub(crate) struct Pull {
    pub(crate) head: PullHead,
    pub(crate) counts: Vec<u32>,
    pub(crate) ids: Vec<u64>,
}

/// A frame as its receiver reads it.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    Hello,
    Accepted,
    Pull(Pull),
    Push(PushHead, Body),
    Piece(PieceHead, Vec<f32>),
    /// The push with this number is applied.
    Ack(u64),
    Refused(Refusal, u64),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Label {
    pub(crate) generation: Generation,
    pub(crate) sequence: u64,
    pub(crate) batch: BatchId,
}

fn frame(kind: FrameKind, label: Label, parts: &[&[u8]]) -> Vec<u8> {
    let length = parts.iter().map(|part| part.len() as u64).sum();
    let Label { generation, sequence, batch } = label;
    let tag = [0; TAG_LEN];
    let header = Header { kind, run: RUN, generation, sequence, batch, length, tag };
    let mut bytes = header.encode().to_vec();
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    bytes
}

pub(crate) fn plain(kind: FrameKind, label: Label) -> Vec<u8> {
    frame(kind, label, &[])
}

pub(crate) fn pull(label: Label, pull: &Pull) -> Vec<u8> {
    frame(FrameKind::Pull, label, &[&pull.head.encode(), &words(&pull.counts), &longs(&pull.ids)])
}

pub(crate) fn push(label: Label, push: &Push) -> Vec<u8> {
    let head = PushHead {
        n_records: push.head.n_records,
        n_counts: u32::try_from(push.body.counts.len()).expect("few partitions"),
        base_version: push.head.base_version,
        n_dense: push.body.dense.len(),
        n_ids: push.body.ids.len(),
        partitions: push.head.partitions.clone(),
        lane: push.head.lane,
        n_grads: push.body.grads.len(),
    };
    let parts: [&[u8]; 5] = [
        &head.encode(),
        &words(&push.body.counts),
        &longs(&push.body.ids),
        &floats(&push.body.dense),
        &floats(&push.body.grads),
    ];
    frame(FrameKind::Push, label, &parts)
}

pub(crate) fn piece(label: Label, head: &PieceHead, numbers: &[f32]) -> Vec<u8> {
    frame(FrameKind::Piece, label, &[&head.encode(), &floats(numbers)])
}

pub(crate) fn ack(label: Label, sequence: u64) -> Vec<u8> {
    frame(FrameKind::Ack, label, &[&sequence.to_le_bytes()])
}

pub(crate) fn refusal(label: Label, refusal: &Refusal, sequence: u64) -> Vec<u8> {
    frame(FrameKind::Refused, label, &[&encode_refusal(refusal, sequence)])
}

pub(crate) fn decode(bytes: &[u8]) -> (Label, Content) {
    let (header, payload) = bytes.split_first_chunk::<HEADER_LEN>().expect("a whole header");
    let header = Header::decode(header).expect("a header of ours");
    assert_eq!(header.run, RUN, "a frame of another run");
    assert_eq!(header.length, payload.len() as u64, "a whole frame");
    let Header { generation, sequence, batch, .. } = header;
    let mut reader = Reader(payload);
    let content = match header.kind {
        FrameKind::Hello => Content::Hello,
        FrameKind::Accepted => Content::Accepted,
        FrameKind::Pull => {
            let head = PullHead::decode(&reader.head(), header.length).expect("a pull");
            let counts = reader.words(head.n_counts as usize);
            let ids = reader.longs(head.n_ids);
            Content::Pull(Pull { head, counts, ids })
        }
        FrameKind::Push => {
            let head = PushHead::decode(&reader.head(), header.length).expect("a push");
            let counts = reader.words(head.n_counts as usize);
            let ids = reader.longs(head.n_ids);
            let dense = reader.floats(head.n_dense);
            let grads = reader.floats(head.n_grads);
            Content::Push(head, Body { dense, counts, ids, grads })
        }
        FrameKind::Piece => {
            let head = PieceHead::decode(&reader.head(), header.length).expect("a piece");
            let numbers = reader.floats(head.n_floats);
            Content::Piece(head, numbers)
        }
        FrameKind::Ack => Content::Ack(u64::from_le_bytes(reader.head())),
        FrameKind::Refused => {
            let (refusal, sequence) = decode_refusal(payload).expect("a refusal");
            Content::Refused(refusal, sequence)
        }
        FrameKind::Challenge
        | FrameKind::Proof
        | FrameKind::Join
        | FrameKind::Enter
        | FrameKind::Exchange
        | FrameKind::Blob
        | FrameKind::Bytes
        | FrameKind::Part
        | FrameKind::Sum
        | FrameKind::Region
        | FrameKind::Ready
        | FrameKind::Summed
        | FrameKind::Waiting => panic!("no process sends a {:?} frame here", header.kind),
    };
    (Label { generation, sequence, batch }, content)
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn head<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_first_chunk::<N>().expect("long enough");
        self.0 = rest;
        *head
    }

    fn words(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| u32::from_le_bytes(self.head())).collect()
    }

    fn longs(&mut self, n: usize) -> Vec<u64> {
        (0..n).map(|_| u64::from_le_bytes(self.head())).collect()
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| f32::from_le_bytes(self.head())).collect()
    }
}

fn words(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn longs(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn floats(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

// SPDX-License-Identifier: Apache-2.0
//! Transfer of state: blobs that some members send to others, many at a time.

use std::collections::{BTreeMap, VecDeque};
use std::rc::{Rc, Weak};

use edl_core::id::WorldId;

use super::Move;
use super::drive::{Frame, Op, unexpected};
use super::link::{Link, number};
use crate::frame::{FrameKind, MAX_BLOCK};
use crate::wire::Error;

/// Longest blob that is accepted.
const MAX_BLOB: u64 = 16 << 30;
/// Memory is allocated as bytes arrive, not for what a peer announces.
const FIRST_CAPACITY: u64 = 64 << 20;

/// What is sent to one peer and comes from it.
#[derive(Default)]
struct Lane {
    to_send: VecDeque<u32>,
    sending: Option<Sending>,
    to_come: VecDeque<u32>,
    coming: Option<Coming>,
}

struct Sending {
    item: u32,
    blob: Rc<Vec<u8>>,
    n_posted: usize,
}

struct Coming {
    length: usize,
    blob: Vec<u8>,
}

pub(super) struct Transfer<'a> {
    world: WorldId,
    lanes: Vec<Lane>,
    encode: &'a mut dyn FnMut(u32) -> Vec<u8>,
    accept: &'a mut dyn FnMut(u32, Vec<u8>) -> Result<(), String>,
    /// Blobs that are still being sent: several peers may get the same one.
    encoded: BTreeMap<u32, Weak<Vec<u8>>>,
    pub(super) n_bytes: u64,
    /// What was not accepted, and why.
    refused: Option<(u32, String)>,
}

impl<'a> Transfer<'a> {
    pub(super) fn new(
        world: WorldId,
        me: usize,
        n_members: usize,
        moves: &[Move],
        encode: &'a mut dyn FnMut(u32) -> Vec<u8>,
        accept: &'a mut dyn FnMut(u32, Vec<u8>) -> Result<(), String>,
    ) -> Self {
        let mut lanes: Vec<Lane> = (0..n_members).map(|_| Lane::default()).collect();
        for Move { from, to, item } in moves.iter().filter(|step| step.from != step.to) {
            if *from == me {
                lanes[*to].to_send.push_back(*item);
            } else if *to == me {
                lanes[*from].to_come.push_back(*item);
            }
        }
        let (encoded, n_bytes, refused) = (BTreeMap::new(), 0, None);
        Self { world, lanes, encode, accept, encoded, n_bytes, refused }
    }

    fn blob(&mut self, item: u32) -> Rc<Vec<u8>> {
        if let Some(blob) = self.encoded.get(&item).and_then(Weak::upgrade) {
            return blob;
        }
        let blob = Rc::new((self.encode)(item));
        self.encoded.insert(item, Rc::downgrade(&blob));
        blob
    }

    fn finish(&mut self, peer: usize) {
        let lane = &mut self.lanes[peer];
        let (Some(item), Some(Coming { blob, .. })) =
            (lane.to_come.pop_front(), lane.coming.take())
        else {
            return;
        };
        self.n_bytes += blob.len() as u64;
        if let Err(error) = (self.accept)(item, blob) {
            self.refused = Some((item, error));
        }
    }
}

impl Op for Transfer<'_> {
    fn wants(&self, peer: usize) -> bool {
        !self.lanes[peer].to_come.is_empty()
    }

    fn take(&mut self, peer: usize, frame: Frame<'_>) -> Result<(), Error> {
        let Frame { header, payload, .. } = frame;
        let lane = &mut self.lanes[peer];
        let item = lane.to_come.front().copied().ok_or_else(|| unexpected(header))?;
        match (header.kind, &mut lane.coming) {
            (FrameKind::Blob, None) if number(header) == u64::from(item) => {
                let length = payload.try_into().map(u64::from_le_bytes).ok();
                let length = length.filter(|length| *length <= MAX_BLOB);
                let length = length.ok_or_else(|| unexpected(header))?;
                let capacity = usize::try_from(length.min(FIRST_CAPACITY)).unwrap_or(0);
                let length = usize::try_from(length).map_err(|_| unexpected(header))?;
                lane.coming = Some(Coming { length, blob: Vec::with_capacity(capacity) });
            }
            (FrameKind::Bytes, Some(coming))
                if coming.blob.len() + payload.len() <= coming.length =>
            {
                coming.blob.extend(payload);
            }
            _ => return Err(unexpected(header)),
        }
        if lane.coming.as_ref().is_some_and(|coming| coming.blob.len() == coming.length) {
            self.finish(peer);
        }
        Ok(())
    }

    fn post(&mut self, peer: usize, link: &mut Link) -> bool {
        let world = self.world;
        if let Some(Sending { item, blob, n_posted }) = &mut self.lanes[peer].sending {
            let rest = &blob[*n_posted..];
            if !rest.is_empty() {
                let block = &rest[..rest.len().min(usize::try_from(MAX_BLOCK).unwrap_or(0))];
                *n_posted += block.len();
                link.begin(FrameKind::Bytes, world, u64::from(*item), block);
                return true;
            }
            self.n_bytes += blob.len() as u64;
            self.lanes[peer].sending = None;
        }
        let Some(item) = self.lanes[peer].to_send.pop_front() else { return false };
        let blob = self.blob(item);
        link.post(FrameKind::Blob, world, u64::from(item), &(blob.len() as u64).to_le_bytes());
        self.lanes[peer].sending = Some(Sending { item, blob, n_posted: 0 });
        true
    }

    fn tail(&self, peer: usize) -> &[u8] {
        let block = usize::try_from(MAX_BLOCK).unwrap_or(0);
        self.lanes[peer].sending.as_ref().map_or(&[], |sending| {
            // The block that was posted last begins on a multiple of the longest one.
            let start = sending.n_posted.saturating_sub(1) / block * block;
            &sending.blob[start..sending.n_posted]
        })
    }

    fn work(&mut self) -> Result<bool, super::Error> {
        match self.refused.take() {
            Some((item, error)) => Err(super::Error::Item { item, error }),
            None => Ok(false),
        }
    }

    fn is_done(&self) -> bool {
        let is_empty = |lane: &Lane| {
            lane.to_send.is_empty() && lane.sending.is_none() && lane.to_come.is_empty()
        };
        self.refused.is_none() && self.lanes.iter().all(is_empty)
    }
}

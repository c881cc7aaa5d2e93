// SPDX-License-Identifier: Apache-2.0
//! The small collectives: entering a world together, and exchanging a few bytes.

use edl_core::id::WorldId;

use super::Peer;
use super::drive::{Frame, Op, unexpected};
use super::link::{Link, number};
use crate::frame::FrameKind;
use crate::wire::Error;

/// All members announce that they have left every world before this one.
pub(super) struct Enter {
    world: WorldId,
    has_sent: Vec<bool>,
    has_come: Vec<bool>,
    is_busy: Vec<bool>,
}

impl Enter {
    /// What was sent over links that are kept is not sent again.
    pub(super) fn new(world: WorldId, me: usize, peers: &[Peer], links: &[Option<Link>]) -> Self {
        let is_past = |said: Option<WorldId>| said >= Some(world);
        let of = |said: &dyn Fn(&Link) -> Option<WorldId>| {
            let is = |link: &Option<Link>| link.as_ref().is_some_and(|link| is_past(said(link)));
            links.iter().enumerate().map(|(peer, link)| peer == me || is(link)).collect()
        };
        let is_busy = peers.iter().map(|peer| peer.is_busy).collect();
        let (has_sent, has_come) = (of(&|link| link.enter_sent), of(&|link| link.entered));
        Self { world, has_sent, has_come, is_busy }
    }
}

impl Op for Enter {
    fn wants(&self, peer: usize) -> bool {
        !self.has_come[peer]
    }

    fn take(&mut self, peer: usize, frame: Frame<'_>) -> Result<(), Error> {
        if frame.header.kind != FrameKind::Enter {
            return Err(unexpected(frame.header));
        }
        self.has_come[peer] = true;
        Ok(())
    }

    fn post(&mut self, peer: usize, link: &mut Link) -> bool {
        if self.has_sent[peer] {
            return false;
        }
        self.has_sent[peer] = true;
        link.enter_sent = Some(self.world);
        link.post(FrameKind::Enter, self.world, 0, &[]);
        true
    }

    fn is_done(&self) -> bool {
        self.has_sent.iter().chain(&self.has_come).all(|is| *is)
    }

    /// Members train the last steps before a world together: none of them has finished these.
    fn is_early(&self) -> bool {
        let mut busy = self.is_busy.iter().zip(&self.has_come).filter(|(is_busy, _)| **is_busy);
        busy.clone().next().is_some() && !busy.any(|(_, has_come)| *has_come)
    }
}

/// Every member sends a few bytes to all others.
pub(super) struct Exchange<'a> {
    world: WorldId,
    number: u64,
    mine: &'a [u8],
    has_sent: Vec<bool>,
    answers: Vec<Option<Vec<u8>>>,
}

impl<'a> Exchange<'a> {
    pub(super) fn new(
        world: WorldId,
        number: u64,
        mine: &'a [u8],
        me: usize,
        n_members: usize,
    ) -> Self {
        let answers = (0..n_members).map(|member| (member == me).then(|| mine.to_vec())).collect();
        let has_sent = (0..n_members).map(|member| member == me).collect();
        Self { world, number, mine, has_sent, answers }
    }

    /// In the order of members.
    pub(super) fn into_answers(self) -> Vec<Vec<u8>> {
        self.answers.into_iter().flatten().collect()
    }
}

impl Op for Exchange<'_> {
    fn wants(&self, peer: usize) -> bool {
        self.answers[peer].is_none()
    }

    fn take(&mut self, peer: usize, frame: Frame<'_>) -> Result<(), Error> {
        if frame.header.kind != FrameKind::Exchange || number(frame.header) != self.number {
            return Err(unexpected(frame.header));
        }
        self.answers[peer] = Some(frame.payload.to_vec());
        Ok(())
    }

    fn post(&mut self, peer: usize, link: &mut Link) -> bool {
        if self.has_sent[peer] {
            return false;
        }
        self.has_sent[peer] = true;
        link.post(FrameKind::Exchange, self.world, self.number, self.mine);
        true
    }

    fn is_done(&self) -> bool {
        self.answers.iter().all(Option::is_some) && self.has_sent.iter().all(|is| *is)
    }
}

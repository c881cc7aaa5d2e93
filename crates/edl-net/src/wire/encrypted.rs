// SPDX-License-Identifier: Apache-2.0
//! Reads an encrypted payload, chunk by chunk. Returns no byte of a chunk before its tag is checked.

use std::io::IoSliceMut;
use std::time::Duration;

use super::{Error, IncomingFrame, Moved, Stream, expire, moved};
use crate::cipher::{CHUNK, Cipher};
use crate::frame::TAG_LEN;

/// Where the chunks of a payload come from.
pub(super) struct Encrypted<'a> {
    pub(super) stream: &'a Stream,
    pub(super) patience: Duration,
    pub(super) cipher: &'a mut Cipher,
}

impl Encrypted<'_> {
    /// Fills `out`. A chunk that fits into it is read and decrypted there; a longer one, at the end
    /// of `chunk`.
    pub(super) fn fill(
        mut self,
        frame: &mut IncomingFrame,
        chunk: &mut Vec<u8>,
        mut out: &mut [u8],
    ) -> Result<(), Error> {
        while !out.is_empty() {
            let n_next = usize::try_from(frame.left).unwrap_or(CHUNK).min(CHUNK);
            let (here, rest);
            if frame.n_decrypted > 0 {
                (here, rest) = out.split_at_mut(out.len().min(frame.n_decrypted));
                let start = chunk.len() - frame.n_decrypted;
                here.copy_from_slice(&chunk[start..start + here.len()]);
                frame.n_decrypted -= here.len();
            } else if n_next <= out.len() {
                (here, rest) = out.split_at_mut(n_next);
                self.read(here, frame.sequence)?;
            } else {
                // Never shortened, so that only growth is paid for.
                if chunk.len() < n_next {
                    chunk.resize(n_next, 0);
                }
                let start = chunk.len() - n_next;
                self.read(&mut chunk[start..], frame.sequence)?;
                frame.n_decrypted = n_next;
                continue;
            }
            frame.left -= here.len() as u64;
            out = rest;
        }
        Ok(())
    }

    /// Reads and decrypts a chunk.
    fn read(&mut self, chunk: &mut [u8], sequence: u64) -> Result<(), Error> {
        let mut tag = [0; TAG_LEN];
        let mut parts = [IoSliceMut::new(chunk), IoSliceMut::new(&mut tag)];
        let (mut left, mut since) = (parts.as_mut_slice(), None);
        while !left.is_empty() {
            match moved(self.stream.read_vectored(left), "read a frame")? {
                Moved::Bytes(n) => {
                    IoSliceMut::advance_slices(&mut left, n);
                    since = None;
                }
                Moved::Nothing => expire(&mut since, self.patience, "the rest of a frame")?,
            }
        }
        if self.cipher.open(chunk, &tag) { Ok(()) } else { Err(Error::Forged { sequence }) }
    }
}

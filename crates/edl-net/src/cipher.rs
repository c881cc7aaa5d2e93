// SPDX-License-Identifier: Apache-2.0
//! Encryption of one direction of a connection.
//!
//! Data is sent in pieces: the header of a frame, then its payload in chunks. Each is
//! encrypted by AEGIS-128X2 and followed by its tag. The nonce of a piece is its number, so a piece
//! is valid only in its place: altered, repeated, swapped or missing pieces are detected.
//! How long the next piece is follows from the header before it, which has been opened by then.
//!
//! A direction has its own key, so nothing that a side sends can be replayed to it.

use std::ops::Deref;

use aegis::aegis128x2::Aegis128X2;

use crate::frame::{HEADER_LEN, MAX_BLOCK, TAG_LEN};

/// Longest chunk of a payload: a block between members, so theirs are always one chunk. It fits in
/// the cache of a core, and nothing longer has to be kept until its tag arrives.
pub(crate) const CHUNK: usize = 256 << 10;
const _: () = assert!(CHUNK as u64 == MAX_BLOCK, "a block is one chunk");
/// What is encrypted of a header; its tag takes the place of the header's own.
const HEAD: usize = HEADER_LEN - TAG_LEN;

/// The key of one direction, and the number of its next piece.
#[derive(Clone)]
pub struct Cipher {
    key: [u8; 16],
    nonce: [u8; 16],
    next: u64,
}

impl Cipher {
    #[must_use]
    pub fn new(key: [u8; 32]) -> Self {
        let (halves, _) = key.as_chunks::<16>();
        Self { key: halves[0], nonce: halves[1], next: 0 }
    }

    /// The cipher of the next piece.
    fn next(&mut self) -> Aegis128X2<TAG_LEN> {
        let mut nonce = self.nonce;
        for (byte, number) in nonce.iter_mut().zip(self.next.to_le_bytes()) {
            *byte ^= number;
        }
        self.next = self.next.checked_add(1).expect("no connection sends 2^64 pieces");
        Aegis128X2::new(&self.key, &nonce)
    }

    /// Appends `parts`, encrypted as one piece, and the tag.
    pub fn seal(&mut self, parts: &[&[u8]], out: &mut Buffer) {
        let mut piece = self.next().encryptor(&[]);
        for part in parts {
            piece.update(part, out.grow(part.len()));
        }
        out.extend(&piece.finalize());
    }

    /// Decrypts the next piece in place. Returns whether it is genuine; if not, it is erased.
    #[must_use]
    pub fn open(&mut self, piece: &mut [u8], tag: &[u8; TAG_LEN]) -> bool {
        self.next().decrypt_in_place(piece, tag, &[]).is_ok()
    }

    /// Counts a piece that is not read.
    pub(crate) fn skip(&mut self) {
        let _ = self.next();
    }

    pub(crate) fn seal_header(&mut self, header: &[u8; HEADER_LEN], out: &mut Buffer) {
        self.seal(&[&header[..HEAD]], out);
    }

    pub(crate) fn open_header(&mut self, header: &mut [u8; HEADER_LEN]) -> bool {
        let Some((head, tag)) = header.split_last_chunk_mut::<TAG_LEN>() else { return false };
        self.open(head, tag)
    }
}

/// Bytes to be sent. Its memory is kept, so that it is cleared by the system only once.
#[derive(Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    len: usize,
}

impl Buffer {
    /// Appends `n` bytes of any value.
    fn grow(&mut self, n: usize) -> &mut [u8] {
        let start = self.len;
        self.len += n;
        if self.bytes.len() < self.len {
            self.bytes.resize(self.len, 0);
        }
        &mut self.bytes[start..self.len]
    }

    pub fn extend(&mut self, bytes: &[u8]) {
        self.grow(bytes.len()).copy_from_slice(bytes);
    }

    pub fn clear(&mut self) {
        self.len = 0;
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// How many bytes of tag follow a payload of this many bytes.
pub(crate) fn n_tag(length: usize) -> usize {
    if length == 0 { 0 } else { TAG_LEN }
}

/// Splits `parts`, one after the other, into chunks.
pub(crate) fn chunks<'a>(parts: &[&'a [u8]]) -> Vec<Vec<&'a [u8]>> {
    let mut chunks: Vec<Vec<&[u8]>> = Vec::new();
    let mut space = 0;
    for part in parts {
        let mut left = *part;
        while !left.is_empty() {
            if space == 0 {
                chunks.push(Vec::new());
                space = CHUNK;
            }
            let (here, rest) = left.split_at(left.len().min(space));
            chunks.last_mut().expect("pushed above").push(here);
            space -= here.len();
            left = rest;
        }
    }
    chunks
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What happens to a list of pieces in transit.
    #[derive(Clone, Debug)]
    enum Change {
        Flip { at: usize, bit: u8 },
        Drop,
        Repeat,
        Swap,
        Shorten,
        Reflect,
    }

    fn sealed(pieces: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut cipher = Cipher::new([1; 32]);
        let mut out = Buffer::default();
        let seal = |piece: &Vec<u8>| {
            out.clear();
            cipher.seal(&[piece], &mut out);
            out.to_vec()
        };
        pieces.iter().map(seal).collect()
    }

    /// The pieces that open, up to the first that does not.
    fn opened(key: u8, sealed: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut cipher = Cipher::new([key; 32]);
        let open = |piece: &Vec<u8>| {
            let (text, tag) = piece.split_last_chunk::<TAG_LEN>()?;
            let mut text = text.to_vec();
            cipher.open(&mut text, tag).then_some(text)
        };
        sealed.iter().map_while(open).collect()
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            (any::<usize>(), 0..8_u8).prop_map(|(at, bit)| Change::Flip { at, bit }),
            Just(Change::Drop),
            Just(Change::Repeat),
            Just(Change::Swap),
            Just(Change::Shorten),
            Just(Change::Reflect),
        ]
    }

    proptest! {
        #[test]
        fn pieces_open_up_to_the_first_that_is_not_in_its_place_or_was_changed(
            pieces in proptest::collection::vec(
                proptest::collection::vec(any::<u8>(), 0..200), 1..8),
            place in any::<usize>(), change in change(),
        ) {
            let mut wire = sealed(&pieces);
            prop_assert_eq!(&opened(1, &wire), &pieces);
            let place = place % pieces.len();
            let mut key = 1;
            match change {
                Change::Flip { at, bit } => {
                    let at = at % wire[place].len();
                    wire[place][at] ^= 1 << bit;
                }
                Change::Drop => drop(wire.remove(place)),
                Change::Repeat => wire.insert(place, wire[place].clone()),
                Change::Swap => wire.swap(place, (place + 1) % pieces.len()),
                Change::Shorten => drop(wire[place].pop()),
                Change::Reflect => key = 2,
            }
            let expected = match change {
                // The first of the two copies is genuine.
                Change::Repeat => place + 1,
                Change::Swap if pieces.len() == 1 => 1,
                Change::Swap => place.min((place + 1) % pieces.len()),
                Change::Reflect => 0,
                Change::Flip { .. } | Change::Drop | Change::Shorten => place,
            };
            prop_assert_eq!(opened(key, &wire), &pieces[..expected]);
        }

        #[test]
        fn all_chunks_but_the_last_are_full_and_hold_every_byte_in_order(
            lengths in proptest::collection::vec(
                prop_oneof![0..100_usize, CHUNK - 50..CHUNK + 50], 0..5),
        ) {
            let parts: Vec<Vec<u8>> =
                lengths.iter().map(|length| (0..=250).cycle().take(*length).collect()).collect();
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let chunks: Vec<Vec<u8>> = chunks(&parts).iter().map(|chunk| chunk.concat()).collect();
            prop_assert_eq!(chunks.concat(), parts.concat());
            for chunk in chunks.iter().rev().skip(1) {
                prop_assert_eq!(chunk.len(), CHUNK);
            }
            prop_assert!(chunks.last().is_none_or(|last| (1..=CHUNK).contains(&last.len())));
        }
    }

    #[test]
    fn a_piece_reveals_nothing_and_equal_pieces_look_different() {
        let text = b"the same sixteen or more bytes of text".to_vec();
        let wire = sealed(&[text.clone(), text.clone()]);
        assert_ne!(wire[0], wire[1]);
        assert!(wire.iter().all(|piece| !piece.windows(8).any(|part| text.starts_with(part))));
    }
}

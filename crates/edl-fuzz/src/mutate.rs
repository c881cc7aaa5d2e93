// SPDX-License-Identifier: Apache-2.0
//! A small mutator: damages seeds in the ways that parsers tend not to expect. The same seed number
//! gives the same inputs.

use edl_core::rng::Rng;

/// The longest input; parsers are to be cheap per byte, so longer ones show nothing new.
const MAX_LEN: usize = 1 << 16;
/// The most changes of one input.
const MAX_CHANGES: u64 = 6;
/// Numbers near which parsers go wrong.
const NUMBERS: [u64; 14] = [
    0,
    1,
    7,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_ffff,
];
/// The same in text.
const WORDS: [&[u8]; 16] = [
    b"0",
    b"-1",
    b"1e999",
    b"nan",
    b"4294967295",
    b"4294967296",
    b"9223372036854775807",
    b"18446744073709551615",
    b"18446744073709551616",
    b"99999999999999999999999999",
    b"null",
    b"\"\"",
    b"[]",
    b"{}",
    b"\xff\xfe",
    b"$A$A",
];

/// Makes inputs out of seeds.
pub struct Mutator<'a> {
    seeds: &'a [Vec<u8>],
    rng: Rng,
}

impl<'a> Mutator<'a> {
    /// `seeds` must not be empty.
    #[must_use]
    pub fn new(seeds: &'a [Vec<u8>], seed: u64) -> Self {
        Self { seeds, rng: Rng::new(seed) }
    }

    /// The next input.
    pub fn input(&mut self) -> Vec<u8> {
        let mut bytes = self.seed().to_vec();
        for _ in 0..=self.rng.below(MAX_CHANGES) {
            self.change(&mut bytes);
        }
        bytes.truncate(MAX_LEN);
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        match self.rng.below(10) {
            0 | 1 => self.flip_bit(bytes),
            2 => self.set_byte(bytes),
            3 => self.set_number(bytes),
            4 => bytes.truncate(self.place(bytes.len() + 1)),
            5 => {
                let part = self.part(bytes.len());
                bytes.drain(part);
            }
            6 => self.repeat(bytes),
            7 => self.splice(bytes),
            8 => self.replace_digits(bytes),
            _ => {
                let word = WORDS[self.place(WORDS.len())];
                let at = self.place(bytes.len() + 1);
                bytes.splice(at..at, word.iter().copied());
            }
        }
    }

    fn seed(&mut self) -> &'a [u8] {
        &self.seeds[self.place(self.seeds.len())]
    }

    /// A number below `len`; zero if there is none.
    fn place(&mut self, len: usize) -> usize {
        usize::try_from(self.rng.below(len.max(1) as u64)).unwrap_or(0)
    }

    /// A part of `len` bytes, mostly a short one.
    fn part(&mut self, len: usize) -> std::ops::Range<usize> {
        let start = self.place(len + 1);
        let longest = if self.rng.below(4) == 0 { len } else { 16 };
        let end = start + self.place(longest.min(len - start) + 1);
        start..end
    }

    fn flip_bit(&mut self, bytes: &mut [u8]) {
        let at = self.place(bytes.len());
        let bit = self.rng.below(8);
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= 1 << bit;
        }
    }

    fn set_byte(&mut self, bytes: &mut [u8]) {
        let at = self.place(bytes.len());
        let [value, ..] = self.rng.next_u64().to_le_bytes();
        if let Some(byte) = bytes.get_mut(at) {
            *byte = value;
        }
    }

    /// Overwrites a field by a length or a number at the end of a range, in either byte order.
    fn set_number(&mut self, bytes: &mut [u8]) {
        let width = 1 << self.rng.below(4);
        let at = self.place(bytes.len().saturating_sub(width) + 1);
        let near = self.rng.below(3).wrapping_sub(1);
        let number = match self.rng.below(3) {
            0 => (bytes.len() as u64).wrapping_add(near),
            _ => NUMBERS[self.place(NUMBERS.len())],
        };
        let Some(field) = bytes.get_mut(at..at + width) else { return };
        if self.rng.below(2) == 0 {
            field.copy_from_slice(&number.to_le_bytes()[..width]);
        } else {
            field.copy_from_slice(&number.to_be_bytes()[8 - width..]);
        }
    }

    fn repeat(&mut self, bytes: &mut Vec<u8>) {
        let part = self.part(bytes.len());
        let most = if self.rng.below(16) == 0 { 1000 } else { 8 };
        let n = (1 + self.place(most)).min(MAX_LEN / part.len().max(1));
        let repeated = bytes[part.clone()].repeat(n);
        bytes.splice(part.end..part.end, repeated);
    }

    /// Puts a part of a seed in the place of another part.
    fn splice(&mut self, bytes: &mut Vec<u8>) {
        let seed = self.seed();
        let taken = seed[self.part(seed.len())].to_vec();
        let part = self.part(bytes.len());
        bytes.splice(part, taken);
    }

    /// Replaces a number in text.
    fn replace_digits(&mut self, bytes: &mut Vec<u8>) {
        let from = self.place(bytes.len() + 1);
        let Some(start) = bytes[from..].iter().position(u8::is_ascii_digit) else { return };
        let start = from + start;
        let n_digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let word = WORDS[self.place(WORDS.len())];
        bytes.splice(start..start + n_digits, word.iter().copied());
    }
}

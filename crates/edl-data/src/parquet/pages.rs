// SPDX-License-Identifier: Apache-2.0
//! How large the pages of a column claim to be. The Parquet library makes room for a page of the size
//! that its header names, before it decompresses the page, and does not show that size.
//!
//! A header is a struct in Thrift's compact encoding. Only its two sizes are read here; what cannot be
//! read is left to the library.

use std::io::{self, BufReader, Read, Seek, SeekFrom};

use ::parquet::basic::Compression;

/// The most that a page can be decompressed to.
const MAX_PAGE: u64 = 1 << 30;
/// Structs within structs; headers have three levels.
const MAX_DEPTH: u32 = 8;
/// Enough for most headers.
const READ_AHEAD: usize = 256;
const UNPACKED_SIZE: i64 = 2;
const PACKED_SIZE: i64 = 3;

/// The most bytes that one packed byte can stand for, rounded up.
pub(super) fn max_ratio(compression: Compression) -> u64 {
    match compression {
        Compression::UNCOMPRESSED => 1,
        Compression::SNAPPY => 64,
        Compression::GZIP(_) => 1100,
        // A few bytes can stand for any number of equal ones.
        Compression::BROTLI(_)
        | Compression::ZSTD(_)
        | Compression::LZO
        | Compression::LZ4
        | Compression::LZ4_RAW => MAX_PAGE,
    }
}

/// Whether every page between `start` and `end` claims a size that it can have.
pub(super) fn are_plausible(
    mut file: impl Read + Seek,
    start: u64,
    end: u64,
    max_ratio: u64,
) -> io::Result<bool> {
    let mut at = start;
    while at < end {
        file.seek(SeekFrom::Start(at))?;
        let mut header =
            Thrift { input: BufReader::with_capacity(READ_AHEAD, &mut file), n_read: 0 };
        let Ok((unpacked, packed)) = header.sizes() else { return Ok(true) };
        if unpacked > packed.saturating_mul(max_ratio).min(MAX_PAGE) {
            return Ok(false);
        }
        at = at.saturating_add(header.n_read).saturating_add(packed);
    }
    Ok(true)
}

struct Thrift<R> {
    input: R,
    n_read: u64,
}

impl<R: Read> Thrift<R> {
    /// The unpacked and the packed size of the page that this header describes.
    fn sizes(&mut self) -> io::Result<(u64, u64)> {
        let (mut unpacked, mut packed) = (0, 0);
        let mut id = 0;
        while let Some((kind, next)) = self.field(id)? {
            id = next;
            match (id, kind) {
                (UNPACKED_SIZE, 5) => unpacked = u64::try_from(self.signed()?).unwrap_or(0),
                (PACKED_SIZE, 5) => packed = u64::try_from(self.signed()?).unwrap_or(0),
                (_, kind) => self.skip(kind, MAX_DEPTH)?,
            }
        }
        Ok((unpacked, packed))
    }

    /// The type and number of the next field; none at the end of the struct.
    fn field(&mut self, before: i64) -> io::Result<Option<(u8, i64)>> {
        let byte = self.byte()?;
        if byte == 0 {
            return Ok(None);
        }
        let id = match byte >> 4 {
            0 => self.signed()?,
            delta => before.saturating_add(delta.into()),
        };
        Ok(Some((byte & 15, id)))
    }

    fn skip(&mut self, kind: u8, depth: u32) -> io::Result<()> {
        let Some(depth) = depth.checked_sub(1) else { return Err(malformed()) };
        match kind {
            1 | 2 => Ok(()),
            3 => self.byte().map(drop),
            4..=6 => self.number().map(drop),
            7 => self.skip_bytes(8),
            8 => {
                let len = self.number()?;
                self.skip_bytes(len)
            }
            12 => {
                let mut id = 0;
                while let Some((kind, next)) = self.field(id)? {
                    id = next;
                    self.skip(kind, depth)?;
                }
                Ok(())
            }
            // No header has lists, sets or maps.
            _ => Err(malformed()),
        }
    }

    fn skip_bytes(&mut self, len: u64) -> io::Result<()> {
        let skipped = io::copy(&mut self.input.by_ref().take(len), &mut io::sink())?;
        self.n_read = self.n_read.saturating_add(skipped);
        if skipped == len { Ok(()) } else { Err(malformed()) }
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.input.read_exact(&mut byte)?;
        self.n_read += 1;
        Ok(byte[0])
    }

    fn number(&mut self) -> io::Result<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(malformed())
    }

    fn signed(&mut self) -> io::Result<i64> {
        let number = self.number()?;
        Ok((number >> 1).cast_signed() ^ -(number & 1).cast_signed())
    }
}

fn malformed() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// A data page whose header has both sizes, and a struct as the library writes it.
    fn page(unpacked: u64, packed: u8) -> Vec<u8> {
        let mut bytes = vec![0x15, 0, 0x15];
        let mut number = unpacked * 2;
        while number >= 0x80 {
            bytes.push(number.to_le_bytes()[0] | 0x80);
            number >>= 7;
        }
        bytes.extend([
            number.to_le_bytes()[0],
            0x15,
            packed * 2,
            0x2c,
            0x15,
            6,
            0x18,
            2,
            1,
            2,
            0,
            0,
        ]);
        bytes.extend(vec![0; packed.into()]);
        bytes
    }

    fn plausible(pages: &[Vec<u8>], max_ratio: u64) -> bool {
        let bytes = pages.concat();
        let end = bytes.len() as u64;
        are_plausible(Cursor::new(bytes), 0, end, max_ratio).unwrap()
    }

    #[test]
    fn a_page_that_claims_more_than_its_bytes_can_stand_for_is_found() {
        assert!(plausible(&[page(10, 10), page(640, 10)], 64));
        assert!(!plausible(&[page(10, 10), page(641, 10)], 64));
        assert!(!plausible(&[page(2 << 30, 60)], MAX_PAGE));
        assert!(!plausible(&[page(11, 10)], 1));
    }

    #[test]
    fn what_is_no_header_is_left_to_the_library() {
        for bytes in [vec![0xff; 40], vec![0x1c; 40], vec![0x18, 0xff, 0xff, 0xff, 0xff, 0x0f]] {
            assert!(plausible(&[bytes], 64));
        }
    }
}

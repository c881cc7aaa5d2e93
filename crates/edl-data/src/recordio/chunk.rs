// SPDX-License-Identifier: Apache-2.0
//! One RecordIO chunk as pure functions of its bytes.

use std::io::{self, Read};

use edl_core::spec::Codec;
use prost::bytes::Bytes;

use crate::example::Example;
use crate::index::{MAX_UNPACKED, read_limited};
use crate::row::{Records, Row};

pub const MAGIC: u32 = 0x0102_0304;
pub const HEADER_LEN: usize = 20;

/// How a chunk's body is packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Compressor {
    None,
    /// The framed stream of Snappy.
    #[default]
    Snappy,
    Gzip,
}

/// The first bytes of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// CRC-32 (IEEE) of the compressed body.
    pub checksum: u32,
    pub compressor: Compressor,
    pub compressed_size: u32,
    pub n_records: u32,
}

/// Why some bytes are not a chunk.
#[derive(Debug, thiserror::Error)]
pub enum ChunkError {
    #[error(
        "the file ends inside a chunk header, after {has} of {HEADER_LEN} bytes: it is truncated"
    )]
    HeaderTruncated { has: usize },
    #[error("the file ends inside a chunk, after {has} of {needs} bytes: it is truncated")]
    BodyTruncated { needs: u32, has: u64 },
    #[error("not a RecordIO chunk: it starts with {0:#010x}, not {MAGIC:#010x}")]
    Magic(u32),
    #[error("unknown compressor {0}; supported are 0 (none), 1 (snappy) and 2 (gzip)")]
    Compressor(u32),
    #[error("corrupt chunk: {n_records} records cannot fit into {size} bytes")]
    Count { n_records: u32, size: u32 },
    #[error("corrupt chunk: its checksum is {found:#010x}, but the header has {expected:#010x}")]
    Checksum { expected: u32, found: u32 },
    #[error("corrupt chunk: cannot decompress it: {0}")]
    Unpack(#[from] io::Error),
    #[error("corrupt chunk: it decompresses to more than {MAX_UNPACKED} bytes")]
    TooLarge,
    #[error("corrupt chunk: record {record} of {n_records} does not fit in it")]
    Record { record: u32, n_records: u32 },
    #[error("corrupt chunk: {extra} bytes follow its {n_records} records")]
    Trailing { extra: usize, n_records: u32 },
}

impl Compressor {
    pub const ALL: [Self; 3] = [Self::None, Self::Snappy, Self::Gzip];

    #[must_use]
    pub fn code(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Snappy => 1,
            Self::Gzip => 2,
        }
    }

    pub fn from_code(code: u32) -> Result<Self, ChunkError> {
        let found = Self::ALL.into_iter().find(|compressor| compressor.code() == code);
        found.ok_or(ChunkError::Compressor(code))
    }

    /// The name for users.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Snappy => "snappy",
            Self::Gzip => "gzip",
        }
    }

    /// The most bytes that one packed byte can stand for, rounded up.
    fn max_ratio(self) -> u64 {
        match self {
            Self::None => 1,
            Self::Snappy => 64,
            Self::Gzip => 1100,
        }
    }

    fn pack(self, body: Vec<u8>) -> io::Result<Vec<u8>> {
        let mut packed = Vec::new();
        match self {
            Self::None => return Ok(body),
            Self::Snappy => {
                snap::read::FrameEncoder::new(body.as_slice()).read_to_end(&mut packed)?;
            }
            Self::Gzip => {
                let best = flate2::Compression::best();
                flate2::read::GzEncoder::new(body.as_slice(), best).read_to_end(&mut packed)?;
            }
        }
        Ok(packed)
    }

    fn unpack(self, body: Vec<u8>) -> Result<Vec<u8>, ChunkError> {
        match self {
            Self::None => Ok(body),
            Self::Snappy => limited(snap::read::FrameDecoder::new(body.as_slice())),
            Self::Gzip => limited(flate2::read::MultiGzDecoder::new(body.as_slice())),
        }
    }
}

fn limited(reader: impl Read) -> Result<Vec<u8>, ChunkError> {
    read_limited(reader, MAX_UNPACKED)?.ok_or(ChunkError::TooLarge)
}

impl Header {
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Result<Self, ChunkError> {
        let (words, _) = bytes.as_chunks::<4>();
        let word = |i: usize| u32::from_le_bytes(words[i]);
        if word(0) != MAGIC {
            return Err(ChunkError::Magic(word(0)));
        }
        let compressor = Compressor::from_code(word(2))?;
        let (compressed_size, n_records) = (word(3), word(4));
        // No checksum covers the count, and whole data sets are planned by it before the first
        // body is read: at least the lengths of that many records must fit.
        let most = (u64::from(compressed_size) * compressor.max_ratio()).min(MAX_UNPACKED);
        if u64::from(n_records) * 4 > most || u64::from(compressed_size) > MAX_UNPACKED {
            return Err(ChunkError::Count { n_records, size: compressed_size });
        }
        Ok(Self { checksum: word(1), compressor, compressed_size, n_records })
    }

    #[must_use]
    pub fn to_bytes(&self) -> [u8; HEADER_LEN] {
        let words =
            [MAGIC, self.checksum, self.compressor.code(), self.compressed_size, self.n_records];
        let mut bytes = [0; HEADER_LEN];
        for (place, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        bytes
    }
}

/// The records of one chunk: one buffer, split by offsets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RawRecords {
    data: Bytes,
    /// Start and end of each record.
    spans: Vec<(usize, usize)>,
}

impl RawRecords {
    /// `spans` must lie inside `data`.
    pub(crate) fn new(data: Vec<u8>, spans: Vec<(usize, usize)>) -> Self {
        debug_assert!(spans.iter().all(|(start, end)| start <= end && *end <= data.len()));
        Self { data: data.into(), spans }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// A record, sharing the chunk's memory.
    #[must_use]
    pub fn get(&self, record: usize) -> Option<Bytes> {
        self.spans.get(record).map(|(start, end)| self.data.slice(*start..*end))
    }

    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.spans.iter().map(|(start, end)| &self.data[*start..*end])
    }
}

impl Records for RawRecords {
    fn n_records(&self) -> usize {
        self.len()
    }

    fn bytes(&self) -> usize {
        self.data.len() + self.spans.len() * size_of::<(usize, usize)>()
    }

    fn row(&self, record: usize, codec: Codec) -> Result<Row<'_>, String> {
        let record = self.get(record).unwrap_or_default();
        match codec {
            Codec::Bytes => Ok(Row::Raw(record)),
            Codec::TfExample => Example::parse(record.clone())
                .map(|example| Row::Example { example, record })
                .map_err(|error| format!("not a tf.train.Example: {error}")),
        }
    }

    fn raw(&self, record: usize) -> Option<Bytes> {
        self.get(record)
    }
}

/// Checks, decompresses and splits the body of a chunk. Every byte of it must be accounted for.
pub fn decode(header: &Header, body: Vec<u8>) -> Result<RawRecords, ChunkError> {
    if (body.len() as u64) < u64::from(header.compressed_size) {
        let has = body.len() as u64;
        return Err(ChunkError::BodyTruncated { needs: header.compressed_size, has });
    }
    let found = crc32fast::hash(&body);
    if found != header.checksum {
        return Err(ChunkError::Checksum { expected: header.checksum, found });
    }
    let data = header.compressor.unpack(body)?;
    let mut spans = Vec::with_capacity((header.n_records as usize).min(data.len() / 4));
    let mut at = 0;
    for record in 0..header.n_records {
        let misfit = || ChunkError::Record { record, n_records: header.n_records };
        let len = data.get(at..).and_then(<[u8]>::first_chunk).ok_or_else(misfit)?;
        let start = at + 4;
        let end = start.checked_add(u32::from_le_bytes(*len) as usize).ok_or_else(misfit)?;
        if end > data.len() {
            return Err(misfit());
        }
        spans.push((start, end));
        at = end;
    }
    if at != data.len() {
        let extra = data.len() - at;
        return Err(ChunkError::Trailing { extra, n_records: header.n_records });
    }
    Ok(RawRecords::new(data, spans))
}

/// Packs records into a chunk, header included.
pub fn encode<R: AsRef<[u8]>>(records: &[R], compressor: Compressor) -> io::Result<Vec<u8>> {
    let too_large =
        |_| io::Error::new(io::ErrorKind::InvalidInput, "a chunk must be smaller than 4 GiB");
    let mut body = Vec::new();
    for record in records {
        let record = record.as_ref();
        body.extend(u32::try_from(record.len()).map_err(too_large)?.to_le_bytes());
        body.extend_from_slice(record);
    }
    let body = compressor.pack(body)?;
    let header = Header {
        checksum: crc32fast::hash(&body),
        compressor,
        compressed_size: u32::try_from(body.len()).map_err(too_large)?,
        n_records: u32::try_from(records.len()).map_err(too_large)?,
    };
    let mut chunk = header.to_bytes().to_vec();
    chunk.extend(body);
    Ok(chunk)
}

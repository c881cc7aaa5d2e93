// SPDX-License-Identifier: Apache-2.0
//! Names of blobs: the SHA-256 of their bytes.

use std::fmt;
use std::io::{self, Write};

use serde::{Deserialize, Deserializer, Serialize};
use sha2::{Digest as _, Sha256};

const PREFIX: &str = "sha256:";
const N_HEX_DIGITS: usize = 64;

/// `sha256:` and 64 hexadecimal digits. It is safe as the name of a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Digest(String);

/// Not a digest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a SHA-256 digest")]
pub struct Error(String);

impl Digest {
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = Sha256::new();
        hasher.update(bytes);
        Self::finish(hasher)
    }

    /// Parses `sha256:…`; other algorithms are rejected.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let hex = text.strip_prefix(PREFIX).unwrap_or_default();
        let is_hex = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
        if hex.len() == N_HEX_DIGITS && hex.chars().all(is_hex) {
            Ok(Self(text.into()))
        } else {
            Err(Error(text.into()))
        }
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    #[must_use]
    pub fn hex(&self) -> &str {
        &self.0[PREFIX.len()..]
    }

    fn finish(hasher: Sha256) -> Self {
        let mut text = String::from(PREFIX);
        for byte in hasher.finalize() {
            text.push_str(&format!("{byte:02x}"));
        }
        Self(text)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

/// A writer that counts and hashes what passes through.
#[derive(Debug)]
pub struct Hashed<W> {
    inner: W,
    hasher: Sha256,
    n_bytes: u64,
}

impl<W: Write> Hashed<W> {
    pub fn new(inner: W) -> Self {
        Self { inner, hasher: Sha256::new(), n_bytes: 0 }
    }

    pub fn finish(self) -> (W, Digest, u64) {
        (self.inner, Digest::finish(self.hasher), self.n_bytes)
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.n_bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn a_digest_is_that_of_the_standard() {
        assert_eq!(Digest::of(b"").to_string(), EMPTY);
        let mut hashed = Hashed::new(Vec::new());
        hashed.write_all(b"ab").unwrap();
        hashed.write_all(b"c").unwrap();
        let (bytes, digest, n_bytes) = hashed.finish();
        assert_eq!((bytes.as_slice(), n_bytes), (&b"abc"[..], 3));
        assert_eq!(digest, Digest::of(b"abc"));
    }

    #[test]
    fn what_is_no_digest_never_becomes_the_name_of_a_file() {
        assert_eq!(Digest::parse(EMPTY).unwrap().to_string(), EMPTY);
        for wrong in ["", "sha256:", "sha512:00", "sha256:../../etc/passwd", &EMPTY.to_uppercase()]
        {
            assert_eq!(Digest::parse(wrong), Err(Error(wrong.into())));
        }
    }
}

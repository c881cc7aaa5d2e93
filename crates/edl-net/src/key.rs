// SPDX-License-Identifier: Apache-2.0
//! The job's key: 32 random bytes made when a job is submitted. All processes of the job have it.

use std::fmt;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The one secret of a job. All authentication is derived from it.
#[derive(Clone)]
pub struct JobKey([u8; 32]);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the job key `{}`", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write the job key `{}`", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("`{}` is not a job key; expected 64 hexadecimal digits", path.display())]
    NotAKey { path: PathBuf },
    #[error("cannot get random numbers from the system: {0}")]
    NoRandom(String),
}

impl JobKey {
    /// A new key from the system's random numbers.
    pub fn generate() -> Result<Self, Error> {
        let mut bytes = [0; 32];
        random(&mut bytes)?;
        Ok(Self(bytes))
    }

    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Reads 64 hexadecimal digits; white space around them does not matter.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(bytes))
    }

    /// What `parse` reads.
    #[must_use]
    pub fn to_text(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub fn load(path: &Path) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| Error::Read { path: path.into(), source })?;
        Self::parse(&text).ok_or_else(|| Error::NotAKey { path: path.into() })
    }

    /// Writes a new file that only its owner can read; an existing one is never replaced.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        let write = || -> io::Result<()> {
            let mut file =
                std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
            file.write_all(self.to_text().as_bytes())?;
            file.write_all(b"\n")?;
            file.sync_all()
        };
        write().map_err(|source| Error::Write { path: path.into(), source })
    }

    /// The token that allows a user to change the job on its page. It gives access to nothing else.
    #[must_use]
    pub fn page_token(&self) -> String {
        self.derive("page").iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whether `token` is the page's token, in constant time.
    #[must_use]
    pub fn is_page_token(&self, token: &str) -> bool {
        blake3::hash(token.as_bytes()) == blake3::hash(self.page_token().as_bytes())
    }

    /// A key for one purpose. It reveals nothing about the job's key or the keys of other purposes.
    #[must_use]
    pub(crate) fn derive(&self, purpose: &str) -> [u8; 32] {
        blake3::derive_key(&format!("elasticdl v1 {purpose}"), &self.0)
    }
}

impl PartialEq for JobKey {
    /// In constant time, as every comparison of secrets.
    fn eq(&self, other: &Self) -> bool {
        blake3::Hash::from(self.0) == blake3::Hash::from(other.0)
    }
}

impl Eq for JobKey {}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(hidden)")
    }
}

/// Fills `bytes` with the system's random numbers.
pub(crate) fn random(bytes: &mut [u8]) -> Result<(), Error> {
    getrandom::fill(bytes).map_err(|error| Error::NoRandom(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_saved_key_is_private_and_loads_as_itself() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.key");
        let key = JobKey::generate().unwrap();
        key.save(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(JobKey::load(&path).unwrap(), key);
        assert_ne!(JobKey::generate().unwrap(), key);
    }

    #[test]
    fn a_key_is_never_overwritten_by_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.key");
        let key = JobKey::from_bytes([7; 32]);
        key.save(&path).unwrap();
        assert!(matches!(JobKey::from_bytes([8; 32]).save(&path), Err(Error::Write { .. })));
        assert_eq!(JobKey::load(&path).unwrap(), key);
    }

    #[test]
    fn what_is_not_a_key_is_refused_and_a_key_is_not_printed() {
        for text in ["", "12", &"g".repeat(64), &"0".repeat(63), &"é".repeat(32)] {
            assert!(JobKey::parse(text).is_none(), "{text}");
        }
        let key = JobKey::parse(&format!("  {}\n", "ab".repeat(32))).unwrap();
        assert_eq!(key, JobKey::from_bytes([0xab; 32]));
        assert!(!format!("{key:?}").contains("ab"));
    }

    #[test]
    fn each_purpose_has_its_own_key() {
        let key = JobKey::from_bytes([1; 32]);
        assert_ne!(key.derive("a"), key.derive("b"));
        assert_ne!(key.derive("a"), JobKey::from_bytes([2; 32]).derive("a"));
        assert!(key.is_page_token(&key.page_token()));
        assert!(!key.is_page_token(&JobKey::from_bytes([2; 32]).page_token()));
        assert!(!key.is_page_token(""));
    }
}

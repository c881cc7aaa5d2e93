// SPDX-License-Identifier: Apache-2.0
//! What survives a master: a small transactional file in the job's folder.
//!
//! Opening it takes the file's lock and the next term, so that two masters can never both speak
//! for a job on one machine.

use std::path::{Path, PathBuf};

use edl_core::id::{RunId, Term};
use edl_core::job::Durable;
use edl_core::spec::JobSpec;
use redb::{Database, ReadableDatabase, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Raised when what is stored changes its meaning.
const FORMAT: u32 = 1;
const FACTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("facts");

/// The open file.
pub(crate) struct Store {
    database: Database,
    path: PathBuf,
}

/// What was found in it.
pub(crate) struct Opened {
    pub(crate) term: Term,
    pub(crate) run: RunId,
    pub(crate) durable: Durable,
    /// None on the first start.
    pub(crate) spec: Option<JobSpec>,
    pub(crate) fingerprint: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("another master has `{}` open; stop it first", path.display())]
    InUse { path: PathBuf },
    #[error("cannot {action} `{}`", path.display())]
    Database { action: &'static str, path: PathBuf, source: Box<redb::Error> },
    #[error("`{}` contains an invalid `{key}`", path.display())]
    Broken { path: PathBuf, key: &'static str, source: serde_json::Error },
    #[error("`{}` has format {found}, this build reads format {FORMAT}; use the build that wrote it", path.display())]
    Format { path: PathBuf, found: u32 },
    #[error("cannot get random numbers from the system")]
    Random,
}

impl Store {
    /// Opens or makes the file, and takes the next term.
    pub(crate) fn open(path: &Path) -> Result<(Self, Opened), Error> {
        let database = Database::create(path).map_err(|error| {
            if matches!(error, redb::DatabaseError::DatabaseAlreadyOpen) {
                Error::InUse { path: path.into() }
            } else {
                Error::Database {
                    action: "open",
                    path: path.into(),
                    source: Box::new(error.into()),
                }
            }
        })?;
        let store = Self { database, path: path.into() };
        let found = store.read("format")?.unwrap_or(FORMAT);
        if found != FORMAT {
            return Err(Error::Format { path: path.into(), found });
        }
        let term = store.read::<Term>("term")?.unwrap_or_default().next();
        let run = match store.read::<String>("run")?.and_then(|text| RunId::parse(&text)) {
            Some(run) => run,
            None => new_run()?,
        };
        let opened = Opened {
            term,
            run,
            durable: store.read("durable")?.unwrap_or_default(),
            spec: store.read("spec")?,
            fingerprint: store.read("fingerprint")?,
        };
        store.write(&[
            ("format", json(&FORMAT)),
            ("term", json(&term)),
            ("run", json(&run.to_string())),
        ])?;
        Ok((store, opened))
    }

    /// Remembers what the job may not change any more.
    pub(crate) fn pin(&self, spec: &JobSpec, fingerprint: &str) -> Result<(), Error> {
        self.write(&[("spec", json(spec)), ("fingerprint", json(&fingerprint))])
    }

    pub(crate) fn persist(&self, durable: &Durable) -> Result<(), Error> {
        self.write(&[("durable", json(durable))])
    }

    fn read<T: DeserializeOwned>(&self, key: &'static str) -> Result<Option<T>, Error> {
        let failed = |source: redb::Error| self.failed("read", source);
        let transaction = self.database.begin_read().map_err(|e| failed(e.into()))?;
        let table = match transaction.open_table(FACTS) {
            Ok(table) => table,
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
            Err(error) => return Err(failed(error.into())),
        };
        let Some(value) = table.get(key).map_err(|e| failed(e.into()))? else { return Ok(None) };
        serde_json::from_slice(value.value()).map(Some).map_err(|source| Error::Broken {
            path: self.path.clone(),
            key,
            source,
        })
    }

    fn write(&self, facts: &[(&str, Vec<u8>)]) -> Result<(), Error> {
        let failed = |source: redb::Error| self.failed("write", source);
        let transaction = self.database.begin_write().map_err(|e| failed(e.into()))?;
        {
            let mut table = transaction.open_table(FACTS).map_err(|e| failed(e.into()))?;
            for (key, value) in facts {
                table.insert(*key, value.as_slice()).map_err(|e| failed(e.into()))?;
            }
        }
        transaction.commit().map_err(|e| failed(e.into()))
    }

    fn failed(&self, action: &'static str, source: redb::Error) -> Error {
        Error::Database { action, path: self.path.clone(), source: Box::new(source) }
    }
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("our own types have a JSON form")
}

fn new_run() -> Result<RunId, Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|_| Error::Random)?;
    Ok(RunId(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_start_takes_the_next_term_and_finds_what_was_persisted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("master.redb");
        let spec = JobSpec::default();
        let (store, first) = Store::open(&path).unwrap();
        assert_eq!(first.term, Term(1));
        assert!(matches!(Store::open(&path), Err(Error::InUse { .. })), "two masters at once");
        let durable = Durable { workers_wanted: Some(7), ..Durable::default() };
        store.persist(&durable).unwrap();
        store.pin(&spec, "abc").unwrap();
        drop(store);
        let (_store, second) = Store::open(&path).unwrap();
        assert_eq!((second.term, second.run), (Term(2), first.run));
        assert_eq!(second.durable, durable);
        assert_eq!(second.fingerprint.as_deref(), Some("abc"));
    }
}

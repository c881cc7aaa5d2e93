// SPDX-License-Identifier: Apache-2.0
//! What survives a master: a small transactional file in the job's folder.
//!
//! Opening it takes the file's lock and the next term, so two masters can never both act
//! for a job on one machine. A store that is missing or damaged is recreated: its essential content
//! is also in the manifests of the checkpoints.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use edl_core::error::{chain, is_full};
use edl_core::id::{RunId, Term};
use edl_core::job::{Durable, Fact};
use edl_core::spec::JobSpec;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Raised when what is stored changes its meaning.
const FORMAT: u32 = 2;
/// In this format, the job's durable state is one value among the facts about the store.
const ONE_VALUE: u32 = 1;
const ONE_VALUE_KEY: &str = "durable";
/// Facts about the store and the job that it belongs to.
const FACTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("facts");
/// The job's durable facts.
const DURABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("durable");
/// A store gets its name when it is whole. Until then its name is this and a random number.
const DRAFT: &str = ".master.redb.";

/// The file. It is closed after a failed write, and opened again by the next one.
pub(crate) struct Store {
    path: PathBuf,
    database: Option<Database>,
    term: Term,
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

/// What other files say about earlier masters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Earlier {
    pub(crate) run: Option<RunId>,
    pub(crate) term: Term,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("another master has `{}` open; stop it first", path.display())]
    InUse { path: PathBuf },
    #[error("cannot {action} `{}`", path.display())]
    Database { action: &'static str, path: PathBuf, source: Box<redb::Error> },
    #[error("cannot {action} `{}`", path.display())]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("`{}` contains an invalid `{key}`", path.display())]
    Broken { path: PathBuf, key: String, source: serde_json::Error },
    #[error("`{}` has format {found}, this build reads formats up to {FORMAT}; use the build that wrote it", path.display())]
    Format { path: PathBuf, found: u32 },
    #[error("cannot get random numbers from the system")]
    Random,
}

impl Error {
    /// Whether the file can never be read again, by any build.
    fn is_damage(&self) -> bool {
        let is_damage =
            |kind| matches!(kind, io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof);
        match self {
            Self::Broken { .. } => true,
            Self::Database { source, .. } => {
                matches!(
                    **source,
                    redb::Error::Corrupted(_) | redb::Error::TableTypeMismatch { .. }
                ) || self.io_kind().is_some_and(is_damage)
            }
            Self::InUse { .. } | Self::File { .. } | Self::Format { .. } | Self::Random => false,
        }
    }

    /// Whether another build has to read it.
    pub(crate) fn is_other_build(&self) -> bool {
        matches!(self, Self::Format { .. })
    }

    /// Whether the same may succeed when there is room on the disk.
    pub(crate) fn is_disk_full(&self) -> bool {
        self.io_kind().is_some_and(is_full)
    }

    /// What the system says to it.
    pub(crate) fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::File { source, .. } => Some(source.kind()),
            Self::Database { source, .. } => {
                if let redb::Error::Io(error) = &**source {
                    Some(error.kind())
                } else {
                    None
                }
            }
            Self::InUse { .. } | Self::Broken { .. } | Self::Format { .. } | Self::Random => None,
        }
    }
}

impl Store {
    /// Opens or makes the file, and takes the next term.
    pub(crate) fn open(path: &Path, earlier: Earlier) -> Result<(Self, Opened), Error> {
        let mut database = match open(path) {
            Ok(database) => database,
            Err(error) if error.io_kind() == Some(io::ErrorKind::NotFound) => create(path)?,
            Err(error) if error.is_damage() => replace(path, &error)?,
            Err(error) => return Err(error),
        };
        let facts = match Facts::read(path, &database) {
            Err(error) if error.is_damage() => {
                // Its lock would be kept in addition to that of the new one.
                drop(database);
                database = replace(path, &error)?;
                Facts::default()
            }
            facts => facts?,
        };
        let term = facts.term.max(earlier.term).next();
        let run = match facts.run.or(earlier.run) {
            Some(run) => run,
            None => RunId(random()?),
        };
        let Facts { format, durable, spec, fingerprint, .. } = facts;
        let mut store = Self { path: path.into(), database: Some(database), term };
        let about = [
            ("format", json(&FORMAT)),
            ("term", json(&term)),
            ("run", json(&run.to_string())),
            (ONE_VALUE_KEY, Vec::new()),
        ];
        let is_old = format == Some(ONE_VALUE);
        let facts = if is_old { durable.changes(&Durable::default()) } else { Vec::new() };
        store.write(&about, &facts)?;
        remove_drafts(path);
        Ok((store, Opened { term, run, durable, spec, fingerprint }))
    }

    /// Stores what the job may no longer change.
    pub(crate) fn pin(&mut self, spec: &JobSpec, fingerprint: &str) -> Result<(), Error> {
        self.write(&[("spec", json(spec)), ("fingerprint", json(&fingerprint))], &[])
    }

    /// Writes facts of the job in one transaction.
    pub(crate) fn persist(&mut self, facts: &[Fact]) -> Result<(), Error> {
        self.write(&[], facts)
    }

    fn write(&mut self, about: &[(&str, Vec<u8>)], facts: &[Fact]) -> Result<(), Error> {
        let database = match self.database.take() {
            Some(database) => database,
            None => self.open_again()?,
        };
        write(&database, about, facts).map_err(|error| failed("write", &self.path, error))?;
        self.database = Some(database);
        Ok(())
    }

    /// Opens the file after a failed write, unless another master has taken it meanwhile.
    fn open_again(&self) -> Result<Database, Error> {
        let database = open(&self.path)?;
        match Facts::read(&self.path, &database)?.term == self.term {
            true => Ok(database),
            false => Err(Error::InUse { path: self.path.clone() }),
        }
    }
}

/// What a store contains; nothing while it is new.
#[derive(Default)]
struct Facts {
    format: Option<u32>,
    term: Term,
    run: Option<RunId>,
    durable: Durable,
    spec: Option<JobSpec>,
    fingerprint: Option<String>,
}

impl Facts {
    fn read(path: &Path, database: &Database) -> Result<Self, Error> {
        let format = read(path, database, "format")?;
        let durable = match format {
            Some(ONE_VALUE) => read(path, database, ONE_VALUE_KEY)?.unwrap_or_default(),
            None | Some(FORMAT) => read_durable(path, database)?,
            Some(found) => return Err(Error::Format { path: path.into(), found }),
        };
        Ok(Self {
            format,
            durable,
            term: read(path, database, "term")?.unwrap_or_default(),
            run: read::<String>(path, database, "run")?.and_then(|text| RunId::parse(&text)),
            spec: read(path, database, "spec")?,
            fingerprint: read(path, database, "fingerprint")?,
        })
    }
}

fn open(path: &Path) -> Result<Database, Error> {
    Database::open(path).map_err(|error| {
        let is_open = matches!(error, redb::DatabaseError::DatabaseAlreadyOpen);
        if is_open {
            Error::InUse { path: path.into() }
        } else {
            failed("open", path, error.into())
        }
    })
}

/// Makes a new file. Under its own name it is whole, whenever this process is killed.
fn create(path: &Path) -> Result<Database, Error> {
    let number = u64::from_le_bytes(random()?);
    let draft = path.with_file_name(format!("{DRAFT}{number:x}"));
    let created = create_as(&draft, path);
    // The lock stays with the file, whatever its name.
    let removed = fs::remove_file(&draft);
    let database = created?;
    removed.and_then(|()| sync_folder_of(path)).map_err(|source| Error::File {
        action: "create",
        path: path.into(),
        source,
    })?;
    Ok(database)
}

fn create_as(draft: &Path, path: &Path) -> Result<Database, Error> {
    let failed = |error: redb::Error| failed("create", path, error);
    let database = Database::create(draft).map_err(|error| failed(error.into()))?;
    write(&database, &[("format", json(&FORMAT))], &[]).map_err(failed)?;
    // A link, unlike a rename, fails if another master was faster.
    match fs::hard_link(draft, path) {
        Ok(()) => Ok(database),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Err(Error::InUse { path: path.into() })
        }
        Err(source) => Err(Error::File { action: "create", path: path.into(), source }),
    }
}

/// Sets a damaged file aside and makes a new one.
fn replace(path: &Path, damage: &Error) -> Result<Database, Error> {
    let aside = path.with_extension("redb.damaged");
    fs::rename(path, &aside).map_err(|source| Error::File {
        action: "rename",
        path: path.into(),
        source,
    })?;
    let kept = aside.display();
    tracing::warn!("{}; renamed it to `{kept}`; using the checkpoints instead", chain(damage));
    create(path)
}

/// Removes what masters that were killed have left of new files.
fn remove_drafts(path: &Path) {
    let folder = path.parent().map(fs::read_dir).and_then(Result::ok);
    for entry in folder.into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(DRAFT) {
            // This is harmless: the next master tries again.
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn sync_folder_of(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

fn read<T: DeserializeOwned>(
    path: &Path,
    database: &Database,
    key: &str,
) -> Result<Option<T>, Error> {
    let failed = |source: redb::Error| failed("read", path, source);
    let Some(table) = open_table(database, FACTS).map_err(failed)? else { return Ok(None) };
    let Some(value) = table.get(key).map_err(|e| failed(e.into()))? else { return Ok(None) };
    serde_json::from_slice(value.value()).map(Some).map_err(|source| Error::Broken {
        path: path.into(),
        key: key.into(),
        source,
    })
}

fn read_durable(path: &Path, database: &Database) -> Result<Durable, Error> {
    let facts = read_facts(database).map_err(|error| failed("read", path, error))?;
    let facts = facts.iter().map(|(key, value)| (key.as_str(), value.as_slice()));
    let broken = |(key, source)| Error::Broken { path: path.into(), key, source };
    Durable::from_facts(facts).map_err(broken)
}

fn read_facts(database: &Database) -> Result<Vec<(String, Vec<u8>)>, redb::Error> {
    let Some(table) = open_table(database, DURABLE)? else { return Ok(Vec::new()) };
    let mut facts = Vec::new();
    for fact in table.iter()? {
        let (key, value) = fact?;
        facts.push((key.value().to_owned(), value.value().to_owned()));
    }
    Ok(facts)
}

type Table = redb::ReadOnlyTable<&'static str, &'static [u8]>;

/// Opens a table; none if nothing was ever written to it.
fn open_table(
    database: &Database,
    table: TableDefinition<'_, &'static str, &'static [u8]>,
) -> Result<Option<Table>, redb::Error> {
    match database.begin_read()?.open_table(table) {
        Ok(table) => Ok(Some(table)),
        Err(redb::TableError::TableDoesNotExist(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Writes all or nothing. An empty value removes what is said about the store.
fn write(
    database: &Database,
    about: &[(&str, Vec<u8>)],
    facts: &[Fact],
) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    {
        let mut table = transaction.open_table(FACTS)?;
        for (key, value) in about {
            match value.as_slice() {
                [] => drop(table.remove(*key)?),
                value => drop(table.insert(*key, value)?),
            }
        }
        let mut table = transaction.open_table(DURABLE)?;
        for Fact { key, value } in facts {
            match value {
                Some(value) => drop(table.insert(key.as_str(), value.as_bytes())?),
                None => drop(table.remove(key.as_str())?),
            }
        }
    }
    Ok(transaction.commit()?)
}

fn failed(action: &'static str, path: &Path, source: redb::Error) -> Error {
    Error::Database { action, path: path.into(), source: Box::new(source) }
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("our own types have a JSON form")
}

fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|_| Error::Random)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use redb::StorageBackend;
    use redb::backends::FileBackend;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn each_start_takes_the_next_term_and_finds_what_was_persisted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("master.redb");
        let spec = JobSpec::default();
        let (mut store, first) = Store::open(&path, Earlier::default()).unwrap();
        assert_eq!(first.term, Term(1));
        let second = Store::open(&path, Earlier::default());
        assert!(matches!(second, Err(Error::InUse { .. })), "two masters at once");
        let durable = Durable { workers_wanted: Some(7), ..Durable::default() };
        store.persist(&durable.changes(&Durable::default())).unwrap();
        store.pin(&spec, "abc").unwrap();
        drop(store);
        let (_store, second) = Store::open(&path, Earlier::default()).unwrap();
        assert_eq!((second.term, second.run), (Term(2), first.run));
        assert_eq!(second.durable, durable);
        assert_eq!(second.fingerprint.as_deref(), Some("abc"));
    }

    #[test]
    fn a_store_of_the_first_format_is_read_and_becomes_a_table_of_facts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("master.redb");
        let before = r#"{"generation":3,"model":null,"checkpoints":[{"folder":"a","version":5,
            "exact":5,"is_bad":false}],"evaluations":[],"best":null,"workers_wanted":7,
            "failures":[],"holders":[[1,18446744073709551615],[4,9]],"elapsed_secs":1.5,
            "end":null}"#;
        let database = Database::create(&path).unwrap();
        let about = [
            ("format", json(&ONE_VALUE)),
            ("term", json(&Term(8))),
            (ONE_VALUE_KEY, before.as_bytes().to_vec()),
        ];
        write(&database, &about, &[]).unwrap();
        drop(database);
        for term in [9, 10] {
            let (store, opened) = Store::open(&path, Earlier::default()).unwrap();
            let Durable { generation, checkpoints, holders, workers_wanted, .. } = opened.durable;
            assert_eq!((opened.term, generation.0, workers_wanted), (Term(term), 3, Some(7)));
            assert_eq!((checkpoints.len(), checkpoints[0].exact), (1, Some(5)));
            let holders: Vec<_> = holders.unwrap().into_iter().map(|(w, i)| (w.0, i.0)).collect();
            assert_eq!(holders, [(1, u64::MAX), (4, 9)]);
            let database = store.database.as_ref().unwrap();
            assert_eq!(read::<u32>(&path, database, "format").unwrap(), Some(FORMAT));
            assert!(read::<Durable>(&path, database, ONE_VALUE_KEY).unwrap().is_none());
        }
    }

    #[test]
    fn a_store_of_a_later_format_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("master.redb");
        let database = Database::create(&path).unwrap();
        write(&database, &[("format", json(&9))], &[]).unwrap();
        drop(database);
        let opened = Store::open(&path, Earlier::default());
        assert!(matches!(opened, Err(Error::Format { found: 9, .. })));
    }

    #[test]
    fn a_store_has_its_name_only_when_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("master.redb");
        // A master that was killed while it made the store.
        fs::write(folder.path().join(".master.redb.1f"), "half").unwrap();
        let (_store, opened) = Store::open(&path, Earlier::default()).unwrap();
        assert_eq!(opened.term, Term(1));
        assert_eq!(names(folder.path()), ["master.redb"]);
    }

    #[test]
    fn a_damaged_store_is_set_aside_and_the_run_goes_on() {
        let earlier = Earlier { run: Some(RunId([7; 16])), term: Term(4) };
        let intact = tempfile::tempdir().unwrap();
        let path = intact.path().join("master.redb");
        drop(Store::open(&path, earlier).unwrap());
        let whole = fs::read(&path).unwrap();
        for damaged in [&b"half a store"[..], b"", &whole[..64], &whole[..whole.len() / 2]] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("master.redb");
            fs::write(&path, damaged).unwrap();
            let (_store, opened) = Store::open(&path, earlier).unwrap();
            assert_eq!((opened.term, opened.run), (Term(5), RunId([7; 16])));
            assert_eq!(names(folder.path()), ["master.redb", "master.redb.damaged"]);
        }
    }

    /// A file on a disk that may be full.
    #[derive(Debug)]
    struct Disk {
        file: FileBackend,
        is_full: Arc<AtomicBool>,
    }

    impl StorageBackend for Disk {
        fn len(&self) -> io::Result<u64> {
            self.file.len()
        }

        fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            self.file.read(offset, out)
        }

        fn set_len(&self, len: u64) -> io::Result<()> {
            self.file.set_len(len)
        }

        fn sync_data(&self) -> io::Result<()> {
            self.file.sync_data()
        }

        fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
            match self.is_full.load(Ordering::Relaxed) {
                true => Err(io::ErrorKind::StorageFull.into()),
                false => self.file.write(offset, data),
            }
        }
    }

    #[test]
    fn a_store_on_a_full_disk_works_again_when_there_is_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("master.redb");
        let (mut store, opened) = Store::open(&path, Earlier::default()).unwrap();
        store.database = None;
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let is_full = Arc::new(AtomicBool::new(false));
        let disk = Disk { file: FileBackend::new(file).unwrap(), is_full: Arc::clone(&is_full) };
        store.database = Some(Database::builder().create_with_backend(disk).unwrap());
        is_full.store(true, Ordering::Relaxed);
        let durable = Durable { workers_wanted: Some(7), ..Durable::default() };
        let facts = durable.changes(&Durable::default());
        assert!(store.persist(&facts).unwrap_err().is_disk_full());
        store.persist(&facts).unwrap();
        drop(store);
        let (_store, found) = Store::open(&path, Earlier::default()).unwrap();
        assert_eq!((found.durable, found.term), (durable, opened.term.next()));
    }

    #[test]
    fn a_master_whose_store_was_taken_cannot_write_any_more() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("master.redb");
        let (mut store, _) = Store::open(&path, Earlier::default()).unwrap();
        // As after a write that failed on a full disk.
        store.database = None;
        store.persist(&[Fact::elapsed(1.0)]).unwrap();
        store.database = None;
        drop(Store::open(&path, Earlier::default()).unwrap());
        let taken = store.persist(&[Fact::elapsed(1.0)]);
        assert!(matches!(taken, Err(Error::InUse { .. })));
    }
}

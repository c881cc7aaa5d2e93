// SPDX-License-Identifier: Apache-2.0
//! The thread that reads and decodes records ahead of the compute thread.
//!
//! It reads what is requested, in that order. Data is opened when it is first needed, and refused
//! if it has changed since the job was started.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use edl_core::batch::BatchPlan;
use edl_core::id::BatchId;
use edl_core::model::{FieldSpec, unlabelled};
use edl_core::spec::JobSpec;
use edl_core::worker::Records as Wanted;
use edl_data::{Dataset, OpenOptions, Progress};
use edl_tensor::batch::Batch;

use crate::chain;

/// The data sets of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Source {
    Training,
    Validation,
    Prediction,
}

/// Records by number: the edge that tests replace.
pub(crate) trait Records: Send + Sync {
    fn n_records(&self) -> u64;
    fn batch(&self, records: &[u64], fields: &[FieldSpec]) -> Result<Batch, String>;
    /// Where a record lies, for people.
    fn locate(&self, record: u64) -> String;
}

/// Opens a data set of the job.
pub(crate) type OpenRecords = Box<dyn FnMut(Source) -> Result<Arc<dyn Records>, String> + Send>;

/// A decoded batch, and the data set that can name its records.
pub(crate) struct Decoded {
    pub(crate) batch: Batch,
    pub(crate) data: Arc<dyn Records>,
}

impl Decoded {
    /// How many records these are, and where the first lies, for people.
    pub(crate) fn describe(&self) -> String {
        let records = &self.batch.records;
        let place = records.first().map(|record| self.data.locate(*record)).unwrap_or_default();
        match records.len() {
            1 => format!("1 record at {place}"),
            n => format!("{n} records starting at {place}"),
        }
    }
}

/// How many records each data set had when the job was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) training: u64,
    pub(crate) validation: u64,
    pub(crate) prediction: u64,
}

/// Reads for one compute thread until its channel is closed.
pub(crate) struct Feeder {
    pub(crate) open: OpenRecords,
    /// Opened at once, while the servers are still being connected.
    pub(crate) first: Source,
    pub(crate) counts: Counts,
    pub(crate) plan: BatchPlan,
    /// Lanes per batch.
    pub(crate) n_lanes: u32,
    pub(crate) fields: Vec<FieldSpec>,
    pub(crate) opened: BTreeMap<Source, Arc<dyn Records>>,
}

impl Feeder {
    /// Reads what is requested; a tag of the caller's choice comes back with the answer.
    pub(crate) fn run<T>(
        mut self,
        requests: &Receiver<(T, Wanted)>,
        answer: impl Fn(T, Result<Decoded, String>),
    ) {
        // An error is reported when the data is needed, and then it is tried again.
        if !self.opened.contains_key(&self.first)
            && let Ok(data) = self.open(self.first)
        {
            self.opened.insert(self.first, data);
        }
        for (tag, wanted) in requests {
            answer(tag, self.read(&wanted));
        }
    }

    pub(crate) fn read(&mut self, wanted: &Wanted) -> Result<Decoded, String> {
        let (source, records) = match wanted {
            Wanted::Batch(batch) => (Source::Training, self.records(*batch)?),
            Wanted::Lane(batch, lane) => (Source::Training, self.records_of_lane(*batch, *lane)?),
            Wanted::Validation(records) => (Source::Validation, records.clone().collect()),
            Wanted::Prediction(records) => (Source::Prediction, records.clone().collect()),
        };
        let data = match self.opened.get(&source) {
            Some(data) => Arc::clone(data),
            None => {
                let data = self.open(source)?;
                self.opened.insert(source, Arc::clone(&data));
                data
            }
        };
        let batch = match source {
            Source::Training | Source::Validation => data.batch(&records, &self.fields)?,
            Source::Prediction => data.batch(&records, &unlabelled(&self.fields))?,
        };
        Ok(Decoded { batch, data })
    }

    fn records(&self, batch: BatchId) -> Result<Vec<u64>, String> {
        self.check(batch)?;
        Ok(self.plan.records(batch))
    }

    fn records_of_lane(&self, batch: BatchId, lane: u32) -> Result<Vec<u64>, String> {
        self.check(batch)?;
        let records = self.plan.records_of_lane(batch, lane, self.n_lanes);
        records.ok_or_else(|| format!("batch {batch} has no lane {lane}"))
    }

    fn check(&self, batch: BatchId) -> Result<(), String> {
        if batch.index < self.plan.n_batches() {
            return Ok(());
        }
        Err(format!("batch {batch} is not part of this job"))
    }

    fn open(&mut self, source: Source) -> Result<Arc<dyn Records>, String> {
        let data = (self.open)(source)?;
        let expected = match source {
            Source::Training => self.counts.training,
            Source::Validation => self.counts.validation,
            Source::Prediction => self.counts.prediction,
        };
        if data.n_records() == expected {
            return Ok(data);
        }
        Err(format!(
            "the {} data has changed: it has {} records, but had {expected} when the job started",
            source.name(),
            data.n_records(),
        ))
    }
}

impl Source {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Training => "training",
            Self::Validation => "validation",
            Self::Prediction => "prediction",
        }
    }
}

impl Records for Dataset {
    fn n_records(&self) -> u64 {
        self.n_records()
    }

    fn batch(&self, records: &[u64], fields: &[FieldSpec]) -> Result<Batch, String> {
        self.batch(records, fields).map_err(|error| chain(&error))
    }

    fn locate(&self, record: u64) -> String {
        self.locate(record)
    }
}

/// Opens the data that the job's description names, by the index that the master has left in the
/// folder `indexes`.
pub(crate) fn open_records(spec: &JobSpec, indexes: PathBuf) -> OpenRecords {
    let spec = spec.clone();
    Box::new(move |source| {
        let location = match source {
            Source::Training => &spec.training_data,
            Source::Validation => &spec.validation_data,
            Source::Prediction => &spec.prediction_data,
        };
        let params = spec.data_reader_params.clone();
        let options = OpenOptions { codec: spec.codec_type, params };
        let progress = Progress::default();
        let data = Dataset::open_indexed(location, &options, Some(&indexes), &progress);
        Ok(Arc::new(data.map_err(|error| chain(&error))?))
    })
}

#[test]
fn a_worker_reads_the_index_that_the_master_has_left() {
    let folder = tempfile::tempdir().unwrap();
    let (path, indexes) = (folder.path().join("data.csv"), folder.path().join("index"));
    std::fs::write(&path, "a\n1\n2\n3\n").unwrap();
    let spec = JobSpec { training_data: path.to_str().unwrap().to_owned(), ..JobSpec::default() };
    let (options, progress) = (OpenOptions::default(), Progress::default());
    let indexed =
        Dataset::open_indexed(&spec.training_data, &options, Some(&indexes), &progress).unwrap();
    indexed.save_index(&indexes).unwrap();
    // A file with one record, of the same length and age, which nothing but reading it shows.
    let written = std::fs::metadata(&path).unwrap().modified().unwrap();
    std::fs::write(&path, "a\n12345\n").unwrap();
    std::fs::File::options().append(true).open(&path).unwrap().set_modified(written).unwrap();
    let data = open_records(&spec, indexes)(Source::Training).unwrap();
    assert_eq!(data.n_records(), 3);
}

// SPDX-License-Identifier: Apache-2.0
//! The thread that reads and decodes records ahead of the compute thread.
//!
//! It reads what it is asked for, in that order; how far ahead is up to the asker. Data is
//! opened when it is first needed, and refused when it is not what the job was started with.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use edl_core::batch::BatchPlan;
use edl_core::id::BatchId;
use edl_core::lanes;
use edl_core::model::{FieldSpec, unlabelled};
use edl_core::spec::JobSpec;
use edl_data::{Dataset, OpenOptions};
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

/// What to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    Batch(BatchId),
    /// What one lane trains of a batch.
    Lane(BatchId, u32),
    Range(Source, Range<u64>),
}

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

/// Reads for one compute thread until it hangs up.
pub(crate) struct Feeder {
    pub(crate) open: OpenRecords,
    /// Opened at once, while the servers are still being connected.
    pub(crate) first: Source,
    pub(crate) counts: Counts,
    pub(crate) plan: BatchPlan,
    /// Into how many lanes a batch is cut.
    pub(crate) n_lanes: u32,
    pub(crate) fields: Vec<FieldSpec>,
}

impl Feeder {
    /// Reads what it is asked for; a tag of the asker's choice comes back with the answer.
    pub(crate) fn run<T>(
        mut self,
        asks: &Receiver<(T, Read)>,
        tell: impl Fn(T, Result<Decoded, String>),
    ) {
        let mut opened = BTreeMap::new();
        // An error is told when the data is asked for, and then it is tried again.
        if let Ok(data) = self.open(self.first) {
            opened.insert(self.first, data);
        }
        for (tag, read) in asks {
            tell(tag, self.read(&mut opened, &read));
        }
    }

    fn read(
        &mut self,
        opened: &mut BTreeMap<Source, Arc<dyn Records>>,
        read: &Read,
    ) -> Result<Decoded, String> {
        let (source, records) = match read {
            Read::Batch(batch) => (Source::Training, self.records(*batch)?),
            Read::Lane(batch, lane) => (Source::Training, self.records_of_lane(*batch, *lane)?),
            Read::Range(source, records) => (*source, records.clone().collect()),
        };
        let data = match opened.get(&source) {
            Some(data) => Arc::clone(data),
            None => {
                let data = self.open(source)?;
                opened.insert(source, Arc::clone(&data));
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
        if batch.index >= self.plan.n_batches() {
            return Err(format!("batch {batch} is not part of this job"));
        }
        Ok(self.plan.records(batch))
    }

    fn records_of_lane(&self, batch: BatchId, lane: u32) -> Result<Vec<u64>, String> {
        let records = self.records(batch)?;
        let minibatch = self.plan.minibatch_size / self.n_lanes;
        let shares = lanes::share_out(records.len(), self.n_lanes, minibatch);
        let share = shares.get(lane as usize);
        let share = share.ok_or_else(|| format!("batch {batch} has no lane {lane}"))?;
        Ok(records[share.clone()].to_vec())
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
    fn name(self) -> &'static str {
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

/// Opens the data that the job's description names.
pub(crate) fn open_records(spec: &JobSpec) -> OpenRecords {
    let spec = spec.clone();
    Box::new(move |source| {
        let location = match source {
            Source::Training => &spec.training_data,
            Source::Validation => &spec.validation_data,
            Source::Prediction => &spec.prediction_data,
        };
        let params = spec.data_reader_params.clone();
        let options = OpenOptions { codec: spec.codec_type, params };
        let data = Dataset::open(location, &options).map_err(|error| chain(&error))?;
        Ok(Arc::new(data))
    })
}

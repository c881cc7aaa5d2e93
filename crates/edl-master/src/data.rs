// SPDX-License-Identifier: Apache-2.0
//! Opens the job's data. Its index is built once and kept in the job's folder, for workers and for
//! the next master. While it is being built, the status file shows how far it is, which also shows
//! the supervisor that the master works.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use edl_core::job::JobState;
use edl_core::job_dir::JobDir;
use edl_core::spec::{JobSpec, JobType};
use edl_data::{Dataset, OpenOptions, Progress};
use edl_net::proto;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::journal::replace;
use crate::{Addresses, Config, Error};

/// Between two status files; every supervisor waits longer than that.
const STATUS_EVERY: Duration = Duration::from_secs(1);

/// The data sets of a job, as the master needs to know them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Data {
    pub(crate) n_records: u64,
    pub(crate) n_validation_records: u64,
    pub(crate) n_prediction_records: u64,
    pub(crate) fingerprint: String,
}

/// The data set that is being indexed.
type Current = Mutex<Option<(&'static str, Arc<Progress>)>>;

/// Opens all data of the job; none if the master is shut down before that is done.
pub(crate) async fn open(
    config: &Config,
    addresses: &Addresses,
    shutdown: &CancellationToken,
) -> Result<Option<Data>, Error> {
    let (spec, job_dir) = (config.spec.clone(), config.job_dir.clone());
    let current = Arc::new(Current::default());
    let (done, mut opened) = oneshot::channel();
    let shown = Arc::clone(&current);
    // Not a task of the runtime, which would wait for it at a shutdown.
    let index = move || done.send(open_all(&spec, &job_dir, &shown)).map_err(drop);
    let started = thread::Builder::new().name("index".into()).spawn(index);
    started.map_err(|source| Error::Index { source })?;
    loop {
        tokio::select! {
            data = &mut opened => {
                let panicked = |_| Error::Index { source: std::io::Error::other("see the log") };
                return data.map_err(panicked)?.map(Some);
            }
            () = shutdown.cancelled() => return Ok(None),
            () = tokio::time::sleep(STATUS_EVERY) => publish(config, addresses, &current),
        }
    }
}

fn open_all(spec: &JobSpec, job_dir: &JobDir, current: &Current) -> Result<Data, Error> {
    let options = OpenOptions { codec: spec.codec_type, params: spec.data_reader_params.clone() };
    let indexes = job_dir.indexes();
    let open = |which: &'static str, location: &str| -> Result<Option<Dataset>, Error> {
        if location.is_empty() {
            return Ok(None);
        }
        let progress = Arc::new(Progress::default());
        *lock(current) = Some((which, Arc::clone(&progress)));
        let opened = Dataset::open_indexed(location, &options, Some(&indexes), &progress);
        let data = opened.map_err(|source| Error::Data { which, source: Box::new(source) })?;
        if let Err(error) = data.save_index(&indexes) {
            tracing::warn!(%error, "cannot save the index of the data; every process builds its own");
        }
        Ok(Some(data))
    };
    let count = |dataset: &Option<Dataset>| dataset.as_ref().map_or(0, Dataset::n_records);
    let mut data = Data::default();
    if spec.job_type == JobType::Train {
        let training = open("training", &spec.training_data)?;
        data.n_records = count(&training);
        data.fingerprint = training.map(|t| t.fingerprint().to_owned()).unwrap_or_default();
    }
    if spec.job_type == JobType::Predict {
        data.n_prediction_records = count(&open("prediction", &spec.prediction_data)?);
    } else {
        data.n_validation_records = count(&open("validation", &spec.validation_data)?);
    }
    Ok(data)
}

fn lock(current: &Current) -> std::sync::MutexGuard<'_, Option<(&'static str, Arc<Progress>)>> {
    current.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes the status of a master that indexes data. What a master before has written stays.
fn publish(config: &Config, addresses: &Addresses, current: &Current) {
    let Some((which, progress)) = lock(current).clone() else { return };
    let path = config.job_dir.status();
    let before = std::fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let spec = &config.spec;
    let status = proto::JobStatus {
        job: spec.job_name.clone(),
        state: JobState::Starting.into(),
        reason: describe(which, progress.bytes()),
        num_epochs: spec.num_epochs,
        eta_secs: -1.0,
        master_address: addresses.control.to_string(),
        http_address: addresses.http.to_string(),
        job_dir: config.job_dir.path().to_string_lossy().into_owned(),
        workers_wanted: spec.num_workers,
        job_type: spec.job_type.into(),
        model_def: spec.model_def.clone(),
        distribution_strategy: spec.distribution_strategy.into(),
        ..before.unwrap_or_default()
    };
    tracing::info!(which, reason = status.reason, "indexing data");
    let content = serde_json::to_vec_pretty(&status).map_err(std::io::Error::other);
    if let Err(error) = content.and_then(|content| replace(&path, &content)) {
        tracing::warn!(%error, "cannot write the status");
    }
}

fn describe(which: &str, (done, total): (u64, u64)) -> String {
    // Percent of megabytes: rounded down, so that 100 % means all.
    match done.saturating_mul(100).checked_div(total) {
        Some(percent) => {
            format!("indexing the {which} data: {percent} % of {} MB", total.div_ceil(1_000_000))
        }
        None => format!("listing the {which} data"),
    }
}

#[cfg(test)]
mod tests {
    use edl_net::key::JobKey;

    use super::*;

    fn config(job_dir: &std::path::Path, training_data: &str) -> Config {
        Config {
            job_dir: JobDir::new(job_dir),
            listen: String::new(),
            http_listen: String::new(),
            key: JobKey::from_bytes([7; 32]),
            spec: JobSpec { training_data: training_data.into(), ..JobSpec::default() },
            resume: false,
            ip: None,
            http_hosts: Vec::new(),
            store_patience: Duration::ZERO,
            build: crate::Build::default(),
        }
    }

    fn addresses() -> Addresses {
        let any = std::net::SocketAddr::from(([127, 0, 0, 1], 7));
        Addresses { control: any, http: any }
    }

    #[test]
    fn the_status_names_the_data_and_how_much_of_it_is_indexed() {
        assert_eq!(describe("training", (0, 0)), "listing the training data");
        let expected = "indexing the validation data: 33 % of 3000 MB";
        assert_eq!(describe("validation", (1_000_000_000, 3_000_000_000)), expected);
    }

    #[test]
    fn a_master_that_indexes_keeps_what_is_known_of_its_job() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(folder.path(), "");
        let path = config.job_dir.status();
        let before = proto::JobStatus {
            step: 37,
            state: JobState::Running.into(),
            ..proto::JobStatus::default()
        };
        std::fs::write(&path, serde_json::to_vec(&before).unwrap()).unwrap();
        let current = Mutex::new(Some(("training", Arc::new(Progress::default()))));
        publish(&config, &addresses(), &current);
        let after: proto::JobStatus =
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!((after.step, after.state()), (37, JobState::Starting));
        assert_eq!(after.reason, "listing the training data");
    }

    #[tokio::test]
    async fn the_status_is_written_while_data_is_indexed() {
        let folder = tempfile::tempdir().unwrap();
        // A pipe that nothing is written to.
        let data = folder.path().join("data.csv");
        assert!(std::process::Command::new("mkfifo").arg(&data).status().unwrap().success());
        let config = config(folder.path(), data.to_str().unwrap());
        let (addresses, shutdown) = (addresses(), CancellationToken::new());
        let is_shown = async {
            let is_written = || std::fs::read_to_string(config.job_dir.status());
            while !is_written().is_ok_and(|text| text.contains("listing the training data")) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            shutdown.cancel();
        };
        let opened = open(&config, &addresses, &shutdown);
        let limit = Duration::from_secs(60);
        let both = async { tokio::join!(opened, is_shown) };
        let (opened, ()) = tokio::time::timeout(limit, both).await.expect("a status");
        assert!(opened.unwrap().is_none(), "the master was shut down before");
    }

    #[tokio::test]
    async fn the_index_is_left_in_the_folder_of_the_job() {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data.csv");
        std::fs::write(&data, "a\n1\n2\n3\n").unwrap();
        let config = config(folder.path(), data.to_str().unwrap());
        let opened = open(&config, &addresses(), &CancellationToken::new()).await.unwrap();
        assert_eq!(opened.map(|data| data.n_records), Some(3));
        assert_eq!(std::fs::read_dir(config.job_dir.indexes()).unwrap().count(), 1);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Files and folders: what is written is read back, and nothing else is accepted.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;

use edl_core::error::chain;
use edl_core::id::{PartitionId, Term};
use edl_core::layout::Layout;
use edl_core::optimizer::OptimizerKind;
use edl_core::spec::Mode;
use proptest::prelude::*;
use safetensors::SafeTensors;

use super::*;
use crate::import::ExportedModel;
use crate::tests::fixture::{Job, batch};
use crate::{export, fuzz};

fn job() -> Job {
    Job::new(Mode::Async).with_adam()
}

/// Four partitions that have applied some batches.
fn trained(job: &Job) -> Vec<Partition> {
    let mut partitions = job.partitions();
    for partition in &mut partitions {
        for index in 0..5 {
            partition.push(&job.push(batch(index), 0, 0..4));
        }
    }
    partitions
}

fn manifest(job: &Job, checkpoint: u64, version: u64, files: Vec<FileEntry>) -> Manifest {
    Manifest {
        format: FORMAT,
        version,
        exact: None,
        generation: Generation(1),
        checkpoint: CheckpointId(checkpoint),
        term: Term(1),
        run: "00".repeat(16),
        job: "test".into(),
        seed: 11,
        model: (*job.model).clone(),
        optimizer: job.optimizer.clone(),
        n_batches: job.n_batches,
        n_partitions: job.n_partitions,
        fingerprint: "f".into(),
        files,
        metrics: BTreeMap::from([("accuracy".into(), 0.5)]),
        skipped: Default::default(),
    }
}

/// Makes files a complete checkpoint.
pub(crate) fn commit(job: &Job, dir: &Path, files: Vec<FileEntry>) {
    let layout = job.layout();
    let format = format(layout.is_apart);
    let manifest = manifest(job, 1, 1, files);
    let n_partitions = layout.n_partitions;
    commit_manifest(dir, &Manifest { format, n_partitions, ..manifest }).unwrap();
}

const RUN: RunId = RunId([0; 16]);

/// An empty folder for a checkpoint.
fn folder(dir: &Path, checkpoint: u64, version: u64, generation: u64, run: RunId) -> PathBuf {
    let (checkpoint, generation) = (CheckpointId(checkpoint), Generation(generation));
    let name = CheckpointName { generation, version, checkpoint, run };
    let folder = dir.join(name.to_string());
    fs::create_dir(&folder).unwrap();
    folder
}

/// Writes a complete checkpoint below `dir`.
fn write(job: &Job, dir: &Path, checkpoint: u64, version: u64) -> PathBuf {
    let folder = folder(dir, checkpoint, version, 1, RUN);
    let files = trained(job).iter().map(|p| write_file(&folder, &p.snapshot()).unwrap()).collect();
    commit_manifest(&folder, &manifest(job, checkpoint, version, files)).unwrap();
    folder
}

fn encoded(job: &Job) -> Vec<u8> {
    let mut bytes = Vec::new();
    codec::encode(&trained(job)[1].snapshot(), &mut bytes).unwrap();
    bytes
}

/// The numbers in bytes that need not be aligned.
fn numbers<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

#[test]
fn what_is_written_is_read_back() {
    let (job, dir) = (job(), tempfile::tempdir().unwrap());
    let folder = write(&job, dir.path(), 1, 5);
    let found = find(dir.path()).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0], Checkpoint::open(&folder).unwrap());
    for (entry, partition) in found[0].manifest.files.iter().zip(trained(&job)) {
        let config = job.config(entry.partition.0);
        let back = read_partition(&folder, entry, config, true).unwrap();
        assert_eq!(back.snapshot(), partition.snapshot());
        assert_eq!(entry.updates, 5);
    }
    let names: Vec<_> = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 5, "no temporary file stays: {names:?}");
}

#[test]
fn the_state_of_a_training_script_is_read_back_by_such_a_job_alone() {
    let mut job = job();
    job.optimizer.kind = OptimizerKind::Script { nonfinite: false };
    let mut snapshot = job.partitions().swap_remove(0).snapshot();
    let plain = snapshot.n_bytes();
    let mut bytes = Vec::new();
    codec::encode(&snapshot, &mut bytes).unwrap();
    assert_eq!(bytes[8..12], FORMAT.to_le_bytes(), "earlier builds read files without a state");
    assert!(Partition::restore(job.config(0), &mut bytes.as_slice(), true).is_ok());
    snapshot.state = (0..=255).collect();
    assert_eq!(snapshot.n_bytes(), plain + 256);
    bytes.clear();
    codec::encode(&snapshot, &mut bytes).unwrap();
    assert_eq!(bytes[8..12], FORMAT_SCRIPT.to_le_bytes());
    let (read, _) = codec::decode(&mut bytes.as_slice()).unwrap();
    assert_eq!(read, snapshot);
    for length in 0..bytes.len() {
        assert!(codec::decode(&mut &bytes[..length]).is_err(), "{length} bytes");
    }
    let restored = Partition::restore(job.config(0), &mut bytes.as_slice(), true).unwrap();
    assert_eq!(restored.snapshot(), snapshot);
    job.optimizer.kind = OptimizerKind::Sgd;
    let restored = Partition::restore(job.config(0), &mut bytes.as_slice(), false).unwrap();
    assert!(restored.snapshot().state.is_empty());
}

#[test]
fn a_changed_byte_anywhere_is_noticed() {
    let (job, bytes) = (job(), encoded(&job()));
    assert!(Partition::restore(job.config(1), &mut bytes.as_slice(), true).is_ok());
    for place in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[place] ^= 0x40;
        let result = Partition::restore(job.config(1), &mut damaged.as_slice(), true);
        assert!(result.is_err(), "byte {place} of {}", bytes.len());
    }
}

#[test]
fn a_file_of_any_other_length_is_refused() {
    let bytes = encoded(&job());
    for length in 0..bytes.len() {
        let error = codec::decode(&mut &bytes[..length]).unwrap_err();
        assert!(matches!(error, codec::Error::Truncated), "{length}: {error}");
    }
    let longer = [bytes.as_slice(), &[0]].concat();
    assert!(matches!(codec::decode(&mut longer.as_slice()), Err(codec::Error::TooLong)));
}

#[test]
fn another_format_gives_one_sentence() {
    let mut bytes = encoded(&job());
    bytes[8] = 4;
    let error = codec::decode(&mut bytes.as_slice()).unwrap_err();
    let sentence = "the checkpoint has format 4, this build reads formats 1 to 3; \
                    use the build that wrote it";
    assert_eq!(error.to_string(), sentence);

    let dir = tempfile::tempdir().unwrap();
    let folder = write(&job(), dir.path(), 1, 5);
    let path = folder.join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    // In another format, nothing but the number need look like ours.
    assert!(text.starts_with("{\n  \"format\": 1,"));
    fs::write(&path, "{\"format\": 3, \"parts\": []}").unwrap();
    let error = find(dir.path()).unwrap_err();
    let sentence = "the checkpoint has format 3, this build reads formats 1 and 2; \
                    use the build that wrote it";
    assert_eq!(chain(&error), format!("cannot use `{}`: {sentence}", path.display()));
}

#[test]
fn a_checkpoint_of_another_model_or_layout_is_refused_by_name() {
    let (job, bytes) = (job(), encoded(&job()));
    let refusal = |job: &Job, partition| {
        Partition::restore(job.config(partition), &mut bytes.as_slice(), true)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(refusal(&job, 2), "the file contains partition 1, not 2");
    let other = Job { n_partitions: 5, ..job.clone() };
    let text = "the checkpoint has 4 partitions, the job has 5; use --partitions=4";
    assert_eq!(refusal(&other, 1), text);
    let other = Job { n_batches: 8, ..job.clone() };
    assert_eq!(refusal(&other, 1), "the checkpoint has 7 batches per epoch, the job has 8");
    let mut other = job.clone();
    let mut model = (*job.model).clone();
    model.name = "other".into();
    model.params[0].shape = vec![3, 3];
    other.model = model.into();
    let text = "the checkpoint is for model `fixture`; its parameters differ from those of `other`";
    assert_eq!(refusal(&other, 1), text);
    let mut other = job.clone();
    let mut model = (*job.model).clone();
    model.tables[0].dim = 4;
    other.model = model.into();
    assert!(refusal(&other, 1).contains("tables differ"));
}

#[test]
fn a_file_that_is_not_the_manifests_is_refused() {
    let (job, dir) = (job(), tempfile::tempdir().unwrap());
    let folder = write(&job, dir.path(), 1, 5);
    let entry = Checkpoint::open(&folder).unwrap().manifest.files[0].clone();
    // Sound in itself and of the same length, but of another moment.
    let mut partition = trained(&job).swap_remove(0);
    let mut snapshot = partition.snapshot();
    snapshot.dense.weights[0] += 1.0;
    write_file(&folder, &snapshot).unwrap();
    let error = read_partition(&folder, &entry, job.config(0), true).unwrap_err();
    assert!(error.to_string().ends_with("the checksum differs"), "{error}");
    partition.push(&job.push(batch(6), 0, 0..4));
    fs::write(folder.join(&entry.name), "short").unwrap();
    let error = read_partition(&folder, &entry, job.config(0), true).unwrap_err();
    assert!(error.to_string().ends_with("the length differs"), "{error}");
    assert!(find(dir.path()).is_err(), "the only checkpoint is damaged, and the error says so");
}

#[test]
fn only_complete_checkpoints_are_found_and_the_newest_is_last() {
    let (job, dir) = (job(), tempfile::tempdir().unwrap());
    assert!(find(&dir.path().join("absent")).unwrap().is_empty());
    assert!(find(dir.path()).unwrap().is_empty());
    write(&job, dir.path(), 2, 10);
    write(&job, dir.path(), 1, 9);
    // Files without a manifest, and a manifest without one of its files.
    let unfinished = folder(dir.path(), 3, 11, 1, RUN);
    write_file(&unfinished, &trained(&job)[0].snapshot()).unwrap();
    let damaged = write(&job, dir.path(), 4, 12);
    fs::remove_file(damaged.join(file_name(PartitionId(2)))).unwrap();
    let versions = |found: Vec<Checkpoint>| -> Vec<u64> {
        found.iter().map(|checkpoint| checkpoint.manifest.version).collect()
    };
    assert_eq!(versions(find(dir.path()).unwrap()), [9, 10]);
    // After a restore to version 9, the history continues from there, under a higher generation.
    let folder = folder(dir.path(), 5, 9, 2, RUN);
    let files = trained(&job).iter().map(|p| write_file(&folder, &p.snapshot()).unwrap()).collect();
    let newer = Manifest { generation: Generation(2), ..manifest(&job, 5, 9, files) };
    commit_manifest(&folder, &newer).unwrap();
    assert_eq!(versions(find(dir.path()).unwrap()), [9, 10, 9]);
}

#[test]
fn a_manifest_is_written_once_and_must_name_every_partition() {
    let (job, dir) = (job(), tempfile::tempdir().unwrap());
    let folder = write(&job, dir.path(), 1, 5);
    let whole = Checkpoint::open(&folder).unwrap().manifest;
    let error = commit_manifest(&folder, &Manifest { version: 6, ..whole.clone() }).unwrap_err();
    assert!(matches!(error, Error::Exists { .. }));
    assert_eq!(Checkpoint::open(&folder).unwrap().manifest.version, 5);

    let empty = dir.path().join("empty");
    let mut part = whole.clone();
    part.files.pop();
    let text = chain(&commit_manifest(&empty, &part).unwrap_err());
    assert!(text.ends_with("each of 4 partitions once, in order, but lists 3 files"), "{text}");
    let mut strange = whole;
    strange.files[1].name = "../partition-00001.edlp".into();
    let text = chain(&commit_manifest(&empty, &strange).unwrap_err());
    assert!(text.contains("not a valid name for a partition's file"), "{text}");
}

#[test]
fn a_sweep_removes_only_unfinished_checkpoints_of_its_own_run_that_are_over() {
    let (job, dir) = (job(), tempfile::tempdir().unwrap());
    let incomplete = |checkpoint, run| {
        let folder = folder(dir.path(), checkpoint, 99, 1, run);
        write_file(&folder, &trained(&job)[0].snapshot()).unwrap();
        folder
    };
    let complete = write(&job, dir.path(), 1, 10);
    let (over, under_way) = (incomplete(2, RUN), incomplete(6, RUN));
    let foreign = incomplete(2, RunId([9; 16]));
    let named_by_a_user = dir.path().join("version-99");
    fs::create_dir(&named_by_a_user).unwrap();
    sweep(dir.path(), RUN, |checkpoint| checkpoint < CheckpointId(6)).unwrap();
    assert!(!over.exists());
    for kept in [complete, under_way, foreign, named_by_a_user] {
        assert!(kept.exists(), "{kept:?}");
    }
    sweep(&dir.path().join("absent"), RUN, |_| true).unwrap();
}

#[test]
fn a_late_writer_does_not_bring_back_a_checkpoint_that_was_given_up() {
    let (job, dir) = (job(), tempfile::tempdir().unwrap());
    let folder = folder(dir.path(), 1, 10, 1, RUN);
    let partitions = trained(&job);
    let write = |p: &Partition| write_file(&folder, &p.snapshot());
    let files: Vec<FileEntry> = partitions.iter().map(|p| write(p).unwrap()).collect();
    remove(&folder).unwrap();
    remove(&folder).unwrap();
    let error = write(&partitions[0]).unwrap_err().to_string();
    assert!(error.ends_with("of the checkpoint no longer exists"), "{error}");
    assert!(commit_manifest(&folder, &manifest(&job, 1, 10, files)).is_err());
    assert!(!folder.exists());
}

#[test]
fn the_newest_of_several_runs_is_not_guessed() {
    let (job, dir) = (job(), tempfile::tempdir().unwrap());
    assert_eq!(newest(dir.path()).unwrap(), None);
    write(&job, dir.path(), 1, 10);
    let last = write(&job, dir.path(), 2, 20);
    assert_eq!(newest(dir.path()).unwrap().unwrap().path, last);
    let other = folder(dir.path(), 1, 10, 1, RunId([9; 16]));
    let files = trained(&job).iter().map(|p| write_file(&other, &p.snapshot()).unwrap()).collect();
    let theirs = Manifest { run: "09".repeat(16), job: "b".into(), ..manifest(&job, 1, 10, files) };
    commit_manifest(&other, &theirs).unwrap();
    let text = newest(dir.path()).unwrap_err().to_string();
    assert!(
        text.ends_with("several jobs: `test`, `b`; specify the folder of one checkpoint"),
        "{text}"
    );
}

#[test]
fn a_damaged_byte_anywhere_is_a_wrong_checksum() {
    let (job, dir) = (job(), tempfile::tempdir().unwrap());
    let folder = write(&job, dir.path(), 1, 10);
    let entry = Checkpoint::open(&folder).unwrap().manifest.files[1].clone();
    let path = folder.join(&entry.name);
    let whole = fs::read(&path).unwrap();
    for place in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[place] ^= 0x10;
        fs::write(&path, damaged).unwrap();
        let text = chain(&read_snapshot(&folder, &entry).unwrap_err());
        assert!(text.contains("checksum"), "byte {place}: {text}");
    }
}

#[test]
fn a_writer_that_fails_leaves_no_temporary_file_and_the_old_one_in_place() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a"), "old").unwrap();
    let full = |_: &mut File| Err::<(), _>(io::ErrorKind::StorageFull.into());
    let error = write_atomically(dir.path(), "a", full, |from, to| fs::rename(from, to));
    assert!(chain(&error.unwrap_err()).starts_with("cannot write `"));
    assert_eq!(fs::read_to_string(dir.path().join("a")).unwrap(), "old");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn an_exported_model_holds_every_parameter_under_its_name() {
    let (job, dir) = (job(), tempfile::tempdir().unwrap());
    let folder = write(&job, dir.path(), 1, 5);
    let output = dir.path().join("output");
    let metrics = BTreeMap::from([("loss".into(), 0.25)]);
    let (n_steps, n_bytes) = (Cell::new(0), Cell::new(0));
    let progress = |n: u64| {
        n_steps.set(n_steps.get() + 1);
        n_bytes.set(n_bytes.get() + n);
    };
    let exported = export::export(&folder, &output, &metrics, &progress).unwrap();
    let names: BTreeSet<_> =
        fs::read_dir(&output).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["model.json", "model.safetensors"].map(Into::into).into(), "and no other");

    let bytes = fs::read(&exported.weights).unwrap();
    let read: u64 = Checkpoint::open(&folder).unwrap().manifest.files.iter().map(|f| f.bytes).sum();
    assert_eq!(n_bytes.get(), read + bytes.len() as u64);
    assert!(n_steps.get() > 4, "every partition is reported by itself");
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(bytes, safetensors::serialize(tensors.tensors(), None).unwrap());
    let floats = |name: &str| -> Vec<f32> { numbers(tensors.tensor(name).unwrap().data()) };
    let trained = trained(&job);
    let dense: Vec<f32> = trained.iter().flat_map(|p| p.dense().to_vec()).collect();
    assert_eq!(["w", "mean", "b", "v"].map(floats).concat(), dense);
    assert_eq!(tensors.tensor("w").unwrap().shape(), [9]);

    let ids: Vec<u64> = numbers(tensors.tensor("table0.ids").unwrap().data());
    assert!(!ids.is_empty() && ids.is_sorted());
    let rows = floats("table0.rows");
    for (id, row) in ids.iter().zip(rows.chunks(3)) {
        let owner = job.layout().partition_of(*id).0 as usize;
        let mut expected = [0.0; 3];
        trained[owner].peek(0, &[*id], &mut expected);
        assert_eq!(row, expected);
    }
    let n_rows: u64 = trained.iter().map(Partition::n_rows).sum();
    assert_eq!((exported.n_params, exported.n_rows), (20, n_rows));

    let card: export::Card = serde_json::from_slice(&fs::read(exported.card).unwrap()).unwrap();
    assert_eq!((card.job.as_str(), card.version), ("test", 5));
    assert_eq!(card.metrics.keys().collect::<Vec<_>>(), ["accuracy", "loss"]);
    assert_eq!(card.model, *job.model);
}

#[test]
fn an_exported_model_read_back_is_the_same_model() {
    let (job, dir) = (job(), tempfile::tempdir().unwrap());
    let output = dir.path().join("output");
    let checkpoint = write(&job, dir.path(), 1, 5);
    let exported = export::export(&checkpoint, &output, &BTreeMap::new(), &|_| {}).unwrap();
    let model = ExportedModel::open(&exported.weights).unwrap();
    // Into another number of partitions, so that each row must find its own.
    let folder = dir.path().join("imported");
    let imported = model.write_checkpoint(&folder, 7).unwrap();
    assert_eq!(Checkpoint::open(&folder).unwrap(), imported);
    assert_eq!((imported.manifest.version, imported.manifest.n_partitions), (5, 7));
    let again = dir.path().join("again");
    let again = export::export(&folder, &again, &BTreeMap::new(), &|_| {}).unwrap();
    for (one, other) in [(&exported.weights, &again.weights), (&exported.card, &again.card)] {
        assert_eq!(fs::read(one).unwrap(), fs::read(other).unwrap());
    }
    // A job with another optimizer than the import's takes it.
    let ours = Layout::shared(job.layout().dense_len, 7);
    let origin = Origin::checkpoint(&folder, &ours, false).unwrap();
    for id in 0..7 {
        let config = PartitionConfig { id: PartitionId(id), layout: ours, ..job.config(0) };
        origin.make(config).unwrap().check_invariants();
    }
}

#[test]
fn an_exported_model_whose_metrics_are_not_finite_is_read_back() {
    let (job, dir) = (job(), tempfile::tempdir().unwrap());
    let checkpoint = write(&job, dir.path(), 1, 5);
    let metrics = [("loss".to_owned(), f64::NAN)].into();
    let files = export::export(&checkpoint, dir.path(), &metrics, &|_| {}).unwrap();
    let model = ExportedModel::open(&files.weights).unwrap();
    assert!(model.card.metrics["loss"].is_nan());
    assert!(model.write_checkpoint(&dir.path().join("imported"), 2).is_ok());
}

#[test]
fn an_exported_table_with_the_same_id_twice_is_refused() {
    let (job, dir) = (job(), tempfile::tempdir().unwrap());
    let checkpoint = write(&job, dir.path(), 1, 5);
    let files = export::export(&checkpoint, dir.path(), &BTreeMap::new(), &|_| {}).unwrap();
    let mut weights = fs::read(&files.weights).unwrap();
    let (start, end) = {
        let (n, header) = SafeTensors::read_metadata(&weights).unwrap();
        let name = format!("{}.ids", job.model.tables[0].name);
        let (start, end) = header.info(&name).unwrap().data_offsets;
        (n + 8 + start, n + 8 + end)
    };
    assert!(end - start >= 16, "two ids");
    weights.copy_within(start..start + 8, start + 8);
    fs::write(&files.weights, &weights).unwrap();
    let error = ExportedModel::open(&files.weights).unwrap_err().to_string();
    assert!(error.contains(" twice"), "{error}");
}

#[test]
fn numbers_of_64_bits_are_exported_and_read_back_as_such() {
    let (mut job, dir) = (job(), tempfile::tempdir().unwrap());
    let singles = codec::params_digest(&job.model);
    Arc::make_mut(&mut job.model).params[0].is_double = true;
    assert_ne!(codec::params_digest(&job.model), singles, "checkpoints are not interchangeable");
    let checkpoint = write(&job, dir.path(), 1, 5);
    let exported = export::export(&checkpoint, dir.path(), &BTreeMap::new(), &|_| {}).unwrap();
    assert_eq!(exported.n_params, 20);
    let bytes = fs::read(&exported.weights).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let wide = tensors.tensor("w").unwrap();
    assert_eq!((wide.dtype(), wide.shape()), (safetensors::Dtype::F64, &[9][..]));
    let dense: Vec<f32> = trained(&job).iter().flat_map(|p| p.dense().to_vec()).collect();
    assert_eq!(numbers::<f32>(wide.data()), dense[..18]);
    let folder = dir.path().join("imported");
    let model = ExportedModel::open(&exported.weights).unwrap();
    model.write_checkpoint(&folder, 7).unwrap();
    let again = dir.path().join("again");
    let again = export::export(&folder, &again, &BTreeMap::new(), &|_| {}).unwrap();
    assert_eq!(fs::read(again.weights).unwrap(), bytes);
}

#[test]
fn files_that_are_no_exported_model_are_refused_by_name() {
    let (job, dir) = (job(), tempfile::tempdir().unwrap());
    let checkpoint = write(&job, dir.path(), 1, 5);
    let files = export::export(&checkpoint, dir.path(), &BTreeMap::new(), &|_| {}).unwrap();
    let refused = || chain(&ExportedModel::open(&files.weights).unwrap_err());
    let (weights, card) =
        (fs::read(&files.weights).unwrap(), fs::read_to_string(&files.card).unwrap());
    fs::write(&files.card, card.replace("\"w\"", "\"other\"")).unwrap();
    assert!(refused().contains("has no tensor `other` of type F32 and shape [9]"), "{}", refused());
    // A length that no file has must not be allocated before the file is read.
    let mut long: serde_json::Value = serde_json::from_str(&card).unwrap();
    long["model"]["params"][0]["shape"] = serde_json::json!([1_u64 << 60]);
    fs::write(&files.card, long.to_string()).unwrap();
    assert!(refused().contains("and shape [1152921504606846976]"), "{}", refused());
    fs::write(&files.card, "{}").unwrap();
    assert!(refused().contains("model.json` does not describe a model"), "{}", refused());
    fs::write(&files.card, &card).unwrap();
    fs::write(&files.weights, &weights[..weights.len() - 1]).unwrap();
    assert!(refused().contains("cannot use `"), "{}", refused());
    fs::remove_file(&files.card).unwrap();
    assert!(refused().contains("cannot read `"), "{}", refused());
}

#[test]
fn false_lengths_cause_an_error_and_allocate_nothing() {
    let header = |change: fn(&mut codec::Header)| {
        let mut snapshot = trained(&job())[1].snapshot();
        change(&mut snapshot.header);
        let mut bytes = Vec::new();
        codec::encode(&snapshot, &mut bytes).unwrap();
        codec::decode(&mut bytes.as_slice()).unwrap_err()
    };
    let truncated = |error| matches!(error, codec::Error::Truncated);
    assert!(truncated(header(|h| h.dense_len = 1 << 40)));
    assert!(truncated(header(|h| h.tables[0].n_rows = u32::MAX as usize)));
    let impossible = |error| matches!(error, codec::Error::Impossible { .. });
    assert!(impossible(header(|h| h.dense_len = usize::MAX)));
    assert!(impossible(header(|h| h.tables[0].n_rows = usize::MAX)));
    assert!(impossible(header(|h| h.tables[0].dim = usize::MAX)));
    assert!(impossible(header(|h| h.n_partitions = 0)));
    assert!(impossible(header(|h| h.partition.0 = 4)));
    assert!(impossible(header(|h| h.slots = vec!["m".into(); 4])));
    let mut bytes = encoded(&job());
    bytes[12..16].fill(0xff);
    assert!(impossible(codec::decode(&mut bytes.as_slice()).unwrap_err()));
}

proptest! {
    #[test]
    fn damaged_bytes_never_panic(
        places in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..8),
        checkpoint in any::<usize>(),
        junk in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut bytes = encoded(&job());
        let n = bytes.len();
        places.iter().for_each(|(place, byte)| bytes[place % n] = *byte);
        fuzz::partition_file(&bytes);
        fuzz::partition_file(&bytes[..checkpoint % n]);
        fuzz::partition_file(&junk);
        fuzz::manifest(&junk);
    }
}

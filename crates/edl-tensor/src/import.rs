// SPDX-License-Identifier: Apache-2.0
//! From an exported model back to a checkpoint, with which a job can evaluate, predict or train.
//!
//! The checkpoint has no optimizer state and no applied batches. The model must fit in memory.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use edl_core::id::{CheckpointId, Generation, PartitionId, Term};
use edl_core::layout::Layout;
use edl_core::model::ModelSpec;
use edl_core::optimizer::OptimizerSpec;
use edl_core::spec::Mode;
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, SafeTensors};

use crate::checkpoint::{self, Checkpoint, Manifest, Snapshot, at, commit_manifest, write_file};
use crate::export::{Card, dtype};
use crate::partition::{Partition, PartitionConfig};
use crate::table::Slab;

/// The file with the parameters, and the one next to it that describes them.
pub const WEIGHTS: &str = "model.safetensors";
pub const CARD: &str = "model.json";

/// A model that was exported.
#[derive(Clone, Debug, PartialEq)]
pub struct ExportedModel {
    pub weights: PathBuf,
    pub card: Card,
}

/// Why files are not an exported model.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error("`{}` does not describe a model", path.display())]
    Card { path: PathBuf, source: serde_json::Error },
    #[error("cannot use `{}`", path.display())]
    Weights { path: PathBuf, source: SafeTensorError },
    #[error("`{}` has no tensor `{name}` of type {dtype:?} and shape {shape:?}", path.display())]
    Tensor { path: PathBuf, name: String, dtype: Dtype, shape: Vec<usize> },
    #[error("`{}` has {n_ids} ids for the {n_rows} rows of table `{table}`", path.display())]
    Rows { path: PathBuf, table: String, n_ids: usize, n_rows: usize },
    #[error("`{}` has id {id} of table `{table}` twice", path.display())]
    Repeated { path: PathBuf, table: String, id: u64 },
}

/// All parameters of a model.
struct Values {
    dense: Vec<f32>,
    tables: Vec<Rows>,
}

/// The rows of a table, one after the other.
struct Rows {
    ids: Vec<u64>,
    rows: Vec<f32>,
}

impl ExportedModel {
    /// Opens `model.safetensors` and the `model.json` next to it, and checks that they fit.
    pub fn open(weights: &Path) -> Result<Self, Error> {
        let path = weights.with_file_name(CARD);
        let text = fs::read(&path).map_err(at("read", &path))?;
        let model = Self { weights: weights.to_owned(), card: parse_card(&text, &path)? };
        model.values()?;
        Ok(model)
    }

    /// Writes a complete checkpoint with as many partitions to `folder`, which is created.
    pub fn write_checkpoint(&self, folder: &Path, n_partitions: u32) -> Result<Checkpoint, Error> {
        let values = self.values()?;
        fs::create_dir_all(folder).map_err(at("create", folder))?;
        let Card { job, version, metrics, model } = self.card.clone();
        let layout = Layout::shared(model.dense_len(), n_partitions);
        let (shared, optimizer) = (Arc::new(model.clone()), OptimizerSpec::sgd(0.0));
        let mut files = Vec::new();
        for partition in 0..n_partitions {
            let config = PartitionConfig {
                id: PartitionId(partition),
                layout,
                model: Arc::clone(&shared),
                optimizer: optimizer.clone(),
                seed: 0,
                n_batches: 1,
                mode: Mode::Async,
                lr_staleness_modulation: false,
            };
            files.push(write_file(folder, &snapshot(config, &values))?);
        }
        let manifest = Manifest {
            format: checkpoint::FORMAT,
            version,
            exact: None,
            generation: Generation::default(),
            checkpoint: CheckpointId::default(),
            term: Term::default(),
            run: "0".repeat(32),
            job,
            seed: 0,
            model,
            optimizer,
            n_batches: 1,
            n_partitions,
            fingerprint: String::new(),
            files,
            metrics,
            skipped: Default::default(),
        };
        commit_manifest(folder, &manifest)?;
        Ok(Checkpoint { path: folder.to_owned(), manifest })
    }

    fn values(&self) -> Result<Values, Error> {
        let path = &self.weights;
        let bytes = fs::read(path).map_err(at("read", path))?;
        parse_values(&self.card.model, &bytes, path)
    }
}

/// Reads both files of an exported model, for fuzzers.
pub(crate) fn parse(card: &[u8], weights: &[u8]) -> Result<(), Error> {
    let card = parse_card(card, Path::new(CARD))?;
    parse_values(&card.model, weights, Path::new(WEIGHTS))?;
    Ok(())
}

fn parse_card(text: &[u8], path: &Path) -> Result<Card, Error> {
    serde_json::from_slice(text).map_err(|source| Error::Card { path: path.to_owned(), source })
}

fn parse_values(model: &ModelSpec, bytes: &[u8], path: &Path) -> Result<Values, Error> {
    let tensors = SafeTensors::deserialize(bytes);
    let tensors = tensors.map_err(|source| Error::Weights { path: path.to_owned(), source })?;
    read(model, &tensors, path)
}

fn read(model: &ModelSpec, tensors: &SafeTensors<'_>, path: &Path) -> Result<Values, Error> {
    let bytes = |name: &str, dtype: Dtype, shape: &[usize]| {
        let found = tensors.tensor(name).ok();
        let fits =
            |at: &safetensors::tensor::TensorView<'_>| at.dtype() == dtype && at.shape() == shape;
        let found = found.filter(fits).map(|tensor| tensor.data().to_vec());
        found.ok_or_else(|| Error::Tensor {
            path: path.to_owned(),
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
        })
    };
    let floats = |name: &str, dtype: Dtype, shape: &[usize]| {
        let bytes = bytes(name, dtype, shape)?;
        Ok::<_, Error>(bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect())
    };
    // Grows with the file: the length that the card states may be any number.
    let mut dense: Vec<f32> = Vec::new();
    for param in &model.params {
        let values: Vec<f32> = floats(&param.name, dtype(param), &param.shape)?;
        dense.extend(values);
    }
    let mut tables = Vec::new();
    for table in &model.tables {
        let name = format!("{}.ids", table.name);
        let n_ids = tensors.tensor(&name).map_or(0, |ids| ids.shape().iter().product());
        let ids = bytes(&name, Dtype::I64, &[n_ids])?;
        let ids: Vec<u64> = ids.as_chunks().0.iter().map(|id| u64::from_le_bytes(*id)).collect();
        let name = format!("{}.rows", table.name);
        let n_rows = tensors.tensor(&name).ok().and_then(|rows| rows.shape().first().copied());
        let n_rows = n_rows.unwrap_or(0);
        let rows = floats(&name, Dtype::F32, &[n_rows, table.dim])?;
        if n_ids != n_rows {
            let (path, table) = (path.to_owned(), table.name.clone());
            return Err(Error::Rows { path, table, n_ids, n_rows });
        }
        if let Some(id) = repeated(&ids) {
            let (path, table) = (path.to_owned(), table.name.clone());
            return Err(Error::Repeated { path, table, id });
        }
        tables.push(Rows { ids, rows });
    }
    Ok(Values { dense, tables })
}

/// An id that is there more than once.
fn repeated(ids: &[u64]) -> Option<u64> {
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

/// The partition of the config, with its part of the values.
fn snapshot(config: PartitionConfig, values: &Values) -> Snapshot {
    let (id, layout, model) = (config.id, config.layout, Arc::clone(&config.model));
    let segment: Range<usize> = layout.segment(id);
    let mut snapshot = Partition::new(config).snapshot();
    snapshot.dense.weights.copy_from_slice(&values.dense[segment]);
    for (place, (spec, table)) in model.tables.iter().zip(&values.tables).enumerate() {
        let slab = slab(spec.dim, table, |row| layout.partition_of(row) == id);
        snapshot.header.tables[place].n_rows = slab.len();
        snapshot.tables[place] = slab;
    }
    snapshot
}

/// The rows whose ids are here.
fn slab(dim: usize, table: &Rows, is_here: impl Fn(u64) -> bool) -> Slab {
    let places = table.ids.iter().enumerate().filter(|(_, id)| is_here(**id));
    let (places, ids): (Vec<usize>, Vec<u64>) = places.map(|(at, id)| (at, *id)).unzip();
    let mut left = places.iter();
    let fill = |rows: &mut [f32]| {
        for (row, place) in rows.chunks_exact_mut(dim.max(1)).zip(&mut left) {
            row.copy_from_slice(&table.rows[place * dim..(place + 1) * dim]);
        }
        Ok::<(), std::convert::Infallible>(())
    };
    match Slab::read(dim, ids, fill) {
        Ok(slab) => slab,
        Err(never) => match never {},
    }
}

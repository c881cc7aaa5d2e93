// SPDX-License-Identifier: Apache-2.0
//! From a complete checkpoint to files that other programs read.
//!
//! `model.safetensors` holds the dense parameters by name and shape, and each table as two
//! tensors: `<table>.ids` and `<table>.rows`, in the order of the ids. Optimizer state stays
//! behind. `model.json` says what it is.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use edl_core::model::ModelSpec;
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde::{Deserialize, Serialize};

use crate::checkpoint::{self, Checkpoint, Manifest, Snapshot, read_snapshot};

/// What `model.json` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Card {
    pub job: String,
    pub version: u64,
    pub metrics: BTreeMap<String, f64>,
    pub model: ModelSpec,
}

/// Where the model went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    pub weights: PathBuf,
    pub card: PathBuf,
    /// Dense parameters.
    pub n_params: usize,
    /// Rows of all tables.
    pub n_rows: usize,
}

/// Why a model cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error("`{}` does not contain what the manifest's model needs", path.display())]
    Model { path: PathBuf },
    #[error("cannot write `{}`", path.display())]
    Write { path: PathBuf, source: SafeTensorError },
}

/// A whole model in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    /// The flat vector of all dense parameters.
    pub dense: Vec<f32>,
    /// Per table, the ids and rows in the order of the ids.
    pub tables: Vec<Rows>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    pub ids: Vec<u64>,
    pub rows: Vec<f32>,
}

/// Writes the model of the checkpoint in folder `checkpoint` to folder `output`, which is made if
/// needed. `metrics` join those of the manifest.
pub fn export(
    checkpoint: &Path,
    output: &Path,
    metrics: &BTreeMap<String, f64>,
) -> Result<Exported, Error> {
    let checkpoint = Checkpoint::open(checkpoint)?;
    let weights = load(&checkpoint)?;
    let Manifest { model, job, version, metrics: known, .. } = checkpoint.manifest;
    let mut all = known;
    all.extend(metrics.iter().map(|(name, value)| (name.clone(), *value)));
    fs::create_dir_all(output).map_err(checkpoint::at("create", output))?;
    let n_rows = weights.tables.iter().map(|table| table.ids.len()).sum();
    let path = write_weights(output, &model, &weights)?;
    let card = write_card(output, &Card { job, version, metrics: all, model })?;
    Ok(Exported { weights: path, card, n_params: weights.dense.len(), n_rows })
}

/// Reads the parameters of a checkpoint, without optimizer state.
pub fn load(checkpoint: &Checkpoint) -> Result<Weights, Error> {
    let model = &checkpoint.manifest.model;
    let layout = checkpoint.manifest.layout();
    let mut dense = vec![0.0; layout.dense_len];
    let mut tables = vec![Rows::default(); model.tables.len()];
    for file in &checkpoint.manifest.files {
        let snapshot = read_snapshot(&checkpoint.path, file)?;
        let segment = layout.segment(file.partition);
        if !fits(&snapshot, model, segment.len()) {
            return Err(Error::Model { path: checkpoint.path.join(&file.name) });
        }
        dense[segment].copy_from_slice(&snapshot.dense.weights);
        for ((rows, slab), table) in tables.iter_mut().zip(&snapshot.tables).zip(&model.tables) {
            for (id, row) in slab.rows() {
                rows.ids.push(id);
                rows.rows.extend_from_slice(&row[..table.dim]);
            }
        }
    }
    let sorted = tables.iter().zip(&model.tables).map(|(rows, table)| rows.sorted(table.dim));
    Ok(Weights { dense, tables: sorted.collect() })
}

fn fits(snapshot: &Snapshot, model: &ModelSpec, n_dense: usize) -> bool {
    let stride = |dim: usize| dim * (1 + snapshot.header.slots.len());
    let strides = snapshot.tables.iter().map(|slab| slab.stride());
    snapshot.dense.weights.len() == n_dense
        && strides.eq(model.tables.iter().map(|table| stride(table.dim)))
}

impl Rows {
    /// In the order of the ids, so the file does not depend on the order in which rows were created.
    fn sorted(&self, dim: usize) -> Self {
        let mut order: Vec<usize> = (0..self.ids.len()).collect();
        order.sort_unstable_by_key(|place| self.ids[*place]);
        let mut rows = Vec::with_capacity(self.rows.len());
        for place in &order {
            rows.extend_from_slice(&self.rows[place * dim..(place + 1) * dim]);
        }
        Self { ids: order.iter().map(|place| self.ids[*place]).collect(), rows }
    }
}

fn write_weights(output: &Path, model: &ModelSpec, weights: &Weights) -> Result<PathBuf, Error> {
    let path = output.join("model.safetensors");
    let temporary = output.join(format!(".model.safetensors.{}.tmp", std::process::id()));
    let tensors = tensors(model, weights);
    let written = tensors.and_then(|tensors| serialize_to_file(tensors, None, &temporary));
    written.map_err(|source| Error::Write { path: path.clone(), source })?;
    let place = || {
        fs::File::open(&temporary)?.sync_all()?;
        fs::rename(&temporary, &path)
    };
    place().map_err(checkpoint::at("write", &path))?;
    Ok(path)
}

fn write_card(output: &Path, card: &Card) -> Result<PathBuf, Error> {
    let write = |file: &mut fs::File| {
        serde_json::to_writer_pretty(&mut *file, card)?;
        file.write_all(b"\n")
    };
    let rename = |from: &Path, to: &Path| fs::rename(from, to);
    checkpoint::write_atomically(output, "model.json", write, rename)?;
    Ok(output.join("model.json"))
}

fn tensors<'a>(
    model: &'a ModelSpec,
    weights: &'a Weights,
) -> Result<Vec<(String, TensorView<'a>)>, SafeTensorError> {
    let mut tensors = Vec::new();
    let mut rest = weights.dense.as_slice();
    for param in &model.params {
        let (values, tail) = rest.split_at(param.len());
        let values = bytemuck::cast_slice(values);
        let tensor = TensorView::new(Dtype::F32, param.shape.clone(), values)?;
        tensors.push((param.name.clone(), tensor));
        rest = tail;
    }
    for (spec, Rows { ids, rows }) in model.tables.iter().zip(&weights.tables) {
        let (n, ids, rows) = (ids.len(), bytemuck::cast_slice(ids), bytemuck::cast_slice(rows));
        let ids = TensorView::new(Dtype::I64, vec![n], ids)?;
        let rows = TensorView::new(Dtype::F32, vec![n, spec.dim], rows)?;
        tensors.push((format!("{}.ids", spec.name), ids));
        tensors.push((format!("{}.rows", spec.name), rows));
    }
    Ok(tensors)
}

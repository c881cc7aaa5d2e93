// SPDX-License-Identifier: Apache-2.0
//! From a complete checkpoint to files that other programs read.
//!
//! `model.safetensors` holds the dense parameters by name and shape, and each table as two
//! tensors: `<table>.ids` and `<table>.rows`, in the order of the ids. Optimizer state is not
//! exported. `model.json` describes the model. The model need not fit in memory.

mod parts;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use edl_core::model::{ModelSpec, ParamSpec};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use self::parts::Parts;
use crate::checkpoint::{self, Checkpoint, Manifest};

/// Of what is written to the model's file.
const BUFFER: usize = 1 << 20;

/// What `model.json` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Card {
    pub job: String,
    pub version: u64,
    #[serde(deserialize_with = "edl_core::nonfinite::map")]
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
    pub n_rows: u64,
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

/// Gets the number of bytes that have been read or written since the last call.
pub type Progress<'a> = dyn Fn(u64) + 'a;

/// Writes the model of the checkpoint in folder `checkpoint` to folder `output`, which is made if
/// needed. `metrics` join those of the manifest.
pub fn export(
    checkpoint: &Path,
    output: &Path,
    metrics: &BTreeMap<String, f64>,
    progress: &Progress<'_>,
) -> Result<Exported, Error> {
    let checkpoint = Checkpoint::open(checkpoint)?;
    fs::create_dir_all(output).map_err(checkpoint::at("create", output))?;
    let parts = Parts::read(&checkpoint, output, progress)?;
    let Manifest { model, job, version, metrics: known, .. } = checkpoint.manifest;
    let weights = write_weights(output, &model, &parts, progress)?;
    let mut all = known;
    all.extend(metrics.iter().map(|(name, value)| (name.clone(), *value)));
    let n_params = model.params.iter().map(|param| param.n_numbers()).sum();
    let n_rows = parts.tables.iter().map(|table| table.len()).sum();
    let card = write_card(output, &Card { job, version, metrics: all, model })?;
    Ok(Exported { weights, card, n_params, n_rows })
}

/// A tensor of the file.
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    source: Source,
}

/// Where the values of a tensor are.
enum Source {
    Dense(Range<usize>),
    /// Of the table with this number.
    Ids(usize),
    Rows(usize),
}

impl Tensor {
    fn n_bytes(&self) -> usize {
        self.dtype.bitsize() / 8 * self.shape.iter().product::<usize>()
    }

    fn write(&self, parts: &Parts, to: &mut impl Write) -> io::Result<()> {
        match &self.source {
            Source::Dense(part) => parts.write_dense(part.clone(), to),
            Source::Ids(table) => parts.tables[*table].visit(|id, _| to.write_all(id)),
            Source::Rows(table) => parts.tables[*table].visit(|_, row| to.write_all(row)),
        }
    }
}

/// How the values of a parameter are in the file.
pub(crate) fn dtype(param: &ParamSpec) -> Dtype {
    if param.is_double { Dtype::F64 } else { Dtype::F32 }
}

/// All tensors, in the order of the file: the wider numbers first, as readers map them.
fn tensors(model: &ModelSpec, parts: &Parts) -> Vec<Tensor> {
    let mut tensors = Vec::new();
    let mut start = 0;
    for param in &model.params {
        let (name, end) = (param.name.clone(), start + param.len());
        let (shape, source) = (param.shape.clone(), Source::Dense(start..end));
        tensors.push(Tensor { name, dtype: dtype(param), shape, source });
        start = end;
    }
    for (number, (spec, rows)) in model.tables.iter().zip(&parts.tables).enumerate() {
        let n_rows = usize::try_from(rows.len()).unwrap_or(usize::MAX);
        let (name, source) = (format!("{}.ids", spec.name), Source::Ids(number));
        tensors.push(Tensor { name, dtype: Dtype::I64, shape: vec![n_rows], source });
        let (name, source) = (format!("{}.rows", spec.name), Source::Rows(number));
        tensors.push(Tensor { name, dtype: Dtype::F32, shape: vec![n_rows, spec.dim], source });
    }
    tensors.sort_by(|a, b| (Reverse(a.dtype), &a.name).cmp(&(Reverse(b.dtype), &b.name)));
    tensors
}

/// The length of the header and the header itself, padded so that the values are aligned.
fn header(tensors: &[Tensor]) -> Result<Vec<u8>, SafeTensorError> {
    let mut start = 0;
    let info = |tensor: &Tensor| {
        let data_offsets = (start, start + tensor.n_bytes());
        start = data_offsets.1;
        let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
        (tensor.name.clone(), TensorInfo { dtype, shape, data_offsets })
    };
    let header = Metadata::new(None, tensors.iter().map(info).collect())?;
    let mut json = serde_json::to_vec(&header)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok([&(json.len() as u64).to_le_bytes(), json.as_slice()].concat())
}

fn write_weights(
    output: &Path,
    model: &ModelSpec,
    parts: &Parts,
    progress: &Progress<'_>,
) -> Result<PathBuf, Error> {
    let path = output.join("model.safetensors");
    let tensors = tensors(model, parts);
    let header = header(&tensors).map_err(|source| Error::Write { path: path.clone(), source })?;
    let write = |file: &mut File| {
        let mut to = BufWriter::with_capacity(BUFFER, Counted { file, progress });
        to.write_all(&header)?;
        tensors.iter().try_for_each(|tensor| tensor.write(parts, &mut to))?;
        to.flush()
    };
    let rename = |from: &Path, to: &Path| fs::rename(from, to);
    checkpoint::write_atomically(output, "model.safetensors", write, rename)?;
    Ok(path)
}

/// A file that reports what is written to it.
struct Counted<'a> {
    file: &'a mut File,
    progress: &'a Progress<'a>,
}

impl Write for Counted<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let n_written = self.file.write(buffer)?;
        (self.progress)(n_written as u64);
        Ok(n_written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn write_card(output: &Path, card: &Card) -> Result<PathBuf, Error> {
    let write = |file: &mut File| {
        serde_json::to_writer_pretty(&mut *file, card)?;
        file.write_all(b"\n")
    };
    let rename = |from: &Path, to: &Path| fs::rename(from, to);
    checkpoint::write_atomically(output, "model.json", write, rename)?;
    Ok(output.join("model.json"))
}

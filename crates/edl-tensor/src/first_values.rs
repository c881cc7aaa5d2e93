// SPDX-License-Identifier: Apache-2.0
//! Initial values that a model provides: one file in the job's folder, written once.
//!
//! Every worker offers the values of its model. The first complete file is kept and never
//! overwritten, so all servers and replicas start from the same numbers, even if two processes would
//! draw different ones.

use std::fs;
use std::path::{Path, PathBuf};

use edl_core::model::{Init, ModelSpec, TableSpec};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use crate::checkpoint::{self, at, write_once};
use crate::model::Model;

/// Name of the file in the job's folder.
pub const FILE: &str = edl_core::job_dir::FIRST_VALUES;
/// Name of the file with the initial state of a training script.
const STATE_FILE: &str = edl_core::job_dir::FIRST_STATE;
/// The flat vector of all dense parameters.
const DENSE: &str = "dense";

/// Why a model's initial values cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    File(#[from] checkpoint::Error),
    #[error("model `{model}` must provide initial values for its parameters, but provides none")]
    NoneBrought { model: String },
    #[error(
        "model `{model}` provides {has} initial values for {needs} parameters; provide one per \
         parameter"
    )]
    Brought { model: String, has: usize, needs: usize },
    #[error("model must provide the initial rows of its table `{table}`, but provides none")]
    NoRows { table: String },
    #[error("`{}` is not a file of initial values: {problem}", path.display())]
    Unreadable { path: PathBuf, problem: String },
    #[error(
        "`{}` has {has} initial values, but the model has {needs} parameters; if the model has \
         changed, start a new job",
        path.display()
    )]
    Length { path: PathBuf, has: usize, needs: usize },
}

/// Writes the initial values of `model` to its job, unless it needs none or they exist.
pub fn offer(job_dir: &Path, model: &dyn Model) -> Result<(), Error> {
    let spec = model.spec();
    if !spec.brings_first_values() || job_dir.join(FILE).exists() {
        return Ok(());
    }
    let name = || spec.name.clone();
    let values = model.first_values().ok_or_else(|| Error::NoneBrought { model: name() })?;
    let (has, needs) = (values.len(), spec.dense_len());
    if has != needs {
        return Err(Error::Brought { model: name(), has, needs });
    }
    let mut tensors = vec![(DENSE.to_owned(), vec![values.len()], values)];
    for (index, table) in given_tables(spec) {
        let rows = model.first_rows(index).filter(|rows| rows.len() >= table.dim);
        let rows = rows.ok_or_else(|| Error::NoRows { table: table.name.clone() })?;
        tensors.push((rows_of(index), vec![rows.len() / table.dim.max(1), table.dim], rows));
    }
    write_tensors(job_dir, tensors)?;
    Ok(())
}

fn given_tables(spec: &ModelSpec) -> impl Iterator<Item = (usize, &TableSpec)> {
    spec.tables.iter().enumerate().filter(|(_, table)| table.init == Init::Given)
}

/// The tensor with the rows of a table.
fn rows_of(table: usize) -> String {
    format!("rows.{table}")
}

/// Writes the file of a model without given rows; `false` if it already exists.
pub fn write(job_dir: &Path, values: &[f32]) -> Result<bool, Error> {
    write_tensors(job_dir, vec![(DENSE.to_owned(), vec![values.len()], values.to_vec())])
}

fn write_tensors(
    job_dir: &Path,
    tensors: Vec<(String, Vec<usize>, Vec<f32>)>,
) -> Result<bool, Error> {
    let to_bytes = |(name, shape, values): (String, Vec<usize>, Vec<f32>)| {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        (name, shape, bytes)
    };
    let tensors: Vec<_> = tensors.into_iter().map(to_bytes).collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        TensorView::new(Dtype::F32, shape.clone(), bytes).map(|view| (name, view))
    });
    let views = views.collect::<Result<Vec<_>, _>>();
    let file = views.and_then(|views| serialize(views, None));
    let file = file.map_err(|error| unreadable(job_dir, error))?;
    Ok(write_once(job_dir, FILE, &file)?)
}

/// Reads the parameters of a model with `dense_len` of them.
pub fn read(job_dir: &Path, dense_len: usize) -> Result<Vec<f32>, Error> {
    let values = File::read(job_dir)?.tensor(DENSE)?;
    if values.len() != dense_len {
        let path = job_dir.join(FILE);
        return Err(Error::Length { path, has: values.len(), needs: dense_len });
    }
    Ok(values)
}

/// Reads the rows of each table whose rows the model provides; none of the others.
pub fn read_rows(job_dir: &Path, model: &ModelSpec) -> Result<Vec<Vec<f32>>, Error> {
    let mut rows = vec![Vec::new(); model.tables.len()];
    if model.brings_first_rows() {
        let file = File::read(job_dir)?;
        for (index, _) in given_tables(model) {
            rows[index] = file.tensor(&rows_of(index))?;
        }
    }
    Ok(rows)
}

/// A file that was read.
struct File<'a> {
    job_dir: &'a Path,
    bytes: Vec<u8>,
}

impl<'a> File<'a> {
    fn read(job_dir: &'a Path) -> Result<Self, Error> {
        let path = job_dir.join(FILE);
        let bytes = fs::read(&path).map_err(at("read", &path))?;
        Ok(Self { job_dir, bytes })
    }

    fn tensor(&self, name: &str) -> Result<Vec<f32>, Error> {
        let tensors = SafeTensors::deserialize(&self.bytes);
        let tensors = tensors.map_err(|error| unreadable(self.job_dir, error))?;
        let tensor = tensors.tensor(name).map_err(|error| unreadable(self.job_dir, error))?;
        if tensor.dtype() != Dtype::F32 {
            return Err(unreadable(self.job_dir, format!("`{name}` is not single precision")));
        }
        Ok(tensor.data().as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect())
    }
}

fn unreadable(job_dir: &Path, problem: impl ToString) -> Error {
    Error::Unreadable { path: job_dir.join(FILE), problem: problem.to_string() }
}

/// Writes the initial state of a training script, unless it exists.
pub fn write_state(job_dir: &Path, state: &[u8]) -> Result<(), Error> {
    write_once(job_dir, STATE_FILE, state)?;
    Ok(())
}

/// Reads the initial state of a training script.
pub fn read_state(job_dir: &Path) -> Result<Vec<u8>, Error> {
    let path = job_dir.join(STATE_FILE);
    Ok(fs::read(&path).map_err(at("read", &path))?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use edl_core::id::PartitionId;
    use edl_core::layout::Layout;
    use edl_core::optimizer::OptimizerSpec;
    use edl_core::spec::Mode;

    use super::*;
    use crate::checkpoint::Origin;
    use crate::partition::PartitionConfig;

    #[test]
    fn of_two_writers_the_first_wins_and_nothing_is_left_over() {
        let dir = tempfile::tempdir().unwrap();
        let offer = |number: f32| write(dir.path(), &vec![number; 100_000]).unwrap();
        let won: Vec<bool> = std::thread::scope(|scope| {
            let writers: Vec<_> =
                (0..8_u8).map(|n| scope.spawn(move || offer(f32::from(n)))).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        let winner = won.iter().position(|won| *won).unwrap();
        assert_eq!(won.iter().filter(|won| **won).count(), 1);
        let values = read(dir.path(), 100_000).unwrap();
        assert!(values == vec![winner as f32; 100_000]);
        assert!(!offer(9.0));
        assert_eq!(read(dir.path(), 100_000).unwrap(), values);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn given_rows_are_created_only_in_the_partitions_of_their_ids() {
        let dir = tempfile::tempdir().unwrap();
        let table = |name: &str, init| TableSpec { name: name.into(), dim: 2, init };
        let model = Arc::new(ModelSpec {
            name: "m".into(),
            params: Vec::new(),
            tables: vec![table("drawn", Init::Constant(0.5)), table("words", Init::Given)],
            inputs: Vec::new(),
            metrics: Vec::new(),
            optimizer: OptimizerSpec::sgd(0.1),
        });
        let words: Vec<f32> = (0..20_u8).map(f32::from).collect();
        let tensors = [(DENSE.to_owned(), vec![0], vec![]), (rows_of(1), vec![10, 2], words)];
        assert!(write_tensors(dir.path(), tensors.to_vec()).unwrap());
        let origin = Origin::first_values(&model, dir.path()).unwrap();
        let mut found = BTreeMap::new();
        for id in 0..3 {
            let partition = origin.make(PartitionConfig {
                id: PartitionId(id),
                layout: Layout::shared(0, 3),
                model: Arc::clone(&model),
                optimizer: OptimizerSpec::sgd(0.1),
                seed: 0,
                n_batches: 1,
                mode: Mode::Async,
                lr_staleness_modulation: false,
            });
            let partition = partition.unwrap();
            let [drawn, words] = partition.tables() else { panic!() };
            assert_eq!(drawn.n_rows(), 0);
            found.extend(words.slab().rows().map(|(id, row)| (id, [row[0], row[1]])));
        }
        let expected = (0..10_u8).map(|id| (id.into(), [f32::from(2 * id), f32::from(2 * id + 1)]));
        assert_eq!(found, expected.collect());
    }

    #[test]
    fn a_missing_or_unfit_file_is_an_error_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |len: usize| read(dir.path(), len).unwrap_err().to_string();
        assert!(refused(3).contains("cannot read `") && refused(3).contains(FILE));
        write(dir.path(), &[1.0, f32::NAN]).unwrap();
        assert!(read(dir.path(), 2).unwrap()[1].is_nan());
        assert!(refused(3).contains("has 2 initial values, but the model has 3 parameters"));
        let path = dir.path().join(FILE);
        let file = fs::read(&path).unwrap();
        for len in 0..file.len() {
            fs::write(&path, &file[..len]).unwrap();
            assert!(refused(2).contains("is not a file of initial values"), "{len} bytes");
        }
    }
}
